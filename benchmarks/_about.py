"""What docs/figures.md says of each program, beside its figures: what is measured, beside what, and what falls short.

The order is that of the page. Other pages link to the titles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["ABOUT", "HEAD", "About"]

HEAD = """# Figures

This page says what exports, files, gradients and training cost beside what you would use instead, and how close training from a file stays
to eager PyTorch. `make bench` measures all of it on your machine and writes this page; `python -m benchmarks dispatch` runs one program.

- Each table names the processor, the versions and the day. It has the newest measurement of that processor alone.
- Figures are medians of runs in which the contenders take turns. A ratio below 1 means that the file is faster, or smaller, than what it stands beside.
- A number in brackets is the limit that the project has set itself. **Bold** misses it. "runs" says how many runs a median is of.
- Ratios depend on the processor, on its load, and on how OpenMP's threads wait. With `OMP_WAIT_POLICY=passive` eager PyTorch is up to twice as slow
  on two cores; the programs do not set it.
"""


@dataclass(frozen=True)
class About:
    """The words around a program's tables.

    Attributes:
        title: Of its section.
        text: What is measured, beside what. Markdown.
        short: What falls short, and why. Markdown; "" for nothing.
        pivot: Whether its figures are named `row: column` ("rows") or `column: row` ("columns") and make one table; "" for a list.
        names: Part of a figure's name -> what the table says in its place.
        command: How to run it; "" for `python -m benchmarks.PROGRAM`.
        picture: A picture beside the page.
    """

    title: str
    text: str
    short: str = ""
    pivot: Literal["rows", "columns", ""] = ""
    names: dict[str, str] = field(default_factory=dict)
    command: str = ""
    picture: str = ""


ABOUT = {
    "training_step": About(
        "Training steps",
        """A training step is forward, backward and AdamW. "Step" is one file that `exporter.Trainer` runs; "loaded" is `exporter.load`, with loss and
optimizer in eager mode; "portable" is a step whose Functions are ONNX functions. All stand over eager PyTorch with foreach AdamW, on two threads.
Memory is the peak of a step, with parameters and optimizer state, over eager's.""",
        """- Transformers and recurrent networks on processors without fast AVX-512: matrix products are most of the step there, and eager has the same ones.
  Of a step of GPT 2 x 128 on the Zen 4, 31 of 44 ms are products.
- LSTM: products alone take more than half of the step. The limit asks for less than they leave.
- BLOOM, and GELU as a Function: the Functions run as Python in both. Portable, they are below eager.
- snntorch and the chain of Functions: a step is hundreds of calls of Python code. torch.compile merges what it can look into; opaque calls it cannot, and
  neither can a file. Portable, they take a quarter of eager's time or less.
- Memory of GPT 1 x 1024: eager's attention keeps no matrix of scores, a file does. `recompute="auto"` computes them again and stays below eager.
- BLOOM's memory: free pieces of the C library are as much as what the forward keeps.""",
        pivot="rows",
        names={
            "gpt-b8": "GPT of 4 layers, d=256, batch 8 x 128",
            "gpt-b2": "the same, batch 2 x 128",
            "gpt-b1-512": "the same, batch 1 x 512",
            "gpt-b1-1024": "the same, batch 1 x 1024",
            "gpt-b2-gelu": "the same, batch 2 x 128, GELU as a Function",
            "bloom": "BLOOM of 4 layers, batch 2 x 128",
            "cnn": "four times convolution, BatchNorm, ReLU, batch 16 x 3 x 32 x 32",
            "resnet": "ResNet with BatchNorm, batch 16 x 3 x 32 x 32",
            "resnet18": "ResNet-18, batch 8 x 3 x 64 x 64",
            "convnext": "four blocks as ConvNeXt's, batch 8 x 3 x 64 x 64",
            "rnn": "RNN of 64 steps, which torch.export writes out",
            "gru": "GRU 64 x 32 x 128 -> 256",
            "lstm": "LSTM, the same",
            "bi-lstm": "LSTM, the same with two directions",
            "snntorch": "snntorch, 25 steps",
            "chain-100": "chain of 100 Functions",
            "ours / eager": "step",
            "portable / eager": "portable",
            "loaded / eager": "loaded",
            "torch.compile / eager": "torch.compile",
            "memory of a step, ours / eager": "memory",
            "memory of a step, recompute / eager": 'memory, `recompute="auto"`',
        },
        picture="steps.svg",
    ),
    "ablation": About(
        "What each pass brings",
        """A training step without one pass of the accelerator, over the step with all of them: 1.2 means that the pass saves a sixth. A pass that brings
less than 5 % on every model has no place in the accelerator. "none" is `accelerate=False`; an empty cell means that the pass finds nothing to replace.""",
        pivot="columns",
        names={
            "gpt-b2": "GPT 2 x 128",
            "gpt-b1-1024": "GPT 1 x 1024",
            "cnn": "small CNN",
            "resnet18": "ResNet-18",
            "vgg": "VGG's blocks",
            "convnext": "ConvNeXt's blocks",
            "lstm": "LSTM",
            "gru": "GRU",
        },
    ),
    "providers": About(
        "Execution providers",
        """A training step as one file on other execution providers, over eager PyTorch in float32. [Execution providers](providers.md) says what each of
them runs.""",
        pivot="rows",
        names={
            "cnn": "four times convolution, BatchNorm, ReLU, batch 16 x 3 x 32 x 32",
            "resnet": "ResNet with BatchNorm, batch 16 x 3 x 32 x 32",
            "resnet18": "ResNet-18, batch 8 x 3 x 64 x 64",
            "convnext": "four blocks as ConvNeXt's, batch 8 x 3 x 64 x 64",
        },
        command="python -m benchmarks.providers --provider openvino",
    ),
    "webgpu": About(
        "WebGPU beside WebAssembly",
        """Training steps with AdamW, written for WebGPU, in one page of Chromium; batches of 5, state and batch copied both ways. WebAssembly runs on one
thread. Without a graphics card (`--card`) WebGPU is SwiftShader's, which computes it on the processor: such figures say that the steps run, and nothing of a
card.""",
        pivot="rows",
    ),
    "web": About(
        "A step in the browser",
        """A training step of a small spiking network, of the same file in Python, in Node and in Chromium; and what a visitor of the page in
[examples/web](../examples/web/README.md) loads.""",
    ),
    "dispatch": About(
        "Running a PythonOp",
        """Processor time of a PythonOp on onnxruntime, above calling `Function.apply` directly. A pair is a forward and its backward, above eager's. Pairs
apart have an operator between them, and stand beside an engine call for each.""",
    ),
    "opaque": About(
        "Opaque modules",
        """Twenty blocks of Linear(8, 8) and ReLU, each one node by [`opaque=`](opaque.md), beside eager's calls of the same modules; per module, processor
time on one thread. "Copies" are times above eager's, in copies of the one tensor that is large.

In a forward, an output is copied into what onnxruntime has made for it. In training, weights and inputs that autograd keeps are copied, too, as onnxruntime
may use their memory again, and so is each gradient into its output.""",
        """No output is without its copy: onnxruntime lets a node write into its memory alone, and torch's operators make memory of their own. Without any copy of
outputs and gradients (numbers are wrong then) a training took as long as eager's. Tensors that autograd keeps could be read where onnxruntime has them: that
saved 0.9 of the copies of a training, and a Function that keeps one for longer would read what is no longer there. Both were measured, and neither is built in.
An allocator that is registered for the whole process could give onnxruntime the memory of torch's results. It is not built in either: later nodes of
onnxruntime work in place, and would change what a Function, autograd or NumPy still reads, without a word.""",
    ),
    "quantized": About(
        "Models in integers",
        """A model that `exporter.quantize` wrote over the same model in float, both on onnxruntime's CPU, on one thread. Limits hold for processors that
multiply bytes (VNNI, AMX).""",
        """Linear layers at batch 32: sums of float biases, ReLU and the rounding between two layers are passes of their own. Weights of 4 bits that are random
give outputs 10.6 % (rms) off after four layers.""",
    ),
    "loaded": About(
        "Small calls of a loaded module",
        """Two Linear layers and a Function at batch 3, where hardly anything is computed: what is around it is what is measured. Processor time on one
thread. The first call makes the sessions. First touches are measured in fresh processes, above `import torch`.""",
    ),
    "big": About(
        "Large files",
        """A module of 0.7 G parameters in float32, with 2.8 GB of external data in the system's cache. A step is forward and `loss.backward()` at batch 4.
Eager is `torch.load`. Memory is the most that is resident over parameters and gradients.""",
        """On a machine whose host takes free memory back, the first step waits for the system to hand out 2.8 GB of new memory, in eager mode and from a file.""",
    ),
    "export": About(
        "Exporting",
        """The time of an export under the hook over bare `torch.onnx.export`, which inlines the Functions; then of calls as ONNX functions
(`portable=True`) over the same calls as PythonOps, in one process and in processes that export once and end. "Opening a hook" and "eager run" are shares of
the export; `eager_check=False` saves the latter.""",
        """TorchScript's export of a 12-block transformer takes 0.14 to 0.2 s, to which the hook adds 0.06 to 0.07. Portable calls by TorchScript: a Function
costs its trace and its translation once, about 150 ms for GELU, where the export of one call takes 9 to 12.""",
    ),
    "force_fields": About(
        "Force fields",
        """Force fields as their packages make them, with random weights: 64 atoms and about 830 edges, open numbers of both, energy and forces. Times over
eager on one thread. The training step is SGD on energy and forces. AdamW: ten steps beside eager's, the largest difference of a parameter over the largest way
of one. [Force fields](force-fields.md#families) has the packages and their versions. Outputs of the files, in a process without torch, are at most 3.1e-6 of the
largest from eager's.""",
        """MatGL's TensorNet by TorchScript takes a tenth longer than eager: TorchScript writes an If for a squeeze, behind which no shape is known, so that
scatters of rows stay as they are. All other families take less, or as long.""",
        pivot="rows",
        command="python -m benchmarks.force_fields FAMILY --channels 32 --runs 9 --step --adamw 10",
    ),
    "md": About(
        "Molecular dynamics",
        """108 atoms, about 5,800 edges, 1,000 steps of 0.002 in float32 from one file, on one thread, beside eager PyTorch. For this field eager is faster
than the file.""",
        pivot="rows",
        command="python -m examples.md.compare",
    ),
    "forces": About(
        "Forces of small networks",
        """Energy and forces from a file beside eager, and a training step on the forces: an MLP on distances, and a network of SchNet's kind.""",
        pivot="rows",
    ),
    "contractions": About(
        "What the forms of Einsum and scatters take",
        """One node each on one thread: an Einsum, ScatterElements or GatherElements as it is, and as an export writes it. The note has the times and the
operators. An Einsum is written in the form that takes the least by the constants in `symbolics/graph/contractions.py`; the forms of rows are
`pythonop.rows::AddRows` ([format](format.md#sums-of-rows)) and Gather. onnxruntime's ScatterND loses additions where threads race, so no export writes it beyond
128 KiB of rows.""",
    ),
    "gradient_graph": About(
        "Gradient graphs",
        """How long `build_gradient_graph` takes, and how many nodes it makes. Processor time, the best of several runs.""",
        pivot="rows",
    ),
    "scale": About(
        "Scale",
        """Chains of blocks of ten nodes, one of them a PythonOp, each size in a process of its own, on one thread; a figure is per node of the forward, which
becomes 4.5 with the gradient. Beside these stands plain onnxruntime, with Gelu in the place of the Function. Then training steps by batch and threads, over
eager.""",
        """What is pythonop's part grows in line with the nodes. onnxruntime's does not, with or without pythonop: it sorts a graph whenever one of its
optimizers looks at it, plans all buffers in the first run, and looks for each buffer whether it is an output. `inference_session` lists the nodes of large
graphs as they can run, and has no plan made for them.""",
        pivot="columns",
    ),
    "tangents": About(
        "Tangent graphs",
        """The forward-mode derivative of a transformer in which all parameters move: its nodes and its time over the forward's, and over eager's
`torch.func.jvp`, on one thread.""",
        pivot="rows",
    ),
    "training_curves": About(
        "Loss curves",
        """200 steps of AdamW in float32: how far the loss of a loaded file is from eager's, beside how far eager is from itself, five times with every
parameter and float input moved by one ulp, five times with other numbers of threads. The file must stay within twice the wider envelope at every step, and
within 1e-6 in float64. `make demo` draws both curves.

The spiking network is chaotic: near step 158 one rounding decides whether a neuron fires, and from there on two runs of eager differ as much as the file
does.""",
        pivot="columns",
    ),
    "training_memory": About(
        "Memory over many steps",
        """GPT-2 of 4 layers, d=256, batch 8 x 128, AdamW, one thread: the peak of a step over eager's, and what the resident set gains over many steps;
BLOOM for a model with PythonOps.""",
        command="python -m benchmarks.training_memory --steps 1000",
    ),
    "recompute": About(
        "Recompute",
        """What [`recompute=`](training.md) saves of the memory of a training step, and what it costs of its time, over the step that keeps all.""",
    ),
    "runtime_growth": About(
        "Memory of sessions over many runs",
        """Resident memory over many runs of a session, which stays flat after a warm-up, and contexts that are alive at the end, of which there are none.""",
    ),
}  # fmt: skip
