"""Standard architectures, small and with random weights: no autograd Function is in them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.zoo.entry import Entry

__all__ = ["ARCHITECTURES", "ids"]


class _T5(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, decoder_ids):
        return self.model(input_ids=ids, decoder_input_ids=decoder_ids, use_cache=False).logits


class _Logits(nn.Module):
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


BATCH, LENGTH, OTHER = (torch.export.Dim(n, min=1, max=16) for n in ("batch", "length", "other"))
_TEXT = ({0: BATCH, 1: LENGTH},)


def ids(*shape: int) -> torch.Tensor:
    """Words of a vocabulary of 50."""
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(0))


def _text(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    return (ids(batch, length),)


def _gpt2() -> Entry:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return Entry(_Logits(transformers.GPT2LMHeadModel(config)), (ids(2, 7),), dynamic_shapes=_TEXT, sized=_text)


def _bert() -> Entry:
    import transformers

    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, max_position_embeddings=16
    )
    return Entry(_Logits(transformers.BertForMaskedLM(config)).eval(), (ids(2, 7),), dynamic_shapes=_TEXT, sized=_text)


def _t5() -> Entry:
    import transformers

    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, attn_implementation="eager")
    model = _T5(transformers.T5ForConditionalGeneration(config)).eval()
    shapes = ({0: BATCH, 1: LENGTH}, {0: BATCH, 1: OTHER})
    return Entry(model, (ids(2, 7), ids(2, 5)), dynamic_shapes=shapes, sized=lambda batch, n: (ids(batch, n), ids(batch, n + 2)))


def _llama() -> Entry:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        attn_implementation="eager",
    )  # fmt: skip
    return Entry(_Logits(transformers.LlamaForCausalLM(config)), (ids(2, 7),), dynamic_shapes=_TEXT, sized=_text)


def _vit() -> Entry:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=16, patch_size=4, num_labels=5
    )

    class Image(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.ViTForImageClassification(config)

        def forward(self, x):
            return self.model(pixel_values=x).logits

    return Entry(Image().eval(), (torch.randn(2, 3, 16, 16),))


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


def _unet(mode: str) -> Entry:
    shapes = ({0: BATCH, 2: 2 * LENGTH, 3: 2 * OTHER},)
    return Entry(
        _UNet(mode), (torch.randn(2, 3, 16, 16),), dynamic_shapes=shapes, sized=lambda batch, n: (torch.randn(batch, 3, 2 * n, 4 * n),)
    )


def _mlp() -> Entry:
    return Entry(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.LayerNorm(7), nn.Linear(7, 3), nn.Softmax(-1)), (torch.randn(4, 5),))


#: name -> factory.
ARCHITECTURES: dict[str, Callable[[], Entry]] = {
    "mlp": _mlp,
    "gpt2": _gpt2,
    "bert": _bert,
    "t5": _t5,
    "llama": _llama,
    "vit": _vit,
    "resnet": lambda: Entry(_ResNet().train(), (torch.randn(4, 3, 32, 32),)),
    "lstm": lambda: Entry(_Recurrent(nn.LSTM), (ids(2, 6) % 23,)),
    "gru": lambda: Entry(_Recurrent(nn.GRU), (ids(2, 6) % 23,)),
    "unet nearest": lambda: _unet("nearest"),
    "unet bilinear": lambda: _unet("bilinear"),
    "quantization aware": lambda: Entry(_QuantizationAware(), (torch.randn(3, 6),)),
}
