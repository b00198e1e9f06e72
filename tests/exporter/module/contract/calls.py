"""Rows of hooks, transforms, compilers and training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from symbolics.errors import PythonopError
from tests.exporter.module.contract.row import grads, row, state, step
from tests.support import process_group_of_one

HOOKS = "Hooks"


@row(HOOKS, "`register_forward_pre_hook`, with and without keywords; `register_forward_hook`; removed again")
def forward_hooks(m, x):
    seen = []
    handles = [
        m.register_forward_pre_hook(lambda mod, args: (args[0] * 2,)),
        m.register_forward_pre_hook(lambda mod, args, kwargs: seen.append(len(kwargs)), with_kwargs=True),
        m.register_forward_hook(lambda mod, args, out: seen.append(out.shape) or out + 1),
        m.register_forward_hook(lambda mod, args, kwargs, out: seen.append("k"), with_kwargs=True, prepend=True),
    ]
    found = [step(m, x)]
    for handle in handles:
        handle.remove()
    m.zero_grad()
    return [*found, seen, step(m, x)]


@row(HOOKS, "`register_full_backward_pre_hook`, `register_full_backward_hook`")
def backward_hooks(m, x):
    seen = []
    m.register_full_backward_pre_hook(lambda mod, g: (g[0] * 2,))
    m.register_full_backward_hook(lambda mod, gi, go: seen.append((gi[0].clone(), go[0].clone())) or (gi[0] + 1,))
    x = x.requires_grad_()
    return [step(m, x), seen, x.grad]


@row(HOOKS, "`register_state_dict_pre_hook`, `register_state_dict_post_hook`, `register_load_state_dict_pre_hook`, `..._post_hook`")
def state_dict_hooks(m, x):
    seen = []
    m.register_state_dict_pre_hook(lambda mod, prefix, keep: seen.append("pre"))
    m.register_state_dict_post_hook(lambda mod, found, prefix, meta: found.pop("second.bias") is None or None)
    m.first.register_load_state_dict_pre_hook(lambda mod, given, prefix, *rest: seen.append(prefix))
    m.register_load_state_dict_post_hook(lambda mod, keys: seen.append(list(keys.missing_keys)))
    return [list(m.state_dict()), str(m.load_state_dict(m.state_dict(), strict=False)), seen]


@row(HOOKS, "hooks of tensors: `Tensor.register_hook`, `register_post_accumulate_grad_hook`")
def tensor_hooks(m, x):
    seen = []
    m.first.weight.register_hook(lambda g: g * 2)
    m.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    return [step(m, x), seen]


@row(HOOKS, "`nn.modules.module.register_module_forward_hook`, for all modules: the loaded one is a module, its parts never run")
def global_hooks(m, x):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda mod, args, out: seen.append(mod is m))
    try:
        y = m(x)
    finally:
        handle.remove()
    return [y, True in seen]


for _kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):

    def _run(m, x, kind=_kind):
        getattr(m.first, f"register_{kind}_hook")(lambda *args: None)
        return m(x)

    _run.__name__ = f"part_{_kind}_hook"
    row(
        HOOKS,
        f"`register_{_kind}_hook` of a part",
        refused=r"'first' of a loaded file never runs.*way out",
        way="a hook of the loaded module or of a tensor; an output of the exported model",
    )(_run)


FUNC = "torch.func, torch.compile"


def _parameters(m: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.detach() * 1.5 for k, v in m.named_parameters()}


@row(FUNC, "`functional_call`: parameters and buffers of the call, with gradients of what was given, in either mode")
def functional_call(m, x):
    found = []
    for mode in (True, False):
        given = {k: v.requires_grad_() for k, v in _parameters(m).items()}
        y = torch.func.functional_call(m.train(mode), given, (x,))
        found += [y, torch.autograd.grad(y.square().sum(), list(given.values()))]
    return [*found, m(x)]


@row(FUNC, "`grad`, `grad_and_value`, `vjp`, `jacrev` of a functional call, in `eval()`", net="double")
def func_grad(m, x):
    m.eval()
    loss = lambda p, x: torch.func.functional_call(m, p, (x,)).square().sum()  # noqa: E731
    p = _parameters(m)
    return [
        torch.func.grad(loss)(p, x),
        torch.func.grad_and_value(loss, argnums=1)(p, x),
        torch.func.vjp(m, x)[1](torch.ones(6, 3).double()),
        torch.func.jacrev(m)(x),
    ]


@row(FUNC, "`jvp`, `jacfwd`, `hessian`, forward-mode dual tensors", net="double", kinds=("foreign",))
def func_forward_mode(m, x):
    m.eval()
    f = lambda v: torch.tanh(m(v)).sum()  # noqa: E731
    return [torch.func.jvp(m, (x,), (x,)), torch.func.jacfwd(m)(x), torch.func.hessian(f)(x)]


@row(FUNC, "`vmap` in `eval()`: one run for each element of the batch", net="double")
def vmap(m, x):
    m.eval()
    batch = torch.stack([x, x * 2])
    each = torch.func.vmap(torch.func.grad(lambda v: m(v).square().sum()))(batch)
    return [torch.func.vmap(m)(batch), each]


@row(FUNC, "a transform of a forward that changes buffers", refused=r"under a transform of torch.func.*eval\(\)", way="`eval()`")
def transformed_in_train(m, x):
    return torch.func.vmap(m.train())(torch.stack([x, x]))


@row(
    FUNC,
    "`is_grads_batched=True`, `vectorize=True`",
    refused=r"takes no batch of cotangents.*way out: torch.func.jacrev",
    way="`torch.func.jacrev`",
)
def batched_cotangents(m, x):
    return torch.autograd.functional.jacobian(m.eval(), x, vectorize=True)


@row(FUNC, "`torch.compile(module)`, and around a function that calls it", kinds=("dynamo",))
def compiled(m, x):
    torch.compiler.reset()
    m.eval()
    whole, around = torch.compile(m, backend="eager"), torch.compile(lambda v: m(v * 2) + 1, backend="eager")
    return [step(whole, x)[:2], around(x), grads(m)]


@row(FUNC, "`torch.compile(fullgraph=True)`", refused=r"loaded_file_takes_no_fullgraph", way="without `fullgraph=True`", kinds=("foreign",))
def compiled_whole(m, x):
    torch.compiler.reset()
    return torch.compile(m.eval(), backend="eager", fullgraph=True)(x)


def _traced(m: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return torch.jit.trace(m, (x,))


for _name, _make in (("torch.jit.trace", _traced), ("torch.export.export", lambda m, x: torch.export.export(m, (x,)))):

    def _run(m, x, make=_make):
        return make(m.eval(), x)

    _run.__name__ = _name.replace(".", "_")
    row(
        FUNC,
        f"`{_name}` of it",
        refused=r"runs in onnxruntime, where torch\.jit\.trace.*way out",
        way="`module.save(path)`: the file is the graph. In a bigger model, put the original module in its place, with `load_state_dict(module.state_dict())`",
    )(_run)


TRAINING = "Training"


@row(TRAINING, "torch's optimizers, groups of parameters, schedules")
def optimizers(m, x):
    optimizer = torch.optim.SGD([{"params": m.first.parameters(), "lr": 0.01}], lr=0.001, momentum=0.9)
    optimizer.add_param_group({"params": m.second.parameters()})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        found.append(step(m, x))
        optimizer.step()
        schedule.step()
    return [found, state(m)]


@row(TRAINING, "`clip_grad_norm_`, `clip_grad_value_`, `parameters_to_vector`")
def clipped(m, x):
    step(m.eval(), x)
    norm = nn.utils.clip_grad_norm_(m.parameters(), 0.5)
    found = [norm, grads(m)]
    nn.utils.clip_grad_value_(m.parameters(), 0.01)
    return [*found, grads(m), nn.utils.parameters_to_vector(m.parameters())]


def parametrized(name: str) -> Any:
    def run(m, x):
        torch.manual_seed(5)
        getattr(parametrizations, name)(m.first, "weight")
        optimizer = torch.optim.SGD(m.parameters(), 0.05)
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            y = m.train()(x)
            y.square().mean().backward()
            optimizer.step()
            found.append(y)
        names = sorted(n for n, _ in m.named_parameters())
        m.eval()
        found.append(m(x))
        parametrize.remove_parametrizations(m.first, "weight")
        return [found, names, m(x), {n: p.grad for n, p in m.second.named_parameters()}]

    return run


for _name in ("weight_norm", "spectral_norm", "orthogonal"):
    _run = parametrized(_name)
    _run.__name__ = _name
    row(TRAINING, f"`parametrizations.{_name}` of a parameter, and taken away again")(_run)


@row(TRAINING, "`torch.optim.swa_utils.AveragedModel`")
def averaged(m, x):
    average = torch.optim.swa_utils.AveragedModel(m)
    step(m, x)
    torch.optim.SGD(m.parameters(), 0.01).step()
    average.update_parameters(m)
    return [average.eval()(x), state(average.module)]


@row(TRAINING, "`DistributedDataParallel` on gloo (one process here, two in `test_distributed.py`, and FSDP2)")
def distributed(m, x):
    process_group_of_one()
    return step(nn.parallel.DistributedDataParallel(m), x)[:2] + [grads(m)]


@row(TRAINING, "an error leaves the module as it was")
def after_an_error(m, x):
    before = state(m)
    try:
        m(x[:, :2])
    except (RuntimeError, PythonopError):  # eager's is torch's, ours says the shape
        pass
    return [all(torch.equal(before[k], v) for k, v in state(m).items()), step(m, x)]
