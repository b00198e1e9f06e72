/* PythonOp, PythonOpGrad, PythonOpBackward and PythonOpTangent for stock onnxruntime.
 *
 * One binary is two things: the Python module exporter.runtime.native._native, and the custom-op library that
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
 *
 * native_abi.h has the declarations of others, native_tensors.h our structs, native_inputs.h gather, native_outputs.h write,
 * native_contexts.h the store's side, native_run.h the call, native_device.h the same for devices,
 * native_elementwise.h chains of standard operators, native_rearrange.h those that only move elements, native_lstm.h all steps of an LSTM,
 * native_convolution.h gradients for weights (native_panels.h the products of both), native_interleave.h images of phases, native_pools.h pools and
 * their gradients, native_threads.h whose threads run, native_nodes.h what a node says of itself; here kernels are made and the two modules meet.
 * Together they are one translation unit.
 */
#include "native_device.h"
#include "native_elementwise.h"
#include "native_rearrange.h"
#include "native_lstm.h"
#include "native_gru.h"
#include "native_convolution.h"
#include "native_interleave.h"
#include "native_pools.h"
#include "native_batches.h"
#include "native_nodes.h"
#include "native_threads.h"

/* --------------------------------------------------------------------------------------- kernels and their making */

typedef struct { Kernel *kernel; void *context; Status status; } Call;

static void call_python(void *data)
{
    Call *call = data;
    Kernel *kernel = call->kernel;
    PyGILState_STATE gil = PyGILState_Ensure();
    Turn turn = begin_turn(&kernel->pace);
    if (kernel->by_python  ? compute_by_python(kernel, call->context)
        : kernel->backward ? compute_backward(kernel, call->context)
                           : compute_forward(kernel, call->context))
        call->status = failure(kernel->binding, kernel->object);
    end_turn(turn, &kernel->pace);
    PyGILState_Release(gil);
}

static Status compute(void *state, void *context)
{
    Kernel *kernel = state;
    Pace *pace = &kernel->pace;
    Call call = {kernel, context, NULL};
    if (pace->alone || pace->long_calls < LONG_CALLS || !openmp.most || openmp.most() == 1) {
        call_python(&call);
        return call.status;
    }
    int on_trial = !pace->given && pace->tries < LONG_CALLS;
    double begin = on_trial ? seconds(1) : 0;
    call_alone(context, call_python, &call);
    if (on_trial) {
        double took = seconds(1) - begin;
        PyGILState_STATE gil = PyGILState_Ensure();
        end_try(pace, took);
        PyGILState_Release(gil);
    }
    return call.status;
}

/* A tuple of places as an array; NULL with an exception where one is not below `below`. */
static Py_ssize_t *index_array(PyObject *tuple, Py_ssize_t *count, Py_ssize_t below)
{
    *count = tuple && PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
    Py_ssize_t *out = *count < 0 ? NULL : calloc((size_t)*count + 1, sizeof *out);
    if (!out) {
        *count < 0 ? (void)internal("a list of places") : (void)PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < *count; i++) {
        out[i] = PyLong_AsSsize_t(PyTuple_GetItem(tuple, i));
        if (PyErr_Occurred() || out[i] < 0 || out[i] >= below) {
            free(out);
            internal("a place");
            return NULL;
        }
    }
    return out;
}

static void free_binding(Binding *binding)
{
    if (--binding->count)
        return;
    if (binding->domain)
        CALL(RELEASE_DOMAIN, void (*)(void *))(binding->domain);
    if (binding->own_domain)
        CALL(RELEASE_DOMAIN, void (*)(void *))(binding->own_domain);
    Py_XDECREF(binding->owner);
    Py_XDECREF(binding->store);
    Py_XDECREF(binding->contexts);
    Py_XDECREF(binding->runs);
    free(binding);
}

static void free_kernel(Kernel *kernel)
{
    PyObject *objects[] = {kernel->object, kernel->apply, kernel->arguments, kernel->id, kernel->name, kernel->log};
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

/* The fields of KernelPlan in kernel_plans.py, in its order; a test compares the two. */
enum {
    PLAN_KERNEL, PLAN_FLAGS, PLAN_KINDS, PLAN_PLACES, PLAN_INPUTS, PLAN_ID, PLAN_NAME, PLAN_FAST, PLAN_WRITTEN, PLAN_SINGLE,
    PLAN_APPLY, PLAN_ARGUMENTS, PLAN_POSITIONS, PLAN_LOG, PLAN_LONG, PLAN_ALONE
};

static const char *const OPERATORS[] = {"PythonOp", "PythonOpGrad", "PythonOpBackward", "PythonOpTangent", "Elementwise", "Rearrange", "Lstm", "LstmGrad", "ConvWeightGrad", "Interleave", "MaxPoolIndices", "MaxPoolGrad", "BatchMatMul", "Gru", "GruGrad"}; /* as enum Operator */
static const char *op_name(const CustomOp *op) { return OPERATORS[op->kind]; }
static int takes_context(const CustomOp *op) { return op->kind == PYTHON_OP_GRAD || op->kind == PYTHON_OP_BACKWARD; }

/* Binding.plan decodes the node in Python, once; its answer fills the struct. */
static Kernel *make_kernel(const CustomOp *op, const void *info)
{
    Binding *binding = op->binding;
    PyObject *attributes = PyDict_New(), *plan = NULL, *name = NULL, *table = NULL, *specs = NULL, *operator = NULL, *inputs = NULL, *outputs = NULL, *flags, *kinds;
    Kernel *kernel = NULL;
    size_t count = 0;
    table = PyObject_GetAttrString(binding->owner, "attributes");
    operator = PyUnicode_FromString(op_name(op));
    specs = table && operator ? PyObject_GetItem(table, operator) : NULL;
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
        /* Of another type it is not absent (lists are read as empty then): Python says what is wrong. */
        for (const char *other = "sifIF"; !PyErr_Occurred() && *other && (!value || (PyList_Check(value) && !PyList_Size(value))); other++) {
            PyObject *found = attribute(info, attribute_name, *other);
            if (found) {
                Py_XDECREF(value);
                value = found;
            }
        }
        if (!value && PyErr_Occurred())
            goto done;
        if (value && PyDict_SetItem(attributes, PyTuple_GetItem(pair, 0), value)) {
            Py_DECREF(value);
            goto done;
        }
        Py_XDECREF(value);
    }
    if (!(name = node_name(info)) || !(outputs = named_outputs(info)) || check(CALL(NODE_INPUTS, Status(*)(const void *, size_t *))(info, &count)) ||
        !(inputs = PyLong_FromSize_t(count)))
        goto done;
    plan = PyObject_CallMethodObjArgs(binding->owner, s_plan, operator, attributes, name, inputs, outputs, NULL);
    if (!plan)
        goto done;
    if (!PyTuple_Check(plan) || PyTuple_Size(plan) != PLAN_ALONE + 1) {
        internal("a plan");
        goto done;
    }
    if (!(kernel = calloc(1, sizeof *kernel))) {
        PyErr_NoMemory();
        goto done;
    }
    kernel->binding = binding;
    binding->count++;
    kernel->backward = takes_context(op);
    kernel->again = op->kind == PYTHON_OP_BACKWARD;
    kernel->tangent = op->kind == PYTHON_OP_TANGENT;
    kernel->by_python = op->on_device || kernel->again;
    PyObject **targets[] = {&kernel->object, &kernel->apply, &kernel->arguments, &kernel->id, &kernel->name, &kernel->log};
    const int parts[] = {PLAN_KERNEL, PLAN_APPLY, PLAN_ARGUMENTS, PLAN_ID, PLAN_NAME, PLAN_LOG};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *targets[i] = PyTuple_GetItem(plan, parts[i]);
        Py_XINCREF(*targets[i]);
    }
    if (kernel->log == Py_None)
        Py_CLEAR(kernel->log);
    kernel->fast = PyTuple_GetItem(plan, PLAN_FAST) == Py_True;
    kernel->single = PyTuple_GetItem(plan, PLAN_SINGLE) == Py_True;
    kernel->pace.alone = PyTuple_GetItem(plan, PLAN_ALONE) == Py_True || op->on_device;
    kernel->pace.given = kernel->pace.alone || PyTuple_GetItem(plan, PLAN_LONG) == Py_True;
    kernel->pace.long_calls = kernel->pace.given ? LONG_CALLS : 0;
    flags = PyTuple_GetItem(plan, PLAN_FLAGS);
    kinds = PyTuple_GetItem(plan, PLAN_KINDS);
    kernel->inputs = PyLong_AsSsize_t(PyTuple_GetItem(plan, PLAN_INPUTS));
    kernel->outputs = PyTuple_Check(kinds) ? PyTuple_Size(kinds) : -1;
    Py_ssize_t unused = 0, flag_count = kernel->backward ? kernel->outputs : kernel->inputs;
    if (kernel->inputs < 0 || kernel->outputs < 0 || !PyTuple_Check(kernel->arguments) || !PyTuple_Check(flags) || PyTuple_Size(flags) != flag_count ||
        (kernel->single && kernel->outputs != 1) || (kernel->log && !PyList_Check(kernel->log))) {
        internal("a plan");
        goto done;
    }
    /* Where the kernel is not fast, nobody reads the positions. */
    kernel->positions = index_array(PyTuple_GetItem(plan, PLAN_POSITIONS), &unused, kernel->fast ? PyTuple_Size(kernel->arguments) : PY_SSIZE_T_MAX);
    if (kernel->positions && !kernel->backward && unused != kernel->inputs)
        internal("the number of positions");
    if (PyErr_Occurred() || !(kernel->places = index_array(PyTuple_GetItem(plan, PLAN_PLACES), &kernel->place_count, kernel->inputs)) ||
        !(kernel->written = index_array(PyTuple_GetItem(plan, PLAN_WRITTEN), &kernel->written_count, kernel->outputs)))
        goto done;
    kernel->flags = calloc((size_t)flag_count + 1, 1);
    kernel->kinds = calloc((size_t)kernel->outputs + 1, sizeof *kernel->kinds);
    kernel->modes = calloc(2 * (size_t)kernel->inputs + 1, 1);
    if (!kernel->flags || !kernel->kinds || !kernel->modes) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < flag_count; i++) {
        long flag = PyLong_AsLong(PyTuple_GetItem(flags, i));
        if (PyErr_Occurred() || flag < 0 || flag > WATCHED) {
            internal("a flag");
            goto done;
        }
        kernel->flags[i] = (char)flag;
    }
    for (Py_ssize_t i = 0; i < kernel->outputs; i++) {
        long kind = PyLong_AsLong(PyTuple_GetItem(kinds, i));
        if (PyErr_Occurred() || kind < 0 || kind > ONNX_LAST) {
            internal("an element type");
            goto done;
        }
        kernel->kinds[i] = (int32_t)kind;
    }
done:
    Py_XDECREF(attributes);
    Py_XDECREF(plan);
    Py_XDECREF(name);
    Py_XDECREF(table);
    Py_XDECREF(specs);
    Py_XDECREF(operator);
    Py_XDECREF(inputs);
    Py_XDECREF(outputs);
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

/* A Program, an Arrangement, a Recurrence, Windows, a Pool or its gradient: what they begin with is the binding. */
static void destroy_plain(void *state)
{
    if (!state || !Py_IsInitialized())
        return;
    PyGILState_STATE gil = PyGILState_Ensure();
    free_binding(*(Binding **)state);
    PyGILState_Release(gil);
    free(state);
}

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

typedef struct { Status (*create)(const CustomOp *, const void *const *, const void *, void **); Status (*compute)(void *, void *); } KernelOf;
static const KernelOf KERNELS[] = { /* as enum Operator */
    {create, compute}, {create, compute}, {create, compute}, {create, compute}, {elementwise_create, elementwise_compute}, {rearrange_create, rearrange_compute},
    {lstm_create, lstm_compute}, {lstm_create, lstm_grad_compute}, {conv_grad_create, conv_grad_compute}, {interleave_create, interleave_compute},
    {pool_create, pool_compute}, {pool_grad_create, pool_grad_compute}, {batch_create, batch_compute},
    {gru_create, gru_compute}, {gru_create, gru_grad_compute},
};

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
    op->destroy = kind >= ELEMENTWISE ? destroy_plain : destroy;
    op->input_kind = input_kind;
    op->output_kind = output_kind;
    op->input_memory = input_memory;
    op->input_min = op->input_same = op->output_min = op->output_same = zero;
    op->create = KERNELS[kind].create;
    op->compute = KERNELS[kind].compute;
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
    for (int kind = 0; !status && binding->device == WITH_CUDA && kind < ELEMENTWISE; kind++)
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
        fill_op(&binding->ops[kind], binding, kind, kind == PYTHON_OP_BACKWARD || (kind < ELEMENTWISE && device == BORROW), 0);
    for (int kind = 0; kind < ELEMENTWISE; kind++)
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

/* has_wide_vectors() -> whether products are quicker here than onnxruntime's */
static PyObject *wide_vectors(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyBool_FromLong(has_wide_vectors());
}

static PyMethodDef methods[] = {
    {"prepare", prepare, METH_VARARGS, "prepare(owner, store, contexts, runs, device) -> capsule"},
    {"registered", registered, METH_NOARGS, "registered() -> bool"},
    {"setup", setup, METH_VARARGS, "setup(13 functions of torch, RunError, large)"},
    {"threads", threads, METH_VARARGS, "threads(7 addresses of functions of torch, OpenMP and MKL, 0 for none)"},
    {"threads_outside", threads_outside, METH_NOARGS, "threads_outside() -> torch's threads outside of the call that the thread is in, or 0"},
    {"put_to_sleep", sleep_before, METH_O, "put_to_sleep(seconds of the last run)"},
    {"has_wide_vectors", wide_vectors, METH_NOARGS, "has_wide_vectors() -> whether the processor has AVX-512, and this library uses it"},
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
