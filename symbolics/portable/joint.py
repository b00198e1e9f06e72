"""One call of a Function, or of an operator, as a graph of ATen operators: its forward, and what its own backward then does.

PyTorch runs the call on fake tensors and its tracer writes down the operators of both (``torch.fx.experimental.proxy_tensor.make_fx``).
A graph holds neither Python nor branches, so a call is refused, with the reason, where a graph would say less than its code.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from symbolics import quirks, torch_private as private
from symbolics.capture.binding import TracedSize
from symbolics.capture.interception import belongs_to_torch, original_apply
from symbolics.capture.listener import Listener
from symbolics.capture.opaque_op import Record
from symbolics.capture.raised import Raised
from symbolics.capture.trial import apply
from symbolics.capture.uncompiled import uncompiled
from symbolics.node.call import AutogradCall
from symbolics.node.containers import Slot, fill, slots
from symbolics.node.dtypes import DTYPES
from symbolics.node.names import qualified_name
from symbolics.node.operators import Operator
from symbolics.node.outside_values import other_values, values_read
from symbolics.portable.decompositions import DECOMPOSITIONS
from symbolics.portable.helpers import helpers_in_torch
from symbolics.portable.kept import changed_by, keep
from symbolics.portable.kernels import Untraceable, check_nodes, check_operator, kernels_run
from symbolics.portable.proof import check_caught, check_graph, eager_step, own_generators
from symbolics.portable.reasons import Lines, reason
from symbolics.portable.rewrites import Rewrites
from symbolics.portable.sizes import Sizes, are_related

__all__ = ["Joint", "Untraceable", "trace"]

_FRESH = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


@dataclass
class Joint:
    """A call as a graph.

    Attributes:
        graph: Takes the inputs of the call, then a cotangent for each of ``differentiated``, then ``constants``. Gives its outputs, then
            what the forward keeps for its backward, then a gradient for each of ``gradients``.
        inputs, outputs: How many tensors (and sizes) the call takes, and how many tensors it returns.
        differentiated: The outputs that have a gradient, by number.
        kept: How many values are kept.
        gradients: The inputs that backward has a gradient for, by number.
        once: Whether backward must not be differentiated again (``once_differentiable``).
        constants: Tensors that the code makes of numbers.
        example: Values of the inputs, then of the cotangents, that it was run on; None where none were known.
    """

    graph: torch.fx.GraphModule
    inputs: int
    outputs: int
    differentiated: list[int]
    kept: int
    gradients: list[int]
    once: bool
    constants: list[torch.Tensor]
    example: list[Any] | None = None


def trace(record: Record, used: Sequence[bool], decompositions: dict[Any, Any]) -> Joint:
    """Trace a call.

    Args:
        record: What was captured of it.
        used: For each of its outputs, whether anybody reads it: what nobody reads has no gradient.
        decompositions: operator -> what it is made of, for those that are to be taken apart.

    Raises:
        Untraceable: A graph cannot stand for it.
    """
    if isinstance(record.function, Operator):
        check_operator(record.function)
    for effect in record.outputs.side_effects:
        raise Untraceable(effect)
    if record.outputs.read:  # a class; forward may have set its values for the call alone
        for label, now, then in other_values(record.outputs.read, values_read(record.function)):
            raise Untraceable(f"it reads {label}, which was {then!r} in this call and is {now!r} after it: pass it as an argument")
    traced = any(isinstance(size, TracedSize) for dims in record.sizes for size in dims)  # equal ones may be equal in the example alone
    with _alone(record.call), private.quiet_trial(), own_generators(), private.sizes_apart() if traced else contextlib.nullcontext():
        *others, last = _ways(record.sizes)
        for related, in_python in others:
            with contextlib.suppress(Exception):  # what it is, the last one says
                return _Trace(record, used, related, in_python).joint(decompositions)
        one = _Trace(record, used, *last)
        try:
            return one.joint(decompositions)
        except Untraceable:
            raise
        except Exception as error:
            if not one.raised.led_to(error):  # what its code has caught comes first
                check_caught(one.raised, None, one.reason)
            raise Untraceable(one.reason(error)) from error


def _ways(sizes: Sequence[Sequence[Any]]) -> list[tuple[bool, bool]]:
    """How to trace, one after the other until one works: whether sizes are related, and operators made of others run in Python."""
    is_open = any(not isinstance(size, int) for dims in sizes for size in dims)
    return list(itertools.product((False, True) if are_related(sizes) else (False,), (False, True) if is_open else (False,)))


class _Trace:
    """A call on fake tensors.

    Attributes:
        call: With its arguments as they were; their `Slot`s stand for ``inputs``.
        inputs: Fake tensors, and symbolic sizes.
        forward: The names of the graph's nodes that are the forward's.
        sizes: Those of ``inputs``.
        lines: Where it is.
        raised: What torch raised in it, whether or not its code caught it.
    """

    def __init__(self, record: Record, used: Sequence[bool], related: bool, in_python: bool) -> None:
        self.record, self.used, self.in_python = record, used, in_python
        self.call = record.traced or record.call
        self.env, self.mode = private.fake_mode()
        found = {slot.index: slot.kind for slot in slots((*self.call.args, *self.call.kwargs.values()))}
        self.kinds = [found.get(index, "tensor") for index in range(len(record.sizes))]
        self.sizes, self.raised = Sizes(self.env, record.sizes, self.kinds, related), Raised()
        self.inputs = self.make_inputs()
        self.lines = Lines(self.env, __name__)
        self.forward = frozenset[str]()

    def reason(self, error: BaseException) -> str:
        """Why no graph can stand for the call, where an error stopped the trace."""
        return reason(error, self.sizes, self.lines)

    def make_inputs(self) -> list[Any]:
        """Fake tensors, and sizes, with a symbol for each dim that may differ between runs."""
        made = list[Any]()
        with self.mode:
            for index, (dims, kind) in enumerate(zip(self.record.sizes, self.kinds, strict=True)):
                sizes = [self.sizes.of(dim) for dim in dims]
                if kind == "size":
                    made.append(sizes[0])
                    continue
                tensor = torch.empty(sizes, dtype=DTYPES[self.call.input_types[index]])
                made.append(tensor.requires_grad_() if self.call.input_requires_grads[index] else tensor)
        return made

    def run(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Call the Function: its tensor outputs."""
        given = [v.clone() if self.call.inplace and isinstance(v, torch.Tensor) else v for v in inputs]

        def place(leaf: Any) -> Any:
            return given[leaf.index] if isinstance(leaf, Slot) else leaf

        args = tuple(fill(value, place) for value in self.call.args[: self.call.passed])
        kwargs = {name: fill(value, place) for name, value in self.call.kwargs.items()}
        with uncompiled():
            result = apply(self.record.function, args, kwargs)
        outputs: list[torch.Tensor] = []
        fill(result, lambda leaf: outputs.append(leaf) if isinstance(leaf, torch.Tensor) else None)
        if len(outputs) != len(self.call.output_types):
            raise Untraceable(f"it returns {len(outputs)} tensors to PyTorch's tracer, {len(self.call.output_types)} otherwise")
        return outputs

    def joint(self, decompositions: dict[Any, Any]) -> Joint:
        """Both directions as one graph."""
        call, missing, nested = self.call, list[bool](), _Nested()
        with self.mode, torch.enable_grad(), self.seen(self.inputs), private.materialization_watched() as said:
            outputs = self.run(self.inputs)
            flags = zip(call.output_requires_grads, self.used, outputs, strict=True)
            differentiated = [i for i, (flag, used, output) in enumerate(flags) if flag and used and output.requires_grad]
            cotangents = [torch.empty_like(outputs[i], requires_grad=False) for i in differentiated]
        if len(differentiated) > 1 and False in said:
            raise Untraceable(
                "it says set_materialize_grads(False) of several outputs: its backward may ask which of their gradients are None"
            )
        wanted = [i for i, flag in enumerate(call.input_requires_grads) if flag] if differentiated else []

        def both(*values: Any) -> tuple[Any, ...]:
            inputs, grads = values[: len(self.inputs)], values[len(self.inputs) :]
            self.lines.direction = "forward"
            with torch.enable_grad(), self.seen(inputs):
                results = self.run(inputs)
                self.forward = private.traced_nodes()
                self.lines.direction = "backward"
                found: list[torch.Tensor | None] = []
                if wanted:
                    targets = [inputs[i] for i in wanted]
                    with nested:
                        found = list(torch.autograd.grad([results[i] for i in differentiated], targets, list(grads), allow_unused=True))
                    found = [_sum(g, target) for g, target in zip(found, targets, strict=True)]
            missing[:] = [g is None for g in found]
            return (*[r.detach() for r in results], *[g for g in found if g is not None])

        with self.mode:
            traced = private.trace_to_aten(both, (*self.inputs, *cotangents))
        self.check(traced)
        if is_operator := isinstance(self.record.function, Operator):
            check_nodes([outputs[i] for i in differentiated], self.inputs)
        once = private.is_once_differentiable(self.record.function)
        if differentiated and not once and (nested.met or is_operator):
            once = self.check_second(differentiated, [self.inputs[i] for i in wanted])
        try:
            kept = keep(traced, self.forward, len(outputs))
        except ValueError as error:
            raise Untraceable(str(error)) from error
        constants = private.lift_constants(traced)
        more = [private.fake_tensor(self.mode, tensor, [False] * tensor.dim(), -1) for tensor in constants]
        plain = [v.detach() if isinstance(v, torch.Tensor) else v for v in (*self.inputs, *cotangents, *more)]
        with self.mode, torch.no_grad(), private.in_python() if self.in_python else contextlib.nullcontext():
            functional = private.functionalized(traced, plain, {**decompositions, **DECOMPOSITIONS})
        gradients = [i for i, gone in zip(wanted, missing, strict=True) if not gone]
        eager = eager_step(self.record, self.sizes.examples(), differentiated, self.run, self.held)
        check_caught(self.raised, eager, self.reason)
        if eager is not None:
            check_graph(eager, lambda *values: functional(*values, *constants), len(outputs), gradients)
        example = None if eager is None else [*eager.inputs, *eager.cotangents]
        return Joint(functional, len(self.inputs), len(outputs), differentiated, kept, gradients, once, constants, example)

    def check_second(self, differentiated: Sequence[int], targets: Sequence[torch.Tensor]) -> bool:
        """Refuse a backward whose own derivative is that of another Function or operator: a graph has what that one computes, and not its backward.

        Args:
            differentiated: The outputs that have a gradient, by number.
            targets: The inputs that backward has a gradient for.

        Returns:
            Whether eager has no second derivatives: they raise (``once_differentiable``, or an operator without a backward).

        Raises:
            Untraceable: Eager's second derivatives go through another Function.
        """
        once = False
        with self.mode, torch.enable_grad(), self.seen(self.inputs):
            outputs = [output for i, output in enumerate(self.run(self.inputs)) if i in differentiated]
            cotangents = [torch.empty_like(output, requires_grad=True) for output in outputs]
            found: list[torch.Tensor | None] = list(torch.autograd.grad(outputs, targets, cotangents, create_graph=True, allow_unused=True))
            for target in targets:  # what torch.autograd.backward inside has added
                found.append(target.grad)
                target.grad = None
        own = {output.grad_fn for output in outputs}
        waiting = [gradient.grad_fn for gradient in found if gradient is not None]
        seen = set[Any]()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or node in own:
                continue
            seen.add(node)
            function = private.function_of(node)
            generated = function is not None and private.is_generated(function)
            if node.name() == "torch::autograd::Error" or (generated and private.generated_formula(function) is None):  # type: ignore[arg-type]
                once = True
                continue
            if function is not None and (generated or not belongs_to_torch(function)):
                what = f"calls an operator ({node.name()})" if generated else f"applies the Function {qualified_name(function)}"
                raise Untraceable(
                    f"its backward {what}, whose own backward a graph of it would not have in second derivatives: write that backward in torch's "
                    f"operators, or, if nothing differentiates it twice, decorate the backward of {self.record.call.name} with once_differentiable"
                )
            waiting += [following for following, _ in node.next_functions]
        return once

    @contextlib.contextmanager
    def held(self, inputs: Sequence[Any]) -> Iterator[None]:
        """While this is open, the modules among the arguments hold the inputs that stand for their parameters and buffers."""
        with contextlib.ExitStack() as stack:
            for module, path, index in self.record.hidden:
                stack.enter_context(private.holding(module, path, inputs[index]))
            yield

    @contextlib.contextmanager
    def seen(self, inputs: Sequence[Any]) -> Iterator[None]:
        """While this is open, the call runs as a tracer can see it, with these inputs in its modules, and what torch raises is noted."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.held(inputs))
            stack.enter_context(quirks.builtins_of_sizes())
            if isinstance(self.record.function, type):
                stack.enter_context(quirks.lengths_of_class(self.record.function))
            if self.in_python:
                stack.enter_context(private.in_python())
            stack.enter_context(private.refusals_watched(self.env, self.raised.note))
            stack.enter_context(kernels_run(self.raised))
            stack.enter_context(Rewrites(self.record, self.raised))
            yield

    def check(self, traced: torch.fx.GraphModule) -> None:
        """Refuse what a graph would freeze or lose.

        Raises:
            Untraceable: Random numbers, a tensor from outside, a changed buffer, a condition on a size, a type that runtimes lack.
        """
        inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
        hidden = {inputs[index]: path for _, path, index in self.record.hidden}
        for node in traced.graph.nodes:
            if node.op == "get_attr" and any(user.target not in _FRESH for user in node.users):
                raise Untraceable("it reads a tensor that is none of its arguments: pass it as an argument")
            if changed := [hidden[value] for value in changed_by(node) if value in hidden]:
                raise Untraceable(f"it changes {changed[0]!r} of a module among its arguments, which would be lost")
            if getattr(node.meta.get("val"), "dtype", None) is torch.bfloat16:
                raise Untraceable("it computes in bfloat16, for which onnxruntime has hardly a kernel")
            if private.is_random(node.target):
                raise Untraceable(f"it draws random numbers ({node.target})")
        if (guard := private.condition_on_sizes(self.env, self.sizes.small, self.lines.branches)) is not None:
            raise Untraceable(
                f"what it does depends on a size ({self.sizes.places(str(guard.expr))}; in {self.lines.of_guard(guard)}), which may be another one in the next run: compute with the size itself "
                "(x.numel() ** 0.5), without a loop over it, a branch, int(), float() or torch.tensor() of it, or give the axis a fixed size"
            )


def _sum(gradient: torch.Tensor | None, target: torch.Tensor) -> torch.Tensor | None:
    """What backward returns for a tensor, and what it adds to ``.grad`` itself (``torch.autograd.backward`` inside)."""
    own, target.grad = target.grad, None
    if gradient is None or own is None:
        return own if gradient is None else gradient
    with torch.no_grad():
        return gradient + own


class _Nested(Listener):
    """Hears, while it is open, whether a backward applies a Function, or calls an operator that ONNX does not know.

    Attributes:
        met: Whether it does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met = False

    def apply(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the call go its way."""
        self.met = self.met or not belongs_to_torch(cls)
        return original_apply(cls, args, kwargs)

    def operator(self, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Let the call go its way."""
        self.met = True
        return call()


@contextlib.contextmanager
def _alone(call: AutogradCall) -> Iterator[None]:
    """The state that the call was made in, whatever surrounds the trace: autocast; no inference mode."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(private.real_tensors())
        stack.enter_context(helpers_in_torch())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # fused ones have a backward that only a library knows
        for device in ("cpu", "cuda"):
            name = call.autocast.dtypes.get(device)
            if name is not None:
                stack.enter_context(torch.autocast(device, dtype=getattr(torch, name), cache_enabled=False))
            elif torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
