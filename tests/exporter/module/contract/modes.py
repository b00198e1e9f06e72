"""Rows of modes and gradients."""

from __future__ import annotations

import torch

from tests.exporter.module.contract.row import ALL, OURS, grads, row, said, state, step

MODES = "Modes and gradients"


@row(MODES, "`eval()`: dropout and statistics stop, gradients do not", kinds=ALL)
def eval_keeps_gradients(m, x):
    before = state(m)
    m.eval()
    x = x.requires_grad_()
    return [step(m, x), x.grad, all(torch.equal(before[k], v) for k, v in state(m).items())]


@row(MODES, "`train()`: running statistics and their counter follow, also under `no_grad()`", kinds=ALL)
def statistics_follow(m, x):
    m.train()
    found = [m(x), m(x * 2 + 1)]
    with torch.no_grad():
        found.append(m(x - 1))
    return [found, state(m), m.eval()(x)]


@row(MODES, "`train()` drops out, anew in each call; `eval()` does not", net="drop", kinds=ALL)
def dropout(m, x):
    m.train()
    one, two = m(x), m(x)
    m.eval()
    return [not torch.equal(one, two), bool((one == 0).any()), step(m, x)]


@row(MODES, "`train(False)`, `eval()` and `.training`")
def mode_flags(m, x):
    return [m.training, m.train(False).training, m.train() is m, m.training, m.eval().training]


@row(MODES, "back and forth between the modes", kinds=ALL)
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


@row(MODES, "`requires_grad_()` of a parameter, later, off and on, in either mode", kinds=ALL)
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


@row(MODES, "`torch.autograd.gradcheck`", net="double", kinds=("dynamo",))
def gradcheck(m, x):
    m.eval()
    return [
        torch.autograd.gradcheck(
            lambda w, v: torch.func.functional_call(m, {"first.weight": w}, (v,)), (m.first.weight, x[:6].requires_grad_())
        )
    ]


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


@row(MODES, "the mode after `load()`: `eval()` where the file was exported so and that matters", training=False, kinds=OURS)
def mode_of_the_file(m, x):
    return [m.training, [(n, each.training) for n, each in m.named_modules()], step(m, x), state(m)]


@row(
    MODES,
    "`train()` of a file that was exported in `eval()`",
    training=False,
    kinds=OURS,
    refused=r"'norm' had been in eval\(\) at export: train\(\) brings back neither dropout nor moving statistics.*way out",
    way="a warning, once, with the modules' names; export in `train()`",
)
def train_of_an_eval_file(m, x):
    return said(m.train)


@row(
    MODES,
    "gradients in `eval()` of a training file (`build_gradient_graph`) whose modes differ: the call runs, its backward is an error",
    net="training file",
    kinds=OURS,
    refused="the training file has the gradients of training mode.*way out",
    way="the forward file",
)
def eval_gradients_of_a_training_file(m, x):
    m.eval()(x).sum().backward()


@row(
    MODES,
    "an operator without a gradient, in either mode: the call runs, its backward is an error",
    net="inverse",
    kinds=("foreign",),
    refused="Inverse",
    way="`no_grad()`, or a rule: `@exporter.gradient`",
)
def no_rule(m, x):
    m(x)
    m.eval()(x).sum().backward()


@row(
    MODES,
    "`torch.autocast` around a call",
    refused="autocast does not reach into a loaded file",
    way="a warning, once; export under autocast",
)
def autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return said(lambda: m(x))
