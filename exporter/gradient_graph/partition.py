"""A training graph as two models: the forward, which also gives out residuals, and the backward, which reads them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from symbolics.errors import FormatError, RunError
from symbolics.graph.shapes import may_lose_axes
from symbolics.graph.values import RANDOM, array_of, describe, is_python_op, made_by, name_of, trains
from symbolics.graph.walk import discard, reads, walk
from symbolics.node.metadata import GradientPairing, pairing_of, results_of
from symbolics.node.names import GRADIENTS_KEY

__all__ = [
    "Partition",
    "ancestors",
    "between",
    "extract",
    "forward_part",
    "is_cheap",
    "reach_of",
    "split",
    "split_again",
    "take_off_gradients",
]

# Nodes that only look at their input in another way: the backward computes them again where it has their inputs anyway, so
# that the transpose of a weight or the expansion of a mask is not kept from the forward to the backward.
_CHEAP = frozenset(
    "Transpose Reshape Squeeze Unsqueeze Flatten Expand Identity Shape Size Cast CastLike ConstantOfShape Constant Range Not".split()
)
# One pass over an operand, to the same bits: cheap where the other operand is a constant of one element. GELU's x/2 and
# tanh + 1 are made so; kept, they are a third of what a feed-forward block keeps.
_SCALED = frozenset("Add Sub Mul Div".split())


@dataclass(frozen=True)
class Partition:
    """A training graph in two parts.

    Attributes:
        forward: Its inputs are the model's, then the state; its outputs are the model's, then the residuals, then what was
            asked for as extra.
        backward: Its inputs are `residuals`, then `reads`, then the cotangents; its outputs are the gradients. None: no
            gradient is wanted.
        outputs: Names of the model's outputs.
        residuals: Values that the forward computes and the backward reads.
        reads: Graph inputs and state that the backward reads.
        cotangents: output name -> the input of the backward that takes its cotangent.
        gradients: name -> the output of the backward that is its gradient; unreached names are left out.
        reach: name -> names of the outputs through which its gradient comes.
    """

    forward: ir.Model
    backward: ir.Model | None
    outputs: tuple[str, ...]
    residuals: tuple[str, ...]
    reads: tuple[str, ...]
    cotangents: dict[str, str]
    gradients: dict[str, str]
    reach: dict[str, frozenset[str]]

    @property
    def size(self) -> int:
        """How many nodes the backward has."""
        return 0 if self.backward is None else len(self.backward.graph)


def forward_part(model: ir.Model, state: Iterable[str], extra: Iterable[str] = ()) -> ir.Model:
    """The forward of a model alone, its state as inputs behind the model's; outputs are the model's, then ``extra``."""
    pairing = pairing_of(model) or GradientPairing()
    inputs, outputs = _forward_names(model, pairing)
    return extract(model, [*inputs, *_in_order(model, state)], [*outputs, *extra])


def split(training: ir.Model, state: Iterable[str], extra: Iterable[str] = (), wrt: Iterable[str] | None = None) -> Partition:
    """Cut a training graph between its forward and its gradient graph.

    Args:
        training: What build_gradient_graph returned; it is not changed.
        state: The initializers that become inputs of both parts.
        extra: Values of the forward that it gives out as well.
        wrt: Which gradients are wanted; default: all.

    Raises:
        FormatError: The model has no gradient graph.
    """
    pairing = pairing_of(training)
    if pairing is None:
        raise FormatError("the model has no gradient graph (no metadata pythonop.gradients): make one with exporter.build_gradient_graph")
    nodes = list(training.graph)
    values = ir.convenience.create_value_mapping(training.graph, include_subgraphs=False)
    wanted = _wanted(pairing, wrt)
    gradients = [values[name] for name in wanted.values()]
    inputs, outputs = _forward_names(training, pairing)
    inputs += _in_order(training, state)

    forward = ancestors(nodes, [values[name] for name in (*outputs, *extra)])
    needed = ancestors(nodes, gradients)
    backward = [node for node in nodes if node in needed and node not in forward]
    recomputed, residuals = _cut(nodes, forward, backward, gradients)
    reach = reach_of(backward, {k: values[v] for k, v in wanted.items()}, {v: k for k, v in pairing.inputs.items()})
    reached: frozenset[str] = frozenset().union(*reach.values())
    cotangents = {output: name for output, name in pairing.inputs.items() if output in reached}
    used = {value.name for node in (*recomputed, *backward) for value in reads(node)}
    read = [name for name in inputs if name in used]
    kept = [name_of(value) for value in residuals]
    return Partition(
        forward=extract(training, inputs, [*outputs, *kept, *extra]),
        backward=extract(training, [*kept, *read, *cotangents.values()], list(wanted.values())) if wanted else None,
        outputs=tuple(outputs),
        residuals=tuple(kept),
        reads=tuple(read),
        cotangents=cotangents,
        gradients=wanted,
        reach=reach,
    )


def split_again(
    whole: Partition, training: ir.Model, state: Iterable[str], left: Iterable[str], wrt: Iterable[str] | None = None
) -> Partition:
    """A backward of fewer cotangents behind the forward of a partition, from what that leaves.

    Args:
        whole: Of the training graph of all cotangents.
        training: That of some: what `differentiate` made of the same model with ``given``. It is not changed.
        state, wrt: As `split` had them.
        left: What the forward gives out that a backward may read.

    Raises:
        RunError: A gradient reads what the forward does not leave, and what must not run again.
    """
    pairing = pairing_of(training) or GradientPairing()
    wanted = _wanted(pairing, wrt)
    inputs = [*_forward_names(training, pairing)[0], *_in_order(training, state)]
    gradients, output_of = set(pairing.outputs.values()), {cotangent: output for output, cotangent in pairing.inputs.items()}
    before = ancestors(list(training.graph), [value for value in training.graph.outputs if value.name not in gradients])
    nodes, given = between(training, {*inputs, *left, *output_of}, wanted.values(), before)
    made = {name_of(value): value for node in nodes for value in node.outputs}
    return replace(
        whole,
        backward=extract(training, given, list(wanted.values())) if wanted else None,
        residuals=tuple(name for name in left if name in given),
        reads=tuple(name for name in inputs if name in given),
        cotangents={output: name for output, name in pairing.inputs.items() if name in given},
        gradients=wanted,
        reach=reach_of(nodes, {name: made[gradient] for name, gradient in wanted.items()}, output_of),
    )


def take_off_gradients(training: ir.Model) -> None:
    """Leave of a training graph the forward, with the outputs that its nodes got for a backward."""
    pairing = pairing_of(training) or GradientPairing()
    graph, gradients, cotangents = training.graph, set(pairing.outputs.values()), set(pairing.inputs.values())
    graph.outputs[:] = [value for value in graph.outputs if value.name not in gradients]
    graph.inputs[:] = [value for value in graph.inputs if value.name not in cotangents]
    needed = ancestors(list(graph), graph.outputs)
    gone = [node for node in graph if node not in needed]
    for node in gone:
        discard(node)
    graph.remove(gone)
    del training.metadata_props[GRADIENTS_KEY]


def _wanted(pairing: GradientPairing, wrt: Iterable[str] | None) -> dict[str, str]:
    """name -> the output that is its gradient, of those that something reaches."""
    asked = None if wrt is None else set(wrt)
    return {name: gradient for name, gradient in pairing.reached.items() if asked is None or name in asked}


def _forward_names(model: ir.Model, pairing: GradientPairing) -> tuple[list[str], list[str]]:
    """Inputs and outputs of the forward. An input that has a value in the file (ONNX before IR 4 listed all weights) is none."""
    cotangents, gradients = set(pairing.inputs.values()), set(pairing.outputs.values())
    given = cotangents | set(model.graph.initializers)
    inputs = [name for value in model.graph.inputs if (name := name_of(value)) not in given]
    return inputs, [name for value in results_of(model) if (name := name_of(value)) not in gradients]


def _in_order(model: ir.Model, state: Iterable[str]) -> list[str]:
    known = set(state)
    return [name for name in model.graph.initializers if name in known]


def ancestors(nodes: Sequence[ir.Node], ends: Iterable[ir.Value]) -> set[ir.Node]:
    """The nodes that the ends depend on."""
    needed, found = set(ends), set()
    for node in reversed(nodes):
        if any(output in needed for output in node.outputs):
            found.add(node)
            needed.update(reads(node))
    return found


def between(
    model: ir.Model, known: Collection[str], ends: Iterable[str], before: Collection[ir.Node] | None = None
) -> tuple[list[ir.Node], list[str]]:
    """The nodes that compute values from known ones, and the names of these.

    Args:
        model, known, ends: The graph, what is known, and what is computed, by name.
        before: The nodes that have run; default: all.

    Raises:
        RunError: One of them must not run a second time.
    """
    needed, nodes = dict.fromkeys(ends), []
    for node in reversed(list(model.graph)):
        if any(value.name in needed and value.name not in known for value in node.outputs):
            if (before is None or node in before) and (impure := _impure(node)) is not None:
                raise RunError(
                    f"a gradient reads what {describe(impure)} made, which the forward has not left and which must not run a second time.\n"
                    "  way out: differentiate the file (build_gradient_graph twice) and run that, or the model it was exported from"
                )
            nodes.append(node)
            needed.update((name_of(value), None) for value in reads(node))
    nodes.reverse()
    again = {value.name for node in nodes for value in node.outputs}  # of a node that runs anyway all outputs are its own
    return nodes, [name for name in needed if name in known and name not in again]


def _impure(node: ir.Node) -> ir.Node | None:
    """The node, or one in a body of it, that calls a Function's forward or draws random numbers."""
    for inner in walk([node]):
        if is_python_op(inner) or (inner.domain == "" and (trains(inner) if inner.op_type == "Dropout" else inner.op_type in RANDOM)):
            return inner
    return None


def is_cheap(node: ir.Node) -> bool:
    """Whether computing a node again costs next to nothing where its inputs are there."""
    if node.domain != "":
        return False
    return node.op_type in _CHEAP or (node.op_type in _SCALED and any(a.size == 1 for v in node.inputs if (a := array_of(v)) is not None))


def _cut(
    nodes: Sequence[ir.Node], forward: Collection[ir.Node], backward: Sequence[ir.Node], gradients: Iterable[ir.Value]
) -> tuple[set[ir.Node], list[ir.Value]]:
    """The forward nodes that the backward computes again, and the residuals."""
    needed = dict.fromkeys([*(value for node in backward for value in reads(node)), *gradients])
    cheap = {node for node in forward if is_cheap(node)}
    # Free: what both parts have without keeping anything: inputs, state, constants, and what is cheaply made of these.
    free: set[ir.Value] = set()
    for node in nodes:
        if node in cheap and all(value.producer() is None or value in free for value in reads(node)):
            free.update(node.outputs)
    waiting = [value for value in needed if value.producer() in forward]
    given = {value for value in waiting if value not in free}
    for value in list(given):  # of a mask the bool is kept, a quarter of the float
        cast = made_by(value, "Cast")
        if cast is not None and (mask := cast.inputs[0]) is not None and mask.dtype is ir.DataType.BOOL:
            given.add(mask)
    recomputed: set[ir.Node] = set()
    residuals: set[ir.Value] = set()
    while waiting:
        value = waiting.pop()
        maker = value.producer()
        if maker is None or maker not in forward or maker in recomputed or value in residuals:
            continue
        inputs = reads(maker)
        if value in free or (maker in cheap and all(v.producer() is None or v in free or v in given for v in inputs)):
            recomputed.add(maker)
            waiting += inputs
        else:
            residuals.add(value)
    return recomputed, [value for node in nodes for value in node.outputs if value in residuals]


def reach_of(backward: Sequence[ir.Node], gradients: dict[str, ir.Value], output_of: dict[str, str]) -> dict[str, frozenset[str]]:
    """Through which outputs each gradient comes."""
    known: dict[ir.Value, frozenset[str]] = {}

    def of(value: ir.Value) -> frozenset[str]:
        if value.producer() is None and value.name in output_of:
            return frozenset([output_of[value.name]])
        return known.get(value, frozenset())

    for node in backward:
        found = frozenset().union(*[of(value) for value in reads(node)])
        known.update((output, found) for output in node.outputs)
    return {name: of(value) for name, value in gradients.items()}


def extract(model: ir.Model, inputs: Iterable[str], outputs: Iterable[str]) -> ir.Model:
    """A copy of what lies between some values of a model; initializers among the inputs lose their data."""
    inputs = list(dict.fromkeys(inputs))
    by_name = {output.name: output for node in model.graph for output in node.outputs}
    loose = {name for name in inputs if name in by_name and may_lose_axes(by_name[name])}
    try:
        graph = ir.convenience.extract(model.graph, inputs, list(dict.fromkeys(outputs)))
    except ValueError as error:  # a value of the part comes from none of its inputs
        raise FormatError.damaged(
            f"metadata {GRADIENTS_KEY}", f"it does not part the graph into a forward and a backward: {error}"
        ) from error
    for value in graph.inputs:
        graph.initializers.pop(name_of(value), None)
        value.const_value = None
        value.shape = None if value.name in loose else value.shape
    functions = [function.clone() for function in model.functions.values()]
    return ir.Model(graph, ir_version=model.ir_version, functions=functions, metadata_props=dict(model.metadata_props))
