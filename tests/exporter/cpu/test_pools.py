"""Pools that say where their maxima are, and their gradients, by the native library."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import exporter
from exporter.cpu import accelerator, pools
from exporter.cpu.operators import DOMAIN
from exporter.cpu.pools import MAX_POOL_GRAD, MAX_POOL_INDICES, pool_at_once
from exporter.training.trainer import Trainer
from symbolics.graph.builder import Builder
from symbolics.graph.named import add_called, call
from symbolics.graph.scope import Scope
from symbolics.node.names import GRADIENT_DOMAIN
from tests.exporter.cpu.support import claim_gradients, inference_session, rewrite_convolutions, session_options

FLOAT, INT64, DOUBLE = TensorProto.FLOAT, TensorProto.INT64, TensorProto.DOUBLE


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(pools, "_FEW_ELEMENTS", 0)


@pytest.fixture(autouse=True)
def _calm():
    onnxruntime.set_default_logger_severity(4)
    yield
    onnxruntime.set_default_logger_severity(2)


def kinds(model):
    return [node.op_type for node in model.graph]


def pool(dims=(None,) * 4, element=FLOAT, outputs=("y", "i"), opset=18, **attributes):
    """A model of one MaxPool."""
    made = helper.make_node("MaxPool", ["x"], list(outputs), **{"kernel_shape": [2, 2]} | attributes)
    given = [helper.make_tensor_value_info("x", element, dims)]
    results = [helper.make_tensor_value_info(n, t, None) for n, t in zip(outputs, (element, INT64)) if n]
    return ir.from_proto(
        helper.make_model(helper.make_graph([made], "g", given, results), opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    )


def plain(model, feeds):
    """What onnxruntime's own operators compute."""
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, feeds)


def ours(model, feeds):
    return inference_session(ir.to_proto(model), sess_options=session_options(())).run(None, feeds)


def assert_same_bits(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def numbers(shape, seed=0, special=True):
    """Few different ones, so that windows see equal ones; NaN, infinities, zeros of both signs and the lowest number among them."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, shape).astype(np.float32)
    if special:
        x = np.where(rng.random(shape) < 0.4, rng.choice([np.nan, np.inf, -np.inf, -0.0, np.finfo(np.float32).min], shape), x)
    return x.astype(np.float32)


# ---------------------------------------------------------------------------------------------------- forward
#: shape of x, attributes
WINDOWS = {
    "a plain one": ((2, 3, 24, 24), {"strides": [2, 2]}),
    "odd images": ((2, 3, 9, 11), {"strides": [2, 2]}),
    "of ResNet": ((2, 3, 14, 15), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "place by place": ((2, 3, 9, 40), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    "steps of one by default": ((1, 2, 5, 6), {}),
    "steps of three": ((2, 2, 13, 50), {"kernel_shape": [3, 3], "strides": [3, 3]}),
    "steps longer than windows": ((1, 2, 13, 40), {"kernel_shape": [2, 2], "strides": [5, 5]}),
    "pads of one side": ((1, 2, 8, 9), {"kernel_shape": [3, 4], "strides": [2, 1], "pads": [2, 0, 0, 3]}),
    "a row": ((2, 2, 4, 37), {"kernel_shape": [1, 5], "strides": [1, 2], "pads": [0, 2, 0, 1]}),
    "a column": ((2, 2, 37, 4), {"kernel_shape": [5, 1], "strides": [2, 2], "pads": [4, 0, 4, 0]}),
    "one place": ((2, 2, 9, 33), {"kernel_shape": [1, 1], "strides": [2, 2]}),
    "dilations": ((2, 2, 14, 30), {"kernel_shape": [3, 3], "dilations": [2, 3], "strides": [2, 2], "pads": [2, 2, 2, 2]}),
    "dilations in a row": ((1, 1, 1, 16), {"kernel_shape": [1, 2], "dilations": [1, 2], "strides": [1, 2]}),
    "windows in padding alone": ((2, 2, 2, 2), {"dilations": [3, 3], "pads": [1, 1, 1, 1]}),
    "a window that is cut": ((2, 1, 1, 4), {"kernel_shape": [3, 3], "strides": [3, 3]}),
    "no windows": ((1, 2, 1, 3), {}),
    "an empty batch": ((0, 3, 8, 8), {"strides": [2, 2]}),
    "an empty batch of nothing": ((0, 1, 0, 4), {"kernel_shape": [3, 3], "strides": [2, 2]}),
    "many planes": ((33, 31, 6, 6), {"strides": [2, 2]}),
    "one large plane": ((1, 1, 300, 301), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
}


@pytest.mark.parametrize("dims", [None, ("N", "C", "H", "W")], ids=["", "open"])
@pytest.mark.parametrize(("shape", "attributes"), WINDOWS.values(), ids=WINDOWS)
def test_a_pool_is_onnxruntimes(shape, attributes, dims):
    for special in (False, True):
        model, x = pool(dims or shape, **attributes), numbers(shape, special=special)
        expected = plain(model, {"x": x})
        assert pool_at_once(model, {}) == 1 and kinds(model) == [MAX_POOL_INDICES]
        assert_same_bits(ours(model, {"x": x}), expected)


@pytest.mark.parametrize("wide", range(1, 20))
def test_rows_of_any_length(wide):
    """Windows at the end of a row are computed twice, by vectors of 8 or 4, or one by one; nothing behind the image is read."""
    for kernel, stride, dilation in itertools.product((1, 2, 3), (1, 2, 3), (1, 2)):
        attributes = {"kernel_shape": [kernel, kernel], "strides": [stride, stride], "dilations": [1, dilation], "pads": [kernel - 1] * 4}
        model, x = pool(**attributes), numbers((1, 2, 4, wide), wide)
        expected = plain(model, {"x": x})
        assert pool_at_once(model, {}) == 1
        assert_same_bits(ours(model, {"x": x}), expected)


@pytest.mark.parametrize("bits", [0x7FC00001, 0xFFC12345, 0x7F800001])
def test_numbers_that_are_none_keep_their_bits(bits):
    x = np.array([bits, 0, bits + 1, 0], np.uint32).view(np.float32).reshape(1, 1, 1, 4)
    model = pool(kernel_shape=[1, 2], strides=[1, 2])
    expected = plain(model, {"x": x})
    pool_at_once(model, {})
    assert_same_bits(ours(model, {"x": x}), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"auto_pad": "SAME_UPPER"}, {"auto_pad": "VALID"}, {"ceil_mode": 1}, {"storage_order": 1}, {"outputs": ("y",)}, {"outputs": ("y", "")},
        {"element": DOUBLE}, {"dims": (2, 3, 9), "kernel_shape": [2]}, {"dims": (1, 1, 4, 4, 4), "kernel_shape": [2, 2, 2]},
        {"pads": [2, 2, 2, 2]}, {"pads": [-1, 0, 0, 0]}, {"pads": [1, 1]}, {"strides": [0, 1]}, {"strides": [1]}, {"dilations": [0, 1]},
        {"kernel_shape": [2**16, 1]}, {"kernel_shape": [0, 2]},
    ],
    ids=str,
)  # fmt: skip
def test_others_stay_onnxruntimes(change):
    model = pool(**change)
    assert pool_at_once(model, {}) == 0 and kinds(model) == ["MaxPool"]


def test_indices_that_nobody_reads_and_small_images_stay(monkeypatch):
    model = pool((2, 3, 8, 8))
    model.graph.outputs.pop()
    assert pool_at_once(model, {}) == 0
    monkeypatch.setattr(pools, "_FEW_ELEMENTS", 2 * 3 * 8 * 8 + 1)
    assert pool_at_once(pool((2, 3, 8, 8)), {}) == 0
    assert pool_at_once(pool(("N", 3, 8, 8)), {}) == 1
    monkeypatch.setattr(pools, "_FEW_ELEMENTS", 2 * 3 * 8 * 8)
    assert pool_at_once(pool((2, 3, 8, 8)), {}) == 1


def test_without_the_native_library_nothing_is_replaced():
    model = pool((2, 3, 8, 8))
    assert rewrite_convolutions(model, native=False) == 0 and kinds(model) == ["MaxPool"]
    assert rewrite_convolutions(model, native=True) == 1 and kinds(model) == [MAX_POOL_INDICES]


# ---------------------------------------------------------------------------------------------------- its gradient
def gradient(shape=(2, 3, 4, 5), dims=None, adds=False, element=ir.DataType.FLOAT, index=ir.DataType.INT64):
    """The gradient graph of a MaxPool of this shape, as its rule writes it: inputs g and i, and the shape where ``dims`` is None."""
    op = Builder(Scope("t/", lambda value: False))
    op.scope.opset = 18
    g, i = (ir.Value(name=name, type=ir.TensorType(kind), shape=None) for name, kind in (("g", element), ("i", index)))
    given = ir.Value(name="shape", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([len(shape)]))

    def write(inside, values):
        zeros = inside.zeros(inside.ReduceProd(values[2], keepdims=1), element)
        put = inside.ScatterElements(zeros, inside.flat(values[1]), inside.flat(values[0]), axis=0, reduction="add" if adds else None)
        return [inside.Reshape(put, values[2], allowzero=1)]

    (y,) = call(op, "MaxPoolGrad", [g, i, given if dims is None else op.i64(dims)], write, adds=[int(adds)])
    y.name = "y"
    graph = ir.Graph([g, i, *([given] if dims is None else [])], [y], nodes=op.nodes, opset_imports={"": 18}, name="g")
    model = ir.Model(graph, ir_version=9)
    op.scope.register(graph)
    add_called(model, op.scope)
    return model


def scattered(shape, count, indices=None, seed=0):
    """Feeds of `gradient`: so many numbers at places of their own plane, several at one."""
    rng = np.random.default_rng(seed)
    planes, area = shape[0] * shape[1], int(np.prod(shape[2:]))
    places = rng.integers(0, max(area, 1), (planes, count)) + np.arange(planes)[:, None] * area if indices is None else indices
    g = (rng.standard_normal(np.shape(places)) * 10.0 ** rng.integers(-6, 6, np.shape(places))).astype(np.float32)
    g.ravel()[::7] = -0.0
    return {"g": g, "i": np.asarray(places, np.int64)}


SHAPES = {
    "dims": ((2, 3, 4, 5), [2, 3, 4, 5], 6), "an empty batch": ((0, 3, 4, 5), [0, 3, 4, 5], 6),
    "from a node": ((2, 3, 4, 5), None, 6), "nothing from a node": ((2, 0, 4, 5), None, 6), "a row": ((2, 3, 40), [2, 3, 40], 6),
    "many planes": ((40, 30, 8, 8), [40, 30, 8, 8], 16), "nothing to put": ((2, 3, 4, 5), [2, 3, 4, 5], 0),
}  # fmt: skip


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("shape", "dims", "count"), SHAPES.values(), ids=SHAPES)
def test_a_gradient_is_onnxruntimes(shape, dims, count, adds):
    model = gradient(shape, dims, adds)
    feeds = scattered(shape, count) | ({} if dims is not None else {"shape": np.array(shape, np.int64)})
    expected = plain(model, feeds)
    assert claim_gradients(model) == 1 and kinds(model) == ["ReduceProd", MAX_POOL_GRAD]
    assert_same_bits(ours(model, feeds), expected)


@pytest.mark.parametrize("adds", [False, True])
def test_indices_of_other_planes_are_written_as_the_operator_does(adds):
    """Of a window that saw nothing, the index lies in front of its plane."""
    shape, rng = (2, 3, 4, 5), np.random.default_rng(0)
    for indices in (
        rng.integers(-120, 120, (2, 3, 6)),
        rng.permutation(120)[:36].reshape(2, 3, 6),
        np.array([-1, 0, 119, -120, 5, 5, 5]),
        [-5] * 6,
    ):
        model, feeds = gradient(shape, [2, 3, 4, 5], adds), scattered(shape, 6, indices)
        expected = plain(model, feeds)
        assert claim_gradients(model) == 1
        assert_same_bits(ours(model, feeds), expected)


@pytest.mark.parametrize("index", [120, -121, 2**62, -(2**63), 2**63 - 1])
def test_indices_outside_of_the_tensor_are_refused(index):
    model = gradient(dims=[2, 3, 4, 5])
    claim_gradients(model)
    for place in (0, 17, 35):
        feeds = scattered((2, 3, 4, 5), 6)
        feeds["i"].ravel()[place] = index
        with pytest.raises(exporter.RunError, match="an index of a MaxPool's gradient is outside of the tensor"):
            ours(model, feeds)


def test_gradients_of_other_types_stay_onnxruntimes():
    for change in ({"element": ir.DataType.DOUBLE}, {"index": ir.DataType.INT32}):
        model = gradient(**{"dims": [2, 3, 4, 5]} | change)
        assert claim_gradients(model) == 0 and "ScatterElements" in kinds(model)


@pytest.mark.parametrize("adds", [None, [2], [0, 1], 1], ids=str)
def test_a_call_that_a_file_says_wrong_stays_onnxruntimes(adds):
    model = gradient(dims=[2, 3, 4, 5])
    (made,) = (node for node in model.graph if node.domain == GRADIENT_DOMAIN)
    del made.attributes["adds"]
    if adds is not None:
        made.attributes.add(ir.convenience.convert_attribute("adds", adds))
    assert claim_gradients(model) == 0 and "ScatterElements" in kinds(model)


def test_what_a_file_says_of_shapes_is_not_believed():
    """The numbers are those of the shapes that there are, whatever value_info says."""
    x = numbers((2, 3, 8, 8))
    said = [helper.make_tensor_value_info(name, kind, [5, 7, 2, 2]) for name, kind in (("y", FLOAT), ("i", INT64))]
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["at"]), helper.make_node("MaxPool", ["at"], ["y", "i"], kernel_shape=[2, 2]),
        helper.make_node("Shape", ["y"], ["z"]), helper.make_node("Identity", ["i"], ["j"]),
    ]  # fmt: skip
    given = [helper.make_tensor_value_info(name, kind, None) for name, kind in (("x", FLOAT), ("shape", INT64))]
    results = [helper.make_tensor_value_info(name, INT64, None) for name in ("z", "j")]
    graph = helper.make_graph(nodes, "g", given, results, value_info=said)
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    model.graph[0].outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    assert pool_at_once(model, {}) == 1
    assert [v.shape for v in model.graph[1].outputs] == [None, None]
    z, j = ours(model, {"x": x, "shape": np.array(x.shape)})
    assert z.tolist() == [2, 3, 7, 7] and j.shape == (2, 3, 7, 7)


# ---------------------------------------------------------------------------------------------------- models
class LeNet(nn.Module):
    def __init__(self, **second):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5), nn.LazyLinear(10)
        self.pools = nn.ModuleList([nn.MaxPool2d(2), nn.MaxPool2d(**second or {"kernel_size": 2})])
        self(torch.zeros(1, 1, 28, 28))

    def forward(self, x):
        x = self.pools[0](self.first(x).relu())
        return self.last(self.pools[1](self.second(x).relu()).flatten(1))


@pytest.fixture
def arranged(monkeypatch):
    """The nodes of each graph that is arranged."""
    seen = []

    class Watched(accelerator.CpuAccelerator):
        def optimize(self, model, request, facts):
            made = super().optimize(model, request, facts)
            seen.append(kinds(model))
            return made

    monkeypatch.setattr(accelerator, "ACCELERATOR", Watched())
    return seen


POOLS = {
    "one after the other": {"kernel_size": 2}, "overlapping": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilated": {"kernel_size": 3, "stride": 1, "dilation": 2},
}  # fmt: skip


def counts(graphs):
    return [(graph.count(MAX_POOL_INDICES), graph.count(MAX_POOL_GRAD), graph.count("ScatterElements")) for graph in graphs]


@pytest.mark.parametrize("dynamic", [False, True], ids=["", "open batch"])
@pytest.mark.parametrize("second", POOLS.values(), ids=POOLS)
def test_a_step_has_eagers_gradients(second, dynamic, arranged):
    torch.manual_seed(0)
    eager, x = LeNet(**second), torch.randn(3, 1, 28, 28)
    before = {name: p.detach().clone() for name, p in eager.named_parameters()}
    shapes = {"x": {0: "batch"}} if dynamic else None
    loss = lambda y: y.sin().sum()  # noqa: E731
    step = exporter.export_training_step(eager, (x,), loss=loss, optimizer="sgd", hyperparameters={"lr": 1.0}, dynamic_shapes=shapes)
    for batch in (3, 5) if dynamic else (3,):
        trainer, x = Trainer(step), torch.randn(batch, 1, 28, 28)
        trainer.step({"x": x})
        after = trainer.state_dict()
        assert counts(arranged) == [(2, 2, 0)]
        arranged.clear()
        double = LeNet(**second).double()
        double.load_state_dict(before)
        loss(double(x.double())).backward()
        for name, p in double.named_parameters():
            torch.testing.assert_close((before[name] - after[name]).double(), p.grad, rtol=1e-3, atol=1e-4 * float(p.grad.abs().max()))


@pytest.mark.parametrize("dynamic", [False, True], ids=["", "open batch"])
@pytest.mark.parametrize("second", POOLS.values(), ids=POOLS)
def test_a_loaded_module_has_eagers_gradients(second, dynamic, arranged):
    torch.manual_seed(0)
    eager, x = LeNet(**second), torch.randn(3, 1, 28, 28)
    module = exporter.load(exporter.export(eager, (x,), dynamic_shapes={"x": {0: "batch"}} if dynamic else None))
    eager.double()
    for batch in (3, 5) if dynamic else (3,):
        x = torch.randn(batch, 1, 28, 28, requires_grad=True)
        double = x.detach().double().requires_grad_()
        module.zero_grad(), eager.zero_grad()
        y = module(x)
        y.sin().sum().backward()
        expected = eager(double)
        expected.sin().sum().backward()
        torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-4)
        for found, p in [(x, double), *((module.get_parameter(name), p) for name, p in eager.named_parameters())]:
            torch.testing.assert_close(found.grad.double(), p.grad, rtol=1e-3, atol=1e-4 * float(p.grad.abs().max()))
    assert [each for each in counts(arranged) if any(each)] == [(2, 0, 0), (0, 2, 0)]


def test_gradients_are_those_of_the_operators(monkeypatch):
    """To the bit: the same step with and without, of numbers among which many are equal."""
    torch.manual_seed(0)
    eager, x = LeNet(kernel_size=3, stride=1), torch.randn(4, 1, 28, 28).round()
    step = exporter.export_training_step(eager, (x,), loss=lambda y: y.sum(), optimizer="sgd", hyperparameters={"lr": 1.0})
    states = []
    for native in (True, False):
        if not native:
            monkeypatch.setattr("exporter.cpu.accelerator.pool_at_once", lambda model, facts: 0)
            claims = {name: made for name, made in accelerator.CLAIMS.items() if name != "MaxPoolGrad"}
            monkeypatch.setattr(accelerator, "ACCELERATOR", accelerator.CpuAccelerator(claims=claims))
        trainer = Trainer(step)
        trainer.step({"x": x})
        states.append(trainer.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(states[1][name]), rtol=0, atol=0)


# --------------------------------------------------------------------------------------------------- nodes of a file
GOOD = {"kernel": [2, 2], "strides": [2, 2], "dilations": [1, 1], "pads": [0, 0, 0, 0]}


def node(kind, inputs, outputs, types, **attributes):
    made = helper.make_node(kind, list(inputs), list(outputs), domain=DOMAIN, **{k: v for k, v in attributes.items() if v is not None})
    given = [helper.make_tensor_value_info(name, types[name], None) for name in inputs]
    results = [helper.make_tensor_value_info(name, types[name], None) for name in outputs if name]
    graph = helper.make_graph([made], "g", given, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)], ir_version=9)
    return inference_session(model, sess_options=session_options(()))


def pool_node(inputs=("x",), outputs=("y", "i"), x=FLOAT, y=FLOAT, i=INT64, **attributes):
    return node(MAX_POOL_INDICES, inputs, outputs, {"x": x, "y": y, "i": i, "z": FLOAT}, **GOOD | attributes)


def grad_node(inputs=("g", "i", "size", "shape"), outputs=("y",), g=FLOAT, i=INT64, y=FLOAT, size=INT64, **attributes):
    types = {"g": g, "i": i, "size": size, "shape": INT64, "y": y, "z": FLOAT}
    return node(MAX_POOL_GRAD, inputs, outputs, types, **{"adds": [0]} | attributes)


@pytest.mark.parametrize(
    "change",
    [
        *({name: None} for name in GOOD), *({name: [1]} for name in GOOD), {"kernel": [0, 2]}, {"kernel": [2**15 + 1, 2]}, {"strides": [0, 1]},
        {"strides": [1, 2**15 + 1]}, {"dilations": [1, 0]}, {"dilations": [2**40, 1]}, {"pads": [2, 0, 0, 0]}, {"pads": [0, 0, 0, 2]},
        {"pads": [-1, 0, 0, 0]}, {"kernel": "2"}, {"kernel": 2.0}, {"inputs": ()}, {"inputs": ("x", "z")}, {"outputs": ("y",)},
    ],
    ids=str,
)  # fmt: skip
def test_nodes_that_stand_for_no_pool_are_refused(change):
    with pytest.raises(Exception, match="MaxPoolIndices stands for no operator|Attribute|Non-zero|at least"):
        pool_node(**change)


@pytest.mark.parametrize(
    "change",
    [{"adds": None}, {"adds": [2]}, {"adds": [-1]}, {"adds": [0, 0]}, {"inputs": ("g", "i", "size")}, {"outputs": ("y", "z")}],
    ids=str,
)
def test_nodes_that_stand_for_no_gradient_are_refused(change):
    with pytest.raises(Exception, match="MaxPoolGrad stands for no operators|Attribute"):
        grad_node(**change)


def test_images_that_have_no_windows_are_refused():
    made = pool_node()
    for shape in ((2, 3, 8), (2, 3, 8, 8, 1), (), (2, 0, 8, 8), (2, 3, 0, 8)):
        with pytest.raises(exporter.RunError, match="not float32 images of two axes"):
            made.run(None, {"x": np.zeros(shape, np.float32)})
    with pytest.raises(exporter.RunError, match="smaller ones than the windows"):
        pool_node(kernel=[9, 9]).run(None, {"x": np.zeros((1, 1, 2, 2), np.float32)})
    with pytest.raises(exporter.RunError, match="not float32"):
        pool_node(x=DOUBLE).run(None, {"x": np.zeros((2, 3, 8, 8))})
    for change in ({"y": INT64}, {"y": DOUBLE}, {"i": FLOAT}):
        with pytest.raises(exporter.RunError, match="has another type than the file says"):
            pool_node(**change).run(None, {"x": np.zeros((2, 3, 8, 8), np.float32)})


def test_sizes_at_their_limits_are_windows():
    far = 2**15
    for attributes in ({"kernel": [far, 1], "pads": [far - 1, 0, 0, 0]}, {"dilations": [far, far]}, {"strides": [far, far]}):
        window = GOOD | attributes
        model = pool(kernel_shape=window["kernel"], **{name: window[name] for name in ("strides", "dilations", "pads")})
        x = numbers((1, 1, 3, 3))
        try:
            expected = plain(model, {"x": x})
        except onnxruntime.capi.onnxruntime_pybind11_state.Fail:
            with pytest.raises(exporter.RunError, match="smaller ones than the windows"):
                pool_node(**attributes).run(None, {"x": x})
        else:
            assert_same_bits(pool_node(**attributes).run(None, {"x": x}), expected)


def test_shapes_of_a_gradient_that_do_not_fit_are_refused():
    good = {
        "g": np.ones((2, 3, 2, 2), np.float32),
        "i": np.arange(24).reshape(2, 3, 2, 2),
        "size": np.array([96]),
        "shape": np.array([2, 3, 4, 4]),
    }
    made = grad_node()
    assert made.run(None, good)[0].sum() == 24
    for change in (
        {"g": np.ones(23, np.float32)}, {"i": np.arange(25)}, {"size": np.array([96, 1])}, {"size": np.array([], np.int64)}, {"size": np.array([-96])},
        {"size": np.array([95])}, {"size": np.array([2**62])}, {"shape": np.array([2, 3, 4, 5])}, {"shape": np.array([-1, -1, 4, 4])},
        {"shape": np.array([-1, 0, 4, 4])}, {"shape": np.array([-2, 3, 4, 4])}, {"shape": np.array([[2, 3, 4, 4]])}, {"shape": np.array(96)},
        {"shape": np.array([2**40, 2**40, 2**40])}, {"shape": np.ones(17, np.int64)}, {"shape": np.array([-1, 5])},
    ):  # fmt: skip
        with pytest.raises(exporter.RunError, match="other shapes than the file says"):
            made.run(None, good | change)
    for change, name, kind in (
        ({"g": DOUBLE}, "g", np.float64),
        ({"i": TensorProto.INT32}, "i", np.int32),
        ({"size": FLOAT}, "size", np.float32),
    ):
        with pytest.raises(exporter.RunError, match="not the float32 gradient"):
            grad_node(**change).run(None, good | {name: good[name].astype(kind)})
    with pytest.raises(exporter.RunError, match="has another type than the file says"):
        grad_node(y=INT64).run(None, good)
