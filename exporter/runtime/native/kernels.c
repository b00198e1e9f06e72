#include "kernels.h"
#include "device.h"
#include "nodes.h"
#include "run.h"
#include "threads.h"

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

Status compute(void *state, void *context)
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

void free_binding(Binding *binding)
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

static const char *const OPERATORS[] = {"PythonOp", "PythonOpGrad", "PythonOpBackward", "PythonOpTangent"}; /* as enum Operator */
const char *op_name(const CustomOp *op) { return OPERATORS[op->kind]; }
int takes_context(const CustomOp *op) { return op->kind == PYTHON_OP_GRAD || op->kind == PYTHON_OP_BACKWARD; }

/* The attributes of a node that its operator may have, as a dict; NULL with an exception. Of another type than it should be one is not absent (lists
 * are read as empty then): Python says what is wrong. */
static PyObject *read_attributes(PyObject *specs, const void *info)
{
    PyObject *attributes = PyDict_New();
    for (Py_ssize_t i = 0; attributes && i < PyTuple_Size(specs); i++) {
        PyObject *pair = PyTuple_GetItem(specs, i), *value = NULL;
        Py_ssize_t length = 0;
        const char *name = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(pair, 0), &length);
        const char *kind = name ? PyUnicode_AsUTF8AndSize(PyTuple_GetItem(pair, 1), &length) : NULL;
        if (kind)
            value = attribute(info, name, *kind);
        for (const char *other = "sifIF"; !PyErr_Occurred() && *other && (!value || (PyList_Check(value) && !PyList_Size(value))); other++) {
            PyObject *found = attribute(info, name, *other);
            if (found) {
                Py_XDECREF(value);
                value = found;
            }
        }
        if (PyErr_Occurred() || (value && PyDict_SetItem(attributes, PyTuple_GetItem(pair, 0), value)))
            Py_CLEAR(attributes);
        Py_XDECREF(value);
    }
    return attributes;
}

/* A tuple of small numbers of a plan, from 0 to `most`, one by one through `put`; -1 with an exception. */
static int read_numbers(PyObject *tuple, long most, const char *what, Kernel *kernel, void (*put)(Kernel *, Py_ssize_t, long))
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++) {
        long number = PyLong_AsLong(PyTuple_GetItem(tuple, i));
        if (PyErr_Occurred() || number < 0 || number > most)
            return internal(what);
        put(kernel, i, number);
    }
    return 0;
}

static void put_flag(Kernel *kernel, Py_ssize_t place, long flag) { kernel->flags[place] = (char)flag; }
static void put_kind(Kernel *kernel, Py_ssize_t place, long kind) { kernel->kinds[place] = (int32_t)kind; }

/* What a plan says of the kernel's tensors; -1 with an exception. */
static int read_places(Kernel *kernel, PyObject *plan)
{
    PyObject *flags = PyTuple_GetItem(plan, PLAN_FLAGS), *kinds = PyTuple_GetItem(plan, PLAN_KINDS);
    kernel->inputs = PyLong_AsSsize_t(PyTuple_GetItem(plan, PLAN_INPUTS));
    kernel->outputs = PyTuple_Check(kinds) ? PyTuple_Size(kinds) : -1;
    Py_ssize_t unused = 0, flag_count = kernel->backward ? kernel->outputs : kernel->inputs;
    if (kernel->inputs < 0 || kernel->outputs < 0 || !PyTuple_Check(kernel->arguments) || !PyTuple_Check(flags) || PyTuple_Size(flags) != flag_count ||
        (kernel->single && kernel->outputs != 1) || (kernel->log && !PyList_Check(kernel->log)))
        return internal("a plan");
    /* Where the kernel is not fast, nobody reads the positions. */
    kernel->positions = index_array(PyTuple_GetItem(plan, PLAN_POSITIONS), &unused, kernel->fast ? PyTuple_Size(kernel->arguments) : PY_SSIZE_T_MAX);
    if (kernel->positions && !kernel->backward && unused != kernel->inputs)
        return internal("the number of positions");
    if (!kernel->positions || !(kernel->places = index_array(PyTuple_GetItem(plan, PLAN_PLACES), &kernel->place_count, kernel->inputs)) ||
        !(kernel->written = index_array(PyTuple_GetItem(plan, PLAN_WRITTEN), &kernel->written_count, kernel->outputs)))
        return -1;
    kernel->flags = calloc((size_t)flag_count + 1, 1);
    kernel->kinds = calloc((size_t)kernel->outputs + 1, sizeof *kernel->kinds);
    kernel->modes = calloc(2 * (size_t)kernel->inputs + 1, 1);
    if (!kernel->flags || !kernel->kinds || !kernel->modes) {
        PyErr_NoMemory();
        return -1;
    }
    return read_numbers(flags, WATCHED, "a flag", kernel, put_flag) ? -1 : read_numbers(kinds, ONNX_LAST, "an element type", kernel, put_kind);
}

/* The kernel that a plan describes; NULL with an exception. */
static Kernel *kernel_of(const CustomOp *op, PyObject *plan)
{
    if (!PyTuple_Check(plan) || PyTuple_Size(plan) != PLAN_ALONE + 1) {
        internal("a plan");
        return NULL;
    }
    Kernel *kernel = calloc(1, sizeof *kernel);
    if (!kernel) {
        PyErr_NoMemory();
        return NULL;
    }
    kernel->binding = op->binding;
    op->binding->count++;
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
    if (!read_places(kernel, plan))
        return kernel;
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    free_kernel(kernel);
    PyErr_Restore(type, error, trace);
    return NULL;
}

/* Binding.plan decodes the node in Python, once; its answer fills the struct. */
static Kernel *make_kernel(const CustomOp *op, const void *info)
{
    PyObject *owner = op->binding->owner, *name = NULL, *inputs = NULL, *outputs = NULL, *plan = NULL;
    PyObject *table = PyObject_GetAttrString(owner, "attributes"), *operator = PyUnicode_FromString(op_name(op));
    PyObject *specs = table && operator ? PyObject_GetItem(table, operator) : NULL;
    PyObject *attributes = specs ? read_attributes(specs, info) : NULL;
    size_t count = 0;
    if (attributes && (name = node_name(info)) && (outputs = named_outputs(info)) &&
        !check(CALL(NODE_INPUTS, Status(*)(const void *, size_t *))(info, &count)) && (inputs = PyLong_FromSize_t(count)))
        plan = PyObject_CallMethodObjArgs(owner, s_plan, operator, attributes, name, inputs, outputs, NULL);
    Kernel *kernel = plan ? kernel_of(op, plan) : NULL;
    PyObject *own[] = {attributes, plan, name, table, specs, operator, inputs, outputs};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        Py_XDECREF(own[i]);
    return kernel;
}

Status create(const CustomOp *op, const void *const *table, const void *info, void **out)
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

void destroy(void *state)
{
    if (!state || !Py_IsInitialized())
        return; /* the interpreter is gone, and every object with it */
    PyGILState_STATE gil = PyGILState_Ensure();
    free_kernel(state);
    PyGILState_Release(gil);
}
