"""Links of functions to their backward (`symbolics.node.linked`) for the corpus: damaged ones, and whole ones that lead nowhere good."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import onnx
from onnx import parser

from symbolics.node.names import BACKWARD_KEY

__all__ = ["damaged_links", "odd_links"]

Make = Callable[[], onnx.ModelProto | bytes]

_TEXT = """<ir_version: 10, opset_import: ["": 20, "own": 1]> g (float[2] x) => (float[2] y) { h, e = own.f(x) y, k = own.f(h) }
    <domain: "own", opset_import: ["": 20]> f (x) => (y, e) { e = Exp(x) y = Neg(e) }
    <domain: "own", opset_import: ["": 20]> back (g, e) => (gx) { gx = Mul(g, e) }
    <domain: "own", opset_import: ["": 20]> asks <much> (g, e) => (gx) { c = Constant<value_float: float = @much>() gx = Mul(g, c) }
    <domain: "own", opset_import: ["": 20]> shapes (g, e) => (gx) { s = Shape(g) c = Constant<value = int64[1] {7}>() t = Concat<axis = 0>(s, c) gx = Expand(g, t) }
    <domain: "own", opset_import: ["": 20]> words (g, e) => (gx) { gx = Cast<to = 8>(g) }
    <domain: "own", opset_import: ["": 20, "own": 1]> again (g, e) => (gx) { y, k = own.f(g) gx = Mul(y, e) }
"""
_INPUT, _KEPT, _COTANGENT = ({"kind": kind, "index": i} for kind, i in (("input", 0), ("output", 1), ("gradient", 0)))
_LINK = {"domain": "own", "name": "back", "takes": [_COTANGENT, _KEPT], "gives": [0], "kept": [{"type": 1, "rank": 1}], "once": False}


def _model(text: str, change: Callable[[onnx.ModelProto], Any] = lambda _: None) -> onnx.ModelProto:
    model = parser.parse_model(_TEXT)
    model.functions[0].metadata_props.add(key=BACKWARD_KEY, value=text)
    change(model)
    return model


def damaged_links() -> Iterator[tuple[str, Make]]:
    """Whoever reads the link refuses it."""
    for name, changes in {
        "nowhere": {"name": "gone"}, "a standard operator": {"domain": "", "name": "Mul"}, "a PythonOp": {"domain": "com.microsoft", "name": "PythonOp"},
        "no list": {"takes": 1}, "a number for an object": {"takes": [0, 1]}, "one too few": {"takes": [_COTANGENT]}, "many": {"takes": [_COTANGENT] * 70_000},
        "an input beyond": {"takes": [{"kind": "input", "index": 2**40}, _KEPT]}, "an input before": {"takes": [{"kind": "input", "index": -1}, _KEPT]},
        "the gradient of what is kept": {"takes": [{"kind": "gradient", "index": 1}, _KEPT]}, "two gradients of one": {"gives": [0, 0]}, "no input": {"gives": [1]},
        "all is kept": {"kept": [{"type": 1, "rank": 1}] * 3}, "of type 0": {"kept": [{"type": 0, "rank": 1}]}, "of rank -1": {"kept": [{"type": 1, "rank": -1}]},
        "of rank 2**50": {"kept": [{"type": 1, "rank": 2**50}]}, "an attribute": {"name": "asks"}, "no name": {"name": ""}, "a strange name": {"name": "\x1b[2J"}, "maybe": {"once": None},
    }.items():  # fmt: skip
        yield name, lambda changes=changes: _model(json.dumps({**_LINK, **changes}))
    for name, text in {
        "no JSON": "{", "deep": "[" * 100_000, "a key twice": '{"once": true, "once": true}', "NULs": "\0" * 9, "long": '"' + "x" * 10**6 + '"',
    }.items():  # fmt: skip
        yield name, lambda text=text: _model(text)
    yield "no UTF-8", lambda: _model("@@badly@").SerializeToString().replace(b"@@badly@", b"\xff\xfe\xc0\x80\xed\xa0\x80\xf5")
    yield "an overload", lambda: _model(json.dumps(_LINK), lambda m: setattr(m.functions[0], "overload", "o"))


def odd_links() -> Iterator[tuple[str, Make]]:
    """What becomes of these is nobody's promise, but that nothing breaks."""
    for name, changes in {
        "to itself": {"name": "f", "takes": [_COTANGENT], "gives": [0], "kept": []}, "to what calls it": {"name": "again"}, "to other shapes": {"name": "shapes"},
        "to other types": {"name": "words"}, "kept is no int64": {"kept": [{"type": 7, "rank": 1}]}, "kept is no matrix": {"kept": [{"type": 1, "rank": 2}]},
        "without a cotangent": {"takes": [_INPUT, _KEPT]}, "nothing is kept": {"kept": []}, "once": {"once": True},
    }.items():  # fmt: skip
        yield name, lambda changes=changes: _model(json.dumps({**_LINK, **changes}))
    for name, change in {
        "a name twice": lambda m: m.functions.append(m.functions[0]), "a call of too few outputs": lambda m: m.graph.node[0].output.pop(),
        "a call of too few inputs": lambda m: m.graph.node[0].input.pop(), "a call of too many outputs": lambda m: m.graph.node[0].output.append("more"),
        "a link on the backward": lambda m: m.functions[1].metadata_props.extend(list(m.functions[0].metadata_props)),
        "an output that nothing makes": lambda m: m.functions[0].output.append("more"),
        "a key twice": lambda m: m.functions[0].metadata_props.extend(list(m.functions[0].metadata_props)),
        "calls it in its body": lambda m: m.functions[1].node.add(op_type="f", domain="own", input=["g"], output=["q", "r"]),
    }.items():  # fmt: skip
        yield name, lambda change=change: _model(json.dumps(_LINK), change)
