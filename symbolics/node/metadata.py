"""What the metadata of a file says (docs/format.md): state, pairing of gradients, layout of a training step.

No torch here: readers of a file need none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from symbolics.errors import FormatError
from symbolics.node.limits import MAX_ITEMS
from symbolics.node.names import (
    BUFFERS_KEY,
    CUMULATIVE_KEY,
    FORMAT_VERSION,
    FUNCTIONS_KEY,
    GRADIENTS_KEY,
    RULES_KEY,
    STATE_KEY,
    STEP_KEY,
    STILLED_KEY,
    TANGENTS_KEY,
    TRANSIENT_KEY,
    VALUES_KEY,
    VERSION_KEY,
)
from symbolics.node.records import parse, read_record
from symbolics.text import shown

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = [
    "BufferChanges",
    "Fingerprint",
    "GradientPairing",
    "StateEntry",
    "StepLayout",
    "TangentPairing",
    "changes_of",
    "check_version",
    "forget_absent_changes",
    "pairing_of",
    "read_changes",
    "read_cumulative",
    "read_functions",
    "read_pairing",
    "read_rules",
    "read_state",
    "read_step",
    "read_stilled",
    "read_tangents",
    "read_transient",
    "read_values",
    "results_of",
    "state_of",
    "step_of",
    "tangents_of",
    "write_changes",
    "write_cumulative",
    "write_functions",
    "write_pairing",
    "write_rules",
    "write_state",
    "write_step",
    "write_stilled",
    "write_tangents",
    "write_transient",
    "write_values",
]


T = TypeVar("T")

#: Characters of one fingerprint.
_MAX_FINGERPRINT = 128


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
class BufferChanges:
    """The buffers that a forward changes, but for the running statistics of BatchNormalization nodes in training mode.

    Attributes:
        carried: initializer of a buffer -> the output of the graph that holds its next value.
        lost: What else the forward changes, a buffer, parameter or attribute of a module -> why no output holds its next value.
        always: Whether the forward is that of eval mode, and so changes them in both modes.
    """

    carried: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    always: bool = False


@dataclass(frozen=True)
class Fingerprint:
    """With which code a Function was exported (`symbolics.node.fingerprints`).

    Attributes:
        forward, backward: ``how it was taken:digest`` of each half; "" for one that is not written in Python.
    """

    forward: str = ""
    backward: str = ""


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

    @property
    def reached(self) -> dict[str, str]:
        """The outputs without those of unreached names."""
        return {name: gradient for name, gradient in self.outputs.items() if name not in self.unreached}


@dataclass(frozen=True)
class TangentPairing:
    """Which value of a tangent graph is the tangent of which.

    Attributes:
        inputs: name in wrt -> name of the graph input that takes its tangent.
        outputs: forward output name -> name of the graph output that holds its tangent.
        unreached: outputs that depend on nothing in wrt; their tangents are zeros.
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

    @property
    def seeds(self) -> list[str]:
        """The inputs that random numbers come from. A step counts them up, and they are no state of model or optimizer."""
        held = {*self.parameters.values(), *self.buffers.values()}
        return [name for name in self.carried.values() if name not in held and not name.startswith("state.")]


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
        place = f"metadata {key}"
        found: T = read_record(parse(metadata[key], place), kind, place)
        return found

    def write(value: T) -> str:
        return json.dumps(value, default=vars, separators=(",", ":"))

    return read, write


#: The parameters and buffers, by the model's names for them.
read_state, write_state = _entry(STATE_KEY, dict[str, StateEntry])
#: The pairing of a training file.
read_pairing, write_pairing = _entry(GRADIENTS_KEY, GradientPairing)
#: The pairing of a file with a forward-mode derivative.
read_tangents, write_tangents = _entry(TANGENTS_KEY, TangentPairing)
#: The layout of a training step.
read_step, write_step = _entry(STEP_KEY, StepLayout)
#: The buffers that a forward changes.
read_changes, write_changes = _entry(BUFFERS_KEY, BufferChanges)
_read_functions, write_functions = _entry(FUNCTIONS_KEY, dict[str, Fingerprint])
#: The gradient rules that operators had, of somebody's own.
read_rules, write_rules = _entry(RULES_KEY, dict[str, str])
_read_values, write_values = _entry(VALUES_KEY, dict[str, dict[str, Any]])
_read_cumulative, write_cumulative = _entry(CUMULATIVE_KEY, tuple[str, ...])
#: The modules that eval mode has taken something out of.
read_stilled, write_stilled = _entry(STILLED_KEY, tuple[str, ...])
#: The names that the model's state_dict does not have: buffers that are not persistent, and what belongs to a loss.
read_transient, write_transient = _entry(TRANSIENT_KEY, tuple[str, ...])


def read_cumulative(metadata: Mapping[str, str]) -> frozenset[str]:
    """The running means that are averages of all batches so far, by initializer.

    Raises:
        FormatError: The text is not a list of names.
    """
    return frozenset(_read_cumulative(metadata) or ())


def read_functions(metadata: Mapping[str, str]) -> dict[str, Fingerprint]:
    """The fingerprints of Functions by the names that nodes have; none where the file says nothing.

    Raises:
        FormatError: The text is damaged, or passes the limits.
    """
    found = _read_functions(metadata) or {}
    if len(found) > MAX_ITEMS or any(len(half) > _MAX_FINGERPRINT for each in found.values() for half in (each.forward, each.backward)):
        raise FormatError.damaged(
            f"metadata {FUNCTIONS_KEY}",
            f"it has more than {MAX_ITEMS} Functions, or a fingerprint of more than {_MAX_FINGERPRINT} characters",
        )
    return found


def read_values(metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The values that Functions read beside their arguments, by the names of the Functions; none where the file says nothing.

    Raises:
        FormatError: The text is damaged, or passes the limits.
    """
    found = {
        name: {label: tuple(value) if type(value) is list else value for label, value in each.items()}
        for name, each in (_read_values(metadata) or {}).items()
    }
    values = [value for each in found.values() for value in each.values()]
    items = [item for value in values for item in (value if type(value) is tuple else (value,))]
    if len(found) + max(len(values), len(items)) > MAX_ITEMS or any(
        type(item) not in (bool, int, float, str) or len(str(item)) > _MAX_FINGERPRINT for item in items
    ):
        raise FormatError.damaged(
            f"metadata {VALUES_KEY}",
            f"it has more than {MAX_ITEMS} entries, or something else than numbers and short texts, and lists of them",
        )
    return found


# ------------------------------------------------------------------------------------------- names that the graph must have


def state_of(model: ir.Model) -> dict[str, StateEntry] | None:
    """`read_state` of a model that has all its initializers.

    Raises:
        FormatError: The text is damaged, or names an initializer that the graph lacks.
    """
    entries = read_state(model.metadata_props)
    missing = [entry.initializer for entry in (entries or {}).values() if entry.initializer not in model.graph.initializers]
    if missing:
        raise FormatError(
            f"the file lacks the initializers {', '.join(repr(shown(name)) for name in missing[:5])} that its metadata names: "
            "something removed them, or it is damaged"
        )
    return entries


def changes_of(model: ir.Model) -> BufferChanges:
    """`read_changes` of a model that has all these values; none where the file says nothing.

    Raises:
        FormatError: The text is damaged, names what the graph lacks, or one output as two buffers' next value.
    """
    changes = read_changes(model.metadata_props)
    if changes is None:
        return BufferChanges()
    outputs, entries = _names(model.graph.outputs), (read_state(model.metadata_props) or {}).values()
    _check_names(BUFFERS_KEY, "output", changes.carried.values(), outputs)
    _check_names(BUFFERS_KEY, "buffer or parameter", changes.carried, {entry.initializer for entry in entries})
    if outputs <= set(changes.carried.values()):
        raise FormatError.damaged(f"metadata {BUFFERS_KEY}", "it leaves the model without an output of its own")
    return changes


def forget_absent_changes(model: ir.Model) -> None:
    """Take out of the metadata the next values of buffers that a part of a file does not give out: it changes none of these."""
    changes = read_changes(model.metadata_props)
    if changes is None:
        return
    outputs = _names(model.graph.outputs)
    carried = {name: output for name, output in changes.carried.items() if output in outputs}
    if carried or changes.lost:
        model.metadata_props[BUFFERS_KEY] = write_changes(replace(changes, carried=carried))
    else:
        del model.metadata_props[BUFFERS_KEY]


def results_of(model: ir.Model) -> list[ir.Value]:
    """The outputs of a forward file that the model returns: without the next values of its buffers."""
    carried = set(changes_of(model).carried.values())
    return [value for value in model.graph.outputs if value.name not in carried]


def pairing_of(model: ir.Model) -> GradientPairing | None:
    """`read_pairing` of a model that has all these values; each is the gradient of one.

    Raises:
        FormatError: The text is damaged, names a value that the graph lacks, or one value as two gradients.
    """
    pairing = read_pairing(model.metadata_props)
    if pairing is not None:
        _check_pairing(model, GRADIENTS_KEY, pairing, results=pairing.inputs, sources=pairing.outputs)
    return pairing


def tangents_of(model: ir.Model) -> TangentPairing | None:
    """`read_tangents` of a model that has all these values; each is the tangent of one.

    Raises:
        FormatError: The text is damaged, names a value that the graph lacks, or one value as two tangents.
    """
    pairing = read_tangents(model.metadata_props)
    if pairing is not None:
        _check_pairing(model, TANGENTS_KEY, pairing, results=pairing.outputs, sources=pairing.inputs)
    return pairing


def _check_pairing(
    model: ir.Model, key: str, pairing: GradientPairing | TangentPairing, results: Collection[str], sources: Collection[str]
) -> None:
    """See that a pairing names outputs of the model (``results``), and inputs and initializers (``sources``), each with a value of its own."""
    inputs, outputs = _names(model.graph.inputs), _names(model.graph.outputs)
    kind = "gradient" if isinstance(pairing, GradientPairing) else "tangent"
    for what, names, known in (
        ("output", results, outputs),
        ("input", pairing.inputs.values(), inputs),
        ("input or initializer", sources, inputs | model.graph.initializers.keys()),
        ("output", pairing.outputs.values(), outputs),
        (kind, pairing.unreached, pairing.outputs.keys()),
    ):
        _check_names(key, what, names, known)
    if outputs <= set(pairing.outputs.values()):
        raise FormatError.damaged(f"metadata {key}", "it leaves the model without an output of its own")


def step_of(model: ir.Model) -> StepLayout | None:
    """`read_step` of a model that has all these inputs and outputs.

    Raises:
        FormatError: The text is damaged, or names an input or output that the graph lacks.
    """
    step = read_step(model.metadata_props)
    if step is not None:
        inputs, outputs = _names(model.graph.inputs), _names(model.graph.outputs)
        _check_names(STEP_KEY, "output", (*step.carried, step.loss), outputs)
        _check_names(STEP_KEY, "input", step.carried.values(), inputs)
        _check_names(STEP_KEY, "input", (*step.inputs, *step.targets), inputs)
        for tied in (step.parameters, step.buffers):
            _check_names(STEP_KEY, "input", dict.fromkeys(tied.values()), inputs)
    return step


def _names(values: Iterable[ir.Value]) -> set[str]:
    return {value.name for value in values if value.name is not None}


def _check_names(key: str, what: str, names: Collection[str], known: Container[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name not in known:
            raise FormatError.damaged(f"metadata {key}", f"it names the {what} {shown(name)!r}, which the graph lacks")
        if name in seen:
            raise FormatError.damaged(f"metadata {key}", f"it names the {what} {shown(name)!r} twice")
        seen.add(name)
