"""How the parameters of a rule are bound to the node, and what is said of a rule that does not fit."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

from exporter.gradient_graph.build import build_gradient_graph
from symbolics.errors import ArgumentError, PythonopError
from symbolics.gradients import COMPOSITES, RULES, composite, gradient
from tests.symbolics.gradients.tools import model_of, run

X = "float[2] x"
ONES = np.ones(2, np.float32)


@pytest.fixture(autouse=True)
def _tables():
    """Each test finds the tables as they were."""
    before = [(table, dict(table)) for table in (RULES, COMPOSITES)]
    yield
    for table, rows in before:
        table.clear()
        table.update(rows)


def mine(body: str, signature: str = X, outputs: str = "float[2] y"):
    text = f'<ir_version: 10, opset_import: ["" : 21, "my" : 1]> model ({signature}) => ({outputs}) {{ {body} }}'
    return onnx.parser.parse_model(text)


def seen(rule, body: str, signature: str = X, outputs: str = "float[2] y") -> list:
    """What a rule of my.Op is given."""
    calls: list = []
    gradient("Op", domain="my")(rule(calls))
    build_gradient_graph(mine(body, signature, outputs))
    return calls


# ------------------------------------------------------------------------------------------------------ what it is given
def test_a_formula_gets_inputs_attributes_and_outputs_by_its_parameters():
    def rule(calls):
        def formula(op, g, x, absent, z, more, *, y, ys, node, alpha, beta=0.5):
            calls.append([g.name, x.name, absent, z.name, more, y.name, [o.name for o in ys], node.op_type, alpha, beta])
            return [g, None, g]

        return formula

    (call,) = seen(rule, "y = my.Op <alpha = 2.0> (x, , z)", f"{X}, float[2] z")
    assert call == ["y_grad", "x", None, "z", None, "y", ["y"], "Op", 2.0, 0.5]


def test_a_formula_with_any_number_of_inputs():
    def rule(calls):
        return lambda op, g, *xs: calls.append([x.name for x in xs]) or [g] * len(xs)

    assert seen(rule, "y = my.Op(x, x, z)", f"{X}, float[2] z") == [["x", "x", "z"]]


def test_gs_are_the_cotangents_of_all_outputs():
    def rule(calls):
        return lambda op, gs, x: calls.append([g and g.name for g in gs]) or [g for g in gs if g is not None]

    assert seen(rule, "y, z = my.Op(x)") == [["y_grad", None]]
    assert seen(rule, "w, y = my.Op(x)") == [[None, "y_grad"]]


@pytest.mark.parametrize("name", ["node", "n", "anything"])
def test_any_other_second_parameter_is_the_node(name):
    rule = eval(f"lambda op, {name}, *gradients: [gradients[0] * {name}.inputs[0]]")
    gradient("Op", domain="my")(rule)
    assert [n.op_type for n in build_gradient_graph(mine("y = my.Op(x)")).graph] == ["Op", "Mul"]
    gradient("Op", domain="my")(lambda *everything: [everything[2]])
    assert [n.op_type for n in build_gradient_graph(mine("y = my.Op(x)")).graph] == ["Op", "Identity"]


def test_an_attribute_has_the_default_of_the_schema():
    alphas = []

    def formula(op, g, x, *, alpha):
        alphas.append(alpha)
        return g

    for body in ("y = LeakyRelu(x)", "y = LeakyRelu<alpha = 0.5>(x)"):
        build_gradient_graph(model_of(X, body), overrides={"LeakyRelu": formula})
    assert alphas == [pytest.approx(0.01), 0.5]


def test_inputs_that_a_formula_does_not_name_are_on_no_path():
    """w goes through an operator that has no rule: nobody asks for it."""
    gradient("Op", domain="my")(lambda op, g, x: g)
    training = build_gradient_graph(mine("v = my.Unknown(x) y = my.Op(x, v)"))
    assert [n.op_type for n in training.graph] == ["Unknown", "Op", "Identity"]


def test_a_composite_may_return_one_value():
    @composite("Twice", domain="my")
    def twice(op, x, *, times=2):
        return x * float(times)

    got = run(build_gradient_graph(mine("y = my.Twice(x)")), {"x": ONES, "y_grad": ONES})
    np.testing.assert_array_equal(got["x_grad"], [2, 2])


# -------------------------------------------------------------------------------------------------- what does not fit it
def test_a_parameter_that_the_schema_does_not_know_is_named_at_registration():
    with pytest.raises(ArgumentError, match=r"LeakyRelu asks for 'alhpa'.*1 inputs.*alpha.*node, y, ys"):
        gradient("LeakyRelu")(lambda op, g, x, *, alhpa: g)
    with pytest.raises(ArgumentError, match=r"LeakyRelu names 2 inputs; there are 1"):
        gradient("LeakyRelu")(lambda op, g, x, z: g)
    with pytest.raises(ArgumentError, match="asks for 'beta'"):
        build_gradient_graph(model_of(X, "y = LeakyRelu(x)"), overrides={"LeakyRelu": lambda op, g, x, *, beta: g})
    gradient("Resize", "Upsample")(lambda op, g, x, *, antialias: g)  # one of the two has it


BAD = {
    "too many": (lambda op, g, x: [g, g], "returned 2 gradients for 1 inputs", "y = my.Op(x)"),
    "too few": (lambda op, g, x, z: g, "returned 1 gradients for 2 inputs", "y = my.Op(x, x)"),
    "none": (lambda op, g, x: None, "returned None", "y = my.Op(x)"),
    "no attribute": (lambda op, g, x, *, alpha: g, "asks for attribute 'alpha'.*give it a default", "y = my.Op(x)"),
    "another output": (lambda op, g, x: g, "take all of them, gs", "w, y = my.Op(x)"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_rule_that_does_not_fit_its_node(what):
    rule, message, body = BAD[what]
    gradient("Op", domain="my")(rule)
    with pytest.raises(PythonopError, match=rf"the rule of my::Op \(node.*{message}"):
        build_gradient_graph(mine(body))
