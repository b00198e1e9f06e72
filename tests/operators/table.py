"""``python -m tests.operators.table``: write docs/operators.md from the record, and fail where a row is wrong that is not known."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping

from tests.operators.known import WRONG, known, unexpected
from tests.operators.sweep import EXPORTERS, OPAQUE, RECORD, Line, lines, untranslated
from tests.processes import ROOT

__all__ = ["DOCUMENT", "opaque_words", "page", "unreasoned"]

DOCUMENT = ROOT / "docs" / "operators.md"
_ORDER = ["works", "kink", "inexact", "random", "refused", "torch.onnx fails", "wrong", "crash"]
_RIGHT = ("works", "kink", "inexact")
_STAGES = ["export", "load", "forward", "backward"]
_NAMES = {"dynamo": "dynamo", "torchscript": "TorchScript"}

#: What an error says that opaque="missing" ends in -> the column's words. None but these may end so.
_REASONS = {
    "complex": "complex tensors",
    "aten::_(batch_norm_with_update|native_batch_norm_legit)'": "it changes its arguments",
    "ScalarType UInt64": "uint64, which TorchScript's trace has not",
    "not differentiable with respect to": "an argument that has no derivative",
    "^ExportError: torch_nn::": "an operator of torch.nn's own, past which a trace goes",
    "has inconsistent type|Invalid position of 0": "torch.onnx translates all of it, to what does not run",
    "without elements is reshaped to a computed shape": "an empty tensor, of a shape that is computed",
    "aten::uniform|'from' is not a valid": "it draws random numbers",
}
_OPAQUE_ORDER = ["yes", "standard operators", "named", "no"]

_HEAD = """\
# Operators

What exports, runs and trains of torch's own operators: each entry of torch's operator database, called as a model of its own on both
exporters, saved, loaded, run forward and backward, and compared with eager: outputs and every gradient, at samples of the database
and at extremes (zeros, ties, bounds, saturations, large and tiny values, duplicate indices, empty and 0-d tensors). How far two numbers may differ is
derived for each element from eager in float64 (`tests/operators/numbers.py`). `make test-operators` runs all of it and writes this page anew.

One word for each kind of inputs:

- **works**: outputs and gradients are eager's.
- **kink**: the function has no derivative there, and eager and the file take different ones of its slopes; an index among equal elements;
  a function that is infinite there and has no slope (logdet of a singular matrix), where one nan or infinity says as much as another.
- **inexact**: the operator is one kernel of onnxruntime (Sigmoid, Softplus, Elu, Celu, Selu; silu and mish are x times one) that is exact to 2.4e-7
  absolute, two units in the last place of 1, and so not to the last digits of a small result; the difference is no larger than that.
- **refused**: an error of ours that names the operator and the way out.
- **torch.onnx fails**: torch.onnx.export alone fails on the same model.
- **random**: not the same twice in eager, or not initialized.
- **wrong**, **crash**: to be mended; each is in `tests/operators/known.py` with its reason.

`opaque="missing"` says what becomes of the calls that torch.onnx fails at, two for each operator, with `exporter.export(..., opaque="missing")`
([opaque nodes](opaque.md)): exported and saved in one process, loaded in another with the names of the nodes allowed, compared with eager in the same way.

- **yes**: it works; the operator runs PyTorch.
- **standard operators**: it works, and no node needs PyTorch: the exporter has learnt it since the rest of the row was written.
- **named**: nothing is missing, for torch.onnx has a translation; that fails. `opaque=["aten::name"]`, with the name that the column has, works.
- else the reason why there is no such node.
"""


def page(found: Mapping[tuple[str, str], Line], opaque: Mapping[tuple[str, str], Line]) -> str:
    """The document, of the record and of that of opaque nodes."""
    releases = "; ".join(sorted({f"torch {line.torch}, onnxruntime {line.onnxruntime}" for line in found.values()}))
    operators = sorted({name for name, _ in found}, key=lambda name: (name.lower(), name))
    with_rows = [name for name in operators if any(found[name, which].kinds for which in EXPORTERS if (name, which) in found)]
    text = [
        _HEAD,
        f"{releases}. {len(with_rows)} operators.\n",
        "## Sums\n",
        *_sums(found, with_rows),
        *_opaque_sums(opaque),
        "\n## Operators\n",
    ]
    text.append("What is not said works; `trains`: the gradients too (`-`: there is none).\n")
    text.append(
        '| operator | exporter | exports | runs | trains | works at | elsewhere | opaque="missing" |\n|---|---|---|---|---|---|---|---|'
    )
    for name in with_rows:
        for which in EXPORTERS:
            line = found.get((name, which))
            if line is not None and line.kinds:
                text.append(_row(line, opaque.get((name, which))))
    text.append("\n## Why\n")
    text += _reasons(found.values())
    return "\n".join(text) + "\n"


def _sums(found: Mapping[tuple[str, str], Line], operators: list[str]) -> list[str]:
    """Per exporter: operators by their worst word, and calls by theirs."""
    made = [f"| | {' | '.join(_ORDER)} |", f"|---|{'---|' * len(_ORDER)}"]
    for which in EXPORTERS:
        here = [found[name, which] for name in operators if (name, which) in found]
        calls = Counter(word for line in here for word, *_ in line.kinds.values())
        worst = Counter(max((word for word, *_ in line.kinds.values()), key=_ORDER.index) for line in here if line.kinds)
        sample = Counter(line.kinds["sample"][0] for line in here if "sample" in line.kinds)
        for what, counts in (("operators, at an ordinary sample", sample), ("operators, by their worst word", worst), ("calls", calls)):
            made.append(f"| {_NAMES[which]}: {what} | {' | '.join(str(counts[word]) for word in _ORDER)} |")
    return made


def _opaque_sums(opaque: Mapping[tuple[str, str], Line]) -> list[str]:
    """Per exporter: what becomes of operators at their worst with opaque="missing"."""
    releases = "; ".join(sorted({f"torch {line.torch}, onnxruntime {line.onnxruntime}" for line in opaque.values()}))
    made = [f'\nWith opaque="missing" ({releases}), operators that torch.onnx fails at:\n']
    made += [f"| | {' | '.join(_OPAQUE_ORDER)} |", f"|---|{'---|' * len(_OPAQUE_ORDER)}"]
    for which in EXPORTERS:
        worst = Counter(_worst(line) for (_, exporter), line in opaque.items() if exporter == which and line.kinds)
        made.append(f"| {_NAMES[which]} | {' | '.join(str(worst[word]) for word in _OPAQUE_ORDER)} |")
    return made


def _worst(line: Line) -> str:
    words = [word.partition(":")[0] for word in opaque_words(line).values()]
    return max((word if word in _OPAQUE_ORDER else "no" for word in words), key=_OPAQUE_ORDER.index)


def opaque_words(line: Line) -> dict[str, str]:
    """Kind of inputs -> what the column says of it; "" where an error has no words yet."""
    said = {}
    for kind, (word, _, why, _) in line.kinds.items():
        if word == "random":
            said[kind] = word
        elif why.startswith("torch_nn::"):  # what runs the file here had imported the module that registers it, a fresh process has not
            said[kind] = "only in a process that has imported the module of torch which registers it"
        elif word in _RIGHT:
            before, named, names = why.rpartition("named: ")
            said[kind] = f"named: {names.replace('.default', '')}" if named and not before else "yes" if why else "standard operators"
        else:
            said[kind] = next((words for pattern, words in _REASONS.items() if re.search(pattern, why)), "") if word != "wrong" else ""
    return said


def unreasoned(opaque: Mapping[tuple[str, str], Line]) -> list[str]:
    """What opaque="missing" ends in and has no words for."""
    return [
        f"{name} ({which}, {kind}), opaque: {' '.join(map(str, line.kinds[kind][:3]))}"
        for (name, which), line in opaque.items()
        for kind, words in opaque_words(line).items()
        if not words
    ]


def _row(line: Line, opaque: Line | None) -> str:
    def reached(stage: str) -> str:
        """Whether every kind came past a stage, some or none."""
        tried = [(word, at) for word, at, _, _ in line.kinds.values() if word != "random"]
        past = [word in _RIGHT or (at in _STAGES and _STAGES.index(at) > _STAGES.index(stage)) for word, at in tried]
        return "yes" if all(past) else "partly" if any(past) else "no"

    gradient = any(trains for *_, trains in line.kinds.values())
    right = sum(word in _RIGHT for word, *_ in line.kinds.values())
    rest = []
    for word in _ORDER[1:]:
        kinds = [kind for kind, (found, *_) in line.kinds.items() if found == word]
        if kinds:
            rest.append(f"{word}: {', '.join(kinds)}")
    cells = [line.operator, _NAMES[line.exporter], reached("export"), reached("forward"), reached("backward") if gradient else "-"]
    words = {} if opaque is None else opaque_words(opaque)
    kinds = {word: [kind for kind in words if words[kind] == word] for word in words.values()}
    column = next(iter(kinds)) if len(kinds) == 1 else "; ".join(f"{word} ({', '.join(those)})" for word, those in kinds.items())
    return f"| {' | '.join([*cells, f'{right} of {len(line.kinds)}', '; '.join(rest), column])} |"


def _reasons(found: Iterable[Line]) -> list[str]:
    """What was said of the rows that do not work, once for each text and exporter."""
    listed = known()
    told: dict[tuple[str, str, str], list[str]] = {}
    for line in found:
        for kind, (word, _, why, _) in line.kinds.items():
            reason = listed.get((line.operator, line.exporter, kind), why) if word in WRONG else why
            if word in ("refused", "torch.onnx fails", *WRONG):
                operators = told.setdefault((word, line.exporter, reason), [])
                if line.operator not in operators:
                    operators.append(line.operator)
    made = []
    for word in ("refused", "torch.onnx fails", "wrong", "crash"):
        for which in EXPORTERS:
            causes = {why: operators for (one, exporter, why), operators in told.items() if (one, exporter) == (word, which)}
            if causes:
                made.append(f"\n### {word}, {_NAMES[which]}\n")
                for why, operators in sorted(causes.items(), key=lambda item: (-len(item[1]), item[1][0].lower())):
                    made.append(f"- {', '.join(sorted(operators, key=str.lower))}: `` {why.replace('``', chr(39) * 2)} ``")
    return made


def main() -> int:
    """Write the document; 1 where a row is wrong that is not known, or right that is called wrong, or not opaque for a reason without words."""
    found, opaque = lines(RECORD), lines(OPAQUE)
    DOCUMENT.write_text(page(found, opaque))
    said = [*unexpected(found.values()), *unreasoned(opaque)]
    said += [f"{name} ({which}): not in {OPAQUE.name}" for name, which in untranslated(found) if (name, which) not in opaque]
    print(*said, sep="\n")
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
