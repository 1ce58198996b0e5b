"""Upgrades older formats of a net: V0 and V1 layers, ``input:`` fields, old BatchNorm and data layers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from amct.errors import ModelError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amct.caffe.engine.messages import ProtoMessage


logger = logging.getLogger(__name__)

#: The current type of each V1 enum name; names not listed are converted by joining the words (``INNER_PRODUCT``).
_V1_SPECIAL = {
    "NONE": "",
    "ABSVAL": "AbsVal",
    "ARGMAX": "ArgMax",
    "BN": "BN",
    "BNLL": "BNLL",
    "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output",
    "LRN": "LRN",
    "MVN": "MVN",
    "RELU": "ReLU",
    "SOFTMAX_LOSS": "SoftmaxWithLoss",
    "TANH": "TanH",
}
#: Fields of a V1 layer that are not copied unchanged.
_V1_OWN_FIELDS = {"type", "param", "blob_share_mode", "blobs_lr", "weight_decay", "layer"}
_OLD_TRANSFORM = ("scale", "mean_file", "crop_size", "mirror")
_BATCH_NORM_BLOBS = 3
#: Fields of other Caffes that say how fast or in which numbers something is computed, not what.
_NET_HINTS = (
    "default_forward_type", "default_backward_type", "default_forward_math", "default_backward_math",
    "global_grad_scale", "global_grad_scale_adaptive", "reduce_buckets", "default_conv_algos_override",
    "default_cudnn_math_override", "bn_stats_batch_size", "engine",
)  # fmt: skip
_LAYER_HINTS = ("forward_type", "backward_type", "forward_math", "backward_math", "cudnn_math_override", "engine")
_CONVOLUTION_HINTS = ("cudnn_convolution_algo_seeker", "conv_algos_override")
_INPUT_AXES = 4


def upgrade_net(net: ProtoMessage, source: str = "net") -> ProtoMessage:
    """Upgrade a NetParameter to the current format, in place, and return it.

    Raises:
        ModelError: It mixes formats, or uses a feature that has no current equivalent.
    """
    if net.layers:
        if net.layer:
            raise ModelError(
                f"{source}: Refusing to upgrade inconsistent NetParameter input; the definition includes both 'layer' "
                "and 'layers' fields. Write them all as 'layer' (type: \"ReLU\", not type: RELU)."
            )
        upgrade_v0_layers(net, source)
        for old in net.layers:
            upgrade_v1_layer(old, net.layer.add())
        del net.layers[:]
    _clear(net, _NET_HINTS)
    for layer in net.layer:
        _clear(layer, _LAYER_HINTS)
        if layer.HasField("convolution_param"):
            _clear(layer.convolution_param, _CONVOLUTION_HINTS)
        _move_transform(layer)
        if layer.type == "BatchNorm" and len(layer.param) == _BATCH_NORM_BLOBS:
            for spec in layer.param:
                spec.lr_mult = spec.decay_mult = 0.0
    if net.input:
        _input_layer(net, source)
    return net


def _clear(message: ProtoMessage, fields: Iterable[str]) -> None:
    for field in fields:
        message.ClearField(field)


def v1_type_name(layer: ProtoMessage) -> str:
    """The current type of a V1 layer: ``INNER_PRODUCT`` is ``InnerProduct``."""
    name: str = layer.DESCRIPTOR.fields_by_name["type"].enum_type.values_by_number[layer.type].name
    return _V1_SPECIAL.get(name, "".join(word.capitalize() for word in name.split("_")))


def upgrade_v1_layer(old: ProtoMessage, new: ProtoMessage) -> None:
    """Fill ``new``, a LayerParameter, from a V1 layer (``layers { type: CONVOLUTION ... }``)."""
    new.type = v1_type_name(old)
    for field, value in old.ListFields():
        if field.name in _V1_OWN_FIELDS:
            continue
        target: ProtoMessage = getattr(new, field.name, None)
        if field.message_type is None and not hasattr(target, "extend"):
            setattr(new, field.name, value)
        elif hasattr(target, "extend"):
            target.extend(value)
        else:
            getattr(new, field.name).CopyFrom(value)
    columns = {
        "name": old.param,
        "share_mode": old.blob_share_mode,
        "lr_mult": old.blobs_lr,
        "decay_mult": old.weight_decay,
    }
    for name, values in columns.items():
        for index, value in enumerate(values):
            while len(new.param) <= index:
                new.param.add()
            setattr(new.param[index], name, value)


def _move_transform(layer: ProtoMessage) -> None:
    """Move scale, mean, crop and mirror of old data layers to ``transform_param``."""
    name = {"Data": "data_param", "ImageData": "image_data_param", "WindowData": "window_data_param"}.get(layer.type)
    if name is None or not layer.HasField(name):
        return
    options = getattr(layer, name)
    for field in _OLD_TRANSFORM:
        if options.HasField(field):
            setattr(layer.transform_param, field, getattr(options, field))
            options.ClearField(field)


def _input_layer(net: ProtoMessage, source: str) -> None:
    """Replace ``input:`` with ``input_shape``, or four ``input_dim`` each, by one Input layer called "input"."""
    names = list(net.input)
    shapes = [list(shape.dim) for shape in net.input_shape]
    if not shapes and net.input_dim:
        dims = list(net.input_dim)
        shapes = [dims[start : start + _INPUT_AXES] for start in range(0, len(dims), _INPUT_AXES)]
        if len(dims) != _INPUT_AXES * len(names):
            raise ModelError(
                f"{source}: {len(names)} input field(s) need {_INPUT_AXES} input_dim each, {_INPUT_AXES * len(names)} "
                f"in all, got {len(dims)}"
            )
    if shapes:
        if len(shapes) != len(names):
            raise ModelError(f"{source}: {len(names)} input field(s) but {len(shapes)} input_shape: give one for each")
        whole = type(net)()
        layer = whole.layer.add(name="input", type="Input", top=names)
        for dims in shapes:
            layer.input_param.shape.add().dim.extend(dims)
        whole.layer.extend(net.layer)
        del net.layer[:]
        net.layer.extend(whole.layer)
    else:
        logger.warning("%s: input fields without input_dim or input_shape are ignored", source)
    for field in ("input", "input_shape", "input_dim"):
        net.ClearField(field)


#: V0 type -> V1 enum name and the parameter message for its fields.
_TYPES: dict[str, tuple[str, str]] = {
    "accuracy": ("ACCURACY", ""),
    "bnll": ("BNLL", ""),
    "concat": ("CONCAT", "concat_param"),
    "conv": ("CONVOLUTION", "convolution_param"),
    "data": ("DATA", "data_param"),
    "dropout": ("DROPOUT", "dropout_param"),
    "euclidean_loss": ("EUCLIDEAN_LOSS", ""),
    "flatten": ("FLATTEN", ""),
    "hdf5_data": ("HDF5_DATA", "hdf5_data_param"),
    "hdf5_output": ("HDF5_OUTPUT", "hdf5_output_param"),
    "im2col": ("IM2COL", "convolution_param"),
    "images": ("IMAGE_DATA", "image_data_param"),
    "infogain_loss": ("INFOGAIN_LOSS", "infogain_loss_param"),
    "innerproduct": ("INNER_PRODUCT", "inner_product_param"),
    "lrn": ("LRN", "lrn_param"),
    "multinomial_logistic_loss": ("MULTINOMIAL_LOGISTIC_LOSS", ""),
    "pool": ("POOLING", "pooling_param"),
    "relu": ("RELU", ""),
    "sigmoid": ("SIGMOID", ""),
    "softmax": ("SOFTMAX", ""),
    "softmax_loss": ("SOFTMAX_LOSS", ""),
    "split": ("SPLIT", ""),
    "tanh": ("TANH", ""),
    "window_data": ("WINDOW_DATA", "window_data_param"),
}
#: V0 field -> name in the parameter message, where it is not the same.
_RENAMED = {
    "biasterm": "bias_term",
    "kernelsize": "kernel_size",
    "batchsize": "batch_size",
    "shuffle_images": "shuffle",
    "det_fg_threshold": "fg_threshold",
    "det_bg_threshold": "bg_threshold",
    "det_fg_fraction": "fg_fraction",
    "det_context_pad": "context_pad",
    "det_crop_mode": "crop_mode",
}
_TRANSFORM = {"scale": "scale", "meanfile": "mean_file", "cropsize": "crop_size", "mirror": "mirror"}
_PLAIN = {"name", "type", "blobs", "blobs_lr", "weight_decay", "hdf5_output_param"}


def upgrade_v0_layers(net: ProtoMessage, source: str) -> None:
    """Convert each V0 layer of the net to V1, in place; a padding layer is merged into the convolution after it.

    Raises:
        ModelError: A type or a field is unknown.
    """
    if not any(connection.HasField("layer") for connection in net.layers):
        return
    _fold_padding(net, source)
    for connection in net.layers:
        if connection.HasField("layer"):
            _upgrade_layer(connection, source)


def _fold_padding(net: ProtoMessage, source: str) -> None:
    last_writer: dict[str, ProtoMessage] = {}
    kept = []
    for connection in net.layers:
        for position, blob in enumerate(connection.bottom):
            writer = last_writer.get(blob)
            if writer is None or writer.layer.type != "padding":
                continue
            if connection.layer.type not in ("conv", "pool"):
                raise ModelError(
                    f'{source}: layer "{connection.layer.name}": a padding layer may only come before conv or pool, '
                    "not "
                    f'before "{connection.layer.type}"'
                )
            connection.layer.pad = writer.layer.pad
            connection.bottom[position] = writer.bottom[0]
        for blob in connection.top:
            last_writer[blob] = connection
        if connection.layer.type != "padding":
            kept.append(connection)
    copies = [type(connection).FromString(connection.SerializeToString()) for connection in kept]
    del net.layers[:]
    net.layers.extend(copies)


def _upgrade_layer(connection: ProtoMessage, source: str) -> None:
    old = type(connection.layer).FromString(connection.layer.SerializeToString())
    connection.ClearField("layer")
    if old.type not in _TYPES:
        raise ModelError(
            f'{source}: layer "{old.name}": unknown old layer type "{old.type}".{did_you_mean(old.type, _TYPES)}'
        )
    enum_name, parameter_name = _TYPES[old.type]
    connection.name = old.name
    connection.type = connection.DESCRIPTOR.fields_by_name["type"].enum_type.values_by_name[enum_name].number
    connection.blobs.extend(old.blobs)
    connection.blobs_lr.extend(old.blobs_lr)
    connection.weight_decay.extend(old.weight_decay)
    if old.HasField("hdf5_output_param"):
        connection.hdf5_output_param.CopyFrom(old.hdf5_output_param)
    for field, value in old.ListFields():
        if field.name not in _PLAIN:
            _set_field(connection, parameter_name, field.name, value, source)


def _set_field(connection: ProtoMessage, parameter_name: str, field: str, value: object, source: str) -> None:
    if field in _TRANSFORM and parameter_name.endswith("data_param"):
        setattr(connection.transform_param, _TRANSFORM[field], value)
        return
    parameter = getattr(connection, parameter_name) if parameter_name else None
    name = _RENAMED.get(field, field)
    if parameter is None or name not in parameter.DESCRIPTOR.fields_by_name:
        raise ModelError(f'{source}: layer "{connection.name}": field {field} is not valid for this layer type')
    target = getattr(parameter, name)
    if hasattr(target, "append"):
        target.append(value)
    elif hasattr(target, "CopyFrom"):
        target.CopyFrom(value)
    else:
        setattr(parameter, name, value)
