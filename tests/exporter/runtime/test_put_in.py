"""Files of opaque nodes with another name put in, wherever a node may stand: refused where the file is opened, and nothing is imported."""

from __future__ import annotations

import copy
import json
import sys

import onnx
import pytest
import torch
from torch import nn

import exporter
from exporter.files.program import save_model
from symbolics.errors import FormatError, PythonopError
from tests.zoo import modules as M

HERE = f"{__name__}:"
ZOO = "tests.zoo.modules:"
ALLOW = {
    "operator": ["aten::linalg_solve"],
    "module": [f"{ZOO}Repeats", f"{ZOO}Setting"],
    "function": [f"{HERE}scaled"],
    "Function": [f"{HERE}Kept"],
}
DOORS = ("inference_session", "reference_evaluator", "load")
ran: list[str] = []


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g


class Other(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ran.append("Other")
        return x * 1


def scaled(x, factor=2.0):
    return x * factor


def other(x, factor=2.0):
    ran.append("other")
    return x


class Holder:
    @staticmethod
    def run(x, factor=2.0):
        ran.append("run")
        return x


class Calls(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.linear, self.what = nn.Linear(4, 4), what

    def forward(self, x):
        x = self.linear(x)
        if self.what == "operator":
            return torch.linalg.solve(torch.eye(3), x)
        return scaled(x, 3.0) if self.what == "function" else Kept.apply(x)


@pytest.fixture(scope="module")
def protos():
    x, found = torch.randn(3, 4), {}
    for what, opaque in (("operator", "missing"), ("function", scaled), ("Function", ()), ("module", M.Repeats)):
        model = M.Net(M.Repeats()) if what == "module" else Calls(what)
        found[what] = exporter.export(model, (x,), dynamo=what == "module", opaque=opaque).model_proto
        for door in DOORS:  # as it is, the file opens
            getattr(exporter, door)(found[what], allow=ALLOW[what])
    return found


def edited(proto, **changes):
    """The file whose call has other attributes; ``call`` is what changes of the JSON."""
    proto = copy.deepcopy(proto)
    (node,) = [node for node in proto.graph.node if node.op_type == "PythonOp"]
    said = {attribute.name: attribute for attribute in node.attribute}
    for name, value in changes.items():
        said[name].s = value.encode() if isinstance(value, str) else json.dumps({**json.loads(said[name].s), **value}).encode()
    return proto, node


@pytest.fixture
def refused(tmp_path):
    def check(proto, allow, doors=DOORS, error=PythonopError):
        del ran[:]
        path = tmp_path / "model.onnx"
        onnx.save(proto, path)
        before = set(sys.modules)
        for door in doors:
            with pytest.raises(error) as caught:
                getattr(exporter, door)(path, allow=allow)
            assert len(str(caught.value).splitlines()) <= 6, door
        assert not ran and set(sys.modules) == before

    return check


NAMES = {
    "operator": [
        "aten::linalg_solve", "aten::linalg_inv.default", "aten::linalg_solve_ex.default", "aten::l\u0456nalg_solve.default", "aten::linalg_solve.default\0.out",
        "quantized::linear_prepack.default", "aten:linalg_solve", "torch.linalg:solve", f"{HERE}Other", f"{HERE}other", "os:system", "",
    ],
    "module": [
        f"{ZOO}Repeats.__init__", f"{ZOO}Repeats.__init__.__globals__", f"{ZOO}Repeats.forward", f"{ZOO}Repeats.__class__", f"{ZOO}torch.nn.Linear", f"{ZOO}twice",
        "tests.zoo.m\u043edules:Repeats", "tests.zoo.modules:\uff32epeats", "tests..zoo.modules:Repeats", "..modules:Repeats", f"{ZOO}Repeats\n", f"{ZOO}Repeats::x",
        "torch.nn.modules.module:Module.__init__", "torch.nn.modules.os:system", "torch.nn.modules.batchnorm:Tensor", "tests.zoo.__main__:Repeats", f"{HERE}Kept",
    ],
    "function": [
        f"{HERE}other", f"{HERE}Holder.run", f"{HERE}scaled.__globals__", f"{HERE}scaled.__code__", f"{HERE}nn.Linear", f"{HERE}M.solve", f"{HERE}sc\u0430led",
        "builtins:exec", "posix:system", "torch:load", "functools:partial", "symbolics.capture.gradient_hooks:GradientHook",
    ],
    "Function": [f"{HERE}Other", f"{HERE}Kept.forward", f"{HERE}Kept.__mro__", f"{HERE}torch.autograd.Function", "torch.autograd.function:Function", f"{HERE}Calls"],
}  # fmt: skip


@pytest.mark.parametrize("what", NAMES)
def test_another_name(protos, refused, what):
    for name in NAMES[what]:
        proto, node = edited(protos[what], name=name)
        if what == "module":
            call = next(attribute for attribute in node.attribute if attribute.name == "call")
            said = json.loads(call.s)
            said["module"]["tree"]["name"] = name
            call.s = json.dumps(said).encode()
        refused(proto, ALLOW[what])


def test_a_pattern_names_no_function(protos, refused):
    for name in ("other", "Holder.run"):
        refused(edited(protos["function"], name=f"{HERE}{name}")[0], [__name__, f"{HERE}*", f"{HERE}scaled"])


def _twin(proto, node):
    """The same call of something else."""
    twin = copy.deepcopy(node)
    next(attribute for attribute in twin.attribute if attribute.name == "name").s = f"{HERE}Other".encode()
    twin.name = "twin"
    twin.output[:] = [f"{name}_twin" if name else "" for name in node.output]
    return twin


def _unread(proto, node):
    proto.graph.node.insert(list(proto.graph.node).index(node), _twin(proto, node))


def _in_a_branch(proto, node):
    twin = _twin(proto, node)
    body = onnx.helper.make_graph([twin], "body", [], [onnx.helper.make_tensor_value_info(twin.output[-1], 1, None)])
    never = onnx.helper.make_tensor("never", onnx.TensorProto.BOOL, [], [False])
    proto.graph.initializer.append(never)
    branch = onnx.helper.make_node("If", ["never"], ["of_a_branch"], then_branch=body, else_branch=copy.deepcopy(body))
    proto.graph.node.insert(list(proto.graph.node).index(node), branch)


def _in_a_function(proto, node):
    twin, outputs = _twin(proto, node), [node.output[-1]]
    twin.input[:], twin.output[-1] = ["a"], "b"
    domains = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)]
    proto.functions.append(onnx.helper.make_function("mine", "F", ["a"], ["b"], [twin], domains))
    proto.opset_import.append(onnx.helper.make_opsetid("mine", 1))
    node.CopyFrom(onnx.helper.make_node("F", [node.input[0]], outputs, domain="mine"))


@pytest.mark.parametrize("place", [_unread, _in_a_branch, _in_a_function])
def test_another_node(protos, refused, place):
    """A loaded module leaves out what nothing reads and what no way leads to: there is nothing to refuse then."""
    proto, node = edited(protos["Function"])
    place(proto, node)
    refused(proto, ALLOW["Function"], ["inference_session", "reference_evaluator", *(["load"] if place is _in_a_function else [])])


def test_among_the_gradients_and_tangents(protos, refused, tmp_path):
    for build in (exporter.build_gradient_graph, exporter.build_tangent_graph):
        save_model(build(protos["Function"]), tmp_path / "built.onnx")
        proto = onnx.load(tmp_path / "built.onnx")
        for node in proto.graph.node:
            for attribute in node.attribute:
                if attribute.name == "name":
                    attribute.s = f"{HERE}Other".encode()
        refused(proto, ALLOW["Function"], ["inference_session", "reference_evaluator"])


@pytest.mark.parametrize("device", ["privateuseone", "os", "cpu:0;", ""])
def test_an_autocast_that_is_none_is_told_at_once(protos, refused, device):
    changes = {"autocast": {"dtypes": {device: "bfloat16"}, "cache": True}}
    refused(edited(protos["module"], call=changes)[0], ALLOW["module"], error=FormatError)
