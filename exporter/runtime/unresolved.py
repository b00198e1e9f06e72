"""PythonOps in a session that is opened and never run: nobody looks for their Functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from exporter.files.trust import Gate
from exporter.runtime.binding import Binding
from exporter.runtime.kernels import PythonOp, check_element_types
from exporter.runtime.library import bind
from exporter.runtime.store import ContextStore
from symbolics.errors import PythonopError
from symbolics.node.attributes import read_attributes
from symbolics.node.names import PYTHON_OP_TANGENT
from symbolics.text import shown

__all__ = ["know_python_ops"]


def know_python_ops(options: Any) -> Mapping[str, BaseException]:
    """Give options operators of ours that open and do not run.

    Returns:
        What is wrong with nodes of ours that a session was to be made of, filled while it is made.
    """
    return bind(options, _Unresolved(Gate(()), ContextStore())).errors


class _Forward(PythonOp):
    """What the attributes say of a call is all that a session asks for before it runs."""

    def __init__(self, attributes: Mapping[str, Any], gate: Gate, store: ContextStore, node_name: str = "") -> None:
        self.title = f"{self.op_type} {shown(node_name)!r}"
        try:
            self.call = read_attributes(attributes)
            check_element_types((*self.call.input_types, *self.call.output_types))
        except PythonopError as error:
            raise error.at(self.title) from error
        self.title += f" ({shown(self.call.name)})"
        self.flags, self.args, self.simple = self.call.input_requires_grads, (), False
        self.apply = _never


class _Tangent(_Forward):
    op_type = PYTHON_OP_TANGENT


class _Unresolved(Binding):
    kernels: ClassVar[dict[str, Any]] = {"forward": _Forward, "tangent": _Tangent}


def _never(*args: Any) -> Any:
    raise AssertionError("this session is not for running")
