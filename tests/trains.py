"""A model and its loaded file side by side: what every test of `exporter.load` compares."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import exporter

__all__ = ["ALLOW", "assert_close", "assert_same_grads", "assert_step_alike", "assert_three_train_alike", "assert_trains_alike", "loaded"]

ALLOW = ["tests.exporter.module.functions", "tests.zoo.functions"]
TOLERANCE = 1e-5


def loaded(
    model: nn.Module, args: Any, kwargs: Any = None, *, dynamo: bool = True, allow: Any = ALLOW, path: Path | None = None, **options: Any
) -> Any:
    """The model's file as a module; it goes through ``path``, or stays in memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = exporter.export(copy.deepcopy(model), args, kwargs, dynamo=dynamo, **options)
    if path is None:
        return exporter.load(program, allow=allow)
    program.save(path)
    return exporter.load(path, allow=allow)


def assert_close(one: torch.Tensor, two: torch.Tensor, tolerance: float = TOLERANCE, msg: Callable[[str], str] | None = None) -> None:
    assert one.shape == two.shape
    assert one.dtype == two.dtype
    # A sum that cancels is as exact as its terms are, which the tensor's largest number tells: those of another processor add otherwise.
    largest = float(two.detach().abs().nan_to_num(0, 0, 0).max()) if two.is_floating_point() and two.numel() else 0.0
    torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance * max(1.0, largest), msg=msg)


def assert_same_grads(module: nn.Module, model: nn.Module, tolerance: float = TOLERANCE) -> None:
    """The same parameters in the same order; a gradient where eager has one, and no other."""
    for (name, one), (other, two) in zip(module.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert (one.grad is None) == (two.grad is None), name
        if one.grad is not None and two.grad is not None:
            assert_close(one.grad, two.grad, tolerance)


def assert_step_alike(module: nn.Module, model: nn.Module, args: Any, tolerance: float = TOLERANCE) -> None:
    """A forward and a backward of both: equal outputs, each element under a weight of its own, and equal gradients."""
    y, z = module(*args), model(*args)
    assert_close(y, z, tolerance)
    weights = torch.arange(1.0, z.numel() + 1).reshape(z.shape)
    for value in (y, z):
        (value * weights + value.square()).sum().backward()
    assert_same_grads(module, model, tolerance)


def assert_trains_alike(model: nn.Module, args: Any, *, tolerance: float = TOLERANCE, **options: Any) -> Any:
    """Export and load a model, and compare a step; the loaded module. ``options`` are those of `loaded`."""
    module = loaded(model, args, **options)
    assert_step_alike(module, model, args, tolerance)
    return module


def assert_three_train_alike(
    model: nn.Module,
    x: torch.Tensor,
    target: torch.Tensor,
    optimizer: type[torch.optim.Optimizer],
    rate: float,
    *,
    steps: int,
    rtol: float,
    allow: Any,
    **options: Any,
) -> None:
    """A training step in one file, a loaded module and eager: after some steps the parameters are equal, and all the way the gradients of the latter two."""
    loss = nn.functional.mse_loss
    step = exporter.export_training_step(
        copy.deepcopy(model),
        (x,),
        loss=loss,
        targets=(target,),
        optimizer=optimizer.__name__.lower(),
        hyperparameters={"lr": rate},
        **options,
    )
    trainer = exporter.Trainer(step, allow=allow)
    module = exporter.load(exporter.export(copy.deepcopy(model), (x,), **options), allow=allow)
    optimizers = [optimizer(each.parameters(), lr=rate) for each in (model, module)]  # type: ignore[call-arg]
    for _ in range(steps):
        trainer.step({"x": x, "target": target})
        for each, own in zip((model, module), optimizers, strict=True):
            own.zero_grad()
            loss(each(x), target).backward()
            own.step()
        gradients = [{name: parameter.grad for name, parameter in each.named_parameters()} for each in (module, model)]
        torch.testing.assert_close(*gradients, rtol=rtol, atol=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(torch.as_tensor(trainer.state_dict()[name]), value, rtol=rtol, atol=1e-5)
        torch.testing.assert_close(module.state_dict()[name], value, rtol=rtol, atol=1e-5)
