/* PythonOp, PythonOpGrad and PythonOpTangent where tensors live on a device, and PythonOpBackward anywhere.
 *
 * Nothing is fast-pathed here: inputs are wrapped where they are, Python copies them on ORT's stream, runs the kernels
 * of kernels.py, and copies the results into ORT's outputs. The same code runs on the CPU (device "borrow"), which is
 * how it is tested where there is no GPU.
 */
#ifndef PYTHONOP_DEVICE_H
#define PYTHONOP_DEVICE_H

#include "tensors.h"

int compute_by_python(Kernel *kernel, void *context);

#endif
