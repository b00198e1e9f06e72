"""Shared by the tests of commands."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from exporter.cli import main


@pytest.fixture
def run(tmp_path):
    def invoke(*arguments):
        return CliRunner().invoke(main, [str(a) for a in arguments])

    return invoke


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"
