"""What notebooks show: short reprs, and tables in which a file writes no markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import onnx_ir as ir
import pytest
import torch

import exporter
from exporter.files.inspect import inspect_model
from exporter.files.program import Program
from exporter.files.summary import Summary, Table, as_html, signature, summary_of
from exporter.verification.report import Report
from exporter.verification.rows import Row
from symbolics.node.containers import Slot
from tests.exporter.commands import cli_targets
from tests.symbolics.node.node_models import call_of, model_of, node_of

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>&\"'\x1b[2J\u202e"


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = set()
        self.text = ""
        self.attributes = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def parsed(page):
    parser = Tags()
    parser.feed(page)
    assert parser.tags <= {"div", "strong", "table", "thead", "tbody", "tr", "th", "td", "br"}
    assert parser.attributes == []
    assert parser.text.isprintable()
    return parser.text


@pytest.fixture(scope="module")
def program():
    return exporter.export(*cli_targets.pair(), dynamic_shapes=({0: "batch"},))


def row(name, error=0.0, problem=""):
    return Row(name, "output", (2,), "float32", error, None, 1e-6, "float32", error < 1e-6 and not problem, problem)


def hostile_model():
    model = model_of(call_of(Slot(0), EVIL))
    node = node_of(model)
    node.attributes.add(ir.Attr("name", ir.AttributeType.STRING, EVIL))
    for key in ("pythonop.source", "pythonop.module"):
        node.metadata_props[key] = EVIL
    model.graph.append(ir.Node(EVIL, EVIL, [model.graph.inputs[0]], name=EVIL))
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = EVIL + (value.name or "")
    return model


def test_a_repr_is_one_short_line(program, tmp_path):
    program.save(tmp_path / "model.onnx")
    module = exporter.load(tmp_path / "model.onnx", allow=[cli_targets.Scale])
    step = exporter.export_training_step(torch.nn.Linear(3, 2), (torch.ones(4, 3),), loss=lambda y: y.sum())
    rows = [row(f"y{i}") for i in range(500)]
    report = Report(rows, {"model": "Model"}, seconds={"export": 1.0})
    for made, texts in (
        (program, ["Program(", "2 PythonOp", "x: float[batch, 3] -> add"]),
        (step, ["TrainingStep(", "float[4, 3]"]),
        (module, ["OnnxModule(", "model.onnx", "3 parameters, 2 buffers", "x: float[batch, 3] -> add"]),
        (report, ["Report(Model: 500 tensors equal eager PyTorch's"]),
    ):
        said = repr(made)
        assert len(said) < 400 and said.isprintable(), said
        for text in texts:
            assert text in said


def test_html_says_what_inspect_says(program, tmp_path):
    page = parsed(program._repr_html_())
    for name, line in summary_of(inspect_model(program.model)).lines:
        assert name in page and line.partition("\n")[0] in page
    assert f"{cli_targets.__name__}:Scale" in page
    program.save(tmp_path / "model.onnx")
    assert "float[batch, 3]" in parsed(exporter.load(tmp_path / "model.onnx", allow=[cli_targets.Scale])._repr_html_())


def test_names_of_a_file_are_no_markup():
    model = hostile_model()
    page = Program(model)._repr_html_()
    assert "<script>alert(1)</script>" in parsed(page)
    assert "<script" not in page and "<img" not in page and "\x1b" not in page
    assert repr(Program(model)).isprintable()
    rows = [row(EVIL, problem=EVIL)]
    report = Report(rows, {"model": EVIL}, first_departure=EVIL)
    assert "<script>alert(1)</script>" in parsed(report._repr_html_())
    assert repr(report).isprintable()
    parsed(as_html(Summary(EVIL, [(EVIL, EVIL)], [Table((EVIL,), [(EVIL,)])])))


def test_the_report_of_a_notebook_is_that_of_the_terminal():
    from rich.console import Console

    rows = [row(f"y{i}", 0.5 if i == 7 else 0.0) for i in range(40)]
    report = Report(rows, {"model": "Model"})
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.render())
    drawn, page = console.export_text(), parsed(report._repr_html_())
    for text in ("y7", "differs", "5.0e-01", "and 20 more that are equal", "1 of 40 tensors differ from eager PyTorch's"):
        assert text in drawn and text in page
    assert len(re.findall("equal +│", drawn)) == page.count("1.0e-06equal") == 19


def test_many_inputs_are_cut(program):
    values = [ir.Value(name=f"v{i}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([i])) for i in range(50)]
    said = signature(ir.Graph(values, values[:1], nodes=[], name="g", opset_imports={"": 18}))
    assert re.fullmatch(r"v0: float\[0\], v1: float\[1\], v2: float\[2\], 47 more -> v0: float\[0\]", said)
