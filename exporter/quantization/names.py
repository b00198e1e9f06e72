"""Names that a graph does not have yet."""

from __future__ import annotations

__all__ = ["free_name"]


def free_name(taken: set[str], name: str) -> str:
    """The name, with a number where it is taken; it is taken then."""
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    taken.add(found)
    return found
