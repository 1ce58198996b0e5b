"""Layers made of functional calls: child modules of a copied model, called in place of the torch functions.

The module that holds the parameter gets a child for each layer: ``attn.in_proj_weight`` is computed by the child
``amct_functional_in_proj_weight`` of ``attn``. While the copy's forward runs, a ``TorchFunctionMode`` of this forward
passes each such call on to the child. So hooks, captured programs and ONNX see a module like any other, and
nn.MultiheadAttention takes its ordinary path: torch has its fast path for tensors without modes only.

A layer may be called as a module and its weight be used in functional calls as well. What its own forward calls is not
passed on: hooks note while it runs.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from amct.pytorch.capture.layer_types import LAYER_TYPES, is_layer
from amct.pytorch.functional.calls import base_of, channels_of, functional_call, opened
from amct.pytorch.model_copy import copy_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from amct.model import Skip
    from amct.pytorch.functional.calls import Channels, FunctionalCall, Settings

_PREFIX = "amct_functional_"
_LAYERS = "amct_functional_layers"
_state = threading.local()


@dataclass(frozen=True, kw_only=True)
class LayerSource:
    """What a functional layer is made of: output channels of a parameter, and how the function is called.

    ``calls``: how often in one forward.
    """

    parameter: str
    channels: Channels
    type: str
    settings: Settings = ()
    with_bias: bool = False
    calls: int = 1

    @property
    def kind(self) -> tuple[object, ...]:
        """What tells the calls on one parameter apart."""
        return self.channels, self.type, self.settings, self.with_bias


@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionalLayer:
    """A layer found in the functional calls of a model; ``bias`` is its value."""

    name: str
    source: LayerSource
    bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class FunctionalLayers:
    """The functional layers of a model.

    Attributes:
        sources: What each layer is made of, by name.
        problems: Functional calls on parameters that cannot be layers.
    """

    sources: Mapping[str, LayerSource]
    problems: tuple[Skip, ...]

    def by_call(self, model: nn.Module) -> dict[tuple[int, Any], nn.Module]:
        """The layers by the identity of their parameter in ``model``, and the rest of their source."""
        return {
            (id(_stored(model, source.parameter)), source.kind): model.get_submodule(child_path(name))
            for name, source in self.sources.items()
        }


def child_path(name: str) -> str:
    """The path of the child that computes a layer; the part in brackets has no points."""
    owner, point, last = name.rpartition(".")
    return f"{owner}{point}{_PREFIX}{last}"


def _stored(model: nn.Module, parameter: str) -> Any:  # noqa: ANN401  a parameter, or what replaces it while capturing
    owner, _, attribute = parameter.rpartition(".")
    return getattr(model.get_submodule(owner), attribute)


def _as_module(layer: FunctionalLayer, parameter: Tensor) -> nn.Module:
    source = layer.source
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
    if layer.bias is not None:
        module.bias = nn.Parameter(layer.bias, requires_grad=parameter.requires_grad)
    return module.eval()  # type: ignore[no-any-return]


def with_functional_layers(model: nn.Module, layers: Sequence[FunctionalLayer], problems: Sequence[Skip]) -> nn.Module:
    """A copy that shares the model's tensors and calls these layers in place of the torch functions."""
    duplicate = copy_model(model, share_tensors=True)
    for layer in layers:
        owner, _, child = child_path(layer.name).rpartition(".")
        module = _as_module(layer, _stored(duplicate, layer.source.parameter))
        duplicate.get_submodule(owner).add_module(child, module)
    for owner in {layer.source.parameter.rpartition(".")[0] for layer in layers}:
        module = duplicate.get_submodule(owner)
        if is_layer(module):
            module.register_forward_pre_hook(_enter)
            module.register_forward_hook(_leave)
    sources = {layer.name: layer.source for layer in layers}
    setattr(duplicate, _LAYERS, FunctionalLayers(sources=sources, problems=tuple(problems)))
    forward = duplicate.forward
    redirected = functools.partial(_redirected_forward, duplicate, forward)  # unlike a closure it is copied and pickled
    duplicate.forward = functools.update_wrapper(redirected, forward)  # keeps the signature
    return duplicate


def take_functional_layers(model: nn.Module) -> FunctionalLayers | None:
    """Take the functional layers out of a copy again, in place: its functions compute as the user wrote them."""
    layers = functional_layers(model)
    if layers is None:
        return None
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
    layers = functional_layers(model)
    assert layers is not None
    before, _state.running = _running(), []
    try:
        with _Redirection(layers.by_call(model)):
            return forward(*args, **kwargs)
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


class _Redirection(TorchFunctionMode):
    """Passes functional calls on to layers."""

    def __init__(self, layers: Mapping[tuple[int, Any], nn.Module]) -> None:
        super().__init__()
        self._layers = layers
        self._parameters = frozenset(identity for identity, _ in layers)

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401  torch's protocol
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        attention = opened(func)
        if attention is not None:
            with self:
                return attention(*args, **kwargs)
        call = functional_call(func, args, kwargs)
        layer = self._layer_of(call) if call is not None else None
        return func(*args, **kwargs) if call is None or layer is None else layer(call.input)

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


def functional_layers(model: nn.Module) -> FunctionalLayers | None:
    """The functional layers of a model; None if it has none."""
    found = vars(model).get(_LAYERS)
    return found if isinstance(found, FunctionalLayers) else None


def layer_name(path: str) -> str:
    """The name of the layer at a module path, or of its parameter: for a functional layer without the prefix."""
    return path.replace(_PREFIX, "")


def layer_module(model: nn.Module, name: str) -> nn.Module:
    """The module of a layer, functional or not.

    Raises:
        AttributeError: there is none.
    """
    layers = functional_layers(model)
    return model.get_submodule(child_path(name) if layers is not None and name in layers.sources else name)


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As ``named_modules``, with functional layers by their names."""
    return ((layer_name(path), module) for path, module in model.named_modules())
