"""Why no graph can stand for a call, in words for whoever wrote its Function: what stops a tracer, in which direction and line, and the way out."""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.portable.sizes import Sizes
from symbolics.text import causes
from symbolics.users import is_users

__all__ = ["Lines", "reason", "untranslated"]

#: Of torch.onnx: the node that it could not translate, and the operator that takes no such number.
_NODE = re.compile(r"translating node %(\w+)")
_OPERATOR = re.compile(r"compatible OpOverload for ([\w.]+).*Unable to cast \w+\(.* to Tensor", re.DOTALL)

#: Of a tracer that meets control flow as an operator.
_NO_RULE = re.compile(r"no rule registered for HigherOrderOperator (\w+)")
#: Of operators whose kernels take numbers alone for the sizes of a result that they broadcast.
_CONCRETE = "SymIntArrayRef expected to contain only concrete integers"


class Lines:
    """Where a trace is, and where it was when it assumed something.

    Attributes:
        direction: What runs: forward or backward.
        branches: The guards that a branch of the user's asked for: they hold for one side of it.
    """

    def __init__(self, env: Any, traces: str) -> None:
        self.direction = "forward"
        self.branches = list[Any]()
        self._env, self._traces, self._of_guards = env, traces, list[str]()
        private.guards_told(env, self._note)

    def _note(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        asked = False
        while frame is not None and _evaluates(frame):
            asked = asked or frame.f_globals["__name__"] == "torch"  # SymBool.__bool__; operators in C++ ask below it
            frame = frame.f_back
        asking, users = frame, self._users(frame)
        self._of_guards.append(self.direction if users is None else f"{self.direction}{_line(users, users.f_lineno)}")
        if asked and asking is users:
            self.branches.append(self._env.guards[-1])

    def of_guard(self, guard: Any) -> str:
        """Where a condition came from."""
        index = next((i for i, one in enumerate(self._env.guards) if one is guard), len(self._of_guards))
        return self._of_guards[index] if index < len(self._of_guards) else self.direction

    def of_error(self, error: BaseException) -> str:
        """Where an error was raised."""
        traceback, found = error.__traceback__, ""
        while traceback is not None:
            found = _line(traceback.tb_frame, traceback.tb_lineno) or found
            traceback = traceback.tb_next
        return f"{self.direction}{found}"

    def _users(self, frame: FrameType | None) -> FrameType | None:
        """The innermost frame of the user's, inside of the trace."""
        while frame is not None and frame.f_globals.get("__name__") != self._traces:
            if _line(frame, frame.f_lineno):
                return frame
            frame = frame.f_back
        return None


def _evaluates(frame: FrameType) -> bool:
    """Whether a frame is of torch's way from a question about a size to its answer, or of ours."""
    name = frame.f_globals.get("__name__", "")
    return name == "torch" or name.startswith(("torch.fx.experimental.", "symbolics.torch_private."))


def _line(frame: FrameType, number: int) -> str:
    name = frame.f_globals.get("__name__", "")
    return f" at {name}:{number}" if is_users(frame.f_code.co_filename) or name == "__main__" else ""


def reason(error: BaseException, sizes: Sizes, lines: Lines) -> str:
    """Why PyTorch's tracer stopped, in one line."""
    text = (str(error).strip().splitlines() or [""])[0]
    where = lines.of_error(error)
    if "unbacked" in text.lower() or "Expected Proxy" in text:  # how releases of torch say so
        return (
            f"the sizes of its results depend on the values of a tensor (in {where}): keep the size, with torch.where or a product with a mask "
            "in the place of what picks elements"
        )
    if private.is_data_dependent(error):
        said = "" if "data-dependent" in text else f": {text[:160]}"
        return f"what it does depends on the values of a tensor (in {where}{said}): torch.where in the place of a branch, and no number made of a tensor"
    if found := _NO_RULE.search(str(error)):
        return f"it calls torch's {found[1]}, whose branches and bodies no portable Function holds: write the loop in Python, or leave portable= out for it"
    if _CONCRETE in str(error):
        return (
            f"an operator takes no open size (in {where}): where it broadcasts or pads, give its arguments one shape (x.expand(...)), write it in simpler "
            "operators (torch.cat, products and sums), or give the axis a fixed size"
        )
    return f"on tensors without values it raises {type(error).__name__}{': ' if text else ''}{sizes.said(text)[:200]} (in {where}){_way_out(text)}"


def untranslated(error: BaseException, graph: torch.fx.GraphModule, what: str) -> str:
    """Why torch.onnx does not translate a graph, in one line.

    Args:
        error: What it raised.
        graph: What it was given.
        what: The cause, in words.
    """
    found = _NODE.search(str(error))
    node = next((each for each in graph.graph.nodes if found is not None and each.name == found[1]), None)
    operator = _OPERATOR.search(str(error))
    if node is not None and any(
        isinstance(read.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)) for read in node.all_input_nodes
    ):
        name = str(node.target)
    else:
        name = operator[1] if operator is not None else ""
    if name:
        return (
            f"torch.onnx translates {name} for numbers alone, and one of its arguments is computed from an open size: give that axis a fixed size "
            "(leave it out of dynamic_shapes), or make a product or a sum with the size of it (docs/portable.md#make-a-function-portable)"
        )
    if found is None and not any(isinstance(each, torch.onnx.errors.OnnxExporterError) for each in causes(error)):
        return f"torch.onnx stops at the graph of it, whatever its operators ({what}), which is a fault of torch's or of this package: please report it"
    return f"torch.onnx cannot translate it ({what}): with other operators of torch's it is portable (docs/portable.md#make-a-function-portable)"


def _way_out(text: str) -> str:
    """What to do about an error of torch's own, where that can be said."""
    return ": give two axes that are equally long one name in dynamic_shapes" if "must match" in text or "Mismatching" in text else ""
