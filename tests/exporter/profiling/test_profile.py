"""Times of nodes, and the flame view of them."""

from __future__ import annotations

import io
import json
import tempfile

import numpy as np
import onnx
import onnx.parser
import pytest
from rich.console import Console

from exporter.commands.profile import render
from exporter.profiling import profile as profiling
from exporter.profiling.flame import flame_page, tree_of
from exporter.profiling.profile import NodeTime, Profile, profile
from symbolics.errors import FormatError, RunError, TrustError
from tests import browser
from tests.exporter.conftest import EVIL

ALLOW = ["tests.exporter.commands.cli_targets:*"]
LOOP = """<ir_version: 10, opset_import: ["": 20]> g (float[2] x, int64 n, bool c) => (float[2] y)
    {
        y = Loop (n, c, x) <body = b (int64 i, bool k, float[2] h) => (bool k2, float[2] o) { k2 = Identity(k) a = Sin(h) o = Cos(a) }>
    }"""


def event(name, ts, dur, op="Relu", cat="Node", tid=1, provider="CPUExecutionProvider"):
    return {
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "tid": tid,
        "args": {"op_name": op, "provider": provider} if cat == "Node" else {},
    }


def run_of(ts, dur):
    return event("model_run", ts, dur, cat="Session")


def test_medians_of_own_times_without_the_first_run():
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { y = Relu(x) }""")
    made = profiling.open_model(model)
    made.graph[0].name = "r"
    events = [event("session_initialization", 0, 50, cat="Session")]
    for i, dur in enumerate((900, 10, 30, 20)):
        events += [
            run_of(1000 * (i + 1), 990),
            event("r_kernel_time", 1000 * (i + 1) + 1, dur + 5),
            event("inner_kernel_time", 1000 * (i + 1) + 2, 5, "Exp"),
        ]
    found = profiling._profile(made, events, {})
    assert [(row.name, row.operator, row.part, row.calls) for row in found.rows] == [("r", "Relu", "forward", 1), ("inner", "Exp", None, 1)]
    assert [row.seconds for row in found.rows] == pytest.approx([20e-6, 5e-6])
    assert (found.runs, found.seconds, found.load) == (3, pytest.approx(990e-6), pytest.approx(50e-6))


def test_providers_and_the_copies_between_them():
    model = profiling.open_model(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { y = Relu(x) }""")
    )
    events = []
    for begin in (0, 1000):
        events += [
            run_of(begin, 900),
            event("a_kernel_time", begin + 1, 10, "MemcpyFromHost", provider="CUDAExecutionProvider"),
            event("b_kernel_time", begin + 20, 300, provider="CUDAExecutionProvider"),
            event("c_kernel_time", begin + 400, 20, "MemcpyToHost", provider="CUDAExecutionProvider"),
            event("d_kernel_time", begin + 500, 100, "PythonOp"),
        ]
    found = profiling._profile(model, events, {})
    assert found.by_provider() == {"CUDAExecutionProvider": (pytest.approx(330e-6), 3), "CPUExecutionProvider": (pytest.approx(100e-6), 1)}
    assert found.copies == (pytest.approx(30e-6), 2)
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(render(found, "file"))
    text = shown.export_text()
    assert "CUDAExecutionProvider: 3 nodes, 330 µs, 76.7%; CPUExecutionProvider: 1 nodes, 100 µs, 23.3%" in text
    assert "copies between their memories: 2, 30 µs" in text


def test_python_ops_apart(samples):
    found = profile(
        samples["gradient"], {"x": np.ones((2, 3), np.float32), "add_26_grad": np.ones((2, 3), np.float32)}, allow=ALLOW, runs=3
    )
    assert found.runs == 3
    python = [row for row in found.rows if row.function]
    assert sorted((row.operator, row.function, row.part) for row in python) == [
        ("PythonOp", "Scale", "forward"), ("PythonOp", "Scale", "forward"),
        ("PythonOpGrad", "Scale", "gradient"), ("PythonOpGrad", "Scale", "gradient"),
    ]  # fmt: skip
    assert found.python == pytest.approx(sum(row.seconds for row in python))
    assert 0 < found.python <= sum(row.seconds for row in found.rows) <= found.seconds * 1.5
    assert list(found.by_part()) in (["forward", "gradient"], ["gradient", "forward"])
    assert found.by_operator()["PythonOp Scale"][1] == 2
    json.dumps(found.as_json(), allow_nan=False)


def test_a_body_is_timed_without_its_loop():
    feeds = {"x": np.ones(2, np.float32), "n": np.array(50), "c": np.array(True)}
    found = {row.operator: row for row in profile(onnx.parser.parse_model(LOOP), feeds, runs=2, as_written=True).rows}
    assert (found["Sin"].calls, found["Loop"].calls) == (50, 1)
    assert found["Sin"].part == "forward"


def test_as_written_runs_every_node(samples):
    feeds = {"input": np.ones((2, 3), np.float32)}
    fused = {row.operator for row in profile(samples["plain"], feeds, runs=1).rows}
    written = {row.operator for row in profile(samples["plain"], feeds, runs=1, as_written=True).rows}
    assert (fused, written) == ({"FusedGemm", "Gemm"}, {"Gemm", "Relu"})


def test_a_function_called_once_has_the_module_of_its_call(samples):
    found = profile(samples["portable"], {"x": np.ones((2, 3), np.float32)}, runs=1)
    assert {row.part for row in found.rows} == {"forward"}
    assert not any(row.function for row in found.rows)


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [("op", TrustError, "not allowed"), ("damaged", FormatError, "no ONNX model"), ("plain", RunError, "no array for the input 'input'")],
)
def test_what_cannot_run(samples, name, error, text, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(error, match=text):
        profile(samples[name], {} if name == "plain" else {"x": np.ones((2, 3), np.float32)})
    assert list(tmp_path.iterdir()) == [], "no file of the profiler stays"


def rows():
    return Profile(
        [
            NodeTime("a", "Gemm", "", "net.one", "forward", 3e-3, 1),
            NodeTime("b", "PythonOp", "Scale", "net.one", "forward", 2e-3, 1),
            NodeTime(f"c{EVIL}", "Relu", "", f"net.{EVIL}", "gradient", 1e-3, 2),
            NodeTime("d", "Reorder", "", "", None, 0.0, 1),
        ],
        7e-3, 5, 0.1, {"onnxruntime": "1"},
    )  # fmt: skip


def test_the_tree_holds_every_second_once():
    tree = tree_of(rows())
    assert tree["seconds"] == pytest.approx(6e-3)

    def check(branch):
        if branch["inside"]:
            assert branch["seconds"] == pytest.approx(sum(inner["seconds"] for inner in branch["inside"]))
        for inner in branch["inside"]:
            check(inner)

    check(tree)
    forward = tree["inside"][0]
    assert (forward["name"], forward["inside"][0]["name"]) == ("forward", "net")
    assert [leaf["kind"] for leaf in forward["inside"][0]["inside"][0]["inside"]] == ["node", "python"]


def test_no_text_becomes_markup():
    page = flame_page(rows(), EVIL)
    assert (page.count("<script"), page.count("</script>")) == (2, 2)
    assert "<img" not in page
    assert "\x1b" not in page


def test_the_page_in_a_browser(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(flame_page(rows(), EVIL))
    told = browser.told_by(
        """<iframe src="/page.html" style="width: 900px; height: 600px"></iframe><script>
        frames[0].alert = () => tell({ error: "a text of the file ran" });
        document.querySelector("iframe").onload = () => {
          const page = frames[0].document;
          const bars = () => [...page.querySelectorAll("#flame .bar")];
          const all = bars().length;
          const python = bars().find((bar) => bar.classList.contains("python"));
          const share = python.getBoundingClientRect().width / page.getElementById("flame").getBoundingClientRect().width;
          python.click();
          tell({ all, share, after: bars().length, facts: page.getElementById("facts").textContent });
        };</script>""",
        {"/page.html": page},
    )
    assert told["all"] == 10
    assert told["share"] == pytest.approx(2 / 6, abs=0.01)
    assert told["after"] == 5, "what is above it, and itself"
    assert "operator: PythonOp" in told["facts"]
