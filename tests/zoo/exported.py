"""Every model of the zoo, exported once in a process: exporting is most of the time that a test of a model takes.

`models` marks the tests of one model as one group, which pytest-xdist (``--dist loadgroup``) gives to one process.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import exporter
from tests.support import counted_applies
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.entry import Entry
from tests.zoo.public import PUBLIC, ibert_first_step

__all__ = ["DYNAMIC", "MODELS", "SMALL", "Exported", "calls_of", "entry_of", "exported", "models"]

MODELS = {**PUBLIC, **ARCHITECTURES}
#: Those of which a size may vary.
DYNAMIC = ("bloom", "entmax15", "gpt2", "bert", "t5", "llama", "unet nearest", "unet bilinear")
#: Those that are exported in a moment: the others are slow.
SMALL = {"mlp", "quantization aware", "entmax15", "snn", "timm_activations", "checkpointed"}


@dataclass(frozen=True)
class Exported:
    """A model through one exporter.

    Attributes:
        entry: The model and what is known about it; its state is that before the export. Run a copy: others look at it too.
        calls: Eager's calls of user Functions in one forward.
        checkpoints: Eager's calls of torch's reentrant checkpoint.
        program: What exporter.export returned; not to be changed either.
    """

    entry: Entry
    calls: list[type]
    checkpoints: int
    program: exporter.Program


def entry_of(name: str) -> Entry:
    """A model of the zoo, always with the same weights."""
    torch.manual_seed(0)
    return ibert_first_step() if name == "ibert_first_step" else MODELS[name]()


def calls_of(entry: Entry) -> tuple[list[type], int]:
    """Eager's calls of user Functions in a forward, and how many reentrant checkpoints it runs."""
    checkpoints = 0
    own = torch.utils.checkpoint.CheckpointFunction.forward

    def counting(*args: Any) -> Any:
        nonlocal checkpoints
        checkpoints += 1
        return own(*args)

    with counted_applies() as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.checkpoint.CheckpointFunction, "forward", staticmethod(counting))
        copy.deepcopy(entry.model)(*entry.args)
    return calls, checkpoints


@functools.cache
def exported(name: str, dynamo: bool, dynamic: bool = False) -> Exported:
    """A model of the zoo, exported; with ``dynamic``, with the entry's dynamic shapes."""
    entry = entry_of(name)
    calls, checkpoints = calls_of(entry)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notice of a checkpoint has a test of its own
        program = exporter.export(
            copy.deepcopy(entry.model), entry.args, dynamo=dynamo, dynamic_shapes=entry.dynamic_shapes if dynamic else None
        )
    return Exported(entry, calls, checkpoints, program)


def models(names: Iterable[str] = MODELS, quick: Collection[str] = SMALL) -> pytest.MarkDecorator:
    """Parametrizes a test by ``name``; slow but for those that are in ``quick``."""
    marks = {name: [pytest.mark.xdist_group(name)] + [pytest.mark.slow] * (name not in quick) for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in names])
