"""How long each node of a file takes on onnxruntime, by onnxruntime's own profiler."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from exporter.files.places import Part, Places
from exporter.files.read import open_model
from exporter.pictures.scene import is_called, title_of
from exporter.runtime.absent import NO_ONNXRUNTIME
from symbolics.errors import RunError
from symbolics.graph.walk import name_nodes, walk
from symbolics.text import shown

__all__ = ["NodeTime", "Profile", "profile"]

_SUFFIX = "_kernel_time"
_INLINED = "_inlfunc_"  # before the name of the function, and of its node
_COPIES = ("MemcpyFromHost", "MemcpyToHost")
_FUSED = "fused "  # before the name of the first node of several that became one


@dataclass
class NodeTime:
    """A node and its time.

    Attributes:
        name: Of the node; what onnxruntime made itself has a name of its own.
        operator: As onnxruntime ran it: a node may have been fused with others.
        function: Of a PythonOp and of its gradient, the class of its Function; "" for any other.
        module: The path of its module, "" where nothing says it.
        part: What it belongs to; None for what is not in the file.
        seconds: In one run, without the nodes of its bodies: the median of the runs.
        calls: How often it ran in one run.
        provider: The execution provider that ran it, as onnxruntime names it.
    """

    name: str
    operator: str
    function: str
    module: str
    part: Part | None
    seconds: float
    calls: int
    provider: str = ""


@dataclass
class Profile:
    """The times of a file.

    Attributes:
        rows: Its nodes, the slowest first.
        seconds: Of one run: the median. More than the rows together by what onnxruntime does between them.
        runs: How many were timed.
        load: Seconds to load the file.
        facts: What it was run on.
    """

    rows: list[NodeTime]
    seconds: float
    runs: int
    load: float
    facts: dict[str, str] = field(default_factory=dict)

    def by_operator(self) -> dict[str, tuple[float, int]]:
        """operator -> seconds and calls in one run, the slowest first; PythonOps by their Functions."""
        return _summed((f"{row.operator} {row.function}".strip(), row) for row in self.rows)

    def by_module(self) -> dict[tuple[str, str], tuple[float, int]]:
        """(part, path of the module) -> the same, without the modules inside it."""
        return _summed(((row.part or "onnxruntime's own", row.module), row) for row in self.rows)

    def by_part(self) -> dict[str, tuple[float, int]]:
        """Part -> the same."""
        return _summed((row.part or "onnxruntime's own", row) for row in self.rows)

    def by_provider(self) -> dict[str, tuple[float, int]]:
        """Execution provider -> the same."""
        return _summed((row.provider, row) for row in self.rows)

    @property
    def copies(self) -> tuple[float, int]:
        """Seconds and number of the copies between the memories of execution providers, in one run."""
        rows = [row for row in self.rows if row.operator in _COPIES]
        return sum(row.seconds for row in rows), sum(row.calls for row in rows)

    @property
    def python(self) -> float:
        """Seconds of one run in PythonOps and their gradients."""
        return sum(row.seconds for row in self.rows if row.function)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        operators = [{"operator": name, "seconds": s, "calls": n} for name, (s, n) in self.by_operator().items()]
        modules = [{"part": part, "module": path, "seconds": s, "calls": n} for (part, path), (s, n) in self.by_module().items()]
        return {
            "seconds": self.seconds, "runs": self.runs, "load": self.load, "python": self.python, "facts": self.facts,
            "providers": [{"provider": name, "seconds": s, "calls": n} for name, (s, n) in self.by_provider().items()],
            "copies": dict(zip(("seconds", "calls"), self.copies, strict=True)), "operators": operators, "modules": modules, "nodes": [asdict(row) for row in self.rows],
        }  # fmt: skip


def _summed(rows: Iterable[tuple[Any, NodeTime]]) -> dict[Any, tuple[float, int]]:
    seconds, calls = defaultdict[Any, float](float), Counter[Any]()
    for key, row in rows:
        seconds[key] += row.seconds
        calls[key] += row.calls
    return {key: (seconds[key], calls[key]) for key in sorted(seconds, key=lambda key: -seconds[key])}


def profile(
    source: Any,
    feeds: Mapping[str, np.ndarray],
    *,
    allow: Sequence[str] = (),
    runs: int = 10,
    providers: Sequence[Any] | None = None,
    as_written: bool = False,
    strict: bool = False,
) -> Profile:
    """Run a file and time its nodes.

    Args:
        source: A path, or what else `open_model` takes.
        feeds: input name -> array.
        allow: Patterns that the file may name; see `exporter.files.trust.Gate`.
        runs: How many runs are timed, after one that is not.
        providers: As `exporter.inference_session` takes them.
        as_written: Run each node as it is in the file; otherwise onnxruntime first fuses nodes and folds constants, as it does for anybody.
        strict: A Function that has changed since the file was exported is an error, not a warning.

    Raises:
        RunError: onnxruntime is not there, or cannot run the file with these inputs. Or, with ``strict``, a Function has changed.
        FormatError, TrustError: As `exporter.inference_session`.
    """
    from exporter.runtime.session import FATAL, inference_session

    try:
        import onnxruntime
    except ImportError as error:
        raise RunError(NO_ONNXRUNTIME) from error
    if runs < 1:
        raise RunError(f"a profile needs at least one run, not {runs}")
    model = open_model(source)
    if not len(model.graph):
        raise RunError("the file has no nodes: there is nothing to time")
    if lacking := [str(v.name) for v in model.graph.inputs if not v.is_initializer() and v.name not in feeds]:
        raise RunError(f"there is no array for the input {shown(lacking[0])!r} of the file: it takes {len(lacking)} more than were given")
    name_nodes(model)
    with tempfile.TemporaryDirectory(prefix="pythonop-profile-") as folder:
        options = onnxruntime.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "run")
        options.log_severity_level = FATAL
        if as_written:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = inference_session(model, allow, sess_options=options, providers=providers, strict=strict)
        try:
            for _ in range(runs + 1):
                session.run(None, dict(feeds))
        finally:
            path = session.end_profiling()
        events = _events(Path(path))
    facts = {"onnxruntime": onnxruntime.__version__, "providers": ", ".join(session.get_providers())}
    return _profile(model, events, facts)


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return [event for event in found if isinstance(event, dict) and event.get("ph", "X") == "X"]
    except (OSError, ValueError, TypeError) as error:
        raise RunError(
            f"what onnxruntime's profiler wrote cannot be read ({type(error).__name__}): is the disk of {path.parent.parent} full?"
        ) from error


def _profile(model: ir.Model, events: list[dict[str, Any]], facts: dict[str, str]) -> Profile:
    runs = sorted((e for e in events if e.get("name") == "model_run"), key=lambda event: event["ts"])[1:]  # the first one warms up
    times: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(runs))
    calls, operators, providers = Counter[str](), dict[str, str](), dict[str, str]()
    for event, seconds in _own_times([e for e in events if e.get("cat") == "Node" and str(e.get("name", "")).endswith(_SUFFIX)]):
        number = next((i for i, run in enumerate(runs) if run["ts"] <= event["ts"] <= run["ts"] + run["dur"]), None)
        if number is None:
            continue
        name = str(event["name"]).removesuffix(_SUFFIX)
        times[name][number] += seconds
        calls[name] += 1
        operators[name] = str(event.get("args", {}).get("op_name", "?"))
        providers[name] = str(event.get("args", {}).get("provider", ""))
    of = _Known(model)
    rows = [of.row(name, operators[name], statistics.median(each), round(calls[name] / len(runs))) for name, each in times.items()]
    for row in rows:
        row.provider = providers[row.name]
    rows.sort(key=lambda row: -row.seconds)
    load = sum(e["dur"] for e in events if e.get("name") in ("model_loading_array", "model_loading_uri", "session_initialization"))
    return Profile(rows, statistics.median(run["dur"] for run in runs) / 1e6, len(runs), load / 1e6, facts)


def _own_times(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Each event with its seconds, without those of events inside it: a Loop's time is that of its body's nodes, too."""
    own = {id(event): float(event["dur"]) for event in events}
    for thread in {event.get("tid") for event in events}:
        open_: list[dict[str, Any]] = []
        for event in sorted((e for e in events if e.get("tid") == thread), key=lambda e: (e["ts"], -e["dur"])):
            while open_ and event["ts"] >= open_[-1]["ts"] + open_[-1]["dur"]:
                open_.pop()
            if open_:
                own[id(open_[-1])] -= event["dur"]
            open_.append(event)
    return [(event, max(0.0, own[id(event)]) / 1e6) for event in events]


class _Known:
    """What a model says of the nodes that a profile names."""

    def __init__(self, model: ir.Model) -> None:
        self._places = Places(model)
        self._nodes = {str(inner.name): (inner, outer) for outer in model.graph for inner in walk([outer])}
        self._calls: dict[str, list[ir.Node]] = {function.name: [] for function in model.functions.values()}
        for outer in model.graph:
            for inner in walk([outer]):
                if inner.op_identifier() in model.functions:
                    self._calls[inner.op_type].append(outer)

    def row(self, name: str, operator: str, seconds: float, calls: int) -> NodeTime:
        """A node's time with what the model says of the node."""
        found = self._nodes.get(name) or self._nodes.get(name.removeprefix(_FUSED))
        if found is None:
            # Of a function that is called once, the node is the call's; of any other, its part alone may be known.
            callers = self._callers(name.removeprefix(_FUSED))
            parts = {self._places.part(node) for node in callers}
            module = self._places.module(callers[0]) if len(callers) == 1 else ""
            return NodeTime(name, operator, "", module, parts.pop() if len(parts) == 1 else None, seconds, calls)
        node, outer = found
        return NodeTime(
            name, operator, title_of(node) if is_called(node) else "", self._places.module(outer), self._places.part(outer), seconds, calls
        )

    def _callers(self, name: str) -> list[ir.Node]:
        """The calls of the function that a node was inlined from."""
        rest = name.removeprefix(_INLINED)
        known = [function for function in self._calls if rest != name and rest.startswith(function)]
        return self._calls[max(known, key=len)] if known else []
