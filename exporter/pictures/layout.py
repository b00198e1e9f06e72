"""Where boxes and arrows stand: Graphviz (the package pygraphviz) lays them out, in a process of its own.

It is told sizes and numbers, nothing of the file. A graph that it fails on, or takes too long for, ends that process alone.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from exporter.files.fresh import fresh_python
from symbolics.errors import RunError
from symbolics.text import extra

__all__ = ["Drawing", "Frame", "Layout", "lay_out", "missing"]

Point = tuple[float, float]


@dataclass
class Frame:
    """An open module: the numbers of the boxes that it holds, and the frames inside it."""

    boxes: list[int]
    inside: list[Frame]


@dataclass
class Drawing:
    """What is to be laid out.

    Attributes:
        boxes: Width and height of each, in pixels.
        arrows: Source and target of each.
        frames: The open modules.
        upwards: Whether arrows go from below to above.
    """

    boxes: list[Point]
    arrows: list[tuple[int, int]]
    frames: list[Frame]
    upwards: bool = False


@dataclass
class Layout:
    """Where everything is, in pixels from the top left.

    Attributes:
        width, height: Of all of it.
        boxes: The middle of each box.
        arrows: The points of each arrow's curve, as SVG's ``C`` takes them, from its source to its target; empty where there is none.
        frames: Left, top, width and height of each frame, outer frames before inner ones.
    """

    width: float
    height: float
    boxes: list[Point]
    arrows: list[list[Point]]
    frames: list[tuple[float, float, float, float]]


def missing() -> str | None:
    """None where pictures can be drawn here, else what to do."""
    return (
        None
        if importlib.util.find_spec("pygraphviz") is not None
        else f"pictures are laid out by pygraphviz, which is not installed: {extra('draw')}"
    )


def lay_out(plans: Sequence[Drawing], seconds: float = 300) -> list[Layout]:
    """Positions for each plan.

    Raises:
        RunError: pygraphviz is not installed, Graphviz failed, or took longer than that.
    """
    if (problem := missing()) is not None:
        raise RunError(problem)
    job = json.dumps([_plain(plan) for plan in plans])
    command = fresh_python("exporter.pictures.layout")
    try:
        done = subprocess.run(command, input=job, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise RunError(f"Graphviz had no layout after {seconds:g} s: fold more of the graph (--depth)") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
        raise RunError(
            f"Graphviz failed on a graph of {max(len(plan.boxes) for plan in plans)} boxes ({last}): fold more or less of it (--depth)"
        )
    return [Layout(**{**found, "arrows": [[(x, y) for x, y in arrow] for arrow in found["arrows"]]}) for found in json.loads(done.stdout)]


def _plain(plan: Drawing) -> dict[str, Any]:
    def frame(each: Frame) -> dict[str, Any]:
        return {"boxes": each.boxes, "inside": [frame(inner) for inner in each.inside]}

    return {"boxes": plan.boxes, "arrows": plan.arrows, "frames": [frame(each) for each in plan.frames], "upwards": plan.upwards}


# ------------------------------------------------------------------------------------------------ in the process of its own
_INCH = 72.0
_MANY = 300  # arrows beyond which they are straight lines: curves around boxes take long


def _main() -> None:
    json.dump([_laid_out(plan) for plan in json.load(sys.stdin)], sys.stdout)


def _laid_out(plan: dict[str, Any]) -> dict[str, Any]:
    try:
        return _graphviz(plan, frames=True)
    except Exception:  # dot knows graphs whose frames it cannot keep apart
        return _graphviz(plan, frames=False)


def _graphviz(plan: dict[str, Any], frames: bool) -> dict[str, Any]:
    import pygraphviz

    style = "polyline" if len(plan["arrows"]) > _MANY else "spline"
    # As the pages have it: pixels are points, 1/72 inch. A limit keeps large graphs from taking minutes.
    graph = pygraphviz.AGraph(
        directed=True,
        strict=False,
        rankdir="BT" if plan["upwards"] else "TB",
        splines=style,
        nodesep="0.25",
        ranksep="0.4",
        nslimit="4",
        nslimit1="4",
        mclimit="0.6",
    )
    for number, (width, height) in enumerate(plan["boxes"]):
        graph.add_node(number, shape="box", label="", fixedsize="true", width=f"{width / _INCH:.3f}", height=f"{height / _INCH:.3f}")
    for number, (source, target) in enumerate(plan["arrows"]):
        graph.add_edge(source, target, key=f"a{number}", arrowhead="none")
    names: list[str] = []
    if frames:
        _add_frames(graph, plan["frames"], names, "b" if plan["upwards"] else "t")
    graph.layout(prog="dot")
    left, bottom, right, top = _numbers(graph.graph_attr["bb"])
    boxes = [(x - left, top - y) for x, y in (_numbers(graph.get_node(number).attr["pos"]) for number in range(len(plan["boxes"])))]
    arrows = []
    for number, ends in enumerate(plan["arrows"]):
        text = graph.get_edge(*ends, key=f"a{number}").attr["pos"] or ""
        arrows.append([(x - left, top - y) for x, y in map(_numbers, text.split())])
    found = []
    for name in names:
        a, b, c, d = _numbers(_frame_of(graph, name).graph_attr["bb"])
        found.append((a - left, top - d, c - a, d - b))
    return {"width": right - left, "height": top - bottom, "boxes": boxes, "arrows": arrows, "frames": found}


def _add_frames(graph: Any, frames: list[dict[str, Any]], names: list[str], top: str) -> None:
    for frame in frames:
        names.append(f"cluster_{len(names)}")
        inner = graph.add_subgraph(
            _all_boxes(frame), name=names[-1], margin="12", label="M", labelloc=top, fontsize="11"
        )  # room for a title
        _add_frames(inner, frame["inside"], names, top)


def _all_boxes(frame: dict[str, Any]) -> list[int]:
    return [*frame["boxes"], *(box for inner in frame["inside"] for box in _all_boxes(inner))]


def _frame_of(graph: Any, name: str) -> Any:
    found = graph.get_subgraph(name)
    if found is not None:
        return found
    return next(inner for each in graph.subgraphs_iter() if (inner := _try_frame(each, name)) is not None)


def _try_frame(graph: Any, name: str) -> Any:
    try:
        return _frame_of(graph, name)
    except StopIteration:
        return None


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.removeprefix("e,").removeprefix("s,").split(",")]


if __name__ == "__main__":
    _main()
