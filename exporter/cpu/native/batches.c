/* pythonop.cpu::BatchMatMul: a MatMul of many matrices whose left ones may begin and end their rows in zeros.
 *
 * No file has this node: exporter/cpu/batches.py makes it in memory, float32, where the processor has AVX-512. Of the scores of a causal
 * attention half are zeros, of those of a window nearly all; onnxruntime multiplies them. Here each group of rows is asked where its numbers
 * begin and end, and blocks of zeros are left out where all of the right matrix is finite (0 times infinity is NaN): what stays is added in
 * the same order.
 *
 *   a (.., M, K), or (.., K, M) if `transposed`, b (.., K, N) -> (.., M, N), with leading dims as MatMul broadcasts them
 */
#include "kernels.h"
#include "panels.h"

static const char *const NO_BATCHES = "BatchMatMul: not float32 matrices that fit one another";

enum { HEIGHT = 64, DEEP = 512, SIDE = 64, STEP = 16 }; /* rows of a task, of a panel at once, of a block that is turned, numbers asked at once */

typedef struct {
    int64_t transposed;
} Batches;

typedef struct {
    int64_t a[DIMS_MOST], b[DIMS_MOST], y[DIMS_MOST];
    size_t a_rank, b_rank, rank;      /* of the leading dims */
    size_t rows, depth, columns, blocks;
    int transposed;
    const float *left, *right;
    float *result, *panels;
    char *finite;                     /* of each panel, whether its numbers are */
    MultiplyPanel multiply;
    atomic_flag_t failed;
} BatchRun;

static uint32_t bits_of(const float *x)
{
    uint32_t bits;
    memcpy(&bits, x, sizeof bits);
    return bits;
}

static int all_zeros(const float *x, size_t count)
{
    uint32_t any = 0;
    for (size_t i = 0; i < count; i++)
        any |= bits_of(x + i);
    return !(any << 1); /* -0 is one, too */
}

static int all_finite(const float *x, size_t count)
{
    uint32_t any = 0;
    for (size_t i = 0; i < count; i++)
        any |= (bits_of(x + i) & 0x7fffffff) + 0x00800000; /* the highest exponent carries into the sign */
    return !(any >> 31);
}

/* Which of its matrices an operand gives to a product: of leading dims, aligned at their ends, those of 1 stay where they are. */
static size_t matrix_of(const int64_t *own, size_t own_rank, const BatchRun *run, size_t index)
{
    size_t found = 0, step = 1;
    for (size_t i = 1; i <= run->rank; i++) {
        size_t size = (size_t)run->y[run->rank - i], place = index % size;
        index /= size;
        if (i <= own_rank) {
            found += own[own_rank - i] == 1 ? 0 : place * step;
            step *= (size_t)own[own_rank - i];
        }
    }
    return found;
}

static void batch_panel_task(void *data, size_t task)
{
    BatchRun *run = data;
    size_t wide = panels(run->columns), first = task % wide * PANEL, size = run->depth * PANEL;
    lay_out_panel(run->panels + task * size, run->right + task / wide * run->depth * run->columns + first, run->depth, run->columns, 1,
                  run->columns - first < PANEL ? run->columns - first : PANEL);
    run->finite[task] = (char)all_finite(run->panels + task * size, size);
}

/* Where the numbers of some rows begin and end, in steps. */
static void find_numbers(const float *rows, size_t count, size_t depth, size_t *begin, size_t *end)
{
    *begin = depth, *end = 0;
    for (size_t i = 0; i < count; i++, rows += depth) {
        size_t last = depth / STEP * STEP, first = 0;
        if (last < depth && !all_zeros(rows + last, depth - last))
            *end = depth;
        for (; last > *end && all_zeros(rows + last - STEP, STEP); last -= STEP)
            ;
        *end = last > *end ? last : *end;
        for (; first < *begin && first + STEP <= depth && all_zeros(rows + first, STEP); first += STEP)
            ;
        *begin = first < *begin ? first : *begin;
    }
}

/* sums (panels, HEIGHT, PANEL) += some rows of a matrix times the panels. */
static void multiply_rows(const BatchRun *run, float *sums, const float *left, size_t rows, const float *right, int all)
{
    size_t begins[HEIGHT / TOGETHER], ends[HEIGHT / TOGETHER], wide = panels(run->columns);
    for (size_t i = 0; i < rows; i += TOGETHER) {
        begins[i / TOGETHER] = 0, ends[i / TOGETHER] = run->depth;
        if (!all)
            find_numbers(left + i * run->depth, rows - i < TOGETHER ? rows - i : TOGETHER, run->depth, &begins[i / TOGETHER], &ends[i / TOGETHER]);
    }
    for (size_t k = 0; k < run->depth; k += DEEP)
        for (size_t p = 0; p < wide; p++)
            for (size_t i = 0; i < rows; i += TOGETHER) {
                size_t begin = begins[i / TOGETHER], end = ends[i / TOGETHER];
                begin = begin > k ? begin : k, end = end < k + DEEP ? end : k + DEEP;
                if (begin < end)
                    run->multiply(rows - i < TOGETHER ? rows - i : TOGETHER, sums + (p * HEIGHT + i) * PANEL, left + i * run->depth + begin, run->depth,
                                  right + (p * run->depth + begin) * PANEL, end - begin);
            }
}

/* The same of some columns of a matrix, as rows. */
static void multiply_columns(const BatchRun *run, float *sums, const float *left, size_t rows, const float *right, int all)
{
    float turned[HEIGHT * SIDE];
    for (size_t k = 0; k < run->depth; k += SIDE, left += SIDE * run->rows) {
        size_t deep = run->depth - k < SIDE ? run->depth - k : SIDE;
        int zeros = !all;
        for (size_t i = deep; zeros && i-- > 0;)
            zeros = all_zeros(left + i * run->rows, rows);
        if (zeros)
            continue;
        lay_out_columns(turned, SIDE, left, run->rows, deep, rows);
        for (size_t p = 0; p < panels(run->columns); p++)
            run->multiply(rows, sums + p * HEIGHT * PANEL, turned, SIDE, right + (p * run->depth + k) * PANEL, deep);
    }
}

static void batch_task(void *data, size_t task)
{
    BatchRun *run = data;
    size_t product = task / run->blocks, first = task % run->blocks * HEIGHT, rows = run->rows - first < HEIGHT ? run->rows - first : HEIGHT;
    size_t wide = panels(run->columns), matrix = matrix_of(run->b, run->b_rank, run, product);
    const float *left = run->left + matrix_of(run->a, run->a_rank, run, product) * run->rows * run->depth;
    const float *right = run->panels + matrix * wide * run->depth * PANEL;
    float *sums = calloc(wide * HEIGHT * PANEL, sizeof *sums), *to = run->result + (product * run->rows + first) * run->columns;
    if (!sums) {
        exchange(&run->failed, 1);
        return;
    }
    int all = memchr(run->finite + matrix * wide, 0, wide) != NULL;
    if (run->transposed)
        multiply_columns(run, sums, left + first, rows, right, all);
    else
        multiply_rows(run, sums, left + first * run->depth, rows, right, all);
    for (size_t i = 0; i < rows; i++, to += run->columns)
        for (size_t p = 0; p < wide; p++)
            memcpy(to + p * PANEL, sums + (p * HEIGHT + i) * PANEL, (run->columns - p * PANEL < PANEL ? run->columns - p * PANEL : PANEL) * sizeof *to);
    free(sums);
}

/* The leading dims of the result; 0 where those of the two do not fit. */
static int broadcast_leading(BatchRun *run)
{
    run->rank = run->a_rank > run->b_rank ? run->a_rank : run->b_rank;
    for (size_t i = 1; i <= run->rank; i++) {
        int64_t a = i <= run->a_rank ? run->a[run->a_rank - i] : 1, b = i <= run->b_rank ? run->b[run->b_rank - i] : 1;
        if (a != b && a != 1 && b != 1)
            return 0;
        run->y[run->rank - i] = a == 1 ? b : a;
    }
    return 1;
}

Status batch_compute(void *state, void *context)
{
    BatchRun run = {.transposed = ((Batches *)state)->transposed != 0, .multiply = multiply_panel()};
    size_t a_count = 0, b_count = 0, products = 1;
    Status status = input_of(context, 0, ONNX_FLOAT, NO_BATCHES, run.a, &run.a_rank, &a_count, (const void **)&run.left);
    if (status || (status = input_of(context, 1, ONNX_FLOAT, NO_BATCHES, run.b, &run.b_rank, &b_count, (const void **)&run.right)))
        return status;
    if (run.a_rank < 2 || run.b_rank < 2)
        return refused(NO_BATCHES);
    run.a_rank -= 2, run.b_rank -= 2;
    const int64_t *a = run.a + run.a_rank, *b = run.b + run.b_rank;
    if (a[!run.transposed] != b[0] || !broadcast_leading(&run))
        return refused(NO_BATCHES);
    run.rows = (size_t)a[run.transposed], run.depth = (size_t)b[0], run.columns = (size_t)b[1];
    run.y[run.rank] = (int64_t)run.rows, run.y[run.rank + 1] = (int64_t)run.columns;
    if ((status = make_output(context, 0, run.y, run.rank + 2, ONNX_FLOAT, "BatchMatMul: an output without a name",
                              "an output of a MatMul has another type than the file says", (void **)&run.result)))
        return status;
    for (size_t i = 0; i < run.rank; i++)
        products *= (size_t)run.y[i];
    if (!products || !run.rows || !run.columns)
        return NULL;
    if (!run.depth) {
        memset(run.result, 0, products * run.rows * run.columns * sizeof *run.result);
        return NULL;
    }
    size_t wide = panels(run.columns), matrices = b_count / (run.depth * run.columns);
    run.blocks = (run.rows + HEIGHT - 1) / HEIGHT;
    run.panels = matrices <= SIZE_MAX / sizeof(float) / wide / run.depth / PANEL ? malloc(matrices * wide * run.depth * PANEL * sizeof(float)) : NULL;
    run.finite = run.panels ? malloc(matrices * wide) : NULL;
    if (!run.finite) {
        free(run.panels);
        return refused("BatchMatMul: no memory");
    }
    status = in_parallel(context, batch_panel_task, matrices * wide, &run);
    if (!status)
        status = in_parallel(context, batch_task, products * run.blocks, &run);
    free(run.panels);
    free(run.finite);
    return status || !peek(&run.failed) ? status : refused("BatchMatMul: no memory");
}

Status batch_create(const CustomOp *op, const void *const *table, const void *info, void **out)
{
    (void)op, (void)table;
    Batches *how = calloc(1, sizeof *how);
    size_t inputs = 0, outputs = 0;
    Status status = count_places(info, &inputs, &outputs);
    if (!how || status || inputs != 2 || outputs != 1 || !read_list(info, "transposed", &how->transposed, 1, 0, 0) || how->transposed > 1) {
        free(how);
        return status ? status : refused("pythonop.cpu::BatchMatMul stands for no operators: no file has this node, inference_session makes it in memory");
    }
    *out = how;
    return NULL;
}
