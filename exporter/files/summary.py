"""What is shown of a model, a report or a step, as plain texts: `pythonop inspect` draws it in a terminal, notebooks get it as HTML."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from exporter.files.data_facts import DataFacts
from exporter.files.inspect import CallFacts, FileFacts, tensor_text
from symbolics.text import clean, escaped, lookalike, marked

__all__ = ["Summary", "Table", "as_html", "kind_of", "signature", "summary_of"]

# Enough for every name that a file may have: what somebody is asked to allow is never cut.
_WHOLE = 1000

# Rows of a table of operators, and inputs or outputs in a line: a summary fits on a screen.
_OPERATORS, _VALUES = 15, 12


@dataclass(frozen=True)
class Table:
    """Headings, and rows of as many texts; texts of a file are still as the file has them."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Summary:
    """A title, lines of a name and a text, tables."""

    title: str
    lines: Sequence[tuple[str, str]]
    tables: list[Table] = field(default_factory=list)


def summary_of(facts: FileFacts, title: str = "") -> Summary:
    """A file on one screen: what it is, its inputs and outputs, its operators by number, a line per Function."""
    tables = [_operators(facts)] if facts.operators else []
    if facts.links:
        tables.append(_links(facts))
    if facts.rows or facts.portable:
        tables.append(_functions(facts))
    return Summary(title, list(_lines_of(facts)), tables)


def as_html(summary: Summary) -> str:
    """A summary for a notebook. Every text is escaped, and there is no style sheet that the page around it could miss."""
    parts = [f"<strong>{_escaped(summary.title)}</strong>"] if summary.title else []
    parts.append(_html_table((), summary.lines))
    parts += [_html_table(table.columns, table.rows) for table in summary.tables]
    return f"<div>{''.join(parts)}</div>"


def signature(graph: ir.Graph) -> str:
    """``x: float[batch, 3] -> y: float[batch, 2]``, cut where it gets long."""
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    return " -> ".join(
        ", ".join(_cut([f"{clean(v.name or '', 40)}: {clean(tensor_text(v), 60)}" for v in ends])) for ends in (inputs, graph.outputs)
    )


def _cut(texts: list[str]) -> list[str]:
    return texts if len(texts) <= 4 else [*texts[:3], f"{len(texts) - 3} more"]


# ------------------------------------------------------------------------------------------------------- of a file


def _lines_of(facts: FileFacts) -> Iterator[tuple[str, str]]:
    version = facts.format_version
    yield "format", f"pythonop {version}" if version is not None else _of_another(facts)
    yield "ONNX", f"IR {facts.ir_version}, " + ", ".join(f"{domain or 'ai.onnx'} {number}" for domain, number in facts.opsets.items())
    for what, values in (("inputs", facts.inputs), ("outputs", facts.outputs)):
        named = [f"{clean(name)}: {clean(kind)}" for name, kind in values[:_VALUES]]
        yield what, "\n".join([*named, *([f"and {len(values) - _VALUES} more"] if len(values) > _VALUES else [])]) or "none"
    count = len(facts.portable)
    portable = f"{count} ONNX function{'s with a backward of their own' if count > 1 else ' with a backward of its own'}, " if count else ""
    tangents = sum(row.kind == "PythonOpTangent" for row in facts.rows)
    counts = [
        f"{len(facts.rows) - tangents} PythonOp",
        f"{facts.gradients} PythonOpGrad",
        *([f"{tangents} PythonOpTangent"] if tangents else []),
    ]
    pairs = [f"{what} paired" for what, there in (("gradients", facts.training), ("tangents", facts.tangents)) if there]
    yield "calls", portable + ", ".join((*counts, *pairs))
    if facts.allow:
        yield "has to be allowed", "\n".join(f"{marked(name, _WHOLE)}{lookalike(name)}" for name in facts.allow)
    if facts.data:
        yield "data files", "\n".join(_of_data(facts.data))
    if facts.unchecked:
        yield "not checked", f"against the Functions of an eager run: {facts.unchecked}"
    recorded = facts.stop_gradients_recorded
    lost = (
        ""
        if recorded in (None, facts.stop_gradients)
        else f" (the metadata says {recorded}: an optimizer removed some, gradients of this file would be wrong)"
    )
    yield "stop-gradient marks", f"{facts.stop_gradients}{lost}"
    if (step := facts.step) is not None:
        yield (
            "training step",
            f"{step.optimizer}: takes {', '.join((*step.inputs, *step.targets))}; trains {len(step.parameters)} parameters, updates {len(step.buffers)} buffers",
        )
        if step.untrained:
            yield "untrained", ", ".join(step.untrained)
    if version is not None:
        yield "parameters", f"{facts.parameters}, {facts.trainable} trainable, {facts.frozen} frozen"
        yield "buffers", f"{facts.buffers}, {facts.not_persistent} not in state_dict()"
    for group in facts.tied:
        yield "tied", " = ".join(group)


def _of_another(facts: FileFacts) -> str:
    """Of a model that another exporter wrote: what pythonop has added to it."""
    added = [what for what, there in (("gradients", facts.training), ("tangents", facts.tangents)) if there]
    return "another exporter's model" + (f", with {' and '.join(added)} of pythonop" if added else "")


def _of_data(files: Sequence[DataFacts]) -> list[str]:
    """A line per data file, first those that something is wrong with."""
    said = [clean(each.error, 500) for each in files if each.error is not None]
    said += [
        f"{clean(each.location)}: {each.bytes} bytes of {each.tensors} tensor{'s' if each.tensors > 1 else ''}"
        for each in files
        if each.error is None
    ]
    return said if len(said) <= _VALUES else [*said[:_VALUES], f"and {len(said) - _VALUES} more"]


def _operators(facts: FileFacts) -> Table:
    counts = list(facts.operators.items())
    rest = counts[_OPERATORS:]
    rows = [(name, str(count)) for name, count in counts[:_OPERATORS]]
    if rest:
        rows.append((f"{len(rest)} other operators", str(sum(count for _, count in rest))))
    return Table(("Operator", "Nodes"), rows)


def _links(facts: FileFacts) -> Table:
    """The ONNX functions that have a backward of their own."""
    rows = []
    for link in facts.links:
        if link.error is not None:
            rows.append((link.name, f"damaged: {link.error}", ""))
        else:
            rows.append((link.name, link.backward, "no" if not link.backward else "once" if link.once else "again and again"))
    return Table(("ONNX function", "Backward", "Differentiable"), rows)


def _functions(facts: FileFacts) -> Table:
    """A line per Function, the most frequent first."""
    groups: dict[tuple[str, str], list[CallFacts]] = {}
    for row in (*facts.portable, *facts.rows):
        groups.setdefault((row.function, kind_of(row)), []).append(row)
    rows = []
    for (function, kind), calls in sorted(groups.items(), key=lambda item: -len(item[1])):
        damaged = [row.error for row in calls if row.error is not None]
        places = Counter(row.source or row.module or row.graph for row in calls)
        where = [place for place, _ in places.most_common(1) if place]
        more = f", and {len(places) - 1} more places" if len(places) > 1 else ""
        said = f"damaged: {damaged[0]}" if damaged else f"{', '.join(where)}{more}"
        backward = [str(sum(len(row.backward) for row in calls))] if facts.gradients else []
        rows.append((escaped(function), str(len(calls)), kind, *backward, said))
    return Table(("Function", "Calls", "Is", *(["Backward nodes"] if facts.gradients else []), "Where"), rows)


def kind_of(row: CallFacts) -> str:
    """What a call is in the file, and why, in words."""
    kind = "an ONNX function" if row.kind == "function" else f"a {row.kind}"
    return kind + (f": {row.opaque}" if row.opaque else "")


# ------------------------------------------------------------------------------------------------------------ HTML


def _html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_escaped(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def _escaped(text: str) -> str:
    """A text of a file in a page: no markup, no control characters, not endless; its lines stay lines."""
    return "<br>".join(html.escape(clean(line, 500)) for line in str(text)[:10_000].split("\n"))
