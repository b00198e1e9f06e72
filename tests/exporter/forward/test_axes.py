"""Axes that a caller names: counted from behind, or not there; and what a clean-up must not hide."""

from __future__ import annotations

import io
import warnings

import pytest
import torch

import exporter
from exporter.forward.arguments import check_shapes
from tests.support import Calls


class Held(torch.nn.Module):
    def forward(self, x, pair):
        return x * 2 + pair[0]


def test_axes_counted_from_behind(dynamo):
    args = torch.randn(4, 3), [torch.randn(4, 3)]
    program = exporter.export(Held(), args, dynamo=dynamo, dynamic_shapes={"x": {-2: "n"}, "pair": [{-2: "n"}]})
    assert [value.shape[0] for value in program.model.graph.inputs] == ["n", "n"]
    assert all(value.shape[1] == 3 for value in program.model.graph.inputs)


def test_an_axis_that_is_said_to_be_fixed(dynamo):
    """With dynamo=True it was taken for one that was given up, with dynamo=False for an open one."""
    program = exporter.export(torch.nn.Linear(4, 2), (torch.randn(3, 4),), dynamo=dynamo, dynamic_shapes=({0: torch.export.Dim.STATIC},))
    assert list(program.model.graph.inputs[0].shape) == [3, 4]


@pytest.mark.parametrize("shapes", [{"x": {2: "n"}}, {"x": {-3: "n"}}, {"pair": [{5: "n"}]}])
def test_an_axis_that_is_not_there(shapes, dynamo):
    with pytest.raises(exporter.PythonopError, match=r"dynamic_shapes of .*has an axis (2|-3|5), and the argument has 2: \[4, 3\]"):
        exporter.export(Held(), (torch.randn(4, 3), [torch.randn(4, 3)]), dynamo=dynamo, dynamic_shapes=shapes)


def test_axes_of_torchs_own_option(dynamo):
    def export(axes):
        with exporter.hook() as handle:
            torch.onnx.export(
                torch.nn.ReLU(),
                (torch.randn(4, 3),),
                None if dynamo else io.BytesIO(),
                dynamo=dynamo,
                input_names=["x"],
                dynamic_axes={"x": axes},
            )
        return handle.program.model.graph.inputs[0].shape

    assert export({-2: "n"})[0] == "n"
    with pytest.raises(exporter.PythonopError, match=r"dynamic_axes of 'x' has an axis 5, and the input has 2"):
        export({5: "n"})


def test_a_permutation_that_is_drawn(dynamo):
    module = exporter.load(exporter.export(Calls(lambda x: x[torch.randperm(x.shape[0])]), (torch.arange(64.0),), dynamo=dynamo))
    one, two = (module(torch.arange(64.0)) for _ in range(2))
    assert torch.equal(one.sort().values, torch.arange(64.0)) and torch.equal(two.sort().values, torch.arange(64.0))
    assert not torch.equal(one, torch.arange(64.0))


def test_a_clean_up_hides_no_error():
    class Writes(torch.nn.Module):
        """A frozen parameter that is computed has no flag that anybody may set."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x):
            self.weight.copy_(x.sum(0))
            raise ValueError("what went wrong")

    with pytest.raises(exporter.ExportError, match="what went wrong"):
        exporter.export(Writes(), (torch.randn(2, 3, requires_grad=True),), dynamo=False, eager_check=False)


def test_a_name_that_no_input_has(dynamo):
    def export(**options):
        with exporter.hook():
            torch.onnx.export(torch.nn.ReLU(), (torch.randn(4, 3),), None if dynamo else io.BytesIO(), dynamo=dynamo, **options)

    for names in ({}, {"input_names": ["x"], "output_names": ["y"]}):
        there = "'x', the outputs 'y'" if names else "'input'; an output is named by output_names"
        with pytest.raises(exporter.PythonopError, match=f"dynamic_axes names 'nobody': the inputs are {there}"):
            export(dynamic_axes={"nobody": {0: "n"}}, **names)
    export(dynamic_axes={"input": {0: "n"}, "y": {0: "n"}}, output_names=["y"])
    if dynamo:
        with pytest.raises(exporter.PythonopError, match="dynamic_shapes names 'nobody'; the arguments that are given are 'input'"):
            export(dynamic_shapes={"nobody": {0: "n"}})


class _Recurrent(torch.nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(3, 4, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2, "bias": False}])
def test_an_lstm_with_projections_along_an_open_axis(options):
    """ONNX has no such node: the file had the example's steps without a word."""
    model, x = _Recurrent(torch.nn.LSTM, proj_size=2, **options), torch.randn(3, 5, 3)
    with pytest.warns(
        exporter.PythonopWarning, match=r"proj_size in module layer at .*test_axes:\d+ goes along the open axis 't' step by step"
    ):
        exporter.export(model, (x,), dynamo=False, dynamic_shapes={"x": {1: "t"}})
    program = exporter.export(model, (x,), dynamo=False, dynamic_shapes={"x": {1: "t"}}, opaque=["torch.nn.modules.rnn:LSTM"])
    longer = torch.randn(3, 7, 3)
    torch.testing.assert_close(exporter.load(program, allow=["torch.nn.modules.rnn:LSTM"])(longer), model(longer))


@pytest.mark.parametrize(
    ("kind", "options", "axes"),
    [
        (torch.nn.LSTM, {"proj_size": 2}, {0: "b"}),
        (torch.nn.LSTM, {}, {1: "t"}),
        (torch.nn.GRU, {}, {1: "t"}),
        (torch.nn.RNN, {}, {1: "t"}),
    ],
)
def test_recurrences_of_which_nothing_is_to_be_said(kind, options, axes):
    model, other = _Recurrent(kind, **options), torch.randn(*((4, 5, 3) if 0 in axes else (3, 7, 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", exporter.PythonopWarning)
        program = exporter.export(model, (torch.randn(3, 5, 3),), dynamo=False, dynamic_shapes={"x": axes})
    torch.testing.assert_close(exporter.load(program)(other), model(other))


class _Sum(torch.nn.Module):
    def forward(self, x, other=None):
        return x * 2 if other is None else x * 2 + other


@pytest.mark.parametrize("shapes", [{"x": {0: "n"}}, ({0: "n"},), {"args": ({0: "n"},)}, (({0: "n"},),)])
def test_names_of_a_compiled_module(shapes):
    """torch.compile makes a module whose forward takes (*args, **kwargs): the names of the one in it count, and torch's own."""
    model, x = torch.compile(_Sum(), backend="eager"), torch.randn(4, 3)
    program = exporter.export(model, (x,), dynamic_shapes=shapes)
    assert list(program.model.graph.inputs[0].shape) == ["n", 3]
    longer = torch.randn(7, 3)
    torch.testing.assert_close(exporter.load(program)(longer), longer * 2)


def test_names_of_two_arguments_of_a_compiled_module():
    model = torch.compile(_Sum(), backend="eager")
    program = exporter.export(model, (torch.randn(4, 3), torch.randn(4, 3)), dynamic_shapes={"x": {0: "n"}, "other": {0: "n"}})
    assert [list(value.shape) for value in program.model.graph.inputs] == [["n", 3]] * 2
    with pytest.raises(exporter.PythonopError, match="dynamic_shapes names 'nobody'; the arguments that are given are 'x'"):
        exporter.export(model, (torch.randn(4, 3),), dynamic_shapes={"nobody": {0: "n"}})


class _Many(torch.nn.Module):
    def forward(self, *tensors, **more):
        return tensors[0] * 2 + more.get("other", 0)


def test_names_that_a_forward_of_any_arguments_has_not(dynamo):
    with pytest.raises(
        exporter.PythonopError, match=r"names 'x'; .* 'tensors'; of those in \*tensors say \{'tensors': \(\{0: 'n'\}, ...\)\}"
    ):
        exporter.export(_Many(), (torch.randn(4, 3),), dynamo=dynamo, dynamic_shapes={"x": {0: "n"}})
    program = exporter.export(_Many(), (torch.randn(4, 3),), dynamo=dynamo, dynamic_shapes={"tensors": ({0: "n"},)})
    assert list(program.model.graph.inputs[0].shape) == ["n", 3]


def test_names_in_keywords_of_any_name():
    """TorchScript's exporter was told nothing of them: the axis was the example's, without a word."""
    args, shapes = (torch.randn(4, 3),), {"tensors": ({0: "n"},), "other": {0: "n"}}
    program = exporter.export(_Many(), args, kwargs={"other": torch.randn(4, 3)}, dynamo=False, dynamic_shapes=shapes)
    assert [value.shape[0] for value in program.model.graph.inputs] == ["n", "n"]


class _Named(torch.nn.Module):
    def forward(self, x, *rest, k=None, **more):
        return x


def test_axes_of_what_a_wrapped_module_takes():
    """Also of its ``*args`` and ``**kwargs``, and by the names of what wraps it."""
    x, wrapped = torch.randn(3, 2), torch.nn.DataParallel(_Named())
    shapes = {"x": {0: "n"}, "rest": ({0: "m"}, None), "mask": {1: "w"}}
    found = check_shapes(wrapped, (x, x, x), {"mask": x}, shapes)
    assert found == {"inputs": ({0: "n"}, {0: "m"}, None), "kwargs": {"mask": {1: "w"}}}
    own = {"inputs": ({0: "n"}, None, None), "kwargs": {"mask": None}}
    assert check_shapes(wrapped, (x, x, x), {"mask": x}, own) == own
