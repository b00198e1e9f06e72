"""What the native library calls in Python: nodes become plans, errors become text, and unusual values usual ones."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from exporter.files.trust import Gate
from exporter.runtime.fusion.chain import Chain, GradChain, title_of
from exporter.runtime.fusion.link import LINKED
from exporter.runtime.kernels import PythonOp, PythonOpGrad
from exporter.runtime.prepare import ABSENT_INPUTS, KEPT_OUTPUTS
from exporter.runtime.store import ContextStore
from symbolics.errors import FormatError, RunError
from symbolics.node.attributes import GRAD_SPECS, SPECS
from symbolics.node.containers import Slot
from symbolics.node.dtypes import DTYPES

__all__ = ["Binding", "KernelPlan"]

_AnyKernel = PythonOp | PythonOpGrad
# How native.c reads an attribute of each type.
_KINDS = {"STRING": "s", "INT": "i", "INTS": "I", "FLOATS": "F"}


class KernelPlan(NamedTuple):
    """How one node runs, as make_kernel() in native.c reads it by position: its enum PLAN_... has the same names in this order.

    Attributes:
        kernel: What runs everything unusual.
        flags: One per tensor argument: whether it (PythonOp) or its gradient (PythonOpGrad) is wanted.
        kinds: The ONNX element type of each output, 0 where the file does not say.
        places: The tensor arguments (PythonOp) or gradients (PythonOpGrad) that are inputs of the node.
        inputs: How many tensor arguments, or gradients, there are.
        id, name: The call and the Function.
        fast: Whether the native library may call the Function, or the engine, itself.
        written: Of a PythonOpGrad: the tensor arguments whose gradients are outputs of the node.
        single: Of a PythonOp, as what follows: whether forward returns one tensor and no tuple.
        apply, arguments: ``Function.apply``, and its arguments with None in the places of tensors.
        positions: Where among the arguments each tensor goes.
    """

    kernel: _AnyKernel
    flags: tuple[bool, ...]
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


def _attribute_kinds(specs: dict[str, Any], *more: str) -> tuple[tuple[str, str], ...]:
    return (*((name, _KINDS[kind.name]) for name, (kind, *_) in specs.items()), *((name, "I") for name in more), (LINKED, "s"))


class Binding:
    """What the native library calls: one per SessionOptions. It turns nodes into plans, once, and errors into text."""

    forward_attributes = _attribute_kinds(SPECS, ABSENT_INPUTS)
    backward_attributes = _attribute_kinds(GRAD_SPECS, ABSENT_INPUTS, KEPT_OUTPUTS)

    def __init__(self, gate: Gate, store: ContextStore) -> None:
        self.gate = gate
        self.store = store
        self.errors: OrderedDict[str, BaseException] = OrderedDict()

    def plan(self, backward: bool, attributes: dict[str, Any], node_name: str) -> KernelPlan:
        """How a node runs; decoded once, when its session is made.

        Args:
            backward: Whether it is a PythonOpGrad.
            attributes: name -> value, of those that `forward_attributes` or `backward_attributes` list.
            node_name: The node's name, for messages.

        Raises:
            FormatError, TrustError: An attribute is malformed, or names what is not allowed.
        """
        absent = attributes.pop(ABSENT_INPUTS, [])
        kept = attributes.pop(KEPT_OUTPUTS, None)
        linked = attributes.pop(LINKED, None)
        if backward:
            grad = GradChain(attributes, linked, self.store, node_name) if linked else PythonOpGrad(attributes, self.store, node_name)
            return _plan_backward(grad, absent, kept)
        if linked:
            return _plan_forward(Chain(attributes, linked, self.gate, self.store, node_name), absent)
        return _plan_forward(PythonOp(attributes, self.gate, self.store, node_name), absent)

    def strings(self, values: Any, shape: tuple[int, ...] | None) -> Any:
        """A list of str as an array of that shape; and without a shape the inverse: (shape, list of bytes)."""
        if shape is None:
            array = np.asarray(values, dtype=object)
            return array.shape, [str(item).encode("utf-8", "surrogateescape") for item in array.flat]
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array.reshape(shape)

    def view(self, tensor: torch.Tensor, kind: int) -> torch.Tensor:
        """Bytes as the float8 that they are."""
        return tensor.view(DTYPES[kind])

    def fix(self, kernel: _AnyKernel, index: int, value: Any) -> torch.Tensor:
        """An output that is not a dense CPU tensor of the promised type, as one that DLPack can say.

        Raises:
            RunError: It cannot be made one without changing what it means.
        """
        if index < 0:
            count = len(value) if isinstance(value, tuple) else 1
            raise RunError(
                f"{kernel.title} returned {count} values, not what it returned when it was exported: export it as it is used now"
            )
        if isinstance(kernel, PythonOp):
            value = kernel.check(index, value)
        else:
            value = kernel.fix(index, value)
        value = value.detach()
        value = (value.to_dense() if value.layout is not torch.strided else value).resolve_conj().resolve_neg().cpu().contiguous()
        if value.dtype.is_floating_point and value.dtype.itemsize == 1:
            value = value.view(torch.uint8)
        return value

    def escaped(self, kernel: _AnyKernel, changed: bool) -> None:
        """Raises:
        RunError: A run did with an input what the runs before it had not done.
        """
        what = "changed an input in place" if changed else "kept an input"
        raise RunError(
            f"{kernel.title} {what} in this run, and had not in its first: its inputs are the runtime's memory, which this run cannot take back. "
            "From the next run on it gets copies; declare the change with ctx.mark_dirty, or keep inputs with ctx.save_for_backward in every run"
        )

    def device_run(self, kernel: _AnyKernel, inputs: list[Any], extra: Any, stream: int) -> list[Any]:
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
            return [torch.tensor(handle, dtype=torch.int64), *outputs]

    def device_write(self, target: torch.Tensor, value: torch.Tensor, stream: int) -> None:
        """Copy an output into the runtime's memory."""
        with _on_stream(stream), torch.no_grad():
            target.copy_(value)

    _numbers = itertools.count(1)

    def failed(self, kernel: _AnyKernel | None, error: BaseException) -> str:
        """The text of an exception for onnxruntime; the exception itself waits for `Session`."""
        title = title_of(kernel, error) if kernel is not None else "while the session was made"
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        # Frames keep their locals, and with them tensors over memory that is not ours any more.
        traceback.clear_frames(error.__traceback__)
        token = f"pythonop-error-{next(self._numbers)}"
        self.errors[token] = error
        while len(self.errors) > 8:  # a plain InferenceSession never asks for them
            self.errors.popitem(last=False)
        return f"{title} [{token}]\n{text}"

    def original(self, error: BaseException) -> BaseException | None:
        """The exception behind what onnxruntime raised."""
        text = str(error)
        start = text.find("[pythonop-error-")
        return self.errors.pop(text[start + 1 : text.find("]", start)], None) if start >= 0 else None


def _plan_forward(kernel: PythonOp, absent: Sequence[int]) -> KernelPlan:
    call, count = kernel.call, len(kernel.flags)
    positions = tuple(i for i, value in enumerate(kernel.args) if isinstance(value, Slot))
    return KernelPlan(
        kernel,
        kernel.flags,
        kinds=tuple(call.output_types),
        places=tuple(i for i in range(count) if i not in absent),
        inputs=count,
        id=call.id,
        name=call.name,
        fast=kernel.simple,
        single=isinstance(call.outputs, Slot),
        apply=kernel.apply,
        arguments=tuple(None if isinstance(value, Slot) else value for value in kernel.args),
        positions=positions if kernel.simple else (0,) * count,
    )


def _plan_backward(kernel: PythonOpGrad, absent: Sequence[int], kept: Sequence[int] | None) -> KernelPlan:
    count = len(kernel.wanted)
    written = tuple(range(count) if kept is None else kept)
    if not all(0 <= place < count for place in written):
        raise FormatError.damaged(kernel.title, f"{KEPT_OUTPUTS} names an output that is not there")
    kinds = tuple(kind if kind in DTYPES else 0 for kind in kernel.output_types) or (0,) * count
    places = tuple(i for i in range(kernel.count) if i not in absent)
    return KernelPlan(kernel, kernel.wanted, kinds, places, kernel.count, kernel.id, kernel.name, written=written)


def _on_stream(stream: int) -> contextlib.AbstractContextManager[Any]:
    if not stream:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream))
