"""Pictures of figures, and python -m benchmarks picture."""

from __future__ import annotations

import json
import random
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import main
from benchmarks._compare import read
from benchmarks._picture import CONTENDERS, Bar, Group, bars, of_limits, training_steps

_SVG = "{http://www.w3.org/2000/svg}"


def _figure(what, value, limit=None, note=""):
    return {
        "what": what, "value": value, "unit": "ratio", "limit": limit, "runs": 7, "note": note,
        "missed": limit is not None and (value is None or value > limit),
    }  # fmt: skip


def _told():
    figures = [
        _figure("gpt-b2: ours / eager", 0.8125, 0.95, "30.0 ms; eager 36.9 ms"),
        _figure("gpt-b2: loaded / eager", 0.92),
        _figure("gpt-b2: torch.compile", None, note="cannot: BackendError: no <compiler> & no way"),
        _figure("gpt-b2: onnx-ad, no optimizer / eager", 1.385),
        _figure("gpt-b2: memory of a step, ours / eager", 0.675, 1.2),
        _figure("chain-100: ours / eager", 1.5, 1.4),
        _figure("chain-100: portable / eager", 0.25, 0.35),
        _figure("chain-100: torch.compile / eager", 0.295),
    ]
    return [{"program": "training_step", "machine": {"cpu": "A <fast> one", "cores": 2, "torch": "2.13.0"}, "figures": figures}]


def _texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{_SVG}text")]


def _rectangles(svg, kind):
    return [element for element in ElementTree.fromstring(svg).iter(f"{_SVG}rect") if element.get("class") == kind]


def test_names_and_values_are_in_it():
    texts = _texts(training_steps(_told()))
    for text in ("gpt-b2", "chain-100", "0.81", "0.92", "0.25", "eager", *CONTENDERS):
        assert text in texts
    assert "1.50, above 1.4" in texts
    assert not any("1.39" in text or "0.68" in text or "onnx-ad" in text for text in texts)  # no contenders
    assert texts.count("loaded") == texts.count("portable") == 1  # one was not measured with the other's
    assert any("2 cores of A <fast> one, torch 2.13.0" in text for text in texts)


def test_a_contender_that_could_not_run_is_said_so():
    svg = training_steps(_told())
    assert "cannot: BackendError: no <compiler> & no way" in _texts(svg)
    assert len(_rectangles(svg, "torch-compile")) == 1  # of the other model


def test_values_stand_on_no_line():
    svg = bars("values", [Group("a", [Bar("b", 0.97, "0.97", "ours", 1.08), Bar("c", 0.5, "0.50", "ours", 0.52)])], "eager")
    root = ElementTree.fromstring(svg)
    lines = [float(path.get("d")[1:].split(",")[0]) for path in root.iter(f"{_SVG}path") if path.get("class") in ("one", "limit")]
    starts = [float(text.get("x")) for text in root.iter(f"{_SVG}text") if text.text in ("0.97", "0.50")]
    assert len(lines) == 3 and len(starts) == 2
    assert not any(start - 2 < line < start + 20 for line in lines for start in starts)


def test_bars_are_as_long_as_their_values():
    svg = training_steps(_told())
    lengths = {kind: [float(r.get("width")) for r in _rectangles(svg, kind)] for kind in ("ours", "portable")}
    assert lengths["ours"][1] / lengths["ours"][0] == pytest.approx(1.5 / 0.8125, abs=0.01)
    assert lengths["portable"][0] / lengths["ours"][1] == pytest.approx(0.25 / 1.5, abs=0.01)
    start = float(_rectangles(svg, "ours")[0].get("x"))
    (line,) = [path for path in ElementTree.fromstring(svg).iter(f"{_SVG}path") if path.get("class") == "one"]
    at_one = float(line.get("d")[1:].split(",")[0]) - start
    assert at_one / lengths["ours"][1] == pytest.approx(1 / 1.5, abs=0.01)
    ticks = [path for path in ElementTree.fromstring(svg).iter(f"{_SVG}path") if path.get("class") == "limit"]
    at_limits = [(float(tick.get("d")[1:].split(",")[0]) - start) / at_one for tick in ticks]
    assert at_limits == pytest.approx([0.95, 1.4, 0.35], abs=0.01)


def test_nothing_stands_outside_the_picture():
    svg = bars(
        "short", [Group("a", [Bar("b", 2.0, "a long text behind the longest bar", "ours"), Bar("c", 0.1, "short", "ours")])], "eager"
    )
    root = ElementTree.fromstring(svg)
    text = next(element for element in root.iter(f"{_SVG}text") if (element.text or "").startswith("a long"))
    assert float(text.get("x")) + 5.5 * len(text.text) < float(root.get("width"))


def test_equal_figures_give_equal_bytes_whatever_the_keys_order():
    told = _told()
    shuffled = [{key: told[0][key] for key in random.Random(0).sample(list(told[0]), len(told[0]))}]
    assert training_steps(told) == training_steps(shuffled) == training_steps(json.loads(json.dumps(told)))
    assert len(training_steps(told).encode()) < 10_000


def test_the_background_is_there_in_light_and_dark():
    svg = training_steps(_told())
    (page,) = _rectangles(svg, "page")
    assert (page.get("width"), page.get("height")) == ("100%", "100%")
    light, _, dark = svg.partition("@media (prefers-color-scheme:dark)")
    assert ".page{fill:#ffffff}" in light and ".ink{fill:#1f2328}" in light
    assert ".page{fill:#0d1117}" in dark and ".ink{fill:#e6edf3}" in dark


def test_shares_of_limits_then_ratios():
    told = {"program": "loaded", "figures": [_figure("step", 0.5), _figure("call", 3.0, 2.0), _figure("import", 1.0, 4.0)]}
    svg = of_limits(told)
    texts = _texts(svg)
    assert texts.index("call") < texts.index("import") < texts.index("step")
    assert "3 of 2 ratio" in texts
    widths = [float(_rectangles(svg, kind)[0].get("width")) for kind in ("missed", "kept", "none")]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 0.25 / 1.5, 0.5 / 1.5], abs=0.01)
    assert of_limits({"program": "loaded", "figures": [_figure("context", 0.0, 0.0), _figure("gone", None)]}) is None


def test_the_command(tmp_path, capsys):
    source, target = tmp_path / "figures.json", tmp_path / "steps.svg"
    for told in (_told(), _told()[0]):  # of python -m benchmarks, and of python -m benchmarks.training_step
        source.write_text(json.dumps(told))
        assert main(["picture", str(source), str(target)]) == 0
        assert target.read_text() == training_steps(read(source))
    source.write_text('[{"program": "export", "machine": {}, "figures": []}]')
    assert main(["picture", str(source), str(target)]) == 2
    assert "python -m benchmarks training_step" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["picture", str(source)])
    assert "picture FIGURES.json PICTURE.svg" in capsys.readouterr().err
