/* pythonop.cpu::Rearrange: a tensor each of whose elements is one of the input, or zero.
 *
 * No file has this node: exporter/cpu/moves.py makes it in memory of Transpose, Pad, Slice, Gather and Concat, which onnxruntime
 * runs one by one, most of them in one thread. An element of the output has an index along each of `axes`; its coordinate in the input along
 * a dim is start + the sum of steps times indices, and where one is outside of the input, the element is zero. It holds no Python object and
 * takes no lock in a run. Nothing is read but at coordinates that were compared with the input's own shape.
 */
#include "kernels.h"
#include "vectors.h"

enum { TILE = 16 };
/* Nothing that is added up is more: no sum of 16 overflows. */
#define FARTHEST ((int64_t)1 << 56)

typedef struct {
    size_t dims, axes, rank; /* of the input, of indices, of the output */
    int64_t source[DIMS_MOST], starts[DIMS_MOST], sizes[DIMS_MOST], shape[DIMS_MOST]; /* -1: as many as the input has along its open dim */
    int64_t steps[DIMS_MOST][DIMS_MOST]; /* [dim][axis] */
} Arrangement;

/* How many indices there are, and by how many elements one moves in the input and in the output. */
typedef struct { int64_t size, from, to; } Axis;

/* A dim whose coordinate may lie outside: its steps along the outer axes, and along the two inner ones. */
typedef struct { int64_t dim, start, steps[DIMS_MOST], down, along; } Guard;

typedef struct {
    size_t item, outer, guards, planes, per_task, chunks, rows; /* rows: of a plane for each of `chunks` tasks */
    Axis axis[DIMS_MOST], inner[2];
    Guard guard[DIMS_MOST];
    int64_t base;
    const char *from;
    char *to;
} Layout;

/* A range of indices of an axis. */
typedef struct { int64_t low, high; } Range;

/* The part of a range whose coordinate is inside: at index 0 it is `at`, and it moves by `step`. */
static Range inside(Range range, int64_t at, int64_t step, int64_t dim)
{
    int64_t low = 0, high;
    if (!step)
        return at >= 0 && at < dim ? range : (Range){0, 0};
    if (step == 1) { /* without a division: most are so */
        low = -at;
        high = dim - at;
    } else if (step > 0) {
        low = at < 0 ? (-at + step - 1) / step : 0;
        high = at < dim ? (dim - 1 - at) / step + 1 : 0;
    } else {
        low = at >= dim ? (at - dim - step) / -step : 0; /* (at - (dim - 1)) / -step, rounded up */
        high = at >= 0 ? at / -step + 1 : 0;
    }
    low = low > range.low ? low : range.low;
    high = high < range.high ? high : range.high;
    return low < high ? (Range){low, high} : (Range){0, 0};
}

/* The part ys and xs of a plane is copied. Along y, an element moves by `down` in the input and by `lower` in the output, along x by `along`
 * and `right`. */
#define DEFINE_COPY(type)                                                                                                            \
    WIDEST static void copy_##type(type *restrict to, const type *restrict from, Range ys, Range xs, int64_t down, int64_t along,    \
                                   int64_t lower, int64_t right)                                                                     \
    {                                                                                                                                \
        if (along == 1 && right == 1) {                                                                                              \
            for (int64_t y = ys.low; y < ys.high; y++)                                                                               \
                for (int64_t x = xs.low; x < xs.high; x++)                                                                           \
                    to[y * lower + x] = from[y * down + x];                                                                          \
        } else if (along == 2 && right == 1) { /* of windows that move by two */                                                     \
            for (int64_t y = ys.low; y < ys.high; y++)                                                                               \
                for (int64_t x = xs.low; x < xs.high; x++)                                                                           \
                    to[y * lower + x] = from[y * down + x * 2];                                                                      \
        } else { /* tile by tile, so that what one row reads or writes of a line of the cache the next ones do, too */               \
            type tile[TILE][TILE];                                                                                                   \
            for (int64_t y = ys.low; y < ys.high; y += TILE)                                                                         \
                for (int64_t x = xs.low; x < xs.high; x += TILE) {                                                                   \
                    int64_t rows = ys.high - y < TILE ? ys.high - y : TILE, columns = xs.high - x < TILE ? xs.high - x : TILE;       \
                    const type *read = from + y * down + x * along;                                                                  \
                    type *row = to + y * lower + x * right;                                                                          \
                    if (rows == TILE && columns == TILE && along == 1 && lower == 1) { /* whole ones turned, with loops that have constant bounds */\
                        for (int64_t k = 0; k < TILE; k++)                                                                           \
                            for (int64_t i = 0; i < TILE; i++)                                                                       \
                                tile[i][k] = read[k * down + i];                                                                     \
                        for (int64_t i = 0; i < TILE; i++)                                                                           \
                            memcpy(row + i * right, tile[i], sizeof tile[i]);                                                        \
                    } else                                                                                                           \
                        for (int64_t k = 0; k < rows; k++)                                                                           \
                            for (int64_t i = 0; i < columns; i++)                                                                    \
                                row[k * lower + i * right] = read[k * down + i * along];                                             \
                }                                                                                                                    \
        }                                                                                                                            \
    }                                                                                                                                \
    static void zero_##type(type *to, Range ys, Range xs, int64_t lower, int64_t right)                                             \
    {                                                                                                                                \
        for (int64_t y = ys.low; y < ys.high; y++)                                                                                   \
            for (int64_t x = xs.low; x < xs.high; x++)                                                                               \
                to[y * lower + x * right] = 0;                                                                                       \
    }
DEFINE_COPY(uint32_t)
DEFINE_COPY(uint64_t)
#undef DEFINE_COPY

static void zero_part(const Layout *layout, char *to, Range ys, Range xs)
{
    if (ys.low >= ys.high || xs.low >= xs.high)
        return;
    if (layout->item == sizeof(uint32_t))
        zero_uint32_t((uint32_t *)to, ys, xs, layout->inner[0].to, layout->inner[1].to);
    else
        zero_uint64_t((uint64_t *)to, ys, xs, layout->inner[0].to, layout->inner[1].to);
}

/* What lies inside is copied, the rest of rows ys is zero. `from` is where index 0 lies, or would lie. */
static void fill_rows(const Layout *layout, char *to, uintptr_t from, Range ys, Range xs)
{
    int64_t down = layout->inner[0].from, along = layout->inner[1].from, lower = layout->inner[0].to, right = layout->inner[1].to;
    size_t item = layout->item;
    if (along == 1 && right == 1 && down == lower && down == layout->inner[1].size) { /* one piece; what is too much of it becomes zero */
        size_t first = (size_t)(ys.low * down + xs.low) * item;
        memcpy(to + first, (const char *)(from + first), (size_t)((ys.high - 1 - ys.low) * down + xs.high - xs.low) * item);
    } else if (item == sizeof(uint32_t))
        copy_uint32_t((uint32_t *)to, (const uint32_t *)from, ys, xs, down, along, lower, right);
    else
        copy_uint64_t((uint64_t *)to, (const uint64_t *)from, ys, xs, down, along, lower, right);
    zero_part(layout, to, ys, (Range){0, xs.low});
    zero_part(layout, to, ys, (Range){xs.high, layout->inner[1].size});
}

/* Rows `all` of a plane: of the two inner axes, at one index of each of the others. */
static void arrange_rows(const Layout *layout, const int64_t *index, Range all)
{
    int64_t place = layout->base, to = 0, at[DIMS_MOST] = {0};
    for (size_t axis = 0; axis < layout->outer; axis++) {
        place += index[axis] * layout->axis[axis].from;
        to += index[axis] * layout->axis[axis].to;
    }
    char *target = layout->to + (size_t)to * layout->item;
    /* An address outside is none: of what is inside, it is where index 0 would lie. */
    const uintptr_t from = (uintptr_t)layout->from + (uintptr_t)place * layout->item;
    const int64_t width = layout->inner[1].size;
    Range ys = all, xs = {0, width};
    int apart = 1; /* no guard moves along both axes */
    for (size_t g = 0; g < layout->guards; g++) {
        const Guard *guard = &layout->guard[g];
        at[g] = guard->start;
        for (size_t axis = 0; axis < layout->outer; axis++)
            at[g] += index[axis] * guard->steps[axis];
        if (!guard->along)
            ys = inside(ys, at[g], guard->down, guard->dim);
        else if (!guard->down)
            xs = inside(xs, at[g], guard->along, guard->dim);
        else
            apart = 0;
    }
    if (ys.low >= ys.high || xs.low >= xs.high) {
        zero_part(layout, target, all, (Range){0, width});
        return;
    }
    zero_part(layout, target, (Range){all.low, ys.low}, (Range){0, width});
    zero_part(layout, target, (Range){ys.high, all.high}, (Range){0, width});
    if (apart) {
        fill_rows(layout, target, from, ys, xs);
        return;
    }
    for (int64_t y = ys.low; y < ys.high; y++) {
        Range part = xs;
        for (size_t g = 0; g < layout->guards; g++)
            if (layout->guard[g].along)
                part = inside(part, at[g] + y * layout->guard[g].down, layout->guard[g].along, layout->guard[g].dim);
        if (part.low < part.high)
            fill_rows(layout, target, from, (Range){y, y + 1}, part);
        else
            zero_part(layout, target, (Range){y, y + 1}, (Range){0, width});
    }
}

static void arrange_task(void *data, size_t number)
{
    const Layout *layout = data;
    size_t plane = number / layout->chunks * layout->per_task, end = plane + layout->per_task, rest = plane;
    Range rows = {(int64_t)(number % layout->chunks * layout->rows), layout->inner[0].size};
    if (rows.high > rows.low + (int64_t)layout->rows)
        rows.high = rows.low + (int64_t)layout->rows;
    int64_t index[DIMS_MOST];
    for (size_t axis = layout->outer; axis-- > 0;) {
        index[axis] = (int64_t)(rest % (size_t)layout->axis[axis].size);
        rest /= (size_t)layout->axis[axis].size;
    }
    for (; plane < end && plane < layout->planes; plane++) {
        arrange_rows(layout, index, rows);
        for (size_t axis = layout->outer; axis-- > 0;) {
            if (++index[axis] < layout->axis[axis].size)
                break;
            index[axis] = 0;
        }
    }
}

/* The two axes that are copied at once, as planes: the last one, in whose order is written, and the one before it; of planes that are small,
 * the longest axis is one side. Where the last one is not read one element after the other, those along which the input lies closest: what is
 * read here and there waits for the memory, what is written so does not. */
static void choose_plane(size_t axes, const int64_t *sizes, const int64_t *strides, size_t *y, size_t *x)
{
    size_t last = axes - 1, first = last, second = last;
    *x = last;
    *y = last - 1;
    if (llabs(strides[last]) <= 2) {
        if (strides[*y] != sizes[last] && sizes[last] * sizes[*y] < TILE * TILE)
            for (size_t i = 0; i < last; i++)
                *y = sizes[i] > sizes[*y] ? i : *y;
        if (sizes[*y] > sizes[last] && sizes[last] < TILE / 2) {
            *x = *y;
            *y = last;
        }
        return;
    }
    for (size_t i = 0; i < last; i++)
        if (sizes[i] > 1 && llabs(strides[i]) < llabs(strides[first])) {
            second = first;
            first = i;
        } else if (sizes[i] > 1 && (second == first || llabs(strides[i]) < llabs(strides[second])))
            second = i;
    if (first != second) {
        *x = first;
        *y = second;
    }
}

/* Axes of which one goes on where the other one ends are one. */
static void join_axes(size_t axes, const int64_t *sizes, const int64_t *strides, Layout *layout)
{
    int64_t size[DIMS_MOST] = {1, 1}, stride[DIMS_MOST] = {0}, steps[DIMS_MOST][DIMS_MOST] = {{0}}, to = 1;
    size_t count = 2; /* at least: the inner ones */
    for (size_t i = 0; i < axes; i++) {
        if (sizes[i] == 1)
            continue;
        int joins = size[count - 1] > 1 && stride[count - 1] == strides[i] * sizes[i];
        for (size_t g = 0; g < layout->guards; g++)
            joins = joins && steps[g][count - 1] == layout->guard[g].steps[i] * sizes[i];
        if (!joins && size[0] == 1 && size[1] > 1 && count == 2) { /* what was put in front makes room */
            size[0] = size[1];
            stride[0] = stride[1];
            for (size_t g = 0; g < layout->guards; g++)
                steps[g][0] = steps[g][1];
            size[1] = 1;
        } else if (!joins && size[1] > 1)
            count++;
        size[count - 1] = joins ? size[count - 1] * sizes[i] : sizes[i];
        stride[count - 1] = strides[i];
        for (size_t g = 0; g < layout->guards; g++)
            steps[g][count - 1] = layout->guard[g].steps[i];
    }
    size_t y, x;
    choose_plane(count, size, stride, &y, &x);
    layout->outer = count - 2;
    for (size_t i = count, outer = layout->outer; i-- > 0; to *= size[i]) {
        *(i == x ? &layout->inner[1] : i == y ? &layout->inner[0] : &layout->axis[--outer]) = (Axis){size[i], stride[i], to};
        for (size_t g = 0; g < layout->guards; g++)
            *(i == x ? &layout->guard[g].along : i == y ? &layout->guard[g].down : &layout->guard[g].steps[outer]) = steps[g][i];
    }
}

/* The layout for an input of a shape; NULL, or what is wrong. */
static const char *lay_out(const Arrangement *how, const int64_t *dims, size_t rank, Layout *layout, size_t *total)
{
    int64_t open = 0, stride = 1, sizes[DIMS_MOST], strides[DIMS_MOST] = {0}; /* stride: 0 where the input is empty */
    for (size_t i = 0; i < how->dims; i++) {
        if (rank != how->dims || (how->source[i] >= 0 && how->source[i] != dims[i]))
            return "the file says of the input of a Transpose, Pad, Slice or Gather another shape than it has";
        open = how->source[i] < 0 ? dims[i] : open;
        stride = dims[i] ? stride : 0;
    }
    *total = 1;
    for (size_t i = 0; i < how->axes; i++) {
        sizes[i] = how->sizes[i] < 0 ? open : how->sizes[i];
        if (sizes[i] && *total > (size_t)PTRDIFF_MAX / sizeof(double) / (size_t)sizes[i])
            return "Rearrange: a result larger than memory";
        *total *= (size_t)sizes[i];
    }
    if (!*total)
        return NULL;
    int64_t low[DIMS_MOST], high[DIMS_MOST];
    layout->base = 0;
    layout->guards = 0;
    for (size_t d = how->dims; d-- > 0; stride *= dims[d]) {
        low[d] = high[d] = how->starts[d];
        if (stride && (low[d] > FARTHEST / stride || low[d] < -(FARTHEST / stride)))
            return "Rearrange: a start of no size";
        for (size_t i = 0; i < how->axes; i++) {
            int64_t last = sizes[i] > 1 ? sizes[i] - 1 : 0, step = last ? how->steps[d][i] : 0;
            int64_t most = last ? FARTHEST / (stride ? stride : 1) / last : FAR;
            if (step > most || step < -most)
                return "Rearrange: steps of no size";
            *(step < 0 ? &low[d] : &high[d]) += step * last;
            strides[i] += step * stride;
        }
        layout->base += how->starts[d] * stride;
    }
    for (size_t d = 0; d < how->dims; d++)
        if (low[d] < 0 || high[d] >= dims[d]) {
            Guard *guard = &layout->guard[layout->guards++];
            *guard = (Guard){.dim = dims[d], .start = how->starts[d]};
            for (size_t i = 0; i < how->axes; i++)
                guard->steps[i] = sizes[i] > 1 ? how->steps[d][i] : 0;
        }
    join_axes(how->axes, sizes, strides, layout);
    return NULL;
}

/* The shape of the result; NULL, or what is wrong. */
static const char *shape_of(const Arrangement *how, int64_t *shape, size_t total)
{
    size_t product = 1, last_open = how->rank;
    for (size_t i = 0; i < how->rank; i++) {
        shape[i] = how->shape[i];
        if (shape[i] < 0)
            last_open = i;
        else if (shape[i] && product > (size_t)PTRDIFF_MAX / sizeof(double) / (size_t)shape[i])
            return "Rearrange: a result larger than memory";
        else
            product *= (size_t)shape[i];
    }
    if (last_open < how->rank)
        shape[last_open] = product ? (int64_t)(total / product) : 0;
    if ((last_open < how->rank ? product * (size_t)shape[last_open] : product) != total)
        return "Rearrange: a result of another size than its shape";
    return NULL;
}

Status rearrange_compute(void *state, void *context)
{
    const Arrangement *how = state;
    const void *value = NULL;
    Layout layout;
    int64_t dims[DIMS_MOST], shape[DIMS_MOST];
    size_t rank = 0, count = 0, total = 0;
    int kind = 0;
    Status status = CALL(INPUT, Status(*)(const void *, size_t, const void **))(context, 0, &value);
    if (status)
        return status;
    if (!value)
        return refused("Rearrange: an input is missing");
    if ((status = tensor_facts(value, &kind, &rank, dims, DIMS_MOST, &count)))
        return status;
    if (kind != ONNX_FLOAT && kind != ONNX_DOUBLE)
        return refused("Rearrange: neither float32 nor float64");
    const char *wrong = lay_out(how, dims, rank, &layout, &total);
    if (wrong || (wrong = shape_of(how, shape, total)))
        return refused(wrong);
    if ((status = make_output(context, 0, shape, how->rank, kind, "Rearrange: an output without a name",
                              "an output of a Transpose, Pad, Slice or Gather has another type than the file says", (void **)&layout.to)) ||
        (status = CALL(TENSOR_DATA, Status(*)(const void *, void **))(value, (void **)&layout.from)) || !total)
        return status;
    size_t width = (size_t)layout.inner[1].size, height = (size_t)layout.inner[0].size;
    layout.item = kind == ONNX_FLOAT ? sizeof(uint32_t) : sizeof(uint64_t);
    layout.planes = total / width / height;
    layout.rows = height * width > PER_TASK ? PER_TASK / width + (width > PER_TASK) : height;
    layout.chunks = (height + layout.rows - 1) / layout.rows;
    layout.per_task = layout.chunks > 1 || height * width > PER_TASK ? 1 : PER_TASK / (height * width);
    size_t tasks = (layout.planes + layout.per_task - 1) / layout.per_task * layout.chunks;
    return in_parallel(context, arrange_task, tasks, &layout);
}


Status rearrange_create(const CustomOp *op, const void *const *table, const void *info, void **out)
{
    (void)op, (void)table;
    Arrangement *how = calloc(1, sizeof *how);
    int64_t steps[DIMS_MOST * DIMS_MOST];
    size_t inputs = 0, outputs = 0;
    Status status = count_places(info, &inputs, &outputs);
    int good = how && !status && inputs == 1 && outputs == 1 && (how->dims = read_list(info, "source", how->source, 0, 1, 0)) &&
               read_list(info, "starts", how->starts, how->dims, 0, -FAR) && (how->axes = read_list(info, "sizes", how->sizes, 0, 1, 0)) >= 2 &&
               (how->rank = read_list(info, "shape", how->shape, 0, 1, 0)) && read_list(info, "steps", steps, how->dims * how->axes, 0, -FAR);
    for (size_t d = 0; good && d < how->dims; d++)
        memcpy(how->steps[d], steps + d * how->axes, how->axes * sizeof *steps);
    if (!good) {
        free(how);
        return status ? status : refused("pythonop.cpu::Rearrange stands for no operators: no file has this node, inference_session makes it in memory");
    }
    *out = how;
    return NULL;
}
