"""Texts that come from a file, as they may be shown."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

__all__ = [
    "BEFORE_OPENING",
    "cause",
    "causes",
    "clean",
    "ends",
    "escaped",
    "extra",
    "headline",
    "lookalike",
    "marked",
    "message",
    "printable",
    "quoted",
    "reason",
    "said",
    "shown",
]

_LINES = 6
#: Where a process runs code of the user's before it opens a file.
BEFORE_OPENING = "verify: setup= or --setup; other commands: --register"


def clean(text: str, limit: int = 200) -> str:
    """A text of a file on one line, without control characters, cut at ``limit``."""
    kept = text[: limit + 1]
    out = printable(kept, "")
    return out if len(kept) <= limit else f"{out[: limit - 1]}…"


def printable(text: str, besides: str = "\n\t") -> str:
    """A text without control characters, but for those ``besides``: what a file names may steer the terminal that shows it."""
    return "".join(c if c.isprintable() or c in besides else c.encode("unicode_escape", "backslashreplace").decode("ascii") for c in text)


def ends(text: str, limit: int) -> str:
    """A text on one line; of a long one its beginning and its end: what is wrong stands in either, and names and lists of types in between."""
    text = " ".join(text.split())
    if len(text) > limit:
        text = f"{text[: limit - limit // 4 - 3]} … {text[-limit // 4 :]}"
    return clean(text, 10 * limit)


def extra(name: str) -> str:
    """The command that installs an extra: pythonop is installed from a clone."""
    return f"pip install '.[{name}]' in a clone of pythonop"


def shown(name: str) -> str:
    """A name of a file inside a message: clean, and short enough for several of them."""
    return clean(name, 120)


def escaped(text: str) -> str:
    """A text whose characters outside ASCII are written as in Python and in bash's $'...': a letter that looks like another one is seen."""
    return "".join(c if c.isascii() else f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}" for c in text)


def marked(name: str, limit: int = 120) -> str:
    """A name that somebody may copy, as it may be shown: clean, without characters that look like others."""
    return escaped(clean(name, limit))


def quoted(name: str, limit: int = 120) -> str:
    """`marked` in quotes, as Python takes it."""
    return escaped(repr(clean(name, limit)))


def lookalike(*names: str) -> str:
    """A remark on names that have characters outside ASCII; "" where none has."""
    return "" if all(name.isascii() for name in names) else "; what stands as \\u is no ASCII letter, and may look like one"


def message(text: str, most: int = _LINES) -> str:
    """The text of an error: at most so many lines, none of them endless, and no control characters, whatever a file put into it."""
    lines = text[:10_000].splitlines() or [""]
    kept = lines if len(lines) <= most else [*lines[: most - 1], "…"]
    return "\n".join(clean(line, 300 * most // len(kept)) for line in kept)


def said(error: BaseException) -> str:
    """The message of an exception, also of one whose ``__str__`` fails."""
    try:
        return str(error)
    except Exception:
        return traceback.format_exception_only(error)[-1].strip()


def reason(error: BaseException) -> str:
    """What the first cause of an exception said, as it may be shown: onnx_ir wraps it in an account of its own steps."""
    return clean(said(_first(error)), 500)


def cause(error: BaseException) -> str:
    """The first cause of an exception on one line: its class and the first paragraph of what it said."""
    return headline(_first(error))


def headline(error: BaseException) -> str:
    """An exception on one line: its class and the first paragraph of what it said: a sentence may go on in the next line."""
    first = said(error).strip().partition("\n\n")[0]
    return f"{type(error).__name__}: {ends(first, 300)}" if first else type(error).__name__


def _first(error: BaseException) -> BaseException:
    return list(causes(error))[-1]


def causes(error: BaseException | None, *, contexts: bool = False) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on, each once: such a chain can be a circle.

    Args:
        error: The error; None: nothing.
        contexts: Whether what was handled when an error was raised counts where it was raised from nothing.
    """
    met: list[BaseException] = []
    while error is not None and not any(error is one for one in met):
        met.append(error)
        yield error
        error = error.__cause__ or (error.__context__ if contexts else None)
