"""What stands before and behind the sweep: a copy of the model, its opset, its marks, its boundary."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable
from typing import Any

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from exporter.files.read import open_model
from symbolics.errors import ArgumentError, FormatError
from symbolics.gradients.control_flow import EXPOSED, OWN_BACKWARD
from symbolics.graph.shapes import guess_ranks
from symbolics.graph.values import attr, is_float, rank_of
from symbolics.graph.walk import subgraphs, walk
from symbolics.node.metadata import read_state
from symbolics.node.names import MARK_COUNT_KEY, MARK_DOMAIN, MARK_OP, ORT_DOMAIN, PYTHON_OP

__all__ = ["Boundary", "infer_shapes", "own_copy", "read_boundary", "remove_marks", "set_ir_version"]

_SMALL = 256  # elements of an initializer that shape inference may have to read
_OLDEST_IR = 8  # older ones have no functions, and the oldest list initializers among the inputs
# The IR version that an element type came with.
_IR_OF_TYPE = {
    **dict.fromkeys(("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"), 9),
    **dict.fromkeys(("UINT4", "INT4"), 10),
    "FLOAT4E2M1": 11,
    "FLOAT8E8M0": 12,
    **dict.fromkeys(("UINT2", "INT2"), 13),
    **dict.fromkeys(("FLOAT6E2M3", "FLOAT6E3M2"), 14),
}
OPSET = 18  # the rules' oldest
_MARK = (MARK_DOMAIN, MARK_OP)


# ------------------------------------------------------------------------------------------------------------ the copy
def own_copy(source: Any) -> ir.Model:
    """The model in a copy that may be changed, in an opset that the rules know."""
    model = open_model(source)
    for node in walk(model.graph):
        for key in (EXPOSED, OWN_BACKWARD):  # of an earlier build: to this one all outputs are alike
            node.meta.pop(key, None)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if value.type is None and tensor is not None:
            value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape)
        # Shapes and axes: shape inference reads them from memory alone.
        if isinstance(tensor, ir.ExternalTensor) and tensor.size <= _SMALL and tensor.dtype.is_integer():
            value.const_value = ir.tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)
    _check(model)
    _check_marks(model)
    versions = model.opset_imports
    if "ai.onnx" in versions:
        versions[""] = versions.pop("ai.onnx")
    version = versions.setdefault("", OPSET)
    model = _converted(model, version) if version < OPSET else model
    if any(n.op_type in ("If", "Loop", "Scan") for n in model.graph):  # so that a body may be copied without its weights
        passes.LiftSubgraphInitializersToMainGraphPass()(model)
    model.ir_version = max(model.ir_version, _OLDEST_IR)
    return model


def _check(model: ir.Model) -> None:
    """Refuse what ONNX's checker refuses; it sees the model without its large weights."""
    proto = _skeleton(model)
    for value in (*proto.graph.input, *proto.graph.output):  # the checker wants a shape, runtimes and we do not
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        newer = next((o for o in proto.opset_import if o.domain in ("", "ai.onnx")), None)
        if "Unrecognized attribute" in str(error) and newer is not None and newer.version < onnx.defs.onnx_opset_version():
            newer.version = onnx.defs.onnx_opset_version()  # stamped with an older opset than its attributes are of: no harm to a gradient
            with contextlib.suppress(onnx.checker.ValidationError):
                return onnx.checker.check_model(proto)
        raise FormatError(f"the model does not pass onnx.checker, so it has no gradient: {str(error).strip()}") from error


def set_ir_version(model: ir.Model) -> None:
    """The oldest IR version that the opset and the contents need, so that runtimes older than the exporter load the file."""
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    needed = max(_OLDEST_IR, onnx.helper.find_min_ir_version_for(opsets, ignore_unknown=True))
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    types = {v.dtype for v in (*model.graph.inputs, *model.graph.initializers.values())}
    for node in (n for graph in graphs for n in walk(graph)):
        types.update(o.dtype for o in node.outputs)
        types.update(a.value.dtype for a in node.attributes.values() if a.type is ir.AttributeType.TENSOR and not a.is_ref())
        if node.overload or node.metadata_props:
            needed = max(needed, 10)
    model.ir_version = min(model.ir_version, max(needed, *[_IR_OF_TYPE.get(t.name, 0) for t in types if t is not None], 0))


def _converted(model: ir.Model, version: int) -> ir.Model:
    """The model in the rules' oldest opset; the converter does not see the large weights."""
    from onnx import version_converter

    try:
        converted = ir.from_proto(version_converter.convert_version(_skeleton(model), OPSET))
    except Exception as error:
        raise FormatError(
            f"the model has opset {version} and could not be converted to {OPSET}, the oldest that gradients are written for: {error}. "
            f"Export it again with opset_version={OPSET} or newer."
        ) from error
    converted.metadata_props.update(model.metadata_props)
    graph, before = converted.graph, model.graph
    graph.name = before.name
    values = {v.name: v for v in graph.inputs}
    weights = {n: values[n] for n, v in before.initializers.items() if _is_weight(v.const_value)}
    for name, value in weights.items():
        value.const_value = before.initializers[name].const_value
    kept = {v.name for v in before.inputs}
    for value in [v for v in graph.inputs if v.name in weights and v.name not in kept]:
        graph.inputs.remove(value)
    rest = dict(graph.initializers)
    graph.initializers.clear()
    for name in (*before.initializers, *rest):  # in their old order
        if name not in graph.initializers:
            graph.initializers[name] = weights.get(name) or rest[name]
    return converted


def infer_shapes(model: ir.Model, *, only_where_missing: bool = False) -> None:
    """Types and shapes of all values, as far as ONNX can tell."""
    nodes = list(walk(model.graph))
    for node in nodes:
        if node.domain == ORT_DOMAIN and node.op_type == PYTHON_OP:
            _type_python_op(node)
    if only_where_missing and all(o.type is not None and o.shape is not None for n in nodes for o in n.outputs if o.name):
        return
    _merge(model.graph, _inferred(model).graph)
    if guess_ranks(model.graph):
        _merge(model.graph, _inferred(model).graph)


def _inferred(model: ir.Model) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(_skeleton(model), check_type=False, strict_mode=False, data_prop=True)


def _skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model with its large weights, and those in other files, as inputs."""
    graph = model.graph
    weights = [v for v in graph.initializers.values() if _is_weight(v.const_value)]
    added = [v for v in weights if not v.is_graph_input()]
    for value in weights:
        del graph.initializers[value.name]
    graph.inputs.extend(added)
    try:
        return ir.to_proto(model)
    finally:
        for _ in added:  # one by one: a deleted slice would leave them marked as inputs
            graph.inputs.pop()
        for value in weights:
            graph.initializers[value.name] = value


def _is_weight(tensor: ir.TensorProtocol | None) -> bool:
    """Whether nobody has to read it for shapes."""
    return tensor is None or tensor.size > _SMALL or isinstance(tensor, ir.ExternalTensor)


def _merge(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    """Take over types, and shapes that say more than the known ones."""
    infos = {v.name: v.type.tensor_type for v in (*proto.value_info, *proto.output, *proto.input) if v.type.HasField("tensor_type")}
    for value in graph.inputs:
        if (info := infos.get(value.name)) is not None and value.type is None and info.elem_type:
            value.type = ir.TensorType(ir.DataType(info.elem_type))
            value.shape = (
                ir.Shape([d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in info.shape.dim])
                if info.HasField("shape")
                else None
            )
    for node, twin in zip(graph, proto.node):
        for value in node.outputs:
            info = infos.get(value.name)
            if info is None or not value.name:
                continue
            if value.type is None and info.elem_type:
                value.type = ir.TensorType(ir.DataType(info.elem_type))
            if info.HasField("shape") and not _is_static(value.shape):
                dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in info.shape.dim]
                if value.shape is None or any(type(d) is int for d in dims):
                    value.shape = ir.Shape(dims)
        inner = [a.g for a in twin.attribute if a.type == onnx.AttributeProto.GRAPH]
        for body, twin_body in zip(subgraphs(node), inner):
            _merge(body, twin_body)


def _is_static(shape: ir.Shape | None) -> bool:
    return shape is not None and all(type(d) is int for d in shape)


def _type_python_op(node: ir.Node) -> None:
    """Types and ranks of a PythonOp's outputs are among its attributes."""
    for out, kind, rank in zip(node.outputs[1:], attr(node, "output_tensor_types", ()), attr(node, "output_tensor_ranks", ())):
        out.type = out.type or ir.TensorType(ir.DataType(kind))
        out.shape = out.shape if out.shape is not None else ir.Shape([None] * rank)
    context = node.outputs[0]
    context.type, context.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(())


# ----------------------------------------------------------------------------------------------------------- the marks
def _marks(model: ir.Model) -> list[ir.Node]:
    graphs = [model.graph, *[f for k, f in model.functions.items() if k[:2] != _MARK]]
    return [n for g in graphs for n in walk(g) if (n.domain, n.op_type) == _MARK]


def _check_marks(model: ir.Model) -> None:
    text = model.metadata_props.get(MARK_COUNT_KEY)
    found = len(_marks(model))
    if text is not None and text != str(found):
        raise FormatError(
            f"the file was written with {text} stop-gradient marks ({MARK_DOMAIN}::{MARK_OP}) and has {found}: something inlined or removed"
            " them, gradients would flow where PyTorch stops them. Build the gradient graph from the file as the exporter saved it,"
            " and optimize the training graph instead."
        )


def remove_marks(model: ir.Model) -> None:
    """Marks become what they mark; the count becomes 0."""
    for mark in _marks(model):
        (x,), (y,) = mark.inputs, mark.outputs
        if y.is_graph_output():  # its name stays
            mark.domain, mark.op_type = "", "Identity"
            continue
        y.replace_all_uses_with(x)
        mark.graph.remove(mark, safe=True)
    for key in [k for k in model.functions if k[:2] == _MARK]:
        del model.functions[key]
    model.opset_imports.pop(MARK_DOMAIN, None)
    for function in model.functions.values():
        function.opset_imports.pop(MARK_DOMAIN, None)
    if MARK_COUNT_KEY in model.metadata_props:
        model.metadata_props[MARK_COUNT_KEY] = "0"


# -------------------------------------------------------------------------------------------------------- the boundary
class Boundary:
    """What is differentiated with respect to what, and the names of the gradients."""

    def __init__(self, model: ir.Model, wrt: list[ir.Value], outputs: list[ir.Value], explicit: bool) -> None:
        self.wrt = wrt
        self._graph, self._output_names = model.graph, {v.name for v in outputs}
        self.mark = _MARK
        self._explicit = explicit
        graph = model.graph
        self.taken = {v.name for v in (*graph.inputs, *graph.outputs, *graph.initializers.values())}
        for node in walk(graph):
            self.taken.update(o.name for o in node.outputs)
        names = [n for n in self.taken if n and n.startswith("grad")]
        generation = next(i for i in range(len(names) + 1) if not any(n.startswith(f"grad{i or ''}/") for n in names))
        self.prefix = f"grad{generation or ''}/"
        self._both = {v.name for v in wrt} & {v.name for v in outputs}
        state = read_state(model.metadata_props) or {}
        self._variable = {v.name for v in wrt} | {e.initializer for e in state.values()}

    @property
    def outputs(self) -> list[ir.Value]:
        """The differentiable outputs; an expansion may have put another value under a name."""
        return [v for v in dict.fromkeys(self._graph.outputs) if v.name in self._output_names]

    def is_constant(self, value: ir.Value) -> bool:
        """Whether an initializer may be folded: no parameter, no buffer; of a foreign file only scalars and integers."""
        return value.name not in self._variable and (not is_float(value) or rank_of(value) == 0)

    def input_name(self, value: ir.Value) -> str:
        """The name of the input that takes the gradient of an output."""
        return self._fresh(value.name, "_grad_in")

    def output_name(self, value: ir.Value) -> str:
        """The name of the output that gives the gradient of a target."""
        return self._fresh(value.name, "_grad_out")

    def _fresh(self, name: str, other: str) -> str:
        found = f"{name}_grad"
        if name in self._both or found in self.taken:
            found = f"{name}{other}"
        count = 1
        while found in self.taken:
            count += 1
            found = f"{name}{other}{count}"
        self.taken.add(found)
        return found

    def check_reached(self, active: set[ir.Value]) -> None:
        """Refuse an output that no target reaches, where the caller named it."""
        if self._explicit and (idle := [v.name for v in self.outputs if v not in active]):
            raise ArgumentError(
                f"the outputs {idle} depend on nothing in wrt in a differentiable way: leave them out of outputs, or extend wrt"
            )


def read_boundary(model: ir.Model, wrt: Iterable[str] | None, outputs: Iterable[str] | None) -> Boundary:
    """Names to values, with the defaults.

    Raises:
        ArgumentError: A name does not exist, stands twice or has no gradient.
    """
    graph = model.graph
    sources = {v.name: v for v in (*graph.inputs, *graph.initializers.values())}
    if wrt is None:
        state = read_state(model.metadata_props)
        if state is None:
            names = [n for n, v in graph.initializers.items() if is_float(v) and rank_of(v)]
        else:
            names = [e.initializer for e in state.values() if e.trainable and e.initializer in sources]
        names += [v.name for v in graph.inputs if is_float(v)]
        wrt = list(dict.fromkeys(n for n in names if is_float(sources[n])))
    targets = _named("wrt", wrt, sources, "input or initializer")
    if outputs is None:
        ends = [v for v in dict.fromkeys(graph.outputs) if is_float(v)]
    else:
        ends = _named("outputs", outputs, {v.name: v for v in graph.outputs}, "output")
    return Boundary(model, targets, ends, explicit=outputs is not None)


def _named(argument: str, names: Iterable[str], known: dict[str, ir.Value], kind: str) -> list[ir.Value]:
    if isinstance(names, str):
        raise ArgumentError(f"{argument} is the string {names!r}: give a list of names")
    out: dict[ir.Value, None] = {}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 3) or list(known)[:5]
            raise ArgumentError(f"{argument} names {name!r}, and the model has no such {kind}; near it: {near}")
        if not is_float(known[name]):
            raise ArgumentError(f"{argument} names {name!r}, whose type is {known[name].dtype}: only floating point values have a gradient")
        if known[name] in out:
            raise ArgumentError(f"{argument} names {name!r} twice")
        out[known[name]] = None
    return list(out)
