"""Calibration of key/value caches: the factors with which the outputs of layers are quantized in a cache.

AMCT's functions observe the outputs of layers of the user's own model; ``QuantCalibrationOp`` observes the tensors that
the user's forward passes to it::

    create_quant_cali_config("config.json", model, {"kv_cache_quant_layers": ["attn.k", "attn.v"]})
    model = create_quant_cali_model("config.json", "record.txt", model)     then batch_num forwards

Models with a key/value cache are large, so the model is not copied: it has hooks until the calibration has ended. A
copy of it, or a pickled one, does not take part. Nothing is exported: the factors in the record are for the program
that keeps the cache.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch
from torch import Tensor, nn

from amct import log
from amct.arguments import FILE, check_types, output_file
from amct.atomic import read_bytes
from amct.calibration import CalibrationSession, RecordFiles, Stream, all_ranks
from amct.calibration.session import OUTPUT
from amct.config.layers import LayerInfo, LayerList
from amct.config.ptq.kv_cache import KV_CACHE, LAYERS_ARGUMENT, plan_from_parameters
from amct.errors import (
    ArgumentTypeError,
    CalibrationArgumentError,
    CalibrationError,
    MissingDefinitionError,
    MissingFileError,
)
from amct.pytorch.amct_api import pytorch_function, write_config
from amct.pytorch.capture.layer_types import type_name
from amct.pytorch.layer_hooks import hidden_from_modes, run_in_context
from amct.pytorch.user_model import refuse_operators, unwrap
from amct.record import KvCacheRecord, Record, update
from amct.record.conversion import kv_cache_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from amct.atomic import AnyPath
    from amct.calibration import CalibrationResult
    from amct.config.ptq.kv_cache import KvCacheLayerPlan
    from amct.config.simple_config import FullConfig
    from amct.pytorch.layer_hooks import Arguments


logger = logging.getLogger(__name__)

KV_CACHE_QUANT = "kv_cache_quant"


@pytorch_function
def create_quant_cali_config(
    config_file: AnyPath,
    model: nn.Module,
    quant_layers: Mapping[str, Sequence[str]] | None = None,
    config_defination: AnyPath | None = None,
) -> None:
    """Write the JSON config of the layers whose outputs go to a key/value cache.

    Args:
        config_file: the file to write.
        model: any nn.Module; it is not run.
        quant_layers: ``{"kv_cache_quant_layers": [names of Linear layers]}``; ignored with ``config_defination``.
        config_defination: a simple config.

    Raises:
        TypeError: an argument has the wrong type, or ``quant_layers`` another key.
        ValueError: a layer is unknown, repeated or not Linear, or a setting is wrong; all mistakes are listed.
        OSError: a file cannot be read or written.
        RuntimeError: no layer is named, the simple config does not exist, or the model is already quantized.
    """
    path = output_file(config_file, "config_file")
    model = unwrap(model)
    refuse_operators(model)
    write_config(path, _config(quant_layers, config_defination, _layers(model)))


@pytorch_function
def create_quant_cali_model(config_file: AnyPath, record_file: AnyPath, model: nn.Module) -> nn.Module:
    """Return the model, which observes the outputs of the configured layers in its next ``batch_num`` forwards.

    It is the model itself (of a compiled or distributed model, the one inside), with hooks until the calibration has
    ended. The record is emptied, and gets the factors of all layers when each has observed its batches. Until then
    ``<record>.progress.json`` has the batches observed; an incomplete calibration is logged when the program ends.

    Args:
        config_file: the JSON config of ``create_quant_cali_config``.
        record_file: where the factors are written.
        model: the model that the config was made for.

    Raises:
        TypeError: an argument or a config value has the wrong type.
        ValueError: the config does not fit the model; all mistakes are listed.
        OSError: a file cannot be read or written.
        RuntimeError: the config names no layer, or the model is already quantized.
    """
    path = output_file(record_file, "record_file")
    content = read_bytes(config_file)
    model = unwrap(model)
    refuse_operators(model)
    config = KV_CACHE.read_config(content, os.fspath(config_file), _layers(model))
    for warning in config.warnings:
        logger.warning("%s", warning)
    ranks = all_ranks()
    plan = KV_CACHE.make_plan(config)
    ranks.need_a_batch_each(min(layer.batch_num for layer in plan.layers))
    files = RecordFiles(path, writes=ranks.is_first)

    undo: list[Callable[[], None]] = []

    def end(result: CalibrationResult) -> None:
        files.complete(Record(kv_cache=_entries(result)))
        if ranks.is_first:
            logger.info("wrote %s", path)
        for step in undo:
            step()

    session = CalibrationSession(map(_stream, plan.layers), on_progress=files.note, on_end=end, ranks=ranks)
    watch = _Watch(session)
    hooks = {layer.name: partial(watch.observe, layer.name) for layer in plan.layers}
    undo += [model.get_submodule(name).register_forward_hook(hook).remove for name, hook in hooks.items()]
    undo.append(run_in_context(model, watch.forward, is_own=True))
    finalize(model, _warn_if_incomplete, session, os.fspath(path))
    files.begin(Record(), session.progress)
    return model


def _layers(model: nn.Module) -> LayerList:
    """The modules of a model by name; a module registered under two names has both."""
    named = model.named_modules(remove_duplicate=False)
    return LayerList([LayerInfo(name=name, type=type_name(module)) for name, module in named if name])


def _config(
    quant_layers: Mapping[str, Sequence[str]] | None, config_defination: AnyPath | None, layers: LayerList
) -> FullConfig:
    if config_defination is not None:
        if quant_layers:
            logger.warning("quant_layers is ignored, because config_defination is given; name the layers in the file")
        try:
            text = read_bytes(config_defination)
        except MissingFileError as error:
            raise MissingDefinitionError(f"config_defination: {error}") from error
        return KV_CACHE.expand_config(text, os.fspath(config_defination), layers)
    if quant_layers is None:
        raise CalibrationError(
            "create_quant_cali_config: no layer is named for kv-cache quantization; give "
            f'quant_layers={{"{LAYERS_ARGUMENT}": [names of Linear layers]}}, or config_defination'
        )
    for key, names in quant_layers.items():
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise ArgumentTypeError(
                f'create_quant_cali_config: quant_layers["{key}"] must be a list of layer names, got {names!r}'
            )
    return KV_CACHE.default_config(layers, quant_layers)


def _warn_if_incomplete(session: CalibrationSession, record: str) -> None:
    """Log the layers that still need batches; called when the model is deleted or the program ends."""
    session.close()
    if missing := session.missing():
        logger.warning(
            "%s: the calibration of the key/value cache is incomplete: %s; run more data, or lower batch_num",
            record,
            missing,
        )


class _Watch:
    """The connection of hooks to a session, which copies of the model do not have."""

    def __init__(self, session: CalibrationSession | None = None) -> None:
        self.session = session

    def __deepcopy__(self, _: object) -> _Watch:
        return _Watch()

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return _Watch, ()

    @contextmanager
    def forward(self, _: Arguments) -> Iterator[None]:
        """Enclose one forward of the model: a layer that it calls several times observes one batch."""
        if self.session is None:
            yield
        else:
            with self.session.batch():
                yield

    def observe(self, layer: str, _: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Observe the output of a layer; a forward hook."""
        del args
        if self.session is None:
            return
        if not isinstance(output, Tensor):
            raise CalibrationError(
                f'layer "{layer}": the output is a {type(output).__name__}, expected a tensor; call a '
                "QuantCalibrationOp on the tensor that goes to the cache instead"
            )
        _observe(self.session, layer, output)


def _observe(session: CalibrationSession, layer: str, output: Tensor) -> None:
    """Pass one tensor on its way to the cache to a session."""
    with hidden_from_modes():
        session.observe(layer, output.detach(), OUTPUT)


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
        if not torch.compiler.is_exporting():
            self._calibration.observe(layer_name, tensor)
        return tensor


class _Calibration:
    """One session for each name, because names are known only when they are used."""

    def __init__(self, plan: KvCacheLayerPlan, record: Path, *, is_copy: bool = False) -> None:
        self._plan = plan
        self._record = record
        self._is_copy = is_copy
        self._sessions: dict[str, CalibrationSession] = {}
        self._ranks = all_ranks()
        self._ranks.need_a_batch_each(plan.batch_num)
        # An observer is Python code with side effects: compiled models call it as it is.
        self.observe: Callable[[str, Tensor], None] = torch.compiler.disable(self._observe)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, _: object) -> _Calibration:
        return _Calibration(self._plan, self._record, is_copy=True)  # two must not write the same names

    def __reduce__(self) -> tuple[type[_Calibration], tuple[KvCacheLayerPlan, Path]]:
        return _Calibration, (self._plan, self._record)

    def _observe(self, layer: str, tensor: Tensor) -> None:
        if self._is_copy:
            return
        check_types("QuantCalibrationOp", {"layer_name": (layer, (str,)), "tensor": (tensor, (Tensor,))})
        if layer not in self._sessions:
            self._sessions[layer] = self._new_session(layer)
        _observe(self._sessions[layer], layer, tensor)

    def _new_session(self, layer: str) -> CalibrationSession:
        session = CalibrationSession(
            [_stream(replace(self._plan, name=layer))],
            on_end=partial(_write, self._record) if self._ranks.is_first else None,
            show_bar=False,
            ranks=self._ranks,
        )
        finalize(self, _warn_if_incomplete, session, os.fspath(self._record))
        return session


def _stream(layer: KvCacheLayerPlan) -> Stream:
    """The output of a layer, which goes to a key/value cache."""
    return Stream(
        layer=layer.name,
        name=OUTPUT,
        settings=layer.activation,
        batch_num=layer.batch_num,
        channel_axis=-1 if layer.per_channel else None,
    )


def _entries(result: CalibrationResult) -> dict[str, KvCacheRecord]:
    return {layer: kv_cache_record(found[OUTPUT]) for layer, found in result.layers.items()}


def _write(record: Path, result: CalibrationResult) -> None:
    for layer, entry in _entries(result).items():
        update(record, layer, entry)
