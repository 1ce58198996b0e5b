"""Finds functional calls on parameters by running a copy of the model once on the example input."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from amct.model import Skip
from amct.pytorch.capture.layer_types import is_layer
from amct.pytorch.functional.calls import base_of, channels_of, functional_call, opened
from amct.pytorch.functional.computed_weights import ComputedWeight, computed_weight, store_weights
from amct.pytorch.functional.layers import FunctionalLayer, LayerSource, with_functional_layers
from amct.pytorch.model_copy import copy_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.pytorch.capture.example_inputs import ExampleInputs
    from amct.pytorch.functional.calls import Channels, FunctionalCall

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
    hooks = []
    for module in duplicate.modules():
        if is_layer(module):
            hooks += [module.register_forward_pre_hook(finder.enter), module.register_forward_hook(finder.leave)]
    arguments = pytree.tree_map_only(Tensor, torch.Tensor.clone, (inputs.args, inputs.kwargs))
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad(), finder:
            warnings.simplefilter("ignore")  # calibration runs the model again and says what it has to say
            duplicate(*arguments[0], **arguments[1])
    except Exception as error:  # noqa: BLE001  the user's forward runs here; tracing it reports its error
        logger.debug("functional calls of %s are not read: %s", type(model).__name__, error)
        return model
    finally:
        for hook in hooks:
            hook.remove()  # they refer to the finder, and it to the copy, which would be freed late
    layers, problems = finder.result()
    computed = finder.computed() if stored else {}
    if not layers and not problems and not computed:
        return model
    found = with_functional_layers(model, layers, problems)
    store_weights(found, computed)
    return found


@dataclass
class _Found:
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


class _Finder(TorchFunctionMode):
    """Notes the functional calls on the parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._constants = _Constants({id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
        self._found: dict[tuple[str, Channels], _Found] = {}
        self._parts: dict[str, str] = {}
        self._running: list[nn.Module] = []
        self._called: set[str] = set()
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._computed: dict[str, ComputedWeight | None] = {}  # None: its calls differ

    def enter(self, module: nn.Module, _: object) -> None:
        """Note that a layer's own forward begins."""
        self._running.append(module)

    def leave(self, *_: object) -> None:
        """Note that a layer's own forward has ended."""
        self._running.pop()

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
        if call is not None:
            self._note(call)
        result = func(*args, **kwargs)
        self._constants.follow(func, args, kwargs, result)
        return result

    def _note(self, call: FunctionalCall) -> None:
        parameter = base_of(call.weight)
        name = self._names.get(id(parameter))
        if self._running and all(call.weight is not own for own in self._running[-1].parameters(recurse=False)):
            self._note_computed(self._running[-1], call)
        if name is None or call.input in self._constants or not parameter.is_floating_point():
            return
        if any(own is parameter for module in self._running for own in module.parameters(recurse=False)):
            self._called.add(name)
            return
        channels = channels_of(call, parameter)
        if channels is None:
            self._parts[name] = f"a part of {name} that is not a range of its output channels is used"
            return
        before = self._found.setdefault((name, channels), _Found(parameter, call))
        before.calls += 1
        before.problem = before.problem or self._problem(before.call, call, channels)

    def _note_computed(self, module: nn.Module, call: FunctionalCall) -> None:
        path, found = self._paths[id(module)], computed_weight(module, call, self._constants.__contains__)
        before = self._computed.setdefault(path, found)
        if found is None or before is None or not before.equals(found):
            self._computed[path] = None

    def computed(self) -> dict[str, ComputedWeight]:
        """The weights that layers compute from parameters, by path."""
        return {path: values for path, values in self._computed.items() if values is not None and path}

    def _problem(self, first: FunctionalCall, call: FunctionalCall, channels: Channels) -> str | None:
        if (first.type, first.settings) != (call.type, call.settings):
            return "its calls differ in their settings"
        if call.bias is None or first.bias is None:
            return None if call.bias is first.bias else "only some of its calls have a bias"
        if call.bias not in self._constants:
            return "its bias is computed from the input"
        if call.type == "Linear" and call.bias.shape not in {(size := channels.stop - channels.start,), (1, size)}:
            return f"its bias has shape {list(call.bias.shape)}, not one value for each output channel"
        return None if torch.equal(first.bias, call.bias) else "its calls have different biases"

    def result(self) -> tuple[list[FunctionalLayer], list[Skip]]:
        """The layers, and the calls that cannot be layers."""
        straight = {name for name, channels in self._found if not channels.transposed} | self._called
        layers, problems = [], [Skip(name, f"functional call: {reason}") for name, reason in self._parts.items()]
        for (parameter, channels), each in self._found.items():
            name = parameter + _part(each.parameter, channels, marked=parameter in straight)
            if each.problem is not None:
                problems.append(Skip(name, f"functional call of {each.call.type}: {each.problem}"))
                continue
            bias = each.call.bias
            source = LayerSource(
                parameter=parameter,
                channels=channels,
                type=each.call.type,
                settings=each.call.settings,
                with_bias=bias is not None,
                calls=each.calls,
            )
            value = None if bias is None else bias.detach().reshape(-1).clone()
            layers.append(FunctionalLayer(name=name, source=source, bias=value))
        return layers, problems


def _part(parameter: Tensor, channels: Channels, *, marked: bool) -> str:
    """The part of a parameter in a layer's name; nothing for all of it.

    ``marked``: other calls use the rows of the parameter as output channels.
    """
    whole = channels.start == 0 and channels.stop == parameter.shape[1 if channels.transposed else 0]
    if not whole:
        return f"[{':,' if channels.transposed else ''}{channels.start}:{channels.stop}]"
    return "[transposed]" if channels.transposed and marked else ""
