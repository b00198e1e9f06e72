"""Memory and time of a training step: GPT-2 of 4 layers, d=256, batch 8, 128 tokens, eager and loaded file.

    python -m benchmarks.training_memory                 # both, each in a process of its own, as a table
    python -m benchmarks.training_memory --steps 1000    # does anything grow?

Memory is the peak resident set during steps 3 to 8 less what was resident before the first step: activations, gradients,
optimizer state, and for the file its sessions. The limit is 1.2 times eager's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LIMIT = 1.2


def status(key: str) -> float:
    """A line of /proc/self/status in MiB."""
    text = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(text.split()[1]) / 1024


def build() -> tuple[Any, Any]:
    import torch
    import transformers

    class Logits(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=ids, use_cache=False).logits

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=1024, n_positions=128, n_embd=256, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    ids = torch.randint(0, 1024, (8, 128))
    return Logits(transformers.GPT2LMHeadModel(config)).train(), ids


def measure(kind: str, steps: int, path: str | None) -> dict[str, float]:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    model, ids = build()
    if kind == "file":
        import exporter

        assert path is not None
        del model
        model = exporter.load(path)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        logits = model(ids)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()

    gc.collect()
    before = status("VmRSS")
    step()
    step()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    result = {"step_mib": status("VmHWM") - before, "seconds": statistics.median(times), "resident_mib": before}
    if steps > 8:
        marks = []
        for index in range(steps):
            step()
            if index % (steps // 10) == 0:
                gc.collect()
                marks.append(status("VmRSS"))
        result["growth_mib"] = marks[-1] - marks[1]
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--one", choices=("eager", "file"))
    parser.add_argument("--path")
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(measure(options.one, options.steps, options.path)))
        return 0
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "gpt2.onnx"))
        code = f"import exporter; from benchmarks.training_memory import build; m, ids = build(); exporter.export(m, (ids,)).save({path!r})"
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        found = {}
        for kind in ("eager", "file"):
            command = [sys.executable, "-m", "benchmarks.training_memory", "--one", kind, "--path", path, "--steps", str(options.steps)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[kind] = json.loads(done.stdout.splitlines()[-1])
            print(f"{kind:6}", ", ".join(f"{key} {value:.4g}" for key, value in found[kind].items()), flush=True)
    ratio = found["file"]["step_mib"] / found["eager"]["step_mib"]
    print(f"memory of a step: {ratio:.2f} times eager's (limit {LIMIT}); time: {found['file']['seconds'] / found['eager']['seconds']:.2f} times")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
