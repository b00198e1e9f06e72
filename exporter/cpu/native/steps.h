/* What the recurrences share: their steps, in tasks, and how their tensors are compared. Included by lstm.c and gru.c.
 */
#ifndef PYTHONOP_CPU_STEPS_H
#define PYTHONOP_CPU_STEPS_H

#include "tensors.h"
#include "panels.h"
#include "vectors.h"

enum { ROWS = 16, FEW_PRODUCTS = 1 << 19 }; /* rows at once; of fewer products a step, one thread is quicker */

typedef struct {
    int backwards;    /* from the last step to the first */
} Recurrence;

/* Sizes, memory, and where a run is. Places of tensors are as the operators list them. */
typedef struct {
    const char *wrong; /* what is said where shapes do not fit */
    size_t time, batch, hidden, gates, step;
    const float *read[7];
    float *made[6], *panels;
    const float *before; /* forward: h of the step before; backward: gradients before the activations, of the step behind */
    int first;           /* backward: dh is given, not yet made */
    MultiplyPanel multiply;
} Steps;

/* ---------------------------------------------------------------------------------------- functions of one number */

#ifdef __GNUC__
#define FUSING __attribute__((FUSED))
#define INTO_FUSING __attribute__((FUSED always_inline))
#else
#define FUSING
#define INTO_FUSING
#endif

typedef union { float number; uint32_t bits; } Bits;

/* 2^n e^r with x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial (relative error 2e-9) for e^r. From 88.4 on it is infinite, so that gates
 * are 0 as eager has them: huge states times what is nearly 0 would leak. */
INTO_FUSING static inline float exponential(float x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded to a whole number, which its last bits say */
    x = x > 89.0f ? 89.0f : x; /* n = 128: the exponent of infinity */
    x = x < -87.0f ? -87.0f : x;
    Bits whole = {x * 1.44269504f + shift}, scale;
    float n = whole.number - shift, r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    scale.bits = (whole.bits + 127) << 23;
    float p = 0.00138368f;
    p = p * r + 0.00837482f;
    p = p * r + 0.04166823f;
    p = p * r + 0.1666642f;
    p = p * r + 0.49999992f;
    p = p * r + 1.00000004f;
    p = p * r + 1.0f;
    return p * scale.number;
}

INTO_FUSING static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/* A polynomial (relative error 3e-9) where 1 - 2 / (e^2x + 1) would lose digits. */
INTO_FUSING static inline float hyperbolic(float x)
{
    float size = x < 0 ? -x : x, far = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f), s = x * x;
    float p = -0.00585216f;
    p = p * s + 0.02075362f;
    p = p * s + -0.0537687f;
    p = p * s + 0.13331689f;
    p = p * s + -0.33333283f;
    p = p * s + 1.0f;
    float near = p * x;
    return size < 0.6f ? near : x < 0 ? -far : far; /* NaN: far */
}

/* ------------------------------------------------------------------------------------------------------------ steps */

static size_t columns_of(const Steps *run, size_t first) { return run->hidden - first < PANEL ? run->hidden - first : PANEL; }

/* Weights (H, gates H), a panel for each gate of each block of states. */
static void lay_out_gates(const Steps *run, const float *weights)
{
    for (size_t block = 0; block < panels(run->hidden); block++)
        for (size_t gate = 0; gate < run->gates; gate++)
            lay_out_panel(run->panels + (block * run->gates + gate) * run->hidden * PANEL, weights + gate * run->hidden + block * PANEL, run->hidden,
                          run->gates * run->hidden, 1, columns_of(run, block * PANEL));
}

/* Weights (gates H, H), a panel for each block of states. */
static void lay_out_states(const Steps *run, const float *weights)
{
    size_t wide = run->gates * run->hidden;
    for (size_t block = 0; block < panels(run->hidden); block++)
        lay_out_panel(run->panels + block * wide * PANEL, weights + block * PANEL, wide, run->hidden, 1, columns_of(run, block * PANEL));
}

/* products (gates, ROWS x PANEL) = a row, maybe, and some rows of the states before times the panels of all gates of a block. */
static void multiply_gates(const Steps *run, float (*products)[ROWS * PANEL], size_t block, size_t row, size_t rows, const float *added)
{
    size_t first = block * PANEL, n = columns_of(run, first);
    for (size_t gate = 0; gate < run->gates; gate++) {
        memset(products[gate], 0, sizeof products[gate]);
        for (size_t i = 0; added && i < rows; i++)
            memcpy(products[gate] + i * PANEL, added + gate * run->hidden + first, n * sizeof(float));
        run->multiply(rows, products[gate], run->before + row * run->hidden, run->hidden, run->panels + (block * run->gates + gate) * run->hidden * PANEL, run->hidden);
    }
}

/* A step, one task for each panel of the states. */
static Status each_block(Steps *run, void *context, void (*task)(void *, size_t))
{
    size_t blocks = panels(run->hidden);
    if (blocks > 1 && run->batch * run->gates * run->hidden >= FEW_PRODUCTS / run->hidden)
        return in_parallel(context, task, blocks, run);
    for (size_t block = 0; block < blocks; block++)
        task(run, block);
    return NULL;
}

/* ------------------------------------------------------------------------------------------------ inputs and outputs */

/* The shape of a tensor of an operator: so many of time, batch, hidden and all gates, by letters. */
static size_t dims_of(const Steps *run, const char *letters, int64_t *dims)
{
    size_t rank = 0;
    for (; letters[rank]; rank++)
        dims[rank] = (int64_t)(letters[rank] == 'T' ? run->time : letters[rank] == 'B' ? run->batch : letters[rank] == 'H' ? run->hidden : run->gates * run->hidden);
    return rank;
}

/* Sizes are those of the first input and of the one at `timed`; every other tensor is compared with them. */
static Status open_run(Steps *run, void *context, size_t timed, const char *const *read, size_t inputs, const char *const *made, size_t outputs)
{
    int64_t dims[DIMS_MOST], wanted[DIMS_MOST];
    size_t rank = 0, count = 0;
    int kind = 0;
    const void *values[7] = {NULL};
    Status status;
    for (size_t i = 0; i < inputs; i++)
        if ((status = CALL(INPUT, Status(*)(const void *, size_t, const void **))(context, i, &values[i])))
            return status;
        else if (!values[i])
            return refused("an input of a recurrence is missing");
    if ((status = tensor_facts(values[timed], &kind, &rank, dims, DIMS_MOST, &count)))
        return status;
    if (rank != 3)
        return refused(run->wrong);
    run->time = (size_t)dims[0];
    run->batch = (size_t)dims[1];
    if ((status = tensor_facts(values[0], &kind, &rank, dims, DIMS_MOST, &count)))
        return status;
    if (rank != 2 || (run->hidden = (size_t)dims[1]) > (size_t)PTRDIFF_MAX / run->gates / sizeof(float))
        return refused(run->wrong);
    for (size_t i = 0; i < inputs; i++) {
        size_t expected = dims_of(run, read[i], wanted);
        if ((status = tensor_facts(values[i], &kind, &rank, dims, DIMS_MOST, &count)))
            return status;
        if (kind != ONNX_FLOAT || rank != expected || memcmp(dims, wanted, rank * sizeof *dims))
            return refused(run->wrong);
        if ((status = CALL(TENSOR_DATA, Status(*)(const void *, void **))(values[i], (void **)&run->read[i])))
            return status;
    }
    for (size_t i = 0; i < outputs; i++) {
        size_t expected = dims_of(run, made[i], wanted);
        if ((status = make_output(context, i, wanted, expected, ONNX_FLOAT, "an output of a recurrence has no name",
                                  "an output of a recurrence has another type than the file says", (void **)&run->made[i])))
            return status;
    }
    return NULL;
}

/* One run: tensors are opened as told, then all steps run with room for the weights' panels. */
static Status run_steps(Steps *run, void *context, Status opened, Status (*all)(Steps *, void *, int), int backwards)
{
    if (opened || !run->batch || !run->hidden)
        return opened; /* nothing to write, however many steps */
    run->panels = malloc(panels(run->hidden) * PANEL * run->gates * run->hidden * sizeof(float));
    if (!run->panels)
        return refused("a recurrence: no memory for its weights");
    Status status = all(run, context, backwards);
    free(run->panels);
    return status;
}

/* The state of a node that has the right numbers of inputs and outputs; `nothing` is said of any other. */
static Status recurrence_create(const void *info, int fits, const char *nothing, void **out)
{
    int64_t backwards = -1;
    Status status = CALL(ATTR_INT, Status(*)(const void *, const char *, int64_t *))(info, "backwards", &backwards);
    if (status)
        return status;
    Recurrence *how = fits && (backwards == 0 || backwards == 1) ? calloc(1, sizeof *how) : NULL;
    if (!how)
        return refused(nothing);
    how->backwards = (int)backwards;
    *out = how;
    return NULL;
}

#endif
