"""New nodes over onnx_ir: ``op.MatMul(a, b)`` appends a node, ``a * b`` on values is ``op.Mul(a, b)``.

An emitter knows element types, turns Python numbers into constants, and asks a table of peepholes before it makes a node.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import onnx_ir as ir

from symbolics.graph.scope import Scope

__all__ = ["Emitter", "Operand"]

#: What may stand for an input: a list becomes an int64 vector, a number takes the element type of the other inputs.
Operand = ir.Value | int | float | bool | Sequence[int | ir.Value] | np.ndarray | None

_BOOLEAN = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not", "IsNaN", "IsInf", "Xor"})
_INTEGER = frozenset({"Shape", "Size", "NonZero", "ArgMax", "ArgMin"})
_TYPED_BY = {"Where": 1, "CastLike": 1, "OneHot": 2}  # the output has the type of this input, otherwise of the first


class _Arithmetic:
    """Hands ``+ - * /`` on values to the emitter of the thread that computes: onnx_ir knows one handler for the whole process."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._users = 0
        self._before: Any = None  # whose handler stood there: threads without an emitter of ours go on with it

    @contextlib.contextmanager
    def by(self, emitter: Emitter) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._before = ir.set_value_magic_handler(self)
            self._users += 1
        outer = getattr(self._of_thread, "emitter", None)
        self._of_thread.emitter = emitter
        try:
            yield
        finally:
            self._of_thread.emitter = outer
            with self._lock:
                self._users -= 1
                if not self._users:
                    ir.set_value_magic_handler(self._before)

    def _current(self) -> Any:
        emitter = getattr(self._of_thread, "emitter", None) or self._before
        if emitter is None:
            raise ValueError("arithmetic on values outside of a rule: write with an emitter's functions, or within its arithmetic()")
        return emitter

    def Add(self, a: Operand, b: Operand) -> ir.Value:  # the names that onnx_ir calls
        return self._current().Add(a, b)

    def Sub(self, a: Operand, b: Operand) -> ir.Value:
        return self._current().Sub(a, b)

    def Mul(self, a: Operand, b: Operand) -> ir.Value:
        return self._current().Mul(a, b)

    def Div(self, a: Operand, b: Operand) -> ir.Value:
        return self._current().Div(a, b)

    def Neg(self, a: Operand) -> ir.Value:
        return self._current().Neg(a)


_ARITHMETIC = _Arithmetic()


class Emitter:
    """Collects new nodes in ``nodes``; the caller puts them into a graph.

    Numbers among the inputs take the element type of the first tensor that is no boolean; lists are int64.

    Attributes:
        peepholes: Operator -> functions of the emitter and the inputs and attributes of a node that is about to be made. The
            first that returns a value saves the node.
        scope: Names and constants of the build.
        parent: The emitter of the graph around, where this one makes the body of a control flow node.
    """

    peepholes: ClassVar[Mapping[str, Sequence[Callable[..., ir.Value | None]]]] = {}

    def __init__(self, scope: Scope, parent: Emitter | None = None) -> None:
        self.scope = scope
        self.parent = parent
        self.nodes: list[ir.Node] = []
        self._memo: dict[Hashable, ir.Value] = {}

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)

        def emit(*inputs: Operand, **attributes: Any) -> Any:
            return self.node(op_type, inputs, **attributes)

        setattr(self, op_type, emit)
        return emit

    def node(self, op_type: str, inputs: Sequence[Operand], *, domain: str = "", outputs: int = 1, **attributes: Any) -> Any:
        """What a node computes, made as it must be: its output, or the tuple of its outputs where there are several."""
        if outputs == 1 and not domain and (rows := self.peepholes.get(op_type)) is not None:
            # By type: isinstance asks onnx_ir's protocols whether a number is one, slowly; so here and below.
            plain = {k: v.value if type(v) is ir.Attr else v for k, v in attributes.items()}
            for row in rows:
                if (found := row(self, *inputs, **plain)) is not None:
                    return found
        return self.raw(op_type, inputs, domain=domain, outputs=outputs, **attributes)

    def raw(self, op_type: str, inputs: Sequence[Operand], *, domain: str = "", outputs: int = 1, **attributes: Any) -> Any:
        """Append a node as it stands. Its output, or the tuple of its outputs where there are several."""
        values = self._operands(inputs)
        while not domain and values and values[-1] is None:  # an execution provider may refuse an empty name where nothing follows
            values.pop()
        node = ir.Node(domain, op_type, values, [_attribute(k, v) for k, v in attributes.items() if v is not None], num_outputs=outputs)
        node.name = self.scope.name(op_type)
        body = next((v for v in attributes.values() if type(v) is ir.Graph), None)
        dtype = None if body is not None else _output_type(op_type, values, attributes)
        for i, out in enumerate(node.outputs):
            out.name = node.name if i == 0 else f"{node.name}_{i}"
            if dtype is not None and (i == 0 or op_type == "Split"):
                out.type = ir.TensorType(dtype)
        if body is not None:  # If, Loop, Scan: what their bodies give; a Loop's body says first whether to go on
            for out, inner in zip(node.outputs, body.outputs[1 if op_type == "Loop" else 0 :]):
                out.type = inner.type
        if op_type == "TopK":
            node.outputs[1].type = ir.TensorType(ir.DataType.INT64)
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else tuple(node.outputs)

    def add(self, node: ir.Node) -> ir.Node:
        """Append a node made elsewhere."""
        self.nodes.append(node)
        return node

    def child(self) -> Self:
        """An emitter for the body of a control flow node; it may use what this one built so far."""
        return type(self)(self.scope, self)

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[Self]:
        """Within it ``+ - * /`` on values append to this emitter, in this thread."""
        with _ARITHMETIC.by(self):
            yield self

    def memo(self, key: Hashable, make: Callable[[], ir.Value]) -> ir.Value:
        """What ``make`` built the first time it was asked for ``key``, in this scope or an enclosing one."""
        scope: Emitter | None = self
        while scope is not None:
            if (known := scope._memo.get(key)) is not None:
                return known
            scope = scope.parent
        made = self._memo[key] = make()
        return made

    # -------------------------------------------------------------------------------------------------- constants
    def constant(self, value: Any, dtype: ir.DataType) -> ir.Value:
        """A constant, once per build."""
        return self.scope.constant(value, dtype)

    def i64(self, value: Any) -> ir.Value:
        """An int64 constant: a scalar of a number, a vector of a list."""
        return self.scope.constant(value, ir.DataType.INT64)

    def number(self, value: float, like: ir.Value) -> ir.Value:
        """A scalar of the element type of ``like``."""
        return self.scope.constant(value, like.dtype or ir.DataType.FLOAT)

    def const(self, value: ir.Value | None) -> np.ndarray | None:
        """The array of a value that no training step changes, otherwise None."""
        return self.scope.const(value)

    def ints(self, value: ir.Value | None) -> list[int] | None:
        """A constant vector of integers, None where the value is no constant."""
        array = self.const(value)
        return None if array is None else [int(i) for i in array.reshape(-1)]

    def vector(self, dims: Sequence[int | ir.Value]) -> ir.Value:
        """An int64 vector of numbers and vectors, end to end."""
        parts: list[ir.Value | list[int]] = []
        for d in dims:
            if not isinstance(d, int) and isinstance(d, ir.Value):
                parts.append(d)
            elif parts and isinstance(parts[-1], list):
                parts[-1].append(d)
            else:
                parts.append([d])
        vectors = [p if isinstance(p, ir.Value) else self.i64(p) for p in parts]
        return self.i64([]) if not vectors else vectors[0] if len(vectors) == 1 else self.Concat(*vectors, axis=0)

    def _operands(self, inputs: Sequence[Operand]) -> list[ir.Value | None]:
        like: ir.DataType | None = None
        out: list[ir.Value | None] = []
        for i in inputs:
            if i is None or type(i) is ir.Value:
                out.append(i)
            elif isinstance(i, (list, tuple)):
                out.append(self.vector(i))
            elif isinstance(i, np.ndarray):
                out.append(self.constant(i, ir.DataType.from_numpy(i.dtype)))
            elif not isinstance(i, (int, float)) and isinstance(i, ir.Value):  # torch's exporter has a class of its own
                out.append(i)
            else:
                if like is None:
                    kinds = (v.dtype for v in inputs if isinstance(v, ir.Value))
                    like = next((k for k in kinds if k not in (None, ir.DataType.BOOL)), None) or ir.DataType.FLOAT
                out.append(self.constant(i, like))
        return out


def _output_type(op_type: str, values: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> ir.DataType | None:
    if op_type in _BOOLEAN:
        return ir.DataType.BOOL
    if op_type in _INTEGER:
        return ir.DataType.INT64
    if op_type == "Cast":
        return ir.DataType(attributes["to"])
    if op_type == "ConstantOfShape":
        value = attributes.get("value")
        return ir.DataType.FLOAT if value is None else value.dtype
    index = _TYPED_BY.get(op_type, 0)
    source = values[index] if index < len(values) else None
    return None if source is None else source.dtype


def _attribute(name: str, value: Any) -> ir.Attr:
    if type(value) is ir.Attr:
        return ir.Attr(name, value.type, value.value)
    if isinstance(value, (list, tuple)) and not (value and isinstance(value[0], (float, str))):
        return ir.AttrInt64s(name, [int(v) for v in value])
    return ir.convenience.convert_attribute(name, int(value) if isinstance(value, (int, np.integer)) else value)
