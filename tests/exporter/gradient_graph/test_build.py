"""The contract of build_gradient_graph: names, defaults, boundary, marks, errors."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import onnx
import onnx.helper as oh
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto

from exporter.gradient_graph.build import build_gradient_graph
from symbolics.errors import ArgumentError, FormatError, PythonopError, UnsupportedOperatorError
from symbolics.gradients import RULES, gradient
from symbolics.node.metadata import StateEntry, read_pairing, write_state
from symbolics.node.names import MARK_COUNT_KEY, STATE_KEY, VERSION_KEY
from tests.symbolics.gradients.tools import gradients, model_of, run


def parse(
    body: str, inputs: str = "float[2] x", outputs: str = "float[2] y", domains: str = "", opset: int = 20, weights: str = ""
) -> onnx.ModelProto:
    text = f'<ir_version: 9, opset_import: ["" : {opset}{domains}]> m ({inputs}) => ({outputs}) {weights} {{ {body} }}'
    return onnx.parser.parse_model(text)


def names(values) -> list[str]:
    return [v.name for v in values]


WEIGHTS = "<float[2] w = {1.0, 2.0}, float c = {3.0}, int64[1] i = {0}>"


# ------------------------------------------------------------------------------------------------------------ boundary
def test_inputs_outputs_and_metadata():
    training = build_gradient_graph(parse("y = Mul(x, w)", weights=WEIGHTS))
    assert names(training.graph.inputs) == ["x", "y_grad"]
    assert names(training.graph.outputs) == ["y", "w_grad", "x_grad"]
    pairing = read_pairing(training.metadata_props)
    assert dict(pairing.inputs) == {"y": "y_grad"}
    assert dict(pairing.outputs) == {"w": "w_grad", "x": "x_grad"}
    assert pairing.unreached == ()


def test_the_state_table_says_what_is_trainable():
    model = parse("t = Mul(x, w) y = Add(t, c)", weights=WEIGHTS)
    entries = {
        "weight": StateEntry("w", "parameter", False),
        "shift": StateEntry("c", "parameter", True),
        "gone": StateEntry("gone", "parameter", True),
    }
    oh.set_model_props(model, {STATE_KEY: write_state(entries), VERSION_KEY: "1"})
    assert list(read_pairing(build_gradient_graph(model).metadata_props).outputs) == ["c", "x"]


def test_an_explicit_name_that_nothing_reaches_gets_zeros_and_is_listed():
    training = build_gradient_graph(parse("y = Exp(x)", weights=WEIGHTS, inputs="float[2] x, float[3] u"), wrt=["x", "u", "w"])
    assert read_pairing(training.metadata_props).unreached == ("u", "w")
    got = run(training, {"x": np.ones(2, np.float32), "u": np.ones(3, np.float32), "y_grad": np.ones(2, np.float32)})
    np.testing.assert_array_equal(got["u_grad"], np.zeros(3))


def test_flat_operators_stop_the_gradient_without_a_word():
    got = gradients("float[2] x", "r = Round(x) y = Add(r, x)", {"x": np.ones(2, np.float32), "y_grad": np.ones(2, np.float32)})
    np.testing.assert_array_equal(got["x_grad"], [1, 1])


def test_a_value_that_is_input_and_output():
    training = build_gradient_graph(parse("y = Exp(x)", outputs="float[2] y, float[2] x"))
    pairing = read_pairing(training.metadata_props)
    assert dict(pairing.inputs) == {"y": "y_grad", "x": "x_grad_in"}
    assert dict(pairing.outputs) == {"x": "x_grad_out"}
    one = np.ones(2, np.float32)
    got = run(training, {"x": 0 * one, "y_grad": one, "x_grad_in": 2 * one}, ["x_grad_out"])
    np.testing.assert_allclose(got["x_grad_out"], [3, 3])


def test_a_taken_name():
    training = build_gradient_graph(parse("y_grad = Exp(x) x_grad = Sin(y_grad) y = Mul(x_grad, x)"))
    pairing = read_pairing(training.metadata_props)
    assert dict(pairing.inputs) == {"y": "y_grad_in"}
    assert dict(pairing.outputs) == {"x": "x_grad_out"}
    onnx.checker.check_model(ir.to_proto(training), full_check=True)


def test_two_names_with_one_gradient_get_an_output_each():
    got = gradients("float[2] x, float[2] u", "y = Add(x, u)", {k: np.ones(2, np.float32) for k in ("x", "u", "y_grad")})
    np.testing.assert_array_equal(got["x_grad"], got["u_grad"])


def test_the_callers_model_and_the_collector_stay_as_they_were():
    model = ir.from_proto(parse("y = Dropout(x, ratio, k)", inputs="float[2] x, float ratio, bool k"))  # its rule asks for the mask
    before = ir.to_proto(model).SerializeToString()
    assert gc.isenabled()
    build_gradient_graph(model, wrt=["x"])
    assert gc.isenabled()
    assert ir.to_proto(model).SerializeToString() == before


def test_forward_names_and_order_stay():
    model = parse("a = Exp(x) b = Relu(a) y = Mul(a, b)")
    training = build_gradient_graph(model)
    assert [n.outputs[0].name for n in training.graph][:3] == ["a", "b", "y"]


def test_nodes_of_each_order_have_names_of_their_own():
    """All values of the first gradient are outputs, which have other names than their nodes."""
    model = parse("y = Mul(x, w)", weights=WEIGHTS)
    for _ in range(3):
        model = build_gradient_graph(model)
        made = [node.name for node in model.graph if node.name]
        assert made and len(made) == len(set(made))


def test_a_deep_chain_of_scalars():
    """What asks whether a value is constant must not walk a whole model for it."""
    lines = [f"t{i + 1} = Mul(u, t{i}) u{i} = Clip(t{i + 1}, t{i})" for i in range(2000)]
    model = parse("t0 = Exp(x) u = Sin(x) " + " ".join(lines) + " y = Mul(u1999, x)", inputs="float x", outputs="float y")
    assert read_pairing(build_gradient_graph(model).metadata_props).unreached == ()


def test_builds_are_deterministic():
    model = parse("t = Softmax(x) y = Mul(t, w)", weights=WEIGHTS)
    assert ir.to_proto(build_gradient_graph(model)).SerializeToString() == ir.to_proto(build_gradient_graph(model)).SerializeToString()


@pytest.mark.parametrize("opset", range(13, 27))
def test_opsets(opset):
    body = (
        "a = ReduceMean<axes = [1]>(x) y = Softmax(a)"
        if opset < 18
        else "k = Constant<value_ints = [1]>() a = ReduceMean(x, k) y = Softmax(a)"
    )
    model = parse(body.replace("Softmax(a)", "Tanh(a)"), inputs="float[2,3] x", outputs="float[2,1] y", opset=opset)
    got = run(build_gradient_graph(model), {"x": np.zeros((2, 3), np.float32), "y_grad": np.ones((2, 1), np.float32)})
    np.testing.assert_allclose(got["x_grad"], np.full((2, 3), 1 / 3), rtol=1e-6)


def test_an_old_ir_version_lists_initializers_among_the_inputs():
    model = parse("y = Mul(x, w)", inputs="float[2] x, float[2] w", weights="<float[2] w = {1.0, 2.0}>")
    model.ir_version = 3
    assert set(read_pairing(build_gradient_graph(model).metadata_props).outputs) == {"w", "x"}


@pytest.mark.parametrize("opset", [9, 18])
def test_an_old_ir_version_whose_initializers_are_no_inputs(opset):
    """Against ONNX's letter; onnxruntime runs such a file."""
    model = parse("y = Mul(x, w)", weights="<float[2] w = {1.0, 2.0}>", opset=opset)
    model.ir_version = 3
    inputs = {"x": np.ones(2, np.float32)}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.run(None, inputs)[0].tolist() == [1, 2]
    got = run(build_gradient_graph(model), {**inputs, "y_grad": np.ones(2, np.float32)})
    assert got["x_grad"].tolist() == [1, 2]


def test_external_data_is_not_loaded_whole(tmp_path):
    model = parse("y = Mul(x, w)", weights="<float[2] w = {1.0, 2.0}>")
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones(2, np.float32), "w"))
    onnx.save_model(model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.data")
    training = build_gradient_graph(tmp_path / "m.onnx")
    assert isinstance(training.graph.initializers["w"].const_value, ir.ExternalTensor)


# -------------------------------------------------------------------------------------------------------------- numbers
def test_fully_masked_rows_have_no_nan():
    body = "a = Where(m, x, low) p = Softmax(a) n = IsNaN(p) y = Where(n, zero, p)"
    body = "low = Constant<value_float = -inf>() zero = Constant<value_float = 0.0>() " + body
    model = model_of("float[2,3] x, bool[2,3] m", body.replace("<value_float = -inf>", "<value = float {0.0}>"))
    constant = next(n for n in model.graph.node if n.output[0] == "low")
    constant.attribute[0].t.CopyFrom(oh.make_tensor("low", TensorProto.FLOAT, [], [-np.inf]))
    mask = np.array([[True, False, True], [False] * 3])
    got = run(
        build_gradient_graph(model), {"x": np.ones((2, 3), np.float32), "m": mask, "y_grad": np.array([[1, 2, 3], [4, 5, 6]], np.float32)}
    )
    np.testing.assert_allclose(got["x_grad"], [[-0.5, 0, 0.5], [0, 0, 0]])


@pytest.mark.parametrize("op", ["Max", "Min"])
def test_ties_share_evenly(op):
    one = np.ones(2, np.float32)
    got = gradients("float[2] x, float[2] u", f"y = {op}(x, u)", {"x": one, "u": one, "y_grad": one})
    np.testing.assert_array_equal(got["x_grad"], [0.5, 0.5])


def test_a_cast_casts_the_gradient_back():
    model = parse("h = Cast<to = 10>(x) e = Mul(h, h) y = Cast<to = 11>(e)", outputs="double[2] y")
    training = build_gradient_graph(model)
    got = run(training, {"x": np.array([1, 3], np.float32), "y_grad": np.ones(2)})
    assert got["x_grad"].dtype == np.float32
    np.testing.assert_allclose(got["x_grad"], [2, 6], rtol=1e-3)


def test_quantization_is_straight_through_within_its_range():
    body = "s = Constant<value = float {0.1}>() q = QuantizeLinear(x, s) y = DequantizeLinear(q, s)"
    got = gradients("float[3] x", body, {"x": np.array([0.52, -5, 50], np.float32), "y_grad": np.ones(3, np.float32)})
    np.testing.assert_allclose(got["x_grad"], [1, 0, 0], atol=1e-6)


# ------------------------------------------------------------------------------------------------------------ the marks
MARKS = ', "pythonop" : 1'


def test_marks_stop_gradients_of_every_order():
    model = parse("s = pythonop.StopGradient(x) z = Mul(s, x) y = Mul(z, x)", domains=MARKS)
    oh.set_model_props(model, {MARK_COUNT_KEY: "1"})
    body = oh.make_function("pythonop", "StopGradient", ["x"], ["y"], [oh.make_node("Identity", ["x"], ["y"])], [oh.make_opsetid("", 20)])
    model.functions.append(body)
    training = build_gradient_graph(model)
    assert training.metadata_props[MARK_COUNT_KEY] == "1"
    got = run(training, {"x": np.array([2, 3], np.float32), "y_grad": np.ones(2, np.float32)})
    np.testing.assert_array_equal(got["x_grad"], [8, 18])  # 2 s x, s = x
    second = build_gradient_graph(training, wrt=["x"], outputs=["x_grad"])
    taken, given = read_pairing(second.metadata_props).inputs["x_grad"], read_pairing(second.metadata_props).outputs["x"]
    got = run(second, {"x": np.array([2, 3], np.float32), "y_grad": np.ones(2, np.float32), taken: np.ones(2, np.float32)})
    np.testing.assert_array_equal(got[given], [4, 6])  # 2 s


def test_a_marked_output_keeps_its_name():
    training = build_gradient_graph(parse("e = Exp(x) y = pythonop.StopGradient(e)", domains=MARKS))
    assert names(training.graph.outputs)[0] == "y"
    assert read_pairing(training.metadata_props).unreached == ("x",)


def test_lost_marks_are_refused():
    model = parse("s = Identity(x) y = Mul(s, x)")
    oh.set_model_props(model, {MARK_COUNT_KEY: "1"})
    with pytest.raises(FormatError, match=r"1 stop-gradient marks .* and has 0.*as the exporter saved it"):
        build_gradient_graph(model)


def test_a_newer_format_is_refused():
    model = parse("y = Exp(x)")
    oh.set_model_props(model, {VERSION_KEY: "99"})
    with pytest.raises(FormatError, match="newer"):
        build_gradient_graph(model)


# ------------------------------------------------------------------------------------------------- functions, own rules
def test_model_local_functions_are_expanded_where_gradients_flow():
    model = parse("y = my.Twice(x)", domains=', "my" : 1')
    model.functions.append(
        oh.make_function("my", "Twice", ["a"], ["b"], [oh.make_node("Mul", ["a", "a"], ["b"])], [oh.make_opsetid("", 20)])
    )
    got = run(build_gradient_graph(model), {"x": np.array([2, 3], np.float32), "y_grad": np.ones(2, np.float32)})
    np.testing.assert_array_equal(got["x_grad"], [4, 6])


def test_a_rule_of_the_users_own_and_an_override():
    @gradient("Square", domain="my")
    def square(op, node, g):
        return [2.0 * node.inputs[0] * g]

    try:
        training = build_gradient_graph(parse("y = my.Square(x)", domains=', "my" : 1'))
        assert {n.op_type for n in training.graph} == {"Square", "Mul"}
        replaced = build_gradient_graph(parse("y = Exp(x)"), overrides={"Exp": lambda op, node, g: [-g]})
        assert [n.op_type for n in replaced.graph] == ["Exp", "Neg"]
        assert [n.op_type for n in build_gradient_graph(parse("y = Exp(x)")).graph] == ["Exp", "Mul"]
    finally:
        del RULES["my", "Square"]


def test_a_rule_with_too_many_gradients():
    with pytest.raises(PythonopError, match=r"Exp.*returned 2 gradients for 1 inputs"):
        build_gradient_graph(parse("y = Exp(x)"), overrides={"Exp": lambda op, node, g: [g, g]})


# ------------------------------------------------------------------------------------------------------------ bad input
def test_an_unknown_operator_is_named_with_node_module_and_way_out():
    model = parse("h = Exp(x) y = my.Mystery(h)", domains=', "my" : 1')
    node = model.graph.node[1]
    node.name = "mystery_7"
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layers.3', 'mystery']")
    with pytest.raises(
        UnsupportedOperatorError, match=r"my::Mystery \(node 'mystery_7'.*layers\.3.*@exporter\.gradient\('Mystery', domain='my'\)"
    ):
        build_gradient_graph(model)


def test_an_unknown_operator_off_the_path_does_no_harm():
    build_gradient_graph(parse("h = my.Mystery(u) y = Mul(h, x)", inputs="float[2] x, float[2] u", domains=', "my" : 1'), wrt=["x"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrt": ["z"]}, "no such input or initializer.*'x'"),
        ({"wrt": ["i"]}, "only floating point"),
        ({"wrt": ["x", "x"]}, "twice"),
        ({"wrt": "x"}, "list of names"),
        ({"outputs": ["q"]}, "no such output"),
        ({"wrt": ["w"], "outputs": ["z"]}, "depend on nothing in wrt"),
    ],
)
def test_names_that_do_not_fit(options, message):
    model = parse("y = Mul(x, w) z = Exp(x)", outputs="float[2] y, float[2] z", weights=WEIGHTS)
    with pytest.raises(PythonopError, match=message):
        build_gradient_graph(model, **options)


@pytest.mark.parametrize("options", [{"wrt": ["z"]}, {"wrt": ["i"]}, {"outputs": ["q"]}])
def test_wrong_names_are_value_errors_too(options):
    with pytest.raises(ValueError, match="names"):
        build_gradient_graph(parse("y = Mul(x, w)", weights=WEIGHTS), **options)


def two_makers() -> onnx.ModelProto:
    model = parse("y = Exp(x)")
    model.graph.node.append(oh.make_node("Sin", ["x"], ["y"], name="second"))
    return model


def renamed(body: str, **changes: str) -> onnx.ModelProto:
    """A model whose first node is changed after parsing."""
    model = parse(body)
    for key, value in changes.items():
        if key == "input":
            model.graph.node[0].input[0] = value
        else:
            setattr(model.graph.node[0], key, value)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: renamed("y = Exp(x)", name="lost", input="nowhere"), "nowhere.*lost"),
        (lambda: renamed("y = Exp(x)", name="strange", op_type="Strange"), "Strange"),
        (lambda: parse("y = Add(x)"), "Add"),
        (lambda: parse("y = my.Op(x)"), "my"),
        (lambda: parse("y = Exp<wrong = 1>(x)"), "wrong.*Exp"),
        (two_makers, "y"),
    ],
)
def test_what_the_checker_refuses_is_refused(model, message):
    with pytest.raises(FormatError, match=f"(?s)onnx.checker.*{message}|read.*{message}"):
        build_gradient_graph(model())


def test_an_attribute_of_a_newer_opset_does_no_harm():
    build_gradient_graph(parse('y = SpaceToDepth<blocksize = 2, mode = "CRD">(x)', inputs="float[1,1,2,2] x", outputs="float[1,4,1,1] y"))


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(FormatError, match=r"text\.onnx.*no ONNX model"):
        build_gradient_graph(tmp_path / "text.onnx")
    with pytest.raises(FileNotFoundError):
        build_gradient_graph(tmp_path / "absent.onnx")


@pytest.mark.parametrize("version", range(7, 15))
@pytest.mark.parametrize("opset", [18, 20, 23, 26])
def test_the_ir_version_is_the_oldest_that_serves(version, opset):
    model = parse("y = Mul(x, w)", weights=WEIGHTS, opset=opset)
    model.ir_version = version
    training = build_gradient_graph(model)
    assert training.ir_version == min(max(version, 8), {18: 8, 20: 9, 23: 11, 26: 13}[opset])
    one = np.ones(2, np.float32)
    np.testing.assert_array_equal(run(training, {"x": one, "y_grad": one})["x_grad"], [1, 2])


def test_contents_ask_for_an_ir_version_too():
    model = parse("h = Cast<to = 17>(x) y = Cast<to = 1>(h)", opset=19)
    model.ir_version = 13
    assert build_gradient_graph(model).ir_version == 9
    model.graph.node[0].attribute[0].i = TensorProto.FLOAT8E8M0
    next(iter(model.opset_import)).version = 24
    assert build_gradient_graph(model).ir_version == 12
    model = parse("y = Exp(x)", opset=18)
    model.ir_version = 13
    model.graph.node[0].metadata_props.add(key="namespace", value="layer")
    assert build_gradient_graph(model).ir_version == 10


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("on_disk", [True, False])
def test_more_than_two_gigabytes(tmp_path, opset, on_disk):
    """The weights are zeros that nobody wrote: a hole in a file, or memory never touched."""
    n = 17_000
    model = parse(
        "a = MatMul(x, v) s = Softmax(a) y = MatMul(s, w)", inputs=f"float[1,{n}] x, float[{n},{n}] v, float[{n},{n}] w",
        outputs=f"float[1,{n}] y", opset=opset,
    )  # fmt: skip
    del model.graph.input[1:]
    loaded: ir.Model | None = None
    if on_disk:
        with open(tmp_path / "weights", "wb") as file:
            file.truncate(2 * 4 * n * n)
        for i, name in enumerate("vw"):
            tensor = model.graph.initializer.add(name=name, dims=[n, n], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
            for key, value in (("location", "weights"), ("offset", 4 * n * n * i), ("length", 4 * n * n)):
                tensor.external_data.add(key=key, value=str(value))
        (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    else:
        for name in "vw":  # so that the reader knows them
            model.graph.initializer.append(oh.make_tensor(name, TensorProto.FLOAT, [1], [0]))
        loaded = ir.from_proto(model)
        for value in loaded.graph.initializers.values():
            value.const_value = ir.tensor(np.zeros((n, n), np.float32), name=value.name)
            value.shape = ir.Shape([n, n])
    tracemalloc.start()
    training = build_gradient_graph(loaded or tmp_path / "model.onnx")
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    assert set(read_pairing(training.metadata_props).outputs) == {"v", "w", "x"}
    assert list(training.graph.initializers)[:2] == ["v", "w"]
    assert all(training.graph.initializers[k].const_value.shape == (n, n) for k in "vw")


def test_something_that_is_no_model():
    with pytest.raises(PythonopError, match="not int"):
        build_gradient_graph(3)


# ----------------------------------------------------------------------------------------------- what a file says wrongly
@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({5: lambda op, g, x: g}, "the key 5: give the operator's name"),
        ({("", "Relu", 3): lambda op, g, x: g}, "the key"),
        ({(1, "Relu"): lambda op, g, x: g}, "the key"),
        ({None: lambda op, g, x: g}, "the key None"),
        ({"Relu": 3}, "3 for 'Relu': give a rule"),
        ({"Relu": None}, "None for 'Relu'"),
    ],
)
def test_overrides_are_rules_of_operators(overrides, why):
    with pytest.raises(ArgumentError, match=f"overrides has {why}"):
        build_gradient_graph(parse("y = Relu(x)"), overrides=overrides)
