"""export(): model -> Program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from exporter.files.program import Program

__all__ = ["export"]


def export(
    model: torch.nn.Module,
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dynamo: bool = True,
    dynamic_shapes: Any = None,
    opset_version: int | None = None,
    inline: Iterable[Any] = (),
    portable: Any = False,
    eager_check: bool = True,
    **torch_onnx_export_options: Any,
) -> Program:
    """Export a model; each call of an autograd Function in it stays one PythonOp node.

    Args:
        model: The model, in the mode (train or eval) that the file should have.
        args, kwargs: Example arguments of its forward.
        dynamo: Which of torch's exporters runs: torch.export (True) or TorchScript (False).
        dynamic_shapes: As torch.export.export takes them, for either exporter. With dynamo=False each named dimension
            becomes a dynamic axis.
        opset_version: The ONNX opset; default: torch's.
        inline: Functions to inline in place of a node: classes, and patterns such as ``mypkg.ops:*``
            (`symbolics.node.patterns.Patterns` has the language). Their own backward is then lost: the gradient is the
            derivative of forward.
        portable: Functions and operators to write as ONNX functions, their own backward beside them, so that the file runs and trains without
            Python: True for all that can, or a list as ``inline`` takes it (`hook`). ``program.portable`` says what became of each call.
        eager_check: Run the model once more, in eager mode, and see that each Function that gradients flow through is in the
            file. False saves that run; the file's metadata then says that it was not checked.
        **torch_onnx_export_options: Passed to torch.onnx.export (input_names, output_names, optimize, ...), but ``f``. ``output_names`` names the
            model's outputs in order, the first ones where there are fewer names; a name that another value of the model has is an error.

    Raises:
        ExportError: A call cannot be exported; it names Function, module, line and remedy.
        ArgumentError: An entry of ``inline`` means none of the Functions that the export met, or ``output_names`` are none that the outputs can have.
    """
    if "f" in torch_onnx_export_options:
        raise TypeError("exporter.export returns a Program and writes no file: call program.save(path)")
    # With the hook come sympy and onnxscript, half a second that torch's exporters need anyway: a program that may export waits for it when it does.
    from exporter.forward.hook import hook
    from exporter.forward.inputs import dynamic_axes

    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    options = dict(torch_onnx_export_options)
    if not dynamo:
        # The TorchScript exporter writes no file of its own either: the hook keeps what it made.
        options["f"] = None
        if dynamic_shapes is not None:
            options["dynamic_axes"] = dynamic_axes(model, args, kwargs or {}, dynamic_shapes, options.get("input_names"))
    else:
        options["dynamic_shapes"] = dynamic_shapes
        options.setdefault("verbose", False)
    with hook(inline=inline, portable=portable, eager_check=eager_check) as handle:
        torch.onnx.export(model, args, kwargs=kwargs, dynamo=dynamo, opset_version=opset_version, **options)
    assert handle.program is not None
    return handle.program
