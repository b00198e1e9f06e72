"""What the metadata of a file says (docs/format.md): state, pairing of gradients, layout of a training step.

No torch here: readers of a file need none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from symbolics.errors import FormatError
from symbolics.node.names import CUMULATIVE_KEY, FORMAT_VERSION, GRADIENTS_KEY, STATE_KEY, STEP_KEY, VERSION_KEY

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

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
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

    carried: Mapping[str, str]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    loss: str
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    untrained: tuple[str, ...]
    optimizer: str
    hyperparameters: tuple[Mapping[str, Any], ...]


def check_version(metadata: Mapping[str, str]) -> int | None:
    """The format version of a file, None for a file that is not ours.

    Raises:
        FormatError: The version is no number, or newer than this reader.
    """
    text = metadata.get(VERSION_KEY)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise FormatError(f"metadata {VERSION_KEY} is {text[:40]!r}, not a version number: the file is damaged")
    version = int(text)
    if not 1 <= version <= FORMAT_VERSION:
        raise FormatError(f"the file has pythonop format {version}, this release reads up to {FORMAT_VERSION}: install a newer pythonop")
    return version


def write_state(entries: Mapping[str, StateEntry]) -> str:
    """JSON text for `STATE_KEY`."""
    return json.dumps({name: vars(entry) for name, entry in entries.items()}, separators=(",", ":"))


def read_state(metadata: Mapping[str, str]) -> dict[str, StateEntry] | None:
    """The table of parameters and buffers, None where the file has none.

    Raises:
        FormatError: The text is not such a table.
    """
    text = metadata.get(STATE_KEY)
    if text is None:
        return None
    out = {}
    for name, entry in _json_object(STATE_KEY, text).items():
        ok = (
            isinstance(entry, dict)
            and set(entry) == {"initializer", "kind", "trainable", "persistent"}
            and isinstance(entry["initializer"], str)
            and entry["kind"] in ("parameter", "buffer")
            and isinstance(entry["trainable"], bool)
            and isinstance(entry["persistent"], bool)
        )
        if not ok:
            raise FormatError(f"metadata {STATE_KEY}: the entry of {name!r} is malformed: the file is damaged")
        out[name] = StateEntry(**entry)
    return out


def write_cumulative(names: Iterable[str]) -> str:
    """JSON text for `CUMULATIVE_KEY`."""
    return json.dumps(list(names), separators=(",", ":"))


def read_cumulative(metadata: Mapping[str, str]) -> frozenset[str]:
    """The running means that are averages of all batches so far, by initializer.

    Raises:
        FormatError: The text is not a list of names.
    """
    text = metadata.get(CUMULATIVE_KEY, "[]")
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"metadata {CUMULATIVE_KEY} is not JSON: the file is damaged") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError(f"metadata {CUMULATIVE_KEY} is not a list of names: the file is damaged")
    return frozenset(names)


def write_pairing(pairing: GradientPairing) -> str:
    """JSON text for `GRADIENTS_KEY`."""
    return json.dumps(
        {"inputs": dict(pairing.inputs), "outputs": dict(pairing.outputs), "unreached": list(pairing.unreached)}, separators=(",", ":")
    )


def read_pairing(metadata: Mapping[str, str]) -> GradientPairing | None:
    """The pairing of a training file, None where it has none.

    Raises:
        FormatError: The text is not a pairing.
    """
    text = metadata.get(GRADIENTS_KEY)
    if text is None:
        return None
    data = _json_object(GRADIENTS_KEY, text)
    if not (_maps_names(data.get("inputs")) and _maps_names(data.get("outputs")) and _lists_names(data.get("unreached"))):
        raise FormatError(f"metadata {GRADIENTS_KEY} is malformed: the file is damaged")
    return GradientPairing(data["inputs"], data["outputs"], tuple(data["unreached"]))


def write_step(layout: StepLayout) -> str:
    """JSON text for `STEP_KEY`."""
    return json.dumps(asdict(layout), separators=(",", ":"))


def read_step(metadata: Mapping[str, str]) -> StepLayout | None:
    """The layout of a training step, None where the file is none.

    Raises:
        FormatError: The text is not a layout.
    """
    text = metadata.get(STEP_KEY)
    if text is None:
        return None
    data = _json_object(STEP_KEY, text)
    ok = (
        set(data) == {f.name for f in fields(StepLayout)}
        and all(_maps_names(data[k]) for k in ("carried", "parameters", "buffers"))
        and all(_lists_names(data[k]) for k in ("inputs", "targets", "untrained"))
        and all(isinstance(data[k], str) for k in ("loss", "optimizer"))
        and isinstance(data["hyperparameters"], list)
        and all(isinstance(group, dict) for group in data["hyperparameters"])
    )
    if not ok:
        raise FormatError(f"metadata {STEP_KEY} is malformed: the file is damaged")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return StepLayout(**values)


def _maps_names(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value.values())


def _lists_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _json_object(key: str, text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"metadata {key} is not JSON: the file is damaged") from error
    if not isinstance(data, dict):
        raise FormatError(f"metadata {key} is not a JSON object: the file is damaged")
    return data
