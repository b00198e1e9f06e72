"""LSTM, GRU and RNN as a Scan over time of primitives, one per direction.

The rule of Scan does the rest, but for the plain LSTM and GRU: their Scans keep what their own backward reads, and each is a call by its name
(`_plain_lstm`, `_plain_gru`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from symbolics.gradients.bodies import OWN_RULE
from symbolics.gradients.registry import Rule, composite
from symbolics.graph.builder import Builder
from symbolics.graph.gru import gru_backward_step, gru_step
from symbolics.graph.lstm import lstm_backward_step, lstm_step
from symbolics.graph.named import call
from symbolics.graph.values import attr, dtype_of

__all__: list[str] = []

_END = 2**63 - 1
Activation = Callable[[Builder, Value], Value]
Step = Callable[[Builder, Value, Sequence[Value]], Sequence[Value]]  # (op, x W^T + biases, states) -> states
MakeStep = Callable[[Builder, Sequence[Activation], Value, Value | None, Value | None], tuple[Value | None, Step]]

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
    """The activations of each direction; alphas and betas are consumed in their order.

    ``clip`` bounds what goes into the gates. An LSTM's third function, of the cell, sees it unbounded: as onnxruntime computes it, which is what
    the file does without gradients.
    """
    names = list(attr(node, "activations") or [*default] * directions)
    alphas, betas = iter(attr(node, "activation_alpha") or ()), iter(attr(node, "activation_beta") or ())
    clip = attr(node, "clip")
    out: list[Activation] = []
    for place, name in enumerate(names):
        function, alpha, beta = _ACTIVATIONS[name.lower()]
        a = alpha if alpha is None else float(next(alphas, alpha))
        b = beta if beta is None else float(next(betas, beta))

        bound = None if clip is None or place % len(default) == 2 else float(clip)

        def apply(op: Builder, x: Value, function: Any = function, a: Any = a, b: Any = b, bound: float | None = bound) -> Value:
            return function(op, x if bound is None else op.Clip(x, -bound, bound), a, b)

        out.append(apply)
    n = len(default)
    return [out[i * n : (i + 1) * n] for i in range(directions)]


def _are(names: Sequence[str] | None, default: Sequence[str]) -> bool:
    """Whether the activations of one direction, or of two, are the default ones."""
    return [name.lower() for name in names or default] in ([name.lower() for name in default] * count for count in (1, 2))


def _of_direction(op: Builder, v: Value | None, d: int) -> Any:
    return None if v is None else op.Gather(v, op.i64(d), axis=0)


def _over_time(op: Builder, x: Value, initial: Sequence[Value], mask: Value | None, reverse: bool, step: Step) -> tuple[Value, ...]:
    """Run ``step`` over axis 0 of x. (all first states, last states...); a state stays where the mask is off, its output is 0."""
    inside = op.child()
    name, kind = op.scope.name, ir.TensorType(dtype_of(x))
    states = [Value(name=name("state"), type=kind, shape=ir.Shape([None, None])) for _ in initial]
    xt = Value(name=name("x"), type=kind, shape=ir.Shape([None, None]))
    on = Value(name=name("on"), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([None, 1]))
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
    op: Builder,
    node: ir.Node,
    inputs: tuple[Value, Value, Value, Value | None, Value | None],
    initial: Sequence[Value | None],
    default: Sequence[str],
    make_step: MakeStep,
    peepholes: Value | None = None,
    plain: Callable[..., tuple[Value, ...]] | None = None,
) -> list[Value]:
    """The part that LSTM, GRU and RNN share: directions, layout, lengths, initial states.

    ``make_step(op, activations, r, b, p)`` gives (the bias to add before the loop, the step) of one direction; ``plain``
    stands for `_over_time` where no sample ends before the others, with r and b in the place of ``step``.
    """
    x, w, r, b, lengths = inputs
    hidden, layout, way = attr(node, "hidden_size"), attr(node, "layout"), attr(node, "direction")
    directions = 2 if way == "bidirectional" else 1
    if layout:
        x = op.Transpose(x, perm=[1, 0, 2])
        initial = [None if s is None else op.Transpose(s, perm=[1, 0, 2]) for s in initial]
    hidden = hidden if hidden is not None else op.dim(r, 2)
    batch = op.Shape(x, start=1, end=2)
    mask = None
    if lengths is not None:  # (time, batch, 1): whether the sample is still running
        mask = op.Unsqueeze(op.Less(op.Unsqueeze(op.indices(x, 0), [1]), op.Unsqueeze(op.Cast(lengths, to=ir.DataType.INT64), [0])), [2])
    activations = _activations(node, default, directions)
    outs, lasts = [], []
    for d in range(directions):
        backwards = way == "reverse" or d == 1
        own_r, own_b, own_p = (_of_direction(op, v, d) for v in (r, b, peepholes))
        bias, step = make_step(op, activations[d], own_r, own_b, own_p)
        xw = op.MatMul(x, op.Transpose(_of_direction(op, w, d), perm=[1, 0]))
        xw = xw if bias is None else xw + bias
        if backwards and lengths is not None:  # each sample's own end comes first
            xw = op.ReverseSequence(xw, op.Cast(lengths, to=ir.DataType.INT64), time_axis=0, batch_axis=1)
        start = [
            _of_direction(op, s, d) if s is not None else op.zeros(op.Concat(batch, op.vector([hidden]), axis=0), dtype_of(x))
            for s in initial
        ]
        way_back = backwards and lengths is None
        if plain is not None and mask is None:
            y, *last = plain(op, xw, start, way_back, own_r, own_b)
        else:
            y, *last = _over_time(op, xw, start, mask, way_back, step)
        if backwards and lengths is not None:
            y = op.ReverseSequence(y, op.Cast(lengths, to=ir.DataType.INT64), time_axis=0, batch_axis=1)
        outs.append(op.Unsqueeze(y, [1]))
        lasts.append([op.Unsqueeze(s, [0]) for s in last])
    y, *ends = (
        parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis) for parts, axis in [(outs, 1), *[(each, 0) for each in zip(*lasts)]]
    )
    if layout:
        y, ends = op.Transpose(y, perm=[2, 0, 1, 3]), [op.Transpose(e, perm=[1, 0, 2]) for e in ends]
    return [y, *ends]


def _sum_biases(op: Builder, b: Value | None) -> Value | None:
    """Wb + Rb."""
    if b is None:
        return None
    wb, rb = op.Split(b, axis=0, num_outputs=2, outputs=2)
    return wb + rb


@composite("RNN")
def rnn(
    op: Builder, x: Value, w: Value, r: Value, b: Value | None, lengths: Value | None, h0: Value | None, *, node: ir.Node
) -> list[Value]:
    def make_step(op: Builder, activations: Sequence[Activation], r: Value, b: Value | None, p: Value | None) -> tuple[Value | None, Step]:
        (f,) = activations
        rt = op.Transpose(r, perm=[1, 0])
        # The product first, here and in all steps: of x + MatMul in a loop OpenVINO 2026.4 makes other numbers.
        return _sum_biases(op, b), lambda op, x, s: [f(op, op.MatMul(s[0], rt) + x)]

    return _recurrent(op, node, (x, w, r, b, lengths), [h0], ["Tanh"], make_step)


@composite("GRU")
def gru(
    op: Builder, x: Value, w: Value, r: Value, b: Value | None, lengths: Value | None, h0: Value | None, *,
    node: ir.Node, linear_before_reset: int, activations: list[str] | None, clip: float | None,
) -> list[Value]:  # fmt: skip
    """z, r = f(x W + h R); n = g(x W + (r h) R), or g(x W + r (h R)) with linear_before_reset; h = (1 - z) n + z h."""

    size = op.dim(r, 2)

    def make_step(op: Builder, activations: Sequence[Activation], r: Value, b: Value | None, p: Value | None) -> tuple[Value | None, Step]:
        f, g = activations
        twice, once = (2 * size, size) if isinstance(size, int) else (op.Mul(size, op.i64([2])), size)
        sizes = op.vector([twice, once])
        r_gates, r_new = op.Split(r, sizes, axis=0, outputs=2)
        rt_gates, rt_new = op.Transpose(r_gates, perm=[1, 0]), op.Transpose(r_new, perm=[1, 0])
        bias, rb_new = None, None
        if b is not None:
            wb, rb = op.Split(b, axis=0, num_outputs=2, outputs=2)
            bias = wb + rb
            if linear_before_reset:
                rb_gates, rb_new = op.Split(rb, sizes, axis=0, outputs=2)
                bias = wb + op.Concat(rb_gates, op.zeros(op.Shape(rb_new), rb.dtype), axis=0)

        def step(op: Builder, x: Value, s: Sequence[Value]) -> list[Value]:
            h = s[0]
            x_gates, x_new = op.Split(x, sizes, axis=1, outputs=2)
            z, reset = op.Split(f(op, op.MatMul(h, rt_gates) + x_gates), axis=1, num_outputs=2, outputs=2)
            if linear_before_reset:
                inner = op.MatMul(h, rt_new)
                new = g(op, x_new + reset * (inner if rb_new is None else inner + rb_new))
            else:
                new = g(op, op.MatMul(reset * h, rt_new) + x_new)
            return [new + z * (h - new)]

        return bias, step

    default = ["Sigmoid", "Tanh"]
    plain = _plain_gru if linear_before_reset and clip is None and _are(activations, default) else None
    return _recurrent(op, node, (x, w, r, b, lengths), [h0], default, make_step, plain=plain)


@composite("LSTM")
def lstm(
    op: Builder, x: Value, w: Value, r: Value, b: Value | None, lengths: Value | None, h0: Value | None, c0: Value | None, p: Value | None,
    *, node: ir.Node, activations: list[str] | None, clip: float | None, input_forget: int,
) -> list[Value]:  # fmt: skip
    """i, o, f = f(x W + h R + p c); c = f c + i g(...); h = o h(c); the peephole of o sees the new c."""

    def make_step(op: Builder, activations: Sequence[Activation], r: Value, b: Value | None, p: Value | None) -> tuple[Value | None, Step]:
        f, g, act = activations
        rt = op.Transpose(r, perm=[1, 0])
        peep = None if p is None else op.Split(p, axis=0, num_outputs=3, outputs=3)

        def step(op: Builder, x: Value, s: Sequence[Value]) -> list[Value]:
            h, c = s
            i, o, forget, new = op.Split(op.MatMul(h, rt) + x, axis=1, num_outputs=4, outputs=4)
            if peep is not None:
                i, forget = i + peep[0] * c, forget + peep[2] * c
            i, new = f(op, i), g(op, new)
            forget = 1.0 - i if input_forget else f(op, forget)
            c = forget * c + i * new
            o = f(op, o if peep is None else o + peep[1] * c)
            return [o * act(op, c), c]

        return _sum_biases(op, b), step

    default = ["Sigmoid", "Tanh", "Tanh"]
    plain = _plain_lstm if _are(activations, default) and not input_forget and p is None and clip is None else None
    return _recurrent(op, node, (x, w, r, b, lengths), [h0, c0], default, make_step, p, plain)


# ------------------------------------------------------------------------------------------------ the plain LSTM and GRU
def _steps(
    op: Builder,
    name: str,
    states: Sequence[Value],
    read: Sequence[Value],
    weights: Sequence[Value],
    reverse: bool,
    step: Callable[[Builder, list[Value], list[Value], list[Value]], list[Value]],
    stacked: Sequence[int],
) -> list[Value]:
    """A call of a function: a Scan over axis 0 of ``read`` that makes of the states and of what is read of one time the next states, and then what is stacked.

    Args:
        op: Takes the call.
        name: Of the function.
        states: The first ones, (B, H).
        read: (T, B, *).
        weights: What ``step`` reads at each time. The inputs of the call are the states, what is read, and these.
        reverse: From the last time to the first.
        step: (op, states, what is read, weights) -> the next states, and what is stacked.
        stacked: How many times as wide as a state (H) each is that is stacked.
    """
    n, m = len(states), len(states) + len(read)

    def write(inside: Builder, given: Sequence[Value]) -> list[Value]:
        body, kind, scope = inside.child(), ir.TensorType(dtype_of(read[0])), inside.scope
        inner = [Value(name=scope.name("step"), type=kind, shape=ir.Shape([None, None])) for _ in given[:m]]
        with body.arithmetic():
            ends = step(body, inner[:n], inner[n:], list(given[m:]))
        way = int(reverse)
        made: Sequence[Value] = inside.node(
            "Scan", given[:m], outputs=len(ends), body=ir.Graph(inner, ends, nodes=body.nodes, name=scope.name("body")),
            num_scan_inputs=m - n, scan_input_directions=[way] * (m - n), scan_output_directions=[way] * (len(ends) - n),
        )  # fmt: skip
        shape = states[0].shape
        for value in made:
            value.type = kind
        for value, like in zip(made, states):
            value.shape = like.shape
        if read[0].shape is not None and shape is not None and isinstance(hidden := shape[1], int):
            for value, width in zip(made[n:], stacked, strict=True):
                value.shape = ir.Shape([*list(read[0].shape)[:2], width * hidden])
        return list(made)

    return call(op, name, [*states, *read, *weights], write, reverse=[int(reverse)])


def _of_weights(op: Builder, first: Value, states: Value, before: Value, rt: Value, reverse: bool) -> Value:
    """The gradient of the states' weights (H, gates): one product of all states (T, B, H) but the last with the gradients before the activations."""
    start, rest = op.Unsqueeze(first, [0]), op.Slice(states, [1], [_END], [0]) if reverse else op.Slice(states, [0], [-1], [0])
    earlier = op.Concat(rest, start, axis=0) if reverse else op.Concat(start, rest, axis=0)
    hidden, wide = op.dim(rt, 0), op.dim(rt, 1)
    return op.Gemm(op.Reshape(earlier, [-1, hidden]), op.Reshape(before, [-1, wide]), transA=1)


def _with_rule(made: list[Value], rule: Rule) -> list[Value]:
    """The results of a call that has a rule of its own."""
    if (node := made[0].producer()) is not None:
        node.meta[OWN_RULE] = rule
    return made


def _plain_lstm(op: Builder, x: Value, initial: Sequence[Value], reverse: bool, r: Value, b: Value | None) -> tuple[Value, ...]:
    """`_over_time` for the usual activations: (T, B, 4H), [(B, H), (B, H)] -> (all h (T, B, H), last h, last c).

    Its Scan has further outputs, stacked by time, which are all that its backward reads (`lstm_step`). They are made here, step by step,
    since whole stacks of them would double the memory of the backward.
    """
    rt = op.Transpose(r, perm=[1, 0])
    made = _steps(
        op,
        "LSTM",
        initial,
        [x],
        [rt],
        reverse,
        lambda op, states, read, weights: lstm_step(op, states[0], states[1], read[0], weights[0]),
        (1, 4, 1, 1),
    )
    last_h, last_c, y, *_ = _with_rule(made, _LSTM)
    return y, last_h, last_c


def _plain_lstm_backward(op: Builder, node: ir.Node, *cotangents: Value | None) -> dict[Value, Value]:
    """From the last step to the first, seven small nodes a step; the product for the gradient of R stands outside of the Scan.

    With dh, dc the gradients of a step's h and c: dc += dh o (1 - tanh(c)^2), the gradients before the activations are
    [dc g i(1-i), dh tanh(c) o(1-o), dc c' f(1-f), dc i (1 - g^2)], and the step before gets dh = those R, dc = dc f.
    """
    h0, c0, x, rt = (v for v in node.inputs if v is not None)
    _, _, y, *read = node.outputs
    dh_last, dc_last, dy = cotangents[:3]
    reverse = bool(attr(node, "reverse")[0])
    start = [op.zeros_like(v) if g is None else g for g, v in ((dh_last, h0), (dc_last, c0))]
    dh0, dc0, dx = _steps(
        op, "LSTMGrad", start, [*read, *([] if dy is None else [dy])], [op.Transpose(rt, perm=[1, 0])], not reverse,
        lambda op, states, read, weights: lstm_backward_step(op, states[0], states[1], read, weights[0]), (4,),
    )  # fmt: skip
    dx.type, dx.shape = x.type, x.shape
    out: dict[Value, Value] = {}
    for value, g in ((h0, dh0), (c0, dc0), (x, dx), (rt, _of_weights(op, h0, y, dx, rt, reverse))):
        g.type = dx.type
        out[value] = op.Add(out[value], g) if value in out else g  # one value may start h and c
    return out


def _plain_gru(op: Builder, x: Value, initial: Sequence[Value], reverse: bool, r: Value, b: Value | None) -> tuple[Value, ...]:
    """`_over_time` for the usual activations and the reset gate behind the product: (T, B, 3H), [(B, H)] -> (all h (T, B, H), last h).

    As `_plain_lstm`. Of the states' biases those of the first two gates are in x already.
    """
    rt, bias = op.Transpose(r, perm=[1, 0]), op.zeros(op.Shape(r, start=0, end=1), dtype_of(x))
    if b is not None:
        of_new = op.Split(b, axis=0, num_outputs=6, outputs=6)[-1]
        bias = op.Concat(op.zeros(op.Mul(op.Shape(of_new), op.i64([2])), dtype_of(x)), of_new, axis=0)
    made = _steps(
        op,
        "GRU",
        initial,
        [x],
        [rt, bias],
        reverse,
        lambda op, states, read, weights: gru_step(op, states[0], read[0], weights[0], weights[1]),
        (1, 3, 1, 1),
    )
    last, y, *_ = _with_rule(made, _GRU)
    return y, last


def _plain_gru_backward(op: Builder, node: ir.Node, *cotangents: Value | None) -> dict[Value, Value]:
    """As `_plain_lstm_backward`; `gru_backward_step` says of what.

    With dh' the gradient of a step's h' = n + z (h - n): before the activations of z, r and n it is dh' (h - n) z(1-z), dn a_n r(1-r) and
    dn = dh' (1-z) (1 - n^2); the product gets the first two and dn r, and the step before what R makes of them, and dh' z.
    """
    h0, x, rt, bias = (v for v in node.inputs if v is not None)
    _, y, *read = node.outputs
    dh_last, dy = cotangents[:2]
    reverse = bool(attr(node, "reverse")[0])
    start = op.zeros_like(h0) if dh_last is None else dh_last
    dh0, before, dx = _steps(
        op, "GRUGrad", [start], [*read, *([] if dy is None else [dy])], [op.Transpose(rt, perm=[1, 0])], not reverse,
        lambda op, states, read, weights: gru_backward_step(op, states[0], read, weights[0]), (3, 3),
    )  # fmt: skip
    for value in (before, dx):
        value.type, value.shape = x.type, x.shape
    dh0.type = x.type
    return {h0: dh0, x: dx, rt: _of_weights(op, h0, y, before, rt, reverse), bias: op.ReduceSum(before, op.i64([0, 1]), keepdims=0)}


_LSTM, _GRU = Rule(_plain_lstm_backward), Rule(_plain_gru_backward)
