#include "nodes.h"

PyObject *attribute(const void *info, const char *name, char kind)
{
    size_t size = 0;
    Status status = NULL;
    PyObject *out = NULL;
    int slot = kind == 's' ? ATTR_STRING : kind == 'I' ? ATTRS_INT : ATTRS_FLOAT;
    if (kind == 'i') {
        int64_t value = 0;
        status = CALL(ATTR_INT, Status(*)(const void *, const char *, int64_t *))(info, name, &value);
        if (!status)
            return PyLong_FromLongLong(value);
        goto absent;
    }
    if (kind == 'f') {
        float value = 0;
        status = CALL(ATTR_FLOAT, Status(*)(const void *, const char *, float *))(info, name, &value);
        if (!status)
            return PyFloat_FromDouble(value);
        goto absent;
    }
    status = CALL(slot, Status(*)(const void *, const char *, void *, size_t *))(info, name, NULL, &size);
    if (status)
        goto absent;
    size_t item = kind == 's' ? 1 : kind == 'I' ? sizeof(int64_t) : sizeof(float);
    char *buffer = size < (size_t)PY_SSIZE_T_MAX / item ? malloc(size * item + 1) : NULL;
    if (!buffer)
        return PyErr_NoMemory();
    status = size ? CALL(slot, Status(*)(const void *, const char *, void *, size_t *))(info, name, buffer, &size) : NULL;
    if (status) {
        free(buffer);
        goto absent;
    }
    if (kind == 's') {
        /* the size counts the final zero; Binding.plan refuses what is no UTF-8 */
        out = PyUnicode_DecodeUTF8(buffer, size ? (Py_ssize_t)size - 1 : 0, "surrogateescape");
    } else if ((out = PyList_New((Py_ssize_t)size))) {
        for (size_t i = 0; out && i < size; i++) {
            PyObject *number = kind == 'I' ? PyLong_FromLongLong(((int64_t *)buffer)[i]) : PyFloat_FromDouble(((float *)buffer)[i]);
            if (number)
                PyList_SetItem(out, (Py_ssize_t)i, number);
            else
                Py_CLEAR(out);
        }
    }
    free(buffer);
    return out;
absent:
    CALL(RELEASE_STATUS, void (*)(Status))(status);
    return NULL;
}

PyObject *node_name(const void *info)
{
    size_t size = 0;
    Status status = CALL(NODE_NAME, Status(*)(const void *, char *, size_t *))(info, NULL, &size);
    char *buffer = status || !size ? NULL : calloc(size, 1);
    if (buffer)
        status = CALL(NODE_NAME, Status(*)(const void *, char *, size_t *))(info, buffer, &size);
    if (status)
        CALL(RELEASE_STATUS, void (*)(Status))(status);
    PyObject *name = PyUnicode_DecodeUTF8(buffer && !status ? buffer : "", buffer && !status ? (Py_ssize_t)size - 1 : 0, "replace");
    free(buffer);
    return name;
}

PyObject *named_outputs(const void *info)
{
    size_t count = 0;
    if (check(CALL(NODE_OUTPUTS, Status(*)(const void *, size_t *))(info, &count)))
        return NULL;
    PyObject *out = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; out && i < count; i++) {
        size_t size = 0; /* counts the final zero */
        if (check(CALL(NODE_OUTPUT_NAME, Status(*)(const void *, size_t, char *, size_t *))(info, i, NULL, &size))) {
            Py_DECREF(out);
            return NULL;
        }
        PyTuple_SetItem(out, (Py_ssize_t)i, PyBool_FromLong(size > 1));
    }
    return out;
}
