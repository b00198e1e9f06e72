"""A training graph as two models: the forward with what the backward reads, and the backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from symbolics.errors import FormatError
from symbolics.graph.walk import captured, discard, subgraphs
from symbolics.node.metadata import GradientPairing, read_pairing
from symbolics.node.names import PYTHON_OP

__all__ = ["Halves", "forward_part", "split"]

# Nodes that only look at their input in another way: the backward does them again where it has their inputs anyway, so
# that the transpose of a weight or the expansion of a mask is not kept from the forward to the backward.
_CHEAP = frozenset(
    "Transpose Reshape Squeeze Unsqueeze Flatten Expand Identity Shape Size Cast CastLike ConstantOfShape Constant Range Not".split()
)
# One pass over an operand, to the same bits: cheap where the other operand is a constant of one element. GELU's x/2 and
# tanh + 1 are made so; kept, they are a third of what a feed-forward block keeps.
_SCALED = frozenset("Add Sub Mul Div".split())


@dataclass(frozen=True)
class Halves:
    """A split training graph.

    Attributes:
        forward: Its inputs are the model's, then the state; its outputs are `given`.
        backward: Its inputs are `saved`, then `reads`, then `seeds`; its outputs are the gradients.
        outputs: Names of the model's outputs.
        given: What the forward gives out: the outputs, what is saved, and what was asked for as extra.
        saved: Values that the forward computes and the backward reads.
        contexts: Those of them that are handles of PythonOps.
        reads: Graph inputs and state that the backward reads.
        seeds: output name -> the input of the backward that takes its gradient.
        gradients: name -> the output of the backward that is its gradient; unreached names are left out.
        reach: name -> names of the outputs through which its gradient comes.
        size: How many nodes the backward has.
    """

    forward: ir.Model
    backward: ir.Model | None
    outputs: tuple[str, ...]
    given: tuple[str, ...]
    saved: tuple[str, ...]
    contexts: tuple[str, ...]
    reads: tuple[str, ...]
    seeds: dict[str, str]
    gradients: dict[str, str]
    reach: dict[str, frozenset[str]]
    size: int


def _reads(node: ir.Node) -> list[ir.Value]:
    inner = captured(node) if subgraphs(node) else ()
    return [value for value in (*node.inputs, *inner) if value is not None]


def _is_cheap(node: ir.Node) -> bool:
    if node.domain != "":
        return False
    return node.op_type in _CHEAP or (node.op_type in _SCALED and any(_is_scalar(value) for value in node.inputs))


def _is_scalar(value: ir.Value | None) -> bool:
    constant = None if value is None else ir.convenience.get_const_tensor(value)
    return constant is not None and constant.size == 1


def _ancestors(nodes: Sequence[ir.Node], ends: Iterable[ir.Value]) -> set[ir.Node]:
    needed, found = set(ends), set()
    for node in reversed(nodes):
        if any(output in needed for output in node.outputs):
            found.add(node)
            needed.update(_reads(node))
    return found


def forward_part(model: ir.Model, state: Iterable[str], extra: Iterable[str] = ()) -> ir.Model:
    """The forward of a model alone, its state as inputs behind the model's; outputs are the model's, then ``extra``."""
    pairing = read_pairing(model.metadata_props) or GradientPairing()
    graph, nodes = model.graph, list(model.graph)
    by_name = {value.name: value for node in nodes for value in node.outputs if value.name}
    ends = [value for value in graph.outputs if value.name not in set(pairing.outputs.values())]
    names = dict.fromkeys([*(value.name for value in ends), *extra])
    known = set(state)
    inputs = [value.name for value in graph.inputs if value.name not in set(pairing.inputs.values())]
    kept = _ancestors(nodes, [*ends, *(by_name[name] for name in extra)])
    return _extract(model, kept, [*inputs, *(name for name in graph.initializers if name in known)], list(names))


def split(training: ir.Model, state: Iterable[str], extra: Iterable[str] = (), wrt: Iterable[str] | None = None) -> Halves:
    """Cut a training graph between its forward and its gradient graph.

    Args:
        training: What build_gradient_graph returned; it is not changed.
        state: The initializers that become inputs of both halves.
        extra: Values of the forward that it gives out as well.
        wrt: Which gradients are wanted; default: all.

    Raises:
        FormatError: The model has no gradient graph.
    """
    pairing = read_pairing(training.metadata_props)
    if pairing is None:
        raise FormatError("the model has no gradient graph (no metadata pythonop.gradients): make one with exporter.build_gradient_graph")
    graph, nodes = training.graph, list(training.graph)
    wrt = None if wrt is None else set(wrt)
    state = [name for name in graph.initializers if name in set(state)]
    by_name = {value.name: value for node in nodes for value in node.outputs if value.name}
    outputs_of = {graph_input: output for output, graph_input in pairing.inputs.items()}
    ends = [value for value in graph.outputs if value.name not in set(pairing.outputs.values())]
    wanted = {
        name: by_name[output] for name, output in pairing.outputs.items() if name not in pairing.unreached and (wrt is None or name in wrt)
    }
    extras = [by_name[name] for name in extra]

    ahead = _ancestors(nodes, [*ends, *extras])
    needed = _ancestors(nodes, wanted.values())
    behind = [node for node in nodes if node in needed and node not in ahead]
    again, saved = _cut(nodes, ahead, behind, wanted.values())
    reach = _reach(behind, wanted, outputs_of)
    seeds = {output: graph_input for output, graph_input in pairing.inputs.items() if any(output in found for found in reach.values())}

    inputs = [value.name for value in graph.inputs if value.name not in outputs_of]
    given = dict.fromkeys(value.name for value in (*ends, *saved, *extras))
    forward = _extract(training, ahead, [*inputs, *state], list(given))
    backward, reads = None, []
    if wanted:
        kept = again.union(behind)
        used = {value.name for node in kept for value in _reads(node)}
        reads = [name for name in (*inputs, *state) if name in used]
        backward = _extract(training, kept, [*(v.name for v in saved), *reads, *seeds.values()], [v.name for v in wanted.values()])
    return Halves(
        forward=forward,
        backward=backward,
        outputs=tuple(value.name for value in ends),
        given=tuple(given),
        saved=tuple(value.name for value in saved),
        contexts=tuple(value.name for value in saved if value.producer().op_type == PYTHON_OP and value.index() == 0),
        reads=tuple(reads),
        seeds=seeds,
        gradients={name: value.name for name, value in wanted.items()},
        reach=reach,
        size=0 if backward is None else len(backward.graph),
    )


def _cut(
    nodes: Sequence[ir.Node], ahead: set[ir.Node], behind: Sequence[ir.Node], ends: Iterable[ir.Value]
) -> tuple[set[ir.Node], list[ir.Value]]:
    """The forward nodes that the backward does again, and the values that it is given."""
    needed: dict[ir.Value, None] = {value: None for node in behind for value in _reads(node)}
    needed.update((value, None) for value in ends)
    cheap = {node for node in ahead if _is_cheap(node)}
    # Free: what both halves have without keeping anything: inputs, state, constants, and what is cheaply made of these.
    free: set[ir.Value] = set()
    for node in nodes:
        if node in cheap and all(value.producer() is None or value in free for value in _reads(node)):
            free.update(node.outputs)
    waiting = [value for value in needed if value.producer() in ahead]
    crossing = {value for value in waiting if value not in free}
    for value in list(crossing):  # of a mask the bool is kept, a quarter of the float
        node = value.producer()
        if node.op_type == "Cast" and node.inputs[0].dtype is ir.DataType.BOOL:
            crossing.add(node.inputs[0])
    again: set[ir.Node] = set()
    saved: set[ir.Value] = set()
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if node not in ahead or node in again or value in saved:
            continue
        inputs = _reads(node)
        if value in free or (node in cheap and all(v.producer() is None or v in free or v in crossing for v in inputs)):
            again.add(node)
            waiting += inputs
        else:
            saved.add(value)
    return again, [value for node in nodes for value in node.outputs if value in saved]


def _reach(behind: Sequence[ir.Node], wanted: dict[str, ir.Value], outputs_of: dict[str, str]) -> dict[str, frozenset[str]]:
    """Through which outputs each gradient comes."""
    known: dict[ir.Value, frozenset[str]] = {}

    def of(value: ir.Value) -> frozenset[str]:
        if value.producer() is None and value.name in outputs_of:
            return frozenset([outputs_of[value.name]])
        return known.get(value, frozenset())

    for node in behind:
        found = frozenset().union(*[of(value) for value in _reads(node)])
        known.update((output, found) for output in node.outputs)
    return {name: of(value) for name, value in wanted.items()}


def _extract(model: ir.Model, kept: set[ir.Node], inputs: Sequence[str], outputs: Sequence[str]) -> ir.Model:
    """A copy of a part of a model.

    Args:
        model: The whole.
        kept: Its nodes that stay.
        inputs: Values of any kind that become the inputs: graph inputs, initializers, outputs of nodes that go.
        outputs: Values that become the outputs.
    """
    flags = [node in kept for node in model.graph]
    part = model.clone()
    graph = part.graph
    nodes = list(graph)
    by_name = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    by_name |= {value.name: value for node in nodes for value in node.outputs if value.name}
    graph.inputs.clear()
    graph.outputs.clear()
    for name in inputs:
        value = by_name[name]
        if value.producer() is not None:
            fresh = ir.Value(name=name, type=value.type, shape=value.shape)
            value.replace_all_uses_with(fresh)
            value.name, by_name[name] = None, fresh
        elif value.is_initializer():
            del graph.initializers[name]
            value.const_value = None
        graph.inputs.append(by_name[name])
    for node, flag in zip(reversed(nodes), reversed(flags), strict=True):
        if not flag:
            discard(node)  # the bodies of a Loop use outer values, too
            graph.remove(node)
    used = {value for node in graph for value in _reads(node)}
    for name in [name for name, value in graph.initializers.items() if value not in used]:
        del graph.initializers[name]
    graph.outputs.extend(by_name[name] for name in outputs)
    return part
