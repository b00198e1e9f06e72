"""Which optimizer updates which parameter: from a name or a torch optimizer to groups of parameters."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exporter.runtime.tensors import to_array
from symbolics import torch_private as private
from symbolics.capture.gradient_hooks import shown_hook
from symbolics.errors import ArgumentError
from symbolics.optimizers import OPTIMIZERS, Optimizer

__all__ = ["Group", "groups_of", "steps_made"]

# Settings of torch's classes that say how torch computes, not what.
_HOW = frozenset({"foreach", "fused", "capturable", "differentiable", "params", "param_names", "initial_lr"})


@dataclass(frozen=True)
class Group:
    """Parameters that are updated alike.

    Attributes:
        names: Their state_dict keys.
        optimizer: How one of them is updated.
        name: The optimizer's name.
        hyperparameters: All of its hyperparameters, ``lr`` among them.
        state: state_dict key -> slot -> value, of a torch optimizer that has already run; ``step`` is among the slots.
    """

    names: tuple[str, ...]
    optimizer: Optimizer
    name: str
    hyperparameters: Mapping[str, Any]
    state: Mapping[str, Mapping[str, Any]]

    @property
    def counts(self) -> bool:
        """Whether an update depends on how many came before."""
        return bool(self.hyperparameters[counts]) if isinstance(counts := self.optimizer.counts, str) else counts

    @property
    def decoupled(self) -> bool:
        """Whether weight decay shrinks the parameters themselves."""
        return self.optimizer.decoupled or bool(self.hyperparameters.get("decoupled_weight_decay"))

    def steps(self, name: str) -> int:
        """How many steps a parameter has made; 1 where torch keeps state of it and counts none."""
        return int(self.state[name].get("step", 1)) if name in self.state else 0


def groups_of(
    optimizer: str | torch.optim.Optimizer | type[torch.optim.Optimizer],
    hyperparameters: Mapping[str, Any] | None,
    parameters: Mapping[str, torch.nn.Parameter],
) -> list[Group]:
    """The groups of an optimizer.

    Args:
        optimizer: A name of `symbolics.optimizers.OPTIMIZERS`, a class of torch.optim, or an instance of one over these parameters.
        hyperparameters: What differs from the defaults, with a name or a class alone.
        parameters: The trainable parameters by their state_dict keys.

    Raises:
        ArgumentError: An optimizer, hyperparameter or setting that no step can be made of.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        if hyperparameters:
            raise ArgumentError("hyperparameters= belongs to an optimizer's name; a torch optimizer has its own in param_groups")
        return _of_torch(optimizer, parameters)
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        optimizer = _name_of(optimizer)
    if not isinstance(optimizer, str):
        raise ArgumentError(
            f"optimizer is {f'the class {optimizer.__name__}' if isinstance(optimizer, type) else f'of type {type(optimizer).__name__}'}: "
            f"give one of {', '.join(OPTIMIZERS)}, or an instance of torch.optim.Optimizer"
        )
    if hyperparameters is not None and not isinstance(hyperparameters, Mapping):
        raise ArgumentError(f"hyperparameters is of type {type(hyperparameters).__name__}: give a dict name -> value")
    if optimizer.lower() == "adafactor" and (numbers := [key for key, parameter in parameters.items() if parameter.is_complex()]):
        raise ArgumentError(
            f"adafactor takes no complex parameters, as in torch, and {numbers[0]} is one: its factors are means of rows and columns, not of real and "
            f"imaginary parts. Give another one of {', '.join(OPTIMIZERS)}"
        )
    return [_group(optimizer, tuple(parameters), hyperparameters or {}, {})]


def _parts(value: Any) -> Any:
    """State of an optimizer, as a file has it: an array, or a number."""
    if not isinstance(value, torch.Tensor):
        return value
    return to_array(torch.view_as_real(value) if value.is_complex() else value)


def _name_of(kind: type[torch.optim.Optimizer]) -> str:
    """The name of one of torch's classes; another class may compute what it likes, whatever it is called."""
    if kind.__name__.lower() in OPTIMIZERS and kind is not getattr(torch.optim, kind.__name__, None):
        raise ArgumentError(
            f"the optimizer is {kind.__module__}.{kind.__qualname__}, not torch's own, and a step knows torch's alone: give torch.optim's class, or a name: "
            f"{', '.join(OPTIMIZERS)}"
        )
    return kind.__name__


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what runs at an optimizer's step() and is not its class's: a file would train without it.

    Raises:
        ArgumentError: It has a hook, or a step of its own.
    """
    kind = type(optimizer).__name__
    for method, hook in private.optimizer_hooks(optimizer):
        raise ArgumentError(
            f"the optimizer {kind} has the hook {shown_hook(hook)}, registered by {method}: it runs around optimizer.step(), and a training step, which is a "
            "file, cannot run it\n  way out: take it off for the export (handle.remove()), and do what it does in forward, or around trainer.step()"
        )
    if (step := private.own_step(optimizer)) is not None:
        raise ArgumentError(
            f"the step() of the optimizer {kind} is {shown_hook(step)}, not that of torch's class, and a training step knows torch's alone\n"
            "  way out: give an optimizer whose step() is torch's (del optimizer.step gives it back), or train the model of exporter.load with this one"
        )


def _group(name: str, names: tuple[str, ...], given: Mapping[str, Any], state: Mapping[str, Any]) -> Group:
    kind = name.lower()
    if kind == "adam" and given.get("decoupled_weight_decay"):
        kind = "adamw"
    if kind not in OPTIMIZERS:
        raise ArgumentError(f"there is no optimizer {name!r}{_meant(kind, OPTIMIZERS)}; a step can be made with {', '.join(OPTIMIZERS)}")
    defaults = OPTIMIZERS[kind].hyperparameters
    known = {*defaults, *_HOW, *(("decoupled_weight_decay",) if kind in ("adam", "adamw") else ())}
    if unknown := sorted(set(given) - known):
        raise ArgumentError(f"{name} has no hyperparameter {unknown[0]!r}{_meant(unknown[0], defaults)}; it has {', '.join(defaults)}")
    values = {key: _value(name, key, given.get(key, default), default) for key, default in defaults.items()}
    for own in [own for title, own in vars(torch.optim).items() if title.lower() == kind and isinstance(own, type)]:
        try:
            own([torch.zeros(1)], **values)
        except ValueError as error:  # torch knows what each may be
            raise ArgumentError(f"{name}: {error}") from error
    return Group(names, OPTIMIZERS[kind], kind, values, state)


def _value(name: str, key: str, value: Any, default: Any) -> Any:
    """A hyperparameter as its default is: a flag, a number, or two of them."""
    if isinstance(default, bool):
        return bool(value)
    try:
        if isinstance(default, tuple):
            first, second = value
            return None if first is None and default[0] is None else float(first), float(second)
        return float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name}: {key} is {value!r}, not {'two numbers' if isinstance(default, tuple) else 'a number'}") from error


def _of_torch(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> list[Group]:
    keys = {id(parameter): key for key, parameter in parameters.items()}
    kind = _name_of(type(optimizer))
    _check_step(optimizer)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        found = [p for p in group["params"] if p.requires_grad]
        if strangers := [p for p in found if id(p) not in keys]:
            raise ArgumentError(
                f"the optimizer's group {number} has a parameter of shape {list(strangers[0].shape)} that the model has not: make it from model.parameters()"
            )
        # SGD without momentum may keep a buffer of None.
        state = {keys[id(p)]: {slot: _parts(v) for slot, v in optimizer.state.get(p, {}).items() if v is not None} for p in found}
        groups.append(_group(kind, tuple(keys[id(p)] for p in found), group, {key: slots for key, slots in state.items() if slots}))
    return groups


def steps_made(groups: Iterable[Group], parameters: Container[str]) -> int:
    """How many steps lie behind these parameters.

    Raises:
        ArgumentError: Not as many behind each.
    """
    made = {name: group.steps(name) for group in groups if group.counts for name in group.names if name in parameters}
    if len(set(made.values())) > 1:
        low, high = min(made, key=made.__getitem__), max(made, key=made.__getitem__)
        raise ArgumentError(
            f"the optimizer has made {made[low]} steps for {low} and {made[high]} for {high}, and a training step counts once for all: "
            "give an optimizer that has not run, or one that has run for all of them"
        )
    return max(made.values(), default=0)


def _meant(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(words), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
