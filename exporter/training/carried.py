"""What goes round from step to step: the inputs of a training step that an output of the step before feeds."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from symbolics.errors import ExportError
from symbolics.graph.values import name_of

__all__ = ["INPUTS", "LOSS", "NORM", "OURS", "Carried", "setting"]

LOSS, NORM = "loss", "gradient_norm"
#: Hyperparameters that are inputs of a step -> the input of the first group of parameters.
INPUTS = {"lr": "learning_rate", "weight_decay": "weight_decay"}
#: Names that a step gives to values of its own.
OURS = re.compile(rf"{LOSS}|{NORM}|({'|'.join(INPUTS.values())})(_\d+)?|(param|state|buffer)\..*", re.DOTALL)


def setting(name: str, group: int) -> str:
    """The input that is a hyperparameter of one group: ``learning_rate``, ``learning_rate_1``, ..."""
    return f"{name}_{group}" if group else name


class Carried:
    """The inputs of a step with their first values, and the value that each has in the next step.

    Attributes:
        graph: The step's graph.
        initial: name of an input -> its first value.
        next: input -> the value it has in the next step.
        written: A parameter that the model's forward changes -> its value behind the forward, of which the optimizer makes the next.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.initial: dict[str, np.ndarray] = {}
        self.next: dict[ir.Value, ir.Value] = {}
        self.written: dict[ir.Value, ir.Value] = {}

    def free_names(self) -> None:
        """Take the names of the step's own inputs and outputs away from values of the model.

        Raises:
            ExportError: An argument of the model has such a name.
        """
        for node in self.graph:
            for value in node.outputs:
                if OURS.fullmatch(value.name or ""):
                    value.name = f"{value.name}/value"
        for value in self.graph.inputs:
            if OURS.fullmatch(name_of(value)):
                raise ExportError(
                    f"an argument of the model is called {value.name!r}, a name that a training step uses itself: rename the argument"
                )

    def from_initializer(self, name: str, initializer: str) -> ir.Value:
        """Make an input of an initializer."""
        value = self.graph.initializers.pop(initializer)
        tensor = value.const_value
        assert tensor is not None
        self.initial[name] = tensor.numpy().copy()  # the model goes on training, maybe
        value.const_value = None
        value.name = name
        self.graph.inputs.append(value)
        return value

    def new(self, name: str, initial: np.ndarray) -> ir.Value:
        """Add an input."""
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(initial.dtype)), shape=ir.Shape(initial.shape))
        self.graph.inputs.append(value)
        self.initial[name] = initial
        return value

    def write_outputs(self, loss: ir.Value, reported: Mapping[str, ir.Value], given: Mapping[str, ir.Value]) -> None:
        """Make the outputs: the loss, what else is reported, each a number, outputs of the model, then the next values in the order of the inputs."""
        taken: set[ir.Value] = set()
        for value in (loss, *reported.values()):
            value.shape = ir.Shape(())
        for name, value in ((LOSS, loss), *reported.items(), *given.items()):
            self._output(name, value, value, taken)
        for old in [value for value in self.graph.inputs if value in self.next]:
            self.next[old] = self._output(f"{old.name}.next", self.next[old], old, taken)

    def _output(self, name: str, value: ir.Value, like: ir.Value, taken: set[ir.Value]) -> ir.Value:
        """Make an output of a value; it gets a node of its own where it is an input, or an output already."""
        if value.producer() is None or value in taken:
            node = ir.Node("", "Identity", [value], name=f"{name}/identity")
            self.graph.append(node)
            value = node.outputs[0]
        value.name, value.type, value.shape = name, like.type, like.shape
        taken.add(value)
        self.graph.outputs.append(value)
        return value
