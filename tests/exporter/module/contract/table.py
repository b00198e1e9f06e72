"""docs/loaded-modules.md, made of the rows: ``python -m tests.exporter.module.contract.table`` writes it."""

from __future__ import annotations

from tests.exporter.module.contract.rows import ROWS
from tests.processes import ROOT

__all__ = ["DOCUMENT", "page"]

DOCUMENT = ROOT / "docs" / "loaded-modules.md"

_HEAD = """\
# Train in torch

You load an ONNX file as a `torch.nn.Module`, train it with torch's optimizers and losses, and save it again. The second half of this page says what a
loaded module does as an eager one does, row by row, and what it refuses.

The blocks run in a folder [outside the clone](tutorial.md):

```python
# mypkg/ops.py
import torch


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return Halve.apply(self.linear(x))
```

```python
import torch, exporter
from mypkg.ops import Model

model, x, y = Model(), torch.randn(8, 4), torch.randint(3, (8,))
exporter.export(model, (x,), dynamic_shapes={"x": {0: "batch"}}).save("model.onnx")

module = exporter.load("model.onnx", allow=["mypkg.ops:*"])  # what the file may import
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
for _ in range(10):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(module(x), y)
    loss.backward()  # onnxruntime runs the gradient of the file, with your backward
    optimizer.step()

module.save("trained.onnx")  # the file, with the weights of now, and with what is frozen
model.load_state_dict(module.state_dict())  # the names are those of the model; complex parameters are their parts: torch.view_as_complex
```

To check the trained file against the model, in a test for example, [verify](verify-in-ci.md#check-a-file-that-exists) it. After the last line
above, `model` has the weights of `trained.onnx`:

```python
exporter.testing.assert_roundtrip(model, (x,), file="trained.onnx")
```

The file may also be one [that another tool made](foreign-models.md).

## Choose how it is loaded

| argument of `exporter.load` | what it does |
|---|---|
| `allow=` | what the file may import: classes, and [patterns](command-line.md#name-functions) such as `"mypkg.ops:*"`, or `"mypkg.*"` for a whole package |
| `device=` | where parameters and buffers are |
| `providers=` | [the execution providers](devices.md) that run it |
| `recompute=` | [less memory for more time](training-memory.md#use-less-memory) |
| `strict=True` | a Function that [has changed since the export](faq.md#a-function-has-changed-since-the-file-was-exported) is an error |
| `accelerate=False` | runs the file as stock onnxruntime does, without [faster kernels](figures.md) |

## Serve it without gradients

```python
module.eval()  # stops dropout and running statistics, and nothing else
with torch.no_grad():
    module(x)  # the forward alone: nothing is kept for a backward
```

As in eager, a call keeps what a backward reads if an input, a parameter or a buffer requires grad, in `train()` and in `eval()`.
`torch.inference_mode()` or `module.requires_grad_(False)` do the same as `no_grad()`. The sessions of the backward are made at the first call that
needs them.

Several threads, such as the requests of a server, may call one module or one `inference_session` at once. Nodes of onnxruntime run side by side;
Functions hold Python's lock, so they take turns. [How threads are shared](training-memory.md#how-threads-are-shared) has the rest. An index below 0
counts from the end of its axis in a file, where PyTorch raises: check ids that come from outside.

## Serve a file with PythonOps from Python

A server needs no module. `inference_session` opens the file as onnxruntime does, and takes and gives numpy arrays:

```python
import numpy as np, onnxruntime

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 2  # onnxruntime's threads of one request
options.log_severity_level = 4  # what a Function raises is not printed, too
session = exporter.inference_session("model.onnx", allow=["mypkg.ops:*"], sess_options=options, strict=True)


def answer(x):
    try:
        return session.run(None, {"x": x})[0].shape
    except exporter.RunError:
        return "bad request"


print(answer(np.zeros((2, 4), np.float32)), answer(np.zeros((2, 5), np.float32)))
```
```text
(2, 3) bad request
```

`sess_options=` may be left out. `strict=True` refuses to open a file whose Functions have changed since the export.

| the request has | what `run` raises |
|---|---|
| an array of another shape or dtype, or one under a name that the file lacks | `exporter.RunError`, which is of onnxruntime's own class (`InvalidArgument`), too |
| no array for one of the inputs | `ValueError`, onnxruntime's own |
| what a Function refuses | the Function's own exception |

- **Threads.** All threads of a server may share one session. Functions hold Python's lock, so their calls take turns. In a session of one thread
  (`intra_op_num_threads = 1`) a Function has all threads of torch; limit those by `torch.set_num_threads`.
- **Processes.** Where a server forks workers, open the session in each worker, after the fork. A process that was forked has none of the
  threads of torch and onnxruntime: with a session from before the fork it may wait for them without end, or end in a crash.

## Train on several processes, or with a library

`DistributedDataParallel` and FSDP2 take a loaded module: [examples/ddp.py](../examples/ddp.py). So do Lightning, Accelerate, transformers' Trainer
and PEFT: [with other libraries](integrations.md).

## What a loaded module does

Each row is done to a loaded file and to the eager model that it came from. Outputs, gradients and state are compared
(`tests/exporter/module/test_contract.py`). What cannot be as in eager is an error or a warning that says what to do. The rows call it *refused* or
*warned*, with the way out behind it.

"""

_TAIL = """
## What does not work

- **A file has no layers.** The modules below a loaded one have parameters and buffers, but no class: `isinstance(each, nn.Linear)` is false. Code
  that looks for layers by their class finds none, and nothing warns of it: `torch.optim.swa_utils.update_bn`, `SyncBatchNorm.convert_sync_batchnorm`,
  quantisation of modules, functions of `apply` that ask for a class. Do this to the model, before the export. Modules without parameters and buffers
  (`nn.ReLU`, `nn.Dropout`) are not there at all.
- **The types are those at export.** `double()`, `half()` and `torch.autocast` do not reach into a graph. Export under autocast to float16 instead:
  onnxruntime's CPU has hardly a kernel for bfloat16, and such a file does not run there.
- **What was frozen at the export**: parameters with `requires_grad=False`, and buffers. Where you call `requires_grad_()` on one later, operators give its
  gradient. Functions do not: the file has no gradient there, and the backward raises an error that names the Function and the parameter. Where the
  model stops such a gradient with `detach()` or `no_grad()`, the file does not know it. A warning says so. Export with `requires_grad=True` instead,
  and freeze the parameter in the loaded module.
- **The mode of the export counts.** A model that was exported in `eval()` has no dropout in its file, and fixed statistics in BatchNorm. `train()`
  warns of it, for files of pythonop. A file of another tool does not say its mode: what drops out in it drops out in `train()`.
- **What a loaded module draws** comes from torch's generator: `torch.manual_seed` before a call repeats it, in `train()` and in `eval()`. The numbers
  are others than eager's, but for those that Functions draw.

## Read on

[Train in one file](training.md), without PyTorch; [memory and threads](training-memory.md); [foreign files](foreign-models.md);
[`exporter.load`](api.md#load-and-train-in-python).
"""


def page() -> str:
    """The text of the page."""
    equal = sum(row.refused is None for row in ROWS)
    lines = [_HEAD, f"{len(ROWS)} rows: {equal} as in eager, {len(ROWS) - equal} refused or warned.\n"]
    area = ""
    for row in ROWS:
        if row.area != area:
            area = row.area
            lines.append(f"\n### {area}\n\n| what you do | a loaded module |\n|---|---|\n")
        lines.append(f"| {row.what} | {'as in eager' if row.refused is None else _refused(row.way)} |\n")
    return "".join([*lines, _TAIL])


def _refused(way: str) -> str:
    """What the page says of a row that is not as in eager: whether it is an error or a warning, and the way out."""
    _, warned, more = way.rpartition("a warning, ")
    return f"**warned**: {more}" if warned else f"**refused**: {way}"


if __name__ == "__main__":
    DOCUMENT.write_text(page())
