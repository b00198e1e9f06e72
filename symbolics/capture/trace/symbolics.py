"""The TorchScript symbolics of the two ops (dynamo=False): ``pythonop::call`` -> PythonOp.

The recorder puts the op in the Function's place before torch.jit sees the call, so prim::PythonOp (and a symbolic that
a user registered for it) is not touched: what reaches it are Functions that were not captured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import torch

from symbolics import torch_private as private
from symbolics.capture.gradient_ops import gradient_attributes, is_edge
from symbolics.capture.opaque_op import record_of
from symbolics.capture.trace.trace import Trace
from symbolics.graph.boundaries import read_edge
from symbolics.node.attributes import ir_attributes
from symbolics.node.dtypes import DTYPES
from symbolics.node.names import BOUNDARY_OP, GRADIENT_OP, INNER_DOMAIN, MARK_DOMAIN, MARK_OP, ORT_DOMAIN, PYTHON_OP, VARIABLE_OP
from symbolics.quirks import MISSING, SYMBOLICS, float64_by_default, reshapes_with_sizes

__all__ = ["symbolics_registered"]

_SETTERS = {ir.AttributeType.INT: "i_", ir.AttributeType.INTS: "is_", ir.AttributeType.FLOATS: "fs_", ir.AttributeType.STRING: "s_"}


def _call(trace: Trace, g: Any, inputs: Any, sizes: Any, key: Any) -> Any:
    record = record_of(key.node().s("value"))
    operands = list(inputs.node().inputs())  # a prim::ListConstruct, in the order of the slots
    outputs = g.op(f"{ORT_DOMAIN}::{PYTHON_OP}", *operands, outputs=1 + len(record.outputs.tensors))
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    node = outputs[0].node()
    for attribute in ir_attributes(record.attributes):
        # g.op drops "inplace" and cannot write empty lists: the node takes both.
        getattr(node, _SETTERS[attribute.type])(
            attribute.name, list(attribute.value) if isinstance(attribute.value, tuple) else attribute.value
        )
    outputs[0].setType(private.tensor_type(torch.int64, []))
    # A convolution must know the sizes of its kernel: a quantized weight has those of the weight.
    fixed = all(_is_of_state(value, trace) for value in operands)
    shapes = [value.type().sizes() for value in operands] if fixed else []
    for value, output in zip(outputs[1:], record.outputs.tensors, strict=True):
        sizes = [int(size) for size in output.shape] if fixed else []
        value.setType(private.tensor_type(output.dtype, sizes if sizes in shapes else [None] * len(output.shape)))
    return g.op("prim::ListConstruct", *outputs)


def _is_of_state(root: Any, trace: Trace) -> bool:
    """Whether a value of the graph depends on parameters and buffers alone."""
    todo, seen = [root], set()
    while todo:
        value = todo.pop()
        node, name = value.node(), value.debugName()
        if name in trace.fed or (node.kind() == "prim::Param" and name not in trace.state):
            trace.fed.add(root.debugName())  # calls behind this one stop here
            return False
        if name not in seen:
            seen.add(name)
            todo += node.inputs() if node.kind() != "prim::Param" else ()
    return True


def _stop(g: Any, x: Any) -> Any:
    return g.op(f"{MARK_DOMAIN}::{MARK_OP}", x).setType(x.type())


def _gradient(g: Any, outputs: Any, inputs: Any, cotangents: Any, key: Any) -> Any:
    lists = [list(each.node().inputs()) for each in (outputs, inputs, cotangents)]
    results = g.op(f"{INNER_DOMAIN}::{GRADIENT_OP}", *lists[0], *lists[1], *lists[2], outputs=len(lists[1]))
    results = results if isinstance(results, (tuple, list)) else [results]
    for attribute in gradient_attributes(key.node().s("value"), len(lists[0])):
        getattr(results[0].node(), _SETTERS[attribute.type])(attribute.name, attribute.value)
    for result, x in zip(results, lists[1], strict=True):
        result.setType(x.type())
    return g.op("prim::ListConstruct", *results)


def _variable(g: Any, x: Any, key: Any, fed: Any) -> Any:
    said = key.node().s("value")
    if not is_edge(said):
        return g.op(f"{INNER_DOMAIN}::{VARIABLE_OP}", x, id_s=said).setType(x.type())
    edge = read_edge(said)
    kind = x.type() if not edge.type or None in (edge.shape or ()) else private.tensor_type(DTYPES[edge.type], edge.shape or ())
    return g.op(f"{INNER_DOMAIN}::{BOUNDARY_OP}", x, id_s=said).setType(kind)


@contextlib.contextmanager
def symbolics_registered(opset: int, trace: Trace) -> Iterator[None]:
    """Register the symbolics of our operators, those that replace torch's own, and those that it lacks, with the TorchScript exporter while the block runs."""
    own = {"call": functools.partial(_call, trace), "stop_gradient": _stop, "gradient": _gradient, "variable": _variable}
    names: dict[str, tuple[int, Any]] = {f"pythonop::{name}": (opset, function) for name, function in own.items()}
    for name, function in SYMBOLICS.items():
        if (theirs := private.torchscript_symbolic(name)) is not None:
            newest, original = theirs
            names[name] = (newest, functools.partial(function, original))
    names |= {name: (opset, function) for name, function in MISSING.items() if not private.torchscript_has(name, opset)}
    for name, (since, function) in names.items():
        torch.onnx.register_custom_op_symbolic(name, function, since)  # type: ignore[attr-defined]
    try:
        with float64_by_default(), reshapes_with_sizes():
            yield
    finally:
        for name, (since, _) in names.items():
            torch.onnx.unregister_custom_op_symbolic(name, since)  # type: ignore[attr-defined]
