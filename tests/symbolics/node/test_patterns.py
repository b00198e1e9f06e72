"""One pattern language for inline= and allow=: what each spelling means on either side."""

from __future__ import annotations

import re

import pytest
import torch

import exporter
from exporter.files.trust import Gate
from symbolics.node.opaque import Opaque
from symbolics.node.operators import Operator
from symbolics.node.patterns import Patterns


def _class(name):
    module, _, qualname = name.partition(":")
    return type(qualname.rpartition(".")[2], (), {"__module__": module, "__qualname__": qualname})


FN = "mypkg.ops:Fn"
# spelling, name, what inline= says, what allow= says: alike, but for what stands below the line
SPELLINGS = [
    ("mypkg.ops:Fn", FN, True, True),
    ("mypkg.ops:*", FN, True, True),
    ("mypkg.ops:F?", FN, True, True),
    ("mypkg.*:Fn", FN, True, True),
    ("mypkg.*:Fn", "mypkg:Fn", True, True),
    ("mypkg.o*:[EF]n", FN, True, True),
    ("mypkg.ops", FN, True, True),
    ("mypkg.o*", FN, True, True),
    ("mypkg.*", FN, True, True),
    ("mypkg.*", "mypkg:Fn", True, True),
    ("mypkg.*", "mypkg.deep.er:Fn", True, True),
    ("mypkg.ops.Fn", FN, True, True),
    ("mypkg.ops.Outer.Fn", "mypkg.ops:Outer.Fn", True, True),
    ("mypkg", "mypkg:Fn", True, True),
    ("mypkg.ops:Outer.*", "mypkg.ops:Outer.Fn", True, True),
    ("mypkg.ops:Fn", "mypkg.ops:Outer.Fn", False, False),
    ("mypkg.ops:fn", FN, False, False),
    ("mypkg", FN, False, False),
    ("mypkg.op", FN, False, False),
    ("mypkg.ops.F*", FN, False, False),  # wildcards without a colon are the module's
    ("mypkg.ops.*", "mypkg.opsy:Fn", False, False),
    ("mypkg:*", FN, False, False),
    ("other.*", FN, False, False),
    # A name in any package: inline= only.
    ("Fn", FN, True, False),
    ("Fn", "mypkg.ops:test.<locals>.Fn", True, False),
    # A wildcard in the name of the package: inline= only.
    ("F*", FN, True, None),
    ("mypkg*", FN, True, None),
    ("mypkg*:Fn", FN, True, None),
    ("mypkg*.ops:Fn", FN, True, None),
    ("m*:*", FN, True, None),
    ("mypk?.*:*", FN, True, None),
    ("mypk[f-h].*", FN, True, None),
    ("*:Fn", FN, True, None),
    ("*.ops:Fn", FN, True, None),
    ("*Fn", FN, True, None),
    ("[m]ypkg.*", FN, True, None),
]


@pytest.mark.parametrize(("text", "name", "inlined", "allowed"), SPELLINGS)
def test_a_spelling_means_the_same_on_both_sides(text, name, inlined, allowed):
    assert Patterns([text]).matches(_class(name)) is inlined
    assert Patterns(text).match_name(name) is inlined
    if allowed is None:
        with pytest.raises(
            ValueError, match=rf"allow='{re.escape(text)}': a wildcard in a package's name .* in full: 'mypkg\.\*' or 'mypkg:\*'"
        ):
            Gate([text])
    else:
        assert Gate([text]).allows(name) is allowed


@pytest.mark.parametrize("option", ["inline", "allow"])
@pytest.mark.parametrize("text", ["", ":", ":Fn", "mypkg.ops:"])
def test_a_part_is_missing(option, text):
    with pytest.raises(exporter.PythonopError, match=rf"{option}='{text}': a pattern .* as in 'mypkg\.\*'"):
        Patterns(text, option)


def test_classes():
    class Fn:
        pass

    first, second = _class(FN), _class(FN)
    assert Patterns([first, Fn]).matches(first)
    assert not Patterns([first]).matches(second)
    assert Gate(first).allows(FN)
    for option, kinds in (("inline", "Function classes"), ("allow", "classes, functions")):
        for items in ([3], 3, [Fn, 3]):
            with pytest.raises(TypeError, match=f"{option}= takes {kinds} and patterns like 'mypkg.ops:\\*', not int"):
                Patterns(items, option)
    assert Patterns([len], "allow").items == [len]
    with pytest.raises(TypeError, match="inline= takes Function classes .* not builtin_function_or_method"):
        Patterns([len])


def test_install_checks_its_entries_before_it_patches():
    from exporter.forward import hook

    for inline in (3, [3], [len]):
        with pytest.raises(TypeError, match="inline= takes Function classes"):
            hook.install(inline=inline)
        assert hook._open_hooks == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mypkg.ops:Scal", "did you mean mypkg.ops:Scale"),
        ("mypkg.opps", "did you mean mypkg.ops:Scale"),
        ("Scales", "did you mean mypkg.ops:Scale"),
        ("mypkg.ops:Sc*l", "did you mean mypkg.ops:Scale"),
        ("else.where:Thing", "it met mypkg.ops:Scale, mypkg.other:Gather"),
    ],
)
def test_a_pattern_that_means_nothing_names_near_ones(text, why):
    patterns = Patterns(["mypkg.other", text])
    for name in ("mypkg.ops:Scale", "mypkg.other:Gather"):
        patterns.matches(_class(name))
    with pytest.raises(exporter.PythonopError) as caught:
        patterns.check_met()
    assert f"inline='{text}' means none" in str(caught.value)
    assert why in str(caught.value)


def test_each_entry_must_mean_something():
    own = _class(FN)
    patterns = Patterns(["mypkg.*", "Fn", own])
    assert not patterns.matches(_class("else:Where"))
    for left, met in [("mypkg.*", _class(FN)), (FN, own)]:  # the first has the name of the second and is another class
        with pytest.raises(ValueError, match=f"inline='{re.escape(left)}' means none"):
            patterns.check_met()
        assert patterns.matches(met)
    patterns.check_met()
    Patterns().check_met()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Doubles(torch.nn.Module):
    def forward(self, x):
        return Double.apply(x)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_an_export_whose_inline_means_nothing_is_refused(dynamo):
    x = torch.ones(3)
    with pytest.raises(ValueError, match=rf"inline='Doubel' means none .* did you mean {__name__}:Double\?"):
        exporter.export(Doubles(), (x,), dynamo=dynamo, inline=["Doubel"])
    with exporter.hook(inline=[Double]) as handle:  # of several exports under one hook, one is enough
        torch.onnx.export(torch.nn.Linear(3, 3), (x,), dynamo=True)
        torch.onnx.export(Doubles(), (x,), dynamo=True)
    assert [node.op_type for node in handle.program.model.graph] == ["Mul"]
    with pytest.raises(ValueError, match="it met none at all"):
        exporter.export(torch.nn.Linear(3, 3), (x,), dynamo=dynamo, inline="mypkg.*")


def test_opaque_sorts_its_entries():
    """opaque=: operators by name or object, the word for all that are missing, and what is called."""
    net = torch.nn.Linear(1, 1)
    found = Opaque(["missing", "aten::linalg_*", torch.ops.aten.isclose, torch.ops.aten.add.Tensor, torch.nn.Linear, net, "mypkg:f", len])
    assert found.missing
    assert found.operators.items == ["aten::linalg_*", "aten::isclose", "aten::add.Tensor"]
    assert found.calls.items == [torch.nn.Linear, net, "mypkg:f", len]
    assert Opaque("missing").missing and not Opaque().missing and not Opaque(None)
    assert Opaque(net).calls.matches(torch.nn.Linear, net) and not Opaque(net).calls.matches(torch.nn.Linear, torch.nn.Linear(1, 1))
    operators = Opaque(["aten::linalg_*", "aten::add.Tensor"]).operators
    meant = [torch.ops.aten.linalg_eigh.default, torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar, torch.ops.aten.inverse.default]
    assert [operators.matches(Operator.of(each)) for each in meant] == [True, True, False, False]
    operators.check_met()
