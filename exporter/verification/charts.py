"""The pictures of a report: SVG text, drawn without a library, with letters that a reader can search and copy.

Colours are classes of the page's style, so that they follow its light and dark themes. Every text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from exporter.verification.rows import Row
from symbolics.text import clean

__all__ = ["ROWS", "bars", "duration", "errors", "size"]

#: How many tensors the chart of errors shows at most: the worst.
ROWS = 40

_WIDTH = 960
_NARROW = 470  # of the bars, two of which stand side by side
_NUMBER = 84  # the room for a number behind them
_LINE = 24  # the height of a row
_LETTER = 7.3  # the width of a letter of the 12 px monospace font of the labels, rounded up
_RIGHT = 150  # the room for numbers behind the bars


def duration(seconds: float) -> str:
    """A time in the unit that people would use."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def size(number: float) -> str:
    """Memory in the unit that people would use; it comes in pages, and the C library keeps some of them: less than one MiB is no news."""
    if number >= 2**30:
        return f"{number / 2**30:.3g} GiB"
    return f"{number / 2**20:.3g} MiB" if number >= 2**20 else "< 1 MiB"


def errors(rows: Sequence[Row]) -> str:
    """Error of each tensor beside what is allowed and eager's own, on a logarithmic axis; the rows in their order."""
    rows = rows[:ROWS]
    if not rows:
        return ""
    shown = [_cut(row.name, 44) for row in rows]
    left = 16 + _LETTER * max(map(len, shown))
    values = [x for row in rows for x in (row.error, row.eager_error, row.tolerance) if x is not None and math.isfinite(x) and x > 0]
    low = max(-18, math.floor(math.log10(min(values, default=1e-8))) - 1)
    high = max(low + 3, min(18, math.ceil(math.log10(max(values, default=1.0)) + 0.1)))

    def x(value: float) -> float:
        exponent = high if not math.isfinite(value) else math.log10(max(value, 10.0**low))
        return left + (min(exponent, high) - low) / (high - low) * (_WIDTH - _RIGHT - left)

    bottom = _LINE * len(rows) + 6
    parts = [f'<line class="grid" x1="{x(10.0**e):.1f}" x2="{x(10.0**e):.1f}" y1="0" y2="{bottom}"/>' for e in range(low, high + 1)]
    every = max(1, math.ceil((high - low) * 46 / (_WIDTH - _RIGHT - left)))
    parts += [
        f'<text class="axis" text-anchor="middle" x="{x(10.0**e):.1f}" y="{bottom + 18}">10<tspan class="power" dy="-5">{e}</tspan></text>'
        for e in range(low, high + 1, every)
    ]
    for place, (row, label) in enumerate(zip(rows, shown, strict=True)):
        middle = _LINE * place + _LINE / 2 + 3
        kind = "good" if row.ok else "bad"
        number = f"{row.error:.1e}" if math.isfinite(row.error) else "no number"
        parts.append(f"<g><title>{escape(_tip(row))}</title>")
        parts.append(f'<text class="label" text-anchor="end" x="{left - 10:.1f}" y="{middle + 4}">{escape(label)}</text>')
        parts.append(
            f'<rect class="allowed" x="{left:.1f}" y="{middle - 7}" width="{max(0.0, x(row.tolerance or 10.0**low) - left):.1f}" height="14" rx="2"/>'
        )
        parts.append(f'<line class="stem {kind}" x1="{left:.1f}" x2="{x(row.error):.1f}" y1="{middle}" y2="{middle}"/>')
        if row.eager_error is not None:
            at = x(row.eager_error)
            parts.append(f'<line class="own" x1="{at:.1f}" x2="{at:.1f}" y1="{middle - 8}" y2="{middle + 8}"/>')
        parts.append(f'<circle class="{kind}" cx="{x(row.error):.1f}" cy="{middle}" r="4.5"/>')
        parts.append(f'<text class="value {kind}" x="{_WIDTH - _RIGHT + 14}" y="{middle + 4}">{number}</text>')
        parts.append(f'<text class="axis" text-anchor="end" x="{_WIDTH}" y="{middle + 4}">{escape(row.kind.split()[0])}</text></g>')
    return _svg(_WIDTH, bottom + 26, "largest difference of each tensor, on a logarithmic axis", parts)


def bars(values: Mapping[str, float], text: Callable[[float], str], title: str) -> str:
    """A bar for each entry, as long as its value.

    Args:
        values: The entries.
        text: How a value is written.
        title: What is shown, for who does not see it.
    """
    if not values:
        return ""
    left = 16 + _LETTER * max(len(_cut(name, 44)) for name in values)
    longest = max(*values.values(), 1e-12)
    parts = []
    for place, (name, value) in enumerate(values.items()):
        middle = 34 * place + 17
        width = max(1.0, value / longest * (_NARROW - _NUMBER - left))
        parts.append(f'<text class="label" text-anchor="end" x="{left - 10:.1f}" y="{middle + 4}">{escape(_cut(name, 44))}</text>')
        parts.append(f'<rect class="bar bar{place}" x="{left:.1f}" y="{middle - 11}" width="{width:.1f}" height="22" rx="3"/>')
        parts.append(f'<text class="value" x="{left + width + 8:.1f}" y="{middle + 4}">{escape(text(value))}</text>')
    return _svg(_NARROW, 34 * len(values), title, parts)


def _tip(row: Row) -> str:
    own = "" if row.eager_error is None else f", eager's own {row.eager_error:.1e}"
    return f"{_cut(row.name, 200)}: error {row.error:.1e}, allowed {row.tolerance:.1e}{own}"


def _cut(text: str, length: int) -> str:
    """The end of a long name, which tells it from its neighbours."""
    text = clean(text)
    return text if len(text) <= length else "…" + text[1 - length :]


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
