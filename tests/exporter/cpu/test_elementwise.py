"""Chains of elementwise operators as one node: the same bits as the operators, in memory alone, whatever a file says."""

from __future__ import annotations

import time

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import exporter
from exporter.cpu import elementwise
from exporter.cpu.elementwise import ELEMENTWISE, fuse
from exporter.cpu.operators import DOMAIN
from exporter.errors import PythonopError
from tests.exporter.cpu.support import inference_session

KINDS = {np.float32: TensorProto.FLOAT, np.float64: TensorProto.DOUBLE}
#: Operators of one operator of the library each, and how many operands they have.
PLAIN = {"Add": 2, "Sub": 2, "Mul": 2, "Div": 2, "Sqrt": 1, "Neg": 1}
# A node more than a block, more than a task of a thread; nothing; one element.
SHAPES = [(0, 3), (1,), (), (7,), (1025,), (40, 1000), (2, 3, 5000)]


@pytest.fixture
def small(monkeypatch):
    """Chains of two operators are made of few elements as well."""
    monkeypatch.setattr(elementwise, "_FEW_ELEMENTS", 0)


def model(nodes, inputs, outputs, kind=np.float32, said=None) -> onnx.ModelProto:
    """A model of operators; inputs, outputs and what else the file says by name with their shapes."""

    def infos(shapes):
        return [helper.make_tensor_value_info(name, KINDS[kind], shape) for name, shape in shapes.items()]

    made = []
    for op, reads, writes in nodes:
        if op in ("Above", "Below"):  # a comparison as a number
            made.append(helper.make_node({"Above": "Greater", "Below": "Less"}[op], reads, [f"{writes}/test"]))
            made.append(helper.make_node("Cast", [f"{writes}/test"], [writes], to=KINDS[kind]))
        elif op in ("GateAbove", "GateBelow"):  # the third where the first is greater, or less, than the second
            made.append(helper.make_node({"GateAbove": "Greater", "GateBelow": "Less"}[op], reads[:2], [f"{writes}/test"]))
            made.append(helper.make_node("Where", [f"{writes}/test", reads[2], f"{op}/by"], [writes]))
        elif op in ("Guard", "GuardMinus", "GuardOther"):
            made.append(helper.make_node("IsNaN", reads[:1], [f"{writes}/test"]))
            made.append(helper.make_node("Where", [f"{writes}/test", reads[1] if op == "GuardOther" else f"{op}/by", reads[0]], [writes]))
        elif op in ("Square", "Cube"):
            made.append(helper.make_node("Pow", [*reads, f"{op}/by"], [writes]))
        else:
            made.append(helper.make_node(op, reads, [writes]))
    by = {"Square": 2, "Cube": 3, "Guard": 0, "GuardMinus": -0.0, "GateAbove": 0, "GateBelow": 0}
    read = {name for node in made for name in node.input}
    constants = [numpy_helper.from_array(np.array(value, kind), f"{op}/by") for op, value in by.items() if f"{op}/by" in read]
    graph = helper.make_graph(made, "g", infos(inputs), infos(outputs), value_info=infos(said or {}), initializer=constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def fused(proto) -> tuple[onnx.ModelProto, int]:
    graph = ir.from_proto(proto)
    count = fuse(graph)
    return ir.to_proto(graph), count


def outputs_of(proto, feeds, ours):
    with np.errstate(all="ignore"):
        session = inference_session(proto) if ours else onnxruntime.InferenceSession(proto.SerializeToString())
        return session.run(None, feeds)


def same(one, other):
    """Bit by bit, but for the sign of what is no number, which IEEE 754 leaves open."""
    for ours, theirs in zip(one, other, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(np.signbit(ours) & ~np.isnan(ours), np.signbit(theirs) & ~np.isnan(theirs))


def draw(generator, shape, kind):
    """Numbers with infinities, zeros of both signs, numbers that are none and subnormal ones among them."""
    made = np.asarray(generator.standard_normal(shape) * 10.0 ** generator.integers(-3, 3, shape), kind)
    odd = np.array([np.inf, -np.inf, 0.0, -0.0, np.finfo(kind).tiny / 4, np.finfo(kind).max], kind)
    return np.where(generator.random(shape) < 0.05, generator.choice(odd, shape), made).astype(kind)


@pytest.mark.parametrize("kind", KINDS, ids=["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_operator_with_every_operand(shape, kind):
    generator = np.random.default_rng(0)
    inputs = {"x": shape, "y": shape, "s": (), "t": (1,) * len(shape)}
    nodes, last = [], "x"
    for number, (op, other) in enumerate(
        [("Add", "s"), ("Sub", "y"), ("Mul", "t"), ("Div", "y"), ("Neg", None), ("Sqrt", None), ("Neg", None)]
    ):
        nodes.append((op, [last] if other is None else [last, other], last := f"v{number}"))
    for number, op in enumerate(["Sub", "Div", "Add", "Mul"]):  # one element in front
        nodes.append((op, ["s", last], last := f"w{number}"))
    for op in ("Above", "Below"):
        nodes.append((op, [last, "y"], f"{op}/y"))
        nodes.append((op, [last, "s"], f"{op}/s"))
        nodes.append(("Add", [f"{op}/y", f"{op}/s"], last := f"{op}/sum"))
    for op in ("GateAbove", "GateBelow"):
        nodes += [(op, [last, "s", "y"], f"{op}/y"), ("Add", [f"{op}/y", last], last := f"{op}/sum")]
    nodes += [("Guard", ["y"], "guarded"), ("Add", ["guarded", last], last := "guarded/sum")]
    nodes += [
        ("Square", [last], "square"),
        ("Cube", ["y"], "cube"),
        ("Sum", ["square", "cube", "t", last], "sum"),
        ("Mul", ["sum", "sum"], "end"),
    ]
    proto = model(nodes, inputs, {"end": shape}, kind)
    made, count = fused(proto)
    powers = len(shape) > 0 and shape[-1] > 1  # else onnxruntime's Pow is no product
    assert count == 1 or not powers
    assert {node.op_type for node in made.graph.node} <= ({ELEMENTWISE} if powers else {ELEMENTWISE, "Pow", "Sum", "Mul", "Add"})
    feeds = {name: np.asarray(draw(generator, size, kind), kind) for name, size in inputs.items()}
    np.abs(feeds["y"], out=feeds["y"])
    same(outputs_of(made, feeds, True), outputs_of(proto, feeds, False))


#: Without gates: of -0.0, onnxruntime's Where makes 0.0, as the standard does not.
ARITY = {
    **PLAIN,
    "Above": 2,
    "Below": 2,
    "Guard": 1,
    "GuardMinus": 1,
    "GuardOther": 2,
    "Square": 1,
    "Cube": 1,
    "Sum": 3,
    "Exp": 1,
}


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.usefixtures("small")
def test_random_graphs(seed):
    """Several outputs, values that others read (before and behind the end), more values at once than there are temporaries, operands of all shapes."""
    generator = np.random.default_rng(seed)
    kind = [np.float32, np.float64][seed % 2]
    shape = [*SHAPES, (3, 40, 11, 9), (5, 1, 300), (1, 7, 1), (2, 1024, 2)][int(generator.integers(len(SHAPES) + 4))]
    rank = len(shape)
    some = {"x": shape, "y": shape, "s": (), "row": (*shape[:-1], 1)[:rank], "bias": shape[-1:], "heads": (1, *shape[1:])[:rank]}
    if rank > 2:
        some["channel"] = (shape[1], *[1] * (rank - 2))
        some["apart"] = (shape[0], *[1] * (rank - 2), shape[-1])  # along axes that are not next to each other
    shapes, nodes = dict(some), []
    for number in range(int(generator.integers(2, 60))):
        op = str(generator.choice([*ARITY, "Add", "Mul", "Sub"]))
        values = list(shapes)
        recent = values if generator.random() < 0.4 else values[-4:]
        reads = [str(generator.choice(recent)) for _ in range(ARITY[op])]
        name = f"v{number}"
        nodes.append((op, reads, name))
        shapes[name] = np.broadcast_shapes(*(shapes[read] for read in reads))
    made_here = [name for name in shapes if name not in some]
    outputs = {name for name in made_here if generator.random() < 0.2} | {made_here[-1]}
    proto = model(nodes, some, {name: shapes[name] for name in made_here if name in outputs}, kind)
    feeds = {name: np.asarray(draw(generator, size, kind), kind) for name, size in some.items()}
    made, _ = fused(proto)
    onnx.checker.check_model(onnx.ModelProto.FromString(made.SerializeToString()), full_check=False)
    same(outputs_of(made, feeds, True), outputs_of(proto, feeds, False))


@pytest.mark.usefixtures("small")
def test_random_graphs_are_fused():
    """What the test above compares is not nothing."""
    proto = model(
        [("Mul", ["x", "s"], "a"), ("Exp", ["a"], "b"), ("Add", ["a", "b"], "c"), ("Sub", ["c", "a"], "d")],
        {"x": (4,), "s": ()},
        {"d": (4,), "a": (4,)},
        said={"b": (4,)},
    )
    made, count = fused(proto)
    assert count == 1  # Add and Sub; Exp stands between Mul and them
    assert [node.op_type for node in made.graph.node] == ["Mul", "Exp", ELEMENTWISE]


@pytest.mark.parametrize("shape", [(4, 2048), ("n", 2048)], ids=str)
def test_between_products(shape):
    """A gradient of softmax and one of ReLU: a row's number, a channel's, a comparison; what reads in between reads the same."""
    proto = model(
        [("MatMul", ["x", "w"], "p"), ("Sub", ["p", "row"], "a"), ("Mul", ["a", "x"], "b"), ("Above", ["x", "zero"], "m"), ("Mul", ["b", "m"], "c"),
         ("Mul", ["c", "bias"], "d"), ("ReduceSum", ["b"], "sum"), ("MatMul", ["d", "w"], "y")],
        {"x": shape, "w": (2048, 2048), "row": (shape[0], 1), "bias": (2048,), "zero": ()},
        {"y": shape, "sum": (1, 1)},
    )  # fmt: skip
    made, count = fused(proto)
    assert count == 1
    assert [node.op_type for node in made.graph.node] == ["MatMul", ELEMENTWISE, "ReduceSum", "MatMul"]
    generator = np.random.default_rng(0)
    sizes = {"x": (4, 2048), "w": (2048, 2048), "row": (4, 1), "bias": (2048,), "zero": ()}
    feeds = {name: np.asarray(generator.standard_normal(size), np.float32) for name, size in sizes.items()}
    same(outputs_of(made, feeds, True), outputs_of(proto, feeds, False))


def test_a_name_of_two_sizes_is_an_error():
    proto = model(
        [("Mul", ["x", "y"], "a"), *(("Add", [f"{v}", "y"], w) for v, w in ("ab", "bc", "cd"))], {"x": ("n",), "y": ("n",)}, {"d": ("n",)}
    )
    made, count = fused(proto)
    assert count == 1
    session = inference_session(made)
    with pytest.raises(exporter.RunError, match="another type or shape than the file says"):
        session.run(None, {"x": np.ones(3, np.float32), "y": np.ones(2, np.float32)})


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("sizes", [((8,), (1,)), ((1,), (8,)), ((0,), (1,)), ((1,), (0,)), ((1,), (1,))], ids=str)
def test_a_name_of_one_and_of_another_size_broadcasts(sizes):
    """As with the operators themselves; what is made of the one alone keeps its shape."""
    proto = model(
        [("Mul", ["x", "x"], "p"), ("Mul", ["y", "y"], "q"), ("Add", ["p", "q"], "r"), ("Sqrt", ["r"], "s"), ("Above", ["s", "y"], "t"),
         ("Sum", ["t", "p", "q"], "u")],
        {"x": ("n",), "y": ("n",)},
        {"u": ("n",), "p": ("n",), "q": ("n",)},
    )  # fmt: skip
    made, count = fused(proto)
    assert count == 1
    generator = np.random.default_rng(0)
    feeds = {name: draw(generator, size, np.float32) for name, size in zip("xy", sizes, strict=True)}
    same(outputs_of(made, feeds, True), outputs_of(proto, feeds, False))


@pytest.mark.usefixtures("small")
def test_rows_and_columns_of_another_shape_than_the_file_says():
    proto = model(
        [("Reshape", ["x", "n"], "r"), ("Sub", ["r", "y"], "a"), ("Div", ["y", "a"], "b"), ("Mul", ["b", "r"], "c")],
        {"x": (8,), "y": (8,)},
        {"c": ("k", "l")},
        said={"r": (8,)},
    )
    proto.graph.input.append(helper.make_tensor_value_info("n", TensorProto.INT64, ("k",)))
    made, count = fused(proto)
    generator = np.random.default_rng(0)
    for shape in ([8], [8, 1], [1, 8], [2, 4, 1]):
        feeds = {"n": np.array(shape), **{name: draw(generator, (8,), np.float32) for name in "xy"}}
        same(outputs_of(made, feeds, True), outputs_of(proto, feeds, False))
    assert count == 1


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("kind", "other"), [("Square", 3.0), ("Guard", -0.0)])
def test_constants_that_a_caller_may_replace_are_none(kind, other):
    proto = model([(kind, ["x"], "a"), ("Mul", ["a", "x"], "b"), ("Add", ["b", "x"], "c")], {"x": (4,), f"{kind}/by": ()}, {"c": (4,)})
    made, count = fused(proto)
    assert count == 1
    assert {node.op_type for node in made.graph.node} >= {"Pow" if kind == "Square" else "Where", ELEMENTWISE}
    feeds = {"x": np.array([1.5, np.nan, -0.0, 3], np.float32), f"{kind}/by": np.array(other, np.float32)}
    same(outputs_of(made, feeds, True), outputs_of(proto, feeds, False))


@pytest.mark.usefixtures("small")
def test_what_has_no_kernel_stays_so_and_many_dims_stay_as_they_are():
    """Add of opset 6 aligns by its attribute, and onnxruntime has none; the native library has no room for 20 dims."""
    old = model([("Add", ["x", "y"], "a"), ("Mul", ["a", "x"], "b")], {"x": (3, 3), "y": (3,)}, {"b": (3, 3)})
    old.opset_import[0].version = 6
    old.graph.node[0].attribute.extend([helper.make_attribute("broadcast", 1), helper.make_attribute("axis", 0)])
    assert fused(old)[1] == 0
    shape = (*[1] * 18, 2, 3)
    assert fused(model([("Mul", ["x", "x"], "a"), ("Add", ["a", "x"], "b")], {"x": shape}, {"b": shape}))[1] == 0


@pytest.mark.parametrize("kind", ["chain", "alive", "apart"])
def test_large_graphs_are_fused_in_time(kind):
    """One chain, one that needs more values at once than there is room for, many that read one value."""
    nodes, last, many = [], "x", 3000
    for number in range(many):
        if kind == "apart":
            nodes += [("Mul", ["x", "y"] if not number else ["m0", "y"], f"m{number}"), ("Add", [f"m{number}", "y"], f"o{number}")]
        else:
            nodes.append(("Mul", [last, "y"], last := f"m{number}"))
    if kind == "alive":
        for number in reversed(range(many)):
            nodes.append(("Add", [last, f"m{number}"], last := f"a{number}"))
    outputs = [f"o{number}" for number in range(many)] if kind == "apart" else [last]
    graph = ir.from_proto(model(nodes, {"x": (9000,), "y": (9000,)}, dict.fromkeys(outputs, (9000,))))
    start = time.process_time()
    assert fuse(graph) > many // 64
    assert time.process_time() - start < 10  # it was minutes


@pytest.mark.parametrize("between", [3, 40])
def test_a_chain_does_not_keep_two_for_one(between):
    """What is made of two values that nobody needs any more is not put off: both would be kept in the place of one."""
    walk, last = [], "x"
    for number in range(between):
        walk.append(("Exp", [last], last := f"e{number}"))
    proto = model(
        [("Exp", ["x"], "p"), ("Exp", ["y"], "q"), ("Mul", ["p", "q"], "kept"), *walk, ("Add", [last, last], "far"), ("Mul", ["far", "kept"], "end")],
        {"x": (9000,), "y": (9000,)},
        {"end": (9000,)},
    )  # fmt: skip
    made, _ = fused(proto)
    operators = [node.op_type for node in made.graph.node]
    assert operators.count("Mul") == (between > 32)
    assert operators[-1] == ELEMENTWISE


@pytest.mark.parametrize("given_out", [True, False])
def test_what_is_made_of_a_row_and_a_column(given_out):
    """Inside a chain it is one of its operators; where others read it, it is left to onnxruntime: no operand has its shape."""
    nodes = [("Add", ["row", "column"], "outer"), ("Mul", ["outer", "x"], "a"), ("Add", ["a", "x"], "b"), ("Sub", ["b", "a"], "c")]
    sizes = {"row": (1, 300), "column": (300, 1), "x": (300, 300)}
    proto = model(nodes, sizes, {"c": (300, 300), **({"outer": (300, 300)} if given_out else {})})
    made, count = fused(proto)
    assert count == (not given_out)
    feeds = {name: draw(np.random.default_rng(0), size, np.float32) for name, size in sizes.items()}
    same(outputs_of(made, feeds, True), outputs_of(proto, feeds, False))


def test_of_a_forward_only_what_replaces_nan():
    """onnxruntime finds Gelu and the like in the rest."""
    proto = model(
        [("Mul", ["x", "x"], "a"), ("Add", ["a", "x"], "b"), ("Guard", ["b"], "c"), ("Exp", ["c"], "d")],
        {"x": (9000,)},
        {"d": (9000,)},
    )
    graph = ir.from_proto(proto)
    assert fuse(graph, guards_only=True) == 1
    assert [node.op_type for node in graph.graph] == ["Mul", "Add", ELEMENTWISE, "Exp"]
    feeds = {"x": draw(np.random.default_rng(0), (9000,), np.float32)}
    same(outputs_of(ir.to_proto(graph), feeds, True), outputs_of(proto, feeds, False))


STEPS = {
    "adamw": {},
    "adam, decay": {"optimizer": "adam", "hyperparameters": {"weight_decay": 0.1}},
    "sgd": {"optimizer": "sgd", "hyperparameters": {"weight_decay": 0.1}},
    "nesterov": {"optimizer": "sgd", "hyperparameters": {"momentum": 0.9, "nesterov": True}},
    "lion": {"optimizer": "lion"},
    "clipped, every second run": {"clip_norm": 0.1, "accumulate": 2},
    "float16": {"precision": "float16"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in STEPS), ("adamw", torch.float64), ("lion", torch.float64)], ids=str
)
def test_a_training_step(name, dtype):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 900), torch.nn.Tanh(), torch.nn.Linear(900, 3)).to(dtype)
    x, target = torch.randn(2, 40, dtype=dtype), torch.tensor([0, 2])
    step = exporter.export_training_step(net, (x,), loss=torch.nn.functional.cross_entropy, targets=(target,), dynamo=False, **STEPS[name])
    before = step.model_proto.SerializeToString(deterministic=True)
    assert fused(step.model_proto)[1] >= len(list(net.parameters()))
    found = []
    for session in (inference_session(step.model), onnxruntime.InferenceSession(step.model_proto.SerializeToString())):
        feeds = {**step.initial, step.layout.inputs[0]: x.numpy(), step.layout.targets[0]: target.numpy()}
        names = [value.name for value in session.get_outputs()]
        for _ in range(5):
            results = dict(zip(names, session.run(None, feeds), strict=True))
            feeds.update((name, results[output]) for output, name in step.layout.carried.items())
        found.append(results)
    for key, value in found[0].items():
        np.testing.assert_array_equal(value, found[1][key], err_msg=key)
    assert step.model_proto.SerializeToString(deterministic=True) == before  # in memory alone


def test_other_models_stay_as_they_are(monkeypatch):
    proto = model([("Mul", ["x", "x"], "a"), ("Add", ["a", "x"], "b")], {"x": (4,)}, {"b": (4,)})
    monkeypatch.setattr("exporter.cpu.accelerator.fuse", lambda *args, **options: pytest.fail("this is no training step"))
    inference_session(proto).run(None, {"x": np.zeros(4, np.float32)})


@pytest.mark.usefixtures("small")
def test_nodes_out_of_order_and_unknown_shapes_are_left_alone():
    proto = model([("Mul", ["x", "x"], "a"), ("Add", ["a", "x"], "b")], {"x": (4,)}, {"b": (4,)})
    assert fused(proto)[1] == 1
    swapped = onnx.ModelProto.FromString(proto.SerializeToString())
    del swapped.graph.node[:]
    swapped.graph.node.extend(reversed(proto.graph.node))
    assert fused(swapped)[1] == 0
    for shape in (None, (2, 1)):
        unknown = onnx.ModelProto.FromString(proto.SerializeToString())
        unknown.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, shape))
        if shape == (2, 1):
            unknown.graph.node[1].input[1] = "z"
            unknown.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, (1, 2)))
        unknown.graph.output[0].CopyFrom(helper.make_tensor_value_info("b", TensorProto.FLOAT, None))
        assert fused(unknown)[1] == 0, shape


@pytest.mark.usefixtures("small")
def test_a_shape_that_the_file_does_not_tell_rightly_is_an_error():
    proto = model([("Reshape", ["x", "n"], "r"), ("Mul", ["r", "y"], "a"), ("Add", ["a", "y"], "b")], {"x": (4,), "y": (4,)}, {"b": (4,)})
    proto.graph.input.append(helper.make_tensor_value_info("n", TensorProto.INT64, (2,)))
    proto.graph.value_info.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, (4,)))
    made, count = fused(proto)
    assert count == 1
    session = inference_session(made)
    four = np.ones(4, np.float32)
    with pytest.raises(exporter.RunError, match=r"has another type or shape than the file says"):
        session.run(None, {"x": four, "y": four, "n": np.array([2, 2])})


NUMPY = [
    np.add,
    np.subtract,
    np.multiply,
    np.divide,
    lambda a, _: np.sqrt(a),
    lambda a, _: -a,
    np.greater,
    lambda a, b: np.where(np.isnan(a), b, a),
    lambda a, b: np.where(a > 0, b, 0),
]


@pytest.mark.parametrize("seed", range(300))
def test_programs_of_strangers(seed):
    """A node that a file brings itself: refused, or a chain as any other; never memory of others."""
    generator = np.random.default_rng(seed)
    inputs, outputs = int(generator.integers(1, 4)), int(generator.integers(1, 3))
    places = inputs + outputs + 12
    program = [
        int(v) for _ in range(int(generator.integers(0, 6))) for v in (generator.integers(-1, 11), *generator.integers(-2, places + 2, 3))
    ]
    if seed % 3:  # good ones, but for what an attacker adds
        program = [v for to in range(outputs) for v in (seed % 6, inputs + to, 0, inputs - 1)] + program[: 4 * (seed % 2)]
    full = int(generator.integers(-1, inputs + 1)) if seed % 2 else 0
    names = [f"x{i}" for i in range(inputs)], [f"y{i}" for i in range(outputs)]
    node = helper.make_node(ELEMENTWISE, *names, domain=DOMAIN, program=program or [0], full=full)
    sizes = [(3,), (1,), (), (5000,), (2, 3), (2, 1), (7, 1, 3), (0, 3), (9000, 1)]
    shapes = [sizes[int(generator.integers(len(sizes)))] for _ in range(inputs)]
    graph = helper.make_graph(
        [node], "g", *([helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in group] for group in names)
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid(DOMAIN, 1)], ir_version=10)
    feeds = {name: np.ones(shape, np.float32) for name, shape in zip(names[0], shapes, strict=True)}
    try:
        results = inference_session(proto).run(None, feeds)
    except PythonopError as error:
        assert "Elementwise" in str(error) or "has another type or shape" in str(error)
    else:
        places = [*feeds.values(), *[np.zeros(0)] * (outputs + 12)]
        with np.errstate(all="ignore"):
            for function, to, a, b in np.reshape(program, (-1, 4)):
                places[to] = np.asarray(NUMPY[function](places[a], places[b]), np.float32)
        same(results, places[inputs : inputs + outputs])


@pytest.mark.parametrize(
    "attributes", [{}, {"program": [0, 1, 0, 0]}, {"full": 0}, {"program": "text", "full": 0}, {"program": [0, 1, 0, 0], "full": [0]}]
)
def test_attributes_that_are_missing_or_others(attributes):
    node = helper.make_node(ELEMENTWISE, ["x"], ["y"], domain=DOMAIN, **attributes)
    values = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, (2,))] for name in "xy"]
    proto = helper.make_model(helper.make_graph([node], "g", *values), opset_imports=[helper.make_opsetid(DOMAIN, 1)], ir_version=10)
    with pytest.raises(exporter.RunError):
        inference_session(proto)


@pytest.mark.parametrize("kind", [TensorProto.INT32, TensorProto.FLOAT16, TensorProto.STRING])
def test_other_types_are_refused(kind):
    node = helper.make_node(ELEMENTWISE, ["x"], ["y"], domain=DOMAIN, program=[0, 1, 0, 0], full=0)
    values = [[helper.make_tensor_value_info(name, kind, (2,))] for name in "xy"]
    proto = helper.make_model(helper.make_graph([node], "g", *values), opset_imports=[helper.make_opsetid(DOMAIN, 1)], ir_version=10)
    array = np.array(["a", "b"], object) if kind == TensorProto.STRING else np.ones(2, helper.tensor_dtype_to_np_dtype(kind))
    with pytest.raises(exporter.RunError, match="neither float32 nor float64"):
        inference_session(proto).run(None, {"x": array})


def test_a_node_with_several_bodies_in_one_attribute():
    """No operator of the standard has one; what a file has beside the chain is left as it is."""
    proto = model([("Mul", ["x", "x"], "v"), ("Add", ["v", "x"], "y")], {"x": (9000,)}, {"y": (9000,)})
    body = helper.make_graph([helper.make_node("Identity", ["x"], ["z"])], "body", [], [helper.make_tensor_value_info("z", 1, (9000,))])
    proto.graph.node.append(helper.make_node("Several", [], ["w"], domain="custom", bodies=[body, body]))
    proto.opset_import.append(helper.make_opsetid("custom", 1))
    assert fused(proto)[1] == 1


def test_an_attribute_that_is_called_a_graph_and_holds_none():
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "xy")
    nodes = [
        helper.make_node("Sin", ["x"], ["a"]),
        helper.make_node("Foreign", ["a"], ["b"], domain="nobody"),
        helper.make_node("Cos", ["b"], ["y"]),
    ]
    nodes[1].attribute.add(name="body", type=onnx.AttributeProto.GRAPH)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("nobody", 1)]
    fuse(ir.from_proto(helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=opsets)))
