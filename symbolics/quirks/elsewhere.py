"""Wrongs whose cure has its place in another room."""

from __future__ import annotations

from symbolics.quirks.quirk import Quirk

__all__ = [
    "CONVERTED_OPERATORS",
    "DELETED_SLICES",
    "EMPTY_NAMES",
    "FUSIONS_IN_A_DOMAIN",
    "GATHER_ELEMENTS",
    "HALF_SPECTRA",
    "MUTATED_BUFFERS",
    "OMITTED_OUTPUTS",
    "PADS_WITH_AXES",
    "WIDENED_HALVES",
    "WRITTEN_PARTS",
]

CONVERTED_OPERATORS = Quirk(
    cure="exporter/gradient_graph/conversion.py",
    upstream="onnx",
    seen="1.23.2",
    wrong="the version converter loses functions, gives Upsample and Resize-10 other places of pixels, Hardmax another axis, Pad an attribute it lacks",
)

DELETED_SLICES = Quirk(
    cure="the loops over one output or input in exporter/forward/finish.py and exporter/gradient_graph/model.py",
    upstream="onnx_ir",
    seen="1.1.0",
    wrong="a value deleted from a graph's inputs or outputs by a slice still counts as one",
)

EMPTY_NAMES = Quirk(
    cure="_pack in exporter/runtime/prepare.py",
    upstream="onnxruntime",
    seen="1.31.1",
    wrong="a model with an empty name among the variadic inputs or outputs of a custom operator is refused",
)

FUSIONS_IN_A_DOMAIN = Quirk(
    cure="the import of com.microsoft in exporter/runtime/prepare.py and exporter/module/plans.py",
    upstream="onnxruntime",
    seen="1.31.1",
    wrong="where a custom library has operators in com.microsoft, fusions make nodes of that domain (FusedGemm) and fail if the model does not import it",
)

MUTATED_BUFFERS = Quirk(
    cure="_give_out_buffers in exporter/forward/dynamo.py",
    upstream="torch",
    seen="2.13",
    wrong="the translation of an exported program drops the values that its forward writes into buffers",
)

OMITTED_OUTPUTS = Quirk(
    cure="symbolics/graph/calls.py",
    upstream="onnx",
    seen="1.23.2",
    wrong="a call of a function that leaves out outputs at the end is refused by the inference of types (and by onnxruntime)",
)

WRITTEN_PARTS = Quirk(
    cure="Buffers.write in symbolics/capture/buffers.py",
    upstream="torch",
    seen="2.13",
    wrong="the TorchScript exporter loses what is put into a part of a graph's input where the whole is changed in place afterwards",
)

PADS_WITH_AXES = Quirk(
    cure="padded in symbolics/graph/builder.py",
    upstream="onnxruntime",
    seen="1.31.1",
    wrong="Transpose, Unsqueeze, Pad with axes, Transpose: the optimizer of transposes makes a Gather of it that fails at run time",
)

WIDENED_HALVES = Quirk(
    cure="the cast to half in exporter/runtime/kernels.py",
    upstream="onnxruntime",
    seen="1.31.1",
    wrong="a custom operator in float16 between two that the CPU computes in float32 is given float32",
)

GATHER_ELEMENTS = Quirk(
    cure="GatherElements in exporter/runtime/mended_operators.py, and the axis of _extremum in symbolics/quirks/pytorch/own_backward.py",
    upstream="onnx",
    seen="1.23.2",
    wrong="the reference evaluator's GatherElements takes no axis from the end, no smaller indices, and no axis longer than 64",
    issue="onnx/onnx#8444",
)

HALF_SPECTRA = Quirk(
    cure="the Pad of _fitted in symbolics/graph/spectra.py",
    upstream="onnxruntime",
    seen="1.32",
    wrong="a one-sided inverse DFT to n points gives other numbers where its input has more or fewer than n // 2 + 1 points",
)
