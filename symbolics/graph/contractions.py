"""Einsum as Mul and ReduceSum, as MatMul, or as what moves axes alone: `contract` writes one with what is quickest on onnxruntime's CPU.

`contract_product` does so for a contraction that a model spells out, as a Mul and a ReduceSum.

What is wrong with Einsum: onnxruntime (1.16 to 1.32) makes a product of matrices of each pair of operands, after transpositions of its own. Where
the matrices are tiny (``ca,cab->cab`` has as many of 1 x 1 as c and a have elements), each costs about 95 ns, whatever is in it: an elementwise
product of 836 x 64 numbers takes 4.7 ms in place of 0.03. Letters whose size is 1 count as any other. docs/figures.md has what each form takes.

An operand is a value with a letter for each axis. A letter is *single* in an operand where its size is known to be 1: such an axis is stretched, as
numpy does, or goes. Of two operands, the letters that are not single are of four kinds: ``batch`` (in both, and wanted), ``summed`` (in both, not
wanted), ``left`` and ``right`` (in one alone, and wanted); what is in one alone and not wanted is summed before.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from symbolics.errors import UnsupportedOperatorError
from symbolics.graph.builder import Builder
from symbolics.graph.einsum import subscripts
from symbolics.graph.shapes import dims_of, same_dim
from symbolics.graph.values import attr, made_by, rank_of, static_shape

__all__ = ["FLOATS", "OPEN", "contract", "contract_product", "shape_of_product"]

_Size = Callable[[], int | ir.Value]
_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64})
FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})
OPEN = 300  # what an open size is taken for where forms are compared
_MANY = 8  # operands: orders of more are not searched for

# Nanoseconds of onnxruntime 1.32 on one thread, float32; measured by `python -m benchmarks.contractions`.
_NODE = 2e3
_MOVED, _AS_ONE, _BLOCK = 9.0, 0.9, 12.0  # an element of a Transpose; where one axis moves; the last axis as a whole where it stays
_PRODUCT, _SPAN = 0.4, 15.0  # an element of a Mul; a stretch of it in which each operand goes on or stands still
_ADDED, _ROW = 0.4, 5.0  # an element of a ReduceSum over the last axes; a row of them
_ADDED_ACROSS, _ONE_BY_ONE = (
    0.1,
    1.8,
)  # an element of a ReduceSum over other axes, beside a _MATRIX for all that stand before them; where it goes one by one
_MATRIX, _TERM = 95.0, 0.06  # a matrix of a MatMul; a product of two numbers in it

#: A contraction that is spelled out becomes a MatMul where its Mul makes so many times the elements of an operand, and the MatMul takes so much of the time,
#: and at least so many ns less.
_LARGER, _QUICKER, _GAIN = 2, 0.7, 1e4


@dataclass(frozen=True)
class _Operand:
    """A value with a letter for each of its axes, and their sizes: a number, a symbol, or None."""

    value: ir.Value
    letters: str
    dims: tuple[Any, ...]

    def dim(self, letter: str) -> Any:
        """The size along a letter that it has."""
        return self.dims[self.letters.index(letter)]

    @property
    def real(self) -> str:
        """The letters that are not single."""
        return "".join(letter for letter, dim in zip(self.letters, self.dims) if dim != 1)


@dataclass(frozen=True)
class _Product:
    """A form of one product: the letters in the order in which it has them, for a MatMul in four groups, and what it takes in ns."""

    cost: float
    order: str = ""
    groups: tuple[str, str, str, str] | None = None  # batch, left, summed, right
    swapped: bool = False


def contract(op: Builder, node: ir.Node) -> ir.Value | None:
    """What an Einsum computes, in other operators.

    Args:
        op: Takes the nodes.
        node: The Einsum.

    Returns:
        The value; None where Einsum should stay: for element types other than float32, float64, int32 and int64 (a sum in halves
        would be rounded twice), letters that an operand has twice, operands that surely have no element, ranks that an ellipsis needs and nobody
        knows, and products over open sizes that may differ.
    """
    xs = [x for x in node.inputs if x is not None]
    if len(xs) != len(node.inputs) or not xs or len(xs) > _MANY or any(x.dtype not in _TYPES or x.dtype != xs[0].dtype for x in xs):
        return None
    try:
        terms, output = subscripts(node, [rank_of(x) for x in xs], attr(node, "equation") or "")
    except UnsupportedOperatorError:
        return None
    apart = all(len(set(term)) == len(term) for term in (*terms, output))
    if not apart or set(output) - set("".join(terms)) or any(0 in (static_shape(x) or ()) for x in xs):
        return None
    operands = [_before_transpose(x, term) for x, term in zip(xs, terms)]
    return _Planner(op).run(operands, output)


def _before_transpose(x: ir.Value, term: str) -> _Operand:
    """An operand as it is before a Transpose: its axes are moved once, to where they should be, or not at all."""
    while (turn := made_by(x, "Transpose")) is not None and (before := turn.inputs[0]) is not None:
        perm = attr(turn, "perm", None) or range(len(term))[::-1]
        letters = dict(zip(perm, term))
        x, term = before, "".join(letters[place] for place in range(len(term)))
    return _Operand(x, term, tuple(x.shape) if x.shape is not None else (None,) * len(term))


def contract_product(op: Builder, x: ir.Value, axes: Sequence[int]) -> ir.Value | None:
    """The sum over some axes of a product, as a MatMul.

    Args:
        op: Takes the nodes.
        x: What is summed.
        axes: The axes, none negative.

    Returns:
        The sum, without these axes; None where x is no Mul of float32 or float64, where something else reads its values, or the body of a loop, where an operand has
        nearly as many elements or none along a summed axis, and where a MatMul is not quicker.
    """
    product = made_by(x, "Mul")
    others = [use.node for use in x.uses() if use.node.op_type != "Shape"]
    if product is None or x.dtype not in FLOATS or x.is_graph_output() or [other.graph for other in others] != [product.graph]:
        return None
    if (operands := _operands(product)) is None:
        return None
    letters = max((each.letters for each in operands), key=len)
    a = _before_expand(operands[0], operands[1])
    b = _before_expand(operands[1], a)
    summed = [letters[axis] for axis in axes]
    if not all(letter in a.real and letter in b.real and same_dim(a.dim(letter), b.dim(letter)) for letter in summed):
        return None
    sizes = _sizes(a, b)
    order = "".join(letter for letter in letters if letter in a.real + b.real)
    goal = "".join(letter for letter in order if letter not in summed)
    if _elements(order, sizes) < _LARGER * max(1, *(_elements(each.real, sizes) for each in (a, b))):
        return None
    best = min(_matrices(a, b, summed, sizes, goal), key=lambda form: form.cost)
    before = _in_full(order, a, b, summed, sizes, goal)
    if best.groups is None or best.cost > min(_QUICKER * before, before - _GAIN):
        return None
    planner = _Planner(op)
    found = planner.multiplied(*((b, a) if best.swapped else (a, b)), *best.groups)
    return planner.aligned(found, "".join(letter for letter in letters if letter not in summed)).value


def shape_of_product(op: Builder, node: ir.Node) -> ir.Value | None:
    """What a Shape of a Mul gives, from the operands; None where the Mul is computed anyhow, or where it is not known which operand is stretched."""
    x = node.inputs[0]
    product = made_by(x, "Mul")
    if x is None or product is None or x.is_graph_output() or node.attributes or any(use.node.op_type != "Shape" for use in x.uses()):
        return None
    operands = _operands(product)
    sizes: list[int | ir.Value] = []
    for letter in max((each.letters for each in operands), key=len) if operands else ():
        dims = [(each, each.dim(letter)) for each in operands or () if letter in each.real]
        known = [dim for _, dim in dims if isinstance(dim, int)]
        if not all(same_dim(dim, dims[0][1]) for _, dim in dims[1:]) and not known:
            return None
        sizes.append(known[0] if known else op.dim(dims[0][0].value, dims[0][0].letters.index(letter)) if dims else 1)
    return op.vector(sizes) if sizes else None


def _operands(product: ir.Node) -> tuple[_Operand, _Operand] | None:
    """The operands of an elementwise operator of two, their axes those at the end of the result's; None where a rank is not known."""
    shapes = [None if x is None else _shape_of(x) for x in product.inputs]
    rank = max((len(shape) for shape in shapes if shape is not None), default=0)
    if len(shapes) != 2 or None in shapes or rank > len(string.ascii_letters):
        return None
    a, b = (
        _broadcast(x, shape, string.ascii_letters[:rank]) for x, shape in zip(product.inputs, shapes) if x is not None and shape is not None
    )
    return a, b


def _shape_of(x: ir.Value) -> ir.Shape | None:
    dims = dims_of(x)
    return None if dims is None else ir.Shape(dims)


def _broadcast(x: ir.Value, shape: ir.Shape, letters: str) -> _Operand:
    """A value whose axes are the last ones of the letters."""
    return _Operand(x, letters[len(letters) - len(shape) :], tuple(shape))


def _before_expand(x: _Operand, other: _Operand) -> _Operand:
    """An operand as it is before an Expand, where the other one stretches it as well."""
    expand = made_by(x.value, "Expand")
    before = expand.inputs[0] if expand is not None else None
    shape = None if before is None else _shape_of(before)
    if before is None or shape is None or len(shape) > len(x.letters):
        return x
    found = _broadcast(before, shape, x.letters)
    for letter in x.letters:
        dim = found.dim(letter) if letter in found.letters else 1
        if not same_dim(dim, x.dim(letter)) and not (dim == 1 and letter in other.letters and same_dim(x.dim(letter), other.dim(letter))):
            return x
    return found


class _Planner:
    """Writes one Einsum."""

    def __init__(self, op: Builder) -> None:
        self.op = op

    def run(self, operands: list[_Operand], output: str) -> ir.Value | None:
        while len(operands) > 1:
            i, j = min(itertools.combinations(range(len(operands)), 2), key=lambda pair: self._growth(operands, pair, output))
            rest = [each for k, each in enumerate(operands) if k not in (i, j)]
            wanted = {*output, *(letter for each in rest for letter in each.letters)}
            found = self._pair(operands[i], operands[j], wanted, output if not rest else None)
            if found is None:
                return None
            operands = [*rest[:i], found, *rest[i:]]
        x = self._summed_alone(operands[0], "", set(output))
        return self.aligned(x, output).value

    def _growth(self, operands: Sequence[_Operand], pair: tuple[int, int], output: str) -> float:
        """How many elements more there are behind the product of two operands."""
        a, b = (operands[k] for k in pair)
        others = {*output, *(letter for k, each in enumerate(operands) if k not in pair for letter in each.letters)}
        sizes = _sizes(a, b)
        return math.prod(s for letter, s in sizes.items() if letter in others) - _elements(a.real, sizes) - _elements(b.real, sizes)

    # ----------------------------------------------------------------------------------------------------- one product
    def _pair(self, a: _Operand, b: _Operand, wanted: set[str], output: str | None) -> _Operand | None:
        """The product of two operands, summed over what nobody wants; with ``output`` in about that order."""
        a, b = self._summed_alone(a, b.real, wanted), self._summed_alone(b, a.real, wanted)
        summed = [letter for letter in a.real if letter in b.real and letter not in wanted]
        sizes = _sizes(a, b)
        goal = "".join(letter for letter in output if letter in sizes and letter in a.real + b.real) if output else None
        forms = list(_elementwise(a, b, summed, sizes, goal))
        if summed:
            if all(same_dim(a.dim(letter), b.dim(letter)) for letter in summed):
                forms += _matrices(a, b, summed, sizes, goal)
            elif math.prod(sizes[letter] for letter in {*a.real, *b.real} if not (letter in a.real and letter in b.real)) > 16:
                return None  # it may be stretched, which no MatMul does
        best = min(forms, key=lambda form: form.cost)
        if best.groups is not None:
            return self.multiplied(*((b, a) if best.swapped else (a, b)), *best.groups)
        order = best.order
        if not summed and output is not None and order == goal:  # single axes stand where they should at once
            order = "".join(letter for letter in output if letter in a.letters + b.letters)
        x = self.op.Mul(self.aligned(a, order).value, self.aligned(b, order).value)
        dims = [_joint(a, b, letter) for letter in order]
        x.shape = ir.Shape(dims)
        if not summed:
            return _Operand(x, order, tuple(dims))
        x = self.op.ReduceSum(x, [order.index(letter) for letter in order if letter in summed], keepdims=0)
        left = [(letter, dim) for letter, dim in zip(order, dims) if letter not in summed]
        x.shape = ir.Shape([dim for _, dim in left])
        return _Operand(x, "".join(letter for letter, _ in left), tuple(dim for _, dim in left))

    def _summed_alone(self, x: _Operand, others: str, wanted: set[str]) -> _Operand:
        """Sum over the letters that the other operand does not have and nobody wants."""
        axes = [k for k, letter in enumerate(x.letters) if letter not in wanted and letter not in others and x.dims[k] != 1]
        if not axes:
            return x
        value = self.op.ReduceSum(x.value, axes, keepdims=0)
        left = [k for k in range(len(x.letters)) if k not in axes]
        dims = tuple(x.dims[k] for k in left)
        value.shape = ir.Shape(dims)
        return _Operand(value, "".join(x.letters[k] for k in left), dims)

    def multiplied(self, a: _Operand, b: _Operand, batch: str, left: str, summed: str, right: str) -> _Operand:
        """A MatMul of matrices left x summed and summed x right."""
        x = self.op.MatMul(self._matrix(a, batch, left, summed), self._matrix(b, batch, summed, right))
        joint = [_joint(a, b, letter) for letter in batch]
        x.shape = ir.Shape([*joint, *(_merged(each, letters) for each, letters in ((a, left), (b, right)))])
        dims = [*joint, *(a.dim(letter) for letter in left), *(b.dim(letter) for letter in right)]
        if len(left) != 1 or len(right) != 1:
            product = _Operand(x, batch, tuple(joint))  # an axis of a batch may be stretched: the product knows how long it is
            sources = [*(product for _ in batch), *(a for _ in left), *(b for _ in right)]
            asked = [self._size(each, letter) for each, letter in zip(sources, batch + left + right)]
            x = self._reshaped(x, dims, asked, keeps=len(batch))
        return _Operand(x, batch + left + right, tuple(dims))

    def _matrix(self, x: _Operand, batch: str, rows: str, columns: str) -> ir.Value:
        """An operand as matrices; where its axes are columns x rows, by a Transpose of the two last ones, which onnxruntime's MatMul takes over."""
        turned = x.real == batch + columns + rows and bool(rows) and bool(columns)
        order = (*batch, columns, rows) if turned else (*batch, rows, columns)
        if len(rows) == len(columns) == 1:
            found = self.aligned(x, "".join(order)).value
        else:
            x = self.aligned(x, "".join(order))
            dims = [_merged(x, letters) for letters in order]
            found = self._reshaped(x.value, dims, [self._size(x, letters) for letters in order], keeps=len(batch))
        if turned:
            n = len(order)
            found = self.op.Transpose(found, perm=[*range(n - 2), n - 1, n - 2])
        return found

    def _size(self, x: _Operand, letters: str) -> _Size:
        """A function that asks for the product of the sizes of letters that stand side by side."""
        first = x.letters.index(letters[0]) if letters else 0

        def ask() -> int | ir.Value:
            if not letters:
                return 1
            if len(letters) == 1:
                return self.op.dim(x.value, first)
            return self.op.ReduceProd(self.op.Shape(x.value, start=first, end=first + len(letters)), keepdims=1)

        return ask

    # ----------------------------------------------------------------------------------------------------------- axes
    def _reshaped(self, x: ir.Value, dims: Sequence[Any], asked: Sequence[_Size], keeps: int) -> ir.Value:
        """Reshape to sizes, of which the first ``keeps`` are those of x; none that is known is 0. ``asked`` finds each out when the model runs."""
        unknown = [k for k, dim in enumerate(dims) if not isinstance(dim, int)]
        if len(unknown) <= 1:
            found = self.op.Reshape(x, [-1 if k in unknown else dim for k, dim in enumerate(dims)])
        elif max(unknown) < keeps:
            found = self.op.Reshape(x, [0 if k in unknown else dim for k, dim in enumerate(dims)])
        else:
            found = self.op.Reshape(x, self.op.vector([ask() for ask in asked]), allowzero=1)
        found.shape = ir.Shape(dims)
        return found

    def aligned(self, x: _Operand, order: str) -> _Operand:
        """The axes of an operand in another order; letters that it has not are single, and single ones that the order has not go."""
        real, wanted = x.real, "".join(letter for letter in order if letter in x.real)
        value, letters = x.value, x.letters
        if real != wanted:
            letters = wanted + "".join(letter for letter in letters if letter not in real)
            value = self.op.Transpose(value, perm=[x.letters.index(letter) for letter in letters])
        there = [letter if letter in real else "" for letter in letters]
        there_after = [letter if letter in real else "" for letter in order]
        dims = tuple(x.dim(letter) if letter in real else 1 for letter in order)
        if there != there_after:
            if all(isinstance(dim, int) for dim in dims):
                value = self.op.Reshape(value, list(dims))
            elif (axes := _missing(there, there_after)) is not None:
                value = self.op.Unsqueeze(value, axes)
            elif (axes := _missing(there_after, there)) is not None:
                value = self.op.Squeeze(value, axes)
            else:
                value = self.op.Squeeze(value, [k for k, letter in enumerate(there) if not letter])
                value = self.op.Unsqueeze(value, [k for k, letter in enumerate(there_after) if not letter])
            value.shape = ir.Shape(dims)
        return _Operand(value, order, dims)


def _missing(shorter: Sequence[str], longer: Sequence[str]) -> list[int] | None:
    """Where single axes have to come into one row of axes to make the other; None where that is not all."""
    axes, k = [], 0
    for place, letter in enumerate(longer):
        if k < len(shorter) and shorter[k] == letter:
            k += 1
        elif letter:
            return None
        else:
            axes.append(place)
    return axes if k == len(shorter) else None


# ------------------------------------------------------------------------------------------------------------------ sizes
def _joint(a: _Operand, b: _Operand, letter: str) -> Any:
    """The size of a letter in the product: the one that is not single, or that is known."""
    dims = [x.dim(letter) for x in (a, b) if letter in x.letters]
    real = [dim for dim in dims if dim != 1]
    known = [dim for dim in real if isinstance(dim, int)]
    if not real:
        return 1
    if known:
        return known[0]
    return real[0] if len(real) == 1 or same_dim(real[0], real[1]) else None


def _merged(x: _Operand, letters: str) -> int | Any | None:
    if len(letters) == 1:
        return x.dim(letters)
    dims = [x.dim(letter) for letter in letters]
    return math.prod(dims) if all(isinstance(dim, int) for dim in dims) else None


def _sizes(a: _Operand, b: _Operand) -> dict[str, int]:
    """What each letter counts for where forms are compared."""
    found = {}
    for letter in dict.fromkeys(a.letters + b.letters):
        dim = _joint(a, b, letter)
        found[letter] = dim if isinstance(dim, int) else OPEN
    return found


def _elements(letters: Iterable[str], sizes: dict[str, int]) -> int:
    return math.prod(sizes[letter] for letter in letters)


# ------------------------------------------------------------------------------------------------------------------ forms
def _elementwise(a: _Operand, b: _Operand, summed: Sequence[str], sizes: dict[str, int], goal: str | None) -> Iterator[_Product]:
    """A Mul in several orders, and a ReduceSum."""
    orders = [_woven(a.real, b.real), _woven(b.real, a.real)]
    if goal is not None:
        orders.append(goal + "".join(summed))
    for order in dict.fromkeys(orders):
        yield _Product(_in_full(order, a, b, summed, sizes, goal), order)


def _in_full(order: str, a: _Operand, b: _Operand, summed: Sequence[str], sizes: dict[str, int], goal: str | None) -> float:
    """What a Mul with its axes in an order takes, a ReduceSum of it, and the Transposes around both."""
    full = _elements(order, sizes)
    cost = _NODE + full * _PRODUCT + full / _span(order, a, b, sizes) * _SPAN
    cost += sum(_moving(x.real, _in_order(x.real, order), sizes) for x in (a, b))
    if summed:
        rows = full / _elements(summed, sizes)
        before = _elements(order[: order.index(next(letter for letter in order if letter in summed))], sizes)
        last = set(order[-len(summed) :]) == set(summed)
        cost += _NODE + (full * _ADDED + rows * _ROW if last else min(before * _MATRIX + full * _ADDED_ACROSS, full * _ONE_BY_ONE))
    left = "".join(letter for letter in order if letter not in summed)
    return cost + _moving(left, goal or left, sizes)


def _matrices(a: _Operand, b: _Operand, summed: Sequence[str], sizes: dict[str, int], goal: str | None) -> Iterator[_Product]:
    """A MatMul, with the letters of each group in several orders."""
    for swapped in (False, True):
        x, y = (b, a) if swapped else (a, b)
        kinds = [
            [letter for letter in x.real if letter in y.real and letter not in summed],
            [letter for letter in x.real if letter not in y.real],
            list(summed),
            [letter for letter in y.real if letter not in x.real],
        ]
        sources = [x.real, y.real] if goal is None else [x.real, y.real, goal]
        choices = [list(dict.fromkeys("".join(sorted(kind, key=s.find)) for s in sources)) for kind in kinds]
        for batch, left, inner, right in itertools.product(*choices):
            matrices, terms = _elements(batch, sizes), _elements(left + inner + right, sizes)
            cost = _NODE + matrices * (_MATRIX + terms * _TERM)
            for each, rows, columns in ((x, left, inner), (y, inner, right)):
                if each.real != batch + columns + rows:
                    cost += _moving(each.real, batch + rows + columns, sizes)
            cost += _moving(batch + left + right, goal or batch + left + right, sizes)
            yield _Product(cost, groups=(batch, left, inner, right), swapped=swapped)


def _moving(before: str, after: str, sizes: dict[str, int]) -> float:
    """What a Transpose from one order of letters to another takes; letters that stay side by side move as one."""
    if before == after:
        return 0.0
    blocks: list[str] = []
    for place, letter in enumerate(before):
        follows = place > 0 and after.find(letter) == after.find(before[place - 1]) + 1
        if follows:
            blocks[-1] += letter
        else:
            blocks.append(letter)
    moved = sorted(blocks, key=after.find)
    one = any([b for b in blocks if b != block] == [b for b in moved if b != block] for block in blocks)
    element = _AS_ONE if one else _MOVED
    if moved[-1] == blocks[-1]:
        element = min(_MOVED, 0.3 + _BLOCK / _elements(blocks[-1], sizes))
    return _NODE + _elements(before, sizes) * element


def _woven(first: str, second: str) -> str:
    """The letters of one operand in their order, and those of another behind what they stand behind there."""
    order = list(first)
    for place, letter in enumerate(second):
        if letter not in order:
            before = second[place - 1] if place else ""
            order.insert(order.index(before) + 1 if before else 0, letter)
    return "".join(order)


def _in_order(letters: str, order: str) -> str:
    return "".join(letter for letter in order if letter in letters)


def _span(order: str, a: _Operand, b: _Operand, sizes: dict[str, int]) -> int:
    """How many elements of a product lie behind each other in which the same operands go on."""
    length, kind = 1, None
    for letter in reversed(order):
        here = letter in a.real, letter in b.real
        if kind is not None and here != kind:
            break
        kind = here
        length *= sizes[letter]
    return length
