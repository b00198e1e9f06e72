"""What one step of an optimizer does to one parameter: a table of onnxscript functions, by name.

An optimizer is two functions. ``factors`` computes, once a step, the scalars that all parameters share; it works in
float64, as torch does on Python numbers. ``update`` computes one parameter's new value and new state from its gradient.
The formulas are those of the torch.optim documentation; Lion is algorithm 2 of Chen et al. 2023 (arXiv 2302.06675).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import onnxscript
from onnxscript import opset18 as op

__all__ = ["OPTIMIZERS", "Optimizer", "add_decay", "body", "plain_factors", "shrink"]

_OPSET = onnxscript.values.Opset("pythonop.optimizer", 1)
_script = onnxscript.script(_OPSET, default_opset=op)

# onnxscript reads the bodies below; what they mean stands in the table.
# ruff: noqa: D103
# mypy: disable-error-code=type-var


# --------------------------------------------------------------------------------------------------------- the scalars
@_script
def plain_factors(step, lr, weight_decay):  # type: ignore[no-untyped-def]
    return lr, op.Sub(op.CastLike(1, lr), lr * weight_decay)


@_script
def adam_factors(step, lr, weight_decay, beta1, beta2):  # type: ignore[no-untyped-def]
    one = op.CastLike(1, lr)
    count = op.CastLike(step, lr)
    rate = lr / (one - op.Pow(beta1, count))
    return rate, one - lr * weight_decay, op.Sqrt(one - op.Pow(beta2, count))


@_script
def momentum_factors(step, lr, weight_decay, dampening):  # type: ignore[no-untyped-def]
    one = op.CastLike(1, lr)
    # torch starts the buffer with the whole first gradient.
    share = op.Where(op.Equal(step, op.CastLike(1, step)), one, one - dampening)
    return lr, one - lr * weight_decay, share


# --------------------------------------------------------------------------------------------------------- the decays
@_script
def add_decay(p, g, weight_decay):  # type: ignore[no-untyped-def]
    return g + weight_decay * p


@_script
def shrink(p, kept):  # type: ignore[no-untyped-def]
    return p * kept


# -------------------------------------------------------------------------------------------------------- the updates
@_script
def sgd(p, g, rate):  # type: ignore[no-untyped-def]
    return p - rate * g


@_script
def sgd_momentum(p, g, buffer, rate, share, momentum):  # type: ignore[no-untyped-def]
    buffer_next = momentum * buffer + share * g
    return p - rate * buffer_next, buffer_next


@_script
def sgd_nesterov(p, g, buffer, rate, share, momentum):  # type: ignore[no-untyped-def]
    buffer_next = momentum * buffer + share * g
    return p - rate * (g + momentum * buffer_next), buffer_next


@_script
def adam(p, g, exp_avg, exp_avg_sq, rate, root, share1, beta2, share2, eps):  # type: ignore[no-untyped-def]
    exp_avg_next = exp_avg + (g - exp_avg) * share1
    exp_avg_sq_next = exp_avg_sq * beta2 + g * g * share2
    return p - rate * exp_avg_next / (op.Sqrt(exp_avg_sq_next) / root + eps), exp_avg_next, exp_avg_sq_next


@_script
def lion(p, g, exp_avg, rate, share1, share2):  # type: ignore[no-untyped-def]
    direction = op.Sign(exp_avg + (g - exp_avg) * share1)
    return p - rate * direction, exp_avg + (g - exp_avg) * share2


# ---------------------------------------------------------------------------------------------------------- the table
@dataclass(frozen=True)
class Optimizer:
    """One way to update a parameter.

    Attributes:
        hyperparameters: Names and defaults, as torch's class of that name has them. ``lr`` is an input of a step.
        slots: Names of the state that each parameter has beside it, as in torch's state_dict; all start as zeros.
        update: (p, g, *slots, *shared) -> (p, *slots); all of the parameter's element type.
        shared: The names of the scalars that ``update`` takes: results of ``factors``, or hyperparameters.
        factors: (step, lr, weight_decay, *factor_inputs) -> factor_outputs; float64 scalars but for the int64 step, which counts from 1.
        factor_inputs, factor_outputs: Names of these hyperparameters and results.
        decoupled: Whether weight decay shrinks the parameter itself (AdamW) or is a part of the gradient (Adam).
    """

    hyperparameters: Mapping[str, Any]
    slots: tuple[str, ...]
    update: onnxscript.OnnxFunction[..., Any]
    shared: tuple[str, ...]
    factors: onnxscript.OnnxFunction[..., Any] = plain_factors
    factor_inputs: tuple[str, ...] = ()
    factor_outputs: tuple[str, ...] = ("rate", "kept")
    decoupled: bool = False
    variants: Mapping[str, Optimizer] = field(default_factory=dict)

    def chosen(self, hyperparameters: Mapping[str, Any]) -> Optimizer:
        """The variant that these hyperparameters ask for: SGD without momentum needs no buffer."""
        for name, variant in self.variants.items():
            if hyperparameters.get(name):
                return variant
        return self


_SGD: dict[str, Any] = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
_ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def _with_momentum(update: onnxscript.OnnxFunction[..., Any]) -> Optimizer:
    outputs = ("rate", "kept", "share")
    return Optimizer(_SGD, ("momentum_buffer",), update, ("rate", "share", "momentum"), momentum_factors, ("dampening",), outputs)


def _adam(hyperparameters: Mapping[str, Any], decoupled: bool) -> Optimizer:
    shared = ("rate", "root", "share1", "beta2", "share2", "eps")
    return Optimizer(
        hyperparameters, ("exp_avg", "exp_avg_sq"), adam, shared, adam_factors, ("beta1", "beta2"), ("rate", "kept", "root"), decoupled
    )


#: name -> Optimizer. A step of one's own is another line.
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Optimizer(
        _SGD, (), sgd, ("rate",), variants={"nesterov": _with_momentum(sgd_nesterov), "momentum": _with_momentum(sgd_momentum)}
    ),
    "adam": _adam(_ADAM, decoupled=False),
    "adamw": _adam({**_ADAM, "weight_decay": 1e-2}, decoupled=True),
    "lion": Optimizer(
        {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}, ("exp_avg",), lion, ("rate", "share1", "share2"), decoupled=True
    ),
}


@functools.cache
def body(function: onnxscript.OnnxFunction[..., Any]) -> ir.Function:
    """A function of the table for onnx_ir."""
    found = ir.from_proto(function.to_function_proto())
    assert isinstance(found, ir.Function)
    return found
