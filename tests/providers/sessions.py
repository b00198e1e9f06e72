"""Sessions on execution providers, each in a process of its own: what dies there is an answer like any other.

What a provider is asked with: onnxruntime's CPU; OpenVINO, by its plugin where that offers a device, else by OpenVINO itself,
which is what the plugin has inside; WebAssembly by onnxruntime-web in Node, WebGPU in Chromium. None of them may hand a node to the CPU.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import onnx
import onnx_ir as ir

from exporter.runtime.provider_forms import FORMS, write_file
from tests.browser import WEBGPU, conversation, installed

__all__ = ["PROVIDERS", "STRICT", "Asked", "Failed", "Provider", "in_chromium", "missing", "placed"]

#: Where `make providers` installs what is asked; the variable PYTHONOP_PROVIDERS_DIR names another folder.
FOLDER = Path(os.environ.get("PYTHONOP_PROVIDERS_DIR", Path(sys.prefix, "providers")))
#: Seconds after which a provider does not come back.
PATIENCE = 120


class Failed(Exception):
    """A provider did not do it; the first argument says what: "opens", "runs" or "dies"; the second why."""


class _Session(Protocol):
    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Results by the names of the outputs."""


class Asked:
    """A provider's process, which holds the session that was opened last."""

    def __init__(self, provider: str) -> None:
        self.provider = provider
        self._process: Any = None

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def open(self, proto: onnx.ModelProto, carried: Mapping[str, str] = MappingProxyType({})) -> None:
        """Open it in the forms that the provider takes, without a node on the CPU.

        Args:
            proto: The model.
            carried: Outputs that are inputs of the next run, and those inputs.

        Raises:
            Failed: It does not open there.
        """
        self._narrowed: list[str] = []
        if (name := PROVIDERS[self.provider].name) in FORMS:
            model = ir.from_proto(proto)
            self._narrowed = write_file(name, model, carried)
            proto = ir.to_proto(model)
        self._ask("opens", proto.SerializeToString())

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run what was opened.

        Raises:
            Failed: It does not run.
        """
        given = {name: self._as_taken(array) if name in self._narrowed else array for name, array in feeds.items()}
        found: dict[str, np.ndarray] = self._ask("runs", given)
        return found

    @staticmethod
    def _as_taken(array: np.ndarray) -> np.ndarray:
        if np.size(array) and (np.max(array) > 2**31 - 1 or np.min(array) < -(2**31)):
            raise Failed("runs", "no integers beyond 32 bits")
        return np.asarray(array).astype(np.int32)

    def _ask(self, what: str, argument: Any) -> Any:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(self.provider, theirs), daemon=False)
            self._process.start()
            theirs.close()
        try:
            self._pipe.send((what, argument))
            if not self._pipe.poll(PATIENCE):
                self._end()
                raise Failed("dies", f"does not come back in {PATIENCE} s")
            error, found = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._end()
            raise Failed("dies", "the process ends") from None
        if error is not None:
            raise Failed(what, error)
        return found

    def _end(self) -> None:
        if self._process is not None:
            self._pipe.close()
            self._process.join(2)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            self._process = None


def _serve(provider: str, pipe: Connection) -> None:
    """Answer until nobody asks any more."""
    sys.path.append(str(FOLDER))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # what libraries write of what they refuse
    session: _Session | None = None
    with contextlib.ExitStack() as kept, contextlib.suppress(EOFError):
        opener = PROVIDERS[provider].opener(kept)
        while True:
            what, argument = pipe.recv()
            try:
                if what == "opens":
                    session, found = opener(argument), None
                else:
                    assert session is not None
                    found = session(argument)
            except Exception as error:  # whatever a library raises
                pipe.send((str(error), None))
            else:
                pipe.send((None, found))


# -------------------------------------------------------------------------------------------------------- the providers

_Opener = Callable[[bytes], _Session]


class Provider:
    """A provider of the table.

    Attributes:
        name: By which `exporter.runtime.provider_forms` knows it.
        said: With release, for the page.
    """

    def __init__(
        self, name: str, said: Callable[[], str], opener: Callable[[contextlib.ExitStack], _Opener], needs: Callable[[], str | None]
    ) -> None:
        self.name, self.said, self.opener, self.needs = name, said, opener, needs


def _by_onnxruntime(providers: Sequence[str]) -> Callable[[contextlib.ExitStack], _Opener]:
    def opener(_: contextlib.ExitStack) -> _Opener:
        import onnxruntime

        from exporter.runtime.providers import add_devices, choose

        def opened(model: bytes) -> _Session:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads, options.log_severity_level = 1, 4
            choice = choose(providers)
            if choice.names:
                options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            add_devices(options, choice)
            session = onnxruntime.InferenceSession(model, options, **({} if choice.providers is None else {"providers": choice.providers}))
            names = [value.name for value in session.get_outputs()]
            asked = {value.name for value in session.get_inputs()}
            return lambda feeds: dict(
                zip(names, session.run(None, {name: array for name, array in feeds.items() if name in asked}), strict=True)
            )

        return opened

    return opener


def _openvino_itself(_: contextlib.ExitStack) -> _Opener:
    import openvino

    core = openvino.Core()

    def opened(model: bytes) -> _Session:
        graph = onnx.load_from_string(model).graph
        names = [value.name for value in graph.input if value.name not in {kept.name for kept in graph.initializer}]
        types = {value.name: onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type) for value in graph.output}
        compiled = core.compile_model(core.read_model(model), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        request = compiled.create_infer_request()

        def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            given = {}
            for value, name in zip(compiled.inputs, _names_of(compiled.inputs, names, feeds), strict=True):
                array = np.ascontiguousarray(feeds[name]).reshape(np.shape(feeds[name]))
                is_bf16 = array.dtype.name == "bfloat16"
                given[name] = openvino.Tensor(array.view(np.uint16), array.shape, openvino.Type.bf16) if is_bf16 else openvino.Tensor(array)
                request.set_tensor(value, given[name])
            request.infer()
            found = {}
            for value in compiled.outputs:
                data = request.get_tensor(value).data.copy()
                for name in value.get_names() & types.keys():  # two outputs of one value have both names
                    found[name] = data.view(types[name]) if types[name].name == "bfloat16" else data
            return found

        return run

    return opened


def _names_of(inputs: Sequence[Any], names: Sequence[str], feeds: Mapping[str, np.ndarray]) -> list[str]:
    """Which of a file's inputs those of OpenVINO are: it leaves out what nobody reads, and what is handed on as an output has the output's name."""
    found = [next((name for name in names if name in value.get_names()), None) for value in inputs]
    rest = [name for name in names if name not in found]
    for place, value in enumerate(inputs):
        if found[place] is None:
            found[place] = next(
                name for name in rest if value.partial_shape.compatible(type(value.partial_shape)(list(np.shape(feeds[name]))))
            )
            rest.remove(found[place])
    return [name for name in found if name is not None]


def _openvino_has_a_device() -> bool:
    from exporter.runtime.providers import choose
    from symbolics.errors import PythonopError

    try:
        choose(["openvino"])
    except PythonopError:
        return False
    return True


def _openvino(kept: contextlib.ExitStack) -> _Opener:
    return (_by_onnxruntime(["openvino"]) if _openvino_has_a_device() else _openvino_itself)(kept)


def _needs_openvino() -> str | None:
    return None if _openvino_has_a_device() or importlib.util.find_spec("openvino") else "make providers"


def _said_of_openvino() -> str:
    from importlib.metadata import version

    if _openvino_has_a_device():
        return f"its plugin for onnxruntime, onnxruntime-ep-openvino {version('onnxruntime-ep-openvino')}"
    return f"OpenVINO {version('openvino')} on a processor, float32"


_ANSWER = Path(__file__).with_name("answer.mjs")
_NODE = """
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
const [driver] = process.argv.slice(2);
const { answering } = await import(driver);
const ort = createRequire(process.cwd() + "/")("onnxruntime-web");
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "fatal";
console.log = console.warn = console.error = () => {};
const answer = answering(ort, { executionProviders: ["wasm"], logSeverityLevel: 4 });
for await (const line of createInterface({ input: process.stdin })) process.stdout.write(JSON.stringify(await answer(JSON.parse(line))) + "\\n");
"""
# The placements stand in onnxruntime's log: a line for each graph and provider, and one for each node behind it.
_PAGE = """<script type="module">
const lines = [];
for (const kind of ["log", "info", "warn", "error", "debug"]) console[kind] = (...words) => lines.push(words.join(" "));
const [ort, { answering }] = await Promise.all([import("/ort/ort.webgpu.bundle.min.mjs"), import("/answer.mjs")]);
ort.env.wasm.numThreads = 1;
const answer = answering(ort, { executionProviders: ["webgpu"], logSeverityLevel: 4 });
for (let asked = await next(); asked; asked = await next()) {
  lines.length = 0;
  const given = await answer(asked);
  if (asked.placements) given.lines = lines.join("\\n").split("\\n").filter((line) => line.includes("VerifyEachNodeIsAssignedToAnEp"));
  await tell(given);
}
</script>"""
#: Behind these a page's WebAssembly is not what it was.
_BROKEN = re.compile(
    r"Aborted|RuntimeError|memory access out of bounds|unreachable|null function|table index|device (is|was) lost|told nothing", re.I
)

_Ask = Callable[[dict[str, Any]], dict[str, Any]]


def _by_onnxruntime_web(ask: _Ask, open_: Callable[[str], None]) -> _Opener:
    """Sessions of who answers by `answer.mjs`.

    Args:
        ask: Asks it.
        open_: Opens a model, in base64.
    """

    def opened(model: bytes) -> _Session:
        open_(base64.b64encode(model).decode())

        def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            given = {
                name: {"type": array.dtype.name, "dims": array.shape, "data": base64.b64encode(np.ascontiguousarray(array)).decode()}
                for name, array in ((name, np.asarray(array)) for name, array in feeds.items())
            }
            results = ask({"feeds": given})["results"]
            return {
                name: np.frombuffer(base64.b64decode(value["data"]), value["type"]).reshape(value["dims"])
                for name, value in results.items()
            }

        return run

    return opened


def _in_node(kept: contextlib.ExitStack) -> _Opener:
    folder = Path(kept.enter_context(tempfile.TemporaryDirectory()))
    (folder / "serve.mjs").write_text(_NODE)
    node = kept.enter_context(
        subprocess.Popen(
            ["node", str(folder / "serve.mjs"), _ANSWER.as_uri()],
            cwd=_folder_of_node(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
    )  # fmt: skip
    kept.callback(node.kill)

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        assert node.stdin is not None
        assert node.stdout is not None
        node.stdin.write(json.dumps(question) + "\n")
        node.stdin.flush()
        line = node.stdout.readline()
        if not line:
            os._exit(1)  # Node is gone, and this process with it
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    return _by_onnxruntime_web(ask, lambda model: ask({"model": model}) and None)


def in_chromium(kept: contextlib.ExitStack, flags: Sequence[str] = WEBGPU) -> _Ask:
    """What asks onnxruntime-web's WebGPU in a new browser by the questions of `answer.mjs`; with ``placements`` the answer has the log's lines of them.

    Raises:
        RuntimeError: What the page answers instead.
    """
    page = kept.enter_context(
        conversation(_PAGE, {"/ort": _folder_of_node() / "node_modules" / "onnxruntime-web" / "dist", "/answer.mjs": _ANSWER}, flags=flags)
    )

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = page(question)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    return ask


def placed(lines: Sequence[str]) -> dict[str, Counter[str]]:
    """Provider -> operator -> how many nodes it runs, as onnxruntime's log says."""
    found: dict[str, Counter[str]] = {}
    for line in lines:
        if (provider := re.search(r"placed on \[(\w+)\]", line)) is not None:
            last = found.setdefault(provider[1], Counter())
        elif (node := re.search(r"AnEp\]?\s+(\w+) \(", line)) is not None:
            last[node[1]] += 1
    return found


STRICT = {"extra": {"session": {"disable_cpu_ep_fallback": "1"}}}


def _webgpu(kept: contextlib.ExitStack) -> _Opener:
    asked = in_chromium(kept)

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        try:
            return asked(question)
        except (RuntimeError, AssertionError) as error:
            if _BROKEN.search(str(error)):
                kept.close()
                os._exit(1)
            raise

    def open_(model: str) -> None:
        try:
            ask({"model": model, "options": STRICT})
        except RuntimeError as error:
            if "explicitly disabled" not in str(error):
                raise
        else:
            return
        loose = ask({"model": model, "options": {"logSeverityLevel": 0}, "placements": True})
        there = placed(loose["lines"]).get("CPUExecutionProvider", Counter())
        raise RuntimeError(f"on the CPU: {', '.join(sorted(there))}")

    return _by_onnxruntime_web(ask, open_)


def _needs_chromium() -> str | None:
    return "Chromium" if installed() is None else _needs_npm()


def _said_of_chromium() -> str:
    return f"onnxruntime-web {_version_of_web()} in Chromium, whose SwiftShader computes on the processor"


def _folder_of_node() -> Path:
    from examples.web import build

    return build.packages()


def _needs_node() -> str | None:
    return "Node.js" if shutil.which("node") is None else _needs_npm()


def _needs_npm() -> str | None:
    return None if (_folder_of_node() / "node_modules" / "onnxruntime-web").is_dir() else "make node"


def _version_of_web() -> str:
    package = json.loads((_folder_of_node() / "node_modules" / "onnxruntime-web" / "package.json").read_text())
    return str(package["version"])


def _said_of_node() -> str:
    return f"onnxruntime-web {_version_of_web()} in Node"


def _said_of_onnxruntime() -> str:
    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}"


#: name -> provider, in the order of the page.
PROVIDERS: Mapping[str, Provider] = {
    "CPU": Provider("cpu", _said_of_onnxruntime, _by_onnxruntime(["cpu"]), lambda: None),
    "OpenVINO": Provider("openvino", _said_of_openvino, _openvino, _needs_openvino),
    "WASM": Provider("wasm", _said_of_node, _in_node, _needs_node),
    "WebGPU": Provider("webgpu", _said_of_chromium, _webgpu, _needs_chromium),
}


def missing() -> Iterator[tuple[str, str]]:
    """The providers that cannot be asked here, and what they need."""
    sys.path.append(str(FOLDER))
    for name, provider in PROVIDERS.items():
        if (needed := provider.needs()) is not None:
            yield name, needed
