"""A file's graph as a picture: SVG text, or one HTML page in which modules open, nodes are found and asked about."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exporter.files.read import open_model
from exporter.pictures.columns import arrange
from exporter.pictures.page import rendered
from exporter.pictures.scene import Box, Drawn, Key, Scene, facts_of, facts_of_node, is_called, title_of
from exporter.pictures.svg import LEGEND, STYLE, svg_of
from symbolics.errors import ArgumentError
from symbolics.text import clean

__all__ = ["FOLDED_ABOVE", "draw_html", "draw_inside_a_page", "draw_svg"]

#: Boxes beyond which modules are folded where nobody says how deep.
FOLDED_ABOVE = 150
_MOST = 1500  # boxes of one picture: nobody reads more, and Graphviz takes minutes
_MOST_BESIDE_OTHERS = 400  # boxes of a picture that is a part of a page about something else
_MOST_OF_A_PAGE = 12_000  # boxes of all pictures of a page
_LEVEL = 600  # boxes of a picture of the whole graph that a page has beside the first one


def draw_svg(source: Any, title: str, depth: int | None = None) -> str:
    """The graph as SVG text that needs nothing else.

    Args:
        source: A path, or what else `open_model` takes. Nothing of it runs.
        title: What it is called.
        depth: How many levels of modules are open; default: as many as 150 boxes allow.

    Raises:
        FormatError: The file is damaged.
        ArgumentError: There would be too many boxes.
        RunError: Graphviz is not there, or failed.
    """
    drawn = Drawn(open_model(source, data=False))
    scene = drawn.whole(_depth(drawn, depth))
    return svg_of(scene, arrange([scene])[0], title)


def draw_inside_a_page(source: Any, title: str, boxes: int) -> str:
    """The graph as SVG text for a page that has `exporter.pictures.svg.STYLE`, with as many levels open as so many boxes allow.

    Args and raises: as `draw_svg`; it refuses earlier than that, so that no page waits for Graphviz for long.
    """
    drawn = Drawn(open_model(source, data=False))
    depth = drawn.depth_for(boxes)
    if drawn.count(depth) > _MOST_BESIDE_OTHERS:
        raise ArgumentError(f"{drawn.count(depth)} nodes are in no module that could be folded; pythonop draw draws them")
    scene = drawn.whole(depth)
    return svg_of(scene, arrange([scene])[0], title, style="")


def draw_html(source: Any, title: str, depth: int | None = None) -> str:
    """The graph as one page that needs no network; a click on a folded module opens it.

    Args and raises: as `draw_svg`; ImportError where jinja2 is not installed.
    """
    drawn = Drawn(open_model(source, data=False))
    first = _depth(drawn, depth)
    scenes = dict(_scenes(drawn, first))
    numbers = {node: i for i, node in enumerate(drawn.nodes)}
    names: dict[str, list[str]] = {}
    boxes: dict[str, dict[str, Any]] = {}
    for view, (_, scene) in scenes.items():
        names[view] = [_name(view, i, box, numbers) for i, box in enumerate(scene.boxes)]
        for name, box in zip(names[view], scene.boxes, strict=True):
            boxes[name] = _told(drawn, box, scenes)
    layouts = arrange([scene for _, scene in scenes.values()])
    pictures = {
        view: svg_of(scene, layout, said, style="", names=names[view])
        for (view, (said, scene)), layout in zip(scenes.items(), layouts, strict=True)
    }
    nodes = [_found(drawn, node, i, scenes) for node, i in numbers.items()]
    data = {"first": f"depth {first}", "views": {view: said for view, (said, _) in scenes.items()}, "boxes": boxes, "nodes": nodes}
    parts = {part for part, _ in drawn.keys.values()}
    return rendered(
        Path(__file__).with_name("graph.html"),
        data,
        title=clean(title),
        pictures=pictures,
        style=STYLE,
        legend={kind: text for kind, text in LEGEND.items() if kind.split()[1] in parts},
        levels=[view for view in scenes if view.startswith("depth ")],
        first=data["first"],
        counts=_counts(drawn),
    )


def _depth(drawn: Drawn, depth: int | None) -> int:
    """How deep a picture is.

    Raises:
        ArgumentError: It would have too many boxes.
    """
    chosen = drawn.depth_for(FOLDED_ABOVE) if depth is None else min(depth, drawn.deepest)
    count = drawn.count(chosen)
    if count > _MOST:
        fits = max(d for d in range(drawn.deepest + 1) if drawn.count(d) <= _MOST)
        raise ArgumentError(
            f"at depth {chosen} the graph has {count} boxes, at most {_MOST} are drawn: --depth {fits} has {drawn.count(fits)}"
        )
    return chosen


def _scenes(drawn: Drawn, first: int) -> Iterator[tuple[str, tuple[str, Scene]]]:
    """view -> what it shows in words, and its scene: the whole graph at several depths, and each module alone."""
    room = _MOST_OF_A_PAGE
    for depth in range(drawn.deepest + 1):
        if depth == first or (depth and drawn.count(depth) <= _LEVEL):
            scene = drawn.whole(depth)
            room -= len(scene.boxes)
            yield f"depth {depth}", ("the whole graph", scene)
    for key in dict.fromkeys(drawn.home(key) for key in drawn.modules()):
        scene = drawn.inside(key)
        room -= len(scene.boxes)
        if room > 0 and len(scene.boxes) <= _MOST:
            yield _view(key), (f"{clean('.'.join(key[1]))} ({key[0]})", scene)


def _view(key: Key) -> str:
    return json.dumps([key[0], *key[1]])


def _name(view: str, number: int, box: Box, numbers: dict[Any, int]) -> str:
    return f"n{numbers[box.nodes[0]]}" if box.kind == "node" else f"{hashlib.sha256(view.encode()).hexdigest()[:8]}.{number}"


def _told(drawn: Drawn, box: Box, scenes: dict[str, Any]) -> dict[str, Any]:
    """What the page says of a box, and the view that opens where it is a folded module."""
    facts = facts_of_node(box.nodes[0], drawn.places) if box.kind == "node" else facts_of(box)
    if box.stops:
        facts.append(("gradients", "stop here" if box.kind in ("node", "input") else f"stop at {box.stops} of its nodes"))
    opens = _view(drawn.home(box.key)) if box.key is not None else ""
    return {
        "title": clean(box.title),
        "facts": [(what, clean(text, 300)) for what, text in facts],
        "opens": opens if opens in scenes else "",
    }


def _found(drawn: Drawn, node: Any, number: int, scenes: dict[str, Any]) -> list[str]:
    """What the search looks through: the name of its box, a text, and the view in which it is a box."""
    part, path = drawn.keys[node]
    view = _view((part, path)) if path else "depth 1"
    said = [
        title_of(node),
        *([node.op_type] if is_called(node) else []),
        node.name or "",
        ".".join(path),
        *(str(v.name) for v in node.outputs if v.name),
    ]
    deepest = next((v for v in reversed([v for v in scenes if v.startswith("depth ")])), "")
    return [f"n{number}", clean("  ".join(said), 300), view if view in scenes else deepest]


def _counts(drawn: Drawn) -> dict[str, int]:
    parts = [part for part, _ in drawn.keys.values()]
    found = {f"{part} nodes": parts.count(part) for part in dict.fromkeys(parts)}
    return found | {
        "PythonOps and their gradients": sum(map(is_called, drawn.nodes)),
        "places where gradients stop": sum(map(drawn.is_stop, drawn.nodes)),
    }
