"""From float ONNX, record and factors between layers to the files of one save path."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from amct import atomic
from amct.errors import ArgumentError, did_you_mean
from amct.export.ascend import ascend_model
from amct.export.binding import LayerFactors, bindings_by_name
from amct.export.fake_quant import fake_quant_model
from amct.export.qdq.exporter import Placement, qdq_model
from amct.export.qdq.nodes import Target
from amct.export.quant_json import quant_json
from amct.export.result import ExportedModel, Skip
from amct.export.writer import OutputFile, SavePath, check_opset, save_models

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from onnx import ModelProto

    from amct.export.binding import TensorFactors
    from amct.record import LayerRecord, Record

logger = logging.getLogger(__name__)

RECORD = "record"
"""The factors, among the formats that ``QuantizedModel.save`` takes."""
FORMATS = {"deploy": OutputFile.DEPLOY, "fake_quant": OutputFile.FAKE_QUANT, "qdq": OutputFile.QDQ}
"""Names of the exported models, as ``QuantizedModel.save`` takes them."""
DEFAULT_FORMATS = ("qdq", "deploy", "fake_quant", RECORD)
"""What ``QuantizedModel.save`` writes."""


def layer_factors(entry: LayerRecord) -> LayerFactors:
    """What the record says of a layer, as the exporters want it."""
    assert entry.scale_d is not None
    assert entry.offset_d is not None
    one = (1.0,)
    balance = np.array(entry.tensor_balance_factor, dtype=np.float32) if entry.tensor_balance_factor else None
    return LayerFactors(
        scale_d=entry.scale_d,
        offset_d=entry.offset_d,
        act_bits=int(entry.activation_type.removeprefix("INT")),
        scale_w=np.array(entry.scale_w or one, dtype=np.float32),
        wts_bits=int(entry.weight_type.removeprefix("INT")),
        scale_h=entry.scale_h,
        offset_h=entry.offset_h,
        scale_r=np.array(entry.scale_r, dtype=np.float32) if entry.scale_r else None,
        balance=balance,
    )


class ModelNotes(Protocol):
    """What a front door knows of a model beside its record."""

    @property
    def fusions(self) -> Mapping[str, Sequence[str]]:
        """By layer: layers of the original model that were folded into it."""

    @property
    def skipped(self) -> Mapping[str, str]:
        """Layers that stay float, with the reason."""

    @property
    def config(self) -> str:
        """The config used, as text for people."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Which models are exported, and how the QDQ file is made.

    Attributes:
        formats: Of ``FORMATS``.
        placement: "fast" or "exact".
        target: "portable", "vnni" or "exact8".

    Raises:
        ArgumentError: an unknown format, placement or target.
    """

    formats: tuple[str, ...] = tuple(FORMATS)
    placement: str = Placement.FAST.value
    target: str = Target.PORTABLE.value

    def __post_init__(self) -> None:
        for name in self.formats:
            if name not in FORMATS:
                raise ArgumentError(
                    f'formats: "{name}" is unknown.{did_you_mean(str(name), FORMATS)} Choose from {", ".join(FORMATS)}'
                )
        for argument, kind in (("placement", Placement), ("target", Target)):
            known = [item.value for item in kind]
            value = getattr(self, argument)
            if value not in known:
                raise ArgumentError(f"{argument}: expected one of {', '.join(known)}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """What ``QuantizedModel.save`` was asked for.

    Attributes:
        where: The folder and the prefix, which can be written to.
        options: Which models, and how.
        with_record: Whether the factors are written too.
        opset: Of the ONNX files; None: the door's default.
    """

    where: SavePath
    options: ExportOptions
    with_record: bool
    opset: int | None = None

    @classmethod
    def checked(
        cls, path: str | os.PathLike[str], formats: Iterable[str], *, placement: str, target: str, opset: int | None
    ) -> SaveRequest:
        """Check everything before any work.

        Raises:
            ArgumentError: an unknown format, placement, target or opset, or an impossible path.
            FileError: the folder cannot be written to.
        """
        if opset is not None:
            check_opset(opset)
        where = SavePath.parse(path)
        atomic.check_writable(where.folder)
        names = (formats,) if isinstance(formats, str) else tuple(formats)
        models = tuple(name for name in names if name != RECORD)
        options = ExportOptions(formats=models, placement=placement, target=target)
        return cls(where=where, options=options, with_record=RECORD in names, opset=opset)


def save_files(
    save_path: SavePath,
    model: ModelProto | None,
    record: Record,
    notes: ModelNotes,
    tensors: Mapping[str, TensorFactors] | None,
    options: ExportOptions = ExportOptions(),  # noqa: B008  frozen
    extra: Mapping[Path, bytes] | None = None,
) -> list[Path]:
    """Export the models asked for and write them, with their report, all or none.

    Args:
        save_path: where to.
        model: the float ONNX model; its nodes carry the names of their layers. None when no format is asked for.
        record: complete and checked.
        notes: what else is known of the model.
        tensors: factors of the tensors between layers; None when nothing was observed.
        options: what to export.
        extra: further files of the same group, by path.

    Raises:
        ExportError: a model cannot be exported.
        FileError: a file cannot be written; nothing was.
    """
    if model is None:
        return save_models(save_path, {}, extra=extra)
    bindings = bindings_by_name(model, record)
    factors = {name: layer_factors(entry) for name, entry in record.items()}
    exported: dict[OutputFile, ExportedModel] = {}
    for output in dict.fromkeys(FORMATS[name] for name in options.formats):
        if output is OutputFile.DEPLOY:
            exported[output] = ascend_model(model, bindings, factors)
        elif output is OutputFile.FAKE_QUANT:
            exported[output] = fake_quant_model(model, bindings, factors)
        else:
            placement, target = Placement(options.placement), Target(options.target)
            exported[output] = qdq_model(model, bindings, factors, tensors=tensors, placement=placement, target=target)
        for note in exported[output].notes:
            logger.info("%s: %s", output.value, note)
    report = quant_json(
        {output.value: result for output, result in exported.items()},
        absorbed=notes.fusions,
        skipped=[Skip(name, reason) for name, reason in notes.skipped.items()],
        config=notes.config,
    )
    models = {output: result.model for output, result in exported.items()}
    written = save_models(save_path, models, quant_json=report, extra=extra)
    logger.info("wrote %s", ", ".join(str(path) for path in written))
    return written
