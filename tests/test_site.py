"""The site of docs/, without mkdocs: every page is in the navigation, the API page has the public names, the workflow waits for a person."""

from __future__ import annotations

import inspect
import pkgutil
import re

import pytest
import yaml

from tests import api_page
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


def test_the_api_page_is_what_the_docstrings_say():
    assert api_page.PAGE.read_text() == api_page.text(), "python -m tests.api_page writes it anew"


def test_the_api_page_has_the_public_names_and_no_other():
    assert sorted(name for _, _, names in api_page.GROUPS for name in names) == sorted(api_page.public())


@pytest.mark.parametrize("name", api_page.public())
def test_what_the_api_page_shows_has_a_docstring(name):
    """Each argument is described, and nothing that is none; a line says what it is."""
    thing = pkgutil.resolve_name(f"exporter:{name}")
    text = "\n".join(inspect.getdoc(each) or "" for each in (thing, *((thing.__init__,) if isinstance(thing, type) else ())))
    assert len(text.split()) >= 5
    arguments = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.M)
    described = (
        {one.strip(" *") for line in re.findall(r"^    (\S.*?):", arguments[1], re.M) for one in line.split(",")} if arguments else set()
    )
    if isinstance(thing, type):
        assert issubclass(thing, BaseException) or described <= set(inspect.signature(thing).parameters)
    else:
        assert described == set(inspect.signature(thing).parameters), "each argument has a line under Args:"


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
