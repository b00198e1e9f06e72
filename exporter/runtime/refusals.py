"""What onnxruntime raises, as errors of ours."""

from __future__ import annotations

import re

from symbolics.errors import RunError
from symbolics.text import clean

__all__ = ["refusal"]


def refusal(error: Exception) -> RunError | None:
    """What onnxruntime raised, as an error of ours that is one of its own as well; None for what else Python raised."""
    kind = type(error)
    its_own = kind.__module__.startswith("onnxruntime.")
    if isinstance(error, RunError) or not (its_own or kind in (RuntimeError, UnicodeDecodeError)):  # the last: of its own message
        return None
    text = " ".join(str(error).split())
    if len(text) > _MOST:  # what is wrong stands in front or at the end: it quotes names and lists of types in between
        text = f"{text[: _MOST - 150]} … {text[-150:]}"
    hint = next((f". {way_out}" for sign, way_out in _WAYS_OUT.items() if re.search(sign, text)), "")
    if its_own and kind not in _REFUSALS:
        _REFUSALS[kind] = type(kind.__name__, (RunError, kind), {"__doc__": "A RunError that is onnxruntime's own class, too."})
    found = _REFUSALS.get(kind, RunError)(f"onnxruntime cannot run the model: {clean(text, 2 * _MOST)}{hint}")
    found.__cause__ = error
    return found


_MOST = 600  # characters of what onnxruntime says

#: What onnxruntime says -> what it leaves out: it names the operator, and not the type that it lacks, nor where the operator may be.
_WAYS_OUT = {
    r"NOT_IMPLEMENTED.* [A-Z]\w*\([1-6]\)": "It has no kernel of that operator for its types here (export the model in float32), or for the file's opset, "
    "where that is older than 7: onnx.version_converter.convert_version(model, 18) makes a newer one",
    "NOT_IMPLEMENTED": "It has no kernel of that operator for its types here (on the CPU hardly one for bfloat16, of some operators none for float64): "
    "export the model in float32",
    "is not a registered function/op": "This onnxruntime has no such operator: install a newer one, or give sess_options with the library that has it "
    "(register_custom_ops_library)",
}

_REFUSALS: dict[type[Exception], type[RunError]] = {}
