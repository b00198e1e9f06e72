/* Tensors between ONNX Runtime and torch. Part of native.c, its only user. */
#ifndef PYTHONOP_NATIVE_TENSORS_H
#define PYTHONOP_NATIVE_TENSORS_H

#include "native_abi.h"

/* ------------------------------------------------------------------------------------------------ our own structs */

/* What one process knows; filled by setup(). */
static PyObject *from_dlpack, *to_dlpack, *is_grad_enabled, *set_grad_enabled, *is_autocast, *is_inference, *run_backward, *urandom, *release_leaf, *gradient_edge,
    *run_error;
static PyObject *s_requires_grad, *s_run, *s_retain, *s_keep, *s_finish, *s_take, *s_version, *s_strings, *s_view, *s_plan, *s_fix, *s_data, *s_clone,
    *s_escaped, *s_failed, *s_title, *s_shape, *s_device_run, *s_device_write;
static size_t large = 1 << 16;

/* Which operators a binding registers: for the CPU; for CUDA as well; for the CPU by the device path, for tests. */
enum Device { CPU_ONLY = 0, WITH_CUDA, BORROW };

/* One set of options: its gate and store as Python objects, its two operators. Kernels and options count. */
typedef struct Binding {
    Py_ssize_t count;
    CustomOp forward, backward, device_forward, device_backward;
    int device; /* enum Device */
    void *domain;
    PyObject *owner;    /* exporter.runtime.session.Binding */
    PyObject *store, *contexts, *runs; /* its store, and two dicts of that */
} Binding;

/* How an input of a node is handed to torch. A run proves something about itself only, so the first one copies and
 * looks: the copy is unchanged, and its memory was given back before the node ended. From then on torch reads ORT's
 * memory. Otherwise every run copies. A later run that keeps or changes a view anyway is an error, never silence. */
enum { UNKNOWN = 0, VIEW, COPY };

typedef struct Kernel {
    Binding *binding;
    PyObject *object; /* kernels.PythonOp or kernels.PythonOpGrad */
    int backward, on_device, fast, single;
    PyObject *apply, *arguments; /* fast forward: the bound method, the tuple of arguments with None at the slots */
    Py_ssize_t inputs, outputs;  /* tensors in (without the context), tensors out of the call */
    Py_ssize_t *positions;       /* fast forward: where each input stands among the arguments */
    Py_ssize_t *places;          /* which input of the call the node's inputs are, -1: ignored */
    Py_ssize_t *written;         /* which output of the call the node's outputs are */
    Py_ssize_t place_count, written_count;
    char *flags;                 /* forward: requires_grad; backward: wanted */
    int32_t *kinds;              /* ONNX element types of the outputs, 0 unknown */
    unsigned char *modes;        /* forward: two rows, without and with a context */
    PyObject *id, *name;
} Kernel;

/* A tensor over memory of ORT, or over a copy of it. */
typedef struct {
    DLManaged managed;
    atomic_flag_t state; /* who came second frees: 1 the node has ended, 2 torch has let go */
    int64_t dims[];      /* shape, then the copied data */
} View;

typedef struct {
    View *view;
    PyObject *tensor;
    const void *source;
    size_t bytes;
    int mode;
} Input;

static void view_deleter(DLManaged *managed)
{
    View *view = managed->context;
    if (exchange(&view->state, 2) == 1)
        free(view);
}

static void capsule_destructor(PyObject *capsule)
{
    /* Only for a capsule that torch did not take over (it renames those). */
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        DLManaged *managed = PyCapsule_GetPointer(capsule, "dltensor");
        managed->deleter(managed);
    }
}

/* The tensor of a DLManaged, which is torch's from here on, also when this fails. */
static PyObject *wrap(DLManaged *managed)
{
    PyObject *capsule = PyCapsule_New(managed, "dltensor", capsule_destructor);
    if (!capsule) {
        managed->deleter(managed);
        return NULL;
    }
    PyObject *tensor = PyObject_CallFunctionObjArgs(from_dlpack, capsule, NULL);
    Py_DECREF(capsule);
    return tensor;
}

/* Bytes as the float8 that they are; takes the reference. */
static PyObject *as_float8(Kernel *kernel, PyObject *tensor, int element_type)
{
    PyObject *kind = PyLong_FromLong(element_type);
    PyObject *viewed = kind ? PyObject_CallMethodObjArgs(kernel->binding->owner, s_view, tensor, kind, NULL) : NULL;
    Py_XDECREF(kind);
    Py_DECREF(tensor);
    return viewed;
}

/* Raise an ORT error as RuntimeError; -1 on error. */
static int check(Status status)
{
    if (!status)
        return 0;
    PyErr_Format(PyExc_RuntimeError, "onnxruntime: %s", CALL(2, const char *(*)(Status))(status));
    CALL(RELEASE_STATUS, void (*)(Status))(status);
    return -1;
}

/* Raise RunError about a node; returns -1. */
static int damaged(PyObject *kernel, const char *text)
{
    PyObject *title = PyObject_GetAttr(kernel, s_title);
    if (title)
        PyErr_Format(run_error, "%U: %s: the file is damaged", title, text);
    Py_XDECREF(title);
    return -1;
}

static size_t item_size(int kind) { return kind > 0 && kind <= ONNX_LAST ? DTYPES[kind].bits / 8 : 0; }

/* ------------------------------------------------------------------------------------------------- ORT -> torch */

#define MAX_RANK 64

typedef struct { int kind; size_t rank, count; int64_t dims[MAX_RANK]; void *data; } Seen;

/* Element type, shape and address of an OrtValue. */
static int look(const void *value, Seen *seen)
{
    void *info = NULL;
    if (check(CALL(TYPE_AND_SHAPE, Status(*)(const void *, void **))(value, &info)))
        return -1;
    Status status = CALL(ELEMENT_TYPE, Status(*)(const void *, int *))(info, &seen->kind);
    if (!status)
        status = CALL(DIM_COUNT, Status(*)(const void *, size_t *))(info, &seen->rank);
    if (!status && seen->rank > MAX_RANK) {
        CALL(RELEASE_INFO, void (*)(void *))(info);
        PyErr_SetString(PyExc_ValueError, "a tensor of more than 64 dimensions");
        return -1;
    }
    if (!status)
        status = CALL(DIMS, Status(*)(const void *, int64_t *, size_t))(info, seen->dims, seen->rank);
    CALL(RELEASE_INFO, void (*)(void *))(info);
    if (check(status))
        return -1;
    seen->count = 1;
    for (size_t i = 0; i < seen->rank; i++)
        seen->count *= (size_t)seen->dims[i];
    seen->data = NULL;
    if (seen->kind != ONNX_STRING && check(CALL(TENSOR_DATA, Status(*)(const void *, void **))(value, &seen->data)))
        return -1;
    return 0;
}

static PyObject *strings_of(Kernel *kernel, const void *value, const Seen *seen)
{
    PyObject *list = PyList_New((Py_ssize_t)seen->count), *shape = PyTuple_New((Py_ssize_t)seen->rank), *out = NULL;
    if (!list || !shape)
        goto done;
    for (size_t i = 0; i < seen->rank; i++)
        PyTuple_SetItem(shape, (Py_ssize_t)i, PyLong_FromLongLong(seen->dims[i]));
    for (size_t i = 0; i < seen->count; i++) {
        size_t length = 0;
        if (check(CALL(STRING_LENGTH, Status(*)(const void *, size_t, size_t *))(value, i, &length)))
            goto done;
        char *text = malloc(length + 1);
        if (!text) {
            PyErr_NoMemory();
            goto done;
        }
        PyObject *item = NULL;
        if (!check(CALL(STRING_ELEMENT, Status(*)(const void *, size_t, size_t, void *))(value, length, i, text)))
            item = PyUnicode_DecodeUTF8(text, (Py_ssize_t)length, "surrogateescape");
        free(text);
        if (!item)
            goto done;
        PyList_SetItem(list, (Py_ssize_t)i, item);
    }
    out = PyObject_CallMethodObjArgs(kernel->binding->owner, s_strings, list, shape, NULL);
done:
    Py_XDECREF(list);
    Py_XDECREF(shape);
    return out;
}

/* The tensor for one OrtValue. mode: VIEW reads ORT's memory, anything else copies. */
static int gather(Kernel *kernel, const void *value, int mode, Input *input)
{
    Seen seen;
    if (look(value, &seen))
        return -1;
    if (seen.kind == ONNX_STRING)
        return (input->tensor = strings_of(kernel, value, &seen)) ? 0 : -1;
    size_t size = item_size(seen.kind);
    if (!size) {
        PyErr_Format(PyExc_TypeError, "tensors of ONNX element type %d have no torch dtype", seen.kind);
        return -1;
    }
    input->bytes = seen.count * size;
    input->source = seen.data;
    input->mode = input->bytes < large ? COPY : mode;
    size_t head = sizeof(View) + seen.rank * sizeof(int64_t);
    head = (head + 63) & ~(size_t)63;
    View *view = malloc(head + (input->mode == VIEW ? 0 : input->bytes));
    if (!view) {
        PyErr_NoMemory();
        return -1;
    }
    memset(&view->managed, 0, sizeof view->managed);
    view->state = input->bytes < large; /* a small copy is torch's alone */
    memcpy(view->dims, seen.dims, seen.rank * sizeof(int64_t));
    DLTensor *tensor = &view->managed.tensor;
    tensor->data = seen.data;
    if (input->mode != VIEW) {
        tensor->data = (char *)view + head;
        memcpy(tensor->data, seen.data, input->bytes);
    }
    tensor->device.type = 1;
    tensor->ndim = (int32_t)seen.rank;
    tensor->dtype = DTYPES[seen.kind];
    tensor->shape = view->dims;
    view->managed.context = view;
    view->managed.deleter = view_deleter;
    if (input->bytes >= large)
        input->view = view;
    input->tensor = wrap(&view->managed);
    if (input->tensor && seen.kind >= 17)
        input->tensor = as_float8(kernel, input->tensor, seen.kind);
    return input->tensor ? 0 : -1;
}

/* What a call left of its large inputs decides how the next run hands them over. The inputs' tensors are released
 * here; on failure (an exception is set) nothing is learned. Returns -1 with an exception for a broken promise. */
static int settle(Kernel *kernel, Input *inputs, Py_ssize_t count, unsigned char *modes)
{
    int failed = PyErr_Occurred() != NULL, broken = 0;
    PyObject *type = NULL, *error = NULL, *trace = NULL;
    PyErr_Fetch(&type, &error, &trace);
    for (Py_ssize_t i = 0; i < count; i++) {
        Input *input = &inputs[i];
        if (!input->view) {
            Py_CLEAR(input->tensor);
            continue;
        }
        int changed = 0;
        PyObject *version = input->tensor ? PyObject_GetAttr(input->tensor, s_version) : NULL;
        if (version) {
            changed = PyLong_AsLong(version) != 0;
            Py_DECREF(version);
        }
        PyErr_Clear();
        if (input->mode == UNKNOWN && !changed)
            changed = memcmp(input->view->managed.tensor.data, input->source, input->bytes) != 0;
        if (failed && input->mode == VIEW && input->tensor) {
            /* The exception may hold the tensor: give it memory of its own. */
            PyObject *copy = PyObject_CallMethodObjArgs(input->tensor, s_clone, NULL);
            if (!copy || PyObject_SetAttr(input->tensor, s_data, copy))
                PyErr_Clear();
            Py_XDECREF(copy);
        }
        Py_CLEAR(input->tensor);
        int released = exchange(&input->view->state, 1) == 2;
        if (released)
            free(input->view);
        input->view = NULL;
        if (input->mode == UNKNOWN && !failed)
            modes[i] = released && !changed ? VIEW : COPY;
        if (input->mode == VIEW && (changed || (!released && !failed))) {
            modes[i] = COPY;
            broken = changed ? 2 : 1;
        }
    }
    if (failed) {
        PyErr_Restore(type, error, trace);
        return -1;
    }
    if (broken) {
        PyObject *result = PyObject_CallMethodObjArgs(kernel->binding->owner, s_escaped, kernel->object, broken == 2 ? Py_True : Py_False, NULL);
        Py_XDECREF(result); /* it raises */
        return -1;
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------- torch -> ORT */

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
    Py_ssize_t rank = PyTuple_Size(shape), count = PyList_Size(list);
    if (rank > MAX_RANK) {
        PyErr_SetString(PyExc_ValueError, "a tensor of more than 64 dimensions");
        Py_DECREF(pair);
        return -1;
    }
    const char **texts = calloc((size_t)count + 1, sizeof *texts);
    for (Py_ssize_t i = 0; i < rank; i++)
        dims[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
    for (Py_ssize_t i = 0; texts && i < count; i++)
        texts[i] = PyBytes_AsString(PyList_GetItem(list, i));
    void *value = NULL;
    Seen seen;
    if (!texts || PyErr_Occurred() ||
        check(CALL(OUTPUT, Status(*)(void *, size_t, const int64_t *, size_t, void **))(context, index, dims, (size_t)rank, &value)))
        goto done;
    if (value && look(value, &seen))
        goto done;
    if (value && (seen.kind != ONNX_STRING || seen.count != (size_t)count)) {
        refuse_other_type(kernel, index, seen.kind, ONNX_STRING);
        goto done;
    }
    if (!value || !check(CALL(FILL_STRINGS, Status(*)(void *, const char *const *, size_t))(value, texts, (size_t)count)))
        result = 0;
done:
    if (!texts && !PyErr_Occurred())
        PyErr_NoMemory();
    free(texts);
    Py_DECREF(pair);
    return result;
}

/* Whether the strides are those of a dense row-major tensor. */
static int dense(const DLTensor *tensor)
{
    int64_t expected = 1;
    if (!tensor->strides)
        return 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] == 0)
            return 1;
        if (tensor->shape[i] != 1 && tensor->strides[i] != expected)
            return 0;
        expected *= tensor->shape[i];
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

/* Copy a tensor into output `index` of the node. kind: the ONNX element type that the file promises, 0 unknown. */
static int write_tensor(Kernel *kernel, void *context, size_t index, PyObject *tensor, int kind, Py_ssize_t place, size_t *bytes)
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
            source = &((DLManaged *)PyCapsule_GetPointer(capsule, "dltensor"))->tensor;
            DLDataType want = DTYPES[kind];
            if (dense(source) && source->device.type == 1 && (!kind || (source->dtype.code == want.code && source->dtype.bits == want.bits)))
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
        *bytes = source->dtype.bits / 8;
        for (int i = 0; i < source->ndim; i++)
            *bytes *= (size_t)source->shape[i];
        if (look(value, &seen))
            goto done;
        DLDataType room = item_size(seen.kind) ? DTYPES[seen.kind] : (DLDataType){0, 0, 0};
        /* Between two operators that it runs in float32, ORT widens a float16 node without asking its kernel. */
        if (kind == ONNX_HALF && seen.kind == ONNX_FLOAT && seen.count * sizeof(uint16_t) == *bytes) {
            const uint16_t *halves = (const uint16_t *)((char *)source->data + source->offset);
            for (size_t i = 0; i < seen.count; i++)
                ((float *)seen.data)[i] = from_half(halves[i]);
        } else if ((kind && seen.kind != kind) || room.code != source->dtype.code || room.bits != source->dtype.bits ||
                   seen.count * item_size(seen.kind) != *bytes) {
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

#endif
