"""Bad input: a clear error that names Function, module and remedy, and nothing half written."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from torch import nn

import exporter
from exporter.forward.opset import check_asked, check_opset
from tests.symbolics.capture.functions import Boom, Call, Mlp, Setup


class Inner(nn.Module):
    """Calls what it is told to, one module down."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Outer(nn.Module):
    """Its child makes the call."""

    def __init__(self, function):
        super().__init__()
        self.block = Inner(function)

    def forward(self, x):
        return self.block(x * 1)


def complex_call(x):
    return torch.view_as_real(Setup.apply(torch.view_as_complex(x.reshape(-1, 2, 2))))


class Opaque:
    """An object without a portable form."""


CASES = {
    "vmap": (lambda x: torch.vmap(Setup.apply)(x), r"functions:Setup.*module block.*torch\.func.*inline="),
    "complex": (complex_call, r"functions:Setup.*module block.*argument x.*complex.*view_as_real"),
    "raises": (lambda x: Boom.apply(x), r"functions:Boom.*module block.*ValueError: no such thing.*inline="),
    "object": (lambda x: Setup.apply(x, Opaque()), r"functions:Setup.*module block"),
    "sparse": (lambda x: Setup.apply(torch.eye(4).to_sparse()), r"functions:Setup.*not a dense tensor"),
    "signature": (lambda x: Boom.apply(x, 1, 2), r"functions:Boom.*signature of forward: too many"),
}


@pytest.mark.parametrize("name", CASES)
def test_calls(name, dynamo, tmp_path):
    function, message = CASES[name]
    path = tmp_path / "model.onnx"
    # Without the eager run, which says of some that eager fails, too (test_eager_failure.py).
    with exporter.hook(eager_check=False), pytest.raises(exporter.ExportError, match=message) as caught:
        torch.onnx.export(Outer(function), (torch.randn(2, 4),), path, dynamo=dynamo)
    assert not list(tmp_path.iterdir())
    # A chain of causes is a chain, not a ring: who walks it comes to an end.
    error, seen = caught.value, set()
    while error is not None:
        assert id(error) not in seen
        seen.add(id(error))
        error = error.__cause__


class TakesObject(torch.autograd.Function):
    """Does not care."""

    @staticmethod
    def forward(ctx, x, thing):
        return x * 2


def test_an_object_without_a_portable_form(dynamo):
    with pytest.raises(exporter.ExportError, match=r"TakesObject.*argument 1.*Opaque.*exporter\.register"):
        exporter.export(Outer(lambda x: TakesObject.apply(x, Opaque())), (torch.randn(2, 4),), dynamo=dynamo)


def test_a_registered_object(dynamo):
    thing = exporter.register(Opaque(), "tests.thing")
    program = exporter.export(Outer(lambda x: TakesObject.apply(x, thing)), (torch.randn(2, 4),), dynamo=dynamo)
    assert "tests.thing" in str(program.model_proto)


def test_scripted(dynamo, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(exporter.ExportError, match=r"module 1 \(Linear\) is a ScriptModule.*leave out"):
        exporter.export(model, (torch.randn(2, 4),), dynamo=dynamo)
    with pytest.raises((exporter.ExportError), match=r"ScriptModule|scripted"):
        exporter.export(torch.jit.script(nn.Linear(4, 4)), (torch.randn(2, 4),))


class NeverCalled(nn.Module):
    def forward(self, x):
        pytest.fail("it was called")


def test_paths_that_cannot_be_written(dynamo, tmp_path):
    program = exporter.export(Mlp(), (torch.randn(2, 4),), dynamo=dynamo)
    (tmp_path / "file").write_text("keep me")
    (tmp_path / "folder.onnx").mkdir()
    for path in (tmp_path / "missing" / "model.onnx", tmp_path / "file" / "model.onnx", tmp_path / "folder.onnx"):
        with pytest.raises(exporter.ExportError, match="cannot write.*nothing was written"):
            program.save(path)
        with pytest.raises(exporter.ExportError, match="cannot write"), exporter.hook():  # before the model is even called
            torch.onnx.export(NeverCalled(), (torch.randn(2, 4),), path, dynamo=dynamo)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.onnx"]
    assert not list((tmp_path / "folder.onnx").iterdir())


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    program = exporter.export(Mlp(), (torch.randn(2, 4),))
    program.save(tmp_path / "model.onnx")
    before = (tmp_path / "model.onnx").read_bytes()

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onnx_ir.to_proto", fail)
    with pytest.raises(exporter.ExportError, match="No space left"):
        program.save(tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_unknown_dialect(tmp_path):
    program = exporter.export(Call(lambda m, x: Setup.apply(x)), (torch.randn(2, 4),))
    with pytest.raises(exporter.ExportError, match="ort-1.17"):
        program.save(tmp_path / "model.onnx", schema="ort-9.9")
    assert not list(tmp_path.iterdir())


def test_f_belongs_to_save():
    with pytest.raises(TypeError, match=r"program\.save"):
        exporter.export(Mlp(), (torch.randn(2, 4),), f="model.onnx")


@pytest.mark.parametrize("opset", [0, 3, 99])
def test_an_opset_that_cannot_be_written_is_no_file(opset, dynamo, tmp_path, capfd, recwarn):
    path = tmp_path / "model.onnx"
    with exporter.hook(), pytest.raises(exporter.ExportError, match=rf"opset_version={opset}: .*"):
        torch.onnx.export(Outer(torch.relu), (torch.randn(2, 4),), path, dynamo=dynamo, opset_version=opset)
    assert not list(tmp_path.iterdir())
    assert "graph(%" not in capfd.readouterr().out  # torch prints all of it
    assert not [each for each in recwarn if "training mode" in str(each.message)]


@pytest.mark.parametrize(
    ("written", "opset", "dynamo", "advised"),
    [(18, 13, True, "dynamo=False"), (18, 26, True, ""), (20, 26, True, ""), (None, 25, False, "dynamo=True"), (None, 5, False, "")],
)
def test_the_other_exporter_is_advised_only_where_it_writes_that_opset(written, opset, dynamo, advised):
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": written or 18}), ir_version=10)
    with pytest.raises(exporter.ExportError) as told:
        check_asked(opset, dynamo) if written is None else check_opset(model, opset)
    assert "Ask for another opset: 18 to 23 of either exporter" in str(told.value)
    assert ("dynamo=" in str(told.value)) == bool(advised) and advised in str(told.value)


def test_an_operator_of_a_newer_opset_names_that_opset_first():
    with pytest.raises(exporter.ExportError) as told:
        exporter.export(Outer(torch.tril), (torch.randn(4, 4),), dynamo=False, opset_version=13)
    message = str(told.value)
    assert "opset_version=14 or newer (--opset 14)" in message
    assert message.index("opset_version=14 or newer") < min(message.index("opaque="), message.index("register_custom_op_symbolic"))


def test_the_opset_that_was_asked_for_is_written(dynamo):
    assert exporter.export(Outer(torch.relu), (torch.randn(2, 4),), dynamo=dynamo, opset_version=21).model.opset_imports[""] == 21


class Choosy(torch.nn.Parameter):
    """Lets nothing of torch pass but what its own package calls."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("__get__", "detach"):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise TypeError(f"take .plain for {func}")


def test_a_parameter_that_refuses_functions_of_torch(dynamo):
    model = nn.Module()
    model.weight = Choosy(torch.ones(2))
    model.forward = lambda x: x * 2
    with pytest.raises(
        exporter.ExportError, match=r"(?s)'weight' is of .*tensor class Choosy, .*TypeError: take \.plain.*way out: register a plain"
    ):
        exporter.export(model, (torch.ones(2),), dynamo=dynamo)


class Wrapped(torch.Tensor):
    """A number for all elements; it has no data."""

    @staticmethod
    def __new__(cls, value, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=value.dtype)

    def __init__(self, value, shape):
        self.value = value

    def __tensor_flatten__(self):
        return ["value"], self.shape

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = torch.utils._pytree.tree_map(lambda x: x.value.expand(x.shape) if isinstance(x, cls) else x, args)
        return func(*args, **(kwargs or {}))


class Wraps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Wrapped(x.detach().mean(), x.shape)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * (Wraps.apply(self.weight) + 1)


def test_a_function_that_returns_a_tensor_without_data(dynamo):
    model, x = nn.Sequential(nn.Linear(3, 3), Sums()), torch.randn(2, 3)
    with pytest.raises(
        exporter.ExportError, match="its forward returns what is of .*tensor class Wrapped, which wraps other tensors.*in opaque="
    ):
        exporter.export(model, (x,), dynamo=dynamo)
    module = exporter.load(exporter.export(model, (x,), dynamo=dynamo, opaque=[Sums]), allow=["tests.*:*"])
    torch.testing.assert_close(module(x), model(x))
