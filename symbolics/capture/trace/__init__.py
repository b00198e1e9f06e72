"""What only torch.jit.trace needs (torch.onnx.export(dynamo=False)): it has no views, no state, and numbers for sizes.

All of it is behind `Trace`. ``Capture.trace`` is one while TorchScript traces a model, and None under torch.export.
"""

from symbolics.capture.trace.trace import Trace

__all__ = ["Trace"]
