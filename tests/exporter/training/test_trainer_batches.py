"""What a trainer takes as a batch, and what it says of the rest: nothing is changed, and nothing is read that is no plain memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import exporter
from exporter.training.trainer import Trainer
from symbolics.errors import ArgumentError
from tests.exporter.training.loop import batches_of, network, step_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def test_batches_that_do_not_fit():
    batches = batches_of(1, torch.float32)
    trainer = Trainer(step_of(network(torch.float32), batches[0]))
    (x,), (target,) = trainer.layout.inputs, trainer.layout.targets
    good = {x: batches[0][0], target: batches[0][1]}
    before = trainer.save()
    for batch, words in (
        ({x: batches[0][0]}, f"an input {target}, which the batch lacks"),
        ({**good, "other": 1}, f"no input other: it takes {x}, {target}"),
        ({**good, "param.0.weight": torch.zeros(8, 4)}, "no input param.0.weight"),
        ({**good, x: batches[0][0].double()}, "takes a tensor of torch.float32, not torch.float64"),
        ({**good, x: "text"}, "takes a tensor of torch.float32, not str"),
        ({**good, x: np.array(["text"])}, "takes a tensor of torch.float32, not object"),
        ({**good, target: [0.9, 1.9, 0.0, 0.0, 0.0]}, "takes a tensor of torch.int64, not torch.float32"),
        ({**good, "learning_rate": torch.full((3,), 0.1)}, "takes one number, not a tensor of shape"),
        ({**good, None: 1}, "no input None"),
        (batches[0], "a batch is a dictionary"),
    ):
        with pytest.raises(ArgumentError, match=words.replace(".", r"\.")):
            trainer.step(batch)
    with pytest.raises(exporter.RunError, match="has that size fixed: .*dynamic_shapes="):
        trainer.step({**good, x: torch.zeros(5, 3)})
    with pytest.raises(exporter.RunError, match="labels count from 0"):
        trainer.step({**good, target: batches[0][1] + 100})
    with pytest.raises(ArgumentError, match="no evaluation"):
        trainer.evaluate({x: batches[0][0]})
    assert trainer.save() == before


@pytest.mark.parametrize(
    "options", [{}, {"ignore_index": 0}, {"ignore_index": -1}, {"label_smoothing": 0.1}, {"weight": torch.tensor([0.1, 0.2, 0.7])}]
)
@pytest.mark.parametrize("open_batch", [False, True])
def test_labels_out_of_range_are_refused(options, open_batch, dynamo):
    """ONNX counts a negative one from the last class, and torch refuses it."""

    def loss(scores, target):
        return torch.nn.functional.cross_entropy(scores, target, **options)

    model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
    right = torch.tensor([0, 1, options.get("ignore_index", 2), 1, 2])
    shapes = {"dynamic_shapes": ({0: "batch"},)} if open_batch else {}
    step = exporter.export_training_step(model, (x,), loss=loss, targets=(right.clamp(min=0),), optimizer="sgd", dynamo=dynamo, **shapes)
    trainer = Trainer(step)
    (name,), (target,) = trainer.layout.inputs, trainer.layout.targets
    before = trainer.save()
    for wrong in (-2, 3, -3):
        with pytest.raises(exporter.RunError, match="labels count from 0"):
            trainer.step({name: x, target: torch.cat([right[:4], torch.tensor([wrong])])})
    assert trainer.save() == before
    assert trainer.step({name: x, target: right}) == pytest.approx(float(loss(model(x), right)), rel=1e-5)


class _Logging(torch.Tensor):
    """A tensor whose numbers are another's."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*(given.inner if isinstance(given, cls) else given for given in args), **(kwargs or {}))


def _fake(value):
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(value)


@pytest.mark.parametrize(
    "change",
    [
        _Logging,
        _fake,
        lambda x: x.to("meta"),
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.nested.nested_tensor([x]),
    ],
    ids=["wrapped", "fake", "meta", "sparse", "csr", "nested"],
)
def test_tensors_without_plain_memory_are_refused(change):
    batches = batches_of(1, torch.float32)
    trainer = Trainer(step_of(network(torch.float32), batches[0]))
    (x,), (target,) = trainer.layout.inputs, trainer.layout.targets
    with pytest.raises(ArgumentError, match="on the CPU, dense and plain"):
        trainer.step({x: change(batches[0][0]), target: batches[0][1]})


@pytest.mark.parametrize("kind", ["transposed", "turned", "grad", "big-endian", "conjugate", "numpy number"])
def test_values_that_lie_otherwise_in_memory(kind):
    batches = batches_of(1, torch.float32)
    one, other = Trainer(step_of(network(torch.float32), batches[0])), Trainer(step_of(network(torch.float32), batches[0]))
    (x,), (target,) = one.layout.inputs, one.layout.targets
    given, more = batches[0][0], {}
    match kind:
        case "transposed":
            changed = given.t().contiguous().t()
        case "turned":
            changed = given.numpy()[::-1].copy()[::-1]
        case "grad":
            changed = given.clone().requires_grad_()
        case "big-endian":
            changed = given.numpy().astype(">f4")
        case "conjugate":
            changed = torch.complex(torch.zeros_like(given), -given).conj().imag
            assert changed.is_neg()
        case "numpy number":
            changed, more = given, {"learning_rate": np.float64(1e-3)}
    assert one.step({x: changed, target: batches[0][1], **more}) == other.step({x: given, target: batches[0][1]})
    assert one.save() == other.save()
