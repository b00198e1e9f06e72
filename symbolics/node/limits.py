"""How much a file, and one call in it, may hold (docs/format.md). Writers refuse what readers would refuse."""

from __future__ import annotations

__all__ = [
    "MAX_BYTES",
    "MAX_CALLS",
    "MAX_DEPTH",
    "MAX_EQUAL_HASHES",
    "MAX_EXPANDED",
    "MAX_INT_BITS",
    "MAX_ITEMS",
    "MAX_NESTED",
    "MAX_RANK",
    "MAX_UNROLLED",
]

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_ITEMS = 1 << 16
MAX_INT_BITS = 1 << 13
#: Keys of one dict or set that have the same hash: each is compared with all others.
MAX_EQUAL_HASHES = 64

#: Dims of a tensor: neither torch nor onnxruntime has more.
MAX_RANK = 64
#: How deep functions of a model may call one another.
MAX_CALLS = 64
#: Nodes that the calls of functions in a model may stand for, all calls expanded: files of a few lines could say a billion.
MAX_EXPANDED = 1 << 16
#: Nodes in bodies inside two others and deeper, each counted once for each further body around it: onnx_ir's error writes a node down as often.
MAX_NESTED = 1 << 16
#: Elements of a constant, or parts, that a gradient rule writes down because an attribute or a declared shape says so many.
MAX_UNROLLED = 1 << 16
