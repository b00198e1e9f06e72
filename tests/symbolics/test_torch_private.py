"""The private names of torch: each has a test of its own, and they stand in one module.

When a release of torch moves one of them, the test that fails has its name.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import math
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch

from symbolics import torch_private as private
from symbolics.capture.binding import has_setup_context
from symbolics.capture.interception import intercept, is_method_of_c
from tests.processes import ROOT

# ------------------------------------------------------------------------------------------------------- a test a name


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale=2):
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


in_c = pytest.mark.xfail(not is_method_of_c(), raises=AttributeError, reason="apply is Python on this torch: it hands nothing over")


class Mapped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_SingleLevelFunction():
    assert issubclass(torch.autograd.Function, private.SingleLevelFunction)
    assert "apply" not in vars(private.SingleLevelFunction) or is_method_of_c(), "it takes the place that our hook takes"
    assert not has_setup_context(Double)


def test_FunctionMeta():
    assert type(Double) is private.FunctionMeta
    assert "__getattribute__" not in vars(private.FunctionMeta), "it takes the place that our hook takes"


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_apply_is_caught(late):
    early, seen, x = Double.apply, [], torch.ones(1)
    undo = intercept(lambda cls, *args, **kwargs: seen.append((cls, args, kwargs)), lambda: True)
    try:
        (Double.apply if late else early)(x, scale=3)
    finally:
        undo()
    assert seen == [(Double, (x,), {"scale": 3})], "Function.apply goes another way than symbolics/capture/interception.py knows"
    assert early(x).item() == Double.apply(x).item() == 2


def test_apply_of_base():
    x = torch.ones(2, requires_grad=True)
    y = private.apply_of_base(Double)(x)
    y.sum().backward()
    assert x.grad.tolist() == [2, 2]


@in_c
def test_helpers_of_apply():
    """C still looks both up, at each call, in this order; `call` only under a transform."""
    assert _helpers_called() == ["bind", "call"]


def _helpers_called():
    seen, originals = [], private.helpers_of_apply()
    bind, _ = originals

    def binds(forward, args, kwargs):
        seen.append("bind")
        private.enter_transform()
        return bind(forward, args, kwargs)

    def calls(cls, args, kwargs):
        seen.append("call")
        private.leave_transform()
        return torch.full((1,), 2.0)

    private.replace_helpers_of_apply(binds, calls)
    try:
        assert Mapped.apply(torch.ones(1)).item() == 2
    finally:
        private.replace_helpers_of_apply(*originals)
    assert Mapped.apply(torch.ones(1)).item() == 2
    return seen


@in_c
def test_replace_helpers_of_apply():
    before = private.helpers_of_apply()
    _helpers_called()
    assert private.helpers_of_apply() == before


def test_transforms_active():
    seen = []
    torch.func.vmap(lambda x: seen.append(private.transforms_active()) or x)(torch.ones(2))
    assert seen == [True]
    assert not private.transforms_active()


def test_enter_transform():
    private.enter_transform()
    try:
        assert private.transforms_active()
    finally:
        private.leave_transform()


def test_leave_transform():
    private.enter_transform()
    private.leave_transform()
    assert not private.transforms_active()
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_transform_depth():
    seen = []
    torch.func.grad(lambda x: torch.func.vmap(lambda y: seen.append(private.transform_depth()) or y)(x).sum())(torch.ones(2))
    assert seen == [2] and private.transform_depth() == 0


def test_leave_transforms():
    private.enter_transform()
    private.enter_transform()
    private.leave_transforms(1)
    assert private.transform_depth() == 1
    private.leave_transforms(0)
    assert private.transform_depth() == 0
    assert Double.apply(torch.ones(1)).item() == 2


def test_parametrization_cache():
    model = torch.nn.Linear(2, 2)
    torch.nn.utils.parametrize.register_parametrization(model, "weight", torch.nn.Identity())
    assert not private.parametrization_cache()
    with torch.nn.utils.parametrize.cached():
        model(torch.ones(1, 2))
        assert len(private.parametrization_cache()) == 1


def test_function_of():
    y = Double.apply(torch.ones(1, requires_grad=True))
    assert private.function_of(y.grad_fn) is Double
    assert private.function_of((y * 2).grad_fn) is None


def test_is_module_hook(monkeypatch):
    linear = torch.nn.Linear(2, 2)
    linear.register_full_backward_hook(lambda *_: None)
    seen = [type(node) for node, _ in linear(torch.ones(1, 2, requires_grad=True)).grad_fn.next_functions]
    node = linear(torch.ones(1, 2, requires_grad=True)).grad_fn
    assert private.is_module_hook(private.function_of(node)), seen
    assert not private.is_module_hook(Double)


@pytest.fixture
def operator():
    library = torch.library.Library("private_names", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CPU")
    library.impl("double", lambda x: Double.apply(x), "Autograd")
    yield torch.ops.private_names.double
    library._destroy()


def test_operator_name(operator):
    assert private.operator_name(operator) == private.operator_name(operator.default) == "private_names::double"
    assert private.operator_name(torch.ops.aten.sin.default) == private.operator_name(torch.sin) == private.operator_name(None) == ""


def test_autograd_kernel(operator):
    x = torch.ones(1, requires_grad=True)
    for called in (operator, operator.default):
        y = private.autograd_kernel(called, [x])(x)
        assert y.item() == 2 and private.function_of(y.grad_fn) is Double
    assert private.autograd_kernel(torch.ops.aten.add, [x]) is None, "several overloads"
    assert private.autograd_kernel(operator, []) is None


def test_tracing_questions():
    answers = {}

    class Asks(torch.nn.Module):
        def forward(self, x):
            answers.update({f.__name__: f() for f in private.tracing_questions()})
            return x + 1

    assert not any(f() for f in private.tracing_questions())
    torch.export.export(Asks(), (torch.ones(1),), strict=False)
    assert answers["is_exporting"] and answers["is_compiling"]
    torch.onnx.export(Asks(), (torch.ones(1),), io.BytesIO(), dynamo=False)
    assert answers["is_tracing"] and answers["is_in_onnx_export"]


def test_tracing_questions_of_c():
    module, names = private.tracing_questions_of_c()
    seen = []
    assert {name: getattr(module, name)() for name in names} == names
    torch.jit.trace(lambda x: seen.append([getattr(module, name)() for name in names]) or x + 1, torch.ones(1), check_trace=False)
    assert all(seen[0])


def test_functions(monkeypatch):
    seen = []
    original = private.functions().custom_function_call
    monkeypatch.setattr(private.functions(), "custom_function_call", lambda cls, *args: seen.append(cls) or original(cls, *args))
    torch.func.vmap(Mapped.apply)(torch.ones(2))
    assert seen == [Mapped], "Function.apply under torch.func no longer looks custom_function_call up there"


def test_paused_capture():
    counts = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            counts.append(func)
            return func(*args, **(kwargs or {}))

    def traced(x):
        with private.paused_capture():
            assert not private.is_tracing()
            torch.sin(x.detach())
        assert private.is_tracing()
        return x + 1

    with private.paused_capture():
        assert torch.ones(1).sum() == 1
    graph = torch.jit.trace(traced, (torch.ones(1),), check_trace=False).graph
    assert "aten::sin" not in str(graph)
    assert "aten::add" in str(graph)

    class Sine(torch.nn.Module):
        def forward(self, x):
            with private.paused_capture():
                torch.sin(torch.zeros(1))
            return x + 1

    exported = torch.export.export(Sine(), (torch.ones(1),), strict=False)
    assert "sin" not in str(exported.graph)


def test_shares_memory():
    x = torch.ones(4)
    assert private.shares_memory(x, x[1:])
    assert not private.shares_memory(x, x.clone())


def _inside_export(function):
    """Run in the middle of torch.export, with the fake input."""
    seen = {}

    class Probe(torch.nn.Module):
        def forward(self, x):
            seen["result"] = function(x)
            return x + 1

    batch = torch.export.Dim("batch")
    torch.export.export(Probe(), (torch.ones(3, 2),), dynamic_shapes=({0: batch},), strict=False)
    return seen["result"]


def test_detect_fake_mode():
    assert private.detect_fake_mode([torch.ones(1)]) is None
    mode = _inside_export(lambda x: private.detect_fake_mode([x]))
    assert hasattr(mode, "shape_env")
    assert callable(mode.shape_env.create_symintnode)


def test_real_tensors():
    def probe(x):
        with private.paused_capture(), private.real_tensors():
            return type(torch.ones(2)), torch.ones(2).sum().item()

    assert _inside_export(probe) == (torch.Tensor, 2.0)


def test_sizes_watched():
    with private.sizes_watched(None) as asked:
        assert asked == []

    def probe(x):
        with private.sizes_watched(private.detect_fake_mode([x]).shape_env) as asked:
            int(x.shape[0])
        return [str(expression) for expression in asked]

    assert len(_inside_export(probe)) == 1, "int() of a size no longer goes through ShapeEnv.evaluate_expr"


def test_allow_in_dynamo():
    from torch._dynamo import trace_rules

    with private.allow_in_dynamo([Double]):
        assert id(Double) in trace_rules._allowed_callable_ids
        assert trace_rules.is_callable_allowed(Double)
    assert id(Double) not in trace_rules._allowed_callable_ids


def test_add_traced_node():
    op = torch.library.Library("pythonop_test", "FRAGMENT")
    op.define("noted(Tensor x) -> Tensor")
    op.impl("noted", lambda x: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("pythonop_test::noted", lambda x: torch.empty_like(x), lib=op)

    def translate(x):
        node = ir.Node("", "Neg", [x])
        private.add_traced_node(node)
        return node.outputs[0]

    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.ops.pythonop_test.noted(x)

    program = torch.onnx.export(
        Model(),
        (torch.ones(2),),
        dynamo=True,
        verbose=False,
        optimize=False,
        custom_translation_table={torch.ops.pythonop_test.noted.default: translate},
    )
    assert [node.op_type for node in program.model.graph] == ["Neg"]


def _is_called(module, name, export):
    """Whether torch.onnx.export looks a function up in its module at each call."""
    original, seen = getattr(module, name), []

    @functools.wraps(original)
    def noted(*args, **kwargs):
        seen.append((args, kwargs))
        return original(*args, **kwargs)

    setattr(module, name, noted)
    try:
        export()
    finally:
        setattr(module, name, original)
    return seen


def test_dynamo_exporter():
    model, args = torch.nn.ReLU(), (torch.ones(2),)
    seen = _is_called(private.dynamo_exporter(), "export_compat", lambda: torch.onnx.export(model, args, dynamo=True, verbose=False))
    assert seen[0][0][:2] == (model, args)
    parameters = inspect.signature(private.dynamo_exporter().export_compat).parameters
    assert {"f", "optimize", "verify", "custom_translation_table", "external_data", "kwargs"} <= set(parameters)
    assert list(parameters)[:3] == ["model", "args", "f"]


def test_captured_by_dynamo():
    program = torch.onnx.export(torch.nn.ReLU(), (torch.ones(2),), dynamo=True, verbose=False)
    assert isinstance(program._capture_strategy, str)
    assert "NonStrict" in program._capture_strategy
    assert private.captured_by_dynamo(program) is False


def test_torchscript_exporter(tmp_path):
    model, args = torch.nn.ReLU(), (torch.ones(2),)
    seen = _is_called(
        private.torchscript_exporter(), "export", lambda: torch.onnx.export(model, args, str(tmp_path / "m.onnx"), dynamo=False)
    )
    assert seen[0][0][0] is model
    assert {"kwargs", "training", "do_constant_folding", "keep_initializers_as_inputs", "opset_version"} <= set(
        inspect.signature(private.torchscript_exporter().export).parameters
    )


def test_torchscript_passes(tmp_path, monkeypatch):
    class Transposes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, 2))

        def forward(self, x):
            return x @ self.weight.t()

    passes, results, kinds = private.torchscript_passes(), [], []
    original = passes._jit_pass_onnx_constant_fold

    def without_parameters(graph, parameters, opset):
        results.append(original(graph, {}, opset))
        kinds.extend(node.kind() for node in graph.nodes())
        return parameters

    monkeypatch.setattr(passes, "_jit_pass_onnx_constant_fold", without_parameters)
    torch.onnx.export(Transposes(), (torch.ones(2, 2),), str(tmp_path / "m.onnx"), dynamo=False)
    assert "onnx::Transpose" in kinds, "it folds a parameter that it was not given"
    assert results == [{}], "folded constants no longer stay nodes of the graph: they are new inputs now"


def test_shape_inference_of_graphs(tmp_path, monkeypatch):
    passes, files = private.torchscript_passes(), {}
    original = passes._jit_pass_onnx_graph_shape_type_inference
    for infers in (True, False):
        seen = []
        monkeypatch.setattr(
            passes,
            "_jit_pass_onnx_graph_shape_type_inference",
            lambda *args, i=infers, s=seen: s.append(1) or (original(*args) if i else None),
        )
        path = tmp_path / "m.onnx"
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Unflatten(1, (2, 2)), torch.nn.Flatten(0))
        torch.manual_seed(0)
        torch.onnx.export(model, (torch.ones(2, 3),), str(path), dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "n"}})
        files[infers] = onnx.load(path).graph.output
        assert seen == [1, 1], "torch no longer infers the shapes of the graph twice"
    assert files[True] == files[False], "shapes of outputs are no longer known from the nodes alone"


def test_unheard():
    heard = []

    class Listens(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            heard.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Listens():
        with private.unheard():
            assert (x + 1).dtype == x.dtype
        assert not heard
        x + 1
    assert len(heard) == 1


def test_has_bodies(monkeypatch):
    passes, seen = private.torchscript_passes(), []
    original = passes._jit_pass_onnx_graph_shape_type_inference
    monkeypatch.setattr(
        passes,
        "_jit_pass_onnx_graph_shape_type_inference",
        lambda graph, *args: seen.append(private.has_bodies(graph)) or original(graph, *args),
    )

    @torch.jit.script
    def looped(x, n: int):
        for _ in range(n):
            if bool(x.sum() > 0):
                x = x - 1
        return x

    class Loops(torch.nn.Module):
        def forward(self, x):
            return looped(x, x.shape[0])

    for model in (Loops(), torch.nn.ReLU()):
        torch.onnx.export(model, (torch.ones(2),), io.BytesIO(), dynamo=False, input_names=["x"], dynamic_axes={"x": [0]})
    assert seen == [True, True, False, False]


def test_is_higher_order():
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(private.is_higher_order(func))
            return func(*args, **(kwargs or {}))

    def probe(x):
        with Watch():
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    _inside_export(probe)
    assert {True, False} <= set(seen)


def test_is_tracing():
    seen = []
    torch.jit.trace(lambda x: seen.append(private.is_tracing()) or x + 1, (torch.ones(1),), check_trace=False)
    assert seen[0] is True
    assert private.is_tracing() is False


class LooksAtItsInput(torch.nn.Module):
    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, x):
        self.look(x)
        return x + 1


def test_is_fake():
    seen = []
    torch.export.export(LooksAtItsInput(lambda x: seen.append(private.is_fake(x))), (torch.ones(2),), strict=False)
    assert seen[0] is True
    assert private.is_fake(torch.ones(2)) is False


def test_random_operators():
    with private.random_operators() as drawn:
        torch.ones(2).sin()
        assert not drawn
        torch.nn.functional.dropout(torch.rand(2), 0.5)
    assert len(drawn) >= 2


def test_set_grad_enabled():
    from torch.overrides import TorchFunctionMode

    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode(), torch.no_grad():
        pass
    assert private.set_grad_enabled in seen


def test_traced_producer():
    kinds = []

    def model(x):
        kinds.append(private.traced_producer(torch.sin(x)).kind())
        return x + x.shape[0]

    torch.jit.trace(model, (torch.ones(1),), check_trace=False)
    assert kinds[0] == "aten::sin"


def test_replace_traced():
    def model(x):
        sine, cosine = torch.sin(x), torch.cos(x)
        private.replace_traced(cosine, sine)
        return cosine + 0

    graph = torch.jit.trace(model, (torch.ones(1),), check_trace=False).graph
    added = next(graph.findNode("aten::add").inputs()).node().kind()
    assert added == "aten::sin"


def test_tensor_type():
    def model(x):
        y = torch.sin(x)
        private.traced_producer(y).output().setType(private.tensor_type(torch.int64, [None, None]))
        return y

    graph = torch.jit.trace(model, (torch.ones(1),), check_trace=False).graph
    assert "sin" in str(graph)
    assert private.tensor_type(torch.float16, [None, 3]).dtype() == torch.float16
    assert private.tensor_type(torch.float16, [None, 3]).dim() == 2
    assert private.tensor_type(torch.float16, [2, 3]).sizes() == [2, 3]


def test_non_persistent_buffers():
    module = torch.nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    assert private.non_persistent_buffers(module) == {"scratch"}
    private.non_persistent_buffers(module).clear()
    assert set(module.state_dict()) == {"kept", "scratch"}, "it is no longer the live set"


@pytest.mark.parametrize("keep", [True, False])
def test_keeps_graph(keep):
    seen = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            seen.append(private.keeps_graph())
            return grad

    Ask.apply(torch.ones(1, requires_grad=True)).sum().backward(retain_graph=keep)
    assert seen == [keep]


def test_answered_draws():
    asked = []

    def answer(shape, probability):
        asked.append((shape, probability))
        return torch.eye(3) if shape == (3, 3) else torch.ones(shape)

    attention = torch.nn.functional.scaled_dot_product_attention
    x = torch.ones(3, 3, requires_grad=True)
    with private.answered_draws(answer):
        y = torch.nn.functional.dropout(x, 0.5)
        attention(torch.rand(2, 3), torch.rand(2, 3), torch.rand(2, 3), dropout_p=0.25)
        torch.nn.LSTM(3, 4, 2, dropout=0.5).train()(x)
    assert torch.equal(y, 2 * torch.eye(3))
    assert [(math.prod(shape), probability) for shape, probability in asked] == [(9, 0.5), (4, 0.75), (12, 0.5)]
    y.sum().backward()
    assert torch.equal(x.grad, 2 * torch.eye(3))
    torch.nn.functional.dropout(x, 0.5)
    assert len(asked) == 3


def test_every_result():
    seen = []
    x = torch.ones(2, requires_grad=True)
    with private.every_result(lambda t: seen.append(tuple(t.shape))):
        (x.unsqueeze(0) * 3).sum().backward()
    assert (1, 2) in seen
    assert () in seen
    assert len(seen) >= 4, "operators of the backward are no longer seen"
    count = len(seen)
    x * 2
    assert len(seen) == count


def test_every_name_has_its_test():
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(private.__all__) - tests == set()


# ------------------------------------------------------------------------------------------------ and nowhere else

FOREIGN = ("torch", "onnx", "onnxscript", "onnxruntime", "onnx_ir", "numpy")

#: What may be private elsewhere. Each entry has its reason.
ALLOWED = {
    # torch documents its pytrees only there; everybody uses it.
    "torch.utils._pytree",
    # Tensor attributes with a leading underscore that torch's own documentation of extensions names.
    "_version",
    "_is_view",
    # An ATen operator that is named so.
    "_unsafe_view",
    "_native_batch_norm_legit_functional",
    # namedtuple
    "_fields",
    "_make",
    "_replace",
    "_asdict",
}
#: Modules with private names of their own reasons, and a test of their own below.
ELSEWHERE = {"symbolics/torch_private.py", "exporter/runtime/native/functions.py"}

SOURCES = sorted(p for package in ("exporter", "symbolics") for p in (ROOT / package).rglob("*.py"))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own_names() -> set[str]:
    """Names with an underscore that our own code gives to something."""
    own: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("self", "cls")
            ):
                own.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("_pythonop"):
                own.add(node.value)  # an attribute of ours on somebody else's object
    return own


def _foreign_private(path: Path, own: set[str]) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            chain = ast.unparse(node)
            root = chain.split(".")[0]
            # torch._C._x, or _x of anything, where the name is none of ours.
            if root != "sys" and node.attr not in ALLOWED and (root in FOREIGN or node.attr not in own):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {chain}")
            continue
        for name in names:
            if name.split(".")[0] in FOREIGN and any(map(_is_private, name.split("."))) and name not in ALLOWED:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_other_module_touches_private_names(path):
    if str(path.relative_to(ROOT)) in ELSEWHERE:
        return
    assert _foreign_private(path, _own_names()) == []


def test_the_walk_finds_them(tmp_path):
    source = tmp_path / "x.py"
    source.write_text(
        "import torch\nimport torch._dynamo\nfrom torch.onnx._internal import x\nfrom torch.x import _y\n"
        "torch._C._z()\ndef f(t): return t._backward_hooks\nfrom torch.utils import _pytree\nt._version\n"
    )
    import tests.symbolics.test_torch_private as here

    root, here.ROOT = here.ROOT, tmp_path
    try:
        assert sorted(int(text.split(":")[1]) for text in _foreign_private(source, {"_z"})) == [2, 3, 4, 5, 5, 6]
    finally:
        here.ROOT = root


def test_the_names_of_the_fast_path():
    fast = pytest.importorskip("exporter.runtime.native.functions")
    assert callable(torch._C._set_grad_enabled)
    assert callable(torch.autograd.Variable._execution_engine.run_backward)
    assert torch._C._is_any_autocast_enabled() is False
    x = torch.ones(2)
    assert torch._C._from_dlpack(torch.utils.dlpack.to_dlpack(x)).data_ptr() == x.data_ptr()
    assert all(map(callable, fast.FUNCTIONS))


def test_the_names_that_are_allowed_elsewhere():
    from torch.utils import _pytree

    x = torch.ones(2)
    version = x._version
    x.add_(1)
    assert x._version > version
    assert x[:1]._is_view()
    assert not x._is_view()
    assert _pytree.tree_leaves([1, (2,)]) == [1, 2]
    assert torch.ops.aten._unsafe_view(x, [2, 1]).shape == (2, 1)
    assert torch.ops.aten._native_batch_norm_legit_functional.default


def test_translator():
    model, args = torch.nn.ReLU(), (torch.ones(2),)
    seen = _is_called(
        private.translator(), "_exported_program_to_onnx_program", lambda: torch.onnx.export(model, args, dynamo=True, verbose=False)
    )
    assert isinstance(seen[0][0][0], torch.export.ExportedProgram)


def test_quiet_registration(caplog):
    def ours(x):
        raise AssertionError

    def theirs(x):
        raise AssertionError

    model, args = torch.nn.ReLU(), (torch.ones(2),)
    for function in (ours, theirs):
        function.__annotations__ = {"x": "no type"}
    table = {torch.ops.aten.erfinv.default: ours, torch.ops.aten.erfc.default: theirs}
    with caplog.at_level("WARNING"), private.quiet_registration([ours]):
        torch.onnx.export(model, args, dynamo=True, verbose=False, custom_translation_table=table)
    assert "theirs" in caplog.text
    assert "ours" not in caplog.text
