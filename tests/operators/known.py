"""What is still wrong, each with its reason: a row that is mended must leave the list, one that breaks must not enter it."""

from __future__ import annotations

from collections.abc import Iterable

from tests.operators.sweep import Line

__all__ = ["KNOWN", "WRONG", "known", "unexpected"]

#: The words that no row may end in.
WRONG = ("wrong", "crash")
BOTH = "dynamo torchscript"
#: Operator, exporters, kinds of inputs, reason.
# fmt: off
KNOWN: list[tuple[str, str, list[str], str]] = [
    ("__rpow__", BOTH, ["second zero"], "gradient 0 is nan, in eager -inf"),
    ("_batch_norm_with_update", "dynamo", ["sample"], "export dies of an input that torch cannot differentiate"),
    ("_native_batch_norm_legit", "dynamo", ["sample"], "export dies of an input that torch cannot differentiate"),
    ("_upsample_bilinear2d_aa", "dynamo", ["empty"], "the gradient does not run in onnxruntime: MatMul"),
    ("addcmul", "torchscript", ["0-d", "0-d all"], "a 0-d result has the shape (1,)"),
    ("addmm", BOTH, ["empty"], "nothing in: -8.47837, in eager -1.69567"),
    ("any", "dynamo", ["empty"], "nothing in: True, in eager False"),
    ("any", "torchscript", ["sample", "grid", "ties", "saturated", "large", "tiny", "0-d"], "output 0 is False, in eager True"),
    ("argwhere", "dynamo", ["0-d"], "output 0: int64[1, 1], in eager int64[1, 0]"),
    ("atan2", "dynamo", ["zeros", "second zero"], "gradient 0 is nan, in eager 0"),
    ("atan2", BOTH, ["axes"], "output 0 is -3.14159, in eager 3.14159"),
    ("atan2", "torchscript", ["zeros"], "output 0 is nan, in eager 0"),
    ("atan2", "torchscript", ["second zero"], "gradient 0 is nan, in eager 0"),
    ("bernoulli", BOTH, ["zeros", "bounds", "tiny"], "output 0 is 1, in eager 0"),
    ("bitwise_right_shift", "torchscript", ["sample"], "output 0 is 0, in eager -1"),
    ("broadcast_tensors", "torchscript", ["empty"], "the gradient does not run in onnxruntime: Error in execution: Got invalid dimensions for input: 13_grad for the "),
    ("cdist", "torchscript", ["sample", "zeros", "first zero", "second zero", "bounds", "grid", "ties", "saturated", "large", "tiny", "p = 0"], "output 0 is inf, in eager 2"),
    ("cdist", "torchscript", ["empty"], "output 0: float32[0, 4, 5], in eager float32[0, 4]"),
    ("cdist", "torchscript", ["p = 1"], "output 0 is 0.341766, in eager 5.34504"),
    ("cdist", "torchscript", ["of itself"], "gradient 0 is nan, in eager 3.42577"),
    ("clamp", BOTH, ["zeros", "ties"], "gradient 0 is 0.314408, in eager 1.25763"),
    ("clamp", BOTH, ["tensors as bounds, ties"], "another slope at a kink than eager's"),
    ("div_trunc_rounding", "torchscript", ["zeros", "second zero"], "output 0 is -9.22337e+18, in eager nan"),
    ("expm1", "dynamo", ["tiny"], "output 0 is -8.46386e-06, in eager -8.47834e-06"),
    ("fft_fft", "dynamo", ["sample", "saturated", "large"], "output 0 is 7.71255e-06, in eager 0"),
    ("fft_ifft", "dynamo", ["sample", "saturated", "large"], "output 0 is -7.71255e-06, in eager -0"),
    ("fft_ihfft", "dynamo", ["sample", "saturated", "large"], "output 0 is -7.71255e-06, in eager -0"),
    ("fft_irfft", "dynamo", ["saturated"], "output 0 is 2.92923e-05, in eager 0"),
    ("fft_rfft", "dynamo", ["sample", "grid", "saturated", "large"], "output 0 is -2.563e-06, in eager 0"),
    ("fft_rfft2", "dynamo", ["sample", "grid", "saturated", "large"], "output 0 is 9.84967e-06, in eager 0"),
    ("fft_rfftn", "dynamo", ["sample", "grid", "saturated", "large"], "output 0 is 9.84967e-06, in eager 0"),
    ("flip", "torchscript", ["empty"], "the gradient does not run in onnxruntime: Error in execution: Got invalid dimensions for input: 5_grad for the f"),
    ("index_add", "torchscript", ["the same index twice"], "output 0 is -2.77542, in eager -3.49468"),
    ("index_fill", BOTH, ["the same index twice"], "gradient 2 is 6.42702, in eager 4.28926"),
    ("index_put", "torchscript", ["accumulate, the same index twice"], "output 0 is -2.77542, in eager -3.49468"),
    ("linalg_norm", BOTH, ["keepdim"], "output 0: float32[], in eager float32[1, 1]"),
    ("log10", "torchscript", ["0-d", "0-d all"], "a 0-d result has the shape (1,)"),
    ("nan_to_num", "torchscript", ["0-d", "0-d all"], "a 0-d result has the shape (1,)"),
    ("nn_functional_adaptive_avg_pool2d", "torchscript", ["no batch"], "output 0: float32[3, 4, 2], in eager float32[3, 2, 2]"),
    ("nn_functional_avg_pool2d", BOTH, ["sample", "bounds", "grid", "ties", "saturated", "large", "tiny", "divisor_override"], "output 0 is -2.04278, in eager -4.08557"),
    ("nn_functional_avg_pool2d", BOTH, ["zeros"], "gradient 0 is 0.727276, in eager 2.0572"),
    ("nn_functional_avg_pool3d", BOTH, ["divisor_override"], "output 0 is -0.59279, in eager -1.58077"),
    ("nn_functional_batch_norm", BOTH, ["sample", "statistics as arguments"], "export dies of an input that torch cannot differentiate"),
    ("nn_functional_binary_cross_entropy", "dynamo", ["zeros", "first zero", "bounds", "p of 0 and 1"], "gradient 0 is nan, in eager 0"),
    ("nn_functional_binary_cross_entropy", "dynamo", ["tiny"], "output 0 is 7.3203e-06, in eager 7.32886e-06"),
    ("nn_functional_binary_cross_entropy", "dynamo", ["empty"], "nothing in: 0, in eager nan"),
    ("nn_functional_binary_cross_entropy_with_logits", "dynamo", ["sample", "second zero"], "output 0 is 2.51335, in eager 2.51333"),
    ("nn_functional_binary_cross_entropy_with_logits", BOTH, ["saturated", "large", "logits of 18 and more"], "output 0 is inf, in eager 42.7835"),
    ("nn_functional_binary_cross_entropy_with_logits", BOTH, ["empty"], "nothing in: 0, in eager nan"),
    ("nn_functional_binary_cross_entropy_with_logits", BOTH, ["weights"], "export dies of an input that torch cannot differentiate"),
    ("nn_functional_binary_cross_entropy_with_logits", "torchscript", ["sample"], "output 0 is 2.51335, in eager 2.51333"),
    ("nn_functional_binary_cross_entropy_with_logits", "torchscript", ["second zero", "tiny"], "gradient 1 is 2.13257, in eager 2.13253"),
    ("nn_functional_cosine_similarity", "torchscript", ["zeros", "first zero", "second zero", "a row of zeros"], "gradient 0 is nan, in eager 0"),
    ("nn_functional_cosine_similarity", "torchscript", ["tiny"], "output 0 is 0.000425614, in eager 0.0362188"),
    ("nn_functional_cosine_similarity", "torchscript", ["one dimension"], "a 0-d result has the shape (1,)"),
    ("nn_functional_cross_entropy", BOTH, ["weights of classes"], "export dies of an input that torch cannot differentiate"),
    ("nn_functional_embedding_bag", "torchscript", ["max with an empty bag"], "output 0 is -inf, in eager 0"),
    ("nn_functional_gaussian_nll_loss", "torchscript", ["zeros"], "gradient 2 is 0, in eager 628816"),
    ("nn_functional_hardswish", BOTH, ["bounds of its own"], "another slope at a kink than eager's"),
    ("nn_functional_hardtanh", BOTH, ["bounds of its own"], "another slope at a kink than eager's"),
    ("nn_functional_pad_circular", "torchscript", ["negative"], "output 0 is -2.17879, in eager -0.293429"),
    ("nn_functional_pairwise_distance", "torchscript", ["sample", "zeros", "first zero", "second zero", "bounds", "grid", "ties", "saturated", "large", "tiny"], "a 0-d result has the shape (1,)"),
    ("nn_functional_pairwise_distance", "torchscript", ["empty"], "nothing in: float32[0], in eager float32[]"),
    ("nn_functional_pairwise_distance", "torchscript", ["p = 1"], "output 0 is 0.341766, in eager 5.34504"),
    ("nn_functional_relu6", BOTH, ["bounds of its own"], "another slope at a kink than eager's"),
    ("nn_functional_scaled_dot_product_attention", "torchscript", ["empty"], "the gradient does not run in onnxruntime: Sub"),
    ("nn_functional_scaled_dot_product_attention", "torchscript", ["float16, causal"], "output 0: float32[1, 2, 4, 8], in eager float16[1, 2, 4, 8]"),
    ("nn_functional_softplus", BOTH, ["0-d"], "gradient 0 is 0, in eager 1.13037e-11"),
    ("nn_functional_softplus", "torchscript", ["sample", "bounds", "grid", "ties", "threshold"], "output 0 is 3.12854, in eager 3.12851"),
    ("nn_functional_triplet_margin_loss", "dynamo", ["empty"], "nothing in: 0, in eager nan"),
    ("norm", BOTH, ["of zeros, p = 3"], "gradient 0 is nan, in eager 0"),
    ("scatter_reduce_amax", "torchscript", ["rows"], "the gradient does not run in onnxruntime: Equal"),
    ("scatter_reduce_prod", "dynamo", ["zeros", "second zero", "a zero"], "gradient 2 is nan, in eager 1.02394"),
    ("scatter_reduce_prod", "torchscript", ["a zero"], "gradient 2 is nan, in eager 7.79311"),
    ("scatter_reduce_sum", "torchscript", ["rows"], "the gradient does not run in onnxruntime: Error in execution: Invalid rank for input: 18_grad Got: 2 Expected: 1"),
    ("special_log_ndtr", "dynamo", ["sample", "grid", "saturated", "large", "0-d", "far left"], "output 0 is -inf, in eager -39.0113"),
    ("std", BOTH, ["empty"], "nothing in: 0, in eager nan"),
    ("std", "torchscript", ["correction = 0.5"], "output 0 is 0.691146, in eager 0.738867"),
    ("var", BOTH, ["empty"], "nothing in: -0, in eager nan"),
    ("var", "torchscript", ["correction = 0.5"], "output 0 is 0.477683, in eager 0.545924"),
    ("xlogy", "dynamo", ["zeros", "0 and 0"], "gradient 0 is nan, in eager 0"),
    ("xlogy", "dynamo", ["first zero", "bounds"], "gradient 0 is 1.25763, in eager 2.31649"),
    ("zeros_like", "torchscript", ["sample", "zeros", "bounds", "grid", "ties", "saturated", "large", "tiny", "empty", "constant output", "an input that nothing reads"], "an input that nothing reads is dropped, and load refuses the call"),
]
# fmt: on


def known() -> dict[tuple[str, str, str], str]:
    """(operator, exporter, kind) -> the reason."""
    return {(name, which, kind): why for name, exporters, kinds, why in KNOWN for which in exporters.split() for kind in kinds}


def unexpected(found: Iterable[Line]) -> list[str]:
    """What differs between a record and the list: rows that are wrong and not in it, and rows of it that are not wrong."""
    listed, said = known(), []
    for line in found:
        for kind, (word, stage, why, _) in line.kinds.items():
            place = f"{line.operator} ({line.exporter}, {kind})"
            if word in WRONG and (line.operator, line.exporter, kind) not in listed:
                said.append(f"{place}: {word} in {stage}: {why}")
            if word not in (*WRONG, "kink") and (line.operator, line.exporter, kind) in listed:
                said.append(f"{place}: {word}: take it out of tests/operators/known.py")
    return said
