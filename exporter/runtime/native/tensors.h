/* The structs of native.c, and what it asks of an OrtValue. */
#ifndef PYTHONOP_TENSORS_H
#define PYTHONOP_TENSORS_H

#include "abi.h"

/* ------------------------------------------------------------------------------------------------ our own structs */

/* What one process knows; filled by setup(). */
extern PyObject *from_dlpack, *to_dlpack, *is_grad_enabled, *set_grad_enabled, *is_autocast, *is_inference, *run_backward, *urandom, *release_leaf, *gradient_edge,
    *weak_storage, *release_weak, *own_memory, *run_error;
extern PyObject *s_requires_grad, *s_run, *s_retain, *s_keep, *s_finish, *s_take, *s_version, *s_strings, *s_view, *s_plan, *s_fix, *s_escaped,
    *s_failed, *s_title, *s_shape, *s_device_run, *s_device_write, *s_let_go, *s_free, *s_item;
extern size_t large;

/* What a kernel runs. PythonOpBackward has no path of its own: it is run as a PythonOpGrad on a device is, by Python. PythonOpTangent is run as a PythonOp that is not simple. */
enum Operator { PYTHON_OP = 0, PYTHON_OP_GRAD, PYTHON_OP_BACKWARD, PYTHON_OP_TANGENT, OPERATOR_COUNT }; /* from PYTHON_OP_BACKWARD on: of the domain pythonop */

/* Which operators a binding registers: for the CPU; for CUDA as well; for the CPU by the device path, for tests. */
enum Device { CPU_ONLY = 0, WITH_CUDA, BORROW };

/* One set of options: its gate and store as Python objects, its operators. Kernels and options count. */
typedef struct Binding {
    Py_ssize_t count;
    CustomOp ops[OPERATOR_COUNT], on_device[OPERATOR_COUNT]; /* by enum Operator */
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

/* How long a node's calls take (threads.h). Written with the GIL held. */
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

#define MAX_RANK 64

typedef struct { int kind; size_t rank, count; int64_t dims[MAX_RANK]; void *data; } Seen;

/* The tensor of a DLManaged, which is torch's from here on, also when this fails. */
PyObject *wrap(DLManaged *managed);
/* Bytes as the float8 that they are; takes the reference. */
PyObject *as_float8(Kernel *kernel, PyObject *tensor, int element_type);
/* Raise an ORT error as RuntimeError; -1 on error. */
int check(Status status);
/* Raise RunError about a node; returns -1. */
int damaged(PyObject *kernel, const char *text);
/* What native.c gets from its own Python is what it expects; -1 with SystemError where it is not. */
int internal(const char *what);
/* The bytes of a dense tensor; -1 with ValueError where they are no size. */
int bytes_of(const int64_t *dims, size_t rank, size_t item, size_t *bytes);
size_t item_size(int kind);
/* Element type, shape and address of an OrtValue. */
int look(const void *value, Seen *seen);
void view_deleter(DLManaged *managed);
/* The pending Python exception as an OrtStatus. Binding.failed keeps the exception for whoever called run. What comes while it does so (Ctrl-C,
 * again) takes its place. */
Status failure(Binding *binding, PyObject *kernel);

#endif
