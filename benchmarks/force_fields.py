"""What MACE and NequIP, as their packages make them, take from a file beside eager: energy and forces, and a training step on both.

    pip install --no-deps --target DIR mace-torch e3nn==0.4.4 ...        (or nequip e3nn ...: the two ask for other releases of e3nn)
    PYTHONPATH=.:DIR python -m benchmarks.force_fields [mace] [--channels 8 64] [--runs 11] [--exporters dynamo torchscript] [--step]

64 atoms on a disturbed grid, random weights, open numbers of atoms and edges. File and eager run in turns on one thread; the ratio is the median of
those of the rounds. `exporter.inference_session` is onnxruntime's own session: these files have no PythonOp.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

import exporter
from benchmarks._report import Figure, tell
from benchmarks.tangents import rounds

#: File / eager at 64 channels.
LIMIT = 1.0
ATOMS, KINDS, CUTOFF = 64, 3, 4.0
_NAMES = ("positions", "kinds", "edges", "shifts", "cell")


def system(atoms: int = ATOMS, cutoff: float = CUTOFF) -> tuple[torch.Tensor, ...]:
    """Positions (atoms, 3), kinds (atoms), edges (2, edges), shifts (edges, 3) and cell (3, 3); about 13 edges an atom."""
    generator = torch.Generator().manual_seed(0)
    side = int(np.ceil(atoms ** (1 / 3)))
    grid = torch.stack(torch.meshgrid(*[torch.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)[:atoms]
    positions = grid * 2.3 + torch.rand(atoms, 3, generator=generator) * 0.5
    distances = (positions[:, None] - positions).norm(dim=-1) + torch.eye(atoms) * 1e9
    edges = torch.stack(torch.where(distances < cutoff))
    return positions, torch.randint(0, KINDS, (atoms,), generator=generator), edges, torch.zeros(edges.shape[1], 3), torch.eye(3) * 50


class Mace(nn.Module):
    """MACE of two interactions, correlation 3, hidden states of l = 0 and 1."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        import e3nn

        torch.serialization.add_safe_globals([slice])  # e3nn 0.4.4 reads its constants as pickles
        e3nn.set_optimization_defaults(jit_script_fx=False)  # no exporter of torch takes ScriptModules
        from e3nn import o3
        from mace import modules

        block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
        self.field = modules.MACE(
            r_max=CUTOFF, num_bessel=8, num_polynomial_cutoff=5, max_ell=3, interaction_cls=block, interaction_cls_first=block, num_interactions=2,
            num_elements=KINDS, hidden_irreps=o3.Irreps(f"{channels}x0e + {channels}x1o"), MLP_irreps=o3.Irreps("16x0e"), gate=nn.functional.silu,
            atomic_energies=np.array([-1.0, -3.0, -5.0]), avg_num_neighbors=13.0, atomic_numbers=[1, 6, 8], correlation=3,
        )  # fmt: skip

    def forward(
        self, positions: torch.Tensor, kinds: torch.Tensor, edges: torch.Tensor, shifts: torch.Tensor, cell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Energy (1) and forces (atoms, 3)."""
        found = self.field(
            {
                "positions": positions, "node_attrs": nn.functional.one_hot(kinds, KINDS).to(positions.dtype), "edge_index": edges,
                "shifts": shifts, "unit_shifts": shifts, "cell": cell, "batch": torch.zeros_like(kinds), "ptr": torch.tensor([0, positions.shape[0]]),
            },
            training=True,
        )  # fmt: skip
        return found["energy"], found["forces"]


class NequIP(nn.Module):
    """NequIP of three layers, features of l = 0 and 1."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        import e3nn

        e3nn.set_optimization_defaults(jit_script_fx=False)
        from nequip.model import NequIPGNNModel
        from nequip.utils.global_state import set_global_state

        set_global_state(allow_tf32=False)
        self.field = NequIPGNNModel(
            seed=0, model_dtype="float32", type_names=["H", "C", "O"], r_max=CUTOFF, num_layers=3, l_max=1, parity=True, num_features=channels,
            radial_mlp_depth=1, radial_mlp_width=64, avg_num_neighbors=13.0, per_type_energy_scales=1.0, per_type_energy_shifts=0.0,
        )  # fmt: skip

    def forward(
        self, positions: torch.Tensor, kinds: torch.Tensor, edges: torch.Tensor, shifts: torch.Tensor, cell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Energy (1, 1) and forces (atoms, 3)."""
        found = self.field({"pos": positions, "atom_types": kinds, "edge_index": edges})
        return found["total_energy"], found["forces"]


FAMILIES: dict[str, Callable[[int], nn.Module]] = {"mace": Mace, "nequip": NequIP}


def _loss(found: tuple[torch.Tensor, torch.Tensor], forces: torch.Tensor) -> torch.Tensor:
    return found[0].square().mean() * 1e-4 + (found[1] - forces).square().mean()


def _session(model: Any) -> onnxruntime.InferenceSession:
    options = exporter.session_options()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return exporter.inference_session(model, sess_options=options)


def _shapes() -> tuple[Any, ...]:
    atoms, edges = torch.export.Dim("atoms", min=2), torch.export.Dim("edges", min=2)
    return {0: atoms}, {0: atoms}, {1: edges}, {0: edges}, None


def rows(family: str, channels: int, dynamo: bool, runs: int, *, with_step: bool) -> list[Figure]:
    """The figures of one model by one exporter.

    Raises:
        RuntimeError: The file gives other numbers than eager.
    """
    torch.manual_seed(0)
    model, inputs = FAMILIES[family](channels).eval(), system()
    fresh = lambda: [value.clone() for value in inputs]  # noqa: E731
    what = f"{family}, {channels} channels, {inputs[2].shape[1]} edges, {'dynamo' if dynamo else 'TorchScript'}"
    expected = [value.detach().numpy() for value in model(*fresh())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = exporter.export(model, inputs, dynamo=dynamo, dynamic_shapes=_shapes())
    operators = Counter(node.op_type for node in program.model.graph)
    session = _session(program.model)
    feeds = {value.name: inputs[_NAMES.index(value.name)].numpy() for value in session.get_inputs()}
    for found, wanted in zip(session.run(None, feeds), expected, strict=True):
        if not np.allclose(found, wanted, rtol=1e-4, atol=1e-4 * abs(wanted).max()):
            raise RuntimeError(f"{what}: the file differs from eager")
    calls = [lambda: session.run(None, feeds), lambda: model(*fresh())]
    labels = ["energy and forces"]
    if with_step:
        target = torch.randn(inputs[0].shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = exporter.export_training_step(
                model.train(),
                inputs,
                loss=_loss,
                targets=(target,),
                optimizer="sgd",
                hyperparameters={"lr": 1e-6},
                dynamo=dynamo,
                dynamic_shapes=_shapes(),
            )
        trainer = _session(step.model)
        given = {**step.initial, **{name: value.numpy() for name, value in zip(_NAMES, inputs)}, "target": target.numpy()}
        given = {value.name: given[value.name] for value in trainer.get_inputs()}
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

        def eager() -> None:
            optimizer.zero_grad()
            _loss(model(*fresh()), target).backward()
            optimizer.step()

        calls += [lambda: trainer.run(None, given), eager]
        labels.append("training step")
    spent = rounds(calls, runs)
    figures = []
    for number, label in enumerate(labels):
        ratio = statistics.median(times[2 * number] / times[2 * number + 1] for times in spent)
        mine, theirs = (1e3 * statistics.median(times[2 * number + k] for times in spent) for k in (0, 1))
        note = f"{mine:.1f} ms; eager {theirs:.1f} ms; Einsums left: {operators['Einsum']}"
        limit = LIMIT if channels == 64 and number == 0 else None
        figures.append(Figure(f"{what}: {label}, file / eager", ratio, "ratio", limit, runs, note))
    return figures


def main() -> int:
    """Run and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; default: those whose packages are there")
    parser.add_argument("--channels", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--exporters", nargs="+", choices=["dynamo", "torchscript"], default=["dynamo", "torchscript"])
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--step", action="store_true", help="a training step, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: list[Figure] = []
    for family in options.families or FAMILIES:
        if not options.families and importlib.util.find_spec(family) is None:
            figures.append(Figure(f"{family}: energy and forces, file / eager", None, "ratio", note="its package is not there"))
            continue
        for channels in options.channels:
            for name in options.exporters:
                figures += rows(family, channels, name == "dynamo", options.runs, with_step=options.step)
    return tell("force_fields", figures)


if __name__ == "__main__":
    sys.exit(main())
