/* pythonop.cpu::Interleave: images (N, C, H, W) of whose places each phase by the strides is a tensor of its own.
 *
 * No file has this node: exporter/cpu/phases.py makes it in memory of a ConvTranspose with strides, whose places with the same
 * remainders by the strides are what a Conv without strides computes, in onnxruntime's blocks of channels: (N, C / block, H', W', block).
 * It holds no Python object and takes no lock in a run, and nothing is read but of tensors whose shapes were compared with the images'.
 */
#include "kernels.h"
#include "vectors.h"
#ifdef __x86_64__
#include <xmmintrin.h>
#endif

enum { MOST_PHASES = 4, MOST_BLOCK = 64, FOUR = 4 };

static const char *const OTHER_PHASES = "the file says of the input of a ConvTranspose another shape than it has";

typedef struct {
    int64_t strides[2], images[4], block; /* 1 or 2; the shape, -1: any number of images; channels of a block */
    int64_t phases[MOST_PHASES]; /* the input of the places with these remainders, -1: they are zero */
    size_t inputs;
} Phases;

typedef struct {
    const Phases *how;
    const float *from[MOST_PHASES];
    float *to;
    size_t rows, per_task; /* of one block of channels each: in all, and of a task */
} Interleaving;

/* Places along an axis with a remainder. */
static int64_t of_phase(int64_t size, int64_t stride, int64_t remainder) { return (size - remainder + stride - 1) / stride; }

/* Four channels of four places beside each other; from[i] has those of place i. */
static void turn_four(float *to, size_t plane, const float *const from[FOUR])
{
#ifdef __x86_64__
    __m128 a = _mm_loadu_ps(from[0]), b = _mm_loadu_ps(from[1]), c = _mm_loadu_ps(from[2]), d = _mm_loadu_ps(from[3]);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, a);
    _mm_storeu_ps(to + plane, b);
    _mm_storeu_ps(to + 2 * plane, c);
    _mm_storeu_ps(to + 3 * plane, d);
#else
    for (size_t channel = 0; channel < FOUR; channel++)
        for (size_t i = 0; i < FOUR; i++)
            to[channel * plane + i] = from[i][channel];
#endif
}

/* Row `row` of the images, of the channels of one block; rows follow one another in images, blocks and along the height. */
static void interleave_row(const Interleaving *run, size_t row)
{
    static const float zeros[MOST_BLOCK];
    const Phases *how = run->how;
    const size_t block = (size_t)how->block, height = (size_t)how->images[2], width = (size_t)how->images[3], plane = height * width;
    const size_t down = (size_t)how->strides[0], along = (size_t)how->strides[1], y = row % height, blocks = row / height; /* before it */
    const float *from[2] = {zeros, zeros};
    size_t steps[2] = {0, 0};
    for (size_t phase = 0; phase < along; phase++) {
        int64_t input = how->phases[y % down * along + phase];
        if (input < 0)
            continue;
        size_t high = (size_t)of_phase(how->images[2], how->strides[0], (int64_t)(y % down));
        size_t wide = (size_t)of_phase(how->images[3], how->strides[1], (int64_t)phase);
        from[phase] = run->from[input] + ((blocks * high + y / down) * wide) * block;
        steps[phase] = block;
    }
    float *to = run->to + blocks * block * plane + y * width;
    /* Four channels at a time: rows of all of them may lie in the same lines of the cache. */
    for (size_t channel = 0; channel < block; channel += FOUR, to += FOUR * plane) {
        size_t x = 0;
        const float *at[FOUR];
        size_t jumps[FOUR];
        for (size_t i = 0; i < FOUR; i++) {
            at[i] = from[i % along] + i / along * steps[i % along] + channel;
            jumps[i] = FOUR / along * steps[i % along];
        }
        for (; x + FOUR <= width; x += FOUR) {
            turn_four(to + x, plane, at);
            for (size_t i = 0; i < FOUR; i++)
                at[i] += jumps[i];
        }
        for (size_t i = 0; x < width; x++, i++)
            for (size_t c = 0; c < FOUR; c++)
                to[c * plane + x] = at[i][c];
    }
}

static void interleave_task(void *data, size_t task)
{
    const Interleaving *run = data;
    size_t first = task * run->per_task, end = run->rows - first < run->per_task ? run->rows : first + run->per_task;
    for (size_t row = first; row < end; row++)
        interleave_row(run, row);
}

Status interleave_compute(void *state, void *context)
{
    const Phases *how = state;
    Interleaving run = {.how = how};
    int64_t shape[4] = {how->images[0], how->images[1], how->images[2], how->images[3]};
    Status status = NULL;
    for (size_t phase = 0; phase < (size_t)(how->strides[0] * how->strides[1]); phase++) {
        const void *value = NULL;
        int64_t dims[DIMS_MOST], input = how->phases[phase];
        size_t rank = 0, count = 0;
        int kind = 0;
        if (input < 0)
            continue;
        if ((status = CALL(INPUT, Status(*)(const void *, size_t, const void **))(context, (size_t)input, &value)))
            return status;
        if (!value)
            return refused("Interleave: an input is missing");
        if ((status = tensor_facts(value, &kind, &rank, dims, DIMS_MOST, &count)))
            return status;
        if (kind != ONNX_FLOAT)
            return refused("Interleave: not float32");
        shape[0] = shape[0] < 0 && rank ? dims[0] : shape[0];
        int64_t high = of_phase(shape[2], how->strides[0], (int64_t)phase / how->strides[1]);
        int64_t wide = of_phase(shape[3], how->strides[1], (int64_t)phase % how->strides[1]);
        if (rank != 4 || dims[0] != shape[0] || dims[1] != shape[1] || dims[2] != high || dims[3] != wide)
            return refused(OTHER_PHASES);
        if ((status = CALL(TENSOR_DATA, Status(*)(const void *, void **))(value, (void **)&run.from[input])))
            return status;
    }
    if ((status = make_output(context, 0, shape, 4, ONNX_FLOAT, "Interleave: an output without a name",
                              "an output of a ConvTranspose has another type than the file says", (void **)&run.to)))
        return status;
    size_t wide = (size_t)(how->block * shape[3]);
    run.rows = (size_t)(shape[0] * (shape[1] / how->block) * shape[2]);
    run.per_task = wide < PER_TASK ? PER_TASK / wide : 1;
    size_t tasks = (run.rows + run.per_task - 1) / run.per_task;
    return in_parallel(context, interleave_task, tasks, &run);
}

Status interleave_create(const CustomOp *op, const void *const *table, const void *info, void **out)
{
    (void)op, (void)table;
    Phases *how = calloc(1, sizeof *how);
    size_t outputs = 0;
    Status status = count_places(info, how ? &how->inputs : &outputs, &outputs);
    int good = how && !status && outputs == 1 && read_list(info, "strides", how->strides, 2, 0, 1) &&
               read_list(info, "images", how->images, 4, 1, 0) &&
               read_list(info, "block", &how->block, 1, 0, FOUR) && how->strides[0] <= 2 && how->strides[1] <= 2 && how->block <= MOST_BLOCK &&
               how->block % FOUR == 0 && how->images[1] % how->block == 0 &&
               read_list(info, "phases", how->phases, (size_t)(how->strides[0] * how->strides[1]), MOST_PHASES, 0);
    /* Each input once, in the order of the phases; no size that overflows with others of its kind. */
    int64_t next = 0, size = 1;
    for (size_t phase = 0; good && phase < (size_t)(how->strides[0] * how->strides[1]); phase++)
        if (how->phases[phase] >= 0)
            good = how->phases[phase] == next++;
    for (size_t i = 1; good && i < 4; i++) {
        good = how->images[i] > 0 && how->images[i] <= FAR / size;
        size *= good ? how->images[i] : 1;
    }
    if (!good || !next || (size_t)next != how->inputs) {
        free(how);
        return status ? status : refused("pythonop.cpu::Interleave stands for no operators: no file has this node, inference_session makes it in memory");
    }
    *out = how;
    return NULL;
}
