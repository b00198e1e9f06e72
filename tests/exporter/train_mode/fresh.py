"""What a process that knows saved files alone makes of them: three steps of the loaded module, and of the training step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import exporter
from exporter.files.read import open_model
from symbolics.node.metadata import step_of
from tests.exporter.training.loop import eager

__all__ = ["train"]


def train(job: dict[str, Any]) -> dict[str, Any]:
    """The state after training, by the names of the model; and what one run of the forward gives out on onnxruntime.

    Args:
        job: ``forward`` and ``step``, the paths of the files; ``batches``, arrays of arguments and targets; ``allow``; ``lr``.
    """
    batches = [tuple(map(torch.from_numpy, batch)) for batch in job["batches"]]
    session = exporter.inference_session(job["forward"], allow=job["allow"])
    names = [value.name for value in session.get_outputs()]
    outputs = dict(zip(names, session.run(None, {session.get_inputs()[0].name: job["batches"][0][0]}), strict=True))

    module = exporter.load(job["forward"], allow=job["allow"]).train()
    losses = eager(module, F.mse_loss, torch.optim.SGD(module.parameters(), lr=job["lr"]), batches)
    loaded = {name: value.detach().numpy() for name, value in (*module.named_parameters(), *module.named_buffers())}

    step, start = (exporter.inference_session(path, allow=job["allow"]) for path in (job["step"], job["start"]))
    layout = step_of(open_model(job["step"]))
    assert layout is not None
    state = dict(zip([value.name for value in start.get_outputs()], start.run(None, {}), strict=True))
    for batch in job["batches"]:
        feeds = dict(zip((*layout.inputs, *layout.targets), batch, strict=True))
        results = dict(zip([value.name for value in step.get_outputs()], step.run(None, {**state, **feeds}), strict=True))
        state.update({name: results[output] for output, name in layout.carried.items()})
    stepped = {key: state[name] for key, name in (*layout.parameters.items(), *layout.buffers.items())}
    return {"outputs": outputs, "losses": losses, "loaded": loaded, "stepped": stepped}
