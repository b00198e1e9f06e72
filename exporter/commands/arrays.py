"""--inputs: arrays from an .npz file, which is read as a file of strangers is."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from exporter.commands.shared import Failure
from exporter.files.proto import UnreadableFileError, check_plain
from symbolics.errors import FormatError
from symbolics.text import clean, reason, shown

__all__ = ["read_arrays"]

#: How many bytes one byte of a zip file gives at most, by how it is packed.
_LONGEST = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}


def read_arrays(path: Path) -> dict[str, Any]:
    """What --inputs names.

    Returns:
        The arrays by their names in the file.

    Raises:
        Failure: It is no .npz file, cannot be read, or claims more numbers than it can hold.
        UnreadableFileError: It is a pipe or a device.
    """
    try:
        check_plain(path)
        with zipfile.ZipFile(path) as file:
            _check_sizes(file, path.stat().st_size)
        with np.load(path, allow_pickle=False) as data:
            return {name: data[name] for name in data}
    except UnreadableFileError:  # it says of which file
        raise
    except zipfile.BadZipFile as error:
        raise Failure(f"cannot read the inputs in {path}: it is no .npz file, which numpy.savez writes ({clean(str(error))})") from error
    except Exception as error:  # damage is an error of zipfile, zlib, numpy or Python's parser
        raise Failure(f"cannot read the inputs in {path}: {reason(error)}") from error


def _check_sizes(file: zipfile.ZipFile, size: int) -> None:
    """See that a file of this size can hold what it claims: numpy makes room for all of it before it reads the first number.

    Raises:
        FormatError: It cannot.
    """
    if sum(member.compress_size for member in file.infolist()) > size:
        raise FormatError("its arrays lie over one another, it is damaged: write it anew with numpy.savez")
    for member in file.infolist():
        name = shown(member.filename.removesuffix(".npy"))
        if (longest := _LONGEST.get(member.compress_type)) is None:
            raise FormatError(f"{name} is packed in a way that numpy never does: write it anew with numpy.savez")
        if member.file_size > longest * member.compress_size:
            raise FormatError(f"{name} is to have {member.file_size} bytes, and cannot, it is damaged: write it anew with numpy.savez")
        with file.open(member) as data:
            version = np.lib.format.read_magic(data)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
            if read is None:
                raise FormatError(f"{name} is of a type that no input has")
            shape, _, dtype = read(data)
            claimed, there = math.prod(shape) * dtype.itemsize, member.file_size - data.tell()
            if claimed > there and not dtype.hasobject:
                raise FormatError(
                    f"{name} claims {claimed} bytes of numbers and has {there}, it is damaged: write it anew with numpy.savez"
                )
