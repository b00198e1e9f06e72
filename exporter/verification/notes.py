"""Why numbers of a right file may differ from eager's: the function enlarges roundings, or chooses between equal values."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from exporter.forward.ways_out import taken_for_constants
from exporter.runtime.changed import named
from exporter.verification.compare import FACTOR, FEW, HALF_FACTOR, ROUGH, limit_of, tolerance_of
from exporter.verification.rows import ELSEWHERE, ZEROS, Row
from exporter.verification.steps import shapes_of
from symbolics.graph.values import is_python_op
from symbolics.graph.walk import walk
from symbolics.node.names import BACKWARD_KEY

__all__ = [
    "ALWAYS",
    "CHANGED",
    "OUTPUTS_ALONE",
    "Note",
    "choices_of",
    "note_on_backward",
    "note_on_changes",
    "note_on_constants",
    "note_on_half",
    "note_on_kept_code",
    "note_on_kept_values",
    "note_on_no_departure",
    "note_on_outputs",
    "note_on_zeros",
    "notes_on",
]

#: The headings of what counts also where nothing differs.
CHANGED, OUTPUTS_ALONE, NO_GRADIENT, KEPT = "Changed since the export", "Outputs alone", "Zeros for None", "Values of the example"
HALF = "Half precision inside"
#: Of outputs that cannot be compared.
OTHER_OUTPUTS = "Other outputs"
ALWAYS = frozenset((CHANGED, OUTPUTS_ALONE, NO_GRADIENT, KEPT, HALF))

#: Operators at whose result one rounding may choose: the largest of several, the nearest of two, a side of a bound.
_CHOOSING = frozenset(
    "ArgMax ArgMin Ceil Floor GlobalMaxPool Hardmax Max MaxPool MaxRoiPool Min Mod ReduceMax ReduceMin Round Sign TopK".split()
)
#: Operators whose slope jumps: in 16 bits a rounding is often enough to choose.
_GATES = frozenset("Abs Celu Clip Elu HardSigmoid HardSwish LeakyRelu PRelu Relu Selu ThresholdedRelu".split())
_COMPARING = frozenset("Equal Greater GreaterOrEqual Less LessOrEqual".split())


@dataclass(frozen=True)
class Note:
    """A heading, and a paragraph for people."""

    title: str
    text: str


def choices_of(model: ir.Model, *, gates: bool = False) -> dict[str, int]:
    """Each operator of a file that chooses between values, with its number; a PythonOp may do so unseen, and counts.

    Args:
        model: The file.
        gates: Whether those count of which the slope alone depends on a choice.
    """
    choosing = _CHOOSING | _GATES if gates else _CHOOSING
    found = Counter[str]()
    nodes = [*walk(model.graph), *(node for function in model.functions.values() for node in walk(function))]
    for node in nodes:
        first = node.inputs[0] if node.inputs else None
        floats = first is not None and first.dtype is not None and first.dtype.is_floating_point()
        if is_python_op(node):
            found["PythonOp"] += 1
        elif not node.domain and (node.op_type in choosing or (node.op_type in _COMPARING and floats)):
            found[node.op_type] += 1
    return dict(found.most_common())


def notes_on(rows: Sequence[Row], choices: dict[str, int]) -> list[Note]:
    """What there is to know of these rows; nothing where each is what rounding makes it.

    Args:
        rows: All of them.
        choices: What `choices_of` counted.
    """
    grown = [row for row in rows if row.eager_error is not None and row.eager_error > tolerance_of(row.half or row.dtype)]
    grown = [row for row in grown if not row.half or row.reference != "float64"]  # `note_on_half` has those
    turned = [row for row in grown if row.reference != "float64"]
    if choices and not any(row.kind == "output" for row in turned):
        grown = [row for row in grown if row not in turned]  # near outputs, far gradients: no rounding has grown, a choice fell otherwise
    notes = [_on_growth(grown)] if grown else []
    if choices and (turned or any(not row.ok and not row.problem for row in rows)):
        notes.append(_on_ties(choices, turned, all(row.ok for row in rows)))
    return notes


def note_on_constants(rows: Sequence[Row]) -> Iterator[Note]:
    """A file that is right at the example alone."""
    bad = [row for row in rows if not row.ok]
    if bad and all(row.half and not row.problem and not row.name.startswith("output ") for row in bad):
        return  # gradients alone, in 16 bits: a slope that jumps says as much
    if bad and all(row.kind in ELSEWHERE and (row.eager_error or 0.0) <= limit_of(row) for row in bad):
        yield Note(
            "Right at the example alone",
            "The export took for a constant what forward computes from its input: NumPy, .item(), float() or tolist() of a tensor, an `if` on a tensor's values, a "
            "size as a number. Write it in operators of torch, put it into an autograd Function, which stays Python in the file.",
        )


def note_on_half(rows: Sequence[Row]) -> Iterator[Note]:
    """What tensors of a model that computes in 16 bits inside are allowed, and why."""
    if found := [row for row in rows if row.half]:
        half, wide = found[0].half, ", ".join(dict.fromkeys(row.dtype for row in found))
        one = torch.finfo(getattr(torch, half)).eps
        text = (
            f"Operators of the model give results in {half} (autocast, .half(), .float()), whose roundings are {one:.1e}: {len(found)} of {len(rows)} rows, of {wide}, are allowed what "
            f"that makes of them, at least {HALF_FACTOR * one:.1e}, {FACTOR:g} times eager's own error up to {ROUGH:.0e} and {HALF_FACTOR:g} times beyond, at most "
            f"{tolerance_of(half):.0e} (of a gradient that is small beside others, of those)."
        )
        if any(row.eager_error is None or row.eager_error > limit_of(row) for row in found):
            text += f" Where there is no eager in float64, or it is further away than that, {tolerance_of(half):.0e} from the nearer of the two are allowed."
        yield Note(HALF, text)


def note_on_kept_values(said: Sequence[warnings.WarningMessage]) -> Iterator[Note]:
    """What a comparison cannot tell: other inputs are tried, but not others of the weights.

    Args:
        said: The warnings of the export.
    """
    if (kept := taken_for_constants(said)) is not None:
        yield Note(
            KEPT,
            f"{kept[0]} takes the value of a tensor out of torch. The file holds what follows from that value at the example and with these weights: the number "
            "of passes of a `while`, one side of an `if`, a number. Other inputs were compared, other weights were not. Way out: an autograd Function, or opaque=.",
        )


def note_on_outputs(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], names: Sequence[str]) -> Iterator[Note]:
    """Outputs of another number or other shapes than the model's, of which there are no gradients to compare; what to do.

    Args:
        mine, theirs: Eager's outputs, and the file's.
        names: What the file calls its own.
    """
    one, two = shapes_of(mine), shapes_of(theirs)
    if one == two:
        return
    if len(one) != len(two):
        said = f"The file has {len(two)} output{'' if len(two) == 1 else 's'} ({', '.join(names)}), the model {len(one)}"
    else:
        index = next(index for index, shapes in enumerate(zip(one, two, strict=True)) if shapes[0] != shapes[1])
        name = f" ({names[index]})" if index < len(names) else ""
        said = f"Output {index}{name} is {two[index]} in the file, {one[index]} in the model"
    yield Note(
        OTHER_OUTPUTS,
        f"{said}: this is the file of another model, and gradients were not compared. Way out: export this model again, or give verify the TARGET (model, "
        "configuration and example) that the file was exported from.",
    )


def note_on_changes(changed: Mapping[str, list[str]]) -> Iterator[Note]:
    """Functions, and values that they read, that are others than when the file was exported."""
    codes, values = named(changed)
    if codes:
        text = ", ".join(codes)
        yield Note(
            CHANGED, f"{text[:1].upper()}{text[1:]}. The file calls the code of today, which need not compute what its graph was made for."
        )
    if values:
        yield Note(
            CHANGED,
            f"{', '.join(values)} when the file was exported. Functions read this of their class or module, and no file sets it: setup= can, "
            "or pass it to apply() as an argument.",
        )


def note_on_kept_code(rows: Sequence[Row], model: ir.Model) -> Iterator[Note]:
    """Functions of a file that was there before, and differs: they hold the code of the export, and nothing says whether that is today's.

    Args:
        rows: All of them.
        model: The file.
    """
    names = [function.name for function in model.functions.values() if BACKWARD_KEY in function.metadata_props]
    if names and any(not row.ok for row in rows):
        shown_names = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        yield Note(
            "The code of the export",
            f"The file holds {'Functions' if len(names) > 1 else 'a Function'} as {'they were' if len(names) > 1 else 'it was'} at the export ({shown_names}), without a fingerprint of the code. If the code has "
            "changed since, export again.",
        )


def note_on_backward(rows: Sequence[Row], written: Collection[str], *, is_there: bool) -> Iterator[Note]:
    """State that differs as eager's backward writes to it; and gradients that nobody compared.

    Args:
        rows: All of them.
        written: The parameters and buffers to which eager's backward wrote.
        is_there: Whether each Function has a backward.
    """
    if not is_there:
        yield Note(OUTPUTS_ALONE, "A Function of the model has no backward: eager has no gradients, and none were compared.")
    found = [row.name for row in rows if not row.ok and row.name in written]
    if found:
        names = ", ".join(dict.fromkeys(found))
        yield Note(
            "Written by a backward",
            f"A backward of the model writes to {names}, in eager; a file carries from step to step what the forward writes. Write it in forward, after what "
            "reads it, or in the training loop, where the file's users have to do so as well.",
        )


def note_on_zeros(rows: Sequence[Row]) -> Iterator[Note]:
    """Parameters for which eager has no gradient and the file has zeros."""
    if names := [row.name for row in rows if row.note == ZEROS]:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        yield Note(
            NO_GRADIENT,
            f"{', '.join(names[:5])}{more}: eager has no gradient here, for an opaque module took a way that does not reach them. The file has zeros: an optimizer with "
            "momentum or weight decay moves them, eager's leaves them as they are.",
        )


def note_on_no_departure(functions: Collection[str]) -> Note:
    """What to look at where `bisect` finds nothing."""
    text = (
        "None of the file's nodes stands out: each has inputs and results that eager has as well, also in another order, or none that eager has. Values are "
        "compared in this process, so what differs in a fresh process alone is not found either."
    )
    if functions:
        text += f" What the file calls in Python may be at fault: {', '.join(list(functions)[:6])}."
    return Note("First departure", text)


def _on_growth(grown: list[Row]) -> Note:
    far = [row for row in grown if row.reference != "float64"]
    worst = max(grown, key=lambda row: row.eager_error or 0.0)
    kind = worst.half or worst.dtype
    times = (worst.eager_error or 0.0) / torch.finfo(getattr(torch, kind)).eps
    roundings = f"{float(f'{times:.2g}'):,.0f} roundings of {kind}"
    limit = f"{min(map(limit_of, far or grown)):.0e}"
    text = [
        f"{_farthest(grown)}, {roundings}: the function enlarges roundings (it is ill-conditioned, or chaotic), in eager as in the file."
    ]
    if len(far) < len(grown):
        allowed = f"{FACTOR:g} times as far from it as eager's, one of few numbers up to {FACTOR * (1 + FEW):g} times"
        text.append(f"Up to {limit}, float64 is the reference, and a tensor may be {allowed}.")
    if far:
        text.append(f"Beyond {limit}, float64 has taken another course: {_compared(far)}.")
    if any(not row.ok for row in far):
        text.append(
            "That they differ says little: the model in float64 (model.double()), or one with fewer steps or layers, shows whether the file is right."
        )
    return Note("Errors that grow", " ".join(text))


def _on_ties(choices: dict[str, int], turned: list[Row], ok: bool) -> Note:
    named = [f"{name} ({count})" for name, count in choices.items() if name != "PythonOp"][:6]
    if "PythonOp" in choices:
        named.append("perhaps Functions inside their PythonOps")
    but = ", but by torch.topk: torch leaves open which of them it takes, the file takes the first" if "TopK" in choices else ""
    text = [
        f"What chooses between values here: {', '.join(named)}. Exactly equal ones are treated as torch's operator treats them{but}. Values that are equal but for "
        "a rounding are not: where sums are taken in another order, another one is chosen, and few elements change by much, often in the gradients alone."
    ]
    if turned:
        text.append(f"{_farthest(turned)}, so eager itself chooses otherwise there: {_compared(turned)}.")
    if not ok:
        text.append(
            "What differs by such a choice is gone at other inputs, random numbers in place of constant or whole ones for instance; what stays is no tie."
        )
    return Note("Ties and thresholds", " ".join(text))


def _farthest(rows: list[Row]) -> str:
    worst = max(rows, key=lambda row: row.eager_error or 0.0)
    name = worst.name if worst.kind == "output" else f"{worst.kind} {worst.name!r}"
    return f"Eager's own {name} is {worst.eager_error:.1e} away from the same model in float64"


def _compared(rows: list[Row]) -> str:
    kinds = ", ".join(dict.fromkeys(row.dtype for row in rows))
    return f"{len(rows)} tensor{' is' if len(rows) == 1 else 's are'} compared with eager in {kinds} instead"
