"""What a loaded file refuses, and how it says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter
from tests.exporter.module import functions as F
from tests.trains import ALLOW, loaded


@pytest.fixture(scope="module")
def module():
    return loaded(F.Structured(), (torch.randn(2, 4), torch.randn(2, 4), torch.arange(4)))


@pytest.fixture(scope="module")
def saved():
    return exporter.export(F.Cubic(), (torch.randn(3, 4),))


@pytest.fixture
def file(saved, tmp_path):
    path = tmp_path / "model.onnx"
    saved.save(path)
    return path


X, IDS = torch.randn(2, 4), torch.arange(4)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((X,), {}, TypeError, "y, ids are missing"),
        ((X, X, IDS, X), {}, TypeError, "takes 3 tensors"),
        ((X, X), {"id": IDS}, TypeError, "no input 'id'; its inputs are x, y, ids"),
        ((X, X, IDS), {"y": X}, TypeError, "'y' is given twice"),
        ((X, 2.0, IDS), {}, TypeError, "'y' is of type float"),
        ((X, X.double(), IDS), {}, exporter.RunError, "'y' is torch.float64, the model takes torch.float32"),
        ((X, X, IDS.float()), {}, exporter.RunError, "'ids' is torch.float32"),
        ((X, X[:1], IDS), {}, exporter.RunError, r"'y' has the shape \[1, 4\], the model takes \[2, 4\]"),
        ((X, X[0], IDS), {}, exporter.RunError, r"'y' has the shape \[4\]"),
    ],
)
def test_arguments(module, args, kwargs, error, message):
    with pytest.raises(error, match=message):
        module(*args, **kwargs)


def test_sizes_that_must_agree():
    class Sum(nn.Module):
        def forward(self, x, y):
            return x * y

    batch = torch.export.Dim("batch")
    module = loaded(Sum(), (torch.randn(2, 4), torch.randn(2, 4)), dynamic_shapes=({0: batch}, {0: batch}))
    assert module(torch.randn(3, 4), torch.randn(3, 4)).shape == (3, 4)
    with pytest.raises(exporter.RunError, match="'x' has 3 batch, 'y' has 5: the file has one size 'batch' for both"):
        module(torch.randn(3, 4), torch.randn(5, 4))


def test_parameters_of_another_type():
    module = loaded(F.Cubic(), (torch.randn(3, 4),)).double()
    with pytest.raises(exporter.RunError, match=r"'first\.weight' is now torch\.float64"):
        module(torch.randn(3, 4))


def test_a_class_that_is_not_allowed(file):
    with pytest.raises(exporter.TrustError, match=r"tests\.zoo\.functions:Cube.*allow="):
        exporter.load(file)


def test_a_class_that_is_missing(file):
    import onnx

    model = onnx.load(file)
    (node,) = [n for n in model.graph.node if n.op_type == "PythonOp"]
    (name,) = [a for a in node.attribute if a.name == "name"]
    name.s = b"tests.exporter.module.functions:Gone"
    with pytest.raises(exporter.TrustError, match="has no Gone"):
        exporter.load(model, allow=ALLOW)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 0.999])
def test_a_truncated_file(file, share):
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises((exporter.FormatError, exporter.RunError)):
        exporter.load(file, allow=ALLOW)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no.onnx"):
        exporter.load(tmp_path / "no.onnx")


def test_missing_and_truncated_external_data(tmp_path):
    path = tmp_path / "model.onnx"
    exporter.export(F.Cubic(64), (torch.randn(3, 64),)).save(path, external_data=True)
    (data,) = tmp_path.glob("model.onnx.*.data")
    assert exporter.load(path, allow=ALLOW)(torch.randn(3, 64)).shape == (3, 64)
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(exporter.FormatError, match="cut off"):
        exporter.load(path, allow=ALLOW)
    data.unlink()
    with pytest.raises(exporter.FormatError, match="not there"):
        exporter.load(path, allow=ALLOW)


def test_external_data_outside_the_folder(tmp_path):
    """A file from somewhere else must not read what lies beside its folder."""
    import onnx

    (tmp_path / "inside").mkdir()
    path = tmp_path / "inside" / "model.onnx"
    exporter.export(F.Cubic(64), (torch.randn(3, 64),)).save(path, external_data=True)
    secret = tmp_path / "secret"
    secret.write_bytes(next(path.parent.glob("model.onnx.*.data")).read_bytes())
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../secret"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(exporter.FormatError, match="secret"):
        exporter.load(path, allow=ALLOW)


@pytest.mark.parametrize("name", ["call", "output_tensor_types", "input_convention"])
def test_a_tampered_call(file, name):
    """What a PythonOp says of itself is checked before it runs: damaged, it is an error and no wrong result."""
    import onnx

    model = onnx.load(file)
    (node,) = [n for n in model.graph.node if n.op_type == "PythonOp"]
    (attribute,) = [a for a in node.attribute if a.name == name]
    if attribute.s:
        attribute.s = attribute.s[: len(attribute.s) // 2] + b"?"
    else:
        del attribute.ints[:]
    with pytest.raises(exporter.PythonopError, match="Cube|PythonOp|call"):
        exporter.load(model, allow=ALLOW)(torch.randn(3, 4))


def test_an_initializer_that_lost_bytes(file):
    import onnx

    model = onnx.load(file)
    (weight,) = [t for t in model.graph.initializer if t.name == "first.weight"]
    weight.raw_data = weight.raw_data[:-4]
    with pytest.raises(exporter.FormatError, match=r"first\.weight"):
        exporter.load(model, allow=ALLOW)


@pytest.mark.slow
def test_flipped_bits_are_errors_or_harmless(file):
    """A hundred tampered files: each opens, or says that it is damaged; none ends the process or raises something else."""
    data = file.read_bytes()
    x = torch.randn(3, 4)
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for place in torch.randint(0, len(data), (100,), generator=generator).tolist():
        file.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        try:
            exporter.load(file, allow=ALLOW)(x)
        except (exporter.PythonopError, TypeError):
            refused += 1
    assert refused > 10


def test_metadata_that_names_what_is_not_there(file):
    import onnx

    model = onnx.load(file)
    (entry,) = [e for e in model.metadata_props if e.key == "pythonop.state"]
    entry.value = entry.value.replace('"first.weight","kind"', '"gone","kind"')
    with pytest.raises(exporter.FormatError, match="gone"):
        exporter.load(model, allow=ALLOW)


@pytest.mark.parametrize(("text", "message"), [("[", "not JSON"), ('{"a": 1}', "not a list"), ('["first.weight"]', "num_batches_tracked")])
def test_damaged_metadata_of_statistics(file, text, message):
    import onnx

    model = onnx.load(file)
    model.metadata_props.add(key="pythonop.cumulative", value=text)
    with pytest.raises(exporter.FormatError, match=message):
        exporter.load(model, allow=ALLOW)


def test_a_lost_stop_gradient_mark(tmp_path):
    class Stops(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            return y + (y * 2).detach()

    program = exporter.export(Stops(), (torch.randn(3, 4),))
    program.model.metadata_props["pythonop.stop_gradients"] = "5"
    with pytest.raises(exporter.FormatError, match="stop-gradient"):
        exporter.load(program)(torch.randn(3, 4))


def test_an_operator_without_a_gradient_is_named_when_a_gradient_is_needed():
    import numpy as np
    import onnx
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["h"]), helper.make_node("Inverse", ["h"], ["y"], domain="com.microsoft", name="the_inverse")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 2])],
        [onnx.numpy_helper.from_array(np.ones((2, 2), np.float32), "w")],
    )
    module = exporter.load(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)], ir_version=9)
    )
    x = torch.eye(2) + 0.1 * torch.randn(2, 2)
    with torch.no_grad():
        torch.testing.assert_close(module(x), torch.linalg.inv(x))
    for mode in (True, False):  # as in eager, the forward runs
        y = module.train(mode)(x)
        torch.testing.assert_close(y, torch.linalg.inv(x))
        for _ in range(2):
            with pytest.raises(exporter.UnsupportedOperatorError, match="the_inverse"):
                y.sum().backward()
    with pytest.raises(exporter.UnsupportedOperatorError, match="the_inverse"):
        torch.func.grad(lambda x: module(x).sum())(x)
    torch.testing.assert_close(torch.func.vmap(module)(x[None]), torch.linalg.inv(x)[None])


def test_no_path_to_any_parameter():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).argmax(-1)

    y = loaded(Counts(), (torch.randn(3, 4),))(torch.randn(3, 4))
    assert not y.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        y.sum().backward()


def test_an_exception_of_a_function_comes_out_as_it_was():
    class Fails(nn.Module):
        def forward(self, x):
            return F.Picky.apply(x)

    module = loaded(Fails(), (torch.ones(3),))
    with pytest.raises(ValueError, match="picky"):
        module(torch.full((3,), -200.0, requires_grad=True))
    y = module(torch.ones(3, requires_grad=True))
    with pytest.raises(ValueError, match="picky backward"):
        y.backward(torch.full((3,), -200.0))


# --------------------------------------------------------------------------------- what a hostile file calls its parameters


def _small(state=None, weights=("w",), kind=1, output=1, more=()):
    """y = Identity(x), beside some initializers and the metadata that is given."""
    import json

    import onnx
    from onnx import helper as oh

    inits = [w if isinstance(w, onnx.TensorProto) else oh.make_tensor(w, kind, [2], [1, 2]) for w in weights]
    x, y = (oh.make_tensor_value_info(name, output, [2]) for name in "xy")
    model = oh.make_model(
        oh.make_graph([oh.make_node("Identity", ["x"], ["y"])], "g", [x], [y], inits), opset_imports=[oh.make_opsetid("", 18)], ir_version=9
    )
    entries = {} if state is None else {"pythonop.state": json.dumps(state)}
    oh.set_model_props(model, {"pythonop.version": "1", **entries, **dict(more)})
    return model


def _entry(initializer="w", kind="parameter", trainable=True):
    return {"initializer": initializer, "kind": kind, "trainable": trainable, "persistent": True}


@pytest.mark.parametrize(
    "name",
    ["", ".", "a.", ".a", "a..b", "." * 10_000, ".".join("a" * 3000), "forward", "training", "flat", "_onnx", "_parameters", "_modules", "__class__", "__dict__",
     "T_destination", "forward.weight", "_buffers.weight", "a.training", "a.forward.b", "named_parameters", "a.__init__.b"],
    ids=lambda name: name[:20],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["parameter", "buffer", "foreign"])
def test_names_that_no_module_can_have(name, kind):
    if kind == "foreign" and not name:
        name = "."  # ONNX has no such initializer
    model = _small(weights=[name]) if kind == "foreign" else _small({name: _entry(kind=kind, trainable=kind == "parameter")})
    with pytest.raises(exporter.FormatError, match="cannot be one of a torch.nn.Module|dots|damaged") as caught:
        exporter.load(model)
    assert len(str(caught.value)) < 500


def test_names_that_fall_together():
    state = {"a": _entry("u"), "a.b": _entry("v"), "c": _entry("w")}
    module = exporter.load(_small(state, "uvw"))
    assert sorted(dict(module.named_parameters())) == ["a", "a_b", "c"]
    with pytest.raises(exporter.FormatError, match="'a_b' is an attribute that it has already"):
        exporter.load(_small({**state, "a_b": _entry("w")}, "uvw"))


def test_a_tensor_that_is_parameter_and_buffer_stays_a_parameter():
    module = exporter.load(_small({"first": _entry(kind="buffer", trainable=False), "second": _entry()}))
    assert list(dict(module.named_parameters())) == ["second"]
    assert module.first is module.second
    with pytest.raises(exporter.FormatError, match="'second' is trainable under one of its names and frozen under another"):
        exporter.load(_small({"first": _entry(), "second": _entry(trainable=False)}))


@pytest.mark.parametrize("kind", [7, 9])
def test_a_trainable_parameter_of_integers(kind):
    with pytest.raises(exporter.FormatError, match="initializer 'w' is damaged: Only Tensors of floating point"):
        exporter.load(_small({"weight": _entry()}, kind=kind))


@pytest.mark.parametrize("kind", [8, 22, 23])
def test_element_types_that_torch_has_not(kind):
    import onnx

    weight = onnx.TensorProto(name="w", data_type=kind, dims=[2], raw_data=b"" if kind == 8 else b"\x21")
    weight.string_data.extend([b"a", b"b"] if kind == 8 else [])
    if kind == 8:
        weight.ClearField("raw_data")
    with pytest.raises(exporter.FormatError, match="initializer 'w' is damaged"):
        exporter.load(_small({"weight": _entry(kind="buffer", trainable=False)}, [weight]))
    with pytest.raises(exporter.FormatError, match="'x' is of type .*torch has no tensors of that"):
        exporter.load(_small({}, output=kind))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("gradients", {"inputs": {"y": "z"}, "outputs": {}, "unreached": []}, "input 'z', which the graph lacks"),
        ("gradients", {"inputs": {}, "outputs": {"w": "z"}, "unreached": []}, "output 'z', which the graph lacks"),
        ("gradients", {"inputs": {"y": "x"}, "outputs": {}, "unreached": []}, "does not part the graph"),
        ("gradients", {"inputs": {}, "outputs": {"w": "y"}, "unreached": []}, "without an output of its own"),
        ("cumulative", ["gone"], "'gone', which is no parameter or buffer"),
    ],
)
def test_metadata_of_values_that_are_not_there(key, value, message):
    import json

    with pytest.raises(exporter.FormatError, match=message):
        exporter.load(_small({"w": _entry()}, more={f"pythonop.{key}": json.dumps(value)}.items()))


@pytest.mark.parametrize("kind", [1, 9])
def test_a_count_of_batches_that_counts_nothing(kind):
    state = {"n.running_mean": _entry("u", "buffer", False), "n.num_batches_tracked": _entry("v", "buffer", False)}
    with pytest.raises(exporter.FormatError, match="'v' counts batches, and is"):
        exporter.load(_small(state, "uv", kind=kind))


def test_a_gradient_of_another_shape():
    """The pairing says that a gradient of one shape belongs to a parameter of another."""
    import onnx.parser
    from onnx import helper as oh

    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18]> m (float[2] x, float[2] g) => (float[2] y, float[1] d) <float[2] w = {1.0, 2.0}, int64[1] z = {0}>
        { y = Mul(x, w) d = Gather(g, z) }"""
    )
    oh.set_model_props(model, {"pythonop.gradients": '{"inputs":{"y":"g"},"outputs":{"w":"d"},"unreached":[]}'})
    module = exporter.load(model)
    with pytest.raises(exporter.FormatError, match=r"gradient of 'w' has the shape \[1\], not \[2\]"):
        module(torch.ones(2)).sum().backward()


def test_text_that_is_no_text():
    """A string of the file that is no UTF-8: gradients need the model as a message once more."""
    model = exporter.load(_small({"w": _entry()}))
    model._onnx.plans.model.producer_version = b"\xb1"  # as protobuf's Python leaves it
    with pytest.raises(exporter.FormatError, match="cannot be written as ONNX"):
        model(torch.ones(2))


@pytest.mark.parametrize(
    "call",
    [
        lambda module, args: exporter.export(module, args),
        lambda module, args: exporter.export(module, args, dynamo=False),
        lambda module, args: exporter.verify(module, args),
        lambda module, args: exporter.export_training_step(module, args, loss=lambda out: out[0].sum()),
    ],
)
def test_it_is_not_exported_again(module, call):
    """With one message, which no search for ways out follows: none can work."""
    with pytest.raises(exporter.ArgumentError, match=r"the model is a loaded file.*\n  way out: save\(path\)") as error:
        call(module, (X, X, IDS))
    assert len(str(error.value).splitlines()) == 2
