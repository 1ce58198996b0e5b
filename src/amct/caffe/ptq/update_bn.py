"""Updates BatchNorm statistics after weight clustering, and folds them without changing the clusters."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.caffe.engine.layers.batch_norm import dump_path
from amct.caffe.engine.weights import read_file
from amct.caffe.engine.wire import read_weights
from amct.caffe.ptq.quantized_weights import fold_quantized
from amct.errors import CalibrationError, FileError

if TYPE_CHECKING:
    from amct.caffe.model import CaffeModel
    from amct.caffe.ptq.graph import QuantGraph
    from amct.numerics.settings import BatchNormUpdate

logger = logging.getLogger(__name__)


def prepare(model: CaffeModel, settings: BatchNormUpdate) -> None:
    """Make every BatchNorm of the modified model update its statistics; remove the files of an earlier run."""
    folder = str(Path(settings.bn_dump_dir).resolve())
    for layer in model.net.layer:
        if layer.type != "BatchNorm":
            continue
        options = layer.batch_norm_param
        options.use_global_stats = False
        if not options.HasField("moving_average_fraction"):
            options.moving_average_fraction = settings.bn_moving_average_fraction
        options.update_iterations = settings.bn_update_iterations
        options.dump_dir = folder
        dump_path(folder, layer.name).unlink(missing_ok=True)


def fold_updated_statistics(graph: QuantGraph) -> None:
    """Read the updated statistics into the graph's model and fold them.

    Raises:
        CalibrationError: a BatchNorm was not updated; the message gives the number of forwards needed.
    """
    settings = graph.plan.update_bn
    assert settings is not None
    model = graph.model
    for layer in model.net.layer:
        if layer.type == "BatchNorm":
            model.weights[layer.name] = _read_dump(layer.name, settings)
            layer.batch_norm_param.use_global_stats = True
    if graph.plan.do_fusion:
        graph.fusion = fold_quantized(model, graph.weights, skip=graph.plan.skip_fusion_layers)


def _read_dump(name: str, settings: BatchNormUpdate) -> list[torch.Tensor]:
    path = dump_path(settings.bn_dump_dir, name)
    try:
        layers = read_weights(read_file(path), str(path))
    except FileError as error:
        raise CalibrationError(
            f'layer "{name}" (BatchNorm): no updated statistics in "{settings.bn_dump_dir}"; run the modified model '
            f"of weights_quantize_model for {settings.bn_update_iterations} batches (bn_update_iterations) before "
            "activation_quantize_model"
        ) from error
    if len(layers) != 1 or layers[0].name != name:
        raise CalibrationError(f'{path}: not the statistics of layer "{name}"')
    return [torch.from_numpy(np.array(blob.values, np.float32)).reshape(blob.shape) for blob in layers[0].blobs]
