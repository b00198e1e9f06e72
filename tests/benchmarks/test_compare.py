"""python -m benchmarks compare."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import kept, main
from benchmarks._compare import compare


def _told(program, **figures):
    rows = [
        {"what": what, "value": value, "unit": "ratio", "limit": 1.0, "missed": value is not None and value > 1.0}
        for what, value in figures.items()
    ]
    return {"program": program, "machine": {}, "figures": rows}


def _files(tmp_path, old, new):
    paths = []
    for name, told in (("old", old), ("new", new)):
        paths.append(str(tmp_path / f"{name}.json"))
        (tmp_path / f"{name}.json").write_text(json.dumps(told))
    return paths


@pytest.mark.parametrize(
    ("old", "new", "status", "said"),
    [
        (0.5, 0.75, 0, "+50.0 %"),
        (0.8, 1.2, 1, "newly missed"),
        (1.2, 1.3, 0, "| missed |"),
        (1.2, 0.6, 0, "reached again"),
        (None, 1.2, 1, "| new |"),
    ],
)
def test_the_exit_status_is_1_where_a_limit_is_newly_missed(tmp_path, capsys, old, new, status, said):
    files = _files(tmp_path, [_told("loaded", step=old)], [_told("loaded", step=new)])
    assert main(["compare", *files]) == status
    assert said in capsys.readouterr().out


def test_what_one_run_does_not_have():
    old = [_told("loaded", a=0.5, b=0.5), _told("export", c=0.5)]
    rows = compare(old, [_told("loaded", b=0.5, d=0.25)])
    assert [(row.what, row.change) for row in rows] == [("b", "+0.0 %"), ("d", "new"), ("a", "gone")]  # export did not run


def test_a_run_is_kept_and_can_be_compared(tmp_path, capsys):
    file = kept([_told("loaded", step=0.5)], tmp_path / "history")
    assert main(["compare", str(file), str(file)]) == 0
    assert "loaded: step | 0.5 ratio | 0.5 ratio | +0.0 %" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{}", "no json", '[{"program": "loaded"}]'])
def test_a_file_that_is_none_of_ours_is_2(tmp_path, capsys, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main(["compare", str(path), str(path)]) == 2
    assert "cannot compare" in capsys.readouterr().err


def test_two_files_are_needed(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "one.json"])
    assert "compare OLD NEW" in capsys.readouterr().err
