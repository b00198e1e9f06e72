"""A gradient checker for users: the built gradients of a model against finite differences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from exporter.errors import short
from exporter.gradient_graph.build import build_gradient_graph
from exporter.gradient_graph.model import own_copy
from exporter.runtime.mended_operators import MendedEvaluator, refusal
from symbolics.errors import PythonopError
from symbolics.graph.values import dtype_of, is_float, is_python_op, name_of
from symbolics.graph.walk import walk
from symbolics.node.metadata import pairing_of
from symbolics.node.patterns import Patterns
from symbolics.text import shown
from symbolics.users import warn

__all__ = ["check_gradients"]

_Arrays = Mapping[str, np.ndarray]
_FLOAT_ATTRIBUTES = ("to", "dtype", "stash_type", "softmax_precision", "output_dtype")


@short
def check_gradients(
    model: Any,
    order: int = 2,
    *,
    wrt: Iterable[str] | None = None,
    inputs: Mapping[str, Any] | None = None,
    overrides: Mapping[Any, Any] | None = None,
    allow: Any = (),
    samples: int = 24,
    step: float = 1e-4,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> float:
    """Compare the gradient graph of a model with central differences, in float64.

    Where everything that is compared is zero, a warning says so: the values that were made up show nothing then.

    Args:
        model: What `build_gradient_graph` takes. It runs on onnx's reference evaluator.
        order: 1 checks the gradient; 2 also the gradient of the gradient, and so on.
        wrt: As `build_gradient_graph` takes it.
        inputs: Values of inputs, where random ones in [-1, 1] (and zeros for integers) do not fit. Open sizes are 2.
        overrides: As `build_gradient_graph` takes it.
        allow: Functions that the model may call. They run on float64.
        samples: How many elements of each value in ``wrt`` are moved.
        step: By how much they are moved.
        tolerance: How far a gradient may be off, relative to the largest gradient of its value.
        seed: Of the random values.

    Returns:
        The largest relative error.

    Raises:
        TrustError: The model calls a Function that ``allow`` does not name.
        RunError: onnx.reference cannot run the model, or its gradient; the message names the node.
        AssertionError: A gradient differs. The message says which element of what, and both numbers.

    Examples:
        >>> error = exporter.check_gradients(program, order=1, allow=["mypkg.ops:*"])
    """
    __tracebackhide__ = True  # pytest shows the test's line, and not ours
    Patterns(allow, "allow")  # a wrong entry is an error of a model without PythonOps, too
    rng = np.random.default_rng(seed)
    current = _in_double(own_copy(model))
    targets = None if wrt is None else list(wrt)
    feeds = {name_of(v): _value(v, (inputs or {}).get(name_of(v)), rng) for v in current.graph.inputs if not v.is_initializer()}
    worst, all_zero = 0.0, True
    for level in range(1, order + 1):
        training = _in_double(
            build_gradient_graph(current, wrt=targets, overrides=overrides)
        )  # once more: functions of ONNX have constants in float32
        pairing = pairing_of(training)
        assert pairing is not None
        targets = list(pairing.outputs)
        forward = _Function(current, list(pairing.inputs), allow)
        cotangents = {o: rng.uniform(0.25, 1, np.shape(y)) * rng.choice([-1.0, 1.0], np.shape(y)) for o, y in forward(feeds).items()}
        feeds_in = {**feeds, **{pairing.inputs[o]: c for o, c in cotangents.items()}}
        gradients = _Function(training, list(pairing.outputs.values()), allow)(feeds_in)
        for name in targets:
            x = np.asarray(feeds[name] if name in feeds else forward.weights[name], np.float64)
            g = np.asarray(gradients[pairing.outputs[name]])
            if g.shape != x.shape:
                raise AssertionError(f"order {level}: the gradient of {name!r} has shape {g.shape}, not {x.shape}")
            scale = max(float(np.abs(g).max(initial=0)), 1e-3)
            for i in rng.permutation(x.size)[:samples]:
                numeric = _difference(forward, feeds, cotangents, name, x, int(i), step)
                error = abs(numeric - g.flat[i]) / scale
                worst, all_zero = max(worst, error), all_zero and numeric == 0
                if not error <= tolerance:
                    index = tuple(int(k) for k in np.unravel_index(i, x.shape))
                    raise AssertionError(
                        f"order {level}: the gradient of {name!r} at {index} is {g.flat[i]:.9g}, finite differences say {numeric:.9g}"
                    )
        if level == 1 and all_zero and targets:
            _say_zeros(feeds, inputs or {})
        feeds, current = feeds_in, training
    return worst


def _say_zeros(feeds: _Arrays, given: Mapping[str, Any]) -> None:
    """Nothing was shown: no output moves with anything that was moved."""
    made = [name for name, value in feeds.items() if name not in given and value.dtype.kind in "iub"]
    zeros = f": it was given zeros for {', '.join(map(shown, made[:4]))}{', ...' if len(made) > 4 else ''}" if made else ""
    warn(
        f"check_gradients compared nothing but zeros: no output of the model changes where its values are moved{zeros}. "
        "Give values at which it does, in inputs={name: array}"
    )


def _difference(forward: _Function, feeds: _Arrays, cotangents: _Arrays, name: str, x: np.ndarray, i: int, step: float) -> float:
    """The derivative of the outputs, weighed by the cotangents, with respect to element i of a value, from four runs."""

    def total(h: float) -> float:
        moved = x.copy()
        moved.flat[i] += h
        return sum(float(np.sum(y * cotangents[o])) for o, y in forward({**feeds, name: moved}).items())

    coarse, fine = ((total(h) - total(-h)) / (2 * h) for h in (step, step / 2))
    return (4 * fine - coarse) / 3  # Richardson: the error of order h^2 cancels


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Around onnx.reference without torch.

    Raises:
        RunError: In place of whatever an operator's reference in numpy raises.
    """
    try:
        yield
    except PythonopError:
        raise
    except Exception as error:
        raise refusal(error) from error


class _Function:
    """A model as a function of inputs and initializers."""

    def __init__(self, model: ir.Model, outputs: list[str], allow: Any) -> None:
        proto = ir.to_proto(model)
        self.weights = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
        have = {v.name for v in proto.graph.input}
        for tensor in proto.graph.initializer:
            if tensor.name not in have:
                proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        del proto.graph.initializer[:]
        self.outputs = outputs
        self.evaluator: ReferenceEvaluator
        if any(map(is_python_op, walk(model.graph))):
            from exporter.runtime.reference import reference_evaluator  # the only place here that needs torch

            self.evaluator = reference_evaluator(proto, allow)
        else:
            with _refused():
                self.evaluator = MendedEvaluator(proto)

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = self.evaluator.input_names
        values = {**self.weights, **feeds}
        if missing := [n for n in names if n not in values]:
            raise PythonopError(f"no value for the inputs {missing}: give them in inputs=")
        refused = _refused() if isinstance(self.evaluator, MendedEvaluator) else contextlib.nullcontext()  # a Function's own error stays
        with np.errstate(all="ignore"), refused:
            return dict(zip(self.outputs, self.evaluator.run(self.outputs, {n: values[n] for n in names})))


def _value(value: ir.Value, given: Any, rng: np.random.Generator) -> np.ndarray:
    if given is not None:
        array = np.asarray(given)
        return array.astype(np.float64) if is_float(value) else array
    shape = [d if type(d) is int else 2 for d in value.shape or ()]
    return rng.uniform(-1, 1, shape) if is_float(value) else np.zeros(shape, dtype_of(value).numpy())


def _in_double(model: ir.Model) -> ir.Model:
    """The same model in float64."""
    double = ir.DataType.DOUBLE
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for graph in graphs:
        for value in (*graph.inputs, *graph.outputs):
            _widen(value)
    for value in model.graph.initializers.values():
        _widen(value)
    for node in (node for graph in graphs for node in walk(graph)):
        for value in node.outputs:
            _widen(value)
        for name, attribute in list(node.attributes.items()):
            if attribute.is_ref():  # of a function: each call has its value
                continue
            if attribute.type is ir.AttributeType.TENSOR and attribute.value.dtype.is_floating_point():
                node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.value.numpy().astype(np.float64)))
            elif name in _FLOAT_ATTRIBUTES and attribute.type is ir.AttributeType.INT and ir.DataType(attribute.value).is_floating_point():
                node.attributes[name] = ir.AttrInt64(name, int(double))
            elif node.op_type == "Constant" and name in ("value_float", "value_floats"):
                del node.attributes[name]
                node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.asarray(attribute.value, np.float64)))
            elif is_python_op(node) and name in ("input_tensor_types", "output_tensor_types"):
                kinds = [int(double) if ir.DataType(kind).is_floating_point() else kind for kind in attribute.value]
                node.attributes[name] = ir.AttrInt64s(name, kinds)
            elif attribute.type is ir.AttributeType.GRAPH:
                for inner in (*attribute.value.inputs, *attribute.value.outputs):
                    _widen(inner)
        if node.op_type == "GroupNormalization" and "stash_type" not in node.attributes and model.opset_imports.get("", 0) >= 21:
            node.attributes["stash_type"] = ir.AttrInt64("stash_type", int(double))  # the default computes in float32
        if node.op_type == "ConstantOfShape" and not node.attributes:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.zeros(1, np.float64)))
    for value in model.graph.outputs:
        _widen(value)
    return model


def _widen(value: ir.Value) -> None:
    if is_float(value):
        value.type = ir.TensorType(ir.DataType.DOUBLE)
        if value.const_value is not None:
            value.const_value = ir.tensor(value.const_value.numpy().astype(np.float64), name=value.name)
