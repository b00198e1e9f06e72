"""Operators between functions, states, complex layers (with complex parameters), decompositions and sums over lattices."""

from __future__ import annotations

import torch
from torch import nn

from tests.end_to_end.opaque_models.rows import Net, imported, row


@row(
    "neuraloperator",
    "a Fourier neural operator: its weights are complex",
    module="neuralop",
    opaque=["neuralop.layers.spectral_convolution:SpectralConv"],
)
def fno():
    model = imported("neuralop.models").FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=4, n_layers=2)
    return model, (torch.randn(2, 1, 8, 8),)


@row("s5-pytorch", "a diagonal state space: complex eigenvalues, an associative scan", module="s5", opaque=["s5.s5_model:S5"])
def s5():
    model = imported("s5").S5(4, 8)
    return Net(lambda net, x: net.last(net.states(x)), states=model, last=nn.Linear(4, 2)), (torch.randn(2, 6, 4),)


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        layers = imported("complexPyTorch.complexLayers")
        self.first, self.norm, self.last = layers.ComplexLinear(4, 6), layers.ComplexBatchNorm1d(6), layers.ComplexLinear(6, 2)

    def forward(self, x):
        relu = imported("complexPyTorch.complexFunctions").complex_relu
        return self.last(relu(self.norm(self.first(torch.fft.fft(x))))).abs()


@row("complexPyTorch", "complex layers and their batch norm, on a spectrum", opaque=["Turned"])
def turned():
    return Net(lambda net, x: net.turned(net.first(x)), first=nn.Linear(3, 4), turned=Turned()).eval(), (torch.randn(5, 3),)


class Sphere(nn.Module):
    def __init__(self):
        super().__init__()
        harmonics = imported("torch_harmonics")
        self.there, self.back = harmonics.RealSHT(8, 16, lmax=4, mmax=4), harmonics.InverseRealSHT(8, 16, lmax=4, mmax=4)
        self.filter = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x):
        return self.back(self.there(x) * self.filter)


@row("torch-harmonics", "a filter on the sphere, learnt in spherical harmonics", module="torch_harmonics", opaque=["Sphere"])
def sphere():
    return Net(lambda net, x: net.sphere(net.first(x)), first=nn.Linear(16, 16), sphere=Sphere()), (torch.randn(2, 8, 16),)


class Factors(nn.Module):
    def forward(self, x):
        tensorly = imported("tensorly")
        with tensorly.backend_context("pytorch"):
            return tensorly.tucker_to_tensor(imported("tensorly.decomposition").tucker(x, rank=[2, 2, 2], n_iter_max=3))


@row("tensorly", "a Tucker decomposition of rank two", opaque=["Factors"])
def tucker():
    return Net(lambda net, x: net.factors(net.first(x)), first=nn.Linear(3, 4), factors=Factors()), (torch.randn(3, 4, 3),)


class Ewald(nn.Module):
    def __init__(self):
        super().__init__()
        torchpme = imported("torchpme")
        self.sum = torchpme.EwaldCalculator(torchpme.CoulombPotential(smearing=0.5), lr_wavelength=0.5)
        self.register_buffer("cell", torch.eye(3) * 3)

    def forward(self, charges, positions):
        pairs = torch.combinations(torch.arange(len(positions)))
        distances = (positions[pairs[:, 0]] - positions[pairs[:, 1]]).norm(dim=1)
        return self.sum(charges, self.cell, positions, pairs, distances)


@row("torch-pme", "an Ewald sum of charges in a periodic cell", module="torchpme", opaque=["Ewald"])
def ewald():
    return Net(lambda net, x: net.ewald(net.charges(x), x), charges=nn.Linear(3, 1), ewald=Ewald()), (torch.rand(4, 3) * 2,)
