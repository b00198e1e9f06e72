"""From a file to what onnxruntime opens: one list of passes, all in memory. The file on disk is not touched.

A pass says which models it is for, and changes them. Some look at a protobuf message, some at an onnx_ir.Model: `Arranged` has the model as either, and
makes one of the other when a pass asks for it. What is left out costs nothing: a file without PythonOps, which is no training step, never
becomes an onnx_ir.Model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import onnx

from exporter.runtime.library import is_there
from exporter.runtime.node_order import MANY_NODES, list_as_they_can_run
from exporter.runtime.prepare import has_python_ops, inline_modules, needs_library, prepare
from symbolics.node.names import ROWS_DOMAIN, STEP_KEY

if TYPE_CHECKING:
    import onnx_ir as ir

    from exporter.runtime.accelerate import Update
    from exporter.runtime.facts import ShapeAndType

__all__ = ["PASSES", "Arranged", "Pass", "arrange"]


@dataclass
class Arranged:
    """A model on its way to a session.

    Attributes:
        providers: Short names of its execution providers other than the CPU; see `exporter.runtime.providers.Choice`.
        accelerate: Whether an accelerator may rewrite a training step.
        carried: As `exporter.runtime.accelerate.Request` has it.
        own_options: Whether the caller has options of his own, which may know the library of PythonOps.
        one_thread: Whether one thread runs all of a node, so that nobody else adds to the same place.
        library: Whether the model needs that library.
        is_step: Whether it is a training step.
        python_ops: Whether it has PythonOps.
        large: Whether onnxruntime takes long to open it.
        facts: Shapes and types of its values, as far as a pass has found them out.
        update: What an accelerator took out of a step.
        operators: The library of the accelerator, where the model has operators of it.
        changed: Whether it is another model than that of the file.
    """

    proto: onnx.ModelProto
    providers: Sequence[str] = ()
    accelerate: bool = True
    carried: Mapping[str, str] | None = None
    own_options: bool = False
    one_thread: bool = False
    library: bool = False
    facts: dict[ir.Value, ShapeAndType] = field(default_factory=dict)
    update: Update | None = None
    operators: Path | None = None
    changed: bool = False
    _model: ir.Model | None = None

    def __post_init__(self) -> None:
        self.is_step = any(entry.key == STEP_KEY for entry in self.proto.metadata_props)
        self.python_ops = has_python_ops(self.proto)
        self.large = len(self.proto.graph.node) >= MANY_NODES

    @property
    def model(self) -> ir.Model:
        """The model as passes over onnx_ir change it."""
        if self._model is None:
            import onnx_ir as ir

            self._model = ir.from_proto(self.proto)
        return self._model

    def take_back(self, changed: bool) -> None:
        """Make ``proto`` of what passes made of ``model``, if anything."""
        if self._model is not None and changed:
            import onnx_ir as ir

            self.proto = ir.to_proto(self._model)
        self._model, self.facts = None, {}


class Pass(NamedTuple):
    """One change.

    Attributes:
        name: What the model is behind it.
        run: Makes it; returns whether anything changed.
        takes: Which models it is for.
        over_ir: Whether it changes ``model``, not ``proto``.
    """

    name: str
    run: Callable[[Arranged], bool]
    takes: Callable[[Arranged], bool] = lambda arranged: True
    over_ir: bool = False


def _joined(arranged: Arranged) -> bool:
    from exporter.runtime.link import link

    return link(arranged.model) > 0


def _could_join(arranged: Arranged) -> bool:
    if not arranged.is_step and not arranged.python_ops:
        return False
    from exporter.runtime.link import could_link

    return could_link(arranged.proto)


def _in_turn(arranged: Arranged) -> bool:
    from symbolics.graph.slow_operators import scatter_in_turn

    return scatter_in_turn(arranged.model, arranged.model.graph)


def _at_once(arranged: Arranged) -> bool:
    from exporter.runtime.provider_forms import all_rows_at_once

    return all_rows_at_once(arranged.model) > 0


def _adds_rows(arranged: Arranged) -> bool:
    return any(function.domain == ROWS_DOMAIN for function in arranged.proto.functions) or any(
        node.op_type == "ScatterElements" for node in arranged.proto.graph.node
    )


def _accelerated(arranged: Arranged) -> bool:
    from exporter.runtime.accelerate import Request, accelerator
    from exporter.runtime.facts import find_facts
    from symbolics.graph.named import write_out

    guest = accelerator(arranged.providers, arranged.accelerate)
    if guest is None:
        if not arranged.providers:  # else those may claim gradients by name
            write_out(arranged.model)
        find_facts(arranged.model, arranged.facts)
        return False
    replaced, arranged.update = guest.optimize(arranged.model, Request("step", carried=arranged.carried), arranged.facts)
    write_out(arranged.model)
    arranged.operators = guest.library if replaced else None
    return replaced > 0


def _for_memory(arranged: Arranged) -> bool:
    from exporter.runtime.step_order import list_for_memory

    return list_for_memory(arranged.model.graph, arranged.facts)


def _in_forms(arranged: Arranged) -> bool:
    from exporter.runtime.provider_forms import write_forms

    return write_forms(arranged.providers, arranged.model)


def _prepared(arranged: Arranged) -> bool:
    arranged.library = is_there() and needs_library(arranged.proto)
    return prepare(arranged.proto, fusions=arranged.library or arranged.own_options)


#: In the order in which they run. Each finds what those before it have left: an accelerator looks at every node of the graph, so functions are
#: inlined before it; orders come after all that makes nodes.
PASSES = (
    Pass("modules inlined", lambda arranged: inline_modules(arranged.proto), lambda arranged: arranged.is_step or arranged.python_ops),
    Pass("PythonOps joined", _joined, _could_join, over_ir=True),
    # A step that was written before exports did so: onnxruntime's CPU loses additions to one place where several threads make them.
    Pass("added in turn", _in_turn, lambda arranged: arranged.is_step and not arranged.providers, over_ir=True),
    Pass("accelerated", _accelerated, lambda arranged: arranged.is_step, over_ir=True),
    # `AddRows` is there for the threads of a node, and costs up to a third of a force field's time where there are none.
    Pass(
        "rows added at once",
        _at_once,
        lambda arranged: arranged.one_thread and not arranged.providers and _adds_rows(arranged),
        over_ir=True,
    ),
    Pass("ordered for memory", _for_memory, lambda arranged: arranged.is_step and not arranged.large, over_ir=True),
    Pass("in the forms of its providers", _in_forms, lambda arranged: bool(arranged.providers), over_ir=True),
    Pass("as onnxruntime takes PythonOps", _prepared),
    Pass("ordered to open soon", lambda arranged: list_as_they_can_run(arranged.proto.graph), lambda arranged: arranged.large),
)


def arrange(arranged: Arranged, passes: Sequence[Pass] = PASSES) -> Arranged:
    """Run the passes that a model takes; the same object, changed."""
    anew = False
    for each in passes:
        if not each.takes(arranged):
            continue
        if not each.over_ir:
            arranged.take_back(anew)
            anew = False
        done = each.run(arranged)
        anew |= done and each.over_ir
        arranged.changed |= done
    arranged.take_back(anew)
    return arranged
