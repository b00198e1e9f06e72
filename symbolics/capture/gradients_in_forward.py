"""Gradients that a forward takes: each call of torch.autograd.grad becomes one ``pythonop::gradient`` between the tensors that it names.

What has a gradient at all is asked of the autograd graph that stands behind the traced tensors: Python sees the same None, and the
same errors, as in eager mode. Everything of torch.autograd.functional ends in torch.autograd.grad; what torch.func does is in
`symbolics.capture.transforms`, ``backward()`` and ``.grad`` are in `symbolics.capture.accumulation`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.capture.gradient_hooks import HookedTensor
from symbolics.capture.gradient_ops import PIN, keep_results
from symbolics.capture.recorder import Recorder
from symbolics.capture.trace.gradients import fed, real_gradients, standing_for
from symbolics.node.cut import FREED, KEPT

__all__ = ["check_later_hook", "edges_behind", "grad", "gradients", "variable"]

_keys = itertools.count()


def grad(
    recorder: Recorder,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Stand in for ``torch.autograd.grad``.

    Raises:
        ExportError: What eager raises, in its words; or a file cannot say what is asked for.
    """
    if is_grads_batched:
        recorder.refuse(
            "torch.autograd.grad",
            "is_grads_batched=True has no place in a file: call it once for each row of grad_outputs, and stack what it returns",
        )
    cotangents = (
        [None] * len(outputs) if grad_outputs is None else [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else list(grad_outputs)
    )
    if len(cotangents) != len(outputs):
        recorder.refuse("torch.autograd.grad", f"got {len(outputs)} tensors and {len(cotangents)} gradients")
    site = recorder.capture.sites.here()
    answers = recorder.answers.get(site, [])[recorder.capture.taken.calls[site] :][:1]
    recorder.capture.taken.calls[site] += 1
    answer = answers[0] if answers and len(answers[0]) == len(inputs) else None
    found = gradients(
        recorder, "torch.autograd.grad", outputs, inputs, cotangents, create_graph=create_graph, retain_graph=retain_graph, answer=answer
    )
    if materialize_grads:
        return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True))
    for index, g in enumerate(found):
        if g is None and not allow_unused:
            recorder.refuse(
                "torch.autograd.grad",
                f"The differentiated Tensor at index {index} appears to not have been used in the graph. Set allow_unused=True if this is the desired behavior.",
            )
    return tuple(found)


def gradients(
    recorder: Recorder,
    what: str,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    cotangents: Sequence[Any],
    *,
    create_graph: bool,
    retain_graph: bool | None = None,
    answer: tuple[bool | None, ...] | None = None,
) -> list[torch.Tensor | None]:
    """The gradient of some tensors with respect to others, None for one that they do not depend on.

    Args:
        recorder: Of the export.
        what: What the user called, for messages.
        outputs: What is differentiated.
        inputs: What with respect to.
        cotangents: The gradient of each output, None for the 1 of a scalar.
        create_graph: Whether gradients flow through the result.
        retain_graph: Whether eager keeps what a second gradient would read; None: where create_graph says so.
        answer: What eager has for each input: None, or whether gradients flow through it. None where that is not known.

    Raises:
        ExportError: What eager raises.
    """
    for each in (*outputs, *inputs):
        if not isinstance(each, torch.Tensor):
            recorder.refuse(what, f"something of type {type(each).__name__} is among outputs or inputs: pass the tensor itself")
        if each.is_complex():
            recorder.refuse(
                what,
                "the gradient of complex tensors has no place in a file: take that of their real and imaginary parts (torch.view_as_real)",
            )
    with private.unheard():
        cotangents = [_cotangent(recorder, what, i, y, g) for i, (y, g) in enumerate(zip(outputs, cotangents, strict=True))]
        if not all(x.requires_grad for x in inputs):
            recorder.refuse(what, "One of the differentiated Tensors does not require grad")
        if create_graph and edges_behind(outputs).intersection(recorder.capture.flags.given_back()):
            recorder.refuse(
                what,
                "it differentiates what was computed while requires_grad of a tensor was False, which is True again: in eager mode its second derivative flows "
                "to that tensor, its first does not. Set the flag back after this call",
            )
        reached = _reached(outputs, inputs)
        for index, (here, there) in enumerate(zip(reached, answer or ())):
            if there is not None and not here:
                recorder.refuse(
                    what,
                    f"in eager mode input {index} has a gradient, and under the exporter nothing leads to it: the model takes another way there (look for "
                    "is_tracing, is_exporting, is_in_onnx_export)",
                )
            reached[index] = here and (answer is None or there is not None)
        targets = [x for x, found in zip(inputs, reached, strict=True) if found]
        if not targets:
            return [None] * len(inputs)
        _check_hooks(recorder, what, outputs, targets)
        recorder.capture.taken.outputs += outputs
        key, real = _key(recorder, "" if create_graph else KEPT if retain_graph else FREED), None
        if private.is_tracing():
            real = real_gradients(outputs, targets, cotangents, create_graph)
            with private.paused_capture():
                keep_results(key, [torch.zeros_like(x) if g is None else g.detach().clone() for g, x in zip(real, targets, strict=True)])
        with torch.enable_grad():
            pins = [_pinned(recorder, x) for x in targets]
            results = torch.ops.pythonop.gradient(list(outputs), pins, cotangents, key)
        if not create_graph:
            results = [torch.ops.pythonop.stop_gradient(g.detach()) for g in results]
            recorder.capture.taken.cut += results
        elif answer is not None:
            flows = [flow for flow, found in zip(answer, reached, strict=True) if found]
            results = [g if flow else torch.ops.pythonop.stop_gradient(g.detach()) for g, flow in zip(results, flows, strict=True)]
        if create_graph and real is not None:  # a trace knows them by their values: they may have the autograd graph of eager's
            results = [standing_for(g, r) if r.requires_grad else r for g, r in zip(real, results, strict=True)]
    each = iter(results)
    return [next(each) if found else None for found in reached]


def variable(x: torch.Tensor, key: str = "") -> torch.Tensor:
    """A tensor of the same values to differentiate with respect to, which the gradient passes on to ``x`` where that needs one."""
    with private.unheard(), torch.enable_grad():
        result: torch.Tensor = torch.ops.pythonop.variable(x, f"{key}{next(_keys)}", fed())
        return result if result.requires_grad else result.requires_grad_()


def boundary(x: torch.Tensor, key: str) -> torch.Tensor:
    """A tensor of the same values, whose node in the graph is a boundary (`symbolics.graph.boundaries`) that says this."""
    with private.unheard(), torch.enable_grad():
        result: torch.Tensor = torch.ops.pythonop.variable(x, key, fed())
        return result


def _key(recorder: Recorder, cut: str) -> str:
    module, source = recorder.capture.sites.here()
    return json.dumps({"id": str(next(_keys)), "module": module, "source": source, "cut": cut})


def _cotangent(recorder: Recorder, what: str, index: int, output: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    if not output.requires_grad:
        recorder.refuse(what, f"element {index} of tensors does not require grad and does not have a grad_fn")
    with private.paused_capture():
        shape, other = output.shape, None if given is None else given.shape
    if given is None:
        if any(type(n) is not int or n != 1 for n in shape):
            recorder.refuse(what, "grad can be implicitly created only for scalar outputs")
        return torch.ones_like(output)
    if len(other or ()) != len(shape) or any(type(n) is int and type(m) is int and n != m for n, m in zip(other or (), shape)):
        recorder.refuse(what, f"Mismatch in shape: grad_output[{index}] has a shape of {other} and output[{index}] has a shape of {shape}.")
    return given


def _reached(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[bool]:
    """Which inputs stand in the autograd graph behind the outputs."""
    behind = edges_behind(outputs)
    return [edge in behind for edge in _edges(inputs)]


def _edges(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, int]]:
    with private.paused_capture():
        return [(edge.node, edge.output_nr) for edge in map(torch.autograd.graph.get_gradient_edge, tensors)]


def edges_behind(outputs: Sequence[torch.Tensor], ends: Sequence[torch.Tensor] = ()) -> set[tuple[Any, int]]:
    """The autograd graph behind some tensors, as far as to the ends: which output of which node."""
    edges = set(_edges(outputs))
    todo, nodes = list(edges), {node for node, _ in _edges(ends)}
    while todo:
        node, _ = todo.pop()
        if node in nodes:
            continue
        nodes.add(node)
        following = [edge for edge in node.next_functions if edge[0] is not None]
        edges.update(following)
        todo += following
    return edges


def check_later_hook(recorder: Recorder, tensor: torch.Tensor) -> None:
    """Refuse a hook that comes after a gradient was taken through its tensor: in the file, whoever reads the tensor reads it through its hooks.

    Raises:
        ExportError: It does.
    """
    outputs = recorder.capture.taken.outputs
    with private.unheard():
        if outputs and tensor.requires_grad and edges_behind(outputs).intersection(_edges([tensor])):
            recorder.refuse(
                "register_hook",
                "forward has taken a gradient through this tensor before, which would go through the hook in a file: register the hook first, or on a view of "
                "the tensor (x.view_as(x)) that only what follows reads",
            )


def _check_hooks(recorder: Recorder, what: str, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Autograd runs a tensor's hook before it gives out the tensor's gradient, unless it goes on to another one that is asked for."""
    live = [each for each in recorder.capture.hooks if each.key is not None and not each.removed]
    behind = edges_behind(outputs) if live else set()
    recorder.capture.taken.hooked.update(each.key for each in live if each.key is not None and behind.intersection(_edges([each.tensor])))
    hooked = {id(each.tensor) for each in live}
    for x in targets:
        if id(x) in hooked and edges_behind([x]).intersection(_edges([other for other in targets if other is not x])):
            recorder.refuse(
                what,
                "one of the tensors has a hook, and another one stands behind it: in one call eager gives the first one's gradient from before the hook. "
                "Take the two gradients in two calls",
            )


def _pinned(recorder: Recorder, x: torch.Tensor) -> torch.Tensor:
    """What stands for a tensor to all who read it: no optimizer takes it for a value with the same elements."""
    pins = recorder.capture.taken.pins
    value = private.traced_value(x) if private.is_tracing() else None
    key = (id(x), x._version) if value is None else value.unique()  # its name changes with the variables that hold it
    if key not in pins:
        pin = variable(x, PIN)
        pins[key] = (x, pin)
        recorder.capture.hooks.append(HookedTensor(None, x, value, pin, None))
    return pins[key][1]
