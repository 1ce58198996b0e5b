"""Upgrades the oldest layer format, V0 (``layers { layer { type: "conv" } }``), to V1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.errors import ModelError, did_you_mean

if TYPE_CHECKING:
    from amct.caffe.engine.messages import ProtoMessage

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
