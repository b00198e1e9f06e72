"""Texts that come from a file, as they may be shown."""

from __future__ import annotations

__all__ = ["clean", "shown"]


def clean(text: str, limit: int = 200) -> str:
    """A text of a file on one line, without control characters, cut at ``limit``."""
    kept = text[: limit + 1]
    out = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii") for c in kept)
    return out if len(kept) <= limit else f"{out[: limit - 1]}…"


def shown(name: str) -> str:
    """A name of a file inside a message: clean, and short enough for several of them."""
    return clean(name, 120)
