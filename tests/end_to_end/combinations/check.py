"""One combination: exported, loaded, used, and compared with eager of its type and with eager in float64."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

import exporter
from symbolics.errors import PythonopError
from tests.end_to_end.combinations.models import DTYPES, DYNAMO, FEATURES, SCRIPTED, Model, inputs

__all__ = ["CASES", "USES", "Case", "Outcome", "outcome"]

ALLOW = ["tests.end_to_end.combinations.models:*"]
#: The values that a use leaves behind: outputs first, then gradients; None where there is none.
Found = dict[str, "Tensor | None"]
Use = Callable[[Any, "torch.dtype", "list[str]"], Found]


# ------------------------------------------------------------------------------------------------------------ the uses
def _weights(seed: int, like: Tensor) -> Tensor:
    return (torch.rand(like.shape, generator=torch.Generator().manual_seed(seed)) + 0.5).bfloat16().to(like.dtype)


def _gradients(module: Any, names: list[str], given: tuple[Tensor, ...]) -> Found:
    found: Found = {name: given[i].grad for i, name in enumerate("xz")}
    return {**found, **{name: module.get_parameter(name).grad for name in names}}


def _backward(
    module: Any,
    dtype: torch.dtype,
    names: list[str],
    *,
    outputs: tuple[int, ...] = (0, 1),
    ones: bool = False,
    sign: float = 1.0,
    times: int = 1,
) -> Found:
    module.zero_grad()
    given = inputs(1, dtype, sign)
    results = module(*given)
    for time in range(times):
        seeds = [torch.ones_like(results[i]) if ones else _weights(7 + i + 10 * time, results[i]) for i in outputs]
        torch.autograd.backward([results[i] for i in outputs], seeds, retain_graph=time + 1 < times)
    return {**{f"output {i}": r.detach() for i, r in enumerate(results)}, **_gradients(module, names, given)}


def _second_call(module: Any, dtype: torch.dtype, names: list[str]) -> Found:
    """A call without gradients, one on the other side of each condition; the gradients add up."""
    with torch.no_grad():
        module(*inputs(3, dtype, 1.0))
    first = _backward(module, dtype, names, sign=-1.0)
    given = inputs(2, dtype, 1.0)
    results = module(*given)
    torch.autograd.backward(list(results), [_weights(5, r) for r in results])
    return {**{f"first {k}": v for k, v in first.items() if k in ("x", "z", "output 0")}, **_gradients(module, names, given)}


def _double(module: Any, dtype: torch.dtype, names: list[str]) -> Found:
    module.zero_grad()
    given = inputs(1, dtype, 1.0)
    wanted = [*given, *(p for name in names if (p := module.get_parameter(name)).requires_grad)]
    results = module(*given)
    total = sum((r * _weights(3 + i, r)).sum() for i, r in enumerate(results))
    first = torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True)
    sum((g * _weights(17, g)).sum() for g in first if g is not None and g.requires_grad).backward()
    return {**{f"first {i}": None if g is None else g.detach() for i, g in enumerate(first)}, **_gradients(module, names, given)}


_BACKWARD: dict[str, Use] = {
    "ones": functools.partial(_backward, ones=True),
    "weighted": _backward,
    "first output alone": functools.partial(_backward, outputs=(0,)),
    "second output alone": functools.partial(_backward, outputs=(1,)),
    "retained": functools.partial(_backward, times=2),
    "second call": _second_call,
    "double": _double,
}
USES: dict[str, Use] = {**_BACKWARD, "training file": _backward, **dict.fromkeys(FEATURES, _backward)}
#: These stand in one model.
_TOGETHER = frozenset(FEATURES[:3])


# ------------------------------------------------------------------------------------------------------------- a case
@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    dynamo: bool
    dtype: str
    flow: str
    function: bool
    use: str

    def __str__(self) -> str:
        return " - ".join(
            ("dynamo" if self.dynamo else "torchscript", self.dtype, self.flow, "function" if self.function else "plain", self.use)
        )


def _cases() -> Iterator[Case]:
    """All that is scripted. An export by torch.export takes seconds: features of a model are crossed with calls in other types and in nested bodies."""
    for dynamo, flows in ((True, DYNAMO), (False, SCRIPTED)):
        for dtype, flow, function, use in itertools.product(DTYPES, flows, (False, True), USES):
            nested, other = " in " in flow, dtype != "float32"
            if dynamo and ((nested and other) or ((nested or other) and use in FEATURES and not function)):
                continue
            yield Case(dynamo, dtype, flow, function, use)


CASES = list(_cases())


@dataclass(frozen=True)
class Outcome:
    """``kind`` is right, refused or wrong; ``text`` says why."""

    kind: str
    text: str = ""


def outcome(case: Case) -> Outcome:
    """What becomes of a case."""
    features = _TOGETHER if case.use in _TOGETHER else frozenset({case.use} & set(FEATURES))
    return _used((case.dynamo, case.dtype, case.flow, case.function, features), "weighted" if case.use in FEATURES else case.use)


@functools.lru_cache(maxsize=2)
def _exported(dynamo: bool, dtype: str, flow: str, function: bool, features: frozenset[str]) -> Any:
    stored, _ = DTYPES[dtype]
    options = {"flow": flow, "function": function, "features": features, "dynamo": dynamo}
    made = {}
    for name, plain, of, autocast in (("model", False, stored, True), ("eager", True, stored, True), ("exact", True, torch.float64, False)):
        torch.manual_seed(0)
        model = Model(**options, plain=plain, autocast=autocast and dtype == "autocast")
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.bfloat16())
        made[name] = model.to(of)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = exporter.export(made["model"], inputs(0, stored, 1.0), dynamo=dynamo)
        module = exporter.load(program, allow=ALLOW)
    except Exception as error:
        return _refused(error)
    return made["model"], made["eager"], made["exact"], program, module


def _refused(error: Exception) -> Outcome:
    return Outcome("refused" if isinstance(error, PythonopError) else "raw", f"{type(error).__name__}: {error}".strip())


@functools.lru_cache(maxsize=16)
def _used(made: Any, use: str) -> Outcome:
    if isinstance(parts := _exported(*made), Outcome):
        return parts
    model, eager, exact, program, module = parts
    stored, computed = DTYPES[made[1]]
    names = [name for name, _ in eager.named_parameters()]
    wanted, reference = USES[use](eager, stored, names), USES[use](exact, torch.float64, names)
    try:
        found = _by_session(program, names, stored, wanted) if use == "training file" else USES[use](module, stored, names)
    except Exception as error:
        return _refused(error)
    if any(found[name] is None is not want for name, want in wanted.items()) or any(
        want is None is not found[name] for name, want in wanted.items()
    ):
        itself = USES[use](model, stored, names)  # an operator of torch may give zeros where Python's control flow gives nothing
        zeros = [name for name, want in wanted.items() if want is None and itself[name] is not None and not itself[name].any()]
        wanted = {**wanted, **{name: itself[name] for name in zeros}}
        reference = {**reference, **{name: itself[name].double() for name in zeros}}
    text = _differs(found, wanted, reference, torch.finfo(computed).eps)
    return Outcome("wrong", text) if text else Outcome("right")


def _by_session(program: Any, names: list[str], dtype: torch.dtype, wanted: Found) -> Found:
    """The gradient graph in a session of onnxruntime, as `_backward` uses a module."""
    training = exporter.build_gradient_graph(program)
    session = exporter.inference_session(ir.to_proto(training), allow=ALLOW)
    given = [t.detach() for t in inputs(1, dtype, 1.0)]
    seeds = [_weights(7 + i, wanted[f"output {i}"]) for i in range(2)]
    feeds = dict(zip([i.name for i in session.get_inputs()], [*given, *seeds], strict=True))
    values = session.run_with_ort_values(None, {name: _ort_value(t) for name, t in feeds.items()})
    results = {o.name: _tensor(v) for o, v in zip(session.get_outputs(), values)}
    outputs = list(results.values())
    found: Found = {f"output {i}": outputs[i] for i in range(2)}
    inputs_ = list(feeds)[:2]
    for short, name in (*zip("xz", inputs_), *((n, n) for n in names)):
        found[short] = results.get(f"{name}_grad")
    return found


def _ort_value(t: Tensor) -> Any:
    import onnxruntime

    if t.dtype is torch.bfloat16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(t.view(torch.int16).numpy().view(np.uint16), 16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(t.contiguous().numpy())


def _tensor(value: Any) -> Tensor:
    if value.data_type() == "tensor(bfloat16)":
        return torch.from_dlpack(value._ortvalue)
    return torch.from_numpy(np.array(value.numpy()))


# --------------------------------------------------------------------------------------------------------- comparison
def _differs(found: Found, wanted: Found, exact: Found, unit: float) -> str:
    """What differs from eager of the same type, or is farther from eager in float64 than the type explains."""
    for name, want in wanted.items():
        got, truth = found[name], exact[name]
        if got is None or want is None:
            if got is not want:
                return f"{name} is {'absent' if got is None else 'there'}, in eager it is {'absent' if want is None else 'there'}"
            continue
        if got.dtype != want.dtype or got.shape != want.shape:
            return f"{name} is {got.dtype}{list(got.shape)}, in eager {want.dtype}{list(want.shape)}"
        own = float((want.double() - truth).abs().max())
        scale = float(truth.abs().max())
        bound = 4 * own + 8 * unit * scale
        if not (off := float((got.double() - truth).abs().max())) <= bound:
            return f"{name} is {off:.2g} off what float64 says, eager {own:.2g}; its largest number is {scale:.2g}"
        if not (off := float((got.double() - want.double()).abs().max())) <= bound + own:
            return f"{name} is {off:.2g} off eager"
    return ""
