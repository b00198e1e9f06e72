"""Files made to hurt: every one is refused with a clear error, and nothing is imported."""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from exporter.files.trust import Gate
from exporter.runtime.kernels import PythonOp, PythonOpGrad
from exporter.runtime.prepare import ABSENT_INPUTS, KEPT_OUTPUTS
from exporter.runtime.reference import reference_evaluator
from exporter.runtime.session import inference_session, session_options
from exporter.runtime.store import ContextStore
from symbolics.errors import FormatError, PythonopError, RunError, TrustError
from symbolics.node.attributes import GRAD_SPECS, SPECS, write_attributes
from tests.exporter.runtime.build import forward, record, training
from tests.processes import python
from tests.zoo import functions as F

ALLOW = ["tests.zoo.functions:*"]
X = torch.randn(2, 4, requires_grad=True)
ENGINES = [inference_session, reference_evaluator]


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """What opens a file is there before anything looks at what a file imports."""
    for make in ENGINES:
        make(forward(record(F.SavesInput, X)), ALLOW)


def tampered(model=None, **changes):
    """A model whose PythonOp has other attributes."""
    model = forward(record(F.SavesInput, X)) if model is None else model
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name in changes:
                attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, changes[attribute.name]))
    return model


def with_arguments(*args, kwargs=None, cls=F.SavesInput):
    """A model whose call says this, in JSON."""
    model = forward(record(cls, X))
    attribute = next(a for a in model.graph.node[0].attribute if a.name == "call")
    data = json.loads(attribute.s)
    data["args"] = [*data["args"], *args]
    data["kwargs"] = kwargs or {}
    attribute.s = json.dumps(data).encode()
    convention = next(a for a in model.graph.node[0].attribute if a.name == "input_convention")
    convention.s = b"d" + b"c" * (len(args) + len(data["kwargs"]))
    flags = next(a for a in model.graph.node[0].attribute if a.name == "input_requires_grads")
    flags.ints.extend([0] * (len(args) + len(data["kwargs"])))
    return model


def refused(make, model, error, match, allow=ALLOW):
    modules = set(sys.modules)
    with pytest.raises(error, match=match) as caught:
        make(model, allow)
    assert set(sys.modules) == modules
    assert "op0" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:Popen",
        "antigravity:geohash",
        "this.that:F",
        "builtins:eval",
        "tests.zoo.functions.os:system",
        "tests.zoo.functionsX:SavesInput",
    ],
)
def test_names_outside_allow(make, name):
    refused(make, tampered(name=name), TrustError, "not allowed|should be, which it is not")


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize(
    "name",
    [
        "tests.zoo.functions:Mode",
        "tests.zoo.functions:np.load",
        "tests.zoo.functions:torch.autograd.Function",
        "tests.zoo.functions:Function",
        "tests.zoo.functions:enum.Enum",
    ],
)
def test_allowed_modules_that_lead_elsewhere(make, name):
    refused(make, tampered(name=name), TrustError, "which it is not|no class|another name")


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize(
    ("argument", "match"),
    [
        ({"$callable": "os:system"}, "another name of"),
        ({"$enum": ["http:HTTPStatus", "OK"]}, "not allowed"),
        ({"$dataclass": ["antigravity:X", {}]}, "not allowed"),
        ({"$namedtuple": ["this:X", []]}, "not allowed"),
        ({"$object": "model"}, "not registered"),
    ],
)
def test_names_among_the_arguments(make, argument, match):
    refused(make, with_arguments(argument), TrustError, match)


SHELL = ["echo called by a file >&2", {"$tuple": ["sh", "-c", "exit 3"]}]


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize(
    ("function", "arguments", "needs"),
    [
        (
            "symbolics.capture.gradient_hooks:GradientHook",
            [{"$callable": "torch.utils.collect_env:run"}, {"$tuple": SHELL[:1]}],
            "collect_env:run",
        ),
        ("symbolics.capture.gradient_hooks:GradientHook", [{"$callable": "torch.hub:load"}, {"$tuple": SHELL}], "hub:load"),
        (
            "symbolics.capture.gradient_hooks:GradientHook",
            [{"$builtin": "torch:set_num_threads"}, {"$tuple": [1]}],
            "torch:set_num_threads",
        ),
        ("symbolics.capture.gradient_hooks:GradientHook", [{"$callable": "functools:partial"}], "not allowed"),
        (
            "symbolics.capture.gradient_hooks:GradientHook",
            [{"$dataclass": ["torch._dynamo.utils:CleanupHook", {"scope": {"$dict": []}, "name": "x"}]}],
            "CleanupHook",
        ),
        (
            "symbolics.capture.gradient_hooks:GradientHook",
            [{"$dataclass": ["torch.export.dynamic_shapes:_DimHint", {"type": 1}]}],
            "_DimHint",
        ),
        ("torch.utils.checkpoint:CheckpointFunction", [{"$callable": "torch.utils.collect_env:run"}, False, SHELL[0]], "collect_env:run"),
        ("torch.utils.checkpoint:CheckpointFunction", [{"$callable": "torch.utils._pytree:tree_map"}, False, SHELL[0]], "_pytree:tree_map"),
    ],
)
def test_a_pattern_of_all_of_torch_lets_a_file_call_nothing_but_functions(make, function, arguments, needs, capfd):
    """What was a way to a shell: every function of torch was within reach of a hook."""
    model = tampered(with_arguments(*arguments), name=function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = refused(make, model, TrustError, "which no pattern allows|not allowed by", allow=["torch.*", "torch:*"])
    assert needs in said
    assert "called by" not in capfd.readouterr().err


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize("cls", ["Repeats", "Setting"])
def test_a_hook_is_no_constructor_of_what_the_caller_allows(make, cls):
    """What an opaque module's file needs an entry for, a hook would have been free to make, with arguments of the file's choice."""
    importlib.import_module("tests.zoo.modules")  # an entry for a class allows the import of its module
    model = tampered(
        with_arguments({"$callable": f"tests.zoo.modules:{cls}"}, {"$tuple": ["/tmp/x"]}),
        name="symbolics.capture.gradient_hooks:GradientHook",
    )
    refused(make, model, TrustError, "none for its constructor", allow=["tests.zoo.modules:*", f"tests.zoo.modules:{cls}"])


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize("cls", [F.SavesInput, F.SetupContext])
@pytest.mark.parametrize(("args", "kwargs"), [((1, 2), {}), ((), {"other": 1})])
def test_more_arguments_than_forward_takes(make, cls, args, kwargs):
    """Found where the call is read, as its Function's; a run would have raised Python's TypeError."""
    message = refused(make, with_arguments(*args, kwargs=kwargs, cls=cls), FormatError, r"cannot be called as the file calls it")
    assert f"tests.zoo.functions:{cls.__name__}" in message
    assert "forward(" in message
    assert "export the model again" in message


@pytest.mark.parametrize("make", ENGINES)
def test_fewer_arguments_than_forward_takes(make):
    refused(make, tampered(name="tests.zoo.functions:TwoInputs"), FormatError, "missing a required argument: 'b'")


def deep(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (deep(100), "nests deeper than"),
        (deep(900), "nests deeper than"),
        ([0] * 100_000, "more than 65536 values"),
        ({"$int": "f" * 100_000}, r"\$int.*bits"),
        ({"$int": [1]}, r"\$int"),
        ({"$unknown": 1}, r"unknown type '\$unknown'"),
        ({"$tuple": 1}, r"\$tuple"),
        ({"$bytes": "*"}, r"\$bytes"),
        ({"$ndarray": ["<f4", [1 << 40], ""]}, r"\$ndarray"),
        ({"$ndarray": ["O", [1], "AAAAAAAA"]}, r"\$ndarray.*'O'"),
        ({"$range": [0, 1, 0]}, r"\$range"),
        ({"$device": "evil"}, r"\$device.*'evil'"),
        ({"$tensor": 5}, "damaged"),
        ({"$tensor": -1}, "damaged"),
        ({"$tensor": 10**30}, "number '1000"),
        (1e999, "number 'Infinity'"),
        (10**40, "number '1000"),
        ({"a": 1}, "unknown type 'a'"),
        ("x" * (1 << 20), "bytes is longer than"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_crafted_calls(make, argument, says):
    refused(make, with_arguments(argument), FormatError, says)


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x", "not JSON"),
        ("{", "not JSON"),
        ("\x00", "not JSON"),
        ("[]", "damaged"),
        ("null", "damaged"),
        ("{}", "damaged"),
        ('{"version": 1}', "damaged"),
        ("[" * 100_000, "nests deeper than"),
        ('{"version": 99}', "format 99.*newer pythonop"),
    ],
    ids=lambda value: value[:16],
)
def test_text_that_is_no_call(make, text, says):
    refused(make, tampered(call=text), FormatError, says)


@pytest.mark.parametrize("make", ENGINES)
def test_names_are_shown_escaped(make):
    for name in ("evil:\x1b[31mRed", "evil:<script>\nalert(1)", "evil:\u202egnp", "evil:" + "x" * 10_000):
        model = tampered(name=name)
        model.graph.node[0].name = "op0\x1b]0;title\x07"
        text = refused(make, model, (TrustError, FormatError), "not allowed|damaged|cannot be imported")
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "\n" not in text
        assert len(text) < 1000


def test_a_plain_session_refuses_too():
    with pytest.raises(Exception, match=r"TrustError.*which it is not") as caught:
        onnxruntime.InferenceSession(tampered(name="os:system").SerializeToString(), session_options(ALLOW))
    assert not isinstance(caught.value, PythonopError)  # as SECURITY.md says


def test_a_gradient_node_resolves_nothing():
    model = tampered(training(record(F.SavesInput, X)))
    next(a for a in model.graph.node[1].attribute if a.name == "name").s = b"os:system"
    session = inference_session(model, ALLOW)
    with pytest.raises(PythonopError, match=r"belongs to tests.zoo.functions:SavesInput"):
        session.run(None, {"x0": X.detach().numpy(), "g0": np.ones((2, 4), np.float32)})
    assert len(session.store) == 0


def test_a_gradient_node_of_another_arity():
    model = training(record(F.SavesInput, X))
    grad = model.graph.node[1]
    flags = next(a for a in grad.attribute if a.name == "input_tensor_requires_grads")
    flags.ints.append(1)
    grad.input.insert(2, "g0")
    with pytest.raises(RunError, match=r"op0_grad.*damaged"):
        inference_session(model, ALLOW).run(None, {"x0": X.detach().numpy(), "g0": np.ones((2, 4), np.float32)})


def test_a_node_with_too_many_or_too_few_inputs():
    for inputs in ([], ["x0", "x0"], ["x0"] * 40):
        model = forward(record(F.SavesInput, X))
        del model.graph.node[0].input[:]
        model.graph.node[0].input.extend(inputs)
        with pytest.raises(FormatError, match=r"op0.*damaged"):
            inference_session(model, ALLOW)


# ------------------------------------------------------------------------------------------------------ external data


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize(
    "where", ["../secret", "/etc/hostname", "a/../../secret", "link", "linked/secret", "..\\secret", "C:\\secret", "folder", ""]
)
def test_external_data_outside_the_folder(make, where, tmp_path):
    folder = tmp_path / "model"
    (folder / "folder").mkdir(parents=True)
    secret = tmp_path / "secret"
    secret.write_bytes(b"\0" * 4096)
    os.symlink(secret, folder / "link")
    os.symlink(tmp_path, folder / "linked")
    path = folder / "model.onnx"
    path.write_bytes(external(where).SerializeToString())
    with pytest.raises(FormatError, match="external data"):
        make(path, ALLOW)


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize("as_path", [str, Path])
def test_external_data_beside_the_model(make, as_path, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    values = np.arange(8, dtype=np.float32)
    (tmp_path / "data" / "w.bin").write_bytes(values.tobytes())
    path = tmp_path / "model.onnx"
    path.write_bytes(external("data/w.bin").SerializeToString())
    monkeypatch.chdir("/")
    y, *_ = make(as_path(path), ALLOW).run(None, {"x0": X.detach().numpy()})
    np.testing.assert_allclose(y, np.sin(X.detach().numpy() + values.reshape(2, 4)), rtol=1e-6)


def external(where):
    model = forward(record(F.SavesInput, X))
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[2, 4], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=where)
    tensor.external_data.add(key="length", value="32")
    model.graph.initializer.append(tensor)
    model.graph.node.insert(0, onnx.helper.make_node("Add", ["x0", "w"], ["sum"]))
    model.graph.node[1].input[0] = "sum"
    return model


def test_no_model_at_all(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\xff" * 100)
    for make in ENGINES:
        with pytest.raises(FormatError, match="no ONNX model"):
            make(path)
        with pytest.raises(FileNotFoundError):
            make(tmp_path / "missing.onnx")
        with pytest.raises(TypeError, match="a model is a path"):
            make(3)


def test_a_file_of_a_newer_format():
    model = forward(record(F.SavesInput, X))
    model.metadata_props.add(key="pythonop.version", value="99")
    for make in ENGINES:
        with pytest.raises(FormatError, match="newer pythonop"):
            make(model)


# --------------------------------------------------------------------------------------------------------------- fuzz

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda child: (
        st.lists(child, max_size=4)
        | st.dictionaries(st.text(max_size=8), child, max_size=3)
        | st.dictionaries(
            st.sampled_from(["$tensor", "$size", "$int", "$tuple", "$dict", "$enum", "$callable", "$ndarray", "$torchsize", "$slice"]),
            child,
            max_size=1,
        )
    ),
    max_leaves=12,
)
_NAME = st.sampled_from(
    [
        "tests.zoo.functions:SavesInput",
        "tests.zoo.functions:TwoInputs",
        "os:system",
        "tests.zoo.functions:Mode",
        "",
    ]
) | st.text(max_size=20)
_BASE = {**write_attributes(record(F.TwoInputs, X, X, 0.5))}
_ANY = _JSON | st.binary(max_size=4)


def _accepts(make):
    """Whatever the attributes say, the answer is a kernel or an error of ours."""
    try:
        return make()
    except PythonopError as caught:
        error = caught
    assert len(str(error)) < 5000
    return None


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from([*SPECS, *GRAD_SPECS]), _ANY, max_size=4), _NAME)
def test_fuzzed_attributes(changes, name):
    attributes = {**_BASE, "name": name, **changes}
    kernel = _accepts(lambda: PythonOp(attributes, Gate(ALLOW), ContextStore(), "op0"))
    assert kernel is None or kernel.function.__module__ == "tests.zoo.functions"
    _accepts(lambda: PythonOpGrad(attributes, ContextStore(), "op0"))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.fixed_dictionaries(
        {"version": st.sampled_from([1, 1, 1, 2, "1"]), "id": st.text(max_size=3), "args": st.lists(_JSON, max_size=4), "outputs": _JSON}
    )
)
def test_fuzzed_calls(data):
    data = {**data, "kwargs": {}, "args": [{"$tensor": 0}, {"$tensor": 1}, *data["args"]]}
    attributes = {**_BASE, "call": json.dumps(data), "input_convention": "dd" + "c" * (len(data["args"]) - 2)}
    attributes["input_requires_grads"] = [1, 1] + [0] * (len(data["args"]) - 2)
    _accepts(lambda: PythonOp(attributes, Gate(ALLOW), ContextStore(), "op0"))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 1),
    st.sampled_from(sorted({*SPECS, *GRAD_SPECS, KEPT_OUTPUTS, ABSENT_INPUTS} - {"name"})),
    st.lists(st.integers(-3, 30) | st.integers(-(1 << 62), 1 << 62), max_size=4),
    st.text(max_size=10),
)
def test_fuzzed_files_through_the_native_library(which, name, ints, text):
    model = training(record(F.TwoInputs, X, X, 0.5))
    node = model.graph.node[which]
    attribute = next((a for a in node.attribute if a.name == name), None)
    if attribute is None:
        attribute = node.attribute.add(name=name, type=onnx.AttributeProto.INTS)
    if attribute.type == onnx.AttributeProto.INTS:
        del attribute.ints[:]
        attribute.ints.extend(ints)
    elif attribute.type == onnx.AttributeProto.STRING:
        attribute.s = text.encode()
    elif attribute.type == onnx.AttributeProto.INT:
        attribute.i = (ints or [0])[0]
    session = _accepts_any(lambda: inference_session(model, ALLOW))
    if session is not None:
        _accepts_any(lambda: session.run(None, dict.fromkeys(("x0", "x1", "g0", "g1"), np.ones((2, 4), np.float32))))


def _accepts_any(call):
    try:
        return call()
    except PythonopError:
        return None
    except Exception as caught:
        error = caught
    assert "onnxruntime" in type(error).__module__, repr(error)  # its own checks of types and counts
    return None


def test_a_session_in_a_fresh_process_imports_only_what_is_allowed(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(forward(record(F.SavesInput, X)), path)
    code = (
        "import sys; from exporter.runtime.session import inference_session; from symbolics.errors import TrustError\n"
        "assert 'tests.zoo.functions' not in sys.modules\n"
        "try: inference_session(sys.argv[1], ['other.*'])\n"
        "except TrustError as error: assert 'tests.zoo.functions:SavesInput' in str(error)\n"
        "else: sys.exit('resolved')\n"
        "assert 'tests.zoo.functions' not in sys.modules\n"
        "inference_session(sys.argv[1], ['tests.zoo.functions:*']); assert 'tests.zoo.functions' in sys.modules\n"
    )
    done = python("-c", code, str(path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_an_input_of_another_type_than_its_flag_allows(engine):
    model = forward(record(F.SavesInput, X))
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    with pytest.raises(RunError, match="needs a gradient"):
        engine(model, ALLOW).run(None, {model.graph.input[0].name: np.ones((2, 4), np.int64)})


@pytest.mark.parametrize("engine", ENGINES)
def test_a_size_that_is_no_number(engine):
    model = tampered()
    attribute = next(a for a in model.graph.node[0].attribute if a.name == "call")
    attribute.s = attribute.s.replace(b'{"$tensor":0}', b'{"$size":0}', 1)
    with pytest.raises(RunError, match="a size comes as something else"):
        engine(model, ALLOW).run(None, {model.graph.input[0].name: X.detach().numpy()})
