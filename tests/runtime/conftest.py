"""Paths: the Functions of these tests are imported by name, as a file would name them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
