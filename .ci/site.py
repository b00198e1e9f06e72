"""Hooks of mkdocs: the pages and notebooks of docs/ as they stand in the repository become a site that needs nothing else.

A link to a file outside docs/ leads to that file in the site: Markdown as a page, everything else as it is. A page that would
load something from elsewhere ends the build.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
#: Files that are pages of the site, and lie outside docs/.
PAGES = ("SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/web/README.md", "examples/csharp/README.md")

_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"(?ms)^```.*?^```|`[^`\n]+`")
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*>|<link\b[^>]*\bhref=["']?(?:https?:)?//[^>]*>""",
    re.I,
)
_STYLED = re.compile(r"""(?:@import\s+|url\()["']?(?:https?:)?//[^"')]*""", re.I)


def _address(path: str) -> str:
    """The address in the site of a file, by its path in the repository; a notebook is a page."""
    return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))


def _path(address: str) -> str:
    """The path in the repository of a page, by its address in the site."""
    return address if address in PAGES else f"docs/{address}"


def _targets(path: str, text: str) -> dict[str, str]:
    """The relative links of a page that lead to a file, and the path of that in the repository."""
    found = {}
    for link in {match[2] for match in _LINK.finditer(_CODE.sub("", text))}:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if "://" not in link and not target.startswith(".."):
            if (ROOT / target).is_dir():
                target += "/README.md"
            if (ROOT / target).is_file():
                found[link] = target
    return found


def _page_of(notebook: str) -> str:
    """A notebook as Markdown: its cells, and below each what it shows."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            text = "".join(output.get("text", ())) or "".join(output["data"]["text/plain"])
            table = "".join(output.get("data", {}).get("text/html", ()))
            parts.append(f'<div class="shown">{table or f"<pre>{html.escape(text)}</pre>"}</div>')
    return "\n\n".join(parts)


def on_files(files: Any, config: Any) -> Any:
    """Add the notebooks as pages, the pages outside docs/, and what any page links to."""
    for notebook in sorted((ROOT / "docs").glob("*.ipynb")):
        files.append(File.generated(config, _address(f"docs/{notebook.name}"), content=_page_of(notebook.read_text())))
    for path in PAGES:
        files.append(File.generated(config, path, content=(ROOT / path).read_text()))
    for page in list(files.documentation_pages()):
        for target in _targets(_path(page.src_uri), page.content_string).values():
            if files.get_file_from_path(_address(target)) is None:
                files.append(File.generated(config, _address(target), content=(ROOT / target).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between files of the site, and mark the messages of errors."""
    address = page.file.src_uri
    targets = _targets(_path(address), markdown)

    def turned(match: re.Match[str]) -> str:
        if match[2] not in targets:
            return match[0]
        return match[1] + posixpath.relpath(_address(targets[match[2]]), posixpath.dirname(address) or ".") + match[3]

    return _LINK.sub(turned, markdown).replace("```error\n", "``` { .text .error }\n")  # site.css breaks its lines


def on_post_page(output: str, **_: Any) -> str:
    """Name the theme's search for people who hear the page."""
    return output.replace('data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"')


def on_post_build(config: Any) -> None:
    """Refuse a site that loads something from elsewhere."""
    found = []
    for file in sorted(Path(config["site_dir"]).rglob("*")):
        pattern = {".html": _LOADED, ".css": _STYLED}.get(file.suffix)
        found += [f"{file.name}: {match[0]}" for match in pattern.finditer(file.read_text())] if pattern else []
    if found:
        raise PluginError("the site loads from elsewhere: " + "; ".join(found[:5]))
