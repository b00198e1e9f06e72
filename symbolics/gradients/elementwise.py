"""Elementwise operators: y = f(x), and those that broadcast."""

from __future__ import annotations

import math

import onnx_ir as ir
from onnx_ir import Value

from symbolics.gradients.compositions import is_masked_softmax, tanh_gelu
from symbolics.gradients.registry import Grads, RuleFunction, formulas, gradient
from symbolics.gradients.residuals import residual
from symbolics.graph.builder import Builder
from symbolics.graph.values import may_be_float, rank_of
from symbolics.node.names import OPEN_PROPERTY

__all__: list[str] = []

_UNARY: dict[str, RuleFunction] = {
    "Identity": lambda op, g, x: g,
    "Cast": lambda op, g, x: g,  # the engine casts a gradient to the type of its value
    "CastLike": lambda op, g, x: g,
    "Neg": lambda op, g, x: -g,
    "Abs": lambda op, g, x: g * op.Sign(x),
    "Exp": lambda op, g, x, *, y: g * y,
    "Log": lambda op, g, x: g / x,
    "Sqrt": lambda op, g, x, *, y: 0.5 * g / y,
    "Reciprocal": lambda op, g, x, *, y: -(g * (y * y)),
    "Erf": lambda op, g, x: g * (2 / math.sqrt(math.pi) * op.Exp(-(x * x))),
    # trigonometric and hyperbolic
    "Sin": lambda op, g, x: g * op.Cos(x),
    "Cos": lambda op, g, x: -(g * op.Sin(x)),
    "Tan": lambda op, g, x, *, y: g * (1.0 + y * y),
    "Asin": lambda op, g, x: g / op.Sqrt(1.0 - x * x),
    "Acos": lambda op, g, x: -(g / op.Sqrt(1.0 - x * x)),
    "Atan": lambda op, g, x: g / (1.0 + x * x),
    "Sinh": lambda op, g, x: g * op.Cosh(x),
    "Cosh": lambda op, g, x: g * op.Sinh(x),
    "Tanh": lambda op, g, x, *, y: g * (1.0 - y * y),
    "Asinh": lambda op, g, x: g / op.Sqrt(x * x + 1.0),
    "Acosh": lambda op, g, x: g / op.Sqrt(x * x - 1.0),
    "Atanh": lambda op, g, x: g / (1.0 - x * x),
    # activations
    "Relu": lambda op, g, x, *, y: op.gate(op.Greater(y, 0), g),
    "LeakyRelu": lambda op, g, x, *, alpha: g * op.Where(op.Greater(x, 0.0), op.number(1.0, g), op.number(alpha, g)),
    "ThresholdedRelu": lambda op, g, x, *, alpha: op.gate(op.Greater(x, alpha), g),
    "Elu": lambda op, g, x, *, y, alpha: g * op.Where(op.Greater(x, 0.0), op.number(1.0, g), y + alpha),
    "Selu": lambda op, g, x, *, y, alpha, gamma: g * op.Where(op.Greater(x, 0.0), op.number(gamma, g), y + alpha * gamma),
    "Celu": lambda op, g, x, *, alpha: g * op.Exp(op.Min(x, 0.0) / alpha),
    "Sigmoid": lambda op, g, x, *, y: g * (y * (1.0 - y)),
    "HardSigmoid": lambda op, g, x, *, y, alpha: op.gate(op.And(op.Greater(y, 0.0), op.Less(y, 1.0)), g * alpha),
    "HardSwish": lambda op, g, x: op.Where(op.GreaterOrEqual(x, 3.0), g, op.Where(op.LessOrEqual(x, -3.0), 0.0, g * (x / 3.0 + 0.5))),
    "Softplus": lambda op, g, x: g * op.Sigmoid(x),
    "Softsign": lambda op, g, x: g * op.Pow(1.0 + op.Abs(x), -2.0),
    "Shrink": lambda op, g, x, *, lambd: op.gate(op.Greater(op.Abs(x), lambd), g),
}
formulas(_UNARY)


@gradient("Mish")
def mish(op: Builder, g: Value, x: Value) -> Value:
    """x tanh(softplus(x)); the derivative of softplus is the sigmoid, which x multiplies: onnxruntime's own has no digits left where it is small."""
    s = op.Softplus(x)
    t = op.Tanh(s)
    return g * (t + x * op.Exp(x - s) * (1.0 - t * t))


@gradient("Swish")
def swish(op: Builder, g: Value, x: Value, *, y: Value, alpha: float) -> Value:
    s = op.Sigmoid(x * alpha if alpha != 1.0 else x)
    return g * (s + alpha * y * (1.0 - s))


@gradient("Gelu")
def gelu(op: Builder, g: Value, x: Value, *, approximate: str) -> Value:
    if approximate == "tanh":
        c, k = math.sqrt(2 / math.pi), 0.044715
        square = x * x
        t = op.Tanh(c * x * (1.0 + k * square))
        return g * (0.5 * (1.0 + t) + 0.5 * c * x * (1.0 - t * t) * (1.0 + 3 * k * square))
    u = x * math.sqrt(0.5)
    twice_density = op.Exp(0.5 * math.log(2 / math.pi) - u * u)
    factor = (op.Erf(u) + x * twice_density + 1.0) * 0.5
    factor.shape = x.shape
    return g * factor


@gradient("Scaler", domain="ai.onnx.ml")
def scaler(op: Builder, g: Value, x: Value, *, scale: list[float]) -> Value:
    """(x - offset) scale: a number, or one for each place of the last axis."""
    return g * op.constant(scale, ir.DataType.FLOAT)


@gradient("PRelu")
def prelu(op: Builder, g: Value, x: Value, slope: Value) -> Grads:
    positive = op.Greater(x, 0.0)
    return [op.Where(positive, g, g * slope), op.sum_to(op.Where(positive, 0.0, g * x), slope, x)]


# ------------------------------------------------------------------------------------------------------- arithmetic
_BROADCAST: dict[str, RuleFunction] = {
    "Add": lambda op, g, a, b: [g, g],
    "Sub": lambda op, g, a, b: [g, -g],
    "Div": lambda op, g, a, b, *, y: [(da := g / b), -(da * y)],
    "Mod": lambda op, g, a, b, *, y: [g, -(g * op.Where(op.Equal(b, 0.0), a / b, op.Round((a - y) / b)))],  # a = b * whole + y
    "Sum": lambda op, g, *xs: [g] * len(xs),
    "Mean": lambda op, g, *xs: [g / float(len(xs))] * len(xs),
}
formulas(_BROADCAST, broadcast=True)


@gradient("Mul", broadcast=True)
def mul(op: Builder, g: Value, a: Value, b: Value, *, node: ir.Node) -> Grads:
    if (whole := tanh_gelu(op, node, g)) is not None:
        return whole
    factor = op.const(b) if rank_of(b) == 0 else None
    return [g * b if factor is None else op.scale(g, float(factor)), g * a]


@gradient("Pow", broadcast=True)
def pow_(op: Builder, g: Value, a: Value, b: Value, *, y: Value) -> Grads:
    """a^b: b a^(b-1) and a^b log a. 0 * a^-1 is 0 at a = 0 too; the limit of the second at a = 0 is 0 for b >= 0, infinite otherwise."""
    exponent = op.const(b)
    if exponent is not None and exponent.size == 1:
        n = float(exponent.reshape(()))
        if n == 0.0:
            return [op.no_slope(a, g), None]
        power = a if n == 2.0 else op.Sqrt(a) if n == 1.5 else op.Pow(a, op.number(n - 1, a))
        return [op.scale(g, n) * power, None]
    p = op.Cast(b, to=a.dtype)
    one = op.number(1.0, a)
    da = g * (p * op.Pow(a, op.Where(op.Equal(p, 0.0), one, p - 1.0)))
    log = op.Log(op.Where(op.And(op.Equal(a, 0.0), op.GreaterOrEqual(p, 0.0)), one, a))
    return [da, g * (y * log) if may_be_float(b) else None]


@gradient("Max", "Min", broadcast=True)
def max_min(op: Builder, g: Value, *xs: Value, y: Value, node: ir.Node) -> Grads:
    """Ties share evenly, as torch.maximum and torch.minimum do. Of two, both have the whole gradient where one is NaN, as there."""
    if len(xs) == 1:
        return g
    if len(xs) == 2:
        a, b = xs if node.op_type == "Max" else xs[::-1]
        share = op.Where(op.Equal(a, b), op.scale(g, 0.5), g)
        return [op.Where(op.Less(a, b), 0.0, share), op.Where(op.Less(b, a), 0.0, share)]
    won = [op.Equal(x, y) for x in xs]
    share = g / op.Sum(*(op.mask(w, g) for w in won))
    return [op.gate(w, share) for w in won]


@gradient("Where", broadcast=True)
def where(op: Builder, g: Value, condition: Value, a: Value, b: Value) -> Grads:
    if is_masked_softmax(op, condition, a, b):  # the rule of Softmax gives those elements nothing
        return [None, None, g]
    return [None, op.gate(condition, g), op.Where(condition, 0.0, g)]


@gradient("Clip", straight_through=True)
def clip(op: Builder, g: Value, x: Value, low: Value | None, high: Value | None, *, node: ir.Node) -> Grads:
    """At a bound the gradient goes to x, as torch.clamp does; torch's hardtanh and relu6, which are marked, have none there.

    Levels of a QuantizeLinear are cut, too: quantization to 7 bits.
    """
    if x.dtype is not None and x.dtype.is_integer():  # of which onnxruntime compares no small ones
        for bound, beyond in ((low, op.Less), (high, op.Greater)):
            if bound is not None:
                g = op.Where(beyond(op.Cast(x, to=g.dtype), op.Cast(bound, to=g.dtype)), 0.0, g)
        return [g, None, None]
    is_open = OPEN_PROPERTY in node.metadata_props
    below = None if low is None else (op.LessOrEqual if is_open else op.Less)(x, low)
    above = None if high is None else (op.GreaterOrEqual if is_open else op.Greater)(x, high)
    outside = below if above is None else above if below is None else op.Or(below, above)
    if outside is None:
        return g
    at_low = below if above is None or below is None else op.And(below, op.LessOrEqual(low, high))  # bounds that cross mean high
    at_high = above if below is None else op.And(outside, op.Not(at_low))
    dlow = None if low is None or op.const(low) is not None else op.sum_to(op.Where(at_low, g, 0.0), low, x)
    dhigh = None if high is None or op.const(high) is not None else op.sum_to(op.Where(at_high, g, 0.0), high, x)
    return [op.Where(outside, 0.0, g), dlow, dhigh]


@gradient("Dropout")
def dropout(op: Builder, g: Value, x: Value, ratio: Value | None, training: Value | None, *, node: ir.Node) -> Grads:
    """The mask of the forward is used again; without training there is none."""
    mode = op.const(training)
    if training is None or (mode is not None and not mode.any()):
        return [g, None]
    mask = residual(op, node, 1, "mask", ir.DataType.BOOL, node.outputs[0].shape)
    p = op.const(ratio)
    if ratio is None or p is not None:
        known = 0.5 if p is None else float(p)
        scale = op.number(0.0 if known >= 1 else 1 / (1 - known), g)
    else:
        share = op.Cast(ratio, to=g.dtype)
        scale = op.Where(op.Equal(share, 1.0), op.number(0.0, g), 1.0 / (1.0 - share))
    if mode is None:
        scale = op.Where(training, scale, op.number(1.0, g))
    return [g * op.mask(mask, g) * scale, None]
