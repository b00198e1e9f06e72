"""The cheapest cut, beside all cuts."""

from __future__ import annotations

import itertools
import random

import pytest

from exporter.gradient_graph.min_cut import UNCUT, Network


def _cheapest(edges, inner):
    """The price of the cheapest cut, by trying all."""
    prices = []
    for chosen in itertools.product((False, True), repeat=len(inner)):
        behind = {Network.SINK, *(name for name, is_behind in zip(inner, chosen) if is_behind)}
        prices.append(sum(c for a, b, c in edges if a not in behind and b in behind))
    return min(prices)


@pytest.mark.parametrize("seed", range(40))
def test_is_the_cheapest_of_all(seed):
    chance = random.Random(seed)
    inner = [f"v{i}" for i in range(6)]
    every = [Network.SOURCE, *inner, Network.SINK]
    edges = [(a, b, chance.choice([0, 1, 2, 5, 9, 30])) for a, b in itertools.permutations(every, 2) if chance.random() < 0.5]
    network = Network()
    for edge in edges:
        network.add(*edge)
    behind = network.sink_side()
    assert Network.SINK in behind
    assert Network.SOURCE not in behind
    assert sum(c for a, b, c in edges if a not in behind and b in behind) == _cheapest(edges, inner)


def test_of_two_equal_cuts_the_one_nearest_to_the_sink():
    network = Network()
    for a, b in itertools.pairwise([Network.SOURCE, "first", "second", Network.SINK]):
        network.add(a, b, 3)
    assert network.sink_side() == {Network.SINK}


def test_what_cannot_be_cut_is_not():
    network = Network()
    network.add(Network.SOURCE, "a", UNCUT)
    network.add("a", "b", 1 << 40)
    network.add("b", Network.SINK, UNCUT)
    network.add(Network.SOURCE, "idle", 1)
    assert network.sink_side() == {"b", Network.SINK}
