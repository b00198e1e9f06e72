#include "tensors.h"

PyObject *from_dlpack, *to_dlpack, *is_grad_enabled, *set_grad_enabled, *is_autocast, *is_inference, *run_backward, *urandom, *release_leaf, *gradient_edge,
    *weak_storage, *release_weak, *own_memory, *run_error;
PyObject *s_requires_grad, *s_run, *s_retain, *s_keep, *s_finish, *s_take, *s_version, *s_strings, *s_view, *s_plan, *s_fix, *s_escaped,
    *s_failed, *s_title, *s_shape, *s_device_run, *s_device_write, *s_let_go, *s_free, *s_item;
size_t large = 1 << 16;

void view_deleter(DLManaged *managed)
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

PyObject *wrap(DLManaged *managed)
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

PyObject *as_float8(Kernel *kernel, PyObject *tensor, int element_type)
{
    PyObject *kind = PyLong_FromLong(element_type);
    PyObject *viewed = kind ? PyObject_CallMethodObjArgs(kernel->binding->owner, s_view, tensor, kind, NULL) : NULL;
    Py_XDECREF(kind);
    Py_DECREF(tensor);
    return viewed;
}

int check(Status status)
{
    if (!status)
        return 0;
    PyErr_Format(PyExc_RuntimeError, "onnxruntime: %s", CALL(2, const char *(*)(Status))(status));
    CALL(RELEASE_STATUS, void (*)(Status))(status);
    return -1;
}

int damaged(PyObject *kernel, const char *text)
{
    PyObject *title = PyObject_GetAttr(kernel, s_title);
    if (title)
        PyErr_Format(run_error, "%U: %s: the file is damaged", title, text);
    Py_XDECREF(title);
    return -1;
}

int internal(const char *what)
{
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_SystemError, "pythonop: %s is not what native.c expects", what);
    return -1;
}

int bytes_of(const int64_t *dims, size_t rank, size_t item, size_t *bytes)
{
    int empty = 0;
    *bytes = item;
    for (size_t i = 0; i < rank; i++)
        empty |= dims[i] == 0;
    for (size_t i = 0; i < rank; i++) {
        if (dims[i] < 0 || (!empty && *bytes > (size_t)PY_SSIZE_T_MAX / (size_t)dims[i])) {
            PyErr_SetString(PyExc_ValueError, "a tensor whose size is no size");
            return -1;
        }
        if (!empty)
            *bytes *= (size_t)dims[i];
    }
    if (empty)
        *bytes = 0;
    return 0;
}

size_t item_size(int kind) { return kind > 0 && kind <= ONNX_LAST ? DTYPES[kind].bits / 8 : 0; }

int look(const void *value, Seen *seen)
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
    if (bytes_of(seen->dims, seen->rank, 1, &seen->count))
        return -1;
    seen->data = NULL;
    if (seen->kind != ONNX_STRING && check(CALL(TENSOR_DATA, Status(*)(const void *, void **))(value, &seen->data)))
        return -1;
    return 0;
}

/* ------------------------------------------------------------------------------------------------ exceptions for onnxruntime */
enum { TRIES = 100 };

/* The pending Python exception, normalized. */
static PyObject *pending_exception(void)
{
    PyObject *type = NULL, *error = NULL, *trace = NULL;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (error && trace)
        PyException_SetTraceback(error, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return error;
}

Status failure(Binding *binding, PyObject *kernel)
{
    PyObject *error = pending_exception(), *message = NULL;
    for (int tries = 0; error && !message && tries < TRIES; tries++) {
        message = PyObject_CallMethodObjArgs(binding->owner, s_failed, kernel ? kernel : Py_None, error, NULL);
        if (!message) {
            Py_DECREF(error);
            error = pending_exception();
        }
    }
    Py_XDECREF(error);
    PyObject *bytes = message ? PyUnicode_AsUTF8String(message) : NULL;
    PyErr_Clear();
    Status status = CALL(CREATE_STATUS, Status(*)(int, const char *))(ORT_FAIL, bytes ? PyBytes_AsString(bytes) : "a Python exception without a message");
    Py_XDECREF(bytes);
    Py_XDECREF(message);
    return status;
}
