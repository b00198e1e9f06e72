"""Every operator of torch's database that torch.onnx cannot translate, as an opaque node, equals eager in a fresh process; or has a reason in docs/operators.md.

Which these are, `tests/operators/data/opaque.jsonl` says. A sample of them is in tests/exporter/forward/test_opaque_operators.py.
"""

from __future__ import annotations

import pytest
import torch

from symbolics.errors import PythonopError
from tests.operators import sweep, table
from tests.operators.opaque import compared
from tests.operators.samples import groups
from tests.processes import Server

pytestmark = pytest.mark.unusable("another process runs each file here, and what it cannot run has a reason in the record")

_RECORDED = {key: words["sample"] for key, line in sweep.lines(sweep.OPAQUE).items() if "sample" in (words := table.opaque_words(line))}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    process = Server(tmp_path_factory.mktemp("server"), "tests.operators.opaque:answer")
    yield process
    process.close()


@pytest.mark.parametrize(("name", "which"), sorted(_RECORDED, key=lambda key: (key[1] == "dynamo", key)))
def test_as_an_opaque_node(name, which, server, tmp_path):
    try:
        torch.manual_seed(0)
        compared(next(groups(name, 1)).call, which == "dynamo", tmp_path, server.ask)
    except PythonopError as error:
        if _RECORDED[name, which] in ("yes", "standard operators"):
            raise
        pytest.xfail(f"{_RECORDED[name, which]}: {error}")
