"""Rows of operators: torch.library's and a C++ extension's. No backward is the derivative of its forward: a lost backward shows.

A file names the operators; this module registers them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import custom_op

from tests.end_to_end.functions.case import case

NAMESPACE = "pythonop_rows"


def _times(factor, *nones):
    """A backward of one tensor argument and as many others."""

    def backward(ctx, grad):
        return (grad * factor, *nones)

    return backward


@custom_op("pythonop_rows::plain", mutates_args=())
def plain(x: Tensor) -> Tensor:
    return x * 2


plain.register_fake(torch.empty_like)


@case(applies=1, raises=True)
def op_without_a_formula(m, x):
    return plain(x * m.weight) + 1


@case(applies=1)
def op_beside_the_gradient(m, x):
    return plain(x.detach()) * m.weight


@custom_op("pythonop_rows::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


scaled.register_fake(lambda x, weight: torch.empty_like(x))
scaled.register_autograd(
    lambda ctx, g: (3 * g * ctx.saved[1], (5 * g * ctx.saved[0]).sum(0)),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "saved", inputs),
)


@case(applies=1, dynamic=True)
def op_register_autograd(m, x):
    return scaled(x, m.weight).sin()


@case(applies=2)
def op_twice(m, x):
    return scaled(x, m.weight) + scaled(x, m.weight)


@custom_op("pythonop_rows::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor, *, strength: float = 2.0) -> tuple[Tensor, Tensor]:
    return x * torch.sigmoid(gate) * strength, torch.sigmoid(gate)


@gated.register_fake
def _(x, gate, *, strength=2.0):
    return torch.empty_like(x), torch.empty_like(gate)


def _gated_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    ctx.strength = keyword_only_inputs["strength"]
    ctx.set_materialize_grads(False)


def _gated_backward(ctx, g, g_gate):
    x, gate, opened = ctx.saved_tensors
    gx = 7 * g * opened * ctx.strength if ctx.needs_input_grad[0] else None
    return gx, (g * x).sum_to_size(gate.shape) + (0 if g_gate is None else g_gate)


gated.register_autograd(_gated_backward, setup_context=_gated_setup)


@case(applies=1)
def op_setup_context(m, x):
    y, _ = gated(x, m.weight, strength=3.0)
    return y + 1


@custom_op("pythonop_rows::accumulate", mutates_args=("total",))
def accumulate(total: Tensor, x: Tensor) -> None:
    total.add_(x.sum(0))


@case(applies=1)
def op_mutates_an_activation(m, x):
    total = torch.zeros(4) + x.detach().sum(0)
    accumulate(total, x.detach())
    return total * m.weight + x


@case(applies=1, state=lambda: {"buffer": torch.arange(4.0)})
def op_mutates_a_buffer(m, x):
    accumulate(m.buffer, x.detach())
    return m.buffer * m.weight + x


@case(applies=1)
def op_mutates_what_needs_a_gradient(m, x):
    total = x.sum(0) * m.weight
    accumulate(total, x.detach())
    return total * m.weight


@custom_op("pythonop_rows::joined", mutates_args=())
def joined(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)


joined.register_fake(lambda parts, weights: torch.empty_like(parts[0]))
joined.register_autograd(lambda ctx, g: ([g * 5, g * 7], None), setup_context=lambda ctx, inputs, output: None)


@case(applies=1)
def op_list_of_tensors(m, x):
    return joined([x * m.weight, x.sin()], [2.0, 3.0])


@custom_op("pythonop_rows::halves", mutates_args=())
def halves(x: Tensor) -> list[Tensor]:
    return [x[:, :2] * 2, x[:, 2:] * 3]


halves.register_fake(lambda x: [torch.empty_like(x[:, :2]), torch.empty_like(x[:, 2:])])
halves.register_autograd(lambda ctx, grads: torch.cat([grads[0] * 5, grads[1] * 7], 1))


@case(applies=1)
def op_list_returned(m, x):
    first, second = halves(x * m.weight)
    return first.sin() + second


@custom_op("pythonop_rows::both", mutates_args=())
def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.sum(1)


both.register_fake(lambda x: (torch.empty_like(x), x.new_empty(x.shape[0])))
both.register_autograd(lambda ctx, g, h: g * 5 + h[:, None] * 7)


@case(applies=1, dynamic=True)
def op_tuple_returned(m, x):
    y, total = both(x * m.weight)
    return y, total + 1


@custom_op("pythonop_rows::shifted", mutates_args=())
def shifted(x: Tensor, shift: Tensor | None = None) -> Tensor:
    return x * 2 if shift is None else x * 2 + shift


shifted.register_fake(lambda x, shift=None: torch.empty_like(x))
shifted.register_autograd(
    lambda ctx, g: (g * 5, (g * 7).sum(0) if ctx.given else None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "given", inputs[1] is not None),
)


@case(applies=2)
def op_optional_tensor(m, x):
    return shifted(x, m.weight) + shifted(x.sin(), None)


@custom_op("pythonop_rows::settings", mutates_args=())
def settings(
    x: Tensor,
    times: int,
    scale: float,
    negate: bool,
    mode: str,
    dtype: torch.dtype,
    device: torch.device,
    axes: Sequence[int],
    limit: float | None,
) -> Tensor:
    assert mode == "up" and tuple(axes) == (0, 1) and limit is None and device.type == "cpu"
    return (x * times * scale * (-1 if negate else 1)).to(dtype)


@settings.register_fake
def _(x, times, scale, negate, mode, dtype, device, axes, limit):
    return torch.empty_like(x, dtype=dtype)


settings.register_autograd(_times(5, *[None] * 8))


@case(applies=1)
def op_numbers_and_texts(m, x):
    y = settings(x * m.weight, 3, 0.1, True, "up", torch.float32, torch.device("cpu"), [0, 1], None)
    return y.sin()


@custom_op("pythonop_rows::largest", mutates_args=())
def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    values, places = x.max(1)
    return values.clone(), places


largest.register_fake(lambda x: (x.new_empty(x.shape[0]), x.new_empty(x.shape[0], dtype=torch.int64)))
largest.register_autograd(
    lambda ctx, g, _: torch.zeros(ctx.saved_tensors[0].shape[0], 4).scatter(1, ctx.saved_tensors[0][:, None], g[:, None] * 5),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


@case(applies=1)
def op_integers_returned(m, x):
    values, places = largest(x * m.weight)
    return values * 2, places + 1


@custom_op("pythonop_rows::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


without_fake.register_autograd(_times(5))


@case(applies=1, dynamic=True)
def op_without_a_fake_kernel(m, x):
    return without_fake(x * m.weight) + 1


@custom_op("pythonop_rows::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    return x[x > 0]


@positive.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


positive.register_autograd(
    lambda ctx, g: torch.zeros_like(ctx.saved_tensors[0]).masked_scatter(ctx.saved_tensors[0] > 0, g * 5),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@case(applies=1)
def op_sizes_of_the_data(m, x):
    return positive(x * m.weight).sum() + x


@custom_op("pythonop_rows::repeated", mutates_args=())
def repeated(x: Tensor, count: int) -> Tensor:
    return x.repeat(count, 1)


repeated.register_fake(lambda x, count: x.new_empty(x.shape[0] * count, x.shape[1]))
repeated.register_autograd(
    lambda ctx, g: (g.reshape(ctx.count, -1, 4).sum(0) * 5, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "count", inputs[1]),
)


@case(applies=1, dynamic=True)
def op_a_dynamic_size(m, x):
    return repeated(m.weight[None] * x.mean(), x.shape[0])


@custom_op("pythonop_rows::mapped", mutates_args=())
def mapped(x: Tensor) -> Tensor:
    return x * 2


mapped.register_fake(torch.empty_like)
mapped.register_autograd(_times(5))


@mapped.register_vmap
def _(info, in_dims, x):
    return mapped(x), in_dims[0]


@case(applies=1)
def op_register_vmap(m, x):
    return mapped(x * m.weight)


@case(applies=1)
def op_under_vmap(m, x):
    return torch.func.vmap(mapped)(x * m.weight)


@case(applies=1)
def op_in_cond(m, x):
    return torch.cond(x.sum() > 100, lambda v: v.sin(), lambda v: mapped(v), (x * m.weight,))


@custom_op("pythonop_rows::cast", mutates_args=())
def cast(x: Tensor) -> Tensor:
    return x * 2


cast.register_fake(torch.empty_like)
cast.register_autograd(_times(5))
cast.register_autocast("cpu", torch.bfloat16)


@case(applies=1, loose=1e-2)
def op_register_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = cast(x * m.weight)
    return y.float() + 1


@torch.library.triton_op("pythonop_rows::on_triton", mutates_args=())
def on_triton(x: Tensor) -> Tensor:
    """On the CPU it is made of torch's operators."""
    return x * 2


on_triton.register_autograd(_times(5))


@case(applies=1)
def op_triton(m, x):
    return on_triton(x * m.weight) + 1


class Fivefold(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 5


library = torch.library.Library(NAMESPACE, "FRAGMENT")
library.define("of_a_function(Tensor x) -> Tensor")
library.impl("of_a_function", lambda x: x * 2, "CompositeExplicitAutograd")
library.impl("of_a_function", lambda x: Fivefold.apply(x), "Autograd")
library.define("composite(Tensor x) -> Tensor")
library.impl("composite", lambda x: x * 2 + x.sin(), "CompositeImplicitAutograd")
library.define("double_(Tensor(a!) x) -> Tensor(a!)")
library.impl("double_", lambda x: x.mul_(2), "CompositeExplicitAutograd")


@case(applies=1)
def op_of_a_library(m, x):
    return torch.ops.pythonop_rows.of_a_function(x * m.weight) + 1


@case()
def op_composite(m, x):
    return torch.ops.pythonop_rows.composite(x * m.weight)


@case(applies=1)
def op_in_place(m, x):
    y = x.detach() + 1
    torch.ops.pythonop_rows.double_(y)
    return y * m.weight + x


@custom_op("pythonop_rows::outer", mutates_args=())
def outer(x: Tensor) -> Tensor:
    return mapped(Fivefold.apply(x)) + 1


outer.register_fake(torch.empty_like)
outer.register_autograd(_times(11))


@case(applies=1)
def op_that_calls_others(m, x):
    return outer(x * m.weight)


def extension():
    """The C++ extension."""
    from tests.end_to_end.functions.extension import built

    return built()


@case(applies=1, setup=extension)
def op_cpp_scatter(m, x):
    return torch.ops.pythonop_rows_cpp.scatter_rows(x * m.weight, torch.tensor([1, 0, 1]), 2)


@case(applies=1, setup=extension)
def op_cpp_maximum(m, x):
    values, places = torch.ops.pythonop_rows_cpp.row_maximum(x * m.weight, 0.5)
    return values + 1, places


@case(setup=extension)
def cpp_function(m, x):
    return extension().unnamed(x * m.weight)
