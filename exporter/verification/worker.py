"""The fresh process of `verify`: python -m exporter.verification.worker JOB RESULT."""

from __future__ import annotations

import pkgutil
import sys
import time
from dataclasses import replace
from typing import Any

__all__: list[str] = []


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One step of a file, and the time and memory of some more."""
    import torch

    import exporter
    from exporter.verification.memory import HighWater
    from exporter.verification.steps import backward, buffers_of, changed, measured
    from symbolics.errors import RunError

    torch.set_num_threads(job["threads"])
    if job["setup"]:
        if ":" not in job["setup"]:
            raise RunError(f"setup={job['setup']!r} is not of the form package.module:function")
        pkgutil.resolve_name(job["setup"])()
    begin = time.perf_counter()
    module = exporter.load(job["path"], allow=job["allow"])
    seconds = {"load": time.perf_counter() - begin}
    order = list(module._onnx.inputs)
    given = job["inputs"]
    if not set(order) <= set(given):
        if len(order) != len(given):
            raise RunError(f"the file has the inputs {order}, the model was called with {list(given)}: name them with input_names=")
        given = dict(zip(order, given.values(), strict=True))
    names = (
        dict(zip(order, (name for name in job["inputs"]), strict=False)) if given is not job["inputs"] else {name: name for name in order}
    )

    def step() -> tuple[list[Any], dict[str, Any]]:
        inputs = {name: given[name].detach().clone().requires_grad_(given[name].is_floating_point()) for name in order}
        outputs = module.flat(**inputs)
        backward(outputs, job["cotangents"])
        return outputs, inputs

    lost = module._onnx.changes.lost
    module._onnx.changes = replace(module._onnx.changes, lost={})  # all else is compared; these are in the report
    before = buffers_of(module)
    memory = HighWater()
    torch.manual_seed(job["seed"])  # of which the masks of Dropout follow
    begin = time.perf_counter()
    outputs, inputs = step()
    seconds["first step"] = time.perf_counter() - begin
    after = buffers_of(module)
    gradients = {f"parameter gradient:{name}": p.grad for name, p in module.named_parameters()}
    gradients |= {f"input gradient:{names[name]}": value.grad for name, value in inputs.items()}
    result: dict[str, Any] = {
        "outputs": [out.detach().clone() for out in outputs],
        "gradients": {name: None if g is None else g.detach().clone() for name, g in gradients.items()},
        "buffers": {**{name: after[name] for name in job["buffers"] if name in after}, **changed(before, after)},
        "lost": lost,
        "differentiable": [out.requires_grad for out in outputs],
        "backward_nodes": module._onnx.plans.backward_nodes(),
        "changed": module._onnx.changed,
    }
    del outputs, inputs, gradients
    # What is kept of the first step is no part of the others.
    kept = [*result["outputs"], *result["gradients"].values(), *after.values()]
    seconds["onnxruntime step"], used = measured(step, job["steps"], memory)
    used = None if used is None else max(0, used - sum(tensor.nbytes for tensor in kept if tensor is not None))
    return {**result, "seconds": seconds, "memory": used}


def main(job_path: str, result_path: str) -> None:
    """Run a job; what it raises is its result, too."""
    import torch

    from symbolics.errors import PythonopError

    job = torch.load(job_path, weights_only=True)
    try:
        result = run(job)
    except Exception as error:
        faq = error.faq if isinstance(error, PythonopError) else None
        result = {"error": str(error)[:4000], "kind": type(error).__name__, "faq": faq and str(faq)}
    torch.save(result, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:3])
