"""Functions of torch.jit.script in torch.onnx.export(dynamo=False)."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "scripts_as_python"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript's translation of a scripted function knows no rank of what a list of sizes makes, nor a list that is changed: index_add into such "
    "a tensor, as packages for graphs write it, has no translation",
)


def scripts_as_python(_: torch.nn.Module) -> AbstractContextManager[None]:
    """While the block runs, a trace goes through scripted functions without branches and loops as if they were not scripted."""
    return private.scripts_run_as_python()
