"""``python -m benchmarks``: every benchmark, one after the other, each in a process of its own.

Writes benchmarks/results/figures.json, figures.md and a picture a program, and keeps the figures in a folder of earlier runs. The exit
status is 1 where a limit was missed; the other programs run all the same.

    python -m benchmarks dispatch export               # some of them
    python -m benchmarks --history FOLDER              # kept there; default: benchmarks-history
    python -m benchmarks compare OLD NEW               # two files of figures; 1 where a limit is newly missed
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


def markdown(told: list[dict[str, Any]]) -> str:
    """All figures as tables, with the machine."""
    lines = ["# Figures", ""]
    for name, value in (told[0]["machine"] if told else {}).items():
        lines.append(f"- {name}: {value}")
    for result in told:
        lines += ["", f"## {result['program']}", ""]
        if "error" in result:
            lines.append(f"**{result['error']}**")
            continue
        lines += ["| | value | limit | runs | |", "|---|---:|---:|---:|---|"]
        for figure in result["figures"]:
            value = "" if figure["value"] is None else f"{figure['value']:.4g} {figure['unit']}"
            limit = "" if figure["limit"] is None else f"{figure['limit']:g}{' **missed**' if figure['missed'] else ''}"
            lines.append(f"| {figure['what']} | {value} | {limit} | {figure['runs']} | {figure['note']} |".replace("\n", " "))
    return "\n".join([*lines, ""])


def draw(result: dict[str, Any], path: Path) -> None:
    """The figures of one program as bars, an SVG; those with a limit as shares of it. Equal figures make equal bytes."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "pythonop"
    from matplotlib import pyplot

    limited = [f for f in result["figures"] if f["limit"] and f["value"] is not None and f["limit"] != float("inf")]
    ratios = [f for f in result["figures"] if not f["limit"] and f["value"] is not None and f["unit"] == "ratio"]
    if not limited and not ratios:
        return
    rows = [
        (f["what"], f["value"] / f["limit"], "tab:red" if f["missed"] else "tab:green", f"{f['value']:.3g} of {f['limit']:g} {f['unit']}")
        for f in limited
    ]
    rows += [(f["what"], f["value"], "tab:gray", f"{f['value']:.3g}") for f in ratios]
    figure, axes = pyplot.subplots(figsize=(10, 0.4 * len(rows) + 1.2), layout="constrained")
    for y, (_, value, colour, text) in enumerate(rows):
        axes.barh(y, value, color=colour, height=0.7)
        axes.text(max(value, 0), y, f" {text}", va="center", fontsize=8)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [what for what, *_ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_title(f"{result['program']}: share of the limit (green, red), ratios without one (gray)", fontsize=10)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


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
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(every)}; or: compare OLD NEW")
    parser.add_argument("--history", type=Path, default=Path("benchmarks-history"), help="where the figures of each run are kept")
    options = parser.parse_args(argv)
    if options.programs[:1] == ["compare"]:
        if len(options.programs) != 3:
            parser.error("compare takes two files: python -m benchmarks compare OLD NEW")
        return compared(*options.programs[1:])
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
        (RESULTS / "figures.md").write_text(markdown(told))
        draw(told[-1], RESULTS / f"{program}.svg")
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
