"""The spellings of the calls that we stand in for: which there are, and whether what stands in takes each as torch does.

`python -m tests.symbolics.quirks.spellings` counts them. Samples are those of torch's own database; what torch's parser does not take,
eager mode says.
"""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics.capture.flags import Flags
from symbolics.capture.torch_calls import TorchCalls
from symbolics.quirks import SPELLINGS
from symbolics.quirks.spelling import Form
from tests.operators.samples import operators

__all__ = ["FUNCTIONS", "NUMPY", "Spelling", "differences", "spellings", "sweep", "title"]

#: What numpy calls an argument, and what torch's parser takes for it.
NUMPY = {"dim": ("axis",), "keepdim": ("keepdims",), "other": ("x2",)}
DROPOUTS = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
RANDOM = {"empty", "multinomial", "normal", "rand", "randn", "randperm", "rrelu", *DROPOUTS}
#: Functions of sparse tensors, of storages and of random numbers of a key, which have no place in a file; an LSTM, at whose lists torch itself crashes; and a
#: range, at whose ``arange(False, True, True, out=...)`` it does; a bicubic resize, which the database lacks and test_antialias.py calls.
NOT_CALLED = {
    "_coalesced_",
    "_philox_normal_",
    "_philox_uniform_",
    "_upsample_bicubic2d_aa",
    "arange",
    "lstm",
    "resize_as_sparse_",
    "set_",
    "sparse_resize_",
    "sparse_resize_and_clear_",
}
FUNCTIONS = [function for function in SPELLINGS if function.__name__ not in NOT_CALLED]
_x, _i = torch.tensor([[0.5, -1.5, 2.0], [0.0, 3.0, -0.25]]), torch.tensor([0, 1, 1])
_scales, _zeros = torch.tensor([0.1, 0.25]), torch.zeros(2, dtype=torch.int32)
_SAMPLES: dict[str, list[tuple[Any, ...]]] = {  # those that the database does not have under this name
    "__and__": [(_i, 1)],
    "__or__": [(_i, 2)],
    "__xor__": [(_i, 2)],
    **{f"__i{name}__": [(_i, 2), (_i, torch.tensor([1, 0, 2]))] for name in ("and", "or", "xor", "lshift", "rshift")},
    "__lshift__": [(_i, 2)],
    "rand": [((3, 2),), ((),)],
    "randn": [((3, 2),), ((),)],
    "randperm": [(3,)],
    **{
        f"{name}{n}d": [(torch.arange(float(4**n)).reshape(1, 1, *[4] * n), None, [1.7] * n)]
        for name in ("_upsample_nearest_exact", "upsample_nearest")
        for n in (1, 2, 3)
    },
    "unfold": [(_x, 1, 2, 1), (_x, -2, 2, 1)],
    "where": [(_x > 0, _x > 1, _x > -1), (_x > 0, _x, _x.flip(0)), (_x > 0, _x, 0.5), (_x, _x > 0, _x.flip(0))],
    "tensor": [([1, 2.5],), (((1, 2), (3, 4)),), (2,)],
    "new": [(_x, 3, 2), (_x, [1.0, 2.0])],
    "new_tensor": [(_x, [1, 2.5]), (_i, [1, 2])],
    "as_tensor": [([1, 2.5],), (_x,), (2,)],
    "bernoulli_": [(_x, 0.5), (_x, _x.sigmoid())],
    "copy_": [(_x, _x.flip(0)), (_x, torch.tensor(2))],
    "detach_": [(_x,)],
    "fill_diagonal_": [(_x, 2.0), (_x, 2.0, True)],
    "float_power_": [(_x.double(), 2.0), (_x.double(), torch.tensor(2.0))],
    "random_": [(_x,), (_x, 1, 5)],
    "requires_grad_": [(_x,), (_x, False)],
    "batch_norm": [(_x, None, None, _x[0] * 0, _x[1] * 0 + 1, False, 0.1, 1e-5, False)],
    "block_diag": [([_x, _x],)],
    "cdist": [(_x, _x.flip(0), 2.0, None), (_x, _x.flip(0), 3.0, 1)],
    "cosine_embedding_loss": [(_x, _x.flip(0), torch.tensor([1, -1])), (_x, _x.flip(0), torch.tensor([1, -1]), 0.5, 2)],
    **{f"{name}{end}": [(_x, 0.5, True), (_x, 0.5, False)] for name in DROPOUTS for end in ("", "_")},
    **{f"rrelu{end}": [(_x,), (_x, 0.1, 0.3, True), (_x, 0.1, 0.3, False)] for end in ("", "_")},
    "huber_loss": [(_x, _x.flip(0)), (_x, _x.flip(0), 1, 0.5)],
    "instance_norm": [(_x[None], None, None, None, None, True, 0.1, 1e-5, False)],
    "margin_ranking_loss": [(_x, _x.flip(0), _x.sign()), (_x, _x.flip(0), _x.sign(), 0.5, 1)],
    "hinge_embedding_loss": [(_x, _x.sign()), (_x, _x.sign(), 0.5, 1)],
    "poisson_nll_loss": [(_x, _x.abs(), True, False, 1e-8, 1)],
    "__rshift__": [(torch.tensor([5, -8]), 1)],
    "arctan2_": [(_x, _x.flip(0))],
    "clip_": [(_x, -1.0, 1.0), (_x, torch.tensor(-1.0), torch.tensor(1.0))],
    "cross_entropy_loss": [(_x, torch.tensor([0, 2]), None, 2, -100, 0.1)],
    "nll_loss_nd": [(_x, torch.tensor([0, 2]), None, 0, -100), (_x, torch.tensor([0, 2]), None, 1, 2)],
    "divide_": [(_x, _x.flip(0))],
    "embedding": [(_x, _i), (_x, _i, 1)],
    "embedding_bag": [(_x, _i, torch.tensor([0, 2])), (_x, _i, torch.tensor([0, 2]), False, 1)],
    "embedding_renorm_": [(_x, _i, 1.0, 2.0)],
    "fix_": [(_x,)],
    "im2col": [(torch.arange(32.0).reshape(1, 2, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1])],
    "multinomial": [(_x.abs() + 0.1, 1), (_x.abs() + 0.1, 2, True)],
    "normal": [(_x, _x.abs()), (_x, 2.0)],
    "scaled_dot_product_attention": [(_x[None], _x[None], _x[None]), (_x[None], _x[None], _x[None], _x[:, :2] > 0)],
    "threshold": [(_x, 0.1, 20.0)],
    "fake_quantize_per_tensor_affine": [(_x, 0.1, 1, -8, 7)],
    "fake_quantize_per_tensor_affine_cachemask": [(_x, 0.1, 1, -8, 7)],
    "fake_quantize_per_channel_affine": [(_x, _scales, _zeros, 0, -8, 7)],
    "fake_quantize_per_channel_affine_cachemask": [(_x, _scales, _zeros, 0, -8, 7)],
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": [(_x, _scales[:1], _zeros[:1], torch.ones(1, dtype=torch.int64), -8, 7)],
    "_fake_quantize_learnable_per_tensor_affine": [(_x, _scales[:1], torch.zeros(1), -8, 7, 1.0)],
    "fused_moving_avg_obs_fake_quant": [
        (_x, torch.ones(1), torch.ones(1), *(torch.zeros(1) for _ in "mMs"), torch.zeros(1, dtype=torch.int32), 0.01, -8, 7, 0)
    ],
    "_fake_quantize_learnable_per_channel_affine": [(_x, _scales, torch.zeros(2), 0, -8, 7, 1.0)],
}


def title(function: Any) -> str:
    """``Tensor.add_`` or ``add``: a name that says whether it is a method."""
    return f"Tensor.{function.__name__}" if isinstance(function, type(str.join)) else str(function.__name__)


@functools.cache
def _database() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for info in operators().values():
        if info.name.startswith("masked."):  # other functions of the same names
            continue
        for function in (info.op, info.method_variant, info.inplace_variant, *(alias.op for alias in info.aliases)):
            found.setdefault(getattr(function, "__name__", ""), []).append(info)
    return found


def _samples(name: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of a function, one for each set of them that differs in kinds."""
    yield from ((args, {}) for args in _SAMPLES.get(name, ()))
    seen = set()
    for info in _database().get(name, _database().get(name.rstrip("_"), [])):
        dtype = torch.float32 if torch.float32 in info.dtypes else torch.int64
        torch.default_generator.manual_seed(0)
        for sample in itertools.islice(info.sample_inputs_func(info, "cpu", dtype, False), 40):
            args = (sample.input, *sample.args)
            kind = (*map(_kind, args), *((key, _kind(value)) for key, value in sorted(sample.kwargs.items())))
            if kind not in seen and len(seen) < 6:
                seen.add(kind)
                yield args, dict(sample.kwargs)


def _kind(value: Any) -> Any:
    return (type(value), value.dim() > 0) if isinstance(value, torch.Tensor) else type(value)


@dataclass(frozen=True)
class Spelling:
    """One way to write a call.

    Attributes:
        function: What is called.
        args, kwargs: Its arguments.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return f"{title(self.function)}({', '.join([*map(_shown, self.args), *(f'{k}={_shown(v)}' for k, v in self.kwargs.items())])})"

    def __call__(self) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (self.args, self.kwargs))
        return self.function(*args, **kwargs)


def _shown(value: Any) -> str:
    return f"<{'x'.join(map(str, value.shape))}>" if isinstance(value, torch.Tensor) else repr(value)


def spellings(function: Any, samples: int = 6) -> Iterator[Spelling]:
    """Each spelling of some samples; some of them are none of torch's."""
    method = isinstance(function, type(str.join))
    for args, kwargs in itertools.islice(_samples(function.__name__), samples):
        for form in SPELLINGS[function]:
            given = form.bind(args, kwargs)
            if given is None or form.canon:
                continue
            yield from _of(function, form, given, method)
            break


def _of(function: Any, form: Form, given: dict[str, Any], method: bool) -> Iterator[Spelling]:
    order = [name for name in form.order if name in given]
    ahead = next((i for i, name in enumerate(form.order) if name not in given), len(form.order))
    by_name = {name: given[name] for name in given if name not in order}
    for count in range(1 if method else 0, ahead + 1):
        args = tuple(given[name] for name in order[:count])
        rest = {**{name: given[name] for name in order[count:]}, **by_name}
        firsts = ("input", "x", "a", "x1") if "self" in rest else ("self",)
        for first in firsts:
            named = {first if name == "self" else name: value for name, value in rest.items()}
            yield Spelling(function, args, named)
            theirs = [name for name in named if name in NUMPY]
            if theirs:
                yield Spelling(function, args, {NUMPY.get(name, (name,))[0]: value for name, value in named.items()})
            yield Spelling(function, args, {**named, "out": torch.empty(0)})
    if method and form.spread and isinstance(given[order[1]], (tuple, list)):
        yield Spelling(function, (given[order[0]], *given[order[1]]), {})
    first, *others = order
    if form.named == {"beta", "alpha"} and len(others) == 2:  # of old
        numbers = 2, 3
        for each in (numbers, numbers[:1]):
            args = (given[first], *each) if method else (each[0], given[first], *each[1:])
            yield Spelling(function, (*args, *(given[name] for name in others)), {})
    if form.named == {"value"} and len(others) == 2:
        yield Spelling(function, (given[first], 2, *(given[name] for name in others)), {})


def differences(function: Any, samples: int = 6) -> tuple[int, list[str]]:
    """How many spellings torch takes, and where what stands in for it differs, under Dynamo or in a trace of TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = [
            (spelling, result) for spelling in spellings(function, samples) if not isinstance(result := _outcome(spelling), Exception)
        ]

        def captured() -> list[Any]:
            with TorchCalls(Flags(torch.ops.pythonop.stop_gradient)):
                return [_outcome(spelling) for spelling, _ in wanted]

        found: list[Any] = []

        def forward(x: torch.Tensor) -> torch.Tensor:
            found.append(captured())
            return x + 1

        torch.jit.trace(forward, torch.zeros(1), check_trace=False)
        ways = {"captured": captured(), "traced": found[0]}
    random = function.__name__.strip("_") in RANDOM
    return len(wanted), [
        f"{way}: {spelling}: {why}"
        for way, results in ways.items()
        for (spelling, its), mine in zip(wanted, results, strict=True)
        if (why := _unlike(mine, its, random))
    ]


def _outcome(spelling: Spelling) -> Any:
    torch.default_generator.manual_seed(0)
    try:
        return spelling()
    except Exception as error:
        return error


def _unlike(got: Any, wanted: Any, random: bool) -> str:
    if isinstance(got, Exception):
        return f"{type(got).__name__}: {str(got).splitlines()[0]}"
    ours = [leaf for leaf in pytree.tree_leaves(got) if leaf is not None]
    theirs = pytree.tree_leaves(wanted)[: len(ours)]  # torch.embedding_bag: what nobody reads is not made
    if not theirs or len(ours) != len(theirs):
        return f"{len(ours)} results, not {len(theirs)}"
    for mine, its in zip(ours, theirs, strict=True):
        if not isinstance(its, torch.Tensor) or not isinstance(mine, torch.Tensor):
            return "" if mine == its else f"{mine}, not {its}"
        if mine.shape != its.shape or mine.dtype is not its.dtype:
            return f"{mine.dtype} {list(mine.shape)}, not {its.dtype} {list(its.shape)}"
        if not random and not torch.allclose(mine.double(), its.double(), rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"differs by {(mine - its).abs().max()}" if its.dtype is not torch.bool else "differs"
    return ""


def sweep(samples: int) -> tuple[list[Any], int, list[str]]:
    """The functions that were called, the number of spellings that torch takes, and what differs."""
    found = {function: differences(function, samples) for function in FUNCTIONS}
    called = [function for function, (tried, _) in found.items() if tried]
    return called, sum(tried for tried, _ in found.values()), [each for _, wrong in found.values() for each in wrong]


def main() -> None:
    called, tried, wrong = sweep(6)
    print("\n".join(wrong))
    print("without a call:", sorted(title(function) for function in FUNCTIONS if function not in called))
    print(f"{len(called)} functions, {tried} spellings, {len(wrong)} differences")


if __name__ == "__main__":
    sys.exit(main())
