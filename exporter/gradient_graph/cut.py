"""Gradients that a forward takes without ``create_graph=True``: constants to all who differentiate the file, which few people mean who train it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from exporter.gradient_graph.without_gradient import stops
from symbolics.gradients import FLAT
from symbolics.graph.values import attr, is_mark, may_be_float
from symbolics.graph.walk import reads
from symbolics.node.cut import FREED, Cut, read_cut, write_cut
from symbolics.node.names import CUT_PROPERTY
from symbolics.text import clean
from symbolics.users import warn

__all__ = ["cut_gradients", "place_of", "say_cut", "warn_of_cut"]


def say_cut(gradient: ir.Node) -> None:
    """Write on the marks behind a ``pythonop.inner::Gradient`` that it is taken without create_graph=True, where it is."""
    if graph := attr(gradient, "cut"):
        said = write_cut(Cut(attr(gradient, "module") or "", attr(gradient, "source") or "", graph))
        todo = list(gradient.outputs)
        while todo:
            for user, _ in todo.pop().uses():
                if is_mark(user):
                    user.metadata_props[CUT_PROPERTY] = said
                elif user.op_type == "Identity":
                    todo += user.outputs


def cut_gradients(model: ir.Model, wrt: Iterable[ir.Value], outputs: Iterable[ir.Value]) -> list[Cut]:
    """The gradients without create_graph=True that outputs read in a differentiable way, and that depend on something in wrt: each place once.

    Args:
        model: One of `own_copy`, its marks in place.
        wrt, outputs: Of its `Boundary`.
    """
    marks = [node for node in model.graph if is_mark(node) and CUT_PROPERTY in node.metadata_props]
    if not marks:
        return []
    cut, active, needed = set(marks), set(wrt), set(outputs)
    for node in model.graph:
        if node in cut or not _stops(node):
            if not active.isdisjoint(reads(node)):
                active.update(value for value in node.outputs if may_be_float(value))
    for node in reversed(model.graph):
        if not _stops(node) and not needed.isdisjoint(node.outputs):
            needed.update(value for value in reads(node) if may_be_float(value))
    found = [node for node in marks if node.outputs[0] in needed and not active.isdisjoint(reads(node))]
    return list(dict.fromkeys(read_cut(node.metadata_props[CUT_PROPERTY]) for node in found))


def _stops(node: ir.Node) -> bool:
    return stops(node) or (node.domain == "" and node.op_type in FLAT)


def place_of(cut: Sequence[Cut]) -> str:
    """Where the first of some gradients is taken, for messages."""
    more = f" (and {len(cut) - 1} more)" if len(cut) > 1 else ""
    return f"{clean(cut[0].source) or 'a line unknown'} in module {clean(cut[0].module) or '<root>'}{more}"


def warn_of_cut(cut: Sequence[Cut], what: str) -> None:
    """Warn of gradients that are constants to what is differentiated.

    Args:
        cut: What `cut_gradients` found.
        what: What has been made, for the message.
    """
    if not cut:
        return
    freed = any(each.graph == FREED for each in cut)
    eager = (
        '. Where the loss reads what was differentiated (the energy), too, eager raises "Trying to backward through the graph a second time"'
        if freed
        else ", as in eager"
    )
    warn(
        f"the gradient taken at {place_of(cut)} is a constant to {what}: it was taken without create_graph=True, so no parameter "
        f"learns through it, as through forces in a loss{eager}. "
        "Take it with create_graph=True; or detach() it to say that a constant is meant."
    )
