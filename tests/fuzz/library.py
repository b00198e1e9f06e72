"""Files that name operators of torch.library as no exporter writes them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import torch

from symbolics.node.operators import Operator
from tests.exporter.runtime import build
from tests.fuzz import functions  # noqa: F401  (it registers the operator)

__all__ = ["damaged_operators"]


def damaged_operators() -> Iterator[tuple[str, Callable[[], onnx.ModelProto]]]:
    """Operators that nothing allows, that nobody has, and that do not fit."""
    for name in (
        "aten::from_file.default",
        "aten::save.default",
        "fuzz_operators::gone.default",
        "fuzz_operators::scaled",
        "::x.y",
        "fuzz_operators::scaled.__class__",
    ):
        yield f"operator {name}", lambda name=name: _operator(name)
    for module in ("tests.fuzz.forbidden", "__main__", "os", "", "\x1b[2J"):
        yield f"registered by {module!r}", lambda module=module: _operator("fuzz_operators::gone.default", module=module)
    for args in (
        [],
        [{"$tensor": 0}],
        [{"$tensor": 0}, "x", [1], "up"],
        [{"$tensor": 0}, 0.5, [[]], "up"],
        [{"$tensor": 0}, 0.5, [1 << 40], "up", 1],
    ):
        yield f"arguments {args}", lambda args=args: _operator(args=args)


def _operator(
    name: str = "fuzz_operators::scaled.default", module: str = "tests.fuzz.functions", args: list[Any] | None = None
) -> onnx.ModelProto:
    call = build.record(Operator.of(torch.ops.fuzz_operators.scaled.default), torch.ones(2, 4, requires_grad=True), 0.5, [1, 2], "up")
    model = build.forward(dataclasses.replace(call, name=name))
    letters = ["d" if type(value) is dict else "c" for value in args] if args is not None else []
    for attribute in model.graph.node[0].attribute:
        if attribute.name == "input_convention" and args is not None:
            attribute.s = "".join(letters).encode()
        elif attribute.name == "input_requires_grads" and args is not None:
            attribute.ints[:] = [int(letter == "d") for letter in letters]
        elif attribute.name == "call":
            said = json.loads(attribute.s)
            said |= {"operator": {"schema": "\x1b[2J" * 99, "module": module}} | ({"args": args} if args is not None else {})
            attribute.s = json.dumps(said).encode()
    return model
