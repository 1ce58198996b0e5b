"""From a NetParameter to layers and blobs, as Caffe does in ``Net::Init``.

The net is filtered by its include and exclude rules, gets its Split layers and is built layer by layer; then Caffe's
rule decides what needs gradients. Names, order, automatic tops and shared parameters are those of Caffe; where Caffe
aborts the process, this raises an error with the same information. Only shapes are computed: no memory is allocated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amct.caffe.engine.blob import Blob, size_check
from amct.caffe.engine.layer import Layer, LayerContext, implementation_of, integer_inputs, layer_class
from amct.caffe.engine.messages import new_message
from amct.caffe.engine.weights import copy_messages, shape_text
from amct.errors import ModelError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amct.caffe.engine.messages import ProtoMessage

    Top = tuple[int, int]  # layer index, top index

PERMISSIVE = 1
AUTOMATIC_TOP = "(automatic)"


@dataclass(eq=False)
class LayerNode:
    """A layer of the graph and the blobs it reads and writes (indices into ``NetGraph.blobs``)."""

    index: int
    layer: Layer
    bottoms: list[int] = field(default_factory=list)
    tops: list[int] = field(default_factory=list)
    needs_backward: bool = False
    bottom_needs_gradient: list[bool] = field(default_factory=list)


@dataclass(eq=False)
class LearnableParameter:
    """A parameter blob that the solver updates; shared parameters appear once, with their owner."""

    blob: Blob
    layer: str
    index: int
    name: str
    lr_mult: float | None = None
    decay_mult: float | None = None

    @property
    def rate(self) -> float:
        """The learning-rate multiplier, default 1."""
        return 1.0 if self.lr_mult is None else self.lr_mult

    @property
    def decay(self) -> float:
        """The weight-decay multiplier, default 1."""
        return 1.0 if self.decay_mult is None else self.decay_mult


@dataclass(eq=False)
class NetGraph:
    """A built net."""

    name: str
    phase: int
    force_backward: bool
    nodes: list[LayerNode] = field(default_factory=list)
    blobs: list[Blob] = field(default_factory=list)
    blob_names: list[str] = field(default_factory=list)
    loss_weights: list[float] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    learnable: list[LearnableParameter] = field(default_factory=list)
    owner_of: dict[tuple[int, int], LearnableParameter] = field(default_factory=dict)
    """(layer index, parameter index) to the learnable parameter that holds its values."""


class GraphBuilder:
    """Builds a NetGraph layer by layer; changes the net message it is given."""

    def __init__(self, net: ProtoMessage, *, allow_python: bool = False) -> None:
        self.net = net
        self.graph = NetGraph(name=net.name, phase=net.state.phase, force_backward=net.force_backward)
        self.check_size = size_check()
        self.context = LayerContext(
            phase=net.state.phase,
            allow_python=allow_python,
            check_size=self.check_size,
            integer_inputs=integer_inputs(net.layer),
        )
        self.blob_index: dict[str, int] = {}
        self.available: dict[str, int] = {}
        self.named_parameters: dict[str, LearnableParameter] = {}
        self.blob_needs_gradient: list[bool] = []

    def build(self) -> NetGraph:
        """Create all layers.

        Raises:
            ModelError: A layer, a name or a shape is invalid; the message says which.
        """
        for parameter in self.net.layer:
            self.add_layer(parameter)
        by_name = {node.layer.name: node.layer for node in self.graph.nodes}
        for layer in by_name.values():
            layer.connect(by_name)
        decide_backward(self.graph)
        _refuse_overwritten(self.graph)
        self.graph.outputs = [index for _, index in sorted(self.available.items())]
        return self.graph

    def add_layer(self, original: ProtoMessage) -> None:
        """Create the next layer.

        Raises:
            ModelError: It, a name or a shape is invalid.
        """
        parameter, stored = original, list(original.blobs)
        if stored:
            parameter = type(original)()
            parameter.CopyFrom(original)
            del parameter.blobs[:]
        if not parameter.HasField("phase"):
            parameter.phase = self.net.state.phase
        if parameter.propagate_down and len(parameter.propagate_down) != len(parameter.bottom):
            raise ModelError(
                f'layer "{parameter.name}": propagate_down param must be specified either 0 or bottom_size times, '
                f"got {len(parameter.propagate_down)} for {len(parameter.bottom)} bottom(s)"
            )
        layer = layer_class(implementation_of(parameter, self.context), parameter.name)(parameter, self.context)
        node = LayerNode(len(self.graph.nodes), layer)
        for position, name in enumerate(parameter.bottom):
            self._add_bottom(node, position, name)
        for position, name in enumerate(parameter.top):
            self._add_top(node, position, name)
        takes = f"{layer.type} Layer takes %s bottom blob(s) as input"
        _check_count(layer, len(node.bottoms), layer.bottom_count, takes)
        if layer.makes_missing_tops:
            missing = layer.top_count[0] - len(node.tops)
            node.tops += [self._new_blob(AUTOMATIC_TOP) for _ in range(missing)]
        _check_top_count(node)
        self._set_up(node)
        if stored:
            copy_messages(layer, stored, f'the net "{self.graph.name}"')
        self._set_loss_weights(node)
        self._add_parameters(node)
        self.graph.nodes.append(node)
        if node.needs_backward:
            for top in node.tops:
                self.blob_needs_gradient[top] = True

    def _add_bottom(self, node: LayerNode, position: int, name: str) -> None:
        index = self.available.pop(name, None)
        parameter = node.layer.parameter
        if index is None:
            raise ModelError(f"Unknown bottom blob '{name}' (layer '{parameter.name}', bottom index {position})")
        node.bottoms.append(index)
        needs = self.blob_needs_gradient[index]
        if parameter.propagate_down:
            needs = parameter.propagate_down[position]
        node.bottom_needs_gradient.append(needs)
        node.needs_backward |= needs

    def _add_top(self, node: LayerNode, position: int, name: str) -> None:
        parameter = node.layer.parameter
        in_place = position < len(parameter.bottom) and parameter.bottom[position] == name
        if in_place:
            if not node.layer.allows_in_place:
                raise node.layer.error(
                    f"{parameter.type} Layer does not allow in-place computation; give its top another name"
                )
            index = node.bottoms[position]
        elif name in self.blob_index:
            raise ModelError(
                f"Top blob '{name}' produced by multiple sources: layer \"{parameter.name}\" is one of them"
            )
        else:
            index = self._new_blob(name)
            self.blob_index[name] = index
            if parameter.type == "Input":
                self.graph.inputs.append(index)
        node.tops.append(index)
        self.available[name] = index

    def _new_blob(self, name: str) -> int:
        graph = self.graph
        graph.blobs.append(Blob())
        graph.blob_names.append(name)
        graph.loss_weights.append(0.0)
        self.blob_needs_gradient.append(False)
        return len(graph.blobs) - 1

    def _set_up(self, node: LayerNode) -> None:
        shapes = [self.graph.blobs[index].shape for index in node.bottoms]
        layer = node.layer
        layer.bottom_blobs = [self.graph.blobs[index] for index in node.bottoms]
        layer.top_blobs = [self.graph.blobs[index] for index in node.tops]
        with layer.naming_errors(shapes):
            layer.setup(shapes)
            tops = layer.reshape(shapes)
        for index, shape in zip(node.tops, tops, strict=True):
            self.check_size(shape, f'blob "{self.graph.blob_names[index]}" of layer "{layer.name}"')
            self.graph.blobs[index].set_shape(shape)

    def _set_loss_weights(self, node: LayerNode) -> None:
        layer = node.layer
        given = list(layer.parameter.loss_weight)
        if given and len(given) != len(node.tops):
            raise layer.error(
                f"loss_weight must be unspecified or specified once per top blob: {len(given)} given, "
                f"{len(node.tops)} top(s)"
            )
        if not given and layer.default_loss_weight:
            given = [layer.default_loss_weight] + [0.0] * (len(node.tops) - 1)
            layer.parameter.loss_weight.extend(given)  # Caffe saves it too
        layer.loss_weights = given or [0.0] * len(node.tops)
        for index, weight in zip(node.tops, layer.loss_weights, strict=True):
            self.graph.loss_weights[index] = weight

    def _add_parameters(self, node: LayerNode) -> None:
        layer = node.layer
        specs = list(layer.parameter.param)
        if len(specs) > len(layer.blobs):
            raise ModelError(
                f"Too many params specified for layer {layer.name}: {len(specs)} for {len(layer.blobs)} blob(s)"
            )
        default = new_message("ParamSpec")
        layer.parameter_needs_gradient = []
        for index in range(len(layer.blobs)):
            spec = specs[index] if index < len(specs) else default
            needs = spec.lr_mult != 0
            node.needs_backward |= needs
            layer.parameter_needs_gradient.append(needs)
            self._add_parameter(node, index, spec)

    def _add_parameter(self, node: LayerNode, index: int, spec: ProtoMessage) -> None:
        layer = node.layer
        lr_mult = spec.lr_mult if spec.HasField("lr_mult") else None
        decay_mult = spec.decay_mult if spec.HasField("decay_mult") else None
        owner = self.named_parameters.get(spec.name) if spec.name else None
        if owner is None:
            owner = LearnableParameter(layer.blobs[index], layer.name, index, spec.name, lr_mult, decay_mult)
            self.graph.learnable.append(owner)
            if spec.name:
                self.named_parameters[spec.name] = owner
        else:
            _check_shared_shape(layer, index, owner, permissive=spec.share_mode == PERMISSIVE)
            layer.blobs[index].share_values(owner.blob)
            layer.blobs[index].share_gradients(owner.blob)
            owner.lr_mult = _agreed("lr_mult", owner.lr_mult, lr_mult, spec.name)
            owner.decay_mult = _agreed("decay_mult", owner.decay_mult, decay_mult, spec.name)
        self.graph.owner_of[node.index, index] = owner


def shared_memory(graph: NetGraph) -> list[set[int]]:
    """For each blob, the blobs that in Caffe lie in the same memory (tops of Reshape, Split, ...), and itself."""
    groups = [{index} for index in range(len(graph.blobs))]
    for node in graph.nodes:
        if node.layer.shares_memory and node.bottoms:
            group = groups[node.bottoms[0]]
            for top in node.tops:
                group.add(top)
                groups[top] = group
    return groups


def _refuse_overwritten(graph: NetGraph) -> None:
    """Refuse a reader of a blob after a layer worked in place on another blob that shares its memory.

    In Caffe it reads the changed values. A file that has the layer's result in a blob of its own says what is meant.

    Raises:
        ModelError: There is such a reader.
    """
    groups = shared_memory(graph)
    written: set[int] = set()
    changed: dict[int, tuple[LayerNode, int]] = {}
    for node in graph.nodes:
        for bottom in node.bottoms:
            if bottom in changed:
                by, blob = changed[bottom]
                names = graph.blob_names
                raise ModelError(
                    f'layer "{node.layer.name}" reads "{names[bottom]}" after layer "{by.layer.name}" has worked in '
                    f'place on "{names[blob]}", which in Caffe lies in the same memory, so that it would read the '
                    f'result of "{by.layer.name}". Give "{by.layer.name}" a top of its own, or write a file without '
                    "layers in place: amct_caffe.uninplace_model(model_file, uninplaced_model_file)"
                )
        for top in node.tops[:1]:
            if top in node.bottoms and node.layer.changes_values:
                changed.update(dict.fromkeys((groups[top] & written) - {top}, (node, top)))
        written.update(node.tops)


def _check_count(layer: Layer, given: int, allowed: tuple[int, int | None], rule: str) -> None:
    least, most = allowed
    if given < least or (most is not None and given > most):
        raise ModelError(f'{rule % _range_text(least, most)}; layer "{layer.name}" has {given}')


def _check_top_count(node: LayerNode) -> None:
    layer, given = node.layer, len(node.tops)
    _check_count(layer, given, layer.top_count, f"{layer.type} Layer produces %s top blob(s) as output")
    if layer.same_count and given != len(node.bottoms):
        raise ModelError(
            f'{layer.type} Layer produces one top blob as output for each bottom blob input; layer "{layer.name}" has '
            f"{len(node.bottoms)} bottom(s) and {given} top(s)"
        )


def _range_text(least: int, most: int | None) -> str:
    if most is None:
        return f"at least {least}"
    return str(least) if least == most else f"{least} to {most}"


def _check_shared_shape(layer: Layer, index: int, owner: LearnableParameter, *, permissive: bool) -> None:
    ours, theirs = layer.blobs[index], owner.blob
    if ours.shape == theirs.shape or (permissive and ours.count == theirs.count):
        return
    what = "count" if permissive else "shape"
    raise ModelError(
        f"Cannot share param '{owner.name}' owned by layer '{owner.layer}' with layer '{layer.name}'; {what} mismatch. "
        f" Owner layer param shape is {shape_text(theirs.shape)}; sharing layer expects shape {shape_text(ours.shape)}"
    )


def _agreed(what: str, first: float | None, second: float | None, name: str) -> float | None:
    if first is not None and second is not None and first != second:
        raise ModelError(f"Shared param '{name}' has mismatched {what}: {first} and {second}")
    return first if second is None else second


def meets_rule(state: ProtoMessage, rule: ProtoMessage) -> bool:
    """Whether a NetState satisfies every condition of one NetStateRule."""
    if rule.HasField("phase") and rule.phase != state.phase:
        return False
    if rule.HasField("min_level") and state.level < rule.min_level:
        return False
    if rule.HasField("max_level") and state.level > rule.max_level:
        return False
    stages = set(state.stage)
    return all(stage in stages for stage in rule.stage) and not any(stage in stages for stage in rule.not_stage)


def is_included(layer: ProtoMessage, state: ProtoMessage) -> bool:
    """Whether a layer is part of the net in this state.

    Raises:
        ModelError: The layer has both include and exclude rules.
    """
    if not layer.include and not layer.exclude:
        return True
    if layer.include and layer.exclude:
        raise ModelError(
            f'layer "{layer.name}": Specify either include rules or exclude rules; not both. Remove one of the two.'
        )
    if layer.include:
        return any(meets_rule(state, rule) for rule in layer.include)
    return not any(meets_rule(state, rule) for rule in layer.exclude)


def filter_net(net: ProtoMessage) -> ProtoMessage:
    """Remove the layers that the net's ``state`` does not include, in place, and return the net.

    Raises:
        ModelError: A layer has both include and exclude rules.
    """
    dropped = [index for index, layer in enumerate(net.layer) if not is_included(layer, net.state)]
    for index in reversed(dropped):
        del net.layer[index]
    return net


class _Readers:
    """The readers of each top. A top is one version of a blob: an in-place layer writes a new version."""

    def __init__(self, layers: list[ProtoMessage]) -> None:
        self.count: Counter[Top] = Counter()
        self.source: dict[tuple[int, int], Top] = {}
        self.loss_weight: dict[Top, float] = {}
        last: dict[str, Top] = {}
        for index, layer in enumerate(layers):
            for position, blob in enumerate(layer.bottom):
                if blob not in last:
                    raise ModelError(
                        f"Unknown bottom blob '{blob}' (layer '{layer.name}', bottom index {position})."
                        f"{did_you_mean(blob, last)} No layer before it has such a top in this phase."
                    )
                self.source[index, position] = last[blob]
                self.count[last[blob]] += 1
            for position, blob in enumerate(layer.top):
                last[blob] = (index, position)
            for weight, blob in zip(layer.loss_weight, layer.top, strict=False):
                self.loss_weight[last[blob]] = weight
                if weight:
                    self.count[last[blob]] += 1


def insert_splits(net: ProtoMessage) -> ProtoMessage:
    """Change the net, in place, so that each blob has one reader, and return it.

    Raises:
        ModelError: A layer reads a blob that no layer before it writes.
    """
    layers = list(net.layer)
    readers = _Readers(layers)
    if max(readers.count.values(), default=0) <= 1:
        return net
    copies: dict[Top, Iterator[str]] = {}
    result = []
    for index, layer in enumerate(layers):
        for position in range(len(layer.bottom)):
            names = copies.get(readers.source[index, position])
            if names is not None:
                layer.bottom[position] = next(names)
        result.append(layer)
        for position, blob in enumerate(layer.top):
            top = (index, position)
            count = readers.count[top]
            if count <= 1:
                continue
            name = f"{blob}_{layer.name}_{position}_split"
            tops = [f"{name}_{reader}" for reader in range(count)]
            split = type(layer)(name=name, type="Split", bottom=[blob], top=tops)
            copies[top] = iter(tops)
            weight = readers.loss_weight.get(top, 0.0)
            if weight:
                layer.ClearField("loss_weight")
                split.loss_weight.extend([weight] + [0.0] * (count - 1))
                next(copies[top])
            result.append(split)
    whole = type(net)(layer=result)
    del net.layer[:]
    net.MergeFrom(whole)
    return net


def decide_backward(graph: NetGraph) -> None:
    """Clear ``needs_backward`` of nodes that do not lead to a loss, then set it for ``force_backward``."""
    under_loss: set[int] = set()
    skipped: set[int] = set()
    for node in reversed(graph.nodes):
        _narrow(node, under_loss, skipped)
    if graph.force_backward:
        for node in graph.nodes:
            node.needs_backward = True
            node.bottom_needs_gradient = [
                needs or position not in node.layer.no_gradient
                for position, needs in enumerate(node.bottom_needs_gradient)
            ]
            node.layer.parameter_needs_gradient = [True] * len(node.layer.blobs)


def _narrow(node: LayerNode, under_loss: set[int], skipped: set[int]) -> None:
    weighted = any(weight != 0 for weight in node.layer.loss_weights)
    contributes = weighted or any(top in under_loss for top in node.tops)
    all_skipped = all(top in skipped for top in node.tops)
    if node.needs_backward and all_skipped:
        node.needs_backward = False
        node.bottom_needs_gradient = [False] * len(node.bottoms)
    if not contributes:
        node.needs_backward = False
    for position, bottom in enumerate(node.bottoms):
        if contributes:
            under_loss.add(bottom)
        else:
            node.bottom_needs_gradient[position] = False
        if not node.bottom_needs_gradient[position]:
            skipped.add(bottom)
