/* What the accelerator's kernels ask of onnxruntime: tensors, attributes, threads. */
#ifndef PYTHONOP_CPU_TENSORS_H
#define PYTHONOP_CPU_TENSORS_H

#include "../../runtime/native/atomics.h"
#include "../../runtime/native/ort_abi.h"

enum { DIMS_MOST = 16, PER_TASK = 1 << 15 }; /* axes of a tensor; elements that one task makes */
/* No start, step or size is more. */
#define FAR ((int64_t)1 << 40)

static inline Status refused(const char *text) { return CALL(CREATE_STATUS, Status(*)(int, const char *))(ORT_FAIL, text); }

/* What a tensor is; shape has room for `most` dims. */
static inline Status tensor_facts(const void *value, int *kind, size_t *rank, int64_t *shape, size_t most, size_t *count)
{
    void *info = NULL;
    Status status = CALL(TYPE_AND_SHAPE, Status(*)(const void *, void **))(value, &info);
    if (status)
        return status;
    if (!(status = CALL(ELEMENT_TYPE, Status(*)(const void *, int *))(info, kind)) && !(status = CALL(DIM_COUNT, Status(*)(const void *, size_t *))(info, rank)) &&
        *rank <= most)
        status = CALL(DIMS, Status(*)(const void *, int64_t *, size_t))(info, shape, *rank);
    CALL(RELEASE_INFO, void (*)(void *))(info);
    if (!status && *rank > most)
        return refused("a tensor of more than 16 dims");
    *count = 1;
    for (size_t i = 0; !status && i < *rank; i++)
        *count *= (size_t)shape[i];
    return status;
}

/* An input of this element type; what is wrong where it is another. */
static inline Status input_of(void *context, size_t index, int kind, const char *wrong, int64_t *dims, size_t *rank, size_t *count, const void **data)
{
    const void *value = NULL;
    int own = 0;
    Status status = CALL(INPUT, Status(*)(const void *, size_t, const void **))(context, index, &value);
    if (!status && value)
        status = tensor_facts(value, &own, rank, dims, DIMS_MOST, count);
    if (!status && own != kind)
        return refused(wrong);
    return status ? status : CALL(TENSOR_DATA, Status(*)(const void *, void **))(value, (void **)data);
}

/* The memory of an output of this shape and element type; what is said where it has no name, and where the file says another type of it. */
static inline Status make_output(void *context, size_t index, const int64_t *shape, size_t rank, int kind, const char *nameless, const char *other, void **data)
{
    void *made = NULL;
    int64_t dims[DIMS_MOST];
    size_t count = 0, wanted = 1;
    int own = 0;
    for (size_t i = 0; i < rank; i++)
        wanted *= (size_t)shape[i];
    Status status = CALL(OUTPUT, Status(*)(void *, size_t, const int64_t *, size_t, void **))(context, index, shape, rank, &made);
    if (!status && !made)
        return refused(nameless);
    if (!status)
        status = tensor_facts(made, &own, &rank, dims, DIMS_MOST, &count);
    if (!status && (own != kind || count != wanted))
        return refused(other);
    return status ? status : CALL(TENSOR_DATA, Status(*)(void *, void **))(made, data);
}

/* All tasks of a kernel, in the session's threads where there are several. */
static inline Status in_parallel(void *context, void (*task)(void *, size_t), size_t tasks, void *run)
{
    if (tasks > 1)
        return CALL(PARALLEL_FOR, Status(*)(const void *, void (*)(void *, size_t), size_t, size_t, void *))(context, task, tasks, 0, run);
    if (tasks)
        task(run, 0);
    return NULL;
}

/* How many inputs and outputs a node has. */
static inline Status count_places(const void *info, size_t *inputs, size_t *outputs)
{
    Status status = CALL(NODE_INPUTS, Status(*)(const void *, size_t *))(info, inputs);
    return status ? status : CALL(NODE_OUTPUTS, Status(*)(const void *, size_t *))(info, outputs);
}

/* A list of ints of the node; NULL where there is none, or no memory. */
static inline int64_t *ints(const void *info, const char *name, size_t *count)
{
    *count = 0;
    Status status = CALL(ATTRS_INT, Status(*)(const void *, const char *, int64_t *, size_t *))(info, name, NULL, count);
    int64_t *list = status || *count > (1 << 20) ? NULL : malloc(*count * sizeof *list + 1);
    if (list && *count)
        status = CALL(ATTRS_INT, Status(*)(const void *, const char *, int64_t *, size_t *))(info, name, list, count);
    if (status) {
        CALL(RELEASE_STATUS, void (*)(Status))(status);
        free(list);
        return NULL;
    }
    return list;
}

/* A list of a node's ints: `count` of them, or any number up to DIMS_MOST where that is 0; how many there are, 0 where they are not as
 * `open` (how many of -1) and `least` say. */
static inline size_t read_list(const void *info, const char *name, int64_t *to, size_t count, int open, int64_t least)
{
    size_t length = 0;
    int64_t *list = ints(info, name, &length);
    int good = list && length && (count ? length == count : length <= DIMS_MOST);
    for (size_t i = 0; good && i < length; i++) {
        good = list[i] <= FAR && list[i] >= -FAR && (list[i] >= least || (list[i] == -1 && open-- > 0));
        to[i] = list[i];
    }
    free(list);
    return good ? length : 0;
}

#endif
