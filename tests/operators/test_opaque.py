"""Every operator of torch's database that torch.onnx cannot translate, as an opaque node, equals eager in another process; or is named with its reason.

Which these are, `tests/operators/data/record.jsonl` says. A sample of them is in tests/exporter/forward/test_opaque_operators.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from symbolics.errors import PythonopError
from tests.operators.opaque import compared
from tests.operators.samples import groups
from tests.processes import Server

pytestmark = pytest.mark.unusable("another process runs each file here, and what it cannot run is named below")

_COMPLEX = "it takes or gives complex tensors, which no node has"
_WRITES = "it changes its arguments, and has no form that does not"
_VALUES = "torch.export asks for values in the midst of it: name the operator, or the module around it"
#: operator -> why it cannot be a node.
REASONS = {
    **dict.fromkeys(
        "cdouble cfloat chalf complex fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2 fft_ihfftn fft_rfft fft_rfft2 "
        "fft_rfftn linalg_eig linalg_eigvals polar stft view_as_complex".split(),
        _COMPLEX,
    ),
    "_batch_norm_with_update": _WRITES,
    "_native_batch_norm_legit": _WRITES,
    "native_batch_norm": "PyTorch has no gradient for its running statistics, which the sample makes inputs",
    "fill": "the TorchScript exporter fails at what it makes of it",
    "hash_tensor": "ONNX has its type, TorchScript's trace has not",
    **dict.fromkeys(
        ["corrcoef", "cov", "linalg_lstsq_grad_oriented", "nn_functional_one_hot", "nn_functional_ctc_loss", "linalg_lstsq"], _VALUES
    ),
    "diagonal_scatter": "torch.export fails at what it makes of it",
    **dict.fromkeys(
        ["nn_functional_linear_cross_entropy", "nn_functional_pad_replicate_negative", "masked_std", "masked_var"],
        "torch.onnx translates it, onnxruntime cannot run it",
    ),
    **dict.fromkeys(
        ["nn_functional_linear_cross_entropy_chunked", "nn_functional_linear_cross_entropy_chunked_none"],
        "an operator of torch.nn's own, which eager calls elsewhere",
    ),
}


def _untranslated(exporter: str) -> list[str]:
    records = [json.loads(line) for line in (Path(__file__).parent / "data" / "record.jsonl").read_text().splitlines()]
    samples = {each["operator"]: each["kinds"].get("sample") for each in records if each.get("exporter") == exporter and "kinds" in each}
    return [name for name, found in samples.items() if isinstance(found, list) and found[0] == "torch.onnx fails"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    process = Server(tmp_path_factory.mktemp("server"), "tests.operators.opaque:answer")
    yield process
    process.close()


@pytest.mark.parametrize(
    ("name", "dynamo"), [(name, which == "dynamo") for which in ("torchscript", "dynamo") for name in _untranslated(which)]
)
def test_as_an_opaque_node(name, dynamo, server, tmp_path):
    try:
        torch.manual_seed(0)
        compared(next(groups(name, 1)).call, dynamo, tmp_path, server.ask)
    except PythonopError as error:
        if name not in REASONS:
            raise
        pytest.xfail(f"{REASONS[name]}: {error}")
