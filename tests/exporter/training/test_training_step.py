"""Training steps against eager PyTorch: losses, parameters, optimizer state, buffers."""

from __future__ import annotations

import copy
import io
import math

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import exporter
from exporter.files.inspect import inspect_model, render
from exporter.training.step import export_training_step
from symbolics.errors import ArgumentError, ExportError, FormatError
from symbolics.node.metadata import read_state, read_step
from symbolics.node.names import STATE_KEY
from tests.exporter.training.loop import eager, run
from tests.processes import FreshProcess

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675, written down from the paper: torch has none."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                b1, b2 = group["betas"]
                c = torch.sign(b1 * m + (1 - b1) * p.grad)
                p.copy_(p - group["lr"] * (c + group["weight_decay"] * p))
                m.copy_(b2 * m + (1 - b2) * p.grad)


def _network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def _batches(count, dtype=torch.float64, size=5):
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(size, 4, dtype=dtype, generator=generator) for _ in range(count)]
    return [(x, torch.randint(0, 3, (size,), generator=generator)) for x in inputs]


def _step(model, batch, **options):
    return export_training_step(model, batch[:1], loss=F.cross_entropy, targets=batch[1:], **options)


OPTIMIZERS = {
    "sgd": ("sgd", torch.optim.SGD, {"lr": 0.1}),
    "sgd-decay": ("sgd", torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd-momentum": ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "sgd-nesterov": ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    "adam": ("adam", torch.optim.Adam, {"lr": 0.01}),
    "adam-decay": ("adam", torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    "adamw": ("adamw", torch.optim.AdamW, {"lr": 0.01}),
    "adamw-no-decay": ("adamw", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.0}),
    "lion": ("lion", Lion, {"lr": 0.01}),
    "lion-decay": ("lion", Lion, {"lr": 0.01, "betas": (0.95, 0.98), "weight_decay": 0.1}),
}


class TestOptimizers:
    @pytest.mark.parametrize("case", OPTIMIZERS)
    def test_equals_eager(self, case):
        name, cls, hyperparameters = OPTIMIZERS[case]
        model, batches = _network(), _batches(12)
        step = _step(model, batches[0], optimizer=name, hyperparameters=hyperparameters)
        losses, state = run(step, batches)
        expected = eager(model, F.cross_entropy, cls(model.parameters(), **hyperparameters), batches)
        np.testing.assert_allclose(losses, expected, rtol=1e-9)
        for key, parameter in model.named_parameters():
            np.testing.assert_allclose(state[f"param.{key}"], parameter.detach(), rtol=1e-8, atol=1e-12)

    @pytest.mark.parametrize("dynamo", [True, False])
    def test_both_exporters(self, dynamo):
        model, batches = _network(torch.float32), _batches(8, torch.float32)
        losses, _ = run(_step(model, batches[0], dynamo=dynamo), batches)
        np.testing.assert_allclose(losses, eager(model, F.cross_entropy, torch.optim.AdamW(model.parameters()), batches), rtol=1e-5)

    def test_state_is_that_of_torch(self):
        model, batches = _network(), _batches(5)
        _, state = run(_step(model, batches[0], optimizer="adam"), batches)
        optimizer = torch.optim.Adam(model.parameters())
        eager(model, F.cross_entropy, optimizer, batches)
        for key, parameter in model.named_parameters():
            for slot in ("exp_avg", "exp_avg_sq"):
                np.testing.assert_allclose(state[f"state.{key}.{slot}"], optimizer.state[parameter][slot], rtol=1e-8, atol=1e-15)
        assert state["state.step"] == 5

    def test_groups_of_a_torch_optimizer(self):
        model, batches = _network(), _batches(10)
        twin = copy.deepcopy(model)

        def optimizer(m):
            groups = [
                {"params": [m[0].weight, m[2].weight], "weight_decay": 0.1},
                {"params": [m[0].bias, m[2].bias], "weight_decay": 0.0, "lr": 0.002},
            ]
            return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))

        losses, _ = run(_step(model, batches[0], optimizer=optimizer(model)), batches)
        np.testing.assert_allclose(losses, eager(twin, F.cross_entropy, optimizer(twin), batches), rtol=1e-9)

    def test_a_torch_optimizer_goes_on_where_it_was(self):
        model, batches = _network(), _batches(12)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        eager(model, F.cross_entropy, optimizer, batches[:6])
        losses, state = run(_step(model, batches[0], optimizer=optimizer), batches[6:])
        assert state["state.step"] == 12
        np.testing.assert_allclose(losses, eager(model, F.cross_entropy, optimizer, batches[6:]), rtol=1e-9)

    def test_adam_with_decoupled_decay_is_adamw(self):
        model, batches = _network(), _batches(4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.5, decoupled_weight_decay=True)
        losses, _ = run(_step(model, batches[0], optimizer=optimizer), batches)
        np.testing.assert_allclose(losses, eager(model, F.cross_entropy, optimizer, batches), rtol=1e-9)

    def test_dampening_goes_on_where_it_was(self):
        """torch's SGD counts no steps: that there is a buffer says that the first gradient has passed."""
        model, batches = _network(), _batches(8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        eager(model, F.cross_entropy, optimizer, batches[:3])
        losses, _ = run(_step(model, batches[0], optimizer=optimizer), batches[3:])
        np.testing.assert_allclose(losses, eager(model, F.cross_entropy, optimizer, batches[3:]), rtol=1e-9)

    def test_steps_of_different_numbers_are_refused(self):
        model, batches = _network(), _batches(4)
        optimizer = torch.optim.Adam(model[0].parameters(), lr=0.01)
        eager(model, F.cross_entropy, optimizer, batches[:3])
        optimizer.add_param_group({"params": model[2].parameters()})
        with pytest.raises(ArgumentError, match=r"0 steps for 2\.weight and 3 for 0\.weight"):
            _step(model, batches[0], optimizer=optimizer)

    def test_learning_rate_is_an_input(self):
        model, batches = _network(), _batches(4)
        step = _step(model, batches[0], optimizer="sgd")
        _, still = run(step, batches, learning_rate=np.array(0.0))
        np.testing.assert_array_equal(still["param.0.weight"], step.initial["param.0.weight"])
        _, moved = run(step, batches, learning_rate=np.array(0.5))
        assert np.abs(moved["param.0.weight"] - step.initial["param.0.weight"]).max() > 0.01

    def test_gradients_are_clipped(self):
        model, batches = _network(), _batches(8)
        step = _step(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.5}, clip_norm=0.2)
        losses, _ = run(step, batches)
        expected = eager(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.5), batches, clip_norm=0.2)
        np.testing.assert_allclose(losses, expected, rtol=1e-9)
        assert [output.name for output in step.model.graph.outputs][:2] == ["loss", "gradient_norm"]

    @pytest.mark.parametrize("clip_norm", [None, 0.2])
    def test_gradients_accumulate(self, clip_norm):
        model, batches = _network(), _batches(9)
        step = _step(model, batches[0], optimizer="adamw", hyperparameters={"lr": 0.05}, accumulate=3, clip_norm=clip_norm)
        losses, state = run(step, batches)
        expected = eager(model, F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=0.05), batches, clip_norm=clip_norm, accumulate=3)
        np.testing.assert_allclose(losses, expected, rtol=1e-9)
        assert (state["state.step"], state["state.micro_step"]) == (3, 0)
        np.testing.assert_array_equal(state["state.0.weight.gradient"], 0)


class TestMixedPrecision:
    def test_float16_as_autocast_and_grad_scaler(self):
        model, batches = _network(torch.float32), _batches(6, torch.float32)
        losses, state = run(_step(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.1}, precision="float16"), batches)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
        for x, y in batches:
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            expected.append(float(loss))
        np.testing.assert_allclose(losses, expected, rtol=5e-3)
        assert state["param.0.weight"].dtype == np.float32
        assert state["state.loss_scale"] == scaler.get_scale()

    def test_an_overflow_changes_the_scale_alone(self):
        model, batches = nn.Linear(4, 3), _batches(1, torch.float32)
        step = _step(model, batches[0], precision="float16")
        batches = [(1e3 * batches[0][0], batches[0][1])]  # onnxruntime computes float16 in float32 where it has no kernel
        losses, state = run(step, batches, **{"state.loss_scale": np.array(3e38, np.float32)})
        assert math.isfinite(losses[0])
        assert state["state.loss_scale"] == np.float32(1.5e38)
        assert state["state.step"] == 0
        np.testing.assert_array_equal(state["param.weight"], step.initial["param.weight"])

    def test_the_scale_grows_after_2000_good_steps(self):
        model, batches = _network(torch.float32), _batches(1, torch.float32)
        step = _step(model, batches[0], precision="float16")
        _, state = run(step, batches, **{"state.growth_tracker": np.array(1999)})
        assert (state["state.loss_scale"], state["state.growth_tracker"]) == (131072.0, 0)

    def test_bfloat16_computes_in_bfloat16(self):
        model, batches = _network(torch.float32), _batches(1, torch.float32)
        step = _step(model, batches[0], precision="bfloat16")
        onnx.checker.check_model(step.model_proto, full_check=True)
        kinds = {node.outputs[0].dtype for node in step.model.graph if node.op_type in ("Gemm", "MatMul")}
        assert kinds == {ir.DataType.BFLOAT16}
        assert "state.loss_scale" not in step.initial

    @pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.BatchNorm1d(6)], ids=lambda norm: type(norm).__name__)
    def test_norms_of_a_half_type_have_parameters_in_float32(self, norm, dynamo):
        model, batches = nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 3)), _batches(2, torch.float32)
        step = _step(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.1}, precision="float16", dynamo=dynamo)
        onnx.checker.check_model(step.model_proto, full_check=True)
        losses, _ = run(step, batches)
        optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
        for x, y in batches:
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(float(loss.detach()))
        np.testing.assert_allclose(losses, expected, rtol=5e-3)


class _Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] * g  # not the derivative of forward, on purpose


class _Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(_Square.apply(self.first(x)))


class TestModels:
    @pytest.mark.parametrize("momentum", [0.1, None])
    @pytest.mark.parametrize("dynamo", [True, False])
    def test_running_statistics_go_from_step_to_step(self, dynamo, momentum):
        torch.manual_seed(0)
        model = _Normed().train()  # onnxruntime has no Conv for float64
        model.norm.momentum = momentum
        batches = [(torch.randn(6, 2, 7, 7), torch.randint(0, 3, (6,))) for _ in range(5)]
        step = _step(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.1}, dynamo=dynamo)
        before = {name: array.copy() for name, array in step.initial.items()}
        losses, state = run(step, batches)
        np.testing.assert_allclose(losses, eager(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), batches), rtol=1e-5)
        for key, buffer in model.named_buffers():
            np.testing.assert_allclose(state[f"buffer.{key}"], buffer, rtol=1e-5, atol=1e-6)
        for name, array in step.initial.items():  # the kernel of BatchNormalization writes over its inputs
            np.testing.assert_array_equal(array, before[name])

    @pytest.mark.parametrize("momentum", [0.1, None])
    def test_a_batch_norm_that_is_called_twice(self, momentum):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.head = nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 3)

            def forward(self, x):
                return self.head(torch.tanh(self.norm(x)) + self.norm(2 * x + 1))

        torch.manual_seed(0)
        model, batches = Twice().double().train(), _batches(4)
        step = _step(model, batches[0], optimizer="sgd")
        losses, state = run(step, batches)
        module = exporter.load(exporter.export(copy.deepcopy(model), batches[0][:1])).train()
        np.testing.assert_allclose(losses, eager(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=1e-3), batches), rtol=1e-9)
        for x, _ in batches:
            module(x)
        buffers = dict(module.named_buffers())
        for key, buffer in model.named_buffers():
            np.testing.assert_allclose(state[f"buffer.{key}"], buffer, rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(buffers[key], buffer, rtol=1e-6, atol=1e-7)
        assert buffers["norm.num_batches_tracked"] == 8

    @pytest.mark.parametrize("dynamo", [True, False])
    def test_a_function_keeps_its_backward(self, dynamo):
        torch.manual_seed(0)
        model, batches = _Custom().double(), _batches(6)
        step = _step(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.05}, dynamo=dynamo)
        assert [node.op_type for node in step.model.graph if node.domain == "com.microsoft"] == ["PythonOp", "PythonOpGrad"]
        losses, _ = run(step, batches, allow=[_Square])
        np.testing.assert_allclose(losses, eager(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.05), batches), rtol=1e-9)

    def test_dropout_draws_anew_and_can_be_repeated(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3)).train()
        batches = _batches(1, torch.float32) * 3
        step = _step(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.0})
        losses, state = run(step, batches)
        assert len(set(losses)) == 3  # the same batch and parameters, other masks
        assert state["seed"] == 3
        assert run(step, batches)[0] == losses

    def test_a_loss_that_is_a_module(self):
        model, batches = _network(), _batches(4)
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), label_smoothing=0.1)
        step = export_training_step(model, batches[0][:1], loss=loss, targets=batches[0][1:], optimizer="sgd")
        np.testing.assert_allclose(
            run(step, batches)[0], eager(model, loss, torch.optim.SGD(model.parameters(), lr=1e-3), batches), rtol=1e-9
        )

    @pytest.mark.parametrize("loss", [F.mse_loss, nn.HuberLoss(), lambda y, t: ((y - t).abs() ** 1.5).mean()])
    def test_other_losses(self, loss):
        model, batches = _network(), [(x, torch.randn(5, 3, dtype=torch.float64)) for x, _ in _batches(4)]
        step = export_training_step(model, batches[0][:1], loss=loss, targets=batches[0][1], optimizer="sgd")
        np.testing.assert_allclose(
            run(step, batches)[0], eager(model, loss, torch.optim.SGD(model.parameters(), lr=1e-3), batches), rtol=1e-9
        )

    def test_a_model_that_returns_its_loss(self):
        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = _network()

            def forward(self, x, labels=None):
                y = self.body(x)
                return {"logits": y, "loss": F.cross_entropy(y, labels)}

        model, batches = Whole(), _batches(4)
        step = export_training_step(model, batches[0][:1], {"labels": batches[0][1]}, loss=None, optimizer="sgd")
        assert step.layout.inputs == ("x", "labels")
        losses, _ = run(step, batches)
        expected = eager(model.body, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=1e-3), batches)
        np.testing.assert_allclose(losses, expected, rtol=1e-9)
        assert not [value for value in step.model.graph.outputs if value.name == "logits"]

    @pytest.mark.parametrize("dynamo", [True, False])
    def test_sizes_that_vary(self, dynamo):
        model = _network()
        batches = [_batches(1, size=size)[0] for size in (2, 5, 3)]
        step = _step(model, batches[1], optimizer="sgd", dynamo=dynamo, dynamic_shapes=({0: torch.export.Dim("batch")},))
        np.testing.assert_allclose(
            run(step, batches)[0], eager(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=1e-3), batches), rtol=1e-9
        )

    def test_frozen_and_unreached_parameters(self):
        class Partly(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.spare = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(2, 2)
                self.first.weight.requires_grad_(False)

            def forward(self, x):
                return self.second(torch.tanh(self.first(x)))

        torch.manual_seed(0)
        model, batches = Partly().double(), _batches(5)
        step = _step(model, batches[0])
        assert set(step.layout.parameters) == {"first.bias", "second.weight", "second.bias"}
        assert step.layout.untrained == ("spare.weight", "spare.bias")
        entries = read_state(step.model.metadata_props)
        assert list(entries) == ["first.weight"]
        np.testing.assert_array_equal(step.model.graph.initializers["first.weight"].const_value.numpy(), model.first.weight)
        losses, _ = run(step, batches)
        np.testing.assert_allclose(losses, eager(model, F.cross_entropy, torch.optim.AdamW(model.parameters()), batches), rtol=1e-9)

    def test_what_was_learned_goes_back_into_the_module(self):
        """As docs/training.md says."""
        torch.manual_seed(0)
        model = _Normed().train()
        batches = [(torch.randn(6, 2, 7, 7), torch.randint(0, 3, (6,))) for _ in range(3)]
        step = _step(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.1})
        _, state = run(step, batches)
        eager(twin := copy.deepcopy(model), F.cross_entropy, torch.optim.SGD(twin.parameters(), lr=0.1), batches)
        learned = {
            name.partition(".")[2]: torch.from_numpy(value) for name, value in state.items() if name.startswith(("param.", "buffer."))
        }
        model.load_state_dict(learned, strict=False)
        for key, value in twin.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-5, atol=1e-6)

    def test_tied_parameters_are_one(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Embedding(7, 4)
                self.head = nn.Linear(4, 7, bias=False)
                self.head.weight = self.embedding.weight

            def forward(self, ids):
                return self.head(torch.tanh(self.embedding(ids)))

        torch.manual_seed(0)
        model = Tied().double()
        batches = [(torch.randint(0, 7, (6,)), torch.randint(0, 7, (6,))) for _ in range(5)]
        step = _step(model, batches[0], optimizer="adam")
        assert step.layout.parameters == {"embedding.weight": "param.embedding.weight", "head.weight": "param.embedding.weight"}
        np.testing.assert_allclose(
            run(step, batches)[0], eager(model, F.cross_entropy, torch.optim.Adam(model.parameters()), batches), rtol=1e-9
        )


class TestFile:
    def test_saved_beside_the_model_that_gives_the_start(self, tmp_path):
        model, batches = _network(torch.float32), _batches(3, torch.float32)
        step = _step(model, batches[0], optimizer="adam")
        step.save(tmp_path / "step.onnx")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step.init.onnx", "step.onnx"]
        proto = onnx.load(tmp_path / "step.onnx")
        onnx.checker.check_model(proto, full_check=True)
        initial = exporter.inference_session(tmp_path / "step.init.onnx")
        values = dict(zip([o.name for o in initial.get_outputs()], initial.run(None, {}), strict=True))
        assert set(values) == set(step.initial)
        for name, array in step.initial.items():
            np.testing.assert_array_equal(values[name], array)
        inputs = {value.name for value in proto.graph.input}
        assert inputs == {*values, "input", "target"}
        layout = read_step({entry.key: entry.value for entry in proto.metadata_props})
        assert layout == step.layout
        assert {value.name for value in proto.graph.output} == {"loss", *layout.carried}
        assert all(output == f"{name}.next" for output, name in layout.carried.items())

    def test_a_plain_session_runs_it(self, tmp_path):
        model, batches = _network(torch.float32), _batches(1, torch.float32)
        step = _step(model, batches[0])
        step.save(tmp_path / "step.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "step.onnx", providers=["CPUExecutionProvider"])
        x, y = (t.numpy() for t in batches[0])
        (loss,) = session.run(["loss"], {**step.initial, "input": x, "target": y})
        np.testing.assert_allclose(loss, F.cross_entropy(model(batches[0][0]), batches[0][1]).detach(), rtol=1e-5)

    def test_sessions_of_steps_share_an_arena(self):
        """And nobody else's session does, nor one whose options the user brings."""

        def entry(session):
            options = session.get_session_options()
            try:
                return options.get_session_config_entry("session.use_env_allocators"), options.enable_mem_pattern
            except RuntimeError:  # onnxruntime's word for an entry that is not there
                return None, options.enable_mem_pattern

        model, (batch,) = _network(torch.float32), _batches(1, torch.float32)
        step = _step(model, batch)
        sessions = [exporter.inference_session(step), exporter.inference_session(step)]
        assert [entry(session) for session in sessions] == [("1", False), ("1", False)]
        plain = exporter.inference_session(exporter.export(model, batch[:1]))
        assert entry(plain) == (None, True)
        own = exporter.inference_session(step, sess_options=onnxruntime.SessionOptions())
        assert entry(own) == (None, True)
        feeds = {**step.initial, "input": batch[0].numpy(), "target": batch[1].numpy()}
        losses = [session.run([step.layout.loss], feeds)[0] for session in (*sessions, own)]
        assert losses[0] == losses[1] == losses[2]

    def test_a_fresh_process_runs_its_functions(self, tmp_path):
        torch.manual_seed(0)
        model, batches = _Custom(), _batches(1, torch.float32)
        step = _step(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.05})
        step.save(tmp_path / "step.onnx")
        elsewhere = FreshProcess(tmp_path)
        try:
            x, y = batches[0]
            values = elsewhere.run(tmp_path / "step.onnx", {**step.initial, "x": x, "target": y}, allow=[f"{__name__}:*"])
        finally:
            elsewhere.close()
        results = dict(zip([value.name for value in step.model.graph.outputs], values, strict=True))
        eager(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.05), batches)
        np.testing.assert_allclose(results["param.first.weight.next"], model.first.weight.detach(), rtol=1e-5, atol=1e-6)

    def test_two_exports_are_equal(self, tmp_path):
        for name in ("a", "b"):
            _step(_network(torch.float32), _batches(1, torch.float32)[0]).save(tmp_path / f"{name}.onnx")
        assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()

    def test_inspect_says_what_it_is(self, tmp_path):
        class Inner(nn.Module):
            def __init__(self):
                super().__init__()
                self.part, self.spare = _Custom(), nn.Linear(1, 1)

            def forward(self, x):
                return self.part(x)

        step = _step(Inner(), _batches(1, torch.float32)[0], optimizer="lion")
        report = inspect_model(step.model)
        assert report.step == step.layout
        assert report.rows[0].module == "part"
        console = Console(width=200, file=io.StringIO())
        console.print(render(report))
        text = console.file.getvalue()
        assert "lion: takes x, target; trains 4 parameters" in text
        assert "spare.weight, spare.bias" in text

    def test_damaged_layouts_are_refused(self):
        for text in ("{}", "[]", "nonsense", '{"carried": 1}'):
            with pytest.raises(FormatError):
                read_step({"pythonop.step": text})

    def test_a_step_is_no_model_to_load(self):
        step = _step(_network(torch.float32), _batches(1, torch.float32)[0])
        with pytest.raises(FormatError, match="training step"):
            exporter.load(step)

    def test_state_of_the_file_names_what_is_left(self):
        step = _step(_network(torch.float32), _batches(1, torch.float32)[0])
        assert step.model.metadata_props[STATE_KEY] == "{}"


class _Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"optimizer": "adamW2"}, "no optimizer 'adamW2'.*did you mean 'adamw'"),
            ({"optimizer": 3}, "optimizer is a int"),
            ({"hyperparameters": {"momentun": 1}, "optimizer": "sgd"}, "no hyperparameter 'momentun'.*did you mean 'momentum'"),
            ({"hyperparameters": {"betas": 0.9}}, "betas is 0.9, not two numbers"),
            ({"hyperparameters": {"amsgrad": True}}, "amsgrad=True"),
            ({"hyperparameters": {"nesterov": True}, "optimizer": "sgd"}, "nesterov=True needs momentum"),
            ({"precision": "float8"}, "precision is 'float8'"),
            ({"accumulate": 0}, "accumulate is 0"),
            ({"clip_norm": -1.0}, "clip_norm is -1.0"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(ArgumentError, match=message):
            _step(_network(torch.float32), _batches(1, torch.float32)[0], **options)

    def test_optimizer_of_another_model(self):
        with pytest.raises(ArgumentError, match="that the model has not"):
            _step(_network(), _batches(1)[0], optimizer=torch.optim.SGD(_network().parameters()))

    def test_optimizers_without_a_step(self):
        model = _network()
        with pytest.raises(ArgumentError, match="no optimizer 'RMSprop'"):
            _step(model, _batches(1)[0], optimizer=torch.optim.RMSprop(model.parameters()))

    def test_losses_that_are_no_number(self):
        model, (x, y) = _network(), _batches(1)[0]
        with pytest.raises(ExportError, match=r"shape \[5\].*reduce it"):
            export_training_step(model, (x,), loss=lambda a, b: F.cross_entropy(a, b, reduction="none"), targets=(y,))
        with pytest.raises(ExportError, match="the model .*loss=None.* returned a tensor"):
            export_training_step(model, (x,), loss=None)
        with pytest.raises(ArgumentError, match="loss is a str"):
            export_training_step(model, (x,), loss="mse", targets=(y,))
        with pytest.raises(ArgumentError, match="labels belong to args"):
            export_training_step(model, (x,), loss=None, targets=(y,))

    def test_nothing_to_train(self):
        with pytest.raises(ExportError, match="nothing to train"):
            _step(_network().requires_grad_(False), _batches(1)[0])

    def test_a_buffer_that_the_graph_cannot_carry(self):
        with pytest.raises(ExportError, match="buffer 'calls'"):
            _step(_Counting(), _batches(1, torch.float32)[0])

    def test_arguments_that_do_not_fit(self):
        with pytest.raises(ExportError, match="cannot be called with the example arguments"):
            export_training_step(_network(), (1, 2, 3), loss=F.cross_entropy, targets=())
