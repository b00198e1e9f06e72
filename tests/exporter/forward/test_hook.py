"""hook(), install() and export(): the same model from each, nothing left behind."""

from __future__ import annotations

import io
import threading

import onnx
import pytest
import torch

import exporter
from tests.support import nodes
from tests.symbolics.capture.functions import Boom, Call, Mlp, Scale, Setup


def caught():
    """What stands where Function.apply is caught, on every torch."""
    function = torch.autograd.function
    names = "_bind_default_args", "_call_custom_function_call", "custom_function_call"
    return (
        vars(function._SingleLevelFunction).get("apply"),
        vars(function.FunctionMeta).get("__getattribute__"),
        *(getattr(function, name, None) for name in names),
    )


BEFORE = caught()


def hooked(model, x, dynamo, f=None, **options):
    with exporter.hook() as handle:
        torch.onnx.export(model, (x,), f, dynamo=dynamo, **({"verbose": False} if dynamo else {}), **options)
    return handle.program.model_proto


def test_hook_and_export_are_equal(dynamo, tmp_path):
    model, x = Mlp(), torch.randn(2, 4)
    exported = exporter.export(model, (x,), dynamo=dynamo).model_proto.SerializeToString(deterministic=True)
    assert hooked(model, x, dynamo).SerializeToString(deterministic=True) == exported
    assert hooked(model, x, dynamo, tmp_path / "a.onnx").SerializeToString(deterministic=True) == exported
    loaded = onnx.load(tmp_path / "a.onnx")
    assert loaded.SerializeToString(deterministic=True) == exported
    if not dynamo:
        buffer = io.BytesIO()
        hooked(model, x, dynamo, buffer)
        assert onnx.load_from_string(buffer.getvalue()).SerializeToString(deterministic=True) == exported


def test_the_onnx_program_itself_is_finished(tmp_path):
    with exporter.hook():
        program = torch.onnx.export(Mlp(), (torch.randn(2, 4),), dynamo=True, verbose=False)
    assert len(nodes(program.model, "PythonOp")) == 1 and "pythonop.state" in program.model.metadata_props
    program.save(tmp_path / "torch.onnx")
    onnx.checker.check_model(str(tmp_path / "torch.onnx"), full_check=True)


def test_two_exports_are_byte_identical(dynamo, tmp_path):
    model, x = Mlp(), torch.randn(2, 4)
    for name in ("a.onnx", "b.onnx"):
        exporter.export(model, (x,), dynamo=dynamo).save(tmp_path / name)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_early_bound_export(dynamo):
    early = torch.onnx.export
    with exporter.hook() as handle:
        early(Mlp(), (torch.randn(2, 4),), None, dynamo=dynamo)
    assert len(nodes(handle.program.model, "PythonOp")) == 1


def test_install(dynamo):
    exporter.install(inline=[Setup])
    try:
        buffer = io.BytesIO()
        model = Call(lambda m, x: Setup.apply(Scale.apply(x, x)))
        torch.onnx.export(model, (torch.randn(2, 4),), buffer, dynamo=dynamo)
        assert [n.op_type for n in onnx.load_from_string(buffer.getvalue()).graph.node].count("PythonOp") == 1
    finally:
        exporter.uninstall()
    exporter.uninstall()
    assert caught() == BEFORE


def test_all_is_restored(dynamo):
    import torch.onnx._internal.exporter._compat as compat
    import torch.onnx._internal.torchscript_exporter.utils as utils

    before = compat.export_compat, utils.export
    with exporter.hook():
        with exporter.hook():
            exporter.export(Mlp(), (torch.randn(2, 4),), dynamo=dynamo)
        assert caught() != BEFORE
    assert caught() == BEFORE
    assert (compat.export_compat, utils.export) == before


def test_all_is_restored_after_an_exception(dynamo):
    from torch._dynamo import trace_rules

    allowed = set(trace_rules._allowed_callable_ids.function_ids if hasattr(trace_rules._allowed_callable_ids, "function_ids") else ())
    with pytest.raises(exporter.ExportError, match="Boom"):
        exporter.export(Call(lambda m, x: Boom.apply(x)), (torch.randn(2, 4),), dynamo=dynamo, eager_check=False)  # which would fail before
    assert caught() == BEFORE
    x = torch.randn(3, requires_grad=True)
    Scale.apply(x, torch.ones(3)).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))
    assert not hasattr(torch._C, "_unset") and torch._C._get_tracing_state() is None
    if hasattr(trace_rules._allowed_callable_ids, "function_ids"):
        assert set(trace_rules._allowed_callable_ids.function_ids) == allowed


def test_eager_calls_inside_a_hook_stay_eager():
    with exporter.hook():
        x = torch.randn(3, requires_grad=True)
        Scale.apply(x, torch.ones(3)).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))


@pytest.mark.slow
def test_a_training_thread_beside_an_export(dynamo):
    stop, failures, steps = threading.Event(), [], []

    def train():
        weight = torch.rand(8, requires_grad=True)
        while not stop.is_set():
            x = torch.randn(8)
            weight.grad = None
            y = Scale.apply(x, weight, 2.0)
            y.sum().backward()
            if type(y) is not torch.Tensor or not torch.equal(weight.grad, 5 * x * 2.0):
                failures.append(y)
            steps.append(1)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(3):
            program = exporter.export(Mlp(), (torch.randn(2, 4),), dynamo=dynamo)
            assert len(nodes(program.model, "PythonOp")) == 1
    finally:
        stop.set()
        thread.join()
    assert steps and not failures


def test_a_users_symbolic_of_prim_python_op_is_kept():
    def mine(g, *args, **kwargs):
        return g.op("my::Op", *[a for a in args if isinstance(a, torch._C.Value)])

    torch.onnx.register_custom_op_symbolic("prim::PythonOp", mine, 1)
    try:
        exporter.export(Mlp(), (torch.randn(2, 4),), dynamo=False)
        buffer = io.BytesIO()
        torch.onnx.export(Mlp(), (torch.randn(2, 4),), buffer, dynamo=False, autograd_inlining=False, opset_version=17)
        assert "Op" in [n.op_type for n in onnx.load_from_string(buffer.getvalue()).graph.node if n.domain == "my"]
    finally:
        torch.onnx.unregister_custom_op_symbolic("prim::PythonOp", 1)


def test_an_exported_program_captured_inside_the_hook():
    with exporter.hook() as handle:
        captured = torch.export.export(Mlp(), (torch.randn(2, 4),), strict=False)
        with pytest.warns(exporter.PythonopWarning, match="captured before"):
            torch.onnx.export(captured, dynamo=True, verbose=False)
    assert len(nodes(handle.program.model, "PythonOp")) == 1


def test_an_exported_program_of_a_closed_hook():
    with exporter.hook():
        captured = torch.export.export(Mlp(), (torch.randn(2, 4),), strict=False)
    with exporter.hook(), pytest.raises(Exception, match="hook is closed"):
        torch.onnx.export(captured, dynamo=True, verbose=False)


@pytest.mark.parametrize("opset", [13, 18, 20, 23])
def test_opsets(opset):
    program = exporter.export(Mlp(), (torch.randn(2, 4),), opset_version=opset)
    assert len(nodes(program.model, "PythonOp")) == 1
    onnx.checker.check_model(program.model_proto, full_check=True)


def test_kwargs_and_names(dynamo):
    class Model(torch.nn.Module):
        def forward(self, x, *, scale=None, flag=True):
            return Scale.apply(x, scale) if flag else x

    program = exporter.export(
        Model(),
        (torch.randn(2, 4),),
        {"scale": torch.rand(4)},
        dynamo=dynamo,
        dynamic_shapes={"x": {0: torch.export.Dim("batch", min=2)}, "scale": None},
        output_names=["y"],
    )
    assert [v.name for v in program.model.graph.inputs] == ["x", "scale"]
    assert [v.name for v in program.model.graph.outputs] == ["y"]
    assert [str(d) for d in program.model.graph.inputs[0].shape] == ["batch", "4"]


def test_numbers_among_the_arguments_are_constants(dynamo):
    class Model(torch.nn.Module):
        def forward(self, x, power, flags, y=None):
            return x**power - (y if flags[0] else x)

    x, y = torch.rand(2, 4), torch.rand(2, 4)
    program = exporter.export(Model(), (x, 3, [True], y), dynamo=dynamo)
    assert [v.name for v in program.model.graph.inputs] == ["x", "y"]
    (got,) = exporter.reference_evaluator(program).run(None, {"x": x.numpy(), "y": y.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), x**3 - y)
