/* The part of onnxruntime's C ABI that our libraries call: there is no header of onnxruntime to compile against where people install, so the few
 * slots of its function table are declared here; their numbers are part of its stable ABI.
 */
#ifndef PYTHONOP_ORT_ABI_H
#define PYTHONOP_ORT_ABI_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
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
    /* what a library adds */
    struct Binding *binding;
    int kind, on_device, cuda; /* kind: enum Operator */
} CustomOp;

#define CALL(slot, type) ((type)api[slot])
/* The function table of onnxruntime, from the first registration on: one for each library. */
extern const void *const *api;

#endif
