"""load(): a saved model as torch.nn.Module, trained by torch's optimizers and run by stock onnxruntime."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from exporter.files.trust import Gate
from exporter.forward.inputs import named_leaves
from exporter.module.plans import Engine, Kept, Plan, open_model, tensor
from exporter.runtime.kernels import DTYPES
from exporter.runtime.reference import to_tensor
from exporter.train_mode.batch_norm import counter_of
from symbolics import torch_private as private
from symbolics.errors import FormatError, PythonopWarning, RunError
from symbolics.node.metadata import StateEntry, read_cumulative, read_pairing, read_state
from symbolics.node.names import OUTPUTS_KEY, STEP_KEY
from symbolics.node.result import rebuild

__all__ = ["OnnxModule", "draw_seed", "load"]


def load(model: Any, *, allow: Any = (), device: torch.device | str | None = None, providers: Sequence[Any] | None = None) -> OnnxModule:
    """A saved model as a torch.nn.Module: its forward runs in onnxruntime, its backward runs the gradient graph.

    ::

        module = exporter.load("model.onnx", allow=["mypkg.ops:*"])
        optimizer = torch.optim.AdamW(module.parameters())
        loss = torch.nn.functional.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model or a Program: a forward file, or a training file of
            `build_gradient_graph`.
        allow: Classes and patterns that the file may name; see `exporter.files.trust.Gate`.
        device: Where parameters and buffers are. Default: the CPU.
        providers: As onnxruntime.InferenceSession takes them; default: the CPU's, or CUDA's for a CUDA device.

    Returns:
        The module. Its parameters and buffers have the names of the model that was exported (of a file of another
        exporter, those of its float initializers of rank 1 or more, all trainable), so state_dict() goes back into it.

    Raises:
        FormatError: The file is damaged, cut off, or its external data is missing or outside its folder.
        TrustError: The file names a class that is not allowed.
        RunError: onnxruntime or the native library is not there.
    """
    return OnnxModule(model, allow=allow, device=device, providers=providers)


class OnnxModule(torch.nn.Module):
    """An ONNX model as a module; made by `load`.

    In train() mode it behaves as the file says: a file that was exported in training mode drops out (a new mask each
    step, from torch's generator) and updates the running statistics of BatchNorm. eval() takes both back, and runs the
    forward alone unless an input needs a gradient; so does torch.no_grad(). Parameters are read at every forward.

    forward takes the tensors of the exported model's arguments in their order, in containers or not, and keyword
    arguments by the names of the graph's inputs. It returns what the exported model returned, where the file says
    what that was; otherwise the one output or a tuple.
    """

    _onnx: _Bound

    def __init__(
        self, model: Any, *, allow: Any = (), device: torch.device | str | None = None, providers: Sequence[Any] | None = None
    ) -> None:
        super().__init__()
        place = torch.device("cpu" if device is None else device)
        gate = Gate(allow)
        opened = open_model(model)
        if STEP_KEY in opened.metadata_props:
            raise FormatError(
                "the file is a training step, which has no parameters of its own: run it with exporter.inference_session, or load the forward file"
            )
        entries = _entries(opened)
        found = _register(self, opened.graph, entries, place)
        if providers is None and place.type == "cuda":
            providers = [("CUDAExecutionProvider", {"device_id": place.index or 0}), "CPUExecutionProvider"]
        object.__setattr__(self, "_onnx", _Bound(opened, entries, found, allow, gate, place, providers))
        if isinstance(model, (str, os.PathLike)):
            self._onnx.source = str(model)
        self._onnx.engine.plan(False, frozenset())  # a class that is missing is told now

    def flat(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """As calling the module, without hooks and without the structure: the outputs of the graph in their order."""
        return self._onnx.run(self, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            TypeError: Arguments do not match the inputs of the graph.
            RunError: An input or parameter has another type, shape or device than the file says.
            UnsupportedOperatorError: A gradient is needed through an operator that has none.
        """
        return self._onnx.structured(self._onnx.run(self, args, kwargs))

    def extra_repr(self) -> str:
        """The file and the inputs."""
        inputs = ", ".join(
            f"{value.name}: {value.dtype}{list(value.shape) if value.shape is not None else ''}" for value in self._onnx.inputs
        )
        return f"{self._onnx.source}: {inputs}"


class _Part(torch.nn.Module):
    """A module of the exported model, of which only the parameters and buffers are left."""


# -------------------------------------------------------------------------------------------------------- the state


def _entries(model: ir.Model) -> dict[str, StateEntry]:
    """The names of the module's state; those of a foreign model are its float initializers of rank 1 or more."""
    initializers = model.graph.initializers
    entries = read_state(model.metadata_props)
    if entries is not None:
        missing = [entry.initializer for entry in entries.values() if entry.initializer not in initializers]
        if missing:
            raise FormatError(
                f"the file lacks the initializers {missing[:5]} that its metadata names: something removed them, or it is damaged"
            )
        return entries
    floats = [(name, value.const_value) for name, value in initializers.items() if value.const_value is not None]
    return {
        name: StateEntry(name, "parameter", True, True)
        for name, array in floats
        if array.dtype.is_floating_point() and len(array.shape) >= 1
    }


def _register(root: torch.nn.Module, graph: ir.Graph, entries: dict[str, StateEntry], device: torch.device) -> dict[str, str]:
    """Put the state into modules as nested as its names.

    Returns:
        initializer -> the name under which the module has it. Tied names share a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    for name, entry in entries.items():
        value = graph.initializers[entry.initializer]
        if entry.initializer not in tensors:
            try:
                data = to_tensor(value.const_value.numpy()).to(device)  # type: ignore[union-attr]
            except Exception as error:
                raise FormatError(f"the initializer {entry.initializer!r} is damaged: {error}") from error
            tensors[entry.initializer] = torch.nn.Parameter(data, requires_grad=entry.trainable) if entry.kind == "parameter" else data
            # The values belong to the module from here on: the graph keeps the shape alone.
            dtype = value.const_value.dtype  # type: ignore[union-attr]
            empty = np.broadcast_to(np.zeros((), dtype.numpy()), tuple(data.shape))
            value.const_value = ir.Tensor(empty, dtype=dtype, name=value.name)
            value.type, value.shape = ir.TensorType(dtype), ir.Shape(data.shape)
        *path, last = name.split(".")
        if any(".".join([*path[: i + 1]]) in entries for i in range(len(path))):
            path, last = [], name.replace(".", "_")  # "w" and "w.x": no module can have both
        owner = root
        for part in path:
            if part not in dict(owner.named_children()):
                setattr(owner, part, _Part())
            owner = getattr(owner, part)
        if entry.kind == "parameter":
            setattr(owner, last, tensors[entry.initializer])
        else:
            owner.register_buffer(last, tensors[entry.initializer], persistent=entry.persistent)
        names.setdefault(entry.initializer, ".".join([*path, last]))
    return names


def _lookup(module: torch.nn.Module, name: str) -> torch.Tensor:
    *path, last = name.split(".")
    for part in path:
        module = getattr(module, part)
    return getattr(module, last)


# -------------------------------------------------------------------------------------------------------- a forward


class _Bound:
    """A file with the module that it became: from arguments to results."""

    def __init__(
        self,
        model: ir.Model,
        entries: dict[str, StateEntry],
        names: dict[str, str],
        allow: Any,
        gate: Gate,
        device: torch.device,
        providers: Any,
    ) -> None:
        graph = model.graph
        pairing = read_pairing(model.metadata_props)
        seeds = set(pairing.inputs.values()) if pairing is not None else set()
        self.source = "model"
        self.names = names  # initializer -> name in the module
        self.kinds = {name: graph.initializers[name].const_value.dtype for name in names}  # type: ignore[union-attr]
        self.shapes = {name: tuple(graph.initializers[name].const_value.shape) for name in names}  # type: ignore[union-attr]
        self.inputs = [value for value in graph.inputs if value.name not in seeds and value.name not in graph.initializers]
        self.order = [value.name for value in self.inputs]
        self.structure = model.metadata_props.get(OUTPUTS_KEY)
        self.gate = gate
        self.device = device
        self.counters = {
            entry.initializer: other.initializer
            for name, entry in entries.items()
            if name.endswith("running_mean") and (other := entries.get(counter_of(name))) is not None
        }
        for name in read_cumulative(model.metadata_props):
            if name in names and name not in self.counters:
                raise FormatError(
                    f"{name!r} is the average of all batches, and the file has no num_batches_tracked beside it: it is damaged"
                )
        self.engine = Engine(model, tuple(names), allow, device, providers)
        self._warned: set[str] = set()

    def __deepcopy__(self, memo: Any) -> _Bound:
        return self

    def run(self, module: OnnxModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The outputs of the graph, with gradients where they are wanted."""
        inputs = self._arguments(args, kwargs)
        state = {initializer: _lookup(module, name) for initializer, name in self.names.items()}
        for name, value in state.items():
            self._check_state(name, value)
        wrt: list[str] = []
        if torch.is_grad_enabled():
            wrt = [name for name, value in inputs.items() if value.requires_grad]
            if wrt or module.training:
                wrt += [name for name, value in state.items() if value.requires_grad]
        plan = self.engine.plan(module.training, frozenset(wrt))
        feeds = {**inputs, **state}
        if plan.seed is not None:
            feeds[plan.seed] = draw_seed()
        names = list(feeds)
        box: dict[str, Any] = {}
        if plan.partition is None or plan.partition.backward is None:
            results = _outputs(plan, plan.forward.run(_ready(feeds)), box)
        else:
            reached = plan.partition.gradients
            # A parameter that no output depends on gets no edge, so that its grad stays None.
            values = [value if name in reached else value.detach() for name, value in feeds.items()]
            results = list(_Step.apply(self.engine, plan, names, box, *values))
        self._update(module, plan, state, box)
        return results

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors by input name.

        Raises:
            TypeError: Too many, too few, unknown or doubled arguments, or something that is no tensor.
            RunError: A tensor of another type, shape or device.
        """
        given: dict[str, Any] = {}
        positional = [leaf for leaf in pytree.tree_leaves(args) if leaf is not None]
        if len(positional) > len(self.order):
            raise TypeError(f"the model takes {len(self.order)} tensors ({', '.join(self.order)}), {len(positional)} were given")
        given.update(zip(self.order, positional, strict=False))
        for name, value in kwargs.items():
            if value is None:
                continue
            found = {name: value} if name in self.order else named_leaves(name, value) or {name: value}
            for key, leaf in found.items():
                if key not in self.order:
                    raise TypeError(
                        f"the model has no input {key!r}; its inputs are {', '.join(self.order)} (other arguments were fixed by the export)"
                    )
                if key in given:
                    raise TypeError(f"the input {key!r} is given twice, by position and by name")
                given[key] = leaf
        missing = [name for name in self.order if name not in given]
        if missing:
            raise TypeError(f"the inputs {', '.join(missing)} are missing; the model takes {', '.join(self.order)}")
        sizes: dict[str, tuple[int, str]] = {}
        for declared in self.inputs:
            given[declared.name] = self._checked(declared, given[declared.name], sizes)  # type: ignore[index]
        return {name: given[name] for name in self.order}

    def _checked(self, declared: ir.Value, value: Any, sizes: dict[str, tuple[int, str]]) -> torch.Tensor:
        name = declared.name
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"the input {name!r} is a {type(value).__name__}, not a tensor (numbers and flags were fixed by the export)")
        kind = DTYPES.get(int(declared.dtype)) if declared.dtype is not None else None
        if kind is not None and value.dtype is not kind:
            raise RunError(f"the input {name!r} is {value.dtype}, the model takes {kind}: convert it with .to({kind})")
        if value.device.type != self.device.type:
            raise RunError(f"the input {name!r} is on {value.device}, the module on {self.device}: move it with .to({str(self.device)!r})")
        if declared.shape is not None:
            expected = [d if isinstance(d, int) else d.value for d in declared.shape]
            if len(expected) != value.dim() or any(isinstance(d, int) and d != n for d, n in zip(expected, value.shape, strict=True)):
                raise RunError(
                    f"the input {name!r} has the shape {list(value.shape)}, the model takes {[d if d is not None else '?' for d in expected]}: "
                    "sizes that vary are named at export (dynamic_shapes=)"
                )
            for d, n in zip(expected, value.shape, strict=True):
                if isinstance(d, str) and sizes.setdefault(d, (n, str(name)))[0] != n and d.isidentifier():
                    raise RunError(
                        f"the inputs {sizes[d][1]!r} and {name!r} have different sizes {sizes[d][0]} and {n} where the model has one, {d!r}"
                    )
        return value

    def _check_state(self, name: str, value: torch.Tensor) -> None:
        kind = DTYPES[int(self.kinds[name])]
        if value.dtype is not kind or tuple(value.shape) != self.shapes[name]:
            raise RunError(
                f"{self.names[name]!r} is now {value.dtype} of shape {list(value.shape)}, in the file it is {kind} of shape {list(self.shapes[name])}: "
                "a graph has fixed types; export the model again in the type that it should run in"
            )
        if value.device.type != self.device.type:
            raise RunError(
                f"{self.names[name]!r} is on {value.device}, the file was loaded for {self.device}: load it with device={str(value.device)!r}"
            )

    def _update(self, module: OnnxModule, plan: Plan, state: dict[str, torch.Tensor], box: dict[str, Any]) -> None:
        for entry in plan.statistics:
            counter = self.counters.get(entry.mean)
            entry.update(state[entry.mean], state[entry.var], None if counter is None else state[counter], box)

    def structured(self, results: list[torch.Tensor]) -> Any:
        """What the exported model would have returned."""
        if self.structure is None:
            return results[0] if len(results) == 1 else tuple(results)
        return rebuild(self.structure, results, self.gate, self._missing)

    def _missing(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            warnings.warn(f"the model's result comes as a plain tuple or dict: {why}", PythonopWarning, stacklevel=5)


def draw_seed(generator: torch.Generator | None = None) -> torch.Tensor:
    """The seed of one forward's masks, an int64 scalar, from torch's generator."""
    return torch.randint(0, 2**31 - 1, (), dtype=torch.int64, generator=generator)


def _ready(feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as a session reads them; the caller's list of them must live until the run is over."""
    return {name: value.detach().resolve_conj().resolve_neg().contiguous() for name, value in feeds.items()}


def _outputs(plan: Plan, values: dict[str, Any], box: dict[str, Any]) -> list[torch.Tensor]:
    """The model's outputs; what updates statistics goes into the box."""
    for entry in plan.statistics:
        box.update((name, tensor(values[name])) for name in entry.values)
    return [tensor(values[name]) for name in plan.outputs]


class _Step(torch.autograd.Function):
    """The forward and the backward of a file as one node of autograd."""

    @staticmethod
    def forward(
        ctx: Any, engine: Engine, plan: Plan, names: list[str], box: dict[str, Any], *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """One run of the forward; outputs without a gradient are marked so."""
        partition = plan.partition
        assert partition is not None
        found = plan.forward.run(_ready(dict(zip(names, values, strict=True))))
        results = _outputs(plan, found, box)
        by_name = dict(zip(names, values, strict=True))
        # Tensors that the caller knows are watched by autograd: a change in place before the backward is an error there.
        own = [name for name in partition.residuals if name in plan.outputs]
        ctx.save_for_backward(*(by_name[name] for name in partition.reads), *(results[plan.outputs.index(name)] for name in own))
        handles = [int(found[name].numpy()) for name in partition.contexts]
        ctx.kept = Kept({name: found[name] for name in partition.residuals}, handles, engine.store)
        ctx.engine, ctx.plan, ctx.names = engine, plan, names
        ctx.likes = [(result.shape, result.dtype) for result in results]
        ctx.mark_non_differentiable(*(r for name, r in zip(plan.outputs, results, strict=True) if name not in partition.cotangents))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """One run of the gradient graph; absent gradients stay absent.

        Raises:
            RunError: With create_graph=True: what it returned would be constants for a second backward.
        """
        if torch.is_grad_enabled():
            raise RunError(
                "a loaded file has no second derivative: create_graph=True needs the gradient of its gradient graph. Build that as a file "
                "(build_gradient_graph of build_gradient_graph's model), or take second derivatives in the model it was exported from"
            )
        engine, plan = ctx.engine, ctx.plan
        partition = plan.partition
        given = {name for name, g in zip(plan.outputs, above, strict=True) if g is not None and name in partition.cotangents}
        none = (None, None, None, None)
        watched = ctx.saved_tensors
        kept = ctx.kept
        if kept.values is None:
            raise RuntimeError("Trying to backward through the graph a second time: call backward(retain_graph=True) the first time")
        if not given:
            return (*none, *(None for _ in ctx.names))
        feeds: dict[str, Any] = dict(kept.values)
        feeds.update(_ready(dict(zip(partition.reads, watched, strict=False))))
        for name, g, (shape, dtype) in zip(plan.outputs, above, ctx.likes, strict=True):
            if name in partition.cotangents:
                feeds[partition.cotangents[name]] = (torch.zeros(shape, dtype=dtype, device=engine.device) if g is None else g).contiguous()
        keep = private.keeps_graph()
        if not keep:
            kept.values = None
        with engine.lock:
            engine.store.retain = keep
            try:
                found = plan.backward.run(feeds)
            finally:
                engine.store.retain = False
        if not keep:
            kept.close()
        wanted = {name: found[output] for name, output in partition.gradients.items() if partition.reach[name] & given}
        return (
            *none,
            *(tensor(wanted[name]) if name in wanted and ctx.needs_input_grad[i + 4] else None for i, name in enumerate(ctx.names)),
        )
