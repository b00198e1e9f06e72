"""The gate between the names of a file and Python objects."""

from __future__ import annotations

import dataclasses
import enum
import subprocess  # noqa: F401  (what a file must not reach)
import sys
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import nn

from exporter.files import trust
from exporter.files.trust import Gate, name_of, register, registered, unregister
from symbolics.errors import PythonopWarning, TrustError
from tests.processes import python

HERE = __name__


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    class Inner(torch.autograd.Function):
        pass


class NoFunction:
    system = __import__("os").system
    module = __import__("os")
    computed = property(lambda self: helper)
    chained = classmethod(property(lambda cls: helper))


class Sly:
    """Says of itself whatever it is asked."""

    def __getattribute__(self, name):
        return {"__module__": HERE, "__qualname__": "SLY", "__class__": type}.get(name)

    def __call__(self):
        pass


SLY = Sly()


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Config:
    size: int = 1


class Pair(NamedTuple):
    a: int
    b: int


@dataclasses.dataclass
class Called:
    size: int

    def __call__(self):
        raise AssertionError("a file has called it")


@dataclasses.dataclass
class Deleted:
    size: int

    def __del__(self):
        pass


class CalledPair(NamedTuple):
    a: int

    def __call__(self):
        raise AssertionError("a file has called it")


class CalledColor(enum.Enum):
    RED = 1

    def __call__(self):
        raise AssertionError("a file has called it")


class Block(nn.Module):
    pass


class DeletedBlock(nn.Module):
    def __del__(self):
        pass


class Plain:
    def __init__(self, path):
        raise AssertionError("a file has called it")


def helper(x):
    return x


Alias = Twice


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch):
    monkeypatch.setattr(trust, "_objects", {})
    monkeypatch.setattr(trust, "_names", {})


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("function", "Twice", Twice),
        ("function", "Twice.Inner", Twice.Inner),
        ("enum", "Color", Color),
        ("dataclass", "Config", Config),
        ("namedtuple", "Pair", Pair),
    ],
)
@pytest.mark.parametrize("pattern", [HERE, f"{HERE}:*", f"{HERE}.*", "tests.*[st]:*"])
def test_patterns_resolve_what_they_match(kind, name, expected, pattern):
    assert Gate([pattern])(kind, f"{HERE}:{name}") is expected


def test_a_class_serves_itself_and_nothing_else():
    gate = Gate([Twice])
    assert gate("function", f"{HERE}:Twice") is Twice
    with pytest.raises(TrustError, match="not allowed"):
        gate("enum", f"{HERE}:Color")
    assert Gate(Twice)("function", f"{HERE}:Twice") is Twice  # one alone needs no list


@pytest.mark.parametrize("pattern", [f"{HERE}:Color", f"{HERE}x", "torch.*", f"{HERE}.deeper"])
def test_other_patterns_do_not(pattern):
    with pytest.raises(TrustError, match=r"allow=\[.*exporter.register"):
        Gate([pattern])("function", f"{HERE}:Twice")


def test_wildcards_need_a_package():
    for pattern in ("*", "*:*", "?orch.*", "[a-z]*:X", "tests*", "tests*:Twice", "t*:*", "tests[.]exporter:*", "test?.exporter.*"):
        with pytest.raises(ValueError, match="write the package's name in full"):
            Gate([pattern])
    for pattern in ("", "torch:"):
        with pytest.raises(ValueError, match="starts with a package name"):
            Gate([pattern])
    assert Gate(["tests.exporter*"]).allows(f"{HERE}:Twice")
    with pytest.raises(TypeError, match="classes, functions and patterns"):
        Gate([3])


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("function", f"{HERE}:NoFunction", "which it is not"),
        ("function", f"{HERE}:Color", "which it is not"),
        ("enum", f"{HERE}:Twice", "which it is not"),
        ("dataclass", f"{HERE}:Pair", "which it is not"),
        ("namedtuple", f"{HERE}:Config", "which it is not"),
        ("callable", f"{HERE}:HERE", "another name of"),
        ("callable", f"{HERE}:NoFunction.system", "another name of"),
        ("callable", f"{HERE}:NoFunction.module.system", "no class"),
        ("callable", f"{HERE}:torch.load", "no class"),
        ("callable", f"{HERE}:subprocess.run", "no class"),
        ("function", f"{HERE}:Alias", "another name of"),
        ("callable", f"{HERE}:Twice.__subclasses__", "no Twice.__subclasses__"),
        ("callable", f"{HERE}:helper.__globals__", "no class"),
        ("function", f"{HERE}:Missing", "has no Missing"),
        ("function", f"{HERE}:Twice.<locals>.X", "exporter.register"),
        ("function", "__main__:Twice", "exporter.register"),
        ("function", f"{HERE}.__main__:Twice", "exporter.register"),
        ("function", "tests.__main__.deeper:Twice", "exporter.register"),
        ("callable", f"{HERE}:Twice.__class__", "no Twice.__class__"),
        ("callable", f"{HERE}:Twice.forward.__globals__", "no class"),
        ("callable", f"{HERE}:NoFunction.chained", "another name of"),
        ("callable", f"{HERE}:NoFunction.computed", "another name of"),
        ("callable", f"{HERE}:SLY", "another name of"),
        ("enum", f"{HERE}:SLY", "another name of"),
        ("function", "Twice", "exporter.register"),
        ("function", f"{HERE}: Twice", "not of the form"),
        ("function", f"{HERE}:..Twice", "not of the form"),
        ("function", "x" * 600, "damaged"),
        ("object", f"{HERE}:Twice", "not registered"),
        ("function", f"{HERE}.nowhere:Twice", "cannot be imported here"),
    ],
)
def test_refused(kind, name, why):
    with pytest.raises(TrustError, match=why):
        Gate([f"{HERE}.*", "__main__:*", *([name] if kind == "callable" else ())])(kind, name)


@pytest.mark.parametrize(
    ("kind", "name", "allow", "why"),
    [
        # What the file may have called.
        (
            "callable",
            f"{HERE}:helper",
            [HERE, f"{HERE}:*", f"{HERE}:help?r", f"{HERE}.*"],
            "no pattern allows, for the file may have it called",
        ),
        ("callable", "torch.utils.collect_env:run", ["torch.*", "torch.utils.collect_env:*"], "no pattern allows"),
        ("callable", "torch.serialization:load", ["torch.*", "torch.serialization"], "no pattern allows"),
        # Classes that are called where a file may fill them.
        ("dataclass", f"{HERE}:Called", f"{HERE}:*", "its __call__ would run"),
        ("dataclass", f"{HERE}:Deleted", f"{HERE}:*", "its __del__ would run"),
        ("namedtuple", f"{HERE}:CalledPair", f"{HERE}:*", "its __call__ would run"),
        ("enum", f"{HERE}:CalledColor", f"{HERE}:*", "its __call__ would run"),
        ("module", f"{HERE}:DeletedBlock", f"{HERE}:*", "its __del__ would run"),
        # Modules that no pattern means.
        ("enum", "http:HTTPStatus", ["http:*", "http", "http.*"], "standard library"),
        (
            "function",
            "torch.testing._internal.common_utils:F",
            ["torch.*", "torch.testing._internal.common_utils"],
            "start processes",
        ),
        ("function", "setuptools.command.build:F", "setuptools.*", "start processes"),
    ],
)
def test_what_needs_an_entry_of_its_own(kind, name, allow, why):
    before = set(sys.modules)
    with pytest.raises(TrustError, match=why) as caught:
        Gate(allow)(kind, name)
    assert set(sys.modules) == before
    assert len(str(caught.value).splitlines()) <= 6
    assert f"allow=['{name}']" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("function", "os:system", "os:system where a subclass of torch.autograd.Function should be, which it is not"),
        ("module", "never_imported_here.py:x", None),
        ("module", "xmlrpc.server:Server", "where a subclass of torch.nn.Module should be, which it is not"),
        ("function", f"{HERE}:NoFunction", "where a subclass of torch.autograd.Function should be, which it is not"),
        ("function", f"{HERE}:Alias", "another name of"),
        ("callable", "torch:load", "another name of torch.serialization:load"),
        ("callable", "os:system", "another name of"),
        ("callable", f"{HERE}:Config", "is none for its constructor"),
        ("callable", f"{HERE}:helper.__init__", "where a class should be, which it is not"),
        ("callable", "__main__:Config.__init__", "cannot be imported in another process"),
        ("enum", "http:HTTPStatus", None),
        ("function", f"{HERE}:Twice", None),
        ("function", f"{HERE}:Missing", None),
    ],
)
@pytest.mark.parametrize("wide", [False, True])
def test_an_entry_that_would_not_help_is_not_offered(kind, name, why, wide):
    before = set(sys.modules)
    module = name.partition(":")[0]
    if wide and why is None:
        return  # what a pattern does then is said above
    with pytest.raises(TrustError, match=why or r"pass allow=\['") as caught:
        Gate([f"{module}:*"] if wide else ())(kind, name)
    assert set(sys.modules) == before
    if why is not None:
        assert "pass allow=" not in str(caught.value)
        with pytest.raises(TrustError):
            Gate([name])(kind, name)
    assert ":*'" not in str(caught.value).replace(f"'{module}:*'", "")  # no pattern is offered


@pytest.mark.parametrize(
    ("kind", "qualname", "expected"),
    [
        ("callable", "helper", helper),
        ("dataclass", "Called", Called),
        ("namedtuple", "CalledPair", CalledPair),
        ("enum", "CalledColor", CalledColor),
        ("module", "DeletedBlock", DeletedBlock),
        ("plain", "Plain", Plain),
        ("callable", "Pair", Pair),
        ("callable", "Twice", Twice),
    ],
)
def test_an_entry_of_its_own(kind, qualname, expected):
    for entry in (f"{HERE}:{qualname}", f"{HERE}.{qualname}", expected):
        assert Gate([entry])(kind, f"{HERE}:{qualname}") is expected


@pytest.mark.parametrize("cls", [Block, Color, Config, Plain])
def test_an_entry_for_a_class_is_none_for_its_constructor(cls):
    """The honest file has an object of the class; another one would have it made, by a hook or a layer that calls what it is given."""
    name = f"{HERE}:{cls.__qualname__}"
    for allow in (name, cls, f"{HERE}.{cls.__qualname__}"):
        with pytest.raises(TrustError, match="is none for its constructor") as caught:
            Gate([allow])("callable", name)
        assert len(str(caught.value).splitlines()) <= 6
        with pytest.raises(TrustError, match=r"pass allow=\['.*\.__init__'\] if you trust its constructor"):
            Gate([allow, f"{HERE}:*"])("callable", f"{name}.__init__")
    assert Gate([f"{name}.__init__"])("callable", f"{name}.__init__") is cls
    with pytest.raises(TrustError, match="which is not allowed|which it is not"):
        Gate([f"{name}.__init__"])("plain", name)
    with pytest.raises(TrustError, match="where a class should be, which it is not"):
        Gate([f"{HERE}:helper.__init__"])("callable", f"{HERE}:helper.__init__")
    register(cls)
    for kind in ("callable", "object"):
        with pytest.raises(TrustError, match="is none for its constructor"):
            Gate()(kind, name)
    register(cls, "by name")
    assert Gate()("object", "by name") is cls


def test_a_pattern_of_all_of_torch_is_said_once(monkeypatch):
    monkeypatch.setattr(trust, "_said_wide", set())
    for wide in ("torch.*", "torch.*:*", "torch.*:[A-Z]*"):
        with pytest.warns(PythonopWarning, match="choose among all Functions of torch") as said:
            [Gate([wide, f"{HERE}:*"]) for _ in range(2)]
        assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Gate(["torch.utils.checkpoint:*", "torch:tanh", "torch::*", f"{HERE}.*", "torch.autograd.*"])


def test_a_refused_name_imports_nothing():
    code = (
        "import sys; from exporter.files.trust import Gate; from symbolics.errors import TrustError\n"
        "before = set(sys.modules)\n"
        "for kind, name in [('function', 'this.that:F'), ('callable', 'antigravity:geohash'), ('callable', 'os:system'), ('enum', 'http:HTTPStatus')]:\n"
        "    try: Gate(['json.*'])(kind, name)\n"
        "    except TrustError: pass\n"
        "    else: sys.exit('resolved ' + name)\n"
        "new = set(sys.modules) - before\n"
        "assert not new, new\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import sys; sys.exit(7)", "SystemExit: 7"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("class Bad(BaseException):\n    def __str__(self): raise ValueError\nraise Bad", "Bad"),
        ("class Odd(Exception):\n    def __str__(self): return 3\nraise Odd", "exception str"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.modules[__name__] = 3", "TypeError"),
        ("import sys; sys.modules[__name__] = None", "cannot be imported"),
        ("def __getattr__(name): raise SystemExit(name)", "has no F"),
        ("print('hello')", "has no F"),
        ("F = property(lambda self: 1/0)", "another name of"),
    ],
)
def test_a_module_that_ends_the_process_or_is_none(tmp_path, monkeypatch, text, why):
    """The import of an allowed module is trusted code; what becomes of it is an error of ours."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"hostile_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(TrustError, match=why):
        Gate([f"{name}:*"])("function", f"{name}:F")


def test_ctrl_c_while_a_module_is_imported_stays_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "interrupted_module.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        Gate(["interrupted_module:*"])("function", "interrupted_module:F")


def test_a_main_module_of_an_allowed_package_is_not_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "program_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("raise SystemExit('ran')")
    for pattern in ("program_package.*", "program_package:*", "program_package.__main__:*"):
        with pytest.raises(TrustError, match="cannot be imported in another process"):
            Gate([pattern])("function", "program_package.__main__:F")


def test_names_in_messages_are_escaped():
    with pytest.raises(TrustError) as caught:
        Gate()("function", "evil:\x1b[31m\u202e\nX")
    assert caught.value.args[0].isprintable()


def test_registry():
    class Local(torch.autograd.Function):
        pass

    local = f"{HERE}:test_registry.<locals>.Local"
    with pytest.raises(TrustError, match="exporter.register"):
        Gate([f"{HERE}:*"])("function", local)
    assert name_of(Local) is None
    assert register(Local) is Local
    assert Gate()("function", local) is Local
    assert name_of(Local) == local
    assert registered() == {local: Local}
    with pytest.raises(TrustError, match="which it is not"):
        Gate()("enum", local)

    table = {"a": 1}
    with pytest.raises(TypeError, match="needs a name"):
        register(table)
    register(table, "table")
    assert Gate()("object", "table") is table
    assert name_of({"a": 1}) is None
    with pytest.warns(PythonopWarning, match="another object"):
        register([1], "table")
    assert name_of(table) is None
    unregister("table")
    unregister("table")
    with pytest.raises(TrustError, match="not registered"):
        Gate()("object", "table")


def test_plain_values_and_bad_names_cannot_be_registered():
    for value in (1, None, "x", (), 1.0):
        with pytest.raises(TypeError, match="plain value"):
            register(value, "x")
    for name in ("", "a\nb", "x" * 600):
        with pytest.raises(ValueError, match="printable"):
            register({}, name)


@pytest.mark.parametrize("operator", [torch.ops.aten.sin.default, torch.ops.aten.sin], ids=["overload", "packet"])
def test_operators_are_named_in_allow(operator):
    with pytest.raises(TypeError, match=r"files name the operator aten::sin(\.default)? as torch does.*allow=\['aten::sin"):
        register(operator, "mypkg.sine")
    assert "mypkg.sine" not in registered()
