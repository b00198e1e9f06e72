"""One binary, several releases of onnxruntime: the session tests again, in a process with that release.

PYTHONOP_ORT_DIR names a folder with one folder a release, made by
``pip install --no-deps --target $PYTHONOP_ORT_DIR/ort-1.20.1 onnxruntime==1.20.1``; ``make test-ort`` makes it.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from exporter.runtime import library
from tests.processes import ROOT, python
from tests.support import missing

#: The first is the oldest that pyproject.toml takes.
VERSIONS = ["1.20.1", "1.23.2", "1.27.0", "1.31.1", "1.32.0"]
HERE = Path(__file__).parent
TESTS = [
    HERE / "test_session.py",
    HERE / "test_buffers.py",
    HERE / "test_link.py",
    HERE / "test_tensors.py",
    HERE / "test_step_order.py",
    HERE.parent / "cpu" / "test_in_place.py",
    HERE.parent / "cpu" / "test_blocked.py",
    HERE.parent / "module" / "test_torch_kernels.py",
    HERE.parent / "train_mode" / "test_dropout_masks.py",
    HERE.parent / "training" / "test_trainer.py",
    f"{HERE.parent / 'training' / 'test_step_file.py'}::TestFile",
]


def test_messages_name_the_release_that_is_required(monkeypatch):
    oldest = ".".join(VERSIONS[0].split(".")[:2])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"onnxruntime>={oldest}" in project["optional-dependencies"]["run"]
    monkeypatch.setattr(library, "_missing", ImportError(name="onnxruntime"))
    assert "pip install '.[run]' in a clone" in library.available()


@pytest.mark.parametrize("version", VERSIONS)
def test_release(version):
    folder = Path(os.environ.get("PYTHONOP_ORT_DIR", "/nowhere")) / f"ort-{version}"
    if not folder.is_dir():
        import onnxruntime

        if onnxruntime.__version__ == version:
            return  # TESTS are this test
        assert all(Path(test.partition("::")[0]).is_file() for test in map(str, TESTS))
        missing("releases", f"onnxruntime {version} is not installed in PYTHONOP_ORT_DIR: make test-ort")
    code = f"import onnxruntime, sys; assert onnxruntime.__version__ == {version!r}, onnxruntime.__file__; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    arguments = ["-c", code, "-q", "-x", "-p", "no:cacheprovider", "-k", "not 64MB", *map(str, TESTS)]
    done = python(*arguments, timeout=600, PYTHONPATH=os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
