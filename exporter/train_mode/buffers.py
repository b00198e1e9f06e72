"""The buffers that a forward changes: outputs of its graph give out their next values, a module and a training step take them over.

Of BatchNormalization in training mode the graph gives out what the batch says (exporter/train_mode/batch_norm.py); everything else is here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import onnx_ir as ir

from exporter.train_mode.batch_norm import kept_statistics, plain_statistics, source_of
from exporter.train_mode.reads import is_read
from symbolics.graph.walk import walk
from symbolics.node.metadata import StateEntry, changes_of, read_state, write_changes
from symbolics.node.names import BUFFERS_KEY
from symbolics.users import warn

__all__ = ["AVERAGED", "UNSEEN", "add_lost", "carry", "name_carried", "warn_of_lost"]

UNSEEN = "its new value is computed where the exporter cannot look"
AVERAGED = "forward uses this average of all batches itself: give the norm another momentum than None"


def carry(
    graph: ir.Graph, count: int, written: Iterable[str], entries: Mapping[str, StateEntry], read: Collection[str] | None = None
) -> tuple[list[str], set[str]]:
    """Sort the outputs behind the model's results: those that hold the next value of state stay, in a node of their own.

    Args:
        graph: The graph. Its outputs are the results, then the values of ``written``; nothing else.
        count: How many results there are.
        written: Names of buffers and parameters.
        entries: The parameters and buffers.
        read: What eager mode reads of the model before it writes it, by name; None where nobody saw, and all that is written counts.

    Returns:
        The initializers of the buffers whose next values are outputs now, in the order of these; the names of those that are only written.
    """
    initializers = {name: entries[name].initializer for name in written}
    values = dict(zip(initializers.values(), list(graph.outputs)[count:], strict=True))
    while len(graph.outputs) > count:
        graph.outputs.pop()
    kept = plain_statistics(graph, values) if values else set()
    carried = []
    state = _state(graph, values, None if read is None else {entries[name].initializer for name in read if name in entries})
    state.update(entry.initializer for entry in entries.values() if entry.trainable)  # the optimizer starts from what was written
    noted = {initializer for initializer in values if initializer not in kept and initializer not in state}
    for initializer, value in values.items():
        buffer = graph.initializers[initializer]
        if initializer in kept or initializer in noted:
            continue
        if source_of(value) is buffer:
            continue  # a trace did not see what changed it
        if value.dtype is not None and value.dtype != buffer.dtype:
            continue
        node = ir.Node("", "Identity", [value], name=f"{initializer}/next")
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(buffer.dtype), buffer.shape  # type: ignore[arg-type]
        graph.append(node)
        graph.outputs.append(node.outputs[0])
        carried.append(initializer)
    return carried, {name for name, initializer in initializers.items() if initializer in noted}


def _state(graph: ir.Graph, values: Mapping[str, ir.Value], read: set[str] | None) -> set[str]:
    """Those of the initializers with next values that anything reads, also by way of the next values of others that are read."""
    if read is None:
        return set(values)
    found = {initializer for initializer in values if initializer in read or is_read(graph.initializers[initializer])}
    todo = list(found)
    while todo:
        source = source_of(values[todo.pop()])
        name = source.name or ""
        if name in values and graph.initializers[name] is source and name not in found:
            found.add(name)
            todo.append(name)
    return found


def name_carried(graph: ir.Graph, carried: Iterable[str], count: int) -> dict[str, str]:
    """Name the outputs after the results; initializer -> the name of its output."""
    taken = {value.name for value in (*graph.inputs, *graph.initializers.values())}
    taken.update(value.name for node in walk(graph) for value in node.outputs)
    found = {}
    for initializer, value in zip(carried, list(graph.outputs)[count:], strict=True):
        name = f"{initializer}.next"
        while name in taken and value.name != name:
            name += "_"
        value.name = found[initializer] = name
        taken.add(name)
    return found


def add_lost(model: ir.Model, seen: Mapping[str, str], noted: Mapping[str, str] = MappingProxyType({})) -> None:
    """Say in the metadata of a file which changes it does not carry.

    Args:
        model: The file.
        seen: Names of buffers, and of attributes of modules, that the forward was seen to change -> why no output could hold the next value.
        noted: The same of those that it writes before it reads them: where the file reads them, it did not see that.
    """
    entries = (read_state(model.metadata_props) or {}) if seen or noted else {}
    seen = dict(seen) | {
        name: why for name, why in noted.items() if name in entries and is_read(model.graph.initializers[entries[name].initializer])
    }
    if not seen:
        return
    changes = changes_of(model)
    kept = {*changes.carried, *kept_statistics(model.graph)}
    lost = {
        name: why for name, why in sorted(seen.items()) if why != UNSEEN or name not in entries or entries[name].initializer not in kept
    }
    if lost.keys() - changes.lost.keys():
        model.metadata_props[BUFFERS_KEY] = write_changes(replace(changes, lost={**lost, **changes.lost}))


def warn_of_lost(model: ir.Model) -> None:
    """Say what a file's forward changes and the file does not carry."""
    lost = changes_of(model).lost
    if lost:
        named = "; ".join(f"{name!r} ({why})" for name, why in list(lost.items())[:5]) + ("; ..." if len(lost) > 5 else "")
        warn(
            f"forward changes state that the file cannot carry: {named}. Each run starts from its value at export, and load(...) refuses a forward in "
            "training mode: return the new value from forward and pass it in; or keep it in a buffer of fixed shape that forward writes into; or let the module "
            "that holds the buffer be one node, which hands it on: opaque=[that module]."
        )
