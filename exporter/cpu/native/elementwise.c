/* pythonop.cpu::Elementwise: a chain of elementwise operators as one pass over memory.
 *
 * No file has this node: exporter/cpu/elementwise.py makes it in memory of Add, Sub, Mul, Div, Sqrt and Neg, of comparisons that
 * become numbers or let numbers through and of what replaces NaN, and of sums by channels (exporter/cpu/channels.py). It computes block by block, so that what
 * lies between two operators stays in the cache, and rounds as they do: after each of them. It holds no Python object and takes no lock in a run. A file that brings one of its own meets the checks of
 * `program_of` and `operand_of`, which let nothing outside the blocks and the operands be read or written.
 */
#include <math.h>

#include "kernels.h"
#include "vectors.h"

enum { ADD = 0, SUB, MUL, DIV, SQRT, NEG, GREATER, GUARD, SUM, GATE, FUNCTION_COUNT }; /* as FUNCTIONS in elementwise.py */
enum { BLOCK_BYTES = 4096, MOST_TEMPORARIES = 12, MOST_PLACES = 512, MOST_SUMS = 4, CHANNELS = 64, PARTIAL_SUMS = 32 };

/* to, a, b: places. First the inputs, then the outputs, then temporaries. A SUM adds what stands in a, over all axes but the second, to an
 * output that nothing else writes or reads, the sum number b. */
typedef struct { int32_t function, to, a, b; } Instruction;

typedef struct {
    int32_t inputs, outputs, full; /* full: the input that has the shape of the outputs */
    int32_t sums;
    int64_t rank; /* of what is summed: another one is an error */
    char along[MOST_PLACES]; /* of an input: it has one number for each channel, or something is wrong; `channels`: one of them has */
    int32_t channels;
    char is_sum[MOST_PLACES]; /* of an output */
    size_t count;
    Instruction instructions[];
} Program;

/* An input: element i of an output reads its element (i / inner) % count. One of the outputs' shape, one element, a bias of the last axis,
 * a factor of each row or of each channel. */
typedef struct { const char *data; size_t inner, count; } Operand;

typedef struct {
    const Program *program;
    size_t item, size; /* bytes of an element; elements of an output */
    const Operand *operands;
    char **targets;
    size_t images, channels, inner; /* of an output, where there are sums: its first two axes and what is behind them */
    size_t together;                /* channels of a task then */
} Job;

typedef double Totals[MOST_SUMS][CHANNELS];

typedef union { double align; char bytes[BLOCK_BYTES]; } Block;

/* An operand is as long as the block, or one number. */
#define LOOP(expression) do { NO_DEPENDENCY for (size_t i = 0; i < n; i++) to[i] = (expression); } while (0)
#define PAIR(of) do { if (one_a && one_b) LOOP(of(x, y)); else if (one_a) LOOP(of(x, b[i])); else if (one_b) LOOP(of(a[i], y)); else LOOP(of(a[i], b[i])); } while (0)
#define OF_ADD(p, q) ((p) + (q))
#define OF_SUB(p, q) ((p) - (q))
#define OF_MUL(p, q) ((p) * (q))
#define OF_DIV(p, q) ((p) / (q))
#define OF_GREATER(p, q) ((p) > (q) ? 1 : 0)
#define OF_GUARD(p, q) ((p) != (p) ? (q) : (p))
#define OF_GATE(p, q) ((p) > 0 ? (q) : 0) /* no product: 0 times infinity is NaN */
#define DEFINE_APPLY(type, root)                                                                                                     \
    WIDEST static void apply_##type(int32_t function, type *to, const type *a, int one_a, const type *b, int one_b, size_t n)              \
    {                                                                                                                                \
        const type x = *a, y = *b;                                                                                                   \
        switch (function) {                                                                                                          \
        case ADD: PAIR(OF_ADD); break;                                                                                               \
        case SUB: PAIR(OF_SUB); break;                                                                                               \
        case MUL: PAIR(OF_MUL); break;                                                                                               \
        case DIV: PAIR(OF_DIV); break;                                                                                               \
        case GREATER: PAIR(OF_GREATER); break;                                                                                       \
        case GUARD: PAIR(OF_GUARD); break;                                                                                           \
        case GATE: PAIR(OF_GATE); break;                                                                                             \
        case SQRT: if (one_a) LOOP(root(x)); else LOOP(root(a[i])); break;                                                           \
        default: if (one_a) LOOP(-x); else LOOP(-a[i]); break;                                                                       \
        }                                                                                                                            \
    }                                                                                                                                \
    /* n elements of an operand from one of an output on, in `to`. */                                                                \
    WIDEST static void spread_##type(type *to, const Operand *operand, size_t start, size_t n)                                       \
    {                                                                                                                                \
        const type *from = (const type *)operand->data;                                                                              \
        for (size_t i = 0; i < n;) {                                                                                                 \
            size_t row = (start + i) / operand->inner, left = operand->inner - (start + i) % operand->inner;                         \
            size_t end = left < n - i ? i + left : n;                                                                                \
            const type x = from[row % operand->count];                                                                               \
            for (; i < end; i++)                                                                                                     \
                to[i] = x;                                                                                                           \
        }                                                                                                                            \
    }                                                                                                                                \
    /* The same bits on every processor. */                                                                                          \
    WIDEST static double sum_##type(const type *a, size_t n)                                                                         \
    {                                                                                                                                \
        type partial[PARTIAL_SUMS] = {0};                                                                                            \
        size_t i = 0;                                                                                                                \
        for (; i + PARTIAL_SUMS <= n; i += PARTIAL_SUMS)                                                                             \
            for (size_t j = 0; j < PARTIAL_SUMS; j++)                                                                                \
                partial[j] += a[i + j];                                                                                              \
        for (size_t j = 0; i + j < n; j++)                                                                                           \
            partial[j] += a[i + j];                                                                                                  \
        double total = 0;                                                                                                            \
        for (size_t j = 0; j < PARTIAL_SUMS; j++)                                                                                    \
            total += partial[j];                                                                                                     \
        return total;                                                                                                                \
    }
DEFINE_APPLY(float, sqrtf)
DEFINE_APPLY(double, sqrt)
#undef DEFINE_APPLY
#undef PAIR
#undef LOOP

/* Where n elements of an operand lie from one of an output on: in it, in one element of it, or in `room`, which is written. */
static const char *operand_at(const Operand *operand, size_t item, size_t start, size_t n, Block *room, int *one)
{
    *one = operand->count == 1 || start / operand->inner == (start + n - 1) / operand->inner;
    if (*one)
        return operand->data + start / operand->inner % operand->count * item;
    size_t place = start % operand->count;
    if (operand->inner > 1) {
        if (item == sizeof(float))
            spread_float((float *)room->bytes, operand, start, n);
        else
            spread_double((double *)room->bytes, operand, start, n);
        return room->bytes;
    }
    if (place + n <= operand->count)
        return operand->data + place * item;
    for (size_t done = 0; done < n; place = 0) {
        size_t part = operand->count - place < n - done ? operand->count - place : n - done;
        memcpy(room->bytes + done * item, operand->data + place * item, part * item);
        done += part;
    }
    return room->bytes;
}

static double sum_of(size_t item, const char *from, size_t n)
{
    return item == sizeof(float) ? sum_float((const float *)from, n) : sum_double((const double *)from, n);
}

static void put_sum(size_t item, char *to, size_t place, double total)
{
    if (item == sizeof(float))
        ((float *)to)[place] = (float)total;
    else
        ((double *)to)[place] = total;
}

/* n elements of the outputs from one on; their sums by channels, of which the first begins there, are added to the totals. */
static void run_block(const Job *job, size_t start, size_t n, Block *temporaries, Totals totals)
{
    const Program *program = job->program;
    Block rooms[2];
    size_t offset = start * job->item;
    int32_t first = program->inputs + program->outputs;
    for (const Instruction *step = program->instructions; step < program->instructions + program->count; step++) {
        const char *read[2];
        int one[2] = {0, 0}, is_sum = step->function == SUM;
        for (int k = 0; k < 2 - is_sum; k++) {
            int32_t place = k ? step->b : step->a;
            read[k] = place < program->inputs ? operand_at(&job->operands[place], job->item, start, n, &rooms[k], &one[k])
                      : place < first         ? job->targets[place - program->inputs] + offset
                                              : temporaries[place - first].bytes;
        }
        char *to = step->to < first ? job->targets[step->to - program->inputs] + offset : temporaries[step->to - first].bytes;
        if (is_sum)
            for (size_t channel = 0, i = 0; i < n; channel++, i += job->inner)
                totals[step->b][channel] += sum_of(job->item, read[0] + i * job->item, job->inner < n - i ? job->inner : n - i);
        else if (job->item == sizeof(float))
            apply_float(step->function, (float *)to, (const float *)read[0], one[0], (const float *)read[1], one[1], n);
        else
            apply_double(step->function, (double *)to, (const double *)read[0], one[0], (const double *)read[1], one[1], n);
    }
}

static void run_task(void *data, size_t number)
{
    const Job *job = data;
    Block temporaries[MOST_TEMPORARIES];
    size_t block = BLOCK_BYTES / job->item, begin = number * PER_TASK, end = begin + PER_TASK < job->size ? begin + PER_TASK : job->size;
    for (size_t start = begin; start < end; start += block)
        run_block(job, start, end - start < block ? end - start : block, temporaries, NULL);
}

/* Some channels of all images: whatever the threads, a sum is of the same terms in the same order. */
static void run_channels(void *data, size_t number)
{
    const Job *job = data;
    const Program *program = job->program;
    Block temporaries[MOST_TEMPORARIES];
    Totals totals = {{0}};
    size_t block = BLOCK_BYTES / job->item, first = number * job->together;
    size_t channels = job->channels - first < job->together ? job->channels - first : job->together, size = channels * job->inner;
    for (size_t image = 0; image < job->images; image++)
        for (size_t done = 0; done < size; done += block)
            run_block(job, (image * job->channels + first) * job->inner + done, size - done < block ? size - done : block, temporaries, totals);
    for (const Instruction *step = program->instructions; step < program->instructions + program->count; step++)
        for (size_t i = 0; step->function == SUM && i < channels; i++)
            put_sum(job->item, job->targets[step->to - program->inputs], first + i, totals[step->b][i]);
}

static const char *const NAMELESS = "Elementwise: an output without a name";
static const char *const OTHER_TYPE = "an output of elementwise operators has another type than the file says";

/* How an input is read for outputs of a shape; 0 where it does not broadcast to it, or by axes that are not next to each other. */
static int operand_of(Operand *operand, const int64_t *shape, size_t rank, const int64_t *other, size_t rank_of)
{
    if (rank_of > rank)
        return 0;
    size_t missing = rank - rank_of, low = rank, high = 0;
    for (size_t i = missing; i < rank; i++)
        if (other[i - missing] != 1) {
            low = low < i ? low : i;
            high = i + 1;
        }
    operand->inner = operand->count = 1;
    for (size_t i = low; i < high; i++) {
        if (other[i - missing] != shape[i])
            return 0;
        operand->count *= (size_t)shape[i];
    }
    for (size_t i = high; i < rank; i++)
        operand->inner *= (size_t)shape[i];
    return 1;
}

static int is_of_one(int32_t function) { return function == SQRT || function == NEG || function == SUM; }

/* Whether every output, or what it is the sum of, has the shape of `full`: something that it is made of has it. */
static int outputs_are_full(const Program *program, const char *is_full)
{
    char full[2 * MOST_PLACES + MOST_TEMPORARIES];
    memcpy(full, is_full, (size_t)program->inputs);
    for (const Instruction *step = program->instructions; step < program->instructions + program->count; step++)
        full[step->to] = full[step->a] || (!is_of_one(step->function) && full[step->b]);
    return !memchr(full + program->inputs, 0, (size_t)program->outputs);
}

/* What stands in a place when shapes are others than the file says. */
typedef struct { const char *data; char *own; size_t rank, count; int64_t shape[DIMS_MOST]; } Tensor;

/* The axis that is `back` axes before the last; 1 in front of the first. */
static int64_t dim_of(const Tensor *tensor, size_t back) { return back < tensor->rank ? tensor->shape[tensor->rank - 1 - back] : 1; }

/* An operator of whole tensors, which broadcast as ONNX says. NULL, or what is wrong. */
static const char *broadcast(int32_t function, size_t item, const Tensor *a, const Tensor *b, Tensor *to)
{
    const Tensor *read[2] = {a, b};
    size_t stride[2][DIMS_MOST], at[2] = {0, 0}, index[DIMS_MOST] = {0}, size[2] = {1, 1};
    to->rank = a->rank > b->rank ? a->rank : b->rank;
    to->count = 1;
    for (size_t back = 0; back < to->rank; back++) {
        int64_t p = dim_of(a, back), q = dim_of(b, back), dim = p == 1 ? q : p;
        if (q != dim && q != 1)
            return "inputs of elementwise operators do not broadcast to one another: one has another type or shape than the file says (value_info)";
        to->shape[to->rank - 1 - back] = dim;
        for (int k = 0; k < 2; k++) {
            int64_t own = dim_of(read[k], back);
            stride[k][back] = own == 1 ? 0 : size[k];
            size[k] *= (size_t)own;
        }
        if (dim && to->count > (size_t)PTRDIFF_MAX / sizeof(double) / (size_t)dim)
            return "Elementwise: a result larger than memory";
        to->count *= (size_t)dim;
    }
    to->own = malloc(to->count * item + 1);
    if (!to->own)
        return "Elementwise: no memory for a result";
    to->data = to->own;
    size_t width = to->rank ? (size_t)dim_of(to, 0) : 1;
    int one[2] = {!to->rank || !stride[0][0], !to->rank || !stride[1][0]};
    for (size_t done = 0; done < to->count; done += width) {
        char *row = to->own + done * item;
        const char *x = a->data + at[0] * item, *y = b->data + at[1] * item;
        if (item == sizeof(float))
            apply_float(function, (float *)row, (const float *)x, one[0], (const float *)y, one[1], width);
        else
            apply_double(function, (double *)row, (const double *)x, one[0], (const double *)y, one[1], width);
        for (size_t back = 1; back < to->rank; back++) { /* the next row */
            at[0] += stride[0][back];
            at[1] += stride[1][back];
            if (++index[back] < (size_t)dim_of(to, back))
                break;
            at[0] -= stride[0][back] * index[back];
            at[1] -= stride[1][back] * index[back];
            index[back] = 0;
        }
    }
    return NULL;
}

static const char *const NO_CHANNELS = "what is summed or normalized by channels has other dims than the file says";

/* A sum by channels of a whole tensor. NULL, or what is wrong. */
static const char *sum_channels(int64_t rank, size_t item, const Tensor *a, Tensor *to)
{
    if (a->rank != (size_t)rank)
        return NO_CHANNELS;
    /* of an empty tensor the other dims may be any */
    size_t images = a->count ? (size_t)a->shape[0] : 0, channels = (size_t)a->shape[1], inner = images ? a->count / images / channels : 0;
    if (channels > (size_t)PTRDIFF_MAX / sizeof(double))
        return "Elementwise: a result larger than memory";
    to->rank = 1, to->shape[0] = (int64_t)channels, to->count = channels;
    to->data = to->own = malloc(channels * item + 1);
    if (!to->own)
        return "Elementwise: no memory for a result";
    for (size_t channel = 0; channel < channels; channel++) {
        double total = 0;
        for (size_t image = 0; image < images; image++)
            total += sum_of(item, a->data + (image * channels + channel) * inner * item, inner);
        put_sum(item, to->own, channel, total);
    }
    return NULL;
}

/* The program operator by operator, each with a result of its own: shapes are others than the file says, and yet broadcast, as a name of a
 * dim that stands for 1 and for another number. The operators would run, so this does. */
static Status run_unequal(const Program *program, void *context, int kind)
{
    if (program->channels)
        return refused(NO_CHANNELS);
    size_t item = kind == ONNX_FLOAT ? sizeof(float) : sizeof(double), places = (size_t)(program->inputs + program->outputs) + MOST_TEMPORARIES;
    Tensor *tensors = calloc(places, sizeof *tensors);
    Status status = tensors ? NULL : refused("Elementwise: no memory");
    for (int32_t i = 0; !status && i < program->inputs; i++) {
        const void *value = NULL;
        int own = 0;
        Tensor *tensor = &tensors[i];
        status = CALL(INPUT, Status(*)(const void *, size_t, const void **))(context, (size_t)i, &value);
        if (!status && !value)
            status = refused("Elementwise: an input is missing");
        if (!status)
            status = tensor_facts(value, &own, &tensor->rank, tensor->shape, DIMS_MOST, &tensor->count);
        if (!status && own != kind)
            status = refused("an input of elementwise operators has another type or shape than the file says (value_info)");
        if (!status)
            status = CALL(TENSOR_DATA, Status(*)(const void *, void **))(value, (void **)&tensor->data);
    }
    for (const Instruction *step = program->instructions; !status && step < program->instructions + program->count; step++) {
        Tensor made = {0};
        const Tensor *a = &tensors[step->a];
        const char *wrong = step->function == SUM ? sum_channels(program->rank, item, a, &made) : broadcast(step->function, item, a, is_of_one(step->function) ? a : &tensors[step->b], &made);
        if (wrong)
            status = refused(wrong);
        free(tensors[step->to].own);
        tensors[step->to] = made;
    }
    for (int32_t i = 0; !status && i < program->outputs; i++) {
        const Tensor *tensor = &tensors[program->inputs + i];
        void *data = NULL;
        status = make_output(context, (size_t)i, tensor->shape, tensor->rank, kind, NAMELESS, OTHER_TYPE, &data);
        if (!status && tensor->count)
            memcpy(data, tensor->data, tensor->count * item);
    }
    for (size_t i = 0; tensors && i < places; i++)
        free(tensors[i].own);
    free(tensors);
    return status;
}

Status elementwise_compute(void *state, void *context)
{
    const Program *program = state;
    int64_t shape[DIMS_MOST], other[DIMS_MOST];
    size_t rank = 0, rank_of = 0, size = 0, count = 0, given = 0;
    int kind = 0, kind_of = 0;
    const void *value = NULL;
    Status status = CALL(INPUT_COUNT, Status(*)(const void *, size_t *))(context, &given);
    if (!status && given == (size_t)program->inputs)
        status = CALL(INPUT, Status(*)(const void *, size_t, const void **))(context, (size_t)program->full, &value);
    if (status)
        return status;
    if (!value)
        return refused("Elementwise: an input is missing");
    if ((status = tensor_facts(value, &kind, &rank, shape, DIMS_MOST, &size)))
        return status;
    if (kind != ONNX_FLOAT && kind != ONNX_DOUBLE)
        return refused("Elementwise: neither float32 nor float64");
    Operand operands[MOST_PLACES];
    char *targets[MOST_PLACES], is_full[MOST_PLACES];
    for (int32_t i = 0; i < program->inputs; i++) {
        value = NULL;
        if ((status = CALL(INPUT, Status(*)(const void *, size_t, const void **))(context, (size_t)i, &value)))
            return status;
        if (!value)
            return refused("Elementwise: an input is missing");
        if ((status = tensor_facts(value, &kind_of, &rank_of, other, DIMS_MOST, &count)))
            return status;
        if (kind_of != kind || !operand_of(&operands[i], shape, rank, other, rank_of))
            return run_unequal(program, context, kind);
        if (program->along[i] && size && (rank < 2 || operands[i].count != (size_t)shape[1] || (shape[1] != 1 && operands[i].inner != size / (size_t)shape[0] / (size_t)shape[1])))
            return refused(NO_CHANNELS); /* one channel has one number, which lies along any axis */
        is_full[i] = rank_of == rank && !memcmp(other, shape, rank * sizeof *shape);
        if ((status = CALL(TENSOR_DATA, Status(*)(const void *, void **))(value, (void **)&operands[i].data)))
            return status;
    }
    if (!outputs_are_full(program, is_full))
        return run_unequal(program, context, kind);
    if (program->sums && rank != (size_t)program->rank)
        return refused(NO_CHANNELS);
    for (int32_t i = 0; i < program->outputs; i++) {
        const int64_t *of = program->is_sum[i] ? shape + 1 : shape;
        if ((status = make_output(context, (size_t)i, of, program->is_sum[i] ? 1 : rank, kind, NAMELESS, OTHER_TYPE, (void **)&targets[i])))
            return status;
    }
    Job job = {.program = program, .item = kind == ONNX_FLOAT ? sizeof(float) : sizeof(double), .size = size, .operands = operands, .targets = targets};
    size_t tasks = size / PER_TASK + (size % PER_TASK != 0);
    if (program->sums) {
        job.images = size ? (size_t)shape[0] : 0, job.channels = (size_t)shape[1], job.inner = size ? size / job.images / job.channels : 0;
        job.together = job.inner ? BLOCK_BYTES / job.item / job.inner : CHANNELS;
        job.together = !job.together ? 1 : job.together < CHANNELS ? job.together : CHANNELS;
        tasks = (job.channels + job.together - 1) / job.together;
    }
    return in_parallel(context, program->sums ? run_channels : run_task, tasks, &job);
}

/* The program of a node: four ints an instruction. Nothing is read before it is written, nothing but a SUM writes where one does, and every
 * output is written. */
static Program *program_of(const int64_t *list, size_t length, size_t inputs, size_t outputs, int64_t full, int64_t rank)
{
    if (!list || !length || length % 4 || !inputs || !outputs || inputs > MOST_PLACES || outputs > MOST_PLACES || full < 0 || full >= (int64_t)inputs)
        return NULL;
    Program *program = calloc(1, sizeof *program + length / 4 * sizeof(Instruction));
    int64_t places = (int64_t)(inputs + outputs) + MOST_TEMPORARIES, first = (int64_t)inputs;
    enum { NUMBERS = 1, A_SUM };
    char *written = program ? calloc((size_t)places, 1) : NULL;
    int good = written != NULL;
    if (good)
        memset(written, NUMBERS, inputs);
    for (size_t i = 0; good && i < length; i += 4) {
        int64_t function = list[i], to = list[i + 1], a = list[i + 2], b = list[i + 3];
        good = function >= 0 && function < FUNCTION_COUNT && to >= first && to < places && a >= 0 && a < places && b >= 0 && b < places && written[a] == NUMBERS &&
               written[b] == NUMBERS && written[to] != A_SUM;
        if (good && function == SUM && (good = to < first + (int64_t)outputs && !written[to] && program->sums < MOST_SUMS)) {
            program->is_sum[to - first] = 1;
            b = program->sums++;
        }
        if (good) {
            program->instructions[i / 4] = (Instruction){(int32_t)function, (int32_t)to, (int32_t)a, (int32_t)b};
            written[to] = function == SUM ? A_SUM : NUMBERS;
        }
    }
    for (size_t i = 0; good && i < outputs; i++)
        good = written[inputs + i];
    good = good && (!program->sums || (rank >= 2 && rank <= DIMS_MOST));
    free(written);
    if (!good) {
        free(program);
        return NULL;
    }
    program->inputs = (int32_t)inputs;
    program->outputs = (int32_t)outputs;
    program->full = (int32_t)full;
    program->rank = rank;
    program->count = length / 4;
    return program;
}

Status elementwise_create(const CustomOp *op, const void *const *table, const void *info, void **out)
{
    (void)op, (void)table;
    size_t length = 0, inputs = 0, outputs = 0;
    int64_t full = -1, rank = 0, *list = ints(info, "program", &length);
    Status status = CALL(ATTR_INT, Status(*)(const void *, const char *, int64_t *))(info, "rank", &rank);
    if (status)
        CALL(RELEASE_STATUS, void (*)(Status))(status); /* there are no sums */
    status = CALL(ATTR_INT, Status(*)(const void *, const char *, int64_t *))(info, "full", &full);
    if (!status)
        status = count_places(info, &inputs, &outputs);
    Program *program = status ? NULL : program_of(list, length, inputs, outputs, full, rank);
    free(list);
    list = program ? ints(info, "channels", &length) : NULL;
    for (size_t i = 0; list && i < length; i++)
        if (list[i] >= 0 && list[i] < (int64_t)inputs)
            program->along[list[i]] = 1, program->channels = 1;
    free(list);
    if (status)
        return status;
    if (!program)
        return refused("pythonop.cpu::Elementwise stands for no chain of operators: no file has this node, inference_session makes it in memory");
    *out = program;
    return NULL;
}
