"""Files made by hand to crash, each a few lines of code: what a fuzzer needs luck to find stays found.

Every one must pass all surfaces without a finding; `Crasher.ends` says more where more is known.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper, parser

from symbolics.node.attributes import GRAD_SPECS
from symbolics.node.names import (
    FUNCTIONS_KEY,
    GRADIENTS_KEY,
    MARK_COUNT_KEY,
    OUTPUTS_KEY,
    RULES_KEY,
    STATE_KEY,
    STEP_KEY,
    STILLED_KEY,
    VALUES_KEY,
    VERSION_KEY,
)
from tests.exporter.runtime import build
from tests.fuzz import functions as F
from tests.fuzz.library import damaged_operators
from tests.fuzz.links import damaged_links, odd_links
from tests.fuzz.mutate import Case
from tests.fuzz.seeds import ABSOLUTE, CANARY

__all__ = ["CORPUS", "Crasher"]

Ends = dict[int, set[str]]
_REFUSED = {"ours"}
#: Whoever reads values of this file says that it is damaged.
_EVERYBODY: Ends = {2: _REFUSED, 3: _REFUSED, 5: _REFUSED, 6: _REFUSED}
#: Its PythonOp cannot be run.
_NOT_RUN: Ends = {3: {"ours", "runtime"}, 4: {"runtime"}, 6: {"ours", "runtime"}}


@dataclasses.dataclass
class Crasher:
    """A file made by hand.

    Attributes:
        make: Makes its bytes, and what lies beside it.
        ends: surface -> how it may end there; a surface that is not named may end as it likes, without a finding.
    """

    make: Callable[[], onnx.ModelProto | bytes]
    ends: Ends = dataclasses.field(default_factory=dict)
    files: dict[str, bytes | str] = dataclasses.field(default_factory=dict)

    def case(self, number: int) -> Case:
        """It as a case of the fuzzer."""
        made = self.make()
        return Case(number, "the corpus", [], made if isinstance(made, bytes) else made.SerializeToString(), dict(self.files))


# ------------------------------------------------------------------------------------------------------------- PythonOps


def _sine(dtype: torch.dtype = torch.float32) -> onnx.ModelProto:
    return build.forward(build.record(F.Sine, torch.ones(2, 4, dtype=dtype, requires_grad=True)))


def _with(model: onnx.ModelProto, node: int = 0, /, **attributes: Any) -> onnx.ModelProto:
    """The model with other attributes of one node; None takes one away."""
    found = model.graph.node[node]
    for name, value in attributes.items():
        for attribute in [a for a in found.attribute if a.name == name]:
            found.attribute.remove(attribute)
        if value is not None:
            found.attribute.append(helper.make_attribute(name, value, attr_type=onnx.AttributeProto.INTS if value == [] else None))
    return model


def _confused(attribute: int, declared: int, inputs: bool) -> onnx.ModelProto:
    """The node says one type, the graph another."""
    model = _with(_sine(), **{"input_tensor_types" if inputs else "output_tensor_types": [attribute]})
    (model.graph.input if inputs else model.graph.output)[0].type.tensor_type.elem_type = declared
    return model


def _types() -> Iterator[tuple[str, Crasher]]:
    for attribute, declared in (
        (11, 9),
        (1, 9),
        (1, 8),
        (8, 1),
        (9, 11),
        (7, 1),
        (14, 1),
        (16, 1),
        (22, 1),
        (0, 1),
        (99, 1),
        (2**31 + 1, 1),
    ):
        for inputs in (True, False):
            name = f"{'input' if inputs else 'output'} {attribute} declared {declared}"
            # An input is what it is: there, the attribute is a hint that nobody needs.
            yield name, Crasher(lambda a=attribute, d=declared, i=inputs: _confused(a, d, i), {} if inputs else _NOT_RUN)
    yield "double attribute, bool output", Crasher(lambda: _confused_double(), _NOT_RUN)
    yield "a string Function over numbers", Crasher(lambda: _with(_sine(), name=f"{F.__name__}:Strings"))
    yield (
        "strings said, numbers made",
        Crasher(lambda: _with(_confused(8, 8, False), input_requires_grads=[0], output_tensor_requires_grads=[0]), _NOT_RUN),
    )
    for kind in (TensorProto.STRING, TensorProto.INT4, TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN, TensorProto.COMPLEX64):
        for function in ("Sine", "RaisesBackward", "InPlace"):
            yield (
                f"{function} over inputs of type {kind}",
                Crasher(lambda kind=kind, function=function: _with(_confused(1, kind, True), name=f"{F.__name__}:{function}")),
            )
    yield "in place on an input", Crasher(lambda: _with(_sine(), name=f"{F.__name__}:InPlace"))
    yield "in place on an input, with a gradient", Crasher(lambda: _with(_training(), name=f"{F.__name__}:InPlace"))
    for rank in (2**31, 2**31 - 1, 2**62, -1, 3):
        for name in ("input_tensor_ranks", "output_tensor_ranks"):
            yield f"{name} {rank}", Crasher(lambda name=name, rank=rank: _with(_sine(), **{name: [rank]}))


def _confused_double() -> onnx.ModelProto:
    model = _sine(torch.float64)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.BOOL
    return model


def _lies() -> Iterator[tuple[str, Crasher]]:
    """Lists of attributes that are to be of one length and are not, and what else the attributes say against themselves."""
    for name in ("input_tensor_types", "input_tensor_ranks", "output_tensor_types", "output_tensor_ranks", "output_tensor_requires_grads",
                 "input_requires_grads"):  # fmt: skip
        for value in ([], [1, 1], [1] * 70_000):
            yield f"{name} of {len(value)}", Crasher(lambda name=name, value=value: _with(_sine(), **{name: value}))
        yield f"{name} of {name} alone without call", Crasher(lambda name=name: _with(_sine(), **{name: [1, 1, 1], "call": None}))
    for number, more in enumerate((
        {"input_int_tuples": [1, 2], "input_int_tuple_positions": [1], "input_int_tuple_begins": [5]},
        {"input_int_tuples": [1, 2], "input_int_tuple_positions": [1], "input_int_tuple_begins": [-(2**63)]},
        {"input_int_tuples": [1, 2], "input_int_tuple_positions": [1, 1, 1], "input_int_tuple_begins": [1, 0, 2]},
        {"input_int_scalars": [1], "input_int_scalar_positions": [2**62]}, {"input_int_scalars": [1], "input_int_scalar_positions": [-1]},
        {"input_int_scalars": 1, "input_int_scalar_positions": 1}, {"input_float_tuple_begins": 2**62}, {"input_float_scalars": "x"},
        {"input_int_scalars": [0.5], "input_int_scalar_positions": [1]}, {"input_pointer_scalars": [2**62], "input_pointer_scalar_positions": [1]},
        {"input_bool_scalars": 1, "input_bool_scalar_positions": [0.5]}, {"input_bool_tuple_begins": ["a"], "input_bool_tuples": ["b"]},
    )):  # fmt: skip
        yield (
            f"positions {number}",
            Crasher(
                lambda more=more: _with(
                    _sine(), name=f"{F.__name__}:Takes", call=None, input_convention="dc", input_requires_grads=[1, 0], **more
                )
            ),
        )
    for value in ("", "c", "d" * 100_000, "dd", "x", b"\xff", 1, [1]):
        yield f"convention {str(value)[:9]!r}", Crasher(lambda value=value: _with(_sine(), input_convention=value))
    for name in ("name", "call", "input_convention"):
        for value in (b"\xff\xfe", "", 1, [1], 0.5, b"\0"):
            yield f"{name} {value!r}", Crasher(lambda name=name, value=value: _with(_sine(), **{name: value}))
    for name in GRAD_SPECS:
        yield f"gradient without {name}", Crasher(lambda name=name: _with(_training(), 1, **{name: None}))
    for name in (
        "input_tensor_requires_grads",
        "output_tensor_requires_grads",
        "input_tensor_types",
        "output_tensor_types",
        "output_convention",
    ):
        for value in ([1, 1, 1], [], 1, "x", [2**62]):
            yield f"gradient: {name} {value!r}", Crasher(lambda name=name, value=value: _with(_training(), 1, **{name: value}))


def _training() -> onnx.ModelProto:
    return build.training(build.record(F.Sine, torch.ones(2, 4, requires_grad=True)))


def _argument(value: Any, **more: Any) -> onnx.ModelProto:
    """A call with one more argument, in JSON; a str is the text itself."""
    model = _sine()
    call = json.loads(next(a for a in model.graph.node[0].attribute if a.name == "call").s)
    call["args"] = [{"$tensor": 0}, "@argument@"]
    text = json.dumps({**call, **more}).replace('"@argument@"', value if isinstance(value, str) else json.dumps(value))
    return _with(model, name=f"{F.__name__}:Takes", call=text, input_convention="dc", input_requires_grads=[1, 0])


def _arguments() -> Iterator[tuple[str, Crasher]]:
    module, refused = F.__name__, {3: _REFUSED, 5: _REFUSED, 6: _REFUSED}
    for name, value, ends in (
        ("1e400", "1e400", refused), ("deep", "[" * 100_000, refused), ("5000 digits", "9" * 5000, refused), ("doubled key", '{"$int":"1","$int":"2"}', {}),
        ("half a pair", '"\\ud800"', {}), ("NUL", '"\\u0000"', {}), ("huge array", {"$ndarray": ["<f4", [2**40], ""]}, refused),
        ("an array of nothing times much", {"$ndarray": ["<f8", [0, 2**62], ""]}, {}), ("huge range", {"$range": [0, 2**62, 1]}, {}),
        ("enum _missing_", {"$enum": [f"{module}:Mode", 99]}, refused), ("a flag's other bits", {"$enum": [f"{module}:Bits", 1 << 70]}, {}),
        ("negative flag", {"$enum": [f"{module}:Bits", -1]}, {}), ("enum by a long name", {"$enum": [f"{module}:Mode", "x" * 10**5]}, refused),
        ("a bomb", {"$dataclass": [f"{module}:Bomb", {"size": 1, "part": 2}]}, {}), ("a bomb's setter", {"$dataclass": [f"{module}:BombField", {"size": 1}]}, {}),
        ("a bomb that is a dict", {"$mapping": [f"{module}:BombDict", {"size": 1, "part": 2}]}, {}),
        ("a bomb that is a tuple", {"$namedtuple": [f"{module}:BombTuple", [1, 2]]}, {}),
        ("forbidden", {"$dataclass": ["tests.fuzz.forbidden:Config", {"size": 1}]}, refused), ("called", {"$callable": f"{module}:unsafe"}, refused),
        ("a module's attribute", {"$callable": f"{module}:np.load"}, refused), ("builtin", {"$builtin": "torch:load"}, refused),
        ("a key that is a list", {"$dict": [[[1], 1]]}, refused), ("a set of lists", {"$set": [[1]]}, refused), ("nan in sets", {"$set": [{"$float": "nan"}] * 9}, {}),
        ("a deep key", {"$dict": [[{"$tuple": [{"$tuple": [1]}]}, 1]]}, {}), ("slices of slices", {"$slice": [{"$slice": [{"$slice": [1, 2, 3]}] * 3}] * 3}, {}),
        ("device", {"$device": "cuda:9999999999"}, {}), ("size", {"$torchsize": [2**70]}, {}), ("big bytes", {"$bytes": "A" * 1_000_000}, {}),
        ("odd base64", {"$str": "////"}, {}), ("complex of strings", {"$complex": ["a", 1]}, refused), ("a float of bytes", {"$float": [1]}, refused),
    ):  # fmt: skip
        yield f"argument {name}", Crasher(lambda value=value: _argument(value), ends)
    for name, more in {
        "outputs of a bomb": {"outputs": {"$dataclass": [f"{module}:Bomb", {"size": {"$tensor": 0}, "part": 1}]}}, "no outputs": {"outputs": None},
        "passed 2**70": {"passed": 2**70}, "autocast": {"autocast": {"dtypes": {"cpu": "load", "x": "float99"}, "cache": True}},
        "more arguments": {"args": [{"$tensor": 0}, 1, 2, 3, 4]}, "autocast of cpu": {"autocast": {"dtypes": {"cpu": "int64"}, "cache": 1}}, "id": {"id": "\ud800"}, "long id": {"id": "x" * 10**5}, "kwargs": {"kwargs": {"": 1, "self": 2, "ctx": 3}},
        "no_gradient 2**40": {"no_gradient": [2**40]}, "no_gradient_seen of many": {"no_gradient_seen": list(range(10**5))},
    }.items():  # fmt: skip
        yield f"call {name}", Crasher(lambda more=more: _argument(1, **more))


# ------------------------------------------------------------------------------------------------------------- metadata


def _plain(**metadata: str) -> onnx.ModelProto:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[2, 4] x) => (float[2, 4] y) <float[4] w = {1, 2, 3, 4}> { y = Mul(x, w) }'
    )
    for key, text in {VERSION_KEY: "1", MARK_COUNT_KEY: "0", **metadata}.items():
        model.metadata_props.add(key=key, value=text)
    return model


def _state(**names: str) -> str:
    return json.dumps(
        {name: {"initializer": "w", "kind": kind, "trainable": kind == "parameter", "persistent": True} for name, kind in names.items()}
    )


def _metadata() -> Iterator[tuple[str, Crasher]]:
    module, tensor = F.__name__, {"$tensor": 0}
    for name, value in {
        "a bomb": {"$dataclass": [f"{module}:Bomb", {"size": tensor, "part": 1}]}, "a bomb that is a dict": {"$mapping": [f"{module}:BombDict", {"size": tensor}]},
        "a bomb's setter": {"$dataclass": [f"{module}:BombField", {"size": tensor}]}, "a bomb that is a tuple": {"$namedtuple": [f"{module}:BombTuple", [tensor, 1]]},
        "forbidden": {"$dataclass": ["tests.fuzz.forbidden:Config", {"size": tensor}]}, "another name": {"$mapping": [f"{module}:Output", {"x": tensor}]},
        "tensor in a set": {"$set": [tensor]}, "tensor as a key": {"$dict": [[tensor, 1]]}, "tensor in a slice": {"$slice": [tensor, 1, 1]},
        "much": [tensor] * 60_000, "size": {"$size": 0}, "first form": {"dataclass": [f"{module}:Bomb", [["size", {"tensor": 0}], ["part", {"value": 1}]]]},
        "first form, deep": json.loads('{"tuple":[' * 300 + '{"tensor":0}' + "]}" * 300), "true": {"$tensor": True}, "nothing": None,
    }.items():  # fmt: skip
        yield f"outputs: {name}", Crasher(lambda value=value: _plain(**{OUTPUTS_KEY: json.dumps(value)}))
    for names in (
        ("forward",), ("a.b", "a"), ("a", "a.b"), ("",), ("training",), ("_parameters",), ("__class__",), (".",), ("a..b",), ("x.",), ("train",), ("_onnx",),
        ("state_dict",), ("a.forward",), ("a.__dict__",), ("__dict__.x",), ("a" * 10**5,), (".".join("a" * 3000),), ("a_b", "a.b", "a"), ("\x00",), ("é.\u202e",), ("T_destination",),
    ):  # fmt: skip
        for kind in ("parameter", "buffer"):
            label = f"state {'+'.join(names)[:30]!r} {kind}"
            yield label, Crasher(lambda names=names, kind=kind: _plain(**{STATE_KEY: _state(**dict.fromkeys(names, kind))}))
    for key in (
        STATE_KEY, OUTPUTS_KEY, GRADIENTS_KEY, STEP_KEY, FUNCTIONS_KEY, STILLED_KEY, VALUES_KEY, RULES_KEY, MARK_COUNT_KEY, VERSION_KEY, "pythonop.cumulative", "pythonop.unchecked", "pythonop.transient",
    ):  # fmt: skip
        for text in (
            "",
            "[" * 100_000,
            "null",
            "[]",
            "{}",
            "1e999",
            "\x00\x1b[2J\u202e",
            "x" * 1_000_000,
            '{"":{}}',
            "１",
            "-1",
            '{"inputs":{"y":"x"},"outputs":{"w":"y"},"unreached":["y"]}',
        ):
            yield f"{key} {text[:12]!r}", Crasher(lambda key=key, text=text: _plain(**{key: text}))


# --------------------------------------------------------------------------------------------- graphs, functions, tensors


def _calls(levels: int, times: int, last: str) -> onnx.ModelProto:
    """Functions that call the next so many times, and a last one of this operator (its own name: a circle)."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    functions = []
    for level in range(levels):
        end = level == levels - 1
        op, domain = (last, "own" if last.startswith("f") else "") if end else (f"f{level + 1}", "own")
        nodes = [helper.make_node(op, [f"a{i}"], [f"a{i + 1}"], domain=domain) for i in range(times)]
        functions.append(helper.make_function("own", f"f{level}", ["a0"], [f"a{times}"], nodes, opsets))
    value = helper.make_tensor_value_info
    graph = helper.make_graph([helper.make_node("f0", ["x"], ["y"], domain="own")], "g", [value("x", 1, [2])], [value("y", 1, [2])])
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def _functions() -> Iterator[tuple[str, Crasher]]:
    yield "2**30 calls", Crasher(lambda: _calls(30, 2, "Exp"), {2: _REFUSED, 6: _REFUSED})
    yield "1000**3 calls", Crasher(lambda: _calls(3, 1000, "Exp"), {2: _REFUSED, 6: _REFUSED})
    yield "10**5 calls", Crasher(lambda: _calls(5, 10, "Exp"))
    yield "2**10 calls", Crasher(lambda: _calls(10, 2, "Exp"))
    yield "calls without end", Crasher(lambda: _calls(1, 1, "f0"), {2: _REFUSED, 6: _REFUSED})
    yield "a circle of calls", Crasher(lambda: _calls(3, 2, "f0"), {2: _REFUSED, 6: _REFUSED})
    yield "2000 calls in one another", Crasher(lambda: _calls(2000, 1, "Exp"))
    yield "an operator as function", Crasher(lambda: _renamed_function("", "Mul"))
    yield "PythonOp as function", Crasher(lambda: _renamed_function("com.microsoft", "PythonOp"))
    for place in ("default", "attribute", "initializer", "sparse"):
        for location in ("../secret", ABSOLUTE, "link", "linked/secret", "/etc/hostname"):
            yield (
                f"external {place} at {location[:13]}",
                Crasher(
                    lambda place=place, location=location: _outside(place, location),
                    _EVERYBODY if place != "sparse" else {},
                    {"link": "../secret", "linked": ".."},
                ),
            )
    for offset, length in (("-1", "8"), ("8", "-1"), ("9223372036854775807", "8"), ("0", "9223372036854775807"), ("x", "8"), ("0", ""), ("1e3", "8"), ("60", "8"),
                           ("4", "7"), ("0x0", "8"), ("99999999999999999999", "8"), (" 8 ", "8"), ("1", "8"), ("٣", "8"), ("1_0", "8")):  # fmt: skip
        yield (
            f"offset {offset!r} length {length!r}",
            Crasher(lambda offset=offset, length=length: _outside("initializer", "data.bin", offset, length), {}, {"data.bin": bytes(64)}),
        )
    for location in ("", ".", "folder", "no.bin", "data.bin\0", "data.bin/", "a" * 5000, "\x1b[2J", "model.onnx", "a/" * 2000 + "b"):
        yield (
            f"location {location[:20]!r}",
            Crasher(lambda location=location: _outside("initializer", location), {}, {"data.bin": bytes(64), "folder/x": b"x"}),
        )


def _links() -> Iterator[tuple[str, Crasher]]:
    """Functions whose link to their backward is damaged, and such as are whole and lead nowhere good."""
    for name, make in damaged_links():
        yield f"link: {name}", Crasher(make, {2: _REFUSED, 6: _REFUSED})
    for name, make in odd_links():
        yield f"link: {name}", Crasher(make)


def _renamed_function(domain: str, name: str) -> onnx.ModelProto:
    model = _calls(1, 1, "Exp")
    model.functions[0].domain, model.functions[0].name = domain, name
    model.graph.node[0].domain, model.graph.node[0].op_type = domain, name
    if domain:
        model.opset_import.add(domain=domain, version=1)
    return model


def _outside(place: str, location: str, offset: str = "0", length: str = "8") -> onnx.ModelProto:
    tensor = TensorProto(name="w", data_type=1, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, text in {"location": location, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=text)
    value = helper.make_tensor_value_info
    if place == "default":  # of an attribute of a function
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
        constant = helper.make_node("Constant", [], ["w"])
        constant.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, ref_attr_name="data")
        function = helper.make_function("own", "f", ["a"], ["c"], [constant, helper.make_node("Mul", ["a", "w"], ["c"])], opsets)
        function.attribute_proto.add(name="data", type=onnx.AttributeProto.TENSOR, t=tensor)
        graph = helper.make_graph([helper.make_node("f", ["x"], ["y"], domain="own")], "g", [value("x", 1, [2])], [value("y", 1, [2])])
        return helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10)
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"])]
    if place == "attribute":
        nodes.insert(0, helper.make_node("Constant", [], ["w"], value=tensor))
    graph = helper.make_graph(nodes, "g", [value("x", 1, [2])], [value("y", 1, [2])], [tensor] if place == "initializer" else [])
    if place == "sparse":
        graph.sparse_initializer.add(dims=[2], values=tensor, indices=numpy_helper.from_array(np.array([0, 1]), "i"))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _weighted(change: Callable[[onnx.ModelProto], Any]) -> Crasher:
    def make() -> onnx.ModelProto:
        model = _plain()
        change(model)
        return model

    return Crasher(make)


def _initializer(**changes: Any) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        tensor = model.graph.initializer[0]
        name = tensor.name
        tensor.Clear()
        tensor.name = name
        for key, value in {"data_type": 1, "dims": [4], **changes}.items():
            if isinstance(value, list):
                getattr(tensor, key).extend(value)
            else:
                setattr(tensor, key, value)

    return change


def _tensors() -> Iterator[tuple[str, Crasher]]:
    data = np.arange(4, dtype=np.float32).tobytes()
    for name, changes in {
        "too few bytes": {"raw_data": data[:-1]}, "too many": {"raw_data": data * 2}, "none": {}, "dims -1": {"dims": [-1], "raw_data": data},
        "dims 2**62": {"dims": [2**62, 4], "raw_data": data}, "dims 2**32 twice": {"dims": [2**32, 2**32], "raw_data": b""}, "70 dims": {"dims": [1] * 70, "raw_data": data[:4]},
        "floats and bytes": {"raw_data": data, "float_data": [1.0] * 4}, "numbers of another field": {"int32_data": [1] * 4}, "no dims": {"dims": [], "raw_data": data},
        "strings": {"data_type": 8, "string_data": [b"a", b"\xff", b"c", b"d"]}, "strings in bytes": {"data_type": 8, "raw_data": data}, "too few strings": {"data_type": 8, "string_data": [b"a"]},
        "int4": {"data_type": 22, "raw_data": b"\0\0"}, "int4, odd": {"data_type": 22, "dims": [3], "raw_data": b"\0\0"}, "float4": {"data_type": 23, "raw_data": b"\0\0"},
        "type 0": {"data_type": 0, "raw_data": data}, "type 99": {"data_type": 99, "raw_data": data}, "type -1": {"data_type": -1, "raw_data": data}, "complex": {"data_type": 15, "raw_data": data * 4},
        "zero times much": {"dims": [0, 2**62], "raw_data": b""}, "10**12 of nothing": {"dims": [10**12]},
    }.items():  # fmt: skip
        yield f"initializer: {name}", _weighted(_initializer(**changes))
        yield (
            f"state initializer: {name}",
            _weighted(lambda m, c=changes: (_initializer(**c)(m), m.metadata_props.add(key=STATE_KEY, value=_state(w="parameter")))),
        )
    for kind in (0, 8, 22, 23, 99):
        for part in ("input", "output"):
            yield (
                f"{part} of type {kind}",
                _weighted(lambda m, k=kind, p=part: setattr(getattr(m.graph, p)[0].type.tensor_type, "elem_type", k)),
            )
    for name, text in {
        "ConstantOfShape": "b = ConstantOfShape(n)", "Expand": "b = Expand(one, n)", "Tile": "b = Tile(one, n)", "Range": "b = Range(zero, big, step)",
        "Reshape": "b = Reshape(one, n)", "Pad": "b = Pad(one, n2)", "OneHot": "b = OneHot(i, big, two)", "twice": "c = Expand(one, n) b = Concat<axis = 0>(c, c)",
    }.items():  # fmt: skip
        for size in (10**12, 2**62, 3 * 10**8):
            yield f"{name} of {size}", Crasher(lambda text=text, size=size: parser.parse_model(
                f"""<ir_version: 10, opset_import: ["": 20]> g (float x) => (float y)
                <int64[1] n = {{{size}}}, float[1] one = {{1}}, float zero = {{0}}, float big = {{{size}}}, float step = {{1}}, int64[2] n2 = {{0, {size}}}, int64[1] i = {{0}}, float[2] two = {{0, 1}}>
                {{ {text} s = ReduceSum<keepdims = 0>(b) y = Mul(x, s) }}"""
            ))  # fmt: skip


def _operators() -> Iterator[tuple[str, Crasher]]:
    yield from ((name, Crasher(make, _NOT_RUN)) for name, make in damaged_operators())


def _names() -> Iterator[tuple[str, Crasher]]:
    """Names that are no UTF-8, at every place that has one."""
    for bad in (b"\xff\xfe\xc0\x80\xed\xa0\x80\xf5", b"\0\0\0\0\0\0\0\0", b"\x1b[2J\x07\r\n "):
        for place in (
            "node",
            "value",
            "op",
            "domain",
            "producer",
            "graph",
            "attribute",
            "key",
            "text",
            "weight",
            "dimension",
            "doc",
            "output",
            "source",
        ):
            yield f"{place} {bad[:4]!r}", Crasher(lambda place=place, bad=bad: _badly_named(place, bad))


def _badly_named(place: str, bad: bytes) -> bytes:
    model, mark = _sine(), "@@badly@"
    graph = model.graph
    graph.initializer.append(helper.make_tensor("unused", 1, [1], [1.0]))
    if place == "value":
        graph.input[0].name = graph.node[0].input[0] = mark
    elif place == "attribute":
        graph.node[0].attribute.add(name=mark, type=onnx.AttributeProto.INT)
    elif place in ("key", "text"):
        model.metadata_props.add(key=mark if place == "key" else VERSION_KEY, value=mark)
    elif place == "output":  # that nothing makes
        graph.output[0].name = mark
    elif place == "source":
        graph.node[0].metadata_props.add(key="pythonop.source", value=mark)
    elif place == "dimension":
        graph.input[0].type.tensor_type.shape.dim[0].dim_param = mark
    else:
        owner: Any = {"producer": model, "graph": graph, "weight": graph.initializer[0], "doc": model}.get(place, graph.node[0])
        setattr(owner, {"op": "op_type", "domain": "domain", "producer": "producer_name", "doc": "doc_string"}.get(place, "name"), mark)
    return model.SerializeToString().replace(mark.encode(), bad)


def _graphs() -> Iterator[tuple[str, Crasher]]:
    for name, change in {
        "a cycle": lambda g: g.node.extend([helper.make_node("Add", ["q", "x"], ["p"]), helper.make_node("Add", ["p", "x"], ["q"])]),
        "made twice": lambda g: g.node.extend([helper.make_node("Exp", ["x"], ["y"])]), "no output": lambda g: g.output.pop(), "no input": lambda g: g.input.pop(),
        "an output that nothing makes": lambda g: setattr(g.output[0], "name", "z"), "no name": lambda g: setattr(g.output[0], "name", ""),
        "an input twice": lambda g: g.input.append(g.input[0]), "an output twice": lambda g: g.output.append(g.output[0]), "weight twice": lambda g: g.initializer.append(g.initializer[0]),
        "no node": lambda g: g.node.pop(), "an attribute of no type": lambda g: g.node[0].attribute.add(name="axis"), "no operator": lambda g: setattr(g.node[0], "op_type", ""),
        "a long operator": lambda g: setattr(g.node[0], "op_type", "a" * 10**6), "a weight for an input": lambda g: g.initializer.add(name="x", data_type=6, dims=[2, 4], raw_data=bytes(32)),
        "an input without end": lambda g: setattr(g.input[0].type.tensor_type.shape.dim[0], "dim_value", 2**62),
        "a negative size": lambda g: setattr(g.input[0].type.tensor_type.shape.dim[0], "dim_value", -1),
        "a reference outside a function": lambda g: g.node[0].attribute.add(name="axis", type=2, ref_attr_name="alpha"), "no type": lambda g: g.input[0].ClearField("type"),
        "a sequence": lambda g: g.input[0].type.sequence_type.elem_type.tensor_type.SetInParent(), "a graph attribute without a graph": lambda g: g.node[0].attribute.add(name="body", type=5),
        "PythonOpGrad alone": lambda g: g.node.extend([helper.make_node("PythonOpGrad", ["x"], ["y2"], domain="com.microsoft")]),
        "PythonOp alone": lambda g: g.node.extend([helper.make_node("PythonOp", [], [], domain="com.microsoft")]),
        "a mark alone": lambda g: g.node.extend([helper.make_node("StopGradient", [], [], domain="pythonop")]),
    }.items():  # fmt: skip
        yield f"graph: {name}", _weighted(lambda m, change=change: change(m.graph))
    for name, content in {"nothing": b"", "text": b"hello", "the canary": CANARY, "0xff": b"\xff" * 100, "NULs": bytes(1000), "an endless varint": b"\x08" + b"\xff" * 1000,
                          "groups": b"\x0b" * 10_000, "a deep message": b"\x3a\xff\xff\xff\xff\x07" * 1000}.items():  # fmt: skip
        yield f"file: {name}", Crasher(lambda content=content: content, dict.fromkeys((1, 2, 3, 5, 6, 8), _REFUSED))


CORPUS: dict[str, Crasher] = {
    name: crasher
    for part in (_types, _lies, _arguments, _metadata, _functions, _links, _tensors, _operators, _names, _graphs)
    for name, crasher in part()
}
