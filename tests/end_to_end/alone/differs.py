"""Where ours is not what torch.onnx.export alone makes, though that works: each with what is seen, and the reason."""

from __future__ import annotations

__all__ = ["DIFFERS"]

_OWN_INPUT = "args_0_orig"
_RETURNED = "a parameter or buffer keeps its name, as gradients are given out by it: what returns it has another"
_FORWARDS = "torch renames an input that forward returns as it is: ours has forward's name"
_NUMBERED = "torch names a result after the node that makes it: gradients are taken through other nodes than torch's fused one"
_CALLED = "torch names a result after the node that makes it: here that is the call of a Function, which torch writes out"
_NUMBER = "a number among the arguments is a constant, as on the other exporter; with input_names= it is an input, as in torch"
_HOOK = "the refusal names the hook on a gradient that would be lost"
_OPSET = "torch writes opset 18 where 13 was asked for, and says nothing that a program sees"

#: (model, whether on dynamo) -> (what `worse` says, a pattern; the reason).
DIFFERS: dict[tuple[str, bool], tuple[str, str]] = {
    ("embedding_max_norm", True): ("outputs .*'where_1'", _NUMBERED),
    ("embedding_bag", True): ("outputs .*'div'", _NUMBERED),
    ("embedding_bag_weights", True): ("outputs .*'scatter_add_2'", _NUMBERED),
    ("attention_fast_path", True): ("outputs .*'transpose_6'", _NUMBERED),
    ("buffer_none", True): (_OWN_INPUT, _FORWARDS),
    ("input_returned", True): (_OWN_INPUT, _FORWARDS),
    ("only_inputs_returned", True): (_OWN_INPUT, _FORWARDS),
    ("a_model_that_returns_its_only_input", True): ("input_orig", _FORWARDS),
    ("identity_between", True): ("input_orig", _FORWARDS),
    ("parameter_returned", True): ("outputs .*'w/returned'", _RETURNED),
    ("buffer_returned", True): ("outputs .*'b/returned'", _RETURNED),
    ("integer_argument", False): ("inputs ", _NUMBER),
    ("hooks_around_modules", True): ("outputs .*'view_1'", _NUMBERED),
    ("gradient_hook_on_a_value", True): ("the hook .*<lambda> on the gradient of a tensor.* a file cannot name it", _HOOK),
    ("gradient_hook_on_a_value", False): ("the hook .*<lambda> on the gradient of a tensor.* a file cannot name it", _HOOK),
    ("inside_reentrant_checkpoint", True): ("outputs .*'getitem_1'", _CALLED),
    ("compiled_submodule", True): ("outputs .*'mul_1'.*'mul_2'", _CALLED),
    ("opset_old", True): ("wrote opset 18 and cannot convert the model to 13", _OPSET),
}
