"""What a stop-gradient mark says that stands behind a gradient which forward takes without ``create_graph=True``: a file's and an export's own words."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["FREED", "KEPT", "Cut", "read_cut", "write_cut"]

#: What eager has of the graph behind such a gradient: nothing any more, or all of it (``retain_graph=True``).
FREED, KEPT = "freed", "kept"


@dataclass(frozen=True)
class Cut:
    """A gradient through which nothing flows.

    Attributes:
        module: The path of the module that takes it.
        source: ``module.name:line`` of the call, "" where it is not known.
        graph: FREED or KEPT.
    """

    module: str
    source: str
    graph: str


def write_cut(cut: Cut) -> str:
    """The text of the property ``pythonop.cut``."""
    return json.dumps(asdict(cut), ensure_ascii=False)


def read_cut(text: str) -> Cut:
    """What the property says; of one that is damaged, nothing: it is for people, and for a warning."""
    try:
        found = json.loads(text)
        return Cut(*(str(found.get(name, "")) for name in ("module", "source", "graph")))
    except (ValueError, AttributeError, RecursionError):
        return Cut("", "", "")
