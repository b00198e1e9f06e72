"""Small models, each with a part that no exporter of torch takes: it stops there, or keeps what came of the example."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import heapq
import threading

import numpy as np
import torch
from torch import nn

__all__ = ["PARTS", "Net"]


class Net(nn.Module):
    """A part between layers that every exporter takes."""

    def __init__(self, part):
        super().__init__()
        self.first, self.part = nn.Linear(4, 4), part

    def forward(self, x):
        y = self.part(self.first(x).tanh())
        return tuple(each * 2 for each in y) if isinstance(y, tuple) else y * 2


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Branch(Part):
    def forward(self, x):
        y = self.linear(x)
        return y * 2 if y.sum() > 0 else y - 1


class UntilSmall(Part):
    def forward(self, x):
        y, count = self.linear(x).tanh(), 0
        while float(y.detach().abs().max()) > 0.1 and count < 20:
            y, count = y * 0.7, count + 1
        return y


class InNumpy(Part):
    def forward(self, x):
        order = np.argsort(np.frombuffer(memoryview(x.detach().numpy().sum(1)), np.float32))
        return self.linear(x)[torch.from_numpy(order.copy())]


class Rows(Part):
    """A generator over rows, each its own way."""

    def rows(self, x):
        for row in x:
            if row.sum() > 0:
                yield self.linear(row)
            else:
                yield row

    def forward(self, x):
        return torch.stack(list(self.rows(x)))


class Table(Part):
    """A dict chooses."""

    def __init__(self):
        super().__init__()
        self.scales = {True: 2.0, False: 0.5}

    def forward(self, x):
        return self.linear(x) * self.scales[x.mean().item() > 0]


@dataclasses.dataclass
class Moments:
    mean: torch.Tensor
    spread: torch.Tensor


class InnerMoments(Part):
    def forward(self, x):
        y = self.linear(x)
        return Moments(y.mean(0), y.var(0) if bool(y.var() > 0.01) else y.abs().mean(0))


class DataclassResult(nn.Module):
    def __init__(self):
        super().__init__()
        self.moments = InnerMoments()

    def forward(self, x):
        moments = self.moments(x)
        return moments.mean, moments.spread.sqrt()


class PerSample(Part):
    """torch.func: the gradient of each sample."""

    def forward(self, x):
        return torch.func.vmap(torch.func.grad(lambda row: (self.linear(row) ** 3).sum()))(x)


class Solve(Part):
    def forward(self, x):
        return torch.linalg.solve(self.linear(x) + 3 * torch.eye(4), x)


class LeastSquares(Part):
    """An operator that asks for values before anything is missing."""

    def forward(self, x):
        return torch.linalg.lstsq(self.linear(x) + 3 * torch.eye(4), x).solution


class Ctc(Part):
    def forward(self, x):
        chances = self.linear(x).log_softmax(-1)[:, None]
        return nn.functional.ctc_loss(chances, torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2]))


class Eigenvalues(Part):
    """A complex operator."""

    def forward(self, x):
        y = self.linear(x)
        return torch.linalg.eigvals(y + y.T).real.sort().values


class Determinant(Part):
    """Complex tensors on the way."""

    def forward(self, x):
        z = torch.complex(self.linear(x), x)
        return torch.linalg.det(z @ z.mH + torch.eye(4)).real[None]


class Closures(Part):
    def forward(self, x):
        def times(factor):
            def scaled(y):
                return y * factor if bool((y > 0).any()) else y

            return scaled

        return times(3.0)(self.linear(x))


class Newton(Part):
    """A solver that ends when it is near enough."""

    def forward(self, x):
        y = self.linear(x)
        z = torch.zeros_like(y)
        for _ in range(50):
            gap = z + z**3 - y
            if gap.abs().max() < 1e-6:
                break
            z = z - gap / (1 + 3 * z**2)
        return z


class Memory(Part):
    """C code that writes into a tensor."""

    def forward(self, x):
        y = x.detach().clone()
        ctypes.memset(y.data_ptr(), 0, 8)
        return self.linear(x) + y


class OtherThread(Part):
    def forward(self, x):
        found = []
        thread = threading.Thread(target=lambda: found.append(x.detach() * 2))
        thread.start()
        thread.join()
        return self.linear(x) + found[0]


class MostCommon(Part):
    def forward(self, x):
        counts = collections.Counter((x > 0).sum(1).tolist())
        return self.linear(x) * float(counts.most_common(1)[0][1])


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x > 0)


class FunctionOnAWay(Part):
    """A Function on a way that only some values go."""

    def forward(self, x):
        y = Clamp.apply(self.linear(x))
        return Clamp.apply(y - 1) if y.max() > 0.5 else y


class Bessel(Part):
    def forward(self, x):
        y = self.linear(x)
        return torch.special.bessel_j0(y.detach()) + torch.special.log_ndtr(y)


class Nearest(Part):
    """A heap of distances, as a search over a tree keeps it."""

    def forward(self, x):
        y = self.linear(x)
        heap = [(float((row - y[0]).square().sum().detach()), number) for number, row in enumerate(y)]
        heapq.heapify(heap)
        return torch.stack([y[heapq.heappop(heap)[1]] for _ in range(2)])


PARTS = [
    Branch, UntilSmall, InNumpy, Rows, Table, DataclassResult, PerSample, Solve, LeastSquares, Ctc, Eigenvalues, Determinant, Closures, Newton, Memory,
    OtherThread, MostCommon, FunctionOnAWay, Bessel, Nearest,
]  # fmt: skip
