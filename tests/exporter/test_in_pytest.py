"""What pytest prints of a test that fails in one of our assertions: the test's own line, and none of our source."""

from __future__ import annotations

import pytest

from tests.processes import python

_TESTS = {
    "assert_roundtrip": """
        import exporter.testing
        from tests.exporter.verification import targets

        def test_it():
            exporter.testing.assert_roundtrip(*targets.wrong_backward())
    """,
    "check_gradients": """
        import onnx.parser
        import exporter

        def test_it():
            model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float[3] x) => (float[3] y) { y = Neg(x) }')
            exporter.check_gradients(model, overrides={"Neg": lambda op, g, x: g})
    """,
}


@pytest.mark.parametrize("name", list(_TESTS))
def test_pytest_shows_the_line_of_the_test_alone(name, tmp_path):
    text = "\n".join(line[8:] for line in _TESTS[name].splitlines())
    (tmp_path / "test_it.py").write_text(text)
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path / "test_it.py"), cwd=tmp_path)
    assert done.returncode == 1 and "AssertionError" in done.stdout, done.stdout + done.stderr
    assert f"{name}(" in done.stdout and "test_it.py:" in done.stdout
    assert "raise AssertionError" not in done.stdout and "__tracebackhide__" not in done.stdout and f"def {name}" not in done.stdout
