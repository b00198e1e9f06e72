"""Upstream without our cure: each test fails on the release that mends its quirk, and names what may go."""

from __future__ import annotations

import importlib
import pkgutil

import onnxruntime
import pytest
import torch
from packaging.version import Version

from symbolics import quirks
from symbolics.quirks import elsewhere
from tests.symbolics.quirks.canaries import (
    angles,
    attention_dropout,
    axes,
    bags_of_embeddings,
    batch_norm_momentum,
    batch_norm_training,
    binary_cross_entropy,
    bounds,
    builtins,
    clamps,
    conjugates,
    copies,
    cross_entropy,
    data_getter,
    deleted_slices,
    determinants,
    distances,
    embedding,
    empty_names,
    empty_reshapes,
    equal_draws,
    extremum,
    fake_quantization,
    floor_divide,
    gather_elements,
    gaussian_nll,
    half_results,
    half_scatters,
    instance_norm_statistics,
    log_sigmoid,
    logarithms,
    losses,
    lost_initializers,
    matrix_powers,
    mixed_norms,
    multinomial,
    mutated_buffers,
    near_numbers,
    normal_draws,
    open_clips,
    padding,
    places_of_numbers,
    pools,
    projections,
    regions,
    repeats,
    rounding,
    scalars,
    scatters,
    sizes,
    softplus_threshold,
    splits,
    squeezes,
    stable_sorts,
    std,
    torchscript_differs,
    torchscript_gaps,
    torchscript_scatters,
    truth,
    unsorted,
    variance,
    wide_constants,
    wide_numbers,
    widened_halves,
    written_parts,
)
from tests.symbolics.quirks.canaries_of_onnxruntime import (
    batch_norm_buffers,
    bernoulli,
    empty_batches,
    empty_products,
    empty_reductions,
    fusions_in_a_domain,
    matrix_vector,
    mean_of_nothing,
    pads_with_axes,
)
from tests.symbolics.quirks.tools import fails, translated

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def embedding_renorms():
    return torchscript_differs(lambda w: torch.nn.functional.embedding(torch.tensor([0]), w * 1.0, max_norm=1.0), torch.ones(2, 2))


def narrow_indices():
    return torchscript_differs(lambda x, i: x.index_put((i,), x[:2] * 2), torch.ones(3, 2), torch.tensor([0, 1], dtype=torch.int32))


def windows():
    return fails(lambda x: x + torch.bartlett_window(3), torch.ones(3))


def ranges():
    return any(node.op_type == "CastLike" for node in translated(lambda x: x + torch.arange(0, 2.5), torch.ones(3)).graph)  # 2.5 to an int


def factories():
    return torchscript_differs(lambda x: x + torch.logspace(0, x.shape[0], 3), torch.ones(3))


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


FILES = {
    module.name.rpartition(".")[2]: importlib.import_module(module.name).QUIRK
    for folder in pkgutil.iter_modules(quirks.__path__)
    if folder.ispkg
    for module in pkgutil.iter_modules([f"{quirks.__path__[0]}/{folder.name}"], f"{quirks.__name__}.{folder.name}.")
}
IN_FILES = (
    angles, attention_dropout, axes, bags_of_embeddings, batch_norm_buffers, batch_norm_momentum, batch_norm_training, bernoulli,
    binary_cross_entropy, bounds, builtins, clamps, conjugates, copies, cross_entropy, data_getter, determinants, distances, embedding_renorms, empty_products,
    empty_reductions, empty_reshapes, equal_draws, factories, fake_quantization, floor_divide, gaussian_nll, half_results, half_scatters,
    instance_norm_statistics, integers, logarithms, losses, lost_initializers, matrix_powers, matrix_vector, mixed_norms, multinomial, narrow_indices, narrow_types, near_numbers, nested_bodies,
    normal_draws, observers, open_clips, padding, places_of_numbers, pools, projections, ranges, regions, repeats, rounding, scalars, scatters, sizes, softplus_threshold, splits,
    squeezes, stable_sorts, torchscript_gaps, torchscript_scatters, truth, unsorted, variance, wide_constants,
    wide_numbers, windows,
)  # fmt: skip
IN_OTHER_ROOMS = (
    deleted_slices,
    empty_names,
    fusions_in_a_domain,
    gather_elements,
    mutated_buffers,
    pads_with_axes,
    widened_halves,
    written_parts,
)
CANARIES = [
    *((FILES[canary.__name__], canary) for canary in IN_FILES),
    (FILES["empty_products"], empty_batches),
    (FILES["empty_reductions"], mean_of_nothing),
    *((FILES["own_backward"], canary) for canary in (embedding, extremum, log_sigmoid, std)),
    *((getattr(elsewhere, canary.__name__.upper()), canary) for canary in IN_OTHER_ROOMS),
]


#: canary -> the release of onnxruntime that is right: the quirk stays for the older ones that people have.
RIGHT_FROM = {empty_batches: "1.32", empty_products: "1.32", empty_reductions: "1.32"}


@pytest.mark.parametrize(("quirk", "canary"), CANARIES, ids=[canary.__name__ for _, canary in CANARIES])
def test_upstream_is_still_wrong(quirk, canary, tmp_path):
    still_wrong = canary(tmp_path) if canary is widened_halves else canary()
    if canary in RIGHT_FROM and Version(onnxruntime.__version__) >= Version(RIGHT_FROM[canary]):
        assert not still_wrong, f"{quirk.upstream} was right from {RIGHT_FROM[canary]} on ({canary.__name__}), and is wrong again"
        return
    cure = quirk.cure or next(f"symbolics/quirks/*/{name}.py" for name, known in FILES.items() if known is quirk)
    assert still_wrong, f"{quirk.upstream} is right now ({canary.__name__}): {cure} may go, where no older release is supported"


@pytest.mark.parametrize("canary", [batch_norm_buffers, bernoulli, empty_batches, empty_reductions, matrix_vector, mean_of_nothing])
def test_a_pass_over_the_graph_cures(canary):
    assert not canary([*quirks.OPTIMIZED, *quirks.OPTIMIZED])  # twice does no harm


def test_each_quirk_has_a_canary():
    known = [*FILES.values(), *(getattr(elsewhere, name) for name in elsewhere.__all__)]
    assert {id(quirk) for quirk in known} == {id(quirk) for quirk, _ in CANARIES}
