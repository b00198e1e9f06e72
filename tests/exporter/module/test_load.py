"""A loaded file behaves as the model that it was exported from: values, gradients, names, modes."""

from __future__ import annotations

import copy
import gc

import onnx.parser
import pytest
import torch
from torch import nn

import exporter
from tests.exporter.module import functions as F
from tests.trains import ALLOW, assert_close, assert_same_grads, assert_step_alike, assert_trains_alike, loaded


def contexts(module):
    gc.collect()
    return len(module._onnx.plans.store)


def test_forward_and_gradients_equal_eagers(dynamo, tmp_path):
    module = assert_trains_alike(F.Cubic(), (torch.randn(3, 4),), dynamo=dynamo, path=tmp_path / "m.onnx")
    assert contexts(module) == 0


def test_state_goes_both_ways(dynamo):
    model = F.Tied()
    module = loaded(model, (torch.tensor([1, 2]),), dynamo=dynamo)
    assert list(module.state_dict()) == list(model.state_dict())
    assert {n: p.requires_grad for n, p in module.named_parameters()} == {n: p.requires_grad for n, p in model.named_parameters()}
    assert module.head.weight is module.embed.weight
    assert dict(module.named_buffers()).keys() == dict(model.named_buffers()).keys()
    with torch.no_grad():
        module.embed.weight.mul_(2)
    model.load_state_dict(module.state_dict())
    ids = torch.tensor([3, 0])
    assert_close(module(ids), model(ids))  # the change is seen by the next forward
    model.embed.weight.data.normal_()
    module.load_state_dict(model.state_dict())
    assert_close(module(ids), model(ids))


def test_tied_and_frozen_parameters_train_as_eagers(dynamo):
    model, ids = F.Tied(), torch.tensor([1, 2, 3])
    module = loaded(model, (ids,), dynamo=dynamo)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (module, model)]
    for _ in range(4):
        for m, optimizer in zip((module, model), optimizers, strict=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(m(ids), ids).backward()
            optimizer.step()
    for one, two in zip(module.parameters(), model.parameters(), strict=True):
        assert_close(one, two, 1e-4)
    assert module.frozen.weight.grad is None


def test_structure_keywords_and_several_outputs(dynamo):
    model = F.Structured()
    x, y, ids = torch.randn(2, 4), torch.randn(2, 4), torch.arange(4)
    module = loaded(model, (x, y, ids), dynamo=dynamo)
    mine, theirs = [t.clone().requires_grad_() for t in (x, y)], [t.clone().requires_grad_() for t in (x, y)]
    got, expected = module(mine[0], ids=ids, y=mine[1]), model(*theirs, ids)
    assert type(got) is F.Result
    assert got.others.keys() == expected.others.keys()
    assert got.others["more"][1] is None
    assert not got.others["index"].requires_grad
    assert torch.equal(got.others["index"], expected.others["index"])
    for result in (got, expected):
        (result.value.sum() + 2 * result.others["b"].sum() + result.others["more"][0].prod()).backward()
    assert_same_grads(module, model)
    assert module.unused.weight.grad is None
    for one, two in zip(mine, theirs, strict=True):
        assert_close(one.grad, two.grad)


def test_an_output_without_a_gradient_contributes_nothing(dynamo):
    model = F.Structured()
    x, y, ids = torch.randn(2, 4), torch.randn(2, 4), torch.arange(4)
    module = loaded(model, (x, y, ids), dynamo=dynamo)
    mine, theirs = y.clone().requires_grad_(), y.clone().requires_grad_()
    module(x, mine, ids).others["b"].sum().backward()
    model(x, theirs, ids).others["b"].sum().backward()
    assert_same_grads(module, model)
    assert_close(mine.grad, theirs.grad)


def test_a_parameter_behind_another_output_has_no_gradient(dynamo):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return self.one(x), self.two(x)

    model, x = Heads(), torch.randn(3, 4)
    module = loaded(model, (x,), dynamo=dynamo)
    for m in (module, model):
        m(x)[1].sum().backward()
    assert module.one.weight.grad is None
    assert_same_grads(module, model)


def test_a_class_that_is_not_allowed_in_the_structure_is_a_warning(dynamo):
    x = torch.randn(2, 4)
    module = loaded(F.Structured(), (x, x, torch.arange(4)), dynamo=dynamo, allow=["tests.exporter.module.functions:Two"])
    with pytest.warns(exporter.PythonopWarning, match=r"tests\.exporter\.module\.functions:Result"):
        value, others = module(x, x, torch.arange(4))
    assert value.shape == (2, 4)
    assert set(others) == {"b", "index", "more"}


def test_retain_graph_and_the_second_backward(dynamo):
    model, x = F.Cubic(), torch.randn(3, 4)
    module = loaded(model, (x,), dynamo=dynamo)
    y, z = module(x), model(x)
    for result in (y, z):
        result.sum().backward(retain_graph=True)
        result.sum().backward()
    assert_same_grads(module, model)
    assert contexts(module) == 0
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_several_forwards_before_a_backward(dynamo):
    model, x = F.Cubic(), torch.randn(3, 4)
    module = loaded(model, (x,), dynamo=dynamo)
    for m in (module, model):
        first, second = m(x), m(2 * x)
        (first.sum() - 3 * second.sum()).backward()
        m(x + 1).sum().backward()
    assert_same_grads(module, model)


def test_a_forward_without_a_backward_keeps_nothing():
    module = loaded(F.Cubic(), (torch.randn(3, 4),))
    y = module(torch.randn(3, 4))
    assert contexts(module) == 1
    del y
    assert contexts(module) == 0


def test_no_grad_and_frozen_parameters_run_the_forward_alone():
    module, x = loaded(F.Cubic(), (torch.randn(3, 4),)), torch.randn(3, 4)
    with torch.no_grad():
        y = module(x)
    assert not y.requires_grad
    module.requires_grad_(False)
    z = module(x)
    assert not z.requires_grad
    assert contexts(module) == 0
    x.requires_grad_()
    module(x).sum().backward()  # somebody asks for the input's
    assert x.grad is not None


def test_a_parameter_changed_in_place_between_forward_and_backward_is_torchs_error():
    module, x = loaded(F.Cubic(), (torch.randn(3, 4),)), torch.randn(3, 4)
    y = module(x)
    with torch.no_grad():
        module.second.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_freezing_and_thawing_after_loading(dynamo):
    model, x = F.Cubic(), torch.randn(3, 4)
    module = loaded(model, (x,), dynamo=dynamo)
    for m in (module, model):
        m.first.requires_grad_(False)
        m(x).sum().backward()
    assert_same_grads(module, model)
    for m in (module, model):
        m.first.requires_grad_(True)
        m(x).sum().backward()
    assert_same_grads(module, model)


def test_dynamic_shapes(dynamo):
    model = F.Cubic()
    module = loaded(model, (torch.randn(3, 4),), dynamo=dynamo, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    for batch in (1, 3, 7):
        model.zero_grad()
        module.zero_grad()
        assert_step_alike(module, model, (torch.randn(batch, 4),))


def test_training_file():
    model, x = F.Cubic(), torch.randn(3, 4)
    training = exporter.build_gradient_graph(exporter.export(copy.deepcopy(model), (x,)))
    assert_step_alike(exporter.load(training, allow=ALLOW), model, (x,))


def test_batch_norm_statistics_are_torchs(dynamo):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, momentum=0.2), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 2)).train()
    module = loaded(model, (torch.randn(4, 1, 8, 8),), dynamo=dynamo)
    for _ in range(3):
        x = torch.randn(4, 1, 8, 8)
        for m in (module, model):
            m.zero_grad()
            (m(x) ** 2).sum().backward()
    for (name, one), (other, two) in zip(module.named_buffers(), model.named_buffers(), strict=True):
        assert name == other
        assert_close(one, two)
    for (name, one), (_, two) in zip(module.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-4, msg=name)
    assert int(module.state_dict()["1.num_batches_tracked"]) == 3
    with torch.no_grad():  # as in torch, whatever the grad mode
        assert_close(module(x), model(x))
    assert_close(module.eval()(x), model.eval()(x))
    assert_close(module.state_dict()["1.running_var"], model.state_dict()["1.running_var"])


def test_batch_norm_of_no_momentum_averages_all_batches(dynamo, tmp_path):
    """The share of a batch depends on how many there were, which a file must read from the counter and not freeze."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12, momentum=None), nn.BatchNorm2d(12)).train()
    with torch.no_grad():
        model(torch.randn(4, 1, 8, 8))
        model(torch.randn(4, 1, 8, 8))
    module = loaded(model, (torch.randn(4, 1, 8, 8),), dynamo=dynamo, path=tmp_path / "model.onnx")
    assert model[1].momentum is None
    assert int(model[1].num_batches_tracked) == 2
    for step in range(4):
        x = torch.randn(4, 1, 8, 8) * (step + 1) + step
        torch.testing.assert_close(module(x), model(x), rtol=1e-4, atol=1e-4)
        for (name, one), (other, two) in zip(module.named_buffers(), model.named_buffers(), strict=True):
            assert name == other
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5, msg=f"{name} at step {step}")
    assert_close(module.eval()(x), model.eval()(x))


def test_dropout_is_drawn_anew_and_follows_torchs_generator(dynamo):
    model, x = F.Dropping().train(), torch.randn(50, 6)
    module = loaded(model, (x,), dynamo=dynamo)
    torch.manual_seed(7)
    first, second = module(x), module(x)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(first, module(x))
    assert_close(module.eval()(x), model.eval()(x))


def test_dropouts_gradient_uses_the_mask_of_the_forward(dynamo):
    model = nn.Sequential(nn.Dropout(0.25)).train()
    x = torch.ones(200, 100, requires_grad=True)
    module = loaded(model, (x,), dynamo=dynamo)
    y = module(x)
    y.sum().backward()
    assert torch.equal(y.detach(), x.grad)
    kept = (y > 0).float()
    assert abs(kept.mean().item() - 0.75) < 0.01  # 4 sigma of 20000 draws is 0.012
    assert y.max().item() == pytest.approx(1 / 0.75)
    # Neighbours are independent: rows, columns, and the next step.
    for a, b in ((kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1]), (kept, (module(x) > 0).float())):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()) < 0.03


def test_two_dropouts_have_two_masks(dynamo):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x), self.drop(x)

    x = torch.ones(40, 50)
    one, two = loaded(Twice().train(), (x,), dynamo=dynamo)(x)
    assert abs(torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1].item()) < 0.1


def test_a_copy_trains_on_its_own():
    module, x = loaded(F.Cubic(), (torch.randn(3, 4),)), torch.randn(3, 4)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert module(x).abs().sum() > 0
    assert other(x).abs().sum() == 0


@pytest.mark.parametrize("kind", [torch.float64, torch.float16])
def test_other_floats(kind, dynamo):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(kind), torch.randn(3, 4, dtype=kind)
    assert_trains_alike(model, (x,), dynamo=dynamo, tolerance=1e-12 if kind is torch.float64 else 2e-2)


def test_a_foreign_model():
    import numpy as np
    import onnx
    from onnx import TensorProto, helper

    w = np.arange(6, dtype=np.float32).reshape(3, 2)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "layer.w"], ["h"]), helper.make_node("Mul", ["h", "two"], ["y"])],
        "foreign",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [onnx.numpy_helper.from_array(w, "layer.w"), onnx.numpy_helper.from_array(np.float32(2), "two")],
    )
    module = exporter.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    assert {n: p.requires_grad for n, p in module.named_parameters()} == {"layer.w": True}
    x = torch.randn(4, 3)
    y = module(x)
    assert isinstance(y, torch.Tensor)
    assert_close(y, 2 * x @ torch.from_numpy(w))
    y.sum().backward()
    assert_close(module.layer.w.grad, 2 * x.sum(0)[:, None].expand(3, 2))


def test_weights_that_are_listed_as_inputs():
    """As ONNX wanted it before IR 4, for floats and for the integers of a Reshape."""
    model = onnx.parser.parse_model("""
        <ir_version: 3, opset_import: ["" : 13]>
        agraph (float[2, 3] x, float[3] weight, int64[1] shape) => (float[6] y)
            <float[3] weight = {1, 2, 3}, int64[1] shape = {6}>
        { scaled = Mul(x, weight)
          y = Reshape(scaled, shape) }
    """)
    module = exporter.load(model)
    x = torch.randn(2, 3, requires_grad=True)
    y = module(x)
    torch.testing.assert_close(y, (x * torch.tensor([1.0, 2, 3])).reshape(6))
    y.sum().backward()
    torch.testing.assert_close(module.weight.grad, x.detach().sum(0))


@pytest.mark.unusable(reason="onnxruntime has no kernels of bfloat16 on the CPU")
def test_a_type_without_a_kernel_is_a_clear_error():
    model = nn.Sequential(nn.Linear(4, 4)).to(torch.bfloat16)
    with pytest.raises(exporter.RunError, match=r"onnxruntime cannot run the model.*Gemm"):
        loaded(model, (torch.randn(3, 4, dtype=torch.bfloat16),))


OWN_BACKWARDS = {
    "max of equal values": lambda v: v.max(1).values,
    "min, kept dimension": lambda v: torch.min(v, dim=0, keepdim=True)[0],
    "max and its place": lambda v: torch.max(v, -1)[0] * torch.max(v, -1)[1],
    "max of everything": lambda v: v.max() * v,
    "std of equal values": lambda v: v.std(1),
    "std of everything": lambda v: v.std() + v.std(dim=(0, 1), keepdim=True, correction=0),
    "logsigmoid far below 0": lambda v: torch.nn.functional.logsigmoid(v * 100 - 200),
}


@pytest.mark.parametrize("call", OWN_BACKWARDS.values(), ids=OWN_BACKWARDS)
def test_backwards_that_are_not_the_derivative_of_the_translation(call, dynamo):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 5))

        def forward(self, x):
            return call(x * self.weight)

    model, x = Model(), torch.tensor([[1.0, 1, 0, 2, 2], [2, 1, 2, 0, 0], [3, 3, 3, 3, 3]])
    assert_trains_alike(model, (x,), dynamo=dynamo)


def test_hstack(dynamo):
    """With dynamo=True a SequenceMap over a sequence that the graph makes itself."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return torch.hstack((self.first(x), self.second(x).sin()))

    model, x = Model(), torch.randn(2, 3)
    assert_trains_alike(model, (x,), dynamo=dynamo)


@pytest.mark.parametrize("padding", [None, 0, 2, -1])
def test_the_rows_of_padding_idx_learn_nothing(padding, dynamo):
    model, x = nn.Sequential(nn.Embedding(5, 3, padding_idx=padding), nn.Linear(3, 2)), torch.tensor([[0, 1, 1, 2], [4, 2, 0, 3]])
    assert_trains_alike(model, (x,), dynamo=dynamo)


def test_scale_grad_by_freq_is_warned_of():
    with pytest.warns(exporter.PythonopWarning, match=r"scale_grad_by_freq=True.*pass False"):
        exporter.export(nn.Embedding(5, 3, scale_grad_by_freq=True), (torch.tensor([1, 1]),))


@pytest.mark.parametrize(
    "call",
    [lambda w, v: w.T @ v, lambda w, v: w.T.detach() @ v, lambda w, v: (w * torch.ones(2, 1, 1)).transpose(1, 2) @ v],
    ids=["matrix", "stopped", "batch"],
)
def test_a_transposed_parameter_times_a_vector(call, dynamo):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, v):
            return call(self.weight, v) * self.weight.sum()

    model, v = Model(), torch.randn(4)
    assert_trains_alike(model, (v,), dynamo=dynamo)


def test_a_transposed_matrix_times_a_vector_in_a_file_of_another_exporter():
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[4] v) => (float[3] y) <float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}> {t = Transpose<perm=[1,0]>(w) y = MatMul(t, v)}'
    )
    v = torch.randn(4)
    assert_close(exporter.load(model)(v), torch.arange(1.0, 13).reshape(4, 3).T @ v)


@pytest.mark.parametrize("accelerate", [True, False])
def test_images_without_a_column(accelerate):
    """Torch says that they lie at address 0, where onnxruntime's InstanceNormalization looked for them."""
    text = """<ir_version: 10, opset_import: ["" : 20]> m (float[1,2,4,W] x) => (float[1,2,4,W] y) <float[2] weight = {1.0, 2.0}, float[2] bias = {3.0, 4.0}>
        { y = InstanceNormalization (x, weight, bias) }"""
    module = exporter.load(onnx.parser.parse_model(text), accelerate=accelerate)
    for grad in (False, True):
        x = torch.zeros(1, 2, 4, 0, requires_grad=grad)
        with torch.set_grad_enabled(grad):
            y = module(x)
        assert y.shape == (1, 2, 4, 0)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert all(not parameter.grad.any() for parameter in module.parameters())


def test_an_output_that_stands_twice():
    """onnx.checker and onnxruntime take such files: each of the two has a cotangent of its own, and so has an input that is an output."""
    text = '<ir_version: 9, opset_import: ["": 20]> g (float[3] x) => (float[3] y, float[3] y, float[3] x, float[3] w, float[3] y) <float[3] w = {1,2,3}> {y = Mul(x, w)}'
    model = onnx.parser.parse_model(text)
    module = exporter.load(model)
    x = torch.tensor([1.0, -1, 2], requires_grad=True)
    outputs = module(x)
    sum(k * out.sum() for k, out in zip((2, 3, 5, 7, 11), outputs, strict=True)).backward()
    (weight,) = module.parameters()
    assert_close(x.grad, 16 * weight.detach() + 5)
    assert_close(weight.grad, 16 * x.detach() + 7)
    assert [out.name for out in module._onnx.plans.model.graph.outputs] == ["y", "y_2", "x", "w", "y_3"]
    with pytest.raises(exporter.FormatError, match=r"one of its outputs stands twice.*\n  way out: load the file that it was made from"):
        exporter.load(exporter.build_gradient_graph(model))
