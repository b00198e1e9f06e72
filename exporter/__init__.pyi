from . import errors as errors, testing as testing
from .differences.diff import diff_files as diff_files
from .errors import (
    ArgumentError as ArgumentError,
    ExportError as ExportError,
    FormatError as FormatError,
    PythonopError as PythonopError,
    PythonopWarning as PythonopWarning,
    RunError as RunError,
    TrustError as TrustError,
    UnsupportedOperatorError as UnsupportedOperatorError,
)
from .files.program import Program as Program
from .files.trained import trained as trained
from .files.trust import register as register
from .forward.case import Case as Case
from .forward.export import export as export
from .forward.hook import hook as hook, install as install, uninstall as uninstall
from .gradient_graph.build import build_gradient_graph as build_gradient_graph, gradient as gradient
from .gradient_graph.check import check_gradients as check_gradients
from .gradient_graph.tangents import build_tangent_graph as build_tangent_graph
from .module.load import load as load
from .quantization.declared import quantizer as quantizer
from .quantization.proof import verify_quantized as verify_quantized
from .quantization.qonnx import Qonnx as Qonnx, from_qonnx as from_qonnx, to_qonnx as to_qonnx
from .quantization.quantize import Quantized as Quantized, quantize as quantize
from .runtime.reference import reference_evaluator as reference_evaluator
from .runtime.session import inference_session as inference_session, session_options as session_options
from .training.artifacts import export_evaluation as export_evaluation, write_artifacts as write_artifacts
from .training.step import TrainingStep as TrainingStep, export_training_step as export_training_step
from .training.trainer import Trainer as Trainer
from .verification.verify import verify as verify

__all__: list[str]
__version__: str
