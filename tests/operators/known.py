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
    ("_native_batch_norm_legit", "dynamo", ["sample"], "export dies of an input that torch cannot differentiate"),
    ("broadcast_tensors", "torchscript", ["empty"], "a gradient of nothing does not run in onnxruntime"),
    ("flip", "torchscript", ["empty"], "a gradient of nothing does not run in onnxruntime"),
    ("fmod", BOTH, ["second zero"], "by 0 the result is nan, and so is its gradient; eager's is infinite"),
    ("linalg_det", BOTH, ["empty"], "a gradient of nothing does not run in onnxruntime"),
    ("logdet", BOTH, ["zeros", "bounds", "ties", "saturated"], "of a singular matrix: nan, in eager infinite"),
    ("logdet", BOTH, ["empty"], "a gradient of nothing does not run in onnxruntime"),
    ("native_batch_norm", "dynamo", ["sample"], "export dies of an input that torch cannot differentiate"),
    ("nn_functional_adaptive_avg_pool2d", "torchscript", ["empty"], "onnxruntime cannot run the model: Error in execution: Non-zero status code returned while running FusedMatMul "),
    ("nn_functional_batch_norm", "dynamo", ["sample"], "export dies of an input that torch cannot differentiate"),
    ("nn_functional_batch_norm", "dynamo", ["statistics as arguments"], "export dies in a replacement of batch_norm with computed statistics"),
    ("nn_functional_celu", BOTH, ["tiny"], "onnxruntime's kernel is exact to 1e-7 of 1, not of a small result"),
    ("nn_functional_elu", BOTH, ["tiny", "0-d"], "onnxruntime's kernel is exact to 1e-7 of 1, not of a small result"),
    ("nn_functional_interpolate_bicubic", "torchscript", ["empty"], "a gradient of nothing does not run in onnxruntime"),
    ("nn_functional_interpolate_bilinear", "torchscript", ["empty"], "a gradient of nothing does not run in onnxruntime"),
    ("nn_functional_interpolate_trilinear", "torchscript", ["empty"], "a gradient of nothing does not run in onnxruntime"),
    ("nn_functional_mish", BOTH, ["0-d"], "onnxruntime's kernel is exact to 1e-7 of 1, not of a small result"),
    ("nn_functional_multi_head_attention_forward", BOTH, ["empty"], "the process dies of a tensor without elements"),
    ("nn_functional_rrelu", "torchscript", ["zeros", "bounds"], "it draws a slope; eager's at 0 is 1"),
    ("nn_functional_selu", BOTH, ["tiny", "0-d"], "onnxruntime's kernel is exact to 1e-7 of 1, not of a small result"),
    ("nn_functional_silu", BOTH, ["0-d"], "onnxruntime's kernel is exact to 1e-7 of 1, not of a small result"),
    ("nn_functional_soft_margin_loss", "dynamo", ["0-d"], "output 0: 3.57628e-07, in eager 3.14799e-07"),
    ("nn_functional_softplus", BOTH, ["0-d"], "onnxruntime's kernel is exact to 1e-7 of 1, not of a small result"),
    ("nn_functional_unfold", "torchscript", ["empty"], "the process dies of a tensor without elements"),
    ("nn_functional_upsample_bilinear", "torchscript", ["empty"], "a gradient of nothing does not run in onnxruntime"),
    ("norm", "torchscript", ["empty"], "output 0: float32[1], in eager float32[]"),
    ("sigmoid", BOTH, ["saturated", "0-d"], "onnxruntime's kernel is exact to 1e-7 of 1, not of a small result"),
    ("special_entr", "dynamo", ["zeros", "bounds", "grid"], "the gradient at 0 is nan, in eager infinite"),
    ("take", "torchscript", ["0-d"], "onnxruntime cannot run the model: Error in execution: Invalid rank for input: 8_grad Got: 0 Expected: 1 Please"),
    ("unique", "torchscript", ["saturated"], "sorted=False: another order than eager's"),
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
