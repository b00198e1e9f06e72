"""docs/loaded-modules.md, made of the rows: ``python -m tests.exporter.module.contract.table`` writes it."""

from __future__ import annotations

from tests.exporter.module.contract.rows import ROWS
from tests.processes import ROOT

__all__ = ["DOCUMENT", "page"]

DOCUMENT = ROOT / "docs" / "loaded-modules.md"

_HEAD = """\
# A loaded module is a module

`exporter.load` gives a `torch.nn.Module`. What you do to a module, you can do to it: each row below is done to a loaded file and to the eager model
it came from, and outputs, gradients and state are compared. The file is one of ours, or one that another exporter wrote (`test_contract.py` in
`tests/exporter/module` has which row runs on which). What cannot be as in eager says so, by name, with the way out.

```python
module = exporter.load("model.onnx", allow=["mypkg.ops:*"]).eval()
module(x).sum().backward()  # eval() changes dropout and statistics, and nothing else
with torch.no_grad():
    module(x)  # the forward alone: nothing is kept for a backward
```

A call keeps what a backward reads where an input, a parameter or a buffer requires grad, in `train()` and in `eval()`. To serve a model, call it
under `torch.no_grad()` or `torch.inference_mode()`, or after `module.requires_grad_(False)`, as in eager: the backward's sessions are not even made then.

"""

_TAIL = """
## What a file does not have

- Layers. The modules below a loaded one have parameters and buffers, and no class: `isinstance(each, nn.Linear)` is false. Code that looks for layers by their
  class finds none, and nobody can say so: `torch.optim.swa_utils.update_bn`, `SyncBatchNorm.convert_sync_batchnorm`, functions of `apply` that ask for a class,
  quantization of modules. Do it to the model, before the export. Modules without parameters and buffers (`nn.ReLU`, `nn.Dropout`) are not there at all.
- Another type. `double()`, `half()` and `torch.autocast` do not reach into a graph: the types are those at export.
- Another mode than at export. Of a model that was exported in `eval()` the file has no dropout, and BatchNorm with fixed statistics: `train()` says so, for files of ours.
  A file that another tool wrote does not say in which mode: what drops out in it drops out in `train()`, what does not, never does.
"""


def page() -> str:
    """The text of the page."""
    equal = sum(row.refused is None for row in ROWS)
    lines = [_HEAD, f"{len(ROWS)} rows: {equal} as in eager, {len(ROWS) - equal} refused or warned of by name.\n"]
    area = ""
    for row in ROWS:
        if row.area != area:
            area = row.area
            lines.append(f"\n## {area}\n\n| what you do | a loaded module |\n|---|---|\n")
        lines.append(f"| {row.what} | {'as in eager' if row.refused is None else f'**says no**: {row.way}'} |\n")
    return "".join([*lines, _TAIL])


if __name__ == "__main__":
    DOCUMENT.write_text(page())
