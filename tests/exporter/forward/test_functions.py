"""Names that no other process could open are said when the file is made."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import exporter
from exporter.files.trust import unregister
from tests.support import Calls


def made(module=__name__, qualname=None):
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    Local.__module__, Local.__qualname__ = module, qualname or Local.__qualname__
    return Local


def said(cls, recwarn, **options):
    exporter.export(Calls(lambda x: cls.apply(x) + cls.apply(x)), (torch.ones(2, requires_grad=True),), **options)
    return [str(each.message) for each in recwarn if "opened by another" in str(each.message)]


@pytest.mark.parametrize(
    ("module", "qualname", "why"),
    [
        ("__main__", "Local", "__main__ is another program there"),
        (__name__, None, "made inside of a function"),
        (__name__, "Nobody", "leads to something else under that name, or to nothing"),
    ],
)
def test_each_name_is_said_once(module, qualname, why, dynamo, recwarn):
    (message,) = said(made(module, qualname), recwarn, dynamo=dynamo)
    assert why in message and "exporter.register()" in message


def test_what_is_registered_or_needs_no_class_is_not_said(recwarn):
    cls = exporter.register(made("__main__", "Registered"))
    try:
        assert not said(cls, recwarn)
        assert not said(made(), recwarn, portable=True)
    finally:
        unregister("__main__:Registered")


def test_a_module_that_nobody_can_import_is_an_error(dynamo, monkeypatch):
    cls = made("01_train", "Local")
    monkeypatch.setitem(sys.modules, "01_train", types.SimpleNamespace(Local=cls))
    with pytest.raises(exporter.ExportError, match=r"01_train:Local cannot be opened by any process.*'01_train' is no name"):
        said(cls, [], dynamo=dynamo)
