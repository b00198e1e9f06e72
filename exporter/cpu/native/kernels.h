/* The kernels of the accelerator for onnxruntime's CPU. They hold no Python object, and take no lock in a run.
 *
 * No file has their operators: the passes of exporter/cpu/ make them in memory. A file that brings one of its own meets their checks, which let
 * nothing outside of tensors and of their own memory be read or written.
 */
#ifndef PYTHONOP_CPU_KERNELS_H
#define PYTHONOP_CPU_KERNELS_H

#include "tensors.h"

#define KERNEL(name) \
    Status name##_create(const CustomOp *op, const void *const *table, const void *info, void **out); \
    Status name##_compute(void *state, void *context);

KERNEL(elementwise)
KERNEL(rearrange)
KERNEL(interleave)
KERNEL(conv_grad)
KERNEL(pool)
KERNEL(pool_grad)
KERNEL(lstm)
KERNEL(lstm_grad)
KERNEL(gru)
KERNEL(gru_grad)
#undef KERNEL

#endif
