"""PythonOp, PythonOpGrad, PythonOpBackward and PythonOpTangent on onnx.reference: slow, and runs wherever onnx and torch are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import symbolics.node.schema  # noqa: F401  registers the operators
from exporter.errors import short
from exporter.files.proto import open_proto, reading
from exporter.files.steady import steady
from exporter.files.trust import Gate
from exporter.runtime.backward import PythonOpBackward as AgainKernel
from exporter.runtime.changed import changed_functions, say_changed
from exporter.runtime.kernels import PythonOp as ForwardKernel, PythonOpGrad as BackwardKernel
from exporter.runtime.mended_operators import MENDED, functions_in_order, refusal
from exporter.runtime.prepare import drop_unread_contexts
from exporter.runtime.store import ContextStore
from exporter.runtime.tangent import PythonOpTangent as TangentKernel
from exporter.runtime.tensors import to_array, to_tensor
from symbolics.errors import FormatError, PythonopError, RunError
from symbolics.node.attributes import values_of
from symbolics.node.names import MARK_DOMAIN, MARK_OP, ORT_DOMAIN, OWN_DOMAIN, PYTHON_OP_BACKWARD, PYTHON_OP_TANGENT
from symbolics.text import shown

__all__ = ["reference_evaluator"]


class _Carried(Exception):
    """Carries an exception of a Function through onnx.reference, which rewords some types."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()  # not str(error), which is a Function's code as well
        self.error = error


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    # Without its inputs, which onnx_ir would miss outside their graph.
    alone = onnx.NodeProto(name=node.name, domain=node.domain, op_type=node.op_type, attribute=node.attribute)
    try:
        return values_of(ir.serde.deserialize_node(alone))
    except PythonopError:
        raise
    except Exception as error:  # onnx_ir raises whatever its parts raise
        raise FormatError(f"an attribute of the {node.op_type} {shown(node.name)!r} cannot be read: the file is damaged") from error


def _tensors(operator: OpRun, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a node as tensors, None where absent: onnx.reference gives those the last output that has no name, either."""
    names = operator.onnx_node.input
    return [None if value is None or not name else to_tensor(value) for name, value in zip(names, inputs, strict=True)]


def _operators(gate: Gate, store: ContextStore) -> list[type[OpRun]]:
    class PythonOp(OpRun):
        op_domain = ORT_DOMAIN

        def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any], schema: Any = None) -> None:
            super().__init__(onnx_node, run_params, schema)
            self.kernel = ForwardKernel(_attributes(onnx_node), gate, store, onnx_node.name)
            self.keep = bool(onnx_node.output and onnx_node.output[0])

        def _run(self, *inputs: Any, **_: Any) -> tuple[Any, ...]:
            try:
                handle, outputs = self.kernel.run(_tensors(self, inputs), self.keep)
                return (np.array(handle, dtype=np.int64), *map(to_array, outputs))[: len(self.output)]
            except Exception as error:
                raise _Carried(error) from error

    class PythonOpGrad(OpRun):
        op_domain = ORT_DOMAIN

        def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any], schema: Any = None) -> None:
            super().__init__(onnx_node, run_params, schema)
            self.kernel = BackwardKernel(_attributes(onnx_node), store, onnx_node.name)

        def _run(self, context: Any, *inputs: Any, **_: Any) -> tuple[Any, ...]:
            try:
                if np.asarray(context).size != 1:
                    raise RunError(f"{self.kernel.title}: the context is a tensor of shape {np.shape(context)}, not one handle")
                gradients = _tensors(self, (context, *inputs))[1 : 1 + self.kernel.count]
                gradients += [None] * (self.kernel.count - len(gradients))
                found = self.kernel.run(int(np.asarray(context).item()), gradients)
                # onnx.reference wants an array in every place, also where the node's output has no name.
                return tuple(np.empty(0, np.float32) if value is None else to_array(value) for value in found)[: len(self.output)]
            except Exception as error:
                raise _Carried(error) from error

    class PythonOpBackward(PythonOpGrad):
        op_domain = OWN_DOMAIN

        def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any], schema: Any = None) -> None:
            OpRun.__init__(self, onnx_node, run_params, schema)
            self.kernel = kernel = AgainKernel(_attributes(onnx_node), store, onnx_node.name)
            self.kernel.keeps = bool(list(onnx_node.output[len(kernel.wanted) : len(kernel.wanted) + 1]) not in ([], [""]))

    class PythonOpTangent(OpRun):
        op_domain = OWN_DOMAIN

        def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any], schema: Any = None) -> None:
            super().__init__(onnx_node, run_params, schema)
            self.kernel = TangentKernel(_attributes(onnx_node), gate, store, onnx_node.name)

        def _run(self, *inputs: Any, **_: Any) -> tuple[Any, ...]:
            try:
                given = _tensors(self, inputs)
                given += [None] * (2 * len(self.kernel.flags) - len(given))  # onnx leaves out empty names at the end
                found = self.kernel.run(given)[1]
                if any(value is None and name for value, name in zip(found, self.output)):
                    raise RunError.damaged(self.kernel.title, "a tangent is wanted of an output of a type that has none")
                return tuple(np.empty(0, np.float32) if value is None else to_array(value) for value in found)[: len(self.output)]
            except Exception as error:
                raise _Carried(error) from error

    class StopGradient(OpRun):
        # For files whose mark has no function body yet.
        op_domain = MARK_DOMAIN

        def _run(self, x: Any, **_: Any) -> tuple[Any]:
            return (x.copy(),)

    assert StopGradient.__name__ == MARK_OP
    assert PythonOpBackward.__name__ == PYTHON_OP_BACKWARD
    assert PythonOpTangent.__name__ == PYTHON_OP_TANGENT
    return [PythonOp, PythonOpGrad, PythonOpBackward, PythonOpTangent, StopGradient, *MENDED]


@short
def reference_evaluator(
    model: Any, allow: Any = (), *, store: ContextStore | None = None, strict: bool = False, **options: Any
) -> ReferenceEvaluator:
    """Open a file in onnx.reference, ONNX's own slow evaluator in Python, and run its PythonOps.

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model or a `Program`.
        allow: What the file may call: classes, functions, and patterns such as ``"mypkg.ops:*"``. Default: nothing.
        store: Where forward calls leave what their backward needs. Default: a store of its own, ``evaluator.store``.
        strict: Whether a Function that has changed since the export is an error, not a warning.
        options: As onnx.reference.ReferenceEvaluator takes them (verbose, new_ops, ...).

    Returns:
        The evaluator. Its ``run`` raises what a Function raised as it was, and a RunError for anything else.

    Raises:
        TrustError: The file names something that ``allow`` does not.
        FormatError: The file is damaged.
        RunError: onnx.reference cannot run the model. Or, with ``strict``, a Function has changed.

    Warns:
        PythonopWarning: A Function has changed since the file was exported: its forward, its backward, or both.
    """
    proto, _ = steady(model, lambda: open_proto(model, load_data=True))
    with reading(model):
        drop_unread_contexts(proto)
    contexts = ContextStore() if store is None else store
    gate = Gate(allow)
    ours = _operators(gate, contexts)

    class Evaluator(ReferenceEvaluator):
        # onnx makes evaluators for functions and bodies by this class: they need the operators as well.
        def __init__(self, proto: Any, *args: Any, new_ops: Sequence[type[OpRun]] | None = None, **kwargs: Any) -> None:
            kwargs["new_ops"] = [*(new_ops or ()), *ours]
            super().__init__(functions_in_order(proto), *args, **kwargs)
            self.store = contexts

        @short
        def run(self, *args: Any, **kwargs: Any) -> Any:
            outermost = not contexts.running()
            try:
                with contexts.run() as made:
                    results = super().run(*args, **kwargs)
            except _Carried as carried:
                if not outermost:
                    raise
                error = carried.error
            except PythonopError:
                raise
            except Exception as unknown:  # whatever an operator's reference in numpy raises
                if not outermost:
                    raise
                raise refusal(unknown) from unknown
            else:
                if outermost:
                    contexts.release(made, list(results.values()) if isinstance(results, dict) else results)
                return results
            raise error

    try:
        evaluator = Evaluator(proto, **options)
    except PythonopError:
        raise
    except Exception as error:
        raise refusal(error) from error
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    say_changed(changed_functions(metadata, gate.functions), strict=strict)
    return evaluator
