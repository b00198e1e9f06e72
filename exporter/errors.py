"""What pythonop raises and warns of."""

from __future__ import annotations

from symbolics import errors
from symbolics.errors import *  # noqa: F403

__all__ = errors.__all__
