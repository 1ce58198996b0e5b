"""Layers that scale and shift each channel: BatchNorm, BN, Scale and Bias.

BatchNorm is y = (x - mean) / sqrt(variance + eps); its scale and shift are a separate Scale layer. BN has all in one.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np
import torch

from amct.atomic import AnyPath, open_write
from amct.caffe.engine.layer import Layer, Place, ProtoMessage, Shape, Tensors, register
from amct.caffe.engine.messages import new_message
from amct.caffe.engine.wire import blob_parts, layer_parts
from amct.calibration import all_ranks
from amct.calibration.ranks import Meeting, fingerprint
from amct.numerics.fold import ChannelAffine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Blob
    from amct.caffe.engine.onnx_place import Dims


STATISTICS = 3


@register("BatchNorm")
class BatchNorm(Layer):
    """Normalizes (N, C, ...) per channel by the statistics of the batch (training) or by the moving averages (testing).

    Blobs: sum of means (C,), sum of variances (C,), and the factor (1,) by which both are divided.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        """Create the statistics; their learning rate is 0."""
        options = self.parameter.batch_norm_param
        self.fraction: float = options.moving_average_fraction
        self.eps: float = options.eps
        self.use_global = options.use_global_stats if options.HasField("use_global_stats") else not self.is_training
        self.channels = 1 if len(bottoms[0]) == 1 else bottoms[0][1]
        for shape in ((self.channels,), (self.channels,), (1,)):
            self.add_parameter(shape)
        for index in range(STATISTICS):
            if index == len(self.parameter.param):
                self.parameter.param.add(lr_mult=0.0)
            elif self.parameter.param[index].lr_mult != 0:
                raise self.error(
                    "Cannot configure batch normalization statistics as layer parameters: lr_mult must be 0, got "
                    f"{self.parameter.param[index].lr_mult} for blob {index}"
                )

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        shape = bottoms[0]
        if len(shape) >= 1 and (1 if len(shape) == 1 else shape[1]) != self.channels:
            raise self.error(f"the statistics are for {self.channels} channels, the bottom has shape {shape}")
        return [shape]

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The moving averages of mean and variance, (C,) each; 0 if no batch was seen."""
        mean, variance, weight = (blob.tensor.detach() for blob in self.blobs)
        total = float(weight)
        factor = 0.0 if total == 0 else 1.0 / total
        return mean * factor, variance * factor

    def channel_affine(self) -> ChannelAffine | None:
        """Return scale = 1 / sqrt(variance + eps) and shift = -mean * scale, if the moving averages are used."""
        if not self.use_global:
            return None
        mean, variance = self.statistics()
        factor = 1.0 / torch.sqrt(variance.double() + self.eps)
        return ChannelAffine(factor, -mean.double() * factor)

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Normalize; with batch statistics also update the moving averages."""
        bottom = bottoms[0]
        shape = (1, -1) + (1,) * (bottom.dim() - 2) if bottom.dim() > 1 else (1,)
        if self.use_global:
            affine = self.channel_affine()
            assert affine is not None, "use_global is set"
            factor, addend = (part.to(bottom).reshape(shape) for part in (affine.multiplier, affine.addend))
            return [torch.addcmul(addend, bottom, factor)]
        centred, mean, variance = _moments(bottom)
        self._collect(mean.detach(), variance.detach(), bottom.numel() // self.channels)
        return [centred / torch.sqrt(variance + self.eps)]

    def _collect(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        correction = count / (count - 1) if count > 1 else 1.0
        news = (mean.reshape(-1), variance.reshape(-1) * correction, torch.ones(1, device=mean.device))
        with torch.no_grad():
            for blob, new in zip(self.blobs, news, strict=True):
                blob.set_tensor(blob.tensor * self.fraction + new)

    def to_onnx(self, place: Place) -> None:
        """BatchNormalization with scale 1 and shift 0; from Reduce operators if the layer uses batch statistics."""
        axes = len(place.bottom_dims[0])
        if not self.use_global:
            place.top("Div", *place.centred_and_deviation(place.bottom, [0, *range(2, axes)], float(self.eps)))
            return
        mean, variance_values = (tensor.numpy().astype(np.float32) for tensor in self.statistics())
        if axes == 1:
            deviation = np.sqrt(variance_values.astype(np.float64) + self.eps)
            place.arithmetic(place.bottom, [("mean", "Sub", float(mean[0])), ("deviation", "Div", float(deviation[0]))])
            return
        ones, zeros = np.ones(self.channels, np.float32), np.zeros(self.channels, np.float32)
        names = ("scale", "shift", "mean", "variance")
        values = [
            place.value(name, array) for name, array in zip(names, (ones, zeros, mean, variance_values), strict=True)
        ]
        place.top("BatchNormalization", place.bottom, *values, epsilon=float(self.eps))


def _moments(bottom: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bottom minus its mean along each channel, the mean and the variance."""
    axes = [axis for axis in range(bottom.dim()) if axis != 1]
    mean = bottom.mean(axes, keepdim=True)
    centred = bottom - mean
    return centred, mean, (centred * centred).mean(axes, keepdim=True)


logger = logging.getLogger(__name__)


def dump_path(folder: AnyPath, layer: str) -> Path:
    """The caffemodel to which the recomputed statistics of one layer are written."""
    return Path(folder) / f"{quote(layer, safe='')}.caffemodel"


@register("BatchNorm with refreshed statistics")
class UpdatingBatchNorm(BatchNorm):
    """Normalizes ``update_iterations`` batches by their own statistics, then writes the moving averages to a file.

    Several processes share the batches: an average is a sum over batches, each with the weight ``fraction`` to the
    power of the number of batches after it. Each process sums up its own batches with these weights.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        """Set up a BatchNorm that uses batch statistics."""
        super().setup(bottoms)
        options = self.parameter.batch_norm_param
        self.total: int = options.update_iterations
        self.ranks = all_ranks()
        self.ranks.need_a_batch_each(self.total)
        self.iterations = self.ranks.share(self.total)
        self.use_global = False
        self.done = 0
        self._meeting: Meeting | None = None

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Run; write the statistics after the last of the ``update_iterations`` forward passes."""
        if self.done < self.iterations and not self.ranks.is_alone:
            self._weigh_earlier_batches()
        super().run(bottoms, tops)
        if self.done >= self.iterations:
            return
        self.done += 1
        logger.info("layer %s: statistics refreshed by %d/%d batches", self.name, self.done, self.iterations)
        if self._meeting is not None:
            self._meeting.beat(f"{self.done} of its {self.iterations} batches run for batch norms")
        if self.done == self.iterations:
            if self._meeting is not None:
                self._add_other_processes(self._meeting)
            if self.ranks.is_first:
                self._dump()
            self.use_global = True

    def _weigh_earlier_batches(self) -> None:
        """Take into account the batches of other processes between the last batch of this one and the next."""
        if self._meeting is None:
            self._meeting = Meeting(self.ranks, fingerprint(["batch norm", self.name, str(self.total)]))
        if self.done:
            self._multiply(self.fraction ** (self.ranks.size - 1))
        elif not self.ranks.is_first:
            self._multiply(0.0)  # the first process begins with the old statistics

    def _add_other_processes(self, meeting: Meeting) -> None:
        self._multiply(self.fraction ** (self.total - 1 - self.ranks.number(self.iterations - 1)))
        own = {str(index): blob.tensor.detach().cpu().numpy() for index, blob in enumerate(self.blobs)}
        everyone = meeting.exchange(own)
        for index, blob in enumerate(self.blobs):
            total = sum(arrays[str(index)].astype(np.float64) for arrays in everyone)
            blob.set_tensor(torch.as_tensor(total, dtype=blob.tensor.dtype, device=blob.tensor.device))

    def _multiply(self, factor: float) -> None:
        for blob in self.blobs:
            blob.set_tensor(blob.tensor.detach() * factor)

    def _dump(self) -> None:
        options = self.parameter.batch_norm_param
        layer = new_message("LayerParameter", name=self.name, type="BatchNorm")
        blobs = [blob_parts(blob.shape, blob.tensor.detach().cpu().contiguous().numpy()) for blob in self.blobs]
        with open_write(dump_path(options.dump_dir, self.name)) as file:
            file.writelines(layer_parts(layer.SerializeToString(), blobs))


INFERENCE = 1
SCALE_AND_SHIFT = 2
WITH_STATISTICS = 4
TINY = 1e-9


def bn_blobs(parameter: ProtoMessage) -> int:
    """The number of blobs: 2 in SegNet's form (scale, shift), 4 in PSPNet's (slope, bias, mean, variance)."""
    options = parameter.bn_param
    is_segnet = any(options.HasField(name) for name in ("bn_mode", "scale_filler", "shift_filler"))
    is_pspnet = any(options.HasField(name) for name in ("slope_filler", "bias_filler", "frozen", "momentum", "eps"))
    if is_segnet or (not is_pspnet and len(parameter.param) == SCALE_AND_SHIFT):
        return SCALE_AND_SHIFT
    return WITH_STATISTICS


def uses_batch_statistics(parameter: ProtoMessage) -> bool:
    """Whether a BN normalizes by the statistics of each batch at inference: SegNet's without ``bn_mode: INFERENCE``."""
    return bn_blobs(parameter) == SCALE_AND_SHIFT and parameter.bn_param.bn_mode != INFERENCE


def bn_affine(parameter: ProtoMessage, blobs: Sequence[torch.Tensor]) -> ChannelAffine:
    """The per-channel affine function of a BN with fixed statistics.

    SegNet's blobs hold scale and shift with the statistics included.

    Raises:
        ModelError: a variance plus eps is not positive.
    """
    flat = [blob.detach().reshape(-1) for blob in blobs]
    if len(flat) == SCALE_AND_SHIFT:
        return ChannelAffine.scale(*flat)
    slope, bias, mean, variance = flat
    return ChannelAffine.batch_norm(mean, variance, parameter.bn_param.eps, slope, bias)


@register("BN")
class BN(Layer):
    """y = scale * (x - mean) / sqrt(variance + eps) + shift per channel.

    SegNet and ENet: blobs scale and shift, (1, C, 1, 1) each; ``bn_mode: INFERENCE`` is y = scale * x + shift, else the
    statistics are those of the batch, and further tops give mean and variance. PSPNet and ICNet: blobs slope, bias,
    mean, variance; training uses the statistics of the batch unless ``frozen``.
    """

    top_count = (1, 3)

    def setup(self, bottoms: list[Shape]) -> None:
        """Create the blobs."""
        options = self.options = self.parameter.bn_param
        if len(bottoms[0]) < 2:
            raise self.error(f"needs a bottom with channels (N, C, ...), got shape {bottoms[0]}")
        self.channels = bottoms[0][1]
        shape = (1, self.channels, 1, 1)
        self.fixed_blobs = bn_blobs(self.parameter)
        if self.fixed_blobs == SCALE_AND_SHIFT:
            self.batch_statistics = uses_batch_statistics(self.parameter)
            self.eps = TINY
            fillers = ((options.scale_filler, "scale_filler", 1.0), (options.shift_filler, "shift_filler", 0.0))
        else:
            self.batch_statistics = self.is_training and not options.frozen
            self.eps = options.eps
            fillers = ((options.slope_filler, "slope_filler", 1.0), (options.bias_filler, "bias_filler", 0.0))
        for filler, name, default in fillers:
            self.add_parameter(shape, filler if options.HasField(name) else None, default=default)
        if self.fixed_blobs == WITH_STATISTICS:
            self.add_parameter(shape, default=0.0)
            self.add_parameter(shape, default=1.0)
        if len(self.top_blobs) > 1 and not self.batch_statistics:
            raise self.error("further tops (mean, variance) need the statistics of the batch")

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape; (1, C, 1, 1) for mean and variance."""
        if bottoms[0][1] != self.channels:
            raise self.error(f"the blobs are for {self.channels} channels, the bottom has shape {bottoms[0]}")
        return [bottoms[0], *[(1, self.channels, 1, 1)] * (len(self.top_blobs) - 1)]

    def channel_affine(self) -> ChannelAffine | None:
        """Scale and shift, if the statistics are fixed."""
        if self.batch_statistics:
            return None
        return bn_affine(self.parameter, [blob.tensor for blob in self.blobs])

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Normalize, scale and shift."""
        bottom = bottoms[0]
        shape = (1, -1) + (1,) * (bottom.dim() - 2)
        scale, shift = (each.reshape(shape) for each in parameters[:SCALE_AND_SHIFT])
        if self.batch_statistics:
            centred, mean, variance = _moments(bottom)
            self._collect(mean.detach(), variance.detach())
            tops = [torch.addcmul(shift, centred / torch.sqrt(variance + self.eps), scale), mean, variance]
            return [tops[0], *(top.reshape(1, -1, 1, 1) for top in tops[1 : len(self.top_blobs)])]
        if len(parameters) == WITH_STATISTICS:
            mean, variance = (each.detach().reshape(shape) for each in parameters[SCALE_AND_SHIFT:])
            factor = scale / torch.sqrt(variance + self.eps)
            return [torch.addcmul(shift - mean * factor, bottom, factor)]
        return [torch.addcmul(shift, bottom, scale)]

    def _collect(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the moving averages of PSPNet's form."""
        if self.fixed_blobs == SCALE_AND_SHIFT:
            return
        momentum = self.options.momentum
        with torch.no_grad():
            for blob, new in zip(self.blobs[SCALE_AND_SHIFT:], (mean, variance), strict=True):
                blob.set_tensor(blob.tensor * momentum + new.reshape(blob.shape) * (1 - momentum))

    def to_onnx(self, place: Place) -> None:
        """Mul and Add; behind a normalization by Reduce operators if the layer uses batch statistics."""
        axes = len(place.bottom_dims[0])
        shape = (self.channels, *(1,) * (axes - 2))
        affine = self.channel_affine()
        if affine is not None:
            values = [each.float().reshape(shape).numpy() for each in (affine.multiplier, affine.addend)]
            scaled = place.step("scaled", "Mul", place.bottom, place.value("scale", values[0]))
            place.top("Add", scaled, place.value("shift", values[1]))
            return
        if len(place.tops) > 1:
            raise place.error("its further tops (mean, variance) have no ONNX form")
        parts = place.centred_and_deviation(place.bottom, [0, *range(2, axes)], float(self.eps))
        scaled = place.step(
            "scaled", "Mul", place.step("normalized", "Div", *parts), place.parameter(0, "scale", shape)
        )
        place.top("Add", scaled, place.parameter(1, "shift", shape))


class _Broadcast(Layer):
    """The common part of Scale and Bias: an operand whose axes match those of the bottom from ``axis`` on."""

    bottom_count = (1, 2)

    options: ProtoMessage

    def operand_shape(self, bottoms: list[Shape]) -> Shape:
        """The shape of the parameter (or of the second bottom)."""
        num_axes = self.options.num_axes
        if len(bottoms) > 1:
            return bottoms[1]
        if num_axes < -1:
            raise self.error(f"num_axes must be non-negative, or -1 to extend to the end of bottom[0], got {num_axes}")
        start = self.canonical_axis(self.options.axis, len(bottoms[0]))
        if num_axes == -1:
            return bottoms[0][start:]
        if start + num_axes > len(bottoms[0]):
            raise self.error(
                f"num_axes {num_axes} from axis {start} extends past the end of the bottom's shape {bottoms[0]}"
            )
        return bottoms[0][start : start + num_axes]

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape; also computes the shape that broadcasts the operand over the bottom."""
        shape, operand = bottoms[0], bottoms[1] if len(bottoms) > 1 else self.blobs[0].shape
        # A scalar may be applied to a bottom of any number of axes.
        start = 0 if not operand else self.canonical_axis(self.options.axis, len(shape))
        if shape[start : start + len(operand)] != operand:
            raise self.error(f"dimension mismatch: bottom shape {shape} from axis {start} against {operand}")
        self.broadcast = (1,) * start + operand + (1,) * (len(shape) - start - len(operand))
        return [shape]

    @property
    def is_per_channel(self) -> bool:
        """Whether the operand is a parameter with one value per channel (axis 1)."""
        return len(self.bottom_blobs) == 1 and self.options.axis in (1, -3) and len(self.blobs[0].shape) == 1

    @property
    def trimmed(self) -> Shape:
        """The shape that broadcasts without leading axes of size 1, which runtimes fold more often."""
        start = next((index for index, size in enumerate(self.broadcast) if size != 1), len(self.broadcast))
        return self.broadcast[start:]

    def operand_dims(self, place: Place) -> Dims:
        """The shape in which a second bottom broadcasts to the first in ONNX."""
        operand = place.bottom_dims[1]
        start = 0 if not operand else self.canonical_axis(self.options.axis, len(self.broadcast))
        return (1,) * start + tuple(operand) + (1,) * (len(self.broadcast) - start - len(operand))


@register("Scale")
class Scale(_Broadcast):
    """y = x * scale (+ bias)."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Create the scale unless it is the second bottom, and the bias if ``bias_term`` is set."""
        options = self.options = self.parameter.scale_param
        operand = self.operand_shape(bottoms)
        if len(bottoms) == 1:
            self.add_parameter(operand, options.filler if options.HasField("filler") else None, default=1.0)
        if options.bias_term:
            self.add_parameter(operand, options.bias_filler)

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Return x * scale (+ bias)."""
        scale = (bottoms[1] if len(bottoms) > 1 else parameters[0]).reshape(self.broadcast)
        if not self.options.bias_term:
            return [bottoms[0] * scale]
        return [torch.addcmul(parameters[-1].reshape(self.broadcast), bottoms[0], scale)]

    def channel_affine(self) -> ChannelAffine | None:
        """Scale and bias, if both have one value per channel."""
        return ChannelAffine.scale(*(blob.tensor for blob in self.blobs)) if self.is_per_channel else None

    def to_onnx(self, place: Place) -> None:
        """Mul, and Add if there is a bias."""
        if len(place.bottoms) > 1:
            factor = place.reshaped(place.bottoms[1], self.operand_dims(place), "factor")
        else:
            factor = place.parameter(0, "scale", self.trimmed)
        if not self.options.bias_term:
            place.top("Mul", place.bottom, factor)
            return
        product = place.step("product", "Mul", place.bottom, factor)
        place.top("Add", product, place.parameter(len(self.blobs) - 1, "shift", self.trimmed))


@register("Bias")
class Bias(_Broadcast):
    """y = x + bias."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Create the bias unless it is the second bottom."""
        options = self.options = self.parameter.bias_param
        operand = self.operand_shape(bottoms)
        if len(bottoms) == 1:
            self.add_parameter(operand, options.filler)

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Return x + bias."""
        return [bottoms[0] + (bottoms[1] if len(bottoms) > 1 else parameters[0]).reshape(self.broadcast)]

    def channel_affine(self) -> ChannelAffine | None:
        """The bias, if it has one value per channel."""
        return ChannelAffine.bias(self.blobs[0].tensor) if self.is_per_channel else None

    def to_onnx(self, place: Place) -> None:
        if len(place.bottoms) > 1:
            place.top("Add", place.bottom, place.reshaped(place.bottoms[1], self.operand_dims(place), "addend"))
        else:
            place.top("Add", place.bottom, place.parameter(0, "shift", self.trimmed))
