"""What torch.export knows and assumes of open sizes: the ShapeEnv of a capture, which has no public way in."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

__all__ = ["answers_of_sizes_watched", "found_equal", "is_multiple", "settled_sizes", "sizes_taken_for_one", "sizes_watched"]


@contextlib.contextmanager
def answers_of_sizes_watched(asked: Callable[[FrameType | None, str, bool | int | float], None]) -> Iterator[None]:
    """While the block runs, tell of each truth and each number of a size that torch.export could only find in the example.

    SymBool.__bool__, SymInt.__int__, SymInt.__index__ and SymFloat.__float__ are nowhere a public hook.

    Args:
        asked: Takes the frame that asked, what it asked for, and the answer.
    """

    def assumed(env: Any, expression: Any) -> Any:
        if env is None:
            return None
        return len(env.guards), env.num_deferred_runtime_asserts, [env.var_to_range.get(size) for size in expression.free_symbols]

    def watching(original: Any) -> Any:
        def watched(self: Any) -> Any:
            env, expression = getattr(self.node, "shape_env", None), getattr(self.node, "expr", None)
            before = assumed(env, expression)
            result = original(self)
            frame = sys._getframe(1)
            if assumed(env, expression) != before or (
                env is not None and not _of_torch(frame) and _assumed_before(env, expression, result)
            ):
                asked(frame, str(expression), result)
            return result

        return watched

    methods = [(torch.SymBool, "__bool__"), (torch.SymInt, "__int__"), (torch.SymInt, "__index__"), (torch.SymFloat, "__float__")]
    originals = [getattr(kind, name) for kind, name in methods]
    for (kind, name), original in zip(methods, originals, strict=True):
        setattr(kind, name, watching(original))
    try:
        yield
    finally:
        for (kind, name), original in zip(methods, originals, strict=True):
            setattr(kind, name, original)


def _of_torch(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").startswith("torch.")


def _assumed_before(env: Any, condition: Any, answer: bool | int | float) -> bool:
    """Whether a condition has its answer of an earlier assumption of torch: that a size is not 0 or 1, without which it could not tell the layout.

    An assumption that leaves out other sizes too, as narrow() and reshape() make, is of an operator that takes no others.
    """
    if not isinstance(answer, bool) or not hasattr(condition, "free_symbols"):
        return False
    hints = env.backed_var_to_val
    asserts = [*_assumptions(env), *(guard.expr for guard in env.guards)]
    for size in condition.free_symbols.intersection(hints):
        # torch.onnx's second attempt starts every range at 2 where no Dim says otherwise.
        lowest = env.var_to_range[size].lower
        whole = lowest == 2 and not hasattr(_sizes_of_inputs(env).get(size), "vr")
        for small in (0, 1):
            at = {**hints, size: small}
            if (small < lowest and not whole) or condition.subs(at) == answer:
                continue
            broken = [one for one in asserts if size in one.free_symbols and _fails(one, at)]
            if (broken or whole) and all(getattr(one, "rel_op", None) == "!=" for one in broken):
                return True
    return False


def sizes_taken_for_one(program: torch.export.ExportedProgram) -> list[str]:
    """The conditions on open sizes that torch.export has assumed, and that hold at size 1 alone, as the example has."""
    env = _environment(program)
    if env is None:
        return []
    hints = env.backed_var_to_val
    ones = [size for size, limits in _sizes_of_inputs(env).items() if limits is not None and hints[size] == 1]

    def only_there(condition: Any) -> bool:
        return any(size in condition.free_symbols and _fails(condition, {**hints, size: 2}) for size in ones)

    return [f"torch.export has taken it for fixed ({one})" for one in _assumptions(env) if only_there(one)]


def is_multiple(size: Any, number: int) -> bool:
    """Whether an open size is a multiple of a number whatever the open axes are; nothing is assumed of them. Private: the expression of a size."""
    rest = size % number
    return rest == 0 if type(rest) is int else rest.node.expr == 0


def found_equal(program: torch.export.ExportedProgram) -> dict[str, str]:
    """Open sizes that torch.export has found to be others, by their symbols: it does so in the end with those of one Dim."""
    env = _environment(program)
    return {} if env is None else {str(size): str(env.replace(size)) for size in env.replacements}


def settled_sizes(program: torch.export.ExportedProgram) -> dict[str, int | str]:
    """What the sizes are that torch left open and the model does not: those that nobody named, by their symbols.

    A broadcast has found that one is 3. Of a product (labels that were flattened), each is one that was named and as long in the example, or a
    number, where the condition holds then at all sizes.
    """
    env = _environment(program)
    if env is None:
        return {}
    ranges, hints = env.var_to_range, env.backed_var_to_val
    found: dict[Any, Any] = {size: limits.lower for size, limits in ranges.items() if limits.lower == limits.upper and limits.lower > 1}
    sizes = _sizes_of_inputs(env)
    named = [size for size, limits in sizes.items() if limits is not None]
    others = [size for size, limits in sizes.items() if limits is None]
    of_one_row = 1 in (hints[size] for size in named)  # then what is 1 may be a row as well
    for one in _assumptions(env):
        free = [size for size in others if size in one.free_symbols and size not in found and (hints[size] > 1 or not of_one_row)]
        if not free or len(free) > 3 or getattr(one, "rel_op", None) != "==":
            continue
        # By the order of the axes: of a square example, the first is the first.
        values = [[*(size for size in named if hints[size] == hints[each]), hints[each]] for each in free]
        for chosen in itertools.product(*values):
            if len(set(chosen)) == len(chosen) and str(one.subs({**found, **dict(zip(free, chosen, strict=True))})) == "True":
                found |= dict(zip(free, chosen, strict=True))
                break
    return {str(size): str(value) if value in named else int(value) for size, value in found.items()}


def _sizes_of_inputs(env: Any) -> dict[Any, Any]:
    """The open sizes of the inputs, in the order of these and of their axes: size -> what a name or Dim says of it, None where there is none."""
    found: dict[Any, Any] = {}
    for tensor in env.tracked_fakes or ():
        if isinstance(tensor.fake, torch.Tensor):
            for axis, limits in zip(tensor.fake.shape, tensor.symbolic_context.constraint_sizes, strict=False):
                if isinstance(axis, torch.SymInt) and axis.node.expr in env.backed_var_to_val:
                    found[axis.node.expr] = found.get(axis.node.expr) or limits
    return found


def _environment(program: torch.export.ExportedProgram) -> Any:
    return next((value.node.shape_env for node in program.graph.nodes for value in _symbols(node.meta.get("val"))), None)


def _assumptions(env: Any) -> list[Any]:
    """The conditions that torch puts off until the program runs, and torch.onnx drops."""
    return [one.expr for some in env.deferred_runtime_asserts.values() for one in some]


def _fails(condition: Any, sizes: dict[Any, Any]) -> bool:
    """Whether a condition is known to be false at these sizes; it may have other symbols."""
    return str(condition.subs(sizes)) == "False"


def _symbols(value: Any) -> list[Any]:
    sizes = value.shape if isinstance(value, torch.Tensor) else [value]
    return [size for size in sizes if isinstance(size, torch.SymInt)]


@contextlib.contextmanager
def sizes_watched(shape_env: Any) -> Iterator[list[Any]]:
    """Run forward on fake tensors without a trace in the export's own shape reasoning.

    What forward asks of a size (a branch, int()) is asked again at every run of the node, so it must not become a
    condition of the whole graph; nor are forward's own data-dependent sizes those of the op that stands for it.

    Yields:
        The sizes that forward turned into numbers, and what it asked that nobody can tell without values: output shapes computed from those hold for the example only.
    """
    asked: list[Any] = []
    if shape_env is None:
        yield asked
        return
    evaluate = shape_env.evaluate_expr

    def watched(expression: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = evaluate(expression, *args, **kwargs)
        except Exception:  # which forward may catch
            asked.append(expression)
            raise
        if expression.free_symbols and not getattr(expression, "is_Boolean", False) and not getattr(expression, "is_Relational", False):
            asked.append(expression)
        return result

    with shape_env.ignore_fresh_unbacked_symbols(), shape_env.suppress_guards():
        shape_env.evaluate_expr = watched
        try:
            yield asked
        finally:
            del shape_env.evaluate_expr
