"""Models whose forward in training mode changes buffers, in the ways that people write it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["BATCH", "MODELS", "AssignedMean", "Averages", "Counter", "Quantiser"]

BATCH = (5, 4)  # of every model's argument


class Keep(torch.autograd.Function):
    """Straight-through: the quantised value forward, the gradient to the continuous one."""

    @staticmethod
    def forward(ctx, x, quantised):
        return quantised.clone()

    @staticmethod
    def backward(ctx, g):
        return g, None


class Quantiser(nn.Module):
    """A codebook that follows the inputs by exponential moving averages (VQ-VAE, van den Oord et al. 2017, appendix A)."""

    def __init__(self, through_data: bool = False):
        super().__init__()
        self.first, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
        self.through_data = through_data
        self.register_buffer("embed", torch.randn(6, 3))
        self.register_buffer("size", torch.ones(6))
        self.register_buffer("average", self.embed.clone())

    def forward(self, x):
        x = self.first(x)
        index = (x.detach().unsqueeze(1) - self.embed).square().sum(2).argmin(1)
        hot = F.one_hot(index, 6).to(x.dtype)
        quantised = F.embedding(index, self.embed)
        if self.training:
            with torch.no_grad():
                size, average, embed = (b.data if self.through_data else b for b in (self.size, self.average, self.embed))
                size.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                average.mul_(0.9).add_(hot.t() @ x, alpha=0.1)
                total = size.sum()
                smoothed = (size + 1e-5) / (total + 6e-5) * total
                embed.copy_(average / smoothed.unsqueeze(1))
        return self.head(Keep.apply(x, quantised))


class FlowNorm(nn.Module):
    """The batch normalization of a normalizing flow: its log-determinant is part of the result."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
        self.log_gamma, self.beta = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        x = self.first(x)
        if self.training:
            mean, var = x.mean(0), x.var(0)
            self.mean.mul_(0.9).add_(mean.data * 0.1)
            self.var.mul_(0.9).add_(var.data * 0.1)
        else:
            mean, var = self.mean, self.var
        y = (x - mean) / torch.sqrt(var + 1e-5) * self.log_gamma.exp() + self.beta
        return self.head(y) + (self.log_gamma - 0.5 * torch.log(var + 1e-5)).sum()


class Counter(nn.Module):
    """What it adds shrinks from call to call."""

    def __init__(self, persistent: bool = True):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=persistent)

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.head(x) * (1 + 1 / (1 + self.calls))


class AssignedMean(nn.Module):
    """The new value is put in the place of the old tensor, which the output still reads."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("average", torch.ones(4))

    def forward(self, x):
        before = self.average
        if self.training:
            self.average = 0.9 * before + 0.1 * x.detach().mean(0)
        return self.head(x - before) * self.average.sum()


class Rows(nn.Module):
    """A part of a buffer is written."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("queue", torch.zeros(3, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        with torch.no_grad():
            self.queue[self.place] = x.mean(0, keepdim=True)
            self.place.add_(1).remainder_(3)
        return self.head(x + self.queue.sum(0))


class Twice(nn.Module):
    """One module that changes its state, called twice."""

    def __init__(self):
        super().__init__()
        self.inner = Counter()

    def forward(self, x):
        return self.inner(x) + self.inner(2 * x)


class FunctionalNorm(nn.Module):
    """Running statistics under names of the model's own."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("spread", torch.ones(4))

    def forward(self, x):
        return self.head(F.batch_norm(x, self.centre, self.spread, training=self.training, momentum=0.3))


class Parts(nn.Module):
    """Parts of buffers are written, by numbers, slices, views and indices; what follows reads all of them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("table", torch.ones(3, 4))
        self.register_buffer("counts", torch.zeros(3))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        with torch.no_grad():
            row, whole = self.table[1], self.table.data
            self.last[0] = x.mean()
            self.last.lerp_(torch.ones(1), 0.3)
            rows = x.abs().argmax(1) % 3
            self.table.index_add_(0, rows, x)
            self.table[1:].mul_(0.5)
            self.table[:, 0].zero_()
            self.table[0, 1:3].fill_(0.25)
            self.counts.scatter_add_(0, rows, torch.ones(len(x)))
            self.counts[self.counts > 2] = 1.0
            self.counts.clamp_(max=2.5)
        return self.head(x + self.table.sum(0) - row + whole[2]) * self.last + self.counts.sum()


class Flags(nn.Module):
    """Buffers of other types and of no dimensions: what was seen, and whether anything was."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("odd", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("largest", torch.tensor(0.5))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("hits", torch.zeros(4, dtype=torch.int32))

    def forward(self, x):
        with torch.no_grad():
            self.seen |= (x > 1).any(0)
            self.odd ^= (x > 0.5).any(0)
            self.mean.copy_(torch.where(self.started, self.mean * 0.9 + 0.1 * x.mean(0), x.mean(0)))
            self.started.fill_(True)
            self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
            self.hits.add_((x > 0).sum(0))
        return self.head(x * self.seen + self.odd + self.mean.float() + self.hits) / self.largest


class Follow(torch.autograd.Function):
    """Changes a buffer, and says so."""

    @staticmethod
    def forward(ctx, x, average):
        average.mul_(0.9).add_(0.1 * x.mean(0))
        ctx.mark_dirty(average)
        ctx.mark_non_differentiable(average)
        return x * 2, average

    @staticmethod
    def backward(ctx, g, _):
        return g * 3, None


class Propose(torch.autograd.Function):
    """Returns what a buffer should be next."""

    @staticmethod
    def forward(ctx, x, average):
        following = average * 0.9 + 0.1 * x.mean(0)
        ctx.mark_non_differentiable(following)
        return x * 2, following

    @staticmethod
    def backward(ctx, g, _):
        return g * 3, None


class ByFunctions(nn.Module):
    """New values that Functions make."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("followed", torch.ones(4))
        self.register_buffer("proposed", torch.ones(4))

    def forward(self, x):
        y, _ = Follow.apply(self.first(x), self.followed)
        y, self.proposed = Propose.apply(y, self.proposed)
        return self.head(y + self.followed + self.proposed)


class Exchanged(nn.Module):
    """Buffers that become each other's value, and one that is written again and again."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("one", torch.zeros(4))
        self.register_buffer("other", torch.ones(4))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("most", torch.zeros(4))
        self.register_buffer("where", torch.zeros(4, dtype=torch.long))

    def forward(self, x):
        self.one, self.other = self.other, self.one + x.detach().mean(0)
        y = self.head(x + self.one - 2 * self.other + self.most + self.where + self.scale.sin().mean())
        with torch.no_grad():
            torch.mul(y.mean(0), 0.5, out=self.scale)
            self.scale.mul_(0.5)
            torch.max(x, 0, out=(self.most, self.where))
            torch.add(self.other, self.most, out=self.other)
        y = y * self.scale.clone() + self.where.sum()
        self.scale = self.scale * 2 + y.detach().mean(0)
        self.scale -= 0.1
        return y


class Averages(nn.Module):
    """A running mean for others to share."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x + self.mean


class Counted(nn.Module):
    """Its output reads the number of batches, which BatchNorm counts on."""

    def __init__(self):
        super().__init__()
        self.head, self.norm = nn.Linear(4, 2), nn.BatchNorm1d(4)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.total += self.norm.num_batches_tracked
        return self.head(self.norm(x)) * (1 + self.total)


class ReadNorm(nn.Module):
    """Its output reads the running statistics that batch norms have just changed, one of them twice."""

    def __init__(self):
        super().__init__()
        self.head, self.norm, self.other = nn.Linear(4, 2), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False, momentum=0.3)

    def forward(self, x):
        y = self.norm(self.head.weight[0] * x)
        y = self.norm(y * (1 + self.norm.running_var))
        y = self.other(y).relu_() + self.norm.running_mean
        return self.head(y) / (self.other.running_var.sum() + self.norm.num_batches_tracked)


class TouchedNorm(nn.Module):
    """Running statistics, and a count of batches, that forward itself changes beside the norms."""

    def __init__(self):
        super().__init__()
        self.head, self.norms = nn.Linear(4, 2), nn.ModuleList(nn.BatchNorm1d(4) for _ in range(3))

    def forward(self, x):
        with torch.no_grad():
            self.norms[0].running_mean.mul_(2)
            self.norms[1].running_var[1:].clamp_(max=0.5)
        for norm in self.norms:
            x = norm(x * self.head.weight.sum(0))
        self.norms[2].num_batches_tracked.zero_()
        return self.head(x)


class Looked(torch.autograd.Function):
    """Takes running statistics as an argument."""

    @staticmethod
    def forward(ctx, x, mean):
        ctx.save_for_backward(mean)
        return x * (1 + mean)

    @staticmethod
    def backward(ctx, g):
        (mean,) = ctx.saved_tensors
        return g * (2 + mean), None


class LookedNorm(nn.Module):
    """A Function reads what a batch norm has just changed."""

    def __init__(self):
        super().__init__()
        self.head, self.norm = nn.Linear(4, 2), nn.BatchNorm1d(4)

    def forward(self, x):
        return Looked.apply(self.head(self.norm(x)), self.norm.running_mean[:2])


class Renormed(nn.Module):
    """Looking up rows shortens them in the table, which is then read; a table that is not trained."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("table", torch.arange(12.0).reshape(3, 4) / 6)

    def forward(self, x):
        rows = F.embedding((x[:, 0] > 0).long(), self.table, max_norm=0.9, norm_type=3.0)
        return self.head(x + rows) * self.table.sum()


class Shared(nn.Module):
    """Two modules have one buffer."""

    def __init__(self):
        super().__init__()
        self.head, self.one, self.other = nn.Linear(4, 2), Averages(), Averages()
        self.other.mean = self.one.mean

    def forward(self, x):
        return self.head(self.one(x) + self.other(2 * x))


def _instance_norm():
    return nn.Sequential(
        nn.Unflatten(1, (2, 2)),
        nn.Conv1d(2, 3, 1),
        nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(6, 2),
    )


def _norms_of_two_kinds():
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.Unflatten(1, (2, 3)),
        nn.InstanceNorm1d(2, track_running_stats=True, momentum=0.3),
        nn.Flatten(),
        nn.Linear(6, 2),
    )


MODELS = {
    "instance norm": _instance_norm,
    "instance norm beside batch norm": _norms_of_two_kinds,
    "spectral norm by a hook": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 2)),
    "spectral norm by a parametrization": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6), n_power_iterations=2), nn.Tanh(), nn.Linear(6, 2)
    ),
    "quantiser": Quantiser,
    "quantiser that writes to .data": lambda: Quantiser(through_data=True),
    "flow": FlowNorm,
    "counter": Counter,
    "counter that is not saved": lambda: Counter(persistent=False),
    "assigned": AssignedMean,
    "assigned inside": lambda: nn.Sequential(AssignedMean()),
    "rows": Rows,
    "called twice": Twice,
    "statistics of a function": FunctionalNorm,
    "batch norm that averages all": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 2)),
    "parts": Parts,
    "flags": Flags,
    "by functions": ByFunctions,
    "exchanged": Exchanged,
    "counted": Counted,
    "read statistics": ReadNorm,
    "touched statistics": TouchedNorm,
    "statistics that a Function reads": LookedNorm,
    "renormed": Renormed,
    "shared": Shared,
}  # fmt: skip
