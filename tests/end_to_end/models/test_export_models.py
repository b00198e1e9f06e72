"""Real models, both exporters: every call of eager is a PythonOp, and the file gives eager's outputs elsewhere."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch.utils import _pytree as pytree

import exporter
from symbolics.node.metadata import results_of
from tests.processes import FreshProcess
from tests.support import nodes
from tests.zoo.entry import Entry
from tests.zoo.exported import calls_of, entry_of, exported, models
from tests.zoo.public import PUBLIC

TOLERANCE = 1e-5


def _eager(entry: Entry, args: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
    with torch.no_grad():
        return [leaf.numpy() for leaf in pytree.tree_leaves(copy.deepcopy(entry.model)(*args))]


def _assert_equal(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    assert len(found) == len(wanted)
    for one, two in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
        np.testing.assert_allclose(one, two, rtol=0, atol=TOLERANCE)


def _feeds(path: Path, args: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    return dict(zip([value.name for value in onnx.load(path).graph.input], args, strict=True))


@models(PUBLIC)
def test_every_call_is_a_node_and_a_fresh_process_gives_eagers_outputs(
    name: str, dynamo: bool, tmp_path: Path, fresh: FreshProcess
) -> None:
    made = exported(name, dynamo)
    entry = made.entry
    found = [node.attributes["name"].as_string().rpartition(":")[2] for node in nodes(made.program.model, "PythonOp")]
    assert sorted(found) == sorted(cls.__qualname__ for cls in made.calls)
    assert made.checkpoints == entry.inlined
    path = tmp_path / "model.onnx"
    made.program.save(path)
    onnx.checker.check_model(path, full_check=True)
    results = fresh.run(path, _feeds(path, entry.args), entry.allow)[
        : len(results_of(made.program.model))
    ]  # behind them: next values of buffers
    _assert_equal(results, _eager(entry, entry.args))


@models(["bloom", "entmax15"])
def test_exported_at_batch_2_right_at_batch_5(name: str, dynamo: bool, tmp_path: Path, fresh: FreshProcess) -> None:
    made = exported(name, dynamo, dynamic=True)
    entry = made.entry
    assert entry.sized is not None
    assert entry.args[0].shape[0] == 2
    path = tmp_path / "model.onnx"
    made.program.save(path)
    larger = entry.sized(5, 7)
    _assert_equal(fresh.run(path, _feeds(path, larger), entry.allow), _eager(entry, larger))


@pytest.mark.parametrize(
    ("name", "calls"), [("bloom", 2), ("ibert", 94), ("entmax15", 1), ("snn", 16), ("timm_activations", 5), ("checkpointed", 0)]
)
def test_eager_makes_the_calls_that_the_zoo_promises(name: str, calls: int) -> None:
    """A release of a library that goes another way would otherwise let zero equal zero."""
    assert len(calls_of(entry_of(name))[0]) == calls


@pytest.mark.slow
def test_ibert_before_its_first_step_makes_99_calls(
    dynamo: bool, tmp_path: Path, fresh: FreshProcess, request: pytest.FixtureRequest
) -> None:
    """Five of them are made again when a layer norm overflows: nothing reads what the first call gave, eager makes it all the same."""
    if dynamo:
        reason = "I-BERT's overflow handling in training mode is `if tensor:`, which torch.export refuses with or without Functions"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    made = exported("ibert_first_step", dynamo)
    assert len(made.calls) == 99
    assert len(nodes(made.program.model, "PythonOp")) == 99
    path = tmp_path / "model.onnx"
    made.program.save(path)
    results = fresh.run(path, _feeds(path, made.entry.args), made.entry.allow)[: len(results_of(made.program.model))]
    _assert_equal(results, _eager(made.entry, made.entry.args))


def test_a_reentrant_checkpoint_is_inlined_with_a_notice(dynamo: bool) -> None:
    entry = entry_of("checkpointed")
    with pytest.warns(exporter.PythonopWarning, match=r"CheckpointFunction.*inlined"):
        program = exporter.export(entry.model, entry.args, dynamo=dynamo)
    (name,) = program.inlined
    assert name == "torch.utils.checkpoint:CheckpointFunction"


@pytest.mark.slow
@pytest.mark.xdist_group("ibert")
def test_arguments_that_are_no_tensors_are_in_the_file(dynamo: bool) -> None:
    """I-BERT passes int, bool and None beside tensors; snntorch a float."""
    quant = next(
        n
        for n in nodes(exported("ibert", dynamo).program.model, "PythonOp")
        if n.attributes["name"].as_string().endswith(":SymmetricQuantFunction")
    )
    assert quant.attributes["input_convention"].as_string() == "dccd"
    assert quant.attributes["input_int_scalars"].as_ints()[0] == 8
    fixed = [
        n for n in nodes(exported("ibert", dynamo).program.model, "PythonOp") if n.attributes["name"].as_string().endswith(":FixedPointMul")
    ]
    assert {n.attributes["input_convention"].as_string() for n in fixed} == {"ddcdcc", "ddcddd"}
    spike = next(n for n in nodes(exported("snn", dynamo).program.model, "PythonOp") if n.attributes["name"].as_string().endswith(":ATan"))
    assert list(spike.attributes["input_float_scalars"].as_floats()) == [2.0]
