"""One row of what `verify` found."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["ELSEWHERE", "GRADIENTS", "NOT_COMPARED", "ZEROS", "Row"]

#: Kinds of rows that stand for all tensors, at another input.
ELSEWHERE = ("second input", "second size")
#: The kind of the row that stands for all gradients, of a file that has lost what they depend on.
GRADIENTS = "gradients"
#: How a `Row.note` begins.
NOT_COMPARED = "not compared"
#: The `Row.note` of a parameter that only another way of an opaque module reaches.
ZEROS = "zeros, eager has None"


@dataclass(frozen=True)
class Row:
    """One tensor of the file against eager PyTorch, or all of them at another input.

    Attributes:
        name: The output's number (with its name, of a file that was there before), the name of the parameter, input or buffer; at another
            input what is farthest from eager's.
        kind: "output", "parameter gradient", "input gradient", "buffer" for what the forward makes of one, or "weight" for a parameter or
            buffer of a file that was there before; "second input" for all tensors at other values of the inputs, "second size" at other sizes;
            "gradients" for all of them, where the file has lost what they depend on.
        shape, dtype: Eager's.
        error: The largest difference from the reference, in units of eager's largest value; of a gradient, at least a
            hundredth of the largest gradient of the model.
        eager_error: The same for eager itself against float64, which is the reference unless that is too far away; None where eager does
            not run in float64.
        tolerance: What `error` may be.
        reference: "float64", or the type in which eager ran.
        ok: Whether the file says the same.
        problem: What is wrong where a number does not say it.
        note: What says nothing against the file: why nothing could be compared, or `ZEROS`.
        half: "float16" or "bfloat16" where the model computes in it inside, and `tolerance` is what that allows.
        node: The node of the file that makes the output or buffer, or the first that reads the parameter or input.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    error: float
    eager_error: float | None
    tolerance: float
    reference: str
    ok: bool
    problem: str = ""
    node: str = ""
    note: str = ""
    half: str = ""

    @property
    def badness(self) -> float:
        """How far beyond the tolerance: more than 1 is a difference."""
        if self.note:
            return 0.0
        if self.problem or math.isnan(self.error):
            return math.inf
        return self.error / self.tolerance if self.error else 0.0
