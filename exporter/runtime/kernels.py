"""One PythonOp and one PythonOpGrad as plain Python, on torch tensors: what every engine runs. PythonOpTangent: `exporter.runtime.tangent`.

The native library has the same for the calls that are simple enough; `PythonOp.simple` says which.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.autograd.graph import get_gradient_edge

from exporter.files.trust import Gate
from exporter.runtime.called import apply_of, called, check_arguments
from exporter.runtime.store import Context, ContextStore, PoolLog
from symbolics.errors import FormatError, PythonopError, RunError
from symbolics.node.attributes import GRAD_SPECS, check_types, read_attributes
from symbolics.node.call import AutogradCall
from symbolics.node.call_text import read_call
from symbolics.node.containers import Partial, Slot, fill, slots
from symbolics.node.dtypes import DTYPES
from symbolics.node.names import CALL_ATTRIBUTE, PYTHON_OP, PYTHON_OP_GRAD
from symbolics.node.torch_arguments import by_name
from symbolics.text import shown

__all__ = ["LARGE", "PythonOp", "PythonOpGrad", "check_element_types", "enter_state", "plain", "root_of", "target_of", "without_leaf"]

STRING, HALF = ir.DataType.STRING, ir.DataType.FLOAT16

# Bytes from which a context names a tensor by its gradient edge, so that it does not keep the tensor's memory.
LARGE = 1 << 16

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), torch.dtype, torch.device, torch.Size)


def _is_constant(value: Any) -> bool:
    """Whether an argument cannot change between two runs, so that one object serves all of them."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return isinstance(value, (*_CONSTANTS, torch.layout, torch.memory_format, type)) or not isinstance(
        value, (list, dict, set, np.ndarray, Partial, tuple)
    )


def _fresh(value: Any) -> Any:
    return value.copy() if isinstance(value, (np.ndarray, set, OrderedDict)) else value


class PythonOp:
    """One PythonOp node, decoded once.

    Attributes:
        call: The AutogradCall.
        function: The Function class, the `Operator`, or the `CalledModule`.
        args: The positional arguments that the caller passed.
        apply: ``Function.apply`` of that class, never an override of it; or what calls the operator or module.
        title: How messages name the node.
        simple: Whether the native library may run it on its own: no containers, sizes, kwargs or autocast, and
            tensors as outputs.
        simple_arguments: Whether its arguments are tensors and constants that one object serves in every run.
        titles: Function -> title, where several calls run as one (`exporter.runtime.chain`).
        pool: The log of its session, None in a plain one and on onnx.reference.
    """

    op_type = PYTHON_OP
    titles: Mapping[str, str] = {}
    pool: PoolLog | None = None

    def __init__(self, attributes: Mapping[str, Any], gate: Gate, store: ContextStore, node_name: str = "") -> None:
        """Args:
            attributes: name -> value, as `symbolics.node.attributes.values_of` gives them.
            gate: What the file may name.
            store: Where contexts go.
            node_name: The node's name, for messages.

        Raises:
            FormatError, TrustError: The message starts with the node. FormatError too where forward takes other arguments.
        """
        self.title = f"{self.op_type} {shown(node_name)!r}"
        try:
            plain = read_attributes(attributes)  # names stay text: a malformed node imports nothing
            name = plain.name
            self.function: Any = self.find(plain, gate)
            self.call = call = read_attributes(attributes, gate)
            self.autocast = _autocast(call.autocast.dtypes)
            check_element_types((*call.input_types, *call.output_types))
        except PythonopError as error:
            raise error.at(self.title) from error
        self.title = f"{self.op_type} {shown(node_name)!r} ({shown(name)})"
        self.store = store
        self.convention = call.convention
        self.flags = call.input_requires_grads
        self.kinds = [slot.kind for slot in slots((*call.args, *call.kwargs.values()))]
        self.input_dtypes = [DTYPES.get(kind) for kind in call.input_types]
        self.output_dtypes = [DTYPES.get(kind) for kind in call.output_types]
        self.keeps = any(self.flags)
        # backward answers for the arguments that the caller passed; forward's defaults are not passed again.
        self.args = call.args[: call.passed]
        self.check_arguments()
        self.apply = apply_of(self.function, self.args, call.kwargs)
        flat_outputs = call.outputs if type(call.outputs) is tuple else (call.outputs,)
        self.simple_arguments = (
            not call.kwargs
            and not call.autocast.dtypes
            and not call.inplace
            and all(kind == "tensor" for kind in self.kinds)
            and all(isinstance(value, Slot) or (not slots(value) and _is_constant(value)) for value in self.args)
            and not slots(call.args[len(self.args) :])
        )
        self.simple = (
            self.simple_arguments
            and all(isinstance(value, Slot) for value in flat_outputs)
            and STRING not in (*call.input_types, *call.output_types)
            and HALF not in call.input_types
            and None not in (*self.input_dtypes, *self.output_dtypes)
        )

    def find(self, call: AutogradCall, gate: Gate) -> Any:
        """What the node calls.

        Raises:
            FormatError, TrustError: The file names what is not allowed or not there.
        """
        return called(call, gate)

    def check_arguments(self) -> None:
        """See that forward can be called with as many arguments, and of those names, as the node has.

        Raises:
            FormatError: It cannot.
        """
        check_arguments(self.title, self.function, self.call, self.args)

    def run(self, inputs: Sequence[Any], keep: bool) -> tuple[int, list[Any]]:
        """Call Function.apply.

        Args:
            inputs: One per tensor input, owned by the call: nobody else's memory. Strings come as numpy arrays.
            keep: Whether somebody reads the context.

        Returns:
            The handle of the context (0 where there is none), and the tensor outputs.

        Raises:
            RunError: Inputs or outputs are not what the file says.
            Exception: What forward raises, as it is.
        """
        call = self.call
        if len(inputs) != len(self.flags):
            raise RunError.damaged(self.title, f"it takes {len(self.flags)} tensors, got {len(inputs)}")
        keep = keep or self.store.keep
        with ExitStack() as stack:
            enter_state(stack, self.autocast, call.autocast.cache, keep and self.keeps)
            values: list[Any] = []
            targets: list[Any] = []
            for value, kind, flag, dtype in zip(inputs, self.kinds, self.flags, self.input_dtypes, strict=True):
                value = self.argument(value, kind, flag, dtype)
                if keep and flag and not call.inplace and value is not None and value.nbytes >= LARGE:
                    value = without_leaf(value)
                values.append(value)
                # Before apply: an output that is a dirty input takes its edge over.
                targets.append(target_of(value) if keep and flag and value is not None else None)
            outputs = self.outputs_of(values)
            handle = self.store.put(self.context(values, targets, outputs), self.pool) if keep else 0
        return handle, [value.detach() if isinstance(value, torch.Tensor) else value for value in outputs]

    def argument(self, value: Any, kind: str, flag: bool, dtype: torch.dtype | None) -> Any:
        """What forward gets for a tensor argument: ``kind``, ``flag`` and ``dtype`` are those of its slot.

        Raises:
            RunError: It is not what they say.
        """
        if dtype is torch.float16 and value is not None and value.dtype is torch.float32:
            value = value.half()  # onnxruntime widens a float16 node between two that it runs in float32
        if value is None:
            pass  # an absent input: forward sees None
        elif kind == "size":
            value = self.size(value)
        elif flag:
            value = self.leaf(value)
        if self.call.inplace and self.call.module is None and isinstance(value, torch.Tensor):
            value = value.clone()  # autograd allows no in-place change of a leaf; what a module changes is none
        return value

    def outputs_of(self, values: Sequence[Any]) -> list[Any]:
        """Call Function.apply: its tensor outputs, with their autograd graph.

        Raises:
            RunError: They are not what the file says.
            Exception: What forward raises, as it is.
        """
        call = self.call

        def place(leaf: Any) -> Any:
            return values[leaf.index] if isinstance(leaf, Slot) else _fresh(leaf)

        args = [fill(value, place) for value in self.args]
        kwargs = {key: fill(value, place) for key, value in call.kwargs.items()}
        try:
            result = self.apply(*args, **kwargs)
        except RuntimeError as error:
            if call.inplace or "leaf Variable" not in str(error):
                raise  # forward's own
            raise RunError.damaged(self.title, "its forward changes an input in place, inplace=0 says that it does not") from error
        outputs: list[Any] = [None] * len(call.output_types)
        self.collect(call.outputs, result, outputs)
        return outputs

    def size(self, value: Any) -> int:
        """The number that a tensor of one element stands for.

        Raises:
            RunError: It has more or fewer, or is no number.
        """
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise RunError.damaged(self.title, "an argument that is a size comes as something else than one number")
        return int(value)

    def leaf(self, value: Any) -> Any:
        """A tensor whose gradient is wanted.

        Raises:
            RunError: It is of a type that has no gradient.
        """
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            kind = value.dtype if isinstance(value, torch.Tensor) else "a tensor of strings"
            raise RunError.damaged(self.title, f"its attributes say that an input needs a gradient, and it is {kind}")
        return plain(value).requires_grad_()

    def context(self, inputs: Sequence[Any], targets: Sequence[Any], outputs: Sequence[Any]) -> Context:
        """The context of a call that has just run with grad mode on."""
        shapes = [tuple(value.shape) if flag and value is not None else () for value, flag in zip(inputs, self.flags, strict=True)]
        return Context(self.call.id, self.call.name, tuple(map(root_of, outputs)), tuple(targets), tuple(shapes))

    def collect(self, template: Any, result: Any, outputs: list[Any]) -> None:
        """Put the tensors of what apply returned where the template has their slots.

        Raises:
            RunError: It returned something else than the file says.
        """
        if isinstance(template, Slot):
            outputs[template.index] = self.check(template.index, result)
        elif isinstance(template, (tuple, list)):
            if not isinstance(result, (tuple, list)) or len(result) != len(template):
                count = len(result) if isinstance(result, (tuple, list)) else 1
                raise RunError(f"{self.title} returned {count} values, {len(template)} when it was exported: export it as it is used now")
            for part, item in zip(template, result, strict=True):
                self.collect(part, item, outputs)
        elif slots(template):
            names = [Slot(slot.index) for slot in slots(template)]
            flat: list[Any] = []
            fill(result, lambda leaf: flat.append(leaf) if isinstance(leaf, torch.Tensor) else None)
            if len(flat) != len(names):
                raise RunError(
                    f"{self.title} returned {len(flat)} tensors in something of type {type(template).__name__}, {len(names)} when it was exported"
                )
            for slot, value in zip(names, flat, strict=True):
                self.collect(slot, value, outputs)

    def check(self, index: int, value: Any) -> Any:
        """Output ``index`` as apply returned it, if the file says so too.

        Raises:
            RunError: It is no tensor, or of another element type.
        """
        kind = self.call.output_types[index]
        if kind == STRING:
            if isinstance(value, torch.Tensor):
                raise RunError.damaged(self.title, f"output {index} is a tensor, the file says strings")
            return np.asarray(value, dtype=object)
        if not isinstance(value, torch.Tensor):
            raise RunError(
                f"{self.title}: output {index} is of type {type(value).__name__}, a tensor when it was exported: export it as it is used now"
            )
        if value.dtype is not self.output_dtypes[index]:
            raise RunError(
                f"{self.title}: output {index} has dtype {value.dtype}, the file says {self.output_dtypes[index]}: "
                "the Function has changed, or depends on a setting of the exporting process (the default dtype, autocast)"
            )
        return value


class PythonOpGrad:
    """One PythonOpGrad node.

    Attributes:
        count: N, the number of gradients that follow the context among the inputs; what comes after them (the
            forward outputs) is control dependency only.
        wanted: One per output: whether a gradient is wanted there.
        watched: The outputs that have no gradient because backward gave None at the export: the engine is asked for these, too, so that none is lost.
        asked: One per output: whether the engine is asked for it, as it is wanted or watched.
        id, name: The call and the Function whose contexts it takes.
        module: Where a module that is called comes from; None for what is none.
        titles, pool: As a PythonOp's.
        kind, specs: The operator, and what its attributes must be.
    """

    titles: Mapping[str, str] = {}
    pool: PoolLog | None = None
    kind, specs = PYTHON_OP_GRAD, GRAD_SPECS

    def __init__(self, attributes: Mapping[str, Any], store: ContextStore, node_name: str = "") -> None:
        """Args:
            attributes: name -> value; nothing in them is resolved.
            store: Where contexts are.
            node_name: The node's name, for messages.

        Raises:
            FormatError: An attribute is missing or malformed.
        """
        self.title = f"{self.kind} {shown(node_name)!r}"
        try:
            check_types(attributes, self.specs, self.kind)
            self.name: str = attributes["name"]
            record = read_call(attributes[CALL_ATTRIBUTE], self.name) if CALL_ATTRIBUTE in attributes else None
            self.id = record.id if record else ""
            self.module = record.module if record else None
            self.output_types = tuple(attributes.get("output_tensor_types", ()))
            check_element_types(self.output_types)
        except FormatError as error:
            raise FormatError(f"{self.title}: {error}") from error
        self.title += f" ({shown(self.name)})"
        self.count = len(attributes["input_tensor_requires_grads"])
        for name in ("input_tensor_requires_grads", "output_tensor_requires_grads"):
            if any(flag not in (0, 1) for flag in attributes[name]):
                raise FormatError.damaged(self.title, f"{name} holds something that is not 0 or 1")
        self.wanted = tuple(bool(flag) for flag in attributes["output_tensor_requires_grads"])
        if len(self.output_types) not in (0, len(self.wanted)):
            raise FormatError.damaged(self.title, "output_tensor_types and output_tensor_requires_grads differ in length")
        seen = record.no_gradient_seen if record else ()
        if any(index >= len(self.wanted) for index in seen):
            raise FormatError.damaged(self.title, "no_gradient_seen of its call goes beyond its outputs")
        self.watched = frozenset(index for index in seen if not self.wanted[index])
        self.asked = tuple(want or i in self.watched for i, want in enumerate(self.wanted))
        # A gradient of a string does not exist: its place is never wanted.
        self.output_dtypes = [DTYPES.get(kind, torch.float32) for kind in self.output_types]
        self.store = store

    def run(self, handle: int, gradients: Sequence[Any]) -> list[Any]:
        """Run backward.

        Args:
            handle: The context.
            gradients: N tensors owned by the call, None, or no element, where a gradient is absent.

        Returns:
            One per output: the gradient, of the input's shape (zeros where backward gives None), or None where
            no gradient is wanted.

        Raises:
            RunError: The context is not there, or backward gives a gradient that the file has none for.
            Exception: What backward raises, as it is.
        """
        record = self.store.take(handle, self.id, self.name)
        context = Context.unpack(record)
        if len(gradients) != len(context.roots) or len(self.wanted) != len(context.targets):
            raise RunError.damaged(self.title, "it does not fit its PythonOp")
        if any(isinstance(g, np.ndarray) for g in gradients):
            raise RunError.damaged(self.title, "a gradient comes as strings")
        pairs = [(root, g) for root, g in zip(context.roots, context.given(gradients), strict=True) if root is not None and g is not None]
        targets = [target for target, ask in zip(context.targets, self.asked, strict=True) if ask and target is not None]
        found: Sequence[Any] = [None] * len(targets)
        if pairs and targets:
            with ExitStack() as stack:
                enter_state(stack, {}, True, False)
                roots, grads = [root for root, _ in pairs], [plain(grad) for _, grad in pairs]
                found = torch.autograd.grad(roots, targets, grads, retain_graph=self.store.retain, allow_unused=True)
        return self.finish(record, found)

    def finish(self, record: tuple[Any, ...], found: Sequence[Any]) -> list[Any]:
        """What the engine returned for the targets that it was asked for, as the node's outputs.

        Raises:
            RunError: Backward gives a gradient where it gave None at the export.
        """
        *_, targets, shapes = Context.unpack(record)
        gradients = iter(found)
        out: list[Any] = []
        for i, (want, target) in enumerate(zip(self.wanted, targets, strict=True)):
            gradient = next(gradients) if self.asked[i] and target is not None else None
            dtype = self.output_dtypes[i] if self.output_dtypes else torch.float32
            if not want:
                if gradient is not None:
                    raise RunError(f"{self.title}: {self._came_all_the_same(i)}")
                out.append(None)
            elif gradient is None:
                shape = target.shape if isinstance(target, torch.Tensor) else shapes[i] if shapes else None
                out.append(torch.zeros(shape or (), dtype=dtype))
            else:
                out.append(self.fix(i, gradient))
        return out

    def _came_all_the_same(self, index: int) -> str:
        """What to say of a gradient that the file has none for."""
        if self.module is None:
            return (
                f"backward gives a gradient for input {index} of its PythonOp, and gave None when the model was exported, so the file has none there.\n"
                "  way out: export with an example for which backward gives it; or let backward return zeros in place of None"
            )
        state = self.module.state
        kind = "function" if self.module.function else "module"
        if index >= len(state):
            what, zeros = f"argument {index - len(state)} of the {kind}", "0 * x.sum() of that argument"
        elif self.module.function:
            what, zeros = f"{shown(state[index])!r} of the modules among its arguments", "0 * p.sum() of that parameter"
        else:
            what, zeros = f"the parameter {shown(state[index])!r} of the module", "0 * sum(p.sum() for p in self.parameters())"
        return (
            f"there is a gradient for {what}, which no run of the export reached, so the file has none there.\n"
            f"  way out: export with an example that reaches it; or add {zeros} to what the {kind} returns"
        )

    def fix(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient as its output holds it: dense, of the promised element type."""
        gradient = gradient.detach()
        gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        return gradient.to(self.output_dtypes[index]) if self.output_dtypes else gradient


def check_element_types(kinds: Sequence[int]) -> None:
    """Raises FormatError for an ONNX element type that torch has no tensors of."""
    unknown = [kind for kind in kinds if kind not in DTYPES and kind != STRING]
    if unknown:
        raise FormatError(f"the ONNX element type {unknown[0]} has no torch dtype: the file is damaged, or from a newer release")


def _autocast(dtypes: Mapping[str, str]) -> dict[str, torch.dtype]:
    try:
        found = {torch.device(device).type: by_name(torch.dtype, name) for device, name in dtypes.items()}
        for device in found.keys() - {"cpu", "cuda"}:
            torch.autocast(
                device, dtype=found[device]
            )  # one that this torch cannot do is told now, and not by an assertion of torch's in a run
        return found
    except (RuntimeError, ValueError, AssertionError) as error:
        raise FormatError(f"the recorded autocast state is malformed: {shown(str(error))}") from error


def enter_state(stack: ExitStack, autocast: Mapping[str, torch.dtype], cache: bool, grad: bool) -> None:
    """Exactly the recorded state, whatever the calling thread has: grad mode, inference mode, autocast."""
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.set_grad_enabled(grad))
    for device in {*autocast, "cpu", "cuda"}:
        if device in autocast:
            stack.enter_context(torch.autocast(device, dtype=autocast[device], cache_enabled=cache))
        elif torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))


def plain(value: torch.Tensor) -> torch.Tensor:
    """The tensor, in a copy where a caller in inference mode has made it: autograd does not take those."""
    return value.clone() if value.is_inference() else value


def without_leaf(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor with the leaf's memory and a gradient edge, which the autograd graph does not keep alive.

    An edge to a leaf ends in AccumulateGrad, which holds the leaf; so the leaf gives its memory away.
    """
    value = torch.ops.aten._unsafe_view(leaf, leaf.shape)
    leaf.data = torch.empty(0, dtype=leaf.dtype)
    return value


def root_of(value: Any) -> Any:
    """Where a backward starts for an output: the tensor, or its gradient edge where it is large; None where it has no gradient."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return None
    return get_gradient_edge(value) if value.nbytes >= LARGE else value


def target_of(value: torch.Tensor) -> Any:
    """What the engine takes for the value that a gradient is wanted of."""
    return value if value.is_leaf else get_gradient_edge(value)
