"""The geometry of convolutions and pools: where windows lie, and the adjoint of sliding them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, dtype_of

__all__ = ["Amount", "Dim", "Windows", "windows"]

Dim = int | Value  # a number, or an int64 vector of one element
_HUGE = 1 << 24  # elements of a table that is made when the graph is built: beyond, it is made when it runs


@dataclass(frozen=True)
class Amount:
    """A number plus what is known only at run time, if anything: ``+ - *`` compute the one now and build nodes for the other."""

    op: Builder
    number: int
    value: Value | None = None

    @classmethod
    def of(cls, op: Builder, dim: Dim) -> Amount:
        """A dim as an amount."""
        return cls(op, dim) if isinstance(dim, int) else cls(op, 0, dim)

    @property
    def dim(self) -> Dim:
        """The amount as a dim."""
        return self.number if self.value is None else self.op.Add(self.value, self.op.i64([self.number])) if self.number else self.value

    def __add__(self, other: Amount | Dim) -> Amount:
        other = other if isinstance(other, Amount) else Amount.of(self.op, other)
        values = [v for v in (self.value, other.value) if v is not None]
        return Amount(self.op, self.number + other.number, self.op.Add(*values) if len(values) > 1 else values[0] if values else None)

    def __sub__(self, other: Amount | Dim) -> Amount:
        other = other if isinstance(other, Amount) else Amount.of(self.op, other)
        if other.value is None:
            return Amount(self.op, self.number - other.number, self.value)
        if self.value is None:
            return Amount(self.op, 0, self.op.Sub(self.op.i64([self.number - other.number]), other.value))
        return Amount(self.op, self.number - other.number, self.op.Sub(self.value, other.value))

    def __mul__(self, factor: int) -> Amount:
        stays = self.value is None or factor == 1
        return Amount(self.op, self.number * factor, self.value if stays else self.op.Mul(self.value, self.op.i64([factor])))


@dataclass
class Windows:
    """Window o of an axis reads the places o * stride + k * dilation - before, k = 0..kernel-1, of the larger side.

    Attributes:
        large: The value that the windows slide over; ``small`` has one element a window.
        before: Padding before each axis.
        after: What is missing behind to fill the last window; negative where places are left over.
    """

    op: Builder
    large: Value
    small: Value
    kernel: Sequence[Dim]
    strides: list[int]
    dilations: list[int]
    before: list[Dim]
    after: list[Dim]

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return len(self.strides)

    @property
    def static(self) -> tuple[list[int], list[int], list[int]] | None:
        """The kernel, `before` and `after`, where all are numbers now."""
        kernel, before, after = ([v for v in side if isinstance(v, int)] for side in (self.kernel, self.before, self.after))
        return (kernel, before, after) if len(kernel) == len(before) == len(after) == self.rank else None

    @property
    def padded_sizes(self) -> list[int] | None:
        """The sizes that `pad` gives, where they are numbers now."""
        outs = [size for size in (self.small.shape or ())[2:] if isinstance(size, int)]
        if self.static is None or len(outs) < self.rank:
            return None
        return [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in zip(outs, self.strides, self.static[0], self.dilations)]

    def pad(self, x: Value) -> Value:
        """x, of the large side, with the padding that the windows reach into, or without the rest they do not reach."""
        return self.op.padded(x, self.before, self.after, range(2, self.rank + 2), self.rank + 2)

    def unpad(self, x: Value) -> Value:
        """The adjoint of `pad`."""
        before, after = ([-v if isinstance(v, int) else self.op.Neg(v) for v in side] for side in (self.before, self.after))
        return self.op.padded(x, before, after, range(2, self.rank + 2), self.rank + 2)

    def transposed(self, g: Value, weight: Value, group: int) -> Value:
        """ConvTranspose of the small side to the large one, in its exact size."""
        settings: dict[str, Any] = {"strides": self.strides, "dilations": self.dilations, "group": group}
        if (known := self.static) is not None:
            _, before, after = known
            extra = [max(-a, 0) for a in after]
            if min(before, default=0) >= 0 and all(a < max(s, d) for a, s, d in zip(extra, self.strides, self.dilations)):
                pads = [*before, *[max(a, 0) for a in after]]
                return self.op.ConvTranspose(g, weight, pads=pads, output_padding=extra if any(extra) else None, **settings)
        return self.unpad(self.op.ConvTranspose(g, weight, pads=[0] * (2 * self.rank), **settings))

    def spread(self, g: Value, weight: np.ndarray | None = None) -> Value:
        """The adjoint of summing each window of each channel: every window gives its element to its places."""
        op = self.op
        spatial = [op.dim(self.small, i + 2) for i in range(self.rank)]
        flat = op.Reshape(g, [-1, 1, *spatial])
        if all(isinstance(k, int) for k in self.kernel):
            ones = op.ones([1, 1, *[k for k in self.kernel if isinstance(k, int)]], dtype_of(g))
        else:
            ones = op.Expand(op.number(1.0, g), op.vector([1, 1, *self.kernel]))
        return op.reshape_like(self.transposed(flat, ones, 1), self.large)

    def counts(self, include_pad: bool, pads: Sequence[Dim], like: Value) -> Value | float:
        """How many places of each window count: those of the large side, or those of its declared padding too."""
        op, n = self.op, self.rank
        sizes = [op.dim(self.large, i + 2) for i in range(n)]
        begin, end = ([p if include_pad else 0 for p in side] for side in (pads[:n], pads[n:]))
        numbers = [[v for v in some if isinstance(v, int)] for some in (sizes, begin, end, [op.dim(self.small, i + 2) for i in range(n)])]
        known, outs = self.static, numbers[3]
        if (
            known is not None
            and all(len(some) == n for some in numbers)
            and max(math.prod(outs), *map(math.prod, zip(outs, known[0]))) < _HUGE
        ):
            total = np.ones((1, 1) + (1,) * n)
            for i, (size, first, last, out) in enumerate(zip(*numbers)):
                place = np.arange(out)[:, None] * self.strides[i] + np.arange(known[0][i])[None] * self.dilations[i] - known[1][i]
                inside = ((place >= -first) & (place < size + last)).sum(1)
                total = total * inside.reshape([-1 if j == i + 2 else 1 for j in range(n + 2)])
            return float(total.flat[0]) if (total == total.flat[0]).all() else op.constant(total, dtype_of(like))
        ones = op.Expand(op.number(1.0, like), op.vector([1, 1, *sizes]))
        if include_pad:  # the declared padding counts, what a rounded-up last window adds does not
            ones = op.Pad(ones, op.vector([0, 0, *begin, 0, 0, *end]), op.number(1.0, like))
            before, after = ([(Amount.of(op, a) - b).dim for a, b in zip(*pair)] for pair in ((self.before, begin), (self.after, end)))
            ones = op.padded(ones, before, after, range(2, n + 2), n + 2)
        else:
            ones = self.pad(ones)
        weight = op.ones([1, 1, *[k for k in self.kernel if isinstance(k, int)]], dtype_of(like))
        return op.Conv(ones, weight, strides=self.strides, dilations=self.dilations)


def windows(op: Builder, node: ir.Node, large: Value, small: Value, kernel: Sequence[Dim]) -> Windows:
    """The windows of a Conv, a ConvTranspose (whose large side is its output) or a pool; pads and auto_pad resolved."""
    n = len(kernel)
    strides, dilations = attr(node, "strides") or [1] * n, attr(node, "dilations") or [1] * n
    pads, auto = list(attr(node, "pads") or [0] * (2 * n)), attr(node, "auto_pad", "NOTSET")
    before: list[Dim] = []
    after: list[Dim] = []
    for i in range(n):
        d, out, k = op.dim(large, i + 2), Amount.of(op, op.dim(small, i + 2)), Amount.of(op, kernel[i])
        total = (out - 1) * strides[i] + (k - 1) * dilations[i] + 1 - d  # the padding that the windows reach into
        b: Dim = 0 if auto == "VALID" else pads[i]
        if auto in ("SAME_UPPER", "SAME_LOWER") or attr(node, "output_shape") is not None:
            known = total.dim
            whole = max(known, 0) if isinstance(known, int) else op.Max(known, op.i64([0]))
            half = whole // 2 if isinstance(whole, int) else op.Div(whole, op.i64([2]))
            b = (Amount.of(op, whole) - half).dim if _begins_larger(node, auto) else half
        before.append(b)
        after.append((total - b).dim)
    return Windows(op, large, small, kernel, list(strides), list(dilations), before, after)


def _begins_larger(node: ir.Node, auto: str) -> bool:
    """Whether an odd padding has its larger half in front: SAME_LOWER; ConvTranspose with output_shape unless SAME_UPPER."""
    return auto == "SAME_LOWER" if node.op_type != "ConvTranspose" or attr(node, "output_shape") is None else auto != "SAME_UPPER"
