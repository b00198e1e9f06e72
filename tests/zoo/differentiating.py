"""Models that take gradients in their forward, in float64: force fields, PINNs, guidance, MAML, and one of each way that torch has."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from symbolics.errors import PythonopWarning
from tests.zoo.functions import SavesInput

F64 = torch.float64


class Net(nn.Module):
    """A small network; what is made of it differs."""

    def __init__(self, features: int = 3, outputs: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(features, 6), nn.Tanh(), nn.Linear(6, outputs)).double()

    def args(self) -> tuple[torch.Tensor, ...]:
        return (torch.randn(4, 3, dtype=F64),)

    def scalar(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().sum()


class Forces(Net):
    """Energy and forces."""

    def forward(self, x):
        x.requires_grad_(True)
        energy = self.net(x).sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, -gradient


class MessagePassing(nn.Module):
    """As SchNet: distances, radial functions, filters, messages, forces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 8)
        self.filters = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 8))
        self.out = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))
        self.register_buffer("centers", torch.linspace(0, 3, 6))
        self.double()

    def args(self):
        return torch.randn(4, 3, dtype=F64), torch.tensor([1, 2, 3, 1]), torch.tensor([[0, 0, 1, 2, 3, 1], [1, 2, 0, 0, 1, 3]])

    def forward(self, positions, kinds, edges):
        positions.requires_grad_(True)
        i, j = edges
        distances = (positions[i] - positions[j]).norm(dim=-1)
        radial = torch.exp(-((distances[:, None] - self.centers) ** 2))
        h = self.embedding(kinds)
        h = h + torch.zeros_like(h).index_add(0, i, h[j] * self.filters(radial))
        energy = self.out(h).sum()
        return energy, -torch.autograd.grad(energy, positions, create_graph=True)[0]


class Residual(Net):
    """The residual of a differential equation: u_t - 0.1 u_xx, two inputs differentiated, one of them twice."""

    def __init__(self) -> None:
        super().__init__(2)

    def args(self):
        return torch.randn(5, 1, dtype=F64), torch.randn(5, 1, dtype=F64)

    def forward(self, t, x):
        t.requires_grad_(True)
        x.requires_grad_(True)
        u = self.net(torch.cat([t, x], 1))
        u_t, u_x = torch.autograd.grad(u, (t, x), torch.ones_like(u), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)
        return u, u_t - 0.1 * u_xx


class Guidance(Net):
    """A step of a sampler that a classifier guides: the gradient of a detached input, and none flows through it."""

    def forward(self, x):
        z = x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.net(z).sigmoid().log().sum(), z)
        return x - 0.1 * gradient * self.net(x)


class Adapted(Net):
    """MAML: two steps on a support set, then the query."""

    def args(self):
        return torch.randn(4, 3, dtype=F64), torch.randn(4, 1, dtype=F64), torch.randn(2, 3, dtype=F64)

    def forward(self, x, y, query):
        weights = dict(self.net.named_parameters())
        for _ in range(2):
            loss = (torch.func.functional_call(self.net, weights, (x,)) - y).square().mean()
            found = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), found, strict=True)}
        return torch.func.functional_call(self.net, weights, (query,))


class Thrice(Net):
    """A gradient of a gradient of a gradient."""

    def forward(self, x):
        g = lambda f: lambda z: (torch.func.grad(f)(z) * z).sum()  # noqa: E731
        return torch.func.grad(g(g(self.scalar)))(x)


class ClosesOver(Net):
    """What is differentiated closes over the very tensor that is differentiated with respect to: that is held fixed."""

    def forward(self, x):
        return torch.func.grad_and_value(lambda z: self.scalar(z) + (z * x).sum())(x)


class Pulled(Net):
    def forward(self, x):
        y, pull = torch.func.vjp(self.net, x)
        return y, pull(2 * y)[0]


class Pushed(Net):
    def forward(self, x):
        return torch.func.jvp(self.net, (x,), (2 * x,))


class Matrices(Net):
    """Jacobians and a Hessian."""

    def __init__(self) -> None:
        super().__init__(3, 2)

    def args(self):
        return (torch.randn(3, dtype=F64),)

    def forward(self, x):
        return torch.func.jacrev(self.net)(x), torch.func.jacfwd(self.net)(x), torch.func.hessian(self.scalar)(x)


class Functional(Matrices):
    """torch.autograd.functional."""

    def forward(self, x):
        a = torch.autograd.functional
        return (
            a.jacobian(self.net, x, create_graph=True),
            a.hessian(self.scalar, x, create_graph=True),
            a.jvp(self.net, x, x, create_graph=True)[1],
        )


class Backward(Net):
    """backward() and .grad, twice: the second adds to the first."""

    def forward(self, x):
        z = x.detach().requires_grad_(True)
        self.scalar(z).backward(inputs=[z])
        first = z.grad.clone()
        self.net(z).sum().backward(inputs=[z])
        return x * z.grad, first * x


class BackwardOfInput(Net):
    """backward() of a model's input, and gradients flow on."""

    def forward(self, x):
        x.requires_grad_(True)
        with warnings.catch_warnings():  # the parameters have a .grad, too
            warnings.simplefilter("ignore", PythonopWarning)
            warnings.simplefilter("ignore", UserWarning)
            self.scalar(x).backward(create_graph=True)
        return x.grad * 2


class Copied(Net):
    """With respect to a copy: the original is another tensor, though its values are the same."""

    def forward(self, x):
        x.requires_grad_(True)
        z = x.clone()
        (gradient,) = torch.autograd.grad((self.net(z) * x.sum(1, keepdim=True)).sum(), z, create_graph=True)
        return gradient


class Unused(Net):
    """None for what is not used, zeros where that was asked for."""

    def forward(self, x):
        x.requires_grad_(True)
        other = torch.zeros(2, dtype=F64, requires_grad=True)
        energy = self.net(x).sum()
        gradient, nothing = torch.autograd.grad(energy, (x, other), create_graph=True, allow_unused=True)
        assert nothing is None
        (zeros,) = torch.autograd.grad(energy, (other,), materialize_grads=True, retain_graph=True)
        return gradient, zeros + x.sum()


class FlatGradient(Net):
    """The gradient of a linear function is constant: eager has None for its gradient, where the graph alone would not tell."""

    def forward(self, x):
        x.requires_grad_(True)
        energy = self.net[0](x).sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), x, create_graph=True, allow_unused=True)
        assert second is None
        return gradient, energy


class Rounded(Net):
    """Through what is flat the gradient is zero."""

    def forward(self, x):
        x.requires_grad_(True)
        (gradient,) = torch.autograd.grad((x.round() * self.net(x.detach())).sum(), x, create_graph=True)
        return gradient + self.net(x)


class Unwatched(Net):
    """torch.func.grad works under no_grad, and no gradient flows through what it gives."""

    def forward(self, x):
        with torch.no_grad():
            gradient = torch.func.grad(self.scalar)(x)
        return x * gradient


class Changed(Net):
    """A change in place before the gradient is taken, and one of the gradient."""

    def forward(self, x):
        x = x * 1.0
        h = self.net(x)
        h.mul_(x.sum(1, keepdim=True))
        (gradient,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        gradient.add_(x)
        return gradient


class Recurrent(nn.Module):
    """Through the recurrence of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(3, 4, batch_first=True).double()

    def args(self):
        return (torch.randn(2, 5, 3, dtype=F64),)

    def forward(self, x):
        x.requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.lstm(x)[0].square().sum(), x, create_graph=True)
        return gradient


class CustomEnergy(Net):
    """An autograd Function with a backward of its own in the energy; nothing flows through the forces."""

    def forward(self, x):
        x.requires_grad_(True)
        (gradient,) = torch.autograd.grad(SavesInput.apply(self.net(x)).sum(), x)
        return x - gradient * x


class CustomForces(Net):
    """The same, and gradients flow."""

    def forward(self, x):
        x.requires_grad_(True)
        energy = SavesInput.apply(self.net(x)).sum()
        return energy, torch.autograd.grad(energy, x, create_graph=True)[0]


class CustomHessian(Net):
    """Two orders through a Function, one after the other."""

    def forward(self, x):
        x.requires_grad_(True)
        return torch.autograd.functional.hessian(lambda z: SavesInput.apply(self.net(z)).sum(), x[0], create_graph=True).sum(0)


def doubled(g: torch.Tensor) -> torch.Tensor:
    return 2 * g


class Hooked(Net):
    """A hook on the tensor that is differentiated with respect to, and on one on the way."""

    def forward(self, x):
        x = x * 1.0
        h = self.net[0](x)
        h.register_hook(doubled)
        x.register_hook(doubled)
        return torch.autograd.grad(self.net[2](h.tanh()).sum(), x)[0]


#: Those whose file is compared with eager: outputs, and the gradients of parameters and inputs.
MODELS: tuple[type[nn.Module], ...] = (
    Forces, MessagePassing, Residual, Guidance, Adapted, Thrice, ClosesOver, Pulled, Pushed, Matrices, Functional, Backward,
    Copied, Unused, FlatGradient, Rounded, Unwatched, Changed, Recurrent,
)  # fmt: skip


def setup() -> None:
    """For a fresh process: everything here can be imported."""
