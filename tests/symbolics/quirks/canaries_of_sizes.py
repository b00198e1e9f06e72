"""As canaries.py: sizes that are open, the types of integers and the range of float16."""

from __future__ import annotations

import io

import onnx_ir as ir
import onnxruntime
import torch
from onnx.reference import ReferenceEvaluator

from tests.support import Calls
from tests.symbolics.quirks.tools import differs, fails_to_export, torchscript_differs, torchscripted, translated


def factories():
    return torchscript_differs(lambda x: x + torch.logspace(0, x.shape[0], 3), torch.ones(3))


def powers():
    x, exponent = torch.tensor([1, 6, 8]), torch.tensor(0.3)
    found = ReferenceEvaluator(ir.to_proto(translated(torch.pow, x, exponent))).run(
        None, {"args_0": x.numpy(), "args_1": exponent.numpy()}
    )[0]
    return differs((found, torch.pow(x, exponent).numpy()))


def remainders():
    return torchscript_differs(lambda x: torch.remainder(x, -1.1), torch.arange(1.0, 60) * 1.1)


def half_numbers():
    return torchscript_differs(lambda x: x / 90000, torch.tensor([30000.0], dtype=torch.float16))


def assignments():
    def assigned(x):
        c = x.clone()
        c[torch.arange(2), :, torch.arange(2)] = 1.0
        return c

    return torchscripted(assigned, torch.zeros(2, 3, 2)) is None


def shifts():
    result = translated(lambda x: x << 4, torch.tensor([1], dtype=torch.uint8)).graph.outputs[0].producer()
    return result is not None and result.op_type == "Cast" and result.attributes.get_int("to") == ir.DataType.INT8


@torch.jit.script
def _rows_of_a_list(x: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    shape = list(x.shape)
    shape[0] = size
    return torch.zeros(shape).index_add(0, index, x)


def scripted_functions():
    return torchscripted(lambda x: _rows_of_a_list(x, torch.tensor([0, 1, 1]), x.shape[0]), torch.ones(3, 2)) is None


def lengths():
    open_rows = (({0: torch.export.Dim("n", min=2)},),)
    return fails_to_export(lambda x: x + torch.zeros(len(x), 1), torch.ones(3, 2), shapes=open_rows)


def scalar_axes():
    return torchscript_differs(lambda x: x.prod(0), torch.tensor(2.0))


def symbolic_sizes():
    model, shapes = Calls(lambda x: x * torch.sym_sqrt(x.shape[0])), (({0: torch.export.Dim("n", min=2)},),)
    try:
        torch.onnx.export(model, (torch.ones(3, 2),), dynamo=True, dynamic_shapes=shapes, verbose=False)
    except torch.onnx.errors.OnnxExporterError:
        return True
    return False


def wide_sizes():
    return bool(abs(torchscripted(lambda x: x / x.shape[0] ** 0.5, torch.ones(3).double())[0] - 3**-0.5) > 1e-12)


def number_arithmetic():
    model, shapes = Calls(lambda x: x * (x.shape[0] * 0.1)), (({0: torch.export.Dim("n", min=2)},),)
    made = torch.onnx.export(model, (torch.ones(3).double(),), dynamo=True, dynamic_shapes=shapes, optimize=False, verbose=False).model
    x = torch.ones(3).double().numpy()
    return bool(abs(ReferenceEvaluator(ir.to_proto(made)).run(None, {made.graph.inputs[0].name: x})[0][0] - 0.3) > 1e-12)


def norms_without_weights():
    def norm(x):
        return torch.nn.functional.batch_norm(x, torch.zeros(3), torch.ones(3))

    axes = {"x": {1: "channels"}}  # as behind a Function, whose outputs have no sizes in a trace
    try:
        torch.onnx.export(
            Calls(norm), (torch.ones(2, 3, 4),), io.BytesIO(), dynamo=False, opset_version=18, input_names=["x"], dynamic_axes=axes
        )
    except torch.onnx.errors.SymbolicValueError:
        return True
    return False


def antialias():
    def resized(x):
        return torch.nn.functional.interpolate(x, size=(3, 12), mode="bilinear", antialias=True, align_corners=True)

    x = torch.arange(80.0).sin().reshape(1, 1, 8, 10)
    session = onnxruntime.InferenceSession(ir.to_proto(translated(resized, x)).SerializeToString())
    return torchscript_differs(resized, x) and differs(
        (session.run(None, {session.get_inputs()[0].name: x.numpy()})[0], resized(x).numpy())
    )


def nearest():
    def resized(x):
        return torch.nn.functional.interpolate(x, scale_factor=1.7, mode="nearest-exact")

    x = torch.arange(6.0).reshape(1, 1, 6)
    program = torch.onnx.export(Calls(resized), (x,), dynamo=True, dynamic_shapes=(({2: torch.export.Dim.DYNAMIC},),), verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    return differs((session.run(None, {session.get_inputs()[0].name: x.numpy()})[0], resized(x).numpy()))
