"""AutogradCall <-> the attributes of a PythonOp, one table, both ways; and the PythonOpGrad of a PythonOp.

The documented attributes say what a reader of July 2021 would expect (scalars as float32, everything unusual as a
pointer of 0); the ``call`` attribute says the rest without loss. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from symbolics.errors import ExportError, FormatError
from symbolics.node.arguments import Resolver, decode, encode, loads, unresolved
from symbolics.node.call import Autocast, AutogradCall, OperatorOrigin
from symbolics.node.containers import Slot, slots
from symbolics.node.limits import MAX_BYTES, MAX_ITEMS, MAX_RANK
from symbolics.node.names import CALL_ATTRIBUTE, FORMAT_VERSION, ORT_DOMAIN, PYTHON_OP, PYTHON_OP_GRAD, is_operator
from symbolics.node.records import read_record
from symbolics.text import shown

__all__ = [
    "BOOL_FAMILIES",
    "GRAD_SPECS",
    "SPECS",
    "AttributeValue",
    "CallRecord",
    "check_types",
    "family_of",
    "ir_attributes",
    "python_op_grad",
    "read_attributes",
    "read_call",
    "tuples_of",
    "typed_attributes",
    "values_of",
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
    out[CALL_ATTRIBUTE] = _write_call(call, names)
    return out


def _write_call(call: AutogradCall, names: Callable[[Any], str | None]) -> str:
    data: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "id": call.id,
        "args": [_encode_part(call, f"argument {i}", value, names) for i, value in enumerate(call.args)],
        "kwargs": {
            _plain_key(call, key): _encode_part(call, f"keyword argument {key!r}", value, names) for key, value in call.kwargs.items()
        },
        "outputs": _encode_part(call, "its output", call.outputs, names),
    }
    if call.autocast.dtypes:
        data["autocast"] = {"dtypes": dict(sorted(call.autocast.dtypes.items())), "cache": call.autocast.cache}
    if call.passed is not None and call.passed != len(call.args):
        data["passed"] = call.passed
    if call.operator is not None:
        data["operator"] = vars(call.operator)
    text = json.dumps(data, separators=(",", ":"))
    if len(text) > MAX_BYTES:
        raise ExportError(
            f"{call.name}: the arguments of one call take {len(text)} bytes, a file may hold {MAX_BYTES}: pass large data as a tensor"
        )
    return text


def _encode_part(call: AutogradCall, place: str, value: Any, names: Callable[[Any], str | None]) -> Any:
    try:
        return encode(value, names)
    except ExportError as error:
        raise ExportError(f"{call.name}, {place}: {error}") from error


def _plain_key(call: AutogradCall, key: str) -> str:
    if encode(key) != key:
        raise ExportError(f"{call.name}: the name of the keyword argument {key!r} cannot be written: pass it in a dict")
    return key


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
        operator=record.operator if record else None,
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


@dataclass(frozen=True)
class CallRecord:
    """The ``call`` attribute as docs/format.md has it, its values not decoded."""

    version: int
    id: str
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: Any
    autocast: Autocast
    passed: int | None
    operator: OperatorOrigin | None


# What ``call`` may leave out.
_DEFAULTS: dict[str, Any] = {"autocast": {"dtypes": {}, "cache": True}, "passed": None, "operator": None}


def read_call(text: str, name: str) -> CallRecord:
    """The ``call`` attribute of a PythonOp or PythonOpGrad.

    Args:
        text: The attribute.
        name: The Function, for messages.

    Raises:
        FormatError: The text is not what docs/format.md says, or of a newer format.
    """
    data, place = loads(text), f"{shown(name)}: its call attribute"
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is int and version > FORMAT_VERSION:
        raise FormatError(
            f"{shown(name)}: its call has format {version}, this release reads up to {FORMAT_VERSION}: install a newer pythonop"
        )
    call: CallRecord = read_record({**_DEFAULTS, **data} if isinstance(data, dict) else data, CallRecord, place)
    if call.version != FORMAT_VERSION or (call.passed is not None and not 0 <= call.passed <= len(call.args)):
        raise FormatError.damaged(place, f"version {call.version} or passed {call.passed} is out of range")
    return call


def _check_call(call: AutogradCall, convention: str) -> None:
    inputs = slots((*call.args, *call.kwargs.values()))
    ok = (
        call.convention == convention
        and [slot.index for slot in inputs] == list(range(len(inputs)))
        and len(call.input_types) == len(call.input_ranks) == len(inputs)
        and call.output_slots == [Slot(i) for i in range(len(call.output_types))]
        and len(call.output_ranks) == len(call.output_requires_grads) == len(call.output_types)
        and (call.operator is None or is_operator(call.name))
    )
    if not ok:
        raise FormatError.damaged(shown(call.name), "its call attribute and its other attributes contradict each other")


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


def python_op_grad(node: ir.Node, context: ir.Value, gradients: Sequence[ir.Value | None], wanted: Sequence[bool] | None = None) -> ir.Node:
    """The PythonOpGrad of a PythonOp.

    Args:
        node: The PythonOp.
        context: The value of its context output.
        gradients: N values, the gradients of its tensor outputs (without the context); None where there is none.
        wanted: Which of its tensor inputs need a gradient; default: those that input_requires_grads names.

    Returns:
        A node with 1 + 2*N inputs (context, the N gradients, the N forward outputs as control dependency) and an
        output a tensor input; the name of an output is "" where no gradient is wanted.

    Raises:
        FormatError: The node's attributes are not those of a PythonOp, or the counts do not fit.
    """
    values = values_of(node)
    check_types(values, SPECS, PYTHON_OP)
    outputs = list(node.outputs[1:])
    convention = values["input_convention"]
    needed = list(_flags_of_tensors(values))
    if not len(needed) == len(values["input_tensor_types"]) == len(node.inputs):
        raise FormatError.damaged(
            f"the PythonOp {shown(node.name or '')!r}", f"it has {len(node.inputs)} inputs, its attributes say another number"
        )
    if wanted is not None:
        if len(wanted) != len(needed):
            raise FormatError(f"the PythonOp {shown(node.name or '')!r} has {len(needed)} tensor inputs, wanted= has {len(wanted)} flags")
        needed = [need and want for need, want in zip(needed, wanted, strict=True)]
    if len(gradients) != len(outputs):
        raise FormatError(f"the PythonOp {shown(node.name or '')!r} has {len(outputs)} tensor outputs, gradients= has {len(gradients)}")
    attributes: dict[str, AttributeValue] = {
        "name": values["name"],
        "output_convention": convention,
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
