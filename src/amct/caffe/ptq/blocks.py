"""A folded Caffe net in parts that can be run alone, with gradients: its blocks learn as those of every door.

A step is a layer of the net. The inputs of a quantized layer without a weight that could be learned (Eltwise, Concat,
average pooling, recurrent layers) are steps of their own, which only round. Tensors are named by the number of their
blob; the copies that Split layers make are the blob itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import count
from amct.caffe.engine.layers.weighted import BaseConvolution, InnerProduct
from amct.caffe.engine.windows import SPATIAL_AXES
from amct.caffe.model import FEEDFORWARD_TYPES, inputs_by_name
from amct.errors import AmctError
from amct.pipeline.blocks.regions import Constants, Parts, Program, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

    from amct.caffe.engine.graph import LayerNode
    from amct.caffe.engine.layer import Layer
    from amct.caffe.engine.net import Net
    from amct.caffe.model import Batch
    from amct.caffe.ptq.graph import QuantGraph
    from amct.numerics.integer import ConvolutionGeometry
    from amct.pipeline.blocks.regions import LayerCall, Region, Values

_CLOSE = 1e-4
"""By how much of their norm values may differ that are computed in batches of another size."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerStep(Step):
    """A layer of the net, or the rounding of one of its inputs.

    Attributes:
        node: The layer; None: this step only rounds.
    """

    node: LayerNode | None


def parts_of(graph: QuantGraph) -> Parts:
    """The folded net of a graph in parts."""
    program = NetProgram(graph.model.build(), graph.plans())
    exact = rounded = _constants(program.net)
    if any(step.layer in graph.weights and not step.reads_weight for step in program.steps):
        rounded = _constants(graph.with_quantized_weights().build())
    return Parts(program, exact, rounded)


def _constants(net: Net) -> Constants:
    return Constants({layer.name: [blob.tensor for blob in layer.blobs] for layer in net.layers}, {})


class NetProgram(Program):
    """A net in steps.

    Args:
        net: The float net.
        layers: The quantized layers.
    """

    def __init__(self, net: Net, layers: Collection[str]) -> None:
        self.net = net
        graph = net.graph
        same: dict[int, int] = {}
        self.inputs = graph.inputs
        self.steps = []
        for node in graph.nodes:
            if node.layer.type == "Split":
                same |= dict.fromkeys(node.tops, same.get(node.bottoms[0], node.bottoms[0]))
            elif node.layer.type != "Input":
                given = [same.get(index, index) for index in node.bottoms]
                self.steps += self._steps(node, given, is_quantized=node.layer.name in layers)
        self.outputs = [same.get(index, index) for index in graph.outputs]

    def _steps(self, node: LayerNode, given: Sequence[int], *, is_quantized: bool) -> Iterator[LayerStep]:
        layer, quantized = node.layer, node.layer.name if is_quantized else ""
        step = partial(LayerStep, module=layer.name.replace("/", "."))
        if is_quantized and _reads_weight(layer):
            step = partial(step, layer=quantized, reads_weight=True, is_layer=True, node=node)
            for index, (bottom, top) in enumerate(zip(given, node.tops, strict=True)):
                yield step(given=[bottom], made=[top], index=index, size=self._size(top))
            return
        read: list[Hashable] = list(given)
        for index, bottom in enumerate(given if is_quantized else ()):
            read[index] = rounded = (bottom, quantized, index)
            size = self._size(bottom)
            yield step(given=[bottom], made=[rounded], layer=quantized, index=index, size=size, node=None)
        made = self._size(node.tops[0]) if node.tops else None
        yield step(given=read, made=node.tops, size=made, is_layer=is_quantized and bool(layer.blobs), node=node)

    def _size(self, index: int) -> int:
        return count(self.net.graph.blobs[index].shape, 1)

    def given(self, arguments: Batch) -> Values:
        """The inputs by the numbers of their blobs."""
        names = [self.net.graph.blob_names[index] for index in self.inputs]
        arrays = inputs_by_name(names, arguments)
        return {index: torch.from_numpy(arrays[name]) for index, name in zip(self.inputs, names, strict=True)}

    def run(
        self, region: Region, constants: Constants, given: Values, call: LayerCall | None = None
    ) -> list[torch.Tensor]:
        """What a region computes of its inputs."""
        values = dict(given)
        for step in region.steps:
            read = [values[key] for key in step.given]
            values |= dict(zip(step.made, self._run(step, constants, read, call), strict=True))
        return [values[key] for key in region.outputs]

    def _run(
        self, step: LayerStep, constants: Constants, read: list[torch.Tensor], call: LayerCall | None
    ) -> Sequence[torch.Tensor]:
        node = step.node
        if node is None:
            return read if call is None else [call(step, _identity, read[0])]
        parameters = constants.values[node.layer.name]
        if not step.reads_weight:
            return self.net.compute(node, read, parameters)
        operation = self._operation(node, parameters)
        return [operation(read[0]) if call is None else call(step, operation, read[0])]

    def _operation(self, node: LayerNode, parameters: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor]:
        def operation(
            x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            own = parameters if weight is None else [weight] if bias is None else [weight, bias]
            return self.net.compute(node, [x], own)[0]

        return operation

    def geometry(self, step: LayerStep) -> tuple[bool, ConvolutionGeometry | None]:
        """That of a convolution of images; none for a product of the flattened samples."""
        layer = None if step.node is None or not step.reads_weight else step.node.layer
        if isinstance(layer, InnerProduct):
            return layer.axis == 1, None
        if isinstance(layer, BaseConvolution) and layer.axis == 1 and layer.spatial_axes == SPATIAL_AXES:
            return True, layer.geometry()
        return False, None

    def is_by_sample(self, region: Region, constants: Constants, given: Values) -> bool:
        """Whether samples do not depend on each other, nor on their number: tried with all of them twice."""
        if not all(tensor.dim() for tensor in given.values()):
            return False
        twice = {key: torch.cat([tensor, tensor.flip(0)]) for key, tensor in given.items()}
        try:
            with torch.no_grad():
                once, found = (self.run(region, constants, values) for values in (given, twice))
                pairs = [(torch.cat([one, one.flip(0)]), both) for one, both in zip(once, found, strict=True)]
        except (AmctError, RuntimeError):  # a layer wants the number of samples that it was made for
            return False
        return all(
            one.shape == both.shape and float((one - both).norm()) <= _CLOSE * float(one.norm()) for one, both in pairs
        )


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def _reads_weight(layer: Layer) -> bool:
    return layer.type in FEEDFORWARD_TYPES and not layer.parameter.inner_product_param.transpose
