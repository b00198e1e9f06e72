"""Convolutions by onnxruntime's kernels for channels in blocks."""

from __future__ import annotations

import warnings

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import exporter
from exporter.cpu import blocked, products
from exporter.training.trainer import Trainer


def conv(x, w, bias=False, kind=ir.DataType.FLOAT, constant=None, op_type="Conv", y=None, **attributes):
    """A model of one convolution whose weights are inputs, or a constant; ``x``, ``w`` and ``y`` are shapes."""
    names = ["x", "w", "b"][: 2 + bias]
    values = [ir.val(name, kind, shape) for name, shape in zip(names, (x, w, w[:1] if op_type == "Conv" else w[1:2]), strict=False)]
    graph = ir.Graph(values if constant is None else values[:1], [], nodes=[], opset_imports={"": 18}, name="conv")
    if constant is not None:
        values[1].const_value = ir.tensor(constant, name="w")
        graph.register_initializer(values[1])
    node = ir.node(op_type, values, attributes, outputs=[ir.val("y", kind, y)])
    graph.append(node)
    graph.outputs.append(node.outputs[0])
    return ir.Model(graph, ir_version=9)


def run(model, feeds):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 2, 4
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def of_blocks(model):
    return sum(node.op_type == "Conv" and node.domain == "com.microsoft.nchwc" for node in model.graph)


def test_this_onnxruntime_has_blocks():
    """Of this processor's own size: a release that changes what its kernels read makes this 0."""
    assert blocked.block_size() in (8, 16)


@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        ((2, 16, 9, 8), (16, 1, 3, 3), {"pads": [1, 1, 1, 1]}),
        ((1, 48, 9, 8), (48, 1, 5, 2), {"strides": [2, 1], "pads": [0, 2, 1, 0]}),
        ((3, 32, 9, 8), (32, 1, 3, 2), {"dilations": [2, 3], "pads": [1, 0, 0, 2], "bias": True}),
        ((1, 64, 3, 3), (64, 1, 3, 3), {"bias": True}),
        ((2, 16, 7, 1), (16, 1, 1, 1), {}),
        ((0, 16, 4, 4), (16, 1, 3, 3), {}),
        ((1, 96, 10, 11), (16, 6, 8, 9), {}),
        ((2, 80, 6, 6), (10, 8, 3, 3), {"strides": [2, 2], "dilations": [1, 2], "pads": [1, 0, 2, 1]}),
    ],
    ids=["3x3", "strides", "dilations", "one place", "1x1", "no images", "several channels a group", "several, and ten groups"],
)
def test_the_result_is_torchs(x, w, options):
    rng, bias = np.random.default_rng(0), options.get("bias", False)
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in zip("xwb", (x, w, w[:1]), strict=True)}
    attributes = {key: value for key, value in options.items() if key != "bias"}
    model = conv(x, w, bias, group=w[0], **attributes)
    assert blocked.block_channels(model) == of_blocks(model) == 1
    if not bias:
        del feeds["b"]
    found = run(model, feeds)
    given = {name: torch.from_numpy(array).double() for name, array in feeds.items()}
    top, left, bottom, right = options.get("pads", [0] * 4)
    padded = torch.nn.functional.pad(given["x"], (left, right, top, bottom))
    geometry = {"stride": options.get("strides", 1), "dilation": options.get("dilations", 1), "groups": w[0]}
    expected = torch.nn.functional.conv2d(padded, given["w"], given.get("b"), **geometry)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-4)


def expected_of(feeds, op_type, options):
    """torch's, in float64."""
    given = {name: torch.from_numpy(array).double() for name, array in feeds.items()}
    top, left, bottom, right = options.get("pads", [0] * 4)
    geometry = {"stride": options.get("strides", 1), "dilation": options.get("dilations", 1)}
    if op_type == "Conv":
        padded = torch.nn.functional.pad(given["x"], (left, right, top, bottom))
        return torch.nn.functional.conv2d(padded, given["w"], given.get("b"), **geometry).numpy()
    whole = torch.nn.functional.conv_transpose2d(given["x"], given["w"], given.get("b"), **geometry)
    return whole[:, :, top : whole.shape[2] - bottom, left : whole.shape[3] - right].numpy()


@pytest.mark.parametrize(
    ("op_type", "x", "w", "options"),
    [
        ("Conv", (4, 16, 64, 66), (32, 16, 3, 3), {"pads": [1, 1, 1, 1], "bias": True}),
        ("Conv", (7, 16, 64, 66), (32, 16, 3, 5), {"strides": [2, 1], "dilations": [2, 1], "pads": [1, 0, 0, 2]}),
        ("Conv", (1, 48, 43, 44), (80, 48, 3, 4), {"bias": True}),
        ("Conv", (1, 64, 36, 36), (64, 64, 4, 4), {}),
        ("ConvTranspose", (4, 16, 64, 66), (16, 32, 3, 3), {"pads": [1, 1, 1, 1]}),
        ("ConvTranspose", (1, 80, 41, 41), (80, 48, 3, 4), {"bias": True, "pads": [0, 1, 2, 2]}),
        ("ConvTranspose", (1, 64, 35, 34), (64, 64, 4, 4), {"dilations": [2, 3], "pads": [6, 2, 0, 9]}),
        ("ConvTranspose", (3, 128, 9, 9), (128, 256, 4, 3), {}),
    ],
)
@pytest.mark.parametrize("batch", ["known", "open", "likely"])
def test_one_group_with_many_windows(op_type, x, w, options, batch):
    rng, bias = np.random.default_rng(0), options.get("bias", False)
    sizes = {"x": x, "w": w, **({"b": (w[op_type != "Conv"],)} if bias else {})}
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in sizes.items()}
    expected = expected_of(feeds, op_type, options)
    n = x[0] if batch == "known" else "n"
    model = conv((n, *x[1:]), w, op_type=op_type, y=(n, *expected.shape[1:]), **options)
    sizes = {"n": x[0]} if batch == "likely" else None
    assert blocked.block_channels(model, sizes) == of_blocks(model) == int(batch != "open" or x[0] == 1)
    np.testing.assert_allclose(run(model, feeds), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    "model",
    [
        lambda: conv((1, 12, 4, 4), (12, 1, 3, 3), group=12),
        lambda: conv((1, 16, 4, 4), (32, 1, 3, 3), group=16),
        lambda: conv((1, 16, 4, 4), (16, 16, 3, 3), y=(1, 16, 2, 2)),
        lambda: conv((8, 512, 4, 4), (512, 512, 3, 3), y=(8, 512, 4, 4), pads=[1, 1, 1, 1]),
        lambda: conv((64, 64, 40, 40), (64, 64, 1, 1), y=(64, 64, 40, 40)),
        lambda: conv((64, 64, 40, 40), (64, 64, 3, 3), y=(64, 64, 38, 38), kernel_shape=[1, 9]),
        lambda: conv((64, 64, 40, 40), (64, 64, 3, 3)),
        lambda: conv((64, 64, 40, 40), (60, 64, 3, 3), y=(64, 60, 38, 38)),
        lambda: conv((64, 60, 40, 40), (64, 60, 3, 3), y=(64, 64, 38, 38)),
        lambda: conv((64, 64, 40, 40), (64, 64, 3, 3), op_type="ConvTranspose", strides=[2, 1]),
        lambda: conv((64, 64, 40, 40), (64, 64, 3, 3), op_type="ConvTranspose", output_padding=[0, 1], dilations=[2, 2]),
        lambda: conv((64, 64, 40, 40), (64, 64, 3, 3), op_type="ConvTranspose", pads=[0, 3, 0, 0]),
        lambda: conv((64, 64, 40, 40), (64, 64, 3, 3), op_type="ConvTranspose", output_shape=[41, 41]),
        lambda: conv((64, 64, 40, 40), (64, 32, 3, 3), op_type="ConvTranspose", group=2),
        lambda: conv((1, 32, 4, 4), (16, 2, 3, 3), group=16, bias=True),
        lambda: conv((1, 16, 4, 4), (16, 1, 3, 3), group=16, auto_pad="SAME_UPPER"),
        lambda: conv((1, 16, 4, 4), (16, 1, 3, 3), group=16, kind=ir.DataType.DOUBLE),
        lambda: conv((1, 16, 4), (16, 1, 3), group=16),
        lambda: conv((1, 16, 4, 4), (16, 1, "k", 3), group=16),
        lambda: conv((1, 16, 4, 4), (16, 1, 3, 3), group=16, constant=np.ones((16, 1, 3, 3), np.float32)),
    ],
    ids=[
        "no whole blocks",
        "two results",
        "few windows",
        "few windows for the weights",
        "one group of 1x1",
        "a kernel that the weights are not",
        "unknown result",
        "no whole blocks of results",
        "no whole blocks of channels",
        "transposed by strides",
        "transposed with more behind",
        "transposed and cut inside",
        "transposed to a size",
        "transposed by groups",
        "bias of a sum",
        "auto_pad",
        "double",
        "one axis",
        "unknown size",
        "constant weights",
    ],
)
def test_others_stay(model):
    model = model()
    assert blocked.block_channels(model) == of_blocks(model) == 0
    assert "com.microsoft.nchwc" not in model.opset_imports


@pytest.mark.parametrize(
    "x", [(1, 8, 4, 4), (1, 24, 4, 4), (1, 32, 4, 4), (1, 0, 4, 4), (1, 16, 4), (1, 16, 4, 4, 4), (16,), (1, 16, 2, 2)]
)
@pytest.mark.parametrize("w", [(16, 1, 3, 3), (8, 2, 3, 3)])
def test_images_of_another_shape_are_refused(x, w):
    """The file says nothing of x, so the kernel is what looks."""
    refused(conv(x, w, group=w[0]), x, w)


@pytest.mark.parametrize(
    "x", [(1, 16, 40, 40), (1, 24, 40, 40), (1, 31, 40, 40), (1, 33, 40, 40), (1, 48, 40, 40), (1, 0, 40, 40), (1, 32, 40), (1, 32)]
)
@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_so_they_are_with_one_group(x, op_type):
    refused(conv((64, 32, 40, 40), (32, 32, 3, 3), op_type=op_type, y=(64, 32, 38, 38)), x, (32, 32, 3, 3))


def refused(model, x, w):
    assert blocked.block_channels(model) == 1
    model.graph.inputs[0].shape = None
    with pytest.raises(Exception, match=r"(?i)shape|rank|channels|dimension|invalid"):
        run(model, {"x": np.ones(x, np.float32), "w": np.ones(w, np.float32)})


def computed(model, real):
    """The weights are what another node computes, of which the graph says their shape, and which have another."""
    w = model.graph.inputs[1]
    node = ir.node("Neg", [ir.val("v", ir.DataType.FLOAT, real)], outputs=[ir.val("computed", ir.DataType.FLOAT, list(w.shape))])
    model.graph.insert_before(model.graph[0], node)
    for conv_node in list(model.graph):
        if conv_node.op_type != "Neg":
            conv_node.replace_input_with(1, node.outputs[0])
    model.graph.inputs[1] = node.inputs[0]
    return model


@pytest.mark.parametrize(
    ("op_type", "x", "w", "real"),
    [
        ("Conv", (64, 32, 40, 40), (64, 32, 1, 9), (64, 32, 9, 1)),
        ("Conv", (64, 32, 40, 40), (64, 32, 3, 3), (32, 64, 3, 3)),
        ("ConvTranspose", (64, 32, 40, 40), (32, 64, 3, 3), (64, 32, 3, 3)),
        ("Conv", (64, 16, 40, 40), (16, 1, 1, 9), (16, 1, 9, 1)),
    ],
)
def test_computed_weights_have_the_shape_that_the_file_says(op_type, x, w, real):
    group = {"group": 16} if w[1] == 1 else {}
    for shape, right in ((w, True), (real, False)):
        model = computed(conv(x, w, op_type=op_type, y=(64, 64, 38, 38), **group), shape)
        assert blocked.block_channels(model) == 1
        model.graph.inputs[1].shape = None
        feeds = {"x": np.ones((1, *x[1:]), np.float32), "v": -np.ones(shape, np.float32)}
        model.graph.inputs[0].shape = None
        if right:
            assert run(model, feeds).max() == np.prod(w[2:]) * (1 if group else 32)
        else:
            with pytest.raises(Exception, match="the file says of 'computed' another shape"):
                run(model, feeds)


def test_names_of_the_graph_are_left_alone():
    """An input of a name that the pass would give, and readers of the result under its own."""
    model = conv((1, 16, 4, 4), (16, 1, 3, 3), group=16)
    model.graph.inputs[0].name = "blocked/Reshape_2"
    assert blocked.block_channels(model) == 1
    proto = ir.to_proto(model)
    names = [
        *(value.name for value in proto.graph.input),
        *(t.name for t in proto.graph.initializer),
        *(o for n in proto.graph.node for o in n.output),
    ]
    assert len(names) == len(set(names)) and proto.graph.output[0].name == "y"
    feeds = {"blocked/Reshape_2": np.ones((1, 16, 4, 4), np.float32), "w": np.ones((16, 1, 3, 3), np.float32)}
    np.testing.assert_allclose(run(model, feeds), np.full((1, 16, 2, 2), 9), rtol=1e-6)


def test_without_such_kernels_nothing_changes(monkeypatch):
    monkeypatch.setattr(blocked, "block_size", lambda: 0)
    model = conv((1, 16, 4, 4), (16, 1, 3, 3), group=16)
    assert blocked.block_channels(model) == of_blocks(model) == 0


class Depthwise(nn.Module):
    """Two depthwise convolutions, one with places left out, and what mixes the channels."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 1),
            nn.Conv2d(16, 16, (5, 3), padding=(2, 1), groups=16),
            nn.Tanh(),
            nn.Conv2d(16, 16, 3, stride=2, dilation=2, groups=16, bias=False),
            nn.Conv2d(16, 4, 1),
        )

    def forward(self, x):
        return self.layers(x).mean((2, 3))


def trains_as_eager(model, x, target, dynamo, counts):
    """A step and a loaded module have eager's loss and gradients.

    Returns:
        What stands in ``counts``, where a pass tells what it does, of the loaded module and of the step.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = exporter.load(exporter.export(model, (x,), dynamo=dynamo)).train()
        step = exporter.export_training_step(
            model, (x,), loss=nn.functional.cross_entropy, targets=(target,), optimizer="sgd", hyperparameters={"lr": 0.5}, dynamo=dynamo
        )
    loss = nn.functional.cross_entropy(model.double()(x.double()), target)
    loss.backward()
    nn.functional.cross_entropy(loaded(x), target).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name).grad.double(), parameter.grad, rtol=1e-4, atol=1e-6)
    found = list(counts)
    counts.clear()
    trainer = Trainer(step)
    names = (*trainer.layout.inputs, *trainer.layout.targets)
    assert trainer.step(dict(zip(names, (x, target), strict=True))) == pytest.approx(float(loss.detach()), rel=1e-5)
    state = trainer.state_dict()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state[name].double(), parameter.detach() - 0.5 * parameter.grad, rtol=1e-4, atol=1e-5)
    return found, counts


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_steps_and_loaded_modules_have_eagers_gradients(dynamo, monkeypatch):
    counts = []
    replace = blocked.block_channels
    monkeypatch.setattr("exporter.cpu.accelerator.block_channels", lambda *args: counts.append(replace(*args)) or counts[-1])
    torch.manual_seed(0)
    loaded, step = trains_as_eager(Depthwise(), torch.randn(2, 3, 12, 10), torch.tensor([1, 3]), dynamo, counts)
    assert sum(loaded) >= 4 <= sum(step)  # two of the forward; of the backward both for weights, and one for the images


@pytest.mark.parametrize("given", [0, 1])
def test_a_convolution_without_operands_is_left_alone(given):
    node = ir.node("ConvTranspose", [ir.val("x", ir.DataType.FLOAT, [1, 2, 3, 4])][:given])
    assert blocked.weights_of_images(node) == []
    assert not products._fits(node, {})
