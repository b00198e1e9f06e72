"""Each row of the contract: a loaded module does what the eager one does, or says by name that it does not."""

from __future__ import annotations

import re

import pytest
import torch

import exporter
from tests.exporter.module.contract.rows import ROWS
from tests.exporter.module.contract.table import DOCUMENT, page
from tests.exporter.module.contract.twins import twins, x_of

CASES = [pytest.param(row, kind, id=f"{row.name}-{kind}") for row in ROWS for kind in row.kinds]


def assert_alike(one, two, where="result"):
    """Tensors to rounding, everything else equal."""
    if isinstance(two, torch.Tensor):
        assert one.dtype == two.dtype, where
        tolerance = 1e-6 if two.dtype is torch.float64 else 1e-4
        torch.testing.assert_close(
            one,
            two,
            rtol=tolerance,
            atol=tolerance * max(1.0, float(two.detach().abs().max()) if two.numel() else 1.0),
            msg=lambda m: f"{where}: {m}",
        )
    elif isinstance(two, dict):
        assert list(one) == list(two), where
        for key in two:
            assert_alike(one[key], two[key], f"{where}[{key!r}]")
    elif isinstance(two, (list, tuple)):
        assert len(one) == len(two), where
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_alike(a, b, f"{where}[{i}]")
    else:
        assert one == two, where


@pytest.mark.parametrize(("row", "kind"), CASES)
def test_row(row, kind):
    model, module = twins(row.net, kind, row.training)
    x = x_of(row.net)
    if row.refused is None:
        torch.manual_seed(11)
        wanted = row.run(model, x.clone())
        torch.manual_seed(11)
        assert_alike(row.run(module, x.clone()), wanted)
        return
    refusals = (exporter.PythonopError, exporter.PythonopWarning, RuntimeError)  # the last is torch.compile's
    with pytest.raises(refusals) as caught:
        row.run(module, x.clone())
    text = str(caught.value)
    assert re.search(row.refused, text, re.DOTALL), text
    if "fullgraph" not in row.what:  # torch's own error, which names a function of ours
        assert isinstance(caught.value, refusals[:2]), type(caught.value)
        assert len(text.splitlines()) <= 6


def test_the_page_is_made_of_the_rows():
    assert page() == DOCUMENT.read_text(), "python -m tests.exporter.module.contract.table writes it anew"


def test_each_row_has_a_name_of_its_own():
    assert len({row.name for row in ROWS}) == len(ROWS)
