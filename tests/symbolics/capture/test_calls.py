"""One call, one node: arguments, outputs, shapes, marks, on both exporters, run in a fresh process against eager."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx_ir import DataType

import exporter
from symbolics.node.attributes import read_attributes, values_of
from symbolics.node.metadata import results_of
from tests.processes import FreshProcess
from tests.support import counted_applies, nodes
from tests.symbolics.capture import functions as f

BATCH = {"args": ({0: torch.export.Dim("batch", min=2)},)}


def roundtrip(model, dynamo, fresh: FreshProcess, tmp_path, x=None, batch=5, dynamic=True, **options):
    """Export at batch 2, run the file at another batch in another process, compare with eager."""
    x = torch.randn(2, 4) if x is None else x
    expected_calls = copy.deepcopy(model)
    with counted_applies() as calls, torch.no_grad():
        expected_calls(x.clone())
    program = exporter.export(model, (x,), dynamo=dynamo, dynamic_shapes=BATCH if dynamic else None, **options)
    onnx.checker.check_model(program.model_proto, full_check=True)
    program.save(tmp_path / "model.onnx")
    if not options.get("inline"):
        assert len(nodes(program.model, "PythonOp")) == len(calls)
    for size in (2, batch) if dynamic else (2,):
        other = torch.randn(size, 4)
        with torch.no_grad():
            expected = copy.deepcopy(model)(other.clone())
        expected = expected if isinstance(expected, tuple) else (expected,)
        outputs = fresh.run(
            tmp_path / "model.onnx", {program.model.graph.inputs[0].name: other}, allow=["tests.symbolics.capture.functions:*"]
        )
        assert len(outputs) == len(program.model.graph.outputs)
        assert len(results_of(program.model)) == len(expected)
        for got, want in zip(outputs, expected, strict=False):  # next values of buffers stand behind them
            np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-6)
    return program


def the_call(program):
    (node,) = nodes(program.model, "PythonOp")
    return read_attributes(values_of(node))


def _weighted(y, seven, rest):
    return y * seven + rest["offset"]


CASES = {
    "parameter and default": lambda m, x: f.Scale.apply(x, m.weight, 0.1),
    "torch code": lambda m, x: f.Scale.apply(x, torch.ones(4)),
    "numpy code": lambda m, x: f.NumpyGelu.apply(x),
    "other sizes": lambda m, x: f.NumpyPairs.apply(x)[0] + 1,
    "two dynamic outputs": lambda m, x: f.NumpyPairs.apply(x),
    "data-dependent size": lambda m, x: f.NonZero.apply(x, False) * 2,
    "data-dependent size in numpy": lambda m, x: f.NonZero.apply(x, True) * 2,
    "size argument": lambda m, x: f.TakeRows.apply(x, x.shape[0]),
    "computed size argument": lambda m, x: f.TakeRows.apply(x, x.shape[0] - 1, (x.shape[0] * 2, 3)),
    "shape argument": lambda m, x: f.TakeRows.apply(x, 1, x.shape),
    "list, dict, None, str": lambda m, x: f.Concat.apply([x, x * 2], {"a": x, "b": 3}, x + 1, "side by side", None),
    "keywords": lambda m, x: f.Concat.apply([x], {"a": x, "b": 3}, mode="side by side", extra=x),
    "defaults of keywords that cannot be passed, numbers among the results": lambda m, x: _weighted(*f.Flagged.apply(x)),
    "several outputs": lambda m, x: f.Halves.apply(x)[0] + f.Halves.apply(x)[3],
    "unused output": lambda m, x: f.Halves.apply(x)[3] * 2,
    "setup_context": lambda m, x: f.Setup.apply(x, power=3),
    "two equal calls": lambda m, x: f.Setup.apply(x) + f.Setup.apply(x),
    "same tensor twice": lambda m, x: f.Scale.apply(x, x, 2.0),
    "early-bound apply": lambda m, x: early(x, m.weight, 0.5),
    "class with symbolic": lambda m, x: f.WithSymbolic.apply(x),
    "in place on an activation": lambda m, x: f.AddInPlace.apply(x * 1, 2.0) + 1,
    "in place, seen through the input": lambda m, x: in_place(x * 1) * 3,
    "in place on the model's input": lambda m, x: f.AddInPlace.apply(x, 2.0) + x,
    "in place on a buffer": lambda m, x: f.AddInPlace.apply(m.buffer, 2.0) + x + m.buffer,
}
early = f.Scale.apply


def in_place(x):
    f.AddInPlace.apply(x, 2.0)
    return x


@pytest.mark.parametrize("name", CASES)
def test_call(name, dynamo, fresh, tmp_path):
    model = f.Call(CASES[name], weight=torch.nn.Parameter(torch.rand(4)), buffer=torch.rand(4))
    program = roundtrip(model, dynamo, fresh, tmp_path)
    for node in nodes(program.model, "PythonOp"):
        assert len(node.outputs) == 1 + len(node.attributes["output_tensor_types"].value)
        assert node.outputs[0].name == "", "an unused context output keeps its place and has no name"
        assert all(v.name and v.dtype is not None for v in node.outputs[1:])
    assert torch.equal(model.buffer, f.Call(CASES[name], buffer=model.buffer).buffer)


def test_buffers_are_as_they_were(dynamo):
    model = f.Call(lambda m, x: f.AddInPlace.apply(m.buffer, 2.0) + x, buffer=torch.zeros(4))
    program = exporter.export(model, (torch.randn(2, 4),), dynamo=dynamo)
    assert model.buffer.eq(0).all()
    assert not program.model.graph.initializers["buffer"].const_value.numpy().any()


def test_in_place_on_a_view(fresh, tmp_path):
    roundtrip(f.Call(lambda m, x: view(x * 1)), True, fresh, tmp_path)
    with pytest.raises(exporter.ExportError, match=r"functions:AddInPlace.*view.*clone"):
        exporter.export(f.Call(lambda m, x: view(x * 1)), (torch.randn(2, 4),), dynamo=False)


def view(x):
    f.AddInPlace.apply(x[:1], 2.0)
    return x


def test_a_size_stays_symbolic(dynamo):
    program = exporter.export(
        f.Call(lambda m, x: f.TakeRows.apply(x, x.shape[0])), (torch.randn(2, 4),), dynamo=dynamo, dynamic_shapes=BATCH
    )
    call = the_call(program)
    assert call.args[1].kind == "size"
    assert call.input_types[1] == DataType.INT64 and call.input_ranks[1] == 0
    assert "Shape" in {n.op_type for n in nodes(program.model)}


def test_symbolic_dims_go_through_the_node():
    program = exporter.export(f.Call(lambda m, x: f.NumpyPairs.apply(x)), (torch.randn(2, 4),), dynamic_shapes=BATCH)
    assert [[str(d) for d in o.shape] for o in program.model.graph.outputs] == [["2*batch - 1", "4"], ["batch", "batch"]]


def test_a_float_of_a_size_is_refused():
    model = f.Call(lambda m, x: f.Scale.apply(x, x, x.shape[0] / 2))
    with pytest.raises(exporter.ExportError, match=r"functions:Scale.*float computed from a dynamic size"):
        exporter.export(model, (torch.randn(2, 4),), dynamic_shapes=BATCH)


def test_a_float_of_a_tensor_is_refused():
    model = f.Call(lambda m, x: f.Scale.apply(x, x, x.max().item()))
    with pytest.raises(exporter.ExportError, match=r"functions:Scale.*a float that was read out of a tensor.*pass the tensor"):
        exporter.export(model, (torch.randn(2, 4),))


class TakesNumbers(torch.autograd.Function):
    """Asks for the number behind a size; its own output shape depends on it."""

    @staticmethod
    def forward(ctx, x):
        rows = int(x.shape[0])
        return x * rows, torch.ones(rows * 2 - 1, 4)


@pytest.mark.parametrize(
    "dim", [torch.export.Dim("batch", min=2), torch.export.Dim.AUTO, torch.export.Dim.DYNAMIC], ids=["named", "auto", "dynamic"]
)
def test_a_size_turned_into_a_number_is_not_frozen(dim, fresh, tmp_path):
    program = exporter.export(f.Call(lambda m, x: TakesNumbers.apply(x)), (torch.randn(2, 4),), dynamic_shapes={"args": ({0: dim},)})
    first, second = program.model.graph.outputs
    batch = str(first.shape[0])
    assert not batch.isdigit() and str(second.shape[0]) == f"2*{batch} - 1"
    program.save(tmp_path / "model.onnx")
    got, ones = fresh.run(
        tmp_path / "model.onnx", {program.model.graph.inputs[0].name: torch.ones(7, 4)}, allow=["tests.symbolics.capture.test_calls:*"]
    )
    assert (got == 7).all() and ones.shape == (13, 4)


def test_two_equal_calls_stay_two_nodes(dynamo):
    program = exporter.export(f.Call(lambda m, x: f.Setup.apply(x) + f.Setup.apply(x)), (torch.randn(2, 4),), dynamo=dynamo, optimize=True) if dynamo else \
        exporter.export(f.Call(lambda m, x: f.Setup.apply(x) + f.Setup.apply(x)), (torch.randn(2, 4),), dynamo=dynamo)  # fmt: skip
    one, two = (read_attributes(values_of(n)).id for n in nodes(program.model, "PythonOp"))
    assert one != two


def test_flags(dynamo):
    def forward(m, x):
        y = f.Scale.apply(x, m.weight, 2.0)
        a, index, _, b = f.Halves.apply(y)
        with torch.no_grad():
            c = f.Scale.apply(b, m.weight, 3.0)
        return a, index, b, c

    model = f.Call(forward, weight=torch.nn.Parameter(torch.rand(4)))
    program = exporter.export(model, (torch.randn(2, 4),), dynamo=dynamo)
    first, second, third = (read_attributes(values_of(n)) for n in nodes(program.model, "PythonOp"))
    assert first.input_requires_grads == (True, True) and first.output_requires_grads == (True,)
    assert second.input_requires_grads == (True,) and second.output_requires_grads == (True, False, True)
    assert third.input_requires_grads == (False, False) and third.output_requires_grads == (False,)
    assert second.outputs[2] is None and second.convention == "d"


def test_flags_do_not_depend_on_the_example(dynamo):
    """A gradient of any float input may be asked for, whether or not the example needed one, under no_grad too."""
    model = f.Call(lambda m, x: f.Scale.apply(x, m.weight, 2.0), weight=torch.nn.Parameter(torch.rand(4), requires_grad=False))
    with torch.no_grad():
        assert the_call(exporter.export(model, (torch.randn(2, 4),), dynamo=dynamo)).input_requires_grads == (True, False)
    with torch.inference_mode():
        assert the_call(exporter.export(model, (torch.randn(2, 4),), dynamo=dynamo)).input_requires_grads == (True, False)


def test_training_mode(dynamo):
    model = f.Mlp()
    assert the_call(exporter.export(model.train(), (torch.randn(2, 4),), dynamo=dynamo)).training is True
    assert the_call(exporter.export(model.eval(), (torch.randn(2, 4),), dynamo=dynamo)).training is False
    assert model.training is False


def test_autocast_is_recorded(dynamo):
    def forward(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return f.Setup.apply(x)

    assert the_call(exporter.export(f.Call(forward), (torch.randn(2, 4),), dynamo=dynamo)).autocast.dtypes == {"cpu": "bfloat16"}


def test_module_path_and_source_line(dynamo):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), f.Mlp())
    program = exporter.export(model, (torch.randn(2, 4),), dynamo=dynamo)
    (node,) = nodes(program.model, "PythonOp")
    assert node.metadata_props["pythonop.module"] == "1"
    assert node.metadata_props["pythonop.source"].startswith("tests.symbolics.capture.functions:")


def test_undeclared_mutation_warns(dynamo):
    with pytest.warns(exporter.PythonopWarning, match=r"functions:Sneaky.*without ctx.mark_dirty"):
        exporter.export(f.Call(lambda m, x: f.Sneaky.apply(x)), (torch.randn(2, 4),), dynamo=dynamo)


@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.PCG64, np.random.SFC64])
def test_draws_of_numpy_warn(generator):
    """Whichever bit generator numpy draws from."""

    class Draws(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * np.random.rand()

    before = np.random.get_bit_generator()
    np.random.set_bit_generator(generator(0))
    try:
        with pytest.warns(exporter.PythonopWarning, match=r"Draws.*numpy.random.seed"):
            exporter.export(f.Call(lambda m, x: Draws.apply(x)), (torch.randn(2, 4),), dynamo=False)
    finally:
        np.random.set_bit_generator(before)


def test_a_closure_warns(dynamo):
    hidden = torch.randn(4, requires_grad=True)

    class Hides(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * hidden.detach()

    with pytest.warns(exporter.PythonopWarning, match=r"Hides.*closes over 'hidden'"):
        exporter.export(f.Call(lambda m, x: Hides.apply(x)), (torch.randn(2, 4),), dynamo=dynamo)


def test_cond_keeps_functions_in_its_branches(fresh, tmp_path):
    class Cond(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(4))

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: f.Scale.apply(x, self.weight, 2.0), lambda x: f.Scale.apply(x, self.weight, 3.0), (x,))

    model = Cond()
    program = exporter.export(model, (torch.randn(2, 4),), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=2)}})
    (branch,) = nodes(program.model, "If")
    for name in ("then_branch", "else_branch"):
        assert [n.op_type for n in branch.attributes[name].as_graph()].count("PythonOp") == 1
    onnx.checker.check_model(program.model_proto, full_check=True)
    program.save(tmp_path / "cond.onnx")
    for x in (torch.ones(3, 4), -torch.ones(5, 4)):
        (got,) = fresh.run(tmp_path / "cond.onnx", {"x": x}, allow=["tests.symbolics.capture.functions:*"])
        np.testing.assert_allclose(got, model(x).detach().numpy(), rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------- inline


@pytest.mark.parametrize(
    "inline", [f.Scale, [f.Scale], "tests.symbolics.capture.functions:Scale", ["*:Sca*"], "Scale", "tests.symbolics.*"], ids=str
)
def test_inline(inline, dynamo, fresh, tmp_path):
    program = roundtrip(
        f.Call(lambda m, x: f.Scale.apply(x, m.weight, 2.0), weight=torch.nn.Parameter(torch.rand(4))),
        dynamo,
        fresh,
        tmp_path,
        inline=inline,
    )
    assert not nodes(program.model, "PythonOp")


def test_inline_serves_a_symbolic():
    program = exporter.export(f.Call(lambda m, x: f.WithSymbolic.apply(x)), (torch.randn(2, 4),), dynamo=False, inline=[f.WithSymbolic])
    assert [n.op_type for n in nodes(program.model)] == ["Softsign"]


def test_reentrant_checkpoint_is_inlined_with_a_notice(dynamo, fresh, tmp_path):
    from torch.utils.checkpoint import checkpoint

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = f.Mlp()

        def forward(self, *args):
            return checkpoint(self.block, args[0], use_reentrant=True)

    with pytest.warns(exporter.PythonopWarning, match="CheckpointFunction.*inlined"):
        program = exporter.export(Model(), (torch.randn(2, 4),), dynamo=dynamo)
    (node,) = nodes(program.model, "PythonOp")
    assert node.attributes["input_requires_grads"].value == (1, 1, 0), "gradients reach the parameters"
    assert not nodes(program.model, "StopGradient")
    assert program.inlined == {"torch.utils.checkpoint:CheckpointFunction": program.inlined["torch.utils.checkpoint:CheckpointFunction"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error", exporter.PythonopWarning)
        exporter.export(f.Mlp(), (torch.randn(2, 4),), dynamo=dynamo)


class UsesModule(torch.autograd.Function):
    """A module as an argument."""

    @staticmethod
    def forward(ctx, module, x):
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        return None, grad


def test_a_module_argument_is_inlined_with_a_notice(dynamo):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x):
            return UsesModule.apply(self.inner, x)

    with pytest.warns(exporter.PythonopWarning, match="UsesModule.*inlined.*trainable parameters"):
        program = exporter.export(Model(), (torch.randn(2, 4),), dynamo=dynamo)
    assert "Gemm" in [n.op_type for n in nodes(program.model)]


def test_a_call_whose_result_nobody_reads_is_kept(dynamo, fresh, tmp_path):
    """Eager makes it; it may count, log or draw."""

    def forward(m, x):
        f.Scale.apply(x, m.weight, 2.0)
        (f.Setup.apply(x) * 3).exp()
        return f.Setup.apply(x, power=3)

    program = roundtrip(f.Call(forward, weight=torch.nn.Parameter(torch.rand(4))), dynamo, fresh, tmp_path)
    assert [n.op_type for n in nodes(program.model)] == ["PythonOp"] * 3
    assert len(program.model.graph.outputs) == 1


def test_the_file_says_the_types_of_all_outputs(dynamo):
    """onnxruntime cannot infer them."""
    program = exporter.export(f.Call(lambda m, x: f.Setup.apply(f.Halves.apply(x)[0])), (torch.randn(2, 4),), dynamo=dynamo)
    typed = {v.name for v in (*program.model_proto.graph.value_info, *program.model_proto.graph.output)}
    assert {v.name for n in nodes(program.model, "PythonOp") for v in n.outputs[1:]} <= typed


def test_the_kernel_of_a_convolution_from_a_function(dynamo):
    class Quantized(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.scale = torch.nn.Conv2d(2, 3, 3), torch.nn.Parameter(torch.rand(1))

        def forward(self, x):
            return torch.nn.functional.conv2d(x, f.Scale.apply(self.conv.weight * 2, self.scale), self.conv.bias)

    model, x = Quantized(), torch.randn(2, 2, 5, 5)
    program = exporter.export(
        model, (x,), dynamo=dynamo, dynamic_shapes={"x": {0: torch.export.Dim("batch"), 2: torch.export.Dim("height", min=4)}}
    )
    more = torch.randn(3, 2, 6, 5)
    (got,) = exporter.reference_evaluator(program, allow=["tests.*"]).run(None, {"x": more.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), model(more))
