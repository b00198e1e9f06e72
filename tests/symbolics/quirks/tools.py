"""What torch, onnxruntime and eager make of a small model, without our cures."""

from __future__ import annotations

import io

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import exporter
from tests.support import Calls


def translated(model, *args):
    """What torch.onnx.export(dynamo=True) makes of a model, or of a function."""
    model = model if isinstance(model, nn.Module) else Calls(model)
    return torch.onnx.export(model, args, dynamo=True, optimize=False, verbose=False).model


def op_types(model):
    return [node.op_type for node in model.graph]


def on_onnxruntime(nodes, feeds, initializers=None, options=None, cures=()):
    """The output y of a graph of these nodes, whose inputs have the types and shapes of the feeds.

    Args:
        nodes, feeds, initializers: The graph; arrays by name.
        options: Of the session.
        cures: Graph passes that are applied first.
    """
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape) for name, value in feeds.items()],
        [onnx.ValueInfoProto(name="y")],
        [onnx.numpy_helper.from_array(value, name) for name, value in (initializers or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    mended = ir.from_proto(model)
    for cure in cures:
        cure(mended, list(mended.graph))
    return onnxruntime.InferenceSession(ir.to_proto(mended).SerializeToString(), options).run(None, feeds)[0]


def gradient(function, *args):
    """Of the sum of a function's result by its first argument: of torch's translation, and eager's."""
    training = exporter.build_gradient_graph(translated(function, *args), wrt=["args_0"])
    x, *rest = (value.detach() for value in args)
    y = function(x.requires_grad_(), *rest)
    seed = np.ones(y.shape, np.float32)
    feeds = dict(zip((value.name for value in training.graph.inputs), (*(a.detach().numpy() for a in args), seed), strict=True))
    found = ReferenceEvaluator(ir.to_proto(training)).run(None, feeds)[-1]
    return found, torch.autograd.grad(y.sum(), x)[0].numpy()


def differs(pair):
    return not np.allclose(*pair, rtol=1e-4, atol=1e-5)


def torchscripted(function, *args):
    """What torch.onnx.export(dynamo=False) makes of a function, as outputs on onnxruntime; None where it fails."""
    file = io.BytesIO()
    try:
        torch.onnx.export(Calls(function), args, file, dynamo=False, opset_version=18)
        session = onnxruntime.InferenceSession(file.getvalue())
        return session.run(None, {value.name: x.numpy() for value, x in zip(session.get_inputs(), args, strict=True)})[0]
    except Exception:
        return None


def translated_rank(function):
    """The rank that torch.onnx.export(dynamo=False) declares for the result of a function of a matrix."""
    file = io.BytesIO()
    torch.onnx.export(Calls(function), (torch.ones(2, 3),), file, dynamo=False, opset_version=18)
    return len(onnx.load_from_string(file.getvalue()).graph.output[0].type.tensor_type.shape.dim)


def fails_to_export(function, *args, shapes):
    """Whether torch.export cannot take a function of these open axes."""
    try:
        torch.export.export(Calls(function), args, dynamic_shapes=shapes, strict=False)
    except Exception:
        return True
    return False


def fails(function, *args):
    try:
        translated(function, *args)
    except Exception:
        return True
    return False


def torchscript_differs(function, *args):
    found, expected = torchscripted(function, *args), function(*args).numpy()
    return found is None or found.shape != expected.shape or differs((found, expected))
