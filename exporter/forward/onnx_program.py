"""torch's ONNXProgram of an export under a hook: calling it, its sessions and verify=True run PythonOps, too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx
import torch
from torch.utils import _pytree as pytree

from exporter.files.named import names_in
from symbolics.node.dtypes import as_real
from symbolics.text import shown
from symbolics.users import warn

__all__ = ["HookedProgram", "check_outputs", "make_runnable"]

# What torch's own verify=True warns of, here in units of the largest value of an output, or of 1.
_TOLERANCE = 5e-3


class HookedProgram(torch.onnx.ONNXProgram):
    """An ONNXProgram whose sessions know PythonOps, and may run the Functions that this very process has just exported.

    Attributes:
        functions: Their classes, those that no import finds among them.
    """

    functions: tuple[Any, ...]

    def initialize_inference_session(self, initializer: Callable[[str | bytes], Any] | None = None) -> None:
        """As torch's; without an initializer of the caller's own, the session is one of `exporter.inference_session`."""
        super().initialize_inference_session(initializer or self._session)

    def call_reference(self, *args: Any, **kwargs: Any) -> Sequence[torch.Tensor]:
        """As torch's, on `exporter.reference_evaluator`."""
        from exporter.runtime.reference import reference_evaluator
        from exporter.runtime.tensors import to_array, to_tensor

        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if leaf is not None]
        leaves = [as_real(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        feeds = {
            str(value.name): to_array(torch.as_tensor(leaf).detach()) for value, leaf in zip(self.model.graph.inputs, leaves, strict=False)
        }
        return tuple(map(to_tensor, reference_evaluator(self.model, self._allowed()).run(None, feeds)))

    def _session(self, model: str | bytes) -> Any:
        from exporter.runtime.session import inference_session  # an export alone needs no onnxruntime

        return inference_session(onnx.load_from_string(model) if isinstance(model, bytes) else model, self._allowed())

    def _allowed(self) -> list[Any]:
        return [*self.functions, *names_in(self.model)]


def make_runnable(program: torch.onnx.ONNXProgram, functions: Iterable[Any]) -> None:
    """Let torch's program, in place, run what was exported."""
    program.__class__ = HookedProgram
    assert isinstance(program, HookedProgram)
    program.functions = tuple(functions)


def check_outputs(program: torch.onnx.ONNXProgram, model: Any, args: Any, kwargs: dict[str, Any] | None) -> None:
    """What torch.onnx.export(verify=True) is for: the checker, and the outputs on onnxruntime against those of the model.

    Warns:
        PythonopWarning: The outputs differ.

    Raises:
        onnx.checker.ValidationError: The file is no valid ONNX.
        RunError: It does not run.
    """
    onnx.checker.check_model(program.model_proto, full_check=True)
    if not isinstance(model, torch.nn.Module):
        return
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args or ())
    with torch.no_grad():
        wanted = [leaf for leaf in pytree.tree_leaves(copy.deepcopy(model)(*args, **(kwargs or {}))) if isinstance(leaf, torch.Tensor)]
    found = program(*args, **(kwargs or {}))
    for value, got, want in zip(program.model.graph.outputs, found, wanted, strict=False):
        if got.shape != want.shape or not _close(got, want):
            warn(
                f"verify=True: the output {shown(value.name or '')} differs from the model's on the example arguments. A model that draws random numbers, "
                "as Dropout does in training mode, always does; otherwise exporter.verify(model, args, bisect=True) looks for the node."
            )


def _close(got: torch.Tensor, want: torch.Tensor) -> bool:
    if not want.is_floating_point():
        return bool(torch.equal(got.to(want.dtype), want))
    got, want = got.double(), want.double()
    scale = float(want[want.isfinite()].abs().max()) if bool(want.isfinite().any()) else 1.0
    return bool(torch.allclose(got, want, rtol=0.0, atol=_TOLERANCE * max(scale, 1.0), equal_nan=True))
