from __future__ import annotations

import pytest
from torch.onnx._internal.exporter._registration import ONNXRegistry

from tests import torchlib


@pytest.mark.parametrize("opset", [(), (18,), (23,)])
def test_what_is_kept_is_what_torch_makes(opset):
    kept, new = ONNXRegistry.from_torchlib(*opset), torchlib.made_anew(*opset)
    assert vars(kept).keys() == vars(new).keys() == {"_opset_version", "functions"}
    assert kept.opset_version == new.opset_version
    assert len(new.functions) > 500
    assert kept.functions == new.functions


def test_two_exports_share_no_list():
    one, two = ONNXRegistry.from_torchlib(), ONNXRegistry.from_torchlib()
    next(iter(one.functions.values())).clear()
    assert all(two.functions.values())
