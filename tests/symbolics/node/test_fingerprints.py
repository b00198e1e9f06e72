"""Fingerprints of Functions: what counts, what does not, and that every Python takes the same."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
import warnings

import pytest
import torch

from symbolics.errors import FormatError
from symbolics.node.fingerprints import changed_halves, fingerprint
from symbolics.node.metadata import Fingerprint, read_functions
from symbolics.node.names import FUNCTIONS_KEY
from symbolics.node.operators import Operator
from tests.symbolics.node import fingerprinted

SOURCE = '''
import functools
import torch
from torch.autograd.function import once_differentiable

SCALE = 0.5
x = 3
TABLE = [row * 2 for row in (1, 2)]


def inner(v):
    return v * SCALE


@functools.lru_cache
def size(n):
    return n


def helper(v):
    "doc"
    return inner(v)  # comment


class Beside:
    def twice(self, v):
        return v * 2


def scaled(factor):
    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * factor

    return Made


class Half(torch.autograd.Function):
    """Doc."""

    factor = 2
    rate = functools.partial(inner)

    @staticmethod
    def forward(ctx, x):
        return helper(x) + TABLE[0] + size(1)

    @classmethod
    def _b(cls, g):
        return g * cls.factor

    @staticmethod
    @once_differentiable
    def backward(ctx, g: int):
        return Beside().twice(Half._b(g))
'''


@pytest.fixture
def load(tmp_path, monkeypatch):
    """A text as a module of its own; the last one under a name stands in its file."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    count = 0

    def loaded(text):
        nonlocal count
        count += 1
        (tmp_path / f"printed_{count}.py").write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(f"printed_{count}")

    yield loaded
    for number in range(count):
        sys.modules.pop(f"printed_{number + 1}", None)


@pytest.mark.parametrize(
    ("old", "new", "halves"),
    [
        ("SCALE = 0.5", "SCALE = 0.25", ["forward"]),
        ("SCALE = 0.5", "SCALE: float = 0.5", []),
        ("x = 3", "x = 4", []),  # an argument of that name is no module's
        ("row * 2", "row * 3", ["forward"]),
        ("    return n\n", "    return n + 1\n", ["forward"]),
        ("v * SCALE", "SCALE * v", ["forward"]),
        ("# comment", "# another", []),
        ('"doc"\n', '"another"\n', []),
        ('    "doc"\n', "", []),
        ('"""Doc."""', "pass", []),
        ("g: int", "g", []),
        ("return helper(x) +", "return (\n            helper( x )) +", []),
        ("import functools\n", "import functools\nimport os\n\n\n", []),
        ("factor = 2", "factor = 3", ["backward"]),
        ("return v * 2", "return v * 2.0", ["backward"]),
        ("    @once_differentiable\n", "", ["backward"]),
        ("class Half", "class Other:\n    pass\n\n\nclass Half", []),
        (
            "    @classmethod\n    def _b",
            "    @staticmethod\n    def jvp(ctx, t):\n        return t\n\n    @classmethod\n    def _b",
            ["backward"],
        ),
        (
            "    @classmethod\n    def _b",
            "    @staticmethod\n    def setup_context(ctx, inputs, output):\n        pass\n\n    @classmethod\n    def _b",
            ["forward"],
        ),
    ],
)
def test_what_counts(load, old, new, halves):
    assert old in SOURCE
    recorded = fingerprint(load(SOURCE).Half)
    assert recorded.forward.startswith("source-1:") and recorded.backward.startswith("source-1:")
    assert changed_halves(recorded, load(SOURCE.replace(old, new)).Half) == halves


def test_every_python_takes_the_same():
    """Taken on 3.11, 3.12, 3.13 and 3.14: another digest here means that files of other Pythons warn for nothing, or that the rule needs another name."""
    assert fingerprint(fingerprinted.One) == Fingerprint(
        "source-1:47fb5abbe12bce9fb8477a8c3ef4abc9", "source-1:520435958291719a918b539cfd50b9d3"
    )
    assert fingerprint(fingerprinted.Two) == Fingerprint(
        "source-1:f2a10ac5d8945f4147028a68a5681556", "source-1:d6ddf806c280c555364c3b34da78e871"
    )


def test_what_a_class_was_made_with_counts(load):
    module = load(SOURCE)
    recorded = fingerprint(module.scaled(2.0))
    assert changed_halves(recorded, module.scaled(2.0)) == []
    assert changed_halves(recorded, module.scaled(3.0)) == ["forward"]


def test_without_source_it_is_the_code():
    made = []
    for factor in (0.5, 0.5, 0.75):
        module = types.ModuleType("nowhere")
        exec(SOURCE.replace("SCALE = 0.5", "").replace("v * SCALE", f"v * {factor}"), vars(module))
        made.append(module.Half)
    recorded = fingerprint(made[0])
    assert recorded.forward.startswith(f"code-{sys.version_info[0]}.{sys.version_info[1]}:")
    assert [changed_halves(recorded, each) for each in made] == [[], [], ["forward"]]
    assert changed_halves(Fingerprint("code-3.1:1", "source-2:1"), made[0]) == [], "what cannot be taken is not compared"


def test_a_text_that_is_not_what_runs(load, tmp_path):
    """The file was edited after it was imported: what runs is the older code."""
    module = load(SOURCE)
    path = tmp_path / f"{module.__name__}.py"
    path.write_text(SOURCE.replace("return inner(v)", "return inner(v) * 2"))
    found = fingerprint(module.Half)
    assert found.forward.startswith("code-") and found.backward.startswith("source-")


def test_c_says_nothing():
    class Bound(torch.autograd.Function):
        forward = staticmethod(torch.tanh)

    assert fingerprint(Bound).forward == "" and fingerprint(Bound).backward.startswith("source-1:")


def test_operators_of_custom_op():
    def of(factor):
        @torch.library.custom_op(f"fingerprints::times{factor}", mutates_args=())
        def times(x: torch.Tensor) -> torch.Tensor:
            return x * factor

        times.register_autograd(lambda ctx, g: g * 2)
        return Operator.of(times._opoverload)

    two, three = of(2), of(3)
    assert changed_halves(fingerprint(two), three) == ["forward"]
    assert fingerprint(Operator.of(torch.ops.aten.relu.default)) == Fingerprint()


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"a:B": 1}',
        '{"a:B": {"forward": "x"}}',
        '{"a:B": {"forward": 1, "backward": ""}}',
        json.dumps({"a:B": {"forward": "x" * 129, "backward": ""}}),
        json.dumps({str(i): {"forward": "", "backward": ""} for i in range((1 << 16) + 1)}),
    ],
)
def test_damaged(text):
    with pytest.raises(FormatError, match=r"pythonop\.functions"):
        read_functions({FUNCTIONS_KEY: text})


def test_a_warning_of_the_text_is_none_of_ours(load):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        half = load(SOURCE + '\nPATTERN = "\\d"\n').Half
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fingerprint(half).forward.startswith("source-1:")


def test_another_process_takes_the_same():
    code = (
        "from tests.symbolics.node.fingerprinted import Two; from symbolics.node.fingerprints import fingerprint; print(fingerprint(Two))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(fingerprint(fingerprinted.Two))
