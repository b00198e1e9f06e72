"""Rows of types, places and copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.exporter.module.contract.row import grads, row, state, step

PLACES = "Types and places"


def converted(change: Callable[[nn.Module], Any], kind: torch.dtype) -> Any:
    def run(m, x):
        m.eval()
        change(m)
        return m(x.to(kind))

    return run


for _name, _change, _kind in (
    ("double()", lambda m: m.double(), torch.float64),
    ("half()", lambda m: m.half(), torch.float16),
    ("bfloat16()", lambda m: m.bfloat16(), torch.bfloat16),
    ("to(torch.float64)", lambda m: m.to(torch.float64), torch.float64),
):
    _run = converted(_change, _kind)
    _run.__name__ = f"to_{_name.partition('(')[0]}_{str(_kind)[6:]}"
    row(
        PLACES,
        f"`{_name}`, then a call",
        refused=r"'\S+' is now torch\.\S+ of shape .*, in the file it is torch.float32.*way out",
        way="export the model in that type",
    )(_run)


@row(PLACES, "the types of the file again: `double()`, then `float()`; `to(torch.float32)`")
def type_and_back(m, x):
    ids = [id(p) for p in m.parameters()]
    m.double().float().to(torch.float32)
    return [ids == [id(p) for p in m.parameters()], step(m, x), state(m)]


@row(
    PLACES,
    "an input of another type",
    refused=r"the input '.*' is torch.float64, the model takes torch.float32.*\.to\(torch.float32\)",
    way="`x.to(...)`; eager's own error for a Linear",
)
def input_of_another_type(m, x):
    return m(x.double())


@row(PLACES, '`to("cpu")`, `cpu()`, `to_empty(device="cpu")`')
def to_cpu(m, x):
    m.to("cpu").cpu()
    found = step(m, x)
    kept = state(m)
    m.to_empty(device="cpu")
    m.load_state_dict(kept)
    m.zero_grad()
    return [found, step(m, x)]


@row(PLACES, '`to("meta")`, then a call', refused=r"is on meta, the file was loaded for cpu.*device=", way="`load(..., device=...)`")
def to_meta(m, x):
    return m.to("meta")(x.to("meta"))


@row(PLACES, "`to(memory_format=...)`, transposed parameters")
def strides(m, x):
    m.first.weight.data = m.first.weight.data.t().contiguous().t()
    return step(m, x)


@row(PLACES, "an optimizer made before `to()`: its groups still are the module's parameters")
def optimizer_before_to(m, x):
    optimizer = torch.optim.AdamW([{"params": m.first.parameters(), "lr": 0.1}, {"params": m.second.parameters()}], lr=0.01)
    m.double().float().to("cpu")
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        found.append(step(m, x))
        optimizer.step()
    return [found, state(m), len(optimizer.param_groups)]


@row(PLACES, "`torch.__future__.set_swap_module_params_on_conversion(True)`: conversion and loading by swap_tensors")
def swapped(m, x):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        optimizer = torch.optim.SGD(m.parameters(), 0.1)
        m.double().float()
        m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    found = step(m, x)
    optimizer.step()
    m.zero_grad()
    return [found, step(m, x)]


@row(PLACES, "`torch.__future__.set_overwrite_module_params_on_conversion(True)`")
def overwritten(m, x):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        m.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    return step(m, x)


@row(PLACES, "`share_memory()`: parameters lie in shared memory, what another writes there counts")
def share_memory(m, x):
    m.share_memory()
    found = [all(p.is_shared() for p in m.parameters()), all(b.is_shared() for b in m.buffers()), step(m, x)]
    view = torch.from_numpy(m.first.weight.detach().numpy())
    view.mul_(2)
    m.zero_grad()
    return [*found, step(m, x)]


COPIES = "Copies and pickles"


def through(make: Callable[[nn.Module], Any]) -> Any:
    def run(m, x):
        step(m, x)
        m.zero_grad()
        other = make(m.eval())
        found = [step(other, x), grads(m), other.training]
        with torch.no_grad():
            other.first.weight.zero_()
        return [*found, m(x)]

    return run


def _saved(m: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


for _name, _make in (
    ("copy.deepcopy(module)", copy.deepcopy),
    ("pickle.loads(pickle.dumps(module))", lambda m: pickle.loads(pickle.dumps(m))),
    ("torch.save(module, ...)", _saved),
):
    _run = through(_make)
    _run.__name__ = _name.partition("(")[0].replace(".", "_")
    row(COPIES, f"`{_name}`: values, mode, what is frozen; trains on its own")(_run)


@row(COPIES, "`torch.save(module.state_dict(), ...)`, `torch.load(weights_only=True)`")
def saved_state(m, x):
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        m.first.weight.zero_()
    m.load_state_dict(torch.load(file, weights_only=True))
    return step(m, x)
