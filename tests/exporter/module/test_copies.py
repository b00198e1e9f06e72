"""A loaded module in the hands of other libraries: copied, pickled, asked for its signature, saved, its parts wrapped."""

from __future__ import annotations

import copy
import inspect
import pickle

import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import exporter
from tests.exporter.module import functions as F
from tests.processes import python
from tests.trains import ALLOW, assert_close, assert_same_grads, assert_step_alike, loaded


def changed(module):
    """The module after a step of training."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    return module


# ------------------------------------------------------------------------------------------------------------ pickle


@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_has_the_weights_of_now_and_trains_as_eager(through, dynamo):
    model, x = F.Cubic(), torch.randn(3, 4)
    module = loaded(model, (x,), dynamo=dynamo)
    model, module = changed(model), changed(module)
    other = through(module)
    assert type(other) is type(module)
    assert_step_alike(other, model, (x,))


def test_pickle_keeps_ties_buffers_and_what_is_frozen():
    model, ids = F.Tied(), torch.tensor([1, 2])
    module = pickle.loads(pickle.dumps(loaded(model, (ids,))))
    assert module.head.weight is module.embed.weight
    assert not module.frozen.weight.requires_grad
    assert list(module.state_dict()) == list(model.state_dict())
    assert_step_alike(module, model, (ids,))


def test_pickle_keeps_the_mode_and_trains_statistics_on():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)).train()  # a bias would have a gradient of rounding errors alone
    module, x = loaded(model, (torch.randn(8, 4),)), torch.randn(8, 4)
    module(x), model(x)
    other = pickle.loads(pickle.dumps(module))
    assert other.training
    assert_step_alike(other, model, (x,))
    assert_close(other.get_buffer("1.running_var"), model[1].running_var)


def test_a_pickle_has_the_weights_once(tmp_path):
    path = tmp_path / "wide.onnx"
    module = loaded(nn.Linear(512, 512), (torch.randn(1, 512),), path=path)
    assert len(pickle.dumps(module)) < 1.02 * path.stat().st_size


@pytest.mark.slow
def test_a_pickle_needs_no_file(tmp_path):
    """Constants that lie outside the model are in it, and another process opens it where the file is gone."""
    x, path = torch.randn(2, 4), tmp_path / "model.onnx"
    exporter.export(F.Cubic(), (x,)).save(path, external_data=True)
    onnx_model = onnx.load(path)  # a constant of another tool, with its data outside
    onnx_model.graph.initializer.append(onnx.numpy_helper.from_array(torch.randn(400).long().numpy(), "constant"))
    onnx_model.graph.output.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.INT64, [400]))
    onnx_model.graph.node.append(onnx.helper.make_node("Identity", ["constant"], ["c"]))
    onnx.save(onnx_model, path, save_as_external_data=True, location="data", size_threshold=0)
    module = exporter.load(path, allow=ALLOW)
    wanted = module.flat(x)
    data = pickle.dumps(module)
    for file in tmp_path.iterdir():
        file.unlink()
    (tmp_path / "module.pkl").write_bytes(data)
    torch.save(x, tmp_path / "x.pt")
    code = """
import pickle, torch
module = pickle.load(open("module.pkl", "rb"))
torch.save([t.detach() for t in module.flat(torch.load("x.pt"))], "y.pt")
"""
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "y.pt")
    assert len(found) == len(wanted) == 2
    for one, two in zip(found, wanted, strict=True):
        assert torch.equal(one, two)


def test_a_pickle_names_classes_as_a_file_does():
    """The allow list goes with it, and what it does not match is refused again."""
    module = loaded(F.Cubic(), (torch.randn(3, 4),))
    module._onnx.plans.allow = ["elsewhere.*"]
    with pytest.raises(exporter.TrustError, match="Cube"):
        pickle.loads(pickle.dumps(module))(torch.randn(3, 4))


# --------------------------------------------------------------------------------------------------------- signature


def test_the_signature_has_the_inputs_of_the_file(dynamo):
    x, ids = torch.randn(2, 4), torch.arange(4)
    module = loaded(F.Structured(), (x, x, ids), dynamo=dynamo)
    assert list(inspect.signature(module.forward).parameters) == ["x", "y", "ids"]
    assert list(inspect.signature(type(module).forward).parameters) == ["self", "x", "y", "ids"]
    assert "Run the model" in inspect.getdoc(module.forward)


@pytest.mark.parametrize("name", ["x.1", "self", "class"])
def test_an_input_that_no_python_argument_can_be(name):
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Neg", [name], ["y"])],
        "g",
        [value(name, onnx.TensorProto.FLOAT, [2])],
        [value("y", onnx.TensorProto.FLOAT, [2])],
    )
    module = exporter.load(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10))
    assert list(inspect.signature(module.forward).parameters) == ["args", "kwargs"]
    assert torch.equal(module(torch.ones(2)), -torch.ones(2))
    assert torch.equal(pickle.loads(pickle.dumps(module))(torch.ones(2)), -torch.ones(2))


# -------------------------------------------------------------------------------------------------------------- save


def test_what_was_learned_goes_into_a_file(dynamo, tmp_path):
    model, x = F.Cubic(), torch.randn(3, 4)
    path = tmp_path / "model.onnx"
    module = changed(loaded(model, (x,), dynamo=dynamo, path=path))
    module.save(path)  # over the one it came from
    again = exporter.load(path, allow=ALLOW)
    assert_step_alike(again, changed(model), (x,))
    session = exporter.inference_session(path, allow=ALLOW)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert_close(torch.from_numpy(found), model(x).detach())


def test_save_keeps_ties_types_and_external_data(tmp_path):
    model, ids = F.Tied().to(torch.float16), torch.tensor([1, 2])
    module = changed(loaded(model, (ids,)))
    module.save(tmp_path / "model.onnx", external_data=True)
    again = exporter.load(tmp_path / "model.onnx")
    assert again.head.weight is again.embed.weight
    for (name, one), (other, two) in zip(again.state_dict().items(), module.state_dict().items(), strict=True):
        assert name == other and one.dtype is torch.float16 and torch.equal(one, two)


def test_save_takes_the_statistics(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(), 3 + torch.randn(8, 4)
    module = loaded(model, (x,))
    module(x), model(x)
    module.save(tmp_path / "model.onnx")
    again = exporter.load(tmp_path / "model.onnx").eval()
    assert_close(again(x), model.eval()(x))


def test_save_of_a_foreign_file_runs_without_python(tmp_path):
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x) => (float[N, 3] y) { y = MatMul(x, w) }')
    model.graph.initializer.append(onnx.numpy_helper.from_array(torch.randn(4, 3).numpy(), "w"))
    module, x = changed(exporter.load(model)), torch.randn(2, 4)
    module.save(tmp_path / "model.onnx")
    (found,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"x": x.numpy()})
    assert_close(torch.from_numpy(found), (x @ module.w).detach())


def test_save_refuses_another_type(tmp_path):
    module = loaded(nn.Linear(4, 4), (torch.randn(3, 4),)).half()
    with pytest.raises(exporter.RunError, match="'weight' is now torch.float16"):
        module.save(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------- what is put around parts


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(3.0))

    def forward(self, weight):
        return self.shift + weight


class Around(nn.Module):
    """A module around a module, which parametrizes one of its tensors while that runs, as PEFT adapts parameters."""

    def __init__(self, layer, name):
        super().__init__()
        self.layer, self.name, self.change = layer, name, Shifted()

    @property
    def weight(self):  # what PEFT's has: the tensor without the adapter
        return self.layer.weight

    def forward(self, *args):
        found = self.layer
        while isinstance(found, Around):
            found = found.layer
        parametrize.register_parametrization(found, self.name, self.change)
        try:
            return self.layer(*args)
        finally:
            parametrize.remove_parametrizations(found, self.name, leave_parametrized=False)


class Nested(nn.Module):
    """Parameters of a module above those of a module in it."""

    def __init__(self):
        super().__init__()
        self.block = nn.Module()
        self.block.gain = nn.Parameter(torch.randn(4))
        self.block.inner = nn.Linear(4, 4)
        self.block.register_buffer("shift", torch.randn(4))

    def forward(self, x):
        return torch.tanh(x @ self.block.inner.weight.T + self.block.inner.bias) * self.block.gain + self.block.shift


def test_a_wrapped_part_changes_its_tensor_alone(dynamo):
    """Compared with eager, where the wrapper does the same around the real module."""
    model, x = F.Cubic(), torch.randn(3, 4)
    module = loaded(model, (x,), dynamo=dynamo)
    for one in (model, module):
        one.requires_grad_(False)
        one.second = Around(one.second, "weight")
    assert_step_alike(module, model, (x,))
    assert module.second.change.shift.grad.abs() > 0


def test_wrapped_twice_and_above_another_part(tmp_path):
    model, x = Nested(), torch.randn(3, 4)
    module = loaded(model, (x,), path=tmp_path / "model.onnx")
    module.block.inner = Around(Around(module.block.inner, "weight"), "bias")
    inner, gain, shift = model.block.inner, model.block.gain, model.block.shift
    hidden = torch.tanh(x @ (inner.weight + 3).T + inner.bias + 3).detach()
    wanted = (hidden * gain + shift).detach()
    assert_close(module(x).detach(), wanted)
    module.block = Around(module.block, "gain")
    wanted = wanted + 3 * hidden
    assert_close(module(x).detach(), wanted)
    module.save(tmp_path / "adapted.onnx")
    assert_close(exporter.load(tmp_path / "adapted.onnx")(x).detach(), wanted)


def test_a_module_of_its_own_weights_takes_the_place_of_a_part():
    model, x, head = F.Cubic(), torch.randn(3, 4), nn.Linear(4, 4)
    module = loaded(model, (x,))
    model.second, module.second = head, copy.deepcopy(head)
    assert_step_alike(module, model, (x,))


def test_parametrized_parameters_are_trained_and_saved(tmp_path):
    model, x = F.Cubic(), torch.randn(3, 4)
    module = loaded(model, (x,))
    for one in (model, module):
        torch.manual_seed(0)
        parametrize.register_parametrization(one.first, "weight", Shifted())
    assert_close(module(x), model(x))
    module(x).square().sum().backward()
    model(x).square().sum().backward()
    assert_close(module.first.parametrizations.weight[0].shift.grad, model.first.parametrizations.weight[0].shift.grad)
    assert_same_grads(module.second, model.second)
    module.save(tmp_path / "model.onnx")
    assert_close(exporter.load(tmp_path / "model.onnx", allow=ALLOW)(x), model(x))


@pytest.mark.parametrize("reparametrize", ["prune", "weight_norm", "spectral_norm"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_a_tensor_that_a_hook_makes_is_that_of_now(reparametrize, tmp_path):
    """Before a forward of the module that has it, which a loaded file never calls."""
    model, x = F.Cubic(), torch.randn(5, 4)
    module = loaded(model, (x,))
    for m in (module, model):
        torch.manual_seed(0)  # of spectral_norm's first vectors
        if reparametrize == "prune":
            prune.random_unstructured(m.first, "weight", 0.5)
        else:
            getattr(nn.utils, reparametrize)(m.first, "weight")
        optimizer = torch.optim.SGD(m.parameters(), 0.05)
        for _ in range(3):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
        m.eval()
    assert_same_grads(module, model, 1e-4)
    assert_close(module(x), model(x), 1e-4)
    module.save(tmp_path / "m.onnx")
    assert_close(exporter.load(tmp_path / "m.onnx", allow=ALLOW).eval()(x), model(x), 1e-4)


def test_one_of_two_tied_parameters_cannot_be_adapted_alone():
    """In eager it can: a file has one tensor. Before, the adapter of the second name did nothing, that of the first too much."""
    ids = torch.tensor([1, 2])
    for name in ("embed", "head"):
        module = loaded(F.Tied(), (ids,))
        setattr(module, name, Around(getattr(module, name), "weight"))
        with pytest.raises(exporter.RunError, match=r"'embed.weight' and 'head.weight' are one tensor in the file, and two now"):
            module(ids)


@pytest.mark.parametrize("foreign", [False, True], ids=["", "foreign"])
def test_a_saved_file_has_what_is_frozen(foreign, dynamo, tmp_path):
    """In training the file again, and in a step of it, frozen parameters get no gradient; and back."""
    path, (linear, x) = tmp_path / "m.onnx", (nn.Linear(4, 4), torch.randn(3, 4))
    if foreign:
        torch.onnx.export(linear, (x,), path, dynamo=dynamo, optimize=False, verbose=False)
    else:
        exporter.export(linear, (x,), dynamo=dynamo).save(path)
    for frozen in (True, False):
        module = exporter.load(path)
        module.get_parameter("weight").requires_grad_(not frozen)
        module.save(path)
        again = exporter.load(path)
        assert {name: parameter.requires_grad for name, parameter in again.named_parameters()} == {"weight": not frozen, "bias": True}
        again(x).sum().backward()
        assert (again.get_parameter("weight").grad is None) is frozen
        graph = exporter.build_gradient_graph(onnx.load(path))
        assert [each.name for each in graph.graph.outputs if "weight" in each.name] == ([] if frozen else ["weight_grad"])
        assert_close(again(x), linear(x))
