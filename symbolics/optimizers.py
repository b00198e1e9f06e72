"""What one step of an optimizer does to one parameter: a table, by name.

An optimizer is two functions that write nodes. ``factors`` computes, once a step, the numbers that all parameters of a group share, in float32
unless a parameter is float64: many execution providers have no float64. torch computes them in Python's float64, so the formulas here are
written such that float32 does not cancel. ``update`` computes by how much one parameter shrinks, and its new state, from its gradient.
The formulas are those of https://docs.pytorch.org/docs/stable/generated/torch.optim.<Name>.html, in the names used there; Lion is algorithm 2 of
Chen et al. 2023 (arXiv 2302.06675).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from symbolics.graph.builder import Builder

__all__ = ["OPTIMIZERS", "Optimizer", "hyper"]

#: Hyperparameters by name, numbers all: h.lr, h.eps, ...; a pair is h.betas, and h.beta1 and h.beta2 beside it.
H = SimpleNamespace
#: What ``factors`` made, in the parameter's own type: s.rate, ...
S = SimpleNamespace
V = ir.Value


@dataclass(frozen=True)
class Optimizer:
    """One way to update a parameter.

    Attributes:
        hyperparameters: Names and defaults, as torch's class of that name has them. ``lr`` and ``weight_decay`` are inputs of a step.
        update: (op, h, s, p, g, *slots) -> (what p loses, *slots); all of the parameter's element type.
        slots: (h, shape) -> name -> first value, or (first value, shape) where the shape is not the parameter's. The names are those in torch's
            state_dict, in the order that ``update`` takes them.
        factors: (op, h, lr, t) -> name -> scalar of t's type; ``t`` counts the steps from 1. Without it ``rate`` is ``lr``.
        decoupled: Whether weight decay shrinks the parameter itself (AdamW) or is a part of the gradient (Adam).
        counts: Whether an update depends on how many came before; or the hyperparameter on which that hangs.
    """

    hyperparameters: Mapping[str, Any]
    update: Callable[..., tuple[V, ...]]
    slots: Callable[[H, tuple[int, ...]], Mapping[str, Any]]
    factors: Callable[[Builder, H, V, V], dict[str, V]] = lambda op, h, lr, t: {"rate": lr}
    decoupled: bool = False
    counts: bool | str = False


def hyper(hyperparameters: Mapping[str, Any]) -> H:
    """Hyperparameters as `Optimizer` takes them."""
    h = SimpleNamespace(**hyperparameters)
    h.beta1, h.beta2 = hyperparameters.get("betas", (0.0, 0.0))
    return h


# --------------------------------------------------------------------------------------------------------------- SGD, Lion
def _sgd_factors(op: Builder, h: H, lr: V, t: V) -> dict[str, V]:
    if not h.dampening:
        return {"rate": lr}
    # torch starts the buffer with the whole first gradient.
    return {"rate": lr, "share": op.Where(op.Equal(t, 1.0), op.number(1.0, t), op.number(1 - h.dampening, t))}


def _sgd(op: Builder, h: H, s: S, p: V, g: V, b: V | None = None) -> tuple[V, ...]:
    if b is None:
        return (s.rate * g,)
    b = b * h.momentum + (g * s.share if h.dampening else g)
    return s.rate * (g + b * h.momentum if h.nesterov else b), b


def _lion(op: Builder, h: H, s: S, p: V, g: V, m: V) -> tuple[V, ...]:
    return s.rate * op.Sign(m + (g - m) * (1 - h.beta1)), m + (g - m) * (1 - h.beta2)


# ----------------------------------------------------------------------------------------------------- Adam and its kin
def _moments(h: H, g: V, m: V, v: V) -> tuple[V, V]:
    return m + (g - m) * (1 - h.beta1), v * h.beta2 + g * g * (1 - h.beta2)


def _corrections(op: Builder, h: H, t: V) -> tuple[V, V]:
    """1 - beta1**t and 1 - beta2**t."""
    return _correction(op, h.beta1, t), _correction(op, h.beta2, t)


def _correction(op: Builder, beta: float, t: V) -> V:
    """1 - beta**t as 2 tanh(x) / (1 + tanh(x)) with x = -t log(beta) / 2: nothing cancels, while 1 - 0.999 has a relative error of 2e-5 in float32."""
    if not beta:
        return op.number(1.0, t)
    half = op.Tanh(t * (-0.5 * math.log(beta)))
    return 2.0 * half / (1.0 + half)


def _adam_factors(op: Builder, h: H, lr: V, t: V) -> dict[str, V]:
    first, second = _corrections(op, h, t)
    return {"rate": lr / first, "root": op.Sqrt(second)}


def _adam(op: Builder, h: H, s: S, p: V, g: V, m: V, v: V, most: V | None = None) -> tuple[V, ...]:
    m, v = _moments(h, g, m, v)
    if most is None:
        return s.rate * m / (op.Sqrt(v) / s.root + h.eps), m, v
    most = op.Max(most, v)
    return s.rate * m / (op.Sqrt(most) / s.root + h.eps), m, v, most


def _nadam_factors(op: Builder, h: H, lr: V, t: V) -> dict[str, V]:
    def mu(step: V) -> V:
        return h.beta1 * (1.0 - 0.5 * op.Exp(step * (h.momentum_decay * math.log(0.96))))

    now, then = mu(t), mu(t + 1.0)
    return {"mu": now, "mu_next": then, "now": lr * (1.0 - now), "then": lr * then, "correction": _corrections(op, h, t)[1]}


def _nadam(op: Builder, h: H, s: S, p: V, g: V, m: V, v: V, product: V) -> tuple[V, ...]:
    m, v = _moments(h, g, m, v)
    product = product * s.mu
    root = op.Sqrt(v / s.correction) + h.eps
    return g * (s.now / (1.0 - product)) / root + m * (s.then / (1.0 - product * s.mu_next)) / root, m, v, product


def _radam_factors(op: Builder, h: H, lr: V, t: V) -> dict[str, V]:
    first, second = _corrections(op, h, t)
    end = 2 / (1 - h.beta2) - 1  # the longest simple moving average
    rho = _moving_average_length(op, h.beta2, t, second)
    rectified = op.Sqrt((rho - 4.0) * (rho - 2.0) * end / ((end - 4) * (end - 2) * rho))
    adapts, rate = op.Greater(rho, 5.0), lr / first
    adaptive = op.Cast(adapts, to=t.dtype)
    return {"rate": op.Where(adapts, rate * rectified * op.Sqrt(second), rate), "adaptive": adaptive, "plain": 1.0 - adaptive}


def _moving_average_length(op: Builder, beta: float, t: V, correction: V) -> V:
    """RAdam's rho_t = rho_inf - 2 t beta**t / (1 - beta**t).

    In early steps both terms are about 2 / (1 - beta) and rho_t about t: float32 would lose four digits. With y = -log(beta) / 2 and x = t y the
    same is t + (f(y) - f(x)) / y, where f(x) = x coth(x) - 1 = x**2 / 3 - x**4 / 45 + 2 x**6 / 945 - x**8 / 4725 + ... for small x.
    """
    end = 2 / (1 - beta) - 1
    if not beta:
        return op.number(end, t)
    y = -0.5 * math.log(beta)
    square = (t * y) * (t * y)
    series = square * (1 / 3 - square * (1 / 45 - square * (2 / 945 - square * (1 / 4725))))
    early = t + ((y / math.tanh(y) - 1) / y - series * (1 / y))
    late = end - (2.0 * t) * (1.0 - correction) / correction
    return op.Where(op.Less(square, 0.25), early, late)


def _radam(op: Builder, h: H, s: S, p: V, g: V, m: V, v: V) -> tuple[V, ...]:
    m, v = _moments(h, g, m, v)
    return s.rate * m / ((op.Sqrt(v) + h.eps) * s.adaptive + s.plain), m, v


# ------------------------------------------------------------------------------------------- RMSprop, Adagrad and their kin
def _rmsprop(op: Builder, h: H, s: S, p: V, g: V, average: V, *more: V) -> tuple[V, ...]:
    kept = list(more)
    average = average * h.alpha + g * g * (1 - h.alpha)
    variance = average
    if h.centered:
        kept[-1] = mean = kept[-1] + (g - kept[-1]) * (1 - h.alpha)
        variance = op.Max(average - mean * mean, 0.0)  # rounding may leave less than nothing
    change = g / (op.Sqrt(variance) + h.eps)
    if h.momentum:
        kept[0] = change = kept[0] * h.momentum + change
    return s.rate * change, average, *kept


def _adagrad_factors(op: Builder, h: H, lr: V, t: V) -> dict[str, V]:
    return {"rate": lr / (1.0 + (t - 1.0) * h.lr_decay) if h.lr_decay else lr}


def _adagrad(op: Builder, h: H, s: S, p: V, g: V, total: V) -> tuple[V, ...]:
    total = total + g * g
    return s.rate * g / (op.Sqrt(total) + h.eps), total


def _adadelta(op: Builder, h: H, s: S, p: V, g: V, average: V, deltas: V) -> tuple[V, ...]:
    average = average * h.rho + g * g * (1 - h.rho)
    delta = op.Sqrt(deltas + h.eps) / op.Sqrt(average + h.eps) * g
    return s.rate * delta, average, deltas * h.rho + delta * delta * (1 - h.rho)


# --------------------------------------------------------------------------------------------------------------- Adafactor
def _adafactor_factors(op: Builder, h: H, lr: V, t: V) -> dict[str, V]:
    return {"rate": op.Min(lr, 1.0 / op.Sqrt(t)), "share": op.Pow(t, h.beta2_decay)}


def _adafactor(op: Builder, h: H, s: S, p: V, g: V, *variances: V) -> tuple[V, ...]:
    shape = p.shape.numpy() if p.shape is not None else ()
    least, root = h.eps[0], float(np.prod(shape)) ** 0.5
    if least is None:
        least = float(ml_dtypes.finfo(p.dtype.numpy()).eps) if p.dtype is not None else 0.0  # type: ignore[no-untyped-call]
    if len(shape) > 1:
        means = [op.ReduceSumSquare(g, [axis], keepdims=1) / shape[axis] for axis in (-1, -2)]
        variances = row, column = tuple(old + (mean - old) * s.share for old, mean in zip(variances, means, strict=True))
        variance = row * column / op.Max(op.ReduceMean(row, [-2], keepdims=1), least)
    else:
        variances = (variance,) = (variances[0] + (g * g - variances[0]) * s.share,)
    change = g / op.Sqrt(op.Max(variance, least * least))
    rate = s.rate * op.Max(_norm(op, p) / root, h.eps[1])
    return change * (rate / op.Max(_norm(op, change) / (root * h.d), 1.0)), *variances


def _norm(op: Builder, x: V) -> V:
    return op.Sqrt(op.ReduceSumSquare(x, None, keepdims=0))


def _adafactor_slots(h: H, shape: tuple[int, ...]) -> dict[str, Any]:
    if len(shape) < 2:
        return {"variance": 0.0}
    return {"row_var": (0.0, (*shape[:-1], 1)), "col_var": (0.0, (*shape[:-2], 1, shape[-1]))}


# --------------------------------------------------------------------------------------------------------------- the table
def _zeros(*names: str, **by_choice: str) -> Callable[[H, tuple[int, ...]], dict[str, float]]:
    """Slots that start as zeros; hyperparameter=name adds one where that is set."""
    return lambda h, shape: dict.fromkeys([*names, *(name for choice, name in by_choice.items() if getattr(h, choice))], 0.0)


_ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_DECOUPLES: dict[str, Any] = {"decoupled_weight_decay": False, "maximize": False}
_adam_slots = _zeros("exp_avg", "exp_avg_sq", amsgrad="max_exp_avg_sq")

#: name -> Optimizer. A step of one's own is another line.
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Optimizer(
        {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False},
        _sgd, _zeros(momentum="momentum_buffer"), _sgd_factors, counts="dampening",
    ),
    "adam": Optimizer({**_ADAM, "amsgrad": False, "maximize": False}, _adam, _adam_slots, _adam_factors, counts=True),
    "adamw": Optimizer({**_ADAM, "weight_decay": 1e-2, "amsgrad": False, "maximize": False}, _adam, _adam_slots, _adam_factors, True, True),
    "nadam": Optimizer(
        {**_ADAM, "lr": 2e-3, "momentum_decay": 4e-3, **_DECOUPLES},
        _nadam, lambda h, shape: {"exp_avg": 0.0, "exp_avg_sq": 0.0, "mu_product": (1.0, ())}, _nadam_factors, counts=True,
    ),
    "radam": Optimizer({**_ADAM, **_DECOUPLES}, _radam, _zeros("exp_avg", "exp_avg_sq"), _radam_factors, counts=True),
    "rmsprop": Optimizer(
        {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False, "maximize": False},
        _rmsprop, _zeros("square_avg", momentum="momentum_buffer", centered="grad_avg"),
    ),
    "adagrad": Optimizer(
        {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10, "maximize": False},
        _adagrad, lambda h, shape: {"sum": h.initial_accumulator_value}, _adagrad_factors, counts="lr_decay",
    ),
    "adadelta": Optimizer(
        {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0, "maximize": False}, _adadelta, _zeros("square_avg", "acc_delta")
    ),
    "adafactor": Optimizer(
        {"lr": 1e-2, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 0.0, "maximize": False},
        _adafactor, _adafactor_slots, _adafactor_factors, decoupled=True, counts=True,
    ),
    "lion": Optimizer(
        {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}, _lion, _zeros("exp_avg"), decoupled=True
    ),
}  # fmt: skip
