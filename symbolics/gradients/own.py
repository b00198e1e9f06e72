"""Gradient rules of somebody's own: a file says which of its operators had one, and who differentiates it without them is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from symbolics.gradients.registry import RULES
from symbolics.node.metadata import read_rules, write_rules
from symbolics.node.names import RULES_KEY
from symbolics.text import BEFORE_OPENING, shown
from symbolics.users import warn

__all__ = ["note_own_rules", "say_missing_rules"]

_OURS = frozenset(("symbolics", "exporter"))


def note_own_rules(model: ir.Model) -> None:
    """Write into the metadata of a model which of its operators have a rule of `exporter.gradient` here; what it says of others stays."""
    own = {_name(key): _place(RULES[key]) for key in _operators(model) if key in RULES and _is_own(RULES[key])}
    if own:
        model.metadata_props[RULES_KEY] = write_rules(dict(sorted({**(read_rules(model.metadata_props) or {}), **own}.items())))


def say_missing_rules(model: ir.Model, rules: Mapping[tuple[str, str], Any]) -> None:
    """Warn of each operator whose gradient is another one here than where the file was written.

    Args:
        model: What is differentiated.
        rules: operator -> its rule in this process.

    Raises:
        FormatError: The metadata is damaged.
    """
    recorded = read_rules(model.metadata_props)
    if not recorded:
        return
    for key in sorted(_operators(model)):
        name, rule = _name(key), rules.get(key)
        if name in recorded and (rule is None or not _is_own(rule)):
            instead = "the derivative of its body" if rule is None else "the usual one"
            warn(
                f"{shown(name)} had a gradient rule of its own where the file was written ({shown(recorded[name])}), and has none here: its gradient is {instead}. "
                "Import the module with its @exporter.gradient before you load or differentiate the file "
                f"({BEFORE_OPENING}), or give the rule by overrides="
            )


def _operators(model: ir.Model) -> set[tuple[str, str]]:
    nodes = [*model.graph.all_nodes(), *(node for function in model.functions.values() for node in function.all_nodes())]
    return {(node.domain, node.op_type) for node in nodes}


def _is_own(rule: Any) -> bool:
    return str(getattr(rule.function, "__module__", "")).partition(".")[0] not in _OURS


def _place(rule: Any) -> str:
    return f"{rule.function.__module__}:{getattr(rule.function, '__qualname__', '?')}"[:200]


def _name(key: tuple[str, str]) -> str:
    """An operator as the metadata has it: without a domain for those of ONNX."""
    return "::".join(key) if key[0] else key[1]
