"""Packages from PyPI that run on a CPU and call Function.apply in ordinary use, each as it is used."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.end_to_end.functions.case import CASES, case

__all__ = ["PACKAGES", "Package", "allowed"]


@dataclass(frozen=True)
class Package:
    """One habit of one package.

    Attributes:
        row: Its model, by the name of a case.
        module: What has to be importable.
        what: What is called.
        needs: What a user has to do, for docs/wild.md.
        dynamo, torchscript: Expected outcomes, as in tests/end_to_end/functions/rows.toml.
        says: What the error or warning has to match where the outcome is not "works".
        operators: Entries of the allow list for operators that the package registers.
    """

    row: str
    module: str
    what: str
    needs: str
    dynamo: str = "works"
    torchscript: str = "works"
    says: str = ""
    operators: tuple[str, ...] = ()


def allowed(package: Package) -> list[str]:
    """The allow list of a package's files."""
    return [f"{package.module.split('.')[0]}.*", "tests.end_to_end.wild.*:*", *package.operators]


def _kernel(name: str) -> Any:
    kernel = getattr(importlib.import_module("gpytorch.kernels"), name)()
    kernel.initialize(lengthscale=0.7)
    return kernel


def _surrogate(name: str) -> Any:
    return getattr(importlib.import_module("spikingjelly.activation_based.surrogate"), name)()


@case()
def entmax15(m, x):
    return importlib.import_module("entmax").entmax15(x * m.weight, dim=-1)


@case()
def sparsemax(m, x):
    return importlib.import_module("entmax").sparsemax(x * m.weight, dim=-1)


@case()
def entmax_bisect(m, x):
    return importlib.import_module("entmax").entmax_bisect(x * m.weight, alpha=1.3)


@case(state=lambda: {"neuron": importlib.import_module("snntorch").Leaky(beta=0.9)})
def snntorch_leaky(m, x):
    memory, spikes = torch.zeros_like(x), []
    for _ in range(3):
        spike, memory = m.neuron(x * m.weight, memory)
        spikes.append(spike)
    return torch.stack(spikes), memory


@case(state=lambda: {"spike": _surrogate("ATan")})
def spikingjelly_atan(m, x):
    return m.spike(x * m.weight)


@case(state=lambda: {"spike": _surrogate("Sigmoid")})
def spikingjelly_sigmoid(m, x):
    return m.spike(x * m.weight)


@case(state=lambda: {"spike": _surrogate("PiecewiseLeakyReLU")})
def spikingjelly_leaky(m, x):
    return m.spike(x * m.weight)


def _lif() -> Any:
    return importlib.import_module("spikingjelly.activation_based.neuron").LIFNode(step_mode="m", detach_reset=False)


@case(state=lambda: {"neuron": _lif()}, applies=1)  # the operator is one node, however often it calls the Function
def spikingjelly_lif(m, x):
    importlib.import_module("spikingjelly.activation_based.functional").reset_net(m)
    return m.neuron(torch.stack([x * m.weight, x + m.weight, x]))


def _quantized() -> Any:
    layers = importlib.import_module("brevitas.nn")
    return nn.Sequential(layers.QuantLinear(4, 4, bias=True, weight_bit_width=4), layers.QuantReLU(bit_width=4))


@case(state=lambda: {"layers": _quantized()})
def brevitas_layers(m, x):
    return m.layers.eval()(x * m.weight)  # training, it takes percentiles, which ONNX has not


@case()
def gpytorch_log_normal_cdf(m, x):
    return importlib.import_module("gpytorch.functions").log_normal_cdf(x * m.weight)


@case(state=lambda: {"kernel": _kernel("RBFKernel")}, loose=1e-4)
def gpytorch_rbf(m, x):
    return m.kernel(x.detach(), x[:2].detach()).to_dense() * m.weight[:2]  # its Function is for inputs that need no gradient


@case(state=lambda: {"kernel": _kernel("MaternKernel")}, loose=1e-4)
def gpytorch_matern(m, x):
    return m.kernel(x.detach(), x[:2].detach()).to_dense() * m.weight[:2]  # its Function is for inputs that need no gradient


@case()
def linear_operator_solve(m, x):
    operator = importlib.import_module("linear_operator").to_linear_operator(x.T @ x + 4 * torch.eye(4))
    return operator.solve((m.weight * x).T)


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, t, y):
        return torch.tanh(self.linear(y))


@case(state=lambda: {"slope": Slope()}, loose=5e-3)
def torchdiffeq_adjoint(m, x):
    odeint = importlib.import_module("torchdiffeq").odeint_adjoint
    return odeint(m.slope, x * m.weight, torch.linspace(0, 1, 5), method="rk4")[-1]


class Stochastic(nn.Module):
    noise_type, sde_type = "diagonal", "stratonovich"

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def f(self, t, y):
        return torch.tanh(self.linear(y))

    def g(self, t, y):
        return 0.1 * y


@case(state=lambda: {"sde": Stochastic()})
def torchsde_adjoint(m, x):
    torchsde = importlib.import_module("torchsde")
    ts = torch.tensor([0.0, 0.5])
    return torchsde.sdeint_adjoint(m.sde, x * m.weight, ts, method="midpoint", dt=0.25)[-1]


_INLINE = (
    "inline=['gpytorch.*'], because its Function takes a lambda over the kernel module; nothing if you do not need the kernel's gradients"
)
_SHAPE = "dynamo=False, because the library branches on values, which torch.export cannot trace"
PACKAGES = [
    Package("entmax15", "entmax", "entmax15", "nothing"),
    Package("sparsemax", "entmax", "sparsemax", "nothing"),
    Package("entmax_bisect", "entmax", "entmax_bisect", "nothing"),
    Package("snntorch_leaky", "snntorch", "Leaky over three time steps", "nothing"),
    Package("spikingjelly_atan", "spikingjelly", "surrogate.ATan", "nothing"),
    Package("spikingjelly_sigmoid", "spikingjelly", "surrogate.Sigmoid", "nothing"),
    Package("spikingjelly_leaky", "spikingjelly", "surrogate.PiecewiseLeakyReLU", "nothing"),
    Package(
        "spikingjelly_lif",
        "spikingjelly",
        "LIFNode over three time steps; its operator sj_lif calls the Function",
        "allow=['spikingjelly.*', 'sj_lif::*'], because the file names the operator as well",
        operators=("sj_lif::*",),
    ),
    Package(
        "brevitas_layers",
        "brevitas",
        "QuantLinear and QuantReLU; under torch.jit they do not call their Functions",
        "nothing; with dynamo=False a warning says that pythonop told the model that it runs in eager mode",
        torchscript="warned",
        says="^$|goes around it",
    ),
    Package("gpytorch_log_normal_cdf", "gpytorch", "functions.log_normal_cdf", "nothing"),
    Package(
        "gpytorch_rbf",
        "gpytorch",
        "kernels.RBFKernel",
        _INLINE,
        "torch",
        "refused",
        "aten.equal|RBFCovariance.*argument 3 is a function over the RBFKernel.*inline=",
    ),
    Package(
        "gpytorch_matern",
        "gpytorch",
        "kernels.MaternKernel",
        "does not work: its Function takes a lambda over the kernel module, and with inline= its gradient at equal points is NaN",
        "torch",
        "refused",
        "aten.equal|MaternCovariance.*function over the MaternKernel.*inline=",
    ),
    Package(
        "linear_operator_solve",
        "linear_operator",
        "solve",
        "another decomposition: ONNX has no Cholesky",
        "torch",
        "torch",
        "data-dependent|linalg_cholesky",
    ),
    Package(
        "torchdiffeq_adjoint",
        "torchdiffeq",
        "odeint_adjoint(method='rk4')",
        _SHAPE,
        "torch",
        "inlined",
        "data-dependent|argument 1 holds trainable parameters",
    ),
    Package(
        "torchsde_adjoint",
        "torchsde",
        "sdeint_adjoint",
        "does not work: its random generators are Python objects",
        "torch",
        "torch",
        "data-dependent|unordered_map|Generator",
    ),
]
assert all(package.row in CASES for package in PACKAGES)
