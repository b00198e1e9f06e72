"""Each optimizer of a step beside torch's own, over fifty steps; groups, clipping, averages.

``python -m tests.exporter.training.test_optimizers`` prints the largest differences.
"""

from __future__ import annotations

import copy
import functools

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from symbolics.errors import ArgumentError
from symbolics.graph.builder import Builder
from symbolics.graph.scope import Scope
from symbolics.node.names import GRADIENT_DOMAIN
from symbolics.optimizers import OPTIMIZERS, hyper
from tests.exporter.training.loop import batches_of, eager, network, run, step_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

STEPS = 50
#: Of the largest parameter, after 50 steps in float32. The largest that was seen is a tenth of it.
TOLERANCE = 1e-5


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675, written down from the paper: torch has none."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                b1, b2 = group["betas"]
                c = torch.sign(b1 * m + (1 - b1) * p.grad)
                p.copy_(p - group["lr"] * (c + group["weight_decay"] * p))
                m.copy_(b2 * m + (1 - b2) * p.grad)


_O = torch.optim
CASES = {
    "sgd": (_O.SGD, {"lr": 0.1}),
    "sgd, decay": (_O.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd, momentum": (_O.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "sgd, nesterov": (_O.SGD, {"lr": 0.02, "momentum": 0.8, "nesterov": True}),
    "sgd, maximize": (_O.SGD, {"lr": 0.01, "momentum": 0.5, "maximize": True, "weight_decay": 0.1}),
    "adam": (_O.Adam, {"lr": 0.01}),
    "adam, decay": (_O.Adam, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    "adam, amsgrad": (_O.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (_O.AdamW, {"lr": 0.01}),
    "adamw, no decay": (_O.AdamW, {"lr": 0.01, "weight_decay": 0.0, "maximize": True}),
    "adamw, amsgrad": (_O.AdamW, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "rmsprop": (_O.RMSprop, {"lr": 0.01, "weight_decay": 0.01}),
    "rmsprop, centered": (_O.RMSprop, {"lr": 0.002, "alpha": 0.9, "centered": True}),
    "rmsprop, momentum": (_O.RMSprop, {"lr": 0.002, "momentum": 0.9, "centered": True}),
    "adagrad": (_O.Adagrad, {"lr": 0.05}),
    "adagrad, decays": (_O.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adadelta": (_O.Adadelta, {"weight_decay": 0.01}),
    "nadam": (_O.NAdam, {"lr": 0.01, "weight_decay": 0.01}),
    "nadam, decoupled": (_O.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "momentum_decay": 0.1}),
    "radam": (_O.RAdam, {"lr": 0.01, "weight_decay": 0.01}),
    "radam, decoupled": (_O.RAdam, {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adafactor": (_O.Adafactor, {}),
    "adafactor, decay": (_O.Adafactor, {"lr": 0.05, "weight_decay": 0.1, "d": 1.5, "eps": (1e-5, 1e-2), "maximize": True}),
    "lion": (Lion, {"lr": 0.01}),
    "lion, decay": (Lion, {"lr": 0.01, "betas": (0.95, 0.98), "weight_decay": 0.1}),
}


class Net(nn.Module):
    """Parameters of no, one, two and three axes, and some that the loss does not depend on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head, self.spare = nn.Conv1d(2, 4, 3), nn.Linear(16, 3), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x)).flatten(1)) * self.scale


@functools.cache
def _batches():
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(5, 2, 6, generator=generator) for _ in range(STEPS)]
    return [(x, torch.randint(0, 3, (5,), generator=generator)) for x in inputs]


def _difference(case):
    """The largest of all parameters, over the largest of that parameter; and the step."""
    kind, hyperparameters = CASES[case]
    model, batches = Net(), _batches()
    step = step_of(model, batches[0], optimizer=case.partition(",")[0], hyperparameters=hyperparameters, dynamo=False)
    _, state = run(step, batches)
    eager(model, F.cross_entropy, kind(model.parameters(), **hyperparameters), batches)
    assert step.layout.untrained == ("spare.weight", "spare.bias")
    trained = {key: p.detach().numpy() for key, p in model.named_parameters() if not key.startswith("spare")}
    assert min(np.abs(state[f"param.{key}"] - step.initial[f"param.{key}"]).max() for key in trained) > 1e-3
    return max(float(np.abs(state[f"param.{key}"] - p).max() / np.abs(p).max()) for key, p in trained.items()), step


@pytest.mark.parametrize("case", CASES)
def test_fifty_steps_are_those_of_torch(case):
    difference, step = _difference(case)
    onnx.checker.check_model(step.model_proto, full_check=True)
    assert {node.domain for part in (step.model.graph, *step.model.functions.values()) for node in part} == {"", GRADIENT_DOMAIN}
    typed = onnx.shape_inference.infer_shapes(step.model_proto).graph
    assert onnx.TensorProto.DOUBLE not in {value.type.tensor_type.elem_type for value in (*typed.value_info, *typed.input, *typed.output)}
    assert difference < TOLERANCE


@pytest.mark.parametrize("name", ["adam", "nadam", "radam", "adagrad", "adafactor"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.0), (0.5, 0.99999)], ids=str)
def test_scalars_in_float32_are_those_of_float64(name, betas):
    """At steps 1 to 10,000,000, of the same nodes in both types: float64 is right where 1 - beta**t and RAdam's difference cancel, too."""
    entry = OPTIMIZERS[name]
    h = hyper({**entry.hyperparameters, "betas": betas, "lr_decay": 0.1})

    def scalars(dtype):
        scope, inputs = Scope("t/", lambda value: False), [ir.val(key, dtype, ()) for key in ("lr", "t")]
        op = Builder(scope)
        with op.arithmetic():
            made = entry.factors(op, h, *inputs)
        assert {value.dtype for value in made.values()} == {dtype}
        outputs = [ir.Value(name=f"out.{key}", type=ir.TensorType(dtype), shape=ir.Shape(())) for key in made]
        nodes = [*op.nodes, *(ir.node("Identity", [value], outputs=[out]) for value, out in zip(made.values(), outputs, strict=True))]
        graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 20}, name="scalars")
        scope.register(graph)
        session = ort.InferenceSession(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString(), providers=["CPUExecutionProvider"])
        at = [*range(1, 30), 100, 999, 1000, 1001, 5000, 20_000, 10**6, 10**7]
        kind = dtype.numpy()
        return np.array([session.run(None, {"lr": np.array(0.01, kind), "t": np.array(t, kind)}) for t in at])

    np.testing.assert_allclose(scalars(ir.DataType.FLOAT), scalars(ir.DataType.DOUBLE), rtol=3e-6)


@pytest.mark.parametrize("case", ["sgd, momentum", "adam, amsgrad", "nadam", "adagrad, decays", "adafactor", "rmsprop, momentum"])
def test_an_optimizer_goes_on_where_it_was(case):
    kind, hyperparameters = CASES[case]
    model, batches = Net(), _batches()[:12]
    optimizer = kind(model.parameters(), **hyperparameters)
    eager(model, F.cross_entropy, optimizer, batches[:6])
    losses, _ = run(step_of(model, batches[0], optimizer=optimizer, dynamo=False), batches[6:])
    np.testing.assert_allclose(losses, eager(model, F.cross_entropy, optimizer, batches[6:]), rtol=1e-4)


def test_a_class_of_torch_is_its_name():
    model, batches = network(), batches_of(3)
    losses, _ = run(step_of(model, batches[0], optimizer=torch.optim.RMSprop, hyperparameters={"lr": 0.1}, dynamo=False), batches)
    np.testing.assert_allclose(losses, eager(model, F.cross_entropy, torch.optim.RMSprop(model.parameters(), lr=0.1), batches), rtol=1e-9)


def test_a_class_of_ones_own_is_not_torchs():
    class Adam(torch.optim.Adam):
        pass

    model = network()
    for optimizer in (Adam, Adam(model.parameters())):
        with pytest.raises(ArgumentError, match="not torch's own"):
            step_of(model, batches_of(1)[0], optimizer=optimizer)


def _clamped(optimizer, args, kwargs):
    """A hook that changes the parameters."""


class TestWhatRunsAtAStep:
    @pytest.mark.parametrize("method", ["register_step_pre_hook", "register_step_post_hook"])
    def test_hooks_are_refused_by_name(self, method):
        model, batch = network(), batches_of(1)[0]
        optimizer = torch.optim.SGD(model.parameters())
        handle = getattr(optimizer, method)(_clamped)
        with pytest.raises(ArgumentError, match=rf"SGD has the hook .*:_clamped, registered by {method}: .*\n  way out: .*handle\.remove"):
            step_of(model, batch, optimizer=optimizer)
        handle.remove()
        assert step_of(model, batch, optimizer=optimizer, dynamo=False).layout.optimizer == "sgd"

    def test_hooks_of_all_optimizers_too(self):
        model = network()
        handle = register_optimizer_step_post_hook(_clamped)
        try:
            with pytest.raises(ArgumentError, match="registered by register_optimizer_step_post_hook"):
                step_of(model, batches_of(1)[0], optimizer=torch.optim.SGD(model.parameters()))
        finally:
            handle.remove()

    def test_a_step_of_an_instance_is_refused_and_a_schedulers_is_not(self):
        def halved(closure=None):
            raise AssertionError("never called")

        model, batch = network(), batches_of(1)[0]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
        assert step_of(model, batch, optimizer=optimizer, dynamo=False).initial["learning_rate"] == 0.25
        optimizer.step = halved
        with pytest.raises(ArgumentError, match=r"the step\(\) of the optimizer SGD is .*halved, not that of torch's class"):
            step_of(model, batch, optimizer=optimizer)


@pytest.mark.unusable(reason="onnxruntime has no kernels of bfloat16 on the CPU")
@pytest.mark.parametrize("case", ["sgd, momentum", "adamw", "adagrad", "adafactor"])
def test_state_of_a_half_type_is_taken_over(case, tmp_path):
    kind, hyperparameters = CASES[case]
    model, (x, y) = network(torch.bfloat16), batches_of(1, torch.bfloat16)[0]
    optimizer = kind(model.parameters(), **hyperparameters)
    eager(model, F.cross_entropy, optimizer, [(x, y)])
    step = step_of(model, (x, y), optimizer=optimizer, dynamo=False)
    step.save(tmp_path / "step.onnx")
    for key, parameter in model.named_parameters():
        for slot, value in optimizer.state[parameter].items():
            if slot != "step":
                assert np.array_equal(step.initial[f"state.{key}.{slot}"].astype(np.float32), value.float().numpy())


def _groups(model):
    groups = [
        {"params": [model[0].weight, model[2].weight], "weight_decay": 0.1},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0, "lr": 0.002},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))


class TestGroups:
    def test_each_has_its_learning_rate_and_weight_decay(self, dynamo):
        model, batches = network(), batches_of(10)
        twin = copy.deepcopy(model)
        step = step_of(model, batches[0], optimizer=_groups(model), dynamo=dynamo)
        settings = {name: float(step.initial[name]) for name in step.initial if "_" in name and not name.startswith(("param.", "state."))}
        assert settings == {"learning_rate": 0.01, "weight_decay": 0.1, "learning_rate_1": 0.002}
        losses, state = run(step, batches[:5])
        optimizer = _groups(twin)
        np.testing.assert_allclose(losses, eager(twin, F.cross_entropy, optimizer, batches[:5]), rtol=1e-9)
        for group, more in zip(optimizer.param_groups, ({"lr": 0.001, "weight_decay": 0.5}, {"lr": 0.1}), strict=True):
            group.update(more)
        changed = {"learning_rate": np.array(0.001), "weight_decay": np.array(0.5), "learning_rate_1": np.array(0.1)}
        losses, _ = run(step, batches[5:], **{**state, **changed})
        np.testing.assert_allclose(losses, eager(twin, F.cross_entropy, optimizer, batches[5:]), rtol=1e-9)


class TestClipping:
    @pytest.mark.parametrize("options", [{"clip_norm": 0.2}, {"clip_value": 0.02}, {"clip_norm": 0.1, "clip_value": 0.05}], ids=str)
    def test_as_torch_clips(self, options):
        model, batches = network(), batches_of(8)
        step = step_of(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.5}, dynamo=False, **options)
        onnx.checker.check_model(step.model_proto, full_check=True)
        losses, _ = run(step, batches)
        expected = eager(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.5), batches, **options)
        np.testing.assert_allclose(losses, expected, rtol=1e-9)
        assert ("gradient_norm" in [output.name for output in step.model.graph.outputs]) is ("clip_norm" in options)

    def test_what_is_no_number_stays_none(self):
        model, (x, y) = network(torch.float32), batches_of(1, torch.float32)[0]
        step = step_of(model, (x, y), optimizer="sgd", clip_value=0.1, dynamo=False)
        _, state = run(step, [(x * torch.nan, y)])
        assert np.isnan(state["param.0.weight"]).all()

    def test_parameters_of_two_types(self):
        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3).double()

            def forward(self, x):
                return self.second(torch.tanh(self.first(x)).double())

        model, batches = Mixed(), batches_of(4, torch.float32)
        step = step_of(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.5}, clip_norm=0.1, dynamo=False)
        onnx.checker.check_model(step.model_proto, full_check=True)
        expected = eager(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.5), batches, clip_norm=0.1)
        np.testing.assert_allclose(run(step, batches)[0], expected, rtol=1e-6)


class TestAverage:
    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_as_an_averaged_model_of_torch(self, accumulate):
        model, batches = network(), batches_of(6)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        average.update_parameters(model)  # the first call takes the parameters as they are
        step = step_of(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.5}, ema=0.9, accumulate=accumulate, dynamo=False)
        onnx.checker.check_model(step.model_proto, full_check=True)
        _, state = run(step, batches)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for at in range(0, len(batches), accumulate):
            eager(model, F.cross_entropy, optimizer, batches[at : at + accumulate], accumulate=accumulate)
            average.update_parameters(model)
        for key, p in average.module.named_parameters():
            np.testing.assert_allclose(state[f"state.{key}.ema"], p.detach(), rtol=1e-9)


if __name__ == "__main__":
    for case in CASES:
        print(f"| {case} | {_difference(case)[0]:.1e} |", flush=True)
