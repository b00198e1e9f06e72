"""Sessions of models that have the accelerator's operators already, and its passes by themselves."""

from __future__ import annotations

import exporter
from exporter.cpu.accelerator import CLAIMS, PASSES
from exporter.cpu.operators import DOMAIN, library
from exporter.runtime.accelerate import Request
from exporter.runtime.claims import claim
from exporter.runtime.library import register
from exporter.runtime.session import open_options

__all__ = ["claim_gradients", "inference_session", "rewrite_convolutions", "session_options"]


def session_options(allow=()):
    """As `exporter.session_options`, with the accelerator's operators."""
    options = open_options(allow, None)
    register(options, library())
    return options


def inference_session(model, *, sess_options=None):
    """As `exporter.inference_session`, with the accelerator's operators."""
    return exporter.inference_session(model, sess_options=sess_options or session_options())


def claim_gradients(model):
    """What the accelerator does first, by itself; how many gradients it claimed by their names."""
    claimed = claim(model, CLAIMS)
    model.graph.opset_imports[DOMAIN] = 1
    return claimed


def rewrite_convolutions(model, sizes=None, facts=None, *, native):
    """All passes behind the chains; how many nodes they replaced."""
    request, facts = Request("step", sizes or {}), {} if facts is None else facts
    passes = [each for each in PASSES if each.name != "chains" and (native or not each.needs_library)]
    return sum(each.run(model, request, facts) for each in passes)
