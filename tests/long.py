"""What is not in `make test`, which has to be done in fifteen minutes on two cores: `make test-long` runs it, and .ci/run both.

Files and tests: those that took longest, by `pytest --durations=0`, of which another one in `make test` has a part of the subject. And of each
test that is there for both exporters one of the two, always the same one.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.processes import ROOT

__all__ = ["FILES", "TESTS", "long_ones", "turned"]

_EXPORTER = re.compile(r"(?<=[\[-])(dynamo|torchscript)(?=[-\]])")

FILES = tuple(
    ROOT / "tests" / name
    for name in """
    end_to_end/alone/test_alone.py
    end_to_end/integrations/test_integrations.py
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
    exporter/training/test_webgpu.py
    exporter/verification/test_zoo.py
    fuzz/test_fuzz.py
    operators/test_opaque.py
    operators/test_operators.py
    symbolics/node/test_arguments.py
    symbolics/quirks/test_every_spelling.py
    symbolics/quirks/test_extremes.py
    test_gallery.py
    test_wheel.py
    """.split()
)

TESTS = frozenset(
    f"tests/{name}"
    for name in """
    end_to_end/functions/test_rows.py::test_portable_row
    end_to_end/models/test_export_models.py::test_arguments_that_are_no_tensors_are_in_the_file
    end_to_end/models/test_export_models.py::test_ibert_before_its_first_step_makes_99_calls
    exporter/commands/test_cli.py::test_an_export_says_what_is_ours_to_say_and_nothing_else
    exporter/cpu/test_elementwise.py::test_programs_of_strangers
    exporter/cpu/test_elementwise.py::test_random_graphs
    exporter/cpu/test_phases.py::test_the_result_is_torchs
    exporter/forward/test_beside_torch.py::test_a_compiled_model_is_verified
    exporter/forward/test_complex_modules.py::test_second_derivatives
    exporter/forward/test_opaque_operators.py::test_samples
    exporter/forward/test_opaque_operators.py::test_without_it_the_error_names_them_all
    exporter/forward/test_plain_objects.py::test_a_fresh_process_and_an_entry_of_the_model_itself
    exporter/gradient_graph/test_second_orders.py::test_gradients_of_a_gradient_in_forward
    exporter/gradient_graph/test_small_graphs.py::test_gpt2_has_at_most_2_6_nodes_for_one_of_the_forward
    exporter/quantization/test_tools.py::test_brevitas
    exporter/quantization/test_tools.py::test_more_models
    exporter/quantization/test_tools.py::test_more_of_torch_ao
    exporter/quantization/test_tools.py::test_pt2e
    exporter/quantization/test_tools.py::test_torchao
    exporter/verification/test_memory.py::test_in_a_process_of_its_own
    exporter/verification/test_verify.py::test_command_says_yes_in_json_and_html
    exporter/verification/test_verify.py::test_errors_that_grow_are_explained
    exporter/verification/test_verify.py::test_the_memory_of_a_step_is_counted
    operators/test_outcome.py::test_a_process_that_dies_loses_one_call
    providers/test_providers.py::test_a_handful_of_gradients
    providers/test_providers.py::test_two_steps_beside_eager
    providers/test_providers.py::test_what_is_refused_and_what_dies_are_answers
    symbolics/capture/test_flags.py::test_verify
    symbolics/capture/test_loops.py::test_like_a_loop_of_python
    symbolics/gradients/test_backend_models.py::test_every_model_of_onnx_has_a_usable_gradient_graph_or_an_error_of_ours
    symbolics/gradients/test_conformance.py::test_conformance_with_shapes_erased
    symbolics/quirks/test_axes_and_sizes.py::test_a_recurrence_of_open_length_exports_again
    test_notebook.py::test_each_kind_of_thing_shows_itself_as_a_table
    """.split()
)


def long_ones(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Those of the tests that are long."""
    pairs: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if item.path in FILES or item.nodeid.partition("[")[0] in TESTS:
            yield item
        elif (found := _EXPORTER.search(item.nodeid)) is not None:
            pairs[_EXPORTER.sub("*", item.nodeid, count=1)][found[1]] = item
    for name, both in pairs.items():
        if len(both) == 2:
            # All tests of a file about one model take the same exporter, which exports it once.
            file, _, test = name.partition("::")
            about = test.partition("[")[2].replace("*", "").strip("-]")
            yield both[("dynamo", "torchscript")[zlib.crc32(f"{file} {about or test}".encode()) % 2]]


def turned(items: list[pytest.Item], turn: int) -> list[pytest.Item]:
    """The tests, files in another order at each turn: where the minutes do not suffice for all, in time each one is run."""
    files = list(dict.fromkeys(item.path for item in items))
    first = turn * 7 % max(len(files), 1)
    place = {path: (number - first) % len(files) for number, path in enumerate(files)}
    return sorted(items, key=lambda item: place[item.path])
