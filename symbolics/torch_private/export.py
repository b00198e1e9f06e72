"""torch.export and the exporter with dynamo=True."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from symbolics.torch_private.builtins import own_builtins

__all__ = [
    "CapturedNode",
    "add_traced_node",
    "allow_in_dynamo",
    "captured_by_dynamo",
    "captures_here",
    "detect_fake_mode",
    "dynamo_exporter",
    "given_data",
    "in_body_of_a_loop",
    "invented_complex_nodes",
    "name_axes",
    "node_in_hand",
    "quiet_exporter",
    "quiet_of_axes",
    "quiet_torchscript",
    "real_tensors",
    "translator",
    "untold_failures",
    "untranslated_nodes",
]


def detect_fake_mode(values: list[Any]) -> Any:
    """The FakeTensorMode of an export in progress, None outside."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(values)


def captures_here() -> bool:
    """Whether it is this thread that compiles or exports: torch.compiler.is_compiling() and is_exporting() answer for the whole process."""
    return torch.compiler.is_dynamo_compiling() or detect_fake_mode([]) is not None


def in_body_of_a_loop() -> bool:
    """Whether torch.export is tracing the body of a scan or a while_loop: nothing public says what asks for a trace."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("torch._higher_order_ops.scan", "torch._higher_order_ops.while_loop")):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Leave the fake mode: tensors made inside have data, and Python's functions are its own."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), own_builtins():
        yield


@contextlib.contextmanager
def allow_in_dynamo(classes: list[type]) -> Iterator[None]:
    """Keep calls of these Functions as one node where Dynamo traces (bodies of torch.cond, strict=True).

    Without it Dynamo inlines them and says nothing. torch has a public way in (allow_in_graph) and none out.
    """
    from torch._dynamo import trace_rules

    known = trace_rules._allowed_callable_ids
    added = [cls for cls in classes if id(cls) not in known]
    for cls in added:
        torch._dynamo.allow_in_graph(cls)
    try:
        yield
    finally:
        for cls in added:
            known.remove(id(cls))


def add_traced_node(
    domain: str, op_type: str, inputs: Sequence[ir.Value | None], attributes: Iterable[ir.Attr] = (), num_outputs: int = 1
) -> Sequence[ir.Value]:
    """Append a node to the graph that torch.onnx is translating into; its outputs, with which torchlib's translations may do arithmetic."""
    from torch.onnx._internal.exporter import _core, _tensors

    tracer = _core.current_tracer
    outputs = [_tensors.SymbolicTensor(tracer.opset) for _ in range(num_outputs)]  # type: ignore[union-attr]
    tracer.nodes.append(ir.Node(domain, op_type, inputs, attributes, outputs=outputs))  # type: ignore[union-attr]
    return outputs


def dynamo_exporter() -> Any:
    """The module whose ``export_compat`` torch.onnx.export(dynamo=True) calls, looked up at each call."""
    from torch.onnx._internal.exporter import _compat

    return _compat


def translator() -> Any:
    """The module whose ``_exported_program_to_onnx_program`` translates; unread nodes are lost in the step after it."""
    from torch.onnx._internal.exporter import _core

    return _core


@contextlib.contextmanager
def quiet_exporter(functions: Iterable[Any]) -> Iterator[None]:
    """What torch.onnx says on every export and is no news to anybody, unsaid.

    That it infers a signature for our ``functions``, which are none of onnxscript's; that torchvision is not there; that a model in training
    mode is exported in training mode (a file says its mode); that its own use of treespec is deprecated; that its own look at ``grad`` finds
    none at an input that is no leaf (which it hides itself, but not from ``-W error``); that an LSTM assigns its own list of weights; that two
    axes that were given one name have one; that a function which its own loops of RNNs call is going; that a version was not converted, which
    `exporter.forward.opset` says.
    """
    names = {str(function) for function in functions}

    def wanted(record: logging.LogRecord) -> bool:
        if record.msg.startswith(("torchvision is not installed", "Setting ONNX exporter to use operator set version")):
            return False
        return not (isinstance(record.args, tuple) and record.args and str(record.args[0]) in names)

    package = "torch.onnx._internal.exporter"
    filters = [(logging.getLogger(name), wanted) for name in (f"{package}._registration", f"{package}._compat")]
    filters.append((logging.getLogger("onnxscript.version_converter"), lambda record: False))
    for logger, function in filters:
        logger.addFilter(function)
    try:
        with warnings.catch_warnings():
            for text in (
                "Exporting a model while it is in training mode", r"`isinstance\(treespec, LeafSpec\)` is deprecated",
                "The .grad attribute of a Tensor that is not a leaf Tensor", r"The tensor attributes self\.\S*_flat_weights\[",
                r"# The axis name: (.+) will not be used, since it shares the same shape constraints with another axis: \1\.",
                "_check_is_size will be removed in a future PyTorch release",
            ):  # fmt: skip
                warnings.filterwarnings("ignore", text)
            yield
    finally:
        for logger, function in filters:
            logger.removeFilter(function)


@contextlib.contextmanager
def quiet_of_axes() -> Iterator[None]:
    """That torch.onnx gives axes no names where an argument is no tensor, unsaid: `name_axes` does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "# ONNX model has different number of inputs than the flatten dynamic_shapes")
        yield


def name_axes(program: Any, axes: list[Any]) -> None:
    """Give the open axes of a program the names that they have in ``dynamic_shapes``, here of its tensors alone; no public call does it afterwards.

    Args:
        program: A torch.onnx.ONNXProgram.
        axes: For each input of the graph axis -> Dim, name or Dim.AUTO; None where no axis is open.
    """
    program._rename_dynamic_axes(axes)


@contextlib.contextmanager
def quiet_torchscript() -> Iterator[None]:
    """What torch.onnx.export(dynamo=False) says and is no news to whoever chose it, unsaid.

    That it is the old exporter; that it uses a deprecated part of torch; that BatchNorm's count of batches is not changed in place (a file gives it
    as an output); that an LSTM may want a batch of one (its initial state follows the batch).
    """
    with warnings.catch_warnings():
        for text in (
            "You are using the legacy TorchScript-based ONNX export", "The feature will be removed. Please remove usage of this function",
            r"ONNX Preprocess - Removing mutation from node aten::add_ on block input: '(\S+\.)?num_batches_tracked'",
            "Exporting a model to ONNX with a batch_size other than 1",
        ):  # fmt: skip
            warnings.filterwarnings("ignore", text)
        yield


def captured_by_dynamo(program: Any) -> bool:
    """Whether torch.onnx.export fell back to torch.export.export(strict=True)."""
    return "Strict" in (program._capture_strategy or "") and "NonStrict" not in program._capture_strategy


def given_data(program: torch.export.ExportedProgram) -> list[str]:
    """The parameters and buffers whose ``.data`` a captured program assigns: the operator that says so is no public one, and another from torch 2.15 on."""
    known = {**program.graph_signature.inputs_to_parameters, **program.graph_signature.inputs_to_buffers}
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    calls = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    given = [call.args[0] for call in calls if str(call.target) in ("aten.set_.source_Tensor", "aten.shallow_copy_data_.default")]
    return [known[each.name] for each in given if isinstance(each, torch.fx.Node) and each.name in known]


class CapturedNode(NamedTuple):
    """A node of a captured graph.

    Attributes:
        operator: The operator, ``aten::relu``.
        overload: torch's name of it, as one writes it: ``torch.ops.aten.relu.default``; of a trace the operator.
        module: The path of the module that called it.
        lines: The lines of Python on the way there, the innermost first.
        called: The operator that was called there, ``aten::linalg_solve.default``, where this one is what it was taken apart into; a trace knows no
            overload.
        kind: The class of that module, ``mypkg.nets.Net``; "" where it is not known.
        is_complex: Whether a tensor that it takes or gives is complex.
    """

    operator: str
    overload: str
    module: str
    lines: list[tuple[str, int]]
    called: str
    kind: str = ""
    is_complex: bool = False


def _captured(node: torch.fx.Node) -> CapturedNode:
    target: Any = node.target
    trace = node.meta.get("stack_trace") or ""
    modules = list((node.meta.get("nn_module_stack") or {"": ("",)}).values())
    lines = [(file, int(number)) for file, number in reversed(re.findall(r'File "([^"]+)", line (\d+)', trace))]
    sources = node.meta.get("from_node") or ()
    # Under no_grad() the capture has a graph of its own, and the node there stands in the trace alone.
    for text in (str(sources[0].target) if sources else "", trace.rpartition("torch.ops.")[2]):
        if (called := re.match(r"(aten|prims)\.(\w+)\.(\w+)", text)) is not None:
            break
    name = target.name() if called is None else f"{called[1]}::{called[2]}.{called[3]}"
    path, kind = (*modules[-1], "")[:2]
    path = str(path).rpartition("__self__.")[2]  # Dynamo (strict=True) begins at the function that it was given
    kind = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    tensors = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    is_complex = any(isinstance(tensor, torch.Tensor) and tensor.is_complex() for tensor in pytree.tree_leaves(tensors))
    return CapturedNode(target.name().partition(".")[0], f"torch.ops.{target}", path, lines, name, kind, is_complex)


def node_in_hand(frames: Iterable[FrameType]) -> CapturedNode | None:
    """The node of a captured graph that torch's exporters were translating when they failed: its frames have it, what they raise does not.

    Args:
        frames: Of the traceback, the outermost first.
    """
    found: Any = None
    for frame in frames:
        if frame.f_globals.get("__name__", "").startswith("torch.onnx._internal."):
            node = frame.f_locals.get("node")
            found = node if isinstance(node, (torch.fx.Node, torch._C.Node)) else found
    if isinstance(found, torch.fx.Node) and isinstance(found.target, torch._ops.OpOverload):
        return _captured(found)
    if isinstance(found, torch._C.Node):
        lines = [(file, int(number)) for file, number in re.findall(r"^(.+)\((\d+)\): ", str(found.sourceRange()), re.M)]
        kind, _, path = found.scopeName().rpartition("/")[2].rpartition("::")
        types = [value.type() for value in (*found.inputs(), *found.outputs())]
        is_complex = any(isinstance(each, torch._C.TensorType) and "Complex" in (each.scalarType() or "") for each in types)
        return CapturedNode(found.kind(), found.kind(), path, lines, found.kind(), kind, is_complex)
    return None


def untranslated_nodes(program: torch.export.ExportedProgram, registry: Any) -> list[CapturedNode]:
    """The nodes of a captured graph, and of the bodies in it, whose operator is torch's own and in no table of translations.

    Args:
        program: What torch.onnx is about to translate.
        registry: Its table.
    """
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return [
        _captured(node)
        for node in nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace in ("aten", "prims")
        and not registry.is_registered(node.target)
    ]


#: What makes complex numbers of real ones, and is translated to pairs of those.
_PAIRS = {"complex", "polar", "view_as_complex", "_fft_r2c", "stft", "_to_copy", "to", "convert_element_type"}


def invented_complex_nodes(program: torch.export.ExportedProgram) -> list[CapturedNode]:
    """The nodes of a captured graph, and of the bodies in it, that give complex numbers and take none: torch.onnx translates these as if they were real.

    What its promotion of types puts in front of another node, which knows no line, is told as that one.

    Args:
        program: What torch.onnx is about to translate.
    """
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    found = []
    for node in (node for graph in graphs for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)):
        name = node.target._schema.name.partition("::")
        if (
            name[0] in ("aten", "prims")
            and name[2] not in _PAIRS
            and _gives_complex(node)
            and not any(map(_gives_complex, node.all_input_nodes))
            and not (name[2] == "scalar_tensor" and not isinstance(node.args[0], complex))  # a real number, which pairs take as one
        ):
            found.append(_captured(node if node.meta.get("stack_trace") else next(iter(node.users), node)))
    return found


def _gives_complex(node: torch.fx.Node) -> bool:
    return any(isinstance(each, torch.Tensor) and each.is_complex() for each in pytree.tree_leaves(node.meta.get("val")))


class _Untold(threading.local):
    depth = 0


_untold, _silencing = _Untold(), threading.RLock()
_silenced: list[Any] = []  # one entry for each open block, in any thread


def _unless_untold(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None if _untold.depth else function(*args, **kwargs)


@contextlib.contextmanager
def _prints_untold() -> Iterator[None]:
    """torch.export prints the graph so far to stderr, by the ``print`` of its module; the TorchScript exporter by a log of its own, to stdout."""
    from torch.export import _trace

    with _silencing:
        if not _silenced:
            _trace.print = _unless_untold(print)
            log = torch._C._jit_onnx_log
            torch._C._jit_onnx_log = _unless_untold(log)
            _silenced.append(log)
        _silenced.append(None)
    _untold.depth += 1
    try:
        yield
    finally:
        _untold.depth -= 1
        with _silencing:
            _silenced.pop()
            if len(_silenced) == 1:
                torch._C._jit_onnx_log = _silenced.pop()
                del _trace.print


@contextlib.contextmanager
def untold_failures() -> Iterator[None]:
    """Where the block raises, torch has said nothing beside: what it logs in this thread is told at the end, and only where that is reached."""
    thread, held = threading.get_ident(), list[tuple[logging.Handler, logging.LogRecord]]()
    loggers = [logger for name, logger in logging.root.manager.loggerDict.items() if name.partition(".")[0] == "torch"]
    handlers = {handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers}

    def keep(handler: logging.Handler) -> Any:
        def kept(record: logging.LogRecord) -> bool:
            if threading.get_ident() != thread or ended:
                return True
            held.append((handler, record))
            return False

        return kept

    ended = False
    filters = [(handler, keep(handler)) for handler in handlers]
    for handler, function in filters:
        handler.addFilter(function)
    try:
        with _prints_untold():
            yield
        ended = True
        for handler, record in held:
            handler.handle(record)
    finally:
        for handler, function in filters:
            handler.removeFilter(function)
