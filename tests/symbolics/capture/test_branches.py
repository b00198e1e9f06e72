"""Branches that the size of an open axis decides: said, by their line."""

from __future__ import annotations

import inspect
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional

import exporter
from symbolics.errors import PythonopWarning


def greater(x):
    return x * 2 if x.shape[0] > 5 else x * 3


def even(x):
    return x * 3 if x.shape[0] % 2 else x * 2


def checked(x):
    assert x.shape[0] % 2 == 0
    if x.shape[0] < 3:
        raise ValueError("too short")
    return functional.glu(x, 0).reshape(-1, 2, 4)


def known(x):
    return x * 2 if x.shape[1] > 3 else x * 3


class Calling(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def halved(x):
    return x[: int(x.shape[0] * 0.5)].sum(0)


def remainder(x):
    return x * int(x.shape[0] % 5)


def looked_up(x):
    return x * (2, 3, 5)[x.shape[0] % 3]


def in_sizes(x):
    return x[: x.shape[0] // 2].sum(0) * x.shape[0]


def said(function, dynamo, what="a branch"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exporter.export(Calling(function), (torch.randn(12, 4),), dynamo=dynamo, dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    return [str(warning.message) for warning in caught if issubclass(warning.category, PythonopWarning) and what in str(warning.message)]


@pytest.mark.parametrize("function", [greater, even])
def test_a_branch_on_an_open_size_is_said_once(function, dynamo):
    (message,) = said(function, dynamo)
    line = function.__code__.co_firstlineno + 1
    assert f"at {__name__}:{line} depends on the size of an open axis" in message
    assert "torch.cond" in message


@pytest.mark.parametrize("function", [checked, known])
def test_checks_and_known_sizes_are_not(function, dynamo):
    assert said(function, dynamo) == []


def one(x):
    return x * 2 if x.shape[0] != 1 else x * 3


def behind_transposed(x):
    return x.t().contiguous().sum() + one(x)


def behind_pooling(x):
    return functional.adaptive_avg_pool1d(x.t()[None], 1).sum() + one(x)


def behind_narrowed(x):
    return x.narrow(0, 0, 4).sum() + one(x)


def noticed(function, **limits):
    """What torch.export's capture says of branches and parts along an open first axis."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sizes = {0: torch.export.Dim("n", **limits) if limits else torch.export.Dim.DYNAMIC}
        exporter.export(Calling(function), (torch.randn(12, 4),), dynamo=True, dynamic_shapes=(sizes,))
    return [str(warning.message) for warning in caught if "open axis" in str(warning.message)]


@pytest.mark.parametrize("function", [one, behind_transposed, behind_pooling])
def test_a_branch_on_one_is_said_where_torch_has_asked_before(function):
    """Where a tensor's layout hangs on it, torch has assumed that a size is not 1, and the model's own question is no news to it."""
    (message,) = noticed(function)
    assert f"at {__name__}:{one.__code__.co_firstlineno + 1} depends on the size" in message


@pytest.mark.parametrize(
    ("function", "limits"), [(behind_transposed, {"min": 2}), (behind_pooling, {"min": 2, "max": 99}), (behind_narrowed, {})]
)
def test_a_branch_on_one_that_can_go_one_way_only_is_not(function, limits):
    assert noticed(function, **limits) == []


class Transposed(torch.nn.Module):
    """As behind convolutions: torch's loop over the steps asks how the tensor lies in memory."""

    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRU(4, 3, batch_first=True)

    def forward(self, x):
        return self.gru(x.transpose(1, 2))[0]


@pytest.mark.parametrize("open_sizes", [{0: "batch"}, {0: "batch", 2: "frames"}])
def test_what_torch_asks_of_strides_in_a_loop_of_its_own_is_no_branch(open_sizes):
    torch.compiler.reset()  # torch compiles the loop, and takes what it has compiled for other open sizes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = exporter.export(Transposed().eval(), (torch.randn(3, 4, 6),), dynamic_shapes=(open_sizes,))
    assert program.model.graph.inputs[0].shape[0] == "batch"


@pytest.mark.parametrize("function", [halved, remainder, looked_up])
def test_a_number_of_an_open_size_is_said_once(function, dynamo):
    (message,) = said(function, dynamo, "a number of the size of")
    assert f"at {__name__}:{function.__code__.co_firstlineno + 1}" in message


def test_sizes_that_stay_sizes_are_not(dynamo):
    assert said(in_sizes, dynamo, "number of the size") == []


def split(x):
    return torch.cat([part * 2 for part in x.split(3)])


def rows(x):
    total = 0
    for row in x:
        total = total + row
    return total


def unbound(x):
    return x.transpose(0, 1).relu().unbind(1)[0]


def long_enough(x):
    return x * 2 if len(x) >= 6 else x * 3


def each(x):
    return sum(x[i] for i in range(x.shape[0]))


def halved(x):
    return x[: int(x.shape[0]) // 2]


def on_known_axes(x):
    """The open axis has 12 elements, and so have others here."""
    wide = torch.cat([x, x, x], 1)
    assert len(x) > 1
    parts = wide.split(6, 1), wide.unbind(1), x.split([2, x.shape[0] - 2]), x.chunk(2), x.reshape(x.shape[0], 2, 2).unbind(-1)
    return sum(part.sum() for some in parts for part in some) * int(wide.shape[1]) * len(wide[0])


def kept(function):
    """What an export with an open first axis says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exporter.export(Calling(function), (torch.randn(12, 4),), dynamo=False, dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    return [str(warning.message) for warning in caught if issubclass(warning.category, PythonopWarning)]


@pytest.mark.parametrize("function", [split, rows, unbound, long_enough, each, halved])
def test_what_torchscript_keeps_of_an_open_axis_is_said_by_line_and_axis(function):
    (message,) = kept(function)
    first = function.__code__.co_firstlineno
    assert any(f"at {__name__}:{first + line} " in message for line in (1, 2)) and (
        "the open axis 'n'" in message or "the size of an open axis" in message
    )


def test_known_axes_of_the_same_size_are_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error", PythonopWarning)
        program = exporter.export(
            Calling(on_known_axes), (torch.randn(12, 4),), dynamo=False, dynamic_shapes=({0: torch.export.Dim("n", min=2)},)
        )
    assert len(program.model.graph.outputs) == 1


def shorter(x):
    return x * len(x[1:])


def doubled(x):
    return sum(x[:2] * i for i in range(torch.cat([x, x]).shape[0]))


def in_twos(x):
    return x * int(x.reshape(-1, 2).numel())


def by_numpy(x):
    return x * float(np.prod(x.relu().shape))


def counted(x):
    return x * len(x[:, 0].reshape(-1, 2).unbind())


def by_another(x):
    return x * len(x.reshape(-1, 2)) if len(x.reshape(2, -1)) == 2 else x


@pytest.mark.parametrize("function", [shorter, doubled, in_twos, by_numpy, counted, by_another])
def test_so_is_what_follows_from_the_size_of_an_open_axis(function):
    (message,) = kept(function)
    assert f"at {__name__}:{function.__code__.co_firstlineno + 1} " in message and (
        "the open axis 'n'" in message or "the size of an open axis" in message
    )


def in_one_window(x):
    return functional.max_pool2d(x[None], kernel_size=[x.size(0), 1]) + functional.avg_pool2d(x[None], (1, x.shape[1]))


def test_a_window_as_long_as_an_axis_is_said_where_that_is_open():
    (message,) = kept(in_one_window)
    assert "the window of max_pool2d()" in message and "the open axis 'n'" in message


def in_one_row(x):
    return functional.max_pool2d(x[None], kernel_size=[1, x.size(1)])


def test_a_window_of_a_fixed_axis_is_right_at_other_sizes():
    assert kept(in_one_row) == []
    program = exporter.export(Calling(in_one_row), (torch.randn(6, 4),), dynamo=False, dynamic_shapes=({0: torch.export.Dim("n")},))
    x = torch.randn(9, 4)
    torch.testing.assert_close(exporter.load(program)(x), in_one_row(x))


def in_as_many_means(x):
    return functional.adaptive_avg_pool2d(x[None], (x.shape[0] - 1, 1))


def test_so_is_an_adaptive_size():
    (message,) = kept(in_as_many_means)
    assert "the size of adaptive_avg_pool2d()" in message and "the open axis 'n'" in message


def on_derived_but_known_axes(x):
    """Sizes of tensors in which the open axis is, but not at the one that is read."""
    rows = torch.cat([x, x])[1:].reshape(-1, 2, 2)
    return rows.sum(0) * len(rows[0]) * int(rows[:2].shape[0]) * len(x.T.split(2)) * float(np.prod(rows.shape[1:]))


def test_what_does_not_follow_from_it_is_not():
    assert kept(on_derived_but_known_axes) == []


@torch.jit.script
def scripted(x):
    first, second = x.split(6)
    return first + second


def of_torch_itself(x):
    first, second = torch.unsafe_split(x, 6)
    return first + second


def test_what_a_scripted_function_takes_apart_is_said_by_line():
    (message,) = kept(scripted)
    assert f"at {__name__}:{inspect.getsourcelines(scripted._torchdynamo_inline)[1] + 2} " in message
    assert "the open axis 'n'" in message


def test_what_no_call_of_python_takes_apart_is_said_of_the_model():
    (message,) = kept(of_torch_itself)
    assert message.startswith("the model takes a tensor apart along the open axis 'n': the file has 2 parts")


def squeezed(x):
    return x.T.squeeze(1) * 2


def squeezed_from_behind(x):
    return torch.squeeze(x[None], dim=(0, -2)).cumsum(0)


def in_chunks(x):
    return torch.stack([part.sum(0) for part in x.chunk(4)]).exp()


def in_chunks_of_a_multiple(x):
    return sum(torch.cat([x, x, x]).chunk(3)), sum(x.chunk(2))


def squeezed_elsewhere(x):
    return x[:, None].squeeze(1).relu()


def halves(x):
    return torch.cat(x.split([2, x.shape[0] - 2])) + functional.glu(torch.cat([x, x]), 0)


@pytest.mark.parametrize("function", [split, squeezed, squeezed_from_behind])
def test_what_torch_export_keeps_of_an_open_axis_is_said_by_line(function):
    (message,) = noticed(function)
    assert f"at {__name__}:{function.__code__.co_firstlineno + 1} " in message
    assert ("the file has 4 parts" in message) == (function is split) and ("drops it at size 1" in message) == (function is not split)


@pytest.mark.parametrize("says", [noticed, kept])
def test_chunks_that_pytorch_would_not_give_are_said(says):
    (message,) = says(in_chunks)
    assert (
        f"at {__name__}:{in_chunks.__code__.co_firstlineno + 1} " in message
        and "the file has 4 parts at every size, the last of them empty" in message
    )


@pytest.mark.parametrize("function", [squeezed_elsewhere, halves, in_chunks_of_a_multiple])
def test_what_it_writes_for_every_size_is_not(function):
    assert noticed(function) == []


def test_parts_of_an_open_axis_have_gradients():
    x = torch.randn(10, 4, requires_grad=True)
    program = exporter.export(Calling(split), (torch.randn(12, 4),), dynamo=True, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    loaded = exporter.load(program)
    weights = torch.randn(10, 4)
    (expected,) = torch.autograd.grad((split(x) * weights).sum(), x)
    (given,) = torch.autograd.grad((loaded(x) * weights).sum(), x)
    torch.testing.assert_close(given, expected)
