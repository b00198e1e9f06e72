"""What torch, torchlib, onnxscript and onnxruntime do wrong: one file each, until a release mends it.

Each file has a `Quirk` that says whose wrong it is, and a cure, which enters the table below of the place where it acts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import onnx_ir as ir
import torch

from symbolics.graph.walk import walk
from symbolics.quirks.autocasts import as_autocast_has_it
from symbolics.quirks.onnx.equal_draws import kept_apart
from symbolics.quirks.onnx.lost_initializers import register_lost_initializers
from symbolics.quirks.onnx.near_numbers import near_numbers_apart
from symbolics.quirks.onnx.norms_of_doubles import norms_of_doubles
from symbolics.quirks.onnx.open_spectra import spectra_of_open_lengths
from symbolics.quirks.onnx.stretched_axes import without_stretched_axes
from symbolics.quirks.onnx.windows_of_padding import without_windows_of_padding
from symbolics.quirks.onnxruntime.batch_norm_buffers import copied, pin_running_statistics, read_copies
from symbolics.quirks.onnxruntime.bernoulli import draw_by_uniforms
from symbolics.quirks.onnxruntime.body_outputs import own_outputs_of_bodies
from symbolics.quirks.onnxruntime.determinants import determinants_of_doubles
from symbolics.quirks.onnxruntime.empty_einsums import einsums_of_nothing
from symbolics.quirks.onnxruntime.empty_products import EMPTY_PRODUCTS, products_of_nothing
from symbolics.quirks.onnxruntime.half_scatters import scatter_halves_in_float
from symbolics.quirks.onnxruntime.matrix_vector import turn_products_with_vectors
from symbolics.quirks.onnxruntime.racing_scatters import scatter_in_turn
from symbolics.quirks.onnxruntime.rough_spectra import spectra_in_doubles
from symbolics.quirks.pytorch.angles import ANGLES
from symbolics.quirks.pytorch.antialias import ANTIALIAS
from symbolics.quirks.pytorch.assignments import ASSIGNMENTS
from symbolics.quirks.pytorch.attention_dropout import say_that_attention_drops
from symbolics.quirks.pytorch.axes import AXES
from symbolics.quirks.pytorch.bags_of_embeddings import BAGS
from symbolics.quirks.pytorch.batch_norm_momentum import cumulative_statistics, momentum_of_this_step
from symbolics.quirks.pytorch.binary_cross_entropy import BINARY_CROSS_ENTROPY
from symbolics.quirks.pytorch.bounds import BOUNDS
from symbolics.quirks.pytorch.builtins import builtins_of_eager, builtins_of_sizes
from symbolics.quirks.pytorch.conjugates import CONJUGATES
from symbolics.quirks.pytorch.copies import COPIES
from symbolics.quirks.pytorch.data_getter import DATA_GETTER
from symbolics.quirks.pytorch.distances import DISTANCES
from symbolics.quirks.pytorch.dropouts import DROPOUTS
from symbolics.quirks.pytorch.ellipses import ELLIPSES
from symbolics.quirks.pytorch.embedding_renorms import EMBEDDING_RENORMS
from symbolics.quirks.pytorch.empty_reductions import SYMBOLICS as EMPTY_REDUCTIONS, axes_from_the_front, means_of_nothing
from symbolics.quirks.pytorch.empty_reshapes import EMPTY_RESHAPES, reshapes_with_sizes
from symbolics.quirks.pytorch.factories import FACTORIES
from symbolics.quirks.pytorch.fake_quantization import FAKE_QUANTIZATION, exact_in_training
from symbolics.quirks.pytorch.gaussian_nll import GAUSSIAN_NLL
from symbolics.quirks.pytorch.half_numbers import HALF_NUMBERS
from symbolics.quirks.pytorch.half_results import HALF_RESULTS
from symbolics.quirks.pytorch.instance_norm_statistics import INSTANCE_NORM
from symbolics.quirks.pytorch.integers import BITS, XOR, promoting
from symbolics.quirks.pytorch.lengths import lengths_of_class, lengths_stay_open, open_sizes
from symbolics.quirks.pytorch.logarithm_bases import LOGARITHM_BASES
from symbolics.quirks.pytorch.logarithms import LOGARITHMS
from symbolics.quirks.pytorch.losses import LOSSES
from symbolics.quirks.pytorch.mixed_norms import MIXED_NORMS
from symbolics.quirks.pytorch.narrow_indices import widen_indices
from symbolics.quirks.pytorch.narrow_types import narrow_types
from symbolics.quirks.pytorch.nearest import NEAREST
from symbolics.quirks.pytorch.nested_bodies import functions_of_one_version
from symbolics.quirks.pytorch.normal_draws import NORMAL_DRAWS
from symbolics.quirks.pytorch.norms_without_weights import BATCH_NORM
from symbolics.quirks.pytorch.observers import OBSERVERS
from symbolics.quirks.pytorch.open_clips import SYMBOLICS as OPEN_CLIPS, hardtanh, open_clips, relu6
from symbolics.quirks.pytorch.own_backward import OWN_BACKWARD
from symbolics.quirks.pytorch.padding import PADDING
from symbolics.quirks.pytorch.places_of_numbers import PLACES
from symbolics.quirks.pytorch.pools import POOLS
from symbolics.quirks.pytorch.recurrent_kernels import kernels_looked_up_anew
from symbolics.quirks.pytorch.remainders import REMAINDERS
from symbolics.quirks.pytorch.repeats import REPEATS
from symbolics.quirks.pytorch.rounding import ROUNDING
from symbolics.quirks.pytorch.scalar_axes import scalar_axes
from symbolics.quirks.pytorch.scalars import SCALARS
from symbolics.quirks.pytorch.scatters import SCATTERS
from symbolics.quirks.pytorch.scripted_functions import scripts_as_python
from symbolics.quirks.pytorch.sizes import SIZES
from symbolics.quirks.pytorch.softplus_threshold import SOFTPLUS
from symbolics.quirks.pytorch.splits import SPLITS
from symbolics.quirks.pytorch.stable_sorts import STABLE_SORTS
from symbolics.quirks.pytorch.switches import switches_known
from symbolics.quirks.pytorch.torchscript_gaps import GAPS, UNARY
from symbolics.quirks.pytorch.torchscript_scatters import index_put, scatter_reduce
from symbolics.quirks.pytorch.truth import TRUTH
from symbolics.quirks.pytorch.unsorted import UNSORTED
from symbolics.quirks.pytorch.variance import VARIANCE
from symbolics.quirks.pytorch.wide_constants import float64_by_default
from symbolics.quirks.pytorch.wide_sizes import give_digits, wide_sizes
from symbolics.quirks.rewriting import Rewrite
from symbolics.quirks.spelling import Form, forms, spelled
from symbolics.quirks.torchlib.boolean_sums import sums_of_booleans
from symbolics.quirks.torchlib.clamps import clamps_apart
from symbolics.quirks.torchlib.error_functions import ERROR_FUNCTIONS
from symbolics.quirks.torchlib.folded_draws import draws_stay
from symbolics.quirks.torchlib.integer_products import INTEGER_PRODUCTS
from symbolics.quirks.torchlib.log_determinants import LOG_DETERMINANTS
from symbolics.quirks.torchlib.matrix_powers import MATRIX_POWERS
from symbolics.quirks.torchlib.multinomial import MULTINOMIAL
from symbolics.quirks.torchlib.projections import PROJECTIONS, steps_axis
from symbolics.quirks.torchlib.regions import stop_at_regions

__all__ = [
    "LOADED",
    "MISSING",
    "OPTIMIZED",
    "OPTIMIZING",
    "REWRITES",
    "SPELLINGS",
    "SYMBOLICS",
    "TRACED",
    "TRANSLATED",
    "WITH_BODIES",
    "GraphPass",
    "Rewrite",
    "apply",
    "builtins_of_sizes",
    "copied",
    "cumulative_statistics",
    "float64_by_default",
    "give_digits",
    "lengths_of_class",
    "open_sizes",
    "read_copies",
    "reshapes_with_sizes",
    "spelled",
    "steps_axis",
    "translations",
]  # fmt: skip

#: Changes a model in place, given all of its nodes; returns whether nodes came or went.
GraphPass = Callable[[ir.Model, list[ir.Node]], bool]

#: While a model is traced. Takes the model.
TRACED: tuple[Callable[[torch.nn.Module], AbstractContextManager[None]], ...] = (
    momentum_of_this_step,
    exact_in_training,
    builtins_of_eager,
    kernels_looked_up_anew,
    switches_known,
    lengths_stay_open,
    scripts_as_python,
)

#: In place of a call that a model makes while it is traced: takes the function, its arguments and its keyword arguments.
REWRITES: dict[Any, Rewrite] = {
    **DATA_GETTER, **CONJUGATES, **COPIES, **MIXED_NORMS, **BATCH_NORM, **INSTANCE_NORM, **OWN_BACKWARD, **ANGLES, **ANTIALIAS, **ASSIGNMENTS, **BAGS, **BINARY_CROSS_ENTROPY, **BOUNDS,
    **DISTANCES, **DROPOUTS, **ELLIPSES, **EMBEDDING_RENORMS, **EMPTY_PRODUCTS, **EMPTY_RESHAPES, **ERROR_FUNCTIONS, **FACTORIES, **FAKE_QUANTIZATION, **GAPS, **GAUSSIAN_NLL, **LOG_DETERMINANTS, **LOGARITHM_BASES, **LOGARITHMS, **LOSSES, **MATRIX_POWERS, **MULTINOMIAL, **NEAREST, **NORMAL_DRAWS, **OBSERVERS, **PADDING, **PLACES, **POOLS, **PROJECTIONS, **REPEATS, **ROUNDING, **REMAINDERS, **HALF_NUMBERS, **SCALARS, **HALF_RESULTS, **SCATTERS, **SIZES, **SOFTPLUS, **SPLITS, **STABLE_SORTS, **TRUTH, **UNSORTED, **VARIANCE,
}  # fmt: skip

REWRITES |= narrow_types(REWRITES)
REWRITES |= promoting(REWRITES)
REWRITES |= scalar_axes(REWRITES)
REWRITES |= as_autocast_has_it(REWRITES)

#: How the calls that are looked into may be spelled: those above, and what changes a tensor in place.
SPELLINGS: dict[Any, list[Form]] = forms(
    (*REWRITES, *(getattr(torch.Tensor, name) for name in dir(torch.Tensor) if name.endswith("_") and not name.endswith("__")))
)

#: In place of the symbolic functions of torch.onnx.export(dynamo=False): they take torch's own, then what that takes.
SYMBOLICS: dict[str, Callable[..., Any]] = {
    **EMPTY_REDUCTIONS,
    **OPEN_CLIPS,
    **AXES,
    **BITS,
    "aten::index_put": index_put,
    "aten::scatter_reduce": scatter_reduce,
}

#: Symbolic functions of operators that torch.onnx.export(dynamo=False) has none of.
MISSING: dict[str, Callable[..., Any]] = {**UNARY, **XOR, **INTEGER_PRODUCTS}

#: On what torch.export's program was translated to, before torch inlines the bodies of control flow.
WITH_BODIES: tuple[GraphPass, ...] = (functions_of_one_version,)

#: On what torch translated, before it is optimized.
TRANSLATED: tuple[GraphPass, ...] = (say_that_attention_drops, stop_at_regions, wide_sizes)

#: While it is optimized. Takes the graph.
OPTIMIZING: tuple[Callable[[ir.Graph], AbstractContextManager[None]], ...] = (kept_apart, draws_stay, clamps_apart, near_numbers_apart)

#: On what an export hands out, before it is checked and saved.
OPTIMIZED: tuple[GraphPass, ...] = (
    sums_of_booleans,
    widen_indices,
    scatter_halves_in_float,
    open_clips,
    pin_running_statistics,
    register_lost_initializers,
    turn_products_with_vectors,
    draw_by_uniforms,
    means_of_nothing,
    axes_from_the_front,
    products_of_nothing,
    without_stretched_axes,
    einsums_of_nothing,
    determinants_of_doubles,
    norms_of_doubles,
    own_outputs_of_bodies,
    without_windows_of_padding,
    spectra_of_open_lengths,
    spectra_in_doubles,
)

#: On a file of any exporter, as `load` opens it: what onnxruntime does wrong stands here too, mostly, for files that are not ours.
LOADED: tuple[GraphPass, ...] = (
    turn_products_with_vectors,
    draw_by_uniforms,
    axes_from_the_front,
    products_of_nothing,
    without_stretched_axes,
    einsums_of_nothing,
    determinants_of_doubles,
    own_outputs_of_bodies,
    scatter_in_turn,
    without_windows_of_padding,
    spectra_of_open_lengths,
)


def apply(passes: Iterable[GraphPass], model: ir.Model) -> list[ir.Node]:
    """Apply graph passes; walks over large graphs are what they cost, so one serves all until nodes come or go.

    Returns:
        All nodes of the model as it is then.
    """
    nodes = list(walk(model.graph))
    for change in passes:
        if change(model, nodes):
            nodes = list(walk(model.graph))
    return nodes


def translations() -> dict[Any, Callable[..., Any]]:
    """In place of torchlib's: entries for the ``custom_translation_table`` of torch.onnx.export(dynamo=True)."""
    # They are written with onnxscript, which who only loads a file need not wait for.
    from symbolics.quirks.pytorch.wide_numbers import full, full_like, scalar_tensor
    from symbolics.quirks.torchlib.batch_norm_training import batch_norm, batch_norm_in_eval_mode
    from symbolics.quirks.torchlib.broadcast_copies import copy
    from symbolics.quirks.torchlib.clamps import clamp, clamp_max, clamp_min, clamp_tensor
    from symbolics.quirks.torchlib.cross_entropy import cross_entropy
    from symbolics.quirks.torchlib.extrema import amax, amin
    from symbolics.quirks.torchlib.floor_divide import floor_divide
    from symbolics.quirks.torchlib.integer_products import int_mm
    from symbolics.quirks.torchlib.number_arithmetic import number_arithmetic
    from symbolics.quirks.torchlib.powers import power, power_by_number
    from symbolics.quirks.torchlib.ranges import arange_end, arange_start, arange_step
    from symbolics.quirks.torchlib.shifts import shifts
    from symbolics.quirks.torchlib.squeezes import squeeze
    from symbolics.quirks.torchlib.symbolic_sizes import symbolic_sizes
    from symbolics.quirks.torchlib.windows import windows

    aten = torch.ops.aten
    return {
        aten._native_batch_norm_legit_functional.default: batch_norm,
        aten._native_batch_norm_legit_no_training.default: batch_norm_in_eval_mode,
        aten.cross_entropy_loss.default: cross_entropy,
        aten.copy.default: copy,
        aten.floor_divide.default: floor_divide,
        aten._int_mm.default: int_mm,
        aten.amax.default: amax,
        aten.amin.default: amin,
        aten.arange.default: arange_end,
        aten.arange.start: arange_start,
        aten.arange.start_step: arange_step,
        aten.clamp.Tensor: clamp_tensor,
        aten.clamp.default: clamp,
        aten.clamp_max.default: clamp_max,
        aten.clamp_min.default: clamp_min,
        aten.full.default: full,
        aten.full_like.default: full_like,
        aten.hardtanh.default: hardtanh,
        aten.pow.Tensor_Scalar: power_by_number,
        aten.pow.Tensor_Tensor: power,
        aten.relu6.default: relu6,
        aten.scalar_tensor.default: scalar_tensor,
        aten.squeeze.dim: squeeze,
        aten.squeeze.dims: squeeze,
        **number_arithmetic(),
        **shifts(),
        **symbolic_sizes(),
        **windows(),
    }
