"""Calls that feed one another directly become one node, in memory: one autograd graph, one call of the engine.

A call of the autograd engine costs as much as the forward and backward of a small Function together, and a PythonOpGrad
makes one. Where the outputs of a PythonOp go into one other PythonOp alone, and their gradients come from its PythonOpGrad
alone, PyTorch needs one for both: the two join as they would be joined in eager. The file on disk is not touched.

What stays apart: values that anything else reads (a graph output, an operator, the body of an If), a gradient that is a sum,
contexts that the graph gives out, calls with containers, sizes, autocast or mark_dirty, calls whose backward may give
None for an input that needs a gradient.
"""

from __future__ import annotations

import json

import onnx
import onnx_ir as ir

from symbolics.errors import PythonopError
from symbolics.node.attributes import SPECS, ir_attributes, python_op_grad, read_attributes, values_of, write_attributes
from symbolics.node.call import AutogradCall
from symbolics.node.containers import Slot
from symbolics.node.names import CALL_ATTRIBUTE, ORT_DOMAIN, PYTHON_OP, PYTHON_OP_GRAD

__all__ = ["LINKED", "could_link", "link"]

#: The attribute, in memory only, of both nodes of a joined pair: a line of JSON per call, in order. A line holds the name of the
#: node it was, its attributes, and where its tensors come from (counted over the inputs, then the outputs of the calls before).
LINKED = "pythonop_linked_calls"

_LONG = 1 << 16  # bytes of a ``call``: longer ones stay alone
_REQUIRED = [name for name, (_, required, _) in SPECS.items() if required]
# Arguments that cannot change between two runs.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, range)


def could_link(proto: onnx.ModelProto) -> bool:
    """Whether a PythonOp with a context feeds another one: a look that costs little next to `link`."""
    ops = [node for node in proto.graph.node if node.domain == ORT_DOMAIN and node.op_type == PYTHON_OP and node.output and node.output[0]]
    made = {name for node in ops for name in node.output[1:] if name}
    return any(name in made for node in ops for name in node.input)


def link(model: ir.Model) -> int:
    """Join PythonOps, and their PythonOpGrads, in place; see above.

    Returns:
        How many PythonOps went into another one.
    """
    graph = model.graph
    ops = [node for node in graph if _is(node, PYTHON_OP)]
    calls = {node: call for node in ops if (call := _plain_call(node)) is not None}
    grads = {node: grad for node in calls if (grad := _grad_of(node)) is not None}
    groups: dict[ir.Node, list[ir.Node]] = {}
    roots: dict[ir.Node, ir.Node] = {}
    for node in reversed(ops):
        reader = _reader(node, calls, grads)
        # A reader that stands before what it reads is nobody's order: onnxruntime refuses it.
        roots[node] = root = roots.get(reader, node) if reader is not None else node
        groups.setdefault(root, []).insert(0, node)
    for root, members in groups.items():
        if len(members) > 1:
            _join(graph, root, members, calls, grads)
    return len(ops) - len(groups)


def _is(node: ir.Node | None, kind: str) -> bool:
    return node is not None and node.domain == ORT_DOMAIN and node.op_type == kind


def _plain_call(node: ir.Node) -> AutogradCall | None:
    """The call of a node whose arguments are tensors and constants, None for any other."""
    try:
        call = read_attributes(values_of(node))
    except PythonopError:
        return None  # told when the session is made
    outputs = call.outputs if type(call.outputs) is tuple else (call.outputs,)
    plain = (
        not (call.kwargs or call.autocast.dtypes or call.inplace or call.no_gradient_seen)
        and ir.DataType.STRING not in (*call.input_types, *call.output_types)
        and all((isinstance(value, Slot) and value.kind == "tensor") or type(value) in _CONSTANTS for value in call.args)
        and all(isinstance(value, Slot) for value in outputs)
        and None not in node.inputs
        and len(node.attributes[CALL_ATTRIBUTE].as_string() if CALL_ATTRIBUTE in node.attributes else "") < _LONG
    )
    return call if plain else None


def _grad_of(node: ir.Node) -> ir.Node | None:
    """The PythonOpGrad that alone reads the node's context."""
    context = node.outputs[0]
    uses = list(context.uses())
    if (
        len(uses) != 1
        or context.is_graph_output()
        or not _is(uses[0].node, PYTHON_OP_GRAD)
        or uses[0].idx
        or uses[0].node.graph is not node.graph
    ):
        return None
    grad = uses[0].node
    return grad if len(grad.outputs) == len(node.inputs) and len(grad.inputs) >= len(node.outputs) else None


def _reader(node: ir.Node, calls: dict[ir.Node, AutogradCall], grads: dict[ir.Node, ir.Node]) -> ir.Node | None:
    """The PythonOp into which this one may go: the only reader of its outputs, whose gradients are its only gradients."""
    grad = grads.get(node)
    if grad is None:
        return None
    reader: ir.Node | None = None
    for place, output in enumerate(node.outputs[1:]):
        # Behind its gradients, a PythonOpGrad reads the forward's outputs for the order alone.
        uses = [use for use in output.uses() if use.node is not grad or use.idx < len(node.outputs)]
        given = grad.inputs[1 + place]
        if output.is_graph_output() or len(uses) > 1 or (uses and reader not in (None, uses[0].node)):
            return None
        if not uses:
            if given is not None:
                return None
            continue
        reader, position = uses[0]
        if reader not in grads or not _same_flow(calls[node], calls[reader], place, position, grads[reader].outputs[position], given):
            return None
    return reader


def _same_flow(call: AutogradCall, reader: AutogradCall, place: int, position: int, sent: ir.Value, given: ir.Value | None) -> bool:
    """Whether autograd, left alone, does what the graph says: the gradient of one link flows there alone, or nowhere."""
    if not reader.input_requires_grads[position]:
        return given is None and not call.output_requires_grads[place]
    return given is sent and call.output_requires_grads[place] and len(sent.uses()) == 1 and not sent.is_graph_output()


def _join(
    graph: ir.Graph, root: ir.Node, members: list[ir.Node], calls: dict[ir.Node, AutogradCall], grads: dict[ir.Node, ir.Node]
) -> None:
    inner = {value for node in members for value in node.outputs[1:]}
    outside = [(node, i) for node in members for i, value in enumerate(node.inputs) if value not in inner]
    places: dict[ir.Value, int] = {}
    for node in members:
        for value in node.outputs[1:]:
            places[value] = len(outside) + len(places)
    count, lines = iter(range(len(outside))), []
    for node in members:
        found = [places[value] if value in places else next(count) for value in node.inputs]
        attributes = {name: value for name, value in values_of(node).items() if name in (*_REQUIRED, CALL_ATTRIBUTE)}
        lines.append(json.dumps({"node": node.name or "", "attributes": attributes, "places": found}))
    last = calls[root]
    call = AutogradCall(
        operator=last.operator,
        id=last.id,
        name=last.name,
        args=tuple(map(Slot, range(len(outside)))),
        outputs=last.outputs,
        input_types=tuple(calls[node].input_types[i] for node, i in outside),
        input_ranks=tuple(calls[node].input_ranks[i] for node, i in outside),
        input_requires_grads=tuple(calls[node].input_requires_grads[i] for node, i in outside),
        output_types=last.output_types,
        output_ranks=last.output_ranks,
        output_requires_grads=last.output_requires_grads,
        training=last.training,
        no_gradient=tuple(number for number, (node, i) in enumerate(outside) if i in calls[node].no_gradient),
    )
    linked = ir.AttrString(LINKED, "\n".join(lines))
    outputs = [ir.Value() for _ in root.outputs]
    said = ir_attributes(write_attributes(call))
    op = ir.Node(ORT_DOMAIN, PYTHON_OP, [node.inputs[i] for node, i in outside], said, outputs=outputs, name=root.name)
    gradients = grads[root].inputs[1 : len(root.outputs)]
    taken = [grads[node].outputs[i] for node, i in outside]
    grad = python_op_grad(op, op.outputs[0], gradients, [bool(value.name) for value in taken])
    op.attributes.add(linked)
    grad.attributes.add(linked)
    ends = [(old, new) for old, new in zip(taken, grad.outputs, strict=True) if old.name]
    ir.convenience.replace_nodes_and_values(graph, root, [], [op], root.outputs, op.outputs)
    ir.convenience.replace_nodes_and_values(graph, grads[root], [], [grad], *zip(*ends, strict=True))
    # Gradients first: they read the contexts.
    graph.remove([grads[node] for node in members], safe=False)
    for node in members:
        for output in node.outputs[1:]:
            output.name = None
    graph.remove(members, safe=False)
