"""The schemas of com.microsoft PythonOp and PythonOpGrad, and of pythonop PythonOpBackward and PythonOpTangent, registered with onnx.defs on import.

Strict: onnx.checker refuses a node without a required attribute. With type and shape inference: element types and
ranks come from the node's attributes; dimensions are what value_info says.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx_ir as ir
from onnx.defs import OpSchema

from symbolics.node.attributes import GRAD_SPECS, SPECS, wrong_tensors
from symbolics.node.backward import BACKWARD_SPECS
from symbolics.node.names import ORT_DOMAIN, OWN_DOMAIN, PYTHON_OP, PYTHON_OP_BACKWARD, PYTHON_OP_GRAD, PYTHON_OP_TANGENT

__all__ = ["register"]

# FLOAT8E5M2FNUZ is the last type of whole bytes: torch has no tensors of those behind it.
_ALL_TENSORS = [f"tensor({kind.name.lower()})" for kind in ir.DataType if 0 < kind <= ir.DataType.FLOAT8E5M2FNUZ]

_ONE, _OPTIONAL, _VARIADIC = (
    OpSchema.FormalParameterOption.Single,
    OpSchema.FormalParameterOption.Optional,
    OpSchema.FormalParameterOption.Variadic,
)


def _parameter(name: str, kind: str, text: str, option: OpSchema.FormalParameterOption) -> OpSchema.FormalParameter:
    variadic = option is _VARIADIC
    return OpSchema.FormalParameter(name, kind, text, param_option=option, is_homogeneous=not variadic, min_arity=0 if variadic else 1)


def _attributes(specs: Mapping[str, tuple[ir.AttributeType, bool, str]]) -> list[OpSchema.Attribute]:
    out = []
    for name, (kind, required, text) in specs.items():
        if name == "training_mode":
            out.append(OpSchema.Attribute(name, onnx.helper.make_attribute(name, 0), text))
        else:
            out.append(OpSchema.Attribute(name, getattr(OpSchema.AttrType, kind.name), text, required=required))
    return out


def _ints(context: onnx.shape_inference.InferenceContext, name: str) -> list[int]:
    attribute = context.get_attribute(name)
    return list(attribute.ints) if attribute is not None else []


def _set_outputs(context: onnx.shape_inference.InferenceContext, first: int, types: list[int], ranks: list[int]) -> None:
    if wrong_tensors(types, ranks):  # an exception here would end the inference of the whole model: who reads the node says what is wrong
        return
    for offset, (kind, rank) in enumerate(zip(types, ranks, strict=False)):
        if first + offset >= context.get_num_outputs():
            return
        # Fresh unknown dims: inference merges them with the symbolic dims that value_info already has.
        proto = onnx.TypeProto()
        proto.tensor_type.elem_type = kind
        proto.tensor_type.shape.SetInParent()
        for _ in range(rank):
            proto.tensor_type.shape.dim.add()
        context.set_output_type(first + offset, proto)


def _infer_forward(context: onnx.shape_inference.InferenceContext) -> None:
    if context.get_num_outputs():
        _set_outputs(context, 0, [onnx.TensorProto.INT64], [0])
    _set_outputs(context, 1, _ints(context, "output_tensor_types"), _ints(context, "output_tensor_ranks"))


def _infer_backward(context: onnx.shape_inference.InferenceContext) -> None:
    _set_outputs(context, 0, _ints(context, "output_tensor_types"), _ints(context, "output_tensor_ranks"))


def _infer_again(context: onnx.shape_inference.InferenceContext) -> None:
    types, ranks = _ints(context, "output_tensor_types"), _ints(context, "output_tensor_ranks")
    _set_outputs(context, 0, [*types, onnx.TensorProto.INT64, onnx.TensorProto.BOOL], [*ranks, 0, 1])


def _infer_tangent(context: onnx.shape_inference.InferenceContext) -> None:
    _set_outputs(context, 0, _ints(context, "output_tensor_types") * 2, _ints(context, "output_tensor_ranks") * 2)


_CONSTRAINTS = [("T", _ALL_TENSORS, "Any tensor."), ("TInt64", ["tensor(int64)"], "The context.")]


def _schemas() -> list[OpSchema]:
    forward = OpSchema(
        PYTHON_OP,
        ORT_DOMAIN,
        1,
        "One call of torch.autograd.Function.apply.",
        inputs=[_parameter("inputs", "T", "The tensor arguments of apply, in order.", _VARIADIC)],
        outputs=[
            _parameter("context", "TInt64", "Scalar: a handle of the context made by this run, for the matching PythonOpGrad.", _OPTIONAL),
            _parameter("outputs", "T", "The tensor outputs, in order.", _VARIADIC),
        ],
        type_constraints=_CONSTRAINTS,
        attributes=_attributes(SPECS),
        node_determinism=OpSchema.NodeDeterminism.NonDeterministic,  # type: ignore[call-arg]  # newer than the stub
    )
    backward = OpSchema(
        PYTHON_OP_GRAD,
        ORT_DOMAIN,
        1,
        "The backward of one PythonOp.",
        inputs=[
            _parameter("context", "TInt64", "The context output of the PythonOp.", _ONE),
            _parameter(
                "inputs",
                "T",
                "N gradients (backward's inputs, empty where absent), then the N forward outputs as control dependency.",
                _VARIADIC,
            ),
        ],
        outputs=[
            _parameter(
                "outputs", "T", "What backward returns, a place per tensor argument of apply; empty where no gradient is wanted.", _VARIADIC
            )
        ],
        type_constraints=_CONSTRAINTS,
        attributes=_attributes(GRAD_SPECS),
        node_determinism=OpSchema.NodeDeterminism.NonDeterministic,  # type: ignore[call-arg]  # newer than the stub
    )
    again = OpSchema(
        PYTHON_OP_BACKWARD,
        OWN_DOMAIN,
        1,
        "A backward that can be differentiated.",
        inputs=[
            _parameter("context", "TInt64", "The context of the PythonOp, or of the PythonOpBackward of one order less.", _ONE),
            _parameter(
                "inputs",
                "T",
                "N cotangents, empty where absent; then the M values whose gradients it gives, as control dependency, empty where there is none.",
                _VARIADIC,
            ),
        ],
        outputs=[
            _parameter(
                "outputs",
                "T",
                "M gradients, empty where none is wanted; then a context, where a gradient of this node reads it; then M booleans: which are there.",
                _VARIADIC,
            )
        ],
        type_constraints=_CONSTRAINTS,
        attributes=_attributes(BACKWARD_SPECS),
        node_determinism=OpSchema.NodeDeterminism.NonDeterministic,  # type: ignore[call-arg]  # newer than the stub
    )
    tangent = OpSchema(
        PYTHON_OP_TANGENT,
        OWN_DOMAIN,
        1,
        "One call of torch.autograd.Function.apply with tangents.",
        inputs=[
            _parameter(
                "inputs", "T", "The N tensor arguments of apply, then their N tangents; empty where an argument does not move.", _VARIADIC
            )
        ],
        outputs=[_parameter("outputs", "T", "The M tensor outputs, then their M tangents; empty where one is not wanted.", _VARIADIC)],
        type_constraints=_CONSTRAINTS[:1],
        attributes=_attributes(SPECS),
        node_determinism=OpSchema.NodeDeterminism.NonDeterministic,  # type: ignore[call-arg]  # newer than the stub
    )
    forward.set_type_and_shape_inference_function(_infer_forward)
    backward.set_type_and_shape_inference_function(_infer_backward)
    again.set_type_and_shape_inference_function(_infer_again)
    tangent.set_type_and_shape_inference_function(_infer_tangent)
    return [forward, backward, again, tangent]


def register() -> None:
    """Register the schemas with onnx.defs; schemas of the same name from elsewhere stay."""
    for schema in _schemas():
        if not onnx.defs.has(schema.name, schema.domain):
            onnx.defs.register_schema(schema)


register()
