"""Arguments and results that exporters meet raw: unread, without a gradient, the model's own state."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from symbolics.node.names import UNCHECKED_KEY


def _times(ctx, x, *, factor):
    ctx.factor = factor
    return x * factor


class Partial(torch.autograd.Function):
    forward = staticmethod(functools.partial(_times, factor=3.0))

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.factor * g


def _leaf(m, x):
    h = x[:, None]
    h.requires_grad = True  # as transformers' Wav2Vec2 and HuBERT do in training
    return m.head(h)[:, 0]


def _no_leaf(m, x):
    h = x * 2
    h.requires_grad = False
    return m.head(h)


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.head, self.function = nn.Linear(4, 3), function
        self.register_buffer("k", torch.ones(3))

    def forward(self, *args):
        return self.function(self, *args)


def _view(m, x):
    h = x[:, None]
    h.requires_grad = False
    return m.head(h)


KEPT: list[torch.Tensor] = []  # what a model keeps in a global variable, nobody takes back
LABELS = torch.tensor([0, 1, 2])
CASES = {
    "unread input": (lambda m, x, mask: m.head(x), (torch.ones(3),)),
    "nothing read": (lambda m, x: torch.ones(2), ()),
    "returned buffer": (lambda m, x: (m.head(x), m.k), ()),
    "returned parameter": (lambda m, x: (m.head(x), m.head.weight), ()),
    "class weights": (lambda m, x, w: F.cross_entropy(m.head(x), LABELS, weight=w), (torch.rand(3),)),
    "pos_weight": (lambda m, x, w: F.binary_cross_entropy_with_logits(m.head(x), torch.ones(3, 3), pos_weight=w), (torch.rand(3),)),
    "a leaf made of an input": (_leaf, ()),
    "a leaf without a gradient": (_no_leaf, ()),
    "a view without a gradient": (_view, ()),
    "forward is a partial": (lambda m, x: Partial.apply(m.head(x)), ()),
}


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_runs_as_in_eager(case, dynamo):
    function, more = CASES[case]
    model, args = Model(function).train(), (torch.randn(3, 4), *more)
    program = exporter.export(model, args, dynamo=dynamo)
    assert UNCHECKED_KEY not in program.model.metadata_props
    module = exporter.load(program, allow=[Partial]).train()
    found, expected = module(*args), model(*args)
    torch.testing.assert_close(found, expected)
    first, other = (y[0] if isinstance(y, tuple) else y for y in (found, expected))
    if other.requires_grad:
        first.sum().backward()
        other.sum().backward()
        torch.testing.assert_close(module.head.weight.grad, model.head.weight.grad)


def test_a_tensor_of_an_earlier_call_is_named():
    """Under dynamo, it is a constant."""

    def remembers(m, x):
        KEPT.append(m.head(x))
        return sum(KEPT)

    with pytest.raises(
        exporter.ExportError,
        match=r"\w+, called in module <root> at tests.*test_unusual_arguments:\d+: it reads a tensor that an earlier call",
    ):
        exporter.export(Model(remembers), (torch.randn(3, 4),), dynamo=False)


@pytest.mark.parametrize("function", [lambda m, x: m.head(x).reshape(0, 3, 1), lambda m, x: m.head(x).unflatten(0, (0, 2))])
def test_an_input_without_elements(function, dynamo):
    """torch's TorchScript exporter divides by their number, which ended the process."""
    x = torch.zeros(0, 4)
    module = exporter.load(exporter.export(Model(function), (x,), dynamo=dynamo))
    torch.testing.assert_close(module(x), Model(function)(x))


class Defaults(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x, mask=None, scale=2.0, negative=False, count=3, other=None):
        y = self.head(x) * scale + count * (not negative)
        return (y if mask is None else y * mask) + (0 if other is None else other)


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((torch.rand(3),), {}), ((), {"mask": torch.rand(3)}), ((None, 0.5), {}), ((), {"negative": True, "other": torch.rand(3)})],
)
def test_arguments_that_are_left_out_stay_what_forward_says(args, kwargs, dynamo):
    """torch.onnx.export(dynamo=False) makes inputs of numbers that are defaults, which whoever runs the file would have to know."""
    model, args = Defaults(), (torch.randn(2, 4), *args)
    program = exporter.export(model, args, kwargs, dynamo=dynamo)
    assert [value.name for value in program.model.graph.inputs] == [
        "x",
        *(["mask"] if "mask" in kwargs or (torch.is_tensor(args[-1]) and len(args) > 1) else []),
        *(["other"] if "other" in kwargs else []),
    ]
    tensors = [value for value in (*args, *kwargs.values()) if torch.is_tensor(value)]
    torch.testing.assert_close(exporter.load(program)(*tensors), model(*args, **kwargs))


class Options(nn.Module):
    def forward(self, x, mask=None, times=3, *, bias=None):
        x = x * times if mask is None else x * mask
        return x if bias is None else x + bias


@pytest.mark.parametrize(
    ("args", "kwargs", "shapes"),
    [
        ((None,), {}, {"mask": None}),
        ((None, 2), {}, {"mask": None, "times": None}),
        ((None, 2), {"bias": True}, {"mask": None, "times": None, "bias": {0: "rows"}}),
    ],
    ids=["none", "number", "keyword"],
)
@pytest.mark.parametrize("dim", ["rows", torch.export.Dim("rows")], ids=["name", "dim"])
def test_open_axes_beside_arguments_that_are_no_tensors_keep_their_names(args, kwargs, shapes, dim, dynamo):
    x = torch.randn(5, 4)
    kwargs = {name: torch.randn(5, 4) for name in kwargs}
    program = exporter.export(Options(), (x, *args), kwargs, dynamo=dynamo, dynamic_shapes={"x": {0: dim}, **shapes})
    assert {str(value.shape[0]) for value in (*program.model.graph.inputs, *program.model.graph.outputs)} == {"rows"}


def test_dynamic_axes_beside_arguments_that_are_no_tensors(dynamo):
    options = {"dynamic_axes": {"x": {0: "rows"}}, "input_names": ["x"], "dynamo": dynamo}
    program = exporter.export(Options(), (torch.randn(5, 4), None, 2), **options)
    assert [str(dim) for dim in program.model.graph.inputs[0].shape] == ["rows", "4"]


class Takes(nn.Module):
    def forward(self, pair, named):
        return pair[0].sin() * pair[1] + named["a"].exp()


def test_one_tensor_given_several_times(dynamo):
    """Each is an input with a gradient of its own, as self-attention is called: attention(x, x, x)."""
    x = torch.randn(3, 2)
    report = exporter.verify(Takes(), ([x, x], {"a": x}), dynamo=dynamo)
    assert report.ok, report
    assert {row.name for row in report.rows if row.kind == "input gradient"} == {"pair_0", "pair_1", "named_a"}


def test_a_dictionary_that_comes_last(dynamo):
    """torch's exporters take it for keyword arguments, also where forward has no such arguments."""
    pair, named = [torch.randn(3, 2), torch.randn(3, 2)], {"a": torch.randn(3, 2)}
    program = exporter.export(Takes(), (pair, named), dynamo=dynamo)
    torch.testing.assert_close(exporter.load(program)(pair, named), Takes()(pair, named))
    program = exporter.export(Takes(), ({"pair": pair, "named": named},), dynamo=dynamo)
    torch.testing.assert_close(exporter.load(program)(pair, named), Takes()(pair, named))


class Ordered(nn.Module):
    def forward(self, x, pair, *, b, a):
        return x.sum() + pair[0].sum() + a.sum() * b


def test_keywords_in_another_order_and_axes_of_some_arguments(dynamo):
    """Inputs come as torch alone has them, and keep their axes; an argument that dynamic_shapes does not name has fixed sizes."""
    x, pair, kwargs = torch.randn(2), [torch.randn(2)], {"a": torch.randn(5, 3), "b": torch.randn(3, 2)}
    shapes = {"b": {1: "columns"}, "a": {0: "rows"}}
    program = exporter.export(Ordered(), (x, pair), kwargs, dynamo=dynamo, dynamic_shapes=shapes)
    assert {value.name: [str(dim) for dim in value.shape] for value in program.model.graph.inputs} == {
        "x": ["2"], "pair_0": ["2"], "b": ["3", "columns"], "a": ["rows", "3"],
    }  # fmt: skip
    other = {"a": torch.randn(7, 3), "b": torch.randn(3, 4)}
    torch.testing.assert_close(exporter.load(program)(x, pair, **other), Ordered()(x, pair, **other))
    assert [value.name for value in program.model.graph.inputs] == ["x", "pair_0", *("ab" if dynamo else "ba")]


def test_names_of_inputs_for_keywords_in_another_order(tmp_path, dynamo):
    """torch alone gives input_names in the order of its inputs."""
    x, pair, kwargs = torch.randn(2), [torch.randn(2)], {"a": torch.randn(2, 3), "b": torch.randn(2, 3)}
    names = ["x", "pair", *(("of_a", "of_b") if dynamo else ("of_b", "of_a"))]
    axes = {"of_a": {0: "rows"}, "of_b": {0: "rows"}}
    program = exporter.export(Ordered(), (x, pair), kwargs, dynamo=dynamo, input_names=names, dynamic_axes=axes)
    got = exporter.load(program)(x=x, pair=pair[0], of_a=kwargs["a"], of_b=kwargs["b"])
    torch.testing.assert_close(got, Ordered()(x, pair, **kwargs))
    program.save(tmp_path / "m.onnx")
    report = exporter.verify(Ordered(), (x, pair), kwargs, dynamo=dynamo, file=tmp_path / "m.onnx")
    assert report.ok, str(report)
