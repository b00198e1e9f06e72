"""One step of a plain LSTM, and of its gradient, as the Scans of symbolics/gradients/recurrent.py hold them."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_ir import Value

from symbolics.graph.emitter import Emitter

__all__ = ["lstm_backward_step", "lstm_step"]


def lstm_step(op: Emitter, h: Value, c: Value, x: Value, rt: Value) -> list[Value]:
    """A step that keeps what its backward reads.

    With p = i g, q = f c and t = tanh(c'), i (1 - g^2) is i - p g and o (1 - t^2) is o - h t.

    Args:
        op: Takes the nodes; operators of Python are its own (`Emitter.arithmetic`).
        h, c: The states (B, H).
        x: The inputs' part of what goes into the activations, biases included (B, 4H), in the order i, o, f, g.
        rt: The states' weights, turned (H, 4H).

    Returns:
        h and c (B, H); h once more, to be stacked; what dc, dh, dc, dc are multiplied with for the gradients before the activations (B, 4H);
        the derivative of h by c (B, H); the gate f (B, H).
    """
    # Four parts of one size: ONNX infers their shapes in a body, so that what lies between them and the Concat can join into chains.
    *gates, new = op.Split(op.Gemm(h, rt, x), axis=1, num_outputs=4, outputs=4)
    i, o, forget = (op.Sigmoid(gate) for gate in gates)
    new = op.Tanh(new)
    old, added = forget * c, i * new
    cell = old + added
    squashed = op.Tanh(cell)
    state = o * squashed
    slopes = op.Concat(added * (1.0 - i), state * (1.0 - o), old * (1.0 - forget), i - added * new, axis=1)
    return [state, cell, op.Identity(state), slopes, o - state * squashed, forget]


def lstm_backward_step(op: Emitter, dh: Value, dc: Value, read: Sequence[Value], r: Value) -> list[Value]:
    """The gradient of a step.

    Args:
        op: As `lstm_step` has it.
        dh, dc: Gradients of the step's h and c (B, H), from the steps behind it.
        read: The last three of `lstm_step`, and the gradient of the stacked h, where there is one.
        r: The states' weights (4H, H).

    Returns:
        dh and dc for the step before (B, H); the gradient of x (B, 4H).
    """
    slopes, pass_on, kept, *dy = read
    whole_h = dh + dy[0] if dy else dh
    whole_c = dc + whole_h * pass_on
    dgates = op.Concat(whole_c, whole_h, whole_c, whole_c, axis=1) * slopes
    return [op.MatMul(dgates, r), whole_c * kept, dgates]
