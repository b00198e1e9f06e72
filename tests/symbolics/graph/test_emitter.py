"""Nodes as an emitter makes them."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope


@pytest.mark.parametrize(
    ("domain", "inputs", "kept"),
    [("", (0, None), 1), ("", (0, None, 1, None), 3), ("", (None,), 0), ("mine", (0, None), 2)],
)
def test_a_node_of_onnx_ends_with_its_last_input(domain, inputs, kept):
    """Behind it some execution providers refuse an empty name; of another domain, nobody knows what a place means."""
    op, values = Emitter(Scope("t/", lambda value: False)), [ir.val(name, ir.DataType.FLOAT) for name in "ab"]
    node = op.node("Sum", [each if each is None else values[each] for each in inputs], domain=domain).producer()
    assert len(node.inputs) == kept
