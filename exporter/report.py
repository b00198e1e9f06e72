"""What `verify` found: a table for a terminal, JSON for a program, one page of HTML for people."""

from __future__ import annotations

import io
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from exporter.inspect import clean

__all__ = ["Report", "Row"]


@dataclass(frozen=True)
class Row:
    """One tensor of the file against eager PyTorch.

    Attributes:
        name: The output's number, the parameter's or input's name.
        kind: "output", "parameter gradient" or "input gradient".
        shape, dtype: Eager's.
        error: The largest difference from the reference, in units of eager's largest value; of a gradient, at least a
            hundredth of the largest gradient of the model.
        eager_error: The same for eager itself, where the reference is of more precision; None otherwise.
        tolerance: What `error` may be.
        reference: "float64", or the type in which eager ran.
        ok: Whether the file says the same.
        problem: What is wrong where a number does not say it.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    error: float
    eager_error: float | None
    tolerance: float
    reference: str
    ok: bool
    problem: str = ""

    @property
    def badness(self) -> float:
        """How far beyond the tolerance: more than 1 is a difference."""
        return math.inf if self.problem or math.isnan(self.error) else self.error / self.tolerance


@dataclass
class Report:
    """The result of `exporter.verify`.

    Attributes:
        rows: One a tensor, outputs first.
        facts: Model, exporter, sizes, versions.
        functions: Each autograd Function of the file with its number of calls.
        seconds: Of export, loading, and a step (the median, forward and backward) in eager and from the file.
        first_departure: What `bisect` found.
    """

    rows: list[Row]
    facts: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    first_departure: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every tensor is within its tolerance; a report of nothing is not ok."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def max_error(self) -> float:
        """The largest error of all rows, NaN where one is not a number or missing."""
        errors = [math.nan if row.problem else row.error for row in self.rows]
        return math.nan if any(math.isnan(error) for error in errors) else max(errors, default=math.nan)

    def worst(self) -> list[Row]:
        """The rows, the worst first."""
        return sorted(self.rows, key=lambda row: -row.badness)

    def as_json(self) -> dict[str, Any]:
        """Plain data; what is not a number is null."""
        number = lambda x: None if x is None or not math.isfinite(x) else x  # noqa: E731
        rows = [{**asdict(row), **{key: number(getattr(row, key)) for key in ("error", "eager_error", "tolerance")}} for row in self.rows]
        return {
            "ok": self.ok, "max_error": number(self.max_error), "facts": self.facts, "functions": self.functions, "seconds": self.seconds,
            "first_departure": self.first_departure, "rows": rows,
        }  # fmt: skip

    def render(self, limit: int = 20) -> Any:
        """A table of rich: the worst rows first, at most ``limit`` of those that are fine."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=clean(str(self.facts.get("model", "model"))), title_justify="left")
        for heading in ("tensor", "what", "shape"):
            table.add_column(heading, overflow="fold")
        for heading in ("error", "eager's own", "allowed"):
            table.add_column(heading, justify="right")
        table.add_column("result", overflow="fold")
        worst = self.worst()
        bad = sum(not row.ok for row in worst)
        for row in worst[: max(limit, bad)]:
            own = "" if row.eager_error is None else f"{row.eager_error:.1e}"
            result = Text("equal", "green") if row.ok else Text(clean(row.problem) or "differs", "bold red")
            table.add_row(Text(clean(row.name)), row.kind, "x".join(map(str, row.shape)) or "scalar", f"{row.error:.1e}", own, f"{row.tolerance:.1e}", result)
        lines = [self.summary()]
        if len(worst) > max(limit, bad):
            lines.insert(0, f"and {len(worst) - max(limit, bad)} more that are equal")
        if self.first_departure:
            lines.append(f"first departure: {self.first_departure}")
        return Group(table, *(Text(clean(line, 2000), "" if self.ok else "red") for line in lines))

    def summary(self) -> str:
        """One line."""
        bad = sum(not row.ok for row in self.rows)
        times = ", ".join(f"{key} {value:.3g} s" for key, value in self.seconds.items())
        verdict = f"{len(self.rows)} tensors equal eager PyTorch's" if self.ok else f"{bad} of {len(self.rows)} tensors differ from eager PyTorch's"
        return f"{verdict}; largest error {self.max_error:.1e} ({times})"

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one page that needs nothing else: no network, no scripts, pictures inside.

        Raises:
            ImportError: jinja2 or matplotlib is not installed (the extra ``report``).
        """
        import jinja2

        environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
        page = environment.get_template("report.html").render(
            report=self, rows=self.worst(), clean=lambda text: clean(str(text)), errors=_picture(self._errors), times=_picture(self._times)
        )
        target = Path(path)
        target.write_text(page, encoding="utf-8")
        return target

    def _errors(self, figure: Any) -> None:
        """Error of each tensor beside what is allowed and eager's own, on a logarithmic axis."""
        rows = self.worst()[:40][::-1]
        figure.set_size_inches(9, 1.2 + 0.26 * len(rows))
        axes = figure.add_subplot()
        low = 1e-17
        for place, row in enumerate(rows):
            axes.plot([low, row.tolerance], [place, place], color="#e3e6ea", linewidth=7, solid_capstyle="butt", zorder=1)
            if row.eager_error is not None:
                axes.plot(max(row.eager_error, low), place, "|", color="#8a8f98", markersize=10, markeredgewidth=2, zorder=2)
            error = row.error if math.isfinite(row.error) else 1.0
            axes.plot(max(error, low), place, "o", color="#1a7f37" if row.ok else "#cf222e", markersize=5, zorder=3)
        axes.set_yticks(range(len(rows)), [_short(f"{row.name}  ({row.kind})") for row in rows], fontsize=8, parse_math=False)
        axes.set_xscale("log")
        axes.set_xlim(low, max([10 * row.error for row in rows if math.isfinite(row.error)] + [1e-3]))
        axes.set_xlabel("largest difference, relative   (grey: allowed; bar: eager's own error)", fontsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="both", length=0, labelsize=8)

    def _times(self, figure: Any) -> None:
        steps = {key: value * 1000 for key, value in self.seconds.items() if "step" in key}
        figure.set_size_inches(9, 0.8 + 0.4 * max(len(steps), 1))
        axes = figure.add_subplot()
        axes.barh(list(steps), list(steps.values()), color=["#8a8f98", "#0969da", "#54aeff"][: len(steps)], height=0.6)
        axes.invert_yaxis()
        for place, value in enumerate(steps.values()):
            axes.text(value, place, f" {value:.2f} ms", va="center", fontsize=8)
        axes.set_xlabel("milliseconds, forward and backward (median)", fontsize=8)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)


def _short(text: str, length: int = 60) -> str:
    text = clean(text)
    return text if len(text) <= length else "…" + text[1 - length :]


def _picture(draw: Any) -> str:
    """SVG text for the page, made without a display."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasSVG(figure)
    draw(figure)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
