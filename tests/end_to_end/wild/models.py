"""Models of packages from PyPI, small and with random weights: of Functions, of buffers that change, and of neither.

`make test-wild` runs them; a package that is missing is an xfail that names it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "Wild", "without_torchvision"]


@dataclass(frozen=True)
class Wild:
    """One model.

    Attributes:
        make: Returns the model, in the mode to export, and its arguments.
        module: What has to be importable.
        title: What it is, for docs/wild.md.
        dynamo, torchscript: "works", or "torch": torch.onnx itself cannot export it.
        says: What torch's error has to match.
        setup: Called first in the fresh process: ``package.module:function``.
        loose: How far a step may be from eager's.
    """

    make: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    module: str
    title: str
    dynamo: str = "works"
    torchscript: str = "works"
    says: str = ""
    setup: str | None = None
    loose: float = 1e-4


MODELS: dict[str, Wild] = {}


def _model(module: str, title: str, **options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(make: Callable[[], Any]) -> Callable[[], Any]:
        MODELS[make.__name__.strip("_")] = Wild(make, module, title, **options)
        return make

    return add


def _imported(module: str) -> Any:
    return importlib.import_module(module)


class Net(nn.Module):
    """``body(net, *args)`` over parts."""

    def __init__(self, body: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def without_torchvision() -> None:
    """Stand in for torchvision, which compressai imports for its data sets alone."""
    if importlib.util.find_spec("torchvision") is None:
        vision, transforms = (types.ModuleType(name) for name in ("torchvision", "torchvision.transforms"))
        vision.transforms = transforms  # type: ignore[attr-defined]
        for module in (vision, transforms):
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
            sys.modules[module.__name__] = module


# ------------------------------------------------------------------------------------------------------- transformers
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SPEECH = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "conv_dim": (8, 8), "conv_stride": (5, 4),
    "conv_kernel": (10, 8), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0, "final_dropout": 0.0,
}  # fmt: skip


def _of_transformers(name: str, config: dict[str, Any], model: str = "Model") -> nn.Module:
    library = _imported("transformers")
    return getattr(library, name + model)(getattr(library, f"{name}Config")(**config)).train()


def _tokens(length: int = 8) -> tuple[torch.Tensor]:
    return (torch.randint(0, 32, (1, length)),)


@_model("transformers", "Swin: shifted windows", dynamo="torch", says="Cannot view a tensor")
def swin():
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    return _of_transformers("Swin", {**sizes, **_QUIET, "drop_path_rate": 0.0}), (torch.randn(1, 3, 32, 32),)


@_model("transformers", "wav2vec2: weight norm, speech")
def wav2vec2():
    return _of_transformers("Wav2Vec2", _SPEECH), (torch.randn(1, 400),)


@_model("transformers", "HuBERT, speech")
def hubert():
    return _of_transformers("Hubert", _SPEECH), (torch.randn(1, 400),)


@_model("transformers", "DeBERTa-v2: relative attention")
def deberta_v2():
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    relative = {"max_position_embeddings": 16, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    return _of_transformers("DebertaV2", {**sizes, **relative, **_QUIET}), _tokens()


@_model("transformers", "LeViT: BatchNorm in attention", loose=1e-2)
def levit():
    sizes = {"hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1], "key_dim": [4, 4, 4]}
    ratios = {"mlp_ratio": [2, 2, 2], "attention_ratio": [2, 2, 2], "drop_path_rate": 0}
    return _of_transformers("Levit", {"image_size": 64, **sizes, **ratios}), (torch.randn(8, 3, 64, 64),)


@_model("transformers", "RegNet: BatchNorm, groups")
def regnet():
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8}
    return _of_transformers("RegNet", sizes), (torch.randn(2, 3, 32, 32),)


@_model("transformers", "SegFormer: BatchNorm in its head")
def segformer():
    sizes = {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3], "strides": [2, 2],
        "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 8, "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0,
    }  # fmt: skip
    return _of_transformers("Segformer", {**sizes, **_QUIET}, "ForSemanticSegmentation"), (torch.randn(2, 3, 32, 32),)


@_model("transformers", "Mamba: a selective scan")
def mamba():
    sizes = {"vocab_size": 32, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "use_cache": False}
    return _of_transformers("Mamba", sizes), _tokens()


@_model("transformers", "XLNet: two-stream attention")
def xlnet():
    sizes = {"vocab_size": 32, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "dropout": 0.0}
    return _of_transformers("XLNet", sizes), _tokens()


# ---------------------------------------------------------------------------------------- codebooks, flows, compression
@_model("vector_quantize_pytorch", "VectorQuantize: a codebook of moving averages", dynamo="torch", says="data-dependent")
def vector_quantize():
    quantizer = _imported("vector_quantize_pytorch").VectorQuantize(dim=8, codebook_size=16, decay=0.8)

    def body(net, x):
        quantized, _, loss = net.quantizer(net.enter(x))
        return net.leave(quantized), loss

    return Net(body, enter=nn.Linear(6, 8), quantizer=quantizer, leave=nn.Linear(8, 6)), (torch.randn(2, 12, 6),)


@_model("vector_quantize_pytorch", "FSQ: finite scalar quantisation")
def finite_scalars():
    quantizer = _imported("vector_quantize_pytorch").FSQ(levels=[8, 5, 5, 5])
    return Net(
        lambda net, x: net.leave(net.quantizer(net.enter(x))[0]), enter=nn.Linear(6, 4), quantizer=quantizer, leave=nn.Linear(4, 6)
    ), (torch.randn(2, 12, 6),)


@_model("normflows", "RealNVP with ActNorm", dynamo="torch", says="data-dependent")
def realnvp():
    nf, mask, flows = _imported("normflows"), torch.tensor([1.0, 0.0]), []
    for turn in range(3):
        scale, shift = (nf.nets.MLP([2, 8, 2], init_zeros=False) for _ in range(2))
        flows += [nf.flows.MaskedAffineFlow(mask if turn % 2 else 1 - mask, shift, scale), nf.flows.ActNorm(2)]
    flow = nf.NormalizingFlow(nf.distributions.DiagGaussian(2), flows)
    flow.log_prob(torch.randn(8, 2))  # ActNorm takes its first batch as its start
    return Net(lambda net, x: net.flow.log_prob(x), flow=flow), (torch.randn(8, 2),)


@_model("nflows", "masked autoregressive flow with BatchNorm")
def autoregressive_flow():
    kinds = _imported("nflows.transforms")
    parts = [kinds.MaskedAffineAutoregressiveTransform(3, 8), kinds.BatchNorm(3), kinds.ReversePermutation(3)]
    return kinds.CompositeTransform(parts), (torch.randn(8, 3),)


@_model("FrEIA", "GLOW-like blocks (AllInOneBlock)")
def freia():
    def subnet(width_in, width_out):
        return nn.Sequential(nn.Linear(width_in, 8), nn.ReLU(), nn.Linear(8, width_out))

    flow = _imported("FrEIA.framework").SequenceINN(4)
    for _ in range(2):
        flow.append(_imported("FrEIA.modules").AllInOneBlock, subnet_constructor=subnet)
    return flow, (torch.randn(3, 4),)


@_model("compressai", "GDN: a lower bound with its own gradient", setup=f"{__name__}:without_torchvision")
def divisive_normalization():
    without_torchvision()
    layer = _imported("compressai.layers").GDN
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), layer(4), nn.Conv2d(4, 2, 3), layer(2, inverse=True)), (torch.randn(1, 1, 8, 8),)


# ------------------------------------------------------------------------------------------------- wavelets and signals
def _there_and_back(there: nn.Module, back: nn.Module) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Wavelets of two channels, the lowest squeezed in between."""

    def body(net, x):
        low, high = net.there(net.enter(x))
        return net.back((torch.tanh(low), high))

    return Net(body, enter=nn.Conv2d(1, 2, 3, padding=1), there=there, back=back), (torch.randn(1, 1, 16, 16),)


@_model("pytorch_wavelets", "discrete wavelets, there and back")
def wavelets():
    library = _imported("pytorch_wavelets")
    return _there_and_back(library.DWTForward(J=2, wave="db2", mode="zero"), library.DWTInverse(wave="db2", mode="zero"))


@_model("pytorch_wavelets", "dual-tree complex wavelets")
def complex_wavelets():
    library = _imported("pytorch_wavelets")
    return _there_and_back(library.DTCWTForward(J=1), library.DTCWTInverse())


@_model("ptwt", "wavedec and waverec")
def fast_wavelets():
    library, wavelet = _imported("ptwt"), _imported("pywt").Wavelet("db2")

    def body(net, x):
        low, *high = library.wavedec(net.enter(x), wavelet, level=2, mode="zero")
        return library.waverec([torch.tanh(low), *high], wavelet)

    return Net(body, enter=nn.Linear(32, 32)), (torch.randn(2, 32),)


@_model("nnAudio", "mel spectrogram by convolutions")
def mel():
    spectrogram = _imported("nnAudio.features").MelSpectrogram(sr=8000, n_fft=64, n_mels=8, hop_length=32, verbose=False)
    return Net(lambda net, x: net.leave(torch.log(net.mel(x) + 1e-3).mean(-1)), mel=spectrogram, leave=nn.Linear(8, 3)), (
        torch.randn(2, 512),
    )


# -------------------------------------------------------------------------------------------- graphs, force fields, atoms
def _edges() -> torch.Tensor:
    return torch.tensor([[0, 1, 2, 3, 0, 2], [1, 2, 3, 0, 2, 1]])


@_model("torch_geometric", "GCN, BatchNorm, GAT")
def graph_attention():
    layers = _imported("torch_geometric.nn")
    parts = {"first": layers.GCNConv(5, 8), "norm": layers.BatchNorm(8), "second": layers.GATConv(8, 3, heads=2)}
    return Net(lambda net, x, edges: net.second(torch.relu(net.norm(net.first(x, edges))), edges), **parts), (torch.randn(4, 5), _edges())


@_model("torch_geometric", "GIN over BatchNorm")
def graph_isomorphism():
    inner = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
    layer = _imported("torch_geometric.nn").GINConv(inner, train_eps=True)
    return Net(lambda net, x, edges: net.layer(x, edges).mean(0), layer=layer), (torch.randn(4, 5), _edges())


@_model("egnn_pytorch", "EGNN: positions move")
def equivariant_graph():
    return Net(lambda net, x, places: net.layer(x, places), layer=_imported("egnn_pytorch").EGNN(dim=8)), (
        torch.randn(1, 5, 8),
        torch.randn(1, 5, 3),
    )


@_model("e3nn", "a fully connected tensor product")
def tensor_product():
    layer = _imported("e3nn.o3").FullyConnectedTensorProduct("2x0e+1x1o", "1x0e+1x1o", "2x0e+1x1o")
    return Net(lambda net, a, b: net.layer(a, b), layer=layer), (torch.randn(3, 5), torch.randn(3, 4))


# -------------------------------------------------------------------------------- spikes, reversed gradients, reversible
@_model("norse", "LIF cells over three time steps")
def spikes():
    library = _imported("norse.torch")

    def body(net, x):
        state = leak = None
        out = []
        for step in range(3):
            spike, state = net.cell(3 * net.enter(x[step]), state)
            value, leak = net.leaky(spike, leak)
            out.append(value)
        return torch.stack(out)

    return Net(body, enter=nn.Linear(6, 8), cell=library.LIFCell(), leaky=library.LICell()), (3 * torch.randn(3, 2, 6),)


@_model("pytorch_revgrad", "gradient reversal")
def reversed_gradient():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), _imported("pytorch_revgrad").RevGrad(), nn.Linear(6, 2)), (torch.randn(3, 4),)


@_model("reformer_pytorch", "reversible blocks")
def reversible():
    blocks = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(2))
    sequence = _imported("reformer_pytorch.reversible").ReversibleSequence(blocks)

    def body(net, x):
        x = net.enter(x)
        return sum(net.blocks(torch.cat([x, x], -1)).chunk(2, -1))

    return Net(body, enter=nn.Linear(4, 4), blocks=sequence), (torch.randn(2, 3, 4),)


@_model("efficientnet_pytorch", "MBConv with memory-efficient swish and BatchNorm")
def mobile_block():
    library = _imported("efficientnet_pytorch.model")
    whole = library.EfficientNet.from_name("efficientnet-b0")
    arguments = whole._blocks_args[0]._replace(input_filters=8, output_filters=8)
    block = library.MBConvBlock(arguments, whole._global_params, image_size=(14, 14))
    return Net(lambda net, x: net.block(net.enter(x)), enter=nn.Conv2d(3, 8, 3), block=block), (torch.randn(2, 3, 16, 16),)


@_model("x_transformers", "a decoder with rotary positions")
def rotary_decoder():
    library = _imported("x_transformers")
    layers = library.Decoder(dim=16, depth=1, heads=2, attn_dim_head=8, rotary_pos_emb=True)
    return library.TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=layers), _tokens()


# ---------------------------------------------------------------------------------------------------- torch's own state
@_model("torch", "spectral norm and InstanceNorm with statistics")
def spectral():
    norm = nn.utils.parametrizations.spectral_norm
    statistics = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    return nn.Sequential(norm(nn.Conv2d(3, 8, 3)), nn.LeakyReLU(0.1), norm(nn.Conv2d(8, 4, 3)), statistics), (torch.randn(2, 3, 12, 12),)
