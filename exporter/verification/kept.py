"""What the Functions of a model keep between calls: eager and a file start from different states, so that nothing need be equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir
import torch

from exporter.files.named import functions_in
from exporter.files.trust import name_of
from exporter.verification.notes import Note
from exporter.verification.rows import Row
from symbolics.capture.kept_state import Change, changes_of
from symbolics.node.names import qualified_name

__all__ = ["note_on_state", "state_in"]


def state_in(model: ir.Model) -> dict[str, list[Change]]:
    """What the Functions that a file calls change outside of their arguments, as far as this process knows them: their names -> that."""
    wanted, found = set(functions_in(model)), dict[str, list[Change]]()
    waiting: list[type] = list(torch.autograd.Function.__subclasses__())
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        name = name_of(cls) or qualified_name(cls)
        if name in wanted and (changes := [change for change in changes_of(cls) if change.kind != "memo"]):
            found[name] = changes
    return found


def note_on_state(rows: Sequence[Row], model: ir.Model) -> Iterator[Note]:
    """The state that Functions keep, where something differs."""
    if all(row.ok for row in rows):
        return
    for name, changes in sorted(state_in(model).items()):
        halves = {half: list(dict.fromkeys(change.name for change in changes if change.half == half)) for half in ("forward", "backward")}
        said = " and ".join(f"its {half} changes {', '.join(names)}" for half, names in halves.items() if names)
        yield Note(
            "Kept between calls",
            f"{name} keeps state: {said}. The file holds none of it, and was run in a process where it was as at the import, not as in this one. Pass the "
            "state as a tensor and return the new one.",
        )
