"""The threads that torch computes on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

import torch

#: What each returns is told in native_threads.h.
_FUNCTIONS = ("omp_get_max_threads", "omp_set_num_threads", "omp_get_num_procs", "GOMP_parallel", "MKL_Set_Num_Threads_Local")


def openmp_functions() -> tuple[int, ...]:
    """Addresses of functions of the OpenMP and the MKL that torch's library has brought along: each of another copy would speak of other threads.

    Returns:
        Of omp_get_max_threads, omp_set_num_threads, omp_get_num_procs, GOMP_parallel and MKL_Set_Num_Threads_Local; 0 for what
        there is not. GOMP_parallel is libgomp's alone, and 0 too where its threads sleep at once (OMP_WAIT_POLICY=passive).

    torch.set_num_threads speaks of all threads of the process: one that begins in between would keep the number.
    """
    ends = {"linux": "so", "darwin": "dylib"}
    library = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{ends.get(sys.platform, '')}"
    if not library.exists():
        return (0,) * len(_FUNCTIONS)
    loaded = ctypes.CDLL(str(library))
    found = {name: _address(loaded, name) for name in _FUNCTIONS}
    if sys.platform != "linux" or _address(loaded, "__kmpc_fork_call") or os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        found["GOMP_parallel"] = 0  # LLVM's and Intel's have one, too, and sleep by rules of their own
    if not found["omp_get_max_threads"] or not found["omp_set_num_threads"] or not found["omp_get_num_procs"]:
        return (0,) * len(_FUNCTIONS)
    return tuple(found.values())


def _address(library: ctypes.CDLL, name: str) -> int:
    with contextlib.suppress(AttributeError):
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    return 0
