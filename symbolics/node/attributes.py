"""AutogradCall <-> the attributes of a PythonOp, one table, both ways; and the PythonOpGrad of a PythonOp.

The documented attributes say what a reader of July 2021 would expect (scalars as float32, everything unusual as a
pointer of 0); the ``call`` attribute says the rest without loss. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from symbolics.errors import FormatError
from symbolics.node.arguments import Resolver, decode, unresolved
from symbolics.node.call import Autocast, AutogradCall, ModuleOrigin
from symbolics.node.call_text import read_call, write_call
from symbolics.node.containers import ModulePlace, Slot, expand_leaves, slots
from symbolics.node.limits import MAX_ITEMS, MAX_RANK
from symbolics.node.names import CALL_ATTRIBUTE, ORT_DOMAIN, PYTHON_OP, PYTHON_OP_GRAD, is_operator
from symbolics.text import shown

__all__ = [
    "BOOL_FAMILIES",
    "GRAD_SPECS",
    "SPECS",
    "AttributeValue",
    "check_types",
    "family_of",
    "ir_attributes",
    "python_op_grad",
    "read_attributes",
    "tuples_of",
    "typed_attributes",
    "values_of",
    "with_gradient",
    "write_attributes",
    "wrong_tensors",
]

AttributeValue = str | int | list[int] | list[float]

_INT, _INTS, _FLOATS, _STRING = ir.AttributeType.INT, ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRING

#: attribute -> (type, required, meaning): the attributes of PythonOp, in the order they are written.
SPECS: dict[str, tuple[ir.AttributeType, bool, str]] = {
    "name": (_STRING, True, "The Function class as module:qualname, or the operator as namespace::name.overload."),
    "input_convention": (_STRING, True, "A letter per argument of apply: 'd' a tensor, 'c' anything else."),
    "input_requires_grads": (_INTS, True, "A flag per argument, tensor or not: whether it needs a gradient."),
    "input_tensor_types": (_INTS, True, "ONNX element types of the tensor arguments."),
    "input_tensor_ranks": (_INTS, True, "Ranks of the tensor arguments."),
    "output_tensor_types": (_INTS, True, "ONNX element types of the tensor outputs, without the context."),
    "output_tensor_ranks": (_INTS, True, "Ranks of the tensor outputs, without the context."),
    "output_tensor_requires_grads": (_INTS, True, "Which tensor outputs have a gradient."),
    "inplace": (_INT, False, "Whether an output reuses the memory of an input (mark_dirty)."),
    "training_mode": (_INT, False, "Whether the model was exported in training mode."),
    "input_int_scalars": (_INTS, False, "The int and bool arguments."),
    "input_int_scalar_positions": (_INTS, False, "Their positions among all arguments."),
    "input_float_scalars": (_FLOATS, False, "The float arguments, rounded to float32."),
    "input_float_scalar_positions": (_INTS, False, "Their positions among all arguments."),
    "input_int_tuples": (_INTS, False, "The tuples of ints, laid end to end."),
    "input_int_tuple_positions": (_INTS, False, "Their positions among all arguments."),
    "input_int_tuple_begins": (_INTS, False, "Where each begins in input_int_tuples."),
    "input_float_tuples": (_FLOATS, False, "The tuples of floats, laid end to end, rounded to float32."),
    "input_float_tuple_positions": (_INTS, False, "Their positions among all arguments."),
    "input_float_tuple_begins": (_INTS, False, "Where each begins in input_float_tuples."),
    "input_pointer_scalars": (_INTS, False, "0 for every other object: addresses do not survive a process."),
    "input_pointer_scalar_positions": (_INTS, False, "Their positions among all arguments."),
    CALL_ATTRIBUTE: (_STRING, False, "The call as JSON, without loss (docs/format.md)."),
}

GRAD_SPECS: dict[str, tuple[ir.AttributeType, bool, str]] = {
    "name": (_STRING, True, "The Function class as module:qualname."),
    "output_convention": (_STRING, True, "The input_convention of the PythonOp: a letter per output of backward."),
    "input_tensor_requires_grads": (_INTS, True, "Which of backward's tensor inputs have a gradient."),
    "output_tensor_requires_grads": (_INTS, True, "Which of backward's tensor outputs are wanted."),
    "input_tensor_types": (_INTS, False, "ONNX element types of backward's N tensor inputs."),
    "input_tensor_ranks": (_INTS, False, "Their ranks."),
    "output_tensor_types": (_INTS, False, "ONNX element types of backward's tensor outputs, one per tensor argument."),
    "output_tensor_ranks": (_INTS, False, "Their ranks."),
    "inplace": (_INT, False, "Whether an output reuses the memory of an input."),
    CALL_ATTRIBUTE: (_STRING, False, "The call of the PythonOp as JSON."),
}

#: What readers of other dialects know beside `SPECS`.
_DIALECT_SPECS = {"func_name": SPECS["name"], **{k.replace("_int_", "_bool_"): v for k, v in SPECS.items() if k.startswith("input_int_")}}

_FLOAT32_MAX = 3.4028234663852886e38
_INT64 = range(-(1 << 63), 1 << 63)


def _is_int(value: Any) -> bool:
    return type(value) in (int, bool) and value in _INT64


def _is_float32(value: Any) -> bool:
    # A finite float that float32 cannot reach would be written as inf.
    return type(value) is float and not _FLOAT32_MAX < abs(value) < float("inf")


def _is_tuple_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is tuple and len(value) > 0 and all(map(check, value))


_Families = list[tuple[str, Callable[[Any], bool]]]

# Families of typed attributes: prefix, and which values it takes. The first that takes a value has it.
_FAMILIES: _Families = [
    ("input_int_scalar", _is_int),
    ("input_float_scalar", _is_float32),
    ("input_int_tuple", _is_tuple_of(_is_int)),
    ("input_float_tuple", _is_tuple_of(_is_float32)),
]
#: The same for readers that have attributes for bools.
BOOL_FAMILIES: _Families = [
    ("input_bool_scalar", lambda value: type(value) is bool),
    ("input_bool_tuple", _is_tuple_of(lambda value: type(value) is bool)),
    *_FAMILIES,
]

_POINTER = "input_pointer_scalar"


def family_of(value: Any, families: _Families = _FAMILIES) -> str:
    """The prefix of the documented attributes that hold an argument which is no tensor: ``input_int_scalar``, ..."""
    return next((prefix for prefix, takes in families if takes(value)), _POINTER)


def typed_attributes(call: AutogradCall, families: _Families = _FAMILIES) -> dict[str, AttributeValue]:
    """The attributes that hold the arguments of a call which are no tensors, without ``call``."""
    out: dict[str, Any] = {}
    for position, value in enumerate(call.flat()):
        if isinstance(value, Slot):
            continue
        prefix = family_of(value, families)
        items = out.setdefault(f"{prefix}s", [])
        cast = float if "float" in prefix else int
        if prefix.endswith("tuple"):
            out.setdefault(f"{prefix}_begins", []).append(len(items))
            items += map(cast, value)
        else:
            items.append(0 if prefix == _POINTER else cast(value))
        out.setdefault(f"{prefix}_positions", []).append(position)
    return out


def write_attributes(call: AutogradCall, names: Callable[[Any], str | None] = lambda _: None) -> dict[str, AttributeValue]:
    """The attributes of the PythonOp for one call, in the order of `SPECS`.

    Args:
        call: The call.
        names: The name under which an object is registered, or None.

    Raises:
        ExportError: An argument has no portable form, or the call passes a limit of the format.
    """
    flags = iter(call.input_requires_grads)
    out: dict[str, AttributeValue] = {
        "name": call.name,
        "input_convention": call.convention,
        "input_requires_grads": [int(next(flags)) if letter == "d" else 0 for letter in call.convention],
        "input_tensor_types": list(call.input_types),
        "input_tensor_ranks": list(call.input_ranks),
        "output_tensor_types": list(call.output_types),
        "output_tensor_ranks": list(call.output_ranks),
        "output_tensor_requires_grads": [int(flag) for flag in call.output_requires_grads],
        "inplace": int(call.inplace),
        "training_mode": int(call.training),
    }
    typed = typed_attributes(call)
    out |= {name: typed[name] for name in SPECS if name in typed}
    out[CALL_ATTRIBUTE] = write_call(call, names)
    return out


def read_attributes(attributes: Mapping[str, Any], resolver: Resolver = unresolved) -> AutogradCall:
    """The call that the attributes of a PythonOp describe.

    Args:
        attributes: name -> value, as `values_of` gives them.
        resolver: Turns the names in ``call`` into Python objects; the default leaves them as text.

    Raises:
        FormatError: An attribute is missing, has another type, or contradicts ``call``.
        TrustError: From the resolver.
    """
    check_types(attributes, SPECS, PYTHON_OP)
    name, convention = attributes["name"], attributes["input_convention"]
    needed = _flags_of_tensors(attributes)
    if CALL_ATTRIBUTE in attributes:
        record = read_call(attributes[CALL_ATTRIBUTE], name)
        args = tuple(decode(value, resolver) for value in record.args)
        kwargs = {key: decode(value, resolver) for key, value in record.kwargs.items()}
        outputs = decode(record.outputs, resolver)
    else:
        record = None
        args, kwargs = _from_documented(attributes, name), {}
        count = len(attributes["output_tensor_types"])
        outputs = Slot(0) if count == 1 else tuple(map(Slot, range(count)))
    call = AutogradCall(
        id=record.id if record else "",
        name=name,
        args=args,
        kwargs=kwargs,
        outputs=outputs,
        input_types=tuple(attributes["input_tensor_types"]),
        input_ranks=tuple(attributes["input_tensor_ranks"]),
        input_requires_grads=needed,
        output_types=tuple(attributes["output_tensor_types"]),
        output_ranks=tuple(attributes["output_tensor_ranks"]),
        output_requires_grads=tuple(map(bool, attributes["output_tensor_requires_grads"])),
        inplace=bool(attributes.get("inplace", 0)),
        training=bool(attributes.get("training_mode", 0)),
        autocast=record.autocast if record else Autocast(),
        passed=record.passed if record else None,
        no_gradient=record.no_gradient if record else (),
        no_gradient_seen=record.no_gradient_seen if record else (),
        operator=record.operator if record else None,
        module=record.module if record else None,
    )
    _check_call(call, convention)
    return call


def _flags_of_tensors(attributes: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which tensor arguments need a gradient, from attributes that `check_types` has seen."""
    pairs = zip(attributes["input_requires_grads"], attributes["input_convention"], strict=True)
    return tuple(bool(flag) for flag, letter in pairs if letter == "d")


def check_types(
    attributes: Mapping[str, Any], specs: Mapping[str, tuple[ir.AttributeType, bool, str]], op: str, *, complete: bool = True
) -> None:
    """See that attributes are of their types and within the limits of docs/format.md.

    Args:
        attributes: name -> value, as `values_of` gives them.
        specs: `SPECS` or `GRAD_SPECS`.
        op: The operator, for messages.
        complete: Whether the required ones must be there; False also reads what the other dialects have.

    Raises:
        FormatError: An attribute is missing, of another type, too long, contradicts another, or holds an element type, a rank
            or a flag that there is none of.
    """
    python = {_INT: int, _STRING: str}
    for name, (kind, required, _) in {**specs, **({} if complete else _DIALECT_SPECS)}.items():
        if name not in attributes:
            if required and complete:
                raise FormatError(
                    f"a {op} lacks the attribute {name}: the file is damaged, or of a dialect that cannot be read back (docs/format.md)"
                )
            continue
        value, place = attributes[name], f"the attribute {name} of a {op}"
        if kind in python:
            ok = isinstance(value, python[kind])
        else:
            item = float if kind is _FLOATS else int
            ok = isinstance(value, (list, tuple)) and all(isinstance(v, item) for v in value)
        if not ok:
            raise FormatError.damaged(place, f"it is not of type {kind.name}")
        if kind in (_INTS, _FLOATS) and len(value) > MAX_ITEMS:
            raise FormatError.damaged(place, f"it holds {len(value)} numbers, more than the {MAX_ITEMS} that a file may hold")
        wrong = None
        if name.endswith("_tensor_types"):
            wrong = wrong_tensors(value, ())
        elif name.endswith("_tensor_ranks"):
            wrong = wrong_tensors((), value)
        elif name.endswith("requires_grads"):
            wrong = next((f"it holds {flag}, not 0 or 1" for flag in value if flag not in (0, 1)), None)
        if wrong is not None:
            raise FormatError.damaged(place, wrong)
    letters, flags = attributes.get("input_convention"), attributes.get("input_requires_grads")
    if letters is not None and flags is not None and (set(letters) - {"c", "d"} or len(flags) != len(letters)):
        what = f"input_convention {shown(letters)} and input_requires_grads do not go together"
        raise FormatError.damaged(shown(str(attributes.get("name", op))), what)


_ELEMENT_TYPES = frozenset(int(kind) for kind in ir.DataType if kind is not ir.DataType.UNDEFINED)


def wrong_tensors(types: Sequence[int], ranks: Sequence[int]) -> str | None:
    """What is wrong with element types and ranks that a node says; None for nothing."""
    for kind in types:
        if kind not in _ELEMENT_TYPES:
            return f"it holds {kind}, which is no element type of ONNX"
    for rank in ranks:
        if not 0 <= rank <= MAX_RANK:
            return f"it holds the rank {rank}, a tensor has 0 to {MAX_RANK} dimensions"
    return None


def tuples_of(attributes: Mapping[str, Any], prefix: str) -> list[tuple[Any, ...]]:
    """The tuples that a family of attributes lays end to end (``input_int_tuple``).

    Raises:
        FormatError: They do not begin one after the other. Each could then be as long as all of them together.
    """
    items, begins = attributes.get(f"{prefix}s", ()), attributes.get(f"{prefix}_begins", ())
    ends = [*begins[1:], len(items)]
    if any(not 0 <= begin <= end for begin, end in zip(begins, ends, strict=False)):
        raise FormatError.damaged(f"the attribute {prefix}_begins of a {PYTHON_OP}", "it does not go through its items in their order")
    return [tuple(items[begin:end]) for begin, end in zip(begins, ends, strict=False)]


def _check_call(call: AutogradCall, convention: str) -> None:
    inputs = slots((*call.args, *call.kwargs.values()))
    ok = (
        call.convention == convention
        and [slot.index for slot in inputs] == list(range(len(inputs)))
        and len(call.input_types) == len(call.input_ranks) == len(inputs)
        and call.output_slots == [Slot(i) for i in range(len(call.output_types))]
        and len(call.output_ranks) == len(call.output_requires_grads) == len(call.output_types)
        and (call.operator is None or is_operator(call.name))
        and (call.module is None or _is_of_module(call, call.module))
        and all(index < len(inputs) and call.input_requires_grads[index] for index in (*call.no_gradient, *call.no_gradient_seen))
    )
    if not ok:
        raise FormatError.damaged(shown(call.name), "its call attribute and its other attributes contradict each other")
    if call.module is None and any(type(leaf) is ModulePlace for leaf in expand_leaves((*call.args, *call.kwargs.values()))):
        raise FormatError.damaged(shown(call.name), "an argument is a module of the call, which has none")


#: The types of the parts of complex numbers.
_PARTS = (ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)


def _is_of_module(call: AutogradCall, origin: ModuleOrigin) -> bool:
    """Whether a call's first arguments are the state of its module, and its result ends in what the module changes."""
    count, changes, complex_ = len(origin.state), origin.changes, origin.complex
    return (
        not is_operator(call.name)
        and len(call.args) >= count
        and all(type(value) is Slot and value == Slot(i) for i, value in enumerate(call.args[:count]))
        and all(before < index < count for numbers in (changes, complex_) for before, index in zip((-1, *numbers), numbers, strict=False))
        and all(call.input_types[index] in _PARTS and call.input_ranks[index] > 0 for index in complex_)
        and (not changes or (type(call.outputs) is tuple and len(call.outputs) == 1 + len(changes) and call.inplace))
    )


def _from_documented(attributes: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """The arguments of a node without ``call``: what the documented attributes can say."""
    if attributes.get("input_pointer_scalars"):
        raise FormatError(
            f"{shown(name)}: an argument was written as an address of the exporting process, and there is no call attribute: "
            "export the model again with pythonop and save it without schema="
        )
    found: dict[int, Any] = {}
    for prefix, _ in _FAMILIES:
        items = tuples_of(attributes, prefix) if prefix.endswith("tuple") else attributes.get(f"{prefix}s", ())
        found.update(zip(attributes.get(f"{prefix}_positions", ()), items, strict=False))
    tensors = iter(range(len(attributes["input_convention"])))
    try:
        return tuple(Slot(next(tensors)) if letter == "d" else found[i] for i, letter in enumerate(attributes["input_convention"]))
    except KeyError as error:
        raise FormatError.damaged(shown(name), f"argument {error} stands in no attribute") from error


# ------------------------------------------------------------------------------------------------------- onnx_ir


def ir_attributes(values: Mapping[str, AttributeValue], specs: Mapping[str, tuple[ir.AttributeType, bool, str]] = SPECS) -> list[ir.Attr]:
    """The same as attributes of an onnx_ir node; empty lists keep their type."""
    return [ir.Attr(name, specs[name][0], tuple(value) if isinstance(value, list) else value) for name, value in values.items()]


def values_of(node: ir.Node) -> dict[str, Any]:
    """The attributes of an onnx_ir node as plain Python values.

    Raises:
        FormatError: An attribute holds a graph or a tensor, or refers to an attribute of a function.
    """
    out: dict[str, Any] = {}
    for name, attribute in node.attributes.items():
        if attribute.is_ref() or attribute.type not in (_INT, _INTS, _FLOATS, _STRING, ir.AttributeType.FLOAT):
            raise FormatError.damaged(
                f"the attribute {shown(name)} of the {node.op_type} {shown(node.name or '')!r}", "it is of an unexpected type"
            )
        value = attribute.value
        out[name] = list(value) if isinstance(value, (tuple, list)) else value
    return out


def with_gradient(node: ir.Node, wanted: Sequence[bool] | None = None, despite: Callable[[int], bool] = lambda _: False) -> list[bool]:
    """Which tensor inputs of a PythonOp its PythonOpGrad has a gradient for: those that need one, but where backward gives None.

    Where backward only gave None at the export, that holds while another gradient is wanted: it runs then, and one that comes all the
    same is an error. Where it would not run at all, nobody would know: there the gradient is wanted, and is zeros.

    Args:
        node: The PythonOp.
        wanted: Which should have a gradient; default: all.
        despite: Whether an input has one though backward gives None: it is zeros.

    Raises:
        FormatError: The node's attributes are not those of a PythonOp, or the counts do not fit.
    """
    values, name = values_of(node), shown(node.name or "")
    check_types(values, SPECS, PYTHON_OP)
    needed = _flags_of_tensors(values)
    if not len(needed) == len(values["input_tensor_types"]) == len(node.inputs):
        raise FormatError.damaged(f"the PythonOp {name!r}", f"it has {len(node.inputs)} inputs, its attributes say another number")
    wanted = [True] * len(needed) if wanted is None else wanted
    if len(wanted) != len(needed):
        raise FormatError(f"the PythonOp {name!r} has {len(needed)} tensor inputs, wanted= has {len(wanted)} flags")
    record = read_call(values[CALL_ATTRIBUTE], values["name"]) if CALL_ATTRIBUTE in values else None
    never, seen = (
        [i for i in found if not despite(i)] for found in ((record.no_gradient, record.no_gradient_seen) if record else ((), ()))
    )
    possible = [need and want and i not in never for i, (need, want) in enumerate(zip(needed, wanted, strict=True))]
    certain = [flag and i not in seen for i, flag in enumerate(possible)]
    return certain if any(certain) else possible


def python_op_grad(node: ir.Node, context: ir.Value, gradients: Sequence[ir.Value | None], wanted: Sequence[bool] | None = None) -> ir.Node:
    """The PythonOpGrad of a PythonOp.

    Args:
        node: The PythonOp.
        context: The value of its context output.
        gradients: N values, the gradients of its tensor outputs (without the context); None where there is none.
        wanted: Which of its tensor inputs that need one should have a gradient; default: as `with_gradient` says.

    Returns:
        A node with 1 + 2*N inputs (context, the N gradients, the N forward outputs as control dependency) and an
        output a tensor input; the name of an output is "" where no gradient is wanted.

    Raises:
        FormatError: The node's attributes are not those of a PythonOp, or the counts do not fit.
    """
    needed, values = with_gradient(node, wanted, lambda _: wanted is not None), values_of(node)
    outputs = list(node.outputs[1:])
    if len(gradients) != len(outputs):
        raise FormatError(f"the PythonOp {shown(node.name or '')!r} has {len(outputs)} tensor outputs, gradients= has {len(gradients)}")
    attributes: dict[str, AttributeValue] = {
        "name": values["name"],
        "output_convention": values["input_convention"],
        "input_tensor_requires_grads": values["output_tensor_requires_grads"],
        "output_tensor_requires_grads": [int(need) for need in needed],
        "input_tensor_types": values["output_tensor_types"],
        "input_tensor_ranks": values["output_tensor_ranks"],
        "output_tensor_types": values["input_tensor_types"],
        "output_tensor_ranks": values["input_tensor_ranks"],
        "inplace": 0,
    }
    if CALL_ATTRIBUTE in values:
        attributes[CALL_ATTRIBUTE] = values[CALL_ATTRIBUTE]
    # A Function without a tensor output would have no gradient to take: it has no PythonOpGrad either.
    grads = [
        ir.Value(
            name=None if need else "",
            type=ir.TensorType(ir.DataType(kind)) if need else None,
            shape=source.shape if need and source is not None else None,
        )
        for need, kind, source in zip(needed, values["input_tensor_types"], node.inputs, strict=True)
    ]
    return ir.Node(
        ORT_DOMAIN,
        PYTHON_OP_GRAD,
        [context, *gradients, *outputs],
        ir_attributes(attributes, GRAD_SPECS),
        outputs=grads,
        name=f"{node.name}_grad" if node.name else None,
    )
