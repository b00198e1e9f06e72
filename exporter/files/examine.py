"""What a model may hold: the checks of the one reader. A model comes from anybody, and nothing in it is believed.

The checks are made before anything of the model is computed, so that what comes behind them may trust counts and sizes.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from symbolics.errors import FormatError
from symbolics.node.limits import MAX_CALLS, MAX_EXPANDED, MAX_RANK
from symbolics.text import shown

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = [
    "Operator",
    "check_calls",
    "check_entries",
    "check_external",
    "check_location",
    "check_number",
    "check_numbers",
    "check_rank",
    "check_reference",
    "check_tensor",
    "check_texts",
    "data_size",
    "missing_data",
    "operator_of",
    "size_of",
]

#: Domain, name and overload of an operator or function.
Operator = tuple[str, str, str]


def operator_of(node: onnx.NodeProto | onnx.FunctionProto | ir.Node | ir.Function) -> Operator:
    """What a node calls, or what a function is called by; the standard domain is ""."""
    name = node.op_type if hasattr(node, "op_type") else node.name
    return "" if node.domain == "ai.onnx" else node.domain, name, node.overload


# ----------------------------------------------------------------------------------------------------------- functions
def check_calls(main: Iterable[Operator], functions: Mapping[Operator, Iterable[Operator]]) -> None:
    """Refuse functions that call themselves, and calls that stand for too many nodes: each body is copied for each call.

    Args:
        main: The operators of the nodes of the main graph, bodies of control flow included.
        functions: The same for each function.

    Raises:
        FormatError: A function calls itself, functions nest deeper than MAX_CALLS, or all calls expanded are more than
            MAX_EXPANDED nodes.
    """
    sizes: dict[Operator, tuple[int, int]] = {}  # of a body with its calls expanded: nodes, and functions inside one another

    def measure(key: Operator, outer: tuple[Operator, ...]) -> tuple[int, int]:
        if key in outer:
            raise FormatError.damaged(f"the function {_title(key)}", "it calls itself")
        if key not in sizes:
            body = list(functions[key])
            # So deep that it is too much in any case: what is inside need not be known.
            inner = (
                [measure(called, (*outer, key)) for called in body if called in functions] if len(outer) < MAX_CALLS else [(0, MAX_CALLS)]
            )
            depth = 1 + max((depth for _, depth in inner), default=0)
            if depth > MAX_CALLS:
                raise FormatError(f"functions of the model call one another more than {MAX_CALLS} deep, as {_title(key)} does")
            sizes[key] = (len(body) + sum(nodes for nodes, _ in inner), depth)
        return sizes[key]

    for key in functions:
        measure(key, ())
    total = sum(sizes[key][0] for key in main if key in functions)
    if total > MAX_EXPANDED:
        raise FormatError(
            f"the calls of functions in the model stand for {_number(total)} nodes, at most {MAX_EXPANDED} are read: "
            "inline the functions of the model where you trust it (onnx.inliner)"
        )


def _title(operator: Operator) -> str:
    return shown("::".join(filter(None, operator[:2])))


def _number(count: int) -> str:
    return str(count) if count < 10**15 else f"10^{int(math.log10(count))}"


# -------------------------------------------------------------------------------------------------------------- values
def check_texts(*texts: str | bytes) -> None:
    """Refuse what is no UTF-8, which protobuf gives as bytes: no reader behind it would expect them.

    Raises:
        FormatError: One of the texts is bytes.
    """
    for text in texts:
        if isinstance(text, bytes):
            raise FormatError.damaged(f"the text {shown(text.decode('utf-8', 'backslashreplace'))!r}", "it is not UTF-8")


def check_entries(*owners: Any) -> None:
    """`check_texts` of the metadata and the doc string that each of these messages has.

    Raises:
        FormatError: One of them is no UTF-8.
    """
    for owner in owners:
        check_texts(owner.doc_string, *(text for entry in owner.metadata_props for text in (entry.key, entry.value)))


def check_reference(operator: str, attribute: str, name: str | None) -> None:
    """Refuse an attribute outside of functions that refers to one of a function.

    Args:
        operator: Whose attribute it is.
        attribute: Its name.
        name: What it refers to; nothing where it has a value.

    Raises:
        FormatError: It refers to something.
    """
    if name:
        raise FormatError.damaged(
            f"the attribute {shown(attribute)!r} of {shown(operator)}",
            f"it refers to the attribute {shown(name)!r} of a function, and is in none",
        )


def check_number(operator: Operator, name: str, outputs: int, attribute: str, value: Any) -> None:
    """Refuse a number of a standard operator that ONNX's shape inference, or onnxruntime, believes without looking at the node.

    Inference makes as many types as a Split says, whatever the number is, and onnxruntime ends the process where it says too few. An axis far
    outside of its tensor, and a GatherND's negative count of axes, have inference read what is none of its memory.

    Args:
        operator: What the node calls.
        name: Its name.
        outputs: How many outputs it has.
        attribute: The name of the attribute.
        value: What it says, or the attribute of a function that it refers to, which a call may give any value.

    Raises:
        FormatError: It cannot be so.
    """
    if operator[0] or attribute not in ("axis", "batch_dims", "num_outputs"):
        return
    if attribute == "num_outputs" and operator[1] == "Split" and value != outputs:
        raise FormatError.damaged(f"the Split {shown(name)!r}", f"it has {outputs} outputs, and num_outputs says {shown(str(value))}")
    if attribute != "num_outputs" and isinstance(value, int) and not (-MAX_RANK if attribute == "axis" else 0) <= value <= MAX_RANK:
        raise FormatError.damaged(
            f"the {shown(operator[1])} {shown(name)!r}", f"its {attribute} is {value}, and no tensor has such an axis"
        )


def check_rank(name: str, rank: int) -> None:
    """Refuse a declared shape of more dims than any runtime has.

    Raises:
        FormatError: More than MAX_RANK.
    """
    if rank > MAX_RANK:
        raise FormatError(f"the value {shown(name)!r} is declared with {rank} dims, at most {MAX_RANK} are read")


_TYPES = onnx.TensorProto.DataType
_KNOWN = frozenset(_TYPES.values())
_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
# The field that holds the elements where `raw_data` does not, and how many entries it has for one element.
_FIELD_OF: dict[int, tuple[str, int]] = {
    onnx.TensorProto.FLOAT: ("float_data", 1),
    onnx.TensorProto.COMPLEX64: ("float_data", 2),
    onnx.TensorProto.DOUBLE: ("double_data", 1),
    onnx.TensorProto.COMPLEX128: ("double_data", 2),
    onnx.TensorProto.INT64: ("int64_data", 1),
    onnx.TensorProto.UINT32: ("uint64_data", 1),
    onnx.TensorProto.UINT64: ("uint64_data", 1),
    onnx.TensorProto.STRING: ("string_data", 1),
}


def check_tensor(tensor: onnx.TensorProto) -> None:
    """Refuse a tensor whose data are not what its type and its dims say; one in another file: `check_external`.

    Raises:
        FormatError: The type is unknown, a dim is negative, or the data are of another size.
    """
    kind, count = _measure(tensor.name, tensor.data_type, tensor.dims)
    if kind == onnx.TensorProto.UNDEFINED and not count:
        return
    given = {field: length for field in _FIELDS if (length := len(getattr(tensor, field)))}
    if tensor.HasField("raw_data"):
        needed, found = (-1 if kind == onnx.TensorProto.STRING else _bytes(kind, count)), len(tensor.raw_data) if not given else -1
    else:
        field, entries = _FIELD_OF.get(kind, ("int32_data", 1))
        packed = 8 // _bits(kind) if field == "int32_data" and _bits(kind) in (2, 4) else 1
        needed, found = -(-count * entries // packed), given.pop(field, 0) if len(given) < 2 else -1
        found = -1 if given else found
    if needed != found or tensor.HasField("segment"):
        raise FormatError.damaged(f"the tensor {shown(tensor.name)!r}", f"its data are not {count} elements of type {_TYPES.Name(kind)}")


def _measure(name: str | None, data_type: int, dims: Iterable[int]) -> tuple[int, int]:
    """The type, and the number of elements."""
    sizes = list(dims)
    if data_type not in _KNOWN or any(size < 0 for size in sizes) or len(sizes) > MAX_RANK:
        what = f"element type {data_type} and {len(sizes)} dims, {shown(str(sizes[:8]))}"
        raise FormatError.damaged(f"the tensor {shown(name or '')!r}", what)
    return int(data_type), math.prod(sizes)


def _bits(kind: int) -> int:
    """Of one element. Most types say it in their names."""
    name = _TYPES.Name(kind)
    digits = re.search(r"\d+", name)
    return int(digits[0]) if digits else {"FLOAT": 32, "DOUBLE": 64, "BOOL": 8}[name]


def _bytes(kind: int, count: int) -> int:
    return -(-count * _bits(kind) // 8)


def data_size(data_type: int, dims: Iterable[int]) -> int:
    """How many bytes the values of a tensor have in a file."""
    return _bytes(data_type, math.prod(dims))


# -------------------------------------------------------------------------------------------------- data in other files
def check_external(name: str | None, data_type: int, dims: Iterable[int], entries: Mapping[str, str], folder: Path) -> None:
    """Refuse external data that lie elsewhere than below the model's folder, or not where the file has data.

    Args:
        name, data_type, dims: Of the tensor.
        entries: Its ``external_data``: location, offset, length.
        folder: Of the model. A file that is not there is no error here: who needs the data says so.

    Raises:
        FormatError: The location leaves the folder, the numbers are none, or they are not those of the tensor or of the file.
    """
    kind, count = _measure(name, data_type, dims)
    location = entries.get("location", "")
    check_location(name, location, folder)
    check_numbers(name, entries)
    where, numbers = _where(name, entries), {key: entries.get(key, "") for key in ("offset", "length")}
    if kind in (onnx.TensorProto.STRING, onnx.TensorProto.UNDEFINED):
        raise FormatError.damaged(where, f"data of type {_TYPES.Name(kind)} cannot lie in another file")
    offset, needed = int(numbers["offset"] or 0), _bytes(kind, count)
    if numbers["length"] and int(numbers["length"]) != needed:
        raise FormatError.damaged(
            where, f"it has {numbers['length']} bytes there, {count} elements of type {_TYPES.Name(kind)} have {needed}"
        )
    path = folder.joinpath(location)
    if (size := size_of(path)) is not None and size < offset + needed:
        raise FormatError(f"{path} has {size} bytes, and {shown(name or '')!r} lies at {offset + needed} and before: the file was cut off")


def check_numbers(name: str | None, entries: Mapping[str, str]) -> None:
    """Refuse an offset or a length that is no number: no reader behind it would expect that.

    Raises:
        FormatError: One is none.
    """
    numbers = [text for key in ("offset", "length") if (text := entries.get(key, ""))]
    if not all(text.isascii() and text.isdigit() and len(text) < 19 for text in numbers):
        raise FormatError.damaged(_where(name, entries), "its offset and length are no numbers")


def _where(name: str | None, entries: Mapping[str, str]) -> str:
    return f"the tensor {shown(name or '')!r}, whose data are in {shown(entries.get('location', ''))!r}"


def missing_data(name: str | None, path: str | os.PathLike[str]) -> FormatError:
    """The error for values in a file that is not there."""
    return FormatError(f"the data of {shown(name or '')!r} is in {shown(os.fspath(path))}, which is not there: keep it beside the model")


def size_of(path: Path) -> int | None:
    """The bytes of a plain file, None where there is none: asked once, for a save may remove it between two questions."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


#: In a location, it makes onnxruntime read the offset as an address of its process (up to 1.22 in any file, later in none): */_ORT_MEM_ADDR_/* and,
#: in newer releases, */_ORT_NATIVE_ENDIAN_MEM_ADDR_/*.
_ADDRESS = re.compile(r"_ORT_\w*ADDR\w*", re.IGNORECASE)


def check_location(name: str | None, location: str, folder: Path) -> None:
    """Refuse external data outside the folder of its model.

    Raises:
        FormatError: The location is absolute, climbs out with "..", passes through a link, is no plain file, or is what onnxruntime takes for
            an address in memory.
    """
    parts, root = location.replace("\\", "/").split("/"), folder.resolve()
    steps = list(_steps(root, parts))
    outside = not location or "\0" in location or os.path.isabs(location) or ":" in parts[0] or ".." in parts or "" in parts
    where = f"the tensor {shown(name or '')} has external data at {shown(location)}"
    try:
        links = not outside and any(step.is_symlink() for step in steps)
        folder_or_pipe = not outside and steps[-1].exists() and not steps[-1].is_file()
    except OSError as error:
        raise FormatError(f"{where}, which cannot be the name of a file here: {error.strerror}") from error
    if any(part == "*" or _ADDRESS.fullmatch(part) for part in parts):
        raise FormatError(f"{where}, which onnxruntime takes for an address in memory and not for a file; nothing was read")
    if outside or links:
        raise FormatError(
            f"{where}: a model may only read plain files below its own folder, by a relative path without '..' and without links; "
            "move the data there, or load and save the model yourself if you trust it"
        )
    if folder_or_pipe:
        raise FormatError(f"{where}, which is no plain file")


def _steps(root: Path, parts: list[str]) -> Iterator[Path]:
    for part in parts:
        root = root / part
        yield root
