"""docs/api.md, made from the docstrings: ``python -m tests.api_page`` writes it anew. tests/test_site.py holds it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import exporter
from tests.processes import ROOT

__all__ = ["GROUPS", "PAGE", "public", "text"]

PAGE = ROOT / "docs" / "api.md"

#: Heading, what stands below it, names.
GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Export", "", ("export", "hook", "install", "uninstall", "Case", "Program")),
    ("Run", "", ("inference_session", "session_options", "reference_evaluator", "register")),
    ("Load, and train in Python", "", ("load",)),
    ("Gradients of a file", "", ("build_gradient_graph", "build_tangent_graph", "gradient", "check_gradients")),
    (
        "Training steps",
        "[Train in one file](training.md) shows them at work.",
        ("export_training_step", "TrainingStep", "Trainer", "export_evaluation", "write_artifacts", "trained"),
    ),
    ("Integers", "[Quantisation](quantization.md) shows it at work.", ("quantize", "Quantized", "quantizer", "verify_quantized", "to_qonnx", "Qonnx", "from_qonnx")),
    ("Verify and compare", "", ("verify", "testing.assert_roundtrip", "diff_files")),
    (
        "Errors",
        "[When something is refused](faq.md) explains those that people meet most.",
        (
            "PythonopError", "ExportError", "UnsupportedOperatorError", "ArgumentError", "TrustError", "FormatError", "RunError", "PythonopWarning",
            "errors.full",
        ),
    ),
)  # fmt: skip


def public() -> list[str]:
    """Every public name, as it stands behind ``exporter.``"""
    return (
        [name for name in exporter.__all__ if name not in ("errors", "testing")]
        + ["errors.full"]
        + [f"testing.{name}" for name in exporter.testing.__all__]
    )


def _thing(name: str) -> Any:
    found: Any = exporter
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _line(thing: Any) -> str:
    """The first sentence of a docstring."""
    first = (inspect.getdoc(thing) or "").split("\n\n")[0]
    return " ".join(first.split())


def _signature(thing: Any) -> str:
    """Parameters and defaults; types stand in the docstring."""
    signature = inspect.signature(thing)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name not in ("self", "cls")]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _entries(name: str) -> Iterator[tuple[str, str]]:
    """What is called or read, and its line: of a class its methods and properties, too."""
    thing = _thing(name)
    if isinstance(thing, type) and issubclass(thing, BaseException):
        yield f"exporter.{name}", _line(thing)
        return
    yield f"exporter.{name}{_signature(thing)}", _line(thing)
    if isinstance(thing, type):
        for key, member in vars(thing).items():
            made = f"exporter.{name}.{key}" if isinstance(member, (classmethod, staticmethod)) else f".{key}"
            if isinstance(member, (classmethod, staticmethod)):
                yield made + _signature(member.__func__), _line(member.__func__)
            elif not key.startswith("_") and isinstance(member, property):
                yield made, _line(member)
            elif not key.startswith("_") and inspect.isfunction(member):
                yield made + _signature(member), _line(member)


def text() -> str:
    """The page."""
    parts = [
        "# Python",
        "You look up every public name of `exporter`, with its signature and what it does. `help(exporter.export)` prints the whole "
        "docstring. A name that is not on this page is not public.\n\n"
        "<!-- Made by `python -m tests.api_page`: change the docstrings. -->",
    ]
    for heading, more, names in GROUPS:
        parts += [f"## {heading}", *([more] if more else [])]
        for name in names:
            for call, line in _entries(name):
                shown = textwrap.fill(call, 84, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
                parts.append(f"```\n{shown}\n```\n\n{line}")
    parts += ["## The docstrings", "The site shows each of them here as a whole."]
    parts += [f"::: {thing.__module__}.{thing.__qualname__}" for _, _, names in GROUPS for thing in map(_thing, names)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
