"""What the native library calls in Python: nodes become plans, errors become text, and unusual values usual ones."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import traceback
from collections import OrderedDict
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from exporter.files.trust import Gate
from exporter.runtime.store import ContextStore, Made, PoolLog
from symbolics.errors import RunError
from symbolics.text import clean

if TYPE_CHECKING:
    import torch

    from exporter.runtime.kernel_plans import KernelPlan
    from exporter.runtime.kernels import PythonOp, PythonOpGrad

__all__ = ["Binding"]

# Exceptions that wait for somebody who may never ask: those of a plain InferenceSession.
_UNCLAIMED = 8


def _plans() -> Any:
    """What needs torch, which a session without PythonOps does not import."""
    from exporter.runtime import kernel_plans

    kernel_plans.connect()
    return kernel_plans


class Binding:
    """What the native library calls: one per SessionOptions. It turns nodes into plans, once, and errors into text."""

    #: In the place of the classes of `exporter.runtime.kernel_plans.plan_of`.
    kernels: ClassVar[dict[str, Any]] = {}

    def __init__(self, gate: Gate, store: ContextStore) -> None:
        self.gate = gate
        self.store = store
        self.errors: OrderedDict[str, BaseException] = OrderedDict()
        #: Names of Functions whose calls are long, as `KernelPlan.long`.
        self.long: Container[str] = ()
        self._made = threading.local()

    @contextlib.contextmanager
    def making(self, pool: PoolLog, *, alone: bool) -> Iterator[None]:
        """Around the making of a session on this thread: its kernels know the session's log, and whether its one thread leaves torch the others."""
        self._made.pool, self._made.alone = pool, alone
        try:
            yield
        finally:
            del self._made.pool, self._made.alone

    def load(self) -> None:
        """Import torch now: what the native library calls would, in the middle of onnxruntime's work."""
        _plans()

    @property
    def attributes(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """operator -> its attributes, and how native.c reads each."""
        return _plans().ATTRIBUTES

    def plan(self, operator: str, attributes: dict[str, Any], node_name: str, inputs: int, outputs: tuple[bool, ...]) -> KernelPlan:
        """How a node runs: see `exporter.runtime.kernel_plans.plan_of`."""
        plan = _plans().plan_of(operator, attributes, node_name, inputs, outputs, self.gate, self.store, **self.kernels)
        kernel = plan.kernel
        kernel.pool = getattr(self._made, "pool", None)
        log = None if kernel.pool is None else kernel.pool.entries
        return plan._replace(log=log, long=plan.name in self.long, alone=getattr(self._made, "alone", False))

    def view(self, tensor: torch.Tensor, kind: int) -> torch.Tensor:
        """Bytes as the float8 that they are."""
        return _plans().view(tensor, kind)

    def fix(self, kernel: PythonOp | PythonOpGrad, index: int, value: Any) -> torch.Tensor:
        """See `exporter.runtime.kernel_plans.fix`."""
        return _plans().fix(kernel, index, value)

    def device_run(self, kernel: PythonOp | PythonOpGrad, inputs: list[Any], extra: Any, stream: int) -> list[Any]:
        """See `exporter.runtime.kernel_plans.device_run`."""
        return _plans().device_run(kernel, inputs, extra, stream)

    def device_write(self, target: torch.Tensor, value: torch.Tensor, stream: int) -> None:
        """Copy an output into the runtime's memory."""
        _plans().device_write(target, value, stream)

    def strings(self, values: Any, shape: tuple[int, ...] | None) -> Any:
        """A list of str as an array of that shape; and without a shape the inverse: (shape, list of bytes)."""
        if shape is None:
            array = np.asarray(values, dtype=object)
            return array.shape, [str(item).encode("utf-8", "surrogateescape") for item in array.flat]
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array.reshape(shape)

    def escaped(self, kernel: PythonOp | PythonOpGrad, changed: bool) -> None:
        """Raises:
        RunError: A run did with an input what the runs before it had not done.
        """
        what = "changed an input in place" if changed else "kept an input"
        raise RunError(
            f"{kernel.title} {what} in this run, and had not in its first: its inputs are the runtime's memory, which this run cannot take back. "
            "From the next run on it gets copies; declare the change with ctx.mark_dirty, or keep inputs with ctx.save_for_backward in every run"
        )

    _numbers = itertools.count(1)

    def failed(self, kernel: PythonOp | PythonOpGrad | None, error: BaseException) -> str:
        """The text of an exception for onnxruntime; the exception itself waits for `Session`."""
        token = f"pythonop-error-{next(self._numbers)}"
        pool = getattr(self._made, "pool", None) if kernel is None else kernel.pool
        run = self.store.runs.get(threading.get_ident())
        if run is not None:
            run.errors[token] = (pool, error)
        elif pool is None or not pool.add(token, error):
            self.errors[token] = error
            while len(self.errors) > _UNCLAIMED:
                self.errors.popitem(last=False)
        title = _plans().title_of(kernel, error) if kernel is not None else "while the session was made"
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        # First what it is: onnxruntime 1.20 cuts long texts.
        what = clean(" ".join(traceback.format_exception_only(error)[-1].split()), 1000)
        self.let_go(error)
        # onnxruntime takes UTF-8 that ends at the first NUL.
        return f"{title} [{token}]: {what}\n{text}".replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()

    def let_go(self, error: BaseException) -> None:
        """Let the frames of an exception forget their locals: tensors over memory that will not be ours any more."""
        waiting: list[BaseException | None] = [error]
        seen: set[int] = set()
        while waiting:
            one = waiting.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]

    def original(self, error: BaseException, run: Made, pool: PoolLog) -> BaseException | None:
        """The exception behind what onnxruntime raised in a run.

        Args:
            error: What onnxruntime raised.
            run: What the run left on its own thread.
            pool: What the session's runs left on others.
        """
        mine = {token: found for token, (log, found) in run.errors.items() if log is pool} | pool.errors()
        known = {**self.errors, **mine}
        for token in re.findall(r"\[(pythonop-error-\d+)\]", str(error)):
            if token in known:
                self.errors.pop(token, None)
                return known[token]
        # A node's name can hide the token: onnxruntime's text ends at a NUL in it.
        return next(reversed(mine.values()), None)
