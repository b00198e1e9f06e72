"""What to say where onnxruntime or the native library is not there."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

from symbolics.text import clean, extra

__all__ = ["NO_ONNXRUNTIME", "why_no_library"]

NO_ONNXRUNTIME = f"onnxruntime is not installed: {extra('run')} (exporter.reference_evaluator runs without it)"

_WITHOUT = "Without it, onnxruntime runs files that need no Python (portable=True), and exporter.reference_evaluator all."


def why_no_library(error: ImportError, folder: Path) -> str:
    """Why PythonOps cannot run on onnxruntime, and the way out.

    Args:
        error: What importing the native library raised.
        folder: Where it should be.
    """
    home = folder.parents[2]
    if any(folder.glob("_native*.so")) or any(folder.glob("_native*.pyd")):
        reason = f"does not load ({clean(str(error), 300)}): install pythonop again, with this Python: {_again()}"
    elif (home / "setup.py").exists():
        reason = (
            f"is not compiled in {home}, the sources that Python found first: run from another folder, where it finds the pythonop "
            f"that is installed, or compile it there, with a C compiler: pip install -e '{home}'"
        )
    else:
        reason = (
            "is not there: no C compiler was found when pythonop was installed, or it came as the wheel without compiled code. Install a compiler, and Python's headers (Debian: gcc python3-dev; "
            f"macOS: xcode-select --install; Windows: Visual Studio's build tools), then: {_again()}"
        )
    return f"the native library, which runs PythonOps on onnxruntime, {reason}. {_WITHOUT}"


def _again() -> str:
    """The command that compiles what is installed, from where it came from."""
    try:
        said = metadata.distribution("pythonop").read_text("direct_url.json")
        url = json.loads(said or "{}").get("url", "")
    except (metadata.PackageNotFoundError, ValueError):
        url = ""
    source = f"'{clean(url)}'" if url.startswith("file:") and not url.endswith(".whl") else "--no-binary pythonop pythonop"
    return f"pip install --force-reinstall --no-deps --no-cache-dir {source}"
