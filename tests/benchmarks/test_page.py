"""docs/figures.md is what the records say, and a run changes the record of its processor alone."""

from __future__ import annotations

import json
import pkgutil
import re

import pytest

import benchmarks
from benchmarks import __main__ as command, _page
from benchmarks._about import ABOUT
from tests.processes import ROOT

#: Modules of benchmarks that are no programs.
PARTS = {"force_field_models"}
#: Sections that other pages link to.
LINKED = {
    "models-in-integers",
    "force-fields",
    "opaque-modules",
    "tangent-graphs",
    "large-files",
    "scale",
    "small-calls-of-a-loaded-module",
}


def figure(what, value, unit="ratio", limit=None, runs=15, note=""):
    missed = limit is not None and not (value is not None and value <= limit)
    return {"what": what, "value": value, "unit": unit, "limit": limit, "runs": runs, "note": note, "missed": missed}


def told(program, *figures, cpu="Maker(R) Chip(TM) 7"):
    return {
        "program": program,
        "machine": {"cpu": cpu, "cores": 2, "python": "3.11.7", "torch": "2.13.0", "onnx": "1.23.2"},
        "figures": list(figures),
    }


def section(text, title):
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)[1]


def test_the_page_is_what_the_records_say():
    """`python -m benchmarks page` writes it anew."""
    assert (ROOT / "docs" / "figures.md").read_text() == _page.page(_page.records())
    assert (ROOT / "docs" / "steps.svg").read_text() == _page.picture(_page.records())


def test_every_program_has_a_text():
    programs = {info.name for info in pkgutil.iter_modules(benchmarks.__path__) if not info.name.startswith("_")} - PARTS
    assert programs <= set(ABOUT)
    assert set(ABOUT) - programs == {"md"}  # examples.md


def test_titles_that_others_link_to_are_there():
    titles = {re.sub(r"[^a-z0-9]+", "-", about.title.lower()) for about in ABOUT.values()}
    assert titles >= LINKED and len(titles) == len(ABOUT)


def test_what_is_told_takes_the_place_of_what_was_told_before(tmp_path):
    path = _page.record(told("dispatch", figure("forward, one", 6.0, "us", 12)), tmp_path)
    _page.record(told("opaque", figure("forward, of eager's", 2.5)), tmp_path)
    assert path == tmp_path / "maker-chip-7.json"
    assert _page.record(told("dispatch", figure("forward, one", 7.25, "us", 12)), tmp_path) == path
    _page.record(told("dispatch", figure("forward, one", 1.0, "us", 12), cpu="Another"), tmp_path)
    other, one = _page.records(tmp_path)
    assert (one["processor"], other["processor"]) == ("Maker Chip 7", "Another")
    assert [each["value"] for each in one["programs"]["dispatch"]["figures"]] == [7.25] and "opaque" in one["programs"]
    assert one["programs"]["dispatch"]["versions"] == {"python": "3.11.7", "torch": "2.13.0"}


def test_a_program_that_broke_leaves_its_record(tmp_path):
    path = _page.record(told("dispatch", figure("forward, one", 6.0, "us", 12)), tmp_path)
    before = path.read_text()
    broken = {"program": "dispatch", "machine": {}, "figures": [], "error": "ended with 1 and told nothing"}
    assert _page.record(broken, tmp_path) is None and path.read_text() == before


def test_a_list(tmp_path):
    rows = [
        figure("forward, one", 13.0, "us", 12, note="a | b"),
        figure("64 MB", 1.0, limit=1.3),
        figure("a chain", None, limit=3, runs=0, note="why"),
    ]
    _page.record(told("dispatch", *rows), tmp_path)
    text = section(_page.page(_page.records(tmp_path)), "Running a PythonOp")
    assert "**Maker Chip 7**, 2 cores, Python 3.11.7, torch 2.13.0, 20" in text and "python -m benchmarks.dispatch" in text
    assert "| forward, one | **13 us** (12) | 15 | a / b |" in text
    assert "| 64 MB | 1.00 (1.3) | 15 |  |" in text and "| a chain | none |  | why |" in text


def test_a_table_of_models_and_contenders(tmp_path):
    rows = [
        figure("gpt-b2: ours / eager", 0.7, limit=0.65, note="eager 50 ms"),
        figure("gpt-b2: loaded / eager", 0.6, limit=0.65),
        figure("cnn: ours / eager", 0.9, limit=1),
        figure("cnn: loaded / eager", 1.234, limit=None),
        figure("cnn: memory of a step, recompute / eager", 0.5),
        figure("alone", 2.0),
    ]
    _page.record(told("training_step", *rows), tmp_path)
    lines = section(_page.page(_page.records(tmp_path)), "Training steps").splitlines()
    assert '| what | step | loaded | memory, `recompute="auto"` | note |' in lines
    assert "| the same, batch 2 x 128 | **0.70** (0.65) | 0.60 (0.65) |  | eager 50 ms |" in lines
    assert "| four times convolution, BatchNorm, ReLU, batch 16 x 3 x 32 x 32 | 0.90 (1) | 1.23 | 0.50 |  |" in lines
    assert "| alone | 2.00 | 15 |" in lines


def test_a_table_of_sizes(tmp_path):
    rows = [figure(f"{size} nodes: {what}", size / 100, "us a node") for size in (300, 3000) for what in ("step", "build")]
    _page.record(told("scale", *rows, figure("step: growth of a node's, 300 to 3000", 1.5, limit=1.8)), tmp_path)
    lines = section(_page.page(_page.records(tmp_path)), "Scale").splitlines()
    assert "| what | 300 nodes | 3000 nodes |" in lines and "| build | 3 us a node | 30 us a node |" in lines
    assert "| step: growth of a node's, 300 to 3000 | 1.50 (1.8) | 15 |" in lines


@pytest.mark.parametrize("change", [{"programs": {"unheard": {}}}, {"more": 1}])
def test_what_is_no_record(tmp_path, change):
    (tmp_path / "a.json").write_text(json.dumps({"processor": "A", "cores": 2, "programs": {}} | change))
    with pytest.raises(ValueError, match=r"a\.json is no record of benchmarks"):
        _page.records(tmp_path)


def test_figures_of_every_record_are_whole():
    for one in _page.records():
        for program, result in one["programs"].items():
            assert set(result) == {"date", "versions", "note", "figures"} and re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"]), program
            names = [each["what"] for each in result["figures"]]
            assert len(names) == len(set(names)), program
            for each in result["figures"]:
                assert set(each) == {"what", "value", "unit", "limit", "runs", "note", "missed"}
                if each["limit"] is not None:
                    assert each["missed"] == (not (each["value"] is not None and each["value"] <= each["limit"])), (program, each["what"])


def test_a_run_writes_the_record_and_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(_page, "PAGE", tmp_path / "figures.md")
    monkeypatch.setattr(command, "record", lambda result: _page.record(result, tmp_path / "records"))
    found = _page.records
    monkeypatch.setattr(_page, "records", lambda: found(tmp_path / "records"))
    monkeypatch.setattr(command, "run", lambda program: told(program, figure("forward, one", 13.0, "us", 12)))
    history = ["--history", str(tmp_path / "history")]
    assert command.main(["--no-record", "dispatch", *history]) == 1  # a limit is missed
    assert not (tmp_path / "figures.md").exists() and not (tmp_path / "records").exists()
    assert command.main(["dispatch", *history]) == 1
    assert "**13 us** (12)" in (tmp_path / "figures.md").read_text()
    (tmp_path / "figures.md").unlink()
    assert command.main(["page"]) == 0 and "**13 us** (12)" in (tmp_path / "figures.md").read_text()


def test_the_picture_is_of_the_newest_training_steps(tmp_path):
    assert _page.picture([]) is None
    old, new = ({"processor": name, "cores": 2, "programs": {"training_step": {"date": date, "versions": {}, "note": "", "figures": figures}}} for name, date, figures in (
        ("Slow", "2026-01-02", [figure("cnn: ours / eager", 0.9)]), ("Quick", "2026-02-01", [figure("cnn: ours / eager", 0.5)])))  # fmt: skip
    drawn = _page.picture([new, old])
    assert "2 cores of Quick" in drawn and "0.50" in drawn and "Slow" not in drawn
