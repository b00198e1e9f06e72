/* pythonop.cpu::Gru and pythonop.cpu::GruGrad: all steps of a plain GRU whose reset gate stands behind the product, and of its gradient.
 *
 * No file has these nodes: exporter/cpu/recurrences.py makes them in memory of the Scans that symbolics/graph/gru.py describes, with the
 * same inputs and outputs, float32. As lstm.c has it.
 *
 *   Gru      h (B, H), x (T, B, 3H), weights (H, 3H), bias (3H) -> h, all h (T, B, H), slopes (T, B, 3H), of_new, kept (T, B, H)
 *   GruGrad  dh (B, H), slopes, of_new, kept, weights (3H, H), maybe dy (T, B, H) -> dh, gradients of the products and of x (T, B, 3H)
 */
#include "kernels.h"
#include "steps.h"

enum { PARTS = 3 };

/* ------------------------------------------------------------------------------------------------- one row of a step */

/* n units: z, r, n from the products and from x, as `gru_step` writes them. */
WIDEST FUSING static void gru_cell(size_t n, const float *restrict products, size_t apart, const float *restrict x, const float *restrict before,
                                   float *restrict h, float *restrict slopes, size_t hidden, float *restrict of_new, float *restrict kept)
{
    NO_DEPENDENCY
    for (size_t j = 0; j < n; j++) {
        float z = sigmoid(x[j] + products[j]), r = sigmoid(x[hidden + j] + products[apart + j]), inner = products[2 * apart + j];
        float new = hyperbolic(x[2 * hidden + j] + r * inner), away = before[j] - new, slope = (1.0f - z) * (1.0f - new * new), reset = slope * r;
        slopes[j] = away * z * (1.0f - z);
        slopes[hidden + j] = reset * inner * (1.0f - r);
        slopes[2 * hidden + j] = reset;
        of_new[j] = slope;
        kept[j] = z;
        h[j] = new + z * away;
    }
}

/* As `gru_backward_step` writes it: dh is whole; what passes the products by is left for the step before. */
WIDEST FUSING static void gru_cell_back(size_t n, const float *restrict dh, const float *restrict slopes, size_t hidden, const float *restrict of_new,
                                        const float *restrict kept, float *restrict da, float *restrict dx, float *restrict beside)
{
    NO_DEPENDENCY
    for (size_t j = 0; j < n; j++) {
        float z = dh[j] * slopes[j], r = dh[j] * slopes[hidden + j];
        da[j] = z, dx[j] = z;
        da[hidden + j] = r, dx[hidden + j] = r;
        da[2 * hidden + j] = dh[j] * slopes[2 * hidden + j];
        dx[2 * hidden + j] = dh[j] * of_new[j];
        beside[j] = dh[j] * kept[j];
    }
}

/* ---------------------------------------------------------------------------------------------- one task of a step */

static void gru_task(void *data, size_t block)
{
    const Steps *run = data;
    size_t hidden = run->hidden, wide = PARTS * hidden, first = block * PANEL, n = columns_of(run, first);
    float products[PARTS][ROWS * PANEL];
    for (size_t row = 0; row < run->batch; row += ROWS) {
        size_t rows = run->batch - row < ROWS ? run->batch - row : ROWS;
        multiply_gates(run, products, block, row, rows, run->read[3]);
        for (size_t i = 0; i < rows; i++) {
            size_t here = (run->step * run->batch + row + i) * hidden + first, gates = (run->step * run->batch + row + i) * wide + first;
            gru_cell(n, products[0] + i * PANEL, ROWS * PANEL, run->read[1] + gates, run->before + (row + i) * hidden + first, run->made[1] + here,
                     run->made[2] + gates, hidden, run->made[3] + here, run->made[4] + here);
        }
    }
}

/* dh of a step from the one behind it, then what the step makes of it; with no step left, dh alone. */
static void gru_grad_task(void *data, size_t block)
{
    const Steps *run = data;
    size_t hidden = run->hidden, wide = PARTS * hidden, first = block * PANEL, n = columns_of(run, first);
    float dh[ROWS * PANEL] = {0};
    for (size_t row = 0; row < run->batch; row += ROWS) {
        size_t rows = run->batch - row < ROWS ? run->batch - row : ROWS;
        for (size_t i = 0; i < rows; i++)
            memcpy(dh + i * PANEL, run->made[0] + (row + i) * hidden + first, n * sizeof(float));
        if (!run->first)
            run->multiply(rows, dh, run->before + row * wide, wide, run->panels + block * wide * PANEL, wide);
        for (size_t i = 0; i < rows; i++) {
            size_t state = (row + i) * hidden + first, here = run->step * run->batch * hidden + state, gates = (run->step * run->batch + row + i) * wide + first;
            if (run->step == run->time) {
                memcpy(run->made[0] + state, dh + i * PANEL, n * sizeof(float));
                continue;
            }
            if (run->read[5])
                for (size_t j = 0; j < n; j++)
                    dh[i * PANEL + j] += run->read[5][here + j];
            gru_cell_back(n, dh + i * PANEL, run->read[1] + gates, hidden, run->read[2] + here, run->read[3] + here, run->made[1] + gates, run->made[2] + gates,
                          run->made[0] + state);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- all steps */

static Status gru_forward(Steps *run, void *context, int backwards)
{
    size_t state = run->batch * run->hidden;
    Status status = NULL;
    lay_out_gates(run, run->read[2]);
    run->before = run->read[0];
    for (size_t k = 0; !status && k < run->time; k++) {
        run->step = backwards ? run->time - 1 - k : k;
        status = each_block(run, context, gru_task);
        run->before = run->made[1] + run->step * state;
    }
    memcpy(run->made[0], run->before, state * sizeof(float));
    return status;
}

static Status gru_backward(Steps *run, void *context, int backwards)
{
    size_t wide = PARTS * run->hidden;
    Status status = NULL;
    lay_out_states(run, run->read[4]);
    memcpy(run->made[0], run->read[0], run->batch * run->hidden * sizeof(float));
    run->first = 1;
    for (size_t k = 0; !status && k <= run->time; k++) {
        run->step = k == run->time ? k : backwards ? run->time - 1 - k : k;
        status = each_block(run, context, gru_grad_task);
        run->before = run->made[1] + run->step * run->batch * wide;
        run->first = 0;
    }
    return status;
}

static const char *const GRU_READ[] = {"BH", "TBG", "HG", "G"}, *const GRU_MADE[] = {"BH", "TBH", "TBG", "TBH", "TBH"};
static const char *const GRU_GRAD_READ[] = {"BH", "TBG", "TBH", "TBH", "GH", "TBH"}, *const GRU_GRAD_MADE[] = {"BH", "TBG", "TBG"};

static Status gru(const Recurrence *how, void *context, int grad)
{
    Steps run = {.wrong = "a GRU's inputs do not fit each other: one has another type or shape than the file says (value_info)", .gates = PARTS,
                 .multiply = multiply_panel()};
    size_t given = 0;
    Status status = CALL(INPUT_COUNT, Status(*)(const void *, size_t *))(context, &given);
    if (!status)
        status = grad ? open_run(&run, context, 1, GRU_GRAD_READ, given, GRU_GRAD_MADE, 3) : open_run(&run, context, 1, GRU_READ, given, GRU_MADE, 5);
    return run_steps(&run, context, status, grad ? gru_backward : gru_forward, how->backwards);
}

Status gru_compute(void *state, void *context) { return gru(state, context, 0); }
Status gru_grad_compute(void *state, void *context) { return gru(state, context, 1); }

static Status create_gru(const void *info, int grad, void **out)
{
    size_t inputs = 0, outputs = 0;
    Status status = count_places(info, &inputs, &outputs);
    int fits = grad ? (inputs == 5 || inputs == 6) && outputs == 3 : inputs == 4 && outputs == 5;
    return status ? status
                  : recurrence_create(info, fits, "pythonop.cpu::Gru and GruGrad stand for no operators: no file has these nodes, inference_session makes them in memory", out);
}

Status gru_create(const CustomOp *op, const void *const *table, const void *info, void **out)
{
    (void)op, (void)table;
    return create_gru(info, 0, out);
}

Status gru_grad_create(const CustomOp *op, const void *const *table, const void *info, void **out)
{
    (void)op, (void)table;
    return create_gru(info, 1, out);
}
