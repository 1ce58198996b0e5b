"""IFMR, the calibration layer: it passes its bottom through, and the calibration session of its net observes it.

All IFMR layers of a net with the same record file share one session. When the last of them has observed its batches,
the session computes all factors and writes them to the record file at once. Where several IFMR layers see the same
values (``factors_from``), one of them is observed for all. A net in memory has IFMR layers without a record file:
``start_session`` gives them a session that keeps its result in memory.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from amct import log
from amct.atomic import is_file, read_bytes, replace_fleeting
from amct.caffe.engine.layer import IMAGE_BLOB_AXES, Layer, Shape, Tensors, register
from amct.calibration import ALONE, CalibrationSession, RecordFiles, Stream, all_ranks, make_observer
from amct.calibration.record_files import progress_path
from amct.calibration.session import INPUT
from amct.config.checks import checked_settings
from amct.config.plan import OPEN_ENDED
from amct.config.registry import settings_from_dict
from amct.errors import AmctError, CalibrationError, FileError
from amct.export.check.batch import batch_path, encode_batch, kept_inputs
from amct.numerics.affine import SymmetricScale
from amct.numerics.ifmr import IfmrObserver
from amct.numerics.qparams import LayerQParams
from amct.numerics.settings import IfmrSettings
from amct.record import read_caffe_record, update_inputs
from amct.record.conversion import caffe_layer_record
from amct.schema import shortest_float

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from amct.calibration import CalibrationResult, Ranks
    from amct.config.plan import LayerPlan
    from amct.numerics.observer import Observer, TensorObserver
    from amct.numerics.qparams import Observed
    from amct.numerics.settings import ActivationSettings
    from amct.record import Progress


#: A record of weights as it is written here. Parsing its thousands of scales takes as long as some forward passes.
_WEIGHTS = re.compile(
    rb'(?:record \{\n  key: "[^"\\\n]+"\n  value \{\n'
    rb'(?:    (?:(?:scale|offset|num_bits)_w: -?[0-9][0-9.e+-]*|object_layer: "[^"\\\n]*")\n)+'
    rb"  \}\n\}\n)+"
)


def caffe_stream(index: int) -> str:
    """The name of the stream of one bottom of a layer."""
    return f"{INPUT} {index}"


def observed_inputs(result: CalibrationResult) -> dict[str, LayerQParams]:
    """By layer: the parameters of all its inputs, with channels, height and width of 4-dimensional ones."""
    layers = {}
    for layer, found in result.layers.items():
        numbers = {name: int(name.removeprefix(INPUT)) for name in found}
        shapes = {numbers[name]: result.shapes[layer][name] for name in found}
        layers[layer] = LayerQParams(
            inputs={numbers[name]: each for name, each in found.items()},
            sizes={number: shape[1:] for number, shape in shapes.items() if len(shape) == IMAGE_BLOB_AXES},
        )
    return layers


def check_named_record(path: str) -> None:
    """Check that a record file exists, as AMCT's functions leave it, before a layer writes its factors to it.

    Raises:
        FileError: There is no file.
        RecordParseError: The file is not a record.
    """
    if not is_file(path):
        raise FileError(
            f'record_file_path: the record "{path}" does not exist; a prototxt creates no files. Make the model again '
            "with the functions of amct_caffe"
        )
    if not _WEIGHTS.fullmatch(read_bytes(path)):
        read_caffe_record(path)


logger = logging.getLogger(__name__)


@register("IFMR")
class IFMR(Layer):
    """Passes its bottom through; the session of its net observes the first ``batch_num`` batches."""

    returns_views = True
    has_gradients = False

    def setup(self, bottoms: list[Shape]) -> None:
        self.options = self.parameter.ifmr_param
        if not self.options.object_layer or "" in self.options.object_layer:
            raise self.error("ifmr_param needs object_layer, the name of a layer")
        self.session: CalibrationSession | None = None
        self.file: _RecordFile | None = None
        self._stream = caffe_stream(self.options.index)
        self._object_layers = tuple(reversed(self.options.object_layer))
        self._ends_batch = bool(self.options.reports_progress)
        self.shows = ""
        """The blob that the session observes channel by channel here; empty: none."""
        self.flattens = False
        """Whether each of its values is a channel, as for InnerProduct."""

    def connect(self, layers: Mapping[str, Layer]) -> None:
        """Check ``factors_from``; the last IFMR layer of a record file starts the session of all of them."""
        source = self.options.factors_from
        leader = layers.get(source)
        if source and (not isinstance(leader, IFMR) or leader.options.factors_from):
            raise self.error(f'factors_from: "{source}" is no IFMR layer that watches its bottom')
        file = self.options.record_file_path
        sharing = [each for each in layers.values() if isinstance(each, IFMR) and each.options.record_file_path == file]
        if file and sharing[-1] is self:
            ranks = all_ranks()
            ranks.need_a_batch_each(max(layer.options.batch_num for layer in sharing))
            start_session(sharing, file=_RecordFile(file, _plain_inputs(layers)), ranks=ranks)

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Let the session observe the bottom, and return it."""
        session, bottom = self.session, bottoms[0]
        if session is None:
            raise self.error("ifmr_param needs record_file_path")
        if self.file is not None:
            self.file.see(self.parameter.bottom[0], bottom)
            self.file = None  # only the first batch is kept
        for layer in self._object_layers:  # only the stream of the first layer, the last one here, has an observer
            session.observe(layer, bottom, self._stream, ends_batch=self._ends_batch)
        if self.shows:
            session.observe_tensor(self.shows, bottom.flatten(1) if self.flattens else bottom)
        return [bottom]

    def streams(self, layers: Mapping[str, IFMR], plans: Mapping[str, LayerPlan]) -> Iterator[Stream]:
        """One stream per layer that reads the bottom; all but one reuse the factors of another stream.

        Args:
            layers: the IFMR layers of the net.
            plans: the settings by observed layer; a layer without a plan has them itself, from a file.
        """
        options = self.options
        plan = plans.get(options.object_layer[0])
        settings = self._settings() if plan is None else plan.activations[options.index]
        batch_num = options.batch_num if plan is None else plan.batch_num
        leader = layers[options.factors_from or self.name].options
        observed = (leader.object_layer[0], caffe_stream(leader.index))
        for layer in options.object_layer:
            name = caffe_stream(options.index)
            yield Stream(
                layer=layer,
                name=name,
                settings=settings,
                batch_num=batch_num,
                make_observer=partial(self._make_observer, settings, batch_num),
                same_as=None if (layer, name) == observed else observed,
                others=() if plan is None else plan.other_ranges,
            )

    def _settings(self) -> ActivationSettings:
        options = self.options
        try:
            if options.settings:
                return settings_from_dict(json.loads(options.settings))
            given = {
                "num_bits": options.num_bits_d,
                "asymmetric": bool(options.with_offset),
                "max_percentile": shortest_float(options.max_percentile),
                "min_percentile": shortest_float(options.min_percentile),
                "search_range": (shortest_float(options.search_range_start), shortest_float(options.search_range_end)),
                "search_step": shortest_float(options.search_step),
            }
            return checked_settings(IfmrSettings, given)
        except (AmctError, json.JSONDecodeError) as error:
            raise self.error(f"settings: {error}" if options.settings else str(error)) from error

    def _make_observer(self, settings: ActivationSettings, batch_num: int) -> Observer:
        try:
            if not isinstance(settings, IfmrSettings):
                return make_observer(settings, symmetric_scale=SymmetricScale.FULL_RANGE)
            observer = IfmrLayerObserver(settings)
        except AmctError as error:
            raise self.error(str(error)) from error
        observer.sample_for(batch_num if batch_num < OPEN_ENDED else None)
        return observer


@dataclass(kw_only=True, eq=False)
class IfmrLayerObserver(IfmrObserver):
    """IFMR with AMCT's behavior: memory independent of ``batch_num``, and AMCT's prefix in error messages."""

    symmetric_scale: SymmetricScale = SymmetricScale.FULL_RANGE
    keeps_few: bool = True

    def observe(self, x: torch.Tensor) -> None:
        """Observe one batch."""
        try:
            super().observe(x)
        except AmctError as error:
            raise self._as_in_amct(error) from error

    def result(self) -> Observed:
        """Scale and offset for all observed data."""
        try:
            return super().result()
        except AmctError as error:
            raise self._as_in_amct(error) from error

    def _as_in_amct(self, error: AmctError) -> CalibrationError:
        kind = "IfmrQuantWithOffset" if self.asymmetric else "IfmrQuantWithoutOffset"
        return CalibrationError(f"{kind} scale is illegal: {error}")


def _plain_inputs(layers: Mapping[str, Layer]) -> frozenset[str]:
    """The input blobs of a net; none if a layer changes one of them in place."""
    tops = [(layer.parameter.type == "Input", name) for layer in layers.values() for name in layer.parameter.top]
    inputs = {name for is_input, name in tops if is_input}
    changed = any(name in inputs for is_input, name in tops if not is_input)
    return frozenset() if changed else frozenset(inputs)


def start_session(
    layers: Sequence[IFMR],
    *,
    plans: Mapping[str, LayerPlan] = MappingProxyType({}),
    tensors: Mapping[str, TensorObserver] | None = None,
    file: _RecordFile | None = None,
    ranks: Ranks = ALONE,
) -> CalibrationSession:
    """Start the session shared by the IFMR layers of a net.

    Args:
        layers: the IFMR layers, in the order of the net.
        plans: the settings by observed layer, for layers of a net in memory.
        tensors: observers of blobs between layers.
        file: the file for the factors; None: the factors are only in the session's result.
        ranks: the processes that calibrate together; the first one writes.

    Raises:
        CalibrationError: there is no IFMR layer.
        ModelError: the settings of a layer are invalid.
    """
    by_name = {layer.name: layer for layer in layers}
    streams = [stream for layer in layers for stream in layer.streams(by_name, plans)]
    calls = {} if file is None else file.calls(ranks)
    session = CalibrationSession(streams, tensors=tensors, ranks=ranks, **calls)
    for layer in layers:
        layer.session, layer.file = session, file
    return session


class _RecordFile:
    """The record file of a calibration, its progress file, and the first batch for the check of the saved files.

    Args:
        path: The record.
        inputs: The input blobs of the net; they are kept if IFMR layers see all of them.
    """

    def __init__(self, path: str, inputs: Collection[str]) -> None:
        self.path = path
        self._missing, self._one_input = set(inputs), len(inputs) == 1
        self._batch: dict[str, NDArray[Any]] = {}
        self._is_checked = self._is_logging = False

    def calls(self, ranks: Ranks) -> dict[str, Any]:
        """What a session of these processes calls: the first one writes."""
        calls: dict[str, Any] = {"on_progress": self.note, "on_end": self.complete} if ranks.is_first else {}
        return {**calls, "on_ready": self.write} if ranks.is_alone else calls

    def see(self, name: str, tensor: torch.Tensor) -> None:
        """Keep the first tensor of an input blob within the limit of memory; of an only input, its first samples."""
        if not self._is_logging:  # once for all layers: it looks up the log file and its levels
            log.start("amct_caffe")
            self._is_logging = True
        if name not in self._missing:
            return
        self._missing.remove(name)
        self._batch[name] = tensor.detach().cpu().numpy()
        kept = kept_inputs(self._batch, divisible=self._one_input)
        self._batch = kept or {}
        if kept is None:
            self._missing.clear()

    def _check(self) -> None:
        if not self._is_checked:
            check_named_record(self.path)
            self._is_checked = True

    def note(self, progress: Mapping[str, Progress]) -> None:
        self._check()
        logger.info("calibration: %d/%d batches", *max(progress.values()))
        RecordFiles(self.path).note(progress)

    def write(self, result: CalibrationResult) -> None:
        self._check()
        found = observed_inputs(result)
        update_inputs(self.path, {layer: caffe_layer_record(layer, each).record_d for layer, each in found.items()})
        for layer, each in found.items():
            for _ in each.inputs:
                logger.info("Do layer %s activation calibration success!", layer)

    def complete(self, result: CalibrationResult) -> None:
        self.write(result)
        if self._batch and not self._missing:
            replace_fleeting(batch_path(self.path), encode_batch(self._batch, read_bytes(self.path)))  # for one check
        progress_path(self.path).unlink(missing_ok=True)
