"""What differences are allowed."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

import exporter
from exporter.verification.compare import ROUGH, compare, limit_of, tolerance_of
from exporter.verification.notes import note_on_constants, note_on_half, notes_on
from exporter.verification.rows import Row
from tests.support import Calls


def _results(output):
    return SimpleNamespace(outputs=[output], gradients={}, buffers={})


@pytest.mark.parametrize(("off", "precision", "ok"), [(1e-2, None, False), (1e-2, torch.bfloat16, True), (0.5, torch.bfloat16, False)])
def test_a_file_that_computes_in_bfloat16_may_differ_by_it(off, precision, ok):
    wanted = torch.tensor([1.0, 2.0])
    (row,) = compare(_results(wanted), _results(wanted.double()), _results(wanted * (1 + off)), {}, precision)
    assert row.ok == ok


def test_other_types_keep_their_tolerance():
    assert tolerance_of("float64", torch.bfloat16) == tolerance_of("float64")
    assert tolerance_of("float32", torch.bfloat16) == tolerance_of("bfloat16")


@pytest.mark.parametrize(("count", "ok"), [(1, True), (2, True), (30, False)])
def test_the_error_of_few_numbers_may_be_small_by_luck(count, ok):
    wanted = torch.ones(count)
    (row,) = compare(_results(wanted), _results(wanted.double() + 1e-5), _results(wanted + 2.2e-4), {})
    assert row.ok == ok


@pytest.mark.parametrize(
    ("value", "kind", "opaque", "ok"),
    [
        (0.0, "parameter gradient", {"b"}, True),
        (1e-9, "parameter gradient", {"b"}, False),
        (0.0, "parameter gradient", {"a"}, False),
        (0.0, "input gradient", {"b"}, False),
    ],
)
def test_zeros_are_no_gradient_for_parameters_of_opaque_modules_alone(value, kind, opaque, ok):
    one = torch.ones(2)
    eager = SimpleNamespace(outputs=[one], gradients={(kind, "b"): None}, buffers={})
    file = SimpleNamespace(outputs=[one], gradients={(kind, "b"): torch.full((3,), value)}, buffers={})
    _, row = compare(eager, None, file, {}, opaque=opaque)
    assert (row.ok, bool(row.note), bool(row.problem)) == (ok, ok, not ok)


@pytest.mark.parametrize(
    ("dtype", "wanted", "precise", "got", "ok"),
    [
        (torch.float32, 4e-8, 8e-17, -1.4e-7, True),
        (torch.float32, 4e-8, 8e-17, 1e-3, False),  # a number that is there in the file alone
        (torch.float32, 4e-8, 4.1e-8, -1.4e-7, False),  # small, and no rounding
        (torch.float32, 4e-8, None, -1.4e-7, False),  # nobody knows
        (torch.float64, 8e-17, None, -1e-16, True),
        (torch.float64, 8e-12, None, -1e-11, False),
    ],
)
def test_an_output_that_is_0_but_for_rounding_is_measured_by_the_largest(dtype, wanted, precise, got, ok):
    """The gradient for a bias in front of a softmax, say, which a model returns beside that of the weight."""
    beside = torch.tensor([0.93], dtype=dtype)

    def results(value, kind=dtype):
        return SimpleNamespace(outputs=[beside.to(kind), torch.tensor([value], dtype=kind)], gradients={}, buffers={})

    _, row = compare(results(wanted), None if precise is None else results(precise, torch.float64), results(got), {})
    assert row.ok == ok


def _masked(logits):
    return torch.cat([logits, torch.full((8,), -1e9)])


@pytest.mark.parametrize("at", [0, 7])
def test_numbers_beside_large_ones_are_measured_by_themselves(at):
    logits = torch.linspace(-2, 2, 9)
    wrong = logits.clone()
    wrong[at] += 1e-2
    wanted, precise = _results(_masked(logits)), _results(_masked(logits.double()))
    assert compare(wanted, precise, _results(_masked(wrong)), {})[0].ok is False
    assert compare(wanted, precise, _results(_masked(logits + 1e-7)), {})[0].ok


def test_a_small_sum_of_large_numbers_is_not():
    """Eager in float64 says that it is exact to 1e-5 of itself alone."""
    wanted = torch.cat([torch.full((8,), 1e6), torch.linspace(1, 2, 9)])
    precise = wanted.double()
    precise[8:] += 1e-3
    off = wanted.clone()
    off[8:] -= 2e-3
    assert compare(_results(wanted), _results(precise), _results(off), {})[0].ok


def test_what_a_provider_rounds_does_not_stand_alone():
    wanted = torch.cat([torch.full((8,), 1e4), torch.linspace(1, 2, 9)])
    precise, off = wanted.double(), wanted.clone()
    precise[8:] += 1e-4
    off[8:] += 1.0
    assert compare(_results(wanted), _results(precise), _results(off), {}, torch.bfloat16)[0].ok


def test_subnormal_numbers_are_no_rest():
    wanted = torch.cat([torch.full((8,), 2e3), torch.linspace(1, 2, 9), torch.exp(-torch.arange(88.0, 96.0))])
    flushed = torch.where(wanted.abs() < torch.finfo(torch.float32).tiny, 0.0, wanted)
    assert compare(_results(wanted), _results(wanted.double()), _results(flushed), {})[0].ok


@pytest.mark.parametrize(("error", "ok"), [(1e-2, False), (1e-7, True)])
def test_gradients_beside_that_of_a_mask_are_measured_by_themselves(error, ok):
    one, mask = torch.ones(1), torch.full((4,), 1e9)
    gradient = torch.linspace(-1, 1, 12)

    def step(weight):
        gradients = {("parameter gradient", "weight"): weight, ("input gradient", "mask"): mask.to(weight.dtype)}
        return SimpleNamespace(outputs=[one.to(weight.dtype)], gradients=gradients, buffers={})

    rows = compare(step(gradient), step(gradient.double()), step(gradient + error), {})
    assert all(row.ok for row in rows) == ok


@pytest.mark.parametrize("kind", ["output", "buffer", "weight", "gradients", "second input", "second size"])
@pytest.mark.parametrize(("ok", "problem", "note"), [(False, "the file fails on it, eager does not", ""), (True, "", "not compared: why")])
def test_a_row_that_stands_for_no_tensor_has_no_type(kind, ok, problem, note):
    """Of all that reads rows, the note on constants asked torch for a type without a name."""
    row = Row("inputs (n=9)", kind, (), "", float("nan"), None, 0.0, "", ok, problem, note=note)
    tensor = Row("output 0", "output", (2,), "float32", 0.0, 0.0, 1e-5, "float64", True)
    assert tolerance_of(row.dtype) == 0.0 and limit_of(row) == ROUGH
    for rows in ([row], [tensor, row]):
        titles = [said.title for said in (*note_on_constants(rows), *notes_on(rows, {"TopK": 1}), *note_on_half(rows))]
        assert titles == (["Right at the example alone"] if not ok and kind.startswith("second") else [])


def test_a_file_that_fails_at_another_size(tmp_path):
    """Its only differing row stands for all tensors there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = exporter.verify(
            Calls(lambda x: x + torch.zeros(int(x.shape[0]), 3)), (torch.randn(4, 3),), dynamo=False, dynamic_shapes={"args": ({0: "n"},)}
        )
    assert not report.ok and "the file fails on it, eager does not" in next(row.problem for row in report.rows if not row.ok)
    assert "the file fails on it" in report.to_html(tmp_path / "report.html").read_text()
