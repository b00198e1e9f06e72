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
from symbolics.node.dialects import to_dialect
from symbolics.node.metadata import StepLayout, changes_of

__all__ = ["TrainingStep", "export_training_step"]


@dataclass(repr=False)
class TrainingStep(Program):
    """A training step in memory.

    Attributes:
        model: The step as an ONNX model.
        initial: What the inputs ``param.*``, ``buffer.*``, ``state.*``, ``learning_rate``, ``weight_decay`` and ``seed`` hold before the first step.
        layout: Which input and output is what.
    """

    initial: dict[str, np.ndarray] = field(default_factory=dict)
    layout: StepLayout | None = None

    @property
    def initial_model(self) -> ir.Model:
        """A model without inputs whose outputs are `initial`: a start for loops in languages that have no other."""
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
        """The same step in the forms that an execution provider takes, for programs that open the file themselves.

        ``Trainer(step, providers=[...])`` does so in memory, where it opens a step; a page opens a file. The numbers are those of the step to rounding.
        What WebGPU has no kernels for is written by operators that it has; its integers have 32 bits: inputs of int64 (labels, ids, ``seed``, ``state.step``)
        are of int32 there.

        Args:
            provider: "webgpu" or "openvino"; other providers take a step as it is.

        Raises:
            ArgumentError: There are no forms for such a provider.
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
        """Write the step to ``path``, and the model that gives the initial state to ``<stem>.init.onnx`` beside it: both or neither.

        Args:
            path, schema, external_data, check: As `Program.save`.

        Raises:
            ExportError: A path cannot be written, a dialect cannot say a node, or the step is not valid ONNX.
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
    """Export a model, its loss and an optimizer as one ONNX model that makes a training step.

    ::

        step = exporter.export_training_step(model, (x,), loss=torch.nn.functional.cross_entropy, targets=(y,), optimizer="adamw")
        step.save("step.onnx")                                    # and step.init.onnx, which gives the initial state

        state = dict(zip(init_names, init_session.run(None, {})))  # or step.initial
        for x, y in batches:
            loss, *values = session.run(None, {**state, "x": x, "target": y})
            state.update(...)                                     # the output "param.w.next" is the next "param.w"

    `Trainer` is this loop. Inputs: the model's arguments and the targets by their names, ``param.<key>`` for each trainable parameter,
    ``buffer.<key>`` for each buffer that forward changes, ``state.*``, ``learning_rate`` and ``weight_decay`` (scalars; ``learning_rate_1``, ... for
    further groups of parameters), and ``seed`` where the model drops out. Outputs: ``loss``, a scalar, ``gradient_norm`` with ``clip_norm``, what
    ``output_names`` names, and ``<input>.next``. Frozen parameters are constants of the file. Trainable ones that the loss does not depend on stay
    as they are, as in eager.

    Args:
        model: The model, in train mode if dropout and BatchNorm should train.
        args, kwargs: Example arguments of its forward.
        loss: ``loss(output, *targets)`` -> one number, a function or a module; None where the model returns its loss.
        targets: Example targets: tensors.
        optimizer: "sgd", "adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adadelta", "adafactor" or "lion"; a class of torch.optim; or an
            instance of one over the model's parameters, whose groups, hyperparameters and state are taken over.
        hyperparameters: What differs from torch's defaults, with a name or a class: ``{"lr": 3e-4, "weight_decay": 0.1}``. ``lr`` and
            ``weight_decay`` are the initial values of inputs; the others are fixed. A weight decay of zero is no input.
        clip_norm: Scale the gradients down to this 2-norm of all of them together, as torch.nn.utils.clip_grad_norm_.
        clip_value: Clip each number of the gradients to plus or minus this, as torch.nn.utils.clip_grad_value_; in front of ``clip_norm``.
        accumulate: Update every so many runs, by the mean of their gradients.
        ema: Keep an average of each parameter as ``state.<key>.ema``: at an update this share of it stays, and the rest is the new parameter. It
            starts as the parameter. `Trainer.evaluate` and `Trainer.state_dict` take it by ``ema=True``.
        precision: "float16" or "bfloat16": compute as under torch.autocast, parameters stay as they are. The loss is
            scaled, and a step whose gradients overflow changes nothing but the scale, as torch.amp.GradScaler does.
        dynamo, dynamic_shapes, opset_version, inline, portable, opaque, functions, fallback, **torch_onnx_export_options: As `export`. ``dynamic_shapes``
            may name the targets, too (``target``, or ``target_0``, ...); without that their sizes follow from the model.
        recompute: How much the forward may keep for the backward, None, "auto" or a number of bytes, as `exporter.load` has it, of
            inputs with the shapes of the examples. What is computed again stands in the file twice.
        output_names: Names for the model's outputs, in order. The step then gives those outputs beside the loss. Default: none.

    Raises:
        ExportError: The model or the loss cannot be exported, changes a buffer that the step cannot, or has nothing to train.
        UnsupportedOperatorError: An operator between parameters and loss has no gradient.
        ArgumentError: The optimizer or an option is none that a step can be made of.
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
        differentiate(training, Boundary(training, wrt, [str(forward.graph.outputs[0].name)]), {}, final=False)
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
