"""Layers of torch as nodes of their own: whom a file has to ask before it runs one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter
from exporter.files.named import names_in
from symbolics.errors import TrustError
from tests.zoo import modules as M


def test_a_layer_of_torch_that_is_called_needs_an_entry(dynamo):
    """The file says the layer's settings and arguments, and some kernels of torch trust them: CTCLoss reads where its labels point."""
    x = torch.randn(3, 4)
    program = exporter.export(M.Net(nn.Identity()), (x,), dynamo=dynamo, opaque=[nn.Identity])
    name = "torch.nn.modules.linear:Identity"
    assert names_in(program.model) == [name]
    for call in (exporter.load, exporter.inference_session, exporter.reference_evaluator):
        with pytest.raises(TrustError, match=f"{name}.* is not allowed"):
            call(program.model_proto, allow=["tests.zoo.modules:*"])
        call(program.model_proto, allow=[name])
    inner = exporter.export(M.Net(M.Repeats()), (x,), dynamo=dynamo, opaque=[M.Repeats])  # whose layers need none
    exporter.load(inner, allow=["tests.zoo.modules:*"])
