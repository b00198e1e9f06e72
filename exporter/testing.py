"""For other people's tests: one assertion that a model survives its way through a file."""

from __future__ import annotations

import os
from typing import Any

from exporter.verification.report import Report
from exporter.verification.verify import verify
from symbolics.text import clean

__all__ = ["assert_roundtrip"]


def assert_roundtrip(model: Any, args: Any = (), kwargs: dict[str, Any] | None = None, **options: Any) -> Report:
    """Assert in a test that a model's ONNX file and its gradients equal eager PyTorch's. It runs `verify`.

    Args:
        model, args, kwargs: As `verify` takes them.
        **options: Passed to `verify` (dynamo, setup, allow, dynamic_shapes, ...).

    Returns:
        The report.

    Raises:
        AssertionError: Something differs. The message lists it, the worst first.
        PythonopError: As `verify` raises it.

    Examples:
        >>> def test_my_model_exports():
        ...     exporter.testing.assert_roundtrip(model, (x,))
    """
    __tracebackhide__ = True  # pytest shows the test's line, and not ours
    report = verify(model, args, kwargs, **options)
    if not report.ok:
        bad = [row for row in report.worst() if not row.ok]
        lines = [f"  {row.kind} {row.name}: {row.problem or f'error {row.error:.1e}, allowed {row.tolerance:.1e}'}" for row in bad[:20]]
        more = [f"  and {len(bad) - 20} more"] if len(bad) > 20 else []
        departure = [f"first departure: {report.first_departure}"] if report.first_departure else []
        notes = [f"{note.title}: {note.text}" for note in report.notes]
        raise AssertionError("\n".join([report.summary(), *lines, *more, *departure, *_leads(options, report), *notes]))
    return report


def _leads(options: dict[str, Any], report: Report) -> list[str]:
    """What leads to the Function that differs: of a file that was there, `pythonop diff` as well."""
    bisect = [] if options.get("bisect") or report.first_departure else ["bisect=True names the first node that departs"]
    file = options.get("file")
    kept = clean(str(file)) if isinstance(file, (str, os.PathLike)) else "the file"
    diff = [] if file is None else [f"pythonop diff {kept} TODAY, an export of today's model, names the Function whose code changed"]
    return ["to find the Function: " + "; ".join((*bisect, *diff))] if bisect or diff else []
