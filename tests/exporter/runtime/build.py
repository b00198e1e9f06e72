"""Small models with PythonOps, made by hand: these tests come before any exporter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch

import symbolics.node.schema
import symbolics.node.torch_arguments  # noqa: F401
from exporter.files.trust import name_of
from symbolics.node.attributes import ir_attributes, python_op_grad, write_attributes
from symbolics.node.call import Autocast, AutogradCall, OperatorOrigin
from symbolics.node.containers import Slot, fill
from symbolics.node.dtypes import DTYPES
from symbolics.node.names import ORT_DOMAIN, OWN_DOMAIN, PYTHON_OP, qualified_name
from symbolics.node.operators import Operator

ELEMENT_TYPES = {dtype: kind for kind, dtype in DTYPES.items()}


def record(cls: Any, *args: Any, id: str = "0", autocast: Autocast | None = None, **fields: Any) -> AutogradCall:
    """What an exporter records: the call with its tensors taken out, run once to see its outputs."""
    tensors: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return Slot(len(tensors) - 1)

    slotted = tuple(fill(value, take) for value in args)
    copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    again = [fill(v, lambda leaf: _no_leaf(copies[leaf.index]) if isinstance(leaf, Slot) else leaf) for v in slotted]
    result = cls.apply(*again)
    outputs: list[torch.Tensor] = []

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        outputs.append(leaf)
        return Slot(len(outputs) - 1)

    structure = fill(result, place)
    return AutogradCall(
        id=id,
        name=name_of(cls) or qualified_name(cls),
        args=slotted,
        outputs=structure,
        operator=OperatorOrigin(cls.schema, "") if isinstance(cls, Operator) else None,
        input_types=tuple(ELEMENT_TYPES[t.dtype] for t in tensors),
        input_ranks=tuple(t.dim() for t in tensors),
        input_requires_grads=tuple(t.requires_grad for t in tensors),
        output_types=tuple(ELEMENT_TYPES[t.dtype] for t in outputs),
        output_ranks=tuple(t.dim() for t in outputs),
        output_requires_grads=tuple(t.requires_grad for t in outputs),
        autocast=autocast or Autocast(),
        **fields,
    )


def _no_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 1 if tensor.requires_grad else tensor  # a Function may change it in place


def value(name: str, kind: int, rank: int | None) -> ir.Value:
    shape = None if rank is None else ir.Shape([f"{name}_{i}" for i in range(rank)])
    return ir.Value(name=name, type=ir.TensorType(ir.DataType(kind)), shape=shape)


def python_op(call: AutogradCall, inputs: Sequence[ir.Value], prefix: str, *, context: bool) -> ir.Node:
    """The node as an exporter writes it: typed outputs, an unnamed context where nobody reads it."""
    first = ir.Value(name=f"{prefix}_context" if context else "", type=ir.TensorType(ir.DataType.INT64) if context else None)
    outputs = [value(f"{prefix}_{i}", kind, None) for i, kind in enumerate(call.output_types)]
    return ir.Node(
        ORT_DOMAIN, PYTHON_OP, list(inputs), ir_attributes(write_attributes(call, name_of)), outputs=[first, *outputs], name=prefix
    )


def forward(call: AutogradCall, *, context: bool = False, repeat: int = 1) -> onnx.ModelProto:
    """A model of one PythonOp, or of a chain of them; ``x0``, ``x1``, ... are its inputs."""
    inputs = [value(f"x{i}", kind, rank) for i, (kind, rank) in enumerate(zip(call.input_types, call.input_ranks, strict=True))]
    nodes, current = [], list(inputs)
    for i in range(repeat):
        nodes.append(python_op(with_id(call, i), current, f"op{i}", context=context))
        current = [*nodes[-1].outputs[1:], *inputs[len(call.output_types) :]]
    outputs = [*nodes[-1].outputs[1:], *([node.outputs[0] for node in nodes] if context else [])]
    return finish(inputs, outputs, nodes)


def training(call: AutogradCall, *, repeat: int = 1, absent: Sequence[int] = ()) -> onnx.ModelProto:
    """Forward and backward in one graph: ``x<i>`` and ``g<i>`` in, the outputs and ``x<i>_grad`` out.

    With ``repeat`` the call is a chain through its first input and output.
    """
    inputs = [value(f"x{i}", kind, rank) for i, (kind, rank) in enumerate(zip(call.input_types, call.input_ranks, strict=True))]
    nodes, current = [], list(inputs)
    for i in range(repeat):
        nodes.append(python_op(with_id(call, i), current, f"op{i}", context=True))
        current = [*nodes[-1].outputs[1:], *inputs[len(call.output_types) :]]
    given = [i for i, flag in enumerate(call.output_requires_grads) if flag and i not in absent]
    seeds = {i: value(f"g{i}", call.output_types[i], call.output_ranks[i]) for i in given}
    gradients: list[ir.Value | None] = [seeds.get(i) for i in range(len(call.output_types))]
    backwards: list[ir.Node] = []
    for node in reversed(nodes):
        grad = python_op_grad(node, node.outputs[0], gradients)
        for i, output in enumerate(grad.outputs):
            if output.name is None:
                output.name = f"{node.name}_x{i}_grad"
        backwards.append(grad)
        gradients = [grad.outputs[0], *gradients[1:]]
    outputs = [*nodes[-1].outputs[1:]]
    for i, output in enumerate(backwards[-1].outputs):
        if output.name:
            output.name = f"x{i}_grad"
            outputs.append(output)
    return finish([*inputs, *seeds.values()], outputs, [*nodes, *backwards])


def with_id(call: AutogradCall, index: int) -> AutogradCall:
    return dataclasses.replace(call, id=f"{call.id}.{index}")


def finish(inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], nodes: Sequence[ir.Node]) -> onnx.ModelProto:
    for output in outputs:
        if output.name and output.name.endswith("context"):
            output.shape = ir.Shape([])
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 20, ORT_DOMAIN: 1, OWN_DOMAIN: 1}, name="test")
    return ir.to_proto(ir.Model(graph, ir_version=10))


def sandwich(cls: type, x: torch.Tensor) -> onnx.ModelProto:
    """Relu, half of it, the Function, Neg; and the gradient of all: buffers that onnxruntime uses again at once."""
    call = record(cls, x.detach().flatten()[:8].reshape((2, 4) if x.dim() == 2 else (8,)).requires_grad_())
    model = training(call)
    graph = model.graph
    op, grad = graph.node
    helper = onnx.helper
    del graph.node[:]
    op.input[0], op.output[1] = "scaled", "f"
    grad.input[1:] = ["negated_grad", "f"]
    grad.output[0] = "f_grad"
    before = [helper.make_node("Relu", ["x0"], ["relu"]), helper.make_node("Mul", ["relu", "half"], ["scaled"]), op]
    after = [
        helper.make_node("Neg", ["f"], ["y"]),
        helper.make_node("Neg", ["g0"], ["negated_grad"]),
        grad,
        helper.make_node("Mul", ["f_grad", "half"], ["half_grad"]),
        helper.make_node("Sign", ["relu"], ["step"]),
        helper.make_node("Mul", ["half_grad", "step"], ["x_grad"]),
    ]
    graph.node.extend([*before, *after])
    graph.initializer.append(helper.make_tensor("half", 1, [], [0.5]))
    del graph.output[:], graph.value_info[:]
    graph.output.extend([helper.make_tensor_value_info(name, 1, None) for name in ("y", "x_grad")])
    return model


def eager(cls: type, *args: Any, absent: Sequence[int] = ()) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor | None]]:
    """Outputs, the gradients fed, and the gradients of the tensor arguments, by PyTorch alone."""
    leaves: list[torch.Tensor] = []

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaves.append(leaf.detach().clone().requires_grad_(leaf.requires_grad))
        return _no_leaf(leaves[-1])

    result = cls.apply(*[fill(v, fresh) for v in args])
    outputs = [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor)]
    torch.manual_seed(5)
    roots = [t for i, t in enumerate(outputs) if t.requires_grad and i not in absent]
    seeds = [torch.randn(t.shape, dtype=torch.float64).to(t.dtype) for t in roots]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(
        torch.autograd.grad(roots, wanted, [seed.clone() for seed in seeds], allow_unused=True)
        if roots and wanted
        else [None] * len(wanted)
    )
    grads = [next(found) if leaf.requires_grad else None for leaf in leaves]
    grads = [torch.zeros_like(leaf) if leaf.requires_grad and g is None else g for leaf, g in zip(leaves, grads, strict=True)]
    return [t.detach() for t in outputs], seeds, grads
