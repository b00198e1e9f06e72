"""What is said of ways out: the one that was taken, and those that were tried."""

from __future__ import annotations

from collections.abc import Sequence

from exporter.fallback.way import Way
from exporter.forward.failures import TorchExporterError
from exporter.forward.ways_out import Failed
from symbolics.errors import ExportError, PythonopError, as_raised
from symbolics.text import clean, ends

__all__ = ["none_works", "taken_instead", "ways_tried"]

_Attempts = Sequence[tuple[Way, str]]

#: Lines of an error that lists ways, and of what failed first among them.
_LINES, _HEAD = 10, 3


class _NoWay(ExportError):
    """No way out works. It has at most ten lines."""

    most_lines = _LINES


def taken_instead(failed: Failed, asked: Way, way: Way) -> str:
    """The warning that another way was taken."""
    lost = ""
    if not way.sizes:
        lost = ". The file takes the example's sizes alone: no axis of it is open, as dynamic_shapes or dynamic_axes had asked"
    cause = "; ".join(line.strip() for line in _head(failed))
    return (
        f"{ends(cause, 700)}: fallback=True took {way.beside(asked, failed.model)} in its place: outputs and gradients of that file equal eager's on the example{lost}. "
        "To keep this choice, and save the tries, write it into the call"
    )


def none_works(failed: Failed, asked: Way, attempts: _Attempts, why: str = "") -> PythonopError:
    """The error where no way works: what failed first, and a line for each way, or why none was tried."""
    head = _head(failed)
    lines = [
        *head,
        "  fallback=True found no way out:" if attempts else f"  fallback=True tried no way out: {why or 'there is none to try'}",
        *_listed(failed, asked, attempts, _LINES - len(head) - 1),
    ]
    return as_raised(failed.error, "\n".join(lines), _NoWay)


def ways_tried(failed: Failed, asked: Way, attempts: _Attempts, works: Way | None, ended: bool) -> Exception:
    """The error of an export without ``fallback=True``: the ways that were tried, in place of those that were guessed."""
    error = failed.error
    if not isinstance(error, TorchExporterError) or not error.head or not (attempts or works):
        return error
    lines = [*_head(failed), *([f"  {error.change}, or a way out, tried here:"] if error.change else ["  ways out, tried here:"])]
    if works is None:
        lines += [
            *_listed(failed, asked, attempts, _LINES - len(lines) - 1),
            "  no way out works" if ended else "  fallback=True goes on trying",
        ]
    else:
        lines += _listed(failed, asked, attempts, _LINES - len(lines) - 2)
        opaque = "; what is named runs PyTorch wherever the file runs" if works.operators or works.modules else ""
        lines += [
            f"    {works.beside(asked, failed.model)} works: outputs and gradients equal eager's{opaque}",
            "  fallback=True takes the first that works",
        ]
    told = as_raised(error, "\n".join(lines), type(error))
    vars(told).update({name: value for name, value in vars(error).items() if name in ("head", "change", "operators", "module")})
    return told


def _head(failed: Failed) -> list[str]:
    """The cause and its place, in a few lines."""
    text = getattr(failed.error, "head", "") or str(failed.error).partition("\n  way out")[0] or type(failed.error).__name__
    if not isinstance(failed.error, ExportError):
        text = f"torch.onnx.export(dynamo={failed.dynamo}) fails: {type(failed.error).__name__}: {text}"
    return text.strip("\n").splitlines()[:_HEAD]


def _listed(failed: Failed, asked: Way, attempts: _Attempts, most: int) -> list[str]:
    lines = [f"    {clean(way.beside(asked, failed.model), 120)}: no: {ends(clean(why, 600), 200)}" for way, why in attempts]
    return lines if len(lines) <= most else [*lines[: most - 1], f"    and {len(lines) - most + 1} more"]
