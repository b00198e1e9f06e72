"""Objects of plain data that an opaque module holds, as a configuration: written by their ``__dict__``, made without code of their class."""

from __future__ import annotations

import copy
import functools
import json
import re

import pytest
import torch
from torch import nn

import exporter
from symbolics.errors import ExportError, PythonopError, PythonopWarning, TrustError
from tests.zoo import modules as M

HERE = f"{__name__}:"
ALLOW = [f"{HERE}*"]
BOTH = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
ran: list[str] = []


class Inner:
    """A part of a configuration."""

    def __init__(self, power):
        ran.append("Inner")
        self.power = power


class Config:
    """A constructor, a ``__setattr__`` and a property: none of them runs when a file is opened."""

    def __init__(self, power):
        ran.append("Config")
        self.inner, self.kind, self.sizes, self.names = Inner(power), torch.float32, [1, 2], {"a": (1, None)}

    def __setattr__(self, key, value):
        ran.append("set")
        object.__setattr__(self, key, value)

    @property
    def power(self):
        return self.inner.power

    def method(self):
        return 1

    @staticmethod
    def of_the_class():
        return 1

    @functools.lru_cache  # noqa: B019
    def kept(self):
        return 1

    bound = functools.partialmethod(method)


class Configured(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.linear, self.config, self.many = nn.Linear(4, 4), config, [{"a": config}]

    @classmethod
    def by_class(cls, x):
        return x

    @staticmethod
    def plainly(x):
        return x

    @functools.lru_cache  # noqa: B019
    def kept(self, x):
        return x

    bound = functools.partialmethod(plainly)

    def forward(self, x):
        return self.linear(x).to(self.config.kind) ** self.config.power * self.many[0]["a"].sizes[1]


class Counting(Configured):
    def forward(self, x):
        self.config.inner.seen = True
        return super().forward(x)


class Deletes(Config):
    def __del__(self):
        ran.append("del")


class Reduces(Config):
    def __reduce__(self):
        return (print, ("x",))


class Calls(Config):
    def __call__(self):
        ran.append("call")


class Slots:
    __slots__ = ("power",)


class Listed(list):
    """No object of its ``__dict__`` alone."""


def exported(config, dynamo=True, module=Configured):
    torch.manual_seed(0)
    model = M.Net(module(config))
    return model, exporter.export(model, (torch.randn(3, 4),), dynamo=dynamo, opaque=[model.block])


@BOTH
def test_as_in_eager_and_made_without_its_code(dynamo):
    model, program = exported(Config(2.0), dynamo)
    del ran[:]
    loaded = exporter.load(program, allow=[f"{HERE}Config", f"{HERE}Inner", f"{HERE}Configured"])
    for x in (torch.randn(3, 4), torch.randn(3, 4)):
        (found, wanted) = (loaded(x), model(x))
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(
            torch.autograd.grad(found.square().sum(), loaded.get_parameter("block.linear.weight")),
            torch.autograd.grad(wanted.square().sum(), model.block.linear.weight),
        )
    assert not ran


def test_a_fresh_process_and_an_entry_of_the_model_itself():
    """``verify`` copies the model: an entry that is a module of it means the copy's."""
    model, _ = exported(Config(2.0))
    assert exporter.verify(model, (torch.randn(3, 4),), opaque=[model.block], steps=1).ok


def test_each_class_has_an_entry_of_its_own():
    _, program = exported(Config(2.0))
    for allow in (ALLOW, [*ALLOW, f"{HERE}Config"], [*ALLOW, f"{HERE}Inner"]):
        with pytest.raises(TrustError, match="which no pattern allows"):
            exporter.load(program, allow=allow)


def test_what_forward_sets_in_it_is_warned_of():
    config = Config(2.0)
    with pytest.warns(PythonopWarning, match=r"its forward sets config\.seen"):
        exported(config, module=Counting)
    assert not hasattr(config.inner, "seen")


class TwoInputs(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.first, self.block = nn.Linear(8, 8), block

    def forward(self, x):
        return self.block(self.first(x), x)


def test_a_configuration_of_transformers():
    """It is a dataclass that holds more than its fields."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8, hidden_dropout_prob=0.0)
    model, x = TwoInputs(Keeps(config)), torch.randn(3, 8)
    program = exporter.export(model, (x,), opaque=[model.block])
    names = [f"{HERE}Keeps", "transformers.models.bert.configuration_bert:BertConfig"]
    torch.testing.assert_close(exporter.load(program, allow=names)(x), model(x))


class Keeps(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x, y):
        return x * self.config.hidden_size + y * self.config.layer_norm_eps * (self.config._attn_implementation is None)


REFUSED = {
    "a __del__": (lambda: Deletes(2.0), "is of type .*Deletes"),
    "a __reduce__": (lambda: Reduces(2.0), "is of type .*Reduces"),
    "slots": (Slots, "is of type .*Slots"),
    "a list's own class": (Listed, "is of type .*Listed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_file_holds(case):
    make, match = REFUSED[case]
    with pytest.raises(ExportError, match=match):
        exported(make(), module=M.Holds)


def _with(config, **attributes):
    vars(config).update(attributes)
    return config


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"t": torch.ones(2)}, r"the attribute 't' of a .*Config is a tensor"),
        ({"method": abs}, r"the attribute 'method' of a .*Config stands in the place of a method"),
        ({"of_the_class": abs}, r"the attribute 'of_the_class' of a .*Config stands in the place of a method"),
        ({"m": nn.Linear(1, 1)}, r"the attribute 'm' of a .*Config holds a module"),
    ],
    ids=["a tensor", "a method", "a method of the class", "a module"],
)
def test_what_it_may_not_hold(attributes, match):
    with pytest.raises(ExportError, match=match):
        exported(_with(Config(2.0), **attributes))


def test_one_that_holds_itself():
    config = Config(2.0)
    vars(config)["me"] = config
    with pytest.raises(ExportError, match="does it hold itself"):
        exported(config)


def _tampered(proto, change):
    proto = copy.deepcopy(proto)
    node = next(node for node in proto.graph.node if node.op_type == "PythonOp")
    (attribute,) = (attribute for attribute in node.attribute if attribute.name == "call")
    call = json.loads(attribute.s)
    change(call["module"]["tree"]["attributes"]["config"]["$plain"], call)
    attribute.s = json.dumps(call).encode()
    return proto


def _name(name):
    return lambda plain, call: plain.__setitem__(0, name)


def _holds(name):
    return lambda plain, call: plain[1].update({name: {"$callable": "torch.nn.functional:relu"}})


def _stands_for(name):
    return lambda plain, call: call["module"]["tree"]["attributes"].update({name: {"$callable": "torch.nn.functional:relu"}})


TAMPERED = {
    "another class": _name("tests.zoo.modules:Setting"),
    "a class that runs programs": _name("subprocess:Popen"),
    "a class of modules": _name(f"{HERE}Configured"),
    "one with a __del__": _name(f"{HERE}Deletes"),
    "one with a __reduce__": _name(f"{HERE}Reduces"),
    "one with a __call__": _name(f"{HERE}Calls"),
    "one with slots": _name(f"{HERE}Slots"),
    "a list": _name(f"{HERE}Listed"),
    "a number": _name(3),
    "a method": lambda plain, call: plain[1].update(method=1),
    **{f"{name}, a method of another kind": _holds(name) for name in ("of_the_class", "kept", "bound")},
    **{f"{name}, a method of the module": _stands_for(name) for name in ("by_class", "plainly", "kept", "bound")},
    "a constructor": lambda plain, call: call["module"]["tree"]["attributes"].update(config={"$callable": f"{HERE}Config"}),
    "a name of Python's": lambda plain, call: plain[1].update(__class__=1),
    "a function": lambda plain, call: plain[1].update(kind={"$callable": "os:system"}),
    "no dict": lambda plain, call: plain.__setitem__(1, [1]),
    "too much": lambda plain, call: plain.append(1),
    "a tensor that is not there": lambda plain, call: plain[1].update(kind={"$tensor": 99}),
    "a tensor that is there": lambda plain, call: plain[1].update(kind={"$tensor": 0}),
    "among the arguments of the call": lambda plain, call: call["kwargs"].update(y={"$plain": list(plain)}),
    "in the place of the argument": lambda plain, call: call["args"].__setitem__(-1, {"$plain": list(plain)}),
}


@pytest.fixture(scope="module")
def proto():
    return exported(Config(2.0))[1].model_proto


@pytest.mark.parametrize("case", TAMPERED)
def test_a_tampered_file_is_refused_before_anything_runs(proto, case, monkeypatch):
    monkeypatch.setattr(Configured, "forward", lambda self, x: ran.append("forward"))
    del ran[:]
    every = [f"{HERE}{name}" for name in ("Config", "Inner", "Configured", "Deletes", "Reduces", "Calls", "Slots", "Listed")]
    with pytest.raises(PythonopError):
        exporter.inference_session(_tampered(proto, TAMPERED[case]), allow=[*every, "tests.zoo.modules:*"])
    assert not ran


class Makes(nn.Module):
    """It holds a class, and calls it."""

    def __init__(self):
        super().__init__()
        self.kind = Inner

    def forward(self, x):
        return x ** self.kind(2).power if x.sum() > -1e9 else x


def test_a_class_that_is_called_has_an_entry_of_its_own(dynamo, tmp_path):
    x = torch.tensor([1.0, 3.0])
    model = nn.Sequential(Makes())
    exporter.export(model, (x,), dynamo=dynamo, opaque=[Makes]).save(tmp_path / "model.onnx")
    entry, module = f"{HERE}Inner.__init__", f"{HERE}Makes"
    for allow in ([module], [module, f"{HERE}*"], [module, f"{HERE}Inner"], [module, Inner]):
        with pytest.raises(TrustError, match=re.escape(f"pass allow=['{entry}'] if you trust its constructor")):
            exporter.load(tmp_path / "model.onnx", allow=allow)(x)
    assert exporter.load(tmp_path / "model.onnx", allow=[module, entry])(x).tolist() == [1.0, 9.0]
    assert exporter.verify(model, (x,), dynamo=dynamo, opaque=[Makes]).ok
