"""How much one call may hold (docs/format.md). Writers refuse what readers would refuse."""

from __future__ import annotations

__all__ = ["MAX_BYTES", "MAX_DEPTH", "MAX_INT_BITS", "MAX_ITEMS"]

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_ITEMS = 1 << 16
MAX_INT_BITS = 1 << 13
