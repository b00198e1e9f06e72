"""`make release`: check, build, try and tag a release on this machine. It publishes nothing: it ends with the two commands that do.

    python3 .ci/release.py             # or: make release
    python3 .ci/release.py --dry-run   # or: make release RELEASE_DRY=1: all of it but the commit and the tag, on any branch

RELEASE_PYTHONS names the interpreters that packages are tried on (default: python3.11 to python3.13 on the path). Each try installs one
package with what it needs (torch is large) into an empty environment, which is removed again.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MINORS = (11, 12, 13)
#: Not in the environment of a try, so that nothing of this checkout reaches it.
OURS = ("PYTHON", "VIRTUAL_ENV", "PYTEST", "MAKE", "MFLAGS")

MODEL = """
import torch

class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, grad):
        return grad / 2

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return Halve.apply(self.linear(x))

def factory():
    return Model(), (torch.randn(8, 4),)
"""
STEP = """
import sys, torch, exporter
from first import factory

(model, (x,)), target, portable = factory(), torch.zeros(8, 3), "portable" in sys.argv
step = exporter.export_training_step(model, (x,), loss=torch.nn.functional.mse_loss, targets=(target,), optimizer="adamw", portable=portable)
step.save("step.onnx")
trainer = exporter.Trainer.load("step.onnx", allow=() if portable else ["first:*"])
losses = [float(trainer.step({"x": x, "target": target})) for _ in range(5)]
assert losses[-1] < losses[0], losses
"""


class Stop(Exception):
    """Why there is no release; the text says what to do."""


def git(root: Path, *arguments: str) -> str:
    """What git prints."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Stop(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def check(root: Path, dry: bool) -> str:
    """The version to release. Stop where the checkout is not ready for it."""
    if changed := git(root, "status", "--porcelain"):
        raise Stop(f"the checkout has changes: commit or remove them\n{changed}")
    if not dry and (branch := git(root, "branch", "--show-current")) != "main":
        raise Stop(f"the branch is {branch or 'none'}: a release is made on main (--dry-run works on any)")
    if not (found := re.search(r'^__version__ = "([^"]+)"$', (root / "exporter" / "__init__.py").read_text(), re.M)):
        raise Stop('exporter/__init__.py has no line __version__ = "...": write one')
    version = found[1]
    sections = re.findall(r"^## \[([^\]]+)\](?: - (.+))?$", (root / "CHANGELOG.md").read_text(), re.M)
    if not sections or sections[0][0] != "Unreleased":
        raise Stop("CHANGELOG.md does not begin with ## [Unreleased]: add that section, empty")
    if (newest := sections[1][0] if len(sections) > 1 else "none") != version:
        raise Stop(f"exporter/__init__.py has version {version}, the newest section of CHANGELOG.md is {newest}: make them one")
    if sections[1][1] != "unreleased":
        raise Stop(f"the section {version} of CHANGELOG.md has the date {sections[1][1] or '(none)'!r}, not 'unreleased': is it released?")
    if re.search(r"^## \[Unreleased\]\s*\n(?!## )\S", (root / "CHANGELOG.md").read_text(), re.M):
        raise Stop(f"CHANGELOG.md has lines under Unreleased: move them into {version}")
    if not any((root / "tests" / "exporter" / "files" / "releases" / version).glob("*.onnx")):
        raise Stop(f"there are no files of {version}: python -m tests.exporter.files.releases.make tests/exporter/files/releases/{version}")
    if git(root, "tag", "--list", f"v{version}"):
        raise Stop(f"the tag v{version} exists: set a newer version")
    return version


def interpreters() -> tuple[dict[str, str], list[str]]:
    """Version to interpreter of those that are here, and the versions that are not."""
    named = os.environ.get("RELEASE_PYTHONS", "").split() or [f"python3.{minor}" for minor in MINORS]
    found: dict[str, str] = {}
    for name in named:
        command = [name, "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which(name) else None
        if done and done.returncode == 0:
            found[done.stdout.strip()] = name
    if not found:
        raise Stop(f"none of {', '.join(named)} runs here: name interpreters in RELEASE_PYTHONS")
    return found, [f"3.{minor}" for minor in MINORS if f"3.{minor}" not in found]


def run(command: list[str], folder: Path, expected: tuple[int, ...] = (0,)) -> str:
    """What a command of a try prints, in an environment without this checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in expected:
        raise Stop(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def try_package(python: str, package: Path) -> dict[str, float]:
    """Install a package into an empty environment, and export, verify and train there. Returns seconds by stage."""
    pure = package.name.endswith("none-any.whl")
    with tempfile.TemporaryDirectory(prefix="pythonop-release-") as name:
        folder, seconds, begin = Path(name), {}, time.monotonic()
        bin_folder = folder / "environment" / "bin"
        (folder / "first.py").write_text(MODEL)
        (folder / "step.py").write_text(STEP)
        run([python, "-m", "venv", "environment"], folder)
        pip = [str(bin_folder / "python"), "-m", "pip", "install", "-q", "--constraint", str(ROOT / "constraints.txt")]
        run([*pip, f"{package}[run]"], folder)
        seconds["install"] = time.monotonic() - begin
        pythonop, portable = str(bin_folder / "pythonop"), ["--portable"] if pure else []
        run([pythonop, "export", "first:factory", "-o", "model.onnx", *portable], folder)
        run([pythonop, "verify", "first:factory", *portable], folder)
        seconds["empty to verified model"] = time.monotonic() - begin
        run([str(bin_folder / "python"), "step.py", *(["portable"] if pure else [])], folder)
        seconds["and a trained one"] = time.monotonic() - begin
        findings = json.loads(run([pythonop, "doctor", "--json"], folder, (0, 1)))["findings"]
        failed = {each["what"]: each["text"] for each in findings if each["word"] == "fails"}
        if set(failed) != ({"onnxruntime"} if pure else set()):  # PythonOps on onnxruntime need compiled code, and nothing else does
            raise Stop(f"pythonop doctor, {package.name}, {python}: {failed or 'nothing fails without compiled code'}")
        seconds["doctor too"] = time.monotonic() - begin
        return seconds


def built_with(python: Path) -> str:
    """The Python of the environment that builds wheels, and the compiler that it calls, each in its own words."""
    code = "import sys, sysconfig; print(sys.version.split()[0], sysconfig.get_config_var('CC') or 'cc', sep=chr(10))"
    version, compiler = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()
    command = os.environ.get("CC", compiler).split()
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False) if shutil.which(command[0]) else None
    return f"built with Python {version}, {done.stdout.splitlines()[0] if done is not None and done.stdout else 'a compiler that does not say which'}"


def release(root: Path, dry: bool) -> int:
    """All of it. Returns 0."""
    version = check(root, dry)
    changelog, date = root / "CHANGELOG.md", datetime.date.today().isoformat()
    before, done = changelog.read_text(), False
    found, absent = interpreters()
    lines = [f"pythonop {version}, {date}, of {git(root, 'rev-parse', 'HEAD')}"]
    changelog.write_text(before.replace(f"## [{version}] - unreleased\n", f"## [{version}] - {date}\n"))
    try:
        subprocess.run(["make", "-C", str(root), "wheel"], check=True)
        packages = sorted(path for path in (root / "dist").iterdir() if path.name.endswith((".whl", ".tar.gz")))
        builder = root / ".venv-wheel" / "bin" / "python"
        lines.append(built_with(builder if builder.exists() else Path(sys.executable)))
        lines += [f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()} {path.name}" for path in packages]
        for minor, python in found.items():
            for package in packages:
                took = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in try_package(python, package).items())
                lines.append(f"Python {minor}, {package.name}: {took}")
                print(lines[-1], flush=True)
        lines += [f"Python {minor}: not found, not tried" for minor in absent]
        (root / "dist" / "release.txt").write_text("\n".join([*lines, ""]))
        if not dry:
            git(root, "commit", "-m", f"Release {version}", "--", "CHANGELOG.md")
            done = True
            git(root, "tag", "-a", f"v{version}", "-m", f"pythonop {version}")
    except subprocess.CalledProcessError as error:
        raise Stop(f"{' '.join(map(str, error.cmd))} ended with {error.returncode}") from error
    finally:
        if not done:
            changelog.write_text(before)
    print(
        "\n".join([*lines, "", "" if done else "A dry run: no commit, no tag.", "Nothing is published. These commands publish a release:"])
    )
    print(f"  git push origin main v{version}\n  python3 -m twine upload {' '.join(f'dist/{path.name}' for path in packages)}")
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="no commit and no tag, on any branch")
    try:
        return release(ROOT, parser.parse_args().dry_run)
    except Stop as reason:
        print(f"no release: {reason}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
