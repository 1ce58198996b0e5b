"""Equalization: rescales channels to more equal ranges without changing the results, so that 8 bits lose less.

A convolution's output channels can be divided by positive factors when every layer that reads them multiplies its
weights by the same factors: convolutions and InnerProduct layers, with ReLU, PReLU, pooling, Dropout and Concat in
between, all of which commute with a positive factor. ``amct.numerics.balancing`` chooses the factors.
"""

from __future__ import annotations

import logging
import os
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from amct import log
from amct.arguments import check_types, input_file, output_file
from amct.atomic import FileGroup
from amct.caffe.model import blob_shapes, caffe_batches, read_model, run_net, write_model
from amct.caffe.prototxt import restore_in_place
from amct.caffe.ptq.deploy import Results
from amct.caffe.ptq.folding import check_global_statistics, float_weight, fuse
from amct.caffe.ptq.graph import calibrated_layers, start_calibration
from amct.errors import CalibrationError
from amct.export.check.losses import matched_boxes, similarity_over
from amct.numerics.balancing import ChannelStatistics, ConsumerNoise, choose_factors
from amct.printable import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from amct.atomic import AnyPath
    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.engine.net import Net
    from amct.caffe.model import Batch, CaffeModel
    from amct.caffe.ptq.graph import QuantGraph
    from amct.export.check.losses import Reference
    from amct.numerics.balancing import ChannelRanges
    from amct.pipeline.batches import BatchInputs

logger = logging.getLogger(__name__)

CONVOLUTIONS = ("Convolution", "DepthwiseConv")
PASSING = ("ReLU", "PReLU", "Dropout", "Pooling", "Split")


@log.screen_only()
def equalize_model(
    model_file: AnyPath,
    weights_file: AnyPath,
    data: object,
    equalized_model_file: AnyPath,
    equalized_weights_file: AnyPath,
    *,
    inputs: BatchInputs | None = None,
    custom_proto: AnyPath | None = None,
) -> list[str]:
    """Write an equivalent float model whose channels have more equal ranges, to be quantized instead.

    BatchNorm, Scale and Bias layers are folded into the layers before them first. Blobs between layers hold other
    values than in the original; the outputs are equal up to float rounding.

    Args:
        model_file: The prototxt.
        weights_file: The caffemodel.
        data: The calibration data: an array, or batches as for ``quantize``.
        equalized_model_file: Where the new prototxt is written.
        equalized_weights_file: Where the new caffemodel is written.
        inputs: Turns a batch into the net's inputs; needed when the batch is not in one of the standard forms.
        custom_proto: A ``custom.proto`` with messages of your own layers.

    Returns:
        The layers whose output channels were changed.

    Raises:
        ArgumentTypeError, ArgumentError: an argument has the wrong type, or the data does not fit the net.
        FileError, ParseError, ModelError: a file cannot be read or written, or is invalid.
        CalibrationError: there is no data.
    """
    paths = {
        "model_file": model_file,
        "weights_file": weights_file,
        "equalized_model_file": equalized_model_file,
        "equalized_weights_file": equalized_weights_file,
    }
    check_types("equalize_model", {name: (value, (str, os.PathLike)) for name, value in paths.items()})
    input_file(model_file, "model_file")
    input_file(weights_file, "weights_file")
    files = [output_file(paths[name], name) for name in list(paths)[2:]]
    model = read_model(model_file, weights_file, custom_proto)
    check_global_statistics(model.net)
    fuse(model, skip=())
    found = find_factors(model, caffe_batches(data, inputs))
    divide_channels(model, found)
    restore_in_place(model.net)
    with FileGroup() as group:
        write_model(group, model, *files)
    logger.info("Equalized the channels of %s.", counted(len(found), "layer"))
    return list(found)


LEAST_GAIN = 2.0
"""Decibels by which equalization must raise the SQNR of the outputs to be proposed."""
LEAST_MORE_BOXES = 0.05
"""The same for a detector: the share of boxes that are found in addition."""


def equalization_proposal(graph: QuantGraph, reference: Reference) -> str | None:
    """Try equalization on the batches of a check; what it would gain, as text, or None if that is not enough.

    The folded float net is equalized, quantized and calibrated on these few batches and run as the simulation.
    """
    known = [each for each in reference.batches if each.expected is not None and each.simulated is not None]
    factors = find_factors(graph.model, (each.inputs for each in known), one_scale=graph.one_scale_layers())
    if not factors:
        return None
    trial = replace(graph, model=graph.model.copy(), weights={})
    divide_channels(trial.model, factors)
    trial.quantize_weights()
    calibration = start_calibration(trial, {})
    with closing(calibration.session):
        calibration.run(each.inputs for each in known)
        calibration.session.finish(complete=False)
        result = calibration.session.result
    net = Results(trial.model, trial.weights, calibrated_layers(trial, result)).fake_quant().model.build(())
    expected = [dict(each.expected or ()) for each in known]
    before = [dict(each.simulated or ()) for each in known]
    after = [run_net(net, each.inputs) for each in known]
    on = f"in the simulation on {len(known)} calibration batch{'es' if len(known) > 1 else ''}"
    old, new = (similarity_over(zip(expected, each, strict=True))[0] for each in (before, after))
    if old is not None and new is not None and new.sqnr >= old.sqnr + LEAST_GAIN:
        return f"equalize=True (--equalize): SQNR {new.sqnr:.1f} instead of {old.sqnr:.1f} dB {on}"
    shares = [matched_boxes(zip(expected, each, strict=True)) for each in (before, after)]
    for first, second in zip(*shares, strict=True):
        if old is None and second.share >= first.share + LEAST_MORE_BOXES:
            return f"equalize=True (--equalize): {second}, instead of {first.found}, {on}"
    return None


@dataclass(frozen=True, kw_only=True)
class Use:
    """A layer that reads channels of another one: its name, the blob, the channel count and the first channel."""

    layer: str
    blob: str
    channels: int
    first: int


@dataclass(frozen=True, kw_only=True)
class Route:
    """A layer whose output channels may be divided, their number, and all layers that read them."""

    layer: str
    channels: int
    uses: tuple[Use, ...]


def find_factors(
    model: CaffeModel,
    batches: Iterable[Batch],
    *,
    one_scale: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """Compute the factors that divide the output channels of layers, from the activations of a model on data.

    Args:
        model: The folded float model.
        batches: The data.
        one_scale: Layers with one weight scale for all channels, where dividing single channels costs accuracy.
            InnerProduct layers always count as such.

    Raises:
        CalibrationError: there is no data.
        ArgumentError: the data does not fit the net.
    """
    routes = [route for route in free_routes(model) if route.layer not in one_scale]
    watched = {use.blob for route in routes for use in route.uses}
    sizes = _sizes(model.build(watched), watched, batches)
    readers: dict[str, ConsumerNoise] = {}
    for use in (use for route in routes for use in route.uses):
        shares_scale = use.layer in one_scale or model.layer(use.layer).type == "InnerProduct"
        readers[use.layer] = ConsumerNoise(_columns(model, use), sizes[use.blob], one_scale=shares_scale)
    found = {}
    for route in routes:
        factors = choose_factors([(readers[use.layer], use.first) for use in route.uses], route.channels)
        if factors is not None:
            found[route.layer] = factors
    return found


def divide_channels(model: CaffeModel, found: Mapping[str, torch.Tensor]) -> None:
    """Divide output channels by the factors and multiply the weights of their readers, in place."""
    for route in free_routes(model) if found else ():
        factors = found.get(route.layer)
        if factors is None:
            continue
        weight, *bias = model.weights[route.layer]
        rows = factors.reshape(-1, *[1] * (weight.ndim - 1))
        model.weights[route.layer] = [(weight / rows).float(), *((each / factors).float() for each in bias)]
        for use in route.uses:
            multiplier = torch.ones(use.channels, dtype=torch.float64)
            multiplier[use.first : use.first + route.channels] = factors
            columns = _columns(model, use)
            _store(model, use, columns * multiplier.reshape(columns.shape[0], 1, -1, 1))


# ------------------------------------------------------------------ the layers


def free_routes(model: CaffeModel) -> Iterator[Route]:
    """The layers whose output channels may be divided, in net order; raises ModelError if the net cannot be built."""
    shapes = blob_shapes(model.net)
    readers: dict[str, list[ProtoMessage]] = {}
    for layer in model.layers:
        for blob in layer.bottom:
            readers.setdefault(blob, []).append(layer)
    for layer in model.layers:
        if layer.type in CONVOLUTIONS and len(layer.top) == 1 and layer.convolution_param.axis == 1:
            uses = _uses(layer.top[0], 0, readers, shapes)
            if uses:
                yield Route(layer=layer.name, channels=shapes[layer.top[0]][1], uses=tuple(uses))


def _uses(
    blob: str, first: int, readers: Mapping[str, list[ProtoMessage]], shapes: Mapping[str, tuple[int, ...]]
) -> list[Use] | None:
    """All weighted layers that read channels of a blob; None if other layers read it, or no layer does."""
    found: list[Use] = []
    for layer in readers.get(blob, ()):
        behind: list[Use] | None = None
        if _can_multiply_weights(layer):
            behind = [Use(layer=layer.name, blob=blob, channels=shapes[blob][1], first=first)]
        elif layer.type in PASSING and len(layer.top) == 1:
            behind = _uses(layer.top[0], first, readers, shapes)
        elif layer.type == "Concat" and _concat_axis(layer) == 1 and list(layer.bottom).count(blob) == 1:
            before = list(layer.bottom)[: list(layer.bottom).index(blob)]
            behind = _uses(layer.top[0], first + sum(shapes[each][1] for each in before), readers, shapes)
        if behind is None:
            return None
        found += behind
    return found or None


def _concat_axis(layer: ProtoMessage) -> int:
    options = layer.concat_param
    return int(options.concat_dim if options.HasField("concat_dim") else options.axis)


def _can_multiply_weights(layer: ProtoMessage) -> bool:
    if len(layer.bottom) != 1:
        return False
    if layer.type == "InnerProduct":
        return bool(layer.inner_product_param.axis == 1)
    return layer.type in CONVOLUTIONS and bool(layer.convolution_param.axis == 1)


def _columns(model: CaffeModel, use: Use) -> torch.Tensor:
    """The weight of a reading layer as ``[groups, rows, channels of a group, taps]``."""
    source = float_weight(model.layer(use.layer), model.weights[use.layer][0])
    weight, groups = source.tensor.double(), source.groups
    return weight.reshape(groups, weight.shape[0] // groups, use.channels // groups, -1)


def _store(model: CaffeModel, use: Use, columns: torch.Tensor) -> None:
    weight, *rest = model.weights[use.layer]
    source = float_weight(model.layer(use.layer), weight)
    rows = columns.float().reshape(source.tensor.shape)
    model.weights[use.layer] = [source.restored(rows), *rest]


# ------------------------------------------------------------------ activations


def _sizes(net: Net, watched: Iterable[str], batches: Iterable[Batch]) -> dict[str, ChannelRanges]:
    statistics = {name: ChannelStatistics() for name in watched}
    seen = False
    for batch in log.track(batches, "Equalizing"):
        seen = True
        run_net(net, batch)
        for name, each in statistics.items():
            each.add(net.blob(name).tensor.cpu())  # on the CPU, as the weights
    if not seen:
        raise CalibrationError("equalization: data has no batch")
    return {name: each.result() for name, each in statistics.items()}
