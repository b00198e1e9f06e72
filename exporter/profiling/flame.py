"""The flame view of a profile: parts, in them modules, in them nodes, each as wide as its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exporter.pictures.page import rendered
from exporter.pictures.svg import STYLE
from exporter.profiling.profile import NodeTime, Profile
from symbolics.text import clean

__all__ = ["flame_page", "tree_of"]

#: Colour -> what has it.
_LEGEND = {
    "forward": "forward",
    "gradient": "gradient",
    "tangent": "tangent",
    "update": "optimizer, onnxruntime's own",
    "python": "PythonOps",
}


def tree_of(found: Profile) -> dict[str, Any]:
    """What is inside what: ``name``, ``kind`` (part, module or node), ``seconds``, ``inside`` and, of a node, ``facts``."""
    root = _branch("all nodes", "run")
    for row in found.rows:
        here = root
        path = [(row.part or "onnxruntime's own", "part"), *((name, "module") for name in row.module.split(".") if name)]
        for name, kind in path:
            here["seconds"] += row.seconds
            here = here["index"].setdefault((kind, name), _branch(clean(name), kind))
        here["seconds"] += row.seconds
        here["index"]["node", row.name] = _leaf(row)
    return _plain(root)


def _branch(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "kind": kind, "seconds": 0.0, "index": {}}


def _leaf(row: NodeTime) -> dict[str, Any]:
    facts = [("operator", row.operator), ("node", row.name), ("module", row.module), ("calls in a run", str(row.calls))]
    name = f"{row.operator} {row.function}".strip()
    return {
        "name": clean(name), "kind": "python" if row.function else "node", "seconds": row.seconds, "index": {},
        "facts": [(what, clean(text)) for what, text in facts if text],
    }  # fmt: skip


def _plain(branch: dict[str, Any]) -> dict[str, Any]:
    inside = sorted((_plain(inner) for inner in branch.pop("index").values()), key=lambda inner: -inner["seconds"])
    return {**branch, "inside": inside}


def flame_page(found: Profile, title: str) -> str:
    """The view as one page that needs no network.

    Raises:
        ImportError: jinja2 is not installed (the extra ``report``).
    """
    parts = {row.part for row in found.rows} | ({"python"} if found.python else set())
    legend = {part: text for part, text in _LEGEND.items() if parts & {part} or (part == "update" and parts - _LEGEND.keys())}
    facts = {**found.facts, "runs": str(found.runs)}
    return rendered(
        Path(__file__).with_name("flame.html"),
        {"tree": tree_of(found), "seconds": found.seconds},
        title=clean(title),
        style=STYLE,
        facts=facts,
        legend=legend,
        milliseconds=f"{found.seconds * 1e3:.3g}",
        nodes=f"{sum(row.seconds for row in found.rows) * 1e3:.3g}",
        python=f"{found.python * 1e3:.3g}",
        operators=[(clean(name), seconds * 1e3, count) for name, (seconds, count) in list(found.by_operator().items())[:30]],
    )
