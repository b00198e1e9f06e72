"""Every private name of torch and onnxscript that the project uses, each with the reason.

tests/symbolics/test_torch_private.py has a test a name: when a release moves one, that test fails by its name. Nothing else in
the project may touch a private name. Users import from here; the modules are grouped by what the names belong to.
"""

from __future__ import annotations

from symbolics.torch_private.builtins import *
from symbolics.torch_private.export import *
from symbolics.torch_private.functions import *
from symbolics.torch_private.modules import *
from symbolics.torch_private.operators import *
from symbolics.torch_private.rewriting import *
from symbolics.torch_private.sizes import *
from symbolics.torch_private.tensors import *
from symbolics.torch_private.threads import *
from symbolics.torch_private.torchscript import *
from symbolics.torch_private.tracing import *
from symbolics.torch_private.watching import *
