"""pythonop: PyTorch models with custom autograd Functions as ONNX, with their gradients.

The names, and where each is, stand in ``__init__.pyi``. They are loaded on first use, so that tools that need no torch
(gradients, inspect) do not load it.
"""

from __future__ import annotations

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
