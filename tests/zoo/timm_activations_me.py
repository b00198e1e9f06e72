"""timm's memory-efficient activations (timm/layers/activations_me.py), without the rest of timm.

timm as a whole imports torchvision, for which there is no CPU build of the torch that we pin. The file needs torch alone,
so its source is run as the body of this module: its classes are importable by the name of this module, which a fresh
process needs. Requires ``pip install --no-deps timm``.
"""

from __future__ import annotations

import sys
from importlib import metadata, util

_path = metadata.distribution("timm").locate_file("timm/layers/activations_me.py")
_spec = util.spec_from_file_location(__name__, str(_path))
assert _spec is not None
assert _spec.loader is not None
_spec.loader.exec_module(sys.modules[__name__])
