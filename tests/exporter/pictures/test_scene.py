"""What a picture shows, without positions."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from exporter.files.read import open_model
from exporter.pictures.scene import Drawn, facts_of, facts_of_node, title_of

TEXT = """<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y)
    {{ a = Relu(x) b = Exp(a) c = Round(b) d = Neg(c) y = Add(d, x) }}"""


def drawn_of(*modules):
    model = ir.from_proto(onnx.parser.parse_model(TEXT.format()))
    for node, module in zip(model.graph, modules, strict=True):
        node.metadata_props["pythonop.module"] = module
    return Drawn(model)


@pytest.fixture
def drawn():
    return drawn_of("net.first", "net.first", "net.last.inner", "net.last.inner", "")


def boxes(scene):
    return [(box.kind, box.title) for box in scene.boxes]


def test_depths_fold(drawn):
    assert drawn.deepest == 4
    assert [drawn.count(depth) for depth in range(5)] == [1, 2, 3, 4, 5]
    assert boxes(drawn.whole(0)) == [("module", "the model"), ("input", "x"), ("output", "y")]
    assert boxes(drawn.whole(1)) == [("module", "net"), ("node", "Add"), ("input", "x"), ("output", "y")]
    assert boxes(drawn.whole(2))[:2] == [("module", "first"), ("module", "last")]
    assert [box.nodes[0].op_type for box in drawn.whole(4).boxes[:5]] == ["Relu", "Exp", "Round", "Neg", "Add"]
    assert drawn.depth_for(3) == 2
    assert drawn.depth_for(0) == 1


def test_arrows_join_boxes(drawn):
    scene = drawn.whole(2)
    ends = {(scene.boxes[a.source].title, scene.boxes[a.target].title): [v.name for v in a.values] for a in scene.arrows}
    assert ends == {("first", "last"): ["b"], ("last", "Add"): ["d"], ("x", "first"): ["x"], ("x", "Add"): ["x"], ("Add", "y"): ["y"]}


def test_one_module(drawn):
    scene = drawn.inside(("forward", ("net", "first")))
    assert boxes(scene) == [("node", "Relu"), ("node", "Exp"), ("outside", "net.last"), ("input", "x")]
    ends = {(scene.boxes[a.source].title, scene.boxes[a.target].title) for a in scene.arrows}
    assert ends == {("x", "Relu"), ("Relu", "Exp"), ("Exp", "net.last")}


def test_a_module_that_holds_one_module_opens_it(drawn):
    assert drawn.home(("forward", ("net", "last"))) == ("forward", ("net", "last", "inner"))
    assert drawn.home(("forward", ("net",))) == ("forward", ("net",))


def test_frames_hold_what_is_open(drawn):
    (net,) = drawn.whole(4).clusters
    assert (net.title, [inner.title for inner in net.inside]) == ("net", ["net.first", "net.last.inner"])


def test_stops_and_python_ops(drawn, samples):
    assert [box.title for box in drawn.whole(4).boxes if box.stops] == ["Round"]
    scene = Drawn(open_model(samples["gradient"])).whole(9)
    assert [(box.title, box.part) for box in scene.boxes if box.python] == [("Scale", "forward")] * 2 + [("Scale", "gradient")] * 2
    assert [box.title for box in scene.boxes if box.stops] == ["StopGradient"]


def test_what_no_gradient_reaches():
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[2] x, float[2] z) => (float[2] y, float[2] w) { y = Relu(x) w = Neg(z) }"""
    import exporter

    built = exporter.build_gradient_graph(ir.from_proto(onnx.parser.parse_model(text)), wrt=["x", "z"], outputs=["y"])
    scene = Drawn(built).whole(9)
    assert {(box.kind, box.title) for box in scene.boxes if box.stops} >= {("input", "z")}
    assert ("input", "x") not in {(box.kind, box.title) for box in scene.boxes if box.stops}


def test_a_training_step_shows_no_state(samples):
    scene = Drawn(open_model(samples["step"])).whole(1)
    assert {box.title for box in scene.boxes if box.kind == "input"} == {"input", "target", "learning_rate", "weight_decay"}
    assert {box.title for box in scene.boxes if box.kind == "output"} == {"loss"}
    assert {box.part for box in scene.boxes} == {"forward", "gradient", "update"}


def test_facts(samples):
    drawn = Drawn(open_model(samples["op"]))
    node = next(node for node in drawn.nodes if node.op_type == "PythonOp")
    facts = dict(facts_of_node(node, drawn.places))
    assert (title_of(node), facts["operator"]) == ("Scale", "com.microsoft::PythonOp")
    assert facts["attribute name"] == "tests.exporter.commands.cli_targets:Scale"
    assert "float[batch, 3]" in facts["makes"]
    module = Drawn(open_model(samples["op"])).whole(0).boxes[0]
    assert dict(facts_of(module))["PythonOps"] == "2 Scale"


def test_an_empty_graph(samples):
    scene = Drawn(open_model(samples["empty"])).whole(1)
    assert (scene.boxes, scene.arrows, scene.clusters) == ([], [], [])
