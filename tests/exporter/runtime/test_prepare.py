"""What is arranged for onnxruntime, in graphs of many nodes."""

from __future__ import annotations

import time

import onnx
import pytest
import torch

from exporter.runtime.prepare import prepare
from tests.exporter.runtime.build import forward, record
from tests.zoo import functions as F


@pytest.mark.parametrize("read", [True, False])
def test_what_a_node_costs_does_not_grow_with_the_graph(read):
    """A chain whose contexts are outputs, or nobody's: their types go where they were not known, or are dropped."""
    x = torch.zeros(2, requires_grad=True)
    call = record(F.SavesInput, x)

    def seconds(nodes):
        model = forward(call, context=True, repeat=nodes)
        graph = model.graph
        del graph.value_info[:]
        if not read:
            del graph.output[1:]
            graph.value_info.extend(onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.INT64, []) for node in graph.node)
        begin = time.process_time()
        assert prepare(model)
        spent = time.process_time() - begin
        assert [value.name for value in graph.value_info] == [node.output[1] for node in graph.node[:-1]]  # the last one is an output
        assert all(bool(node.output[0]) is read for node in graph.node)
        return spent

    small, large = (min(seconds(nodes) for _ in range(3)) for nodes in (200, 2000))
    assert large < 30 * small  # in line with the nodes it is 10 times, with their square 100
