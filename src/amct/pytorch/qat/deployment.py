"""From a trained model to a quantized one as post-training quantization gives it: same exports, checks and reports.

The trained batch norms are folded, and the integers are those of the trained scales. The tensors between the layers
(for the fast QDQ file) are observed in eval mode, or trained: where they are computed follows from the exporter's own
plan and ``intermediate_tensors.py``; there the model gets quantizers. Saved, the file has their parameters in place of
observed ones, so that it computes what the trained model computes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amct import log
from amct.calibration.session import HIDDEN, INPUT
from amct.calibration.streams import ObservedTensors
from amct.errors import ExportError, TrainingError
from amct.numerics.affine import integer_range
from amct.numerics.arq import from_channels_first
from amct.numerics.qparams import LayerQParams, Observed, QParams, with_means
from amct.numerics.training.quantizers import fold_into_integers
from amct.pipeline.weights import QuantizedWeight, QuantizedWeights
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.capture.functional_layers import child_path, functional_layers, layer_module
from amct.pytorch.capture.layer_types import float_weights, put_weights
from amct.pytorch.folding import fuse, norm_affine
from amct.pytorch.intermediate_tensors import find_tensors
from amct.pytorch.layer_hooks import run_in_context
from amct.pytorch.onnx.float_onnx import TracedOnnx
from amct.pytorch.preparation import TorchPreparation
from amct.pytorch.qat.layers import QuantizedLayer, as_float, quantized_layers
from amct.pytorch.qat.operations import (
    OUTPUT,
    QUANTIZERS,
    OperationQuantizer,
    can_hold,
    input_name,
    instrument_all,
    operation_name,
    operation_quantizers,
    own_quantizer,
    remove_operations,
    share_quantizer,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from amct.model import Graph, Node
    from amct.pipeline.weights import FloatWeight
    from amct.pytorch.inputs import IoOptions
    from amct.pytorch.intermediate_tensors import TensorWatch
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.qat.model import QatState


def check_trained(model: nn.Module) -> None:
    """Check that a model can be deployed.

    Raises:
        TrainingError: A layer has no clips yet, or a parameter is not finite; the message names it.
    """
    for layer in quantized_layers(model).values():
        layer.activation.qparams()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(_values(tensor)).all()):
            raise TrainingError(
                f'"{name}" holds NaN or infinity; a loss or gradient before was not finite. Load the last good '
                "checkpoint, and continue with a lower learning rate or clipped gradients"
            )


def _values(tensor: Tensor) -> Tensor:
    """The values that a tensor holds; of a sparse one without those that are zero by its form."""
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    return tensor if tensor.layout is torch.strided else tensor.values()


def as_float_model(model: nn.Module) -> None:
    """Make every quantized layer of a copied model a float one again, in place."""
    remove_operations(model)
    for layer in quantized_layers(model).values():
        as_float(layer)


def prepare_trained(
    trained: nn.Module, plain: nn.Module, state: QatState, example: Arguments, io: IoOptions
) -> TorchPreparation:
    """The folded model with the trained integers.

    Args:
        trained: The model with its quantizers.
        plain: A copy of it without, in eval mode.
        state: What else the model knows: the plan it was trained with, the trace of the model it was made of.
        example: Arguments with which it can be run.
        io: Names and dynamic axes of the exported models.

    Raises:
        ExportError: A trained layer is not a layer of the model any more.
    """
    given = (*example[0], example[1])
    own, any_batch = state.all_layers, state.any_batch
    traced = cached_trace(plain, given, io=io, all_layers=own, any_batch=any_batch, origin=state.origin)
    layers = quantized_layers(trained)
    lost = [name for name in layers if name not in traced.layers]
    if lost:
        raise ExportError(
            f'layer "{lost[0]}" was trained quantized, but the model does not run it on the example input'
        )
    fused = fuse(traced)
    weights: dict[str, QuantizedWeights] = {}
    for name in traced.layers:
        if name not in layers:
            continue
        norm = fused.fusions.get(name)
        multiplier = None if norm is None else norm_affine(trained.get_submodule(norm)).multiplier
        weights[name] = _trained_weights(
            layers[name], layer_module(fused.model, name), multiplier, can_pack=traced.layers[name].can_pack
        )
    return TorchPreparation.of(traced, fused, state.plan.deployed(), weights, is_trained=True)


def _trained_weights(
    layer: QuantizedLayer, folded: nn.Module, multiplier: Tensor | None, *, can_pack: bool
) -> QuantizedWeights:
    """The weights of one layer on their trained grid; the folded float weights become the same."""
    found = []
    for source, quantizer in zip(float_weights(folded), layer.weight_quantizers, strict=True):
        trained = getattr(layer, source.name)
        integers, scale = quantizer.integers(trained), quantizer.scales(trained).reshape(-1).float()
        if multiplier is not None:
            integers, scale = fold_into_integers(integers, scale, multiplier, quantizer.bits)
        qparams = QParams.symmetric(scale, quantizer.bits)
        exact = _on_grid(source, integers, qparams, folded)
        found.append(QuantizedWeight(source=replace(source, tensor=exact), qparams=qparams, stored=exact))
    return QuantizedWeights(weights=tuple(found), can_pack=can_pack)


def _on_grid(source: FloatWeight, integers: Tensor, qparams: QParams, folded: nn.Module) -> Tensor:
    """The dequantized weight, which replaces the float one.

    Training sees the rounded weight only. The float weight may be far from it: outside of its range, or anywhere in the
    step of a scale that has grown. A file that rounds anew must start from what was trained.
    """
    step = qparams.per_row(integers.shape[0]).scale.reshape(-1, 1)
    exact = from_channels_first(integers * step, source.tensor.shape, source.kind, source.groups)
    put_weights(folded, {source.name: exact})
    return exact


def trained_layers(
    preparation: TorchPreparation, trained: nn.Module, tensors: Mapping[str, Observed] | None
) -> dict[str, LayerQParams]:
    """The parameters of a trained model: weights as prepared, inputs from the trained clips, means as observed.

    The means are for a file that rounds the trained weights again, for its target has fewer bits for them.
    """
    layers = quantized_layers(trained)
    found = {name: _with_clips(qparams, layers[name]) for name, qparams in preparation.weight_qparams().items()}
    return with_means(found, tensors, preparation.observed_channels(preparation.input_tensors()) if tensors else {})


def _with_clips(qparams: LayerQParams, layer: QuantizedLayer) -> LayerQParams:
    found = {name: quantizer.qparams() for name, quantizer in layer.activations.items()}
    return replace(qparams, inputs={0: found[INPUT]}, hidden=found.get(HIDDEN))


def observe_tensors(
    preparation: TorchPreparation, batches: Iterable[Arguments], watch: TensorWatch
) -> Mapping[str, Observed]:
    """Factors of the tensors between the layers, for the fast placement of the QDQ file."""
    model = preparation.quantized_copy()
    observed = ObservedTensors(watch.observers())  # layer inputs have their trained factors
    attached = watch.attach(model, observed)
    run_in_context(model, attached.forward)
    for args, kwargs in log.track(batches, "Observing"):
        model(*args, **kwargs)
    attached.detach()
    del model.forward  # it refers to the model: the copy would be freed late, with its weights
    return observed.tensor_qparams()


# -- tensors between layers --------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

_BITS = 8


@dataclass(frozen=True)
class _Place:
    """Where a tensor between layers is computed: its ONNX name, the module, the quantizer, and the function's name."""

    tensor: str
    module: str
    quantizer: str
    function: str = ""


def _places(preparation: TorchPreparation, watch: TensorWatch) -> Iterator[_Place]:
    functional = functional_layers(preparation.traced.model).sources
    norms = preparation.fused.fusions
    for number, name in watch.inputs.items():
        yield _Place(name, "", input_name(number))
    for (layer, _), name in watch.layers.items():
        # In training a batch norm is not folded: it computes what the folded layer will.
        path = child_path(layer) if layer in functional else layer
        yield _Place(name, norms.get(layer, path), OUTPUT)
    for site, name in watch.operations.items():
        if site.operation >= 0 and _is_one_operation(preparation, site.path):
            yield _Place(name, site.path, OUTPUT)
        else:
            yield _Place(name, site.path, operation_name(site.operation, site.result), site.function)


def _is_one_operation(preparation: TorchPreparation, path: str) -> bool:
    """Whether a module computes one tensor, with other functions beside it in training than in the float model."""
    module = preparation.traced.model.get_submodule(path)
    return path in preparation.traced.layers or isinstance(module, nn.modules.batchnorm._BatchNorm)


def train_placement(
    model: nn.Module, preparation: TorchPreparation, batches: Iterable[Arguments]
) -> dict[str, tuple[float, float]]:
    """Put quantizers behind the tensors that the fast file quantizes, in place; they start from the observed ranges.

    A tensor whose place was not found, or is in a container that would call the quantizer as its own child, is observed
    when the model is saved, as it is without this.

    Returns:
        The clips by the place of the tensor.
    """
    watch = preparation.tensor_watch()
    found = observe_tensors(preparation, batches, watch) if watch is not None else None
    if watch is None or not found:
        logger.info("the tensors between layers are not trained: placement fast is impossible for this model")
        return {}
    left = list(watch.missing)
    for place in _places(preparation, watch):
        module = model.get_submodule(place.module)
        if place.tensor not in found:
            continue
        if not can_hold(module):
            left.append(place.tensor)
            continue
        _add(module, place, found[place.tensor], fixed_min=_is_not_negative(preparation, place.tensor))
    _share(model, preparation)
    instrument_all(model)
    if left:
        logger.info("observed, not trained: %s", ", ".join(left))
    return {quantizer.layer: quantizer.clips for quantizer in operation_quantizers(model)}


def _share(model: nn.Module, preparation: TorchPreparation) -> None:
    """Let all readers of a layer's input read it quantized, where the file has it as integers."""
    onnx = preparation.default_onnx
    assert isinstance(onnx, TracedOnnx)
    plan = preparation.tensor_plan
    assert plan is not None
    layers = quantized_layers(model)
    watch = find_tensors(preparation.traced, preparation.fused.fusions, tuple(plan.shared), onnx.tensors)
    for place in _places(preparation, watch):
        quantizer = layers[plan.shared[place.tensor]].activation
        share_quantizer(model.get_submodule(place.module), place.quantizer, quantizer, place.function)


def _add(module: nn.Module, place: _Place, qparams: Observed, *, fixed_min: bool) -> None:
    low, high = ((limit - qparams.zero_point) * qparams.step for limit in integer_range(qparams.bits))
    before = own_quantizer(module, place.quantizer)
    if before is not None:  # another call of the module
        before.set_clips(min(low, before.clips[0]), max(high, before.clips[1]))
        return
    made = OperationQuantizer(
        f"{place.module}.{place.quantizer}".removeprefix("."), _BITS, clips=(min(low, 0.0), high), fixed_min=fixed_min
    )
    made.function = place.function
    if QUANTIZERS not in module._modules:
        module.add_module(QUANTIZERS, nn.ModuleDict().train(module.training))
    held = module.get_submodule(QUANTIZERS)
    held.add_module(place.quantizer, made.train(module.training))


def _is_not_negative(preparation: TorchPreparation, tensor: str) -> bool:
    """Whether a ReLU makes a tensor: the exporter lets its integers begin at zero."""
    onnx, graph = preparation.default_onnx, preparation.traced.graph
    assert isinstance(onnx, TracedOnnx)
    assert graph is not None
    return any(not_negative(graph, own) for own, name in onnx.tensors.items() if name == tensor)


def tensors_between_layers(
    model: nn.Module, preparation: TorchPreparation, batches: Iterable[Arguments]
) -> Mapping[str, Observed] | None:
    """Factors of the tensors between layers: trained ones where the model trains them, else observed on the batches.

    Where some are trained, the file is made of the record's own factors alone: nothing is balanced or corrected.
    """
    watch = preparation.tensor_watch()
    found = observe_tensors(preparation, batches, watch) if watch is not None else None
    if watch is None or found is None:
        return None
    trained: dict[str, Observed] = {}
    for place in _places(preparation, watch):
        quantizer = own_quantizer(model.get_submodule(place.module), place.quantizer)
        if quantizer is not None:
            own = quantizer.qparams()
            trained[place.tensor] = Observed(scale=own.scale, offset=own.offset, bits=own.bits)
    if not trained:
        return found
    return {**{name: factors for name, factors in found.items() if factors.mean is None}, **trained}


# -- tensors without negative values -----------------------------------------------------------------------------------


_RECTIFIERS = frozenset({"relu", "relu6"})
_KEEP_SIGN = frozenset(
    {
        "AvgPool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
        "adaptive_max_pool2d", "adaptive_max_pool3d", "alpha_dropout", "avg_pool1d", "avg_pool2d", "avg_pool3d", "cat",
        "channel_shuffle", "chunk", "clone", "constant_pad_nd", "contiguous", "dropout", "expand", "feature_dropout",
        "flatten", "identity", "max_pool1d", "max_pool2d", "max_pool3d", "mean", "pad", "permute", "pixel_shuffle",
        "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "transpose", "unflatten",
        "unsqueeze", "upsample_nearest2d", "view",
    }
)  # fmt: skip
"""Operations whose results are not negative where their inputs are not."""


def not_negative(graph: Graph, tensor: str) -> bool:
    """Whether a tensor is made by a ReLU, through operations that keep the sign."""
    known: dict[str, bool] = {}
    pending = [tensor]
    while pending:
        current = pending.pop()
        if current in known:
            continue
        node = graph.producer(current)
        known[current] = node is not None and (_rectifies(node) or node.op in _KEEP_SIGN)
        if not known[current]:
            return False
        if node is not None and not _rectifies(node):
            pending.extend(node.inputs)
    return True


def is_made_by_relu(graph: Graph, tensor: str) -> bool:
    """Whether a ReLU makes a tensor itself."""
    node = graph.producer(tensor)
    return node is not None and node.op == "relu"


def _rectifies(node: Node) -> bool:
    settings: Any = node.attributes.get("settings", ())
    return node.op in _RECTIFIERS or (node.op == "hardtanh" and bool(settings) and settings[0] == 0)
