"""What a Function computes with beside its arguments: values of its class and module, and torch's default type of new tensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from symbolics.node.classes import is_class, look
from symbolics.node.fingerprints import halves_of

__all__ = ["FEW", "SHORT", "USUAL", "other_values", "outside_values", "values_read"]

_DEFAULT_TYPE = "torch:get_default_dtype()"
#: What need not be said.
USUAL = (_DEFAULT_TYPE, "float32")
#: Characters of a text, numbers, and items of a tuple, list or tensor, that count as a value.
SHORT, _LARGE, FEW = 64, 2**53, 16


def outside_values(what: Any) -> dict[str, Any]:
    """The values that a Function reads and that no file sets, as they are in this process.

    Args:
        what: As `symbolics.node.fingerprints.fingerprint` takes it.

    Returns:
        ``module:name`` -> a number or a short text, or a tuple of them for a short tuple, list or tensor.
    """
    found, torch = values_read(what), sys.modules.get("torch")  # files without Functions open where it is not
    halves = halves_of(what)
    if torch is not None and (not halves or any(half.makes_tensors for half in halves)):
        found[_DEFAULT_TYPE] = str(torch.get_default_dtype()).removeprefix("torch.")
    return found


def values_read(what: Any) -> dict[str, Any]:
    """The numbers, short texts and short tuples, lists and tensors of them that a Function reads of its class, its module, and classes, namespaces and modules of its own package, as they are now.

    Truth values of a module are left out, which tell what a machine has, and what the Function itself counts in.

    Args:
        what: As `symbolics.node.fingerprints.fingerprint` takes it.

    Returns:
        ``module:name`` of each -> its value.
    """
    halves, found = halves_of(what), {}
    written = {name for half in halves for name in half.written}
    for half in halves:
        for label, (holder, name) in half.places.items():
            if name in written:
                continue
            value = _plain(look(holder, name) if is_class(holder) else holder.get(name))
            if _is_small(value) or (type(value) is tuple and len(value) <= FEW and all(map(_is_small, value))):
                found[label] = value
    return found


def other_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The label of each value that both have and that is not the same, with what it is now and what it was."""
    return [(label, now[label], before[label]) for label in sorted(before.keys() & now.keys()) if before[label] != now[label]]


def _plain(value: Any) -> Any:
    """A list as a tuple, and a small tensor as the tuple of its numbers."""
    torch = sys.modules.get("torch")
    if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
        known = value.layout is torch.strided and value.device.type == "cpu" and value.numel() <= FEW and not value.is_complex()
        return tuple(value.detach().flatten().tolist()) if known else None
    return tuple(value) if type(value) is list and len(value) <= FEW else value


def _is_small(value: Any) -> bool:
    if type(value) is str:
        return len(value) <= SHORT
    return type(value) in (bool, int, float) and abs(value) < _LARGE  # neither infinity nor nan
