"""A model on its way into the sweep and out of it: a copy, checked and in the rules' opset; stop-gradient marks; IR version."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Any

import onnx
import onnx_ir as ir

from exporter.files.read import open_model
from exporter.files.skeleton import SMALL, skeleton
from exporter.files.weights import lift_initializers, lift_weights
from exporter.gradient_graph.conversion import OPSET, converted
from exporter.gradient_graph.inference import infer_shapes
from symbolics.errors import FormatError
from symbolics.gradients.bodies import EXPOSED, OWN_RULE
from symbolics.graph.calls import complete_calls
from symbolics.graph.flatten import flatten, of_modules
from symbolics.graph.own_outputs import own_outputs_of_bodies
from symbolics.graph.spectra import spectra_of_open_lengths
from symbolics.graph.values import graph_of, is_mark
from symbolics.graph.walk import reads, subgraphs, walk
from symbolics.node.metadata import read_state
from symbolics.node.names import BACKWARD_KEY, LINKS_KEY, MARK_COUNT_KEY, MARK_DOMAIN, MARK_OP
from symbolics.text import shown

__all__ = ["lost_counts", "own_copy", "remove_marks", "set_ir_version"]

_OLDEST_IR = 8  # older ones have no functions, and the oldest list initializers among the inputs
_OWN_INITIALIZERS = 4  # before it, each was to be an input as well; files leave them out, and runtimes never minded
# The IR version that an element type came with.
_IR_OF_TYPE = {
    **dict.fromkeys(("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"), 9),
    **dict.fromkeys(("UINT4", "INT4"), 10),
    "FLOAT4E2M1": 11,
    "FLOAT8E8M0": 12,
    **dict.fromkeys(("UINT2", "INT2"), 13),
    **dict.fromkeys(("FLOAT6E2M3", "FLOAT6E3M2"), 14),
}
_RECURRENT = frozenset(("GRU", "LSTM", "RNN"))
_MARK = (MARK_DOMAIN, MARK_OP)


# ------------------------------------------------------------------------------------------------------------ the copy
def own_copy(source: Any, *, bounded: bool = False, forward: bool = False) -> ir.Model:
    """The model in a copy that may be changed, in an opset that the rules know, the nodes of modules in the place of calls of their functions.

    Args:
        source: The model.
        bounded: Whether `exporter.files.outlined` will make functions of modules again.
        forward: Whether nobody takes a gradient of the copy: then it may have lost what gradients depend on.

    Raises:
        FormatError: The model is not valid, or it has lost what its gradients depend on.
    """
    model = open_model(source)
    lift_weights(model)
    for node in walk(model.graph):
        for key in (EXPOSED, OWN_RULE):  # of an earlier build: to this one all outputs are alike
            node.meta.pop(key, None)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if value.type is None and tensor is not None:
            value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
        # Shapes and axes: shape inference reads them from memory alone.
        if isinstance(tensor, ir.ExternalTensor) and tensor.size <= SMALL and tensor.dtype.is_integer() and os.path.isfile(tensor.path):
            value.const_value = ir.tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)
    model.ir_version = max(model.ir_version, _OWN_INITIALIZERS)
    complete_calls(model)
    _check(model)
    if not forward:
        _check_counts(model)
    if of_modules(model):
        if bounded:  # boundaries have the types of what they stand behind
            infer_shapes(model, only_where_missing=True)
        flatten(model, bounded=bounded)
    versions = model.opset_imports
    if "ai.onnx" in versions:
        versions[""] = versions.pop("ai.onnx")
    version = versions.setdefault("", OPSET)
    model = converted(model, version) if version < OPSET else model
    if any(n.op_type in ("If", "Loop", "Scan") for n in model.graph):  # so that a body may be copied without its weights
        lift_initializers(model)
        _rename_shadows(model.graph, set())
        own_outputs_of_bodies(model, list(walk(model.graph)))
    spectra_of_open_lengths(model, list(walk(model.graph)))
    model.ir_version = max(model.ir_version, _OLDEST_IR)
    if read_state(model.metadata_props) is None:
        _doubt_lengths(model)
        _doubt_outputs(model)
    return model


def _rename_shadows(graph: ir.Graph, outer: set[str | None]) -> None:
    """Give values of bodies that hide one outside another name: a body may come to read that one."""
    made = [*graph.inputs, *(o for node in graph for o in node.outputs if o.name)]
    taken = outer.union(v.name for v in made)
    for value in made:
        if value.name in outer:
            value.name = next(name for i in itertools.count(1) if (name := f"{value.name}_{i}") not in taken)
            taken.add(value.name)
    names = outer.union(v.name for v in (*made, *graph.initializers.values()))
    for body in (body for node in graph for body in subgraphs(node)):
        _rename_shadows(body, names)


def _doubt_lengths(model: ir.Model) -> None:
    """Infer the shapes behind an LSTM or GRU anew where axes are open: those that torch.onnx declares have the example's length."""
    opened = _open_names(model)
    behind: dict[ir.Value, ir.Shape | None] = {}
    for node in model.graph if opened else ():
        if (node.op_type in _RECURRENT and node.domain == "") or any(value in behind for value in reads(node)):
            behind.update((value, value.shape) for each in walk([node]) for value in each.outputs)
    if not behind:
        return
    for value in behind:
        value.shape = None
    with contextlib.suppress(FormatError):  # that is told where it does harm
        infer_shapes(model)
    for value, old in behind.items():
        if value.shape is None and old is not None:
            value.shape = ir.Shape([None] * len(old))


def _doubt_outputs(model: ir.Model) -> None:
    """Take back what a file declares for an output where its nodes make another rank, or where an axis has the size of an open one.

    Runtimes warn of that, and refuse a gradient of that shape.
    """
    declared = [
        (value, value.shape) for value in dict.fromkeys(model.graph.outputs) if value.shape is not None and value.producer() is not None
    ]
    for value, _ in declared:
        value.shape = None
    with contextlib.suppress(FormatError):  # that is told where it does harm
        infer_shapes(model)
    opened = _open_names(model)
    for value, shape in declared:
        if value.shape is None or (len(value.shape) == len(shape) and not _contradicts(shape, value.shape, opened)):
            value.shape = shape


def _open_names(model: ir.Model) -> set[str]:
    """The names of the open axes of inputs."""
    dims = (dim for value in model.graph.inputs if value.shape is not None for dim in value.shape)
    return {dim.value for dim in dims if isinstance(dim, ir.SymbolicDim) and dim.value}


def _contradicts(declared: ir.Shape | None, found: ir.Shape | None, opened: set[str]) -> bool:
    """Whether a size is declared as a number where it is that of an open axis."""
    if declared is None or found is None:
        return False
    pairs = zip(declared, found)
    return any(type(old) is int and isinstance(new, ir.SymbolicDim) and new.value in opened for old, new in pairs)


def _check(model: ir.Model) -> None:
    """Refuse what ONNX's checker refuses; it sees the model without its large weights."""
    proto = skeleton(model)
    for value in (*proto.graph.input, *proto.graph.output):  # the checker wants a shape, runtimes and we do not
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        newer = next((o for o in proto.opset_import if o.domain in ("", "ai.onnx")), None)
        if "Unrecognized attribute" in str(error) and newer is not None and newer.version < onnx.defs.onnx_opset_version():
            newer.version = onnx.defs.onnx_opset_version()  # stamped with an older opset than its attributes are of: no harm to a gradient
            with contextlib.suppress(onnx.checker.ValidationError):
                return onnx.checker.check_model(proto)
        raise FormatError(f"the model does not pass onnx.checker, so it has no gradient: {str(error).strip()}") from error


def set_ir_version(model: ir.Model) -> None:
    """The oldest IR version that the opset and the contents need, so that runtimes older than the exporter load the file."""
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    needed = max(_OLDEST_IR, onnx.helper.find_min_ir_version_for(opsets, ignore_unknown=True))
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    types = {v.dtype for v in (*model.graph.inputs, *model.graph.initializers.values())}
    for node in (n for graph in graphs for n in walk(graph)):
        types.update(o.dtype for o in node.outputs)
        types.update(a.value.dtype for a in node.attributes.values() if a.type is ir.AttributeType.TENSOR and not a.is_ref())
        if node.overload or node.metadata_props:
            needed = max(needed, 10)
    if any(function.metadata_props for function in model.functions.values()):
        needed = max(needed, 10)
    model.ir_version = min(model.ir_version, max(needed, *[_IR_OF_TYPE.get(t.name, 0) for t in types if t is not None], 0))


# ----------------------------------------------------------------------------------------------------------- the marks
def _marks(model: ir.Model) -> list[ir.Node]:
    graphs = [model.graph, *[f for k, f in model.functions.items() if k[:2] != _MARK]]
    return [n for g in graphs for n in walk(g) if is_mark(n)]


def lost_counts(model: ir.Model) -> dict[str, str]:
    """What a model has lost that its gradients depend on, marks or links from functions to their backwards: the key of its count -> the message."""
    linked = sum(BACKWARD_KEY in function.metadata_props for function in model.functions.values())
    counts = {
        MARK_COUNT_KEY: (
            len(_marks(model)),
            f"stop-gradient marks ({MARK_DOMAIN}::{MARK_OP})",
            "gradients would flow where PyTorch stops them",
        ),
        LINKS_KEY: (linked, "functions that have a backward of their own", "the gradients would be those of what is left"),
    }
    return {
        key: f"the file was written with {shown(text)} {what} and has {found}: something inlined or removed them, and {then}."
        for key, (found, what, then) in counts.items()
        if (text := model.metadata_props.get(key)) is not None and text != str(found)
    }


def _check_counts(model: ir.Model) -> None:
    """Refuse a model that has lost what its gradients depend on.

    Raises:
        FormatError: It has lost marks, or links.
    """
    for message in lost_counts(model).values():
        raise FormatError(
            f"{message} Build the gradient graph from the file as the exporter saved it, and inline or optimize the training graph instead."
            "\n  without gradients the file runs and is quantised as it is (of a loaded one, under torch.no_grad())"
        )


def remove_marks(model: ir.Model) -> None:
    """Marks become what they mark, and the count 0, where nobody takes a gradient any more."""
    for mark in _marks(model):
        x, y = mark.inputs[0], mark.outputs[0]
        if y.is_graph_output() or x is None:  # its name stays
            mark.domain, mark.op_type = "", "Identity"
            continue
        y.replace_all_uses_with(x)
        graph_of(mark).remove(mark, safe=True)
    for key in [k for k in model.functions if k[:2] == _MARK]:
        del model.functions[key]
    holders: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for each in holders:
        if all(node.domain != MARK_DOMAIN for node in walk(each)):  # a PythonOpBackward is of the same
            each.opset_imports.pop(MARK_DOMAIN, None)
    if MARK_COUNT_KEY in model.metadata_props:
        model.metadata_props[MARK_COUNT_KEY] = "0"
