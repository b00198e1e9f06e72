"""always_none: what the source of a backward says of its results."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.autograd.function import once_differentiable

from symbolics.capture.always_none import always_none


def literal(ctx, g):
    def inner():
        return g

    return inner() * 2, None


def bare(ctx, g):
    if g is None:
        return
    return None


def several(ctx, g):
    if g is None:
        return None, None
    return (g, None) if ctx.flag else (None, None)


def by_value(ctx, g):
    return g, g if ctx.flag else None


def by_name(ctx, g):
    result = None
    return g, result


def starred(ctx, g):
    return *[g] * 2, None


def short(ctx, g):
    return (g,)


def generator(ctx, g):
    yield None, None
    return None, None


once = once_differentiable(literal)


@functools.wraps(literal)
def wrapped(*args):
    return literal(*args)


CASES = {
    literal: (False, True), bare: (True, True), several: (False, True), by_value: (False, False), by_name: (False, False), starred: (False, False),
    short: (False, False), generator: (False, False), once: (False, True), wrapped: (False, True), torch.sin: (False, False), None: (False, False),
    (lambda ctx, g: (g, None)): (False, False),
}  # fmt: skip


@pytest.mark.parametrize("function", CASES)
def test_by_source(function):
    assert tuple(always_none(function, place) for place in (0, 1)) == CASES[function]


def test_without_source():
    names = {}
    exec("def backward(ctx, g):\n    return g, None", names)
    assert not always_none(names["backward"], 1)
