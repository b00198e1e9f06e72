#include "run.h"
#include "contexts.h"
#include "inputs.h"
#include "outputs.h"

/* -------------------------------------------------------------------------------------------------------- PythonOp */

/* Most calls have few tensors: no allocation for those. */
enum { FEW = 8 };

static int truth_of(PyObject *function)
{
    PyObject *answer = PyObject_CallFunctionObjArgs(function, NULL);
    int truth = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return truth;
}

/* Whether the thread is in inference mode or autocasts: rare, and Python's business. *grad: whether grad mode is on,
 * which inference mode always turns off. */
static int special_state(int *grad)
{
    if ((*grad = truth_of(is_grad_enabled)) < 0)
        return -1;
    int special = *grad ? 0 : truth_of(is_inference);
    return special ? special : truth_of(is_autocast);
}

/* A context is one flat tuple, as store.Context describes: (id, name, shapes, number of roots, roots..., targets...).
 * One object for the garbage collector to visit, where a tuple of tuples would be four. */
enum { CONTEXT_ID, CONTEXT_NAME, CONTEXT_SHAPES, CONTEXT_COUNT, CONTEXT_ROOTS };

/* So many times None: Python reads all places of a tuple, and one that is not filled is a null pointer. */
static PyObject *nothings(Py_ssize_t count)
{
    PyObject *found = PyTuple_New(count);
    for (Py_ssize_t i = 0; found && i < count; i++) {
        Py_INCREF(Py_None);
        PyTuple_SetItem(found, i, Py_None);
    }
    return found;
}

static int is_true_attribute(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    int truth = value ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    return truth;
}

/* Function.apply without a detour. Fills `results` and, with keep, the targets of `*record` (new references). */
static int fast_forward(Kernel *kernel, Input *inputs, int keep, int before, PyObject **results, PyObject **record)
{
    PyObject *args = NULL, *result = NULL, *shapes = NULL;
    int status = -1, restore = -1;
    Py_ssize_t total = PyTuple_Size(kernel->arguments);
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
                PyErr_Clear();
                damaged(kernel->object, "its attributes say that an input needs a gradient, and the input is of a type that has none");
                Py_DECREF(tensor);
                goto done;
            }
            if (keep && inputs[i].bytes >= large) {
                /* (tensor without the leaf, its gradient edge, its shape): autograd must not keep the memory */
                PyObject *three = PyObject_CallFunctionObjArgs(release_leaf, tensor, NULL);
                Py_DECREF(tensor);
                if (!three || !PyTuple_Check(three) || PyTuple_Size(three) != 3) {
                    Py_XDECREF(three);
                    internal("a leaf without its memory");
                    goto done;
                }
                tensor = PyTuple_GetItem(three, 0);
                target = PyTuple_GetItem(three, 1);
                shape = PyTuple_GetItem(three, 2);
                Py_INCREF(tensor);
                Py_INCREF(target);
                Py_INCREF(shape);
                Py_DECREF(three);
                if (!shapes && !(shapes = nothings(kernel->inputs))) {
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
    return keep_context(kernel, record);
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
    PyObject *outputs = PyTuple_Check(pair) && PyTuple_Size(pair) == 2 ? PyTuple_GetItem(pair, 1) : NULL;
    int status = outputs ? 0 : -1;
    if (outputs) {
        *handle = PyLong_AsLongLong(PyTuple_GetItem(pair, 0));
        status = PyErr_Occurred() || !PyList_Check(outputs) || PyList_Size(outputs) != kernel->outputs ? -1 : 0;
    }
    for (Py_ssize_t i = 0; !status && i < kernel->outputs; i++) {
        results[i] = PyList_GetItem(outputs, i);
        Py_XINCREF(results[i]);
    }
    Py_DECREF(pair);
    return status ? internal("what a PythonOp returned") : 0;
}

int compute_forward(Kernel *kernel, void *context)
{
    int64_t handle = 0;
    size_t count = 0, bytes = 0;
    void *slot = NULL;
    int status = -1;
    PyObject *record = NULL;
    /* The context is made only where the node's first output has a name. */
    if ((!kernel->tangent && check(CALL(OUTPUT, Status(*)(void *, size_t, const int64_t *, size_t, void **))(context, 0, NULL, 0, &slot))) ||
        check(CALL(INPUT_COUNT, Status(*)(const void *, size_t *))(context, &count)))
        return -1;
    int keep = slot ? 1 : kernel->tangent ? 0 : store_flag(kernel->binding, s_keep);
    int grad = 0, special = keep < 0 ? -1 : special_state(&grad);
    if (special < 0)
        return -1;
    unsigned char *modes = kernel->modes + (keep ? kernel->inputs : 0);
    if (count != (size_t)kernel->place_count)
        return damaged(kernel->object, "the graph gives it another number of tensors than its attributes say");
    Input few_inputs[FEW], *inputs = few_inputs;
    PyObject *few_results[FEW], **results = few_results;
    memset(few_inputs, 0, sizeof few_inputs);
    memset(few_results, 0, sizeof few_results);
    if (kernel->inputs > FEW || kernel->outputs > FEW) {
        inputs = calloc((size_t)kernel->inputs + 1, sizeof *inputs);
        results = calloc((size_t)kernel->outputs + 1, sizeof *results);
    }
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
    if (fast ? fast_forward(kernel, inputs, keep, grad, results, &record) : slow_forward(kernel, inputs, keep, results, &handle))
        goto done;
    Py_ssize_t node_output = 0;
    for (Py_ssize_t i = 0; i < kernel->outputs; i++) {
        bytes = 0;
        if (node_output < kernel->written_count && kernel->written[node_output] == i) {
            if (write_tensor(kernel, context, (size_t)node_output + !kernel->tangent, results[i], kernel->kinds[i], i, &bytes))
                goto done;
            node_output++;
        }
        if (fast && keep && add_root(record, i, results[i], bytes))
            goto done;
    }
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
    if (status && handle)
        drop_context(kernel, handle);
    if (inputs != few_inputs) {
        free(inputs);
        free(results);
    }
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
    if (found && PyTuple_Check(found) && PyTuple_Size(found) >= CONTEXT_ROOTS && text_equal(PyTuple_GetItem(found, CONTEXT_ID), kernel->id) == 1 && text_equal(PyTuple_GetItem(found, CONTEXT_NAME), kernel->name) == 1) {
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
    if (out && (!PyTuple_Check(out) || PyTuple_Size(out) != target_count)) {
        Py_CLEAR(out);
        internal("what the engine returned");
    }
    for (Py_ssize_t i = 0; out && i < target_count; i++)
        if (PyTuple_GetItem(out, i) == Py_None)
            *complete = 0;
    for (Py_ssize_t i = 0; i < kernel->outputs; i++)
        if (kernel->flags[i] == WATCHED)
            *complete = 0; /* Python says what is wrong where one is not None */
done:
    Py_XDECREF(given);
    Py_XDECREF(gradients);
    Py_XDECREF(wanted);
    return out;
}

int compute_backward(Kernel *kernel, void *context)
{
    size_t count = 0, bytes = 0;
    const void *value = NULL;
    Seen seen;
    PyObject *found = NULL, *gradients = NULL, *list = NULL;
    int status = -1, complete = 0;
    if (check(CALL(INPUT_COUNT, Status(*)(const void *, size_t *))(context, &count)) ||
        check(CALL(INPUT, Status(*)(const void *, size_t, const void **))(context, 0, &value)) || (value && look(value, &seen)))
        return -1;
    if (!value || seen.kind != ONNX_INT64 || seen.count != 1)
        return damaged(kernel->object, "the context is not one int64 handle");
    int64_t handle;
    memcpy(&handle, seen.data, sizeof handle);
    int grad = 0, retain = store_flag(kernel->binding, s_retain), special = retain < 0 ? -1 : special_state(&grad);
    if (special < 0)
        return -1;
    Input few_inputs[FEW], *inputs = few_inputs;
    memset(few_inputs, 0, sizeof few_inputs);
    if (kernel->inputs > FEW && !(inputs = calloc((size_t)kernel->inputs, sizeof *inputs))) {
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
        special |= value && !inputs[place].bytes; /* without elements: Python sees whether it is absent */
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
    if ((special || !complete) && (!list || !PyList_Check(list) || PyList_Size(list) != kernel->outputs)) {
        internal("what a PythonOpGrad returned");
        goto done;
    }
    Py_ssize_t next = 0, node_output = 0;
    for (Py_ssize_t i = 0; i < kernel->outputs; i++) {
        PyObject *gradient = NULL;
        if (kernel->flags[i] == 1)
            gradient = list ? PyList_GetItem(list, i) : PyTuple_GetItem(gradients, next++);
        if (node_output < kernel->written_count && kernel->written[node_output] == i) {
            /* A place without a gradient has no name: Binding.plan has looked. */
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
    if (inputs != few_inputs)
        free(inputs);
    return status;
}
