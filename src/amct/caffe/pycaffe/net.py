"""``caffe.Net``: the engine's net with pycaffe's arguments, dictionaries and return values; in torch or onnxruntime.

Torch takes 20 to 30 µs to begin any convolution. A net of small convolutions spends up to half of its time there, so
one that frees its blobs runs in onnxruntime, unless the user chose. The choice follows from the net and its shapes,
never from a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, TypeVar, overload

import numpy as np

from amct.atomic import is_file
from amct.caffe.engine.blob import current_device
from amct.caffe.engine.layer import TEST, count
from amct.caffe.engine.layers.input import MemoryData
from amct.caffe.engine.layers.python_layer import BlobList
from amct.caffe.engine.layers.weighted import Convolution, Deconvolution
from amct.caffe.engine.messages import located_in, read_net_message
from amct.caffe.engine.net import Net as EngineNet
from amct.errors import ArgumentError, ArgumentTypeError, FileError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from amct.caffe.engine.blob import Blob, FloatArray
    from amct.caffe.engine.layer import Layer
    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.engine.plan import PassPlan

    Arrays = dict[str, FloatArray]

Value = TypeVar("Value")
#: Anything that NumPy can assign to a blob.
ArrayArgument: TypeAlias = Any

_SIGNATURE = (
    "Net(network_file, phase, level=0, stages=None, weights=None) or Net(network_file, weights, phase); in addition to "
    "Caffe's: keep_blobs=True, allow_python=False, runtime=None"
)
_POSITIONAL = ("network_file", "phase", "level", "stages", "weights")
_EXTRA = ("keep_blobs", "allow_python", "custom_proto", "runtime")


class NetFileError(FileError, RuntimeError):
    """A prototxt or caffemodel cannot be opened; pycaffe raises RuntimeError here."""


class cached(cached_property[Value]):  # noqa: N801  used as a decorator
    """A cached property that cannot be assigned to."""

    def __set__(self, instance: object, value: object) -> None:
        raise AttributeError(f"Net.{self.attrname} cannot be assigned to; change its blobs instead")


class Net(EngineNet):
    """A net with pycaffe's interface.

    Call ``Net(network_file, phase, level=0, stages=None, weights=None)`` or the older ``Net(network_file, weights,
    phase)``. ``keep_blobs=False`` frees blobs after use, ``allow_python=True`` allows Python layers (they execute
    code). ``runtime`` is "torch" or "onnxruntime", where only a net that frees its blobs can run; by default such a net
    runs there if its convolutions are small.
    """

    _runtime: RuntimeChoice | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        options = _read_arguments(args, kwargs)
        path, weights = options["network_file"], options["weights"]
        for file in (path, weights):
            if file is not None and not is_file(file):
                raise NetFileError(f"Could not open file {file}")
        with located_in(path):
            super().__init__(
                read_net_message(path, options.get("custom_proto") or None),
                phase=options["phase"],
                level=options["level"],
                stages=list(options["stages"] or ()),
                keep_blobs=options.get("keep_blobs", True),
                allow_python=options.get("allow_python", False),
            )
        self._runtime = RuntimeChoice(self, options.get("runtime"), frees_blobs=self._kept is not None)
        if weights is not None:
            self.copy_from(weights)

    def _bind(self, plan: PassPlan) -> None:
        if self._runtime is None or not plan.is_whole:
            plan.bind()
        else:
            self._runtime.bind(self, plan)

    @classmethod
    def from_parameter(cls, parameter: ProtoMessage, **options: Any) -> Net:  # noqa: ANN401 - the engine Net's own
        """A net from a NetParameter message; ``options`` as for the engine's Net (phase, level, stages, ...)."""
        net = cls.__new__(cls)
        EngineNet.__init__(net, parameter, **options)
        return net

    # ------------------------------------------------------------------ dictionaries, in net order, cached

    @cached
    def blobs(self) -> OrderedDict[str, Blob]:
        """All blobs by name."""
        return self.named_blobs()

    @cached
    def params(self) -> OrderedDict[str, BlobVec]:
        """The parameter blobs of every layer that has any."""
        return OrderedDict((layer.name, BlobVec(layer.blobs)) for layer in self.layers if layer.blobs)

    @cached
    def layer_dict(self) -> OrderedDict[str, Layer]:
        """All layers by name (the last one where a name occurs twice)."""
        return OrderedDict((layer.name, layer) for layer in self.layers)

    @cached
    def top_names(self) -> OrderedDict[str, list[str]]:
        """The tops of each layer."""
        return OrderedDict((node.layer.name, self._names(node.tops)) for node in self.graph.nodes)

    @cached
    def bottom_names(self) -> OrderedDict[str, list[str]]:
        """The bottoms of each layer."""
        return OrderedDict((node.layer.name, self._names(node.bottoms)) for node in self.graph.nodes)

    @cached
    def blob_loss_weights(self) -> OrderedDict[str, float]:
        """The loss weight of each blob."""
        return OrderedDict(zip(self.graph.blob_names, self.graph.loss_weights, strict=True))

    def _names(self, indices: list[int]) -> list[str]:
        return [self.graph.blob_names[index] for index in indices]

    @property
    def _layer_names(self) -> list[str]:
        return self.layer_names

    @property
    def _blob_names(self) -> list[str]:
        return self.graph.blob_names

    @property
    def _blobs_list(self) -> list[Blob]:
        return self.graph.blobs

    @property
    def _inputs(self) -> list[int]:
        return self.graph.inputs

    @property
    def _outputs(self) -> list[int]:
        return self.graph.outputs

    def _top_ids(self, index: int) -> list[int]:
        return self.graph.nodes[index].tops

    def _bottom_ids(self, index: int) -> list[int]:
        return self.graph.nodes[index].bottoms

    # ------------------------------------------------------------------ running

    def _forward(self, start: int, end: int) -> float:
        return EngineNet.forward(self, start, end)

    def _backward(self, start: int, end: int) -> None:
        EngineNet.backward(self, start, end)

    def forward(  # type: ignore[override]  # pycaffe's arguments, not the engine's
        self,
        blobs: Sequence[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **inputs: ArrayArgument,
    ) -> Arrays:
        """Run the net and return its outputs (with ``end``: that layer's tops) and the requested ``blobs``, as views.

        Raises:
            ArgumentError: A layer or input is unknown, inputs are missing, or the first axis does not fit.
        """
        first = 0 if start is None else _index(self._layer_names, start)
        last = len(self.graph.nodes) - 1 if end is None else _index(self._layer_names, end)
        wanted = list(dict.fromkeys([*(self.top_names[end] if end is not None else self.outputs), *(blobs or [])]))
        if inputs:
            for blob, value in self._paired(
                inputs, self.inputs, "Input", "Input blob arguments do not match net inputs"
            ):
                blob.data[...] = value
        known = self.blobs
        EngineNet.forward(self, first, last, keep=[name for name in wanted if name in known])
        return {name: known[name].data for name in wanted}

    def _paired(
        self, given: dict[str, Any], names: list[str], what: str, mismatch: str
    ) -> Iterator[tuple[Blob, ArrayArgument]]:
        """Each given array with its blob; ``what`` and ``mismatch`` begin the error messages."""
        if set(given) != set(names):
            raise ArgumentError(f"{mismatch}. Got {sorted(given)}, the net has {names}")
        for name, value in given.items():
            blob = self.blobs[name]
            if value.shape[0] != blob.shape[0]:
                raise ArgumentError(
                    f'{what} is not batch sized: "{name}" has {value.shape[0]} along axis 0, its blob {blob.shape[0]}'
                )
            yield blob, value

    def backward(  # type: ignore[override]  # pycaffe's arguments, not the engine's
        self,
        diffs: Sequence[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **top_diffs: ArrayArgument,
    ) -> Arrays:
        """Compute gradients from layer ``start`` to ``end``; return those of the inputs and of ``diffs``, as views.

        Raises:
            ArgumentError: A layer or output is unknown, or the first axis does not fit.
        """
        names = self._layer_names
        first = _index(names, start) if start is not None else len(names) - 1
        last = _index(names, end) if end is not None else 0
        wanted = dict.fromkeys([*(self.bottom_names[end] if end is not None else self.inputs), *(diffs or [])])
        if top_diffs:
            for blob, value in self._paired(
                top_diffs, self.outputs, "Diff", "Top diff arguments do not match net outputs"
            ):
                blob.diff[...] = value
        EngineNet.backward(self, first, last)
        return {name: self.blobs[name].diff for name in wanted}

    def forward_all(self, blobs: Sequence[str] | None = None, **inputs: ArrayArgument) -> Arrays:
        """Run any number of inputs in batches of the net's size; the last batch is padded and its results cropped."""
        collected: dict[str, list[FloatArray]] = {name: [] for name in {*self.outputs, *(blobs or [])}}
        for batch in self._batch(inputs):
            for name, value in self.forward(blobs=blobs, **batch).items():
                collected[name].extend(value.copy())
        return _without_padding(collected, inputs)

    def forward_backward_all(
        self,
        blobs: Sequence[str] | None = None,
        diffs: Sequence[str] | None = None,
        **inputs: ArrayArgument,
    ) -> tuple[Arrays, Arrays]:
        """Run forward and backward in batches; returns outputs and gradients of all inputs.

        The keyword arguments hold the inputs and, under the outputs' names, the top diffs.
        """
        values = {name: inputs[name] for name in self.inputs if name in inputs}
        top_diffs = {name: inputs[name] for name in self.outputs if name in inputs}
        outputs: dict[str, list[FloatArray]] = {name: [] for name in {*self.outputs, *(blobs or [])}}
        gradients: dict[str, list[FloatArray]] = {name: [] for name in {*self.inputs, *(diffs or [])}}
        nothing: dict[str, Any] = {}
        for forward_batch, backward_batch in zip_longest(
            self._batch(values), self._batch(top_diffs), fillvalue=nothing
        ):
            for name, value in self.forward(blobs=blobs, **forward_batch).items():
                outputs[name].extend(value.copy())
            for name, value in self.backward(diffs=diffs, **backward_batch).items():
                gradients[name].extend(value.copy())
        return _without_padding(outputs, inputs), _without_padding(gradients, inputs)

    def _batch(self, arrays: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Split arrays into batches of the net's size, the last one padded with zeros."""
        if not arrays:
            return
        total = len(next(iter(arrays.values())))
        size = next(iter(self.blobs.values())).shape[0]
        whole = total - total % size
        for start in range(0, whole, size):
            yield {name: value[start : start + size] for name, value in arrays.items()}
        if whole < total:
            last = {}
            for name, value in arrays.items():
                rest = np.asarray(value[whole:])
                last[name] = np.concatenate([rest, np.zeros((size - len(rest), *rest.shape[1:]), rest.dtype)])
            yield last

    # ------------------------------------------------------------------ weights and callbacks

    copy_from = EngineNet.load_weights
    load_hdf5 = EngineNet.load_weights
    share_with = EngineNet.share_weights
    clear_param_diffs = EngineNet.clear_parameter_gradients

    def save(self, path: str) -> None:
        """Write a binary caffemodel."""
        self.save_weights(path)

    def save_hdf5(self, path: str, write_diff: bool = False) -> None:
        """Write an HDF5 caffemodel."""
        self.save_weights_hdf5(path, with_diff=write_diff)

    def set_input_arrays(self, data: ArrayArgument, labels: ArrayArgument) -> None:
        """Set the arrays of the net's MemoryData layer, which must be the first layer.

        Raises:
            ModelError: The first layer is of another type, or the arrays do not fit it.
        """
        first = self.layers[0] if self.layers else None
        if not isinstance(first, MemoryData):
            raise ModelError("set_input_arrays may only be called if the first layer is a MemoryDataLayer")
        first.set_arrays(data, labels)

    def before_forward(self, callback: Callable[[int], object]) -> None:
        """Call ``callback(layer index)`` before each layer's forward."""
        self.on("before_forward", callback)

    def after_forward(self, callback: Callable[[int], object]) -> None:
        """Call ``callback(layer index)`` after each layer's forward."""
        self.on("after_forward", callback)

    def before_backward(self, callback: Callable[[int], object]) -> None:
        """Call ``callback(layer index)`` before each layer's backward."""
        self.on("before_backward", callback)

    def after_backward(self, callback: Callable[[int], object]) -> None:
        """Call ``callback(layer index)`` after each layer's backward."""
        self.on("after_backward", callback)


class BlobVec(BlobList):
    """The parameter blobs of one layer."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> Blob: ...

    @overload
    def __getitem__(self, index: slice) -> list[Blob]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Blob | list[Blob]:
        if isinstance(index, int) and not -len(self) <= index < len(self):
            raise IndexError("Index out of range")
        return super().__getitem__(index)


def _index(names: list[str], name: str) -> int:
    if name not in names:
        raise ArgumentError(f"'{name}' is not in list of layers: {', '.join(names)}")
    return names.index(name)


def _without_padding(collected: dict[str, list[FloatArray]], inputs: dict[str, Any]) -> Arrays:
    if not inputs:
        raise RuntimeError("forward_all needs at least one input array, to know how many batches to run")
    total = len(next(iter(inputs.values())))
    return {name: np.asarray(values[:total] if len(values) > total else values) for name, values in collected.items()}


def _read_arguments(args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, Any]:
    """Distinguish the two call forms: the second argument is a phase (a number) or a weights file."""
    options: dict[str, Any] = {"level": 0, "stages": None, "weights": None}
    old_form = len(args) == 3 and not isinstance(args[1], int)
    names: Iterable[str] = ("network_file", "weights", "phase") if old_form else _POSITIONAL
    given = dict(zip(names, args, strict=False))
    unknown = set(kwargs) - set(_POSITIONAL) - set(_EXTRA)
    if len(args) > len(_POSITIONAL) or unknown or set(given) & set(kwargs):
        raise ArgumentTypeError(f"Net: unexpected arguments {args[1:]} {sorted(kwargs)}: expected {_SIGNATURE}")
    options.update(given, **kwargs)
    if "network_file" not in options or not isinstance(options.get("phase"), (int, np.integer)):
        raise ArgumentTypeError(
            f"Net: arguments do not match: expected {_SIGNATURE}; phase is caffe.TRAIN or caffe.TEST"
        )
    for name in ("network_file", "weights"):
        if options[name] is not None and not isinstance(options[name], (str, Path)):
            raise ArgumentTypeError(
                f"Net: {name} must be a path, got {type(options[name]).__name__}: expected {_SIGNATURE}"
            )
    return options


TORCH, ONNXRUNTIME = "torch", "onnxruntime"
#: Torch computes so many products in about six times the time that it takes to begin.
SMALL_CONVOLUTION = 2**23
#: onnxruntime copies the parameters, several times while it loads them: 64 MiB are few.
FEW_PARAMETERS = 2**24
#: Loading a net takes as long as some passes: one whose shapes or parameters change all the time runs in torch.
MOST_SESSIONS = 4


class RuntimeChoice:
    """The runtime of one net.

    Args:
        net: The net.
        runtime: The user's choice, or None.
        frees_blobs: Whether the net frees blobs after their last reader.

    Raises:
        ArgumentError: There is no such runtime, or the net cannot run in it.
    """

    def __init__(self, net: EngineNet, runtime: object, *, frees_blobs: bool) -> None:
        if runtime not in (None, TORCH, ONNXRUNTIME):
            raise ArgumentError(f'Net: runtime: expected None, "{TORCH}" or "{ONNXRUNTIME}", got {runtime!r}')
        can_run = frees_blobs and net.phase == TEST
        if runtime == ONNXRUNTIME and not can_run:
            raise ArgumentError(
                f'Net: runtime="{ONNXRUNTIME}" computes only inputs, outputs and blobs named in keep_blobs: it needs '
                "keep_blobs=False (or names) and phase caffe.TEST"
            )
        self._is_demanded = runtime == ONNXRUNTIME
        self._sessions_left = MOST_SESSIONS if can_run and runtime != TORCH else 0

    def bind(self, net: EngineNet, plan: PassPlan) -> None:
        """Find a way to repeat a plan of all layers of the net, which was just run."""
        can_run = plan.bind() and self._sessions_left and current_device().type == "cpu"
        if not can_run or not (self._is_demanded or is_small(net)):
            return
        from amct.caffe.onnx.session_pass import repeat_in_session  # onnx and onnxruntime take a while to import

        if not repeat_in_session(net, plan, is_demanded=self._is_demanded):
            self._sessions_left = 0
        elif not self._is_demanded:
            self._sessions_left -= 1


def is_small(net: EngineNet) -> bool:
    """Whether a net has few parameters, and convolutions that are small on average, in its current shapes."""
    products = [
        count(net.graph.blobs[index].shape) * count(node.layer.weight_shape()[1:])
        for node in net.graph.nodes
        if isinstance(node.layer, Convolution | Deconvolution)
        for index in (node.bottoms if node.layer.transposed else node.tops)
    ]
    parameters = sum(count(blob.shape) for layer in net.layers for blob in layer.blobs)
    return 0 < sum(products) <= SMALL_CONVOLUTION * len(products) and parameters <= FEW_PARAMETERS
