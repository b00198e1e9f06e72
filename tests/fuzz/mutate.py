"""How a case comes about: one to four mutations of a seed, each of the graph, of a PythonOp, of JSON, of fields or of bytes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from exporter.files.proto import graphs
from symbolics.node.attributes import GRAD_SPECS, SPECS
from tests.fuzz.mutate_json import NAMES, mutate_text
from tests.fuzz.seeds import ABSOLUTE, Seed
from tests.fuzz.wire import mutate_bytes, mutate_fields

__all__ = ["Case", "make_case"]


@dataclass
class Case:
    """A file made to hurt.

    Attributes:
        number: Which case of its seed number.
        origin: The honest file it was.
        steps: What was done to it, in order.
        model: Its bytes.
        files: What lies beside it, by name; a str is where a link leads to.
    """

    number: int
    origin: str
    steps: list[str]
    model: bytes
    files: dict[str, bytes | str] = field(default_factory=dict)


# Of how many cases in a hundred a kind of file is the start. Of a backward there is no second gradient: most doors refuse it at once.
_SHARES = {"operators": 25, "backwards": 15, "forwards": 60}


def _family(name: str) -> str:
    if name.startswith("operator "):
        return "operators"
    return "backwards" if name.endswith("-gradient") or name.startswith(("raises", "step")) else "forwards"


def make_case(seeds: dict[str, Seed], seed: int, number: int) -> Case:
    """The case with this number: the same each time."""
    rng = random.Random(f"{seed}:{number}")
    families: dict[str, list[str]] = {}
    for name in sorted(seeds):
        families.setdefault(_family(name), []).append(name)
    kinds = sorted(families)
    origin = rng.choice(families[rng.choices(kinds, [_SHARES[kind] for kind in kinds])[0]])
    start = seeds[origin]
    case = Case(number, origin, [], start.model, dict(start.files))
    layers = sorted(rng.choices(["graph", "json", "node", "fields", "bytes"], [28, 26, 16, 24, 6], k=rng.choice([1, 1, 1, 1, 2, 2, 3, 4])))
    layers.sort(key=["graph", "json", "node", "fields", "bytes"].index)
    model = onnx.ModelProto.FromString(start.model)
    changed = False
    for layer in layers:
        if layer in ("graph", "json", "node"):
            step = _OF_MODELS[layer](model, case, rng) or _graph(model, case, rng)
            case.steps.append(step)
            changed = True
            continue
        if changed:
            case.model, changed = model.SerializeToString(), False
        case.model, step = (mutate_fields if layer == "fields" else mutate_bytes)(case.model, rng)
        case.steps.append(step)
    if changed:
        case.model = model.SerializeToString()
    return case


# ------------------------------------------------------------------------------------------------------------ the graph

_KINDS = [0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 14, 15, 16, 17, 20, 21, 22, 23, 24, 25, 26, 27, 99, -1]
_DIMS: list[Any] = [0, 1, 2, 3, 64, 2**31, 2**40, 10**12, 2**62, -1, -2, "N", "", "M"]


def _nodes(model: onnx.ModelProto) -> list[tuple[Any, onnx.NodeProto]]:
    return [(graph, node) for graph in graphs(model) for node in graph.node]


def _names(model: onnx.ModelProto) -> list[str]:
    """Every name of a value."""
    found = {name for _, node in _nodes(model) for name in (*node.input, *node.output)}
    for graph in graphs(model):
        found.update(v if isinstance(v, str) else v.name for v in (*graph.input, *graph.output))
    return sorted(found | {""})


def _infos(model: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    for graph in graphs(model):
        if isinstance(graph, onnx.GraphProto):
            yield from (*graph.input, *graph.output)
        yield from graph.value_info


def _tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    for graph in graphs(model):
        yield from getattr(graph, "initializer", ())
        for sparse in getattr(graph, "sparse_initializer", ()):
            yield from (sparse.values, sparse.indices)
        for node in graph.node:
            yield from (attribute.t for attribute in node.attribute if attribute.HasField("t"))


def _type(model: onnx.ModelProto, case: Case, rng: random.Random) -> str | None:
    infos = list(_infos(model))
    if not infos:
        return None
    info = rng.choice(infos)
    kind = rng.choice(_KINDS)
    what = rng.choice(["tensor"] * 8 + ["none", "sequence", "optional", "sparse", "map"])
    if what == "tensor":
        info.type.tensor_type.elem_type = kind
    elif what == "none":
        info.ClearField("type")
    elif what == "sequence":
        info.type.sequence_type.elem_type.tensor_type.elem_type = kind
    elif what == "optional":
        info.type.optional_type.elem_type.tensor_type.elem_type = kind
    elif what == "sparse":
        info.type.sparse_tensor_type.elem_type = kind
    else:
        info.type.map_type.key_type = kind
    return f"type of {info.name[:40]!r} := {what} {kind}"


def _shape(model: onnx.ModelProto, case: Case, rng: random.Random) -> str | None:
    infos = [info for info in _infos(model) if info.type.HasField("tensor_type")]
    if not infos:
        return None
    info = rng.choice(infos)
    dims = [rng.choice(_DIMS) for _ in range(rng.choice([0, 1, 1, 2, 3, 70]))]
    info.type.tensor_type.ClearField("shape")
    for dim in dims if rng.random() < 0.9 else ():
        added = info.type.tensor_type.shape.dim.add()
        if isinstance(dim, int):
            added.dim_value = dim
        else:
            added.dim_param = dim
    return f"shape of {info.name[:40]!r} := {dims}"


def _edge(model: onnx.ModelProto, case: Case, rng: random.Random) -> str | None:
    """An edge cut, led elsewhere (back as well), or doubled."""
    found = [node for _, node in _nodes(model) if node.input or node.output]
    if not found:
        return None
    node = rng.choice(found)
    places = node.input if (node.input and rng.random() < 0.6) or not node.output else node.output
    at, name = rng.randrange(len(places)), rng.choice([*_names(model), "nowhere"])
    done = rng.choice(["set", "set", "delete", "insert", "clear"])
    if done == "set":
        places[at] = name
    elif done == "insert":
        places.insert(at, name)
    elif done == "delete":
        del places[at]
    else:
        del places[:]
    return f"edge of {node.op_type} {node.name[:40]!r}: {done} {at} {name!r}"


def _boundary(model: onnx.ModelProto, case: Case, rng: random.Random) -> str:
    """Inputs, outputs and initializers that go, come, or come twice."""
    graph = rng.choice([graph for graph in graphs(model) if isinstance(graph, onnx.GraphProto)])
    lists: list[Any] = [graph.input, graph.output, graph.initializer, graph.value_info]
    part = rng.choice(lists)
    done = rng.choice(["delete", "double", "rename", "add"])
    if done == "add" or not part:
        name, kind = rng.choice([*_names(model), "new"]), rng.choice(_KINDS)
        if part is graph.initializer:
            part.add(name=name, data_type=max(kind, 0), dims=[rng.choice([0, 1, 2, 2**40])], raw_data=b"\0" * rng.choice([0, 4, 8]))
        else:
            part.append(helper.make_tensor_value_info(name, max(kind, 0), rng.choice([None, [], [2], ["N"]])))
        return f"boundary: added {name[:40]!r} of type {kind}"
    item = rng.choice(part)
    name = item.name
    if done == "delete":
        part.remove(item)
    elif done == "double":
        part.add().CopyFrom(item)
    else:
        item.name = rng.choice([*_names(model), "forward", "training", "a.b", "a", "x.weight", "_onnx", ".", "a..b"])
    return f"boundary: {done} {name[:40]!r}"


def _order(model: onnx.ModelProto, case: Case, rng: random.Random) -> str | None:
    graph, _ = rng.choice(_nodes(model) or [(None, None)])
    if graph is None:
        return None
    done = rng.choice(["shuffle", "delete", "double", "rename"])
    node = rng.choice(graph.node)
    what = node.op_type
    if done == "shuffle":
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node]
        rng.shuffle(nodes)
        del graph.node[:]
        graph.node.extend(nodes)
    elif done == "delete":
        graph.node.remove(node)
    elif done == "double":
        graph.node.add().CopyFrom(node)
    else:
        node.op_type = rng.choice(
            ["PythonOp", "PythonOpGrad", "StopGradient", "Identity", "If", "Loop", "Constant", "ConstantOfShape", "Dropout", "X", ""]
        )
        node.domain = rng.choice([node.domain, "com.microsoft", "", "pythonop", "ai.onnx.ml", "own"])
    return f"nodes: {done} {what}"


def _functions(model: onnx.ModelProto, case: Case, rng: random.Random) -> str:
    """Functions that call themselves, one another, or each the next twice."""
    done = rng.choice(["itself", "circle", "doubling", "doubling", "lost", "import", "name"])
    if not any(entry.domain == "own" for entry in model.opset_import):
        model.opset_import.add(domain="own", version=1)
    levels = {"itself": 1, "circle": 2, "doubling": rng.choice([3, 10, 30])}.get(done, 0)
    for level in range(levels):
        after = f"f{(level + 1) % levels}" if done != "doubling" else f"f{level + 1}"
        last = done == "doubling" and level == levels - 1
        nodes = [helper.make_node("Exp" if last else after, ["a"], ["b"], domain="" if last else "own"),
                 helper.make_node("Exp" if last else after, ["b"], ["c"], domain="" if last else "own")]  # fmt: skip
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
        model.functions.append(helper.make_function("own", f"f{level}", ["a"], ["c"], nodes, opsets))
    if levels and model.graph.input and model.graph.output:
        node = helper.make_node("f0", [model.graph.input[0].name], ["called"], domain="own")
        model.graph.node.insert(0, node)
        if rng.random() < 0.7:
            model.graph.output.append(helper.make_tensor_value_info("called", 1, None))
    if not levels and model.functions:
        function = rng.choice(model.functions)
        if done == "lost":
            model.functions.remove(function)
        elif done == "import":
            del function.opset_import[:]
        else:
            function.name, function.domain = rng.choice(
                [("PythonOp", "com.microsoft"), ("StopGradient", "pythonop"), ("Mul", ""), ("", "")]
            )
    return f"functions: {done} {levels}"


def _external(model: onnx.ModelProto, case: Case, rng: random.Random) -> str | None:
    tensors = list(_tensors(model))
    if not tensors:
        return None
    tensor = rng.choice(tensors)
    location = rng.choice(["../secret", ABSOLUTE, "link", "linked/secret", "data.bin", "data.bin", "data.bin", "", ".", "..", "model.onnx", "no.bin", "/dev/zero",
                           "data.bin\0x", "/proc/self/environ", "C:\\x", "a" * 5000, "./data.bin", "data.bin/", "folder", "\ud800".encode("utf-8", "replace").decode()])  # fmt: skip
    case.files.update({"data.bin": bytes(range(64)), "link": "../secret", "linked": "..", "folder/x": b"x"})
    for name in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "string_data"):
        if rng.random() < 0.9:
            tensor.ClearField(name)
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    numbers = [
        "0",
        "4",
        "8",
        "63",
        "64",
        "65",
        "-1",
        "4096",
        "2147483648",
        "9223372036854775807",
        "1e9",
        "",
        "x",
        " 8",
        "99999999999999999999",
        "0x10",
    ]
    tensor.external_data.add(key="location", value=location)
    for key in ("offset", "length"):
        if rng.random() < 0.6:
            tensor.external_data.add(key=key, value=rng.choice(numbers))
    if rng.random() < 0.2:
        tensor.external_data.add(key=rng.choice(["checksum", "location", "", "basepath"]), value=rng.choice([ABSOLUTE, "../secret", "0"]))
    told = {entry.key: entry.value[:40] for entry in tensor.external_data}
    return f"external {tensor.name[:40]!r}: {told}"


def _tensor(model: onnx.ModelProto, case: Case, rng: random.Random) -> str | None:
    tensors = list(_tensors(model))
    if not tensors:
        return None
    tensor = rng.choice(tensors)
    done = rng.choice(["dims", "dims", "type", "data", "float", "name", "segment", "values", "values"])
    if done == "dims":
        tensor.dims[:] = [d if isinstance(d, int) else 2 for d in (rng.choice(_DIMS) for _ in range(rng.choice([0, 1, 1, 2, 3, 70])))]
    elif done == "type":
        tensor.data_type = rng.choice(_KINDS)
    elif done == "data":
        tensor.raw_data = rng.choice([b"", b"\0", tensor.raw_data[:-1], tensor.raw_data * 2, b"\xff" * 64])
    elif done == "values":
        _set_value(tensor, rng)
    elif done == "float":
        tensor.float_data.extend([float("nan")] * 3)
    elif done == "name":
        tensor.name = rng.choice(_names(model))
    else:
        tensor.segment.begin, tensor.segment.end = rng.choice([(0, 2**62), (-1, 5), (3, 1)])
    return f"tensor {tensor.name[:40]!r}: {done}"


def _set_value(tensor: TensorProto, rng: random.Random) -> None:
    """One element of a tensor that is whole still: axes, sizes and indices are such tensors."""
    if tensor.data_type not in (TensorProto.INT64, TensorProto.FLOAT) or tensor.data_location == TensorProto.EXTERNAL:
        return
    with contextlib.suppress(ValueError):
        array = numpy_helper.to_array(tensor).copy()
        if array.size:
            array.flat[rng.randrange(array.size)] = rng.choice([0, 1, -1, 2, 5, 64, 10**6, 2**31, 10**12, 2**62, -(2**63)])
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _sizes(model: onnx.ModelProto, case: Case, rng: random.Random) -> str:
    """A constant computation that ends in very much memory."""
    size = rng.choice([10**6, 2**31, 10**12, 2**62, -1])
    many = f"many{len(model.graph.initializer)}"
    model.graph.initializer.append(helper.make_tensor(many, TensorProto.INT64, [1], [size]))
    op = rng.choice(["ConstantOfShape", "Expand", "Tile", "Range", "Reshape"])
    one, start, stop = (f"{name}{many}" for name in ("one", "start", "stop"))
    model.graph.initializer.append(helper.make_tensor(one, 1, [1], [1.0]))
    for name, value in ((start, 0.0), (stop, float(size))):
        model.graph.initializer.append(helper.make_tensor(name, 1, [], [value]))
    inputs = {"ConstantOfShape": [many], "Range": [start, stop, start if rng.random() < 0.2 else one]}.get(op, [one, many])
    model.graph.node.insert(0, helper.make_node(op, inputs, [f"big{many}"]))
    model.graph.node.insert(1, helper.make_node("ReduceSum", [f"big{many}"], [f"sum{many}"], keepdims=0))
    users = [node for node in model.graph.node if node.input and node.op_type in ("Mul", "Add", "Exp", "MatMul", "Sub", "Relu")]
    if users:
        rng.choice(users).input[0] = f"{rng.choice(['sum', 'big'])}{many}"
    else:
        model.graph.output.append(helper.make_tensor_value_info(f"sum{many}", 1, []))
    return f"sizes: {op} of {size}"


def _nest(model: onnx.ModelProto, case: Case, rng: random.Random) -> str:
    """The main graph in a body of itself, or very many bodies in one another."""
    levels = rng.choice([1, 10, 28])  # protobuf reads no more than 100 messages in one another
    body = onnx.GraphProto(name="leaf")
    body.node.append(helper.make_node("Constant", [], ["o"], value_float=1.0))
    if rng.random() < 0.3:
        body.CopyFrom(model.graph)
    else:
        body.output.append(helper.make_tensor_value_info("o", 1, []))
    condition = "deep_condition"
    model.graph.initializer.append(helper.make_tensor(condition, TensorProto.BOOL, [], [True]))
    for level in range(levels):
        outputs = [f"{value.name}_{level}" for value in body.output] or ["none"]
        try:
            node = helper.make_node("If", [condition], outputs, then_branch=body, else_branch=body)
        except DecodeError:  # that deep
            break
        outer = onnx.GraphProto(name=f"l{level}", node=[node])
        outer.output.extend(helper.make_tensor_value_info(name, 1, []) for name in outputs)
        body = outer if level < 3 else onnx.GraphProto(name=outer.name, node=[_thin(outer.node[0])], output=outer.output)
    model.graph.node.extend(body.node)
    model.graph.output.extend(body.output)
    return f"nested {levels}"


def _thin(node: onnx.NodeProto) -> onnx.NodeProto:
    """An If whose other branch is small: two large ones each level would be 2**90."""
    names = [value.name for value in node.attribute[0].g.output]
    small = onnx.GraphProto(name="small", node=[helper.make_node("Constant", [], [name], value_float=0.0) for name in names[:1]])
    small.output.extend(helper.make_tensor_value_info(name, 1, []) for name in names[:1])
    node.attribute[1].g.CopyFrom(small)
    return node


def _attribute(model: onnx.ModelProto, case: Case, rng: random.Random) -> str | None:
    """An attribute of any node: a reference, another type, none of its values."""
    found = [(node, attribute) for _, node in _nodes(model) for attribute in node.attribute]
    if not found:
        return None
    node, attribute = rng.choice(found)
    done = rng.choice(["ref", "type", "delete", "double", "rename", "int", "empty"])
    what = f"attribute {attribute.name[:40]} of {node.op_type}: {done}"
    if done == "ref":
        attribute.ref_attr_name = rng.choice(["alpha", "nothing", attribute.name])
    elif done == "type":
        attribute.type = rng.choice(AttributeProto.AttributeType.values())
    elif done == "delete":
        node.attribute.remove(attribute)
    elif done == "double":
        node.attribute.add().CopyFrom(attribute)
    elif done == "rename":
        attribute.name = rng.choice(["", "axis", "axes", "to", "value", "body", "then_branch", "call", "name", "x"])
    elif done == "int":
        attribute.CopyFrom(
            helper.make_attribute(attribute.name, rng.choice([0, -1, 2**31, 2**63 - 1, -(2**63), [2**62], [1, 2], "x", 0.5]))
        )
    else:
        attribute.CopyFrom(AttributeProto(name=attribute.name, type=attribute.type))
    return what


def _versions(model: onnx.ModelProto, case: Case, rng: random.Random) -> str:
    done = rng.choice(["ir", "opset", "no opset", "domain"])
    if done == "ir":
        model.ir_version = rng.choice([0, 1, 3, 7, 11, 12, 99, 2**31, 2**62, -1])
    elif done == "no opset" or not model.opset_import:
        del model.opset_import[:]
    elif done == "opset":
        rng.choice(model.opset_import).version = rng.choice([0, 1, 7, 13, 17, 18, 25, 99, 2**31, 2**62, -1])
    else:
        rng.choice(model.opset_import).domain = rng.choice(["", "ai.onnx", "com.microsoft", "own", "pythonop", "x"])
    return f"versions: {done}"


_GRAPH: list[Callable[[onnx.ModelProto, Case, random.Random], str | None]] = [
    _type, _type, _shape, _edge, _edge, _boundary, _boundary, _order, _functions, _external, _tensor, _tensor, _sizes, _nest, _attribute, _attribute,
    _versions,
]  # fmt: skip


def _graph(model: onnx.ModelProto, case: Case, rng: random.Random) -> str:
    for _ in range(20):
        if step := rng.choice(_GRAPH)(model, case, rng):
            return step
    return _versions(model, case, rng)


# ------------------------------------------------------------------------------------------- attributes of a PythonOp


def _python_op(model: onnx.ModelProto, _: Case, rng: random.Random) -> str | None:
    found = [node for _, node in _nodes(model) if node.op_type in ("PythonOp", "PythonOpGrad")]
    if not found:
        return None
    node = rng.choice(found)
    specs = GRAD_SPECS if node.op_type == "PythonOpGrad" else SPECS
    name = rng.choice([*specs, "func_name", "unknown", "pythonop_kept_outputs", "pythonop_absent_inputs"])
    attribute = next((a for a in node.attribute if a.name == name), None) or node.attribute.add(name=name)
    ints = list(attribute.ints)
    value: Any = rng.choice(["ints", "ints", "type", "text", "name", "none", "count"])
    if value == "ints" and ints:
        ints[rng.randrange(len(ints))] = rng.choice([*_KINDS, 2**31, 2**31 - 1, 2**62, -(2**63), 2**63 - 1])
        value = ints
    elif value == "count":
        value = rng.choice([ints[:-1], [*ints, *(ints or [1])], ints * 100, [0] * 70_000, [1, 8, 22]])
    elif value == "text" and attribute.s:
        text = attribute.s
        value = rng.choice([text + b"d", text[:-1], text * 300, b"", b"d", b"c", b"\xff\xfe", b"d" * 100_000, text[::-1]])
    elif value == "name":
        value = rng.choice(NAMES)
    elif value == "none":
        node.attribute.remove(attribute)
        return f"{node.op_type} {name}: removed"
    else:
        value = rng.choice([1, -1, 2**62, 0.5, [0.5, float("nan")], b"text", [b"a", b"\xff"], [1, 2], [],
                            helper.make_tensor("t", 1, [2], [1, 2]), onnx.GraphProto(name="g"), [onnx.GraphProto(name="g")]])  # fmt: skip
    made = helper.make_attribute(name, value) if value != [] else AttributeProto(name=name, type=AttributeProto.INTS)
    attribute.CopyFrom(made)
    return f"{node.op_type} {name} := {str(value)[:60]!r}"


_OF_MODELS: dict[str, Callable[[onnx.ModelProto, Case, random.Random], str | None]] = {
    "graph": _graph,
    "node": _python_op,
    "json": lambda model, _, rng: mutate_text(model, rng),
}
