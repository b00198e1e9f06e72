"""The official ONNX node tests as gradient tests: 1236 cases against finite differences taken once, in float64.

``data/references.xz`` holds for each case the inputs (away from kinks), the gradients of the outputs, and the derivative at
up to some 160 elements of each float input; the models are those of the installed onnx. With shapes erased, every dim
of every graph input and output is a symbol of its own.
"""

from __future__ import annotations

import functools
import json
import lzma
import re
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from exporter.gradient_graph.build import build_gradient_graph

LAST_OPSET = 26  # of onnxruntime 1.31
LOW = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, *LOW}

NO_RANK = "its body has an If between branches of different rank whose condition is known only at run time"
FORWARD = "onnxruntime's Resize itself differs from the standard's reference"
XFAIL = {
    "test_basic_deform_conv_without_padding": "the reference was taken on an evaluator whose sampling grid is float32: it is off, not the gradient",
    "test_resize_downsample_scales_linear_align_corners": FORWARD,
    "test_resize_downsample_scales_cubic_align_corners": FORWARD,
}
# Where onnxruntime has no kernel for a node of the forward model itself; everything else has to run there. SpaceToDepth is
# stamped down from an opset that onnxruntime does not know.
NO_KERNEL = re.compile(r"bf16|bfloat16|celu_float16|mod_.*fmod_0|pow_types_float32_uint|swiglu|spacetodepth_.*_mode", re.IGNORECASE)
OTHER_FORWARD = {"test_maxunpool_export_with_output_shape"}  # onnxruntime puts the elements elsewhere: the gradient alone is compared
XFAIL_ERASED = {
    "test_affine_grid_2d_expanded": NO_RANK,
    "test_affine_grid_2d_align_corners_expanded": NO_RANK,
    "test_affine_grid_3d_expanded": NO_RANK,
    "test_affine_grid_3d_align_corners_expanded": NO_RANK,
    "test_det_2d": "the cofactors need the size of the matrices",
    "test_det_nd": "the cofactors need the size of the matrices",
}
ERASED_BODIES = {"CausalConvWithState": "the standard's body is only made for shapes that are known"}


class References:
    """Arrays by name, out of one compressed file."""

    def __init__(self) -> None:
        data = lzma.decompress((Path(__file__).parent / "data" / "references.xz").read_bytes())
        size = int.from_bytes(data[:8], "little")
        head = json.loads(data[8 : 8 + size])
        self.cases, self._arrays, self._data = head["cases"], head["arrays"], memoryview(data)[8 + size :]

    def __getitem__(self, key: str) -> np.ndarray:
        dtype, shape, start = self._arrays[key]
        count = int(np.prod(shape))
        return np.frombuffer(self._data, np.dtype(dtype), count, start).reshape(shape)


REFERENCES = References()


@functools.cache
def models() -> dict[str, onnx.ModelProto]:
    import onnx.backend.test.loader as loader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: case.model for case in loader.load_model_tests(kind="node")}


def nodes_of(graph: onnx.GraphProto):
    for node in graph.node:
        yield node
        for a in node.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                yield from nodes_of(a.g)


def lower(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy, stamped down to onnxruntime's last opset where all its operators were there already."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    standard = next(o for o in copy.opset_import if o.domain in ("", "ai.onnx"))
    if standard.version > LAST_OPSET:
        try:
            for node in nodes_of(copy.graph):
                if node.domain in ("", "ai.onnx"):
                    onnx.defs.get_schema(node.op_type, LAST_OPSET, "")
            standard.version = LAST_OPSET
        except onnx.defs.SchemaError:
            pass
    return copy


def erase_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Without value_info, and every dim of inputs and outputs a symbol of its own."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.value_info[:]
    count = 0
    for value in (*copy.graph.input, *copy.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            count += 1
            dim.dim_param = f"d{count}"
    return copy


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], names: list[str], anywhere: bool) -> dict[str, np.ndarray]:
    """onnxruntime, and with ``anywhere`` the reference evaluator where that has no kernel."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    have = {v.name for v in model.graph.input}
    feeds = {k: v for k, v in feeds.items() if k in have}
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return dict(zip(names, session.run(names, feeds)))
    except Exception as error:
        assert anywhere, f"onnxruntime does not run it: {error}"
        with np.errstate(all="ignore"):
            try:
                return dict(zip(names, ReferenceEvaluator(model).run(names, feeds)))
            except Exception as second:
                raise AssertionError(f"runs nowhere: {error} / {second}") from second


def check_case(name: str, model: onnx.ModelProto, elsewhere: bool = False) -> None:
    case = REFERENCES.cases[name]
    types = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}
    training = lower(ir.to_proto(build_gradient_graph(model, wrt=case["wrt"])))
    of_type = lambda k, a: a.astype(helper.tensor_dtype_to_np_dtype(types[k])) if types[k] in FLOATS else a  # noqa: E731
    feeds = {k: of_type(k, REFERENCES[f"{name}/feed/{i}"]) for i, k in enumerate(case["feeds"])}
    feeds |= {f"{k}_grad": of_type(k, REFERENCES[f"{name}/cot/{i}"]) for i, k in enumerate(case["cotangents"])}
    got = run(training, feeds, [f"{k}_grad" for k in case["wrt"]] + case["forward"], elsewhere or bool(NO_KERNEL.search(name)))
    tolerance = 3e-2 if LOW & set(types.values()) else 1e-3 if case["exact"] else 5e-3
    for i, k in enumerate(case["forward"] if name not in OTHER_FORWARD else ()):
        np.testing.assert_allclose(
            np.asarray(got[k], np.float64), REFERENCES[f"{name}/fwd/{i}"], rtol=5 * tolerance, atol=tolerance, err_msg="forward"
        )
    for i, k in enumerate(case["wrt"]):
        g, index, expected = np.asarray(got[f"{k}_grad"], np.float64), REFERENCES[f"{name}/idx/{i}"], REFERENCES[f"{name}/val/{i}"]
        assert g.shape == feeds[k].shape, k
        scale = max(float(np.abs(expected).max(initial=0)), 1e-2)
        error = np.abs(g.flat[index] - expected) - 4 * float(REFERENCES[f"{name}/jit/{i}"])
        assert np.isfinite(g.flat[index]).all(), f"{k}_grad is not finite"
        assert float(error.max(initial=0)) <= tolerance * scale, f"{k}_grad"


def cases(reasons: dict[str, str], by_op: dict[str, str]):
    for name, case in REFERENCES.cases.items():
        reason = reasons.get(name) or by_op.get(case["op"] if not name.endswith("_expanded") else "")
        yield pytest.param(name, marks=pytest.mark.xfail(reason=reason, strict=True)) if reason else name


@pytest.mark.parametrize("name", cases(XFAIL, {}))
def test_conformance(name):
    if name not in models():
        pytest.xfail("the installed onnx has no such case")
    check_case(name, lower(models()[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", cases({**XFAIL, **XFAIL_ERASED}, ERASED_BODIES))
def test_conformance_with_shapes_erased(name):
    if name not in models():
        pytest.xfail("the installed onnx has no such case")
    # onnxruntime's own shape inference refuses the forward of a Resize whose dims are all symbols.
    check_case(name, erase_shapes(lower(models()[name])), elsewhere=name.startswith("test_resize_"))
