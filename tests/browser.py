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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import missing

__all__ = ["OFFLINE", "chromium", "installed", "told_by"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# No name resolves: a page has what this machine serves it, and nothing else.
OFFLINE = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
# In front of each page of `told_by`: what goes wrong is told as well.
_TELL = """<!doctype html><script>
const tell = (answer) => fetch("/told", { method: "POST", body: JSON.stringify(answer) });
onerror = (message) => tell({ error: String(message) });
onunhandledrejection = ({ reason }) => tell({ error: String(reason?.stack ?? reason) });
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
    browser = chromium()
    with _served(_TELL + page, places) as (url, answers), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *OFFLINE, *flags, f"--user-data-dir={profile}", url]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                answer = answers.get(timeout=timeout)
            except queue.Empty:
                raise AssertionError(f"the page told nothing in {timeout} s") from None
            finally:
                process.terminate()
    assert "error" not in answer, answer["error"]
    return answer


@contextlib.contextmanager
def _served(page: str, places: Mapping[str, Path]) -> Iterator[tuple[str, queue.Queue[Any]]]:
    answers: queue.Queue[Any] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(page.encode())

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

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", answers
        finally:
            server.shutdown()
