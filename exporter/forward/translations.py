"""Translations of operators that fail: torch's own, or those that the user gave."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from symbolics import torch_private as private
from symbolics.capture.recorder import Recorder
from symbolics.errors import ExportError, PythonopError
from symbolics.node.operators import Operator, is_foreign
from symbolics.text import cause

__all__ = ["check_table", "name_untranslated"]

# How torch.onnx shows the node that it stumbled over, and the operator in it.
_NODE = re.compile(r"translating node %\S+.*\[target=torch\.ops\.(\w+)\.(\w+)\.(\w+)\]")


def check_table(table: Any) -> set[Any]:
    """The operators of a ``custom_translation_table``, which torch looks up by the overload that was called.

    Raises:
        ExportError: It is no dictionary, or a key is the name of an operator, or stands for all overloads of one: torch would pass it by.
    """
    if not isinstance(table or {}, Mapping):
        raise ExportError(f"custom_translation_table={table!r:.100} is no dictionary: {{torch.ops.aten.relu.default: a function}} is one")
    _, packet = private.operator_classes()
    for key in table or ():
        if callable(key) and not isinstance(key, packet) and type(key).__name__ != "CustomOpDef":
            continue  # an overload, or a function of Python that torch.export keeps: operator.add
        found = re.search(r"(\w+)(?:::|\.)(\w+)(?:\.(\w+))?", repr(key))
        one = ".".join([*filter(None, found.groups()), "default"][:3]) if found else "aten.relu.default, for example,"
        raise ExportError(
            f"custom_translation_table: the key {key!r:.100} is no overload of an operator, and torch.onnx looks up nothing else; "
            f"way out: torch.ops.{one} as the key"
        )
    return set(table or ())


def name_untranslated(error: BaseException, recorder: Recorder, given: Collection[Any]) -> None:
    """Say which operator of torch.library an exporter could not translate, and what to do, where it was one.

    Args:
        error: What torch's exporter raised.
        recorder: It knows where operators were called.
        given: The operators that the user gave translations of.

    Raises:
        ExportError: It was one.
    """
    found, first, step = None, error, error
    while step is not None and not isinstance(step, PythonopError):
        found = _NODE.search(str(step)) or found
        first, step = step, step.__cause__  # type: ignore[assignment]
    if found is None or isinstance(step, PythonopError):
        return
    namespace, name, overload = found.groups()
    called = private.find_overload(f"{namespace}::{name}", overload)
    if called is None or not is_foreign(called):
        return
    operator = Operator.of(called)
    module, source = recorder.capture.translated.get(operator.name, ("", ""))
    whose = "the translation that custom_translation_table gives" if called in given else "torch.onnx's own translation"
    what = f"{whose} fails: {cause(first)}"
    if "No ONNX function found" in str(first):
        what = "nothing translates it to ONNX, and it is called where no PythonOp can stand (by an operator that is inlined, or in C++)"
    ways = [
        "mend it" if called in given else f"give another, custom_translation_table={{torch.ops.{namespace}.{name}.{overload}: ...}}",
        *([f"export what it is made of, inline=[{operator.name!r}]"] if private.is_python_kernel(called, "CPU") else []),
        "or export with dynamo=False",
    ]
    raise ExportError(
        f"{operator.name}, called in module {module or '<root>'} at {source or 'a line unknown'}: {what}\n  way out: {'; '.join(ways)}"
    ) from error
