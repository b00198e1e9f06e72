"""docs/derivatives.md, Loaded modules in torch.func: the block runs as it stands, and its numbers are eager's."""

from __future__ import annotations

import re

import torch

from tests.processes import ROOT

TEXT = (ROOT / "docs" / "derivatives.md").read_text()


def test_loaded_modules():
    known = {"__name__": __name__}
    exec(re.search(r"<!-- run: loaded modules -->\n```python\n(.*?)```", TEXT, re.S)[1], known)
    model, x = known["model"], known["x"].detach()

    def energy(x):
        return model(x).square().sum()

    hessian = torch.func.hessian(energy)(x)
    torch.testing.assert_close(known["hessian"], hessian, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(known["times_ones"], hessian.sum((2, 3)), rtol=1e-3, atol=1e-5)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
    (gradient.norm(dim=-1) - 1).square().sum().backward()
    torch.testing.assert_close(known["x"].grad, leaf.grad, rtol=1e-3, atol=1e-5)
    loss = lambda p, x: torch.func.functional_call(model, p, (x,)).square().sum()  # noqa: E731
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(known["parameters"], known["samples"])
    for name, value in each.items():
        torch.testing.assert_close(known["each"][name], value, rtol=1e-3, atol=1e-5)
