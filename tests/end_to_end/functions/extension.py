"""The C++ extension of the rows, built once for a release of torch; importing this module builds it."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

__all__ = ["available", "built"]

SOURCE = Path(__file__).with_name("operators.cpp")


def available() -> bool:
    """Whether this machine has what builds it."""
    return all(map(shutil.which, ("g++", "ninja")))


@functools.cache
def built() -> Any:
    """The module of the extension, and its operators in the dispatcher."""
    text = SOURCE.read_bytes() + torch.__version__.encode()
    name = f"pythonop_rows_{hashlib.sha256(text).hexdigest()[:12]}"
    folder = Path(tempfile.gettempdir(), f"{name}_{os.getuid()}")
    folder.mkdir(exist_ok=True)
    with open(folder / "builds", "w") as builds, warnings.catch_warnings():
        fcntl.flock(builds, fcntl.LOCK_EX)  # the system lets go of it where a process is killed
        (folder / "lock").unlink(missing_ok=True)  # torch's own stays then, and everybody waits for it for ever
        warnings.simplefilter("ignore")
        return cpp_extension.load(name, [str(SOURCE)], extra_cflags=["-O1"], build_directory=str(folder))
