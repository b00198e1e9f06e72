"""Layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize, rnn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from tests.end_to_end.alone.compare import Given
from tests.end_to_end.alone.table import add, net, some


@add
def linear() -> Given:
    return Given(nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2)).eval(), (some(),), runs=[((some(),), {})])


@add
def convolutions() -> Given:
    return Given(
        nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), nn.BatchNorm2d(3), nn.ReLU6(), nn.ConvTranspose2d(3, 2, 2, 2)).eval(),
        (some(1, 2, 5, 5),),
    )


@add
def batch_norm_training() -> Given:
    return Given(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(), (some(),))


@add
def norms() -> Given:
    return Given(nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.LocalResponseNorm(2)).eval(), (some(2, 4, 4),))


@add
def packed_sequence() -> Given:
    def body(m, x, lengths):
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=True)
        out, (h, _) = m.rnn(packed)
        return rnn.pad_packed_sequence(out, batch_first=True)[0], h

    return net(body, some(3, 5, 4), torch.tensor([5, 3, 2]), rnn=nn.LSTM(4, 6, batch_first=True))


@add
def packed_gru_unsorted() -> Given:
    def body(m, x, lengths):
        return m.rnn(rnn.pack_padded_sequence(x, lengths, enforce_sorted=False))[1]

    return net(body, some(5, 3, 4), torch.tensor([2, 5, 3]), rnn=nn.GRU(4, 6))


@add
def lstm_proj_size() -> Given:
    return Given(nn.LSTM(4, 6, proj_size=3, num_layers=2).eval(), (some(5, 2, 4),))


@add
def lstm_bidirectional_states() -> Given:
    return Given(nn.LSTM(4, 6, bidirectional=True, batch_first=True).eval(), (some(2, 5, 4), (some(2, 2, 6), some(2, 2, 6))))


@add
def rnn_cells() -> Given:
    return net(lambda m, x, h: m.a(m.b(x, h), h), some(3, 4), some(3, 4), a=nn.GRUCell(4, 4), b=nn.RNNCell(4, 4, nonlinearity="relu"))


@add
def rnn_unbatched() -> Given:
    return Given(nn.GRU(4, 6, num_layers=2).eval(), (some(5, 4),))


@add
def complex_buffer() -> Given:
    return net(
        lambda m, x: torch.view_as_real(torch.view_as_complex(x) * m.turn),
        some(3, 4, 2),
        turn=torch.polar(torch.ones(4), torch.arange(4.0)),
    )


@add
def complex_parameter() -> Given:
    return net(lambda m, x: (torch.complex(x, x + 1) * m.w).abs(), some(3, 4), w=nn.Parameter(torch.randn(4, dtype=torch.cfloat)))


@add
def complex_input_and_result() -> Given:
    return net(lambda m, x: x * m.w * 2, torch.randn(3, 4, dtype=torch.cfloat), w=nn.Parameter(some(4)))


@add
def complex_linear() -> Given:
    def body(m, x):
        return torch.view_as_real(torch.complex(m.re(x) - m.im(x), m.re(x) + m.im(x)))

    return net(body, some(), re=nn.Linear(4, 4), im=nn.Linear(4, 4))


@add
def spectrum() -> Given:
    return net(lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * m.w, n=8), some(3, 8), w=nn.Parameter(some(5)))


@add
def stft() -> Given:
    def body(m, x):
        return torch.view_as_real(torch.stft(x, 8, hop_length=4, window=m.window, return_complex=True, center=False))

    return net(body, some(2, 32), window=torch.hann_window(8))


@add
def rope_with_buffers() -> Given:
    def body(m, x):
        cos, sin = m.cos[: x.shape[1]], m.sin[: x.shape[1]]
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    angles = torch.outer(torch.arange(16.0), 1.0 / torch.arange(1.0, 3.0))
    return net(body, some(2, 6, 4), cos=angles.cos(), sin=angles.sin())


@add
def embedding_max_norm() -> Given:
    return Given(
        nn.Embedding(7, 4, max_norm=1.0, padding_idx=0).eval(),
        (torch.tensor([[0, 2], [3, 6]]),),
        runs=[((torch.tensor([[1, 2], [5, 4]]),), {})],
    )


@add
def embedding_bag() -> Given:
    return Given(nn.EmbeddingBag(7, 4, mode="mean").eval(), (torch.tensor([0, 2, 3, 6, 1]), torch.tensor([0, 2])))


@add
def embedding_bag_weights() -> Given:
    return Given(nn.EmbeddingBag(7, 4, mode="sum").eval(), (torch.tensor([[0, 2], [3, 6]]), None, some(2, 2)))


@add
def attention_fast_path() -> Given:
    return Given(nn.MultiheadAttention(8, 2, batch_first=True).eval(), (some(2, 5, 8),) * 3, {"need_weights": False})


@add
def attention_masks() -> Given:
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[:, 4] = True
    return Given(
        nn.MultiheadAttention(8, 2, add_bias_kv=True, kdim=6, vdim=7).eval(),
        (some(5, 2, 8), some(5, 2, 6), some(5, 2, 7)),
        {"key_padding_mask": mask},
    )


@add
def transformer_layers() -> Given:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=False)
    return Given(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), (some(2, 5, 8),), loose=1e-3)


@add
def transformer_fast_path() -> Given:
    return Given(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
        (some(2, 5, 8),),
        {"src_key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)},
        loose=1e-3,
    )


@add
def scaled_dot_product() -> Given:
    return net(lambda m, q: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), some(1, 2, 5, 4))


@add
def weight_norm_new() -> Given:
    return Given(weight_norm(nn.Linear(4, 3)).eval(), (some(),))


@add
def weight_norm_old() -> Given:
    return Given(nn.utils.weight_norm(nn.Conv1d(4, 3, 2)).eval(), (some(2, 4, 5),))


@add
def spectral_norm_new() -> Given:
    return Given(spectral_norm(nn.Linear(4, 3)).eval(), (some(),))


@add
def spectral_norm_old() -> Given:
    return Given(nn.utils.spectral_norm(nn.Linear(4, 3)).eval(), (some(),))


@add
def orthogonal_weights() -> Given:
    return Given(orthogonal(nn.Linear(4, 4), use_trivialization=False, orthogonal_map="cayley").eval(), (some(),))


class _Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


@add
def parametrized() -> Given:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    return Given(nn.Sequential(layer, layer).eval(), (some(),))


@add
def pruned() -> Given:
    from torch.nn.utils import prune

    return Given(nn.Sequential(prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5)).eval(), (some(),))


@add
def quantized_dynamically() -> Given:
    return Given(
        torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 3)).eval(), {nn.Linear}, dtype=torch.qint8), (some(),), loose=1e-1
    )


@add
def quantized_statically() -> Given:
    from torch.ao.quantization import DeQuantStub, QuantStub, convert, get_default_qconfig, prepare

    model = nn.Sequential(QuantStub(), nn.Linear(4, 3), DeQuantStub()).eval()
    model.qconfig = get_default_qconfig("fbgemm")
    prepare(model, inplace=True)
    model(torch.randn(8, 4))
    return Given(convert(model), (some(),), loose=1e-1)


@add
def fake_quantized() -> Given:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    fake(torch.randn(8, 4))
    fake.disable_observer()
    return Given(nn.Sequential(nn.Linear(4, 4), fake).eval(), (some(),), loose=1e-2)


@add
def dropout_training() -> Given:
    return Given(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)).train(), (some(),))


@add
def upsampling() -> Given:
    return Given(
        nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.PixelShuffle(2), nn.AdaptiveAvgPool2d(1)).eval(), (some(1, 4, 3, 3),)
    )
