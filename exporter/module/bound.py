"""What a loaded module does in forward: arguments are checked, the right sessions run, buffers are updated."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from exporter.files.places import path_in_name
from exporter.files.program import model_bytes
from exporter.files.read import open_model
from exporter.files.trust import Gate
from exporter.gradient_graph.frozen import warn_of_frozen
from exporter.module.orders import Orders
from exporter.module.plans import Plan, Plans, Settings
from exporter.module.state import leave_empty, look_up, with_flags
from exporter.module.step import ForwardRun, Step, TransformedStep
from exporter.module.tangents import Tangents, taken_apart
from exporter.runtime.shared_sizes import different
from exporter.runtime.tensors import to_array
from exporter.train_mode.batch_norm import counter_of
from exporter.train_mode.dropout import draw_seed
from symbolics import torch_private as private
from symbolics.errors import Faq, FormatError, RunError, UnsupportedOperatorError
from symbolics.graph.values import scope_of, trains
from symbolics.graph.walk import walk
from symbolics.node.dtypes import DTYPES
from symbolics.node.metadata import StateEntry, changes_of, pairing_of, read_cumulative, read_stilled, write_state
from symbolics.node.names import BUFFERS_KEY, CUMULATIVE_KEY, OUTPUTS_KEY, STATE_KEY
from symbolics.node.result import rebuild
from symbolics.text import shown
from symbolics.users import warn

__all__ = ["Bound"]


class _Declared(NamedTuple):
    """What the graph says of an input.

    Attributes:
        kind: The element type, None where nothing is said.
        sizes: A number, a name where it varies, None where nothing is said of it; None where nothing is said at all.
        fixed, named: The axes of the numbers and of the names among them.
    """

    kind: torch.dtype | None
    sizes: tuple[int | str | None, ...] | None
    fixed: tuple[tuple[int, int], ...]
    named: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, value: ir.Value) -> _Declared:
        kind = DTYPES.get(int(value.dtype)) if value.dtype is not None else None
        sizes = None if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape)
        axes = list(enumerate(sizes or ()))
        return cls(
            kind,
            sizes,
            tuple((axis, d) for axis, d in axes if isinstance(d, int)),
            tuple((axis, d) for axis, d in axes if isinstance(d, str)),
        )

    def fits(self, shape: torch.Size) -> bool:
        """Whether a tensor may have this shape."""
        if self.sizes is not None and len(shape) != len(self.sizes):
            return False
        for axis, size in self.fixed:  # noqa: SIM110  (a generator would cost as much as the rest)
            if shape[axis] != size:
                return False
        return True


class Bound:
    """A file with the module that it became: from arguments to results.

    Attributes:
        source: What messages call the file.
        inputs: The graph's inputs by name, in their order; the state is not among them.
        entries: What the file says of each name of the state.
        all_names: initializer -> the names under which the module has it.
        names: initializer -> the first of them.
        state: initializer -> its element type and shape, which the module's tensors must keep.
        counters: running mean -> num_batches_tracked, both by initializer.
        changes: The buffers that the forward changes.
        stilled: The modules that would do something else in training mode, and were exported in eval mode.
        moded: The ways to the modules whose mode decides what the file computes.
        plans: The sessions.
        tangents: Those of forward mode.
        changed: The Functions that are others than when the file was exported, as `Session.changed` has them.
    """

    changed: Mapping[str, list[str]] = {}

    def __init__(
        self,
        model: ir.Model,
        entries: dict[str, StateEntry],
        names: dict[str, list[str]],
        allow: Any,
        gate: Gate,
        settings: Settings,
    ) -> None:
        graph = model.graph
        pairing = pairing_of(model)
        seeds = set(pairing.inputs.values()) if pairing is not None else set()
        self.source = "model"
        self.entries = entries
        self.all_names = names
        self.names = {initializer: first for initializer, (first, *_) in names.items()}
        arrays = {name: graph.initializers[name].const_value for name in names}
        self.state = {name: (DTYPES[int(array.dtype)], tuple(array.shape)) for name, array in arrays.items() if array is not None}
        given = [value for value in graph.inputs if value.name not in seeds and value.name not in graph.initializers]
        self.inputs = {value.name: value for value in given if value.name is not None}
        self._declared = {name: _Declared.of(value) for name, value in self.inputs.items()}
        self._places = [(name, tuple(self.names[name].split(".")), *self.state[name]) for name in self.state]
        parameters = {name for name, entry in entries.items() if entry.kind == "parameter"}
        #: The parameters that are one tensor in the file: it, its place in the state, its other name, and the way there.
        self._tied = [
            (one, list(self.state).index(one), other, tuple(other.split(".")))
            for one, (_, *others) in names.items()
            for other in others
            if other in parameters
        ]
        for value in (*self.inputs.values(), *graph.outputs):
            _check_type(value)
        self._single = False
        self.structure = model.metadata_props.get(OUTPUTS_KEY)
        self.gate = gate
        self.device = settings.device
        self._on_cpu = settings.device.type == "cpu"
        self.counters = {
            entry.initializer: other.initializer
            for name, entry in entries.items()
            if name.endswith("running_mean") and (other := entries.get(counter_of(name))) is not None
        }
        for counter in self.counters.values():
            kind, shape = self.state[counter]
            if kind.is_floating_point or kind is torch.bool or any(size != 1 for size in shape):
                raise FormatError(
                    f"{shown(counter)!r} counts batches, and is {kind} of shape {list(shape)}, not an integer: the file is damaged"
                )
        for name in sorted(read_cumulative(model.metadata_props)):
            if name not in names:
                raise FormatError.damaged(f"metadata {CUMULATIVE_KEY}", f"it names {shown(name)!r}, which is no parameter or buffer")
            if name not in self.counters:
                raise FormatError(
                    f"{shown(name)!r} is the average of all batches, and the file has no num_batches_tracked beside it: it is damaged"
                )
        self.changes = changes_of(model)
        self.moded = self._paths_of_modes(model)
        self.stilled = read_stilled(model.metadata_props) or ()
        self.plans = Plans(model, tuple(self.inputs), tuple(self.state), allow, settings)
        self.tangents = Tangents(self.plans)
        #: (mode, of which of inputs and state gradients are wanted) -> what runs.
        self._chosen: dict[tuple[bool, tuple[bool, ...]], Plan] = {}
        self._warned: set[str] = set()

    def __deepcopy__(self, memo: Any) -> Bound:
        return self  # its sessions hold no state of a module

    def __reduce__(self) -> tuple[Any, ...]:
        model = self.plans.model.clone()
        for name in self.names:
            value = model.graph.initializers[name]
            leave_empty(value, value.const_value.dtype, ())  # type: ignore[union-attr]
        return _reopened, (
            model_bytes(model), self.source, self.entries, self.all_names, self.state, self.plans.allow, self.plans.settings,
        )  # fmt: skip

    def filled(self, module: torch.nn.Module) -> ir.Model:
        """A copy of the file that holds the module's state as it counts now, and which of its parameters are frozen.

        Raises:
            RunError: As `run` has it of the state.
        """
        model = self.plans.model.clone()
        with torch.no_grad():
            for name, tensor in zip(self.state, self._state_of(module), strict=True):
                value = model.graph.initializers[name]
                value.const_value = ir.Tensor(to_array(tensor), dtype=value.dtype, name=name)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        wants_grad = {name: parameters[path].requires_grad for name, path in self.names.items() if path in parameters}
        entries = with_flags(model, self.entries, wants_grad)
        if entries != self.entries:
            model.metadata_props[STATE_KEY] = write_state(entries)
        return model

    def run(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The outputs of the graph, with gradients where they are wanted."""
        training = module.training
        if private.is_tracing() or (torch.compiler.is_compiling() and private.captures_here()):
            raise RunError(
                "a loaded file runs in onnxruntime, where torch.jit.trace, torch.export and torch.onnx.export see nothing.\n"
                "  way out: the file is the graph; save(path) of the loaded module writes it with the weights of now. To export a bigger model\n"
                "  around it, put the original module in its place, with original.load_state_dict(loaded.state_dict())"
            )
        self._check_mode(module, training)
        state = self._state_of(module)  # first: of a module of another type, the input is not what is wrong
        values = [*self._arguments(args, kwargs), *state]
        if private.transforms_active() or private.forward_level() >= 0:
            return self._run_moving(module, values)
        wanted: tuple[bool, ...] = ()
        if torch.is_grad_enabled():
            wanted = _wanted([value.requires_grad for value in values])
        plan = self._chosen.get((training, wanted)) or self._choose(training, wanted, values)
        if plan.seed is not None:
            values.append(draw_seed())
        run = ForwardRun(self.plans, plan)
        if plan.joined is None:
            results = run(values)
        else:
            results = list(Step.call(run, plan.apart(values)))
        if run.updates:
            self._update(plan, dict(zip(plan.names, values, strict=True)), run.updates)
        return results

    def _choose(self, training: bool, wanted: tuple[bool, ...], values: Sequence[torch.Tensor]) -> Plan:
        """The plan for a mode and the gradients that are wanted."""
        wrt = frozenset(itertools.compress((*self.inputs, *self.state), wanted))
        example = dict(zip(self.inputs, values, strict=False))
        try:
            plan = self.plans.plan(training, wrt, example)
        except (UnsupportedOperatorError, RunError) as error:
            # As in eager, what has no gradient runs, and a backward says why not. Nothing is wanted: then it is the forward's own error.
            plan = dataclasses.replace(self.plans.plan(training, frozenset(), example), refused=error)
        if plan.refused is None:
            warn_of_frozen(self.plans.model, wrt)
        if plan.wanted and plan.orders is None:
            plan.orders = Orders(self.plans, plan, training, wrt)
        self._chosen[training, wanted] = plan
        return plan

    def _run_moving(self, module: torch.nn.Module, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """`run` under a transform of torch.func, or where forward-mode differentiation is on."""
        training, names = module.training, (*self.inputs, *self.state)
        tangents: dict[str, torch.Tensor] = {}
        transformed = private.transforms_active()
        forward_mode = private.forward_level() >= 0
        if forward_mode and (not transformed or private.transform_kinds()[-1] == "Jvp"):
            plain, tangents = taken_apart(dict(zip(names, values, strict=True)))
            values = list(plain.values())
        wanted: tuple[bool, ...] = ()
        if torch.is_grad_enabled():
            requires = private.requires_grad if transformed else _requires_grad
            wanted = _wanted([requires(value) for value in values])
            if wanted and forward_mode and transformed:  # the gradients may get tangents: they have to be differentiable by what moves
                wanted = tuple(
                    flag or (value.is_floating_point() and private.may_move(value)) for value, flag in zip(values, wanted, strict=True)
                )
        plan = self._chosen.get((training, wanted)) or self._choose(training, wanted, values)
        if plan.seed is not None:
            values.append(draw_seed())
        feeds = dict(zip(plan.names, values, strict=True))
        if transformed:
            _refuse_updates(plan)
            if tangents:
                return self.tangents.outputs(training, feeds, tangents)
        run = ForwardRun(self.plans, plan, functools.partial(self.tangents.of, training), apart=bool(tangents))
        if plan.joined is not None:
            values = [value if name in plan.joined else value.detach() for name, value in feeds.items()]
        if transformed:
            return list(TransformedStep.apply(run, *values))[:-1]  # type: ignore[no-untyped-call]
        results = run(values) if plan.joined is None else list(Step.call(run, values))
        if tangents:
            results = self.tangents.added(training, feeds, tangents, plan.outputs, results)
        if run.updates:
            self._update(plan, feeds, run.updates)
        return results

    def _paths_of_modes(self, model: ir.Model) -> list[tuple[str, ...]]:
        """The ways to the modules of the file whose mode decides what it computes: those that have an operator with modes, or are next above it."""
        owners = {initializer: tuple(name.split(".")[:-1]) for initializer, name in self.names.items()}
        known = {(), *(owner[:end] for owner in owners.values() for end in range(1, len(owner) + 1))}
        found = {owners[name] for name in (() if self.changes.always else self.changes.carried) if name in owners}
        for node in filter(trains, walk(model.graph)):
            path = tuple((scope_of(node) or path_in_name(node.name or "")).split("."))
            found.add(next(path[:end] for end in range(len(path), -1, -1) if path[:end] in known))
            found.update(owners[value.name] for value in node.inputs if value is not None and value.name in owners)
        return sorted(found - {()})

    def warn_of_stilled(self) -> None:
        """Say once that train() does not bring back what the export has left out."""
        if self.stilled and "train" not in self._warned:
            self._warned.add("train")
            names = ", ".join(repr(shown(name)) for name in self.stilled[:5]) + (", ..." if len(self.stilled) > 5 else "")
            warn(
                f"{names} had been in eval() at export: train() brings back neither dropout nor moving statistics, which are not in the file.\n"
                "  way out: export the model in train() mode; eval() of the loaded module then is what this file is"
            )

    def _check_mode(self, module: torch.nn.Module, training: bool) -> None:
        """Say where the mode asks for more than the file holds.

        Raises:
            RunError: In training mode, of a file whose forward changes what it does not carry; or a module in it is in the other mode.
        """
        for path in self.moded:
            part: Any = module
            for name in path:
                if (part := part._modules.get(name)) is None:
                    break
            if part is not None and part.training is not training:
                modes = "train()" if part.training else "eval()", "train()" if training else "eval()"
                raise RunError(
                    f"{shown('.'.join(path))!r} is in {modes[0]}, the loaded module in {modes[1]}: a file runs in one mode.\n"
                    f"  way out: {modes[1]} of the loaded module, which reaches all of it; or export the model with that part in eval()"
                )
        if torch.is_autocast_enabled(self.device.type) and "autocast" not in self._warned:
            self._warned.add("autocast")
            warn(
                "torch.autocast does not reach into a loaded file, which computes in its own types: export the model under autocast, or in another type"
            )
        lost, carried = self.changes.lost, self.changes.carried
        if training and lost:
            name, why = next(iter(lost.items()))
            raise RunError(
                f"the forward of the exported model changes {shown(name)!r}{f' and {len(lost) - 1} more' if len(lost) > 1 else ''}, and the file does not carry it: "
                f"{shown(why)}. It would train with the value at export.\n"
                "  way out: eval() runs the file with that value; to train, let forward write into a buffer of fixed shape and type,\n"
                "  or take the value as an argument and return the new one, or make one node of the module that holds it (opaque=), and export again"
            )
        if not training and carried and not self.changes.always and "eval" not in self._warned:
            self._warned.add("eval")
            warn(
                f"the model was exported in training mode, where its forward changes {', '.join(repr(shown(n)) for n in list(carried)[:5])}: in eval() the "
                "file leaves that as it is and computes what it computes in training; where the model itself differs, export it in eval mode for that."
            )

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors in the order of the inputs.

        Raises:
            TypeError: Too many, too few, unknown or doubled arguments, or something that is no tensor.
            RunError: A tensor of another type, shape or device.
        """
        positional = [value for value in args if isinstance(value, torch.Tensor)]
        if len(positional) != len(args):
            positional = [leaf for leaf in pytree.tree_leaves(args) if leaf is not None]
        if len(positional) > len(self.inputs):
            raise TypeError(f"the model takes {len(self.inputs)} tensors ({', '.join(self.inputs)}), {len(positional)} were given")
        sizes: dict[str, tuple[int, str]] = {}
        if not kwargs and len(positional) == len(self.inputs):
            return [
                self._checked(name, declared, value, sizes)
                for (name, declared), value in zip(self._declared.items(), positional, strict=True)
            ]
        given: dict[str, Any] = dict(zip(self.inputs, positional, strict=False))
        for name, value in kwargs.items():
            if value is None:
                continue
            found = {name: value} if name in self.inputs else _named_leaves(name, value) or {name: value}
            for key, leaf in found.items():
                if key not in self.inputs:
                    raise TypeError(
                        f"the model has no input {key!r}; its inputs are {', '.join(self.inputs)} (other arguments were fixed by the export)"
                    )
                if key in given:
                    raise TypeError(f"the input {key!r} is given twice, by position and by name")
                given[key] = leaf
        missing = [name for name in self.inputs if name not in given]
        if missing:
            raise TypeError(f"the inputs {', '.join(missing)} are missing; the model takes {', '.join(self.inputs)}")
        return [self._checked(name, declared, given[name], sizes) for name, declared in self._declared.items()]

    def _checked(self, name: str, declared: _Declared, value: Any, sizes: dict[str, tuple[int, str]]) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"the input {name!r} is of type {type(value).__name__}, not a tensor (numbers and flags were fixed by the export)"
            )
        if declared.kind is not None and value.dtype is not declared.kind:
            raise RunError(f"the input {name!r} is {value.dtype}, the model takes {declared.kind}: convert it with .to({declared.kind})")
        if not (value.is_cpu if self._on_cpu else value.device.type == self.device.type):
            raise RunError(f"the input {name!r} is on {value.device}, the module on {self.device}: move it with .to({str(self.device)!r})")
        shape = value.shape
        if not declared.fits(shape):
            raise RunError(
                f"the input {name!r} has the shape {list(shape)}, the model takes {[d if d is not None else '?' for d in declared.sizes or ()]}: "
                "sizes that vary are named at export (dynamic_shapes=)",
                faq=Faq.OTHER_SHAPE,
            )
        for axis, size in declared.named:
            if sizes.setdefault(size, (shape[axis], name))[0] != shape[axis] and size.isidentifier():
                raise RunError(different(size, (sizes[size][1], sizes[size][0]), (name, shape[axis])))
        return value

    def _state_of(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """The module's parameters and buffers, as they are now.

        Raises:
            RunError: One of them has another type, shape or device than the file says.
        """
        found, on_cpu = [], self._on_cpu
        for initializer, path, kind, shape in self._places:
            value = look_up(module, *path)
            found.append(value)
            if value.dtype is not kind or value.shape != shape:
                raise RunError(
                    f"{self.names[initializer]!r} is now {value.dtype} of shape {list(value.shape)}, in the file it is {kind} of shape {list(shape)}: "
                    f"a graph has fixed types.\n  way out: back to {kind}, or export the model again as it should run"
                )
            if not (value.is_cpu if on_cpu else value.device.type == self.device.type):  # a device's type takes 0.3 us
                raise RunError(
                    f"{self.names[initializer]!r} is on {value.device}, the file was loaded for {self.device}.\n"
                    f"  way out: exporter.load(..., device={str(value.device)!r}); sessions stay where they were made"
                )
        for initializer, place, name, path in self._tied:
            if look_up(module, *path) is not found[place]:
                raise RunError(
                    f"{self.names[initializer]!r} and {name!r} are one tensor in the file, and two now: one of them is replaced, parametrized or adapted.\n"
                    "  way out: do the same to both, with one result, or export the model with weights that are not tied"
                )
        return found

    def _update(self, plan: Plan, state: dict[str, torch.Tensor], box: dict[str, Any]) -> None:
        for entry in plan.statistics:
            if entry.mean not in state or entry.var not in state:
                continue  # constants of the file: no module has them
            counter = self.counters.get(entry.mean)
            entry.update(state[entry.mean], state[entry.var], None if counter is None else state[counter], box)
        with torch.no_grad():
            for initializer, output in plan.buffers.items():
                found, buffer = box[output], state[initializer]
                if found.shape != buffer.shape or found.dtype is not buffer.dtype:
                    raise FormatError.damaged(
                        f"metadata {BUFFERS_KEY}",
                        f"the next value of {shown(initializer)!r} is {found.dtype} of shape {list(found.shape)}, the buffer is {buffer.dtype} of shape {list(buffer.shape)}",
                    )
                buffer.copy_(found)

    def structured(self, results: list[torch.Tensor]) -> Any:
        """What the exported model would have returned."""
        if self._single:
            return results[0]
        if self.structure is None:
            return results[0] if len(results) == 1 else tuple(results)
        found = rebuild(self.structure, results, self.gate, self._missing)
        self._single = isinstance(found, torch.Tensor)  # in every call, then
        return found

    def _missing(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            warn(f"the model's result comes as a plain tuple or dict: {why}")


def _reopened(data: bytes, source: str, entries: Any, names: Any, state: Any, allow: Any, settings: Settings) -> Bound:
    """What `Bound.__reduce__` took apart; the classes that the file names must be found here, too."""
    model = open_model(data)
    for name, (_, shape) in state.items():
        value = model.graph.initializers[name]
        leave_empty(value, value.const_value.dtype, shape)  # type: ignore[union-attr]
    bound = Bound(model, entries, names, allow, Gate(allow), settings)
    bound.source = source
    return bound


def _wanted(flags: list[bool]) -> tuple[bool, ...]:
    """Of which of inputs and state gradients are wanted, () for none: torch's own switches say it, the mode does not."""
    return tuple(flags) if True in flags else ()


def _requires_grad(value: torch.Tensor) -> bool:
    return value.requires_grad


def _refuse_updates(plan: Plan) -> None:
    """Raises RunError where a run changes buffers: a transform would do it once for each of a batch, or behind its back."""
    names = [*plan.buffers, *(entry.mean for entry in plan.statistics)]
    if names:
        raise RunError(
            f"the forward changes {shown(names[0])!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''}, under a transform of torch.func. "
            "Call eval() first: the transform then sees a function of its arguments"
        )


def _check_type(value: ir.Value) -> None:
    """Raises FormatError for an input or output that torch has no tensors of."""
    if value.type is None:  # onnxruntime finds it out
        return
    if not isinstance(value.type, ir.TensorType) or int(value.type.dtype) not in DTYPES:
        raise FormatError(
            f"the input or output {shown(value.name or '')!r} is of type {shown(str(value.type))}, and torch has no tensors of that: "
            "run the file with exporter.inference_session"
        )


def _named_leaves(name: str, value: Any) -> dict[str, Any]:
    from exporter.forward.inputs import named_leaves  # with it comes what captures calls, which who only loads a file need not wait for

    return named_leaves(name, value)
