"""``python -m tests.exporter.quantization.twelve [PATTERN ...]``: twelve fake-quantised models in integers, beside eager, on both exporters.

One row for each model and exporter, and the limits that `LIMITS` has. The exit status is 1 where one is missed; a model of a tool that is not
installed is named, and not counted.

    python -m tests.exporter.quantization.twelve "mlp*" --exporters dynamo
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import itertools
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import exporter
from exporter.quantization.grids import Grid, number_of, order_of, thresholds
from tests.exporter.quantization.models import MODELS, Case, trained
from tests.exporter.quantization.tools import BREVITAS, PT2E, TORCH_AO

__all__ = ["KNOWN", "LIMITS", "TWELVE", "Row", "judge", "main"]

_EXPORTERS = {"dynamo": True, "torchscript": False}

#: name -> the model, and the package that it needs
TWELVE: dict[str, tuple[Case, str]] = {
    "conv net, LSQ": (MODELS["conv lsq"], ""),
    "MLP, PACT": (MODELS["mlp, activations pact"], ""),
    "MLP, DoReFa": (MODELS["dorefa"], ""),
    "transformer": (MODELS["transformer, whole"], ""),
    "depthwise": (MODELS["depthwise"], ""),
    "residual": (MODELS["residual"], ""),
    "LSTM of linear layers": (MODELS["lstm by hand"], ""),
    "detector's head": (MODELS["detector"], ""),
    "conv net, brevitas": (BREVITAS["channels"], "brevitas"),
    "conv net, torch.ao eager": (TORCH_AO["eager fbgemm"], ""),
    "conv net, torch.ao FX": (TORCH_AO["fx x86"], ""),
    "MLP, torchao PT2E": (PT2E["mlp"], "torchao"),
}

#: What may be missed: of all models together the share of quantised products that stay in float; of each model the others.
LIMITS = {"float": 0.05, "weights": 0, "thresholds": 1, "levels": 5e-4, "classes": 0.005, "masks": 0}

_BIASES = "onnxruntime's QLinearConv takes biases in int32, in steps of activation times weight"
_TIES = "torch multiplies by 1 / scale and QuantizeLinear divides; means of 16 levels lie half way between two levels again and again"
#: Where more levels are off a layer than the limit: up to how many, and why. In numpy, either way of rounding gives the levels of either file.
KNOWN: dict[str, tuple[float, str]] = {
    "depthwise": (1e-3, _BIASES),
    "conv net, torch.ao eager": (1.2e-3, _BIASES),
    "conv net, torch.ao FX": (6e-3, _TIES),
}

#: A product of constants alone is computed once, when a session opens: it is none of a run.
_FOLDED = "it is a constant, and the first operand"
_ROUNDERS = {"Act", "FakeQuantize", "FusedMovingAvgObsFakeQuantize", "QuantIdentity", "QuantReLU"}


@dataclass
class Row:
    """What was found of one model on one exporter.

    Attributes:
        integers, quantized: Products in integer kernels, of those whose operands the model rounds.
        weights, weights_off: Weights in integers, and how many of them are none that eager multiplies by, bit by bit.
        thresholds: How far a threshold of the file is from eager's, or from the fake-quantised file's, in float32 numbers.
        levels: The share of levels off a layer, where all before it are the same: the largest.
        same: How many inputs have eager's class, of ``inputs``.
        masks_off, masks: Elements of gradients that are zero in one and not in the other, of all.
        reasons: Why quantised products stay in float.
    """

    integers: int
    quantized: int
    weights: int
    weights_off: int
    thresholds: int
    levels: float
    same: int
    inputs: int
    masks_off: int
    masks: int
    reasons: list[str] = field(default_factory=list)

    @property
    def missed(self) -> list[str]:
        """The limits of one model that are missed."""
        found = {
            "weights": self.weights_off,
            "thresholds": self.thresholds,
            "levels": self.levels,
            "classes": 1 - self.same / self.inputs,
            "masks": self.masks_off,
        }
        return [name for name, value in found.items() if not value <= LIMITS[name]]

    def __str__(self) -> str:
        return (
            f"{self.integers} of {self.quantized} | {self.weights - self.weights_off} of {self.weights} | {self.thresholds} | {self.levels:.4%} | "
            f"{self.same} of {self.inputs} | {self.masks_off} of {self.masks}"
        )


_HEADS = (
    "products in integers | weights bit by bit | float32 off a threshold, at most | levels off a layer, at most | same class | masks off"
)


def judge(case: Case, dynamo: bool, *, inputs: int = 1000, masks: int = 1_000_000) -> Row:
    """Run a model in integers beside eager.

    Args:
        case: The model.
        dynamo: The exporter.
        inputs: On how many inputs.
        masks: On how many numbers the gradients of its quantisers of activations are compared.
    """
    model, args = _made(case)
    program = exporter.export(model, args, dynamo=dynamo, portable=True, **(case.options or {}))
    quantized = exporter.quantize(program)
    products = [each for each in quantized.products if each.reason != f"no quantiser gives what it takes: {_FOLDED}"]
    given = [args, *([torch.randn_like(each) for each in args] for _ in range(math.ceil(inputs / args[0].shape[0]) - 1))]
    names = [str(value.name) for value in program.model.graph.inputs]
    feeds = [dict(zip(names, (each.numpy() for each in some), strict=True)) for some in given]
    proof = exporter.verify_quantized(quantized, program, *feeds)
    weights = list(_weights(quantized.model))
    eager = _multiplied(model, args)
    rounders = _rounders(model)
    off = [masks_of(_Each(rounders), _near_edges(rounders, masks), dynamo), _gradients(program, model, given, names)]
    return Row(
        sum(bool(each.kernel) for each in products),
        len(products),
        len(weights),
        sum(not any(_is(weight, other) for other in eager) for weight in weights),
        max(max(each.floats for each in proof.thresholds.values()), _beside_eager(rounders, quantized)),
        max(off / count for off, count in proof.compared.layers.values()),
        _same_classes(quantized, model, given, feeds, inputs),
        inputs,
        sum(each for each, _ in off),
        sum(each for _, each in off),
        [f"{each.name}: {each.reason}" for each in products if not each.kernel],
    )


def _made(case: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if case in MODELS.values():
        return trained(case)
    torch.manual_seed(0)
    return case.make()


# ------------------------------------------------------------------------------------------------------------------- classes
def _same_classes(quantized: exporter.Quantized, model: nn.Module, given: list, feeds: list, inputs: int) -> int:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(quantized.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    same: list[bool] = []
    for some, arrays in zip(given, feeds, strict=True):
        with torch.no_grad():
            expected = pytree.tree_leaves(model(*some))[0].numpy()
        same += (_classes(session.run(None, arrays)[0]) == _classes(expected)).tolist()
    return sum(same[:inputs])


def _classes(y: np.ndarray) -> np.ndarray:
    """The largest channel of each row: of pictures axis 1, else the last; the mean over all places."""
    axis = 1 if y.ndim == 4 else y.ndim - 1
    rows: np.ndarray = np.moveaxis(y.astype(np.float64), axis, 1).reshape(y.shape[0], y.shape[axis], -1).mean(-1)
    return rows.argmax(1)


# ------------------------------------------------------------------------------------------------------------------- weights
class _Products(TorchDispatchMode):
    """The second operands of convolutions and matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[np.ndarray] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        place = {"convolution": 1, "mm": 1, "addmm": 2, "bmm": 1}.get(name)
        if place is not None:
            self.weights.append(args[place].detach().numpy().copy())
        return func(*args, **(kwargs or {}))


def _multiplied(model: nn.Module, args: tuple[Tensor, ...]) -> list[np.ndarray]:
    """What eager's products multiply by."""
    with torch.no_grad(), _Products() as products:
        model(*args)
    return products.weights


def _weights(model: ir.Model) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """The weights in integers: levels, the steps beside them, and whether it is of a convolution."""
    for node in model.graph:
        maker = node.inputs[1].producer() if node.op_type in ("Conv", "MatMul") and node.inputs[1] is not None else None
        if maker is None or maker.op_type != "DequantizeLinear" or maker.inputs[0].const_value is None:
            continue
        levels, scale = (maker.inputs[i].const_value.numpy() for i in (0, 1))
        zero = maker.inputs[2].const_value.numpy() if len(maker.inputs) > 2 else np.zeros_like(scale, np.int32)
        shape = [1] * levels.ndim
        if scale.ndim:
            shape[maker.attributes["axis"].as_int() if "axis" in maker.attributes else 1] = -1
        yield levels.astype(np.int32) - zero.astype(np.int32).reshape(shape), scale.reshape(shape), node.op_type == "Conv"


def _is(weight: tuple[np.ndarray, np.ndarray, bool], other: np.ndarray) -> bool:
    """Whether a weight is eager's, bit by bit. The steps of a convolution hold what is folded into it: there, each channel is the same multiples of one float32."""
    levels, scale, convolution = weight
    if levels.shape != other.shape:
        return False
    if np.array_equal(levels.astype(np.float32) * scale, other):
        return True
    return convolution and all(_multiples(one, row) for one, row in zip(levels, other, strict=True))


def _multiples(levels: np.ndarray, row: np.ndarray) -> bool:
    """Whether a row is these multiples of one float32, or of its negative."""
    if not levels.any():  # a channel that is switched off
        return True
    step = float((levels * row.astype(np.float64)).sum() / (levels.astype(np.float64) ** 2).sum())
    near = number_of(order_of(np.float32(step)) + np.arange(-8, 9))
    return any(np.array_equal(levels.astype(np.float32) * each, row) for each in near)


# --------------------------------------------------------------------------------------------------- quantisers of activations
def _rounders(model: nn.Module) -> list[nn.Module]:
    """The modules that round activations: one step each."""
    found = [module for name, module in model.named_modules() if type(module).__name__ in _ROUNDERS and "weight" not in name]
    return [module for module in found if not isinstance(scale := getattr(module, "scale", None), Tensor) or scale.numel() == 1]


def _call(module: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    def function(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return module(torch.from_numpy(np.ascontiguousarray(x, np.float32))).numpy()

    return function


def _beside_eager(rounders: Iterable[nn.Module], quantized: exporter.Quantized) -> int:
    """How far a threshold of QuantizeLinear in the file is from that of the module, at most."""
    grids = [Grid(np.float32(each.scale), each.zero_point, each.low, each.high) for each in quantized.activations]
    worst = 0
    for module in rounders:
        function = _call(module)
        levels = np.unique(function(np.linspace(-20, 20, 1 << 18, dtype=np.float32)) + np.float32(0))
        same = [g for g in grids if len(g.values) == len(levels) and np.abs(g.values - levels).max() < 1e-3 * g.scale]
        if not same:  # its value is in no product
            continue
        grid = same[0]

        def as_written(x: np.ndarray, grid: Grid = grid) -> np.ndarray:
            return (np.clip(np.rint(x / grid.scale) + np.float32(grid.zero), grid.low, grid.high) - np.float32(grid.zero)) * grid.scale

        worst = max(worst, int(np.abs(thresholds(function, grid.values) - thresholds(as_written, grid.values)).max(initial=0)))
    return worst


class _Each(nn.Module):
    """Each quantiser on a row of its own."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(module(x[i]) for i, module in enumerate(self.each))


def _near_edges(rounders: list[nn.Module], count: int) -> Tensor:
    """Random numbers for each quantiser, and all within 40 float32 of where its mask changes."""
    rows, columns = len(rounders), math.ceil(count / len(rounders))
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)) * 3
    for row, module in zip(x, rounders, strict=True):
        below, above = (order_of(row.sort().values.numpy()[i]) for i in (slice(None, -1), slice(1, None)))
        apart = _mask(module, number_of(below)) != _mask(module, number_of(above))
        below, above = below[apart], above[apart]
        inside = _mask(module, number_of(below))
        while (wide := above - below > 1).any():
            half = np.where(wide, (below + above) // 2, below)
            like = _mask(module, number_of(half)) == inside
            below, above = np.where(wide & like, half, below), np.where(wide & ~like, half, above)
        edges = number_of((below[:, None] + np.arange(-40, 41)).ravel())[:columns]
        row[: len(edges)] = torch.from_numpy(edges)
    return x


def _mask(module: nn.Module, x: np.ndarray) -> np.ndarray:
    given = torch.from_numpy(x).requires_grad_()
    (gradient,) = torch.autograd.grad(module(given).sum(), given)
    return (gradient != 0).numpy()


def masks_of(model: nn.Module, x: Tensor, dynamo: bool) -> tuple[int, int]:
    """How many gradients by an input are zero in one of eager and file alone, of how many."""
    program = exporter.export(model, (x,), dynamo=dynamo, portable=True)
    return _gradients(program, model, [(x,)], [str(program.model.graph.inputs[0].name)])


def _gradients(program: exporter.Program, model: nn.Module, given: list, names: list[str]) -> tuple[int, int]:
    """The same of all inputs and rounded weights. The gradient of a bias or of a step is a sum, and may be all rounding error: it has no mask."""
    weights = {name: each for name, each in model.named_parameters() if each.ndim > 1 and name.endswith("weight")}
    held = {name: each for name, each in weights.items() if name in program.model.graph.initializers}
    graph = exporter.build_gradient_graph(program, wrt=[*names, *held])
    session = exporter.inference_session(graph)
    wanted = [f"{name}_grad" for name in (*names, *held)]
    cotangents = [value.name for value in session.get_inputs()[len(names) :]]
    draw = torch.Generator().manual_seed(3)
    off = count = 0
    for some in given:
        inputs = [each.clone().requires_grad_() for each in some]
        outputs = pytree.tree_leaves(model(*inputs))
        along = [torch.rand(each.shape, generator=draw) + 0.5 for each in outputs]
        expected = torch.autograd.grad(outputs, [*inputs, *held.values()], along, allow_unused=True, materialize_grads=True)
        feeds = {name: each.detach().numpy() for name, each in zip([*names, *cotangents], [*inputs, *along], strict=True)}
        for one, other in zip(session.run(wanted, feeds), expected, strict=True):
            off, count = off + int(((one != 0) != (other.numpy() != 0)).sum()), count + one.size
    return off, count


# ----------------------------------------------------------------------------------------------------------------------- command
def main(arguments: list[str] | None = None) -> int:
    """Run and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("patterns", nargs="*", default=["*"])
    parser.add_argument("--exporters", nargs="+", choices=sorted(_EXPORTERS), default=sorted(_EXPORTERS))
    parser.add_argument("--inputs", type=int, default=1000, help="inputs of each model")
    parser.add_argument("--masks", type=int, default=1_000_000, help="numbers for the masks of its quantisers")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    print(f"| model | exporter | {_HEADS} |\n|{'---|' * 8}", flush=True)
    chosen = {name: each for name, each in TWELVE.items() if any(fnmatch.fnmatch(name, p) for p in options.patterns)}
    for (name, (case, package)), which in itertools.product(chosen.items(), options.exporters):
        if package and importlib.util.find_spec(package) is None:
            print(f"| {name} | {which} | {package} is not installed |", flush=True)
            continue
        rows.append(judge(case, _EXPORTERS[which], inputs=options.inputs, masks=options.masks))
        most, why = KNOWN.get(name, (0.0, ""))
        told = list(rows[-1].reasons)
        for each in rows[-1].missed:
            told.append(f"MISSED: {each}" + (f", as known: {why}" if each == "levels" and rows[-1].levels <= most else ""))
        print(f"| {name} | {which} | {rows[-1]} |" + "".join(f"\n    {each}" for each in told), flush=True)
    integers, quantized = sum(row.integers for row in rows), sum(row.quantized for row in rows)
    print(f"{integers} of {quantized} quantised products in integers ({integers / max(quantized, 1):.1%})")
    few = integers < (1 - LIMITS["float"]) * quantized
    return int(not rows or few or any(row.missed for row in rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    sys.exit(main())
