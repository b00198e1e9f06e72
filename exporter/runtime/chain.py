"""Several PythonOps that run as one, as `exporter.runtime.link` joined them."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch

from exporter.files.trust import Gate
from exporter.runtime.kernels import PythonOp, PythonOpGrad
from exporter.runtime.store import ContextStore
from symbolics.errors import FormatError, RunError
from symbolics.node.arguments import loads
from symbolics.node.call import AutogradCall
from symbolics.node.containers import Slot
from symbolics.text import shown

__all__ = ["Chain", "GradChain", "title_of"]


class Chain(PythonOp):
    """PythonOps of which each feeds one behind it: their Functions are applied one after the other, as in eager.

    To the runtimes it is a PythonOp like any other, whose ``apply`` is theirs in turn and whose context is their joint
    autograd graph.

    A link hands over the very tensor, where a node apart gets a copy. So, as with the memory of a runtime, a call's first run
    copies and looks whether forward changes it without saying so; one that does gets copies ever after.
    """

    def __init__(self, attributes: Mapping[str, Any], linked: str, gate: Gate, store: ContextStore, node_name: str = "") -> None:
        """Args:
            attributes: Those of the last call, with the inputs of all.
            linked: The calls, as `link.LINKED` has them.
            gate, store, node_name: As `PythonOp` has them.

        Raises:
            FormatError, TrustError: From one of the calls.
        """
        super().__init__(attributes, gate, store, node_name)
        lines = list(_lines(linked, self.title))
        if not self.simple or [slot.index for slot in self.args if isinstance(slot, Slot)] != list(range(len(self.args))):
            raise FormatError.damaged(self.title, "it stands for several calls, and takes more than their tensors")
        kernels = [PythonOp(data["attributes"], gate, store, data["node"]) for data in lines]
        # All values of a run stand in one list: inputs, constants, then the outputs of each call.
        self.inputs = len(self.flags)
        self.constants: list[Any] = []
        first = self.inputs + sum(not isinstance(value, Slot) for kernel in kernels for value in kernel.args)
        self.steps: list[_Call] = []
        made = 0
        for kernel, data in zip(kernels, lines, strict=True):
            places = data["places"]
            if (
                not kernel.simple_arguments
                or len(places) != len(kernel.flags)
                or not all(type(place) is int and 0 <= place < self.inputs + made for place in places)
            ):
                raise FormatError.damaged(kernel.title, "it is not joined to the calls before it as a runtime joins them")
            where = []
            for value in kernel.args:
                if isinstance(value, Slot):
                    place = places[value.index]
                    where.append(place if place < self.inputs else place - self.inputs + first)
                else:
                    where.append(self.inputs + len(self.constants))
                    self.constants.append(value)
            made += len(kernel.output_dtypes)
            self.steps.append(_Call(kernel, where, first))
        if kernels[-1].call.outputs != self.call.outputs or kernels[-1].output_dtypes != self.output_dtypes:
            raise FormatError.damaged(self.title, "its outputs are not those of the last call that it stands for")
        self.titles = _titles("PythonOp", lines)
        self.title += f" and what feeds it, {len(self.steps)} calls as one"
        self.apply = self._apply

    def find(self, call: AutogradCall, gate: Gate) -> Any:
        """Its calls find what they call one by one."""
        return None

    def check_arguments(self) -> None:
        """Those of its calls are seen one by one; its own are the inputs of all."""

    def _apply(self, *values: Any) -> Any:
        found, result = [*values, *self.constants], None
        first, versions = len(found), []
        for step in self.steps:
            if not step.shares:
                result = step.careful(found)
            elif step.only is not None:
                result = step.apply(found[step.only])
            else:
                result = step.apply(*step.arguments(found))
            if step.dtype is not None and type(result) is torch.Tensor and result.dtype is step.dtype:
                found.append(result)
                versions.append(result._version)
            else:
                outputs = step.outputs(result)
                found += outputs
                versions += [output._version for output in outputs]
        if [value._version for value in found[first:]] != versions:
            self._refuse_change({i for i, version in enumerate(versions, first) if found[i]._version != version})
        return result

    def _refuse_change(self, changed: set[int]) -> None:
        for step in self.steps:
            if step.shares and changed.intersection(step.links):
                step.shares = False
                raise RunError(
                    f"{step.kernel.title} changed an input in place in this run, and had not in its first: the call before it has the same tensor. "
                    "From the next run on it gets copies; declare the change with ctx.mark_dirty"
                )


class _Call:
    """One call of a chain.

    Attributes:
        arguments: Its arguments, from the list of all values.
        only: The place of its one argument in that list; None where it has none or several.
        links: Those places in the list that other calls filled.
        dtype: Of its output, None where it has several.
        shares: Whether it gets the very tensors of the calls before it; None: not known yet.
    """

    def __init__(self, kernel: PythonOp, where: list[int], first: int) -> None:
        self.kernel = kernel
        self.apply = kernel.apply
        # itemgetter gives a tuple from two items on: of one, a slice is asked for.
        self.arguments = itemgetter(*where) if len(where) > 1 else itemgetter(slice(where[0], where[0] + 1) if where else slice(0, 0))
        self.where = where
        self.only = where[0] if len(where) == 1 else None
        self.links = [place for place in where if place >= first]
        self.dtype = kernel.output_dtypes[0] if isinstance(kernel.call.outputs, Slot) else None
        self.shares: bool | None = None

    def careful(self, found: list[Any]) -> Any:
        """Apply the Function to copies of what other calls returned; the first run decides whether it needs them."""
        args = [found[place].clone() if place in self.links else found[place] for place in self.where]
        result = self.apply(*args)
        if self.shares is None:
            self.shares = all(_unchanged(arg, found[place]) for arg, place in zip(args, self.where, strict=True) if place in self.links)
        return result

    def outputs(self, result: Any) -> list[Any]:
        """The tensors of what apply returned.

        Raises:
            RunError: It is something else than the file says.
        """
        outputs: list[Any] = [None] * len(self.kernel.output_dtypes)
        self.kernel.collect(self.kernel.call.outputs, result, outputs)
        return outputs


class GradChain(PythonOpGrad):
    """The backward of a `Chain`: one call of the engine for all of them."""

    def __init__(self, attributes: Mapping[str, Any], linked: str, store: ContextStore, node_name: str = "") -> None:
        super().__init__(attributes, store, node_name)
        self.titles = _titles("PythonOpGrad", _lines(linked, self.title))
        self.title += " and those behind it, as one"


def _unchanged(copy: torch.Tensor, original: torch.Tensor) -> bool:
    same = torch.equal(copy.detach(), original.detach()) or torch.allclose(copy.detach(), original.detach(), rtol=0, atol=0, equal_nan=True)
    return copy._version == 0 and same


def _lines(linked: str, title: str) -> Iterator[dict[str, Any]]:
    for line in linked.split("\n"):
        try:
            data = loads(line)
        except FormatError as error:
            raise FormatError(f"{title}, the calls that it stands for: {error}") from error
        kinds = {"node": str, "attributes": dict, "places": list}
        if not isinstance(data, dict) or not all(isinstance(data.get(key), kind) for key, kind in kinds.items()):
            raise FormatError.damaged(f"{title}, the calls that it stands for", "they are not what a runtime writes")
        yield data


def _titles(kind: str, lines: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Function -> how messages name its nodes."""
    nodes: dict[str, list[str]] = {}
    for data in lines:
        nodes.setdefault(str(data["attributes"].get("name", "")), []).append(data["node"])
    out = {}
    for name, found in nodes.items():
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        out[name] = f"{kind} {', '.join(repr(shown(node)) for node in found[:3])}{more} ({shown(name)})"
    return out


def title_of(kernel: PythonOp | PythonOpGrad, error: BaseException) -> str:
    """How a message names the node that raised; in a chain, the Function whose code is innermost in the traceback."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__)) if kernel.titles else []):
        owner = frame.f_code.co_qualname.rpartition(".")[0]
        title = kernel.titles.get(f"{frame.f_globals.get('__name__')}:{owner}")
        if title is not None:
            return title
    return kernel.title
