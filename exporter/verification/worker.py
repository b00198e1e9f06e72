"""The fresh process of `verify`: python -m exporter.verification.worker JOB RESULT."""

from __future__ import annotations

import pkgutil
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

__all__ = ["FileSteps"]


class FileSteps:
    """Steps of a loaded file, each from the state that it was loaded with.

    Attributes:
        lost: What the file says that it does not carry -> why.

    Raises:
        RunError: Its inputs are others than the model's.
    """

    def __init__(self, module: Any, job: dict[str, Any]) -> None:
        """Args:
        module: What `exporter.load` gave.
        job: "steps": for each what `exporter.verification.process.asked_of` gives; "seed": of the masks of Dropout; "buffers": those to tell of, whether they change or not;
            "gradients": whether to take any.
        """
        from exporter.verification.steps import state_of
        from symbolics.errors import RunError

        self._module, self._job = module, job
        order, known = list(module._onnx.inputs), list(job["steps"][0]["inputs"])
        if not set(order) <= set(known):
            if len(order) != len(known):
                raise RunError(f"the file has the inputs {order}, the model was called with {known}: name them with input_names=")
            self._names = dict(zip(order, known, strict=True))
        else:
            self._names = {name: name for name in order}
        self.lost = module._onnx.changes.lost
        module._onnx.changes = replace(module._onnx.changes, lost={})  # all else is compared; these are in the report
        self._before = state_of(module)

    def step(self, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """A forward, and a backward unless the outputs are others than eager's: the outputs, and the inputs with their gradients."""
        from exporter.verification.steps import backward, shapes_of

        inputs = {
            name: (value := given["inputs"][known]).detach().clone().requires_grad_(value.is_floating_point() and self._job["gradients"])
            for name, known in self._names.items()
        }
        outputs = self._module.flat(**inputs)
        if self._job["gradients"] and shapes_of(outputs) == given["shapes"]:
            backward(outputs, given["cotangents"])
        return outputs, inputs

    def found(self, given: dict[str, Any]) -> dict[str, Any]:
        """What one step gives, as `exporter.verification.process.FileStep` has it, and how long it took."""
        import torch

        from exporter.verification.steps import changed, state_of

        torch.manual_seed(self._job["seed"])  # of which the masks of Dropout follow
        begin = time.perf_counter()
        outputs, inputs = self.step(given)
        took = time.perf_counter() - begin
        after = state_of(self._module)
        gradients = {f"parameter gradient:{name}": p.grad for name, p in self._module.named_parameters()}
        gradients |= {f"input gradient:{self._names[name]}": value.grad for name, value in inputs.items()}
        return {
            "outputs": [out.detach().clone() for out in outputs],
            "gradients": {name: None if g is None else g.detach().clone() for name, g in gradients.items()},
            "buffers": {**{name: after[name] for name in self._job["buffers"] if name in after}, **changed(self._before, after)},
            "differentiable": [out.requires_grad for out in outputs],
            "seconds": took,
        }

    def again(self, names: Collection[str]) -> None:
        """Give state the values that the first step began with."""
        import torch

        with torch.no_grad():
            for name, tensor in (*self._module.named_buffers(), *self._module.named_parameters()):
                if name in names:
                    tensor.copy_(self._before[name])

    def elsewhere(self, given: dict[str, Any]) -> dict[str, Any]:
        """A step from the state that the first one began with."""
        self._module.zero_grad()
        self.again(self._before)
        try:
            return self.found(given)
        except Exception as error:
            place = place_of(error)
            return {"error": f"{type(error).__name__}: {error}"[:1000] + (f" ({place})" if place else "")}


def place_of(error: Exception) -> str:
    """The line of the user's code that raised: of an error of ours nothing, as it says its place itself."""
    from exporter.forward.eager_failure import line_of
    from symbolics.errors import PythonopError

    return "" if isinstance(error, PythonopError) else line_of(error)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One step of a file, the time and memory of some more, and one at each of the other inputs."""
    import torch

    import exporter
    from exporter.verification.memory import HighWater
    from exporter.verification.steps import measured
    from symbolics.errors import RunError

    torch.set_num_threads(job["threads"])
    if job["setup"]:
        if ":" not in job["setup"]:
            raise RunError(f"setup={job['setup']!r} is not of the form package.module:function")
        pkgutil.resolve_name(job["setup"])()
    begin = time.perf_counter()
    module = exporter.load(job["path"], allow=job["allow"], providers=job["providers"])
    seconds = {"load": time.perf_counter() - begin}
    if not job["gradients"]:
        module.requires_grad_(False)
    file, memory = FileSteps(module, job), HighWater()
    example, *others = job["steps"]
    first = file.found(example)
    seconds["first step"] = first["seconds"]
    # What is kept of the first step is no part of the others.
    kept = [*first["outputs"], *first["gradients"].values(), *first["buffers"].values()]
    seconds["onnxruntime step"], used = measured(lambda: file.step(example), job["count"], memory, lambda: file.again(first["buffers"]))
    used = None if used is None else max(0, used - sum(tensor.nbytes for tensor in kept if tensor is not None))
    return {
        "steps": [first, *(file.elsewhere(given) for given in others)],
        "lost": file.lost,
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
        result = {"error": str(error)[:4000], "kind": type(error).__name__, "faq": faq and str(faq), "place": place_of(error)}
    torch.save(result, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:3])
