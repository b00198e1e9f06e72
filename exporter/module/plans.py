"""Sessions on torch tensors: a file's forward, and the pair of forward and backward that a training step runs."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch.utils import dlpack

from exporter.files.read import read_model
from exporter.gradient_graph.build import build_gradient_graph
from exporter.gradient_graph.partition import Partition, forward_part, split
from exporter.runtime.kernels import DTYPES
from exporter.runtime.link import link
from exporter.runtime.session import inference_session, session_options
from exporter.runtime.store import ContextStore
from exporter.train_mode.batch_norm import Statistics, batch_statistics
from exporter.train_mode.dropout import inference_mode, seed_dropout
from symbolics.errors import FormatError, PythonopError, RunError
from symbolics.graph.walk import subgraphs
from symbolics.node.metadata import read_pairing
from symbolics.node.names import ORT_DOMAIN
from symbolics.node.text import shown
from symbolics.quirks.matrix_vector import turn_products_with_vectors

__all__ = ["Engine", "Kept", "Plan", "Runner", "open_model", "tensor"]

_ELEMENT_TYPES = {dtype: kind for kind, dtype in DTYPES.items()}
# What a session calls its types.
_SESSION_TYPES = {
    "float": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "string": 8, "bool": 9, "float16": 10,
    "double": 11, "uint32": 12, "uint64": 13, "bfloat16": 16, "float8e4m3fn": 17, "float8e4m3fnuz": 18, "float8e5m2": 19, "float8e5m2fnuz": 20,
}  # fmt: skip


def _kind_of(text: str) -> int | None:
    """The ONNX element type of ``tensor(float)``; None for sequences and the like."""
    return _SESSION_TYPES.get(text.removeprefix("tensor(").removesuffix(")"))


# -------------------------------------------------------------------------------------------------------- sessions


class Runner:
    """A session whose inputs and outputs are torch tensors, or values of onnxruntime that pass through unseen.

    Inputs are read where they lie. Outputs are onnxruntime's memory: `tensor` looks at it without a copy.
    """

    def __init__(self, session: Any, device: torch.device) -> None:
        self.session = session
        self.device = device.type
        self.index = device.index or 0
        self.inputs = {value.name: _kind_of(value.type) for value in session.get_inputs()}
        self.types = {value.name: _kind_of(value.type) for value in session.get_outputs()}
        self.names = list(self.types)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """One run; tensors of ``feeds`` must be contiguous and of the types of the inputs.

        Returns:
            name -> OrtValue.
        """
        binding = self.session.io_binding()
        for name in self.inputs:
            value = feeds[name]
            if isinstance(value, torch.Tensor):
                device = (value.device.type, value.device.index or 0)
                binding.bind_input(name, *device, _ELEMENT_TYPES[value.dtype], list(value.shape), value.data_ptr())
            else:
                binding.bind_ortvalue_input(name, value)
        for name in self.names:
            binding.bind_output(name, self.device, self.index)
        if self.device != "cpu":  # what torch has queued must be there when another stream reads it
            torch.accelerator.synchronize()
        self.session.run_with_iobinding(binding)
        return dict(zip(self.names, binding.get_outputs(), strict=True))


def tensor(value: Any) -> torch.Tensor:
    """An OrtValue as a tensor over the same memory, which lives as long as one of them; a copy where DLPack cannot say it."""
    kind = value.element_type()
    dtype = DTYPES[kind]
    # DLPack has no float8, and the values of onnxruntime before 1.24 have no DLPack.
    if (dtype.is_floating_point and dtype.itemsize == 1) or not hasattr(value, "__dlpack__"):
        return _copy(value, dtype)
    found = dlpack.from_dlpack(value.__dlpack__())
    return found.view(torch.bool) if dtype is torch.bool and found.dtype is not torch.bool else found


def _copy(value: Any, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(value.shape(), dtype=dtype)
    if value.device_name() != "cpu":
        raise RunError("this onnxruntime cannot give tensors of a device to torch: install a newer one")
    ctypes.memmove(out.data_ptr(), value.data_ptr(), out.nbytes)
    return out


# ----------------------------------------------------------------------------------------------------------- files


def open_model(source: Any) -> ir.Model:
    """A model from a path, a proto, an ir.Model or a Program, checked as a file from somewhere else must be.

    Raises:
        FormatError: No model, damaged, truncated, or its external data is missing or outside its folder.
    """
    try:
        proto, folder = read_model(source, load_data=False)
        if isinstance(source, (str, os.PathLike)):
            model = ir.load(source)
        else:
            model = source.clone() if isinstance(source, ir.Model) else ir.from_proto(proto)
    except (PythonopError, OSError, TypeError):
        raise
    except Exception as error:
        raise FormatError(f"the model is damaged: {type(error).__name__}: {str(error)[:300]}") from error
    if not model.graph.outputs:
        raise FormatError(
            f"{source if isinstance(source, (str, Path)) else 'the model'} has no outputs: it is no ONNX model, or was cut off"
        )
    _check_names(model.graph, set())
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            path = Path(value.const_value.path)
            needed = (value.const_value.offset or 0) + (value.const_value.length or 0)
            if not path.is_file():
                raise FormatError(f"the data of {value.name!r} is in {path}, which is not there: keep it beside the model")
            if path.stat().st_size < needed:
                raise FormatError(
                    f"{path} has {path.stat().st_size} bytes, and {value.name!r} lies at {needed} and before: the file was cut off"
                )
    turn_products_with_vectors(model.graph.all_nodes())
    return model


def _check_names(graph: ir.Graph, outer: set[ir.Value]) -> None:
    """Every value that a node reads, or that is an output, is made somewhere before.

    Raises:
        FormatError: One is not; the message names the node and the value.
    """
    known = outer | {*graph.inputs, *graph.initializers.values()}
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in known:
                raise FormatError(
                    f"node {node.name!r} ({node.op_type}) reads {shown(str(value.name))!r}, which nothing before it makes: the model is damaged"
                )
        for body in subgraphs(node):
            _check_names(body, known)
        known.update(node.outputs)
    for value in graph.outputs:
        if value not in known:
            raise FormatError(f"the output {shown(str(value.name))!r} is made by no node: the model is damaged")


# ------------------------------------------------------------------------------------------------------------ plans


@dataclass
class Plan:
    """What runs for one mode and one set of gradients.

    Attributes:
        forward: Gives out the model's outputs, and what else `names` lists.
        backward: None where nothing is differentiated.
        partition: How the two belong together; None without gradients.
        statistics: Of train-mode BatchNormalizations.
        seed: The name of the input for Dropout's seed, None where nothing drops.
        outputs: The names of the model's outputs.
    """

    forward: Runner
    backward: Runner | None
    partition: Partition | None
    statistics: Sequence[Statistics]
    seed: str | None
    outputs: tuple[str, ...]


class Kept:
    """What one forward keeps for its backward: values, and contexts of PythonOps, which are freed with it."""

    def __init__(self, values: dict[str, Any], handles: Sequence[int], store: ContextStore) -> None:
        self.values: dict[str, Any] | None = values
        self.close = weakref.finalize(self, _free, store, tuple(handles))


def _free(store: ContextStore, handles: Iterable[int]) -> None:
    for handle in handles:
        store.free(handle)


class Engine:
    """The plans of one file, made when they are first needed."""

    def __init__(self, model: ir.Model, state: Sequence[str], allow: Any, device: torch.device, providers: Sequence[Any] | None) -> None:
        self.model = model
        self.state = tuple(state)
        self.allow = allow
        self.device = device
        self.providers = providers
        self.store = ContextStore()
        self.lock = threading.RLock()
        self._plans: dict[tuple[bool, frozenset[str]], Plan] = {}

    def __deepcopy__(self, memo: Any) -> Engine:
        return self  # sessions hold no state of a module

    def plan(self, training: bool, wrt: frozenset[str]) -> Plan:
        """The sessions for a mode and the names whose gradients are wanted.

        Raises:
            UnsupportedOperatorError: An operator on the way has no gradient.
            RunError: A training file has no gradient of one of these names.
        """
        with self.lock:
            found = self._plans.get((training, wrt))
            if found is None:
                found = self._plans[training, wrt] = self._make(training, wrt)
            return found

    def backward_nodes(self) -> int:
        """How many nodes the largest gradient graph has."""
        return max((plan.partition.size for plan in self._plans.values() if plan.partition is not None), default=0)

    def _make(self, training: bool, wrt: frozenset[str]) -> Plan:
        model = self.model.clone()
        seed = None
        if training:
            seed = seed_dropout(model)
        else:
            inference_mode(model)
        statistics = batch_statistics(model) if training else []  # first: gradients take what the batch says from there
        pairing = read_pairing(model.metadata_props)
        if wrt and pairing is None:
            order = [name for name in (*(v.name for v in model.graph.inputs), *model.graph.initializers) if name in wrt]
            model = build_gradient_graph(model, wrt=order)
        elif pairing is not None and not wrt <= set(pairing.outputs):
            raise RunError(
                f"the training file has no gradient of {sorted(wrt - set(pairing.outputs))}: it has those of {sorted(pairing.outputs)[:20]}. "
                "Load the forward file it was made from, or freeze what should stay as it is (requires_grad_(False))"
            )
        extra = [name for entry in statistics for name in entry.values]
        if not wrt:
            part = forward_part(model, self.state, extra)
            forward = self._session(part)
            outputs = tuple(name for name in forward.names if name not in extra)
            return Plan(forward, None, None, statistics, seed, outputs)
        link(model)  # before the two part: a context that one gives to the other is a value that the graph gives out
        partition = split(model, self.state, extra, wrt)
        forward = self._session(partition.forward)
        backward = None
        if partition.backward is not None:
            for value in partition.backward.graph.inputs:
                kind = forward.types.get(value.name)  # what ONNX's inference did not find out, onnxruntime's did
                if value.type is None and kind is not None:
                    value.type = ir.TensorType(ir.DataType(kind))
            backward = self._session(partition.backward)
        return Plan(forward, backward, partition, statistics, seed, partition.outputs)

    def _session(self, model: ir.Model) -> Runner:
        options = session_options(self.allow, store=self.store)
        options.log_severity_level = 3
        options.intra_op_num_threads = torch.get_num_threads()
        options.enable_mem_pattern = False
        options.enable_cpu_mem_arena = False
        # onnxruntime's own fusions (FusedGemm) look for this import where the domain has operators of ours.
        model.opset_imports.setdefault(ORT_DOMAIN, 1)
        try:
            session = inference_session(model, sess_options=options, providers=self.providers)
        except (PythonopError, ImportError):
            raise
        except Exception as error:  # onnxruntime's exceptions have no common base
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise RunError(
                f"onnxruntime cannot run the model: {reason[0][:500]}. Where a type has no kernel (bfloat16 on the CPU), export the model in another one"
            ) from error
        return Runner(session, self.device)
