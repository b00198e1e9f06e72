"""Options of torch.onnx.export."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.end_to_end.alone.compare import Given
from tests.end_to_end.alone.table import add, net, some


def _options(**options: Any) -> Given:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    return Given(model, (some(),), options=options)


def _two(m, x, y):
    return x + y, x * y


@add
def input_and_output_names() -> Given:
    return net(_two, some(), some(), options={"input_names": ["a", "b"], "output_names": ["c", "d"]})


@add
def fewer_names() -> Given:
    return net(_two, some(), some(), options={"input_names": ["a"], "output_names": ["c"]})


@add
def names_of_parameters() -> Given:
    return _options(input_names=["image", "w0", "b0", "w1", "b1"], output_names=["scores"])


@add
def dynamic_axes() -> Given:
    given = net(
        _two,
        some(),
        some(),
        options={"input_names": ["a", "b"], "output_names": ["c", "d"], "dynamic_axes": {"a": {0: "n"}, "b": [0], "c": {0: "n"}}},
    )
    given.runs = [((some(5, 4), some(5, 4)), {})]
    return given


@add
def dynamic_shapes() -> Given:
    given = _options(dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    given.runs = [((some(7, 4),), {})]
    return given


@add
def dynamic_shapes_auto() -> Given:
    given = _options(dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    given.runs = [((some(7, 4),), {})]
    return given


@add
def dynamic_shapes_names() -> Given:
    given = _options(dynamic_shapes=({0: "n"},))
    given.runs = [((some(7, 4),), {})]
    return given


@add
def opset() -> Given:
    return _options(opset_version=18)


@add
def opset_old() -> Given:
    return _options(opset_version=13)


@add
def opset_new() -> Given:
    return _options(opset_version=21)


@add
def custom_opsets() -> Given:
    return _options(custom_opsets={"my.domain": 2})


@add
def no_folding() -> Given:
    return _options(do_constant_folding=False)


@add
def not_optimized() -> Given:
    return _options(optimize=False)


@add
def initializers_as_inputs() -> Given:
    return _options(keep_initializers_as_inputs=True)


@add
def parameters_left_out() -> Given:
    return _options(export_params=False)


@add
def no_names() -> Given:
    return _options(input_names=(), output_names=[])


@add
def external_data() -> Given:
    return _options(external_data=True)


@add
def data_inside() -> Given:
    return _options(external_data=False)


@add
def report_and_profile() -> Given:
    return _options(report=False, verify=True, profile=False, dump_exported_program=False)


@add
def verbose_options() -> Given:
    return _options(verbose=False, export_modules_as_functions=False)


@add
def fallback() -> Given:
    return _options(fallback=True)


@add
def training_modes() -> Given:
    return Given(nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval(), (some(),), options={"training": torch.onnx.TrainingMode.EVAL})


@add
def operator_types() -> Given:
    return _options(operator_export_type=torch.onnx.OperatorExportTypes.ONNX)


@add
def autograd_inlining() -> Given:
    return _options(autograd_inlining=True)


@add
def custom_translations() -> Given:
    return _options(custom_translation_table={})
