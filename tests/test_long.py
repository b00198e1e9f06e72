"""What is long by tests/long.py is there, and each test for both exporters stays in `make test` for one of them."""

from __future__ import annotations

from types import SimpleNamespace

from tests.long import FILES, TESTS, long_ones, turned
from tests.processes import ROOT


def test_what_is_listed_is_there():
    assert [path for path in FILES if not path.exists()] == []
    for name in TESTS:
        file, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(), name


def _item(nodeid):
    return SimpleNamespace(nodeid=nodeid, path=ROOT / nodeid.partition("::")[0])


def test_of_both_exporters_one_is_long():
    pairs = [f"tests/a.py::test_{n}[{e}-{m}]" for n in range(3) for e in ("dynamo", "torchscript") for m in ("bert", "snn", "loop", "deq")]
    alone = ["tests/a.py::test_x[dynamo]", "tests/a.py::test_y", "tests/a.py::test_z[dynamos-torchscripted]", "tests/a.py::test_z[-]"]
    long = {item.nodeid for item in long_ones([_item(each) for each in (*pairs, *alone)])}
    assert len(long) == len(pairs) / 2
    assert long.isdisjoint(alone)
    for model in ("bert", "snn", "loop", "deq"):  # all tests of a model take one exporter
        assert len({each.partition("[")[2] for each in long if model in each}) == 1
    assert 0 < sum("dynamo" in each for each in long) < len(long)


def test_each_file_is_first_at_some_turn():
    items = [_item(f"tests/{file}.py::test_{n}") for file in "abcde" for n in range(2)]
    orders = [turned(items, turn) for turn in range(1, 6)]
    assert {order[0].path.name for order in orders} == {f"{file}.py" for file in "abcde"}
    assert all(sorted(map(id, order)) == sorted(map(id, items)) for order in orders)
