"""docs/format.md: its examples are what the library writes, and it names everything that a file may hold.

``python -m tests.symbolics.node.test_format_doc`` writes the examples anew.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import namedtuple
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import exporter
from symbolics.errors import PythonopWarning
from symbolics.node import arguments, attributes, limits, linked, metadata, names
from symbolics.node.attributes import GRAD_SPECS, SPECS, read_attributes, values_of, write_attributes
from symbolics.node.call import Autocast, AutogradCall, ModuleOrigin, OperatorOrigin
from symbolics.node.containers import Slot
from symbolics.node.dialects import DIALECTS, to_dialect
from symbolics.node.held_modules import Held
from symbolics.node.modules import written_module
from symbolics.node.result import write_structure
from tests import pages
from tests.symbolics.node.node_models import check, model_of, node_of

DOC = Path(__file__).resolve().parents[3] / "docs" / "format.md"
TEXT = DOC.read_text()

FLOAT, INT64 = int(ir.DataType.FLOAT), int(ir.DataType.INT64)

SCALE = AutogradCall(
    id="0", name="mypkg.ops:Scale", args=(Slot(0), 0.1, "mean"), passed=2,
    input_types=(FLOAT,), input_ranks=(2,), input_requires_grads=(True,),
    output_types=(FLOAT,), output_ranks=(2,), output_requires_grads=(True,),
    training=True,
)  # fmt: skip
GATHER = AutogradCall(
    id="1", name="mypkg.ops:Gather", args=(Slot(0), [Slot(1), Slot(2)], Slot(3, "size")), kwargs={"axis": (0, 1), "dtype": torch.float16},
    outputs=(Slot(0), "ok", Slot(1)),
    input_types=(FLOAT, FLOAT, FLOAT, INT64), input_ranks=(2, 2, 2, 0), input_requires_grads=(True, False, False, False),
    output_types=(FLOAT, INT64), output_ranks=(2, 1), output_requires_grads=(True, False),
    autocast=Autocast({"cpu": "bfloat16"}),
)  # fmt: skip
STATE = {
    "embed.weight": metadata.StateEntry("embed.weight", "parameter", trainable=True),
    "head.weight": metadata.StateEntry("embed.weight", "parameter", trainable=True),
    "norm.running_mean": metadata.StateEntry("norm.running_mean", "buffer", trainable=False),
    "mask": metadata.StateEntry("mask", "buffer", trainable=False, persistent=False),
}
PAIRING = metadata.GradientPairing({"y": "y_grad"}, {"embed.weight": "embed.weight_grad", "x": "x_grad"}, ("x",))
TANGENTS = metadata.TangentPairing({"embed.weight": "embed.weight_tangent", "x": "x_tangent"}, {"y": "y_tangent", "z": "z_tangent"}, ("z",))


Result = namedtuple("Result", ["loss", "more"], module="mypkg.models")
RESULT = Result(torch.zeros(()), {"logits": torch.zeros(2), "scale": 0.5})


def _lines(values):
    """One attribute a line."""
    return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(json.loads(v) if k == 'call' else v)}" for k, v in values.items()) + "\n}"


STEP = metadata.StepLayout(
    carried={"param.weight.next": "param.weight", "state.step.next": "state.step"}, inputs=("x",), targets=("target",), loss="loss",
    parameters={"weight": "param.weight"}, buffers={}, untrained=("spare",), optimizer="sgd",
    hyperparameters=({"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "keys": ["weight", "spare"]},),
)  # fmt: skip
BACKWARD = linked.Backward(
    "pythonop.portable", "mypkg_ops_Scale_backward",
    takes=(linked.Taken("gradient", 0), linked.Taken("output", 1), linked.Taken("input", 1)), gives=(0, 1), kept=(linked.Kept(FLOAT, 2),), once=False,
)  # fmt: skip
FUNCTIONS = {
    "mypkg.ops:Scale": metadata.Fingerprint("source-1:6f7af333c0833f7fad7ec243429500b4", "source-1:b29351e6ce8ff68b19b1b4daeaf9219c")
}
EXAMPLES = {
    "scale": lambda: _lines(write_attributes(SCALE)),
    "gather": lambda: _lines(write_attributes(GATHER)),
    "gather gradient": lambda: _lines(values_of(node_of(model_of(GATHER, gradient=True), "PythonOpGrad"))),
    "result": lambda: _lines(json.loads(write_structure(RESULT, lambda leaf: isinstance(leaf, torch.Tensor)))),
    "functions": lambda: _lines(json.loads(metadata.write_functions(FUNCTIONS))),
    "state": lambda: _lines(json.loads(metadata.write_state(STATE))),
    "gradients": lambda: _lines(json.loads(metadata.write_pairing(PAIRING))),
    "tangents": lambda: _lines(json.loads(metadata.write_tangents(TANGENTS))),
    "step": lambda: _lines(json.loads(metadata.write_step(STEP))),
    "backward": lambda: _lines(json.loads(linked.write_backward(BACKWARD))),
}
BLOCK = re.compile(r"<!-- example: ([\w ]+) -->\n```json\n(.*?)\n```", re.S)


def test_the_doc_has_every_example():
    assert sorted(name for name, _ in BLOCK.findall(TEXT)) == sorted(EXAMPLES)


def test_every_name_of_a_gradient_has_its_row():
    rules = "\n".join(path.read_text() for path in (DOC.parents[1] / "symbolics" / "gradients").glob("*.py"))
    called = re.findall(r"""\b(?:call|_steps)\(\s*op,\s*"(\w+)\"""", rules)
    rows = re.findall(r"^\| `(\w+)` \|", TEXT.partition("## Functions that name a gradient")[2].partition("\n## ")[0], re.M)
    assert called and sorted(called) == sorted(rows)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_what_the_library_writes(name):
    assert dict(BLOCK.findall(TEXT))[name] == EXAMPLES[name](), "python -m tests.symbolics.node.test_format_doc writes it anew"


@pytest.mark.parametrize(("name", "call"), [("scale", SCALE), ("gather", GATHER)])
def test_examples_read_back(name, call):
    values = json.loads(dict(BLOCK.findall(TEXT))[name])
    assert read_attributes({**values, "call": json.dumps(values["call"])}) == call
    check(model_of(call, gradient=True))


def test_metadata_examples_read_back():
    blocks = dict(BLOCK.findall(TEXT))
    assert metadata.read_state({names.STATE_KEY: blocks["state"]}) == STATE
    assert metadata.read_pairing({names.GRADIENTS_KEY: blocks["gradients"]}) == PAIRING
    assert metadata.read_tangents({names.TANGENTS_KEY: blocks["tangents"]}) == TANGENTS
    assert metadata.read_step({names.STEP_KEY: blocks["step"]}) == STEP
    assert metadata.read_functions({names.FUNCTIONS_KEY: blocks["functions"]}) == FUNCTIONS


def test_the_function_written_by_hand():
    """The example runs as it stands, and its gradient is the one that was asked for."""
    (code,) = pages.code("docs/format.md")
    names_of = {"exporter": exporter}
    exec(code, names_of)
    session = onnxruntime.InferenceSession(ir.to_proto(names_of["training"]).SerializeToString(), providers=["CPUExecutionProvider"])
    x, g = np.array([0.25, 2.0, -3.0], np.float32), np.ones(3, np.float32)
    found = dict(zip([o.name for o in session.get_outputs()], session.run(None, {"x": x, "y_grad": g}), strict=True))
    assert found["x_grad"].tolist() == [0.5, 1.0, -1.0]


def test_every_field_of_a_link_is_in_its_table():
    assert _first_column(_section("Functions with their own backward")) == {
        names.FUNCTION_KEY, names.BACKWARD_KEY, *(field.name for field in dataclasses.fields(linked.Backward))
    }  # fmt: skip


def test_the_key_of_a_function_of_a_module_is_in_its_table():
    assert _first_column(_section("Functions that stand for modules")) == {names.CLASS_KEY}


def _section(title):
    return TEXT.split(f"## {title}\n")[1].split("\n## ")[0]


def _first_column(section):
    """The names in the first column of a section's tables."""
    return {name for line in section.splitlines() if line.startswith("| `") for name in re.findall(r"`([^`]+)`", line.split("|")[1])}


def test_every_type_is_in_the_table():
    assert _first_column(_section("Types in call")) == set(arguments._BY_TAG)


@pytest.mark.parametrize(("title", "specs"), [("PythonOp", SPECS), ("PythonOpGrad", GRAD_SPECS)])
def test_every_attribute_is_in_its_table(title, specs):
    assert _first_column(_section(title)) == set(specs)
    required = {
        name
        for line in _section(title).splitlines()
        if line.startswith("| `") and "| yes |" in line
        for name in re.findall(r"`([^`]+)`", line.split("|")[1])
    }
    assert required == {name for name, (_, needed, _) in specs.items() if needed}


def test_every_key_of_call_is_in_its_table():
    call = AutogradCall(
        id="", name="", args=(1,), passed=0, autocast=Autocast({"cpu": "bfloat16"}), outputs=None, operator=OperatorOrigin("", ""),
        module=ModuleOrigin((), (), (), {}),
        no_gradient=(0,), no_gradient_seen=(1,),
    )  # fmt: skip
    assert _first_column(_section("The call attribute")) == set(json.loads(write_attributes(call)["call"]))


def test_every_key_of_a_module_is_in_its_tables():
    held, tensors = Held.of(torch.nn.Linear(1, 1))
    tree = written_module(held.module, held, tensors, lambda _: None)
    assert _first_column(_section("Calls of modules")) == {*tree, *ModuleOrigin.__dataclass_fields__}


def test_every_metadata_key_is_named():
    keys = {value for name, value in vars(names).items() if name.endswith(("_KEY", "_PROPERTY"))}
    assert keys
    assert keys - set(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.S))) == set()


@pytest.mark.filterwarnings(f"ignore::{PythonopWarning.__module__}.{PythonopWarning.__name__}")
def test_dialects_are_in_the_table():
    section = _section("Dialects")
    assert _first_column(section) == set(DIALECTS)
    model = model_of(AutogradCall(**{**vars(SCALE), "args": (Slot(0), True, (True,)), "passed": None}))
    written = {name for schema in DIALECTS for name in node_of(to_dialect(model, schema)).attributes}
    assert {name for name in written - set(SPECS) if f"`{name}`" not in section} == set()


def test_limits_are_those_of_the_code():
    section = _section("Limits").replace(",", "")
    for limit in (limits.MAX_BYTES, limits.MAX_DEPTH, limits.MAX_ITEMS, limits.MAX_INT_BITS, limits.MAX_EQUAL_HASHES, limits.MAX_RANK):
        assert re.search(rf"\b{limit}\b", section), limit
    assert f"version {names.FORMAT_VERSION}" in TEXT.splitlines()[0]
    assert attributes.CALL_ATTRIBUTE == "call"


if __name__ == "__main__":
    DOC.write_text(BLOCK.sub(lambda match: f"<!-- example: {match[1]} -->\n```json\n{EXAMPLES[match[1]]()}\n```", TEXT))
