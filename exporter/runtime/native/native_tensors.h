/* The structs of native.c, and what it asks of an OrtValue. Part of native.c, its only user. */
#ifndef PYTHONOP_NATIVE_TENSORS_H
#define PYTHONOP_NATIVE_TENSORS_H

#include "native_abi.h"

/* ------------------------------------------------------------------------------------------------ our own structs */

/* What one process knows; filled by setup(). */
static PyObject *from_dlpack, *to_dlpack, *is_grad_enabled, *set_grad_enabled, *is_autocast, *is_inference, *run_backward, *urandom, *release_leaf, *gradient_edge,
    *weak_storage, *release_weak, *own_memory, *run_error;
static PyObject *s_requires_grad, *s_run, *s_retain, *s_keep, *s_finish, *s_take, *s_version, *s_strings, *s_view, *s_plan, *s_fix, *s_escaped,
    *s_failed, *s_title, *s_shape, *s_device_run, *s_device_write, *s_let_go, *s_free, *s_item;
static size_t large = 1 << 16;

/* What a kernel runs. PythonOpBackward has no path of its own: it is run as a PythonOpGrad on a device is, by Python. PythonOpTangent is run as a PythonOp that is not simple. */
enum Operator { PYTHON_OP = 0, PYTHON_OP_GRAD, PYTHON_OP_BACKWARD, PYTHON_OP_TANGENT, ELEMENTWISE, REARRANGE, LSTM, LSTM_GRAD, CONV_WEIGHT_GRAD, INTERLEAVE, MAX_POOL_INDICES, MAX_POOL_GRAD, BATCH_MATMUL, GRU, GRU_GRAD, OPERATOR_COUNT }; /* from PYTHON_OP_BACKWARD on: of the domain pythonop */

/* Which operators a binding registers: for the CPU; for CUDA as well; for the CPU by the device path, for tests. */
enum Device { CPU_ONLY = 0, WITH_CUDA, BORROW };

/* One set of options: its gate and store as Python objects, its operators. Kernels and options count. */
typedef struct Binding {
    Py_ssize_t count;
    CustomOp ops[OPERATOR_COUNT], on_device[ELEMENTWISE]; /* by enum Operator; those on a device are of the first ones alone */
    int device; /* enum Device */
    void *domain, *own_domain; /* com.microsoft, and pythonop */
    PyObject *owner;    /* exporter.runtime.session.Binding */
    PyObject *store, *contexts, *runs; /* its store, and two dicts of that */
} Binding;

/* How an input of a node is handed to torch. A run proves something about itself only, so the first one copies and
 * looks: the copy is unchanged, and its memory was given back before the node ended. From then on torch reads ORT's
 * memory. Otherwise every run copies. A later run that keeps or changes a view anyway is an error, never silence; what
 * it keeps gets memory of its own then. (Who took the address itself, as an array of numpy does, cannot be helped.) */
enum { UNKNOWN = 0, VIEW, COPY };

/* A flag of a backward: the node has no gradient there, and one that the engine gives is an error (PythonOpGrad.watched). */
enum { WATCHED = 2 };

/* How long a node's calls take (native_threads.h). Written with the GIL held. */
typedef struct {
    int long_calls, tries;          /* calls that one thread was long for: of enough, torch has all of its own; calls of those so far */
    int given, alone;               /* torch has them from the first call on; because onnxruntime has no others here */
    int pause, paused;              /* so many calls on one thread, where all were no gain; of those that are left */
    int stay, stayed;               /* the same of calls on all, where they were one */
    double on_one, on_all;          /* seconds of the quickest call on one thread, and on all */
} Pace;

typedef struct Kernel {
    Binding *binding;
    PyObject *object; /* kernels.PythonOp, kernels.PythonOpGrad, backward.PythonOpBackward or tangent.PythonOpTangent */
    int backward, again, tangent, by_python, fast, single; /* backward: takes a context; again: a PythonOpBackward; by_python: on a device, or a PythonOpBackward */
    PyObject *apply, *arguments; /* fast forward: the bound method, the tuple of arguments with None at the slots */
    Py_ssize_t inputs, outputs;  /* tensors in (without the context), tensors out of the call */
    Py_ssize_t *positions;       /* fast forward: where each input stands among the arguments */
    Py_ssize_t *places;          /* which input of the call the node's inputs are, -1: ignored */
    Py_ssize_t *written;         /* which output of the call the node's outputs are, without the context */
    Py_ssize_t place_count, written_count;
    char *flags;                 /* forward: requires_grad; backward: wanted, or WATCHED */
    int32_t *kinds;              /* ONNX element types of the outputs, 0 unknown */
    unsigned char *modes;        /* forward: two rows, without and with a context */
    PyObject *id, *name;
    Pace pace;
    PyObject *log;               /* a list, for handles made on threads that no run stands on; NULL in a plain session */
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
    PyObject *weak; /* of a VIEW: its storage, which may outlive the tensor; from weak_storage */
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

/* What native.c gets from its own Python is what it expects; -1 with SystemError where it is not. */
static int internal(const char *what)
{
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_SystemError, "pythonop: %s is not what native.c expects", what);
    return -1;
}

/* The bytes of a dense tensor; -1 with ValueError where they are no size. */
static int bytes_of(const int64_t *dims, size_t rank, size_t item, size_t *bytes)
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

static size_t item_size(int kind) { return kind > 0 && kind <= ONNX_LAST ? DTYPES[kind].bits / 8 : 0; }

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

/* The pending Python exception as an OrtStatus. Binding.failed keeps the exception for whoever called run. What comes while it does so (Ctrl-C,
 * again) takes its place. */
static Status failure(Binding *binding, PyObject *kernel)
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

/* ------------------------------------------------------------------------------------------------ of kernels without Python */
enum { DIMS_MOST = 16 };

static Status refused(const char *text) { return CALL(CREATE_STATUS, Status(*)(int, const char *))(ORT_FAIL, text); }

/* What a tensor is; shape has room for `most` dims. */
static Status tensor_facts(const void *value, int *kind, size_t *rank, int64_t *shape, size_t most, size_t *count)
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
static Status input_of(void *context, size_t index, int kind, const char *wrong, int64_t *dims, size_t *rank, size_t *count, const void **data)
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
static Status make_output(void *context, size_t index, const int64_t *shape, size_t rank, int kind, const char *nameless, const char *other, void **data)
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
static Status in_parallel(void *context, void (*task)(void *, size_t), size_t tasks, void *run)
{
    if (tasks > 1)
        return CALL(PARALLEL_FOR, Status(*)(const void *, void (*)(void *, size_t), size_t, size_t, void *))(context, task, tasks, 0, run);
    if (tasks)
        task(run, 0);
    return NULL;
}

#endif
