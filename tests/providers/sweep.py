"""``python -m tests.providers.sweep``: ask each provider that can be asked here, and write what it says into the record.

    --provider OpenVINO   only this one; what is recorded of the others stays
    --only test_conv      cases whose name contains this; nothing is written
    --again               of the cases, those that were not equal when they were asked last
    --steps, --cases      only these

A cell is equal; or it is a word and a reason: "opens" (does not open without the CPU), "runs" (fails when run), "wrong", "dies".
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.providers.sessions import PROVIDERS, Asked, Failed, missing
from tests.providers.steps import STEPS, StepOnAProvider
from tests.symbolics.gradients.conformance import case_of, lower
from tests.symbolics.gradients.make_references import Reference, load, node_tests

__all__ = ["RECORD", "Cell", "cases", "read", "short", "steps"]

RECORD = Path(__file__).with_name("record.json")

#: (word, reason); None: equal.
Cell = tuple[str, str] | None

#: How an error is said in a few words: what is found in its text, and the words for it.
_WORDS = (
    (r"requires f16", "no float16 on this device"),
    (r"Provider type for (\w+) node", r"no kernel of \1 for its types"),
    (r"does not support the following ONNX operations: ([\w., -]+)", r"no \1"),
    (r"Could not find an implementation for (\w+)\(\d+\) node", r"no kernel of \1 for its types"),
    (r"No such operator|is not a registered function/op", "no such operator"),
    (r"Unsupported operation of type: (\w+)", r"no \1"),
    (r"No conversion rule found for operations: (\w+?)-\d+", r"no \1"),
    (r"Failed operations detailed log: -- (\w+?)-\d+ with a message", r"does not convert this \1"),
    (r"doesn't support (\w+) operation with dynamic rank", r"\1 whose rank is known at run time only"),
    (r"ailed to find kernel for (\w+)\(\d+\)", r"no \1"),
    (r"Numpy_type 256|unsupported data type: 16", r"no bfloat16 from Python or JavaScript"),
    (r"Type 'tensor\((\w+)\)' of input parameter \(.*?\) of operator \((\w+)\)", r"no \2 of \1"),
    (r"running (\w+) node", r"\1 fails"),
    (r"CallModImpl", "Mod fails"),
    (r"Can't merge shape info", "the shapes that it infers contradict each other"),
    (r"Unrecognized attribute: (\w+) for operator (\w+)", r"no attribute \1 of \2"),
    (r"In Node, \(.*?, (\w+),", r"no such \1"),
    (r"takes no tensor of (\w+)", r"no \1"),
)


def short(error: str) -> str:
    """An error of a provider in a line for the page: no addresses, files and names of nodes in it."""
    error = re.sub(r"\s+", " ", error) if "detailed log" in error else error
    for pattern, words in _WORDS:
        if (found := re.search(pattern, error)) is not None:
            return found.expand(words).strip(" ,.")
    lines = [
        line.strip()
        for line in error.splitlines()
        if line.strip() and not re.match(r"\s*(Exception from|FrontEnd API|Check '.*' failed at)", line)
    ]
    line = " ".join(lines) or error.strip()
    line = re.sub(r"(/[\w.+-]+)+(:\d+)?:?|0x[0-9a-f]+|\b[\w/]*form/\w+|\bstatus: .*", "", line)
    return re.sub(r"\s+", " ", line).strip()[:110]


def cases(asked: Asked, names: Iterable[str], references: dict[str, Reference], models: dict[str, Any]) -> Iterator[tuple[str, Cell]]:
    """What a provider says to each of the node tests' gradient graphs."""
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = case_of(name, lower(models[name][0]), references[name])
        try:
            asked.open(case.model)
            wrong = case.difference(asked.run(case.feeds))
            yield name, ("wrong", wrong) if wrong else None
        except Failed as error:
            yield name, (error.args[0], short(error.args[1]))


def steps(asked: Asked, names: Iterable[str]) -> Iterator[tuple[str, Cell | dict[str, float]]]:
    """How far a provider is from eager after the steps: the losses and the weights, relative to the largest of each."""
    for name in names:
        try:
            yield name, StepOnAProvider.of(name).beside_eager(asked)
        except Failed as error:
            yield name, (error.args[0], short(error.args[1]))


def read() -> dict[str, Any]:
    """The record: provider -> its release, the number of cases of each operator that were tried, those not equal, the steps."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def _of_provider(
    name: str, options: argparse.Namespace, references: dict[str, Reference], models: dict[str, Any], known: dict[str, Any]
) -> dict[str, Any]:
    made: dict[str, Any] = {"said": PROVIDERS[name].said()}
    with Asked(name) as asked:
        if not options.steps:
            chosen = [case for case in references if options.only in case and not (options.again and case not in known["cases"])]
            found = {case: cell for case, cell in cases(asked, chosen, references, models) if cell is not None}
            made["tried"] = known["tried"] if options.again else dict(sorted(Counter(references[case].op for case in chosen).items()))
            made["cases"] = found
        if not options.cases:
            made["steps"] = dict(steps(asked, [step for step in STEPS if not options.only or options.only in step]))
    return made


def main() -> int:
    """Ask, and write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--provider", action="append", choices=list(PROVIDERS))
    parser.add_argument("--only", default="")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--cases", action="store_true")
    options = parser.parse_args()
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # of values without a type, which are none the worse for it
    absent = dict(missing())
    record, references, models = read(), load(), node_tests()
    for name in options.provider or PROVIDERS:
        if name in absent:
            print(f"{name}: not run here: {absent[name]}")
            continue
        made = _of_provider(name, options, references, models, record.get(name, {}))
        words = Counter(word for word, _ in made.get("cases", {}).values())
        print(f"{name}: {sum(made.get('tried', {}).values())} cases, {dict(words) or 'all equal'}", flush=True)
        if options.only:
            print(json.dumps({key: made[key] for key in ("cases", "steps") if key in made}, indent=1))
        else:
            record[name] = {**record.get(name, {}), **made}
            RECORD.write_text(_text(record))
    return 0


def _text(record: dict[str, Any]) -> str:
    """A line a cell."""
    return re.sub(r"\[\s+(\"[^\n]*\"),\s+(\"[^\n]*\")\s+\]", r"[\1, \2]", json.dumps(record, indent=1, sort_keys=True)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
