"""PythonOp and PythonOpGrad on the onnxruntime that people install."""

from __future__ import annotations

import contextlib
import itertools
import threading
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from exporter.files.read import read_model
from exporter.files.trust import Gate
from exporter.runtime.arena import thrifty
from exporter.runtime.chain import Chain, GradChain, title_of
from exporter.runtime.kernels import PythonOp, PythonOpGrad
from exporter.runtime.link import LINKED, could_link, link
from exporter.runtime.prepare import ABSENT_INPUTS, KEPT_OUTPUTS, prepare
from exporter.runtime.store import ContextStore
from symbolics.errors import FormatError, RunError
from symbolics.node.attributes import GRAD_SPECS, SPECS
from symbolics.node.containers import Slot
from symbolics.node.dtypes import DTYPES
from symbolics.node.names import STEP_KEY

try:
    import onnxruntime

    from exporter.runtime.native import _native  # type: ignore[attr-defined]
    from exporter.runtime.native.functions import FUNCTIONS, LARGE

    _native.setup(*FUNCTIONS, RunError, LARGE)
    _missing: ImportError | None = None
    _Session, _Options = onnxruntime.InferenceSession, onnxruntime.SessionOptions
except ImportError as error:  # told when somebody needs it: onnx.reference runs without
    _missing = error
    _Session = _Options = object  # type: ignore[assignment,misc]

__all__ = ["Session", "available", "inference_session", "session_options"]

#: The oldest onnxruntime whose function table has what native.c uses.
OLDEST = "1.17"

_KINDS = {"STRING": "s", "INT": "i", "INTS": "I", "FLOATS": "F"}


def available() -> str | None:
    """None where PythonOps can run on onnxruntime in this process, else what is missing and what to do."""
    if _missing is None:
        return None
    if _missing.name == "onnxruntime":
        return f"onnxruntime is not installed: pip install 'onnxruntime>={OLDEST}' (exporter.reference_evaluator runs without it)"
    return (
        f"the native library of pythonop is not there ({_missing}): it is compiled when pythonop is installed, so install a C compiler and run "
        "pip install --force-reinstall --no-binary pythonop pythonop (exporter.reference_evaluator runs without it)"
    )


def _attribute_kinds(specs: dict[str, Any], *more: str) -> tuple[tuple[str, str], ...]:
    return (*((name, _KINDS[kind.name]) for name, (kind, *_) in specs.items()), *((name, "I") for name in more), (LINKED, "s"))


class Binding:
    """What the native library calls: one per SessionOptions. It turns nodes into plans, once, and errors into text."""

    forward_attributes = _attribute_kinds(SPECS, ABSENT_INPUTS)
    backward_attributes = _attribute_kinds(GRAD_SPECS, ABSENT_INPUTS, KEPT_OUTPUTS)

    def __init__(self, gate: Gate, store: ContextStore) -> None:
        self.gate = gate
        self.store = store
        self.errors: OrderedDict[str, BaseException] = OrderedDict()

    def plan(self, backward: bool, attributes: dict[str, Any], node_name: str) -> tuple[Any, ...]:
        """How a node runs, in the order of make_kernel() in native.c."""
        absent = attributes.pop(ABSENT_INPUTS, [])
        kept = attributes.pop(KEPT_OUTPUTS, None)
        linked = attributes.pop(LINKED, None)
        if backward:
            grad = GradChain(attributes, linked, self.store, node_name) if linked else PythonOpGrad(attributes, self.store, node_name)
            return self._plan_backward(grad, absent, kept)
        kernel = (
            Chain(attributes, linked, self.gate, self.store, node_name)
            if linked
            else PythonOp(attributes, self.gate, self.store, node_name)
        )
        call = kernel.call
        count = len(kernel.flags)
        places = tuple(i for i in range(count) if i not in absent)
        flat = [value if isinstance(value, Slot) else None for value in kernel.args]
        positions = tuple(i for i, value in enumerate(flat) if value is not None) if kernel.simple else (0,) * count
        arguments = tuple(None if isinstance(value, Slot) else value for value in kernel.args)
        single = isinstance(call.outputs, Slot)
        kinds = tuple(call.output_types)
        fast = kernel.simple and all(position is not None for position in positions)
        return (
            kernel, fast, single, kernel.apply, arguments, positions, kernel.flags, kinds, places, (), count, call.id, call.name,
        )  # fmt: skip

    def _plan_backward(self, kernel: PythonOpGrad, absent: Sequence[int], kept: Sequence[int] | None) -> tuple[Any, ...]:
        count = kernel.count
        kinds = tuple(kind if kind in DTYPES else 0 for kind in kernel.output_types) or (0,) * len(kernel.wanted)
        written = tuple(range(len(kernel.wanted)) if kept is None else kept)
        if not all(0 <= place < len(kernel.wanted) for place in written):
            raise FormatError.damaged(kernel.title, f"{KEPT_OUTPUTS} names an output that is not there")
        places = tuple(i for i in range(count) if i not in absent)
        return (kernel, True, False, None, (), (), kernel.wanted, kinds, places, written, count, kernel.id, kernel.name)

    def strings(self, values: Any, shape: tuple[int, ...] | None) -> Any:
        """A list of str as an array of that shape; and without a shape the inverse: (shape, list of bytes)."""
        if shape is None:
            array = np.asarray(values, dtype=object)
            return array.shape, [str(item).encode("utf-8", "surrogateescape") for item in array.flat]
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array.reshape(shape)

    def view(self, tensor: torch.Tensor, kind: int) -> torch.Tensor:
        """Bytes as the float8 that they are."""
        return tensor.view(DTYPES[kind])

    def fix(self, kernel: PythonOp | PythonOpGrad, index: int, value: Any) -> torch.Tensor:
        """An output that is not a dense CPU tensor of the promised type, as one that DLPack can say.

        Raises:
            RunError: It cannot be made one without changing what it means.
        """
        if index < 0:
            count = len(value) if isinstance(value, tuple) else 1
            raise RunError(
                f"{kernel.title} returned {count} values, not what it returned when it was exported: export it as it is used now"
            )
        if isinstance(kernel, PythonOp):
            value = kernel.check(index, value)
        else:
            value = kernel.fix(index, value)
        value = value.detach()
        value = (value.to_dense() if value.layout is not torch.strided else value).resolve_conj().resolve_neg().cpu().contiguous()
        if value.dtype.is_floating_point and value.dtype.itemsize == 1:
            value = value.view(torch.uint8)
        return value

    def escaped(self, kernel: PythonOp | PythonOpGrad, changed: bool) -> None:
        """Raises:
        RunError: A run did with an input what the runs before it had not done.
        """
        what = "changed an input in place" if changed else "kept an input"
        raise RunError(
            f"{kernel.title} {what} in this run, and had not in its first: its inputs are the runtime's memory, which this run cannot take back. "
            "From the next run on it gets copies; declare the change with ctx.mark_dirty, or keep inputs with ctx.save_for_backward in every run"
        )

    def device_run(self, kernel: PythonOp | PythonOpGrad, inputs: list[Any], extra: Any, stream: int) -> list[Any]:
        """One run where the tensors live on a device; they are the runtime's, so the call gets copies.

        Args:
            kernel: The node.
            inputs: Tensors over the runtime's memory, None where absent.
            extra: Whether the context is read (forward), or the handle (backward).
            stream: The runtime's CUDA stream, 0 for none.

        Returns:
            One item an output; a forward's first is the handle.
        """
        with _on_stream(stream):
            own = [None if tensor is None else tensor.clone() for tensor in inputs]
            inputs.clear()
            if isinstance(kernel, PythonOpGrad):
                return kernel.run(extra, own)
            handle, outputs = kernel.run(own, extra)
            return [torch.tensor(handle, dtype=torch.int64), *outputs]

    def device_write(self, target: torch.Tensor, value: torch.Tensor, stream: int) -> None:
        """Copy an output into the runtime's memory."""
        with _on_stream(stream), torch.no_grad():
            target.copy_(value)

    _numbers = itertools.count(1)

    def failed(self, kernel: PythonOp | PythonOpGrad | None, error: BaseException) -> str:
        """The text of an exception for onnxruntime; the exception itself waits for `Session`."""
        title = title_of(kernel, error) if kernel is not None else "while the session was made"
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        # Frames keep their locals, and with them tensors over memory that is not ours any more.
        traceback.clear_frames(error.__traceback__)
        token = f"pythonop-error-{next(self._numbers)}"
        self.errors[token] = error
        while len(self.errors) > 8:  # a plain InferenceSession never asks for them
            self.errors.popitem(last=False)
        return f"{title} [{token}]\n{text}"

    def original(self, error: BaseException) -> BaseException | None:
        """The exception behind what onnxruntime raised."""
        text = str(error)
        start = text.find("[pythonop-error-")
        return self.errors.pop(text[start + 1 : text.find("]", start)], None) if start >= 0 else None


def _on_stream(stream: int) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.stream(torch.cuda.ExternalStream(stream)) if stream else contextlib.nullcontext()


# ------------------------------------------------------------------------------------------------------ the options

# enum Device in native_tensors.h. "borrow" is the code path of devices on the CPU, for tests.
_DEVICES = {"cpu": 0, "cuda": 1, "borrow": 2}

_registering = threading.Lock()
# Options that are somebody else's class keep what belongs to them here.
_bound: weakref.WeakKeyDictionary[Any, tuple[Binding, Any]] = weakref.WeakKeyDictionary()


def _bind(options: Any, gate: Gate, store: ContextStore, device: str) -> Binding:
    binding = Binding(gate, store)
    with _registering:
        capsule = _native.prepare(binding, store, store.contexts, store.runs, _DEVICES[device])
        try:
            options.register_custom_ops_library(_native.__file__)
        finally:
            registered = _native.registered()
    if not registered:
        raise RunError(f"onnxruntime {onnxruntime.__version__} is too old for PythonOps: install onnxruntime {OLDEST} or newer")
    _bound[options] = (binding, capsule)
    return binding


def session_options(allow: Any = (), *, store: ContextStore | None = None, device: str = "cpu") -> onnxruntime.SessionOptions:
    """Options with which a plain onnxruntime.InferenceSession runs the PythonOps of a forward file.

    ::

        session = onnxruntime.InferenceSession("model.onnx", exporter.session_options(allow=["mypkg.ops:*"]))

    Args:
        allow: Classes and patterns that the file may name; see `exporter.files.trust.Gate`.
        store: Where contexts go; default: one of its own.
        device: "cuda" registers the operators for CUDAExecutionProvider as well; it has not been run on a GPU yet.

    Returns:
        An onnxruntime.SessionOptions; everything else in it is onnxruntime's default, but intra-op threads do not
        spin (they would take the cores from torch's threads).

    Raises:
        RunError: onnxruntime or the native library is not there, or onnxruntime is too old.

    With a plain session, what a Function raises is the text of onnxruntime's failure, and a training graph that
    failed half-way keeps the contexts it had made until ``store.clear()``; `inference_session` does both better.
    """
    problem = available()
    if problem:
        raise RunError(problem)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    _bind(options, Gate(allow), ContextStore() if store is None else store, device)
    return options


# ------------------------------------------------------------------------------------------------------ the session


class Session(_Session):  # type: ignore[misc,valid-type]
    """An onnxruntime.InferenceSession whose exceptions are the Functions' own.

    ``run_async`` is onnxruntime's as it is: its callback gets the text of a failure.

    Attributes:
        store: The contexts of its runs. A run that raised has freed what it made.
    """

    def __init__(self, model: str | bytes, options: Any, binding: Binding, **kwargs: Any) -> None:
        self._binding = binding
        self.store = binding.store
        self._guard(lambda: super(Session, self).__init__(model, options, **kwargs))

    def run(self, output_names: Sequence[str] | None, input_feed: dict[str, Any], run_options: Any = None) -> Any:
        """As onnxruntime.InferenceSession.run; raises what a Function raised, as it was."""
        run = super().run
        return self._guard(lambda: run(output_names, input_feed, run_options))

    def run_with_ort_values(self, output_names: Any, input_dict_ort_values: Any, run_options: Any = None) -> Any:
        """As onnxruntime.InferenceSession.run_with_ort_values."""
        run = super().run_with_ort_values
        return self._guard(lambda: run(output_names, input_dict_ort_values, run_options))

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        """As onnxruntime.InferenceSession.run_with_iobinding."""
        run = super().run_with_iobinding

        def call() -> Any:
            run(iobinding, run_options)
            return iobinding.get_outputs()

        self._guard(call)

    def _guard(self, call: Callable[[], Any]) -> Any:
        outermost = not self.store.running()
        try:
            with self.store.run() as made:
                results = call()
        except Exception as error:
            original = self._binding.original(error)
            if original is None:
                raise
        else:
            if made and outermost:
                self.store.release(made, [_array(value) for value in results or ()])
            return results
        # Outside the except block: the original keeps its own __context__ and __cause__.
        raise original


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    kind = getattr(value, "data_type", None)
    return value.numpy() if callable(kind) and kind() == "tensor(int64)" else None


def inference_session(
    model: Any,
    allow: Any = (),
    *,
    store: ContextStore | None = None,
    sess_options: Any = None,
    providers: Sequence[Any] | None = None,
    **kwargs: Any,
) -> Session:
    """An onnxruntime.InferenceSession that runs PythonOp and PythonOpGrad: forward files, training files, any file.

    What onnxruntime needs of a file beyond what it says (typed outputs, no empty names) is arranged in memory. PythonOps that
    feed one another alone run as one there, with one autograd graph (`exporter.runtime.link`).

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model or a Program.
        allow: Classes and patterns that the file may name; see `exporter.files.trust.Gate`.
        store: Where contexts go; sessions that share a store share contexts. Default: one of its own,
            ``session.store``.
        sess_options: Options to start from; the operators are added to them. Default: those of `session_options`, for a
            training step with an arena that all steps of the process share (`exporter.runtime.arena`). Options of
            `session_options` bring their own gate and store, ``allow`` and ``store`` are then not given.
        providers, kwargs: As onnxruntime.InferenceSession has them; default ``["CPUExecutionProvider"]``.

    Returns:
        The session. It raises what a Function raised, as it was.

    Raises:
        RunError: onnxruntime or the native library is not there, or onnxruntime is too old.
        TrustError: The file names something that is not allowed.
        FormatError: The file is damaged, or has external data outside its folder.
    """
    problem = available()
    if problem:
        raise RunError(problem)
    proto, folder = read_model(model, load_data=False)
    if proto is model or proto is getattr(model, "model", None):
        proto = _copy(proto)
    linked = could_link(proto)
    if linked:
        graph = ir.from_proto(proto)
        linked = link(graph) > 0
        proto = ir.to_proto(graph) if linked else proto
    changed = prepare(proto) or linked
    names = [provider if isinstance(provider, str) else provider[0] for provider in providers or ()]
    device = "cuda" if "CUDAExecutionProvider" in names else "cpu"
    if sess_options is None:
        options = session_options(allow, store=store, device=device)
        if any(entry.key == STEP_KEY for entry in proto.metadata_props):
            thrifty(options)
    else:
        options = sess_options
        if options not in _bound:
            _bind(options, Gate(allow), ContextStore() if store is None else store, device)
        elif allow or store is not None:
            raise ValueError("these sess_options come from exporter.session_options: give allow= and store= there")
    source: str | bytes
    if isinstance(model, (str, Path)) and not changed:
        source = str(model)
    else:
        source = proto.SerializeToString()
        if folder is not None:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    return Session(source, options, _bound[options][0], providers=providers or ["CPUExecutionProvider"], **kwargs)


def _copy(proto: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    return copy
