"""What `pythonop run` does, as a function."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from click.testing import CliRunner

import exporter
from exporter.cli import main
from exporter.commands.run_file import default_sizes, run_file, several_feeds
from symbolics.errors import RunError, TrustError
from tests.exporter.quantization.quantizers import Act, Conv
from tests.exporter.runtime.build import forward, record
from tests.zoo import functions as F

ALLOW = ["tests.zoo.functions:*"]


@pytest.fixture
def path(tmp_path):
    onnx.save(forward(record(F.SavesInput, torch.randn(2, 4, requires_grad=True))), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.mark.parametrize("engine", ["onnxruntime", "reference", "auto"])
def test_runs_and_describes(path, engine, tmp_path):
    x = np.full((3, 4), 0.5, np.float32)
    found = run_file(path, allow=ALLOW, inputs={"x0": x}, output=tmp_path / "y.npz", engine=engine, times=3)
    assert found["outputs"][0]["shape"] == [3, 4]
    assert found["outputs"][0]["mean"] == pytest.approx(np.sin(0.5))
    assert found["live_contexts"] == 0
    with np.load(tmp_path / "y.npz") as saved:
        np.testing.assert_allclose(saved["op0_0"], np.sin(x), rtol=1e-6)


def test_made_up_inputs_follow_the_seed_and_the_dims(path):
    first, again, other = (run_file(path, allow=ALLOW, seed=seed, dims={"x0_0": 7}) for seed in (1, 1, 2))
    assert first["outputs"] == again["outputs"] != other["outputs"]
    assert first["inputs"][0]["shape"] == [7, 2]


def test_refusals(path, tmp_path):
    with pytest.raises(TrustError, match="allow="):
        run_file(path)
    with pytest.raises(RunError, match="no input 'z'"):
        run_file(path, allow=ALLOW, inputs={"z": np.zeros(1)})
    with pytest.raises(RunError, match="cannot write"):
        run_file(path, allow=ALLOW, output=tmp_path / "missing" / "y.npz")
    with pytest.raises(RunError, match="at least once"):
        run_file(path, allow=ALLOW, times=0)


def test_runs_that_would_all_be_the_same_are_one():
    float_and_ids = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> f (float[n, 2] x, int64[n] ids) => (float[n, 2] y) { y = Identity(x) }'
    )
    x, ids = np.ones((2, 2), np.float32), np.zeros(2, np.int64)
    for given, count in (({}, 3), ({"ids": ids}, 3), ({"x": x}, 1), ({"x": x, "ids": ids}, 1)):
        feeds = several_feeds(float_and_ids, given, {}, 3)
        assert len(feeds) == count == len({each["x"].tobytes() for each in feeds})
        assert default_sizes(float_and_ids, given, {}) == (["n"] if len(given) < 2 else [])
    assert default_sizes(float_and_ids, {}, {"n": 5}) == []


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A model that takes no picture of 2 by 2, whose axes are open, and its integers."""
    folder = tmp_path_factory.mktemp("pictures")
    torch.manual_seed(0)
    model = torch.nn.Sequential(Act(signed=True, step=0.06), Conv(3, 4, 5), torch.nn.ReLU(), Act(step=0.05)).eval()
    sizes = {"input": {0: "batch", 2: "height", 3: "width"}}
    program = exporter.export(model, (torch.randn(2, 3, 16, 16),), portable=True, dynamic_shapes=sizes)
    program.save(folder / "model.onnx")
    exporter.quantize(program).save(folder / "integers.onnx")
    return folder


@pytest.mark.parametrize(
    "line",
    [
        "run {0}/model.onnx",
        "run {0}/model.onnx --reference",
        "profile {0}/model.onnx",
        "quantize {0}/model.onnx -o {0}/again.onnx --compare 2",
        "verify --quantized {0}/integers.onnx {0}/model.onnx",
    ],
)
def test_a_size_that_nobody_chose_is_said_where_the_run_fails(pictures, line):
    arguments = line.format(pictures).split()
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2 and "the open axes batch, height, width had size 2" in done.output, done.output
    assert "--dim batch=N" in done.output
    some = CliRunner().invoke(main, [*arguments, "--dim", "height=2", "--dim", "batch=1"])
    assert some.exit_code == 2 and "the open axis width had size 2" in some.output and "--dim width=N" in some.output, some.output
    chosen = CliRunner().invoke(main, [*arguments, *(f"--dim={each}=2" for each in ("batch", "height", "width"))])
    assert chosen.exit_code == 2 and "had size 2" not in chosen.output, chosen.output
    fits = CliRunner().invoke(main, [*arguments, "--dim", "height=16", "--dim", "width=16"])
    assert fits.exit_code == 0, fits.output


@pytest.mark.parametrize("size", [-1, 2**62, 2**40])
@pytest.mark.parametrize("command", ["run", "profile"])
def test_sizes_that_no_array_has(command, size, run, path):
    proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 20]> f (float[n, 2] x) => (float[n, 2] y) { y = Sin(x) }')
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = size
    onnx.save(proto, path)
    done = run(command, path)
    assert isinstance(done.exception, SystemExit), done.exception
    assert f"no array of the shape [{size}, 2] can be made for the input x" in " ".join(done.output.split()), done.output
