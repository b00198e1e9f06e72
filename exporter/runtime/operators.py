"""The operator that a node calls: found in the dispatcher of this process, once the caller allows its name."""

from __future__ import annotations

from typing import Any

import torch

from exporter.files.trust import Gate
from symbolics import torch_private as private
from symbolics.errors import FormatError, TrustError
from symbolics.node.call import AutogradCall
from symbolics.node.containers import Slot, fill
from symbolics.node.operators import Operator, why_never
from symbolics.text import shown

__all__ = ["check_operator", "find_operator"]


def find_operator(call: AutogradCall, gate: Gate) -> Operator:
    """The operator that a call names.

    What is registered here is taken; else the module that registered it at the export is imported, if the caller allows that module, too.

    Args:
        call: The call, its names as text.
        gate: What the file may name.

    Raises:
        TrustError: The operator is not allowed, not there (the message says what registers it), or one of torch's own that no node may call.
    """
    base, _, overload = call.name.rpartition(".")
    namespace, _, rest = base.partition("::")
    if not (namespace.isidentifier() and rest.isidentifier() and (overload.isidentifier())):
        raise TrustError.damaged(shown(call.name), "it is not of the form namespace::name.overload")
    module = call.operator.module if call.operator is not None else ""
    gate.check_operator(call.name, module)
    found = private.find_overload(base, overload)
    if found is None:
        gate.import_for_operator(call.name, module)
        found = private.find_overload(base, overload)
    if found is None:
        raise TrustError(
            f"the operator {shown(call.name)} is allowed, but the module {shown(module)} does not register it here: install the version that the model was "
            "exported with"
        )
    if why := why_never(found):
        raise TrustError(f"the operator {shown(call.name)} is none that a node may call, whatever is allowed: {why}")
    gate.functions[call.name] = operator = Operator.of(found)
    return operator


def check_operator(title: str, operator: Operator, call: AutogradCall, args: tuple[Any, ...]) -> None:
    """See that an operator takes the arguments of a call, and changes what the file says that it changes.

    Args:
        title: How messages name the node.
        operator: As it is here.
        call: The call of the file.
        args: Its positional arguments.

    Raises:
        FormatError: It does not.
    """

    def place(leaf: Any) -> Any:
        return leaf if not isinstance(leaf, Slot) else 1 if leaf.kind == "size" else torch.empty(())

    why = operator.misfit(tuple(fill(value, place) for value in args), {key: fill(value, place) for key, value in call.kwargs.items()})
    if why is None and not call.inplace and (changed := operator.changed_by(args, call.kwargs)):
        why = f"it changes {', '.join(changed)} in place, inplace=0 says that it changes nothing"
    if why is None:
        return
    before = call.operator.schema if call.operator is not None else ""
    raise FormatError(
        f"{title}: the operator cannot be called as the file calls it: {shown(why)}\n"
        f"  it is here: {shown(operator.schema)}\n"
        + (f"  at the export: {shown(before)}\n" if before else "")
        + "The operator has changed since the export, or the file is damaged: export the model again"
    )
