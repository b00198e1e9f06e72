"""The parts of a graph side by side: the forward runs down, the gradient beside it up again, the optimizer stands behind both."""

from __future__ import annotations

from collections.abc import Sequence

from exporter.files.places import PARTS, Part
from exporter.pictures.layout import Drawing, Frame, Layout, Point, lay_out
from exporter.pictures.scene import Cluster, Scene
from exporter.pictures.svg import size_of

__all__ = ["arrange"]

_GAP = 100.0  # between two columns
_APART = 40.0  # how far an arrow between columns goes before it turns, at least


def arrange(scenes: Sequence[Scene]) -> list[Layout]:
    """Positions for everything in each scene.

    Raises:
        RunError: As `lay_out`.
    """
    columns = [_columns(scene) for scene in scenes]
    laid = iter(lay_out([plan for each in columns for plan, *_ in each]))
    return [_joined(scene, each, [next(laid) for _ in each]) for scene, each in zip(scenes, columns, strict=True)]


#: What is laid out, and which boxes and arrows of the scene those of the plan are.
_Column = tuple[Drawing, list[int], list[int]]


def _columns(scene: Scene) -> list[_Column]:
    if any(box.kind == "outside" for box in scene.boxes):  # one module and its surroundings
        part: Part = next((box.part for box in scene.boxes if box.kind in ("node", "module")), "forward")
        return [_column(scene, list(range(len(scene.boxes))), [], part)]
    numbers = {part: [i for i, box in enumerate(scene.boxes) if box.part == part] for part in PARTS}
    return [_column(scene, boxes, [c for c in scene.clusters if c.part == part], part) for part, boxes in numbers.items() if boxes]


def _column(scene: Scene, boxes: list[int], clusters: list[Cluster], part: Part) -> _Column:
    new = {box: i for i, box in enumerate(boxes)}
    arrows = [i for i, arrow in enumerate(scene.arrows) if arrow.source in new and arrow.target in new]

    def frame(cluster: Cluster) -> Frame:
        return Frame([new[box] for box in cluster.boxes], [frame(inner) for inner in cluster.inside])

    ends = [(new[scene.arrows[i].source], new[scene.arrows[i].target]) for i in arrows]
    plan = Drawing([size_of(scene.boxes[box]) for box in boxes], ends, [frame(each) for each in clusters], upwards=part == "gradient")
    return plan, boxes, arrows


def _joined(scene: Scene, columns: list[_Column], laid: list[Layout]) -> Layout:
    height = max((layout.height for layout in laid), default=0.0)
    at: list[Point] = [(0.0, 0.0)] * len(scene.boxes)
    arrows: list[list[Point]] = [[] for _ in scene.arrows]
    frames: list[tuple[float, float, float, float]] = []
    left = 0.0
    for (_, boxes, numbers), layout in zip(columns, laid, strict=True):
        top = height - layout.height  # the gradient begins where the forward ends
        for box, (x, y) in zip(boxes, layout.boxes, strict=True):
            at[box] = x + left, y + top
        for number, points in zip(numbers, layout.arrows, strict=True):
            arrows[number] = [(x + left, y + top) for x, y in points]
        frames += [(x + left, y + top, w, h) for x, y, w, h in layout.frames]
        left += layout.width + _GAP
    for number, arrow in enumerate(scene.arrows):
        if not arrows[number]:
            arrows[number] = _across(
                at[arrow.source], at[arrow.target], size_of(scene.boxes[arrow.source])[0], size_of(scene.boxes[arrow.target])[0]
            )
    return Layout(max(left - _GAP, 0.0), height, at, arrows, frames)


def _across(source: Point, target: Point, width: float, other: float) -> list[Point]:
    """A curve from the side of one box to the side of a box in another column."""
    way = 1 if target[0] >= source[0] else -1
    start, end = source[0] + way * width / 2, target[0] - way * other / 2
    bend = max(_APART, abs(end - start) / 3)
    return [(start, source[1]), (start + way * bend, source[1]), (end - way * bend, target[1]), (end, target[1])]
