"""export(): model -> Program."""

from __future__ import annotations

import contextlib
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
    """Export a model to ONNX; each call of an autograd Function becomes one PythonOp node, with its own backward.

    A PythonOp calls your Python code when the file runs. The arguments ``inline``, ``portable``, ``opaque`` and ``functions``
    say which parts of the model become something else.

    Args:
        model: The model. Put it into the mode first (train or eval) that the file should have.
        args, kwargs: Example arguments of its forward. A single tensor may stand without a tuple.
        dynamo: Which of torch's exporters runs: torch.export (True) or TorchScript (False).
        dynamic_shapes: Which sizes stay open, as torch.export.export takes them, for either exporter. With dynamo=False each
            named dimension becomes a dynamic axis.
        opset_version: The ONNX opset. Default: that of torch.
        inline: Functions whose own operations are written into the file in place of a node: classes, and patterns such as
            ``"mypkg.ops:*"``. Their gradient is then the derivative of forward; their own backward is not used.
        portable: Functions and operators that become ONNX functions, with their own backward, so that the file runs and
            trains without Python. True: all that can. Or a list, as for ``inline``; one that cannot is then an error.
            ``program.portable`` says what became of each call. See docs/portable.md.
        opaque: What becomes a node that runs PyTorch, though it is not a Function. "missing": each operator of torch that
            torch.onnx cannot translate. Or a list of operators by name ("aten::unique_consecutive", "aten::linalg_*"),
            modules, classes of modules, and functions. See docs/opaque.md.
        functions: Modules whose calls become calls of ONNX functions: modules, classes, or text ("mypkg.blocks:Block").
            Calls that compute the same share one function. See docs/modules-as-functions.md.
        fallback: Whether to take the first way out that works, where torch's exporter cannot take the model. A way works if
            outputs and gradients equal eager's. A warning says which way it was, and ``program.fallback`` has it. See
            docs/opaque.md.
        eager_check: Whether to run the model once more in eager mode, to see that each Function that gradients flow through
            is in the file. False saves that run. The metadata of the file then says that this was not checked, and every
            tensor that forward writes counts as state.
        **torch_onnx_export_options: Passed to torch.onnx.export: ``input_names``, ``output_names``, ``optimize`` and others,
            but not ``f``. ``output_names`` names the model's outputs in order, or only the first of them.

    Returns:
        The exported model, a `Program`. ``save`` writes it to a file.

    Raises:
        ExportError: The model, or a call in it, cannot be exported. The message names Function, module, line and way out.
        ArgumentError: An argument is not what an export takes; or an entry of ``inline``, ``portable``, ``opaque`` or
            ``functions`` names nothing in the model; or ``output_names`` do not fit the outputs.
        TypeError: There is no such option.

    A message has at most six lines (ten where it lists ways out that were tried). `exporter.errors.full` shows the whole error.

    Examples:
        >>> program = exporter.export(model, (x,))
        >>> program.save("model.onnx")
    """
    # With the hook come sympy and onnxscript, half a second that torch's exporters need anyway: a program that may export waits for it when it does.
    from exporter.forward.arguments import check_call, check_model, check_options, check_shapes, in_order, keywords_apart
    from exporter.forward.hook import hook
    from exporter.forward.inputs import dynamic_axes
    from symbolics import torch_private as private

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
            positional, keywords = keywords_apart(model, args, kwargs)
            options["dynamic_axes"] = dynamic_axes(model, positional, in_order(model, keywords), dynamic_shapes, options.get("input_names"))
    else:
        options["dynamic_shapes"] = dynamic_shapes
        options.setdefault("verbose", False)
    quiet = contextlib.nullcontext() if dynamo else private.quiet_torchscript()
    with (
        quiet,
        hook(inline=inline, portable=portable, opaque=opaque, functions=functions, fallback=fallback, eager_check=eager_check) as handle,
    ):
        torch.onnx.export(model, args, kwargs=kwargs, dynamo=dynamo, opset_version=opset_version, **options)
    assert handle.program is not None
    if "external_data" in options:  # torch's own default is True
        handle.program.asked["external_data"] = options["external_data"]
    return handle.program
