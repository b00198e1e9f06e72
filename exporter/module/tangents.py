"""Forward mode through a loaded file: dual tensors in, dual tensors out, by the tangent graph of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from exporter.files.proto import reading
from exporter.gradient_graph.model import remove_marks
from exporter.gradient_graph.partition import forward_part
from exporter.gradient_graph.tangents import build_tangent_graph
from exporter.module.plans import Plans
from exporter.runtime.tensors import Runner, tensor
from symbolics.errors import FormatError, RunError
from symbolics.node.metadata import TangentPairing, tangents_of

__all__ = ["Tangents", "taken_apart"]


def taken_apart(values: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The values without their tangents, and the tangents of those that have one."""
    pairs = {name: forward_ad.unpack_dual(value) for name, value in values.items()}
    tangents = {name: pair.tangent for name, pair in pairs.items() if pair.tangent is not None}
    return {name: pairs[name].primal if name in tangents else value for name, value in values.items()}, tangents


class _Session(NamedTuple):
    runner: Runner
    pairing: TangentPairing
    outputs: tuple[str, ...]


class Tangents:
    """The sessions that compute the tangents of one file, made when they are first needed: one for each set of names that move."""

    def __init__(self, plans: Plans) -> None:
        self.plans = plans
        self._sessions: dict[tuple[bool, frozenset[str]], _Session] = {}

    def outputs(self, training: bool, feeds: Mapping[str, torch.Tensor], tangents: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of the model, with tangents and without gradients.

        Args:
            training: The mode.
            feeds: Every input, parameter and buffer, and the seed where there is one, without tangents.
            tangents: Those of the inputs and the state that move.
        """
        session = self._session(training, frozenset(tangents))
        results, moved = self._run(session, feeds, tangents)
        return _dual(session.outputs, results, moved)

    def added(
        self,
        training: bool,
        feeds: Mapping[str, torch.Tensor],
        tangents: Mapping[str, torch.Tensor],
        names: tuple[str, ...],
        results: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """``results``, the outputs ``names`` of a run with gradients, with their tangents."""
        return _dual(names, results, self.of(training, feeds, tangents))

    def of(self, training: bool, feeds: Mapping[str, torch.Tensor], tangents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tangents of the outputs by name; those that nothing which moves reaches are missing."""
        return self._run(self._session(training, frozenset(tangents)), feeds, tangents)[1]

    def _run(
        self, session: _Session, feeds: Mapping[str, torch.Tensor], tangents: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        given = {**feeds, **{session.pairing.inputs[name]: value for name, value in tangents.items()}}
        reached = {k: v for k, v in session.pairing.outputs.items() if k not in session.pairing.unreached}
        wanted = (*session.outputs, *reached.values())

        def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found = session.runner.run(dict(zip(given, values, strict=True)))
            return tuple(tensor(found[name]) for name in wanted)

        made = _Product.apply(run, *given.values())  # type: ignore[no-untyped-call]
        count = len(session.outputs)
        return list(made[:count]), dict(zip(reached, made[count:], strict=True))

    def _session(self, training: bool, moving: frozenset[str]) -> _Session:
        plans = self.plans
        with plans.lock:
            found = self._sessions.get((training, moving))
            if found is None:
                found = self._sessions[training, moving] = self._make(training, moving)
            return found

    def _make(self, training: bool, moving: frozenset[str]) -> _Session:
        plans = self.plans
        with reading(plans.model):
            model, _, _ = plans.prepared(training)
            outputs = tuple(value.name or "" for value in forward_part(model, ()).graph.outputs)
        graph = build_tangent_graph(
            model, wrt=sorted(moving), outputs=[v.name or "" for v in model.graph.outputs if v.name in outputs and _is_float(v)]
        )
        pairing = tangents_of(graph)
        assert pairing is not None
        with reading(plans.model):
            remove_marks(graph)
            part = forward_part(graph, plans.state)
        return _Session(plans.session(part), pairing, outputs)


def _is_float(value: Any) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _dual(names: tuple[str, ...], results: list[torch.Tensor], tangents: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    for name, result in zip(names, results, strict=True):
        if name in tangents and tangents[name].shape != result.shape:
            raise FormatError(
                f"the tangent of the output {name!r} has the shape {list(tangents[name].shape)}, the output {list(result.shape)}"
            )
    return [forward_ad.make_dual(y, tangents[name]) if name in tangents else y for name, y in zip(names, results, strict=True)]


class _Product(torch.autograd.Function):
    """One run of a tangent graph, as torch.func's transforms pass it: they take values out of their wrappers for a Function."""

    @staticmethod
    def forward(run: Callable[..., tuple[torch.Tensor, ...]], *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return run(*values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        """Raises RunError: tangents do not pass tangents."""
        raise RunError(
            "a loaded file has no tangents of its tangents (forward mode of forward mode).\n"
            "  way out: take the inner derivative backwards (torch.func.grad, vjp, jacrev)"
        )

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Raises RunError: gradients do not pass tangents."""
        raise RunError(
            "a loaded file has no gradient of its tangents: take the inner derivative backwards (torch.func.vjp, jacrev), differentiate the model that it was exported from, or build the file of "
            "the second derivative (build_tangent_graph of build_gradient_graph's model)"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], run: Callable[..., tuple[torch.Tensor, ...]], *values: torch.Tensor) -> Any:
        """One run for each direction: torch.func.jacfwd."""
        rows = [
            _Product.apply(run, *(v if dim is None else v.select(dim, i) for v, dim in zip(values, in_dims[1:], strict=True)))  # type: ignore[no-untyped-call]
            for i in range(info.batch_size)
        ]
        return tuple(map(torch.stack, zip(*rows, strict=True))), (0,) * len(rows[0])
