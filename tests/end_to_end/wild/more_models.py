"""Further models of packages: attention, reversible nets, layers under constraints, quantisation, transport, signals, spikes, solvers."""

from __future__ import annotations

import torch
from torch import nn

from tests.end_to_end.wild.models import Net, _imported, _model

__all__: list[str] = []

_DECIDES = "data-dependent"


# ---------------------------------------------------------------------------------------------------------------- attention
@_model("rotary_embedding_torch", "rotary positions")
def rotary_positions():
    rotary = _imported("rotary_embedding_torch").RotaryEmbedding(dim=8)
    return Net(lambda net, x: net.rotary.rotate_queries_or_keys(net.enter(x)), rotary=rotary, enter=nn.Linear(16, 16)), (
        torch.randn(1, 2, 6, 16),
    )


@_model("linformer", "Linformer: keys projected to few")
def linformer():
    return _imported("linformer").Linformer(dim=16, seq_len=8, depth=1, heads=2, k=4), (torch.randn(2, 8, 16),)


@_model("nystrom_attention", "Nystrom attention: an iterated pseudo-inverse")
def nystrom():
    layer = _imported("nystrom_attention").NystromAttention(dim=16, dim_head=8, heads=2, num_landmarks=4, pinv_iterations=3)
    return layer, (torch.randn(1, 8, 16),)


@_model("performer_pytorch", "causal Performer: chunks of a short axis", dynamo="torch", says=_DECIDES)
def causal_performer():
    layer = _imported("performer_pytorch").Performer(dim=16, depth=1, heads=2, causal=True, dim_head=8, nb_features=8)
    return layer, (torch.randn(1, 6, 16),)


@_model("perceiver_pytorch", "Perceiver: Fourier positions")
def perceiver():
    sizes = {"input_channels": 1, "input_axis": 2, "num_freq_bands": 2, "max_freq": 4.0, "depth": 1, "num_latents": 4, "latent_dim": 8}
    heads = {"cross_heads": 1, "latent_heads": 2, "cross_dim_head": 4, "latent_dim_head": 4, "num_classes": 3}
    return _imported("perceiver_pytorch").Perceiver(**sizes, **heads), (torch.randn(1, 4, 4, 1),)


@_model("soft_moe_pytorch", "soft mixture of experts")
def soft_experts():
    return _imported("soft_moe_pytorch").SoftMoE(dim=8, seq_len=6, num_experts=2), (torch.randn(1, 6, 8),)


@_model("conformer", "a Conformer block with BatchNorm")
def conformer():
    sizes = {"dim": 16, "dim_head": 8, "heads": 2, "ff_mult": 2, "conv_expansion_factor": 2, "conv_kernel_size": 7}
    return _imported("conformer").ConformerBlock(**sizes), (torch.randn(2, 6, 16),)


@_model("g_mlp_pytorch", "causal gMLP")
def gated_mlp():
    return _imported("g_mlp_pytorch").gMLP(dim=8, depth=2, seq_len=6, causal=True), (torch.randn(1, 6, 8),)


@_model("mambapy", "Mamba: a parallel scan with its own backward")
def parallel_scan():
    library = _imported("mambapy.mamba")
    return library.Mamba(library.MambaConfig(d_model=8, n_layers=1, d_state=4)), (torch.randn(2, 6, 8),)


@_model("siren_pytorch", "SIREN")
def sines():
    return _imported("siren_pytorch").SirenNet(dim_in=2, dim_hidden=8, dim_out=3, num_layers=2, w0_initial=30.0), (torch.randn(3, 2),)


# ------------------------------------------------------------------------------------------------- reversible, recomputed
@_model("axial_attention", "reversible axial attention")
def axial():
    layer = _imported("axial_attention").AxialImageTransformer(dim=8, depth=2, heads=2, reversible=True, axial_pos_emb_shape=(4, 4))
    return layer, (torch.randn(1, 8, 4, 4),)


@_model("sinkhorn_transformer", "reversible Sinkhorn attention")
def sinkhorn_attention():
    sizes = {"num_tokens": 32, "dim": 16, "heads": 2, "depth": 2, "bucket_size": 4, "max_seq_len": 8, "n_sortcut": 1}
    model = _imported("sinkhorn_transformer").SinkhornTransformerLM(**sizes, causal=False, reversible=True)
    return model, (torch.randint(0, 32, (1, 8)),)


@_model("revtorch", "reversible blocks")
def reversible_blocks():
    library = _imported("revtorch")
    blocks = nn.ModuleList([library.ReversibleBlock(nn.Linear(4, 4), nn.Linear(4, 4), split_along_dim=1) for _ in range(2)])
    return nn.Sequential(nn.Linear(3, 8), library.ReversibleSequence(blocks)), (torch.randn(3, 3),)


@_model("momentumnet", "momentum residual blocks")
def momentum():
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(3, 4), _imported("momentumnet").MomentumNet(blocks, gamma=0.9)), (torch.randn(3, 3),)


# ------------------------------------------------------------------------------------------------------- under constraints
@_model("monotonicnetworks", "a monotonic Lipschitz net")
def monotonic():
    library = _imported("monotonicnetworks")
    layers = [library.LipschitzLinear(3, 8, kind="one-inf"), library.GroupSort(4), library.LipschitzLinear(8, 1, kind="inf")]
    return library.MonotonicWrapper(nn.Sequential(*layers), monotonic_constraints=[1, 0, -1]), (torch.randn(4, 3),)


@_model("geotorch", "orthogonal weights", dynamo="torch", torchscript="torch", says="linalg_matrix_exp")
def orthogonal():
    layer = nn.Linear(4, 4)
    _imported("geotorch").orthogonal(layer, "weight")
    return nn.Sequential(layer), (torch.randn(3, 4),)


@_model("magic_clamp", "a clamp that lets gradients back")
def magic_clamp():
    library = _imported("magic_clamp")
    return Net(lambda net, x: library.magic_clamp(net.enter(x), -0.3, 0.3), enter=nn.Linear(4, 4)), (torch.randn(3, 4),)


@_model("geffnet", "memory-efficient activations")
def light_activations():
    library = _imported("geffnet.activations.activations_me")
    layers = [library.SwishMe(), library.MishMe(), library.HardSwishMe(), library.HardSigmoidMe()]
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 2)), (torch.randn(3, 4),)


@_model("sparsemax", "sparsemax")
def sparsemax_layer():
    return nn.Sequential(nn.Linear(4, 5), _imported("sparsemax").Sparsemax(dim=-1)), (torch.randn(3, 4),)


@_model("pytorch_tabnet", "TabNet: a sparsemax that changes its argument, ghost BatchNorm", loose=1e-3)
def tabnet():
    sizes = {"input_dim": 5, "output_dim": 2, "n_d": 4, "n_a": 4, "n_steps": 2, "virtual_batch_size": 4}
    return _imported("pytorch_tabnet.tab_network").TabNet(**sizes, group_attention_matrix=torch.eye(5)), (torch.randn(8, 5),)


@_model("fairscale", "checkpoint_wrapper")
def wrapped_checkpoint():
    part = _imported("fairscale.nn").checkpoint_wrapper(nn.Sequential(nn.Linear(4, 6), nn.ReLU()))
    return nn.Sequential(nn.Linear(4, 4), part, nn.Linear(6, 2)), (torch.randn(3, 4),)


@_model("opacus", "DPLSTM")
def private_lstm():
    layer = _imported("opacus.layers").DPLSTM(4, 6, 1, batch_first=True)
    return Net(lambda net, x: net.layer(x)[0], layer=layer), (torch.randn(2, 5, 4),)


@_model("lxt", "rules of relevance: six Functions")
def relevance():
    rules = _imported("lxt.explicit.functional")

    def body(net, x):
        y = rules.add2(rules.linear_epsilon(x, net.first.weight, net.first.bias), x)
        y = rules.mul2(rules.softmax(y, -1), x)
        return rules.matmul(rules.rms_norm_identity(y, net.second.weight[0], 1e-6), net.second.weight.T)

    return Net(body, first=nn.Linear(4, 4), second=nn.Linear(4, 4)), (torch.randn(3, 4),)


@_model("captum", "Saliency: a gradient inside of the forward")
def saliency():
    attribution, part = _imported("captum.attr"), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return Net(lambda net, x: (attribution.Saliency(net.part).attribute(x, target=1, abs=False), net.part(x)), part=part), (
        torch.randn(3, 4, requires_grad=True),
    )


@_model("higher", "an inner step of SGD")
def inner_step():
    library = _imported("higher")

    def body(net, x, y):
        with library.innerloop_ctx(net.inner, torch.optim.SGD(net.inner.parameters(), lr=0.1), copy_initial_weights=False) as (f, step):
            step.step((f(x) - y).square().mean())
            return f(x)

    return Net(body, inner=nn.Linear(3, 1)), (torch.randn(4, 3), torch.randn(4, 1))


# ----------------------------------------------------------------------------------------- sorting, transport, flows, losses
@_model("diffsort", "a bitonic sorting network")
def sorting_network():
    network = _imported("diffsort").DiffSortNet("bitonic", 4, steepness=5)
    return Net(lambda net, x: net.network(net.enter(x)), enter=nn.Linear(4, 4), network=network), (torch.randn(3, 4),)


@_model("geomloss", "a kernel norm, whose Function scales gradients")
def kernel_norm():
    loss = _imported("geomloss").SamplesLoss(loss="gaussian", blur=0.5, backend="tensorized")
    return Net(lambda net, x, y: net.loss(net.enter(x), y), enter=nn.Linear(2, 2), loss=loss), (torch.randn(5, 2), torch.randn(4, 2))


@_model("pysdtw", "soft DTW, in numba")
def soft_dtw():
    loss = _imported("pysdtw").SoftDTW(gamma=1.0, use_cuda=False)
    return Net(lambda net, x, y: loss(net.enter(x), y), enter=nn.Linear(3, 3)), (torch.randn(2, 5, 3), torch.randn(2, 4, 3))


@_model("zuko", "a neural spline flow")
def spline_flow():
    flow = _imported("zuko").flows.NSF(3, 2, transforms=2, hidden_features=(8, 8))
    return Net(lambda net, x, c: net.flow(c).log_prob(x), flow=flow), (torch.randn(4, 3), torch.randn(4, 2))


@_model("zuko", "an unconstrained flow: its integral is inlined", loose=1e-3)
def integrated_flow():
    flow = _imported("zuko").flows.UNAF(2, 0, transforms=1, hidden_features=(8,))
    return Net(lambda net, x: net.flow().log_prob(x), flow=flow), (torch.randn(3, 2),)


@_model("glasflow", "RealNVP with BatchNorm in between")
def coupled_flow():
    flow = _imported("glasflow").RealNVP(n_inputs=4, n_transforms=2, n_neurons=8, batch_norm_between_transforms=True)
    return Net(lambda net, x: net.flow.log_prob(x), flow=flow), (torch.randn(6, 4),)


@_model("pytorch_msssim", "SSIM")
def similarity():
    loss = _imported("pytorch_msssim").SSIM(data_range=1.0, channel=1, win_size=5, size_average=False)
    return Net(lambda net, x, y: net.loss(torch.sigmoid(net.enter(x)), torch.sigmoid(y)), enter=nn.Conv2d(1, 1, 1), loss=loss), (
        torch.randn(2, 1, 12, 12),
        torch.randn(2, 1, 12, 12),
    )


@_model("pytorch_metric_learning", "ArcFace")
def angles():
    loss = _imported("pytorch_metric_learning.losses").ArcFaceLoss(num_classes=3, embedding_size=6)
    return Net(lambda net, x, labels: net.loss(net.enter(x), labels), enter=nn.Linear(4, 6), loss=loss), (
        torch.randn(6, 4),
        torch.tensor([0, 1, 2, 0, 1, 2]),
    )


@_model("torchcrf", "a conditional random field", dynamo="torch", says="expected predicate to be bool|data-dependent")
def random_field():
    field = _imported("torchcrf").CRF(3, batch_first=True)
    return Net(lambda net, x, tags: net.field(net.enter(x), tags), enter=nn.Linear(4, 3), field=field), (
        torch.randn(2, 5, 4),
        torch.randint(0, 3, (2, 5)),
    )


@_model("torchbnn", "a Bayesian layer, frozen", torchscript="torch", says="requires_grad")
def bayesian():
    library = _imported("torchbnn")
    layer = library.BayesLinear(prior_mu=0, prior_sigma=0.1, in_features=4, out_features=3)
    layer.freeze()
    return Net(lambda net, x: (net.layer(x), library.BKLLoss()(net)), layer=layer), (torch.randn(3, 4),)


@_model("torchdeq", "a deep equilibrium, unrolled", dynamo="torch", says=_DECIDES)
def equilibrium():
    solver = {"f_solver": "fixed_point_iter", "b_solver": "fixed_point_iter", "f_max_iter": 8, "b_max_iter": 8}
    deq = _imported("torchdeq").get_deq(**solver, core="sliced", grad=2, ift=False)

    def body(net, x):
        return deq(lambda z: torch.tanh(0.3 * net.layer(z) + x), torch.zeros_like(x))[0][-1]

    return Net(body, layer=nn.Linear(4, 4)), (torch.randn(3, 4),)


# ------------------------------------------------------------------------------------------------------------------ signals
@_model("torch_dct", "cosine transforms, there and back", torchscript="torch", says="fft_fft")
def cosines():
    library = _imported("torch_dct")
    return Net(lambda net, x: library.idct(torch.tanh(library.dct(net.enter(x)))), enter=nn.Linear(8, 8)), (torch.randn(2, 8),)


@_model("julius", "resampling, low passes, bands")
def resampled():
    library = _imported("julius")
    parts = {"resample": library.ResampleFrac(4, 5), "low": library.LowPassFilter(0.2, fft=False)}
    bands = library.SplitBands(8000, 3, fft=False)
    return Net(lambda net, x: (net.resample(net.enter(x)), net.low(x), net.bands(x)), enter=nn.Linear(64, 64), bands=bands, **parts), (
        torch.randn(2, 64),
    )


@_model("asteroid_filterbanks", "parametric sinc filters")
def filters():
    library = _imported("asteroid_filterbanks")
    there = library.Encoder(library.ParamSincFB(n_filters=8, kernel_size=17, stride=8))
    back = library.Decoder(library.FreeFB(8, 17, stride=8))
    return Net(lambda net, x: net.back(torch.relu(net.there(x))), there=there, back=back), (torch.randn(1, 1, 65),)


@_model("auraloss", "a loss on spectrograms", torchscript="torch", says="aten::stft")
def spectrogram_loss():
    loss = _imported("auraloss").freq.STFTLoss(fft_size=32, hop_size=8, win_length=32)
    return Net(lambda net, x, y: net.loss(net.enter(x), y), enter=nn.Conv1d(1, 1, 3, padding=1), loss=loss), (
        torch.randn(1, 1, 128),
        torch.randn(1, 1, 128),
    )


@_model("pytorch_tcn", "temporal convolutions with weight norm")
def temporal():
    sizes = {"num_inputs": 3, "num_channels": [4, 4], "kernel_size": 3, "dropout": 0.0}
    return _imported("pytorch_tcn").TCN(**sizes, causal=True, use_norm="weight_norm"), (torch.randn(1, 3, 10),)


# ------------------------------------------------------------------------------------------------------------------- spikes
@_model("gsmc_torch", "gated spiking memory cells")
def spiking_memory():
    layer = _imported("gsmc_torch").GSMCv2(4, 5)
    return Net(lambda net, x: net.layer(net.enter(x))[0], enter=nn.Linear(3, 4), layer=layer), (3 * torch.randn(5, 2, 3),)


@_model("spikingtorch", "LIF: state in attributes that each run begins anew")
def leaky():
    layer = _imported("spikingtorch.layers").LIF()

    def body(net, x):
        return torch.stack([net.layer(3 * net.enter(x), init=step == 0) for step in range(3)])

    return Net(body, enter=nn.Linear(4, 6), layer=layer), (torch.randn(2, 4),)


@_model("exact_snn", "exact gradients of spike times, in numpy")
def spike_times():
    layer = _imported("exact_snn").ExactTTFSLinear(4, 3)
    return Net(lambda net, x: net.layer(torch.sigmoid(x) * 5), layer=layer), (torch.randn(4, 2),)
