"""Private names of other packages stand in symbolics/torch_private, each with a test, and nowhere else."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest
import torch

from symbolics import torch_private as private
from tests.processes import ROOT


def _handed_out():
    modules = [importlib.import_module(f"{private.__name__}.{path.stem}") for path in (ROOT / HOME).glob("[!_]*.py")]
    names = [name for module in modules for name in module.__all__]
    assert len(set(names)) == len(names) and all(hasattr(private, name) for name in names)
    return set(names)


def test_every_name_has_its_test():
    tests = {
        name
        for path in Path(__file__).parent.glob("test_torch_private*.py")
        for name in re.findall(r"^def test_(\w+)", path.read_text(), re.M)
    }
    assert _handed_out() - tests == set()


def test_every_name_of_its_modules_is_handed_out():
    named = {
        target.id if isinstance(target, ast.Name) else target.name
        for path in (ROOT / HOME).glob("*.py")
        for node in ast.parse(path.read_text()).body
        for target in (node.targets if isinstance(node, ast.Assign) else [node])
        if isinstance(target, (ast.Name, ast.FunctionDef, ast.ClassDef))
    }
    assert {name for name in named if not name.startswith("_")} <= _handed_out()


FOREIGN = ("torch", "onnx", "onnxscript", "onnxruntime", "onnx_ir", "numpy")


#: What may be private elsewhere. Each entry has its reason.
ALLOWED = {
    # torch documents its pytrees only there; everybody uses it.
    "torch.utils._pytree",
    # Tensor attributes with a leading underscore that torch's own documentation of extensions names.
    "_version",
    "_is_view",
    # An ATen operator that is named so.
    "_unsafe_view",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit",
    "_batch_norm_with_update_functional",
    "_int_mm",
    # namedtuple
    "_fields",
    "_make",
    "_replace",
    "_asdict",
    # Names that Python's documentation of enum supports.
    "_missing_",
    "_value_",
}


HOME = "symbolics/torch_private"


SOURCES = sorted(p for package in ("exporter", "symbolics") for p in (ROOT / package).rglob("*.py"))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def _own_names() -> set[str]:
    """Names with an underscore that our own code gives to something."""
    own: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("self", "cls")
            ):
                own.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("_pythonop"):
                own.add(node.value)  # an attribute of ours on somebody else's object
    return own


def _foreign_private(path: Path, own: set[str], folder: Path = ROOT) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            chain = ast.unparse(node)
            root = chain.split(".")[0]
            # torch._C._x, or _x of anything, where the name is none of ours.
            if root != "sys" and node.attr not in ALLOWED and (root in FOREIGN or node.attr not in own):
                found.append(f"{path.relative_to(folder)}:{node.lineno}: {chain}")
            continue
        for name in names:
            if name.split(".")[0] in FOREIGN and any(map(_is_private, name.split("."))) and name not in ALLOWED:
                found.append(f"{path.relative_to(folder)}:{node.lineno}: {name}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_other_module_touches_private_names(path):
    if path.is_relative_to(ROOT / HOME):
        return
    assert _foreign_private(path, _own_names()) == []


def test_the_walk_finds_them(tmp_path):
    source = tmp_path / "x.py"
    source.write_text(
        "import torch\nimport torch._dynamo\nfrom torch.onnx._internal import x\nfrom torch.x import _y\n"
        "torch._C._z()\ndef f(t): return t._backward_hooks\nfrom torch.utils import _pytree\nt._version\n"
    )
    found = _foreign_private(source, {"_z"}, tmp_path)
    assert sorted(int(text.split(":")[1]) for text in found) == [2, 3, 4, 5, 5, 6]


def test_the_names_that_are_allowed_elsewhere():
    from torch.utils import _pytree

    x = torch.ones(2)
    version = x._version
    x.add_(1)
    assert x._version > version
    assert x[:1]._is_view()
    assert not x._is_view()
    assert _pytree.tree_leaves([1, (2,)]) == [1, 2]
    assert torch.ops.aten._unsafe_view(x, [2, 1]).shape == (2, 1)
    assert torch.ops.aten._native_batch_norm_legit_functional.default
    assert torch.ops.aten._native_batch_norm_legit_no_training.default
    assert torch.ops.aten._int_mm.default
