"""verify(): equal files are equal, wrong ones are not, and both are said clearly."""

from __future__ import annotations

import html.parser
import io
import json
import math

import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import nn

import exporter
from exporter.cli import main
from exporter.train_mode.dropout import dropout_mask
from exporter.verification.report import Report, Row
from exporter.verification.rows import ELSEWHERE
from symbolics import quirks
from tests.exporter.module import functions as F
from tests.exporter.verification import targets
from tests.processes import python

# The processes of the commands, at the end of this file, are started in full.
pytestmark = pytest.mark.usefixtures("quick_verify")


def at_the_example(report: Report, *, ok: bool = True) -> list[Row]:
    """Its rows of tensors; those alone that differ."""
    return [row for row in report.rows if row.kind not in ELSEWHERE and (ok or not row.ok)]


def test_a_good_model(dynamo):
    model, args = targets.good()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = exporter.verify(model, args, dynamo=dynamo)
    assert report.ok
    assert report.max_error < 1e-5
    assert {(row.kind, row.name) for row in at_the_example(report)} == {
        ("output", "output 0"),
        ("input gradient", "x"),
        *(("parameter gradient", name) for name, _ in model.named_parameters()),
    }
    assert {row.reference for row in report.rows} == {"float64"}
    assert report.functions == {"tests.zoo.functions:Cube": 1}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_float64_is_compared_as_float64():
    report = exporter.verify(F.Cubic().double(), (torch.randn(3, 4, dtype=torch.float64),))
    assert report.ok
    assert report.max_error < 1e-12


@pytest.mark.parametrize(
    ("target", "kinds"),
    [("wrong_forward", {"output", "parameter gradient", "input gradient"}), ("wrong_backward", {"parameter gradient", "input gradient"})],
)
def test_a_wrong_function_is_found(target, kinds):
    report = exporter.verify(*getattr(targets, target)())
    assert not report.ok
    bad = list(at_the_example(report, ok=False))
    assert {row.kind for row in bad} == kinds
    assert report.worst()[0] in bad
    assert report.max_error > 1e-4


def test_eagers_gradients_are_those_behind_its_hooks(dynamo):
    """A copy of a model loses the hooks on its parameters: both sides without them were equal."""
    assert exporter.verify(*targets.hooked(targets.tenfold), dynamo=dynamo).ok
    report = exporter.verify(*targets.hooked(targets.tenfold_in_eager), dynamo=dynamo)
    first, _ = next(targets.good()[0].named_parameters())
    assert [row.name for row in at_the_example(report, ok=False)] == [first]


def test_buffers_that_forward_changes_are_compared(dynamo):
    model, args = targets.tracks(torch.sin)
    report = exporter.verify(model, args, dynamo=dynamo)
    assert report.ok
    assert {row.name: row.reference for row in report.rows if row.kind == "buffer"} == {"seen": "float64", "calls": "int64"}
    assert all(row.node for row in report.rows if row.kind == "buffer")
    assert [row.kind for row in report.rows if row.kind in ELSEWHERE] == ["second input"]
    assert not model.seen.any()  # the model itself is left alone
    report = exporter.verify(*targets.tracks(targets.WrongForward.apply), dynamo=dynamo, bisect=True)
    assert [(row.kind, row.name, row.problem) for row in at_the_example(report, ok=False)] == [("buffer", "seen", "")]
    assert report.first_departure is None  # in this process, the Function is right


def test_a_cache_does_not_run_over():
    """Each step that is timed begins with the state of the first."""
    assert exporter.verify(targets.Cache(), (torch.randn(3, 4),), steps=8).ok


@pytest.mark.filterwarnings("ignore:forward changes state")
def test_state_that_the_file_does_not_carry_differs(dynamo):
    report = exporter.verify(targets.Counts().train(), (torch.randn(3, 4),), dynamo=dynamo)
    (bad,) = (row for row in at_the_example(report, ok=False))
    assert (bad.kind, bad.name) == ("buffer", "calls")
    assert "does not carry it: it is an attribute" in bad.problem


def test_the_layers_behind_a_wrong_backward_are_right():
    report = exporter.verify(*targets.wrong_backward())
    assert {row.name for row in at_the_example(report, ok=False)} == {"first.weight", "first.bias", "x"}


def test_a_local_class_needs_a_setup():
    model, args = targets.local()
    with pytest.raises(exporter.TrustError, match=r"fresh process.*tests:Local.*setup='package.module:function'"):
        exporter.verify(model, args)
    assert exporter.verify(model, args, setup="tests.exporter.verification.targets:make_local").ok


def test_a_portable_file_needs_no_class(dynamo):
    """Its process may import nothing and calls no setup: the same class, which nobody can import, needs one otherwise."""
    report = exporter.verify(
        *targets.local(), dynamo=dynamo, portable=True, allow=["gone.*"], setup="tests.exporter.verification.targets:fails"
    )
    assert report.ok
    assert report.functions == {"tests:Local": 1}
    exporter.testing.assert_roundtrip(exporter.Case(*targets.local(), portable=["Local"]), dynamo=dynamo)


def test_a_file_that_is_portable_in_part_needs_its_classes():
    model, args = targets.local()
    model = nn.Sequential(model, F.Cubic())
    with pytest.raises(exporter.TrustError, match=r"fresh process.*tests:Local.*setup='package.module:function'"):
        exporter.verify(model, args, portable=["tests.zoo.functions:*"])
    report = exporter.verify(model, args, portable=["tests.zoo.functions:*"], setup="tests.exporter.verification.targets:make_local")
    assert report.ok
    assert report.functions == {"tests:Local": 1, "tests.zoo.functions:Cube": 1}


def test_a_wrong_portable_backward_is_found(monkeypatch):
    """verify compares with eager, whatever the file is made of."""
    from exporter.verification import verify as module

    def wrong(*args, **options):
        program = export(*args, **options)
        for function in program.model.functions.values():
            if function.name.endswith("_backward"):
                node = ir.Node("", "Neg", [function.outputs[0]])
                node.outputs[0].name, function.outputs[0].name = function.outputs[0].name, "right"
                function.append(node)
                function.outputs[0] = node.outputs[0]
        return program

    export = module.export
    monkeypatch.setattr(module, "export", wrong)
    report = exporter.verify(*targets.good(), portable=True)
    assert {row.kind for row in at_the_example(report, ok=False)} == {"parameter gradient", "input gradient"}


def test_several_outputs_keywords_and_structure(dynamo):
    report = exporter.verify(F.Structured(), (torch.randn(2, 4),), {"ids": torch.arange(4), "y": torch.randn(2, 4)}, dynamo=dynamo)
    assert report.ok
    assert [row.dtype for row in report.rows if row.kind == "output"] == ["float32", "float32", "int64", "float32"]
    assert "unused.weight" not in {row.name for row in report.rows}


def test_batch_norm_in_training_mode_tied_and_frozen(dynamo):
    model = nn.Sequential(nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 36, 2)).train()
    assert exporter.verify(model, (torch.randn(4, 1, 8, 8),), dynamo=dynamo).ok
    report = exporter.verify(F.Tied(), (torch.tensor([1, 2, 3]),), dynamo=dynamo)
    assert report.ok
    assert not any("frozen" in row.name for row in report.rows)


class _Attending(nn.Module):
    """Dropout on the weights of an attention and on its result."""

    def __init__(self):
        super().__init__()
        self.qkv, self.drop = nn.Linear(8, 24), nn.Dropout(0.3)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.drop(self.drop((q @ k.transpose(-1, -2)).softmax(-1)) @ v)


class _DropsInside(nn.Module):
    """Attention that drops, in torch's own operator."""

    def forward(self, x):
        return nn.functional.dropout(nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3), 0.5)


class _Twice(nn.Module):
    """Two dropouts that only their masks tell apart, of different ratios."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        half = nn.functional.dropout(self.linear(x), 0.5)
        return half + 2 * nn.functional.dropout(self.linear(x), 0.25), half


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shape"),
    [(F.Dropping, (3, 6)), (_Twice, (3, 6)), (_Attending, (2, 5, 8)), (_DropsInside, (2, 1, 5, 8))],
    ids=["one", "two", "attention", "sdpa"],
)
def test_dropout_is_verified_with_the_files_masks(make, shape, dynamo):
    report = exporter.verify(make().train(), (torch.randn(*shape),), dynamo=dynamo)
    assert report.ok, report
    assert report.facts["mode"] == "training"
    assert {row.kind for row in report.rows} >= {"output", "input gradient"}


def test_a_dropout_that_the_file_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(quirks, "TRANSLATED", ())
    with pytest.raises(
        exporter.PythonopError,
        match=r"mask 0 of eager has the shape \[2, 1, 5, 5\] and drops 0.3, Dropout .* of the file \[2,1,5,8\] and 0.5",
    ):
        exporter.verify(_DropsInside().train(), (torch.randn(2, 1, 5, 8),))


def test_a_file_that_drops_otherwise_differs(monkeypatch):
    monkeypatch.setattr("exporter.verification.masks.dropout_mask", lambda seed, number, *rest: dropout_mask(seed + 1, number, *rest))
    assert not exporter.verify(_Twice().train(), (torch.randn(3, 6),)).ok


def test_the_remedy_for_dropout_works():
    model = F.Dropping().train()
    for m in model.modules():
        if hasattr(m, "p"):
            m.p = 0.0
    assert exporter.verify(model, (torch.randn(3, 6),)).ok


class _Rounds(nn.Module):
    """Linear, round, and another Linear where ``behind``."""

    def __init__(self, behind=False):
        super().__init__()
        self.linear, self.behind = nn.Linear(4, 4), nn.Linear(4, 2) if behind else nn.Identity()

    def forward(self, x):
        return self.behind(torch.round(self.linear(x)))


@pytest.mark.parametrize("behind", [False, True])
def test_zeros_of_eager_equal_no_path_in_the_file(behind):
    """torch's round has a gradient of zeros, ONNX's none."""
    report = exporter.verify(_Rounds(behind), (torch.randn(3, 4),))
    assert report.ok, list(at_the_example(report, ok=False))
    errors = {row.name: row.error for row in report.rows if row.kind.endswith("gradient")}
    assert errors.keys() == {"linear.weight", "linear.bias", "x", *(["behind.weight", "behind.bias"] if behind else [])}
    assert errors["linear.weight"] == errors["x"] == 0


class _Straight(torch.autograd.Function):
    """round, with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, g):
        return g


class _StraightSteps(_Straight):
    """0 or 1, with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x):
        return (x > 0).to(x.dtype)


class _StraightThrough(_Rounds):
    def __init__(self, function, behind=False):
        super().__init__(behind)
        self.function = function

    def forward(self, x):
        return self.behind(self.function.apply(self.linear(x)))


def test_a_file_without_a_gradient_path_is_told():
    """Inlined, a straight-through Function is what its forward is: a comparison has no gradient."""
    with pytest.raises(exporter.RunError, match="gradient in eager, and none in the file"):
        exporter.verify(_StraightThrough(_StraightSteps), (torch.randn(3, 4),), inline=[_StraightSteps])
    report = exporter.verify(_StraightThrough(_StraightSteps, behind=True), (torch.randn(3, 4),), inline=[_StraightSteps])
    assert {row.name for row in at_the_example(report, ok=False)} == {"linear.weight", "linear.bias", "x"}
    assert all("missing in the file" in row.problem for row in at_the_example(report, ok=False))


@pytest.mark.parametrize("behind", [False, True])
def test_zeros_of_the_file_are_no_gradient_of_eager(behind):
    """Round is flat: its gradient in the file is zero."""
    report = exporter.verify(_StraightThrough(_Straight, behind), (torch.randn(3, 4),), inline=[_Straight])
    assert {row.name: row.problem for row in at_the_example(report, ok=False)} == {"linear.weight": "", "linear.bias": "", "x": ""}
    assert all(row.error > 0.1 for row in at_the_example(report, ok=False))


def test_assert_roundtrip():
    exporter.testing.assert_roundtrip(*targets.good())
    with pytest.raises(AssertionError, match=r"parameter gradient first\.weight: error"):
        exporter.testing.assert_roundtrip(*targets.wrong_backward())


def run(*arguments):
    return python("-m", "exporter.cli", "verify", *arguments)


@pytest.mark.slow
def test_command_says_yes_in_json_and_html(tmp_path):
    done = run("tests.exporter.verification.targets:good", "--json", "--html", str(tmp_path / "r.html"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True
    page = (tmp_path / "r.html").read_text()
    assert "first.weight" in page


@pytest.mark.slow
@pytest.mark.parametrize(("target", "status", "text"), [("wrong_backward", 1, "differs"), ("local", 0, "equal eager")])
def test_exit_status(target, status, text):
    done = run(f"tests.exporter.verification.targets:{target}", "--no-dynamo")
    assert done.returncode == status, done.stderr
    assert text in done.stdout + done.stderr


@pytest.mark.parametrize(("target", "text"), [("fails", "no model today"), ("gone", "has no gone")])
def test_exit_status_of_a_target_that_is_none(target, text):
    done = CliRunner().invoke(main, ["verify", f"tests.exporter.verification.targets:{target}", "--no-dynamo"])
    assert done.exit_code == 2, done.output
    assert text in done.stderr


class _Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.outside, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for key, value in attrs:
            if key in ("src", "href", "xlink:href") and value and not value.startswith(("#", "data:")):
                self.outside.append(value)
        if tag not in ("meta", "br", "link", "img", "hr", "input") and not self.get_starttag_text().endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_escapes_names(tmp_path):
    evil = "<script>alert(1)</script>$\\alpha$\x1b[31m"
    rows = [
        Row(evil, "output", (2, 3), "float32", 0.5, 1e-7, 1e-5, "float64", False),
        Row("ok", "output", (), "float32", 0.0, None, 1e-5, "float32", True),
    ]
    report = Report(rows, {"model": evil, evil: evil}, {evil: 3}, {"eager step": 0.1, "onnxruntime step": 0.2}, first_departure=evil)
    page = report.to_html(tmp_path / "r.html").read_text()
    assert "<script" not in page
    assert "\x1b" not in page
    parsed = _Page()
    parsed.feed(page)
    assert parsed.open == []
    assert parsed.outside == []
    assert page.count('role="img"') == 2


@pytest.mark.parametrize("name", ["fc1.weight", "model.layers.0.self_attn.q_proj", "block." * 30 + "weight"])
@pytest.mark.parametrize("kind", ["output", "parameter gradient"])
def test_numbers_are_whole_at_80_columns(name, kind):
    rows = [
        Row(name, kind, (1024, 4096), "float32", 1.23e-118, 4.56e-9, 7.89e-5, "float64", True),
        Row(name, kind, (3, 4), "float32", math.inf, None, 7.89e-5, "float64", False, "the gradient is missing"),
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(Report(rows, facts={"model": "Model"}).render())
    lines = console.file.getvalue().splitlines()
    assert all(any(number in line for line in lines) for number in ("1.2e-118", "4.6e-09", "7.9e-05", " inf "))
    assert max(map(len, lines)) <= 80 and any(line.rstrip().endswith("┓") for line in lines)
    cells = [line[1:].partition("│")[0].strip() for line in lines if line.startswith("│")]
    assert "".join(cells) == 2 * name, "a name goes on in the next line"
    assert len(name) > 20 or name in cells


def test_a_report_of_nothing_is_not_ok():
    assert not Report([]).ok


def test_a_running_mean_of_roundings_is_none_to_compare(dynamo):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4))
    report = exporter.verify(model, (torch.randn(64, 4),), dynamo=dynamo, steps=1)
    assert report.ok, str(report)
    assert "2.running_mean" in {row.name for row in report.rows if row.kind == "buffer"}


class _Logistic(nn.Module):
    """r x (1 - x), over and over: roundings double at each turn."""

    def __init__(self, turns):
        super().__init__()
        self.r, self.turns = nn.Parameter(torch.tensor(3.9)), turns

    def forward(self, x):
        x = torch.sigmoid(x)
        for _ in range(self.turns):
            x = self.r * x * (1 - x)
        return x


class _Pools(nn.Module):
    """The larger of two products that are equal but for the order of their sums."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 8))
        self.register_buffer("order", torch.randperm(512))
        self.pool = nn.MaxPool1d(2)

    def forward(self, x, y):
        return self.pool(torch.stack([x @ self.weight, y[:, self.order] @ self.weight[self.order]], -1)).squeeze(-1)


def test_errors_that_grow_are_explained():
    report = exporter.verify(_Logistic(12), (torch.randn(16),), steps=1)
    (note,) = report.notes
    assert note.title == "Errors that grow"
    assert "roundings of float32" in note.text
    worst = max((row for row in report.rows if row.reference == "float64"), key=lambda row: row.eager_error)
    assert f"{worst.name!r} is {worst.eager_error:.1e} away from" in note.text
    assert report.as_json()["notes"] == [{"title": note.title, "text": note.text}]
    report = exporter.verify(_Logistic(16), (torch.randn(16),), steps=1)
    assert "compared with eager in float32 instead" in report.notes[0].text
    assert {row.name for row in report.rows if row.reference == "float32"} >= {"r", "x"}
    # What the note sends people to.
    assert exporter.verify(_Logistic(16).double(), (torch.randn(16, dtype=torch.float64),), steps=1).ok


def test_a_tie_is_explained():
    x = torch.randn(16, 512)
    report = exporter.verify(_Pools(), (x, x.clone()), steps=1)
    (note,) = report.notes
    assert note.title == "Ties and thresholds"
    assert "MaxPool (1)" in note.text
    assert "2 tensors are compared with eager in float32 instead" in note.text
    # What the note sends people to.
    report = exporter.verify(_Pools(), (x, torch.randn(16, 512)), steps=1)
    assert report.ok
    assert report.notes == []


def test_a_wrong_function_is_no_tie():
    report = exporter.verify(*targets.wrong_forward(), steps=1)
    assert not report.ok
    assert [note.title for note in report.notes] == ["Ties and thresholds"], "a Function may choose, and what differs may be that"
    assert "what stays is no tie" in report.notes[0].text
    assert "ties" not in repr(exporter.verify(*targets.good(), steps=1).notes).lower()


class _Wide(nn.Module):
    """One activation of 64 MiB that backward needs, in front of a small one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2**10)

    def forward(self, x):
        return torch.tanh(self.linear(x)).sum(1)


def test_the_memory_of_a_step_is_counted():
    report = exporter.verify(_Wide(), (torch.randn(2**14, 4),), steps=2)
    assert report.ok
    for name in ("eager step", "onnxruntime step"):
        mib = report.memory[name] / 2**20
        assert 60 < mib < 600, f"{name}: {mib:.0f} MiB"
    assert report.as_json()["memory"] == report.memory
