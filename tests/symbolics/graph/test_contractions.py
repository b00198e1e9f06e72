"""Einsum in other words: the numbers of numpy's einsum in float64, over drawn equations, sizes and what is known of them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper

from symbolics.graph.slow_operators import rewrite_slow_operators

_KINDS = {"float32": 1, "float64": 11, "int32": 6, "int64": 7, "float16": 10}


def _model(equation, declared, dtype="float32"):
    inputs = [helper.make_tensor_value_info(f"x{k}", _KINDS[dtype], shape) for k, shape in enumerate(declared)]
    node = helper.make_node("Einsum", [value.name for value in inputs], ["y"], equation=equation)
    output = helper.make_tensor_value_info("y", _KINDS[dtype], None)
    graph = helper.make_graph([node], "g", inputs, [output])
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))


def _run(model, arrays):
    proto = ir.to_proto(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {f"x{k}": array for k, array in enumerate(arrays)})[0]


def _expected(equation, arrays):
    """In float64, with single axes stretched first: numpy stretches them for two operands alone."""
    left = equation.partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, array in zip(left, arrays, strict=True):
        for letter, size in zip(term, array.shape, strict=True):
            sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
    wide = [np.broadcast_to(array, [sizes[letter] for letter in term]) for term, array in zip(left, arrays, strict=True)]
    return np.einsum(equation, *[array.astype(np.float64 if array.dtype.kind == "f" else array.dtype) for array in wide])


def _operators(model):
    return [node.op_type for node in model.graph]


def _drawn(seed):
    draw = np.random.default_rng(seed)
    letters = "abcde"
    sizes = {letter: int(draw.integers(1, 5)) for letter in letters}
    terms = ["".join(draw.permutation(list(letters))[: draw.integers(0, 5)]) for _ in range(draw.choice([1, 2, 2, 2, 3]))]
    used = sorted(set("".join(terms)))
    output = "".join(draw.permutation(used)[: draw.integers(0, len(used) + 1)])
    shapes = [tuple(1 if draw.random() < 0.1 else sizes[letter] for letter in term) for term in terms]
    known = draw.choice(["all", "symbols", "some", "none"])
    declared = []
    for term, shape in zip(terms, shapes, strict=True):
        symbols = [f"{letter}{size}" for letter, size in zip(term, shape, strict=True)]
        kinds = {"all": shape, "symbols": symbols, "none": [None] * len(term)}
        mixed = [size if draw.random() < 0.5 else symbol for size, symbol in zip(shape, symbols, strict=True)]
        declared.append(list(kinds.get(str(known), mixed)))
    arrays = [np.asarray(draw.standard_normal(shape), np.float32) for shape in shapes]
    return ",".join(terms) + "->" + output, declared, arrays


def test_drawn_equations():
    """Orders, sums, products, single axes that are stretched, open sizes, one to three operands."""
    written = 0
    for seed in range(400):
        equation, declared, arrays = _drawn(seed)
        model = _model(equation, declared)
        written += rewrite_slow_operators(model)
        found, expected = _run(model, arrays), _expected(equation, arrays)
        assert found.shape == expected.shape, (seed, equation, declared)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=f"{seed} {equation} {declared}")
    assert written > 350  # the rest may be stretched along what is summed, and nobody knows


@pytest.mark.parametrize(
    ("equation", "shapes", "operators"),
    [
        ("ca,cab->cab", [("c", 64), ("c", 64, 1)], {"Unsqueeze", "Mul"}),
        ("cab,cab->ca", [("c", 64, 3), ("c", 64, 3)], {"Mul", "ReduceSum"}),
        ("edab,ecad->ecb", [("e", 1, 3, 5), ("e", 64, 3, 1)], {"Squeeze", "MatMul"}),
        ("bhqd,bhkd->bhqk", [("b", 8, "n", 64), ("b", 8, "n", 64)], {"Transpose", "MatMul"}),
        ("ij->ji", [("i", "j")], {"Transpose"}),
        ("ij->", [("i", "j")], {"ReduceSum"}),
        ("...ij,jk->...ik", [("a", "b", 3, 40), (40, 50)], {"Reshape", "MatMul", "Shape", "Concat", "ReduceProd"}),
    ],
)
def test_what_it_is_written_with(equation, shapes, operators):
    model = _model(equation, shapes)
    assert rewrite_slow_operators(model) == 1
    assert set(_operators(model)) <= operators
    assert "Einsum" not in _operators(model)
    draw = np.random.default_rng(0)
    sizes: dict[str, int] = {"e": 5, "c": 4, "b": 2, "n": 6}
    arrays = [draw.standard_normal([d if isinstance(d, int) else sizes.get(d, 7) for d in shape]).astype(np.float32) for shape in shapes]
    np.testing.assert_allclose(_run(model, arrays), np.einsum(equation, *arrays), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("equation", "shapes", "dtype"),
    [
        ("ii->i", [(3, 3)], "float32"),
        ("bii,bi->b", [(2, 3, 3), (2, 3)], "float32"),
        ("ab,ab->a", [(0, 3), (0, 3)], "float32"),
        ("ab,bc->ac", [(2, 3), (3, 4)], "float16"),
        ("ab,bc->ac", [("a", "b"), ("other", 40)], "float32"),
    ],
    ids=["diagonal", "diagonal of a batch", "no element", "halves", "perhaps stretched"],
)
def test_what_stays(equation, shapes, dtype):
    model = _model(equation, shapes, dtype)
    assert rewrite_slow_operators(model) == 0
    assert _operators(model) == ["Einsum"]


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64"])
def test_other_types(dtype):
    draw = np.random.default_rng(0)
    arrays = [draw.integers(-5, 5, shape).astype(dtype) for shape in ((4, 3, 2), (4, 2, 5), (5,))]
    for equation in ("abc,acd,d->ab", "abc,acd,d->bda", "abc,acd,d->abcd"):
        model = _model(equation, [array.shape for array in arrays], dtype)
        assert rewrite_slow_operators(model) == 1
        found = _run(model, arrays)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.einsum(equation, *arrays))


@pytest.mark.parametrize("size", [0, 1, 2])
def test_open_sizes_of_nothing_and_one(size):
    """Open sizes that are 0 or 1 when it runs: no element, or an axis that is stretched."""
    draw = np.random.default_rng(0)
    for equation, shapes in (
        ("eca,eda->ecd", [("e", 4, 3), ("e", 5, 3)]),
        ("eca,ead->ecd", [("e", 64, 20), ("e", 20, 30)]),
        ("ea,eb->ab", [("e", 4), ("e", 5)]),
        ("efa,bfe->ba", [("e", "f", 3), (5, "f", "e")]),
    ):
        arrays = [draw.standard_normal([d if isinstance(d, int) else size for d in shape]).astype(np.float32) for shape in shapes]
        model = _model(equation, shapes)
        assert rewrite_slow_operators(model) == 1
        np.testing.assert_allclose(_run(model, arrays), np.einsum(equation, *arrays), rtol=1e-4, atol=1e-4)


def test_a_batch_that_is_stretched_when_it_runs():
    """Two open sizes of one letter, of which one turns out to be 1, beside rows and columns of open sizes that are taken apart again."""
    draw = np.random.default_rng(0)
    for first, second in ((1, 2), (2, 1), (2, 2)):
        arrays = [draw.standard_normal(shape).astype(np.float32) for shape in ((first, 3, 5, 40), (second, 40, 4, 6))]
        model = _model("zabk,zkcd->zabcd", [("z", "a", "b", 40), ("other", 40, "c", "d")])
        assert rewrite_slow_operators(model) == 1
        np.testing.assert_allclose(_run(model, arrays), _expected("zabk,zkcd->zabcd", arrays), rtol=1e-4, atol=1e-4)


def test_a_transpose_before_it_is_not_made_twice():
    """What moved axes for the Einsum alone goes with it; what others read stays."""
    proto = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
                helper.make_node("Einsum", ["t", "w"], ["y"], equation="ji,ik->jk"),
            ],
            "g",
            [helper.make_tensor_value_info("x", 1, [30, 20]), helper.make_tensor_value_info("w", 1, [30, 40])],
            [helper.make_tensor_value_info("y", 1, [20, 40])],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=9,
    )
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    assert rewrite_slow_operators(model) == 1
    assert sorted(_operators(model)) == ["MatMul", "Transpose"]
