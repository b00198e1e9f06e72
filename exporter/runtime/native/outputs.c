#include "outputs.h"

/* ORT allocated for the type that the graph declares, which a file may have made another than the node's attribute. */
static int refuse_other_type(Kernel *kernel, size_t index, int declared, int made)
{
    PyObject *title = PyObject_GetAttr(kernel->object, s_title);
    if (title)
        PyErr_Format(run_error, "%U: the graph declares output %zu with ONNX element type %d, its attributes say %d: the file is damaged", title, index,
                     declared, made);
    Py_XDECREF(title);
    return -1;
}

static int write_strings(void *context, size_t index, PyObject *array, Kernel *kernel)
{
    /* (shape, list of bytes), from Python */
    PyObject *pair = PyObject_CallMethodObjArgs(kernel->binding->owner, s_strings, array, Py_None, NULL);
    if (!pair)
        return -1;
    PyObject *shape = PyTuple_GetItem(pair, 0), *list = PyTuple_GetItem(pair, 1);
    int64_t dims[MAX_RANK];
    int result = -1;
    Py_ssize_t rank = shape ? PyTuple_Size(shape) : -1, count = list ? PyList_Size(list) : -1;
    void *value = NULL;
    Seen seen;
    if (rank < 0 || count < 0) {
        internal("an array of strings");
        goto done;
    }
    if (rank > MAX_RANK) {
        PyErr_SetString(PyExc_ValueError, "a tensor of more than 64 dimensions");
        goto done;
    }
    for (Py_ssize_t i = 0; i < rank; i++)
        dims[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
    if (PyErr_Occurred() || check(CALL(OUTPUT, Status(*)(void *, size_t, const int64_t *, size_t, void **))(context, index, dims, (size_t)rank, &value)))
        goto done;
    if (value && look(value, &seen))
        goto done;
    if (value && (seen.kind != ONNX_STRING || seen.count != (size_t)count)) {
        refuse_other_type(kernel, index, seen.kind, ONNX_STRING);
        goto done;
    }
    for (Py_ssize_t i = 0; value && i < count; i++) {
        char *bytes = NULL, *room = NULL;
        Py_ssize_t length = 0;
        if (PyBytes_AsStringAndSize(PyList_GetItem(list, i), &bytes, &length) ||
            check(CALL(STRING_BUFFER, Status(*)(void *, size_t, size_t, char **))(value, (size_t)i, (size_t)length, &room)))
            goto done;
        if (length)
            memcpy(room, bytes, (size_t)length); /* it may hold NULs */
    }
    result = 0;
done:
    Py_DECREF(pair);
    return result;
}

/* Whether the strides are those of a dense row-major tensor. */
static int dense(const DLTensor *tensor)
{
    uint64_t expected = 1; /* wraps where the tensor is not dense anyway */
    if (!tensor->strides)
        return 1;
    for (int i = 0; i < tensor->ndim; i++)
        if (tensor->shape[i] == 0)
            return 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] != 1 && (uint64_t)tensor->strides[i] != expected)
            return 0;
        expected *= (uint64_t)tensor->shape[i];
    }
    return 1;
}

static float from_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 0x3ff, bits;
    if (exponent == 31)
        bits = sign | 0x7f800000 | fraction << 13;
    else if (exponent)
        bits = sign | (exponent + 112) << 23 | fraction << 13;
    else { /* zero or subnormal: fraction * 2**-24 is exact */
        float value = (float)fraction * 5.9604644775390625e-8f;
        return sign ? -value : value;
    }
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

int write_tensor(Kernel *kernel, void *context, size_t index, PyObject *tensor, int kind, Py_ssize_t place, size_t *bytes)
{
    PyObject *capsule = NULL, *fixed = NULL;
    DLTensor *source = NULL;
    int result = -1;
    *bytes = 0;
    if (kind == ONNX_STRING)
        return write_strings(context, index, tensor, kernel);
    for (int attempt = 0; attempt < 2; attempt++) {
        capsule = kind >= 17 && !attempt ? NULL : PyObject_CallFunctionObjArgs(to_dlpack, tensor, NULL);
        if (capsule) {
            DLManaged *managed = PyCapsule_GetPointer(capsule, "dltensor");
            source = managed ? &managed->tensor : NULL;
            DLDataType want = DTYPES[kind];
            if (source && dense(source) && source->device.type == 1 && (!kind || (source->dtype.code == want.code && source->dtype.bits == want.bits)))
                break;
            Py_CLEAR(capsule);
        }
        if (attempt)
            break;
        /* Not a plain dense CPU tensor of the promised type: Python makes it one, or says what is wrong. */
        PyErr_Clear();
        PyObject *where = PyLong_FromSsize_t(place);
        fixed = where ? PyObject_CallMethodObjArgs(kernel->binding->owner, s_fix, kernel->object, where, tensor, NULL) : NULL;
        Py_XDECREF(where);
        if (!fixed)
            return -1;
        tensor = fixed;
    }
    if (!capsule) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "an output cannot be read by DLPack");
        goto done;
    }
    void *value = NULL;
    Seen seen;
    if (check(CALL(OUTPUT, Status(*)(void *, size_t, const int64_t *, size_t, void **))(context, index, source->shape, (size_t)source->ndim, &value)))
        goto done;
    if (value) {
        if (bytes_of(source->shape, (size_t)source->ndim, source->dtype.bits / 8, bytes) || look(value, &seen))
            goto done;
        if (*bytes && !source->data) {
            PyErr_SetString(PyExc_TypeError, "an output is a tensor without data");
            goto done;
        }
        DLDataType room = item_size(seen.kind) ? DTYPES[seen.kind] : (DLDataType){0, 0, 0};
        /* Between two operators that it runs in float32, ORT widens a float16 node without asking its kernel. */
        if (kind == ONNX_HALF && seen.kind == ONNX_FLOAT && seen.count * sizeof(uint16_t) == *bytes) {
            const uint16_t *halves = (const uint16_t *)((char *)source->data + source->offset);
            for (size_t i = 0; i < seen.count; i++)
                ((float *)seen.data)[i] = from_half(halves[i]);
        } else if ((kind && seen.kind != kind) || room.code != source->dtype.code || room.bits != source->dtype.bits ||
                   seen.count != *bytes / item_size(seen.kind)) {
            refuse_other_type(kernel, index, seen.kind, kind);
            goto done;
        } else if (*bytes)
            memcpy(seen.data, (char *)source->data + source->offset, *bytes);
    }
    result = 0;
done:
    Py_XDECREF(capsule);
    Py_XDECREF(fixed);
    return result;
}
