"""Layers made of functional calls: child modules of a copied model, called in place of the torch functions.

The module that holds the parameter gets a child for each layer: ``attn.in_proj_weight`` is computed by the child
``amct_functional_in_proj_weight`` of ``attn``. While the copy's forward runs, a mode of this forward
passes each such call on to the child. So hooks, captured programs and ONNX see a module like any other, and
nn.MultiheadAttention takes its ordinary path: torch has its fast path for tensors without modes only.

A layer may be called as a module and its weight be used in functional calls as well. What its own forward calls is not
passed on: hooks note while it runs.

Finds functional calls on parameters by running a copy of the model once on the example input.
"""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from amct.export.onnx.messages import fresh_name
from amct.model import Skip
from amct.pytorch.call_sites import FunctionMode
from amct.pytorch.capture.functional_calls import base_of, channels_of, functional_calls
from amct.pytorch.capture.layer_types import (
    LAYER_TYPES,
    ComputedWeight,
    computed_weight,
    is_layer,
    store_weights,
    with_stored_weight,
)
from amct.pytorch.user_model import copy_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from amct.pytorch.capture.functional_calls import AnyPart, FunctionalCall, Settings
    from amct.pytorch.inputs import ExampleInputs

_PREFIX = "amct_functional_"
_LAYERS = "amct_functional_layers"
_state = threading.local()


@dataclass(frozen=True, kw_only=True)
class LayerSource:
    """What a functional layer is made of: output channels of a parameter, and how the function is called.

    ``calls``: how often in one forward.
    """

    parameter: str
    channels: AnyPart
    type: str
    settings: Settings = ()
    with_bias: bool = False
    calls: int = 1

    @property
    def kind(self) -> tuple[object, ...]:
        """What tells the calls on one parameter apart."""
        return self.channels, self.type, self.settings, self.with_bias


@dataclass(frozen=True, kw_only=True)
class FunctionalLayers:
    """The functional layers of a model.

    Attributes:
        sources: What each layer is made of, by name.
        problems: Functional calls on parameters that cannot be layers.
        stored: The paths of layers that compute with their own weight in place of one computed in their forward.
    """

    sources: Mapping[str, LayerSource]
    problems: tuple[Skip, ...]
    stored: frozenset[str] = frozenset()

    def by_call(self, model: nn.Module) -> dict[tuple[int, Any], nn.Module]:
        """The layers by the identity of their parameter in ``model``, and the rest of their source."""
        return {
            (id(_stored(model, source.parameter)), source.kind): model.get_submodule(child_path(name))
            for name, source in self.sources.items()
        }


_NO_LAYERS = FunctionalLayers(sources={}, problems=())


def child_path(name: str) -> str:
    """The path of the child that computes a layer; the part in brackets has no points."""
    owner, point, last = name.rpartition(".")
    return f"{owner}{point}{_PREFIX}{last}"


def _stored(model: nn.Module, parameter: str) -> Any:  # noqa: ANN401  a parameter, or what replaces it while capturing
    owner, _, attribute = parameter.rpartition(".")
    return getattr(model.get_submodule(owner), attribute)


def _as_module(source: LayerSource, parameter: Tensor, bias: Tensor | None) -> nn.Module:
    weight = source.channels.of(parameter.detach())
    settings = dict(source.settings)
    groups = settings.get("groups", 1)
    if source.type == "Linear":
        sizes = (weight.shape[1], weight.shape[0])
    elif source.type.startswith("ConvTranspose"):
        sizes = (weight.shape[0], weight.shape[1] * groups)
    else:
        sizes = (weight.shape[1] * groups, weight.shape[0])
    kernel = () if source.type == "Linear" else (tuple(weight.shape[2:]),)
    # On the meta device neither memory nor random numbers are spent on parameters that are replaced at once.
    module: Any = LAYER_TYPES[source.type].layer_class(*sizes, *kernel, bias=False, device="meta", **settings)
    module.weight = nn.Parameter(weight, requires_grad=parameter.requires_grad)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=parameter.requires_grad)
    return module.eval()  # type: ignore[no-any-return]


def _with_functional_layers(
    model: nn.Module,
    found: FunctionalLayers,
    biases: Mapping[str, Tensor],
    computed: Mapping[str, ComputedWeight],
) -> nn.Module:
    """A copy that shares the model's tensors and calls these layers in place of the torch functions.

    ``biases`` has the values of biases by layer. Layers that compute their weight have the values of ``computed``.
    """
    duplicate = copy_model(model, share_tensors=True)
    for name, source in found.sources.items():
        owner, _, child = child_path(name).rpartition(".")
        module = _as_module(source, _stored(duplicate, source.parameter), biases.get(name))
        duplicate.get_submodule(owner).add_module(child, module)
    store_weights(duplicate, computed)
    for owner in {*computed, *(source.parameter.rpartition(".")[0] for source in found.sources.values())}:
        module = duplicate.get_submodule(owner)
        if is_layer(module):
            module.register_forward_pre_hook(_enter)
            module.register_forward_hook(_leave)
    setattr(duplicate, _LAYERS, found)
    forward = duplicate.forward
    redirected = functools.partial(_redirected_forward, duplicate, forward)  # unlike a closure it is copied and pickled
    duplicate.forward = functools.update_wrapper(redirected, forward)  # keeps the signature
    return duplicate


def take_functional_layers(model: nn.Module) -> FunctionalLayers:
    """Take the functional layers out of a copy again, in place: its functions compute as the user wrote them."""
    layers = functional_layers(model)
    if layers is _NO_LAYERS:
        return layers
    for name in layers.sources:
        owner, _, child = child_path(name).rpartition(".")
        module = model.get_submodule(owner)
        del module._modules[child]
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in (_enter, _leave)]:
                del hooks[key]
    delattr(model, _LAYERS)
    _, forward = cast("functools.partial[Any]", vars(model).pop("forward")).args
    if getattr(forward, "__func__", None) is not type(model).forward:
        model.forward = forward  # the user's own, of this object only
    return layers


def _redirected_forward(model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """The forward of a copied model, with functional calls passed on to its layers."""
    with _noting_layers(), FunctionMode(_Redirection(model, functional_layers(model)), opens_attention=True):
        return forward(*args, **kwargs)


@contextmanager
def _noting_layers() -> Iterator[None]:
    """A context of a forward in which ``_enter`` and ``_leave`` note the layers whose own forward runs."""
    before, _state.running = _running(), []
    try:
        yield
    finally:
        _state.running = before


def _running() -> list[nn.Module]:
    """The layers whose own forward runs in this thread, if functional calls use their parameters."""
    found: list[nn.Module] = getattr(_state, "running", [])
    return found


def _enter(module: nn.Module, _: object) -> None:
    """Note that the forward of a layer begins."""
    _state.running = [*_running(), module]


def _leave(*_: object) -> None:
    """Note that it has ended."""
    _state.running = _running()[:-1]


class _Redirection:
    """Passes functional calls on to layers, and gives layers their stored weights."""

    def __init__(self, model: nn.Module, layers: FunctionalLayers) -> None:
        self._layers = layers.by_call(model)
        self._parameters = frozenset(identity for identity, _ in self._layers)
        self._stored = [model.get_submodule(path) for path in layers.stored]

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401  any result
        running = _running()[-1:]
        if running and any(module is running[0] for module in self._stored):
            for call in functional_calls(func, args, kwargs)[:1]:
                replaced = with_stored_weight(running[0], call, func, args, kwargs)
                if replaced is not None:
                    func, args, kwargs = replaced
                    return func(*args, **kwargs)
        for call in functional_calls(func, args, kwargs, self._is_weight):
            layer = self._layer_of(call)
            if layer is not None:
                return call.run(layer)
        return func(*args, **kwargs)

    def _is_weight(self, operand: Tensor) -> bool:
        return id(base_of(operand)) in self._parameters

    def _layer_of(self, call: FunctionalCall) -> nn.Module | None:
        parameter = base_of(call.weight)
        if id(parameter) not in self._parameters:
            return None
        if any(own is parameter for module in _running() for own in module.parameters(recurse=False)):
            return None
        channels = channels_of(call, parameter)
        if channels is None:
            return None
        return self._layers.get((id(parameter), (channels, call.type, call.settings, call.bias is not None)))


# -- layers by name ----------------------------------------------------------------------------------------------------


def functional_layers(model: nn.Module) -> FunctionalLayers:
    """The functional layers of a model; empty if it has none."""
    return vars(model).get(_LAYERS, _NO_LAYERS)  # type: ignore[no-any-return]


def layer_name(path: str) -> str:
    """The name of the layer at a module path, or of its parameter: for a functional layer without the prefix."""
    return path.replace(_PREFIX, "")


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers by name; those of a functional layer begin with its name."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {layer_name(name): tensor for name, tensor in named}


def layer_module(model: nn.Module, name: str) -> nn.Module:
    """The module of a layer, functional or not.

    Raises:
        AttributeError: there is none.
    """
    return model.get_submodule(child_path(name) if name in functional_layers(model).sources else name)


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As ``named_modules``, with functional layers by their names."""
    return ((layer_name(path), module) for path, module in model.named_modules())


# -- finding them ------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)


def find_functional_layers(model: nn.Module, inputs: ExampleInputs, *, stored: bool = False) -> nn.Module:
    """A copy of the model in which functional calls on parameters are layers; the model itself if it has none.

    What the forward of a layer computes with its own parameters belongs to that layer; other calls on them are layers
    of their own.

    Args:
        model: The model.
        inputs: An example input.
        stored: Whether layers whose forward computes their weight from parameters get the computed value as weight.
    """
    duplicate = copy_model(model)
    finder = _Finder(duplicate)
    mode = FunctionMode(finder, opens_attention=True)
    for module in filter(is_layer, duplicate.modules()):
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave)
    arguments = pytree.tree_map_only(Tensor, torch.Tensor.clone, (inputs.args, inputs.kwargs))
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad(), _noting_layers(), mode:
            warnings.simplefilter("ignore")  # calibration runs the model again and says what it has to say
            duplicate(*arguments[0], **arguments[1])
    except Exception as error:  # noqa: BLE001  the user's forward runs here; tracing it reports its error
        logger.debug("functional calls of %s are not read: %s", type(model).__name__, error)
        return model
    computed = finder.computed() if stored else {}
    found, biases = finder.result(stored=computed)
    return _with_functional_layers(model, found, biases, computed) if found != _NO_LAYERS else model


@dataclass
class _FoundCalls:
    """The calls on one part of a parameter."""

    parameter: Tensor
    call: FunctionalCall
    calls: int = 0
    problem: str | None = None


_FACTORIES = frozenset(
    {
        "arange", "eye", "full", "full_like", "linspace", "new_full", "new_ones", "new_zeros", "ones", "ones_like",
        "tensor", "zeros", "zeros_like",
    }
)  # fmt: skip
"""Functions whose result has the same values for every input."""


@dataclass(eq=False)
class _Constants:
    """The tensors computed from parameters and buffers only; kept alive, so that no identity is used again."""

    tensors: dict[int, Tensor] = field(default_factory=dict)

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self.tensors or id(base_of(tensor)) in self.tensors

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> None:  # noqa: ANN401
        """Note what a function made of constants, and what it wrote over."""
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", "")
        if name in _FACTORIES or (given and all(tensor in self for tensor in given)):
            self.tensors.update({id(tensor): tensor for tensor in made})
            return
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        for tensor in (*made, *(given[:1] if in_place else ())):
            self.tensors.pop(id(tensor), None)
            if in_place:
                self.tensors.pop(id(base_of(tensor)), None)


class _Finder:
    """Notes the functional calls on the parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._constants = _Constants({id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
        self._found: dict[tuple[str, AnyPart], _FoundCalls] = {}
        self._parts: dict[str, str] = {}
        self._called: set[str] = set()
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._computed: dict[str, ComputedWeight | None] = {}  # None: its calls differ

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401  any result
        """Note a call and execute it; the listener of a ``FunctionMode``."""
        for call in functional_calls(func, args, kwargs)[:1]:
            running = _running()
            if running and all(call.weight is not own for own in running[-1].parameters(recurse=False)):
                self._note_computed(running[-1], call)
        for call in functional_calls(func, args, kwargs, self._is_weight):
            self._note(call)
        result = func(*args, **kwargs)
        self._constants.follow(func, args, kwargs, result)
        return result

    def _is_weight(self, operand: Tensor) -> bool:
        return id(base_of(operand)) in self._names

    def _note(self, call: FunctionalCall) -> None:
        parameter = base_of(call.weight)
        name = self._names.get(id(parameter))
        if name is None or call.input in self._constants or not parameter.is_floating_point():
            return
        if any(own is parameter for module in _running() for own in module.parameters(recurse=False)):
            self._called.add(name)
            return
        channels = channels_of(call, parameter)
        if channels is None:
            self._parts[name] = f"a part of {name} that is not a range of its output channels is used"
            return
        before = self._found.setdefault((name, channels), _FoundCalls(parameter, call))
        before.calls += 1
        before.problem = before.problem or self._problem(before.call, call, channels)

    def _note_computed(self, module: nn.Module, call: FunctionalCall) -> None:
        if call.product is not None:
            return
        path, found = self._paths[id(module)], computed_weight(module, call, self._constants.__contains__)
        before = self._computed.setdefault(path, found)
        if found is None or before is None or not before.equals(found):
            self._computed[path] = None

    def computed(self) -> dict[str, ComputedWeight]:
        """The weights that layers compute from parameters, by path."""
        return {path: values for path, values in self._computed.items() if values is not None and path}

    def _problem(self, first: FunctionalCall, call: FunctionalCall, channels: AnyPart) -> str | None:
        if (first.type, first.settings) != (call.type, call.settings):
            return "its calls differ in their settings"
        if call.bias is None or first.bias is None:
            return None if call.bias is first.bias else "only some of its calls have a bias"
        if call.bias not in self._constants:
            return "its bias is computed from the input"
        if call.type == "Linear" and call.bias.shape not in {
            (size := channels.of(base_of(call.weight)).shape[0],),
            (1, size),
        }:
            return f"its bias has shape {list(call.bias.shape)}, not one value for each output channel"
        return None if torch.equal(first.bias, call.bias) else "its calls have different biases"

    def result(self, stored: Iterable[str]) -> tuple[FunctionalLayers, dict[str, Tensor]]:
        """The layers and the calls that cannot be layers, and the values of biases by layer."""
        straight = {name for name, channels in self._found if not channels.transposed} | self._called
        problems = [Skip(name, f"functional call: {reason}") for name, reason in self._parts.items()]
        sources: dict[str, LayerSource] = {}
        biases: dict[str, Tensor] = {}
        names: set[str] = set()
        for (parameter, channels), each in self._found.items():
            name = parameter + channels.label(each.parameter, marked=parameter in straight)
            name = fresh_name(name, names)
            if each.problem is not None:
                problems.append(Skip(name, f"functional call of {each.call.type}: {each.problem}"))
                continue
            bias = each.call.bias
            sources[name] = LayerSource(
                parameter=parameter,
                channels=channels,
                type=each.call.type,
                settings=each.call.settings,
                with_bias=bias is not None,
                calls=each.calls,
            )
            if bias is not None:
                biases[name] = bias.detach().reshape(-1).clone()
        return FunctionalLayers(sources=sources, problems=tuple(problems), stored=frozenset(stored)), biases
