"""What is made in place of a node computes what the node computes, in every form that its operator has."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from symbolics.graph.builder import Builder
from symbolics.graph.emitter import Emitter
from symbolics.graph.peepholes import PEEPHOLES
from symbolics.graph.scope import Scope
from symbolics.graph.values import attr
from symbolics.graph.walk import prune

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def value(name, shape, dtype=FLOAT):
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape))


def built(op_class, write, shapes):
    """The nodes of ``write(op, *inputs)``, and what they compute of random inputs; each input is (name, dims, known dims)."""
    scope = Scope("t/", lambda v: True)
    op = op_class(scope)
    inputs = [value(f"x{i}", known) for i, (_, known) in enumerate(shapes)]
    y = write(op, *inputs)
    op.nodes.append(ir.Node("", "Identity", [y], name="end"))
    out = op.nodes[-1].outputs[0]
    out.name, out.type = "y", y.type
    nodes = prune(op.nodes, [out])
    graph = ir.Graph(inputs, [out], nodes=nodes, name="t", opset_imports={"": 21})
    scope.register(graph)
    rng = np.random.default_rng(0)
    feeds = {f"x{i}": rng.standard_normal(dims).astype(np.float32) for i, (dims, _) in enumerate(shapes)}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    data = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    result = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    return [n.op_type for n in nodes[:-1]], result, y


def known(dims):
    """The dims, some of them, and none."""
    yield dims
    if dims:
        yield ["n", *dims[1:]]
        yield [None] * len(dims)
    yield None


FORMS = {
    "reshape": ([(2, 3, 4)], lambda op, x: op.Reshape(x, [6, 4])),
    "reshape fills": ([(2, 3, 4)], lambda op, x: op.Reshape(x, [-1, 4])),
    "reshape copies": ([(2, 3, 4)], lambda op, x: op.Reshape(x, [0, -1])),
    "reshape by a constant": ([(2, 3, 4)], lambda op, x: op.Reshape(x, op.i64([4, 6]))),
    "reshape by a computed shape": ([(2, 3, 4)], lambda op, x: op.Reshape(x, op.Shape(op.Reshape(x, [8, 3])))),
    "reshape to a value and a number": ([(2, 3, 4)], lambda op, x: op.Reshape(x, [op.Shape(x, start=1, end=2), -1])),
    "reshape to a scalar": ([(1,)], lambda op, x: op.Reshape(x, op.constant([], INT64))),
    "reshape of nothing, zeros allowed": ([(0, 3)], lambda op, x: op.Reshape(x, [3, 0], allowzero=1)),
    "reshape of nothing, copied": ([(0, 3)], lambda op, x: op.Reshape(x, [0, 3, 1])),
    "reshape of nothing, filled": ([(0, 3)], lambda op, x: op.Reshape(x, [-1, 3, 1])),
    "reshape back": ([(2, 3, 4)], lambda op, x: op.Reshape(op.Reshape(x, [6, 4]), [2, 3, 4])),
    "reshape of a reshape": ([(2, 3, 4)], lambda op, x: op.Reshape(op.Reshape(x, [6, 4]), [3, -1])),
    "reshape of a product": ([(6, 4), (2, 3, 4)], lambda op, x, z: op.Reshape(op.Mul(op.Reshape(x, [2, 3, 4]), z), [6, 4])),
    "reshape of a broadcast product": ([(6, 4), (4,)], lambda op, x, z: op.Reshape(op.Mul(op.Reshape(x, [2, 3, 4]), z), [6, 4])),
    "reshape of a transpose": (
        [(2, 3, 4, 5)],
        lambda op, x: op.Reshape(op.Transpose(op.Reshape(x, [6, 4, 5]), perm=[0, 2, 1]), [2, 3, 5, 4]),
    ),
    "reshape of a transpose, otherwise": (
        [(2, 3, 4, 5)],
        lambda op, x: op.Reshape(op.Transpose(op.Reshape(x, [6, 4, 5]), perm=[0, 2, 1]), [2, 3, 4, 5]),
    ),
    "reshape of integers": ([(2,)], lambda op, x: op.CastLike(op.Reshape(op.i64([1, 2, 3, 4]), [2, -1]), x)),
    "transpose": ([(2, 3, 4)], lambda op, x: op.Transpose(x, perm=[2, 0, 1])),
    "transpose around": ([(2, 3, 4)], lambda op, x: op.Transpose(x)),
    "transpose twice": ([(2, 3, 4)], lambda op, x: op.Transpose(op.Transpose(x, perm=[2, 0, 1]), perm=[0, 2, 1])),
    "transpose there and back": ([(2, 3, 4)], lambda op, x: op.Transpose(op.Transpose(x, perm=[2, 0, 1]), perm=[1, 2, 0])),
    "transpose around twice": ([(2, 3, 4)], lambda op, x: op.Transpose(op.Transpose(x))),
    "transpose not": ([(2, 3, 4)], lambda op, x: op.Transpose(x, perm=[0, 1, 2])),
    **{
        f"transpose of a product {a}{b}": (
            [(3, 2) if a else (2, 3), (4, 3) if b else (3, 4)],
            lambda op, x, z, a=a, b=b: op.Transpose(op.Gemm(x, z, transA=a, transB=b, alpha=0.5), perm=[1, 0]),
        )
        for a, b in itertools.product((0, 1), repeat=2)
    },
    "transpose of a product and a sum": ([(2, 3), (3, 4), (4,)], lambda op, x, z, c: op.Transpose(op.Gemm(x, z, c), perm=[1, 0])),
    "concat": ([(2, 3), (2, 4)], lambda op, x, z: op.Concat(x, z, axis=-1)),
    "concat of one": ([(2, 3)], lambda op, x: op.Concat(x, axis=0)),
    "concat with a list": ([(2, 3)], lambda op, x: op.CastLike(op.Concat([1, 1], op.Shape(x), axis=0), x)),
    "concat of reshaped": ([(2, 3, 4), (2, 5, 4)], lambda op, x, z: op.Concat(op.Reshape(x, [2, 12]), op.Reshape(z, [2, 20]), axis=-1)),
    "concat of reshaped otherwise": ([(2, 3, 4), (2, 2, 6)], lambda op, x, z: op.Concat(op.Reshape(x, [2, 12]), op.Reshape(z, [2, 12]), axis=1)),
    "concat of reshaped, other axis": ([(2, 3, 4), (2, 5, 4)], lambda op, x, z: op.Concat(op.Reshape(x, [6, 4]), op.Reshape(z, [10, 4]), axis=0)),
    "concat of reshaped scalars": ([(), ()], lambda op, x, z: op.Concat(op.Reshape(x, [1]), op.Reshape(z, [1]), axis=0)),
    "concat of transposed and reshaped": (
        [(2, 4, 3), (2, 4, 5)],
        lambda op, x, z: op.Concat(
            op.Reshape(op.Transpose(x, perm=[0, 2, 1]), [2, 12]), op.Reshape(op.Transpose(z, perm=[0, 2, 1]), [2, 20]), axis=1
        ),
    ),
    "pad": ([(3, 4)], lambda op, x: op.Pad(x, [1, 0, 0, 2])),
    "pad by nothing": ([(3, 4)], lambda op, x: op.Pad(x, [0, 0, 0, 0], None, None, mode="edge")),
    "pad and cut": ([(3, 4)], lambda op, x: op.Pad(x, [-1, 1, 2, -3])),
    "pad with a number": ([(3, 4)], lambda op, x: op.Pad(x, [-1, 1, 2, 0], 7.0)),
    "pad an axis from the end": ([(3, 4)], lambda op, x: op.Pad(x, [-1, -1], None, [-1])),
    "pad by constants": ([(3, 4)], lambda op, x: op.Pad(x, op.i64([-1, 2]), None, op.i64([1]))),
    "pad at an edge": ([(3, 4)], lambda op, x: op.Pad(x, [1, 0, 0, 2], mode="edge")),
    "pad by a computed amount": ([(3, 4)], lambda op, x: op.Pad(x, [op.Shape(x, start=0, end=1), 0], None, [1])),
    "shape": ([(2, 3, 4)], lambda op, x: op.Cast(op.Shape(x), to=FLOAT)),
    "part of a shape": ([(2, 3, 4)], lambda op, x: op.Cast(op.Shape(x, start=-2, end=9), to=FLOAT)),
    "size": ([(2, 3, 4)], lambda op, x: op.Cast(op.Size(x), to=FLOAT)),
    "cast to its own type": ([(2, 3)], lambda op, x: op.Cast(x, to=FLOAT)),
    "arithmetic of sizes": ([(2, 3)], lambda op, x: op.Cast(op.Max(op.Sub(op.Size(x), 4), op.Mul(op.Shape(x), [1, 2])), to=FLOAT)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_form_computes_the_same(name):
    dims, write = FORMS[name]
    for k, combination in enumerate(itertools.product(*[list(known(list(d))) for d in dims])):
        shapes = list(zip(dims, combination, strict=True))
        raw, expected, _ = built(Emitter, write, shapes)
        smart, got, y = built(Builder, write, shapes)
        np.testing.assert_array_equal(got.shape, expected.shape)
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        assert len(smart) <= len(raw) + (name.startswith("pad")), combination  # one that cuts off and pads becomes two nodes
        if y.shape is not None and k == 0:
            assert tuple(y.shape) == expected.shape


@pytest.mark.parametrize(
    ("name", "nodes"),
    {
        "reshape back": [],
        "transpose there and back": [],
        "transpose twice": ["Transpose"],
        "reshape of a reshape": ["Reshape"],
        "reshape of a transpose": ["Transpose"],
        "pad by nothing": [],
        "pad an axis from the end": ["Slice"],
        "shape": ["Cast"],
        "cast to its own type": [],
        "concat of transposed and reshaped": ["Concat", "Transpose", "Reshape"],
    }.items(),
)
def test_known_shapes_save_nodes(name, nodes):
    dims, write = FORMS[name]
    scope = Scope("t/", lambda v: True)
    op = Builder(scope)
    y = write(op, *[value(f"x{i}", d) for i, d in enumerate(dims)])
    used, found = {y}, []
    for node in reversed(op.nodes):
        if used & set(node.outputs):
            used.update(v for v in node.inputs if v is not None)
            found.append(node.op_type)
    assert found[::-1] == nodes


def test_what_is_asked_twice_is_made_once():
    op = Builder(Scope("t/", lambda v: True))
    x = value("x", ["n", 4])
    assert op.Reshape(x, [-1]) is op.Reshape(x, op.i64([-1]))
    assert op.Shape(x) is op.child().Shape(x)
    assert op.dim(x, 1) == 4
    assert [n.op_type for n in op.nodes] == ["Reshape", "Shape"]


def test_the_table_names_operators():
    assert set(PEEPHOLES) == {
        "Add",
        "Sub",
        "Mul",
        "Neg",
        "Max",
        "Min",
        "Shape",
        "Size",
        "Cast",
        "Reshape",
        "Transpose",
        "Concat",
        "Pad",
        "ScatterND",
        "ScatterElements",
    }


@pytest.mark.parametrize(
    ("op_type", "name", "default"),
    [("LeakyRelu", "alpha", 0.01), ("Gemm", "transA", 0), ("Pad", "mode", "constant"), ("Transpose", "perm", None), ("DFT", "axis", 1), ("Mine", "x", None)],
)  # fmt: skip
def test_an_attribute_that_is_absent_has_the_schemas_default(op_type, name, default):
    node = ir.Node("my.domain" if op_type == "Mine" else "", op_type, [])
    assert attr(node, name) == (pytest.approx(default) if isinstance(default, float) else default)
    assert attr(node, name, 5) == 5
    node.attributes[name] = ir.AttrInt64(name, 7)
    assert attr(node, name) == 7
