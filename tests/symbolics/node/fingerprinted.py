"""Every kind of syntax whose tree could differ from one release of Python to another: test_fingerprints.py knows the digests."""
# ruff: noqa

from __future__ import annotations

import functools
from typing import Any

import torch

SCALE: float = 0.5
NAMES = {"a": (1, 2.5e-300, -3, 1j, b"\x00\xff", "é\u2028\U0001f600", ...)}
BIG = 10**50 + 123456789012345678901234567890


def decorated(f):
    @functools.wraps(f)
    def g(*a, **k):
        return f(*a, **k)

    return g


def helper(v: "int", *rest, key=SCALE, **kw) -> Any:
    """Doc
    indented"""
    t = [a * key for a in rest if a] + [*map(lambda q: q**2, rest)]
    d = {k: v for k, v in kw.items()}
    s = {1, 2, *rest}
    with open("x") as f, open("y"):
        pass
    try:
        (z := v + 1)
    except* ValueError as e:
        raise RuntimeError("x") from e
    match v:
        case {"a": 1, **more} if more:
            return more
        case [1, 2, *others] | (3 as others):
            return others
        case int(real=1) | None:
            ...
    return f"{v!r:>{key}} {'nested'} a{{b}} {v=} {t[1:2, ..., ::3]}tail{d}{s}", NAMES, BIG


class Base(torch.autograd.Function):
    factor = -0.0

    @staticmethod
    def vmap(info, dims, x):
        return x, dims


class One(Base):
    @staticmethod
    @decorated
    def forward(ctx, x, a=(1, 2), *, b=None):
        async def co():
            async with x as y:
                yield y
            async for i in x:
                await i

        def inner(n):
            nonlocal a
            global SCALE
            a = n
            del n
            assert a, f"{a}"
            while a:
                break
            else:
                return not a

        return helper(x, One.factor) @ x if x is not a else x[0] < 1 <= 2 != b

    backward = staticmethod(lambda ctx, g, /, *gs: (g, *gs))


class Two(One):
    @classmethod
    def forward(cls, ctx, x: int = 3) -> int:
        y: int
        y: int = x
        (y): int = 2
        y += cls.factor
        x.y: int = 4
        return super().forward(ctx, y)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.a = f"{inputs:{output}.{3}f}"

    @staticmethod
    def jvp(ctx, *t):
        return sum(u for u in t for v in u)
