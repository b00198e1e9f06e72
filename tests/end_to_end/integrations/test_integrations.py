"""Other libraries around loaded files: the programs of examples/integrations, the blocks of docs/integrations.md, and what they leave out.

The packages are optional: where one is not installed, its tests are xfails that name it.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch

import exporter
from examples.integrations import net
from exporter.files.inspect import inspect_file
from tests.end_to_end.integrations.page import PAGE, SECTIONS, blocks
from tests.processes import ROOT, Forks, python
from tests.support import missing
from tests.trains import assert_close

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

#: A folder with optimum-onnx and the transformers that it asks for, which are not those of the environment.
OPTIMUM = "PYTHONOP_OPTIMUM_DIR"


def need(package: str) -> dict[str, str]:
    """What a process needs that uses a package; leaves the test where it is not installed."""
    if package == "optimum":
        folder = os.environ.get(OPTIMUM, "")
        if not Path(folder, "optimum").is_dir():
            missing("integrations", f"optimum-onnx is not installed in {OPTIMUM}: make test-integrations")
        return {"PYTHONPATH": os.pathsep.join((str(ROOT), folder))}
    if importlib.util.find_spec(package) is None:
        missing("integrations", f"{package} is not installed: make test-integrations")
    return {}


@pytest.fixture
def run(_forks: Forks) -> Callable[..., str]:
    """What a module prints that runs as ``__main__``, in a process of its own."""

    def run(module: str, package: str, *arguments: str) -> str:
        more = need(package)
        if more:  # another transformers: a process that has imported nothing
            done = python("-m", module, *arguments, **more)
        else:
            with _forks.instead_of(module):
                done = subprocess.run([sys.executable, "-m", module, *arguments], check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


def number(pattern: str, text: str) -> float:
    """The number behind a text."""
    found = re.search(pattern + r" ?(-?[\d.]+(?:e[-+]\d+)?)%?", text)
    assert found is not None, (pattern, text)
    return float(found[1])


def assert_learned_as_eager(text: str, most: float = 0.75) -> None:
    """A loss that falls, and the losses of eager PyTorch at each step."""
    first, last = number("loss", text), number("->", text)
    assert math.isfinite(last) and last < most * first, text
    assert number("largest gap", text) <= 1e-5, text


# ---------------------------------------------------------------------------------------------------------- examples


@pytest.mark.parametrize(("example", "package"), [("accelerate_loop", "accelerate"), ("lightning_fit", "pytorch_lightning")])
def test_a_loop_trains_a_file_as_eager(example, package, run):
    assert_learned_as_eager(run(f"examples.integrations.{example}", package))


def test_the_trainer_of_transformers(run):
    said = run("examples.integrations.hf_trainer", "accelerate")
    assert_learned_as_eager(said)
    assert number("; ", said) >= 80
    assert number(";", said) == number("and", said)


def test_lora_on_a_file_without_pytorch_code(run):
    said = run("examples.integrations.lora", "peft")
    assert_learned_as_eager(said, most=0.25)
    assert "172 of 364 parameters" in said
    assert number("largest difference", said) <= 1e-4


def test_safetensors(run):
    said = run("examples.integrations.safetensors_state", "safetensors")
    assert number("largest difference", said) <= 1e-6
    assert said.count("equal to the bit: True") == 2
    assert number("from loss", said) > number(r"from loss [\d.]+ to", said)


def test_tensorboard(run, tmp_path):
    said = run("examples.integrations.tensorboard_run", "tensorboard", str(tmp_path / "runs"))
    assert "20 losses" in said and "8 histograms" in said
    assert number("from", said) > 2 * number("to", said)
    assert "PythonOp" in said


def test_torch_onnx_export(run):
    said = run("examples.integrations.torch_onnx_export", "torch")
    for exported in ("dynamo=True", "dynamo=False"):
        line = next(line for line in said.splitlines() if exported in line)
        assert number("outputs differ by", line) <= 1e-6
        assert number("gradients by", line) <= 1e-4


def test_optimum(run):
    said = run("examples.integrations.optimum_export", "optimum")
    assert number("logits differ by", said) <= 1e-6
    assert number("gradients of", said) == 25
    assert number("parameters by", said) <= 1e-6


# -------------------------------------------------------------------------------------------------------------- page


def test_the_page_and_the_examples_are_each_others():
    assert list(blocks()) == list(SECTIONS)
    assert all(blocks().values())
    programs = {path.name for path in (ROOT / "examples" / "integrations").glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"\]\(\.\./examples/integrations/(\w+\.py)\)", PAGE)) == programs
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["integrations"]
    installed = {re.match(r"[\w-]+", one)[0].replace("-", "_") for one in extra}
    assert set(SECTIONS.values()) - {"optimum", "torch", "safetensors"} <= installed  # in a folder of its own; of pythonop; of PEFT


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    done = python("-m", "tests.end_to_end.integrations.page", "prepare", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("section", SECTIONS)
def test_a_block_of_the_page_runs(section, run, prepared, tmp_path):
    need(SECTIONS[section])
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    run("tests.end_to_end.integrations.page", SECTIONS[section], section, str(tmp_path))
    if "tuned.onnx" in blocks()[section]:
        assert inspect_file(tmp_path / "tuned.onnx").parameters == 4


# ----------------------------------------------------------------------------------------------------- what is beside


def foreign(names: tuple[str, str, str] = ("encoder.weight", "encoder.bias", "head.weight")) -> onnx.ModelProto:
    """The example's file, its weights renamed."""
    from examples.integrations import lora

    model, to = lora.foreign(), dict(zip(("encoder.weight", "encoder.bias", "head.weight"), names, strict=True))
    for initializer in model.graph.initializer:
        initializer.name = to[initializer.name]
    for node in model.graph.node:
        node.input[:] = [to.get(name, name) for name in node.input]
    return model


def adapted(module, names):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    found = get_peft_model(module, LoraConfig(r=2, target_parameters=names))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return found


@pytest.fixture
def _peft():
    need("peft")


@pytest.mark.usefixtures("_peft")
@pytest.mark.parametrize(
    "names", [("onnx::MatMul_20", "bias", "onnx::MatMul_21"), ("a/w:0", "a/b:0", "b/w:0"), ("a.b.w", "a.b.v", "a.c.w")]
)
def test_adapters_of_weights_by_any_name(names, tmp_path):
    """Outputs and the adapters' gradients, beside the same matrices by hand."""
    module = exporter.load(foreign(names))
    found = adapted(torch.nn.Sequential(module), [f"0.{names[0]}", f"0.{names[2]}"])
    pairs = {name: value for name, value in found.named_parameters() if "lora" in name}
    assert len(pairs) == 4 and {value.requires_grad for value in pairs.values()} == {True}
    x, y = net.points()

    def by_hand():
        """Alpha 8 over rank 2 times B A, for each matrix."""
        state = exporter.load(foreign(names)).state_dict()
        shapes = {tuple(value.shape): name for name, value in pairs.items()}
        first = state[names[0]] + 4 * pairs[shapes[16, 2]] @ pairs[shapes[2, 8]]
        second = state[names[2]] + 4 * pairs[shapes[3, 2]] @ pairs[shapes[2, 16]]
        return torch.relu(x @ first.T + state[names[1]]) @ second.T

    gradients = []
    for logits in (found(x), by_hand()):
        gradients.append((logits.detach(), *torch.autograd.grad(torch.nn.functional.cross_entropy(logits, y), list(pairs.values()))))
    for one, two in zip(*gradients, strict=True):
        assert_close(one, two)
    assert all(value.abs().max() > 0 for value in gradients[0])
    assert (gradients[0][0] - exporter.load(foreign(names))(x)).abs().max() > 0.1
    found.merge_and_unload()[0].save(tmp_path / "tuned.onnx")
    assert_close(exporter.load(tmp_path / "tuned.onnx")(x).detach(), gradients[0][0])


@pytest.mark.usefixtures("_peft")
def test_adapters_are_saved_and_put_around_the_file_again(tmp_path):
    from peft import PeftModel

    x, names = net.points()[0], ["encoder.weight", "head.weight"]
    found = adapted(exporter.load(foreign()), names)
    found.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(exporter.load(foreign()), str(tmp_path / "adapter"))
    assert_close(again(x).detach(), found(x).detach())
    with again.disable_adapter():
        assert_close(again(x).detach(), exporter.load(foreign())(x).detach())
    assert not torch.equal(again(x), exporter.load(foreign())(x))


def test_accelerates_mixed_precision_leaves_a_file_in_its_types(tmp_path):
    need("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    net.save(tmp_path / "model.onnx")
    x, y = net.points()
    model, module = net.Net(), exporter.load(tmp_path / "model.onnx", allow=[net.Softsign])
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    try:
        prepared = accelerator.prepare(module)
        accelerator.backward(torch.nn.functional.cross_entropy(prepared(x), y))
        torch.nn.functional.cross_entropy(model(x), y).backward()
        for one, two in zip(prepared.parameters(), model.parameters(), strict=True):
            assert_close(one.grad, two.grad)
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=False).save(tmp_path / "tuned.onnx")
    finally:
        AcceleratorState._reset_state(True)
    assert torch.equal(exporter.load(tmp_path / "tuned.onnx", allow=[net.Softsign])(x), module(x))


def test_trainer_of_a_file_without_labels(tmp_path):
    """compute_loss_func and label_names, as for a model of one's own."""
    need("accelerate")
    from transformers import Trainer, TrainingArguments

    class Dict(net.Net):
        def forward(self, x):
            return {"logits": super().forward(x)}

    x, y = net.points()
    exporter.export(Dict(), (x,), dynamic_shapes={"x": {0: "batch"}}).save(tmp_path / "model.onnx")
    rows = [{"x": one, "labels": label} for one, label in zip(x, y, strict=True)]
    logs = []
    for model in (Dict(), exporter.load(tmp_path / "model.onnx", allow=[net.Softsign])):
        options = TrainingArguments(
            str(tmp_path / "out"), use_cpu=True, report_to=[], disable_tqdm=True, num_train_epochs=2, per_device_train_batch_size=16,
            logging_steps=1, save_strategy="no", eval_strategy="epoch", label_names=["labels"],
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=options, train_dataset=rows, eval_dataset=rows,
            compute_loss_func=lambda out, labels, num_items_in_batch=None: torch.nn.functional.cross_entropy(out["logits"], labels),
        )  # fmt: skip
        trainer.train()
        logs.append([entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history[:-1]])
    assert len(logs[0]) == 10 and None not in logs[0]
    assert logs[0] == pytest.approx(logs[1], abs=1e-5)


@pytest.mark.usefixtures("_peft")
def test_adapters_in_the_trainer(tmp_path):
    """All three at once, beside the same around eager's model."""
    need("accelerate")
    from transformers import Trainer, TrainingArguments

    net.save(tmp_path / "model.onnx", labels=True)
    rows = [{"x": one, "labels": label} for one, label in zip(*net.points(), strict=True)]
    logs = []
    for model in (net.Net(), exporter.load(tmp_path / "model.onnx", allow=[net.Softsign])):
        options = TrainingArguments(
            str(tmp_path / "out"), use_cpu=True, report_to=[], disable_tqdm=True, num_train_epochs=2, per_device_train_batch_size=16,
            learning_rate=0.05, logging_steps=1, save_strategy="no", eval_strategy="epoch",
        )  # fmt: skip
        trainer = Trainer(model=adapted(model, ["first.weight", "second.weight"]), args=options, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        logs.append([entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history[:-1]])
    assert len(logs[0]) == 10 and logs[0][-1] < logs[0][0]
    assert logs[0] == pytest.approx(logs[1], abs=1e-5)
