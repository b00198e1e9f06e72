"""A scene as SVG text. Every text of the file is escaped here; colours are classes, which follow light and dark themes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from exporter.files.inspect import tensor_text
from exporter.pictures.layout import Layout
from exporter.pictures.scene import Box, Cluster, Scene
from symbolics.text import clean

__all__ = ["LEGEND", "STYLE", "size_of", "svg_of"]

_LETTER, _SMALL = 7.4, 6.2  # widths of letters of the two fonts, rounded up
_PAD = 12  # pixels around everything
_LONGEST = 30  # letters of a line

#: Colours, and how each kind of box has them.
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --page: #ffffff; --frame: #afb8c1; --line: #8c959f;
  --forward: #ddf4ff; --forward-edge: #54aeff; --gradient: #fff8c5; --gradient-edge: #bf8700; --tangent: #dafbe1; --tangent-edge: #2da44e;
  --update: #eaeef2; --update-edge: #818b98; --python: #d8b9ff; --python-edge: #8250df; --stops: #ffcecb; --stops-edge: #cf222e; --hit: #0969da; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --page: #0d1117; --frame: #545d68; --line: #7d8590;
    --forward: #0c2d6b; --forward-edge: #388bfd; --gradient: #4b2900; --gradient-edge: #d29922; --tangent: #033a16; --tangent-edge: #3fb950;
    --update: #262c34; --update-edge: #6e7681; --python: #512a97; --python-edge: #c297ff; --stops: #67060c; --stops-edge: #ff7b72; --hit: #4493f8; }
}
svg.graph { background: var(--page); }
.graph text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink); text-anchor: middle; }
.graph text.small { font-size: 11px; fill: var(--soft); }
.graph .python text.small, .graph .stops text.small { fill: var(--ink); }
.graph .frame rect { fill: none; stroke: var(--frame); stroke-dasharray: 4 3; }
.graph .frame text { text-anchor: start; font-size: 11px; fill: var(--soft); paint-order: stroke; stroke: var(--page); stroke-width: 4px; stroke-linejoin: round; }
.graph .arrow path { fill: none; stroke: var(--line); stroke-width: 1.3; } .graph .arrow path.head { fill: var(--line); stroke: none; }
.graph .arrow.gradient path, .graph .arrow.tangent path { stroke: var(--gradient-edge); } .graph .arrow.gradient path.head, .graph .arrow.tangent path.head { fill: var(--gradient-edge); stroke: none; }
.graph .arrow.beside path { stroke-dasharray: 2 3; stroke-width: 1; opacity: .55; }
.graph .box rect { stroke-width: 1.3; }
.graph .box .back { display: none; } .graph .box.module .back { display: inline; }
.graph .box.forward rect { fill: var(--forward); stroke: var(--forward-edge); } .graph .box.gradient rect { fill: var(--gradient); stroke: var(--gradient-edge); }
.graph .box.tangent rect { fill: var(--tangent); stroke: var(--tangent-edge); } .graph .box.update rect { fill: var(--update); stroke: var(--update-edge); }
.graph .box.python rect { fill: var(--python); stroke: var(--python-edge); } .graph .box.stops rect { fill: var(--stops); stroke: var(--stops-edge); }
.graph .box.input.stops rect { fill: var(--stops); }
.graph .box.outside rect { fill: var(--page); stroke-dasharray: 5 3; } .graph .box.input rect, .graph .box.output rect { fill: var(--page); }
.graph .box.hit rect { stroke: var(--hit); stroke-width: 3.5; }
"""

#: class -> what it means.
LEGEND = {
    "node forward": "forward",
    "node gradient": "gradient",
    "node tangent": "tangent",
    "node update": "optimizer",
    "node forward python": "PythonOp, PythonOpGrad",
    "node forward stops": "gradients stop",
    "module forward": "folded module",
}


def size_of(box: Box) -> tuple[float, float]:
    """Width and height of a box, in pixels."""
    width = max(len(_cut(box.title)) * _LETTER, len(_cut(box.subtitle)) * _SMALL) + 22
    return max(64.0, width), 42.0 if box.subtitle else 28.0


def _cut(text: str) -> str:
    """The end of a long line, which tells it from its neighbours."""
    text = clean(text)
    return text if len(text) <= _LONGEST else "…" + text[1 - _LONGEST :]


def svg_of(scene: Scene, layout: Layout, title: str, *, style: str = STYLE, names: Sequence[str] = ()) -> str:
    """The picture.

    Args:
        scene, layout: What there is, and where.
        title: What it is a picture of.
        style: Its CSS; "" where it stands in a page that has it.
        names: What a page calls each box: its attribute ``data-box``.
    """
    width, height = layout.width + 2 * _PAD, layout.height + 2 * _PAD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" viewBox="{-_PAD} {-_PAD} {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img">',
        f"<title>{escape(clean(title))}</title>",
    ]
    if style:
        parts.append(f"<style>{style}</style>")
        parts.append(f'<rect x="{-_PAD}" y="{-_PAD}" width="{width:.0f}" height="{height:.0f}" style="fill: var(--page)"/>')
    clusters, titles = list(_flat(scene.clusters)), []
    for cluster, (x, y, w, h) in zip(clusters, layout.frames, strict=False):
        parts.append(f'<g class="frame {cluster.part}"><rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="6"/></g>')
        titles.append(f'<text x="{x + 8:.1f}" y="{y + 13:.1f}">{escape(_cut_to(cluster.title, w))}</text>')
    for arrow, points in zip(scene.arrows, layout.arrows, strict=True):
        parts += _arrow(scene, arrow.source, arrow.target, points, [f"{v.name}  {tensor_text(v)}" for v in arrow.values])
    parts += ['<g class="frame">', *titles, "</g>"]  # above the arrows that cross them
    for number, (box, at) in enumerate(zip(scene.boxes, layout.boxes, strict=True)):
        parts += _box(box, at, names[number] if names else "")
    return "".join([*parts, "</svg>"])


def _flat(clusters: list[Cluster]) -> Iterator[Cluster]:
    for cluster in clusters:
        yield cluster
        yield from _flat(cluster.inside)


def _cut_to(text: str, width: float) -> str:
    text, room = clean(text), max(3, int((width - 12) / _SMALL))
    return text if len(text) <= room else "…" + text[1 - room :]


def _arrow(scene: Scene, source: int, target: int, points: Sequence[tuple[float, float]], values: list[str]) -> Iterator[str]:
    if len(points) < 2:
        return
    parts = scene.boxes[source].part, scene.boxes[target].part
    kind = f"{parts[1]}{' beside' if parts[0] != parts[1] else ''}"
    tip = ", ".join(clean(value) for value in values[:6]) + (f" and {len(values) - 6} more" if len(values) > 6 else "")
    start, rest = points[0], points[1:]
    path = f"M{start[0]:.1f},{start[1]:.1f}C" + " ".join(f"{x:.1f},{y:.1f}" for x, y in rest)
    yield f'<g class="arrow {kind}"><title>{escape(tip)}</title><path d="{path}"/>{_head(rest[-2] if len(rest) > 1 else start, rest[-1])}</g>'


def _head(before: tuple[float, float], end: tuple[float, float]) -> str:
    dx, dy = end[0] - before[0], end[1] - before[1]
    length = (dx * dx + dy * dy) ** 0.5 or 1.0
    dx, dy = dx / length, dy / length
    base = end[0] - 8 * dx, end[1] - 8 * dy
    corners = (end, (base[0] - 3.5 * dy, base[1] + 3.5 * dx), (base[0] + 3.5 * dy, base[1] - 3.5 * dx))
    return f'<path class="head" d="M{"L".join(f"{x:.1f},{y:.1f}" for x, y in corners)}Z"/>'


def _box(box: Box, at: tuple[float, float], name: str) -> Iterator[str]:
    width, height = size_of(box)
    x, y = at[0] - width / 2, at[1] - height / 2
    kind = f"box {box.kind} {box.part}{' python' if box.python else ''}{' stops' if box.stops else ''}"
    data = f' data-box="{escape(name)}" tabindex="0"' if name else ""
    radius = 14 if box.kind in ("input", "output") else 4
    yield f'<g class="{kind}"{data}><title>{escape(clean(f"{box.title} {box.subtitle}"))}</title>'
    yield f'<rect class="back" x="{x + 4:.1f}" y="{y - 4:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"/>'
    yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"/>'
    line = at[1] + (-3 if box.subtitle else 4.5)
    yield f'<text x="{at[0]:.1f}" y="{line:.1f}">{escape(_cut(box.title))}</text>'
    if box.subtitle:
        yield f'<text class="small" x="{at[0]:.1f}" y="{line + 16:.1f}">{escape(_cut(box.subtitle))}</text>'
    yield "</g>"
