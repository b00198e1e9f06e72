"""export(): model -> Program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from exporter.errors import short

if TYPE_CHECKING:
    from exporter.files.program import Program

__all__ = ["export"]


@short
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
    opaque: Any = (),
    functions: Any = (),
    fallback: bool = False,
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
        opaque: What becomes one PythonOp though it is no Function: "missing" for each operator of torch that the exporter cannot translate;
            operators by name ("aten::unique_consecutive", "aten::linalg_*"); modules and functions (`symbolics.node.opaque.Opaque`).
            ``program.opaque`` says which nodes of the file need Python, and why.
        functions: Modules whose calls become calls of an ONNX function each: modules, classes of them, ``mypkg.blocks:Block``. Calls that compute the same
            share one function; parameters and buffers are inputs of it (docs/modules-as-functions.md).
        fallback: Where the exporter cannot take the model, take the first way out that works: `opaque=` of what stands in the way, the other exporter,
            both, at last fixed sizes. It works where outputs and gradients equal eager's; a warning says which it was, and
            ``program.fallback`` (docs/opaque.md).
        eager_check: Run the model once more, in eager mode, and see that each Function that gradients flow through is in the
            file. False saves that run; the metadata then says that it was not checked, and all that forward writes counts as state.
        **torch_onnx_export_options: Passed to torch.onnx.export (input_names, output_names, optimize, ...), but ``f``. ``output_names`` names the
            model's outputs in order, the first ones where there are fewer names; a name that another value of the model has is an error.

    Raises:
        ExportError: A call cannot be exported; it names Function, module, line and remedy.
        ArgumentError: An argument is none that an export can take (a class in place of a module, a generator, a name in
            ``dynamic_shapes`` that forward does not have); or an entry of ``inline``, ``portable``, ``opaque`` or ``functions`` means nothing that the export met,
            or ``output_names`` are none that the outputs can have.
        TypeError: There is no such option.

    Each has at most six lines (ten where it lists the ways out that were tried) and names the line of the model's own code; `exporter.errors.full` shows all of it.
    """
    # With the hook come sympy and onnxscript, half a second that torch's exporters need anyway: a program that may export waits for it when it does.
    from exporter.forward.arguments import check_call, check_model, check_options, check_shapes, keywords_apart
    from exporter.forward.hook import hook
    from exporter.forward.inputs import dynamic_axes

    check_options(torch_onnx_export_options, dynamo, opset_version)
    dynamo, opset_version = bool(dynamo), opset_version if opset_version is None else int(opset_version)
    if not isinstance(model, torch.export.ExportedProgram):
        check_model(model, dynamo=dynamo)
        check_call(args, kwargs, dynamo=dynamo)
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    if not isinstance(model, torch.export.ExportedProgram):
        dynamic_shapes = check_shapes(model, *keywords_apart(model, args, kwargs), dynamic_shapes)
    options = dict(torch_onnx_export_options)
    if not dynamo:
        # The TorchScript exporter writes no file of its own either: the hook keeps what it made.
        options["f"] = None
        if dynamic_shapes is not None:
            options["dynamic_axes"] = dynamic_axes(model, *keywords_apart(model, args, kwargs), dynamic_shapes, options.get("input_names"))
    else:
        options["dynamic_shapes"] = dynamic_shapes
        options.setdefault("verbose", False)
    with hook(inline=inline, portable=portable, opaque=opaque, functions=functions, fallback=fallback, eager_check=eager_check) as handle:
        torch.onnx.export(model, args, kwargs=kwargs, dynamo=dynamo, opset_version=opset_version, **options)
    assert handle.program is not None
    if "external_data" in options:  # torch's own default is True
        handle.program.asked["external_data"] = options["external_data"]
    return handle.program
