"""What the JSON of `call` and of the metadata may become: any value another, tags exchanged, names that are traps, texts that no writer makes."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import onnx

__all__ = ["mutate_text", "texts_of"]

_FUNCTIONS, _FORBIDDEN = "tests.fuzz.functions", "tests.fuzz.forbidden"
TAGS = (
    "tensor size int float complex str bytes tuple dict ordereddict set frozenset slice range ellipsis numpy ndarray numpydtype dtype layout "
    "memory_format device torchsize enum namedtuple dataclass mapping callable builtin processgroup object list"
).split()
NAMES = [
    *(f"{_FUNCTIONS}:{name}" for name in (
        "Mode", "Bits", "Pair", "Config", "Bomb", "BombField", "BombDict", "BombTuple", "helper", "unsafe", "Result", "Output", "Scale", "Sine",
        "Takes", "TwoOut", "Raises", "Strings", "Marked", "RAN", "Bomb.__post_init__", "Mode.UP", "Mode._missing_", "np.load", "torch.load", "Nothing",
        "annotations", "Function", "collections.OrderedDict", "_Setter", "Bomb.__new__", "NamedTuple", "enum.Flag", "Any",
    )),
    *(f"{_FORBIDDEN}:{name}" for name in ("Identity", "Config", "")),
    "os:system", "subprocess:Popen", "builtins:eval", "this:s", "antigravity:geohash", "torch:load", "torch:tanh", "torch:set_default_dtype", "torch:ops",
    "torch:_C", "torch.nn:Module", "numpy:load", "tests.fuzz.functions", ":", "a:b:c", "tests.fuzz.functions:", "..:x", "tests..fuzz:x", "__main__:x", "",
    "x" * 600, "tests.fuzz.functions:Sine\n", "tests.fuzz.functions :Sine", "tests/fuzz/functions:Sine", "\u202e:x", "\x1b[2J:x",
]  # fmt: skip

# Texts that json.dumps does not write: each stands behind a mark until the text is done.
_RAW = [
    "1e400", "-1e400", "NaN", "Infinity", "-0", "1" * 5000, "1" * 100_000, "[" * 100_000, "[" * 60 + "1" + "]" * 60, "[" * 2000 + "]" * 2000,
    '{"a":' * 3000 + "1" + "}" * 3000, '{"$tuple":[' * 70 + "]}" * 70, '{"a":1,"a":2}', '{"$int":"1","$int":"2"}', '"\\ud800"', '"\\u0000"', "01", "'x'",
    "[" + "0," * 70_000 + "0]", '"' + "x" * 1_100_000 + '"', "/**/1", '"\t"', "", '{"$dict":[' + '[{"$tuple":[]},1],' * 3000 + "[1,1]]}",
]  # fmt: skip
_MARK = "@raw{}@"


def texts_of(model: onnx.ModelProto) -> list[tuple[str, Any]]:
    """Where a model has JSON: what it is, and the entry of metadata (functions have some, too) or the attribute that holds it."""
    found: list[tuple[str, Any]] = [(entry.key, entry) for entry in model.metadata_props if entry.key.startswith("pythonop.")]
    found += [(entry.key, entry) for function in model.functions for entry in function.metadata_props if entry.key.startswith("pythonop.")]
    stack: list[Any] = [model.graph, *model.functions]
    while stack:
        for node in stack.pop().node:
            for attribute in node.attribute:
                stack += [attribute.g] if attribute.HasField("g") else []
                stack += attribute.graphs
                if attribute.name == "call":
                    found.append(("call", attribute))
    return found


def mutate_text(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """One value of one text becomes another; what was done, None where the model has no text."""
    places = texts_of(model)
    if not places:
        return None
    kind = rng.choice(sorted({kind for kind, _ in places}))
    key, holder = rng.choice([place for place in places if place[0] == kind])
    call = key == "call"
    text = holder.s.decode("utf-8", "replace") if call else holder.value
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = text
    if rng.random() < 0.08:
        text, what = _broken(text, rng)
    else:
        what, data = _changed(data, rng)
        text = json.dumps(data)
        for i, raw in enumerate(_RAW):
            text = text.replace(json.dumps(_MARK.format(i)), raw)
    if call:
        holder.s = text.encode("utf-8", "surrogatepass")
    else:
        holder.value = text.encode("utf-8", "replace").decode()
    return f"json {key}: {what}"


def _broken(text: str, rng: random.Random) -> tuple[str, str]:
    at = rng.randint(0, len(text))
    out = rng.choice(["", text[:at], text + text, "null", "[]", "{}", "1", '""', "\x00", text.replace('"', "'"), "\ufeff" + text])
    return out, f"the text {out[:40]!r}"


def _walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, value
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _walk(item, (*path, key))


def _put(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    owner = data
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    return data


def _changed(data: Any, rng: random.Random) -> tuple[str, Any]:
    data = copy.deepcopy(data)
    places = list(_walk(data))
    path, value = rng.choice(places)
    done = rng.choice(
        ["value"] * 4 + ["tag", "tag", "tag", "name", "name", "trap", "trap", "trap", "trap", "other", "wrap", "delete", "key", "many"]
    )
    if done == "tag":
        tagged = [(p, v) for p, v in places if isinstance(v, dict) and len(v) == 1 and next(iter(v)).startswith("$")]
        if tagged:
            path, value = rng.choice(tagged)
            new = {f"${rng.choice(TAGS)}": next(iter(value.values()))}
        else:
            new = {f"${rng.choice(TAGS)}": value}
    elif done == "name":
        named = [(p, v) for p, v in places if isinstance(v, str) and re.fullmatch(r"[\w.]+:[\w.]+", v)]
        path, value = rng.choice(named or [(path, value)])
        new = rng.choice(NAMES)
    elif done == "trap":
        new = _trap(value, rng)
    elif done == "other":
        new = rng.choice(places)[1]
    elif done == "wrap":
        new = rng.choice([[value], {"$tuple": [value]}, {"$dict": [[value, value]]}, {"$set": [value, value]}, {"$slice": [value] * 3}])
    elif done == "many":
        new = [value] * rng.choice([2, 65, 1000]) if len(json.dumps(value)) < 1000 else [value, value]
    elif done in ("delete", "key") and path and isinstance(path[-1], str):
        owner: Any = data
        for key in path[:-1]:
            owner = owner[key]
        owner.pop(path[-1])
        if done == "key":
            key = rng.choice(
                ["", "x", "$x", "a.b", "a", "forward", "training", "_parameters", "weight", path[-1] + "x", "\x00", "é", rng.choice(NAMES)]
            )
            owner[key] = value
        return f"{done} {'/'.join(map(str, path))}", data
    else:
        new = _value(rng)
    return f"{done} {'/'.join(map(str, path))} := {str(new)[:80]}", _put(data, path, copy.deepcopy(new))


def _value(rng: random.Random) -> Any:
    return rng.choice([
        None, True, False, 0, 1, -1, 2, 2**31, -(2**31), 2**63, 2**64, 10**30, 0.5, 1e308, "", "..", "x", "\x00", "\ud800", "\u202e", [], {}, [[]],
        {"$tensor": rng.choice([0, 1, 2, -1, 99, 2**31, 2**70, True])}, {"$size": 0}, {"$int": "0x" + "f" * rng.choice([1, 100, 3000])},
        {"$x": 1}, {"$tensor": 0, "$size": 0}, {"": 1}, _MARK.format(rng.randrange(len(_RAW))), _MARK.format(rng.randrange(len(_RAW))),
    ])  # fmt: skip


def _trap(value: Any, rng: random.Random) -> Any:
    name, inner = rng.choice(NAMES), rng.choice([value, {"$tensor": 0}, 1, "UP", None, -1])
    return rng.choice([
        {"$enum": [name, rng.choice(["UP", "A", "name", "_missing_", 3, 99, -1, {"$int": "0x7fffffffffffffffff"}, inner])]},
        {"$enum": [f"{_FUNCTIONS}:Bits", rng.choice([0, 4, 99, -1, 2**70, {"$int": "0x" + "f" * 2000}, "A|B", None, True])]},
        {"$namedtuple": [name, [inner] * rng.choice([0, 1, 2, 3])]},
        {"$dataclass": [name, {"size": inner, "part": 2}]}, {"$dataclass": [name, {"loss": inner, "more": 1}]},
        {"$dataclass": [f"{_FUNCTIONS}:Bomb", {"size": inner, "part": inner}]}, {"$dataclass": [f"{_FUNCTIONS}:BombField", {"size": inner}]},
        {"$mapping": [f"{_FUNCTIONS}:BombDict", {"size": inner, "part": inner}]}, {"$namedtuple": [f"{_FUNCTIONS}:BombTuple", [1, inner]]},
        {"$mapping": [name, {"loss": inner}]}, {"$mapping": [f"{_FUNCTIONS}:Output", {"loss": inner, "__class__": 1}]},
        {"$callable": name}, {"$builtin": name}, {"$object": name}, {"$processgroup": rng.choice(["WORLD", name])},
        {"$ndarray": rng.choice([["<f4", [2**40], ""], ["<f4", [-1], "AAAAAA=="], ["<f8", [0, 2**62], ""], ["<c16", [1], "A" * 24], ["<f4", [], "AAAAAA=="],
                                 ["<f4", [1] * 65, "AAAAAA=="], ["|b1", [1], "Ag=="], ["<u3", [1], "AAAA"], ["O", [1], "AAAAAAAAAAA="]])},
        {"$numpy": ["<f4", rng.choice([[], [1], [0]]), rng.choice(["AAAAAA==", ""])]}, {"$bytes": rng.choice(["*", "AA", "A" * 1_000_000, 1])},
        {"$range": rng.choice([[0, 2**62, 1], [0, 1, 0], [0, {"$int": "0x" + "f" * 500}, 1], ["a", 1, 1], [True, 1, 1]])},
        {"$dtype": rng.choice(["float16", "load", "nn", "__name__", "", "x.y"])}, {"$device": rng.choice(["cpu", "cuda:999", "cpu:-1", "meta", "x"])},
        {"$torchsize": [inner, -1, 2**63, {"$size": 0}]}, {"$set": [inner, [1]]}, {"$dict": [[[1], inner]]}, {"$complex": [inner, 1]},
        {"$str": rng.choice(["7aCA", "/////w==", "AA=="])}, {"$slice": [inner] * rng.choice([1, 3, 4])},
    ])  # fmt: skip
