"""The first node of a graph whose value, or gradient, has no counterpart in what eager PyTorch computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from exporter.forward.case import Case
from exporter.forward.inputs import named_tensors
from exporter.gradient_graph.build import built
from exporter.runtime.session import inference_session
from exporter.runtime.tensors import Runner, tensor
from exporter.verification.compare import coarser, tolerance_of
from exporter.verification.provenance import module_of, operator_of
from exporter.verification.steps import backward, compiling_quietly, copy_of, tensors_of
from symbolics import torch_private as private
from symbolics.graph.flatten import flattened
from symbolics.graph.walk import reads
from symbolics.node.metadata import pairing_of, results_of

__all__ = ["first_departure"]

_TOLERANCE = 1e-4  # and what float16 or bfloat16 allows, where something is computed in it


def first_departure(program: Any, case: Case, cotangents: Sequence[Any], allow: Any) -> str | None:
    """Where a file leaves eager PyTorch, as a sentence; None where no node stands out.

    Every tensor that eager computes on its way forward and back is remembered by its sorted elements, so that transposed
    and reshaped values are found again. From the results that differ the graph is walked against its direction through
    values that eager does not have; where the walk ends in values that eager has, a node departs. Values inside a node that
    eager computes in another way have a known value behind them, so the walk does not come by.

    Args:
        program: What was exported.
        case: The model and its example arguments.
        cotangents: One per output, None where it has no gradient.
        allow: What the file may name.
    """
    known, results = _eager(case, cotangents)
    training = built(program)
    pairing = pairing_of(training)
    assert pairing is not None
    outputs = [value for value in training.graph.outputs if value.name not in set(pairing.outputs.values())]
    returned = [value.name for value in results_of(training) if value in outputs]
    feeds = _feeds(training, case, returned, cotangents, pairing)
    nodes = list(training.graph)
    values = _run(training, feeds, allow)

    def is_known(value: ir.Value) -> bool:
        array = values.get(value.name or "")
        return array is None or known.has(array)

    for stage, ends in (("value", outputs), ("gradient", [v for v in training.graph.outputs if v.name in set(pairing.outputs.values())])):
        wrong = [value for value in ends if value.name in values and not results.has(values[value.name])]
        found = _frontier(nodes, wrong, is_known)
        if found is not None:
            return _sentence(found, stage)
    return None


# --------------------------------------------------------------------------------------------------- what eager knows


class _Known:
    """Tensors by their elements, whatever their order."""

    def __init__(self) -> None:
        self._by_size: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self.half: torch.dtype | None = None

    def add(self, value: torch.Tensor) -> None:
        """Remember a float tensor."""
        self.half = coarser(self.half, value.dtype)
        if value.is_floating_point() and value.numel():
            self._by_size[value.numel()].append(np.sort(value.detach().double().cpu().numpy(), axis=None))

    def has(self, array: np.ndarray) -> bool:
        """Whether some tensor has these elements."""
        if array.dtype.kind != "f" or not array.size:
            return True
        wanted = np.sort(array.astype(np.float64), axis=None)
        tolerance = _TOLERANCE if self.half is None else max(_TOLERANCE, tolerance_of(str(self.half).removeprefix("torch.")))
        scale = tolerance * (np.abs(wanted).max() + 1e-30)
        return any(np.allclose(other, wanted, rtol=tolerance, atol=scale, equal_nan=True) for other in self._by_size[wanted.size])


def _eager(case: Case, cotangents: Sequence[Any]) -> tuple[_Known, _Known]:
    """Everything that a step of the model computes; and its results alone, next values of buffers among them."""
    model, args, kwargs = copy_of(case.model), case.args, case.kwargs or {}
    known, results = _Known(), _Known()
    leaves: list[torch.Tensor] = []

    def fresh(value: torch.Tensor) -> torch.Tensor:
        leaves.append(value.detach().clone().requires_grad_(value.is_floating_point()))
        return leaves[-1] * 1 if value.is_floating_point() else leaves[-1]

    with private.every_result(known.add), compiling_quietly():
        copies, keywords = pytree.tree_map_only(torch.Tensor, fresh, (args, kwargs))
        outputs = tensors_of(model(*copies, **keywords))
        backward(outputs, cotangents)
    for value in (*outputs, *model.buffers(), *(leaf.grad for leaf in (*leaves, *model.parameters()))):
        if value is not None:
            results.add(value)
            known.add(value)
    for value in (*leaves, *model.parameters(), *(g for g in cotangents if g is not None)):
        known.add(value)
    results.half = known.half
    return known, results


# ---------------------------------------------------------------------------------------------------- what the file has


def _feeds(training: ir.Model, case: Case, outputs: Sequence[Any], cotangents: Sequence[Any], pairing: Any) -> dict[str, torch.Tensor]:
    given = dict(zip(outputs, cotangents, strict=True))
    named = named_tensors(case.model, case.args, case.kwargs or {})
    seeds = {graph_input: output for output, graph_input in pairing.inputs.items()}
    plain = [str(value.name) for value in training.graph.inputs if value.name not in seeds]
    if not set(plain) <= set(named):
        named = dict(zip(plain, named.values(), strict=True))
    feeds = {name: named[name].detach().contiguous() for name in plain}
    for graph_input, output in seeds.items():
        cotangent = given[output]
        feeds[graph_input] = cotangent.contiguous()
    return feeds


def _run(training: ir.Model, feeds: dict[str, torch.Tensor], allow: Any) -> dict[str, np.ndarray]:
    """Every float value of the graph."""
    model = flattened(training).clone()
    wanted = [value for node in model.graph for value in node.outputs if value.name and not value.is_graph_output()]
    model.graph.outputs.extend(value for value in wanted if value.dtype is not None and value.dtype.is_floating_point())
    runner = Runner(inference_session(model, allow), torch.device("cpu"))
    return {
        name: tensor(value).float().numpy() if value.element_type() == 16 else tensor(value).numpy()
        for name, value in runner.run(feeds).items()
    }


def _frontier(nodes: Sequence[ir.Node], wrong: Iterable[ir.Value], is_known: Any) -> ir.Node | None:
    """The first node, in the graph's order, at which the walk from the wrong results ends."""
    waiting, seen, ends = list(wrong), set(wrong), set()
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if node is None:
            continue
        unknown = [v for v in reads(node) if v.producer() is not None and not is_known(v)]
        if not unknown:
            ends.add(node)
        for v in unknown:
            if v not in seen:
                seen.add(v)
                waiting.append(v)
    return next((node for node in nodes if node in ends), None)


def _sentence(node: ir.Node, stage: str) -> str:
    where = module_of(node)
    return f"the {stage} of node {node.name!r} ({operator_of(node)}){' in ' + where if where else ''}: its inputs are eager's, its result is not"
