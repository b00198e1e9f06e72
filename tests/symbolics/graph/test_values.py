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


@pytest.mark.parametrize(
    ("scopes", "place"),
    [(["", "c1", "conv2d"], " in module c1"), (["", "body", "body.c1", "conv2d"], " in module body.c1"), (["", "conv2d"], ""), ("7", "")],
)
def test_the_module_of_a_node_is_its_path(scopes, place):
    node = ir.Node("", "Conv", [], name="n", num_outputs=1, metadata_props={"pkg.torch.onnx.name_scopes": str(scopes)})
    node.outputs[0].name = "y"
    assert describe(node) == f"Conv (node 'n' that makes 'y'{place})"
