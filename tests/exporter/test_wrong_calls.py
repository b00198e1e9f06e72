"""A table of wrong calls: each ends with a short text of ours, and what Python prints of it is short, too."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import traceback
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import onnx
import pytest
import torch
from torch import nn

import exporter
from exporter.training.trainer import Trainer
from tests import usable

#: Lines of a message of ours, and of all that Python prints of an uncaught error.
MESSAGE, PRINTED = 6, 25


class Net(nn.Module):
    """Most calls are made with it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x, scale=None):
        h = self.inner(x)
        return h if scale is None else h * scale


class Branches(Net):
    """Only eager can do this."""

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else x


class Airy(Net):
    """No exporter of torch has the operator."""

    def forward(self, x):
        return torch.special.airy_ai(self.inner(x))


class Counted(Net):
    """Gives a number beside a tensor."""

    def forward(self, x):
        return self.inner(x), 3


class Outer(nn.Module):
    """A module around another."""

    def __init__(self, inner):
        super().__init__()
        self.block = inner

    def forward(self, x):
        return self.block(x)


class Picky(Net):
    """Raises by itself, and at length."""

    def forward(self, x):
        raise ValueError("\n".join(f"line {i} of what is wrong" for i in range(400)))


def mse(output, target):
    return (output - target).square().mean()


X, Y = torch.ones(4, 3), torch.ones(4, 2)
NET = Net()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What the calls open: made once."""
    return made(tmp_path_factory.mktemp("wrong"))


def made(folder):
    program = exporter.export(NET, (X,))
    program.save(folder / "net.onnx")
    (folder / "text.onnx").write_text("this is no model")
    (folder / "empty.onnx").write_bytes(b"")
    step = exporter.export_training_step(NET, (X,), loss=mse, targets=(Y,), optimizer="sgd")
    step.save(folder / "step.onnx")
    proto = program.model_proto
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[N] x, int64[1] i) => (float[1] y) { y = Gather(x, i) }'
    gather = onnx.parser.parse_model(text)
    return SimpleNamespace(
        folder=folder, net=folder / "net.onnx", program=program, proto=proto, step=step, gather=gather,
        module=exporter.load(proto), session=exporter.inference_session(proto), trainer=Trainer(step), reference=exporter.reference_evaluator(proto),
    )  # fmt: skip


class Row(NamedTuple):
    """A wrong call.

    Attributes:
        says: What its text must contain, a regular expression.
        call: Takes the files, and for both exporters which of them.
        both: Whether it is made with either exporter.
    """

    says: str
    call: Callable[..., Any]
    both: bool = False


def export(model, args=(X,), kwargs=None, **options):
    """A row: an export, with either exporter."""
    return lambda files, dynamo: exporter.export(model, args, kwargs, dynamo=dynamo, **options)


def step(model=NET, args=(X,), **options):
    options = {"loss": mse, "targets": (Y,), "optimizer": "sgd", **options}
    return lambda files: exporter.export_training_step(model, args, **{name: value for name, value in options.items() if value is not step})


def hooked(files, dynamo):
    with exporter.hook():
        torch.onnx.export(Outer(Net()), (torch.ones(4, 5),), dynamo=dynamo, f=io.BytesIO() if not dynamo else None)


def hooked_untranslated(files, dynamo):
    with exporter.hook():
        torch.onnx.export(Outer(Airy()), (X,), dynamo=dynamo, f=io.BytesIO() if not dynamo else None)


def fakes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        return mode.from_tensor(X)


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(3, 2))


#: What is said of each call.
ROWS: dict[str, Row] = {
    # ------------------------------------------------------------------------------------------- export: the model
    "a class": Row(r"Net is a class.*Net\(\.\.\.\)", export(Net), True),
    "a function": Row(r"function.*torch\.nn\.Module", export(mse), True),
    "a path": Row(r"'net\.onnx'.*exporter\.load", export("net.onnx"), True),
    "None": Row(r"None.*torch\.nn\.Module", export(None), True),
    "a ScriptModule": Row(r"ScriptModule", lambda files: exporter.export(scripted(), (X,))),
    "a DataParallel": Row(r"DataParallel.*\.module", lambda files: exporter.export(nn.DataParallel(NET), (X,), dynamo=False)),
    "parameters on meta": Row(r"device meta", lambda files, dynamo: exporter.export(Net().to("meta"), (X,), dynamo=dynamo), True),
    # --------------------------------------------------------------------------------------- export: the arguments
    "another width": Row(r"(?s)(mat1 and mat2|reduction dim).*test_wrong_calls", export(Outer(NET), (torch.ones(4, 5),)), True),
    "no argument": Row(r"missing .*: 'x'", export(NET, ()), True),
    "too many arguments": Row(r"takes from 2 to 3|too many", export(NET, (X, X, X)), True),
    "an argument of no such name": Row(r"'sclae'", export(NET, (X,), {"sclae": X}), True),
    "kwargs that are a list": Row(r"kwargs.*list.*dict", export(NET, (X,), [X]), True),
    "args that are a number": Row(r"args.*int.*tuple", export(NET, 5), True),
    "args that are a str": Row(r"args.*str.*tuple", export(NET, "x"), True),
    "args that are a generator": Row(r"args.*generator.*tuple", lambda files, dynamo: exporter.export(NET, (x for x in [X]), dynamo=dynamo), True),
    "args that are a dict": Row(r"args.*dict.*kwargs", export(NET, {"x": X}), True),
    "integers": Row(r"(?i)dtype|Long", export(NET, (torch.ones(4, 3, dtype=torch.int64),)), True),
    "an argument on meta": Row(r"device meta", export(NET, (X.to("meta"),)), True),
    "a lambda as an argument": Row(r"argument 1.*function|'function'", export(NET, (X, lambda x: x)), True),
    "a generator as an argument": Row(r"argument 1.*generator", lambda files, dynamo: exporter.export(NET, (X, (i for i in [1])), dynamo=dynamo), True),
    "a module as an argument": Row(r"argument 1.*Linear", export(NET, (X, nn.Linear(2, 2))), True),
    "a numpy array as an argument": Row(r"argument 0.*ndarray.*from_numpy", export(NET, (X.numpy(),)), True),
    "a forward that raises at length": Row(r"ValueError: line 0 of what is wrong.*line 399 of what is wrong", export(Picky()), True),
    "an output that is a number": Row(r"(?s)output 1 \(3 .*did not have|'int' object.*way out: export with dynamo=False", export(Counted()), True),
    "a branch on values": Row(r"(?s)data-dependent.*test_wrong_calls", lambda files: exporter.export(Branches(), (X,))),
    "no translation": Row(r"(?s)special_airy_ai.*test_wrong_calls", export(Outer(Airy())), True),
    # ----------------------------------------------------------------------------------------- export: its options
    "a dynamo that is a str": Row(r"dynamo='yes'.*True.*False", lambda files: exporter.export(NET, (X,), dynamo="yes")),
    "a dynamo that is None": Row(r"dynamo=None", lambda files: exporter.export(NET, (X,), dynamo=None)),
    "an opset of the past": Row(r"opset_version=3", export(NET, opset_version=3), True),
    "an opset of the future": Row(r"opset_version=99", export(NET, opset_version=99), True),
    "an opset that is a str": Row(r"opset_version='18'", export(NET, opset_version="18"), True),
    "an unknown option": Row(r"'opset'.*opset_version", export(NET, opset=18), True),
    "an f": Row(r"program\.save", export(NET, f="net.onnx"), True),
    "dynamic_shapes of no such name": Row(r"'y'.*x", export(NET, dynamic_shapes={"y": {0: "n"}}), True),
    "dynamic_shapes of no such axis": Row(r"'x'.*axis 7", export(NET, dynamic_shapes={"x": {7: "n"}}), True),
    "dynamic_shapes for too many": Row(r"dynamic_shapes.*2.*1", export(NET, dynamic_shapes=({0: "n"}, {0: "n"})), True),
    "dynamic_shapes that are a str": Row(r"dynamic_shapes.*str", export(NET, dynamic_shapes="n"), True),
    "dynamic_shapes of a number": Row(r"dynamic_shapes.*0\.5", export(NET, dynamic_shapes={"x": {0: 0.5}}), True),
    "an inline that means nothing": Row(r"inline='nothing:\*' means none", export(NET, inline=["nothing:*"]), True),
    "an inline that is a number": Row(r"inline=.*int", export(NET, inline=5), True),
    "an opaque that means nothing": Row(r"opaque='aten::nothing' means none of the operators", export(NET, opaque=["aten::nothing"]), True),
    "an opaque that is a number": Row(r"opaque= takes operators, modules", export(NET, opaque=[3]), True),
    "a portable that means nothing": Row(r"portable='nothing:\*' means none", export(NET, portable=["nothing:*"]), True),
    # ---------------------------------------------------------------------------------------------------- the hook
    "another width under the hook": Row(r"(?s)(mat1 and mat2|reduction dim).*test_wrong_calls", hooked, True),
    "no translation under the hook": Row(r"(?s)special_airy_ai.*test_wrong_calls", hooked_untranslated, True),
    # ------------------------------------------------------------------------------------------------------- files
    "save into no folder": Row(r"cannot write .*nothing was written", lambda files: files.program.save(files.folder / "no" / "a.onnx")),
    "an unknown dialect": Row(r"ort-9", lambda files: files.program.save(files.folder / "a.onnx", schema="ort-9")),
    "load no file": Row(r"cannot read .*gone\.onnx", lambda files: exporter.load(files.folder / "gone.onnx")),
    "load a folder": Row(r"cannot read .*: Is a directory", lambda files: exporter.load(files.folder)),
    "load a text": Row(r"text\.onnx.*ONNX", lambda files: exporter.load(files.folder / "text.onnx")),
    "load an empty file": Row(r"empty\.onnx.*ONNX", lambda files: exporter.load(files.folder / "empty.onnx")),
    "load a step": Row(r"training step", lambda files: exporter.load(files.folder / "step.onnx")),
    "load a module": Row(r"not Net", lambda files: exporter.load(NET)),
    "load with an unknown key": Row(r"'alow'", lambda files: exporter.load(files.net, alow=["a"])),
    "load with allow='*'": Row(r"allow='\*'.*the package's name in full", lambda files: exporter.load(files.net, allow="*")),
    "load with a number as allow": Row(r"allow=.*int", lambda files: exporter.load(files.net, allow=5)),
    "load to no such device": Row(r"device.*'gpu'", lambda files: exporter.load(files.net, device="gpu")),
    "load to a device that is not there": Row(r"device is 'cuda:63'.*none here", lambda files: exporter.load(files.net, device="cuda:63")),
    "load with an unknown recompute": Row(r"recompute.*'all'", lambda files: exporter.load(files.net, recompute="all")),
    # ----------------------------------------------------------------------------------------------------- modules
    "module: too many": Row(r"takes 1 tensors.*2 were given", lambda files: files.module(X, X)),
    "module: none": Row(r"inputs x are missing", lambda files: files.module()),
    "module: an unknown name": Row(r"no input 'y'", lambda files: files.module(y=X)),
    "module: another type": Row(r"'x' is torch\.float64.*float32", lambda files: files.module(X.double())),
    "module: another shape": Row(r"'x' has the shape \[5, 3\]", lambda files: files.module(torch.ones(5, 3))),
    "module: on meta": Row(r"'x' is on meta", lambda files: files.module(X.to("meta"))),
    "module: an array": Row(r"'x' is of type ndarray", lambda files: files.module(X.numpy())),
    # ---------------------------------------------------------------------------------------------------- sessions
    "session of no file": Row(r"cannot read .*gone\.onnx", lambda files: exporter.inference_session(files.folder / "gone.onnx")),
    "session of a text": Row(r"text\.onnx.*ONNX", lambda files: exporter.inference_session(files.folder / "text.onnx")),
    "session with an unknown key": Row(r"'alow'", lambda files: exporter.inference_session(files.net, alow=["a"])),
    "session: an unknown input": Row(r"(?i)y.*input|input.*y", lambda files: files.session.run(None, {"y": X.numpy()})),
    "session: another type": Row(r"(?i)unexpected input data type|double", lambda files: files.session.run(None, {"x": X.double().numpy()})),
    "session: another shape": Row(r"(?i)dimension", lambda files: files.session.run(None, {"x": torch.ones(5, 3).numpy()})),
    "reference of no file": Row(r"cannot read .*gone\.onnx", lambda files: exporter.reference_evaluator(files.folder / "gone.onnx")),
    "reference: another shape": Row(r"onnx\.reference cannot run", lambda files: files.reference.run(None, {"x": torch.ones(5, 9).numpy()})),
    "diff of no file": Row(r"cannot read .*gone\.onnx", lambda files: exporter.diff_files(files.folder / "gone.onnx", files.net)),
    # --------------------------------------------------------------------------------------------------- gradients
    "a rule of no function": Row(r"not a callable", lambda files: exporter.gradient("Mul", domain="wrong")(3)),
    "a number to register": Row(r"plain value", lambda files: exporter.register(3)),
    "gradient of no file": Row(r"cannot read .*gone\.onnx", lambda files: exporter.build_gradient_graph(files.folder / "gone.onnx")),
    "gradient of a text": Row(r"text\.onnx.*ONNX", lambda files: exporter.build_gradient_graph(files.folder / "text.onnx")),
    "gradient of a number": Row(r"a model is a path.*not int", lambda files: exporter.build_gradient_graph(5)),
    "wrt of no such name": Row(r"wrt names 'weight'.*inner\.weight", lambda files: exporter.build_gradient_graph(files.proto, wrt=["weight"])),
    "wrt that is a str": Row(r"wrt is the string.*list", lambda files: exporter.build_gradient_graph(files.proto, wrt="x")),
    "wrt of integers": Row(r"wrt names 'i'.*floating", lambda files: exporter.build_gradient_graph(files.gather, wrt=["i"])),
    "outputs of no such name": Row(r"outputs names 'z'", lambda files: exporter.build_gradient_graph(files.proto, outputs=["z"])),
    "overrides that are a list": Row(r"overrides", lambda files: exporter.build_gradient_graph(files.proto, overrides=[1])),
    "tangent of no such name": Row(r"wrt names 'weight'", lambda files: exporter.build_tangent_graph(files.proto, wrt=["weight"])),
    "tangent of no file": Row(r"cannot read .*gone\.onnx", lambda files: exporter.build_tangent_graph(files.folder / "gone.onnx")),
    # ------------------------------------------------------------------------------------------------------- steps
    "step: no loss": Row(r"loss", step(loss=step)),
    "step: a loss that is a str": Row(r"loss is of type str", step(loss="mse")),
    "step: targets missing": Row(r"(?s)missing 1 required positional argument: 'target'.*let loss\(model\(\*args\), \*targets\) run", step(targets=())),
    "step: targets without a loss": Row(r"loss=None", step(loss=None)),
    "step: a loss of many numbers": Row(r"the loss mse_loss|one floating-point number", step(loss=nn.MSELoss(reduction="none"))),
    "step: a target of another shape": Row(r"must match the size|broadcastable", step(targets=(torch.ones(3, 7),))),
    "step: an unknown optimizer": Row(r"no optimizer 'adma'.*'adam'", step(optimizer="adma")),
    "step: the class of no optimizer": Row(r"optimizer is the class Linear", step(optimizer=nn.Linear)),
    "step: an unknown hyperparameter": Row(r"'learning_rate'", step(hyperparameters={"learning_rate": 1})),
    "step: a hyperparameter that is a str": Row(r"lr is 'high'", step(hyperparameters={"lr": "high"})),
    "step: hyperparameters that are a list": Row(r"hyperparameters.*list", step(hyperparameters=[1])),
    "step: accumulate=0": Row(r"accumulate is 0", step(accumulate=0)),
    "step: clip_norm=-1": Row(r"clip_norm is -1", step(clip_norm=-1)),
    "step: clip_norm that is a str": Row(r"clip_norm is 'one'", step(clip_norm="one")),
    "step: an unknown precision": Row(r"precision is 'float8'", step(precision="float8")),
    "step: another width": Row(r"(mat1 and mat2|reduction dim)", step(args=(torch.ones(4, 5),))),
    "step: no argument": Row(r"missing a required argument: 'x'", step(args=())),
    "step: a class": Row(r"Net is a class", step(model=Net)),
    "step: nothing to train": Row(r"no trainable parameter", step(model=nn.ReLU(), targets=(X,))),
    # ----------------------------------------------------------------------------------------------------- trainers
    "trainer of a path": Row(r"Trainer\.load", lambda files: Trainer(str(files.folder / "step.onnx"))),
    "trainer of a program": Row(r"export_training_step", lambda files: Trainer(files.program)),
    "trainer of no file": Row(r"cannot read .*gone\.onnx", lambda files: Trainer.load(files.folder / "gone.onnx")),
    "trainer of no step": Row(r"no training step", lambda files: Trainer.load(files.net)),
    "batch: missing": Row(r"'?target'?, which the batch lacks", lambda files: files.trainer.step({"x": X})),
    "batch: unknown": Row(r"no input y", lambda files: files.trainer.step({"x": X, "target": Y, "y": Y})),
    "batch: another type": Row(r"'x' takes a tensor of torch\.float32", lambda files: files.trainer.step({"x": X.double(), "target": Y})),
    "batch: another shape": Row(r"(?i)dimension|shape", lambda files: files.trainer.step({"x": torch.ones(5, 3), "target": Y})),
    "batch: a tuple": Row(r"a batch is a dictionary", lambda files: files.trainer.step((X, Y))),
    "batch: on meta": Row(r"'x' takes .*on meta", lambda files: files.trainer.step({"x": X.to("meta"), "target": Y})),
    "evaluate without evaluation": Row(r"no evaluation", lambda files: files.trainer.evaluate({"x": X})),
    # ------------------------------------------------------------------------------------------------------- verify
    "verify: another width": Row(r"(mat1 and mat2|reduction dim)", lambda files: exporter.verify(NET, (torch.ones(4, 5),))),
    "verify: no argument": Row(r"missing .*: 'x'", lambda files: exporter.verify(NET, ())),
    "verify: a class": Row(r"Net is a class", lambda files: exporter.verify(Net, (X,))),
    "verify: an unknown key": Row(r"'dynamc'", lambda files: exporter.verify(NET, (X,), dynamc=True)),
    "verify: on meta": Row(r"inner\.weight.*meta", lambda files: exporter.verify(Net().to("meta"), (X,))),
    "verify: a fake tensor": Row(r"argument 0.*FakeTensor", lambda files: exporter.verify(NET, (fakes(),))),
}  # fmt: skip

CALLS = [
    pytest.param(row, dynamo, id=f"{name}{'' if dynamo is None else '-dynamo' if dynamo else '-torchscript'}")
    for name, row in ROWS.items()
    for dynamo in ((True, False) if row.both else (None,))
]


def outcome(row, dynamo, files):
    """(the error, what Python prints of it, what was printed before)."""
    told = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        warnings.simplefilter("ignore")
        try:
            row.call(files) if dynamo is None else row.call(files, dynamo)
        except Exception as error:
            return error, "".join(traceback.format_exception(error)), told.getvalue()
    return None, "", told.getvalue()


@pytest.mark.parametrize(("row", "dynamo"), CALLS)
def test_a_wrong_call_is_told_shortly(row, dynamo, files, capfd):
    error, printed, told = outcome(row, dynamo, files)
    assert error is not None, "nobody noticed"
    assert re.search(row.says, str(error)), printed
    assert len(str(error).splitlines()) <= MESSAGE, str(error)
    assert len(printed.splitlines()) <= PRINTED, printed
    assert not told + "".join(capfd.readouterr())


def caught(call):
    with pytest.raises(Exception) as raised:  # noqa: PT011  of several classes
        call()
    return raised.value


@pytest.fixture
def wide():
    """The error of a forward that another library's frames stand around."""
    return caught(lambda: exporter.export(Outer(NET), (torch.ones(4, 5),), eager_check=False))


def test_the_frames_are_those_of_the_user(wide):
    frames = traceback.extract_tb(wide.__traceback__)
    assert {frame.filename for frame in frames[1:]} <= {__file__, usable.__file__}  # the suite's own watch is nobody's library
    assert [frame.name for frame in frames[-2:]] == ["forward", "forward"]
    assert frames[-1].line == "h = self.inner(x)"
    assert any(frame.name == "<lambda>" for frame in frames), "where the export was called"


def test_all_of_it_is_there_for_who_asks(wide, monkeypatch):
    assert wide.__cause__ is None
    assert isinstance(wide.__context__, torch.onnx.OnnxExporterError), "who walks the chain finds torch's own error"
    printed = "".join(traceback.format_exception(wide))
    assert "print(error.whole), or PYTHONOP_TRACEBACK=1" in printed
    assert len(str(wide.whole).splitlines()) > 100
    assert "The above exception was the direct cause" in str(wide.whole)
    assert str(pickle.loads(pickle.dumps(wide)).whole) == str(wide.whole)

    def lines():
        return len("".join(traceback.format_exception(caught(lambda: exporter.export(NET, (torch.ones(4, 5),))))).splitlines())

    with exporter.errors.full():
        assert lines() > 100
    monkeypatch.setenv("PYTHONOP_TRACEBACK", "1")
    assert lines() > 100
    monkeypatch.setenv("PYTHONOP_TRACEBACK", "0")
    assert lines() <= PRINTED


def test_what_torch_prints_of_a_failure_is_there_for_who_asks(capfd):
    with exporter.errors.full():
        caught(lambda: hooked_untranslated(None, True))
        caught(lambda: hooked_untranslated(None, False))
    told = capfd.readouterr().out
    assert "[torch.onnx] Translate the graph into ONNX... ❌" in told
    assert "Torch IR graph at exception" in told


def test_errors_of_the_user_stay_as_they_are():
    def own():
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("mine") from error

    with pytest.raises(ValueError, match="mine") as raised, exporter.hook():
        torch.nn.Identity()(own())
    assert isinstance(raised.value.__cause__, KeyError)
    assert not hasattr(raised.value, "whole")
    before = caught(own)
    with exporter.errors.full():
        assert len(traceback.extract_tb(caught(own).__traceback__)) == len(traceback.extract_tb(before.__traceback__))


def test_a_fault_of_ours_keeps_its_last_step(monkeypatch):
    def faulty(*args, **kwargs):
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr("exporter.module.load.entries_of", faulty)
    error = caught(lambda: exporter.load(exporter.export(NET, (X,))))
    assert type(error) is ZeroDivisionError
    assert traceback.extract_tb(error.__traceback__)[-1].name == "faulty"


class Frozen(Exception):
    """Lets nobody write to it."""

    def __setattr__(self, name, value):
        raise AttributeError("frozen")


def test_an_error_that_cannot_be_written_to_is_let_through(monkeypatch):
    def faulty(*args, **kwargs):
        raise Frozen("kept")

    monkeypatch.setattr("exporter.module.load.entries_of", faulty)
    assert str(caught(lambda: exporter.load(exporter.export(NET, (X,))))) == "kept"


def test_the_hook_decorates_functions_and_opens_twice():
    @exporter.hook()
    def made():
        return torch.onnx.export(NET, (X,), dynamo=True)

    assert len(made().model.graph) == len(made().model.graph) > 0
    with pytest.raises(exporter.ArgumentError, match="means none"), exporter.hook(inline=["nothing:*"]) as handle:
        torch.onnx.export(NET, (X,), dynamo=True)
    assert handle.program is not None


def test_the_table_is_long_enough():
    assert len(ROWS) >= 40
