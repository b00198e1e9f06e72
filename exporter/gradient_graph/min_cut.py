"""The cheapest cut between two ends of a network: Dinic's algorithm on integers."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["UNCUT", "Network"]

#: The capacity of an edge that no cut may take.
UNCUT = 1 << 62


class Network:
    """A directed network with capacities.

    torch's partitioner asks networkx once for such a cut; a limit in bytes asks a dozen times (`exporter.gradient_graph.recompute`).
    """

    SOURCE, SINK = "source", "sink"

    def __init__(self) -> None:
        self._number: dict[Hashable, int] = {self.SOURCE: 0, self.SINK: 1}
        self._edges: list[list[int]] = [[], []]  # of each vertex, its edges; edge e and its way back e ^ 1 stand side by side
        self._to: list[int] = []
        self._room: list[int] = []

    def add(self, start: Hashable, end: Hashable, capacity: int) -> None:
        """An edge; vertices are what is named."""
        a, b = self._vertex(start), self._vertex(end)
        self._edges[a].append(len(self._to))
        self._edges[b].append(len(self._to) + 1)
        self._to += (b, a)
        self._room += (capacity, 0)

    def _vertex(self, name: Hashable) -> int:
        found = self._number.setdefault(name, len(self._edges))
        if found == len(self._edges):
            self._edges.append([])
        return found

    def sink_side(self) -> set[Hashable]:
        """The vertices behind a cheapest cut; of several cuts, the one nearest to the sink. Called once."""
        while (level := self._levels())[1] >= 0:
            self._block(level)
        behind, queue = {1}, [1]
        for vertex in queue:
            for edge in self._edges[vertex]:
                if self._room[edge ^ 1] and self._to[edge] not in behind:
                    behind.add(self._to[edge])
                    queue.append(self._to[edge])
        return {name for name, vertex in self._number.items() if vertex in behind}

    def _levels(self) -> list[int]:
        level = [-1] * len(self._edges)
        level[0], queue = 0, [0]
        for vertex in queue:
            for edge in self._edges[vertex]:
                if self._room[edge] and level[self._to[edge]] < 0:
                    level[self._to[edge]] = level[vertex] + 1
                    queue.append(self._to[edge])
        return level

    def _block(self, level: list[int]) -> None:
        """Fill every shortest way from the source to the sink."""
        room, to, edges = self._room, self._to, self._edges
        place = [0] * len(edges)
        path: list[int] = []
        vertex = 0
        while True:
            if vertex == 1:
                flow = min(room[edge] for edge in path)
                for edge in path:
                    room[edge] -= flow
                    room[edge ^ 1] += flow
                first = next(i for i, edge in enumerate(path) if not room[edge])
                vertex = to[path[first] ^ 1]
                del path[first:]
                continue
            while place[vertex] < len(edges[vertex]):
                edge = edges[vertex][place[vertex]]
                if room[edge] and level[to[edge]] == level[vertex] + 1:
                    break
                place[vertex] += 1
            else:
                if not path:
                    return
                vertex = to[path.pop() ^ 1]
                place[vertex] += 1
                continue
            path.append(edge)
            vertex = to[edge]
