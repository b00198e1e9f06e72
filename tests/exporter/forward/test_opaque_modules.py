"""Modules that stay one node: outputs, gradients and state beside eager's, what a file cannot say, and whom it has to ask."""

from __future__ import annotations

import copy
import json
import threading
import warnings

import pytest
import torch
from torch import nn

import exporter
from exporter.files.trust import unregister
from symbolics.errors import ArgumentError, ExportError, FormatError, PythonopError, PythonopWarning, TrustError
from tests.support import nodes
from tests.zoo import modules as M

ALLOW = ["tests.zoo.modules:*", "torch.nn.modules.*"]
BOTH = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
SIZES = (3, 5)


def exported(model, dynamo, opaque=None, **options):
    """The file of a model whose module ``block`` is one node; its first dimension is open."""
    torch.manual_seed(0)
    opaque = [model.block] if opaque is None else opaque
    shapes = {"x": {0: torch.export.Dim("n", min=2)}}
    return exporter.export(model, (torch.randn(3, 4),), dynamo=dynamo, opaque=opaque, dynamic_shapes=shapes, **options)


def run(model, x):
    """Outputs, the gradients of the input and of the parameters, and the buffers afterwards."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    outputs = model(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(y.square().sum() for y in outputs).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return list(outputs), x.grad, gradients, dict(model.named_buffers())


def compare(model, program, allow=ALLOW):
    """A file gives what eager gives, at two sizes, one after the other."""
    loaded, model = exporter.load(program, allow=allow), copy.deepcopy(model)
    for size in SIZES:
        x = torch.randn(size, 4)
        torch.testing.assert_close(run(loaded, x), run(model, x), rtol=1e-5, atol=1e-5)


CASES = {
    "values decide how often": (M.Repeats, None),
    "a Function inside": (M.OwnGradient, None),
    "twice": (M.OwnGradient, M.twice),
    "once under no_grad": (M.OwnGradient, M.keeps),
    "containers and keywords": (M.Answers, M.answers),
    "tied": (M.Shares, None),
    "statistics": (M.Statistics, None),
    "a buffer written in place": (M.CountsInPlace, None),
    "rows": (M.Rows, None),
    "a spare layer": (M.Spare, None),
    "an adjoint method": (M.Adjoint, None),
    "recomputed": (M.Recomputes, None),
    "recomputed, twice": (M.Recomputes, M.twice),
    "a recurrent layer": (lambda: nn.LSTM(4, 4), M.within),
    "attention": (lambda: nn.MultiheadAttention(4, 2), M.within),
    "a transformer's layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), None),
}


@BOTH
@pytest.mark.parametrize("case", CASES)
def test_as_in_eager(case, dynamo):
    block, call = CASES[case]
    model = M.Net(block(), call)
    program = exported(model, dynamo)
    calls = nodes(program.model, "PythonOp")
    assert len(calls) == (2 if call in (M.twice, M.keeps) else 1)
    names = {name for name, _ in model.named_parameters()}
    assert names <= set(program.model.graph.initializers)
    compare(model, program)


@BOTH
def test_frozen_parameters_stay_frozen(dynamo):
    model = M.Net(M.Repeats())
    model.block.inner[0].weight.requires_grad_(False)
    program = exported(model, dynamo)
    compare(model, program)
    assert exporter.load(program, allow=ALLOW).get_parameter("block.inner.0.weight").requires_grad is False


@BOTH
def test_the_whole_model_and_a_module_inside_another(dynamo):
    """What is named inside of what is named belongs to it."""
    model = M.Net(M.Repeats())
    program = exported(model, dynamo, opaque=["tests.zoo.modules.Net", M.Repeats])
    (node,) = program.model.graph
    assert node.attributes["name"].as_string() == "tests.zoo.modules:Net"
    compare(model, program)


@BOTH
def test_a_way_that_only_other_values_take(dynamo):
    """Both layers have a gradient in the file: zeros where the run does not come by one, for which eager has None."""
    model = M.Net(M.Routes())
    loaded = exporter.load(exported(model, dynamo), allow=ALLOW)
    for sign in (1, -1):
        x = torch.full((3, 4), 5.0 * sign)
        (outputs, slope, found, _), (expected, want, gradients, _) = run(loaded, x), run(model, x)
        torch.testing.assert_close((outputs, slope), (expected, want))
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], torch.zeros_like(found[name]) if gradient is None else gradient)


def test_sizes_follow_open_ones():
    program = exported(M.Net(M.Rows()), True)
    assert [[str(n) for n in value.shape] for value in program.model.graph.outputs] == [["u0", "4"], ["2*n", "4"]]


@BOTH
def test_what_is_given_back_as_it_is(dynamo):
    """An identity changes nothing; its line is that of its caller."""
    model = M.Net(nn.Identity())
    program = exported(model, dynamo)
    compare(model, program)
    (node,) = program.opaque
    assert (node.module, node.source.partition(":")[0], node.reason) == ("block", "tests.zoo.modules", "opaque= names it")


@BOTH
def test_a_size_as_an_argument(dynamo):
    """A symbolic size reaches the module as the number that it is in a run."""
    model = M.Net(M.Counts(), lambda block, h: block(h.detach(), h.shape[0]) + h.sum())
    loaded = exporter.load(exported(model, dynamo), allow=ALLOW)
    for size in SIZES:
        x = torch.randn(size, 4)
        torch.testing.assert_close(loaded(x), model(x))


@BOTH
def test_a_fresh_process(dynamo):
    model, args = M.trains()
    report = exporter.verify(model, args, dynamo=dynamo, opaque="Repeats")
    assert report.ok, report


@BOTH
def test_training_steps(dynamo):
    """Parameters and running statistics move as eager's do."""
    torch.manual_seed(0)
    model, x, target = M.Net(M.Statistics()), torch.randn(6, 4), torch.randn(6, 4)
    step = exporter.export_training_step(
        model,
        (x,),
        loss=nn.functional.mse_loss,
        targets=(target,),
        optimizer="sgd",
        hyperparameters={"lr": 0.1},
        dynamo=dynamo,
        opaque=[M.Statistics],
    )  # AdamW would make steps of the rounding of a bias' gradient, which is 0 before a BatchNorm
    trainer, optimizer = exporter.Trainer(step, allow=ALLOW), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        trainer.step({"x": x, "target": target})
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()
    for name, value in trainer.state_dict().items():
        if name in model.state_dict():
            torch.testing.assert_close(torch.as_tensor(value), model.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("block", "parameter"), [(M.Shares, "block.a.weight"), (M.HalfOfPowers, "block.linear.weight")], ids=["tied", "half of the outputs"]
)
def test_gradients_of_gradients_and_calls_that_run_as_one(block, parameter):
    model = M.Net(block(), M.twice)
    loaded = exporter.load(exported(model, True), allow=ALLOW)

    def penalty(module):
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [x, dict(module.named_parameters())[parameter]])

    torch.testing.assert_close(penalty(loaded), penalty(model), rtol=1e-4, atol=1e-5)


def test_two_threads_at_once():
    """A call has the module for itself."""
    model = M.Net(M.Repeats())
    session = exporter.inference_session(exported(model, True).model_proto, allow=ALLOW)
    wrong = []

    def work(seed):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        expected = model(x).detach()
        for _ in range(50):
            (found,) = session.run(None, {"x": x.numpy()})
            if not torch.allclose(torch.from_numpy(found), expected, atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("block", [M.Adjoint, M.Recomputes, M.Statistics])
def test_large_tensors(block):
    """A context keeps no memory of large tensors; what a backward runs again reads them all the same."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(160, 160), block(160)), torch.randn(120, 160)
    loaded = exporter.load(exporter.export(model, (x,), opaque=block), allow=ALLOW)
    torch.testing.assert_close(run(loaded, x), run(model, x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("block", [M.Adjoint, M.Recomputes])
def test_forwards_in_any_order_with_their_backwards(block):
    """Each backward that runs the module again has the parameters of its own forward; a run without gradients changes nothing."""
    model = M.Net(block())
    loaded = exporter.load(exported(model, True), allow=ALLOW)
    x = [torch.randn(3, 4, requires_grad=True) for _ in range(3)]
    results = []
    for module in (loaded, model):
        with torch.no_grad():
            module(x[0])
        outputs = [module(each) for each in x]
        with torch.no_grad():
            module(x[1])
        results.append([torch.autograd.grad(outputs[i].square().sum(), [x[i], *module.parameters()]) for i in (1, 0, 2)])
    torch.testing.assert_close(*results)


def test_two_exports_are_one():
    model = M.Net(M.Repeats())
    assert exported(model, True).model_proto.SerializeToString() == exported(model, True).model_proto.SerializeToString()


def test_the_model_is_as_it_was():
    model = M.Net(M.Remembers())
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.warns(PythonopWarning, match="its forward sets last, which it may read in the next call"):
        program = exported(model, True)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    compare(model, program)


def test_random_numbers_are_warned_of():
    with pytest.warns(PythonopWarning, match="Sequential in module block: its forward draws random numbers"):
        exported(M.Net(nn.Sequential(nn.Linear(4, 4), nn.Dropout())), False)


def test_eager_is_not_asked():
    with warnings.catch_warnings():
        warnings.simplefilter("error", PythonopWarning)
        program = exported(M.Net(M.Statistics()), True, eager_check=False)
    assert len(nodes(program.model, "PythonOp")) == 1
    loaded = exporter.load(program, allow=ALLOW)
    assert loaded(torch.randn(3, 4)).shape == (3, 4)
    assert loaded.get_buffer("block.norm.running_mean").abs().sum() > 0


# --------------------------------------------------------------------------------------------------------- functions

FUNCTIONS = ["tests.zoo.modules:solve", "tests.zoo.modules:blend"]


@BOTH
def test_functions_and_the_modules_that_they_take(dynamo):
    model = M.Solves()
    program = exported(model, dynamo, opaque=["tests.zoo.modules:solve", M.blend])
    assert [node.op_type for node in program.model.graph] == ["PythonOp"] * 3
    assert {name for name, _ in model.named_parameters()} <= set(program.model.graph.initializers)
    compare(model, program, allow=FUNCTIONS)
    assert M.solve.__name__ == "solve" and not hasattr(M.solve, "__wrapped__")


@BOTH
def test_a_function_of_many_modules(dynamo):
    model, name = M.Applies(), "tests.zoo.modules:applied"
    compare(model, exported(model, dynamo, opaque=[name]), allow=[*ALLOW, name, "tests.zoo.modules:doubled"])


@BOTH
def test_functions_in_a_fresh_process(dynamo):
    torch.manual_seed(0)
    report = exporter.verify(M.Solves(), (torch.randn(3, 4),), dynamo=dynamo, opaque=FUNCTIONS)
    assert report.ok, report


def test_a_function_has_an_entry_of_its_own():
    program = exported(M.Solves(), True, opaque=FUNCTIONS)
    with pytest.raises(TrustError, match=r"tests\.zoo\.modules:solve where a callable should be, which no pattern allows"):
        exporter.load(program, allow=ALLOW)
    proto = program.model_proto
    for change in (_set("name", "tests.zoo.modules:Own"), lambda tree, call: call["args"].__setitem__(-1, {"$module": 1})):
        with pytest.raises(FormatError):
            exporter.load(tampered(proto, change), allow=FUNCTIONS)


def test_a_function_that_is_never_called():
    with pytest.raises(ArgumentError, match="opaque='tests.zoo.modules:within' means none"):
        exported(M.Net(M.OwnGradient()), False, opaque=[M.OwnGradient, "tests.zoo.modules:within"])


# ----------------------------------------------------------------------------------------------- what no file can say


class Local:
    """Nothing that a file can hold."""

    def __init__(self):
        self.lock = threading.Lock()


def hooked():
    block = M.Repeats()
    block.inner[0].register_forward_hook(lambda module, args, output: output * 2)
    return block


def parametrized():
    block = M.Repeats()
    nn.utils.parametrizations.weight_norm(block.inner[0])
    return block


REFUSED = {
    "a lambda": (lambda: M.Holds(lambda x: x), r"(?s)modules:Holds: its attribute 'held' is a function.*register\(module, name\)"),
    "an object": (lambda: M.Holds({"a": [Local()]}), r"its attribute 'held': the attribute 'lock' of a .*Local is of type _thread:lock"),
    "an open file": (lambda: M.Holds(open(__file__)), r"its attribute 'held' is of type _io:TextIOWrapper"),  # noqa: SIM115
    "a tensor": (lambda: M.Holds(torch.ones(2)), r"its attribute 'held' is a tensor and no buffer.*\n.*register_buffer"),
    "a module in a list": (
        lambda: M.Holds([nn.Linear(1, 1)]),
        r"its attribute 'held' holds a module of type .*Linear, which is no submodule",
    ),
    "a hook inside": (hooked, r"Linear \(its inner\.0\) has the hook hooked\.<locals>\.<lambda>.*\n.*handle\.remove"),
    "no tensor": (M.Silent, r"modules:Silent, .*: it returns no tensor"),
    "a gradient that a buffer keeps": (M.KeepsGradient, r"modules:KeepsGradient: .* in its buffer mean.*\n.*detach"),
    "a parametrization": (parametrized, r"\(its inner\.0\) has parametrizations.*\n.*remove_parametrizations"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_is_named(case):
    block, match = REFUSED[case]
    with pytest.raises(ExportError, match=match) as caught:
        exported(M.Net(block()), True)
    assert len(str(caught.value).splitlines()) <= 6


def test_an_entry_that_means_nothing():
    with pytest.raises(ArgumentError, match=r"opaque='OwnGradien' means none.*did you mean tests\.zoo\.modules:OwnGradient"):
        exported(M.Net(M.OwnGradient()), True, opaque=["OwnGradien"])


@BOTH
def test_a_registered_module(dynamo):
    """It is found by its name, and need not be written down; here and there it keeps its own tensors."""
    block = exporter.register(M.Holds(lambda x: x), "tests.held")
    try:
        model = M.Net(block)
        before = [parameter.clone() for parameter in block.parameters()]
        program = exported(model, dynamo)
        compare(model, program, allow=())
        torch.testing.assert_close(list(block.parameters()), before)
        exporter.register(M.Repeats(), "tests.held")
        with pytest.raises(PythonopError, match="tests.held"):
            exporter.load(program, allow=ALLOW)
    finally:
        from exporter.files.trust import unregister

        unregister("tests.held")


# ------------------------------------------------------------------------------------------------------------- trust


@pytest.fixture(scope="module")
def proto():
    return exported(M.Net(M.Repeats()), True).model_proto


def tampered(proto, change):
    """A copy of a file whose call says something else."""
    proto = copy.deepcopy(proto)
    node = next(node for node in proto.graph.node if node.op_type == "PythonOp")
    (attribute,) = (attribute for attribute in node.attribute if attribute.name == "call")
    call = json.loads(attribute.s)
    change(call["module"]["tree"], call)
    attribute.s = json.dumps(call).encode()
    return proto


def test_a_module_is_asked_for(proto):
    for allow in ((), ["tests.zoo.functions:*"], ["tests.zoo.modules:Setting"]):
        with pytest.raises(
            TrustError, match=r"tests\.zoo\.modules:Repeats where a subclass of torch\.nn\.Module should be, which is not allowed"
        ):
            exporter.load(proto, allow=allow)
    for allow in (["tests.zoo.modules:Repeats", "tests.zoo.modules:Setting"], ["tests.zoo.modules"]):
        exporter.load(proto, allow=allow)
    with pytest.raises(TrustError, match="Setting"):
        exporter.load(proto, allow=[M.Repeats])


def _set(*path):
    *place, key, value = path

    def change(tree, call):
        for part in place:
            tree = tree[part]
        tree[key] = value

    return change


def _layer(name, **attributes):
    return {"name": name, "training": True, "attributes": attributes, "parameters": {}, "buffers": {}, "modules": {}}


def _nested(depth):
    """Each holds the next one twice."""
    layer, path = _layer("torch.nn.modules.linear:Identity"), "inner" + ".a" * depth
    for _ in range(depth):
        layer = {**_layer("torch.nn.modules.container:Sequential"), "modules": {"a": layer, "b": path}}
        path = path.rpartition(".")[0]
    return layer


TAMPERED = {
    "another class": (_set("modules", "inner", "name", "torch.utils.data.dataset:Dataset"), TrustError),
    "a class that runs programs": (_set("modules", "inner", "name", "subprocess:Popen"), TrustError),
    "no class of modules": (_set("modules", "inner", "name", "tests.zoo.modules:Own"), TrustError),
    "a layer that torch lacks": (_set("modules", "inner", "name", "torch.nn.modules.linear:Linea"), FormatError),
    "a name of torch that is no layer": (_set("modules", "inner", "name", "torch.nn.modules.linear:math"), FormatError),
    "a root of another name": (_set("name", "tests.zoo.modules:Shares"), FormatError),
    "a function to call": (_set("attributes", "activation", {"$callable": "os:system"}), TrustError),
    "a function of the allowed module": (_set("attributes", "activation", {"$callable": "tests.zoo.modules:trains"}), TrustError),
    "a forward": (_set("attributes", "forward", {"$callable": "torch.nn.functional:relu"}), FormatError),
    "hooks": (_set("attributes", "_forward_hooks", 1), FormatError),
    "a method of torch": (_set("attributes", "_call_impl", {"$callable": "torch.nn.functional:relu"}), FormatError),
    "a layer with a method of the file's": (
        _set("modules", "inner", _layer("torch.nn.modules.conv:Conv2d", _conv_forward={"$callable": "torch.nn.functional:relu"})),
        FormatError,
    ),
    "a module in the place of the root": (_set("modules", "", _layer("torch.nn.modules.linear:Identity")), FormatError),
    "a module in the place of another": (_set("modules", "inner.0", _layer("torch.nn.modules.linear:Identity")), FormatError),
    "a constructor": (
        lambda tree, call: call["module"].update(function=True, tree=_layer("torch.nn.modules.container:ModuleList")),
        TrustError,
    ),
    "a constructor among the attributes": (_set("attributes", "activation", {"$callable": "tests.zoo.modules:Repeats"}), TrustError),
    "a constructor that is allowed as an object's": (
        _set("attributes", "activation", {"$callable": "tests.zoo.modules:Setting"}),
        TrustError,
    ),
    "a module inside itself": (_set("modules", "inner", ""), FormatError),
    "a few modules that stand for very many": (_set("modules", "inner", _nested(30)), FormatError),
    "an object that is no module": (lambda tree, call: call["module"].update(tree={"object": "tests.a_dict"}), TrustError),
    "a tensor that is not there": (_set("parameters", "gain", 99), FormatError),
    "a list that holds one": (_set("attributes", "steps", [{"$tensor": 99}]), FormatError),
    "a size among the attributes": (_set("attributes", "steps", {"$size": 0}), FormatError),
    "a module from nowhere": (_set("modules", "inner", "elsewhere"), FormatError),
    "no tree": (lambda tree, call: call["module"].update(tree={}), FormatError),
    "a number for a name": (_set("name", 3), FormatError),
    "an object": (lambda tree, call: call["module"].update(tree={"object": "nobody"}), TrustError),
    "a change of nothing": (lambda tree, call: call["module"].update(changes=[0]), FormatError),
    "more state": (lambda tree, call: call["module"]["state"].extend("ab"), FormatError),
    "another argument": (lambda tree, call: call["kwargs"].update(y=3), FormatError),
    "an operator's name": (lambda tree, call: call.update(module=None), TrustError),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_a_tampered_file_is_refused_before_anything_runs(proto, case, monkeypatch):
    change, error = TAMPERED[case]
    ran = []
    monkeypatch.setattr(M.Repeats, "forward", lambda self, x: ran.append(x))
    monkeypatch.setattr(M.Repeats, "__init__", lambda self: ran.append(self))
    exporter.register({}, "tests.a_dict")
    try:
        with pytest.raises(error):
            exporter.inference_session(tampered(proto, change), allow=[*ALLOW, "tests.zoo.modules:Repeats", "tests.zoo.modules:Setting"])
    finally:
        unregister("tests.a_dict")
    assert not ran
