"""What is differentiated with respect to what, and the names of the gradients or tangents."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from exporter.files.weights import foreign_state
from symbolics.errors import ArgumentError, PythonopError
from symbolics.graph.scope import graph_names
from symbolics.graph.values import is_float, is_float_tensor, name_of, rank_of
from symbolics.graph.walk import walk
from symbolics.node.metadata import read_state, results_of
from symbolics.text import shown

__all__ = ["Boundary"]


class Boundary:
    """Inputs and outputs of the gradient graph of a model.

    Args:
        model: The model.
        wrt: Names of what to differentiate with respect to; None: the default of `build_gradient_graph`.
        outputs: Names of the outputs to differentiate; None: all float outputs.
        stem: What the names of gradients end in, and those of the new nodes begin with.
        lenient: Whether an output may depend on nothing in wrt, though the caller named it.
        variable: Names of further initializers that are no constants.

    Attributes:
        wrt: The values to differentiate with respect to.
        prefix: Of the names of all nodes of the gradient graph.
        idle: What is raised where an output that the caller named depends on nothing in wrt; None: an ArgumentError that names both.

    Raises:
        ArgumentError: A name does not exist, stands twice or has no gradient.
    """

    def __init__(
        self,
        model: ir.Model,
        wrt: Iterable[str] | None,
        outputs: Iterable[str] | None,
        *,
        stem: str = "grad",
        lenient: bool = False,
        variable: Iterable[str] = (),
    ) -> None:
        graph = self._graph = model.graph
        state = read_state(model.metadata_props)
        sources = {name_of(v): v for v in (*graph.inputs, *graph.initializers.values())}
        if wrt is None:
            if state is None:
                names = [n for n, trained in foreign_state(model).items() if trained]
            else:
                names = [e.initializer for e in state.values() if e.trainable and e.initializer in sources]
            wrt = dict.fromkeys(n for n in (*names, *map(name_of, graph.inputs)) if is_float_tensor(sources[n]))
        self.wrt = _named("wrt", wrt, sources, "input or initializer")
        ends = {name_of(v): v for v in graph.outputs}
        results = {name_of(v) for v in results_of(model)}
        self.idle: PythonopError | None = None
        self._strict = outputs is not None and not lenient
        self._names = set(
            map(
                name_of,
                _named(
                    "outputs",
                    [n for n, v in ends.items() if is_float_tensor(v) and n in results] if outputs is None else outputs,
                    ends,
                    "output",
                ),
            )
        )
        targets = set(map(name_of, self.wrt))
        self._both = targets & self._names
        self._variable = {*targets, *variable, *(e.initializer for e in (state or {}).values())}
        self._taken = {*sources, *ends, *(o.name for node in walk(graph) for o in node.outputs if o.name)}
        self._stem = stem
        before = [n for n in graph_names(graph) if n.startswith(stem)]
        generation = next(i for i in range(len(before) + 1) if not any(n.startswith(f"{stem}{i or ''}/") for n in before))
        self.prefix = f"{stem}{generation or ''}/"

    @property
    def outputs(self) -> list[ir.Value]:
        """The differentiable outputs; an expansion may have put another value under a name."""
        return [v for v in dict.fromkeys(self._graph.outputs) if v.name in self._names]

    def is_constant(self, value: ir.Value) -> bool:
        """Whether an initializer may be folded: no parameter, no buffer; of a foreign file only scalars and integers."""
        return value.name not in self._variable and (not is_float(value) or rank_of(value) == 0)

    def input_name(self, value: ir.Value) -> str:
        """The name of the input that takes the gradient of an output, or the tangent of a target."""
        return self._fresh(name_of(value), f"_{self._stem}_in")

    def output_name(self, value: ir.Value) -> str:
        """The name of the output that gives the gradient of a target, or the tangent of an output."""
        return self._fresh(name_of(value), f"_{self._stem}_out")

    def _fresh(self, name: str, other: str) -> str:
        found = f"{name}_{self._stem}"
        if name in self._both or found in self._taken:
            found = f"{name}{other}"
        count = 1
        while found in self._taken:
            count += 1
            found = f"{name}{other}{count}"
        self._taken.add(found)
        return found

    def check_outputs(self) -> None:
        """Refuse a model that has nothing to differentiate.

        Raises:
            ArgumentError: No output is a float tensor.
        """
        if not any(map(is_float_tensor, self._graph.outputs)):
            ends = ", ".join(f"{shown(name_of(v))!r} is of type {shown(str(_type_of(v)))}" for v in self._graph.outputs[:4])
            raise ArgumentError(
                f"no output of the model is a float tensor, so nothing has a {'tangent' if self._stem == 'tangent' else 'gradient'}: {ends}.\n"
                "  way out: make an output of the float values in front of it, such as the scores that an ArgMax reads"
            )

    def check_reached(self, active: set[ir.Value]) -> None:
        """Refuse an output that no target reaches, where the caller named it."""
        if self._strict and (idle := [v.name for v in self.outputs if v not in active]):
            raise self.idle or ArgumentError(
                f"the outputs {idle} depend on nothing in wrt in a differentiable way: leave them out of outputs, or extend wrt"
            )


def _type_of(value: ir.Value) -> object:
    return value.dtype if value.type is None or isinstance(value.type, ir.TensorType) else value.type


def _named(argument: str, names: Iterable[str], known: Mapping[str, ir.Value], kind: str) -> list[ir.Value]:
    if isinstance(names, str):
        raise ArgumentError(f"{argument} is the string {names!r}: give a list of names")
    out: dict[ir.Value, None] = {}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 3) or list(known)[:5]
            raise ArgumentError(f"{argument} names {name!r}, and the model has no such {kind}; near it: {near}")
        if not is_float_tensor(known[name]):
            raise ArgumentError(
                f"{argument} names {name!r}, whose type is {_type_of(known[name])}: only floating point tensors have a gradient"
            )
        if known[name] in out:
            raise ArgumentError(f"{argument} names {name!r} twice")
        out[known[name]] = None
    return list(out)
