/* What the library of PythonOps needs of others: CPython, onnxruntime, DLPack. */
#ifndef PYTHONOP_ABI_H
#define PYTHONOP_ABI_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>
#include <math.h>
#include "atomics.h"
#include "ort_abi.h"

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
