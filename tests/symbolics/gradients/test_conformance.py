"""The official ONNX node tests as gradient tests: 1236 cases against finite differences taken once, in float64.

``data/references.xz`` (make_references.py makes it) holds for each case the inputs (away from kinks), the gradients of the
outputs, and the derivative at up to some 160 elements of each float input; the models are those of the installed onnx. With
shapes erased, every dim of every graph input and output is a symbol of its own.
"""

from __future__ import annotations

import copy
import functools
import json
import re

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from tests.symbolics.gradients.conformance import case_of, lower
from tests.symbolics.gradients.make_references import DATA, Unusable, load, node_tests, reference_of, unlike

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


REFERENCES = load()
models = functools.cache(node_tests)


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
    case = case_of(name, model, REFERENCES[name])
    got = run(case.model, case.feeds, case.outputs, elsewhere or bool(NO_KERNEL.search(name)))
    wrong = case.difference(got, forward=name not in OTHER_FORWARD)
    assert not wrong, wrong


def cases(reasons: dict[str, str], by_op: dict[str, str]):
    for name, case in REFERENCES.items():
        reason = reasons.get(name) or by_op.get(case.op if not name.endswith("_expanded") else "")
        yield pytest.param(name, marks=pytest.mark.xfail(reason=reason, strict=True)) if reason else name


def mostly_slow(rows):
    """One case in four is quick: each operator's own tests are in test_operators.py."""
    params = [row if hasattr(row, "marks") else pytest.param(row) for row in rows]
    return [
        pytest.param(*p.values, marks=[*p.marks, pytest.mark.slow] if number % 4 else p.marks, id=p.id) for number, p in enumerate(params)
    ]


@pytest.mark.parametrize("name", mostly_slow(cases(XFAIL, {})))
def test_conformance(name):
    check_case(name, lower(models()[name][0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(cases({**XFAIL, **XFAIL_ERASED}, ERASED_BODIES)))
def test_conformance_with_shapes_erased(name):
    # onnxruntime's own shape inference refuses the forward of a Resize whose dims are all symbols.
    check_case(name, erase_shapes(lower(models()[name][0])), elsewhere=name.startswith("test_resize_"))


def test_every_node_test_of_the_installed_onnx_is_known():
    """Another release of onnx brings new ones."""
    unusable = {name for names in json.loads((DATA / "unusable.json").read_text()).values() for name in names}
    assert not unusable & REFERENCES.keys()
    gone, new = sorted((unusable | REFERENCES.keys()) - models().keys()), sorted(models().keys() - unusable - REFERENCES.keys())
    assert not gone and not new, (
        f"gone: {gone}, new: {new}; python -m tests.symbolics.gradients.make_references (an hour) takes them out and in"
    )


@pytest.mark.parametrize(
    "name",
    [
        "test_abs",
        "test_conv_with_strides_padding",
        "test_layer_normalization_2d_axis1",
        "test_gru_defaults",
        "test_softmax_axis_1",
        "test_div_bcast",
    ],
)
def test_the_script_makes_what_is_stored(name):
    assert unlike(reference_of(name, models()), REFERENCES[name]) == ""


def test_another_gradient_is_unlike_the_stored_one():
    stored, other = REFERENCES["test_abs"], copy.deepcopy(REFERENCES["test_abs"])
    index, values, jitter = other.gradients["x"]
    other.gradients["x"] = index, values * 1.01, jitter
    assert "gradient of x is" in unlike(other, stored)
    other.gradients = {}
    assert "gradients of []" in unlike(other, stored)


@pytest.mark.parametrize(("name", "why"), [("test_add_int8", "no float input"), ("test_bernoulli", "random")])
def test_a_node_test_without_a_gradient_is_said_to_be_none(name, why):
    with pytest.raises(Unusable, match=why):
        reference_of(name, models())
