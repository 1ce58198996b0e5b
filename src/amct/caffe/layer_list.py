"""The layers of a prototxt in the form that configs need, read without weights and without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.caffe.engine.build.filter_rules import filter_net
from amct.caffe.engine.build.upgrade import upgrade_net
from amct.caffe.engine.messages import new_message, read_message
from amct.config.layers import LayerInfo, LayerList

if TYPE_CHECKING:
    import os

    from amct.caffe.engine.messages import ProtoMessage

TEST_PHASE = 1


def layer_list(prototxt: str | os.PathLike[str]) -> LayerList:
    """Every layer of the TEST phase, in file order.

    Raises:
        FileError: the file cannot be read.
        ParseError: it is not a prototxt.
        ModelError: it is not a valid net.
    """
    return layer_infos(read_test_phase(prototxt))


def read_test_phase(prototxt: str | os.PathLike[str]) -> ProtoMessage:
    """The net in the current format, with the layers of the TEST phase; errors as ``layer_list``."""
    net = upgrade_net(read_message(prototxt, "NetParameter"), str(prototxt))
    net.state.CopyFrom(new_message("NetState", phase=TEST_PHASE))
    return filter_net(net)


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
        average_pooling=layer.type == "Pooling" and _is_local_average(layer.pooling_param),
    )


def _has_bias(layer: ProtoMessage) -> bool:
    if layer.type == "InnerProduct":
        return bool(layer.inner_product_param.bias_term)
    return bool(layer.convolution_param.bias_term)


def _is_local_average(pooling: ProtoMessage) -> bool:
    average = pooling.DESCRIPTOR.enum_types_by_name["PoolMethod"].values_by_name["AVE"].number
    return bool(pooling.pool == average and not pooling.global_pooling)
