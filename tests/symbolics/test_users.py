"""The user's own line: behind whatever frames of ours, torch's and Python's a warning is given."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch

import exporter
from symbolics import errors
from symbolics.users import is_users, users_frame, warn


@pytest.mark.parametrize(
    ("file", "users"),
    [
        (__file__, True),
        ("<stdin>", True),
        ("<ipython-input-3>", True),
        (os.path.join(os.path.dirname(os.__file__), "site-packages", "entmax", "losses.py"), True),
        ("<frozen importlib._bootstrap>", False),
        (copy.__file__, False),
        (torch.nn.functional.__file__, False),
        (errors.__file__, False),
    ],
)
def test_is_users(file, users):
    assert is_users(file) is users


def _as_if_in(file, source):
    """A function whose code says that it stands in a file."""
    scope = {"__name__": "inner", "warn": warn, "frame": lambda: users_frame(sys._getframe(1))}
    exec(compile(source, file, "exec"), scope)
    return scope["call"]


def test_a_warning_names_the_users_line_once():
    ours = _as_if_in(str(Path(errors.__file__).parent / "capture" / "x.py"), "def call():\n    warn('said')")
    torchs = _as_if_in(torch.nn.functional.__file__, "def call(inner):\n    inner()")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            line = sys._getframe().f_lineno + 1
            torchs(ours)
    assert [(one.category, one.filename, one.lineno) for one in caught] == [(exporter.errors.PythonopWarning, __file__, line)]


def test_users_frame():
    inner = _as_if_in(torch.nn.functional.__file__, "def call():\n    return frame()")
    assert inner().f_code is sys._getframe().f_code
    assert users_frame(sys._getframe()) is sys._getframe()
