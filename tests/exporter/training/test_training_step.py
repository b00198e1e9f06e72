"""Training steps against eager PyTorch: losses, parameters, optimizer state, buffers."""

from __future__ import annotations

import copy
import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from exporter.training.step import export_training_step
from symbolics.errors import ArgumentError
from symbolics.node.metadata import read_state
from tests.exporter.training.loop import Custom, Square, batches_of, eager, network, run, step_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class TestOptimizers:
    @pytest.mark.parametrize("dynamo", [True, False])
    def test_both_exporters(self, dynamo):
        model, batches = network(torch.float32), batches_of(8, torch.float32)
        losses, _ = run(step_of(model, batches[0], dynamo=dynamo), batches)
        np.testing.assert_allclose(losses, eager(model, F.cross_entropy, torch.optim.AdamW(model.parameters()), batches), rtol=1e-5)

    def test_state_is_that_of_torch(self):
        model, batches = network(), batches_of(5)
        _, state = run(step_of(model, batches[0], optimizer="adam"), batches)
        optimizer = torch.optim.Adam(model.parameters())
        eager(model, F.cross_entropy, optimizer, batches)
        for key, parameter in model.named_parameters():
            for slot in ("exp_avg", "exp_avg_sq"):
                np.testing.assert_allclose(state[f"state.{key}.{slot}"], optimizer.state[parameter][slot], rtol=1e-8, atol=1e-15)
        assert state["state.step"] == 5

    def test_a_torch_optimizer_goes_on_where_it_was(self):
        model, batches = network(), batches_of(12)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        eager(model, F.cross_entropy, optimizer, batches[:6])
        losses, state = run(step_of(model, batches[0], optimizer=optimizer), batches[6:])
        assert state["state.step"] == 12
        np.testing.assert_allclose(losses, eager(model, F.cross_entropy, optimizer, batches[6:]), rtol=1e-9)

    def test_adam_with_decoupled_decay_is_adamw(self):
        model, batches = network(), batches_of(4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.5, decoupled_weight_decay=True)
        losses, _ = run(step_of(model, batches[0], optimizer=optimizer), batches)
        np.testing.assert_allclose(losses, eager(model, F.cross_entropy, optimizer, batches), rtol=1e-9)

    def test_dampening_goes_on_where_it_was(self):
        """torch's SGD counts no steps: that there is a buffer says that the first gradient has passed."""
        model, batches = network(), batches_of(8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        eager(model, F.cross_entropy, optimizer, batches[:3])
        losses, _ = run(step_of(model, batches[0], optimizer=optimizer), batches[3:])
        np.testing.assert_allclose(losses, eager(model, F.cross_entropy, optimizer, batches[3:]), rtol=1e-9)

    def test_steps_of_different_numbers_are_refused(self):
        model, batches = network(), batches_of(4)
        optimizer = torch.optim.Adam(model[0].parameters(), lr=0.01)
        eager(model, F.cross_entropy, optimizer, batches[:3])
        optimizer.add_param_group({"params": model[2].parameters()})
        with pytest.raises(ArgumentError, match=r"0 steps for 2\.weight and 3 for 0\.weight"):
            step_of(model, batches[0], optimizer=optimizer)

    def test_learning_rate_is_an_input(self):
        model, batches = network(), batches_of(4)
        step = step_of(model, batches[0], optimizer="sgd")
        _, still = run(step, batches, learning_rate=np.array(0.0))
        np.testing.assert_array_equal(still["param.0.weight"], step.initial["param.0.weight"])
        _, moved = run(step, batches, learning_rate=np.array(0.5))
        assert np.abs(moved["param.0.weight"] - step.initial["param.0.weight"]).max() > 0.01

    @pytest.mark.parametrize("clip_norm", [None, 0.2])
    def test_gradients_accumulate(self, clip_norm):
        model, batches = network(), batches_of(9)
        step = step_of(model, batches[0], optimizer="adamw", hyperparameters={"lr": 0.05}, accumulate=3, clip_norm=clip_norm)
        losses, state = run(step, batches)
        expected = eager(model, F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=0.05), batches, clip_norm=clip_norm, accumulate=3)
        np.testing.assert_allclose(losses, expected, rtol=1e-9)
        assert (state["state.step"], state["state.micro_step"]) == (3, 0)
        np.testing.assert_array_equal(state["state.0.weight.gradient"], 0)


@pytest.mark.slow
class TestMixedPrecision:
    def test_float16_as_autocast_and_grad_scaler(self):
        model, batches = network(torch.float32), batches_of(6, torch.float32)
        losses, state = run(step_of(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.1}, precision="float16"), batches)
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
        model, batches = nn.Linear(4, 3), batches_of(1, torch.float32)
        step = step_of(model, batches[0], precision="float16")
        batches = [(1e3 * batches[0][0], batches[0][1])]  # onnxruntime computes float16 in float32 where it has no kernel
        losses, state = run(step, batches, **{"state.loss_scale": np.array(3e38, np.float32)})
        assert math.isfinite(losses[0])
        assert state["state.loss_scale"] == np.float32(1.5e38)
        assert state["state.step"] == 0
        np.testing.assert_array_equal(state["param.weight"], step.initial["param.weight"])

    def test_the_scale_grows_after_2000_good_steps(self):
        model, batches = network(torch.float32), batches_of(1, torch.float32)
        step = step_of(model, batches[0], precision="float16")
        _, state = run(step, batches, **{"state.growth_tracker": np.array(1999)})
        assert (state["state.loss_scale"], state["state.growth_tracker"]) == (131072.0, 0)

    @pytest.mark.unusable(reason="onnxruntime has no kernels of bfloat16 on the CPU")
    def test_bfloat16_computes_in_bfloat16(self):
        model, batches = network(torch.float32), batches_of(1, torch.float32)
        step = step_of(model, batches[0], precision="bfloat16")
        onnx.checker.check_model(step.model_proto, full_check=True)
        kinds = {node.outputs[0].dtype for node in step.model.graph if node.op_type in ("Gemm", "MatMul")}
        assert kinds == {ir.DataType.BFLOAT16}
        assert "state.loss_scale" not in step.initial

    @pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.BatchNorm1d(6)], ids=lambda norm: type(norm).__name__)
    def test_norms_of_a_half_type_have_parameters_in_float32(self, norm, dynamo):
        model, batches = nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 3)), batches_of(2, torch.float32)
        step = step_of(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.1}, precision="float16", dynamo=dynamo)
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


class TestModels:
    @pytest.mark.parametrize("momentum", [0.1, None])
    @pytest.mark.parametrize("dynamo", [True, False])
    def test_running_statistics_go_from_step_to_step(self, dynamo, momentum):
        torch.manual_seed(0)
        model = _Normed().train()  # onnxruntime has no Conv for float64
        model.norm.momentum = momentum
        batches = [(torch.randn(6, 2, 7, 7), torch.randint(0, 3, (6,))) for _ in range(5)]
        step = step_of(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.1}, dynamo=dynamo)
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
        model, batches = Twice().double().train(), batches_of(4)
        step = step_of(model, batches[0], optimizer="sgd")
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
        model, batches = Custom().double(), batches_of(6)
        step = step_of(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.05}, dynamo=dynamo)
        assert [node.op_type for node in step.model.graph if node.domain == "com.microsoft"] == ["PythonOp", "PythonOpGrad"]
        losses, _ = run(step, batches, allow=[Square])
        np.testing.assert_allclose(losses, eager(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.05), batches), rtol=1e-9)

    def test_dropout_draws_anew_and_can_be_repeated(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3)).train()
        batches = batches_of(1, torch.float32) * 3
        step = step_of(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.0})
        losses, state = run(step, batches)
        assert len(set(losses)) == 3  # the same batch and parameters, other masks
        assert state["seed"] == 3
        assert run(step, batches)[0] == losses

    def test_a_loss_that_is_a_module(self):
        model, batches = network(), batches_of(4)
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), label_smoothing=0.1)
        step = export_training_step(model, batches[0][:1], loss=loss, targets=batches[0][1:], optimizer="sgd")
        np.testing.assert_allclose(
            run(step, batches)[0], eager(model, loss, torch.optim.SGD(model.parameters(), lr=1e-3), batches), rtol=1e-9
        )

    @pytest.mark.parametrize("loss", [F.mse_loss, nn.HuberLoss(), lambda y, t: ((y - t).abs() ** 1.5).mean()])
    def test_other_losses(self, loss):
        model, batches = network(), [(x, torch.randn(5, 3, dtype=torch.float64)) for x, _ in batches_of(4)]
        step = export_training_step(model, batches[0][:1], loss=loss, targets=batches[0][1], optimizer="sgd")
        np.testing.assert_allclose(
            run(step, batches)[0], eager(model, loss, torch.optim.SGD(model.parameters(), lr=1e-3), batches), rtol=1e-9
        )

    def test_a_model_that_returns_its_loss(self):
        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = network()

            def forward(self, x, labels=None):
                y = self.body(x)
                return {"logits": y, "loss": F.cross_entropy(y, labels)}

        model, batches = Whole(), batches_of(4)
        step = export_training_step(model, batches[0][:1], {"labels": batches[0][1]}, loss=None, optimizer="sgd")
        assert step.layout.inputs == ("x", "labels")
        losses, _ = run(step, batches)
        expected = eager(model.body, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=1e-3), batches)
        np.testing.assert_allclose(losses, expected, rtol=1e-9)
        assert not [value for value in step.model.graph.outputs if value.name == "logits"]

    @pytest.mark.parametrize("dynamo", [True, False])
    def test_sizes_that_vary(self, dynamo):
        model = network()
        batches = [batches_of(1, size=size)[0] for size in (2, 5, 3)]
        step = step_of(model, batches[1], optimizer="sgd", dynamo=dynamo, dynamic_shapes=({0: torch.export.Dim("batch")},))
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
        model, batches = Partly().double(), batches_of(5)
        step = step_of(model, batches[0])
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
        step = step_of(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.1})
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
        step = step_of(model, batches[0], optimizer="adam")
        assert step.layout.parameters == {"embedding.weight": "param.embedding.weight", "head.weight": "param.embedding.weight"}
        np.testing.assert_allclose(
            run(step, batches)[0], eager(model, F.cross_entropy, torch.optim.Adam(model.parameters()), batches), rtol=1e-9
        )
