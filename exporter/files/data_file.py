"""Files that hold the values of tensors, opened so that what is read is what was looked at. No onnx_ir here, as in `exporter.files.proto`."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

from exporter.files.examine import check_location, missing_data
from symbolics.errors import FormatError
from symbolics.text import shown

__all__ = ["open_data"]

#: Of a folder on the way, and of the file: no link is followed, and a pipe does not wait for a writer. Windows has none of them.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_FILE = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_data(name: str, location: str, folder: Path, offset: int, count: int) -> BinaryIO:
    """The file that the values of a tensor are in, at the first of them.

    Every step of the way is opened from the one before, so that nothing can be put in its place meanwhile. A second name of a file (a hard link)
    is a file as any other: installers make them.

    Args:
        name: Of the tensor.
        location: Where the model says that they are.
        folder: Of the model.
        offset: Where in the file they begin.
        count: How many bytes they are.

    Raises:
        FormatError: There is no such file, it is not a plain one below the folder, it ends before the values do, or the system cannot read it.
    """
    check_location(name, location, folder)  # whose words say the way out
    what = f"the data of {shown(name)!r} is in {shown(os.path.join(folder, location))}"
    try:
        handle = _opened(folder, Path(location).parts)
    except FileNotFoundError as error:
        raise missing_data(name, os.path.join(folder, location)) from error
    except OSError as error:
        raise FormatError(f"{what}, which cannot be read: {error.strerror or error}") from error
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(os.fdopen(handle, "rb"))
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise FormatError(f"{what}, which is no plain file")
        if found.st_size < offset + count:
            raise FormatError(f"{what}, which has {found.st_size} bytes; it lies at {offset + count} and before: the file was cut off")
        file.seek(offset)
        stack.pop_all()
    return file


def _opened(folder: Path, parts: tuple[str, ...]) -> int:
    if os.open not in os.supports_dir_fd:
        return os.open(folder.joinpath(*parts), _FILE)
    at = os.open(folder, _FOLDER & ~getattr(os, "O_NOFOLLOW", 0))  # the user's own folder may be a link
    try:
        for part in parts[:-1]:
            inner = os.open(part, _FOLDER, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(parts[-1], _FILE, dir_fd=at)
    finally:
        os.close(at)
