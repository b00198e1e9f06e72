"""A model and its loss as one module: what a training step differentiates, and what its evaluation runs."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from exporter.files.program import Program
from exporter.forward.export import export
from exporter.forward.inputs import named_leaves, named_tensors
from exporter.gradient_graph.slow_operators import slow_operators_stay
from exporter.training.carried import OURS
from exporter.training.target_sizes import read_of_inputs, settle_sizes
from symbolics.errors import ArgumentError, ExportError, Faq
from symbolics.node.cut import read_cut, write_cut
from symbolics.node.metadata import (
    read_changes,
    read_cumulative,
    read_state,
    read_stilled,
    write_changes,
    write_cumulative,
    write_state,
    write_stilled,
    write_transient,
)
from symbolics.node.names import BUFFERS_KEY, CUMULATIVE_KEY, CUT_PROPERTY, MODULE_PROPERTY, STATE_KEY, STILLED_KEY, TRANSIENT_KEY

__all__ = ["Objective", "check_names", "state_key"]

_PRECISIONS = {None: None, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Objective(torch.nn.Module):
    """forward(*args, *targets) -> the loss, a 0-d tensor, and the model's output beside it where ``gives`` says so.

    An evaluation gives the model's output always, the loss in front of it where there is one, and has targets only then.

    Its signature has the names of the arguments that are given, then ``target`` (``target_0``, ... where there are
    several): the exporters name the inputs after them.

    Attributes:
        args: Example arguments, targets included.
        names: The inputs that the model's own arguments become.
        target_names: The inputs that the targets become; none for an evaluation.
        called: How people call it, for what an error tells them to let run.

    Raises:
        ExportError: The model's forward does not take these arguments, or has one with the name of a target.
        ArgumentError: There is no such precision.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss: Callable[..., Any] | None,
        targets: tuple[Any, ...],
        precision: str | None,
        *,
        evaluates: bool = False,
        gives: bool = False,
    ) -> None:
        super().__init__()
        if precision not in _PRECISIONS:
            raise ArgumentError(f"precision is {precision!r}: give 'float16', 'bfloat16' or None")
        dtype = _PRECISIONS[precision]
        self.training = model.training  # not train(): that would reach into the model
        self._made = args, kwargs, targets, precision, evaluates, gives
        self.model = model
        self.loss = loss
        self.called = "model(*args)" if loss is None else "loss(model(*args), *targets)"
        bound = _bind(model, args, kwargs)
        count = len(bound)
        names = ["target"] if len(targets) == 1 else [f"target_{i}" for i in range(len(targets))]
        for name in names:
            if name in bound:
                raise ExportError(f"the model has an argument {name!r}, which is the name of the loss's target: rename it")
        self._ignored: frozenset[str] = frozenset()
        if evaluates and loss is None:
            self._ignored, names, targets = frozenset(names), [], ()
        self.args = (*(value for _, value in bound.values()), *targets)
        keywords = {name for name, (keyword, _) in bound.items() if keyword}
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in (*bound, *names)])

        def forward(*given: Any) -> Any:
            values = dict(zip(bound, given[:count], strict=True))
            rest = {name: values.pop(name) for name in keywords}
            with torch.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext():
                output = model(*values.values(), **rest)
                if evaluates and loss is None:
                    return output
                number = _scalar(output if loss is None else loss(output, *given[count:]), loss)
                return (number, output) if evaluates or gives else number

        forward.__signature__ = signature  # type: ignore[attr-defined]
        self.forward = forward
        every = list(named_tensors(self, self.args, {}))
        ours = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(targets))
        self.names, self.target_names = every[: len(every) - ours], every[len(every) - ours :]

    def __deepcopy__(self, memo: dict[int, Any]) -> Objective:
        """Around copies of model and loss: forward is a closure, which a deep copy shares."""
        args, kwargs, targets, precision, evaluates, gives = self._made
        model, loss = copy.deepcopy((self.model, self.loss), memo)
        return Objective(model, args, kwargs, loss, targets, precision, evaluates=evaluates, gives=gives)

    @property
    def _pythonop_model(self) -> torch.nn.Module:
        """The user's model, for who looks for a module to name: no attribute of a user's own module is called so."""
        return self.model

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the arguments and targets by their names in the graph."""
        return {name: tuple(value.shape) for name, value in named_tensors(self, self.args, {}).items()}

    def export(self, *, dynamic_shapes: Any, **options: Any) -> Program:
        """Export it; names of state and modules are those in the model, without this module around it.

        Args:
            dynamic_shapes: As `dynamic`.
            **options: As `exporter.forward.export.export`.

        Raises:
            ExportError, ArgumentError: As there.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Exporting a model while it is in training mode", UserWarning)
            with contextlib.nullcontext() if self._made[4] else slow_operators_stay():  # an evaluation is run as it is
                program = export(self, self.args, dynamic_shapes=self.dynamic(dynamic_shapes), **options)
        if dynamic_shapes is not None:
            settle_sizes(
                program.model.graph,
                [tuple(value.shape) for value in named_tensors(self, self.args, {}).values()],
                len(self.names),
                self._asked(dynamic_shapes),
                named=bool(options.get("dynamo", True)),
            )
            read_of_inputs(program.model.graph, len(self.names))
        _rename_state(program.model)
        for node in program.model.graph.all_nodes():
            if (path := node.metadata_props.pop(MODULE_PROPERTY, "model")) != "model":
                node.metadata_props[MODULE_PROPERTY] = state_key(path)
            if (said := node.metadata_props.get(CUT_PROPERTY)) is not None:
                cut = read_cut(said)
                node.metadata_props[CUT_PROPERTY] = write_cut(replace(cut, module="" if cut.module == "model" else state_key(cut.module)))
        program.portable = [replace(call, module="" if call.module == "model" else state_key(call.module)) for call in program.portable]
        return program

    def _given(self, shapes: Any) -> dict[str, Any]:
        """The parts of ``dynamic_shapes`` by the names of arguments."""
        names = list(inspect.signature(self.forward).parameters)
        given = dict(shapes) if isinstance(shapes, Mapping) else dict(zip(names, shapes, strict=False))
        return {name: shape for name, shape in given.items() if name not in self._ignored}

    def _asked(self, shapes: Any) -> set[str]:
        """The targets of which ``dynamic_shapes`` says what is open, by the names of their inputs."""
        given, every = self._given(shapes), dict(zip(inspect.signature(self.forward).parameters, self.args, strict=True))
        return {leaf for name in given if name in every for leaf in named_leaves(name, every[name])}

    def dynamic(self, shapes: Any) -> Any:
        """``dynamic_shapes`` of the model's arguments for all of this module's; sizes of targets follow where nothing is said."""
        if shapes is None:
            return None
        names = list(inspect.signature(self.forward).parameters)
        given = self._given(shapes)
        if unknown := set(given) - set(names):
            raise ExportError(f"dynamic_shapes names {sorted(unknown)}; the step's arguments are {', '.join(names)}")
        every = dict(zip(names, self.args, strict=True))
        for name in names:
            if name not in given:
                given[name] = pytree.tree_map(_automatic if name.startswith("target") else _static, every[name])
        return {name: given[name] for name in names}


def _automatic(leaf: Any) -> Any:
    return dict.fromkeys(range(leaf.dim()), torch.export.Dim.AUTO) if isinstance(leaf, torch.Tensor) else None


def _static(leaf: Any) -> None:
    return None


def _bind(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, tuple[bool, Any]]:
    """name -> (whether it is passed by keyword, value) of the arguments that are given.

    Raises:
        ExportError: forward cannot be called so.
    """
    try:
        signature = inspect.signature(model.forward)
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise ExportError(f"{type(model).__name__}.forward cannot be called with the example arguments: {error}") from error
    out: dict[str, tuple[bool, Any]] = {}
    for name, value in arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            out.update((f"{name}_{i}", (False, item)) for i, item in enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            out.update((key, (True, item)) for key, item in value.items())
        else:
            out[name] = (name in kwargs, value)
    return out


def _scalar(loss: Any, function: Any) -> torch.Tensor:
    """The one number in what the loss, or a model that computes its loss, returned."""
    if function is None and not isinstance(loss, torch.Tensor):
        if isinstance(loss, Mapping) and "loss" in loss:
            loss = loss["loss"]
        elif isinstance(loss, (tuple, list)) and loss:
            loss = loss[0]
    who = (
        "the model (loss=None: it returns its loss)"
        if function is None
        else f"the loss {getattr(function, '__name__', type(function).__name__)}"
    )
    way = "reduce it, for example with .mean()" + (
        ""
        if function is not None
        else ", or give loss= and targets= (on the command line, TARGET returns exporter.Case(model, args, loss=..., targets=(...,)))"
    )
    if not isinstance(loss, torch.Tensor):
        raise ExportError(
            f"{who} returned something of type {type(loss).__name__}: a training step needs one floating-point number, a tensor: {way}",
            faq=Faq.NO_NUMBER,
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ExportError(
            f"{who} returned a tensor of {loss.dtype} with shape {list(loss.shape)}: a training step needs one floating-point number: {way}",
            faq=Faq.NO_NUMBER,
        )
    return loss.reshape(())


def check_names(names: Sequence[str] | None) -> list[str]:
    """Names for the model's outputs beside a loss.

    Raises:
        ArgumentError: One is a name that a step uses itself.
    """
    if isinstance(names, str):
        raise ArgumentError(f"output_names is {names!r}: give a list of names")
    for name in names or ():
        if OURS.fullmatch(name) or name.endswith(".next"):
            raise ArgumentError(f"output_names has {name!r}, a name that a training step uses itself: give the output another one")
    return list(names or ())


def state_key(name: str) -> str:
    """The model's own name of a parameter; a loss's parameters are under ``loss.``."""
    return name.removeprefix("model.")


def _rename_state(model: ir.Model) -> None:
    """Give the state the names that it has in the model, without the module around model and loss."""
    entries = read_state(model.metadata_props) or {}
    initializers = model.graph.initializers
    wanted = {state_key(entry.initializer) for entry in entries.values()}
    if clashing := sorted(wanted & {str(value.name) for value in model.graph.inputs}):
        raise ExportError(
            f"the argument {clashing[0]!r} of forward has the name of a parameter or buffer, and both are inputs of a training step\n  way out: give the "
            "arguments other names by input_names=[...], in the order of the step's batch"
        )
    for value in [value for node in model.graph.all_nodes() for value in node.outputs if value.name in wanted]:
        value.name = f"{value.name}/value"
    renamed = {state_key(name): replace(entry, initializer=state_key(entry.initializer)) for name, entry in entries.items()}
    if len(renamed) != len(entries):
        raise ExportError("the model has a submodule `loss` with a parameter of the same name as one of the loss: rename one of them")
    for name in [entry.initializer for entry in entries.values()]:
        if name in initializers and state_key(name) != name:
            value = initializers.pop(name)
            value.name = state_key(name)
            initializers[value.name] = value
    model.metadata_props[STATE_KEY] = write_state(renamed)
    if transient := [state_key(key) for key, entry in entries.items() if state_key(key) == key or not entry.persistent]:
        model.metadata_props[TRANSIENT_KEY] = write_transient(tuple(transient))
    if modules := read_stilled(model.metadata_props):
        model.metadata_props[STILLED_KEY] = write_stilled(tuple(map(state_key, modules)))
    if cumulative := read_cumulative(model.metadata_props):
        model.metadata_props[CUMULATIVE_KEY] = write_cumulative(tuple(sorted(map(state_key, cumulative))))
    if changes := read_changes(model.metadata_props):
        model.metadata_props[BUFFERS_KEY] = write_changes(
            replace(
                changes,
                carried={state_key(name): output for name, output in changes.carried.items()},
                lost={state_key(name): why for name, why in changes.lost.items()},
            )
        )
