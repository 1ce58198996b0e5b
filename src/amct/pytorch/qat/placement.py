"""Trains what the fast QDQ file quantizes beside the layer inputs of the record: the tensors between layers.

Where these tensors are computed follows from the exporter's own placement and ``intermediate_tensors.py``; there the
trained model gets quantizers. Saved, the file has their factors in place of observed ones, so that it computes what the
trained model computes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from amct.numerics.affine import integer_range
from amct.numerics.qparams import Observed
from amct.pytorch.capture.functional_layers import child_path, functional_layers
from amct.pytorch.intermediate_tensors import find_tensors
from amct.pytorch.onnx.float_onnx import TracedOnnx
from amct.pytorch.qat.deployment import observe_tensors
from amct.pytorch.qat.layers import quantized_layers
from amct.pytorch.qat.operations import (
    OUTPUT,
    QUANTIZERS,
    OperationQuantizer,
    can_hold,
    input_name,
    instrument,
    operation_name,
    operation_quantizers,
    own_modules,
    own_quantizer,
    share_quantizer,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from amct.model import Graph, Node
    from amct.pytorch.intermediate_tensors import TensorWatch
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.preparation import TorchPreparation

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
    layers = functional_layers(preparation.traced.model)
    functional = frozenset(layers.sources) if layers is not None else frozenset()
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
        elif site.path or site.operation >= 0:  # hooks of the whole model are not seen
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
    left = [*watch.missing, *(name for site, name in watch.operations.items() if not site.path and site.operation < 0)]
    for place in _places(preparation, watch):
        module = model.get_submodule(place.module)
        if place.tensor not in found:
            continue
        if not can_hold(module):
            left.append(place.tensor)
            continue
        _add(module, place, found[place.tensor], fixed_min=_is_not_negative(preparation, place.tensor))
    _share(model, preparation)
    for module in list(own_modules(model)):
        instrument(module)
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
            scale, offset = quantizer.factors()
            trained[place.tensor] = Observed.of(scale, offset, quantizer.bits)
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


def _rectifies(node: Node) -> bool:
    settings: Any = node.attributes.get("settings", ())
    return node.op in _RECTIFIERS or (node.op == "hardtanh" and bool(settings) and settings[0] == 0)
