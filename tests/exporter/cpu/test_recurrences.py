"""The steps of an LSTM or GRU, and of their gradients, as one node."""

from __future__ import annotations

import contextlib

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import exporter
from exporter.cpu import accelerator
from exporter.cpu.operators import DOMAIN
from exporter.cpu.recurrences import GRU, GRU_GRAD, LSTM, LSTM_GRAD, recurrence
from exporter.training.trainer import Trainer
from symbolics.graph.emitter import Emitter
from symbolics.graph.named import name_of_call
from symbolics.graph.scope import Scope
from symbolics.graph.walk import walk
from tests.exporter.cpu.support import claim_gradients, inference_session, session_options


class Sum(nn.Module):
    """A recurrence whose every output counts, or its last states alone."""

    def __init__(self, kind, inputs, hidden, both_ways, states=True, sequence=True, bias=True):
        super().__init__()
        self.recurrence = kind(inputs, hidden, bidirectional=both_ways, bias=bias)
        self.states, self.sequence = states, sequence

    def forward(self, x, h, *c):
        y, last = self.recurrence(x, (h, *c) if c else h)
        h, *c = last if c else (last,)
        total = y.sin().sum() if self.sequence else y.new_zeros(())
        return total + (h * 0.7).cos().sum() + sum((each * each).sum() for each in c) if self.states else total


KINDS = pytest.mark.parametrize(("kind", "names"), [(nn.LSTM, (LSTM, LSTM_GRAD)), (nn.GRU, (GRU, GRU_GRAD))], ids=["LSTM", "GRU"])


def states_of(kind, *shape):
    return [torch.randn(*shape) for _ in range(2 if kind is nn.LSTM else 1)]


def kinds(model):
    return [
        name_of_call(node) or node.op_type
        for node in walk(model.graph)
        if name_of_call(node) or node.op_type in (LSTM, LSTM_GRAD, GRU, GRU_GRAD, "Scan", "Loop")
    ]


def runs_both(model, changed, feeds):
    old, new = (inference_session(ir.to_proto(m)).run(None, feeds) for m in (model, changed))
    for a, b in zip(old, new, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("time", [1, 5])
@pytest.mark.parametrize(("batch", "hidden"), [(1, 1), (3, 31), (17, 33), (2, 96), (16, 64)])
@pytest.mark.parametrize("both_ways", [False, True], ids=["forwards", "both ways"])
@KINDS
def test_a_loaded_recurrence_is_eager(kind, names, time, batch, hidden, both_ways, tmp_path):
    torch.manual_seed(hidden)
    eager = Sum(kind, 4, hidden, both_ways, bias=hidden != 96)
    given = [torch.randn(time, batch, 4), *states_of(kind, 1 + both_ways, batch, hidden)]
    exporter.export(eager, tuple(given), training=True).save(tmp_path / "recurrence.onnx")
    assert kinds(ir.load(tmp_path / "recurrence.onnx")).count("Scan") == 0  # gradients are made when it is loaded
    module = exporter.load(tmp_path / "recurrence.onnx")
    results = []
    for run, kind in ((module, torch.float32), (eager.double(), torch.float64)):
        leaves = [value.to(kind).requires_grad_() for value in (v.detach() for v in given)]
        run(*leaves).backward()
        results.append([*(leaf.grad for leaf in leaves), *(p.grad for _, p in sorted(run.named_parameters()))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@KINDS
def test_both_doors_call_it(kind, names, monkeypatch, tmp_path):
    """A loaded module's forward and backward, and a training step."""
    counts = []

    def counted(model, claims):
        counts.append(claim(model, claims))
        return counts[-1]

    claim = accelerator.claim
    monkeypatch.setattr(accelerator, "claim", counted)
    given = (torch.randn(3, 2, 4), *states_of(kind, 1, 2, 8))
    exporter.export(Sum(kind, 4, 8, False), given, training=True).save(tmp_path / "recurrence.onnx")
    exporter.load(tmp_path / "recurrence.onnx")(*given).backward()
    assert [count for count in counts if count] == [1, 1]
    counts.clear()
    Trainer(exporter.export_training_step(Sum(kind, 4, 8, False), given, loss=None))
    assert sum(counts) == 2


def graph_of(kind, *args, time=6, batch=5, hidden=40, **options):
    """The whole gradient graph of a recurrence, and what it takes."""
    torch.manual_seed(0)
    module = Sum(kind, 3, hidden, *args, **options)
    given = (torch.randn(time, batch, 3), *states_of(kind, 1 + module.recurrence.bidirectional, batch, hidden))
    program = exporter.export(module, given)
    model = exporter.build_gradient_graph(ir.from_proto(program.model_proto))
    feeds = {v.name: g.numpy() for v, g in zip(model.graph.inputs, given, strict=False)}
    feeds |= {v.name: np.ones((), np.float32) for v in model.graph.inputs if v.name not in feeds}
    return model, feeds


NAMES = {nn.LSTM: ["LSTM", "LSTMGrad"], nn.GRU: ["GRU", "GRUGrad"]}


@pytest.mark.parametrize(("states", "sequence"), [(True, True), (True, False), (False, True)], ids=["all", "states", "sequence"])
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("bias", [True, False], ids=["", "no biases"])
@KINDS
def test_the_nodes_are_the_calls(kind, names, states, sequence, both_ways, bias):
    model, feeds = graph_of(kind, both_ways, states=states, sequence=sequence, bias=bias)
    changed, count = model.clone(), 1 + both_ways
    assert sorted(kinds(model)) == sorted(NAMES[kind] * count)
    assert claim_gradients(changed) == 2 * count
    assert sorted(kinds(changed)) == sorted(names * count)
    adds = bias and kind is nn.LSTM  # which a GRU's products do inside
    assert {len(node.inputs) for node in changed.graph if node.op_type == names[0]} == {4 + adds}
    assert len(model.graph) - len(changed.graph) == adds * count, "the Adds are gone"
    runs_both(model, changed, feeds)
    again = changed.clone()
    assert claim_gradients(again) == 0


def call(model, which=0):
    return [node for node in model.graph if name_of_call(node) in {"LSTM", "LSTMGrad", "GRU", "GRUGrad"}][which]


def _no_way(node):
    del node.attributes["reverse"]


def _another_way(node):
    node.attributes["reverse"] = ir.AttrInt64s("reverse", [2])


def _a_way_of_another_type(node):
    node.attributes["reverse"] = ir.AttrInt64("reverse", 1)


def _doubles(node):
    node.inputs[0].type = ir.TensorType(ir.DataType.DOUBLE)


def _absent(node):
    node.replace_input_with(0, None)


def _one_more(node):
    node.resize_inputs(len(node.inputs) + 2)
    for place in (-1, -2):
        node.replace_input_with(len(node.inputs) + place, node.inputs[1])


def _fewer(node):
    node.resize_inputs(1)


def _fewer_outputs(node):
    node.outputs[-1].replace_all_uses_with(node.outputs[-2])
    node.resize_outputs(len(node.outputs) - 1)


@pytest.mark.parametrize(
    "change",
    [_no_way, _another_way, _a_way_of_another_type, _doubles, _absent, _one_more, _fewer, _fewer_outputs],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("which", [0, 1], ids=["forward", "backward"])
@KINDS
def test_a_call_that_a_file_says_wrong_is_not_claimed(kind, names, which, change):
    model, _ = graph_of(kind, False)
    node = call(model, which)
    change(node)
    assert recurrence(Emitter(Scope("t/", lambda value: False)), node, {}) is None


@pytest.mark.parametrize("shape", [(6, 1, 40), (6, 5, 1), (5, 40)], ids=str)
@pytest.mark.parametrize("which", [0, 1], ids=["forward", "backward"])
@KINDS
def test_a_call_that_spreads_what_it_reads_stays_a_scan(kind, names, which, shape):
    """Its operators add a row to each row of a state, which the native library refuses."""
    model, _ = graph_of(kind, False)
    node = call(model, which)
    states = 2 if kind is nn.LSTM else 1
    value = node.inputs[states] if which == 0 else node.inputs[states + 3]
    if which == 0:
        shape = tuple(size * (4 if kind is nn.LSTM else 3) if size == 40 else size for size in shape)
    value.shape = ir.Shape(shape)
    claim_gradients(model)
    assert kinds(model).count(names[which]) == 0 and kinds(model).count("Scan") == 1


def _is_read(model, add, row):
    model.graph.outputs.append(add.outputs[0])


def _turned(model, add, row):
    place = [*add.inputs].index(row)
    add.replace_input_with(place, add.inputs[1 - place])
    add.replace_input_with(1 - place, row)


@pytest.mark.parametrize(
    ("change", "shape", "inputs"),
    [(None, [160], 5), (_turned, [160], 5), (_is_read, [160], 4), (None, [1], 4), (None, [1, 160], 4), (None, ["n"], 4)],
)
def test_what_an_lstm_adds_to_what_it_reads(change, shape, inputs):
    """A row for all rows of all steps is the node's; of anything else it is not known to be one."""
    model, feeds = graph_of(nn.LSTM, False)
    add = call(model).inputs[2].producer()
    (row,) = [value for value in add.inputs if value.shape is not None and len(value.shape) == 1]
    row.shape = ir.Shape(shape)
    if change is not None:
        change(model, add, row)
    changed = model.clone()
    assert claim_gradients(changed) == 2
    assert [len(node.inputs) for node in changed.graph if node.op_type == LSTM] == [inputs]
    runs_both(model, changed, feeds)


@pytest.mark.parametrize("shape", [[1], [1, 120]], ids=str)
def test_a_gru_whose_bias_may_be_less_than_a_row_stays(shape):
    model, _ = graph_of(nn.GRU, False)
    call(model).inputs[3].shape = ir.Shape(shape)
    assert claim_gradients(model) == 1 and kinds(model).count(GRU) == 0


@pytest.mark.parametrize(
    "option", [{"clip": 0.5}, {"linear_before_reset": 0}, {"activations": ["Sigmoid", "Relu"]}, {"lengths": True}], ids=str
)
def test_a_gru_that_is_not_plain_is_no_node(option):
    """And has the gradients of finite differences, where it is smooth."""
    rng, helper = np.random.default_rng(0), onnx.helper
    shapes = {"x": (4, 2, 3), "w": (1, 15, 3), "r": (1, 15, 5), "b": (1, 30)}
    said = {"linear_before_reset": 1, "hidden_size": 5, **{name: value for name, value in option.items() if name != "lengths"}}
    lengths = ["l"] if "lengths" in option else []
    nodes = [helper.make_node("GRU", [*shapes, *lengths], ["y"], **said), helper.make_node("Sin", ["y"], ["s"])]
    nodes.append(helper.make_node("ReduceSum", ["s"], ["loss"], keepdims=0))
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(n, 1, s) for n, s in shapes.items()], [helper.make_tensor_value_info("loss", 1, [])],
        [onnx.numpy_helper.from_array(np.array([4, 2], np.int32), "l")] if lengths else [],
    )  # fmt: skip
    model = exporter.build_gradient_graph(
        ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)), wrt=list(shapes)
    )
    assert claim_gradients(model.clone()) == 0
    if "clip" in option or "activations" in option:
        return
    given = {name: rng.standard_normal(shape, np.float32) * 0.5 for name, shape in shapes.items()}
    session = inference_session(ir.to_proto(model))
    seed = next(value.name for value in session.get_inputs() if value.name not in given)
    loss, *gradients = session.run(None, given | {seed: np.ones((), np.float32)})
    for (name, value), gradient in zip(given.items(), gradients, strict=True):
        way = rng.standard_normal(value.shape).astype(np.float32)
        far, near = (session.run(None, given | {name: value + step * way, seed: np.ones((), np.float32)})[0] for step in (1e-2, -1e-2))
        assert float((gradient * way).sum()) == pytest.approx(float(far - near) / 2e-2, rel=2e-2, abs=2e-3)


GOOD = {"h": (2, 40), "c": (2, 40), "x": (3, 2, 160), "w": (40, 160), "b": (160,)}
GOOD_GRU = {"h": (2, 40), "x": (3, 2, 120), "w": (40, 120), "b": (120,)}
GOOD_GRU_GRAD = {"h": (2, 40), "s": (3, 2, 120), "n": (3, 2, 40), "k": (3, 2, 40), "w": (120, 40), "y": (3, 2, 40)}
GOOD_GRAD = {"h": (2, 40), "c": (2, 40), "s": (3, 2, 160), "p": (3, 2, 40), "k": (3, 2, 40), "w": (160, 40), "y": (3, 2, 40)}
ALL_GOOD = {LSTM: GOOD, LSTM_GRAD: GOOD_GRAD, GRU: GOOD_GRU, GRU_GRAD: GOOD_GRU_GRAD}
OUTPUTS = {LSTM: 6, LSTM_GRAD: 3, GRU: 5, GRU_GRAD: 3}
NODES = pytest.mark.parametrize(("kind", "good"), ALL_GOOD.items(), ids=ALL_GOOD)


def node(kind, shapes, backwards=0, outputs=None, element=1):
    """A file that brings a node of its own."""
    helper = onnx.helper
    names = [f"o{i}" for i in range(outputs or OUTPUTS[kind])]
    attributes = {} if backwards is None else {"backwards": backwards}
    made = helper.make_node(kind, list(shapes), names, domain=DOMAIN, **attributes)
    inputs = [helper.make_tensor_value_info(name, element, None) for name in shapes]
    graph = helper.make_graph([made], "g", inputs, [helper.make_tensor_value_info(name, element, None) for name in names])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)], ir_version=9)
    return inference_session(model, sess_options=session_options(()))


def feeds(shapes, kind=np.float32):
    return {name: np.ones(shape, kind) for name, shape in shapes.items()}


@NODES
def test_shapes_that_do_not_fit_are_refused(kind, good):
    made = node(kind, good)
    assert made.run(None, feeds(good))[0].shape == (2, 40)
    for name, shape in good.items():
        for other in [(), shape[1:], (*shape, 1), *(tuple(d + (i == k) for i, d in enumerate(shape)) for k in range(len(shape)))]:
            if name == "x" and other == (4, *shape[1:]):
                continue  # another number of steps
            with pytest.raises(Exception, match=r"(LSTM|GRU)'s inputs do not fit"):
                made.run(None, feeds(good | {name: other}))
        for other in [tuple(0 if i == k else d for i, d in enumerate(shape)) for k in range(len(shape))]:
            with contextlib.suppress(Exception):
                made.run(None, feeds(good | {name: other}))


@NODES
@pytest.mark.parametrize(("time", "batch", "hidden"), [(0, 2, 40), (3, 0, 40), (3, 2, 0), (0, 0, 0), (1, 1, 1)])
def test_nothing_is_nothing(kind, good, time, batch, hidden):
    """No steps give the states that were given."""
    sizes = {2: batch, 3: time, 40: hidden, 120: 3 * hidden, 160: 4 * hidden}
    given = feeds({name: tuple(sizes[d] for d in shape) for name, shape in good.items()})
    found = node(kind, good).run(None, given)
    assert found[0].shape == given["h"].shape
    if time == 0:
        np.testing.assert_array_equal(found[0], given["h"])
        if "c" in given:
            np.testing.assert_array_equal(found[1], given["c"])


@pytest.mark.parametrize(
    "make",
    [
        lambda kind, good, other: node(kind, good, backwards=2),
        lambda kind, good, other: node(kind, good, backwards=None),
        lambda kind, good, other: node(kind, good, backwards="x"),
        lambda kind, good, other: node(kind, other),
        lambda kind, good, other: node(kind, good, outputs=OUTPUTS[kind] + 1),
        lambda kind, good, other: node(kind, good, outputs=OUTPUTS[kind] - 1),
        lambda kind, good, other: node(kind, good, element=11).run(None, feeds(good, np.float64)),
    ],
    ids=["way", "no way", "text", "inputs", "more outputs", "fewer outputs", "doubles"],
)
@NODES
def test_nodes_that_stand_for_nothing_are_refused(make, kind, good):
    others = {LSTM: GOOD_GRAD, LSTM_GRAD: GOOD, GRU: GOOD_GRU_GRAD, GRU_GRAD: GOOD_GRU}
    with pytest.raises(Exception, match="LSTM|GRU|Lstm|Gru|backwards|Attribute name and type"):
        make(kind, good, others[kind])


def test_numbers_that_are_none_stay_in_their_rows():
    given = feeds(GOOD)
    given["x"][0, 0, 3], given["h"][1, 2] = np.nan, np.inf
    h, c, y, *_ = node(LSTM, GOOD).run(None, given)
    assert np.isnan(c[0]).any() and np.isnan(h[0]).any()
    extreme = {name: value * 0 for name, value in feeds(GOOD).items()} | {"x": np.full((3, 2, 160), -np.inf, np.float32)}
    extreme["x"][1:] = np.inf
    h, c, *_ = node(LSTM, GOOD).run(None, extreme)
    np.testing.assert_allclose(c, 2.0)  # gates of 0, then of 1: twice tanh(inf)
    np.testing.assert_allclose(h, np.tanh(2.0), rtol=1e-6)


def test_a_gru_s_numbers_that_are_none_stay_in_their_rows():
    given = feeds(GOOD_GRU)
    given["x"][0, 0, 3], given["h"][1, 2] = np.nan, np.inf
    h, y, *_ = node(GRU, GOOD_GRU).run(None, given)
    assert np.isnan(y[0, 0]).tolist() == [unit == 3 for unit in range(40)] and np.isnan(h[0]).all() and np.isinf(h[1]).sum() == 1
    extreme = {name: value * 0 for name, value in feeds(GOOD_GRU).items()} | {"x": np.full((3, 2, 120), -np.inf, np.float32)}
    h, *_ = node(GRU, GOOD_GRU).run(None, extreme)
    np.testing.assert_array_equal(h, -1.0)  # z of 0: all new, which is tanh(-inf)


def test_shut_gates_let_nothing_through():
    given = {name: value * 0 for name, value in feeds(GOOD).items()}
    given["c"] += np.float32(1e30)
    given["x"][:] = -200
    h, c, *_ = node(LSTM, GOOD).run(None, given)
    assert not c.any() and not h.any()
