"""Real models, both exporters: every call of eager is a PythonOp, and the file gives eager's outputs elsewhere."""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch.utils import _pytree as pytree

import exporter
from tests.end_to_end.models import zoo
from tests.support import FreshProcess, counted_applies, nodes

TOLERANCE = 1e-5


@dataclass
class Exported:
    """One model through one exporter.

    Attributes:
        entry: The model and what is known about it; its state is that before the export.
        calls: Eager's calls of user Functions in one forward.
        checkpoints: Eager's calls of torch's reentrant checkpoint.
        program: What exporter.export returned.
    """

    entry: zoo.Entry
    calls: list[type]
    checkpoints: int
    program: Any


def _count(entry: zoo.Entry) -> tuple[list[type], int]:
    checkpoints = 0
    own = torch.utils.checkpoint.CheckpointFunction.forward

    def counting(*args: Any) -> Any:
        nonlocal checkpoints
        checkpoints += 1
        return own(*args)

    with counted_applies() as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.checkpoint.CheckpointFunction, "forward", staticmethod(counting))
        copy.deepcopy(entry.model)(*entry.args)
    return calls, checkpoints


@functools.cache
def _export(name: str, dynamo: bool) -> Exported:
    """Each model is exported once by each exporter: several tests look at it."""
    entry = getattr(zoo, name)()
    calls, checkpoints = _count(entry)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notice of a checkpoint has a test of its own
        program = exporter.export(copy.deepcopy(entry.model), entry.args, dynamo=dynamo, dynamic_shapes=entry.dynamic_shapes)
    return Exported(entry, calls, checkpoints, program)


def _eager(entry: zoo.Entry, args: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
    with torch.no_grad():
        return [leaf.numpy() for leaf in pytree.tree_leaves(copy.deepcopy(entry.model)(*args))]


def _assert_equal(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    assert len(found) == len(wanted)
    for one, two in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
        np.testing.assert_allclose(one, two, rtol=0, atol=TOLERANCE)


def _feeds(path: Path, args: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    return dict(zip([value.name for value in onnx.load(path).graph.input], args, strict=True))


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_call_is_a_node_and_a_fresh_process_gives_eagers_outputs(
    name: str, dynamo: bool, tmp_path: Path, fresh: FreshProcess
) -> None:
    exported = _export(name, dynamo)
    entry = exported.entry
    found = [node.attributes["name"].as_string().rpartition(":")[2] for node in nodes(exported.program.model, "PythonOp")]
    assert sorted(found) == sorted(cls.__qualname__ for cls in exported.calls)
    assert exported.checkpoints == entry.inlined
    path = tmp_path / "model.onnx"
    exported.program.save(path)
    onnx.checker.check_model(path, full_check=True)
    _assert_equal(fresh.run(path, _feeds(path, entry.args), entry.allow), _eager(entry, entry.args))


@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name in zoo.DYNAMIC])
def test_exported_at_batch_2_right_at_batch_5(name: str, dynamo: bool, tmp_path: Path, fresh: FreshProcess) -> None:
    exported = _export(name, dynamo)
    entry = exported.entry
    assert entry.larger_args is not None
    assert (entry.args[0].shape[0], entry.larger_args[0].shape[0]) == (2, 5)
    path = tmp_path / "model.onnx"
    exported.program.save(path)
    _assert_equal(fresh.run(path, _feeds(path, entry.larger_args), entry.allow), _eager(entry, entry.larger_args))


@pytest.mark.parametrize(
    ("name", "calls"), [("bloom", 2), ("ibert", 94), ("entmax15", 1), ("snn", 16), ("timm_activations", 5), ("checkpointed", 0)]
)
def test_eager_makes_the_calls_that_the_zoo_promises(name: str, calls: int) -> None:
    """A release of a library that goes another way would otherwise let zero equal zero."""
    assert len(_count(getattr(zoo, name)())[0]) == calls


def test_ibert_before_its_first_step_makes_99_calls(
    dynamo: bool, tmp_path: Path, fresh: FreshProcess, request: pytest.FixtureRequest
) -> None:
    """Five of them are made again when a layer norm overflows: nothing reads what the first call gave, eager makes it all the same."""
    if dynamo:
        reason = "I-BERT's overflow handling in training mode is `if tensor:`, which torch.export refuses with or without Functions"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    exported = _export("ibert_first_step", dynamo)
    assert len(exported.calls) == 99
    assert len(nodes(exported.program.model, "PythonOp")) == 99
    path = tmp_path / "model.onnx"
    exported.program.save(path)
    _assert_equal(fresh.run(path, _feeds(path, exported.entry.args), exported.entry.allow), _eager(exported.entry, exported.entry.args))


def test_a_reentrant_checkpoint_is_inlined_with_a_notice(dynamo: bool) -> None:
    entry = zoo.checkpointed()
    with pytest.warns(exporter.PythonopWarning, match=r"CheckpointFunction.*inlined"):
        program = exporter.export(entry.model, entry.args, dynamo=dynamo)
    (name,) = program.inlined
    assert name == "torch.utils.checkpoint:CheckpointFunction"


def test_arguments_that_are_no_tensors_are_in_the_file(dynamo: bool) -> None:
    """I-BERT passes int, bool and None beside tensors; snntorch a float."""
    quant = next(
        n
        for n in nodes(_export("ibert", dynamo).program.model, "PythonOp")
        if n.attributes["name"].as_string().endswith(":SymmetricQuantFunction")
    )
    assert quant.attributes["input_convention"].as_string() == "dccd"
    assert quant.attributes["input_int_scalars"].as_ints()[0] == 8
    fixed = [
        n for n in nodes(_export("ibert", dynamo).program.model, "PythonOp") if n.attributes["name"].as_string().endswith(":FixedPointMul")
    ]
    assert {n.attributes["input_convention"].as_string() for n in fixed} == {"ddcdcc", "ddcddd"}
    spike = next(n for n in nodes(_export("snn", dynamo).program.model, "PythonOp") if n.attributes["name"].as_string().endswith(":ATan"))
    assert list(spike.attributes["input_float_scalars"].as_floats()) == [2.0]
