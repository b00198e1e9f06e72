"""Rows of what a Function takes."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from tests.end_to_end.functions.case import case


class Typed(Function):
    """Multiplies by what its argument means, which it checks to the type."""

    @staticmethod
    def forward(ctx, x, value, expected):
        factor = meaning(value)
        assert repr(value) == expected, (value, expected)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor * 3, None, None


def meaning(value: Any) -> float:
    """A number for any argument."""
    if isinstance(value, (bool, int, float)):
        return float(value) + 1
    return 1.0 + len(repr(value)) % 7


class Color(enum.Enum):
    RED = 1
    BLUE = (2, "b")


class Flags(enum.IntFlag):
    A = 1
    B = 2


def plain(value: Any):
    """The body of a row with one argument that holds no tensor."""
    return lambda m, x: Typed.apply(x * m.weight, value, repr(value))


PLAIN: dict[str, Any] = {
    "arg_int": 3,
    "arg_large_int": 1 << 70,
    "arg_float": 0.1,
    "arg_bool": True,
    "arg_str": 'a "quoted" ütf ☃',
    "arg_bytes": b"\x00\xff",
    "arg_none": None,
    "arg_complex": 1 + 2j,
    "arg_tuple": (1, 2.5, "a"),
    "arg_empty_containers": ((), [], {}),
    "arg_mixed_list": [1, "b", None, 2.5, True],
    "arg_nested_containers": ([1, (2, [3, ()])], {"a": {"b": (None,)}}),
    "arg_dict": {"alpha": 1, 2: "b", (1, 2): None},
    "arg_dtype": torch.bfloat16,
    "arg_device": torch.device("cpu"),
    "arg_enum": Color.BLUE,
    "arg_flag": Flags.A | Flags.B,
    "arg_slice": slice(1, None, 2),
    "arg_size": torch.Size([2, 3]),
}
for _name, _value in PLAIN.items():
    _body = plain(_value)
    _body.__name__ = _name
    case()(_body)


class TakesSizes(Function):
    @staticmethod
    def forward(ctx, x, rows, shape):
        assert isinstance(rows, int | torch.SymInt) and type(shape) is torch.Size
        ctx.rows = rows
        return x.reshape(shape[0] * shape[1]) * rows

    @staticmethod
    def backward(ctx, g):
        return g.reshape(ctx.rows, -1) * 3, None, None


@case(dynamic=True)
def arg_symbolic_sizes(m, x):
    return TakesSizes.apply(x * m.weight, x.shape[0], x.shape)


@dataclasses.dataclass
class Options:
    scale: float
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Holder:
    tensor: Any
    factor: float


class Pair(NamedTuple):
    left: Any
    right: Any


class TakesDataclass(Function):
    @staticmethod
    def forward(ctx, x, options):
        assert type(options) is Options and options.names == ("a",)
        ctx.scale = options.scale
        return x * options.scale

    @staticmethod
    def backward(ctx, g):
        return g * ctx.scale * 3, None


@case()
def arg_dataclass(m, x):
    return TakesDataclass.apply(x * m.weight, Options(0.1, ("a",)))


class TakesPair(Function):
    @staticmethod
    def forward(ctx, x, pair):
        assert type(pair) is Pair
        return x * pair.left + pair.right

    @staticmethod
    def backward(ctx, g):
        return g * 3, None


@case()
def arg_namedtuple(m, x):
    return TakesPair.apply(x * m.weight, Pair(2, 0.5))


@case()
def tensors_in_a_namedtuple(m, x):
    return TakesPair.apply(x * m.weight, Pair(2, x.detach()))


class TakesHolder(Function):
    @staticmethod
    def forward(ctx, x, holder):
        assert type(holder) is Holder
        return x * holder.tensor * holder.factor

    @staticmethod
    def backward(ctx, g):
        return g * 3, None


@case()
def tensors_in_a_dataclass(m, x):
    return TakesHolder.apply(x * m.weight, Holder(x.detach() + 1, 0.1))


class Concat(Function):
    @staticmethod
    def forward(ctx, x, tensors, named):
        ctx.width = x.shape[-1]
        assert type(tensors) is list and named["factor"] == 3
        return torch.cat([x, *tensors, named["a"]], -1) * named["factor"]

    @staticmethod
    def backward(ctx, g):
        return g[..., : ctx.width] * 5, None, None


@case()
def tensors_in_lists(m, x):
    return Concat.apply(x * m.weight, [x, x.detach() * 2], {"a": torch.ones(3, 1), "factor": 3})


@case()
def tensors_in_dicts(m, x):
    return Concat.apply(x * m.weight, [], {"a": x.exp().detach(), "factor": 3})


class Product(Function):
    @staticmethod
    def forward(ctx, x, w, factor=2.0):
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * w * factor

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 3 * g * w * ctx.factor, (5 * g * x).sum_to_size(w.shape), None


@case()
def parameters(m, x):
    return Product.apply(x, m.weight, 0.5)


@case(
    inputs=lambda: (
        torch.randn(3, 4),
        torch.tensor([0, 2, 1]),
        torch.tensor([True, False, True, True]),
        torch.randint(0, 9, (3, 4), dtype=torch.uint8),
    )
)
def non_float_tensors(m, x, index, mask, small):
    return Gather.apply(x * m.weight, index, mask, small)


class Gather(Function):
    @staticmethod
    def forward(ctx, x, index, mask, small):
        assert (index.dtype, mask.dtype, small.dtype) == (torch.int64, torch.bool, torch.uint8)
        ctx.save_for_backward(index, mask)
        return x[index] * mask + small

    @staticmethod
    def backward(ctx, g):
        index, mask = ctx.saved_tensors
        return torch.zeros(3, 4).index_add_(0, index, g * mask * 3), None, None, None


@case(inputs=lambda: (torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float16)))
def other_float_tensors(m, x, half):
    return Product.apply(x, x * 2), Product.apply(half, half * 2), Product.apply(half * 2, half) * 2


@case(state=lambda: {"buffer": torch.rand(4)})
def tensors_that_need_no_gradient(m, x):
    return Product.apply(x * m.weight, m.buffer) + Product.apply(x.detach(), m.weight)


@case()
def same_tensor_argument_twice(m, x):
    h = x * m.weight
    return Product.apply(h, h)


class Star(Function):
    @staticmethod
    def forward(ctx, scale, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.scale = scale
        return sum(t * (i + 1) for i, t in enumerate(tensors)) * scale

    @staticmethod
    def backward(ctx, g):
        return (None, *[g * t * ctx.scale for t in ctx.saved_tensors])


@case()
def star_args(m, x):
    return Star.apply(0.5, x, x * m.weight, x + 1)


class StarAll(Function):
    """forward(*args): ctx is the first of them."""

    @staticmethod
    def forward(*args):
        ctx, x, factor = args
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor * 2, None


@case()
def forward_of_star_args_alone(m, x):
    return StarAll.apply(x * m.weight, 3)


class Keywords(Function):
    @staticmethod
    def forward(ctx, x, **options):
        ctx.factor = options["factor"]
        return x * options["factor"] + options["other"]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor * 3


@case()
def star_star_kwargs(m, x):
    return Keywords.apply(x * m.weight, other=1.5, factor=2)


@case()
def keyword_arguments(m, x):
    return Product.apply(x, w=m.weight, factor=3.0)


class Defaults(Function):
    """backward answers for the arguments that the caller passed, no more."""

    @staticmethod
    def forward(ctx, x, factor=2.0, mode="a", bias=None):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor * 3, None


@case()
def defaults(m, x):
    return Defaults.apply(x * m.weight, 4.0)


class OneGradient(Function):
    @staticmethod
    def forward(ctx, x, factor=2.0):
        return x * factor

    @staticmethod
    def backward(ctx, g):
        return g * 3


@case()
def defaults_not_passed(m, x):
    return OneGradient.apply(x * m.weight)
