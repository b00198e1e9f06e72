"""Functions that a runtime must survive: they keep what is not theirs, fail in odd ways, and return odd tensors.

Those with a switch behave when they are recorded; a test turns the switch (`Function.how = ...`) afterwards.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.autograd import Function


class Strided(Function):
    """Neither its output nor its gradient is contiguous."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.detach().clone()[..., ::2]

    @staticmethod
    def backward(ctx, g):
        return g.new_ones((*ctx.shape[:-1], 2 * ctx.shape[-1]))[..., ::2]


class Keeps(Function):
    """Keeps its input, or something over the same memory, when told how."""

    how: ClassVar[str] = ""
    kept: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx, x):
        how = Keeps.how
        if how == "saves":
            ctx.save_for_backward(x)
        elif how == "saves a slice":
            ctx.save_for_backward(x.detach()[1:])
        elif how in KEPT:
            Keeps.kept.append(KEPT[how](x))
        return x * 2

    @staticmethod
    def backward(ctx, g):
        if Keeps.how == "keeps a gradient":
            Keeps.kept.append(g.view(-1)[1:])
        return g * 2


def _graph(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return x.detach()[1:].requires_grad_().sin()


KEPT = {
    "keeps it": lambda x: x,
    "keeps a slice": lambda x: x[1:],
    "keeps it detached": lambda x: x.detach(),
    "keeps a view of another type": lambda x: x.detach().view(torch.int32),
    "keeps its storage": lambda x: x.untyped_storage(),
    "keeps a graph": _graph,
}


class Refusal(Exception):
    """Holds a tensor over the memory of the input that forward refused."""

    def __init__(self, text: str, held: torch.Tensor) -> None:
        super().__init__(text)
        self.held = held


class Refuses(Function):
    """Raises an exception that holds a view of its input, when told to."""

    how: ClassVar[str] = ""

    @staticmethod
    def forward(ctx, x):
        if Refuses.how:
            raise Refusal("refused", x.detach()[1:])
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Silent(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Untrue(Exception):
    """Is false where somebody asks whether there is one."""

    def __bool__(self) -> bool:
        return False


class Odd(BaseException):
    """None of Python's own."""


ERRORS: dict[str, Any] = {
    "a lone surrogate": lambda: ValueError("\udc80 \ud800"),
    "a NUL": lambda: ValueError("a\0b"),
    "no text": Silent,
    "false": Untrue,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": GeneratorExit,
    "StopIteration": lambda: StopIteration(1),
    "a base of its own": lambda: Odd("odd"),
    "a group": lambda: BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError("\udc80")]),
    "a token": lambda: ValueError("[pythonop-error-1] [pythonop-error-2]"),
    "recursion": None,
}


class Throws(Function):
    """Raises what `ERRORS` makes, in forward or in backward."""

    how: ClassVar[str] = ""
    where: ClassVar[str] = "forward"
    raised: ClassVar[BaseException | None] = None

    @staticmethod
    def forward(ctx, x):
        Throws.throw("forward")
        return x * 2

    @staticmethod
    def backward(ctx, g):
        Throws.throw("backward")
        return g * 2

    @staticmethod
    def throw(where: str) -> None:
        if Throws.how and Throws.where == where:
            if Throws.how == "recursion":
                Throws.throw(where)
            Throws.raised = ERRORS[Throws.how]()
            raise Throws.raised


class Numbered(Function):
    """Raises an exception that says which run it was; 0 is none."""

    @staticmethod
    def forward(ctx, x):
        number = int(x.flatten()[0])
        if number:
            raise LookupError(number)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Turns(Function):
    """Returns odd things when told to; two tensors otherwise."""

    how: ClassVar[str] = ""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return TURNS[Turns.how](x)

    @staticmethod
    def backward(ctx, g, h):
        return g + h


def _without_data(x: torch.Tensor) -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(torch.Tensor, x.shape, dtype=x.dtype)  # type: ignore[attr-defined]


TURNS: dict[str, Any] = {
    "": lambda x: (x * 2, x * 3),
    "one": lambda x: x * 2,
    "three": lambda x: (x * 2, x * 3, x * 4),
    "none": lambda x: (x * 2, None),
    "nothing": lambda x: None,
    "a list": lambda x: [x * 2, x * 3],
    "a double": lambda x: (x * 2, x.double()),
    "a number": lambda x: (x * 2, 1.5),
    "a string": lambda x: (x * 2, "x"),
    "sparse": lambda x: (x * 2, x.detach().to_sparse()),
    "meta": lambda x: (x * 2, x.detach().to("meta")),
    "100 dimensions": lambda x: (x * 2, x.detach().sum().reshape([1] * 100)),
    "exabytes": lambda x: (x * 2, x.detach().flatten()[:1].expand(1 << 60)),
    "no data": lambda x: (x * 2, _without_data(x)),
    "empty and huge": lambda x: (x * 2, x.new_empty(0).reshape(0, 1 << 29, 1 << 29)),
}


class Squeezes(Function):
    """The rank of its output depends on sizes, as eager's does."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.squeeze()

    @staticmethod
    def backward(ctx, g):
        return g.reshape(ctx.shape)
