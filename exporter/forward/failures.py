"""What torch's exporters raise, told by us: which operator or line of the model it is about, and the way out."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
from collections.abc import Iterable, Sequence
from types import FrameType

import torch
import torch.onnx

from exporter.errors import frames_behind, is_users
from symbolics import torch_private as private
from symbolics.capture.chosen_operators import called_operator
from symbolics.capture.operator_calls import is_translated
from symbolics.capture.torch_calls import TorchCalls
from symbolics.errors import ExportError, Faq, PythonopError, as_raised
from symbolics.node.names import qualified_name
from symbolics.text import cause, causes, clean

__all__ = ["TorchExporterError", "Untranslated", "of_torch", "path_of", "running_modules", "stopped_operator", "untranslated"]

# What torch says of an axis that is open and has one size.
_ALWAYS = re.compile(r"static shape of (\d+) for dimension inputs\[('\w+'|\d+)\]\.shape\[(\d+)\]")
# Likewise, where it suggests that.
_SUGGESTED = re.compile(r"^ *(\w+) = (\d+)$", re.MULTILINE)
# A line of Python's in what torch says.
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


class TorchExporterError(ExportError, torch.onnx.OnnxExporterError):
    """torch's exporter failed: nothing that we refuse, so it is of torch.onnx's own class, too. It has at most ten lines.

    Attributes:
        head: The cause and its place, without the ways out.
        change: What the model's own code might do instead, "" where nobody knows.
        module: The path of the module that it is about, where no traceback says it; None: one does.
    """

    most_lines = 10
    head: str = ""
    change: str = ""
    module: str | None = None


#: How TorchScript's exporter says that only newer opsets have an operator.
_SINCE = re.compile(r"added in version (\d+)")


class Untranslated(TorchExporterError):
    """Operators of torch have no translation to ONNX, or one that fails."""


def untranslated(
    nodes: Sequence[private.CapturedNode], dynamo: bool, why: str, others: Iterable[str] = (), has_one: bool = False
) -> Untranslated:
    """The error about operators of torch without a translation.

    Args:
        nodes: The nodes of them that torch's exporter met, at least one.
        dynamo: Which of torch's exporters it was.
        why: What it says of the first.
        others: The names of further ones, which it has not come to.
        has_one: Whether there is a translation, of real numbers alone.
    """
    nodes = sorted(nodes, key=lambda node: not _place(node.lines))  # under no_grad() torch.export knows no line of the user's
    first, which = nodes[0], f"torch.onnx.export(dynamo={dynamo})"
    operators = tuple(dict.fromkeys(as_written(name) for name in (*(node.called for node in nodes), *others)))
    name, rest = operators[0].removesuffix(".default"), [each.removesuffix(".default") for each in operators[1:]]
    inside = "" if name.partition(".")[0] == as_written(first.operator) else f" ({first.operator} in it)"
    more = f"  likewise {', '.join(rest[:8])}{f' and {len(rest) - 8} more' if len(rest) > 8 else ''}\n" if rest else ""
    give = (
        f"custom_translation_table={{{first.overload}: ...}}"
        if dynamo
        else f"torch.onnx.register_custom_op_symbolic({first.operator!r}, ...)"
    )
    head = (
        f"{name}, called in module {first.module or '<root>'}: {which} cannot translate it to ONNX{inside}: {why}\n"
        + _place(first.lines)
        + more
    )
    is_complex = any(node.is_complex for node in nodes) or "complex" in why
    if is_complex:
        real = "compute with real numbers (docs/operators/fft.md: Write a Fourier layer)"
        give = real if has_one else f"{real}, or give a translation of it, {give}"
    else:
        give = f"give a translation of it, {give}"
    if is_complex or not name.startswith(("aten::", "prims::")):
        kept = f"{_around(first)} one PythonOp, which runs its Python wherever the file runs;\n  "
        kept += "its tensors have to be real ones" if "opaque=[" in kept else "it has to take and give real tensors"
        kept = f"{real}; or {kept}" if is_complex else kept
    else:
        kept = f'opaque=[{name!r}], or opaque="missing" for all such operators, keeps it as one PythonOp, which runs PyTorch wherever the file runs;\n'
        kept += f"  or {give}"
    newer = ""
    if since := _SINCE.search(why):  # a translation there is, of a newer opset: what comes first
        newer = f"export with opset_version={since[1]} or newer (--opset {since[1]}), which has it; or "
    error = Untranslated(f"{head}  way out: {newer}{kept}; or export with dynamo={not dynamo}; fallback=True takes the first that works")
    error.operators, error.module = operators, first.module
    error.head, error.change = head, f"{newer}{give}"
    return error


def as_written(operator: str) -> str:
    """The name of an operator that changes its argument (``erfinv_``) as that of the one that does not: nodes change nothing."""
    name, dot, overload = operator.partition(".")
    return f"{name.removesuffix('_')}{dot}{overload}"


def of_torch(error: Exception, dynamo: bool, others: Iterable[str] = ()) -> Exception:
    """What to raise for what an export raised: an error of torch's exporter in few lines, any other as it is.

    Args:
        error: What was raised; its traceback and causes say where.
        dynamo: Which of torch's exporters it was.
        others: The names of operators of the model that it cannot translate either.
    """
    for inner in causes(error):  # torch wraps what is raised while it translates
        if isinstance(inner, Untranslated) or (isinstance(inner, ExportError) and inner.faq is Faq.PYTHON_VALUE):
            return inner
    frames = frames_behind(error)
    if isinstance(error, PythonopError) or not any(frame.f_globals.get("__name__", "").startswith("torch.onnx.") for frame, _ in frames):
        return error
    which = f"torch.onnx.export(dynamo={dynamo})"
    found = private.node_in_hand(frame for frame, _ in frames)
    if found is not None:
        return untranslated([found], dynamo, cause(error), others)
    lines = [(frame.f_code.co_filename, number) for frame, number in reversed(frames)] + [
        (file, int(number)) for file, number in reversed(_LINE.findall(str(error)))
    ]
    text, place, modules = _said(error), _place(lines), running_modules(frame for frame, _ in frames)
    if place and len(modules) > 1 and (path := path_of(modules[-1], modules[0])) is not None:
        place = f"{place.rstrip()}; module {clean(path) or '<root>'} ({clean(type(modules[-1]).__name__)})\n"
    operator = stopped_operator(error, [frame for frame, _ in frames])
    change = "change that line" if place else ""
    for start, instead in (
        (_DECIDES, "let tensors decide, by torch.where or torch.cond, or put it into an autograd Function"),
        (_READS, "compute it by operators of torch"),
        (_FIXES, "compute with the whole axis, or leave it out of dynamic_shapes (docs/export.md: Loop over an open axis)"),
    ):
        if text.startswith(start):
            change = instead
    if operator:
        text, change = f"{operator} asks for values, and a capture has none (torch: {cause(error).partition(': ')[0]})", ""
    head = f"{which} cannot capture the model: {text}\n{place}"
    kept = f"opaque=[{operator!r}] keeps it as" if operator else _opaque_module(modules)
    ways = [
        *([change] if change else []),
        *([] if operator or text.startswith((_DECIDES, _READS)) else [f"export with dynamo={not dynamo}"]),
        *([f"{kept} one PythonOp, which runs its Python wherever the file runs"] if place or operator else []),
        *([] if place or operator else ["print(error.whole) shows where torch stopped"]),
    ]
    made = as_raised(
        _first(error),
        f"{head}  way out: {(';' + chr(10) + '  or ').join(ways)}; fallback=True takes the first that works",
        TorchExporterError,
    )
    if isinstance(made, TorchExporterError):
        made.head, made.change, made.operators = head, change, (operator,) if operator else ()
    return made


def running_modules(frames: Iterable[FrameType]) -> list[torch.nn.Module]:
    """The modules whose forward was running: from the model to the innermost."""
    owners = [
        frame.f_locals.get("self") for frame in frames if frame.f_code.co_varnames[:1] == ("self",) and frame.f_code.co_name == "forward"
    ]
    modules = [owner for owner in owners if isinstance(owner, torch.nn.Module)]
    while modules and type(modules[0]).__module__.startswith(("torch.export", "torch.onnx", "torch._")):  # what torch wraps a model in
        del modules[0]
    return modules


def path_of(module: torch.nn.Module, model: torch.nn.Module) -> str | None:
    """The path of a module in a model, by its attributes: torch.export runs other objects in the place of modules, with the same ``__dict__``."""
    return next((name for name, each in model.named_modules() if vars(each) is vars(module)), None)


def stopped_operator(error: BaseException, frames: Sequence[FrameType]) -> str:
    """The operator without a translation in whose midst a capture asked for values, as ``opaque=`` takes it; "" where it was none."""
    if "GuardOnDataDependent" in cause(error):  # that is about what follows from a size
        return ""
    for frame in reversed(frames):
        if frame.f_code is TorchCalls.__torch_function__.__code__:
            known = frame.f_locals
            with contextlib.suppress(
                Exception
            ):  # it is called once more, as far as its name, with what the capture has left of its arguments
                called = called_operator(known["func"], known["args"], known["kwargs"] or {})
                if called is not None and not is_translated(called.overload, (), None):
                    schema = private.schema_of(called.overload)
                    if schema.name.startswith(("aten::", "prims::")) and any("Tensor" in str(value.type) for value in schema.returns):
                        return as_written(str(schema.name))
    return ""


def _around(node: private.CapturedNode) -> str:
    """How ``opaque=`` keeps the module that called a node."""
    module, _, name = node.kind.rpartition(".")
    if not node.module or not module or module.startswith("torch.") or "<locals>" in module:
        return "make a module of that part, which opaque= keeps as"
    return f"opaque=[{f'{module}:{name}'!r}] keeps that module as"


def _opaque_module(running: Sequence[torch.nn.Module]) -> str:
    """How ``opaque=`` keeps the innermost of these modules, the outermost of which is the model."""
    modules = [module for module in running if not type(module).__module__.startswith("torch.")]
    if not modules or modules[-1] is modules[0]:
        return "make a module of that part, which opaque= keeps as"
    return f"opaque=[{qualified_name(type(modules[-1]))!r}] keeps that module as"


_DECIDES, _READS, _FIXES = "data-dependent Python", "the code reads the memory of a tensor", "the code makes a number of an open size"
#: What torch says -> what it means for whoever wrote the model.
_CAUSES = {
    "data-dependent|DataDependentOutputException": f"{_DECIDES}: the value of a tensor decides what the code does there (an if, a loop, int(), .item(), torch.equal()), and "
    "a capture has no values",
    r"Cannot access data pointer|\.numpy\(\) is not supported|Not available for 'meta' device": f"{_READS} there (numpy, ctypes, C++), and a capture has none",
    "conflicts between user-specified ranges and inferred ranges|specialized it to be a constant|Suggested fixes: \\w+ = \\d+": f"{_FIXES} (a loop over it, int(), len(), a comparison), or it meets a size that is fixed",
    "fake tensor in the exported program constant's list": "a tensor is computed where no capture looks (in another thread, or in C++)",
}  # fmt: skip


def _said(error: Exception) -> str:
    """What the first cause means, where we know, and its first line; where its first paragraph only announces the second, with that."""
    known = next((meaning for pattern, meaning in _CAUSES.items() if re.search(pattern, cause(error))), None)
    if known is not None and known.startswith(_FIXES):
        return known + _sizes_fixed(str(_first(error)))
    if known is not None:
        return f"{known} (torch: {cause(error).partition(': ')[0]})"
    first, _, rest = (part.strip() for part in str(_first(error)).strip().partition("\n\n"))
    return cause(error) + (f" {clean(rest.splitlines()[0].lstrip('- '), 300)}" if rest and first.endswith(":") else "")


def _sizes_fixed(text: str) -> str:
    """The open axes of which torch says that they have one size: ``: axis 0 of 'x' is always 5``; "" where it names none."""
    fixed = [f"axis {axis} of {'argument ' if name.isdigit() else ''}{name} is always {size}" for size, name, axis in _ALWAYS.findall(text)]
    fixed += [f"the axis {name!r} is always {size}" for name, size in _SUGGESTED.findall(text)]
    return f": {', '.join(dict.fromkeys(fixed))}" if fixed else ""


def _first(error: BaseException) -> BaseException:
    return list(causes(error))[-1]


def _place(lines: Iterable[tuple[str, int]]) -> str:
    """The innermost line of the user's own code, as a line of a message; "" where there is none."""
    for file, number in lines:
        if is_users(file):
            code = linecache.getline(file, number).strip()
            return f"  at {clean(os.path.basename(file))}:{number}{f': {clean(code)}' if code else ''}\n"
    return ""
