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
_TRANSLATION = "_optimize_graph"  # what torch.onnx.export(dynamo=False) looks up in its module, and calls with the traced graph


@contextlib.contextmanager
def float64_by_default() -> Iterator[None]:
    """While the block runs, a graph in float64 alone is translated with float64 as the default type; its trace is not touched."""
    exporter = private.torchscript_exporter()
    original = getattr(exporter, _TRANSLATION)

    def translated(graph: Any, *args: Any, **kwargs: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if _is_wide(graph) else before)
        try:
            return original(graph, *args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    setattr(exporter, _TRANSLATION, translated)
    try:
        yield
    finally:
        setattr(exporter, _TRANSLATION, original)


def _is_wide(graph: Any) -> bool:
    """Whether tensors are in float64 and no other floating type; a number is traced as one, without a shape."""
    if any(node.kind() == _NO_FLOAT64 for node in graph.nodes()):
        return False
    values = [*graph.inputs(), *(value for node in graph.nodes() if node.kind() != "prim::Constant" for value in node.outputs())]
    kinds = {value.type().dtype() for value in values if value.isCompleteTensor()}
    return {kind for kind in kinds if kind is not None and kind.is_floating_point} == {torch.float64}
