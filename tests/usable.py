"""Every model that a test makes passes onnx.checker and opens in onnxruntime, or the test says why not.

`watch` puts a check behind each function that hands out a model. What is wrong is found where the test ends (`Found.take`), so that a test that
expects some error does not take it for its own.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

import exporter.forward.dynamo
import exporter.forward.torchscript
import exporter.gradient_graph.tangents
import exporter.module.load
import exporter.training.artifacts
import exporter.verification.verify  # noqa: F401
from exporter.files.read import open_model
from exporter.files.skeleton import skeleton
from exporter.forward.session import judged
from exporter.gradient_graph.build import build_gradient_graph
from exporter.gradient_graph.tangents import build_tangent_graph
from exporter.runtime.usable import check_usable
from exporter.training.artifacts import with_state_inputs
from exporter.training.step import export_training_step
from symbolics.errors import PythonopError

__all__ = ["watch"]

_KNOWN = 4096  # models; a digest and a text each


class Found:
    """What is wrong with the models that were made since somebody asked.

    Attributes:
        wrong: What is wrong with each.
        looks: Whether models are checked now.
    """

    def __init__(self) -> None:
        self.looks = True
        self.wrong: list[str] = []
        self._known: OrderedDict[bytes, str] = OrderedDict()

    def take(self) -> list[str]:
        """What was found; it is forgotten."""
        found, self.wrong = self.wrong, []
        return found

    def look(self, what: str, model: ir.Model, source: Any = None) -> None:
        """Check a model that was made; one that was made of a file that is no better says nothing."""
        if self.looks and (text := self._said(model)) and (source is None or not self._said(open_model(source))):
            self.wrong.append(f"{what}: {text}")

    def _said(self, model: ir.Model) -> str:
        digest = hashlib.sha256(skeleton(model.clone()).SerializeToString()).digest()
        if digest not in self._known:
            self._known[digest] = _wrong_with(model)
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        return self._known[digest]


def _wrong_with(model: ir.Model) -> str:
    try:
        check_usable(model)
    except PythonopError as error:
        return str(error)
    return ""


def watch() -> Found:
    """Look at what the functions give out from now on; to be called before test files import them."""
    found = Found()

    def behind(function: Callable[..., Any], look: Callable[..., None]) -> None:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            look(result, *args)
            return result

        for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "exporter"]:
            for name, value in list(vars(module).items()):
                if value is function:
                    setattr(module, name, watched)

    behind(judged, lambda _, current, *more: found.look("export", current.program.model))
    behind(build_gradient_graph, lambda model, source, *more: found.look("gradient graph", model, source))
    behind(build_tangent_graph, lambda model, source, *more: found.look("tangent graph", model, source))
    behind(export_training_step, lambda step, *more: found.look("training step", step.model))
    behind(with_state_inputs, lambda model, *more: found.look("evaluation", model))
    return found
