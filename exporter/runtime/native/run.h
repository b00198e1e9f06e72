/* One run of a PythonOp, a PythonOpTangent or a PythonOpGrad. */
#ifndef PYTHONOP_RUN_H
#define PYTHONOP_RUN_H

#include "tensors.h"

/* Of a PythonOpTangent too: a forward without a context, whose outputs are those of the Function and their tangents. */
int compute_forward(Kernel *kernel, void *context);
int compute_backward(Kernel *kernel, void *context);

#endif
