"""docs/gallery.md: its pictures are those that tests/gallery.py makes, each of a size that a page can carry."""

from __future__ import annotations

import re

import numpy as np
import PIL.Image
import pytest

from exporter.pictures import layout
from tests import browser, gallery
from tests.processes import ROOT
from tests.support import missing

SHOWN = re.findall(r'<img src="([^"]+)[.]png"', (ROOT / "docs" / "gallery.md").read_text())


def test_the_page_shows_every_picture_and_no_other():
    assert sorted(SHOWN) == sorted([*gallery.PICTURES, "web"]), "web.png is what make web shows after some minutes"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.png")), ids=lambda path: path.stem)
def test_a_picture_is_small_and_shown(path):
    assert path.stem in SHOWN
    assert path.stat().st_size <= gallery.LARGEST
    with PIL.Image.open(path) as picture:
        assert picture.width >= 560
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 20, "hardly a colour: the page was empty"


@pytest.mark.slow
def test_the_pictures_are_made(tmp_path):
    browser.chromium()
    if layout.missing() is not None:
        missing("pygraphviz", "pygraphviz is not installed: nothing lays out a picture")
    names = ["graph", "report", "profile"]
    gallery.make(tmp_path, names)
    for name in names:
        with PIL.Image.open(tmp_path / f"{name}.png") as made, PIL.Image.open(ROOT / "docs" / f"{name}.png") as kept:
            assert made.width == kept.width
            assert abs(made.height - kept.height) < kept.height / 5
