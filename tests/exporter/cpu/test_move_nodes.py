"""The node that moves elements, as a file may hold it: every number of it is looked at."""

from __future__ import annotations

import contextlib

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from exporter.cpu.moves import REARRANGE
from exporter.cpu.operators import DOMAIN
from exporter.cpu.views import Axis, View, in_turn
from symbolics.errors import RunError
from tests.exporter.cpu.support import inference_session

GOOD = {"source": [2, 6], "starts": [0, 0], "sizes": [6, 2], "steps": [0, 1, 1, 0], "shape": [6, 2]}

BIG = 2**62


@pytest.mark.parametrize(
    "change",
    [
        {"source": [-1, -1]},
        {"source": []},
        {"source": [2] * 17},
        {"starts": [0]},
        {"starts": [BIG, 0]},
        {"sizes": [12]},
        {"sizes": [-2, 2]},
        {"sizes": [6] * 17, "steps": [0] * 34},
        {"steps": [0, 1, 1]},
        {"steps": [BIG, 1, 1, 0]},
        {"shape": [-1, -1]},
        {"shape": []},
    ],
    ids=lambda change: " ".join(f"{k} {str(v)[:20]}" for k, v in change.items()),
)
def test_a_node_of_a_file_that_stands_for_nothing_is_refused(change):
    with pytest.raises(RunError, match="stands for no operators"):
        inference_session(_own(GOOD | change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": [6, 3]}, "another size than its shape"),
        ({"shape": [5, -1]}, "another size than its shape"),
        ({"sizes": [2**40, 2**40], "shape": [-1]}, "larger than memory"),
        ({"shape": [2**39, 2**39]}, "larger than memory"),
        ({"sizes": [2**39, 2], "steps": [0, 1, 2**39, 0], "shape": [-1]}, "of no size"),
        ({"starts": [0, 2**40], "source": [2, 6]}, None),
        ({"source": [2, 7]}, "another shape than it has"),
        ({"source": [2, 6, 1], "starts": [0, 0, 0], "steps": [0, 1, 1, 0, 0, 0]}, "another shape than it has"),
    ],
)
def test_numbers_of_a_file_are_looked_at(change, said):
    session = inference_session(_own(GOOD | change))
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    if said is None:  # all of it lies outside
        assert not session.run(None, {"x": x})[0].any()
        return
    with pytest.raises(RunError, match=said):
        session.run(None, {"x": x})


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ((4, 0), {"source": [4, 0], "sizes": [2**40, 1], "steps": [2**40, 0, 0, 0], "shape": [-1]}),
        ((2, 6), {"sizes": [0, 2**40], "shape": [0]}),
        ((0, 2**40), {"source": [0, 2**40], "sizes": [3, 2], "shape": [3, 2]}),
    ],
)
def test_numbers_that_are_too_large_for_an_empty_tensor(shape, change):
    session = inference_session(_own(GOOD | change))
    with contextlib.suppress(RunError):
        assert not session.run(None, {"x": np.zeros(shape, np.float32)})[0].any()


def test_every_place_is_inside_or_zero():
    """Steps and starts at random, against what the header says a node is."""
    rng = np.random.default_rng(0)
    x = np.arange(1, 25, dtype=np.float32).reshape(4, 6)
    for _ in range(200):
        axes = int(rng.integers(2, 5))
        sizes = rng.integers(1, 6, axes)
        starts, steps = rng.integers(-4, 8, 2), rng.integers(-3, 4, (2, axes)) * (rng.random((2, axes)) < 0.6)
        node = {"source": [4, 6], "starts": starts, "sizes": sizes, "steps": steps.ravel(), "shape": sizes}
        places = np.tensordot(steps, np.indices(sizes), 1) + starts.reshape(2, *(1,) * axes)
        inside = ((places >= 0) & (places < np.reshape([4, 6], (2, *(1,) * axes)))).all(0)
        expected = np.where(inside, x[tuple(np.clip(p, 0, n - 1) for p, n in zip(places, x.shape, strict=True))], 0)
        np.testing.assert_array_equal(inference_session(_own(node)).run(None, {"x": x})[0], expected)


def _own(attributes):
    node = onnx.helper.make_node(REARRANGE, ["x"], ["y"], domain=DOMAIN)
    for name, numbers in attributes.items():
        node.attribute.append(onnx.AttributeProto(name=name, type=onnx.AttributeProto.INTS, ints=[int(v) for v in numbers]))
    graph = onnx.helper.make_graph(
        [node], "g", [onnx.helper.make_tensor_value_info("x", 1, None)], [onnx.helper.make_tensor_value_info("y", 1, None)]
    )
    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid(DOMAIN, 1)], ir_version=9
    )


# --------------------------------------------------------------------------------------------------------------- views
def test_places_that_follow_one_another():
    assert in_turn(np.array([[0], [1], [2], [10], [11], [12]])) == (Axis(2, (10,)), Axis(3, (1,)))
    assert in_turn(np.array([[3, 1]])) == ()
    assert in_turn(np.array([[0], [1], [3]])) is None and in_turn(np.array([[0], [1], [5], [7]])) is None


def test_axes_that_go_on_are_one():
    view = View.of(ir.val("x"), (4, 6)).reshaped([2, 2, 3, 2])
    assert view is not None and [axis.size for axis in view.axes()] == [4, 6] and view.is_straight
