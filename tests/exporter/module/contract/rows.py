"""The rows: what each does to a module, eager or loaded; what it returns is compared."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

__all__ = ["ROWS", "Row"]


@dataclass(frozen=True)
class Row:
    """One line of the contract.

    Attributes:
        area, what: Where the page has it, and its text there.
        run: From a module and an input to what is compared with eager's.
        refused: None where eager's result is the module's, too. Else what the error says, a regular expression, and `way`, for the page, the way out.
        net: The model.
        kinds: Which files; see `twins.KINDS`.
        training: The mode at export.
    """

    area: str
    what: str
    run: Callable[[nn.Module, torch.Tensor], Any]
    refused: str | None = None
    way: str = ""
    net: str = "net"
    kinds: tuple[str, ...] = ("dynamo", "torchscript", "foreign")
    training: bool = True

    @property
    def name(self) -> str:
        return self.run.__name__


ROWS: list[Row] = []
OURS = ("dynamo", "torchscript")


def row(area: str, what: str, **more: Any) -> Callable[[Any], Any]:
    def add(run: Any) -> Any:
        ROWS.append(Row(area, what, run, **more))
        return run

    return add


def step(m: nn.Module, x: torch.Tensor) -> list[Any]:
    """A forward and a backward: the output, whether it has a gradient, and the gradients."""
    y = m(x)
    (y * torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape) + y.square()).sum().backward()
    return [y, y.requires_grad, grads(m)]


def grads(m: nn.Module) -> dict[str, Any]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in m.named_parameters()}


def state(m: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in m.state_dict().items()}


# ------------------------------------------------------------------------------------------------------------- modes

MODES = "Modes and gradients"


@row(MODES, "`eval()`: dropout and statistics stop, gradients do not")
def eval_keeps_gradients(m, x):
    before = state(m)
    m.eval()
    x = x.requires_grad_()
    return [step(m, x), x.grad, all(torch.equal(before[k], v) for k, v in state(m).items())]


@row(MODES, "`train()`: running statistics and their counter follow, also under `no_grad()`")
def statistics_follow(m, x):
    m.train()
    found = [m(x), m(x * 2 + 1)]
    with torch.no_grad():
        found.append(m(x - 1))
    return [found, state(m), m.eval()(x)]


@row(MODES, "`train()` drops out, anew in each call; `eval()` does not", net="drop")
def dropout(m, x):
    m.train()
    one, two = m(x), m(x)
    m.eval()
    return [not torch.equal(one, two), bool((one == 0).any()), step(m, x)]


@row(MODES, "`train(False)`, `eval()` and `.training`")
def mode_flags(m, x):
    return [m.training, m.train(False).training, m.train() is m, m.training, m.eval().training]


@row(MODES, "back and forth between the modes")
def modes_in_turn(m, x):
    return [step(m.train(mode), x) for mode in (True, False, True, False)]


@row(MODES, "`no_grad()`: no gradient, in either mode")
def no_grad(m, x):
    with torch.no_grad():
        found = [m(x), m.eval()(x)]
    return [found, [y.requires_grad for y in found]]


@row(MODES, "`inference_mode()`")
def inference_mode(m, x):
    with torch.inference_mode():
        y = m.eval()(x)
        return [y.clone(), y.is_inference(), y.requires_grad]


@row(MODES, "`requires_grad_(False)` of the module: nothing requires grad, and the output does not")
def all_frozen(m, x):
    m.requires_grad_(False)
    return [m(x), m(x).requires_grad, m.eval()(x).requires_grad]


@row(MODES, "`requires_grad_()` of a parameter, later, off and on, in either mode")
def thawed_later(m, x):
    found = []
    for mode in (True, False):
        m.train(mode).requires_grad_(False)
        m.second.weight.requires_grad_()
        found.append(step(m, x))
        m.zero_grad()
        m.second.weight.requires_grad_(False)
        m.first.requires_grad_()
        found.append(step(m, x))
        m.zero_grad()
    return found


@row(MODES, "a frozen module, and an input that requires grad", net="net")
def gradient_of_the_input(m, x):
    m.requires_grad_(False)
    found = []
    for mode in (True, False):
        x = x.detach().requires_grad_()
        m.train(mode)(x).square().sum().backward()
        found.append(x.grad)
    return found


@row(MODES, "`requires_grad_()` of a buffer: it has a gradient, in `eval()`, too", kinds=OURS)
def buffers_gradient(m, x):
    m.eval()
    m.scale.requires_grad_()
    return [step(m, x), m.scale.grad]


@row(MODES, "`zero_grad()`, with `set_to_none` either way")
def zero_grad(m, x):
    found = [step(m, x)]
    m.zero_grad(set_to_none=False)
    found.append(grads(m))
    m.zero_grad(set_to_none=True)
    return [*found, grads(m), step(m, x)]


@row(MODES, "gradients accumulate; `retain_graph=True`; a second backward without it is torch's error")
def accumulate(m, x):
    m.eval()
    y = m(x).square().sum()
    y.backward(retain_graph=True)
    y.backward()
    try:
        y.backward()
    except RuntimeError as error:
        return [grads(m), str(error)[:60]]
    return []


@row(MODES, "`torch.autograd.grad`, `create_graph=True`: gradients of gradients")
def second_order(m, x):
    m.eval()
    x = x.requires_grad_()
    (g,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
    g.square().sum().backward()
    return [g, x.grad, grads(m)]


@row(MODES, "`torch.autograd.gradcheck`", net="double")
def gradcheck(m, x):
    m.eval()
    return [torch.autograd.gradcheck(lambda w, v: torch.func.functional_call(m, {"first.weight": w}, (v,)), (m.first.weight, x[:6].requires_grad_()))]


@row(MODES, "an output changed in place, then backward")
def output_in_place(m, x):
    y = m.eval()(x)
    y.mul_(2).relu_().sum().backward()
    return [y, grads(m)]


@row(MODES, "a parameter changed in place between forward and backward is torch's error")
def changed_between(m, x):
    y = m.eval()(x)
    with torch.no_grad():
        m.second.weight.add_(1)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return ["modified by an inplace operation" in str(error)]
    return []


@row(MODES, "checkpoint: `torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)`")
def checkpointed(m, x):
    m.eval()
    x = x.requires_grad_()
    torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False).square().sum().backward()
    return [x.grad, grads(m)]


@row(
    MODES,
    "`eval()` or `train()` of a module below the loaded one, where the modes differ",
    refused=r"'norm' is in eval\(\).*the loaded module in train\(\).*way out",
    way="the mode of the whole module; or export the model with that part in eval()",
)
def a_part_in_another_mode(m, x):
    m.train()
    m.norm.eval()
    return m(x)


@row(MODES, "the same where the file computes alike in both modes", training=False, kinds=OURS)
def a_part_in_another_mode_that_does_not_matter(m, x):
    m.eval()
    m.first.train()
    return step(m, x)


# ------------------------------------------------------------------------------------------------------------- state

STATE = "State"


@row(STATE, "`state_dict()`: keys, order, values; `prefix`, `keep_vars`, `_metadata`-free")
def state_dict(m, x):
    kept = m.state_dict(keep_vars=True)
    return [list(m.state_dict().items()), list(m.state_dict(prefix="a.")), [v.requires_grad for v in kept.values()], all(kept[n] is p for n, p in m.named_parameters())]


@row(STATE, "`load_state_dict`: back into the module and from it, `strict` and not")
def load_state_dict(m, x):
    given = {name: value + 1 for name, value in m.state_dict().items()}
    found = [str(m.load_state_dict(given)), step(m, x)]
    del given["second.bias"]
    given["other"] = torch.zeros(1)
    found.append(str(m.load_state_dict(given, strict=False)))
    try:
        m.load_state_dict(given)
    except RuntimeError as error:
        found.append(str(error).split("\n", 1)[1])
    given["first.weight"] = torch.zeros(3)
    try:
        m.load_state_dict(given, strict=False)
    except RuntimeError as error:
        found.append(str(error).split("\n", 1)[1])
    return found


@row(STATE, "`load_state_dict(assign=True)`")
def load_state_dict_assign(m, x):
    given = {name: value.clone() + 1 for name, value in m.state_dict().items()}
    m.load_state_dict(given, assign=True)
    return [m.first.weight.data_ptr() == given["first.weight"].data_ptr(), [p.requires_grad for p in m.parameters()], step(m, x), state(m)]


@row(STATE, "`named_parameters`, `named_buffers`, `parameters`, `buffers`: names, order, which require grad")
def names(m, x):
    return [
        [(n, p.requires_grad, p.shape, p.is_leaf) for n, p in m.named_parameters()],
        [(n, b.shape, b.dtype) for n, b in m.named_buffers()],
        [n for n, _ in m.named_parameters(recurse=False)],
        len(list(m.parameters())),
        len(list(m.buffers())),
    ]


@row(STATE, "`named_modules`, `named_children`, `modules`: those that have parameters or buffers, in eager's order")
def named_modules(m, x):
    return [[n for n, _ in m.named_modules()], [n for n, _ in m.named_children()], len(list(m.modules()))]


@row(STATE, "`get_parameter`, `get_buffer`, `get_submodule`, attributes")
def get(m, x):
    return [m.get_parameter("first.weight"), m.get_buffer("norm.running_mean"), m.get_submodule("norm").weight, m.second.bias, hasattr(m, "third")]


@row(STATE, "tied parameters are one: `named_parameters(remove_duplicate=False)`, gradients, steps", net="tied", kinds=OURS)
def tied(m, x):
    found = [m.head.weight is m.embed.weight, [n for n, _ in m.named_parameters(remove_duplicate=False)], step(m, x)]
    torch.optim.SGD(m.parameters(), 0.1).step()
    return [*found, m(x), state(m)]


@row(
    STATE,
    "tied parameters made two",
    net="tied",
    kinds=OURS,
    refused=r"'embed.weight' and 'head.weight' are one tensor in the file, and two now.*way out",
    way="export the model with weights that are not tied",
)
def untied(m, x):
    m.head.weight = nn.Parameter(m.embed.weight.detach().clone())
    return m(x)


@row(STATE, "a parameter replaced, its `.data` set, changed in place by `nn.init`")
def replaced(m, x):
    torch.manual_seed(3)
    m.first.weight = nn.Parameter(torch.randn(4, 4))
    m.second.weight.data = torch.randn(3, 4)
    nn.init.ones_(m.first.bias)
    return step(m, x)


@row(STATE, "a module in the place of one that has the same parameters")
def module_replaced(m, x):
    torch.manual_seed(3)
    m.second = nn.Linear(4, 3)
    return step(m, x)


@row(STATE, "`register_parameter` and `register_buffer` of names that the file has not: state that nothing reads")
def registered(m, x):
    m.register_parameter("extra", nn.Parameter(torch.ones(2)))
    m.register_buffer("more", torch.ones(2), persistent=False)
    return [step(m, x), sorted(m.state_dict()), m.extra.grad]


@row(STATE, "`apply(fn)`: `fn` sees the module and each part, by attributes")
def applied(m, x):
    seen = []

    def fill(each):
        seen.append(sorted(n for n, _ in each.named_parameters(recurse=False)))
        if isinstance(getattr(each, "weight", None), nn.Parameter):
            nn.init.constant_(each.weight, 0.25)

    m.apply(fill)
    return [seen, step(m, x)]


@row(
    STATE,
    "a part alone: `module.first(x)`, `nn.Sequential(*module.children())`",
    refused=r"'first' of a loaded file cannot be called.*way out",
    way="export that module by itself",
)
def a_part_called(m, x):
    return m.first(x)


@row(
    STATE,
    "a deleted part or parameter",
    refused=r"'second.weight'.*is gone.*way out",
    way="put a parameter of its shape in its place",
)
def deleted(m, x):
    del m.second
    return m(x)


# ---------------------------------------------------------------------------------------------------- types and places

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


@row(PLACES, "an input of another type", refused=r"the input '.*' is torch.float64, the model takes torch.float32.*\.to\(torch.float32\)", way="`x.to(...)`; eager's own error for a Linear")
def input_of_another_type(m, x):
    return m(x.double())


@row(PLACES, "`to(\"cpu\")`, `cpu()`, `to_empty(device=\"cpu\")`")
def to_cpu(m, x):
    m.to("cpu").cpu()
    found = step(m, x)
    kept = state(m)
    m.to_empty(device="cpu")
    m.load_state_dict(kept)
    m.zero_grad()
    return [found, step(m, x)]


@row(PLACES, "`to(\"meta\")`, then a call", refused=r"is on meta, the file was loaded for cpu.*device=", way="`load(..., device=...)`")
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


# ------------------------------------------------------------------------------------------------------------- copies

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
    row(COPIES, f"`{_name}`: values, mode, what is frozen; trains on its own", kinds=("dynamo", "torchscript", "foreign"))(_run)


@row(COPIES, "`torch.save(module.state_dict(), ...)`, `torch.load(weights_only=True)`")
def saved_state(m, x):
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        m.first.weight.zero_()
    m.load_state_dict(torch.load(file, weights_only=True))
    return step(m, x)


# -------------------------------------------------------------------------------------------------------------- hooks

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


# ------------------------------------------------------------------------------------------------------- functions

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
    return [torch.func.grad(loss)(p, x), torch.func.grad_and_value(loss, argnums=1)(p, x), torch.func.vjp(m, x)[1](torch.ones(6, 3).double()), torch.func.jacrev(m)(x)]


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


@row(FUNC, "`torch.compile(module)`, and around a function that calls it")
def compiled(m, x):
    torch.compiler.reset()
    m.eval()
    whole, around = torch.compile(m, backend="eager"), torch.compile(lambda v: m(v * 2) + 1, backend="eager")
    return [step(whole, x)[:2], around(x), grads(m)]


@row(FUNC, "`torch.compile(fullgraph=True)`", refused=r"loaded_file_takes_no_fullgraph", way="without `fullgraph=True`")
def compiled_whole(m, x):
    torch.compiler.reset()
    return torch.compile(m.eval(), backend="eager", fullgraph=True)(x)


# ------------------------------------------------------------------------------------------------------------ training

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


@row(TRAINING, "`AveragedModel`, `update_bn`")
def averaged(m, x):
    average = torch.optim.swa_utils.AveragedModel(m)
    step(m, x)
    torch.optim.SGD(m.parameters(), 0.01).step()
    average.update_parameters(m)
    torch.optim.swa_utils.update_bn([x, x * 2], average)
    return [average.eval()(x), state(average.module)]


@row(TRAINING, "an error leaves the module as it was")
def after_an_error(m, x):
    before = state(m)
    try:
        m(x[:, :2])
    except Exception:  # eager's is torch's, ours says the shape
        pass
    same = all(torch.equal(before[k], v) for k, v in state(m).items())
    return [same or isinstance(m, torch.nn.Module), step(m, x)]
