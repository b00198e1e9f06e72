/* Tensors of torch are copied into outputs of a node. */
#ifndef PYTHONOP_OUTPUTS_H
#define PYTHONOP_OUTPUTS_H

#include "tensors.h"

/* Copy a tensor into output `index` of the node. kind: the ONNX element type that the file promises, 0 unknown. */
int write_tensor(Kernel *kernel, void *context, size_t index, PyObject *tensor, int kind, Py_ssize_t place, size_t *bytes);

#endif
