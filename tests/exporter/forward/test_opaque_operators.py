"""opaque=: operators of torch itself as PythonOps, named or missing; the error without it. All of torch's operators: tests/operators/test_opaque.py."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import exporter
from symbolics.errors import ExportError, PythonopWarning
from tests.operators.opaque import compared
from tests.operators.samples import Call
from tests.processes import Server
from tests.support import nodes

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
S = X.T @ X + torch.eye(3)
MISSING = ["aten::linalg_inv", "aten::erfinv", "aten::linalg_eigh", "aten::linalg_solve", "aten::special_i0"]


class Applies(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Net(nn.Module):
    """Operators that torch takes apart, one in place, one under no_grad(), a named tuple, and sizes that values decide."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        a = self.linear(x)
        a = a.mT @ a + 3 * torch.eye(3)
        with torch.no_grad():
            inverse = torch.linalg.inv(a)
        small = (x / 10).erfinv_()
        values = torch.linalg.eigh(a).eigenvalues
        runs, places = torch.unique_consecutive(x.detach().round(), return_inverse=True)
        return torch.linalg.solve(a, x.mT) + (inverse @ x.mT), values, torch.special.i0(small), runs * 2, places


def names(program):
    return sorted({node.function.rpartition(".")[0] for node in program.opaque})


@pytest.mark.parametrize("dynamo", [True, False])
def test_missing_ones_are_nodes_and_equal_eager(dynamo):
    torch.manual_seed(0)
    report = exporter.verify(Net().eval(), (X,), dynamo=dynamo, opaque="missing", dynamic_shapes={"x": {0: "n"}})
    assert report.ok, report.worst()[0]
    functions = {name.rpartition(".")[0] for name in report.functions}
    assert set(MISSING) <= functions <= {*MISSING, "aten::unique_consecutive"}


@pytest.mark.parametrize("dynamo", [True, False])
def test_without_it_the_error_names_them_all(dynamo):
    with pytest.raises(torch.onnx.OnnxExporterError) as raised:
        exporter.export(Net().eval(), (X,), dynamo=dynamo)
    text = str(raised.value)
    lines = text.split("\nthe whole way")[0].splitlines()
    assert isinstance(raised.value, ExportError) and len(lines) <= 10
    assert "cannot translate it to ONNX" in text and 'opaque="missing"' in text and __file__.rpartition("/")[2] in text
    # TorchScript has changes in place under another name, and says so when it comes to them.
    assert all(name in text for name in MISSING if dynamo or name != "aten::erfinv")


@pytest.mark.parametrize("dynamo", [True, False])
def test_named_ones_are_nodes_translated_or_not(dynamo):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Softplus())
    program = exporter.export(model, (X,), dynamo=dynamo, opaque=["aten::relu", torch.ops.aten.linear])
    assert [(node.function, node.module, node.reason) for node in program.opaque] == [
        ("aten::linear.default", "0", "opaque= names it"),
        ("aten::relu.default", "1", "opaque= names it"),
    ]
    assert nodes(program.model, "Softplus") and not nodes(program.model, "Relu")
    module, x = exporter.load(program, allow=["aten::relu", "aten::linear"]), X.clone().requires_grad_()
    for each in (module, model):
        (gradient,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        second = torch.autograd.grad(gradient.square().sum(), [x, *each.parameters()])
        if each is module:
            ours = second
    for a, b in zip(ours, second, strict=True):
        torch.testing.assert_close(a, b)


IN_PYTHON = {
    "aten::split.Tensor": lambda x: torch.split(x, 3),
    "aten::split_with_sizes": lambda x: x.split([1, 3], 0),
    "aten::_unique2": lambda x: torch.unique(x.detach().round()) * x.sum(),
    "aten::einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "aten::block_diag": lambda x: torch.block_diag(x, x),
    "aten::max_pool1d": lambda x: F.max_pool1d(x, 2),
    "aten::max_pool2d": lambda x: F.max_pool2d(x[None], 2),
    "aten::adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x, 2),
    "aten::threshold": lambda x: F.threshold(x, 0.1, 2.0),
}


@pytest.mark.parametrize("name", IN_PYTHON)
def test_behind_a_function_in_python(name, dynamo):
    """No formula that stands in for torch.split comes before the operator that it hands on to; F.threshold names itself."""
    program = exporter.export(Applies(IN_PYTHON[name]), (X.clone().requires_grad_(),), dynamo=dynamo, opaque=[name])
    assert {name.partition(".")[0]} == {node.function.partition(".")[0] for node in program.opaque}


def test_one_that_asks_for_values_is_missing_too():
    """torch.export stops in its midst, before anything is translated; the other one is met after that."""
    model = Applies(lambda x: torch.cov(x) @ torch.erfinv(x / 10))
    program = exporter.export(model, (X,), dynamo=True, opaque="missing")
    assert names(program) == ["aten::cov", "aten::erfinv"]
    module, x = exporter.load(program, allow=names(program)), X.clone().requires_grad_()
    ours, theirs = ((y := each(x), *torch.autograd.grad(y.square().sum(), x)) for each in (module, model))
    torch.testing.assert_close(ours, theirs)


def test_forward_mode():
    """linalg.solve gives tangents that lie by columns."""
    model = Applies(lambda x: torch.linalg.solve(S, x.mT))
    module = exporter.load(exporter.export(model, (X,), dynamo=False, opaque="missing"), allow=["aten::linalg_solve"])
    with forward_ad.dual_level():
        ours, theirs = (forward_ad.unpack_dual(each(forward_ad.make_dual(X, X.cos()))) for each in (module, model))
    torch.testing.assert_close(ours.tangent, theirs.tangent)


@pytest.mark.parametrize("before", [nn.Identity(), nn.Sigmoid(), nn.Linear(3, 3)], ids=["input", "sigmoid", "linear"])
def test_second_orders_through_what_an_operator_does_not_return(before):
    """The gradient of singular values reads the vectors, outputs of the same node of autograd."""
    model = nn.Sequential(before, Applies(torch.linalg.svdvals)).double()
    loaded = exporter.load(exporter.export(model, (X.double(),), opaque="missing"), allow=["aten::linalg_svdvals"])

    def penalty(module):
        x = X.double().requires_grad_()
        (slope,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)

    torch.testing.assert_close(penalty(loaded), penalty(model))


def test_a_program_that_was_captured_before():
    model = Applies(lambda x: torch.linalg.solve(x.mT @ x + torch.eye(3), x.mT))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PythonopWarning)
        program = exporter.export(torch.export.export(model, (X,)), (), opaque="missing")
        with pytest.raises(ExportError, match=r"aten::linalg_inv\.default.* under no_grad .* captured before"):
            exporter.export(torch.export.export(Net().eval(), (X,)), (), opaque="missing")
    assert names(program) == ["aten::linalg_solve"]
    torch.testing.assert_close(exporter.load(program, allow=names(program))(X), model(X))


def test_what_no_node_calls():
    class Reads(nn.Module):
        def forward(self, x):
            return x + torch.from_file("nowhere", size=3)

    with pytest.raises(ExportError, match="no function of tensors"):
        exporter.export(Reads(), (X,), opaque=["aten::from_file"], eager_check=False)


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    process = Server(tmp_path_factory.mktemp("server"), "tests.operators.opaque:answer")
    yield process.ask
    process.close()


SAMPLES = {
    "cholesky": (torch.linalg.cholesky, S),
    "lstsq": (torch.linalg.lstsq, X, X[:, :1] * 2),
    "svd": (lambda x: torch.linalg.svd(x, full_matrices=False).S, X),
    "hfft": (torch.fft.hfft, X),
    "irfft": (torch.fft.irfft, X),
    "bessel_j0": (torch.special.bessel_j0, X),
    "pdist": (nn.functional.pdist, X),
    "nanmedian": (lambda x: x.nanmedian(1).values, X),
    "igammac": (torch.special.gammaincc, X.abs() + 1, X.abs()),
    "max_pool": (
        lambda x: nn.functional.fractional_max_pool2d(x.view(1, 3, 4), 2, output_size=2, _random_samples=torch.full((1, 1, 2), 0.5)),
        X,
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples(name, ask, tmp_path):
    """Outputs and gradients in another process; PyTorch has none for igammac's first argument."""
    function, *tensors = SAMPLES[name]
    assert compared(Call.of(function, tuple(tensors), {}), False, tmp_path, ask)


@pytest.mark.parametrize("name", ["erfcx", "log_ndtr"])
@pytest.mark.parametrize("opaque", ["missing", "named"])
def test_one_that_is_not_exact_in_float64(dynamo, name, opaque):
    """It has a translation, which float64 is too exact for."""
    model, x = Applies(getattr(torch.special, name)), torch.linspace(-2, 3, 6, dtype=torch.float64)
    with pytest.raises(ExportError, match=rf"special.{name} in float64 .* opaque=\[\"aten::special_{name}\"\]"):
        exporter.export(model, (x,), dynamo=dynamo)
    program = exporter.export(model, (x,), dynamo=dynamo, opaque="missing" if opaque == "missing" else [f"aten::special_{name}"])
    assert len(nodes(program.model, "PythonOp")) == 1
    loaded = exporter.load(program, allow=[f"aten::special_{name}"])
    mine, eager = (x.clone().requires_grad_() for _ in range(2))
    found, wanted = loaded(mine), model(eager)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*torch.autograd.grad(found.sum(), mine), *torch.autograd.grad(wanted.sum(), eager))
