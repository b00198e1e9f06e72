"""The part of a training step that writes its state, as a model of its own, so that it can write where the state lies.

A file hands out the next state beside the present one: both are in memory, and what is written is new memory. Eager optimizers write in
place. Within one session that is not safe: onnxruntime may read a parameter for a gradient after its update was written. Here the chains
that end in next parameters and moments (`exporter.cpu.elementwise`) leave the step; they run after it, when nothing else reads
the state, with their outputs bound to the memory of their inputs. The file on disk is not touched.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import onnx_ir as ir

from exporter.cpu.elementwise import ELEMENTWISE
from exporter.cpu.operators import DOMAIN
from exporter.runtime.accelerate import Update
from exporter.runtime.facts import ShapeAndType, fact_of, fixed_shape
from exporter.runtime.outputs import before_reshape
from symbolics.graph.values import attr, name_of

__all__ = ["take_out_updates"]

#: A step with less state than this, in bytes, gains less than a second run costs.
FEW_BYTES = 1 << 20

_Pairs = Mapping[ir.Value, ir.Value]  # output of the step -> the input whose place it takes


def take_out_updates(step: ir.Model, carried: Mapping[str, str], facts: Mapping[ir.Value, ShapeAndType]) -> Update | None:
    """Take the nodes that may write in place out of a step, in place.

    Args:
        step: A training step whose chains are joined.
        carried: output -> the input that takes its value in the next step.
        facts: Shapes and element types of the step's values, as `fuse` leaves them.

    Returns:
        They as a model; None where there is hardly anything to write, and the step is as it was. Outputs that they read are added behind
        the step's own, those that they make are gone.
    """
    graph = step.graph
    inputs = {name_of(value): value for value in graph.inputs}
    pairs = {output: inputs[carried[name_of(output)]] for output in graph.outputs if output.name in carried}
    if len(set(pairs.values())) < len(pairs):
        return None
    nodes = [node for node in graph if _writes_in_place(node, pairs) and _is_known(node, facts)]
    written = {pairs[output] for node in nodes for output in node.outputs}
    # What two of them read, none may write.
    nodes = [node for node in nodes if written.isdisjoint(_others(node, pairs))]
    if sum(_bytes(output) for node in nodes for output in node.outputs) < FEW_BYTES:
        return None
    names = {name_of(output): name_of(pairs[output]) for node in nodes for output in node.outputs}
    nodes = [*_reshapes(nodes, facts), *nodes]
    made = {output for node in nodes for output in node.outputs}
    taken = [v for node in nodes for v in node.inputs if v is not None and not v.is_initializer() and v not in made]
    reads = {name_of(v): fixed_shape(v, facts) or () for v in taken}
    before = {output.name for output in graph.outputs}
    model = _moved(step, nodes, names)
    return Update(model, names, reads, frozenset(name_of(output) for output in graph.outputs if output.name not in before))


def _is_known(node: ir.Node, facts: Mapping[ir.Value, ShapeAndType]) -> bool:
    """Whether the shapes of what a node reads are known."""
    return all(value is not None and fixed_shape(value, facts) is not None for value in node.inputs)


def _reshapes(nodes: list[ir.Node], facts: Mapping[ir.Value, ShapeAndType]) -> list[ir.Node]:
    """Reshapes that these alone read: free of what a session is given, and copies as its last nodes."""
    found: dict[ir.Node, None] = {}
    readers = set(nodes)
    for value in (value for node in nodes for value in node.inputs if value is not None and not value.is_graph_output()):
        source, node, kind = before_reshape(value, facts), value.producer(), fact_of(value, facts)[1]
        if source is None or node is None or kind is None or not {use.node for use in value.uses()} <= readers:
            continue
        sizes = node.inputs[1]
        if sizes is not None and sizes.is_initializer() and not sizes.is_graph_input():
            source.type = value.type = ir.TensorType(kind)
            found[node] = None
    return list(found)


def _writes_in_place(node: ir.Node, pairs: _Pairs) -> bool:
    """Whether a node makes next state alone, of its own size, and reads each element of the present one before it writes there."""
    if node.domain != DOMAIN or node.op_type != ELEMENTWISE:
        return False
    if not all(output in pairs and pairs[output] in node.inputs and not output.uses() for output in node.outputs):
        return False
    if any(value is None or (value.is_initializer() and value.is_graph_input()) for value in node.inputs):
        return False
    places = {value: place for place, value in enumerate((*node.inputs, *node.outputs))}
    program = attr(node, "program") or ()
    for output in node.outputs:
        old = pairs[output]
        if old.dtype != output.dtype or not _bytes(output) or old.shape != output.shape or old.is_graph_output():
            return False
        steps = [(program[k + 1], program[k + 2 : k + 4]) for k in range(0, len(program), 4)]
        first = next(number for number, (to, _) in enumerate(steps) if to == places[output])
        if any(places[old] in read for _, read in steps[first + 1 :]):
            return False
    return True


def _others(node: ir.Node, pairs: _Pairs) -> set[ir.Value | None]:
    """What a node reads and does not write."""
    return set(node.inputs) - {pairs[output] for output in node.outputs}


def _bytes(value: ir.Value) -> int:
    """Its size; 0 where that is not known."""
    if value.shape is None or value.dtype is None or not value.shape.is_static():
        return 0
    return int(math.prod(value.shape.numpy()) * value.dtype.itemsize)


def _moved(step: ir.Model, nodes: list[ir.Node], written: Collection[str]) -> ir.Model:
    """The nodes as a model; the step is without them, and hands out what they read. Outputs of the update are those ``written``."""
    graph = step.graph
    given: dict[ir.Value, ir.Value] = {}
    inputs: list[ir.Value] = []
    initializers: list[ir.Value] = []
    copies: list[ir.Node] = []
    for node in nodes:
        for value in node.inputs:
            assert value is not None
            if value in given:
                continue
            value.type = value.type or node.outputs[0].type  # a chain is of one element type
            shape = value.shape if value.is_graph_input() else None  # onnxruntime holds what is given to it
            const = value.const_value if value.is_initializer() else None
            given[value] = ir.Value(name=value.name, type=value.type, shape=shape, const_value=const)
            (initializers if value.is_initializer() else inputs).append(given[value])
            if not (value.is_initializer() or value.is_graph_input() or value.is_graph_output()):
                graph.outputs.append(value)
        read = [given[value] for value in node.inputs if value is not None]
        copy = ir.Node(node.domain, node.op_type, read, node.attributes.values(), num_outputs=len(node.outputs), name=node.name)
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name, new.type, new.shape = old.name, old.type, old.shape
            given[old] = new
        copies.append(copy)
    gone = {output for node in nodes for output in node.outputs}
    kept = [output for output in graph.outputs if output not in gone]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    graph.remove(nodes, safe=True)
    outputs = [output for copy in copies for output in copy.outputs if output.name in written]
    update = ir.Graph(inputs, outputs, nodes=copies, initializers=initializers, name="update", opset_imports=dict(graph.opset_imports))
    return ir.Model(update, ir_version=step.ir_version, producer_name="pythonop")
