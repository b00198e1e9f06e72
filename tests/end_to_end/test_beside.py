"""A part of what `python -m tests.end_to_end.beside` does: nothing fails beside processes that save, or in threads."""

from __future__ import annotations

import pytest

from tests.end_to_end.beside import Threads, beside_savers, failures, honest

pytestmark = [pytest.mark.unusable(reason="files of the fuzzer, of all kinds"), pytest.mark.filterwarnings("ignore")]


def test_what_is_opened_beside_savers(tmp_path):
    found = beside_savers(tmp_path, 100, savers=2)
    assert not failures(found)
    assert sum(found.values()) == 100


def test_threads_that_build_load_save_verify_and_open_every_kind_of_file(tmp_path):
    found = Threads(tmp_path, honest()).run(240)
    assert not failures(found)
    assert sum(found.values()) == 240
