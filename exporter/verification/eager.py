"""Eager PyTorch's side of `verify`: a step of the model itself, in its own type and in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from exporter.forward.case import Case
from exporter.forward.inputs import named_tensors
from exporter.train_mode.dropout import draw_seed
from exporter.train_mode.reads import Reads
from exporter.verification.compare import ROUGH, coarser, difference, largest, tolerance_of
from exporter.verification.drawn import nothing_to_compare
from exporter.verification.kept import state_in
from exporter.verification.masks import Masks, OtherDraws
from exporter.verification.memory import HighWater
from exporter.verification.second_step import second_step_failure
from exporter.verification.steps import (
    backward,
    buffers_again,
    changed,
    compiling_quietly,
    copy_of,
    measured,
    state_of,
    tensors_of,
)
from symbolics import torch_private as private
from symbolics.capture.undifferentiable import StopWhereNone, is_refusal, lacks_backward
from symbolics.errors import ExportError, PythonopError, UnsupportedOperatorError
from symbolics.node.dtypes import as_real

__all__ = ["SEED", "EagerStep", "draws", "in_float64", "measured_step", "with_the_files_masks"]

#: Of the cotangents, and of the masks that a file's dropouts draw.
SEED = 20240229


@dataclass
class EagerStep:
    """One step of the model itself.

    Attributes:
        inputs: name -> the tensor given, detached.
        outputs: The tensors that it returned, flat.
        cotangents: One per output; None where it has no gradient.
        gradients: (kind, name) -> gradient, None where eager has none.
        buffers: name -> its value behind the step, of the buffers that the step changed.
        notes: Those of them that it wrote before it read them: in this mode they are no state, and a file need not carry them.
        untouched: The buffers that the step did not change.
        by_backward: The parameters and buffers that the backward wrote to.
        no_backward: Whether a Function of the model has no backward, so that there are no gradients at all.
        half: The coarsest float type, narrower than the model's own, in which operators gave results; None where none did.
    """

    inputs: dict[str, torch.Tensor]
    outputs: list[torch.Tensor]
    cotangents: list[torch.Tensor | None]
    gradients: dict[tuple[str, str], torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    notes: set[str] = field(default_factory=set)
    untouched: dict[str, torch.Tensor] = field(default_factory=dict)
    by_backward: set[str] = field(default_factory=set)
    no_backward: bool = False
    half: torch.dtype | None = None

    def beside(self, carried: Container[str]) -> EagerStep:
        """The same, without the notes that a file does not carry."""
        return replace(self, buffers={name: value for name, value in self.buffers.items() if name not in self.notes or name in carried})

    def without_gradients(self) -> EagerStep:
        """The same, with outputs and buffers alone: what there is to compare with a file that has no gradients."""
        return replace(self, cotangents=[None] * len(self.outputs), gradients={})

    @classmethod
    def run(
        cls,
        case: Case,
        kind: torch.dtype | None = None,
        given: list[Any] | None = None,
        masks: Masks | None = None,
        *,
        widened: bool = False,
    ) -> EagerStep:
        """Run a copy of the model; where PyTorch refuses that an input needs a gradient, with the gradient stopped there, as in the file.

        Args:
            case: The model and its example arguments.
            kind: The float type to run in; None for the model's own.
            given: The cotangents; None draws them. Where a Function has no backward, there are none.
            masks: What its dropouts drop; None lets them draw.
            widened: Whether what asks for a narrower float type gets float64, as a model that casts inside would stay in its own.
        """
        try:
            return _stopped_where_refused(lambda: cls._run(case, kind, given, masks, widened))
        except NotImplementedError as error:
            if not lacks_backward(error):
                raise
        return replace(_stopped_where_refused(lambda: cls._run(case, kind, (), masks, widened)), no_backward=True)

    @classmethod
    def _run(
        cls, case: Case, kind: torch.dtype | None, given: Sequence[Any] | None, masks: Masks | None, widened: bool = False
    ) -> EagerStep:
        model, args, kwargs = copy_of(case.model, kind), case.args, case.kwargs or {}
        leaves: dict[int, torch.Tensor] = {}
        named = named_tensors(model, args, kwargs)
        before = state_of(model)
        half: torch.dtype | None = None
        wide = private.widened_casts if widened else contextlib.nullcontext

        def hear(result: torch.Tensor) -> None:
            nonlocal half
            half = coarser(half, result.dtype)

        with _no_gradients_to(case.model, model), torch.enable_grad(), contextlib.nullcontext() if masks is None else masks.given():
            copies, keywords = _given(case, kind, leaves)
            with Reads(model) as reads, private.every_result(hear), wide():
                outputs = tensors_of(model(*copies, **keywords))
                reads.read(outputs)
            if given is None:
                generator = torch.Generator().manual_seed(SEED)
                given = [
                    torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype) if out.requires_grad else None
                    for out in outputs
                ]
            given = list(given) or [None] * len(outputs)
            returned = [out.detach().clone() for out in outputs]  # a backward may use the memory of what forward gave out
            versions = _versions(model)
            try:
                with private.every_result(hear), wide():
                    backward(outputs, given)
            except Exception as error:
                with contextlib.suppress(Exception):  # a class that takes no attributes
                    error._pythonop_in_backward = True  # type: ignore[attr-defined]
                raise
            written = {name for name, version in _versions(model).items() if versions.get(name) != version}
            buffers = changed(before, state_of(model))  # a checkpoint's backward may change them, too
        if half is torch.float32 and torch.float64 not in _kinds(model, named.values()):
            half = None  # it is the model's own
        gradients = {
            ("parameter gradient", name): None if p.grad is None else as_real(p.grad)
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        gradients |= {("input gradient", name): leaves[id(t)].grad for name, t in named.items() if t.is_floating_point()}
        inputs = {name: t.detach() for name, t in named.items()}
        untouched = {name: value for name, value in before.items() if name not in buffers}
        return cls(
            inputs,
            returned,
            list(given),
            gradients,
            buffers,
            buffers.keys() - reads.first,
            untouched,
            written & buffers.keys(),
            half=half,
        )


def in_backward(error: BaseException) -> bool:
    """Whether it was a backward of `EagerStep.run` that raised it, and no forward."""
    return getattr(error, "_pythonop_in_backward", False) is True


def _versions(model: torch.nn.Module) -> dict[str, int]:
    """How often each parameter and buffer has been written to."""
    return {name: tensor._version for name, tensor in (*model.named_parameters(), *model.named_buffers()) if not tensor.is_inference()}


@contextlib.contextmanager
def _no_gradients_to(model: torch.nn.Module, copied: torch.nn.Module) -> Iterator[None]:
    """While the block runs, the parameters of a model have no gradient; that of before stands behind it.

    Raises:
        ExportError: One got a gradient from a step of the copy.
    """
    own = {id(p) for p in copied.parameters()}
    before = {name: (p, p.grad) for name, p in model.named_parameters() if id(p) not in own}
    for p, _ in before.values():
        p.grad = None
    try:
        yield
        reached = [name for name, (p, _) in before.items() if p.grad is not None]
    finally:
        for p, grad in before.values():
            p.grad = grad
    if reached:
        raise ExportError(
            f"the model cannot be compared with its file: copy.deepcopy(model) still runs the original's parameter {reached[0]!r}"
            f"{f' and {len(reached) - 1} more' if len(reached) > 1 else ''}\n"
            "  something in it reaches its modules on a way that no copy follows: a global variable, a function in an object, a handle\n"
            "  way out: let it reach them through self, or compare by hand: model(...) beside exporter.load(file)(...)"
        )


def _kinds(model: torch.nn.Module, inputs: Iterable[torch.Tensor]) -> set[torch.dtype]:
    """The float types of a model's parameters and inputs."""
    return {tensor.dtype for tensor in (*model.parameters(), *inputs) if tensor.is_floating_point()}


def draws(case: Case, eager: EagerStep, masks: Masks | None = None) -> bool:
    """Whether another run gives another result."""
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(SEED + 1)
        again = EagerStep.run(case, given=eager.cotangents, masks=masks)
    finally:
        torch.random.set_rng_state(state)
    return any(one.shape != two.shape or difference(one, two) > _moves(two) for one, two in zip(again.outputs, eager.outputs, strict=True))


def _moves(output: torch.Tensor) -> float:
    """By how much an output moves at least that depends on random numbers; a sum of several threads moves by less."""
    if not output.is_floating_point():
        return 0.0
    share = min(ROUGH, tolerance_of(str(output.dtype).removeprefix("torch.")))
    return max(share, 2 * torch.finfo(output.dtype).eps) * (largest(output) or 1.0)


def with_the_files_masks(case: Case, eager: EagerStep, file: ir.Model) -> tuple[EagerStep, Masks]:
    """Eager again, with the masks that the fresh process will draw.

    Raises:
        PythonopError: The model draws something else, or keeps state between calls.
    """
    try:
        masks = Masks(file, int(draw_seed(torch.Generator().manual_seed(SEED))))
        eager = EagerStep.run(case, given=eager.cotangents, masks=masks)
        if not draws(case, eager, masks):
            return eager, masks
        reason = "they differ with the masks of the file's Dropouts, too" if masks.nodes else "the file has no Dropout"
    except (OtherDraws, UnsupportedOperatorError) as error:
        reason = str(error)
    kept = list(dict.fromkeys(change.name for changes in state_in(file).values() for change in changes))
    with torch.random.fork_rng(devices=[]):
        raise nothing_to_compare(case.model, lambda: EagerStep.run(case, given=eager.cotangents), kept, reason)


def in_float64(case: Case, eager: EagerStep, masks: Masks | None) -> EagerStep | None:
    """The same step in float64, None where the model cannot run in it.

    Its ``half`` is that of ``eager`` where the casts inside the model gave float64, too: only then does it say what 16 bits have cost.
    """
    kinds = _kinds(case.model, eager.inputs.values())
    if (kinds <= {torch.float64} and eager.half is None) or any(t.is_complex() for t in (*case.model.parameters(), *case.model.buffers())):
        return None  # of complex state, .to(float64) would keep the real parts
    if eager.half is not None and (found := _tried(case, eager, masks, widened=True)) is not None:
        return replace(found, half=eager.half)
    return _tried(case, eager, masks, widened=False)


def _tried(case: Case, eager: EagerStep, masks: Masks | None, widened: bool) -> EagerStep | None:
    try:
        found = EagerStep.run(case, torch.float64, eager.cotangents, masks, widened=widened)
    except Exception:  # a Function of fixed types: eager itself is then the reference
        return None
    same = len(found.outputs) == len(eager.outputs) and all(
        one.shape == two.shape for one, two in zip(found.outputs, eager.outputs, strict=True)
    )
    return replace(found, half=None) if same and found.gradients.keys() == eager.gradients.keys() else None


def measured_step(case: Case, eager: EagerStep, steps: int) -> tuple[float, int | None]:
    """The median time of a step, forward and backward, of the parameters and the float inputs as in the file; and its memory in bytes.

    Raises:
        ExportError: Eager's second step fails, as that of a model which keeps the graph of its first one.
    """
    return _stopped_where_refused(lambda: _measured(case, eager, steps))


def _measured(case: Case, eager: EagerStep, steps: int) -> tuple[float, int | None]:
    model = copy_of(case.model)
    again = buffers_again(model, eager.buffers)

    def step() -> None:
        args, kwargs = _given(case, None, {})
        backward(tensors_of(model(*args, **kwargs)), eager.cotangents)

    with torch.enable_grad():
        memory = HighWater()
        step()
        try:
            return measured(step, steps, memory, again)
        except PythonopError:
            raise
        except Exception as error:
            if is_refusal(error):
                raise  # `_stopped_where_refused` runs it again
            raise second_step_failure(error, model) from error


def _given(case: Case, kind: torch.dtype | None, leaves: dict[int, torch.Tensor]) -> Any:
    """Copies of the arguments, of which the float ones are differentiated.

    Args:
        case: The case.
        kind: The float type that they get, None for their own.
        leaves: Filled: id of a tensor given -> what has its gradient.
    """

    def fresh(value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value.detach().clone()
        leaf = value.detach().clone() if kind is None else value.detach().to(kind)
        leaves[id(value)] = leaf.requires_grad_()
        return leaf.clone()  # no leaf: a model may change its input in place

    return pytree.tree_map_only(torch.Tensor, fresh, (case.args, case.kwargs or {}))


_Result = TypeVar("_Result")


def _stopped_where_refused(run: Callable[[], _Result]) -> _Result:
    """What ``run`` returns; where PyTorch refuses that an input needs a gradient, with the gradient stopped there, as in the file."""
    with compiling_quietly():
        try:
            return run()
        except RuntimeError as error:
            if not is_refusal(error):
                raise
        with StopWhereNone():
            return run()
