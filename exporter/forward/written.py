"""A net under the translation of portable Functions: what their nodes compute on the example, beside the graph that they are translated from.

`symbolics.portable.proof` has compared that graph with eager mode. Here are found operators that torch.onnx writes as other ones.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from exporter.runtime.tensors import to_array, to_tensor
from symbolics.node.dtypes import HALVES, as_real
from symbolics.node.names import MARK_DOMAIN
from symbolics.portable.joint import Joint, Untraceable

__all__ = ["check_written"]

#: How far an element may be off, in parts of the largest of its tensor. Rounding is far below; what is another operator, above.
_NEAR, _NEAR_OF_HALVES = 1e-2, 1e-1


def check_written(model: ir.Model, joint: Joint) -> None:
    """Compare a translated call with the graph that it was translated from; nothing happens where onnxruntime is not installed, or cannot run it.

    Other kernels round otherwise, and what rounds, compares or sorts may then jump: so a tensor counts as another one where most of its
    elements are off, and are so once more beside the example, where nothing is a tie.

    Args:
        model: The call in ONNX, its inputs and outputs in the order of the graph's.
        joint: The graph, with the values to run both on.

    Raises:
        Untraceable: They compute something else.
    """
    if joint.example is None or importlib.util.find_spec("onnxruntime") is None:
        return
    off: tuple[int, str, str] | None = None
    try:
        run = _session(model)
        for values in (joint.example, _beside(joint.example)):
            with torch.no_grad():
                expected = [as_real(result) for result in joint.graph(*values, *joint.constants)]
            found = run(values)
            off = _off(expected, found)
            if off is None:
                return
    except (
        Exception
    ):  # no kernel, a type that NumPy lacks, a view of what lies otherwise in memory: nothing that a file would be silent about
        return
    assert off is not None
    index, torchs, ours = off
    behind = joint.outputs + joint.kept
    name = f"output {index}" if index < joint.outputs else "what it keeps for its backward"
    name = f"the gradient of input {joint.gradients[index - behind]}" if index >= behind else name
    raise Untraceable(
        f"on the example its nodes in ONNX give {ours} in {name} where torch gives {torchs}: torch.onnx translates one of its operators wrongly "
        "(with other operators of torch's it is portable: docs/portable.md#make-a-function-portable)"
    )


def _session(model: ir.Model) -> Any:
    """What runs a model on values in the order of its inputs: tensors, or sizes as numbers."""
    import onnxruntime

    proto = ir.to_proto(model)
    for node in proto.graph.node:  # marks, which are nothing to values
        if node.domain == MARK_DOMAIN:
            node.CopyFrom(onnx.helper.make_node("Identity", node.input, node.output))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(values: Sequence[Any]) -> list[torch.Tensor]:
        arrays = [to_array(value) if isinstance(value, torch.Tensor) else np.asarray(value, np.int64) for value in values]
        return [to_tensor(array) for array in session.run(None, dict(zip(names, arrays, strict=True)))]

    return run


def _beside(values: Sequence[Any]) -> list[Any]:
    """The same with a little noise on what is a float."""
    generator = torch.Generator().manual_seed(0)
    made = list[Any]()
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            size = value.float().abs().nan_to_num(0.0, 0.0, 0.0).mean()
            value = value + (1e-2 * size * torch.randn(value.shape, generator=generator)).to(value.dtype)
        made.append(value)
    return made


def _off(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> tuple[int, str, str] | None:
    """The first result that is another one, by number, and both at the element that differs most; None where all are alike."""
    pairs = [(one.detach().double().flatten(), two.double().flatten()) for one, two in zip(expected, found, strict=True)]
    sizes = [float(one[one.isfinite()].abs().max()) if one.isfinite().any() else 0.0 for one, _ in pairs]
    for index, ((one, two), size, tensor, other) in enumerate(zip(pairs, sizes, expected, found, strict=True)):
        if tensor.shape != other.shape:
            return index, str(tuple(tensor.shape)), str(tuple(other.shape))
        apart = (one - two).abs()
        apart[(one == two) | (one.isnan() & two.isnan())] = 0.0
        apart[apart.isnan()] = torch.inf
        near = (_NEAR_OF_HALVES if tensor.dtype in HALVES else _NEAR) * size + 1e-4 * max(sizes)
        if 2 * int((apart > near).sum()) > len(apart):
            at = apart.argmax()
            return index, f"{float(one[at]):.6g}", f"{float(two[at]):.6g}"
    return None
