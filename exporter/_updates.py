"""Which optimizer updates which parameter: from a name or a torch optimizer to groups of parameters."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from symbolics.errors import ArgumentError
from symbolics.optimizers import OPTIMIZERS, Optimizer

__all__ = ["Group", "groups_of"]

# Settings of torch's classes that say how torch computes, not what.
_HOW = frozenset({"foreach", "fused", "capturable", "differentiable", "params", "initial_lr"})
_UNSUPPORTED = ("amsgrad", "maximize")


@dataclass(frozen=True)
class Group:
    """Parameters that are updated alike.

    Attributes:
        names: Their state_dict keys.
        optimizer: How one of them is updated.
        name: The optimizer's name.
        hyperparameters: All of its hyperparameters, ``lr`` among them.
        state: state_dict key -> slot -> value, of a torch optimizer that has already run.
        steps: How many steps it has made.
    """

    names: tuple[str, ...]
    optimizer: Optimizer
    name: str
    hyperparameters: Mapping[str, Any]
    state: Mapping[str, Mapping[str, torch.Tensor]]
    steps: int = 0

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that the functions of the table take by name."""
        values = dict(self.hyperparameters)
        beta1, beta2 = values.pop("betas", (0.0, 0.0))
        values.update(beta1=beta1, beta2=beta2, share1=1 - beta1, share2=1 - beta2)
        return {name: float(value) for name, value in values.items()}


def groups_of(optimizer: str | torch.optim.Optimizer, hyperparameters: Mapping[str, Any] | None, parameters: Mapping[str, torch.nn.Parameter]) -> list[Group]:
    """The groups of an optimizer.

    Args:
        optimizer: A name of `symbolics.optimizers.OPTIMIZERS`, or a torch optimizer over these parameters.
        hyperparameters: What differs from the defaults, with a name alone.
        parameters: The trainable parameters by their state_dict keys.

    Raises:
        ArgumentError: An optimizer, hyperparameter or setting that no step can be made of.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        if hyperparameters:
            raise ArgumentError("hyperparameters= belongs to an optimizer's name; a torch optimizer has its own in param_groups")
        return _of_torch(optimizer, parameters)
    if not isinstance(optimizer, str):
        raise ArgumentError(f"optimizer is a {type(optimizer).__name__}: give one of {', '.join(OPTIMIZERS)}, or an instance of torch.optim.Optimizer")
    return [_group(optimizer, tuple(parameters), hyperparameters or {}, {})]


def _group(name: str, names: tuple[str, ...], given: Mapping[str, Any], state: Mapping[str, Any], steps: int = 0) -> Group:
    kind = name.lower()
    if kind == "adam" and given.get("decoupled_weight_decay"):
        kind = "adamw"
    if kind not in OPTIMIZERS:
        raise ArgumentError(f"there is no optimizer {name!r}{_meant(kind, OPTIMIZERS)}; a step can be made with {', '.join(OPTIMIZERS)}")
    for setting in _UNSUPPORTED:
        if given.get(setting):
            raise ArgumentError(f"{name}({setting}=True) has no training step: leave it out")
    defaults = OPTIMIZERS[kind].hyperparameters
    known = {*defaults, *_HOW, *_UNSUPPORTED, "decoupled_weight_decay"}
    if unknown := sorted(set(given) - known):
        raise ArgumentError(f"{name} has no hyperparameter {unknown[0]!r}{_meant(unknown[0], defaults)}; it has {', '.join(defaults)}")
    values = {key: _number(name, key, given.get(key, default)) for key, default in defaults.items()}
    if kind == "sgd" and values["nesterov"] and (not values["momentum"] or values["dampening"]):
        raise ArgumentError("SGD with nesterov=True needs momentum and no dampening, as in torch")
    return Group(names, OPTIMIZERS[kind].chosen(values), kind, values, state, steps)


def _number(name: str, key: str, value: Any) -> Any:
    if key == "nesterov":
        return bool(value)
    try:
        if key == "betas":
            first, second = value
            return float(first), float(second)
        return float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name}: {key} is {value!r}, not {'two numbers' if key == 'betas' else 'a number'}") from error


def _of_torch(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> list[Group]:
    keys = {id(parameter): key for key, parameter in parameters.items()}
    kind = type(optimizer).__name__
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        found = [p for p in group["params"] if p.requires_grad]
        if strangers := [p for p in found if id(p) not in keys]:
            raise ArgumentError(f"the optimizer's group {number} has a parameter of shape {list(strangers[0].shape)} that the model has not: make it from model.parameters()")
        state = {keys[id(p)]: dict(optimizer.state[p]) for p in found if optimizer.state.get(p)}
        steps = {int(entry["step"]) for entry in state.values() if "step" in entry}
        if len(steps) > 1:
            raise ArgumentError(f"the optimizer has made different numbers of steps for its parameters ({sorted(steps)}): a training step counts once for all")
        slots = {key: {slot: value for slot, value in entry.items() if isinstance(value, torch.Tensor) and slot != "step"} for key, entry in state.items()}
        groups.append(_group(kind, tuple(keys[id(p)] for p in found), group, slots, max(steps, default=0)))
    return groups


def _meant(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(words), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
