"""The files whose tests are not in `make test`, which has to be done in fifteen minutes on two cores: `make test-long` runs them, and .ci/run both.

They were those that took longest, by `pytest --durations=0`, among files of which another one in `make test` has a part of the subject.
"""

from __future__ import annotations

from tests.processes import ROOT

__all__ = ["FILES"]

FILES = tuple(
    ROOT / "tests" / name
    for name in """
    end_to_end/alone/test_alone.py
    end_to_end/combinations/test_combinations.py
    end_to_end/models/test_examples.py
    end_to_end/no_exporter/test_no_exporter.py
    end_to_end/no_exporter/test_portable_and_opaque.py
    end_to_end/portable/test_portable_models.py
    end_to_end/test_beside.py
    exporter/cpu/test_recurrences.py
    exporter/fallback/test_fallback.py
    exporter/files/test_examine.py
    exporter/forward/test_functions_of_every_module.py
    exporter/gradient_graph/test_models.py
    exporter/gradient_graph/test_recompute.py
    exporter/module/test_distributed.py
    exporter/module/test_every_set.py
    exporter/module/test_higher.py
    exporter/module/test_training_curves.py
    exporter/module/test_transforms.py
    exporter/runtime/test_buffers.py
    exporter/train_mode/test_buffers.py
    exporter/training/test_adjoint_step.py
    exporter/training/test_browser.py
    exporter/training/test_curves.py
    fuzz/test_fuzz.py
    operators/test_opaque.py
    operators/test_operators.py
    symbolics/node/test_arguments.py
    symbolics/quirks/test_every_spelling.py
    symbolics/quirks/test_extremes.py
    test_gallery.py
    """.split()
)
