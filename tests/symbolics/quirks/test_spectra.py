"""Fourier transforms of any length, at open and at fixed sizes: files and their gradients beside eager's float64."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import fft

import exporter
from symbolics import quirks
from tests.support import Calls

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

NORMS = ("backward", "ortho", "forward")


def _parts(x):
    return torch.view_as_real(x.resolve_conj())


def _close(found, right, limit=2e-6):
    assert found.shape == right.shape
    assert (found - right).abs().max() <= limit * right.abs().max(), float((found - right).abs().max() / right.abs().max())


def _alike(module, function, *args, limit=2e-6):
    """Result and gradients of a file, beside those of eager in float64."""
    ours, theirs = [x.clone().requires_grad_() for x in args], [x.double().requires_grad_() for x in args]
    y, right = module(*ours), function(*theirs)
    _close(y, right, limit)
    g = torch.randn(right.shape, dtype=torch.float64)
    found = torch.autograd.grad((y * g.to(y.dtype)).sum(), ours, create_graph=False)
    for mine, other in zip(found, torch.autograd.grad((right * g).sum(), theirs), strict=True):
        _close(mine, other, limit)


def _loaded(function, args, sizes=None, **options):

    return exporter.load(exporter.export(Calls(function), tuple(args), dynamic_shapes=sizes and (tuple(sizes),), **options))


OPEN = {
    "there and back": (lambda n: lambda x: fft.irfft(fft.rfft(x, norm=n), n=x.shape[-1], norm=n), {1: "n"}, (3, 16), ((3, 15), (3, 7), (3, 3), (3, 2))),
    "in the middle": (lambda n: lambda x: fft.irfft(fft.rfft(x, dim=1, norm=n), n=x.shape[1], dim=1, norm=n), {1: "n"}, (3, 16, 4), ((3, 9, 4),)),
    "in front": (lambda n: lambda x: fft.irfft(fft.rfft(x, dim=0, norm=n), n=x.shape[0], dim=0, norm=n), {0: "n"}, (16, 4), ((9, 4),)),
    "of images": (lambda n: lambda x: fft.irfft2(fft.rfft2(x, norm=n), s=x.shape[-2:], norm=n), {1: "h", 2: "w"}, (3, 8, 7), ((3, 9, 12), (3, 2, 3))),
    "complex": (lambda n: lambda x: _parts(fft.ifft(fft.fft(torch.view_as_complex(x), norm=n) / 2, norm=n)), {1: "n"}, (3, 9, 2), ((3, 8, 2), (3, 1, 2))),
    "hermitian": (lambda n: lambda x: fft.hfft(torch.view_as_complex(x), norm=n), {1: "n"}, (3, 9, 2), ((3, 6, 2),)),
    "hermitian, inverse": (lambda n: lambda x: _parts(fft.ihfft(x, norm=n)), {1: "n"}, (3, 9), ((3, 6),)),
    "cut and filled": (lambda n: lambda x: _parts(fft.rfft(x, n=12, norm=n)), {1: "n"}, (3, 9), ((3, 30), (3, 12))),
}  # fmt: skip


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("case", OPEN)
def test_open_sizes(case, norm):
    made, sizes, shape, others = OPEN[case]
    module = _loaded(made(norm), [torch.randn(shape)], [sizes])
    for each in (shape, *others):
        _alike(module, made(norm), torch.randn(each))


@pytest.mark.parametrize("norm", NORMS)
def test_a_length_that_the_spectrum_does_not_have(norm):
    """The points of the spectrum are fixed, those that it goes to are open."""

    def function(f, x):
        return fft.irfft(torch.view_as_complex(f), n=x.shape[1], norm=norm) + x

    module = _loaded(function, [torch.randn(3, 9, 2), torch.randn(3, 16)], [{}, {1: "n"}])
    for points in (16, 17, 10, 25, 24, 2):
        _alike(module, function, torch.randn(3, 9, 2), torch.randn(3, points))


@pytest.mark.parametrize("points", [1, 2, 3, 15, 101, 250, 509, 1000, 1024])
def test_digits_of_float32(points):
    def function(x):
        return fft.irfft(fft.rfft(x) / 2, n=points)

    _alike(_loaded(function, [torch.randn(3, points)]), function, torch.randn(3, points))


def test_powers_of_two_stay_in_float32():
    program = exporter.export(Calls(lambda x: fft.irfft(fft.rfft(x), n=64)), (torch.randn(3, 64),))
    assert all(value.dtype is not ir.DataType.DOUBLE for node in program.model.graph for value in node.outputs)


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("points", [100, 128])
def test_frames(points, dynamo):
    def function(x):
        spectrum = torch.stft(x, points, window=torch.hann_window(points, dtype=x.dtype), return_complex=dynamo)
        return torch.view_as_real(spectrum) if dynamo else spectrum

    module = _loaded(function, [torch.randn(2, 1000)], dynamo=dynamo)
    _alike(module, function, torch.randn(2, 1000))


@pytest.mark.parametrize("opset", [18, 19, 20, 21])
def test_opsets(opset):
    def function(x):
        return fft.irfft2(fft.rfft2(x), s=x.shape[-2:])

    module = _loaded(function, [torch.randn(3, 16, 12)], [{1: "h", 2: "w"}], opset_version=opset)
    for shape in ((3, 16, 12), (3, 15, 7)):
        _alike(module, function, torch.randn(shape))


def test_gradients_of_gradients_and_tangents():
    def function(x):
        return fft.irfft(fft.rfft(x.sin()), n=x.shape[-1]) ** 2

    program = exporter.export(Calls(function), (torch.randn(3, 16),), dynamic_shapes=(({1: "n"},),))
    module = exporter.load(program)
    for points in (16, 11):
        found = []
        x = torch.randn(3, points)
        for each in (x.clone().requires_grad_(), x.double().requires_grad_()):
            (first,) = torch.autograd.grad((module if each.dtype is torch.float32 else function)(each).sin().sum(), each, create_graph=True)
            found.append(torch.autograd.grad(first.cos().sum(), each)[0])
        _close(*found)
        v = torch.randn(3, points)
        _, right = torch.func.jvp(function, (x.double(),), (v.double(),))
        session = exporter.inference_session(ir.to_proto(exporter.build_tangent_graph(program)))
        name = session.get_inputs()[0].name
        _close(torch.from_numpy(session.run(None, {name: x.numpy(), f"{name}_tangent": v.numpy()})[1]), right)


def test_a_step():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, 1))

        def forward(self, x):
            return fft.irfft(fft.rfft(x * self.weight), n=x.shape[-1])

    x, loss = torch.randn(3, 16), torch.nn.functional.mse_loss
    step = exporter.export_training_step(
        Scaled(), (x,), loss=loss, targets=(x,), optimizer="sgd", hyperparameters={"lr": 0.1}, dynamic_shapes=({1: "n"},)
    )
    trainer, model = exporter.Trainer(step), Scaled().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for points in (16, 15, 7):
        x, y = torch.randn(3, points), torch.randn(3, points)
        trainer.step({"x": x, "target": y})
        optimizer.zero_grad()
        loss(model(x.double()), y.double()).backward()
        optimizer.step()
    _close(trainer.state_dict()["weight"], model.weight.detach())


class Filtered(torch.autograd.Function):
    """A spectrum, halved."""

    @staticmethod
    def forward(ctx, x):
        return fft.irfft(fft.rfft(x) / 2, n=x.shape[-1])

    @staticmethod
    def backward(ctx, g):
        return fft.irfft(fft.rfft(g) / 2, n=g.shape[-1])


def test_inside_of_functions():
    """In the body of a Function that the file runs without Python."""
    module = _loaded(lambda x: Filtered.apply(x).sin(), [torch.randn(3, 15)], portable=True)
    _alike(module, lambda x: fft.irfft(fft.rfft(x) / 2, n=x.shape[-1]).sin(), torch.randn(3, 15))


# ----------------------------------------------------------------------------------------------------- files of others
ROUND = """
    axis = Constant<value = int64 {1}>() size = Shape<start = 1, end = 2>(x) length = Squeeze(size)
    half = DFT<onesided = 1>(x, length, axis) back = DFT<inverse = 1, onesided = 1>(half, length, axis)
"""
FOREIGN = {
    "a graph": f'<ir_version: 10, opset_import: ["": 20]> g (float[3,n,1] x) => (float[3,n,1] y) {{ {ROUND} y = Sin(back) }}',
    "a graph that says what ONNX infers": f'<ir_version: 10, opset_import: ["": 20]> g (float[3,n,1] x) => (float[3,n,1] y) '
    f"<float[3,n,2] half> {{ {ROUND} y = Sin(back) }}",
    "a function": f'<ir_version: 10, opset_import: ["": 20, "own": 1]> g (float[3,n,1] x) => (float[3,n,1] y) {{ y = own.f(x) }} '
    f'<domain: "own", opset_import: ["": 20]> f (x) => (y) {{ {ROUND} y = Sin(back) }}',
    "branches": '<ir_version: 10, opset_import: ["": 20]> g (float[3,n,1] x, bool c) => (float[3,n,1] y) { y = If(c) <'
    f"then_branch = t () => (float[3,n,1] u) {{ {ROUND} u = Sin(back) }}, else_branch = e () => (float[3,n,1] v) {{ v = Sin(x) }}> }}",
    "a loop": '<ir_version: 10, opset_import: ["": 20]> g (float[3,n,1] x) => (float[3,n,1] y) { count = Constant<value = int64 {2}>() '
    "one = Constant<value = bool {1}>() z = Loop(count, one, x) <body = b (int64 i, bool go, float[3,n,1] s) => (bool on, float[3,n,1] u) {"
    f" on = Identity(go) {ROUND.replace('(x', '(s')} u = Identity(back) }}> y = Sin(z) }}",
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_files_of_others(case):
    """A round trip is the identity, whatever the length."""
    model = onnx.parser.parse_model(FOREIGN[case])
    training = exporter.build_gradient_graph(model)
    loaded = exporter.load(model)
    for points in (16, 15):
        x = np.random.default_rng(points).standard_normal((3, points, 1)).astype(np.float32)
        given = {"x": x, **({"c": np.array(True)} if case == "branches" else {})}
        session = exporter.inference_session(ir.to_proto(training))
        y, gradient = session.run(None, {**given, "y_grad": np.ones_like(x)})
        np.testing.assert_allclose(y, np.sin(x), atol=3e-5)
        np.testing.assert_allclose(gradient, np.cos(x), atol=3e-5)
        np.testing.assert_allclose(loaded(*map(torch.from_numpy, given.values())), np.sin(x), atol=3e-5)


def test_files_of_others_keep_their_type():
    model = exporter.build_gradient_graph(onnx.parser.parse_model(FOREIGN["a graph"]))
    forward = [node for node in model.graph if node.op_type == "DFT" and not (node.name or "").startswith("grad/")]
    assert [node.inputs[0].dtype for node in forward] == [ir.DataType.FLOAT] * 2


def test_gradients_of_files_of_others_have_the_digits_of_float32():
    """The forward is theirs; what a gradient adds to it is ours. The adjoint of a sum over all bins, weighted, is a transform of the weights."""
    text = '<ir_version: 10, opset_import: ["": 20]> g (float[2,1000,1] x) => (float[2,1000,2] y) { axis = Constant<value = int64 {1}>() y = DFT(x, , axis) }'
    session = exporter.inference_session(ir.to_proto(exporter.build_gradient_graph(onnx.parser.parse_model(text))))
    weights = np.random.default_rng(0).standard_normal((2, 1000, 2)).astype(np.float32)
    _, gradient = session.run(None, {"x": np.zeros((2, 1000, 1), np.float32), "y_grad": weights})
    right = np.fft.fft(weights[..., 0] - 1j * weights[..., 1].astype(np.float64)).real
    assert np.abs(gradient[..., 0] - right).max() < 1e-6 * np.abs(right).max()


def test_sizes_behind_are_what_they_are():
    """No value behind half of a spectrum keeps the name of the whole, nor the other way around."""
    program = exporter.export(Calls(lambda x: fft.irfft(fft.rfft(x), n=x.shape[-1])), (torch.randn(3, 16),), dynamic_shapes=(({1: "n"},),))
    shapes = [value.shape for node in program.model.graph if node.op_type == "DFT" for value in node.outputs]
    assert [str(shape[1]) for shape in shapes] == ["((n//2)) + 1", "n"]


def test_the_passes_find_nothing_left():
    for text in FOREIGN.values():
        model = ir.from_proto(onnx.parser.parse_model(text))
        quirks.apply((*quirks.OPTIMIZED, *quirks.LOADED), model)
        before = ir.to_proto(model).SerializeToString()
        quirks.apply((*quirks.OPTIMIZED, *quirks.LOADED), model)
        assert ir.to_proto(model).SerializeToString() == before
