"""Operators that a file names: what is allowed is called, and errors name the operator, its package and the way out."""

from __future__ import annotations

import json
import sys

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

import exporter
from exporter.cli import main
from symbolics.errors import ArgumentError, FormatError, TrustError
from tests.support import nodes

NAME = "runtime_operators::scale.default"


@torch.library.custom_op("runtime_operators::scale", mutates_args=())
def scale(x: Tensor, factor: float, mode: str = "up") -> Tensor:
    """The mode is not used."""
    return x * factor


scale.register_fake(lambda x, factor, mode="up": torch.empty_like(x))
scale.register_autograd(lambda ctx, g: (g * 5, None, None))


@torch.library.custom_op("runtime_operators::grow", mutates_args=("x",))
def grow(x: Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("runtime_operators::add_up", mutates_args=("count", "more"))
def add_up(x: Tensor, count: Tensor | None, more: list[Tensor]) -> Tensor:
    for each in (count, *more):
        if each is not None:
            each.add_(1)
    return x * 2


add_up.register_fake(lambda x, count, more: torch.empty_like(x))


class AddsUp(torch.nn.Module):
    def __init__(self, counted):
        super().__init__()
        self.counted = counted

    def forward(self, x):
        count = x.detach() + 1
        y = add_up(x, count if self.counted else None, [])
        return y * count


class Scales(torch.nn.Module):
    def forward(self, x):
        return scale(x, 3.0)


class Grows(torch.nn.Module):
    def forward(self, x):
        y = x.detach() + 1
        grow(y)
        return y


@pytest.fixture(scope="module")
def program():
    return exporter.export(Scales(), (torch.randn(2, 3),), dynamo=False)


def edited(program, name=None, inplace=None, **changes) -> onnx.ModelProto:
    """The file of a stranger: another name, another call."""
    model = onnx.ModelProto.FromString(program.model_proto.SerializeToString())
    letters = "".join("d" if type(value) in (dict, list) else "c" for value in changes.get("args", ()))
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "input_convention" and letters:
                attribute.s = letters.encode()
            if attribute.name == "input_requires_grads" and letters:
                attribute.ints[:] = [int(letter == "d") for letter in letters]
            if attribute.name == "name" and name is not None:
                attribute.s = name.encode()
            if attribute.name == "inplace" and inplace is not None:
                attribute.i = inplace
            if attribute.name == "call":
                attribute.s = json.dumps({**json.loads(attribute.s), **changes}).encode()
    return model


def said(model, allow, kind=TrustError) -> str:
    texts = set()
    for door in (exporter.inference_session, exporter.reference_evaluator):
        with pytest.raises(kind) as caught:
            door(model, allow=allow)
        texts.add(str(caught.value))
    for text in texts:
        assert len(text.splitlines()) <= 6
    return texts.pop()


def origin(module, schema="x"):
    return {"schema": schema, "module": module}


@pytest.mark.parametrize(
    "allow", [["runtime_operators::*"], "runtime_operators::scale", [NAME], [scale], torch.ops.runtime_operators.scale]
)
def test_what_lets_a_file_call_an_operator(program, allow):
    session = exporter.inference_session(program.model_proto, allow=allow)
    assert session.run(None, {session.get_inputs()[0].name: np.ones((2, 3), np.float32)})[0].tolist() == [[3.0] * 3] * 2


@pytest.mark.parametrize(
    "allow", [(), ["tests.*"], ["runtime_operators"], ["runtime_operators:*"], ["runtime_operators::grow"], ["other::*"]]
)
def test_what_does_not(program, allow):
    text = said(program.model_proto, allow)
    assert NAME in text and "allow=['runtime_operators::scale']" in text and __name__ in text, "operator, way out, module"


@pytest.mark.parametrize("allow", ["*::scale", "runtime_*::scale", "::scale", "runtime_operators::"])
def test_a_namespace_is_written_out(allow):
    with pytest.raises(ArgumentError, match="mylib|mypkg"):
        exporter.session_options(allow=[allow])


def test_an_operator_of_torch_needs_its_namespace(program):
    file = edited(program, "aten::mul.Scalar", args=[{"$tensor": 0}, 3.0])
    assert "aten::mul.Scalar" in said(file, ["runtime_operators::*", "torch.*", "torch:*"])
    session = exporter.inference_session(edited(program, "aten::mul.Scalar", args=[{"$tensor": 0}, 3.0]), allow=["aten::mul"])
    assert session.run(None, {session.get_inputs()[0].name: np.ones((2, 3), np.float32)})[0].tolist() == [[3.0] * 3] * 2


def test_a_missing_operator_says_what_registers_it(program, tmp_path, monkeypatch):
    module = "package_of_an_operator"
    tmp_path.joinpath(f"{module}.py").write_text(
        "import torch\nlibrary = torch.library.Library('runtime_operators_late', 'DEF')\n"
        "library.define('late(Tensor x, float factor, str mode) -> Tensor')\n"
        "library.impl('late', lambda x, factor, mode: x * factor, 'CompositeExplicitAutograd')\n"
    )
    file = edited(program, "runtime_operators_late::late.default", operator=origin(module))
    text = said(file, ["runtime_operators_late::*"])
    assert "runtime_operators_late::late.default" in text and repr(module) in text and "allow=" in text
    allow = ["runtime_operators_late::*", module]
    text = said(file, allow)
    assert f"{module!r} cannot be imported".replace("'", "") in text.replace("'", "") and "install it" in text
    monkeypatch.syspath_prepend(str(tmp_path))
    assert module in said(file, ["runtime_operators::*", module]), "the operator itself is not allowed"
    assert module not in sys.modules, "a name that is not allowed imports nothing"
    exporter.inference_session(file, allow=allow)
    assert module in sys.modules


def test_a_module_that_does_not_register_it(program):
    text = said(edited(program, "runtime_operators::gone.default", operator=origin("json")), ["runtime_operators::*", "json"])
    assert "runtime_operators::gone.default" in text and "json does not register it" in text and "install the version" in text


@pytest.mark.parametrize("module", ["__main__", "", "os;", "a.__main__"])
def test_a_module_that_nobody_can_import(program, module):
    text = said(edited(program, "runtime_operators::gone.default", operator=origin(module)), ["runtime_operators::*", "a.*", "__main__"])
    assert "runtime_operators::gone.default" in text and "import what registers it first" in text


@pytest.mark.parametrize(
    "name",
    [
        "a::b::c.default",
        "::.",
        "runtime_operators::scale",
        "runtime_operators::sc ale.default",
        "runtime_operators::scale.__class__",
        "load_library::x.default",
    ],
)
def test_names_that_are_none(program, name):
    said(edited(program, name), ["runtime_operators::*", "a::*", "load_library::*", "x::*"])


@pytest.mark.parametrize(
    "args",
    [
        [{"$tensor": 0}],
        [{"$tensor": 0}, "three"],
        [{"$tensor": 0}, 3.0, "up", 4],
        [{"$tensor": 0}, 3.0, None],
        [3.0, {"$tensor": 0}],
        [[{"$tensor": 0}], 3.0],
    ],
)
def test_another_schema(program, args):
    file = edited(program, args=args, operator=origin(__name__, "runtime_operators::scale(Tensor x, float old) -> Tensor"))
    text = said(file, ["runtime_operators::*"], FormatError)
    assert NAME in text and "float factor" in text and "float old" in text and "export the model again" in text


def test_a_call_that_says_it_changes_nothing():
    program = exporter.export(Grows(), (torch.randn(2, 3),), dynamo=False)
    text = said(edited(program, inplace=0), ["runtime_operators::*"], FormatError)
    assert "it changes x in place" in text


@pytest.mark.parametrize("counted", [True, False])
def test_an_argument_to_change_that_is_left_out(counted, dynamo):
    model, x = AddsUp(counted), torch.randn(2, 3)
    program = exporter.export(model, (x,), dynamo=dynamo)
    loaded = exporter.load(program, allow=["runtime_operators::*"])
    torch.testing.assert_close(loaded(x), model(x))


def test_an_origin_of_a_class(program):
    with pytest.raises(FormatError, match="contradict"):
        exporter.inference_session(edited(program, "tests.zoo.functions:Double"), allow=["tests.*"])


def test_other_results_than_at_the_export(program):
    session = exporter.inference_session(edited(program, outputs={"$tuple": [{"$tensor": 0}, None]}), allow=["runtime_operators::*"])
    with pytest.raises(Exception, match="returned 1 values, 2 when it was exported"):
        session.run(None, {session.get_inputs()[0].name: np.ones((2, 3), np.float32)})


def test_inspect_shows_it(program, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    program.save(tmp_path / "model.onnx")
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(tmp_path / "model.onnx")])
    assert not ended.value.code
    assert NAME in capsys.readouterr().out
    assert nodes(program.model, "PythonOp")
