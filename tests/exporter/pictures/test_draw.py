"""Pictures as they are written: what is in them, what a browser makes of them, and that no text of a file becomes markup."""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ET

import onnx
import onnx.parser
import pytest

from exporter.pictures import draw as drawing, layout
from exporter.pictures.draw import draw_html, draw_svg
from exporter.pictures.layout import Drawing, Frame, lay_out
from symbolics.errors import ArgumentError, FormatError, RunError
from tests import browser
from tests.exporter.conftest import EVIL
from tests.support import missing

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ["plain", "op", "portable", "step", "gradient", "hostile", "empty"]


@pytest.fixture
def graphviz():
    if layout.missing() is not None:
        missing("pygraphviz", "pygraphviz is not installed: nothing lays out a picture")


def parsed(svg):
    """The boxes of a picture: class, title and rectangle of each."""
    root = ET.fromstring(svg)
    found = []
    for group in root.iter(f"{SVG}g"):
        if group.get("class").startswith("box"):
            rect = [float(group.findall(f"{SVG}rect")[1].get(key)) for key in ("x", "y", "width", "height")]
            found.append((group.get("class").split(), group.find(f"{SVG}text").text, rect))
    return root, found


@pytest.mark.parametrize("name", NAMES)
def test_svg(graphviz, samples, name):
    root, boxes = parsed(draw_svg(samples[name], name, 9))
    width, height = (float(root.get(key)) for key in ("width", "height"))
    for _, _, (x, y, w, h) in boxes:
        assert x >= -13
        assert y >= -13
        assert x + w <= width
        assert y + h <= height
    for i, (_, _, (x, y, w, h)) in enumerate(boxes):
        for _, _, (a, b, c, d) in boxes[:i]:
            assert x + w <= a + 1 or a + c <= x + 1 or y + h <= b + 1 or b + d <= y + 1, "no box covers another"
    assert (len(boxes) == 0) == (name == "empty")


def test_colours_say_what_a_box_is(graphviz, samples):
    _, boxes = parsed(draw_svg(samples["gradient"], "g", 9))
    kinds = {" ".join(kind): text for kind, text, _ in boxes}
    assert kinds["box node forward python"] == "Scale"
    assert kinds["box node gradient python"] == "Scale"
    assert kinds["box node forward stops"] == "StopGradient"
    assert any(kind.startswith("box node gradient") for kind in kinds)


def test_the_gradient_stands_beside_the_forward_and_runs_up(graphviz, samples):
    _, boxes = parsed(draw_svg(samples["gradient"], "g", 9))
    forward = [rect for kind, _, rect in boxes if "forward" in kind]
    gradient = [rect for kind, _, rect in boxes if "gradient" in kind]
    assert max(x + w for x, _, w, _ in forward) < min(x for x, *_ in gradient)
    at = {text: y for kind, text, (_, y, _, _) in boxes if kind[1] in ("input", "output")}
    assert at["x"] < at["add_26"]
    assert at["add_26_grad"] > at["x_grad"]


def test_no_text_becomes_markup(graphviz, samples):
    root, _ = parsed(draw_svg(samples["hostile"], EVIL, 9))
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {"svg", "title", "style", "rect", "g", "path", "text"}
    page = draw_html(samples["hostile"], EVIL, 9)
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "49" not in re.findall(r"<h1>(.*?)</h1>", page)[0], "no template reads a text of the file"


def test_a_hostile_page_in_a_browser(graphviz, samples, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(draw_html(samples["hostile"], EVIL, 9))
    told = browser.told_by(
        """<iframe src="/page.html" style="width: 900px; height: 600px"></iframe><script>
        frames[0].alert = () => tell({ error: "a text of the file ran" });
        document.querySelector("iframe").onload = () => {
          const page = frames[0].document;
          const search = page.getElementById("search");
          search.value = "first";
          search.dispatchEvent(new frames[0].Event("input"));
          page.querySelector("#found button").click();
          setTimeout(() => tell({
            title: page.querySelector("#facts h2").textContent, name: page.querySelector("#facts dd").textContent,
            hit: page.querySelectorAll(".hit").length, images: page.images.length,
          }), 300);
        };</script>""",
        {"/page.html": page},
    )
    assert (told["title"], told["images"]) == ("Relu", 0)
    assert told["hit"] == 1
    assert told["name"].startswith("first</script><script>alert(1)")


def test_a_page_opens_modules_and_finds_nodes(graphviz, samples):
    page = draw_html(samples["step"], "step", 1)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
    views = set(re.findall(r'data-view="([^"]*)"', page))
    assert data["first"] == "depth 1"
    assert len(views) == len(data["views"])
    assert {box["opens"] for box in data["boxes"].values()} - {""} <= set(data["views"])
    assert any(box["opens"] for box in data["boxes"].values())
    for name, text, view in data["nodes"]:
        assert view in data["views"], text
        assert data["boxes"][name]["facts"], text
    scale = [name for name, text, _ in data["nodes"] if text.startswith("Scale")]
    assert {dict(data["boxes"][name]["facts"])["module"] for name in scale} == {"1"}


def test_a_page_asks_for_nothing(graphviz, samples):
    page = draw_html(samples["op"], "op")
    assert not re.findall(r"(?:src|href)=", page)
    assert "default-src 'none'" in page


def test_large_graphs_are_folded(graphviz, samples, monkeypatch):
    monkeypatch.setattr(drawing, "FOLDED_ABOVE", 20)
    _, boxes = parsed(draw_svg(samples["step"], "step"))
    assert any("module" in kind for kind, _, _ in boxes)
    monkeypatch.setattr(drawing, "_MOST", 10)
    with pytest.raises(ArgumentError, match="at depth 2 the graph has 95 boxes, at most 10 are drawn: --depth 1 has 8"):
        draw_svg(samples["step"], "step", 5)


def test_a_damaged_file(samples):
    with pytest.raises(FormatError, match="no ONNX model"):
        draw_svg(samples["damaged"], "d")


def test_without_graphviz(samples, monkeypatch):
    monkeypatch.setattr(layout.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"pip install '\.\[draw\]' in a clone"):
        draw_svg(samples["plain"], "p")


def random_plan(seed):
    rng = random.Random(seed)
    count = rng.randrange(0, 40)
    boxes = [(rng.uniform(20, 200), 28.0) for _ in range(count)]
    arrows = [(rng.randrange(count), rng.randrange(count)) for _ in range(rng.randrange(0, 80))] if count else []
    members = list(range(count))
    rng.shuffle(members)
    half = members[: count // 2]
    frames = [Frame(half[: len(half) // 2], [Frame(half[len(half) // 2 :], [])]), Frame(members[count // 2 : count * 3 // 4], [])]
    return Drawing(boxes, [(a, b) for a, b in arrows if a != b], frames, upwards=bool(seed % 2))


def test_any_graph_is_laid_out(graphviz):
    """Circles, parallel arrows, boxes alone, frames in frames, frames with nothing in them."""
    plans = [random_plan(seed) for seed in range(30)]
    for plan, found in zip(plans, lay_out(plans), strict=True):
        assert len(found.boxes) == len(plan.boxes)
        assert len(found.arrows) == len(plan.arrows)
        assert all(len(points) >= 4 for points in found.arrows)


def test_a_layout_that_takes_too_long(graphviz):
    with pytest.raises(RunError, match="--depth"):
        lay_out([Drawing([(10, 10)] * 5, [], [])], seconds=0.001)


def test_a_file_without_types(graphviz):
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { a = Relu(x) y = Neg(a) }"""
    _, boxes = parsed(draw_svg(onnx.parser.parse_model(text), "t"))
    assert [text for _, text, _ in boxes] == ["Relu", "Neg", "x", "y"]
