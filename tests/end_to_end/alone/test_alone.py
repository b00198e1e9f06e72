"""Where torch.onnx.export alone works, ours works: the same inputs, outputs, order, names and numbers; or the refusal names the Function.

Plain models, and the rows of the Functions table and of the models on the exporter that is quick. ``PYTHONOP_ALONE=all`` (`make test-alone`) runs both
exporters and both doors, and the wild packages that are installed. Operators are compared so by tests/operators: no row of theirs is refused that torch exports.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable

import pytest
import torch

from exporter.files.trust import registered, unregister
from tests.end_to_end.alone import callables, calls, clashes, layers, options, state, uses  # noqa: F401  (they fill MODELS)
from tests.end_to_end.alone.compare import DOORS, Given, doors, worse
from tests.end_to_end.alone.differs import DIFFERS
from tests.end_to_end.alone.table import MODELS
from tests.end_to_end.functions.case import CASES
from tests.end_to_end.functions.check import ROWS
from tests.end_to_end.functions.operators import extension
from tests.end_to_end.functions.worker import ALLOW
from tests.end_to_end.wild.models import MODELS as WILD
from tests.end_to_end.wild.packages import PACKAGES
from tests.zoo.exported import MODELS as ZOO, SMALL, entry_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.unusable(reason="what torch alone makes, too")]

ALL = os.environ.get("PYTHONOP_ALONE") == "all"
#: Models that are exported by both doors: what differs between these is arguments and options.
BOTH = {name for name, make in MODELS.items() if make.__module__.endswith((".calls", ".options"))}
WHICH = [True, False] if ALL else [False]
PLACES = ["tests.*", "torch.utils.checkpoint:*", "torch:tanh", "transformers.*", "entmax.*", "snntorch.*", "timm.*"]


def _worse(given: Given, dynamo: bool, both: bool) -> str:
    alone = doors(given, dynamo, "torch")
    return next((f"{door}: {said}" for door in DOORS[0 if both else 1 :] if (said := worse(given, dynamo, door, alone))), "")


def _check(name, dynamo, said):
    pattern, _ = DIFFERS.get((name, dynamo), ("^$", ""))
    assert re.search(pattern, said), said or f"{name} is in the table of what differs, and does not"


@pytest.mark.parametrize("name", MODELS)
def test_plain_model(name, dynamo):
    _check(name, dynamo, _worse(MODELS[name](), dynamo, ALL or name in BOTH))


@pytest.mark.parametrize("dynamo", WHICH, ids=lambda dynamo: "dynamo" if dynamo else "torchscript")
@pytest.mark.parametrize("name", [row.id for row in ROWS if CASES[row.id].setup is not extension])
def test_function(name, dynamo):
    case, before = CASES[name], registered()
    try:
        for action in (case.setup, case.register):
            if action:
                action()
        torch.manual_seed(11)
        said = _worse(Given(case.wrap(case.model()), case.inputs(), allow=case.allow or ALLOW, loose=max(case.loose, 1e-4)), dynamo, ALL)
    finally:
        for made in set(registered()) - set(before):
            unregister(made)
    _check(name, dynamo, said)


@pytest.mark.parametrize("dynamo", WHICH, ids=lambda dynamo: "dynamo" if dynamo else "torchscript")
@pytest.mark.parametrize("name", ZOO if ALL else sorted(SMALL & ZOO.keys()))
def test_zoo(name, dynamo):
    entry = entry_of(name)
    assert not _worse(Given(entry.model, entry.args, allow=PLACES, loose=1e-3), dynamo, False)


def _wild() -> dict[str, tuple[str, Callable[[], tuple[torch.nn.Module, tuple[object, ...]]]]]:
    """The wild packages that are installed: name -> (module, what makes a model and its arguments)."""
    rows = {package.row: (package.module, CASES[package.row]) for package in PACKAGES}
    made = {name: (module, lambda case=case: (case.wrap(case.model()), case.inputs())) for name, (module, case) in rows.items()}
    made |= {name: (wild.module, wild.make) for name, wild in WILD.items()}
    return {name: found for name, found in made.items() if importlib.util.find_spec(found[0].partition(".")[0]) is not None}


if ALL:

    @pytest.mark.parametrize("name", found := _wild())
    def test_wild(name, dynamo):
        module, make = found[name]
        model, args = make()
        assert not _worse(Given(model, args, allow=[f"{module.partition('.')[0]}.*", *PLACES], loose=1e-3), dynamo, False)
