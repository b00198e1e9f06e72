"""What makes a session of ours quicker, and its peak of memory lower: every pass over an arranged graph, in its order."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx_ir as ir

from exporter.runtime.fusion.arrange import arrange
from exporter.runtime.fusion.elementwise import Facts, fuse
from exporter.runtime.fusion.link import could_link, link
from exporter.runtime.fusion.recurrences import run_recurrences
from exporter.runtime.in_place import Update, take_out_updates
from exporter.runtime.step_order import list_for_memory

__all__ = ["accelerate"]


def accelerate(
    proto: onnx.ModelProto, carried: Mapping[str, str] | None, *, is_step: bool, on_cpu: bool, native: bool, large: bool
) -> tuple[onnx.ModelProto | None, Update | None]:
    """Join PythonOps that feed one another alone; of a training step, fuse and order more.

    Args:
        proto: The model; it stays as it is.
        carried: As `take_out_updates` wants it; None: nothing is taken out.
        is_step: Whether it is a training step.
        on_cpu: Whether all of it runs there.
        native: Whether the native library is there.
        large: Whether somebody else lists its nodes.

    Returns:
        The model as it is to run, None where nothing changed, and what was taken out of it.
    """
    if not is_step and not could_link(proto):
        return None, None
    model = ir.from_proto(proto)
    facts: dict[ir.Value, Facts] = {}
    changes: int = link(model)
    if is_step and on_cpu and native:
        changes += run_recurrences(model) + fuse(model, facts=facts)
    if is_step and on_cpu:
        changes += arrange(model, facts=facts, native=native)
    update = take_out_updates(model, carried, facts) if changes and carried is not None else None
    changes += is_step and not large and list_for_memory(model.graph, facts)
    return (ir.to_proto(model) if changes else None), update
