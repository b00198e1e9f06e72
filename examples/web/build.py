"""Make the page: ``python -m examples.web.build OUT``, then ``python -m http.server --directory OUT``.

OUT gets the page, the model's artifacts, a data set that is drawn here, and the files of npm's onnxruntime-web, which
``make node`` installs and ``npm install --ignore-scripts onnxruntime-web`` too. Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

import exporter
from examples.web import digits, model
from exporter.cli import main as pythonop

HERE = Path(__file__).parent
TRAINING, TEST, RATE = 50 * model.BATCH, 400, 0.002
PACKAGE = "onnxruntime-web"
# One file for WebAssembly, one for a browser with WebGPU; each loads the .wasm beside it.
RUNTIME = ["ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm", "ort.webgpu.bundle.min.mjs", "ort-wasm-simd-threaded.asyncify.wasm"]
PAGE = ["index.html", "style.css", "page.mjs", "draw.mjs"]


def packages() -> Path:
    """Where `make node` installs what comes from npm; the variable PYTHONOP_NODE_DIR names another folder."""
    return Path(os.environ.get("PYTHONOP_NODE_DIR", Path(sys.prefix, "node")))


def runtime(folder: Path) -> tuple[Path, str]:
    """onnxruntime-web's files below a folder with node_modules, and its version.

    Raises:
        FileNotFoundError: It is not installed there.
    """
    package = folder / "node_modules" / PACKAGE
    if not (package / "package.json").is_file():
        raise FileNotFoundError(f"{PACKAGE} is not in {folder}: npm install --ignore-scripts --prefix {folder} {PACKAGE}")
    return package / "dist", json.loads((package / "package.json").read_text())["version"]


def build(out: Path, *, dynamo: bool = True, node: Path | None = None) -> dict[str, Any]:
    """Write the page into a folder, which is made where it is missing.

    Args:
        out: The folder; files of these names are replaced, others stay.
        dynamo: Which of torch's exporters makes the model.
        node: A folder with node_modules; that of `packages` by default.

    Returns:
        What about.json says: sizes of the data and of the network, versions.

    Raises:
        FileNotFoundError: onnxruntime-web is not installed.
    """
    files, version = runtime(node or packages())
    (out / "ort").mkdir(parents=True, exist_ok=True)
    for name in RUNTIME:
        shutil.copyfile(files / name, out / "ort" / name)
    for path in [*(HERE / name for name in PAGE), HERE.parent / "pythonop.mjs", HERE.parent / "pythonop.d.mts"]:
        shutil.copyfile(path, out / path.name)
    images, labels = digits.draw(TRAINING + TEST)
    (out / "digits.bin").write_bytes(labels.tobytes() + images.tobytes())
    exported = ["--portable", "--for", "webgpu", "--optimizer", "adamw", "--set", f"lr={RATE}", "--dynamo" if dynamo else "--no-dynamo"]
    pythonop.main(["step", "examples.web.model:case", "--artifacts", str(out / "model"), *exported], standalone_mode=False)
    about = {
        "training": TRAINING, "test": TEST, "size": digits.SIZE, "batch": model.BATCH,
        "neurons": model.NEURONS, "times": model.TIMES, "classes": model.CLASSES, "rate": RATE,
        "versions": {"pythonop": exporter.__version__, "torch": torch.__version__, PACKAGE: version},
        "exporter": "torch.export" if dynamo else "TorchScript",
    }  # fmt: skip
    (out / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    return about


def main() -> int:
    """Build, and say how to look at it."""
    parser = argparse.ArgumentParser(description="Make a page that trains a spiking network in the browser.")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--no-dynamo", dest="dynamo", action="store_false", help="export by TorchScript")
    parser.add_argument("--node", type=Path, metavar="DIR", help="a folder with node_modules")
    given = parser.parse_args()
    try:
        build(given.out, dynamo=given.dynamo, node=given.node)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"python -m http.server --bind 127.0.0.1 --directory {given.out} 8000    # then open http://127.0.0.1:8000")
    return 0


if __name__ == "__main__":
    sys.exit(main())
