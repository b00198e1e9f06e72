"""The link from a function to its backward: written, read back, and refused where it is damaged."""

from __future__ import annotations

import json
from dataclasses import replace

import onnx.parser
import onnx_ir as ir
import pytest
from hypothesis import given, strategies as st

from symbolics.errors import FormatError
from symbolics.node.linked import Backward, Kept, Taken, backward_of, write_backward
from symbolics.node.names import BACKWARD_KEY

TEXT = """<ir_version: 10, opset_import: ["": 20, "own": 1]> g (float[2] x, float[2] w) => (float[2] y) { y, e = own.f(x, w) }
    <domain: "own", opset_import: ["": 20]> f (x, w) => (y, e) { e = Exp(x) y = Mul(e, w) }
    <domain: "own", opset_import: ["": 20]> back (g, e, w) => (gx, gw) { gw = Mul(g, e) gx = Mul(gw, w) }
    <domain: "own", opset_import: ["": 20]> asks <much> (g, e, w) => (gx, gw) { c = Constant<value_float: float = @much>() gw = Mul(g, c) gx = Mul(gw, w) }
"""
LINK = Backward("own", "back", (Taken("gradient", 0), Taken("output", 1), Taken("input", 1)), (0, 1), (Kept(1, 1),), once=False)
NONE = Backward("", "", (), (), (), once=False)
PROTO = onnx.parser.parse_model(TEXT)


def read(text: str | None) -> Backward | None:
    model = ir.from_proto(PROTO)
    function = model.functions["own", "f", ""]
    if text is not None:
        function.metadata_props[BACKWARD_KEY] = text
    return backward_of(model, function)


@pytest.mark.parametrize(
    "link", [LINK, NONE, replace(LINK, once=True), replace(LINK, kept=()), replace(NONE, kept=(Kept(7, 0), Kept(10, 64)))]
)
def test_what_is_written_is_read(link):
    text = write_backward(link)
    assert read(text) == link
    assert text.isascii()
    assert " " not in text


def test_the_fields_of_the_text():
    """As docs/format.md says them."""
    assert json.loads(write_backward(LINK)) == {
        "domain": "own",
        "name": "back",
        "takes": [{"kind": "gradient", "index": 0}, {"kind": "output", "index": 1}, {"kind": "input", "index": 1}],
        "gives": [0, 1],
        "kept": [{"type": 1, "rank": 1}],
        "once": False,
    }


def test_a_function_without_a_link():
    assert read(None) is None


GOOD = json.loads(write_backward(LINK))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is not JSON"),
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", r"it is \[\], not a JSON object with the keys domain, name, takes, gives, kept, once"),
        ('{"once": true, "once": true}', "a key twice"),
    ],
)
def test_text_that_is_no_link(text, why):
    _refused(text, why)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"more": 1}, "this release does not know its key .more.: install a newer pythonop"),
        ({"domain": None}, ", domain: it is None, not a string"),
        ({"name": "gone"}, "it names the function 'gone', which the file lacks"),
        ({"domain": ""}, "it names the function 'back', which the file lacks"),
        ({"name": "\x1b[31m" * 500}, "which the file lacks"),
        ({"takes": {}}, r", takes: it is \{\}, not a list"),
        ({"takes": [0, 1, 2]}, ", takes, item 0: it is 0, not a JSON object with the keys kind, index"),
        ({"takes": [{"kind": "gradients", "index": 0}]}, ", takes, item 0, kind: it is 'gradients', not one of"),
        ({"takes": [{"kind": "input", "index": True}]}, ", takes, item 0, index: it is True, not an integer"),
        ({"takes": [{"kind": "input", "index": 0.0}]}, ", takes, item 0, index: it is 0.0, not an integer"),
        (
            {"takes": [*GOOD["takes"][:2], {"kind": "input", "index": 2}]},
            r"it counts more inputs or outputs than the function has \(2, 2\)",
        ),
        ({"takes": [*GOOD["takes"][:2], {"kind": "input", "index": -1}]}, "it counts more inputs"),
        ({"takes": [*GOOD["takes"][:2], {"kind": "output", "index": 2}]}, "it counts more inputs"),
        ({"takes": [*GOOD["takes"][:2], {"kind": "gradient", "index": 1}]}, "it counts more inputs"),  # of what is kept
        ({"takes": GOOD["takes"][:2]}, "it does not fit 'back', with 3 inputs and 2 outputs"),
        ({"gives": [0]}, "it does not fit 'back'"),
        ({"gives": [0, 2]}, "it counts more inputs"),
        ({"gives": [0, -1]}, "it counts more inputs"),
        ({"gives": [1, 1]}, "it gives two gradients of one input"),
        ({"gives": [False, True]}, ", gives, item 0: it is False, not an integer"),
        ({"kept": [{"type": 1, "rank": 1}] * 3}, "it counts more inputs or outputs"),
        ({"kept": [{"type": 0, "rank": 1}]}, "what it keeps has no type of ONNX, or no rank"),
        ({"kept": [{"type": 99, "rank": 1}]}, "what it keeps has no type"),
        ({"kept": [{"type": 1, "rank": -1}]}, "or no rank"),
        ({"kept": [{"type": 1, "rank": 65}]}, "or no rank"),
        ({"kept": [{"type": 1, "rank": 1 << 60}]}, "outside what a file may hold"),
        ({"once": 0}, ", once: it is 0, not true or false"),
        ({"name": "asks"}, "'asks' wants the attribute 'much', which the function does not have"),
        ({"name": ""}, "it names no function, and says what one takes and gives"),
        ({"domain": "own", "name": "", "takes": [], "gives": []}, "it names no function"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_damaged_link_is_refused(changes, why):
    _refused(json.dumps({**GOOD, **changes}), why)


def test_a_link_of_an_overload():
    model = ir.from_proto(PROTO)
    body = model.functions["own", "f", ""]
    function = ir.Function("own", "f", "other", graph=body.graph, attributes=[])
    function.metadata_props[BACKWARD_KEY] = write_backward(LINK)
    with pytest.raises(FormatError, match="the function is an overload"):
        backward_of(model, function)


def _refused(text: str, why: str) -> None:
    with pytest.raises(FormatError, match=rf"^metadata pythonop\.backward of the function 'f'.*{why}") as caught:
        read(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.sampled_from(["input", "output", "gradient", "own", "back", ""]),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.sampled_from(["kind", "index", "type", "rank"]), c, max_size=2),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(GOOD)), JSON, max_size=6))
def test_anything_is_read_or_refused(changes):
    """What is read fits the functions, and is written as it was."""
    try:
        link = read(json.dumps({**GOOD, **changes}))
    except FormatError:
        return
    assert link is not None
    assert json.loads(write_backward(link)) == {**GOOD, **changes}
    assert all(taken.index < {"input": 2, "output": 2, "gradient": 2 - len(link.kept)}[taken.kind] for taken in link.takes)
