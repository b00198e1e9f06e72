"""What an operator of torch.library is made of, for a tracer: the dispatcher would give it one opaque node, and the result of the fake kernel."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.capture.raised import Raised
from symbolics.node.operators import Operator, is_foreign

__all__ = ["Untraceable", "check_nodes", "check_operator", "kernels_run"]


class Untraceable(Exception):
    """A call that no graph can stand for; the text says why."""


def kernels_run(raised: Raised) -> contextlib.AbstractContextManager[Any]:
    """While it is open, an operator that ONNX does not know runs its own Python kernel in place of a fake one, and a tracer sees what that calls.

    It acts below autograd: the backward stays the operator's own, as in eager mode. An operator without a Python kernel is `Untraceable`.
    """
    return private.below_autograd(functools.partial(_run, raised))


def _run(raised: Raised, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_foreign(func) or func.name() in private.torchlib_operators():
        return func(*args, **kwargs)
    if private.is_composite(func):
        with kernels_run(raised):
            return func.decompose(*args, **kwargs)
    if not private.is_python_kernel(func, "CPU"):
        raise Untraceable(f"the kernel of the operator {Operator.of(func).name} is no Python function, and a tracer cannot look into it")
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    kernel = private.kernel_of(func, "", tensors or [torch.empty(())])
    assert kernel is not None
    with kernels_run(raised), raised.mode():
        return kernel(*args, **kwargs)


def check_operator(operator: Operator) -> None:
    """Refuse an operator that a tracer must not run, or that is no function of its arguments.

    Raises:
        Untraceable: It is written in another language, or changes an argument.
    """
    overload = operator.overload
    if private.schema_of(overload).is_mutable:
        raise Untraceable("it is an operator that changes an argument in place (mutates_args), and an ONNX function changes nothing")
    if private.has_autograd_kernel(overload) and not private.is_python_kernel(overload, "AutogradCPU"):
        raise Untraceable("its backward is registered in C++, and a tracer cannot look into it")


def check_nodes(outputs: Sequence[torch.Tensor], inputs: Sequence[Any]) -> None:
    """See that the gradients of an operator's outputs are those of one Function: what that saves is a constant to a second derivative.

    Args:
        outputs: Its outputs that have a gradient.
        inputs: Its inputs, leaves of the autograd graph.

    Raises:
        Untraceable: They are not.
    """
    ends = {
        torch.autograd.graph.get_gradient_edge(value).node for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad
    }
    for node in {output.grad_fn for output in outputs}:
        assert node is not None
        if private.function_of(node) is None or not {below for below, _ in node.next_functions if below is not None} <= ends:
            raise Untraceable("it has no single backward of its own: autograd differentiates what it calls (inline= exports just that)")
