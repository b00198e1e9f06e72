/* PythonOp and PythonOpGrad for stock onnxruntime.
 *
 * One binary is two things: the Python module exporter.runtime._native, and the custom-op library that
 * onnxruntime loads through RegisterCustomOps. There is no ORT header to compile against where people install, so
 * the few function-table slots that are used are declared here; their numbers are part of ORT's stable ABI.
 *
 * What happens in one run of a node:
 *   gather   ORT inputs become torch tensors through DLPack: small ones as copies, large ones without a copy
 *            where an earlier run proved that nobody keeps or changes them (struct Input below);
 *   call     Function.apply, or the autograd engine, with arguments prepared when the session was made;
 *            everything unusual goes through the Python kernels (exporter/runtime/kernels.py);
 *   write    each output is copied once into memory of ORT (torch's memory is never handed to ORT: in-place
 *            operators of ORT would change what autograd saved).
 */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _MSC_VER
#include <intrin.h>
#define EXPORT __declspec(dllexport)
typedef volatile long atomic_flag_t;
#define exchange(p, v) _InterlockedExchange((p), (v))
#else
#include <stdatomic.h>
#define EXPORT __attribute__((visibility("default")))
typedef atomic_int atomic_flag_t;
#define exchange(p, v) atomic_exchange((p), (v))
#endif

/* ------------------------------------------------------------------------------------------- onnxruntime's ABI */

typedef void *Status; /* OrtStatus*, NULL is success */
typedef struct { const void *const *(*get_api)(uint32_t); const char *(*version)(void); } ApiBase;

/* Version 17: the oldest that has every slot below (onnxruntime 1.17). */
enum { ORT_API = 17, ORT_FAIL = 1 };
enum { /* slots of the OrtApi table */
    CREATE_STATUS = 0, CREATE_DOMAIN = 26, DOMAIN_ADD = 27, ADD_DOMAIN = 28, TENSOR_DATA = 51, FILL_STRINGS = 52,
    ELEMENT_TYPE = 60, DIM_COUNT = 61, DIMS = 62, TYPE_AND_SHAPE = 65, ATTR_FLOAT = 85, ATTR_INT = 86, ATTR_STRING = 87,
    INPUT_COUNT = 88, OUTPUT_COUNT = 89, INPUT = 90, OUTPUT = 91, RELEASE_STATUS = 93, RELEASE_INFO = 99,
    RELEASE_DOMAIN = 101, STRING_LENGTH = 127, STRING_ELEMENT = 128, ATTRS_FLOAT = 162, ATTRS_INT = 163, NODE_NAME = 244
};
enum { ONNX_INT64 = 7, ONNX_STRING = 8, ONNX_LAST = 20 };

typedef struct CustomOp { /* OrtCustomOp of API 17, 208 bytes */
    uint32_t version;
    void *create_v1;
    const char *(*name)(const struct CustomOp *);
    const char *(*provider)(const struct CustomOp *);
    int (*input_type)(const struct CustomOp *, size_t);
    size_t (*input_count)(const struct CustomOp *);
    int (*output_type)(const struct CustomOp *, size_t);
    size_t (*output_count)(const struct CustomOp *);
    void *compute_v1;
    void (*destroy)(void *);
    int (*input_kind)(const struct CustomOp *, size_t);
    int (*output_kind)(const struct CustomOp *, size_t);
    int (*input_memory)(const struct CustomOp *, size_t);
    int (*input_min)(const struct CustomOp *);
    int (*input_same)(const struct CustomOp *);
    int (*output_min)(const struct CustomOp *);
    int (*output_same)(const struct CustomOp *);
    Status (*create)(const struct CustomOp *, const void *const *, const void *, void **);
    Status (*compute)(void *, void *);
    void *infer_shape; /* stays 0: it crashes several releases */
    int (*start_version)(const struct CustomOp *);
    int (*end_version)(const struct CustomOp *);
    void *may_inplace, *release_may_inplace, *alias_map, *release_alias_map;
    /* ours from here on */
    struct Binding *binding;
    int backward;
} CustomOp;

#define CALL(slot, type) ((type)api[slot])
static const void *const *api;

/* ---------------------------------------------------------------------------------------------------- DLPack */

typedef struct { int32_t type, id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct { void *data; DLDevice device; int32_t ndim; DLDataType dtype; int64_t *shape, *strides; uint64_t offset; } DLTensor;
typedef struct DLManaged { DLTensor tensor; void *context; void (*deleter)(struct DLManaged *); } DLManaged;

/* ONNX element type -> DLPack type; bits 0: not a tensor of numbers. float8 travels as uint8, Python views it. */
static const DLDataType DTYPES[ONNX_LAST + 1] = {
    {0, 0, 0}, {2, 32, 1}, {1, 8, 1}, {0, 8, 1}, {1, 16, 1}, {0, 16, 1}, {0, 32, 1}, {0, 64, 1}, {0, 0, 0}, {6, 8, 1}, {2, 16, 1},
    {2, 64, 1}, {1, 32, 1}, {1, 64, 1}, {5, 64, 1}, {5, 128, 1}, {4, 16, 1}, {1, 8, 1}, {1, 8, 1}, {1, 8, 1}, {1, 8, 1},
};

/* ------------------------------------------------------------------------------------------------ our own structs */

/* What one process knows; filled by setup(). */
static PyObject *from_dlpack, *to_dlpack, *is_grad_enabled, *set_grad_enabled, *is_autocast, *is_inference, *run_backward, *urandom, *release_leaf, *gradient_edge,
    *run_error;
static PyObject *s_requires_grad, *s_run, *s_retain, *s_keep, *s_finish, *s_take, *s_version, *s_strings, *s_view, *s_plan, *s_fix, *s_data, *s_clone,
    *s_escaped, *s_failed, *s_title;
static size_t large = 1 << 16;

/* One set of options: its gate and store as Python objects, its two operators. Kernels and options count. */
typedef struct Binding {
    Py_ssize_t count;
    CustomOp forward, backward;
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
    int backward, fast, single;
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
    PyObject *capsule = PyCapsule_New(&view->managed, "dltensor", capsule_destructor);
    if (!capsule) {
        free(view);
        return -1;
    }
    if (input->bytes >= large)
        input->view = view;
    input->tensor = PyObject_CallFunctionObjArgs(from_dlpack, capsule, NULL);
    Py_DECREF(capsule);
    if (input->tensor && seen.kind >= 17) {
        PyObject *kind = PyLong_FromLong(seen.kind);
        PyObject *viewed = kind ? PyObject_CallMethodObjArgs(kernel->binding->owner, s_view, input->tensor, kind, NULL) : NULL;
        Py_XDECREF(kind);
        Py_DECREF(input->tensor);
        input->tensor = viewed;
    }
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
    const char **texts = calloc((size_t)count + 1, sizeof *texts);
    for (Py_ssize_t i = 0; i < rank && i < MAX_RANK; i++)
        dims[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
    for (Py_ssize_t i = 0; texts && i < count; i++)
        texts[i] = PyBytes_AsString(PyList_GetItem(list, i));
    void *value = NULL;
    if (texts && !PyErr_Occurred() && !check(CALL(OUTPUT, Status(*)(void *, size_t, const int64_t *, size_t, void **))(context, index, dims, (size_t)rank, &value)) &&
        (!value || !check(CALL(FILL_STRINGS, Status(*)(void *, const char *const *, size_t))(value, texts, (size_t)count))))
        result = 0;
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
    void *value = NULL, *data = NULL;
    if (check(CALL(OUTPUT, Status(*)(void *, size_t, const int64_t *, size_t, void **))(context, index, source->shape, (size_t)source->ndim, &value)))
        goto done;
    if (value) {
        *bytes = source->dtype.bits / 8;
        for (int i = 0; i < source->ndim; i++)
            *bytes *= (size_t)source->shape[i];
        if (check(CALL(TENSOR_DATA, Status(*)(void *, void **))(value, &data)))
            goto done;
        if (*bytes)
            memcpy(data, (char *)source->data + source->offset, *bytes);
    }
    result = 0;
done:
    Py_XDECREF(capsule);
    Py_XDECREF(fixed);
    return result;
}

/* ------------------------------------------------------------------------------------------------------ contexts */

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

/* Keep a context (a flat tuple) under a new handle; 0 on error. */
static int64_t keep_context(Binding *binding, PyObject *context)
{
    int64_t handle = random_handle();
    PyObject *key = handle ? PyLong_FromLongLong(handle) : NULL;
    if (!key)
        return 0;
    int failed = PyDict_SetItem(binding->contexts, key, context);
    if (!failed && PyDict_Size(binding->runs)) {
        PyObject *thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
        PyObject *made = thread ? PyDict_GetItemWithError(binding->runs, thread) : NULL;
        if (made)
            failed = PyList_Append(made, key);
        Py_XDECREF(thread);
    }
    Py_DECREF(key);
    return failed ? 0 : handle;
}

/* An attribute of the store as a truth value; -1 on error. */
static int store_flag(Binding *binding, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(binding->store, name);
    if (!value)
        return -1;
    int truth = PyObject_IsTrue(value);
    Py_DECREF(value);
    return truth;
}

/* -------------------------------------------------------------------------------------------------------- PythonOp */

/* Whether the thread is in inference mode or autocasts: rare, and Python's business. */
static int special_state(void)
{
    PyObject *tests[] = {is_autocast, is_inference};
    for (int i = 0; i < 2; i++) {
        PyObject *answer = PyObject_CallFunctionObjArgs(tests[i], NULL);
        if (!answer)
            return -1;
        Py_DECREF(answer); /* True and False are immortal enough to compare */
        if (answer != Py_False)
            return 1;
    }
    return 0;
}

/* A context is one flat tuple, as store.Context describes: (id, name, shapes, number of roots, roots..., targets...).
 * One object for the garbage collector to visit, where a tuple of tuples would be four. */
enum { CONTEXT_ID, CONTEXT_NAME, CONTEXT_SHAPES, CONTEXT_COUNT, CONTEXT_ROOTS };

static int is_true_attribute(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    int truth = value ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    return truth;
}

/* Function.apply without a detour. Fills `results` and, with keep, the targets of `*record` (new references). */
static int fast_forward(Kernel *kernel, Input *inputs, int keep, PyObject **results, PyObject **record)
{
    PyObject *args = NULL, *result = NULL, *shapes = NULL;
    int status = -1, restore = -1;
    Py_ssize_t total = PyTuple_Size(kernel->arguments);
    PyObject *enabled = PyObject_CallFunctionObjArgs(is_grad_enabled, NULL);
    if (!enabled)
        return -1;
    int before = enabled == Py_True;
    Py_DECREF(enabled);
    if (before != keep) {
        PyObject *none = PyObject_CallFunctionObjArgs(set_grad_enabled, keep ? Py_True : Py_False, NULL);
        if (!none)
            return -1;
        Py_DECREF(none);
        restore = before;
    }
    if (!(args = PyTuple_New(total)))
        goto done;
    for (Py_ssize_t i = 0; i < total; i++) {
        PyObject *item = PyTuple_GetItem(kernel->arguments, i);
        Py_INCREF(item);
        PyTuple_SetItem(args, i, item);
    }
    if (keep && !(*record = PyTuple_New(CONTEXT_ROOTS + kernel->outputs + kernel->inputs)))
        goto done;
    for (Py_ssize_t i = 0; i < kernel->inputs; i++) {
        PyObject *tensor = inputs[i].tensor ? inputs[i].tensor : Py_None, *target = Py_None, *shape = NULL;
        Py_INCREF(tensor);
        if (kernel->flags[i] && inputs[i].tensor) {
            if (PyObject_SetAttr(tensor, s_requires_grad, Py_True)) {
                Py_DECREF(tensor);
                goto done;
            }
            if (keep && inputs[i].bytes >= large) {
                /* (tensor without the leaf, its gradient edge, its shape): autograd must not keep the memory */
                PyObject *three = PyObject_CallFunctionObjArgs(release_leaf, tensor, NULL);
                Py_DECREF(tensor);
                if (!three)
                    goto done;
                tensor = PyTuple_GetItem(three, 0);
                target = PyTuple_GetItem(three, 1);
                shape = PyTuple_GetItem(three, 2);
                Py_INCREF(tensor);
                Py_INCREF(target);
                Py_INCREF(shape);
                Py_DECREF(three);
                if (!shapes && !(shapes = PyTuple_New(kernel->inputs))) {
                    Py_DECREF(tensor);
                    Py_DECREF(target);
                    Py_DECREF(shape);
                    goto done;
                }
                PyTuple_SetItem(shapes, i, shape);
                /* Versions are counted on the tensor that the Function sees. */
                Py_INCREF(tensor);
                Py_DECREF(inputs[i].tensor);
                inputs[i].tensor = tensor;
            } else if (keep) {
                target = tensor;
                Py_INCREF(target);
            }
        }
        PyTuple_SetItem(args, kernel->positions[i], tensor);
        if (keep) {
            if (target == Py_None)
                Py_INCREF(target);
            PyTuple_SetItem(*record, CONTEXT_ROOTS + kernel->outputs + i, target);
        }
    }
    if (keep) {
        PyTuple_SetItem(*record, CONTEXT_SHAPES, shapes ? shapes : (Py_INCREF(Py_None), Py_None));
        shapes = NULL;
    }
    result = PyObject_Call(kernel->apply, args, NULL);
    if (!result)
        goto done;
    if (!kernel->single && (!PyTuple_Check(result) || PyTuple_Size(result) != kernel->outputs)) {
        /* Python has the words for it. */
        PyObject *where = PyLong_FromLong(-1);
        PyObject *none = PyObject_CallMethodObjArgs(kernel->binding->owner, s_fix, kernel->object, where, result, NULL);
        Py_XDECREF(where);
        Py_XDECREF(none);
        goto done;
    }
    for (Py_ssize_t i = 0; i < kernel->outputs; i++) {
        results[i] = kernel->single ? result : PyTuple_GetItem(result, i);
        Py_INCREF(results[i]);
    }
    status = 0;
done:
    Py_XDECREF(args);
    Py_XDECREF(result);
    Py_XDECREF(shapes);
    if (restore >= 0) {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        Py_XDECREF(PyObject_CallFunctionObjArgs(set_grad_enabled, restore ? Py_True : Py_False, NULL));
        PyErr_Restore(type, error, trace);
    }
    return status;
}

/* Where backward starts for an output: the tensor, for a large one its gradient edge (the tensor's memory is not
 * kept then), None where it has no gradient. */
static int add_root(PyObject *record, Py_ssize_t index, PyObject *output, size_t bytes)
{
    int differentiable = is_true_attribute(output, s_requires_grad);
    if (differentiable < 0)
        return -1;
    PyObject *root = differentiable ? output : Py_None;
    Py_INCREF(root);
    if (differentiable && bytes >= large) {
        Py_DECREF(root);
        if (!(root = PyObject_CallFunctionObjArgs(gradient_edge, output, NULL)))
            return -1;
    }
    PyTuple_SetItem(record, CONTEXT_ROOTS + index, root);
    return 0;
}

static int64_t finish_context(Kernel *kernel, PyObject *record)
{
    PyObject *count = PyLong_FromSsize_t(kernel->outputs);
    if (!count)
        return 0;
    Py_INCREF(kernel->id);
    Py_INCREF(kernel->name);
    PyTuple_SetItem(record, CONTEXT_ID, kernel->id);
    PyTuple_SetItem(record, CONTEXT_NAME, kernel->name);
    PyTuple_SetItem(record, CONTEXT_COUNT, count);
    return keep_context(kernel->binding, record);
}

/* The same through kernels.py. */
static int slow_forward(Kernel *kernel, Input *inputs, int keep, PyObject **results, int64_t *handle)
{
    PyObject *list = PyList_New(kernel->inputs);
    if (!list)
        return -1;
    for (Py_ssize_t i = 0; i < kernel->inputs; i++) {
        PyObject *tensor = inputs[i].tensor ? inputs[i].tensor : Py_None;
        Py_INCREF(tensor);
        PyList_SetItem(list, i, tensor);
    }
    PyObject *pair = PyObject_CallMethodObjArgs(kernel->object, s_run, list, keep ? Py_True : Py_False, NULL);
    Py_DECREF(list);
    if (!pair)
        return -1;
    *handle = PyLong_AsLongLong(PyTuple_GetItem(pair, 0));
    PyObject *outputs = PyTuple_GetItem(pair, 1);
    for (Py_ssize_t i = 0; i < kernel->outputs; i++) {
        results[i] = PyList_GetItem(outputs, i);
        Py_XINCREF(results[i]);
    }
    Py_DECREF(pair);
    return PyErr_Occurred() ? -1 : 0;
}

static int compute_forward(Kernel *kernel, void *context)
{
    int64_t handle = 0;
    size_t count = 0, bytes = 0;
    void *slot = NULL;
    int status = -1;
    PyObject *record = NULL;
    /* The context is made only where the node's first output has a name. */
    if (check(CALL(OUTPUT, Status(*)(void *, size_t, const int64_t *, size_t, void **))(context, 0, NULL, 0, &slot)) ||
        check(CALL(INPUT_COUNT, Status(*)(const void *, size_t *))(context, &count)))
        return -1;
    int keep = slot ? 1 : store_flag(kernel->binding, s_keep);
    int special = keep < 0 ? -1 : special_state();
    if (special < 0)
        return -1;
    unsigned char *modes = kernel->modes + (keep ? kernel->inputs : 0);
    if (count != (size_t)kernel->place_count)
        return damaged(kernel->object, "the graph gives it another number of tensors than its attributes say");
    Input *inputs = calloc((size_t)kernel->inputs + 1, sizeof *inputs);
    PyObject **results = calloc((size_t)kernel->outputs + 1, sizeof *results);
    if (!inputs || !results) {
        free(inputs);
        free(results);
        PyErr_NoMemory();
        return -1;
    }
    int fast = kernel->fast && !special;
    for (size_t i = 0; i < count; i++) {
        const void *value = NULL;
        Py_ssize_t place = kernel->places[i];
        if (check(CALL(INPUT, Status(*)(const void *, size_t, const void **))(context, i, &value)) ||
            (value && gather(kernel, value, modes[place], &inputs[place])))
            goto done;
    }
    if (fast ? fast_forward(kernel, inputs, keep, results, &record) : slow_forward(kernel, inputs, keep, results, &handle))
        goto done;
    for (Py_ssize_t i = 0; i < kernel->outputs; i++)
        if (write_tensor(kernel, context, (size_t)i + 1, results[i], kernel->kinds[i], i, &bytes) ||
            (fast && keep && add_root(record, i, results[i], bytes)))
            goto done;
    if (fast && keep && !(handle = finish_context(kernel, record)))
        goto done;
    if (slot) {
        int64_t *data = NULL;
        if (check(CALL(TENSOR_DATA, Status(*)(void *, void **))(slot, (void **)&data)))
            goto done;
        *data = handle;
    }
    status = 0;
done:
    for (Py_ssize_t i = 0; i < kernel->outputs; i++)
        Py_XDECREF(results[i]);
    Py_XDECREF(record);
    if (settle(kernel, inputs, kernel->inputs, modes))
        status = -1;
    free(inputs);
    free(results);
    return status;
}

/* ---------------------------------------------------------------------------------------------------- PythonOpGrad */

static int text_equal(PyObject *a, PyObject *b) { return a == b ? 1 : PyObject_RichCompareBool(a, b, Py_EQ); }

/* The context of a handle, out of the store unless that retains. Anything odd goes to store.take, which raises. */
static PyObject *take_context(Kernel *kernel, int64_t handle, int retain)
{
    PyObject *key = PyLong_FromLongLong(handle);
    if (!key)
        return NULL;
    PyObject *found = PyDict_GetItemWithError(kernel->binding->contexts, key);
    Py_XINCREF(found);
    if (found && text_equal(PyTuple_GetItem(found, CONTEXT_ID), kernel->id) == 1 && text_equal(PyTuple_GetItem(found, CONTEXT_NAME), kernel->name) == 1) {
        if (retain || !PyDict_DelItem(kernel->binding->contexts, key)) {
            Py_DECREF(key);
            return found;
        }
    }
    Py_XDECREF(found);
    if (!PyErr_Occurred())
        found = PyObject_CallMethodObjArgs(kernel->binding->store, s_take, key, kernel->id, kernel->name, NULL);
    else
        found = NULL;
    Py_DECREF(key);
    return found;
}

static PyObject *backward_through_engine(Kernel *kernel, PyObject *found, Input *inputs, int retain, int *complete)
{
    Py_ssize_t root_count = 0, target_count = 0, n = 0;
    PyObject *out = NULL;
    if (PyTuple_Size(found) != CONTEXT_ROOTS + kernel->inputs + kernel->outputs || PyLong_AsSsize_t(PyTuple_GetItem(found, CONTEXT_COUNT)) != kernel->inputs) {
        damaged(kernel->object, "it does not fit its PythonOp");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < kernel->inputs; i++)
        root_count += inputs[i].tensor && PyTuple_GetItem(found, CONTEXT_ROOTS + i) != Py_None;
    for (Py_ssize_t i = 0; i < kernel->outputs; i++)
        target_count += kernel->flags[i] && PyTuple_GetItem(found, CONTEXT_ROOTS + kernel->inputs + i) != Py_None;
    PyObject *given = PyTuple_New(root_count), *gradients = PyTuple_New(root_count), *wanted = PyTuple_New(target_count);
    if (!given || !gradients || !wanted)
        goto done;
    for (Py_ssize_t i = 0; i < kernel->inputs; i++) {
        PyObject *root = PyTuple_GetItem(found, CONTEXT_ROOTS + i);
        if (!inputs[i].tensor || root == Py_None)
            continue;
        Py_INCREF(root);
        PyTuple_SetItem(given, n, root);
        Py_INCREF(inputs[i].tensor);
        PyTuple_SetItem(gradients, n++, inputs[i].tensor);
    }
    n = 0;
    *complete = 1;
    for (Py_ssize_t i = 0; i < kernel->outputs; i++) {
        PyObject *target = PyTuple_GetItem(found, CONTEXT_ROOTS + kernel->inputs + i);
        if (!kernel->flags[i])
            continue;
        if (target == Py_None) {
            *complete = 0;
            continue;
        }
        Py_INCREF(target);
        PyTuple_SetItem(wanted, n++, target);
    }
    if (root_count && target_count) {
        /* roots, gradients, retain_graph, create_graph, targets, allow_unreachable, accumulate_grad */
        out = PyObject_CallFunctionObjArgs(run_backward, given, gradients, retain ? Py_True : Py_False, Py_False, wanted, Py_True, Py_False, NULL);
    } else if ((out = PyTuple_New(target_count)))
        for (Py_ssize_t i = 0; i < target_count; i++) {
            Py_INCREF(Py_None);
            PyTuple_SetItem(out, i, Py_None);
        }
    for (Py_ssize_t i = 0; out && i < target_count; i++)
        if (PyTuple_GetItem(out, i) == Py_None)
            *complete = 0;
done:
    Py_XDECREF(given);
    Py_XDECREF(gradients);
    Py_XDECREF(wanted);
    return out;
}

static int compute_backward(Kernel *kernel, void *context)
{
    size_t count = 0, bytes = 0;
    const void *value = NULL;
    Seen seen;
    PyObject *found = NULL, *gradients = NULL, *list = NULL;
    int status = -1, complete = 0;
    if (check(CALL(INPUT_COUNT, Status(*)(const void *, size_t *))(context, &count)) ||
        check(CALL(INPUT, Status(*)(const void *, size_t, const void **))(context, 0, &value)) || look(value, &seen))
        return -1;
    if (seen.kind != ONNX_INT64 || seen.count != 1)
        return damaged(kernel->object, "the context is not one int64 handle");
    int64_t handle = *(int64_t *)seen.data;
    int retain = store_flag(kernel->binding, s_retain), special = retain < 0 ? -1 : special_state();
    if (special < 0)
        return -1;
    Input *inputs = calloc((size_t)kernel->inputs + 1, sizeof *inputs);
    if (!inputs) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 1; i < count; i++) {
        Py_ssize_t place = i - 1 < (size_t)kernel->place_count ? kernel->places[i - 1] : -1;
        if (place < 0)
            continue; /* a forward output: control dependency only */
        if (check(CALL(INPUT, Status(*)(const void *, size_t, const void **))(context, i, &value)) ||
            (value && gather(kernel, value, kernel->modes[place], &inputs[place])))
            goto done;
    }
    if (special) {
        PyObject *tensors = PyList_New(kernel->inputs), *key = PyLong_FromLongLong(handle);
        for (Py_ssize_t i = 0; tensors && i < kernel->inputs; i++) {
            PyObject *tensor = inputs[i].tensor ? inputs[i].tensor : Py_None;
            Py_INCREF(tensor);
            PyList_SetItem(tensors, i, tensor);
        }
        list = tensors && key ? PyObject_CallMethodObjArgs(kernel->object, s_run, key, tensors, NULL) : NULL;
        Py_XDECREF(tensors);
        Py_XDECREF(key);
    } else {
        found = take_context(kernel, handle, retain);
        gradients = found ? backward_through_engine(kernel, found, inputs, retain, &complete) : NULL;
        if (!gradients)
            goto done;
        if (!complete)
            list = PyObject_CallMethodObjArgs(kernel->object, s_finish, found, gradients, NULL);
    }
    if (!list && !gradients)
        goto done;
    if (!complete && !list)
        goto done;
    Py_ssize_t next = 0, node_output = 0;
    for (Py_ssize_t i = 0; i < kernel->outputs; i++) {
        PyObject *gradient = NULL;
        if (kernel->flags[i])
            gradient = list ? PyList_GetItem(list, i) : PyTuple_GetItem(gradients, next++);
        if (node_output < kernel->written_count && kernel->written[node_output] == i) {
            if (gradient && write_tensor(kernel, context, (size_t)node_output, gradient, kernel->kinds[i], i, &bytes))
                goto done;
            node_output++;
        }
    }
    status = 0;
done:
    Py_XDECREF(list);
    Py_XDECREF(gradients);
    Py_XDECREF(found);
    if (settle(kernel, inputs, kernel->inputs, kernel->modes))
        status = -1;
    free(inputs);
    return status;
}

/* --------------------------------------------------------------------------------------- kernels and their making */

/* The pending Python exception as an OrtStatus. Binding.failed keeps the exception for whoever called run. */
static Status failure(Binding *binding, PyObject *kernel)
{
    PyObject *type = NULL, *error = NULL, *trace = NULL, *message = NULL;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (error && trace)
        PyException_SetTraceback(error, trace);
    if (error)
        message = PyObject_CallMethodObjArgs(binding->owner, s_failed, kernel ? kernel : Py_None, error, NULL);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    PyObject *bytes = message ? PyUnicode_AsUTF8String(message) : NULL;
    PyErr_Clear();
    Status status = CALL(CREATE_STATUS, Status(*)(int, const char *))(ORT_FAIL, bytes ? PyBytes_AsString(bytes) : "a Python exception without a message");
    Py_XDECREF(bytes);
    Py_XDECREF(message);
    return status;
}

static Status compute(void *state, void *context)
{
    Kernel *kernel = state;
    Status status = NULL;
    PyGILState_STATE gil = PyGILState_Ensure();
    if (kernel->backward ? compute_backward(kernel, context) : compute_forward(kernel, context))
        status = failure(kernel->binding, kernel->object);
    PyGILState_Release(gil);
    return status;
}

/* One attribute by name and kind ('s', 'i', 'I' for ints, 'F' for floats); NULL without an exception if it is absent. */
static PyObject *attribute(const void *info, const char *name, char kind)
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
    status = CALL(slot, Status(*)(const void *, const char *, void *, size_t *))(info, name, NULL, &size);
    if (status)
        goto absent;
    size_t item = kind == 's' ? 1 : kind == 'I' ? sizeof(int64_t) : sizeof(float);
    char *buffer = malloc(size * item + 1);
    if (!buffer)
        return PyErr_NoMemory();
    status = size ? CALL(slot, Status(*)(const void *, const char *, void *, size_t *))(info, name, buffer, &size) : NULL;
    if (status) {
        free(buffer);
        goto absent;
    }
    if (kind == 's') {
        /* the size counts the final zero */
        out = PyUnicode_DecodeUTF8(buffer, size ? (Py_ssize_t)size - 1 : 0, "strict");
    } else if ((out = PyList_New((Py_ssize_t)size))) {
        for (size_t i = 0; i < size; i++)
            PyList_SetItem(out, (Py_ssize_t)i, kind == 'I' ? PyLong_FromLongLong(((int64_t *)buffer)[i]) : PyFloat_FromDouble(((float *)buffer)[i]));
    }
    free(buffer);
    return out;
absent:
    CALL(RELEASE_STATUS, void (*)(Status))(status);
    return NULL;
}

static Py_ssize_t *index_array(PyObject *tuple, Py_ssize_t *count)
{
    *count = PyTuple_Size(tuple);
    Py_ssize_t *out = calloc((size_t)*count + 1, sizeof *out);
    for (Py_ssize_t i = 0; out && i < *count; i++)
        out[i] = PyLong_AsSsize_t(PyTuple_GetItem(tuple, i));
    return out;
}

static void free_binding(Binding *binding)
{
    if (--binding->count)
        return;
    if (binding->domain)
        CALL(RELEASE_DOMAIN, void (*)(void *))(binding->domain);
    Py_XDECREF(binding->owner);
    Py_XDECREF(binding->store);
    Py_XDECREF(binding->contexts);
    Py_XDECREF(binding->runs);
    free(binding);
}

static void free_kernel(Kernel *kernel)
{
    PyObject *objects[] = {kernel->object, kernel->apply, kernel->arguments, kernel->id, kernel->name};
    for (size_t i = 0; i < sizeof objects / sizeof *objects; i++)
        Py_XDECREF(objects[i]);
    free(kernel->positions);
    free(kernel->places);
    free(kernel->written);
    free(kernel->flags);
    free(kernel->kinds);
    free(kernel->modes);
    free_binding(kernel->binding);
    free(kernel);
}

/* Binding.plan decodes the node in Python, once; its answer fills the struct. */
static Kernel *make_kernel(const CustomOp *op, const void *info)
{
    Binding *binding = op->binding;
    PyObject *attributes = PyDict_New(), *plan = NULL, *name = NULL, *specs = NULL, *flags, *kinds;
    Kernel *kernel = NULL;
    char node_name[512] = "";
    size_t size = sizeof node_name - 1;
    Py_ssize_t unused = 0;
    Status status = CALL(NODE_NAME, Status(*)(const void *, char *, size_t *))(info, node_name, &size);
    if (status)
        CALL(RELEASE_STATUS, void (*)(Status))(status); /* a name longer than that is not shown */
    specs = PyObject_GetAttrString(binding->owner, op->backward ? "backward_attributes" : "forward_attributes");
    if (!attributes || !specs)
        goto done;
    for (Py_ssize_t i = 0; i < PyTuple_Size(specs); i++) {
        PyObject *pair = PyTuple_GetItem(specs, i);
        Py_ssize_t length = 0;
        const char *attribute_name = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(pair, 0), &length);
        const char *kind = attribute_name ? PyUnicode_AsUTF8AndSize(PyTuple_GetItem(pair, 1), &length) : NULL;
        if (!kind)
            goto done;
        PyObject *value = attribute(info, attribute_name, *kind);
        if (!value && PyErr_Occurred())
            goto done;
        if (value && PyDict_SetItem(attributes, PyTuple_GetItem(pair, 0), value)) {
            Py_DECREF(value);
            goto done;
        }
        Py_XDECREF(value);
    }
    if (!(name = PyUnicode_DecodeUTF8(node_name, (Py_ssize_t)strlen(node_name), "replace")))
        goto done;
    plan = PyObject_CallMethodObjArgs(binding->owner, s_plan, op->backward ? Py_True : Py_False, attributes, name, NULL);
    if (!plan || !(kernel = calloc(1, sizeof *kernel)))
        goto done;
    kernel->binding = binding;
    binding->count++;
    kernel->backward = op->backward;
    /* (object, fast, single, apply, arguments, positions, flags, kinds, places, written, inputs, id, name) */
    PyObject **targets[] = {&kernel->object, NULL, NULL, &kernel->apply, &kernel->arguments};
    for (int i = 0; i < 5; i++)
        if (targets[i]) {
            *targets[i] = PyTuple_GetItem(plan, i);
            Py_XINCREF(*targets[i]);
        }
    kernel->fast = PyTuple_GetItem(plan, 1) == Py_True;
    kernel->single = PyTuple_GetItem(plan, 2) == Py_True;
    kernel->positions = index_array(PyTuple_GetItem(plan, 5), &unused);
    flags = PyTuple_GetItem(plan, 6);
    kinds = PyTuple_GetItem(plan, 7);
    kernel->places = index_array(PyTuple_GetItem(plan, 8), &kernel->place_count);
    kernel->written = index_array(PyTuple_GetItem(plan, 9), &kernel->written_count);
    kernel->inputs = PyLong_AsSsize_t(PyTuple_GetItem(plan, 10));
    kernel->outputs = PyTuple_Size(kinds);
    kernel->id = PyTuple_GetItem(plan, 11);
    kernel->name = PyTuple_GetItem(plan, 12);
    Py_XINCREF(kernel->id);
    Py_XINCREF(kernel->name);
    kernel->flags = calloc((size_t)PyTuple_Size(flags) + 1, 1);
    kernel->kinds = calloc((size_t)kernel->outputs + 1, sizeof *kernel->kinds);
    kernel->modes = calloc(2 * (size_t)kernel->inputs + 1, 1);
    if (!kernel->positions || !kernel->places || !kernel->written || !kernel->flags || !kernel->kinds || !kernel->modes) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(flags); i++)
        kernel->flags[i] = (char)PyObject_IsTrue(PyTuple_GetItem(flags, i));
    for (Py_ssize_t i = 0; i < kernel->outputs; i++)
        kernel->kinds[i] = (int32_t)PyLong_AsLong(PyTuple_GetItem(kinds, i));
done:
    Py_XDECREF(attributes);
    Py_XDECREF(plan);
    Py_XDECREF(name);
    Py_XDECREF(specs);
    if (PyErr_Occurred() && kernel) {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        free_kernel(kernel);
        PyErr_Restore(type, error, trace);
        kernel = NULL;
    }
    return kernel;
}

static Status create(const CustomOp *op, const void *const *table, const void *info, void **out)
{
    (void)table;
    Status status = NULL;
    PyGILState_STATE gil = PyGILState_Ensure();
    *out = make_kernel(op, info);
    if (!*out)
        status = failure(op->binding, NULL);
    PyGILState_Release(gil);
    return status;
}

static void destroy(void *state)
{
    if (!state || !Py_IsInitialized())
        return; /* the interpreter is gone, and every object with it */
    PyGILState_STATE gil = PyGILState_Ensure();
    free_kernel(state);
    PyGILState_Release(gil);
}

/* ---------------------------------------------------------------------------------------- the two operators' shape */

static const char *op_name(const CustomOp *op) { return op->backward ? "PythonOpGrad" : "PythonOp"; }
static const char *cpu_provider(const CustomOp *op) { (void)op; return NULL; }
static size_t input_count(const CustomOp *op) { return op->backward ? 2 : 1; }
static size_t output_count(const CustomOp *op) { return op->backward ? 1 : 2; }
static int is_context(const CustomOp *op, size_t index, int input) { return index == 0 && (op->backward ? input : !input); }
static int input_type(const CustomOp *op, size_t i) { return is_context(op, i, 1) ? ONNX_INT64 : 0; }
static int output_type(const CustomOp *op, size_t i) { return is_context(op, i, 0) ? ONNX_INT64 : 0; }
static int input_kind(const CustomOp *op, size_t i) { return is_context(op, i, 1) ? 0 : 2; }   /* required, else variadic */
static int output_kind(const CustomOp *op, size_t i) { return is_context(op, i, 0) ? 1 : 2; }  /* optional, else variadic */
static int default_memory(const CustomOp *op, size_t i) { (void)op, (void)i; return 0; }
static int zero(const CustomOp *op) { (void)op; return 0; }
static int first_version(const CustomOp *op) { (void)op; return 1; }
static int last_version(const CustomOp *op) { (void)op; return INT32_MAX; }

static void fill_op(CustomOp *op, Binding *binding, int backward)
{
    memset(op, 0, sizeof *op);
    op->version = ORT_API;
    op->name = op_name;
    op->provider = cpu_provider;
    op->input_type = input_type;
    op->input_count = input_count;
    op->output_type = output_type;
    op->output_count = output_count;
    op->destroy = destroy;
    op->input_kind = input_kind;
    op->output_kind = output_kind;
    op->input_memory = default_memory;
    op->input_min = op->input_same = op->output_min = op->output_same = zero;
    op->create = create;
    op->compute = compute;
    op->start_version = first_version;
    op->end_version = last_version;
    op->binding = binding;
    op->backward = backward;
}

static Binding *pending; /* what the next RegisterCustomOps is for; Python holds a lock around it */

EXPORT Status RegisterCustomOps(void *options, const ApiBase *base)
{
    Binding *binding = pending;
    if (!api)
        api = base->get_api(ORT_API);
    if (!api)
        return NULL; /* session.py sees that nothing was registered, and says which onnxruntime is needed */
    if (!binding)
        return CALL(CREATE_STATUS, Status(*)(int, const char *))(ORT_FAIL, "this library is registered by exporter.session_options(), not by its path");
    Status status = CALL(CREATE_DOMAIN, Status(*)(const char *, void **))("com.microsoft", &binding->domain);
    if (!status)
        status = CALL(DOMAIN_ADD, Status(*)(void *, const void *))(binding->domain, &binding->forward);
    if (!status)
        status = CALL(DOMAIN_ADD, Status(*)(void *, const void *))(binding->domain, &binding->backward);
    if (!status)
        status = CALL(ADD_DOMAIN, Status(*)(void *, void *))(options, binding->domain);
    if (!status)
        pending = NULL;
    return status;
}

/* ------------------------------------------------------------------------------------------------- Python's side */

static void binding_destructor(PyObject *capsule) { free_binding(PyCapsule_GetPointer(capsule, "pythonop.binding")); }

/* prepare(owner, store, contexts, runs) -> capsule: the next registration belongs to this binding. */
static PyObject *prepare(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *owner, *store, *contexts, *runs;
    if (!PyArg_ParseTuple(args, "OOOO", &owner, &store, &contexts, &runs))
        return NULL;
    Binding *binding = calloc(1, sizeof *binding);
    if (!binding)
        return PyErr_NoMemory();
    binding->count = 1;
    fill_op(&binding->forward, binding, 0);
    fill_op(&binding->backward, binding, 1);
    PyObject **targets[] = {&binding->owner, &binding->store, &binding->contexts, &binding->runs}, *values[] = {owner, store, contexts, runs};
    for (int i = 0; i < 4; i++) {
        Py_INCREF(values[i]);
        *targets[i] = values[i];
    }
    PyObject *capsule = PyCapsule_New(binding, "pythonop.binding", binding_destructor);
    if (capsule)
        pending = binding;
    return capsule;
}

/* registered() -> whether the last prepare() was followed by a registration that worked */
static PyObject *registered(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    int done = pending == NULL;
    pending = NULL;
    return PyBool_FromLong(done);
}

/* setup(names...): the functions of torch that the hot path calls, and the size from which tensors are large */
static PyObject *setup(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject **targets[] = {&from_dlpack, &to_dlpack, &is_grad_enabled, &set_grad_enabled, &is_autocast, &is_inference, &run_backward, &urandom, &release_leaf, &gradient_edge, &run_error};
    Py_ssize_t count = sizeof targets / sizeof *targets;
    if (PyTuple_Size(args) != count + 1) {
        PyErr_SetString(PyExc_TypeError, "setup() takes ten functions, RunError and a size");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *old = *targets[i];
        *targets[i] = PyTuple_GetItem(args, i);
        Py_INCREF(*targets[i]);
        Py_XDECREF(old);
    }
    large = PyLong_AsSize_t(PyTuple_GetItem(args, count));
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"prepare", prepare, METH_VARARGS, "prepare(owner, store, contexts, runs) -> capsule"},
    {"registered", registered, METH_NOARGS, "registered() -> bool"},
    {"setup", setup, METH_VARARGS, "setup(ten functions of torch, RunError, large)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "PythonOp and PythonOpGrad for onnxruntime.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    struct { PyObject **target; const char *text; } names[] = {
        {&s_requires_grad, "requires_grad"}, {&s_run, "run"}, {&s_retain, "retain"}, {&s_keep, "keep"}, {&s_finish, "finish"}, {&s_take, "take"},
        {&s_version, "_version"}, {&s_strings, "strings"}, {&s_view, "view"}, {&s_plan, "plan"}, {&s_fix, "fix"}, {&s_data, "data"},
        {&s_clone, "clone"}, {&s_escaped, "escaped"}, {&s_failed, "failed"}, {&s_title, "title"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].target = PyUnicode_InternFromString(names[i].text)))
            return NULL;
    return PyModule_Create(&definition);
}
