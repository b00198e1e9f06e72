"""The stress program in a small form; `make asan` runs it in full, under the sanitizers."""

from __future__ import annotations

import onnxruntime

from tests.exporter.runtime import stress


def test_many_threads_with_functions_that_do_what_they_like():
    try:
        outcomes = stress.main(steps=800, threads=16, seed=3)
    finally:
        onnxruntime.set_default_logger_severity(2)
        stress.calm()
    assert sum(count for (_, outcome), count in outcomes.items() if outcome == "done") > 200
    assert outcomes["number", "done"] > 20
    assert {"run", "remake", "asynchronous", "read_kept"} <= {name for name, _ in outcomes}
