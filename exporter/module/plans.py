"""The sessions of a loaded file: its forward alone, or the forward and the backward of a training step."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from exporter.files.proto import reading
from exporter.gradient_graph.boundary import Boundary
from exporter.gradient_graph.build import differentiate
from exporter.gradient_graph.model import own_copy, remove_marks
from exporter.gradient_graph.partition import Partition, forward_part, split, take_off_gradients
from exporter.gradient_graph.recompute import Recompute, recompute
from exporter.gradient_graph.without_gradient import paths_without_gradient
from exporter.module.backward import Backward
from exporter.module.torch_kernels import FUNCTIONS, OVERRIDES, are_worth_it, pass_beside
from exporter.runtime.accelerate import Part, Request, accelerator
from exporter.runtime.arena import use_training_arena
from exporter.runtime.facts import ShapeAndType
from exporter.runtime.library import available, register, threads_outside
from exporter.runtime.link import link
from exporter.runtime.outputs import hand_out_as_made
from exporter.runtime.providers import is_cpu_alone
from exporter.runtime.session import FATAL, open_options, open_session
from exporter.runtime.store import ContextStore
from exporter.runtime.tensors import Runner, TensorPool
from exporter.train_mode.batch_norm import Statistics, batch_statistics, counter_of
from exporter.train_mode.dropout import inference_mode, seed_dropout
from symbolics import quirks
from symbolics.errors import PythonopError, RunError
from symbolics.graph.collector import without_gc
from symbolics.graph.values import describe, trains
from symbolics.graph.walk import walk
from symbolics.node.metadata import changes_of, pairing_of
from symbolics.node.names import qualified_name
from symbolics.node.patterns import Patterns

__all__ = ["Plan", "Plans", "Settings", "Wanted"]


class Settings(NamedTuple):
    """How a loaded file runs.

    Attributes:
        device: Where parameters and buffers are.
        providers: As `exporter.inference_session` takes them; None: the CPU.
        recompute, accelerate: As `exporter.load` has them.
    """

    device: torch.device
    providers: Sequence[Any] | None
    recompute: Recompute = None
    accelerate: bool = True


class Wanted(NamedTuple):
    """A gradient of a plan.

    Attributes:
        name: What it is the gradient of.
        place: That name's place among the plan's.
        reach: The outputs of the model through which it comes.
    """

    name: str
    place: int
    reach: frozenset[str]


@dataclass
class Plan:
    """What runs for one mode and one set of gradients.

    Attributes:
        names: What a run takes: the model's inputs, its state, and `seed`.
        forward: Gives out the model's outputs, residuals, and what buffers become.
        partition: How the forward and the backward of all cotangents belong together; None without gradients.
        statistics: Of train-mode BatchNormalizations.
        buffers: initializer of a buffer that a run changes -> the output that holds its next value.
        seed: The name of the input that random numbers come from, None where nothing is drawn.
        outputs: The names of the model's outputs.
        without_gradient: As `paths_without_gradient` gives them: who has no gradient, though autograd knows a way from it to these outputs.
        sizes: The shapes of the first call's inputs.
        orders: The `exporter.module.orders.Orders` of its gradients, once it ran with gradients.
        refused: Why there are no gradients, though they are wanted: what a backward raises.
    """

    names: tuple[str, ...]
    forward: Runner
    partition: Partition | None
    statistics: Sequence[Statistics]
    buffers: dict[str, str]
    seed: str | None
    outputs: tuple[str, ...]
    without_gradient: dict[str, frozenset[str]] = field(default_factory=dict)
    sizes: Mapping[str, torch.Size] = field(default_factory=dict)
    orders: Any = None
    refused: PythonopError | None = None

    @functools.cached_property
    def feeds(self) -> list[int]:
        """Of each input of the forward's session, its place among the names."""
        return self.places(self.forward.inputs)

    @functools.cached_property
    def results(self) -> list[int]:
        """Of each of the model's outputs, its place among those of the forward's session."""
        return [self.forward.places[name] for name in self.outputs]

    @functools.cached_property
    def residuals(self) -> list[tuple[str, int]]:
        """What a backward may read of the outputs of the forward's session, and their places: the residuals, and what buffers are computed from."""
        if self.partition is None or self.partition.backward is None:
            return []
        updates = self.updates[0] if self.updates is not None else ()
        return [(name, self.forward.places[name]) for name in dict.fromkeys((*self.partition.residuals, *updates))]

    @functools.cached_property
    def updates(self) -> tuple[list[str], list[int]] | None:
        """The outputs of the forward's session that buffers get or are computed from, and their places; None for none."""
        names = list(dict.fromkeys((*(name for entry in self.statistics for name in entry.values), *self.buffers.values())))
        return (names, [self.forward.places[name] for name in names]) if names else None

    @functools.cached_property
    def joined(self) -> frozenset[str] | None:
        """The names from which autograd knows a way to an output; None where there are none."""
        if self.refused is not None:
            return frozenset(self.names)
        return frozenset((*(wanted.name for wanted in self.wanted), *self.without_gradient)) or None

    def apart(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """The values, those that no output depends on without an edge: their grad stays None."""
        for place in self._loose:
            if values[place].requires_grad:
                values = [*values[:place], values[place].detach(), *values[place + 1 :]]
        return values

    @functools.cached_property
    def _loose(self) -> list[int]:
        return [place for place, name in enumerate(self.names) if self.joined is not None and name not in self.joined]

    @functools.cached_property
    def reads(self) -> list[tuple[int, bool]]:
        """Of each name that the backward reads, its place, and whether the forward changes it."""
        read = self.partition.reads if self.partition is not None else ()
        return [(place, name in self.updated) for name, place in zip(read, self.places(read), strict=True)]

    @functools.cached_property
    def unread(self) -> list[tuple[str, int]]:
        """The names that no backward reads, and their places."""
        read = set(self.partition.reads) if self.partition is not None else set()
        names = [name for name in self.forward.inputs if name not in read]
        return list(zip(names, self.places(names), strict=True))

    @functools.cached_property
    def cotangents(self) -> list[tuple[str, int]]:
        """The outputs whose cotangents the backward reads, and their places among the outputs."""
        known = self.partition.cotangents if self.partition is not None else {}
        return [(name, place) for place, name in enumerate(self.outputs) if name in known]

    @functools.cached_property
    def wanted(self) -> list[Wanted]:
        """The gradients."""
        partition = self.partition
        if partition is None or partition.backward is None:
            return []
        names = list(partition.gradients)
        return [Wanted(name, place, partition.reach[name]) for name, place in zip(names, self.places(names), strict=True)]

    def places(self, names: Iterable[str]) -> list[int]:
        """Where these stand among `names`."""
        known = {name: place for place, name in enumerate(self.names)}
        return [known[name] for name in names]

    @functools.cached_property
    def own(self) -> list[int]:
        """The places of the outputs that the backward reads."""
        return [self.outputs.index(name) for name in self.partition.residuals if name in self.outputs] if self.partition else []

    @functools.cached_property
    def flat(self) -> list[int]:
        """The places of the outputs from which autograd knows no way to anything that needs a gradient."""
        joined = frozenset(self.partition.cotangents if self.partition else self.outputs).union(*self.without_gradient.values())
        return [place for place, name in enumerate(self.outputs) if name not in joined]

    @functools.cached_property
    def updated(self) -> frozenset[str]:
        """The buffers that a run changes."""
        statistics = (name for entry in self.statistics for name in (entry.mean, entry.var, counter_of(entry.mean)))
        return frozenset((*self.buffers, *statistics))


class _Training(NamedTuple):
    """A file in a mode, with its gradient graph; what is updated beside it; the name of the input for its seed."""

    model: ir.Model
    statistics: Sequence[Statistics]
    seed: str | None


class Plans:
    """The plans of one file, made when they are first needed."""

    def __init__(
        self,
        model: ir.Model,
        inputs: Sequence[str],
        state: Sequence[str],
        allow: Any,
        settings: Settings,
    ) -> None:
        quirks.apply(quirks.LOADED, model)
        self.model = model
        self.inputs = tuple(inputs)
        self.state = tuple(state)
        self.allow = Patterns(allow, "allow").items
        self.settings = settings
        self.device, self.providers, self.recompute, accelerate = settings
        self.accelerator = accelerator(self.providers, accelerate) if self.device.type == "cpu" else None
        self.store = ContextStore()
        self.lock = threading.RLock()
        self._kernels = self.accelerator is not None and available() is None  # torch's run as PythonOps do
        self.pool = TensorPool()
        self._plans: dict[tuple[bool, frozenset[str]], Plan] = {}

    def plan(self, training: bool, wrt: frozenset[str], example: Mapping[str, torch.Tensor] | None = None) -> Plan:
        """The sessions for a mode and the names whose gradients are wanted.

        Args:
            training, wrt: Mode and names.
            example: The inputs of the first call: what their shapes make large or small is kept or computed again.

        Raises:
            UnsupportedOperatorError: An operator on the way has no gradient.
            RunError: A training file has no gradient of one of these names.
            FormatError: The graph or its metadata is damaged.
        """
        with self.lock:
            found = self._plans.get((training, wrt))
            if found is None:
                found = self._plans[training, wrt] = self._make(training, wrt, example or {})
            return found

    def prepared(self, training: bool) -> tuple[ir.Model, str | None, Sequence[Statistics]]:
        """A copy of the model as the mode has it, its seed, and the statistics that its BatchNormalizations update."""
        model = self.model.clone()
        if not training:
            inference_mode(model)
        seed = seed_dropout(model)
        return model, seed, batch_statistics(model) if training else []  # before gradients, which take what the batch says from there

    def backward_nodes(self) -> int:
        """How many nodes the largest gradient graph has."""
        return max((plan.partition.size for plan in self._plans.values() if plan.partition is not None), default=0)

    @functools.cached_property
    def overrides(self) -> Mapping[str, Any] | None:
        """The rules of torch's own kernels, where plain gradients may have them."""
        if self.accelerator is None or not self._kernels or pairing_of(self.model) is not None:
            return None
        return OVERRIDES if are_worth_it(self.model, self.accelerator.own_gradients) else None

    def training_model(
        self, training: bool, wrt: frozenset[str], overrides: Mapping[str, Any] | None = None, given: frozenset[str] | None = None
    ) -> _Training:
        """The file as it runs in a mode, with the gradients of these names, made anew: it is the same each time.

        Args:
            training, wrt: Mode and names.
            overrides: As `build_gradient_graph` has them.
            given: The outputs that have a cotangent; None: all. The forward is the same for each such set.
        """
        with reading(self.model):
            model, seed, statistics = self.prepared(training)
        pairing = pairing_of(model)
        if wrt and pairing is not None and not training and (node := next(filter(trains, walk(self.model.graph)), None)) is not None:
            raise RunError(
                f"the training file has the gradients of training mode, in which {describe(node)} does what it does not in eval().\n"
                "  way out: load the forward file that it was made from, or train() for the gradients that it has"
            )
        if given is not None and pairing is not None:
            with reading(self.model):
                take_off_gradients(model)
        if wrt and (pairing is None or given is not None):
            order = [name for name in dict.fromkeys((*(v.name for v in model.graph.inputs), *model.graph.initializers)) if name in wrt]
            with reading(self.model):
                model = own_copy(model)
            model = differentiate(model, Boundary(model, order, None), overrides or {}, given)
        elif pairing is not None and not wrt <= set(pairing.outputs):
            raise RunError(
                f"the training file has no gradient of {sorted(wrt - set(pairing.outputs))}: it has those of {sorted(pairing.outputs)[:20]}. "
                "Load the forward file it was made from, or freeze what should stay as it is (requires_grad_(False))"
            )
        if wrt:
            with reading(self.model):
                link(model)  # before the two part: a context that one gives to the other is a value that the graph gives out
        return _Training(model, statistics, seed)

    @without_gc()
    def _make(self, training: bool, wrt: frozenset[str], example: Mapping[str, torch.Tensor]) -> Plan:
        model, statistics, seed = self.training_model(training, wrt, self.overrides)
        sizes = {name: value.shape for name, value in example.items()}
        changes = changes_of(model)
        names = (*self.inputs, *self.state, *([] if seed is None else [seed]))
        buffers = changes.carried if training or changes.always else {}
        extra = [*(name for entry in statistics for name in entry.values), *buffers.values()]
        if not wrt:
            with reading(self.model):
                part = forward_part(model, self.state, extra)
            self._optimize(part, "inference", sizes)
            forward = self.session(part)
            outputs = tuple(name for name in forward.names if name not in extra)
            return Plan(names, forward, None, statistics, buffers, seed, outputs)
        with reading(self.model):
            without_gradient = paths_without_gradient(model, wrt)
            remove_marks(model)
            if self.recompute is not None:
                recompute(
                    model,
                    self.recompute,
                    {name: tuple(shape) for name, shape in sizes.items()},
                    extra,
                    late=False,
                    views=is_cpu_alone(self.providers),
                )
            partition = split(model, self.state, extra, wrt)
        self._optimize(partition.forward, "forward", sizes)
        forward = self.session(partition.forward, after_torch=True)
        return Plan(names, forward, partition, statistics, buffers, seed, partition.outputs, without_gradient, sizes)

    @without_gc()
    def backward(self, plan: Plan, partition: Partition, given: Iterable[str]) -> Backward:
        """The session of a partition's backward.

        Args:
            plan: Whose forward runs before it.
            partition: The plan's own, or one of fewer cotangents.
            given: The outputs that have a cotangent.
        """
        model, whole = partition.backward, plan.partition
        assert model is not None and whole is not None
        for value in model.graph.inputs:
            kind = plan.forward.types.get(value.name)  # what ONNX's inference did not find out, onnxruntime's did
            if value.type is None and kind is not None:
                value.type = ir.TensorType(ir.DataType(kind))
        facts = self._optimize(model, "backward", plan.sizes)
        made_here = pairing_of(self.model) is None
        beside = pass_beside(model) if self._kernels and made_here else frozenset[str]()
        shapes = hand_out_as_made(model, facts) if self.accelerator is not None else None
        runner = self.session(model, FUNCTIONS if made_here else (), after_torch=True, shapes=shapes)
        row = (*(name for name, _ in plan.residuals), *whole.reads, *(partition.cotangents.get(name, "") for name in given))
        others = [name for name in partition.reads if name not in whole.reads]
        places = {wanted.name: place for place, wanted in enumerate(plan.wanted)}
        return Backward(runner, partition, row, others, places, beside)

    def _optimize(self, model: ir.Model, part: Part, shapes: Mapping[str, torch.Size]) -> dict[ir.Value, ShapeAndType]:
        """What the accelerator makes of a part, in place; what it found out of its values."""
        facts: dict[ir.Value, ShapeAndType] = {}
        if self.accelerator is not None:
            inputs = [(value.shape or (), shapes[value.name]) for value in self.model.graph.inputs if value.name and value.name in shapes]
            sizes = {str(dim): size for shape, given in inputs for dim, size in zip(shape, given, strict=False)}
            self.accelerator.optimize(model, Request(part, sizes), facts)
        return facts

    def run_backward(
        self, runner: Runner, values: Sequence[Any], retain: bool, room: Sequence[torch.Tensor] = ()
    ) -> tuple[Any, Sequence[int]]:
        """`Runner.run_owning` of gradients.

        Args:
            runner, values, room: The session, what it takes, and what it writes into.
            retain: Leave the contexts that it reads in the store: whoever holds them frees them.
        """
        with self.lock:
            before = self.store.retain  # of the run in which a Function's backward makes this one
            self.store.retain = retain
            try:
                return runner.run_owning(values, room)
            finally:
                self.store.retain = before

    def session(
        self,
        model: ir.Model,
        functions: Sequence[type] = (),
        *,
        after_torch: bool = False,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> Runner:
        """A session on a part of the file, which shares the contexts of the others.

        Args:
            model: The part.
            functions: Classes of torch's own kernels, which it may name beside those of ``allow=``.
            after_torch, shapes: As `Runner` has them. The former not where nothing is trained: threads that serve may never have computed by torch.
        """
        options = open_options([*self.allow, *functions], self.store, long=frozenset(map(qualified_name, functions)))
        options.log_severity_level = FATAL
        options.intra_op_num_threads = threads_outside() or torch.get_num_threads()
        use_training_arena(options)
        if self.accelerator is not None and self.accelerator.library is not None:
            register(options, self.accelerator.library)
        session = open_session(model, sess_options=options, providers=self.providers)
        return Runner(session, self.device, after_torch=after_torch, shapes=shapes)
