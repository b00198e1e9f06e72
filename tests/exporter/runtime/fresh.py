"""A process of its own for a saved file of the second order: ``python -m tests.exporter.runtime.fresh FILE FEEDS WANTED OUT``."""

from __future__ import annotations

import sys

import numpy as np

import exporter

ALLOW = ["tests.exporter.runtime.test_backward:Both"]


def main(path: str, feeds: str, wanted: str, out: str) -> None:
    """Run the file on both runtimes; what they make goes into one archive."""
    given, names, made = dict(np.load(feeds)), list(np.load(wanted)), {}
    for runtime, make in (("onnxruntime", exporter.inference_session), ("onnx.reference", exporter.reference_evaluator)):
        made |= {f"{runtime}/{name}": value for name, value in zip(names, make(path, ALLOW).run(names, given), strict=True)}
    np.savez(out, **made)


if __name__ == "__main__":
    main(*sys.argv[1:])
