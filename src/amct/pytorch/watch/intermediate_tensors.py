"""Observes the tensors between the layers, which the fast QDQ placement quantizes too.

The exporter says which tensors it wants by their ONNX names; the float ONNX model knows which tensors of the captured
program those are. To meet them again in the user's own forward (any batch size, no captured program), the program and
the model are run once on the example input: where the model computes the very bits that the program has for a tensor,
that is its place. Results and inputs of layers are seen by hooks on the layers themselves.
"""

from __future__ import annotations

import logging
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from amct.errors import ModelError
from amct.numerics.layer_inputs import LayerInputObserver
from amct.numerics.min_max import MinMaxObserver
from amct.pytorch.arrays import as_array
from amct.pytorch.capture.example_inputs import example_inputs
from amct.pytorch.capture.program import quiet_exporters
from amct.pytorch.model_copy import copy_model
from amct.pytorch.watch.call_sites import OperationWatch, Place
from amct.pytorch.watch.layer_hooks import given_input, unwatched

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from amct.calibration import CalibrationSession
    from amct.numerics.observer import TensorObserver
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.watch.layer_hooks import Arguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerInput:
    """The input of a layer: its ONNX name, where its channels are, and the weights of the linear layers that read it.

    ``weight`` is None when it is not to be balanced.
    """

    tensor: str
    channel_axis: int
    weight: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class TensorWatch:
    """Where the wanted tensors are made; each place by the names (in the ONNX file) of the tensors it makes.

    ``missing`` are those that were not found, and stay without factors. ``given`` are layers whose input is watched
    channel by channel.
    """

    inputs: Mapping[int, str] = field(default_factory=dict)
    layers: Mapping[str, str] = field(default_factory=dict)
    operations: Mapping[Place, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    given: Mapping[str, LayerInput] = field(default_factory=dict)

    def observers(self) -> dict[str, TensorObserver]:
        """A new observer for each tensor: cheap, because there are many and none of them decides what a layer gets."""
        names = (*self.inputs.values(), *self.layers.values(), *self.operations.values())
        channels = {
            given.tensor: LayerInputObserver(channel_axis=given.channel_axis, weight=given.weight)
            for given in self.given.values()
        }
        return {**channels, **{name: MinMaxObserver() for name in names}}

    def attach(self, model: nn.Module, session: CalibrationSession) -> Watching:
        """Let a session see these tensors whenever the model runs."""
        return Watching(self, model, session)


class Watching:
    """The hooks of a ``TensorWatch`` in one model."""

    def __init__(self, watch: TensorWatch, model: nn.Module, session: CalibrationSession) -> None:
        self._watch = watch
        self._model = model
        self._session = session
        self._handles: list[RemovableHandle] = []
        for path, name in watch.layers.items():
            self._handles.append(model.get_submodule(path).register_forward_hook(self._shows(name)))
        for path, given in watch.given.items():
            hook = self._shows_input(given.tensor)
            self._handles.append(model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True))
        self._operations: OperationWatch | None = None
        if watch.operations:
            wanted = frozenset((place.path, place.operation) for place in watch.operations)
            self._operations = OperationWatch(model, self._see, wanted)

    @contextmanager
    def forward(self, arguments: Arguments) -> Iterator[None]:
        """Around one forward pass."""
        if self._watch.inputs:
            self._see_inputs(arguments)
        if self._operations is None:
            yield
            return
        with self._operations.forward():
            yield

    def detach(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        if self._operations is not None:
            self._operations.detach()

    def _shows(self, name: str) -> Callable[..., None]:
        def show(_: nn.Module, __: object, output: object) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, torch.Tensor):
                with unwatched():
                    self._session.observe_tensor(name, tensor)

        return show

    def _shows_input(self, name: str) -> Callable[..., None]:
        def show(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = given_input(args, kwargs)
            if x is not None:
                with unwatched():
                    self._session.observe_tensor(name, x)

        return show

    def _see(self, place: Place, tensor: Tensor) -> None:
        name = self._watch.operations.get(place)
        if name is not None:
            self._session.observe_tensor(name, tensor)
            return
        for other, wanted in self._watch.operations.items():
            same = (place.path, place.call, place.operation) == (other.path, other.call, other.operation)
            if same and place.function != other.function:
                self._session.give_up_tensor(wanted, "another batch takes another way through the model")

    def _see_inputs(self, arguments: Arguments) -> None:
        args, kwargs = arguments
        try:
            tensors = example_inputs(self._model, (*args, kwargs)).tensors()
        except ModelError:  # the forward itself will say what is wrong
            return
        for index, name in self._watch.inputs.items():
            if index < len(tensors):
                self._session.observe_tensor(name, tensors[index])


# -- finding the places ------------------------------------------------------------------------------------------------


def find_tensors(
    traced: Traced, fusions: Mapping[str, str], wanted: Collection[str], onnx_names: Mapping[str, str]
) -> TensorWatch:
    """Find where the tensors that have these ONNX names are made.

    Args:
        traced: the model, with a program.
        fusions: the batch norm folded into each layer; what it made, the layer makes now.
        wanted: ONNX names.
        onnx_names: the ONNX name of each activation of the topology (``FloatOnnx.tensors``).
    """
    assert traced.graph is not None
    hooked = {layer: layer for layer in traced.layers} | {norm: layer for layer, norm in fusions.items()}
    inputs: dict[int, str] = {}
    layers: dict[str, str] = {}
    others: dict[str, str] = {}  # by the tensor of the topology
    missing: list[str] = []
    for name in wanted:
        aliases = [tensor for tensor, onnx_name in onnx_names.items() if onnx_name == name]
        producers = [traced.graph.producer(tensor) for tensor in aliases]
        given = next((tensor for tensor in aliases if tensor in traced.graph.inputs), None)
        layer = next((hooked[node.name] for node in producers if node and node.name in hooked), None)
        if given is not None:
            inputs[traced.graph.inputs.index(given)] = name
        elif layer is not None:
            layers[layer] = name
        elif aliases:
            others[aliases[0]] = name
        else:
            missing.append(name)
    operations, lost = _find_operations(traced, others) if others else ({}, [])
    missing += lost
    if missing:
        logger.info("not observed, because their place in the forward was not found: %s", ", ".join(missing))
    return TensorWatch(inputs=inputs, layers=layers, operations=operations, missing=tuple(missing))


Print = tuple[tuple[int, ...], torch.dtype, int]
_GUARDS = "_guards_fn"  # torch.export's name for the module that checks the inputs of a program


def _find_operations(traced: Traced, names: Mapping[str, str]) -> tuple[dict[Place, str], list[str]]:
    prints = _program_prints(traced, names)
    shapes = {(print_[0], print_[1]) for print_ in prints.values()}
    places: dict[Print, list[Place]] = {}

    def note(place: Place, tensor: Tensor) -> None:
        if (tuple(tensor.shape), tensor.dtype) in shapes:
            places.setdefault(_print(tensor), []).append(place)

    model = copy_model(traced.model)
    watch = OperationWatch(model, note, None)
    args, kwargs = _cloned(traced)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), watch.forward():
        model(*args, **kwargs)
    assert traced.graph is not None
    found: dict[Place, str] = {}
    lost: list[str] = []
    for tensor, name in names.items():
        producer = traced.graph.producer(tensor)
        module = producer.attributes["module"] if producer is not None else None
        candidates = places.get(prints[tensor], []) if tensor in prints else []
        free = [place for place in candidates if place not in found]
        # Equal bits at several places (an identity, a view): the one in the right module, else the first.
        best = next((place for place in free if place.path == module), free[0] if free else None)
        if best is None:
            lost.append(name)
        else:
            found[best] = name
    return found, lost


def _program_prints(traced: Traced, wanted: Collection[str]) -> dict[str, Print]:
    """The bits that the captured program computes for some tensors, on the example input."""
    assert traced.program is not None
    prints: dict[str, Print] = {}

    class _Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401  any value of the program
            if n.target == _GUARDS:  # they watch strides too, and a clone of a slice has others
                return None
            value = super().run_node(n)
            if n.name in wanted and isinstance(value, torch.Tensor):
                prints[n.name] = _print(value)
            return value

    with quiet_exporters(), torch.random.fork_rng(devices=[]), torch.no_grad():
        module = traced.program.module()
        _own_buffers(module)
        _Noting(module).run(*pytree.tree_leaves(_cloned(traced)), enable_io_processing=False)
    return prints


def _cloned(traced: Traced) -> Arguments:
    """The example input, for a forward that may write to it."""
    arguments: Arguments = pytree.tree_map_only(
        torch.Tensor, torch.Tensor.clone, (traced.inputs.args, traced.inputs.kwargs)
    )
    return arguments


def _own_buffers(module: nn.Module) -> None:
    """Let a program that shares the user's tensors write to copies of the buffers."""
    for name, buffer in list(module.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, buffer.clone())


def _print(tensor: Tensor) -> Print:
    return tuple(tensor.shape), tensor.dtype, zlib.crc32(as_array(tensor).tobytes())
