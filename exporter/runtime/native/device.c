#include "device.h"
#include "contexts.h"
#include "inputs.h"
#include "outputs.h"
#include "run.h"

enum { MEMORY_ID = 72, GPU_STREAM = 193, MEMORY_INFO = 194, DEVICE_TYPE = 225 };
enum { DL_CPU = 1, DL_CUDA = 2, ORT_GPU = 1 };

/* A tensor over the memory of an OrtValue. It is valid until the node ends: Python copies from or into it at once. */
static PyObject *borrow(Kernel *kernel, const void *value)
{
    Seen seen;
    const void *info = NULL;
    int type = 0, id = 0;
    if (look(value, &seen))
        return NULL;
    if (!item_size(seen.kind)) {
        damaged(kernel->object, "an input comes with an element type that has no torch dtype");
        return NULL;
    }
    if (check(CALL(MEMORY_INFO, Status(*)(const void *, const void **))(value, &info)) ||
        check(CALL(MEMORY_ID, Status(*)(const void *, int *))(info, &id)))
        return NULL;
    CALL(DEVICE_TYPE, void (*)(const void *, int *))(info, &type);
    View *view = calloc(1, sizeof(View) + (seen.rank + 1) * sizeof(int64_t));
    if (!view)
        return PyErr_NoMemory();
    view->state = 1; /* the memory is not ours: whenever torch lets go, only this struct is freed */
    memcpy(view->dims, seen.dims, seen.rank * sizeof(int64_t));
    DLTensor *tensor = &view->managed.tensor;
    tensor->data = seen.data;
    tensor->device.type = type == ORT_GPU ? DL_CUDA : DL_CPU;
    tensor->device.id = type == ORT_GPU ? id : 0;
    tensor->ndim = (int32_t)seen.rank;
    tensor->dtype = DTYPES[seen.kind];
    tensor->shape = view->dims;
    view->managed.context = view;
    view->managed.deleter = view_deleter;
    PyObject *out = wrap(&view->managed);
    return out && seen.kind >= 17 ? as_float8(kernel, out, seen.kind) : out;
}

/* Copy one result into an output of the node, allocated here unless `value` is given. */
static int write_device(Kernel *kernel, void *context, size_t index, PyObject *tensor, void *value, PyObject *stream)
{
    if (!value) {
        int64_t dims[MAX_RANK];
        PyObject *shape = PyObject_GetAttr(tensor, s_shape);
        if (!shape)
            return -1;
        Py_ssize_t rank = PySequence_Size(shape);
        if (rank > MAX_RANK)
            PyErr_SetString(PyExc_ValueError, "a tensor of more than 64 dimensions");
        for (Py_ssize_t i = 0; i < rank && i < MAX_RANK; i++) {
            PyObject *size = PySequence_GetItem(shape, i);
            dims[i] = size ? PyLong_AsLongLong(size) : -1;
            Py_XDECREF(size);
        }
        Py_DECREF(shape);
        if (PyErr_Occurred() ||
            check(CALL(OUTPUT, Status(*)(void *, size_t, const int64_t *, size_t, void **))(context, index, dims, (size_t)rank, &value)))
            return -1;
    }
    PyObject *target = value ? borrow(kernel, value) : NULL;
    if (!value)
        return 0; /* nobody reads this output */
    if (!target)
        return -1;
    PyObject *none = PyObject_CallMethodObjArgs(kernel->binding->owner, s_device_write, target, tensor, stream, NULL);
    Py_DECREF(target);
    Py_XDECREF(none);
    return none ? 0 : -1;
}

/* The context of a node whose results could not be written: its handle is the first of a PythonOp's, the last of a PythonOpBackward's. */
static void drop_handle(Kernel *kernel, PyObject *results)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *made = PyList_GetItem(results, kernel->backward ? PyList_Size(results) - 1 : 0);
    PyObject *handle = made && made != Py_None ? PyObject_CallMethodObjArgs(made, s_item, NULL) : NULL;
    if (handle)
        drop_context(kernel, PyLong_AsLongLong(handle));
    Py_XDECREF(handle);
    PyErr_Clear();
    PyErr_Restore(type, error, trace);
}

int compute_by_python(Kernel *kernel, void *context)
{
    size_t count = 0, first = kernel->backward ? 1 : 0;
    int has_context = !kernel->backward && !kernel->tangent; /* among its outputs */
    void *slot = NULL, *gpu_stream = NULL;
    const void *value = NULL;
    PyObject *inputs = PyList_New(kernel->inputs), *results = NULL, *extra = NULL, *stream = NULL;
    int status = -1;
    if (!inputs || check(CALL(INPUT_COUNT, Status(*)(const void *, size_t *))(context, &count)))
        goto done;
    Status no_stream = CALL(GPU_STREAM, Status(*)(const void *, void **))(context, &gpu_stream);
    if (no_stream)
        CALL(RELEASE_STATUS, void (*)(Status))(no_stream); /* the CPU has none */
    if (!(stream = PyLong_FromVoidPtr(gpu_stream)))
        goto done;
    for (Py_ssize_t i = 0; i < kernel->inputs; i++) {
        Py_INCREF(Py_None);
        PyList_SetItem(inputs, i, Py_None);
    }
    if (kernel->backward) {
        /* The context is declared to be in CPU memory. */
        Seen seen;
        if (check(CALL(INPUT, Status(*)(const void *, size_t, const void **))(context, 0, &value)) || (value && look(value, &seen)))
            goto done;
        if (!value || seen.kind != ONNX_INT64 || seen.count != 1) {
            damaged(kernel->object, "the context is not one int64 handle");
            goto done;
        }
        int64_t handle;
        memcpy(&handle, seen.data, sizeof handle);
        extra = PyLong_FromLongLong(handle);
    } else {
        if (has_context && check(CALL(OUTPUT, Status(*)(void *, size_t, const int64_t *, size_t, void **))(context, 0, NULL, 0, &slot)))
            goto done;
        if (count != (size_t)kernel->place_count) {
            damaged(kernel->object, "the graph gives it another number of tensors than its attributes say");
            goto done;
        }
        extra = PyBool_FromLong(slot != NULL);
    }
    for (size_t i = first; i < count && i - first < (size_t)kernel->place_count; i++) {
        if (check(CALL(INPUT, Status(*)(const void *, size_t, const void **))(context, i, &value)))
            goto done;
        PyObject *tensor = value ? borrow(kernel, value) : NULL;
        if (value && !tensor)
            goto done;
        if (tensor)
            PyList_SetItem(inputs, kernel->places[i - first], tensor);
    }
    /* One item an output of the call, None where there is none to write; a forward's first is its context. */
    results = extra ? PyObject_CallMethodObjArgs(kernel->binding->owner, s_device_run, kernel->object, inputs, extra, stream, NULL) : NULL;
    if (!results || !PyList_Check(results) || PyList_Size(results) != kernel->outputs + has_context) {
        internal("what device_run returned");
        goto done;
    }
    if (!has_context) {
        for (Py_ssize_t i = 0; i < kernel->written_count; i++) {
            PyObject *tensor = PyList_GetItem(results, kernel->written[i]);
            if (!tensor || (tensor != Py_None && write_device(kernel, context, (size_t)i, tensor, NULL, stream)))
                goto done;
        }
    } else {
        for (Py_ssize_t i = 0; i <= kernel->written_count; i++)
            if ((i || slot) && write_device(kernel, context, (size_t)i, PyList_GetItem(results, i), i ? NULL : slot, stream))
                goto done;
    }
    status = 0;
done:
    if (status && results && PyList_Check(results) && PyList_Size(results) && (has_context || kernel->again))
        drop_handle(kernel, results);
    Py_XDECREF(inputs);
    Py_XDECREF(results);
    Py_XDECREF(extra);
    Py_XDECREF(stream);
    return status;
}
