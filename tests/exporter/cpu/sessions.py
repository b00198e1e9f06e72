"""Sessions of models that have the accelerator's operators already."""

from __future__ import annotations

import exporter
from exporter.cpu.operators import library
from exporter.runtime.library import register
from exporter.runtime.session import open_options

__all__ = ["inference_session", "session_options"]


def session_options(allow=()):
    """As `exporter.session_options`, with the accelerator's operators."""
    options = open_options(allow, None)
    register(options, library())
    return options


def inference_session(model, *, sess_options=None):
    """As `exporter.inference_session`, with the accelerator's operators."""
    return exporter.inference_session(model, sess_options=sess_options or session_options())
