"""python -m tests.fuzz: mutated files at every door of the product. Exit code 1 where something was found."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz import run
from tests.fuzz.corpus import CORPUS
from tests.fuzz.mutate import Case, make_case
from tests.fuzz.seeds import Seed, make_seeds
from tests.fuzz.surfaces import SURFACES


def seeds_of_a_child() -> dict[str, Seed]:
    """The seeds, made in a process of their own: exporters start threads, and what forks must have none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "seeds")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                path.write_bytes(pickle.dumps(make_seeds()))
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        if status:
            sys.exit("the seeds could not be made")
        return pickle.loads(path.read_bytes())


def main() -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="CASE", help="this case alone, a number or a name of the corpus, at every surface")
    parser.add_argument("--surface", type=int, choices=SURFACES, action="append", help="this surface alone; may be given more than once")
    parser.add_argument("--patience", type=int, default=1, help="how many times as long a case may take, under a sanitizer for example")
    parser.add_argument(
        "--clock", type=int, default=run.HANGS, help="seconds by the clock that a case may wait; more where other work runs"
    )
    parser.add_argument("--corpus", action="store_true", help="the corpus in place of mutated files")
    parser.add_argument("--honest", action="store_true", help="the seeds themselves: each must give a result wherever it can")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a folder for the files that something was found with")
    options = parser.parse_args()
    run.SECONDS *= options.patience
    run.HANGS = options.clock * options.patience

    start = time.monotonic()
    named = options.corpus or (options.only is not None and not options.only.isdigit())
    seeds = {} if named else seeds_of_a_child()
    names = list(CORPUS) if named else sorted(seeds)

    def make(number: int) -> Case:
        if named:
            return CORPUS[names[number]].case(number)
        if options.honest:
            return Case(number, names[number], [], seeds[names[number]].model, dict(seeds[names[number]].files))
        return make_case(seeds, options.seed, number)

    def at(number: int) -> list[int]:
        if options.surface:
            return list(options.surface)
        if named or options.honest or options.only is not None:
            return list(SURFACES)
        # The doors that cost much see every third file each.
        rng = random.Random(f"surfaces of {options.seed}:{number}")
        return sorted({1, 8, *rng.sample([2, 3, 4, 5, 6, 7, 9, 10], 3)})

    if named and options.only is not None and options.only not in names:
        parser.error(f"the corpus has no {options.only!r}")
    if options.only is not None:
        numbers = [names.index(options.only) if named else int(options.only)]
    else:
        numbers = list(range(len(names) if named or options.honest else options.cases))
    seen: dict[tuple[object, ...], int] = {}

    def tell(finding: run.Finding) -> None:
        seen[finding.key] = seen.get(finding.key, 0) + 1
        if seen[finding.key] > 1 and options.only is None:
            return
        case = make(finding.case)
        label = names[finding.case] if named else str(finding.case)
        print(
            f"\nFOUND {finding.kind} at surface {finding.surface} ({SURFACES[finding.surface][0]}), in {finding.frame or 'no frame of ours'}"
        )
        print(f"  {finding.text}")
        print(f"  from {case.origin}: {'; '.join(case.steps)}"[:600])
        again = f"python -m tests.fuzz --seed {options.seed} --only {shlex.quote(label)} --surface {finding.surface}"
        print(f"  {again}{' --honest' if options.honest else ''}", flush=True)
        if options.out is not None:
            folder = options.out / re.sub(r"\W+", "-", f"{options.seed}-{label}")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "model.onnx").write_bytes(case.model)
            for name, content in case.files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content if isinstance(content, bytes) else f"a link to {content}".encode())
            (folder / f"{finding.surface}.json").write_text(
                json.dumps({**vars(finding), "origin": case.origin, "steps": case.steps}, indent=1)
            )

    def expected(number: int, surface: int) -> set[str]:
        return CORPUS[names[number]].ends.get(surface, set()) if named else set()

    summary = run.run_cases(numbers, make, at, options.jobs, tell, expected)
    print(
        f"\n{summary.cases} cases of seed {options.seed} in {time.monotonic() - start:.0f} s; {len(seen)} kinds of findings in {len(summary.findings)}"
    )
    for number, (name, _) in SURFACES.items():
        if counts := summary.ends[number]:
            print(
                f"  {number} {name:30} {sum(counts.values()):6} runs of {summary.seconds[number] / sum(counts.values()) * 1000:.0f} ms: {', '.join(f'{end} {count}' for end, count in sorted(counts.items()))}"
            )
    for what, unit, (value, case, surface) in (("slowest", "s", summary.slowest), ("largest", "MiB", summary.largest)):
        print(f"  {what}: {value:.1f} {unit}, case {repr(names[case]) if named or options.honest else case} at surface {surface}")
    if options.honest and not options.surface:
        for number in SURFACES:
            assert summary.ends[number]["result"], f"no honest file gives a result at surface {number}"
    return 1 if summary.findings else 0


if __name__ == "__main__":
    sys.exit(main())
