"""The tensors of a model in memory: where it holds them, and which of them have their values in other files."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from exporter.files.data_file import open_data
from exporter.files.examine import check_external, missing_data, size_of
from symbolics.errors import FormatError
from symbolics.text import shown

__all__ = [
    "DataTensor",
    "HeldTensor",
    "check_data",
    "check_place",
    "check_there",
    "data_files",
    "external_tensors",
    "held_tensors",
    "inside",
    "is_external",
    "new_bytes",
    "own_array",
    "replacing",
    "take_in",
]


class HeldTensor(NamedTuple):
    """A tensor and where a model holds it.

    Attributes:
        tensor: An onnx_ir tensor of any kind.
        put: Puts another tensor in its place; returns what puts this one back.
        initializer: Whether it is an initializer, not an attribute.
    """

    tensor: Any
    put: Callable[[Any], Callable[[], None]]
    initializer: bool


def held_tensors(model: ir.Model) -> Iterator[HeldTensor]:
    """Every tensor of a model in memory: of graphs, bodies and functions, initializers and attributes."""
    for function in model.functions.values():
        yield from _of_attributes(function.attributes)
    for part in (model.graph, *(function.graph for function in model.functions.values())):
        for graph in (part, *part.subgraphs()):
            for value in graph.initializers.values():
                if value.const_value is not None:
                    yield HeldTensor(value.const_value, partial(_put_value, value), True)
            for node in graph:
                yield from _of_attributes(node.attributes)


def _of_attributes(attributes: MutableMapping[str, ir.Attr]) -> Iterator[HeldTensor]:
    for name, attribute in attributes.items():
        if attribute.value is not None and attribute.type in (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS):
            several = attribute.type == ir.AttributeType.TENSORS
            for index, tensor in enumerate(attribute.value if several else (attribute.value,)):
                yield HeldTensor(tensor, partial(_put_attribute, attributes, name, index if several else None), False)


def _put_value(value: ir.Value, tensor: Any) -> Callable[[], None]:
    before, value.const_value = value.const_value, tensor
    return lambda: setattr(value, "const_value", before)


def _put_attribute(attributes: MutableMapping[str, ir.Attr], name: str, index: int | None, tensor: Any) -> Callable[[], None]:
    before = attributes[name]
    new = tensor if index is None else (*before.value[:index], tensor, *before.value[index + 1 :])
    attributes[name] = ir.Attr(name, before.type, new, doc_string=before.doc_string)
    return lambda: attributes.__setitem__(name, before)


def is_external(tensor: Any) -> bool:
    """Whether the values of a tensor are in another file."""
    return ir.ExternalTensor in type(tensor).__mro__  # isinstance asks a protocol of each tensor's members, slowly


class DataTensor(ir.ExternalTensor):
    """A tensor whose values are in another file, which `open_data` opens: links on the way and files that end too early are errors of ours.

    Values are mapped where somebody asks for an array, as onnx_ir does it.
    """

    __slots__ = ("_values",)

    def __init__(self, tensor: ir.ExternalTensor, folder: Path) -> None:
        """Args: onnx_ir's tensor, and the folder that its file must be in."""
        super().__init__(
            tensor.location, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=tensor.name,
            doc_string=tensor.doc_string, metadata_props=tensor.metadata_props, base_dir=folder,
        )  # fmt: skip
        self._values: np.ndarray | None = None

    def opened(self) -> BinaryIO:
        """Its file, at the first of its values. Raises FormatError as `open_data`."""
        return open_data(self.name or "", str(self.location), Path(self.base_dir), self.offset or 0, self.nbytes)

    def numpy(self) -> np.ndarray:
        """Its values, mapped into memory. Raises FormatError as `open_data`."""
        if self._values is None:
            kind, shape = self.dtype.numpy(), self.shape.numpy()
            with self.opened() as file:
                if self.dtype.bitwidth < 8:
                    proto = onnx.TensorProto(data_type=int(self.dtype), dims=shape, raw_data=file.read(self.nbytes))
                    self._values = ir.serde.TensorProtoTensor(proto).numpy()
                elif self.size:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    self._values = np.frombuffer(mapped, np.dtype(kind).newbyteorder("<"), self.size, self.offset or 0).reshape(shape)
                else:
                    self._values = np.empty(shape, kind)
        return self._values

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return self.numpy().__array__(dtype)

    def tobytes(self) -> bytes:
        """Its values as the file has them. Raises FormatError as `open_data`."""
        with self.opened() as file:
            return file.read(self.nbytes)

    def tofile(self, file: Any) -> None:
        """Write its values to a file. Raises FormatError as `open_data`."""
        with self.opened() as source:
            left = self.nbytes
            while left:
                data = source.read(min(left, 1 << 20))
                if not data:
                    raise FormatError(f"{shown(self.path)} was cut off while it was read")
                file.write(data)
                left -= len(data)


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """The tensors whose values are in other files."""
    yield from (held.tensor for held in held_tensors(model) if is_external(held.tensor))


def data_files(model: ir.Model) -> set[Path]:
    """The files that the values of a model's external tensors are in."""
    return {Path(tensor.path) for tensor in external_tensors(model)}


def check_place(tensor: ir.ExternalTensor) -> None:
    """`check_external` of a tensor in memory, which may have been a file's before.

    Raises:
        FormatError: As there.
    """
    entries = {"location": str(tensor.location), "offset": str(tensor.offset or 0), "length": str(tensor.length or "")}
    check_external(tensor.name, tensor.dtype, tensor.shape.numpy(), entries, Path(tensor.base_dir))


def check_there(tensor: ir.ExternalTensor) -> None:
    """Check that the values of an external tensor are there.

    Raises:
        FormatError: They are not; the message names the tensor and the file.
    """
    path, needed = Path(tensor.path), (tensor.offset or 0) + (tensor.length or tensor.nbytes)
    if (size := size_of(path)) is None:
        raise missing_data(tensor.name, tensor.path)
    if size < needed:
        raise FormatError(
            f"{shown(tensor.path)} has {size} bytes, and {shown(str(tensor.name))!r} lies at {needed} and before: the file was cut off"
        )


def check_data(model: ir.Model) -> None:
    """Check that the data of external tensors is there.

    Raises:
        FormatError: It is not; the message names the tensor and the file.
    """
    for tensor in external_tensors(model):
        check_there(tensor)


def own_array(tensor: Any) -> np.ndarray:
    """The values of a tensor in memory of their own: what becomes of its file, or of who gave it, changes them no more.

    Values in other files are read, not mapped: a file that is cut off while it is mapped ends the process, and a page that is read costs a
    fraction of one that is mapped and copied.

    Raises:
        FormatError: The file ends before the values do, or does not lie below the model's folder.
        OSError, ValueError: The same, of a tensor that no reader of ours has made.
    """
    if not is_external(tensor) or tensor.dtype.bitwidth < 8 or not tensor.size:
        return np.array(tensor.numpy(), order="C")
    kind, shape = np.dtype(tensor.dtype.numpy()).newbyteorder("<"), tensor.shape.numpy()
    found = new_bytes(math.prod(shape) * kind.itemsize).view(kind).reshape(shape)
    tensor.tofile(_Memory(found))
    return found.astype(found.dtype.newbyteorder("="), copy=False)


def take_in(model: ir.Model, most: int) -> None:
    """Read the values of external tensors, in place, where they have at most so many bytes in all: the model no longer needs their files.

    Raises:
        FormatError: A file ends before the values do, or does not lie below the model's folder any more.
    """
    held = [each for each in held_tensors(model) if is_external(each.tensor)]
    if sum(each.tensor.nbytes for each in held) > most:
        return
    for each in held:
        tensor = each.tensor
        try:
            values = own_array(tensor)
        except FormatError:
            raise
        except (OSError, ValueError) as error:
            raise FormatError(f"the data of {shown(str(tensor.name))!r} cannot be read: {error}") from error
        props = tensor.metadata_props
        each.put(ir.Tensor(values, tensor.dtype, shape=tensor.shape, name=tensor.name, doc_string=tensor.doc_string, metadata_props=props))


def inside(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
    """A tensor of another file as one with its values, which are read where they are written."""
    props = tensor.metadata_props
    return ir.Tensor(tensor.numpy(), tensor.dtype, shape=tensor.shape, name=tensor.name, doc_string=tensor.doc_string, metadata_props=props)


@contextlib.contextmanager
def replacing(held: Iterable[HeldTensor], replaced: Mapping[int, Any]) -> Iterator[None]:
    """While this is open, a model holds other tensors, by the ids of its own."""
    with contextlib.ExitStack() as back:
        for each in held:
            if id(each.tensor) in replaced:
                back.callback(each.put(replaced[id(each.tensor)]))
        yield


def new_bytes(count: int) -> np.ndarray:
    """New memory as numpy takes it, which asks Linux for huge pages where it is 4 MiB and more: they are there in a fraction of the time that
    small ones take. It begins where torch's and onnxruntime's memory would."""
    room = np.empty(count + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + count]


_ALIGNMENT = 64


class _Memory:
    """What an array lies in, as a file to write to once."""

    def __init__(self, array: np.ndarray) -> None:
        self._rest = array.reshape(-1).view(np.uint8)

    def write(self, data: bytes) -> int:
        """Put the next bytes."""
        count = len(data)
        self._rest[:count] = np.frombuffer(data, np.uint8)
        self._rest = self._rest[count:]
        return count
