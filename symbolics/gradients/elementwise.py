"""Elementwise operators: y = f(x), and those that broadcast."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from symbolics.gradients.compositions import is_masked_softmax, tanh_gelu
from symbolics.gradients.registry import Gradients, gradient
from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, is_float, rank_of

__all__: list[str] = []

Unary = Callable[[Builder, ir.Value, ir.Value, ir.Value], ir.Value]

# ------------------------------------------------------------------------------------ (op, x, y, g) -> gradient of x
_UNARY: dict[str, Unary] = {
    "Identity": lambda op, x, y, g: g,
    "Neg": lambda op, x, y, g: -g,
    "Abs": lambda op, x, y, g: g * op.Sign(x),
    "Exp": lambda op, x, y, g: g * y,
    "Log": lambda op, x, y, g: g / x,
    "Sqrt": lambda op, x, y, g: 0.5 * g / y,
    "Reciprocal": lambda op, x, y, g: -(g * (y * y)),
    "Erf": lambda op, x, y, g: g * (2 / math.sqrt(math.pi) * op.Exp(-(x * x))),
    # trigonometric and hyperbolic
    "Sin": lambda op, x, y, g: g * op.Cos(x),
    "Cos": lambda op, x, y, g: -(g * op.Sin(x)),
    "Tan": lambda op, x, y, g: g * (1.0 + y * y),
    "Asin": lambda op, x, y, g: g / op.Sqrt(1.0 - x * x),
    "Acos": lambda op, x, y, g: -(g / op.Sqrt(1.0 - x * x)),
    "Atan": lambda op, x, y, g: g / (1.0 + x * x),
    "Sinh": lambda op, x, y, g: g * op.Cosh(x),
    "Cosh": lambda op, x, y, g: g * op.Sinh(x),
    "Tanh": lambda op, x, y, g: g * (1.0 - y * y),
    "Asinh": lambda op, x, y, g: g / op.Sqrt(x * x + 1.0),
    "Acosh": lambda op, x, y, g: g / op.Sqrt(x * x - 1.0),
    "Atanh": lambda op, x, y, g: g / (1.0 - x * x),
    # activations
    "Relu": lambda op, x, y, g: g * op.mask(op.Greater(y, 0), g),
    "Sigmoid": lambda op, x, y, g: g * (y * (1.0 - y)),
    "Softplus": lambda op, x, y, g: g * op.Sigmoid(x),
    "Softsign": lambda op, x, y, g: g * op.Pow(1.0 + op.Abs(x), -2.0),
    "Mish": lambda op, x, y, g: g * _mish(op, x),
    "HardSwish": lambda op, x, y, g: g * op.Where(op.Greater(x, 3.0), 1.0, op.Where(op.Less(x, -3.0), 0.0, x / 3.0 + 0.5)),
}


def _mish(op: Builder, x: ir.Value) -> ir.Value:
    t = op.Tanh(op.Softplus(x))
    return t + x * op.Sigmoid(x) * (1.0 - t * t)


def _unary(name: str, formula: Unary) -> None:
    @gradient(name)
    def rule(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
        return [formula(op, node.inputs[0], node.outputs[0], g)]


for _name, _formula in _UNARY.items():
    _unary(_name, _formula)


# ------------------------------------------------------------------------------------------ activations with attributes
@gradient("LeakyRelu")
def leaky_relu(op, node, g):
    return [g * op.Where(op.Greater(node.inputs[0], 0.0), op.number(1.0, g), op.number(attr(node, "alpha", 0.01), g))]


@gradient("ThresholdedRelu")
def thresholded_relu(op, node, g):
    return [g * op.mask(op.Greater(node.inputs[0], attr(node, "alpha", 1.0)), g)]


@gradient("Elu")
def elu(op, node, g):
    return [g * op.Where(op.Greater(node.inputs[0], 0.0), op.number(1.0, g), node.outputs[0] + attr(node, "alpha", 1.0))]


@gradient("Selu")
def selu(op, node, g):
    alpha, gamma = attr(node, "alpha", 1.6732631921768188), attr(node, "gamma", 1.0507010221481323)
    return [g * op.Where(op.Greater(node.inputs[0], 0.0), op.number(gamma, g), node.outputs[0] + alpha * gamma)]


@gradient("Celu")
def celu(op, node, g):
    x, alpha = node.inputs[0], attr(node, "alpha", 1.0)
    return [g * op.Exp(op.Min(x, 0.0) / alpha)]


@gradient("HardSigmoid")
def hard_sigmoid(op, node, g):
    y = node.outputs[0]
    return [g * (attr(node, "alpha", 0.2) * op.mask(op.And(op.Greater(y, 0.0), op.Less(y, 1.0)), g))]


@gradient("Shrink")
def shrink(op, node, g):
    return [g * op.mask(op.Greater(op.Abs(node.inputs[0]), attr(node, "lambd", 0.5)), g)]


@gradient("Swish")
def swish(op, node, g):
    x, alpha = node.inputs[0], attr(node, "alpha", 1.0)
    s = op.Sigmoid(x * alpha if alpha != 1.0 else x)
    return [g * (s + alpha * node.outputs[0] * (1.0 - s))]


@gradient("Gelu")
def gelu(op, node, g):
    x = node.inputs[0]
    if attr(node, "approximate", "none") == "tanh":
        c, k = math.sqrt(2 / math.pi), 0.044715
        square = x * x
        t = op.Tanh(c * x * (1.0 + k * square))
        return [g * (0.5 * (1.0 + t) + 0.5 * c * x * (1.0 - t * t) * (1.0 + 3 * k * square))]
    u = x * math.sqrt(0.5)
    twice_density = op.Exp(0.5 * math.log(2 / math.pi) - u * u)
    factor = (op.Erf(u) + x * twice_density + 1.0) * 0.5
    factor.shape = x.shape
    return [g * factor]


@gradient("PRelu")
def prelu(op, node, g):
    x, slope = node.inputs
    positive = op.Greater(x, 0.0)
    return [op.Where(positive, g, g * slope), op.sum_to(op.Where(positive, 0.0, g * x), slope, x)]


# ------------------------------------------------------------------------------------------------------- arithmetic
@gradient("Add", broadcast=True)
def add(op, node, g):
    return [g, g]


@gradient("Sub", broadcast=True)
def sub(op, node, g):
    return [g, -g]


@gradient("Mul", broadcast=True)
def mul(op, node, g):
    if (whole := tanh_gelu(op, node, g)) is not None:
        return whole
    a, b = node.inputs
    factor = op.const(b) if rank_of(b) == 0 else None
    return [g * b if factor is None else op.scale(g, float(factor)), g * a]


@gradient("Div", broadcast=True)
def div(op, node, g):
    _a, b = node.inputs
    da = g / b
    return [da, -(da * node.outputs[0])]


@gradient("Pow", broadcast=True)
def pow_(op, node, g):
    a, b = node.inputs
    exponent = op.const(b)
    if exponent is not None and exponent.size == 1:
        p = float(exponent.reshape(()))
        if p == 0.0:
            return [None, None]
        power = a if p == 2.0 else op.Sqrt(a) if p == 1.5 else op.Pow(a, op.number(p - 1, a))
        return [op.scale(g, p) * power, None]
    y, b = node.outputs[0], op.cast(b, a.dtype)
    zero = op.Equal(b, 0.0)  # 0 * a^-1 is 0 at a = 0 too
    da = g * (b * op.Pow(a, op.Where(zero, op.number(1.0, a), b - 1.0)))
    # d/db a^b = a^b log a; at a = 0 the limit for b >= 0 is 0
    log = op.Log(op.Where(op.Equal(a, 0.0), op.number(1.0, a), a))
    return [da, g * (y * log) if is_float(node.inputs[1]) else None]


@gradient("Mod", broadcast=True)
def mod(op, node, g):
    a, b = node.inputs
    return [g, -(g * op.Round((a - node.outputs[0]) / b))]  # a = b * whole + y


@gradient("Sum", broadcast=True)
def sum_(op, node, g):
    return [g] * len(node.inputs)


@gradient("Mean", broadcast=True)
def mean(op, node, g):
    return [g / float(len(node.inputs))] * len(node.inputs)


@gradient("Max", "Min", broadcast=True)
def max_min(op, node, g):
    """Ties share evenly, as torch.maximum and torch.minimum do."""
    if len(node.inputs) == 1:
        return [g]
    masks = [op.mask(op.Equal(x, node.outputs[0]), g) for x in node.inputs]
    share = g / (op.Sum(*masks) if len(masks) > 2 else masks[0] + masks[1])
    return [share * m for m in masks]


@gradient("Where", broadcast=True)
def where(op, node, g):
    condition, x, y = node.inputs
    if is_masked_softmax(op, condition, x, y):  # the rule of Softmax gives those elements nothing
        return [None, None, g]
    return [None, op.Where(condition, g, 0.0), op.Where(condition, 0.0, g)]


@gradient("Clip")
def clip(op, node, g):
    """At a bound the gradient goes to x, as torch.clamp does."""
    x, *bounds = [*node.inputs, None, None][:3]
    low, high = bounds
    below = None if low is None else op.Less(x, low)
    above = None if high is None else op.Greater(x, high)
    outside = below if above is None else above if below is None else op.Or(below, above)
    if outside is None:
        return [g]
    at_low = below if above is None else op.And(below, op.LessOrEqual(low, high))  # bounds that cross mean high
    at_high = above if below is None else op.And(outside, op.Not(at_low))
    dlow = None if low is None or op.const(low) is not None else op.sum_to(op.Where(at_low, g, 0.0), low, x)
    dhigh = None if high is None or op.const(high) is not None else op.sum_to(op.Where(at_high, g, 0.0), high, x)
    return [op.Where(outside, 0.0, g), dlow, dhigh][: len(node.inputs)]


# ------------------------------------------------------------------------------------------------------------ types
@gradient("Cast", "CastLike", first_only=True)
def cast(op, node, g):
    return [g]  # the engine casts a gradient to the type of its value


@gradient("Dropout")
def dropout(op, node, g, *_):
    """The mask of the forward is used again; without training there is none."""
    ratio, training = [*node.inputs[1:], None, None][:2]
    mode = op.const(training)
    if training is None or (mode is not None and not mode.any()):
        return [g]
    if len(node.outputs) < 2:
        node.resize_outputs(2)
    mask = node.outputs[1]
    if not mask.name:
        mask.name = op.scope.name("mask")
    mask.type, mask.shape = ir.TensorType(ir.DataType.BOOL), node.outputs[0].shape
    p = op.const(ratio) if ratio is not None else 0.5
    if p is not None:
        scale = op.number(0.0 if float(p) >= 1 else 1 / (1 - float(p)), g)
    else:
        ratio = op.cast(ratio, g.dtype)
        scale = op.Where(op.Equal(ratio, 1.0), op.number(0.0, g), 1.0 / (1.0 - ratio))
    if mode is None:
        scale = op.Where(training, scale, op.number(1.0, g))
    return [g * op.mask(mask, g) * scale]
