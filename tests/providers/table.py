"""docs/providers.md, made of the record and of the rules: ``python -m tests.providers.table`` writes it.

An operator that has a gradient rule has a row, whether or not a provider was asked about it yet: a new rule is in the table on its own.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from symbolics.gradients import COMPOSITES, RULES
from tests.processes import ROOT
from tests.providers.sweep import read
from tests.symbolics.gradients.make_references import Reference, load

__all__ = ["DOCUMENT", "operators", "page"]

DOCUMENT = ROOT / "docs" / "providers.md"

#: Losses and weights of a step are equal below these, relative to the largest.
LOSSES, WEIGHTS = 1e-5, 1e-4

_SAID = {"opens": "does not open", "runs": "fails when run", "wrong": "wrong", "dies": "the process ends"}
_COUNTED = {"equal": "equal", **_SAID}

_HEAD = """\
# Execution providers

Here you find out whether an execution provider of onnxruntime runs your training step or your gradients, without leaving a node to the CPU.

An execution provider is the part of onnxruntime that runs a graph on one kind of hardware. [Other devices](devices.md) shows how to choose one. Files of
pythonop are made of standard operators; a provider may have all of them, or only some. Look for a model like yours under
[Training steps](#training-steps), or for a single operator under [Gradients by operator](#gradients-by-operator).

`make test-providers` runs the providers that need no GPU, and writes this page again. These were asked:

"""


def page(
    record: Mapping[str, Any], references: Mapping[str, Reference] | None = None, rules: Iterable[tuple[str, str]] | None = None
) -> str:
    """The text of the page."""
    references = load() if references is None else references
    lines = [_HEAD, *(f"- **{name}**: {found['said']}.\n" for name, found in _asked(record))]
    lines.append("- CUDA and other providers that need a GPU were not run.\n")
    lines += ["\n## Training steps\n\n", *_steps(record), "\n## Gradients in total\n\n", *_counts(record)]
    lines += ["\n## Gradients by operator\n\n", *_operators(record, references, operators(references, rules))]
    return "".join(lines)


def operators(references: Mapping[str, Reference], rules: Iterable[tuple[str, str]] | None = None) -> dict[str, int]:
    """The standard's operators that have a rule or a case -> how many cases."""
    rules = (*RULES, *COMPOSITES) if rules is None else rules
    counts = Counter(case.op for case in references.values() if case.op != "graph")
    names = {name for domain, name in rules if domain == ""} | set(counts)
    return {name: counts[name] for name in sorted(names, key=str.lower)}


def _asked(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    from tests.providers.sessions import PROVIDERS

    for name in PROVIDERS:
        if name in record:
            yield name, record[name]


def _steps(record: Mapping[str, Any]) -> Iterator[str]:
    asked = [(name, found["steps"]) for name, found in _asked(record)]
    yield (
        "Twenty training steps ran on the provider and in eager PyTorch, with the same dropout masks. A cell has two numbers: the largest\n"
        "difference of a loss, relative to the largest loss, and the largest difference of a weight after all steps, relative to the largest\n"
        f"weight of its parameter. **equal** means that they are below {LOSSES:.0e} and {WEIGHTS:.0e}.\n\n"
    )
    yield _row("step", *(name for name, _ in asked))
    yield "|---|" + "---|" * len(asked) + "\n"
    for step in dict.fromkeys(step for _, found in asked for step in found):
        yield _row(step, *(_step(found.get(step)) for _, found in asked))


def _step(cell: Any) -> str:
    if cell is None:
        return "not asked"
    if isinstance(cell, list):
        return f"**{_SAID[cell[0]]}**: {_shown(cell[1])}"
    word = "equal" if cell["losses"] < LOSSES and cell["weights"] < WEIGHTS else "**wrong**"
    return f"{word}: {cell['losses']:.0e}, {cell['weights']:.0e}"


def _counts(record: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Each node test of the ONNX standard that has a gradient ran with its gradient graph, which computes the gradients beside the outputs.\n"
        'The gradients were compared with finite differences in float64. "does not open" means that the provider lacks an operator of the graph, and\n'
        "nothing may run on the CPU in its place.\n\n"
    )
    yield _row("provider", *_COUNTED.values(), "cases")
    yield "|---|" + "--:|" * (len(_COUNTED) + 1) + "\n"
    for name, found in _asked(record):
        words, tried = Counter(word for word, _ in found["cases"].values()), sum(found["tried"].values())
        yield _row(name, *(str(words[word] if word != "equal" else tried - words.total()) for word in _COUNTED), str(tried))


def _operators(record: Mapping[str, Any], references: Mapping[str, Reference], counts: Mapping[str, int]) -> Iterator[str]:
    asked = list(_asked(record))
    yield (
        'The number is how many cases of the operator are equal; behind it stands why the others are not. A cell that only says "equal" means all cases.\n'
        '"on the CPU: Cast" names operators that the provider leaves to the CPU, which nothing may run on here. In ordinary use the CPU runs them.\n\n'
    )
    yield _row("operator", "cases", *(name for name, _ in asked))
    yield "|---|--:|" + "---|" * len(asked) + "\n"
    failed = {name: _by_operator(found["cases"], references) for name, found in asked}
    for operator, count in counts.items():
        yield _row(operator, str(count or ""), *(_operator(operator, count, found, failed[name][operator]) for name, found in asked))


def _by_operator(cells: Mapping[str, Any], references: Mapping[str, Reference]) -> defaultdict[str, list[tuple[str, str]]]:
    found = defaultdict(list)
    for case, (word, reason) in cells.items():
        if case in references:
            found[references[case].op].append((word, reason))
    return found


def _operator(operator: str, count: int, found: Mapping[str, Any], failed: list[tuple[str, str]]) -> str:
    if not count:
        return "no case"
    if found["tried"].get(operator, 0) != count:
        return "not asked"
    if not failed:
        return "equal"
    reasons = Counter(failed).most_common()
    said = "; ".join(f"{_SAID[word]}: {_shown(reason)}" + (f" ({times})" if times > 1 else "") for (word, reason), times in reasons[:3])
    return f"**{count - len(failed)}**: {said}" + ("; and others" if len(reasons) > 3 else "")


def _shown(reason: str) -> str:
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", reason)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    DOCUMENT.write_text(page(read()))
