/* Kernels: what onnxruntime makes of a node of ours, runs and frees. */
#ifndef PYTHONOP_KERNELS_H
#define PYTHONOP_KERNELS_H

#include "tensors.h"

const char *op_name(const CustomOp *op);
/* Whether the first input of an operator is a context. */
int takes_context(const CustomOp *op);
/* Of a CustomOp. */
Status create(const CustomOp *op, const void *const *table, const void *info, void **out);
Status compute(void *state, void *context);
void destroy(void *state);
/* One who holds a binding has let go of it. */
void free_binding(Binding *binding);

#endif
