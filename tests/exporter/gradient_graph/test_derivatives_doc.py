"""docs/derivatives.md, Hessian-vector products: the recipe runs as it stands."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from exporter.files import trust
from tests.processes import ROOT

TEXT = (ROOT / "docs" / "derivatives.md").read_text()


def block(name):
    return re.search(rf"<!-- run: {name} -->\n```python\n(.*?)```", TEXT, re.S)[1]


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(trust, "_objects", dict(trust._objects))
    monkeypatch.setattr(trust, "_names", dict(trust._names))


def test_hessian_vector_product():
    known = {"__name__": __name__}
    exec(block("hessian-vector product"), known)
    energy, x = known["Energy"](), torch.tensor(known["x"], dtype=torch.float64)
    want = torch.autograd.functional.hvp(energy, x, torch.ones(4, dtype=torch.float64))[1]
    np.testing.assert_allclose(known["found"], want.numpy(), rtol=1e-6)
