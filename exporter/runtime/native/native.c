/* PythonOp, PythonOpGrad, PythonOpBackward and PythonOpTangent for stock onnxruntime.
 *
 * One binary is two things: the Python module exporter.runtime.native._native, and the custom-op library that
 * onnxruntime loads through RegisterCustomOps.
 *
 * What happens in one run of a node:
 *   gather   ORT inputs become torch tensors through DLPack: small ones as copies, large ones without a copy
 *            where an earlier run proved that nobody keeps or changes them (struct Input below);
 *   call     Function.apply, or the autograd engine, with arguments prepared when the session was made;
 *            everything unusual goes through the Python kernels (exporter/runtime/kernels.py);
 *   write    each output is copied once into memory of ORT (torch's memory is never handed to ORT: in-place
 *            operators of ORT would change what autograd saved).
 *
 * kernels.c makes kernels and runs them: inputs.c gathers, run.c calls, outputs.c writes, contexts.c is the store's side, device.c the same for
 * devices, threads.c sees whose threads run, nodes.c reads what a node says of itself. tensors.h has our structs, abi.h and ort_abi.h the
 * declarations of others. Here the two modules meet.
 */
#include "kernels.h"
#include "threads.h"

const void *const *api;

/* ---------------------------------------------------------------------------------------------- the operators' shape */

static const char *provider(const CustomOp *op) { return op->cuda ? "CUDAExecutionProvider" : NULL; } /* NULL: the CPU */
static size_t input_count(const CustomOp *op) { return takes_context(op) ? 2 : 1; }
static size_t output_count(const CustomOp *op) { return op->kind == PYTHON_OP ? 2 : 1; }
/* The context that a PythonOpBackward leaves is the last of its variadic outputs. */
static int is_context(const CustomOp *op, size_t index, int input) { return index == 0 && (input ? takes_context(op) : op->kind == PYTHON_OP); }
static int input_type(const CustomOp *op, size_t i) { return is_context(op, i, 1) ? ONNX_INT64 : 0; }
static int output_type(const CustomOp *op, size_t i) { return is_context(op, i, 0) ? ONNX_INT64 : 0; }
static int input_kind(const CustomOp *op, size_t i) { return is_context(op, i, 1) ? 0 : 2; }   /* required, else variadic */
static int output_kind(const CustomOp *op, size_t i) { return is_context(op, i, 0) ? 1 : 2; }  /* optional, else variadic */
static int input_memory(const CustomOp *op, size_t i) { return op->cuda && is_context(op, i, 1) ? -2 : 0; } /* -2: in CPU memory */
static int zero(const CustomOp *op) { (void)op; return 0; }
static int first_version(const CustomOp *op) { (void)op; return 1; }
static int last_version(const CustomOp *op) { (void)op; return INT32_MAX; }

static void fill_op(CustomOp *op, Binding *binding, int kind, int on_device, int cuda)
{
    memset(op, 0, sizeof *op);
    op->version = ORT_API;
    op->name = op_name;
    op->provider = provider;
    op->input_type = input_type;
    op->input_count = input_count;
    op->output_type = output_type;
    op->output_count = output_count;
    op->destroy = destroy;
    op->input_kind = input_kind;
    op->output_kind = output_kind;
    op->input_memory = input_memory;
    op->input_min = op->input_same = op->output_min = op->output_same = zero;
    op->create = create;
    op->compute = compute;
    op->start_version = first_version;
    op->end_version = last_version;
    op->binding = binding;
    op->kind = kind;
    op->on_device = on_device;
    op->cuda = cuda;
}

static Binding *pending; /* what the next RegisterCustomOps is for; Python holds a lock around it */

static Status add_op(const Binding *binding, const CustomOp *op)
{
    return CALL(DOMAIN_ADD, Status(*)(void *, const void *))(op->kind >= PYTHON_OP_BACKWARD ? binding->own_domain : binding->domain, op);
}

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
        status = CALL(CREATE_DOMAIN, Status(*)(const char *, void **))("pythonop", &binding->own_domain);
    for (int kind = 0; !status && kind < OPERATOR_COUNT; kind++)
        status = add_op(binding, &binding->ops[kind]);
    for (int kind = 0; !status && binding->device == WITH_CUDA && kind < OPERATOR_COUNT; kind++)
        status = add_op(binding, &binding->on_device[kind]);
    if (!status)
        status = CALL(ADD_DOMAIN, Status(*)(void *, void *))(options, binding->domain);
    if (!status)
        status = CALL(ADD_DOMAIN, Status(*)(void *, void *))(options, binding->own_domain);
    if (!status)
        pending = NULL;
    return status;
}

/* ------------------------------------------------------------------------------------------------- Python's side */

static void binding_destructor(PyObject *capsule) { free_binding(PyCapsule_GetPointer(capsule, "pythonop.binding")); }

/* prepare(owner, store, contexts, runs, device) -> capsule: the next registration belongs to this binding. */
static PyObject *prepare(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *owner, *store, *contexts, *runs;
    int device;
    if (!PyArg_ParseTuple(args, "OOOOi", &owner, &store, &contexts, &runs, &device))
        return NULL;
    Binding *binding = calloc(1, sizeof *binding);
    if (!binding)
        return PyErr_NoMemory();
    binding->count = 1;
    binding->device = device;
    for (int kind = 0; kind < OPERATOR_COUNT; kind++)
        fill_op(&binding->ops[kind], binding, kind, kind == PYTHON_OP_BACKWARD || device == BORROW, 0);
    for (int kind = 0; kind < OPERATOR_COUNT; kind++)
        fill_op(&binding->on_device[kind], binding, kind, 1, 1);
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
    PyObject **targets[] = {&from_dlpack, &to_dlpack, &is_grad_enabled, &set_grad_enabled, &is_autocast, &is_inference, &run_backward, &urandom, &release_leaf, &gradient_edge, &weak_storage, &release_weak, &own_memory, &run_error};
    Py_ssize_t count = sizeof targets / sizeof *targets;
    if (PyTuple_Size(args) != count + 1) {
        PyErr_SetString(PyExc_TypeError, "setup() takes 13 functions, RunError and a size");
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
    {"prepare", prepare, METH_VARARGS, "prepare(owner, store, contexts, runs, device) -> capsule"},
    {"registered", registered, METH_NOARGS, "registered() -> bool"},
    {"setup", setup, METH_VARARGS, "setup(13 functions of torch, RunError, large)"},
    {"threads", threads, METH_VARARGS, "threads(7 addresses of functions of torch, OpenMP and MKL, 0 for none)"},
    {"threads_outside", threads_outside, METH_NOARGS, "threads_outside() -> torch's threads outside of the call that the thread is in, or 0"},
    {"put_to_sleep", sleep_before, METH_O, "put_to_sleep(seconds of the last run)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "PythonOp, PythonOpGrad, PythonOpBackward and PythonOpTangent for onnxruntime.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    struct { PyObject **target; const char *text; } names[] = {
        {&s_requires_grad, "requires_grad"}, {&s_run, "run"}, {&s_retain, "retain"}, {&s_keep, "keep"}, {&s_finish, "finish"}, {&s_take, "take"},
        {&s_version, "_version"}, {&s_strings, "strings"}, {&s_view, "view"}, {&s_plan, "plan"}, {&s_fix, "fix"}, {&s_escaped, "escaped"}, {&s_failed, "failed"}, {&s_title, "title"}, {&s_shape, "shape"},
        {&s_device_run, "device_run"}, {&s_device_write, "device_write"}, {&s_let_go, "let_go"},
        {&s_free, "free"}, {&s_item, "item"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].target = PyUnicode_InternFromString(names[i].text)))
            return NULL;
    return PyModule_Create(&definition);
}
