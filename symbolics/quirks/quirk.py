"""What is known of a wrong of another project."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Quirk"]


@dataclass(frozen=True)
class Quirk:
    """A wrong of another project that we work around until it is mended.

    Its canary in tests/symbolics/quirks/ runs upstream without the cure, and fails on the release that needs it no more.

    Attributes:
        upstream: Whose wrong it is.
        seen: The newest release that has it.
        wrong: What is wrong.
        issue: Where upstream has been told, None where no report was found.
        cure: What may go when it is mended, where that is not the file of the quirk (those of elsewhere.py).
    """

    upstream: str
    seen: str
    wrong: str
    issue: str | None = None
    cure: str | None = None
