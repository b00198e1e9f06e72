"""What eval mode takes out of a file for good: dropout, and statistics that move."""

from __future__ import annotations

from torch import nn

__all__ = ["stilled"]


def stilled(model: nn.Module | None, evaluated: bool) -> tuple[str, ...]:
    """The paths of the modules that would do something else in training mode, and were in eval mode at export.

    Args:
        model: None: nobody knows it.
        evaluated: Whether the whole model was captured in eval mode; otherwise each module's own mode counts.
    """
    found = [] if model is None else list(model.named_modules())
    return tuple(name for name, module in found if (evaluated or not module.training) and _has_modes(module))


_DROP = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _has_modes(module: nn.Module) -> bool:
    if isinstance(module, _DROP):
        return module.p > 0
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return module.dropout > 0
    return bool(getattr(module, "track_running_stats", False)) and getattr(module, "running_mean", None) is not None
