"""`python -m tests.exporter.quantization.twelve`: two small models, all of them, and what it says of a file that is wrong."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import exporter
from tests.exporter.quantization import twelve
from tests.exporter.quantization.quantizers import Act

pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = ("MLP, PACT", "conv net, LSQ")


def test_two_small_models(capsys):
    assert twelve.main([*SMALL, "--exporters", "torchscript", "--inputs", "50", "--masks", "5000"]) == 0
    out = capsys.readouterr().out
    assert "| MLP, PACT | torchscript | 3 of 3 | 3 of 3 | 1 | 0.0000% | 50 of 50 | 0 of " in out
    assert "7 of 7 quantised products in integers (100.0%)" in out and "MISSED" not in out


def test_all_models(capsys):
    """On few inputs, where the share of levels is luck; those whose tool is not installed are named. No other limit is missed."""
    twelve.main(["--exporters", "torchscript", "--inputs", "40", "--masks", "4000"])
    out = capsys.readouterr().out
    assert all(f"| {name} | torchscript | " in out for name in twelve.TWELVE)
    missed = [line for line in out.splitlines() if "MISSED" in line]
    assert all("MISSED: levels" in line for line in missed), missed


def test_there_are_twelve_and_none_twice():
    cases = [case for case, _ in twelve.TWELVE.values()]
    assert len(cases) == len({id(case) for case in cases}) == 12 and twelve.KNOWN.keys() < twelve.TWELVE.keys()


def test_what_is_wrong_is_missed(monkeypatch, capsys):
    """Another weight, another step, and another class."""
    case, _ = twelve.TWELVE["MLP, PACT"]
    quantize = exporter.quantize

    def wrong(program):
        made = quantize(program)
        held = made.model.graph.initializers
        name = next(each for each in held if each.endswith("/levels") and held[each].const_value.dtype == ir.DataType.INT8)
        levels = held[name].const_value.numpy().copy()
        levels[:, ::2] *= -1
        held[name].const_value = ir.tensor(levels, name=name)
        step = next(held[name] for each in made.activations if (name := f"{each.name}/scale") in held)
        step.const_value = ir.tensor(np.array(step.const_value.numpy() * np.float32(1.01)), name=step.name)
        return made

    monkeypatch.setattr(exporter, "quantize", wrong)
    row = twelve.judge(case, False, inputs=50, masks=1000)
    assert row.weights_off == 1 and row.missed == ["weights", "thresholds", "levels", "classes"]
    assert twelve.main(["MLP, PACT", "--exporters", "torchscript", "--inputs", "50", "--masks", "1000"]) == 1
    assert "MISSED: weights" in capsys.readouterr().out


def test_masks_that_are_not_eagers_are_counted():
    act = Act(signed=True)
    x = twelve._near_edges([act], 2000)
    assert twelve.masks_of(twelve._Each([act]), x, False) == (0, 2000)
    program = exporter.export(Act(signed=True, step=0.0245), (x[0],), dynamo=False, portable=True)
    off, count = twelve._gradients(program, act, [(x[0],)], [program.model.graph.inputs[0].name])
    assert count == 2000 and 20 < off < 400
