"""onnxscript's optimizer, which torch's exporter runs over what it translated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["draws_not_folded", "rules_by_operator"]


class _OfOperator:
    """A rewrite rule that is asked only about nodes of the operator that its pattern ends in; else as the rule."""

    def __init__(self, rule: Any, domain: str, op_type: str) -> None:
        self._rule, self._operator = rule, (domain, op_type)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def try_rewrite(self, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        """The replacement of a node; None where the rule has none."""
        return self._rule.try_rewrite(model, graph, node, **options) if (node.domain, node.op_type) == self._operator else None


@contextlib.contextmanager
def rules_by_operator() -> Iterator[None]:
    """Let `onnxscript.optimizer.optimize` ask a rule only about nodes of its own operator: it asks each of forty about every node, a sixth
    of an export. No public setting does; without the names that this reads, it asks as before.
    """
    from onnxscript import rewriter

    before: Any = getattr(rewriter, "_DEFAULT_REWRITE_RULES", None)
    try:
        rules = [_indexed(rule) for rule in before or ()]
    except (AttributeError, IndexError, TypeError):
        rules = []
    if not rules or any(isinstance(rule, _OfOperator) for rule in before):  # of another thread's export
        yield
        return
    rewriter._DEFAULT_REWRITE_RULES = tuple(rules)
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = before


@contextlib.contextmanager
def draws_not_folded(operators: Iterable[str]) -> Iterator[None]:
    """Let `onnxscript.optimizer` count these operators among those whose result is another one in each run. No public setting of `optimize` does."""
    from onnxscript.optimizer import _constant_folding

    before: Any = getattr(_constant_folding, "_NON_DETERMINISTIC_OPS", None)
    added = frozenset(operators)
    if not isinstance(before, frozenset) or added <= before:  # the latter: inside another such block
        yield
        return
    _constant_folding._NON_DETERMINISTIC_OPS = before | added
    try:
        yield
    finally:
        _constant_folding._NON_DETERMINISTIC_OPS = before


def _indexed(rule: Any) -> Any:
    """A rule, or itself where its pattern ends in one of several operators."""
    operator = rule._target_pattern.output_nodes[0].op_identifier()
    return rule if operator is None else _OfOperator(rule, operator[0], operator[1])
