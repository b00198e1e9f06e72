"""A fresh process that builds the gradient graph of saved files and runs both on both engines.

It imports nothing of the rows but what the file names, and (`setup`, `register`) what the row says a user does.
"""

from __future__ import annotations

import json
import random
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from tests.processes import Server

ENGINES = ("reference", "onnxruntime")
ALLOW = [
    "tests.end_to_end.functions.*:*", "torch.utils.checkpoint:*", "pythonop_rows::*", "pythonop_rows_cpp::*",
    "torch:tanh", "tests.end_to_end.functions.callables:my_activation", "tests.end_to_end.functions.callables:Activation.cosine",
]  # fmt: skip


class Worker(Server):
    """The other end: one process, restarted when it dies."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "tests.end_to_end.functions.worker:answer")

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer to a job; what kills the process is an answer too."""
        try:
            return self.ask(job)  # type: ignore[no-any-return]
        except RuntimeError as error:
            return {"error": str(error)}


def seed(number: int) -> None:
    """What a row that draws random numbers does in both processes."""
    import torch

    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Both runs of a row on each engine, or the error."""
    import exporter
    from exporter.files.trust import registered, unregister
    from exporter.gradient_graph.build import build_gradient_graph
    from exporter.runtime.session import inference_session

    before = registered()
    try:
        for module, row, action in job["actions"]:
            __import__(module)
            from tests.end_to_end.functions.case import CASES

            getattr(CASES[row], action)()
        if job.get("gradient"):
            training = build_gradient_graph(job["path"])
            pairing = json.loads(training.metadata_props["pythonop.gradients"])
        out: dict[str, Any] = {}
        for engine in job["engines"]:
            make = inference_session if engine == "onnxruntime" else exporter.reference_evaluator
            runs = []
            forward = make(job["path"], allow=job["allow"])
            both = make(training, allow=job["allow"]) if job.get("gradient") else None
            for feeds, seeds in job["runs"]:
                seed(0)
                values = forward.run(None, feeds)
                gradients: Any = None
                if both is not None:
                    seed(0)
                    names = [v.name for v in training.graph.outputs]
                    fed = {pairing["inputs"][o]: s for o, s in seeds.items() if o in pairing["inputs"]}
                    try:
                        results = dict(zip(names, both.run(None, {**feeds, **fed}), strict=True))
                        gradients = {name: results[g] for name, g in pairing["outputs"].items()}
                    except Exception as error:
                        gradients = f"{type(error).__name__}: {error}"
                    assert len(both.store) == 0, "a context was left behind"
                runs.append((values, gradients))
            out[engine] = runs
        return {"ok": out, "unreached": pairing.get("unreached", []) if job.get("gradient") else []}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    finally:
        for name in set(registered()) - set(before):
            unregister(name)
