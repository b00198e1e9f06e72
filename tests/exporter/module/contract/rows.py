"""All rows, in the order of the page: what each does to a module, eager or loaded; what it returns is compared."""

from __future__ import annotations

from tests.exporter.module.contract import calls, modes, places, states  # noqa: F401  (each adds its own; the order is that of the page)
from tests.exporter.module.contract.row import ROWS

__all__ = ["ROWS"]
