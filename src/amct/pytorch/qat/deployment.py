"""From a trained model to a quantized one as post-training quantization gives it: same exports, checks and reports.

The trained batch norms are folded, the integers are those of the trained scales, and the tensors between the layers
(for the fast placement of the QDQ file) are observed in eval mode.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from amct import progress
from amct.calibration.streams import ObservedTensors
from amct.errors import ExportError, TrainingError
from amct.numerics.arq import from_channels_first
from amct.numerics.fold import ChannelAffine
from amct.numerics.qparams import QParams
from amct.numerics.training.quantizers import fold_into_integers
from amct.pipeline.weights import LayerWeights
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.capture.functional_layers import layer_module
from amct.pytorch.capture.layer_types import put_weights, weight_parts
from amct.pytorch.folding import fuse
from amct.pytorch.preparation import TorchPreparation
from amct.pytorch.qat.layers import QuantizedLayer, as_float, quantized_layers
from amct.pytorch.qat.operations import remove_operations
from amct.pytorch.qat.quantizers import ActivationQuantizer
from amct.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from amct.config.plan import RetrainPlan
    from amct.numerics.qparams import Observed
    from amct.pipeline.weights import WeightPart
    from amct.pytorch.inputs import IoOptions
    from amct.pytorch.intermediate_tensors import TensorWatch
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.qat.quantizers import WeightQuantizer
    from amct.record import LayerRecord


def check_trained(model: nn.Module) -> None:
    """Check that a model can be deployed.

    Raises:
        TrainingError: A layer has no clips yet, or a parameter is not finite; the message names it.
    """
    for layer in quantized_layers(model).values():
        layer.activation.factors()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise TrainingError(
                f'"{name}" holds NaN or infinity; a loss or gradient before was not finite. Load the last good '
                "checkpoint, and continue with a lower learning rate or clipped gradients"
            )


def as_float_model(model: nn.Module) -> None:
    """Make every quantized layer of a copied model a float one again, in place."""
    remove_operations(model)
    for layer in quantized_layers(model).values():
        as_float(layer)


def prepare_trained(
    trained: nn.Module, plain: nn.Module, plan: RetrainPlan, example: Arguments, io: IoOptions, *, all_layers: bool
) -> TorchPreparation:
    """The folded model with the trained integers.

    Args:
        trained: The model with its quantizers.
        plain: A copy of it without, in eval mode.
        plan: The plan it was trained with.
        example: Arguments with which it can be run.
        io: Names and dynamic axes of the exported models.
        all_layers: Whether functional calls and modules called several times can be layers.

    Raises:
        ExportError: A trained layer is not a layer of the model any more.
    """
    traced = cached_trace(plain, (*example[0], example[1]), io=io, all_layers=all_layers)
    layers = quantized_layers(trained)
    lost = [name for name in layers if name not in traced.layers]
    if lost:
        raise ExportError(
            f'layer "{lost[0]}" was trained quantized, but the model does not run it on the example input'
        )
    fused = fuse(traced)
    weights: dict[str, LayerWeights] = {}
    for name in traced.layers:
        if name not in layers:
            continue
        norm = fused.fusions.get(name)
        multiplier = None if norm is None else _multiplier(trained.get_submodule(norm))
        weights[name] = _trained_weights(
            layers[name], layer_module(fused.model, name), multiplier, can_pack=traced.layers[name].can_pack
        )
    return TorchPreparation(
        name=type(traced.model).__name__,
        plan=plan.deployed(),
        weights=weights,
        quantizable=tuple(traced.layers),
        unquantizable=traced.skips,
        folded_layers={layer: (norm,) for layer, norm in fused.fusions.items()},
        unfolded=fused.skips,
        traced=traced,
        fused=fused,
    )


def _multiplier(norm: nn.Module) -> Tensor:
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return ChannelAffine.batch_norm(norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias).multiplier


def _trained_weights(
    layer: QuantizedLayer, folded: nn.Module, multiplier: Tensor | None, *, can_pack: bool
) -> LayerWeights:
    """The weights of one layer on their trained grid; the folded float weights become the same."""
    quantizers: Mapping[str, WeightQuantizer] = {
        "weight": layer.weight_quantizer,
        "weight_ih_l0": layer.weight_quantizer,
        "weight_hh_l0": layer._modules.get("state_weight_quantizer"),  # type: ignore[dict-item]
    }
    rounded: dict[str, Tensor] = {}
    factors: dict[str, QParams] = {}
    for part in weight_parts(folded):
        quantizer = quantizers[part.name]
        trained = getattr(layer, part.name)
        integers, scale = quantizer.integers(trained), quantizer.scales(trained).reshape(-1).float()
        if multiplier is not None:
            integers, scale = fold_into_integers(integers, scale, multiplier, quantizer.bits)
        factors[part.name] = QParams.symmetric(scale, quantizer.bits)
        rounded[part.name] = _on_grid(part, integers, factors[part.name], folded)
    return LayerWeights(
        parts=weight_parts(folded),
        rounded=rounded,
        factors=factors,
        bits=layer.weight_quantizer.bits,
        can_pack=can_pack,
    )


def _on_grid(part: WeightPart, integers: Tensor, factors: QParams, folded: nn.Module) -> Tensor:
    """The dequantized weight, which replaces the float one.

    Training sees the rounded weight only. The float weight may be far from it: outside of its range, or anywhere in the
    step of a scale that has grown. A file that rounds anew must start from what was trained.
    """
    step = factors.scale.repeat_interleave(integers.shape[0] // factors.scale.numel())[:, None]
    exact = from_channels_first(integers * step, part.tensor.shape, part.kind, part.groups)
    put_weights(folded, {part.name: exact})
    return exact


def trained_record(preparation: TorchPreparation, trained: nn.Module) -> Record:
    """The record of a trained model: weights as prepared, activations from the trained clips."""
    layers = quantized_layers(trained)
    return Record({name: _entry(entry, layers[name]) for name, entry in preparation.record().items()})


def _entry(entry: LayerRecord, layer: QuantizedLayer) -> LayerRecord:
    scale, offset = layer.activation.factors()
    entry = replace(entry, scale_d=scale, offset_d=offset, act_type=f"INT{layer.activation.bits}")
    state = layer._modules.get("state_quantizer")
    if isinstance(state, ActivationQuantizer):
        scale, offset = state.factors()
        entry = replace(entry, scale_h=scale, offset_h=offset)
    return entry.for_retraining()


def observe_tensors(
    preparation: TorchPreparation, batches: Iterable[Arguments], watch: TensorWatch
) -> Mapping[str, Observed]:
    """Factors of the tensors between the layers, for the fast placement of the QDQ file."""
    model = preparation.quantized_copy()
    observed = ObservedTensors(watch.observers())  # layer inputs have their trained factors
    attached = watch.attach(model, observed)
    with torch.no_grad():
        for args, kwargs in progress.track(batches, "Observing"):
            with attached.forward((args, kwargs)):
                model(*args, **kwargs)
    attached.detach()
    return observed.tensor_factors()
