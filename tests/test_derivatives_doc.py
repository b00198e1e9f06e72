"""The recipes of docs/derivatives.md, run as they stand there and compared with eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import exporter
from exporter.files import trust
from tests import pages
from tests.exporter.training.loop import eager, run

SECTIONS = {block.section for block in pages.blocks("docs/derivatives.md") if block.language == "python"}


def recipe(title: str) -> dict[str, Any]:
    """What the code below a heading defines."""
    namespace: dict[str, Any] = {"__name__": __name__, "torch": torch, "exporter": exporter}
    exec("".join(pages.code("docs/derivatives.md", section=title)), namespace)
    return namespace


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(trust, "_objects", dict(trust._objects))
    monkeypatch.setattr(trust, "_names", dict(trust._names))


def assert_results(made: dict[str, Any], names: str, *args: torch.Tensor) -> None:
    results = made["model"](*(x.clone() for x in args))
    for name, want in zip(names.split(), results if isinstance(results, tuple) else (results,), strict=True):
        np.testing.assert_allclose(made[name], want.detach().numpy(), rtol=1e-4, atol=1e-5)


def assert_step(made: dict[str, Any], loss: Any, batch: tuple[torch.Tensor, ...], arguments: int, optimizer: Any) -> None:
    before = {name: parameter.detach().clone() for name, parameter in made["model"].named_parameters()}
    losses, state = run(made["step"], [batch] * 3)
    assert losses == pytest.approx(eager(made["model"], loss, optimizer, [batch] * 3, arguments=arguments), rel=1e-4)
    for name, parameter in made["model"].named_parameters():
        got = state.get(f"param.{name}", before[name].numpy())  # what the loss does not depend on is no state
        np.testing.assert_allclose(got, parameter.detach().numpy(), rtol=1e-3, atol=1e-4)


def test_energy_and_forces():
    made = recipe("Energy and forces")
    assert_results(made, "energy forces", made["positions"])
    more = torch.randn(9, 3)
    made["energy"], made["forces"] = made["session"].run(None, {"positions": more.numpy()})
    assert_results(made, "energy forces", more)
    optimizer = torch.optim.SGD(made["model"].parameters(), lr=0.1)
    assert_step(made, made["loss"], (made["positions"], made["reference"]), 1, optimizer)


def test_a_pinn():
    made = recipe("A PINN with second derivatives")
    optimizer = torch.optim.AdamW(made["model"].parameters(), lr=1e-2)
    assert_step(made, made["loss"], (made["t"], made["x"], made["known"], made["weight"]), 2, optimizer)
    trainer, more = exporter.Trainer(made["step"]), torch.rand(4, 13, 1)  # another number of points
    made["model"].load_state_dict(trainer.state_dict())
    expected = float(made["loss"](made["model"](*more[:2]), *more[2:]))
    assert trainer.step(dict(zip(("t", "x", "target_0", "target_1"), more))) == pytest.approx(expected, rel=1e-4)


def test_a_laplacian():
    made = recipe("A Laplacian")
    assert_results(made, "u laplacian", made["x"])
    traces = [torch.autograd.functional.hessian(lambda p: made["model"].net(p[None]).sum(), row).trace() for row in made["x"].detach()]
    np.testing.assert_allclose(made["laplacian"], torch.stack(traces).detach().numpy(), rtol=1e-4, atol=1e-5)
    more = torch.randn(5, 3)
    made["u"], made["laplacian"] = made["session"].run(None, {"x": more.numpy()})
    assert_results(made, "u laplacian", more)


def test_a_gradient_penalty():
    made = recipe("A gradient penalty (WGAN-GP)")
    optimizer = torch.optim.SGD(made["model"].parameters(), lr=0.1)
    assert_step(made, made["loss"], (made["real"], made["fake"], made["mixed"]), 2, optimizer)


def test_guidance():
    made = recipe("Guidance by a classifier")
    assert_results(made, "moved", made["x"], made["label"])


def test_a_jacobian():
    made = recipe("A Jacobian")
    assert_results(made, "y jacobian", made["x"])


def test_adapting_weights():
    made = recipe("Adapting weights (MAML)")
    args = made["x"], made["y"], made["query"]
    for runner in (made["model"], made["module"]):
        runner(*args).square().sum().backward()
    for one, other in zip(made["model"].parameters(), made["module"].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_hessian_vector_product():
    made = recipe("Hessian-vector products")
    energy, x = made["Energy"](), torch.tensor(made["x"], dtype=torch.float64)
    want = torch.autograd.functional.hvp(energy, x, torch.ones(4, dtype=torch.float64))[1]
    np.testing.assert_allclose(made["found"], want.numpy(), rtol=1e-6)


def test_loaded_modules():
    made = recipe("Loaded modules in torch.func")
    model, x = made["model"], made["x"].detach()

    def energy(x):
        return model(x).square().sum()

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    hessian = torch.func.hessian(energy)(x)
    torch.testing.assert_close(made["hessian"], hessian, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(made["times_ones"], hessian.sum((2, 3)), rtol=1e-3, atol=1e-5)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
    (gradient.norm(dim=-1) - 1).square().sum().backward()
    torch.testing.assert_close(made["x"].grad, leaf.grad, rtol=1e-3, atol=1e-5)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(made["parameters"], made["samples"])
    for name, value in each.items():
        torch.testing.assert_close(made["each"][name], value, rtol=1e-3, atol=1e-5)


def test_forward_mode(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = recipe("Forward mode")
    direction = torch.from_numpy(made["direction"])
    value, moved = torch.func.jvp(made["model"], (made["x"],), (direction,))
    for y, tangent in ((made["y"], made["moved"]), (made["value"].detach(), made["moved_again"].detach())):
        np.testing.assert_allclose(y, value.detach(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(tangent, moved.detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(made["difference"], moved.detach(), atol=1e-2)


def test_every_recipe_is_run():
    here = Path(__file__).read_text()
    assert SECTIONS
    for title in SECTIONS:
        assert f'recipe("{title}")' in here, title
