"""The ONNX opset that was asked for is the one that is written."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from symbolics import torch_private as private
from symbolics.errors import ExportError

__all__ = ["check_asked", "check_opset"]


def check_asked(opset: int | None, dynamo: bool) -> None:
    """Refuse, before torch does with a page of graph, an opset that its exporter cannot write.

    Raises:
        ExportError: ONNX has no such opset, or the exporter refuses it.
    """
    newest = onnx.defs.onnx_opset_version()
    if opset is not None and not 1 <= opset <= newest:
        raise ExportError(
            f"opset_version={opset}: the newest opset that onnx {onnx.__version__} knows is {newest}; leave it out for torch's own"
        )
    if opset is not None and not dynamo and opset not in private.opsets_of_torchscript():
        newer = ", or for dynamo=True (--dynamo) for a newer one" if opset > max(private.opsets_of_torchscript()) else ""
        raise _refusal(opset, "torch's exporter does not write it", newer)


def check_opset(model: ir.Model, opset: int | None) -> None:
    """Refuse a file of another opset than the one that was asked for: torch writes 18 and converts, and only logs where it cannot.

    Raises:
        ExportError: The opset of the model is another one.
    """
    written = model.opset_imports.get("")
    if opset is not None and written != opset:
        older = ", or for dynamo=False (--no-dynamo) for an older one" if written is not None and opset < written else ""
        raise _refusal(opset, f"torch's exporter wrote opset {written} and cannot convert the model to {opset}", older)


def _refusal(opset: int, why: str, other: str) -> ExportError:
    return ExportError(f"opset_version={opset}: {why}. Ask for another opset: 18 to 23 of either exporter{other}")
