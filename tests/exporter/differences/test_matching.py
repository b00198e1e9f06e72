"""Nodes are matched by what they compute, not by names or order."""

from __future__ import annotations

import random

import onnx
import onnx.parser
import pytest

from exporter.differences.diff import diff_files

OPERATORS = {"Relu": 1, "Neg": 1, "Add": 2, "Mul": 2, "Sum": 3}


def graph(seed, nodes=30):
    """Nodes of a random graph as (operator, numbers of its inputs); number 0 is the input."""
    rng = random.Random(seed)
    made = []
    for i in range(nodes):
        operator = rng.choice(list(OPERATORS))
        made.append((operator, [rng.randrange(max(0, i - 5), i + 1) for _ in range(OPERATORS[operator])]))
    return made


def model(nodes, rng=None):
    """A model of them; ``rng`` shuffles names, and the order as far as the graph allows."""
    names = [f"v{i}" for i in range(len(nodes) + 1)]
    if rng is not None:
        rng.shuffle(names)
    names[0], names[-1] = "x", "y"
    left, order, known = list(range(len(nodes))), [], {0}
    while left:
        ready = [i for i in left if set(nodes[i][1]) <= known]
        order.append(rng.choice(ready) if rng is not None else ready[0])
        known.add(order[-1] + 1)
        left.remove(order[-1])
    made = [
        onnx.helper.make_node(nodes[i][0], [names[j] for j in nodes[i][1]], [names[i + 1]], name=f"n{rng.random() if rng else i}")
        for i in order
    ]
    value = onnx.helper.make_tensor_value_info
    main = onnx.helper.make_graph(made, "g", [value("x", 1, [2])], [value("y", 1, [2])])
    return onnx.helper.make_model(main, opset_imports=[onnx.helper.make_opsetid("", 20)])


@pytest.mark.parametrize("seed", range(25))
def test_other_names_and_another_order_are_no_difference(seed):
    nodes = graph(seed)
    found = diff_files(model(nodes), model(nodes, random.Random(seed + 1000)))
    assert found.equal, found


@pytest.mark.parametrize("seed", range(25))
def test_one_change_is_found(seed):
    rng = random.Random(seed)
    nodes = graph(seed)
    at = rng.randrange(len(nodes))
    operator, inputs = nodes[at]
    other = [*nodes]
    if rng.random() < 0.5:
        other[at] = rng.choice([o for o, n in OPERATORS.items() if n == len(inputs) and o != operator] or ["Mean"]), inputs
    else:
        place = rng.randrange(len(inputs))
        moved = [(j + 1) % (at + 1) if i == place else j for i, j in enumerate(inputs)]
        if moved == inputs:
            pytest.skip("the first node can read nothing else")
        other[at] = operator, moved
    found = diff_files(model(nodes), model(other, random.Random(seed)))
    assert found.nodes, found
    assert len(found.nodes) <= 8, "one change is few lines"


def test_twin_branches_in_another_order():
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) {{ {} y = Add(c, d) }}"""
    a = text.format("a = Relu(x) b = Relu(x) c = Neg(a) d = Neg(b)")
    b = text.format("b = Relu(x) a = Relu(x) d = Neg(b) c = Neg(a)")
    assert diff_files(*map(onnx.parser.parse_model, (a, b))).equal


def test_a_node_in_between_is_one_line():
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) {{ a = Relu(x) {} y = Neg(b) }}"""
    found = diff_files(*(onnx.parser.parse_model(text.format(inner)) for inner in ("b = Exp(a)", "c = Exp(a) b = Tanh(c)")))
    assert [(change.kind, change.what) for change in found.nodes] == [("added", "Tanh ''")]
    assert found.operators == {"Tanh": (0, 1)}
