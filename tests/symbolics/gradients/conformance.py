"""A node test of the standard as a gradient test: its gradient graph, what is fed, and how far its results are from the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper

from exporter.gradient_graph.build import build_gradient_graph
from tests.symbolics.gradients.make_references import FLOATS, LOW, Reference

__all__ = ["GradientCase", "case_of", "lower"]

LAST_OPSET = 26  # of onnxruntime 1.31 and 1.32


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Nodes, those of bodies included."""
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
            for entry in (entry for function in copy.functions for entry in function.opset_import if entry.domain in ("", "ai.onnx")):
                entry.version = min(entry.version, LAST_OPSET)
        except onnx.defs.SchemaError:
            pass
    return copy


@dataclass
class GradientCase:
    """A gradient graph beside its reference.

    Attributes:
        feeds: By input.
        outputs: The gradients, then the outputs of the forward.
        tolerance: Of a gradient, relative to its largest element.
    """

    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    outputs: list[str]
    reference: Reference
    tolerance: float

    def difference(self, got: Mapping[str, Any], forward: bool = True) -> str:
        """What is not as in the reference, in a line; "" where all of it is."""
        for name, expected in self.reference.forward.items() if forward else ():
            found = np.asarray(got[name], np.float64)
            if found.shape != expected.shape:
                return f"forward: {name} has the shape {found.shape}"
            if (np.isnan(found) != np.isnan(expected)).any():
                return f"forward: {name} is nan at other places"
            if not np.allclose(found, expected, rtol=5 * self.tolerance, atol=self.tolerance, equal_nan=True):
                return f"forward: {name} is off by {np.nanmax(np.abs(found - expected)):.1e}"
        for name, (index, expected, jitter) in self.reference.gradients.items():
            found = np.asarray(got[f"{name}_grad"], np.float64)
            if found.shape != self.reference.feeds[name].shape:
                return f"{name}_grad has the shape {found.shape}"
            scale = max(float(np.abs(expected).max(initial=0)), 1e-2)
            if not np.isfinite(found.flat[index]).all():
                return f"{name}_grad is not finite"
            error = float((np.abs(found.flat[index] - expected) - 4 * jitter).max(initial=0))
            if error > self.tolerance * scale:
                return f"{name}_grad is off by {error / scale:.1e}"
        return ""


def case_of(name: str, model: onnx.ModelProto, reference: Reference) -> GradientCase:
    """The gradient graph of a node test's model, at the point of its reference."""
    types = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}
    training = lower(ir.to_proto(build_gradient_graph(model, wrt=list(reference.gradients))))
    of_type = lambda k, a: a.astype(helper.tensor_dtype_to_np_dtype(types[k])) if types[k] in FLOATS else a  # noqa: E731
    feeds = {k: of_type(k, array) for k, array in reference.feeds.items()}
    feeds |= {f"{k}_grad": of_type(k, array) for k, array in reference.cotangents.items()}
    tolerance = 3e-2 if LOW & set(types.values()) else 1e-3 if reference.exact else 5e-3
    have = {value.name for value in training.graph.input}
    outputs = [f"{k}_grad" for k in reference.gradients] + list(reference.forward)
    return GradientCase(training, {k: array for k, array in feeds.items() if k in have}, outputs, reference, tolerance)
