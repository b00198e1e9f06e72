/* pythonop::Lstm and pythonop::LstmGrad: all steps of a plain LSTM, and of its gradient. Part of native.c, its only user.
 *
 * No file has these nodes: exporter/runtime/fusion/recurrences.py makes them in memory of the Scans that symbolics/graph/lstm.py describes,
 * with the same inputs and outputs, float32. A step is one task for each PANEL columns of the state; the weights are laid out once. They
 * hold no Python object and take no lock in a run, and every shape is compared before anything is read.
 *
 *   Lstm      h (B, H), c (B, H), x (T, B, 4H), weights (H, 4H) -> h, c, all h (T, B, H), slopes (T, B, 4H), pass_on, kept (T, B, H)
 *   LstmGrad  dh, dc (B, H), slopes, pass_on, kept, weights (4H, H), maybe dy (T, B, H) -> dh, dc, dx (T, B, 4H)
 */
#ifndef PYTHONOP_NATIVE_LSTM_H
#define PYTHONOP_NATIVE_LSTM_H

#include "native_elementwise.h"
#include "native_panels.h"

enum { ROWS = 16, GATES = 4, FEW_PRODUCTS = 1 << 19 }; /* rows at once; of fewer products a step, one thread is quicker */

typedef struct {
    Binding *binding; /* as Program has it, at the same place */
    int backwards;    /* from the last step to the first */
} Recurrence;

/* Sizes, memory, and where a run is. Places of tensors are as the operators list them. */
typedef struct {
    size_t time, batch, hidden, step;
    const float *read[7];
    float *made[6], *panels;
    const float *before; /* forward: h of the step before; backward: gradients before the activations, of the step behind */
    int first;           /* backward: dh is given, not yet made */
    MultiplyPanel multiply;
} Lstm;

/* ---------------------------------------------------------------------------------------- functions of one number */

typedef union { float number; uint32_t bits; } Bits;

/* 2^n e^r with x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial (relative error 2e-9) for e^r. From 88.4 on it is infinite, so that gates
 * are 0 as eager has them: huge states times what is nearly 0 would leak. */
static inline float exponential(float x)
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

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/* A polynomial (relative error 3e-9) where 1 - 2 / (e^2x + 1) would lose digits. */
static inline float hyperbolic(float x)
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

/* ------------------------------------------------------------------------------------------------- one row of a step */

/* n units: i, o, f, g from the gates, as `lstm_step` writes them. c is read and written. */
WIDEST static void cell(size_t n, const float *restrict gates, size_t apart, float *restrict c, float *restrict h, float *restrict slopes,
                        size_t hidden, float *restrict pass_on, float *restrict kept)
{
    NO_DEPENDENCY
    for (size_t j = 0; j < n; j++) {
        float i = sigmoid(gates[j]), o = sigmoid(gates[apart + j]), f = sigmoid(gates[2 * apart + j]), g = hyperbolic(gates[3 * apart + j]);
        float old = f * c[j], added = i * g, now = old + added, squashed = hyperbolic(now), state = o * squashed;
        slopes[j] = added * (1.0f - i);
        slopes[hidden + j] = state * (1.0f - o);
        slopes[2 * hidden + j] = old * (1.0f - f);
        slopes[3 * hidden + j] = i - added * g;
        pass_on[j] = o - state * squashed;
        kept[j] = f;
        h[j] = state;
        c[j] = now;
    }
}

/* As `lstm_backward_step` writes it: dh is whole, dc is read and written. */
WIDEST static void cell_back(size_t n, const float *restrict dh, float *restrict dc, const float *restrict slopes, size_t hidden,
                             const float *restrict pass_on, const float *restrict kept, float *restrict dx)
{
    NO_DEPENDENCY
    for (size_t j = 0; j < n; j++) {
        float whole = dc[j] + dh[j] * pass_on[j];
        dx[j] = whole * slopes[j];
        dx[hidden + j] = dh[j] * slopes[hidden + j];
        dx[2 * hidden + j] = whole * slopes[2 * hidden + j];
        dx[3 * hidden + j] = whole * slopes[3 * hidden + j];
        dc[j] = whole * kept[j];
    }
}

/* ---------------------------------------------------------------------------------------------- one task of a step */

static size_t columns_of(const Lstm *run, size_t first) { return run->hidden - first < PANEL ? run->hidden - first : PANEL; }

static void forward_task(void *data, size_t block)
{
    const Lstm *run = data;
    size_t hidden = run->hidden, first = block * PANEL, n = columns_of(run, first);
    float gates[GATES][ROWS * PANEL];
    for (size_t row = 0; row < run->batch; row += ROWS) {
        size_t rows = run->batch - row < ROWS ? run->batch - row : ROWS;
        for (size_t gate = 0; gate < GATES; gate++) {
            memset(gates[gate], 0, sizeof gates[gate]);
            for (size_t i = 0; i < rows; i++)
                memcpy(gates[gate] + i * PANEL, run->read[2] + ((run->step * run->batch + row + i) * GATES + gate) * hidden + first, n * sizeof(float));
            run->multiply(rows, gates[gate], run->before + row * hidden, hidden, run->panels + (block * GATES + gate) * hidden * PANEL, hidden);
        }
        for (size_t i = 0; i < rows; i++) {
            size_t here = (row + i) * hidden + first, at = run->step * run->batch * hidden + here;
            cell(n, gates[0] + i * PANEL, ROWS * PANEL, run->made[1] + here, run->made[2] + at,
                 run->made[3] + ((run->step * run->batch + row + i) * GATES) * hidden + first, hidden, run->made[4] + at, run->made[5] + at);
        }
    }
}

/* dh of a step from the one behind it, then what the step makes of it; with no step left, dh alone. */
static void backward_task(void *data, size_t block)
{
    const Lstm *run = data;
    size_t hidden = run->hidden, wide = GATES * hidden, first = block * PANEL, n = columns_of(run, first);
    float dh[ROWS * PANEL];
    for (size_t row = 0; row < run->batch; row += ROWS) {
        size_t rows = run->batch - row < ROWS ? run->batch - row : ROWS;
        memset(dh, 0, sizeof dh);
        if (run->first)
            for (size_t i = 0; i < rows; i++)
                memcpy(dh + i * PANEL, run->read[0] + (row + i) * hidden + first, n * sizeof(float));
        else
            run->multiply(rows, dh, run->before + row * wide, wide, run->panels + block * wide * PANEL, wide);
        for (size_t i = 0; i < rows; i++) {
            size_t here = (row + i) * hidden + first, at = run->step * run->batch * hidden + here, slopes = (run->step * run->batch + row + i) * wide + first;
            if (run->step == run->time) {
                memcpy(run->made[0] + here, dh + i * PANEL, n * sizeof(float));
                continue;
            }
            if (run->read[6])
                for (size_t j = 0; j < n; j++)
                    dh[i * PANEL + j] += run->read[6][at + j];
            cell_back(n, dh + i * PANEL, run->made[1] + here, run->read[2] + slopes, hidden, run->read[3] + at, run->read[4] + at, run->made[2] + slopes);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- all steps */

static Status each_block(Lstm *run, void *context, void (*task)(void *, size_t))
{
    size_t blocks = panels(run->hidden);
    if (blocks > 1 && run->batch * GATES * run->hidden >= FEW_PRODUCTS / run->hidden)
        return CALL(PARALLEL_FOR, Status(*)(const void *, void (*)(void *, size_t), size_t, size_t, void *))(context, task, blocks, 0, run);
    for (size_t block = 0; block < blocks; block++)
        task(run, block);
    return NULL;
}

static Status all_forward(Lstm *run, void *context, int backwards)
{
    size_t hidden = run->hidden, state = run->batch * hidden;
    Status status = NULL;
    for (size_t block = 0; block < panels(hidden); block++)
        for (size_t gate = 0; gate < GATES; gate++)
            lay_out_panel(run->panels + (block * GATES + gate) * hidden * PANEL, run->read[3] + gate * hidden + block * PANEL, hidden, GATES * hidden, 1,
                          columns_of(run, block * PANEL));
    memcpy(run->made[1], run->read[1], state * sizeof(float));
    run->before = run->read[0];
    for (size_t k = 0; !status && k < run->time; k++) {
        run->step = backwards ? run->time - 1 - k : k;
        status = each_block(run, context, forward_task);
        run->before = run->made[2] + run->step * state;
    }
    memcpy(run->made[0], run->before, state * sizeof(float));
    return status;
}

static Status all_backward(Lstm *run, void *context, int backwards)
{
    size_t hidden = run->hidden, state = run->batch * hidden, wide = GATES * hidden;
    Status status = NULL;
    for (size_t block = 0; block < panels(hidden); block++)
        lay_out_panel(run->panels + block * wide * PANEL, run->read[5] + block * PANEL, wide, hidden, 1, columns_of(run, block * PANEL));
    memcpy(run->made[1], run->read[1], state * sizeof(float));
    run->first = 1;
    for (size_t k = 0; !status && k <= run->time; k++) {
        run->step = k == run->time ? k : backwards ? run->time - 1 - k : k;
        status = each_block(run, context, backward_task);
        run->before = run->made[2] + run->step * run->batch * wide;
        run->first = 0;
    }
    return status;
}

/* ------------------------------------------------------------------------------------------------ inputs and outputs */

/* The shape of a tensor of an operator: so many of time, batch, hidden and 4 hidden, by letters. */
static size_t dims_of(const Lstm *run, const char *letters, int64_t *dims)
{
    size_t rank = 0;
    for (; letters[rank]; rank++)
        dims[rank] = (int64_t)(letters[rank] == 'T' ? run->time : letters[rank] == 'B' ? run->batch : letters[rank] == 'H' ? run->hidden : GATES * run->hidden);
    return rank;
}

static Status wrong_shape(void) { return refused("an LSTM's inputs do not fit each other: one has another type or shape than the file says (value_info)"); }

static const char *const FORWARD_READ[] = {"BH", "BH", "TBG", "HG"}, *const FORWARD_MADE[] = {"BH", "BH", "TBH", "TBG", "TBH", "TBH"};
static const char *const BACKWARD_READ[] = {"BH", "BH", "TBG", "TBH", "TBH", "GH", "TBH"}, *const BACKWARD_MADE[] = {"BH", "BH", "TBG"};

/* Sizes are those of the third input and the first; every other tensor is compared with them. */
static Status open_run(Lstm *run, void *context, const char *const *read, size_t inputs, const char *const *made, size_t outputs)
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
            return refused("an input of an LSTM is missing");
    if ((status = tensor_facts(values[2], &kind, &rank, dims, DIMS_MOST, &count)))
        return status;
    if (rank != 3)
        return wrong_shape();
    run->time = (size_t)dims[0];
    run->batch = (size_t)dims[1];
    if ((status = tensor_facts(values[0], &kind, &rank, dims, DIMS_MOST, &count)))
        return status;
    if (rank != 2 || (run->hidden = (size_t)dims[1]) > (size_t)PTRDIFF_MAX / GATES / sizeof(float))
        return wrong_shape();
    for (size_t i = 0; i < inputs; i++) {
        size_t expected = dims_of(run, read[i], wanted);
        if ((status = tensor_facts(values[i], &kind, &rank, dims, DIMS_MOST, &count)))
            return status;
        if (kind != ONNX_FLOAT || rank != expected || memcmp(dims, wanted, rank * sizeof *dims))
            return wrong_shape();
        if ((status = CALL(TENSOR_DATA, Status(*)(const void *, void **))(values[i], (void **)&run->read[i])))
            return status;
    }
    for (size_t i = 0; i < outputs; i++) {
        size_t expected = dims_of(run, made[i], wanted);
        if ((status = make_output(context, i, wanted, expected, ONNX_FLOAT, "an output of an LSTM has no name",
                                  "an output of an LSTM has another type than the file says", (void **)&run->made[i])))
            return status;
    }
    return NULL;
}

static Status lstm(const Recurrence *how, void *context, int grad)
{
    Lstm run = {.multiply = multiply_panel()};
    size_t given = 0;
    Status status = CALL(INPUT_COUNT, Status(*)(const void *, size_t *))(context, &given);
    if (status || (status = grad ? open_run(&run, context, BACKWARD_READ, given, BACKWARD_MADE, 3) : open_run(&run, context, FORWARD_READ, given, FORWARD_MADE, 6)))
        return status;
    if (!run.batch || !run.hidden)
        return NULL; /* nothing to write, however many steps */
    run.panels = malloc(panels(run.hidden) * PANEL * GATES * run.hidden * sizeof(float));
    if (!run.panels)
        return refused("an LSTM: no memory for its weights");
    status = grad ? all_backward(&run, context, how->backwards) : all_forward(&run, context, how->backwards);
    free(run.panels);
    return status;
}

static Status lstm_compute(void *state, void *context) { return lstm(state, context, 0); }
static Status lstm_grad_compute(void *state, void *context) { return lstm(state, context, 1); }

static Status lstm_create(const CustomOp *op, const void *const *table, const void *info, void **out)
{
    (void)table;
    int64_t backwards = -1;
    size_t inputs = 0, outputs = 0;
    Status status = CALL(ATTR_INT, Status(*)(const void *, const char *, int64_t *))(info, "backwards", &backwards);
    if (status || (status = count_places(info, &inputs, &outputs)))
        return status;
    int good = op->kind == LSTM ? inputs == 4 && outputs == 6 : (inputs == 6 || inputs == 7) && outputs == 3;
    Recurrence *how = good && (backwards == 0 || backwards == 1) ? calloc(1, sizeof *how) : NULL;
    if (!how)
        return refused("pythonop::Lstm and LstmGrad stand for no operators: no file has these nodes, inference_session makes them in memory");
    how->binding = hold(op);
    how->backwards = (int)backwards;
    *out = how;
    return NULL;
}

#endif
