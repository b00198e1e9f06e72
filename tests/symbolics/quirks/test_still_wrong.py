"""Upstream without our cure: each test fails on the release that mends its quirk, and names what may go."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import onnxruntime
import pytest
from packaging.version import Version

from symbolics import quirks
from symbolics.quirks import elsewhere
from tests.symbolics.quirks import canaries, canaries_of_draws, canaries_of_onnx, canaries_of_onnxruntime, canaries_of_sizes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

FILES = {
    module.name.rpartition(".")[2]: importlib.import_module(module.name).QUIRK
    for folder in pkgutil.iter_modules(quirks.__path__)
    if folder.ispkg
    for module in pkgutil.iter_modules([f"{quirks.__path__[0]}/{folder.name}"], f"{quirks.__name__}.{folder.name}.")
}
QUIRKS = {**FILES, **{name.lower(): getattr(elsewhere, name) for name in elsewhere.__all__}}
#: A canary is named as its quirk; a quirk may have several: canary -> quirk.
FURTHER = {
    "buffers_of_open_spectra": "open_spectra",
    "empty_batches": "empty_products",
    "mean_of_nothing": "empty_reductions",
    **dict.fromkeys(("embedding", "extremum", "log_sigmoid", "std"), "own_backward"),
}
CANARIES = {
    name: canary
    for module in (canaries, canaries_of_draws, canaries_of_onnx, canaries_of_onnxruntime, canaries_of_sizes)
    for name, canary in inspect.getmembers(module, inspect.isfunction)
    if canary.__module__ == module.__name__ and not name.startswith("_")
}

#: canary -> the release of onnxruntime that is right: the quirk stays for the older ones that people have.
RIGHT_FROM = {"empty_batches": "1.32", "empty_products": "1.32", "empty_reductions": "1.32"}


def test_each_quirk_has_a_canary_and_each_canary_a_quirk():
    found = {FURTHER.get(name, name) for name in CANARIES}
    assert not set(QUIRKS) - found, f"without a canary, a function of that name in canaries*.py: {set(QUIRKS) - found}"
    assert not found - set(QUIRKS), (
        f"canaries without a file of that name, an entry of elsewhere.py or of FURTHER here: {found - set(QUIRKS)}"
    )


@pytest.mark.parametrize("name", CANARIES)
def test_upstream_is_still_wrong(name, tmp_path):
    canary, quirk = CANARIES[name], QUIRKS[FURTHER.get(name, name)]
    still_wrong = canary(tmp_path) if name == "widened_halves" else canary()
    if name in RIGHT_FROM and Version(onnxruntime.__version__) >= Version(RIGHT_FROM[name]):
        assert not still_wrong, f"{quirk.upstream} was right from {RIGHT_FROM[name]} on ({name}), and is wrong again"
        return
    cure = quirk.cure or f"symbolics/quirks/*/{FURTHER.get(name, name)}.py"
    assert still_wrong, f"{quirk.upstream} is right now ({name}): {cure} may go, where no older release is supported"


@pytest.mark.parametrize("name", [name for name, canary in CANARIES.items() if "cures" in inspect.signature(canary).parameters])
def test_a_pass_over_the_graph_cures(name):
    still_wrong = CANARIES[name]([*quirks.OPTIMIZED, *quirks.OPTIMIZED, *quirks.LOADED])  # twice does no harm
    assert not still_wrong, (
        f"{name} is as wrong with the passes of OPTIMIZED and LOADED: the cure is not among them, or the canary fails of something else"
    )
