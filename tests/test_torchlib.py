from __future__ import annotations

import pytest
from torch.onnx._internal.exporter._registration import ONNXRegistry

from tests import torchlib
from tests.processes import python


@pytest.mark.parametrize("opset", [(), pytest.param((18,), marks=pytest.mark.slow), pytest.param((23,), marks=pytest.mark.slow)])
def test_what_is_kept_is_what_torch_makes(opset):
    kept, new = ONNXRegistry.from_torchlib(*opset), torchlib.made_anew(*opset)
    assert vars(kept).keys() == vars(new).keys() == {"_opset_version", "functions"}
    assert kept.opset_version == new.opset_version
    assert len(new.functions) > 500
    assert kept.functions == new.functions


@pytest.mark.slow
def test_operators_that_came_later_are_in_it():
    ONNXRegistry.from_torchlib()
    import torch.ao.quantization.fx._decomposed  # noqa: F401

    test_what_is_kept_is_what_torch_makes(())


def test_two_exports_share_no_list():
    one, two = ONNXRegistry.from_torchlib(), ONNXRegistry.from_torchlib()
    next(iter(one.functions.values())).clear()
    assert all(two.functions.values())


@pytest.mark.slow
def test_the_composite_operators_are_those_of_torch():
    code = "from torch._export.utils import _collect_all_valid_cia_ops as ops; print(sorted(op.name() for op in ops() if op.namespace == 'aten'))"
    torchs, ours = (
        python("-c", f"import torch.onnx; {code}"),
        python("-c", f"import torch.onnx; from tests import torchlib; torchlib.built_once(); {code}"),
    )
    assert torchs.stdout.count("aten::") > 100, torchs.stderr
    assert ours.stdout == torchs.stdout, ours.stderr
