"""What `verify` found: a table for a terminal, JSON for a program, one page of HTML for people."""

from __future__ import annotations

import math
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from exporter.files.program import Program
from exporter.files.save import saving
from exporter.files.summary import Summary, Table, as_html
from exporter.gradient_graph.build import built
from exporter.pictures.draw import draw_inside_a_page
from exporter.pictures.layout import missing
from exporter.pictures.svg import LEGEND, STYLE
from exporter.verification import charts
from exporter.verification.notes import ALWAYS, Note
from exporter.verification.rows import ELSEWHERE, GRADIENTS, NOT_COMPARED, ZEROS, Row
from symbolics.errors import PythonopError
from symbolics.text import clean, extra

__all__ = ["STEPS", "Note", "Report", "Row"]

#: Those of `Report.seconds` that are the median of several steps, and the keys of `Report.memory`; the other seconds happened once.
STEPS = ("eager step", "onnxruntime step")
#: Boxes of the picture beyond which modules are folded: it is to be taken in beside a table.
_BOXES = 40


@dataclass(repr=False)
class Report:
    """The result of `exporter.verify`.

    Attributes:
        rows: One a tensor, outputs first; then one for a second input, and one for a second size where axes are open.
        facts: Model, exporter, sizes, versions.
        functions: Each autograd Function of the file with its number of calls.
        seconds: Of export, loading, and a step (the median, forward and backward) in eager and from the file.
        first_departure: What `bisect` found.
        memory: Bytes that a step takes in eager and from the file, at most, beyond what was resident before the first one; of the file with its
            sessions. Linux with glibc alone counts them.
        notes: Why numbers may differ though the file is right: errors that grow, ties. Empty where there is nothing to know.
        program: The export that was compared; its graph is drawn in the page.
    """

    rows: list[Row]
    facts: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    first_departure: str | None = None
    memory: dict[str, int] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    program: Program | None = field(default=None, compare=False)

    @property
    def ok(self) -> bool:
        """Whether every tensor is within its tolerance, at every input that was tried; a report of nothing is not ok."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def max_error(self) -> float:
        """The largest error of all rows, NaN where one is not a number or missing."""
        errors = [math.nan if row.problem else row.error for row in self.rows if not row.note]
        return math.nan if any(math.isnan(error) for error in errors) else max(errors, default=math.nan)

    def worst(self) -> list[Row]:
        """The rows, the worst first."""
        return sorted(self.rows, key=lambda row: -row.badness)

    def as_json(self) -> dict[str, Any]:
        """Plain data; what is not a number is null."""
        number = lambda x: None if x is None or not math.isfinite(x) else x  # noqa: E731
        rows = [{**asdict(row), **{key: number(getattr(row, key)) for key in ("error", "eager_error", "tolerance")}} for row in self.rows]  # type: ignore[no-untyped-call]
        return {
            "ok": self.ok, "max_error": number(self.max_error), "facts": self.facts, "functions": self.functions, "seconds": self.seconds,  # type: ignore[no-untyped-call]
            "memory": self.memory, "first_departure": self.first_departure, "notes": [asdict(note) for note in self.notes], "rows": rows,
        }  # fmt: skip

    def __repr__(self) -> str:
        """One line."""
        return f"Report({clean(str(self.facts.get('model', 'model')))}: {self.summary()})"

    def _repr_html_(self) -> str:
        """The table and what stands below it, for a notebook."""
        table, lines = self._shown(20)
        title = f"{self.facts.get('model', 'model')}: {'equal' if self.ok else 'differs'}"
        return as_html(Summary(title, [("", line) for line in lines], [table]))

    def render(self, limit: int = 20) -> Any:
        """A table of rich: the worst rows first, at most ``limit`` of those that are fine."""
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        said, lines = self._shown(limit)
        table = RichTable(title=clean(str(self.facts.get("model", "model"))), title_justify="left", padding=(0, 1, 0, 0))
        for heading in said.columns:
            # A number without its exponent is another number: where there is no room, names go on in the next line.
            number = heading in ("error", "eager's own", "allowed")
            table.add_column(heading.replace(" ", "\n"), justify="right" if number else "left", overflow="fold", no_wrap=number)
        for row in said.rows:
            *cells, result = (Text(clean(cell)) for cell in row)
            result.stylize(
                "green" if result.plain in ("equal", ZEROS) else "yellow" if result.plain.startswith(NOT_COMPARED) else "bold red"
            )
            table.add_row(*cells, result)
        return Group(table, *(Text(clean(line, 2000), "" if self.ok else "red") for line in lines))

    def _shown(self, limit: int) -> tuple[Table, list[str]]:
        """The worst rows, all that differ and at most ``limit`` of the others, and the lines below them."""
        worst = self.worst()
        count = max(limit, sum(not row.ok for row in worst))
        rows = [
            (
                row.name,
                row.kind,
                "" if row.kind == GRADIENTS else "x".join(map(str, row.shape)) or "scalar",
                "" if row.note or row.kind == GRADIENTS else f"{row.error:.1e}",
                "" if row.eager_error is None else f"{row.eager_error:.1e}",
                "" if row.note or row.kind == GRADIENTS else f"{row.tolerance:.1e}",
                row.note or row.problem or ("equal" if row.ok else "differs"),
            )
            for row in worst[:count]
        ]
        lines = [f"and {len(worst) - count} more that are equal"] if len(worst) > count else []
        lines.append(self.summary())
        if self.memory:
            lines.append("memory: " + ", ".join(f"{name} {charts.size(used)}" for name, used in self.memory.items()))
        if self.first_departure:
            lines.append(f"first departure: {self.first_departure}")
        lines += [f"{note.title}: {note.text}" for note in self.notes if not self.ok or note.title in ALWAYS]
        return Table(("tensor", "what", "shape", "error", "eager's own", "allowed", "result"), rows), lines

    def summary(self) -> str:
        """One line."""
        tensors = [row for row in self.rows if row.kind not in (*ELSEWHERE, GRADIENTS)]
        bad, tried = sum(not row.ok for row in tensors), [row for row in self.rows if row.kind in ELSEWHERE and not row.note]
        times = ", ".join(f"{key} {charts.duration(value)}" for key, value in self.seconds.items())
        verdict = f"{bad} of {len(tensors)} tensors differ from eager PyTorch's" if bad else f"{len(tensors)} tensors equal eager PyTorch's"
        if wrong := [row.kind for row in tried if not row.ok]:
            verdict += f"{', and others differ' if bad else ', but not all'} at a {' and a '.join(wrong)}"
        elif tried and not bad:
            verdict += f", also at a {' and a '.join(row.kind for row in tried)}"
        if left := [row.kind for row in self.rows if row.kind in ELSEWHERE and row.note]:
            verdict += f", not compared at a {' and a '.join(dict.fromkeys(left))}"
        if any(row.kind == GRADIENTS for row in self.rows):
            verdict += "; gradients were not compared"
        errors = [row.error for row in self.rows if not row.note and math.isfinite(row.error)]
        return f"{verdict}; {f'largest error {max(errors):.1e} ' if errors else ''}({times})"

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one page that needs nothing else: no network, no scripts, pictures inside; the graph where pygraphviz is installed.

        Raises:
            ImportError: jinja2 is not installed (the extra ``report``).
            PythonopError: The path cannot be written; what was there stays.
        """
        import jinja2

        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters.update(clean=lambda text, limit=200: clean(str(text), limit), duration=charts.duration, breakable=_breakable)
        worst = self.worst()
        steps = {key: self.seconds[key] for key in STEPS if key in self.seconds}
        picture, no_picture = self._picture()
        page = environment.get_template("report.html").render(
            report=self,
            rows=worst,
            tensors=[row for row in worst if row.kind not in ELSEWHERE],
            charted=min(len(worst), charts.ROWS),
            errors=charts.errors([row for row in worst if not row.note]),
            steps=charts.bars(steps, charts.duration, "time of a step"),
            memory=charts.bars(self.memory, charts.size, "memory of a step") if len(self.memory) == len(STEPS) else "",
            ratio=_ratio(steps),
            picture=picture,
            no_picture=no_picture,
            picture_style=STYLE,
            legend={kind: text for kind, text in LEGEND.items() if _drawn(kind, picture)},
            once={key: value for key, value in self.seconds.items() if key not in STEPS},
        )
        target = Path(path)
        with saving(PythonopError) as files:
            files.open(target).write(page.encode())
        return target

    def _picture(self) -> tuple[str, str]:
        """The graph and its gradient as SVG, or why there is no picture; both empty where nothing says what was compared."""
        if self.program is None:
            return "", ""
        if missing() is not None:
            return "", f"{extra('draw')} puts a picture of the graph and its gradient here."
        try:
            return draw_inside_a_page(built(self.program), "the graph and its gradient", _BOXES), ""
        except PythonopError as error:
            return "", f"No picture of the graph: {error}"


def _drawn(kind: str, picture: str) -> bool:
    """Whether a picture has a box of that kind of its legend."""
    first, *_, last = kind.split()
    return re.search(rf'class="box [^"]*\b{first if first == "module" else last}\b', picture) is not None


def _breakable(text: str) -> Any:
    """A path of modules, escaped, which a narrow column may break at its dots and colons."""
    from markupsafe import escape

    return escape(re.sub(r"([.:])(?=\w)", "\\1\u200b", clean(text)))


def _ratio(steps: dict[str, float]) -> float | None:
    """A step from the file in units of eager's."""
    eager, file = (steps.get(name, 0.0) for name in STEPS)
    return file / eager if eager and file else None
