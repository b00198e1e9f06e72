from __future__ import annotations

import pytest
import torch

from symbolics.capture.kept_state import changes_of, said_of
from symbolics.capture.restored import KeptState
from tests.symbolics.capture import keeping


def _named(cls) -> list[tuple[str, str]]:
    return [(change.half, change.name.removeprefix(f"{keeping.__name__}:")) for change in changes_of(cls) if change.kind != "memo"]


@pytest.mark.parametrize("half", ["forward", "backward"])
@pytest.mark.parametrize("method", keeping.KEEPS, ids=lambda method: method.__name__)
def test_what_a_half_changes(method, half):
    assert _named(keeping.made(**{half: method})) == [(half, keeping.KEEPS[method])]


@pytest.mark.parametrize("half", ["forward", "backward"])
@pytest.mark.parametrize("method", keeping.KEEPS_NOTHING, ids=lambda method: method.__name__)
def test_what_only_looks_so(method, half):
    assert _named(keeping.made(**{half: method})) == []


def test_names():
    assert _named(keeping.InBackward) == [("backward", "InBackward.scale")]
    assert _named(keeping.Remembered) == _named(keeping.RememberedNumber) == []
    assert _named(keeping.made(forward=keeping._default)) == [("forward", "the default of _store")]


def test_in_a_closure():
    known, n = [], 0

    def forward(ctx, x):
        nonlocal n
        n += 1
        known.append(x)
        return x * n

    assert _named(keeping.made(forward=forward)) == [("forward", "n"), ("forward", "known")]


def test_without_a_source():
    names: dict = {"__name__": "made_up", "keeping": keeping, "N": 1}
    exec("def forward(ctx, x):\n    global N\n    N = N + 1\n    keeping.Average.running = x\n    keeping.count = N\n    return x", names)
    assert _named(keeping.made(forward=names["forward"])) == [("forward", "made_up:N"), ("forward", "count")]


def test_a_switch_that_is_on(monkeypatch):
    monkeypatch.setattr(keeping, "VERBOSE", True)
    assert _named(keeping.made(forward=keeping._switched_off)) == [("forward", "history")]


@pytest.mark.parametrize("half", ["forward", "backward"])
@pytest.mark.parametrize("method", [*keeping.DEAD, *keeping.LIVE], ids=lambda method: method.__name__)
def test_a_side_of_a_branch_that_no_call_takes(method, half):
    """What values of the module say that nothing sets again: a comparison as well as a name."""
    assert _named(keeping.made(**{half: method})) == ([(half, "history")] if method in keeping.LIVE else [])


@pytest.mark.parametrize(
    ("name", "value", "method"), [("MODE", "state", "_compared"), ("LOUD", True, "_not_loud"), ("MODE", "a", "_compared")]
)
def test_a_side_that_a_value_turns_on(name, value, method, monkeypatch):
    monkeypatch.setattr(keeping, name, value)
    assert _named(keeping.made(forward=getattr(keeping, method))) == [("forward", "history")]


def test_a_long_list():
    (text,) = said_of("backward", [f"A.n{i}" for i in range(7)])
    assert "A.n4 and 2 more, which" in text and not said_of("forward", [])


def _fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(2)


def test_restored(monkeypatch):
    monkeypatch.setattr(keeping.Average, "running", torch.ones(()))
    monkeypatch.setitem(keeping.table, "k", 3.0)
    monkeypatch.setitem(keeping.cache, "a", {"n": 1})
    with KeptState() as kept:
        for cls in (keeping.Average, keeping.Remembered, keeping.Counted):
            kept.meet(cls)
        keeping.Average.running = _fake()
        keeping.table["other"] = _fake()
        keeping.cache["a"]["n"] = _fake()
        keeping.cache["b"] = 2  # no tensor of a capture
    assert keeping.Average.running == 1 and keeping.table == {"k": 3.0}
    assert keeping.cache == {"a": {"n": 1}, "b": 2}
    del keeping.cache["b"]
