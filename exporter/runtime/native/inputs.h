/* Tensors of ONNX Runtime become torch's, and are taken back. */
#ifndef PYTHONOP_INPUTS_H
#define PYTHONOP_INPUTS_H

#include "tensors.h"

/* The tensor for one OrtValue. mode: VIEW reads ORT's memory, anything else copies. */
int gather(Kernel *kernel, const void *value, int mode, Input *input);
/* What a call left of its large inputs decides how the next run hands them over. The inputs' tensors are released
 * here; on failure (an exception is set) nothing is learned. Returns -1 with an exception for a broken promise. */
int settle(Kernel *kernel, Input *inputs, Py_ssize_t count, unsigned char *modes);

#endif
