"""Sums by channels come out of the chain of elementwise operators that makes what they add, in memory.

The gradient of a BatchNormalization sums what it gets, and its product with the centred input, over all axes but the channels'. As operators
of their own the sums read both again, and the product is written for its sum alone. The native library adds what it has in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from exporter.cpu.declared import forget
from exporter.cpu.elementwise import ELEMENTWISE, FUNCTIONS, TEMPORARIES
from exporter.cpu.operators import DOMAIN
from exporter.cpu.sums import added_axes
from exporter.runtime.facts import ShapeAndType, fact_of
from symbolics.graph.values import attr

__all__ = ["sum_by_channels"]

_MOST_SUMS = 4  # as MOST_SUMS in native/elementwise.c
_FEW_CHANNELS, _FEW_NUMBERS = 16, 16  # channels are what threads share; numbers of a channel that lie together


def sum_by_channels(model: ir.Model, facts: dict[ir.Value, ShapeAndType]) -> int:
    """Let chains that `fuse` made give out the sums of their results, where ReduceSum takes them.

    Args:
        model: Changed.
        facts: As `fuse` found them; takes those of the chains' new results. Where a rank is wrong, a run is an error; of other sizes than
            said, the sums are those of what there is.

    Returns:
        How many ReduceSums were taken out.
    """
    found: dict[ir.Node, list[ir.Node]] = {}
    for node in model.graph:
        chain = _chain(node, facts) if node.op_type == "ReduceSum" and node.domain == "" else None
        if chain is not None and len(found.setdefault(chain, [])) < _MOST_SUMS:
            found[chain].append(node)
    for chain, sums in found.items():
        _give_out(model.graph, chain, sums, facts)
    return sum(map(len, found.values()))


def _chain(node: ir.Node, facts: Mapping[ir.Value, ShapeAndType]) -> ir.Node | None:
    """The chain whose result a node adds by channels; None for any other node, and where that saves nothing."""
    x = node.inputs[0] if node.inputs else None
    chain = None if x is None else x.producer()
    if x is None or chain is None or chain.op_type != ELEMENTWISE or chain.domain != DOMAIN or chain.graph is not node.graph:
        return None
    shape = fact_of(x, facts)[0] or ()
    rank = len(shape)
    if rank < 3 or added_axes(node, rank) != [0, *range(2, rank)] or attr(node, "keepdims") != 0:
        return None
    channels, numbers = shape[1], math.prod(dim if isinstance(dim, int) else _FEW_NUMBERS for dim in shape[2:])
    return chain if isinstance(channels, int) and channels >= _FEW_CHANNELS and numbers >= _FEW_NUMBERS else None


def _give_out(graph: ir.Graph, chain: ir.Node, sums: Sequence[ir.Node], facts: dict[ir.Value, ShapeAndType]) -> None:
    """Put a chain with these sums in the place of one without."""
    program = list(attr(chain, "program"))
    inputs, before = len(chain.inputs), len(chain.inputs) + len(chain.outputs)
    used = 1 + max((place for i, place in enumerate(program) if i % 4), default=0)
    temporaries = max(used - before, 0)
    left: list[ir.Value] = []  # results that nobody reads but the sums
    for output in chain.outputs:
        if not output.is_graph_output() and all(use.node in sums for use in output.uses()) and temporaries + len(left) < TEMPORARIES:
            left.append(output)
    kept = [output for output in chain.outputs if output not in left]
    first = inputs + len(kept) + len(sums)
    places = {output: inputs + i for i, output in enumerate(kept)} | {output: first + temporaries + i for i, output in enumerate(left)}
    moved = {inputs + i: places[output] for i, output in enumerate(chain.outputs)}
    program = [n if i % 4 == 0 or n < inputs else moved.get(n, n - before + first) for i, n in enumerate(program)]
    for i, node in enumerate(sums):
        place = next(places[output] for output in chain.outputs if output is node.inputs[0])
        program += [FUNCTIONS["Sum"], inputs + len(kept) + i, place, place]
    rank = len(fact_of(chain.outputs[0], facts)[0] or ())
    said = [chain.attributes[name] for name in ("full", "channels") if name in chain.attributes]
    attributes = [ir.AttrInt64s("program", program), ir.AttrInt64("rank", rank), *said]
    made = ir.Node(DOMAIN, ELEMENTWISE, chain.inputs, attributes, num_outputs=len(kept) + len(sums), name=chain.name)
    graph.insert_before(chain, made)
    for old, new in zip([*kept, *(node.outputs[0] for node in sums)], made.outputs, strict=True):
        shape, kind = facts[new] = fact_of(old, facts)
        new.name, new.type = old.name, old.type or (None if kind is None else ir.TensorType(kind))
        new.shape = old.shape or (None if shape is None else ir.Shape(shape))
        old.name = None
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove([*sums, chain], safe=True)
    forget(made.outputs[len(kept) :])  # onnxruntime would believe of a sum what the file says, which so far it has derived itself
