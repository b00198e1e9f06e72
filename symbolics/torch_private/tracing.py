"""make_fx, fake tensors and the translation of a graph of ATen operators to ONNX."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import onnx_ir as ir
import torch

__all__ = [
    "condition_on_sizes",
    "fake_mode",
    "fake_tensor",
    "functionalized",
    "is_data_dependent",
    "is_once_differentiable",
    "lift_constants",
    "materialization_watched",
    "quiet_trial",
    "symbolic_size",
    "trace_to_aten",
    "traced_nodes",
    "translator_of",
    "written_arguments",
]


class _Guards(list[Any]):
    """The conditions that a ShapeEnv has met, and what ``seen`` says of the frame that met each."""

    def __init__(self, seen: Callable[[FrameType], str]) -> None:
        super().__init__()
        self.seen, self.said = seen, list[str]()

    def append(self, guard: Any) -> None:
        super().append(guard)
        self.said.append(self.seen(sys._getframe(1)))


def fake_mode(seen: Callable[[FrameType], str] = lambda frame: "") -> tuple[Any, Any]:
    """A world of fake tensors of its own: (ShapeEnv, FakeTensorMode). No public way makes one with symbolic sizes.

    Args:
        seen: What to say of the frame in which a condition on a size is met.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    env.guards = _Guards(seen)
    return env, FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)


def fake_tensor(mode: Any, example: torch.Tensor, moves: Sequence[bool], index: int) -> torch.Tensor:
    """A fake tensor; dims that move get a symbol, the same one where the example has the same size."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    dims = [DimDynamic.DUCK if move else DimDynamic.STATIC for move in moves]
    context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
    return mode.from_tensor(example, symbolic_context=context, source=ConstantSource(f"input{index}"))


def symbolic_size(env: Any, example: int, index: int) -> torch.SymInt:
    """A size as an argument of its own, with the symbol that dims of this size have."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(f"input{index}")
    symbol = env.create_symbol(example, source, dynamic_dim=DimDynamic.DUCK)
    return env.create_symintnode(symbol, hint=example, source=source)


def trace_to_aten(function: Callable[..., Any], values: Sequence[Any]) -> torch.fx.GraphModule:
    """A function of tensors as a graph of ATen operators, what autograd does in it as well."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="real", record_module_stack=False)(*values)


def traced_nodes() -> frozenset[str]:
    """The names of the nodes that `trace_to_aten` has written so far. It takes some of them out again in the end: numbers would not hold."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None
    return frozenset(node.name for node in mode.tracer.graph.nodes)


def functionalized(graph: torch.fx.GraphModule, values: Sequence[Any], decompositions: dict[Any, Any]) -> torch.fx.GraphModule:
    """The same graph without changes in place, with operators taken apart. It may be changed itself: most need no second trace."""
    from torch.fx.experimental.proxy_tensor import make_fx

    result = graph
    # A second trace also refuses sizes that depend on values, which the first may leave.
    sized_by_values = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    if any(t in decompositions or written_arguments(t) or not sized_by_values.isdisjoint(getattr(t, "tags", ())) for t in called):
        for table in (decompositions, {}):  # some decompositions change in place what they have made
            function = torch.func.functionalize(result, remove="mutations")
            result = make_fx(function, decomposition_table=table, tracing_mode="real", record_module_stack=False)(*values)
            if not any(written_arguments(node.target) for node in result.graph.nodes):
                break
    aten = torch.ops.aten
    same = (aten.detach.default, aten.alias.default, aten.lift_fresh.default, torch.ops.pythonop.stop_gradient.default)
    for node in list(result.graph.nodes):
        if node.target in same:
            node.replace_all_uses_with(node.args[0])
            result.graph.erase_node(node)
    result.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    result.recompile()
    return result


def lift_constants(graph: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Make the tensors that a graph holds its last inputs: torch.onnx translates graphs that hold none."""
    lifted: dict[str, torch.fx.Node] = {}
    tensors: list[torch.Tensor] = []
    nodes = list(graph.graph.nodes)
    behind = next((node for node in reversed(nodes) if node.op == "placeholder"), None)
    for node in nodes:
        if node.op != "get_attr":
            continue
        if node.target not in lifted:
            with graph.graph.inserting_before(nodes[0]) if behind is None else graph.graph.inserting_after(behind):
                behind = lifted[node.target] = graph.graph.placeholder(f"constant_{len(lifted)}")
            tensor = getattr(graph, node.target)
            tensors.append(tensor)
            behind.meta["val"] = node.meta.get("val", tensor)
        node.replace_all_uses_with(lifted[node.target])
        graph.graph.erase_node(node)
    graph.recompile()
    return tensors


def written_arguments(target: Any) -> list[int]:
    """The positional arguments that an operator of a graph changes in place; only its schema says so."""
    if not isinstance(target, torch._ops.OpOverload):
        return []
    return [i for i, argument in enumerate(target._schema.arguments) if argument.alias_info is not None and argument.alias_info.is_write]


#: The file of torch that asks sizes how a tensor lies in memory.
_LAYOUT = "_prims_common"


#: Where torch asks whether a tensor has two elements or more, of which alone strides say something.
_CONTIGUOUS = "in is_contiguous"
#: How many cases of remainders are looked at.
_CASES = 64


def condition_on_sizes(env: Any) -> tuple[str, str] | None:
    """A condition on symbolic sizes under which alone a trace holds, and what `fake_mode` was told of it; None where it holds for all sizes from 2 on."""
    import sympy

    sizes = {guard.expr.lhs for guard in env.guards if isinstance(guard.expr, sympy.Ne) and guard.expr.rhs in (0, 1)}
    several = {size: 2 + sympy.Dummy(integer=True, nonnegative=True) for size in sizes if not size.is_symbol}
    for index, guard in enumerate(env.guards):
        condition = guard.expr
        if isinstance(condition, sympy.Ne) and condition.rhs in (0, 1):
            continue
        if isinstance(condition, sympy.Ge) and condition.rhs == 2 and _CONTIGUOUS in str(guard.sloc):
            continue  # fewer elements are contiguous, too
        if _LAYOUT in str(guard.sloc):  # torch asks for strides: of sizes such as n - 1, too, which are 2 or more as n is
            condition = condition.subs(several)
        if condition in (sympy.true, True) or not condition.free_symbols or _always_holds(condition):
            continue
        return str(condition), env.guards.said[index] if len(env.guards.said) == len(env.guards) else ""
    return None


def _always_holds(condition: Any) -> bool:
    """Whether a condition is true of all sizes from 1 on, as sympy can tell.

    torch asks Eq(Min(n, n*m), n) to know the strides of a view, and n//2 <= n of topk. With a divisor, each remainder is a case of its own.
    """
    import sympy
    from torch.utils._sympy import functions

    divisors = [part.args[1] for part in condition.atoms(functions.FloorDiv)]
    if not all(divisor.is_Integer and divisor > 0 for divisor in divisors):
        return False
    step, symbols = math.lcm(*map(int, divisors)), list(condition.free_symbols)
    known = {
        functions.Min: sympy.Min,
        functions.Max: sympy.Max,
        functions.FloorDiv: lambda number, divisor: sympy.floor(sympy.expand(number / divisor)),
    }

    def told(part: Any, sizes: dict[Any, Any]) -> Any:
        if not part.args:
            return sizes.get(part, part)
        kind = known.get(part.func, part.func)
        return kind(*(sympy.expand(told(arg, sizes)) if isinstance(arg, sympy.Expr) else told(arg, sizes) for arg in part.args))

    def holds(remainders: Sequence[int]) -> bool:
        sizes = {
            symbol: 1 + remainder + step * sympy.Dummy(integer=True, nonnegative=True)
            for symbol, remainder in zip(symbols, remainders, strict=True)
        }
        return told(condition, sizes) is sympy.true

    cases = step ** len(symbols)
    return cases <= _CASES and all(map(holds, itertools.product(range(step), repeat=len(symbols))))


def is_data_dependent(error: BaseException) -> bool:
    """Whether a tracer stopped where code asked for a value."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode))


@contextlib.contextmanager
def quiet_trial() -> Iterator[None]:
    """An operator that fails on fake tensors is logged with its traceback, also where a trace is an attempt: meanwhile it is not."""
    logger, silence = logging.getLogger("torch._subclasses.fake_tensor"), logging.Filter("nobody")
    logger.addFilter(silence)
    try:
        yield
    finally:
        logger.removeFilter(silence)


@contextlib.contextmanager
def materialization_watched() -> Iterator[list[bool]]:
    """What Functions that run meanwhile say to ctx.set_materialize_grads: an autograd node does not tell what it was told."""
    context = torch.autograd.function.FunctionCtx
    original, said = context.set_materialize_grads, list[bool]()

    def watched(ctx: Any, value: bool) -> None:
        said.append(value)
        original(ctx, value)

    context.set_materialize_grads = watched  # type: ignore[method-assign, assignment]
    try:
        yield said
    finally:
        context.set_materialize_grads = original  # type: ignore[method-assign]


def is_once_differentiable(cls: Any) -> bool:
    """Whether a Function's backward is decorated with once_differentiable, which leaves no other trace of itself."""
    function = getattr(cls, "backward", None)
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and code.co_qualname.startswith("once_differentiable."):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


class _Translator:
    """torch.onnx's table of translations, made once: that takes a second.

    Attributes:
        decompositions: operator -> what it is made of, for those that the table has no translation of.
    """

    def __init__(self, translations: dict[Any, Any]) -> None:
        from torch.onnx._internal.exporter import _decomp, _registration

        self.registry = _registration.ONNXRegistry.from_torchlib()
        for target, function in translations.items():
            self.registry.register_op(target, function)
        known = set(_decomp.get_onnx_implemented_overloads(self.registry))
        self.decompositions = _decomp.create_onnx_friendly_decomposition_table(known)

    def translate(self, graph: torch.fx.GraphModule, opset: int) -> ir.Model:
        """A graph of ATen operators, without inner state, as an ONNX model of an opset."""
        from torch.export.graph_signature import (
            ExportGraphSignature,
            InputKind,
            InputSpec,
            OutputKind,
            OutputSpec,
            SymIntArgument,
            TensorArgument,
        )
        from torch.onnx._internal.exporter import _core, _fx_passes

        def argument(node: Any) -> Any:
            return (SymIntArgument if isinstance(node.meta.get("val"), torch.SymInt) else TensorArgument)(node.name)

        nodes = list(graph.graph.nodes)
        inputs = [InputSpec(InputKind.USER_INPUT, argument(node), None) for node in nodes if node.op == "placeholder"]
        outputs = [OutputSpec(OutputKind.USER_OUTPUT, argument(node), None) for node in nodes[-1].args[0]]
        program = torch.export.ExportedProgram(
            root=graph, graph=graph.graph, graph_signature=ExportGraphSignature(inputs, outputs), state_dict={}, range_constraints={}, module_call_graph=[],
        )  # fmt: skip
        _fx_passes.insert_type_promotion_nodes(program.graph_module)
        _fx_passes.remove_assertion_nodes(program.graph_module)
        model = _core._exported_program_to_onnx_program(program, registry=self.registry, lower="at_conversion").model
        if model.opset_imports[""] != opset:
            import onnxscript.version_converter  # 0.2 s: who only loads a file need not wait for it

            onnxscript.version_converter.convert_version(model, target_version=opset, fallback=True)
        return model


@functools.cache
def translator_of(make: Callable[[], dict[Any, Any]]) -> _Translator:
    """The table with these translations beside torch's own."""
    return _Translator(make())
