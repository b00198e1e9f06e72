"""export_training_step(): forward, loss, gradients and optimizer as one ONNX model.

Its inputs are the batch, the parameters and the optimizer's state; its outputs the loss and the next parameters and
state. Whatever runtime runs it, training is the loop ``outputs = run(inputs)``: the output ``X.next`` is the next input ``X``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from exporter.errors import short
from exporter.files.outlined import outline_modules
from exporter.files.program import Program, save_models
from exporter.files.valid import check_valid
from exporter.forward.arguments import check_call, check_model, check_values
from exporter.gradient_graph.boundary import Boundary
from exporter.gradient_graph.build import differentiate
from exporter.gradient_graph.cut import cut_gradients, place_of, warn_of_cut
from exporter.gradient_graph.inference import infer_shapes
from exporter.gradient_graph.model import own_copy, remove_marks
from exporter.gradient_graph.recompute import Recompute, checked, recompute as rematerialize
from exporter.gradient_graph.slow_operators import without_slow_operators
from exporter.runtime.provider_forms import write_file
from exporter.train_mode.batch_norm import batch_statistics
from exporter.train_mode.dropout import seed_dropout
from exporter.training.assemble import Assembly
from exporter.training.carried import LOSS
from exporter.training.groups import groups_of
from exporter.training.objective import Objective, check_names, state_key
from symbolics.errors import ArgumentError, ExportError
from symbolics.graph.collector import without_gc
from symbolics.graph.flatten import flatten, of_modules
from symbolics.node.cut import Cut
from symbolics.node.dialects import to_dialect
from symbolics.node.metadata import StepLayout, changes_of

__all__ = ["TrainingStep", "export_training_step"]


@dataclass(repr=False)
class TrainingStep(Program):
    """A training step in memory: an ONNX model that computes loss, gradients and the optimizer's update.

    Attributes:
        model: The ONNX model, an onnx_ir.Model.
        initial: The values before the first step, as arrays by the name of the input: ``param.*``, ``buffer.*``, ``state.*``,
            ``learning_rate``, ``weight_decay`` and ``seed``.
        layout: Which input and output is what.
    """

    initial: dict[str, np.ndarray] = field(default_factory=dict)
    layout: StepLayout | None = None

    @property
    def initial_model(self) -> ir.Model:
        """A model without inputs whose outputs are `initial`, for programs that have no other way to read it."""
        values, nodes, initializers = [], [], []
        for name, array in self.initial.items():
            kind = ir.DataType.from_numpy(array.dtype)
            if array.size > 1 and not array.any():  # zeros take no room
                size = ir.Value(name=f"{name}/shape", const_value=ir.tensor(np.array(array.shape, np.int64), name=f"{name}/shape"))
                initializers.append(size)
                zero = ir.tensor(np.zeros(1, array.dtype))
                node = ir.Node("", "ConstantOfShape", [size], [ir.AttrTensor("value", zero)], name=f"{name}/zeros")
            else:
                start = ir.Value(name=f"{name}/initial", const_value=ir.tensor(array, name=f"{name}/initial"))
                initializers.append(start)
                node = ir.Node("", "Identity", [start], name=f"{name}/identity")
            out = node.outputs[0]
            out.name, out.type, out.shape = name, ir.TensorType(kind), ir.Shape(array.shape)
            nodes.append(node)
            values.append(out)
        graph = ir.Graph(
            [], values, nodes=nodes, initializers=initializers, name="initial", opset_imports={"": self.model.opset_imports[""]}
        )
        return ir.Model(graph, ir_version=self.model.ir_version, producer_name="pythonop")

    @short
    def written_for(self, provider: str) -> TrainingStep:
        """The same step in operators that an execution provider has, for programs that open the file without pythonop.

        ``Trainer(step, providers=[...])`` does the same in memory. The results equal those of the step but for rounding. For
        WebGPU, integers have 32 bits: inputs of int64 (labels, ids, ``seed``, ``state.step``) become int32.

        Args:
            provider: "webgpu" or "openvino". Other providers take a step as it is.

        Raises:
            ArgumentError: There is no such form for this provider.
        """
        assert self.layout is not None
        model = self.model.clone()
        narrowed = write_file(provider, model, self.layout.carried)
        initial = {name: array.astype(np.int32) if name in narrowed else array for name, array in self.initial.items()}
        return replace(self, model=model, initial=initial)

    @short
    def save(
        self, path: str | os.PathLike[str], schema: str | None = None, *, external_data: bool | None = None, check: bool = True
    ) -> None:
        """Write the step to a file, and the model that gives the initial state to ``<stem>.init.onnx`` beside it: both or neither.

        Args:
            path, schema, external_data, check: As `Program.save` takes them.

        Raises:
            ExportError: A path cannot be written, a node cannot be written in that ``schema``, or the step is not valid ONNX.
        """
        target = Path(path)
        if check and schema is not None:  # readers of another dialect have schemas of their own
            check_valid(self.model)
        model = self.model if schema is None else to_dialect(self.model, schema)
        models = [(self.initial_model, target.parent / f"{target.stem}.init.onnx"), (model, target)]
        save_models(models, external_data=external_data, check=check and schema is None)


@short
def export_training_step(
    model: torch.nn.Module,
    args: tuple[Any, ...] | torch.Tensor,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., torch.Tensor] | None,
    targets: tuple[Any, ...] | torch.Tensor = (),
    optimizer: str | torch.optim.Optimizer | type[torch.optim.Optimizer] = "adamw",
    hyperparameters: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    ema: float | None = None,
    precision: str | None = None,
    dynamo: bool = True,
    dynamic_shapes: Any = None,
    opset_version: int | None = None,
    inline: Iterable[Any] = (),
    portable: Any = False,
    opaque: Any = (),
    functions: Any = (),
    fallback: bool = False,
    recompute: Recompute = None,
    output_names: Sequence[str] | None = None,
    **torch_onnx_export_options: Any,
) -> TrainingStep:
    """Export a model, its loss and an optimizer as one ONNX model; each run of it is one training step.

    `Trainer` runs such a step. A loop of your own works in any language: feed the state and a batch, and take the outputs
    ``<input>.next`` as the next state.

    Inputs of the step are the model's arguments and the targets by their names; ``param.<key>`` for each trainable parameter;
    ``buffer.<key>`` for each buffer that forward changes; ``state.*`` of the optimizer; the scalars ``learning_rate`` and
    ``weight_decay`` (``learning_rate_1``, ... for further groups of parameters); and ``seed`` where the model drops out or draws random numbers.
    Outputs are ``loss``, a scalar; ``gradient_norm`` with ``clip_norm`` (0 in the runs of ``accumulate`` that do not update); what
    ``output_names`` names; and ``<input>.next``.
    Frozen parameters are constants. Trainable ones that the loss does not depend on stay as they are, as in eager.

    Args:
        model: The model. Put it into train mode first if dropout and BatchNorm should train.
        args, kwargs: Example arguments of its forward.
        loss: ``loss(output, *targets)``, a function or a module that returns one number. None where the model returns its loss.
        targets: Example targets: tensors.
        optimizer: "sgd", "adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adadelta", "adafactor" or "lion"; a class of
            torch.optim; or an instance of one over the model's parameters, whose groups, settings and state are kept.
        hyperparameters: What differs from torch's defaults, with a name or a class: ``{"lr": 3e-4, "weight_decay": 0.1}``.
            ``lr`` and ``weight_decay`` are the initial values of inputs, the others are fixed. A weight decay of zero is not
            an input.
        clip_norm: Scale the gradients so that their 2-norm, all together, is at most this, as torch.nn.utils.clip_grad_norm_.
        clip_value: Clip each number of the gradients to plus or minus this, as torch.nn.utils.clip_grad_value_. It comes before
            ``clip_norm``.
        accumulate: Update once in so many runs, by the mean of their gradients. The learning rate of the run that updates counts.
        ema: Keep an average of each parameter as ``state.<key>.ema``. At an update it becomes ``ema`` times itself plus
            ``1 - ema`` times the new parameter. It starts as the parameter.
        precision: "float16" or "bfloat16": compute as under torch.autocast; parameters keep their dtype. The loss is scaled, and
            a step whose gradients overflow changes only the scale, as with torch.amp.GradScaler.
        dynamo, dynamic_shapes, opset_version, inline, portable, opaque, functions, fallback, **torch_onnx_export_options: As
            `export` takes them. ``dynamic_shapes`` may name the targets, too (``target``, or ``target_0``, ...). Otherwise
            a size of theirs is open where it follows an open size of the model, and fixed elsewhere.
        recompute: How much the forward keeps for the backward: None, "auto" or a number of bytes, as `load` takes it, for inputs
            with the shapes of the examples. What is computed again is in the file twice.
        output_names: Names for the model's outputs, in order. The step then returns those outputs beside the loss. Default: none.

    Returns:
        The step, a `TrainingStep`.

    Raises:
        ExportError: The model or the loss cannot be exported, changes a buffer that the step cannot change, or has nothing to
            train.
        UnsupportedOperatorError: An operator between parameters and loss has no gradient rule.
        ArgumentError: A step cannot have this optimizer or this value of an option.

    Examples:
        >>> loss = torch.nn.functional.mse_loss
        >>> step = exporter.export_training_step(model, (x,), loss=loss, targets=(y,), optimizer="adamw")
        >>> step.save("step.onnx")  # and step.init.onnx, which gives the initial state
    """
    check_model(model, dynamo=dynamo)
    check_call(args, kwargs, dynamo=dynamo)
    check_values(model, args, kwargs)
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    targets = (targets,) if isinstance(targets, torch.Tensor) else tuple(targets)
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ArgumentError(f"accumulate is {accumulate!r}: give a number of runs, 1 or more")
    for name, bound in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if bound is not None and not (isinstance(bound, (int, float)) and bound > 0):
            raise ArgumentError(f"{name} is {bound!r}: give a positive number")
    if ema is not None and not (isinstance(ema, (int, float)) and 0 <= ema < 1):
        raise ArgumentError(f"ema is {ema!r}: give the share of the average that stays at a step, such as 0.999")
    if loss is None and targets:
        raise ArgumentError("loss=None says that the model returns its loss: its labels belong to args or kwargs, not to targets")
    if not callable(loss) and loss is not None:
        raise ArgumentError(f"loss is of type {type(loss).__name__}, not a function or module")

    again = checked(recompute)
    names = check_names(output_names)
    objective = Objective(model, args, dict(kwargs or {}), loss, targets, precision, gives=bool(names))
    trainable = {state_key(name): p for name, p in objective.named_parameters(remove_duplicate=True) if p.requires_grad}
    groups = groups_of(optimizer, hyperparameters, trainable)
    if not any(group.names for group in groups):
        raise ExportError(
            f"{type(model).__name__} has no trainable parameter: there is nothing to train (requires_grad is False everywhere, or the optimizer has none)"
        )

    program = objective.export(
        dynamo=dynamo,
        dynamic_shapes=dynamic_shapes,
        opset_version=opset_version,
        inline=inline,
        portable=portable,
        opaque=opaque,
        functions=functions,
        fallback=fallback,
        output_names=[LOSS, *names] if names else None,
        **torch_onnx_export_options,
    )
    forward = program.model
    if again is None and of_modules(forward):  # boundaries have the types of what they stand behind
        infer_shapes(forward, only_where_missing=True)
    flatten(forward, bounded=again is None)
    seed = seed_dropout(forward)
    statistics = batch_statistics(forward)
    with without_gc():
        training = own_copy(forward)
        wrt = [name for group in groups for name in group.names]
        boundary = Boundary(training, wrt, [str(forward.graph.outputs[0].name)])
        cut = cut_gradients(training, boundary.wrt, boundary.outputs)
        boundary.idle = _idle(cut)
        differentiate(training, boundary, {}, final=False)
        warn_of_cut(cut, "the training step")
    remove_marks(training)
    if again is not None:
        extra = [name for entry in statistics for name in entry.values] + list(changes_of(training).carried.values())
        rematerialize(training, again, objective.shapes, extra, late=True)
    scaled = precision == "float16"
    assembly = Assembly(training, groups, scaled=scaled, clip_norm=clip_norm, clip_value=clip_value, accumulate=accumulate, ema=ema)
    assembly.run(seed, statistics, names)
    assembly.describe(objective.names, objective.target_names)
    without_slow_operators(assembly.model)
    outline_modules(assembly.model)
    return TrainingStep(
        assembly.model,
        program.inlined,
        program.torch_program,
        program.portable,
        fallback=program.fallback,
        initial=assembly.carried.initial,
        layout=assembly.layout,
    )


def _idle(cut: Sequence[Cut]) -> ExportError:
    """What to say of a loss that no parameter has a gradient of."""
    why, way = "detach(), torch.no_grad() or a step function stands on every way", "let the loss read what depends on the parameters"
    if cut:
        why = f"it reads the gradient taken at {place_of(cut)} without create_graph=True, which is a constant to it"
        way = "take it with create_graph=True"
    return ExportError(f"the loss depends on no trainable parameter, so there is nothing to train: {why}\n  way out: {way}")
