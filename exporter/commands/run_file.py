"""What ``pythonop run`` does: run a file once, with given inputs or made-up ones, and say what came out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx

from exporter.files.proto import open_proto
from exporter.files.save import saving
from symbolics.errors import FormatError, RunError
from symbolics.text import shown

__all__ = ["Backend", "default_sizes", "feeds_of", "made_up_inputs", "run_feeds", "run_file", "several_feeds", "sizes_hint"]

Backend = Literal["auto", "onnxruntime", "reference"]


def run_file(
    path: str | Path,
    *,
    allow: Sequence[str] = (),
    inputs: Mapping[str, np.ndarray] | None = None,
    output: str | Path | None = None,
    engine: Backend = "auto",
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    times: int = 1,
    providers: Sequence[Any] | None = None,
    strict: bool = False,
) -> dict[str, Any]:
    """Run a file and describe its outputs.

    Args:
        path: The ONNX file.
        inputs: input name -> array. The others are random, of the shapes in the file.
        dims: Sizes of symbolic dimensions; default 2.
        seed: For the random inputs.
        allow, output, engine, times, providers, strict: As `run_feeds` takes them.

    Returns:
        What `run_feeds` does.

    Raises:
        RunError: As `run_feeds`, or there is no such input or dimension.
        FormatError, TrustError: As `exporter.inference_session`.
    """
    proto, _ = open_proto(path)
    feeds = feeds_of(proto, inputs or {}, dims or {}, seed)
    return run_feeds(path, proto, feeds, allow=allow, output=output, engine=engine, times=times, providers=providers, strict=strict)


def run_feeds(
    path: str | Path,
    proto: onnx.ModelProto,
    feeds: dict[str, np.ndarray],
    *,
    allow: Sequence[str] = (),
    output: str | Path | None = None,
    engine: Backend = "auto",
    times: int = 1,
    providers: Sequence[Any] | None = None,
    strict: bool = False,
) -> dict[str, Any]:
    """Run a file on arrays and describe its outputs.

    Args:
        path: The ONNX file.
        proto: What is in it.
        feeds: Of `feeds_of`: an array for each input.
        allow: Patterns that the file may name; see `exporter.files.trust.Gate`.
        output: Where the outputs go, as an .npz file.
        engine: "onnxruntime", "reference", or "auto": onnxruntime where it can run.
        times: How many runs; the last one's outputs are described.
        providers: As `exporter.inference_session` takes them.
        strict: A Function that has changed since the file was exported is an error, not a warning.

    Returns:
        A JSON-ready dict: ``engine``, ``seconds`` (median of the runs), ``inputs`` and ``outputs`` (lists of name,
        dtype, shape; outputs with min, max and mean), ``live_contexts``.

    Raises:
        RunError: The engine is not available, the output cannot be written, or, with ``strict``, a Function has changed.
        FormatError, TrustError: As `exporter.inference_session`.
    """
    from exporter.runtime.library import available
    from exporter.runtime.session import inference_session

    if times < 1:
        raise RunError(f"a file runs at least once, not {times} times")
    if engine == "auto":
        engine = "onnxruntime" if available(proto) is None else "reference"
    runner: Any
    if engine == "onnxruntime":
        runner = inference_session(path, allow, providers=providers, strict=strict)
    else:
        from exporter.runtime.reference import reference_evaluator

        runner = reference_evaluator(path, allow, strict=strict)
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        results = runner.run(None, feeds)
        seconds.append(time.perf_counter() - start)
    names = [value.name for value in proto.graph.output]
    if output is not None:
        arrays: dict[str, Any] = {name: np.asarray(result) for name, result in zip(names, results, strict=True)}
        with saving(RunError) as files:
            np.savez(files.open(output), **arrays)
    return {
        "engine": engine,
        "seconds": float(np.median(seconds)),
        "inputs": [_describe(name, array) for name, array in feeds.items()],
        "outputs": [{**_describe(name, array), **_statistics(array)} for name, array in zip(names, map(np.asarray, results), strict=True)],
        "live_contexts": len(runner.store),
    }


def _check_dims(proto: onnx.ModelProto, dims: Mapping[str, int]) -> None:
    """Refuse sizes of dimensions that no input has."""
    known = {dim.dim_param: None for value in proto.graph.input for dim in value.type.tensor_type.shape.dim if dim.dim_param}
    for name in dims:
        if name not in known:
            raise RunError(
                f"no input of the file has a dimension {shown(name)!r}: its symbolic dimensions are {', '.join(map(shown, known)) or 'none'}"
            )


def feeds_of(proto: onnx.ModelProto, inputs: Mapping[str, np.ndarray], dims: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """What a file is run with: these inputs, and `made_up_inputs` for those that are not given.

    Raises:
        RunError: There is no such input, or no such dimension.
        FormatError: An input has no type or shape.
    """
    _check_dims(proto, dims)
    feeds = made_up_inputs(proto, dims, seed)
    for name, array in inputs.items():
        if name not in feeds:
            raise RunError(f"the file has no input {shown(name)!r}: its inputs are {', '.join(map(shown, feeds)) or 'none'}")
        feeds[name] = array
    return feeds


def several_feeds(
    proto: onnx.ModelProto, inputs: Mapping[str, np.ndarray], dims: Mapping[str, int], runs: int
) -> list[dict[str, np.ndarray]]:
    """`feeds_of` with random numbers of its own for each run; one where nothing in it is random, as every run would be the same.

    Raises:
        RunError, FormatError: As `feeds_of`.
    """
    first = feeds_of(proto, inputs, dims, 0)
    if not any(name not in inputs and _is_random(array.dtype) for name, array in first.items()):
        return [first]
    return [first, *(feeds_of(proto, inputs, dims, seed) for seed in range(1, runs))]


def default_sizes(proto: onnx.ModelProto, inputs: Mapping[str, np.ndarray], dims: Mapping[str, int]) -> list[str]:
    """The symbolic dimensions of made-up inputs whose size nobody has said."""
    made_up = [value for value in _wanted(proto) if value.name not in inputs]
    named = {dim.dim_param: None for value in made_up for dim in value.type.tensor_type.shape.dim if dim.dim_param}
    return [name for name in named if name not in dims]


def sizes_hint(proto: onnx.ModelProto, inputs: Mapping[str, np.ndarray], dims: Mapping[str, int]) -> str:
    """What to say where a run fails that had sizes of nobody's choice; "" where all were said."""
    names = default_sizes(proto, inputs, dims)
    if not names:
        return ""
    several = (
        f"the open axes {', '.join(map(shown, names[:8]))}{', ...' if len(names) > 8 else ''}"
        if names[1:]
        else f"the open axis {shown(names[0])}"
    )
    return (
        f"  {several} had size 2, which a model need not take: give {'theirs' if names[1:] else 'another'} with --dim {shown(names[0])}=N"
    )


def _wanted(proto: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    """The inputs that no initializer gives."""
    given = {tensor.name for tensor in proto.graph.initializer}
    return (value for value in proto.graph.input if value.name not in given)


def _is_random(dtype: np.dtype) -> bool:
    """Whether made-up numbers of a type are random."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def made_up_inputs(proto: onnx.ModelProto, dims: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Random floats, zeros of every other type, one array per input that no initializer gives.

    Raises:
        FormatError: An input has no type or shape, or one that no array has.
    """
    random = np.random.default_rng(seed)
    out: dict[str, np.ndarray] = {}
    for value in _wanted(proto):
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not kind.elem_type:
            raise FormatError(f"the input {shown(value.name)} is no typed tensor: give it with --inputs")
        shape = [d.dim_value if d.HasField("dim_value") else dims.get(d.dim_param, 2) for d in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        try:
            out[value.name] = random.standard_normal(shape).astype(dtype) if _is_random(dtype) else np.zeros(shape, dtype)
        except (ValueError, MemoryError) as error:
            raise FormatError(
                f"no array of the shape {shape} can be made for the input {shown(value.name)}: give it with --inputs"
            ) from error
    return out


def _describe(name: str, array: np.ndarray) -> dict[str, Any]:
    return {"name": name, "dtype": str(array.dtype), "shape": list(array.shape)}


def _statistics(array: np.ndarray) -> dict[str, float]:
    if array.dtype.kind not in "fiub" or not array.size:
        return {}
    values = array.astype(np.float64)
    return {"min": float(values.min()), "max": float(values.max()), "mean": float(values.mean())}
