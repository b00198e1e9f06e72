"""The report's page in a real browser: it renders offline, asks for nothing, and its pictures show what they should."""

from __future__ import annotations

import html
import json
import re
import subprocess
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest

import exporter
from exporter.pictures import layout
from exporter.verification.report import Note, Report, Row
from symbolics.errors import PythonopError
from tests import browser
from tests.exporter.verification import targets
from tests.support import missing

WIDTH, HEIGHT = 1100, 1700

LONG = "model.transformer.encoder.layers.11.self_attention.output_projection.weight"
WRONG = Row("head.weight", "parameter gradient", (4, 8), "float32", 0.5, 1e-7, 1e-5, "float64", False, node="Gemm 'node_linear_1' in head")
ROWS = [
    Row("output 0", "output", (2, 8), "float32", 1e-7, 1e-7, 1e-5, "float64", True, node="Softmax 'node_softmax'"),
    WRONG,
    replace(WRONG, name="<b>&amp;", problem="missing in the file, eager has it", error=float("nan"), eager_error=None, tolerance=0.0),
    replace(WRONG, name=LONG, ok=True, error=3e-8),
    *(replace(WRONG, name=f"layer.{i}.bias", ok=True, error=1e-9 * 2**i, shape=(8,)) for i in range(6)),
]
FACTS = {"model": "Net (package.module:factory)", "exporter": "torch.export", "nodes": 12, "versions": "torch 2.13.0"}
MEMORY = {"eager step": 300 * 2**20, "onnxruntime step": 200 * 2**20}
NOTES = [Note("Errors that grow", "Eager's own <i>'x'</i> is far " * 12)]
SECONDS = {"export": 1.5, "load": 0.25, "first step": 0.125, "onnxruntime step": 0.004, "eager step": 0.002}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    report = Report(
        ROWS,
        FACTS,
        {"package.module:Function": 3},
        SECONDS,
        first_departure="the gradient of node 'node_linear_1' (Gemm)",
        memory=MEMORY,
        notes=NOTES,
    )
    return report.to_html(tmp_path_factory.mktemp("page") / "report.html")


def chromium(tmp_path, page, *arguments):
    """What a headless browser writes, in a profile of its own and without a network: no name resolves."""
    command = [browser.chromium(), *browser.OFFLINE, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={WIDTH},{HEIGHT}"]
    return subprocess.run([*command, *arguments, page.as_uri()], check=True, capture_output=True, text=True, timeout=120).stdout


def test_the_document_has_rows_and_pictures(page, tmp_path):
    dom = chromium(tmp_path, page, "--dump-dom")
    tensors = dom[dom.index('<table id="tensors">') :]
    names = [html.unescape(name).replace("\u200b", "") for name in re.findall(r'<tr[^>]*><td><span class="name">(.*?)</span>', tensors)]
    assert set(names) == {row.name for row in ROWS}
    assert names[:2] == ["<b>&amp;", "head.weight"], "the worst first"
    assert "Gemm 'node_linear_1' in head" in tensors
    errors = dom[dom.index('id="errors"') : dom.index('id="times"')]
    assert errors.count("<circle") == len(ROWS)
    assert errors.count('<circle class="bad"') == 2
    times = dom[dom.index('id="times"') : dom.index('id="memory"')]
    assert times.count("<rect") == 2
    assert "4 ms" in times
    memory = dom[dom.index('id="memory"') : dom.index('<table id="tensors">')]
    assert memory.count("<rect") == 2
    assert "300 MiB" in memory
    assert "200 MiB" in memory
    assert html.escape(NOTES[0].text, quote=False) in dom
    for text in ("differs from eager PyTorch", "2.00×", "package.module:Function", "First departure", "torch 2.13.0"):
        assert text in dom, text


def test_it_asks_for_nothing(page, tmp_path):
    asks = tmp_path / "asks.html"
    asks.write_text('<img src="http://example.invalid/x.png">')
    assert requests_of(asks, tmp_path) == ["http://example.invalid/x.png"], "the log must show what a page asks for"
    assert requests_of(page, tmp_path) == []


def requests_of(page, tmp_path):
    """The addresses that a page asked the network for; what the browser wants for itself has no origin."""
    log = tmp_path / f"{page.stem}.net.json"
    chromium(tmp_path, page, "--dump-dom", f"--log-net-log={log}", "--net-log-capture-mode=Everything")
    found = json.loads(log.read_text())
    start = found["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    starts = [event["params"] for event in found["events"] if event["type"] == start and "url" in event.get("params", {})]
    return [entry["url"] for entry in starts if entry.get("initiator") != "not an origin" and not entry["url"].startswith("file:")]


def test_the_picture_is_not_blank(page, tmp_path):
    target = tmp_path / "report.png"
    chromium(tmp_path, page, f"--screenshot={target}")
    pixels = np.asarray(PIL.Image.open(target).convert("RGB"))
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    inked = np.flatnonzero((pixels != pixels[:, :1]).any((1, 2)))
    assert len(inked) > HEIGHT / 4, "most of the page is empty"
    assert inked[-1] > HEIGHT / 2, "the page ends early"
    for name, colour in (("good", (0x1A, 0x7F, 0x37)), ("bad", (0xCF, 0x22, 0x2E)), ("a bar", (0x09, 0x69, 0xDA))):
        assert (pixels == colour).all(-1).sum() > 50, f"hardly a pixel of the colour of {name}: a picture was not drawn"


def test_labels_have_room_in_the_picture(page, tmp_path):
    """The browser itself measures: each label's box ends before the bars begin, and no two boxes meet."""
    script = """<script>
    const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
    const svg = document.querySelector("#errors svg");
    document.title = JSON.stringify({svg: box(svg), texts: [...svg.querySelectorAll("text")].map(box), bars: [...svg.querySelectorAll("rect")].map(box),
      labels: [...svg.querySelectorAll("text.label")].map(box), wide: document.documentElement.scrollWidth});
    </script></body>"""
    text = page.read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy".*?>', text).group()
    assert "script-src" not in policy
    measured = tmp_path / "measured.html"
    measured.write_text(text.replace(policy, "").replace("</body>", script))
    found = json.loads(html.unescape(re.search("<title>(.*?)</title>", chromium(tmp_path, measured, "--dump-dom")).group(1)))
    assert found["wide"] <= WIDTH, "the page scrolls sideways"
    left, top, right, bottom = found["svg"]
    for box in found["texts"]:
        assert left <= box[0] and box[2] <= right + 1 and top - 1 <= box[1] and box[3] <= bottom + 1, "a text leaves the picture"
    assert max(box[2] for box in found["labels"]) <= min(bar[0] for bar in found["bars"])
    texts = found["texts"]
    overlapping = [
        (a, b) for i, a in enumerate(texts) for b in texts[:i] if a[0] < b[2] and b[0] < a[2] and a[1] + 2 < b[3] and b[1] + 2 < a[3]
    ]
    assert overlapping == []


@pytest.fixture(scope="module")
def drawn():
    """The export of a model with a Function, which the page draws."""
    return exporter.export(*targets.good())


def test_the_graph_is_in_the_page(drawn, tmp_path):
    if layout.missing() is not None:
        missing("pygraphviz", "pygraphviz is not installed: nothing lays out a picture")
    page = Report(ROWS, FACTS, program=drawn).to_html(tmp_path / "report.html").read_text()
    picture = page[page.index('<div class="picture">') : page.index('<table id="tensors">')]
    assert picture.count('class="box ') > len(list(drawn.model.graph)), "the forward, and its gradient"
    assert ">Cube<" in picture or "PythonOp" in picture
    assert "<script" not in page


def test_without_graphviz_the_page_says_how_to_get_it(drawn, tmp_path, monkeypatch):
    monkeypatch.setattr("exporter.verification.report.missing", lambda: "it is not here")
    page = Report(ROWS, FACTS, program=drawn).to_html(tmp_path / "report.html").read_text()
    assert '<div class="picture">' not in page
    assert "pip install &#39;.[draw]&#39; in a clone" in page


def test_a_graph_that_cannot_be_drawn_leaves_the_rest(drawn, tmp_path, monkeypatch):
    if layout.missing() is not None:
        missing("pygraphviz", "pygraphviz is not installed: nothing lays out a picture")
    monkeypatch.setattr("exporter.pictures.draw._MOST_BESIDE_OTHERS", 1)
    page = Report(ROWS, FACTS, program=drawn).to_html(tmp_path / "report.html").read_text()
    assert "No picture of the graph: " in page
    assert '<table id="tensors">' in page


def test_a_page_that_cannot_be_written(tmp_path):
    report, path = Report(ROWS, FACTS), tmp_path / "report.html"
    path.mkdir()
    with pytest.raises(PythonopError, match="cannot write .*it is a folder"):
        report.to_html(path)
    path.rmdir()
    path.touch()
    path.chmod(0o600)
    assert report.to_html(path) == path
    assert path.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert path.stat().st_mode & 0o777 == 0o600
