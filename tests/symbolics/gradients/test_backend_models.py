"""Models that onnx ships, of every opset: each becomes a gradient graph that passes the checker and opens, or is refused by an error of ours."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnx.backend.test.loader as loader
import onnx.helper as oh
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper

from exporter.gradient_graph.build import build_gradient_graph
from symbolics.errors import FormatError, PythonopError
from tests.symbolics.gradients.tools import run

#: No kernel of the CPU for bfloat16: the forward of these is a function that needs none of that kind.
NO_KERNEL = {"test_celu_bfloat16", "test_einsum_sum_bfloat16"}
FAULTS = ("Assertion", "fault of pythonop", "the rule of")


def backend_models(kind: str) -> dict[str, onnx.ModelProto]:
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in loader.load_model_tests(kind=kind):
            if case.model is not None or case.model_dir is not None:
                found[case.name] = case.model or onnx.load(f"{case.model_dir}/model.onnx")
    return found


def unusable(model: onnx.ModelProto) -> str:
    """What the checker or onnxruntime says against a model, "" where nothing."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    try:
        onnx.checker.check_model(model, full_check=True)
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["node", "simple", "pytorch-converted", "pytorch-operator"])
def test_every_model_of_onnx_has_a_usable_gradient_graph_or_an_error_of_ours(kind):
    wrong = {}
    models = backend_models(kind)
    models = dict(list(models.items())[::40]) if kind == "node" else models  # all of them take minutes
    for name, model in models.items():
        try:
            training = ir.to_proto(build_gradient_graph(model))
        except PythonopError as error:
            if any(fault in str(error) for fault in FAULTS):
                wrong[name] = str(error)
            continue
        if name not in NO_KERNEL and (said := unusable(training)) and not unusable(model):
            wrong[name] = said
    assert len(models) > 20
    assert not wrong


def test_slopes_of_an_old_prelu_are_one_for_each_channel():
    text = '<ir_version: 3, opset_import: ["": 6]> g (float[2,3,3,4] x, float[3] s) => (float[2,3,3,4] y) { y = PRelu(x, s) }'
    x, s = np.full((2, 3, 3, 4), -1, np.float32), np.array([1, 2, 3], np.float32)
    got = run(build_gradient_graph(onnx.parser.parse_model(text)), {"x": x, "s": s, "y_grad": np.ones_like(x)})
    np.testing.assert_array_equal(got["y"][0, :, 0, 0], [-1, -2, -3])
    np.testing.assert_array_equal(got["x_grad"][0, :, 0, 0], [1, 2, 3])
    np.testing.assert_array_equal(got["s_grad"], [-24, -24, -24])


def test_what_the_converter_refuses_is_named_without_a_line_of_its_source():
    values = [numpy_helper.from_array(np.ones(5, np.float32), name) for name in "sbmv"]
    nodes = [oh.make_node("Relu", ["x"], ["h"]), oh.make_node("BatchNormalization", ["h", *"sbmv"], ["y"], name="norm", spatial=0)]
    ends = [oh.make_tensor_value_info(name, TensorProto.FLOAT, [2, 5]) for name in "xy"]
    model = oh.make_model(oh.make_graph(nodes, "g", ends[:1], ends[1:], values), opset_imports=[oh.make_opsetid("", 8)], ir_version=3)
    with pytest.raises(FormatError, match=r"BatchNormalization \(node 'norm'.*Attribute spatial") as error:
        build_gradient_graph(model)
    assert "Assertion" not in str(error.value)


def test_batch_dims_that_end_onnx_are_refused():
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[2,3] x, int64[2,1] i) => (float[2] y) { y = GatherND<batch_dims = -9>(x, i) }'
    with pytest.raises(FormatError, match="its batch_dims is -9, and no tensor has such an axis"):
        build_gradient_graph(onnx.parser.parse_model(text))


@pytest.mark.parametrize("kind", ["FLOAT8E4M3FN", "FLOAT8E5M2"])
def test_what_is_read_for_its_type_alone_has_zeros_of_eight_bits(kind):
    like = oh.make_tensor_value_info("like", getattr(TensorProto, kind), [2])
    y = oh.make_tensor_value_info("y", getattr(TensorProto, kind), [2])
    graph = oh.make_graph(
        [oh.make_node("CastLike", ["x", "like"], ["y"])], "g", [oh.make_tensor_value_info("x", TensorProto.FLOAT, [2]), like], [y]
    )
    training = build_gradient_graph(oh.make_model(graph, opset_imports=[oh.make_opsetid("", 19)], ir_version=9))
    assert unusable(ir.to_proto(training)) == ""
