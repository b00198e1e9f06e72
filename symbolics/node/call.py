"""AutogradCall: one recorded call of ``torch.autograd.Function.apply``, of an operator that ONNX does not know, or of a module that stays one node.

Either exporter makes one per call, `symbolics.node.attributes` writes it into a node and reads it back, the runtimes
run it. No torch here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from symbolics.node.arguments import encode, has_codec
from symbolics.node.classes import is_filled
from symbolics.node.containers import Slot, expand, slots

__all__ = ["Autocast", "AutogradCall", "ModuleOrigin", "OperatorOrigin"]


@dataclass(frozen=True)
class Autocast:
    """The autocast state around a call.

    Attributes:
        dtypes: device type -> dtype name, for the devices on which autocast was enabled (``{"cpu": "bfloat16"}``).
        cache: Whether casts of parameters were cached.
    """

    dtypes: dict[str, str] = field(default_factory=dict)
    cache: bool = True


@dataclass(frozen=True)
class OperatorOrigin:
    """Of a call of an operator, what another process needs to find it.

    Attributes:
        schema: Its schema, as torch writes it.
        module: The Python module whose import registers it.
    """

    schema: str
    module: str


@dataclass(frozen=True)
class ModuleOrigin:
    """Of a call of a module, what another process needs to make that module; of a call of a function that is one node, the modules among its arguments.

    Attributes:
        state: The names of its parameters and buffers: the call's first arguments, in this order.
        complex: Those that are complex in the module, by number: as arguments, they are their real and imaginary parts in a last dimension.
        changes: Those that it changes, by number: the call's result is a tuple, what the module returns and then these.
        tree: The module and those inside it, as `symbolics.node.modules` writes them; of a function, a list of modules that has those among its arguments.
        function: Whether it is a function that is called.
    """

    state: tuple[str, ...]
    complex: tuple[int, ...]
    changes: tuple[int, ...]
    tree: dict[str, Any]
    function: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class AutogradCall:
    """One call of ``Function.apply``, of an operator of torch.library, or of a module, without its tensors.

    Two calls are equal when they are written alike, so types count (``1`` is not ``True``) and nan equals nan.

    Attributes:
        id: Unique in the model and deterministic; it keeps optimizers from merging two calls.
        name: ``module:qualname`` of the class of the Function or module, or ``namespace::name.overload`` of the operator.
        args: forward's positional arguments without ctx, ``*args`` in place. Tensors and symbolic sizes are `Slot`s
            that count the node's inputs 0, 1, ... in order.
        kwargs: What forward takes as ``**kwargs``, in name order.
        outputs: What ``apply`` returned, with its tensors as `Slot`s (all of them, in order).
        input_types, input_ranks, input_requires_grads: One per tensor input: ONNX element type, rank, flag.
        output_types, output_ranks, output_requires_grads: One per tensor output.
        inplace: Whether an output reuses an input's memory (mark_dirty).
        training: Whether the module was exported in training mode.
        autocast: The autocast state around the call.
        passed: How many of ``args`` the caller passed; forward's defaults supplied the others. backward answers for
            as many, so a runner passes as many. None: all of them.
        no_gradient: The tensor inputs, by number, that need a gradient and for which backward gives None: eager has no gradient there, and neither has a
            file. Their flags stay: backward reads them in ctx.needs_input_grad, and second derivatives reach these inputs.
        no_gradient_seen: Further ones for which backward gave None at the export, and might not in every run.
        operator: Where the operator comes from; None for a Function. What it changes in place and does not return stands in ``outputs``
            behind its result.
        module: Where the module comes from; None for what is none.
    """

    id: str
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: Any = Slot(0)
    input_types: tuple[int, ...] = ()
    input_ranks: tuple[int, ...] = ()
    input_requires_grads: tuple[bool, ...] = ()
    output_types: tuple[int, ...] = ()
    output_ranks: tuple[int, ...] = ()
    output_requires_grads: tuple[bool, ...] = ()
    inplace: bool = False
    training: bool = False
    autocast: Autocast = Autocast()
    passed: int | None = None
    no_gradient: tuple[int, ...] = ()
    no_gradient_seen: tuple[int, ...] = ()
    operator: OperatorOrigin | None = None
    module: ModuleOrigin | None = None

    def flat(self) -> Iterator[Any]:
        """The flat list of arguments that letters, flags and positions index."""
        for value in (*self.args, *self.kwargs.values()):
            yield from expand(value)

    @property
    def convention(self) -> str:
        """A letter per argument: 'd' for a tensor or a symbolic size, 'c' for anything else."""
        return "".join("d" if isinstance(value, Slot) else "c" for value in self.flat())

    @property
    def output_slots(self) -> list[Slot]:
        """The slots of the tensor outputs."""
        return slots(self.outputs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AutogradCall) and _text(self) == _text(other)

    def __hash__(self) -> int:
        return hash((self.id, self.name))


def _text(call: AutogradCall) -> str:
    # Objects without a portable form are compared by identity.
    fields = {f.name: getattr(call, f.name) for f in dataclasses.fields(call) if f.name not in ("autocast", "operator", "module")}
    origin = [None if each is None else list(vars(each).values()) for each in (call.operator, call.module)]
    return json.dumps(
        encode(
            [fields, sorted(call.autocast.dtypes.items()), call.autocast.cache, origin],
            lambda v: None if has_codec(v) and not is_filled(v) else f"id {id(v)}",
        )
    )
