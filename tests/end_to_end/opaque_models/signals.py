"""Signals, spectra, complex layers, fields, molecules, sequences and losses."""

from __future__ import annotations

import torch
from torch import nn

from tests.end_to_end.opaque_models.rows import Net, imported, row


@row("fast-bss-eval", "SDR: a filter of 16 taps by a Toeplitz system", module="fast_bss_eval", opaque=["Sdr"])
def bss_sdr():
    return Net(lambda net, x, y: net.sdr(net.first(x), y), first=nn.Conv1d(1, 1, 5, padding=2), sdr=Sdr()), (
        torch.randn(1, 1, 200),
        torch.randn(1, 1, 200),
    )


class Sdr(nn.Module):
    def forward(self, estimate, target):
        return imported("fast_bss_eval").sdr_loss(estimate.squeeze(1), target.squeeze(1), filter_length=16)


class RadialBasis(nn.Module):
    def forward(self, points, values, where):
        return imported("torchrbf").RBFInterpolator(points, values, smoothing=0.1, kernel="gaussian", epsilon=1.0)(where)


@row("torchrbf", "radial basis functions through points", opaque=["RadialBasis"])
def rbf():
    return Net(lambda net, x, y, z: net.rbf(x, net.first(y), z), first=nn.Linear(2, 2), rbf=RadialBasis()), (
        torch.randn(6, 2),
        torch.randn(6, 2),
        torch.randn(4, 2),
    )


class Kalman(nn.Module):
    def __init__(self):
        super().__init__()
        self.process = nn.Parameter(torch.tensor([[1.0, 0.1], [0.0, 1.0]]))
        self.register_buffer("measure", torch.tensor([[1.0, 0.0]]))

    def forward(self, x):
        kf = imported("torch_kf")
        kalman = kf.KalmanFilter(self.process, self.measure, torch.eye(2) * 0.1, torch.eye(1) * 0.2)
        state = kf.GaussianState(x.new_zeros(2, 1), torch.eye(2))
        for each in x:
            state = kalman.update(kalman.predict(state), each[:, None])
        return state.mean


@row("torch-kf", "a Kalman filter with a process that is learnt", module="torch_kf")
def kalman():
    return Net(lambda net, x: net.filter(net.first(x)), first=nn.Linear(2, 1), filter=Kalman()), (torch.randn(4, 2),)


@row("torchani", "atomic environments of ANI-2x", opaque=["torchani.aev._computer:AEVComputer"])
def ani():
    species = torch.tensor([[0, 1, 1]])
    aev = imported("torchani").AEVComputer.like_2x(num_species=2)
    return Net(lambda net, x: net.last(net.aev(species, x)), aev=aev, last=nn.Linear(aev.out_dim, 1)), (torch.randn(1, 3, 3),)


@row("dagma", "a structure of causes: a log-determinant keeps it without cycles")
def dagma():
    model = imported("dagma.nonlinear").DagmaMLP([3, 4, 1], bias=True, dtype=torch.float32)
    with torch.no_grad():
        model.fc1.weight.normal_(0, 0.1)
    return Net(lambda net, x: (net.dag(x), net.dag.h_func(1.0)), dag=model), (torch.randn(4, 3),)


@row("torchsurv", "Cox's likelihood with ties", opaque=["Cox"])
def cox():
    # Without a bias: the likelihood does not change with it, and its gradient is rounding alone.
    return Net(lambda net, x, e, t: net.cox(net.first(x).squeeze(1), e, t), first=nn.Linear(3, 1, bias=False), cox=Cox()), (
        torch.randn(6, 3),
        torch.tensor([1, 0, 1, 1, 0, 1]).bool(),
        torch.tensor([1.0, 2.0, 2.0, 2.0, 3.0, 4.0]),
    )


class Cox(nn.Module):
    def forward(self, hazard, event, time):
        return imported("torchsurv.loss.cox").neg_partial_log_likelihood(hazard, event, time)


@row("pysdtw", "soft dynamic time warping by numba", opaque=["Warps"])
def sdtw():
    return Net(lambda net, x, y: net.warp(net.first(x), y), first=nn.Linear(2, 2), warp=Warps()), (
        torch.randn(2, 5, 2),
        torch.randn(2, 4, 2),
    )


class Warps(nn.Module):
    def forward(self, x, y):
        return imported("pysdtw").SoftDTW(gamma=1.0, use_cuda=False)(x, y)


@row(
    "pytorch-metric-learning",
    "hard triplets, mined in the batch",
    module="pytorch_metric_learning",
    opaque=["pytorch_metric_learning.losses.triplet_margin_loss:TripletMarginLoss"],
)
def metric():
    loss = imported("pytorch_metric_learning.losses").TripletMarginLoss()
    return Net(lambda net, x, y: net.loss(net.first(x), y), first=nn.Linear(3, 2), loss=loss), (
        torch.randn(6, 3),
        torch.tensor([0, 0, 1, 1, 2, 2]),
    )


class Nufft(nn.Module):
    def forward(self, x, k):
        return torch.view_as_real(imported("torchkbnufft").KbNufft(im_size=(8, 8))(x.to(torch.complex64), k))


@row("torchkbnufft", "a non-uniform FFT by interpolation", opaque=["Nufft"])
def nufft():
    return Net(lambda net, x, k: net.nufft(net.first(x), k), first=nn.Linear(8, 8), nufft=Nufft()), (
        torch.randn(1, 1, 8, 8),
        torch.rand(2, 12),
    )


class Scattered(nn.Module):
    def forward(self, x, k):
        return torch.view_as_real(imported("pytorch_finufft.functional").finufft_type2(k, x.to(torch.complex64)))


@row("pytorch-finufft", "a non-uniform FFT in C++", module="pytorch_finufft", opaque=["Scattered"])
def finufft():
    return Net(lambda net, x, k: net.nufft(net.first(x), k), first=nn.Linear(8, 8), nufft=Scattered()), (
        torch.randn(6, 8),
        torch.rand(2, 12),
    )


class Distortion(nn.Module):
    def forward(self, x, y):
        return imported("torchmetrics.functional.audio").signal_distortion_ratio(x, y, filter_length=8)


@row("torchmetrics", "signal-to-distortion ratio, by a Toeplitz system", opaque=["Distortion"])
def torchmetrics():
    return Net(lambda net, x, y: net.ratio(net.first(x), y), first=nn.Linear(64, 64), ratio=Distortion()), (
        torch.randn(1, 64),
        torch.randn(1, 64),
    )
