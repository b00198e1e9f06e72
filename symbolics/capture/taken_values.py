"""Values that a forward takes out of torch: a trace keeps those of the example, which a warning names, and no gradient flows through them."""

from __future__ import annotations

import linecache
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.capture.trace.sizes import is_traced_size
from symbolics.text import clean
from symbolics.users import TOOK, users_frame

__all__ = ["TAKING", "take"]

#: What gives the memory of a tensor to whoever asks.
_MEMORY = {
    "data_ptr": ".data_ptr()", "untyped_storage": ".untyped_storage()", "__reduce_ex__": "pickle, or copy.copy(),", "__dlpack__": "DLPack", "apply_": ".apply_()", "map_": ".map_()",
}  # fmt: skip
#: What gives a value of a tensor to Python or NumPy, and how people write it.
TAKING = {
    "numpy": ".numpy()", "__array__": "NumPy", "item": ".item()", "tolist": ".tolist()", "__float__": "float()", "__int__": "int()",
    "__complex__": "complex()", "__bool__": "an `if`, or bool(),", "__index__": "an index", "__contains__": "`in`",
    "is_nonzero": "is_nonzero()", "equal": "torch.equal()", "allclose": "torch.allclose()", **_MEMORY,
}  # fmt: skip


def take(
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    told: set[tuple[str, str]],
    where: Callable[[], str] = str,
) -> Any:
    """The call; in a trace of TorchScript, with our account in place of torch's warning, which does not name the line.

    Args:
        func, name, args, kwargs: The call.
        told: What this trace has warned of: a line and a module are named once, however many passes a loop makes.
        where: Gives the path of the module that makes it, which the warning has as ``module``.
    """
    tensor = args[0]
    if not private.is_tracing():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and name in ("item", "__float__", "tolist"):
            args = (torch.ops.pythonop.stop_gradient(tensor.detach()), *args[1:])
        return func(*args, **kwargs)
    if not isinstance(tensor, torch.Tensor) or (
        (is_traced_size(tensor) or private.comes_of_sizes(tensor)) and not private.sized_by_values(tensor)
    ):
        return func(*args, **kwargs)
    if name in ("data_ptr", "untyped_storage") and _torch_asks():  # whether two tensors share memory, and the like
        return func(*args, **kwargs)
    frame = users_frame(sys._getframe(1))
    file, line = frame.f_code.co_filename, frame.f_lineno
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        result = func(*args, **kwargs)
    text = linecache.getline(file, line, frame.f_globals).strip()
    said = torch.jit.TracerWarning(  # type: ignore[attr-defined]
        f"{TAKING[name]} {TOOK} at {clean(os.path.basename(file))}:{line}{f': {clean(text)}' if text else ''}\n"
        "  the file holds what follows from the example's value, whatever its input is (exporter.verify compares a second one)\n"
        "  way out: write it in operators of torch, or in the forward of an autograd Function, which stays one PythonOp"
    )
    said.module = where()  # type: ignore[attr-defined]
    if (place := (f"{file}:{said}", said.module)) not in told:  # type: ignore[attr-defined]
        told.add(place)
        warnings.warn_explicit(said, None, file, line)
    return result


def _torch_asks() -> bool:
    """Whether it is torch's own Python that makes the call, and not a model."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("symbolics.", "torch.overrides")):
        frame = frame.f_back
    asker = frame.f_globals.get("__name__", "")
    return asker.startswith("torch.") and asker != "torch._tensor"
