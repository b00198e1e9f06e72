"""make_fx, fake tensors and the translation of a graph of ATen operators to ONNX."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any

import onnx_ir as ir
import torch

__all__ = [
    "computed_size",
    "condition_on_sizes",
    "example_size",
    "fake_mode",
    "fake_tensor",
    "functionalized",
    "guards_told",
    "in_python",
    "is_data_dependent",
    "is_once_differentiable",
    "lift_constants",
    "materialization_watched",
    "never_negative",
    "quiet_trial",
    "refusals_watched",
    "same_size",
    "shared_values",
    "sizes_apart",
    "symbolic_size",
    "trace_to_aten",
    "traced_nodes",
    "translator_of",
    "written_arguments",
    "written_values",
]


def fake_mode() -> tuple[Any, Any]:
    """A world of fake tensors of its own: (ShapeEnv, FakeTensorMode). No public way makes one with symbolic sizes."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    return env, FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)


def fake_tensor(mode: Any, example: torch.Tensor, moves: Sequence[bool], index: int) -> torch.Tensor:
    """A fake tensor; dims that move get a symbol, the same one where the example has the same size."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    dims = [DimDynamic.DUCK if move else DimDynamic.STATIC for move in moves]
    context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
    return mode.from_tensor(example, symbolic_context=context, source=ConstantSource(f"input{index}"))


def symbolic_size(env: Any, example: int, name: str, lowest: int | None) -> torch.SymInt:
    """A size with a symbol of its own.

    Args:
        env: Of `fake_mode`.
        example: What it is where a trace asks for a number.
        name: Of its own, too.
        lowest: What it is at least: 2, as the sizes of inputs are to torch, or 0; None: nothing is known.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    source = ConstantSource(name)
    if lowest == 2:
        symbol = env.create_symbol(example, source, dynamic_dim=DimDynamic.DYNAMIC)
    else:
        symbol = env.create_unspecified_symbol(example, source, dynamic_dim=DimDynamic.DYNAMIC)
        env.var_to_range[symbol] = ValueRanges(-int_oo if lowest is None else lowest, int_oo)
    return env.create_symintnode(symbol, hint=example, source=source)


def computed_size(env: Any, expression: Any, example: int) -> torch.SymInt:
    """A size that is an expression of symbols of `symbolic_size`."""
    return env.create_symintnode(expression, hint=example)


def same_size(size: torch.SymInt) -> torch.SymInt:
    """The same size as another object."""
    return size.node.shape_env.create_symintnode(size.node.expr, hint=size.node.hint)


def example_size(size: int | torch.SymInt) -> int:
    """What a size is in the example, without a word to the trace that it is asked about."""
    return size if isinstance(size, int) else size.node.hint


@contextlib.contextmanager
def sizes_apart() -> Iterator[None]:
    """While this is open, a trace reads each size where the code does. It would read all that have one symbol from an argument that has it."""
    from torch._inductor.fx_passes import dedupe_symint_uses

    original = dedupe_symint_uses.dedupe_symints
    dedupe_symint_uses.dedupe_symints = lambda graph: None
    try:
        yield
    finally:
        dedupe_symint_uses.dedupe_symints = original


def never_negative(expression: Any) -> bool:
    """Whether an expression of sizes is 0 or more, as far as torch can tell."""
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    return bool(bound_sympy(expression, {symbol: ValueRanges(0, int_oo) for symbol in expression.free_symbols}).lower >= 0)


def in_python() -> contextlib.AbstractContextManager[Any]:
    """While it is open, operators made of others (pad, addcmul) run as torch's Python has them: those in C++ make numbers of symbolic sizes."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def guards_told(env: Any, told: Callable[[], None]) -> None:
    """Call something after each guard that an environment notes."""

    class Guards(list[Any]):
        def append(self, guard: Any) -> None:
            super().append(guard)
            told()

    env.guards = Guards(env.guards)


def trace_to_aten(function: Callable[..., Any], values: Sequence[Any]) -> torch.fx.GraphModule:
    """A function of tensors as a graph of ATen operators, what autograd does in it as well."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(function, tracing_mode="real", record_module_stack=False)(*values)
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.native_batch_norm.default:
            _say_what_batch_norm_writes(node)
    return graph


def _say_what_batch_norm_writes(node: torch.fx.Node) -> None:
    """Call one of the operators that torch is to have in place of ``native_batch_norm``: its schema is silent on the statistics that it writes."""
    aten = torch.ops.aten
    x, weight, bias, mean, var, training, momentum, eps = node.args
    if not training:
        node.target, node.args = aten._native_batch_norm_legit_no_training.default, (x, weight, bias, mean, var, momentum, eps)
    elif mean is None:
        node.target, node.args = aten._native_batch_norm_legit.no_stats, (x, weight, bias, training, momentum, eps)
    else:
        node.target = aten._native_batch_norm_legit.default


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


def written_values(node: torch.fx.Node) -> list[Any]:
    """What a node of a graph is given to change in place, by position or by name (``out=``)."""
    return _given(node, written_arguments(node.target))


def shared_values(node: torch.fx.Node) -> list[Any]:
    """What the results of a node of a graph may share memory with: it is given that, and gives a view of it, or itself."""
    target = node.target
    if target in (operator.getitem, torch.ops.aten._unsafe_view.default):
        return [node.args[0]]
    if not isinstance(target, torch._ops.OpOverload):
        return []
    return _given(node, [i for i, argument in enumerate(target._schema.arguments) if argument.alias_info is not None])


def _given(node: torch.fx.Node, places: list[int]) -> list[Any]:
    names = [argument.name for argument in node.target._schema.arguments] if places else []  # type: ignore[union-attr]
    return [node.args[i] if i < len(node.args) else node.kwargs.get(names[i]) for i in places]


#: Where torch computes with symbolic sizes.
_MODULES_OF_SIZES = re.compile(r"torch(\.(fx|utils)\b.*)?$")
#: The file of torch that asks sizes how a tensor lies in memory.
_LAYOUT = "_prims_common"


#: Where torch asks whether a tensor has two elements or more, of which alone strides say something.
_CONTIGUOUS = "in is_contiguous"
#: How many cases of remainders are looked at.
_CASES = 64


def condition_on_sizes(env: Any, small: Collection[Any], asked: Sequence[Any]) -> Any:
    """The first guard (a condition and its place) under which alone a trace holds; None where it holds for all sizes from 2 on.

    Args:
        env: Of `fake_mode`.
        small: Symbols of sizes that may be 0 or 1 to code that asks.
        asked: Guards that hold for one side of a branch in code.
    """
    import sympy

    def of_branch(guard: Any) -> bool:
        return any(guard is one for one in asked)

    def from_two(guard: Any) -> bool:
        return isinstance(guard.expr, sympy.Ne) and guard.expr.rhs in (0, 1) and not of_branch(guard)

    sizes = {guard.expr.lhs for guard in env.guards if from_two(guard)}
    several = {size: 2 + sympy.Dummy(integer=True, nonnegative=True) for size in sizes if not size.is_symbol}
    for guard in env.guards:
        condition = guard.expr
        if from_two(guard):
            continue
        if isinstance(condition, sympy.Ge) and condition.rhs == 2 and _CONTIGUOUS in str(guard.sloc):
            continue  # fewer elements are contiguous, too
        if _LAYOUT in str(guard.sloc):  # torch asks for strides: of sizes such as n - 1, too, which are 2 or more as n is
            condition = condition.subs(several)
        known = condition in (sympy.true, True) or not condition.free_symbols
        if not known and not _always_holds(condition, env, small if of_branch(guard) else ()):
            return guard
    return None


def _always_holds(condition: Any, env: Any, small: Collection[Any]) -> bool:
    """Whether a condition is true of all sizes from 1 on, or 0 where they are small, as sympy can tell.

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

    def of_remainder(symbol: Any, remainder: int) -> Any:
        if symbol not in small:
            return 1 + remainder + step * sympy.Dummy(integer=True, nonnegative=True)
        return remainder + step * sympy.Dummy(integer=True, nonnegative=env.var_to_range[symbol].lower == 0 or None)

    def holds(remainders: Sequence[int]) -> bool:
        return told(condition, dict(zip(symbols, map(of_remainder, symbols, remainders), strict=True))) is sympy.true

    cases = step ** len(symbols)
    return cases <= _CASES and all(map(holds, itertools.product(range(step), repeat=len(symbols))))


def is_data_dependent(error: BaseException) -> bool:
    """Whether a tracer stopped where code asked for a value."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode))


@contextlib.contextmanager
def refusals_watched(env: Any, refused: Callable[[Exception], None]) -> Iterator[None]:
    """While it is open, tell of each error by which a ShapeEnv (None: any) refuses a condition on a number that was read out of a tensor.

    What such a number is asked (``if x.item() > 0``, ``math.sqrt(x.item())``) is no function of torch, and no mode hears of it. Where torch's own
    operators ask, they know what to do.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    original = ShapeEnv._make_data_dependent_error

    def made(self: Any, *args: Any, **kwargs: Any) -> Exception:
        error: Exception = original(self, *args, **kwargs)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _MODULES_OF_SIZES.match(name := frame.f_globals.get("__name__", "")):
            frame = frame.f_back
        if frame is not None and not name.startswith("torch.") and env in (None, self):
            refused(error)
        return error

    ShapeEnv._make_data_dependent_error = made  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ShapeEnv._make_data_dependent_error = original  # type: ignore[method-assign]


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
        for node in nodes:
            # A size that is a number: the graph has that, and does not read its input.
            if node.op == "placeholder" and "val" not in node.meta:
                node.meta["val"] = torch.empty((), dtype=torch.int64, device="meta")
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
