"""How a call of an operator is caught before it begins, above autograd: ``torch.ops.mylib.op(x)``, and what ends in it (a custom_op).

What calls an operator from Python calls one of two classes. What calls one from C++ or TorchScript, inside another operator, goes past:
it belongs to that other operator. Below: what becomes of a call where a model is exported.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.capture.inlining import closed_over
from symbolics.errors import ExportError
from symbolics.node.call import OperatorOrigin
from symbolics.node.operators import Operator, is_foreign

__all__ = ["UNDER_TRANSFORMS", "intercept_operators", "is_translated", "origin_of", "run_inlined"]

#: Why there is no node, also where the operator has a rule for vmap: the exporters stand before it.
UNDER_TRANSFORMS = "it is called under torch.func (vmap, grad, jvp), where there is no single call to keep: call it outside, on the whole batch, or name it in inline="

StandIn = Callable[[Any, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]


def intercept_operators(stand_in: StandIn, wanted: Callable[[], bool]) -> Callable[[], None]:
    """Catch every call of an operator that is not torch's own, in every thread, until the returned function is called.

    Args:
        stand_in: Called with the overload, the arguments, and what makes the call as it was.
        wanted: Whether a call of this thread, now, is to be caught.

    Returns:
        What undoes it.
    """
    originals = [(cls, cls.__call__) for cls in private.operator_classes()]

    def patched(original: Any) -> Any:
        def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not wanted() or not is_foreign(self):
                return original(self, *args, **kwargs)
            try:
                overload = private.overload_of(self, args, kwargs)
            except RuntimeError:  # none takes these arguments: the call has the words for it
                return original(self, *args, **kwargs)
            return stand_in(overload, args, kwargs, lambda: original(self, *args, **kwargs))

        return __call__

    for cls, original in originals:
        cls.__call__ = patched(original)  # type: ignore[method-assign]

    def undo() -> None:
        for cls, original in originals:
            cls.__call__ = original  # type: ignore[method-assign]

    return undo


def is_translated(overload: Any, given: Any, opset: int | None) -> bool:
    """Whether an exporter has a translation of an operator: one that the user gave, or torch's.

    Args:
        overload: The operator.
        given: The operators that the user gave translations of (dynamo=True), None for the TorchScript exporter.
        opset: The opset of the export, where TorchScript's translations are asked for; None: torch's own.
    """
    if given is None:
        return private.torchscript_has(private.schema_of(overload).name, opset)
    return overload in given or overload.name() in private.torchlib_operators()


def origin_of(operator: Operator, source: str) -> OperatorOrigin:
    """What another process needs to find an operator.

    Args:
        operator: The operator.
        source: ``module.name:line`` of the code that called it.
    """
    if not is_foreign(operator.overload):
        return OperatorOrigin(operator.schema, "torch")
    namespace, caller = operator.__module__, source.partition(":")[0]
    found = [name for name in _registrars(operator) if name.partition(".")[0] != "torch"]
    # A helper may register for others: who names the namespace, or whose package does, is no helper. Whoever calls the operator has it at hand in any process.
    named = [name for name in found if _names(name, namespace) or _names(name.rpartition(".")[0], namespace)]
    package = [namespace] if namespace in sys.modules else []
    known = [name for name in (*named, *package, caller, *found) if name and name != "__main__"]
    return OperatorOrigin(operator.schema, known[0] if known else "__main__")


def _names(module: str, namespace: str) -> bool:
    """Whether the source of a module names a namespace of operators."""
    return any(namespace in line for line in linecache.getlines(getattr(sys.modules.get(module), "__file__", None) or ""))


def _registrars(operator: Operator) -> Iterator[str]:
    """The modules that may have registered an operator; C++ says nothing of modules."""
    definition = private.definition_of(operator.overload)
    while definition is not None:
        if definition.__module__ in sys.modules:
            yield definition.__module__
        # triton_op wraps what it is given.
        closed = dict(closed_over(definition))
        definition = closed.get("fn") if callable(closed.get("fn")) else None
    place = private.registered_at(operator.overload)
    yield from [name for name, module in list(sys.modules.items()) if getattr(module, "__file__", None) == place]


def run_inlined(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator is made of, as the model's own code.

    Raises:
        ExportError: No exporter can look into it.
    """
    overload = operator.overload
    if private.is_composite(overload):
        return overload.decompose(*args, **kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    kernel = private.definition_of(overload)
    if kernel is None and private.has_autograd_kernel(overload):
        kernel = private.kernel_of(overload, "Autograd", tensors)
    kernel = kernel or private.kernel_of(overload, "", tensors)
    if kernel is None:
        raise ExportError(
            "it cannot be inlined: it has no kernel for these tensors; leave it out of inline=, or give the exporter a translation of it"
        )
    return kernel(*args, **kwargs)
