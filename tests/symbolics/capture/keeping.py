"""Functions that keep state between calls, each in its own way, and Functions that only look so."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections import deque

import torch
from torch.autograd import Function

log = logging.getLogger(__name__)
cache: dict = {}
history: list = []
seen: set = set()
recent: deque = deque(maxlen=3)
space = types.SimpleNamespace(n=0)
buffer = torch.zeros(3)
table: dict = {}
library = None
scale = None
count = 0
level = 0
VERBOSE = False


class Meter:
    """A plain object with a method that changes it."""

    def __init__(self) -> None:
        self.n = 0
        self.sums: list = []

    def update(self, value):
        self.n += 1
        self.sums.append(value)


meter = Meter()


def bump(store, key):
    """Change what a caller gives."""
    store[key] = store.get(key, 0) + 1


def made(forward=None, backward=None, **attributes):
    """A class with these methods, at its name in this module."""
    return type("Made", (Function,), {"forward": staticmethod(forward or _same), "backward": staticmethod(backward or _back), **attributes})


def _same(ctx, x):
    return x * 1


def _back(ctx, g):
    return g


class InBackward(Function):
    """A class attribute."""

    scale = 1.0

    @staticmethod
    def forward(ctx, x):
        return x.relu()

    @staticmethod
    def backward(ctx, g):
        InBackward.scale = 0.5 * InBackward.scale
        return g * InBackward.scale


class Average(Function):
    """A tensor of the class."""

    running = torch.zeros(())

    @staticmethod
    def forward(ctx, x):
        Average.running = 0.9 * Average.running + 0.1 * x.abs().mean()
        return x / (1 + Average.running)

    @staticmethod
    def backward(ctx, g):
        return g


class Breaks(Function):
    """Sets a tensor of the class, and fails."""

    last = None

    @staticmethod
    def forward(ctx, x):
        Breaks.last = x.abs().mean()
        raise ValueError("no")

    @staticmethod
    def backward(ctx, g):
        return g


class Counted(Function):
    """An item of a dict of the module."""

    @staticmethod
    def forward(ctx, x):
        cache["n"] = cache.get("n", 0) + 1
        return x * cache["n"]

    @staticmethod
    def backward(ctx, g):
        return g


class Remembered(Function):
    """A memo: keyed by all that it is made of."""

    @staticmethod
    def forward(ctx, x):
        key = x.shape[-1], x.dtype
        if key not in table:
            table[key] = torch.arange(x.shape[-1], dtype=x.dtype)
        return x + table[key]

    @staticmethod
    def backward(ctx, g):
        if "ones" not in table:
            table["ones"] = torch.ones(1)
        return g * table["ones"]


class RememberedNumber(Function):
    """The same, of numbers, so that a graph can stand for it."""

    @staticmethod
    def forward(ctx, x):
        n = int(x.shape[-1])
        if n not in table:
            table[n] = n**-0.5
        return x * table[n]

    @staticmethod
    def backward(ctx, g):
        return g * table.setdefault("half", 0.5)


# Each as one half of a Function; what it changes.


def _item(ctx, x):
    cache["n"] += 1
    return x * cache["n"]


def _method(ctx, x):
    history.append(x)
    return x * len(history)


def _set(ctx, x):
    seen.add(x.shape)
    return x


def _deque(ctx, x):
    recent.appendleft(1.0)
    return x * recent[0]


def _namespace(ctx, x):
    space.n += 1
    return x * space.n


def _tensor(ctx, x):
    buffer.add_(1)
    return x * buffer


def _items(ctx, x):
    buffer[:2] = 1.0
    return x * buffer


def _out(ctx, x):
    torch.add(buffer, 1.0, out=buffer)
    return x * buffer


def _global(ctx, x):
    global count
    count += 1
    return x * count


def _setattr(ctx, x):
    setattr(space, "n", 3)  # noqa: B010
    return x * space.n


def _object(ctx, x):
    meter.update(1.0)
    return x * meter.n


def _helper(ctx, x):
    bump(cache, "n")
    return x * cache["n"]


def _alias(ctx, x):
    c = cache
    c["n"] = 1 + len(c)
    return x


def _nested(ctx, x):
    entry = cache.setdefault("a", {})
    entry["n"] = entry.get("n", 0) + 1
    return x


def _default(ctx, x, _store=[]):  # noqa: B006
    _store.append(1)
    return x * len(_store)


def _first(ctx, x):
    if "scale" not in cache:
        cache["scale"] = x.abs().max()
    return x / cache["scale"]


def _first_global(ctx, x):
    global scale
    if scale is None:
        scale = x.abs().max()
    return x / scale


def _counts_in_the_end(ctx, x):
    try:
        return x * space.n
    finally:
        space.n += 1


#: A half, and what it changes, by what comes behind the name of this module.
KEEPS = {
    _item: "cache",
    _method: "history",
    _set: "seen",
    _deque: "recent",
    _namespace: "space.n",
    _tensor: "buffer",
    _items: "buffer",
    _out: "buffer",
    _global: "count",
    _setattr: "space.n",
    _helper: "cache",
    _alias: "cache",
    _nested: "cache",
    _first: "cache",
    _first_global: "scale",
    _counts_in_the_end: "space.n",
}


@functools.lru_cache
def _table(n):
    return torch.arange(n)


def _load():
    global library
    if library is None:
        library = object()
    return library


@contextlib.contextmanager
def _deeper():
    global level
    level += 1
    try:
        yield
    finally:
        level -= 1


def _of_ctx(ctx, x):
    ctx.scale = 2.0
    ctx.cache = {}
    ctx.cache["n"] = 1
    return x


def _of_locals(ctx, x):
    cache = {}
    cache["n"] = 1
    history = [x]
    history.append(x)
    y = x.clone()
    y.add_(1)
    y[0] = 1
    return y


def _logs(ctx, x):
    log.info("called with %s", x.shape)
    return x + _table(x.shape[-1])


def _loads(ctx, x):
    _load()
    return x


def _returns_early(ctx, x, n=3):
    found = table.get(n)
    if found is not None:
        return x * found
    table[n] = float(n)
    return x * table[n]


def _tries(ctx, x):
    try:
        return x * table["k"]
    except KeyError:
        table["k"] = 2.0
    return x * table["k"]


def _puts_back(ctx, x):
    before = space.n
    space.n = 3
    try:
        return x * space.n
    finally:
        space.n = before


def _within(ctx, x):
    with _deeper():
        return x


def _switched_off(ctx, x):
    if VERBOSE:
        history.append(x)
    return x


def _changes_a_flag_of_torch(ctx, x):
    torch.backends.cudnn.benchmark = False
    return x


KEEPS_NOTHING = [
    _same, _of_ctx, _of_locals, _logs, _loads, _returns_early, _tries, _puts_back, _within, _switched_off, _changes_a_flag_of_torch,
]  # fmt: skip


MODE, LEVEL, LOUD, TALKS, KINDS = "", 1, False, False, (1, 2)


class Options:
    """Switches of a class; `at_once` is set again below."""

    trace = False
    at_once = False


def talk(on=True):
    global TALKS
    TALKS = on
    Options.at_once = on


def _compared(ctx, x):
    if MODE == "state":
        history.append(x)
        x = x * len(history)
    elif LEVEL > 2 or MODE in ("a", "b") or MODE in ["c"]:
        history.append(x)
    return x


def _not_loud(ctx, x):
    if not LOUD:
        return x * 2
    history.append(x)
    return x * len(history)


def _in_an_expression(ctx, x):
    LOUD and history.append(x)
    n = history.pop() if MODE == "state" else 1
    while LOUD:
        history.append(x)
    return x * n


def _of_a_class(ctx, x):
    mode = Options.trace
    if mode and x.sum() > 0:
        history.append(x)
    return x


def _renamed(ctx, x):
    mode = MODE
    if mode == "state":
        history.append(x)
    return x


def _set_elsewhere(ctx, x):
    if TALKS:
        history.append(x)
    return x


def _set_in_a_class(ctx, x):
    if Options.at_once is True:
        history.append(x)
    return x


def _other_side(ctx, x):
    if MODE == "":
        history.append(x)
    return x


def _of_an_argument(ctx, x, mode=""):
    if mode == "state" or x.dim() == 2:
        history.append(x)
    return x


def _of_a_namespace(ctx, x):
    if space.n == 5:
        history.append(x)
    return x


def _counted(ctx, x):
    n = LEVEL
    n += x.dim()
    if n > 1:
        history.append(x)
    return x


def _of_two_kinds(ctx, x):
    if KINDS != [1, 2]:  # a tuple is no list
        history.append(x)
    return x


DEAD = [_compared, _not_loud, _in_an_expression, _of_a_class, _renamed]
LIVE = [_set_elsewhere, _set_in_a_class, _other_side, _of_an_argument, _of_a_namespace, _counted, _of_two_kinds]
