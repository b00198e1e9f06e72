"""What is in the wheel and in the archive of the sources, and that two builds of them are the same bytes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import ROOT
from tests.support import missing

PACKAGES = ("exporter/", "symbolics/")
SOURCE = {".c", ".h"}


class Built(NamedTuple):
    sources: Path
    wheel: Path


def tracked() -> list[str]:
    """The files of the repository, new ones included."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        missing("git", "only git says which files are the repository's")
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if (ROOT / name).exists()]


def backend(folder: Path, call: str, umask: int, **environment: str) -> Path:
    """What a function of the build backend makes in a folder, as `python -m build` and pip ask it."""
    code = f"import os; os.umask({umask}); from setuptools import build_meta; print(build_meta.{call}('made'))"
    inherited = {name: value for name, value in os.environ.items() if name not in ("SOURCE_DATE_EPOCH", "CFLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=inherited | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "made" / done.stdout.split()[-1]


def build(checkout: Path, umask: int, **environment: str) -> Built:
    """The archive of a checkout, and the wheel of the archive."""
    for name in tracked():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, checkout / name)
        (checkout / name).chmod(0o666 & ~umask)
    sources = backend(checkout, "build_sdist", umask, **environment)
    with tarfile.open(sources) as archive:
        archive.extractall(checkout / "unpacked", filter="data")
    (unpacked,) = (checkout / "unpacked").iterdir()
    return Built(sources, backend(unpacked, "build_wheel", umask, **environment))


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    return build(tmp_path_factory.mktemp("one"), 0o022)


def names(built: Built) -> set[str]:
    return set(zipfile.ZipFile(built.wheel).namelist())


@pytest.mark.slow
def test_a_wheel_has_the_packages_and_nothing_else(built):
    wanted = {name for name in tracked() if name.startswith(PACKAGES) and Path(name).suffix not in SOURCE}
    found = {name for name in names(built) if ".dist-info/" not in name}
    assert {Path(name).suffix for name in wanted} >= {".py", ".pyi", ".typed", ".html", ".js"}
    library = {name for name in found if Path(name).name.startswith(("_native", "_cpu"))}
    assert found - library == wanted
    for name in library:  # nor where the Python that built it stands
        assert sys.base_prefix.encode() not in zipfile.ZipFile(built.wheel).read(name)
    if not library:
        missing("native", "nothing here compiles the native library")


@pytest.mark.slow
def test_the_archive_has_what_the_wheel_is_built_from_and_no_test(built):
    with tarfile.open(built.sources) as archive:
        found = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {name for name in found if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    wanted = {name for name in tracked() if name.startswith(PACKAGES)}
    assert found - made == wanted | {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}


@pytest.mark.slow
def test_two_builds_are_the_same_bytes(built, tmp_path):
    """In another folder, by somebody whose files nobody else may read."""
    again = build(tmp_path / "a folder of another name", 0o077)
    assert again.sources.read_bytes() == built.sources.read_bytes()
    assert again.wheel.read_bytes() == built.wheel.read_bytes()


@pytest.mark.slow
def test_without_a_compiler_there_is_a_wheel_without_the_library(built, tmp_path):
    bare = build(tmp_path, 0o022, CC="/bin/false")
    assert names(bare) == {name for name in names(built) if not Path(name).name.startswith(("_native", "_cpu"))}


@pytest.mark.slow
def test_a_wheel_without_compiled_code_is_for_every_platform(built, tmp_path):
    """PYTHONOP_PURE=1: the same packages, without a library and without asking for a compiler; the archive is the same."""
    pure = build(tmp_path, 0o022, PYTHONOP_PURE="1", CC="/bin/false")
    assert pure.wheel.name == f"{built.wheel.name.split('-cp')[0]}-py3-none-any.whl"
    assert pure.sources.read_bytes() == built.sources.read_bytes()
    assert names(pure) == {name for name in names(built) if not Path(name).name.startswith(("_native", "_cpu"))}
    (about,) = (name for name in names(pure) if name.endswith(".dist-info/WHEEL"))
    assert "Root-Is-Purelib: true" in zipfile.ZipFile(pure.wheel).read(about).decode().splitlines()


@pytest.mark.slow
def test_the_wheel_says_what_it_needs(built):
    """One wheel for every Python from the oldest on, as pyproject.toml says it; no address of a machine in it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = re.findall(r">=3\.(\d+)$", project["requires-python"])
    assert f"-cp3{oldest}-abi3-" in built.wheel.name
    assert f'ABI = "0x03{int(oldest):02X}0000"' in (ROOT / "setup.py").read_text()
    (metadata,) = (name for name in names(built) if name.endswith(".dist-info/METADATA"))
    head = zipfile.ZipFile(built.wheel).read(metadata).decode().partition("\n\n")[0]
    fields = [line.partition(": ")[::2] for line in head.splitlines()]
    assert ("Requires-Python", project["requires-python"]) in fields
    needs = {value for name, value in fields if name == "Requires-Dist" and "onnxruntime" in value}
    assert needs == {'onnxruntime>=1.20; extra == "run"', 'pythonop[run]; extra == "onnxruntime"'}
    assert not [value for name, value in fields if "URL" in name or "Home-page" in name]
    for name in names(built):
        if name.startswith(PACKAGES):
            assert str(ROOT).encode() not in zipfile.ZipFile(built.wheel).read(name), name
