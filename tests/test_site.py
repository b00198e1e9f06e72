"""The site of docs/, without mkdocs: every page is in the navigation, the API page has the public names, the workflow waits for a person."""

from __future__ import annotations

import inspect
import re

import pytest
import yaml

import exporter
from tests.processes import ROOT


class _Plain(yaml.SafeLoader):
    """YAML without the tags that mkdocs gives a meaning of its own, and with `on` as a word."""


_Plain.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _read(path):
    return yaml.load((ROOT / path).read_text(), _Plain)


def _pages(nav):
    """The pages of a navigation, in order."""
    for entry in nav:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else _pages(value)


def _outside():
    """The pages that .ci/site.py adds."""
    return re.findall(r'"([^"]+\.md)"', re.search(r"^PAGES = \((.+?)\)$", (ROOT / ".ci" / "site.py").read_text(), re.M)[1])


def test_every_page_is_in_the_navigation_once_and_every_entry_is_there():
    listed = list(_pages(_read("mkdocs.yml")["nav"]))
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")]
    pages += [path.relative_to(ROOT / "docs").with_suffix(".md").as_posix() for path in ROOT.glob("docs/*.ipynb")]
    assert sorted(listed) == sorted([*pages, *_outside()])
    assert [page for page in _outside() if not (ROOT / page).is_file()] == []


def _public():
    names = [getattr(exporter, name) for name in exporter.__all__ if name not in ("errors", "testing")]
    names += [getattr(exporter.testing, name) for name in exporter.testing.__all__]
    return [f"{thing.__module__}.{thing.__qualname__}" for thing in names]


def test_the_api_page_has_the_public_names_and_no_other():
    shown = re.findall(r"^::: (.+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert sorted(shown) == sorted(_public())


@pytest.mark.parametrize("name", _public())
def test_what_the_api_page_shows_has_a_docstring(name):
    module, _, attribute = name.rpartition(".")
    thing = getattr(__import__(module, fromlist=[attribute]), attribute)
    text = inspect.getdoc(thing) or ""
    assert len(text.split()) >= 5
    arguments = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.M)
    described = (
        {one.strip(" *") for line in re.findall(r"^    (\S.*?):", arguments[1], re.M) for one in line.split(",")} if arguments else set()
    )
    assert not described or described <= set(inspect.signature(thing).parameters)


def test_the_site_takes_no_font_from_elsewhere():
    settings = _read("mkdocs.yml")
    assert settings["theme"]["font"] in (False, "false")
    assert settings["strict"] in (True, "true")
    assert "://" not in (ROOT / "mkdocs.yml").read_text()


def test_the_workflow_runs_when_a_person_starts_it_alone():
    workflows = list(ROOT.glob(".github/workflows/*"))
    assert workflows
    for workflow in workflows:
        content = _read(workflow)
        assert list(content["on"]) == ["workflow_dispatch"]
        made = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
        for command in [step["run"] for job in content["jobs"].values() for step in job["steps"] if "run" in step]:
            words = command.split()
            assert words[0] in ("make", "python", ".ci/run")
            assert words[0] != "make" or words[1] in made
            assert words[0] != ".ci/run" or (ROOT / words[0]).is_file()
