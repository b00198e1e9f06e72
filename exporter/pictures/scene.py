"""What a picture of a graph shows: boxes for nodes and folded modules, arrows for the values between them. No positions yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import onnx_ir as ir

from exporter.files.inspect import tensor_text
from exporter.files.places import PARTS, Part, Places
from symbolics.gradients.nondifferentiable import FLAT
from symbolics.graph.values import is_mark, is_python_op, is_python_op_tangent, may_be_float, operator_text
from symbolics.graph.walk import reads, walk
from symbolics.node.backward import is_backward
from symbolics.node.metadata import pairing_of, step_of
from symbolics.node.names import ORT_DOMAIN, PYTHON_OP_GRAD, SOURCE_PROPERTY, is_operator

__all__ = ["Arrow", "Box", "Cluster", "Drawn", "Key", "Scene", "facts_of", "facts_of_node", "is_called", "title_of"]

BoxKind = Literal["node", "module", "input", "output", "outside"]

#: A module of a part: its part, and the names on its path.
Key = tuple[Part, tuple[str, ...]]


@dataclass
class Box:
    """One box.

    Attributes:
        kind: What it stands for: one node, a folded module, an input or output of the graph, a module outside of what is shown.
        part: What it belongs to.
        title, subtitle: Its two lines.
        nodes: The nodes that it stands for.
        python: How many PythonOps and their gradients it holds.
        stops: How many places where gradients stop.
        key: Of a module.
        value: Of an input or output.
    """

    kind: BoxKind
    part: Part
    title: str
    subtitle: str = ""
    nodes: list[ir.Node] = field(default_factory=list)
    python: int = 0
    stops: int = 0
    key: Key | None = None
    value: ir.Value | None = None


@dataclass
class Arrow:
    """Values that go from one box to another, which are places in `Scene.boxes`."""

    source: int
    target: int
    values: list[ir.Value] = field(default_factory=list)


@dataclass
class Cluster:
    """An open module: a frame around boxes and around the modules inside it."""

    title: str
    part: Part
    boxes: list[int] = field(default_factory=list)
    inside: list[Cluster] = field(default_factory=list)


@dataclass
class Scene:
    """A picture without positions."""

    boxes: list[Box] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    clusters: list[Cluster] = field(default_factory=list)


class Drawn:
    """A model as it can be drawn: at any depth, or one module alone.

    Args:
        model: The model. Bodies of control flow are drawn as the node that they belong to.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.places = Places(model)
        self.nodes = [node for node in model.graph if node.op_type != "Constant" or node.domain]
        self.keys: dict[ir.Node, Key] = {
            node: (self.places.part(node), tuple(filter(None, self.places.module(node).split(".")))) for node in self.nodes
        }
        self._step = step_of(model)
        pairing = pairing_of(model)
        #: Gradients of parameters: the boxes of their nodes say them, an end for each would be most of the picture.
        self._of_parameters = (
            {name for of, name in pairing.outputs.items() if of in model.graph.initializers} if pairing is not None else set()
        )
        unreached = set(pairing.unreached if pairing is not None else ())
        if self._step is not None:
            unreached |= {self._step.parameters[key] for key in self._step.untrained if key in self._step.parameters}
        self.unreached = unreached | {pairing.outputs[name] for name in unreached if pairing is not None and name in pairing.outputs}

    # ------------------------------------------------------------------------------------------------------ the depths
    @property
    def deepest(self) -> int:
        """The least depth at which every node is a box."""
        return 1 + max((len(path) for _, path in self.keys.values()), default=0)

    def count(self, depth: int) -> int:
        """How many boxes of nodes and modules a picture of this depth has."""
        return len({self._folded(key, depth) or node for node, key in self.keys.items()})

    def depth_for(self, boxes: int) -> int:
        """The largest depth with at most so many boxes, at least 1."""
        return max((depth for depth in range(1, self.deepest + 1) if self.count(depth) <= boxes), default=1)

    def modules(self) -> list[Key]:
        """Every module that has nodes, or modules with nodes."""
        return list(dict.fromkeys((part, path[:n]) for part, path in self.keys.values() for n in range(1, len(path) + 1)))

    def home(self, key: Key) -> Key:
        """The module itself, or, where it holds one module and nothing else, that one."""
        part, path = key
        inner = {p for q, p in self.keys.values() if q == part and p[: len(path)] == path}
        while inner and path not in inner and len({p[: len(path) + 1] for p in inner}) == 1:
            path = next(iter(inner))[: len(path) + 1]
        return part, path

    # ------------------------------------------------------------------------------------------------------ the scenes
    def whole(self, depth: int) -> Scene:
        """The graph; modules below ``depth`` are folded. 0: each part is one box."""
        return self._scene({node: self._folded(key, depth) for node, key in self.keys.items()}, set(), frames=True)

    def inside(self, module: Key) -> Scene:
        """One module, its own modules folded; what it reads and what reads it are boxes outside."""
        part, path = module
        depth = len(path)
        folded: dict[ir.Node, Key | None] = {}
        outside = set[Key]()
        for node, key in self.keys.items():
            if key[0] == part and key[1][:depth] == path:
                folded[node] = self._folded(key, depth + 1)
                continue
            shared = next((i for i, (x, y) in enumerate(zip(key[1], path, strict=False)) if x != y), min(len(key[1]), depth))
            there = key[0], key[1][: shared + 1] if key[0] == part else key[1][:depth]
            folded[node] = there
            outside.add(there)
        return self._scene(folded, outside, frames=False)

    def _folded(self, key: Key, depth: int) -> Key | None:
        """The module that a node is folded into, None where it is a box of its own."""
        part, path = key
        return (part, path[:depth]) if len(path) >= depth else None

    def _scene(self, folded: dict[ir.Node, Key | None], outside: set[Key], frames: bool) -> Scene:
        scene, places, at = Scene(), dict[Key, int](), dict[ir.Node, int]()
        for node in self.nodes:
            key = folded[node]
            if key is not None and key in places:
                at[node] = places[key]
            else:
                at[node] = len(scene.boxes)
                scene.boxes.append(
                    Box("node", self.places.part(node), "")
                    if key is None
                    else Box("outside" if key in outside else "module", key[0], "", key=key)
                )
                if key is not None:
                    places[key] = at[node]
            scene.boxes[at[node]].nodes.append(node)
        arrows = self._arrows(at)
        self._ends(scene, at, arrows)
        if outside:
            _keep_neighbours(scene, arrows)
        scene.arrows = [arrow for (source, target), arrow in arrows.items() if source != target] if not outside else scene.arrows
        for box in scene.boxes:
            self._fill(box)
        if frames:
            scene.clusters = self._clusters(scene)
        return scene

    def _arrows(self, at: dict[ir.Node, int]) -> dict[tuple[int, int], Arrow]:
        arrows: dict[tuple[int, int], Arrow] = {}
        for node in self.nodes:
            for value in reads(node):
                maker = value.producer()
                if maker in at and at[maker] != at[node]:
                    arrow = arrows.setdefault((at[maker], at[node]), Arrow(at[maker], at[node]))
                    if value not in arrow.values:
                        arrow.values.append(value)
        return arrows

    def _ends(self, scene: Scene, at: dict[ir.Node, int], arrows: dict[tuple[int, int], Arrow]) -> None:
        """Inputs and outputs of the graph; not gradients of parameters, and not what a training step carries from one step to the next."""
        carried = self._step.carried if self._step is not None else {}
        kept = set(carried.values())
        readers: dict[ir.Value, dict[int, None]] = {}
        for node in self.nodes:
            for value in reads(node):
                if value.is_graph_input():
                    readers.setdefault(value, {})[at[node]] = None
        for value in self.model.graph.inputs:
            if value.name in kept or value.is_initializer():
                continue
            targets = readers.get(value, {})
            part: Part = scene.boxes[next(iter(targets))].part if targets else "forward"
            scene.boxes.append(Box("input", part, str(value.name), tensor_text(value), value=value, stops=value.name in self.unreached))
            for target in targets:
                arrows[len(scene.boxes) - 1, target] = Arrow(len(scene.boxes) - 1, target, [value])
        for value in dict.fromkeys(self.model.graph.outputs):
            if value.name in carried or value.name in self._of_parameters:
                continue
            maker = value.producer()
            source = at.get(maker) if maker is not None else None
            scene.boxes.append(
                Box(
                    "output",
                    scene.boxes[source].part if source is not None else "forward",
                    str(value.name),
                    tensor_text(value),
                    value=value,
                )
            )
            if source is not None:
                arrows[source, len(scene.boxes) - 1] = Arrow(source, len(scene.boxes) - 1, [value])

    def _fill(self, box: Box) -> None:
        """Titles, and what a box has inside that is coloured."""
        nodes = [*walk(box.nodes)]
        box.python = sum(map(is_called, nodes))
        box.stops += sum(map(self.is_stop, nodes))
        if box.kind == "node":
            node = box.nodes[0]
            box.title, box.subtitle = (
                title_of(node),
                next((tensor_text(v) for v in node.outputs[is_python_op(node) :] if v.name), "").lstrip("?"),
            )
        elif box.key is not None:
            box.title = ".".join(box.key[1]) or {"forward": "the model", "update": "the optimizer"}.get(box.part, f"the {box.part} graph")
            box.subtitle = f"{len(nodes)} node{'s' * (len(nodes) != 1)}" + (
                f", {box.python} PythonOp{'s' * (box.python != 1)}" if box.python else ""
            )

    def is_stop(self, node: ir.Node) -> bool:
        """Whether gradients end at a node: a mark, an operator that is flat, a reader of what no gradient reaches, or the zeros that stand for that gradient."""
        flat = node.op_type in FLAT and node.domain == "" and all(map(may_be_float, node.outputs))
        unreached = any(v is not None and v.producer() is None and v.name in self.unreached for v in node.inputs)
        return is_mark(node) or flat or unreached or any(v.name in self.unreached for v in node.outputs)

    def _clusters(self, scene: Scene) -> list[Cluster]:
        """Frames around what is open: the gradient, and each module of which more than one box is shown."""
        top: dict[Part, Cluster] = {}
        found: dict[Key, Cluster] = {}
        paths = {
            i: (box.part, box.key[1][:-1] if box.key is not None else self.keys[box.nodes[0]][1])
            for i, box in enumerate(scene.boxes)
            if box.nodes
        }
        members = Counter((part, path[:n]) for part, path in paths.values() for n in range(1, len(path) + 1))
        for i, (part, path) in paths.items():
            here = top.setdefault(part, Cluster("" if part == "forward" else part, part))
            for n in range(1, len(path) + 1):
                key = part, path[:n]
                if members[key] > 1 and (n == len(path) or members[key] > members[part, path[: n + 1]] or n == 1):
                    if key not in found:
                        found[key] = Cluster(".".join(path[:n]), part)
                        here.inside.append(found[key])
                    here = found[key]
            here.boxes.append(i)
            box = scene.boxes[i]
            if box.key is not None and here is not top[part] and len(inner := box.key[1]) > (shown := here.title.count(".") + 1):
                box.title = ".".join(inner[shown:])  # the frame says the rest
        forward = top.pop("forward", None)
        return [*(forward.inside if forward is not None else ()), *(top[part] for part in PARTS if part in top)]


def _keep_neighbours(scene: Scene, arrows: dict[tuple[int, int], Arrow]) -> None:
    """Of boxes outside, keep those that something inside reads or is read by, and no arrow between two of them."""
    inner = {i for i, box in enumerate(scene.boxes) if box.kind in ("node", "module")}
    kept = {pair: arrow for pair, arrow in arrows.items() if inner & set(pair) and pair[0] != pair[1]}
    order = sorted(inner | {i for pair in kept for i in pair})
    new = {old: i for i, old in enumerate(order)}
    scene.boxes = [scene.boxes[i] for i in order]
    scene.arrows = [Arrow(new[a], new[b], arrow.values) for (a, b), arrow in kept.items()]


def is_called(node: ir.Node) -> bool:
    """Whether Python runs for a node: a PythonOp, its gradient or its tangent."""
    return (
        is_python_op(node) or is_python_op_tangent(node) or is_backward(node) or (node.domain, node.op_type) == (ORT_DOMAIN, PYTHON_OP_GRAD)
    )


def title_of(node: ir.Node) -> str:
    """``Gemm``, and of a PythonOp the class of its Function, or its operator."""
    if not is_called(node):
        return node.op_type
    name = next((a.value for key in ("name", "func_name") if (a := node.attributes.get(key)) is not None and isinstance(a.value, str)), "")
    own = name.rpartition(":")[2]
    return (own.removesuffix(".default") if is_operator(name) else own.rpartition(".")[2]) or node.op_type


def operators(nodes: Iterable[ir.Node]) -> list[tuple[str, int]]:
    """The operators of nodes and of their bodies, the most frequent first."""
    return Counter(map(operator_text, walk(nodes))).most_common()


def facts_of(box: Box) -> list[tuple[str, str]]:
    """What is to be said of a box that somebody asks about."""
    found: list[tuple[str, str]] = [("part", box.part)]
    if box.value is not None:
        return [*found, (box.kind, str(box.value.name)), ("type", tensor_text(box.value))]
    if box.key is not None:
        functions = Counter(title_of(node) for node in walk(box.nodes) if is_called(node))
        return [
            *found,
            ("module", ".".join(box.key[1])),
            ("nodes", str(len(box.nodes))),
            ("operators", ", ".join(f"{count} {name}" for name, count in operators(box.nodes))),
            *([("PythonOps", ", ".join(f"{count} {name}" for name, count in functions.most_common()))] if functions else []),
        ]
    return found


def facts_of_node(node: ir.Node, places: Places) -> list[tuple[str, str]]:
    """The same of a node: its names, attributes, and the types of what it reads and makes."""
    rows: list[tuple[str, str]] = [
        ("name", node.name or ""),
        ("operator", operator_text(node)),
    ]
    rows += [("part", places.part(node)), ("module", places.module(node))]
    if source := node.metadata_props.get(SOURCE_PROPERTY):
        rows.append(("source", source))
    rows += [("reads", f"{value.name}  {tensor_text(value)}") for value in node.inputs if value is not None]
    rows += [("makes", f"{value.name}  {tensor_text(value)}") for value in node.outputs if value.name]
    for name, attribute in node.attributes.items():
        rows.append((f"attribute {name}", _attribute(attribute)))
    return rows


def _attribute(attribute: ir.Attr) -> str:
    if attribute.is_ref():
        return f"the function's {attribute.ref_attr_name}"
    value = attribute.value
    if isinstance(value, ir.Graph):
        return ", ".join(f"{count} {name}" for name, count in operators(value)) or "empty"
    if isinstance(value, ir.TensorProtocol):
        return tensor_text(value)
    return str(list(value) if isinstance(value, (list, tuple)) else value)
