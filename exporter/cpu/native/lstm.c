/* pythonop.cpu::Lstm and pythonop.cpu::LstmGrad: all steps of a plain LSTM, and of its gradient.
 *
 * No file has these nodes: exporter/cpu/recurrences.py makes them in memory of the Scans that symbolics/graph/lstm.py describes,
 * with the same inputs and outputs, float32. A step is one task for each PANEL columns of the state; the weights are laid out once. They
 * hold no Python object and take no lock in a run, and every shape is compared before anything is read.
 *
 *   Lstm      h (B, H), c (B, H), x (T, B, 4H), weights (H, 4H), maybe bias (4H) -> h, c, all h (T, B, H), slopes (T, B, 4H), pass_on, kept (T, B, H)
 *   LstmGrad  dh, dc (B, H), slopes, pass_on, kept, weights (4H, H), maybe dy (T, B, H) -> dh, dc, dx (T, B, 4H)
 */
#include "kernels.h"
#include "steps.h"

enum { GATES = 4 };

/* ------------------------------------------------------------------------------------------------- one row of a step */

/* n units: i, o, f, g from the products and from x, as `lstm_step` writes them. c is read and written. */
WIDEST FUSING static void cell(size_t n, const float *restrict products, size_t apart, const float *restrict x, float *restrict c, float *restrict h,
                               float *restrict slopes, size_t hidden, float *restrict pass_on, float *restrict kept)
{
    NO_DEPENDENCY
    for (size_t j = 0; j < n; j++) {
        float i = sigmoid(products[j] + x[j]), o = sigmoid(products[apart + j] + x[hidden + j]);
        float f = sigmoid(products[2 * apart + j] + x[2 * hidden + j]), g = hyperbolic(products[3 * apart + j] + x[3 * hidden + j]);
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
WIDEST FUSING static void cell_back(size_t n, const float *restrict dh, float *restrict dc, const float *restrict slopes, size_t hidden,
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

static void forward_task(void *data, size_t block)
{
    const Steps *run = data;
    size_t hidden = run->hidden, wide = GATES * hidden, first = block * PANEL, n = columns_of(run, first);
    float products[GATES][ROWS * PANEL];
    for (size_t row = 0; row < run->batch; row += ROWS) {
        size_t rows = run->batch - row < ROWS ? run->batch - row : ROWS;
        size_t here = row * hidden + first, at = run->step * run->batch * hidden + here, gates = (run->step * run->batch + row) * wide + first;
        multiply_gates(run, products, block, row, rows, run->read[4]);
        for (size_t i = 0; i < rows; i++, here += hidden, at += hidden, gates += wide)
            cell(n, products[0] + i * PANEL, ROWS * PANEL, run->read[2] + gates, run->made[1] + here, run->made[2] + at, run->made[3] + gates, hidden,
                 run->made[4] + at, run->made[5] + at);
    }
}

/* dh of a step from the one behind it, then what the step makes of it; with no step left, dh alone. */
static void backward_task(void *data, size_t block)
{
    const Steps *run = data;
    size_t hidden = run->hidden, wide = GATES * hidden, first = block * PANEL, n = columns_of(run, first);
    float dh[ROWS * PANEL];
    for (size_t row = 0; row < run->batch; row += ROWS) {
        size_t rows = run->batch - row < ROWS ? run->batch - row : ROWS;
        size_t here = row * hidden + first, at = run->step * run->batch * hidden + here, gates = (run->step * run->batch + row) * wide + first;
        memset(dh, 0, sizeof dh);
        if (run->first)
            for (size_t i = 0; i < rows; i++)
                memcpy(dh + i * PANEL, run->read[0] + (row + i) * hidden + first, n * sizeof(float));
        else
            run->multiply(rows, dh, run->before + row * wide, wide, run->panels + block * wide * PANEL, wide);
        for (size_t i = 0; i < rows; i++, here += hidden, at += hidden, gates += wide) {
            if (run->step == run->time) {
                memcpy(run->made[0] + here, dh + i * PANEL, n * sizeof(float));
                continue;
            }
            if (run->read[6])
                for (size_t j = 0; j < n; j++)
                    dh[i * PANEL + j] += run->read[6][at + j];
            cell_back(n, dh + i * PANEL, run->made[1] + here, run->read[2] + gates, hidden, run->read[3] + at, run->read[4] + at, run->made[2] + gates);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- all steps */

static Status all_forward(Steps *run, void *context, int backwards)
{
    size_t state = run->batch * run->hidden;
    Status status = NULL;
    lay_out_gates(run, run->read[3]);
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

static Status all_backward(Steps *run, void *context, int backwards)
{
    size_t state = run->batch * run->hidden, wide = GATES * run->hidden;
    Status status = NULL;
    lay_out_states(run, run->read[5]);
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

static const char *const LSTM_READ[] = {"BH", "BH", "TBG", "HG", "G"}, *const LSTM_MADE[] = {"BH", "BH", "TBH", "TBG", "TBH", "TBH"};
static const char *const LSTM_GRAD_READ[] = {"BH", "BH", "TBG", "TBH", "TBH", "GH", "TBH"}, *const LSTM_GRAD_MADE[] = {"BH", "BH", "TBG"};

static Status lstm(const Recurrence *how, void *context, int grad)
{
    Steps run = {.wrong = "an LSTM's inputs do not fit each other: one has another type or shape than the file says (value_info)", .gates = GATES,
                 .multiply = multiply_panel()};
    size_t given = 0;
    Status status = CALL(INPUT_COUNT, Status(*)(const void *, size_t *))(context, &given);
    if (!status)
        status = grad ? open_run(&run, context, 2, LSTM_GRAD_READ, given, LSTM_GRAD_MADE, 3) : open_run(&run, context, 2, LSTM_READ, given, LSTM_MADE, 6);
    return run_steps(&run, context, status, grad ? all_backward : all_forward, how->backwards);
}

Status lstm_compute(void *state, void *context) { return lstm(state, context, 0); }
Status lstm_grad_compute(void *state, void *context) { return lstm(state, context, 1); }

static Status create_lstm(const void *info, int grad, void **out)
{
    size_t inputs = 0, outputs = 0;
    Status status = count_places(info, &inputs, &outputs);
    int fits = grad ? (inputs == 6 || inputs == 7) && outputs == 3 : (inputs == 4 || inputs == 5) && outputs == 6;
    return status ? status
                  : recurrence_create(info, fits, "pythonop.cpu::Lstm and LstmGrad stand for no operators: no file has these nodes, inference_session makes them in memory", out);
}

Status lstm_create(const CustomOp *op, const void *const *table, const void *info, void **out)
{
    (void)op, (void)table;
    return create_lstm(info, 0, out);
}

Status lstm_grad_create(const CustomOp *op, const void *const *table, const void *info, void **out)
{
    (void)op, (void)table;
    return create_lstm(info, 1, out);
}
