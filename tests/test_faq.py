"""docs/faq.md: each error on the page is made here, and says what the page says."""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback

import onnx
import onnxruntime
import pytest
import torch
from click.testing import CliRunner

import exporter
from exporter.cli import main
from exporter.files.trust import unregister
from symbolics.errors import Faq
from tests.processes import ROOT

OPS = """
import torch


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor=0.5):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Scale(Halve):
    @staticmethod
    def forward(ctx, x, settings):
        ctx.factor = settings.factor
        return torch.from_numpy(x.detach().numpy() * settings.factor)


class Settings:
    factor = 0.5


class Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, float(x.max())

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 2


class AddOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Model(torch.nn.Module):
    def __init__(self, run):
        super().__init__()
        self.linear, self.run = torch.nn.Linear(4, 3), run

    def forward(self, x):
        return self.run(self.linear(x))


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(4, 3), torch.zeros(())

    def forward(self, x):
        self.seen = self.seen + x.sum()
        return self.linear(x) * self.seen


def local():
    class Local(Halve):
        pass

    return Local


def halve(x):
    return Halve.apply(x, 0.5)


def scale(x, settings=Settings()):
    return Scale.apply(x, settings)


def largest(x):
    y, most = Largest.apply(x)
    return y / most


def add_one(x):
    return AddOne.apply(x) + x


def share(x):
    return Halve.apply(x, 1 / x.shape[0])
"""

SHARPEN = '<ir_version: 8, opset_import: ["": 17, "mylib": 1]> g (float[N, 4] x) => (float[N, 4] y) { y = mylib.Sharpen(x) }'


@pytest.fixture
def ops(tmp_path, monkeypatch):
    """The package of the page, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "ops.py").write_text(OPS)
    importlib.invalidate_caches()
    yield importlib.import_module("mypkg.ops")
    for name in [name for name in sys.modules if name.partition(".")[0] == "mypkg"]:
        del sys.modules[name]


def _x():
    return torch.arange(32.0).reshape(8, 4)


def _export(ops, run, **options):
    return exporter.export(ops.Model(run), (_x(),), **options)


def plain_session(ops, monkeypatch):
    _export(ops, ops.halve).save("model.onnx")
    onnxruntime.InferenceSession("model.onnx")


def not_allowed(ops, monkeypatch):
    exporter.inference_session(_export(ops, ops.halve).model_proto)


def not_installed(ops, monkeypatch):
    program = _export(ops, ops.halve)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", os.getcwd())])
    for name in ("mypkg.ops", "mypkg"):
        del sys.modules[name]
    importlib.invalidate_caches()
    exporter.inference_session(program.model_proto, allow=["mypkg.ops:*"])


def in_a_function(ops, monkeypatch):
    cls = ops.local()
    exporter.inference_session(_export(ops, lambda x: cls.apply(x, 0.5)).model_proto, allow=["mypkg.ops:*"])


def changed(ops, monkeypatch):
    proto = _export(ops, ops.halve).model_proto

    class Other(ops.Halve):
        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.factor * 2, None

    exporter.register(Other, "mypkg.ops:Halve")
    try:
        exporter.inference_session(proto, strict=True)
    finally:
        unregister("mypkg.ops:Halve")


def an_object(ops, monkeypatch):
    _export(ops, ops.scale)


def a_python_value(ops, monkeypatch):
    _export(ops, ops.largest)


def in_place(ops, monkeypatch):
    _export(ops, ops.add_one)


def from_a_size(ops, monkeypatch):
    _export(ops, ops.share, dynamic_shapes={"x": {0: "batch"}})


def another_shape(ops, monkeypatch):
    exporter.load(_export(ops, ops.halve).model_proto, allow=["mypkg.ops:*"])(torch.randn(5, 4))


def _step(model, **options):
    options = {"loss": torch.nn.functional.cross_entropy, "targets": (torch.zeros(8, dtype=torch.int64),), "optimizer": "sgd", **options}
    exporter.export_training_step(model, (_x(),), **options)


def no_buffer(ops, monkeypatch):
    _step(ops.Counts())


def no_number(ops, monkeypatch):
    _step(ops.Model(ops.halve), loss=torch.nn.CrossEntropyLoss(reduction="none"))


def no_rule(ops, monkeypatch):
    exporter.build_gradient_graph(onnx.parser.parse_model(SHARPEN))


def no_kernel(ops, monkeypatch):
    exporter.inference_session(exporter.export(torch.nn.Softplus(), (_x().double(),)))


#: What makes the error of each section, in the order of the page.
MADE = (plain_session, not_allowed, not_installed, in_a_function, changed, an_object, a_python_value, in_place, from_a_size, another_shape, no_buffer, no_number, no_rule, no_kernel)  # fmt: skip
SECTIONS = re.findall(r"^## (.+)\n\n```error\n(.+)\n```$", (ROOT / "docs" / "faq.md").read_text(), re.M)


def test_the_page_has_a_section_for_each():
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "faq.md").read_text(), re.M)
    assert headings == [heading for heading, _ in SECTIONS]
    assert len(headings) == len(MADE) == 14


UNUSABLE = pytest.mark.unusable(reason="onnxruntime opens no file of that model: that is the error")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "section"),
    [
        pytest.param(make, section, id=make.__name__, marks=[UNUSABLE] if make is no_kernel else [])
        for make, section in zip(MADE, SECTIONS, strict=True)
    ],
)
def test_an_error_says_what_the_page_says(make, section, ops, monkeypatch):
    pattern = ".+".join(map(re.escape, section[1].split("…")))
    with pytest.raises(Exception) as raised:  # noqa: PT011  of several classes; the text is compared
        make(ops, monkeypatch)
    assert re.fullmatch(pattern, str(raised.value)), str(raised.value)
    if make is not plain_session:  # which is onnxruntime's own
        assert isinstance(raised.value, exporter.PythonopError)
        assert raised.value.faq == _anchor(section[0])


def _anchor(heading):
    """What GitHub and mkdocs make of a heading."""
    return re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-")


def test_each_anchor_is_on_the_page():
    assert list(Faq) == [_anchor(heading) for heading, _ in SECTIONS[1:]]


def test_python_shows_the_way_to_the_page(ops, monkeypatch):
    with pytest.raises(exporter.TrustError) as raised:
        not_allowed(ops, monkeypatch)
    shown = "".join(traceback.format_exception(raised.value))
    assert "\nmore: docs/faq.md#the-file-names-a-class-which-is-not-allowed\n" in shown
    assert "docs/faq" not in str(raised.value), "the text stays as short as it was"
    with pytest.raises(exporter.PythonopError) as raised:
        exporter.load("gone.onnx")
    assert raised.value.faq is None
    assert "docs/faq" not in "".join(traceback.format_exception(raised.value))


def test_the_command_line_shows_it_in_a_line_of_its_own(ops):
    _export(ops, ops.halve).save("model.onnx")
    done = CliRunner().invoke(main, ["run", "model.onnx"])
    assert done.exit_code == 2
    message, *_, more = done.stderr.splitlines()
    assert message.startswith("error: ")
    assert more == f"more: docs/faq.md#{Faq.NOT_ALLOWED}"
    done = CliRunner().invoke(main, ["run", "gone.onnx"])
    assert done.exit_code == 2
    assert "more:" not in done.stderr


@pytest.mark.usefixtures("quick_verify")
def test_an_error_of_the_fresh_process_leads_there_too(ops):
    cls = ops.local()
    with pytest.raises(exporter.TrustError, match="in the fresh process") as raised:
        exporter.verify(ops.Model(lambda x: cls.apply(x, 0.5)), (_x(),))
    assert raised.value.faq == Faq.IN_A_FUNCTION
