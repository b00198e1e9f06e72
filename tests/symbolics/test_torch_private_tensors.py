"""The private names of torch for memory, hooks and traced values of tensors: a test each, which fails by its name when a release moves one."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import pytest
import torch

from symbolics import torch_private as private


def _over_an_array():
    array = np.arange(1 << 10, dtype=np.float32)
    return array, torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(torch.from_numpy(array)))


def test_weak_storage():
    _, x = _over_an_array()
    weak = private.weak_storage(x)
    assert torch.UntypedStorage._new_with_weak_ptr(weak).data_ptr() == x.data_ptr()
    del x
    assert torch.UntypedStorage._new_with_weak_ptr(weak) is None
    private.own_memory(weak)  # of a storage that is gone
    private.release_weak_storage(weak)


def test_release_weak_storage():
    _, x = _over_an_array()
    for _ in range(10):
        private.release_weak_storage(private.weak_storage(x))
    assert x.sum() == sum(range(1 << 10))


@pytest.mark.parametrize("room", [True, False])
def test_own_memory(room, monkeypatch):
    array, x = _over_an_array()
    part, leaf = x[1:], x.detach().requires_grad_()
    sine = leaf.sin() if room else None
    weak = private.weak_storage(x)
    if not room:
        monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", _no_room)
        monkeypatch.setattr(torch.UntypedStorage, "share_memory_", _no_room)
    private.own_memory(weak)
    private.release_weak_storage(weak)
    array[:] = 0
    expected = torch.arange(1 << 10, dtype=torch.float32)
    assert torch.equal(x, expected)
    assert torch.equal(part, expected[1:])
    if sine is not None:  # what autograd has saved
        (gradient,) = torch.autograd.grad(sine.sum(), leaf)
        torch.testing.assert_close(gradient, expected.cos())


def _no_room(storage):
    raise RuntimeError("no room")


def test_tensor_hooks():
    tensor, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    tensor.register_hook(print)
    assert private.tensor_hooks(tensor) == [print] and private.tensor_hooks(other) == []


def test_post_accumulate_hooks():
    tensor, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    tensor.register_post_accumulate_grad_hook(print)
    assert private.post_accumulate_hooks(tensor) == [print] and private.post_accumulate_hooks(other) == []


def test_module_backward_hooks():
    full, old = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    full.register_full_backward_pre_hook(print)
    full.register_full_backward_hook(repr)
    old.register_backward_hook(repr)
    everywhere = torch.nn.modules.module.register_module_full_backward_hook(len)
    try:
        assert private.module_backward_hooks(full) == [
            ("register_full_backward_pre_hook", print),
            ("register_full_backward_hook", repr),
            ("register_module_full_backward_hook", len),
        ]
    finally:
        everywhere.remove()
    assert private.module_backward_hooks(old) == [("register_backward_hook", repr)]


def traced(body):
    return torch.jit.trace(body, (torch.ones(2),), check_trace=False)(torch.ones(2))


def test_traced_value():
    kinds = []

    def body(x):
        y = x * 2
        kinds.append(private.traced_value(y).node().kind())
        return y

    traced(body)
    assert kinds == ["aten::mul"]


def test_set_traced_value():
    def body(x):
        y, z = x * 2, x * 3
        private.set_traced_value(z, private.traced_value(y))
        return z

    assert traced(body).tolist() == [2, 2]


def test_traced_values_kept():
    """``x.float()`` of floats gives x back: the trace has a new value for it, which torch lets x stand for from then on."""
    kinds = []

    def body(x):
        y, z = x * 2, x * 3
        with private.traced_values_kept([y, z]):
            y.float(), z.neg_()
        kinds.extend(private.traced_value(each).node().kind() for each in (y, z))
        y.float()
        kinds.append(private.traced_value(y).node().kind())
        return y + z

    traced(body)
    assert kinds == ["aten::mul", "aten::neg_", "aten::to"]


def test_trace_kept():
    """Without it, the end of the trace is a segmentation fault."""

    def body(x):
        y = x * 2
        with contextlib.suppress(RuntimeError), private.trace_kept():
            y = y.view(7, 9)
        return y * 3

    assert traced(body).tolist() == [6, 6]


def test_torchscript_numbers(tmp_path):
    seen = []

    def symbolic(g, x, axes):
        seen.extend(private.torchscript_numbers(value) for value in (axes, x))
        return g.op("Transpose", x, perm_i=[1, 0])

    class Turns(torch.nn.Module):
        def forward(self, x):
            return x.permute(-1, 0)

    torch.onnx.register_custom_op_symbolic("aten::permute", symbolic, 18)
    try:
        torch.onnx.export(Turns(), (torch.ones(2, 3),), str(tmp_path / "m.onnx"), dynamo=False, opset_version=18)
    finally:
        torch.onnx.unregister_custom_op_symbolic("aten::permute", 18)
    assert seen == [[-1, 0], None]


def test_traced_graph():
    kinds = []

    def body(x):
        y = x * 2
        kinds.extend(node.kind() for node in private.traced_graph().nodes())
        return y

    traced(body)
    assert "aten::mul" in kinds


def test_base_of():
    x = torch.ones(2)
    assert private.base_of(x[:1].view(1, 1)) is x and private.base_of(x) is x


def test_transform_kinds():
    seen = []
    torch.func.grad(lambda x: torch.func.vmap(lambda y: seen.append(private.transform_kinds()) or y)(x).sum())(torch.ones(2))
    assert seen == [["Grad", "Vmap"]] and private.transform_kinds() == []


def test_openmp_functions():
    found = private.openmp_functions()
    assert len(found) == 7
    assert sys.platform != "linux" or all(found[:3]), (
        "torch's library brings another OpenMP along, or none: see symbolics/torch_private/threads.py"
    )


def test_shape_of_edge():
    y = torch.ones(2, 3, requires_grad=True).sin()[:, 1:]
    assert private.shape_of_edge(torch.autograd.graph.get_gradient_edge(y)) == (2, 2)


def test_is_saved_by_its_maker():
    x = torch.ones(3, requires_grad=True)
    assert private.is_saved_by_its_maker(x.exp()) and private.is_saved_by_its_maker(x.softmax(0))
    assert not any(private.is_saved_by_its_maker(each) for each in (x, x.sin(), x * x, x.detach()))


def test_storage_ref():
    x = torch.zeros(3)
    assert private.storage_ref(x) == private.storage_ref(x[1:]) != private.storage_ref(torch.zeros(3))
    old = {private.storage_ref(torch.zeros(3)) for _ in range(10)}  # of memory that is free again
    assert len(old) == 10 and private.storage_ref(torch.zeros(3)) not in old
    assert private.storage_ref(torch.zeros(3).to_sparse()) is None
    heard = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            heard.append(func)
            return func(*args, **kwargs or {})

    with Mode():
        private.storage_ref(x)
    assert not heard


def test_storage_ref_of_an_unknown_size():
    class Parts(torch.nn.Module):
        def forward(self, x):
            part = x[x > 0]
            keys.append(private.storage_ref(part))
            return part * 2

    keys = []
    torch.export.export(Parts(), (torch.randn(4),), strict=False)
    assert keys and all(key is not None for key in keys)
