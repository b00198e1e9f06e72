"""Program: an exported model in memory, and how it reaches the disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from symbolics.errors import ExportError, PythonopError
from symbolics.node.dialects import to_dialect

__all__ = ["Program", "save_model", "whole"]

# protobuf cannot write more than 2 GiB; torch.onnx switches to external data here, so do we.
_EXTERNAL_ABOVE = 1536 * 1024 * 1024


@dataclass
class Program:
    """An exported model.

    Attributes:
        model: The ONNX model.
        inlined: qualified name -> reason, for Functions that were inlined without being asked to.
        torch_program: torch's ONNXProgram (dynamo=True), None otherwise.
    """

    model: ir.Model
    inlined: dict[str, str] = field(default_factory=dict)
    torch_program: Any = None

    @property
    def model_proto(self) -> onnx.ModelProto:
        """The model as a protobuf message, parameters inside."""
        return ir.to_proto(self.model)

    def save(self, path: str | os.PathLike[str], schema: str | None = None, *, external_data: bool | None = None) -> None:
        """Write the model to ``path``; the file appears whole or not at all.

        Args:
            path: Where to. With external data, the tensors go to ``<path>.data`` beside it.
            schema: None for the format of docs/format.md; "documented", "ort-1.15", "ort-1.16" or "ort-1.17" for the
                dialect of another reader. Dialects have no ``call`` and warn about what is lost.
            external_data: Keep tensors in a file beside the model; default: only where protobuf's 2 GiB need it.

        Raises:
            ExportError: The path cannot be written, or a dialect cannot say a node.
        """
        save_model(self.model if schema is None else to_dialect(self.model, schema), path, external_data=external_data)


def save_model(model: ir.Model, path: str | os.PathLike[str], *, external_data: bool | None = None) -> None:
    """Write a model so that a failure leaves nothing half written.

    Raises:
        ExportError: The path cannot be written.
    """
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    external = external_data if external_data is not None else size > _EXTERNAL_ABOVE
    with whole(path) as draft:
        ir.save(model, draft, external_data=f"{draft.name}.data" if external else None, format="protobuf")


@contextlib.contextmanager
def whole(path: str | os.PathLike[str], error: type[PythonopError] = ExportError) -> Iterator[Path]:
    """A place to write to, from which a file reaches its path when it is whole; where something fails, nothing is left.

    Args:
        path: Where the file goes.
        error: What to raise where it cannot be written.

    Yields:
        A path of the same name in a folder of its own. Other files in that folder go beside the first, and before it.
    """
    target = Path(path)
    try:
        # Beside the target, so that the last step is a rename on one file system.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            draft = Path(folder, target.name)
            yield draft
            for file in sorted(Path(folder).iterdir(), key=draft.__eq__):
                os.replace(file, target.with_name(file.name))
    except OSError as problem:
        raise error(f"cannot write {target}: {problem.strerror or problem}; nothing was written") from problem
