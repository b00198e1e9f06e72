/* pythonop.cpu::Elementwise: a chain of elementwise operators as one pass over memory.
 *
 * No file has this node: exporter/cpu/elementwise.py makes it in memory of Add, Sub, Mul, Div, Sqrt and Neg, of comparisons that
 * become numbers or let numbers through, and of what replaces NaN. It computes block by block, so that what lies between two operators
 * stays in the cache, and rounds as they do: after each of them. It holds no Python object and takes no lock in a run. A file that brings
 * one of its own meets the checks of `program_of` and `operand_of`, which let nothing outside the blocks and the operands be read or written.
 */
#include <math.h>

#include "kernels.h"
#include "vectors.h"

enum { ADD = 0, SUB, MUL, DIV, SQRT, NEG, GREATER, GUARD, GATE, FUNCTION_COUNT }; /* as FUNCTIONS in elementwise.py */
enum { BLOCK_BYTES = 4096, MOST_TEMPORARIES = 12, MOST_PLACES = 512 };

/* to, a, b: places. First the inputs, then the outputs, then temporaries. */
typedef struct { int32_t function, to, a, b; } Instruction;

typedef struct {
    int32_t inputs, outputs, full; /* full: the input that has the shape of the outputs */
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
} Job;

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

/* n elements of the outputs from one on. */
static void run_block(const Job *job, size_t start, size_t n, Block *temporaries)
{
    const Program *program = job->program;
    Block rooms[2];
    size_t offset = start * job->item;
    int32_t first = program->inputs + program->outputs;
    for (const Instruction *step = program->instructions; step < program->instructions + program->count; step++) {
        const char *read[2];
        int one[2] = {0, 0};
        for (int k = 0; k < 2; k++) {
            int32_t place = k ? step->b : step->a;
            read[k] = place < program->inputs ? operand_at(&job->operands[place], job->item, start, n, &rooms[k], &one[k])
                      : place < first         ? job->targets[place - program->inputs] + offset
                                              : temporaries[place - first].bytes;
        }
        char *to = step->to < first ? job->targets[step->to - program->inputs] + offset : temporaries[step->to - first].bytes;
        if (job->item == sizeof(float))
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
        run_block(job, start, end - start < block ? end - start : block, temporaries);
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

static int is_of_one(int32_t function) { return function == SQRT || function == NEG; }

/* Whether every output has the shape of `full`: something that it is made of has it. */
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

/* The program operator by operator, each with a result of its own: shapes are others than the file says, and yet broadcast, as a name of a
 * dim that stands for 1 and for another number. The operators would run, so this does. */
static Status run_unequal(const Program *program, void *context, int kind)
{
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
        const char *wrong = broadcast(step->function, item, a, is_of_one(step->function) ? a : &tensors[step->b], &made);
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
        is_full[i] = rank_of == rank && !memcmp(other, shape, rank * sizeof *shape);
        if ((status = CALL(TENSOR_DATA, Status(*)(const void *, void **))(value, (void **)&operands[i].data)))
            return status;
    }
    if (!outputs_are_full(program, is_full))
        return run_unequal(program, context, kind);
    for (int32_t i = 0; i < program->outputs; i++)
        if ((status = make_output(context, (size_t)i, shape, rank, kind, NAMELESS, OTHER_TYPE, (void **)&targets[i])))
            return status;
    Job job = {.program = program, .item = kind == ONNX_FLOAT ? sizeof(float) : sizeof(double), .size = size, .operands = operands, .targets = targets};
    return in_parallel(context, run_task, size / PER_TASK + (size % PER_TASK != 0), &job);
}

/* The program of a node: four ints an instruction. Nothing is read before it is written, and every output is written. */
static Program *program_of(const int64_t *list, size_t length, size_t inputs, size_t outputs, int64_t full)
{
    if (!list || !length || length % 4 || !inputs || !outputs || inputs > MOST_PLACES || outputs > MOST_PLACES || full < 0 || full >= (int64_t)inputs)
        return NULL;
    Program *program = calloc(1, sizeof *program + length / 4 * sizeof(Instruction));
    int64_t places = (int64_t)(inputs + outputs) + MOST_TEMPORARIES, first = (int64_t)inputs;
    char *written = program ? calloc((size_t)places, 1) : NULL;
    int good = written != NULL;
    if (good)
        memset(written, 1, inputs);
    for (size_t i = 0; good && i < length; i += 4) {
        int64_t function = list[i], to = list[i + 1], a = list[i + 2], b = list[i + 3];
        good = function >= 0 && function < FUNCTION_COUNT && to >= first && to < places && a >= 0 && a < places && b >= 0 && b < places && written[a] && written[b];
        if (good) {
            program->instructions[i / 4] = (Instruction){(int32_t)function, (int32_t)to, (int32_t)a, (int32_t)b};
            written[to] = 1;
        }
    }
    for (size_t i = 0; good && i < outputs; i++)
        good = written[inputs + i];
    free(written);
    if (!good) {
        free(program);
        return NULL;
    }
    program->inputs = (int32_t)inputs;
    program->outputs = (int32_t)outputs;
    program->full = (int32_t)full;
    program->count = length / 4;
    return program;
}

Status elementwise_create(const CustomOp *op, const void *const *table, const void *info, void **out)
{
    (void)op, (void)table;
    size_t length = 0, inputs = 0, outputs = 0;
    int64_t full = -1, *list = ints(info, "program", &length);
    Status status = CALL(ATTR_INT, Status(*)(const void *, const char *, int64_t *))(info, "full", &full);
    if (!status)
        status = count_places(info, &inputs, &outputs);
    Program *program = status ? NULL : program_of(list, length, inputs, outputs, full);
    free(list);
    if (status)
        return status;
    if (!program)
        return refused("pythonop.cpu::Elementwise stands for no chain of operators: no file has this node, inference_session makes it in memory");
    *out = program;
    return NULL;
}
