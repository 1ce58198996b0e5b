"""Chains of layers that AMCT prunes together, so that old scripts give the same shapes, and the channels it removes.

The reach of AMCT's own functions is shorter than the full reach. A convolution or linear layer opens a chain; pooling
and some activations pass it on; an addition merges two chains; a concatenation puts them side by side; whatever else
reads a chain ends it, and none of its layers is pruned.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import nn

from amct.config.layers import SELECTIVE_PRUNE_TYPES, LayerInfo, LayerList
from amct.model import Skip
from amct.numerics.pruning import ASCEND_CHANNELS, balanced_l2_scores, lowest_channels, remaining_channels
from amct.numerics.settings import FilterPruneSettings
from amct.pytorch.capture.program_reader import Operation, Program, ProgramTensor
from amct.pytorch.pruning.channels import argument, described, positive
from amct.pytorch.pruning.cutting import node_type
from amct.pytorch.pruning.propagation import program_of
from amct.record import PruneNode, PruneRecord

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from amct.config.plan import PrunePlan
    from amct.pytorch.capture.trace import Traced


_NO_NODE = frozenset(
    {"alias", "clone", "contiguous", "detach", "dropout", "feature_dropout", "identity", "lift_fresh_copy"}
)
"""Operations that an exported file does not contain."""
_PASSING = _NO_NODE | frozenset(
    {
        "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
        "adaptive_avg_pool2d", "adaptive_avg_pool3d", "pad", "constant_pad_nd", "relu", "leaky_relu", "log_softmax",
        "softmax", "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bernoulli", "ceil", "celu", "clamp",
        "clip",
        "clamp_min", "clamp_max", "hardtanh", "relu6", "to", "_to_copy", "type_as", "cos", "cosh", "round", "pow",
    }
)  # fmt: skip
_RESIZING = ("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d")
_GLOBAL_POOL = "adaptive_avg_pool2d"


@dataclass(frozen=True)
class Link:
    """A layer in a chain: its channels ``begin`` to ``end`` are those of the chain."""

    name: str
    type: str
    begin: int
    end: int
    group: int = 1


@dataclass(eq=False)
class Chain:
    """Layers whose channels are pruned together."""

    producers: list[Link]
    consumers: list[Link] = field(default_factory=list)
    prune_group: int = 1
    ended: str | None = None  # why it is not pruned

    @property
    def size(self) -> int:
        """The number of channels."""
        return self.producers[0].end


@dataclass
class _Carried:
    """A chain in a tensor: its range along the axis of channels."""

    chain: Chain
    begin: int
    end: int


@dataclass
class _Tensor:
    """The chains that a tensor carries.

    ``axis`` is that of their channels, 1 of convolutions or -1 of linear layers.
    """

    carried: list[_Carried] = field(default_factory=list)
    axis: int = 1
    made_by: str = ""  # the kind of operation, without those that pass channels on
    matrix: bool = False  # made by a linear layer that ONNX writes as MatMul
    pooled: bool = False  # the result of global average pooling


class ChainFinder:
    """Walks through a program and collects its chains."""

    def __init__(self, program: Program, modules: Mapping[str, nn.Module], active: Collection[str]) -> None:
        self.program, self.modules, self.active = program, modules, active
        self._tensors: dict[int, _Tensor] = {}
        self._chains: list[Chain] = []
        self._merged: dict[int, Chain] = {}
        weights = (operation.operand(1) for operation in program.operations)
        self._calls = Counter(value.parameter for value in weights if value is not None and value.parameter)

    def find(self) -> list[Chain]:
        """All chains, in the order of their first producers; those that ended say why."""
        for operation in self.program.operations:
            if not operation.constant:
                tensor = self._result(operation)
                for value in operation.results:
                    self._tensors[id(value)] = tensor
        for value in self.program.outputs:
            self._end(self._of(value), "its channels are an output of the model")
        return self._chains

    def _of(self, value: ProgramTensor | None) -> _Tensor:
        """What a tensor carries, without chains that have ended."""
        tensor = self._tensors.get(id(value), _Tensor())
        carried = [_Carried(self._current(each.chain), each.begin, each.end) for each in tensor.carried]
        tensor.carried = [each for each in carried if each.chain.ended is None]
        return tensor

    def _current(self, chain: Chain) -> Chain:
        while id(chain) in self._merged:
            chain = self._merged[id(chain)]
        return chain

    def _result(self, operation: Operation) -> _Tensor:
        kind = operation.kind
        if kind in ("conv2d", "conv_transpose2d", "linear"):
            return self._layer(operation)
        if kind == "batch_norm":
            return self._batch_norm(operation)
        if kind in _PASSING or (kind in _RESIZING and argument(operation, 1) is None):
            return self._passed(operation)
        if kind in ("flatten", "view", "reshape") and self._drops_positions(operation):
            return replace(self._of(operation.operand(0)), axis=-1, matrix=False, pooled=False)
        if kind == "add":
            return self._added(operation)
        if kind in ("cat", "concat", "concatenate"):
            return self._concatenated(operation)
        return self._ended(operation)

    def _passed(self, operation: Operation) -> _Tensor:
        tensor = self._of(operation.operand(0))
        pooled = tensor.pooled if operation.kind in _NO_NODE else False
        if operation.kind == _GLOBAL_POOL:
            shape = operation.results[0].shape or ()
            pooled = len(shape) == 4 and shape[-2:] == (1, 1)
        return replace(tensor, pooled=pooled)

    def _drops_positions(self, operation: Operation) -> bool:
        """Whether a reshaping behind global average pooling only drops the two axes of size 1."""
        given, result = operation.operand(0), operation.results[0].shape or ()
        if given is None or not self._of(given).pooled or len(result) != 2:
            return False
        sizes = argument(operation, 1, 0)
        return bool(sizes == 1 if operation.kind == "flatten" else sizes[0] != -1)

    def _ended(self, operation: Operation) -> _Tensor:
        for value in operation.operands:
            self._end(self._of(value), f"{described(operation)} ends the chain")
        return _Tensor(made_by=operation.kind)

    def _end(self, tensor: _Tensor, reason: str) -> None:
        for each in tensor.carried:
            each.chain.ended = each.chain.ended or reason

    # -- layers --------------------------------------------------------------------------------------------------------

    def _layer(self, operation: Operation) -> _Tensor:
        weight = operation.operand(1)
        path = (weight.parameter or "").rpartition(".")[0] if weight is not None else ""
        module = self.modules.get(path)
        given = operation.operand(0)
        if weight is None or given is None or not isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
            return self._ended(operation)
        tensor = self._of(given)
        if self._calls[weight.parameter or ""] > 1:
            self._end(tensor, f'"{path}" is called several times')
            return _Tensor(made_by=operation.kind)
        link_type = node_type(module, len(given.shape or ()))
        axis = -1 if isinstance(module, nn.Linear) else 1
        if tensor.axis != axis:
            self._end(tensor, f'"{path}" reads another axis than that of its channels')
            tensor = _Tensor()
        groups = getattr(module, "groups", 1)
        if groups > 1 and groups == getattr(module, "in_channels", 0):
            return self._depthwise(tensor, path, link_type, module)
        self._join_groups(tensor, path, groups, transposed=isinstance(module, nn.ConvTranspose2d))
        self._consume(tensor, path, link_type, groups)
        opened = self._opened(path, link_type, module, groups)
        return _Tensor(opened, axis, operation.kind, matrix=link_type == "MatMul")

    def _opened(self, path: str, link_type: str, module: nn.Module, groups: int) -> list[_Carried]:
        if path not in self.active or not isinstance(module, (nn.Conv2d, nn.Linear)):
            return []
        channels = module.out_features if isinstance(module, nn.Linear) else module.out_channels
        chain = Chain([Link(path, link_type, 0, channels, groups)], prune_group=groups)
        self._chains.append(chain)
        return [_Carried(chain, 0, channels)]

    def _consume(self, tensor: _Tensor, path: str, link_type: str, groups: int = 1) -> None:
        for each in tensor.carried:
            if each.chain.ended is None:
                each.chain.consumers.append(Link(path, link_type, each.begin, each.end, groups))

    def _depthwise(self, tensor: _Tensor, path: str, link_type: str, module: nn.Module) -> _Tensor:
        if isinstance(module, nn.ConvTranspose2d) or module.out_channels != module.in_channels:
            self._end(tensor, f'"{path}" makes several channels from one')
            return _Tensor(made_by="conv2d")
        self._consume(tensor, path, link_type, getattr(module, "groups", 1))
        return _Tensor(tensor.carried, 1, "conv2d")

    def _join_groups(self, tensor: _Tensor, path: str, groups: int, *, transposed: bool) -> None:
        if groups == 1:
            return
        if len(tensor.carried) > 1 or transposed:
            self._end(tensor, f'"{path}" has groups, which must not divide concatenated channels')
        for each in tensor.carried:
            chain = each.chain
            if max(chain.prune_group, groups) % min(chain.prune_group, groups):
                self._end(tensor, f'"{path}" has {groups} groups, another layer of the chain {chain.prune_group}')
            chain.prune_group = max(chain.prune_group, groups)

    def _batch_norm(self, operation: Operation) -> _Tensor:
        given = operation.operand(0)
        tensor = self._of(given)
        path = operation.callers[-1].path if operation.callers else ""
        rank = len(given.shape or ()) if given is not None else 0
        if not isinstance(self.modules.get(path), nn.modules.batchnorm._BatchNorm):
            return self._ended(operation)
        if tensor.matrix and tensor.axis == -1:
            if rank != 4:
                self._end(tensor, f'"{path}" normalizes another axis than that of its channels')
        else:
            self._consume(tensor, path, "BatchNormalization")
        return replace(tensor, pooled=False)

    # -- joining -------------------------------------------------------------------------------------------------------

    def _added(self, operation: Operation) -> _Tensor:
        """Two chains are merged if each operand carries exactly one, along the same axis."""
        values = [value for value in operation.arguments[:2] if isinstance(value, ProgramTensor)]
        tensors = [self._of(value) for value in values]
        both = len(tensors) == 2 and all(len(tensor.carried) == 1 for tensor in tensors)
        if not both or tensors[0].axis != tensors[1].axis or not _same_range(tensors):
            return self._ended(operation)
        first, second = (tensor.carried[0].chain for tensor in tensors)
        if first is not second:
            self._merge(first, second)
        return _Tensor(tensors[0].carried, tensors[0].axis, made_by="add")

    def _merge(self, first: Chain, second: Chain) -> None:
        if max(first.prune_group, second.prune_group) % min(first.prune_group, second.prune_group):
            first.ended = "its layers have groups that do not divide each other"
        first.producers += second.producers
        first.consumers += second.consumers
        first.prune_group = max(first.prune_group, second.prune_group)
        self._merged[id(second)] = first
        self._chains.remove(second)

    def _concatenated(self, operation: Operation) -> _Tensor:
        values: Sequence[ProgramTensor] = operation.arguments[0]
        tensors = [self._of(value) for value in values]
        axis = positive(argument(operation, 1, 0), len(values[0].shape or ()))
        fits = axis == 1 and all(
            self._can_concatenate(tensor, value) for tensor, value in zip(tensors, values, strict=True)
        )
        if not fits:
            return self._ended(operation)
        carried, offset = [], 0
        for tensor, value in zip(tensors, values, strict=True):
            carried += [_Carried(each.chain, each.begin + offset, each.end + offset) for each in tensor.carried]
            offset += int((value.shape or ())[1] or 0)
        return _Tensor(carried, 1, "cat")

    def _can_concatenate(self, tensor: _Tensor, value: ProgramTensor) -> bool:
        if tensor.carried:
            return tensor.axis == 1 or len(value.shape or ()) == 2
        return tensor.made_by in ("conv2d", "conv_transpose2d", "linear", "cat")


def _same_range(tensors: Iterable[_Tensor]) -> bool:
    return len({(tensor.carried[0].begin, tensor.carried[0].end) for tensor in tensors}) == 1


def prunable_layers(traced: Traced) -> LayerList:
    """The layers of a model in the form that configs need, with what matters for pruning."""
    program = program_of(traced)
    calls: dict[str, list[int]] = {}
    for operation in program.operations:
        weight, given = operation.operand(1), operation.operand(0)
        if weight is not None and weight.parameter and given is not None:
            calls.setdefault(weight.parameter.rpartition(".")[0], []).append(len(given.shape or ()))
    modules = dict(traced.model.named_modules(remove_duplicate=False))
    return LayerList(_prunable(layer, modules.get(layer.name), calls) for layer in traced.config_layers())


def _prunable(layer: LayerInfo, module: nn.Module | None, calls: Mapping[str, Sequence[int]]) -> LayerInfo:
    if not isinstance(module, (nn.Conv2d, nn.Linear, nn.ConvTranspose2d)):
        return layer
    ranks = calls.get(layer.name, ())
    refusal = None
    if not ranks:
        refusal = "it is not called in forward"
    elif len(ranks) > 1:
        refusal = f"it is called {len(ranks)} times in one forward"
    elif not isinstance(module, nn.Linear) and ranks[0] != 4:
        refusal = "its input has no batch dimension"
    depthwise = isinstance(module, nn.Conv2d) and module.groups == module.in_channels
    single = isinstance(module, nn.Conv2d) and module.groups == module.in_channels == 1
    return replace(layer, depthwise=depthwise, one_input_channel=single, prune_refusal=refusal)


def find_chains(traced: Traced, plan: PrunePlan) -> list[Chain]:
    """The chains of the layers that a plan prunes, with those that ended."""
    modules = dict(traced.model.named_modules(remove_duplicate=False))
    return ChainFinder(program_of(traced), modules, {layer.name for layer in plan.filters}).find()


def chain_skips(
    chains: Sequence[Chain], plan: PrunePlan, records: Sequence[PruneRecord], types: Mapping[str, str]
) -> tuple[Skip, ...]:
    """Every layer of a type that can be pruned and keeps its channels, with the reason.

    Args:
        chains: All chains.
        plan: What the config asks for.
        records: The chains that are pruned.
        types: The type of every module.
    """
    pruned = {node.name for record in records for node in record.producers if node.prune_index}
    reasons = {name: reason for name, reason in plan.not_pruned.items() if types.get(name) in SELECTIVE_PRUNE_TYPES}
    for chain in chains:
        for link in chain.producers:
            if link.name not in pruned:
                reasons[link.name] = chain.ended or _left_whole(chain, plan)
    sparse = {layer.name for layer in plan.selective}
    return tuple(Skip(name, reason) for name, reason in reasons.items() if name not in sparse)


def _left_whole(chain: Chain, plan: PrunePlan) -> str:
    """Why the plan removes no channel of a chain, and what would."""
    size, (ratio, ascend) = chain.size, _ratio(chain, plan)
    reason = f"prune_ratio {ratio:g} leaves all of its {size} channels"
    if not ascend or remaining_channels(size, ratio, groups=chain.prune_group) == size:
        return reason
    below = (size - 1) // ASCEND_CHANNELS * ASCEND_CHANNELS
    larger = f"prune_ratio {math.ceil(100 * (size - below) / size) / 100:g} or " if below else ""
    return (
        f"{reason}, because ascend_optimized rounds their number up to a multiple of {ASCEND_CHANNELS}; "
        f"{larger}ascend_optimized: false would prune it"
    )


def _ratio(chain: Chain, plan: PrunePlan) -> tuple[float, bool]:
    """The ratio of a chain, and whether what is left is rounded for Ascend."""
    layers = {layer.name: layer.settings for layer in plan.filters}
    settings = (layers[link.name] for link in chain.producers)
    filters = [each for each in settings if isinstance(each, FilterPruneSettings)]
    return min(each.prune_ratio for each in filters), any(each.ascend_optimized for each in filters)


def remaining_count(chain: Chain, plan: PrunePlan) -> int:
    """How many channels of a chain its plan leaves."""
    ratio, ascend = _ratio(chain, plan)
    return remaining_channels(chain.size, ratio, ascend=ascend, groups=chain.prune_group)


def chosen_chains(traced: Traced, plan: PrunePlan, chains: Sequence[Chain]) -> list[PruneRecord]:
    """The chains of a record, with the channels that the plan removes; one that loses none has no ``prune_index``."""
    found = []
    for chain in chains:
        if chain.ended is None:
            modules = [traced.model.get_submodule(link.name) for link in chain.producers]
            weights = [module.weight for module in modules if isinstance(module, (nn.Conv2d, nn.Linear))]
            remain, group = remaining_count(chain, plan), chain.prune_group
            removed = lowest_channels(balanced_l2_scores(weights), remain, group)
            producers, consumers = (
                tuple(_node(link, removed, group) for link in links) for links in (chain.producers, chain.consumers)
            )
            found.append(PruneRecord(producers=producers, consumers=consumers))
    return found


def _node(link: Link, removed: Sequence[int], prune_group: int) -> PruneNode:
    groups = {"group": link.group, "prune_group": prune_group}
    more = {name: count for name, count in groups.items() if count > 1}
    shifted = [index + link.begin for index in removed]
    return PruneNode.channels(link.name, link.type, link.begin, link.end, shifted, **more)
