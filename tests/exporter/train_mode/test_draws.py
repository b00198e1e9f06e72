"""Normal and uniform numbers of a training step, from its seed: they are drawn as they should be, and a training that goes on draws the same."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import exporter
from exporter.train_mode.dropout import dropout_mask, seed_dropout

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
SHAPE = (1024, 1000)


def _seeded(nodes, outputs, inputs=(), **constants):
    made = [helper.make_tensor(name, kind, [], [value]) for name, (kind, value) in constants.items()]
    graph = helper.make_graph(nodes, "g", list(inputs), outputs, made)
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    assert seed_dropout(model) == "seed"
    return ir.to_proto(model)


def _run(model, seed=0, **feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"seed": np.array(seed), **feeds})


def _drawn(op, shape=SHAPE, kind=FLOAT, seed=0, **attributes):
    node = helper.make_node(op, [], ["y"], shape=shape, dtype=kind, **attributes)
    return _run(_seeded([node], [helper.make_tensor_value_info("y", kind, shape)]), seed)[0]


def _distance(values, cumulative):
    """The statistic of Kolmogorov and Smirnov times the root of the count: above 1.95 once in 1,000 times."""
    values = np.sort(values.ravel().astype(np.float64))
    expected, count = cumulative(values), len(values)
    return max(np.abs(expected - np.arange(count) / count).max(), np.abs(expected - np.arange(1, count + 1) / count).max()) * math.sqrt(
        count
    )


def _normal(x):
    return 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _correlation(a, b):
    """In standard deviations."""
    a, b = (each.ravel().astype(np.float64) for each in (a, b))
    return np.corrcoef(a, b)[0, 1] * math.sqrt(a.size)


@pytest.mark.parametrize("seed", [0, 1, 20240229, 2**40 + 3, -1])
def test_numbers_have_their_distribution(seed):
    uniform, normal = _drawn("RandomUniform", seed=seed), _drawn("RandomNormal", seed=seed)
    assert _distance(uniform, lambda x: x) < 1.95 and uniform.min() > 0 and uniform.max() < 1
    assert _distance(normal, _normal) < 1.95
    assert 4.2 < np.abs(normal).max() < 5.8
    counts = np.histogram2d(uniform[:, :-1].ravel(), uniform[:, 1:].ravel(), 32, [[0, 1], [0, 1]])[0]  # of neighbours
    wanted = counts.mean()
    assert abs(((counts - wanted) ** 2 / wanted).sum() - 1023) < 4 * math.sqrt(2 * 1023)


def test_what_is_drawn_apart_has_nothing_in_common():
    value, like = helper.make_tensor_value_info, ["x"]
    nodes = [helper.make_node(op, like, [name]) for op, name in zip(("RandomNormalLike", "RandomUniformLike") * 2, "abcd", strict=True)]
    shape = (400, 500)
    model = _seeded(nodes, [value(name, FLOAT, shape) for name in "abcd"], [value("x", FLOAT, shape)])
    x = np.ones(shape, np.float32)
    found = [*_run(model, 3, x=x), *_run(model, 4, x=x)]
    for values in found.copy():
        found += [values**2, np.roll(values, 1, 0), np.roll(values, 1, 1)]
    assert max(abs(_correlation(a, b)) for i, a in enumerate(found) for b in found[:i] if not _is_of(a, b)) < 6
    assert all(np.array_equal(a, b) for a, b in zip(_run(model, 3, x=x), found, strict=False))


def _is_of(a, b):
    """Whether one is the square of the other: of uniform numbers those go together."""
    return np.array_equal(a, b**2) or np.array_equal(b, a**2) or np.array_equal(a, b)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
def test_types(kind):
    node = helper.make_node("RandomUniform", [], ["u"], shape=SHAPE, dtype=kind)
    there = helper.make_node("Cast", ["u"], ["y"], to=FLOAT)
    (uniform,) = _run(_seeded([node, there], [helper.make_tensor_value_info("y", FLOAT, SHAPE)]))
    assert 0 < uniform.min() < 0.01 and 0.99 < uniform.max() < 1 and abs(uniform.mean() - 0.5) < 2e-3


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "static"])
@pytest.mark.parametrize("shape", [(3, 5000), (4, 0), ()])
def test_sizes_and_bounds(shape, is_open):
    value, dims = helper.make_tensor_value_info, [f"n{axis}" for axis in range(len(shape))] if is_open else shape
    nodes = [
        helper.make_node("RandomUniformLike", ["x"], ["y"], low=-2.0, high=6.0),
        helper.make_node("RandomNormalLike", ["x"], ["z"], mean=100.0, scale=0.5),
    ]
    model = _seeded(nodes, [value("y", FLOAT, dims), value("z", FLOAT, dims)], [value("x", FLOAT, dims)])
    y, z = _run(model, 5, x=np.ones(shape, np.float32))
    assert y.shape == z.shape == shape and (y > -2).all() and (y < 6).all() and (abs(z - 100) < 3).all()
    if y.size > 1000:
        assert y.min() < -1.9 and y.max() > 5.9 and abs(z.std() - 0.5) < 0.02
    for found, wanted in zip(
        (y, z), ReferenceEvaluator(model).run(None, {"x": np.ones(shape, np.float32), "seed": np.array(5)}), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_passes_of_a_loop_draw_anew():
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("RandomNormal", [], ["m"], shape=(4, 5)), helper.make_node("Identity", ["c"], ["again"])]
    body = helper.make_graph(
        nodes, "body", [value("n", INT64, []), value("c", BOOL, [])], [value("again", BOOL, []), value("m", FLOAT, (4, 5))]
    )
    loop = helper.make_node("Loop", ["passes", "t"], ["y"], body=body)
    (found,) = _run(_seeded([loop], [value("y", FLOAT, (3, 4, 5))], passes=(INT64, 3), t=(BOOL, True)))
    assert len({each.tobytes() for each in found}) == 3


def test_masks_of_dropout_stay_what_they_are():
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("RandomNormalLike", ["x"], ["r"]), helper.make_node("Dropout", ["r", "p", "t"], ["y", "mask"])]
    model = _seeded(nodes, [value("mask", BOOL, (7, 33))], [value("x", FLOAT, (7, 33))], p=(FLOAT, 0.25), t=(BOOL, True))
    np.testing.assert_array_equal(_run(model, 9, x=np.ones((7, 33), np.float32))[0], dropout_mask(9, 0, (7, 33), 0.25))


@pytest.mark.parametrize(("kind", "rows"), [(FLOAT, 3), (TensorProto.FLOAT16, 3), (TensorProto.DOUBLE, "N")])
def test_classes_are_drawn_by_their_chances(kind, rows):
    value, count = helper.make_tensor_value_info, 40000
    chances = np.array([[0, 0.1, 0.2, 0, 0.7], [1, 0, 0, 0, 0], [0, 0, 0, 0.5, 0.5]])
    with np.errstate(divide="ignore"):
        logs = (np.log(chances) + [[3], [-2], [0]]).astype(helper.tensor_dtype_to_np_dtype(kind))
    node = helper.make_node("Multinomial", ["x"], ["y"], sample_size=count, dtype=INT64)
    model = _seeded([node], [value("y", INT64, (rows, count))], [value("x", kind, (rows, 5))])
    (found,), (other,) = _run(model, 1, x=logs), _run(model, 2, x=logs)
    assert (found.dtype, found.shape) == (np.int64, (3, count))
    shares = np.stack([np.bincount(row, minlength=5) / count for row in found])
    assert (shares[chances == 0] == 0).all()
    np.testing.assert_allclose(shares, chances, atol=0.012)
    assert abs(_correlation(found[0], other[0])) < 4
    assert abs(_correlation(found[0], found[2])) < 4


def test_a_seed_of_the_node_s_own_stays():
    node = helper.make_node("RandomNormal", [], ["y"], shape=(2,), seed=3.0)
    graph = helper.make_graph([node], "g", [], [helper.make_tensor_value_info("y", FLOAT, (2,))])
    assert seed_dropout(ir.from_proto(helper.make_model(graph))) is None


DRAWS = {
    "randn_like": lambda y: y + torch.randn_like(y),
    "rand": lambda y: y + torch.rand(4),
    "randint_like": lambda y: y + torch.randint_like(y, 0, 5),
    "bernoulli": lambda y: y * torch.bernoulli(torch.full_like(y, 0.3)),
    "multinomial": lambda y: y * torch.multinomial(torch.softmax(y, -1), 1),
    "multinomial with replacement": lambda y: y * torch.multinomial(torch.softmax(y, -1), 3, True).sum(1, keepdim=True),
    "categorical": lambda y: y * F.one_hot(torch.distributions.Categorical(logits=y, validate_args=False).sample(), 4),
    "randperm": lambda y: y[:, torch.randperm(4)],
    "rsample": lambda y: torch.distributions.Normal(y, torch.ones_like(y), validate_args=False).rsample(),
}


class _Draws(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.drop, self.how = nn.Linear(4, 4), nn.Dropout(0.5), how

    def forward(self, x):
        return self.how(self.drop(self.linear(x)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DRAWS)
def test_a_training_that_goes_on_draws_the_same(name, dynamo):
    x, target = torch.randn(6, 4), torch.randint(0, 4, (6,))
    step = exporter.export_training_step(_Draws(DRAWS[name]), (x,), loss=F.cross_entropy, targets=(target,), dynamo=dynamo)
    batch = dict(zip((*step.layout.inputs, *step.layout.targets), (x, target), strict=True))
    trainer = exporter.Trainer(step)
    first = [trainer.step(batch) for _ in range(3)]
    saved = trainer.save()
    then = [trainer.step(batch) for _ in range(3)]
    trainer.restore(saved)
    assert [trainer.step(batch) for _ in range(3)] == then
    assert len({*first, *then}) == 6


class _Noisy(nn.Module):
    """Gives its noise out, so that eager can take the same."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mean, self.spread = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, noise=None):
        noise = torch.randn(6, 3) if noise is None else noise
        return self.mean(x) + noise * torch.exp(self.spread(x)), noise


def test_a_step_updates_by_the_noise_that_it_drew(dynamo):
    model, x, target = _Noisy(), torch.randn(6, 4), torch.randn(6, 3)

    def loss(output, target):
        return F.mse_loss(output[0], target)

    step = exporter.export_training_step(
        model, (x,), loss=loss, targets=(target,), optimizer="sgd", hyperparameters={"lr": 0.1}, output_names=["y", "noise"], dynamo=dynamo
    )
    trainer, optimizer = exporter.Trainer(step), torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        found = trainer.step({**dict(zip(step.layout.inputs, (x,), strict=True)), step.layout.targets[0]: target})
        wanted = loss(model(x, trainer.outputs["noise"].clone()), target)
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
        assert found == pytest.approx(wanted.item(), rel=1e-5)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(trainer.state_dict()[key], value, rtol=1e-4, atol=1e-5)


class _Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * torch.randn_like(x)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_loaded_module_draws_from_torchs_generator(training, dynamo):
    x = torch.randn(3, 4)
    module = exporter.load(exporter.export(_Times(), (x,), dynamo=dynamo)).train(training)
    torch.manual_seed(0)
    y = module(x)
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.equal(module(x), y)
        assert not torch.equal(module(x), y)
    y.sum().backward()
    weight, bias = (module.get_parameter(f"linear.{name}") for name in ("weight", "bias"))
    noise = y / F.linear(x, weight, bias)
    torch.testing.assert_close(bias.grad, noise.detach().sum(0), rtol=1e-3, atol=1e-4)


def test_a_body_whose_passes_have_no_number_draws_as_before():
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("RandomNormalLike", ["i"], ["r"])], "body", [value("i", FLOAT, (2,))], [value("r", FLOAT, (2,))]
    )
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "x"], ["xs"]),
        helper.make_node("SequenceMap", ["xs"], ["ys"], body=body),
        helper.make_node("SequenceAt", ["ys", "at"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", [value("x", FLOAT, (2,))], [value("y", FLOAT, (2,))], [helper.make_tensor("at", INT64, [], [1])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    with torch.no_grad():
        assert exporter.load(model)(torch.ones(2)).shape == (2,)
