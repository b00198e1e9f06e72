"""Transposed convolutions with strides as a convolution for each phase."""

from __future__ import annotations

import itertools
import time

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import exporter
from exporter.cpu import blocked, phases
from exporter.cpu.operators import DOMAIN, has_wide_vectors
from exporter.cpu.phases import INTERLEAVE, convolve_phases
from tests.exporter.cpu.support import inference_session, rewrite_convolutions
from tests.exporter.cpu.test_blocked import computed, conv, trains_as_eager


@pytest.fixture
def always(monkeypatch):
    """However few windows there are."""
    monkeypatch.setattr(phases, "_WINDOWS", 1)
    monkeypatch.setattr(phases, "_PRODUCTS", 1)


def shape_of(x, w, options):
    """Height and width of the result."""
    strides, more, pads = options.get("strides", [1] * 2), options.get("output_padding", [0] * 2), options.get("pads", [0] * 4)
    return tuple((x[2 + i] - 1) * strides[i] + w[2 + i] + more[i] - pads[i] - pads[2 + i] for i in range(2))


def transposed(x, w, n=None, **options):
    """A model of one ConvTranspose; ``n`` in the place of the number of images."""
    n = x[0] if n is None else n
    return conv((n, *x[1:]), w, op_type="ConvTranspose", y=(n, w[1], *shape_of(x, w, options)), **options)


def numbers(x, w, bias=False):
    rng = np.random.default_rng(0)
    return {k: rng.standard_normal(s, np.float32) for k, s in {"x": x, "w": w, **({"b": w[1:2]} if bias else {})}.items()}


def expected_of(feeds, options):
    """torch's, in float64: all that windows reach and what `output_padding` adds, of which `pads` are cut off."""
    x, w, b = (torch.from_numpy(feeds[k]).double() if k in feeds else None for k in "xwb")
    assert x is not None and w is not None
    whole = nn.functional.conv_transpose2d(x, w, stride=options["strides"])
    down, across = options.get("output_padding", [0, 0])
    whole = nn.functional.pad(whole, (0, across, 0, down)) + (0 if b is None else b.view(1, -1, 1, 1))
    top, left, bottom, right = options.get("pads", [0] * 4)
    return whole[:, :, top : whole.shape[2] - bottom, left : whole.shape[3] - right].numpy()


def run(model, feeds):
    return inference_session(ir.to_proto(model)).run(None, feeds)[0]


def of_phases(model):
    """How many phases each of the nodes has."""
    return [len(node.inputs) for node in model.graph if node.op_type == INTERLEAVE]


@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (3, 3), (5, 5), (3, 2), (1, 4), (7, 6)], ids=str)
@pytest.mark.parametrize("strides", [(2, 2), (1, 2), (2, 1)], ids=str)
def test_the_result_is_torchs(always, kernel, strides):
    """Sizes of images, padding before and behind, and what no window reaches."""
    count = 0
    for pads, more, size, bias in itertools.product(
        [(0, 0, 0, 0), (1, 1, 1, 1), (2, 1, 0, 2)], [(0, 0), (1, 1), (0, 1)], [(6, 7), (9, 5), (2, 3), (16, 18)], [False, True]
    ):
        options = {"strides": strides, "pads": pads, "output_padding": more}
        x, w = (3, 32, *size), (32, 16, *kernel)
        if any(extra >= stride for extra, stride in zip(more, strides, strict=True)) or min(shape_of(x, w, options)) < 1:
            continue
        model, feeds = transposed(x, w, bias=bias, **options), numbers(x, w, bias)
        count += convolve_phases(model)
        np.testing.assert_allclose(run(model, feeds), expected_of(feeds, options), rtol=1e-4, atol=2e-4)
    assert count >= 4


@pytest.mark.parametrize(
    ("kernel", "options", "count"),
    [
        ((3, 3), {"pads": (1, 1, 1, 1), "output_padding": (1, 1)}, 4),
        ((2, 2), {"output_padding": (1, 1)}, 4),
        ((1, 1), {"output_padding": (1, 1)}, 1),
        ((1, 3), {"pads": (0, 1, 0, 1), "output_padding": (1, 0)}, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", ["known", "open", "likely"])
def test_phases_that_no_position_reaches_are_zero(kernel, options, count, batch):
    x, w, options = (16, 64, 16, 14), (64, 48, *kernel), {"strides": (2, 2), **options}
    model, feeds = transposed(x, w, None if batch == "known" else "n", **options), numbers(x, w)
    replaced = int(batch != "open")
    assert convolve_phases(model, {"n": 16} if batch == "likely" else None) == replaced and of_phases(model) == [count] * replaced
    np.testing.assert_allclose(run(model, feeds), expected_of(feeds, options), rtol=1e-4, atol=2e-4)


def test_numbers_of_images_of_which_the_graph_knows_nothing(always):
    w, options = (64, 32, 3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1)}
    model = transposed((1, 64, 9, 9), w, "n", **options)
    assert convolve_phases(model) == 1
    for images in (0, 1, 5):
        feeds = numbers((images, 64, 9, 9), w)
        expected = expected_of(feeds, options) if images else np.zeros((0, 32, 17, 17))
        np.testing.assert_allclose(run(model, feeds), expected, rtol=1e-4, atol=2e-4)


X, W, TWO = (16, 64, 16, 16), (64, 32, 3, 3), {"strides": (2, 2)}


def _unknown_height():
    model = transposed(X, W, **TWO)
    model.graph.inputs[0].shape = ir.Shape([16, 64, "h", 16])
    return model


@pytest.mark.parametrize(
    "model",
    [
        lambda: transposed(X, W),
        lambda: transposed(X, W, strides=(3, 2)),
        lambda: transposed(X, W, **TWO, dilations=(1, 2)),
        lambda: transposed(X, W, **TWO, group=2),
        lambda: transposed(X, W, **TWO, output_shape=(33, 33)),
        lambda: transposed(X, W, **TWO, auto_pad="SAME_UPPER"),
        lambda: transposed(X, W, **TWO, kernel_shape=(1, 9)),
        lambda: transposed(X, W, **TWO, pads=(0, 0, 0, -1)),
        lambda: conv(X, W, op_type="ConvTranspose", y=(16, 32, 33, 33), **TWO, pads=(0, 0)),
        lambda: transposed(X, W, **TWO, pads=(0, 0, 2, 0)),
        lambda: transposed(X, W, **TWO, pads=(3, 0, 0, 0)),
        lambda: transposed((16, 64, 16, 1), (64, 32, 3, 1), **TWO),
        lambda: transposed(X, (64, 32, 1, 1), **TWO, bias=True),
        lambda: transposed((16, 60, 16, 16), (60, 32, 3, 3), **TWO),
        lambda: transposed(X, (64, 36, 3, 3), **TWO),
        _unknown_height,
        lambda: transposed((1, 64, 16, 16), (64, 32, 3, 3), **TWO),
        lambda: transposed((400, 16, 2, 2), (16, 16, 3, 3), **TWO),
        lambda: transposed(X, W, **TWO, kind=ir.DataType.DOUBLE),
        lambda: transposed(X, W, **TWO, constant=np.ones(W, np.float32)),
        lambda: conv(X, W[1::-1] + W[2:], y=(16, 32, 7, 7), **TWO),
    ],
    ids=[
        "no strides", "strides of three", "dilations", "groups", "output_shape", "auto_pad", "a kernel that the weights are not",
        "padding that adds", "padding of one axis", "an end cut off", "a begin cut off", "a phase without places", "a bias where nothing is reached",
        "no whole blocks of channels", "no whole blocks of results", "unknown height", "few windows", "few products", "double",
        "constant weights", "no ConvTranspose",
    ],
)  # fmt: skip
def test_others_stay(model):
    model = model()
    assert convolve_phases(model) == 0 and of_phases(model) == []
    assert DOMAIN not in model.opset_imports and "com.microsoft.nchwc" not in model.opset_imports


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_positions_of_a_huge_kernel_are_not_listed(op_type):
    begin = time.monotonic()
    model = conv((1, 16, 20, 20), (16, 16, 2**40, 1), op_type=op_type, strides=[2, 2])
    assert convolve_phases(model) == blocked.block_channels(model) == 0
    assert time.monotonic() - begin < 10


def test_without_kernels_for_blocks_or_the_native_library_nothing_changes(monkeypatch):
    model = transposed(X, W, **TWO)
    assert rewrite_convolutions(model, native=False) == 0
    monkeypatch.setattr(phases, "block_size", lambda: 0)
    assert convolve_phases(model) == 0 and of_phases(model) == []


@pytest.mark.parametrize(
    "x",
    [(1, 48, 16, 16), (1, 63, 16, 16), (1, 65, 16, 16), (1, 80, 16, 16), (1, 0, 16, 16), (1, 64, 15, 16), (1, 64, 16, 17), (1, 64, 16), (1, 64)],
    ids=str,
)  # fmt: skip
def test_images_of_another_shape_are_refused(x):
    """The file says of a computed value another shape than it has."""
    model = transposed(X, W, "n", **TWO)
    assert rewrite_convolutions(model, {"n": 16}, native=True) > 0 and of_phases(model) == [4]
    model.graph.inputs[0].shape = model.graph.outputs[0].shape = None
    assert run(model, {"x": np.ones((1, *X[1:]), np.float32), "w": np.ones(W, np.float32)}).shape == (1, 32, 33, 33)
    with pytest.raises(Exception, match=r"(?i)shape|rank|channels|dimension|invalid"):
        run(model, {"x": np.ones(x, np.float32), "w": np.ones(W, np.float32)})


@pytest.mark.parametrize("real", [(32, 64, 3, 3), (64, 32, 9, 1), (32, 32, 3, 3), (64, 32, 3, 6)], ids=str)
def test_computed_weights_have_the_shape_that_the_file_says(real):
    for shape in (W, real):
        model = computed(transposed(X, W, "n", **TWO), shape)
        assert rewrite_convolutions(model, {"n": 16}, native=True) > 0 and of_phases(model) == [4]
        model.graph.inputs[0].shape = model.graph.inputs[1].shape = model.graph.outputs[0].shape = None
        feeds = {"x": np.ones((1, *X[1:]), np.float32), "v": -np.ones(shape, np.float32)}
        if shape == W:
            assert run(model, feeds).max() == 4 * 64
        else:
            with pytest.raises(Exception, match="the file says of 'computed' another shape"):
                run(model, feeds)


def test_what_the_file_says_of_the_result_is_not_believed():
    model = transposed(X, W, **TWO)
    model.graph.outputs[0].shape = ir.Shape(["n", 32, "h", "w"])
    node = model.graph[0]
    node.outputs[0].shape = ir.Shape([16, 32, 5, 5])
    reader = ir.node("Relu", node.outputs, outputs=[ir.val("z", ir.DataType.FLOAT, ["n", "c", "h", "w"])])
    model.graph.append(reader)
    model.graph.outputs[0] = reader.outputs[0]
    assert convolve_phases(model) == 1
    feeds = numbers(X, W)
    np.testing.assert_allclose(run(model, feeds), np.maximum(expected_of(feeds, TWO), 0), rtol=1e-4, atol=2e-4)


class Strided(nn.Module):
    """Two convolutions whose windows move by two, of odd sizes that they do not reach the end of, and one of 1x1."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 1),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.Conv2d(64, 32, 2, stride=2, bias=False),
            nn.Conv2d(32, 16, 1, stride=2),
            nn.Flatten(2),
        )

    def forward(self, x):
        return self.layers(x).mean(2)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_steps_and_loaded_modules_have_eagers_gradients(always, dynamo, monkeypatch):
    counts: list[int] = []
    monkeypatch.setattr("exporter.cpu.accelerator.convolve_phases", lambda *args: counts.append(convolve_phases(*args)) or counts[-1])
    torch.manual_seed(0)
    loaded, step = trains_as_eager(Strided(), torch.randn(3, 3, 28, 21), torch.tensor([1, 3, 0]), dynamo, counts)
    assert sum(loaded) == (
        3 if has_wide_vectors() else 0
    )  # elsewhere torch's own kernels run the gradients of a loaded module's convolutions
    assert sum(step) == 3


# --------------------------------------------------------------------------------------------------- nodes of a file
SIZE = 16
GOOD = {"strides": [2, 2], "images": [-1, 32, 5, 6], "block": [SIZE], "phases": [0, 1, -1, 2]}


def node(inputs=3, outputs=1, element=1, made_as=None, **attributes):
    helper = onnx.helper
    names, results = [f"x{i}" for i in range(inputs)], [f"y{i}" for i in range(outputs)]
    said = {k: v for k, v in (GOOD | attributes).items() if v is not None}
    made = helper.make_node(INTERLEAVE, names, results, domain=DOMAIN, **said)
    graph = helper.make_graph(
        [made],
        "g",
        [helper.make_tensor_value_info(name, element, None) for name in names],
        [helper.make_tensor_value_info(name, made_as or element, None) for name in results],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    return inference_session(helper.make_model(graph, opset_imports=imports, ir_version=9))


def parts(images=2, channels=32, kind=np.float32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((images, channels, *size)).astype(kind) for size in ((3, 3), (3, 3), (2, 3))]


def test_a_node_puts_phases_beside_each_other():
    given = parts()
    expected = np.zeros((2, 32, 5, 6), np.float32)
    for part, (down, across) in zip(given, ((0, 0), (0, 1), (1, 1)), strict=True):
        n, c, h, w = part.shape
        plain = part.reshape(n, c // SIZE, h, w, SIZE).transpose(0, 1, 4, 2, 3).reshape(part.shape)
        expected[:, :, down::2, across::2] = plain
    np.testing.assert_array_equal(node().run(None, {f"x{i}": part for i, part in enumerate(given)})[0], expected)


@pytest.mark.parametrize(
    "change",
    [
        *({name: None} for name in GOOD),
        *({name: [1] * 5} for name in GOOD),
        {"strides": [0, 2]}, {"strides": [2, 3]}, {"strides": [1, 2]}, {"images": [-1, 24, 5, 6]}, {"images": [-1, 0, 5, 6]},
        {"images": [2, -1, 5, 6]}, {"images": [-1, 32, 0, 6]}, {"images": [2, 2**40, 2**40, 6]}, {"images": [2, 2**41, 5, 6]},
        {"block": [0]}, {"block": [6]}, {"block": [128]},
        {"phases": [0, 1, -1, 3]}, {"phases": [0, 1, -1, 1]}, {"phases": [1, 0, -1, 2]}, {"phases": [-1, -1, -1, -1]},
        {"phases": [0, 1, -2, 2]}, {"phases": [0, 1, -1, -1]}, {"block": 16}, {"strides": 2.0}, {"inputs": 2}, {"inputs": 4}, {"outputs": 2},
    ],
    ids=str,
)  # fmt: skip
def test_nodes_that_stand_for_nothing_are_refused(change):
    with pytest.raises(Exception, match="Interleave stands for no operators|Attribute"):
        node(**change)


def test_inputs_that_do_not_fit_are_refused():
    session = node(images=[2, 32, 5, 6])
    with pytest.raises(exporter.RunError, match="the file says of the input of a ConvTranspose another shape"):
        session.run(None, {f"x{i}": part for i, part in enumerate(parts(3))})
    for place, shape in itertools.product(
        range(3), [(1, 32, 3, 3), (2, 16, 3, 3), (2, 32, 3, 4), (2, 32, 4, 3), (2, 32, 9), (), (2, 32, 3, 3, 1)]
    ):
        given = {f"x{i}": part for i, part in enumerate(parts())} | {f"x{place}": np.ones(shape, np.float32)}
        with pytest.raises(exporter.RunError, match="the file says of the input of a ConvTranspose another shape"):
            session.run(None, given)
    with pytest.raises(exporter.RunError, match="not float32"):
        node(element=11).run(None, {f"x{i}": part for i, part in enumerate(parts(kind=np.float64))})


@pytest.mark.parametrize("made_as", [7, 11], ids=["int64", "double"])
def test_an_output_of_another_type_is_refused(made_as):
    """onnxruntime makes it of the type that the file says, whatever the operator does."""
    with pytest.raises(exporter.RunError, match="has another type than the file says"):
        node(made_as=made_as).run(None, {f"x{i}": part for i, part in enumerate(parts())})


def test_blocks_of_eight_channels(always, monkeypatch):
    """Those of a processor without AVX-512: what is laid out for them, whichever this one has."""
    monkeypatch.setattr(phases, "block_size", lambda: 8)
    model = transposed((2, 8, 6, 6), (8, 24, 3, 3), **TWO)
    assert convolve_phases(model) == 1 and blocked.block_channels(model) == 0
    (made,) = [node for node in model.graph if node.op_type == INTERLEAVE]
    assert list(made.attributes["block"].value) == [8]
