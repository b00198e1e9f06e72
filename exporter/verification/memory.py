"""Memory of a step, as the Linux kernel counts it; elsewhere it is not measured.

A step takes what is resident at most while steps run, less what was resident before the first one. Pages of files (code, mapped
weights) are left out on both sides: which of them are there depends on what ran before.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["HighWater", "status"]

_SELF = Path("/proc/self")


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes.

    Raises:
        OSError: There is no such file.
    """
    text = next(line for line in (_SELF / "status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(text.split()[1]) * 1024


class HighWater:
    """The memory of steps that this process takes from now on: `begin` after some that warm up, `bytes` after those that count."""

    def __init__(self) -> None:
        try:
            # What earlier work freed and the C library kept would be taken again, and not be seen.
            ctypes.CDLL(None).malloc_trim(0)
            self._before: int | None = status("RssAnon")
            self.begin()
        except (OSError, AttributeError, StopIteration):  # another system, another C library, a /proc that may not be written
            self._before = None

    def begin(self) -> None:
        """Forget the largest that was resident so far."""
        if self._before is not None:
            (_SELF / "clear_refs").write_text("5")

    def bytes(self) -> int | None:
        """What the steps took at most; None where the system does not say."""
        if self._before is None:
            return None
        return max(0, status("VmHWM") - status("RssFile") - status("RssShmem") - self._before)
