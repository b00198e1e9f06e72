"""Functions of a file whose gradient another function of it computes, and says so: `symbolics.node.linked`."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from symbolics.gradients.registry import Grads, Rule
from symbolics.gradients.residuals import residual
from symbolics.graph.builder import Builder
from symbolics.graph.calls import complete
from symbolics.graph.values import unsupported
from symbolics.node.linked import Backward, Taken, backward_of

__all__ = ["rules_of_functions"]


def rules_of_functions(model: ir.Model) -> dict[tuple[str, str], Rule]:
    """The rules that the functions of a model bring along.

    Raises:
        FormatError: A link is damaged.
    """
    rules: dict[tuple[str, str], Rule] = {}
    for function in model.functions.values():
        link = backward_of(model, function)
        if link is None:
            continue
        rules[function.domain, function.name] = _rule(function, link, model.functions.get((link.domain, link.name, "")))
        if link.once and link.name:
            rules[link.domain, link.name] = Rule(_once)
    return rules


def _rule(function: ir.Function, link: Backward, backward: ir.Function | None) -> Rule:
    results = len(function.outputs) - len(link.kept)
    # One that takes no cotangent gives its gradients whatever flows, as a Python backward that looks at none.
    awaited = [t.index for t in link.takes if t.kind == "gradient"] or range(results)

    def gradient(op: Builder, node: ir.Node, *gs: ir.Value | None) -> Grads:
        incoming = [*gs[:results], *[None] * (results - len(gs))]
        wanted = [i < len(node.inputs) and (x := node.inputs[i]) is not None and x in op.scope.active for i in link.gives]
        if backward is None or not any(wanted) or not any(incoming[i] is not None for i in awaited):
            return {}

        def value(what: Taken) -> ir.Value | None:
            if what.kind == "input":
                return node.inputs[what.index] if what.index < len(node.inputs) else None
            if what.kind == "gradient" and (g := incoming[what.index]) is not None:
                return g
            made = _output(op, node, function, link, what.index, results)
            return op.zeros_like(made) if what.kind == "gradient" else made

        attributes = _attributes(node, function, backward)
        call = op.add(ir.Node(link.domain, link.name, [value(what) for what in link.takes], attributes, num_outputs=len(link.gives)))
        found: list[ir.Value | None] = [None] * len(node.inputs)
        for out, index, want in zip(call.outputs, link.gives, wanted):
            out.name = op.scope.name(link.name) if want else ""
            if (x := node.inputs[index] if index < len(node.inputs) else None) is not None:
                out.type, out.shape = x.type, x.shape
            if want:
                found[index] = out
        complete(call, backward, op.scope.name)
        return found

    return Rule(gradient)


def _output(op: Builder, node: ir.Node, function: ir.Function, link: Backward, index: int, results: int) -> ir.Value:
    """An output of the call, which from now on has a name."""
    if index < len(node.outputs) and (made := node.outputs[index]).name and made.type is not None:
        return made
    complete(node, function, lambda name: op.scope.residual_name(name, node))
    if index >= results:
        kept = link.kept[index - results]
        return residual(op, node, index, "kept", ir.DataType(kept.type), ir.Shape([None] * kept.rank))
    formal = function.outputs[index]
    # A dim that has a name in the function has none here.
    shape = None if formal.shape is None else ir.Shape([d if isinstance(d, int) else None for d in formal.shape])
    return residual(op, node, index, formal.name or "output", formal.dtype or _inferred(node, function, index), shape)


def _inferred(node: ir.Node, function: ir.Function, index: int) -> ir.DataType:
    """The element type of a result that has no name, as ONNX infers it from the body."""
    inputs = [onnx.TypeProto() if v is None or v.type is None else ir.to_proto(v).type for v in node.inputs]
    attributes = [ir.to_proto(a) for a in node.attributes.values()]
    try:
        found = onnx.shape_inference.infer_function_output_types(ir.to_proto(function), inputs, attributes)[index].tensor_type.elem_type
    except (onnx.shape_inference.InferenceError, RuntimeError, IndexError):
        found = 0
    if not found:
        raise unsupported(
            node, f"the type of its output {index} is not known: name that output in the call, or say its type in the function"
        )
    return ir.DataType(found)


def _attributes(node: ir.Node, function: ir.Function, backward: ir.Function) -> list[ir.Attr]:
    """What the call, or else the forward itself, says of the attributes that the backward has too."""
    known = {**{name: a for name, a in function.attributes.items() if a.value is not None}, **node.attributes}
    return [a for name, a in known.items() if name in backward.attributes]


def _once(op: Builder, node: ir.Node, *gs: Sequence[ir.Value | None]) -> Grads:
    raise unsupported(
        node,
        "it is the backward of a Function that says once_differentiable: it has no gradient of its own",
        "Take the decorator away where that backward is made of differentiable operators, or export with inline= for the Function",
    )
