"""``python -m benchmarks``: every benchmark, one after the other, each in a process of its own.

Writes the record of this processor in benchmarks/records and, from all records, docs/figures.md and docs/steps.svg; also
benchmarks/results/figures.json and a picture a program, and keeps the figures in a folder of earlier runs. The exit status is 1 where a limit was missed; the other programs run
all the same.

    python -m benchmarks dispatch export               # some of them
    python -m benchmarks --no-record dispatch          # on a machine that has other work: no record and no page
    python -m benchmarks page                          # the page anew, from the records
    python -m benchmarks --history FOLDER              # kept there; default: benchmarks-history
    python -m benchmarks compare OLD NEW               # two files of figures; 1 where a limit is newly missed
    python -m benchmarks picture FIGURES PICTURE       # the training steps of such a file, as an SVG
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks._compare import compare, read, table
from benchmarks._page import record, write
from benchmarks._picture import of_limits, training_steps

RESULTS = Path(__file__).with_name("results")
_EXTRA = {"training_memory": ["--steps", "300"]}


def run(program: str) -> dict[str, Any]:
    """What one program tells; an error where it tells nothing."""
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{program}", *_EXTRA.get(program, [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"program": program, "machine": {}, "figures": [], "error": f"ended with {done.returncode} and told nothing"}


def picture(source: str, target: str) -> int:
    """Draw the training steps of a run. Returns 2 where its file cannot be read, otherwise 0."""
    try:
        drawn = training_steps(read(Path(source)))
    except (OSError, ValueError) as error:
        print(f"cannot draw: {error}", file=sys.stderr)
        return 2
    Path(target).write_text(drawn, encoding="utf-8")
    return 0


def kept(told: list[dict[str, Any]], history: Path) -> Path:
    """The file of this run among those of earlier ones, named by the time, in UTC."""
    history.mkdir(parents=True, exist_ok=True)
    path = history / f"{time.strftime('%Y-%m-%dT%H-%M-%S', time.gmtime())}.json"
    path.write_text(json.dumps(told, indent=1))
    return path


def compared(old: str, new: str) -> int:
    """Print two runs side by side. Returns 1 where a limit is newly missed, 2 where a file cannot be read, otherwise 0."""
    try:
        rows = compare(read(Path(old)), read(Path(new)))
    except (OSError, ValueError) as error:
        print(f"cannot compare: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    return int(any(row.newly_missed for row in rows))


def main(argv: list[str] | None = None) -> int:
    """Run, write, draw; or compare."""
    every = sorted(info.name for info in pkgutil.iter_modules(benchmarks.__path__) if not info.name.startswith("_"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(every)}; or: page; or: compare OLD NEW; or: picture FIGURES PICTURE"
    )
    parser.add_argument("--no-record", action="store_true", help="change neither the record of this processor nor docs/figures.md")
    parser.add_argument("--history", type=Path, default=Path("benchmarks-history"), help="where the figures of each run are kept")
    options = parser.parse_args(argv)
    if options.programs[:1] == ["compare"]:
        if len(options.programs) != 3:
            parser.error("compare takes two files: python -m benchmarks compare OLD NEW")
        return compared(*options.programs[1:])
    if options.programs[:1] == ["picture"]:
        if len(options.programs) != 3:
            parser.error("picture takes two files: python -m benchmarks picture FIGURES.json PICTURE.svg")
        return picture(*options.programs[1:])
    if options.programs == ["page"]:
        write()
        return 0
    wanted = options.programs or every
    if unknown := set(wanted) - set(every):
        print(f"there is no benchmark {sorted(unknown)[0]!r}; there are {', '.join(every)}", file=sys.stderr)
        return 2
    RESULTS.mkdir(exist_ok=True)
    told = []
    for program in wanted:
        print(f"== {program}", file=sys.stderr, flush=True)
        told.append(run(program))
        (RESULTS / "figures.json").write_text(json.dumps(told, indent=1))
        if not options.no_record and record(told[-1]) is not None:
            write()
        if (drawn := of_limits(told[-1])) is not None:
            (RESULTS / f"{program}.svg").write_text(drawn, encoding="utf-8")
    file = kept(told, options.history)
    missed = [figure["what"] for result in told for figure in result["figures"] if figure["missed"]]
    broken = [result["program"] for result in told if "error" in result]
    print(
        f"wrote {RESULTS} and {file}; missed: {'; '.join(missed) or 'none'}{'; told nothing: ' + ', '.join(broken) if broken else ''}",
        file=sys.stderr,
    )
    return bool(missed or broken)


if __name__ == "__main__":
    sys.exit(main())
