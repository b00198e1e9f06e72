"""Other inputs of verify: of the example's kind, and such that a file that is right at the example alone is found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import exporter
from exporter.forward.case import Case
from exporter.verification.eager import EagerStep
from exporter.verification.elsewhere import other_runs
from exporter.verification.other_inputs import other_sizes, other_values
from exporter.verification.rows import ELSEWHERE


def moved(x: torch.Tensor) -> torch.Tensor:
    """The first that is tried in place of ``x``; ``x`` itself where there is none."""
    model = nn.Identity()
    return next((made.args[0] for made in other_values(Case(model, (x,)))), x)


def _simplex(x: torch.Tensor) -> bool:
    return bool((x >= 0).all()) and torch.allclose(x.sum(-1), torch.ones(()), atol=1e-5)


@pytest.mark.parametrize(
    ("x", "kept"),
    [
        (torch.randn(4, 5), lambda y, x: x.min() <= y.min() and y.max() <= x.max()),
        (torch.rand(1, 3, 6, 6) + 0.1, lambda y, x: bool((y > 0).all())),
        (torch.randn(3, 4, dtype=torch.float16), lambda y, x: True),
        (torch.randn(3, 4, dtype=torch.bfloat16), lambda y, x: True),
        (torch.randn(3, 4, dtype=torch.complex64), lambda y, x: True),
        (torch.tensor(0.7), lambda y, x: 0 < y < 0.7),
        (torch.ones(2, 3), lambda y, x: bool((y > 0).all())),
        (torch.zeros(2, 3), lambda y, x: bool((y >= 0).all())),
        (torch.randn(3, 5).softmax(-1), lambda y, x: _simplex(y)),
        (nn.functional.normalize(torch.randn(4, 5), dim=-1), lambda y, x: torch.allclose(y.norm(dim=-1), torch.ones(4), atol=1e-5)),
        (torch.eye(4)[[2, 0, 1]], lambda y, x: torch.equal(y.sum(-1), torch.ones(3)) and set(y.unique().tolist()) == {0.0, 1.0}),
        (torch.randn(5, 5).tril(), lambda y, x: torch.equal(y, y.tril())),
        ((a := torch.randn(4, 6)) @ a.T, lambda y, x: torch.allclose(y, y.T) and bool(torch.linalg.eigvalsh(y).min() > 0)),
        (torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0]), lambda y, x: bool((y.diff() > 0).all()) and y[0] == 0),
        (torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]), lambda y, x: set(y.unique().tolist()) == {0.0, -torch.inf}),
        (torch.randint(5, 90, (2, 30)), lambda y, x: set(y.unique().tolist()) <= set(x.unique().tolist())),
        (torch.tensor([[0, 500], [1, 700], [0, 900]]), lambda y, x: bool((y[:, 0] <= 1).all()) and bool((y[:, 1] >= 500).all())),
        (torch.tensor([0, 0, 1, 1, 1, 2, 2, 4]), lambda y, x: bool((y.diff() >= 0).all()) and (y[0], y[-1]) == (0, 4)),
        (torch.tensor([3, 1, 0, 2]), lambda y, x: torch.equal(y.sort().values, torch.arange(4))),
        (torch.ones(3, 6, dtype=torch.int64), lambda y, x: set(y.unique().tolist()) == {0, 1} and bool((y[:, 0] == 1).all())),
        (torch.ones(3, 6, dtype=torch.bool), lambda y, x: bool(y.any(-1).all())),
        (torch.rand(3, 6) > 0.5, lambda y, x: y.sum() == x.sum()),
    ],
)  # fmt: skip
def test_new_values_are_of_the_examples_kind(x, kept):
    y = moved(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert not torch.equal(y, x)
    assert kept(y, x)
    assert torch.equal(y, moved(x))  # made alike each time


@pytest.mark.parametrize(
    "x", [torch.arange(5), torch.zeros(2, 3, dtype=torch.int64), torch.tensor(7), torch.empty(0, 3), torch.full((3,), 4)]
)
def test_places_and_whole_constants_stay(x):
    assert moved(x) is x


def test_a_tensor_given_twice_is_one():
    x = torch.randn(3, 4)
    (made, *_) = other_values(Case(nn.Identity(), (x, [x]), {"mask": torch.rand(3) > 0.5}))
    assert made.args[0] is made.args[1][0]


class _Two(nn.Module):
    def forward(self, x, y, ids):
        return x.sin(), y.cos(), ids


def test_sizes_that_are_declared_apart_are_apart():
    args = (torch.randn(5, 3), torch.randn(5, 4), torch.tensor([0, 0, 1, 1, 2]))
    n, m = torch.export.Dim("n"), torch.export.Dim("m")
    program = exporter.export(_Two(), args, dynamic_shapes=({0: n}, {0: m}, {0: n}))
    made = [(about, [tuple(t.shape) for t in case.args]) for about, case in other_sizes(Case(_Two(), args), program.model)]
    assert made[0] == ("n=6, m=7", [(6, 3), (7, 4), (6,)])
    assert ("n=6, m=6", [(6, 3), (6, 4), (6,)]) in made
    assert all(bool((case.args[2].diff() >= 0).all()) for _, case in other_sizes(Case(_Two(), args), program.model))


def test_a_file_with_gradients_is_tried_at_other_sizes():
    """It has more inputs than forward: those for the gradients of its outputs."""
    args = (torch.randn(3, 4),)
    program = exporter.export(nn.Tanh(), args, dynamic_shapes=({0: torch.export.Dim("n")},))
    about, case = next(other_sizes(Case(nn.Tanh(), args), exporter.build_gradient_graph(program)))
    assert (about, case.args[0].shape) == ("n=4", (4, 4))


@pytest.mark.filterwarnings("ignore")
def test_what_gives_nan_in_eager_is_not_taken():
    """The slope of a distance of 0: of edges that are made up, some go from an atom to itself."""

    class Distances(nn.Linear):
        def forward(self, x, at):
            y = super().forward(x)
            return (y[at[0]] - y[at[1]]).square().sum(-1).sqrt()

    case = Case(Distances(3, 2), (torch.randn(4, 3), torch.tensor([[0, 1, 2, 3, 0, 1], [1, 2, 3, 0, 2, 3]])))
    (first, *_), program = other_values(case), exporter.export(case.model, case.args)
    assert EagerStep.run(first).gradients["input gradient", "x"].isnan().any()
    (found,) = other_runs(case, program.model, None, EagerStep.run(case))
    assert found.eager is not None and not found.eager.gradients["input gradient", "x"].isnan().any()


def elsewhere(model, args, **options):
    report = exporter.verify(model, args, steps=1, **options)
    return report, {row.kind: row for row in report.rows if row.kind in ELSEWHERE}


@pytest.mark.usefixtures("quick_verify")
class TestVerify:
    class Taken(nn.Module):
        """Takes values of its input out of torch."""

        def __init__(self, how):
            super().__init__()
            self.linear, self.how = nn.Linear(3, 3), how

        def forward(self, x):
            return self.linear(x), self.how(x.detach())

    @pytest.mark.parametrize(
        "how",
        [
            lambda x: torch.from_numpy(np.sin(x.numpy())),
            lambda x: torch.full((2,), x.abs().max().item()),
            lambda x: torch.tensor(x.tolist()),
        ],
        ids=["numpy", "item", "tolist"],
    )
    def test_a_constant_is_named(self, how):
        report, rows = elsewhere(self.Taken(how), (torch.randn(4, 3),), dynamo=False)
        assert not report.ok
        assert rows["second input"].problem.startswith("the file's output '") and "is a constant" in rows["second input"].problem
        assert {row.kind for row in report.rows if not row.ok} == {"second input"}
        assert [note.title for note in report.notes] == ["Right at the example alone"]
        assert "but not all at a second input" in report.summary()

    def test_what_only_looks_at_values_is_equal(self):
        """An assertion takes a value out as well."""

        class Checks(nn.Linear):
            def forward(self, x):
                assert float(x.abs().max()) < 100
                return super().forward(x)

        report = elsewhere(Checks(3, 2), (torch.randn(4, 3),), dynamo=False)[0]
        assert report.ok and not report.notes

    def test_a_loop_that_only_other_weights_make_longer(self):
        """No input that is tried tells, so a note does."""

        class Solver(nn.Linear):
            def forward(self, x):
                z, passes = torch.zeros_like(x), 0
                while passes < 2 or self.weight.detach().abs().sum() > 1e6:
                    z, passes = torch.tanh(super().forward(z) + x), passes + 1
                return z

        with pytest.warns(torch.jit.TracerWarning, match="takes the value of a tensor out of torch"):
            report, _ = elsewhere(Solver(3, 3), (torch.randn(4, 3),), dynamo=False)
        (note,) = report.notes
        assert report.ok and note.title == "Values of the example"
        assert "test_other_inputs.py:" in note.text and "other weights were not" in note.text

    def test_eager_fails_on_what_was_made_up(self, dynamo):
        class Picky(nn.Linear):
            def forward(self, x):
                if not torch.compiler.is_exporting() and not torch.jit.is_tracing() and float(x.detach().flatten()[0]) != 0.25:
                    raise ValueError("not what I know")
                return super().forward(x)

        x = torch.randn(4, 3)
        x[0, 0] = 0.25
        report, rows = elsewhere(Picky(3, 2), (x,), dynamo=dynamo)
        assert report.ok and math_is_plain(report)
        assert rows["second input"].note.startswith(
            "not compared: eager fails on it: ValueError: not what I know (at test_other_inputs.py:"
        )

    def test_a_second_size(self, dynamo):
        """A size that became a number is right at the example alone."""

        class Mean(nn.Linear):
            def forward(self, x):
                return super().forward(x) / (4.0 if torch.jit.is_tracing() else x.shape[0])

        shapes = ({0: torch.export.Dim("n")},) if dynamo else ({0: "n"},)
        report, rows = elsewhere(Mean(3, 2), (torch.randn(4, 3),), dynamo=dynamo, dynamic_shapes=shapes)
        assert report.ok == dynamo
        assert rows["second size"].name.endswith("(n=5)")
        assert (rows["second input"].ok, rows["second size"].ok) == (True, dynamo)

    def test_indices_that_cannot_move_stay(self, dynamo):
        """Eager refuses other indices: the float inputs move alone."""

        class Picks(nn.Linear):
            def forward(self, x, at):
                assert torch.jit.is_tracing() or torch.compiler.is_exporting() or at.tolist() == [3, 0, 1, 0]
                return super().forward(x)[at]

        report, rows = elsewhere(Picks(3, 2), (torch.randn(4, 3), torch.tensor([3, 0, 1, 0])), dynamo=dynamo)
        assert report.ok
        assert not rows["second input"].note

    def test_state_begins_anew(self, dynamo):
        """The running statistics of the first step are not those of the second."""
        report, _ = elsewhere(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train(), (torch.randn(6, 3),), dynamo=dynamo)
        assert report.ok


def math_is_plain(report) -> bool:
    """A row that was not compared is no error of NaN, in any of its faces."""
    return report.max_error < 1e-4 and "not compared" in report._repr_html_() and report.as_json()["ok"]


class _Best(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x).scatter(-1, x.topk(2, -1).indices, 1.0)


class _First(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x).scatter(-1, x.sort(dim=-1, descending=True, stable=True).indices[..., :2], 1.0)


def test_which_of_equal_values_topk_takes_is_left_open():
    x = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0]])
    report = exporter.verify(_Best(), (x,), steps=1)
    assert "but by torch.topk: torch leaves open which of them it takes, the file takes the first" in report.notes[0].text
    # What docs/verify-in-ci.md sends people to.
    assert exporter.verify(_First(), (x,), steps=1).ok
