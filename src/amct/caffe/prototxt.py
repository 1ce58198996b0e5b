"""A prototxt as quantization reads it, without weights and without torch: the layers of the TEST phase, none in place.

Every layer then writes its own blob, so that each step can be observed and changed. The last layer that writes a blob
keeps the blob's name, so that after a forward the blob has the same values as before; earlier contents are called
``<layer>_out``. The inputs of a net always keep their names: scripts fill them by name.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from amct.arguments import FILE, amct_function, output_file
from amct.atomic import write_text
from amct.caffe.engine.graph import filter_net
from amct.caffe.engine.messages import read_net_message
from amct.caffe.engine.upgrade import upgrade_net
from amct.config.layers import CAFFE_TYPES, LayerInfo, LayerList
from amct.errors import AmctError, ModelError
from amct.schema import format_text

if TYPE_CHECKING:
    from collections.abc import Collection

    from amct.atomic import AnyPath
    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.proto_merge import CustomSchema


_IN_PLACE = (
    "ReLU", "PReLU", "ELU", "Sigmoid", "TanH", "Clip", "ReLU6", "Dropout", "BatchNorm", "BN", "Scale", "Bias"
)  # fmt: skip


_FILES = (
    "config_file", "model_file", "weights_file", "scale_offset_record_file", "modified_model_file",
    "modified_weights_file", "uninplaced_model_file", "retrained_model_file", "retrained_weights_file", "save_path",
    "custom_proto", "config_defination",
)  # fmt: skip
caffe_function = amct_function(
    "amct_caffe",
    {
        **dict.fromkeys(_FILES, FILE),
        "batch_num": (int,),
        "activation_offset": (bool,),
        "skip_layers": (list, tuple),
        "save_type": (str,),
    },
)
"""Decorates AMCT's functions; an argument of one name has the same types in all of them."""


@caffe_function
def uninplace_model(
    model_file: AnyPath,
    uninplaced_model_file: AnyPath,
    custom_proto: AnyPath | None = None,
) -> None:
    """Write a prototxt without in-place layers; layers of other phases than TEST are removed.

    Args:
        model_file: The prototxt.
        uninplaced_model_file: The file to write; an existing file is overwritten.
        custom_proto: A ``custom.proto`` with messages of your own layers (not in AMCT).

    Raises:
        ArgumentTypeError: an argument is not a path.
        FileError: a file cannot be read or written.
        ParseError, ModelError: the file is not a prototxt, or not a valid net.
    """
    from amct.caffe.model import read_net

    target = output_file(uninplaced_model_file, "uninplaced_model_file")
    write_text(target, format_text(read_net(model_file, custom_proto)))


def remove_in_place(net: ProtoMessage) -> ProtoMessage:
    """Rename blobs so that each blob is written by one layer only; changes the net and returns it."""
    writers = Counter(blob for layer in net.layer for blob in layer.top)
    taken = {blob for layer in net.layer for blob in (*layer.bottom, *layer.top)}
    left = Counter(writers)
    sources = {blob for layer in net.layer if not layer.bottom for blob in layer.top}
    current: dict[str, str] = {}
    for layer in net.layer:
        for position, blob in enumerate(layer.bottom):
            layer.bottom[position] = current.get(blob, blob)
        for position, blob in enumerate(list(layer.top)):
            left[blob] -= 1
            keeps_name = not layer.bottom if blob in sources else left[blob] == 0
            if not keeps_name:
                suffix = f"_out{position}" if len(layer.top) > 1 else "_out"
                current[blob] = free_name(layer.name + suffix, taken)
            else:
                current[blob] = blob
            layer.top[position] = current[blob]
    return net


def warn_of_shared_memory(net: ProtoMessage) -> None:
    """Warn of a reader that in Caffe gets what a layer in place wrote through another blob of the same memory.

    Without layers in place it gets the blob as it was; the engine refuses to run the net as it stands.
    """
    from amct.caffe.engine.graph import insert_splits  # imports torch

    readers = {layer.name: layer for layer in net.layer}
    memory: dict[str, str] = {}
    changed: dict[str, str] = {}
    for layer in insert_splits(type(net).FromString(net.SerializeToString())).layer:
        for index, blob in enumerate(layer.bottom):
            if blob in changed and layer.name in readers:
                logger.warning(
                    'layer "%s" reads "%s" as it was before layer "%s" worked in place on a blob that in Caffe lies in '
                    "the same memory: there it would read the changed values",
                    layer.name,
                    readers[layer.name].bottom[index],
                    changed[blob],
                )
                return
        shares = layer.type in ("Reshape", "Flatten", "Split") or (
            layer.type in ("Concat", "Slice") and len(layer.bottom) == len(layer.top) == 1
        )
        for blob in layer.top:
            if blob not in layer.bottom:
                source = layer.bottom[0] if shares else blob
                memory[blob] = memory.get(source, source)
                changed.pop(blob, None)
                changed |= {blob: changed[source]} if source in changed else {}
            elif layer.type != "Dropout":
                same = [other for other in memory if memory[other] == memory[blob] and other != blob]
                changed.update(dict.fromkeys(same, layer.name))


def restore_in_place(net: ProtoMessage) -> None:
    """Make elementwise layers work in place again where ``remove_in_place`` gave them a blob; changes the net.

    The engine then merges them with the layer before them: a calibration model runs about as fast as the original.
    """
    makers = {blob: layer for layer in net.layer for blob in layer.top}
    readers = Counter(blob for layer in net.layer for blob in layer.bottom)
    for layer in net.layer:
        if layer.type not in _IN_PLACE or len(layer.bottom) != 1:
            continue
        maker = makers.get(layer.bottom[0])
        if maker is None or len(maker.top) != 1 or layer.bottom[0] != f"{maker.name}_out":
            continue
        if readers[layer.bottom[0]] == 1:
            maker.top[0] = layer.bottom[0] = layer.top[0]
            makers[layer.top[0]] = layer


def free_name(wanted: str, taken: set[str]) -> str:
    """The wanted name, with a number appended if it is taken; the result is added to ``taken``."""
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    taken.add(name)
    return name


logger = logging.getLogger(__name__)

TEST_PHASE = 1
#: Other names for a type that can be quantized: forks of Caffe call the same layer differently.
SAME_TYPE = {
    "DepthwiseConvolution": "DepthwiseConv",
    "ConvolutionDepthwise": "DepthwiseConv",
    "HardSwish": "Hswish",
    "HSwish": "Hswish",
}
#: The tops and the bottoms, by number, that hold coordinates or indices: boxes, classes, positions, marks of 0 and 1.
_MAKES_POSITIONS = {
    "PriorBox": (0,), "Proposal": (0,), "DetectionOutput": (0,), "YoloDetectionOutput": (0,), "Nms": (0,),
    "Yolov3DetectionOutput": (0,), "Pooling": (1,), "ArgMax": (0,), "ArgMin": (0,), "Sort": (1,), "TopK": (1,),
}  # fmt: skip
_READS_POSITIONS = {
    "ROIPooling": (1,), "PSROIPooling": (1,), "ROIAlign": (1,), "Upsample": (1,), "Unpooling": (1,), "Nms": (0,),
    "DetectionOutput": (2,), "Embed": (0,), "BatchReindex": (1,), "Filter": (-1,), "LSTM": (1,), "RNN": (1,),
    "GRU": (1,), "Accuracy": (1,), "SoftmaxWithLoss": (1,), "MultinomialLogisticLoss": (1,), "InfogainLoss": (1,),
    "HingeLoss": (1,),
}  # fmt: skip
_MOVING = ("Concat", "Slice", "Split", "Reshape", "Flatten", "Permute", "Tile", "Reverse")
#: With one bottom these turn coordinates into coordinates: boxes of one size become boxes of another.
_SCALING = ("Power", "Scale", "Bias")


def layer_list(prototxt: AnyPath, custom_proto: AnyPath | None = None) -> LayerList:
    """Every layer of the TEST phase, in file order; ``custom_proto`` describes messages of the user's own layers.

    Raises:
        FileError: the file cannot be read.
        ParseError: it is not a prototxt.
        ModelError: it is not a valid net.
    """
    return layer_infos(read_test_phase(prototxt, custom_proto))


def read_test_phase(prototxt: AnyPath, custom_proto: AnyPath | CustomSchema | None = None) -> ProtoMessage:
    """The TEST-phase layers, in the current format, of a float or quantized model; errors as ``layer_list``."""
    net = upgrade_net(read_net_message(prototxt, custom_proto), str(prototxt))
    net.state.phase = TEST_PHASE
    net = filter_net(net)
    net.ClearField("state")
    for layer in net.layer:
        layer.type = SAME_TYPE.get(layer.type, layer.type)
        layer.ClearField("include")
        layer.ClearField("exclude")
    if not net.layer:
        raise ModelError(f"{prototxt}: the net has no layer in the TEST phase")
    return with_unique_names(net)


def input_shapes(prototxt: AnyPath) -> dict[str, tuple[int, ...]]:
    """The declared shapes of the inputs by name; none if the data of the net come from a layer."""
    found: dict[str, tuple[int, ...]] = {}
    for layer in read_test_phase(prototxt).layer:
        if layer.type == "Input":
            shapes = [tuple(shape.dim) for shape in layer.input_param.shape] or [()]
            shapes = shapes * len(layer.top) if len(shapes) == 1 else shapes
            found.update(zip(layer.top, shapes, strict=False))
    return found


def with_unique_names(net: ProtoMessage) -> ProtoMessage:
    """Give layers with the name of an earlier layer a name of their own (``loss_2``), in place; returns the net.

    Caffe allows equal names; its weights go to the first layer of a name, so the others keep none of the file.
    """
    taken = {layer.name for layer in net.layer}
    seen: set[str] = set()
    for layer in net.layer:
        if layer.name in seen:
            name = free_name(layer.name or "layer", taken)
            logger.warning(
                'two layers are named "%s"; the one of type %s is called "%s" here', layer.name, layer.type, name
            )
            layer.name = name
        seen.add(layer.name)
    return net


def layer_infos(net: ProtoMessage) -> LayerList:
    """Every layer of a net whose layers are those of the TEST phase."""
    positions = _blobs_of_positions(net)
    return LayerList(
        LayerInfo(
            name=layer.name,
            type=layer.type,
            inputs=max(1, len(layer.bottom)),
            # of the options of its own type; both are true by default
            has_bias=bool(layer.inner_product_param.bias_term and layer.convolution_param.bias_term),
            refusal=_refusal(layer, positions),
            average_pooling=layer.type == "Pooling" and _is_local_average(layer.pooling_param),
        )
        for layer in net.layer
    )


def _blobs_of_positions(net: ProtoMessage) -> set[str]:
    """The blobs of coordinates and indices, as they are made or as a layer reads them; also where others move them."""
    found: set[str] = set()
    for layer in net.layer:
        if not (layer.type == "ArgMax" and layer.argmax_param.out_max_val and layer.argmax_param.HasField("axis")):
            found.update(layer.top[at] for at in _MAKES_POSITIONS.get(layer.type, ()) if at < len(layer.top))
        found.update(layer.bottom[at] for at in _READS_POSITIONS.get(layer.type, ()) if at < len(layer.bottom))
    moving = [
        layer for layer in net.layer if layer.type in _MOVING or (layer.type in _SCALING and len(layer.bottom) == 1)
    ]
    size = -1
    while size < len(found):
        size = len(found)
        for layer in moving:
            if found.intersection((*layer.bottom, *layer.top)):
                found.update((*layer.bottom, *layer.top))
    return found


def _refusal(layer: ProtoMessage, positions: Collection[str]) -> str | None:
    """Why a layer of a quantizable type cannot be quantized."""
    if layer.type == "Upsample" and len(layer.bottom) > 1:
        return "its second bottom holds positions of a pooling, which cannot be rounded"
    if layer.type == "Pooling" and len(layer.top) > 1:
        return "its second top holds positions of the largest values, which rounding would move"
    if layer.type in CAFFE_TYPES and not CAFFE_TYPES[layer.type].weights:
        for blob in layer.bottom:
            if blob in positions:
                return f'its bottom "{blob}" holds coordinates or indices, which cannot be rounded'
    return None


def _is_local_average(pooling: ProtoMessage) -> bool:
    return bool(pooling.pool == pooling.AVE and not pooling.global_pooling)


def unbuildable_layer(prototxt: AnyPath, custom_proto: AnyPath | None = None) -> tuple[str, str] | None:
    """The first layer of the TEST phase of a known type that cannot be built, and the reason; None if there is none.

    What follows it is not looked at: the shapes are not known there. Layers that read data are not looked at either,
    because their data may be elsewhere, nor are Python layers, which execute code, unless they are allowed.
    """
    from amct.caffe.engine.graph import GraphBuilder, insert_splits  # imports torch
    from amct.caffe.engine.layer import find_layer_class
    from amct.caffe.engine.layers.python_layer import python_layers_allowed

    net = read_test_phase(prototxt, custom_proto)
    names: set[str] = set()
    for layer in net.layer:
        if unknown := [name for name in layer.bottom if name not in names]:
            return layer.name, f'no layer before it writes the blob "{unknown[0]}"'
        names.update(layer.top)
    builder = GraphBuilder(insert_splits(net))
    for layer in builder.net.layer:
        if (layer.type == "Python" and not python_layers_allowed()) or find_layer_class(layer.type) is None:
            return None
        try:
            builder.add_layer(layer)
        except AmctError as error:
            own = str(error).removeprefix(f'layer "{layer.name}" ({layer.type}): ')
            return (layer.name, own) if layer.bottom else None
    return None
