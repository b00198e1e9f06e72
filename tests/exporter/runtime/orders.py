"""Gradient graphs of gradient graphs beside eager's create_graph, for one call of a Function."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch

from exporter.gradient_graph.build import build_gradient_graph
from symbolics.node.metadata import pairing_of
from tests.exporter.runtime.build import forward, record

__all__ = ["close", "graph", "numbers"]


def graph(cls, *args, order=2, **fields):
    """The file of the ``order``-th gradient of a call, with respect to everything at every order."""
    model = ir.from_proto(forward(record(cls, *args, **fields)))
    for _ in range(order):
        model = build_gradient_graph(model)
    return model


def numbers(cls, *args, order=2, seed=0):
    """What eager makes of the same: (feeds, results) by the names of `graph`.

    Each order takes the gradients of all outputs so far with respect to all inputs so far, for random cotangents.
    """
    torch.manual_seed(seed)
    model = ir.from_proto(forward(record(cls, *args)))
    leaves = [a for a in args if isinstance(a, torch.Tensor)]
    fresh = iter([leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves])
    given = [next(fresh) if isinstance(a, torch.Tensor) else a for a in args]
    names = [v.name for v in model.graph.inputs]
    feeds = dict(zip(names, [t for t in given if isinstance(t, torch.Tensor)], strict=True))
    made = cls.apply(*given)
    tensors = [t for t in (made if isinstance(made, tuple) else (made,)) if isinstance(t, torch.Tensor)]
    outputs = dict(zip([v.name for v in model.graph.outputs], tensors, strict=True))
    for _ in range(order):
        model = build_gradient_graph(model)
        pairing = pairing_of(model)
        cotangents = {name: torch.randn_like(outputs[o]).requires_grad_() for o, name in pairing.inputs.items()}
        pairs = [(outputs[o], cotangents[name]) for o, name in pairing.inputs.items() if outputs[o].requires_grad]
        wanted = {n: feeds[n] for n in pairing.outputs if feeds[n].requires_grad}
        found = torch.autograd.grad(
            [y for y, _ in pairs], list(wanted.values()), [g for _, g in pairs], create_graph=True, allow_unused=True
        )
        gradients = dict(zip(wanted, found, strict=True))
        feeds |= cotangents
        for source, name in pairing.outputs.items():
            g = gradients.get(source)
            outputs[name] = torch.zeros_like(feeds[source]) if g is None else g
    return {n: t.detach().numpy() for n, t in feeds.items()}, {n: t.detach().numpy() for n, t in outputs.items()}


def close(found, wanted):
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-9, err_msg=name)
