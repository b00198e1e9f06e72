"""Execution providers by name."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import exporter
from exporter.runtime import providers
from exporter.runtime.accelerate import accelerator
from exporter.runtime.providers import add_devices, choose, is_cpu_alone, precision_of, said_of
from exporter.verification import trials
from symbolics.errors import ArgumentError, RunError

CPU = "CPUExecutionProvider"


@pytest.mark.parametrize("given", [None, [], ["cpu"], [CPU], [("cpu", {})]], ids=str)
def test_the_cpu(given):
    assert choose(given) == ([CPU], [], ())
    assert is_cpu_alone(given)


def test_options_of_onnxruntimes_own():
    assert choose([("cpu", {"use_arena": "0"})]).providers == [(CPU, {"use_arena": "0"})]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["rocket"], "no execution provider rocket: here are"),
        ("cpu", r"is a list: providers=\['cpu'\]"),
        (("openvino", {"precision": "bfloat16"}), r"is a list: providers=\[\('openvino'"),
        ([3], "lists names, or"),
        ([("cpu", {"precision": "bfloat16"})], "cpu has no choice of precision"),
    ],
    ids=str,
)
def test_what_is_refused(given, words):
    with pytest.raises(ArgumentError, match=words):
        choose(given)


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", None)
    with pytest.raises(RunError, match="qnn needs a package: pip install onnxruntime-qnn"):
        choose(["qnn"])


def test_a_library_that_is_none(monkeypatch, tmp_path):
    (tmp_path / "no.so").write_text("no library")
    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", _module("onnxruntime_qnn", str(tmp_path / "no.so")))
    with pytest.raises(RunError, match="onnxruntime-qnn is installed, but onnxruntime cannot load its library"):
        choose(["qnn"])


def _module(name, library):
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.get_library_path = lambda: library
    return module


@pytest.fixture
def openvino(monkeypatch):
    """A plugin with a GPU and a CPU, as onnxruntime would list them, and whose library was registered how often."""
    devices = [
        SimpleNamespace(ep_name="OpenVINOExecutionProvider", device=SimpleNamespace(type=SimpleNamespace(name=kind), vendor="Intel"))
        for kind in ("GPU", "CPU")
    ]
    registered = []
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_openvino", _module("onnxruntime_ep_openvino", "a library"))
    monkeypatch.setattr(onnxruntime, "register_execution_provider_library", lambda name, path: registered.append((name, path)))
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: devices if registered else [])
    monkeypatch.setattr(providers, "_registered", set())
    return registered


@pytest.mark.parametrize(
    ("options", "hint"), [({}, "f32"), ({"precision": "float32"}, "f32"), ({"precision": "bfloat16"}, "bf16")], ids=str
)
def test_a_plugin_computes_in_float32_unless_asked(openvino, options, hint):
    for _ in range(2):
        found = choose([("openvino", options), "cpu"])
    assert openvino == [("OpenVINOExecutionProvider", "a library")]
    ((devices, given),) = found.devices
    assert found.providers is None
    assert [each.device.type.name for each in devices] == ["CPU"]
    assert json.loads(given["load_config"]) == {"CPU": {"INFERENCE_PRECISION_HINT": hint}}
    assert not is_cpu_alone([("openvino", options)])
    assert accelerator([("openvino", options)]) is None


def test_a_device_of_a_plugin(openvino):
    ((devices, given),) = choose([("openvino", {"device": "gpu", "load_config": "mine.json", "num_streams": 2})]).devices
    assert [each.device.type.name for each in devices] == ["GPU"]
    assert given == {"load_config": "mine.json", "num_streams": "2"}
    with pytest.raises(ArgumentError, match="device=npu: openvino has gpu, cpu on this machine"):
        choose([("openvino", {"device": "npu"})])
    with pytest.raises(ArgumentError, match='precision=float16: openvino has "float32" and "bfloat16"'):
        choose([("openvino", {"precision": "float16"})])


def test_options_get_devices_once(openvino):
    class Options:
        def __init__(self):
            self.added = []

        def add_provider_for_devices(self, devices, options):
            self.added.append(options)

    options = Options()
    for _ in range(2):
        add_devices(options, choose(["openvino"]))
    assert len(options.added) == 1


def test_a_machine_without_a_device(openvino, monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: [SimpleNamespace(ep_name=CPU, device=SimpleNamespace(vendor="AMD"))])
    with pytest.raises(RunError, match="offers no device on this machine \\(it needs a processor of Intel, and this is of AMD\\)"):
        choose(["openvino"])
    offers, idle = providers.installed()
    assert not offers and "no device" in idle["openvino"]
    said = trials.TRIALS["onnxruntime's providers"]()
    assert f"{CPU}; not openvino: onnxruntime-ep-openvino is installed, but" in said


def test_a_plugin_whose_devices_do_not_hang_on_the_processor(openvino, monkeypatch):
    plugin = providers._PLUGINS["webgpu"]
    monkeypatch.setitem(sys.modules, plugin.module, _module(plugin.module, "library"))
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: [SimpleNamespace(ep_name=CPU, device=SimpleNamespace(vendor="AMD"))])
    with pytest.raises(RunError, match="offers no device on this machine: choose another"):
        choose(["webgpu"])


def test_in_words():
    assert said_of(["cpu", ("openvino", {"precision": "bfloat16"})]) == "cpu, openvino (precision=bfloat16)"
    assert [precision_of(each) for each in (None, ["cpu"], [("openvino", {"precision": "float32"})])] == [None] * 3
    assert precision_of([("openvino", {"precision": "bfloat16"})]) == "bfloat16"


def test_everything_that_runs_a_file_takes_them():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    program = exporter.export(model, (x,), dynamo=False)
    session = exporter.inference_session(program, providers=["cpu"])
    np.testing.assert_allclose(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0], model(x).detach(), atol=1e-6)
    loaded = exporter.load(program, providers=["cpu"])
    torch.testing.assert_close(loaded(x), model(x))
    step = exporter.export_training_step(
        model, (x,), loss=nn.functional.mse_loss, targets=(torch.zeros(5, 2),), optimizer="adamw", dynamo=False
    )
    batch = dict(zip((*step.layout.inputs, *step.layout.targets), (x, torch.zeros(5, 2)), strict=True))
    losses = [exporter.Trainer(step, providers=given).step(batch) for given in (None, ["cpu"])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for open_it in (exporter.inference_session, exporter.load, exporter.Trainer):
        with pytest.raises(ArgumentError, match="no execution provider rocket"):
            open_it(step if open_it is exporter.Trainer else program, providers=["rocket"])


def test_of_a_list_onnxruntimes_own_names_that_it_lacks_are_left_out():
    with pytest.warns(exporter.PythonopWarning, match="this onnxruntime has no CUDAExecutionProvider"):
        assert choose(["CUDAExecutionProvider", CPU]) == ([CPU], [], ())
    with pytest.raises(ArgumentError, match="no execution provider cuda"):
        choose(["CUDAExecutionProvider"])
    with pytest.raises(ArgumentError, match="no execution provider cuda"):
        choose(["cuda", "cpu"])


@pytest.mark.parametrize("option", ["device", "precision"])
def test_an_option_of_any_type_is_an_error_of_ours(openvino, option):
    with pytest.raises(ArgumentError, match=f"{option}=3: openvino has"):
        choose([("openvino", {option: 3})])
