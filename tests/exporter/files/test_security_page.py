"""SECURITY.md: what it lists is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import exporter
from exporter.cli import COMMANDS
from exporter.files.trust import _POWERFUL

PAGE = (Path(__file__).parents[3] / "SECURITY.md").read_text(encoding="utf-8")


def test_the_modules_that_no_pattern_covers():
    section = PAGE.partition("## Modules that no pattern covers")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([\w.]+)`", section)) - {"allow"} == _POWERFUL


def test_every_door_has_a_row():
    """Each command, and each public function that takes allow=."""
    table = PAGE.partition("| you do |")[2].partition("\n\n")[0]
    for command in COMMANDS:
        assert command in re.findall(r"[a-z]+", table), command
    for name in (
        "load",
        "inference_session",
        "reference_evaluator",
        "Trainer",
        "Trainer.load",
        "Trainer.restore",
        "check_gradients",
        "verify",
    ):
        assert f"`{name}`" in table, name
        assert hasattr(exporter, name.partition(".")[0])
