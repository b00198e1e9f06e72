"""PythonOp: an autograd.Function whose backward is a PythonOpGrad of the same context; and the gradients of that."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir import Value

from symbolics.gradients.registry import Grads, gradient
from symbolics.gradients.residuals import residual
from symbolics.graph.builder import Builder
from symbolics.graph.presence import mark, sum_of
from symbolics.graph.values import attr, is_python_op, may_be_float, unsupported
from symbolics.graph.walk import reads
from symbolics.node.attributes import python_op_grad, with_gradient
from symbolics.node.backward import next_order, to_backward
from symbolics.node.names import ORT_DOMAIN, OWN_DOMAIN, PYTHON_OP, PYTHON_OP_BACKWARD, PYTHON_OP_GRAD, PYTHON_OP_TANGENT
from symbolics.text import shown

__all__: list[str] = []


@gradient(PYTHON_OP, domain=ORT_DOMAIN)
def python_op(
    op: Builder, gs: Sequence[Value | None], *xs: Value, node: ir.Node, output_tensor_requires_grads: Sequence[int] | None = None,
) -> Grads:  # fmt: skip
    """The backward that Python has written, as a node that reads the context of the forward's."""
    wanted = with_gradient(node, [x in op.scope.active for x in xs], lambda i: i < len(xs) and _is_behind_a_call(op, xs[i]))
    incoming = [g if flag else None for g, flag in zip(gs[1:], output_tensor_requires_grads or [1] * len(gs))]
    if not any(g is not None for g in incoming) or not any(wanted):
        return {}
    context = residual(op, node, 0, "context", ir.DataType.INT64, ir.Shape(()))
    is_first = not context.uses()
    grad = op.add(python_op_grad(node, context, incoming, wanted))
    if grad.name and not is_first:  # another reader of the context, of an order before, has that name
        grad.name = op.scope.name(grad.name)
    for out, x, kind, flag in zip(grad.outputs, xs, attr(grad, "output_tensor_types"), wanted):
        if flag:  # of the type that the Function saw: torch.jit's exporter sometimes feeds it another, and the engine casts
            out.name = out.name or op.scope.name("PythonOpGrad")
            out.type, out.shape = ir.TensorType(ir.DataType(kind)), x.shape
    return [out if flag else None for out, flag in zip(grad.outputs, wanted)]


def _is_behind_a_call(op: Builder, x: Value | None) -> bool:
    """Whether a value on the path comes from another call. PyTorch makes zeros of a None that reaches the backward of that, and goes on with what it gives."""
    waiting, seen = [x], set[Value | None]()
    while waiting:
        value = waiting.pop()
        if value is None or value in seen or value not in op.scope.active:
            continue
        seen.add(value)
        maker = value.producer()
        if maker is None:
            continue
        if is_python_op(maker):
            return True
        waiting += reads(maker)
    return False


@gradient(PYTHON_OP_GRAD, domain=ORT_DOMAIN)
def python_op_grad_(op: Builder, node: ir.Node, *gs: Value | None) -> Grads:
    """The node becomes a PythonOpBackward, which leaves a context behind."""
    try:
        to_backward(node)
    except LookupError:
        raise unsupported(
            node,
            f"the backward of the Function {shown(attr(node, 'name', '?'))!r} is differentiated again, and its context comes out of a Loop, Scan or If. "
            "Way out: export with inline= for that Function, or without the control flow around it",
        ) from None
    return python_op_backward(op, node, *gs)


@gradient(PYTHON_OP_BACKWARD, domain=OWN_DOMAIN)
def python_op_backward(op: Builder, node: ir.Node, *gs: Value | None) -> Grads:
    """The same operator, one order higher, on the context that this one leaves."""
    count, given = (len(attr(node, f"{side}_tensor_types")) for side in ("output", "input"))
    cotangents = [*gs[:count], *[None] * (count - len(gs))]
    places = [*node.inputs[1 + given :], *node.inputs[1 : 1 + given]]
    wanted = [value in op.scope.active and may_be_float(value) for value in places]
    if len(places) != count + given or not any(wanted) or not any(g is not None for g in cotangents):
        return {}
    context = residual(op, node, count, "context", ir.DataType.INT64, ir.Shape(()))
    grad = op.add(next_order(node, context, cotangents, wanted))
    grad.name = op.scope.name(grad.name or PYTHON_OP_BACKWARD)
    grad.resize_outputs(len(places) + 2)
    no_context, is_there = grad.outputs[len(places) :]
    no_context.name, is_there.name = "", op.scope.name("is_there")
    is_there.type, is_there.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([len(places)])
    found: dict[Value, list[Value]] = {}
    for place, (out, value, flag) in enumerate(zip(grad.outputs, places, wanted)):
        if flag and value is not None:
            out.name, out.shape = op.scope.name(PYTHON_OP_BACKWARD), value.shape
            found.setdefault(value, []).append(mark(op, out, frozenset([op.Gather(is_there, op.i64(place))]), zeros_elsewhere=True))
    return {value: gs[0] if len(gs) == 1 else sum_of(op, gs, value) for value, gs in found.items()}  # one tensor in two arguments


@gradient(PYTHON_OP_TANGENT, domain=OWN_DOMAIN)
def python_op_tangent(op: Builder, node: ir.Node, *_: Value | None) -> Grads:
    raise unsupported(
        node,
        f"a derivative of a tangent of the Function {shown(attr(node, 'name', '?'))!r}, of which a file has none; export with inline= for it",
    )
