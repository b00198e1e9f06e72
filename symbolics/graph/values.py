"""What is known of a node or a value, and how messages name it."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from symbolics.errors import UnsupportedOperatorError

__all__ = ["attr", "describe", "is_float", "rank_of", "static_shape", "unsupported"]

_MODULE_PATH_KEYS = ("pkg.torch.onnx.name_scopes", "namespace", "pkg.torch.onnx.scopes")


def attr(node: ir.Node, name: str, default: Any = None) -> Any:
    """The value of a node's attribute."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def is_float(value: ir.Value | None) -> bool:
    """Whether a gradient of this value can exist."""
    dtype = None if value is None else value.dtype
    return dtype is not None and dtype.is_floating_point()


def rank_of(value: ir.Value) -> int | None:
    """The rank, None where it is not known."""
    return None if value.shape is None else len(value.shape)


def static_shape(value: ir.Value) -> tuple[int, ...] | None:
    """The shape where every dim is a number, otherwise None."""
    dims = () if value.shape is None else tuple(value.shape)
    return None if value.shape is None or any(type(d) is not int for d in dims) else dims


def describe(node: ir.Node) -> str:
    """``Operator (node 'name' in module.path)`` for messages."""
    operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    path = next((node.metadata_props[k] for k in _MODULE_PATH_KEYS if k in node.metadata_props), "")
    outputs = ", ".join(repr(o.name) for o in node.outputs if o.name)
    where = f" in module {path}" if path else ""
    return f"{operator} (node {node.name!r} that makes {outputs}{where})"


def unsupported(node: ir.Node, reason: str) -> UnsupportedOperatorError:
    """The error of an operator whose gradient cannot be written; it says why and how to add a rule."""
    domain = f", domain={node.domain!r}" if node.domain else ""
    return UnsupportedOperatorError(
        f"no gradient for {describe(node)}: {reason}. Add or replace its rule with @exporter.gradient({node.op_type!r}{domain})"
        f" or overrides=, or leave what depends on it out of wrt or outputs."
    )
