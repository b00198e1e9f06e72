"""Where a node of a file comes from: the module in whose forward it was made, and what part of the model it belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

import onnx_ir as ir

from symbolics.graph.values import SCOPES, scope_of
from symbolics.graph.walk import reads
from symbolics.node.backward import is_backward
from symbolics.node.metadata import pairing_of, read_state, step_of, tangents_of
from symbolics.node.names import MODULE_PROPERTY, ORT_DOMAIN, PYTHON_OP_GRAD

__all__ = ["PARTS", "Part", "Places", "path_in_name"]

#: What a node belongs to. ``update``: the optimizer of a training step.
Part = Literal["forward", "gradient", "tangent", "update"]
PARTS: tuple[Part, ...] = get_args(Part)

_OURS = re.compile(r"(grad|tangent|step)\d*/")  # prefixes of the names of nodes that pythonop made


def path_in_name(name: str) -> str:
    """The path of modules in a node's name, as TorchScript and others write it: ``/blocks/blocks.0/up/Gemm`` is ``blocks.0.up``; "" for none."""
    parts: list[str] = []
    for part in filter(None, name.split("/")[:-1]):
        if parts and part.startswith(f"{parts[-1]}."):  # a child of a list is called by both names
            parts.pop()
        parts.append(part)
    return ".".join(parts)


class Places:
    """The part and the module of each node of a model's main graph.

    Of the forward, the module is what the exporter wrote. A node of the gradient graph belongs to the module whose values it reads, or
    whose parameter's gradient it gives; a node of the optimizer to the module of its parameter.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._step = step_of(model)
        self._keys = {entry.initializer: key for key, entry in (read_state(model.metadata_props) or {}).items()}
        self._parts: dict[ir.Node, Part] = self._find_parts()
        self._modules: dict[ir.Node, str] = {}
        for node in model.graph:
            if self._parts[node] == "forward":
                self._modules[node] = self.written(node)
        self._follow()

    def part(self, node: ir.Node) -> Part:
        """What a node belongs to."""
        return self._parts[node]

    def module(self, node: ir.Node) -> str:
        """The path of its module, with dots; "" for the model itself, and where nothing is known."""
        return self._modules.get(node, "")

    # ---------------------------------------------------------------------------------------------------------- parts
    def _find_parts(self) -> dict[ir.Node, Part]:
        model = self._model
        gradients, tangents = pairing_of(model), tangents_of(model)
        made: set[str] = set()
        behind: Part = "forward"
        if self._step is not None:
            buffers = set(self._step.buffers.values())
            made = {name for name, taken in self._step.carried.items() if taken not in buffers}
            behind = "gradient"
        if gradients is not None:
            made, behind = made | set(gradients.outputs.values()), "gradient"
        if tangents is not None:
            made, behind = made | set(tangents.outputs.values()), "tangent" if gradients is None else "gradient"
        forward = _before([value for value in model.graph.outputs if value.name not in made]) if made else set(model.graph)
        if behind == "tangent":  # a PythonOpTangent gives outputs of the forward as well, so that tangents stand before these
            forward = {node for node in forward if not _OURS.match(node.name or "")}
        return {node: "forward" if node in forward else self._later(node, behind) for node in model.graph}

    def _later(self, node: ir.Node, behind: Part) -> Part:
        if self._step is not None and (node.name or "").startswith("step/"):  # as exporter.training.assemble names them
            return "update"
        return behind

    # -------------------------------------------------------------------------------------------------------- modules
    def written(self, node: ir.Node) -> str:
        """What the exporter wrote of a node, or of a node in its bodies."""
        props = node.metadata_props
        if MODULE_PROPERTY in props:
            return props[MODULE_PROPERTY]
        found = scope_of(node) if SCOPES in props or _OURS.match(node.name or "") else path_in_name(node.name or "")
        if self._step is not None:  # the module around the model and its loss
            found = found.removeprefix("model").removeprefix(".") if found == "model" or found.startswith("model.") else found or "loss"
        return found

    def _follow(self) -> None:
        """Modules of nodes that no exporter wrote, in the order of the graph; of an optimizer's, from what they lead to."""
        owner, gives = self._owners(), self._given()
        order = {module: i for i, module in reversed(list(enumerate(self._modules.values())))}
        for node in reversed(self._model.graph):
            if self._parts[node] == "update":
                known = {gives[str(output.name)] for output in node.outputs if output.name in gives}
                known = known or {self._modules.get(use.node, "") for output in node.outputs for use in output.uses()}
                self._modules[node] = known.pop() if len(known) == 1 else ""
        for node in self._model.graph:
            if self._parts[node] in ("forward", "update"):
                continue
            given = [gives[str(output.name)] for output in node.outputs if output.name in gives]
            values = [value for value in node.inputs if value is not None]
            mine = [owner[value] for value in values if value in owner]
            beside = [module for value in values if value not in owner for module in self._beside(value)]
            if _reads_context(node) and values and (maker := values[0].producer()) in self._modules:  # the call whose context it reads
                mine = [self._modules[maker]]
            makers = [
                maker for value in values if (maker := value.producer()) is not None and self._parts.get(maker, "forward") != "forward"
            ]
            found = given or mine or beside or [self._modules[maker] for maker in makers if maker in self._modules]
            if found:
                # Of several the innermost; of those, what comes first in the forward: the sweep goes on from what comes behind it.
                self._modules[node] = max(found, key=lambda module: (_depth(module), -order.get(module, 0)))

    def _owners(self) -> dict[ir.Value, str]:
        """The module of each parameter, buffer, and state of an optimizer: its key without the last name."""
        graph = self._model.graph
        keys = dict(self._keys)
        if self._step is not None:
            keys |= {name: key for table in (self._step.parameters, self._step.buffers) for key, name in table.items()}
        values = {str(value.name): value for value in (*graph.inputs, *graph.initializers.values())}
        return {values[name]: key.rpartition(".")[0] for name, key in keys.items() if name in values}

    def _given(self) -> dict[str, str]:
        """name of an output -> the module of the parameter whose gradient or next value it is."""
        keys, found = self._keys, {}
        if (pairing := pairing_of(self._model)) is not None:
            found = {output: keys[name].rpartition(".")[0] for name, output in pairing.outputs.items() if name in keys}
        if self._step is not None:
            inputs = {name: key.rpartition(".")[0] for key, name in self._step.parameters.items()}
            found |= {output: inputs[taken] for output, taken in self._step.carried.items() if taken in inputs}
        return found

    def _beside(self, value: ir.Value) -> Iterator[str]:
        """The modules of the forward that read a value, or else of the one that made it."""
        readers = [use.node for use in value.uses() if self._parts.get(use.node) == "forward"]
        maker = value.producer()
        if maker is not None and self._parts.get(maker) == "forward":
            readers = readers or [maker]
            yield from (self._modules[node] for node in readers)
        elif maker is None and not (
            (self._keys or self._step) and value.is_initializer()
        ):  # with a table of the state, the others are constants
            yield from (self._modules[node] for node in readers)


def _reads_context(node: ir.Node) -> bool:
    return is_backward(node) or (node.domain, node.op_type) == (ORT_DOMAIN, PYTHON_OP_GRAD)


def _before(values: Iterable[ir.Value]) -> set[ir.Node]:
    """The nodes that make these values, and all before them."""
    agenda = [node for value in values if (node := value.producer()) is not None]
    found = set(agenda)
    while agenda:
        for value in reads(agenda.pop()):
            maker = value.producer()
            if maker is not None and maker not in found:
                found.add(maker)
                agenda.append(maker)
    return found


def _depth(module: str) -> int:
    return module.count(".") + bool(module)
