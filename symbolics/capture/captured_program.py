"""An ExportedProgram that was captured where nobody listened: its calls of operators become nodes after the fact.

Calls of Functions cannot: torch.export has put in their place what their forwards do.
"""

from __future__ import annotations

import copy
import operator as builtin
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.capture.recorder import Recorder
from symbolics.errors import ExportError
from symbolics.node.containers import Slot
from symbolics.node.operators import Operator, is_foreign

__all__ = ["place_operators"]

_CAPTURED_BEFORE = "the ExportedProgram was captured before the export: give the module itself to exporter.export or torch.onnx.export"


def place_operators(program: torch.export.ExportedProgram, recorder: Recorder) -> torch.export.ExportedProgram:
    """Put the opaque operator in the place of each operator that becomes a node; the program itself stays as it was.

    Args:
        program: What torch.export.export made.
        recorder: It files the records.

    Raises:
        ExportError: An operator is in a body of torch.cond or the like, changes an argument, or is to be inlined.
    """
    found = [node for node in _nodes(program.graph_module) if _operator_of(node, recorder) is not None]
    if not found:
        return program
    module = copy.deepcopy(program.graph_module)
    flags = _gradients(module.graph, program)
    for node in list(module.graph.nodes):
        operator = _operator_of(node, recorder)
        if operator is not None:
            _place(node, operator, recorder, flags)
    if (rest := next((node for node in _nodes(module) if _operator_of(node, recorder) is not None), None)) is not None:
        raise _refused(
            rest, "it is called in a body (of torch.cond, a loop, or a block under no_grad or autocast), and " + _CAPTURED_BEFORE
        )
    module.graph.lint()
    module.recompile()
    return torch.export.ExportedProgram(
        module,
        module.graph,
        program.graph_signature,
        program.state_dict,
        program.range_constraints,
        program.module_call_graph,
        program.example_inputs,
        program.constants,
        verifiers=program.verifiers,  # those of what torch.export makes let operators change a buffer
    )


def _nodes(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    for each in module.modules():
        if isinstance(each, torch.fx.GraphModule):
            yield from each.graph.nodes


def _operator_of(node: torch.fx.Node, recorder: Recorder) -> Operator | None:
    """The operator that a node calls, where it is to become a node of the file."""
    if node.op != "call_function" or not isinstance(node.target, private.operator_classes()):
        return None
    operator, chosen = Operator.of(node.target), bool(recorder.chooses(node.target))
    known = not operator.takes_tensors or recorder.translated(node.target) or private.is_composite(node.target)
    if not chosen and (known or not is_foreign(node.target)):
        return None
    if not chosen and recorder.inline.matches(operator):
        raise _refused(node, "inline= names it, and " + _CAPTURED_BEFORE)
    if private.schema_of(node.target).is_mutable:
        raise _refused(node, "it changes an argument in place, and " + _CAPTURED_BEFORE)
    return operator


def _refused(node: torch.fx.Node, why: str) -> ExportError:
    module, source = _place_of(node)
    return ExportError(f"{Operator.of(node.target).name}, called in module {module or '<root>'} at {source or 'a line unknown'}: {why}")


def _place_of(node: torch.fx.Node) -> tuple[str, str]:
    """The path of the module that made a call, and ``module.name:line`` of the code."""
    inner: Any = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())[-1]
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    if not lines:
        return inner[0], ""
    file, line = lines[-1]
    names = [name for name, module in list(sys.modules.items()) if getattr(module, "__file__", None) == file]
    return inner[0], f"{names[0] if names else file.rpartition('/')[2]}:{line}"


def _gradients(graph: torch.fx.Graph, program: torch.export.ExportedProgram) -> dict[torch.fx.Node, bool]:
    """Which values need a gradient: parameters that do, float inputs, and what is computed of them."""
    signature, flags = program.graph_signature, dict[torch.fx.Node, bool]()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            name = signature.inputs_to_parameters.get(node.name)
            flags[node] = program.state_dict[name].requires_grad if name is not None else node.name in signature.user_inputs
        else:
            flags[node] = any(flags[each] for each in node.all_input_nodes) and node.target is not torch.ops.aten.detach.default
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            flags[node] = False
    return flags


def _place(node: torch.fx.Node, operator: Operator, recorder: Recorder, flags: dict[torch.fx.Node, bool]) -> None:
    """Put the opaque operator in the place of one call."""
    made: dict[int, torch.fx.Node] = {}
    fresh: dict[torch.fx.Node, Any] = {}

    def value(leaf: Any) -> Any:
        if isinstance(leaf, (list, tuple)):  # a graph has lists of its own
            return (list if isinstance(leaf, list) else tuple)(value(each) for each in leaf)
        if not isinstance(leaf, torch.fx.Node):
            return leaf
        if leaf not in fresh:
            known = leaf.meta["val"]
            fresh[leaf] = known.detach().requires_grad_(flags[leaf]) if isinstance(known, torch.Tensor) else known
            made[id(fresh[leaf])] = leaf
        return fresh[leaf]

    args, kwargs = value(node.args), {name: value(each) for name, each in node.kwargs.items()}
    mode = private.detect_fake_mode(list(fresh.values()))
    with mode:
        key, slots = recorder.record_operator(operator, args, kwargs, *_place_of(node))
        outputs = torch.ops.pythonop.call(slots.tensors, slots.sizes, key)
    graph = node.graph
    with graph.inserting_before(node):
        inputs = [[made[id(each)] for each in values] for values in (slots.tensors, slots.sizes)]
        call = graph.call_function(torch.ops.pythonop.call.default, (*inputs, key))
    call.meta = {**node.meta, "val": [output.detach() for output in outputs]}
    _take(node, recorder.records[key].outputs.template, call)


def _take(node: torch.fx.Node, template: Any, call: torch.fx.Node) -> None:
    """Let what reads the result of an operator, or a part of it, read the call's outputs: names of nodes stay, the program's signature has them."""
    if isinstance(template, Slot):
        node.target, node.args, node.kwargs = builtin.getitem, (call, 1 + template.index), {}
        return
    for user in list(node.users):
        if user.target is not builtin.getitem:
            raise ExportError(f"{call.name}: what it returns is used as a whole, and {_CAPTURED_BEFORE}")
        _take(user, template[user.args[1]], call)
    if not node.users:
        node.graph.erase_node(node)
