"""The order of a training step's nodes: onnxruntime runs them as it is assumed, and what is listed anew gives the same bits with less alive."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from exporter.cpu import in_place
from exporter.cpu.elementwise import fuse
from exporter.cpu.in_place import take_out_updates
from exporter.runtime import step_order
from exporter.runtime.step_order import list_for_memory
from exporter.training.step import export_training_step
from tests.exporter.training.loop import batches_of, run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def step_of(*layers, size=64):
    torch.manual_seed(0)
    batch = batches_of(1, torch.float32, size)[0]
    return export_training_step(nn.Sequential(*layers), batch[:1], loss=F.cross_entropy, targets=batch[1:])


def deep(activation=nn.Tanh, layers=8, width=64):
    return [nn.Linear(4, width), *(layer for _ in range(layers) for layer in (activation(), nn.Linear(width, width))), nn.Linear(width, 3)]


def read(step):
    """The step without its updates, not yet listed anew, and what is known of its values."""
    model, facts = ir.from_proto(ir.to_proto(step.model)), {}
    fuse(model, facts=facts)
    assert take_out_updates(model, step.layout.carried, facts) is not None
    return model, facts


def names(nodes, order):
    return [nodes[place].name for place in order]


@pytest.mark.parametrize("listed", ["as it is", "by depth"])
def test_onnxruntime_runs_nodes_in_the_order_that_is_assumed(listed, tmp_path):
    step = step_of(*deep(nn.GELU, 3), nn.BatchNorm1d(3))
    model = ir.from_proto(ir.to_proto(step.model))
    nodes = list(model.graph)
    for number, node in enumerate(nodes):
        node.name = f"node {number}"
    needs = step_order._needs(nodes)
    order = step_order._by_depth(needs) if listed == "by depth" else list(range(len(nodes)))
    model.graph.remove(nodes)
    model.graph.extend([nodes[place] for place in order])
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    own = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    batch = batches_of(1, torch.float32, 64)[0]
    feeds = dict(zip((*step.layout.inputs, *step.layout.targets), (t.numpy() for t in batch), strict=True))
    own.run(None, {**step.initial, **feeds})
    with open(own.end_profiling()) as file:
        events = [event for event in json.load(file) if event["name"].endswith("_kernel_time")]
    found = [event["name"].removesuffix("_kernel_time") for event in sorted(events, key=lambda event: event["ts"])]
    kept = set(found)  # constants are folded into none, whatever the level
    assert len(kept) > 0.9 * len(nodes)
    assert found == [name for name in names(nodes, step_order._run(needs, order)) if name in kept]


def test_gradients_of_weights_stand_beside_those_of_their_layer(monkeypatch):
    monkeypatch.setattr(in_place, "FEW_BYTES", 1)
    model, facts = read(step_of(*deep(), size=2048))
    nodes = list(model.graph)
    before = step_order._peak(nodes, step_order._run(step_order._needs(nodes), range(len(nodes))), facts)
    assert list_for_memory(model.graph, facts)
    after = list(model.graph)
    assert sorted(map(id, after)) == sorted(map(id, nodes))
    needs = step_order._needs(after)
    assert all(maker < place for place, makers in enumerate(needs) for maker in makers)  # as ONNX wants it
    order = step_order._run(needs, range(len(after)))
    assert step_order._peak(after, order, facts) < 0.8 * before
    assert not list_for_memory(model.graph, facts)  # it is so already
    ends = [after[place].outputs[0].name for place in order if after[place].outputs[0].is_graph_output()]
    layers = [int(name.split(".")[0]) for name in ends if name.endswith("weight_grad")]
    assert len(layers) == 10 and layers == sorted(layers, reverse=True)


def test_the_same_bits(monkeypatch):
    step = step_of(*deep(nn.GELU), nn.Dropout(0.5))
    batches = batches_of(4, torch.float32, 64)
    found = []
    monkeypatch.setattr(step_order, "list_for_memory", lambda *given: found.append(list_for_memory(*given)) or found[-1])
    losses, state = run(step, batches)
    assert found == [True]
    monkeypatch.setattr(step_order, "list_for_memory", lambda *_: False)
    again, others = run(step, batches)
    assert again == losses and list(others) == list(state)
    for name, array in state.items():
        np.testing.assert_array_equal(others[name], array)


def value(name, shape=(64, 64)):
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))


def node(op, inputs, output, **attributes):
    made = [ir.AttrInt64s(name, given) for name, given in attributes.items()]
    return ir.Node("", op, inputs, made, outputs=[value(output)], name=output)


def graph_of(nodes, inputs, outputs):
    return ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 18}, name="g")


def facts_of(nodes):
    return {output: (tuple(output.shape.numpy()), output.dtype) for n in nodes for output in n.outputs}


def peak_of(nodes):
    return step_order._peak(nodes, step_order._run(step_order._needs(nodes), range(len(nodes))), facts_of(nodes))


@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_smaller_when_it_is_made_early_stays(parts):
    """The derivative of an activation, made of one value that the gradient of a weight keeps anyway, or of three that only it reads."""
    x = last = value("x")
    nodes, factors, kept = [], [], []
    for layer in range(6):
        made = [node(op, [last], f"{op}{layer}") for op in ("Sin", "Cos", "Tan")[:parts]]
        factor = node("Max", [part.outputs[0] for part in made], f"factor{layer}")
        out = node("Sum", [part.outputs[0] for part in made], f"out{layer}")
        nodes += [*made, factor, out]
        factors.append(factor.outputs[0])
        kept.append(made[0].outputs[0])
        last = out.outputs[0]
    ends = []
    for layer in reversed(range(6)):
        chain = node("Mul", [last, factors[layer]], f"grad{layer}")
        last = chain.outputs[0]
        end = node("Div", [last, kept[layer]] if parts == 1 else [last], f"of{layer}")
        ends.append(node("ReduceSum", end.outputs, f"weight{layer}"))
        ends[-1].outputs[0].shape = ir.Shape((1, 1))
        nodes += [chain, end, ends[-1]]
    graph = graph_of(nodes, [x], [end.outputs[0] for end in ends])
    before = peak_of(nodes)
    assert list_for_memory(graph, facts_of(nodes)) == (parts == 1)
    assert (peak_of(list(graph)) < before) == (parts == 1)


@pytest.mark.parametrize(
    ("op", "axes", "peak"), [("Transpose", [1, 0], 2), ("Identity", None, 2), ("Transpose", [0, 1], 3), ("Neg", None, 3)]
)
def test_views_and_what_products_read_turned_take_no_memory(op, axes, peak):
    exp = node("Exp", [value("x")], "exp")
    made = node(op, exp.outputs, "made", **({} if axes is None else {"perm": axes}))
    product = node("MatMul", [exp.outputs[0], made.outputs[0]], "product")
    graph_of([exp, made, product], exp.inputs, product.outputs)
    assert peak_of([exp, made, product]) == peak * 64 * 64 * 4


def test_what_is_not_known_and_what_stands_in_no_order():
    first, second = node("Exp", [value("x")], "first"), node("Neg", [value("y")], "second")
    second.replace_input_with(0, first.outputs[0])
    graph = graph_of([second, first], first.inputs, second.outputs)
    assert not list_for_memory(graph, {}) and list(graph) == [second, first]
    assert not list_for_memory(graph_of([], [value("x")], []), {})


def test_bodies_read_what_is_outside():
    x, inner = value("x"), value("inner")
    first = node("Exp", [x], "first")
    body = ir.Graph([], [inner], nodes=[ir.Node("", "Neg", first.outputs, outputs=[inner])], name="body")
    chosen = ir.Node("", "If", [value("condition", ())], [ir.AttrGraph("then_branch", body)], outputs=[value("chosen")])
    assert step_order._needs([first, chosen]) == [set(), {0}]


def test_a_long_chain_takes_no_time_that_grows_with_its_square():
    import time

    def seconds(count):
        last, nodes = value("x"), []
        for number in range(count):
            nodes.append(node("Exp", [last], f"v{number}"))
            last = nodes[-1].outputs[0]
        ends = [node("Neg", [made.outputs[0]], f"{made.name}/end") for made in nodes]
        nodes += ends
        graph = graph_of(nodes, [nodes[0].inputs[0]], [end.outputs[0] for end in ends])
        begin = time.process_time()
        list_for_memory(graph, facts_of(nodes))
        return time.process_time() - begin

    assert seconds(4000) < 12 * seconds(1000) + 0.5
