"""What differs between two models: interface, operators, structure, weights, calls of Functions, gradients, metadata.

Nothing of the files runs and no name in them is imported. What is not compared: names of values and of nodes, the order of nodes, doc strings,
who wrote the file, and where a node comes from.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from exporter.differences.matching import Matches, attribute_digest, bodies, match_graphs
from exporter.differences.weights import WeightChange, compare_tensors, pair_weights
from exporter.errors import short
from exporter.files.inspect import CallFacts, called_nodes, inspect_model, tensor_text
from exporter.files.proto import reading
from exporter.files.read import open_model
from exporter.files.tensors import check_data
from symbolics.graph.values import operator_text, schema_default
from symbolics.graph.walk import walk
from symbolics.node.metadata import Fingerprint, StepLayout, pairing_of, read_state, step_of, tangents_of
from symbolics.node.names import BUFFERS_KEY, FUNCTIONS_KEY, GRADIENTS_KEY, MARK_COUNT_KEY, STATE_KEY, STEP_KEY, TANGENTS_KEY
from symbolics.text import clean

__all__ = ["Change", "Difference", "diff_files"]

Kind = Literal["removed", "added", "changed"]

# What other sections tell of, in the names of the file.
_TOLD = frozenset((STATE_KEY, GRADIENTS_KEY, TANGENTS_KEY, STEP_KEY, BUFFERS_KEY, FUNCTIONS_KEY, MARK_COUNT_KEY))
_PLAIN = frozenset((ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING))
# Of a call: where it stands, and what counts calls.
_NOT_COMPARED = frozenset(("node", "graph", "module", "source", "id"))


@dataclass
class Change:
    """One thing that differs.

    Attributes:
        kind: ``removed``: the first file alone has it; ``added``: the second alone; ``changed``.
        what: What it is.
        a, b: How it is in the first and in the second file; "" where there is nothing to say.
    """

    kind: Kind
    what: str
    a: str = ""
    b: str = ""

    def __post_init__(self) -> None:
        """Texts of a file are cut and cleaned here, once they have been compared."""
        self.what, self.a, self.b = clean(self.what, 400), clean(self.a, 300), clean(self.b, 300)


@dataclass
class Difference:
    """What differs between two models, section by section; each is empty where nothing does.

    Attributes:
        interface: Inputs and outputs: names, order, types, shapes.
        opsets: Versions of ONNX and of its operators' domains.
        operators: Operator -> how often it is in the first and in the second file, where that differs.
        nodes: Nodes of the graph, of bodies and functions.
        functions: ONNX functions that one file alone has.
        weights: Weights that one file alone has.
        values: Weights that both have, and that differ.
        calls: PythonOps and calls of ONNX functions with a backward of their own; Functions whose code was another one at the export.
        links: ONNX functions and their backward.
        gradients: What has a gradient or a tangent, and what is not reached.
        metadata: The state, the layout of a training step, and other entries.
    """

    interface: list[Change] = field(default_factory=list)
    opsets: list[Change] = field(default_factory=list)
    operators: dict[str, tuple[int, int]] = field(default_factory=dict)
    nodes: list[Change] = field(default_factory=list)
    functions: list[Change] = field(default_factory=list)
    weights: list[Change] = field(default_factory=list)
    values: list[WeightChange] = field(default_factory=list)
    calls: list[Change] = field(default_factory=list)
    links: list[Change] = field(default_factory=list)
    gradients: list[Change] = field(default_factory=list)
    metadata: list[Change] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not any(getattr(self, each.name) for each in dataclasses.fields(self))

    def as_json(self) -> dict[str, Any]:
        """Plain data; a difference without a finite size is null."""
        found = {"equal": self.equal, **dataclasses.asdict(self)}
        for row in found["values"]:
            for key in ("max_abs", "max_rel"):
                row[key] = None if row[key] == float("inf") else row[key]
        return found


@short
def diff_files(a: Any, b: Any) -> Difference:
    """Compare two ONNX files: inputs and outputs, nodes, weights, calls of Functions, gradients, metadata.

    Nodes are matched by what they compute. Names of inner values and of nodes, their order, and who wrote the file are not
    compared. Nothing in the files runs or is imported. ``pythonop diff`` prints the same.

    Args:
        a, b: The two files: paths, onnx.ModelProto, onnx_ir.Model or `Program`.

    Returns:
        A Difference. ``equal`` says whether nothing differs. It has a list for each section, empty where nothing differs:
        ``interface``, ``opsets``, ``operators``, ``nodes``, ``functions``, ``weights``, ``values``, ``calls``, ``links``,
        ``gradients``, ``metadata``. ``as_json()`` returns all as plain data.

    Raises:
        FormatError: A file cannot be read, is not an ONNX model, is damaged, or the data of its weights is missing.

    Examples:
        >>> found = exporter.diff_files("model.onnx", "model.onnx")
        >>> found.equal
        True
    """
    models = open_model(a), open_model(b)
    for model in models:
        check_data(model)
        _round_floats(model)
        _drop_defaults(model)
    with reading(a):  # what a stranger's tensor raises where it is read
        return _Comparison(*models).run()


def _drop_defaults(model: ir.Model) -> None:
    """Take away, in place, attributes that say what their absence says. From opset 18 on, no default has changed."""
    if model.opset_imports.get("", 0) < 18:
        return
    for node in _all_nodes(model):
        for name, attribute in list(node.attributes.items()) if node.domain in ("", "ai.onnx") else ():
            if not attribute.is_ref() and attribute.type in _PLAIN and attribute.value == schema_default(node.domain, node.op_type, name):
                del node.attributes[name]


def _round_floats(model: ir.Model) -> None:
    """Round floats among attributes, in place, as a file has them: a model in memory may hold what it was made with."""
    for node in _all_nodes(model):
        for name, attribute in list(node.attributes.items()):
            if attribute.is_ref():
                continue
            if attribute.type is ir.AttributeType.FLOAT and (value := float(np.float32(attribute.value))) != attribute.value:
                node.attributes[name] = ir.AttrFloat32(name, value)
            elif attribute.type is ir.AttributeType.FLOATS:
                node.attributes[name] = ir.AttrFloat32s(name, [float(np.float32(value)) for value in attribute.value])


class _Comparison:
    """One comparison: what of the first is what of the second, and what differs."""

    def __init__(self, a: ir.Model, b: ir.Model) -> None:
        self.models = a, b
        self.found = Difference()
        self.weights = pair_weights(a, b)
        self.matches: dict[ir.Node, ir.Node] = {}  # of all graphs, bodies and functions

    def run(self) -> Difference:
        """All sections."""
        a, b = self.models
        inputs = _pair_inputs(a.graph, b.graph)
        self._interface(a.graph, b.graph)
        self._opsets(a, b)
        counts = Counter(map(operator_text, _all_nodes(a))), Counter(map(operator_text, _all_nodes(b)))
        self.found.operators = {
            name: (counts[0][name], counts[1][name]) for name in sorted(counts[0] | counts[1]) if counts[0][name] != counts[1][name]
        }
        self._graph(a.graph, b.graph, {**self.weights, **inputs}, "")
        self._functions(a, b)
        self._weights(a.graph, b.graph)
        self._calls(a, b)
        self._gradients(a, b)
        self._metadata(a, b)
        return self.found

    def _interface(self, a: ir.Graph, b: ir.Graph) -> None:
        for what, left, right in (("input", a.inputs, b.inputs), ("output", a.outputs, b.outputs)):
            texts = [{str(value.name): tensor_text(value) for value in values} for values in (left, right)]
            for name in dict.fromkeys((*texts[0], *texts[1])):
                if change := _change(f"{what} {name}", texts[0].get(name), texts[1].get(name)):
                    self.found.interface.append(change)
            order = [list(side) for side in texts]
            if set(texts[0]) == set(texts[1]) and order[0] != order[1]:
                self.found.interface.append(Change("changed", f"the order of the {what}s", *map(", ".join, order)))

    def _opsets(self, a: ir.Model, b: ir.Model) -> None:
        versions = [{"IR": int(model.ir_version or 0), **{k or "ai.onnx": v for k, v in model.opset_imports.items()}} for model in (a, b)]
        self.found.opsets = list(_of_tables({k: str(v) for k, v in side.items()} for side in versions))

    # ------------------------------------------------------------------------------------------------------ structure
    def _graph(self, a: ir.Graph | ir.Function, b: ir.Graph | ir.Function, known: Mapping[ir.Value, ir.Value], where: str) -> None:
        matches = match_graphs(a, b, known)
        self.matches.update(matches.nodes)
        nodes = self.found.nodes
        nodes += [Change("removed", _title(node, where), a=_made(node)) for node in matches.removed]
        nodes += [Change("added", _title(node, where), b=_made(node)) for node in matches.added]
        for one, other in matches.nodes.items():
            nodes += self._node(one, other, matches, where)
        for place, (x, y) in enumerate(zip(a.outputs, b.outputs, strict=False)):
            if self._moved(x, y, matches):
                nodes.append(Change("changed", f"{where}output {place}: what makes it", _source(x), _source(y)))
        if where and len(a.outputs) != len(b.outputs):
            nodes.append(Change("changed", f"{where}outputs", str(len(a.outputs)), str(len(b.outputs))))

    def _node(self, a: ir.Node, b: ir.Node, matches: Matches, where: str) -> Iterator[Change]:
        """How a node differs from the one that it is in the other file."""
        title = _title(a, where)
        inner = [*bodies(a, b)]
        for name in dict.fromkeys((*a.attributes, *b.attributes)):
            left, right = a.attributes.get(name), b.attributes.get(name)
            if (
                left is not None
                and right is not None
                and (attribute_digest(left) == attribute_digest(right) or (inner and _is_body(left, right)))
            ):
                continue
            if name not in _called_attributes(a):
                yield Change("changed", f"{title}: {name}", _attribute(left), _attribute(right))
        if len(a.inputs) != len(b.inputs):
            yield Change("changed", f"{title}: inputs", str(len(a.inputs)), str(len(b.inputs)))
        for place, (x, y) in enumerate(zip(a.inputs, b.inputs, strict=False)):
            if self._moved(x, y, matches):
                yield Change("changed", f"{title}: input {place}", _source(x), _source(y))
        if len(a.outputs) != len(b.outputs):
            yield Change("changed", f"{title}: outputs", str(len(a.outputs)), str(len(b.outputs)))
        for number, (body, other) in enumerate(inner):
            known = {
                **matches.values,
                **_pair_inputs(body, other),
                **dict(zip(body.initializers.values(), other.initializers.values(), strict=False)),
            }
            self._initializers(body, other, f"{title}, body {number}: ")
            self._graph(body, other, known, f"{title}, body {number}: ")

    def _moved(self, x: ir.Value | None, y: ir.Value | None, matches: Matches) -> bool:
        """Whether two values that stand at one place are not one, and no node that was added or removed says so already."""
        if x is None or y is None:
            return x is not y
        if matches.values.get(x) is y:
            return False
        producers = x.producer(), y.producer()
        if producers == (None, None) and x not in matches.values:  # of a damaged graph: nothing makes it
            return x.name != y.name
        return not any(node is not None and node in matches.unmatched for node in producers)

    def _initializers(self, a: ir.Graph, b: ir.Graph, where: str) -> None:
        left, right = list(a.initializers.values()), list(b.initializers.values())
        self._sizes(left, right, where)
        self.found.values += filter(
            None, (compare_tensors(f"{where}{x.name}", x.const_value, y.const_value) for x, y in zip(left, right, strict=False))
        )

    def _sizes(self, left: list[Any], right: list[Any], where: str) -> None:
        if len(left) != len(right):
            self.found.weights.append(Change("changed", f"{where}initializers", str(len(left)), str(len(right))))

    def _functions(self, a: ir.Model, b: ir.Model) -> None:
        for key in dict.fromkeys((*a.functions, *b.functions)):
            title = "::".join(filter(None, key))
            left, right = a.functions.get(key), b.functions.get(key)
            if left is None or right is None:
                self.found.functions.append(Change("removed" if right is None else "added", title))
                continue
            for what, x, y in (("inputs", left.inputs, right.inputs), ("outputs", left.outputs, right.outputs)):
                if len(x) != len(y):
                    self.found.functions.append(Change("changed", f"{title}: {what}", str(len(x)), str(len(y))))
            attributes = [
                {name: _attribute(value) if value.value is not None else "required" for name, value in each.attributes.items()}
                for each in (left, right)
            ]
            self.found.functions += _of_tables(attributes, f"{title}: ")
            self._graph(left, right, _pair_inputs(left, right), f"function {title}: ")

    # -------------------------------------------------------------------------------------------------------- weights
    def _weights(self, a: ir.Graph, b: ir.Graph) -> None:
        taken = set(self.weights.values())
        for value in a.initializers.values():
            if value not in self.weights:
                self.found.weights.append(Change("removed", str(value.name), a=tensor_text(value)))
            elif change := compare_tensors(str(value.name), value.const_value, self.weights[value].const_value):
                self.found.values.append(change)
        self.found.weights += [Change("added", str(v.name), b=tensor_text(v)) for v in b.initializers.values() if v not in taken]

    # ---------------------------------------------------------------------------------------------- calls of Functions
    def _calls(self, a: ir.Model, b: ir.Model) -> None:
        facts = [inspect_model(model, names=False) for model in (a, b)]
        told = [zip(called_nodes(model), (each.rows, each.portable), strict=True) for model, each in zip((a, b), facts, strict=True)]
        for (nodes, rows), (other_nodes, other_rows) in zip(*told, strict=True):
            others = dict(zip(other_nodes, other_rows, strict=True))
            for node, row in zip(nodes, rows, strict=True):
                match = self.matches.get(node)
                other = others.pop(match, None) if match is not None else None
                self.found.calls += _call_changes(row, other, node, match)
            self.found.calls += [Change("added", _call_title(row), b=", ".join(row.arguments)) for row in others.values()]
        self.found.calls += _code_changes(*(each.functions for each in facts))
        links = [{link.name: _said(link, "name") for link in each.links} for each in facts]
        self.found.links = list(_of_tables(links))
        marks = [str(each.stop_gradients) for each in facts]
        self.found.gradients += filter(None, [_change("stop-gradient marks", *marks)])

    # ------------------------------------------------------------------------------------- gradients and other metadata
    def _gradients(self, a: ir.Model, b: ir.Model) -> None:
        renamed = {str(x.name): str(y.name) for x, y in self.weights.items()}
        for word, read in (("gradient", pairing_of), ("tangent", tangents_of)):
            sides = []
            for model in (a, b):
                pairing = read(model)
                taken = {} if pairing is None else {f"takes a {word} of": pairing.inputs, f"gives a {word} of": pairing.outputs}
                unreached = () if pairing is None else pairing.unreached
                sides.append(
                    {
                        (verb, name): "zero: not reached" if name in unreached else "reached"
                        for verb, names in taken.items()
                        for name in names
                    }
                )
            sides[0] = {(verb, renamed.get(name, name)): text for (verb, name), text in sides[0].items()}
            texts = [{f"{verb} {name}": text for (verb, name), text in side.items()} for side in sides]
            self.found.gradients += _of_tables(texts)

    def _metadata(self, a: ir.Model, b: ir.Model) -> None:
        renamed = {str(x.name): str(y.name) for x, y in self.weights.items()}
        states = [{key: dataclasses.asdict(entry) for key, entry in (read_state(model.metadata_props) or {}).items()} for model in (a, b)]
        for entry in states[0].values():
            entry["initializer"] = renamed.get(entry["initializer"], entry["initializer"])
        found = self.found.metadata
        found += _of_tables(({key: _fields(entry) for key, entry in state.items()} for state in states), "state ")
        found += _of_tables(map(_layout, (step_of(a), step_of(b))), "training step: ")
        rest = [{k: v for k, v in model.metadata_props.items() if k not in _TOLD} for model in (a, b)]
        found += _of_tables(rest)
        texts = [model.metadata_props.get(BUFFERS_KEY) for model in (a, b)]
        found += filter(None, [_change(BUFFERS_KEY, *texts)])


def _called_attributes(node: ir.Node) -> Iterable[str]:
    """The attributes of a node of which the section of calls tells: all of a PythonOp's."""
    return node.attributes if operator_text(node).endswith(("::PythonOp", "::PythonOpTangent")) else ()


def _pair_inputs(a: ir.Graph | ir.Function, b: ir.Graph | ir.Function) -> dict[ir.Value, ir.Value]:
    """Inputs by name where both graphs have it, the others by their order."""
    names = {value.name: value for value in b.inputs}
    pairs = {value: names.pop(value.name) for value in a.inputs if value.name in names}
    pairs.update(zip((value for value in a.inputs if value not in pairs), names.values(), strict=False))
    return pairs


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    for part in (model.graph, *model.functions.values()):
        yield from walk(part)


def _of_tables(sides: Iterable[Mapping[str, str]], before: str = "") -> Iterator[Change]:
    """What differs between two tables; ``before`` stands before each key."""
    a, b = sides
    for key in dict.fromkeys((*a, *b)):
        if change := _change(f"{before}{key}", a.get(key), b.get(key)):
            yield change


def _change(what: str, a: str | None, b: str | None) -> Change | None:
    if a == b:
        return None
    return Change("added" if a is None else "removed" if b is None else "changed", what, a or "", b or "")


def _title(node: ir.Node, where: str) -> str:
    return f"{where}{operator_text(node)} '{node.name or ''}'"


def _made(node: ir.Node) -> str:
    return ", ".join(tensor_text(value) for value in node.outputs if value.name)


def _source(value: ir.Value | None) -> str:
    """What makes a value, in words."""
    if value is None:
        return "nothing"
    node = value.producer()
    if node is None:
        return str(value.name)
    place = f" output {value.index()} of" if len(node.outputs) > 1 else ""
    return f"{place} {_title(node, '')}".strip()


def _is_body(*attributes: ir.Attr) -> bool:
    return all(each.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) and not each.is_ref() for each in attributes)


def _attribute(attribute: ir.Attr | None) -> str:
    if attribute is None:
        return "not there"
    if attribute.is_ref():
        return f"the function's {attribute.ref_attr_name}"
    value = attribute.value
    if attribute.type is ir.AttributeType.TENSOR:
        values = value.numpy().reshape(-1)[:8].tolist()
        return f"{tensor_text(value)} {str(values)[1:-1]}"
    return _TYPES.get(attribute.type, "") or repr(list(value) if isinstance(value, (list, tuple)) else value)


_TYPES = {ir.AttributeType.GRAPH: "a graph", ir.AttributeType.GRAPHS: "graphs", ir.AttributeType.TENSORS: "tensors"}


def _call_title(row: CallFacts) -> str:
    where = row.module or row.source
    return f"{'call of' if row.kind == 'function' else row.kind} {row.function} '{row.node}'" + (f" in {where}" if where else "")


def _call_changes(row: CallFacts, other: CallFacts | None, node: ir.Node, match: ir.Node | None) -> Iterator[Change]:
    if other is None:
        yield Change("removed", _call_title(row), a=", ".join(row.arguments))
        return
    assert match is not None
    left, right = ({key: value for key, value in dataclasses.asdict(each).items() if key not in _NOT_COMPARED} for each in (row, other))
    changes = [
        Change("changed", f"{_call_title(row)}: {key}", _text(left[key]), _text(right[key])) for key in left if left[key] != right[key]
    ]
    if not changes and _called_attributes(node):
        attributes = dict.fromkeys((*node.attributes, *match.attributes))
        sides = [
            {name: attribute_digest(each.attributes[name]) if name in each.attributes else None for name in attributes}
            for each in (node, match)
        ]
        changes = [
            Change("changed", f"{_call_title(row)}: {name}", _attribute(node.attributes.get(name)), _attribute(match.attributes.get(name)))
            for name in attributes
            if sides[0][name] != sides[1][name]
        ]
    yield from changes


def _code_changes(a: Mapping[str, Fingerprint], b: Mapping[str, Fingerprint]) -> Iterator[Change]:
    """Functions whose forward or backward differs, where both files say it, taken alike."""
    for name in a:
        for half in ("forward", "backward") if name in b else ():
            left, right = getattr(a[name], half), getattr(b[name], half)
            if left != right and left.partition(":")[0] == right.partition(":")[0]:
                yield Change("changed", f"the {half} of {name}", left, right)


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _said(record: Any, *without: str) -> str:
    return _fields({key: value for key, value in dataclasses.asdict(record).items() if key not in without})


def _fields(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items() if value not in (None, "", False))


def _layout(step: StepLayout | None) -> dict[str, str]:
    if step is None:
        return {}
    return {each.name: repr(getattr(step, each.name)) for each in dataclasses.fields(step)}
