"""AMCT's functions for quantizing a key/value cache: config, and the model to calibrate.

::

    create_quant_cali_config("config.json", model, {"kv_cache_quant_layers": ["attn.k", "attn.v"]})
    model = create_quant_cali_model("config.json", "record.txt", model)     then batch_num forwards

Nothing is exported: the factors in the record are for the program that keeps the cache.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from torch import nn

from amct import atomic, log
from amct.arguments import FILE, check_types, output_file
from amct.atomic import read_bytes
from amct.calibration import RecordFiles, all_ranks
from amct.calibration.layer_records import kv_cache_entries
from amct.config.layers import LayerInfo, LayerList
from amct.config.ptq.kv_cache import LAYERS_ARGUMENT, default_config, expand_config, make_plan, read_config
from amct.errors import ArgumentTypeError, CalibrationError, MissingDefinitionError, MissingFileError
from amct.pytorch.capture.layer_types import type_name
from amct.pytorch.kv_cache.watching import watch_outputs
from amct.pytorch.user_model import refuse_operators, unwrap
from amct.record import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amct.calibration import CalibrationResult
    from amct.config.full_config import FullConfig

logger = logging.getLogger(__name__)

AnyPath = str | os.PathLike[str]
_NONE = type(None)


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
    log.start("amct_pytorch")
    check_types(
        "create_quant_cali_config",
        {
            "config_file": (config_file, FILE),
            "model": (model, (nn.Module,)),
            "quant_layers": (quant_layers, (dict, _NONE)),
            "config_defination": (config_defination, (*FILE, _NONE)),
        },
    )
    path = output_file(config_file, "config_file")
    model = unwrap(model)
    refuse_operators(model)
    config = _config(quant_layers, config_defination, _layers(model))
    for warning in config.warnings:
        logger.warning("%s", warning)
    atomic.write_text(path, config.to_json())
    logger.info("wrote %s", path)


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
    log.start("amct_pytorch")
    check_types(
        "create_quant_cali_model",
        {
            "config_file": (config_file, FILE),
            "record_file": (record_file, FILE),
            "model": (model, (nn.Module,)),
        },
    )
    path = output_file(record_file, "record_file")
    content = read_bytes(config_file)
    model = unwrap(model)
    refuse_operators(model)
    config = read_config(content, os.fspath(config_file), _layers(model))
    for warning in config.warnings:
        logger.warning("%s", warning)
    ranks = all_ranks()
    plan = make_plan(config)
    ranks.need_a_batch_each(min(layer.batch_num for layer in plan.layers))
    files = RecordFiles(path, writes=ranks.is_first)

    def end(result: CalibrationResult) -> None:
        files.complete(Record(kv_cache=kv_cache_entries(result)))
        if ranks.is_first:
            logger.info("wrote %s", path)

    session = watch_outputs(model, plan, record=os.fspath(path), on_progress=files.note, on_end=end, ranks=ranks)
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
        return expand_config(text, os.fspath(config_defination), layers)
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
    return default_config(layers, quant_layers)
