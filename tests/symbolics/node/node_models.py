"""Models of one PythonOp made by hand, for the tests that need no exporter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import onnx
import onnx_ir as ir

import symbolics.node.schema
import symbolics.node.torch_arguments  # noqa: F401  adds torch's types
from symbolics.node.attributes import ir_attributes, python_op_grad, write_attributes
from symbolics.node.call import AutogradCall
from symbolics.node.containers import Slot
from symbolics.node.names import MARK_DOMAIN, MARK_OP, ORT_DOMAIN, PYTHON_OP

FLOAT = int(ir.DataType.FLOAT)


def call_of(*args: Any, outputs: Any = Slot(0), **fields: Any) -> AutogradCall:
    """A call with the flags and types that its slots need; float matrices everywhere, int64 scalars for sizes."""
    kwargs = fields.get("kwargs", {})
    call = AutogradCall(id="0", name="pkg.mod:Fn", args=args, outputs=outputs, **fields)
    from symbolics.node.containers import slots

    inputs, results = slots((*args, *kwargs.values())), call.output_slots
    sizes = [slot.kind == "size" for slot in inputs]
    given = {
        "input_types": tuple(int(ir.DataType.INT64) if size else FLOAT for size in sizes),
        "input_ranks": tuple(0 if size else 2 for size in sizes),
        "input_requires_grads": tuple(not size for size in sizes),
        "output_types": tuple(FLOAT for _ in results),
        "output_ranks": tuple(2 for _ in results),
        "output_requires_grads": tuple(True for _ in results),
    }
    return replace(call, **{key: value for key, value in given.items() if key not in fields})


def model_of(
    call: AutogradCall,
    *,
    gradient: bool = False,
    context: str = "",
    marks: int = 0,
    attributes: Sequence[ir.Attr] | None = None,
    opset: int = 18,
) -> ir.Model:
    """A checked model of one PythonOp, with its PythonOpGrad when asked, and that many stop-gradient marks."""
    inputs = [
        ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType(kind)), shape=ir.Shape([None] * rank))
        for i, (kind, rank) in enumerate(zip(call.input_types, call.input_ranks, strict=True))
    ]
    node = ir.Node(
        ORT_DOMAIN,
        PYTHON_OP,
        inputs,
        attributes or ir_attributes(write_attributes(call, lambda _: None)),
        num_outputs=1 + len(call.output_types),
        name="op",
    )
    node.outputs[0].name = context or ("ctx" if gradient else "")
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.INT64), ir.Shape([])
    outputs = list(node.outputs[1:])
    for i, (value, kind, rank) in enumerate(zip(outputs, call.output_types, call.output_ranks, strict=True)):
        value.name, value.type, value.shape = f"y{i}", ir.TensorType(ir.DataType(kind)), ir.Shape([None] * rank)
    nodes, results = [node], list(outputs)
    for i in range(marks):
        mark = ir.Node(MARK_DOMAIN, MARK_OP, [inputs[0]], name=f"mark{i}")
        mark.outputs[0].name, mark.outputs[0].type, mark.outputs[0].shape = f"m{i}", inputs[0].type, inputs[0].shape
        nodes.append(mark)
        results.append(mark.outputs[0])
    extra = []
    if gradient:
        extra = [ir.Value(name=f"y{i}_grad", type=v.type, shape=v.shape) for i, v in enumerate(outputs)]
        grad = python_op_grad(node, node.outputs[0], extra)
        for i, value in enumerate(grad.outputs):
            if value.name != "":
                value.name = f"x{i}_grad"
                results.append(value)
        nodes.append(grad)
    graph = ir.Graph([*inputs, *extra], results, nodes=nodes, opset_imports={"": opset, ORT_DOMAIN: 1}, name="g")
    model = ir.Model(graph, ir_version=10)
    if marks:
        from exporter.forward.finish import _mark_function

        graph.opset_imports[MARK_DOMAIN] = 1
        function = _mark_function(opset)
        model.functions[function.identifier()] = function
    return model


def node_of(model: ir.Model, op_type: str = PYTHON_OP) -> ir.Node:
    """The one node of a type."""
    (node,) = [n for n in ir.traversal.RecursiveGraphIterator(model.graph) if n.op_type == op_type]
    return node


def check(model: ir.Model) -> onnx.ModelProto:
    """onnx.checker with inference; returns the proto."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto
