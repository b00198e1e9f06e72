"""What stands in a captured graph: the two operators that torch.export and TorchScript see in place of a call and of a stop.

``pythonop::call`` stands for one call of ``Function.apply``. Its key names a Record, which knows the shapes of the outputs and
what the ONNX node will say. ``pythonop::stop_gradient`` is an identity through which no gradient flows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.capture.outputs import Fresh, Outputs, sizes_of
from symbolics.errors import ExportError
from symbolics.node.attributes import AttributeValue
from symbolics.node.call import AutogradCall
from symbolics.node.containers import Slot, slots

__all__ = ["Record", "forget", "record_of", "remember"]


@dataclass
class Record:
    """One captured call.

    Attributes:
        call: What the node will say.
        attributes: The same as attributes.
        outputs: Shapes, dtypes and (TorchScript) the tensors of the outputs.
        module: The path of the module that made the call, "" for the root.
        source: ``module.name:line`` of the code that made the call.
        function: The Function.
        sizes: The dims of each input (of a size its value): an int, or a sympy expression of what may differ between two runs.
        traced: The call as it was made, where the node cannot say it: it hides modules, or has an argument that no file can name. Then a
            function has to stand for it.
        hidden: The parameters and buffers of modules among its arguments: (module, name, slot).
        chosen: Why it is a node though it calls no Function and no operator of torch.library: ``opaque=`` means it; "" for any other.
        example: Its inputs in the example, without those of ``hidden``, where a function of the file may stand for it and they are known: tensors, and sizes
            as numbers. The tensors are no copies.
        removed: Whether it stands for a hook on a gradient that the model took away again.
    """

    call: AutogradCall
    attributes: dict[str, AttributeValue]
    outputs: Outputs
    module: str
    source: str
    function: Any = None
    sizes: list[list[Any]] = field(default_factory=list)
    traced: AutogradCall | None = None
    hidden: list[tuple[torch.nn.Module, str, int]] = field(default_factory=list)
    removed: bool = False
    chosen: str = ""
    example: list[Any] = field(default_factory=list, repr=False)

    @property
    def slots(self) -> list[Slot]:
        """Where the tensors and sizes of the call stand among its arguments, in the order of the node's inputs."""
        return slots((*self.call.args, *self.call.kwargs.values()))


_RECORDS: dict[str, Record] = {}


def remember(key: str, record: Record) -> None:
    """File a record under the key that stands in the graph."""
    _RECORDS[key] = record


def forget(keys: Iterable[str]) -> None:
    """Drop records; graphs that still name them can no longer be translated."""
    for key in keys:
        _RECORDS.pop(key, None)


def record_of(key: str) -> Record:
    """The record of a call in a captured graph.

    Raises:
        ExportError: Its hook is closed.
    """
    record = _RECORDS.get(key)
    if record is None:
        raise ExportError("a captured graph names a call whose hook is closed: capture and export inside the same `with exporter.hook():`")
    return record


# ------------------------------------------------------------------------------------------------------ the two ops

_library = torch.library.Library("pythonop", "DEF")
_library.define("call(Tensor[] inputs, SymInt[] sizes, str key) -> Tensor[]")
_library.define("stop_gradient(Tensor x) -> Tensor")


@torch.library.impl("pythonop::call", "CompositeExplicitAutograd")
def _call_real(inputs: Sequence[torch.Tensor], sizes: Sequence[int], key: str) -> list[torch.Tensor]:
    # TorchScript: forward has run already, on copies. The op gives its tensors out, once.
    outputs = record_of(key).outputs.tensors
    real = [output.real for output in outputs]
    for output in outputs:
        output.real = None
    if any(tensor is None for tensor in real):
        raise ExportError("a captured call was run a second time: a captured graph is for translation, not for running")
    return [torch.zeros((), dtype=torch.int64), *real]  # type: ignore[list-item]


@torch.library.register_fake("pythonop::call")  # type: ignore[untyped-decorator]
def _call_fake(inputs: Sequence[torch.Tensor], sizes: Sequence[torch.SymInt], key: str) -> list[torch.Tensor]:
    record = record_of(key)
    tensors = list(inputs)
    mode = private.detect_fake_mode(tensors)
    fresh: dict[str, torch.SymInt] = {}
    tensor_iterator, size_iterator = iter(tensors), iter(sizes)
    kinds = [slot.kind for slot in record.slots]
    values = [next(size_iterator) if kind == "size" else next(tensor_iterator) for kind in kinds]
    # The graph may be retraced with other symbols in the place of those that the record knows.
    renamed = {}
    for old, value in zip(record.outputs.input_sizes, values, strict=True):
        renamed.update({a: b for a, b in zip(old, sizes_of(value), strict=True) if a != b})

    def size(dim: Any) -> Any:
        if isinstance(dim, Fresh):
            if dim.label not in fresh:
                fresh[dim.label] = torch.library.get_ctx().new_dynamic_size()
            return fresh[dim.label]
        if isinstance(dim, int):
            return dim
        expression = dim.xreplace(renamed)
        return int(expression) if expression.is_Integer else mode.shape_env.create_symintnode(expression, hint=None)

    outputs = [torch.empty([size(dim) for dim in o.shape], dtype=o.dtype, device=o.device) for o in record.outputs.tensors]
    return [torch.empty((), dtype=torch.int64), *outputs]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.counts = len(inputs[0]), len(inputs[1])
    flags = record_of(inputs[2]).call.output_requires_grads
    ctx.mark_non_differentiable(output[0], *[t for t, flag in zip(output[1:], flags, strict=True) if not flag])


def _no_backward(ctx: Any, *gradients: Any) -> Any:
    if all(gradient is None or private.is_fake(gradient) for gradient in gradients[0]):
        return *(
            [None] * count for count in ctx.counts
        ), None  # torch.export differentiates the body of a scan, and keeps its forward alone
    raise ExportError(
        "a captured graph is for translation: run the exported file for its gradients (exporter.load, exporter.build_gradient_graph)"
    )


torch.library.register_autograd("pythonop::call", _no_backward, setup_context=_setup_context)


# Eager makes a call whether or not its result is read: so does the graph.
torch.fx.node.has_side_effect(torch.ops.pythonop.call.default)


@torch.library.impl("pythonop::stop_gradient", "CompositeExplicitAutograd")
def _stop_real(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone()


@torch.library.register_fake("pythonop::stop_gradient")  # type: ignore[untyped-decorator]
def _stop_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
