"""What may leave a training step to write where the state lies, and what must stay: the rules one by one, on graphs written by hand."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from exporter.cpu import in_place
from exporter.cpu.elementwise import ELEMENTWISE
from exporter.cpu.in_place import take_out_updates
from exporter.cpu.operators import DOMAIN
from exporter.runtime.session import step_sessions
from exporter.runtime.tensors import Runner
from symbolics.errors import PythonopError
from symbolics.node.metadata import STEP_KEY

ADD, SUB, MUL = 0, 1, 2
FLOAT = ir.DataType.FLOAT


@pytest.fixture(autouse=True)
def _small_states_count(monkeypatch):
    monkeypatch.setattr(in_place, "FEW_BYTES", 1)


def value(name, shape=(4, 8), kind=FLOAT):
    return ir.Value(name=name, type=ir.TensorType(kind), shape=None if shape is None else ir.Shape(shape))


def taken(step, carried):
    """`take_out_updates`, where what the file says of shapes is all that is known."""
    values = [*step.graph.inputs, *step.graph.initializers.values(), *(output for node in step.graph for output in node.outputs)]
    known = {
        found: (tuple(d if isinstance(d, int) else str(d) for d in found.shape), found.dtype) for found in values if found.shape is not None
    }
    return take_out_updates(step, carried, known)


def chain(inputs, outputs, program):
    """A node of the library: steps of (function, where to, first operand, second); places count inputs, outputs, then what is kept between."""
    flat = [number for step in program for number in step]
    return ir.Node(DOMAIN, ELEMENTWISE, inputs, [ir.AttrInt64s("program", flat)], outputs=outputs)


def model(nodes, inputs, outputs, initializers=()):
    graph = ir.Graph(inputs, outputs, nodes=nodes, initializers=initializers, opset_imports={"": 18, DOMAIN: 1}, name="step")
    return ir.Model(graph, ir_version=10)


def descent(**changed):
    """next = old - g * rate, g = x * x; what is changed by name: values, or where they stand."""
    made = {"old": value("old"), "next": value("next"), "x": value("x"), "rate": value("rate", ())} | changed
    g = value("g")
    square = ir.Node("", "Mul", [made["x"], made["x"]], outputs=[g])
    update = chain([made["old"], g, made["rate"]], [made["next"]], [(MUL, 4, 1, 2), (SUB, 3, 0, 4)])
    return model([square, update], [made["old"], made["x"], made["rate"]], [made["next"]])


CARRIED = {"next": "old"}


def test_an_update_leaves_the_step():
    step = descent()
    update = taken(step, CARRIED)
    assert update is not None and update.written == CARRIED
    assert update.reads == {"old": (4, 8), "g": (4, 8), "rate": ()} and update.added == {"g"}
    assert [node.op_type for node in step.graph] == ["Mul"]
    assert [output.name for output in step.graph.outputs] == ["g"]
    assert [found.name for found in update.model.graph.inputs] == ["old", "g", "rate"]
    assert [found.name for found in update.model.graph.outputs] == ["next"]


def test_constants_go_with_it():
    rate = ir.Value(name="rate", type=ir.TensorType(FLOAT), shape=ir.Shape(()), const_value=ir.tensor(np.float32(0.5), name="rate"))
    made = {"old": value("old"), "next": value("next"), "g": value("g")}
    node = chain([made["old"], made["g"], rate], [made["next"]], [(MUL, 4, 1, 2), (SUB, 3, 0, 4)])
    step = model([node], [made["old"], made["g"]], [made["next"]], [rate])
    update = taken(step, CARRIED)
    assert update is not None and list(update.model.graph.initializers) == ["rate"]
    assert [found.name for found in update.model.graph.inputs] == ["old", "g"]


@pytest.mark.parametrize(
    "changed",
    [
        {"old": value("old", (4, "n")), "next": value("next", (4, "n"))},
        {"old": value("old", ("n", 8))},
        {"next": value("next", (8, 4))},
        {"old": value("old", None)},
        {"next": value("next", None)},
        {"old": value("old", kind=ir.DataType.DOUBLE)},
        {"old": value("old", (4, 0)), "next": value("next", (4, 0))},
        {"rate": value("rate", ("n",))},
        {"rate": value("rate", None)},
    ],
    ids=[
        "open size",
        "another open size",
        "another shape",
        "old of no shape",
        "next of no shape",
        "another type",
        "empty",
        "open operand",
        "operand of no shape",
    ],
)
def test_what_the_file_says_of_sizes_and_types(changed):
    step = descent(**changed)
    assert taken(step, CARRIED) is None
    assert len(step.graph) == 2 and [output.name for output in step.graph.outputs] == ["next"]


def test_little_state_stays(monkeypatch):
    monkeypatch.setattr(in_place, "FEW_BYTES", 4 * 8 * 4)
    assert taken(descent(), CARRIED) is not None
    monkeypatch.setattr(in_place, "FEW_BYTES", 4 * 8 * 4 + 1)
    assert taken(descent(), CARRIED) is None


def test_the_present_state_is_read_before_it_is_written_over():
    old, g, after, moment, next_moment = value("old"), value("g"), value("next"), value("moment"), value("next_moment")
    # next = old - g; next_moment = moment + old: it reads old after next was written.
    late = [(SUB, 3, 0, 1), (ADD, 4, 2, 0)]
    early = [(ADD, 4, 2, 0), (SUB, 3, 0, 1)]
    carried = {"next": "old", "next_moment": "moment"}
    for program, leaves in ((late, False), (early, True)):
        step = model([chain([old, g, moment], [after, next_moment], program)], [old, g, moment], [after, next_moment])
        update = taken(step, carried)
        assert (update is not None) == leaves
        old, g, after, moment, next_moment = value("old"), value("g"), value("next"), value("moment"), value("next_moment")


def test_an_output_that_is_written_twice_counts_from_the_first_time():
    old, g, after = value("old"), value("g"), value("next")
    program = [(SUB, 2, 0, 1), (ADD, 2, 2, 0)]  # next = old - g, then next + old
    step = model([chain([old, g], [after], program)], [old, g], [after])
    assert taken(step, CARRIED) is None


def test_nodes_that_share_state():
    """Lookahead and the like: one parameter's next value reads another's present one."""
    a, b, g = value("a"), value("b"), value("g")
    next_a, next_b, c, next_c = value("next_a"), value("next_b"), value("c"), value("next_c")
    nodes = [
        chain([a, g], [next_a], [(SUB, 2, 0, 1)]),
        chain([b, a], [next_b], [(ADD, 2, 0, 1)]),  # must see the present a
        chain([c, g], [next_c], [(SUB, 2, 0, 1)]),
    ]
    step = model(nodes, [a, b, c, g], [next_a, next_b, next_c])
    update = taken(step, {"next_a": "a", "next_b": "b", "next_c": "c"})
    assert update is not None
    # The reader stays in the step, which runs before; the one that it reads may go, and it may not be the reader alone that does.
    assert update.written.get("next_b") is None and update.written["next_c"] == "c"
    left = {output.name for output in step.graph.outputs}
    assert "next_b" in left


@pytest.mark.parametrize(
    "fault", ["not carried", "read again", "of another", "twice", "given out", "not read", "default", "absent", "other operator"]
)
def test_what_stays(fault):
    old, other, g, after, more = value("old"), value("other"), value("g"), value("next"), value("more")
    inputs, outputs, carried = [old, other, g], [after], dict(CARRIED)
    initializers = []
    if fault == "not read":
        nodes = [chain([other, g], [after], [(SUB, 2, 0, 1)])]
    elif fault == "absent":
        nodes = [chain([old, g, None], [after], [(SUB, 3, 0, 1)])]
    elif fault == "other operator":
        nodes = [ir.Node("", "Sub", [old, g], outputs=[after])]
    else:
        nodes = [chain([old, g], [after], [(SUB, 2, 0, 1)])]
    match fault:
        case "not carried":
            carried = {}
        case "read again":
            nodes.append(ir.Node("", "Neg", [after], outputs=[more]))
            outputs.append(more)
        case "of another":
            carried = {"next": "other"}
        case "twice":
            second = value("second")
            nodes.append(chain([old, g], [second], [(ADD, 2, 0, 1)]))
            outputs.append(second)
            carried["second"] = "old"
        case "given out":
            outputs.append(old)
        case "default":  # an initializer that a caller may replace
            g.const_value = ir.tensor(np.zeros((4, 8), np.float32), name="g")
            initializers = [g]
    step = model(nodes, inputs, outputs, initializers)
    assert taken(step, carried) is None
    assert len(step.graph) == len(nodes) and list(step.graph.outputs) == outputs


def of_operators():
    """What `fuse` joins, behind a product that stays."""
    shape = (64, 64)
    old, x, rate, after = value("old", shape), value("x", shape), value("rate", ()), value("next", shape)
    product = value("product", shape)
    nodes, last = [ir.Node("", "MatMul", [x, old], outputs=[product])], product
    for number, op in enumerate(["Mul", "Add", "Mul", "Add"]):
        made = value(f"v{number}", shape)
        nodes.append(ir.Node("", op, [last, old], outputs=[made]))
        last = made
    scaled = value("scaled", shape)
    nodes.append(ir.Node("", "Mul", [last, rate], outputs=[scaled]))
    nodes.append(ir.Node("", "Sub", [old, scaled], outputs=[after]))
    step = ir.to_proto(model(nodes, [old, x, rate], [after]))
    entry = step.metadata_props.add()
    entry.key, entry.value = STEP_KEY, "{}"
    return step


def test_a_step_in_two_sessions():
    main, update, apart = step_sessions(of_operators(), CARRIED)
    assert update is not None and apart is not None and apart.written == CARRIED
    generator = np.random.default_rng(0)
    feeds = {name: generator.standard_normal((64, 64)).astype(np.float32) for name in ("old", "x")} | {"rate": np.array(0.1, np.float32)}
    (expected,) = onnxruntime.InferenceSession(of_operators().SerializeToString()).run(None, feeds)
    (product,) = main.run(None, feeds)
    old = torch.from_numpy(feeds["old"].copy())
    values = {"old": old, "rate": torch.tensor(0.1), main.get_outputs()[0].name: torch.from_numpy(product)}
    runner = Runner(update, torch.device("cpu"))
    if not runner.takes_room:
        pytest.xfail("this onnxruntime takes no vectors")
    runner.run_owning([values[name] for name in runner.inputs], [old])
    np.testing.assert_array_equal(old.numpy(), expected)


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(63, 64), torch.ones(64 * 64), torch.ones(64, 64, dtype=torch.float64), torch.ones(1, 64)],
    ids=lambda t: f"{t.shape}",
)
def test_memory_of_another_size_or_type_is_not_written(wrong):
    _, update, _ = step_sessions(of_operators(), CARRIED)
    runner = Runner(update, torch.device("cpu"))
    if not runner.takes_room:
        pytest.xfail("this onnxruntime takes no vectors")
    good = {"old": torch.ones(64, 64), "rate": torch.tensor(0.5)}
    values = [good.get(name, torch.ones(64, 64)) for name in runner.inputs]
    for given, room in ((values, wrong), ([wrong if name == "old" else v for name, v in zip(runner.inputs, values, strict=True)], wrong)):
        with pytest.raises(PythonopError):
            runner.run_owning(given, [room])
    assert bool((wrong == 1).all())


def reshaped(sizes=(64, 64), **changed):
    """next = old - g * rate, g a Reshape of x * x, (64 * 64) elements."""
    made = {name: value(name, shape) for name, shape in {"old": sizes, "next": sizes, "x": (4096,), "m": (4096,), "g": sizes}.items()}
    made |= {"rate": value("rate", ())} | changed
    shape = ir.Value(name="s", const_value=ir.tensor(np.array(sizes, np.int64), name="s"))
    shape.type, shape.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([2])
    nodes = [
        ir.Node("", "Mul", [made["x"], made["x"]], outputs=[made["m"]]),
        ir.Node("", "Reshape", [made["m"], shape], outputs=[made["g"]]),
        chain([made["old"], made["g"], made["rate"]], [made["next"]], [(MUL, 4, 1, 2), (SUB, 3, 0, 4)]),
    ]
    return model(nodes, [made["old"], made["x"], made["rate"]], [made["next"]], [shape])


def test_a_reshape_goes_with_what_reads_it():
    step = reshaped()
    update = taken(step, CARRIED)
    assert update.reads == {"old": (64, 64), "m": (4096,), "rate": ()} and update.added == {"m"}
    assert [node.op_type for node in step.graph] == ["Mul"] and [output.name for output in step.graph.outputs] == ["m"]
    assert [node.op_type for node in update.model.graph] == ["Reshape", ELEMENTWISE]
    assert [found.name for found in update.model.graph.outputs] == ["next"]


@pytest.mark.parametrize("stays", ["another reads it", "an output", "a shape that a caller may give"])
def test_a_reshape_that_stays(stays):
    step = reshaped()
    reshape = step.graph[1]
    if stays == "another reads it":
        end = value("end", (64, 64))
        step.graph.append(ir.Node("", "Neg", [reshape.outputs[0]], outputs=[end]))
        step.graph.outputs.append(end)
    elif stays == "an output":
        step.graph.outputs.append(reshape.outputs[0])
    else:
        step.graph.inputs.append(reshape.inputs[1])
    update = taken(step, CARRIED)
    assert update.reads == {"old": (64, 64), "g": (64, 64), "rate": ()}
    assert "Reshape" in [node.op_type for node in step.graph]
    assert [node.op_type for node in update.model.graph] == [ELEMENTWISE]
