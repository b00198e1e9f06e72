"""Force fields of packages, small and with random weights, as modules that take what a neighbour list gives: for `benchmarks.force_fields`.

What a wrapper changes in its package stands in its docstring; docs/force-fields.md has the table.
"""

from __future__ import annotations

import types
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from torch import nn

from benchmarks._force_field import ATOMS, CUTOFF, KINDS, NUMBERS, Tensors, Wrapped, derivatives, strained, system

__all__ = ["FAMILIES"]


class Mace(Wrapped):
    """MACE of two interactions, correlation 3, hidden states of l = 0 and 1. e3nn must not script."""

    package = "mace"

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
            atomic_energies=np.array([-1.0, -3.0, -5.0]), avg_num_neighbors=13.0, atomic_numbers=list(NUMBERS), correlation=3,
        )  # fmt: skip

    def forward(
        self, positions: torch.Tensor, kinds: torch.Tensor, edges: torch.Tensor, shifts: torch.Tensor, cell: torch.Tensor
    ) -> Tensors:
        """Energy (1) and forces."""
        found = self.field(
            {
                "positions": positions, "node_attrs": nn.functional.one_hot(kinds, KINDS).to(positions.dtype), "edge_index": edges,
                "shifts": shifts, "unit_shifts": shifts, "cell": cell, "batch": torch.zeros_like(kinds), "ptr": torch.tensor([0, positions.shape[0]]),
            },
            training=True,
        )  # fmt: skip
        return found["energy"], found["forces"]


class NequIP(Wrapped):
    """NequIP of three layers, features of l = 0 and 1. e3nn must not script."""

    package = "nequip"

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.field = self._made(channels)

    def _made(self, channels: int) -> nn.Module:
        _nequip()
        from nequip.model import NequIPGNNModel

        return NequIPGNNModel(
            seed=0, model_dtype="float32", type_names=["H", "C", "O"], r_max=CUTOFF, num_layers=3, l_max=1, parity=True, num_features=channels,
            radial_mlp_depth=1, radial_mlp_width=64, avg_num_neighbors=13.0, per_type_energy_scales=1.0, per_type_energy_shifts=0.0,
        )  # fmt: skip

    def forward(
        self, positions: torch.Tensor, kinds: torch.Tensor, edges: torch.Tensor, shifts: torch.Tensor, cell: torch.Tensor
    ) -> Tensors:
        """Energy (1, 1) and forces."""
        found = self.field({"pos": positions, "atom_types": kinds, "edge_index": edges})
        return found["total_energy"], found["forces"]


class Allegro(NequIP):
    """Allegro of two layers, l_max 1. e3nn must not script."""

    package = "allegro"

    def _made(self, channels: int) -> nn.Module:
        _nequip()
        from allegro.model import AllegroModel

        embed = {
            "_target_": "allegro.nn.TwoBodyBesselScalarEmbed", "num_bessels": 8, "bessel_trainable": False, "polynomial_cutoff_p": 6,
        }  # fmt: skip
        return AllegroModel(
            seed=0, model_dtype="float32", type_names=["H", "C", "O"], r_max=CUTOFF, l_max=1, parity=True, radial_chemical_embed=embed,
            radial_chemical_embed_dim=channels, num_layers=2, num_scalar_features=channels, num_tensor_features=channels // 2, avg_num_neighbors=13.0,
            per_type_energy_scales=1.0, per_type_energy_shifts=0.0,
        )  # fmt: skip


def _nequip() -> None:
    import e3nn

    e3nn.set_optimization_defaults(jit_script_fx=False)
    from nequip.utils.global_state import set_global_state

    set_global_state(allow_tf32=False)


def _schnetpack() -> Any:
    import typing

    import torch.utils.data.dataloader as loader

    loader.T_co = getattr(loader, "T_co", typing.TypeVar("T_co"))  # which newer torch has not, and the package imports
    import schnetpack

    return schnetpack


class SchNet(Wrapped):
    """SchNet of three interactions, energy summed over atoms here: the package asks how many molecules there are by `int(tensor)`. With stress."""

    package = "schnetpack"

    def __init__(self, channels: int) -> None:
        super().__init__()
        spk = _schnetpack()
        self.field = self._made(spk, channels)
        self.head = spk.atomistic.Atomwise(channels, aggregation_mode=None, per_atom_output_key="atoms")

    def _made(self, spk: Any, channels: int) -> nn.Module:
        return spk.representation.SchNet(channels, 3, spk.nn.GaussianRBF(20, CUTOFF), spk.nn.CosineCutoff(CUTOFF))

    def forward(
        self, positions: torch.Tensor, kinds: torch.Tensor, edges: torch.Tensor, shifts: torch.Tensor, cell: torch.Tensor
    ) -> Tensors:
        """Energy, forces and stress."""
        positions.requires_grad_(True)
        moved, over, strain = strained(positions, shifts)
        first, second = edges[0], edges[1]
        numbers = torch.tensor(NUMBERS)[kinds]
        given = {"_atomic_numbers": numbers, "_Rij": moved[second] - moved[first] + over, "_idx_i": first, "_idx_j": second}
        return derivatives(self.head(self.field(given))["atoms"].sum(), positions, strain, cell)


class PaiNN(SchNet):
    """PaiNN of three interactions, energy summed over atoms here. With stress."""

    def _made(self, spk: Any, channels: int) -> nn.Module:
        return spk.representation.PaiNN(channels, 3, spk.nn.GaussianRBF(20, CUTOFF), spk.nn.CosineCutoff(CUTOFF))


class Ani(Wrapped):
    """ANI of TorchANI. Pairs and triples are made outside, by its own function; networks of elements that no atom has run on no rows. Channels change nothing."""

    package = "torchani"

    names = ("positions", "kinds", "pairs", "near", "centres", "sides", "signs")
    open = ({0: "atoms"}, {0: "atoms"}, {1: "pairs"}, {0: "near"}, {0: "triples"}, {1: "triples"}, {1: "triples"})

    def __init__(self, channels: int) -> None:
        super().__init__()
        del channels
        from torchani.arch import simple_ani

        made = simple_ani(
            ("H", "C", "O"), lot="wb97x-631gd", repulsion=False, self_energies="zero", periodic_table_index=False, strategy="pyaev",
            radial_cutoff=CUTOFF, angular_cutoff=3.0,
        )  # fmt: skip
        self.aev, self.networks = made.aev_computer, made.neural_networks

    def given(self, atoms: int = ATOMS) -> Tensors:
        """Pairs (2, pairs) each once, which of them are near enough for angles, and the triples of these."""
        from torchani.neighbors import Neighbors, neighbors_to_triples

        positions, kinds, edges, _, _ = system(atoms)
        pairs = edges[:, edges[0] < edges[1]]
        vectors = positions[pairs[0]] - positions[pairs[1]]
        (near,) = torch.where(vectors.norm(dim=-1) < 3.0)
        found = neighbors_to_triples(Neighbors(pairs[:, near], vectors[near].norm(dim=-1), vectors[near]))
        return positions, kinds, pairs, near, found.central_idxs, found.side_idxs, found.diff_signs.long()

    def forward(
        self,
        positions: torch.Tensor,
        kinds: torch.Tensor,
        pairs: torch.Tensor,
        near: torch.Tensor,
        centres: torch.Tensor,
        sides: torch.Tensor,
        signs: torch.Tensor,
    ) -> Tensors:
        """Energy and forces."""
        positions.requires_grad_(True)
        elements, aev = kinds[None], self.aev
        vectors = positions[pairs[0]] - positions[pairs[1]]
        distances = vectors.norm(dim=-1)
        radial = aev._collect_radial(elements, pairs, aev.radial(distances))
        some = pairs[:, near]
        apart, away = distances[near][sides], vectors[near][sides] * signs[..., None]
        angular = aev._collect_angular(elements, some, centres, sides, signs, aev.angular(apart, away))
        features = torch.cat([radial, angular], dim=-1)[0]
        energy = torch.zeros((), dtype=positions.dtype)
        for kind, network in enumerate(
            self.networks.atomics.values()
        ):  # ANINetworks.forward, without its `if` on how many atoms a kind has
            energy = energy + network(features[(kinds == kind).nonzero()[:, 0]]).sum()
        (slope,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -slope


class ChgNet(Wrapped):
    """CHGNet. Its graph is given (int64); where it counts rows by bincount to find how many crystals there are, there is one. With stress."""

    package = "chgnet"

    names = ("positions", "kinds", "edges", "images", "cell", "one_way", "both_ways", "angles")
    open = ({0: "atoms"}, {0: "atoms"}, {0: "edges"}, {0: "edges"}, None, {0: "one_way"}, {0: "edges"}, {0: "angles"})

    def __init__(self, channels: int) -> None:
        super().__init__()
        from chgnet.model import CHGNet, functions, layers

        def aggregate(data: torch.Tensor, owners: torch.Tensor, *, average: bool = True, num_owner: int | None = None) -> torch.Tensor:
            assert not average
            return data.new_zeros((num_owner or 1, data.shape[1])).index_add(0, owners, data)

        functions.aggregate = layers.aggregate = aggregate
        self.field = CHGNet(
            atom_fea_dim=channels, bond_fea_dim=channels, angle_fea_dim=channels, atom_conv_hidden_dim=channels, bond_conv_hidden_dim=channels,
            mlp_hidden_dims=(channels, channels), atom_graph_cutoff=CUTOFF, bond_graph_cutoff=3.0, composition_model=None, is_intensive=False,
        )  # fmt: skip

    def given(self, atoms: int = ATOMS) -> Tensors:
        """As the package's converter makes it of a structure."""
        from chgnet.graph import CrystalGraphConverter
        from pymatgen.core import Structure

        positions, kinds, _, _, cell = system(atoms)
        names = [("H", "C", "O")[kind] for kind in kinds]
        structure = Structure(cell.numpy(), names, positions.numpy(), coords_are_cartesian=True)
        graph = CrystalGraphConverter(atom_graph_cutoff=CUTOFF, bond_graph_cutoff=3.0)(structure)
        ways = graph.undirected2directed.long(), graph.directed2undirected.long()
        return positions, kinds, graph.atom_graph.long(), graph.neighbor_image.float(), cell, *ways, graph.bond_graph.long()

    def forward(
        self,
        positions: torch.Tensor,
        kinds: torch.Tensor,
        edges: torch.Tensor,
        images: torch.Tensor,
        cell: torch.Tensor,
        one_way: torch.Tensor,
        both_ways: torch.Tensor,
        angles: torch.Tensor,
    ) -> Tensors:
        """Energy (1), forces and stress."""
        from chgnet.model.model import BatchedGraph

        positions.requires_grad_(True)
        moved, _, strain = strained(positions, images)
        lattice = cell + cell @ ((strain + strain.T) / 2)
        near, far, vectors = self.field.bond_basis_expansion(moved[edges[:, 0]], moved[edges[:, 1]], one_way, images, lattice)
        bases = self.field.angle_basis_expansion(vectors[angles[:, 2]], vectors[angles[:, 4]])
        graph = BatchedGraph(
            atomic_numbers=torch.tensor(NUMBERS)[kinds], bond_bases_ag=near, bond_bases_bg=far, angle_bases=bases, batched_atom_graph=edges,
            batched_bond_graph=torch.stack([angles[:, 0], angles[:, 1], angles[:, 3]], 1), atom_owners=torch.zeros_like(kinds),
            directed2undirected=both_ways, atom_positions=[positions], strains=[strain], volumes=[],
        )  # fmt: skip
        with mock.patch.object(torch, "bincount", return_value=torch.ones(1, dtype=torch.int64)):  # read for intensive energies alone
            energy = self.field._compute(graph)["e"]
        return derivatives(energy, positions, strain, cell)


class SevenNet(Wrapped):
    """SevenNet of three convolutions, l_max 1, one system, forces of positions. e3nn must not script."""

    package = "sevenn"

    def __init__(self, channels: int) -> None:
        super().__init__()
        import e3nn

        e3nn.set_optimization_defaults(jit_script_fx=False)
        import sevenn._const as const
        from sevenn.model_build import build_E3_equivariant_model
        from sevenn.nn.force_output import ForceOutput

        config = dict(const.DEFAULT_E3_EQUIVARIANT_MODEL_CONFIG)
        types_ = {number: kind for kind, number in enumerate(NUMBERS)}
        config.update(
            {
                "cutoff": CUTOFF, "channel": channels, "_number_of_species": KINDS, "_type_map": types_, "chemical_species": ["C", "H", "O"],
                "conv_denominator": 13.0, "shift": 0.0, "scale": 1.0, "version": "0",
            }
        )  # fmt: skip
        self.field = build_E3_equivariant_model(config)
        self.field.replace_module("force_output", ForceOutput())
        self.field.key_grad = None
        self.field.set_is_batch_data(False)

    def forward(
        self, positions: torch.Tensor, kinds: torch.Tensor, edges: torch.Tensor, shifts: torch.Tensor, cell: torch.Tensor
    ) -> Tensors:
        """Energy and forces."""
        positions.requires_grad_(True)
        vectors = positions[edges[1]] - positions[edges[0]] + shifts
        self.field.train()  # for the gradient of forces
        given = {"atomic_numbers": torch.tensor(NUMBERS)[kinds], "pos": positions, "edge_index": edges, "edge_vec": vectors}
        found = self.field(given)
        return found["inferred_total_energy"], found["inferred_force"]


class _Given(nn.Module):
    """In the place of a model's own neighbour list: what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Tensors] = []

    def forward(self, *_: Any) -> Tensors:
        return self.told[-1]


class TorchMdTensorNet(Wrapped):
    """TensorNet of TorchMD-Net, two layers, without Warp. Its own neighbour list is replaced by the edges given. With stress."""

    package = "torchmdnet"

    model: ClassVar[str] = "tensornet"

    def __init__(self, channels: int) -> None:
        super().__init__()
        import sys

        from torchmdnet.models.model import create_model

        own = sys.modules.pop("torchmdnet.extensions.warp_ops")
        sys.modules["torchmdnet.extensions.warp_ops"] = None  # type: ignore[assignment] # as if Warp were not there: formulas in torch serve
        import torchmdnet.models.tensornet  # noqa: F401

        sys.modules["torchmdnet.extensions.warp_ops"] = own

        self.field = create_model(
            {
                "model": self.model, "embedding_dimension": channels, "num_layers": 2, "num_rbf": 16, "rbf_type": "expnorm", "trainable_rbf": False,
                "activation": "silu", "cutoff_lower": 0.0, "cutoff_upper": CUTOFF, "max_z": 10, "max_num_neighbors": 64, "precision": 32,
                "equivariance_invariance_group": "O(3)", "derivative": False, "atom_filter": -1, "prior_model": None, "output_model": "Scalar",
                "reduce_op": "add", "aggr": "add", "neighbor_embedding": False, "attn_activation": "silu", "num_heads": 4, "distance_influence": "both",
            }
        )  # fmt: skip
        self.field.representation_model.distance = _Given()

    def forward(
        self, positions: torch.Tensor, kinds: torch.Tensor, edges: torch.Tensor, shifts: torch.Tensor, cell: torch.Tensor
    ) -> Tensors:
        """Energy (1, 1), forces and stress."""
        positions.requires_grad_(True)
        moved, over, strain = strained(positions, shifts)
        vectors = moved[edges[0]] - moved[edges[1]] - over
        self.field.representation_model.distance.told[:] = [(edges, vectors.norm(dim=-1), vectors.clone())]
        energy, _ = self.field(torch.tensor(NUMBERS)[kinds], moved, num_systems=1)
        return derivatives(energy, positions, strain, cell)


class TorchMdGn(TorchMdTensorNet):
    """The graph network of TorchMD-Net, without neighbour embedding, which asks `if not mask.all()`."""

    model = "graph-network"


class MatglTensorNet(Wrapped):
    """TensorNet of MatGL, without Warp. With stress."""

    package = "matgl"

    def __init__(self, channels: int) -> None:
        super().__init__()
        from matgl.models import TensorNet

        self.field = TensorNet(element_types=("H", "C", "O"), units=channels, cutoff=CUTOFF, nblocks=2, is_intensive=False, use_warp=False)

    def forward(
        self, positions: torch.Tensor, kinds: torch.Tensor, edges: torch.Tensor, shifts: torch.Tensor, cell: torch.Tensor
    ) -> Tensors:
        """Energy, forces and stress."""
        positions.requires_grad_(True)
        moved, over, strain = strained(positions, shifts)
        energy = self.field(types.SimpleNamespace(node_type=kinds, pos=moved, edge_index=edges, pbc_offshift=over))
        return derivatives(energy, positions, strain, cell)


class M3GNet(Wrapped):
    """M3GNet of MatGL. Its line graph is given, and its check of the line graph against the positions is left out. With stress."""

    package = "matgl"

    names = (*Wrapped.names, "triples", "counts")
    open = (*Wrapped.open, {1: "triples"}, {0: "edges"})

    def __init__(self, channels: int) -> None:
        super().__init__()
        from matgl.models import M3GNet as Model, _m3gnet

        _m3gnet.ensure_line_graph_compatibility = lambda graph, *_: graph
        self.field = Model(
            element_types=("H", "C", "O"), dim_node_embedding=channels, dim_edge_embedding=channels, units=channels, nblocks=2, cutoff=CUTOFF,
            threebody_cutoff=3.0, is_intensive=False, use_smooth=True,
        )  # fmt: skip

    def given(self, atoms: int = ATOMS) -> Tensors:
        """And the pairs of bonds that make an angle, with how many each bond begins."""
        from matgl.graph._compute import create_line_graph_torch

        positions, kinds, edges, shifts, cell = system(atoms)
        vectors = positions[edges[1]] - positions[edges[0]] + shifts
        graph = create_line_graph_torch(edges, vectors.norm(dim=-1), vectors, atoms, 3.0)
        return positions, kinds, edges, shifts, cell, graph["line_edge_index"], graph["n_triple_ij"]

    def forward(
        self,
        positions: torch.Tensor,
        kinds: torch.Tensor,
        edges: torch.Tensor,
        shifts: torch.Tensor,
        cell: torch.Tensor,
        triples: torch.Tensor,
        counts: torch.Tensor,
    ) -> Tensors:
        """Energy, forces and stress."""
        positions.requires_grad_(True)
        moved, over, strain = strained(positions, shifts)
        graph = types.SimpleNamespace(node_type=kinds, pos=moved, edge_index=edges, pbc_offshift=over)
        energy = self.field(graph, l_g={"line_edge_index": triples, "n_triple_ij": counts})
        return derivatives(energy, positions, strain, cell)


class Orb(Wrapped):
    """Orb v3, conservative, two steps of messages, its own stress. One system: no searchsorted for which system an atom is of, no matrix exponential of a rotation by nothing
    (its first order serves), and the power of its repulsion is a number.
    """

    package = "orb_models"

    def __init__(self, channels: int) -> None:
        super().__init__()
        import sys

        sys.modules.setdefault("cached_path", types.SimpleNamespace(cached_path=None))  # it fetches weights, which nobody asks for
        from orb_models.forcefield import featurization_utilities, segment_ops
        from orb_models.forcefield.base import AtomGraphs
        from orb_models.forcefield.pretrained import orb_v3_conservative_architecture

        AtomGraphs._get_per_node_graph_indices = lambda graph: torch.zeros_like(graph.node_features["atomic_numbers"])
        AtomGraphs._get_per_edge_graph_indices = lambda graph: torch.zeros_like(graph.senders)
        featurization_utilities.rotation_from_generator = lambda turn: torch.eye(3, dtype=turn.dtype) + turn - turn.mT
        segment_ops.aggregate_nodes = lambda x, _, reduction="mean", **__: (x.sum(0) if reduction == "sum" else x.mean(0))[None]
        self.field = orb_v3_conservative_architecture(
            latent_dim=channels, base_mlp_hidden_dim=channels, head_mlp_hidden_dim=channels, num_message_passing_steps=2, device="cpu"
        )
        power = float(self.field.pair_repulsion_fn.p)
        del self.field.pair_repulsion_fn.p
        self.field.pair_repulsion_fn.p = power

    def forward(
        self, positions: torch.Tensor, kinds: torch.Tensor, edges: torch.Tensor, shifts: torch.Tensor, cell: torch.Tensor
    ) -> Tensors:
        """Energy (1), forces and stress (1, 6)."""
        from orb_models.forcefield.base import AtomGraphs

        numbers = torch.tensor(NUMBERS)[kinds]
        graph = AtomGraphs(
            senders=edges[0], receivers=edges[1], n_node=torch.tensor([positions.shape[0]]), n_edge=torch.tensor([edges.shape[1]]),
            node_features={"positions": positions, "atomic_numbers": numbers, "atomic_numbers_embedding": nn.functional.one_hot(numbers, 118).float()},
            edge_features={"unit_shifts": shifts}, system_features={"cell": cell[None]}, node_targets=None, edge_targets=None, system_targets=None,
            system_id=None, fix_atoms=None, tags=None, radius=CUTOFF, max_num_neighbors=torch.tensor([64]),
        )  # fmt: skip
        found = self.field(graph)
        return found["energy"], found["grad_forces"], found["grad_stress"]


FAMILIES: dict[str, type[Wrapped]] = {
    "mace": Mace, "nequip": NequIP, "allegro": Allegro, "schnet": SchNet, "painn": PaiNN, "ani": Ani, "chgnet": ChgNet, "sevennet": SevenNet,
    "tensornet": TorchMdTensorNet, "torchmd-gn": TorchMdGn, "matgl-tensornet": MatglTensorNet, "m3gnet": M3GNet, "orb": Orb,
}  # fmt: skip
