"""The half of a `Binding` that needs torch: nodes become plans, and unusual values usual ones. The first PythonOp of a process loads it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from exporter.files.trust import Gate
from exporter.runtime.backward import PythonOpBackward
from exporter.runtime.chain import Chain, GradChain, title_of
from exporter.runtime.kernels import PythonOp, PythonOpGrad
from exporter.runtime.link import LINKED
from exporter.runtime.native.functions import connect
from exporter.runtime.prepare import ABSENT_INPUTS, KEPT_OUTPUTS
from exporter.runtime.store import ContextStore
from exporter.runtime.tangent import PythonOpTangent
from symbolics.errors import FormatError, RunError
from symbolics.node.attributes import GRAD_SPECS, SPECS
from symbolics.node.backward import BACKWARD_SPECS
from symbolics.node.containers import Slot
from symbolics.node.dtypes import DTYPES
from symbolics.node.names import PYTHON_OP, PYTHON_OP_BACKWARD, PYTHON_OP_GRAD, PYTHON_OP_TANGENT
from symbolics.text import shown

__all__ = ["ATTRIBUTES", "KernelPlan", "connect", "device_run", "device_write", "fix", "plan_of", "title_of", "view"]

_AnyKernel = PythonOp | PythonOpGrad
_COMPLEX = (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128)
# How nodes.c reads an attribute of each type.
_KINDS = {"STRING": "s", "INT": "i", "INTS": "I", "FLOATS": "F"}
# A flag of KernelPlan, by the name that tensors.h has for it.
_WATCHED = 2


def _attribute_kinds(specs: dict[str, Any], *more: str) -> tuple[tuple[str, str], ...]:
    return (*((name, _KINDS[kind.name]) for name, (kind, *_) in specs.items()), *((name, "I") for name in more), (LINKED, "s"))


#: operator -> its attributes, and how nodes.c reads each.
ATTRIBUTES: dict[str, tuple[tuple[str, str], ...]] = {
    PYTHON_OP: _attribute_kinds(SPECS, ABSENT_INPUTS),
    PYTHON_OP_GRAD: _attribute_kinds(GRAD_SPECS, ABSENT_INPUTS, KEPT_OUTPUTS),
    PYTHON_OP_BACKWARD: _attribute_kinds(BACKWARD_SPECS, ABSENT_INPUTS, KEPT_OUTPUTS),
    PYTHON_OP_TANGENT: _attribute_kinds(SPECS, ABSENT_INPUTS, KEPT_OUTPUTS),
}


class KernelPlan(NamedTuple):
    """How one node runs, as kernel_of() in kernels.c reads it by position: its enum PLAN_... has the same names in this order.

    Attributes:
        kernel: What runs everything unusual.
        flags: One per tensor argument: whether it (PythonOp) or its gradient (PythonOpGrad) is wanted; `_WATCHED` where a gradient would be an error.
        kinds: The ONNX element type of each output, 0 where the file does not say.
        places: The tensor arguments (PythonOp) or gradients (PythonOpGrad) that are inputs of the node.
        inputs: How many tensor arguments, or gradients, there are.
        id, name: The call and the Function.
        fast: Whether the native library may call the Function, or the engine, itself.
        written: What the outputs of the node are, without the context: tensor outputs, or the tensor arguments of the gradients.
        single: Of a PythonOp, as what follows: whether forward returns one tensor and no tuple.
        apply, arguments: ``Function.apply``, and its arguments with None in the places of tensors.
        positions: Where among the arguments each tensor goes.
        log: The session's `PoolLog.entries`, for handles made on threads that no run stands on; None in a plain session.
        long: Whether torch has all of its threads from the first call on; else when calls on one have taken long (threads.h).
        alone: Whether the session has one thread, which leaves torch the others.
    """

    kernel: _AnyKernel
    flags: tuple[int, ...]
    kinds: tuple[int, ...]
    places: tuple[int, ...]
    inputs: int
    id: str
    name: str
    fast: bool = True
    written: tuple[int, ...] = ()
    single: bool = False
    apply: Callable[..., Any] | None = None
    arguments: tuple[Any, ...] = ()
    positions: tuple[int, ...] = ()
    log: list[Any] | None = None
    long: bool = False
    alone: bool = False


def plan_of(
    operator: str,
    attributes: dict[str, Any],
    node_name: str,
    inputs: int,
    outputs: Sequence[bool],
    gate: Gate,
    store: ContextStore,
    *,
    forward: type[PythonOp] = PythonOp,
    tangent: type[PythonOpTangent] = PythonOpTangent,
) -> KernelPlan:
    """How a node runs; decoded once, when its session is made.

    Args:
        operator: A key of `ATTRIBUTES`.
        attributes: name -> value, of those that `ATTRIBUTES` lists.
        node_name: The node's name, for messages.
        inputs: How many inputs the node has.
        outputs: One per output of the node: whether it has a name.
        gate, store: What the file may name, and where contexts go.
        forward, tangent: What runs a PythonOp, and a PythonOpTangent.

    Raises:
        FormatError, TrustError: An attribute is malformed, does not fit the node, or names what is not allowed.
    """
    title = f"{operator} {shown(node_name)!r}"
    for name, kind in ATTRIBUTES[operator]:
        # native.c reads what is there, of whatever type; symbolics.node.attributes looks at all but these
        if name in (ABSENT_INPUTS, KEPT_OUTPUTS, LINKED) and not _is_of(attributes.get(name), kind):
            raise FormatError.damaged(title, f"the attribute {name} is of another type")
    for name, value in attributes.items():
        # native.c carries bytes that are no UTF-8 as lone surrogates
        if isinstance(value, str) and any("\udc80" <= letter <= "\udcff" for letter in value):
            raise FormatError.damaged(title, f"the attribute {name} is not UTF-8")
    absent = attributes.pop(ABSENT_INPUTS, [])
    kept = attributes.pop(KEPT_OUTPUTS, None)
    linked = attributes.pop(LINKED, None)
    kernel: _AnyKernel
    if operator == PYTHON_OP_BACKWARD:
        kernel = PythonOpBackward(attributes, store, node_name)
        plan = _plan_backward(kernel, absent, kept, inputs, outputs)
        kernel.keeps = len(kernel.wanted) in plan.written
    elif operator == PYTHON_OP_TANGENT:
        kernel = tangent(attributes, gate, store, node_name)
        plan = _plan_tangent(kernel, absent, kept, inputs, outputs)
    elif operator == PYTHON_OP_GRAD:
        kernel = PythonOpGrad(attributes, store, node_name) if linked is None else GradChain(attributes, linked, store, node_name)
        plan = _plan_backward(kernel, absent, kept, inputs, outputs)
    else:
        kernel = forward(attributes, gate, store, node_name) if linked is None else Chain(attributes, linked, gate, store, node_name)
        plan = _plan_forward(kernel, absent, inputs, outputs)
    return plan


def view(tensor: torch.Tensor, kind: int) -> torch.Tensor:
    """Bytes as the float8 that they are."""
    return tensor.view(DTYPES[kind])


def fix(kernel: _AnyKernel, index: int, value: Any) -> torch.Tensor:
    """An output that is not a dense CPU tensor of the promised type, as one that DLPack can say.

    Raises:
        RunError: It cannot be made one without changing what it means.
    """
    if index < 0:
        count = len(value) if isinstance(value, tuple) else 1
        raise RunError(f"{kernel.title} returned {count} values, not what it returned when it was exported: export it as it is used now")
    if isinstance(kernel, PythonOp):
        value = kernel.check(index, value)
    else:
        value = kernel.fix(index, value)
    value = value.detach()
    value = (value.to_dense() if value.layout is not torch.strided else value).resolve_conj().resolve_neg().cpu().contiguous()
    if value.dtype.is_floating_point and value.dtype.itemsize == 1:
        value = value.view(torch.uint8)
    return value


def device_run(kernel: _AnyKernel, inputs: list[Any], extra: Any, stream: int) -> list[Any]:
    """One run where the tensors live on a device; they are the runtime's, so the call gets copies.

    Args:
        kernel: The node.
        inputs: Tensors over the runtime's memory, None where absent.
        extra: Whether the context is read (forward), or the handle (backward).
        stream: The runtime's CUDA stream, 0 for none.

    Returns:
        One item per output; a forward's first is the handle.
    """
    with _on_stream(stream):
        own = [None if tensor is None else tensor.clone() for tensor in inputs]
        inputs.clear()
        if isinstance(kernel, PythonOpGrad):
            return kernel.run(extra, own)
        handle, outputs = kernel.run(own, extra)
        if isinstance(kernel, PythonOpTangent):
            return outputs
        return [torch.tensor(handle, dtype=torch.int64), *outputs]


def device_write(target: torch.Tensor, value: torch.Tensor, stream: int) -> None:
    """Copy an output into the runtime's memory."""
    with _on_stream(stream), torch.no_grad():
        target.copy_(value)


def _plan_forward(kernel: PythonOp, absent: Sequence[int], inputs: int, outputs: Sequence[bool]) -> KernelPlan:
    call, count = kernel.call, len(kernel.flags)
    places = _present(kernel, absent, count)
    if inputs != len(places):
        raise FormatError.damaged(kernel.title, f"the graph gives it {inputs} tensors, its attributes say {len(places)}")
    if len(outputs) > 1 + len(call.output_types):
        raise FormatError.damaged(
            kernel.title, f"it has {len(outputs)} outputs in the graph, a context and {len(call.output_types)} by its attributes"
        )
    positions = tuple(i for i, value in enumerate(kernel.args) if isinstance(value, Slot))
    return KernelPlan(
        kernel,
        kernel.flags,
        kinds=tuple(call.output_types),
        places=places,
        inputs=count,
        written=tuple(range(len(outputs) - 1)),
        id=call.id,
        name=call.name,
        fast=kernel.simple,
        single=isinstance(call.outputs, Slot),
        apply=kernel.apply,
        arguments=tuple(None if isinstance(value, Slot) else value for value in kernel.args),
        positions=positions if kernel.simple else (0,) * count,
    )


def _plan_tangent(
    kernel: PythonOpTangent, absent: Sequence[int], kept: Sequence[int] | None, inputs: int, outputs: Sequence[bool]
) -> KernelPlan:
    call, count = kernel.call, 2 * len(kernel.flags)
    kinds = (*call.output_types, *call.output_types)
    places = _present(kernel, absent, count)
    if not absent and inputs < count:  # onnxruntime leaves out empty names at the end
        places = places[:inputs]
    if inputs != len(places):
        raise FormatError.damaged(kernel.title, f"the graph gives it {inputs} tensors, its attributes say {len(places)}")
    written = tuple(range(len(kinds))) if kept is None else _increasing(kernel, KEPT_OUTPUTS, kept, len(kinds))
    if len(outputs) > len(written):
        raise FormatError.damaged(kernel.title, f"it has {len(outputs)} outputs in the graph, {len(written)} by its attributes")
    for place, named in zip(written, outputs, strict=False):
        kind = ir.DataType(kinds[place])
        if named and place >= len(call.output_types) and not (kind.is_floating_point() or kind in _COMPLEX):
            # Nothing would be written there, and onnxruntime would read it.
            raise FormatError.damaged(kernel.title, f"its output {place} has a name, and is the tangent of an output of type {kind.name}")
    return KernelPlan(
        kernel,
        (False,) * count,
        kinds=kinds,
        places=places,
        inputs=count,
        written=written[: len(outputs)],
        id=call.id,
        name=call.name,
        fast=False,
        positions=(0,) * count,
    )


def _plan_backward(
    kernel: PythonOpGrad, absent: Sequence[int], kept: Sequence[int] | None, inputs: int, outputs: Sequence[bool]
) -> KernelPlan:
    again = isinstance(kernel, PythonOpBackward)
    wanted = (
        (*kernel.wanted, True, True) if again else kernel.wanted
    )  # the last outputs of a PythonOpBackward: its context, and what is there
    count, others = len(wanted), len(kernel.wanted) if again else kernel.count
    if inputs > 1 + kernel.count + others:
        raise FormatError.damaged(
            kernel.title,
            f"it has {inputs} inputs in the graph, by its attributes a context, {kernel.count} gradients and {others} values that only order it",
        )
    written = tuple(range(count)) if kept is None else _increasing(kernel, KEPT_OUTPUTS, kept, count)
    if len(outputs) > len(written):
        raise FormatError.damaged(kernel.title, f"it has {len(outputs)} outputs in the graph, {len(written)} by its attributes")
    for place, named in zip(written, outputs, strict=False):
        # Nothing would be written there, and onnxruntime would read it.
        if named and not wanted[place]:
            raise FormatError.damaged(kernel.title, f"its output {place} has a name, and its attributes say that it is not wanted")
    kinds = tuple(kind if kind in DTYPES else 0 for kind in kernel.output_types) or (0,) * len(kernel.wanted)
    kinds = (*kinds, int(ir.DataType.INT64), int(ir.DataType.BOOL)) if again else kinds
    places = _present(kernel, absent, kernel.count)
    flags = tuple(_WATCHED if i in kernel.watched else int(want) for i, want in enumerate(wanted))
    return KernelPlan(kernel, flags, kinds, places, kernel.count, kernel.id, kernel.name, written=written[: len(outputs)])


def _present(kernel: _AnyKernel, absent: Sequence[int], count: int) -> tuple[int, ...]:
    missing = set(_increasing(kernel, ABSENT_INPUTS, absent, count))
    return tuple(place for place in range(count) if place not in missing)


def _increasing(kernel: _AnyKernel, name: str, places: Sequence[int], count: int) -> tuple[int, ...]:
    """Places as `prepare` writes them: each once, in order, within ``count``; native.c relies on it."""
    if not all(before < place for before, place in zip((-1, *places), (*places, count), strict=True)):
        raise FormatError.damaged(kernel.title, f"{name} does not count up among its {count} places")
    return tuple(places)


def _is_of(value: Any, kind: str) -> bool:
    """Whether an attribute is absent, or a text (kind "s"), or a list of ints."""
    if value is None or kind == "s":
        return value is None or isinstance(value, str)
    return isinstance(value, list) and all(type(item) is int for item in value)


def _on_stream(stream: int) -> contextlib.AbstractContextManager[Any]:
    if not stream:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream))
