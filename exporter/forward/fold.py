"""fold(): constants folded and equal nodes merged, without onnxscript's rewrite rules."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxscript.optimizer

from symbolics.node.names import GRADIENT_DOMAIN

__all__ = ["fold", "outputs_unsaid"]


def fold(model: ir.Model, *, named: bool = False) -> None:
    """Inline functions, fold what depends on constants alone, merge equal nodes, and remove what nobody reads, in place.

    Args:
        model: Changed.
        named: Calls of named gradients (`symbolics.graph.named`) stay: sessions claim them.
    """
    passes.InlinePass(lambda function: not named or function.domain != GRADIENT_DOMAIN)(model)
    unnamed = [value for node in model.graph for value in node.outputs if not (value.name or value.uses() or value.is_graph_output())]
    onnxscript.optimizer.fold_constants(model, onnx_shape_inference=False)
    for value in unnamed:  # it names them all, and a name says that somebody wants the output
        value.name = ""
    with outputs_unsaid():
        for simplify in (
            passes.RemoveUnusedNodesPass(),
            passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            passes.LiftSubgraphInitializersToMainGraphPass(),
            passes.DeduplicateInitializersPass(),
            passes.CommonSubexpressionEliminationPass(),
            passes.OutputFixPass(),
        ):
            simplify(model)


@contextlib.contextmanager
def outputs_unsaid() -> Iterator[None]:
    """onnx_ir warns of each constant that is an output: it merges it with no other, as it has to."""
    log = logging.getLogger(passes.DeduplicateInitializersPass.__module__)

    def wanted(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Skipped deduplication")

    log.addFilter(wanted)
    try:
        yield
    finally:
        log.removeFilter(wanted)
