"""Sums by channels out of the chains before them, and BatchNormalizations as parts of chains: float64's numbers, whatever a file says."""

from __future__ import annotations

import time

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import exporter
from exporter.cpu import elementwise
from exporter.cpu.channels import sum_by_channels
from exporter.cpu.elementwise import ELEMENTWISE, FUNCTIONS, fuse
from exporter.cpu.operators import DOMAIN
from exporter.errors import PythonopError
from exporter.training.trainer import Trainer
from tests.exporter.cpu.support import inference_session, rewrite_convolutions, session_options

KINDS = {np.float32: TensorProto.FLOAT, np.float64: TensorProto.DOUBLE}
#: A channel more than a block, several in one, more than so many; no image; of other ranks.
SHAPES = [(2, 17, 40, 50), (3, 16, 5, 7), (2, 150, 4, 4), (0, 16, 4, 4), (4, 16, 19), (2, 16, 3, 2, 5), (1, 16, 4, 4)]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Chains of few elements are made as well."""
    monkeypatch.setattr(elementwise, "_FEW_ELEMENTS", 0)


def model(nodes, inputs, outputs, kind=np.float32, said=None):
    """A model of (operator, inputs, output, attributes); shapes of inputs, outputs and what else the file says."""

    def infos(shapes):
        return [helper.make_tensor_value_info(name, KINDS[kind], shape) for name, shape in shapes.items()]

    made, constants = [], []
    for op, reads, writes, *more in nodes:
        attributes = dict(more[0]) if more else {}
        if op == "ReduceSum" and (axes := attributes.pop("axes", None)) is not None:
            constants.append(numpy_helper.from_array(np.array(axes, np.int64), f"{writes}/axes"))
            reads = [*reads, constants[-1].name]
        made.append(helper.make_node(op, reads, [writes], **attributes))
    graph = helper.make_graph(made, "g", infos(inputs), infos(outputs), value_info=infos(said or {}), initializer=constants)
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))


def summed(made):
    """Fuse, and let chains give out sums; how many they do."""
    facts: dict = {}
    fuse(made, facts=facts)
    return sum_by_channels(made, facts)


def kinds(made):
    return [node.op_type for node in made.graph]


def chain_of(shape, kind=np.float32, keepdims=0, axes=None, **more):
    """The sums of y = (x - c) * x, of z = y + x, and of z * z; and z."""
    axes = [0, *range(2, len(shape))] if axes is None else axes
    nodes = [
        ("Sub", ["x", "c"], "d"),
        ("Mul", ["d", "x"], "y"),
        ("Add", ["y", "x"], "z"),
        ("Mul", ["z", "z"], "q"),
        ("ReduceSum", ["y"], "s", {"axes": axes, "keepdims": keepdims}),
        ("ReduceSum", ["q"], "t", {"axes": [axis - len(shape) for axis in axes], "keepdims": keepdims}),
        ("ReduceSum", ["z"], "u", {"axes": axes[::-1], "keepdims": keepdims}),
    ]
    c = (shape[1], *[1] * (len(shape) - 2))
    return model(nodes, {"x": shape, "c": c}, {"s": None, "t": None, "u": None, "z": None}, kind, **more)


def feeds_of(shape, kind=np.float32):
    generator = np.random.default_rng(0)
    return {
        "x": generator.standard_normal(shape).astype(kind),
        "c": generator.standard_normal((shape[1], *[1] * (len(shape) - 2))).astype(kind),
    }


@pytest.mark.parametrize("opened", [False, True], ids=["", "open batch"])
@pytest.mark.parametrize("kind", KINDS, ids=["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_float64s(shape, kind, opened):
    made, feeds = chain_of(("n", *shape[1:]) if opened else shape, kind), feeds_of(shape, kind)
    assert summed(made) == 3
    assert kinds(made) == [ELEMENTWISE]
    assert len(made.graph[0].outputs) == 4, "y and q are read by their sums alone"
    x, c = (feeds[name].astype(np.float64) for name in ("x", "c"))
    y, axes = (x - c) * x, (0, *range(2, len(shape)))
    found = []
    for threads in (1, 2, 3):
        options = session_options(())
        options.intra_op_num_threads = threads
        found.append(inference_session(ir.to_proto(made), sess_options=options).run(None, feeds))
    for ours, theirs in zip(found[0], [y.sum(axes), ((y + x) ** 2).sum(axes), (y + x).sum(axes), y + x], strict=True):
        assert ours.dtype == kind and ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-12 if kind is np.float64 else 2e-6, atol=1e-9 if kind is np.float64 else 1e-4)
    for others in found[1:]:
        assert all(one.tobytes() == other.tobytes() for one, other in zip(found[0], others, strict=True)), "whatever the threads"


def test_a_sum_of_a_million_of_one_sign():
    shape = (4, 16, 512, 512)
    nodes = [("Mul", ["x", "x"], "y"), ("Add", ["y", "x"], "z"), ("ReduceSum", ["z"], "s", {"axes": [0, 2, 3], "keepdims": 0})]
    made, x = model(nodes, {"x": shape}, {"s": None}), np.random.default_rng(0).random(shape, np.float32)
    assert summed(made) == 1
    wide = x.astype(np.float64)
    np.testing.assert_allclose(inference_session(ir.to_proto(made)).run(None, {"x": x})[0], (wide * wide + wide).sum((0, 2, 3)), rtol=5e-7)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((4, 16, 4, 4), {"keepdims": 1}),
        ((4, 15, 9, 9), {}),
        ((16, 16, 5, 3), {}),
        ((4, 16, 6, 6), {"axes": [0, 2]}),
        ((4, 16, 6, 6), {"axes": [0, 1, 2]}),
        ((4, 16, 6, 6), {"axes": [2, 3]}),
        ((64, 64), {"axes": [0]}),
    ],
    ids=str,
)
def test_others_stay_what_they_are(shape, options):
    made = chain_of(shape, **options)
    assert summed(made) == 0
    assert kinds(made).count("ReduceSum") == 3


def test_what_is_no_constant_or_no_chain_stays():
    x = (4, 16, 8, 8)
    sums = [
        ("ReduceSum", ["x"], "s", {"axes": [0, 2, 3], "keepdims": 0}),
        ("Exp", ["x"], "e"),
        ("Mul", ["e", "x"], "m"),
        ("Add", ["m", "x"], "y"),
    ]
    made = model(
        [*sums, ("Exp", ["y"], "f"), ("ReduceSum", ["f"], "t", {"axes": [0, 2, 3], "keepdims": 0})],
        {"x": x},
        {"s": None, "t": None, "y": None},
    )
    assert summed(made) == 0
    made = chain_of(x)
    for node in made.graph:
        if node.op_type == "ReduceSum":
            axes = node.inputs[1]
            made.graph.inputs.append(axes)  # which a caller may give
    assert summed(made) == 0


def test_no_more_sums_than_there_is_room_for():
    sums = [("ReduceSum", ["y"], f"s{i}", {"axes": [0, 2, 3], "keepdims": 0}) for i in range(6)]
    made = model([("Mul", ["x", "x"], "d"), ("Add", ["d", "x"], "y"), *sums], {"x": (4, 16, 8, 8)}, {f"s{i}": None for i in range(6)})
    assert summed(made) == 4
    x = np.random.default_rng(0).standard_normal((4, 16, 8, 8)).astype(np.float32)
    for found in inference_session(ir.to_proto(made)).run(None, {"x": x}):
        np.testing.assert_allclose(found, (x * x + x).sum((0, 2, 3)), rtol=1e-5, atol=1e-4)


def test_a_chain_that_has_no_room_keeps_what_it_makes(monkeypatch):
    from exporter.cpu import channels

    monkeypatch.setattr(channels, "TEMPORARIES", 1)
    made, feeds = chain_of((3, 16, 5, 7)), feeds_of((3, 16, 5, 7))
    expected = inference_session(ir.to_proto(made)).run(None, feeds)
    assert summed(made) == 3
    assert len(made.graph[0].outputs) > 4
    for ours, theirs in zip(inference_session(ir.to_proto(made)).run(None, feeds), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def test_sums_wait_for_their_readers():
    """Or a chain ends in front of them."""
    nodes = [
        ("Mul", ["x", "x"], "d"),
        ("Sub", ["d", "x"], "y"),
        ("ReduceSum", ["y"], "s", {"axes": [0, 2, 3], "keepdims": 0}),
        ("ReduceSum", ["s"], "total", {"keepdims": 0}),
        ("Mul", ["y", "x"], "p"),
        ("Mul", ["p", "x"], "q"),
        ("Exp", ["q"], "e"),
        ("Div", ["e", "total"], "z"),
    ]
    made, x = model(nodes, {"x": (2, 16, 4, 4)}, {"z": None}), np.random.default_rng(0).standard_normal((2, 16, 4, 4)).astype(np.float32)
    expected = onnxruntime.InferenceSession(ir.to_proto(made).SerializeToString()).run(None, {"x": x})[0]
    assert summed(made) == 1
    assert kinds(made) == [ELEMENTWISE, "Exp", "ReduceSum", "Div"]
    np.testing.assert_allclose(inference_session(ir.to_proto(made)).run(None, {"x": x})[0], expected, rtol=1e-4)


def test_a_sum_that_a_body_reads_stays_in_front_of_it():
    x = (2, 16, 4, 4)
    body = helper.make_graph([helper.make_node("Mul", ["s", "s"], ["r"])], "body", [], [helper.make_tensor_value_info("r", 1, [16])])
    made = ir.to_proto(
        model(
            [("Mul", ["x", "x"], "y"), ("ReduceSum", ["y"], "s", {"axes": [0, 2, 3], "keepdims": 0}), ("Exp", ["y"], "e")],
            {"x": x},
            {"e": None},
        )
    )
    made.graph.node.append(helper.make_node("If", ["b"], ["z"], then_branch=body, else_branch=body))
    made.graph.node.append(helper.make_node("Exp", ["s"], ["w"]))
    made.graph.input.append(helper.make_tensor_value_info("b", TensorProto.BOOL, []))
    made.graph.output.extend(helper.make_tensor_value_info(name, 1, [16]) for name in "zw")
    graph = ir.from_proto(made)
    fuse(graph)
    assert kinds(graph) == ["Mul", "ReduceSum", "Exp", "If", "Exp"]


# --------------------------------------------------------------------------------------------------- nodes of a file
def node(program, inputs, outputs, **more):
    names = [f"x{i}" for i in range(inputs)], [f"y{i}" for i in range(outputs)]
    made = helper.make_node(ELEMENTWISE, *names, domain=DOMAIN, program=program, **({"full": 0, "rank": 2} | more))
    infos = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in group] for group in names)
    proto = helper.make_model(helper.make_graph([made], "g", *infos), opset_imports=[helper.make_opsetid(DOMAIN, 1)], ir_version=10)
    return inference_session(proto)


SUM, ADD = FUNCTIONS["Sum"], FUNCTIONS["Add"]


@pytest.mark.parametrize(
    "program",
    [
        [SUM, 1, 2, 2],  # of what nobody wrote
        [ADD, 1, 0, 0, SUM, 1, 0, 0],  # where numbers are
        [SUM, 1, 0, 0, SUM, 1, 0, 0],  # twice
        [SUM, 1, 0, 0, ADD, 1, 0, 0],  # numbers where a sum is
        [SUM, 1, 0, 0, ADD, 2, 1, 0],  # a sum as an operand
        [SUM, 1, 0, 0, SUM, 2, 1, 1],
        [SUM, 3, 0, 0, ADD, 1, 0, 0],  # among what is between
        [SUM, 0, 0, 0, ADD, 1, 0, 0],  # where an input is
        [SUM, 1, -1, 0], [SUM, 1, 99, 0], [SUM, 1, 0, 99], [SUM, 99, 0, 0], [len(FUNCTIONS), 1, 0, 0],
    ],
    ids=str,
)  # fmt: skip
def test_programs_that_stand_for_nothing_are_refused(program):
    with pytest.raises(PythonopError, match="stands for no chain"):
        node(program, 1, 1)


def test_five_sums_are_refused():
    node([n for i in range(4) for n in (SUM, 1 + i, 0, 0)], 1, 4)
    with pytest.raises(PythonopError, match="stands for no chain"):
        node([n for i in range(5) for n in (SUM, 1 + i, 0, 0)], 1, 5)


@pytest.mark.parametrize("rank", [0, 1, 17, -1, "two"], ids=str)
def test_other_ranks_are_refused(rank):
    with pytest.raises(PythonopError, match="stands for no chain"):
        node([SUM, 1, 0, 0], 1, 1, rank=rank)


@pytest.mark.parametrize("shape", [(), (7,), (1,), (2, 16, 3)], ids=str)
def test_what_has_other_dims_than_said_is_refused(shape):
    session = node([ADD, 2, 0, 1, SUM, 3, 2, 2], 2, 2)
    for other in (shape, (1,)):
        with pytest.raises(PythonopError, match="other dims than the file says"):
            session.run(None, {"x0": np.ones(shape, np.float32), "x1": np.ones(other, np.float32)})


@pytest.mark.parametrize(
    "shapes", [((2, 3), (2, 3)), ((4, 1, 2), (3, 1)), ((1, 5, 1), (2, 1, 3)), ((0, 4), (4,)), ((3, 0, 2), (1,)), ((2, 3), ())], ids=str
)
def test_shapes_that_only_broadcast(shapes):
    x, y = (np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes))
    total, both = node([ADD, 3, 0, 1, SUM, 2, 3, 3], 2, 2, rank=x.ndim).run(None, {"x0": x, "x1": y})
    np.testing.assert_array_equal(both, x + y)
    axes = tuple(axis for axis in range((x + y).ndim) if axis != 1)
    np.testing.assert_allclose(total, (x + y).astype(np.float64).sum(axes), rtol=1e-5, atol=1e-6)


HUGE = 2**62


@pytest.mark.parametrize("dims", [[0, HUGE], [0, HUGE, 1], [2**58, 16, 0], [0, 16, HUGE]], ids=str)
def test_an_empty_tensor_of_huge_dims_is_refused_or_summed_at_once(dims):
    made = helper.make_node(ELEMENTWISE, ["e", "x"], ["y"], domain=DOMAIN, program=[SUM, 2, 0, 0], full=1, rank=len(dims))
    shape = numpy_helper.from_array(np.array(dims, np.int64), "shape")
    graph = helper.make_graph(
        [helper.make_node("ConstantOfShape", ["shape"], ["e"]), made], "g", [helper.make_tensor_value_info("x", 1, None)],
        [helper.make_tensor_value_info("y", 1, None)], [shape],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)], ir_version=10)
    begin = time.monotonic()
    try:
        (found,) = inference_session(proto).run(None, {"x": np.ones((1,) * len(dims), np.float32)})
    except PythonopError:
        pass
    else:
        assert found.shape == (dims[1],) and not found.any()
    assert time.monotonic() - begin < 20


def test_what_the_file_says_of_a_sum_is_not_believed():
    nodes = [
        ("Mul", ["x", "x"], "y"),
        ("Add", ["y", "x"], "z"),
        ("ReduceSum", ["z"], "s", {"axes": [0, 2, 3], "keepdims": 0}),
        ("Exp", ["s"], "e"),
    ]
    made = model(nodes, {"x": (4, 16, 8, 8)}, {"e": None}, said={"s": (32,)})
    graph = ir.to_proto(made)
    graph.graph.node.append(helper.make_node("Shape", ["s"], ["n"]))
    graph.graph.output.append(helper.make_tensor_value_info("n", TensorProto.INT64, None))
    made = ir.from_proto(graph)
    assert summed(made) == 1
    assert inference_session(ir.to_proto(made)).run(["n"], {"x": np.ones((4, 16, 8, 8), np.float32)})[0].tolist() == [16]


def test_axes_that_there_are_not_stay_an_error():
    made = chain_of((4, 16, 8, 8), axes=[4, 2, 3])
    assert summed(made) == 1, "t's count from the end"
    assert kinds(made).count("ReduceSum") == 2


# ------------------------------------------------------------------------------------------------ BatchNormalizations
def normalization(shape=(4, 16, 8, 8), computed=True, reader="Sub", twice=False, first=False, of="Mul", **attributes):
    """y = x * x - n: the gradient of a BatchNormalization that trains has such a difference."""
    values = ["k" if computed else "scale", "bias", "mean", "var"]
    read = ["n", "p"] if first else ["p", "n"]
    nodes = [
        ("Mul", ["scale", "scale"], "k"),
        ("BatchNormalization", ["x", *values], "n", attributes),
        (of, ["x", "x"], "p"),
        (reader, read, "y"),
    ]
    vectors = dict.fromkeys(("scale", "bias", "mean", "var"), shape[1:2])
    more = [("Exp", ["n"], "e")] if twice else []
    return model([*nodes, *more], {"x": shape, **vectors}, {"y": None, **({"e": None} if twice else {})}, said={"k": shape[1:2]})


@pytest.mark.parametrize("shape", [(4, 16, 8, 8), (64, 128), (3, 16, 40), (2, 16, 1, 1), (0, 16, 3)], ids=str)
def test_a_normalization_in_a_chain_is_onnxruntimes(shape):
    made, generator = normalization(shape, epsilon=1e-3), np.random.default_rng(0)
    feeds = {name: generator.random(shape[1:2], np.float32) for name in ("scale", "bias", "mean", "var")}
    feeds["x"] = generator.standard_normal(shape).astype(np.float32)
    expected = onnxruntime.InferenceSession(ir.to_proto(made).SerializeToString()).run(None, feeds)[0]
    assert fuse(made) >= 1
    assert "BatchNormalization" not in kinds(made)
    np.testing.assert_allclose(inference_session(ir.to_proto(made)).run(None, feeds)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [{"computed": False}, {"reader": "Mul"}, {"reader": "Add"}, {"first": True}, {"of": "Max"}, {"twice": True}, {"training_mode": 1}],
    ids=str,
)
def test_other_normalizations_stay(change):
    made = normalization(**change)
    fuse(made)
    assert "BatchNormalization" in kinds(made)


def test_a_normalization_of_another_domain_is_none():
    proto = ir.to_proto(normalization())
    next(found for found in proto.graph.node if found.op_type == "BatchNormalization").domain = "mine"
    proto.opset_import.append(helper.make_opsetid("mine", 1))
    made = ir.from_proto(proto)
    fuse(made)
    assert "BatchNormalization" in kinds(made)


@pytest.mark.parametrize(
    ("x", "k"),
    [((4, 4, 8), (4,)), ((4, 4, 64), (4,)), ((4, 1, 8, 8), (4,)), ((4, 4, 8, 8), (1,)), ((1, 4, 8), (4,)), ((64,), (4,))],
    ids=str,
)
def test_a_normalization_of_other_shapes_than_said_is_an_error(x, k):
    """Of a product and a sum they would be numbers, along another axis."""
    made = normalization((4, 4, 8, 8))
    fuse(made)
    assert "BatchNormalization" not in kinds(made)
    for value in (*made.graph.inputs, *(output for found in made.graph for output in found.outputs)):
        value.shape = None
    feeds = {name: np.ones(k, np.float32) for name in ("scale", "bias", "mean", "var")} | {"x": np.ones(x, np.float32)}
    with pytest.raises(PythonopError, match="other dims than the file says|does not fit|shape"):
        inference_session(ir.to_proto(made)).run(None, feeds)


class Block(nn.Module):
    def __init__(self, kind=nn.Conv2d, norm=nn.BatchNorm2d):
        super().__init__()
        self.first, self.norm, self.second = kind(3, 16, 3, padding=1), norm(16), kind(16, 16, 3, stride=2)
        self.last = norm(16)

    def forward(self, x):
        h = self.norm(self.first(x)).relu()
        return (self.last(self.second(h)).relu().flatten(2).mean(2) ** 2).sum()


BLOCKS = {
    "2-D": (Block, (4, 3, 10, 12)),
    "1-D": (lambda: Block(nn.Conv1d, nn.BatchNorm1d), (4, 3, 40)),
    "3-D": (lambda: Block(nn.Conv3d, nn.BatchNorm3d), (2, 3, 7, 8, 6)),
}


@pytest.mark.parametrize("loaded", [False, True], ids=["step", "loaded"])
@pytest.mark.parametrize(("block", "shape"), BLOCKS.values(), ids=BLOCKS)
def test_gradients_are_eagers(block, shape, loaded, monkeypatch):
    counts = []
    monkeypatch.setattr("exporter.cpu.accelerator.sum_by_channels", lambda *args: counts.append(sum_by_channels(*args)) or counts[-1])
    monkeypatch.setattr("exporter.module.plans.are_worth_it", lambda *args: False)  # else torch's kernels may take them
    torch.manual_seed(0)
    eager, x = block(), torch.randn(shape)
    before = {name: p.detach().clone() for name, p in eager.named_parameters()}
    if loaded:
        module = exporter.load(exporter.export(eager, (x,))).train()
        module(x).backward()
        found = {name: p.grad for name, p in module.named_parameters()}
    else:
        trainer = Trainer(exporter.export_training_step(eager, (x,), loss=None, optimizer="sgd", hyperparameters={"lr": 1.0}))
        trainer.step({"x": x})
        after = trainer.state_dict()
        found = {name: before[name] - after[name] for name in before}
    eager.double()(x.double()).backward()
    assert sum(counts) >= 4, "two sums of each BatchNormalization"
    for name, p in eager.named_parameters():
        torch.testing.assert_close(found[name].double(), p.grad, rtol=2e-4, atol=2e-5, msg=name)


def test_without_the_native_library_all_stays():
    made = chain_of((4, 16, 8, 8))
    rewrite_convolutions(made, None, {}, native=False)
    assert kinds(made).count("ReduceSum") == 3
