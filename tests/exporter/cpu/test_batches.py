"""Products of many matrices by the native library, which leaves zeros at both ends of rows out."""

from __future__ import annotations

import time
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import exporter
from exporter.cpu import accelerator, batches
from exporter.cpu.batches import BATCH_MATMUL, multiply_batches
from exporter.cpu.operators import DOMAIN
from tests.exporter.cpu.support import inference_session, session_options
from tests.exporter.cpu.test_blocked import trains_as_eager

HELPER = onnx.helper


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch):
    """The operator is right everywhere; where it is not quicker, nobody would call it."""
    monkeypatch.setattr(batches, "has_wide_vectors", lambda: True)


def node(inputs=("a", "b"), outputs=("y",), element=1, made_as=None, threads=1, **attributes):
    said = {k: v for k, v in ({"transposed": [0]} | attributes).items() if v is not None}
    made = HELPER.make_node(BATCH_MATMUL, list(inputs), list(outputs), domain=DOMAIN, **said)
    given = [HELPER.make_tensor_value_info(name, element, None) for name in inputs]
    graph = HELPER.make_graph([made], "g", given, [HELPER.make_tensor_value_info(name, made_as or element, None) for name in outputs])
    model = HELPER.make_model(graph, opset_imports=[HELPER.make_opsetid("", 18), HELPER.make_opsetid(DOMAIN, 1)], ir_version=9)
    options = session_options(())
    options.intra_op_num_threads = threads
    return inference_session(model, sess_options=options)


def multiplied(a, b, transposed, threads=1):
    (found,) = node(transposed=[int(transposed)], threads=threads).run(None, {"a": a, "b": b})
    return found


def expected_of(a, b, transposed):
    left = a.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.matmul(np.swapaxes(left, -1, -2) if transposed else left, b.astype(np.float64))


# ------------------------------------------------------------------------------------------------------ the operator
#: leading dims of both, rows, depth, columns
SHAPES = {
    "one": ((), (), 1, 1, 1),
    "rows of tasks": ((2,), (2,), 130, 70, 40),
    "whole blocks": ((2, 2), (2, 2), 128, 192, 64),
    "odd": ((3,), (3,), 67, 99, 33),
    "few columns": ((2,), (2,), 40, 300, 3),
    "many columns": ((2,), (2,), 9, 20, 200),
    "deep": ((2,), (2,), 20, 1100, 32),
    "one right matrix": ((2, 3), (), 30, 40, 32),
    "one left matrix": ((), (4,), 30, 40, 32),
    "both broadcast": ((3, 1), (2,), 20, 48, 16),
    "ones in between": ((2, 1, 3), (1, 4, 1), 20, 17, 16),
}
#: What stands of a matrix of scores.
ZEROS = {
    "none": lambda m: m,
    "causal": np.tril,
    "the other half": np.triu,
    "a window": lambda m: np.tril(np.triu(m, -5), 3),
    "none but a corner": lambda m: np.triu(m, min(m.shape[-1] - 1, 3 * m.shape[-2] // 4)),
    "empty rows": lambda m: m * (np.arange(m.shape[-2])[:, None] % 24 > 15),
    "all": lambda m: m * 0,
    "all, negative": lambda m: np.abs(m) * -0.0,
}


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("zeros", ZEROS.values(), ids=ZEROS)
@pytest.mark.parametrize(("a_lead", "b_lead", "rows", "depth", "columns"), SHAPES.values(), ids=SHAPES)
def test_a_product_is_numpys(a_lead, b_lead, rows, depth, columns, zeros, transposed):
    rng = np.random.default_rng(rows + depth)
    a = zeros(rng.standard_normal((*a_lead, rows, depth), np.float32)).astype(np.float32)
    a = np.ascontiguousarray(np.swapaxes(a, -1, -2)) if transposed else a
    b = rng.standard_normal((*b_lead, depth, columns), np.float32)
    expected = expected_of(a, b, transposed)
    for threads in (1, 2):
        found = multiplied(a, b, transposed, threads)
        assert found.dtype == np.float32 and found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.sqrt(depth))


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan], ids=str)
@pytest.mark.parametrize("place", [(0, 0, 0), (1, 79, 39), (0, 40, 17), (1, 3, 33)], ids=str)
def test_zeros_are_multiplied_with_what_is_not_finite(number, place, transposed):
    """0 times infinity is NaN: a product that left it out would hide what eager shows."""
    rng = np.random.default_rng(0)
    a = np.tril(rng.standard_normal((2, 80, 80), np.float32))
    b = rng.standard_normal((2, 80, 40), np.float32)
    b[place] = number
    found, expected = multiplied(a, b, transposed), expected_of(a, b, transposed)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_what_is_not_finite_in_the_left_matrix_is_no_zero(transposed):
    a, b = np.zeros((1, 96, 96), np.float32), np.ones((1, 96, 32), np.float32)
    a[0, 5, 90], a[0, 70, 2], a[0, 33, 33] = np.nan, np.inf, np.float32(1e-45)
    np.testing.assert_array_equal(np.isnan(multiplied(a, b, transposed)), np.isnan(expected_of(a, b, transposed)))
    assert multiplied(a, b, transposed)[0, 33, 0] == np.float32(1e-45)


def test_zeros_are_left_out():
    """What this is for, by the processor's time: what stays is to read the zeros."""
    a, b = np.zeros((2, 1024, 1024), np.float32), np.ones((2, 1024, 512), np.float32)

    def fastest(session):
        times = []
        for _ in range(5):
            begin = time.process_time()
            session.run(None, {"a": a, "b": b})
            times.append(time.process_time() - begin)
        return min(times)

    for transposed in ([0], [1]):
        session = node(transposed=transposed)
        a[:] = 1
        dense = fastest(session)
        a[:] = 0
        assert fastest(session) < dense / 2


# ------------------------------------------------------------------------------------------------- nodes of a file
@pytest.mark.parametrize(
    "change",
    [
        {"transposed": None}, {"transposed": [2]}, {"transposed": [-1]}, {"transposed": [0, 0]}, {"transposed": 0.5}, {"transposed": "0"},
        {"inputs": ("a",)}, {"inputs": ("a", "b", "c")}, {"outputs": ("y", "z")},
    ],
    ids=str,
)  # fmt: skip
def test_nodes_that_stand_for_nothing_are_refused(change):
    with pytest.raises(Exception, match="BatchMatMul stands for no operators|Attribute"):
        node(**change)


@pytest.mark.parametrize(
    ("a", "b"),
    [((2, 3, 4), (2, 5, 6)), ((2, 3, 4), (3, 4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((), ()), ((2, 2, 3, 4), (3, 4, 5))],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(a, b):
    with pytest.raises(exporter.RunError, match="BatchMatMul: not float32 matrices that fit"):
        node().run(None, {"a": np.ones(a, np.float32), "b": np.ones(b, np.float32)})


def test_other_types_are_refused():
    with pytest.raises(exporter.RunError, match="not float32"):
        node(element=11).run(None, {"a": np.ones((2, 2)), "b": np.ones((2, 2))})
    for made_as in (7, 11):
        with pytest.raises(exporter.RunError, match="has another type than the file says"):
            node(made_as=made_as).run(None, {"a": np.ones((2, 2), np.float32), "b": np.ones((2, 2), np.float32)})


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((0, 3, 4), (0, 4, 5)),
        ((0, 3, 4), (1, 4, 5)),
        ((2, 0, 4), (2, 4, 5)),
        ((2, 3, 0), (2, 0, 5)),
        ((2, 3, 4), (2, 4, 0)),
        ((1, 3, 4), (0, 4, 5)),
    ],
    ids=str,
)
def test_empty_matrices(a, b):
    expected = np.matmul(np.ones(a, np.float32), np.ones(b, np.float32))
    for transposed in (False, True):
        left = (*a[:-2], a[-1], a[-2]) if transposed else a
        np.testing.assert_array_equal(multiplied(np.ones(left, np.float32), np.ones(b, np.float32), transposed), expected)


@pytest.mark.parametrize(
    ("a", "b"),
    [([2**40, 3, 0], [1, 0, 5]), ([0, 2**31, 2**31], [2**31, 2**31]), ([1, 2**40, 0], [0, 2**40]), ([2**58, 4, 0], [0, 1])],
    ids=str,
)
def test_a_product_of_empty_tensors_that_has_exabytes_is_refused(a, b):
    begin = time.monotonic()
    nodes = [HELPER.make_node("ConstantOfShape", [f"{name}s"], [name]) for name in "ab"]
    nodes.append(HELPER.make_node(BATCH_MATMUL, ["a", "b"], ["y"], domain=DOMAIN, transposed=[0]))
    given = [onnx.numpy_helper.from_array(np.array(dims, np.int64), f"{name}s") for name, dims in (("a", a), ("b", b))]
    graph = HELPER.make_graph(nodes, "g", [], [HELPER.make_tensor_value_info("y", 1, None)], given)
    model = HELPER.make_model(graph, opset_imports=[HELPER.make_opsetid("", 18), HELPER.make_opsetid(DOMAIN, 1)], ir_version=9)
    with pytest.raises(Exception, match="."):
        inference_session(model, sess_options=session_options(())).run(None, {})
    assert time.monotonic() - begin < 20


# ---------------------------------------------------------------------------------------------------------- the pass
def product(a=(2, 384, 384), b=(2, 384, 64), y=None, turned=None, kind=ir.DataType.FLOAT, constant=None, extra=0):
    """y = a @ b, of a turned by ``turned`` first; the Transpose gives its result out, too, if ``extra``, and to another node for 2."""
    left, right = ir.val("a", kind, a), ir.val("b", kind, b)
    if constant is not None:
        right.const_value = ir.tensor(np.ones(b, np.float32), name="b")
    nodes, outputs, operand = [], [], left
    if turned is not None:
        nodes.append(ir.node("Transpose", [left], {"perm": list(turned)} if turned else {}, outputs=[ir.val("t", kind)]))
        operand = nodes[0].outputs[0]
        operand.shape = ir.Shape([a[i] for i in turned or range(len(a))[::-1]])
        if extra == 2:
            nodes.append(ir.node("Neg", [operand], outputs=[ir.val("z", kind)]))
        outputs += nodes[-1].outputs[:extra]
    nodes.append(ir.node("MatMul", [operand, right], outputs=[ir.val("y", kind, y)]))
    graph = ir.Graph(
        [left] if constant is not None else [left, right],
        [*nodes[-1].outputs, *outputs],
        nodes=nodes,
        initializers=[] if constant is None else [right],
        opset_imports={"": 18},
        name="g",
    )
    return ir.Model(graph, ir_version=9)


def kinds(model):
    return [node.op_type for node in model.graph]


def runs_as_numpy(model, *shapes, transposed=False):
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in zip("ab", shapes, strict=True)}
    options = session_options(())
    (found, *_) = inference_session(ir.to_proto(model), sess_options=options).run(None, feeds)
    np.testing.assert_allclose(found, expected_of(*feeds.values(), transposed), rtol=1e-4, atol=1e-3)


def test_large_matrices_with_narrow_ones():
    model = product()
    assert multiply_batches(model, {}) == 1 and kinds(model) == [BATCH_MATMUL]
    runs_as_numpy(model, (2, 384, 384), (2, 384, 64))


@pytest.mark.parametrize(
    ("extra", "left"),
    [(0, [BATCH_MATMUL]), (1, ["Transpose", BATCH_MATMUL]), (2, ["Transpose", "Neg", BATCH_MATMUL])],
    ids=["", "given out", "read elsewhere"],
)
def test_a_turned_matrix_is_read_as_it_lies(extra, left):
    model = product(a=(2, 384, 400), b=(2, 384, 64), turned=(0, 2, 1), extra=extra)
    assert multiply_batches(model, {}) == 1 and kinds(model) == left
    runs_as_numpy(model, (2, 384, 400), (2, 384, 64), transposed=True)


@pytest.mark.parametrize(("a", "turned"), [((384, 2, 384), (1, 0, 2)), ((384, 400, 2), ())], ids=["batches", "no perm"])
def test_another_turn_stays(a, turned):
    model = product(a=a, b=(2, 384, 64), turned=turned)
    assert turned or (model.graph[0].outputs[0].shape == (2, 400, 384))
    multiply_batches(model, {})
    assert kinds(model)[0] == "Transpose" and model.graph[1].inputs[0] is model.graph[0].outputs[0]


def test_open_sizes_are_those_of_the_first_call():
    shapes = {"a": ("n", 4, "s", "s"), "b": ("n", 4, "s", 64)}
    assert multiply_batches(product(**shapes), {}) == 0
    assert multiply_batches(product(**shapes), {}, {"n": 1, "s": 300}) == 0
    model = product(**shapes)
    assert multiply_batches(model, {}, {"n": 1, "s": 384}) == 1
    runs_as_numpy(model, (3, 4, 50, 50), (3, 4, 50, 64))  # and it runs with any


@pytest.mark.parametrize(
    "change",
    [
        {"a": (2, 340, 384)}, {"a": (2, 127, 1024), "b": (2, 1024, 64)}, {"a": (1, 384, 384)}, {"a": (384, 384), "b": (384, 64)}, {"b": (2, 384, 23)}, {"b": (2, 384, 80)},
        {"b": (2, 512, 257), "a": (2, 512, 512)}, {"b": (2, 128, 128), "a": (2, 512, 128)}, {"kind": ir.DataType.DOUBLE}, {"constant": True},
        {"a": (*(1,) * 14, 2, 384, 384)}, {"a": None}, {"b": None}, {"b": (384,)},
    ],
    ids=str,
)  # fmt: skip
def test_others_stay_what_they_are(change):
    model = product(**change)
    assert multiply_batches(model, {}) == 0 and kinds(model) == ["MatMul"]


def test_facts_take_the_place_of_what_is_not_said():
    model = product(a=None)
    facts = {model.graph.inputs[0]: ((2, 384, 384), ir.DataType.FLOAT)}
    assert multiply_batches(model, facts) == 1
    made = model.graph[0].outputs[0]
    assert made in facts and facts[made][1] is ir.DataType.FLOAT


def test_a_processor_that_gains_nothing_keeps_them(monkeypatch):
    monkeypatch.setattr(batches, "has_wide_vectors", lambda: False)
    model = product()
    assert multiply_batches(model, {}) == 0 and kinds(model) == ["MatMul"]


@pytest.mark.parametrize("turned", [None, (0, 2, 1)], ids=["", "turned"])
def test_a_shape_that_the_file_says_wrongly(turned):
    """What is computed has other sizes: the product is that of what is there."""
    model = product(a=(2, 384, 384), turned=turned, y=(2, 384, 64))
    computed = ir.node("Neg", [ir.val("v", ir.DataType.FLOAT, (1, 40, 50))], outputs=[model.graph.inputs[0]])
    model.graph.inputs[0] = computed.inputs[0]
    model.graph.insert_before(model.graph[0], computed)
    model.graph.outputs[0].shape = model.graph.inputs[1].shape = None
    facts = {model.graph.inputs[1]: ((2, 384, 64), ir.DataType.FLOAT)}
    assert multiply_batches(model, facts) == 1
    v, b = np.ones((1, 40, 50), np.float32), np.ones((2, 40 if turned else 50, 64), np.float32)
    (found,) = inference_session(ir.to_proto(model), sess_options=session_options(())).run(None, {"v": v, "b": b})
    np.testing.assert_array_equal(found, expected_of(-v, b, bool(turned)))


# ------------------------------------------------------------------------------------------------- whole models
class Attention(nn.Module):
    """One block of attention over 384 places, ended by a classifier; ``seen`` says which scores count."""

    def __init__(self, seen=None):
        super().__init__()
        self.made, self.out = nn.Linear(64, 192), nn.Linear(64, 5)
        self.register_buffer("seen", seen)

    def forward(self, x, seen=None):
        q, k, v = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.made(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.seen if seen is None else seen)
        return self.out(y.transpose(1, 2).flatten(2).mean(1))


PLACES = torch.arange(384)
SEEN = {
    "causal": PLACES[:, None] >= PLACES,
    "a window": (PLACES[:, None] - PLACES).abs() < 20,
    "all": torch.ones(384, 384, dtype=torch.bool),
}


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
def test_attentions_train_as_eager(seen, dynamo, monkeypatch):
    counts = []
    real = accelerator.multiply_batches
    monkeypatch.setattr(accelerator, "multiply_batches", lambda *args: counts.append(real(*args)) or counts[-1])
    torch.manual_seed(0)
    model = Attention(seen)
    loaded, step = trains_as_eager(model, torch.randn(2, 384, 64), torch.tensor([1, 3]), dynamo, counts)
    most = 4 if dynamo else 3  # TorchScript's graph multiplies with the scores from the left for the gradient of the keys
    assert sum(loaded[1:]) == sum(step) == most  # the first is the plan of eval()


def test_a_loaded_model_takes_other_lengths(monkeypatch):
    counts = []
    real = accelerator.multiply_batches
    monkeypatch.setattr(accelerator, "multiply_batches", lambda *args: counts.append(real(*args)) or counts[-1])
    torch.manual_seed(0)
    model, size = Attention(), torch.export.Dim("size", min=4, max=2048)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = exporter.export(
            model, (torch.randn(2, 400, 64), torch.ones(400, 400).tril() > 0), dynamic_shapes={"x": {1: size}, "seen": {0: size, 1: size}}
        )
    loaded = exporter.load(program).train()
    for length in (400, 17, 511):
        x, seen = torch.randn(2, length, 64), torch.ones(length, length).tril() > 0
        loaded.zero_grad()
        model.zero_grad()
        loaded(x, seen).square().sum().backward()
        model(x, seen).square().sum().backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(loaded.get_parameter(name).grad, p.grad, rtol=1e-4, atol=1e-4)
    assert sum(counts) == 4
