"""Gradients of real models, exported, against eager PyTorch: outputs and every parameter, within 1e-4 relative."""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import exporter
from exporter.gradient_graph import build_gradient_graph
from symbolics.file import read_pairing, read_state

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


def run_training(training: ir.Model, args, cotangent: torch.Tensor) -> dict[str, np.ndarray]:
    """All outputs of a training graph of one float output, by stock onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(ir.to_proto(training).SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [v.name for v in training.graph.inputs]
    feeds = dict(zip(names, [*[a.numpy() for a in args], cotangent.numpy()], strict=True))
    outputs = [v.name for v in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, feeds)))


def check_against_eager(model: nn.Module, args, training: ir.Model, noise: float = 1e-6) -> None:
    """Outputs and parameter gradients of one batch."""
    model.zero_grad()
    expected = model(*args)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(cotangent)
    got = run_training(training, args, cotangent)
    pairing, state = read_pairing(training.metadata_props), read_state(training.metadata_props)
    assert relative_error(next(iter(got.values())), expected) < TOLERANCE
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        initializer = state[name].initializer
        if not parameter.requires_grad:
            assert initializer not in pairing.outputs
        elif parameter.grad is None:
            assert initializer in pairing.unreached, name
        else:  # a gradient that is 0 but for rounding (a bias before a norm) is compared with the others
            g = got[pairing.outputs[initializer]]
            assert np.abs(g - parameter.grad.numpy()).max() < TOLERANCE * float(parameter.grad.abs().max()) + noise * largest, name


@functools.cache
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
