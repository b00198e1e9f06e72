"""PythonOpBackward: a PythonOpGrad that can be differentiated, its gradient, the gradient of that, and so on.

One operator serves every order. It takes a context and a cotangent for each root of that context, and gives the gradients of
the context's targets; where its own last output has a name, it leaves a context there, of the graph that autograd has built while
backward ran (create_graph): its roots are these gradients, its targets those of before and the cotangents. So the forward runs
once, each backward runs once, and all orders see the tensors that one call saved, as they do in eager. To run ``apply`` again for
the second order would draw other random numbers, change a Function's state twice, and give it another ctx.

A node of order 2 or more also says which of its gradients are there at all: autograd has none of what is not reached, and a Function whose
backward would get it is not called. What its backward has read of its forward's outputs flows back to these, which are targets: their gradient
goes to the forward's backward once, with what else they are used for.

No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from symbolics.errors import FormatError
from symbolics.node.attributes import GRAD_SPECS, SPECS, AttributeValue, check_types, ir_attributes, values_of
from symbolics.node.limits import MAX_ITEMS
from symbolics.node.names import CALL_ATTRIBUTE, ORT_DOMAIN, OWN_DOMAIN, PYTHON_OP, PYTHON_OP_BACKWARD, PYTHON_OP_GRAD
from symbolics.text import shown

__all__ = [
    "BACKWARD_SPECS",
    "complete",
    "context_of",
    "count_readers",
    "is_backward",
    "is_python_op_grad",
    "next_order",
    "targets_of",
    "to_backward",
]

_INT, _INTS, _STRING = ir.AttributeType.INT, ir.AttributeType.INTS, ir.AttributeType.STRING

#: attribute -> (type, required, meaning), as `symbolics.node.attributes.SPECS`.
BACKWARD_SPECS: dict[str, tuple[ir.AttributeType, bool, str]] = {
    "name": (_STRING, True, "The Function class as module:qualname."),
    "order": (_INT, True, "1: the gradients of the call; 2: the gradients of those; and so on."),
    "readers": (_INT, True, "How many nodes read its context input: the last of them frees it."),
    "input_tensor_requires_grads": (_INTS, True, "Which of the N cotangents it may be given."),
    "input_tensor_types": (_INTS, True, "ONNX element types of the N cotangents."),
    "input_tensor_ranks": (_INTS, True, "Their ranks."),
    "output_tensor_requires_grads": (_INTS, True, "Which of the M gradients are wanted."),
    "output_tensor_types": (_INTS, True, "ONNX element types of the M gradients."),
    "output_tensor_ranks": (_INTS, True, "Their ranks."),
    CALL_ATTRIBUTE: (_STRING, False, "The call of the PythonOp as JSON."),
}


def _is(node: ir.Node | None, domain: str, *kinds: str) -> bool:
    return node is not None and node.domain == domain and node.op_type in kinds


def is_backward(node: ir.Node | None) -> bool:
    """Whether a node is a PythonOpBackward."""
    return _is(node, OWN_DOMAIN, PYTHON_OP_BACKWARD)


def is_python_op_grad(node: ir.Node | None) -> bool:
    """Whether a node is a PythonOpGrad."""
    return _is(node, ORT_DOMAIN, PYTHON_OP_GRAD)


def context_of(node: ir.Node) -> ir.Value | None:
    """The output of a PythonOp or PythonOpBackward that is its context; None where the node has no such place, or is neither."""
    if _is(node, ORT_DOMAIN, PYTHON_OP):
        return node.outputs[0] if node.outputs else None
    types = node.attributes.get("output_tensor_types") if is_backward(node) else None
    if types is None or types.type is not _INTS or types.is_ref() or not 1 <= len(node.outputs) - len(types.value) <= 2:
        return None
    return node.outputs[len(types.value)]


def targets_of(node: ir.Node) -> Sequence[ir.Value | None]:
    """The values whose gradients a PythonOpBackward gives, as far as it says; None where a place has no gradient."""
    types = node.attributes.get("input_tensor_types")
    count = len(types.value) if types is not None and types.type is _INTS and not types.is_ref() else 0
    return node.inputs[1 + count :]


def complete(node: ir.Node) -> None:
    """Give a call, or a gradient of one, the absent values at its end again: what writes a file leaves them out.

    It has as many inputs and outputs as its attributes say, where they are as the format has them.
    """

    def count(name: str) -> int:
        found = node.attributes.get(name)
        return len(found.value) if found is not None and found.type is _INTS and not found.is_ref() else 0

    if _is(node, ORT_DOMAIN, PYTHON_OP):
        inputs, outputs = count("input_tensor_types"), 0
    elif is_python_op_grad(node):
        inputs, outputs = 1 + count("input_tensor_types"), count("output_tensor_requires_grads")
    elif is_backward(node):
        outputs = count("output_tensor_types")
        inputs = 1 + count("input_tensor_types") + outputs
    else:
        return
    if len(node.inputs) < inputs:
        node.resize_inputs(inputs)
    if (made := len(node.outputs)) < outputs:
        node.resize_outputs(outputs)
        for output in node.outputs[made:]:
            output.name = ""


def to_backward(node: ir.Node) -> None:
    """Make a PythonOpGrad a PythonOpBackward of order 1, in place: its outputs stay, its inputs say what they are gradients of.

    Its last targets are the outputs of the call, for the orders above: a backward may read what its forward gave out. One that is
    marked as non-differentiable is none: autograd has nothing to ask it for, and nobody knows its shape then.

    Raises:
        FormatError: The node, or the PythonOp that made its context, is not as the format has it.
        LookupError: No PythonOp beside the node makes its context: it comes out of a Loop, Scan or If.
    """
    op = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if op is None or not _is(op, ORT_DOMAIN, PYTHON_OP) or node.inputs[0] is not op.outputs[0]:
        raise LookupError
    values, call = values_of(node), values_of(op)
    check_types(values, GRAD_SPECS, PYTHON_OP_GRAD)
    check_types(call, SPECS, PYTHON_OP)
    needed = [flag for flag, letter in zip(call["input_requires_grads"], call["input_convention"], strict=True) if letter == "d"]
    given = list(node.inputs[1 : len(op.outputs)])
    given += [None] * (len(op.outputs) - 1 - len(given))
    if (
        not len(op.inputs)
        == len(needed)
        == len(node.outputs)
        == len(call["input_tensor_types"])
        == len(values["output_tensor_requires_grads"])
    ):
        raise FormatError.damaged(f"the PythonOpGrad {shown(node.name or '')!r}", "it does not fit its PythonOp")
    attributes: dict[str, AttributeValue] = {
        "name": values["name"],
        "order": 1,
        "readers": 1,
        "input_tensor_requires_grads": call["output_tensor_requires_grads"],
        "input_tensor_types": call["output_tensor_types"],
        "input_tensor_ranks": call["output_tensor_ranks"],
        "output_tensor_requires_grads": [*values["output_tensor_requires_grads"], *(0 for _ in call["output_tensor_types"])],
        "output_tensor_types": [*call["input_tensor_types"], *call["output_tensor_types"]],
        "output_tensor_ranks": [*call["input_tensor_ranks"], *call["output_tensor_ranks"]],
        **({CALL_ATTRIBUTE: values[CALL_ATTRIBUTE]} if CALL_ATTRIBUTE in values else {}),
    }
    targets = [x if flag else None for x, flag in zip(op.inputs, needed, strict=True)]
    results = [y if flag else None for y, flag in zip(op.outputs[1:], call["output_tensor_requires_grads"], strict=False)]
    results += [None] * (len(call["output_tensor_types"]) - len(results))
    inputs = [node.inputs[0], *given, *targets, *(y if y is not None and y.name else None for y in results)]
    count = len(node.outputs)
    node.resize_outputs(count + len(results))
    for output in node.outputs[count:]:
        output.name = ""
    node.resize_inputs(len(inputs))
    for place, value in enumerate(inputs):
        node.replace_input_with(place, value)
    node.attributes.clear()
    for attribute in ir_attributes(attributes, BACKWARD_SPECS):
        node.attributes.add(attribute)
    node.domain, node.op_type = OWN_DOMAIN, PYTHON_OP_BACKWARD


def next_order(node: ir.Node, context: ir.Value, cotangents: Sequence[ir.Value | None], wanted: Sequence[bool]) -> ir.Node:
    """The gradient of a PythonOpBackward.

    Args:
        node: The PythonOpBackward.
        context: The value of its context output.
        cotangents: Of its M gradients, None where there is none.
        wanted: Which gradients are wanted: of its M targets, then of its N cotangents, as `node` has them.

    Raises:
        FormatError: The node has more tensors than a file may hold.
    """
    values = values_of(node)
    check_types(values, BACKWARD_SPECS, PYTHON_OP_BACKWARD)
    count, given = len(values["output_tensor_types"]), len(values["input_tensor_types"])
    if count + given > MAX_ITEMS:
        raise FormatError(f"the gradient of {shown(node.name or '')!r} would have {count + given} tensors, at most {MAX_ITEMS} are read")
    both = {what: [*values[f"output_tensor_{what}"], *values[f"input_tensor_{what}"]] for what in ("types", "ranks")}
    attributes: dict[str, AttributeValue] = {
        "name": values["name"],
        "order": values["order"] + 1,
        "readers": 1,
        "input_tensor_requires_grads": [1] * count,
        "input_tensor_types": values["output_tensor_types"],
        "input_tensor_ranks": values["output_tensor_ranks"],
        "output_tensor_requires_grads": [int(flag) for flag in wanted],
        "output_tensor_types": both["types"],
        "output_tensor_ranks": both["ranks"],
        **({CALL_ATTRIBUTE: values[CALL_ATTRIBUTE]} if CALL_ATTRIBUTE in values else {}),
    }
    targets = [*node.inputs[1 + given :], *node.inputs[1 : 1 + given]]
    outputs = [
        ir.Value(name=None if flag else "", type=ir.TensorType(ir.DataType(kind)) if flag else None)
        for flag, kind in zip(wanted, both["types"], strict=True)
    ]
    return ir.Node(
        OWN_DOMAIN,
        PYTHON_OP_BACKWARD,
        [context, *cotangents, *targets],
        ir_attributes(attributes, BACKWARD_SPECS),
        outputs=outputs,
        name=f"{node.name}_grad" if node.name else None,
    )


def count_readers(nodes: Iterable[ir.Node]) -> None:
    """Where several nodes read one context, or a PythonOpBackward does, say so in each of them: the last that runs frees it.

    Also drop the outputs that say what is there, where nobody reads them.

    Args:
        nodes: All nodes of a graph, bodies of control flow included.
    """
    for node in list(nodes):
        context = context_of(node)
        if is_backward(node) and context is not None and node.outputs[-1] is not context and not node.outputs[-1].uses():
            node.resize_outputs(len(node.outputs) - (1 if context.name else 2))  # nobody asks what is there
        if context is None or not context.name:
            continue
        readers = [use.node for use in context.uses() if use.idx == 0]
        readers = [r for r in readers if is_backward(r) or is_python_op_grad(r)]
        if len(readers) < 2 and not any(map(is_backward, readers)):
            continue
        for reader in readers:
            if not is_backward(reader):
                to_backward(reader)
            reader.attributes["readers"] = ir.AttrInt64("readers", len(readers))
