"""What is exported where it is no ordinary module, and what its forward does beside arithmetic."""

from __future__ import annotations

import functools

import torch
from torch import nn

from tests.end_to_end.alone.compare import Given
from tests.end_to_end.alone.table import add, net, some


@add
def scripted_inside() -> Given:
    return Given(nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 2)).eval(), (some(),))


@add
def scripted() -> Given:
    return Given(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()), (some(),))


class _Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = torch.tanh(self.layer(x)) if bool(x.sum() > 0) else x + 1
        return x


@add
def scripted_loop() -> Given:
    given = Given(torch.jit.script(_Steps().eval()), (some(), torch.tensor(2)), options={"input_names": ["x", "steps"]})
    given.runs = [((some(), torch.tensor(3)), {})]
    return given


@add
def scripted_dynamically() -> Given:
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval())
    given = Given(model, (some(),), options={"input_names": ["x"], "dynamic_axes": {"x": {0: "n"}}})
    given.runs = [((some(5, 4),), {})]
    return given


@add
def traced() -> Given:
    return Given(torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), (some(),)), (some(),))


@add
def traced_inside() -> Given:
    return Given(nn.Sequential(torch.jit.trace(nn.Linear(4, 4).eval(), (some(),)), nn.Linear(4, 2)).eval(), (some(),))


@torch.jit.script
def _scripted(x: torch.Tensor, n: int) -> torch.Tensor:
    for _ in range(n):
        x = x * 2
    return x


@add
def scripted_function() -> Given:
    return net(lambda m, x: _scripted(x, 2) + 1, some())


@add
def function() -> Given:
    return Given(lambda x: x * 2, (some(),))


@add
def partial() -> Given:
    return Given(functools.partial(torch.clamp, min=0.1), (some(),))


@add
def bound_method() -> Given:
    return Given(nn.Linear(4, 4).forward, (some(),))


class _Called(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 2


@add
def call_overridden() -> Given:
    return Given(_Called(4, 4).eval(), (some(),))


@add
def forward_replaced() -> Given:
    model = nn.Linear(4, 4).eval()
    own = model.forward
    model.forward = lambda x: own(x) + 1
    return Given(model, (some(),))


class _Proxy(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@add
def wrapped() -> Given:
    return Given(_Proxy(nn.Linear(4, 4)).eval(), (some(),))


@add
def data_parallel() -> Given:
    return Given(nn.DataParallel(nn.Linear(4, 4)).eval(), (some(),))


@add
def compiled() -> Given:
    return Given(torch.compile(nn.Linear(4, 4).eval(), backend="eager"), (some(),))


@add
def symbolically_traced() -> Given:
    return Given(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()), (some(),))


@add
def exported_program() -> Given:
    return Given(torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), (some(),)).module(), (some(),))


@add
def no_grad_forward() -> Given:
    class Quiet(nn.Linear):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    return Given(Quiet(4, 4).eval(), (some(),))


@add
def inference_forward() -> Given:
    class Quiet(nn.Linear):
        @torch.inference_mode()
        def forward(self, x):
            return super().forward(x)

    return Given(Quiet(4, 4).eval(), (some(),))


@add
def autocast_forward() -> Given:
    def body(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m.layer(x).float()

    return net(body, some(), layer=nn.Linear(4, 4))


@add
def control_by_shape() -> Given:
    return net(lambda m, x: torch.cat([x] * x.shape[0]) if x.dim() == 2 else x, some())


@add
def conditional() -> Given:
    return net(lambda m, x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, (x,)), some())
