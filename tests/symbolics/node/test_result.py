"""What a model returned, through the metadata of a file."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from symbolics.errors import FormatError, TrustError
from symbolics.node.containers import Slot, fill
from symbolics.node.limits import MAX_DEPTH
from symbolics.node.result import count_tensors, rebuild, write_structure
from tests.symbolics.node import values as v
from tests.symbolics.node.exact import same


def _is_tensor(leaf):
    return isinstance(leaf, str) and leaf.startswith("tensor")


RESULT = v.Pair("tensor 0", {"a": ["tensor 1", None, 0.5], "b": v.Output(logits="tensor 2"), 3: v.Config(("tensor 3", "text"), [])})
TENSORS = [f"tensor {i}" for i in range(4)]
# The same as the first files of format 1 say it.
PLACES = {"namedtuple": ["tests.symbolics.node.values:Pair", [
    {"tensor": 0},
    {"dict": [
        ["a", {"list": [{"tensor": 1}, {"value": None}, {"value": 0.5}]}],
        ["b", {"mapping": ["tests.symbolics.node.values:Output", [["logits", {"tensor": 2}]]]}],
        [3, {"dataclass": ["tests.symbolics.node.values:Config", [["size", {"tuple": [{"tensor": 3}, {"value": "text"}]}], ["name", {"list": []}]]]}],
    ]},
]]}  # fmt: skip


def test_what_is_written_is_rebuilt():
    text = write_structure(RESULT, _is_tensor)
    assert count_tensors(text) == 4
    assert same(rebuild(text, TENSORS, v.resolver), RESULT)
    assert rebuild(text, TENSORS, v.resolver)[1]["a"] is not rebuild(text, TENSORS, v.resolver)[1]["a"]


def test_the_first_files_of_format_1_are_read():
    assert same(rebuild(json.dumps(PLACES), TENSORS, v.resolver), RESULT)
    assert count_tensors(json.dumps(PLACES)) == 4
    assert rebuild('{"tensor": 0}', [7], v.resolver) == 7
    assert rebuild('{"value": {"$float": "inf"}}', [], v.resolver) == float("inf")


@pytest.mark.parametrize("result", ["tensor 0", None, 3, [], ["tensor 0"], ("tensor 0",), {"tensor": "tensor 0"}, {}], ids=repr)
def test_small_results(result):
    assert same(rebuild(write_structure(result, _is_tensor), TENSORS, v.resolver), result)


@settings(max_examples=100, deadline=None)
@given(v.holes)
def test_any_result(value):
    """Tensors stand for the places; what was no container stays as it was."""
    count = [0]

    def place(leaf):
        if not isinstance(leaf, Slot):
            return leaf
        count[0] += 1
        return f"tensor {count[0] - 1}"

    result = fill(value, place)
    text = write_structure(result, _is_tensor)
    if text is not None:
        assert same(rebuild(text, [f"tensor {i}" for i in range(count_tensors(text))], v.resolver), result)


def test_a_refused_class_is_said_and_a_plain_container_stands_for_it():
    said = []

    def refuse(kind, name):
        raise TrustError(f"{kind} {name}")

    found = rebuild(write_structure(RESULT, _is_tensor), TENSORS, refuse, said.append)
    plain = {"a": ["tensor 1", None, 0.5], "b": {"logits": "tensor 2"}, 3: {"size": ("tensor 3", "text"), "name": []}}
    assert same(found, ("tensor 0", plain))
    assert [text.rpartition(":")[2] for text in said] == ["Output", "Config", "Pair"]


def test_a_class_that_is_allowed_later_is_used_later():
    """What a text says is read once only where nobody's answer is in it."""
    text, answers = write_structure(RESULT, _is_tensor), [False, True]

    def resolver(kind, name):
        if not answers[0]:
            raise TrustError(name)
        return v.resolver(kind, name)

    assert type(rebuild(text, TENSORS, resolver)) is tuple
    answers.pop(0)
    assert same(rebuild(text, TENSORS, resolver), RESULT)


@pytest.mark.parametrize("result", [["tensor 0", {"a": [], 3: ()}], ["tensor 0", np.zeros(2)], ["tensor 0", {1, 2}]], ids=str)
def test_two_results_share_nothing_that_can_change(result):
    text = write_structure(result, _is_tensor)
    one, two = (rebuild(text, ["tensor 0"], v.resolver) for _ in range(2))
    assert one is not two
    assert one[1] is not two[1]
    if isinstance(one[1], dict):
        assert one[1]["a"] is not two[1]["a"]


def test_no_constructor_runs(monkeypatch):
    text = write_structure(RESULT, _is_tensor)

    def fail(*args, **kwargs):
        raise AssertionError("code of a class that a file names has run")

    for cls in (v.Output, v.Config):
        for method in ("__init__", "__post_init__", "__setitem__", "__setattr__"):
            monkeypatch.setattr(cls, method, fail, raising=False)
    found = rebuild(text, TENSORS, v.resolver)
    assert list(found.second["b"].items()) == [("logits", "tensor 2")]
    assert (found.second["b"].logits, found.second["b"].loss) == ("tensor 2", None)
    assert found.second[3].size == ("tensor 3", "text")


def test_what_no_file_can_say():
    deep = "tensor"
    for _ in range(MAX_DEPTH + 2):
        deep = [deep]
    for result in (object(), ["tensor 0", object()], deep, ["x" * (1 << 20)], v.IntBits, lambda: 1):
        text = write_structure(result, _is_tensor)
        assert text is None or result is v.IntBits  # a class can be named


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "{}", '{"a": 1}', '{"tensor": 0, "value": 1}', '{"tensor": "a"}', '{"tensor": -1}', '{"tensor": 4}', '{"tensor": true}', '{"list": 3}', '{"list": {"a": 1}}',
        '{"tuple": [3]}', '{"dict": [[1]]}', '{"dict": {"a": 1}}', '{"namedtuple": []}', '{"namedtuple": 3}', '{"namedtuple": {}}', '{"mapping": ["a", 3]}', '{"dataclass": ["a:b", [[[], {"value": 1}]]]}',
        '{"int": "0x1"}', '{"$tensor": -1}', '{"$tensor": 4}', '{"$size": 0}', '{"$what": 1}', '{"$tuple": 3}', '[{"tensor": 0}]', "[" * 9999, '{"list": [' * 400 + "]}" * 400,
        json.dumps(PLACES).replace("Pair", "Config"), json.dumps({"$mapping": ["tests.symbolics.node.values:Output", {"more": 1}]}),
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_damage(text):
    with pytest.raises(FormatError, match=r"^metadata pythonop\.outputs: "):
        rebuild(text, TENSORS, v.resolver)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.text(max_size=2),
    lambda c: (
        st.lists(c, max_size=3)
        | st.dictionaries(
            st.sampled_from(["tensor", "value", "list", "tuple", "dict", "namedtuple", "mapping", "$tensor", "$tuple"]), c, max_size=1
        )
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(JSON)
def test_anything_is_rebuilt_or_refused(data):
    try:
        rebuild(json.dumps(data), TENSORS, lambda kind, name: v.Pair)
    except FormatError:
        pass
