"""What a command says of a model that it wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporter.files.read import open_model
from exporter.files.tensors import data_files
from symbolics.text import clean

__all__ = ["Written"]


@dataclass(frozen=True)
class Written:
    """A model on disk, with the files that keep its tensors beside it.

    Attributes:
        path: The model.
        size: Its bytes, those files' with it.
        data: Those files, in order of their names.
    """

    path: Path
    size: int
    data: tuple[Path, ...]

    @classmethod
    def of(cls, path: Path) -> Written:
        """Of the model at this path."""
        data = tuple(sorted(data_files(open_model(path))))
        return cls(path, sum(file.stat().st_size for file in (path, *data)), data)

    @property
    def facts(self) -> dict[str, Any]:
        """The same for --json."""
        return {"file": str(self.path), "bytes": self.size, "data": [str(each) for each in self.data]}

    def said(self, more: str = "") -> str:
        """A line about it: its path and bytes, in which of them tensors are, and what else there is to say of it."""
        beside = f", tensors in {', '.join(clean(file.name) for file in self.data)}" if self.data else ""
        return f"wrote {clean(str(self.path))} ({self.size:,} bytes{beside}{more})"
