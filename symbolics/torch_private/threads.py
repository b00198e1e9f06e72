"""The threads that torch computes on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

import torch

__all__ = ["openmp_functions"]

#: What each returns is told in threads.h; the first is at::get_num_threads, which no header of C names.
_FUNCTIONS = (
    "_ZN2at15get_num_threadsEv", "omp_set_num_threads", "omp_get_num_procs", "GOMP_parallel", "MKL_Set_Num_Threads_Local", "omp_get_thread_limit",
    "omp_get_thread_num",
)  # fmt: skip
_GET, _SET, _PROCESSORS, _PARALLEL, _, _LIMIT, _NUMBER = _FUNCTIONS


def openmp_functions() -> tuple[int, ...]:
    """Addresses of functions of torch, and of the OpenMP and the MKL that it computes on: each of another copy would speak of other threads.

    Returns:
        Of at::get_num_threads, omp_set_num_threads, omp_get_num_procs, GOMP_parallel, MKL_Set_Num_Threads_Local,
        omp_get_thread_limit and omp_get_thread_num; 0 for what there is not. GOMP_parallel is libgomp's alone, and 0 too where its threads sleep at once
        (OMP_WAIT_POLICY=passive), or where few more threads may be made: libgomp ends the process when it cannot make one.

    torch.set_num_threads speaks of all threads of the process: one that begins in between would keep the number.
    """
    none = (0,) * len(_FUNCTIONS)
    ends = {"linux": "so", "darwin": "dylib"}
    library = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{ends.get(sys.platform, '')}"
    if not library.exists():
        return none
    own = ctypes.CDLL(str(library))
    for loaded in (ctypes.CDLL(None), own):  # what was loaded before torch, by LD_PRELOAD, torch uses, too
        found = {name: _address(loaded, name) or _address(own, name) for name in _FUNCTIONS}
        if not all(found[name] for name in (_GET, _SET, _PROCESSORS, _LIMIT, _NUMBER)) or not _counts_for_torch(found[_SET]):
            continue
        others = sys.platform != "linux" or _address(loaded, "__kmpc_fork_call")  # LLVM's and Intel's sleep by rules of their own
        if others or os.environ.get("OMP_WAIT_POLICY", "").strip().lower() == "passive" or _threads_left() < _ROOM:
            found[_PARALLEL] = 0
        return tuple(found.values())
    return none


def _counts_for_torch(set_threads: int) -> bool:
    """Whether torch has as many threads as this omp_set_num_threads says."""
    before = torch.get_num_threads()
    change = ctypes.CFUNCTYPE(None, ctypes.c_int)(set_threads)
    change(before + 1)
    after = torch.get_num_threads()
    change(before)
    return after == before + 1


#: Threads that a process must still be allowed.
_ROOM = 512


def _threads_left() -> float:
    """How many more threads this process may have, as far as its limits say so in short: Linux alone."""
    import resource

    left = float("inf")
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)  # of all of the user's processes, which nobody counts here
    if soft != resource.RLIM_INFINITY:
        left = soft
    with contextlib.suppress(OSError, ValueError):
        own = next((line.rsplit(":", 1)[1] for line in Path("/proc/self/cgroup").read_text().split() if line.startswith("0::")), "/")
        for folder in {Path("/sys/fs/cgroup", own.strip("/")), Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/pids")}:
            with contextlib.suppress(OSError, ValueError):  # "max", or no such controller
                left = min(left, int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text()))
    return left


def _address(library: ctypes.CDLL, name: str) -> int:
    with contextlib.suppress(AttributeError):
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    return 0
