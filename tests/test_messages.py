"""Advice names only what exists: each ``word=`` in a message is a parameter of something public."""

from __future__ import annotations

import ast
import inspect
import re

import onnx
import onnxruntime
import torch

import exporter
from exporter.cli import COMMANDS, main
from exporter.runtime.store import ContextStore
from exporter.training.trainer import Trainer
from tests.processes import ROOT

#: What is open to a message: our functions and classes, and those of others that it may send people to.
PUBLIC = [getattr(exporter, name) for name in dir(exporter) if callable(getattr(exporter, name))]
PUBLIC += [Trainer, Trainer.load, exporter.Program.save, exporter.testing.assert_roundtrip, torch.onnx.export, torch.export.export]
PUBLIC += [torch.nn.Module.load_state_dict, torch.export.Dim, onnxruntime.InferenceSession.__init__]
PUBLIC += [
    torch.autograd.grad,
    torch.autograd.functional.jacobian,
    torch.func.grad,
    torch.nn.functional.embedding,
    torch.optim.SGD,
    torch.utils.data.DataLoader,
]
PUBLIC += [onnx.checker.check_model, ContextStore]
#: Of functions of ours that no user calls.
INSIDE = {"gradients", "wanted"}
#: What takes the text of an error or of a warning.
SAYING = frozenset(("warn", "_warn", "_notice", "refuse", "Failure", "Note"))
#: Doors of a file: what a message of the gate advises is true of each.
DOORS = [exporter.load, exporter.inference_session, exporter.reference_evaluator, exporter.session_options, Trainer.__init__, Trainer.load]


def _parameters(of):
    try:
        return set(inspect.signature(of).parameters)
    except (TypeError, ValueError):
        return set()


def _texts(path):
    """The strings of what a file raises or warns of, and of constants that say a way out; of an f-string what stands between its values."""
    tree = ast.parse(path.read_text())
    said = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _name(node.func) in SAYING)]
    said += [node for node in tree.body if isinstance(node, ast.Assign) and "_WAY" in _name(node.targets[0])]
    for node in {inner for each in said for inner in ast.walk(each)}:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def _name(node):
    return getattr(node, "attr", getattr(node, "id", ""))


def _advised(text):
    """``(function, word)`` of each ``word=`` in a text, function "" where it names none."""
    for call in re.finditer(r"exporter\.(\w+)\(([^()]*)\)", text):
        yield from ((call[1], word) for word in re.findall(r"\b([a-z_]+)=", call[2]))
    yield from (("", word) for word in re.findall(r"(?<![\w.<%-])([a-z_]{2,})=(?=[\s,.;:)'\"\[TFN]|$)", text))


def test_each_argument_that_a_message_names_is_there():
    known = {word for each in PUBLIC for word in _parameters(each)} | INSIDE
    wrong = []
    for folder in ("exporter", "symbolics"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, text in _texts(path):
                for function, word in _advised(text):
                    takes = _parameters(getattr(exporter, function, None)) if function else known
                    if word not in takes:
                        wrong.append(f"{path.relative_to(ROOT)}:{line}: {function}({word}=)")
    assert not wrong


def test_what_the_gate_advises_holds_at_each_door():
    shared = set.intersection(*map(_parameters, DOORS))
    words = {word for _, text in _texts(ROOT / "exporter/files/trust.py") for _, word in _advised(text)}
    assert words and words <= shared | {"cls", "obj", "name"}


def test_each_option_that_a_message_names_is_there():
    commands = [main, *(main.get_command(None, name) for name in COMMANDS)]
    options = {option for command in commands for each in command.params for option in (*each.opts, *each.secondary_opts)}
    wrong = []
    for folder in ("exporter", "symbolics"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, text in _texts(path):
                wrong += [
                    f"{path.relative_to(ROOT)}:{line}: {word}"
                    for word in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)
                    if word not in options
                ]
    assert not wrong
