"""One step of a plain GRU, and of its gradient, as the Scans of symbolics/gradients/recurrent.py hold them.

Plain: the usual activations, and the reset gate behind the product with the states' weights, as torch has it (``linear_before_reset``).
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx_ir import Value

from symbolics.graph.emitter import Emitter

__all__ = ["gru_backward_step", "gru_step"]


def gru_step(op: Emitter, h: Value, x: Value, rt: Value, bias: Value) -> list[Value]:
    """A step that keeps what its backward reads.

    With a = h R + bias: z = sigmoid(x_z + a_z), r = sigmoid(x_r + a_r), n = tanh(x_n + r a_n), h' = n + z (h - n).

    Args:
        op: Takes the nodes; operators of Python are its own (`Emitter.arithmetic`).
        h: The state (B, H).
        x: The inputs' part of what goes into the activations, biases included (B, 3H), in the order z, r, n.
        rt: The states' weights, turned (H, 3H).
        bias: What the products with the state begin with (3H,).

    Returns:
        h' (B, H); h' once more, to be stacked; what dh' is multiplied with for the gradients of a (B, 3H); for that of x_n (B, H); z (B, H).
    """
    of_z, of_r, inner = op.Split(op.Gemm(h, rt, bias), axis=1, num_outputs=3, outputs=3)
    x_z, x_r, x_n = op.Split(x, axis=1, num_outputs=3, outputs=3)
    z, r = op.Sigmoid(x_z + of_z), op.Sigmoid(x_r + of_r)
    new = op.Tanh(x_n + r * inner)
    away, rest = h - new, 1.0 - z
    state = new + z * away
    of_new = rest * (1.0 - new * new)
    reset = of_new * r
    slopes = op.Concat(away * z * rest, reset * inner * (1.0 - r), reset, axis=1)
    return [state, op.Identity(state), slopes, of_new, z]


def gru_backward_step(op: Emitter, dh: Value, read: Sequence[Value], r: Value) -> list[Value]:
    """The gradient of a step.

    Args:
        op: As `gru_step` has it.
        dh: The gradient of the step's h' (B, H), from the steps behind it.
        read: The last three of `gru_step`, and the gradient of the stacked h', where there is one.
        r: The states' weights (3H, H).

    Returns:
        dh for the step before (B, H); the gradients of a and of x (B, 3H).
    """
    slopes, of_new, kept, *dy = read
    whole = dh + dy[0] if dy else dh
    s_z, s_r, s_n = op.Split(slopes, axis=1, num_outputs=3, outputs=3)
    d_z, d_r = whole * s_z, whole * s_r
    products = op.Concat(d_z, d_r, whole * s_n, axis=1)
    return [op.Gemm(products, r, whole * kept), products, op.Concat(d_z, d_r, whole * of_new, axis=1)]
