"""What torch's exporters raise, told by us: which operator or line of the model it is about, and the way out."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable

import torch.onnx

from exporter.errors import frames_behind, is_users
from symbolics import torch_private as private
from symbolics.errors import ExportError, PythonopError, as_raised
from symbolics.text import cause, clean

__all__ = ["TorchExporterError", "of_torch"]

# A line of Python's in what torch says.
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


class TorchExporterError(ExportError, torch.onnx.OnnxExporterError):
    """torch's exporter failed: nothing that we refuse, so it is of torch.onnx's own class, too."""


def of_torch(error: Exception, dynamo: bool) -> Exception:
    """What to raise for what an export raised: an error of torch's exporter in few lines, any other as it is.

    Args:
        error: What was raised; its traceback and causes say where.
        dynamo: Which of torch's exporters it was.
    """
    frames = frames_behind(error)
    if isinstance(error, PythonopError) or not any(frame.f_globals.get("__name__", "").startswith("torch.onnx.") for frame, _ in frames):
        return error
    which = f"torch.onnx.export(dynamo={dynamo})"
    other = f"export with dynamo={not dynamo}"
    found = private.node_in_hand(frame for frame, _ in frames)
    if found is not None:
        operator, overload, module, stack = found
        give = f"custom_translation_table={{{overload}: ...}}" if dynamo else f"torch.onnx.register_custom_op_symbolic({operator!r}, ...)"
        return TorchExporterError(
            f"{operator}, called in module {module or '<root>'}: {which} cannot translate it to ONNX: {cause(error)}\n"
            + _place(stack)
            + f"  way out: give a translation of it, {give}; call it in the forward of an autograd Function, which stays one PythonOp; or {other}"
        )
    lines = [(frame.f_code.co_filename, number) for frame, number in reversed(frames)] + [
        (file, int(number)) for file, number in reversed(_LINE.findall(str(error)))
    ]
    text = _said(error)
    place = _place(lines)
    way = f"change that line, or {other}" if place else f"{other}; print(error.whole) shows where torch stopped"
    if text.startswith(_DECIDES):
        way = "let tensors decide, by torch.where or torch.cond" + ("; dynamo=False would keep what the example decided" if dynamo else "")
    return as_raised(_first(error), f"{which} cannot capture the model: {text}\n{place}  way out: {way}", TorchExporterError)


_DECIDES = "data-dependent Python"
#: What torch says -> what it means for whoever wrote the model.
_CAUSES = {
    "data-dependent|DataDependentOutputException": f"{_DECIDES}: the value of a tensor decides what the code does there (an if, a loop, int(), .item(), torch.equal()), and "
    "a capture has no values",
    r"Cannot access data pointer|\.numpy\(\) is not supported|Not available for 'meta' device": "the code reads the memory of a tensor there (numpy, ctypes, C++), and a capture "
    "has none",
    "fake tensor in the exported program constant's list": "a tensor is computed where no capture looks (in another thread, or in C++)",
}  # fmt: skip


def _said(error: Exception) -> str:
    """What the first cause means, where we know, and its first line; where its first paragraph only announces the second, with that."""
    known = next((meaning for pattern, meaning in _CAUSES.items() if re.search(pattern, cause(error))), None)
    if known is not None:
        return f"{known} (torch: {cause(error).partition(': ')[0]})"
    first, _, rest = (part.strip() for part in str(_first(error)).strip().partition("\n\n"))
    return cause(error) + (f" {clean(rest.splitlines()[0].lstrip('- '), 300)}" if rest and first.endswith(":") else "")


def _first(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _place(lines: Iterable[tuple[str, int]]) -> str:
    """The innermost line of the user's own code, as a line of a message; "" where there is none."""
    for file, number in lines:
        if is_users(file):
            code = linecache.getline(file, number).strip()
            return f"  at {clean(os.path.basename(file))}:{number}{f': {clean(code)}' if code else ''}\n"
    return ""
