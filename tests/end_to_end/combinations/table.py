"""The outcomes of all combinations, counted along each axis: ``python -m tests.end_to_end.combinations.table`` prints them."""

from __future__ import annotations

import sys
import time
from collections import Counter

import torch

from tests.end_to_end.combinations.check import CASES, Case, Outcome, outcome
from tests.end_to_end.combinations.known import unexpected

__all__ = ["counted"]

_AXES = {
    "exporter": lambda case: "dynamo" if case.dynamo else "TorchScript",
    "dtype": lambda case: case.dtype,
    "control flow": lambda case: f"{'dynamo' if case.dynamo else 'TorchScript'}: {case.flow}",
    "Functions": lambda case: "in it" if case.function else "none",
    "use": lambda case: case.use,
}


def counted(outcomes: dict[Case, Outcome]) -> str:
    """A table in Markdown."""
    lines = ["| axis | value | cases | right | refused | wrong |", "|---|---|---|---|---|---|"]
    for axis, of in _AXES.items():
        for value in dict.fromkeys(map(of, outcomes)):
            kinds = Counter(found.kind for case, found in outcomes.items() if of(case) == value)
            lines.append(
                f"| {axis} | {value} | {kinds.total()} | {kinds['right']} | {kinds['refused']} | {kinds['wrong'] + kinds['raw']} |"
            )
    return "\n".join(lines)


def main() -> int:
    torch.set_num_threads(1)
    begin = time.process_time()
    outcomes = {case: outcome(case) for case in CASES}
    print(counted(outcomes), f"{time.process_time() - begin:.0f} s of processor", sep="\n\n")
    said = [text for case, found in outcomes.items() if (text := unexpected(case, found))]
    print(*said, sep="\n")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main())
