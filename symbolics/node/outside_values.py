"""What a Function computes with beside its arguments: values of its class and module, and torch's default type of new tensors."""

from __future__ import annotations

import sys
from typing import Any

from symbolics.node.fingerprints import makes_tensors, values_read

__all__ = ["USUAL", "outside_values"]

_DEFAULT_TYPE = "torch:get_default_dtype()"
#: What need not be said.
USUAL = (_DEFAULT_TYPE, "float32")


def outside_values(what: Any) -> dict[str, Any]:
    """The values that a Function reads and that no file sets, as they are in this process.

    Args:
        what: As `symbolics.node.fingerprints.fingerprint` takes it.

    Returns:
        ``module:name`` -> a number or a short text.
    """
    found, torch = values_read(what), sys.modules.get("torch")  # files without Functions open where it is not
    if torch is not None and makes_tensors(what):
        found[_DEFAULT_TYPE] = str(torch.get_default_dtype()).removeprefix("torch.")
    return found
