"""What torch.autograd.grad says inside a forward that is exported: eager's None, eager's errors, and what a file cannot say."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

import exporter
from symbolics.errors import ExportError
from tests.support import Calls, nodes
from tests.zoo import differentiating as zoo

X = torch.randn(4, 3, dtype=zoo.F64)


def exported(function, *args, dynamo=True, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exporter.export(Calls(function), args or (X,), dynamo=dynamo, **options)


def results(program, *args):
    names = [value.name for value in program.model.graph.inputs]
    return exporter.inference_session(program.model_proto).run(None, dict(zip(names, (x.numpy() for x in args or (X,)), strict=True)))


def unused(x):
    return torch.autograd.grad(x.sum(), torch.ones(1, requires_grad=True))[0]


def stopped(x):
    with torch.no_grad():
        y = x * 2
    return torch.autograd.grad(y.sum(), x)[0]


def no_scalar(x):
    return torch.autograd.grad(x * 2, x)[0]


def not_required(x):
    return torch.autograd.grad(x.sum(), torch.ones(1))[0]


def other_shape(x):
    return torch.autograd.grad(x * 2, x, torch.ones(3, dtype=x.dtype))[0]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (unused, "appears to not have been used in the graph. Set allow_unused=True"),
        (stopped, "element 0 of tensors does not require grad and does not have a grad_fn"),
        (no_scalar, "grad can be implicitly created only for scalar outputs"),
        (not_required, "One of the differentiated Tensors does not require grad"),
        (other_shape, "Mismatch in shape: grad_output[0] has a shape of torch.Size([3]) and output[0] has a shape of torch.Size([4, 3])"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_eager_refuses(function, says, dynamo):
    """In eager's words, and with the user's own line; by the eager run, and by the export where there is none."""
    with pytest.raises(RuntimeError, match=re.escape(says)):
        function(X.clone().requires_grad_())
    with pytest.raises(
        ExportError, match=f"(?s)fails in eager mode.*{re.escape(says)}.*at test_gradients_in_forward.py:.*, in {function.__name__}: "
    ):
        exported(function, dynamo=dynamo)
    with pytest.raises(ExportError, match=re.escape(says)) as ours:
        exported(function, dynamo=dynamo, eager_check=False)
    assert re.search(r"in module .* at .*test_gradients_in_forward:\d+", str(ours.value))


def batched(x):
    y = x * x
    return torch.autograd.grad(y, x, torch.ones(2, *y.shape, dtype=y.dtype), is_grads_batched=True)[0]


def of_complex(x):
    z = torch.view_as_complex(x[:, :2].contiguous())
    return torch.view_as_real(torch.autograd.grad(z.abs().sum(), z)[0])


def by_edge(x):
    return torch.autograd.grad(x.sum(), torch.autograd.graph.get_gradient_edge(x))[0]


@pytest.mark.parametrize(
    ("function", "says"),
    [(batched, "is_grads_batched=True"), (of_complex, "view_as_real"), (by_edge, "pass the tensor itself")],
    ids=["batched", "complex", "edge"],
)
def test_what_a_file_cannot_say(function, says, dynamo):
    with pytest.raises(ExportError, match=says):
        exported(function, dynamo=dynamo)


def test_a_body_of_control_flow():
    def inner(x):
        return torch.autograd.grad((x * x).sum(), x)[0]

    with pytest.raises(ExportError, match=r"in the body of torch.cond, a loop or a scan"):
        exported(lambda x: torch.cond(x.sum() > 0, inner, lambda x: x.clone(), (x,)))


@pytest.mark.parametrize("eager_check", [True, False], ids=["judged", "unjudged"])
def test_none_where_eager_has_none(dynamo, eager_check):
    """Without an eager run as well, where that shows in the graph behind the traced tensors."""
    seen = []

    def forward(x):
        a, b = (x * 2).unbind(1)[:2]
        found = torch.autograd.grad(b.square().sum(), (a, b, x), allow_unused=True)
        seen.append([g is None for g in found])
        return found[2]

    program = exported(forward, dynamo=dynamo, eager_check=eager_check)
    assert seen
    assert all(each == [True, False, False] for each in seen)
    want = torch.zeros_like(X)
    want[:, 1] = 8 * X[:, 1]
    torch.testing.assert_close(torch.from_numpy(results(program)[0]), want)


def test_materialized_zeros(dynamo):
    def forward(x):
        other = torch.ones(3, dtype=x.dtype, requires_grad=True)
        first, second = torch.autograd.grad(x.square().sum(), (x, other), materialize_grads=True)
        return first + second

    torch.testing.assert_close(torch.from_numpy(results(exported(forward, dynamo=dynamo))[0]), 2 * X)


def test_without_create_graph_the_gradient_is_cut_off(dynamo):
    flags = []

    def forward(x, create_graph):
        (gradient,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=create_graph)
        flags.append(gradient.requires_grad)
        return gradient * x

    counts = []
    for create_graph in (True, False):
        program = exported(lambda x, create_graph=create_graph: forward(x, create_graph), dynamo=dynamo)
        assert set(flags) == {create_graph}
        flags.clear()
        counts.append(len(nodes(program.model, "StopGradient")))
    assert counts == [0, 1]


def test_a_dict_and_a_single_tensor(dynamo):
    def forward(x):
        found = torch.autograd.grad([x.sum(), x.square().sum()], {"x": x}, [None, torch.tensor(3.0, dtype=x.dtype)])
        return found["x"]

    torch.testing.assert_close(torch.from_numpy(results(exported(forward, dynamo=dynamo))[0]), 1 + 6 * X)


def double(g):
    return 2 * g


def test_a_hook_before_another_gradient_of_the_same_call(dynamo):
    """There eager gives the gradient from before the hook, alone it gives that from behind: nobody would guess."""

    def forward(x):
        h = x * 3
        h.register_hook(double)
        return torch.autograd.grad(h.square().sum(), (x, h))

    with pytest.raises(ExportError, match="Take the two gradients in two calls"):
        exported(forward, dynamo=dynamo)


def later_hook(x):
    h = x * 3
    (gradient,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
    h.register_hook(double)
    return h.sin() + gradient


def hook_taken_away(x):
    h = x * 3
    handle = h.register_hook(double)
    (gradient,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
    handle.remove()
    return h + gradient


@pytest.mark.parametrize(
    ("function", "says"), [(later_hook, "register the hook first"), (hook_taken_away, "and then removes it")], ids=["later", "removed"]
)
def test_hooks_that_serve_one_gradient_and_not_another(function, says, dynamo):
    with pytest.raises(ExportError, match=says):
        exported(function, dynamo=dynamo)


def test_eager_has_a_gradient_where_the_export_has_none(dynamo):
    def forward(x):
        other = x * 2
        y = x if torch.compiler.is_exporting() or torch.jit.is_tracing() else other
        found = torch.autograd.grad(y.sum(), (other, x), allow_unused=True)
        return found[1] if found[0] is None else found[0]

    with pytest.raises(ExportError, match="in eager mode input 0 has a gradient, and under the exporter nothing leads to it"):
        exported(forward, dynamo=dynamo)
