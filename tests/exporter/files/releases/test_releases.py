"""Files that older releases wrote open, run and train as eager mode does today."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import exporter
from tests.exporter.files.releases import make
from tests.exporter.files.releases.functions import Model, Quantised, Sorted, batch

RELEASES = sorted(path for path in Path(__file__).parent.iterdir() if path.is_dir() and path.name[0].isdigit())
ALLOW = ["tests.exporter.files.releases.functions:*"]
#: What files of today have that those of a release do not: the release stops at them with an error. docs/format.md names it.
NEWER: dict[tuple[str, str], set[tuple]] = {}


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def folder(request):
    return request.param


def close(ours, theirs):
    torch.testing.assert_close(torch.as_tensor(np.asarray(ours)), theirs.detach(), rtol=1e-5, atol=1e-6)


def having(name):
    """The releases with a file; every one since the first that wrote it."""
    found = [path for path in RELEASES if (path / name).exists()]
    assert found == RELEASES[RELEASES.index(found[0]) :], f"a release after {found[0].name} has no {name}"
    return pytest.mark.parametrize("path", [folder / name for folder in found], ids=[folder.name for folder in found])


def test_there_are_files_of_every_release():
    """Those of this version, too: `python -m tests.exporter.files.releases.make` makes them once, when the version is set."""
    assert [path.name for path in RELEASES] == ["0.1.0", "0.2.0"]
    assert RELEASES[-1].name == exporter.__version__


@pytest.mark.parametrize("name", ["forward-dynamo", "forward-torchscript"])
def test_a_forward_file_runs_and_trains(folder, name):
    (x, target), model = batch(), Model()
    path = folder / f"{name}.onnx"
    (ours,) = exporter.inference_session(path, ALLOW).run(None, {"x": x.numpy()})
    close(ours, model(x))
    loaded = exporter.load(path, allow=ALLOW)
    for each in (loaded, model):
        torch.nn.functional.mse_loss(each(x[:3]), target[:3]).backward()
    theirs = dict(model.named_parameters())
    assert {key for key, _ in loaded.named_parameters()} == set(theirs)
    for key, parameter in loaded.named_parameters():
        close(parameter.grad, theirs[key].grad)


def test_a_gradient_of_first_and_of_second_order(folder):
    x, g = batch()
    x = x.requires_grad_()
    y = Model()(x)
    (first,) = torch.autograd.grad(y, x, g, create_graph=True)
    (second,) = torch.autograd.grad(first, x, torch.ones_like(first))
    session = exporter.inference_session(folder / "gradient.onnx", ALLOW)
    feeds = {"x": x.detach().numpy(), session.get_inputs()[1].name: g.numpy()}
    ours = session.run(None, feeds)
    close(ours[0], y)
    close(ours[1], first)
    session = exporter.inference_session(folder / "second.onnx", ALLOW)
    ours = session.run(None, {**feeds, session.get_inputs()[2].name: np.ones_like(ours[1])})
    close(ours[1], first)
    close(ours[2], second)


def test_a_portable_file_runs_without_python(folder):
    x, _ = batch()
    session = onnxruntime.InferenceSession(folder / "portable.onnx", providers=["CPUExecutionProvider"])
    close(session.run(None, {"x": x.numpy()})[0], Model()(x))


def test_a_training_step(folder):
    (x, target), model = batch(), Model()
    trainer = exporter.Trainer.load(folder / "step.onnx", allow=ALLOW)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        assert trainer.step({"x": x, "target": target}) == pytest.approx(loss.item(), rel=1e-5)


@having("portable-step.onnx")
def test_a_portable_step_trains_without_python(path):
    """On plain onnxruntime, in a loop of one's own."""
    (x, target), model = batch(), Model()
    initial = onnxruntime.InferenceSession(path.with_suffix(".init.onnx"), providers=["CPUExecutionProvider"])
    state = dict(zip([output.name for output in initial.get_outputs()], initial.run(None, {}), strict=True))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        told = dict(zip(names, session.run(names, {**state, "x": x.numpy(), "target": target.numpy()}), strict=True))
        assert told["loss"] == pytest.approx(loss.item(), rel=1e-5)
        state.update({name.removesuffix(".next"): value for name, value in told.items() if name.endswith(".next")})


@having("opaque.onnx")
def test_an_opaque_module_runs_and_trains(path):
    (x, target), model = batch(), Sorted()
    (ours,) = exporter.inference_session(path, ALLOW).run(None, {"x": x.numpy()})
    close(ours, model(x))
    loaded = exporter.load(path, allow=ALLOW)
    for each in (loaded, model):
        torch.nn.functional.mse_loss(each(x), target).backward()
    theirs = dict(model.named_parameters())
    assert {key for key, _ in loaded.named_parameters()} == set(theirs)
    for key, parameter in loaded.named_parameters():
        close(parameter.grad, theirs[key].grad)


@having("quantised.onnx")
def test_a_file_in_integers_gives_the_levels_of_the_fake_quantised_model(path):
    """But for a level at a tie, which floats decide otherwise."""
    x, _ = batch()
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ours = session.run(None, {"x": x.numpy()})[0]
    levels = np.rint((ours - Quantised()(x).detach().numpy()) / 0.02)
    assert np.abs(levels).max() <= 1
    assert np.count_nonzero(levels) <= 1
    weights = [value for value in onnx.load(path).graph.initializer if len(value.dims) == 2]
    assert [value.data_type for value in weights] == [onnx.TensorProto.INT8] * 2


def words(path):
    """What a reader has to know: operators of ours with their attributes and the keys of their calls, keys of the metadata's objects."""
    proto = onnx.load(path)
    found = set()
    for node in (*proto.graph.node, *(node for function in proto.functions for node in function.node)):
        if "ython" in node.op_type:
            found |= {(node.domain, node.op_type, attribute.name) for attribute in node.attribute}
            found |= {("call", key) for attribute in node.attribute if attribute.name == "call" for key in json.loads(attribute.s)}
    found |= {("opset", entry.domain, entry.version) for entry in proto.opset_import}
    state = json.loads(next(entry.value for entry in proto.metadata_props if entry.key == "pythonop.state"))
    return found | {("state", key) for entry in state.values() for key in entry}


@pytest.fixture(scope="module")
def today(tmp_path_factory):
    """The files as this version writes them."""
    folder = tmp_path_factory.mktemp("made") / "today"
    make.main(folder)
    return folder


def test_a_file_of_today_asks_a_reader_for_nothing_new(folder, today):
    """So the release before opens it. What this finds belongs into docs/format.md, and where old readers would misread it, into a new version."""
    for old in sorted(folder.glob("*.onnx")):
        if ".init" in old.name:
            continue
        assert words(today / old.name) - words(old) - NEWER.get((folder.name, old.name), set()) == set(), old.name


def newer(proto, kind):
    """A file as a later release might write it."""
    (node,) = (node for node in proto.graph.node if node.op_type == "PythonOp")
    (call,) = (attribute for attribute in node.attribute if attribute.name == "call")
    if kind == "operator":
        node.domain, node.op_type = "pythonop", "Later"
        proto.opset_import.append(onnx.helper.make_opsetid("pythonop", 1))
    elif kind == "format":
        next(entry for entry in proto.metadata_props if entry.key == "pythonop.version").value = "2"
    elif kind == "state":
        entry = next(entry for entry in proto.metadata_props if entry.key == "pythonop.state")
        entry.value = entry.value.replace('"persistent":true', '"persistent":true,"later":1', 1)
    elif kind == "metadata":
        proto.metadata_props.add(key="pythonop.later", value="{}")
    elif kind == "attribute":
        node.attribute.append(onnx.helper.make_attribute("later", 1))
    else:
        text = {"call": ('"version":1', '"version":2'), "key": ('"version":1', '"version":1,"later":1'), "type": ("0.5", '{"$later":1}')}
        assert text[kind][0].encode() in call.s
        call.s = call.s.replace(*(part.encode() for part in text[kind]))
    return proto


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("format", "the file has pythonop format 2, this release reads up to 1: install a newer pythonop"),
        ("call", "its call has format 2, this release reads up to 1: install a newer pythonop"),
        ("key", "this release does not know its key 'later': install a newer pythonop"),
        ("state", "this release does not know its key 'later': install a newer pythonop"),
        ("type", "a call holds a value of the unknown type '.later': it needs a newer pythonop"),
        ("operator", "This release of pythonop has no such operator: install a newer one"),
    ],
)
def test_a_file_that_is_too_new_is_refused_by_what_is_new(kind, says):
    """As docs/format.md has it."""
    proto = newer(onnx.load(RELEASES[-1] / "forward-torchscript.onnx"), kind)
    with pytest.raises(exporter.RunError if kind == "operator" else exporter.FormatError, match=says):
        exporter.load(proto, allow=ALLOW)
    assert says.replace("later", "x").replace("'.", "'$") in (Path(__file__).parents[4] / "docs" / "format.md").read_text()


@pytest.mark.parametrize("kind", ["metadata", "attribute"])
def test_what_a_newer_release_adds_beside_is_skipped(kind):
    x, _ = batch()
    proto = newer(onnx.load(RELEASES[-1] / "forward-torchscript.onnx"), kind)
    (ours,) = exporter.inference_session(proto, ALLOW).run(None, {"x": x.numpy()})
    close(ours, Model()(x))
    if kind == "attribute":
        with pytest.raises(exporter.FormatError, match="Unrecognized attribute: later"):
            exporter.build_gradient_graph(proto)
    else:
        exporter.build_gradient_graph(proto)
