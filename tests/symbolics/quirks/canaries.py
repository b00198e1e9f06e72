"""What is wrong upstream, without our cure: each function says whether it still is. Those of onnxruntime: canaries_of_onnxruntime.py."""

from __future__ import annotations

import copy
import functools
import math
import signal

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import onnxscript.optimizer
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.nn import functional

import exporter
from exporter.runtime.prepare import prepare
from exporter.runtime.session import session_options
from symbolics.node.metadata import pairing_of
from tests.exporter.runtime.build import forward, record
from tests.processes import python
from tests.support import Calls, missing
from tests.symbolics.quirks.tools import (
    differs,
    fails,
    gradient,
    op_types,
    torchscript_differs,
    torchscripted,
    translated,
    translated_rank,
)  # fmt: skip
from tests.zoo import functions as F


def masked_rows():
    return differs(gradient(lambda q, m: functional.scaled_dot_product_attention(q, q, q, m), torch.randn(1, 2, 3, 4), torch.eye(3) > 1))


def axes():
    return torchscript_differs(lambda x: x.movedim(-1, 0) * 2, torch.ones(2, 3))


def batch_norm_momentum():
    try:
        torch.export.export(nn.BatchNorm1d(3, momentum=None), (torch.randn(4, 3),), strict=False)
    except Exception:
        return True
    return False


def batch_norm_training():
    model = translated(nn.BatchNorm1d(3), torch.randn(4, 3))
    return all(node.attributes.get_int("training_mode", 0) == 0 for node in model.graph if node.op_type == "BatchNormalization")


def torchscript_gaps():
    return torchscripted(torch.atanh, torch.zeros(2)) is None


def builtins():
    types = []
    torch.export.export(Calls(lambda x: types.append(type(math.pow(2, 3))) or x + 1), (torch.ones(1),), strict=False)
    return types != [float]


def conjugates():
    return torchscripted(lambda x: x.mH * 2, torch.ones(2, 3)) is None and torchscripted(torch.vdot, torch.ones(3), torch.ones(3)) is None


def copies():
    return fails(lambda x: copy.deepcopy(x.detach()), torch.ones(3)) or torchscript_differs(
        lambda x: copy.deepcopy(x.detach()), torch.ones(3)
    )


def cross_entropy():
    def loss(x, target):
        return functional.cross_entropy(x, target, label_smoothing=0.5)

    x, target = torch.randn(4, 5), torch.tensor([1, 2, 3, 0])
    found = ReferenceEvaluator(ir.to_proto(translated(loss, x, target))).run(None, {"args_0": x.numpy(), "args_1": target.numpy()})[0]
    return differs((found, loss(x, target).numpy()))


def data_getter():
    traced = torch.jit.trace(Calls(lambda x: x.data * 2), (torch.ones(2),), check_trace=False)
    return bool((traced(torch.zeros(2)) != 0).all())


def floor_divide():
    try:
        translated(lambda x: 7 // x, torch.tensor([2, 3]))
    except torch.onnx.errors.OnnxExporterError:
        return True
    return False


def broadcast_copies():
    def written(x, y):
        return x.clone().copy_(y) + 1

    model = translated(written, torch.ones(2, 3), torch.ones(3))
    return "Expand" not in {node.op_type for node in model.graph}


def boolean_sums():
    return "Add" in {node.op_type for node in translated(lambda x: x + (x == x), torch.tensor([True])).graph}


def extrema():
    return fails(lambda x: x.amax(), torch.ones(2, 3))


def switches():
    import torch.ao.quantization as ao

    try:
        torch.export.export(ao.FakeQuantize().eval(), (torch.randn(4, 3),), strict=False)
    except Exception:
        return True
    return False


def squeezes():
    return "Squeeze" in op_types(translated(lambda x: x.squeeze(1), torch.ones(2, 3)))


def instance_norm_statistics():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("var", torch.ones(2))

        def forward(self, x):
            y = functional.instance_norm(x, self.mean, self.var, use_input_stats=True, momentum=1.0)  # whatever an export left in them
            return y.sum() * 0 + self.mean

    return torchscript_differs(Norm(), torch.ones(3, 2, 5))


def losses():
    return torchscript_differs(functional.l1_loss, torch.ones(2), torch.zeros(2))


def lost_initializers():
    model = translated(lambda x: (x.clamp(min=0.1).clamp(max=1.0), x.clamp(min=0.2).clamp(max=2.0)), torch.randn(3))
    onnxscript.optimizer.optimize(model)
    read = [value for node in model.graph for value in node.inputs if value is not None and value.producer() is None]
    return not all(value.is_initializer() or value.is_graph_input() for value in read)


def mixed_norms():
    half, weight = torch.randn(4, 5, dtype=torch.float16), torch.ones(5)
    model = translated(lambda x, w, b: torch.layer_norm(x, [5], w, b), half, weight, weight)
    return any(len({value.dtype for value in node.inputs}) > 1 for node in model.graph if node.op_type == "LayerNormalization")


def embedding():
    return differs(gradient(lambda w, i: functional.embedding(i, w, padding_idx=0), torch.randn(3, 2), torch.tensor([0, 1])))


def extremum():
    return differs(gradient(lambda x: torch.max(x, 0)[0], torch.ones(3, 2)))


def std():
    with np.errstate(all="ignore"):
        return differs(gradient(lambda x: torch.std(x, 0), torch.ones(3, 2)))


def log_sigmoid():
    with np.errstate(all="ignore"):
        return differs(gradient(functional.logsigmoid, torch.tensor([-200.0, 1.0])))


def fake_quantization():
    """The last level of 127.5: torch's reciprocal makes it a little more or less."""
    tops = torch.linspace(1, 4, 50)
    call = functools.partial(torch.fake_quantize_per_channel_affine, scale=tops / 127.5, zero_point=torch.zeros(50, dtype=torch.int32), axis=0, quant_min=-128, quant_max=127)  # fmt: skip
    return torchscript_differs(lambda x: call(x), -tops[:, None])


def deleted_slices():
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[1])
    one, two = ir.node("Abs", [x]), ir.node("Neg", [x])
    graph = ir.Graph([x], [*one.outputs, *two.outputs], nodes=[one, two], opset_imports={"": 18}, name="g")
    del graph.outputs[1:]
    return two.outputs[0].is_graph_output()


class Writes(nn.Module):
    """A part of a buffer, then all of it; that part is the same from whatever an export left in the buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.ones(3))

    def forward(self, x):
        self.kept[0] = x.sum()
        self.kept.mul_(2)
        return (x + self.kept)[0]


def mutated_buffers():
    return len(translated(Writes(), torch.ones(3)).graph.outputs) == 1


def written_parts():
    return torchscript_differs(Writes(), torch.ones(3))


def empty_names():
    model, options = forward(record(F.SavesInput, torch.ones(2))), session_options(["tests.zoo.functions:*"])
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    model.graph.node[0].input.append("")
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options)
    except Exception:
        return True
    return False


def gather_elements():
    node = helper.make_node("GatherElements", ["x", "i"], ["y"], axis=-1)
    x, i = np.arange(140, dtype=np.float32).reshape(2, 70), np.random.default_rng(0).integers(0, 70, (2, 69))
    inputs = [
        helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape),
        helper.make_tensor_value_info("i", onnx.TensorProto.INT64, i.shape),
    ]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)])
    try:
        ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])).run(None, {"x": x, "i": i})
    except ValueError:
        return True
    return False


def widened_halves(folder):
    model = forward(record(F.SavesInput, torch.ones(2, dtype=torch.float16)))
    (call,) = model.graph.node
    call.input[0], call.output[1] = "before", "after"
    model.graph.node.insert(0, helper.make_node("Softplus", ["x0"], ["before"]))
    model.graph.node.append(helper.make_node("Softplus", ["after"], [model.graph.output[0].name]))
    prepare(model)
    options = session_options(["tests.zoo.functions:*"])
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    optimized = onnx.load(options.optimized_model_filepath).graph.node
    makers = {name: node.op_type for node in optimized for name in node.output}
    return next(makers[node.input[0]] for node in optimized if node.op_type == "PythonOp") != "Cast"


def angles():
    with np.errstate(all="ignore"):
        return differs(gradient(torch.atan2, torch.tensor([1.0]), torch.tensor([0.0])))


def bags_of_embeddings():
    def bags(w, offsets):
        return functional.embedding_bag(torch.tensor([1, 2]), w, offsets, mode="max")

    return torchscript_differs(bags, torch.ones(3, 2), torch.tensor([0, 2]))


def binary_cross_entropy():
    with np.errstate(all="ignore"):
        return differs(gradient(functional.binary_cross_entropy_with_logits, torch.tensor([-90.0]), torch.tensor([1.0])))


def bounds():
    return differs(gradient(lambda x, low: torch.clamp(x, min=low), torch.ones(2), torch.ones(2)))


def clamps():
    return differs(gradient(lambda x: x.clamp(max=1), torch.ones(2)))


def wide_numbers():
    x = torch.ones(1, dtype=torch.float64)
    found = ReferenceEvaluator(ir.to_proto(translated(lambda x: x * 0.1, x))).run(None, {"args_0": x.numpy()})[0]
    return abs(found[0] - 0.1) > 1e-12


def near_numbers():
    model = translated(lambda x: x + 1e-9, torch.ones(2))
    onnxscript.optimizer.optimize(model)
    return not any(node.op_type == "Add" for node in model.graph)


def distances():
    with np.errstate(all="ignore"):
        return differs(gradient(lambda x: torch.linalg.vector_norm(x, 3), torch.zeros(2)))


def unsorted():
    return torchscript_differs(lambda x: torch.unique(x, sorted=False, dim=0), torch.tensor([[3.0], [1.0], [2.0]]))


def stable_sorts():
    return fails(lambda x: torch.sort(x, stable=True), torch.tensor([3.0, 1.0]))


def logarithm_bases():
    return torchscripted(torch.log2, torch.tensor([8192.0]))[0] != 13


def logarithms():
    x = torch.tensor([-7.0])
    found = ReferenceEvaluator(ir.to_proto(translated(torch.special.log_ndtr, x))).run(None, {"args_0": x.numpy()})[0]
    return differs((found, torch.special.log_ndtr(x).numpy()))


def open_clips():
    return differs(gradient(functional.relu6, torch.tensor([0.0, 6.0])))


def padding():
    return torchscript_differs(lambda x: functional.pad(x, (-1, 2), mode="circular"), torch.arange(5.0).reshape(1, 1, 5))


def pools():
    return torchscript_differs(lambda x: functional.avg_pool2d(x, 2, divisor_override=3), torch.ones(1, 1, 2, 2))


def scalars():
    return torchscript_differs(torch.log10, torch.tensor(0.5))


def scatters():
    return torchscript_differs(lambda x, u: x.index_add(0, torch.tensor([0, 0]), u), torch.ones(2), torch.ones(2))


def half_results():
    return translated(lambda x: x.sum(0), torch.ones(2, dtype=torch.float16)).graph.outputs[0].dtype != ir.DataType.FLOAT16


def regions():
    try:
        from torchvision.ops import roi_align
    except ImportError:
        missing("packages", "torchvision is not installed")
    boxes = torch.tensor([[0, 0.3, 0.4, 5.1, 4.7]])
    training = exporter.build_gradient_graph(translated(lambda b, x: roi_align(x, b, 2), boxes, torch.randn(1, 2, 8, 8)), wrt=["args_0"])
    return not pairing_of(training).unreached


def recurrent_kernels():
    from torch.export import _patches

    operator, key = torch.ops.aten.lstm.input, torch._C.DispatchKey.CompositeImplicitAutograd
    with _patches.register_lstm_while_loop_decomposition():
        operator._get_dispatch(key)
    try:
        return operator._dispatch_cache.get(key) is _patches.lstm_while_loop_impl
    finally:
        operator._dispatch_cache.clear()


def repeats():
    return translated_rank(lambda x: x.tile((2, 1, 3))) != 3


def sizes():
    return torchscript_differs(lambda x: x * torch.sym_max(x.shape[0], 2), torch.ones(3))


def softplus_threshold():
    return torchscript_differs(lambda x: functional.softplus(x, 1.0, 0.5), torch.ones(2))


def splits():
    return torchscript_differs(lambda x: torch.hsplit(x, 2)[1], torch.ones(4))


def torchscript_scatters():
    return torchscript_differs(lambda x, u: x.index_put((torch.tensor([0, 0]),), u, accumulate=True), torch.ones(2), torch.ones(2))


def variance():
    return torchscript_differs(lambda x: torch.var(x, 0, correction=0.5), torch.arange(3.0))


def wide_constants():
    return bool(abs(torchscripted(torch.log10, torch.tensor([3.0]).double())[0] - np.log10(3)) > 1e-12)


def integer_products():
    return fails(torch.ops.aten._int_mm, torch.ones(32, 8, dtype=torch.int8), torch.ones(8, 8, dtype=torch.int8))


def matrix_powers():
    model = ir.to_proto(translated(lambda x: torch.linalg.matrix_power(x, 0), torch.ones(3, 2, 2)))
    return ReferenceEvaluator(model).run(None, {"args_0": np.ones((3, 2, 2), np.float32)})[0].shape != (3, 2, 2)


def projections():
    model = ir.to_proto(translated(torch.nn.LSTM(4, 8, proj_size=3), torch.ones(2, 1, 4)))
    try:
        found = onnxruntime.InferenceSession(model.SerializeToString()).run(
            None, {model.graph.input[0].name: np.ones((2, 1, 4), np.float32)}
        )
    except Exception:
        return True
    return found[0].shape != (2, 1, 3)


def places_of_numbers():
    model = ir.to_proto(translated(torch.argwhere, torch.tensor(2.0)))
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"args_0": np.array(2, np.float32)})[0].shape != (1, 0)


def multinomial():
    p = np.array([[0, 1, 0, 1]], np.float32)
    model = ir.to_proto(translated(lambda x: torch.multinomial(x.repeat(100, 1), 2), torch.from_numpy(p)))
    drawn = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"args_0": p})[0]
    return bool((drawn[:, 0] == drawn[:, 1]).any())


def gaussian_nll():
    return fails(lambda x, v: functional.gaussian_nll_loss(x, x, v), torch.ones(3), torch.ones(3))


def empty_reshapes():
    model = "torch.nn.GroupNorm(2, 4), (torch.zeros(0, 4, 3),)"
    script = f"import io, torch; torch.onnx.export({model}, io.BytesIO(), dynamo=False, verbose=False)"
    return python("-W", "ignore", "-c", script).returncode == -signal.SIGFPE


def rounding():
    return torchscript_differs(torch.floor_divide, torch.tensor([-7.0]), torch.tensor([2.0]))


def truth():
    return torchscript_differs(torch.any, torch.tensor([0.3]))


def ellipses():
    model = translated(lambda a, b: torch.einsum("...i,i...->...", a, b), torch.ones(2, 3), torch.ones(3))
    try:
        onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    except Exception as error:
        return "Ellipsis" in str(error)
    return False


def embedding_renorms():
    return torchscript_differs(lambda w: torch.nn.functional.embedding(torch.tensor([0]), w * 1.0, max_norm=1.0), torch.ones(2, 2))


def narrow_indices():
    return torchscript_differs(lambda x, i: x.index_put((i,), x[:2] * 2), torch.ones(3, 2), torch.tensor([0, 1], dtype=torch.int32))


def windows():
    return fails(lambda x: x + torch.bartlett_window(3), torch.ones(3))


def ranges():
    return any(node.op_type == "CastLike" for node in translated(lambda x: x + torch.arange(0, 2.5), torch.ones(3)).graph)  # 2.5 to an int


def narrow_types():
    return torchscript_differs(lambda x: torch.softmax(x, 0, dtype=torch.float32), torch.arange(3))


def integers():
    return torchscript_differs(lambda x: x.clamp(min=0.5), torch.arange(3)) or torchscript_differs(lambda x: x | 2, torch.arange(3))


def nested_bodies():
    from torch._higher_order_ops.while_loop import while_loop

    def body(i, x):
        return i + 1, torch.cond(i > 0, torch.sin, torch.cos, (x,))

    return fails(lambda x: while_loop(lambda i, _: i < 2, body, (torch.tensor(0), x.clone()))[1], torch.ones(3))


def observers():
    state = [torch.ones(1), torch.ones(1), torch.zeros(1), torch.ones(1), torch.ones(1), torch.zeros(1, dtype=torch.int32)]
    return fails(lambda x: torch.fused_moving_avg_obs_fake_quant(x, *state, 0.01, 0, 255, -1), torch.ones(3))


def log_determinants():
    x = np.float32(0.1) * np.eye(60, dtype=np.float32)
    return ReferenceEvaluator(ir.to_proto(translated(torch.logdet, torch.from_numpy(x)))).run(None, {"args_0": x})[0] == -np.inf


def error_functions():
    x = torch.tensor([5.0])
    return ReferenceEvaluator(ir.to_proto(translated(torch.erfc, x))).run(None, {"args_0": x.numpy()})[0] == 0
