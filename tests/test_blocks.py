"""The reader of tests/pages.py does what a page says, and fails where it is wrong; what the pages say of the blocks that they leave out is so."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests import pages
from tests.processes import ROOT

PAGE = """# A page

<!-- in a clone -->
```sh
echo made > made.txt
cd /
```

```sh
mkdir -p deep && cd deep
export COLOUR=red
```

It is a module:

```python
# package/module.py
COLOUR = "green"
```

```python
import os
from package.module import COLOUR

class Here: pass

print(COLOUR, os.environ["COLOUR"], __name__, Here.__module__)
```

It prints

```text
green red __main__ ...
```

In another process,
which knows nothing:

```python
assert "COLOUR" not in globals()
import package.module
```

<!-- exit 3: ( exit 3 -->
```sh
(exit 3 \\
)
cat package/module.py | tail -n 1
```

```text
COLOUR = "green"
```

## More

```python
import inspect
print(inspect.getsource(print_it) if "print_it" in globals() else COLOUR)
```

<!-- not compared: by chance -->
```text
blue
```

<!-- not run: it is for show -->
```sh
exit 1
```

<!-- needs: no-such-program -->
```js
nothing
```

```json
{}
```
"""


@pytest.fixture
def reader(tmp_path):
    def clone():
        (tmp_path / "clone").mkdir(exist_ok=True)
        return tmp_path / "clone"

    (tmp_path / "work").mkdir()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with pages.Reader(tmp_path / "work", {"PATH": path}, clone) as somebody:
        yield somebody


def test_a_page_from_top_to_bottom(reader, tmp_path):
    outcome = pages.Outcome("a page")
    pages.read(reader, pages.blocks("a page", PAGE), outcome)
    assert (outcome.run, outcome.compared) == (7, 2)
    assert outcome.left == [
        "not compared, line 63: by chance",
        "not run, line 68: it is for show",
        "not run, line 73: needs no-such-program",
    ]
    assert (tmp_path / "clone" / "made.txt").read_text() == "made\n"
    assert reader.folder == tmp_path / "work" / "deep"


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("```sh\nfalse\ntrue\n```", r"exit code 1 of: false"),
        ("```sh\n(exit 2) | cat && no_such_program\n```", r"exit code 127"),
        ("```sh\ntrue\nif then\n```", r"exit code 2 of the terminal"),
        ("```sh\nexit 3\n```", r"exit code 3 of the terminal"),
        ("```sh\nkill -9 $$\n```", r"exit code -9 of the terminal"),
        ("<!-- exit 1: false -->\n```sh\ntrue\n```", r"never came: exit 1: false"),
        ("<!-- exit 1: false -->\n```sh\nfalse\nfalse\n```", r"exit code 1 of: false"),
        ("```python\nprint(1)\nraise KeyError('gone')\n```", r"(?s)a page:1 \(python\): failed.*KeyError: 'gone'"),
        ("```python\nimport os\nos._exit(0)\n```", r"the interpreter ended"),
        ("```python\nx = 1\n```\n\nin another process\n\n```python\nx\n```", r"NameError"),
        ("```python\nprint(2)\n```\n```text\n1\n```", r"(?s)the page shows\n1\n.*printed\n2"),
        ("```python\nprint(2)\nprint(1)\n```\n```text\n1\n```", r"the page shows"),
        ("```bash\ntrue\n```", r"nobody runs this language"),
        ("```js\nlet x;\n```", r"nobody runs this language"),
    ],
)
def test_what_is_wrong_is_said(reader, page, why):
    with pytest.raises(pages.Failed, match=why):
        pages.read(reader, pages.blocks("a page", page), pages.Outcome("a page"))


def test_what_is_shown():
    assert pages.same("a ... c\n", "a b\nb c  \n\n")
    assert pages.same("(3, 2)", "(3, 2)\n")
    assert not pages.same("(3, 2)", "3, 2\n")
    assert not pages.same("a", "a b")


def test_the_job_runs_what_the_pages_leave_to_it():
    """A block that is not run because .ci/run does so has commands that .ci/run runs."""
    job = (ROOT / ".ci" / "run").read_text()
    for page in ("README.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))):
        for block in pages.blocks(page):
            if ".ci/run" in (block.note("not run") or ""):
                commands = re.findall(r"(?m)^(?:make) ([\w-]+)", block.code)
                assert commands, block
                assert [name for name in commands if not re.search(rf"(?m)^stage .*\bmake\b.* {name}$", job)] == [], block
