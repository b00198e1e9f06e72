"""LSTM whose hidden states are projected (``proj_size``)."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead

__all__ = ["PROJECTIONS", "QUIRK", "steps_axis"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="LSTM of ONNX projects nothing; an LSTM with proj_size is written as one without, in a file that is invalid",
)


def steps_axis(x: Any, hx: Any, params: Any, *options: Any) -> int | None:
    """Along which axis of x a call of torch.lstm is written step by step; None where it is one node, or of a packed sequence."""
    if not isinstance(params, (list, tuple)):
        return None
    has_biases, layers, _, _, bidirectional, batch_first = options
    projected = len(params) == layers * (2 if bidirectional else 1) * (5 if has_biases else 3)
    return (1 if batch_first else 0) if projected else None


def _lstm(x: Any, hx: Any, params: Any, *options: Any) -> Any:
    """Layer by layer and step by step, in operators: as long a file as the sequence."""
    if steps_axis(x, hx, params, *options) is None:
        return NotImplemented
    has_biases, layers, dropout, train, bidirectional, batch_first = options
    directions, count = (2 if bidirectional else 1), (5 if has_biases else 3)
    x = x.transpose(0, 1) if batch_first else x
    states = []
    for layer in range(layers):
        if layer:
            x = torch.nn.functional.dropout(x, dropout, train)
        outs = []
        for direction in range(directions):
            at = layer * directions + direction
            out, h, c = _one_way(x.flip(0) if direction else x, hx[0][at], hx[1][at], params[at * count : (at + 1) * count])
            outs.append(out.flip(0) if direction else out)
            states.append((h, c))
        x = torch.cat(outs, -1)
    return x.transpose(0, 1) if batch_first else x, torch.stack([h for h, _ in states]), torch.stack([c for _, c in states])


def _one_way(x: Any, h: Any, c: Any, weights: Any) -> Any:
    of_input, of_state, *biases, project = weights
    given = torch.nn.functional.linear(x, of_input, sum(biases) if biases else None)
    outs = []
    for step in range(x.shape[0]):
        i, f, g, o = (given[step] + h @ of_state.T).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = (o.sigmoid() * c.tanh()) @ project.T
        outs.append(h)
    return torch.stack(outs), h, c


PROJECTIONS: dict[Any, Rewrite] = {torch.lstm: instead(_lstm)}
