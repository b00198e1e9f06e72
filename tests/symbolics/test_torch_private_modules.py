"""What modules of torch keep, and how one is made without its constructor."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from symbolics import torch_private as private


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.rate, self.none = nn.Linear(2, 3), 0.5, None
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("absent", None)

    def forward(self, x):
        return self.linear(x * self.weight) * self.rate


def test_parts_of():
    block = Block()
    parameters, buffers, modules = private.parts_of(block)
    assert parameters == {"weight": block.weight}
    assert buffers == {"seen": block.seen, "absent": None}
    assert modules == {"linear": block.linear}
    parameters["weight"] = nn.Parameter(torch.zeros(2))
    assert not block.weight.any()


def test_own_attributes():
    block, lstm = Block(), nn.LSTM(2, 3)
    assert private.own_attributes(block) == {"rate": 0.5, "none": None}
    block.last = "set by forward"
    assert private.own_attributes(block)["last"] == "set by forward"
    own = private.own_attributes(lstm)
    assert {"mode", "input_size", "hidden_size", "num_layers"} <= own.keys()
    assert [id(w) for w in own["_flat_weights"]] == [id(p) for p in lstm.parameters()]


def test_is_base_attribute():
    assert all(map(private.is_base_attribute, ("training", "_parameters", "_forward_hooks", "_modules")))
    assert not private.is_base_attribute("rate")


def test_blank_module():
    made, block = private.blank_module(Block), Block()
    assert type(made) is Block
    assert private.parts_of(made) == ({}, {}, {})
    assert private.own_attributes(made) == {}
    parameters, buffers, modules = private.parts_of(made)
    parameters["weight"], modules["linear"], vars(made)["rate"] = block.weight, block.linear, 0.5
    x = torch.randn(4, 2)
    torch.testing.assert_close(made(x), block(x), rtol=0, atol=0)
    assert list(made.state_dict()) == ["weight", "linear.weight", "linear.bias"]


def test_forward_or_backward_hooks():
    block = Block()
    assert private.forward_or_backward_hooks(block) == []
    before, after, back = (lambda *_: None for _ in range(3))
    handles = [block.register_forward_pre_hook(before), block.register_forward_hook(after), block.register_full_backward_hook(back)]
    assert set(private.forward_or_backward_hooks(block)) == {before, after, back}
    for handle in handles:
        handle.remove()
    assert private.forward_or_backward_hooks(block) == []


def test_changes_its_statistics():
    assert all(
        map(private.changes_its_statistics, (nn.BatchNorm1d(2), nn.SyncBatchNorm(2), nn.InstanceNorm1d(2, track_running_stats=True)))
    )
    still = (nn.BatchNorm1d(2).eval(), nn.BatchNorm1d(2, track_running_stats=False), nn.InstanceNorm1d(2), nn.LayerNorm(2), Block())
    assert not any(map(private.changes_its_statistics, still))


def test_activation_of_torch():
    for function in (nn.functional.relu, nn.functional.gelu, nn.functional.silu, torch.tanh):
        assert private.activation_of_torch(function.__module__ or "torch", function.__name__) is function
    for module, name in (
        ("torch", "load"),
        ("torch", "from_file"),
        ("torch.nn.functional", "missing"),
        ("torch.hub", "load"),
        ("os", "system"),
    ):
        assert private.activation_of_torch(module, name) is None


def test_optimizer_hooks():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    assert private.optimizer_hooks(optimizer) == []
    hooks = [lambda *_: None for _ in range(4)]
    own = optimizer.register_step_pre_hook(hooks[0]), optimizer.register_step_post_hook(hooks[2])
    of_all = register_optimizer_step_pre_hook(hooks[1]), register_optimizer_step_post_hook(hooks[3])
    try:
        assert private.optimizer_hooks(optimizer) == [
            ("register_step_pre_hook", hooks[0]),
            ("register_optimizer_step_pre_hook", hooks[1]),
            ("register_step_post_hook", hooks[2]),
            ("register_optimizer_step_post_hook", hooks[3]),
        ]
    finally:
        for handle in (*own, *of_all):
            handle.remove()


def test_own_step():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    assert private.own_step(optimizer) is None
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert "step" in vars(optimizer)
    assert private.own_step(optimizer) is None
    optimizer.step = own = lambda closure=None: None
    assert private.own_step(optimizer) is own


def test_wrapped_module():
    inner = nn.Linear(2, 2)
    assert private.wrapped_module(inner) is None
    assert private.wrapped_module(nn.DataParallel(inner)) is inner
    assert private.wrapped_module(torch.compile(inner, backend="eager")) is inner, (
        "torch.compile's OptimizedModule has its module elsewhere (_orig_mod)"
    )
