"""Figures as horizontal bars, an SVG of text and rectangles: equal figures make equal bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

__all__ = ["Bar", "Group", "bars", "of_limits", "training_steps"]

#: Contenders of benchmarks.training_step, as they stand below one another, and their colours: light, dark.
CONTENDERS = {
    "ours": ("#0969da", "#4493f8"),
    "portable": ("#54aeff", "#1f6feb"),
    "loaded": ("#8250df", "#ab7df8"),
    "torch.compile": ("#9a6700", "#d29922"),
}
_COLOURS = {**CONTENDERS, "kept": ("#2da44e", "#3fb950"), "missed": ("#cf222e", "#f85149"), "none": ("#818b98", "#6e7681")}
#: Class -> its property, in light and in dark.
_INK = {
    "page": ("fill", "#ffffff", "#0d1117"), "ink": ("fill", "#1f2328", "#e6edf3"), "soft": ("fill", "#59636e", "#9198a1"),
    "grid": ("stroke", "#d1d9e0", "#30363d"), "one": ("stroke", "#1f2328", "#e6edf3"), "limit": ("stroke", "#cf222e", "#ff7b72"),
}  # fmt: skip
_LETTER, _BOLD = 6.3, 7.4  # widths of letters, rounded up
_LONGEST = 60  # letters of a reason
_ROW, _GAP, _PAD, _BARS = 16, 9, 12, 420  # pixels


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        name: What stands before it.
        value: Its length; None where there is none.
        text: What stands behind it, or in its place.
        colour: A key of the colours: a contender, "kept", "missed", "none".
        limit: Where a tick stands; None for none.
    """

    name: str
    value: float | None
    text: str
    colour: str
    limit: float | None = None


@dataclass(frozen=True)
class Group:
    """Bars that stand together, under one name."""

    name: str
    bars: Sequence[Bar]


def training_steps(told: Sequence[dict[str, Any]]) -> str:
    """The training steps of a run: ours, portable, loaded and torch.compile of each model, over eager PyTorch.

    Args:
        told: What `benchmarks._compare.read` gives. A contender that a model was not measured with has no bar; one that could not
            run has its reason instead.

    Raises:
        ValueError: There is no training step in it.
    """
    result = next((result for result in told if result["program"] == "training_step" and result["figures"]), None)
    if result is None:
        raise ValueError("the file has no training steps: measure them by python -m benchmarks training_step")
    models: dict[str, dict[str, Bar]] = {}
    for figure in result["figures"]:
        model, _, what = figure["what"].partition(": ")
        kind, _, over = what.partition(" / ")
        if kind not in CONTENDERS or over not in ("", "eager"):
            continue
        missed = f", above {figure['limit']:g}" if figure["missed"] else ""
        text = _cut(figure["note"]) if figure["value"] is None else f"{figure['value']:.2f}{missed}"
        models.setdefault(model, {})[kind] = Bar(kind, figure["value"], text, kind, figure["limit"])
    groups = [Group(model, [found[kind] for kind in CONTENDERS if kind in found]) for model, found in models.items()]
    machine = result["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "onnxruntime") if name in machine)
    where = f"{machine['cores']} cores of {machine['cpu']}" if "cpu" in machine else ""
    notes = ("shorter is faster; a red tick is a limit", ", ".join(filter(None, (where, versions))))
    return bars("Time of a training step, over eager PyTorch", groups, "eager", notes)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def of_limits(result: dict[str, Any]) -> str | None:
    """The figures of one program: those with a limit as shares of it, then ratios without one; None where there are none."""
    rows = [figure for figure in result["figures"] if figure["value"] is not None]
    limited = [
        Bar(
            figure["what"],
            figure["value"] / figure["limit"],
            f"{figure['value']:.3g} of {figure['limit']:g} {figure['unit']}".rstrip(),
            "missed" if figure["missed"] else "kept",
        )
        for figure in rows
        if figure["limit"] and math.isfinite(figure["limit"])
    ]
    ratios = [
        Bar(figure["what"], figure["value"], f"{figure['value']:.3g}", "none")
        for figure in rows
        if figure["limit"] is None and figure["unit"] == "ratio"
    ]
    found = [Group("", group) for group in (limited, ratios) if group]
    title = f"{result['program']}: share of the limit (green, red), ratios without one (gray)"
    return bars(title, found, "1") if found else None


def bars(title: str, groups: Sequence[Group], one: str, notes: Sequence[str] = ()) -> str:
    """The picture.

    Args:
        title: Above it.
        groups: From top to bottom.
        one: What the line at 1 is called.
        notes: Lines below it.
    """
    every = [bar for group in groups for bar in group.bars]
    end = 1.05 * max([1.0, *(number for bar in every for number in (bar.value, bar.limit) if number is not None)])
    first = max(len(group.name) for group in groups) * _BOLD
    left = _PAD + (first + 14 if first else 0) + max(len(bar.name) for bar in every) * _LETTER + 8
    # A short bar leaves room for its text inside the frame.
    behind = max([0.0, *(len(bar.text) * _LETTER + 8 - (_BARS - max(bar.value or 0, bar.limit or 0) / end * _BARS) for bar in every)])
    width = max(left + _BARS + behind, 2 * _PAD + len(title) * _BOLD * 1.1, *(2 * _PAD + len(note) * _LETTER for note in notes)) + _PAD
    top = 56
    bottom = top + len(every) * _ROW + len(groups) * _GAP
    height = bottom + 8 + 17 * len(notes) + _PAD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img">',
        f"<title>{escape(title)}</title><style>{_style()}</style>",
        '<rect class="page" width="100%" height="100%"/>',
        f'<text class="ink" x="{_PAD}" y="23" font-size="15" font-weight="600">{escape(title)}</text>',
        *_axis(left, end, top, bottom, one),
    ]
    y = top + _GAP / 2
    for group in groups:
        if group.name:
            parts.append(f'<text class="ink" x="{_PAD}" y="{y + 12:g}" font-weight="600">{escape(group.name)}</text>')
        for bar in group.bars:
            parts += _bar(bar, left, y, _BARS / end)
            y += _ROW
        y += _GAP
    parts += [f'<text class="soft" x="{_PAD}" y="{bottom + 20 + 17 * i}">{escape(note)}</text>' for i, note in enumerate(notes)]
    return "\n".join([*parts, "</svg>", ""])


def _style() -> str:
    inks = {name: (kind, light, dark) for name, (kind, light, dark) in _INK.items()}
    inks.update((name.replace(".", "-"), ("fill", *pair)) for name, pair in _COLOURS.items())
    light, dark = ("".join(f".{name}{{{ink[0]}:{ink[place]}}}" for name, ink in inks.items()) for place in (1, 2))
    font = "text{font-family:system-ui,'Segoe UI','DejaVu Sans',sans-serif}"
    return f"svg{{font-size:12px}}{font}{light}@media (prefers-color-scheme:dark){{{dark}}}"


def _axis(left: float, end: float, top: float, bottom: float, one: str) -> Iterator[str]:
    step = next(step for step in (0.25, 0.5, 1, 2, 5, 10 ** math.ceil(math.log10(max(end, 1)))) if end / step <= 8)
    ticks = [i * step for i in range(int(end / step) + 1)]
    for tick in ticks:
        x = left + tick / end * _BARS
        if tick != 1:
            yield f'<path class="grid" d="M{x:.1f},{top}V{bottom:g}"/>'
            yield f'<text class="soft" x="{x:.1f}" y="{top - 5}" text-anchor="middle" font-size="11">{tick:g}</text>'
    x = left + _BARS / end
    yield f'<path class="one" d="M{x:.1f},{top}V{bottom:g}"/>'
    yield f'<text class="ink" x="{x:.1f}" y="{top - 5}" text-anchor="middle" font-size="11">{escape(one)}</text>'


def _bar(bar: Bar, left: float, y: float, scale: float) -> Iterator[str]:
    yield f'<text class="ink" x="{left - 6:.1f}" y="{y + 12:g}" text-anchor="end">{escape(bar.name)}</text>'
    if bar.value is None:
        yield f'<text class="soft" x="{left + 4:.1f}" y="{y + 12:g}" font-style="italic">{escape(bar.text)}</text>'
        return
    kind = bar.colour.replace(".", "-")
    yield f'<rect class="{kind}" x="{left:.1f}" y="{y + 2:g}" width="{max(bar.value, 0) * scale:.1f}" height="{_ROW - 3}"/>'
    behind = left + max(bar.value, 0) * scale
    if bar.limit is not None:
        yield f'<path class="limit" stroke-width="2" d="M{left + bar.limit * scale:.1f},{y + 1:g}v{_ROW - 1}"/>'
    for x in sorted(left + at * scale for at in (1.0, bar.limit) if at is not None):
        if behind - 4 < x < behind + len(bar.text) * _LETTER + 8:  # the text stands on no line
            behind = x
    yield f'<text class="ink" x="{behind + 5:.1f}" y="{y + 12:g}">{escape(bar.text)}</text>'
