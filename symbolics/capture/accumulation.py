"""``backward()`` inside a forward, and the ``.grad`` that it leaves at leaves: gradients as torch.autograd.grad gives them, kept by tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.capture.gradients_in_forward import edges_behind, gradients
from symbolics.capture.recorder import Recorder
from symbolics.users import warn

__all__ = ["ACCUMULATING", "accumulate"]

_GRAD = torch.Tensor.grad
_WHAT = "backward()"


def _backward(
    recorder: Recorder,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    outputs = _listed(tensors)
    cotangents = [None] * len(outputs) if grad_tensors is None else _listed(grad_tensors)
    if len(cotangents) != len(outputs):
        recorder.refuse(_WHAT, f"got {len(outputs)} tensors and {len(cotangents)} gradients")
    with private.unheard():
        leaves = _leaves(recorder, outputs) if inputs is None else _listed(inputs)
    if not leaves:
        return
    found = gradients(recorder, _WHAT, outputs, leaves, cotangents, create_graph=create_graph, retain_graph=retain_graph)
    accumulated = recorder.capture.taken.accumulated
    with private.unheard(), torch.set_grad_enabled(create_graph):
        for leaf, g in zip(leaves, found, strict=True):
            _, before = accumulated.get(id(leaf), (leaf, None))
            if g is None or before is None:
                accumulated[id(leaf)] = (leaf, before if g is None else g)
            elif create_graph:
                accumulated[id(leaf)] = (leaf, before + g)
            else:  # who holds .grad sees it change, as in eager mode
                before.add_(g)


def _method(
    recorder: Recorder,
    tensor: torch.Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    _backward(recorder, [tensor], None if gradient is None else [gradient], retain_graph, create_graph, inputs=inputs)


def _retain(recorder: Recorder, tensor: torch.Tensor) -> None:
    recorder.capture.taken.retained.append(tensor)


#: What stands in for functions of torch that leave gradients in ``.grad``; each takes the recorder first.
ACCUMULATING: dict[Any, Callable[..., None]] = {
    torch.Tensor.backward: _method,
    torch.autograd.backward: _backward,
    torch.Tensor.retain_grad: _retain,
}


def accumulate(recorder: Recorder, func: Any, args: tuple[Any, ...]) -> tuple[Any] | None:
    """What reading or writing ``.grad`` does, in a tuple; None for any other call."""
    if getattr(func, "__self__", None) is not _GRAD or not isinstance(args[0], torch.Tensor):
        return None
    accumulated, tensor = recorder.capture.taken.accumulated, args[0]
    if func.__name__ == "__set__":
        accumulated[id(tensor)] = (tensor, args[1])
        return (None,)
    if func.__name__ == "__delete__":
        accumulated[id(tensor)] = (tensor, None)
        return (None,)
    if id(tensor) in accumulated:
        return (accumulated[id(tensor)][1],)
    with private.paused_capture(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that of a tensor that is no leaf is None
        before = tensor.grad
    if before is not None:
        recorder.refuse(
            ".grad", "it was there before this forward, and a file would hold its values of today: set it to None before the export"
        )
    return (None,)


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _leaves(recorder: Recorder, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Where backward leaves gradients: at the leaves behind the outputs, at the model's inputs, and where it was told to."""
    taken = recorder.capture.taken
    retained = [tensor for tensor in (*taken.given, *taken.retained) if tensor.requires_grad]
    behind = edges_behind([output for output in outputs if output.requires_grad], [x for x in taken.given if x.requires_grad])
    leaves = [node.variable for node, _ in behind if hasattr(node, "variable")]
    parameters = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)]
    if parameters:
        module, source = recorder.capture.sites.here()
        warn(
            f"backward() in module {module or '<root>'} at {source} adds to the .grad of {len(parameters)} parameters, too: a file has no .grad, and what "
            "trains the model finds none of it there. torch.autograd.grad, or backward(inputs=...), leaves parameters alone."
        )
    known = {id(leaf) for leaf in leaves}
    return leaves + [tensor for tensor in retained if id(tensor) not in known]
