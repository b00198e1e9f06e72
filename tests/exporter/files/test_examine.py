"""What the one reader refuses before anything of a model is computed: counts, sizes and places that a file lies about."""

from __future__ import annotations

import contextlib
import itertools
import tracemalloc

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, parser

import exporter
from exporter.files.examine import check_calls, check_tensor
from exporter.files.inspect import inspect_model
from exporter.files.proto import open_proto
from exporter.files.read import open_model
from symbolics.errors import FormatError, RunError
from symbolics.gradients import RULES, Rule
from symbolics.node.limits import MAX_CALLS, MAX_EXPANDED, MAX_NESTED, MAX_RANK
from tests.support import processor_time

READERS = {
    "model": open_model,
    "proto": open_proto,
    "inspect": lambda model: inspect_model(open_model(model, data=False)),
    "gradient": exporter.build_gradient_graph,
    "load": exporter.load,
    "session": exporter.inference_session,
    "reference": exporter.reference_evaluator,
}
everybody = pytest.mark.parametrize("read", READERS.values(), ids=READERS)
whoever_computes = pytest.mark.parametrize(
    "read", [v for k, v in READERS.items() if k != "inspect"], ids=[k for k in READERS if k != "inspect"]
)


def model(body: str = "y = Mul(x, w)", head: str = "") -> onnx.ModelProto:
    return parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18, "f": 1]> g (float[2] x) => (float[2] y) <float[2] w = {{1, 2}}{head}> {{ {body} }}'
    )


def with_calls(levels: int, calls: int = 2) -> onnx.ModelProto:
    """Functions that each call the next so many times: calls ** levels nodes, in a few lines."""
    proto = model("y = f.f0(x)")
    for i in range(levels):
        names = ["x", *[f"v{k}" for k in range(calls - 1)], "y"]
        called, domain = ("Relu", "") if i == levels - 1 else (f"f{i + 1}", "f")
        nodes = [helper.make_node(called, [a], [b], domain=domain) for a, b in itertools.pairwise(names)]
        proto.functions.append(
            helper.make_function("f", f"f{i}", ["x"], ["y"], nodes, [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)])
        )
    return proto


# ----------------------------------------------------------------------------------------------------------- functions
@everybody
@pytest.mark.parametrize("kind", ["proto", "ir"])
def test_a_billion_calls_are_counted_and_not_made(read, kind):
    proto = with_calls(30)
    with processor_time(2), pytest.raises(FormatError, match=r"stand for 2147483646 nodes, at most 65536"):
        read(proto if kind == "proto" else ir.from_proto(proto))


def nested(levels: int, nodes: int) -> onnx.ModelProto:
    """Bodies in bodies, the innermost of so many nodes; the outer half gives a name twice, which only onnx_ir's reader sees."""
    body = helper.make_graph([helper.make_node("Relu", ["x"], [f"r{i}"]) for i in range(nodes)], "innermost", [], [value_info("r0")])
    for level in range(levels):
        node = helper.make_node(
            "If", ["c"], [f"o{level}"], then_branch=body, else_branch=helper.make_graph([], "none", [], [value_info("x")])
        )
        body = helper.make_graph([node, node] if level > levels // 2 else [node], f"level{level}", [], [value_info(f"o{level}")])
    body.input.extend([value_info("x"), helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])])
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def value_info(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2])


@everybody
def test_bodies_in_bodies_are_counted_before_an_error_writes_them_down(read):
    """onnx_ir refuses the name that is given twice, and writes every body around it into its errors: 1.3 GiB for a file of 1.5 MB."""
    with processor_time(2), pytest.raises(FormatError, match=f"inside three bodies and more.* at most {MAX_NESTED} are read"):
        read(nested(13, 120))


@everybody
def test_a_function_that_calls_itself(read):
    for proto in (with_calls(1), with_calls(3)):
        proto.functions[-1].node[0].domain, proto.functions[-1].node[0].op_type = "f", "f0"
        with pytest.raises(FormatError, match=r"the function f::f\d: it calls itself"):
            read(proto)


def test_how_deep_functions_may_call():
    open_model(with_calls(MAX_CALLS, 1))
    for order in (1, -1):  # whichever stands first
        proto = with_calls(MAX_CALLS + 1, 1)
        functions = list(proto.functions)[::order]
        del proto.functions[:]
        proto.functions.extend(functions)
        with pytest.raises(FormatError, match=f"more than {MAX_CALLS} deep"):
            open_model(proto)


def test_counts_are_exact():
    chain = {("f", str(i), ""): [("f", str(i + 1), "")] * 2 for i in range(3)} | {("f", "3", ""): [("", "Relu", "")]}
    check_calls([("f", "0", "")], chain)
    wide = {("f", "g", ""): [("", "Relu", "")] * 8}
    check_calls([("f", "g", "")] * (MAX_EXPANDED // 8), wide)
    with pytest.raises(FormatError, match=f"{MAX_EXPANDED + 8} nodes"):
        check_calls([("f", "g", "")] * (MAX_EXPANDED // 8 + 1), wide)


def test_calls_in_bodies_count():
    proto = with_calls(30)
    call = proto.graph.node[0]
    branch = helper.make_graph([helper.make_node("f0", ["x"], ["z"], domain="f")], "b", [], [helper.make_tensor_value_info("z", 1, [2])])
    condition = helper.make_tensor("c", TensorProto.BOOL, [], [True])
    proto.graph.initializer.append(condition)
    call.CopyFrom(helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch))
    with pytest.raises(FormatError, match=r"stand for 4294967292 nodes"):
        open_model(proto)


# -------------------------------------------------------------------------------------------------------------- tensors
def lying(**changes) -> onnx.ModelProto:
    proto = model()
    (weight,) = proto.graph.initializer
    for field, value in changes.items():
        weight.ClearField(field)
        if isinstance(value, list):
            getattr(weight, field).extend(value)
        elif value is not None:
            setattr(weight, field, value)
    return proto


LIES = {
    "more dims than data": {"dims": [10**6, 10**6]},
    "a negative dim": {"dims": [-2]},
    "dims without data": {"float_data": None, "raw_data": None, "dims": [10**12]},
    "raw data cut": {"float_data": None, "raw_data": b"\0\0\0"},
    "two sources": {"float_data": [1.0, 2.0], "raw_data": b"\0" * 8},
    "data of another field": {"raw_data": None, "float_data": None, "int64_data": [1, 2]},
    "a type that is none": {"data_type": 99},
    "no type": {"data_type": 0},
    "strings": {"data_type": TensorProto.STRING},
    "65 dims": {"dims": [2, *[1] * MAX_RANK]},
}


@everybody
@pytest.mark.parametrize("changes", LIES.values(), ids=LIES)
def test_a_tensor_whose_data_are_not_what_it_says(read, changes):
    with processor_time(2), pytest.raises(FormatError):
        read(lying(**changes))


@pytest.mark.parametrize("kind", [k for k in ir.DataType if k is not ir.DataType.UNDEFINED], ids=lambda k: k.name)
@pytest.mark.parametrize("shape", [(3,), (), (2, 0)], ids=str)
def test_honest_tensors_of_every_type_pass(kind, shape):
    if kind is ir.DataType.STRING:
        check_tensor(helper.make_tensor("s", kind, shape, [b"a"] * int(np.prod(shape))))
        return
    tensor = ir.serde.serialize_tensor(ir.tensor(np.zeros(shape).astype(kind.numpy()), dtype=kind, name="t"))
    check_tensor(tensor)
    check_tensor(helper.make_tensor("t", kind, shape, np.zeros(int(np.prod(shape)))))


@everybody
def test_a_tensor_in_an_attribute_of_a_function(read):
    proto = with_calls(1)
    constant = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", 1, [2], [1.0, 2.0]))
    constant.attribute[0].t.dims[0] = 10**9
    proto.functions[0].node.insert(0, constant)
    with pytest.raises(FormatError, match=r"its data are not 1000000000 elements"):
        read(proto)


# ----------------------------------------------------------------------------------------------------- data outside
def external(**entries: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "data", **entries}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


BAD = {
    "an offset that is no number": ({"offset": "x"}, "no numbers"),
    "a negative offset": ({"offset": "-8"}, "no numbers"),
    "an offset of many digits": ({"offset": "9" * 30}, "no numbers"),
    "an offset beyond the file": ({"offset": "4096"}, "cut off"),
    "another length": ({"length": "4"}, "8"),
    "a length of the whole machine": ({"length": str(10**17)}, "elements of type FLOAT have 8"),
    "no location": ({"location": ""}, "relative path"),
    "NUL": ({"location": "data\0"}, "relative path"),
    "an address in memory": ({"location": "*/_ORT_MEM_ADDR_/*", "offset": "4096"}, "takes for an address in memory"),
    "a long name": ({"location": "a" * 300}, "cannot be the name of a file here: File name too long"),
}


@whoever_computes
@pytest.mark.parametrize(("entries", "match"), BAD.values(), ids=BAD)
def test_places_that_are_none(read, entries, match, tmp_path):
    proto = model()
    proto.graph.initializer[0].CopyFrom(external(**entries))
    (tmp_path / "data").write_bytes(np.array([1, 2], np.float32).tobytes())
    (tmp_path / "*" / "_ORT_MEM_ADDR_").mkdir(parents=True)  # onnxruntime does not ask whether there is a file of that name; we did
    (tmp_path / "*" / "_ORT_MEM_ADDR_" / "*").write_bytes(bytes(8192))
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(FormatError, match=match):
        read(tmp_path / "model.onnx")


@pytest.mark.parametrize("kind", ["proto", "ir"])
def test_every_graph_is_looked_into(kind, tmp_path):
    """Of the tensors of a model in memory, only those of the last graph had been looked at."""
    proto = model(
        "z = Mul(x, w) y = If(c) <then_branch = t () => (float[2] r) { r = Relu(z) }, else_branch = e () => (float[2] q) { q = Abs(z) }>"
    )
    proto.graph.initializer.append(helper.make_tensor("c", TensorProto.BOOL, [], [True]))
    proto.graph.initializer[0].CopyFrom(external(location="../secret"))
    source = proto if kind == "proto" else ir.from_proto(proto)
    with pytest.raises(FormatError, match="relative path"):
        open_model(source)


# ---------------------------------------------------------------------------------------------------------------- texts
@everybody
@pytest.mark.parametrize("where", ["node", "input", "value_info"])
def test_names_that_are_no_text(read, where):
    proto = model("v = Mul(x, w) y = Relu(v)")
    proto.graph.value_info.append(helper.make_tensor_value_info("v", 1, [2]))
    marker = "nodename" if where == "node" else "v"
    proto.graph.node[0].name = "nodename"
    data = proto.SerializeToString()
    data = data.replace(b"\x08nodename", b"\x08node\xff\xfe\xfdx") if marker == "nodename" else data.replace(b"\x01v", b"\x01\xff")
    with pytest.raises(FormatError):
        read(data)


@everybody
def test_ranks_that_nothing_has(read):
    proto = model("v = Mul(x, w) y = Relu(v)")
    proto.graph.value_info.append(helper.make_tensor_value_info("v", 1, [1] * 1000))
    with pytest.raises(FormatError, match="declared with 1000 dims"):
        read(proto)


# ------------------------------------------------------------------------------------------------------- the gradient
GROWING = {
    "ConstantOfShape": "s = Constant <value = int64[2] {1000000, 1000000}> () big = ConstantOfShape(s)",
    "Expand": "s = Constant <value = int64[2] {1000000, 1000000}> () one = Constant <value = float {1}> () big = Expand(one, s)",
    "Tile": "s = Constant <value = int64[1] {1000000000000}> () one = Constant <value = float[1] {1}> () big = Tile(one, s)",
    "Range": "a = Constant <value = int64 {0}> () b = Constant <value = int64 {1000000000000}> () d = Constant <value = int64 {1}> () "
    "r = Range(a, b, d) big = Cast <to = 1> (r)",
    "three vectors": "n = Constant <value = int64[3] {4000, 1, 1}> () m = Constant <value = int64[3] {1, 4000, 1}> () "
    "k = Constant <value = int64[3] {1, 1, 4000}> () p = ConstantOfShape(n) q = ConstantOfShape(m) r = ConstantOfShape(k) big = Sum(p, q, r)",
    "one vector many times": "n = Constant <value = int64[1] {4000}> () p = ConstantOfShape(n) big = Concat <axis = 0> ("
    + ", ".join(["p"] * 9000)
    + ")",
    "a chain that doubles": "n = Shape(x) "
    + " ".join(f"n{i} = Concat <axis = 0> (n{i - 1 if i else ''}, n{i - 1 if i else ''})" for i in range(34))
    + " big = Cast <to = 1> (n33)",
    "a product of numbers": "a = Constant <value = int64[1] {1000000}> () b = Mul(a, a) c = Reshape(x, b) big = Concat <axis = 0> (c, c)",
    "Size": "a = Constant <value = int64[2] {1000000, 1000000}> () b = Expand(x, a) c = Size(b) d = Reshape(c, vec) e = Reshape(x, d) "
    "big = Concat <axis = 0> (e, e)",
    "Reshape": "s = Constant <value = int64[1] {1000000000}> () n = ConstantOfShape <value = int64[1] {1}> (s) big = Reshape(x, n)",
}


@pytest.mark.unusable(reason="onnxruntime computes shapes that are as long as the values")
@pytest.mark.parametrize("body", GROWING.values(), ids=GROWING)
def test_building_a_gradient_makes_nothing_large(body):
    """What the model computes at run time is the runtime's business: building its gradient must not compute it."""
    proto = model(
        f"vec = Constant <value = int64[1] {{1}}> () {body} total = ReduceSum <keepdims = 0> (big) v = Mul(x, w) y = Mul(v, total)"
    )
    with processor_time(20):
        tracemalloc.start()
        exporter.build_gradient_graph(proto)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 64 << 20


HUGE = {
    "AveragePool": (
        "float[1, 1, N, M] x",
        "y = AveragePool <kernel_shape = [1000000, 1000000], pads = [999999, 999999, 999999, 999999]> (x)",
    ),
    "LpPool": ("float[1, 1, N, M] x", "y = LpPool <kernel_shape = [1000000, 1000000], pads = [999999, 999999, 999999, 999999]> (x)"),
    "counts": ("float[1, 1, 10000000, 10000000] x", "y = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x)"),
    "Conv": ("float[1, 1, 1000000, 1000000] x, float[1, 1, 100000, 100000] u", "y = Conv(x, u)"),
    "LayerNormalization": ("float[2, 10000000000] x, float[10000000000] u", "y = LayerNormalization(x, u)"),
    "Det": ("float[1000000, 1000000] x", "y = Det(x)"),
    "MaxRoiPool": ("float[1, 1, 4, 4] x, float[1, 5] u", "y = MaxRoiPool <pooled_shape = [10000000000, 2]> (x, u)"),
    "RoiAlign": (
        "float[1, 1, 4, 4] x, float[1, 4] u, int64[1] b",
        "y = RoiAlign <output_height = 1000000000, output_width = 2, sampling_ratio = 1000000000> (x, u, b)",
    ),
    "Col2Im": (
        "float[1, 1, N] x",
        "s = Constant <value = int64[2] {1000000, 1000000}> () k = Constant <value = int64[2] {100000, 100000}> () y = Col2Im(x, s, k)",
    ),
    "DeformConv": (
        "float[1, 1, 4, 4] x, float[1, 1, A, B] u, float[1, C, D, E] o",
        "y = DeformConv <kernel_shape = [100000, 100000]> (x, u, o)",
    ),
}


@pytest.mark.parametrize("declared", [2**53, "N"])
@pytest.mark.parametrize("kind", ["float", "int64"])
def test_vectors_that_are_declared_long(declared, kind):
    """ONNX's inference, following shapes, writes such a vector down element by element."""
    body = "s = Concat <axis = 0> (x, x) a = Constant <value = int64[1] {0}> () u = Unsqueeze(s, a) z = Squeeze(u, a) c = Cast <to = 1> (z) y = Relu(c)"
    proto = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g ({kind}[{declared}] x, float[2] w) => (float y) {{ {body} v = Mul(w, w) }}'
    )
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    with processor_time(5):
        exporter.build_gradient_graph(proto)


@pytest.mark.parametrize(("inputs", "body"), HUGE.values(), ids=HUGE)
def test_what_attributes_and_declared_shapes_ask_for(inputs, body):
    proto = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> g ({inputs}) => (float y) {{ {body} }}')
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    with processor_time(20):
        tracemalloc.start()
        with contextlib.suppress(FormatError, exporter.UnsupportedOperatorError):
            exporter.build_gradient_graph(proto)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 512 << 20


@pytest.mark.parametrize("open_it", [lambda proto: proto, ir.from_proto], ids=["message", "onnx_ir"])
def test_an_attribute_that_refers_to_one_of_no_function(open_it):
    """onnx.checker passes it."""
    proto = model('v = Resize <mode = "linear"> (x, , w) y = Relu(v)')
    attribute = proto.graph.node[0].attribute[0]
    attribute.ClearField("s")
    attribute.ref_attr_name = "nothing"
    for surface in (exporter.build_gradient_graph, exporter.load, exporter.inference_session):
        with pytest.raises(FormatError, match="'mode' of Resize.*refers to the attribute 'nothing' of a function"):
            surface(open_it(proto))


@everybody
@pytest.mark.parametrize("said", [1, 1 << 27, 1 << 60, -1, "count"])
def test_a_split_into_another_number_than_it_has_outputs(read, said):
    """ONNX makes a type for each, whatever the number is; onnxruntime ends the process where it says 1 and the node has 2."""
    split = helper.make_node("Split", ["x"], ["y", "z"], num_outputs=1 if said == "count" else said)
    proto = model("y = Relu(x)")
    if said == "count":
        split.attribute[0].ClearField("i")
        split.attribute[0].ref_attr_name = "count"
        opsets = [helper.make_opsetid("", 18)]
        proto.functions.append(helper.make_function("f", "halves", ["x"], ["y", "z"], [split], opsets, ["count"]))
        split = helper.make_node("halves", ["x"], ["y", "z"], domain="f", count=1 << 27)
    proto.graph.node[0].CopyFrom(split)
    for given in (proto, ir.from_proto(proto)):
        with pytest.raises(FormatError, match=f"the Split ''.*it has 2 outputs, and num_outputs says {said}"):
            read(given)


@everybody
@pytest.mark.parametrize(
    ("operator", "attribute", "said"),
    [("GatherND", "batch_dims", -1), ("GatherND", "batch_dims", 1 << 40), ("LayerNormalization", "axis", 1 << 31)],
)
def test_an_axis_that_no_tensor_has(read, operator, attribute, said):
    """ONNX's inference reads what is none of its memory."""
    proto = model("y = Relu(x)")
    proto.graph.node[0].CopyFrom(helper.make_node(operator, ["x", "w"], ["y"], "n", **{attribute: said}))
    for given in (proto, ir.from_proto(proto)):
        with pytest.raises(FormatError, match=f"the {operator} 'n'.*its {attribute} is {said}, and no tensor has such an axis"):
            read(given)


def test_a_damaged_node_is_named(monkeypatch):
    def broken(op, g, x):
        raise IndexError("beyond the end")

    broken.__module__ = "symbolics.gradients.broken"
    monkeypatch.setitem(RULES, ("", "Relu"), Rule(broken))
    with pytest.raises(FormatError, match=r"the gradient of Relu \(.* cannot be built \(IndexError: beyond the end") as caught:
        exporter.build_gradient_graph(model("v = Mul(x, w) y = Relu(v)"))
    assert len(str(caught.value).splitlines()) <= 6


def test_what_a_rule_of_the_user_raises_is_theirs():
    def rule(op, g, x):
        raise KeyError("of the user")

    proto = model("v = Mul(x, w) y = Relu(v)")
    with pytest.raises(KeyError, match="of the user"):
        exporter.build_gradient_graph(proto, overrides={"Relu": rule})
    looped = model(
        "y = Loop(n, c, x) <body = b (int64 i, bool t, float[2] a) => (bool u, float[2] r) { u = Identity(t) r = Relu(a) }>",
        ", int64 n = {3}, bool c = {1}",
    )
    with pytest.raises(KeyError, match="of the user"):
        exporter.build_gradient_graph(looped, overrides={"Relu": rule})


# ------------------------------------------------------------------------------------------------- the runtimes' errors
def test_what_a_runtime_raises_is_ours_and_its_own():
    proto = model("y = Conv(x, w)")
    with pytest.raises(RunError, match="onnxruntime cannot run the model") as caught:
        exporter.inference_session(proto)
    assert any(base.__module__.startswith("onnxruntime.") for base in type(caught.value).__mro__)
    session = exporter.inference_session(model())
    with pytest.raises(RunError, match="Got: 5 Expected: 2"):
        session.run(None, {"x": np.zeros(5, np.float32)})
    with pytest.raises(RunError, match=r"onnx.reference cannot run the model"):
        exporter.reference_evaluator(model()).run(None, {"x": np.zeros(5, np.float32)})
