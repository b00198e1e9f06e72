"""Forward mode, where the transpose of an operator's gradient rule costs more nodes than its tangent, or does not exist.

The gradient of a model is linear in its cotangents, so its own gradient with respect to these is the tangent
(`exporter.gradient_graph.tangents`): no operator needs a rule for that. One that has a row here is, in the gradient
graph, a single node that stands for its gradient (`PLACEHOLDER`): it reads what the operator reads, and the cotangents of its outputs.
Its own gradient is the row's: from the tangents of the inputs to those of the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from symbolics.errors import FormatError
from symbolics.gradients.normalization import normalized, statistics, through_softmax, without_nan
from symbolics.gradients.registry import Grads, Rule
from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, may_be_float
from symbolics.node.attributes import SPECS, check_types, values_of
from symbolics.node.names import ORT_DOMAIN, OWN_DOMAIN, PYTHON_OP, PYTHON_OP_TANGENT
from symbolics.text import shown

__all__ = ["FORWARD", "LINEAR", "PLACEHOLDER", "TRANSPOSED"]

#: The domain of the nodes that stand for gradients until the second sweep.
PLACEHOLDER = "pythonop.gradient"
#: Of a PythonOpTangent, in ``ir.Node.meta`` while the graph is built: the name of an output of its PythonOp.
FORWARD = "pythonop.forward"
_COUNTS = "pythonop_counts"  # of a placeholder: how many of its inputs are the operator's, and how many residuals

Tangents = Sequence[Value | None]


@dataclass(frozen=True)
class Linearized:
    """A node of the forward, as its placeholder has it: its inputs, what its row read beside them, its attributes, defaults written out."""

    inputs: Sequence[Value | None]
    residuals: Sequence[Value]
    attributes: dict[str, ir.Attr]

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name].value


@dataclass(frozen=True)
class _Row:
    """How tangents pass an operator.

    Attributes:
        function: From the tangents of the inputs (None where there is none) to those of the outputs.
        attributes: Names of the attributes that it reads; none: all that the node carries.
        residuals: What it reads beside the inputs, made or asked for in the first sweep; by default the first output.
    """

    function: Callable[[Builder, Linearized, Tangents], Tangents]
    attributes: tuple[str, ...] = ()
    residuals: Callable[[Builder, ir.Node], Sequence[Value]] = lambda op, node: node.outputs[:1]


# ----------------------------------------------------------------------------------------------------------------- rows
def _total(op: Builder, parts: Tangents, y: Value) -> Tangents:
    """The sum of what broadcasting joins, in the shape of the output."""
    given = [part for part in parts if part is not None]
    total = given[0]
    for part in given[1:]:
        total = total + part
    dims = total.shape
    same = dims is not None and dims == y.shape and all(isinstance(d, int) or d.value is not None for d in dims)
    return [total if len(given) > 1 or same else op.expand_like(total, y)]


def _add(op: Builder, node: Linearized, tangents: Tangents) -> Tangents:
    return _total(op, tangents, node.residuals[0])


def _mat_mul(op: Builder, node: Linearized, tangents: Tangents) -> Tangents:
    """a' b + a b', without the transposes that a gradient takes."""
    (a, b), (va, vb) = node.inputs, tangents
    products = [op.MatMul(*pair) for pair in ((va, b), (a, vb)) if None not in pair]
    return [products[0] if len(products) == 1 else products[0] + products[1]]


def _gemm(op: Builder, node: Linearized, tangents: Tangents) -> Tangents:
    """Two nodes, each adding what was before: the bias' tangent, a b', a' b. Two sweeps take five."""
    a, b = node.inputs[:2]
    va, vb, vc = [*tangents, None][:3]
    settings = {"alpha": node["alpha"], "transA": node["transA"], "transB": node["transB"]}
    total, beta = vc, node["beta"]
    for left, right in ((a, vb), (va, b)):
        if left is not None and right is not None:
            total = op.Gemm(*[v for v in (left, right, total) if v is not None], beta=None if total is None else beta, **settings)
            beta = 1.0
    if va is None and vb is None and vc is not None:
        total = op.expand_like(op.scale(vc, beta) if beta != 1.0 else vc, node.residuals[0])
    return [total]


def _softmax(op: Builder, node: Linearized, tangents: Tangents) -> Tangents:
    """The Jacobian is symmetric: as the gradient."""
    (v,), (y,) = tangents, node.residuals
    return [None if v is None else through_softmax(op, v, y, node["axis"])]


def _statistics(op: Builder, node: ir.Node) -> Sequence[Value]:
    x = node.inputs[0]
    assert x is not None
    return statistics(op, node, x, attr(node, "axis"), attr(node, "epsilon"), ir.DataType(attr(node, "stash_type")))[1:]


def _layer_normalization(op: Builder, node: Linearized, tangents: Tangents) -> Tangents:
    """scale * (J v) + normal * scale' + bias', J being symmetric: as in the gradient, with 12 nodes where two sweeps take 30."""
    x, scale = node.inputs[:2]
    v, vscale, vbias = [*tangents, None][:3]
    assert x is not None and x.shape is not None
    axes = list(range(node["axis"] % len(x.shape), len(x.shape)))
    mean, inverse = node.residuals
    stash = mean.dtype
    normal = (op.Cast(x, to=stash) - mean) * inverse
    v, vscale, vbias = (None if t is None else op.Cast(t, to=stash) for t in (v, vscale, vbias))
    parts, of_mean, of_inverse = [], None, None
    if v is not None:
        parts.append(normalized(op, v, normal, inverse, axes) * op.Cast(scale, to=stash))
        of_mean = op.ReduceMean(v, axes, keepdims=1)
        of_inverse = -1.0 * (inverse * inverse) * op.ReduceMean(v * normal, axes, keepdims=1)
    if vscale is not None:
        parts.append(normal * vscale)
    if vbias is not None:
        parts.append(vbias if parts else op.expand_like(vbias, x))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return [total, of_mean, of_inverse]


def _python_op(op: Builder, node: Linearized, tangents: Tangents) -> Tangents:
    """A PythonOpTangent: it calls the Function with tangents, as forward mode does in eager."""
    values = {name: a for name, a in node.attributes.items() if name in SPECS}
    kinds = node["input_tensor_types"]
    if len(kinds) != len(node.inputs):
        raise FormatError.damaged("a PythonOp", f"it has {len(node.inputs)} inputs, its attributes say {len(kinds)}")
    given = [None if t is None else op.Cast(t, to=ir.DataType(kind)) for t, kind in zip(tangents, kinds)]
    types, ranks = node["output_tensor_types"], node["output_tensor_ranks"]
    made = ir.Node(OWN_DOMAIN, PYTHON_OP_TANGENT, [*node.inputs, *given], list(values.values()), num_outputs=2 * len(types))
    made.name = op.scope.name(PYTHON_OP_TANGENT)
    made.meta[FORWARD] = node[FORWARD.replace(".", "_")]
    for out in made.outputs:
        out.name = ""
    flags = differentiable_outputs(node["input_requires_grads"], node["output_tensor_requires_grads"], types)
    results: list[Value | None] = [None]
    for out, kind, rank, flag in zip(made.outputs[len(types) :], types, ranks, flags):
        if flag:
            out.name, out.type, out.shape = op.scope.name("tangent"), ir.TensorType(ir.DataType(kind)), ir.Shape([None] * rank)
        results.append(out if flag else None)
    op.add(made)
    return results


def differentiable_outputs(inputs: Sequence[int], outputs: Sequence[int], types: Sequence[int]) -> list[bool]:
    """Which tensor outputs of a PythonOp may have a tangent: those with a gradient; all floats where nothing asked for one at export."""
    floats = [ir.DataType(kind).is_floating_point() for kind in types]
    return [is_float and bool(flag or not any(inputs)) for is_float, flag in zip(floats, outputs)]


_ROWS = {
    ("", "Add"): _Row(_add),
    ("", "MatMul"): _Row(_mat_mul),
    ("", "Gemm"): _Row(_gemm, ("alpha", "beta", "transA", "transB")),
    ("", "Softmax"): _Row(_softmax, ("axis",), lambda op, node: [without_nan(op, node.outputs[0])]),
    ("", "LayerNormalization"): _Row(_layer_normalization, ("axis", "epsilon", "stash_type"), _statistics),
    (ORT_DOMAIN, PYTHON_OP): _Row(_python_op, residuals=lambda op, node: ()),
}


# ------------------------------------------------------------------------------------------------------- the two sweeps
def _placed(op: Builder, node: ir.Node, *gs: Value | None) -> Grads:
    """The gradient of a node of the table, in the first sweep: a placeholder."""
    row = _ROWS[node.domain, node.op_type]
    residuals, cotangents = row.residuals(op, node), list(gs)
    attributes = [a for name, a in node.attributes.items() if not row.attributes or name in row.attributes]
    known = {a.name for a in attributes}
    defaults = ((name, attr(node, name)) for name in row.attributes if name not in known)
    attributes += [ir.convenience.convert_attribute(name, value) for name, value in defaults if value is not None]
    attributes.append(ir.AttrInt64s(_COUNTS, [len(node.inputs), len(residuals)]))
    if (node.domain, node.op_type) == (ORT_DOMAIN, PYTHON_OP):
        _check(node)
        flags = differentiable_outputs(
            *(attr(node, n) for n in ("input_requires_grads", "output_tensor_requires_grads", "output_tensor_types"))
        )
        cotangents = [None, *(g if flag else None for g, flag in zip(cotangents[1:], flags))]
        name = next((o.name for o in node.outputs[1:] if o.name), "")
        attributes.append(ir.AttrString(FORWARD.replace(".", "_"), name or ""))
    wanted = [x in op.scope.active and may_be_float(x) for x in node.inputs]
    if not any(wanted) or not any(g is not None for g in cotangents):
        return {}
    made = op.add(ir.Node(PLACEHOLDER, node.op_type, [*node.inputs, *residuals, *cotangents], attributes, num_outputs=len(node.inputs)))
    made.name = op.scope.name(node.op_type)
    for out, x, want in zip(made.outputs, node.inputs, wanted):
        out.name = op.scope.name("gradient") if want else ""
        if want and x is not None:
            out.type, out.shape = x.type, x.shape
    return [out if want else None for out, want in zip(made.outputs, wanted)]


def _check(node: ir.Node) -> None:
    values = values_of(node)
    check_types(values, SPECS, PYTHON_OP)
    outputs = len(node.outputs) - 1
    counts = (len(values[f"output_tensor_{what}"]) for what in ("types", "ranks", "requires_grads"))
    if len(values["input_tensor_types"]) != len(node.inputs) or any(count != outputs for count in counts):
        raise FormatError.damaged(
            f"the PythonOp {shown(node.name or '')!r}", "its inputs and outputs are not those that its attributes say"
        )


def _through(op: Builder, node: ir.Node, *tangents: Value | None) -> Grads:
    """The gradient of a placeholder, in the second sweep: tangents of the operator's inputs become those of its outputs."""
    inputs, residuals = attr(node, _COUNTS)
    first = inputs + residuals
    place = Linearized(node.inputs[:inputs], [v for v in node.inputs[inputs:first] if v is not None], dict(node.attributes))
    domain = ORT_DOMAIN if node.op_type == PYTHON_OP else ""
    found = _ROWS[domain, node.op_type].function(op, place, tangents)
    return [*[None] * first, *found[: len(node.inputs) - first]]


#: The rules of the first sweep, and those of the second.
LINEAR = {key: Rule(_placed) for key in _ROWS}
TRANSPOSED = {(PLACEHOLDER, op_type): Rule(_through) for _, op_type in _ROWS}
