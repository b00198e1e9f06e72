"""Resizes with ``antialias=True``: outputs and gradients are eager's, with sizes that are fixed and that are open, on both exporters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import exporter

RESIZES = {
    "smaller": lambda x: F.interpolate(x, size=(3, 5), mode="bilinear", antialias=True),
    "larger by a factor": lambda x: F.interpolate(x, scale_factor=2.3, mode="bicubic", antialias=True),
    "smaller by two factors": lambda x: F.interpolate(x, scale_factor=(0.4, 0.7), mode="bicubic", antialias=True),
    "factors of the sizes": lambda x: F.interpolate(x, scale_factor=0.4, mode="bilinear", antialias=True, recompute_scale_factor=True),
    "corners": lambda x: F.interpolate(x, size=(3, 12), mode="bilinear", antialias=True, align_corners=True),
    "one corner": lambda x: F.interpolate(x, size=(1, 1), mode="bicubic", antialias=True, align_corners=True),
    "by the operator": lambda x: torch.ops.aten._upsample_bilinear2d_aa(x, [16, 20], True),
}


class Resizes(torch.nn.Module):
    def forward(self, x):
        return tuple(resize(x) for resize in RESIZES.values())


@pytest.mark.parametrize("shapes", [None, {"x": {2: "height", 3: "width"}}], ids=["fixed", "open"])
def test_as_in_eager(dynamo, shapes):
    x, model = torch.randn(2, 3, 8, 10, generator=torch.Generator().manual_seed(0)), Resizes()
    program = exporter.export(model, (x,), dynamo=dynamo, dynamic_shapes=shapes)
    module = exporter.load(program)
    for given in (x, torch.cat([x, x.flip(2)], 2)[..., :7]) if shapes else (x,):
        ours, theirs = given.clone().requires_grad_(), given.double().requires_grad_()
        for name, found, wanted in zip(RESIZES, module(ours), model(theirs), strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        sum(out.square().sum() for out in module(ours)).backward()
        sum(out.square().sum() for out in model(theirs)).backward()
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=2e-5, atol=1e-4)
