"""What forwards do beside calling layers: writes, sizes, branches, gradients, draws from Python."""

from __future__ import annotations

import collections
import math

import numpy as np
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

from tests.end_to_end.alone.compare import Given
from tests.end_to_end.alone.table import Net, add, net, some


@add
def written_slices() -> Given:
    def body(m, x):
        x = x.clone()
        x[:, 0] = 1
        x[1:, 2] += x[1:, 1]
        x[0].mul_(2)
        return x

    return net(body, some())


@add
def written_by_index() -> Given:
    def body(m, x, i):
        out = torch.zeros(5, 4)
        out[i] = x
        out.index_add_(0, i, x)
        return out.index_put((i,), x, accumulate=True)

    return net(body, some(), torch.tensor([0, 2, 4]))


@add
def written_where_masked() -> Given:
    def body(m, x):
        x = x + 0
        x[x > 0] = 0.5
        return x.masked_fill_(x < -1, -1)

    return net(body, some())


@add
def chosen_by_mask() -> Given:
    return net(lambda m, x: x[x > 0], some())


@add
def places_of_what_is_not_zero() -> Given:
    return net(lambda m, x: (x > 0).nonzero(), some())


@add
def sizes_as_numbers() -> Given:
    def body(m, x):
        n, d = x.shape
        return x.reshape(n * d // 2, -1) / math.sqrt(d) + torch.arange(2, dtype=x.dtype)

    return net(body, some())


@add
def sizes_that_are_open() -> Given:
    def body(m, x):
        n, d = x.shape
        return x.view(n, 2, d // 2).transpose(1, 2).reshape(n, d) + torch.arange(n, dtype=x.dtype)[:, None], torch.ones(n, n).tril()

    given = net(body, some(), options={"dynamic_axes": {"x": {0: "n"}}, "input_names": ["x"]})
    given.runs = [((some(6, 4),), {})]
    return given


@add
def size_returned() -> Given:
    return net(lambda m, x: (x * 2, torch.tensor(x.shape[0])), some())


@add
def asserts() -> Given:
    def body(m, x):
        assert x.shape[-1] == 4
        torch._assert(x.shape[0] > 1, "more than one")
        return x * 2

    return net(body, some())


@add
def loops_and_lists() -> Given:
    def body(m, x):
        rows = []
        for row in x:
            rows.append(row.cumsum(0) if len(rows) % 2 else row)
        return torch.stack(rows), torch.cat(rows[::-1])

    return net(body, some())


@add
def iterated_dictionary() -> Given:
    return net(lambda m, x: {name: x * i for i, name in enumerate(collections.OrderedDict(b=1, a=2))}, some())


@add
def tensors_made_in_forward() -> Given:
    def body(m, x):
        return (
            x
            + torch.tensor([1.0, 2.0, 3.0, 4.0])
            + x.new_ones(4)
            + torch.full_like(x, 2)
            + torch.from_numpy(np.arange(4, dtype=np.float32))
        )

    return net(body, some())


@add
def numbers_of_python() -> Given:
    return net(lambda m, x: max(2, 3) * x + float("1e-3") - int(True) + round(2.5), some())


@add
def checkpointed_without_reentry() -> Given:
    return net(lambda m, x: checkpoint(m.layer, x, use_reentrant=False), some(), layer=nn.Linear(4, 4))


@add
def detached() -> Given:
    return net(lambda m, x: x.detach() + x - x.data, some())


@add
def partly_without_gradients() -> Given:
    def body(m, x):
        with torch.no_grad():
            scale = x.abs().max()
        return m.layer(x / scale), scale

    return net(body, some(), layer=nn.Linear(4, 4))


@add
def straight_through() -> Given:
    return net(lambda m, x: x + (x.round() - x).detach(), some())


@add
def exporting_branch() -> Given:
    return net(lambda m, x: x * (2 if torch.onnx.is_in_onnx_export() else 2.0) + 1, some())


@add
def mapped() -> Given:
    return net(lambda m, x: torch.vmap(lambda row: row @ m.w)(x), some(), w=nn.Parameter(some(4)))


@add
def functional_call() -> Given:
    return net(
        lambda m, x: torch.func.functional_call(m.layer, {"weight": m.w * 2, "bias": m.w[0]}, (x,)),
        some(),
        layer=nn.Linear(4, 4),
        w=nn.Parameter(some(4, 4)),
    )


@add
def einsums() -> Given:
    return net(lambda m, x, y: torch.einsum("bij,bjk->bik", x, y) + torch.einsum("bii->b", x)[:, None, None], some(2, 3, 3), some(2, 3, 3))


@add
def packed_argument() -> Given:
    def body(m, data, sizes):
        return m.rnn(rnn.PackedSequence(data, sizes))[1]

    return net(body, some(6, 4), torch.tensor([3, 2, 1]), rnn=nn.GRU(4, 3))


@add
def integers_only() -> Given:
    return net(lambda m, i: (i // 2, i % 3, i.argmax(), i.sort().indices, (i > 1).sum()), torch.tensor([3, 1, 4, 1]))


@add
def narrow_numbers() -> Given:
    return net(
        lambda m, a, b, c: (a.float() + 1, b * 2, c.to(torch.int8)),
        torch.arange(4, dtype=torch.int8),
        torch.arange(4, dtype=torch.int32),
        some(4),
    )


@add
def halves() -> Given:
    return net(lambda m, x: (x.half() * 2).float() + x.to(torch.float16).sum(), some(), options={})


@add
def doubles_between() -> Given:
    return net(lambda m, x: (x.double() @ x.double().T).float(), some())


@add
def scalars_and_0d() -> Given:
    return net(lambda m, x, s: (x.sum(), x.mean() * s, s + 1, x[0, 0]), some(), torch.tensor(3.0))


@add
def empty_between() -> Given:
    return net(lambda m, x: torch.cat([x[:0], x, x[3:]]).sum(0), some())


@add
def topk_and_gather() -> Given:
    def body(m, x):
        values, places = x.topk(2, dim=-1)
        return values, places, x.gather(1, places), torch.zeros_like(x).scatter(1, places, values)

    return net(body, some())


@add
def shared_by_two_results() -> Given:
    def body(m, x):
        y = m.layer(x)
        return y, y.relu(), {"y": y}, [y[:, :2], y]

    return net(body, some(), layer=nn.Linear(4, 4))


@add
def nothing_read() -> Given:
    return net(lambda m, x: m.w * 2, some(), w=nn.Parameter(some(4)))


@add
def nothing_of_parameters() -> Given:
    return net(lambda m, x: x.softmax(-1), some(), w=nn.Parameter(some(4)))


@add
def constant_results() -> Given:
    return net(lambda m, x: (torch.zeros(2, 3), x + 1, torch.tensor(5)), some())


@add
def parameter_in_a_list() -> Given:
    w = nn.Parameter(some(4))
    model = Net(lambda m, x: x * m.table[0] + m.w, w=w)
    model.table = [w]
    return Given(model.eval(), (some(),))


@add
def parameter_replaced() -> Given:
    def body(m, x):
        return nn.functional.linear(x, m.layer.weight.clone().abs(), m.layer.bias)

    return net(body, some(), layer=nn.Linear(4, 4))


@add
def buffers_assigned() -> Given:
    def body(m, x):
        m.last = x.detach().mean(0)
        return x - m.last

    return net(body, some(), last=torch.zeros(4))


@add
def attribute_assigned() -> Given:
    def body(m, x):
        m.cache = x * 2
        return m.cache + 1

    return net(body, some())


@add
def loss_in_forward() -> Given:
    return net(lambda m, x, y: nn.functional.cross_entropy(m.layer(x), y), some(), torch.tensor([0, 1, 2]), layer=nn.Linear(4, 3))


@add
def losses_as_models() -> Given:
    return Given(nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.rand(4)), (some(), torch.tensor([0, 1, 3])))


@add
def normalised_by_hand() -> Given:
    def body(m, x):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) * torch.rsqrt(var + 1e-5) * m.w

    return net(body, some(), w=nn.Parameter(some(4)))


@add
def keyword_only_arguments() -> Given:
    class Model(nn.Module):
        def forward(self, *, x, y=None):
            return x * 2 if y is None else x + y

    return Given(Model().eval(), (), {"x": some()})


@add
def keywords_out_of_order() -> Given:
    class Model(nn.Module):
        def forward(self, a, b, c):
            return a - 2 * b + 3 * c

    return Given(Model().eval(), (some(),), {"c": some(), "b": some()})


@add
def keywords_as_last_argument() -> Given:
    class Model(nn.Module):
        def forward(self, x, state=None):
            return x + state["h"]

    return Given(Model().eval(), (some(), {"state": {"h": some()}}))


@add
def argument_named_input() -> Given:
    class Model(nn.Module):
        def forward(self, input, output, weight):
            return input + output * weight

    return Given(Model().eval(), (some(), some(), some()))


@add
def tuple_of_one() -> Given:
    return net(lambda m, x: (x * 2,), (some(),)[0])


@add
def list_result() -> Given:
    return net(lambda m, x: [x * 2, [x + 1]], some())


@add
def grid_and_resize() -> Given:
    def body(m, x):
        x = nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        grid = nn.functional.affine_grid(torch.eye(2, 3)[None], [1, 2, 4, 4], align_corners=False)
        return nn.functional.grid_sample(x, grid, align_corners=False)

    return net(body, some(1, 2, 3, 3), options={"opset_version": 20})


@add
def kept_keys_and_values() -> Given:
    def body(m, x, past):
        k, v = (torch.cat([old, x], 1) for old in past)
        return (x @ k.mT).softmax(-1) @ v, (k, v)

    given = net(
        body, some(1, 1, 4), (some(1, 3, 4), some(1, 3, 4)), options={"input_names": ["x", "k", "v"], "output_names": ["y", "k2", "v2"]}
    )
    return given


@add
def scan_of_states() -> Given:
    def body(m, x):
        h = x.new_zeros(4)
        for t in range(x.shape[0]):
            h = torch.tanh(m.layer(x[t]) + h)
        return h

    return net(body, some(), layer=nn.Linear(4, 4))


@add
def hooks_around_modules() -> Given:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    model.register_full_backward_hook(lambda module, gi, go: None)
    model[0].register_forward_hook(lambda module, args, kwargs, out: out + 1, with_kwargs=True)
    return Given(model, (some(),))


@add
def gradient_hook_on_a_value() -> Given:
    def body(m, x):
        y = m.layer(x)
        if y.requires_grad:
            y.register_hook(lambda g: g * 2)
        return y * 2

    return net(body, some(), layer=nn.Linear(4, 4))


@add
def random_but_seeded_away() -> Given:
    return net(lambda m, x: nn.functional.dropout(x, 0.5, m.training) + 1, some())


@add
def meshes() -> Given:
    def body(m, x):
        ys, xs = torch.meshgrid(torch.arange(x.shape[0]), torch.arange(x.shape[1]), indexing="ij")
        return x + ys - xs

    return net(body, some())


@add
def unfolded() -> Given:
    return net(lambda m, x: x.unfold(1, 2, 1).sum(-1) + nn.functional.pad(x, (1, 0), mode="replicate")[:, :3], some())


@add
def strings_and_flags_kept() -> Given:
    model = Net(lambda m, x: getattr(x, m.how)(dim=m.dim), how="sum", dim=1)
    return Given(model.eval(), (some(),))


@add
def bias_is_none() -> Given:
    return Given(nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4, elementwise_affine=False)).eval(), (some(),))
