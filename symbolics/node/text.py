"""Texts that come from a file, as they may be shown."""

from __future__ import annotations

__all__ = ["clean", "cut", "shown"]


def shown(name: str) -> str:
    """A name from a file as it may be shown: short, on one line, without control characters."""
    return repr(name[:120])[1:-1]


def clean(text: str, limit: int = 200) -> str:
    """A text of a file on one line, without control characters, cut at ``limit``."""
    kept = text[: limit + 1]
    out = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii") for c in kept)
    return out if len(kept) <= limit else f"{out[: limit - 1]}…"


def cut(error: BaseException) -> str:
    """What an error says, cut: it may repeat what the file says."""
    return str(error)[:200]
