"""``python -m benchmarks``: every benchmark, one after the other, each in a process of its own.

The exit status is 1 where one missed a target; the others run all the same.
"""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import benchmarks


def main() -> int:
    missed = []
    for module in sorted(info.name for info in pkgutil.iter_modules(benchmarks.__path__) if not info.name.startswith("_")):
        print(f"\n== benchmarks.{module}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{module}"], check=False).returncode:
            missed.append(module)
    print(f"\nmissed a target: {', '.join(missed) or 'none'}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
