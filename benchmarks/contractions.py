"""What onnxruntime takes for an Einsum, and for what an export writes in its place; ScatterElements and GatherElements by rows, likewise.

    python -m benchmarks.contractions [--runs 15]

One node each, float32, one thread; the forms take turns, and each figure is the median of the rounds. `symbolics.graph.contractions` has the
constants that the choice between forms is made with, and `symbolics.graph.rows` the forms of scatters.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from benchmarks._report import Figure, tell
from symbolics.graph.slow_operators import rewrite_slow_operators

#: As written / as it is: what is no quicker takes as long, but for the noise of a shared machine.
LIMIT = 1.25
#: Equation, shapes: of MACE and NequIP at 64 channels (836 edges, 64 atoms), of attention, of linear layers, of an outer product.
EINSUMS: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = (
    ("ca,cab->cab", ((836, 64), (836, 64, 1))),
    ("cab,cab->ca", ((836, 64, 1), (836, 64, 1))),
    ("dba,dbc->dbac", ((836, 64, 3), (836, 64, 1))),
    ("dbac,dba->dbc", ((836, 64, 3, 1), (836, 64, 3))),
    ("edb,eca->ecdab", ((836, 1, 5), (836, 64, 3))),
    ("ecdab,eca->edb", ((836, 64, 1, 3, 5), (836, 64, 3))),
    ("edab,ecad->ecb", ((836, 1, 3, 5), (836, 64, 3, 1))),
    ("acbd,cbfged->abfge", ((64, 3, 64, 16), (3, 64, 3, 16, 16, 16))),
    ("abfge,cbfged->acbd", ((64, 64, 3, 16, 16), (3, 64, 3, 16, 16, 16))),
    ("abd,abdc->abc", ((64, 64, 16), (64, 64, 16, 16))),
    ("zui,zuj,ijk->zuk", ((836, 32, 3), (836, 32, 3), (3, 3, 5))),
    ("bhqd,bhkd->bhqk", ((2, 8, 128, 64), (2, 8, 128, 64))),
    ("bqhd,bkhd->bhqk", ((2, 128, 8, 64), (2, 128, 8, 64))),
    ("bhqk,bkhd->bqhd", ((2, 8, 128, 128), (2, 128, 8, 64))),
    ("bnd,df->bnf", ((8, 128, 256), (256, 256))),
    ("nchw,cd->ndhw", ((4, 64, 28, 28), (64, 64))),
    ("i,j->ij", ((1000,), (1000,))),
    ("bij,bjk->bik", ((2000, 4, 4), (2000, 4, 4))),
    ("bij,bjk->bik", ((2000, 3, 3), (2000, 3, 3))),
    ("bi,bi->b", ((10000, 64), (10000, 64))),
    ("ij->ji", ((1000, 1000),)),
    ("bij->bj", ((100, 100, 100),)),
)
#: Rows, length of a row, how many rows are written to or read from.
ROWS = ((1564, 168, 100), (836, 2560, 64), (10000, 1, 500), (10000, 4, 500), (10000, 64, 500))


def _model(op_type: str, shapes: Sequence[Sequence[int]], **attributes: object) -> onnx.ModelProto:
    names = [f"x{number}" for number in range(len(shapes))]
    inputs = [onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in zip(names, shapes)]
    output = onnx.helper.make_tensor_value_info("y", 1, None)
    graph = onnx.helper.make_graph([onnx.helper.make_node(op_type, names, ["y"], **attributes)], "g", inputs, [output])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)


def _by_elements(op_type: str, rows: int, length: int, count: int) -> onnx.ModelProto:
    """A scatter of rows that adds, or a gather of rows, over an index that is expanded to each element."""
    info, node = onnx.helper.make_tensor_value_info, onnx.helper.make_node
    size = onnx.numpy_helper.from_array(np.array([rows, length]), "size")
    last = onnx.numpy_helper.from_array(np.array([1]), "last")
    inputs = [info("x0", 1, [count, length]), info("i", 7, [rows])]
    nodes = [node("Unsqueeze", ["i", "last"], ["column"]), node("Expand", ["column", "size"], ["index"])]
    if op_type == "ScatterElements":
        inputs.append(info("x1", 1, [rows, length]))
        nodes.append(node(op_type, ["x0", "index", "x1"], ["y"], axis=0, reduction="add"))
    else:
        nodes.append(node(op_type, ["x0", "index"], ["y"], axis=0))
    graph = onnx.helper.make_graph(nodes, "g", inputs, [info("y", 1, None)], [size, last])
    return onnx.shape_inference.infer_shapes(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9))


def compared(proto: onnx.ModelProto, feeds: dict[str, np.ndarray], runs: int) -> tuple[float, float, str]:
    """Milliseconds of a model as it is and without slow operators, and the operators of the latter.

    Raises:
        RuntimeError: The two give other results.
    """
    model = ir.from_proto(proto)
    rewrite_slow_operators(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    sessions = [
        onnxruntime.InferenceSession(each.SerializeToString(), options, providers=["CPUExecutionProvider"])
        for each in (proto, ir.to_proto(model))
    ]
    first, second = (session.run(None, feeds)[0] for session in sessions)
    if not np.allclose(first, second, rtol=1e-3, atol=1e-3 * float(abs(first).max())):
        raise RuntimeError(f"{proto.graph.node[0]}: other results")
    spent: list[list[float]] = [[], []]
    for _ in range(runs):
        for session, times in zip(sessions, spent):
            start = time.perf_counter()
            session.run(None, feeds)
            times.append(1e3 * (time.perf_counter() - start))
    words = " ".join(node.op_type for node in model.graph)
    return statistics.median(spent[0]), statistics.median(spent[1]), words


def main() -> int:
    """Run and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    draw = np.random.default_rng(0)
    figures = []
    for equation, shapes in EINSUMS:
        feeds = {f"x{number}": draw.standard_normal(shape).astype(np.float32) for number, shape in enumerate(shapes)}
        before, after, words = compared(_model("Einsum", shapes, equation=equation), feeds, runs)
        what = f"`{equation}` of {', '.join('x'.join(map(str, shape)) for shape in shapes)}"
        figures.append(
            Figure(f"{what}, as written / as it is", after / before, "ratio", LIMIT, runs, f"{before:.2f} to {after:.2f} ms: {words}")
        )
    for op_type in ("ScatterElements", "GatherElements"):
        for rows, length, count in ROWS:
            feeds = {"x0": draw.standard_normal((count, length)).astype(np.float32), "i": draw.integers(0, count, rows)}
            if op_type == "ScatterElements":
                feeds["x1"] = draw.standard_normal((rows, length)).astype(np.float32)
            before, after, words = compared(_by_elements(op_type, rows, length, count), feeds, runs)
            what = f"{op_type} of {rows} rows of {length}, to or from {count}"
            figures.append(
                Figure(f"{what}, as written / as it is", after / before, "ratio", LIMIT, runs, f"{before:.2f} to {after:.2f} ms: {words}")
            )
    return tell("contractions", figures)


if __name__ == "__main__":
    sys.exit(main())
