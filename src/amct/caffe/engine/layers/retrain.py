"""The layers of quantization-aware training: RetrainDataQuant rounds data, RetrainWeightQuant the weights of a layer.

Both train: gradients pass the rounding, and the clips of the data are parameters of the solver. One prototxt serves
both phases. In the TRAIN phase IFMR finds the clips in the first batches, which pass unrounded. In the TEST phase the
last of these layers writes the factors of all of them to the record file, as often as they change.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from amct import log
from amct.caffe.engine.layer import IMAGE_BLOB_AXES, Layer, ProtoMessage, Shape, Tensors, register
from amct.caffe.engine.layers.ifmr import IfmrLayerObserver, check_named_record
from amct.caffe.engine.layers.quantization import FakeQuantized
from amct.errors import AmctError, ConfigError
from amct.numerics.affine import SymmetricScale
from amct.numerics.settings import IfmrSettings, WeightKind
from amct.numerics.training.quantizers import arq_scale, arq_step, scale_count, ulq, ulq_factors, valid_clips
from amct.printable import counted
from amct.record import CaffeLayerRecord, CaffeRecord, DataFactors, write_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


logger = logging.getLogger(__name__)

RETRAIN_TYPES = ("RetrainDataQuant", "RetrainWeightQuant")
CLIP_SIZES = (1, 1, 2)
"""The blobs of RetrainDataQuant: upper clip, lower clip, the last legal pair of both; equal ones are not found yet."""


def clip_factors(clips: Sequence[torch.Tensor], bits: int) -> tuple[float, int] | None:
    """Scale and offset for the blobs of a RetrainDataQuant layer; None as long as its clips are not found.

    Args:
        clips: Upper clip, lower clip, and the last legal pair of both.
        bits: The width of the integers.
    """
    high, low, valid = (clip.detach().float().cpu().reshape(-1) for clip in clips)
    if bool(valid[0] == valid[1]):
        return None
    low, high = valid_clips(low, high, valid[1:], valid[:1])
    scale, offset = ulq_factors(low.reshape(()), high.reshape(()), bits)
    return float(scale), int(offset)


class _RetrainLayer(Layer):
    """The common part: the record file, and the rules for the solver."""

    record_file: str
    object_layer: str

    def connect(self, layers: Mapping[str, Layer]) -> None:
        """The last layer of a record file writes the factors of all of them."""
        same_file = [
            layer
            for layer in layers.values()
            if isinstance(layer, _RetrainLayer) and layer.record_file == self.record_file
        ]
        self._reported = same_file if same_file[-1] is self and self.record_file and not self.is_training else []
        self._written: CaffeRecord | None = None

    def check_solver(self, solver: ProtoMessage) -> None:
        """Reject a solver that would never write the record, or before there are factors.

        Raises:
            ConfigError: Settings are wrong; the message lists all of them.
        """
        wrong = []
        if any(solver.HasField(name) for name in ("train_net", "train_net_param")) or solver.test_net:
            wrong.append("use net: one prototxt serves both phases, train_net and test_net do not")
        if not solver.test_iter or not any(solver.test_iter) or solver.test_interval <= 0:
            wrong.append("set test_iter and test_interval above 0: the record is written in the TEST phase")
        elif solver.test_initialization:
            wrong.append("set test_initialization: false, the factors are found in the first training batches")
        if wrong:
            raise ConfigError(f"the net of this solver is trained for quantization: {'; '.join(wrong)}")

    def report(self) -> None:
        """Write the record, if this is the last layer and a factor has changed."""
        if not self._reported:
            return
        entries: dict[str, CaffeLayerRecord] = {}
        for layer in self._reported:
            entry = entries.get(layer.object_layer, CaffeLayerRecord(object_layer=layer.object_layer))
            entries[layer.object_layer] = layer.with_factors(entry)
        record = CaffeRecord(entries)
        if record == self._written:
            return
        check_named_record(self.record_file)
        log.start("amct_caffe")
        write_record(record, self.record_file, form="text")
        self._written = record
        logger.info("wrote the factors of %s to %s", counted(len(entries), "retrained layer"), self.record_file)

    def with_factors(self, entry: CaffeLayerRecord) -> CaffeLayerRecord:
        """The entry of the object layer with the factors of this layer."""
        raise NotImplementedError


@register("RetrainDataQuant")
class RetrainDataQuant(_RetrainLayer):
    """ULQ: rounds its bottom between two clips, which are trained.

    Its blobs are the upper clip, the lower clip, and the last legal pair of both: an update may make a clip illegal.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options and create the clips."""
        options = self.options = self.parameter.retrain_data_quant_param
        if not options.object_layer:
            raise self.error("retrain_data_quant_param needs object_layer")
        self.record_file, self.object_layer = options.record_file_path, options.object_layer
        self.bits: int = options.num_bits_d
        self._observer: IfmrLayerObserver | None = None
        for size in CLIP_SIZES:
            self.add_parameter((size,))
        trained = (True, not options.fixed_min, False)
        for index, each in enumerate(trained):
            if index == len(self.parameter.param):
                self.parameter.param.add(lr_mult=float(each), decay_mult=0.0)

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Quantize and dequantize; the batches in which the clips are found pass unchanged."""
        high, low, valid = parameters
        clips = torch.cat([each.detach() for each in parameters]).tolist()
        if clips[2] == clips[3]:
            if not self._find_clips(bottoms[0], parameters):
                return [bottoms[0].clone()]
        elif not clips[1] <= 0 <= clips[0] or clips[0] == clips[1]:  # an update made them illegal
            right_low, right_high = valid_clips(low.detach(), high.detach(), valid[1:], valid[:1])
            self._set_clips(parameters, right_high, right_low)
        elif self.is_training:
            self.blobs[2].set_tensor(torch.cat([high.detach(), low.detach()]))
        lower = torch.zeros((), device=low.device) if self.options.fixed_min else low.reshape(())
        top = ulq(bottoms[0], lower, high.reshape(()), self.bits)
        self.report()
        return [top]

    def _set_clips(self, parameters: Tensors, high: torch.Tensor, low: torch.Tensor) -> None:
        """Set the clips, in the blobs and in the tensors that the gradients are computed for."""
        for blob, tensor, value in zip(self.blobs, parameters, (high, low, torch.cat([high, low])), strict=True):
            tensor.data.copy_(value)
            blob.set_tensor(tensor.detach())

    def _find_clips(self, bottom: torch.Tensor, parameters: Tensors) -> bool:
        """Let IFMR observe a batch; returns whether the clips are known now."""
        options = self.options
        given = {name: getattr(options, name) for name in ("clip_max", "clip_min") if options.HasField(name)}
        if options.fixed_min:
            given["clip_min"] = 0.0
        if len(given) < 2 and not self.is_training:
            raise self.error(
                "its clips are not known: they are found in the first training batches. Set test_initialization: false "
                "in the solver; a net that is only tested needs the weights of a snapshot"
            )
        if len(given) < 2 and options.clips_from:
            return False
        if len(given) < 2:
            if self._observer is None:
                self._observer = IfmrLayerObserver(IfmrSettings(num_bits=self.bits))
                self._observer.sample_for(options.batch_num)
            try:
                self._observer.observe(bottom.detach())
                if self._observer.batches < options.batch_num:
                    return False
                found = self._observer.result()
            except AmctError as error:
                raise self.error(str(error)) from error
            self._observer = None
            given = {"clip_max": float(found.clip_max), "clip_min": float(found.clip_min)} | given
            logger.info('layer "%s": IFMR found the clips %g and %g', self.object_layer, *given.values())
        high, low = (torch.tensor([given[name]], device=bottom.device) for name in ("clip_max", "clip_min"))
        self._set_clips(parameters, high, low)
        return True

    def with_factors(self, entry: CaffeLayerRecord) -> CaffeLayerRecord:
        """The entry with scale and offset of this bottom."""
        factors = clip_factors([blob.tensor for blob in self.blobs], self.bits)
        assert factors is not None, "a net whose clips are unknown does not run in the TEST phase"
        shape = self.bottom_blobs[0].shape
        sizes = (
            dict(zip(("channels", "height", "width"), shape[1:], strict=True)) if len(shape) == IMAGE_BLOB_AXES else {}
        )
        data = DataFactors(index=self.options.index, scale=factors[0], offset=factors[1], num_bits=self.bits, **sizes)
        return entry.with_input(data)


@register("RetrainWeightQuant")
class RetrainWeightQuant(_RetrainLayer):
    """ARQ: the weights of another layer are rounded in each of its forwards, with a straight-through gradient."""

    bottom_count = (0, 0)
    top_count = (0, 0)
    has_gradients = False

    def setup(self, bottoms: list[Shape]) -> None:
        options = self.options = self.parameter.retrain_weight_quant_param
        if not options.object_layer:
            raise self.error("retrain_weight_quant_param needs object_layer")
        self.record_file, self.object_layer = options.record_file_path, options.object_layer

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """No tops."""
        return []

    def connect(self, layers: Mapping[str, Layer]) -> None:
        """Give the object layer the function that rounds its weights."""
        super().connect(layers)
        target = layers.get(self.object_layer)
        if not isinstance(target, FakeQuantized):
            raise self.error(f'object_layer: "{self.object_layer}" is no layer with weights that can be quantized')
        self.target = target
        channel_wise = self.options.channel_wise and target.has_channel_scales
        target.take_weight_quantizer(partial(self._rounded, channel_wise=channel_wise))
        self._channel_wise = channel_wise

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Nothing: the object layer rounds its weights itself."""
        self.report()
        return []

    def _rounded(self, rows: torch.Tensor, *, channel_wise: bool) -> torch.Tensor:
        return arq_step(
            rows,
            self.options.num_bits_w,
            kind=WeightKind.LINEAR,
            channel_wise=channel_wise,
            symmetric_scale=SymmetricScale.FULL_RANGE,
        )

    def with_factors(self, entry: CaffeLayerRecord) -> CaffeLayerRecord:
        """The entry with the weight scales."""
        rows = self.target.weight_rows(self.target.blobs[0].tensor.detach())
        count = scale_count(rows.shape[0], WeightKind.LINEAR, 1, channel_wise=self._channel_wise)
        scale = arq_scale(rows, self.options.num_bits_w, count, SymmetricScale.FULL_RANGE)
        return replace(entry, scale_w=tuple(scale.tolist()), offset_w=(0,) * count, num_bits_w=self.options.num_bits_w)
