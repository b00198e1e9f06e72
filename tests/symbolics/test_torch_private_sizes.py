"""What torch.export assumes of open sizes, and where it keeps that."""

from __future__ import annotations

import contextlib
import warnings

import torch

from symbolics import torch_private as private


def _oblivious(function, *size, opened=torch.export.Dim.DYNAMIC):
    """The program of an export as torch.onnx asks for it first: sizes of 0 and 1 are none of their own."""

    class Probe(torch.nn.Module):
        def forward(self, x):
            return function(x)

    import torch.fx.experimental._config as config

    with config.patch(backed_size_oblivious=True):
        return torch.export.export(
            Probe(), (torch.randn(*size),), dynamic_shapes=({0: opened},), strict=False, prefer_deferred_runtime_asserts_over_guards=True
        )


def test_answers_of_sizes_that_torch_has_assumed_before():
    asked = []

    def probe(x):
        y = x.t().contiguous()
        with private.answers_of_sizes_watched(lambda frame, condition, answer: asked.append(answer)):
            return y.sum() + (1 if x.shape[0] != 1 else 2)

    _oblivious(probe, 3, 4)
    assert asked == [True], "torch.export keeps its assumptions on sizes in other places (ShapeEnv.deferred_runtime_asserts, var_to_range)"


def test_sizes_taken_for_one():
    assert private.sizes_taken_for_one(_oblivious(lambda x: x.t() @ x.t().mT, 1, 4)) == [], "a product of fixed sizes has been assumed"
    taken = private.sizes_taken_for_one(_oblivious(lambda x: x[None] @ x.t()[None], 1, 4))
    assert len(taken) == 1, "torch.export keeps its assumptions on sizes in another place, or assumes no size to be 1 any more"
    assert private.sizes_taken_for_one(_oblivious(lambda x: x[None] @ x.t()[None], 3, 4)) == []


def test_settled_sizes():
    fixed = private.settled_sizes(_oblivious(lambda x: x + torch.ones(3, 4), 3, 4, opened=torch.export.Dim.AUTO))
    assert list(fixed.values()) == [3], "torch.export no longer keeps in var_to_range that a broadcast leaves a size one value"
    assert private.settled_sizes(_oblivious(lambda x: x + 1, 3, 4)) == {}


def test_found_equal():
    class Sum(torch.nn.Module):
        def forward(self, x, y):
            return x + y

    batch = torch.export.Dim("batch")
    program = torch.export.export(Sum(), (torch.ones(3), torch.ones(3)), dynamic_shapes={"x": {0: batch}, "y": {0: batch}})
    names = [str(node.meta["val"].shape[0]) for node in program.graph.nodes if node.op == "placeholder"]
    assert list(private.found_equal(program).values()) == names[:1], "torch.export no longer keeps in replacements which sizes are one"
    assert private.found_equal(torch.export.export(Sum(), (torch.ones(3), torch.ones(3)))) == {}


def _scaled(*contexts):
    """An export whose open axis torch gives no name, as one argument is a number; and what it says of that."""

    class Scaled(torch.nn.Module):
        def forward(self, x, times):
            return x * times

    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for context in contexts:
            stack.enter_context(context)
        program = torch.onnx.export(Scaled(), (torch.ones(3, 2), 2), dynamo=True, verbose=False, dynamic_shapes=({0: "rows"}, None))
    return program, [str(each.message) for each in caught if "will not be renamed" in str(each.message)]


def test_quiet_of_axes():
    assert _scaled()[1]  # once torch names them, neither this nor name_axes is needed
    assert not _scaled(private.quiet_of_axes())[1]


def test_name_axes():
    program, _ = _scaled()
    private.name_axes(program, [{0: "rows"}])
    assert [str(value.shape[0]) for value in (*program.model.graph.inputs, *program.model.graph.outputs)] == ["rows", "rows"]


def test_is_multiple():
    found = []

    def probe(x):
        size = x.shape[0]
        found.extend(private.is_multiple(each, 3) for each in (size, 3 * size, size + size, 6 * size - 3))
        return x

    _oblivious(probe, 3, 4)
    assert found == [False, True, False, True], "the expression of a size has moved (SymInt.node.expr)"
    assert private.is_multiple(6, 3) and not private.is_multiple(7, 3)
