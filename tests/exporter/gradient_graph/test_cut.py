"""Gradients that a forward takes without create_graph=True: who trains on them is told, and nobody else."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import exporter
from exporter import ExportError, PythonopWarning

POSITIONS, REFERENCE = torch.linspace(-1, 1, 15).reshape(5, 3), torch.zeros(5, 3)


class Forces(torch.nn.Module):
    """Energy and forces, which ``after`` makes of the gradient."""

    def __init__(self, after: Any = None, **options: Any) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.after, self.options = after or torch.neg, options

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions.requires_grad_(True)
        energy = self.net(positions).sum()
        (gradient,) = torch.autograd.grad(energy, positions, **self.options)
        return energy, self.after(gradient)


class Backward(Forces):
    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = positions.detach().requires_grad_(True)
        energy = self.net(x).sum()
        energy.backward(inputs=[x], **self.options)
        return energy, self.after(x.grad)


class Jacobian(Forces):
    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slope = torch.autograd.functional.jacobian(lambda x: self.net(x).sum(), positions, **self.options)
        return self.net(positions).sum(), self.after(slope)


def both(found: Any, reference: torch.Tensor) -> torch.Tensor:
    return found[0].square() + (found[1] - reference).square().mean()


def forces(found: Any, reference: torch.Tensor) -> torch.Tensor:
    return (found[1] - reference).square().mean()


def energy(found: Any, reference: torch.Tensor) -> torch.Tensor:
    return found[0].square() + reference.sum()


def told(make: Any) -> list[str]:
    """What pythonop warns of while something is made."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [str(each.message) for each in caught if issubclass(each.category, PythonopWarning)]


def step(model: torch.nn.Module, loss: Any, dynamo: bool) -> Any:
    return exporter.export_training_step(model, (POSITIONS.clone(),), loss=loss, targets=(REFERENCE,), optimizer="sgd", dynamo=dynamo)


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("model", [Forces(), Forces(retain_graph=True), Backward()], ids=["grad", "retained", "backward"])
def test_a_step_that_trains_on_them_warns_once_with_the_line(model: Forces, dynamo: bool) -> None:
    (message,) = told(lambda: step(model, both, dynamo))
    assert (
        "the gradient taken at tests.exporter.gradient_graph.test_cut:" in message
        and "in module <root> is a constant to the training step" in message
    )
    assert message.endswith("Take it with create_graph=True; or detach() it to say that a constant is meant.") and "\n" not in message
    assert ("backward through the graph a second time" in message) == (not model.options)


@pytest.mark.parametrize("dynamo", [True, False])
def test_torchs_own_detach_does_not_say_that_it_is_meant(dynamo: bool) -> None:
    (message,) = told(lambda: step(Jacobian(), both, dynamo))
    assert "test_cut:" in message and "create_graph=True" in message
    assert told(lambda: step(Jacobian(create_graph=True), both, dynamo)) == []
    assert told(lambda: step(Jacobian(torch.Tensor.detach), both, dynamo)) == []


def test_eager_raises_what_the_warning_says() -> None:
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        both(Forces()(POSITIONS.clone()), REFERENCE).backward()


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize(
    "after",
    [
        lambda g: -g.detach(),
        lambda g: (-g).detach(),
        lambda g: (2 * g).data,
        torch.no_grad()(lambda g: -g),
    ],
    ids=["detached", "detached later", "data", "no_grad"],
)
def test_one_that_is_detached_is_meant(after: Any, dynamo: bool) -> None:
    assert told(lambda: step(Forces(after, retain_graph=True), both, dynamo)) == []


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("made", ["create_graph", "not read", "a step function of it"])
def test_nothing_is_said_where_nothing_is_lost(made: str, dynamo: bool) -> None:
    model, loss = {
        "create_graph": (Forces(create_graph=True), both),
        "not read": (Forces(retain_graph=True), energy),
        "a step function of it": (Forces(torch.sign, retain_graph=True), both),
    }[made]
    assert told(lambda: step(model, loss, dynamo)) == []


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_loss_of_them_alone_has_nothing_to_train(dynamo: bool) -> None:
    says = r"the loss depends on no trainable parameter(?s:.*)reads the gradient taken at .*test_cut:\d+ in module <root> without create_graph=True"
    with pytest.raises(ExportError, match=says + r"(?s:.*)way out: take it with create_graph=True$"):
        step(Forces(), forces, dynamo)


def test_a_loss_that_is_detached_has_nothing_to_train() -> None:
    with pytest.raises(ExportError, match=r"the loss depends on no trainable parameter.*detach\(\), torch.no_grad\(\)") as caught:
        step(Forces(), lambda found, reference: (found[0] - reference.sum()).detach(), True)
    assert "wrt" not in str(caught.value) and "create_graph" not in str(caught.value)


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_file_that_runs_is_not_warned_of_and_its_gradient_graph_is(dynamo: bool, tmp_path: Any) -> None:
    assert told(lambda: exporter.export(Forces(), (POSITIONS.clone(),), dynamo=dynamo).save(tmp_path / "forces.onnx")) == []
    (message,) = told(lambda: exporter.build_gradient_graph(tmp_path / "forces.onnx"))
    assert "is a constant to the gradient graph" in message and "test_cut:" in message
    outputs = exporter.build_gradient_graph(tmp_path / "forces.onnx").graph.outputs[:1]
    assert told(lambda: exporter.build_gradient_graph(tmp_path / "forces.onnx", outputs=[str(outputs[0].name)])) == []


def test_nothing_is_said_of_a_model_in_which_nothing_is_trained(tmp_path: Any) -> None:
    program = exporter.export(Forces().requires_grad_(False), (POSITIONS.clone(),))
    assert told(lambda: exporter.build_gradient_graph(program)) == []
    assert len(told(lambda: exporter.build_gradient_graph(program, wrt=["positions"]))) == 1


def test_a_comparison_with_eager_says_nothing() -> None:
    assert told(lambda: exporter.verify(Forces(retain_graph=True), (POSITIONS.clone(),))) == []


@pytest.mark.parametrize("dynamo", [True, False])
def test_what_is_detached_can_be_changed_in_place(dynamo: bool) -> None:
    def centered(g: torch.Tensor) -> torch.Tensor:
        f = g.detach()
        f -= f.mean(0)
        return f

    model = Forces(centered)
    program = exporter.export(model, (POSITIONS.clone(),), dynamo=dynamo)
    found = exporter.inference_session(program.model_proto).run(None, {"positions": POSITIONS.numpy()})
    torch.testing.assert_close(torch.from_numpy(found[1]), model(POSITIONS.clone())[1])


def test_what_a_damaged_file_says_does_no_harm() -> None:
    program = exporter.export(Forces(), (POSITIONS.clone(),))
    (mark,) = (node for node in program.model.graph if "pythonop.cut" in node.metadata_props)
    mark.metadata_props["pythonop.cut"] = "[]"
    (message,) = told(lambda: exporter.build_gradient_graph(program))
    assert "taken at a line unknown in module <root>" in message
