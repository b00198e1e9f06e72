"""TorchScript: tracing and the exporter with dynamo=False; and who asks whether anybody traces."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from symbolics.torch_private.watching import unheard

__all__ = [
    "comes_of_sizes",
    "compiled_call",
    "has_bodies",
    "inner_function",
    "is_tracing",
    "opsets_of_torchscript",
    "overwrite_traced",
    "paused_capture",
    "replace_traced",
    "scripts_run_as_python",
    "set_traced_value",
    "sized_by_values",
    "sizes_behind",
    "tensor_type",
    "torchscript_constant",
    "torchscript_exporter",
    "torchscript_has",
    "torchscript_numbers",
    "torchscript_passes",
    "torchscript_reshape",
    "torchscript_shape",
    "torchscript_symbolic",
    "trace_kept",
    "traced_graph",
    "traced_producer",
    "traced_value",
    "traced_values_kept",
    "tracing_questions",
    "tracing_questions_of_c",
]


@contextlib.contextmanager
def paused_capture() -> Iterator[None]:
    """Run code that the exporters must not see: no proxy tracing, no TorchScript tracing, no torch function modes."""
    # Loading proxy_tensor is cheap once torch.export is: the TorchScript exporter does not need it.
    proxy = sys.modules.get("torch.fx.experimental.proxy_tensor")
    state = torch._C._get_tracing_state()
    with contextlib.ExitStack() as stack:
        stack.enter_context(unheard())
        if proxy is not None:
            stack.enter_context(_same_modules(getattr(proxy.get_proxy_mode(), "tracer", None)))
            stack.enter_context(proxy.disable_proxy_modes_tracing())
        if state is not None:
            torch._C._set_tracing_state(None)
            stack.callback(torch._C._set_tracing_state, state)
        yield


@contextlib.contextmanager
def _same_modules(tracer: Any) -> Iterator[None]:
    """A tracer takes itself to be in the modules that it was in before: of one whose call raised it takes no leave."""
    if not hasattr(tracer, "module_stack"):
        yield
        return
    stack, counts = tracer.module_stack.copy(), dict(tracer.num_calls)
    try:
        yield
    finally:
        tracer.module_stack, tracer.num_calls = stack, counts


def tracing_questions() -> tuple[Any, ...]:
    """The functions of Python by which code asks whether it is traced, compiled or exported."""
    return (
        torch.jit.is_tracing,
        torch.onnx.is_in_onnx_export,
        torch.compiler.is_exporting,
        torch.compiler.is_compiling,
        torch.compiler.is_dynamo_compiling,
    )


def tracing_questions_of_c() -> tuple[Any, dict[str, Any]]:
    """The module of those that are written in C, and each one's answer in eager mode. brevitas and others ask them."""
    return torch._C, {"_get_tracing_state": None, "_is_tracing": False}


def torchscript_exporter() -> Any:
    """The module whose ``export`` torch.onnx.export(dynamo=False) calls, looked up at each call."""
    from torch.onnx._internal.torchscript_exporter import utils

    return utils


def opsets_of_torchscript() -> range:
    """The opsets that torch.onnx.export(dynamo=False) is made for. Of most others it says so behind a trace, a warning and the whole graph."""
    from torch.onnx import _constants

    return range(_constants.ONNX_MIN_OPSET, _constants.ONNX_MAX_OPSET + 1)


def torchscript_passes() -> Any:
    """The module in which torch.onnx.export(dynamo=False) looks up its passes at each call:
    ``_jit_pass_onnx_graph_shape_type_inference`` and ``_jit_pass_onnx_node_shape_type_inference``."""
    return torch._C


def has_bodies(graph: Any) -> bool:
    """Whether a graph of the TorchScript exporter has nodes with bodies, at any depth."""
    return any(graph.findNode(kind) is not None for kind in ("onnx::If", "onnx::Loop"))


def torchscript_symbolic(name: str) -> tuple[int, Any] | None:
    """The TorchScript exporter's own newest symbolic function of an operator, and the opset that it is for.

    None where a user has registered another one for that opset. The registry is private; an export fills it, the first of a process.
    """
    from torch.onnx._internal.torchscript_exporter.registration import registry
    from torch.onnx._internal.torchscript_exporter.utils import _trigger_symbolic_function_registration

    _trigger_symbolic_function_registration()
    group = registry.get_function_group(name)
    if group is None:
        return None
    functions = group._functions
    opset = max(functions._base)
    return None if any(functions.overridden(version) for version in functions) else (opset, functions._base[opset])


def torchscript_has(name: str, opset: int | None) -> bool:
    """Whether the TorchScript exporter, or a user, has a symbolic function of an operator for an opset (None: torch's own). The registry is private."""
    from torch.onnx import _constants
    from torch.onnx._internal.torchscript_exporter.registration import registry
    from torch.onnx._internal.torchscript_exporter.utils import _trigger_symbolic_function_registration

    _trigger_symbolic_function_registration()
    return bool(registry.is_registered_op(name, opset or _constants.ONNX_DEFAULT_OPSET))


def compiled_call(model: torch.jit.ScriptModule, kind: str) -> str:
    """The name of an operator that a compiled model calls, of a Function or function where it is Python's; "" where it calls none.

    The graph of a ScriptModule is public, what is in it is not.
    """
    graph: Any = model.inlined_graph
    found = graph.findAllNodes(kind)
    return "" if not found else str(found[0].pyname()) if kind == "prim::PythonOp" else kind


def torchscript_constant(value: Any) -> Any:
    """The number or text that a constant of the TorchScript exporter holds; None for any other value."""
    node = value.node()
    if node.kind() not in ("prim::Constant", "onnx::Constant") or not node.hasAttribute("value"):
        return None
    if node.kindOf("value") == "s":
        return node.s("value")
    return node.t("value").item() if node.kindOf("value") == "t" else getattr(node, node.kindOf("value"))("value")


def torchscript_numbers(value: Any) -> list[int] | None:
    """The whole numbers, one or several, that an argument of a symbolic function holds; None where they are computed."""
    node = value.node()
    if node.kind() == "prim::ListConstruct":
        parts = [torchscript_numbers(part) for part in node.inputs()]
        return None if None in parts else [number for part in parts for number in part or ()]
    if node.kind() not in ("prim::Constant", "onnx::Constant") or not node.hasAttribute("value"):
        return None
    kind = node.kindOf("value")
    if kind == "t":
        return [int(number) for number in node.t("value").reshape(-1).tolist()]
    return [node.i("value")] if kind == "i" else list(node.is_("value")) if kind == "is" else None


def torchscript_reshape() -> tuple[Any, str]:
    """The module and the name by which every symbolic function of the TorchScript exporter looks up what writes a Reshape."""
    from torch.onnx._internal.torchscript_exporter import symbolic_helper

    return symbolic_helper, "_reshape_helper"


def torchscript_shape(shape: Any) -> list[int] | None:
    """The sizes that an argument of such a symbolic function holds: a list, or a constant; None where they are computed."""
    from torch.onnx._internal.torchscript_exporter import symbolic_helper

    sizes = symbolic_helper._maybe_get_const(shape, "is")
    if isinstance(sizes, torch.Tensor):
        return [int(size) for size in sizes.reshape(-1).tolist()]
    if isinstance(sizes, torch._C.Value):
        node = sizes.node()
        return node.t("value").reshape(-1).tolist() if node.kind() == "onnx::Constant" else None
    return [int(size) for size in sizes]


def inner_function(name: str) -> Any:
    """What a function of torch.nn.functional, or torch.cdist, calls after its checks: this is what a mode sees of it."""
    return getattr(torch._C._nn, name, None) or getattr(torch._VF, name)


def is_tracing() -> bool:
    """Whether torch.jit is tracing in this thread."""
    return torch._C._get_tracing_state() is not None


_scripts = threading.Lock()
_called_script = torch.jit.ScriptFunction.__call__
_exports = 0


def _call_script(self: Any, *args: Any, **kwargs: Any) -> Any:
    written = getattr(self, "_torchdynamo_inline", None)  # the function that torch.jit.script was given; nothing public has it
    if written is None or not is_tracing() or any(self.inlined_graph.findAllNodes(kind) for kind in ("prim::If", "prim::Loop")):
        return _called_script(self, *args, **kwargs)
    return written(*args, **kwargs)


@contextlib.contextmanager
def scripts_run_as_python() -> Iterator[None]:
    """While the block runs, a function of torch.jit.script that a trace calls runs as the Python it was made of, where it has no branch and no loop."""
    global _exports
    with _scripts:
        _exports += 1
        torch.jit.ScriptFunction.__call__ = _call_script  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _scripts:
            _exports -= 1
            if not _exports:
                torch.jit.ScriptFunction.__call__ = _called_script  # type: ignore[method-assign]


def traced_producer(tensor: torch.Tensor) -> Any:
    """The TorchScript node that produced a traced tensor."""
    return torch._C._get_value_trace(tensor).node()


def sizes_behind(tensor: torch.Tensor) -> set[int]:
    """The sizes of which a number of the TorchScript trace is computed, as the example has them; none where it depends on anything else."""
    sizes = set()
    for node in _size_nodes(tensor):
        shape = next(node.inputs()).type().sizes()
        if shape is None:
            return set()
        if node.kind() == "aten::numel":
            sizes.update(shape)
            continue
        axis = list(node.inputs())[1].node()
        if not axis.hasAttribute("value"):
            return set()
        sizes.add(shape[axis.i("value")])
    return sizes


def comes_of_sizes(tensor: torch.Tensor) -> bool:
    """Whether a number of the TorchScript trace is computed of sizes, and of nothing else."""
    return bool(_size_nodes(tensor))


def _size_nodes(tensor: torch.Tensor) -> list[Any]:
    """The nodes that read the sizes of which a number is computed; none where it depends on anything else."""
    if not is_tracing() or tensor.dim() != 0:
        return []
    pending, found = [traced_producer(tensor)], []
    while pending:
        node = pending.pop()
        inputs = list(node.inputs())
        if node.kind() in ("aten::size", "aten::numel"):
            found.append(node)
        elif node.kind() in ("prim::NumToTensor", "aten::Int") or (node.kind().startswith("aten::") and inputs):
            pending.extend(value.node() for value in inputs)
        elif node.kind() not in ("prim::Constant", "prim::ListConstruct"):
            return []
    return found


#: What has as many elements as the values of its argument say.
_SIZED_BY_VALUES = {
    f"aten::{name}"
    for name in ("nonzero", "nonzero_numpy", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "argwhere", "bincount")
}


def sized_by_values(number: torch.Tensor) -> bool:
    """Whether a number of the TorchScript trace is the size of what ``torch.nonzero`` and the like gave, or of what was made of that not long before."""
    pending, seen = [traced_producer(number)], set[Any]()
    while pending and len(seen) < 200:
        node = pending.pop(0)
        inputs = list(node.inputs())
        if node.kind() in _SIZED_BY_VALUES or (node.kind() == "aten::index" and any(map(_is_mask, inputs[1].node().inputs()))):
            return True
        inputs = [value for value in inputs if value not in seen]
        seen.update(inputs)
        pending += [value.node() for value in inputs]
    return False


def _is_mask(value: Any) -> bool:
    return isinstance(value.type(), torch._C.TensorType) and value.type().scalarType() in ("Bool", "Byte")


def replace_traced(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """From here on, ``tensor`` stands for the traced value of ``source``."""
    torch._C._set_value_trace(tensor, torch._C._get_value_trace(source))


def overwrite_traced(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``target.copy_(source)``, for which the exporter has no operator: from here on, the target stands for a copy of the source."""
    value = source.to(target.dtype).expand(target.shape).clone()
    with paused_capture():
        target.copy_(source)
    replace_traced(target, value)
    return target


def traced_value(tensor: torch.Tensor) -> Any:
    """What stands for a tensor in the TorchScript trace."""
    return torch._C._get_value_trace(tensor)


def set_traced_value(tensor: torch.Tensor, value: Any) -> None:
    """From here on, a value of the trace stands for ``tensor``."""
    torch._C._set_value_trace(tensor, value)


@contextlib.contextmanager
def traced_values_kept(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Tensors that the block leaves as they are stand for the values of the trace for which they stood before.

    What gives back its argument (``x.float()`` of floats), here or inside of a composite, is in the trace, and so the argument
    would stand for its result: who read it before and who reads it later would read two values.
    """
    before, state = [], torch._C._get_tracing_state()
    for tensor in tensors:
        try:
            before.append((tensor, tensor._version, traced_value(tensor)))
        except RuntimeError:  # of no value in the trace, and none can be made: torch has ceased to trace
            torch._C._set_tracing_state(state)
    yield
    for tensor, version, value in before:
        if tensor._version == version:
            set_traced_value(tensor, value)


@contextlib.contextmanager
def trace_kept() -> Iterator[None]:
    """Go on with a trace where a call raises: its caller may catch that.

    torch has ceased to trace then, and its node for the call has no outputs, at which the end of the trace is a segmentation fault.
    """
    state = torch._C._get_tracing_state()
    try:
        yield
    except Exception:
        if state is not None and not is_tracing():
            torch._C._set_tracing_state(state)
            last: Any = None
            block: Any = state.graph()
            while nodes := list(block.nodes()):  # each module that runs has a block of its own
                last = nodes[-1]
                if not (blocks := list(last.blocks())):
                    break
                block = blocks[-1]
            if last is not None and last.kind().startswith("aten::") and not last.outputsSize():
                last.destroy()
        raise


def traced_graph() -> Any:
    """The graph that torch.jit is tracing into."""
    return torch._C._get_tracing_state().graph()


def tensor_type(dtype: torch.dtype, sizes: Sequence[int | None]) -> Any:
    """The TorchScript type of tensors of a dtype and of these sizes, None for one that is open."""
    return torch._C.TensorType.get().with_dtype(dtype).with_sizes(list(sizes))
