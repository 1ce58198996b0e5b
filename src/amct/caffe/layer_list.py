"""The layers of a prototxt in the form that configs need, read without weights and without torch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from amct.caffe.engine.graph import filter_net
from amct.caffe.engine.messages import read_message
from amct.caffe.engine.upgrade import upgrade_net
from amct.caffe.proto_merge import custom_schema
from amct.caffe.uninplace import free_name
from amct.config.layers import LayerInfo, LayerList
from amct.errors import AmctError

if TYPE_CHECKING:
    import os

    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.proto_merge import CustomSchema

    AnyPath = str | os.PathLike[str]

logger = logging.getLogger(__name__)

TEST_PHASE = 1
#: Other names for a type that can be quantized: forks of Caffe call the same layer differently.
SAME_TYPE = {
    "DepthwiseConvolution": "DepthwiseConv",
    "ConvolutionDepthwise": "DepthwiseConv",
    "HardSwish": "Hswish",
    "HSwish": "Hswish",
}


def layer_list(prototxt: AnyPath, custom_proto: AnyPath | None = None) -> LayerList:
    """Every layer of the TEST phase, in file order; ``custom_proto`` describes messages of the user's own layers.

    Raises:
        FileError: the file cannot be read.
        ParseError: it is not a prototxt.
        ModelError: it is not a valid net.
    """
    return layer_infos(read_test_phase(prototxt, custom_proto))


def read_test_phase(prototxt: AnyPath, custom_proto: AnyPath | CustomSchema | None = None) -> ProtoMessage:
    """The net in the current format, with the layers of the TEST phase; errors as ``layer_list``."""
    net = upgrade_net(read_message(prototxt, "NetParameter", custom_schema(custom_proto)), str(prototxt))
    net.state.phase = TEST_PHASE
    for layer in net.layer:
        layer.type = SAME_TYPE.get(layer.type, layer.type)
    return with_unique_names(filter_net(net))


def input_shape(prototxt: AnyPath, custom_proto: AnyPath | None = None) -> tuple[int, ...]:
    """The declared shape of the first input; empty if the net has none (its data come from a layer)."""
    for layer in read_test_phase(prototxt, custom_proto).layer:
        if layer.type == "Input" and layer.input_param.shape:
            return tuple(layer.input_param.shape[0].dim)
    return ()


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
    return LayerList(layer_info(layer) for layer in net.layer)


def layer_info(layer: ProtoMessage) -> LayerInfo:
    """Describe one layer in the form that the config package reads."""
    return LayerInfo(
        name=layer.name,
        type=layer.type,
        inputs=max(1, len(layer.bottom)),
        has_bias=_has_bias(layer),
        refusal=_refusal(layer),
        average_pooling=layer.type == "Pooling" and _is_local_average(layer.pooling_param),
    )


def _refusal(layer: ProtoMessage) -> str | None:
    """Why a layer of a quantizable type cannot be quantized."""
    if layer.type == "Upsample" and len(layer.bottom) > 1:
        return "its second bottom holds positions of a pooling, which cannot be rounded"
    if layer.type == "Pooling" and len(layer.top) > 1:
        return "its second top holds positions of the largest values, which rounding would move"
    return None


def _has_bias(layer: ProtoMessage) -> bool:
    if layer.type == "InnerProduct":
        return bool(layer.inner_product_param.bias_term)
    return bool(layer.convolution_param.bias_term)


def _is_local_average(pooling: ProtoMessage) -> bool:
    average = pooling.DESCRIPTOR.enum_types_by_name["PoolMethod"].values_by_name["AVE"].number
    return bool(pooling.pool == average and not pooling.global_pooling)


def unbuildable_layer(prototxt: AnyPath, custom_proto: AnyPath | None = None) -> tuple[str, str] | None:
    """The first layer of the TEST phase of a known type that cannot be built, and the reason; None if there is none.

    What follows it is not looked at: the shapes are not known there. Layers that read data are not looked at either,
    because their data may be elsewhere, nor are nets with Python layers, which would execute code.
    """
    from amct.caffe.engine.graph import GraphBuilder, insert_splits  # imports torch
    from amct.caffe.engine.layer import find_layer_class

    net = read_test_phase(prototxt, custom_proto)
    names: set[str] = set()
    for layer in net.layer:
        if unknown := [name for name in layer.bottom if name not in names]:
            return layer.name, f'no layer before it writes the blob "{unknown[0]}"'
        names.update(layer.top)
    builder = GraphBuilder(insert_splits(net))
    for layer in builder.net.layer:
        if layer.type == "Python" or find_layer_class(layer.type) is None:
            return None
        try:
            builder.add_layer(layer)
        except AmctError as error:
            own = str(error).removeprefix(f'layer "{layer.name}" ({layer.type}): ')
            return (layer.name, own) if layer.bottom else None
    return None
