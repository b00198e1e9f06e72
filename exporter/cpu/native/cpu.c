/* The library of the accelerator: the custom-op library that onnxruntime loads through RegisterCustomOps, and the Python module exporter.cpu.native._cpu
 * by which it is found and built.
 */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include "kernels.h"
#include "panels.h"

const void *const *api;

static const struct {
    const char *name;
    Status (*create)(const CustomOp *, const void *const *, const void *, void **);
    Status (*compute)(void *, void *);
} KERNELS[] = {
#define KERNEL(text, name) {text, name##_create, name##_compute}
    KERNEL("Elementwise", elementwise), KERNEL("Rearrange", rearrange), KERNEL("Interleave", interleave), KERNEL("ConvWeightGrad", conv_grad),
    KERNEL("MaxPoolIndices", pool), KERNEL("MaxPoolGrad", pool_grad),
    KERNEL("Lstm", lstm), KERNEL("LstmGrad", lstm_grad), KERNEL("Gru", gru), KERNEL("GruGrad", gru_grad),
#undef KERNEL
};
enum { KERNEL_COUNT = sizeof KERNELS / sizeof *KERNELS };

static CustomOp ops[KERNEL_COUNT];
static void *domain; /* of all sessions of the process */

static const char *name_of(const CustomOp *op) { return KERNELS[op->kind].name; }
static const char *on_cpu(const CustomOp *op) { (void)op; return NULL; }
static size_t one(const CustomOp *op) { (void)op; return 1; }
static int any_type(const CustomOp *op, size_t index) { (void)op, (void)index; return 0; }
static int variadic(const CustomOp *op, size_t index) { (void)op, (void)index; return 2; }
static int in_any_memory(const CustomOp *op, size_t index) { (void)op, (void)index; return 0; }
static int none(const CustomOp *op) { (void)op; return 0; }
static int first_version(const CustomOp *op) { (void)op; return 1; }
static int last_version(const CustomOp *op) { (void)op; return INT32_MAX; }

static void fill_op(CustomOp *op, int kind)
{
    memset(op, 0, sizeof *op);
    op->version = ORT_API;
    op->name = name_of;
    op->provider = on_cpu;
    op->input_type = op->output_type = any_type;
    op->input_count = op->output_count = one;
    op->destroy = free;
    op->input_kind = op->output_kind = variadic;
    op->input_memory = in_any_memory;
    op->input_min = op->input_same = op->output_min = op->output_same = none;
    op->create = KERNELS[kind].create;
    op->compute = KERNELS[kind].compute;
    op->start_version = first_version;
    op->end_version = last_version;
    op->kind = kind;
}

/* Registrations of one process follow one another: who calls it holds a lock. */
EXPORT Status RegisterCustomOps(void *options, const ApiBase *base)
{
    Status status = NULL;
    if (!api)
        api = base->get_api(ORT_API);
    if (!api)
        return NULL; /* too old: what opens the model says that its operators are not there */
    if (!domain) {
        void *made = NULL;
        status = CALL(CREATE_DOMAIN, Status(*)(const char *, void **))("pythonop.cpu", &made);
        for (int kind = 0; !status && kind < KERNEL_COUNT; kind++) {
            fill_op(&ops[kind], kind);
            status = CALL(DOMAIN_ADD, Status(*)(void *, const void *))(made, &ops[kind]);
        }
        if (!status)
            domain = made;
    }
    return status ? status : CALL(ADD_DOMAIN, Status(*)(void *, void *))(options, domain);
}

static PyObject *wide_vectors(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyBool_FromLong(has_wide_vectors());
}

static PyMethodDef methods[] = {
    {"has_wide_vectors", wide_vectors, METH_NOARGS, "has_wide_vectors() -> whether the processor has AVX-512, and this library uses it"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", "Operators that make onnxruntime's CPU faster.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__cpu(void) { return PyModule_Create(&definition); }
