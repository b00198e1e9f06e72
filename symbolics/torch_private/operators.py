"""Operators of the dispatcher: torch.library's, and those that C++ extensions register."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from symbolics.torch_private.torchscript import paused_capture

__all__ = [
    "autocast_schemas",
    "below_autograd",
    "check_schema",
    "composite_kernel",
    "definition_of",
    "find_overload",
    "first_operator",
    "forget_kernels",
    "formula_of",
    "generated_formula",
    "give_fake_kernel",
    "has_autograd_kernel",
    "has_fake_kernel",
    "is_composite",
    "is_dispatched",
    "is_generated",
    "is_python_kernel",
    "is_recorded",
    "kernel_of",
    "operator_classes",
    "operator_name",
    "overload_of",
    "private_quantizers",
    "quantizers_with_masks",
    "registered_at",
    "schema_of",
    "signatures_of",
    "torchlib_operators",
    "unwrapped_operator",
]


def operator_classes() -> tuple[type, ...]:
    """The classes whose ``__call__`` is a call of an operator from Python: ``torch.ops.mylib.op.default`` and ``torch.ops.mylib.op``."""
    from torch._ops import OpOverload, OpOverloadPacket

    return OpOverload, OpOverloadPacket


def forget_kernels(operator: Any) -> None:
    """Let the dispatcher look up an operator's kernels in Python anew. ``_dispatch_cache``: what changes ``py_kernels`` itself, as torch's exporter does, has to."""
    operator._dispatch_cache.clear()


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@contextlib.contextmanager
def composite_kernel(operator: Any, kernel: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Give an operator that is a function of others another kernel in Python, in the block; ``kernel`` makes it of the one that it has.

    ``py_kernels`` and ``decomposition_table``: there torch looks for what gives a composite operator's shapes, before its function in C++.
    """
    from torch._decomp import decomposition_table

    places: tuple[tuple[dict[Any, Any], Any], ...] = (operator.py_kernels, _COMPOSITE), (decomposition_table, operator)
    before = [table[key] for table, key in places]
    for table, key in places:
        table[key] = kernel(before[0])
    forget_kernels(operator)
    try:
        yield
    finally:
        for (table, key), old in zip(places, before, strict=True):
            table[key] = old
        forget_kernels(operator)


def is_recorded() -> bool:
    """Whether torch.fx writes down what operators are called now. ``get_proxy_mode``: while it asks a kernel for shapes alone, there is none."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def operator_name(called: Any) -> str:
    """``namespace::name`` of what torch._ops calls, "" for torch's own operators and anything else."""
    name = getattr(called, "_qualified_op_name", None) or getattr(getattr(called, "_schema", None), "name", "")
    return "" if str(name).split("::")[0] in ("", "aten", "prims", "prim", "pythonop") else str(name)


def overload_of(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The overload that a call of ``torch.ops.mylib.op`` means.

    Raises:
        RuntimeError: None takes these arguments.
    """
    if not hasattr(called, "overloads"):
        return called
    names = called.overloads()
    if len(names) == 1:
        return getattr(called, names[0])
    return getattr(called, torch._C._jit_resolve_packet(called._qualified_op_name, *args, **kwargs) or "default")


def signatures_of(name: str) -> list[Any]:
    """The schemas of one of torch's own operators, by which its parser binds arguments; none where it has none of this name."""
    return list(torch._C._jit_get_schemas_for_operator(f"aten::{name}"))


def autocast_schemas(name: str) -> tuple[list[Any], list[Any]]:
    """The schemas of one of torch's own operators that autocast has a kernel for on the CPU, and the others; both empty where it has none.

    ``_dispatch_has_kernel_for_dispatch_key``: nothing public says what autocast treats. It knows none of TorchScript's own operators on numbers, which
    ``_dispatch_has_kernel`` tells. Those with ``out=`` are left out.
    """
    found: tuple[list[Any], list[Any]] = [], []
    for schema in signatures_of(name):
        if any(argument.is_out for argument in schema.arguments):
            continue
        full = f"aten::{name}.{schema.overload_name}".removesuffix(".")
        if torch._C._dispatch_has_kernel(full):
            found[not torch._C._dispatch_has_kernel_for_dispatch_key(full, "AutocastCPU")].append(schema)
    return found if found[0] else ([], [])


def find_overload(name: str, overload: str) -> Any:
    """The operator that the dispatcher of this process has under a name; None where it has none. Nothing is imported.

    Args:
        name: ``namespace::operator``.
        overload: Its overload, "default" for the one without a name.
    """
    try:
        torch._C._get_schema(name, "" if overload == "default" else overload)
    except RuntimeError:
        return None
    namespace, _, rest = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), rest), overload)


def unwrapped_operator(op: Any) -> Callable[..., Any]:
    """What a call of an overload ends in, without the Python around it."""
    return op._op


def check_schema(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """See that an operator takes arguments; it is not called.

    Raises:
        RuntimeError: It does not; the message names the argument.
    """
    torch._C._check_schema_allow_fake_script_object(op._schema, *args, **kwargs)


def definition_of(op: Any) -> Callable[..., Any] | None:
    """The Python function that torch.library.custom_op or triton_op made an operator of; None for any other."""
    from torch._library.custom_ops import OPDEFS

    found = OPDEFS.get(op._schema.name)
    return None if found is None else found._init_fn


def formula_of(op: Any) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """What register_autograd gave an operator that torch.library.custom_op made: its setup_context and its backward; None for what it was not given."""
    from torch._library.custom_ops import OPDEFS

    found = OPDEFS.get(op._schema.name)
    return (None, None) if found is None else (found._setup_context_fn, found._backward_fn)


def registered_at(op: Any) -> str:
    """The source file that registered an operator: of Python its path, of C++ what the compiler called it."""
    found = re.search(r"^debug: registered at (.*):\d+$", torch._C._dispatch_dump(op.name()), re.MULTILINE)
    return found[1] if found else ""


def _has_kernel(op: Any, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def is_python_kernel(op: Any, key: str) -> bool:
    """Whether what an operator runs for a dispatch key ("CPU", "AutogradCPU") is a Python function: the dispatcher tells only which file registered it."""
    found = re.search(rf"^{key}: registered at (.*):\d+ \[", torch._C._dispatch_dump_table(op.name()), re.MULTILINE)
    return found is not None and (found[1].endswith(".py") or found[1].startswith("<"))  # <stdin>, <string>


@functools.cache
def _handing_over() -> type:
    from torch.utils._python_dispatch import TorchDispatchMode

    class HandingOver(TorchDispatchMode):
        def __init__(self, stand_in: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.stand_in = stand_in

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
            return self.stand_in(func, args, kwargs or {})

    return HandingOver


def below_autograd(stand_in: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> contextlib.AbstractContextManager[Any]:
    """While it is open, each operator is given to a function, with its arguments, where autograd is done with it; within the function it is closed.

    The class behind it is in a module with an underscore, though torch's own documentation names it.
    """
    found: contextlib.AbstractContextManager[Any] = _handing_over()(stand_in)
    return found


class _First(BaseException):
    """The first operator of a call, which is not made."""


def _stop(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise _First(op, args, kwargs)


def first_operator(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The operator that a function of torch calls first, with its arguments as the schema has them; None where it calls none. It is not called.

    Where autograd is off, an operator that torch takes apart (CompositeImplicitAutograd) comes whole; nothing public switches autograd off so,
    but torch.inference_mode, which keeps tensors from being changed.
    """
    try:
        with paused_capture(), torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd(), below_autograd(_stop):
            func(*args, **kwargs)
    except _First as found:
        op, args, kwargs = found.args
        return op, tuple(args), dict(kwargs)
    except Exception:  # the call itself has the words for it
        return None
    return None


def is_generated(cls: type) -> bool:
    """Whether a Function is one that torch makes of a backward that an operator was given (register_autograd)."""
    from torch._library import autograd

    return cls.__module__ == autograd.__name__


def generated_formula(cls: type) -> Any:
    """The backward that an operator was given, of the Function that torch made of it; None for a custom_op that was given none."""
    function: Any = getattr(cls, "backward", None)
    while function is not None:
        closed = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
        if "info" in closed:
            return closed["info"]._backward_fn
        function = closed.get("orig_backward")  # of an operator that takes or returns lists of tensors
    return None


def schema_of(op: Any) -> Any:
    """The schema of an overload: its name, arguments and returns."""
    return op._schema


def has_autograd_kernel(op: Any) -> bool:
    """Whether an operator brings code of its own for autograd."""
    return any(_has_kernel(op, key) for key in ("Autograd", "AutogradCPU", "AutogradCUDA"))


def has_fake_kernel(op: Any) -> bool:
    """Whether an operator says what shapes and dtypes it returns (register_fake, or a kernel for the device "meta")."""
    return _has_kernel(op, "Meta")


_fakes = torch.library.Library("aten", "IMPL")


def give_fake_kernel(op: Any, fake: Callable[..., Any]) -> None:
    """Give one of torch's own operators a kernel for fake tensors, in this process, where it has none: with an open size torch.export stops at it."""
    if not has_fake_kernel(op):
        _fakes.impl(op, fake, "Meta")


def is_dispatched(op: Any) -> bool:
    """Whether an operator is the dispatcher's: TorchScript has some of its own (``aten::save``), which run nothing that could be traced."""
    return bool(torch._C._dispatch_has_kernel(op.name()))


def is_composite(op: Any) -> bool:
    """Whether an operator is a function of other operators, and autograd differentiates those."""
    return isinstance(op, torch._ops.OpOverload) and _has_kernel(op, "CompositeImplicitAutograd") and not has_autograd_kernel(op)


def kernel_of(op: Any, key: str, tensors: Sequence[torch.Tensor]) -> Callable[..., Any] | None:
    """What an operator runs for tensors of a device, without what stands before it in the dispatcher.

    Args:
        op: The overload.
        key: "Autograd" for what it runs where autograd is on, "" for the computation itself.
        tensors: Its tensor arguments.

    Returns:
        The kernel; None where there are no tensors, or no such kernel.
    """
    if not tensors:
        return None
    try:
        kernel = torch.library.get_kernel(op.name(), key + tensors[0].device.type.upper())
    except RuntimeError:
        return None
    keys = functools.reduce(lambda a, b: a | b, (torch._C._dispatch_keys(t) for t in tensors))
    return functools.partial(kernel.call_boxed, keys)


@functools.cache
def torchlib_operators() -> frozenset[str]:
    """The operators, ``namespace::name`` or ``namespace::name.overload``, that torch.onnx's exporter has translations of by itself."""
    from torch.onnx._internal._lazy_import import onnxscript_apis
    from torch.onnx._internal.exporter import _torchlib  # noqa: F401  (it fills the registry)
    from torch.onnx._internal.exporter._torchlib import _torchlib_registry

    own = (meta.fx_target for meta in _torchlib_registry.get_torchlib_ops())
    return frozenset(
        [
            *(target.name() for target in own if isinstance(target, operator_classes()[0])),
            *(m.qualified_name for m in onnxscript_apis.get_torchlib_ops()),
        ]
    )


def quantizers_with_masks() -> tuple[Any, Any, Any]:
    """What torch's fake quantization calls where a gradient may be asked for: by one scale, by one that is a tensor, by one a channel."""
    aten = torch.ops.aten
    return (
        aten.fake_quantize_per_tensor_affine_cachemask.default,
        aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
        aten.fake_quantize_per_channel_affine_cachemask.default,
    )


def private_quantizers() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Fake quantization by one learned scale, by a learned scale a channel, and by one that can be switched off.

    torch.ao's modules call these functions; there are no public ones for scales that learn.
    """
    return (
        torch._fake_quantize_learnable_per_tensor_affine,
        torch._fake_quantize_learnable_per_channel_affine,
        torch._fake_quantize_per_tensor_affine_cachemask_tensor_qparams,
    )
