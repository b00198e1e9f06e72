"""Tensors of torch, values of onnxruntime and numpy arrays: how one becomes another, and sessions on tensors."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from exporter.files.tensors import new_bytes
from exporter.runtime.library import put_to_sleep
from symbolics import torch_private as private
from symbolics.errors import FormatError, RunError
from symbolics.node.dtypes import DTYPES

__all__ = ["LARGE", "Runner", "TensorPool", "tensor", "to_array", "to_tensor"]

#: Bytes from which numpy asks Linux for huge pages.
LARGE = 1 << 22
# How many times as long as the run before a run may count. What makes a single one long is that its thread waits for a processor; if torch's threads
# were put to sleep for that, which wakes them first, so might the next one, and the one after it.
_GROWTH = 1.25

_ELEMENT_TYPES = {dtype: kind for kind, dtype in DTYPES.items()}
# numpy knows these only through ml_dtypes, torch only as its own: the bits pass as unsigned integers.
_TO_NUMPY = {dtype: ir.DataType(kind).numpy() for kind, dtype in DTYPES.items() if kind >= ir.DataType.BFLOAT16}
_TO_TORCH = {kind: dtype for dtype, kind in _TO_NUMPY.items()}
_FLOAT8 = frozenset(dtype for dtype in DTYPES.values() if dtype.is_floating_point and dtype.itemsize == 1)
# What torch's DLPack says and onnxruntime's reads.
_SHARED = frozenset(
    ir.DataType[kind] for kind in "FLOAT DOUBLE FLOAT16 BFLOAT16 INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL".split()
)


def to_tensor(array: Any, *, share: bool = False) -> Any:
    """A tensor of its own memory; arrays of strings stay arrays.

    Args:
        array: A numpy array or scalar of any type that onnx.reference holds.
        share: The tensor takes the array's memory over: it is contiguous, and nobody else has it.

    Raises:
        RunError: torch has no such type (float4, int4, int2 and their like).
    """
    array = np.asarray(array)
    if array.dtype.kind in "OUST":
        return array.astype(object)
    dtype = _TO_TORCH.get(array.dtype)
    if dtype is not None:
        bits = np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.dtype.itemsize}")
        return torch.from_numpy(bits if share else bits.copy()).view(dtype)
    try:
        return torch.from_numpy(array if share else array.copy(order="C"))
    except TypeError as error:
        raise RunError(
            f"a PythonOp, PythonOpGrad or PythonOpTangent is given a tensor of type {array.dtype}, which torch does not have: Cast it to int8 or float in the graph"
        ) from error


def to_array(value: Any) -> np.ndarray:
    """The inverse of `to_tensor`."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value, dtype=object)
    value = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    kind = _TO_NUMPY.get(value.dtype)
    if kind is not None:
        return value.view(torch.uint16 if kind.itemsize == 2 else torch.uint8).numpy().view(kind).copy()
    return value.numpy().copy()


#: Where a tensor without elements lies, for who wants an address.
_SOMEWHERE = torch.zeros(1)


class TensorPool:
    """New tensors on the CPU, the large ones in memory that earlier ones have left: a system may take seconds for a gigabyte."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: bytes -> memory, and what a tensor over it keeps alive.
        self._blocks: dict[int, list[tuple[np.ndarray, weakref.ref[np.ndarray]]]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As torch.empty; nobody else has the memory, nor gets it while a tensor, a view or an array over it is there."""
        count = math.prod(shape) * dtype.itemsize
        if count < LARGE:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            blocks = self._blocks.setdefault(count, [])
            place = next((i for i, (_, user) in enumerate(blocks) if user() is None), len(blocks))
            memory = blocks[place][0] if place < len(blocks) else new_bytes(count)
            view = memory[:]  # torch holds this one
            blocks[place : place + 1] = [(memory, weakref.ref(view))]
        return torch.from_numpy(view).view(dtype).view(shape)


class Runner:
    """A session whose inputs and outputs are torch tensors, or values of another runner's outputs that pass through unseen.

    Inputs are read where they lie. Outputs are onnxruntime's memory: `tensor` looks at it without a copy. Nothing of a run is kept
    for the next but the seconds that it took, so threads may share a runner.
    """

    def __init__(
        self, session: Any, device: torch.device, *, after_torch: bool = False, shapes: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Args:
        session, device: What runs, and where its outputs are.
        after_torch: Whether torch computes between two runs, on the thread that makes them.
        shapes: Of outputs that the session makes of another shape with as many elements, on the CPU: the one that their tensors have.
        """
        self.session = session
        self._took = 0.0 if after_torch and device.type == "cpu" else None
        self.device = device.type
        self.index = device.index or 0
        self.inputs = {value.name: _element_type(value.type) for value in session.get_inputs()}
        self.scalars = frozenset(value.name for value in session.get_inputs() if value.shape == [])  # onnxruntime takes more for them
        #: Input -> the axes whose size has a name that other inputs may share, and no formula: (axis, name).
        self.named = {
            value.name: [(axis, size) for axis, size in enumerate(value.shape) if isinstance(size, str) and size.isidentifier()]
            for value in session.get_inputs()
            if isinstance(value.shape, list)
        }
        self.types = {value.name: _element_type(value.type) for value in session.get_outputs()}
        self.names = list(self.types)
        self.shapes = {value.name: value.shape for value in session.get_outputs()}  # as the model declares them: numbers, and names or None
        self._made = {place: self.shapes[name] for place, name in enumerate(self.names) if name in (shapes or {})}
        self.shapes |= shapes or {}
        self.places = {name: i for i, name in enumerate(self.names)}
        # Which outputs a vector itself says in DLPack: its bool is a type that not every release has.
        self._direct = [
            device.type == "cpu" and _says_dlpack() and kind in _SHARED and kind != ir.DataType.BOOL for kind in self.types.values()
        ]
        # Values handed over in one vector cost a fifth of a binding. It takes what DLPack can say, from onnxruntime 1.24 on.
        self._vector = _Vectors(session, self.inputs, self.names) if device.type == "cpu" and _takes_vectors(self.inputs.values()) else None

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """One run by names, of which nothing is left but its outputs; else as `run_owning`.

        Returns:
            name -> what onnxruntime.OrtValue wraps.
        """
        found, handles = self.run_owning([feeds[name] for name in self.inputs])
        self.session.store.free_all(handles)
        return {name: found[i] for i, name in enumerate(self.names)}

    @property
    def takes_room(self) -> bool:
        """Whether `run_owning` can write into tensors that it is given."""
        return self._vector is not None and all(self._direct)

    def run_owning(self, values: Sequence[Any], room: Sequence[torch.Tensor] = ()) -> tuple[Any, Sequence[int]]:
        """One run; the contexts that PythonOps have left in its store are the caller's to free.

        Args:
            values: In the order of the inputs, and of their types.
            room: What the outputs are written into, one for each, of its type and shape and contiguous; only where `takes_room`. Without it
                they are onnxruntime's memory.

        Returns:
            The outputs in the order of ``names``, as onnxruntime.OrtValue wraps them, and the handles of the contexts.
        """
        if self._took is None:
            return self._run_owning(values, room)
        put_to_sleep(self._took)
        begin = time.perf_counter()
        try:
            return self._run_owning(values, room)
        finally:
            took = time.perf_counter() - begin
            self._took = min(took, _GROWTH * self._took) if self._took else took

    def _run_owning(self, values: Sequence[Any], room: Sequence[torch.Tensor]) -> tuple[Any, Sequence[int]]:
        if self._vector is not None:
            if room and self._made:
                room = [each.view(self._made[place]) if place in self._made else each for place, each in enumerate(room)]
            return self._vector.run_owning(values, room)
        from onnxruntime import InferenceSession, OrtValue

        binding = self.session.io_binding()
        values = [_settled(value) if isinstance(value, torch.Tensor) else value for value in values]  # they must live until the run is over
        for name, value in zip(self.inputs, values, strict=True):
            if isinstance(value, torch.Tensor):
                device = (value.device.type, value.device.index or 0)
                binding.bind_input(name, *device, _ELEMENT_TYPES[value.dtype], list(value.shape), value.data_ptr() or _SOMEWHERE.data_ptr())
            else:
                binding.bind_ortvalue_input(name, OrtValue(value))
        for name in self.names:
            binding.bind_output(name, self.device, self.index)
        if self.device != "cpu":  # what torch has queued must be there when another stream reads it
            torch.accelerator.synchronize()
        handles = self.session.run_owning(InferenceSession.run_with_iobinding, binding)
        return binding.get_outputs_as_ortvaluevector(), handles

    def tensors(self, found: Any, places: Iterable[int]) -> list[torch.Tensor]:
        """`tensor` of some of the outputs that `run_owning` returned."""
        direct, places = self._direct, list(places)
        made = [private.from_dlpack(found.dlpack_at(place)) if direct[place] else tensor(found[place]) for place in places]
        if self._made:
            for i, place in enumerate(places):
                if place in self._made and list(made[i].shape) == self._made[place]:
                    made[i] = made[i].view(self.shapes[self.names[place]])
        return made


def _settled(value: torch.Tensor) -> torch.Tensor:
    """The tensor as it lies in memory: contiguous, and no view that something reads with another sign."""
    value = value.detach()
    if value.is_neg() or value.is_conj():
        value = value.resolve_conj().resolve_neg()
    return value.contiguous()


@functools.cache
def _says_dlpack() -> bool:
    from onnxruntime.capi.onnxruntime_pybind11_state import OrtValueVector

    return hasattr(OrtValueVector, "dlpack_at")


def _takes_vectors(kinds: Iterable[int | None]) -> bool:
    return _push() is not None and all(kind in _SHARED for kind in kinds)


def _push_flagged(vector: Any, value: torch.Tensor) -> None:
    if value.dtype is torch.bool:  # torch's DLPack has a type of its own for it, which onnxruntime before 1.32 does not read
        vector.push_back(to_dlpack(value.view(torch.uint8)), True)
    else:
        vector.push_back(to_dlpack(value), False)


def _push_plain(vector: Any, value: torch.Tensor) -> None:
    vector.push_back(to_dlpack(value))


@functools.cache
def _push() -> Callable[[Any, torch.Tensor], None] | None:
    """How this onnxruntime takes a tensor into a vector, found by trying: from 1.24 on with a flag, from 1.32 on without. None: not at all."""
    from onnxruntime.capi.onnxruntime_pybind11_state import OrtValueVector

    for push in (_push_plain, _push_flagged):
        vector = OrtValueVector()
        with contextlib.suppress(Exception):  # pybind has TypeErrors, DLPack BufferErrors, and another release something else
            push(vector, torch.zeros(1, dtype=torch.bool))
            push(vector, torch.zeros(1))
            if [vector[i].data_type() for i in range(2)] == ["tensor(bool)", "tensor(float)"]:
                return push
    return None


class _Vectors:
    """Runs of a session on the CPU whose values go there and come back in vectors, tensors through DLPack."""

    def __init__(self, session: Any, inputs: Iterable[str], outputs: Sequence[str]) -> None:
        from onnxruntime import InferenceSession, RunOptions
        from onnxruntime.capi.onnxruntime_pybind11_state import OrtDevice, OrtValueVector

        self.inputs, self.outputs = list(inputs), outputs
        self._run, self._method, self._options = session.run_owning, InferenceSession.run_with_ortvaluevector, RunOptions()
        self._vector, self._push = OrtValueVector, _push()
        self._devices = [OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)] * len(outputs)

    def run_owning(self, values: Iterable[Any], room: Iterable[torch.Tensor]) -> tuple[Any, Sequence[int]]:
        """As `Runner.run_owning`."""
        push = self._push
        assert push is not None
        given, found = self._vector(), self._vector()
        for value in values:
            if isinstance(value, torch.Tensor):
                # What a vector takes is not complex, so it is no conjugate either.
                if value.numel() or (nothing := _of_nothing(value)) is None:
                    push(given, value if value.is_contiguous() and not value.is_neg() else _settled(value))
                else:
                    given.push_back(nothing)
            else:
                given.push_back(value)
        for place in room:
            push(found, place)
        handles = self._run(self._method, self._options, self.inputs, given, self.outputs, found, self._devices)
        return found, handles  # one by one from here on: iterating costs 20 us, pybind makes a class for it


def _of_nothing(value: torch.Tensor) -> Any:
    """A tensor without elements as a value of onnxruntime's; None where numpy lacks its type.

    Torch says that it lies at 0, and some kernels look there all the same (InstanceNormalization): numpy gives it a place.
    """
    from onnxruntime.capi.onnxruntime_pybind11_state import OrtDevice, OrtValue

    kind = ir.DataType(_ELEMENT_TYPES[value.dtype])
    if kind >= ir.DataType.BFLOAT16:
        return None
    return OrtValue.ortvalue_from_numpy(
        np.empty(tuple(value.shape), kind.numpy()), OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)
    )


def tensor(value: Any) -> torch.Tensor:
    """A value of `Runner.run` as a tensor over the same memory, which lives as long as one of them; a copy where DLPack cannot say it."""
    dtype = DTYPES.get(value.element_type())
    if dtype is None:  # what a file says of its outputs was checked when it was opened
        kind = ir.DataType(value.element_type()).name
        raise FormatError(
            f"a node gives a tensor of {kind}, which torch has none of, where the file says another type: the file is damaged"
        )
    # DLPack has no float8, and the values of onnxruntime before 1.24 have no DLPack.
    if dtype in _FLOAT8 or not hasattr(value, "__dlpack__"):
        return _copy(value, dtype)
    found = private.from_dlpack(value.__dlpack__())
    return found.view(torch.bool) if dtype is torch.bool and found.dtype is not torch.bool else found


def _copy(value: Any, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(value.shape(), dtype=dtype)
    if value.device_name().lower() != "cpu":
        raise RunError("this onnxruntime cannot give tensors of a device to torch: install a newer one")
    ctypes.memmove(out.data_ptr(), value.data_ptr(), out.nbytes)
    return out


def _element_type(text: str) -> int | None:
    """The ONNX element type of ``tensor(float)``; None for sequences and the like."""
    return ir.DataType.__members__.get(text.removeprefix("tensor(").removesuffix(")").upper())
