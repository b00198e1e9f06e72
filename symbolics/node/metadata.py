"""What the metadata of a file says (docs/format.md): state, pairing of gradients, layout of a training step.

No torch here: readers of a file need none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from symbolics.errors import FormatError
from symbolics.node.names import CUMULATIVE_KEY, FORMAT_VERSION, GRADIENTS_KEY, STATE_KEY, STEP_KEY, VERSION_KEY
from symbolics.node.records import read_record
from symbolics.node.text import shown

__all__ = [
    "GradientPairing",
    "StateEntry",
    "StepLayout",
    "check_version",
    "read_cumulative",
    "read_pairing",
    "read_state",
    "read_step",
    "write_cumulative",
    "write_pairing",
    "write_state",
    "write_step",
]


T = TypeVar("T")


@dataclass(frozen=True)
class StateEntry:
    """One name of the model's parameters and buffers.

    Attributes:
        initializer: The graph initializer that holds its value. Tied names share one.
        kind: ``"parameter"`` or ``"buffer"``.
        trainable: ``requires_grad`` of a parameter at export; False for buffers.
        persistent: Whether the name is a key of ``state_dict()``.
    """

    initializer: str
    kind: Literal["parameter", "buffer"]
    trainable: bool
    persistent: bool = True


@dataclass(frozen=True)
class GradientPairing:
    """Which value of a training graph is the gradient of which.

    Attributes:
        inputs: forward output name -> name of the graph input that takes its gradient.
        outputs: name in wrt -> name of the graph output that holds its gradient.
        unreached: names in wrt that no output depends on; their gradient outputs are zeros.
    """

    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepLayout:
    """What the inputs and outputs of a training step are.

    Attributes:
        carried: output name -> the input that takes its value in the next step.
        inputs: Inputs that hold the model's arguments.
        targets: Inputs that hold what the loss takes beside the model's output.
        loss: The output that holds the loss.
        parameters: state_dict key -> the input that holds it; tied keys share one, frozen ones have none.
        buffers: The same for buffers that a step updates.
        untrained: Keys of trainable parameters that the loss does not depend on: a step leaves them as they are.
        optimizer: Its name.
        hyperparameters: One dict a group of parameters, as torch's param_groups; ``keys`` lists its state_dict keys.
    """

    carried: dict[str, str]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    loss: str
    parameters: dict[str, str]
    buffers: dict[str, str]
    untrained: tuple[str, ...]
    optimizer: str
    hyperparameters: tuple[dict[str, Any], ...]


def check_version(metadata: Mapping[str, str]) -> int | None:
    """The format version of a file, None for a file that is not ours.

    Raises:
        FormatError: The version is no number, or newer than this reader.
    """
    text = metadata.get(VERSION_KEY)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise FormatError.damaged(f"metadata {VERSION_KEY}", f"it is {shown(text)!r}, not a version number")
    version = int(text)
    if not 1 <= version <= FORMAT_VERSION:
        raise FormatError(f"the file has pythonop format {version}, this release reads up to {FORMAT_VERSION}: install a newer pythonop")
    return version


def _entry(key: str, kind: type[T]) -> tuple[Callable[[Mapping[str, str]], T | None], Callable[[T], str]]:
    """The reader and the writer of one key.

    Reading takes the metadata and gives None where the file lacks the key; a text that does not say a ``kind`` is a
    FormatError. Writing gives the JSON text.
    """

    def read(metadata: Mapping[str, str]) -> T | None:
        if key not in metadata:
            return None
        try:
            data = json.loads(metadata[key])
        except (ValueError, RecursionError) as error:
            raise FormatError.damaged(f"metadata {key}", "it is not JSON") from error
        found: T = read_record(data, kind, f"metadata {key}")
        return found

    def write(value: T) -> str:
        return json.dumps(value, default=vars, separators=(",", ":"))

    return read, write


#: The parameters and buffers, by the model's names for them.
read_state, write_state = _entry(STATE_KEY, dict[str, StateEntry])
#: The pairing of a training file.
read_pairing, write_pairing = _entry(GRADIENTS_KEY, GradientPairing)
#: The layout of a training step.
read_step, write_step = _entry(STEP_KEY, StepLayout)
_read_cumulative, write_cumulative = _entry(CUMULATIVE_KEY, tuple[str, ...])


def read_cumulative(metadata: Mapping[str, str]) -> frozenset[str]:
    """The running means that are averages of all batches so far, by initializer.

    Raises:
        FormatError: The text is not a list of names.
    """
    return frozenset(_read_cumulative(metadata) or ())
