"""The libraries of custom operators that a session's options know: that of PythonOps, and an accelerator's."""

from __future__ import annotations

import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import onnx

from exporter.runtime import native
from exporter.runtime.absent import NO_ONNXRUNTIME, why_no_library
from exporter.runtime.binding import Binding
from exporter.runtime.prepare import has_python_ops
from symbolics.errors import RunError

# Told when somebody needs it: onnx.reference runs without, and files without PythonOps without the library.
_missing: ImportError | None = None
try:
    import onnxruntime

    from exporter.runtime.native import _native  # type: ignore[attr-defined]

    _native.setup(*[None] * 13, RunError, 0)  # torch's functions come with the first PythonOp
except ImportError as error:
    _missing = error

__all__ = ["OLDEST", "available", "bind", "binding_of", "check_onnxruntime", "is_there", "put_to_sleep", "register", "threads_outside"]

#: The oldest onnxruntime that this has run on, as pyproject.toml asks for it. The function table that native.c uses is there from 1.17 on.
OLDEST = "1.20"


def is_there() -> bool:
    """Whether the library of PythonOps is there, and onnxruntime."""
    return _missing is None


def check_onnxruntime() -> None:
    """See that onnxruntime is there.

    Raises:
        RunError: It is not installed.
    """
    if _missing is not None and _missing.name == "onnxruntime":
        raise RunError(NO_ONNXRUNTIME)


def available(proto: onnx.ModelProto | None = None) -> str | None:
    """None where PythonOps can run on onnxruntime in this process, else what is missing and what to do.

    Args:
        proto: A model to ask for: without PythonOps it needs no native library.
    """
    if _missing is None:
        return None
    if _missing.name == "onnxruntime":
        return NO_ONNXRUNTIME
    if proto is not None and not has_python_ops(proto):
        return None
    return why_no_library(_missing, Path(native.__file__).parent)


# enum Device in tensors.h. "borrow" is the code path of devices on the CPU, for tests.
_DEVICES = {"cpu": 0, "cuda": 1, "borrow": 2}

_registering = threading.Lock()
# Options that are somebody else's class keep what belongs to them here.
_bound: weakref.WeakKeyDictionary[Any, tuple[Binding, Any]] = weakref.WeakKeyDictionary()
_registered: weakref.WeakKeyDictionary[Any, set[Path]] = weakref.WeakKeyDictionary()


def bind(options: Any, binding: Binding, device: str = "cpu") -> Binding:
    """Give options the operators; sessions that are made with them ask ``binding`` how a node runs.

    Raises:
        RunError: onnxruntime is too old.
    """
    store = binding.store
    if _missing is not None:  # the model has no PythonOps: who makes a session of it has looked
        _bound[options] = (binding, None)
        return binding
    if "torch" in sys.modules:  # its threads are there
        binding.load()
    with _registering:
        capsule = _native.prepare(binding, store, store.contexts, store.runs, _DEVICES[device])
        try:
            options.register_custom_ops_library(_native.__file__)
        finally:
            registered = _native.registered()
    if not registered:
        raise RunError(f"onnxruntime {onnxruntime.__version__} is too old for PythonOps: install onnxruntime {OLDEST} or newer")
    _bound[options] = (binding, capsule)
    return binding


def binding_of(options: Any) -> Binding | None:
    """The binding that `bind` gave options; None for others."""
    return None if options is None or options not in _bound else _bound[options][0]


def register(options: Any, library: Path) -> None:
    """Give options the operators of an accelerator's library, once."""
    with _registering:
        known = _registered.setdefault(options, set())
        if library not in known:
            options.register_custom_ops_library(str(library))
            known.add(library)


def threads_outside() -> int:
    """Inside of a Function that a session runs on one thread: torch's threads outside of it; else 0. A session that is made there stays."""
    return _native.threads_outside() if _missing is None else 0


def put_to_sleep(last_run: float) -> None:
    """Before a run: torch's threads may still wait awake for what this thread computed last, and would take half of the processors.

    Args:
        last_run: Seconds that the run before took; of a short one nothing is done, which is then quicker.
    """
    if _missing is None:
        _native.put_to_sleep(last_run)
