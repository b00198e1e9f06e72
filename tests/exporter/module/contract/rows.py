"""All rows, in the order of the page: what each does to a module, eager or loaded; what it returns is compared."""

from __future__ import annotations

from tests.exporter.module.contract import calls, modes, places, states
from tests.exporter.module.contract.row import ROWS as _ADDED

__all__ = ["ROWS"]

_AREAS = (modes.MODES, states.STATE, places.PLACES, places.COPIES, calls.HOOKS, calls.FUNC, calls.TRAINING)

ROWS = sorted(_ADDED, key=lambda row: _AREAS.index(row.area))
