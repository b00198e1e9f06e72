"""The ``call`` attribute: what the numeric attributes of a PythonOp cannot say of a call, as JSON. No torch here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from symbolics.errors import ExportError, FormatError
from symbolics.node.arguments import encode, loads
from symbolics.node.call import Autocast, AutogradCall, ModuleOrigin, OperatorOrigin
from symbolics.node.limits import MAX_BYTES, MAX_ITEMS
from symbolics.node.names import FORMAT_VERSION
from symbolics.node.records import read_record
from symbolics.text import shown

__all__ = ["CallRecord", "read_call", "write_call"]


def write_call(call: AutogradCall, names: Callable[[Any], str | None]) -> str:
    """The text of the attribute.

    Args:
        call: The call.
        names: The name under which an object is registered, or None.

    Raises:
        ExportError: An argument has no portable form, or the call passes a limit of the format.
    """
    data: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "id": call.id,
        "args": [_encode_part(call, f"argument {i}", value, names) for i, value in enumerate(call.args)],
        "kwargs": {
            _plain_key(call, key): _encode_part(call, f"keyword argument {key!r}", value, names) for key, value in call.kwargs.items()
        },
        "outputs": _encode_part(call, "its output", call.outputs, names),
    }
    if call.autocast.dtypes:
        data["autocast"] = {"dtypes": dict(sorted(call.autocast.dtypes.items())), "cache": call.autocast.cache}
    if call.passed is not None and call.passed != len(call.args):
        data["passed"] = call.passed
    if call.operator is not None:
        data["operator"] = vars(call.operator)
    if call.module is not None:
        data["module"] = vars(call.module)
    data |= {key: list(value) for key in _LISTS if (value := getattr(call, key))}
    text = json.dumps(data, separators=(",", ":"))
    if len(text) > MAX_BYTES:
        raise ExportError(
            f"{call.name}: the arguments of one call take {len(text)} bytes, a file may hold {MAX_BYTES}: pass large data as a tensor"
        )
    return text


def _encode_part(call: AutogradCall, place: str, value: Any, names: Callable[[Any], str | None]) -> Any:
    try:
        return encode(value, names)
    except ExportError as error:
        raise error.at(f"{call.name}, {place}") from error


def _plain_key(call: AutogradCall, key: str) -> str:
    if encode(key) != key:
        raise ExportError(f"{call.name}: the name of the keyword argument {key!r} cannot be written: pass it in a dict")
    return key


@dataclass(frozen=True)
class CallRecord:
    """The ``call`` attribute as docs/format.md has it, its values not decoded."""

    version: int
    id: str
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: Any
    autocast: Autocast
    passed: int | None
    operator: OperatorOrigin | None
    module: ModuleOrigin | None
    no_gradient: tuple[int, ...]
    no_gradient_seen: tuple[int, ...]


_LISTS = ("no_gradient", "no_gradient_seen")  # of inputs, by number
# What ``call`` may leave out.
_DEFAULTS: dict[str, Any] = {
    "autocast": {"dtypes": {}, "cache": True},
    "passed": None,
    "operator": None,
    "module": None,
    **{key: [] for key in _LISTS},
}


def read_call(text: str, name: str) -> CallRecord:
    """The ``call`` attribute of a PythonOp or PythonOpGrad.

    Args:
        text: The attribute.
        name: The Function, for messages.

    Raises:
        FormatError: The text is not what docs/format.md says, or of a newer format.
    """
    data, place = loads(text), f"{shown(name)}: its call attribute"
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is int and version > FORMAT_VERSION:
        raise FormatError(
            f"{shown(name)}: its call has format {version}, this release reads up to {FORMAT_VERSION}: install a newer pythonop"
        )
    call: CallRecord = read_record({**_DEFAULTS, **data} if isinstance(data, dict) else data, CallRecord, place)
    if call.version != FORMAT_VERSION or (call.passed is not None and not 0 <= call.passed <= len(call.args)):
        raise FormatError.damaged(place, f"version {call.version} or passed {call.passed} is out of range")
    for key in _LISTS:
        numbers = getattr(call, key)
        if len(numbers) > MAX_ITEMS or not all(before < number for before, number in zip((-1, *numbers), numbers, strict=False)):
            raise FormatError.damaged(place, f"its {key} does not count up among the inputs")
    return call
