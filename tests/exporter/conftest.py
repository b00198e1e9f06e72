"""Files that the tests of several rooms read."""

from __future__ import annotations

import onnx
import pytest
import torch

import exporter
from exporter.files.program import save_model
from tests.exporter.commands import cli_targets

#: What a text of a file may hold, at worst: markup, a way out of a script, control characters, rich's and templates' own marks.
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&]]>\x1b[31m[bold]{{7*7}}\u202e"


def hostile_model() -> onnx.ModelProto:
    """Two operators that run, with `EVIL` in every name, and in a module's path."""
    helper = onnx.helper
    kind = onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Relu", [f"x{EVIL}"], [f"h{EVIL}"], name=f"first{EVIL}", doc_string=EVIL),
        helper.make_node("Add", [f"h{EVIL}", f"w{EVIL}"], [f"y{EVIL}"], name=f"second{EVIL}"),
    ]
    for node in nodes:
        node.metadata_props.add(key="pythonop.module", value=f"net.{EVIL}")
        node.metadata_props.add(key="pythonop.source", value=EVIL)
    weight = helper.make_tensor(f"w{EVIL}", kind, [2], [1.0, 2.0])
    graph = helper.make_graph(
        nodes,
        EVIL,
        [helper.make_tensor_value_info(f"x{EVIL}", kind, [f"N{EVIL}", 2])],
        [helper.make_tensor_value_info(f"y{EVIL}", kind, [f"N{EVIL}", 2])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.fixture(scope="session")
def samples(tmp_path_factory):
    """name -> path of a file: plain, op, portable, step, gradient, damaged, hostile, empty."""
    folder = tmp_path_factory.mktemp("samples")
    torch.manual_seed(0)
    paths = {name: folder / f"{name}.onnx" for name in ("plain", "op", "portable", "step", "gradient", "damaged", "hostile", "empty")}
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    exporter.export(layers, (torch.ones(2, 3),), dynamic_shapes=({0: "batch"},)).save(paths["plain"])
    case = cli_targets.case()
    exporter.export(case.model, case.args, dynamic_shapes=case.dynamic_shapes).save(paths["op"])
    exporter.export(case.model, case.args, dynamic_shapes=case.dynamic_shapes, portable=True).save(paths["portable"])
    save_model(exporter.build_gradient_graph(paths["op"]), paths["gradient"])
    step = cli_targets.scaled_step()
    exporter.export_training_step(step.model, step.args, targets=step.targets, loss=step.loss).save(paths["step"])
    paths["damaged"].write_bytes(paths["op"].read_bytes()[:-40])
    paths["hostile"].write_bytes(hostile_model().SerializeToString())
    empty = onnx.helper.make_model(
        onnx.helper.make_graph([], "empty", [], []), opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10
    )
    paths["empty"].write_bytes(empty.SerializeToString())
    return paths
