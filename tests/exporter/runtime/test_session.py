"""Stock onnxruntime: the same semantics, and what only a compiled runtime can get wrong."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from exporter.runtime.prepare import prepare
from exporter.runtime.reference import reference_evaluator
from exporter.runtime.session import inference_session, open_options, session_options
from exporter.runtime.store import ContextStore
from symbolics.errors import RunError
from symbolics.node.call import Autocast, AutogradCall
from symbolics.node.containers import Slot
from tests.exporter.runtime.build import forward, record, training
from tests.exporter.runtime.cases import CASES, check_case
from tests.exporter.runtime.runner import Runner
from tests.processes import python
from tests.zoo import functions as F, hostile

ALLOW = ["tests.zoo.functions:*"]
NO_ONNXRUNTIME = """
import sys
sys.modules["onnxruntime"] = None
import exporter
for call in (exporter.load, exporter.inference_session):
    try:
        call(sys.argv[1], allow=["tests.zoo.functions:*"])
    except exporter.RunError as error:
        assert "onnxruntime is not installed: pip install" in str(error), error
        print("RunError")
"""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_semantics(case):
    check_case(case, Runner)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_path_of_devices(case):
    # Runs on the CPU what runs on a GPU, but for the stream and the provider's name.
    check_case(case, lambda model: Runner(model, allow=(), sess_options=session_options(ALLOW, device="borrow")), times=2)


# ------------------------------------------------------------------------------------------------- what people change


def test_existing_serving_code_changes_one_line(tmp_path):
    x = torch.randn(2, 4, requires_grad=True)
    path = tmp_path / "model.onnx"
    onnx.save(forward(record(F.SavesInput, x)), path)
    typed = onnx.load(path)
    session = onnxruntime.InferenceSession(str(path), session_options(ALLOW))  # the file has what ORT needs
    (y,) = session.run(None, {"x0": x.detach().numpy()})
    assert torch.equal(torch.from_numpy(y), x.detach().sin())
    assert onnx.load(path) == typed
    chain = onnxruntime.InferenceSession(forward_with_types(4).SerializeToString(), session_options([F.SavesInput]))
    assert chain.run(None, {"x0": x.detach().numpy()})[0].shape == (2, 4)


def forward_with_types(repeat):
    """A chain as the exporter writes it: value_info with element types."""
    model = forward(record(F.SavesInput, torch.randn(2, 4, requires_grad=True)), repeat=repeat)
    prepare(model)
    return model


def test_options_of_the_caller_and_options_twice():
    model = forward(record(F.SavesInput, torch.randn(2, requires_grad=True)))
    mine = onnxruntime.SessionOptions()
    for _ in range(2):  # a library can be registered once only
        session = inference_session(model, sess_options=mine) if _ else inference_session(model, ALLOW, sess_options=mine)
        assert isinstance(session, onnxruntime.InferenceSession)
        session.run(None, {"x0": np.ones(2, np.float32)})
    with pytest.raises(ValueError, match="sess_options"):
        inference_session(model, ALLOW, sess_options=session_options(ALLOW))


# ----------------------------------------------------------------------------------------------------------- memory


seen: list[int] = []
kept: list[torch.Tensor] = []


# --------------------------------------------------------------------------------------------- where a node can stand


def test_if_and_loop_bodies():
    x = torch.randn(3, requires_grad=True)
    node = forward(record(F.SavesInput, x)).graph.node[0]
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>'
        "main (bool c, int64 n, float[N] x0) => (float[N] y, float[N] z) {"
        " t = Constant <value = bool {1}> ()"
        " y = If(c) <then_branch = then () => (float[N] a) { a = Identity(x0) }, else_branch = other () => (float[N] b) { b = Neg(x0) }>"
        " z = Loop(n, t, x0) <body = body (int64 i, bool ci, float[N] v) => (bool co, float[N] w) { co = Identity(ci) w = Identity(v) }> }"
    )
    then = model.graph.node[1].attribute[0].g
    then.node[0].CopyFrom(node)
    then.node[0].output[1] = "a_inner"
    then.node.append(onnx.helper.make_node("Identity", ["a_inner"], ["a"]))
    body = model.graph.node[2].attribute[0].g
    body.node[1].CopyFrom(node)
    body.node[1].input[0], body.node[1].output[1] = "v", "w_inner"
    body.node.append(onnx.helper.make_node("Identity", ["w_inner"], ["w"]))
    session = inference_session(model, ALLOW)
    for c in (True, False):
        y, z = session.run(None, {"c": np.array(c), "n": np.array(3), "x0": x.detach().numpy()})
        torch.testing.assert_close(torch.from_numpy(y), x.detach().sin() if c else -x.detach())
        torch.testing.assert_close(torch.from_numpy(z), x.detach().sin().sin().sin())


def test_a_node_inside_a_function():
    x = torch.randn(3, requires_grad=True)
    node = forward(record(F.SavesInput, x)).graph.node[0]
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1, "local": 1]>'
        "main (float[N] a) => (float[N] y) { y = local.F(a) }"
        '<domain: "local", opset_import: ["": 20, "com.microsoft": 1]> F (x0) => (z) { z = Identity(x0) }'
    )
    model.functions[0].node[0].CopyFrom(node)
    model.functions[0].node[0].output[1] = "z"
    for make in (inference_session, reference_evaluator):
        (y,) = make(model, ALLOW).run(None, {"a": x.detach().numpy()})
        np.testing.assert_allclose(y, x.detach().sin().numpy(), rtol=1e-6)


def test_a_mark_without_a_body_is_identity():
    x = torch.randn(3, requires_grad=True)
    model = forward(record(F.SavesInput, x))
    model.graph.node.insert(0, onnx.helper.make_node("StopGradient", ["x0"], ["marked"], domain="pythonop"))
    model.graph.node[1].input[0] = "marked"
    model.opset_import.add(domain="pythonop", version=1)
    for make in (inference_session, reference_evaluator):
        (y,) = make(model, ALLOW).run(None, {"x0": x.detach().numpy()})
        np.testing.assert_allclose(y, x.detach().sin().numpy(), rtol=1e-6)


@pytest.mark.parametrize("kind", ["double", "bfloat16"])
def test_a_type_without_a_kernel_says_the_way_out(kind):
    text = f'<ir_version: 10, opset_import: ["": 22]> g ({kind}[1, 1, 3] x, {kind}[1, 1, 2] w) => ({kind}[1, 1, 2] y) {{ y = Conv(x, w) }}'
    with pytest.raises(RunError, match=r"Conv.*no kernel of that operator for its types.*export the model in float32"):
        inference_session(onnx.parser.parse_model(text))


def test_an_opset_that_onnxruntime_left_behind_says_the_way_out():
    text = '<ir_version: 3, opset_import: ["": 6]> g (float[2] x, float[2] w) => (float[2] y) { y = Mul(x, w) }'
    model = onnx.parser.parse_model(text)
    with pytest.raises(RunError, match=r"Mul\(6\).*older than 7: onnx\.version_converter\.convert_version\(model, 18\)"):
        inference_session(model)
    converted = inference_session(onnx.version_converter.convert_version(model, 18))
    assert converted.run(None, {"x": np.float32([2, 3]), "w": np.float32([4, 5])})[0].tolist() == [8, 15]


def test_nested_sessions():
    x = torch.randn(4, requires_grad=True)
    RunsSession.session = inference_session(forward(record(F.SavesInput, x)), ALLOW)
    y, gradient = Runner(training(record(RunsSession, x)), allow=[RunsSession]).run(x, torch.ones(4))
    assert torch.equal(y, x.detach().sin())
    assert torch.equal(gradient, x.detach().cos())


class RunsSession(torch.autograd.Function):
    session = None

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(RunsSession.session.run(None, {"x0": x.detach().numpy()})[0])

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


def test_four_threads_on_one_session():
    model = training(record(F.SavesInput, torch.randn(2, 4, requires_grad=True)), repeat=5)
    session = inference_session(model, ALLOW)

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(100):
            x = torch.randn(2, 4, generator=generator).requires_grad_()
            y = x
            for _ in range(5):
                y = y.sin()
            (expected,) = torch.autograd.grad(y.sum(), x)
            found, gradient = session.run(None, {"x0": x.detach().numpy(), "g0": np.ones((2, 4), np.float32)})
            torch.testing.assert_close(torch.from_numpy(found), y.detach())
            torch.testing.assert_close(torch.from_numpy(gradient), expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(session.store) == 0


def test_parallel_execution_sets_the_grad_mode_itself():
    options = session_options(ALLOW)
    options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.inter_op_num_threads = 2
    x = torch.randn(2, 4, requires_grad=True)
    session = inference_session(training(record(F.SavesInput, x)), sess_options=options)
    with torch.no_grad():
        _, gradient = session.run(None, {"x0": x.detach().numpy(), "g0": np.ones((2, 4), np.float32)})
    torch.testing.assert_close(torch.from_numpy(gradient), x.detach().cos())


def test_io_binding():
    x = torch.randn(2, 4, requires_grad=True)
    session = inference_session(training(record(F.SavesInput, x)), ALLOW)
    binding = session.io_binding()
    binding.bind_cpu_input("x0", x.detach().numpy())
    binding.bind_cpu_input("g0", np.ones((2, 4), np.float32))
    for output in session.get_outputs():
        binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    y, gradient = binding.copy_outputs_to_cpu()
    assert torch.equal(torch.from_numpy(y), x.detach().sin())
    assert torch.equal(torch.from_numpy(gradient), x.detach().cos())
    assert len(session.store) == 0


@pytest.mark.parametrize("count", [1, 3])
def test_an_empty_value_that_a_node_made_has_no_address(count):
    """onnxruntime gives it none, and to copy from there is undefined, of no bytes too: `make asan` sees it."""
    x = torch.randn(2, 4, requires_grad=True)
    model = training(record(F.SavesInput, x), repeat=count)
    for name in [value.name for value in model.graph.input]:
        for node in model.graph.node:
            node.input[:] = [f"{name}.made" if read == name else read for read in node.input]
        model.graph.node.insert(0, onnx.helper.make_node("Neg", [name], [f"{name}.made"]))
    empty = np.zeros((0, 4), np.float32)
    for found in inference_session(model, ALLOW).run(None, {value.name: empty for value in model.graph.input}):
        assert found.shape == (0, 4)


def test_strings():
    session = inference_session(strings_model(), ALLOW)
    for words in ([["a", "bé"], ["", "x" * 1000]], np.zeros((0, 3))):
        array = np.array(words, dtype=object)
        (y,) = session.run(None, {"x0": array})
        assert y.shape == array.shape
        assert y.tolist() == [[w + "!" for w in row] for row in array.tolist()]
    (y,) = reference_evaluator(strings_model(), ALLOW).run(None, {"x0": np.array([["a"]], dtype=object)})
    assert y.tolist() == [["a!"]]


def test_strings_are_bytes_of_any_kind():
    """NULs, and what is no Unicode: neither cut nor refused."""
    words = [["a\0b", "\0", "", "c\0", "\U0001f600"]]
    (y,) = inference_session(strings_model(), ALLOW).run(None, {"x0": np.array(words, dtype=object)})
    assert y.tolist() == [[word + "!" for word in words[0]]]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (2, 8), (0,), (20_000, 8)], ids=str)
@pytest.mark.parametrize("device", ["cpu", "borrow"])
def test_tensors_that_are_not_contiguous(shape, device):
    x = torch.ones(shape, requires_grad=True)
    model = training(record(hostile.Strided, torch.ones((1,) * (len(shape) - 1) + (8,), requires_grad=True)))
    runner = Runner(model, allow=(), sess_options=session_options(["tests.zoo.*"], device=device))
    for _ in range(3):
        y, gradient = runner.run(x, x.detach()[..., ::2].contiguous())
        assert y.shape == x[..., ::2].shape
        assert torch.equal(gradient, x.detach())
    assert len(runner.store) == 0


def strings_model():
    call = AutogradCall(
        id="s",
        name="tests.zoo.functions:Concatenates",
        args=(Slot(0),),
        input_types=(8,),
        input_ranks=(2,),
        input_requires_grads=(False,),
        output_types=(8,),
        output_ranks=(2,),
        output_requires_grads=(False,),
    )
    return forward(call)


def test_sizes_arrive_as_ints():
    call = AutogradCall(
        id="z",
        name="tests.zoo.functions:Sized",
        args=(Slot(0), Slot(1, "size")),
        input_types=(1, 7),
        input_ranks=(1, 0),
        input_requires_grads=(True, False),
        output_types=(1,),
        output_ranks=(2,),
        output_requires_grads=(True,),
    )
    x = torch.randn(6, requires_grad=True)
    y, gradient = Runner(training(call)).run(x, torch.tensor(3), torch.ones(3, 2))
    assert torch.equal(y, x.detach().reshape(3, 2) * 3)
    assert torch.equal(gradient, torch.full((6,), 3.0))


def test_an_absent_input_is_none():
    a = torch.randn(3, requires_grad=True)
    call = dataclasses.replace(
        record(F.MaybeAbsent, a, None, a), args=(Slot(0), Slot(1), Slot(2)), input_types=(1, 1, 1), input_ranks=(1, 1, 1),
        input_requires_grads=(True, False, True),
    )  # fmt: skip
    model = training(call)
    model.graph.node[0].input[1] = ""
    del model.graph.input[1]
    for runner in (Runner(model),):
        y, *gradients = runner.run(a, a, torch.ones(3))
        assert torch.equal(y, 2 * a.detach())
        assert all(torch.equal(g, torch.ones(3)) for g in gradients)


def test_the_recorded_autocast_state_counts_and_no_other():
    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = a @ b
        call = record(F.AutocastMatmul, a, b, autocast=Autocast({"cpu": "bfloat16"}))
    y, *_ = Runner(training(call)).run(a, b, torch.ones(2, 2, dtype=torch.bfloat16))
    assert torch.equal(y, expected)
    plain = training(record(F.AutocastMatmul, a, b))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        y, *gradients = Runner(plain).run(a, b, torch.ones(2, 2))
    assert y.dtype is torch.float32
    assert all(gradient.dtype is torch.float32 for gradient in gradients)


# ------------------------------------------------------------------------------------------------ contexts and errors


def test_an_exception_is_the_original_and_the_next_run_works():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    runner = Runner(training(record(F.Raises, x), repeat=3))
    for _ in range(3):
        with pytest.raises(F.CustomError) as caught:
            runner.run(-x, torch.ones(2))
        assert caught.value.detail == {"at": 0}
        assert any(frame.name == "forward" for frame in caught.traceback)
        with pytest.raises(F.CustomError) as caught:
            runner.run(x, -torch.ones(2))
        assert caught.value.detail == {"at": 1}
        assert len(runner.store) == 0
        y, gradient = runner.run(x, torch.ones(2))
        assert torch.equal(y, 8 * x.detach())
        assert torch.equal(gradient, torch.full((2,), 8.0))


def test_with_a_plain_session_the_failure_has_the_traceback():
    x = torch.tensor([1.0], requires_grad=True)
    session = onnxruntime.InferenceSession(forward(record(F.Raises, x)).SerializeToString(), session_options(ALLOW))
    with pytest.raises(Exception, match=r"(?s)PythonOp 'op0' \(tests.zoo.functions:Raises\).*in forward.*CustomError: negative"):
        session.run(None, {"x0": np.array([-1.0], np.float32)})
    session.run(None, {"x0": np.array([1.0], np.float32)})


def test_a_context_is_used_once_by_its_own_call_only():
    x = torch.randn(3, requires_grad=True)
    store = ContextStore()
    first = inference_session(forward(record(F.SavesInput, x, id="a"), context=True), ALLOW, store=store)
    second = inference_session(backward_only(record(F.SavesInput, x, id="a")), ALLOW, store=store)
    other = inference_session(backward_only(record(F.SavesInput, x, id="b")), ALLOW, store=store)
    foreign = inference_session(backward_only(record(F.SavesInput, x, id="a")), ALLOW)
    y, handle = first.run(None, {"x0": x.detach().numpy()})
    feeds = {"context": handle, "g0": np.ones(3, np.float32), "op0_0": y}
    with pytest.raises(RunError, match="another"):
        other.run(None, feeds)
    with pytest.raises(RunError, match="another session"):
        foreign.run(None, feeds)
    for forged in (np.array(int(handle) + 1), np.array(0), np.array(-1), np.array(id(x))):
        with pytest.raises(RunError, match="no context has the handle"):
            second.run(None, {**feeds, "context": forged})
    store.retain = True
    for _ in range(2):
        (gradient,) = second.run(None, feeds)
        assert torch.equal(torch.from_numpy(gradient), x.detach().cos())
    store.retain = False
    second.run(None, feeds)
    with pytest.raises(RunError, match="run already"):
        second.run(None, feeds)
    assert len(store) == 0


def backward_only(call):
    model = training(call)
    graph = model.graph
    del graph.node[0], graph.input[0], graph.output[0]
    graph.node[0].input[0] = "context"
    graph.input.insert(0, onnx.helper.make_tensor_value_info("context", 7, []))
    graph.input.append(onnx.helper.make_tensor_value_info("op0_0", 1, None))
    return model


@pytest.mark.parametrize("context", [7, [1, 2], 1.5], ids=str)
def test_a_context_of_the_wrong_shape_or_type(context):
    x = torch.randn(3, requires_grad=True)
    model = backward_only(record(F.SavesInput, x))
    array = np.array(context)
    model.graph.input[0].CopyFrom(
        onnx.helper.make_tensor_value_info("context", onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
    )
    feeds = {"context": array, "g0": np.ones(3, np.float32), "op0_0": np.ones(3, np.float32)}
    with pytest.raises(Exception, match=r"context|Type|type"):
        inference_session(model, ALLOW).run(None, feeds)


def test_nothing_lives_on_after_many_runs():
    x = torch.randn(2, 4, requires_grad=True)
    steps = inference_session(training(record(F.SavesInput, x), repeat=2), ALLOW)
    feeds = {"x0": x.detach().numpy(), "g0": np.ones((2, 4), np.float32)}
    for _ in range(1000):
        steps.run(None, feeds)
    assert len(steps.store) == 0
    lonely = inference_session(forward(record(F.SavesInput, x)), ALLOW)
    for _ in range(1000):
        lonely.run(None, {"x0": feeds["x0"]})
    assert len(lonely.store) == 0


def test_bindings_die_with_their_sessions():
    x = torch.randn(2, requires_grad=True)
    model = forward(record(F.SavesInput, x))
    session = inference_session(model, ALLOW)
    gone = weakref.ref(session._binding)
    session.run(None, {"x0": np.ones(2, np.float32)})
    del session
    gc.collect()
    assert gone() is None


# --------------------------------------------------------------------------------------------------- what is missing


def test_without_onnxruntime_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setattr("exporter.runtime.library._missing", ImportError("no onnxruntime", name="onnxruntime"))
    for call in (session_options, lambda: inference_session(forward(record(F.Copies, torch.ones(1))))):
        with pytest.raises(RunError, match=r"onnxruntime is not installed: pip install '\.\[run\]' in a clone.*reference_evaluator"):
            call()


def test_without_onnxruntime_a_loaded_file_says_so_too(tmp_path):
    """In a process that has none: where it was only left out of the names here, more would be there."""
    onnx.save(forward(record(F.Copies, torch.ones(1))), tmp_path / "model.onnx")
    done = python("-c", NO_ONNXRUNTIME, str(tmp_path / "model.onnx"))
    assert done.stdout.splitlines() == ["RunError"] * 2, done.stderr[-2000:]


def test_an_output_of_another_type_than_the_file_says():
    x = torch.randn(3)
    call = dataclasses.replace(record(F.SavesNothing, x), output_types=(11,))
    with pytest.raises(RunError, match=r"op0.*SavesNothing.*output 0 has dtype torch.float32, the file says torch.float64"):
        Runner(forward(call)).run(x)


def test_threads_wait_awake_during_a_run():
    spinning, stop = "session.intra_op.allow_spinning", "session.force_spinning_stop"
    plain = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 20]> g (float[3] x) => (float[3] y) { y = Sin(x) }')
    calls = forward(record(F.SavesInput, torch.randn(2, 4, requires_grad=True)))

    def said(model, options=None):
        given = inference_session(model, () if options in bound else ALLOW, sess_options=options).get_session_options()
        found = []
        for key in (spinning, stop):
            try:
                found.append(given.get_session_config_entry(key))
            except RuntimeError:  # nobody has said
                found.append("")
        return tuple(found)

    name = record(F.SavesInput, torch.randn(2)).name
    bound = [session_options(ALLOW), open_options(ALLOW, None, long={name})]
    assert said(plain) == said(plain, onnxruntime.SessionOptions()) == ("1", "1")
    assert said(calls) == said(calls, onnxruntime.SessionOptions()) == ("1", "1")
    assert said(plain, bound[0]) == ("1", "1")
    assert said(calls, bound[1]) == ("1", "1"), "torch's threads work in it from the first call on, while they sleep"
    for chosen in ("0", "1"):
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry(spinning, chosen)
        assert said(plain, options) == (chosen, "")


def test_options_of_onnxruntime_before_1_23(monkeypatch):
    """They do not say whether a session has threads of its own."""
    monkeypatch.delattr(onnxruntime.SessionOptions, "use_per_session_threads")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    x = torch.ones(2)
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 20]> m (float[2] x) => (float[2] y) { y = Neg(x) }')
    assert inference_session(model, sess_options=options).run(None, {"x": x.numpy()})[0].tolist() == [-1.0, -1.0]
