"""Names that clash, forwards that are wrapped, states that are laid out oddly."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

from tests.end_to_end.alone.compare import Given
from tests.end_to_end.alone.table import Net, add, net, some


class _Same(nn.Module):
    """A parameter and a buffer with the names of arguments."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(some(4))
        self.register_buffer("x", some(4))

    def forward(self, x, weight):
        return x * self.weight + weight * self.x


@add
def arguments_named_as_parameters() -> Given:
    return Given(_Same().eval(), (some(), some()))


@add
def input_names_of_parameters() -> Given:
    return Given(nn.Linear(4, 3).eval(), (some(),), options={"input_names": ["data"], "output_names": ["weight_"]})


@add
def keys_with_odd_letters() -> Given:
    layers = nn.ModuleDict({"a/b": nn.Linear(4, 4), "c d": nn.Linear(4, 4), "é": nn.Linear(4, 4), "0": nn.Linear(4, 4)})

    def body(m, x):
        for layer in m.layers.values():
            x = layer(x)
        return x

    return net(body, some(), layers=layers)


@add
def many_children() -> Given:
    return Given(nn.Sequential(*(nn.Linear(4, 4) for _ in range(60))).eval(), (some(),))


@add
def deeply_nested() -> Given:
    model: nn.Module = nn.Linear(4, 4)
    for _ in range(30):
        model = nn.Sequential(model)
    return Given(model.eval(), (some(),))


@add
def views_of_a_flat_parameter() -> Given:
    def body(m, x):
        return nn.functional.linear(x, m.flat[:16].view(4, 4), m.flat[16:])

    return net(body, some(), flat=nn.Parameter(some(20)))


@add
def parameters_that_share_memory() -> Given:
    flat = some(20)
    return net(lambda m, x: x @ m.a + m.b, some(), a=nn.Parameter(flat[:16].view(4, 4)), b=nn.Parameter(flat[16:]))


@add
def a_deep_copy() -> Given:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].register_forward_hook(lambda module, args, out: out + 1)
    return Given(copy.deepcopy(model).eval(), (some(),))


@add
def a_partial_as_forward() -> Given:
    class Model(nn.Module):
        def forward(self, x, factor):
            return x * factor

    model = Model()
    model.forward = functools.partial(model.forward, factor=3.0)
    return Given(model.eval(), (some(),))


def _twice(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * 2

    return wrapper


@add
def a_decorated_forward() -> Given:
    class Model(nn.Linear):
        @_twice
        def forward(self, x):
            return super().forward(x)

    return Given(Model(4, 4).eval(), (some(),))


@add
def a_forward_of_a_mixin() -> Given:
    class Mixin:
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) + 1

    class Model(Mixin, nn.Linear):
        pass

    return Given(Model(4, 4).eval(), (some(),))


@add
def a_module_that_is_disabled_for_dynamo() -> Given:
    class Model(nn.Linear):
        @torch.compiler.disable
        def forward(self, x):
            return super().forward(x)

    return Given(nn.Sequential(Model(4, 4)).eval(), (some(),))


@add
def a_compiled_part() -> Given:
    return Given(nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), nn.ReLU()).eval(), (some(),))


@add
def try_and_context() -> Given:
    def body(m, x):
        try:
            with torch.autocast("cpu", enabled=False), torch.device("cpu"):
                x = x + torch.ones(4)
                raise KeyError("handled")
        except KeyError:
            return x * 2

    return net(body, some())


@add
def generators_and_recursion() -> Given:
    def halves(x):
        return x if x.shape[-1] == 1 else torch.cat([halves(part) for part in x.chunk(2, -1)][::-1], -1)

    return net(lambda m, x: halves(x) + sum(x[:, i : i + 1] for i in range(4)), some())


@add
def channels_last() -> Given:
    return Given(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).eval(), (some(1, 3, 5, 5).to(memory_format=torch.channels_last),))


@add
def argument_that_needs_a_gradient() -> Given:
    return Given(nn.Linear(4, 4).eval(), (some().requires_grad_(),))


@add
def argument_of_inference_mode() -> Given:
    with torch.inference_mode():
        x = some()
    return Given(nn.Linear(4, 4).eval(), (x,))


@add
def no_rows() -> Given:
    return Given(nn.Linear(4, 4).eval(), (some(0, 4),))


@add
def one_element() -> Given:
    return Given(nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1)).eval(), (some(1, 1),))


@add
def a_model_without_parameters_or_inputs_of_floats() -> Given:
    return net(lambda m, i: i + 1, torch.arange(4))


@add
def a_model_that_returns_its_only_input() -> Given:
    return Given(nn.Identity(), (some(),))


@add
def identity_between() -> Given:
    return Given(nn.Sequential(nn.Identity(), nn.Flatten(), nn.Identity()).eval(), (some(),))


@add
def dropout_of_evaluation() -> Given:
    return Given(nn.Sequential(nn.Dropout(), nn.Identity()).eval(), (some(),))


@add
def the_same_module_for_two_inputs() -> Given:
    return net(lambda m, x, y: (m.layer(x), m.layer(y)), some(), some(5, 4), layer=nn.Linear(4, 4))


@add
def a_part_that_is_in_training() -> Given:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    model[1].train()
    return Given(model, (some(),))


@add
def buffers_of_other_kinds() -> Given:
    return net(
        lambda m, x: x[:, m.order] * m.mask + m.narrow,
        some(),
        order=torch.tensor([3, 1, 0, 2]),
        mask=torch.tensor([True, False, True, True]),
        narrow=torch.ones(4).half(),
    )


@add
def a_module_kept_in_a_list() -> Given:
    layer = nn.Linear(4, 4)
    model = Net(lambda m, x: m.kept[0](x), layer=layer)
    model.kept = [layer]
    return Given(model.eval(), (some(),))


@add
def a_module_that_is_not_registered() -> Given:
    model = Net(lambda m, x: m.kept[0](x))
    model.kept = [nn.Linear(4, 4)]
    return Given(model.eval(), (some(),))


@add
def a_tensor_that_is_not_registered() -> Given:
    model = Net(lambda m, x: x * m.kept["w"])
    model.kept = {"w": some(4).requires_grad_()}
    return Given(model.eval(), (some(),))


@add
def a_closure_over_a_parameter() -> Given:
    w = nn.Parameter(some(4))
    return net(lambda m, x: x * w, some())


@add
def state_of_a_subclass_of_parameter() -> Given:
    class Own(nn.Parameter):
        pass

    return net(lambda m, x: x * m.w, some(), w=Own(some(4)))


@add
def a_forward_that_reads_its_name() -> Given:
    return net(lambda m, x: x * len(list(m.named_modules())) + len(type(m).__name__), some(), layer=nn.Linear(4, 4))


@add
def a_generator_of_results() -> Given:
    return net(lambda m, x: tuple(x[i] * i for i in range(3)), some())


@add
def training_flag_read() -> Given:
    return net(lambda m, x: x * (2 if m.training else 3) + int(torch.is_grad_enabled()) * 0, some())
