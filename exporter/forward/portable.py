"""Portable files: calls of Functions and operators as ONNX functions with their own backward, where a graph can stand for them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import sympy

from exporter.files.program import PortableCall
from exporter.forward.fold import fold
from exporter.forward.older_opset import lower
from exporter.forward.written import check_written
from exporter.gradient_graph.conversion import OPSET
from exporter.gradient_graph.inference import infer_shapes
from symbolics import quirks, torch_private as private
from symbolics.capture.binding import TracedSize
from symbolics.capture.opaque_op import Record
from symbolics.capture.translate import translations
from symbolics.errors import ExportError, FormatError, PythonopWarning
from symbolics.graph.walk import walk
from symbolics.node.names import (
    LINKS_KEY,
    MODULE_PROPERTY,
    OPAQUE_PROPERTY,
    ORT_DOMAIN,
    PORTABLE_DOMAIN,
    QUANTIZER_PROPERTY,
    SOURCE_PROPERTY,
)
from symbolics.node.patterns import Patterns
from symbolics.portable.functions import functions_of, rename
from symbolics.portable.joint import Untraceable, trace
from symbolics.portable.reasons import untranslated
from symbolics.text import cause
from symbolics.users import warn

__all__ = ["StaysOpaque", "make_portable", "named"]


def named(
    records: Mapping[ir.Node, Record], axes: Sequence[tuple[ir.Value, Sequence[str]]], equal: Mapping[str, str]
) -> dict[ir.Node, Record]:
    """Records whose sizes are those that the user has named: of axes with one name, torch.export makes two sizes until an operator takes both.

    Args:
        records: What an export captured.
        axes: The inputs of the graph, with the sizes of their axes as the records call them.
        equal: Sizes that are others of these.
    """
    names = {
        old: sympy.Symbol(str(size.value), integer=True, positive=True)
        for value, before in axes
        for old, size in zip(before, value.shape or (), strict=False)
        if isinstance(size, ir.SymbolicDim) and size.value is not None
    }
    names |= {size: names[other] for size, other in equal.items() if other in names}

    def of(dim: Any) -> Any:
        if isinstance(dim, int):
            return dim
        found = dim.xreplace({symbol: names[str(symbol)] for symbol in dim.free_symbols if str(symbol) in names})
        return int(found) if found.is_Integer else found

    return {node: replace(record, sizes=[[of(dim) for dim in dims] for dims in record.sizes]) for node, record in records.items()}


def make_portable(
    model: ir.Model, records: Mapping[ir.Node, Record], portable: Patterns | bool, unsaid: Mapping[Any, ExportError]
) -> list[PortableCall]:
    """Put ONNX functions in the place of PythonOps, in place.

    Args:
        model: What an export has just finished.
        records: What it captured of each of its PythonOps.
        portable: Which Functions; True: all that a graph can stand for.
        unsaid: Functions with arguments that no node can say, and why: they are portable, too.

    Returns:
        What became of each call, in the order of the graph.

    Raises:
        ExportError: A graph cannot stand for a Function that a pattern names; the message says why.
        StaysOpaque: Nor for one that was captured as no PythonOp could say it.
    """
    calls: list[PortableCall] = []
    made, found = _Made(model, records), list[tuple[ir.Node, ir.Function]]()
    refused: list[tuple[Record, Untraceable]] = []
    for node in walk(model.graph):
        record = records.get(node)
        if record is None:
            continue
        wanted = isinstance(portable, Patterns) and portable.matches(record.function)
        if not wanted and portable is not True and record.function not in unsaid:
            continue
        name, place = record.call.name, (record.module, record.source)
        if record.chosen and not wanted:
            calls.append(PortableCall(name, *place, "PythonOp", record.chosen))
            continue
        used = tuple(bool(value.uses()) or value.is_graph_output() for value in node.outputs[1:])
        try:
            functions = made.of_call(node, record, used)
        except Untraceable as error:
            if wanted:
                refused.append((record, error))
                continue
            if record.traced is not None:
                raise StaysOpaque(record.function, str(error)) from error
            calls.append(PortableCall(name, *place, "PythonOp", str(error)))
            node.metadata_props[OPAQUE_PROPERTY] = str(error)
            continue
        found.append((node, functions[0]))
        calls.append(PortableCall(name, *place, "function", "" if wanted or portable is True else str(unsaid[record.function])))
    if refused:
        raise _refusal(refused) from refused[0][1].__cause__
    for node, function in found:
        _replace(node, function)
    made.add()
    _warn(calls)
    return calls


def _refusal(refused: Sequence[tuple[Record, Untraceable]]) -> ExportError:
    """What to raise where Functions have to be portable and cannot be: all of them, and why the first is not."""
    record, error = refused[0]
    name = record.call.name
    others = list(dict.fromkeys(each.call.name for each, _ in refused if each.call.name != name))
    likewise = f"  likewise, each for a reason of its own: {', '.join(others[:6])}{', ...' if len(others) > 6 else ''}\n" if others else ""
    write = (
        "" if str(error).endswith("please report it") else "write it in torch's operators (docs/portable.md#make-a-function-portable), or "
    )
    return ExportError(
        f"{name}, called in module {record.module or '<root>'} at {record.source or 'a line unknown'}: no ONNX function can stand for it: {str(error).rstrip('.')}.\n"
        f"{likewise}  way out: {write}leave it out of portable=, and it stays a PythonOp"
    )


class StaysOpaque(Exception):
    """The model is to be exported again: no function can stand for a Function that was captured for one."""

    def __init__(self, function: type, reason: str) -> None:
        super().__init__(reason)
        self.function, self.reason = function, reason


class _Made:
    """The functions that a file has already, by what they stand for: equal calls share one."""

    def __init__(self, model: ir.Model, records: Mapping[ir.Node, Record]) -> None:
        self.model, self.records = model, records
        self.known: dict[Any, list[ir.Function] | Untraceable] = {}
        self.texts: dict[bytes, list[ir.Function]] = {}
        self.names: set[str] = set()

    @functools.cached_property
    def fixed(self) -> dict[ir.Node, list[list[Any]]]:
        """`_fixed_sizes` of the model: it takes an inference of all shapes, and most files need none."""
        return _fixed_sizes(self.model, self.records)

    def of_call(self, node: ir.Node, record: Record, used: tuple[bool, ...]) -> list[ir.Function]:
        """The functions of a call, for any sizes or else for those that are fixed.

        Raises:
            Untraceable: There are none.
        """
        try:
            return self.functions(record, used)
        except Untraceable:
            if (sizes := self.fixed.get(node)) is None:
                raise
            return self.functions(replace(record, sizes=sizes), used)

    def functions(self, record: Record, used: tuple[bool, ...]) -> list[ir.Function]:
        """The functions of a call.

        Raises:
            Untraceable: There are none.
        """
        hidden = tuple((id(module), path, index) for module, path, index in record.hidden)
        key = (record.function, replace(record.traced or record.call, id=""), repr(record.sizes), hidden, used)
        found = self.known.get(key)
        if found is None:
            try:
                found = self._make(record, used)
            except Untraceable as error:
                found = error
            self.known[key] = found
        if isinstance(found, Untraceable):
            raise found
        return found

    def _make(self, record: Record, used: tuple[bool, ...]) -> list[ir.Function]:
        opset = self.model.opset_imports[""]
        with _quiet():
            translator = private.translator_of(translations)
            joint = trace(record, used, translator.decompositions)
            try:
                translated = translator.translate(joint.graph, max(opset, OPSET))
            except Exception as error:
                raise Untraceable(untranslated(error, joint.graph, cause(error))) from error
        rename(translated, joint)
        quirks.give_digits(translated, joint.graph)
        quirks.apply(quirks.TRANSLATED, translated)
        with contextlib.ExitStack() as stack:
            for apart in quirks.OPTIMIZING:
                stack.enter_context(apart(translated.graph))
            fold(translated)
        quirks.apply(quirks.OPTIMIZED, translated)
        rename(translated, replace(joint, constants=[]))
        if opset < OPSET:
            try:
                lower(translated, opset)
            except ValueError as error:
                raise Untraceable(str(error)) from error
        check_written(translated, joint)
        stem = re.sub(r"\W+", "_", record.call.name)
        try:
            functions = functions_of(translated, joint, stem, record.call.name)
        except ValueError as error:  # values that no list of what is kept has
            raise Untraceable(f"its forward and its backward cannot be parted into two functions of the file ({cause(error)})") from error
        text = b"".join(ir.to_proto(f).SerializeToString(deterministic=True) for f in functions)
        if text in self.texts:
            return self.texts[text]
        for number in itertools.count(2):
            names = {function.name for function in functions}
            if self.names.isdisjoint(names):
                break
            functions = functions_of(translated, joint, f"{stem}_{number}", record.call.name)
        self.names |= names
        self.texts[text] = functions
        return functions

    def add(self) -> None:
        """Put the functions into the model, and import what they are of."""
        nodes = list(walk(self.model.graph))
        for functions in self.texts.values():
            for function in functions:
                self.model.functions[function.identifier()] = function
        if self.texts:
            self.model.opset_imports[PORTABLE_DOMAIN] = 1
            self.model.metadata_props[LINKS_KEY] = str(len(self.texts))
            self.model.ir_version = max(self.model.ir_version, 10)  # the oldest with metadata of functions
        if not any(node.domain == ORT_DOMAIN for node in nodes):
            self.model.opset_imports.pop(ORT_DOMAIN, None)


def _fixed_sizes(model: ir.Model, records: Mapping[ir.Node, Record]) -> dict[ir.Node, list[list[Any]]]:
    """The sizes of calls that TorchScript traced with open axes, with those as numbers that ONNX infers to be so from the inputs of the model.

    A trace knows the example's numbers alone, so that each might come from an open axis (`symbolics.capture.binding.Slots.dims`).
    """
    if not any(isinstance(dim, TracedSize) for record in records.values() for dims in record.sizes for dim in dims):
        return {}
    copy = model.clone()
    for node in walk(copy.graph):
        for value in node.outputs:
            value.shape = None  # torch wrote some of them down as the example has them
    try:
        infer_shapes(copy)
    except FormatError:  # what the export's own check says in its words
        return {}
    found = {}
    for node, twin in zip(walk(model.graph), walk(copy.graph), strict=True):
        record = records.get(node)
        if record is None:
            continue
        shapes = [None if value is None or value.shape is None else list(value.shape) for value in twin.inputs]
        fixed = [
            [number if isinstance(number, int) and dim == TracedSize.of(number) else dim for dim, number in zip(dims, shape, strict=True)]
            if shape is not None and len(shape) == len(dims)
            else dims
            for dims, shape in zip(record.sizes, shapes, strict=False)
        ]
        if fixed != record.sizes and len(fixed) == len(record.sizes):
            found[node] = fixed
    return found


def _replace(node: ir.Node, function: ir.Function) -> None:
    """Put the call of a function in the place of a PythonOp."""
    results = node.outputs[1:]
    # All outputs, also those that only a backward takes: ONNX's shape inference wants the number of the function's.
    call = ir.Node(PORTABLE_DOMAIN, function.name, node.inputs, num_outputs=len(function.outputs), name=node.name)
    for kept, formal in zip(call.outputs[len(results) :], function.outputs[len(results) :]):
        kept.name, kept.type = f"{node.name}/{formal.name}", formal.type
        kept.shape = None if formal.shape is None else ir.Shape([None] * len(formal.shape))
    for key in (MODULE_PROPERTY, QUANTIZER_PROPERTY, SOURCE_PROPERTY):
        if key in node.metadata_props:
            call.metadata_props[key] = node.metadata_props[key]
    graph = node.graph
    assert graph is not None
    graph.insert_before(node, call)
    for old, new in zip(results, call.outputs):
        name, old.name = old.name, None
        new.name, new.type, new.shape = name, old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _warn(calls: list[PortableCall]) -> None:
    told: dict[tuple[str, str], PortableCall] = {}
    for call in calls:
        if call.kind == "PythonOp" or call.reason:
            told.setdefault((call.function, call.reason), call)
    for call in told.values():
        if call.kind == "function":
            warn(
                f"in module {call.module or '<root>'} at {call.source or 'a line unknown'}: {call.reason}. Its forward and its backward are standard operators "
                "in the file, as with portable=True."
            )
            continue
        warn(
            f"{call.function} in module {call.module or '<root>'} at {call.source or 'a line unknown'} stays a PythonOp, and the file needs Python: {call.reason}."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch's exporter logs what it registers; tracing warns of what the user did not write."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", PythonopWarning)
            yield
    finally:
        logger.setLevel(level)
