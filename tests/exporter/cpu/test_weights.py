"""Gradients of convolutions for their weights by the native library."""

from __future__ import annotations

import time

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import exporter
from exporter.cpu import weights
from exporter.cpu.operators import DOMAIN
from exporter.cpu.weights import CONV_WEIGHT_GRAD
from exporter.errors import PythonopError
from exporter.training.trainer import Trainer
from tests.exporter.cpu.support import claim_gradients, inference_session, session_options
from tests.exporter.cpu.test_moves import GEOMETRIES, _conv


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch):
    """The operator is right everywhere; where it is not quicker, nobody would call it. Small cases, too."""
    monkeypatch.setattr(weights, "has_wide_vectors", lambda: True)
    for name in ("_FEW_RESULTS", "_FEW_PLACES"):
        monkeypatch.setattr(weights, name, 0)


def kinds(model):
    return [node.op_type for node in model.graph]


def gradient_is(model, feeds, expected):
    session = inference_session(ir.to_proto(model))
    results = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    found = next(value for name, value in results.items() if name != "loss")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


#: x, w, options of more than 24 channels: those are products of columns in the file
MORE = {
    "odd sizes": ((3, 25, 9, 11), (33, 25, 3, 3), {"padding": 1}),
    "more results": ((2, 24, 8, 8), (70, 24, 3, 3), {"padding": 1}),
    "more channels": ((2, 100, 8, 8), (16, 100, 3, 3), {"padding": 1}),
    "a row of windows": ((2, 24, 3, 40), (16, 24, 3, 3), {}),
    "a column of windows": ((2, 24, 40, 3), (16, 24, 3, 3), {}),
    "one image": ((1, 24, 9, 9), (8, 24, 3, 3), {"padding": 1}),
    "images together": ((7, 24, 6, 5), (8, 24, 3, 3), {"padding": 1}),
    "long rows": ((1, 24, 3, 300), (8, 24, 3, 3), {"padding": 1}),
    "many rows": ((2, 24, 70, 20), (8, 24, 3, 3), {"padding": 1}),
    "a wide kernel": ((2, 24, 12, 14), (8, 24, 2, 5), {"padding": (0, 3)}),
    "a kernel down": ((2, 24, 12, 14), (8, 24, 3, 1), {"padding": (2, 0)}),
    "far padding": ((2, 24, 8, 8), (8, 24, 3, 3), {"padding": 2}),
    "strides": ((2, 24, 12, 13), (8, 24, 3, 3), {"padding": 1, "stride": 2}),
    "strides of three": ((2, 24, 16, 13), (8, 24, 3, 3), {"padding": 1, "stride": 3}),
    "two strides": ((2, 24, 14, 13), (8, 24, 3, 3), {"padding": 1, "stride": (1, 2)}),
    "strides and nothing around": ((2, 24, 13, 13), (8, 24, 3, 3), {"stride": 2}),
    "dilations": ((2, 24, 14, 13), (8, 24, 3, 3), {"padding": 2, "dilation": 2}),
    "strides and dilations": ((2, 24, 19, 23), (8, 24, 3, 3), {"padding": 2, "stride": 2, "dilation": 3}),
}


@pytest.mark.parametrize("open_batch", [False, True], ids=["", "open batch"])
@pytest.mark.parametrize(("x", "w", "options"), MORE.values(), ids=MORE)
def test_a_gradient_is_torchs(x, w, options, open_batch):
    model, feeds, expected = _conv(x, w, open_batch, **options)
    assert claim_gradients(model) > 0
    assert kinds(model).count(CONV_WEIGHT_GRAD) == 1
    gradient_is(model, feeds, expected)


@pytest.mark.parametrize(
    ("x", "w", "options"), [*(each[:3] for each in GEOMETRIES.values()), ((2, 24, 12, 14), (8, 24, 1, 3), {"padding": (0, 1)})]
)
def test_others_stay_what_they_are(x, w, options):
    model, feeds, expected = _conv(x, w, **options)
    claim_gradients(model)
    gradient_is(model, feeds, expected)


def test_few_results_and_places_stay_products(monkeypatch):
    for name, least in (("_FEW_RESULTS", 16), ("_FEW_PLACES", 64)):
        for many in (True, False):
            monkeypatch.setattr(weights, name, least + (not many))
            model, *_ = _conv((4, 24, 8, 8), (16, 24, 3, 3), padding=1)
            claim_gradients(model)
            assert kinds(model).count(CONV_WEIGHT_GRAD) == many
        monkeypatch.setattr(weights, name, 0)
    monkeypatch.setattr(weights, "_MOST_WIDE", 7)
    model, *_ = _conv((4, 24, 8, 8), (16, 24, 3, 3), padding=1)
    claim_gradients(model)
    assert kinds(model).count(CONV_WEIGHT_GRAD) == 0


def test_zeros_around_an_image_are_no_products():
    """What windows do not see stays out: of an image that is not finite, as many entries are NaN as eager has."""
    x = np.random.default_rng(0).standard_normal((2, 24, 8, 8), np.float32)
    x[0, 3, 0, 0] = np.inf
    model, feeds, _ = _conv((2, 24, 8, 8), (16, 24, 3, 3), padding=1)
    image, weight = torch.from_numpy(x).double(), torch.from_numpy(feeds["w"]).double().requires_grad_()
    (nn.functional.conv2d(image, weight, padding=1) ** 2).sum().backward()
    claim_gradients(model)
    found = inference_session(ir.to_proto(model)).run(None, feeds | {"x": x})
    gradient = next(value for value in found if value.ndim == 4)
    np.testing.assert_array_equal(np.isfinite(gradient), np.isfinite(weight.grad.numpy()))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 40, 3, padding=1, stride=2)

    def forward(self, x):
        return self.second(self.first(x).relu()).sin().sum()


def test_steps_have_eagers_gradients(monkeypatch):
    counts = []
    real = weights._in_one_node
    monkeypatch.setattr(weights, "_in_one_node", lambda *args: counts.append(real(*args)) or counts[-1])
    torch.manual_seed(0)
    eager, x = Block(), torch.randn(3, 3, 16, 16)
    before = {name: p.detach().clone() for name, p in eager.named_parameters()}
    trainer = Trainer(exporter.export_training_step(eager, (x,), loss=None, optimizer="sgd", hyperparameters={"lr": 1.0}))
    trainer.step({"x": x})
    after = trainer.state_dict()
    eager.double()(x.double()).backward()
    assert any(value is not None for value in counts)
    for name, p in eager.named_parameters():
        torch.testing.assert_close((before[name] - after[name]).double(), p.grad, rtol=1e-4, atol=1e-4)


# --------------------------------------------------------------------------------------------------- nodes of a file
GOOD = {
    "kernel": [3, 3], "strides": [1, 1], "dilations": [1, 1], "starts": [-1, -1], "images": [-1, 4, 6, 6], "gradients": [-1, 5, 6, 6],
}  # fmt: skip


def node(inputs=("x", "g"), outputs=("y",), element=1, made_as=None, **attributes):
    helper = onnx.helper
    made = helper.make_node(
        CONV_WEIGHT_GRAD, list(inputs), list(outputs), domain=DOMAIN, **{k: v for k, v in (GOOD | attributes).items() if v is not None}
    )
    given = [helper.make_tensor_value_info(name, element, None) for name in inputs]
    graph = helper.make_graph([made], "g", given, [helper.make_tensor_value_info(name, made_as or element, None) for name in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)], ir_version=9)
    return inference_session(model, sess_options=session_options(()))


def run(session, x=(2, 4, 6, 6), g=(2, 5, 6, 6), kind=np.float32):
    return session.run(None, {"x": np.ones(x, kind), "g": np.ones(g, kind)})[0]


@pytest.mark.parametrize(
    "change",
    [
        *({name: None} for name in GOOD),
        *({name: [1]} for name in GOOD),
        {"kernel": [0, 3]}, {"kernel": [65, 3]}, {"strides": [0, 1]}, {"strides": [1, 17]}, {"dilations": [1, 0]}, {"dilations": [2**13, 1]},
        {"starts": [-(2**41), 0]}, {"images": [-1, -1, 6, 6]}, {"gradients": [-2, 5, 6, 6]}, {"kernel": "3"}, {"kernel": 3.0},
        {"inputs": ("x",)}, {"inputs": ("x", "g", "z")}, {"outputs": ("y", "z")},
    ],
    ids=str,
)  # fmt: skip
def test_nodes_that_stand_for_nothing_are_refused(change):
    with pytest.raises(Exception, match="ConvWeightGrad stands for no operators|Attribute"):
        node(**change)


@pytest.mark.parametrize("dims", [[0, 2**33, 1, 1], [2**58, 4, 0, 0]], ids=str)
def test_empty_tensors_of_huge_dims_are_refused_or_done_at_once(dims):
    helper, begin = onnx.helper, time.monotonic()
    shape = onnx.numpy_helper.from_array(np.array(dims, np.int64), "shape")
    said = GOOD | {"kernel": [1, 1], "starts": [0, 0], "images": [-1, *dims[1:]], "gradients": [-1, *dims[1:]]}
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["e"]),
        helper.make_node(CONV_WEIGHT_GRAD, ["e", "e"], ["y"], domain=DOMAIN, **said),
    ]
    graph = helper.make_graph(nodes, "g", [], [helper.make_tensor_value_info("y", 1, None)], [shape])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)], ir_version=9)
    try:
        (found,) = inference_session(model, sess_options=session_options(())).run(None, {})
    except PythonopError:
        pass
    else:
        assert found.shape == (dims[1] ** 2, 1) and not found.any()
    assert time.monotonic() - begin < 20


def test_shapes_that_do_not_fit_are_refused():
    made = node()
    assert run(made)[:, 4].tolist() == [72.0] * 20
    assert run(made, (0, 4, 6, 6), (0, 5, 6, 6)).tolist() == [[0.0] * 9] * 20
    for shapes in (
        {"x": (3, 4, 6, 6)}, {"x": (2, 3, 6, 6)}, {"x": (2, 4, 7, 6)}, {"x": (2, 4, 6)}, {"x": (2, 4, 6, 6, 1)}, {"x": ()},
        {"g": (3, 5, 6, 6)}, {"g": (2, 6, 6, 6)}, {"g": (2, 5, 6, 7)}, {"g": (2, 5, 36)},
    ):  # fmt: skip
        with pytest.raises(exporter.RunError, match="other shapes than they have"):
            run(made, **shapes)
    with pytest.raises(exporter.RunError, match="not float32"):
        run(node(element=11), kind=np.float64)


@pytest.mark.parametrize("made_as", [7, 11], ids=["int64", "double"])
def test_an_output_of_another_type_is_refused(made_as):
    """onnxruntime makes it of the type that the file says, whatever the operator does."""
    with pytest.raises(exporter.RunError, match="has another type than the file says"):
        run(node(made_as=made_as))


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": [64, 64], "dilations": [64, 64], "strides": [16, 16]},
        {"kernel": [64, 64], "dilations": [4096, 4096]},
        {"starts": [2**40, 2**40]},
        {"starts": [-(2**40), 5]},
        {"strides": [16, 16], "starts": [3, -7]},
    ],
    ids=str,
)
def test_windows_outside_of_an_image_see_zeros(change):
    """Or are refused, where they would need too much room; nothing else is read."""
    made = node(**change)
    try:
        found = run(made)
    except exporter.RunError as error:
        assert "other shapes" in str(error)
    else:
        assert np.isfinite(found).all() and found.min() >= 0 and found.max() <= 72


def test_no_channels_or_no_results_are_no_windows():
    opened = {"images": [-1, -1, 6, 6], "gradients": [-1, 5, 6, 6]}
    with pytest.raises(Exception, match="stands for no operators"):
        node(**opened)  # one open size at most
    assert run(node(images=[2, -1, 6, 6]), x=(2, 0, 6, 6)).shape == (0, 9)
    assert run(node(gradients=[2, -1, 6, 6]), g=(2, 0, 6, 6)).shape == (0, 9)
