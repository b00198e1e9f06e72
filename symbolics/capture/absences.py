"""What a function sets only where it is absent, as a memo does (`if key not in cache: cache[key] = table(key)`), or puts back in the end."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

__all__ = ["Absences"]

#: What a tensor is asked for that is none of its numbers.
_KINDS = frozenset(
    "device dim dtype element_size is_cuda itemsize layout names ndim ndimension numel requires_grad shape size stride type".split()
)
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

        self.put_back = frozenset(_put_back(node))

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

    def kind_of(self, target: ast.expr, value: ast.expr | None, absent: Set[str]) -> str:
        """What an assignment does.

        Returns:
            "memo": it sets what is absent, to what it would be in the next call, too, or what is put back in the end; "once": it sets what is absent,
            to what the first call says; "": it changes what is there.
        """
        if ast.unparse(target) in self.put_back:
            return "memo"
        keys = [target.slice] if isinstance(target, ast.Subscript) else []
        if value is None or ast.unparse(target.value if isinstance(target, ast.Subscript) else target) not in absent:
            return ""
        return "memo" if self.is_computed_of([value], keys) else "once"

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
            if isinstance(function, ast.Name) and function.id in ("hasattr", "getattr") and len(args) > 1:
                return f"{ast.unparse(args[0])}.{ast.unparse(args[1]).strip(chr(39))}"
        return ast.unparse(expression)


def _put_back(node: ast.AST) -> Iterator[str]:
    """What a ``finally`` sets to what it was before, or counts down again."""
    changed = Counter(ast.unparse(each.target) for each in ast.walk(node) if isinstance(each, ast.AugAssign))
    for part in ast.walk(node):
        for each in part.finalbody if isinstance(part, ast.Try) else ():
            if isinstance(each, ast.Assign) and isinstance(each.value, (ast.Name, ast.Constant)):
                yield from map(ast.unparse, each.targets)
            elif isinstance(each, ast.AugAssign) and changed[ast.unparse(each.target)] > 1:
                yield ast.unparse(each.target)
