"""The pictures of docs/gallery.md, made again: python -m tests.gallery [--only NAME ...] (`make gallery` builds the site for it first).

The commands of docs/command-line.md run on the model of that page, and headless Chromium opens what they write: wide, dark, and on a telephone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from tests import pages
from tests.browser import OFFLINE, installed
from tests.processes import ROOT, python

__all__ = ["LARGEST", "PICTURES", "make"]

#: Bytes of a picture, at most.
LARGEST = 200_000
_PHONE = (390, 844)

#: A recurrence that enlarges roundings, and a pool over values that are equal but for one.
_HARD = """
import torch
from torch import nn


class Hard(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate, self.pool = nn.Parameter(torch.tensor(3.9)), nn.MaxPool1d(2)

    def forward(self, x, w):
        x = torch.sigmoid(self.pool(torch.stack([x @ w, x.flip(1) @ w.flip(0)], -1)).squeeze(-1))
        for _ in range(14):
            x = self.rate * x * (1 - x)
        return x


def make():
    torch.manual_seed(0)
    return Hard(), (torch.randn(8, 64), torch.randn(64, 8))
"""


@dataclass(frozen=True)
class Picture:
    """One picture of the gallery.

    Attributes:
        pages: What the browser opens: one page, or several that stand side by side, each as wide as a telephone.
        size: Of the window; what is empty below the page is cut off.
        dark: Whether the page is asked for its dark colours.
    """

    pages: tuple[str, ...]
    size: tuple[int, int]
    dark: bool = False


#: docs/NAME.png -> what is on it. Pages that a command writes are in one folder; ``site/`` is the site.
PICTURES = {
    "graph": Picture(("training.svg",), (790, 900)),
    "graph-page": Picture(("training.html",), (1280, 760)),
    "profile": Picture(("flame.html",), (1100, 1200)),
    "report": Picture(("report.html",), (1100, 2470)),
    "report-dark": Picture(("hard.html",), (1100, 1275), dark=True),
    "site": Picture(("site/index.html",), (1280, 900)),
    "phones": Picture(("report.html", "flame.html", "training.html", "site/index.html"), _PHONE),
    "phones-dark": Picture(("report.html", "flame.html", "training.html", "site/index.html"), _PHONE, dark=True),
}


def _write_pages(folder: Path) -> None:
    """What the commands write.

    Raises:
        RuntimeError: One failed.
    """
    (model,) = pages.code("docs/command-line.md")
    (folder / "mymodel.py").write_text(model)
    (folder / "hard.py").write_text(_HARD)
    for line in (
        "export mymodel:make -o model.onnx",
        "gradient model.onnx -o training.onnx",
        "draw training.onnx -o training.svg --depth 2",
        "draw training.onnx -o training.html --depth 2",
        "profile training.onnx --allow mymodel:* --times 200 --html flame.html",
        "verify mymodel:make --html report.html",
        "verify hard:make --html hard.html",
    ):
        done = python("-m", "exporter.cli", *line.split(), cwd=folder, PYTHONPATH=str(ROOT))
        if done.returncode and not (line.startswith("verify hard") and done.returncode == 1):
            raise RuntimeError(f"pythonop {line}: {done.stderr}")


def make(target: Path, names: Sequence[str] = tuple(PICTURES), say: Callable[[str], None] = lambda _: None) -> None:
    """Make pictures.

    Args:
        target: The folder that gets them.
        names: Which.
        say: Is told each.

    Raises:
        RuntimeError: There is no Chromium, no site where it is asked for, or a command failed.
    """
    browser = installed()
    if browser is None:
        raise RuntimeError("no Chromium on this machine: apt-get install chromium, or PYTHONOP_CHROMIUM=path")
    chosen = {name: PICTURES[name] for name in names}
    if any(page.startswith("site/") for each in chosen.values() for page in each.pages) and not (ROOT / "site" / "index.html").exists():
        raise RuntimeError("there is no site: make docs")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, _served(folder := Path(name)) as url:
        (folder / "site").symlink_to(ROOT / "site")
        _write_pages(folder)
        for name, picture in chosen.items():
            _shoot(browser, folder, url, picture, target / f"{name}.png")
            say(f"{name}.png: {(target / f'{name}.png').stat().st_size:,} bytes")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The address of a folder, on the loopback: a site in a file has neither a search nor a memory of its colours."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def _shoot(browser: str, folder: Path, url: str, picture: Picture, target: Path) -> None:
    page, (width, height) = picture.pages[0], picture.size
    if len(picture.pages) > 1:  # a window cannot be as narrow as a telephone; a frame can
        page = "frames.html"
        style = f"width: {width}px; height: {height}px; border: 1px solid #8c959f; border-radius: 18px; margin: 8px"
        frames = "".join(f'<iframe src="{each}" style="{style}" scrolling="no"></iframe>' for each in picture.pages)
        (folder / page).write_text(f'<!doctype html><body style="margin: 0; white-space: nowrap; background: #d0d7de">{frames}</body>')
        width, height = (width + 22) * len(picture.pages), height + 22
    shot = folder / "shot.png"
    command = [browser, *OFFLINE, f"--user-data-dir={folder / target.stem}", f"--window-size={width},{height}", f"--screenshot={shot}"]
    command += [
        "--virtual-time-budget=3000",
        "--blink-settings=preferredColorScheme=0" if picture.dark else "--blink-settings=preferredColorScheme=1",
    ]
    subprocess.run([*command, f"{url}/{page}"], check=True, capture_output=True, timeout=120)
    found = _without_empty_end(PIL.Image.open(shot).convert("RGB"))
    found.save(target, optimize=True)
    if target.stat().st_size > LARGEST:
        _few_colours(found).save(target, optimize=True)
    if target.stat().st_size > LARGEST:
        raise RuntimeError(f"{target.name} has more than {LARGEST:,} bytes")


def _few_colours(picture: PIL.Image.Image) -> PIL.Image.Image:
    """With the 256 commonest colours, as they are: what is between them, at the edges of letters, becomes the nearest."""
    pixels = np.asarray(picture)
    colours, inverse, counts = np.unique(pixels.reshape(-1, 3).astype(np.int32), axis=0, return_inverse=True, return_counts=True)
    commonest = colours[np.argsort(-counts)[:256]]
    nearest = np.concatenate([((each[:, None] - commonest) ** 2).sum(-1).argmin(1) for each in np.array_split(colours, 16)])
    found = PIL.Image.fromarray(nearest[inverse.reshape(-1)].astype(np.uint8).reshape(pixels.shape[:2]), "P")
    found.putpalette(commonest.astype(np.uint8).tobytes())
    return found


def _without_empty_end(picture: PIL.Image.Image) -> PIL.Image.Image:
    pixels = np.asarray(picture)
    inked = np.flatnonzero((pixels != pixels[-1, -1]).any((1, 2)))
    return picture.crop((0, 0, picture.width, min(picture.height, int(inked[-1]) + 24)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES))
    parser.add_argument("--output", type=Path, default=ROOT / "docs")
    options = parser.parse_args(argv)
    make(options.output, options.only, print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
