"""PythonOp: an autograd.Function whose backward is a PythonOpGrad of the same context."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir import Value

from symbolics.gradients.registry import Grads, gradient
from symbolics.gradients.residuals import residual
from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, unsupported
from symbolics.node.attributes import python_op_grad
from symbolics.node.names import ORT_DOMAIN, PYTHON_OP, PYTHON_OP_GRAD

__all__: list[str] = []


@gradient(PYTHON_OP, domain=ORT_DOMAIN)
def python_op(
    op: Builder, gs: Sequence[Value | None], *xs: Value, node: ir.Node, input_convention: str = "",
    input_requires_grads: Sequence[int] = (), output_tensor_requires_grads: Sequence[int] | None = None,
) -> Grads:  # fmt: skip
    """The backward that Python has written, as a node that reads the context of the forward's."""
    context = residual(op, node, 0, "context", ir.DataType.INT64, ir.Shape(()))
    requires = [flag for letter, flag in zip(input_convention, input_requires_grads) if letter == "d"]  # of the tensor arguments
    wanted = [bool(flag) and x in op.scope.active for flag, x in zip(requires, xs)]
    incoming = [g if flag else None for g, flag in zip(gs[1:], output_tensor_requires_grads or [1] * len(gs))]
    if not any(g is not None for g in incoming) or not any(wanted):
        return {}
    grad = op.add(python_op_grad(node, context, incoming, wanted))
    for out, x, kind, flag in zip(grad.outputs, xs, attr(grad, "output_tensor_types"), wanted):
        if flag:  # of the type that the Function saw: torch.jit's exporter sometimes feeds it another, and the engine casts
            out.name = out.name or op.scope.name("PythonOpGrad")
            out.type, out.shape = ir.TensorType(ir.DataType(kind)), x.shape
    return [out if flag else None for out, flag in zip(grad.outputs, wanted)]


@gradient(PYTHON_OP_GRAD, domain=ORT_DOMAIN)
def python_op_grad_(op: Builder, node: ir.Node, *_: Value | None) -> Grads:
    raise unsupported(
        node,
        f"a backward of a backward of the Function {attr(node, 'name', '?')!r}: its context serves one backward; export with inline= for it",
    )
