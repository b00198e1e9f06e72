"""Numbers beside tensors in float64, for torch.onnx.export(dynamo=False)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "float64_by_default"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript's symbolic functions write numbers in torch's default type, float32, also beside tensors in float64",
)


_NO_FLOAT64 = "aten::scaled_dot_product_attention"  # torch's symbolic function refuses its own mask in this type
_FLOAT64, _ONNX_FLOAT = 7, 1  # as TorchScript and ONNX number the types
#: What Python computes with numbers, and our rewrites with the sizes of a trace.
_ARITHMETIC = {
    f"aten::{name}"
    for name in ("abs", "add", "ceil", "div", "floor", "floor_divide", "maximum", "minimum", "mul", "neg", "pow", "reciprocal", "remainder", "rsub", "sqrt", "sub", "where")
}  # fmt: skip
_TO_DTYPE = 5  # the inputs of aten::to(x, dtype, non_blocking, copy, memory_format)
_TRANSLATION = "_optimize_graph"  # what torch.onnx.export(dynamo=False) looks up in its module, and calls with the traced graph


@contextlib.contextmanager
def float64_by_default() -> Iterator[None]:
    """While the block runs, a graph in float64 alone is translated with float64 as the default type; its trace is not touched."""
    exporter = private.torchscript_exporter()
    original = getattr(exporter, _TRANSLATION)

    def translated(graph: Any, *args: Any, **kwargs: Any) -> Any:
        before, wide, numbers = torch.get_default_dtype(), _is_wide(graph), _numbers(graph)
        if wide:
            _widen(graph)
        torch.set_default_dtype(torch.float64 if wide else before)
        try:
            found = original(graph, *args, **kwargs)
        finally:
            torch.set_default_dtype(before)
        if not wide:
            _give_digits(found, numbers)
        return found

    setattr(exporter, _TRANSLATION, translated)
    try:
        yield
    finally:
        setattr(exporter, _TRANSLATION, original)


def _is_wide(graph: Any) -> bool:
    """Whether tensors are in float64 and no other floating type; a number is traced as one, without a shape, and what follows from sizes as one in float32."""
    if any(node.kind() == _NO_FLOAT64 for node in graph.nodes()):
        return False
    numbers = {value.debugName() for value in _of_sizes(graph)}
    values = [*graph.inputs(), *(value for node in graph.nodes() if node.kind() != "prim::Constant" for value in node.outputs())]
    kinds = {value.type().dtype() for value in values if value.isCompleteTensor() and value.debugName() not in numbers}
    return {kind for kind in kinds if kind is not None and kind.is_floating_point} == {torch.float64}


def _is_float32(value: Any) -> bool:
    return bool(value.isCompleteTensor()) and value.type().dtype() is torch.float32


def _of_sizes(graph: Any) -> list[Any]:
    """The values that follow from sizes alone: Python's numbers, which a trace has as tensors."""
    found, names = list[Any](), set[str]()

    def follows(value: Any) -> bool:
        node = value.node()
        if node.kind() == "prim::Constant":
            return not _is_float32(value)  # a number in Python is one in float64
        return value.debugName() in names

    for node in graph.nodes():
        computed = (
            (node.kind() in _ARITHMETIC or _is_cast(node) or _becomes_wide(node))
            and all(map(follows, node.inputs()))
            and any(v.debugName() in names for v in node.inputs())
        )
        if computed or node.kind() == "prim::NumToTensor":
            found += node.outputs()
            names |= {value.debugName() for value in node.outputs()}
    return found


def _is_cast(node: Any) -> bool:
    """Whether this is our own cast of a whole number; torch.as_tensor(n ** 0.5) is one of a float, and a float32 tensor."""
    return node.kind() == "aten::to" and len(list(node.inputs())) == _TO_DTYPE and node.inputsAt(0).type().dtype() is torch.int64


def _becomes_wide(node: Any) -> bool:
    """Whether this is what torch.tensor(n ** 0.5, dtype=torch.float64) makes of the number."""
    kinds = (
        [use.user.output().type() for use in node.output().uses() if use.user.kind() == "aten::to"] if node.kind() == "aten::detach" else []
    )
    return bool(kinds) and len(kinds) == len(node.output().uses()) and all(kind.dtype() is torch.float64 for kind in kinds)


def _widen(graph: Any) -> None:
    """Make the casts to float32 of sizes, which `symbolics.quirks.pytorch.integers` writes, casts to float64."""
    for value in _of_sizes(graph):
        if not _is_float32(value):
            continue
        if _is_cast(value.node()) and len((dtype := value.node().inputsAt(1)).uses()) == 1:
            dtype.node().i_("value", _FLOAT64)
        value.inferTypeFrom(torch.empty((), dtype=torch.float64))


def _numbers(graph: Any) -> dict[float, float]:
    """The numbers of Python in a trace, by what float32 makes of them, where that is another number."""
    found = list[float]()
    for value in (value for node in graph.nodes() if node.kind() == "prim::Constant" for value in node.outputs()):
        constant = value.toIValue()
        if isinstance(constant, torch.Tensor) and not constant.dim() and constant.dtype is torch.float64:
            constant = constant.item()
        found += [constant] if isinstance(constant, float) else []
    return {rounded: number for number in found if (rounded := _in_float32(number)) != number}


def _in_float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


def _give_digits(graph: Any, numbers: dict[float, float]) -> None:
    """Write the scalars in float32 that are numbers of Python as casts of all their digits, as `symbolics.quirks.torchlib.number_arithmetic` does."""
    for node in list(graph.nodes()):
        constant = node.t("value") if node.kind() == "onnx::Constant" and node.kindOf("value") == "t" else None
        if constant is None or constant.dim() or constant.dtype is not torch.float32 or (number := numbers.get(float(constant))) is None:
            continue
        node.t_("value", torch.tensor(number, dtype=torch.float64))
        result = node.output()
        cast = graph.create("onnx::Cast", [result], 1)
        cast.i_("to", _ONNX_FLOAT)
        cast.insertAfter(node)
        result.replaceAllUsesAfterNodeWith(cast, cast.output())
        cast.output().setType(result.type())
        result.inferTypeFrom(torch.empty((), dtype=torch.float64))
