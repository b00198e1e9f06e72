"""Operators that onnx.reference computes wrongly, or not at all, without torch: for any ReferenceEvaluator (``new_ops=MENDED``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.helper import tensor_dtype_to_np_dtype
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_conv import Conv as OnnxConv
from onnx.reference.ops.op_conv_transpose import ConvTranspose as OnnxConvTranspose
from onnx.reference.ops.op_grid_sample import GridSample as OnnxGridSample
from onnx.reference.ops.op_gru import GRU as OnnxGRU
from onnx.reference.ops.op_layer_normalization import LayerNormalization as OnnxLayerNormalization
from onnx.reference.ops.op_loop import Loop as OnnxLoop
from onnx.reference.ops.op_lstm import LSTM as OnnxLSTM
from onnx.reference.ops.op_rnn import CommonRNN as OnnxRNN
from onnx.reference.ops.op_scan import Scan as OnnxScan

from symbolics.errors import RunError
from symbolics.graph.values import describe
from symbolics.text import causes, clean

__all__ = ["MENDED", "GatherElements", "MendedEvaluator", "Pad", "functions_in_order", "refusal"]


class GatherElements(OpRun):
    """onnx's own takes no axis from the end, and none longer than 64."""

    op_domain = ""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int | None = None) -> tuple[np.ndarray]:
        axis = (axis or 0) % data.ndim
        part = data[tuple(slice(None) if i == axis else slice(size) for i, size in enumerate(indices.shape))]
        return (np.take_along_axis(part, indices.astype(np.int64), axis),)


class Erf(OpRun):
    """onnx's own computes in float32, of float64 too."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype),)


class Optional(OpRun):
    """onnx's own gives a list, which no operator behind OptionalGetElement takes, and which is there when it is empty."""

    op_domain = ""

    def _run(self, x: Any = None, **_: Any) -> tuple[Any]:
        return (x,)

    def run(self, *args: Any, **_: Any) -> tuple[Any]:
        return self._run(*args)  # OpRun's own refuses a result that is None


class Pad(OpRun):
    """onnx's own takes no negative numbers, which cut off: the gradient of a convolution has them where sizes are open."""

    op_domain = ""

    def _run(
        self, data: np.ndarray, pads: Any = None, constant_value: Any = None, axes: Any = None, mode: str | None = None,
        value: float | None = None, paddings: Any = None,
    ) -> tuple[np.ndarray]:  # fmt: skip
        widths = [int(width) for width in (pads if pads is not None else paddings)]  # attributes, before opset 11
        places = range(data.ndim) if axes is None else [int(axis) % data.ndim for axis in axes]
        pairs = [(0, 0)] * data.ndim
        for axis, begin, end in zip(places, widths[: len(widths) // 2], widths[len(widths) // 2 :], strict=True):
            pairs[axis] = (begin, end)
        cut = tuple(slice(max(0, -begin), size - max(0, -end)) for size, (begin, end) in zip(data.shape, pairs, strict=True))
        added = [(max(0, begin), max(0, end)) for begin, end in pairs]
        mode = mode or "constant"
        fill = constant_value if constant_value is not None else value
        more = {"constant_values": 0 if fill is None else np.asarray(fill).item()} if mode == "constant" else {}
        return (np.pad(data[cut], added, mode=mode, **more).astype(data.dtype, copy=False),)  # type: ignore[call-overload]


def _by_group(run: Callable[..., Any], x: np.ndarray, w: np.ndarray, b: np.ndarray | None, attributes: dict[str, Any]) -> tuple[np.ndarray]:
    """The outputs of each group alone, beside one another."""
    groups = attributes.pop("group", None) or 1
    parts = zip(np.split(x, groups, 1), np.split(w, groups), [None] * groups if b is None else np.split(b, groups), strict=True)
    return (np.concatenate([run(*part, group=1, **attributes)[0] for part in parts], 1),)


class Conv(OnnxConv):
    """onnx's own fails on some groups."""

    op_domain = ""

    def _run(self, *operands: Any, **attributes: Any) -> Any:
        x, w, b = (*operands, None)[:3]
        return _by_group(super()._run, x, w, b, attributes)


class ConvTranspose(OnnxConvTranspose):
    """onnx's own gives each group the bias of the first, and one channel."""

    op_domain = ""

    def _run(self, *operands: Any, **attributes: Any) -> Any:
        x, w, b = (*operands, None)[:3]
        return _by_group(super()._run, x, w, b, attributes)


class LRN(OpRun):
    """onnx's own sums over as many channels as there are images."""

    op_domain = ""

    def _run(self, x: np.ndarray, alpha: float, beta: float, bias: float, size: int) -> tuple[np.ndarray]:
        before = (size - 1) // 2
        squares = np.pad(x * x, [(0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)])
        sums = np.lib.stride_tricks.sliding_window_view(squares, size, axis=1).sum(-1)
        return ((x / (bias + alpha / size * sums) ** beta).astype(x.dtype),)


class LpPool(OpRun):
    """onnx's own multiplies an average, which is of fewer elements at the end of an axis with ceil_mode."""

    op_domain = ""

    def _run(
        self, x: np.ndarray, auto_pad: str | None = None, ceil_mode: int | None = None, dilations: Any = None, kernel_shape: Any = None,
        p: int | None = None, pads: Any = None, strides: Any = None,
    ) -> tuple[np.ndarray]:  # fmt: skip
        n, p = len(kernel_shape), 2 if p is None else p
        steps, gaps, around = strides or [1] * n, dilations or [1] * n, pads or [0] * (2 * n)
        sums = np.abs(x) ** p
        for i, (kernel, step, gap) in enumerate(zip(kernel_shape, steps, gaps, strict=True)):
            axis, span = x.ndim - n + i, (kernel - 1) * gap + 1
            size, begin, end = x.shape[axis], around[i], around[n + i]
            if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
                missing = max((-(-size // step) - 1) * step + span - size, 0)
                begin = missing // 2 if auto_pad == "SAME_UPPER" else missing - missing // 2
                end = missing - begin
            rest = size + begin + end - span
            count = (-(-rest // step) if ceil_mode else rest // step) + 1
            if ceil_mode and (count - 1) * step >= size + begin:  # a window of padding alone
                count -= 1
            widths = [(0, 0)] * x.ndim
            widths[axis] = (begin, end + max(0, (count - 1) * step + span - size - begin - end))
            windows = np.lib.stride_tricks.sliding_window_view(np.pad(sums, widths), span, axis=axis)
            sums = windows[..., ::gap].sum(-1).take(np.arange(count) * step, axis)
        return ((sums ** (1.0 / p)).astype(x.dtype),)


class GlobalLpPool(OpRun):
    """onnx has none."""

    op_domain = ""

    def _run(self, x: np.ndarray, p: int | None = None) -> tuple[np.ndarray]:
        p = 2 if p is None else p
        return (((np.abs(x) ** p).sum(tuple(range(2, x.ndim)), keepdims=True) ** (1.0 / p)).astype(x.dtype),)


def _as_arrays(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """What numpy made numbers of, as arrays again."""
    return tuple(np.asarray(value) if isinstance(value, np.generic) else value for value in values)


def _collected(body: ReferenceEvaluator, first: int, slices: list[list[np.ndarray]]) -> list[np.ndarray]:
    """What the iterations gave from this output of the body on, along a new first axis; for none of them as empty as the body declares it."""
    if slices:
        return [np.stack(values) for values in zip(*slices, strict=True)]
    types = [kind.tensor_type for kind in body.output_types[first:]]
    return [np.empty((0, *(d.dim_value for d in t.shape.dim)), tensor_dtype_to_np_dtype(t.elem_type)) for t in types]


class Loop(OnnxLoop):
    """onnx's own joins the scanned outputs along their first axis, in place of a new one, and has none for no iteration."""

    op_domain = ""
    body: Any
    _run_body: Any

    def _run(self, M: Any, cond: Any, *states: Any, context: Any = None, body: Any = None, **more: Any) -> tuple[Any, ...]:
        counter, condition, *names = self.body.input_names
        slices: list[list[np.ndarray]] = []
        going, iteration = True if cond is None else bool(np.all(cond)), 0
        while going and (M is None or iteration < np.asarray(M).item()):
            feeds = {
                **(context or {}),
                counter: np.array(iteration, np.int64),
                condition: np.array(going),
                **dict(zip(names, states, strict=True)),
            }
            again, *made = self._run_body(feeds, **more)
            states, going, iteration = tuple(made[: len(names)]), bool(np.all(again)), iteration + 1
            slices.append(made[len(names) :])
        return _as_arrays((*states, *_collected(self.body, len(names) + 1, slices)))


class Scan(OnnxScan):
    """onnx's own goes along the first axes alone, and forward."""

    op_domain = ""
    body: Any
    _run_body: Any
    num_scan_inputs: int
    scan_input_axes: list[int] | None
    scan_input_directions: list[int] | None
    scan_output_axes: list[int] | None
    scan_output_directions: list[int] | None

    def __init__(self, onnx_node: Any, run_params: dict[str, Any]) -> None:
        OpRun.__init__(self, onnx_node, run_params)

    def _run(self, *given: Any, context: Any = None, attributes: Any = None, bindings: Any = None, **_: Any) -> tuple[Any, ...]:
        n = len(given) - self.num_scan_inputs
        names, scanned = self.body.input_names, given[n:]
        states: Sequence[Any] = given[:n]
        axes, directions = self.scan_input_axes or [0] * len(scanned), self.scan_input_directions or [0] * len(scanned)
        rows = [np.moveaxis(x, axis, 0)[:: -1 if back else 1] for x, axis, back in zip(scanned, axes, directions, strict=True)]
        slices: list[list[np.ndarray]] = []
        for row in zip(*rows, strict=True):
            feeds = {**(context or {}), **dict(zip(names, (*states, *map(np.asarray, row)), strict=True))}
            made = self._run_body(feeds, attributes=attributes, bindings=bindings)
            states = made[:n]
            slices.append(made[n:])
        outputs = _collected(self.body, n, slices)
        axes, directions = self.scan_output_axes or [0] * len(outputs), self.scan_output_directions or [0] * len(outputs)
        turned = [np.moveaxis(y[:: -1 if back else 1], 0, axis) for y, axis, back in zip(outputs, axes, directions, strict=True)]
        return _as_arrays((*states, *turned))


class SequenceMap(OpRun):
    """onnx's own hides from the body what stands around it, and takes one further sequence at most."""

    op_domain = ""
    body: Any

    def need_context(self) -> bool:
        return True

    def _run(self, *given: Any, context: Any = None, **_: Any) -> tuple[Any, ...]:
        names, made = self.body.input_names, []
        for i in range(len(given[0])):
            element = [value[i] if isinstance(value, list) else value for value in given]
            made.append(self.body.run(None, {**(context or {}), **dict(zip(names, element, strict=True))}))
        return tuple([results[k] for results in made] for k in range(len(self.body.output_names)))


class LayerNormalization(OnnxLayerNormalization):
    """onnx's own computes in the type that it is given, a half type too, and refuses to do so for float64."""

    op_domain = ""

    def _run(self, X: Any, Scale: Any, B: Any = None, axis: Any = None, epsilon: Any = None, stash_type: Any = None) -> tuple[Any, ...]:
        onnx_own: Any = super()
        kind = X.dtype
        if kind.itemsize == 2:  # its statistics are float32, as stash_type says
            X, Scale, B = (None if value is None else value.astype(np.float32) for value in (X, Scale, B))
        y, *statistics = onnx_own._run(X, Scale, B, axis=axis, epsilon=epsilon, stash_type=1)
        return y.astype(kind), *statistics


class GridSample(OnnxGridSample):
    """onnx's own has places in float32, and not the names that modes had before opset 20."""

    op_domain = ""

    def _run(self, X: Any, grid: Any, mode: Any = None, padding_mode: Any = None, align_corners: Any = None) -> Any:
        onnx_own: Any = super()
        mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
        return onnx_own._run(X, grid, mode=mode, padding_mode=padding_mode, align_corners=align_corners)

    def _gs_denormalize_coordinates(self, n: Any, dims: Any, align_corners: Any) -> np.ndarray:
        """From -1 to 1 to the places of elements: those of the first and the last one, or the outer edges of these."""
        places, sizes = np.asarray(n), np.asarray(dims, np.float64)[: len(n)]
        return (places + 1) / 2 * (sizes - 1) if align_corners else ((places + 1) * sizes - 1) / 2


def _by_row(
    run: Callable[..., tuple[np.ndarray, ...]], x: np.ndarray, lengths: np.ndarray, given: Sequence[Any], layout: int
) -> tuple[np.ndarray, ...]:
    """What a recurrence gives of each sequence alone, as long as it is; zeros behind its end, and of one without elements.

    Args:
        run: The recurrence of a sequence, and of what it is given by sequence.
        x: The sequences: (time, sequences, features), or in layout 1 (sequences, time, features).
        lengths: How long each is.
        given: The states before, by sequence, or None.
        layout: Where the axis of the sequences is.
    """
    batch, time = (0, 1) if layout else (1, 0)
    axes = (0 if layout else 2, batch, batch)  # where the sequences are in all of its outputs, and in its last states

    def of(value: np.ndarray | None, row: int) -> np.ndarray | None:
        return None if value is None else value.take([row], batch)

    whole, rows = run(x, *given), list[list[np.ndarray]]()
    for row, length in enumerate(lengths.tolist()):
        blank = [np.zeros_like(each.take([row], axis)) for each, axis in zip(whole, axes, strict=False)]
        if length:
            every, *last = run(of(x, row).take(range(length), time), *(of(value, row) for value in given))  # type: ignore[union-attr]
            blank[0][(slice(None),) * time + (slice(length),)] = every
            blank[1:] = last
        rows.append(blank)
    return tuple(np.concatenate(parts, axis) for parts, axis in zip(zip(*rows, strict=True), axes, strict=False))


class _Recurrence(OpRun):
    """onnx's own reads no lengths of sequences, and none of the settings ``clip``, ``input_forget`` and, but for RNN, ``activations``."""

    op_domain = ""
    #: The activations that it computes with, whatever the node says; empty where it does as the node says.
    usual: tuple[str, ...] = ()

    def _run(self, X: Any, W: Any, R: Any, B: Any = None, sequence_lens: Any = None, *states: Any, **how: Any) -> Any:
        names = tuple(name.decode() if isinstance(name, bytes) else name for name in how.get("activations") or ())
        ignored = [name for name in ("clip", "input_forget") if how.get(name)]
        ignored += ["activations"] if self.usual and names and names != self.usual * (len(names) // len(self.usual)) else []
        if ignored:
            raise NotImplementedError(f"it ignores {' and '.join(ignored)}")
        own: Any = super()
        peepholes = states[2:]

        def run(x: Any, *before: Any) -> tuple[np.ndarray, ...]:
            return own._run(x, W, R, B, None, *before, *peepholes, **how)

        if sequence_lens is None:
            return run(X, *states[:2])
        return _by_row(run, X, sequence_lens, states[:2], how.get("layout") or 0)


class LSTM(_Recurrence, OnnxLSTM):
    """See `_Recurrence`."""

    usual = ("Sigmoid", "Tanh", "Tanh")


class GRU(_Recurrence, OnnxGRU):
    """See `_Recurrence`."""

    usual = ("Sigmoid", "Tanh")


class RNN(_Recurrence, OnnxRNN):
    """See `_Recurrence`."""


class MeanVarianceNormalization(OpRun):
    """onnx's own has constants in float32, and takes no float64."""

    op_domain = ""

    def _run(self, x: np.ndarray, axes: Sequence[int] | None = None) -> tuple[np.ndarray]:
        over = (0, 2, 3) if axes is None else tuple(axes)
        centred = x - x.mean(over, keepdims=True)
        return ((centred / (np.sqrt((centred**2).mean(over, keepdims=True)) + 1e-9)).astype(x.dtype),)


#: All of them.
MENDED: tuple[type[OpRun], ...] = (
    Conv,
    ConvTranspose,
    Erf,
    GatherElements,
    GlobalLpPool,
    GRU,
    GridSample,
    LayerNormalization,
    Loop,
    LRN,
    LpPool,
    LSTM,
    MeanVarianceNormalization,
    Optional,
    Pad,
    RNN,
    Scan,
    SequenceMap,
)


def functions_in_order(proto: Any) -> Any:
    """A model whose functions stand behind those that they call: onnx's evaluator knows no others. Anything else as it is."""
    if not isinstance(proto, onnx.ModelProto) or len(proto.functions) < 2:
        return proto
    known = {(function.domain, function.name): function for function in proto.functions}
    ordered: dict[tuple[str, str], onnx.FunctionProto] = {}
    waiting = [(key, False) for key in reversed(known)]
    seen = set[tuple[str, str]]()
    while waiting:
        key, done = waiting.pop()
        if done:
            ordered[key] = known[key]
        elif key not in seen:
            seen.add(key)
            waiting.append((key, True))
            waiting += [(called, False) for called in _called_by(known[key].node) if called in known]
    if list(ordered) == list(known):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    del copy.functions[:]
    copy.functions.extend(ordered.values())
    return copy


def _called_by(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, str]]:
    """The operators of nodes, and of the bodies in them."""
    for node in nodes:
        yield node.domain, node.op_type
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _called_by(body.node)


class MendedEvaluator(ReferenceEvaluator):
    """onnx.reference with these operators, also inside of functions and bodies, of which it makes evaluators of this class."""

    def __init__(self, proto: Any, *args: Any, new_ops: Sequence[type[OpRun]] | None = None, **kwargs: Any) -> None:
        kwargs["new_ops"] = [*(new_ops or ()), *MENDED]
        super().__init__(functions_in_order(proto), *args, **kwargs)


def refusal(error: Exception) -> RunError:
    """What to raise from an error of onnx.reference, which says nothing of the node at which it was."""
    nodes, chain = list[onnx.NodeProto](), list(causes(error))  # what calls an operator says anew what that raised
    for each in chain:
        trace = each.__traceback__
        while trace is not None:  # the innermost: that in a body or a function, where the outer one is a Loop or the call
            found = trace.tb_frame.f_locals
            operator = found.get("self")
            proto = operator.onnx_node if isinstance(operator, OpRun) else found.get("node")
            if isinstance(proto, onnx.NodeProto) and not any(proto is known for known in nodes):
                nodes.append(proto)
            trace = trace.tb_next
    where = f" at {_described(nodes[-1])}" if nodes else ""
    for outer in [node for node in reversed(nodes[:-1]) if node.domain][:2]:  # calls: a Loop says little more than the node in it
        where += f", in {_described(outer)}"
    return RunError(
        f"onnx.reference cannot run the model{where} ({type(chain[-1]).__name__}: {clean(' '.join(str(chain[-1]).split()), 1000).rstrip('.')}).\n"
        "  way out: run the model on onnxruntime, by exporter.inference_session or exporter.load"
    )


def _described(node: onnx.NodeProto) -> str:
    return describe(ir.Node(node.domain, node.op_type, [], outputs=[ir.Value(name=name) for name in node.output], name=node.name))
