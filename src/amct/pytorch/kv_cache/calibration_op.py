"""``QuantCalibrationOp``: a module for the user's forward that observes the tensors passed to it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch
from torch import Tensor, nn

from amct import log
from amct.arguments import FILE, check_types, output_file
from amct.calibration import CalibrationSession, RecordFiles, all_ranks
from amct.calibration.layer_records import kv_cache_entries, kv_cache_stream
from amct.config.ptq.kv_cache import plan_from_parameters
from amct.errors import CalibrationArgumentError
from amct.pytorch.kv_cache.watching import observe_output, warn_if_incomplete
from amct.pytorch.layer_hooks import hidden_from_modes
from amct.record import Record, update

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from amct.calibration import CalibrationResult
    from amct.config.ptq.kv_cache import KvCacheLayerPlan

logger = logging.getLogger(__name__)

KV_CACHE_QUANT = "kv_cache_quant"
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # torch 2.6 has the latter only


class QuantCalibrationOp(nn.Module):
    """Observes tensors on their way to a key/value cache and writes their factors to a record.

    Call it in the forward of a model, ``keys = self.calibrate("layer0.key", keys)``: the tensor is returned unchanged.
    Each call with a name is one batch of that name; after ``batch_num`` of them its factors are written to the record,
    beside those of other names and of other modules with the same record file. Missing batches are logged when the
    program ends.

    The record is emptied when the module is created. A deep copy observes nothing; a module that is pickled and loaded
    begins anew and leaves the record as it is.

    Args:
        record_file: where the factors are written.
        quant_algo_params: ``batch_num`` (1), ``act_algo`` ("ifmr" or "hfmg"), ``asymmetric`` (True),
            ``quant_granularity`` ("per_tensor" or "per_channel": one scale per element of the last dimension), and the
            settings of the algorithm as in a config.
        quant_method: "kv_cache_quant", the only one.

    Raises:
        TypeError: an argument or a setting has the wrong type.
        RuntimeError: a setting is unknown, belongs to the other algorithm or is outside its range.
        OSError: the record cannot be written.
    """

    def __init__(
        self,
        record_file: str | os.PathLike[str],
        quant_algo_params: Mapping[str, Any] | None = None,
        quant_method: str = KV_CACHE_QUANT,
    ) -> None:
        super().__init__()
        log.start("amct_pytorch")
        check_types(
            "QuantCalibrationOp",
            {
                "record_file": (record_file, FILE),
                "quant_algo_params": (quant_algo_params, (dict, type(None))),
                "quant_method": (quant_method, (str,)),
            },
        )
        if quant_method != KV_CACHE_QUANT:
            raise CalibrationArgumentError(
                f'QuantCalibrationOp: quant_method must be "{KV_CACHE_QUANT}", got "{quant_method}"'
            )
        plan = plan_from_parameters(quant_algo_params or {}, "quant_algo_params")
        path = output_file(record_file, "record_file")
        if all_ranks().is_first:
            RecordFiles(path).complete(Record())  # empty; the progress of an earlier calibration is deleted
        self._calibration = _Calibration(plan, path)

    def forward(self, layer_name: str, tensor: Tensor) -> Tensor:
        """Observe a tensor under a name, and return it.

        Raises:
            TypeError: the name is not a string, the tensor is none, or it has no floating-point numbers.
            RuntimeError: the tensor holds NaN or infinity; the message names the layer and the batch.
        """
        if not _is_exporting():
            self._calibration.observe(layer_name, tensor)
        return tensor


class _Calibration:
    """One session for each name, because names are known only when they are used."""

    def __init__(self, plan: KvCacheLayerPlan, record: Path) -> None:
        self._plan = plan
        self._record = record
        self._sessions: dict[str, CalibrationSession] = {}
        self._ranks = all_ranks()
        self._ranks.need_a_batch_each(plan.batch_num)
        # An observer is Python code with side effects: compiled models call it as it is.
        self.observe: Callable[[str, Tensor], None] = torch.compiler.disable(self._observe)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, _: object) -> _Calibration:
        return _NoCalibration(self._plan, self._record)

    def __reduce__(self) -> tuple[type[_Calibration], tuple[KvCacheLayerPlan, Path]]:
        return _Calibration, (self._plan, self._record)

    def _observe(self, layer: str, tensor: Tensor) -> None:
        check_types("QuantCalibrationOp", {"layer_name": (layer, (str,)), "tensor": (tensor, (Tensor,))})
        if layer not in self._sessions:
            self._sessions[layer] = self._new_session(layer)
        with hidden_from_modes():
            observe_output(self._sessions[layer], layer, tensor)

    def _new_session(self, layer: str) -> CalibrationSession:
        session = CalibrationSession(
            [kv_cache_stream(replace(self._plan, name=layer))],
            on_end=partial(_write, self._record) if self._ranks.is_first else None,
            show_bar=False,
            ranks=self._ranks,
        )
        finalize(self, warn_if_incomplete, session, os.fspath(self._record))
        return session


class _NoCalibration(_Calibration):
    """What a deep copy has: two modules must not write the same names."""

    def _observe(self, layer: str, tensor: Tensor) -> None:
        """Observe nothing."""


def _write(record: Path, result: CalibrationResult) -> None:
    for layer, entry in kv_cache_entries(result).items():
        update(record, layer, entry)
