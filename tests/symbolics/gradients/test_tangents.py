"""The official ONNX node tests in forward mode: the tangent against the same finite differences as test_conformance.py.

``make test-tangents`` runs all of them; otherwise the first of each operator.
"""

from __future__ import annotations

import os

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from exporter.gradient_graph.tangents import build_tangent_graph
from symbolics.gradients.tangents import PLACEHOLDER
from symbolics.graph.walk import walk
from symbolics.node.metadata import tangents_of
from tests.symbolics.gradients.conformance import lower
from tests.symbolics.gradients.make_references import FLOATS, LOW
from tests.symbolics.gradients.test_conformance import FORWARD, NO_KERNEL, REFERENCES, models, run

ALL = os.environ.get("PYTHONOP_TANGENTS") == "all"
DIRECTIONS = 3
XFAIL = {
    "test_resize_downsample_scales_linear_align_corners": FORWARD,
    "test_resize_downsample_scales_cubic_align_corners": FORWARD,
}


def names():
    first = {case.op: name for name, case in reversed(REFERENCES.items())}
    for name in REFERENCES if ALL else sorted({*first.values(), *XFAIL}):
        yield pytest.param(name, marks=pytest.mark.xfail(reason=XFAIL[name], strict=True)) if name in XFAIL else name


def check_case(name: str, model: onnx.ModelProto) -> None:
    """u J v, from the tangent, against (J' u) v, from the stored differences; directions move the elements that have one."""
    case, rng = REFERENCES[name], np.random.default_rng(0)
    types = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}
    graph = build_tangent_graph(model, wrt=list(case.gradients), outputs=list(case.cotangents))
    assert not any(node.domain == PLACEHOLDER for node in walk(graph.graph))
    pairing, proto = tangents_of(graph), lower(ir.to_proto(graph))
    of_type = lambda k, a: a.astype(helper.tensor_dtype_to_np_dtype(types[k])) if types[k] in FLOATS else a  # noqa: E731
    feeds = {k: of_type(k, array) for k, array in case.feeds.items()}
    tolerance = 3e-2 if LOW & set(types.values()) else 1e-3 if case.exact else 5e-3
    for _ in range(DIRECTIONS):
        expected, size, jitter, moves = 0.0, [1e-2], 0.0, {}
        for k, (index, gradient, noise) in case.gradients.items():
            v = np.zeros(feeds[k].shape)
            v.flat[index] = rng.uniform(0.5, 1, len(index)) * rng.choice([-1, 1], len(index))
            moves[pairing.inputs[k]] = v = of_type(k, v)
            along = np.asarray(v, np.float64).flat[index]
            expected += float(along @ gradient)
            size.append(float(np.linalg.norm(along * gradient)))
            jitter += 4 * float(np.abs(along) @ np.broadcast_to(noise, along.shape))
        found = run(proto, {**feeds, **moves}, list(pairing.outputs.values()), bool(NO_KERNEL.search(name)))
        total = 0.0
        for k, output in pairing.outputs.items():
            cotangent, tangent = np.asarray(of_type(k, case.cotangents[k]), np.float64), np.asarray(found[output], np.float64)
            assert tangent.shape == cotangent.shape, output
            weighed = np.where(cotangent != 0, tangent * cotangent, 0)
            assert np.isfinite(weighed).all(), f"{output} is not finite"
            total += float(weighed.sum())
            if tolerance > 1e-2:  # the sum of many numbers of 16 bits
                size.append(float(np.linalg.norm(weighed)))
        assert abs(total - expected) <= tolerance * float(np.linalg.norm(size)) + jitter


@pytest.mark.parametrize("name", list(names()))
def test_tangents_are_finite_differences(name):
    check_case(name, lower(models()[name][0]))
