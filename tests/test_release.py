"""`.ci/release.py`: what a checkout has to be like before there is a release, and the form of CHANGELOG.md. No package is built here."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from types import ModuleType

import pytest

import exporter
from tests.processes import ROOT
from tests.support import missing

SECTIONS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
CHANGES = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - unreleased\n\n### Added\n\n- A thing.\n\n## [1.1.0] - 2026-01-02\n"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    if not (path := ROOT / ".ci" / "release.py").exists():
        missing("git", "the release script is in the repository alone")
    spec = importlib.util.spec_from_file_location("release_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(root, *arguments):
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    return subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path):
    """A repository that is ready for 1.2.0."""
    (tmp_path / "exporter").mkdir()
    (tmp_path / "exporter" / "__init__.py").write_text('"""A."""\n\n__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    files = tmp_path / "tests" / "exporter" / "files" / "releases" / "1.2.0"
    files.mkdir(parents=True)
    (files / "forward.onnx").touch()
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    git(tmp_path, "add", "--all", "--force")
    git(tmp_path, "commit", "--quiet", "-m", "All")
    return tmp_path


def changed(checkout, name, old, new):
    text = (checkout / name).read_text()
    assert old in text
    (checkout / name).write_text(text.replace(old, new))
    git(checkout, "commit", "--quiet", "--all", "-m", "Change")


def refused(release, checkout, says, dry=False):
    with pytest.raises(release.Stop, match=says):
        release.check(checkout, dry)


def test_a_checkout_that_is_ready(release, checkout):
    assert release.check(checkout, dry=False) == "1.2.0"


def test_a_checkout_with_changes(release, checkout):
    (checkout / "note").touch()
    refused(release, checkout, "the checkout has changes.*\n.*note")
    refused(release, checkout, "the checkout has changes", dry=True)


def test_another_branch(release, checkout):
    git(checkout, "switch", "--quiet", "-c", "work")
    refused(release, checkout, "the branch is work: a release is made on main")
    assert release.check(checkout, dry=True) == "1.2.0"
    git(checkout, "switch", "--quiet", "--detach")
    refused(release, checkout, "the branch is none")


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("exporter/__init__.py", "1.2.0", "1.3.0", "version 1.3.0, the newest section of CHANGELOG.md is 1.2.0"),
        ("exporter/__init__.py", "__version__", "version", "has no line __version__"),
        ("CHANGELOG.md", "## [1.2.0] - unreleased\n", "", "version 1.2.0, the newest section of CHANGELOG.md is 1.1.0"),
        ("CHANGELOG.md", "## [Unreleased]\n", "", r"does not begin with ## \[Unreleased\]"),
        ("CHANGELOG.md", CHANGES[13:], "## [Unreleased]\n", "the newest section of CHANGELOG.md is none"),
        ("CHANGELOG.md", "- unreleased", "- 2026-02-03", "has the date '2026-02-03', not 'unreleased': is it released"),
        ("CHANGELOG.md", " - unreleased", "", r"has the date '\(none\)'"),
        ("CHANGELOG.md", "## [Unreleased]\n", "## [Unreleased]\n\n- More.\n", "has lines under Unreleased: move them into 1.2.0"),
    ],
)
def test_what_does_not_agree(release, checkout, name, old, new, says):
    changed(checkout, name, old, new)
    refused(release, checkout, says)


def test_no_files_of_the_release(release, checkout):
    git(checkout, "rm", "--quiet", "-r", "tests")
    git(checkout, "commit", "--quiet", "-m", "Change")
    refused(release, checkout, "there are no files of 1.2.0: python -m tests.exporter.files.releases.make")


def test_a_release_that_was_made(release, checkout):
    git(checkout, "tag", "v1.2.0")
    refused(release, checkout, "the tag v1.2.0 exists")


@pytest.fixture
def quick(release, checkout, monkeypatch):
    """What builds and tries packages is stood in for, and says with what CHANGELOG.md it was asked."""
    seen = []

    def build(command, check):
        assert command == ["make", "-C", str(checkout), "wheel"] and check
        seen.append((checkout / "CHANGELOG.md").read_text())
        (checkout / "dist").mkdir()
        for name in ("pythonop-1.2.0.tar.gz", "pythonop-1.2.0-py3-none-any.whl"):
            (checkout / "dist" / name).touch()

    (checkout / ".git" / "info" / "exclude").write_text("dist\n")
    git(checkout, "config", "user.name", "A")
    git(checkout, "config", "user.email", "a@example.org")
    proper = subprocess.run
    monkeypatch.setattr(release.subprocess, "run", lambda command, **given: (build if command[0] == "make" else proper)(command, **given))
    monkeypatch.setattr(release, "interpreters", lambda: ({"3.11": "python3.11"}, ["3.12"]))
    monkeypatch.setattr(release, "try_package", lambda python, package: {"install": 7.0})
    return seen


def test_a_release(release, checkout, quick, capsys):
    release.release(checkout, dry=False)
    text = (checkout / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[1\.2\.0\] - 20\d\d-\d\d-\d\d$", text, re.M) and quick == [text]
    assert git(checkout, "log", "-1", "--format=%s").strip() == "Release 1.2.0" and not git(checkout, "status", "--porcelain")
    assert git(checkout, "cat-file", "-t", "v1.2.0").strip() == "tag"
    assert git(checkout, "rev-parse", "v1.2.0^{commit}") == git(checkout, "rev-parse", "HEAD")
    said = capsys.readouterr().out
    assert "git push origin main v1.2.0" in said and "twine upload dist/pythonop-1.2.0-py3-none-any.whl dist/pythonop-1.2.0.tar.gz" in said
    report = (checkout / "dist" / "release.txt").read_text()
    assert re.search(r"^built with Python 3\.\d+\.\d+, .", report, re.M)
    assert len(re.findall(r"^sha256 [0-9a-f]{64} pythonop-1\.2\.0[-.]", report, re.M)) == 2
    assert "Python 3.11, pythonop-1.2.0.tar.gz: install 7 s" in report and "Python 3.12: not found" in report


def test_a_dry_run_leaves_the_checkout_as_it_was(release, checkout, quick, capsys):
    release.release(checkout, dry=True)
    assert (checkout / "CHANGELOG.md").read_text() == CHANGES and "- unreleased" not in quick[0]
    assert git(checkout, "log", "-1", "--format=%s").strip() == "All" and not git(checkout, "tag")
    assert "A dry run: no commit, no tag." in capsys.readouterr().out


def test_a_package_that_does_not_work_ends_the_release(release, checkout, quick, monkeypatch):
    def fails(python, package):
        raise release.Stop("pythonop verify ended with 1")

    monkeypatch.setattr(release, "try_package", fails)
    with pytest.raises(release.Stop, match="pythonop verify ended with 1"):
        release.release(checkout, dry=False)
    assert (checkout / "CHANGELOG.md").read_text() == CHANGES and not git(checkout, "tag")


def test_the_script_publishes_nothing():
    """The words that publish stand in one line, which prints them."""
    lines = (ROOT / ".ci" / "release.py").read_text().splitlines()
    publishing = [line for line in lines if re.search(r"\bpush\b|twine|upload", line)]
    assert len(publishing) == 1 and publishing[0].strip().startswith("print(")


# ----------------------------------------------------------------------------------------------------------- CHANGELOG.md


def changes() -> list[tuple[str, str, str]]:
    """Version, section and text of each change."""
    version = section = ""
    found = []
    for line in (ROOT / "CHANGELOG.md").read_text().splitlines():
        if line.startswith("## "):
            version, section = line, ""
        elif line.startswith("### "):
            section = line[4:]
        elif version and line.startswith(("- ", "  ")):
            found.append((version, section, line))
    return found


def test_the_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", text, re.M)
    assert versions[0] == "[Unreleased]" and all(
        re.fullmatch(r"\[\d+\.\d+\.\d+\] - (20\d\d-\d\d-\d\d|unreleased)", each) for each in versions[1:]
    )
    assert [each for each in versions if each.startswith(f"[{exporter.__version__}]")] == versions[1:2]
    assert set(re.findall(r"^### (.+)$", text, re.M)) <= set(SECTIONS)
    assert len(text.encode()) < 30_000
    assert changes()
    for version, section, line in changes():
        assert section, f"{version}: {line!r} stands in no section"
        assert line.startswith("- ") and len(line) <= 200, f"a change is one line of at most 200 characters: {line!r}"
