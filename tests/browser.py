"""Chromium without a window: pages of a folder, served on the loopback, tell what they found."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import missing

__all__ = ["OFFLINE", "WEBGPU", "chromium", "conversation", "installed", "told_by"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# No name resolves: a page has what this machine serves it, and nothing else.
OFFLINE = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
# A graphics card where there is none: SwiftShader computes on the processor.
WEBGPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")
# In front of each page: what goes wrong is told as well.
_TELL = """<!doctype html><script>
const tell = (answer) => fetch("/told", { method: "POST", body: JSON.stringify(answer) });
const next = async () => (await fetch("/next")).json();
onerror = (message) => tell({ failed: String(message) });
onunhandledrejection = ({ reason }) => tell({ failed: String(reason?.stack ?? reason) });
</script>
"""


def installed() -> str | None:
    """The browser that PYTHONOP_CHROMIUM names, otherwise the first that has one of the usual names."""
    named = os.environ.get("PYTHONOP_CHROMIUM")
    return next(filter(None, map(shutil.which, [named] if named else _NAMES)), None)


def chromium() -> str:
    """The same; without one the test is left."""
    found = installed()
    if found is None:
        missing("chromium", "no Chromium on this machine (PYTHONOP_CHROMIUM may name one)")
    return found


def told_by(page: str, places: Mapping[str, Path], *, flags: Sequence[str] = (), timeout: float = 120) -> Any:
    """What a page tells by ``tell(answer)``, which it is given, in a new browser with an empty profile.

    Args:
        page: The rest of the page's HTML.
        places: Paths of the server, as ``/model``, and the files or folders that lie there.
        flags: More of the browser's.
        timeout: Seconds; the browser is ended after them.

    Raises:
        AssertionError: The page failed, or told nothing in time.
    """
    with _opened(page, places, flags) as (_, answers):
        return _told(answers, timeout)


@contextlib.contextmanager
def conversation(
    page: str, places: Mapping[str, Path], *, flags: Sequence[str] = (), timeout: float = 120
) -> Iterator[Callable[[Any], Any]]:
    """A page that asks for questions by ``await next()`` and answers each by ``tell(answer)``.

    Args:
        page, places, flags: As `told_by` has them.
        timeout: Seconds for an answer.

    Yields:
        What asks the page a question, gives its answer, and raises AssertionError where there is none.
    """
    with _opened(page, places, flags) as (questions, answers):

        def ask(question: Any) -> Any:
            questions.put(question)
            return _told(answers, timeout)

        yield ask


def _told(answers: queue.Queue[Any], timeout: float) -> Any:
    try:
        answer = answers.get(timeout=timeout)
    except queue.Empty:
        raise AssertionError(f"the page told nothing in {timeout} s") from None
    assert not isinstance(answer, dict) or "failed" not in answer, answer["failed"]
    return answer


@contextlib.contextmanager
def _opened(page: str, places: Mapping[str, Path], flags: Sequence[str]) -> Iterator[tuple[queue.Queue[Any], queue.Queue[Any]]]:
    """A page in a new browser with an empty profile: the questions that it asks for, and its answers."""
    browser = chromium()
    with _served(_TELL + page, places) as (url, questions, answers), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *OFFLINE, *flags, f"--user-data-dir={profile}", url]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                yield questions, answers
            finally:
                questions.put(None)  # who waits for one
                process.terminate()


class _Server(http.server.ThreadingHTTPServer):
    block_on_close = False  # a page that is gone may have left a question unanswered


@contextlib.contextmanager
def _served(page: str, places: Mapping[str, Path]) -> Iterator[tuple[str, queue.Queue[Any], queue.Queue[Any]]]:
    questions: queue.Queue[Any] = queue.Queue()
    answers: queue.Queue[Any] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/next":
                return self._send(json.dumps(questions.get()), "application/json")
            if self.path != "/":
                return super().do_GET()
            self._send(page, "text/html; charset=utf-8")

        def _send(self, text: str, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def translate_path(self, path: str) -> str:
            path = path.partition("?")[0]
            for prefix, place in places.items():
                if path == prefix or path.startswith(f"{prefix}/"):
                    rest = path[len(prefix) :].lstrip("/")
                    return str(place / rest) if rest else str(place) + ("/" if place.is_dir() else "")
            return os.devnull + "/nothing"

        def log_message(self, *_: Any) -> None:
            pass

    with _Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", questions, answers
        finally:
            server.shutdown()
