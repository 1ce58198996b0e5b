"""The layer that calibrates: it passes its bottom on, watches it, and writes the factors into the record file.

Where several IFMR layers see the same values (``factors_from``), one of them watches for all. What a net finds is
sought and written at once, when its last IFMR layer has seen its batches: one change of the file instead of a hundred,
and a calibration with one batch remembers as much as one with many.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from amct import log
from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.calibration.record_files import RecordFiles
from amct.errors import AmctError, CalibrationError
from amct.numerics.affine import SymmetricScale
from amct.numerics.ifmr import IfmrObserver
from amct.record import DataFactors, update_inputs
from amct.record.float32 import shortest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from amct.caffe.engine.blob import Shape
    from amct.numerics.observer import ActivationFactors

logger = logging.getLogger(__name__)

IMAGE_AXES = 4


class Findings:
    """What the IFMR layers of a net find for one record file: sought and written when the last of them is ready."""

    def __init__(self, record_file: str) -> None:
        self.record_file = record_file
        self._counting: set[str] = set()
        self._ready: list[IFMR] = []
        self._log_started = False

    def expect(self, layer: str) -> None:
        """Wait for one more layer."""
        self._counting.add(layer)

    def start_log(self) -> None:
        """Begin the log; of all layers the first one does."""
        if not self._log_started:
            log.start("amct_caffe")
        self._log_started = True

    def ready(self, layer: IFMR) -> None:
        """A layer has seen its batches."""
        self._ready.append(layer)
        self._counting.discard(layer.name)
        if not self._counting:
            self.write()

    def write(self) -> None:
        """Search the factors of the layers that are ready, and write them."""
        ready, self._ready = self._ready, []
        found: dict[str, list[DataFactors]] = {}
        for layer in ready:
            for owner, factors in layer.found():
                found.setdefault(owner, []).append(factors)
        if not found:
            return
        update_inputs(self.record_file, found)
        for owner, inputs in found.items():
            for _ in inputs:
                logger.info("Do layer %s activation calibration success!", owner)


@register("IFMR")
class IFMR(Layer):
    """Passes its bottom on and watches it: after batch_num batches it has the factors for the record file."""

    returns_views = True

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options."""
        del bottoms
        options = self.options = self.parameter.ifmr_param
        if not options.record_file_path or not options.object_layer:
            raise self.error("ifmr_param needs record_file_path and object_layer")
        self.seen = 0
        self.shape: Shape | None = None
        self.observer: IfmrObserver | None = self._new_observer()
        self.followers: list[IFMR] = []
        self.findings = Findings(options.record_file_path)

    def connect(self, layers: Mapping[str, Layer]) -> None:
        """Find the layer that watches for this one, and those that write to the same file."""
        source = self.options.factors_from
        if source:
            leader = layers.get(source)
            if not isinstance(leader, IFMR) or leader.options.factors_from:
                raise self.error(f'factors_from: "{source}" is no IFMR layer that watches its bottom')
            leader.followers.append(self)
        file = self.options.record_file_path
        for other in layers.values():  # in net order: all take that of the first
            if isinstance(other, IFMR) and other.options.record_file_path == file:
                self.findings = other.findings
                break
        if not source:
            self.findings.expect(self.name)

    def _new_observer(self) -> IfmrObserver:
        options = self.options
        try:
            return IfmrObserver(
                bits=options.num_bits_d,
                asymmetric=options.with_offset,
                symmetric_scale=SymmetricScale.FULL_RANGE,
                max_percentile=shortest(options.max_percentile),
                min_percentile=shortest(options.min_percentile),
                search_range=(shortest(options.search_range_start), shortest(options.search_range_end)),
                search_step=shortest(options.search_step),
                counts_all=False,
            )
        except AmctError as error:
            raise self.error(str(error)) from error

    @property
    def uses_autograd(self) -> bool:
        """No gradients: a net is not trained while it is calibrated."""
        return False

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape."""
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Look, and pass on."""
        del parameters
        self.shape = tuple(bottoms[0].shape)
        if self.options.factors_from:
            return [bottoms[0]]
        if self.seen < self.options.batch_num:
            self._observe(bottoms[0])
        else:
            self.findings.write()  # there is something only when layers behind this one were never run
        return [bottoms[0]]

    def _observe(self, x: torch.Tensor) -> None:
        assert self.observer is not None, "the data is forgotten after the last batch only"
        if self.seen == 0:
            self.findings.start_log()
            self.observer.expect(x.numel() * self._needed)
        try:
            self.observer.observe(x)
        except AmctError as error:
            raise self._illegal(error) from error
        self.seen += 1
        for name in self.objects:
            logger.debug("layer %s (input %d): %d/%d batches", name, self.options.index, self.seen, self._needed)
        if self.seen == self._needed:
            self.findings.ready(self)
        if self.options.reports_progress:  # the last layer of a net that watches, for all of them
            logger.info("calibration: %d/%d batches", self.seen, self._needed)
            progress = dict.fromkeys(self.objects, (self.seen, self._needed))
            RecordFiles(self.options.record_file_path).note(progress)

    def _illegal(self, error: AmctError) -> CalibrationError:
        prefix = "IfmrQuantWithOffset" if self.options.with_offset else "IfmrQuantWithoutOffset"
        batch = min(self.seen + 1, self._needed)
        return CalibrationError(
            f'layer "{self.objects[0]}", input {self.options.index}, batch {batch}: {prefix} scale is illegal: {error}'
        )

    @property
    def objects(self) -> list[str]:
        """The layers that read this input."""
        return list(self.options.object_layer)

    @property
    def _needed(self) -> int:
        needed: int = self.options.batch_num
        return needed

    def found(self) -> Iterator[tuple[str, DataFactors]]:
        """Search, forget the data, and say for which layers which factors were found.

        Raises:
            CalibrationError: the data has no legal factors.
        """
        assert self.observer is not None, "a layer is ready once"
        try:
            factors = self.observer.result()
        except AmctError as error:
            raise self._illegal(error) from error
        self.observer = None
        for layer in (self, *self.followers):
            entry = layer.entry(factors, layer.shape or self.shape)
            for name in layer.objects:
                if bool(factors.near_zero):
                    logger.warning(
                        'layer "%s", input %d: all values are (as good as) zero, so the scale is 1', name, entry.index
                    )
                yield name, entry

    def entry(self, factors: ActivationFactors, shape: Shape | None) -> DataFactors:
        """What the record says of this layer's bottom."""
        sizes = {}
        if shape is not None and len(shape) == IMAGE_AXES:
            sizes = dict(zip(("channels", "height", "width"), shape[1:], strict=True))
        return DataFactors(
            index=self.options.index,
            scale=float(factors.scale),
            offset=int(factors.offset),
            num_bits=factors.bits,
            **sizes,
        )
