"""A way out: what an export is told in place of what it was told, and what an export that failed says of where to go on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from exporter.errors import frames_behind
from exporter.forward.failures import TorchExporterError, Untranslated, path_of, running_modules, stopped_operator
from symbolics.errors import ExportError, PythonopError
from symbolics.node.names import qualified_name
from symbolics.node.opaque import MISSING
from symbolics.text import causes

__all__ = ["Obstacle", "Way"]


@dataclass(frozen=True)
class Way:
    """What an export is told.

    Attributes:
        dynamo: Which of torch's exporters.
        operators: Entries of ``opaque=`` that mean operators: ``missing``, ``aten::linalg_lstsq``.
        modules: Those that mean modules: classes, or a module itself.
        sizes: Whether the axes that the caller left open stay so.
    """

    dynamo: bool
    operators: tuple[str, ...] = ()
    modules: tuple[Any, ...] = ()
    sizes: bool = True

    def beside(self, asked: Way, model: torch.nn.Module) -> str:
        """What is told otherwise than the caller did, as one writes it."""
        names = [f'"{each}"' for each in self.operators]
        names += [
            f'"{qualified_name(each)}"' if isinstance(each, type) else f"model.{path_of(each, _given(model))}".rstrip(".")
            for each in self.modules
        ]
        parts = [f"dynamo={self.dynamo}"] if self.dynamo is not asked.dynamo else []
        if names:
            parts.append(f"opaque={names[0]}" if names == [f'"{MISSING}"'] else f"opaque=[{', '.join(names)}]")
        if not self.sizes:
            parts.append("fixed sizes (no dynamic_shapes)")
        return ", ".join(parts) or "as asked"

    def past(self, obstacle: Obstacle, model: torch.nn.Module, *, modules: bool) -> Way | None:
        """The way on, past what stood in it; None where there is none.

        Args:
            obstacle: What it was.
            model: The model.
            modules: Whether modules may become nodes.
        """
        if new := [each for each in obstacle.operators if each not in self.operators]:
            return replace(self, operators=(*self.operators, *new))
        if not modules:
            return None
        for module in obstacle.modules:
            if not any(each is module or each is type(module) for each in self.modules):
                entry = type(module) if not isinstance(_given(model), type(module)) else module
                rest = tuple(each for each in self.modules if not _only_inside(each, entry, model))
                return replace(self, operators=(), modules=(*rest, entry))  # what it calls inside is no operator of the graph
        return None


def _meant(entry: Any, model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if module is entry or type(module) is entry]


def _only_inside(entry: Any, around: Any, model: torch.nn.Module) -> bool:
    """Whether all modules that an entry means are inside of those that another means: no call of them is met then."""
    inside = {id(module) for outer in _meant(around, model) for module in outer.modules() if module is not outer}
    return all(id(module) in inside for module in _meant(entry, model))


@dataclass(frozen=True)
class Obstacle:
    """What an error says of what stood in the way.

    Attributes:
        operators: Entries of ``opaque=`` for the operators that could not be translated or captured.
        modules: The modules around it, the innermost first, the model itself last.
    """

    operators: tuple[str, ...] = ()
    modules: tuple[torch.nn.Module, ...] = field(default=())

    @classmethod
    def of(cls, error: BaseException, model: torch.nn.Module) -> Obstacle:
        """Of what an export raised, whose traceback is whole."""
        chain = list(causes(error))
        step = next((each for each in chain if isinstance(each, Untranslated)), None)
        if step is not None:
            return cls((MISSING,), _around(step.module or "", model))
        if isinstance(error, TorchExporterError) and error.module is not None:
            return cls.at(error.module, model)
        root = chain[-1]
        frames = [frame for frame, _ in frames_behind(error)]
        if isinstance(root, ExportError) and root.operators:  # what is too inexact, or no number, as ONNX would have it
            operator = MISSING
        elif isinstance(root, PythonopError) and not isinstance(error, TorchExporterError):
            operator = ""
        else:
            operator = stopped_operator(error, frames)
        running = running_modules(frames)
        path = next((found for module in reversed(running) if (found := path_of(module, model)) is not None), "")
        return cls((operator,) if operator else (), _around(path, model))

    @classmethod
    def at(cls, path: str, model: torch.nn.Module) -> Obstacle:
        """In a module that is known by its path."""
        return cls((), _around(path, model))


def _given(model: torch.nn.Module) -> torch.nn.Module:
    """The user's model: not the module around it and its loss that a training step exports, of which nobody can name a call."""
    return getattr(model, "_pythonop_model", model)


def _around(path: str, model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """The module at a path and those around it, the innermost first, at last the model."""
    known = dict(model.named_modules(remove_duplicate=False))
    parts = path.split(".") if path else []
    found = (known.get(".".join(parts[:count])) for count in range(len(parts), 0, -1))
    containers = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
    inner = [module for module in found if module is not None and module is not _given(model) and type(module) not in containers]
    return (*inner, _given(model))
