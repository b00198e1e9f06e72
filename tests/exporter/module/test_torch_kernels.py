"""Gradients by torch's own kernels in a loaded file: eager's, of every order, and none of them in a file."""

from __future__ import annotations

import warnings

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import exporter
from exporter.module import torch_kernels
from exporter.runtime.reference import reference_evaluator
from symbolics.errors import RunError, TrustError
from symbolics.graph.values import is_python_op
from symbolics.graph.walk import walk


@pytest.fixture(autouse=True)
def on_a_processor_without_wide_vectors(monkeypatch):
    """Where nothing is quicker for convolutions of images."""
    monkeypatch.setattr("exporter.cpu.accelerator.has_wide_vectors", lambda: False)


class Net(nn.Module):
    """Two layers, so that the first has a gradient of its result that is not one."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).sin()


def conv(kind, *sizes, **options):
    return Net(kind(2, 4, 3, *sizes, **options), nn.Tanh(), kind(4, 3, 1))


CASES = {
    "1 axis": (lambda: conv(nn.Conv1d), (2, 2, 7), 2),
    "2 axes": (lambda: conv(nn.Conv2d, stride=2, padding=1), (2, 2, 7, 6), 2),
    "3 axes": (lambda: conv(nn.Conv3d, dilation=2), (1, 2, 5, 6, 7), 2),
    "no bias": (lambda: conv(nn.Conv2d, bias=False, padding=(2, 0)), (2, 2, 5, 5), 2),
    "groups": (lambda: conv(nn.Conv2d, groups=2), (2, 2, 5, 5), 1),  # of a depthwise one torch's kernel is the slower
    "not as much padding behind": (
        lambda: Net(nn.ZeroPad2d((1, 0, 0, 2)), nn.Conv2d(2, 3, 3)),
        (2, 2, 5, 5),
        (1, 0),
    ),  # dynamo pads in the Conv
    "batch norm": (lambda: Net(nn.Linear(3, 4), nn.BatchNorm1d(4)), (5, 3), 1),
    "batch norm of images": (lambda: Net(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 1)), (3, 2, 5, 5), 3),
    "batch norm of no statistics": (lambda: Net(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)), (5, 3), None),
    "gelu": (lambda: Net(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), (5, 3), None),
    "gelu by tanh": (lambda: Net(nn.Linear(3, 4), nn.GELU(approximate="tanh"), nn.Linear(4, 2)), (5, 3), None),
}


def both(make, shape, dynamo=True, **options):
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = exporter.export(model, (x,), dynamo=dynamo, **options)
    return model, exporter.load(program, allow=[f"{__name__}:*"]).train(), program, x


def gradients(model, loaded, x):
    """Those of x and of the parameters, of both modules."""
    results = []
    for module in (model, loaded):
        x = x.detach().requires_grad_()
        module.zero_grad()
        module(x).square().sum().backward()
        results.append([x.grad, *(module.get_parameter(name).grad for name, _ in model.named_parameters())])
    return results


def bound_of(loaded):
    return next(v for v in vars(loaded).values() if hasattr(v, "plans"))


def plan_of(loaded):
    """The only one with gradients."""
    (plan,) = (plan for plan in bound_of(loaded).plans._plans.values() if plan.partition is not None)
    return plan


def kernels(loaded, wrt=None):
    """How many nodes of torch's kernels the backward has."""
    bound = bound_of(loaded)
    names = frozenset([*bound.inputs, *bound.state] if wrt is None else wrt)
    model = bound.plans.training_model(
        True, names & {*bound.inputs, *(n for n in bound.state if "running" not in n and "num_" not in n)}, torch_kernels.OVERRIDES
    ).model
    return sum(node.op_type == "PythonOp" for node in walk(model.graph))


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_eagers(case, dynamo):
    make, shape, count = CASES[case]
    model, loaded, program, x = both(make, shape, dynamo=dynamo)
    if count is not None:
        assert kernels(loaded) == (count[dynamo] if isinstance(count, tuple) else count)
    assert not any(n.op_type == "PythonOp" for n in program.model_proto.graph.node)
    results = gradients(model, loaded, x)
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", ["2 axes", "batch norm of images", "gelu", "gelu by tanh"])
def test_gradients_of_gradients_are_eagers(case):
    """They are those of the standard operators."""
    make, shape, _ = CASES[case]
    model, loaded, _, x = both(make, shape)
    results = []
    for module in (model, loaded):
        x = x.detach().requires_grad_()
        parameters = [module.get_parameter(name) for name, _ in model.named_parameters()]
        first = torch.autograd.grad(module(x).square().sum(), [x, *parameters], create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), [x, *parameters])])
    torch.testing.assert_close(results[1], results[0], rtol=2e-4, atol=2e-4)


class Cube(torch.autograd.Function):
    """What a user wrote: forward must not run a second time, and its gradient is Python too."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0] ** 2


class Cubes(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, x):
        for _ in range(self.count):
            x = Cube.apply(x).tanh()
        return x


@pytest.mark.parametrize("last", [lambda: nn.Conv2d(2, 2, 2), nn.GELU, lambda: nn.BatchNorm2d(2)], ids=["conv", "gelu", "batch norm"])
@pytest.mark.parametrize("first", [lambda: Cubes(3), lambda: nn.Sequential(*[nn.MaxPool2d(2, 1) for _ in range(4)])], ids=["own", "pools"])
def test_what_the_forward_has_left_is_known_to_every_order(first, last):
    """Contexts and indices have the same names in the graph with these kernels and in that of the standard operators."""
    model, loaded, _, x = both(lambda: Net(first(), last()), (2, 2, 6, 6))
    results = []
    for module in (model, loaded):
        x = x.detach().requires_grad_()
        y = module(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        results.append([y.detach(), grad.detach(), *torch.autograd.grad(grad.square().sum(), x)])
        del y, grad
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)
    plan = plan_of(loaded)
    residuals = plan.partition.residuals
    (first,) = plan.orders.first.values()
    (second,) = first.above.values()
    assert {name for name in residuals if name.startswith("grad/")} <= set(second.known)
    standard = {out.name for node in walk(first.model.graph) for out in node.outputs}
    assert set(residuals) <= standard
    assert len(bound_of(loaded).plans.store) == 0


@pytest.mark.parametrize("frozen", [["layers.0.weight"], ["layers.0.bias"], ["layers.0.weight", "layers.0.bias"]])
@pytest.mark.parametrize("wants_x", [True, False])
def test_only_what_is_wanted_is_computed(frozen, wants_x):
    make, shape, _ = CASES["2 axes"]
    model, loaded, _, x = both(make, shape)
    results = []
    for module in (model, loaded):
        for name in frozen:
            module.get_parameter(name).requires_grad_(False)
        x = x.detach().requires_grad_(wants_x)
        module(x).square().sum().backward()
        results.append([x.grad, *(module.get_parameter(name).grad for name, _ in model.named_parameters())])
    assert [g is None for g in results[0]] == [g is None for g in results[1]]
    given = [[g for g in found if g is not None] for found in results]
    torch.testing.assert_close(given[1], given[0], rtol=2e-5, atol=2e-5)


class Square(torch.autograd.Function):
    """x * x, with a context."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


class Called(nn.Module):
    def __init__(self, behind):
        super().__init__()
        self.first, self.behind = nn.Linear(3, 4), behind

    def forward(self, x):
        return self.behind(Square.apply(self.first(x)))


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("behind", [nn.GELU, lambda: nn.BatchNorm1d(4), lambda: nn.Sequential(nn.LayerNorm(4), nn.GELU())])
def test_what_a_function_has_left_is_found_by_the_second_order(behind, dynamo):
    """The context has the name that it has without torch's kernels."""
    torch.manual_seed(0)
    model, x = Called(behind()), torch.randn(5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = exporter.load(exporter.export(model, (x,), dynamo=dynamo), allow=[Square]).train()
    results = []
    for module in (model, loaded):
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(module(x).sin().sum(), x, create_graph=True)
        results.append([first, *torch.autograd.grad(first.square().sum(), x)])
    torch.testing.assert_close(results[1], results[0], rtol=2e-4, atol=2e-4)


def deep(kernel=3, channels=240, **options):
    """Convolutions whose results have few positions and whose weights are large."""
    return Net(nn.Conv2d(2, channels, 3, padding=1), nn.Conv2d(channels, channels + 4, kernel, **options), nn.Tanh())


@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: deep(stride=2, padding=1), (3, 2, 4, 3)),
        (lambda: deep(bias=False, dilation=(2, 1)), (2, 2, 6, 3)),
        (lambda: deep(padding=(1, 2), stride=(1, 2)), (1, 2, 2, 2)),
        (lambda: deep(kernel=(4, 3)), (5, 2, 4, 3)),
    ],
    ids=["strides", "dilation, no bias", "padding", "one position"],
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["known", "dynamic"])
def test_few_positions_are_products_of_matrices(make, shape, dynamic, monkeypatch):
    """onnxruntime's where the file says how many there are, else torch's."""
    sizes = ({2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC},) if dynamic else None
    model, loaded, _, x = both(make, shape, dynamic_shapes=sizes)
    assert model.layers[1].weight.numel() >= torch_kernels._LARGE_WEIGHT
    calls = []
    by_columns = torch_kernels._by_columns
    monkeypatch.setattr(torch_kernels, "_by_columns", lambda *given, **geometry: calls.append(given) or by_columns(*given, **geometry))
    results = gradients(model, loaded, x)
    assert len(calls) == int(dynamic)
    exact = model.double()
    x64 = x.detach().double().requires_grad_()
    exact.zero_grad()
    exact(x64).square().sum().backward()
    for found, reference in zip(results[1], [x64.grad, *(p.grad for p in exact.parameters())], strict=True):
        torch.testing.assert_close(found.double(), reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))


class TestBeside:
    """Gradients of weights that pass beside the session."""

    @pytest.mark.usefixtures("accelerated")
    def test_they_are_no_outputs_and_nobody_elses_memory(self):
        model, loaded, _, x = both(*CASES["2 axes"][:2])
        grads = []
        for _ in range(2):
            loaded.zero_grad()
            loaded(x.requires_grad_()).square().sum().backward()
            grads.append([p.grad for p in loaded.parameters()])
        plan = plan_of(loaded)
        backward = plan.orders.plain(plan.outputs)
        assert len(backward.passed) == 2 and len(backward.runner.names) == len(plan.wanted) - 2
        for first, second in zip(*grads, strict=True):
            assert first.data_ptr() != second.data_ptr()
            torch.testing.assert_close(first, second)

    def test_one_that_the_graph_reads_stays(self):
        """A weight that is used twice has a sum for its gradient."""

        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(2, 2, 3, padding=1)

            def forward(self, x):
                return self.conv(self.conv(x).tanh()).sin()

        model, loaded, _, x = both(Tied, (2, 2, 4, 4))
        results = gradients(model, loaded, x)
        torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-5)
        plan = plan_of(loaded)
        assert not plan.orders.plain(plan.outputs).passed

    def test_two_at_once_and_one_within_another(self):
        """Names are the same in both; each backward gets its own."""
        from concurrent.futures import ThreadPoolExecutor

        pairs = [both(*CASES["2 axes"][:2]) for _ in range(2)]
        for place, (model, loaded, _, _) in enumerate(pairs):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.add_(place)
                    loaded.get_parameter(name).copy_(parameter)

        def of_parameters(module, x):
            names = [name for name, _ in pairs[0][0].named_parameters()]
            return torch.autograd.grad(module(x.requires_grad_()).square().sum(), [module.get_parameter(name) for name in names])

        expected = [of_parameters(model, x) for model, _, _, x in pairs]
        with ThreadPoolExecutor(2) as pool:
            for _ in range(20):
                found = list(pool.map(lambda pair: of_parameters(pair[1], pair[3]), pairs))
                torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
        with torch_kernels.beside() as outer:
            outer["mine"] = torch.ones(1)
            torch.testing.assert_close(of_parameters(pairs[0][1], pairs[0][3]), expected[0], rtol=2e-5, atol=2e-5)
        assert list(outer) == ["mine"]


@pytest.mark.parametrize("case", ["2 axes", "gelu"])
def test_transforms_know_nothing_of_it(case):
    model, loaded, _, x = both(*CASES[case][:2])
    results = []
    for module in (model, loaded):
        parameters = {name: module.get_parameter(name).detach() for name, _ in model.named_parameters()}

        def loss(parameters, x, module=module):
            return torch.func.functional_call(module, parameters, (x,)).square().sum()

        moved = {name: torch.ones_like(value) for name, value in parameters.items()}
        first, tangent = torch.func.jvp(lambda p: torch.func.grad(loss)(p, x), (parameters,), (moved,))
        results.append([*first.values(), *tangent.values()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_a_loaded_file_saves_none_of_it(tmp_path):
    make, shape, _ = CASES["batch norm of images"]
    _, loaded, program, x = both(make, shape)
    loaded(x).sum().backward()
    program.save(tmp_path / "m.onnx")
    text = (tmp_path / "m.onnx").read_bytes()
    assert b"Gradient" not in text.replace(b"pythonop.gradient", b"")
    assert not any(node.domain == "com.microsoft" for node in onnx.load(tmp_path / "m.onnx").graph.node)


def test_their_backward_says_what_they_are():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(NotImplementedError):
        torch_kernels.BatchNormGradient.apply(torch.ones(3, 2), torch.ones(3, 2), x, x, x, 1e-5)[0].sum().backward()


def zeros(*sizes, dtype=torch.float32):
    return torch.zeros(sizes, dtype=dtype)


X, W, G = (2, 3, 5, 5), (4, 3, 3, 3), (2, 4, 3, 3)
ONES, NONE, ALL = (1, 1), (0, 0), (True, True, True)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (torch_kernels.BatchNormGradient, (zeros(*X), zeros(*X), zeros(3), zeros(1), zeros(3), 1e-5)),
        (torch_kernels.BatchNormGradient, (zeros(*X), zeros(*X), zeros(0), zeros(3), zeros(3), 1e-5)),
        (torch_kernels.BatchNormGradient, (zeros(*X), zeros(*X), zeros(3), zeros(3), zeros(2), 1e-5)),
        (torch_kernels.BatchNormGradient, (zeros(1, 3, 1, 1), zeros(*X), zeros(3), zeros(3), zeros(3), 1e-5)),
        (torch_kernels.BatchNormGradient, (zeros(*X), zeros(*X, dtype=torch.float64), zeros(3), zeros(3), zeros(3), 1e-5)),
        (torch_kernels.BatchNormGradient, (zeros(3), zeros(3), zeros(0), zeros(0), zeros(0), 1e-5)),
        (torch_kernels.ConvolutionGradient, (zeros(2, 4, 2, 3), zeros(*X), zeros(*W), ONES, NONE, ONES, ALL)),
        (torch_kernels.ConvolutionGradient, (zeros(2, 5, 3, 3), zeros(*X), zeros(*W), ONES, NONE, ONES, ALL)),
        (torch_kernels.ConvolutionGradient, (zeros(1, 4, 3, 3), zeros(*X), zeros(*W), ONES, NONE, ONES, ALL)),
        (torch_kernels.ConvolutionGradient, (zeros(*G), zeros(2, 2, 5, 5), zeros(*W), ONES, NONE, ONES, ALL)),
        (torch_kernels.ConvolutionGradient, (zeros(*G), zeros(*X), zeros(*W), (0, 1), NONE, ONES, ALL)),
        (torch_kernels.ConvolutionGradient, (zeros(*G), zeros(*X), zeros(*W), ONES, (-1, 0), ONES, ALL)),
        (torch_kernels.ConvolutionGradient, (zeros(*G), zeros(*X), zeros(*W), (1,), NONE, ONES, ALL)),
        (torch_kernels.ConvolutionGradient, (zeros(*G), zeros(*X), zeros(*W), ONES, NONE, ONES, (True,))),
        (torch_kernels.ConvolutionGradient, (zeros(3), zeros(3), zeros(3), (), (), (), ALL)),
        (torch_kernels.ConvolutionGradient, (*(zeros(*s, dtype=torch.int64) for s in (G, X, W)), ONES, NONE, ONES, ALL)),
    ],
)
def test_a_file_cannot_lie_to_torchs_kernels(function, arguments):
    """The kernels read as far as the sizes of another tensor say, and the sizes are the file's."""
    with pytest.raises(RunError, match=function.__name__):
        function.apply(*arguments)


def test_honest_sizes_pass():
    torch_kernels.ConvolutionGradient.apply(zeros(*G), zeros(*X), zeros(*W), ONES, NONE, ONES, ALL)
    torch_kernels.BatchNormGradient.apply(zeros(*X), zeros(*X), zeros(3), zeros(3), zeros(3), 1e-5)


class Names(nn.Module):
    """What a stranger's file might call."""

    def forward(self, x):
        return torch_kernels.BatchNormGradient.apply(x, x, x[0], x[1], x[1], 1e-5)[0]


@pytest.mark.parametrize("opened", [exporter.load, exporter.inference_session, reference_evaluator])
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_a_file_that_names_them_is_refused(opened, training):
    """Only the backward that load itself makes may call them."""
    x = torch.randn(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = exporter.export(Names(), (x,), eager_check=False).model
    if training:
        model = exporter.build_gradient_graph(model)
    given = model if opened is exporter.load else ir.to_proto(model)
    with pytest.raises(TrustError, match="BatchNormGradient"):
        opened(given)
    assert opened(given, allow=[torch_kernels.BatchNormGradient])


def test_a_training_file_whose_gradient_names_them_is_refused():
    text = '<ir_version: 10, opset_import: ["": 20]> g (float[1,1,3,3] x, float[1,1,2,2] w) => (float[1,1,2,2] y) { y = Conv(x, w) }'
    training = exporter.build_gradient_graph(onnx.parser.parse_model(text), overrides=torch_kernels.OVERRIDES)
    assert any(is_python_op(node) for node in training.graph)
    module, x, w = exporter.load(training), torch.randn(1, 1, 3, 3, requires_grad=True), torch.randn(1, 1, 2, 2, requires_grad=True)
    with pytest.raises(TrustError, match="ConvolutionGradient"):
        module(x, w)


@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize("linears", [2, 3])
def test_among_more_products_than_convolutions_there_are_none(linears, monkeypatch):
    """Two convolutions, the first of which needs no gradient for what it reads."""
    calls, apply = [], torch_kernels.ConvolutionGradient.forward
    monkeypatch.setattr(torch_kernels.ConvolutionGradient, "forward", lambda *args: calls.append(args) or apply(*args))

    def make():
        layers = [nn.Linear(4, 4) for _ in range(linears)]
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Flatten(2), nn.Linear(36, 4), *layers[1:])

    model, loaded, _, x = both(make, (2, 3, 10, 10))
    results = gradients(model, loaded, x)
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-5)
    assert len(calls) == (2 if linears == 2 else 0)


@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("1 axis", 2),
        ("2 axes", 0),
        ("3 axes", 2),
        ("groups", 0),
        ("batch norm of images", 0),
        ("batch norm", 0),
        ("open", 0),
    ],
)
def test_with_wide_vectors_convolutions_of_images_have_none(case, count, monkeypatch):
    monkeypatch.setattr("exporter.cpu.accelerator.has_wide_vectors", lambda: True)
    calls = []
    for function in torch_kernels.FUNCTIONS:
        apply = function.forward
        monkeypatch.setattr(function, "forward", lambda *args, apply=apply: calls.append(args) or apply(*args))
    make, shape = CASES.get(case, CASES["2 axes"])[:2]
    sizes = ({0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC},) if case == "open" else None
    model, loaded, _, x = both(make, shape, dynamic_shapes=sizes)
    results = gradients(model, loaded, x)
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-5)
    assert len(calls) == count


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_a_depthwise_convolution_of_open_sizes_and_of_no_images(dynamo):
    """Of no images the gradient is zero, as in eager."""
    sizes = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    model, loaded, _, _ = both(lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16), (2, 16, 5, 6), dynamo=dynamo, dynamic_shapes=(sizes,))
    for images, size in ((3, 7), (0, 5), (2, 4)):
        results = gradients(model, loaded, torch.randn(images, 16, size, size + 1))
        torch.testing.assert_close(results[1], results[0], rtol=2e-4, atol=2e-4)
