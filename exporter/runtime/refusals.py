"""What onnxruntime raises, as an error of ours: short, and with the way out that it leaves out."""

from __future__ import annotations

import re

from symbolics.errors import Faq, PythonopError, RunError, as_raised
from symbolics.text import ends

__all__ = ["refusal"]

_MOST = 600  # characters of what onnxruntime says

#: What onnxruntime says of an operator without a kernel: its name, and the release of the operator.
_NO_KERNEL = re.compile(r"NOT_IMPLEMENTED.* ([A-Z]\w*)\((\d+)\)")
#: What onnxruntime says -> what it leaves out: it names the operator, and not the type that it lacks, nor where the operator may be.
_WAYS_OUT = {
    "NOT_IMPLEMENTED": "It has no kernel of that operator for its types here (on the CPU hardly one for bfloat16, of some operators none for float64): "
    "export the model in float32 (autocast to torch.float16), name its module in opaque=, or write that operator in others",
    r"tensor\(bfloat16\)' of input parameter": "That operator takes bfloat16 from a later opset on, or never, and onnxruntime's CPU has hardly a kernel for it: "
    "export the model in float32 (autocast to torch.float16), or name its module in opaque=",
    r"pythonop[\w.]*:\w+\(-?\d+\) is not a registered function/op": "This release of pythonop has no such operator: install a newer one",
    "Got invalid dimensions for input": "The file has that size fixed: give arrays of it, or export with that axis open (dynamic_shapes=, --dynamic)",
    "[Oo]ut of range value in index|indices element out of (data )?bounds": "An index among the inputs is out of range, or a label: labels count from 0 to the "
    "number of classes less one",
    "Inconsistent shape in loop output": "A gradient reads what the Loop's values are in each round, and onnxruntime stacks only what keeps its shape: "
    "without a gradient (torch.no_grad()) the file runs; to train it, write the loop with values of one shape",
    "is not a registered function/op": "This onnxruntime has no such operator: install a newer one, or give exporter.inference_session the library that has "
    "it (register_custom_ops_library)",
}
_OLD_OPSET = (
    "onnxruntime has left that release of the operator behind, as the file's opset is older than 7: "
    "onnx.version_converter.convert_version(model, 18) makes a newer one"
)


def refusal(error: Exception) -> PythonopError | None:
    """What onnxruntime raised, as an error of ours that is one of its own as well; None for what else Python raised."""
    kind = type(error)
    its_own = kind.__module__.startswith("onnxruntime.")
    if isinstance(error, RunError) or not (its_own or kind in (RuntimeError, UnicodeDecodeError)):  # the last: of its own message
        return None
    text = ends(str(error), _MOST)
    missing = _NO_KERNEL.search(text)
    if missing and _is_left_behind(missing[1], int(missing[2])):
        hint = _OLD_OPSET
    else:
        hint = next((way_out for sign, way_out in _WAYS_OUT.items() if re.search(sign, text)), "")
    said = f"onnxruntime cannot run the model: {text}{'' if text.endswith('.') or not hint else '.'}{hint and ' '}{hint}"
    refusal = as_raised(error, said, RunError) if its_own else RunError(said)
    if missing and hint != _OLD_OPSET:
        refusal.lead_to(Faq.NO_KERNEL)
    refusal.__cause__ = error
    return refusal


def _is_left_behind(operator: str, release: int) -> bool:
    """Whether an operator of a file is from before opset 7, and there is a newer release of it."""
    import onnx  # only here: a session needs none of it

    return release < 7 and onnx.defs.has(operator) and onnx.defs.get_schema(operator, 18).since_version > release
