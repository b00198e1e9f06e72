"""Scatters and gathers of whole rows: numpy's add.at is what they compare with, and no thread loses what another adds."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper

import exporter
from symbolics.graph.slow_operators import rewrite_slow_operators
from symbolics.node.names import ADD_ROWS

_info = helper.make_tensor_value_info


def _model(nodes, inputs, output_rank, initializers=()):
    constants = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in initializers]
    graph = helper.make_graph(nodes, "g", inputs, [_info("y", inputs[0].type.tensor_type.elem_type, [None] * output_rank)], constants)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True))


def _run(model, feeds, threads=1):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)[0]


def _by_elements(op_type, data, rows, axis=0, kind=1, index_kind=7, **attributes):
    """A scatter or gather over a vector ``i`` that is expanded to an index of elements."""
    rank = len(data)
    others = [place for place in range(rank) if place != axis]
    updates = [rows if place == axis else data[place] for place in range(rank)]
    nodes = [
        helper.make_node("Unsqueeze", ["i", "others"], ["thin"]),
        helper.make_node("Shape", ["u"], ["size"]),
        helper.make_node("Expand", ["thin", "size"], ["index"]),
        helper.make_node(op_type, ["x", "index", "u"][: 2 + (op_type == "ScatterElements")], ["y"], axis=axis, **attributes),
    ]
    inputs = [_info("x", kind, data), _info("i", index_kind, [rows]), _info("u", kind, updates)]
    return _model(nodes, inputs, rank, [("others", others)])


def _operators(model):
    return {node.op_type for node in model.graph}


@pytest.mark.parametrize(
    ("shape", "rows", "places"),
    [((80,), 7, 5), ((80,), 0, 5), ((80,), 1, 1), ((4, 20), 200, 3), ((70,), 400, 4), ((64,), 33, 1), ((64,), 34, 1), ((64,), 300, 300)],
)
@pytest.mark.parametrize("known", [True, False], ids=["known sizes", "open sizes"])
def test_segment_sums(shape, rows, places, known):
    """None, one, few and many rows for a place: more than the rounds of halving take together."""
    draw = np.random.default_rng(0)
    declared = (places, rows) if known else ("places", "rows")
    model = _by_elements("ScatterElements", [declared[0], *shape], declared[1], reduction="add")
    assert rewrite_slow_operators(model) == 1
    assert "ScatterElements" not in _operators(model)
    assert (ADD_ROWS in _operators(model)) is not known  # what one thread adds anyway needs no more
    index = draw.integers(-places, places, rows)
    data, updates = (draw.standard_normal((n, *shape)).astype(np.float32) for n in (places, rows))
    expected = data.astype(np.float64)
    np.add.at(expected, index, updates.astype(np.float64))
    found = _run(model, {"x": data, "i": index, "u": updates})()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_along_any_axis(axis):
    draw = np.random.default_rng(axis)
    size = [6, 7, 8]
    updates_size = [25 if place == axis else n for place, n in enumerate(size)]
    data, updates = draw.standard_normal(size).astype(np.float32), draw.standard_normal(updates_size).astype(np.float32)
    index = draw.integers(0, size[axis], 25)
    whole = np.broadcast_to(index.reshape([-1 if place == axis else 1 for place in range(3)]), updates_size)
    expected = data.astype(np.float64)
    places = list(np.indices(updates_size))
    places[axis] = whole
    np.add.at(expected, tuple(places), updates)
    declared = [n if place == axis else f"n{place}" for place, n in enumerate(size)]
    model = _by_elements("ScatterElements", declared, "rows", axis, reduction="add")
    assert rewrite_slow_operators(model) == 1
    np.testing.assert_allclose(_run(model, {"x": data, "i": index, "u": updates})(), expected, rtol=1e-5, atol=1e-5)

    model = _by_elements("GatherElements", declared, "rows", axis)
    assert rewrite_slow_operators(model) == 1
    assert "GatherElements" not in _operators(model)
    found = _run(model, {"x": data, "i": index, "u": updates})()
    np.testing.assert_array_equal(found, np.take_along_axis(data, whole, axis))


@pytest.mark.parametrize(("kind", "dtype"), [(11, np.float64), (6, np.int32), (7, np.int64)])
@pytest.mark.parametrize("index_kind", [6, 7], ids=["int32 index", "int64 index"])
def test_types(kind, dtype, index_kind):
    draw = np.random.default_rng(0)
    model = _by_elements("ScatterElements", ["places", 70], "rows", kind=kind, index_kind=index_kind, reduction="add")
    assert rewrite_slow_operators(model) == 1
    index = draw.integers(0, 9, 50).astype(np.int32 if index_kind == 6 else np.int64)
    data, updates = draw.integers(-9, 9, (9, 70)).astype(dtype), draw.integers(-9, 9, (50, 70)).astype(dtype)
    expected = data.copy()
    np.add.at(expected, index, updates)
    np.testing.assert_array_equal(_run(model, {"x": data, "i": index, "u": updates})(), expected)


@pytest.mark.parametrize(
    ("data", "rows", "attributes"),
    [
        (["places", "width"], "rows", {"reduction": "max"}),
        (["places", "width"], "rows", {}),
    ],
)
def test_scatters_that_stay(data, rows, attributes):
    model = _by_elements("ScatterElements", data, rows, **attributes)
    assert rewrite_slow_operators(model) == 0


def test_an_index_of_elements_stays():
    inputs = [_info("x", 1, [5, 20]), _info("i", 7, ["rows", 20]), _info("u", 1, ["rows", 20])]
    scatter = helper.make_node("ScatterElements", ["x", "i", "u"], ["y"], axis=0, reduction="add")
    assert rewrite_slow_operators(_model([scatter], inputs, 2)) == 0


def test_a_shorter_row_stays():
    """ScatterElements may write to the first elements of a row alone; ScatterND may not."""
    nodes = [
        helper.make_node("Expand", ["thin", "size"], ["index"]),
        helper.make_node("ScatterElements", ["x", "index", "u"], ["y"], axis=0, reduction="add"),
    ]
    inputs = [_info("x", 1, [5, 20]), _info("thin", 7, [3, 1]), _info("u", 1, [3, 10])]
    assert rewrite_slow_operators(_model(nodes, inputs, 2, [("size", [3, 10])])) == 0


def _additions(depth, data, updates, indices=None, reduction="add"):
    inputs = [_info("x", 1, data), _info("u", 1, updates)]
    node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction=reduction)
    if indices is None:
        inputs.append(_info("i", 7, [*updates[: len(updates) - len(data) + depth], depth]))
        return _model([node], inputs, len(data))
    return _model([node], inputs, len(data), [("i", indices)])


@pytest.mark.parametrize("threads", [1, 8])
def test_no_thread_loses_what_another_adds(threads):
    """onnxruntime's own ScatterND does: this is wrong in one run of four with two threads."""
    draw = np.random.default_rng(0)
    model = _additions(1, ["places", 2560], ["rows", 2560])
    assert rewrite_slow_operators(model) == 1
    index = draw.integers(0, 64, 836)
    run = _run(model, {"x": np.zeros((64, 2560), np.float32), "i": index[:, None], "u": np.ones((836, 2560), np.float32)}, threads)
    for _ in range(20):
        np.testing.assert_array_equal(run(), np.broadcast_to(np.bincount(index, minlength=64)[:, None], (64, 2560)))


@pytest.mark.parametrize(
    ("depth", "data", "batch"),
    [
        (2, (4, 5, 40), (30, 11)),
        (2, (4, 5), (3000,)),
        (3, (4, 5, 6), (700, 2)),
        (1, (9,), (500,)),
        (1, (9, 2), (20, 30)),
        (1, (9, 70), (20, 30)),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["known sizes", "open sizes"])
def test_additions_at_places_of_several_axes(depth, data, batch, known):
    draw = np.random.default_rng(0)
    declared = data if known else [f"d{n}" for n in range(len(data))]
    names = batch if known else [f"b{n}" for n in range(len(batch))]
    model = _additions(depth, declared, [*names, *declared[depth:]])
    one_thread = known and np.prod([*batch, *data[depth:]]) * 4 <= 2**17
    assert rewrite_slow_operators(model) == (not one_thread)
    x, u = draw.standard_normal(data).astype(np.float32), draw.standard_normal((*batch, *data[depth:])).astype(np.float32)
    index = np.stack([draw.integers(-n, n, batch) for n in data[:depth]], -1)
    expected = x.astype(np.float64)
    np.add.at(expected, tuple(np.moveaxis(index, -1, 0)), u)
    np.testing.assert_allclose(_run(model, {"x": x, "i": index, "u": u})(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("reduction", "ufunc"), [("max", np.maximum), ("min", np.minimum), ("mul", np.multiply)])
def test_other_reductions(reduction, ufunc):
    """They lose what another thread wrote as additions do."""
    draw = np.random.default_rng(0)
    for depth, data, batch in ((1, (7, 30), (50,)), (2, (4, 5, 20), (30, 2)), (2, (4, 5), (60,))):
        names = [f"d{n}" for n in range(len(data))]
        model = _additions(depth, names, [*(f"b{n}" for n in range(len(batch))), *names[depth:]], reduction=reduction)
        assert rewrite_slow_operators(model) == 1
        assert "ScatterND" not in _operators(model)
        x, u = draw.standard_normal(data).astype(np.float32), draw.standard_normal((*batch, *data[depth:])).astype(np.float32)
        index = np.stack([draw.integers(-n, n, batch) for n in data[:depth]], -1)
        expected = x.copy()
        ufunc.at(expected, tuple(np.moveaxis(index, -1, 0)), u)
        np.testing.assert_allclose(_run(model, {"x": x, "i": index, "u": u})(), expected, rtol=1e-5, atol=1e-6)


def test_places_that_are_written_to_once_stay():
    once, twice = [[0], [2], [-2]], [[0], [2], [-3]]
    assert rewrite_slow_operators(_additions(1, [5, 100000], [3, 100000], once)) == 0
    assert rewrite_slow_operators(_additions(1, [5, 100000], [3, 100000], twice)) == 1


def test_the_gradient_of_an_addition():
    """A file with the function in it is differentiated: the cotangent goes to the data, its rows to the rows."""
    model = _additions(1, ["places", 70], ["rows", 70])
    rewrite_slow_operators(model)
    training = exporter.build_gradient_graph(ir.to_proto(model), wrt=["x", "u"])
    draw = np.random.default_rng(0)
    index, g = draw.integers(0, 6, (50, 1)), draw.standard_normal((6, 70)).astype(np.float32)
    feeds = {"x": np.zeros((6, 70), np.float32), "i": index, "u": np.ones((50, 70), np.float32), "y_grad": g}
    session = onnxruntime.InferenceSession(ir.to_proto(training).SerializeToString(), providers=["CPUExecutionProvider"])
    dx, du = session.run(["x_grad", "u_grad"], feeds)
    np.testing.assert_array_equal(dx, g)
    np.testing.assert_array_equal(du, g[index[:, 0]])


def test_the_gradient_of_a_gather_adds_rows():
    nodes = [helper.make_node("Gather", ["x", "i"], ["y"])]
    model = _model(nodes, [_info("x", 1, ["places", 70]), _info("i", 7, ["rows"])], 2)
    training = exporter.build_gradient_graph(ir.to_proto(model), wrt=["x"])
    assert ADD_ROWS in _operators(training)
    draw = np.random.default_rng(0)
    index, g = draw.integers(0, 6, 50), draw.standard_normal((50, 70)).astype(np.float32)
    expected = np.zeros((6, 70))
    np.add.at(expected, index, g)
    session = onnxruntime.InferenceSession(ir.to_proto(training).SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(
        session.run(["x_grad"], {"x": np.zeros((6, 70), np.float32), "i": index, "y_grad": g})[0], expected, rtol=1e-5, atol=1e-5
    )
