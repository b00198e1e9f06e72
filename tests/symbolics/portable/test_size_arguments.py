"""Int arguments that the model makes of sizes: portable, and equal to eager at all sizes, whatever is open and whichever of torch's exporters it is."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

import exporter
from symbolics.errors import ExportError
from symbolics.portable.reasons import untranslated


def size_of(n):
    """The sum of the sizes in an argument."""
    if isinstance(n, dict):
        n = tuple(n.values())
    return sum(map(size_of, n)) if isinstance(n, (tuple, list)) else n


class Scaled(torch.autograd.Function):
    """Its size is a number in both directions, and the length of what it adds."""

    @staticmethod
    def forward(ctx, x, n, m=1):
        ctx.save_for_backward(x)
        ctx.n = size_of(n)
        return x * ctx.n + m + x.new_ones(ctx.n).sum()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.n * x.shape[0] + x * x.shape[1], None, None


class Rows(torch.autograd.Function):
    """Its size is an axis of the result."""

    @staticmethod
    def forward(ctx, x, n, m=1):
        ctx.save_for_backward(x)
        return torch.cat([x.new_zeros(size_of(n), x.shape[1]) + m, x * 3])

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g[-x.shape[0] :] * x + g.shape[1], None, None


#: name -> the arguments behind x, of x alone.
FORMS = {
    "shape[0]": lambda x: (x.shape[0],),
    "shape[1]": lambda x: (x.shape[1],),
    "shape[-1]": lambda x: (x.shape[-1],),
    "size(1) * 2": lambda x: (x.size(1) * 2,),
    "numel": lambda x: (x.numel(),),
    "len": lambda x: (len(x),),
    "shape[0] // 2": lambda x: (x.shape[0] // 2,),
    "shape[0] % 3": lambda x: (x.shape[0] % 3,),
    "shape[0] - 1": lambda x: (x.shape[0] - 1,),
    "shape[0] + shape[1]": lambda x: (x.shape[0] + x.shape[1],),
    "max of two": lambda x: (max(x.shape[1], 3),),
    "a literal": lambda x: (4,),
    "shape": lambda x: (x.shape,),
    "tuple": lambda x: (tuple(x.shape),),
    "two in a tuple": lambda x: ((x.shape[1], x.shape[0] * 2),),
    "list": lambda x: ([x.shape[0], 2],),
    "dict": lambda x: ({"n": x.shape[0], "k": 1},),
    "two": lambda x: (x.shape[0], x.shape[1]),
    "two, one of them a number": lambda x: (2, x.shape[1]),
    "keyword": lambda x: {"n": x.shape[0]},
    "two keywords": lambda x: {"m": x.shape[1], "n": x.shape[0] * 2},
}
FEW = ("shape[0]", "size(1) * 2", "numel", "shape[0] // 2", "two in a tuple", "two keywords")


class Model(torch.nn.Module):
    def __init__(self, function, form):
        super().__init__()
        self.function, self.form = function, form

    def forward(self, x):
        more = FORMS[self.form](x)
        return self.function.apply(x * 1.0, **more) if isinstance(more, dict) else self.function.apply(x * 1.0, *more)


AXES = {"fixed": None, "rows": {0: "n"}, "columns": {1: "k"}, "both": {0: "n", 1: "k"}}


def check(function, form, axes, dynamo, example):
    model = Model(function, form)
    shapes = None if AXES[axes] is None else {"x": AXES[axes]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = exporter.export(model, (torch.randn(example),), dynamo=dynamo, portable=True, dynamic_shapes=shapes)
    assert [(call.kind, call.reason) for call in program.portable] == [("function", "")]
    loaded = exporter.load(program)
    for other in ((5, 7), (6, 3), (9, 9)):
        shape = [size if axis in (AXES[axes] or {}) else known for axis, (size, known) in enumerate(zip(other, example, strict=True))]
        ours, theirs = (torch.arange(1.0, shape[0] * shape[1] + 1).reshape(shape).requires_grad_() for _ in range(2))
        y, z = loaded(ours), model(theirs)
        torch.testing.assert_close(y, z)
        (y * y).sum().backward()
        (z * z).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("form", FORMS)
def test_fixed_sizes(form, dynamo):
    """A trace hands such a size on as a number, of which torch's translation knew nothing: the call stayed a PythonOp."""
    check(Scaled, form, "fixed", dynamo, (4, 6))


@pytest.mark.parametrize(
    ("axes", "form"), [("both", form) for form in FORMS] + [(axes, form) for axes in ("rows", "columns") for form in FEW]
)
def test_sizes_that_are_equal_in_the_example(axes, form):
    """A trace knows numbers alone: what read an axis read an argument instead that was as long in the example, and the file was wrong elsewhere."""
    check(Rows, form, axes, False, (6, 6))


@pytest.mark.slow
@pytest.mark.parametrize("form", FEW)
@pytest.mark.parametrize("function", [Scaled, Rows])
def test_open_sizes(function, form, dynamo):
    check(function, form, "both", dynamo, (4, 6))


def _failed(error, cause=None):
    try:
        raise error from cause
    except Exception as raised:
        return untranslated(raised, SimpleNamespace(graph=SimpleNamespace(nodes=[])), f"{type(raised).__name__}: {raised}")


def test_only_what_torch_says_of_operators_is_said_to_be_of_operators():
    of_torch = type("ConversionError", (torch.onnx.errors.OnnxExporterError,), {})
    assert "with other operators" in _failed(of_torch("No ONNX function found"))
    assert "with other operators" in _failed(RuntimeError("Error when translating node %add"))
    assert "with other operators" in _failed(RuntimeError("it stopped"), of_torch("no decomposition"))
    text = _failed(RuntimeError("Node.meta arg1_1 is missing val field."))
    assert "stops at the graph of it, whatever its operators (RuntimeError: Node.meta" in text and text.endswith("please report it")


def test_the_way_out_where_torch_stops_at_a_graph(monkeypatch, dynamo):
    def stop(*args):
        raise RuntimeError("Node.meta arg1_1 is missing val field.")

    monkeypatch.setattr("symbolics.torch_private.tracing._Translator.translate", stop)
    with pytest.raises(ExportError) as caught:
        exporter.export(Model(Scaled, "len"), (torch.randn(4, 6),), dynamo=dynamo, portable=["tests.*"])
    assert "whatever its operators" in str(caught.value) and "\n  way out: leave it out of portable=" in str(caught.value)
