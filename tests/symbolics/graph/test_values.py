"""What is known of a node, and how messages name it."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from symbolics.graph.values import describe, operator_text


@pytest.mark.parametrize(
    ("domain", "overload", "text"),
    [("", "", "F"), ("ai.onnx", "", "F"), ("own", "", "own::F"), ("own", "wide", "own::F:wide"), ("", "wide", "F:wide")],
)
def test_the_name_of_an_operator(domain, overload, text):
    node = ir.Node(domain, "F", [], overload=overload, name="n")
    assert operator_text(node) == text
    assert describe(node).startswith(f"{text} (node 'n' ")
