/* pythonop.cpu::MaxPoolIndices and pythonop.cpu::MaxPoolGrad: a MaxPool of images of two axes that also says where its maxima are, and its gradient.
 *
 *
 * No file has these nodes: exporter/cpu/pools.py makes them in memory, float32. onnxruntime's MaxPool with indices asks place by place
 * whether it is inside of the image, and its ScatterElements runs in one thread. Here windows of a row that are inside are computed side by side,
 * in vectors; the gradient is written plane by plane, an image's channel each, in as many threads as there are.
 *
 *   MaxPoolIndices: x (N, C, H, W) -> y, indices (N, C, OH, OW). Bit for bit what onnxruntime's says (1.31): the first of what a window sees,
 *   until something is greater, so that a NaN stands only where it comes first; of a window that sees nothing, the lowest number and a place in
 *   front of its plane
 *   MaxPoolGrad: g, indices, size (1), shape -> zeros of that size and shape, with each number of g at its index or, if `adds`, added to it, in
 *   their order. Indices are looked at: those outside of their plane are written by one thread, and those outside of the result are an error
 */
#include <float.h>
#include "kernels.h"
#include "vectors.h"

static const char *const NO_IMAGES = "MaxPoolIndices: not float32 images of two axes, or smaller ones than the windows";

enum { MOST_POOL = 1 << 15 }; /* of a kernel, stride or dilation: no product of two of these and a size overflows */

typedef struct {
    int64_t kernel[2], strides[2], dilations[2], pads[4];
} Pool;

typedef struct {
    const Pool *how;
    int64_t sizes[2], outs[2];
    size_t rows, per_task;  /* of windows: in all planes, and of a task */
    int64_t begin, end;     /* of the windows of a row that see nothing left or right of the image */
    const float *x;
    float *y;
    int64_t *at;
} PoolRun;

/* Windows side by side that see nothing outside of the image: rows and columns of each, and how far apart places and windows are. */
typedef struct { const float *x; int64_t place; size_t high, wide, down, along, step; } Row;

/* One window. */
static inline void one_window(float *y, int64_t *at, const Row *row)
{
    size_t where = 0;
    for (size_t r = 0; r < row->high; r++)
        for (size_t k = 0; k < row->wide; k++) {
            size_t offset = r * row->down + k * row->along;
            where = row->x[offset] > row->x[where] ? offset : where;
        }
    *y = row->x[where], *at = row->place + (int64_t)where;
}

#ifdef __GNUC__
#ifdef __clang__
#define PICK_LANES(a, b, type, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK_LANES(a, b, type, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif
/* As many windows as a vector has numbers, a place or two apart. What the second of two vectors ends with is what the last window sees: at an
 * offset from its begin, the places in front of those are read and dropped. A window sees two places at least, so none behind the image is read. */
#define DEFINE_WINDOWS(lanes, evens, odds)                                                                                           \
    typedef float Floats##lanes __attribute__((vector_size(lanes * 4), aligned(4), may_alias));                                      \
    typedef int32_t Places##lanes __attribute__((vector_size(lanes * 4), aligned(4), may_alias));                                    \
    typedef int64_t Longs##lanes __attribute__((vector_size(lanes * 8), aligned(8), may_alias));                                     \
    static inline __attribute__((always_inline)) void windows_##lanes(float *y, int64_t *at, const Row *row, size_t start)           \
    {                                                                                                                                \
        const float *first = row->x + start * row->step;                                                                             \
        Floats##lanes best = *(const Floats##lanes *)first;                                                                          \
        Places##lanes where = {0};                                                                                                   \
        if (row->step == 2)                                                                                                          \
            best = PICK_LANES(best, *(const Floats##lanes *)(first + lanes), Places##lanes, evens);                                  \
        for (size_t r = 0; r < row->high; r++)                                                                                       \
            for (size_t k = !r; k < row->wide; k++) {                                                                                \
                int32_t offset = (int32_t)(r * row->down + k * row->along);                                                          \
                const float *x = first + offset - (row->step == 2);                                                                  \
                Floats##lanes seen = *(const Floats##lanes *)x;                                                                      \
                if (row->step == 2)                                                                                                  \
                    seen = PICK_LANES(seen, *(const Floats##lanes *)(x + lanes), Places##lanes, odds);                               \
                Places##lanes greater = seen > best;                                                                                 \
                where = (offset & greater) | (where & ~greater);                                                                     \
                best = (Floats##lanes)(((Places##lanes)seen & greater) | ((Places##lanes)best & ~greater));                          \
            }                                                                                                                        \
        *(Floats##lanes *)(y + start) = best;                                                                                        \
        where += ((Places##lanes){evens} >> 1) * (int32_t)row->step;                                                                 \
        *(Longs##lanes *)(at + start) = __builtin_convertvector(where, Longs##lanes) + (row->place + (int64_t)(start * row->step));  \
    }
#define LIST(...) __VA_ARGS__
DEFINE_WINDOWS(4, LIST(0, 2, 4, 6), LIST(1, 3, 5, 7))
DEFINE_WINDOWS(8, LIST(0, 2, 4, 6, 8, 10, 12, 14), LIST(1, 3, 5, 7, 9, 11, 13, 15))
#undef LIST
#undef DEFINE_WINDOWS
#undef PICK_LANES
#endif

/* n windows; by vectors, the last ones with some that were computed before. */
static inline void row_of_windows(float *y, int64_t *at, size_t n, Row row)
{
#ifdef __GNUC__
    if (n >= 4 && row.high * row.wide > 1 && row.step <= 2) {
        for (size_t i = 0; n >= 8 && i < n; i += 8)
            windows_8(y, at, &row, i + 8 <= n ? i : n - 8);
        for (size_t i = 0; n < 8 && i < n; i += 4)
            windows_4(y, at, &row, i + 4 <= n ? i : n - 4);
        return;
    }
#endif
    for (size_t i = 0; i < n; i++, row.x += row.step, row.place += (int64_t)row.step)
        one_window(y + i, at + i, &row);
}

/* Which places of a window along an axis are inside, of one that begins at `start`: from *from on, before *to; none where these are equal. */
static inline void seen_along(int64_t start, int64_t size, int64_t kernel, int64_t dilation, int64_t *from, int64_t *to)
{
    *from = 0, *to = kernel;
    if (start >= 0 && start + (kernel - 1) * dilation < size)
        return; /* most windows: a division takes as long as one of them */
    *from = start < 0 ? (-start + dilation - 1) / dilation : 0;
    *to = start < size ? (size - start + dilation - 1) / dilation : 0;
    *to = *to < kernel ? *to : kernel;
    *to = *to > *from ? *to : *from;
}

WIDEST static void pool_task(void *data, size_t task)
{
    const PoolRun *run = data;
    const Pool *how = run->how;
    int64_t high = run->sizes[0], wide = run->sizes[1], down = how->dilations[0], along = how->dilations[1], outs = run->outs[1];
    size_t last = run->rows - task * run->per_task < run->per_task ? run->rows : (task + 1) * run->per_task;
    int64_t window_row = (int64_t)(task * run->per_task) % run->outs[0], plane = (int64_t)(task * run->per_task) / run->outs[0] * high * wide;
    for (size_t j = task * run->per_task; j < last; j++, window_row++) {
        if (window_row == run->outs[0])
            window_row = 0, plane += high * wide;
        int64_t top = window_row * how->strides[0] - how->pads[0], first, end;
        const float *x = run->x + plane;
        float *y = run->y + (int64_t)j * outs;
        int64_t *at = run->at + (int64_t)j * outs;
        seen_along(top, high, how->kernel[0], down, &first, &end);
        for (int64_t i = 0; i < outs; i++) {
            int64_t left = i * how->strides[1] - how->pads[1], from, to;
            seen_along(left, wide, how->kernel[1], along, &from, &to);
            if (first == end || from == to) {
                y[i] = -FLT_MAX, at[i] = plane - wide - 1;
                continue;
            }
            int64_t begin = (top + first * down) * wide + left + from * along, n = i >= run->begin && i < run->end ? run->end - i : 1;
            Row row = {x + begin, plane + begin, (size_t)(end - first), (size_t)(to - from), (size_t)(down * wide), (size_t)along, (size_t)how->strides[1]};
            if (n > 1)
                row_of_windows(y + i, at + i, (size_t)n, row);
            else
                one_window(y + i, at + i, &row);
            i += n - 1;
        }
    }
}

/* Sizes of a run; 0 where the images have no windows. */
static int lay_out_pool(PoolRun *run, const int64_t *x)
{
    const Pool *how = run->how;
    for (size_t i = 0; i < 2; i++) {
        run->sizes[i] = x[2 + i];
        int64_t reach = x[2 + i] > INT32_MAX ? INT64_MIN : x[2 + i] + how->pads[i] + how->pads[2 + i] - how->dilations[i] * (how->kernel[i] - 1) - 1;
        run->outs[i] = reach / how->strides[i] + 1; /* towards zero, as onnxruntime: then a window is cut */
        if (run->outs[i] < 0)
            return 0;
    }
    if ((run->sizes[1] && run->sizes[0] > INT32_MAX / run->sizes[1]) || (x[0] && !(x[1] && x[2] && x[3])))
        return 0;
    run->rows = (size_t)(x[0] * x[1] * run->outs[0]);
    int64_t reads = run->outs[1] * how->kernel[0] * how->kernel[1], most = run->sizes[1] - 1 - (how->kernel[1] - 1) * how->dilations[1] + how->pads[1];
    run->per_task = reads < PER_TASK ? PER_TASK / (size_t)(reads ? reads : 1) : 1;
    run->begin = (how->pads[1] + how->strides[1] - 1) / how->strides[1];
    run->end = most < 0 ? 0 : most / how->strides[1] + 1;
    run->end = run->end < run->outs[1] ? run->end : run->outs[1];
    return 1;
}

Status pool_compute(void *state, void *context)
{
    static const char *const nameless = "MaxPoolIndices: an output without a name", *const other = "an output of a MaxPool has another type than the file says";
    PoolRun run = {.how = state};
    int64_t dims[DIMS_MOST];
    size_t rank = 0, count = 0;
    Status status = input_of(context, 0, ONNX_FLOAT, NO_IMAGES, dims, &rank, &count, (const void **)&run.x);
    if (status)
        return status;
    if (rank != 4 || !lay_out_pool(&run, dims))
        return refused(NO_IMAGES);
    dims[2] = run.outs[0], dims[3] = run.outs[1];
    if ((status = make_output(context, 0, dims, 4, ONNX_FLOAT, nameless, other, (void **)&run.y)) ||
        (status = make_output(context, 1, dims, 4, ONNX_INT64, nameless, other, (void **)&run.at)))
        return status;
    return in_parallel(context, pool_task, run.outs[1] ? (run.rows + run.per_task - 1) / run.per_task : 0, &run);
}

Status pool_create(const CustomOp *op, const void *const *table, const void *info, void **out)
{
    (void)op, (void)table;
    Pool *how = calloc(1, sizeof *how);
    size_t inputs = 0, outputs = 0;
    Status status = count_places(info, &inputs, &outputs);
    int good = how && !status && inputs == 1 && outputs == 2 && read_list(info, "kernel", how->kernel, 2, 0, 1) &&
               read_list(info, "strides", how->strides, 2, 0, 1) &&
               read_list(info, "dilations", how->dilations, 2, 0, 1) && read_list(info, "pads", how->pads, 4, 0, 0);
    for (size_t i = 0; good && i < 2; i++)
        good = how->kernel[i] <= MOST_POOL && how->strides[i] <= MOST_POOL && how->dilations[i] <= MOST_POOL &&
               how->pads[i] < how->kernel[i] && how->pads[2 + i] < how->kernel[i];
    if (!good) {
        free(how);
        return status ? status : refused("pythonop.cpu::MaxPoolIndices stands for no operator: no file has this node, inference_session makes it in memory");
    }
    *out = how;
    return NULL;
}

/* ---------------------------------------------------------------------------------------------------- its gradient */

typedef struct {
    int64_t adds;
} PoolGrad;

typedef struct {
    int64_t adds;
    size_t planes, area, each, per_task; /* numbers of a plane, those of g that belong to it; planes of a task */
    const float *g;
    const int64_t *at;
    float *x;
    atomic_flag_t outside; /* an index is in another plane */
} PoolGradRun;

static void pool_grad_task(void *data, size_t task)
{
    PoolGradRun *run = data;
    size_t last = run->planes - task * run->per_task < run->per_task ? run->planes : (task + 1) * run->per_task;
    for (size_t plane = task * run->per_task; plane < last; plane++) {
        float *x = run->x + plane * run->area;
        if (run->area) /* what is empty may be nowhere */
            memset(x, 0, run->area * sizeof *x);
        for (size_t i = plane * run->each; i < (plane + 1) * run->each; i++) {
            size_t place = (size_t)run->at[i] - plane * run->area; /* of an index in front of the plane, a large number */
            if (place >= run->area) {
                exchange(&run->outside, 1);
                return;
            }
            x[place] = run->adds ? x[place] + run->g[i] : run->g[i];
        }
    }
}

/* As the operator does it: an index may be anywhere, negative ones count from the end. 0 where one is nowhere. */
static int scatter(const PoolGradRun *run, size_t count, size_t total)
{
    if (total)
        memset(run->x, 0, total * sizeof *run->x);
    for (size_t i = 0; i < count; i++) {
        int64_t place = run->at[i] < 0 ? run->at[i] + (int64_t)total : run->at[i];
        if (place < 0 || place >= (int64_t)total)
            return 0;
        run->x[place] = run->adds ? run->x[place] + run->g[i] : run->g[i];
    }
    return 1;
}

/* The sizes of a shape, of which one may be -1; 0 where it is none of `total` numbers. */
static int read_shape(int64_t *dims, size_t rank, const int64_t *given, int64_t total)
{
    int64_t known = 1, *open = NULL;
    for (size_t i = 0; i < rank; i++) {
        dims[i] = given[i];
        if (dims[i] == -1 && !open)
            open = &dims[i];
        else if (dims[i] < 0 || (dims[i] && known > INT64_MAX / dims[i]))
            return 0;
        else
            known *= dims[i];
    }
    if (!open)
        return known == total;
    *open = known ? total / known : 0;
    return known && total % known == 0;
}

Status pool_grad_compute(void *state, void *context)
{
    static const char *const wrong = "MaxPoolGrad: not the float32 gradient, the int64 indices, the size and the shape of a MaxPool";
    PoolGradRun run = {.adds = ((PoolGrad *)state)->adds};
    const int64_t *size = NULL, *given = NULL;
    const void **data[] = {(const void **)&run.g, (const void **)&run.at, (const void **)&size, (const void **)&given};
    int64_t dims[4][DIMS_MOST], shape[DIMS_MOST];
    size_t ranks[4], counts[4];
    Status status = NULL;
    for (size_t i = 0; !status && i < 4; i++)
        status = input_of(context, i, i ? ONNX_INT64 : ONNX_FLOAT, wrong, dims[i], &ranks[i], &counts[i], data[i]);
    if (status)
        return status;
    if (counts[0] != counts[1] || counts[2] != 1 || ranks[3] != 1 || counts[3] > DIMS_MOST || *size < 0 || *size > PTRDIFF_MAX / (int64_t)sizeof(float) ||
        !read_shape(shape, counts[3], given, *size))
        return refused("the gradient of a MaxPool has other shapes than the file says");
    size_t total = (size_t)*size, count = counts[0];
    if ((status = make_output(context, 0, shape, counts[3], ONNX_FLOAT, "MaxPoolGrad: an output without a name",
                              "an output of a MaxPool's gradient has another type than the file says", (void **)&run.x)))
        return status;
    run.planes = counts[3] > 2 && total ? (size_t)(shape[0] * shape[1]) : 1;
    run.planes = count % run.planes ? 1 : run.planes;
    run.area = total / run.planes, run.each = count / run.planes;
    run.per_task = run.area + run.each < PER_TASK ? PER_TASK / (run.area + run.each + 1) + 1 : 1;
    status = in_parallel(context, pool_grad_task, (run.planes + run.per_task - 1) / run.per_task, &run);
    if (!status && peek(&run.outside) && !scatter(&run, count, total))
        return refused("an index of a MaxPool's gradient is outside of the tensor");
    return status;
}

Status pool_grad_create(const CustomOp *op, const void *const *table, const void *info, void **out)
{
    (void)op, (void)table;
    PoolGrad *how = calloc(1, sizeof *how);
    size_t inputs = 0, outputs = 0;
    Status status = count_places(info, &inputs, &outputs);
    if (!how || status || inputs != 4 || outputs != 1 || !read_list(info, "adds", how ? &how->adds : NULL, 1, 0, 0) || how->adds > 1) {
        free(how);
        return status ? status : refused("pythonop.cpu::MaxPoolGrad stands for no operators: no file has this node, inference_session makes it in memory");
    }
    *out = how;
    return NULL;
}
