"""Which execution provider runs which nodes of a model: asked of onnxruntime while it opens the model, which is never run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from exporter.runtime.library import available, check_onnxruntime
from exporter.runtime.pipeline import Arranged, arrange
from exporter.runtime.providers import CPU, add_devices, choose
from exporter.runtime.refusals import refusal
from exporter.runtime.usable import open_only
from symbolics.errors import PythonopError, RunError

__all__ = ["placements", "said_of_placements"]


def placements(proto: onnx.ModelProto, providers: Sequence[Any]) -> dict[str, dict[str, int]]:
    """Provider -> operator -> how many nodes it runs, as onnxruntime fuses and splits the model; the CPU last.

    Args:
        proto: The model, which may be changed. Its PythonOps stand on the CPU; their Functions are not looked for.
        providers: As `exporter.inference_session` takes them.

    Raises:
        RunError: onnxruntime or the library of PythonOps is not there, or onnxruntime cannot open the model, or is too old to say it.
        ArgumentError: As `exporter.inference_session`.
    """
    check_onnxruntime()
    if problem := available(proto):
        raise RunError(problem)
    import onnxruntime

    if not hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"):
        raise RunError(f"onnxruntime {onnxruntime.__version__} does not say which provider runs what: install onnxruntime 1.24 or newer")
    choice = choose(providers)
    found = arrange(Arranged(proto, choice.names, accelerate=False))
    options: Any = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is wrong is raised
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    add_devices(options, choice)
    try:
        session = open_only(found.proto, options, choice.providers, python_ops=found.python_ops, enable_fallback=0)
    except PythonopError:
        raise
    except Exception as error:
        told = refusal(error)
        if told is None:
            raise
        raise RunError(told) from error
    counts: dict[str, Counter[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        counts.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    return {name: dict(counts[name].most_common()) for name in sorted(counts, key=lambda name: name == CPU)}


def said_of_placements(found: Mapping[str, Mapping[str, int]]) -> list[str]:
    """A line a provider; of the CPU beside others, which operators."""
    lines = []
    for name, operators in found.items():
        line = f"{name} runs {sum(operators.values())} nodes"
        if name == CPU and len(found) > 1:
            line += f": {', '.join(f'{count} {operator}' for operator, count in list(operators.items())[:12])}"
        lines.append(line)
    if CPU not in found:
        lines.append(f"no node is left to {CPU}")
    return lines
