"""Files reach their places whole and together, or not at all.

::

    with saving() as files:
        files.open("step.init.onnx").write(start)
        files.open("step.onnx").write(step)      # both are there after the block, or neither

What is written goes into drafts. Under Linux they are files without a name (O_TMPFILE), of which a killed process leaves nothing.
Where a file system has no such files, a draft is ``.<name>.<16 hex digits>.draft`` beside its place; it is removed where the block
fails, and by the next save of that name where the process was killed.

When everything is written, a few system calls under a lock of the folder put it in place: the data of models first, under names
that their contents make; then the other files, each by one rename; then older data of the same names is removed. So the file at
a path and the data that it names belong together at every instant. A process that is killed in between may leave a draft that has
got its name for the rename, or data that no model names; the next save of that name removes both. All this is said of processes
that end, not of a machine that loses its power: nothing is forced from the system's memory onto the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from symbolics.errors import ExportError, PythonopError

try:
    import fcntl
except ImportError:  # Windows, which refuses to remove a file that somebody has open: there, nothing needs a lock of ours
    fcntl = None  # type: ignore[assignment]

__all__ = ["Files", "saving", "writable"]

# Seconds to wait for other saves into the same folder, each of which holds the lock for milliseconds.
_PATIENCE = 10.0


def writable(path: str | os.PathLike[str], error: type[Exception] = ExportError, keep: Iterable[str | os.PathLike[str]] = ()) -> Path:
    """Refuse, before any work, what `saving` could not write.

    Args:
        path: Where a file shall go.
        error: What to raise.
        keep: Files that writing there must not replace or remove, by whatever name they go: what a command reads, other outputs.

    Returns:
        The path of the file itself: what a symbolic link leads to, whether it is there or not.

    Raises:
        error: The path is a folder, a device, a pipe or a socket, or a loop of links; its folder is not there or not for us; or
            it is one of those to keep.
    """
    place = Path(path)
    no = f"cannot write {place}"
    try:
        kind = os.stat(place).st_mode
        if not stat.S_ISREG(kind):
            raise error(f"{no}: it is a {'folder' if stat.S_ISDIR(kind) else 'device, pipe or socket, not a file'}; nothing was written")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as problem:
        raise error(f"{no}: {getattr(problem, 'strerror', None) or problem}; nothing was written") from problem
    target = Path(os.path.realpath(place)) if place.is_symlink() else place
    if not target.parent.is_dir():
        raise error(f"{no}: there is no folder {target.parent}; nothing was written")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise error(f"{no}: no permission to write into {target.parent}; nothing was written")
    for kept in map(Path, keep):
        beside = kept.parent.resolve() == target.parent.resolve() and _data_of(target).fullmatch(kept.name)
        if beside or os.path.realpath(kept) == os.path.realpath(target) or _same(kept, target):
            raise error(f"{no}: this would replace or remove {kept}, which is needed; choose another output")
    return target


@contextlib.contextmanager
def saving(error: type[PythonopError] = ExportError) -> Iterator[Files]:
    """Write files that appear together at the end of the block; where anything fails, all is as it was.

    A file that is replaced keeps its mode, a symbolic link stays and what it leads to is replaced.

    Args:
        error: What to raise where a file cannot be written.

    Raises:
        error: As `writable`, or the system refuses: no space, no permission.
    """
    files = Files(error)
    try:
        yield files
        files._put()
    except PythonopError:
        raise
    except OSError as problem:
        raise error(f"cannot write {files.current}: {problem.strerror or problem}; nothing was written") from problem
    finally:
        files._close()


@dataclass(eq=False)
class _Draft:
    """What will be a file.

    Attributes:
        owner: The file that was asked for: itself, or the model whose data this is.
        target: Where it goes; for data unknown until everything is written.
        data: Whether it is data.
        name: The name that it has meanwhile, None for none.
        file: Open for writing and reading; not there before `_create`.
        identity: Device and number of the file.
        replaces: Whether there was a file at the target.
        backup: A second name of that file.
    """

    owner: Path
    target: Path
    data: bool
    name: Path | None = None
    file: BinaryIO | None = None
    identity: tuple[int, int] = (-1, -1)
    replaces: bool = False
    backup: Path | None = None

    @property
    def placed(self) -> bool:
        """Whether it is what stands at its target."""
        with contextlib.suppress(OSError):
            found = os.lstat(self.target)
            return (found.st_dev, found.st_ino) == self.identity
        return False


class Files:
    """The files of one `saving` block."""

    def __init__(self, error: type[PythonopError]) -> None:
        self.current = Path()  # what an error of the system is about
        self._error = error
        self._drafts: list[_Draft] = []

    def open(self, path: str | os.PathLike[str]) -> BinaryIO:
        """A file to write to, which goes to ``path`` at the end of the block.

        Raises:
            PythonopError: As `writable`, or another file of the block goes there.
        """
        target = writable(path, self._error)
        if any(draft.target == target for draft in self._drafts):
            raise self._error(f"cannot write {path}: another file of the same save goes there; nothing was written")
        self.current = Path(path)
        return self._create(_Draft(target, target, data=False))

    def add_data(self, path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> str:
        """Data that the model at ``path`` names; it goes beside the model.

        Args:
            path: The model's path, as it is given to `open`.
            write: Called once with the file to write to.

        Returns:
            The name that the model is to use: the model's own, a digest of the data, and ``.data``.

        Raises:
            PythonopError: As `writable`; or readers would not accept the data: the path is a link into another folder, or has ':' or '\\\\' in its name.
        """
        self.current, target = Path(path), writable(path, self._error)
        if target.parent.resolve() != self.current.parent.resolve():
            raise self._error(
                f"cannot write {path}: it is a link into another folder, and readers look for a model's data beside the link; "
                f"save to {target} instead, or without external data; nothing was written"
            )
        if {":", "\\"} & set(target.name):
            raise self._error(
                f"cannot write {path}: readers accept no data in a file whose name has ':' or '\\', and the data's begins like the model's: "
                "choose another name, or save without external data; nothing was written"
            )
        draft = _Draft(target, target, data=True)
        file = self._create(draft)
        write(file)
        file.flush()
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]  # type: ignore[arg-type]  # a BufferedRandom is what it takes
        draft.target = target.with_name(f"{target.name}.{digest}.data")
        return draft.target.name

    def _create(self, draft: _Draft) -> BinaryIO:
        """Open a draft."""
        self._drafts.append(draft)
        folder = draft.owner.parent
        mode = stat.S_IMODE(os.stat(draft.owner).st_mode) if draft.owner.exists() else None
        first = 0o666 if mode is None else 0o600  # nobody reads a draft who may not read the file
        with _locked(folder) as safe:
            if safe:
                _remove_drafts(draft.owner, {other.name for other in self._drafts})
            draft.file = _unnamed(folder, first)
            if draft.file is None:
                draft.name = _free_name(draft.owner)
                draft.file = open(draft.name, "x+b", opener=lambda path, flags: os.open(path, flags, first))  # noqa: SIM115  # _close()
            if fcntl is not None:
                with contextlib.suppress(OSError):  # says to other saves of this name that somebody works on it
                    fcntl.flock(draft.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if mode is not None and hasattr(os, "fchmod"):
            os.fchmod(draft.file.fileno(), mode)
        made = os.fstat(draft.file.fileno())
        draft.identity = made.st_dev, made.st_ino
        return draft.file

    def _put(self) -> None:
        """Put everything in place, data first; where that fails, put everything back."""
        drafts = sorted(self._drafts, key=lambda draft: not draft.data)
        for draft in drafts:
            assert draft.file is not None
            self.current = draft.owner
            draft.file.flush()
            if os.name == "nt":  # which renames no open file
                draft.file.close()
        with contextlib.ExitStack() as locks:
            safe = [locks.enter_context(_locked(folder)) for folder in sorted({draft.target.parent for draft in drafts})]
            try:
                for draft in drafts:
                    self.current = draft.owner
                    draft.replaces = os.path.lexists(draft.target)
                    if draft.replaces:
                        _give_name(draft)
                for draft in drafts[:-1]:  # where the last is in place, nothing has to be put back
                    if draft.replaces and not draft.data:
                        draft.backup = _free_name(draft.owner)
                        with contextlib.suppress(OSError):  # not every file system has second names
                            os.link(draft.target, draft.backup)
                for draft in drafts:
                    self.current = draft.owner
                    _place(draft)
            except BaseException:
                _put_back(drafts)
                raise
            finally:
                self._remove_names()
            if all(safe):
                for draft in drafts:
                    if not draft.data:
                        _remove_data(draft.owner, {other.target.name for other in drafts})

    def _remove_names(self) -> None:
        for draft in self._drafts:
            for name in (draft.name, draft.backup):
                if name is not None:
                    with contextlib.suppress(OSError):
                        os.unlink(name)

    def _close(self) -> None:
        """Leave nothing: after `_put` there is nothing left but open files."""
        for draft in self._drafts:
            if draft.file is not None:
                with contextlib.suppress(OSError):  # the disk may be full
                    draft.file.close()
        self._remove_names()


# ------------------------------------------------------------------------------------------------------- drafts and names


def _data_of(model: Path) -> re.Pattern[str]:
    return re.compile(re.escape(model.name) + r"\.[0-9a-f]{16}\.data")


def _drafts_of(file: Path) -> re.Pattern[str]:
    return re.compile(re.escape(f".{file.name}.") + r"[0-9a-f]{16}\.draft")


def _free_name(file: Path) -> Path:
    return file.with_name(f".{file.name}.{secrets.token_hex(8)}.draft")


def _unnamed(folder: Path, mode: int) -> BinaryIO | None:
    """A file without a name, None where there is no such thing or no way to name it later."""
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        file = open(folder, "w+b", opener=lambda path, _: os.open(path, os.O_TMPFILE | os.O_RDWR, mode))  # noqa: SIM115
    except OSError:  # the file system cannot; where it is no space or no permission, the file with a name says so
        return None
    if os.path.exists(_handle(file)):
        return file
    file.close()
    return None


def _handle(file: BinaryIO) -> str:
    return f"/proc/self/fd/{file.fileno()}"


def _link(draft: _Draft, name: Path) -> None:
    """Give a file without a name a name that is free."""
    assert draft.file is not None
    # With a src_dir_fd (which an absolute path makes meaningless), os.link follows the link in /proc to the file.
    os.link(_handle(draft.file), name, src_dir_fd=draft.file.fileno(), follow_symlinks=True)


def _give_name(draft: _Draft) -> None:
    """A rename needs a name; only a name that is free can be given without one."""
    if draft.name is None:
        draft.name = _free_name(draft.owner)
        _link(draft, draft.name)


def _place(draft: _Draft) -> None:
    if draft.name is None:
        try:
            _link(draft, draft.target)
        except FileExistsError:  # just now
            draft.replaces = True
            _give_name(draft)
    if draft.name is not None:
        os.replace(draft.name, draft.target)


def _put_back(drafts: list[_Draft]) -> None:
    """Undo what `Files._put` has done when it is interrupted; but where the last file is in place, all are."""
    if not drafts or drafts[-1].placed:
        return
    for draft in reversed(drafts):
        if not draft.placed or (draft.data and draft.replaces):  # the data that was there is the same
            continue
        try:
            if draft.backup is not None:
                os.replace(draft.backup, draft.target)
            elif not draft.replaces:
                os.unlink(draft.target)
        except OSError:
            return  # it stays, and with it its data


def _same(a: Path, b: Path) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------------ beside other saves


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """While this is open, nobody else puts saved files into their places in this folder.

    Yields:
        Whether files of others may be removed: not where another save holds the lock for too long.
    """
    if fcntl is None:
        yield True
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # a folder that may be written but not read
        yield False
        return
    try:
        yield _lock(handle)
    finally:
        os.close(handle)  # and the lock is free


@contextlib.contextmanager
def between_saves(folder: Path) -> Iterator[None]:
    """While this is open, no save removes data in this folder; one that would waits, up to ten seconds. Where nothing can be locked, it does nothing."""
    handle = None
    if fcntl is not None:
        with contextlib.suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
    try:
        if handle is not None:
            _lock(handle, fcntl.LOCK_SH)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _lock(handle: int, kind: int | None = None) -> bool:
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if kind is None else kind) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        except OSError:  # NFS has no locks of folders
            return True


def _remove_drafts(file: Path, own: set[Path | None]) -> None:
    """Remove what killed saves of this file have left."""
    for path in _beside(file, _drafts_of(file)):
        if path not in own and not _in_use(path):
            with contextlib.suppress(OSError):
                path.unlink()


def _remove_data(model: Path, named: set[str]) -> None:
    """Remove data of this model that it does not name: of older versions, and of saves that were killed."""
    for path in _beside(model, _data_of(model)):
        if path.name not in named:
            with contextlib.suppress(OSError):
                path.unlink()


def _beside(file: Path, names: re.Pattern[str]) -> list[Path]:
    with contextlib.suppress(OSError):
        return [file.with_name(name) for name in os.listdir(file.parent) if names.fullmatch(name)]
    return []


def _in_use(path: Path) -> bool:
    """Whether a save holds the lock of its draft, or one cannot tell."""
    if fcntl is None:
        return False
    try:
        with open(path, "r+b" if os.access(path, os.W_OK) else "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
