"""From a file to what onnxruntime opens: which passes a model takes, and that they leave others alone."""

from __future__ import annotations

import subprocess
import sys

import onnx
import onnx.parser
import pytest

from exporter.runtime.pipeline import PASSES, Arranged, Pass, arrange
from tests.processes import ROOT

PLAIN = """<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { y = Relu (x) }"""


def _rename(arranged):
    arranged.model.graph[0].name = f"{arranged.model.graph[0].name} again"
    return True


def test_a_plain_file_stays_as_it_is():
    proto = onnx.parser.parse_model(PLAIN)
    before = proto.SerializeToString()
    found = arrange(Arranged(proto))
    assert found.proto is proto and proto.SerializeToString() == before
    assert (found.changed, found.library, found.is_step, found.python_ops, found.update, found.operators) == (
        False,
        False,
        False,
        False,
        None,
        None,
    )


def test_a_plain_file_never_becomes_an_onnx_ir_model():
    code = f"import sys, onnx.parser; from exporter.runtime.pipeline import *; arrange(Arranged(onnx.parser.parse_model({PLAIN!r}))); print('onnx_ir' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_each_pass_sees_what_those_before_it_made():
    seen = []

    def look(arranged):
        seen.append(arranged.proto.graph.node[0].name)
        return False

    passes = [Pass("a", _rename, over_ir=True), Pass("b", _rename, over_ir=True), Pass("look", look), Pass("c", _rename, over_ir=True)]
    found = arrange(Arranged(onnx.parser.parse_model(PLAIN)), passes)
    assert seen == [" again again"]
    assert found.proto.graph.node[0].name == " again again again"
    assert found.changed


def test_what_nothing_changed_is_not_written_anew():
    proto = onnx.parser.parse_model(PLAIN)
    found = arrange(Arranged(proto), [Pass("look", lambda arranged: arranged.model is None, over_ir=True)])
    assert found.proto is proto and not found.changed


def test_a_pass_that_a_model_does_not_take_is_left_out():
    def fail(arranged):
        raise AssertionError

    arrange(Arranged(onnx.parser.parse_model(PLAIN)), [Pass("no", fail, lambda arranged: arranged.is_step)])


@pytest.mark.parametrize(("provider", "taken"), [([], False), (["openvino"], True)])
def test_forms_are_for_other_providers(provider, taken):
    (forms,) = [each for each in PASSES if each.name == "in the forms of its providers"]
    assert forms.takes(Arranged(onnx.parser.parse_model(PLAIN), provider)) == taken


def test_names_are_ones_own():
    assert len({each.name for each in PASSES}) == len(PASSES)
