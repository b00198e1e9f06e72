"""Names of residuals: each is one output's, and no build gives another."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from symbolics.gradients.residuals import residual
from symbolics.graph.builder import Builder
from symbolics.graph.scope import Scope


@pytest.mark.parametrize("result", ["y", ""], ids=["named", "unnamed"])
def test_each_has_a_name_of_its_own_whatever_was_named_before(result):
    """A linked function keeps several under one word; a node may have no other output that has a name."""
    found = []
    for others in (0, 5):
        op = Builder(Scope("grad/", lambda value: True))
        for _ in range(others):
            op.scope.name("kept")
        nodes = [ir.Node("own", "F", [], outputs=[ir.Value(name=result and f"{result}{i}")]) for i in range(2)]
        found.append([residual(op, node, index, "kept", ir.DataType.FLOAT, None).name for node in nodes for index in (1, 2)])
    assert found[0] == found[1]
    assert len(set(found[0])) == 4
