"""``python -m benchmarks``: every benchmark with its targets; 1 where one is missed."""

from __future__ import annotations

import sys

from benchmarks import export

sys.exit(export.main())
