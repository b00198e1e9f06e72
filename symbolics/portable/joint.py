"""One call of a Function, or of an operator, as a graph of ATen operators: its forward, and what its own backward then does.

PyTorch runs the call on fake tensors and its tracer writes down the operators of both (``torch.fx.experimental.proxy_tensor.make_fx``).
A graph holds neither Python nor branches, so a call is refused, with the reason, where a graph would say less than its code.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from symbolics import quirks, torch_private as private
from symbolics.capture.interception import belongs_to_torch, original_apply
from symbolics.capture.listener import Listener
from symbolics.capture.opaque_op import Record
from symbolics.capture.trial import apply
from symbolics.capture.uncompiled import uncompiled
from symbolics.node.call import AutogradCall
from symbolics.node.containers import Slot, fill, slots
from symbolics.node.dtypes import DTYPES
from symbolics.node.names import qualified_name
from symbolics.node.operators import Operator
from symbolics.node.outside_values import other_values, values_read
from symbolics.portable.conditions import place_of_condition
from symbolics.portable.decompositions import DECOMPOSITIONS
from symbolics.portable.helpers import helpers_in_torch
from symbolics.portable.kept import changed_by, keep
from symbolics.portable.kernels import Untraceable, check_nodes, check_operator, kernels_run
from symbolics.portable.rewrites import Rewrites

__all__ = ["Joint", "Untraceable", "trace"]

#: Of a tracer that meets control flow as an operator.
_NO_RULE = re.compile(r"no rule registered for HigherOrderOperator (\w+)")
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
    """

    graph: torch.fx.GraphModule
    inputs: int
    outputs: int
    differentiated: list[int]
    kept: int
    gradients: list[int]
    once: bool
    constants: list[torch.Tensor]


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
    with _alone(record.call), private.quiet_trial():
        try:
            return _Trace(record, used).joint(decompositions)
        except Untraceable:
            raise
        except Exception as error:
            raise Untraceable(_reason(error)) from error


class _Trace:
    """A call on fake tensors.

    Attributes:
        call: With its arguments as they were; their `Slot`s stand for ``inputs``.
        inputs: Fake tensors, and symbolic sizes.
        forward: The names of the graph's nodes that are the forward's.
    """

    def __init__(self, record: Record, used: Sequence[bool]) -> None:
        self.record, self.used = record, used
        self.call = record.traced or record.call
        self.env, self.mode = private.fake_mode(place_of_condition)
        self.inputs = self.make_inputs()
        self.forward = frozenset[str]()

    def make_inputs(self) -> list[Any]:
        """Fake tensors, and sizes, with a symbol for each dim that may differ between runs."""
        kinds = {slot.index: slot.kind for slot in slots((*self.call.args, *self.call.kwargs.values()))}
        examples, made = _Examples(), list[Any]()
        for index, dims in enumerate(self.record.sizes):
            numbers = [examples.of(dim) for dim in dims]
            moves = [not isinstance(dim, int) for dim in dims]
            if kinds.get(index) == "size":
                made.append(private.symbolic_size(self.env, numbers[0], index) if moves[0] else numbers[0])
                continue
            example = torch.empty(numbers, dtype=DTYPES[self.call.input_types[index]])
            tensor = private.fake_tensor(self.mode, example, moves, index)
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
            with torch.enable_grad(), self.seen(inputs):
                results = self.run(inputs)
                self.forward = private.traced_nodes()
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
        with self.mode, torch.no_grad():
            functional = private.functionalized(traced, plain, {**decompositions, **DECOMPOSITIONS})
        gradients = [i for i, gone in zip(wanted, missing, strict=True) if not gone]
        return Joint(functional, len(self.inputs), len(outputs), differentiated, kept, gradients, once, constants)

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
    def seen(self, inputs: Sequence[Any]) -> Iterator[None]:
        """While this is open, the call runs as a tracer can see it.

        The modules among the arguments hold the inputs that stand for their parameters and buffers.
        """
        with contextlib.ExitStack() as stack:
            for module, path, index in self.record.hidden:
                stack.enter_context(private.holding(module, path, inputs[index]))
            stack.enter_context(quirks.builtins_of_sizes())
            if isinstance(self.record.function, type):
                stack.enter_context(quirks.lengths_of_class(self.record.function))
            stack.enter_context(kernels_run())
            stack.enter_context(Rewrites(self.record))
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
        if (found := private.condition_on_sizes(self.env)) is not None:
            condition, where = found
            raise Untraceable(
                f"what it does depends on a size ({self._places(condition)}), which may be another one in the next run{where}: compute with the size itself "
                "(x.numel() ** 0.5), without a loop over it, a branch, int(), float() or torch.tensor() of it, or give the axis a fixed size"
            )

    def _places(self, condition: str) -> str:
        """The axes that a condition is about; where it names none, the condition itself."""
        names = set(re.findall(r"\w+", condition))
        found = [
            f"axis {axis} of tensor input {index}"
            for index, value in enumerate(self.inputs)
            for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ())
            if str(size) in names and not isinstance(size, int)
        ]
        return ", ".join(found[:3]) or condition


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


class _Examples:
    """Numbers for symbolic dims: equal expressions have equal ones, different symbols different ones."""

    def __init__(self) -> None:
        self.of_symbol: dict[Any, int] = {}

    def of(self, dim: Any) -> int:
        if isinstance(dim, int):
            return dim
        free = sorted(dim.free_symbols, key=str)
        for symbol in free:
            if symbol not in self.of_symbol:
                self.of_symbol[symbol] = sympy.prime(4 + len(self.of_symbol))
        return int(dim.xreplace({symbol: sympy.Integer(self.of_symbol[symbol]) for symbol in free}))


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


def _reason(error: BaseException) -> str:
    """Why PyTorch's tracer stopped, in one line."""
    text = (str(error).strip().splitlines() or [""])[0]
    if "unbacked" in text.lower() or "Expected Proxy" in text:  # how releases of torch say so
        return "the sizes of its results depend on the values of a tensor"
    if private.is_data_dependent(error):
        return f"what it does depends on the values of a tensor ({text[:160]})"
    if found := _NO_RULE.search(str(error)):
        return f"it calls torch's {found[1]}, whose branches and bodies no portable Function holds: write the loop in Python, or leave portable= out for it"
    return f"on tensors without values it raises {type(error).__name__}{': ' if text else ''}{text[:200]}"
