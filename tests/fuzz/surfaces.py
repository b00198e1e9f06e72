"""The ten doors that a stranger's file comes through, and what is found wrong behind each.

A surface opens the file, runs it where it can, and returns what came out. What it raises is judged by whose it is: ours, that
of a Function which the file runs, the runtime's (fine where somebody made an onnxruntime.InferenceSession himself, a finding
elsewhere: the product's own doors raise errors of ours), or a finding.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime
import torch
from click.testing import CliRunner
from onnx.reference import ReferenceEvaluator

import exporter
from exporter.cli import main
from exporter.differences.diff import diff_files
from exporter.errors import full
from exporter.files.inspect import inspect_file
from exporter.files.program import Program
from exporter.files.read import open_model
from exporter.files.trust import Gate
from exporter.pictures.layout import Layout
from exporter.pictures.scene import Drawn
from exporter.pictures.svg import svg_of
from symbolics.errors import PythonopError
from symbolics.graph.values import is_python_op
from symbolics.node.attributes import read_attributes, read_call, values_of
from symbolics.node.dialects import DIALECTS
from symbolics.node.linked import backward_of
from symbolics.node.metadata import check_version, read_cumulative, read_pairing, read_state, read_step
from symbolics.node.names import CALL_ATTRIBUTE, OUTPUTS_KEY
from symbolics.node.result import count_tensors, rebuild
from tests.fuzz.functions import Marked
from tests.fuzz.seeds import ALLOW
from tests.fuzz.watch import METER, frames_of, product_frame, whose

__all__ = ["SURFACES", "Outcome", "Problem", "alone", "attempt", "iterate_outputs", "watch_runtimes"]

# As the errors of pythonop are to be.
_LINES, _CHARACTERS = 6, 2000
# A file to compare with.
_PLAIN = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) <float[1] w = {1}> { y = Add(x, w) }'
)
# Larger inputs are not made: the runtime would only count zeros.
_MAX_FEED = 1 << 20


@dataclass
class Problem:
    """Something that may not happen.

    Attributes:
        kind: A word for it.
        text: What it says.
        error: The type of the exception, "" where there was none.
        frame: The innermost function of ours that was running, "" where there was none.
    """

    kind: str
    text: str
    error: str = ""
    frame: str = ""


@dataclass
class Outcome:
    """How a file got on at a surface: ``result``, ``ours``, ``runtime`` or ``function``, and what was wrong."""

    end: str
    problems: list[Problem] = field(default_factory=list)


class _Wrong(Exception):
    """A finding that is no exception of the product."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class _Unnamed(Exception):
    """onnxruntime cannot say the names of its inputs."""


@dataclass
class _Case:
    """A file on the disk, and what came out of it so far: arrays, texts and paths, in which the canary is searched."""

    path: Path
    results: list[Any] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


# -------------------------------------------------------------------------------------------------------- the surfaces


def _inspect(case: _Case) -> None:
    facts = inspect_file(case.path)
    case.results.append(json.dumps(facts.as_json()))
    for row in facts.rows:
        if row.error is not None:
            _check_text(row.error, "a row's error")


def _gradient(case: _Case) -> None:
    model = exporter.build_gradient_graph(case.path)
    case.results.append(ir.to_proto(model).SerializeToString())


def _tangent(case: _Case) -> None:
    model = exporter.build_tangent_graph(case.path)
    case.results.append(ir.to_proto(model).SerializeToString())


def _session(case: _Case) -> None:
    session = exporter.inference_session(case.path, ALLOW)
    _run(case, session, session.store)


def _plain(case: _Case) -> None:
    session = onnxruntime.InferenceSession(str(case.path), exporter.session_options(allow=ALLOW), providers=["CPUExecutionProvider"])
    _run(case, session, None)


def _run(case: _Case, session: Any, store: Any) -> None:
    try:
        inputs = [(value.name, value.type, value.shape) for value in session.get_inputs()]
    except UnicodeDecodeError as error:  # onnxruntime takes names that Python cannot say
        raise _Unnamed from error
    feeds = {name: _feed(kind.removeprefix("tensor(").removesuffix(")"), shape) for name, kind, shape in inputs}
    try:
        results = session.run(None, feeds)
    except BaseException:
        if store is not None and (len(store) or store.runs):
            case.problems.append(Problem("contexts left", f"{len(store)} contexts after a run that failed"))
        raise
    case.results += results
    for value, result in zip(session.get_outputs(), results, strict=True):
        _check_result(value, result)
    if store is not None:
        handles = {int(n) for array in results if getattr(array, "dtype", None) == "int64" and array.size < 100 for n in array.flat}
        if not store.contexts.keys() <= handles:
            case.problems.append(Problem("contexts left", f"{len(store)} contexts after a run whose results do not name them"))


def _check_result(value: Any, result: Any) -> None:
    if not value.type.startswith("tensor(") or not isinstance(result, np.ndarray):
        return
    kind = ir.DataType.__members__.get(value.type[len("tensor(") : -1].upper())
    if kind is None or kind is ir.DataType.STRING:
        wrong = kind is ir.DataType.STRING and not (result.dtype == object and all(isinstance(item, str) for item in result.flat))
    else:
        wrong = result.dtype.itemsize != kind.numpy().itemsize or result.dtype.kind in "OUS"
    if wrong:
        raise _Wrong("another type", f"the output {value.name[:60]!r} is declared {value.type} and is {result.dtype}")


def _reference(case: _Case) -> None:
    evaluator = exporter.reference_evaluator(case.path, ALLOW)
    feeds = _feeds_of_reference(evaluator)
    try:
        case.results += evaluator.run(None, feeds)
    except BaseException:
        if len(evaluator.store) or evaluator.store.runs:
            case.problems.append(Problem("contexts left", f"{len(evaluator.store)} contexts after a run that failed"))
        raise


def _load(case: _Case) -> None:
    module = exporter.load(case.path, allow=ALLOW)
    inputs = []
    for value in module._onnx.inputs.values():
        dims = [] if value.shape is None else [d if isinstance(d, int) else None for d in value.shape]
        array = _feed(int(value.dtype or 0), dims)
        tensor = torch.from_numpy(array) if array.dtype.kind in "fiub" else torch.from_numpy(np.zeros(array.shape, np.float32))
        inputs.append(tensor.requires_grad_() if tensor.is_floating_point() else tensor)
    try:
        result = module(*inputs)
    except TypeError as error:
        if "the input" in str(error) or "the model" in str(error):
            return  # load()'s word to a caller whose arguments do not fit
        raise
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    case.results += [
        leaf.detach().contiguous().view(-1).view(torch.uint8).numpy() for leaf in leaves if leaf.numel() and leaf.dtype is not torch.bool
    ]
    wanted = [leaf.double().sum() for leaf in leaves if leaf.requires_grad and leaf.is_floating_point()]
    if wanted:
        sum(wanted[1:], wanted[0]).backward()
    repr(module), module.state_dict()


def _command(case: _Case) -> None:
    out = case.path.with_name("out")
    for arguments in (
        ["inspect", str(case.path)],
        ["inspect", "--json", str(case.path)],
        ["gradient", str(case.path), "-o", f"{out}.onnx"],
        ["run", str(case.path), *(part for entry in ALLOW for part in ("--allow", entry)), "-o", f"{out}.npz"],
    ):
        done = CliRunner().invoke(main, arguments)
        case.results += [done.stdout, done.stderr, *(path for path in (Path(f"{out}.onnx"), Path(f"{out}.npz")) if path.exists())]
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        if done.exit_code not in (0, 1, 2) or (done.exit_code == 1 and arguments[0] != "inspect"):
            raise _Wrong("exit code", f"{arguments[0]} ends with {done.exit_code}")
        _check_command(arguments[0], done)


def _quantize(case: _Case) -> None:
    """Integers, weights of 4 bits, QONNX and back: what one refuses, another may take."""
    refused: PythonopError | None = None
    made = 0
    for make in (exporter.quantize, lambda path: exporter.quantize(path, weights="int4"), exporter.to_qonnx, exporter.from_qonnx):
        try:
            with mock.patch("exporter.quantization.quantize.kernels_of", return_value="not asked"):  # it has a folder of its own
                program = make(case.path)
        except PythonopError as error:
            _check_error(error)
            refused = error
            continue
        made += 1
        case.results += [program.model_proto.SerializeToString(), str(program)]
        for line in str(program).splitlines() if program.__class__ is not Program else ():
            if bad := [c for c in line if not c.isprintable()]:
                raise _Wrong("message", f"a report prints {bad[0]!r}: {line[:200]!r}")
    if not made and refused is not None:
        raise refused


def _compare_and_draw(case: _Case) -> None:
    found = diff_files(case.path, case.path)
    if not found.equal:
        raise _Wrong("difference", f"a file differs from itself: {found}"[:900])
    case.results.append(json.dumps(diff_files(case.path, _PLAIN).as_json(), allow_nan=False))
    drawn = Drawn(open_model(case.path, data=False))
    for scene in (
        drawn.whole(0),
        drawn.whole(1),
        drawn.whole(drawn.deepest),
        *(drawn.inside(drawn.home(key)) for key in drawn.modules()[:3]),
    ):
        # Graphviz is told numbers alone: anywhere will do.
        layout = Layout(9.0, 9.0, [(0.0, 0.0)] * len(scene.boxes), [[(0.0, 0.0)] * 4] * len(scene.arrows), [(0.0, 0.0, 9.0, 9.0)] * 99)
        text = svg_of(scene, layout, case.path.name)
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(text).iter()}
        if tags - {"svg", "title", "style", "rect", "g", "path", "text"}:
            raise _Wrong("markup", f"a picture has elements {tags}")


def _check_command(name: str, done: Any) -> None:
    for line in (done.stdout + done.stderr).splitlines():
        if bad := [c for c in line if not c.isprintable()]:
            raise _Wrong("message", f"{name} prints {bad[0]!r}: {line[:200]!r}")
    if "Traceback" in done.stderr:
        told = " / ".join(line.strip() for line in done.stderr.split("Traceback", 1)[1].splitlines())
        raise _Wrong("message", f"{name} prints a traceback: ...{told[-900:]}")
    if done.exit_code == 2:
        told = done.stderr.partition("error: ")
        if not told[1]:
            raise _Wrong("message", f"{name} ends with 2 and without a message: {done.stderr[:200]!r}")
        _check_text(told[2].strip(), f"the message of {name}")


def _node_level(case: _Case) -> None:
    """Every reader alone: one that refuses does not keep the next from its text."""
    model = open_model(case.path, data=False)
    gate = Gate(ALLOW)
    tensors = [object() for _ in model.graph.outputs]
    tries: list[Callable[[], Any]] = [
        lambda read=read: read(model.metadata_props) for read in (check_version, read_state, read_pairing, read_step, read_cumulative)
    ]
    if text := model.metadata_props.get(OUTPUTS_KEY):
        tries += [
            lambda: count_tensors(text),
            lambda: repr(rebuild(text, tensors, gate)),
            lambda: rebuild(text, tensors, gate, lambda why: None),
        ]
    tries += [lambda function=function: repr(backward_of(model, function)) for function in model.functions.values()]
    for graph in (model.graph, *model.functions.values()):
        for node in ir.traversal.RecursiveGraphIterator(graph):
            if is_python_op(node):
                tries += [
                    lambda node=node: repr(read_attributes(values_of(node))),
                    lambda node=node: read_attributes(values_of(node), gate),
                ]
                tries.append(lambda node=node: read_call(str(values_of(node).get(CALL_ATTRIBUTE, "{}")), "Function"))
    for schema in (None, *DIALECTS):
        tries.append(lambda schema=schema: _save(case, Program(open_model(case.path)), schema))
    tries.append(lambda: _save(case, Program(open_model(case.path)), None, external_data=True))
    refused: PythonopError | None = None
    for attempt_one in tries:
        try:
            attempt_one()
        except PythonopError as error:
            _check_error(error)
            refused = error
    if refused is not None:
        raise refused


def _save(case: _Case, program: Program, schema: str | None, **options: Any) -> None:
    path = case.path.with_name("out.onnx")
    program.save(path, schema, **options)
    case.results.append(path)
    open_model(path)


def _feeds_of_reference(evaluator: Any) -> dict[str, Any]:
    feeds = {}
    for name, kind in zip(evaluator.input_names, evaluator.input_types, strict=True):
        kind = kind.tensor_type
        feeds[name] = _feed(kind.elem_type, [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim])
    return feeds


def alone(path: Path, surface: int) -> None:
    """The same file on the surface's runtime without anything of ours: where that ends the process as well, the fault is not ours."""
    if surface == 5:
        evaluator = ReferenceEvaluator(str(path))
        evaluator.run(None, _feeds_of_reference(evaluator))
        return
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    _run(_Case(path), session, None)


SURFACES: dict[int, tuple[str, Callable[[_Case], None]]] = {
    1: ("inspect_file", _inspect),
    2: ("build_gradient_graph", _gradient),
    3: ("inference_session", _session),
    4: ("plain onnxruntime session", _plain),
    5: ("reference_evaluator", _reference),
    6: ("load", _load),
    7: ("command line", _command),
    8: ("readers and writers of nodes", _node_level),
    9: ("build_tangent_graph", _tangent),
    10: ("differences and pictures", _compare_and_draw),
    11: ("quantize and QONNX", _quantize),
}


def _feed(kind: Any, dims: Any) -> Any:
    """Something for an input: of its type and shape where both can be had."""
    found = ir.DataType.__members__.get(kind.upper()) if isinstance(kind, str) else next((k for k in ir.DataType if k == kind), None)
    found = {"FLOAT": ir.DataType.FLOAT}.get(str(kind).upper(), found)
    shape = [d if isinstance(d, int) and d >= 0 else 2 for d in dims or ()]
    if len(shape) > 32 or math.prod(max(d, 1) for d in shape) > _MAX_FEED:
        shape = [1]
    if found is ir.DataType.STRING:
        return np.full(shape, "text", dtype=object)
    try:
        dtype = (found or ir.DataType.FLOAT).numpy()
    except (TypeError, KeyError):
        dtype = np.dtype(np.float32)
    return np.full(shape, 1, dtype=dtype)


# --------------------------------------------------------------------------------------------------------- the judgement


def _check_text(text: str, what: str) -> None:
    if bad := [c for c in text if not (c.isprintable() or c == "\n")]:
        raise _Wrong("message", f"{what} holds {bad[0]!r}: {text[:300]!r}")
    if len(text) > _CHARACTERS or text.count("\n") >= _LINES:
        raise _Wrong("message", f"{what} has {len(text)} characters in {text.count(chr(10)) + 1} lines: {text[:300]!r}")


def _check_error(error: PythonopError) -> None:
    _check_text(str(error), f"a {type(error).__name__}")
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None:
        if id(current) in seen:
            raise _Wrong("cause", "its causes are a circle")
        seen.add(id(current))
        current = current.__cause__


def _judge(surface: int, error: BaseException) -> tuple[str, list[Problem]]:
    frames = frames_of(error)
    where = product_frame(frames)
    if isinstance(error, _Wrong):
        return "finding", [Problem(error.kind, str(error), frame=where)]
    if isinstance(error, PythonopError):
        try:
            _check_error(error)
        except _Wrong as wrong:
            return "ours", [Problem(wrong.kind, str(wrong), type(error).__name__, where)]
        return "ours", []
    owner = "runtime" if "onnxruntime" in type(error).__module__ or isinstance(error, _Unnamed) else whose(frames)
    if owner == "native" and type(error) is RuntimeError:
        owner = "function"  # torch's engine about a Function's backward
    if surface == 4 and owner in ("runtime", "function"):  # onnxruntime's own session: what a Function raises is a text there
        return "runtime", []
    if surface in (3, 5, 6) and (isinstance(error, Marked) or owner == "function"):
        return "function", []
    text = " ".join(f"{type(error).__name__}: {str(error)[:300]}".split())
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    if root is not error:
        text += f" <- {type(root).__name__}: {' '.join(str(root)[:200].split())}"
    return "finding", [Problem("the runtime's own exception" if owner == "runtime" else "exception", text, type(error).__name__, where)]


def attempt(surface: int, path: Path) -> tuple[Outcome, list[Any]]:
    """One file at one surface.

    Returns:
        How it went, and everything that came out: arrays, bytes, texts and paths.
    """
    case = _Case(path)
    told: list[str] = []
    with warnings.catch_warnings(), full():  # whose fault it is shows in the frames
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, category, *_, **__: told.append(f"{category.__module__}|{message}")
        try:
            SURFACES[surface][1](case)
            end, problems = "result", []
        except BaseException as error:
            end, problems = _judge(surface, error)
            case.results.append(_texts(error))
    for text in told:
        module, _, message = text.partition("|")
        case.results.append(message)
        if module.startswith(("symbolics", "exporter")):
            try:
                _check_text(message, "a warning")
            except _Wrong as wrong:
                problems.append(Problem(wrong.kind, str(wrong)))
    return Outcome(end, [*case.problems, *problems]), case.results


def _texts(error: BaseException | None) -> str:
    texts = []
    while error is not None and len(texts) < 20:
        texts.append(str(error))
        error = error.__cause__
    return "\n".join(texts)


# ------------------------------------------------------------------------------------------- memory that is the runtime's


def _metered(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with METER.runtime():
            return function(*args, **kwargs)

    return call


def watch_runtimes() -> None:
    """From here on in this process, what onnxruntime and onnx.reference take is not counted as ours."""
    for owner, names in (
        (onnxruntime.InferenceSession, ("__init__", "run", "run_with_iobinding", "run_with_ortvaluevector")),
        (ReferenceEvaluator, ("run",)),
    ):
        for name in names:
            setattr(owner, name, _metered(getattr(owner, name)))


def iterate_outputs(results: list[Any]) -> Iterator[bytes]:
    """What came out, as bytes."""
    for result in results:
        if isinstance(result, Path):
            yield result.read_bytes() if result.is_file() else b""
        elif isinstance(result, np.ndarray):
            yield "".join(map(str, result.flat)).encode("utf-8", "replace") if result.dtype == object else result.tobytes()
        elif isinstance(result, str):
            yield result.encode("utf-8", "replace")
        elif isinstance(result, bytes):
            yield result
