"""What a function sets only where it is absent, as a memo does: `if key not in cache: cache[key] = table(key)`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

__all__ = ["Absences"]

#: What a tensor is asked for that is none of its numbers.
_KINDS = frozenset("device dim dtype element_size is_cuda itemsize layout names ndim ndimension numel requires_grad shape size stride type".split())
_NO_VALUES = frozenset("id isinstance len type".split())


class Absences:
    """Reads the tests of a function, and what it computes of what.

    Texts of expressions stand for what they lead to.
    """

    def __init__(self, node: ast.AST, aliases: Mapping[str, ast.expr], tainted: Set[str]) -> None:
        """Args:
        node: The function.
        aliases: Its variables that are other names of something.
        tainted: Its parameters that hold what differs from call to call.
        """
        self._aliases = aliases
        self._origins = {name: {name} for name in tainted}
        assigned = [each for each in ast.walk(node) if isinstance(each, (ast.Assign, ast.AugAssign, ast.NamedExpr))]
        for each in sorted(assigned, key=lambda one: one.lineno):
            found = self.origins(each.value)
            for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
                for name in ast.walk(target) if found else ():
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                        self._origins[name.id] = self._origins.get(name.id, set()) | found

    def origins(self, expression: ast.AST) -> set[str]:
        """The parameters whose values, not shapes or types alone, an expression is computed from."""
        if isinstance(expression, ast.Name):
            return self._origins.get(expression.id, set())
        if isinstance(expression, ast.Attribute) and expression.attr in _KINDS:
            return set()
        if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name) and expression.func.id in _NO_VALUES:
            return set()
        return {name for child in ast.iter_child_nodes(expression) for name in self.origins(child)}

    def is_computed_of(self, values: Sequence[ast.expr], keys: Iterable[ast.expr]) -> bool:
        """Whether what is kept is made of what it is kept by, so that the next call would make the same."""
        return {name for each in values for name in self.origins(each)} <= {name for each in keys for name in self.origins(each)}

    def is_memo(self, target: ast.expr, value: ast.expr | None, absent: Set[str]) -> bool:
        """Whether an assignment sets what is absent, to what it would have in the next call, too."""
        keys = [target.slice] if isinstance(target, ast.Subscript) else []
        name = target.value if isinstance(target, ast.Subscript) else target
        return value is not None and ast.unparse(name) in absent and self.is_computed_of([value], keys)

    def of(self, test: ast.expr) -> tuple[frozenset[str], frozenset[str]]:
        """What a test says is absent where it holds, and where it does not."""
        nothing = frozenset[str]()
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return tuple(reversed(self.of(test.operand)))  # type: ignore[return-value]
        if isinstance(test, ast.BoolOp):
            both = [self.of(each) for each in test.values]
            then, other = (frozenset[str]().union(*parts) for parts in zip(*both, strict=True))
            return then, other
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            op, right = test.ops[0], test.comparators[0]
            if isinstance(op, (ast.In, ast.NotIn)):
                found = frozenset([self._text(right)])
            elif isinstance(op, (ast.Is, ast.IsNot)) and isinstance(right, ast.Constant) and right.value is None:
                found = frozenset([self._text(test.left)])
            else:
                return nothing, nothing
            return (found, nothing) if isinstance(op, (ast.NotIn, ast.Is)) else (nothing, found)
        return nothing, frozenset([self._text(test)])

    def looked_up(self, statements: Iterable[ast.stmt]) -> Iterator[str]:
        """What statements look into, which raises where it is absent."""
        for statement in statements:
            for each in ast.walk(statement):
                if isinstance(each, ast.Subscript):
                    yield ast.unparse(each.value)
                elif isinstance(each, (ast.Attribute, ast.Name)):
                    yield ast.unparse(each)

    def _text(self, expression: ast.expr) -> str:
        """The text of what is asked for: of `cache.get(key)`, `cache[key]` and a variable that holds it, `cache`."""
        if isinstance(expression, ast.NamedExpr):
            return self._text(expression.value)
        if isinstance(expression, ast.Name) and expression.id in self._aliases:
            return self._text(self._aliases[expression.id])
        if isinstance(expression, ast.Subscript):
            return ast.unparse(expression.value)
        if isinstance(expression, ast.Call):
            function, args = expression.func, expression.args
            if isinstance(function, ast.Attribute) and function.attr == "get":
                return ast.unparse(function.value)
            if isinstance(function, ast.Name) and function.id in ("hasattr", "getattr") and isinstance(args[1], ast.Constant):
                return f"{ast.unparse(args[0])}.{args[1].value}"
        return ast.unparse(expression)
