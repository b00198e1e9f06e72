"""Parameters of a tensor class that wraps other tensors (torchao's and quanto's quantised weights): a file holds the plain ones inside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.utils import parametrize

from symbolics.errors import ExportError
from symbolics.text import clean

__all__ = ["held_plainly"]


@contextlib.contextmanager
def held_plainly(model: Any) -> Iterator[None]:
    """While the block runs, a model holds the tensors inside such parameters and buffers, and makes the wrapping ones of them where it reads them.

    The names of the state are then those of torch.nn.utils.parametrize, ``layer.parametrizations.weight.original0`` and so on, in the order of the
    class' own ``__tensor_flatten__``, as torchao's ``unwrap_tensor_subclass`` and torch.export have them.

    Args:
        model: A module; anything else is left alone.

    Raises:
        ExportError: One of floats needs a gradient, and what is inside does not: autograd gives it that of the operators on the whole.
    """
    found = list(_wrapping(model)) if isinstance(model, torch.nn.Module) else []
    with contextlib.ExitStack() as stack:
        for module, name, tensor in found:
            stack.callback(_put_back, module, module.__class__, dict(module._parameters), dict(module._buffers), dict(module._modules))
            inside = _inside(tensor)
            if tensor.requires_grad and not any(inner.requires_grad for inner in inside):
                if all(inner.is_floating_point() for inner in inside):
                    raise _of_the_whole(name, tensor)
                tensor.requires_grad_(False)
                stack.callback(tensor.requires_grad_)
            recipe = _Recipe.of(tensor)
            assert recipe is not None
            parametrize.register_parametrization(module, name, _Wrapping(recipe), unsafe=True)
        yield


def _of_the_whole(name: str, tensor: torch.Tensor) -> ExportError:
    kind = f"{clean(type(tensor).__module__)}'s tensor class {type(tensor).__name__}"
    return ExportError(
        f"the parameter {name!r} is of {kind}, which wraps other tensors and is trained as a whole: a file holds the tensors inside, of which none needs a gradient.\n"
        "  way out: requires_grad_(False) for the export, or a plain torch.nn.Parameter of which forward makes the other"
    )


def _wrapping(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """The modules that hold such a tensor, its name there, and it."""
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and _wraps(tensor):
                yield module, name, tensor


def _wraps(tensor: torch.Tensor) -> bool:
    """Whether a tensor has torch's protocol of classes that wrap tensors."""
    return hasattr(type(tensor), "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")


def _inside(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors inside one, in order."""
    if not _wraps(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [inner for name in names for inner in _inside(getattr(tensor, name))]


class _Recipe(NamedTuple):
    """How a tensor of a class that wraps others is made of them: the class, what each name in it is made by (None: a plain tensor), what else it takes."""

    kind: Any
    names: dict[str, _Recipe | None]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Recipe | None:
        if not _wraps(tensor):
            return None
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return cls(type(tensor), {name: cls.of(getattr(tensor, name)) for name in names}, context, tensor.size(), tensor.stride())

    def make(self, parts: Iterator[torch.Tensor]) -> torch.Tensor:
        inner = {name: next(parts) if recipe is None else recipe.make(parts) for name, recipe in self.names.items()}
        result: torch.Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)
        return result


class _Wrapping(torch.nn.Module):
    """Makes one of the plain tensors."""

    def __init__(self, recipe: _Recipe) -> None:
        super().__init__()
        self._recipe = recipe

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        return self._recipe.make(iter(parts))

    def right_inverse(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return _inside(tensor)


def _put_back(module: Any, cls: type, parameters: dict[str, Any], buffers: dict[str, Any], modules: dict[str, Any]) -> None:
    module.__class__ = cls
    module._parameters, module._buffers, module._modules = parameters, buffers, modules
