"""Twenty models that no exporter takes: the error is short and names the place, the way out that it names works, and ``fallback=True`` takes one."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

import exporter
from exporter.errors import ExportError
from tests.end_to_end.no_exporter.models import PARTS, Net

parts = pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)


def made(part):
    torch.manual_seed(0)
    return Net(part()), torch.randn(4, 4)


def check_equal(program, model):
    """Outputs and every gradient of a file at another input equal eager's."""
    module = exporter.load(program, allow=["tests.end_to_end.no_exporter.models:*", *(node.function for node in program.opaque)])
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    inputs = [x.clone().requires_grad_() for _ in "ab"]
    for side, given in zip((model, module), inputs, strict=True):
        side.zero_grad()
        results = side(given)
        results = results if isinstance(results, tuple) else (results,)
        sum((each * torch.linspace(1, 2, each.numel()).reshape(each.shape)).sum() for each in results).backward()
        given.results = results
    torch.testing.assert_close(inputs[1].results, inputs[0].results, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-3, atol=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-4)
    model.zero_grad()


@parts
def test_the_error_and_the_way_out_that_it_names(part):
    model, x = made(part)
    with pytest.raises(ExportError) as caught:
        exporter.export(model, (x,))
    text = str(caught.value)
    assert len(text.splitlines()) <= 10
    assert "models.py:" in text or "models:" in text or part.__name__ == "OtherThread"  # which torch.export does not see
    way = re.search(r"^ +(\S.*) works: outputs and gradients equal eager's", text, re.M)
    if way is None:  # more tries than an error takes
        with pytest.warns(exporter.errors.PythonopWarning, match="fallback=True took"):
            program = exporter.export(model, (x,), fallback=True)
    else:
        assert "fallback=True takes the first that works" in text
        with warnings.catch_warnings():
            warnings.simplefilter("error", exporter.errors.PythonopWarning)
            program = exporter.export(model, (x,), **eval(f"dict({way[1]})", {"model": model}))
    check_equal(program, model)


@parts
def test_fallback(part):
    """From TorchScript, which goes on where torch.export stops."""
    model, x = made(part)
    with pytest.warns(exporter.errors.PythonopWarning, match="fallback=True took") as said:
        program = exporter.export(model, (x,), fallback=True, dynamo=False)
    assert sum("fallback=True" in str(each.message) for each in said) == 1
    assert program.fallback
    check_equal(program, model)
