"""The QDQ file: standard QuantizeLinear/DequantizeLinear, which onnxruntime (and others) replace by integer kernels.

Placement ``exact`` quantizes the layer inputs and weights of the record. ``fast`` (default) also quantizes the tensors
between layers (``placement.py``) and needs their parameters. ``auto`` times both and float for each part of the model
(``auto.py``). The target selects the integer types (``nodes.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onnx import TensorProto

from amct.errors import ExportError
from amct.export.formats import ExportedModel, write_metadata
from amct.export.onnx.kept_weights import KeptWeights
from amct.export.onnx.layer import layer_report, share_weights
from amct.export.onnx.layer_lookup import find_layers
from amct.export.onnx.rewrites import raise_opset
from amct.export.qdq.auto import fastest_placement
from amct.export.qdq.nodes import SIXTEEN_BIT_OPSET, QdqNodes
from amct.export.qdq.placement import FastPlacement, FastPlanner, InputToQuantize, ParameterSource, has_integer_kernel
from amct.export.qdq.rewrites import (
    balance_inputs,
    fold_balance,
    folded_balance,
    keep_sums_apart,
    means_to_pooling,
    merge_pads,
)
from amct.export.qdq.tensor_values import imprecise_sums, tensors_kept_float
from amct.export.request import Placement, Target, choice
from amct.model import Skip

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from onnx import ModelProto, NodeProto

    from amct.export.formats import LayerReport
    from amct.export.onnx.graph import OnnxGraph
    from amct.export.onnx.layer import OnnxLayer
    from amct.export.onnx.layer_lookup import LayerBinding
    from amct.numerics.qparams import LayerQParams, Observed, QParams

OLDEST_OPSET = 13


def qdq_model(  # noqa: PLR0913  placement, target and float_tensors are the options of a user
    model: ModelProto,
    bindings: Sequence[LayerBinding],
    qparams: Mapping[str, LayerQParams],
    *,
    tensors: Mapping[str, Observed] | None = None,
    placement: Placement | str = Placement.FAST,
    target: Target | str = Target.PORTABLE,
    float_tensors: Collection[str] = (),
    kept: KeptWeights | None = None,
) -> ExportedModel:
    """Convert a float ONNX model to its QDQ form.

    Args:
        model: float model, BatchNorm folded, opset 13 or later; it is not changed.
        bindings: the node of each layer.
        qparams: by layer name; a bound layer without parameters stays float.
        tensors: parameters of the tensors between layers, by ONNX name; None (nothing was observed) means ``exact``.
        placement: the tensors to quantize.
        target: the integer types.
        float_tensors: tensors between layers that placement ``fast`` leaves float, by ONNX name; layers still read them
            quantized where the record says so.
        kept: takes the large weights of the result, which then refers to them; None: they are in its message.

    Raises:
        ExportError: a node does not match its binding, or its opset is too old.
        ArgumentError: the placement or target is unknown.
    """
    placement = choice(Placement, placement, "placement")
    graph, layers, skipped = find_layers(model, bindings, qparams, kept)
    if graph.opset < OLDEST_OPSET:
        raise ExportError(
            f"QDQ needs opset {OLDEST_OPSET} (DequantizeLinear per channel), the model has {graph.opset}; "
            "export it with a newer one"
        )
    if not layers:  # the tensors of a float model stay float
        placement = Placement.EXACT
    nodes = QdqNodes(graph, choice(Target, target, "target"))
    can_be_fast = tensors is not None and all(layer.is_wide_float for layer in layers)
    if placement is Placement.AUTO and can_be_fast:

        def export(left_float: frozenset[str], float_layers: frozenset[str]) -> ExportedModel:
            quantized = {name: each for name, each in qparams.items() if name not in float_layers}
            left_float = left_float.union(float_tensors)
            own = None if kept is None else KeptWeights()
            return qdq_model(
                model, bindings, quantized, tensors=tensors, target=target, float_tensors=left_float, kept=own
            )

        return fastest_placement(graph, layers, model, export)
    placed = FastPlacement()
    if placement is not Placement.EXACT:
        if tensors is not None and can_be_fast:
            layers, placed, left_float = _place_fast(nodes, layers, tensors, float_tensors)
            skipped += left_float
        else:
            nodes.notes.append(_why_exact(tensors, placement))
    reports, not_quantized = _quantize_layers(nodes, layers, placed)
    skipped += not_quantized
    rescaled = tuple(layer.name for layer in layers if layer.rescaled)
    share_weights(graph, layers)
    exported = graph.build()
    if nodes.has_four_bits:
        raise_opset(exported, SIXTEEN_BIT_OPSET)
    write_metadata(exported, rescaled=rescaled)
    return ExportedModel(
        model=exported,
        layers=tuple(reports),
        skipped=(*skipped, *placed.skipped),
        notes=tuple(nodes.notes),
        tensors=(*placed.quantized_for_readers, *placed.integer_tensors),
        rescaled=rescaled,
        kept=kept,
    )


def _quantize_layers(
    nodes: QdqNodes, layers: Sequence[OnnxLayer], placed: FastPlacement
) -> tuple[list[LayerReport], list[Skip]]:
    """Quantize inputs and weights of the layers; returns what was done, and what stays float inside of them."""
    graph = nodes.graph
    reports: list[LayerReport] = []
    skipped: list[Skip] = []
    for layer, shared, scale in _with_shared_quantizers(nodes, layers, placed):
        before, output = len(graph.nodes), layer.output
        skipped += _quantize_inputs(nodes, layer, covered=layer.name in placed.covered_layers)
        nodes.weights(layer, scale)
        if not layer.is_wide_float and not layer.kind.is_recurrent:
            _narrow_output(graph, layer)
        report = layer_report(layer, [*shared, *(node.name for node in graph.nodes[before:])], output)
        reports.append(replace(report, weight_bits=nodes.weight_bits(layer) if layer.kind.has_weights else None))
    return reports, skipped


def _place_fast(
    nodes: QdqNodes, layers: Sequence[OnnxLayer], tensors: Mapping[str, Observed], float_tensors: Collection[str]
) -> tuple[list[OnnxLayer], FastPlacement, list[Skip]]:
    """Plan placement ``fast``; returns the layers that are quantized, the placement, and the layers left float."""
    graph = nodes.graph
    nodes.fast = True
    means_to_pooling(graph)
    merge_pads(graph, layers, _inputs(layers))
    kept_float = [layer for layer in layers if not has_integer_kernel(layer)]
    skipped = _left_float(kept_float)
    layers = fold_balance(graph, [layer for layer in layers if has_integer_kernel(layer)])

    def observed(tensor: str) -> ParameterSource | None:
        found = tensors.get(tensor)
        return None if found is None or found.bits != 8 or found.mean is not None else ParameterSource(qparams=found)

    every = [*layers, *kept_float]
    left_float = tensors_kept_float(graph, tensors, float_tensors)
    placed = FastPlanner(graph, every, _inputs(every), observed, left_float).run()
    keep_sums_apart(graph)
    if nodes.target is not Target.EXACT8:  # EXACT8 has the record's own integers
        layers = balance_inputs(layers, placed, tensors)
        layers = fold_balance(graph, layers)
    return layers, placed, skipped


def _inputs(layers: Sequence[OnnxLayer]) -> dict[str, InputToQuantize]:
    """How the layers read their inputs, after calibration."""
    return {
        layer.name: InputToQuantize(
            source=ParameterSource(qparams=layer.qparams.input),
            bits=layer.qparams.input.bits,
            is_balanced=layer.qparams.balance is not None,
        )
        for layer in layers
    }


@dataclass(frozen=True)
class TensorPlan:
    """What placement ``fast`` quantizes beside what layers read, by ONNX name: made on the float graph.

    Attributes:
        observed: Tensors that are observed during calibration.
        shared: Tensors with the parameters of a layer's input that others read too, with that layer.
    """

    observed: tuple[str, ...]
    shared: Mapping[str, str]


def plan_tensors(
    model: ModelProto,
    bindings: Sequence[LayerBinding],
    *,
    balanced: Collection[str] = (),
    other_bits: Collection[str] = (),
) -> TensorPlan:
    """Plan which tensors placement ``fast`` will quantize beside what layers read.

    Args:
        model: the float model that will be exported.
        bindings: the node of each layer.
        balanced: layers with DMQ factors, for which the record only has the parameters of the balanced input.
        other_bits: layers whose activations are not 8-bit.

    Raises:
        ExportError: a node does not match its binding.
    """
    graph, layers, _ = find_layers(model, bindings)
    with_balance = {layer.name for layer in layers if layer.layer in balanced}
    inputs = {
        layer.name: InputToQuantize(
            source=ParameterSource(layer=layer.layer),
            bits=16 if layer.layer in other_bits else 8,
            is_balanced=layer.name in with_balance,
        )
        for layer in layers
    }
    means_to_pooling(graph)
    merge_pads(graph, layers, inputs)
    quantized = [layer for layer in layers if has_integer_kernel(layer)]
    for name in folded_balance(graph, quantized, with_balance):
        inputs[name] = replace(inputs[name], is_balanced=False)
    layers = [*quantized, *(layer for layer in layers if not has_integer_kernel(layer))]
    planner = FastPlanner(graph, layers, inputs, lambda tensor: ParameterSource(tensor=tensor), imprecise_sums(graph))
    placed = planner.run()
    sources = (*placed.quantized_for_readers.values(), *placed.integer_tensors.values())
    shared = {
        tensor: source.layer
        for tensor, source in placed.integer_tensors.items()
        if source.layer is not None and graph.only_consumer(tensor) is None
    }
    return TensorPlan(tuple(dict.fromkeys(each.tensor for each in sources if each.tensor is not None)), shared)


def _left_float(layers: Sequence[OnnxLayer]) -> list[Skip]:
    """The layers that placement ``fast`` leaves float, with the reason."""
    return [
        Skip(
            layer.name,
            f"onnxruntime has no integer kernel for {layer.node.op_type}: in the QDQ file of placement "
            f'"{Placement.FAST.value}" it stays float, "{Placement.EXACT.value}" quantizes it',
        )
        for layer in layers
    ]


def _why_exact(tensors: Mapping[str, Observed] | None, placement: Placement) -> str:
    reason = "the model is not float32 throughout"
    if tensors is None:
        reason = "no factors of the tensors between layers were given"
    return f'{reason}: placement "exact" instead of "{placement.value}"'


def _with_shared_quantizers(
    nodes: QdqNodes, layers: Sequence[OnnxLayer], placed: FastPlacement
) -> list[tuple[OnnxLayer, list[str], float]]:
    """Write the quantizers of placement ``fast``; returns each layer with its new quantizers and its scale_d.

    A layer needs the quantizers of its input and of its output (behind its activation); shared ones are listed once.
    """
    needed = {}
    for layer in layers:
        result = layer.node.output[0]
        user = nodes.graph.only_consumer(result)
        tensors = [layer.reader.input[0], result, *(user.output if user is not None else ())]
        shared = placed.source(tensors[0]) if layer.name in placed.covered_layers else None
        needed[layer.name] = (tensors, (layer.qparams.input if shared is None else shared.known).step)
    inserted = _apply(nodes, placed)
    return [
        (layer, [name for tensor in needed[layer.name][0] for name in inserted.pop(tensor, ())], needed[layer.name][1])
        for layer in layers
    ]


def _apply(nodes: QdqNodes, placed: FastPlacement) -> dict[str, list[str]]:
    """Write the quantizers of placement ``fast``; returns the names of the nodes by tensor."""
    graph = nodes.graph
    integers: dict[str, str] = {}
    inserted: dict[str, list[str]] = {}
    sources = {tensor: pad.input[0] for tensor, pad in placed.pads.items()}
    order = [
        *placed.quantized_for_readers,
        *(tensor for tensor in placed.integer_tensors if tensor not in placed.pads),
        *placed.pads,
    ]
    for tensor in order:
        before = len(graph.nodes)
        if tensor in placed.quantized_for_readers:
            integers[tensor], result = nodes.activation(tensor, placed.quantized_for_readers[tensor].known)
            _redirect(graph, placed.readers[tensor], tensor, result)
        elif tensor in placed.pads:
            source = integers[sources[tensor]]
            integers[tensor] = nodes.padded(placed.pads[tensor], source, placed.integer_tensors[tensor].known)
        else:
            integers[tensor] = nodes.behind(tensor, placed.integer_tensors[tensor].known)
        inserted[tensor] = [node.name for node in graph.nodes[before:]]
    for node, index in placed.constants:
        nodes.constant(node, index)
    return inserted


def _redirect(graph: OnnxGraph, readers: Sequence[NodeProto], tensor: str, result: str) -> None:
    for reader in readers:
        for index, name in enumerate(reader.input):
            if name == tensor:
                graph.set_input(reader, index, result)


def _quantize_inputs(nodes: QdqNodes, layer: OnnxLayer, *, covered: bool) -> list[Skip]:
    """Quantize a layer's inputs except its weights, unless the placement did; returns those that were skipped."""
    qparams = layer.qparams
    if qparams.input.bits == 16 and nodes.graph.opset < SIXTEEN_BIT_OPSET:
        return [
            Skip(
                layer.name,
                f"16-bit activations need opset {SIXTEEN_BIT_OPSET}, the model has {nodes.graph.opset}: in the QDQ "
                "file its input stays float, its weights are integer",
            )
        ]
    if not covered:
        tensor = _quantized_for(nodes, layer, layer.reader.input[0], qparams.input, layer.name)
        nodes.graph.set_input(layer.reader, 0, tensor)
    if layer.kind.is_recurrent and len(layer.node.input) > 5 and layer.node.input[5]:
        assert qparams.hidden is not None
        state = _quantized_for(nodes, layer, layer.node.input[5], qparams.hidden, f"{layer.name}.state")
        nodes.graph.set_input(layer.node, 5, state)
    return []


def _quantized_for(nodes: QdqNodes, layer: OnnxLayer, tensor: str, qparams: QParams, name: str) -> str:
    """Quantize a tensor for one layer: balanced first, and in float32 for any data type of the model."""
    graph = nodes.graph
    is_input = name == layer.name
    if not layer.is_wide_float:
        tensor = graph.add_node("Cast", f"{name}.widen", [tensor], to=TensorProto.FLOAT)
    if is_input and layer.qparams.balance is not None:
        tensor = nodes.balanced(layer, tensor)
    _, result = nodes.activation(tensor, qparams, None if layer.is_wide_float else name)
    if layer.kind.is_recurrent and not layer.is_wide_float:
        return graph.add_node("Cast", f"{name}.narrow", [result], to=layer.element_type)
    return result


def _narrow_output(graph: OnnxGraph, layer: OnnxLayer) -> None:
    """Cast the output of a layer that reads float32 back to the data type of the model."""
    name = f"{layer.name}.narrow"
    read, write = graph.tap((layer.bias_node or layer.node).output[0], f"{name}.output0")
    for tensor in (layer.node.output[0], read):
        graph.forget_type(tensor)
    graph.add_node("Cast", name, [read], [write], to=layer.element_type)
