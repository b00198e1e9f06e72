"""Where a node of a file comes from, in words for people."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.graph.flatten import flattened
from symbolics.graph.values import function_of, is_python_op, operator_text, scope_of
from symbolics.graph.walk import walk
from symbolics.node.call_text import read_call
from symbolics.node.metadata import changes_of, read_state, results_of
from symbolics.node.names import CALL_ATTRIBUTE, MODULE_PROPERTY, SOURCE_PROPERTY

__all__ = ["module_of", "node_of", "opaque_parameters", "operator_of", "places_of_rows"]

#: Who reads a tensor is said by the node behind these.
_LAYOUT = frozenset(("Transpose", "Reshape", "Identity", "Cast", "Unsqueeze", "Squeeze"))


def operator_of(node: ir.Node) -> str:
    """``Gemm``, or ``com.microsoft::PythonOp of package.module:Function``."""
    name = operator_text(node)
    function = function_of(node) if node.domain else ""
    return f"{name} of {function}" if function else name


def module_of(node: ir.Node) -> str:
    """The path of the module in whose forward the node was made and, of a PythonOp, the line; empty where nothing says so.

    Of TorchScript's nodes the name has the path.
    """
    found = [node.metadata_props[key] for key in (MODULE_PROPERTY, SOURCE_PROPERTY) if node.metadata_props.get(key)]
    return ", ".join(found) if found else scope_of(node)


def node_of(node: ir.Node | None) -> str:
    """``Gemm 'node_linear' in model.head``; empty for None."""
    if node is None:
        return ""
    where = module_of(node)
    return f"{operator_of(node)} {node.name!r}" + (f" in {where}" if where else "")


def places_of_rows(model: ir.Model) -> dict[tuple[str, str], str]:
    """(kind, name) of a row -> the node that makes the output or buffer, or the first that reads the parameter or input."""

    def reader(value: ir.Value | None) -> str:
        node = None
        while value is not None and (use := next(iter(value.uses()), None)) is not None:
            node = use.node
            value = node.outputs[0] if node.op_type in _LAYOUT else None
        return node_of(node)

    graph = model.graph
    found = {("output", f"output {index}"): node_of(value.producer()) for index, value in enumerate(results_of(model))}
    found |= {("input gradient", str(value.name)): reader(value) for value in graph.inputs}
    state = read_state(model.metadata_props) or {}
    made = {value.name: node_of(value.producer()) for value in graph.outputs}
    carried = changes_of(model).carried
    found |= {("buffer", name): made[carried[entry.initializer]] for name, entry in state.items() if entry.initializer in carried}
    return found | {("parameter gradient", name): reader(graph.initializers.get(entry.initializer)) for name, entry in state.items()}


def opaque_parameters(model: ir.Model) -> set[str]:
    """The names of the parameters and buffers that opaque modules of a file hold, as the model has them."""
    held: set[str | None] = set()
    for node in walk(flattened(model).graph):
        if is_python_op(node) and CALL_ATTRIBUTE in node.attributes:
            module = read_call(node.attributes[CALL_ATTRIBUTE].as_string(), node.name or "").module
            held |= {value.name for value in node.inputs[: len(module.state) if module is not None else 0] if value is not None}
    return {name for name, entry in (read_state(model.metadata_props) or {}).items() if entry.initializer in held}
