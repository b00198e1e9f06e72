"""The names that a file may contain: operators, domains and metadata keys (docs/format.md), classes and functions.

No torch here: readers of a file need none.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ADD_ROWS",
    "BACKWARD_KEY",
    "BOUNDARY_OP",
    "BUFFERS_KEY",
    "CALL_ATTRIBUTE",
    "CLASS_KEY",
    "CUMULATIVE_KEY",
    "DRAWN_PROPERTY",
    "FORMAT_VERSION",
    "FUNCTIONS_KEY",
    "FUNCTION_KEY",
    "GRADIENTS_KEY",
    "GRADIENT_DOMAIN",
    "GRADIENT_OP",
    "INNER_DOMAIN",
    "LINKS_KEY",
    "MARK_COUNT_KEY",
    "MARK_DOMAIN",
    "MARK_OP",
    "MODULE_PROPERTY",
    "NEW_VARIANCE",
    "OPAQUE_PROPERTY",
    "OPEN_PROPERTY",
    "ORT_DOMAIN",
    "OUTPUTS_KEY",
    "OWN_DOMAIN",
    "PORTABLE_DOMAIN",
    "PYTHON_OP",
    "PYTHON_OP_BACKWARD",
    "PYTHON_OP_GRAD",
    "PYTHON_OP_TANGENT",
    "QUANTIZER_PROPERTY",
    "ROWS_DOMAIN",
    "RULES_KEY",
    "SOURCE_PROPERTY",
    "STATE_KEY",
    "STEP_KEY",
    "STILLED_KEY",
    "TANGENTS_KEY",
    "TRANSIENT_KEY",
    "UNCHECKED_KEY",
    "VALUES_KEY",
    "VARIABLE_OP",
    "VERSION_KEY",
    "is_of_torch",
    "is_operator",
    "qualified_name",
    "why_not_importable",
]

ORT_DOMAIN = "com.microsoft"
PYTHON_OP = "PythonOp"
PYTHON_OP_GRAD = "PythonOpGrad"
CALL_ATTRIBUTE = "call"

# Operators that only pythonop has.
OWN_DOMAIN = "pythonop"

# A PythonOpGrad that can be differentiated, and its gradient, and the gradient of that.
PYTHON_OP_BACKWARD = "PythonOpBackward"

# A PythonOp with tangents.
PYTHON_OP_TANGENT = "PythonOpTangent"

# The stop-gradient mark. It gets a function body (Identity) only in finished models.
MARK_DOMAIN = OWN_DOMAIN
MARK_OP = "StopGradient"

# During an export alone: a gradient that the forward itself takes, and an identity that is a value of its own to take it with respect to.
INNER_DOMAIN = "pythonop.inner"
GRADIENT_OP = "Gradient"  # inputs: the outputs that are differentiated, what with respect to, a cotangent for each output
VARIABLE_OP = "Variable"

# In memory alone: an identity around what a call of a module takes and gives that is to be a call of a function (symbolics/graph/boundaries.py).
BOUNDARY_OP = "Boundary"

# A function that adds rows to rows of a tensor, of which several may go to one place (symbolics/graph/row_sums.py).
ROWS_DOMAIN = "pythonop.rows"
ADD_ROWS = "AddRows"

# Functions that stand for autograd Functions, forward and backward.
PORTABLE_DOMAIN = "pythonop.portable"

# Functions that gradient rules call: what a call computes, by its name.
GRADIENT_DOMAIN = "pythonop.grad"

FORMAT_VERSION = 1
VERSION_KEY = "pythonop.version"  # the format version of the file
STATE_KEY = "pythonop.state"  # JSON: state_dict key -> StateEntry
MARK_COUNT_KEY = "pythonop.stop_gradients"  # how many StopGradient nodes the exporter wrote, subgraphs included
OUTPUTS_KEY = "pythonop.outputs"  # JSON: forward's result around its tensors (symbolics/node/result.py)
CUMULATIVE_KEY = "pythonop.cumulative"  # JSON: initializers of running means that are averages of all batches (momentum=None)
BUFFERS_KEY = "pythonop.buffers"  # JSON: BufferChanges; files whose forward changes buffers
STILLED_KEY = "pythonop.stilled"  # JSON: modules exported in eval mode that would do something else in training mode
FUNCTIONS_KEY = "pythonop.functions"  # JSON: name of a Function -> Fingerprint
VALUES_KEY = "pythonop.values"  # JSON: module:name of a value that a Function reads -> the Function and the value at the export
RULES_KEY = (
    "pythonop.rules"  # JSON: domain::operator -> module:name of the gradient rule that it had where the file was written, of somebody's own
)
UNCHECKED_KEY = "pythonop.unchecked"  # text: why nobody compared the Functions of the file with those of an eager run
LINKS_KEY = "pythonop.links"  # how many functions the exporter linked to a backward of their own
GRADIENTS_KEY = "pythonop.gradients"  # JSON: GradientPairing; training files only
TANGENTS_KEY = "pythonop.tangents"  # JSON: TangentPairing; files with a forward-mode derivative only
TRANSIENT_KEY = "pythonop.transient"  # JSON: names in pythonop.state or pythonop.step that no state_dict has; of evaluations alone
STEP_KEY = "pythonop.step"  # JSON: StepLayout; training steps only

# Metadata of an ONNX function of the file.
FUNCTION_KEY = "pythonop.function"  # module:qualname of the autograd Function that it was made of; for people
CLASS_KEY = "pythonop.class"  # module:qualname of the class of modules whose calls it stands for
BACKWARD_KEY = "pythonop.backward"  # JSON: Backward (symbolics/node/linked.py), its gradient

# Metadata of a PythonOp node: where the call came from. For people; nothing reads them back.
MODULE_PROPERTY = "pythonop.module"  # path of the module that made the call
SOURCE_PROPERTY = "pythonop.source"  # module.name:line of the code that made it
DRAWN_PROPERTY = "pythonop.drawn"  # the last node of a random mask that standard operators compute: costly, and not to be computed again
OPAQUE_PROPERTY = "pythonop.opaque"  # why it is a PythonOp where a portable file was asked for, or what opaque= made it

# Metadata of a stop-gradient mark behind a gradient that forward takes without create_graph=True: JSON of symbolics/node/cut.py.
CUT_PROPERTY = "pythonop.cut"

# Metadata of a PythonOp, or of the call of the function that stands for it: JSON of exporter/quantization/records.py, what exporter.quantizer declared of it.
QUANTIZER_PROPERTY = "pythonop.quantizer"

# Metadata of a Clip node that stands for hardtanh or relu6: no gradient flows at its bounds. A clamp's Clip, where it does, has none.
OPEN_PROPERTY = "pythonop.open"

# In `ir.Node.meta`, during an export alone, of the node that makes a new running variance: the old one.
NEW_VARIANCE = "pythonop.new_running_variance"


def is_of_torch(name: str) -> bool:
    """Whether a class of modules is one of torch.nn's own layers and containers: inside of an allowed module they need no entry."""
    return name.startswith("torch.nn.modules.")


def is_operator(name: str) -> bool:
    """Whether a name is an operator's, ``namespace::name.overload``, and not a class's."""
    return "::" in name


def qualified_name(obj: Any) -> str:
    """``module:qualname`` of a class or function."""
    return f"{obj.__module__}:{obj.__qualname__}"


def why_not_importable(name: str) -> str:
    """Why no other process can import what a ``module:qualname`` names, whatever is installed there; "" where one may."""
    module, colon, qualname = name.partition(":")
    if not colon:
        return "it is a name that exporter.register gave"
    if {"__main__", "__mp_main__"} & set(module.split(".")):
        return "__main__ is another program there"
    if "<locals>" in qualname.split("."):
        return "it is made inside of a function"
    odd = [part for part in (*module.split("."), *qualname.split(".")) if not part.isidentifier()]
    return f"it is not of the form module:qualname, {odd[0]!r} is no name of Python's" if odd else ""
