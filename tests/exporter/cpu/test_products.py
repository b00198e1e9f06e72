"""Convolutions of few windows as one product for all images."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import exporter
from exporter.cpu.products import multiply_few_windows
from tests.exporter.cpu.test_blocked import computed, conv, expected_of, run, trains_as_eager

FEW = ((8, 64, 2, 2), (512, 64, 3, 3), (8, 512, 2, 2))


def convs(model):
    return sum(node.op_type == "Conv" for node in model.graph)


@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        ((8, 64, 2, 2), (512, 64, 3, 3), {"pads": [1, 1, 1, 1]}),
        ((3, 256, 4, 4), (128, 256, 3, 3), {"pads": [1, 1, 1, 1], "bias": True}),
        ((16, 70, 3, 5), (400, 70, 2, 5), {"pads": [0, 2, 0, 0], "strides": [2, 2], "bias": True}),
        ((5, 128, 7, 6), (300, 128, 4, 4), {"dilations": [2, 1], "strides": [1, 2], "pads": [0, 1, 1, 0], "bias": True}),
        ((16, 4096, 3, 3), (8, 4096, 3, 3), {}),
    ],
    ids=["3x3", "sixteen windows", "strides", "dilations", "one window"],
)
def test_the_result_is_torchs(x, w, options):
    rng, bias = np.random.default_rng(0), options.get("bias", False)
    sizes = {"x": x, "w": w, **({"b": w[:1]} if bias else {})}
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in sizes.items()}
    expected = expected_of(feeds, "Conv", options)
    model = conv(x, w, y=expected.shape, **options)
    assert multiply_few_windows(model) == 1 and convs(model) == 0
    found = run(model, feeds)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    "model",
    [
        lambda: conv((8, 64, 1, 17), FEW[1], y=(8, 512, 1, 17), pads=[1, 1, 1, 1]),
        lambda: conv((8, 64, 3, 6), FEW[1], y=(8, 512, 3, 6), pads=[1, 1, 1, 1]),
        lambda: conv((3, 64, 2, 2), FEW[1], y=(3, 512, 2, 2), pads=[1, 1, 1, 1]),
        lambda: conv(("n", 64, 2, 2), FEW[1], y=("n", 512, 2, 2), pads=[1, 1, 1, 1]),
        lambda: conv(FEW[0], FEW[1], pads=[1, 1, 1, 1]),
        lambda: conv(FEW[0], (256, 64, 3, 3), y=(8, 256, 2, 2), pads=[1, 1, 1, 1]),
        lambda: conv((8, 1024, 2, 2), (512, 1024, 1, 1), y=(8, 512, 2, 2)),
        lambda: conv((8, 128, 2, 2), FEW[1], y=FEW[2], pads=[1, 1, 1, 1], group=2),
        lambda: conv(FEW[0], FEW[1], y=FEW[2], auto_pad="SAME_UPPER"),
        lambda: conv(FEW[0], FEW[1], y=FEW[2], pads=[1, 1, 1, 1], kind=ir.DataType.DOUBLE),
        lambda: conv(FEW[0], FEW[1], y=FEW[2], pads=[1, 1, 1, 1], constant=np.ones(FEW[1], np.float32)),
        lambda: conv((16, 64, 2), (512, 64, 9), y=(16, 512, 2), pads=[4, 4]),
        lambda: conv(FEW[0], FEW[1], y=FEW[2], pads=[1, 1, 1, 1], kernel_shape=[1, 9]),
        lambda: conv(FEW[0], FEW[1], y=FEW[2], pads=1.5),
        lambda: conv(FEW[0], FEW[1], y=FEW[2], pads=[1, 1]),
        lambda: conv(FEW[0], FEW[1], y=FEW[2], pads=[1, 1, 1, 1], strides=[0, 1]),
        lambda: conv(FEW[0], FEW[1], y=FEW[2], pads=[1, 1, 1, 1], group=[1]),
        lambda: conv((16, 64, 3, 3), FEW[1], y=FEW[2], pads=[1, 1, 1, 1]),
        lambda: conv((16, 64, 2, 2), FEW[1], y=(16, 512, 1, 1), pads=[4, 4, 4, 4], strides=[8, 8]),
    ],
    ids=[
        "windows of a row",
        "windows",
        "images",
        "unknown images",
        "unknown result",
        "weights",
        "1x1",
        "groups",
        "auto_pad",
        "double",
        "constant",
        "one axis",
        "a kernel that the weights are not",
        "pads of another type",
        "too few pads",
        "no strides",
        "groups of another type",
        "a result that is not the image's",
        "nothing of the image is seen",
    ],
)
def test_others_stay(model):
    model = model()
    assert multiply_few_windows(model) == 0 and convs(model) == 1


@pytest.mark.parametrize("x", [(8, 64, 4, 1), (8, 64, 1, 4), (8, 128, 2, 1), (8, 32, 2, 4), (8, 64, 4), (8, 16, 2, 2)])
def test_images_of_another_shape_are_an_error(x):
    """The file says of x what is not so: as many numbers, in another order."""
    model = conv(*FEW[:2], y=FEW[2], pads=[1, 1, 1, 1])
    assert multiply_few_windows(model) == 1
    model.graph.inputs[0].shape = None
    with pytest.raises(Exception, match=r"(?i)shape|rank"):
        run(model, {"x": np.ones(x, np.float32), "w": np.ones(FEW[1], np.float32)})


def test_as_many_numbers_in_another_order_are_an_error():
    """Without padding nothing else tells 3x6 from 6x3."""
    model = conv((16, 64, 3, 6), (512, 64, 3, 6), y=(16, 512, 1, 1))
    assert multiply_few_windows(model) == 1
    model.graph.inputs[0].shape = None
    with pytest.raises(Exception, match="the file says of 'x' another shape"):
        run(model, {"x": np.ones((16, 64, 6, 3), np.float32), "w": np.ones((512, 64, 3, 6), np.float32)})


def test_so_are_computed_weights():
    model = computed(conv((8, 64, 2, 10), (512, 64, 1, 9), y=(8, 512, 2, 2)), (512, 64, 9, 1))
    assert multiply_few_windows(model) == 1
    model.graph.inputs[1].shape = None
    with pytest.raises(Exception, match="the file says of 'x' and 'computed' another shape"):
        run(model, {"x": np.ones((8, 64, 2, 10), np.float32), "v": np.ones((512, 64, 9, 1), np.float32)})


def test_of_images_whose_number_is_open_a_likely_one_decides():
    for likely, count in ((16, 1), (1, 0)):
        model = conv(("n", 64, 2, 2), FEW[1], y=("n", 512, 2, 2), pads=[1, 1, 1, 1])
        assert multiply_few_windows(model, {"n": likely}) == count
        for images in (0, 1, 3):
            feeds = {"x": np.ones((images, 64, 2, 2), np.float32), "w": np.ones(FEW[1], np.float32)}
            np.testing.assert_array_equal(run(model, feeds), np.full((images, 512, 2, 2), 256))


class Late(nn.Module):
    """As the last layers of a ResNet see a small image."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(64, 512, 3, padding=1), nn.Tanh(), nn.Conv2d(512, 64, 3, padding=1, stride=2, bias=False))

    def forward(self, x):
        return self.layers(x).mean((2, 3))


def test_a_loaded_module_takes_the_number_of_its_first_call(monkeypatch):
    counts = []
    monkeypatch.setattr(
        "exporter.cpu.accelerator.multiply_few_windows", lambda *args: counts.append(multiply_few_windows(*args)) or counts[-1]
    )
    torch.manual_seed(0)
    model, x = Late(), torch.randn(16, 64, 2, 2)
    loaded = exporter.load(exporter.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))).train()
    for images in (16, 2):
        torch.testing.assert_close(loaded(x[:images]), model(x[:images]), rtol=1e-4, atol=1e-5)
    loaded(x[:2]).sum().backward()
    assert counts[-2:] == [2, 0], "forward, backward"


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_steps_and_loaded_modules_have_eagers_gradients(dynamo, monkeypatch):
    counts = []
    monkeypatch.setattr(
        "exporter.cpu.accelerator.multiply_few_windows", lambda *args: counts.append(multiply_few_windows(*args)) or counts[-1]
    )
    torch.manual_seed(0)
    loaded, step = trains_as_eager(Late(), torch.randn(16, 64, 2, 2), torch.arange(16), dynamo, counts)
    assert loaded[-2:] == [2, 0], "forward, backward"
    assert sum(step) >= 2
