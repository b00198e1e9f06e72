"""load(): a saved model as torch.nn.Module, trained by torch's optimizers and run by stock onnxruntime."""

from __future__ import annotations

import functools
import inspect
import keyword
import os
import types
from collections.abc import Sequence
from typing import Any, Self

import onnx_ir as ir
import torch

from exporter.errors import short, shorten
from exporter.files.inspect import inspect_model
from exporter.files.program import Program
from exporter.files.read import check_complete, open_model
from exporter.files.steady import steady
from exporter.files.summary import as_html, signature, summary_of
from exporter.files.tensors import take_in
from exporter.files.trust import Gate
from exporter.files.weights import lift_weights
from exporter.gradient_graph.recompute import Recompute, checked
from exporter.module.bound import Bound
from exporter.module.plans import Settings
from exporter.module.state import entries_of, register
from exporter.runtime.changed import say_changed
from exporter.runtime.providers import choose
from symbolics import torch_private as private
from symbolics.errors import ArgumentError, FormatError
from symbolics.graph.flatten import flatten
from symbolics.graph.own_outputs import own_outputs
from symbolics.node.metadata import StateEntry
from symbolics.node.names import GRADIENTS_KEY, STEP_KEY
from symbolics.text import headline, shown

__all__ = ["OnnxModule", "load"]

#: Bytes of constants (masks, tables) that are read with the parameters. More stay in their file, where each session reads them itself.
_MOST_CONSTANTS = 1 << 28


@short
def load(
    model: Any,
    *,
    allow: Any = (),
    device: torch.device | str | None = None,
    providers: Sequence[Any] | None = None,
    recompute: Recompute = None,
    accelerate: bool = True,
    strict: bool = False,
) -> OnnxModule:
    """Open a file as a trainable torch.nn.Module: forward runs in onnxruntime, backward runs the gradient graph.

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model or a `Program`. It may come from any tool, and may be a training
            file of `build_gradient_graph`.
        allow: What the file may call: classes, functions, and patterns such as ``"mypkg.ops:*"``. Default: nothing.
        device: Where parameters and buffers are. Default: the CPU.
        providers: As `inference_session` takes them. Default: the CPU, or CUDA for a CUDA device.
        recompute: How much the forward keeps for the backward. None: all that the backward reads. "auto": the results of
            products, convolutions, recurrences and reductions; what is cheap between them is computed again, to the same
            bits. An int: at most so many bytes, for inputs with the shapes of the first call. Functions and random draws never
            run twice.
        accelerate: As `inference_session` takes it. False also keeps torch's own kernels out of the backward.
        strict: Whether a Function that has changed since the export is an error, not a warning.

    Returns:
        The module. Its parameters and buffers have the names of the model that was exported, so its state_dict() fits that
        model. In a file of another tool, the float initializers with at least one axis are its parameters, all trainable.
        ``module.save(path)`` writes the file again with the present weights.

    Raises:
        FormatError: The file is damaged or cut off, or its external data is missing or outside its folder.
        TrustError: The file names a class that ``allow`` does not.
        RunError: onnxruntime or the native library is missing. Or, with ``strict``, a Function has changed.
        ArgumentError: ``recompute`` or ``device`` has another value than these.

    Warns:
        PythonopWarning: A Function has changed since the file was exported: its forward, its backward, or both.

    Examples:
        >>> module = exporter.load("model.onnx", allow=["mypkg.ops:*"])
        >>> optimizer = torch.optim.AdamW(module.parameters())
        >>> loss = torch.nn.functional.mse_loss(module(x), y)
        >>> loss.backward()
        >>> optimizer.step()
    """
    return OnnxModule(model, allow=allow, device=device, providers=providers, recompute=recompute, accelerate=accelerate, strict=strict)


class OnnxModule(torch.nn.Module):
    """An ONNX model as a module; made by `load`.

    It keeps the contract of torch.nn.Module: docs/loaded-modules.md has it row by row, each as eager has it or refused by name.

    In train() mode it behaves as the file says: a file that was exported in training mode drops out (a new mask each
    step, from torch's generator), updates the running statistics of BatchNorm, and every other buffer that forward changed. eval() takes
    dropout and BatchNorm back and leaves buffers alone. Gradients stop by torch.no_grad(), torch.inference_mode() and requires_grad alone: a call
    keeps what a backward reads where an input, a parameter or a buffer requires grad, in either mode. Parameters are read at every forward.
    A file that was exported in eval mode, of a model that has dropout or running statistics, is loaded in eval mode: train() warns that neither is in it.

    forward takes the tensors of the exported model's arguments in their order, in containers or not, and keyword
    arguments by the names of the graph's inputs. It returns what the exported model returned, where the file says
    what that was; otherwise the one output or a tuple.
    """

    _onnx: Bound
    #: What `exporter.export`, `exporter.verify` and `exporter.export_training_step` say of it: a check of theirs reads it.
    _not_exported = (
        "the model is a loaded file: it is a graph already, which onnxruntime runs and no exporter sees\n"
        "  way out: save(path) of the loaded module writes the file with the weights of now; for another file or a training step, "
        "export the PyTorch module that the file came from, after load_state_dict(loaded.state_dict())"
    )

    def __init__(
        self,
        model: Any,
        *,
        allow: Any = (),
        device: torch.device | str | None = None,
        providers: Sequence[Any] | None = None,
        recompute: Recompute = None,
        accelerate: bool = True,
        strict: bool = False,
    ) -> None:
        super().__init__()
        again = checked(recompute)
        try:
            place = torch.device("cpu" if device is None else device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"device is {device!r}, which is none of torch's: give 'cpu', 'cuda' or 'cuda:1'") from error
        try:
            torch.empty(0, device=place)
        except Exception as error:
            raise ArgumentError(f"device is {device!r}, and torch has none here: {headline(error)}") from error
        if providers is not None:
            choose(providers)  # a wrong name is told here, not in the first call
        gate = Gate(allow)
        object.__setattr__(self, "_onnx", None)  # no parameter of a file may take the name
        opened, entries, found = steady(model, lambda: self._read(model, place))
        if providers is None and place.type == "cuda":
            providers = [("CUDAExecutionProvider", {"device_id": place.index or 0}), "CPUExecutionProvider"]
        object.__setattr__(self, "_onnx", Bound(opened, entries, found, allow, gate, Settings(place, providers, again, accelerate)))
        if isinstance(model, (str, os.PathLike)):
            self._onnx.source = str(model)
        if self._onnx.stilled and not self._onnx.moded:
            self.eval()
        self.__class__ = _class_of(tuple(self._onnx.inputs))
        plan = self._onnx.plans.plan(False, frozenset())  # a class that is missing is told now
        self._onnx.changed = plan.forward.session.changed
        say_changed(self._onnx.changed, strict=strict)

    def _read(self, model: Any, device: torch.device) -> tuple[ir.Model, dict[str, StateEntry], dict[str, list[str]]]:
        """Read a model and its data: the state is the module's own from then on."""
        for held in (self._parameters, self._buffers, self._modules):  # of a call that failed
            held.clear()
        opened = open_model(model)
        lift_weights(opened)
        check_complete(opened)
        flatten(opened)  # from here on, every node is looked at
        if STEP_KEY in opened.metadata_props:
            raise FormatError(
                "the file is a training step, which has no parameters of its own: run it with exporter.inference_session, or load the forward file"
            )
        if GRADIENTS_KEY in opened.metadata_props and len(set(opened.graph.outputs)) < len(opened.graph.outputs):
            raise FormatError(
                "the file has gradients, and one of its outputs stands twice: it does not say of which of the two it has them.\n"
                "  way out: load the file that it was made from"
            )
        own_outputs(opened.graph)
        entries = entries_of(opened)
        found = register(self, opened.graph, entries, device)
        take_in(opened, _MOST_CONSTANTS)  # sessions are made later, and again
        return opened, entries, found

    def train(self, mode: bool = True) -> Self:
        """As torch.nn.Module.train. Warns once where the file was exported in eval mode, of what would do something else in train mode."""
        if mode:
            self._onnx.warn_of_stilled()
        return super().train(mode)

    def flat(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """As calling the module, without hooks and without the structure: the outputs of the graph in their order."""
        return self._onnx.run(self, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            TypeError: Arguments do not match the inputs of the graph.
            RunError: An input or parameter has another type, shape or device than the file says; a part of the module is in another mode than the
                module; in train() mode, the model changed state that the file does not carry; something traces the call.

        What has no gradient, of an operator or of a training file, runs; a backward through it raises UnsupportedOperatorError or RunError.
        """
        if torch.compiler.is_dynamo_compiling():
            return loaded_file_takes_no_fullgraph(self, args, kwargs)
        try:
            return self._onnx.structured(self._onnx.run(self, args, kwargs))
        except Exception as error:
            shorten(error)
            raise

    @short
    def save(self, path: str | os.PathLike[str], schema: str | None = None, *, external_data: bool | None = None) -> None:
        """Write the file again, with the parameters and buffers as they are now: parametrized, or with what was put around their modules.

        Args:
            path, schema, external_data: As `Program.save`. The file that was loaded may be written over.

        Raises:
            RunError: A parameter or buffer has another type, shape or device than the file says.
            ExportError: The path cannot be written, or a dialect cannot say a node.
        """
        Program(self._onnx.filled(self)).save(
            path, schema, external_data=external_data, check=False
        )  # the file that it was, with other weights

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies share the sessions; pickle has the file without its weights, which are in the state.
        return _module_of, (self._onnx,), self.__getstate__()  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        """One line: the file, its inputs and outputs, how much state it has. The modules below it are names of parameters alone."""
        state = f"{len(list(self.parameters()))} parameters, {len(list(self.buffers()))} buffers"
        return f"OnnxModule({shown(self._onnx.source)}, {state}: {signature(self._onnx.plans.model.graph)})"

    def _repr_html_(self) -> str:
        """What `pythonop inspect` says first, for a notebook."""
        return as_html(summary_of(inspect_model(self._onnx.plans.model), self._onnx.source))


@private.outside_of_compile
def loaded_file_takes_no_fullgraph(module: OnnxModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What forward returns, where torch.compile reads it: sessions are nothing that it could compile, and run between two of its graphs.

    torch's error for fullgraph=True says no more than this name.
    """
    return module._onnx.structured(module._onnx.run(module, args, kwargs))


def _module_of(bound: Bound) -> OnnxModule:
    """A module without any state, which a copy or pickle fills."""
    kind = _class_of(tuple(bound.inputs))
    return kind.__new__(kind)


@functools.lru_cache(maxsize=256)
def _class_of(inputs: tuple[str, ...]) -> type[OnnxModule]:
    """The class of files with these inputs: its forward has them as its signature, which trainers ask for what a batch may hold."""
    names = ("self", *inputs)
    if len(set(names)) < len(names) or any(not name.isidentifier() or keyword.iskeyword(name) for name in names):
        return OnnxModule
    forward: Any = types.FunctionType(OnnxModule.forward.__code__, globals())
    functools.update_wrapper(forward, OnnxModule.forward)
    forward.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])
    return type("OnnxModule", (OnnxModule,), {"forward": forward, "__module__": __name__, "__doc__": OnnxModule.__doc__})
