"""Operators that only move elements, as one copy of the native library."""

from __future__ import annotations

import itertools
import time

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import exporter
from exporter.cpu import moves, weights
from exporter.cpu.moves import REARRANGE, move_at_once
from symbolics.errors import RunError
from tests.exporter.cpu.support import claim_gradients, inference_session, session_options
from tests.exporter.cpu.test_blocked import trains_as_eager


@pytest.fixture(autouse=True)
def by_products(monkeypatch):
    """Gradients for weights as on a processor without AVX-512; the others are test_weights.py's."""
    monkeypatch.setattr(weights, "has_wide_vectors", lambda: False)


@pytest.fixture(autouse=True)
def _calm():
    onnxruntime.set_default_logger_severity(4)
    yield
    onnxruntime.set_default_logger_severity(2)


@pytest.fixture
def always(monkeypatch):
    """However little there is to move."""
    monkeypatch.setattr(moves, "_FEW_ELEMENTS", 1)
    monkeypatch.setattr(moves, "_MANY_ELEMENTS", 1)


def parsed(body, x, kind="float", opset=18):
    """A model whose input x has this shape, and whose output y is what the body makes."""
    dims = ", ".join(map(str, x))
    return ir.from_proto(
        onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> g ({kind}[{dims}] x) => ({kind} y) {{ {body} }}')
    )


def rearranged(model):
    return sum(node.op_type == REARRANGE for node in model.graph)


def plain(model, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]).run(
        None, feeds
    )


def is_as_before(model, feeds, made=1):
    """The outputs of a model to the bit, with so many copies in it."""
    expected = plain(model, feeds)
    assert move_at_once(model) > 0 and rearranged(model) == made
    for threads in (1, 2):
        options = session_options()
        options.intra_op_num_threads = threads
        for found, wanted in zip(inference_session(ir.to_proto(model), sess_options=options).run(None, feeds), expected, strict=True):
            np.testing.assert_array_equal(found, wanted, strict=True)


CHAINS = {
    "transpose": "t = Transpose <perm = [2, 0, 1]> (x) y = Relu(t)",
    "all axes": "t = Transpose (x) y = Relu(t)",
    "pads": "p = Constant <value_ints = [0, 1, 2, 0, 3, 0]> () t = Pad (x, p) y = Relu(t)",
    "pads of turned ones": "p = Constant <value_ints = [2, 0, 1, 0, 1, 0]> () u = Transpose <perm = [2, 1, 0]> (x) t = Pad (u, p) y = Relu(t)",
    "slices": "a = Constant <value_ints = [1, -1]> () b = Constant <value_ints = [99, -99]> () c = Constant <value_ints = [1, -1]> () "
    "s = Constant <value_ints = [2, -2]> () t = Slice (x, a, b, c, s) y = Relu(t)",
    "indices": "i = Constant <value_ints = [5, 3, 1]> () t = Gather <axis = -1> (x, i) y = Relu(t)",
    "negative indices": "i = Constant <value_ints = [-1, -3]> () t = Gather <axis = 1> (x, i) y = Relu(t)",
    "one index": "i = Constant <value_int = 2> () t = Gather <axis = 1> (x, i) y = Relu(t)",
    "the same index": "i = Constant <value_ints = [2, 2, 2]> () t = Gather <axis = 1> (x, i) y = Relu(t)",
    "joined": "a = Constant <value_ints = [0]> () b = Constant <value_ints = [2]> () c = Constant <value_ints = [1]> () "
    "d = Constant <value_ints = [3]> () s = Slice (x, a, b, c) t = Slice (x, c, d, c) u = Concat <axis = -3> (s, t) y = Relu(u)",
    "reshaped": "r = Constant <value_ints = [0, -1, 2]> () t = Reshape (x, r) u = Transpose <perm = [2, 1, 0]> (t) y = Relu(u)",
    "reshaped and turned": "u = Transpose <perm = [2, 1, 0]> (x) r = Constant <value_ints = [3, -1]> () t = Reshape (u, r) v = Transpose (t) y = Relu(v)",
    "windows": "p = Constant <value_ints = [0, 1, 1, 0, 1, 1]> () t = Pad (x, p) r = Constant <value_ints = [0, -1]> () u = Reshape (t, r) "
    "i = Constant <value_ints = [0, 1, 2, 8, 9, 10]> () v = Gather <axis = 1> (u, i) y = Relu(v)",
    "an output": "y = Transpose <perm = [1, 0, 2]> (x)",
}


@pytest.mark.parametrize("body", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("kind", ["float", "double"])
def test_the_result_is_onnxruntimes(body, kind, always):
    x = np.random.default_rng(0).standard_normal((3, 4, 6)).astype("f" if kind == "float" else "d")
    is_as_before(parsed(body, x.shape, kind), {"x": x})


PADDED_TWICE = {
    "of a part that was padded": "p = Constant <value_ints = [0, 1, 0, 0, 0, 0]> () t = Pad (x, p) a = Constant <value_ints = [0]> () "
    "b = Constant <value_ints = [4]> () c = Constant <value_ints = [1]> () s = Slice (t, a, b, c) "
    "q = Constant <value_ints = [0, 0, 0, 0, 1, 0]> () u = Pad (s, q) y = Relu(u)",
    "of windows": "p = Constant <value_ints = [0, 0, 0, 0, 2, 0]> () t = Pad (x, p) i = Constant <value_ints = [0, 1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 5]> () "
    "s = Gather <axis = 1> (t, i) r = Constant <value_ints = [3, 3, 4, 6]> () v = Reshape (s, r) q = Constant <value_ints = [0, 0, 1, 0, 0, 0, 0, 0]> () "
    "u = Pad (v, q) y = Relu(u)",
}


@pytest.mark.parametrize("body", PADDED_TWICE.values(), ids=PADDED_TWICE)
def test_zeros_beside_numbers_are_zeros(body, always):
    """What would lie there is a number of the tensor."""
    is_as_before(parsed(body, (3, 4, 6)), {"x": np.random.default_rng(0).standard_normal((3, 4, 6), np.float32)}, made=1)


STAY = {
    "another filling": "p = Constant <value_ints = [0, 1, 2, 0, 3, 0]> () v = Constant <value_float = 1.0> () t = Pad (x, p, v) y = Relu(t)",
    "zero of the other sign": "p = Constant <value_ints = [0, 1, 2, 0, 3, 0]> () v = Constant <value_float = -0.0> () t = Pad (x, p, v) y = Relu(t)",
    "reflected": 'p = Constant <value_ints = [0, 1, 2, 0, 3, 0]> () t = Pad <mode = "reflect"> (x, p) y = Relu(t)',
    "less than there is": "p = Constant <value_ints = [0, -1, 0, 0, 0, 0]> () t = Pad (x, p) y = Relu(t)",
    "padding of a part": "a = Constant <value_ints = [1]> () b = Constant <value_ints = [3]> () s = Slice (x, a, b, a) "
    "p = Constant <value_ints = [0, 1, 0, 0, 1, 0]> () t = Pad (s, p) z = Relu(s) u = Shape(z) y = Expand(t, u)",
    "irregular indices": "i = Constant <value_ints = [0, 1, 3]> () t = Gather <axis = 1> (x, i) y = Relu(t)",
    "a table of indices": "i = Constant <value = int64[2, 2] {0, 1, 2, 3}> () t = Gather <axis = 1> (x, i) y = Relu(t)",
    "nothing moves": "r = Constant <value_ints = [12, 6]> () t = Reshape (x, r) u = Transpose <perm = [0, 1]> (t) y = Relu(u)",
    "a scalar": "i = Constant <value_int = 1> () t = Gather <axis = 0> (x, i) u = Gather <axis = 0> (t, i) v = Gather <axis = 0> (u, i) y = Relu(v)",
    "a product that reads either way": "t = Transpose <perm = [0, 2, 1]> (x) y = MatMul (x, t)",
}


@pytest.mark.parametrize("body", STAY.values(), ids=STAY)
def test_others_stay(body, always):
    model = parsed(body, (3, 4, 6))
    made = move_at_once(model)
    assert made == rearranged(model) == ("Slice" in body)  # of which the copy is another one
    assert [node.op_type for node in model.graph if node.op_type in ("Pad", "Gather", "Transpose")] or made


@pytest.mark.parametrize(
    "body",
    [
        "t = Transpose <perm = [1, 2, 0]> (x) y = Relu(t)",
        CHAINS["windows"],
        CHAINS["reshaped"],
        "r = Constant <value_ints = [-1, 2]> () t = Reshape (x, r) u = Transpose (t) y = Relu(u)",
    ],
)
def test_an_open_size_is_what_the_input_has(body, always):
    for count in (1, 5):
        is_as_before(parsed(body, ("n", 4, 6)), {"x": np.random.default_rng(0).standard_normal((count, 4, 6), np.float32)})


def test_nothing_is_what_is_made_of_nothing(always):
    body = CHAINS["pads of turned ones"] + " z = Identity(u)"
    is_as_before(parsed(body, (4, 6, "n")), {"x": np.ones((4, 6, 0), np.float32)})


def test_few_elements_stay():
    body = "t = Transpose <perm = [1, 0]> (x) y = Relu(t)"
    assert move_at_once(parsed(body, (63, 128))) == 0 and move_at_once(parsed(body, (64, 128))) == 1


def test_what_several_read_here_and_there_is_turned_once(always):
    """Each of the slices would wait for the memory, else."""
    body = (
        "t = Transpose <perm = [0, 2, 1]> (x) a = Constant <value_ints = [0]> () b = Constant <value_ints = [2]> () c = Constant <value_ints = [1]> () "
        "s = Slice (t, a, b, c) u = Slice (t, c, b, c) v = Relu(s) w = Relu(u) z = Concat <axis = 1> (v, w) y = Neg(z)"
    )
    model = parsed(body, (3, 4, 6))
    is_as_before(model, {"x": np.random.default_rng(0).standard_normal((3, 4, 6), np.float32)}, made=3)
    read = {node.inputs[0].name for node in model.graph if node.op_type == REARRANGE}
    assert "x" in read and len(read) == 2


def _random_chain(rng, shape):
    """Operators that move elements, each of what the one before made, some of what two before made."""
    nodes, values = [], [("x", list(shape))]
    made = itertools.count()

    def row(numbers):
        name = f"c{next(made)}"
        nodes.append(onnx.helper.make_node("Constant", [], [name], value_ints=[int(v) for v in numbers]))
        return name

    for _ in range(rng.integers(2, 6)):
        value, dims = values[-1] if rng.random() < 0.8 else values[rng.integers(len(values))]
        axis, name = int(rng.integers(len(dims))), f"v{next(made)}"
        kind = rng.choice(["Transpose", "Reshape", "Pad", "Slice", "Gather", "Concat"])
        if kind == "Transpose":
            perm = rng.permutation(len(dims))
            nodes.append(onnx.helper.make_node(kind, [value], [name], perm=perm.tolist()))
            dims = [dims[k] for k in perm]
        elif kind == "Reshape":
            flat = [f for d in dims for f in ([2, d // 2] if d % 2 == 0 and rng.random() < 0.5 else [d])]
            while len(flat) > 5 or (len(flat) > 1 and rng.random() < 0.5):
                k = int(rng.integers(len(flat) - 1))
                flat[k : k + 2] = [flat[k] * flat[k + 1]]
            nodes.append(onnx.helper.make_node(kind, [value, row(flat)], [name]))
            dims = flat
        elif kind == "Pad":
            pads = rng.integers(0, 2, 2 * len(dims))
            nodes.append(onnx.helper.make_node(kind, [value, row(pads)], [name]))
            dims = [d + int(pads[k] + pads[k + len(dims)]) for k, d in enumerate(dims)]
        elif kind == "Slice":
            step = int(rng.choice([1, 2, -1, -2]))
            start, end = (0, 99) if step > 0 else (-1, -99)
            start += int(rng.integers(0, 2)) if step > 0 and dims[axis] > 1 else 0
            nodes.append(onnx.helper.make_node(kind, [value, row([start]), row([end]), row([axis]), row([step])], [name]))
            dims = [*dims[:axis], len(range(dims[axis])[start:end:step]), *dims[axis + 1 :]]
        elif kind == "Gather":
            first, step, count = (int(rng.integers(0, dims[axis])) for _ in range(3))
            places = np.arange(count + 1) * step + first
            if (places >= dims[axis]).any():
                places = places[:1]
            nodes.append(onnx.helper.make_node(kind, [value, row(places - dims[axis] * rng.integers(0, 2))], [name], axis=axis))
            dims = [*dims[:axis], len(places), *dims[axis + 1 :]]
        else:
            nodes.append(onnx.helper.make_node(kind, [value, value], [name], axis=axis))
            dims = [*dims[:axis], 2 * dims[axis], *dims[axis + 1 :]]
        if np.prod(dims) < 20_000:
            values.append((name, dims))
    ends = [name for name, _ in values[1:]][-2:]
    outputs = [f"y{k}" for k in range(len(ends))]
    nodes += [onnx.helper.make_node("Neg", [name], [output]) for name, output in zip(ends, outputs, strict=True)]
    return nodes, outputs


@pytest.mark.parametrize("seed", range(12))
def test_random_chains_are_onnxruntimes_to_the_bit(seed, always):
    rng, made = np.random.default_rng(seed), 0
    for _ in range(25):
        shape = rng.integers(1, 7, rng.integers(1, 5)).tolist()
        nodes, outputs = _random_chain(rng, shape)
        first = ["n", *shape[1:]] if rng.random() < 0.3 else shape
        graph = onnx.helper.make_graph(
            nodes,
            "g",
            [onnx.helper.make_tensor_value_info("x", 1, first)],
            [onnx.helper.make_tensor_value_info(output, 1, None) for output in outputs],
        )
        model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9))
        feeds = {"x": rng.standard_normal(shape, np.float32)}
        expected = plain(model, feeds)
        made += move_at_once(model)
        for found, wanted in zip(inference_session(ir.to_proto(model)).run(None, feeds), expected, strict=True):
            np.testing.assert_array_equal(found, wanted, strict=True)
    assert made > 10


# --------------------------------------------------------------------------------------------- gradients for weights
GEOMETRIES = {
    "3x3": ((4, 24, 12, 10), (16, 24, 3, 3), {"padding": 1}, True),
    "without padding": ((4, 24, 12, 12), (16, 24, 3, 2), {}, True),
    "dilated": ((2, 24, 16, 16), (8, 24, 3, 3), {"dilation": (2, 3), "padding": (2, 3)}, True),
    "strides along the second axis": ((2, 32, 12, 13), (8, 32, 3, 3), {"stride": (1, 2), "padding": 1}, False),
    "strides": ((2, 32, 12, 13), (8, 32, 3, 3), {"stride": 2, "padding": 1}, False),
    "most places would be zero": ((4, 24, 4, 4), (16, 24, 3, 3), {"padding": 1}, False),
    "one axis": ((4, 24, 40), (16, 24, 5), {"padding": 2}, True),
    "three axes": ((2, 24, 9, 5, 4), (8, 24, 2, 3, 3), {"padding": 1}, True),
    "one result": ((4, 24, 12, 10), (1, 24, 3, 3), {"padding": 1}, True),
    "few channels": ((4, 20, 12, 10), (8, 20, 3, 3), {"padding": 1}, False),
    "very few channels": ((4, 3, 12, 10), (8, 3, 3, 3), {"padding": 1}, False),
}


def _conv(x, w, open_batch=False, **options):
    """A gradient graph of a convolution's sum of squares, the inputs, and torch's gradients in float64."""
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal(x, np.float32), "w": rng.standard_normal(w, np.float32)}
    given = {name: torch.from_numpy(array).double().requires_grad_() for name, array in feeds.items()}
    function = {3: nn.functional.conv1d, 4: nn.functional.conv2d, 5: nn.functional.conv3d}[len(x)]
    (function(given["x"], given["w"], **options) ** 2).sum().backward()
    n = len(x) - 2
    pads, strides, dilations = (
        [v] * n if isinstance(v := options.get(k, d), int) else list(v) for k, d in (("padding", 0), ("stride", 1), ("dilation", 1))
    )
    values = [ir.val(name, ir.DataType.FLOAT, shape) for name, shape in (("x", ("n", *x[1:]) if open_batch else x), ("w", w))]
    convolution = ir.node("Conv", values, {"pads": pads * 2, "strides": strides, "dilations": dilations})
    square = ir.node("Mul", [convolution.outputs[0]] * 2)
    total = ir.node("ReduceSum", [square.outputs[0]], {"keepdims": 0}, outputs=[ir.val("loss", ir.DataType.FLOAT, [])])
    graph = ir.Graph(values, [total.outputs[0]], nodes=[convolution, square, total], opset_imports={"": 18}, name="conv")
    return (
        exporter.build_gradient_graph(ir.Model(graph, ir_version=9), wrt=["w"]),
        feeds | {"loss_grad": np.ones([], np.float32)},
        given["w"].grad.numpy(),
    )


@pytest.mark.parametrize("open_batch", [False, True], ids=["", "open batch"])
@pytest.mark.parametrize(("x", "w", "options", "shared"), GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_gradient_for_weights_is_torchs(x, w, options, shared, open_batch, always, monkeypatch):
    model, feeds, expected = _conv(x, w, open_batch, **options)
    found, real = [], weights._shared
    monkeypatch.setattr(weights, "_shared", lambda *args: found.append(real(*args)) or found[-1])
    assert claim_gradients(model) == (w[1] >= 24 and "stride" not in options)
    assert move_at_once(model) > 0 or found
    assert [pair is not None for pair in found] == ([shared] if w[1] >= 24 and "stride" not in options else [])
    session = inference_session(ir.to_proto(model))
    results = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    gradient = next(value for name, value in results.items() if name != "loss")
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_steps_and_loaded_modules_have_eagers_gradients(dynamo, always, monkeypatch):
    counts = []
    real = moves.move_at_once
    monkeypatch.setattr("exporter.cpu.accelerator.move_at_once", lambda *args: counts.append(real(*args)) or counts[-1])
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 48, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(48, 48, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 5)),
    )
    _, step = trains_as_eager(model, torch.randn(16, 3, 16, 16), torch.arange(16) % 5, dynamo, counts)
    assert max(step) > 6


class Shuffled(nn.Module):
    """A convolution of channels that were shuffled, as ShuffleNet's: two axes of what is read."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.groups, self.first, self.conv = groups, nn.Conv2d(3, channels, 1), nn.Conv2d(channels, 32, 3, padding=1)

    def forward(self, x):
        y = self.first(x)
        n, c, h, w = y.shape
        y = y.view(n, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(n, c, h, w)
        return torch.relu(self.conv(y)).flatten(1)


@pytest.mark.parametrize("size", [4, 12], ids=["by parts", "shared"])
@pytest.mark.parametrize(("channels", "groups"), [(32, 16), (24, 12), (32, 2), (27, 3)])
def test_shuffled_channels_have_their_own_gradients(channels, groups, size, always):
    torch.manual_seed(0)
    model = Shuffled(channels, groups)
    trains_as_eager(model, torch.randn(16, 3, size, size), torch.arange(16) % 5, False, [])


# ------------------------------------------------------------------------------------------------------- files that lie
@pytest.mark.parametrize(
    ("name", "body", "other"),
    [
        ("i", "t = Gather <axis = 1> (x, i) y = Relu(t)", [3, 2, 1]),
        ("i", "t = Pad (x, i) y = Relu(t)", [1, 0, 0, 1, 0, 0]),
        ("i", "t = Reshape (x, i) u = Transpose (t) y = Relu(u)", [6, 12]),
    ],
    ids=["indices", "pads", "a shape"],
)
def test_constants_that_a_caller_may_give_are_none(name, body, other, always):
    first = {3: [0, 1, 2], 6: [0, 1, 0, 0, 1, 0], 2: [12, 6]}[len(other)]
    model = ir.from_proto(
        onnx.parser.parse_model(
            f'<ir_version: 9, opset_import: ["": 18]> g (float[3, 4, 6] x, int64[{len(other)}] {name}) => (float y) '
            f"<int64[{len(other)}] {name} = {{{', '.join(map(str, first))}}}> {{ {body} }}"
        )
    )
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 4, 6), np.float32), name: np.array(other, np.int64)}
    expected = plain(model, feeds)[0]
    move_at_once(model)
    np.testing.assert_array_equal(inference_session(ir.to_proto(model)).run(None, feeds)[0], expected, strict=True)


def test_what_a_file_says_of_the_result_is_not_believed(always):
    model = parsed("t = Transpose <perm = [2, 0, 1]> (x) s = Shape(t) f = Cast <to = 1> (s) z = Relu(t) y = Add(f, f)", (3, 4, 6))
    model.graph.outputs.append(next(node.outputs[0] for node in model.graph if node.op_type == "Relu"))
    turned = next(node.outputs[0] for node in model.graph if node.op_type == "Transpose")
    turned.shape, turned.type = ir.Shape([9, 9, 9]), ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs[1].type = turned.type
    assert move_at_once(model) == 1
    np.testing.assert_array_equal(inference_session(ir.to_proto(model)).run(None, {"x": np.ones((3, 4, 6), np.float32)})[0], [12, 6, 8])


def test_what_is_turned_again_for_several_has_its_type(always):
    rows = "a = Constant <value_ints = [0]> () b = Constant <value_ints = [2]> () c = Constant <value_ints = [1]> () "
    model = parsed(
        rows + "t = Transpose (x) s = Slice (t, a, b, c) u = Slice (t, c, b, c) v = Transpose (s) "
        "p = Slice (v, a, b, c) q = Slice (v, c, b, c) k = Relu(p) l = Relu(q) m = Relu(u) n = Add(k, k) o = Add(l, l) "
        "r = ReduceSum(m) d = Add(n, r) y = Concat <axis = 1> (d, o)",
        (4, 5, 6),
    )
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 5, 6), np.float32)}
    expected = plain(model, feeds)[0]
    assert move_at_once(model) > 2
    np.testing.assert_allclose(inference_session(ir.to_proto(model)).run(None, feeds)[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        'i = Constant <value_ints = [1]> () t = Gather <axis = "one"> (x, i) y = Relu(t)',
        "t = Transpose <perm = 1> (x) y = Relu(t)",
        "t = Transpose <perm = [0.5, 1.0, 2.0]> (x) y = Relu(t)",
        "i = Constant <value_ints = [1]> () t = Gather <axis = 9> (x, i) y = Relu(t)",
        "p = Constant <value_ints = [0, 4611686018427387904, 0, 0, 0, 0]> () t = Pad (x, p) y = Relu(t)",
        "i = Constant <value_ints = [9223372036854775807]> () t = Gather (x, i) y = Relu(t)",
        "r = Constant <value_ints = [-1, -1]> () t = Reshape (x, r) u = Transpose (t) y = Relu(u)",
        "t = Pad (x) y = Relu(t)",
        "t = Reshape (x) y = Relu(t)",
        "t = Slice (x) y = Relu(t)",
        "t = Gather (x) y = Relu(t)",
        "t = Concat (x, x) y = Relu(t)",
    ],
)
def test_nonsense_is_left_to_onnxruntime(body, always):
    assert move_at_once(parsed(body, (3, 4, 6))) == 0


def test_a_chain_of_many_axes_ends_in_time(always):
    nodes = [onnx.helper.make_node("Concat", [f"v{k}"] * 3, [f"v{k + 1}"], axis=0) for k in range(2000)]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Neg", ["x"], ["v0"]), *nodes],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, [2, 3])],
        [onnx.helper.make_tensor_value_info("v2000", 1, None)],
    )
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9))
    start = time.process_time()
    move_at_once(model)
    assert time.process_time() - start < 20


def test_a_shape_that_the_file_only_says_is_compared(always):
    model = parsed(
        "r = Constant <value_ints = [0, 0, -1]> () s = Shape(x) u = Reshape(x, s) t = Transpose <perm = [1, 0, 2]> (u) y = Relu(t)",
        (3, 4, 6),
    )
    reshape = next(node for node in model.graph if node.outputs[0].name == "u")
    reshape.outputs[0].shape, reshape.outputs[0].type = ir.Shape([3, 6, 4]), ir.TensorType(ir.DataType.FLOAT)
    assert move_at_once(model) == 1
    with pytest.raises(RunError, match="another shape than it has"):
        inference_session(ir.to_proto(model)).run(None, {"x": np.ones((3, 4, 6), np.float32)})


def test_other_operators_of_the_same_names_stay(always):
    model = parsed("t = Transpose <perm = [1, 0]> (x) y = Relu(t)", (4, 6))
    next(node for node in model.graph if node.op_type == "Transpose").domain = "own"
    assert move_at_once(model) == 0


def test_sizes_that_a_caller_may_give_are_no_facts():
    """An initializer that is an input as well: what ONNX infers from its value is not so where another one is fed."""
    text = """<ir_version: 9, opset_import: ["": 18], metadata_props: ["pythonop.step": "{}", "pythonop.version": "1"]>
        g (float[n] x, int64[2] s = {64, 128}) => (float[a, b] y) { r = Reshape(x, s) t = Transpose<perm = [1, 0]>(r) e = Exp(t) y = Mul(e, t) }"""
    model = onnx.parser.parse_model(text)
    x = np.random.default_rng(0).normal(size=8192).astype(np.float32)
    session = inference_session(model)
    for sizes in ((64, 128), (128, 64), (1, 8192)):
        turned = x.reshape(sizes).T
        np.testing.assert_allclose(session.run(None, {"x": x, "s": np.array(sizes)})[0], np.exp(turned) * turned, rtol=1e-5)
