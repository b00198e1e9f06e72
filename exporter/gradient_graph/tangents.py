"""The forward-mode derivative of an ONNX model as an ONNX model: the gradient graph, transposed.

A gradient graph is linear in its cotangents: gradient = J' u. Its own gradient with respect to u, for the direction v, is
J v, the tangent. So two sweeps of `exporter.gradient_graph.build` make it, and every rule of a gradient serves both modes; what
only the first sweep needed is pruned. A few operators have rows of their own (`symbolics.gradients.tangents`), PythonOp among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from exporter.errors import short
from exporter.files.proto import reading
from exporter.gradient_graph.boundary import Boundary
from exporter.gradient_graph.build import ModelLike, differentiate
from exporter.gradient_graph.model import own_copy, set_ir_version
from exporter.gradient_graph.slow_operators import without_slow_operators
from symbolics.errors import UnsupportedOperatorError
from symbolics.gradients.tangents import FORWARD, LINEAR, PLACEHOLDER, TRANSPOSED
from symbolics.graph.builder import Builder
from symbolics.graph.collector import without_gc
from symbolics.graph.scope import Scope
from symbolics.graph.values import dtype_of, graph_of, is_python_op, is_python_op_tangent, name_of
from symbolics.graph.walk import discard, walk
from symbolics.node.backward import count_readers
from symbolics.node.metadata import GradientPairing, TangentPairing, pairing_of, write_tangents
from symbolics.node.names import GRADIENTS_KEY, TANGENTS_KEY

__all__ = ["build_tangent_graph"]

_STEM = "tangent"


@short
@without_gc()
def build_tangent_graph(model: ModelLike, *, wrt: Iterable[str] | None = None, outputs: Iterable[str] | None = None) -> ir.Model:
    """Add forward-mode derivatives to a model: the Jacobian times a vector, from one run.

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model, or an object whose ``model`` is one. It is not changed. Of a
            training file, the result gives products with the Hessian.
        wrt: Names of initializers and inputs that move. Default: the trainable parameters that the file names, or else its
            float initializers with at least one axis; and the float inputs.
        outputs: Names of outputs whose tangents you want. Default: all float outputs.

    Returns:
        The model. After its own inputs it takes ``<name>_tangent`` for each of ``wrt``. After its own outputs it returns
        ``<output>_tangent`` for each of ``outputs``. Each has the dtype and shape of what it belongs to. The metadata entry
        ``pythonop.tangents`` says which is which. An output that depends on nothing in ``wrt`` has a tangent of zeros, and is
        listed there as unreached. A PythonOp on the way becomes a PythonOpTangent (docs/format.md).

    Raises:
        UnsupportedOperatorError: An operator between ``wrt`` and the outputs has no gradient rule, or the gradient of its rule
            has none.
        FormatError: The model does not pass onnx.checker, cannot be converted to opset 18, or another tool has removed the
            marks at which gradients stop.
        ArgumentError: A name in ``wrt`` or ``outputs`` does not exist or has no gradient (this is a ValueError too); or no output
            of the model is a float tensor.

    Examples:
        >>> tangent = exporter.build_tangent_graph(program, wrt=["x"])
    """
    with reading(model):
        copy = own_copy(model)
    forward = {node.name for node in walk(copy.graph)}
    boundary = Boundary(copy, wrt, outputs, stem=_STEM, lenient=True)
    boundary.check_outputs()
    pairing = TangentPairing(
        {name_of(v): boundary.input_name(v) for v in boundary.wrt}, {name_of(v): boundary.output_name(v) for v in boundary.outputs}
    )
    earlier = copy.metadata_props.get(GRADIENTS_KEY)
    result = _swept(copy, pairing)
    with reading(model):
        _cut(result)
    tangents = result.model
    if earlier is None:
        del tangents.metadata_props[GRADIENTS_KEY]
    else:
        tangents.metadata_props[GRADIENTS_KEY] = earlier
    tangents.metadata_props[TANGENTS_KEY] = write_tangents(replace(pairing, unreached=result.unreached))
    without_slow_operators(tangents, [node for node in walk(tangents.graph) if node.name not in forward])
    _import(tangents)
    set_ir_version(tangents)
    return tangents


@dataclass(frozen=True)
class _Swept:
    """A model with its gradient graph and the gradient graph of that.

    Attributes:
        model: Both sweeps' nodes stand behind the forward's; what only the first needed is still there.
        prefixes: Of the names of their nodes.
        inputs, outputs: Of the forward, by name.
        taken: The inputs that take tangents, by their final names, and the value each belongs to.
        given: The same for the outputs that give them.
        seeds: The cotangents of the first sweep, and the output each belongs to.
        unreached: Outputs that nothing in wrt reaches.
    """

    model: ir.Model
    prefixes: tuple[str, str]
    inputs: list[ir.Value]
    outputs: list[ir.Value]
    taken: dict[str, tuple[ir.Value, ir.Value]]
    given: dict[str, tuple[ir.Value, ir.Value]]
    seeds: dict[ir.Value, ir.Value]
    unreached: tuple[str, ...]


def _swept(model: ir.Model, pairing: TangentPairing) -> _Swept:
    """Sweep twice: with respect to what moves, and with respect to the cotangents of that."""
    inputs, outputs = (list(map(name_of, values)) for values in (model.graph.inputs, model.graph.outputs))
    first = _Sweep(model, pairing.inputs, pairing.outputs)
    gradients = differentiate(model, first, LINEAR, final=False)
    there = _pairing(gradients)
    for value in (o for node in walk(gradients.graph) for o in node.outputs if o.type is None):
        value.shape = None  # onnx_ir writes no shape without a type, and warns of it
    with reading(gradients):
        copy = own_copy(gradients)
    second = _Sweep(copy, there.inputs.values(), there.outputs.values(), variable=pairing.inputs)
    try:
        tangents = differentiate(copy, second, TRANSPOSED, final=False)
    except UnsupportedOperatorError as error:
        raise UnsupportedOperatorError(f"no forward-mode derivative, which is the gradient of the gradient graph: {error}") from error
    back = _pairing(tangents)
    values = ir.convenience.create_value_mapping(tangents.graph, include_subgraphs=False)
    return _Swept(
        tangents,
        (first.prefix, second.prefix),
        [values[name] for name in inputs],
        [values[name] for name in outputs],
        {final: (values[back.inputs[there.outputs[name]]], values[name]) for name, final in pairing.inputs.items()},
        {final: (values[back.outputs[there.inputs[name]]], values[name]) for name, final in pairing.outputs.items()},
        {values[there.inputs[name]]: values[name] for name in pairing.outputs},
        tuple(name for name in pairing.outputs if there.inputs[name] in back.unreached),
    )


def _cut(result: _Swept) -> None:
    """Leave of both sweeps what the tangents need, under its final names."""
    graph, prefixes = result.model.graph, result.prefixes
    ends = [value for value, _ in result.given.values()]
    for of, new in (
        (graph.inputs, [*result.inputs, *result.seeds, *(value for value, _ in result.taken.values())]),
        (graph.outputs, [*result.outputs, *ends]),
    ):
        of.clear()
        of.extend(new)
    _prune(graph, prefixes)
    scope = Scope(f"{prefixes[1]}zeros/", lambda _: False)
    for node in [n for n in walk(graph) if n.domain == PLACEHOLDER]:
        _stand_in(scope, dict(zip(node.outputs, node.inputs)))
        graph_of(node).remove(node)
        discard(node)
    _prune(graph, prefixes)
    _stand_in(scope, result.seeds)
    scope.register(graph)
    _run_once(graph)
    _prune(graph, prefixes)
    for seed in result.seeds:
        graph.inputs.remove(seed)
    count_readers(walk(graph))
    for name, (value, of_value) in {**result.taken, **result.given}.items():
        value.name, value.shape = name, of_value.shape


class _Sweep(Boundary):
    """The boundary of one of the two sweeps; its names are not those of the result."""

    def __init__(self, model: ir.Model, wrt: Iterable[str], outputs: Iterable[str], variable: Iterable[str] = ()) -> None:
        super().__init__(model, wrt, outputs, stem=_STEM, lenient=True, variable=variable)

    def input_name(self, value: ir.Value) -> str:
        """The name of what takes the cotangent of a value."""
        return f"{self.prefix}cotangent/{name_of(value)}"

    def output_name(self, value: ir.Value) -> str:
        """The name of what gives the gradient of a value."""
        return f"{self.prefix}gradient/{name_of(value)}"


def _pairing(model: ir.Model) -> GradientPairing:
    pairing = pairing_of(model)
    assert pairing is not None
    return pairing


def _prune(graph: ir.Graph, prefixes: tuple[str, ...]) -> None:
    """Remove nodes of the two sweeps that nothing reads, and what the forward's nodes gave out for them alone."""
    for node in reversed(list(graph)):
        idle = [o for o in node.outputs if not _is_read(o)]
        if (node.name or "").startswith(prefixes):
            if len(idle) == len(node.outputs):
                graph.remove(node)
                discard(node)
        elif node.domain == "" and not any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            for output in idle:
                if output.index() and (output.name or "").startswith(prefixes):
                    output.name = ""
            kept = max((i for i, o in enumerate(node.outputs) if o.name), default=0)
            node.resize_outputs(kept + 1)
    for name in [n for n, v in graph.initializers.items() if n.startswith(prefixes) and not v.uses() and not v.is_graph_output()]:
        del graph.initializers[name]


def _stand_in(scope: Scope, shapes: Mapping[ir.Value, ir.Value | None]) -> None:
    """Replace values of the first sweep that the second still reads: of its own result only their shapes matter, and ``shapes`` have these.

    A tangent does not depend on the cotangents of the first sweep: zeros stand for them where their shape is not asked for at once.
    """
    for value, like in shapes.items():
        if like is None:
            continue
        for use in list(value.uses()):
            node, op = use.node, Builder(scope)
            if node.domain or node.op_type not in ("Shape", "Size"):
                node.replace_input_with(use.idx, op.zeros(op.Shape(like), dtype_of(value)))
                graph_of(node).insert_before(node, op.nodes)
            else:
                node.replace_input_with(use.idx, like)
        if value.is_graph_output() and (maker := value.producer()) is not None:  # of a body of control flow
            op = Builder(scope)
            value.replace_all_uses_with(op.zeros(op.Shape(like), dtype_of(value)), replace_graph_outputs=True)
            graph_of(maker).insert_before(maker, op.nodes)


def _run_once(graph: ir.Graph) -> None:
    """A PythonOpTangent calls the Function anyway: it takes the place of its PythonOp. Both stay in a body of control flow, and
    where a PythonOpGrad reads the context of the PythonOp."""
    values = {o.name: o for node in graph for o in node.outputs if o.name}
    moved = False
    for node in list(graph):
        if not is_python_op_tangent(node):
            continue
        value = values.get(node.meta.pop(FORWARD, ""))
        forward = None if value is None else value.producer()
        if forward is None or not is_python_op(forward) or forward.graph is not graph or _is_read(forward.outputs[0]):
            continue
        if list(forward.inputs) != list(node.inputs[: len(forward.inputs)]):
            continue
        for old, new in zip(forward.outputs[1:], node.outputs):
            new.name, new.type, new.shape = old.name, old.type, old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            old.name = None
        node.name = forward.name or node.name
        node.metadata_props.update(forward.metadata_props)
        graph.remove(forward, safe=True)
        moved = True
    if moved:
        graph.sort()


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _import(model: ir.Model) -> None:
    """The domains of the nodes that are there, without that of the placeholders."""
    model.opset_imports.pop(PLACEHOLDER, None)
    for domain in {node.domain for node in walk(model.graph)}:
        model.opset_imports.setdefault(domain, 1)
