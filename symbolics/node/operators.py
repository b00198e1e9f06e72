"""An operator of torch.library, or of a C++ extension, as what a PythonOp calls: in the place of a Function class."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

from symbolics import torch_private as private
from symbolics.node.containers import slots

__all__ = ["Operator", "is_foreign", "why_never"]

#: Namespaces of torch's own: what stands there torch.onnx knows, or no model's gradient flows through it.
_OWN = frozenset(
    "aten prims prim pythonop onnx onnx_symbolic _operator math higher_order profiler inductor export rngprims debugprims "
    "inductor_prims debug_mode_ops _dtensor _native _test "
    "c10d c10d_functional _c10d_functional _c10d_functional_autograd fsdp symm_mem streams static_runtime cuda".split()
)


@functools.lru_cache(maxsize=4096)
def is_foreign(called: Any) -> bool:
    """Whether an operator (or a packet of overloads) is somebody else's than torch's."""
    return private.operator_name(called).split("::")[0] not in ("", *_OWN)


#: The types of arguments that an operator of torch's own may have, without "?" and "[]".
_TYPES = frozenset(
    "Tensor Scalar number int float bool str complex SymInt SymFloat SymBool ScalarType Layout Device MemoryFormat Generator".split()
)


@functools.lru_cache(maxsize=4096)
def why_never(overload: Any) -> str:
    """Why a node never calls an operator, whoever names it; "" where it may.

    Of torch's own operators, nodes call functions of tensors alone. What reads or writes files (``aten::from_file``, ``aten::save``), prints, speaks
    to other processes, or handles memory, streams and storages, has no tensor to give, changes an argument, or stands in a namespace of its own.
    """
    if is_foreign(overload):
        return ""
    schema = private.schema_of(overload)
    if schema.name.partition("::")[0] not in ("aten", "prims") or not private.is_dispatched(overload):
        return "it belongs to how torch itself works"
    if schema.is_mutable:
        return "it changes an argument in place"
    if not all(any("Tensor" in str(value.type) for value in values) for values in (schema.arguments, schema.returns)):
        return "it is no function of tensors"
    odd = [value.name for value in schema.arguments if not set(re.findall(r"\w[\w.]*", _plain(value.type))) <= _TYPES]
    return f"its argument {odd[0]} is no tensor, number or text" if odd else ""


def _plain(kind: Any) -> str:
    """A type without what says of which of torch's containers it is: ``Optional[List[Tensor]]`` as ``Tensor``."""
    return re.sub(r"\b(Optional|List)\b", "", str(kind))


class Operator:
    """One overload of an operator, with what a Function class says of itself: a name, a forward with a signature.

    A call returns what the operator returns. Where that lacks tensors that the operator changes in place, it is a tuple: the result, then
    each changed argument; so a graph has the new values.

    Attributes:
        overload: The operator.
        name: ``namespace::name.overload``, as files have it.
        schema: Its schema, as text.
        changes: The names of the arguments that it changes in place and does not return.
    """

    #: There is a setup_context, as to say that forward takes no ctx.
    setup_context = None

    def __init__(self, overload: Any) -> None:
        """Args: the overload (``torch.ops.mylib.op.default``)."""
        self.overload = overload
        schema = private.schema_of(overload)
        self.name = f"{schema.name}.{schema.overload_name or 'default'}"
        # As `module:qualname` this is the name.
        self.__module__, _, rest = self.name.partition(":")
        self.__qualname__ = self.__name__ = rest
        self.schema = str(schema)
        returned = {alias for value in schema.returns if value.alias_info is not None for alias in value.alias_info.before_set}
        written = [value for value in schema.arguments if value.alias_info is not None and value.alias_info.is_write]
        self.changes = tuple(value.name for value in written if not returned.intersection(value.alias_info.before_set))
        self.takes_tensors = any("Tensor" in str(value.type) for value in (*schema.arguments, *schema.returns))
        self.signature = inspect.Signature([_parameter(value) for value in schema.arguments])
        call = private.unwrapped_operator(overload)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        def changing(*args: Any, **kwargs: Any) -> Any:
            arguments = self.signature.bind(*args, **kwargs).arguments
            return call(*args, **kwargs), *(arguments.get(name) for name in self.changes)

        #: What runs it.
        self.apply = changing if self.changes else call
        self.forward = forward
        self.forward.__signature__ = self.signature  # type: ignore[attr-defined]

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def of(cls, overload: Any) -> Operator:
        """The one for an overload."""
        return cls(overload)

    def result_of(self, returned: Any) -> Any:
        """What the operator itself returns, of what `apply` returned."""
        return returned[0] if self.changes else returned

    def changed_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
        """Those of `changes` that hold a tensor in a call: an optional one may be None, a list may be empty.

        Args:
            args, kwargs: Arguments that the operator takes, with `Slot`s in place of tensors.
        """
        given = self.signature.bind(*args, **kwargs).arguments
        return tuple(name for name in self.changes if slots(given.get(name)))

    def python_functions(self) -> dict[str, dict[str, Any]]:
        """Of an operator that torch.library.custom_op made of Python functions, these by half, as `symbolics.node.fingerprints` takes them."""
        definition, (setup, backward) = private.definition_of(self.overload), private.formula_of(self.overload)
        if definition is None:
            return {}
        given = {"forward": {"forward": definition, "setup_context": setup}, "backward": {"backward": backward}}
        return {half: {name: each for name, each in methods.items() if each is not None} for half, methods in given.items()}

    def misfit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why the operator does not take arguments, by its schema alone; None where it does.

        Args:
            args, kwargs: The arguments, any tensors in the places of its tensors.
        """
        try:
            private.check_schema(self.overload, args, kwargs)
        except (RuntimeError, TypeError) as error:
            return str(error).split("\n")[0]
        return None


def _parameter(argument: Any) -> inspect.Parameter:
    default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
    kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(argument.name, kind, default=default)
