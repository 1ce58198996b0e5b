"""Folding: merges BatchNorm, BN, Scale and Bias into the weights of the layer before (or behind) them.

Three passes, exact up to float rounding: layers behind a weighted layer are folded into it; a BatchNorm (and Scale)
before a convolution without padding is folded into that convolution; the remaining ones that are to be quantized are
replaced by a 1x1 DepthwiseConv. The report lists the layers that were not folded, with the reason. ``float_weight`` has
the weight of a layer in the terms of ``amct.numerics``.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

from amct.caffe.engine.layer import IMAGE_BLOB_AXES
from amct.caffe.engine.layers.batch_norm import bn_affine, uses_batch_statistics
from amct.caffe.engine.messages import new_message
from amct.caffe.model import FEEDFORWARD_TYPES, blob_shapes
from amct.errors import AmctError, ModelError
from amct.model import FusionPattern, Skip, find_fusions, find_leading_fusions
from amct.model.kinds import KIND_OF_CAFFE_TYPE
from amct.numerics.fold import ChannelAffine, fold_after, fold_before
from amct.numerics.settings import WeightKind
from amct.pipeline.weights import FloatWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import torch

    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.model import CaffeModel
    from amct.model import Fusion, Node


def float_weight(layer: ProtoMessage, weight: torch.Tensor) -> FloatWeight:
    """The first blob of a weighted layer, with outputs first."""
    kind = KIND_OF_CAFFE_TYPE[layer.type].weight_kind
    if kind is WeightKind.LINEAR:
        transposed = bool(layer.inner_product_param.transpose)
        return FloatWeight(tensor=weight.t() if transposed else weight, kind=kind, transposed=transposed)
    groups = layer.convolution_param.group
    if layer.type == "DepthwiseConv" and groups == 1:
        groups = weight.shape[0]
    return FloatWeight(tensor=weight, kind=kind, groups=groups)


logger = logging.getLogger(__name__)

NORMALIZATIONS = frozenset({"BatchNorm", "BN"})
STAGES = (NORMALIZATIONS, frozenset({"Scale"}), frozenset({"Bias"}))
AFFINE_TYPES = frozenset().union(*STAGES)
AFTER = FusionPattern(heads=frozenset(FEEDFORWARD_TYPES), stages=STAGES)
BEFORE = FusionPattern(heads=frozenset({"Convolution", "DepthwiseConv"}), stages=STAGES[:2])


@dataclass
class FusionReport:
    """The folded layers by target layer, the layers replaced by a DepthwiseConv, and those not folded, with reasons."""

    folded: dict[str, list[str]] = field(default_factory=dict)
    accelerated: list[str] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)

    def add(self, head: str, names: Collection[str]) -> None:
        """Record that layers were folded into ``head``."""
        self.folded.setdefault(head, []).extend(names)


def check_global_statistics(net: ProtoMessage) -> None:
    """Reject a BatchNorm that uses batch statistics at inference.

    Raises:
        ModelError: A BatchNorm has ``use_global_stats: false``; the message names it.
    """
    for layer in net.layer:
        options = layer.batch_norm_param
        if layer.type == "BatchNorm" and options.HasField("use_global_stats") and not options.use_global_stats:
            raise ModelError(
                f'layer "{layer.name}" (BatchNorm) has use_global_stats: false; for inference and quantization it must '
                "be true. Set it to true in the prototxt."
            )


def fuse(model: CaffeModel, *, skip: Collection[str] = ()) -> FusionReport:
    """Fold all layers that can be folded, in place; ``skip`` names layers that are not folded."""
    report = FusionReport()
    fuse_after(model, report, skip=skip)
    _fuse_before(model, report, skip=skip)
    for each in report.skipped:
        logger.debug("fusion: %s", each)
    return report


def fuse_after(
    model: CaffeModel,
    report: FusionReport,
    *,
    skip: Collection[str] = (),
    refuse_head: Callable[[ProtoMessage], str | None] = lambda _: None,
) -> dict[str, ChannelAffine]:
    """Fold the layers behind weighted layers into them.

    Args:
        model: The model; it is changed.
        report: Receives the folded layers, and those that were not folded.
        skip: Layers that are not folded.
        refuse_head: Returns why nothing may be folded into a layer, or None if folding is allowed.

    Returns:
        By weighted layer: the per-channel affine function of the folded layers.
    """

    def refuse(head: Node, candidate: Node) -> str | None:
        layer = model.layer(head.name)
        return refuse_head(layer) or refusal(model, layer, model.layer(candidate.name))

    fusions, skips = find_fusions(model.topology(), AFTER, skip=skip, refuse=refuse)
    report.skipped += skips
    return {fusion.head.name: _fold(model, fusion, report, fold_after) for fusion in fusions}


def _fuse_before(model: CaffeModel, report: FusionReport, *, skip: Collection[str]) -> None:
    def refuse(head: Node, candidate: Node) -> str | None:
        layer = model.layer(head.name)
        options = layer.convolution_param
        if any((*options.pad, options.pad_h, options.pad_w)):
            return "the convolution pads with zeros, which the folded layer would have shifted"
        return refusal(model, layer, model.layer(candidate.name))

    fusions, skips = find_leading_fusions(model.topology(), BEFORE, skip=skip, refuse=refuse)
    for fusion in fusions:
        if not any(node.op in NORMALIZATIONS for node in fusion.folded):
            continue
        _fold(model, fusion, report, fold_before)
        names = [node.name for node in fusion.folded]
        report.skipped = [each for each in report.skipped if each.layer not in names]
    report.skipped += skips


def refusal(model: CaffeModel, head: ProtoMessage, candidate: ProtoMessage) -> str | None:
    """The reason why a layer cannot be folded into another one; None if it can."""
    if len(head.bottom) != 1 or len(head.top) != 1:
        return f'"{head.name}" has {len(head.bottom)} bottoms and {len(head.top)} tops'
    axis = head.inner_product_param.axis if head.type == "InnerProduct" else head.convolution_param.axis
    if axis != 1:
        return f'"{head.name}" works along axis {axis}, not along the channels'
    return _not_per_channel(model, candidate)


def _not_per_channel(model: CaffeModel, layer: ProtoMessage) -> str | None:
    if layer.type == "BatchNorm":
        options = layer.batch_norm_param
        if options.HasField("use_global_stats") and not options.use_global_stats:
            return f'"{layer.name}" uses the statistics of each batch'
        return None
    if layer.type == "BN":
        by_batch = f'"{layer.name}" uses the statistics of each batch; bn_mode: INFERENCE uses stored ones'
        return by_batch if uses_batch_statistics(layer) else None
    options = layer.scale_param if layer.type == "Scale" else layer.bias_param
    if len(layer.bottom) != 1:
        return f'the factors of "{layer.name}" are a second bottom'
    if options.axis not in (1, -3) or options.num_axes != 1 or model.weights[layer.name][0].ndim != 1:
        return f'"{layer.name}" does not work along the channels (axis {options.axis}, num_axes {options.num_axes})'
    return None


def affine_of(layer: ProtoMessage, blobs: list[torch.Tensor]) -> ChannelAffine:
    """The per-channel affine function of a BatchNorm, BN, Scale or Bias layer."""
    if layer.type == "BatchNorm":
        mean, variance, weight = (blob.double() for blob in blobs)
        total = float(weight)
        factor = 0.0 if total == 0 else 1.0 / total
        return ChannelAffine.batch_norm(mean * factor, variance * factor, layer.batch_norm_param.eps)
    if layer.type == "BN":
        return bn_affine(layer, blobs)
    if layer.type == "Scale":
        return ChannelAffine.scale(blobs[0], blobs[1] if layer.scale_param.bias_term else None)
    return ChannelAffine.bias(blobs[0])


def _chain_affine(model: CaffeModel, names: Collection[str]) -> ChannelAffine:
    """The composed per-channel affine function of consecutive layers."""
    parts = [affine_of(model.layer(name), model.weights[name]) for name in names]
    return reduce(ChannelAffine.then, parts)


def _fold(
    model: CaffeModel, fusion: Fusion, report: FusionReport, fold: Callable[..., tuple[torch.Tensor, torch.Tensor]]
) -> ChannelAffine:
    """Fold layers into the weighted layer before (``fold_after``) or behind (``fold_before``) them, in place.

    Returns:
        Their per-channel affine function.
    """
    head, names = model.layer(fusion.head.name), [node.name for node in fusion.folded]
    weight, *bias = model.weights[head.name]
    source = float_weight(head, weight)
    with naming(head, ModelError, "fusion"):
        affine = _chain_affine(model, names)
        weight, shift = fold(source.tensor, bias[0] if bias else None, source.kind, source.groups, affine)
    model.weights[head.name] = [source.restored(weight), shift]
    options = head.inner_product_param if head.type == "InnerProduct" else head.convolution_param
    if not options.bias_term:
        options.ClearField("bias_term")
    if fold is fold_after:
        head.top[0] = model.layer(names[-1]).top[0]
    else:
        head.bottom[0] = model.layer(names[0]).bottom[0]
    model.set_layers(layer for layer in model.layers if layer.name not in names)
    report.add(head.name, names)
    return affine


@contextmanager
def naming(layer: ProtoMessage, kind: type[AmctError], what: str) -> Iterator[None]:
    """Add the layer's name, and what is done with it, to errors raised by ``amct.numerics``."""
    try:
        yield
    except AmctError as error:
        raise kind(f'layer "{layer.name}" ({layer.type}): {what}: {error}') from error


# ------------------------------------------------------------------ acceleration


def accelerate(model: CaffeModel, enabled: Collection[str], report: FusionReport, *, skip: Collection[str]) -> None:
    """Replace the remaining BatchNorm, Scale and Bias layers that are to be quantized by 1x1 DepthwiseConv layers.

    The new layer has the name of the first one it replaces, so config and record name the same layer.
    """
    wanted = [layer.name for layer in model.layers if layer.type in AFFINE_TYPES and layer.name in enabled]
    wanted = [name for name in wanted if name not in skip and _not_per_channel(model, model.layer(name)) is None]
    shapes, reason = {}, "its bottom is no image (4 axes)"
    try:
        shapes = blob_shapes(model.net) if wanted else {}
    except AmctError as error:
        reason = f"shapes are unknown ({error})"
    for name in wanted:
        layer = next((each for each in model.layers if each.name == name and each.type in AFFINE_TYPES), None)
        if layer is None:
            continue  # replaced together with the one before it
        if len(shapes.get(layer.bottom[0], ())) == IMAGE_BLOB_AXES:
            _accelerate_one(model, name, report, skip)
        else:
            report.skipped.append(Skip(name, f"not folded: no DepthwiseConv in its place: {reason}"))


def _accelerate_one(model: CaffeModel, name: str, report: FusionReport, skip: Collection[str]) -> None:
    chain = _affine_chain(model, name, skip)
    affine = _chain_affine(model, chain)
    channels = affine.multiplier.numel()
    first = model.layer(name)
    depthwise = new_message("LayerParameter", name=name, type="DepthwiseConv")
    depthwise.bottom.append(first.bottom[0])
    depthwise.top.append(model.layer(chain[-1]).top[0])
    depthwise.convolution_param.num_output = channels
    depthwise.convolution_param.group = channels
    depthwise.convolution_param.kernel_size.append(1)
    layers = [depthwise if layer.name == name else layer for layer in model.layers if layer.name not in chain[1:]]
    model.set_layers(layers)
    model.weights[name] = [affine.multiplier.float().reshape(channels, 1, 1, 1), affine.addend.float()]
    report.add(name, chain)
    report.accelerated.append(name)
    report.skipped = [each for each in report.skipped if each.layer not in chain]


def _affine_chain(model: CaffeModel, name: str, skip: Collection[str]) -> list[str]:
    graph = model.topology()
    chain = [name]
    stage = _stage(model.layer(name).type)
    while (following := graph.sole_consumer(graph[chain[-1]])) is not None:
        if following.op not in frozenset().union(*STAGES[stage + 1 :]) or following.name in skip:
            break
        if _not_per_channel(model, model.layer(following.name)) is not None:
            break
        stage = _stage(following.op)
        chain.append(following.name)
    return chain


def _stage(kind: str) -> int:
    return next(index for index, kinds in enumerate(STAGES) if kind in kinds)
