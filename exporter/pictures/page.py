"""One HTML page that needs nothing else: its script runs by its digest alone, its data is text that no markup can leave."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

__all__ = ["rendered"]


def rendered(template: Path, data: Any, **values: Any) -> str:
    """A page of a template ``name.html`` and the script ``name.js`` beside it.

    Args:
        template: The template. It has ``data``, ``script`` and ``digest`` (of the script, for its policy) beside ``values``.
        data: What the script reads, as JSON.
        values: Escaped by the template, but for what it calls safe.

    Raises:
        ImportError: jinja2 is not installed.
    """
    import jinja2

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(template.parent), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    script = template.with_suffix(".js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # In a script element nothing is escaped but by its own language.
    text = json.dumps(data).replace("<", "\\u003c")
    return environment.get_template(template.name).render(**values, data=text, script=script, digest=digest)
