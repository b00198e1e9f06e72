"""Operators of torch itself that a file names: one by one, functions of tensors alone, as the file was exported; all else is refused before it runs."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import torch

import exporter
from symbolics import torch_private as private
from symbolics.errors import ArgumentError, PythonopError, TrustError
from symbolics.node.operators import why_never
from tests.processes import python


class Net(torch.nn.Module):
    def forward(self, x):
        return torch.special.i0(x)


@pytest.fixture(scope="module")
def proto():
    return exporter.export(Net(), (torch.ones(2, 2),), dynamo=False, opaque="missing").model_proto


def edited(proto, name, **changes):
    """The file with another operator, or other arguments, put in."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    (node,) = [node for node in model.graph.node if node.op_type == "PythonOp"]
    attributes = {attribute.name: attribute for attribute in node.attribute}
    attributes["name"].s = name.encode()
    attributes["call"].s = json.dumps(json.loads(attributes["call"].s) | changes).encode()
    return model


def test_one_by_one(proto):
    session = exporter.inference_session(proto, allow=["aten::special_i0"])
    np.testing.assert_allclose(session.run(None, {session.get_inputs()[0].name: np.ones((2, 2), np.float32)})[0], torch.ones(2, 2).i0())
    for allow in ([], ["aten::special_i1"], ["torch:*", "torch.special:*"], ["aten:*"]):
        with pytest.raises(TrustError, match=r"allow=\['aten::special_i0'\]"):
            exporter.inference_session(proto, allow=allow)
    for wild in ("aten::*", "aten::special_*", "aten::?pecial_i0", "prims::*"):
        with pytest.raises(ArgumentError, match="one by one"):
            exporter.inference_session(proto, allow=[wild])


TENSOR = {"$tensor": 0}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("aten::from_file.default", {"args": ["FILE", True, 4]}),
        ("aten::save.default", {"args": [TENSOR, "FILE"]}),
        ("aten::zero_.default", {"args": [TENSOR]}),
        ("aten::special_i0.out", {"args": [TENSOR], "kwargs": {"out": TENSOR}}),
        ("aten::_print.default", {"args": ["text"]}),
        ("prim::Print.default", {"args": [TENSOR]}),
        ("inductor::_reinterpret_tensor.default", {"args": [TENSOR, [99], [1], 0]}),
        ("debugprims::load_tensor.default", {"args": ["FILE", [1], [1]]}),
        ("c10d::barrier.default", {"args": [TENSOR]}),
        ("_dtensor::shard_dim_alltoall.default", {"args": [TENSOR, 0, 0, "GROUP"]}),
        ("aten::special_i0.default", {"args": ["FILE"]}),
        ("aten::special_i0.default", {"args": [TENSOR, 1]}),
        ("aten::special_i0.default", {"args": [TENSOR], "kwargs": {"out": TENSOR}}),
        ("aten::special_i1.default", {"args": [TENSOR]}),
        ("aten::__class__.default", {"args": [TENSOR]}),
    ],
)
def test_what_is_put_in(proto, name, changes, tmp_path, capfd):
    """Even where the caller allows the very name, but for the last two, which he does not."""
    path = tmp_path / "made"
    text = json.loads(json.dumps(changes).replace('"FILE"', json.dumps(str(path))))
    allow = ["aten::special_i0"] if name.startswith(("aten::special_i1", "aten::__class__")) else [name]
    with pytest.raises(PythonopError):
        exporter.inference_session(edited(proto, name, **text), allow=allow)
    assert not path.exists() and not capfd.readouterr().out


#: What torch registers beside its own business, and a file may name as it may a library's: kernels for a kind of processor or of number.
LIBRARIES = set("quantized _quantized quantization mkl mkldnn mkldnn_prepacked onednn sparse xnnpack prepacked".split())


def test_namespaces_of_torch_are_its_own_business():
    code = (
        "import exporter, torch; from symbolics.node.operators import _OWN; exporter.export\n"
        "print(*{name.partition('::')[0] for name in torch._C._dispatch_get_all_op_names()} - _OWN)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= LIBRARIES


#: The arguments of text of the operators that a file may name. A new one is looked at: does it name a file, a command, a device?
TEXTS = set(
    "norm reduce padding driver rounding_mode interpolation UPLO activation approximate ord mode side algorithm equation indexing padding_side pad_mode".split()
) | {"assert_msg", "a", "b", "p"}


def test_every_operator_of_this_torch_is_a_function_of_tensors_or_refused():
    refused = dict[str, str]()
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.partition(".")
        if name.partition("::")[0] not in ("aten", "prims"):
            continue
        operator = private.find_overload(name, overload or "default")
        if operator is None:
            continue
        if why := why_never(operator):
            refused[full] = why
            continue
        texts = {value.name for value in private.schema_of(operator).arguments if "str" in str(value.type)}
        assert texts <= TEXTS, full
    assert {
        "aten::from_file",
        "aten::from_file.out",
        "aten::_print",
        "aten::set_.source_Storage",
        "aten::record_stream",
        "aten::zero_",
    } <= refused.keys()
    assert len(refused) > 1000
