"""LSTM, GRU and RNN as a Scan over time of primitives, one a direction; the rule of Scan does the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from symbolics.gradients._builder import Builder, attr
from symbolics.gradients._registry import composite

__all__: list[str] = []

Activation = Callable[[Builder, ir.Value], ir.Value]
Step = Callable[[Builder, ir.Value, Sequence[ir.Value]], Sequence[ir.Value]]  # (op, x W^T + biases, states) -> states

# name -> (function of (op, x, alpha, beta), default alpha, default beta)
_ACTIVATIONS = {
    "relu": (lambda op, x, a, b: op.Relu(x), None, None),
    "tanh": (lambda op, x, a, b: op.Tanh(x), None, None),
    "sigmoid": (lambda op, x, a, b: op.Sigmoid(x), None, None),
    "softsign": (lambda op, x, a, b: op.Softsign(x), None, None),
    "softplus": (lambda op, x, a, b: op.Softplus(x), None, None),
    "affine": (lambda op, x, a, b: a * x + b, 1.0, 0.0),
    "leakyrelu": (lambda op, x, a, b: op.LeakyRelu(x, alpha=a), 0.01, None),
    "thresholdedrelu": (lambda op, x, a, b: op.ThresholdedRelu(x, alpha=a), 1.0, None),
    "scaledtanh": (lambda op, x, a, b: a * op.Tanh(b * x), 1.0, 1.0),
    "hardsigmoid": (lambda op, x, a, b: op.HardSigmoid(x, alpha=a, beta=b), 0.2, 0.5),
    "elu": (lambda op, x, a, b: op.Elu(x, alpha=a), 1.0, None),
}


def _activations(node: ir.Node, default: Sequence[str], directions: int) -> list[list[Activation]]:
    """The activations of each direction; alphas and betas are consumed in their order."""
    names = list(attr(node, "activations") or [*default] * directions)
    alphas, betas = iter(attr(node, "activation_alpha") or ()), iter(attr(node, "activation_beta") or ())
    clip = attr(node, "clip")
    out = []
    for name in names:
        function, alpha, beta = _ACTIVATIONS[name.lower()]
        a = alpha if alpha is None else float(next(alphas, alpha))
        b = beta if beta is None else float(next(betas, beta))

        def apply(op: Builder, x: ir.Value, function=function, a=a, b=b) -> ir.Value:
            return function(op, x if clip is None else op.Clip(x, -float(clip), float(clip)), a, b)

        out.append(apply)
    n = len(default)
    return [out[i * n : (i + 1) * n] for i in range(directions)]


def _of_direction(op: Builder, v: ir.Value | None, d: int) -> ir.Value | None:
    return None if v is None else op.Gather(v, op.i64(d), axis=0)


def _over_time(
    op: Builder, x: ir.Value, initial: Sequence[ir.Value], mask: ir.Value | None, reverse: bool, step: Step
) -> tuple[ir.Value, ...]:
    """Run ``step`` over axis 0 of x. (all first states, last states...); a state stays where the mask is off, its output is 0."""
    inside = op.child()
    name, kind = op.session.name, ir.TensorType(x.dtype)
    states = [ir.Value(name=name("state"), type=kind, shape=ir.Shape([None, None])) for _ in initial]
    xt = ir.Value(name=name("x"), type=kind, shape=ir.Shape([None, None]))
    on = ir.Value(name=name("on"), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([None, 1]))
    with inside.arithmetic():
        new = list(step(inside, xt, states))
        out = new[0]
        if mask is not None:
            new = [inside.Where(on, n, s) for n, s in zip(new, states)]
            out = inside.Where(on, out, 0.0)
        ends = [*new, inside.Identity(out)]
    scanned = [xt] if mask is None else [xt, on]
    body = ir.Graph([*states, *scanned], ends, nodes=inside.nodes, name=name("step"))
    way = 1 if reverse else 0
    *last, y = op.node(
        "Scan", [*initial, x, *([] if mask is None else [mask])], outputs=len(ends), body=body,
        num_scan_inputs=len(scanned), scan_input_directions=[way] * len(scanned), scan_output_directions=[way],
    )  # fmt: skip
    return (y, *last)


def _recurrent(
    op: Builder, node: ir.Node, states: int, default: Sequence[str], make_step: Callable[..., tuple[ir.Value | None, Step]]
) -> list[ir.Value | None]:
    """The part that LSTM, GRU and RNN share: directions, layout, lengths, initial states.

    ``make_step(op, activations, r, b, p)`` gives (the bias to add before the loop, the step) of one direction.
    """
    x, w, r, b, lengths = [*node.inputs, None, None][:5]
    initial = [*node.inputs[5:], *[None] * 3][:states]
    p = node.inputs[7] if len(node.inputs) > 7 else None
    hidden, layout, way = attr(node, "hidden_size"), attr(node, "layout", 0), attr(node, "direction", "forward")
    directions = 2 if way == "bidirectional" else 1
    if layout:
        x = op.Transpose(x, perm=[1, 0, 2])
        initial = [None if s is None else op.Transpose(s, perm=[1, 0, 2]) for s in initial]
    hidden = hidden if hidden is not None else op.dim(r, 2)
    batch = op.Shape(x, start=1, end=2)
    mask = None
    if lengths is not None:  # (time, batch, 1): whether the sample is still running
        time = op.Range(op.i64(0), op.Squeeze(op.Shape(x, start=0, end=1), [0]), op.i64(1))
        mask = op.Unsqueeze(op.Less(op.Unsqueeze(time, [1]), op.Unsqueeze(op.Cast(lengths, to=ir.DataType.INT64), [0])), [2])
    activations = _activations(node, default, directions)
    outs, lasts = [], []
    for d in range(directions):
        backwards = way == "reverse" or d == 1
        bias, step = make_step(op, activations[d], *[_of_direction(op, v, d) for v in (r, b, p)])
        xw = op.MatMul(x, op.Transpose(_of_direction(op, w, d), perm=[1, 0]))
        xw = xw if bias is None else xw + bias
        if backwards and lengths is not None:  # each sample's own end comes first
            xw = op.ReverseSequence(xw, op.Cast(lengths, to=ir.DataType.INT64), time_axis=0, batch_axis=1)
        start = [
            _of_direction(op, s, d) if s is not None else op.zeros(op.Concat(batch, op.vector([hidden]), axis=0), x.dtype) for s in initial
        ]
        y, *last = _over_time(op, xw, start, mask, backwards and lengths is None, step)
        if backwards and lengths is not None:
            y = op.ReverseSequence(y, op.Cast(lengths, to=ir.DataType.INT64), time_axis=0, batch_axis=1)
        outs.append(op.Unsqueeze(y, [1]))
        lasts.append([op.Unsqueeze(s, [0]) for s in last])
    join = lambda parts, axis: parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)  # noqa: E731
    y, ends = join(outs, 1), [join([last[i] for last in lasts], 0) for i in range(states)]
    if layout:
        y, ends = op.Transpose(y, perm=[2, 0, 1, 3]), [op.Transpose(e, perm=[1, 0, 2]) for e in ends]
    return [y, *ends]


def _sum_biases(op: Builder, b: ir.Value | None) -> ir.Value | None:
    """Wb + Rb."""
    if b is None:
        return None
    wb, rb = op.Split(b, axis=0, num_outputs=2, outputs=2)
    return wb + rb


@composite("RNN")
def rnn(op, node):
    def make_step(op, activations, r, b, p):
        (f,) = activations
        rt = op.Transpose(r, perm=[1, 0])
        return _sum_biases(op, b), lambda op, x, s: [f(op, x + op.MatMul(s[0], rt))]

    return _recurrent(op, node, 1, ["Tanh"], make_step)[: len(node.outputs)]


@composite("GRU")
def gru(op, node):
    """z, r = f(x W + h R); n = g(x W + (r h) R), or g(x W + r (h R)) with linear_before_reset; h = (1 - z) n + z h."""
    after = attr(node, "linear_before_reset", 0)
    hidden = node.inputs[2]

    def make_step(op, activations, r, b, p):
        f, g = activations
        size = op.dim(hidden, 2)
        twice, once = (2 * size, size) if isinstance(size, int) else (op.Mul(size, op.i64([2])), size)
        sizes = op.vector([twice, once])
        r_gates, r_new = op.Split(r, sizes, axis=0, outputs=2)
        rt_gates, rt_new = op.Transpose(r_gates, perm=[1, 0]), op.Transpose(r_new, perm=[1, 0])
        bias, rb_new = None, None
        if b is not None:
            wb, rb = op.Split(b, axis=0, num_outputs=2, outputs=2)
            bias = wb + rb
            if after:
                rb_gates, rb_new = op.Split(rb, sizes, axis=0, outputs=2)
                bias = wb + op.Concat(rb_gates, op.zeros(op.Shape(rb_new), rb.dtype), axis=0)

        def step(op, x, s):
            h = s[0]
            x_gates, x_new = op.Split(x, sizes, axis=1, outputs=2)
            z, reset = op.Split(f(op, x_gates + op.MatMul(h, rt_gates)), axis=1, num_outputs=2, outputs=2)
            if after:
                inner = op.MatMul(h, rt_new)
                new = g(op, x_new + reset * (inner if rb_new is None else inner + rb_new))
            else:
                new = g(op, x_new + op.MatMul(reset * h, rt_new))
            return [new + z * (h - new)]

        return bias, step

    return _recurrent(op, node, 1, ["Sigmoid", "Tanh"], make_step)[: len(node.outputs)]


@composite("LSTM")
def lstm(op, node):
    """i, o, f = f(x W + h R + p c); c = f c + i g(...); h = o h(c); the peephole of o sees the new c."""
    coupled = attr(node, "input_forget", 0)

    def make_step(op, activations, r, b, p):
        f, g, act = activations
        rt = op.Transpose(r, perm=[1, 0])
        peep = None if p is None else op.Split(p, axis=0, num_outputs=3, outputs=3)

        def step(op, x, s):
            h, c = s
            i, o, forget, new = op.Split(x + op.MatMul(h, rt), axis=1, num_outputs=4, outputs=4)
            if peep is not None:
                i, forget = i + peep[0] * c, forget + peep[2] * c
            i, new = f(op, i), g(op, new)
            forget = 1.0 - i if coupled else f(op, forget)
            c = forget * c + i * new
            o = f(op, o if peep is None else o + peep[1] * c)
            return [o * act(op, c), c]

        return _sum_biases(op, b), step

    return _recurrent(op, node, 2, ["Sigmoid", "Tanh", "Tanh"], make_step)[: len(node.outputs)]
