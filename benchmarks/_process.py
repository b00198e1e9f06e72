"""What the kernel says of this process."""

from __future__ import annotations

from exporter.verification import memory

__all__ = ["status"]


def status(key: str) -> float:
    """A line of /proc/self/status in MiB."""
    return memory.status(key) / 2**20
