"""PythonOp: an autograd.Function whose backward is a PythonOpGrad of the same context."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.gradients.registry import gradient
from symbolics.graph.values import attr, unsupported
from symbolics.node.attributes import python_op_grad
from symbolics.node.names import ORT_DOMAIN, PYTHON_OP, PYTHON_OP_GRAD

__all__: list[str] = []


@gradient(PYTHON_OP, domain=ORT_DOMAIN)
def python_op(op, node, _, *gradients):
    context = node.outputs[0]
    if not context.name:  # nobody read it so far
        context.name = op.scope.name("context")
    wanted = [bool(flag) and value in op.scope.active for flag, value in zip(_flags(node), node.inputs)]
    differentiable = attr(node, "output_tensor_requires_grads") or [1] * len(gradients)
    incoming = [g if flag else None for g, flag in zip(gradients, differentiable)]
    if not any(g is not None for g in incoming) or not any(wanted):
        return [None] * len(node.inputs)
    grad = op.add(python_op_grad(node, context, incoming, wanted))
    for out, value, kind, flag in zip(grad.outputs, node.inputs, attr(grad, "output_tensor_types"), wanted):
        if flag:  # of the type that the Function saw: torch.jit's exporter sometimes feeds it another, and the engine casts
            out.name = out.name or op.scope.name("PythonOpGrad")
            out.type, out.shape = ir.TensorType(ir.DataType(kind)), value.shape
    return [out if flag else None for out, flag in zip(grad.outputs, wanted)]


def _flags(node) -> list[int]:
    """input_requires_grads of the tensor arguments."""
    convention = attr(node, "input_convention", "")
    return [flag for letter, flag in zip(convention, attr(node, "input_requires_grads", ())) if letter == "d"]


@gradient(PYTHON_OP_GRAD, domain=ORT_DOMAIN)
def python_op_grad_(op, node, *_):
    raise unsupported(
        node,
        f"a backward of a backward of the Function {attr(node, 'name', '?')!r}: its context serves one backward; export with inline= for it",
    )
