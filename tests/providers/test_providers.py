"""The page of execution providers holds what the record does, every rule is on it, and a part of it is asked again."""

from __future__ import annotations

import numpy as np
import pytest

from symbolics.gradients import COMPOSITES, RULES
from tests.providers import sessions, sweep, table
from tests.providers.sessions import PROVIDERS, Asked, Failed
from tests.support import missing
from tests.symbolics.gradients.make_references import load, node_tests

RECORD, REFERENCES = sweep.read(), load()
#: A handful: of the causes that kept OpenVINO from opening gradients, one each.
CASES = ("test_gru_defaults", "test_reduce_l2_keep_dims_random", "test_dynamicquantizelinear_expanded", "test_conv_with_strides_padding")
STEPS = ("CNN with BatchNorm and MaxPool, AdamW", "transformer block with dropout, SGD")


def test_the_page_is_what_was_recorded():
    assert table.DOCUMENT.read_text() == table.page(RECORD), "python -m tests.providers.table"


def test_every_rule_is_in_the_table():
    """Also the one that somebody writes tomorrow."""
    rows = table.operators(REFERENCES)
    assert {name for domain, name in (*RULES, *COMPOSITES) if domain == ""} <= set(rows)
    page = table.page(RECORD, rules=[*RULES, *COMPOSITES, ("", "Rocket")])
    assert f"| Rocket |  | {' | '.join(['no case'] * len(RECORD))} |\n" in page
    assert all(f"\n| {name} | " in page for name in rows)


def test_a_case_that_nobody_was_asked_about_is_not_equal():
    other = {**REFERENCES, "test_abs_of_tomorrow": REFERENCES["test_abs"]}
    assert "| Abs | 2 | not asked |" in table.page(RECORD, other)


@pytest.mark.parametrize("name", RECORD)
def test_every_case_was_asked(name):
    """A case that is new in onnx is in the table after `make test-providers`."""
    asked = RECORD[name]
    assert sum(asked["tried"].values()) == len(REFERENCES)
    assert asked["cases"].keys() <= REFERENCES.keys()
    assert tuple(sorted(asked["steps"])) == tuple(sorted(sweep.STEPS))


@pytest.fixture(scope="module")
def models():
    return node_tests()


@pytest.fixture(scope="module", params=list(PROVIDERS))
def asked(request):
    needed = dict(sessions.missing()).get(request.param)
    if needed is not None:
        missing({"WASM": "node", "WebGPU": "chromium"}.get(request.param, "providers"), f"{request.param}: {needed}")
    with Asked(request.param) as asked:
        if request.param == "WebGPU":
            try:
                asked.open(node_tests()["test_abs"][0])
            except Failed as error:
                if "adapter" in error.args[1]:
                    missing("webgpu", "this Chromium has no adapter, not even SwiftShader")
                raise
        yield asked


def test_a_handful_of_gradients(asked, models):
    found = dict(sweep.cases(asked, CASES, REFERENCES, models))
    # No provider but WebGPU fails at one: it has no uint8 for DynamicQuantizeLinear.
    recorded = RECORD[asked.provider]["cases"]
    assert {name: cell and cell[0] for name, cell in found.items()} == {
        name: recorded[name][0] if name in recorded else None for name in CASES
    }
    assert len(recorded.keys() & set(CASES)) == (asked.provider == "WebGPU")


@pytest.mark.parametrize("name", STEPS)
def test_two_steps_beside_eager(asked, name):
    ((_, far),) = sweep.steps(asked, [name])
    assert far["losses"] < table.LOSSES
    assert far["weights"] < table.WEIGHTS


def test_what_is_refused_and_what_dies_are_answers(models, monkeypatch):
    with Asked("CPU") as asked:
        with pytest.raises(Failed) as found:
            asked.open(models["test_abs"][0].__class__())
        assert found.value.args[0] == "opens"
        monkeypatch.setattr(sessions, "PATIENCE", 0)
        with pytest.raises(Failed, match="does not come back"):
            asked.open(models["test_abs"][0])
        monkeypatch.undo()
        asked.open(models["test_abs"][0])
        assert list(asked.run({"x": np.ones((3, 4, 5), np.float32)})) == ["y"]
        asked._process.kill()
        with pytest.raises(Failed, match="the process ends"):
            asked.run({"x": np.zeros((3, 4, 5), np.float32)})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("Exception from src/core.cpp:96:\nOpenVINO does not support the following ONNX operations: Det, Scan\nmore", "no Det, Scan"),
        ("NOT_IMPLEMENTED : Could not find an implementation for Add(14) node with name 'x'", "no kernel of Add for its types"),
        ("Check 'a == b' failed at src/x.cpp:3:\nwhile reading /tmp/x/model.onnx", "while reading"),
    ],
)
def test_errors_in_a_few_words(error, words):
    assert sweep.short(error) == words
