"""What is shown of a text that a file put into a message."""

from __future__ import annotations

import re

import pytest

from exporter.files.proto import MissingFileError
from symbolics import errors
from symbolics.capture.undifferentiable import is_refusal
from symbolics.text import causes, message
from tests.processes import ROOT

HOSTILE = {
    "long": "a" * 10**6,
    "many lines": "\n".join("line" for _ in range(1000)),
    "many long lines": "\n".join("b" * 10**4 for _ in range(1000)),
    "control characters": "a\x1b[2Jb\0c\x07\x9b",
    "a lone surrogate": "a\udc80b",
    "lines of another kind": "a\x0bb\x0cc\x85d\u2028e\u2029f\x1cg",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("error", [*(getattr(errors, name) for name in errors.__all__ if name.endswith("Error")), MissingFileError])
def test_no_message_is_endless_or_moves_the_cursor(error, text):
    said = str(error(text))
    assert len(said.splitlines()) <= 6
    assert len(said) <= 2000
    assert all(character.isprintable() or character == "\n" for character in said)
    said.encode()


def test_honest_messages_stay():
    text = "the node 'x' (Conv) in layer.0:\n  its weight is of type float16,\n  é ü 漢: export it in another one"
    assert message(text) == text
    assert str(errors.FormatError.damaged("a place", "it is wrong")) == "a place: it is wrong: the file is damaged"


def test_no_message_puts_an_article_before_a_name():
    """ "it is a int": what stands there may begin with a vowel."""
    found = []
    for package in ("exporter", "symbolics"):
        for path in (ROOT / package).rglob("*.py"):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if re.search(r"\ban? \{(?!['\"])(?:\w+\()*(?:type\(|kind\b|name\b|value\.type)", line) or re.search(
                    r"\ba (?:int|enum|object|array|index|error|input|output)\b", line
                ):
                    found.append(f"{path.name}:{number}: {line.strip()}")
    assert found == []


def test_a_chain_of_causes_may_be_a_circle():
    one, two = KeyError("one"), ValueError("two")
    one.__cause__, two.__context__ = two, one
    assert [*causes(one)] == [one, two]
    assert [*causes(two)] == [two]
    assert [*causes(two, contexts=True)] == [two, one]
    assert not is_refusal(one)
