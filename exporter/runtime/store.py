"""The store of contexts: what the forward of a Function keeps until its backward.

A PythonOp whose context output somebody reads leaves a `Context` here and puts out its handle; the matching
PythonOpGrad takes it out again. A handle is a random number that means something to one store and one call only:
it is looked up, never followed.
"""

from __future__ import annotations

import functools
import secrets
import sys
import threading
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from symbolics.errors import RunError
from symbolics.node.names import PYTHON_OP_GRAD
from symbolics.text import shown

__all__ = ["Context", "ContextStore", "Made", "PoolLog", "arrays_of"]


class Made(list[int]):
    """What one run on its caller's thread left behind: the handles that it made, as a list to which native.c appends.

    Attributes:
        frame: The frame that the run belongs to: a run is over when it is.
    """

    frame: FrameType | None = None

    @functools.cached_property
    def errors(self) -> dict[str, tuple[PoolLog | None, BaseException]]:
        """token -> (the log of the session whose kernel raised, the exception), until somebody asks or the run ends."""
        return {}


class Context(NamedTuple):
    """The autograd graph of one forward, as Python reads it; in the store it is one flat tuple (`pack`).

    Attributes:
        id, name: The call and the Function that made it.
        roots: One per tensor output: the tensor (or its gradient edge), None where it has no gradient.
        targets: One per tensor input: the tensor (or its gradient edge) whose gradient backward computes, or None.
        shapes: None, or one per tensor input: its shape where the target is an edge, for the zeros of a missing gradient.
    """

    id: str
    name: str
    roots: Sequence[Any]
    targets: Sequence[Any]
    shapes: Sequence[Any] | None

    def pack(self) -> tuple[Any, ...]:
        """(id, name, shapes, number of roots, roots..., targets...), as the native library makes and reads it."""
        return (self.id, self.name, self.shapes, len(self.roots), *self.roots, *self.targets)

    def given(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients of the roots, None for those that are absent: one without elements is, where its root has some."""
        # A root that is an edge is large.
        return [
            None if g is None or (not g.numel() and getattr(root, "numel", lambda: 1)()) else g
            for root, g in zip(self.roots, gradients, strict=True)
        ]

    @staticmethod
    def unpack(record: tuple[Any, ...]) -> Context:
        """The inverse of `pack`."""
        id, name, shapes, count, *rest = record
        return Context(id, name, rest[:count], rest[count:], shapes)


class ContextStore:
    """The contexts of one session, or of several that share them.

    Args:
        keep: Make a context for every forward, even where the node's context output is not read.
        retain: Leave a context in the store when its backward has run (retain_graph).
    """

    def __init__(self, *, keep: bool = False, retain: bool = False) -> None:
        self.keep = keep
        self.retain = retain
        self.contexts: dict[int, tuple[Any, ...]] = {}
        # handle -> how many of its several readers have taken it
        self._taken: dict[int, int] = {}
        self._lock = threading.Lock()
        # thread -> the run in progress there; the native kernels append to the same lists
        self.runs: dict[int, Made] = {}

    def __len__(self) -> int:
        """How many contexts are live."""
        return len(self.contexts)

    def put(self, context: Context, log: PoolLog | None = None) -> int:
        """Keep a context.

        Args:
            context: The context.
            log: Where its handle goes if no run stands on this thread.

        Returns:
            Its handle: random, 1 to 2**63 - 1.
        """
        handle = secrets.randbits(63)
        while not handle or handle in self.contexts:
            handle = secrets.randbits(63)
        made = self.runs.get(threading.get_ident())
        if made is not None:
            made.append(handle)
        elif log is not None:
            log.entries.append(handle)
        self.contexts[handle] = context.pack()
        return handle

    def take(self, handle: int, id: str, name: str, readers: int = 1, op: str = PYTHON_OP_GRAD) -> tuple[Any, ...]:
        """The context of a handle, packed, taken out by the last of its readers unless the store retains.

        Args:
            handle: What the PythonOp put out.
            id, name: The call and the Function that the node which takes it belongs to.
            readers: How many nodes take it in a run.
            op: What that node is, for messages.

        Raises:
            RunError: There is no such context, or it belongs to another call.
        """
        record = self.contexts.get(handle)
        if record is None:
            raise RunError(
                f"{op} of {shown(name)}: no context has the handle {handle}. Its backward has run already (run the forward again, or "
                "retain contexts: the store's retain=True, retain_graph=True of a loaded module), or it comes from another session or run"
            )
        context = Context.unpack(record)
        if context.id != id or context.name != name:
            raise RunError(
                f"{op} of {shown(name)} (call {shown(id)}): the handle {handle} belongs to {shown(context.name)} (call "
                f"{shown(context.id)}): the graph joins the context of one call, or order, to the {op} of another"
            )
        if self.retain or (readers > 1 and not self._is_last(handle, readers)):
            return record
        if self.contexts.pop(handle, None) is None:
            return self.take(handle, id, name, op=op)  # another thread was faster: this raises
        return record

    def _is_last(self, handle: int, readers: int) -> bool:
        with self._lock:
            count = self._taken.pop(handle, 0) + 1
            if count < readers:
                self._taken[handle] = count
            return count >= readers

    def free(self, handle: int) -> None:
        """Drop a context that no backward will use; an unknown handle is no error."""
        self.contexts.pop(handle, None)
        self._taken.pop(handle, None)

    def free_all(self, handles: Iterable[int]) -> None:
        """Drop these."""
        for handle in handles:
            self.free(handle)

    def clear(self) -> None:
        """Drop every context."""
        self.contexts.clear()
        self._taken.clear()

    def running(self) -> bool:
        """Whether this thread is inside `run`."""
        return threading.get_ident() in self.runs and self._outer() is not None

    def _outer(self) -> Made | None:
        """The run that this thread is in. One that Ctrl-C has ended between two lines of ours is over: its contexts go."""
        thread = threading.get_ident()
        found = self.runs.get(thread)
        frame: FrameType | None = None if found is None else sys._getframe()
        while found is not None and frame is not found.frame:
            if frame is None:
                self.free_all(found)
                self.leave()
                return None
            frame = frame.f_back
        return found

    def enter(self, frame: FrameType) -> tuple[Made, bool]:
        """The run that this thread is in, or a new one that belongs to a frame, and whether it is new."""
        outer = self._outer()
        if outer is not None:
            return outer, False
        made = Made()
        made.frame = frame
        self.runs[threading.get_ident()] = made
        return made, True

    def leave(self) -> None:
        """The run of this thread is over."""
        made = self.runs.pop(threading.get_ident(), None)
        if made is not None:
            made.frame = None  # which holds the run

    def run(self) -> _Running:
        """Around one run on this thread: contexts that it made are freed when it raises.

        Its ``with`` gives the handles made so far. Runs nested in another (the body of an If) belong to the outer one.
        """
        return _Running(self)

    def release(self, made: Sequence[int], results: Sequence[Any]) -> None:
        """After a run that succeeded: free the contexts that it made and that no result names.

        Args:
            made: The handles that the run made.
            results: Its results; those that are int64 arrays may hold handles that the caller will use.
        """
        if self.keep:
            return
        left = [handle for handle in made if handle in self.contexts]
        named = _named(left, results)
        for handle in left:
            if handle not in named:
                self.free(handle)


_INT64 = np.dtype(np.int64)  # comparing with the name costs 1 us


class _Running:
    """What `ContextStore.run` returns; a generator would take three times as long."""

    __slots__ = ("made", "outer", "store")

    def __init__(self, store: ContextStore) -> None:
        self.store = store

    def __enter__(self) -> Made:
        self.made, new = self.store.enter(sys._getframe(1))
        self.outer = not new
        return self.made

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.outer:
            return
        if kind is not None:
            for handle in self.made:
                self.store.free(handle)
        self.store.leave()


def _named(handles: Sequence[int], results: Sequence[Any]) -> set[int]:
    """Those of the handles that stand in int64 arrays among the results of a run."""
    if not handles:
        return set()
    arrays = (array for array in results if getattr(array, "dtype", None) == _INT64 and array.size <= len(handles))
    return {number for array in arrays for number in array.reshape(-1).tolist()}.intersection(handles)


class PoolLog:
    """What the runs of one session left behind on threads of onnxruntime's pool: nothing there says whose run it was.

    Parallel execution and run_async run kernels on such threads. A run has its place in the log from its start: what stands
    before the places of all runs in progress belongs to runs that have ended.

    Args:
        store: The contexts of the session.
    """

    def __init__(self, store: ContextStore) -> None:
        self.store = store
        #: Handles, to which native.c appends, and (token, exception).
        self.entries: list[Any] = []
        self._gone = 0  # entries that have left the front
        self._starts: dict[object, int] = {}
        self._lock = threading.Lock()

    def begin(self) -> object:
        """A run starts.

        Returns:
            What `end` asks for.
        """
        ticket = object()
        with self._lock:
            if not self._starts:  # what stands here is of no run that was announced: nobody's to free
                self._gone += len(self.entries)
                self.entries.clear()
            self._starts[ticket] = self._gone + len(self.entries)
        return ticket

    def end(self, ticket: object, results: Sequence[Any] | None) -> list[int]:
        """A run has ended: free the contexts of all runs that have, but for those that results name.

        Args:
            ticket: From `begin`.
            results: The results of a run that succeeded, as `ContextStore.release` has them; None of one that failed.

        Returns:
            The handles that the results name: they are the caller's from here on.
        """
        named: set[int] = set()
        with self._lock:
            start = self._starts.pop(ticket) - self._gone
            if results is not None:
                handles = [entry for entry in self.entries[start:] if type(entry) is int]
                named = set(handles) if self.store.keep else _named(handles, results)
            for place, entry in enumerate(self.entries[start:] if named else (), start):
                if type(entry) is int and entry in named:
                    self.entries[place] = None
            count = min(self._starts.values(), default=self._gone + len(self.entries)) - self._gone
            ended = self.entries[:count]
            del self.entries[:count]
            self._gone += count
        self._free(ended)
        return sorted(named)

    def add(self, token: str, error: BaseException) -> bool:
        """Keep what a Function raised until all runs that it may belong to have ended.

        Returns:
            Whether a run is in progress: else nobody will ask.
        """
        with self._lock:
            if self._starts:
                self.entries.append((token, error))
            return bool(self._starts)

    def errors(self) -> dict[str, BaseException]:
        """token -> exception, of the runs in progress."""
        return dict(entry for entry in self.entries[:] if type(entry) is tuple)

    def _free(self, entries: Iterable[Any]) -> None:
        for entry in entries:
            if type(entry) is int:
                self.store.free(entry)


def arrays_of(results: Any) -> list[Any]:
    """The results of a run as arrays, where handles of contexts may be among them; None for the others."""
    return [_array(value) for value in results or ()]


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    kind = getattr(value, "data_type", None)
    return value.numpy() if callable(kind) and kind() == "tensor(int64)" else None
