"""README.md, docs/ and examples/ point to files that exist, and name commands and make targets that exist."""

from __future__ import annotations

import re

import pytest

from tests.processes import ROOT, python

DOCUMENTS = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/*.md")))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_resolves(document):
    text = re.sub(r"(`+).+?\1", "", re.sub(r"(?ms)^```.*?^```", "", document.read_text()))  # code has no links
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    broken = [t for t in targets if "://" not in t and not t.startswith("#") and not (document.parent / t.partition("#")[0]).exists()]
    assert not broken
    if document == ROOT / "README.md":
        assert len(targets) >= 6


def test_every_command_of_the_readme_exists():
    text = (ROOT / "README.md").read_text()
    commands = set(re.findall(r"^pythonop (\w+)", text, re.M))
    targets = set(re.findall(r"\bmake ([a-z][a-z-]*)", text))
    assert commands
    assert targets
    shown = python("-m", "exporter.cli", "--help").stdout
    assert {c for c in commands if not re.search(rf"\b{c}\b", shown)} == set()
    made = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    assert targets - made == set()
