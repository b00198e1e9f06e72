#include "inputs.h"

static PyObject *strings_of(Kernel *kernel, const void *value, const Seen *seen)
{
    PyObject *list = PyList_New((Py_ssize_t)seen->count), *shape = PyTuple_New((Py_ssize_t)seen->rank), *out = NULL;
    if (!list || !shape)
        goto done;
    for (size_t i = 0; i < seen->rank; i++) {
        PyObject *size = PyLong_FromLongLong(seen->dims[i]);
        if (!size)
            goto done;
        PyTuple_SetItem(shape, (Py_ssize_t)i, size);
    }
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

int gather(Kernel *kernel, const void *value, int mode, Input *input)
{
    Seen seen;
    if (look(value, &seen))
        return -1;
    if (seen.kind == ONNX_STRING && kernel->backward)
        return damaged(kernel->object, "a gradient comes as strings");
    if (seen.kind == ONNX_STRING)
        return (input->tensor = strings_of(kernel, value, &seen)) ? 0 : -1;
    size_t size = item_size(seen.kind);
    if (!size) {
        return damaged(kernel->object, "an input comes with an element type that has no torch dtype");
    }
    if (bytes_of(seen.dims, seen.rank, size, &input->bytes))
        return -1;
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
        if (input->bytes) /* what is empty may be nowhere */
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
    if (input->tensor && input->mode == VIEW)
        return (input->weak = PyObject_CallFunctionObjArgs(weak_storage, input->tensor, NULL)) ? 0 : -1;
    return input->tensor ? 0 : -1;
}

/* The node has let go of a view. Whoever holds it still gets memory of its own. Returns whether somebody does. */
static int take_back(Input *input)
{
    int kept = peek(&input->view->state) != 2;
    if (kept)
        Py_XDECREF(PyObject_CallFunctionObjArgs(own_memory, input->weak, NULL));
    Py_XDECREF(PyObject_CallFunctionObjArgs(release_weak, input->weak, NULL));
    Py_CLEAR(input->weak);
    PyErr_Clear();
    return kept;
}

int settle(Kernel *kernel, Input *inputs, Py_ssize_t count, unsigned char *modes)
{
    int failed = PyErr_Occurred() != NULL, views = 0, broken = 0;
    PyObject *type = NULL, *error = NULL, *trace = NULL;
    PyErr_Fetch(&type, &error, &trace);
    for (Py_ssize_t i = 0; i < count; i++)
        views |= inputs[i].weak != NULL;
    if (failed && views) {
        /* The frames of the exception have the tensors as locals. */
        PyErr_NormalizeException(&type, &error, &trace);
        if (error && trace)
            PyException_SetTraceback(error, trace);
        if (error)
            Py_XDECREF(PyObject_CallMethodObjArgs(kernel->binding->owner, s_let_go, error, NULL));
        PyErr_Clear();
    }
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
        Py_CLEAR(input->tensor);
        int kept = input->weak ? take_back(input) : 0;
        int released = exchange(&input->view->state, 1) == 2;
        if (released)
            free(input->view);
        input->view = NULL;
        if (input->mode == UNKNOWN && !failed)
            modes[i] = released && !changed ? VIEW : COPY;
        if (input->mode == VIEW && (changed || (kept && !failed))) {
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
