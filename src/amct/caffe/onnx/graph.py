"""A Caffe net as a float ONNX model that computes the same values.

Nodes have the names of their layers, tensors those of their blobs. Where layers work in place, the last version has the
blob's name and earlier ones are named ``<blob>.<layer>``. Layers that are the identity at inference (Split, Dropout)
have no node. The batch size is dynamic if all inputs share it and every layer supports that.

Losses and Accuracy are not part of a deployed model, and boxes of detectors have no ONNX operator: the file ends before
them, their inputs become its outputs, and a note reports it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from onnx import ModelProto, TensorProto, helper

from amct.arguments import check_file_name
from amct.caffe.engine.layer import TEST
from amct.caffe.engine.layers.combine import Silence
from amct.caffe.engine.layers.input import DummyData, Input, Parameter
from amct.caffe.engine.layers.losses import LossLayer
from amct.caffe.engine.messages import located_in, read_net_message
from amct.caffe.engine.net import Net
from amct.caffe.engine.onnx_place import FollowsBatchError, Place, onnx_form_of
from amct.errors import AmctError, ArgumentError, ExportError, did_you_mean
from amct.export.formats import save_model
from amct.export.onnx.messages import GraphWriter, check_valid, reads
from amct.export.request import check_opset

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amct.atomic import AnyPath
    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.graph import LayerNode
    from amct.caffe.engine.layer import Layer
    from amct.caffe.engine.onnx_place import Dims
    from amct.export.onnx.kept_weights import KeptWeights


logger = logging.getLogger(__name__)

DEFAULT_OPSET = 18
BATCH = "batch"
_ENDS = frozenset(
    {
        "Accuracy", "DetectionEvaluate", "DetectionOutput", "HDF5Output", "SmoothL1Loss", "MultiBoxLoss",
        "YoloDetectionOutput", "Yolov3DetectionOutput",
    }
)  # fmt: skip
"""Layer types, in addition to losses, before which the exported graph ends."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NetOnnx:
    """A float ONNX model and its relation to the net.

    Attributes:
        model: The model.
        nodes: The node names of each layer; empty for an identity.
        bottoms: The tensors that each layer reads, by bottom.
        blobs: The blob whose content each tensor is; tensors inside a layer's form are not listed.
        notes: Notes for the user: where the file ends, which layers behave differently.
        net: The net.
        kept: The large weights to which the model refers; None: they are in its message.
    """

    model: ModelProto
    nodes: Mapping[str, tuple[str, ...]]
    bottoms: Mapping[str, tuple[str, ...]]
    blobs: Mapping[str, str]
    notes: tuple[str, ...]
    net: Net
    kept: KeptWeights | None = None


def float_onnx(
    net: Net,
    *,
    opset: int = DEFAULT_OPSET,
    outputs: Sequence[str] | None = None,
    dynamic_batch: bool = True,
    kept: KeptWeights | None = None,
) -> NetOnnx:
    """Convert a net to ONNX, in memory.

    Args:
        net: A net of the TEST phase with its weights; the shapes are the current ones of its inputs.
        opset: 16 to 21.
        outputs: The output blobs; by default the net's outputs.
        dynamic_batch: Make the batch size dynamic where the net allows it.
        kept: Takes the large weights, which the net and the model then share; None: they are copied.

    Raises:
        ArgumentError: The opset is outside 16..21, an output is not a blob, or the net is of the TRAIN phase.
        ExportError: A layer has no ONNX form; the message names it and a remedy.
    """
    check_opset(opset)
    if net.phase != TEST:
        raise ArgumentError(f'net "{net.name}" was built for the TRAIN phase; build it with phase=TEST to export it')
    shapes = batch_shapes(net) if dynamic_batch else None
    if shapes is not None:
        try:
            return _Export(net, opset, outputs, shapes, kept).run()
        except FollowsBatchError as reason:
            logger.info("the batch size of the ONNX file is fixed: %s", reason)
    return _Export(net, opset, outputs, fixed_shapes(net), kept).run()


def export_onnx(
    prototxt: AnyPath,
    caffemodel: AnyPath,
    path: AnyPath,
    *,
    opset: int = DEFAULT_OPSET,
    outputs: Sequence[str] | None = None,
    custom_proto: AnyPath | None = None,
) -> tuple[str, ...]:
    """Write a Caffe model as a float ONNX file; returns the notes, if there are any.

    Args:
        prototxt: The net; its TEST phase is exported.
        caffemodel: Its weights.
        path: The file to write.
        opset: 16 to 21.
        outputs: The output blobs; by default the net's outputs.
        custom_proto: A ``custom.proto`` with messages of your own layers.

    Raises:
        FileError, ParseError, ModelError: The files cannot be read or are not a net.
        ArgumentError: The opset or the name of the file cannot be used, or an output is not a blob.
        ExportError: A layer has no ONNX form.
    """
    check_file_name(path, "path")
    check_opset(opset)
    parameter = read_net_message(prototxt, custom_proto)
    with located_in(prototxt):
        net = Net(parameter, phase=TEST, with_gradients=False)
    net.load_weights(caffemodel)
    exported = float_onnx(net, opset=opset, outputs=outputs)
    save_model(Path(path), exported.model)
    return exported.notes


@dataclass(eq=False)
class _Export:
    """The conversion of one net."""

    net: Net
    opset: int
    outputs: Sequence[str] | None
    shapes: NetShapes
    kept: KeptWeights | None = None
    inputs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.writer = GraphWriter(self.opset, taken=self.net.graph.blob_names, kept=self.kept)
        self._current: dict[int, str] = {}
        """The tensor that holds the content of a blob (by index) at this point of the net."""
        self._made: dict[str, int] = {}
        """The blob (by index) that a tensor represents."""
        self._dims: dict[str, Dims] = {}
        self._batched: set[str] = set()
        """Tensors whose first axis is the batch."""
        self._nodes: dict[str, tuple[str, ...]] = {}
        self._bottoms: dict[str, tuple[str, ...]] = {}
        self._ends: list[str] = []

    def run(self) -> NetOnnx:
        """Write all layers and assemble the model."""
        for node in self._needed():
            self._write(node)
        names = self._final_names()
        results = self._results(names)
        self.writer.rename(names)
        model = self._model(names, results)
        blobs = {names.get(tensor, tensor): self.net.graph.blob_names[blob] for tensor, blob in self._made.items()}
        bottoms = {
            layer: tuple(names.get(tensor, tensor) for tensor in tensors) for layer, tensors in self._bottoms.items()
        }
        return NetOnnx(
            model=model,
            nodes=dict(self._nodes),
            bottoms=bottoms,
            blobs=blobs,
            notes=(*self.notes, *self.writer.notes),
            net=self.net,
            kept=self.kept,
        )

    # -- layers ----------------------------------------------------------------------------------------------------

    def _needed(self) -> list[LayerNode]:
        """The layers on which the requested outputs depend."""
        graph = self.net.graph
        if self.outputs is None:
            return graph.nodes
        wanted = set()
        for name in self.outputs:
            if name not in graph.blob_names:
                raise ArgumentError(
                    f'outputs: net "{self.net.name}" has no blob "{name}".{did_you_mean(name, graph.blob_names)}'
                )
            wanted.add(graph.blob_names.index(name))
        kept = []
        for node in reversed(graph.nodes):
            if wanted.intersection(node.tops):
                kept.append(node)
                wanted.update(node.bottoms)
        return kept[::-1]

    def _write(self, node: LayerNode) -> None:
        layer = node.layer
        if not node.bottoms and not isinstance(layer, Parameter | DummyData):
            self._add_inputs(node)
        elif isinstance(layer, Silence):
            return
        elif isinstance(layer, LossLayer) or layer.type in _ENDS:
            self._end(node)
        else:
            self._write_form(node)

    def _add_inputs(self, node: LayerNode) -> None:
        for position, index in enumerate(node.tops):
            tensor = self.net.graph.blob_names[index]
            self._make(node, position, tensor)
            self.inputs.append(tensor)
        if not isinstance(node.layer, Input):
            tops = ", ".join(self.net.graph.blob_names[index] for index in node.tops)
            self.notes.append(f'layer "{node.layer.name}" ({node.layer.type}) reads data: {tops} become ONNX inputs')

    def _end(self, node: LayerNode) -> None:
        layer = node.layer
        found = [self._current[index] for index in node.bottoms if index in self._current]
        computed = [tensor for tensor in found if tensor not in self.inputs]
        self._ends += computed
        reason = "is for training" if isinstance(layer, LossLayer) else "ONNX has no operator for"
        self.notes.append(
            f'the file ends before layer "{layer.name}" ({layer.type}), which {reason}; its inputs are outputs'
        )

    def _write_form(self, node: LayerNode) -> None:
        layer = node.layer
        missing = [index for index in node.bottoms if index not in self._current]
        if missing:
            raise ExportError(
                f'layer "{layer.name}" ({layer.type}) reads blob "{self.net.graph.blob_names[missing[0]]}", which is '
                "written by a layer that has no ONNX form; name the blobs to end at in outputs"
            )
        form = onnx_form_of(type(layer))
        if form is None:
            raise ExportError(_no_form(layer))
        tops = [self.writer.tensor(f"{self.net.graph.blob_names[index]}.{layer.name}") for index in node.tops]
        place = Place(
            layer=layer,
            bottoms=[self._current[index] for index in node.bottoms],
            tops=tops,
            bottom_dims=list(self.shapes.bottoms[node.index]),
            top_dims=list(self.shapes.tops[node.index]),
            writer=self.writer,
        )
        self._bottoms[layer.name] = tuple(place.bottoms)
        before = len(self.writer.nodes)
        form(layer, place)
        self._nodes[layer.name] = tuple(one.name for one in self.writer.nodes[before:])
        for position, tensor in enumerate(tops):
            source = place.aliases.get(position, tensor)
            self._current[node.tops[position]] = source
            if source not in self._made and source not in self.writer.initializers:
                self._make(node, position, source)

    def _make(self, node: LayerNode, position: int, tensor: str) -> None:
        blob = node.tops[position]
        self._current[blob] = tensor
        self._made[tensor] = blob
        dims = self.shapes.tops[node.index][position]
        if (node.index, position) in self.shapes.per_sample:
            self._batched.add(tensor)
        self._dims[tensor] = dims

    # -- names and results -----------------------------------------------------------------------------------------

    def _final_names(self) -> dict[str, str]:
        """The blob's name for the last tensor of each blob, if it was written for that blob."""
        names: dict[str, str] = {}
        for blob, tensor in self._current.items():
            if tensor not in self.inputs and self._made.get(tensor) == blob:
                names[tensor] = self.net.graph.blob_names[blob]
        # An input that a layer changes in place keeps its name; the result is named <blob>.<layer>.
        return {tensor: name for tensor, name in names.items() if name not in self.inputs}

    def _results(self, names: Mapping[str, str]) -> dict[str, str]:
        """The tensor of each output, by final name; an output that is the tensor of another blob gets an Identity."""
        graph = self.net.graph
        wanted = (
            list(graph.outputs) if self.outputs is None else [graph.blob_names.index(name) for name in self.outputs]
        )
        found = {graph.blob_names[blob]: self._current[blob] for blob in wanted if blob in self._current}
        for tensor in self._ends:
            if tensor not in found.values():
                found.setdefault(names.get(tensor, tensor), tensor)
        results = {}
        for name, tensor in found.items():
            final = name
            if names.get(tensor, tensor) != name or tensor not in self._made or tensor in self.inputs:
                final = self.writer.tensor(f"{name}.output") if name in (tensor, *self.inputs) else name
                self.writer.node("Identity", f"{final}.identity", [tensor], [final])
            results[final] = tensor
        if not results:
            raise ExportError(f'net "{self.net.name}" has no outputs that ONNX can compute; name some in outputs')
        return results

    def _model(self, names: Mapping[str, str], results: Mapping[str, str]) -> ModelProto:
        writer = self.writer
        read = {name for node in writer.nodes for name in reads(node)}
        produced = {name for node in writer.nodes for name in node.output}
        between = [
            self._declared(names.get(tensor, tensor), tensor)
            for tensor in self._dims
            if names.get(tensor, tensor) in produced and names.get(tensor, tensor) not in results
        ]
        model = writer.model(
            self.net.name or "net",
            [self._declared(name, name) for name in self.inputs if name in read],
            [self._declared(name, tensor) for name, tensor in results.items()],
            [tensor for name, tensor in writer.initializers.items() if name in read],
            between,
        )
        check_valid(model, f'the ONNX model of net "{self.net.name}" is not valid')
        return model

    def _declared(self, name: str, tensor: str) -> onnx.ValueInfoProto:
        """Declare a float tensor; a batch axis is named, other axes that depend on the batch size are left unknown."""
        if tensor not in self._dims:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(self.writer.initializers[tensor].dims))
        shape: list[str | int | None] = list(self._dims[tensor])
        if tensor in self._batched:
            shape[0] = BATCH
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _no_form(layer: Layer) -> str:
    return (
        f'layer "{layer.name}" ({layer.type}): there is no ONNX form of this layer type. End the file before it '
        f"(outputs=[...] names the blobs to end at), or give its class a method to_onnx(self, place)"
    )


@dataclass(frozen=True, kw_only=True)
class NetShapes:
    """The shapes of each layer's bottoms and tops, by layer index; batch-dependent dimensions are None."""

    bottoms: tuple[tuple[Dims, ...], ...]
    tops: tuple[tuple[Dims, ...], ...]
    per_sample: frozenset[tuple[int, int]]
    """Tops, by layer index and position, whose first dimension is the batch size itself, not a multiple of it."""


def fixed_shapes(net: Net) -> NetShapes:
    """The current shapes."""
    bottoms, tops = _walk(net, 0)
    return NetShapes(bottoms=tuple(map(tuple, bottoms)), tops=tuple(map(tuple, tops)), per_sample=frozenset())


def batch_shapes(net: Net) -> NetShapes | None:
    """The shapes with a dynamic batch size; None if it must be fixed."""
    sizes = {shape[0] if shape else None for shape in _input_shapes(net)}
    batch = sizes.pop() if len(sizes) == 1 else None
    if batch is None:
        return None
    try:
        more = _walk(net, 1)
    except (AmctError, ValueError, IndexError, ArithmeticError, RuntimeError):
        return None  # a layer only supports this batch size
    finally:
        now = _walk(net, 0)  # restores the shapes cached in layers
    bottoms, tops = _merged(now[0], more[0]), _merged(now[1], more[1])
    if bottoms is None or tops is None:
        return None
    per_sample = {
        (index, position)
        for index, (ours, theirs) in enumerate(zip(now[1], more[1], strict=True))
        for position, (first, second) in enumerate(zip(ours, theirs, strict=True))
        if first and (first[0], second[0]) == (batch, batch + 1)
    }
    return NetShapes(bottoms=bottoms, tops=tops, per_sample=frozenset(per_sample))


def _input_shapes(net: Net) -> list[Shape]:
    return [
        net.graph.blobs[index].shape
        for node in net.graph.nodes
        if not node.bottoms and not isinstance(node.layer, Parameter | DummyData)
        for index in node.tops
    ]


def _walk(net: Net, extra: int) -> tuple[list[list[Shape]], list[list[Shape]]]:
    """The bottom and top shapes of all layers with ``extra`` more samples in each input."""
    graph = net.graph
    shapes: dict[int, Shape] = {}
    bottoms: list[list[Shape]] = []
    tops: list[list[Shape]] = []
    for node in graph.nodes:
        own = [shapes[index] for index in node.bottoms]
        if node.bottoms or isinstance(node.layer, Parameter | DummyData):
            made = [tuple(shape) for shape in node.layer.reshape(own)]
        else:
            made = [graph.blobs[index].shape for index in node.tops]
            made = [(shape[0] + extra, *shape[1:]) if shape else shape for shape in made]
        shapes.update(zip(node.tops, made, strict=True))
        bottoms.append(own)
        tops.append(made)
    return bottoms, tops


def _merged(now: list[list[Shape]], more: list[list[Shape]]) -> tuple[tuple[Dims, ...], ...] | None:
    merged = []
    for ours, theirs in zip(now, more, strict=True):
        if any(len(first) != len(second) for first, second in zip(ours, theirs, strict=True)):
            return None
        merged.append(tuple(_dims(first, second) for first, second in zip(ours, theirs, strict=True)))
    return tuple(merged)


def _dims(first: Shape, second: Shape) -> Dims:
    return tuple(size if size == other else None for size, other in zip(first, second, strict=True))
