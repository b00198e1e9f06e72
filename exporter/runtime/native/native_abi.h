/* What native.c needs of others: CPython, the slots of ONNX Runtime's ABI, DLPack. */
#ifndef PYTHONOP_NATIVE_ABI_H
#define PYTHONOP_NATIVE_ABI_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#ifdef _MSC_VER /* its <stdatomic.h> needs a switch of its own */
#include <intrin.h>
typedef volatile long atomic_flag_t;
#define exchange(p, v) _InterlockedExchange((p), (v))
#define peek(p) _InterlockedOr((p), 0)
#else
#include <stdatomic.h>
typedef atomic_int atomic_flag_t;
#define exchange(p, v) atomic_exchange((p), (v))
#define peek(p) atomic_load(p)
#endif

/* ------------------------------------------------------------------------------------------- onnxruntime's ABI */

typedef void *Status; /* OrtStatus*, NULL is success */
typedef struct { const void *const *(*get_api)(uint32_t); const char *(*version)(void); } ApiBase;

/* Version 17: the oldest that has every slot below (onnxruntime 1.17). */
enum { ORT_API = 17, ORT_FAIL = 1 };
enum { /* slots of the OrtApi table */
    CREATE_STATUS = 0, CREATE_DOMAIN = 26, DOMAIN_ADD = 27, ADD_DOMAIN = 28, TENSOR_DATA = 51,
    ELEMENT_TYPE = 60, DIM_COUNT = 61, DIMS = 62, TYPE_AND_SHAPE = 65, ATTR_FLOAT = 85, ATTR_INT = 86, ATTR_STRING = 87,
    INPUT_COUNT = 88, OUTPUT_COUNT = 89, INPUT = 90, OUTPUT = 91, RELEASE_STATUS = 93, RELEASE_INFO = 99,
    RELEASE_DOMAIN = 101, STRING_LENGTH = 127, STRING_ELEMENT = 128, ATTRS_FLOAT = 162, ATTRS_INT = 163, NODE_INPUTS = 230,
    NODE_OUTPUTS = 231, NODE_OUTPUT_NAME = 233, NODE_NAME = 244, STRING_BUFFER = 252, PARALLEL_FOR = 274
};
enum { ONNX_FLOAT = 1, ONNX_HALF = 10, ONNX_DOUBLE = 11, ONNX_INT64 = 7, ONNX_STRING = 8, ONNX_LAST = 20 };

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
    int kind, on_device, cuda; /* kind: enum Operator */
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

#endif
