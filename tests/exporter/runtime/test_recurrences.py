"""The steps of an LSTM, and of its gradient, as one node."""

from __future__ import annotations

import contextlib

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import exporter
from exporter.module import plans
from exporter.runtime import session
from exporter.runtime.fusion.recurrences import LSTM, LSTM_GRAD, run_lstms
from exporter.runtime.session import inference_session, session_options
from exporter.training.trainer import Trainer
from symbolics.graph.walk import walk
from symbolics.node.names import OWN_DOMAIN


class Sum(nn.Module):
    """An LSTM whose every output counts, or its last states alone."""

    def __init__(self, inputs, hidden, both_ways, states=True, sequence=True):
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, bidirectional=both_ways)
        self.states, self.sequence = states, sequence

    def forward(self, x, h, c):
        y, (h, c) = self.lstm(x, (h, c))
        total = y.sin().sum() if self.sequence else y.new_zeros(())
        return total + (h * 0.7).cos().sum() + (c * c).sum() if self.states else total


def kinds(model):
    return [node.op_type for node in walk(model.graph) if node.op_type in (LSTM, LSTM_GRAD, "Scan")]


def runs_both(model, changed, feeds):
    old, new = (inference_session(ir.to_proto(m)).run(None, feeds) for m in (model, changed))
    for a, b in zip(old, new, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("time", [1, 5])
@pytest.mark.parametrize(("batch", "hidden"), [(1, 1), (3, 31), (17, 33), (2, 96), (16, 64)])
@pytest.mark.parametrize("both_ways", [False, True], ids=["forwards", "both ways"])
def test_a_loaded_lstm_is_eager(time, batch, hidden, both_ways, tmp_path):
    torch.manual_seed(hidden)
    eager = Sum(4, hidden, both_ways)
    count = 1 + both_ways
    given = [torch.randn(time, batch, 4), torch.randn(count, batch, hidden), torch.randn(count, batch, hidden)]
    exporter.export(eager, tuple(given), training=True).save(tmp_path / "lstm.onnx")
    assert kinds(ir.load(tmp_path / "lstm.onnx")).count("Scan") == 0  # gradients are made when it is loaded
    module = exporter.load(tmp_path / "lstm.onnx")
    results = []
    for run, kind in ((module, torch.float32), (eager.double(), torch.float64)):
        leaves = [value.to(kind).requires_grad_() for value in (v.detach() for v in given)]
        run(*leaves).backward()
        results.append([*(leaf.grad for leaf in leaves), *(p.grad for _, p in sorted(run.named_parameters()))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_both_doors_call_it(monkeypatch, tmp_path):
    """A loaded module's forward and backward, and a training step."""
    counts = []

    def counted(model):
        counts.append(run_lstms(model))
        return counts[-1]

    monkeypatch.setattr(plans, "run_lstms", counted)
    monkeypatch.setattr(session, "run_lstms", counted)
    given = (torch.randn(3, 2, 4), torch.randn(1, 2, 8), torch.randn(1, 2, 8))
    exporter.export(Sum(4, 8, False), given, training=True).save(tmp_path / "lstm.onnx")
    exporter.load(tmp_path / "lstm.onnx")(*given).backward()
    assert [count for count in counts if count] == [1, 1]
    counts.clear()
    Trainer(exporter.export_training_step(Sum(4, 8, False), given, loss=None))
    assert sum(counts) == 2


def scans(*args, time=6, batch=5, hidden=40, **options):
    """The whole gradient graph of an LSTM, its Scans in it, and what it takes."""
    torch.manual_seed(0)
    module = Sum(3, hidden, *args, **options)
    count = 1 + module.lstm.bidirectional
    given = (torch.randn(time, batch, 3), torch.randn(count, batch, hidden), torch.randn(count, batch, hidden))
    program = exporter.export(module, given)
    model = exporter.build_gradient_graph(ir.from_proto(program.model_proto))
    feeds = {v.name: g.numpy() for v, g in zip(model.graph.inputs, given, strict=False)}
    feeds |= {v.name: np.ones((), np.float32) for v in model.graph.inputs if v.name not in feeds}
    return model, feeds


@pytest.mark.parametrize(("states", "sequence"), [(True, True), (True, False), (False, True)], ids=["all", "states", "sequence"])
@pytest.mark.parametrize("both_ways", [False, True])
def test_the_nodes_are_the_scans(states, sequence, both_ways):
    model, feeds = scans(both_ways, states=states, sequence=sequence)
    changed, count = model.clone(), 1 + both_ways
    assert kinds(model) == ["Scan"] * 2 * count
    assert run_lstms(changed) == 2 * count
    assert sorted(kinds(changed)) == [LSTM] * count + [LSTM_GRAD] * count
    runs_both(model, changed, feeds)
    again = changed.clone()
    assert run_lstms(again) == 0


def scan(model, which=0):
    return [node for node in model.graph if node.op_type == "Scan"][which]


def _body(model, op_type, which=0):
    return next(node for node in scan(model, which).attributes["body"].as_graph() if node.op_type == op_type)


def _set(node, name, value):
    node.attributes[name] = ir.AttrInt64s(name, value) if isinstance(value, list) else ir.AttrInt64(name, value)


def _other_operator(model):
    _body(model, "Tanh").op_type = "Softsign"


def _other_order(model):
    concat = _body(model, "Concat")
    first, second = concat.inputs[0], concat.inputs[1]
    concat.replace_input_with(0, second)
    concat.replace_input_with(1, first)


def _other_constant(model):
    sub = _body(model, "Sub")
    half = ir.Value(name="half", const_value=ir.tensor(np.float32(0.5), name="half"), type=ir.TensorType(ir.DataType.FLOAT))
    model.graph.initializers["half"] = half
    sub.replace_input_with(0, half)


def _scaled(model):
    _body(model, "Gemm").attributes["beta"] = ir.AttrFloat32("beta", 0.5)


def _other_ways(model):
    _set(scan(model), "scan_output_directions", [1, 0, 0, 0])


def _other_axis(model):
    _set(scan(model), "scan_output_axes", [0, 1, 0, 0])


def _unnamed(model):
    scan(model).outputs[0].name = ""


def _circle(model):
    tanh, sigmoid = _body(model, "Tanh"), _body(model, "Sigmoid")
    tanh.replace_input_with(0, sigmoid.outputs[0])
    sigmoid.replace_input_with(0, tanh.outputs[0])


def _doubles(model):
    scan(model).inputs[0].type = ir.TensorType(ir.DataType.DOUBLE)


def _of_no_type(model):
    scan(model).attributes["body"].as_graph().inputs[2].type = None


@pytest.mark.parametrize(
    "change",
    [_other_operator, _other_order, _other_constant, _scaled, _other_ways, _other_axis, _unnamed, _circle, _doubles, _of_no_type],
    ids=lambda f: f.__name__,
)
def test_another_scan_stays(change):
    model, _ = scans(False)
    change(model)
    assert run_lstms(model) == 1  # the gradient's
    assert kinds(model).count("Scan") == 1 and kinds(model).count(LSTM) == 0


GOOD = {"h": (2, 40), "c": (2, 40), "x": (3, 2, 160), "w": (40, 160)}
GOOD_GRAD = {"h": (2, 40), "c": (2, 40), "s": (3, 2, 160), "p": (3, 2, 40), "k": (3, 2, 40), "w": (160, 40), "y": (3, 2, 40)}


def node(kind, shapes, backwards=0, outputs=None, element=1):
    """A file that brings a node of its own."""
    helper = onnx.helper
    names = [f"o{i}" for i in range(outputs or (6 if kind == LSTM else 3))]
    attributes = {} if backwards is None else {"backwards": backwards}
    made = helper.make_node(kind, list(shapes), names, domain=OWN_DOMAIN, **attributes)
    inputs = [helper.make_tensor_value_info(name, element, None) for name in shapes]
    graph = helper.make_graph([made], "g", inputs, [helper.make_tensor_value_info(name, element, None) for name in names])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(OWN_DOMAIN, 1)], ir_version=9)
    return inference_session(model, sess_options=session_options(()))


def feeds(shapes, kind=np.float32):
    return {name: np.ones(shape, kind) for name, shape in shapes.items()}


@pytest.mark.parametrize(("kind", "good"), [(LSTM, GOOD), (LSTM_GRAD, GOOD_GRAD)], ids=[LSTM, LSTM_GRAD])
def test_shapes_that_do_not_fit_are_refused(kind, good):
    made = node(kind, good)
    assert made.run(None, feeds(good))[0].shape == (2, 40)
    for name, shape in good.items():
        for other in [(), shape[1:], (*shape, 1), *(tuple(d + (i == k) for i, d in enumerate(shape)) for k in range(len(shape)))]:
            if kind == LSTM and name == "x" and other == (4, 2, 160):
                continue  # another number of steps
            with pytest.raises(Exception, match=r"LSTM's inputs do not fit"):
                made.run(None, feeds(good | {name: other}))
        for other in [tuple(0 if i == k else d for i, d in enumerate(shape)) for k in range(len(shape))]:
            with contextlib.suppress(Exception):
                made.run(None, feeds(good | {name: other}))


@pytest.mark.parametrize(("kind", "good"), [(LSTM, GOOD), (LSTM_GRAD, GOOD_GRAD)], ids=[LSTM, LSTM_GRAD])
@pytest.mark.parametrize(("time", "batch", "hidden"), [(0, 2, 40), (3, 0, 40), (3, 2, 0), (0, 0, 0), (1, 1, 1)])
def test_nothing_is_nothing(kind, good, time, batch, hidden):
    """No steps give the states that were given."""
    sizes = {2: batch, 3: time, 40: hidden, 160: 4 * hidden}
    given = feeds({name: tuple(sizes[d] for d in shape) for name, shape in good.items()})
    found = node(kind, good).run(None, given)
    assert [value.shape[-1] for value in found[:2]] == [hidden, hidden]
    if time == 0:
        np.testing.assert_array_equal(found[0], given["h"])
        np.testing.assert_array_equal(found[1], given["c"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: node(LSTM, GOOD, backwards=2),
        lambda: node(LSTM, GOOD, backwards=None),
        lambda: node(LSTM, GOOD, backwards="x"),
        lambda: node(LSTM, GOOD_GRAD),
        lambda: node(LSTM_GRAD, GOOD),
        lambda: node(LSTM, GOOD, outputs=5),
        lambda: node(LSTM_GRAD, GOOD_GRAD, outputs=4),
        lambda: node(LSTM, GOOD, element=11).run(None, feeds(GOOD, np.float64)),
    ],
    ids=["way", "no way", "text", "inputs", "gradient's inputs", "outputs", "gradient's outputs", "doubles"],
)
def test_nodes_that_stand_for_nothing_are_refused(make):
    with pytest.raises(Exception, match="LSTM|Lstm|backwards|Attribute name and type"):
        make()


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


BODY = """step (float[b, 4] h, float[b, 4] c, float[b, d] x) => (float[b, 4] h1, float[b, 4] c1, float[b, 4] y, float[b, 16] s, float[b, 4] p, float[b, 4] f) {
    gates = Gemm (h, weights, x)
    gi, go, gf, gg = Split <axis = 1, num_outputs = 4> (gates)
    i = Sigmoid (gi) o = Sigmoid (go) f = Sigmoid (gf) g = Tanh (gg)
    old = Mul (f, c) added = Mul (i, g) c1 = Add (old, added) t = Tanh (c1) h1 = Mul (o, t)
    a1 = Sub (one, i) a2 = Mul (added, a1) b1 = Sub (one, o) b2 = Mul (h1, b1) d1 = Sub (one, f) d2 = Mul (old, d1)
    e1 = Mul (added, g) e2 = Sub (i, e1) s = Concat <axis = 1> (a2, b2, d2, e2)
    y = Identity (h1) p1 = Mul (h1, t) p = Sub (o, p1)
}"""


def foreign(x=(3, 2, 16), within=False):
    """A file's own Scan of the steps that our gradients write, and what it takes; its weights in the body, under a name that the outer graph has."""
    rng = np.random.default_rng(0)
    helper, array = onnx.helper, onnx.numpy_helper.from_array
    body = onnx.parser.parse_graph(BODY.replace("float[b, d] x", "float[d] x" if len(x) == 2 else "float[e, d] x"))
    weights, others = rng.standard_normal((4, 16), np.float32), np.zeros((4, 16), np.float32)
    body.initializer.append(array(np.float32(1), "one"))
    if within:
        body.initializer.append(array(weights, "weights"))
    scan = helper.make_node("Scan", ["h0", "c0", "x"], ["h", "c", "y", "s", "p", "f"], body=body, num_scan_inputs=1)
    shapes = {"h0": (2, 4), "c0": (2, 4), "x": x}
    inputs = [helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info(name, 1, None) for name in ("y", "h", "z")]
    graph = helper.make_graph(
        [scan, helper.make_node("Neg", ["weights"], ["z"])], "g", inputs, outputs, [array(others if within else weights, "weights")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return ir.from_proto(model), {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def test_a_scan_of_a_file_is_one_too():
    model, given = foreign()
    changed = model.clone()
    assert run_lstms(changed) == 1
    runs_both(model, changed, given)


def test_weights_of_the_body_stay_there():
    """Outside, their name is another value's."""
    model, given = foreign(within=True)
    changed = model.clone()
    assert run_lstms(changed) == 0
    runs_both(model, changed, given)


@pytest.mark.parametrize("x", [(3, 1, 16), (3, 16), (3, 2, 1)])
def test_a_scan_that_adds_one_row_to_all_stays(x):
    model, given = foreign(x)
    changed = model.clone()
    assert run_lstms(changed) == 0
    runs_both(model, changed, given)


def test_shut_gates_let_nothing_through():
    given = {name: value * 0 for name, value in feeds(GOOD).items()}
    given["c"] += np.float32(1e30)
    given["x"][:] = -200
    h, c, *_ = node(LSTM, GOOD).run(None, given)
    assert not c.any() and not h.any()
