"""A model that fails in eager mode on its own example: what PyTorch says of it, and the line of the model that it says it of."""

from __future__ import annotations

import linecache
import os
import re
from types import TracebackType

import torch

from exporter.errors import is_users
from symbolics.errors import ExportError, PythonopError, as_raised
from symbolics.text import clean, ends, said

__all__ = ["eager_failure", "lacks_gradient", "line_of"]


#: What torch says of an operator that only other devices have.
_LACKS_KERNEL = re.compile(r"NotImplemented.*'CPU' backend|with arguments from the 'CPU' backend|no kernel .*CPU", re.IGNORECASE)
_KERNEL = " (a kernel for the CPU: op.register_kernel('cpu'); or custom_translation_table= with eager_check=False)"


def eager_failure(error: BaseException, call: str = "") -> PythonopError:
    """What to raise, from ``error``, where a model cannot run on its example arguments: an ExportError, and of the class of ``error``.

    Args:
        error: What its forward raised, with its traceback.
        call: What has to run, where the run cannot be left out.
    """
    place, text = line_of(error), ends(said(error), 450)
    return as_raised(
        error,
        f"the model fails in eager mode on its own example arguments: {type(error).__name__}{': ' if text else ''}{text}\n"
        + (f"  {place}\n" if place else "")
        + f"  way out: let {call or 'model(*args)'} run first{_KERNEL if _LACKS_KERNEL.search(text) else ''}"
        + ("" if call else "; where only an exporter can run it, pass eager_check=False (--no-eager-check)"),
        ExportError,
    )


def lacks_gradient(error: BaseException) -> bool:
    """Whether a model takes a gradient in its forward, and raises because its argument needs none."""
    return "does not require grad" in str(error)


def line_of(error: BaseException) -> str:
    """The innermost line of the user's own code that an exception went through, and the module of the model that was running.

    Args:
        error: An exception that was raised.

    Returns:
        ``at net.py:7, in forward: return self.l(x); module encoder.0 (Linear)``, or what of that is known.
    """
    line = module = ""
    names: dict[int, str] | None = None  # of the modules, from the outermost that is running on
    step: TracebackType | None = error.__traceback__
    while step is not None:
        frame, number = step.tb_frame, step.tb_lineno
        if is_users(frame.f_code.co_filename):
            name = frame.f_code.co_filename
            text = linecache.getline(name, number, frame.f_globals).strip()
            line = f"at {clean(os.path.basename(name))}:{number}, in {clean(frame.f_code.co_name)}{f': {clean(text)}' if text else ''}"
        owner = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if isinstance(owner, torch.nn.Module) and not type(owner).__module__.startswith("exporter."):
            if names is None:
                names = {id(vars(each)): name for name, each in owner.named_modules()}
            if (path := names.get(id(vars(owner)))) is not None:
                module = f"module {clean(path) or '<root>'} ({type(owner).__name__})"
        step = step.tb_next
    return "; ".join(filter(None, (line, module)))
