"""``python -m tests.operators.table``: write docs/operators.md and docs/operators/ from the record, and fail where a row is wrong that is not known."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tests.operators.known import WRONG, known, unexpected
from tests.operators.sweep import EXPORTERS, OPAQUE, RECORD, Line, lines, untranslated
from tests.processes import ROOT

__all__ = ["DOCUMENT", "FOLDER", "called", "opaque_words", "pages", "unreasoned"]

DOCUMENT = ROOT / "docs" / "operators.md"
FOLDER = DOCUMENT.with_suffix("")
_ORDER = ["works", "kink", "inexact", "random", "refused", "torch.onnx fails", "wrong", "crash"]
_RIGHT = ("works", "kink", "inexact")
_STAGES = ["export", "load", "forward", "backward"]
_NAMES = {"dynamo": "dynamo", "torchscript": "TorchScript"}

#: What an error says that opaque="missing" ends in -> why there is no such node. None but these may end so.
_REASONS = {
    "complex": "it takes or returns complex tensors, which ONNX does not have",
    "aten::_(batch_norm_with_update|native_batch_norm_legit)'": "it changes its arguments in place",
    "ScalarType UInt64": "its result is uint64, which the TorchScript exporter does not have",
    "not differentiable with respect to": "torch has no derivative with respect to one of its arguments",
    "^ExportError: torch_nn::": "the TorchScript exporter records the operations inside it, not the operator",
    "has inconsistent type|Invalid position of 0": "torch.onnx translates it, but onnxruntime cannot run the result",
    "without elements is reshaped to a computed shape": "an empty tensor is reshaped to a computed shape",
    "aten::uniform|'from' is not a valid": "it draws random numbers",
}
_ELSEWHERE = "works only in a process that has imported the torch module which registers the operator"
_OPAQUE_ORDER = ["yes", "standard operators", "named", "no"]
#: What is written of an entry for the first of these words.
_OPAQUE_TEXTS = {"yes": "works, the node runs PyTorch", "standard operators": "works as standard ONNX operators, without PyTorch"}

#: Prefixes of the database's names, and how people write them.
_PREFIXES = {
    r"nn_functional_": "nn.functional.",
    r"signal_windows_": "signal.windows.",
    r"torch_ops_aten_": "torch.ops.aten.",
    r"torch_(?=_)": "torch.",
    r"(fft|linalg|special)_": r"\1.",
    r"masked_(?!(fill|scatter|select)$)": "masked.",
}
#: File -> title, and which names it has: the first that takes a name has it.
_PAGES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "fft": ("torch.fft and torch.signal", lambda name: name.startswith(("fft.", "signal."))),
    "linalg": ("torch.linalg", lambda name: name.startswith("linalg.")),
    "masked": ("torch.masked", lambda name: name.startswith("masked.")),
    "functional-a-l": ("torch.nn.functional, A to L", lambda name: name.startswith("nn.functional.") and name[14] <= "l"),
    "functional-m-z": ("torch.nn.functional, M to Z", lambda name: name.startswith("nn.functional.")),
    "special": ("torch.special", lambda name: name.startswith("special.")),
    "a": ("A", lambda name: name < "b"),
    "b-c": ("B and C", lambda name: name < "d"),
    "d-f": ("D to F", lambda name: name < "g"),
    "g-k": ("G to K", lambda name: name < "l"),
    "l-m": ("L and M", lambda name: name < "n"),
    "n-r": ("N to R", lambda name: name < "s"),
    "s": ("S", lambda name: name < "t"),
    "t-z": ("T to Z", lambda name: True),
}

_HEAD = """\
# Operators

Here you find out whether one of torch's own operators exports, runs and trains with pythonop, and what you can do where it does not.

## Find an operator

Type its name into the search box of this site, or open the page that has it. Each operator has a heading of its own there.

"""

_INTRODUCTION = """\
Here you find out which of these {} operators export, run and train with pythonop.
[How to read an entry](../operators.md#how-to-read-an-entry) explains the words."""

#: What a page says before its operators.
_NOTES = {
    "fft": """\
## Write a Fourier layer

torch.onnx translates few operators of complex tensors: no `einsum`, no `f[:, :, None]`, no assignment to a slice. So compute with real numbers
between the transforms, as `torch.view_as_real` gives them, and the layer is standard operators, at fixed and at open sizes:

```python
def forward(self, x):  # weights wr, wi: real and imaginary parts
    f = torch.view_as_real(torch.fft.rfft2(x))
    a, b = f[..., 0], f[..., 1]
    o = torch.stack([a * self.wr - b * self.wi, a * self.wi + b * self.wr], -1)
    return torch.fft.irfft2(torch.view_as_complex(o), s=x.shape[-2:])
```

A mixture of channels is an `einsum` of `a`, `b` and the weights; `torch.cat` with real zeros, before `view_as_complex`, puts back the frequencies that you leave out.
pythonop writes each transform whose length is not known to be a power of two in float64, for onnxruntime's float32 loses digits there.
In a model of float64, inverse transforms of such lengths and the gradients of all of them are right [to a few 1e-8](../force-fields.md#use-float64).
"""
}

_WAYS = """
## When your operator does not work

- **Where the entry has a line for `opaque="missing"` that works**, pass `opaque="missing"` to `exporter.export`. With `fallback=True`,
  pythonop finds such a way by itself.
- **Where the other exporter works**, use it: `dynamo=False` is TorchScript, `dynamo=True` is the default.
- **Where the file has to run without PyTorch**, write the call in other operators, or [write a translation](translations.md).
"""

_COMPARED = """
## What was compared

Every entry of torch's own operator database was called as a small model, with both of torch's exporters. The file was saved, loaded, and run
forward and backward. Outputs and all gradients were compared with eager PyTorch. How far two numbers may differ is derived for each element
from eager in float64 (`tests/operators/numbers.py`).

Each operator was called in several cases:

| case | inputs |
|---|---|
| sample, sample 2, ... | ordinary inputs from the database |
| zeros, first zero, second zero | all float inputs are zero, or only the first or the second |
| ties | all elements are equal |
| bounds | the first input has only 0 and 1 |
| grid | the first input has values from -6 to 6, many of them points where functions bend |
| saturated | the first input has values of ±20 and ±100 |
| large, tiny | the sample times 10000, or times 0.000001 |
| duplicates | all indices are equal |
| empty | a tensor without elements |
| 0-d | a tensor without axes (a scalar) |
| any other name | a case that belongs to this one operator |

`make test-operators` runs all of this again and writes these pages.

## How many work

"""

_READ = """
The columns count operators by their ordinary sample or by their worst case, or they count all cases. The words are these:

- **works**: outputs and gradients equal eager's.
- **kink**: the function has no derivative at this point, and eager and the file choose different slopes, or different ones of several equal
  elements. This counts as right. So does a function that is infinite there, such as logdet of a singular matrix, where one result may be nan and
  the other infinite.
- **inexact**: onnxruntime computes the operator in one kernel that is exact to 2.4e-7 absolute, and the difference is no larger. This counts as right.
  It concerns sigmoid, softplus, elu, celu, selu, silu and mish, and only their small results.
- **random**: eager itself gives other numbers on each call, or memory that is not initialised. Nothing was compared.
- **refused**: pythonop raises an error that names the operator and the way out.
- **torch.onnx fails**: torch.onnx.export cannot export the same model either, or onnxruntime cannot run what it writes.
- **wrong**, **crash**: a fault of pythonop that is not mended yet.

## How to read an entry

An entry has one line for each exporter: `dynamo` (the default) and `TorchScript` (`dynamo=False`), or one for both where they agree. The line
says how many cases are right; random ones are not compared. Where not all are, it also says whether the operator exports, whether the file runs forward, and whether its gradients
are right. Below that stand the cases that are not plain "works", with the error.

An entry ends with what `exporter.export(..., opaque="missing")` makes of the cases that torch.onnx fails at. That option keeps an operator
without a translation as an [opaque node](opaque.md): the node runs PyTorch, so the file needs Python and `allow=` where it is opened. Two such cases of each operator were exported
and saved in one process, loaded in another, and compared with eager.
"""


def called(name: str) -> str:
    """An operator of the database as people write it: ``nn.functional.relu``, ``polygamma (n=0)``."""
    for pattern, written in _PREFIXES.items():
        if re.match(pattern, name):
            name = re.sub(f"^{pattern}", written, name)
            break
    return re.sub(r"(?P<name>\w+)_\w*(?P=name)_(\w)_(\d+)$", r"\1 (\2=\3)", name)


def _key(name: str) -> str:
    return called(name).lstrip("_").lower()


def _page_of(name: str) -> str:
    return next(page for page, (_, has) in _PAGES.items() if has(_key(name)))


def _link(name: str) -> str:
    """A link from the overview to the entry of an operator; the address is what both GitHub and the site make of the heading."""
    anchor = re.sub(r"[^\w\s-]", "", called(name).lower()).replace(" ", "-")
    return f"[{called(name)}]({FOLDER.name}/{_page_of(name)}.md#{anchor})".replace("[__", r"[\_\_").replace("__]", r"\_\_]")


def pages(found: Mapping[tuple[str, str], Line], opaque: Mapping[tuple[str, str], Line]) -> dict[Path, str]:
    """The overview and a page for each group of operators, of the record and of that of opaque nodes."""
    names = sorted({name for (name, _), line in found.items() if line.kinds}, key=lambda name: (_key(name), name))
    listed = {page: [name for name in names if _page_of(name) == page] for page in _PAGES}
    made = {DOCUMENT: _overview(found, opaque, names, listed)}
    for page, those in listed.items():
        text = [f"# Operators: {_PAGES[page][0]}\n", _INTRODUCTION.format(len(those))]
        text += [f"\n{_NOTES[page].rstrip()}"] if page in _NOTES else []
        made[FOLDER / f"{page}.md"] = "\n".join([*text, *(_entry(name, found, opaque) for name in those)]) + "\n"
    return made


# ---------------------------------------------------------------------------------------------------------------- the overview


def _overview(
    found: Mapping[tuple[str, str], Line], opaque: Mapping[tuple[str, str], Line], names: list[str], listed: Mapping[str, list[str]]
) -> str:
    text = [_HEAD.rstrip() + "\n"]
    text += [f"- [{_PAGES[page][0]}]({FOLDER.name}/{page}.md): {len(those)} operators" for page, those in listed.items() if those]
    text.append(_WAYS + _COMPARED + f"{len(names)} operators were called. Releases: {_releases(found.values())}.\n")
    text += [*_sums(found, names), _READ, "## How many work as opaque nodes\n", *_opaque_sums(opaque)]
    text += ["\n## Wrong or refused\n", *_wrong(found.values()), *_without(opaque), *_failing(found, names)]
    return "\n".join(text) + "\n"


def _releases(those: Iterable[Line]) -> str:
    return ", or ".join(sorted({f"torch {line.torch} with onnxruntime {line.onnxruntime}" for line in those}))


def _sums(found: Mapping[tuple[str, str], Line], operators: list[str]) -> list[str]:
    """Per exporter: operators by their worst word, and calls by theirs."""
    made = [f"| exporter: counted | {' | '.join(_ORDER)} |", f"|---|{'---|' * len(_ORDER)}"]
    for which in EXPORTERS:
        here = [found[name, which] for name in operators if (name, which) in found]
        calls = Counter(word for line in here for word, *_ in line.kinds.values())
        worst = Counter(max((word for word, *_ in line.kinds.values()), key=_ORDER.index) for line in here if line.kinds)
        sample = Counter(line.kinds["sample"][0] for line in here if "sample" in line.kinds)
        for what, counts in (("operators, ordinary sample", sample), ("operators, worst case", worst), ("cases", calls)):
            made.append(f"| {_NAMES[which]}: {what} | {' | '.join(str(counts[word]) for word in _ORDER)} |")
    return made


def _opaque_sums(opaque: Mapping[tuple[str, str], Line]) -> list[str]:
    """Per exporter: what becomes of operators at their worst with opaque="missing"."""
    made = [
        f'Operators with cases that torch.onnx fails at, by what `opaque="missing"` makes of the worse of two cases ({_releases(opaque.values())}):\n',
        f"| exporter | works | standard operators | works by name | does not work |\n|---|{'---|' * len(_OPAQUE_ORDER)}",
    ]
    for which in EXPORTERS:
        worst = Counter(_worst(line) for (_, exporter), line in opaque.items() if exporter == which and line.kinds)
        made.append(f"| {_NAMES[which]} | {' | '.join(str(worst[word]) for word in _OPAQUE_ORDER)} |")
    return [
        *made,
        "\n- **works**: the file has a node that runs PyTorch.",
        "- **standard operators**: the exporter writes standard ONNX operators, and the file needs no PyTorch for them.",
        '- **works by name**: torch.onnx has a translation, but it fails in this case. `opaque=["aten::name"]` keeps the operator; the entry has the name.',
    ]


def _wrong(found: Iterable[Line]) -> list[str]:
    """The cases that are wrong or refused, each with what was said of it."""
    listed, made = known(), list[str]()
    for line in found:
        for kind, (word, _, why, _) in line.kinds.items():
            if word in ("refused", *WRONG):
                reason = listed.get((line.operator, line.exporter, kind), why) if word in WRONG else why
                made.append(f"- {_link(line.operator)}, {_NAMES[line.exporter]}, {kind}: {word}. {_code(reason)}")
    return made or ["No case is wrong, and none is refused."]


def _without(opaque: Mapping[tuple[str, str], Line]) -> list[str]:
    """The operators that opaque="missing" cannot keep, by reason."""
    made = ["\n## Operators that cannot become opaque nodes\n"]
    for which in EXPORTERS:
        told: dict[str, list[str]] = {}
        for (name, exporter), line in opaque.items():
            if exporter == which:
                for words in opaque_words(line).values():
                    if not _works(words) and name not in told.setdefault(words, []):
                        told[words].append(name)
        reasons = sorted(told.items(), key=lambda item: -len(item[1]))
        made += [f"- {_NAMES[which]}, {words}: {', '.join(map(_link, sorted(names, key=_key)))}" for words, names in reasons]
    return made if made[1:] else [*made, "There is none."]


def _failing(found: Mapping[tuple[str, str], Line], names: list[str]) -> list[str]:
    """The operators whose ordinary sample torch.onnx fails at."""
    made = [
        "\n## Operators that torch.onnx cannot export\n",
        "These fail at an ordinary sample. The entry has the error, and what to do about it.",
    ]
    for which in EXPORTERS:
        those = [name for name in names if (line := found.get((name, which))) and line.kinds.get("sample", [""])[0] == "torch.onnx fails"]
        made.append(f"\n**{_NAMES[which]}** ({len(those)}): {', '.join(map(_link, those))}")
    return made


# ----------------------------------------------------------------------------------------------------------------- the entries


def _entry(name: str, found: Mapping[tuple[str, str], Line], opaque: Mapping[tuple[str, str], Line]) -> str:
    """The section of one operator."""
    told: dict[str, list[str]] = {}
    for which in EXPORTERS:
        line = found.get((name, which))
        if line is not None and line.kinds:
            told.setdefault(_told(line, opaque.get((name, which))), []).append(_NAMES[which])
    made = [f"\n## `{called(name)}`\n"]
    made += [f"- **{'both exporters' if len(those) == len(EXPORTERS) else those[0]}**: {text}" for text, those in told.items()]
    return "\n".join(made)


def _told(line: Line, opaque: Line | None) -> str:
    """What became of an operator on one exporter."""

    def reached(stage: str) -> str:
        """Whether every kind came past a stage, some or none."""
        tried = [(word, at) for word, at, _, _ in line.kinds.values() if word != "random"]
        past = [word in _RIGHT or (at in _STAGES and _STAGES.index(at) > _STAGES.index(stage)) for word, at in tried]
        return "yes" if all(past) else "some cases" if any(past) else "no"

    gradient = any(trains for *_, trains in line.kinds.values())
    words = [word for word, *_ in line.kinds.values()]
    right, random = sum(word in _RIGHT for word in words), words.count("random")
    compared = f"{len(words) - random} {'compared cases' if random else 'cases'}"
    if random == len(words):
        text = "not compared, its results are random or not initialised."
    elif right + random == len(words):
        text = f"works{', with gradients' if gradient else '; it has no gradients'}. {right} of {compared} right."
    else:
        stages = {"exports": reached("export"), "runs": reached("forward"), "gradients": reached("backward") if gradient else "none"}
        text = f"{right} of {compared} right. {'; '.join(f'{stage}: {how}' for stage, how in stages.items())}.".replace(
            "exports", "Exports"
        )
    rest: dict[tuple[str, str], list[str]] = {}
    listed = known()
    for kind, (word, _, why, _) in line.kinds.items():
        if word != "works" and random < len(words):
            why = listed.get((line.operator, line.exporter, kind), why) if word in WRONG else why
            rest.setdefault((word, "" if word in (*_RIGHT, "random") else why), []).append(kind)
    made = [text]
    made += [f"    - {word} ({', '.join(kinds)}){f': {_code(why)}' if why else ''}" for (word, why), kinds in rest.items()]
    made += [] if opaque is None or not opaque.kinds else [f'    - with `opaque="missing"`: {_column(opaque)}']
    return "\n".join(made)


def _code(text: str) -> str:
    return f"`` {text.replace('``', chr(39) * 2)} ``"


def _column(opaque: Line) -> str:
    """What opaque="missing" makes of an operator; cases are named where they differ."""
    words = opaque_words(opaque)
    kinds = {word: [kind for kind in words if words[kind] == word] for word in words.values()}
    return "; ".join(_opaque_text(word) + (f" ({', '.join(those)})" if len(kinds) > 1 else "") for word, those in kinds.items())


def _opaque_text(word: str) -> str:
    if word.startswith("named: "):
        return f"no node is missing, but `opaque={[word.removeprefix('named: ')]}` works".replace("'", '"')
    if word == "random":
        return "not compared, its results are random"
    return _OPAQUE_TEXTS.get(word, word if word == _ELSEWHERE else f"does not work, because {word}")


def _works(word: str) -> bool:
    return word.startswith("named: ") or word in (*_OPAQUE_TEXTS, "random")


def _worst(line: Line) -> str:
    words = [word.partition(":")[0] for word in opaque_words(line).values()]
    return max((word if word in _OPAQUE_ORDER else "no" for word in words), key=_OPAQUE_ORDER.index)


def opaque_words(line: Line) -> dict[str, str]:
    """Kind of inputs -> what opaque="missing" makes of it: one of `_OPAQUE_ORDER` but "no", "random", or why not; "" where an error has no words yet."""
    said = {}
    for kind, (word, _, why, _) in line.kinds.items():
        if word == "random":
            said[kind] = word
        elif why.startswith("torch_nn::"):  # what runs the file here had imported the module that registers it, a fresh process has not
            said[kind] = _ELSEWHERE
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


def main() -> int:
    """Write the pages; 1 where a row is wrong that is not known, or right that is called wrong, or not opaque for a reason without words."""
    found, opaque = lines(RECORD), lines(OPAQUE)
    FOLDER.mkdir(exist_ok=True)
    for page, text in pages(found, opaque).items():
        page.write_text(text)
    said = [*unexpected(found.values()), *unreasoned(opaque)]
    said += [f"{name} ({which}): not in {OPAQUE.name}" for name, which in untranslated(found) if (name, which) not in opaque]
    print(*said, sep="\n")
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
