/* pythonop.cpu::ConvWeightGrad: the gradient of a Conv of one group for its weights, of images of two axes.
 *
 * No file has this node: exporter/cpu/weights.py makes it in memory, float32, where the processor has AVX-512. As standard operators it
 * is a product that reads each place of an image for every position of the kernel, laid out in memory before. Here a task lays out, in the
 * caches, some rows of the gradients of 64 results, as two panels, and of the images of some channels, with the zeros around them; a row of the
 * product then begins where its kernel position does. Terms are added image by image, in their order, whatever the threads.
 *
 *   x (N, C, H, W), g (N, M, OH, OW) -> (M * C, kernel positions)
 *   `starts` are the places of the first window, negative ones before the image: what is outside of it is 0; `images` and `gradients` the
 *   shapes, -1 for an open size. Other ones are an error, since nothing else looks at what the graph says of them
 */
#include "kernels.h"
#include "panels.h"

static const char *const OTHER_IMAGES = "the file says of what a Conv and its gradient read or make other shapes than they have";

enum { NEAR = 1 << 15, TERMS = 256, SUMS = 288, RESULTS = 2 * PANEL, MANY_TASKS = 16, MOST_WIDE = 1 << 12 }; /* floats of images in a cache; terms and rows at once */
enum { MOST_KERNEL = 64, MOST_STRIDE = 16, MOST_SEEN = 1 << 24 };

typedef struct {
    int64_t kernel[2], strides[2], dilations[2], starts[2], images[4], gradients[4];
} Windows;

typedef struct {
    const Windows *how;
    size_t images, channels, results, sizes[2], outs[2], positions;
    size_t rows, together;        /* rows of windows at once, and images, where these are small */
    size_t each, blocks;          /* channels of a task, tasks for them */
    size_t high, pitch;           /* of a plane: what windows see that begin at one remainder of the strides */
    const float *x, *g;
    float *y;
    MultiplyWindows multiply;
    atomic_flag_t failed;
} ConvGrad;

static size_t tasks_of(const ConvGrad *run) { return (run->results + RESULTS - 1) / RESULTS * run->blocks; }
static size_t planes_of(const ConvGrad *run) { return (size_t)(run->how->strides[0] * run->how->strides[1]); }

/* Every so many numbers of a row of an image. */
static void take_every(float *to, size_t count, size_t step, const float *from, size_t left)
{
    if (step == 1)
        memcpy(to, from, count * sizeof *to);
    else if (step == 2)
        take_every_second(to, count, from, left);
    else
        for (size_t i = 0; i < count; i++)
            to[i] = from[i * step];
}

/* What windows from the row `top` on see of one channel of an image, a plane for each pair of remainders; zeros outside of the image. */
static void lay_out_planes(const ConvGrad *run, float *to, const float *image, size_t top)
{
    const int64_t *strides = run->how->strides, *starts = run->how->starts, high = (int64_t)run->sizes[0], wide = (int64_t)run->sizes[1];
    size_t pitch = run->pitch;
    for (int64_t down = 0; down < strides[0]; down++)
        for (int64_t along = 0; along < strides[1]; along++) {
            int64_t step = strides[1], column = along + starts[1], row = (int64_t)top * strides[0] + down + starts[0];
            int64_t outside = column < 0 ? (-column + step - 1) / step : 0;
            size_t before = outside < (int64_t)pitch ? (size_t)outside : pitch;
            column += (int64_t)before * step;
            size_t inside = column >= 0 && column < wide ? (size_t)((wide - column + step - 1) / step) : 0;
            inside = inside < pitch - before ? inside : pitch - before;
            for (size_t i = 0; i < run->high; i++, to += pitch, row += strides[0]) {
                size_t seen = row >= 0 && row < high ? inside : 0, begin = seen ? before : 0;
                for (size_t j = 0; j < begin; j++)
                    to[j] = 0;
                if (seen)
                    take_every(to + begin, seen, (size_t)step, image + row * wide + column, (size_t)(wide - column));
                for (size_t j = begin + seen; j < pitch; j++)
                    to[j] = 0;
            }
        }
}

/* Where a row of the product begins in the planes. */
static size_t begin_of(const ConvGrad *run, size_t row)
{
    const Windows *how = run->how;
    size_t position = row % run->positions, channel = row / run->positions;
    size_t y = position / (size_t)how->kernel[1] * (size_t)how->dilations[0], x = position % (size_t)how->kernel[1] * (size_t)how->dilations[1];
    size_t down = (size_t)how->strides[0], along = (size_t)how->strides[1];
    return ((channel * down + y % down) * along + x % along) * run->high * run->pitch + y / down * run->pitch + x / along;
}

static void conv_grad_task(void *data, size_t task)
{
    ConvGrad *run = data;
    size_t first = task % run->blocks * run->each, result = task / run->blocks * RESULTS, plane = planes_of(run) * run->high * run->pitch;
    size_t channels = run->channels - first < run->each ? run->channels - first : run->each, results = run->results - result < RESULTS ? run->results - result : RESULTS;
    size_t rows = channels * run->positions, groups = (rows + TOGETHER - 1) / TOGETHER, places = run->outs[0] * run->outs[1];
    /* the sums, a panel, the planes of all images at once: 64 bytes for the panel to be aligned */
    size_t terms = run->together * run->rows * run->outs[1], each = groups * TOGETHER * PANEL, all = panels(results) * each;
    float *sums = malloc((all + terms * PANEL + 16 + run->together * channels * plane) * sizeof *sums);
    const float **begins = malloc(groups * TOGETHER * sizeof *begins);
    size_t *parts_at = malloc((run->together * run->rows + 1) * sizeof *parts_at);
    if (!sums || !begins || !parts_at) {
        exchange(&run->failed, 1);
        free(sums);
        free(begins);
        free(parts_at);
        return;
    }
    memset(sums, 0, all * sizeof *sums);
    float *panel = (float *)(((uintptr_t)(sums + all) + 63) & ~(uintptr_t)63), *seen = panel + terms * PANEL;
    for (size_t row = 0; row < groups * TOGETHER; row++)
        begins[row] = seen + begin_of(run, row < rows ? row : 0); /* rows of nothing: their sums are not read */
    for (size_t image = 0; image < run->images; image += run->together)
        for (size_t top = 0; top < run->outs[0]; top += run->rows) {
            size_t some = run->outs[0] - top < run->rows ? run->outs[0] - top : run->rows, parts = 0;
            size_t together = run->images - image < run->together ? run->images - image : run->together;
            for (size_t i = 0; i < together; i++) {
                const float *x = run->x + ((image + i) * run->channels + first) * run->sizes[0] * run->sizes[1];
                for (size_t c = 0; c < channels; c++)
                    lay_out_planes(run, seen + (i * channels + c) * plane, x + c * run->sizes[0] * run->sizes[1], top);
                for (size_t y = 0; y < some; y++)
                    parts_at[parts++] = i * channels * plane + y * run->pitch;
            }
            for (size_t j = 0; j < results; j += PANEL) {
                const float *g = run->g + (image * run->results + result + j) * places + top * run->outs[1];
                for (size_t i = 0; i < together; i++, g += run->results * places)
                    lay_out_panel(panel + i * some * run->outs[1] * PANEL, g, some * run->outs[1], 1, places, results - j < PANEL ? results - j : PANEL);
                for (size_t group = 0; group < groups; group++)
                    run->multiply(sums + j / PANEL * each + group * TOGETHER * PANEL, begins + group * TOGETHER, parts_at, parts, run->outs[1], panel);
            }
        }
    for (size_t j = 0; j < results; j += PANEL)
        lay_out_columns(run->y + ((result + j) * run->channels + first) * run->positions, run->channels * run->positions, sums + j / PANEL * each, PANEL, rows,
                        results - j < PANEL ? results - j : PANEL);
    free(sums);
    free(begins);
    free(parts_at);
}

/* Sizes of a run; 0 where the two shapes do not fit what the node says. */
static int lay_out_run(ConvGrad *run, const int64_t *x, const int64_t *g)
{
    const Windows *how = run->how;
    run->images = (size_t)x[0], run->channels = (size_t)x[1], run->results = (size_t)g[1];
    run->positions = (size_t)(how->kernel[0] * how->kernel[1]);
    int64_t reach[2];
    for (size_t i = 0; i < 2; i++) {
        run->sizes[i] = (size_t)x[2 + i], run->outs[i] = (size_t)g[2 + i];
        reach[i] = (how->kernel[i] - 1) * how->dilations[i] / how->strides[i];
        if (x[2 + i] > INT32_MAX || g[2 + i] > INT32_MAX)
            return 0;
    }
    if (x[1] > INT32_MAX || g[1] > INT32_MAX) /* their product is a size of the result */
        return 0;
    run->images = run->outs[0] && run->outs[1] ? run->images : 0;
    for (size_t i = 0; i < 4; i++)
        if ((how->images[i] >= 0 && how->images[i] != x[i]) || (how->gradients[i] >= 0 && how->gradients[i] != g[i]))
            return 0;
    if (x[0] != g[0] || g[3] > MOST_WIDE)
        return 0;
    run->rows = run->outs[1] ? TERMS / run->outs[1] : 1;
    run->rows = !run->rows ? 1 : run->rows > run->outs[0] ? run->outs[0] : run->rows;
    run->high = run->rows + (size_t)reach[0], run->pitch = run->outs[1] + (size_t)reach[1];
    run->together = run->rows == run->outs[0] && run->outs[0] && run->outs[1] ? TERMS / (run->outs[0] * run->outs[1]) : 1;
    run->together = !run->together ? 1 : run->together < run->images ? run->together : run->images;
    run->each = TOGETHER;
    if (run->together * run->each * planes_of(run) * run->high * run->pitch > MOST_SEEN)
        run->together = 1;
    if (run->each * planes_of(run) * run->high * run->pitch > MOST_SEEN)
        return 0;
    for (;;) {
        run->blocks = (run->channels + run->each - 1) / run->each;
        size_t twice = 2 * run->each;
        if (tasks_of(run) <= MANY_TASKS || twice * run->positions > SUMS || twice * run->together * planes_of(run) * run->high * run->pitch > NEAR)
            return 1;
        run->each = twice;
    }
}

Status conv_grad_compute(void *state, void *context)
{
    ConvGrad run = {.how = state, .multiply = multiply_windows()};
    const float **data[2] = {&run.x, &run.g};
    int64_t dims[2][DIMS_MOST], shape[2];
    size_t rank = 0, count = 0;
    int kind = 0;
    Status status = NULL;
    for (size_t i = 0; i < 2; i++) {
        const void *value = NULL;
        if ((status = CALL(INPUT, Status(*)(const void *, size_t, const void **))(context, i, &value)))
            return status;
        if (!value)
            return refused("ConvWeightGrad: an input is missing");
        if ((status = tensor_facts(value, &kind, &rank, dims[i], DIMS_MOST, &count)))
            return status;
        if (kind != ONNX_FLOAT)
            return refused("ConvWeightGrad: not float32");
        if (rank != 4)
            return refused(OTHER_IMAGES);
        if ((status = CALL(TENSOR_DATA, Status(*)(const void *, void **))(value, (void **)data[i])))
            return status;
    }
    if (!lay_out_run(&run, dims[0], dims[1]))
        return refused(OTHER_IMAGES);
    shape[0] = (int64_t)(run.results * run.channels), shape[1] = (int64_t)run.positions;
    if ((status = make_output(context, 0, shape, 2, ONNX_FLOAT, "ConvWeightGrad: an output without a name",
                              "an output of a Conv's gradient has another type than the file says", (void **)&run.y)) || !run.results || !run.channels)
        return status;
    status = in_parallel(context, conv_grad_task, tasks_of(&run), &run);
    return status || !peek(&run.failed) ? status : refused("ConvWeightGrad: no memory");
}

Status conv_grad_create(const CustomOp *op, const void *const *table, const void *info, void **out)
{
    (void)op, (void)table;
    Windows *how = calloc(1, sizeof *how);
    size_t inputs = 0, outputs = 0;
    Status status = count_places(info, &inputs, &outputs);
    int good = how && !status && inputs == 2 && outputs == 1 && read_list(info, "kernel", how->kernel, 2, 0, 1) && read_list(info, "strides", how->strides, 2, 0, 1) &&
               read_list(info, "dilations", how->dilations, 2, 0, 1) && read_list(info, "starts", how->starts, 2, 0, -FAR) &&
               read_list(info, "images", how->images, 4, 1, 0) && read_list(info, "gradients", how->gradients, 4, 1, 0);
    for (size_t i = 0; good && i < 2; i++)
        good = how->kernel[i] <= MOST_KERNEL && how->strides[i] <= MOST_STRIDE && how->dilations[i] <= MOST_WIDE;
    if (!good) {
        free(how);
        return status ? status : refused("pythonop.cpu::ConvWeightGrad stands for no operators: no file has this node, inference_session makes it in memory");
    }
    *out = how;
    return NULL;
}
