"""exporter.verify_quantized and `pythonop verify --quantized`: what agrees, and each thing that does not, by its number."""

from __future__ import annotations

import json
import re

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from click.testing import CliRunner

import exporter
from exporter.cli import main
from exporter.quantization.comparison import Comparison, _Apart
from exporter.quantization.proof import Limits, Proof
from tests.exporter.quantization.declared_functions import Lsq
from tests.exporter.quantization.models import MODELS, trained
from tests.exporter.quantization.quantizers import Act, Conv

pytestmark = pytest.mark.filterwarnings("ignore")


def made(name, dynamo=False):
    model, args = trained(MODELS[name])
    program = exporter.export(model, args, dynamo=dynamo, portable=True)
    drawn = np.random.default_rng(0)
    inputs = [{program.model.graph.inputs[0].name: drawn.standard_normal(args[0].shape).astype(np.float32)} for _ in range(20)]
    return program, exporter.quantize(program), inputs


def with_scale(quantized, factor, which=0):
    """The file in integers with another step for one of its quantisers."""
    model = quantized.model.clone()
    value = model.graph.initializers[f"{quantized.activations[which].name}/scale"]
    value.const_value = ir.tensor((value.const_value.numpy() * np.float32(factor)).astype(np.float32), name=value.name)
    return model


@pytest.mark.parametrize(
    "name", ["conv ste", "conv fake", "residual", "two branches", "at outputs", "transformer, whole", "mlp pact", "mlp lsq"]
)
def test_what_quantize_writes_is_within_the_limits(name, dynamo):
    program, quantized, inputs = made(name if name in MODELS else "mlp, activations pact", dynamo)
    proof = exporter.verify_quantized(quantized, program, *inputs)
    assert proof.ok, str(proof)
    assert not proof.absent and len(proof.thresholds) == len(proof.compared.levels) > 0
    assert max(each.floats for each in proof.thresholds.values()) <= 1 and all(share < 1e-2 for share in proof.compared.levels.values())
    assert all(off <= 1 + 5e-4 * count and count for off, count in proof.compared.layers.values())
    assert all(share < 1e-5 for share in proof.compared.tails.values())


def test_rounded_floats_are_run_as_they_are():
    """Of a model with QuantizeLinear and float biases, onnxruntime's optimizer makes integers of its own: that is no reference."""
    levels = [
        max(exporter.verify_quantized(q, p, *inputs).compared.levels.values()) for p, q, inputs in map(made, ("conv ste", "conv fake"))
    ]
    assert levels[0] == pytest.approx(levels[1]) and 0 < levels[0] < 2e-3


def test_thresholds_of_torchs_own_fake_quantize_are_one_float_away():
    """It multiplies by 1 / scale, and QuantizeLinear divides: counted here in numpy."""
    scale = np.float32(0.0123)

    class Model(torch.nn.Linear):
        def forward(self, x):
            x = torch.clamp(torch.round(x * (1 / torch.tensor(0.0123))), -128, 127) * torch.tensor(0.0123)
            return torch.nn.functional.linear(x, torch.fake_quantize_per_tensor_affine(self.weight, 0.01, 0, -128, 127))

    program = exporter.export(Model(8, 4).eval(), (torch.randn(2, 8),), dynamo=False)
    proof = exporter.verify_quantized(
        exporter.quantize(program), program, {program.model.graph.inputs[0].name: np.zeros((2, 8), np.float32)}
    )
    ((name, found),) = proof.thresholds.items()
    halves = (np.arange(-128, 127) + np.float32(0.5)) * np.float64(scale)
    near = halves.astype(np.float32).view(np.int32)[:, None] + np.arange(-4, 5, dtype=np.int32)
    numbers = np.sort(near.view(np.float32), axis=1)
    one, other = (np.rint(numbers * (np.float32(1) / scale)), np.rint(numbers / scale))
    apart = np.abs((one == one[:, :1]).sum(1) - (other == other[:, :1]).sum(1))
    assert found.count == 255 and found.moved == (apart > 0).sum() > 0 and found.floats == apart.max() == 1
    assert not exporter.verify_quantized(exporter.quantize(program), program, {"x": np.zeros((2, 8), np.float32)}, floats=0).ok


@pytest.mark.parametrize("factor", [1 + 2**-20, 1.01, 1.5])
def test_another_step_in_the_file_is_seen(factor):
    program, quantized, inputs = made("conv ste")
    proof = exporter.verify_quantized(with_scale(quantized, factor), program, *inputs)
    name = quantized.activations[0].name
    assert proof.thresholds[name].floats > 2 and proof.thresholds[name].moved > 200
    others = [each for other, each in proof.thresholds.items() if other != name]
    assert all(each.moved == 0 for each in others)
    assert not proof.ok and f"a threshold of {name}" in str(proof)
    assert exporter.verify_quantized(with_scale(quantized, factor), program, *inputs, floats=1 << 31, levels=1, classes=1, outputs=10).ok


@pytest.mark.parametrize("name", ["mlp lsq", "conv ste"])
@pytest.mark.parametrize("amount", [0.02, 1.0])
def test_a_bias_that_is_not_the_models_is_seen(name, amount):
    """Behind the last quantiser no level tells of it, and the same for all classes changes no class."""
    program, quantized, inputs = made(name)
    biases = [v.name for v in quantized.model.graph.initializers.values() if v.name.endswith("bias")]
    assert biases
    for bias in biases:
        model = quantized.model.clone()
        held = model.graph.initializers[bias]
        held.const_value = ir.tensor((held.const_value.numpy() + np.float32(amount)).astype(np.float32), name=held.name)
        proof = exporter.verify_quantized(model, program, *inputs)
        assert not proof.ok and any("where all" in failure for failure in proof.failures), (bias, str(proof))
        assert exporter.verify_quantized(model, program, *inputs, levels=1, classes=1, outputs=100).ok


@np.errstate(invalid="raise")
class _FewLevels(torch.nn.Module):
    """An activation of 200 levels, so that the integers have a Clip."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        x = torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127)
        x = torch.nn.functional.linear(x, self.rounded(self.first.weight))
        x = torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -90, 109)
        return torch.nn.functional.linear(x, self.rounded(self.second.weight))

    def rounded(self, weight):
        return torch.fake_quantize_per_tensor_affine(weight, 0.005, 0, -127, 127)


@pytest.mark.parametrize("further", [1, 3, 56])
def test_levels_further_than_the_models_are_seen_where_no_data_goes(further):
    program = exporter.export(_FewLevels(), (torch.randn(16, 8),))
    quantized, data = exporter.quantize(program), {program.model.graph.inputs[0].name: np.random.default_rng(0).random((16, 8), np.float32)}
    assert exporter.verify_quantized(quantized, program, data).ok
    model = quantized.model.clone()
    (name,) = [name for name in model.graph.initializers if name.endswith("/high")]
    value = model.graph.initializers[name]
    value.const_value = ir.tensor((value.const_value.numpy().astype(int) + further).astype(value.dtype.numpy()), name=name)
    (failure,) = exporter.verify_quantized(model, program, data).failures
    assert f"goes {further} level" in failure and "further than the model's" in failure


@pytest.fixture(scope="module")
def coarse():
    """Biases in steps that move more levels than the default limits allow."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        Act(signed=True, step=0.06), Conv(2, 8, 3), torch.nn.ReLU(), Act(step=0.006), Conv(8, 4, 3), Act(signed=True, step=0.05)
    )  # fmt: skip
    x = torch.randn(4, 2, 24, 24)
    program = exporter.export(model.eval(), (x,), dynamo=False, portable=True)
    return program, exporter.quantize(program), {program.model.graph.inputs[0].name: x.numpy()}


def test_rounded_biases_are_said_with_the_limits_to_set(coarse):
    program, quantized, data = coarse
    proof = exporter.verify_quantized(quantized, program, data)
    assert any(
        "; rounding the bias before it to int32 moves " in each and "% at most, half a step in each channel" in each
        for each in proof.failures
    ), str(proof)
    assert proof.way_out.startswith("way out: quantize rounds the biases") and proof.way_out == proof.as_json()["way_out"]
    number = re.search(r"outputs=([\d.]+)", proof.way_out)[1]
    assert f"--max-outputs {number}" in proof.way_out and 0.001 < float(number) < 0.02 and f"  {proof.way_out}" in str(proof)
    eased = exporter.verify_quantized(quantized, program, data, outputs=float(number))
    assert eased.ok and not eased.way_out, str(eased)


def test_levels_behind_rounded_biases_get_a_limit_too(coarse):
    program, quantized, data = coarse
    assert "levels=" in exporter.verify_quantized(quantized, program, data, levels=1e-3).way_out


def test_a_wrong_bias_has_no_way_out(coarse):
    program, quantized, data = coarse
    model = quantized.model.clone()
    held = next(v for v in model.graph.initializers.values() if v.const_value.dtype == ir.DataType.INT32)
    held.const_value = ir.tensor(held.const_value.numpy() + np.int32(20), name=held.name)
    proof = exporter.verify_quantized(model, program, data)
    assert not proof.ok and not proof.way_out and "way out" not in str(proof)


def test_levels_alone_have_a_way_out():
    """Each layer is right by itself, and what differs comes from the layers before: the limit to set is said, with the classes to look at."""
    program, quantized, inputs = made("conv ste")
    proof = exporter.verify_quantized(quantized, program, *inputs, levels=0.0)
    assert proof.failures and all("of the levels of" in each for each in proof.failures), str(proof)
    assert re.match(
        r"way out: each layer alone is right \(0\.\d+% .*the layers before\. If the outputs are as good \(another class in ", proof.way_out
    )
    number = re.search(r"set levels=([\d.]+) \(--max-levels \1\)$", proof.way_out)[1]
    assert exporter.verify_quantized(quantized, program, *inputs, levels=float(number)).ok


@pytest.mark.parametrize(
    ("changed", "limits"),
    [
        ({}, "set levels=0.107 (--max-levels 0.107)"),
        ({"layers": {"a": (0, 1000), "b": (2, 500)}}, "set outputs=0.004, levels=0.107 (--max-outputs 0.004 --max-levels 0.107)"),  # on thresholds
        ({"layers": {"a": (0, 1000), "b": (2, 500)}, "levels": {"a": 0.0, "b": 0.004}}, "set outputs=0.004 (--max-outputs 0.004)"),
        ({"layers": {"a": (0, 1000), "b": (9, 500)}}, ""),
        ({"classes": {"y": 0.2}}, ""),
        ({"tails": {"y": 0.2}}, ""),
        ({"levels": {"a": 0.0, "b": 0.0}}, ""),
    ],
)  # fmt: skip
def test_what_a_layer_behind_others_may_need(changed, limits):
    found = {
        "levels": {"a": 0.0, "b": 0.10696},
        "layers": {"a": (0, 1000), "b": (1, 1000)},
        "tails": {"y": 0.0},
        "classes": {"y": 0.0},
    } | changed
    compared = Comparison(found["levels"], {}, found["layers"], {"y": 0.1}, {"y": 0.0}, found["tails"], found["classes"], 1, 1, {})
    proof = Proof({}, [], compared, Limits(None, 0.05, 0.005, 0.001), {})
    assert proof.way_out.endswith(limits) and bool(proof.way_out) == bool(limits), proof.way_out
    assert not limits or "another class in 0.00% of the rows" in proof.way_out


class Chain(torch.nn.Module):
    """Each layer rounds what it gives, and the next one what it takes, in another step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Conv(2, 3, 3), Conv(3, 2, 3)
        steps = (0.0313, 0.0137, 0.0219, 0.0118)
        self.acts = torch.nn.ModuleList(Act() for _ in steps)
        for act, step in zip(self.acts, steps, strict=True):
            act.scale = torch.tensor(step) if isinstance(act.scale, torch.Tensor) else step

    def forward(self, x):
        one, two, three, four = self.acts
        return four(self.second(three(two(self.first(one(x))))))


def test_a_quantiser_right_behind_another_one_stays_apart(dynamo, monkeypatch):
    model, drawn = Chain().eval(), torch.randn(4, 2, 8, 8)
    program = exporter.export(model, (drawn,), dynamo=dynamo, portable=True)
    feeds = {program.model.graph.inputs[0].name: drawn.numpy()}

    def opened(quantized):
        session = onnxruntime.InferenceSession(ir.to_proto(quantized.model).SerializeToString())
        return np.abs(session.run(None, feeds)[0] - model(drawn).detach().numpy()).max(), exporter.verify_quantized(quantized, program, feeds)

    gap, proof = opened(exporter.quantize(program))
    assert gap < 1e-6 and proof.ok, str(proof)
    monkeypatch.setattr("exporter.quantization.barriers._is_second", lambda node: False)
    gap, proof = opened(exporter.quantize(program))
    assert gap > 5e-3, "onnxruntime does not merge two pairs of QuantizeLinear and DequantizeLinear any more"
    assert not proof.ok and "an optimizer of onnxruntime takes levels out" in "\n".join(proof.failures)


def test_how_far_outputs_are_apart():
    one = np.array([3.0, np.inf, -np.inf, np.nan, 4.0], np.float32)
    for found, share in ((one, 0), (np.float32([3, np.inf, -np.inf, np.nan, 4.5]), 0.1), (np.float32([3, 1, -np.inf, np.nan, 4]), np.inf)):
        apart = _Apart()
        apart.add(one, found)
        assert apart.share == pytest.approx(share)
    lost = _Apart()
    lost.add(one, np.float32([3, np.inf, -np.inf, 1, 4]))
    assert not lost.share <= 10  # a NaN that is none
    whole = _Apart()
    whole.add(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 0]))
    assert whole.share == 0.25


def test_levels_and_classes_have_limits():
    program, quantized, inputs = made("conv ste")
    assert not exporter.verify_quantized(quantized, program, *inputs, levels=0.0).ok
    weight = next(
        v for n, v in quantized.model.graph.initializers.items() if n.endswith("/levels") and v.const_value.size == 1440
    )  # of the last layer
    broken = quantized.model.clone()
    held = broken.graph.initializers[weight.name]
    held.const_value = ir.tensor(-held.const_value.numpy(), name=held.name)
    proof = exporter.verify_quantized(broken, program, *inputs)
    assert any("have another class" in each for each in proof.failures), str(proof)


def test_files_that_do_not_belong_together():
    program, quantized, inputs = made("conv ste")
    other, _, _ = made("mlp lsq")
    with pytest.raises(exporter.ExportError, match="it was made of another export"):
        exporter.verify_quantized(quantized, other, *inputs)
    floats = exporter.export(torch.nn.Linear(3, 2), (torch.randn(2, 3),), dynamo=False)
    with pytest.raises(exporter.ExportError, match="no quantiser of activations"):
        exporter.verify_quantized(quantized, floats, *inputs)
    with pytest.raises(exporter.ArgumentError, match="nothing to compare on"):
        exporter.verify_quantized(quantized, program)


def test_what_cannot_be_run_is_an_error_of_ours():
    program, quantized, inputs = made("mlp lsq")
    ((name, x),) = inputs[0].items()
    for wrong in ({name: x[:, :5]}, {}, {"nobody": x}, {name: x.astype(np.float64)}):
        for call in (
            lambda wrong=wrong: exporter.verify_quantized(quantized, program, wrong),
            lambda wrong=wrong: quantized.compare(wrong),
        ):
            with pytest.raises(exporter.RunError, match="cannot run the model on these inputs"):
                call()
    model, args = trained(MODELS["mlp lsq function"])
    with_calls = exporter.export(torch.nn.Sequential(*model, Opaque()), args, dynamo=False, portable=["*LsqFunction"])
    mixed = exporter.quantize(with_calls)
    with pytest.raises(exporter.RunError, match="PythonOp.*\n.*portable=True"):
        mixed.compare({mixed.model.graph.inputs[0].name: args[0].numpy()})


class Opaque(torch.nn.Module):
    def forward(self, x):
        return Lsq.apply(x, torch.tensor(0.1), -8, 7)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    program, quantized, inputs = made("conv ste")
    program.save(folder / "model.onnx")
    quantized.save(folder / "integers.onnx")
    exporter.Program(with_scale(quantized, 1.5)).save(folder / "wrong.onnx")
    np.savez(folder / "data.npz", **inputs[0])
    return folder


def call(*arguments):
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


def test_the_command(files):
    done = call("--quantized", files / "integers.onnx", files / "model.onnx", "--runs", 3, "--inputs", files / "data.npz")
    assert done.exit_code == 0, done.output
    assert "quantisers of activations, by bisection" in done.output and "within the limits" in done.output
    done = call("--quantized", files / "wrong.onnx", files / "model.onnx", "--runs", 2, "--json")
    assert done.exit_code == 1
    told = json.loads(done.output)
    assert told["ok"] is False and told["failures"] and max(each["floats"] for each in told["thresholds"].values()) > 1000
    assert call("--quantized", files / "integers.onnx", files / "model.onnx", "--max-levels", 0).exit_code == 1
    assert (
        call(
            "--quantized",
            files / "wrong.onnx",
            files / "model.onnx",
            "--max-floats",
            10**9,
            "--max-levels",
            1,
            "--max-classes",
            1,
            "--max-outputs",
            10,
        ).exit_code
        == 0
    )


def test_the_command_with_a_target(tmp_path):
    target = f"{__name__}:seeded"
    exporter.quantize(exporter.export(*seeded(), portable=True)).save(tmp_path / "integers.onnx")
    done = call("--quantized", tmp_path / "integers.onnx", target)
    assert done.exit_code == 0, done.output


def seeded():
    return trained(MODELS["mlp lsq"])


def test_the_commands_bad_input(files, tmp_path):
    (tmp_path / "text.onnx").write_text("no model")
    for arguments, told in (
        ((tmp_path / "none.onnx", files / "model.onnx"), "none.onnx"),
        ((tmp_path / "text.onnx", files / "model.onnx"), "text.onnx"),
        ((files / "integers.onnx", tmp_path / "text.onnx"), "text.onnx"),
        ((files / "integers.onnx", "nobody.knows:it"), "nobody"),
        ((files / "integers.onnx", files / "model.onnx", "--bisect"), "--bisect is not for --quantized"),
        ((files / "integers.onnx", files / "model.onnx", "more"), "takes one model beside it"),
        ((files / "integers.onnx", files / "model.onnx", "--dim", "batch=3"), "dimension"),
    ):
        done = call("--quantized", *arguments)
        assert done.exit_code not in (0, 1) and told in done.output, done.output
        assert len(done.output.splitlines()) <= 8
    assert "are for --quantized" in call("tests.exporter.commands.cli_targets:rounded", "--runs", 3).output


def test_weights_in_a_file_of_their_own_in_another_folder(tmp_path, monkeypatch):
    """From the shell, too: nothing is looked for beside the process; sizes count both files."""
    program, _, inputs = made("mlp, activations pact")
    (tmp_path / "there").mkdir()
    program.save(tmp_path / "there" / "model.onnx", external_data=True)
    (data,) = [each for each in (tmp_path / "there").iterdir() if each.name != "model.onnx"]
    monkeypatch.chdir(tmp_path)
    for path in ("there/model.onnx", tmp_path / "there" / "model.onnx"):
        quantized = exporter.quantize(path)
        quantized.save("there/integers.onnx", external_data=True)
        assert exporter.verify_quantized("there/integers.onnx", path, *inputs).ok
    found = CliRunner().invoke(main, ["quantize", "there/model.onnx", "-o", "out.onnx", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["bytes_before"] == (tmp_path / "there" / "model.onnx").stat().st_size + data.stat().st_size


def test_other_names_of_outputs_are_said():
    program, quantized, inputs = made("mlp, activations pact")
    other = program.model.clone()
    other.graph.outputs[0].name = "scores"
    with pytest.raises(exporter.ArgumentError, match="has the output 'scores', and the file in integers has .*output_names"):
        exporter.verify_quantized(quantized, other, *inputs)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A model of pictures of any size, and the same in integers."""
    folder = tmp_path_factory.mktemp("images")
    model, (x,) = trained(MODELS["conv ste"])
    program = exporter.export(
        model, (x,), dynamo=False, portable=True, input_names=["image"], dynamic_axes={"image": {0: "batch", 2: "height", 3: "width"}}
    )
    program.save(folder / "model.onnx")
    exporter.quantize(program).save(folder / "integers.onnx")
    np.savez(folder / "data.npz", image=x.numpy())
    return folder, list(x.shape)


def both_commands(folder, option, *arguments):
    """What `quantize` and `verify --quantized` say of the same comparison."""
    for command in (
        ["quantize", folder / "model.onnx", "-o", folder / "again.onnx", *(["--compare", option] if option else [])],
        ["verify", "--quantized", folder / "integers.onnx", folder / "model.onnx", *(["--runs", option] if option else [])],
    ):
        done = CliRunner().invoke(main, [*map(str, command), *map(str, arguments)])
        assert done.exit_code == 0, done.output
        yield done


def test_inputs_that_are_all_given_are_run_once(images):
    folder, shape = images
    for done in both_commands(folder, 20, "--inputs", folder / "data.npz"):
        assert "1 input, beside" in done.stdout and f"input image: float32{shape}" in done.stdout
        assert "all 20 runs would be the same" in " ".join(done.stderr.split()) and "*data)" in done.stderr
        assert "size 2" not in done.stdout
    for done in both_commands(folder, 1, "--inputs", folder / "data.npz"):
        assert "1 input, beside" in done.stdout and not done.stderr
    default = call("--quantized", folder / "integers.onnx", folder / "model.onnx", "--inputs", folder / "data.npz", "--json")
    compared = json.loads(default.stdout)["compared"]
    assert (compared["runs"], compared["different"], compared["shapes"]) == (1, 1, {"image": [f"float32{shape}"]})
    assert not default.stderr  # nobody asked for more


def test_the_sizes_of_random_inputs_are_said(images):
    folder, (_, channels, *_) = images
    for done in both_commands(folder, 3, "--dim", "height=16", "--dim", "width=16"):
        assert f"3 inputs, beside the model in rounded floats\n  input image: float32[2, {channels}, 16, 16]" in done.stdout
        assert "size 2, as no --dim says another: batch\n" in done.stdout
    for done in both_commands(folder, 2, "--dim", "height=16", "--dim", "width=16", "--dim", "batch=1"):
        assert "size 2" not in done.stdout


def test_a_portable_model_of_open_sizes_and_strides(dynamo):
    """One function is called at two sizes, whose names in its body are the same: onnxruntime took them for equally large."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        Act(signed=True), Conv(3, 8, 3, stride=2), torch.nn.ReLU(), Act(), Conv(8, 8, 3), torch.nn.ReLU(), Act()
    ).eval()
    sizes = {0: "batch", 2: "height", 3: "width"}
    shapes = ({place: torch.export.Dim(name) for place, name in sizes.items()},) if dynamo else (sizes,)
    program = exporter.export(model, (torch.randn(2, 3, 20, 20),), dynamo=dynamo, portable=True, dynamic_shapes=shapes)
    quantized, name = exporter.quantize(program), str(program.model.graph.inputs[0].name)
    inputs = {name: np.random.default_rng(0).standard_normal((3, 3, 30, 26)).astype(np.float32)}
    assert exporter.verify_quantized(quantized, program, inputs).ok
