"""State is what a forward reads before it writes it: that is carried as eager has it, and what is only written is no output, no input, no obstacle."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F

import exporter
from exporter import errors
from exporter.forward.eager_graph import EagerGraph
from exporter.training.step import export_training_step
from symbolics.node.metadata import changes_of, results_of
from tests.exporter.train_mode.writing import BATCH, STATE, WRITTEN, Written, read_in_evaluation
from tests.exporter.training.loop import eager, run

ALLOW = ["tests.exporter.train_mode.writing:*"]
WRITTEN_NAMES = {f"parts.{step.__name__}.b" for step in WRITTEN}
STATE_NAMES = {f"parts.{step.__name__}.b" for step in STATE}


def _model(*steps):
    torch.manual_seed(0)
    return Written(*steps)


def _batches(count=2):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(BATCH, generator=generator), torch.randn(BATCH, generator=generator)) for _ in range(count)]


def _buffers(module):
    return {name: value.detach().clone() for name, value in module.named_buffers()}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dynamo", [True, False])
def test_two_calls_are_as_in_eager(dynamo, training):
    model, batches = _model().train(training), _batches()
    before = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.PythonopWarning)
        program = exporter.export(model, batches[0][:1], dynamo=dynamo)
    assert model.state_dict().keys() == before.state_dict().keys()
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in model.state_dict().items())
    changes = changes_of(program.model)
    state = STATE_NAMES if training else STATE_NAMES - {f"parts.{read_in_evaluation.__name__}.b"}
    assert set(changes.carried) == state
    assert not changes.lost
    assert len(results_of(program.model)) == 1
    module = exporter.load(program, allow=ALLOW).train(training)
    at_export = _buffers(module)
    for x, _ in batches:
        one, two = (x.clone().requires_grad_() for _ in range(2))
        expected, found = model(one), module(two)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            torch.autograd.grad(found.sum(), two)[0], torch.autograd.grad(expected.sum(), one)[0], rtol=1e-4, atol=1e-5
        )
        now, wanted = _buffers(module), _buffers(model)
        for name in STATE_NAMES:
            torch.testing.assert_close(now[name], wanted[name], rtol=1e-5, atol=1e-5, msg=name)
        for name in WRITTEN_NAMES:
            assert torch.equal(now[name], at_export[name]), name


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_training_step(dynamo):
    model, batches = _model().train(), _batches()
    step = export_training_step(
        model, batches[0][:1], loss=F.mse_loss, targets=batches[0][1:], optimizer="sgd", hyperparameters={"lr": 0.05}, dynamo=dynamo
    )
    assert set(step.layout.buffers) == STATE_NAMES
    losses, state = run(step, batches, allow=ALLOW)
    assert losses == pytest.approx(eager(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.05), batches), rel=1e-5)
    for key, name in step.layout.buffers.items():
        torch.testing.assert_close(torch.as_tensor(state[name]), _buffers(model)[key], rtol=1e-5, atol=1e-5, msg=key)


def fading(self, x):
    self.kept = 0.9 * self.kept + x.detach().mean(0)
    return x + self.kept


def counting(self, x):
    self.count = self.count + 1
    return x


def counting_out_of_sight(self, x):
    self.__dict__["count"] += 1
    return x


def counting_by_get(self, x):
    self.count = self.__dict__.get("count", 0) + 1
    return x * self.count


def counting_in_a_table(self, x):
    self.table["calls"] = self.table.get("calls", 0) + 1
    return x


def averaging(self, x):
    self.count = 0.9 * self.count - (1 - float(x.detach().mean())) / 2
    return x


def counted_then_compared(self, x):
    self.count += 1
    return x * 2 if self.count > 3 else x


def counted_then_an_index(self, x):
    self.count += 1
    return x * (1, 2, 3, 4, 5)[self.count % 5]


def counted_then_a_length(self, x):
    self.count += 1
    return torch.cat([x for _ in range(self.count)])[:3]


def counted_then_a_factor(self, x):
    self.count += 1
    return torch.add(x, x, alpha=self.count)


def counted_then_text(self, x):
    self.count += 1
    return x * len(str(self.count))


def counted_then_handed_on(self, x):
    y = x * self.table.get("factor", 1)
    self.count += 1
    self.table["factor"] = self.count
    return y


def counted_then_an_argument(self, x):
    self.count += 1
    return Scales.apply(x, self.count)


def counted_then_in_a_backward(self, x):
    self.count += 1
    y = x * 1
    if y.requires_grad:
        y.register_hook(functools.partial(_times, self))
    return y


def _times(model, g):
    return g * model.count


class Scales(torch.autograd.Function):
    """Reads a number in the backward alone."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None


def last_input(self, x):
    y, self.kept = x + self.kept, x.detach().mean(0)
    return y


def last_input_once_there_is_one(self, x):
    y = x + self.table["last"] if "last" in self.table else x
    self.table["last"] = x.detach()
    return y


def cached(self, x):
    if "first" not in self.table:
        self.table["first"] = torch.ones(x.shape)
    return x + self.table["first"]


def drawn(self, x):
    self.count = torch.Generator().seed()
    return x


def drawn_then_read(self, x):
    self.count = torch.Generator().seed()
    return x * float(self.count > 0)


def drawn_and_read_in_evaluation(self, x):
    if self.training:
        self.count = torch.Generator().seed()
        return x
    return x * self.count


def noted_in_place(self, x):
    self.kept.copy_(x.detach().mean(0))
    return x + self.kept


def made_once(self, x):
    self.count = x.shape[1] if self.count == 0 else self.count
    return x * self.count


class Attributes(torch.nn.Module):
    """What it keeps are a number, a tensor and a dictionary."""

    def __init__(self, step):
        super().__init__()
        self.step, self.count, self.kept, self.table = step, 0, torch.zeros(4), {}

    def forward(self, x):
        return self.step(self, x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("step", "name"),
    [
        (fading, "kept"), (counting, ""), (counting_out_of_sight, ""), (counting_in_a_table, ""), (averaging, ""), (counted_then_compared, "count"),
        (counted_then_an_index, "count"), (counted_then_a_length, "count"), (counted_then_a_factor, "count"), (counted_then_text, "count"),
        (counted_then_an_argument, "count"), (counted_then_handed_on, "count table['factor']"), (drawn, ""), (drawn_then_read, ""), (drawn_and_read_in_evaluation, "count"),
        (noted_in_place, ""), (made_once, ""), (counting_by_get, "count"), (last_input, "kept"),
        (last_input_once_there_is_one, "table['last']"), (cached, ""),
    ],
)  # fmt: skip
def test_attributes(step, name, training):
    model, x = Attributes(step).train(training), torch.randn(BATCH)
    changes = bool(name) and not (step is drawn_and_read_in_evaluation and not training)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", errors.PythonopWarning)
        program = exporter.export(model, (x,), dynamo=False)
    assert set(changes_of(program.model).lost) == (set(name.split()) if changes else set())
    assert any(name and repr(name.split()[0]) in str(one.message) for one in said if one.category is errors.PythonopWarning) == changes
    assert (model.count, model.kept.any(), model.table) == (0, False, {}), "an export leaves the model as it was"


def test_what_a_backward_reads_is_state():
    assert set(EagerGraph.of(Attributes(counted_then_in_a_backward), (torch.randn(BATCH),), {}).state) == {"count"}


@pytest.mark.parametrize("counts", [counting, counted_then_compared])
def test_a_branch_on_values_is_named_beside_what_changes(counts):
    def step(self, x):
        return counts(self, x) if x.sum() > 0 else x

    with pytest.raises(errors.ExportError, match=r"data-dependent(.*\n)+  at test_state.*if x.sum\(\) > 0"):
        exporter.export(Attributes(step), (torch.ones(BATCH),))


class Remembers(torch.nn.Module):
    """Reads a flag where no graph shows it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ready", torch.zeros(1))

    def forward(self, x):
        y = x if self.ready.tolist() == [0.0] else 2 * x
        self.ready.fill_(1.0)
        return y


class Branches(torch.nn.Module):
    """Reads a buffer in the branch that the example does not take."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x):
        last = self.last.clone()
        y = torch.cond(x.sum() > 1e6, lambda x, last: x + last, lambda x, last: x * 1, (x, last))
        self.last.copy_(x.detach().mean(0))
        return y


class Alone(torch.nn.Module):
    """Reads a buffer in evaluation, where the example fails."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.center.copy_(x.detach().mean(0))
            return x
        if len(x) > 1:
            raise ValueError("one at a time")
        return x - self.center


class HandsOn(torch.nn.Module):
    """Reads the last of some buffers; each is the next call's next."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        for name in ("one", "two", "three"):
            self.register_buffer(name, torch.zeros(4))

    def forward(self, x):
        y = x + self.three
        self.one, self.two, self.three = x.detach().mean(0), self.step(self.one), self.step(self.two)
        return y


@pytest.mark.parametrize(
    ("model", "names", "dynamo"),
    [(Remembers, {"ready"}, False), (Branches, {"last"}, True), (Alone, {"center"}, True), (Alone, {"center"}, False)],
)
@pytest.mark.filterwarnings("ignore")
def test_what_one_look_does_not_show(model, names, dynamo):
    assert set(changes_of(exporter.export(model(), (torch.randn(BATCH),), dynamo=dynamo).model).carried) == names


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("step", [lambda b: b, torch.Tensor.detach, lambda b: b.view(2, 2).view(4)])
def test_what_is_handed_on_is_read(step, dynamo):
    model, batches = HandsOn(step), _batches(4)
    module = exporter.load(exporter.export(model, batches[0][:1], dynamo=dynamo))
    for x, _ in batches:
        torch.testing.assert_close(module(x), model(x))
    torch.testing.assert_close(_buffers(module), _buffers(model))


class PutsItsData(torch.nn.Module):
    """Gives a buffer or a parameter other memory, and reads that."""

    def __init__(self, value):
        super().__init__()
        self.raw = torch.nn.Parameter(torch.ones(4))
        self.kept = value

    def forward(self, x):
        self.kept.data = x.detach().mean(0)
        return x * self.kept + self.raw


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("kind", [torch.nn.Buffer, lambda value: torch.nn.Parameter(value, requires_grad=False)])
def test_other_memory_is_another_value(kind, dynamo):
    model, x = PutsItsData(kind(torch.zeros(4))), torch.randn(BATCH)
    program = exporter.export(model, (x,), dynamo=dynamo)
    assert not model.kept.any(), "an export leaves the model as it was"
    module = exporter.load(program)
    for given in (x, 2 * x):
        torch.testing.assert_close(module(given), model(given))


def test_without_an_eager_run_all_that_is_written_counts():
    program = exporter.export(_model(WRITTEN[:2]), _batches()[0][:1], dynamo=False, eager_check=False)
    assert set(changes_of(program.model).carried) == {"fixed", *(f"parts.{step.__name__}.b" for step in WRITTEN[:2])}


class Copies(torch.nn.Module):
    """Writes values of another shape or type into buffers."""

    def __init__(self):
        super().__init__()
        for name in ("row", "rows", "number", "mask", "doubles", "part", "turned"):
            self.register_buffer(name, torch.ones(4, 4))

    def forward(self, x):
        mean = x.detach().mean(0)
        self.row.copy_(mean)
        self.rows.data.copy_(mean[None])
        self.number.copy_(mean.sum())
        self.mask.copy_(mean > 0)
        self.doubles.copy_(mean.double())
        self.part[1].copy_(mean.sum())
        self.turned.t().copy_(mean)
        return x @ self.row @ self.rows @ self.number @ self.mask @ self.doubles @ self.part @ self.turned


@pytest.mark.usefixtures("quick_verify")
@pytest.mark.parametrize("dynamo", [True, False])
def test_what_is_copied_into_a_buffer_takes_its_shape_and_type(dynamo):
    report = exporter.verify(Copies(), (torch.randn(BATCH),), dynamo=dynamo)
    assert report.ok, report
