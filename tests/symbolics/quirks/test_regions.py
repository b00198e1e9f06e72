"""RoiAlign of torch's exporter: no gradient to the regions, that to the image stays. (torchvision is no package of the tests.)"""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir

import exporter
from symbolics import quirks
from symbolics.graph.walk import walk
from symbolics.node.metadata import pairing_of

MODEL = """<ir_version: 10, opset_import: ["": 18, "pythonop": 1]>
    g (float[1, 2, 8, 8] x, float[2, 4] boxes, int64[2] batch) => (float[2, 2, 2, 2] y) {
        moved = Mul(boxes, boxes)
        y = RoiAlign<output_height = 2, output_width = 2, sampling_ratio = 2>(x, moved, batch)
    }"""


def test_regions_have_no_gradient():
    model = ir.from_proto(onnx.parser.parse_model(MODEL))
    assert not pairing_of(exporter.build_gradient_graph(model)).unreached
    quirks.apply(quirks.TRANSLATED, model)
    training = exporter.build_gradient_graph(model)
    assert pairing_of(training).unreached == ("boxes",)
    assert [node.op_type for node in walk(model.graph)] == ["Mul", "StopGradient", "RoiAlign"]
