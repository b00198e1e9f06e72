"""The fresh process of `verify`: python -m exporter.verification.worker JOB RESULT."""

from __future__ import annotations

import pkgutil
import sys
import time
from dataclasses import replace
from typing import Any

__all__: list[str] = []


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One step of a file, the time and memory of some more, and one at each of the other inputs."""
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
    order, known = list(module._onnx.inputs), list(job["steps"][0]["inputs"])
    if not set(order) <= set(known):
        if len(order) != len(known):
            raise RunError(f"the file has the inputs {order}, the model was called with {known}: name them with input_names=")
        names = dict(zip(order, known, strict=True))
    else:
        names = {name: name for name in order}
    lost = module._onnx.changes.lost
    module._onnx.changes = replace(module._onnx.changes, lost={})  # all else is compared; these are in the report
    before = buffers_of(module)
    memory = HighWater()

    def step(given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        inputs = {
            name: (value := given["inputs"][names[name]]).detach().clone().requires_grad_(value.is_floating_point()) for name in order
        }
        outputs = module.flat(**inputs)
        backward(outputs, given["cotangents"])
        return outputs, inputs

    def found(given: dict[str, Any]) -> dict[str, Any]:
        torch.manual_seed(job["seed"])  # of which the masks of Dropout follow
        begin = time.perf_counter()
        outputs, inputs = step(given)
        took = time.perf_counter() - begin
        after = buffers_of(module)
        gradients = {f"parameter gradient:{name}": p.grad for name, p in module.named_parameters()}
        gradients |= {f"input gradient:{names[name]}": value.grad for name, value in inputs.items()}
        return {
            "outputs": [out.detach().clone() for out in outputs],
            "gradients": {name: None if g is None else g.detach().clone() for name, g in gradients.items()},
            "buffers": {**{name: after[name] for name in job["buffers"] if name in after}, **changed(before, after)},
            "differentiable": [out.requires_grad for out in outputs],
            "seconds": took,
        }

    def elsewhere(given: dict[str, Any]) -> dict[str, Any]:
        """A step from the state that the first one began with."""
        module.zero_grad()
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(before[name])
        try:
            return found(given)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:1000]}

    example, *others = job["steps"]
    first = found(example)
    seconds["first step"] = first["seconds"]
    # What is kept of the first step is no part of the others.
    kept = [*first["outputs"], *first["gradients"].values(), *first["buffers"].values()]
    seconds["onnxruntime step"], used = measured(lambda: step(example), job["count"], memory)
    used = None if used is None else max(0, used - sum(tensor.nbytes for tensor in kept if tensor is not None))
    return {
        "steps": [first, *(elsewhere(given) for given in others)],
        "lost": lost,
        "backward_nodes": module._onnx.plans.backward_nodes(),
        "changed": module._onnx.changed,
        "seconds": seconds,
        "memory": used,
    }


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
