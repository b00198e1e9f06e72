"""The combinations that do not come out right, each with its reason: one that does is a failure, too."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.end_to_end.combinations.check import Case, Outcome

__all__ = ["KNOWN", "Known", "unexpected"]


@dataclass(frozen=True)
class Known:
    """Cases that come to nothing.

    Attributes:
        reason: Why.
        cases: Which.
        text: What the message has in it.
    """

    reason: str
    cases: Callable[[Case], bool]
    text: str


KNOWN = [
    Known(
        "torch.onnx itself: it loses the bodies of control flow in a body beside a block under no_grad",
        lambda case: case.dynamo and " in " in case.flow and case.use == "no_grad",
        "has no attribute '(true_graph_0|while_loop_cond_graph_0)'(.|\n)*ways? out",
    ),
    Known(
        "torch.export itself: a loop in a branch",
        lambda case: case.dynamo and case.flow == "while_loop in cond",
        "Attempting to use FunctionalTensor on its own(.|\n)*ways? out",
    ),
    Known(
        "torch.export itself: what a scan's body changes in place",
        lambda case: case.dynamo and case.flow.endswith("scan") and case.use == "in place",
        "derivative for aten::copy is not implemented(.|\n)*ways? out",
    ),
    Known(
        "onnxruntime's CPU provider has no kernels for bfloat16; Sin and Cos take it from opset 22 on",
        lambda case: case.dtype in ("bfloat16", "autocast"),
        "hardly (a|one).* for.*: export the model in float32|way out: opset_version=22, from which on (Sin|Cos) takes bfloat16",
    ),
    Known(
        "a second derivative of a Function in a body would need its context of every iteration",
        lambda case: case.dynamo and case.function and case.flow != "none" and case.use == "double",
        "context comes out of a Loop, Scan or If. Way out: export with inline=",
    ),
]


def unexpected(case: Case, found: Outcome) -> str:
    """What is to be said of an outcome; "" where it is right, or the known one."""
    known = next((known for known in KNOWN if known.cases(case)), None)
    if known is None:
        return "" if found.kind == "right" else f"{case}: {found.kind}: {found.text}"
    if found.kind == "right":
        return f"{case} is right: take it out of known.py ({known.reason})"
    return "" if found.kind == "refused" and re.search(known.text, found.text) else f"{case}: {found.kind}: {found.text}"
