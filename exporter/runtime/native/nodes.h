/* What onnxruntime says of a node while its kernel is made. */
#ifndef PYTHONOP_NODES_H
#define PYTHONOP_NODES_H

#include "tensors.h"

/* One attribute by name and kind ('s', 'i', 'f', 'I' for ints, 'F' for floats); NULL without an exception if it is absent. */
PyObject *attribute(const void *info, const char *name, char kind);
/* The name of a node, "" where it has none; a text from a file. */
PyObject *node_name(const void *info);
/* One bool per output of a node: whether it has a name. */
PyObject *named_outputs(const void *info);

#endif
