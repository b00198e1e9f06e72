"""What onnxruntime raises, as an error of ours: short, and with the way out that it leaves out."""

from __future__ import annotations

import re

from symbolics.errors import PythonopError, RunError, as_raised
from symbolics.text import ends

__all__ = ["refusal"]

_MOST = 600  # characters of what onnxruntime says

#: What onnxruntime says -> what it leaves out: it names the operator, and not the type that it lacks, nor where the operator may be.
_WAYS_OUT = {
    r"NOT_IMPLEMENTED.* [A-Z]\w*\([1-6]\)": "It has no kernel of that operator for its types here (export the model in float32), or for the file's opset, "
    "where that is older than 7: onnx.version_converter.convert_version(model, 18) makes a newer one",
    "NOT_IMPLEMENTED": "It has no kernel of that operator for its types here (on the CPU hardly one for bfloat16, of some operators none for float64): "
    "export the model in float32",
    r"tensor\(bfloat16\)' of input parameter": "That operator takes bfloat16 from a later opset on, or never, and onnxruntime's CPU has hardly a kernel for it: "
    "export the model in float32",
    r"pythonop[\w.]*:\w+\(-?\d+\) is not a registered function/op": "This release of pythonop has no such operator: install a newer one",
    "is not a registered function/op": "This onnxruntime has no such operator: install a newer one, or give sess_options with the library that has it "
    "(register_custom_ops_library)",
}


def refusal(error: Exception) -> PythonopError | None:
    """What onnxruntime raised, as an error of ours that is one of its own as well; None for what else Python raised."""
    kind = type(error)
    its_own = kind.__module__.startswith("onnxruntime.")
    if isinstance(error, RunError) or not (its_own or kind in (RuntimeError, UnicodeDecodeError)):  # the last: of its own message
        return None
    text = ends(str(error), _MOST)
    hint = next((f"{'' if text.endswith('.') else '.'} {way_out}" for sign, way_out in _WAYS_OUT.items() if re.search(sign, text)), "")
    said = f"onnxruntime cannot run the model: {text}{hint}"
    refusal = as_raised(error, said, RunError) if its_own else RunError(said)
    refusal.__cause__ = error
    return refusal
