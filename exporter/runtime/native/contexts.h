/* Contexts go into the store under a random handle. */
#ifndef PYTHONOP_CONTEXTS_H
#define PYTHONOP_CONTEXTS_H

#include "tensors.h"

/* Keep a context (a flat tuple) under a new handle; 0 on error. */
int64_t keep_context(Kernel *kernel, PyObject *context);
/* The run that made a context failed after that. The pending exception stays. */
void drop_context(Kernel *kernel, int64_t handle);
/* An attribute of the store as a truth value; -1 on error. */
int store_flag(Binding *binding, PyObject *name);

#endif
