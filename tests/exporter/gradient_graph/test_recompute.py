"""What is computed again in the backward: the same bits, less kept, nothing twice that must run once."""

from __future__ import annotations

import copy
import json
import math
import warnings

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from exporter.gradient_graph.costs import Kind, Sizes, kind_of, seconds_as_bytes
from exporter.gradient_graph.recompute import checked
from symbolics.errors import ArgumentError, PythonopWarning
from symbolics.node.dtypes import DTYPES
from tests.exporter.training.loop import run
from tests.support import nodes
from tests.zoo.functions import Cube

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
ALLOW = ["tests.zoo.functions"]


class Block(nn.Module):
    def __init__(self, width, drop):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(drop)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (t.reshape(batch, length, 2, width // 2).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        attention = torch.softmax(q @ k.transpose(-1, -2) * (width // 2) ** -0.5, -1)
        x = x + self.out((self.drop(attention) @ v).transpose(1, 2).reshape(batch, length, width))
        h = self.up(self.second(x))
        h = 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044715 * h**3)))  # as GPT-2 writes it, which onnxruntime knows as FastGelu
        return x + self.down(self.drop(h))


class Gpt(nn.Module):
    def __init__(self, width=32, drop=0.1):
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.blocks = nn.ModuleList(Block(width, drop) for _ in range(2))
        self.head = nn.Linear(width, 17)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.first, self.second = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(self.second(self.b(F.relu(self.first(self.a(x))))) + x)


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Residual(8), Residual(8), nn.Flatten(), nn.Linear(512, 5)
    )


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(6, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(torch.tanh(torch.exp(-(self.cell(x)[0] ** 2))))


class Cubes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 5)

    def forward(self, x):
        x = torch.sin(Cube.apply(torch.tanh(self.first(x)) * 2)).exp()
        return self.last(torch.sigmoid(Cube.apply(self.second(x)).exp()))


def _ids(batch=3, length=8):
    return torch.randint(0, 17, (batch, length), generator=torch.Generator().manual_seed(2))


def _noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


#: name -> model, argument, a loss's target.
MODELS = {
    "gpt": lambda: (Gpt(), _ids()),
    "resnet": lambda: (resnet(), _noise(4, 3, 8, 8)),
    "lstm": lambda: (Recurrent(), _noise(7, 4, 6)),
    "functions": lambda: (Cubes(), _noise(9, 8)),
}


def _program(name, **options):
    torch.manual_seed(0)
    model, x = MODELS[name]()
    return exporter.export(model.train(), (x,), **options), x


def _loaded(program, choice):
    return exporter.load(program, allow=ALLOW, recompute=choice).train()


def _kept(result):
    """Bytes that a forward has left for the backward."""
    function = result.grad_fn
    while not hasattr(function, "run"):
        function = function.next_functions[0][0]
    values = function.run.kept[0].values.values()
    return sum(math.prod(value.shape()) * DTYPES[value.element_type()].itemsize for value in values)


def _step(module, x):
    """Output, bytes kept, gradients, buffers."""
    torch.manual_seed(5)  # dropout's
    y = module(x)
    kept = _kept(y)
    (y * torch.arange(1.0, y.numel() + 1).reshape(y.shape)).mean().backward()
    found = {name: p.grad for name, p in module.named_parameters()} | dict(module.named_buffers())
    return kept, {"output": y.detach(), **found}


def _assert_same_bits(one, two):
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert (value is None) == (two[name] is None), name
        assert value is None or torch.equal(value, two[name]), name


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_file_gives_the_same_bits_and_keeps_less(name, dynamo):
    program, x = _program(name, dynamo=dynamo)
    all_kept, expected = _step(_loaded(program, None), x)
    auto_kept, auto = _step(_loaded(program, "auto"), x)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        least, none = _step(_loaded(program, 0), x)
    _assert_same_bits(expected, auto)
    _assert_same_bits(expected, none)
    assert auto_kept < all_kept
    assert least <= auto_kept
    assert (least > 0) == any(issubclass(w.category, PythonopWarning) and "recompute=0" in str(w.message) for w in said)


def test_a_third_of_what_a_transformer_keeps_is_cheap():
    program, x = _program("gpt")
    assert _step(_loaded(program, "auto"), x)[0] < 0.67 * _step(_loaded(program, None), x)[0]


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_a_limit_holds_and_is_used(share):
    program, x = _program("gpt")
    everything, expected = _step(_loaded(program, None), x)
    limit = int(share * everything)
    kept, found = _step(_loaded(program, limit), x)
    assert 0.7 * limit < kept <= limit
    _assert_same_bits(expected, found)


def test_a_limit_that_all_fits_in_changes_nothing():
    program, x = _program("gpt")
    loaded = _loaded(program, 1 << 40)
    everything = _step(_loaded(program, None), x)[0]
    assert _step(loaded, x)[0] == everything


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_sizes_that_vary_are_those_of_the_first_call(dynamo):
    program, x = _program("gpt", dynamo=dynamo, dynamic_shapes={"ids": {0: torch.export.Dim("batch", min=2, max=64)}})
    limit = int(0.6 * _step(_loaded(program, None), x)[0])
    first = _loaded(program, limit)
    kept, found = _step(first, x)
    assert 0.5 * limit < kept <= limit
    _assert_same_bits(_step(_loaded(program, None), x)[1], found)
    for other in (_ids(7), _ids(2)):
        _assert_same_bits(_step(_loaded(program, None), other)[1], _step(_loaded(program, limit), other)[1])
    assert _step(first, _ids(6))[0] > limit  # another batch: the plan is the first one's


@pytest.mark.parametrize("choice", ["auto", 0])
def test_a_function_is_called_once(choice, monkeypatch):
    program, x = _program("functions")
    module, calls = _loaded(program, choice), []
    forward = Cube.forward
    monkeypatch.setattr(Cube, "forward", staticmethod(lambda *args: calls.append(1) or forward(*args)))
    _step(module, x)
    assert len(calls) == 2


def test_a_gradient_of_a_gradient_has_the_same_bits():
    program, x = _program("functions")
    found = []
    for choice in (None, "auto", 0):
        module, at = _loaded(program, choice), x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(at).square().sum(), at, create_graph=True)
        slope.square().sum().backward()
        found.append({"slope": slope.detach(), "x": at.grad, **{name: p.grad for name, p in module.named_parameters()}})
    _assert_same_bits(found[0], found[1])
    _assert_same_bits(found[0], found[2])


def test_a_head_whose_output_is_not_used_has_no_gradient():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.one, self.two = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            h = torch.tanh(torch.sigmoid(self.body(x)).exp())
            return torch.sin(self.one(h).exp()), torch.sin(self.two(h).exp())

    torch.manual_seed(0)
    model, x = Heads(), _noise(9, 8)
    program = exporter.export(model, (x,))
    grads = []
    for choice in (None, "auto", 0):
        module = _loaded(program, choice)
        module(x)[0].sum().backward()
        grads.append({name: p.grad for name, p in module.named_parameters()})
    assert grads[0]["two.weight"] is None
    _assert_same_bits(grads[0], grads[1])
    _assert_same_bits(grads[0], grads[2])


def test_statistics_count_once():
    program, x = _program("resnet")
    module = _loaded(program, "auto")
    for _ in range(3):
        module(x).sum().backward()
    assert module.state_dict()["1.num_batches_tracked"] == 3


# ------------------------------------------------------------------------------------------------------- a step in one file
def _step_file(name, choice, **options):
    torch.manual_seed(0)
    model, x = MODELS[name]()
    y = copy.deepcopy(model)(x)
    target = torch.randint(0, y.shape[-1], y.shape[:-1], generator=torch.Generator().manual_seed(4))
    loss = _loss if y.dim() > 2 else F.cross_entropy
    step = exporter.export_training_step(model.train(), (x,), loss=loss, targets=(target,), recompute=choice, **options)
    return step, [(x, target)] * 3


def _loss(y, target):
    return F.cross_entropy(y.flatten(0, -2), target.flatten())


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_gives_the_same_bits(name, dynamo):
    expected, batches = _step_file(name, None, dynamo=dynamo)
    losses, state = run(expected, batches, allow=ALLOW)
    for choice in ("auto", 0):
        step, _ = _step_file(name, choice, dynamo=dynamo)
        assert len(step.model.graph) > len(expected.model.graph)
        assert len(nodes(step.model, "PythonOp")) == len(nodes(expected.model, "PythonOp"))
        again, after = run(step, batches, allow=ALLOW)
        assert losses == again
        assert state.keys() == after.keys()
        for key, value in state.items():
            np.testing.assert_array_equal(value, after[key], key)


def test_onnxruntime_runs_the_copies_behind_the_forward(tmp_path):
    step, batches = _step_file("gpt", "auto")
    options = exporter.session_options()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = exporter.inference_session(step.model, sess_options=options)
    feeds = dict(zip((*step.layout.inputs, *step.layout.targets), (t.numpy() for t in batches[0]), strict=True))
    session.run(None, {**step.initial, **feeds})
    with open(session.end_profiling(), encoding="utf-8") as file:
        events = [event for event in json.load(file) if event.get("name", "").endswith("_kernel_time")]
    order = [event["name"].removesuffix("_kernel_time") for event in sorted(events, key=lambda event: event["ts"])]
    written = {node.name for node in step.model.graph if node.name.startswith("again/")}
    copies = [place for place, name in enumerate(order) if name in written and "Tanh" in _operators(step)[name]]
    tanhs = [
        place
        for place, name in enumerate(order)
        if name not in written and not name.startswith("step/") and _operators(step).get(name) == "Tanh"
    ]  # not AdamW's
    assert len(copies) == len(tanhs) == 2  # none was merged with the forward's
    assert max(tanhs) < min(copies)
    gradients = [place for place, name in enumerate(order) if name.startswith("grad/")]
    assert any(place < min(copies) for place in gradients)


def test_masks_are_not_drawn_again():
    step, _ = _step_file("gpt", "auto")
    again = {node.op_type for node in step.model.graph if node.name.startswith("again/")}
    assert {"Cast", "Mul"} <= again  # what a mask thins out is computed again
    assert not {"GreaterOrEqual", "Floor"} & again


def test_no_shape_depends_on_values():
    """OpenVINO makes wrong numbers of shapes that do: what parts the copies in a step stands in values."""
    step, _ = _step_file("gpt", "auto")
    chosen = [node for node in step.model.graph if node.name.startswith("again/") and node.op_type == "Where"]
    assert chosen  # the zeros that part them
    assert {node.outputs[0].dtype for node in chosen} == {ir.DataType.FLOAT}


def _operators(step):
    return {node.name: node.op_type for node in step.model.graph}


# ------------------------------------------------------------------------------------------------------------ the choice
@pytest.mark.parametrize("value", [None, "auto", 0, 12, np.int64(7)])
def test_what_may_be_given(value):
    assert checked(value) == value


@pytest.mark.parametrize("value", [-1, True, False, "all", "", "12", 1.5, b"auto", [1], float("inf")])
def test_anything_else_is_an_error_that_says_what_may(value):
    program, x = _program("lstm")
    for call in (
        lambda: exporter.load(program, recompute=value),
        lambda: exporter.export_training_step(Recurrent(), (x,), loss=lambda y: y.sum(), recompute=value),
    ):
        with pytest.raises(ArgumentError, match=r'give None .*, "auto" .*, or how many bytes'):
            call()


def _graph(text):
    model = ir.from_onnx_text(text)
    return model, {node.op_type: node for node in model.graph}


def test_kinds_and_costs():
    model, by = _graph("""
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[4,8] x, float[8,16] w) => (float[4,16] z) {
            y = MatMul(x, w)
            t = Tanh(y)
            r = RandomNormalLike(t)
            u = Add(t, r)
            v = Transpose<perm=[1,0]>(u)
            z = Transpose<perm=[1,0]>(v)
        }
    """)
    for node, shape in zip(model.graph, ([4, 16], [4, 16], [4, 16], [4, 16], [16, 4], [4, 16])):
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    sizes = Sizes(model, {})
    kinds = {name: kind_of(node, {}) for name, node in by.items()}
    assert kinds == {"MatMul": Kind.HEAVY, "Tanh": Kind.LIGHT, "RandomNormalLike": Kind.NEVER, "Add": Kind.LIGHT, "Transpose": Kind.LIGHT}
    assert sizes.bytes(by["Tanh"].outputs[0]) == 4 * 16 * 4
    assert seconds_as_bytes(by["Add"], sizes) == 3 * 256
    assert seconds_as_bytes(by["Tanh"], sizes) > 2 * 256
    assert seconds_as_bytes(by["Transpose"], sizes) == 0


def test_sizes_of_the_example():
    model, by = _graph(
        """
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[n,8] x) => (float[m] z) { y = Concat<axis=0>(x, x)
            z = ReduceSum<keepdims=0>(y, a) }
    """.replace("(y, a)", "(y)")
    )
    sizes = Sizes(model, {"x": (5, 8)})
    assert sizes.dims(by["Concat"].outputs[0]) == (10, 8)
    assert sizes.bytes(by["Concat"].outputs[0]) == 320
    assert by["Concat"].outputs[0].shape is None  # the model itself is as it was
