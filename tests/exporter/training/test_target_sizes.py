"""Sizes of targets: open where they follow the model's open sizes, fixed elsewhere; and what a Trainer says where sizes differ."""

from __future__ import annotations

import pytest
import torch

import exporter
from exporter import ArgumentError, RunError

ATOMS, EDGES = 20, 41


class Field(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))

    def forward(self, pos, src, dst):
        return ((pos[src] - pos[dst]) * self.w).square().sum(), pos * self.w


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.w


def batch(atoms=ATOMS, edges=EDGES):
    index = torch.arange(edges)
    x = torch.linspace(-1, 1, atoms * 3).reshape(atoms, 3)
    return {"pos": x, "src": index % atoms, "dst": (index + 1) % atoms, "target_0": torch.tensor(1.0), "target_1": 2 * x}


def loss(found, energy, forces):
    return (found[0] - energy).square() + (found[1] - forces).square().mean()


SHAPES = {"pos": {0: "atoms"}, "src": {0: "edges"}, "dst": {0: "edges"}}


def made(dynamo, shapes=SHAPES):
    *args, energy, forces = batch().values()
    step = exporter.export_training_step(
        Field(), tuple(args), loss=loss, targets=(energy, forces), optimizer="sgd", dynamo=dynamo, dynamic_shapes=shapes
    )
    return step


def sizes(step):
    return {str(value.name): [getattr(dim, "value", dim) for dim in value.shape] for value in step.model.graph.inputs}


@pytest.fixture(scope="module", params=[True, False], ids=["dynamo", "torchscript"])
def step(request):
    return made(request.param)


def test_a_target_has_the_models_open_sizes_and_fixed_ones(step):
    found = sizes(step)
    assert found["target_1"] == ["atoms", 3]
    assert found["target_0"] == []
    assert found["pos"] == ["atoms", 3]
    assert found["src"] == found["dst"] == ["edges"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"target_1": torch.zeros(19, 3)}, "'pos' has 20 atoms, 'target_1' has 19: the file has one size 'atoms' for both"),
        ({"target_1": torch.zeros(1, 3)}, "'pos' has 20 atoms, 'target_1' has 1: "),
        ({"dst": torch.zeros(40, dtype=torch.int64)}, "'src' has 41 edges, 'dst' has 40: the file has one size 'edges' for both"),
    ],
    ids=["one row less", "one row", "edges"],
)
def test_sizes_that_differ_are_named_before_anything_runs(step, changed, says):
    trainer = exporter.Trainer(step)
    before = trainer.save()
    with pytest.raises(ArgumentError, match=says):
        trainer.step({**batch(), **changed})
    assert trainer.save() == before


def test_a_reference_of_one_column_is_not_broadcast(step):
    with pytest.raises(RunError, match="target_1"):
        exporter.Trainer(step).step({**batch(), "target_1": torch.zeros(ATOMS, 1)})


def test_other_sizes_train_as_before(step):
    model, trainer = Field(), exporter.Trainer(step)
    for each in (batch(), batch(33, 70), batch(2, 1)):
        *args, energy, forces = each.values()
        with torch.no_grad():
            model.load_state_dict(trainer.state_dict())
            expected = loss(model(*args), energy, forces)
        assert trainer.step(each) == pytest.approx(float(expected), rel=1e-4)


def test_an_evaluation_says_the_same():
    *args, energy, forces = batch().values()
    kept = {"loss": loss, "targets": (energy, forces), "dynamic_shapes": SHAPES}
    step = exporter.export_training_step(Field(), tuple(args), optimizer="sgd", **kept)
    trainer = exporter.Trainer(step, exporter.export_evaluation(Field(), tuple(args), output_names=["energy", "forces"], **kept))
    assert set(trainer.evaluate(batch())) == {"loss", "energy", "forces"}
    with pytest.raises(ArgumentError, match="'pos' has 20 atoms, 'target_1' has 19"):
        trainer.evaluate({**batch(), "target_1": torch.zeros(19, 3)})


def test_a_loaded_module_says_the_same(dynamo):
    pos, src, dst, *_ = batch().values()
    module = exporter.load(exporter.export(Field(), (pos, src, dst), dynamic_shapes=SHAPES, dynamo=dynamo))
    with pytest.raises(RunError, match="'src' has 41 edges, 'dst' has 40: the file has one size 'edges' for both"):
        module(pos, src, dst[:40])


def exported(loss, example, dynamo, **targets):
    step = exporter.export_training_step(
        Scaled(), (torch.ones(20, 3),), loss=loss, targets=(example,), dynamo=dynamo, dynamic_shapes={"x": {0: "rows"}, **targets}
    )
    return sizes(step)["target"]


def test_what_the_user_says_of_targets_holds(dynamo):
    picked = torch.zeros(7, dtype=torch.int64)
    assert exported(lambda y, t: y[t].mean(), picked, dynamo, target={0: "chosen"}) == ["chosen"]
    assert exported(lambda y, t: y[t].mean(), picked, dynamo) == [7]
    assert exported(lambda y, t: (y - t).square().mean(), torch.zeros(20, 3), dynamo, target={0: "rows", 1: None}) == ["rows", 3]


def test_sizes_that_are_computed_of_open_ones_stay_open(dynamo):
    for loss, rows in (
        (lambda y, t: (y[1:] - t).square().mean(), 19),
        (lambda y, t: (torch.cat([y, y]) - t).square().mean(), 40),
        (lambda y, t: (y.reshape(-1, 1) - t).square().mean(), 60),
    ):
        found = exported(loss, torch.zeros(rows, 3) if rows < 60 else torch.zeros(60, 1), dynamo)
        assert isinstance(found[0], str), found
        assert found[1] in (1, 3)


def test_a_target_that_gather_reads_stays_open_under_dynamo():
    """Torch knows of no relation there, and the example's sizes agree."""
    (found,) = exported(lambda y, t: y.gather(1, t[:, None]).mean(), torch.zeros(20, dtype=torch.int64), True)
    assert isinstance(found, str)


def test_one_name_for_one_of_two_axes_of_the_same_size():
    found = exported(lambda y, t: (y @ y.T - t).square().mean(), torch.zeros(20, 20), False)
    assert found[0] == "rows" and isinstance(found[1], str)


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = torch.nn.GRU(8, 8, batch_first=True), torch.nn.Linear(8, 3)

    def forward(self, x):
        start = torch.zeros(1, x.shape[0], 8) / x.shape[0]
        return self.head(self.cell(x, start)[0][:, -1]) + torch.arange(x.shape[0])[:, None]


@pytest.mark.parametrize("shapes", [{"x": {0: "batch"}}, {"x": {0: "batch"}, "target": {0: "rows"}}], ids=["x", "both"])
def test_a_size_that_the_model_reads_is_not_read_of_a_target(shapes, dynamo, tmp_path):
    """An evaluation runs without targets, too."""
    model, x, y = Recurrent(), torch.randn(4, 5, 8), torch.randint(3, (4,))
    options = {"loss": torch.nn.functional.cross_entropy, "targets": (y,), "dynamic_shapes": shapes, "dynamo": dynamo}
    exporter.write_artifacts(
        exporter.export_training_step(model, (x,), **options), exporter.export_evaluation(model, (x,), **options), tmp_path
    )
    trainer = exporter.Trainer.load(tmp_path)
    given = torch.randn(7, 5, 8)
    torch.testing.assert_close(torch.as_tensor(next(iter(trainer.evaluate({"x": given}).values()))), model(given))


@pytest.mark.parametrize("batch", [2, 3, 4, 6, 7])
def test_a_fixed_size_that_could_follow_the_batch_is_fixed(batch, dynamo):
    """2, 4, 6 and 7 have 3 beside them or in them, and 3 is the batch: what the target is compared with says which it is."""
    step = exporter.export_training_step(
        torch.nn.Linear(4, 3),
        (torch.randn(batch, 4),),
        loss=torch.nn.functional.mse_loss,
        targets=(torch.randn(batch, 3),),
        dynamic_shapes={"input": {0: "batch"}},
        dynamo=dynamo,
    )
    target = next(value for value in step.model.graph.inputs if value.name == "target")
    assert list(target.shape) == ["batch", 3]


class Predicts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(11, 16), torch.nn.Linear(16, 11)

    def forward(self, ids):
        return self.head(self.table(ids))


def of_all_tokens(logits, target):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("batch", [16, 8, 5])
@pytest.mark.parametrize("sizes", [{0: "batch"}, {0: "batch", 1: "time"}], ids=["batch", "both"])
def test_labels_that_are_flattened_have_the_sizes_of_the_ids(batch, sizes):
    """Torch knows of their product alone; onnxruntime's loss takes fewer labels than rows, without a word."""
    ids = torch.randint(0, 11, (batch, 8))
    step = exporter.export_training_step(Predicts(), (ids,), loss=of_all_tokens, targets=(ids,), dynamic_shapes={"ids": sizes})
    target = next(value for value in step.model.graph.inputs if value.name == "target")
    assert list(target.shape) == ["batch", sizes.get(1, 8)]
    with pytest.raises(exporter.PythonopError, match="'ids' has 4 batch, 'target' has 2"):
        exporter.Trainer(step).step({"ids": ids[:4], "target": ids[:2]})
