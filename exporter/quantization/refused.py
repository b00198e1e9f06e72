"""The error of a model of which nothing can run in integers: every reason once, and the way out that follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from exporter.quantization.products import NO_QUANTIZER, OF_FLOAT32, STATISTICS, UNQUANTIZED, Product
from exporter.quantization.quantizers import Missed, Quantizer
from symbolics.errors import ExportError
from symbolics.graph.values import describe, is_python_op
from symbolics.graph.walk import walk

__all__ = ["nothing_in_integers"]

#: How many lines an error has, the first and the way out included.
_LINES = 6
_WITH_QUANTISERS = "train with quantisers before the weight and the activation of a product, and export in eval mode"
#: What a reason begins with -> where a quantiser is missing then.
_PLACES = {
    "its weight is on no": "before the weights",
    NO_QUANTIZER: "before what a product takes",
    UNQUANTIZED: "directly behind the convolutions (a BatchNorm and a ReLU may stand between)",
}


def nothing_in_integers(
    model: ir.Model, products: Sequence[Product], quantizers: Sequence[Quantizer], missed: Sequence[Missed]
) -> ExportError:
    """What to tell where nothing can run in integers.

    Args:
        model: The model.
        products: Its products, each with its reason.
        quantizers: Its quantisers.
        missed: What rounds, and is none.
    """
    way = _way_out(model, products, quantizers, missed)
    room = _LINES - 1 - len(way.splitlines())
    reasons = _grouped((each.node, each.reason) for each in products) or ["it has no convolution and no matrix product in its main graph"]
    reasons += _grouped((m.step, m.reason) for m in missed if not any(m.reason in each.reason for each in products))
    if len(reasons) > room:
        reasons[room - 1 :] = [f"and {len(reasons) - room + 1} more reasons"]
    return ExportError("\n  ".join(["nothing in the model can run in integers.", *reasons, f"way out: {way}"]))


def _grouped(found: Iterable[tuple[ir.Node, str]]) -> list[str]:
    """A line for each reason, with the first of the nodes that have it; counts of channels make no other reason."""
    groups: dict[str, list[tuple[ir.Node, str]]] = {}
    for node, reason in found:
        groups.setdefault(reason.partition(" (")[0], []).append((node, reason))
    return [f"{describe(node)}{f', and {len(rest)} more' if rest else ''}: {reason}" for (node, reason), *rest in groups.values()]


def _way_out(model: ir.Model, products: Sequence[Product], quantizers: Sequence[Quantizer], missed: Sequence[Missed]) -> str:
    calls = next((describe(node) for node in walk(model.graph) if is_python_op(node)), None)
    if calls:
        return f"the quantiser may be in {calls}, which runs Python: export with portable=True, or declare it with exporter.quantizer"
    if products and all(OF_FLOAT32 in product.reason for product in products):
        return "export the model in float32: model.float()"
    if not quantizers and not missed:
        return f"{_WITH_QUANTISERS}.\n    Of a float model without quantisers, onnxruntime.quantization.quantize_static makes integers, with example inputs"
    roundings = {each.reason for each in missed} | {each.beyond for each in quantizers if each.beyond}
    bare = [each.reason for each in products if not any(reason in each.reason for reason in roundings)]
    ways = []
    if places := [place for begin, place in _PLACES.items() if any(reason.startswith(begin) for reason in bare)]:
        ways.append(f"train with quantisers {' and '.join(places)}")
    if any(STATISTICS in each.reason for each in products):
        ways.append("export in eval mode")
    if roundings:
        ways.append("change the rounding as its reason says")
    return "; ".join(ways) or "change what the reasons name; docs/quantization.md says how, under 'Find out why a product stays in float'"
