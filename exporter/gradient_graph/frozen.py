"""Parameters that were frozen at the export, and buffers: what a file does not say of their gradients.

What a Function has gradients for is decided when the model is exported, as in eager: of an argument that does not require a gradient, its
forward is told so (``ctx.needs_input_grad``), and its backward may give None. Whoever asks for that gradient afterwards would get none, or
that of the other ways alone. And where nothing requires a gradient, ``detach()`` and ``no_grad()`` leave no mark.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import onnx_ir as ir

from exporter.gradient_graph.without_gradient import not_given, stops
from symbolics.errors import UnsupportedOperatorError
from symbolics.graph.values import attr, function_of, is_python_op, may_be_float, name_of, unsupported
from symbolics.graph.walk import reads, subgraphs
from symbolics.node.linked import backward_of
from symbolics.node.metadata import StateEntry, read_state
from symbolics.text import shown
from symbolics.users import warn

__all__ = ["check_frozen", "frozen_arguments", "warn_of_frozen"]

_AFTERWARDS = {"parameter": "and freeze it in the loaded module", "buffer": "as a parameter, say"}


def check_frozen(model: ir.Model, wrt: Iterable[ir.Value]) -> None:
    """Refuse gradients by what was frozen at the export where a Function was called with it.

    Args:
        model: The forward.
        wrt: What it is differentiated with respect to.

    Raises:
        UnsupportedOperatorError: A Function was called with such a parameter or buffer, or with what was computed from it.
    """
    for error in frozen_arguments(model, [name_of(value) for value in wrt if value.is_initializer()]).values():
        raise error


def frozen_arguments(model: ir.Model, names: Collection[str]) -> dict[str, UnsupportedOperatorError]:
    """The initializers that were frozen at the export and that a Function was called with -> the error that says so.

    Args:
        model: A forward.
        names: Of initializers; others than frozen parameters and buffers are left out.
    """
    found = {}
    for entry in _frozen(model, names):
        for node, place in _refusing(model, model.graph, {model.graph.initializers[entry.initializer]}):
            found[entry.initializer] = unsupported(
                node,
                f"argument {place} of the Function {shown(function_of(node) or node.op_type)!r} comes from the {entry.kind} "
                f"{shown(entry.initializer)!r}, which required no gradient when the model was exported, so that the file has none of it there",
                f"Way out: call requires_grad_() on it before the export, {_AFTERWARDS[entry.kind]}",
            )
            break
    return found


def warn_of_frozen(model: ir.Model, names: Collection[str]) -> None:
    """Say that the file does not know where the model itself stops the gradients of what was frozen at the export.

    Args:
        model: A forward.
        names: Of initializers that gradients are wanted of.
    """
    if found := _frozen(model, names):
        entry, more = found[0], f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        warn(
            f"the {entry.kind} {shown(entry.initializer)!r}{more} required no gradient when the model was exported: where the model stops its gradient\n"
            "  (detach(), no_grad()), the file does not say so, and it flows there, too.\n"
            f"  way out: if the model does that, call requires_grad_() on it before the export, {_AFTERWARDS[entry.kind]}"
        )


def _frozen(model: ir.Model, names: Collection[str]) -> list[StateEntry]:
    """Of some initializers, those that had requires_grad=False at the export."""
    entries = {entry.initializer: entry for entry in (read_state(model.metadata_props) or {}).values()}
    return [entries[name] for name in names if name in entries and not entries[name].trainable and name in model.graph.initializers]


def _refusing(model: ir.Model, nodes: Iterable[ir.Node], reached: set[ir.Value]) -> Iterator[tuple[ir.Node, int]]:
    """The calls of Functions that a value reaches at an argument without a gradient, and the number of that argument; ``reached`` grows."""
    for node in nodes:
        if stops(node) or reached.isdisjoint(reads(node)):
            continue
        function = model.functions.get(node.op_identifier())
        for place in _without(model, node, function):
            if node.inputs[place] in reached:
                yield node, place
        bodies: list[ir.Graph | ir.Function] = [*subgraphs(node)]
        for body in bodies:
            reached.update(filter(may_be_float, body.inputs))
        if function is not None and backward_of(model, function) is None:  # of a module, say
            bodies.append(function)
            reached.update(inner for inner, given in zip(function.inputs, node.inputs, strict=False) if given in reached)
        for body in bodies:
            yield from _refusing(model, body, reached)
        reached.update(filter(may_be_float, node.outputs))


def _without(model: ir.Model, node: ir.Node, function: ir.Function | None) -> list[int]:
    """The float inputs of a call of a Function that it has no gradient for by its flags or, where it is an ONNX function, by its link."""
    if is_python_op(node):
        flags, letters = attr(node, "input_requires_grads", ()), attr(node, "input_convention", "")
        tensors = [bool(flag) for flag, letter in zip(flags, letters, strict=False) if letter == "d"]
        return [place for place, (value, flag) in enumerate(zip(node.inputs, tensors)) if not flag and may_be_float(value)]
    link = None if function is None else backward_of(model, function)
    return [] if link is None else not_given(node, link)
