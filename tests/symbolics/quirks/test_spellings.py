"""What stands in for calls of torch takes them however they are spelled."""

from __future__ import annotations

import ast
import pathlib
import types

import pytest
import torch

import exporter
from symbolics.quirks import SPELLINGS, spelled
from symbolics.quirks.pytorch.scalar_axes import scalar_axes
from tests.symbolics.quirks.spellings import FUNCTIONS, NUMPY, differences, sweep, title

#: What the stubs list and the parser does not take, and draws that are made without a tensor.
NO_CALLS = {
    ("normal", "size"),
    ("tensor", "pin_memory"),
    ("as_tensor", "device"),
    ("scaled_dot_product_attention", "enable_gqa"),
    ("requires_grad_", "mode"),
}
STUBS = pathlib.Path(torch.__file__).parent / "_C"


def signatures():
    """(name, whether a method, names by position, names alone, those needed) of each overload that torch's stubs list."""
    functions = [(False, node) for file in ("_VariableFunctions.pyi", "_nn.pyi") for node in ast.parse((STUBS / file).read_text()).body]
    (tensor,) = (node for node in ast.parse((STUBS / "__init__.pyi").read_text()).body if getattr(node, "name", "") == "TensorBase")
    for method, node in [*functions, *((True, node) for node in tensor.body)]:
        if isinstance(node, ast.FunctionDef) and not node.args.vararg:
            order = [each.arg.rstrip("_") for each in (*node.args.posonlyargs, *node.args.args)]  # `from` is a word of Python
            needed = [*order[: len(order) - len(node.args.defaults)]]
            named = [each.arg for each in node.args.kwonlyargs]
            needed += [name for name, default in zip(named, node.args.kw_defaults, strict=True) if default is None]
            yield node.name, method, order, named, needed


def test_the_names_are_those_of_torchs_stubs():
    functions = {(function.__name__, title(function).startswith("Tensor.")): function for function in FUNCTIONS}
    looked, unknown = set(), []
    for name, method, order, named, needed in signatures():
        function = functions.get((name, method))
        if function is None or "out" in needed or "names" in named or (name, order[-1]) in NO_CALLS:
            continue
        looked.add(function)
        given = {each: each for each in (*order, *named) if each in needed or each not in ("out", "generator")}
        for count in {len(order), 1 if method else 0}:
            args, rest = order[:count], {key: value for key, value in given.items() if key not in order[:count]}
            for theirs in (False, True):
                kwargs = {NUMPY.get(key, (key,))[0] if theirs else key: value for key, value in rest.items()}
                if not any(form.bind(tuple(args), kwargs) is not None for form in SPELLINGS[function]):
                    unknown.append(f"{title(function)}({', '.join([*args, *(f'{key}=' for key in kwargs)])})")
    assert not unknown, "\n".join(unknown)
    assert len(looked) > 250


def test_one_sample_of_each_function_in_every_spelling():
    called, tried, wrong = sweep(samples=1)
    assert not wrong, "\n".join(wrong)
    assert [title(function) for function in FUNCTIONS if function not in called] == []
    assert tried > 1500


def test_a_difference_is_seen(monkeypatch):
    monkeypatch.setattr("symbolics.capture.torch_calls.spelled", lambda table, func, args, kwargs: (args, kwargs))
    tried, wrong = differences(torch.linalg.norm, 1)
    assert tried > 4
    assert any("input=" in each and "TypeError" in each for each in wrong)


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (torch.all, (torch.ones(2),), {"foo": 1}),
        (torch.all, (torch.ones(2), 0), {"axis": 0}),
        (torch.all, (), {}),
        (len, ([],), {"axis": 0}),
    ],
)
def test_what_torch_does_not_take_stays_as_it_is(function, args, kwargs):
    assert spelled(SPELLINGS, function, args, kwargs) == (args, kwargs)


class Numpys(torch.nn.Module):
    """Keywords of numpy, on calls that we replace."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        h = self.linear(x)
        n = torch.linalg.norm(h, axis=-1, keepdims=True) + torch.linalg.vector_norm(x=h, ord=3, axis=-1, keepdims=True)
        n = n + torch.nanmean(h, axis=-1, keepdims=True) + torch.amax(a=h, axis=1, keepdims=True)
        y = torch.atan2(h, x2=n) + torch.floor_divide(h.detach(), x2=3.0) + torch.clamp(x1=h, max=n)
        return y * h.max(axis=-1, keepdims=True).values * torch.all(h == h, axis=-1, keepdims=True)


def test_keywords_of_numpy_in_a_file(dynamo):
    model, x = Numpys(), torch.randn(4, 3)
    module = exporter.load(exporter.export(model, (x,), dynamo=dynamo))
    ours, theirs = module(x), model(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    ours.sum().backward(), theirs.sum().backward()
    torch.testing.assert_close(module.linear.weight.grad, model.linear.weight.grad, rtol=1e-4, atol=1e-5)


def test_scalars_leave_python_code_to_what_stands_in_for_what_it_calls():
    """What a stand-in calls has no stand-ins of its own: torch.norm would lose that of torch.linalg.vector_norm."""
    assert [function for function in scalar_axes({}) if isinstance(function, types.FunctionType)] == []
