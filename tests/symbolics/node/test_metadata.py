"""What metadata says, read strictly: each damage is named by its key and its place."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, strategies as st

from symbolics.errors import FormatError
from symbolics.node import metadata, names
from tests.symbolics.node.test_format_doc import PAIRING, STATE, STEP

READERS = {
    names.STATE_KEY: (metadata.read_state, metadata.write_state, STATE),
    names.GRADIENTS_KEY: (metadata.read_pairing, metadata.write_pairing, PAIRING),
    names.STEP_KEY: (metadata.read_step, metadata.write_step, STEP),
    names.CUMULATIVE_KEY: (metadata.read_cumulative, lambda value: metadata.write_cumulative(tuple(sorted(value))), frozenset({"a", "ü"})),
}


@pytest.mark.parametrize("key", READERS)
def test_what_is_written_is_read(key):
    read, write, value = READERS[key]
    assert read({key: write(value)}) == value
    assert write(value).isascii()
    assert " " not in write(value)


def test_absent():
    assert metadata.read_state({}) is metadata.read_pairing({}) is metadata.read_step({}) is None
    assert metadata.read_cumulative({}) == frozenset()


def _state(**changes):
    return json.dumps({"w": {"initializer": "w", "kind": "buffer", "trainable": False, "persistent": True, **changes}})


@pytest.mark.parametrize(
    ("key", "text", "why"),
    [
        (names.STATE_KEY, "{", r"it is not JSON"),
        (names.STATE_KEY, "[" * 100_000, r"it is not JSON"),
        (names.STATE_KEY, "[]", r"it is \[\], not a JSON object"),
        (names.STATE_KEY, '{"w": 1}', r", w: it is 1, not a JSON object with the keys initializer, kind, trainable, persistent"),
        (names.STATE_KEY, '{"w": {"initializer": "w", "kind": "buffer", "trainable": false}}', r", w: it is \{.*\}, not .* persistent"),
        (names.STATE_KEY, _state(more=1), r", w: this release does not know its key .more.: install a newer pythonop"),
        (names.STATE_KEY, _state(kind="x"), r", w, kind: it is 'x', not one of \('parameter', 'buffer'\)"),
        (names.STATE_KEY, _state(kind=[]), r", w, kind: it is \[\], not one of"),
        (names.STATE_KEY, _state(trainable=1), r", w, trainable: it is 1, not true or false"),
        (names.STATE_KEY, _state(initializer=None), r", w, initializer: it is None, not a string"),
        (names.GRADIENTS_KEY, '{"inputs": {"a": 1}, "outputs": {}, "unreached": []}', r", inputs, a: it is 1, not a string"),
        (names.GRADIENTS_KEY, '{"inputs": {}, "outputs": {}, "unreached": "x"}', r", unreached: it is 'x', not a list"),
        (names.STEP_KEY, "{}", r"not a JSON object with the keys carried, .*, hyperparameters"),
        (names.STEP_KEY, metadata.write_step(STEP).replace('["x"]', '["x", 3]'), r", inputs, item 1: it is 3, not a string"),
        (names.CUMULATIVE_KEY, "{}", r"it is \{\}, not a list"),
        (names.CUMULATIVE_KEY, '["a", 1]', r", item 1: it is 1, not a string"),
    ],
)
def test_damage_is_named(key, text, why):
    with pytest.raises(FormatError, match=rf"^metadata {key}.*{why}.*(: |, or )the file is damaged$"):
        READERS[key][0]({key: text})


@pytest.mark.parametrize("key", READERS)
@pytest.mark.parametrize(
    "text",
    ['{"a": {}, "a": {}}', '["a", 1e400]', "[NaN]", "[-Infinity]", "[" + "9" * 5000 + "]", "[1e" + "9" * 5000 + "]", '["\\x00"]', "[" * 900 + "]" * 900, "[" * 990 + "]" * 990],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_text_that_no_reader_takes(key, text):
    with pytest.raises(FormatError, match=f"^metadata {key}") as caught:
        READERS[key][0]({key: text})
    assert len(str(caught.value)) < 500


# ------------------------------------------------------------------------------------------- names that the graph must have


def _model(key, text):
    def value(name):
        return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))

    x, g, w = value("x"), value("y_grad"), value("w")
    w.const_value = ir.tensor(np.ones(2, np.float32), name="w")
    node, other = ir.Node("", "Mul", [x, w]), ir.Node("", "Identity", [g])
    node.outputs[0].name, other.outputs[0].name = "y", "w_grad"
    graph = ir.Graph([x, g], [node.outputs[0], other.outputs[0]], nodes=[node, other], initializers=[w], opset_imports={"": 18})
    return ir.Model(graph, ir_version=9, metadata_props={key: text})


PAIRS = {"inputs": {"y": "y_grad"}, "outputs": {"w": "w_grad"}, "unreached": ["w"]}
LAYOUT = {
    "carried": {"w_grad": "x"}, "inputs": ["x"], "targets": ["y_grad"], "loss": "y", "parameters": {"a": "x", "b": "x"}, "buffers": {"c": "y_grad"},
    "untrained": ["d"], "optimizer": "sgd", "hyperparameters": [],
}  # fmt: skip


def test_names_that_the_graph_has():
    assert metadata.pairing_of(_model(names.GRADIENTS_KEY, json.dumps(PAIRS))).outputs == {"w": "w_grad"}
    assert metadata.step_of(_model(names.STEP_KEY, json.dumps(LAYOUT))).loss == "y"
    assert list(metadata.state_of(_model(names.STATE_KEY, _state()))) == ["w"]
    assert metadata.pairing_of(_model("x", "")) is metadata.step_of(_model("x", "")) is metadata.state_of(_model("x", "")) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"inputs": {"z": "y_grad"}}, "output 'z'"),
        ({"inputs": {"y": "z"}}, "input 'z'"),
        ({"inputs": {"y": "w"}}, "input 'w'"),
        ({"inputs": {"y": "y_grad", "w_grad": "y_grad"}}, "input 'y_grad' twice"),
        ({"outputs": {"z": "w_grad"}}, "input or initializer 'z'"),
        ({"outputs": {"w": "z"}}, "output 'z'"),
        ({"outputs": {"w": "w_grad", "x": "w_grad"}}, "output 'w_grad' twice"),
        ({"outputs": {"w": "w_grad", "x": "y"}}, "without an output of its own"),
        ({"unreached": ["x"]}, "gradient 'x'"),
        ({"unreached": ["w", "w"]}, "gradient 'w' twice"),
        ({"inputs": {"y": "\x1b" * 999}}, "input '"),
    ],
    ids=str,
)
def test_a_pairing_of_what_is_not_there(changes, why):
    with pytest.raises(FormatError, match=rf"^metadata pythonop\.gradients: .*{why}") as caught:
        metadata.pairing_of(_model(names.GRADIENTS_KEY, json.dumps({**PAIRS, **changes})))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"carried": {"z": "x"}}, "output 'z'"),
        ({"carried": {"w_grad": "z"}}, "input 'z'"),
        ({"carried": {"w_grad": "x", "y": "x"}}, "output 'y' twice"),
        ({"inputs": ["z"]}, "input 'z'"),
        ({"targets": ["x"]}, "input 'x' twice"),
        ({"loss": "z"}, "output 'z'"),
        ({"loss": "w_grad"}, "output 'w_grad' twice"),
        ({"parameters": {"a": "z"}}, "input 'z'"),
        ({"buffers": {"a": "w"}}, "input 'w'"),
    ],
    ids=str,
)
def test_a_step_of_what_is_not_there(changes, why):
    with pytest.raises(FormatError, match=rf"^metadata pythonop\.step: it names the {why}"):
        metadata.step_of(_model(names.STEP_KEY, json.dumps({**LAYOUT, **changes})))


def test_a_state_of_what_is_not_there():
    with pytest.raises(FormatError, match="lacks the initializers 'gone'"):
        metadata.state_of(_model(names.STATE_KEY, _state(initializer="gone")))


def test_names_in_messages_are_escaped():
    with pytest.raises(FormatError) as caught:
        metadata.read_state({names.STATE_KEY: json.dumps({"\x1b[31m\u202e" + "x" * 9999: "\x1b" * 9999})})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=3), c, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(READERS)), JSON)
def test_anything_is_read_or_refused(key, data):
    try:
        READERS[key][0]({key: json.dumps(data)})
    except FormatError:
        pass
