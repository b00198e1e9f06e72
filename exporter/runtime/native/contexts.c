#include "contexts.h"

/* 1 to 2**63 - 1 from the system's random source, drawn in blocks. */
static int64_t random_handle(void)
{
    static uint64_t pool[256];
    static int left = 0;
    for (;;) {
        if (!left) {
            PyObject *bytes = PyObject_CallFunction(urandom, "n", (Py_ssize_t)sizeof pool);
            if (!bytes)
                return 0;
            if (PyBytes_Size(bytes) != (Py_ssize_t)sizeof pool) {
                Py_DECREF(bytes);
                internal("what os.urandom returned");
                return 0;
            }
            memcpy(pool, PyBytes_AsString(bytes), sizeof pool);
            Py_DECREF(bytes);
            left = 256;
        }
        uint64_t drawn = pool[--left];
        pool[left] = 0;
        if (drawn >> 1)
            return (int64_t)(drawn >> 1);
    }
}

int64_t keep_context(Kernel *kernel, PyObject *context)
{
    Binding *binding = kernel->binding;
    int64_t handle = random_handle();
    PyObject *key = handle ? PyLong_FromLongLong(handle) : NULL, *made = NULL;
    if (!key)
        return 0;
    int failed = 0;
    if (PyDict_Size(binding->runs)) {
        PyObject *thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
        made = thread ? PyDict_GetItemWithError(binding->runs, thread) : NULL;
        Py_XDECREF(thread);
        failed = !made && PyErr_Occurred() != NULL;
    }
    if (!made)
        made = kernel->log;
    /* First its name, then the context: what stands in the store is always known to its run. */
    failed = failed || (made && PyList_Append(made, key)) || PyDict_SetItem(binding->contexts, key, context);
    Py_DECREF(key);
    return failed ? 0 : handle;
}

void drop_context(Kernel *kernel, int64_t handle)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *key = PyLong_FromLongLong(handle);
    if (key)
        Py_XDECREF(PyObject_CallMethodObjArgs(kernel->binding->store, s_free, key, NULL));
    Py_XDECREF(key);
    PyErr_Clear();
    PyErr_Restore(type, error, trace);
}

int store_flag(Binding *binding, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(binding->store, name);
    if (!value)
        return -1;
    int truth = PyObject_IsTrue(value);
    Py_DECREF(value);
    return truth;
}
