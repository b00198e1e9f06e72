"""Gradients of real models, exported, against eager PyTorch: outputs and every parameter, within 1e-4 relative."""

from __future__ import annotations

import collections
import copy

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import exporter
from exporter.gradient_graph.build import build_gradient_graph
from symbolics.node.metadata import read_pairing, read_state
from symbolics.node.names import ORT_DOMAIN
from tests.end_to_end.models import zoo

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-4


class _T5(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, decoder_ids):
        return self.model(input_ids=ids, decoder_input_ids=decoder_ids, use_cache=False).logits


class _Bert(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids).logits


class _Residual(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out))
        self.b = nn.Sequential(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        self.skip = (
            nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride > 1 or width != out
            else nn.Identity()
        )

    def forward(self, x):
        return torch.relu(self.b(torch.relu(self.a(x))) + self.skip(x))


class _ResNet(nn.Module):
    """12 channels: onnxruntime shares equal initializers of up to 8 elements, and train-mode BatchNormalization overwrites its own."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 7, 2, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(_Residual(12, 12, 1), _Residual(12, 16, 2))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(nn.functional.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


class _Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(23, 8), kind(8, 12, num_layers=2, batch_first=True), nn.Linear(12, 23)

    def forward(self, ids):
        return self.head(self.cell(self.embed(ids))[0])


class _Steps(nn.Module):
    """A GRU cell in a Python loop over the steps: scripted, it is a Loop."""

    def __init__(self):
        super().__init__()
        self.x, self.h = nn.Linear(8, 36), nn.Linear(12, 36)

    def forward(self, x: torch.Tensor):
        h = torch.zeros(x.shape[0], 12)
        for t in range(x.shape[1]):
            r, z, n = self.x(x[:, t]).chunk(3, 1)
            u, v, w = self.h(h).chunk(3, 1)
            z = torch.sigmoid(z + v)
            h = (1 - z) * torch.tanh(n + torch.sigmoid(r + u) * w) + z * h
        return h


class _LoopedGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.steps, self.head = nn.Embedding(23, 8), _Steps(), nn.Linear(12, 23)

    def forward(self, ids):
        return self.head(self.steps(self.embed(ids)))


class _ScannedGRU(nn.Module):
    """A GRU cell under torch's scan: exported, it is a Scan whose body captures the weights."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(23, 8), nn.GRUCell(8, 12), nn.Linear(12, 23)

    def forward(self, ids):
        from torch._higher_order_ops.scan import scan

        def step(h, x):
            h = self.cell(x, h)
            return h, h.clone()

        return self.head(scan(step, torch.zeros(ids.shape[0], 12), self.embed(ids).transpose(0, 1))[1].transpose(0, 1))


class _UNet(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.down, self.mid, self.up, self.mode = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(6, 6, 3, 1, 1), nn.Conv2d(9, 3, 3, 1, 1), mode
        self.norm = nn.GroupNorm(2, 6)

    def forward(self, x):
        low = torch.nn.functional.silu(self.norm(self.mid(torch.nn.functional.gelu(self.down(x)))))
        return self.up(torch.cat([nn.functional.interpolate(low, scale_factor=2.0, mode=self.mode), x], 1))


def _ids(*shape):
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(0))


def _gpt2():
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return _Bert(transformers.GPT2LMHeadModel(config)), (_ids(2, 7),)


def _bert():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, max_position_embeddings=16
    )
    return _Bert(transformers.BertForMaskedLM(config)).eval(), (_ids(2, 7),)


def _t5():
    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, attn_implementation="eager")
    return _T5(transformers.T5ForConditionalGeneration(config)).eval(), (_ids(2, 7), _ids(2, 5))


def _llama():
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        attn_implementation="eager",
    )  # fmt: skip
    return _Bert(transformers.LlamaForCausalLM(config)), (_ids(2, 7),)


def _vit():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=16, patch_size=4, num_labels=5
    )

    class Image(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.ViTForImageClassification(config)

        def forward(self, x):
            return self.model(pixel_values=x).logits

    return Image().eval(), (torch.randn(2, 3, 16, 16),)


class _QuantizationAware(nn.Module):
    """A straight-through estimator written with detach()."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x):
        w = self.linear.weight
        quantized = torch.round(w * 8) / 8
        y = nn.functional.linear(x, w + (quantized - w).detach(), self.linear.bias)
        with torch.no_grad():
            scale = y.abs().mean()
        return y / scale + (y * 2).detach() * y


MODELS = {
    "mlp": lambda: (nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.LayerNorm(7), nn.Linear(7, 3), nn.Softmax(-1)), (torch.randn(4, 5),)),
    "gpt2": _gpt2,
    "bert": _bert,
    "t5": _t5,
    "llama": _llama,
    "vit": _vit,
    "resnet": lambda: (_ResNet().train(), (torch.randn(4, 3, 32, 32),)),
    "lstm": lambda: (_Recurrent(nn.LSTM), (_ids(2, 6) % 23,)),
    "gru": lambda: (_Recurrent(nn.GRU), (_ids(2, 6) % 23,)),
    "unet nearest": lambda: (_UNet("nearest"), (torch.randn(2, 3, 16, 16),)),
    "unet bilinear": lambda: (_UNet("bilinear"), (torch.randn(2, 3, 16, 16),)),
    "quantization aware": lambda: (_QuantizationAware(), (torch.randn(3, 6),)),
}
FAST = {"mlp", "quantization aware"}


def relative_error(got: np.ndarray, expected: torch.Tensor) -> float:
    """The largest difference, in units of the largest expected value."""
    expected = expected.detach().numpy()
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max(initial=0) / (np.abs(expected).max(initial=0) + 1e-12))


def run_training(training: ir.Model, args, cotangents, session=None) -> dict[str, np.ndarray]:
    """All outputs of a training graph, by stock onnxruntime or the session given."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = session or onnxruntime.InferenceSession(
        ir.to_proto(training).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [v.name for v in training.graph.inputs]
    feeds = dict(zip(names, [v.detach().numpy() for v in (*args, *cotangents)], strict=True))
    outputs = [v.name for v in training.graph.outputs]
    return dict(zip(outputs, session.run(outputs, feeds)))


def check_against_eager(model: nn.Module, args, training: ir.Model, noise: float = 1e-6, session=None) -> None:
    """Outputs and parameter gradients of one batch."""
    twin = copy.deepcopy(model)  # some models change in their forward
    twin.zero_grad()
    expected = [leaf for leaf in pytree.tree_leaves(twin(*args)) if isinstance(leaf, torch.Tensor)]
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(y.shape, generator=generator) for y in expected]
    torch.autograd.backward(expected, cotangents)
    got = run_training(training, args, cotangents, session)
    pairing, state = read_pairing(training.metadata_props), read_state(training.metadata_props)
    for y, value in zip(expected, got.values(), strict=False):
        assert relative_error(value, y) < TOLERANCE
    largest = max(float(p.grad.abs().max()) for p in twin.parameters() if p.grad is not None)
    for name, parameter in twin.named_parameters():
        initializer = name if state is None else state[name].initializer
        if not parameter.requires_grad:
            assert initializer not in pairing.outputs
        elif parameter.grad is None:
            assert initializer in pairing.unreached, name
        else:  # a gradient that is 0 but for rounding (a bias before a norm) is compared with the others
            g = got[pairing.outputs[initializer]]
            assert np.abs(g - parameter.grad.numpy()).max() < TOLERANCE * float(parameter.grad.abs().max()) + noise * largest, name


def _training(name: str, dynamo: bool):
    torch.manual_seed(0)
    model, args = MODELS[name]()
    program = exporter.export(model, args, dynamo=dynamo)
    return model, args, build_gradient_graph(program)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_gradients_equal_eagers(name, dynamo):
    model, args, training = _training(name, dynamo)
    check_against_eager(model, args, training)


# -------------------------------------------------------------------------------------------------------------- PythonOp
ZOO = ["bloom", "ibert", "snn", "entmax15"]


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", ZOO)
def test_python_ops_equal_eager(name, dynamo):
    entry = getattr(zoo, name)()
    program = exporter.export(copy.deepcopy(entry.model), entry.args, dynamo=dynamo)
    training = build_gradient_graph(program)
    counts = collections.Counter(n.op_type for n in training.graph if n.domain == ORT_DOMAIN)
    assert counts["PythonOp"] >= counts["PythonOpGrad"] > 0
    session = exporter.reference_evaluator(ir.to_proto(training), entry.allow)
    check_against_eager(entry.model, entry.args, training, session=session)


# ----------------------------------------------------------------------------------------------------------- loops, scans
def test_a_gru_in_a_loop(tmp_path):
    """A scripted model of torch's own exporter: it has no metadata of ours, so names alone say what is what."""
    torch.manual_seed(0)
    model, args = _LoopedGRU(), (_ids(2, 6) % 23,)
    path = tmp_path / "loop.onnx"
    torch.onnx.export(torch.jit.script(model), args, path, dynamo=False, opset_version=18, keep_initializers_as_inputs=False)
    training = build_gradient_graph(path)
    assert [n.op_type for n in training.graph].count("Loop") == 2
    check_against_eager(model, args, training)


@pytest.mark.slow
def test_a_gru_in_a_scan():
    torch.manual_seed(0)
    model, args = _ScannedGRU(), (_ids(2, 6) % 23,)
    training = build_gradient_graph(exporter.export(model, args, dynamo=True))
    assert "Scan" in {n.op_type for n in training.graph}
    check_against_eager(model, args, training)


# -------------------------------------------------------------------------------------------------------------- dynamic
BATCH, LENGTH, OTHER = (torch.export.Dim(n, min=1, max=16) for n in ("batch", "length", "other"))
DYNAMIC = {
    "gpt2": (({0: BATCH, 1: LENGTH},), lambda b, n: (_ids(b, n),)),
    "bert": (({0: BATCH, 1: LENGTH},), lambda b, n: (_ids(b, n),)),
    "llama": (({0: BATCH, 1: LENGTH},), lambda b, n: (_ids(b, n),)),
    "t5": (({0: BATCH, 1: LENGTH}, {0: BATCH, 1: OTHER}), lambda b, n: (_ids(b, n), _ids(b, n + 2))),
    "unet nearest": (({0: BATCH, 2: 2 * LENGTH, 3: 2 * OTHER},), lambda b, n: (torch.randn(b, 3, 2 * n, 4 * n),)),
    "unet bilinear": (({0: BATCH, 2: 2 * LENGTH, 3: 2 * OTHER},), lambda b, n: (torch.randn(b, 3, 2 * n, 4 * n),)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", DYNAMIC)
def test_three_shapes_from_one_file(name, dynamo):
    torch.manual_seed(0)
    model, args = MODELS[name]()
    dynamic_shapes, make = DYNAMIC[name]
    training = build_gradient_graph(exporter.export(model, args, dynamo=dynamo, dynamic_shapes=dynamic_shapes))
    for batch, length in ((2, 7), (1, 4), (5, 3)):
        check_against_eager(model, make(batch, length), training)


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", zoo.DYNAMIC)
def test_three_batches_from_one_file_with_python_ops(name, dynamo):
    entry = getattr(zoo, name)()
    program = exporter.export(copy.deepcopy(entry.model), entry.args, dynamo=dynamo, dynamic_shapes=entry.dynamic_shapes)
    training = build_gradient_graph(program)
    assert any(n.op_type == "PythonOpGrad" for n in training.graph)
    session = exporter.reference_evaluator(ir.to_proto(training), entry.allow)
    for batch in (1, 3, 5):
        args = pytree.tree_map(lambda a, batch=batch: a[:batch], entry.larger_args)
        check_against_eager(entry.model, args, training, session=session)
