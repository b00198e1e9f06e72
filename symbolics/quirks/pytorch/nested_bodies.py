"""Control flow in the body of control flow: each body is a function of torch's, and the functions import one another in two versions."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "functions_of_one_version"]

QUIRK = Quirk(
    cure="symbolics/quirks/pytorch/nested_bodies.py",
    upstream="torch",
    seen="2.13.0",
    wrong="torch.cond in the body of a loop or a scan: the model imports the functions' domain as version 20, the functions as version 1, "
    "and nothing can inline them",
)


def functions_of_one_version(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Import the domains of the model's own functions as version 1 everywhere: functions have no versions."""
    importers: list[ir.Model | ir.Function] = [model, *model.functions.values()]
    for domain in {function.domain for function in model.functions.values()}:
        for importer in importers:
            if domain in importer.opset_imports:
                importer.opset_imports[domain] = 1
    return False
