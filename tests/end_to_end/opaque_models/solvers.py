"""Solvers, optimisation layers, geometry, transport and clustering."""

from __future__ import annotations

import torch
from torch import nn

from tests.end_to_end.opaque_models.rows import Net, imported, row


class CdeFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, t, z):
        return self.linear(z).tanh().view(*z.shape[:-1], 4, 2)


class ControlledEquation(nn.Module):
    def __init__(self):
        super().__init__()
        self.func = CdeFunc()

    def forward(self, x, z):
        torchcde = imported("torchcde")
        path = torchcde.CubicSpline(torchcde.hermite_cubic_coefficients_with_backward_differences(x))
        return torchcde.cdeint(X=path, func=self.func, z0=z, t=path.interval, rtol=1e-6, atol=1e-8)


@row("torchcde", "a neural controlled differential equation, adaptive, by its adjoint", opaque=["ControlledEquation"], loose=2e-3)
def torchcde_cdeint():
    return Net(
        lambda net, x: net.last(net.cde(x, net.first(x[:, 0]))[:, -1]),
        first=nn.Linear(2, 4),
        cde=ControlledEquation(),
        last=nn.Linear(4, 1),
    ), (torch.randn(2, 6, 2),)


class QuadraticProgram(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.randn(4, 3))
        self.register_buffer("h", torch.ones(4))

    def forward(self, p):
        none = torch.empty(0, dtype=p.dtype)
        return imported("qpth.qp").QPFunction(verbose=-1)(torch.eye(3, dtype=p.dtype), p, self.g, self.h, none, none)


@row("qpth", "an OptNet layer: a quadratic program by interior points", opaque=["QuadraticProgram"])
def qpth_optnet():
    return Net(lambda net, x: net.qp(net.first(x)), first=nn.Linear(5, 3), qp=QuadraticProgram()).double(), (torch.randn(2, 5).double(),)


class FixedPoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        with torch.no_grad():
            self.inner.weight.mul_(0.5)

    def forward(self, x):
        deq = imported("torchdeq").get_deq(f_solver="anderson", f_max_iter=60, f_tol=1e-7, b_max_iter=60, b_tol=1e-7)
        z, _ = deq(lambda z: torch.tanh(self.inner(z) + x), torch.zeros_like(x))
        return z[-1]


@row("torchdeq", "a deep equilibrium by Anderson's iterations, with its implicit gradient", opaque=["FixedPoint"])
def torchdeq_anderson():
    return Net(lambda net, x: net.deq(net.first(x)), first=nn.Linear(5, 4), deq=FixedPoint()), (torch.randn(2, 5),)


class Adapts(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, support, target, query):
        torchopt = imported("torchopt")
        optimizer = torchopt.MetaSGD(self.net, lr=0.1)
        state = torchopt.extract_state_dict(self.net, by="reference"), torchopt.extract_state_dict(optimizer, by="reference")
        with torch.enable_grad():
            for _ in range(2):
                optimizer.step(nn.functional.mse_loss(self.net(support), target))
        result = self.net(query)
        torchopt.recover_state_dict(self.net, state[0])
        return result


@row("torchopt", "MAML: two differentiable steps of SGD in forward", opaque=["Adapts"])
def torchopt_maml():
    return Net(lambda net, *a: net.adapts(*a) * 2, adapts=Adapts()), (torch.randn(4, 3), torch.randn(4, 1), torch.randn(2, 3))


class AdaptsHigher(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, support, target, query):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        with torch.enable_grad(), imported("higher").innerloop_ctx(self.net, optimizer, copy_initial_weights=False) as (net, inner):
            for _ in range(2):
                inner.step(nn.functional.mse_loss(net(support), target))
            return net(query)


@row("higher", "MAML: two unrolled steps of SGD in forward", opaque=["AdaptsHigher"])
def higher_maml():
    return Net(lambda net, *a: net.adapts(*a) * 2, adapts=AdaptsHigher()), (torch.randn(4, 3), torch.randn(4, 1), torch.randn(2, 3))


@row("roma", "rotations from matrices by orthogonal Procrustes (a Function over an SVD)")
def roma_procrustes():
    roma = imported("roma")
    return Net(lambda net, x: roma.special_procrustes(net.first(x).view(-1, 3, 3)), first=nn.Linear(5, 9)), (torch.randn(2, 5),)


class Minimizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        a = self.inner.weight @ self.inner.weight.T + torch.eye(3, dtype=x.dtype)
        minimum = (
            imported("torchmin")
            .minimize(lambda z: 0.5 * z @ a.detach() @ z - (x.detach() * z).sum(), torch.zeros_like(x).detach(), method="bfgs", tol=1e-10)
            .x
        )
        return minimum + torch.linalg.solve(a, x - a @ minimum)


@row("pytorch-minimize", "a minimum by BFGS, and one Newton step for its gradient", module="torchmin", opaque=["Minimizes"])
def torchmin_bfgs():
    return Net(lambda net, x: net.minimum(net.first(x)), first=nn.Linear(5, 3), minimum=Minimizes()).double(), (torch.randn(5).double(),)


class Equilibrium(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        with torch.no_grad():
            self.inner.weight.mul_(0.5)

    def forward(self, x):
        weight, bias = self.inner.weight, self.inner.bias
        return imported("xitorch.optimize").equilibrium(
            lambda z, w, b, c: torch.tanh(z @ w.T + b + c), torch.zeros_like(x), params=(weight, bias, x), f_tol=1e-9
        )


@row("xitorch", "a fixed point by Broyden's method, with its implicit gradient", opaque=["Equilibrium"])
def xitorch_equilibrium():
    return Net(lambda net, x: net.inner(net.first(x)), first=nn.Linear(5, 3), inner=Equilibrium()).double(), (torch.randn(2, 5).double(),)


class Box(nn.Module):
    def forward(self, x):
        cp, layer = imported("cvxpy"), imported("cvxpylayers.torch").CvxpyLayer
        y, p = cp.Variable(3), cp.Parameter(3)
        problem = cp.Problem(cp.Minimize(cp.sum_squares(y - p)), [cp.sum(y) == 1, y >= 0])
        return layer(problem, parameters=[p], variables=[y])(x)[0]


@row("cvxpylayers", "a projection onto the simplex as a convex program", opaque=["Box"], loose=1e-8)
def cvxpylayers_simplex():
    return Net(lambda net, x: net.box(net.first(x)), first=nn.Linear(5, 3), box=Box()).double(), (torch.randn(2, 5).double(),)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.tensor([4.0, 1.0, 1.0, 5.0, 6.0]))
        self.register_buffer("places", torch.tensor([[0, 0, 1, 1, 2], [0, 1, 0, 1, 2]]))

    def forward(self, x):
        matrix = torch.sparse_coo_tensor(self.places, self.values, (3, 3)).coalesce()
        return imported("torchsparsegradutils").sparse_generic_solve(matrix, x.T)


@row("torchsparsegradutils", "a sparse system by conjugate gradients", opaque=["Sparse"])
def sparse():
    return Net(lambda net, x: net.sparse(net.first(x)), first=nn.Linear(4, 3), sparse=Sparse()), (torch.randn(2, 4),)


class Rounds(nn.Module):
    def forward(self, x):
        return imported("tntorch").Tensor(x, ranks_tt=2).torch()


@row("tntorch", "a tensor rounded to rank two", opaque=["Rounds"])
def tntorch():
    return Net(lambda net, x: net.rounds(net.first(x)), first=nn.Linear(3, 4), rounds=Rounds()), (torch.randn(3, 4, 3),)


def _positive(x: torch.Tensor) -> torch.Tensor:
    a = x.view(-1, 3, 3)
    return a @ a.transpose(1, 2) + torch.diag(torch.tensor([1.0, 2.0, 3.0]))


class Distance(nn.Module):
    def forward(self, x, y):
        return imported("geoopt").SymmetricPositiveDefinite().dist(x, y)


@row("geoopt", "a distance of positive definite matrices, by eigenvalues", opaque=["Distance"])
def geoopt():
    def body(net, x):
        return net.distance(_positive(net.first(x)), torch.eye(3).expand(2, 3, 3) * 2)

    return Net(body, first=nn.Linear(4, 9), distance=Distance()), (torch.randn(2, 4),)


class Bures(nn.Module):
    def forward(self, x, m):
        return imported("ot.gaussian").bures_wasserstein_distance(x[0, :3], x[1, :3], m[0], m[1])


@row("POT", "Bures-Wasserstein distance of Gaussians, by matrix roots", module="ot", opaque=["Bures"])
def pot():
    return Net(lambda net, x: net.bures(x, _positive(net.first(x))), first=nn.Linear(4, 9), bures=Bures()), (torch.randn(2, 4),)
