"""The inputs of `named`, which once were wrong, on both exporters; and what the record of the whole sweep says."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.operators import known, named, sweep, table
from tests.processes import python


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], sweep.Line]:
    """One sweep over all of them, in a process of its own: a child that dies takes none of ours with it."""
    record = tmp_path_factory.mktemp("operators") / "record.jsonl"
    done = python("-m", "tests.operators.sweep", "--named", "--jobs", "1", "--record", str(record), timeout=550)
    assert done.returncode == 0, done.stderr
    return sweep.lines(record)


def _rows() -> list[Any]:
    rows = []
    for name, kinds in named.CASES.items():
        for kind in kinds:
            for which in sweep.EXPORTERS:
                why = known.known().get((name, which, kind))
                marks = [pytest.mark.xfail(reason=why, strict=True)] if why else []
                rows.append(pytest.param(name, which, kind, marks=marks, id=f"{name}-{kind}-{which}".replace(" ", "_")))
    return rows


@pytest.mark.xdist_group("operators")
@pytest.mark.parametrize(("name", "which", "kind"), _rows())
def test_named(found: dict[tuple[str, str], sweep.Line], name: str, which: str, kind: str):
    """Neither another number nor a crash; where eager chose one of a kink's slopes, that one."""
    word, stage, why, _ = found[name, which].kinds[kind]
    assert word not in (*known.WRONG, "kink"), f"{word} in {stage}: {why}"


def test_the_list_is_of_rows_that_there_are():
    kinds = {(name, which): set(line.kinds) for (name, which), line in sweep.lines().items()}
    for name, which, kind in known.known():
        assert kind in kinds.get((name, which), set()) | set(named.CASES.get(name, {})), f"{name} ({which}, {kind})"


def test_the_record_has_no_other_wrong_rows():
    assert known.unexpected(sweep.lines().values()) == []


def test_the_pages_are_made_of_the_record():
    pages = table.pages(sweep.lines(), sweep.lines(sweep.OPAQUE))
    assert {*table.FOLDER.glob("*"), table.DOCUMENT} == set(pages)
    for page, text in pages.items():
        assert page.read_text() == text, f"{page.name}: python -m tests.operators.table"


def test_each_operator_has_one_heading_and_links_lead_to_it():
    pages = {page.relative_to(table.DOCUMENT.parent).as_posix(): page.read_text() for page in table.FOLDER.glob("*.md")}
    headings = Counter(heading for text in pages.values() for heading in re.findall(r"^## `(.+)`$", text, re.M))
    assert headings == Counter(table.called(name) for name in {name for (name, _), line in sweep.lines().items() if line.kinds})
    links = re.findall(r"\[([^]]+)\]\((operators/[\w-]+\.md)#([^)]+)\)", table.DOCUMENT.read_text())
    assert links
    for name, page, anchor in links:
        assert f"\n## `{name}`\n" in pages[page]
        assert anchor == re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("nn_functional_relu", "nn.functional.relu"),
        ("masked_fill", "masked_fill"),
        ("masked_softmax", "masked.softmax"),
        ("special_polygamma_special_polygamma_n_0", "special.polygamma (n=0)"),
        ("mvlgamma_mvlgamma_p_3", "mvlgamma (p=3)"),
        ("torch__scaled_mm", "torch._scaled_mm"),
        ("__radd__", "__radd__"),
    ],
)
def test_an_operator_is_called_as_people_call_it(name, written):
    assert table.called(name) == written


def test_whatever_torch_fails_at_is_an_opaque_node_or_says_why_not():
    opaque = sweep.lines(sweep.OPAQUE)
    assert table.unreasoned(opaque) == []
    assert set(opaque) == set(sweep.untranslated(sweep.lines()))


def test_what_has_no_words_is_told():
    line = sweep.Line(
        "abs",
        "dynamo",
        1,
        "2.13.0",
        {"sample": ["wrong", "forward", "complex numbers", True], "empty": ["works", "backward", "aten::abs", True]},
    )
    assert table.unreasoned({("abs", "dynamo"): line}) == ["abs (dynamo, sample), opaque: wrong forward complex numbers"]


def test_a_record_is_read_as_it_was_written(tmp_path: Path):
    kinds = {
        "sample": ["works", "backward", "", True],
        "empty": ["works", "backward", "", False],
        "ties": ["wrong", "forward", "why", True],
    }
    line = sweep.Line("abs", "dynamo", 1, "2.13.0", kinds)
    sweep.write(line, tmp_path / "record.jsonl")
    assert sweep.lines(tmp_path / "record.jsonl") == {("abs", "dynamo"): line}
