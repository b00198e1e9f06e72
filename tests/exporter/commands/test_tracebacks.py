"""Control characters of a file's names reach no terminal, where errors are shown whole, too."""

from __future__ import annotations

import onnx
import pytest
from click.testing import CliRunner
from onnx import parser

import exporter
from exporter.cli import main
from exporter.errors import full, short
from symbolics.errors import FormatError
from tests.processes import python

BAD = "Foo\x1b]0;OWNED\x07\x1b[31m\x9b31m\u202e"


def shows_none(text: str) -> bool:
    return "OWNED" in text and all(c.isprintable() or c in "\n\t" for c in text)


@pytest.fixture
def file(tmp_path):
    proto = parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { y = Abs(x) }')
    proto.graph.node[0].op_type = BAD
    onnx.save(proto, tmp_path / "bad.onnx")
    return tmp_path / "bad.onnx"


def test_of_a_command(file):
    for more in ([], ["--traceback"]):
        result = CliRunner().invoke(main, [*more, "run", str(file)])
        assert result.exit_code == 2
        assert shows_none(result.output), ascii(result.output)
        assert ("Traceback" in result.output) == bool(more)


def test_whole(file):
    with pytest.raises(exporter.PythonopError) as caught:
        exporter.inference_session(file)
    assert shows_none(str(caught.value.whole)), ascii(str(caught.value.whole))


def test_of_a_process(file):
    done = python("-c", f"import exporter; exporter.inference_session({str(file)!r})", PYTHONOP_TRACEBACK="1")
    assert done.returncode == 1
    assert "direct cause" in done.stderr
    assert shows_none(done.stderr), ascii(done.stderr)


class _Stubborn(Exception):
    def __str__(self):
        return BAD


@pytest.mark.parametrize("kind", [ValueError, _Stubborn])
def test_of_what_an_error_was_raised_from(kind):
    @short
    def fails():
        try:
            try:
                raise ValueError(BAD)
            except ValueError as error:
                raise kind(BAD) from error
        except kind as error:
            raise FormatError("no") from error

    with full(), pytest.raises(FormatError) as caught:
        fails()
    first = caught.value.__cause__
    assert shows_none(str(first))
    assert shows_none(str(first.__cause__))
    assert first.__traceback__ is not None
