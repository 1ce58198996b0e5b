"""A Caffe model in memory: the layers of the TEST phase without in-place blobs, and their weights.

It is read from files, can be edited and written without building a net, so layers that the engine cannot run (custom
layers, Python layers) are kept unchanged. ``build`` and ``run_net`` run it on the user's data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct.atomic import Snapshot
from amct.caffe.engine.layers.batch_norm import bn_blobs
from amct.caffe.engine.messages import new_message, read_net_message
from amct.caffe.engine.net import Net
from amct.caffe.engine.upgrade import upgrade_net
from amct.caffe.engine.weights import stored_layers
from amct.caffe.engine.wire import StoredBlob, blob_parts, layer_parts, read_blob
from amct.caffe.prototxt import TEST_PHASE, read_test_phase, remove_in_place, warn_of_shared_memory
from amct.errors import ArgumentError, ModelError, ParseError
from amct.model import Graph, Node
from amct.model.kinds import KIND_OF_CAFFE_TYPE
from amct.pipeline.batches import Batches, as_array
from amct.schema import format_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from amct.atomic import AnyPath, FileGroup
    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.proto_merge import CustomSchema
    from amct.pipeline.batches import BatchInputs


FEEDFORWARD_TYPES = tuple(name for name, kind in KIND_OF_CAFFE_TYPE.items() if kind.folds_batch_norm)
"""Types with weights and without a hidden state: convolutions and inner products."""
RECURRENT_TYPES = tuple(name for name, kind in KIND_OF_CAFFE_TYPE.items() if kind.is_recurrent)
INSERTED_TYPES = (
    "Quant", "DeQuant", "AntiQuant", "IFMR", "SearchN", "LSTMQuant", "RNNQuant", "GRUQuant", "RetrainDataQuant",
    "RetrainWeightQuant",
)  # fmt: skip
"""Layer types that this toolkit inserts: a model that contains one is already quantized."""


@dataclass
class CaffeModel:
    """A net (a NetParameter without in-place layers and without blobs) and the blobs of each layer."""

    net: ProtoMessage
    weights: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    @property
    def layers(self) -> list[ProtoMessage]:
        """The layers, in order."""
        return list(self.net.layer)

    def layer(self, name: str) -> ProtoMessage:
        """The layer with this name; it must exist."""
        return next(layer for layer in self.net.layer if layer.name == name)

    def set_layers(self, layers: Iterable[ProtoMessage]) -> None:
        """Replace the layers; the weights of removed layers are removed too."""
        kept = type(self.net)()
        for layer in layers:  # messages of a custom.proto have classes of their own, layers added here have not
            kept.layer.add().ParseFromString(layer.SerializeToString())
        del self.net.layer[:]
        self.net.MergeFrom(kept)
        names = {layer.name for layer in self.net.layer}
        self.weights = {name: blobs for name, blobs in self.weights.items() if name in names}

    def copy(self) -> CaffeModel:
        """A copy with its own layers and blob lists; the blobs themselves are shared."""
        net = type(self.net)()
        net.CopyFrom(self.net)
        return CaffeModel(net, {name: list(blobs) for name, blobs in self.weights.items()})

    def build(self, keep_blobs: bool | Iterable[str] = True) -> Net:
        """Build a net that runs the model.

        Raises:
            ModelError: The net cannot be built, or the weights do not fit it.
        """
        with equal_draws():
            net = Net(self.net, with_gradients=False, keep_blobs=keep_blobs)
        for layer in net.layers:
            stored = self.weights.get(layer.name)
            if stored is None:
                continue
            layer.fit_stored([tuple(tensor.shape) for tensor in stored])
            needed = [blob.count for blob in layer.blobs]
            if needed != [tensor.numel() for tensor in stored]:
                raise layer.error(
                    f"the weights have shapes {[tuple(tensor.shape) for tensor in stored]}, this net needs "
                    f"{[blob.shape for blob in layer.blobs]} for inputs of shape "
                    f"{[blob.shape for blob in layer.bottom_blobs]}. Do prototxt and weights belong together? Compare "
                    "the input shape, and the kernels and strides of the layers before"
                )
            for blob, tensor in zip(layer.blobs, stored, strict=True):
                values = tensor.view(torch.int8) if tensor.dtype is torch.uint8 else tensor
                blob.set_tensor(values if layer.keeps_integers else values.float())
        return net

    def topology(self) -> Graph:
        """The graph of producers and consumers among the layers.

        Raises:
            ModelError: a layer reads a blob that no earlier layer writes.
        """
        read = {blob for layer in self.net.layer for blob in layer.bottom}
        nodes = [
            Node(name=layer.name, op=layer.type, inputs=tuple(layer.bottom), outputs=tuple(layer.top))
            for layer in self.net.layer
        ]
        return Graph(nodes, outputs=[blob for node in nodes for blob in node.outputs if blob not in read])

    def blob_names(self) -> set[str]:
        """Every blob of the net."""
        return {blob for layer in self.net.layer for blob in (*layer.bottom, *layer.top)}


def read_model(model_file: AnyPath, weights_file: AnyPath, custom_proto: AnyPath | None = None) -> CaffeModel:
    """Read prototxt and weights (a caffemodel of any version, or HDF5).

    Args:
        model_file: The prototxt.
        weights_file: The weights.
        custom_proto: A ``custom.proto`` with messages of the user's own layers.

    Raises:
        FileError: a file cannot be read.
        ParseError: it is malformed.
        ModelError: the net is empty, the weights belong to another net, or the model is already quantized.
    """
    return _with_own_weights(_read(read_net, model_file, weights_file, custom_proto), weights_file)


def read_training_model(model_file: AnyPath, weights_file: AnyPath, custom_proto: AnyPath | None = None) -> CaffeModel:
    """Read prototxt and weights with the layers of every phase, unchanged; errors as ``read_model``."""

    def read_all_phases(model_file: AnyPath, custom_proto: AnyPath | None) -> ProtoMessage:
        net = upgrade_net(read_net_message(model_file, custom_proto), str(model_file))
        check_is_float(net, str(model_file))
        return net

    return _float(_read(read_all_phases, model_file, weights_file, custom_proto), weights_file)


def read_retrained_model(model_file: AnyPath, weights_file: AnyPath, custom_proto: AnyPath | None = None) -> CaffeModel:
    """Read the TEST-phase layers of a model after retraining, those of retraining among them; errors as ``read_model``.

    In-place layers are kept.
    """
    return _with_own_weights(_read(read_test_phase, model_file, weights_file, custom_proto), weights_file)


def read_quantized_model(
    model_file: AnyPath, weights_file: AnyPath, custom_proto: AnyPath | CustomSchema | None = None
) -> CaffeModel:
    """Read the fake-quant or deploy model that quantization wrote; its weights may be integers. Errors as above."""
    return _read(read_test_phase, model_file, weights_file, custom_proto)


def _read(
    read: Callable[..., ProtoMessage], model_file: AnyPath, weights_file: AnyPath, custom_proto: object
) -> CaffeModel:
    """The net by one of the functions here and its weights, from one state of both files."""
    files = Snapshot(model_file, weights_file)
    net = read(model_file, custom_proto)
    model = CaffeModel(net, dict(_stored_weights(net, weights_file)))
    files.check_unchanged()
    return model


def _with_own_weights(model: CaffeModel, weights_file: AnyPath) -> CaffeModel:
    """The model with checked weights, each layer with its own: those that share may be quantized differently."""
    for layer in _float(model, weights_file).net.layer:
        check_weights(layer, model.weights.get(layer.name, []), str(weights_file))
        for spec in layer.param:
            spec.ClearField("name")
            spec.ClearField("share_mode")
    return model


def _float(model: CaffeModel, weights_file: AnyPath) -> CaffeModel:
    """The model, whose weights are no integers."""
    for name, blobs in model.weights.items():
        for index, blob in enumerate(blobs):
            if not blob.is_floating_point():
                kind = str(blob.dtype).removeprefix("torch.")
                raise ModelError(
                    f'{weights_file}: blob {index} of layer "{name}" holds {kind} integers: this model is quantized '
                    "already; give the original float model"
                )
    return model


def read_net(model_file: AnyPath, custom_proto: AnyPath | None = None) -> ProtoMessage:
    """Read the TEST-phase layers in the current format, none of them in place; errors as ``read_model``."""
    net = read_test_phase(model_file, custom_proto)
    check_is_float(net, str(model_file))
    warn_of_shared_memory(net)
    return remove_in_place(net)


def check_is_float(net: ProtoMessage, source: str) -> None:
    """Reject a net that is already quantized.

    Raises:
        ModelError: it has layers that quantization inserts.
    """
    for layer in net.layer:
        if layer.type in INSERTED_TYPES:
            raise ModelError(
                f'{source}: layer "{layer.name}" ({layer.type}) shows that this model is quantized already; give the '
                "original float model"
            )


# ------------------------------------------------------------------ weights


def _stored_weights(net: ProtoMessage, path: AnyPath) -> Iterator[tuple[str, list[torch.Tensor]]]:
    for layer in net.layer:
        if layer.blobs:  # weights in the prototxt itself; the caffemodel's weights replace them
            contents = [read_blob(blob.SerializeToString(), "prototxt") for blob in layer.blobs]
            layer.ClearField("blobs")
            yield layer.name, [_tensor(blob, layer, index, "prototxt") for index, blob in enumerate(contents)]
    stored = {name: blobs for name, blobs in stored_layers(path, [layer.name for layer in net.layer]) if blobs}
    owners: dict[str, tuple[str, int]] = {}
    for layer in net.layer:
        blobs = stored.get(layer.name, {})
        for index, spec in enumerate(layer.param):
            owner, place = owners.setdefault(spec.name, (layer.name, index)) if spec.name else (layer.name, index)
            if place in stored.get(owner, {}):
                blobs.setdefault(index, stored[owner][place])
        if blobs:
            yield layer.name, [_tensor(blobs[index], layer, index, str(path)) for index in sorted(blobs)]


def _tensor(blob: StoredBlob, layer: ProtoMessage, index: int, source: str) -> torch.Tensor:
    shape = blob.shape if blob.shape or blob.values.size == 1 else (blob.values.size,)
    if math.prod(shape) != blob.values.size:  # exact, whatever the file says
        raise ParseError(
            f'{source}: layer "{layer.name}", blob {index}: shape {shape} but {blob.values.size} values stored'
        )
    is_integer = np.issubdtype(blob.values.dtype, np.integer)
    values = torch.from_numpy(np.array(blob.values, None if is_integer else np.float32))
    keeps_axes = index == 0 and layer.type in ("Convolution", "DepthwiseConv", "Deconvolution")
    if blob.is_legacy and not keeps_axes:  # four axes, of which the leading ones of length 1 are not meant
        shape = shape[next((axis for axis, size in enumerate(shape) if size != 1), len(shape) - 1) :]
    return values.reshape(shape)


def check_weights(layer: ProtoMessage, blobs: list[torch.Tensor], source: str) -> None:
    """Reject weights that are missing or of another net; reshape legacy four-axis blobs to their current shape.

    Raises:
        ModelError: the weights are missing or belong to another net.
    """
    expected = {"BatchNorm": 3, "Bias": 1, "Scale": 2 if layer.scale_param.bias_term else 1}.get(layer.type)
    if layer.type == "BN":
        expected = bn_blobs(layer)
    if layer.type in ("Scale", "Bias") and len(layer.bottom) > 1:
        return
    if layer.type in FEEDFORWARD_TYPES:
        _check_bottoms(layer, source)
        options = layer.inner_product_param if layer.type == "InnerProduct" else layer.convolution_param
        expected = 2 if options.bias_term else 1
    if expected is None:
        return
    if len(blobs) != expected:
        raise ModelError(
            f'{source}: layer "{layer.name}" ({layer.type}) needs {expected} blob(s) of weights, the file has '
            f"{len(blobs)} for it. Do model and weights belong together?"
        )
    if layer.type in FEEDFORWARD_TYPES:
        _check_outputs(layer, blobs, source)


def _check_bottoms(layer: ProtoMessage, source: str) -> None:
    bottoms, tops = len(layer.bottom), len(layer.top)
    if layer.type == "InnerProduct" and (bottoms, tops) != (1, 1):
        raise ModelError(
            f'{source}: layer "{layer.name}" (InnerProduct) takes one bottom and gives one top, got {bottoms} bottoms '
            f"and {tops} tops"
        )
    if not bottoms or bottoms != tops:
        raise ModelError(
            f'{source}: layer "{layer.name}" ({layer.type}) gives one top for each bottom, got {bottoms} bottoms and '
            f"{tops} tops"
        )


def _check_outputs(layer: ProtoMessage, blobs: list[torch.Tensor], source: str) -> None:
    if layer.type == "InnerProduct":
        outputs = layer.inner_product_param.num_output
        inputs = blobs[0].numel() // max(outputs, 1)
        shape: tuple[int, ...] = (inputs, outputs) if layer.inner_product_param.transpose else (outputs, inputs)
        found = blobs[0].numel() // max(inputs, 1)
    else:
        shape = tuple(blobs[0].shape)
        if len(shape) < 2:
            raise ModelError(
                f'{source}: layer "{layer.name}" has weights of shape {list(shape)}, expected at least outputs and '
                "inputs. Do model and weights belong together?"
            )
        outputs = layer.convolution_param.num_output or shape[0]  # DepthwiseConv may omit num_output
        found = shape[0]
        if layer.type == "Deconvolution":
            found = shape[1] * layer.convolution_param.group
    if found != outputs or (len(blobs) > 1 and blobs[1].numel() != outputs) or blobs[0].numel() != int(np.prod(shape)):
        raise ModelError(
            f'{source}: layer "{layer.name}" has num_output {outputs}, but its weights have shape '
            f"{list(blobs[0].shape)}. Do model and weights belong together?"
        )
    blobs[0] = blobs[0].reshape(shape)
    if len(blobs) > 1:
        blobs[1] = blobs[1].reshape(-1)


def blob_shapes(net: ProtoMessage) -> dict[str, tuple[int, ...]]:
    """The shapes of all blobs; raises the errors of building the net (such as a layer that the engine cannot run)."""
    built = Net(net, phase=TEST_PHASE, with_gradients=False)
    return {name: blob.shape for name, blob in built.named_blobs().items()}


# ------------------------------------------------------------------ writing


def write_model(group: FileGroup, model: CaffeModel, model_file: AnyPath, weights_file: AnyPath) -> None:
    """Write the prototxt and caffemodel of a model as part of a file group."""
    group.write_text(model_file, format_text(model.net))
    with group.open(weights_file) as file:
        file.writelines(caffemodel_parts(model))


def caffemodel_parts(model: CaffeModel) -> list[bytes | memoryview]:
    """The net with its weights as a serialized NetParameter, in pieces."""
    parts: list[bytes | memoryview] = [new_message("NetParameter", name=model.net.name).SerializeToString()]
    for layer in model.net.layer:
        # Layer options are only in the prototxt.
        head = new_message("LayerParameter", name=layer.name, type=layer.type, bottom=layer.bottom, top=layer.top)
        parts += layer_parts(head.SerializeToString(), [_blob(tensor) for tensor in model.weights.get(layer.name, [])])
    return parts


def _blob(tensor: torch.Tensor) -> list[bytes | memoryview]:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_floating_point():
        return blob_parts(tuple(tensor.shape), tensor.numpy())
    message = new_message("BlobProto")
    message.shape.dim.extend(tensor.shape)
    if tensor.dtype in (torch.int8, torch.uint8):
        message.int8_data = tensor.numpy().tobytes()
    else:
        message.int32_data.extend(tensor.reshape(-1).tolist())
    return [message.SerializeToString()]


# ------------------------------------------------------------------ running on the user's data

Batch = Any
"""An array for a net with one input, a dict of arrays by input name, or a tuple of arrays in the order of the inputs;
further items of the tuple (labels) are ignored."""


def caffe_batches(data: object, inputs: BatchInputs | None = None, *, name: str = "data") -> Batches:
    """Convert data to batches of a net; a single array or dict is one batch.

    Raises:
        ArgumentTypeError: It cannot be iterated.
    """
    return Batches(
        data,
        inputs or (lambda batch: batch),
        single=(np.ndarray, torch.Tensor, Mapping),
        expected="an array or an iterable of batches",
        color="bgr",
        name=name,
    )


def sample_count(batch: Batch) -> int:
    """The number of samples in one batch."""
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()), None)
    elif isinstance(batch, (tuple, list)):
        batch = batch[0] if batch else None
    shape = np.shape(batch) if batch is not None else ()
    return shape[0] if shape else 1


@contextmanager
def equal_draws() -> Iterator[None]:
    """Start from the same random numbers each time: nets that make or shuffle their own data are compared on it."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def run_net(net: Net, batch: Batch) -> dict[str, npt.NDArray[np.float32]]:
    """Run a net on one batch and return its outputs by name.

    Raises:
        ArgumentError: the batch does not have the net's inputs.
    """
    feed(net, batch)
    with equal_draws():
        net.forward()
    results = {name: net.blob(name).tensor.detach().cpu().numpy() for name in net.outputs}
    return {name: np.array(values, np.float32, order="C") for name, values in results.items()}


def feed(net: Net, batch: Batch) -> None:
    """Copy a batch into the inputs of a net, replacing the previous batch.

    Raises:
        ArgumentError: the batch does not have the net's inputs.
    """
    for name, value in _by_name(net.inputs, batch).items():
        array = as_array(name, value) if isinstance(value, torch.Tensor) else value
        blob = net.blob(name)
        try:
            if np.iscomplexobj(array):
                raise TypeError("complex numbers")
            blob.set_shape(np.shape(array))
            blob.data[...] = array
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"a batch must hold arrays of numbers, got {type(value).__name__}: {error}") from error


def input_blobs(model: CaffeModel) -> list[str]:
    """The names of a net's inputs, in order."""
    return [name for layer in model.layers if layer.type == "Input" for name in layer.top]


def inputs_by_name(names: list[str], batch: Batch) -> dict[str, npt.NDArray[Any]]:
    """A batch as arrays by input name.

    Raises:
        ArgumentError: the batch does not have these inputs.
    """
    return {name: as_array(name, value, np.float32) for name, value in _by_name(names, batch).items()}


def _by_name(names: list[str], batch: Batch) -> Mapping[str, Any]:
    given: Mapping[str, Any] | None
    if isinstance(batch, Mapping):
        given = batch
    elif isinstance(batch, (tuple, list)) and len(batch) >= len(names) > 0 and hasattr(batch[0], "shape"):
        given = dict(zip(names, batch, strict=False))
    else:
        given = {names[0]: batch} if len(names) == 1 else None
    if given is None or set(given) != set(names):
        got = sorted(given) if given is not None else "one array"
        raise ArgumentError(f"a batch must be a dict with the arrays of the net's inputs {names}, got {got}")
    return given
