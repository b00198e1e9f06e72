"""Labels of losses, which torch refuses below 0 and ONNX's bodies of these operators count from the last class."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, input_of

__all__ = ["check_labels"]

_LOSSES = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")


def check_labels(op: Builder, node: ir.Node) -> None:
    """Give a loss the number of classes in the place of labels below 0: no runtime has that index, and one that checks indices says so.

    Args:
        op: Gets the nodes.
        node: Before its body stands in its place; its labels are changed.
    """
    scores, labels = input_of(node, 0), input_of(node, 1)
    if node.domain or node.op_type not in _LOSSES or scores is None or labels is None or labels.dtype is None:
        return
    ignored = attr(node, "ignore_index")
    below = op.Less(labels, op.constant(0, labels.dtype))
    if ignored is not None and ignored < 0:
        below = op.And(below, op.Not(op.Equal(labels, op.constant(ignored, labels.dtype))))
    classes = op.Cast(op.Squeeze(op.Shape(scores, start=1, end=2), [0]), to=labels.dtype)
    checked = op.Where(below, classes, labels)
    checked.type, checked.shape = labels.type, labels.shape
    node.replace_input_with(1, checked)
