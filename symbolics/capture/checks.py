"""Checks of values in a forward: ``if (var < 0).any(): raise ValueError``, ``assert mask.any()``.

torch.export has no values to check, and fails; TorchScript checks the example's and goes on. A check that only raises changes no result: it is
passed, with a warning, and is not in the file.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import types
from typing import Any

from symbolics.users import warn

__all__ = ["chunks_of", "is_a_check", "may_lack_chunks", "only_raises", "passed"]

_Lines = tuple[int, int]


def passed(frame: types.FrameType, module: str, source: str) -> bool | None:
    """What a condition must be so that the check around it passes; None where there is no check, or one that does more than raise.

    Args:
        frame: Where the truth of a tensor is asked for.
        module, source: The module and the line of the user's code, for the warning.
    """
    raising = next((raising for asked, raising in _checks(frame.f_code.co_filename) if asked[0] <= frame.f_lineno <= asked[1]), None)
    steps = list(dis.get_instructions(frame.f_code))
    here = next(i for i, step in enumerate(steps) if step.offset == frame.f_lasti)
    jump = steps[here + 1] if steps[here].opname == "TO_BOOL" else steps[here]
    if raising is None or "JUMP" not in jump.opname or ("TRUE" in jump.opname) == ("FALSE" in jump.opname):
        return None
    places = {step.offset: i for i, step in enumerate(steps)}
    target = places[jump.argval]
    while steps[target].opname in ("POP_TOP", "NOP", "JUMP_FORWARD"):  # the way out of a comparison of three
        target = places[steps[target].argval] if steps[target].opname == "JUMP_FORWARD" else target + 1
    line = steps[target].positions.lineno if steps[target].positions else None  # type: ignore[union-attr]
    raises = line is not None and raising[0] <= line <= raising[1]
    warn(
        f"a check in module {module or '<root>'} at {source} depends on the values of a tensor: it is not in the file, which computes what the "
        "model does where the check passes."
    )
    return ("TRUE" in jump.opname) != raises


def only_raises(frame: types.FrameType) -> bool:
    """Whether a condition that is asked in this line is that of an assert, or of an if that raises and does no more."""
    return is_a_check(frame.f_code.co_filename, frame.f_lineno)


def is_a_check(file: str, line: int) -> bool:
    """Whether a line asks for the condition of an assert, or of an if that raises and does no more."""
    return any(asked[0] <= line <= asked[1] for asked, _ in _checks(file))


@functools.lru_cache(maxsize=64)
def _checks(filename: str) -> list[tuple[_Lines, _Lines]]:
    """The checks of a file, inner ones first: the lines in which conditions are asked, and those that raise."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            lines = node.lineno, node.end_lineno or node.lineno
            found.append((lines, lines))
        elif isinstance(node, ast.If):
            for body in (node.body, node.orelse):
                if body and isinstance(body[-1], ast.Raise) and all(isinstance(line, (ast.Assign, ast.Expr)) for line in body[:-1]):
                    asked = node.lineno, node.test.end_lineno or node.lineno
                    found.append((asked, (body[0].lineno, body[-1].end_lineno or body[-1].lineno)))
                    break
    return found[::-1]


def may_lack_chunks(parts: Any) -> bool:
    """Whether PyTorch takes an axis of some size above 1 into fewer chunks than it is asked for."""
    return type(parts) is int and parts > 2


def chunks_of(parts: int, axis: str) -> str:
    """What is wrong where a file has as many chunks at every size."""
    return (
        f"takes a tensor apart along {axis}: the file has {parts} parts at every size, the last of them empty where PyTorch gives fewer (of 4 rows, "
        "chunk(3) gives 2): use sizes that are a multiple, write it with operations on the whole axis, or give the axis a fixed size."
    )
