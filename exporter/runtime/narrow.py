"""int64 as int32, for files that a provider without integers of 64 bits opens: WebGPU in a browser.

All inputs of int64 take int32, and what is computed of them, or of integers that were short before, without growing is int32, too. What wants int64 has it again by a Cast, and so have outputs, but
for those that are inputs of the next run. Shapes and axes stay what they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import attr, fixed_array, graph_of, name_of
from symbolics.graph.walk import subgraphs, walk

__all__ = ["narrow_integers", "schema_of"]

_I32, _I64 = ir.DataType.INT32, ir.DataType.INT64
_SHORT = frozenset({_I32, ir.DataType.INT16, ir.DataType.INT8, ir.DataType.UINT16, ir.DataType.UINT8, ir.DataType.BOOL})
#: Operators whose results are no larger than what goes in, or one more: a product of two int32 would need more bits.
_SMALL = frozenset(
    """
    Abs Add BitwiseAnd BitwiseOr Cast CastLike Concat Div Equal Expand Flatten Gather GatherElements Greater GreaterOrEqual Identity Less LessOrEqual
    Max Min Mod Neg ReduceMax ReduceMin Reshape ScatterElements Slice Split Squeeze Sub Tile Transpose Unsqueeze Where
    """.split()
)


#: Operators that count: sizes and places of tensors.
_SIZES = frozenset({"ArgMax", "ArgMin", "NonZero", "Shape", "Size", "TopK"})
_DEPTH = 40


def narrow_integers(model: ir.Model, carried: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Let int64 inputs of a graph be int32, in place.

    Args:
        model: Its nodes stand in an order in which they can run.
        carried: Outputs that are inputs of the next run, and those inputs. One whose next value may need more than 32 bits stays int64.

    Returns:
        The names of the inputs that were int64.
    """
    stay: set[str] = set()
    while carried and (large := _Narrowing(model.clone(), stay).run(carried)):
        stay |= large
    narrowing = _Narrowing(model, stay)
    narrowing.run(carried)
    return narrowing.inputs


class _Narrowing:
    """One way over a model.

    Attributes:
        inputs: The names of what was int64.
    """

    def __init__(self, model: ir.Model, stay: Collection[str]) -> None:
        self.graph, self.opset = model.graph, model.opset_imports.get("", 18)
        self.scope = Scope(free_prefix(model.graph, "form/int/"), lambda value: False)
        inputs = [value for value in self.graph.inputs if value.dtype is _I64 and not value.is_initializer() and value.name not in stay]
        self.inputs = [name_of(value) for value in inputs]
        self.small = set(inputs)  # int32 now
        self.wide: list[dict[ir.Value, ir.Value]] = []  # the same in int64, by graph, the innermost last
        for value in inputs:
            value.type = ir.TensorType(_I32)

    def run(self, carried: Mapping[str, str]) -> set[str]:
        """Change the model. The names of inputs whose next values turned out to be int64."""
        self._over(self.graph)
        large = set()
        for place, output in enumerate(self.graph.outputs):
            source = carried.get(name_of(output))
            if output in self.small and source not in self.inputs and not output.is_graph_input():
                self._cast_output(place, output, _I64)
            elif output not in self.small and source in self.inputs:
                large.add(source)
        self.scope.register(self.graph)
        return large

    def _over(self, graph: ir.Graph) -> None:
        self.wide.append({})
        for node in list(graph):
            read = [value for inner in walk([node]) for value in inner.inputs if value in self.small]
            read += [value for body in _bodies(node) for value in body.outputs if value in self.small]
            if _widens(node):
                node.attributes["to"] = ir.AttrInt64("to", _I32)
                node.outputs[0].type = ir.TensorType(_I32)
                self.small.add(node.outputs[0])
            elif read and not (self._branches(node) if node.op_type == "If" and node.domain == "" else self._narrowed(node)):
                self._widened(node)
        if graph is not self.graph:
            self.wide.pop()

    def _branches(self, node: ir.Node) -> bool:
        """The same in the branches of an If; what both give in int32 is int32."""
        branches = subgraphs(node)
        for branch in branches:
            self._over(branch)
        for place, output in enumerate(node.outputs):
            given = [branch.outputs[place] for branch in branches]
            if all(value in self.small for value in given):
                output.type = ir.TensorType(_I32)
                self.small.add(output)
                continue
            for branch, value in zip(branches, given, strict=True):
                if value in self.small:
                    branch.outputs[place] = self._cast(value, _I64, branch)
        return True

    def _narrowed(self, node: ir.Node) -> bool:
        """Let a node compute in int32 where it can; whether it does."""
        types = _types(node, self.opset)
        if types is None or node.op_type not in _SMALL:
            return False
        inputs, outputs, allowed = types
        mine = {kind for kind, value in zip(inputs, node.inputs, strict=True) if value in self.small}
        if not all("tensor(int32)" in allowed.get(kind, ()) for kind in mine):
            return False
        computed = mine & set(outputs)
        replaced: dict[int, ir.Value] = {}
        for place, (kind, value) in enumerate(zip(inputs, node.inputs, strict=True)):
            if kind in mine and value is not None and value not in self.small:
                small = self._small(node, value)
                if small is None:
                    return False
                replaced[place] = small
        for place, value in replaced.items():
            node.replace_input_with(place, value)
        for kind, output in zip(outputs, node.outputs, strict=True):
            if kind in computed:
                output.type = ir.TensorType(_I32)
                self.small.add(output)
        return True

    def _small(self, node: ir.Node, value: ir.Value) -> ir.Value | None:
        """Another operand in int32; None where it may not fit."""
        if not self._fits(value):
            return None
        array = fixed_array(value)
        return self._cast(value, _I32, node) if array is None else self.scope.constant(array, _I32)

    def _fits(self, value: ir.Value | None, depth: int = _DEPTH) -> bool:
        """Whether a value is in int32 already, a constant that fits, a size or place, or made of such."""
        if value is None or value in self.small or (value.dtype is not None and value.dtype is not _I64):
            return True
        if (array := fixed_array(value)) is not None:
            return not array.size or (array.max() <= np.iinfo(np.int32).max and array.min() >= np.iinfo(np.int32).min)
        node = value.producer()
        if node is None or node.domain != "" or not depth:
            return False
        return node.op_type in _SIZES or (
            node.op_type in _SMALL and node.op_type != "Cast" and all(self._fits(each, depth - 1) for each in node.inputs)
        )

    def _widened(self, node: ir.Node) -> None:
        """Let a node, and its bodies, read int64 as before."""
        for inner in walk([node]):
            for place, value in enumerate(inner.inputs):
                if value is not None and value in self.small:
                    inner.replace_input_with(place, self._of(value, node))
        for body in _bodies(node):
            for place, value in enumerate(body.outputs):
                if value in self.small:
                    body.outputs[place] = self._of(value, node)

    def _of(self, value: ir.Value, node: ir.Node) -> ir.Value:
        for known in self.wide:
            if value in known:
                return known[value]
        made = self.wide[-1][value] = self._cast(value, _I64, node)
        return made

    def _cast(self, value: ir.Value, kind: ir.DataType, place: ir.Node | ir.Graph) -> ir.Value:
        """A Cast before a node, or at the end of a graph."""
        node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", kind)], name=self.scope.name("Cast"))
        made = node.outputs[0]
        made.name, made.type, made.shape = node.name, ir.TensorType(kind), value.shape
        if isinstance(place, ir.Node):
            graph_of(place).insert_before(place, node)
        else:
            place.append(node)
        return made

    def _cast_output(self, place: int, output: ir.Value, kind: ir.DataType) -> None:
        made, name = self._cast(output, kind, self.graph), output.name
        self.graph.outputs[place] = made
        output.name, made.name = self.scope.name("before"), name


def _widens(node: ir.Node) -> bool:
    """Whether a Cast makes int64 of what has 32 bits or fewer."""
    return (
        node.op_type == "Cast"
        and node.domain == ""
        and attr(node, "to") == _I64
        and node.inputs[0] is not None
        and node.inputs[0].dtype in _SHORT
    )


def _bodies(node: ir.Node) -> list[ir.Graph]:
    return [body for inner in walk([node]) for body in subgraphs(inner)]


def schema_of(node: ir.Node, opset: int) -> onnx.defs.OpSchema | None:
    """What the standard says of a node's operator in an opset; None for an operator that it has not."""
    try:
        return onnx.defs.get_schema(node.op_type, opset) if node.domain == "" else None
    except onnx.defs.SchemaError:
        return None


def _types(node: ir.Node, opset: int) -> tuple[list[str], list[str], dict[str, Any]] | None:
    """The type variable of each input and of each output, and what each variable may be; None for an operator that is not the standard's."""
    schema = schema_of(node, opset)
    if schema is None or len(node.inputs) > schema.max_input or len(node.outputs) > schema.max_output:
        return None

    def of(formal: Any, count: int) -> list[str]:
        return [formal[min(place, len(formal) - 1)].type_str for place in range(count)]

    allowed = {each.type_param_str: each.allowed_type_strs for each in schema.type_constraints}
    return of(schema.inputs, len(node.inputs)), of(schema.outputs, len(node.outputs)), allowed
