"""What hangs on the outputs of a model: in its graph, and in the autograd graph of an eager run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import onnx_ir as ir
import torch

from symbolics.gradients import RULES
from symbolics.graph.values import is_mark, is_python_op, may_be_float
from symbolics.graph.walk import subgraphs
from symbolics.node.names import CALL_ATTRIBUTE
from symbolics.users import warn

__all__ = ["calls_with_gradient", "cut_off", "parameters_behind", "warn_of_others"]


def parameters_behind(results: Iterable[torch.Tensor], model: torch.nn.Module) -> tuple[list[str], list[torch.nn.Parameter]]:
    """The names of the parameters that an eager run gives a gradient, and those parameters that it gives one and that are not the model's.

    Args:
        results: The tensors that the model returned.
        model: The model.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    todo = list({tensor.grad_fn for tensor in results if tensor.grad_fn is not None})
    found = {id(tensor) for tensor in results if tensor.grad_fn is None}
    seen, others = set(todo), list[torch.nn.Parameter]()
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        found.add(id(leaf))
        if isinstance(leaf, torch.nn.Parameter) and id(leaf) not in names and type(node).__name__ == "AccumulateGrad":
            others.append(leaf)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)
    return [name for key, name in names.items() if key in found], others


def warn_of_others(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Say that a file holds parameters as constants, for no module of the model has them."""
    if parameters:
        count = len(parameters)
        shapes = ", ".join(str(list(parameter.shape)) for parameter in parameters[:5])
        warn(
            f"the model computes with {count} parameter{'s that are' if count > 1 else ' that is'} not its own (shape{'s' if count > 1 else ''} {shapes}"
            f"{', ...' if count > 5 else ''}; held in a list, a closure or a global variable): the file holds {'their' if count > 1 else 'its'} values, and no "
            "gradient of them. Make the parameter, or the module that has it, an attribute of the model."
        )


def cut_off(model: ir.Model, names: Iterable[str]) -> list[str]:
    """Those initializers that no output depends on in a way that a gradient could take; a mark stops it.

    Args:
        model: The model.
        names: The initializers that are asked about.
    """
    reached: set[str | None] = set()
    seen: set[int] = set()
    todo = list(model.graph.outputs)
    while todo:
        value = todo.pop()
        node = value.producer()
        if node is None:
            reached.add(value.name)
        elif id(node) not in seen and not is_mark(node):
            seen.add(id(node))
            todo += [v for v in node.inputs if v is not None]
            todo += [output for body in subgraphs(node) for output in body.outputs]
    return [name for name in names if name in model.graph.initializers and name not in reached]


def calls_with_gradient(model: ir.Model) -> Iterator[ir.Node]:
    """The PythonOps between the outputs of a model and what needs a gradient: the walk stops where gradients do."""
    seen: set[int] = set()
    todo = [value for value in model.graph.outputs if value is not None]
    while todo:
        value = todo.pop()
        node = value.producer()
        if node is None or id(node) in seen or not _has_gradient(value, node):
            continue
        if is_mark(node):
            continue
        if is_python_op(node) and CALL_ATTRIBUTE in node.attributes:
            differentiable = node.attributes.get("output_requires_grads")
            position = value.index()  # 0 is the context
            if not position or (differentiable is not None and not differentiable.as_ints()[position - 1]):
                continue
            seen.add(id(node))
            flags = node.attributes.get("input_requires_grads")
            if flags is not None and any(flags.as_ints()):
                yield node
                todo += [v for v in node.inputs if v is not None]
            continue
        seen.add(id(node))
        todo += [v for v in node.inputs if v is not None]
        todo += [output for body in subgraphs(node) for output in body.outputs]


def _has_gradient(value: ir.Value, node: ir.Node) -> bool:
    """Whether a value may have a gradient: a float, or an integer that a gradient passes straight through (QuantizeLinear)."""
    rule = RULES.get((node.domain, node.op_type))
    return may_be_float(value) or (rule is not None and rule.straight_through)
