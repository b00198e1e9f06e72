"""PythonOp and PythonOpGrad on the onnxruntime that people install."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import onnx

from exporter.errors import short
from exporter.files.proto import check_there, open_proto, reading
from exporter.files.steady import steady
from exporter.files.trust import Gate
from exporter.runtime.arena import use_training_arena
from exporter.runtime.binding import Binding
from exporter.runtime.changed import changed_functions, say_changed
from exporter.runtime.library import available, bind, binding_of, check_onnxruntime, register
from exporter.runtime.pipeline import Arranged, arrange
from exporter.runtime.providers import Choice, add_devices, choose
from exporter.runtime.refusals import refusal
from exporter.runtime.spinning import choose_spinning
from exporter.runtime.store import ContextStore, Made, PoolLog, arrays_of
from symbolics.errors import RunError
from symbolics.graph.collector import without_gc

if TYPE_CHECKING:
    from exporter.runtime.accelerate import Update

T = TypeVar("T")

_Session: Any = object
try:
    import onnxruntime

    _Session = onnxruntime.InferenceSession
except ImportError:  # told when somebody needs it: onnx.reference runs without
    pass

__all__ = ["FATAL", "Session", "inference_session", "open_options", "open_session", "session_options", "step_sessions"]

#: onnxruntime's log level for what no exception says.
FATAL = 4


@short
def session_options(allow: Any = (), *, store: ContextStore | None = None, device: str = "cpu") -> onnxruntime.SessionOptions:
    """Make onnxruntime.SessionOptions with which a plain onnxruntime.InferenceSession runs the PythonOps of a forward file.

    `inference_session` does more: it raises what a Function raised as it was, frees what a failed run left, warns of a Function
    that has changed since the export, and takes every file. With these options, a plain session reports what a Function
    raised as text only, and a training file that failed half-way keeps its contexts until ``store.clear()``. A file without
    PythonOps needs no options. onnxruntime may even refuse it with them ("FusedMatMul(-1) is not a registered function").

    Args:
        allow: What the file may call: classes, functions, and patterns such as ``"mypkg.ops:*"``. Default: nothing.
        store: Where forward calls leave what their backward needs. Default: a store of its own.
        device: "cpu", or "cuda" to register the operators for CUDAExecutionProvider as well. That was not run on a GPU.

    Returns:
        The options. Everything else in them is onnxruntime's default, but intra-op threads spin during a run only, because
        they would take the cores from torch's threads.

    Raises:
        RunError: onnxruntime or the native library is missing, or onnxruntime is too old.

    Examples:
        >>> session = onnxruntime.InferenceSession("model.onnx", exporter.session_options(allow=["mypkg.ops:*"]))
    """
    problem = available()
    if problem:
        raise RunError(problem)
    options = open_options(allow, store, device)
    choose_spinning(options)
    return options


def open_options(allow: Any, store: ContextStore | None, device: str = "cpu", long: Container[str] = ()) -> Any:
    """As `session_options`, also without the native library: options for models without PythonOps then.

    ``long`` are Functions as in `Binding`.

    Raises:
        RunError: onnxruntime is not there.
    """
    check_onnxruntime()
    options = onnxruntime.SessionOptions()
    bind(options, Binding(Gate(allow), ContextStore() if store is None else store), device).long = long
    return options


class Session(_Session):  # type: ignore[misc]
    """An onnxruntime.InferenceSession whose exceptions are the Functions' own.

    The callback of ``run_async`` gets the text of a failure, as onnxruntime's does.

    Attributes:
        store: The contexts of its runs. A run that raised has freed what it made.
        changed: The Functions that are others than when the model was exported -> which of "forward" and "backward".
    """

    changed: Mapping[str, list[str]] = {}

    def __init__(self, model: str | bytes, options: Any, binding: Binding, **kwargs: Any) -> None:
        self._binding = binding
        self.store = binding.store
        self._pool = PoolLog(self.store)
        self._parallel = options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
        with binding.making(self._pool, alone=options.intra_op_num_threads == 1):
            self._guard(lambda: super(Session, self).__init__(model, options, **kwargs))
        self._integers = frozenset(value.name for value in self.get_outputs() if value.type == "tensor(int64)")

    @short
    def run(self, output_names: Sequence[str] | None, input_feed: dict[str, Any], run_options: Any = None) -> Any:
        """As onnxruntime.InferenceSession.run; raises what a Function raised, as it was, and a RunError for what onnxruntime raises."""
        run = super().run
        return self._guard(lambda: run(output_names, input_feed, run_options))

    @short
    def run_with_ort_values(self, output_names: Any, input_dict_ort_values: Any, run_options: Any = None) -> Any:
        """As onnxruntime.InferenceSession.run_with_ort_values."""
        run = super().run_with_ort_values
        return self._guard(lambda: run(output_names, input_dict_ort_values, run_options))

    @short
    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        """As onnxruntime.InferenceSession.run_with_iobinding."""
        run = super().run_with_iobinding

        def call() -> Any:
            run(iobinding, run_options)
            return iobinding.get_outputs()

        self._guard(call)

    def run_with_ortvaluevector(
        self, run_options: Any, feed_names: Any, feeds: Any, fetch_names: Any, fetches: Any, fetch_devices: Any
    ) -> None:
        """As onnxruntime.InferenceSession.run_with_ortvaluevector."""
        run = super().run_with_ortvaluevector

        def call() -> Any:
            run(run_options, feed_names, feeds, fetch_names, fetches, fetch_devices)
            # A handle is an int64. One by one: onnxruntime's vectors are slow to iterate (20 us), and copying out each value costs 1 us.
            return [fetches[i] for i, name in enumerate(fetch_names) if name in self._integers]

        self._guard(call)

    def run_async(
        self, output_names: Any, input_feed: dict[str, Any], callback: Callable[..., Any], user_data: Any, run_options: Any = None
    ) -> None:
        """As onnxruntime.InferenceSession.run_async; a run that failed has freed its contexts when the callback is called."""
        ticket = self._pool.begin()

        def ended(results: Any, data: Any, error: str) -> None:
            self._pool.end(ticket, None if error else arrays_of(results))
            callback(results, data, error)

        try:
            super().run_async(output_names, input_feed, ended, user_data, run_options)
        except BaseException:
            self._pool.end(ticket, None)
            raise

    def _guard(self, call: Callable[[], Any]) -> Any:
        outermost = not self.store.running()
        ticket = self._pool.begin() if self._parallel else None
        results: Any = None
        try:
            with self.store.run() as made:
                results = call()
        except Exception as error:
            original = self._original(error, made)
            if original is None:
                raise
        else:
            if made and outermost:
                self.store.release(made, arrays_of(results))
            return results
        finally:
            if ticket is not None:
                named = self._pool.end(ticket, None if results is None else arrays_of(results))
                if not outermost:
                    made += named  # freed when the outer run raises
        # Outside the except block: the original keeps its own __context__ and __cause__.
        raise original

    def run_owning(self, method: Callable[..., Any], *args: Any) -> list[int]:
        """A run of a session of sequential execution for a caller who frees contexts: nobody looks for handles among its results,
        which costs as much as a small run.

        Args:
            method: A method of onnxruntime.InferenceSession that runs it.
            args: What it takes.

        Returns:
            The handles of the contexts that the run made and that are the caller's from here on.
        """
        made, new = self.store.enter(sys._getframe())
        start, original = len(made), None
        try:
            method(self, *args)
            return made[start:]
        except BaseException as error:
            self.store.free_all(made[start:])
            original = self._original(error, made) if isinstance(error, Exception) else None
            if original is None:
                raise
        finally:
            del made[start:]  # the outer run neither frees nor keeps them
            if new:
                self.store.leave()
        raise original

    def _original(self, error: Exception, made: Made) -> BaseException | None:
        """What is raised in the place of what onnxruntime raised; None for that itself."""
        original = self._binding.original(error, made, self._pool)
        return refusal(error) if original is None else original  # not `or`: an exception may be false


#: What onnxruntime.InferenceSession takes beside.
_OPTIONS = ("provider_options", "enable_fallback", "read_config_from_model", "disabled_optimizers")


@short
def inference_session(
    model: Any,
    allow: Any = (),
    *,
    store: ContextStore | None = None,
    sess_options: Any = None,
    providers: Sequence[Any] | None = None,
    accelerate: bool = True,
    strict: bool = False,
    **kwargs: Any,
) -> Session:
    """Open a file in onnxruntime, and run its PythonOps: a forward file, a training file, or a file of another tool.

    The session is used like an onnxruntime.InferenceSession. What onnxruntime needs beyond what the file says is arranged in
    memory. On the CPU, a training step is rewritten into operators that run faster; other providers get the operators that
    they have.

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model or a `Program`.
        allow: What the file may call: classes, functions, and patterns such as ``"mypkg.ops:*"``. Default: nothing.
        store: Where forward calls leave what their backward needs. Sessions that share a store can hand this on to each
            other. Default: a store of its own, ``session.store``.
        sess_options: onnxruntime.SessionOptions to start from. The operators are added to them. Default: those of
            `session_options`. Options that `session_options` made have ``allow`` and ``store`` already: then pass neither here.
        providers: Execution providers; the first that has an operator runs it. onnxruntime's names or short ones ("cpu",
            "cuda"), and providers that a pip package brings ("openvino"), with or without options:
            ``[("openvino", {"precision": "bfloat16"})]``. PythonOps, and what a provider does not have, run on the CPU.
            Default: the CPU.
        kwargs: As onnxruntime.InferenceSession takes them.
        accelerate: False: a training step runs by onnxruntime's own operators only. The environment variable
            ``PYTHONOP_ACCELERATE=0`` does this for all sessions.
        strict: Whether a Function that has changed since the export is an error, not a warning.

    Returns:
        The session. What a Function raises comes out as it was. What onnxruntime raises is a RunError, and of onnxruntime's
        own class as well. On the CPU a Function runs on one thread of torch until three of its calls have taken 4 ms, and on
        all threads from then on. In a session of one thread it always runs on all.

    Raises:
        RunError: onnxruntime or the native library is missing, onnxruntime is too old, or it refuses the model. Or, with
            ``strict``, a Function has changed.
        TrustError: The file names something that ``allow`` does not.
        FormatError: The file is damaged, or has external data outside its folder, or its data file is not there.
        TypeError: There is no such option.

    Warns:
        PythonopWarning: A Function has changed since the file was exported: its forward, its backward, or both.

    Examples:
        >>> session = exporter.inference_session("model.onnx", allow=["mypkg.ops:*"])
        >>> outputs = session.run(None, {"x": x.numpy()})
    """
    for name in kwargs:  # onnxruntime takes any without a word
        if name not in _OPTIONS:
            raise TypeError(
                f"inference_session has no option {name!r}: it has allow, store, sess_options, providers, accelerate, strict, {', '.join(_OPTIONS)}"
            )
    session = open_session(model, allow, store=store, sess_options=sess_options, providers=providers, accelerate=accelerate, **kwargs)
    say_changed(session.changed, strict=strict)
    return session


def open_session(
    model: Any,
    allow: Any = (),
    *,
    store: ContextStore | None = None,
    sess_options: Any = None,
    providers: Sequence[Any] | None = None,
    accelerate: bool = True,
    **kwargs: Any,
) -> Session:
    """`inference_session` without a word of Functions that have changed: `Session.changed` has them."""
    how = _How(allow, store, sess_options, providers, accelerate)
    return _steadily(model, how, lambda opened: opened.session(opened.proto, kwargs))


def step_sessions(
    step: Any,
    carried: Mapping[str, str],
    allow: Any = (),
    *,
    sess_options: Any = None,
    providers: Sequence[Any] | None = None,
    accelerate: bool = True,
) -> tuple[Session, Session | None, Update | None]:
    """The session of a training step, and one that writes what it can of the next state over the present one.

    Args:
        step: A training step, as `inference_session` takes models.
        carried: output -> the input that takes its value in the next step.
        allow, sess_options, providers, accelerate: As `inference_session`.

    Returns:
        The step's session; the other one, which is to run after it, and what it does (None where nothing can be written so). The first hands
        out what the other reads beside the step's inputs.

    Raises:
        RunError, TrustError, FormatError: As `inference_session`.
    """

    def make(opened: _Opened) -> tuple[Session, Session | None, Update | None]:
        main = opened.session(opened.proto, {})
        if opened.update is None:
            return main, None, None
        from onnx_ir import to_proto

        return main, opened.session(to_proto(opened.update.model), {}), opened.update

    return _steadily(step, _How(allow, None, sess_options, providers, accelerate, carried), make)


@dataclass
class _Opened:
    """A model as onnxruntime takes it, and options for it.

    Attributes:
        proto, folder: The model, and where its external data lies.
        path: Where the file is; None where it is not what is to run.
        options, binding: For its session.
        update: What was taken out of it.
        metadata: What the file says.
        choice: The execution providers.
    """

    proto: onnx.ModelProto
    folder: Path | None
    path: Path | None
    options: Any
    binding: Binding
    update: Update | None
    metadata: dict[str, str]
    choice: Choice

    def session(self, proto: onnx.ModelProto, more: dict[str, Any]) -> Session:
        source: str | bytes = proto.SerializeToString() if self.path is None else str(self.path)
        if self.choice.devices:
            more = {"enable_fallback": 0, **more}  # otherwise the CPU would take the place of a provider that refuses the model
        try:
            session = Session(source, self.options, self.binding, providers=self.choice.providers, **more)
        except RunError:
            if self.folder is not None:
                check_there(proto, self.folder)
            raise
        session.changed = changed_functions(self.metadata, self.binding.gate.functions)
        return session


class _How(NamedTuple):
    """As `inference_session` has them, and ``carried`` as `exporter.runtime.accelerate.Request`."""

    allow: Any
    store: ContextStore | None
    options: Any
    providers: Sequence[Any] | None
    accelerate: bool
    carried: Mapping[str, str] | None = None


def _steadily(model: Any, how: _How, make: Callable[[_Opened], T]) -> T:
    """What ``make`` makes of a model; anew where it fails and the file was replaced meanwhile."""
    given = binding_of(how.options) is not None

    def read() -> T:
        ours = not given and binding_of(how.options) is not None  # the gate and the store of a try that failed
        return make(_open(model, how._replace(allow=(), store=None) if ours else how))

    return steady(model, read)


def _open(model: Any, how: _How) -> _Opened:
    """Arrange a model in memory; with ``carried`` as `take_out_updates` wants it, what may write in place apart."""
    allow, store, options, providers, accelerate, carried = how
    check_onnxruntime()
    choice = choose(providers)
    device = "cuda" if "CUDAExecutionProvider" in [p if isinstance(p, str) else p[0] for p in choice.providers or ()] else "cpu"
    with without_gc():
        proto, folder = open_proto(model)
        problem = available(proto)
        if problem:
            raise RunError(problem)
        metadata = {entry.key: entry.value for entry in proto.metadata_props}
        # onnxruntime 1.22 and before do not say whether a session's threads are its own.
        own_threads = options is not None and getattr(options, "use_per_session_threads", True)
        one_thread = own_threads and options.intra_op_num_threads == 1
        with reading(model):
            found = arrange(Arranged(proto, choice.names, accelerate, carried, own_options=options is not None, one_thread=one_thread))
    if device == "cuda":
        import torch  # noqa: F401  its CUDA and cuDNN are those that onnxruntime finds
    if options is None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = FATAL  # an error is raised, with the Function's own traceback: onnxruntime would print it, too
        if found.is_step:
            use_training_arena(options)
        elif found.large:  # the first run would plan all buffers, in a time that grows with their number's square
            options.enable_mem_pattern = False
    binding = binding_of(options)
    if binding is not None:
        if allow or store is not None:
            raise ValueError("these sess_options come from exporter.session_options: give allow= and store= there")
    else:
        gate, contexts = Gate(allow), ContextStore() if store is None else store
        binding = bind(options, Binding(gate, contexts), device) if found.library else Binding(gate, contexts)
    if found.python_ops:
        binding.load()
    if found.operators is not None:
        register(options, found.operators)
    add_devices(options, choice)
    choose_spinning(options)
    path = Path(model) if isinstance(model, (str, Path)) and not found.changed else None
    if path is None and folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    return _Opened(found.proto, folder, path, options, binding, found.update, metadata, choice)
