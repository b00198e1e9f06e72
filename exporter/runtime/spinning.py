"""Whether the threads of a session wait awake."""

from __future__ import annotations

from typing import Any

__all__ = ["choose_spinning"]

_SPINNING = "session.intra_op.allow_spinning"


def choose_spinning(options: Any) -> None:
    """Let threads wait for the next operator awake, as torch's do, where the options do not say.

    They sleep between runs, and while a long PythonOp needs the cores for torch's (threads.h). To wake a thread takes 50 us, as long
    as a small operator: a training step takes up to a quarter less so.
    """
    try:
        options.get_session_config_entry(_SPINNING)
    except RuntimeError:  # nobody has said
        options.add_session_config_entry(_SPINNING, "1")
        options.add_session_config_entry("session.force_spinning_stop", "1")
