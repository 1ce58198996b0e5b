"""A quantized Caffe net as a QDQ file: the float ONNX form of the folded net, and the parameters of its record.

Placements and targets are those of every QDQ file (``amct.export.qdq``). Convolutions, inner products and local
average poolings are exported as layers; the inputs of all other layers of the record ("data only") as tensors:
placement ``fast`` prefers their parameters to observed ones, placement ``exact`` quantizes each such input.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from amct.caffe.model import FEEDFORWARD_TYPES
from amct.errors import ExportError, RecordError, did_you_mean
from amct.export.formats import ExportedModel, ExportRequest, export
from amct.export.onnx.graph import OnnxGraph
from amct.export.onnx.kept_weights import owner_of
from amct.export.onnx.layer_lookup import LayerBinding
from amct.export.qdq.exporter import plan_tensors
from amct.export.qdq.nodes import QdqNodes
from amct.export.request import ExportOptions, Placement, Target
from amct.model import Skip
from amct.model.kinds import KIND_OF_CAFFE_TYPE, LayerKind
from amct.numerics.observer import TensorRangeObserver
from amct.numerics.qparams import LayerQParams, Observed, QParams

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from amct.caffe.engine.layer import Layer
    from amct.caffe.onnx.graph import NetOnnx
    from amct.config.plan import LayerPlan
    from amct.export.formats import Exported
    from amct.numerics.observer import TensorObserver

logger = logging.getLogger(__name__)

NARROW, WIDE = 8, 16
_TABLE_BITS = 4


def export_net(
    name: str,
    form: NetOnnx,
    layers: Mapping[str, LayerQParams],
    tensors: Mapping[str, Observed] | None = None,
    options: ExportOptions | None = None,
    *,
    keep_weights: bool = False,
) -> Exported:
    """Export a quantized net in a format that works on its float ONNX form.

    Args:
        name: The name of the format.
        form: That of the folded float net of the TEST phase; non-uniform (SNQ) weights must already be quantized.
        layers: The parameters of its layers.
        tensors: Factors of the blobs of ``tensors_to_observe``; None (nothing was observed) means ``exact``.
        options: Those of the QDQ file.
        keep_weights: Whether the exported model may refer to its large weights (``kept_weights.py``).

    Raises:
        RecordError: The record belongs to another model, or a layer lacks the factors of its input.
        ExportError: The factors of a layer do not fit it, or the exporter rejects the model.
    """
    parts, chosen = _SortedQParams.of(form, layers), options or ExportOptions()
    is_qdq = name == "qdq"
    request = ExportRequest(
        model=form.model,
        bindings=parts.bindings,
        qparams=parts.qparams,
        tensors={**tensors, **parts.tensors()} if is_qdq and tensors is not None else tensors,
        options=chosen,
    )
    found = export(name, request, keep_weights=keep_weights)
    if not isinstance(found, ExportedModel):
        return found
    if is_qdq:
        if tensors is None or chosen.placement == Placement.EXACT.value:
            found = _with_data_only(found, form, parts, Target(chosen.target))
        found = replace(
            found,
            skipped=(*found.skipped, *parts.skipped),
            notes=(*form.notes, *found.notes, *parts.notes),
        )
    return replace(found, kept=owner_of(found.model))


def tensors_to_observe(
    form: NetOnnx, layers: Collection[str] | None = None, *, other_bits: Collection[str] = ()
) -> tuple[str, ...]:
    """The blobs between layers whose ranges placement ``fast`` needs, besides the layers' own inputs.

    Args:
        form: The float ONNX form of the folded net; blobs that a later layer changes in place are omitted.
        layers: The layers to quantize; by default all with weights, and local average poolings.
        other_bits: The quantized layers whose activations are not 8-bit.
    """
    bindings = []
    for layer in form.net.layers:
        if layers is None or layer.name in layers:
            bindings += _bindings(form, layer)
    wide = [binding.layer for binding in bindings if binding.layer in other_bits]
    wanted = plan_tensors(form.model, bindings, other_bits=wide).observed
    return tuple(name for name in wanted if form.blobs.get(name) == name)


def _kind(exported: NetOnnx, layer: Layer) -> LayerKind | None:
    """The exporter's kind of a layer; None for data-only layers."""
    kind = KIND_OF_CAFFE_TYPE.get(layer.type)
    if kind is None or kind.is_recurrent:
        return None
    if kind.has_weights:
        return kind
    is_exported = any(node.name == layer.name and node.op_type in kind.operators for node in exported.model.graph.node)
    return kind if is_exported else None


def _bindings(exported: NetOnnx, layer: Layer) -> list[LayerBinding]:
    """One binding per bottom: a convolution of several bottoms has the nodes ``<layer>``, ``<layer>.1`` and so on."""
    kind = _kind(exported, layer)
    if kind is None or layer.name not in exported.nodes:
        return []
    names = [layer.name, *(f"{layer.name}.{index}" for index in range(1, len(exported.bottoms[layer.name])))]
    return [LayerBinding(layer=name, kind=kind, node=name) for name in names]


@dataclass(eq=False)
class _SortedQParams:
    """The quantization parameters of a record, sorted into layers, tensors and skipped layers for the exporter."""

    exported: NetOnnx
    bindings: list[LayerBinding] = field(default_factory=list)
    qparams: dict[str, LayerQParams] = field(default_factory=dict)
    data_only: dict[str, list[tuple[str, Observed]]] = field(default_factory=dict)
    """By layer: the tensors that it reads quantized."""
    skipped: list[Skip] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._layers = {layer.name: layer for layer in self.exported.net.layers}

    @classmethod
    def of(cls, form: NetOnnx, layers: Mapping[str, LayerQParams]) -> _SortedQParams:
        """Combine the float ONNX form of a net with the parameters of its layers."""
        parts = cls(form)
        for name, qparams in layers.items():
            parts.add(name, qparams)
        return parts

    def tensors(self) -> dict[str, Observed]:
        """The parameters of data-only layers by tensor; with several readers, those of the first."""
        found: dict[str, Observed] = {}
        for pairs in self.data_only.values():
            for tensor, qparams in pairs:
                found.setdefault(tensor, qparams)
        return found

    def add(self, name: str, qparams: LayerQParams) -> None:
        """Add one layer of the record."""
        layer = self._layers.get(name)
        if layer is None:
            raise RecordError(
                f'the record has a layer "{name}" that net "{self.exported.net.name}" does not have.'
                f"{did_you_mean(name, self._layers)} Use the record and the fused net of one quantization"
            )
        if name not in self.exported.nodes:
            self.skipped.append(Skip(name, "the ONNX file ends before this layer"))
            return
        bindings = _bindings(self.exported, layer)
        if bindings:
            self._add_layer(layer, bindings, qparams)
        elif qparams.weights:
            self.skipped.append(Skip(name, f"{layer.type} layers stay float in QDQ files"))
        else:
            self._add_data_only(layer, qparams)

    def _add_layer(self, layer: Layer, bindings: list[LayerBinding], qparams: LayerQParams) -> None:
        for index, binding in enumerate(bindings):
            data = qparams.inputs.get(index)
            if data is None:
                raise RecordError(
                    f"Cannot find scale_d of layer '{layer.name}' (input {index}) in record file; "
                    "run the calibration to its end"
                )
            if not qparams.weights and binding.kind.has_weights:
                raise RecordError(f"Cannot find scale_w of layer '{layer.name}' in record file")
            self.bindings.append(binding)
            # The 16 values of non-uniform weights lie on an 8-bit grid.
            weights = [replace(each, bits=NARROW) if each.bits == _TABLE_BITS else each for each in qparams.weights]
            own = replace(data, bits=self._bits(layer.name, data))
            self.qparams[binding.layer] = replace(qparams, inputs={0: own}, weights=tuple(weights), sizes={})

    def _bits(self, layer: str, data: QParams) -> int:
        if data.bits <= NARROW:
            return NARROW
        if data.bits < WIDE:
            self.notes.append(
                f'layer "{layer}": its data of {data.bits} bits is written as 16 bits of the same step, which cuts '
                "off later"
            )
        return WIDE

    def _add_data_only(self, layer: Layer, qparams: LayerQParams) -> None:
        bottoms = self.exported.bottoms[layer.name]
        for index, data in qparams.inputs.items():
            if index >= len(bottoms):
                raise RecordError(
                    f'layer "{layer.name}": the record has factors of input {index}, the layer has {len(bottoms)}'
                )
            if data.bits != NARROW:
                self.skipped.append(Skip(layer.name, f"its data of {data.bits} bits stays float in QDQ files"))
                continue
            own = Observed(scale=data.scale, offset=data.offset, bits=data.bits)
            self.data_only.setdefault(layer.name, []).append((bottoms[index], own))


def _with_data_only(result: ExportedModel, exported: NetOnnx, parts: _SortedQParams, target: Target) -> ExportedModel:
    """Quantize the inputs of data-only layers with the parameters of the record."""
    if not parts.data_only:
        return result
    graph = OnnxGraph(result.model)
    nodes = QdqNodes(graph, target)
    quantized = []
    for layer, pairs in parts.data_only.items():
        readers = [graph.node(name) for name in exported.nodes[layer]]
        for tensor, qparams in pairs:
            for reader in readers:
                for index, name in enumerate(reader.input):
                    if name == tensor and not graph.is_constant(tensor):
                        graph.set_input(reader, index, nodes.activation(tensor, qparams)[1])
                        quantized.append(tensor)
    return replace(result, model=graph.build(), tensors=(*result.tensors, *dict.fromkeys(quantized)))


# -- what amct.caffe.quantize needs beside the record ------------------------------------------------------------------


def types_with_ready_integers(placement: str, target: str) -> tuple[str, ...]:
    """The layer types whose weights in the QDQ file are the integers of the deploy model.

    All others stay float or are rounded again from the float weights, with a scale per output: for every CPU all are,
    so that pairs of them fit 16 bits.
    """
    if target == Target.PORTABLE.value:
        return ()
    others: set[LayerKind] = set()
    if placement != Placement.EXACT.value:
        others = {LayerKind.CONV_TRANSPOSE} | ({LayerKind.LINEAR} if target == Target.VNNI.value else set())
    return tuple(each for each in FEEDFORWARD_TYPES if KIND_OF_CAFFE_TYPE[each] not in others)


def qdq_observers(form: NetOnnx | ExportError, plans: Mapping[str, LayerPlan]) -> dict[str, TensorObserver]:
    """Observers of the blobs that placement ``fast`` quantizes and for which the record has no factors.

    Args:
        form: The ONNX form of the folded float net; an error: it has none.
        plans: The layers that will be quantized.
    """
    wide = [name for name, plan in plans.items() if any(each.num_bits != NARROW for each in plan.activations)]
    try:
        if isinstance(form, ExportError):
            raise form
        wanted = tensors_to_observe(form, plans, other_bits=wide)
    except ExportError as error:
        logger.debug("nothing is observed for the QDQ file: %s", error)
        return {}
    known = {
        blob
        for layer in form.net.layers
        if layer.name in plans and layer.name not in wide
        for blob in layer.parameter.bottom
    }
    return {name: TensorRangeObserver() for name in wanted if name not in known}
