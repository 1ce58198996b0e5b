"""Quantizers inside a forward of the user's own: behind operations that are no layers, and in functional calls.

As a quantized layer, a module whose forward needs them is an object of a class derived from its own. While the forward
runs, a ``FunctionMode`` sees the torch functions that it calls. It numbers them within each call of a module, as
``call_sites.py`` does to name the place of a tensor (functions of hooks apart), and quantizes the results at the
places that have a quantizer. Every module of a model with such places is of such a class, so that functions are counted
for the module that calls them. A part of the model that runs alone, as gradient checkpointing does, needs nothing from
the others.
"""

from __future__ import annotations

import copyreg
import functools
import logging
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree

from amct.pytorch.call_sites import FunctionMode, OpenCall, function_name
from amct.pytorch.capture.functional_calls import base_of, channels_of, functional_calls, with_operands
from amct.pytorch.qat.layers import QuantizedCall
from amct.pytorch.qat.quantizers import ActivationQuantizer, WeightQuantizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from amct.pytorch.capture.functional_calls import FunctionalCall

logger = logging.getLogger(__name__)

QUANTIZERS = "amct_quantizers"
"""The child of a module that holds the quantizers of its operations."""
OUTPUT = "output"
_CALLS = "_functional_calls"
_SHARED = "_shared_quantizers"
_WARNED = "_warned_of_other_operations"


def operation_name(operation: int, result: int) -> str:
    """The name of the quantizer of a result of an operation, by their numbers within a call of the module."""
    return f"operation_{operation}_{result}"


def input_name(number: int) -> str:
    """The name of the quantizer of an input of the whole model."""
    return f"input_{number}"


class OperationQuantizer(ActivationQuantizer):
    """The quantizer behind an operation.

    ``function`` is the operation's name: another one at its number means that the forward takes another way; this is
    told, and the result is left as it is.
    """

    function = ""


class Instrumented(nn.Module):
    """A module whose forward runs with quantizers behind its operations."""

    amct_operator = True
    plain_form: ClassVar[type[nn.Module]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  the user's own forward
        """Hooks and forward; functions are counted for this module."""
        with called(self):
            return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  the user's own forward
        """The module's own forward; its output may be quantized."""
        with inside(self):
            return quantized_output(self, super().forward(*args, **kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401  the pickle protocol
        """Pickle the class as what it is made of: classes that are made while a program runs have no name."""
        make, arguments, *rest = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]  # typeshed leaves it out
            arguments = (self.plain_form, *arguments[1:])
        return (_remade, (make, arguments), *rest)


def _remade(make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    made = make(*arguments)
    made.__class__ = _instrumented_class(type(made))  # type: ignore[arg-type]  # torch's stubs hide that classes have a hash
    return made


@functools.cache
def _instrumented_class(plain: type[nn.Module]) -> type[Instrumented]:
    made = type(plain.__name__, (Instrumented, plain), {"plain_form": plain, "__doc__": plain.__doc__})
    return cast("type[Instrumented]", made)


def instrument(module: nn.Module) -> None:
    """Let a module run with quantizers behind its operations, in place."""
    if not isinstance(module, Instrumented):
        module.__class__ = _instrumented_class(type(module))  # type: ignore[arg-type]  # as above


def instrument_all(model: nn.Module) -> None:
    """The same for every module inside of a model, but not its quantizers."""
    hidden = (ActivationQuantizer, WeightQuantizer, QuantizedCall)
    for name, module in list(model.named_modules()):
        if name and QUANTIZERS not in name and not isinstance(module, hidden):
            instrument(module)


def can_hold(module: nn.Module) -> bool:
    """Whether a module can have quantizers as children: a container would call them as its own."""
    return not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))


def add_calls(module: nn.Module, calls: Mapping[str, tuple[Any, ...]]) -> None:
    """Tell a module of functional calls on parameters: by the child that quantizes them, what tells them apart.

    A name without a child stands for a call that stays float.
    """
    setattr(module, _CALLS, dict(calls))


def remove_operations(model: nn.Module) -> None:
    """Take everything of this file out of a copied model, in place."""
    for module in list(model.modules()):
        if isinstance(module, torch.jit.ScriptModule):  # nothing can be put into one
            continue
        vars(module).pop(_CALLS, None)
        vars(module).pop(_SHARED, None)
        module._modules.pop(QUANTIZERS, None)
        for name, child in list(module._modules.items()):
            if isinstance(child, QuantizedCall):
                del module._modules[name]
        if isinstance(module, Instrumented):
            module.__class__ = module.plain_form  # type: ignore[assignment]


# -- while a forward runs ----------------------------------------------------------------------------------------------


def has_operations(model: nn.Module) -> bool:
    """Whether the forward of a whole model needs quantizers behind its operations."""
    return (
        _has_quantizers(model)
        or _CALLS in vars(model)
        or any(isinstance(child, Instrumented) for child in model.children())
    )


@contextmanager
def called(module: nn.Module) -> Iterator[_Frame]:
    """The context of a module's call: its hooks and its forward."""
    running = _current()
    operations = running or _Operations()
    with nullcontext() if running else operations.mode, operations.frame(module) as frame:
        yield frame


@contextmanager
def inside(module: nn.Module) -> Iterator[None]:
    """The context of a module's forward.

    If another module calls just the forward, without hooks, its functions count as those of that module.
    """
    operations = _current()
    if operations is None:
        with called(module) as frame, frame.forward():
            yield
    elif operations.innermost.module is module and not operations.innermost.opened.in_forward:
        with operations.innermost.forward():
            yield
    else:
        yield


def _current() -> _Operations | None:
    """The operations of the forward that this thread is running."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    listeners = (mode.listener for mode in reversed(stack) if isinstance(mode, FunctionMode))
    return next((each for each in listeners if isinstance(each, _Operations)), None)


def quantizer_of(module: nn.Module, name: str, function: str = "") -> ActivationQuantizer | None:
    """The quantizer of an operation, an output or an input: the module's own, or that of a layer."""
    own = own_quantizer(module, name)
    if own is not None:
        return own if _is_at(own, name, own.function, function) else None
    quantizer, expected = vars(module).get(_SHARED, {}).get(name, (None, ""))
    if quantizer is None:
        return None
    return cast("ActivationQuantizer", quantizer) if _is_at(quantizer, name, expected, function) else None


def _is_at(quantizer: ActivationQuantizer, name: str, expected: str, function: str) -> bool:
    """Whether an operation is the one that a quantizer was put behind; otherwise this is told once."""
    if expected == function:
        return True
    if not torch.compiler.is_compiling() and not vars(quantizer).get(_WARNED):
        setattr(quantizer, _WARNED, True)
        logger.warning(
            'the quantizer of "%s" expects the result of %s as %s, which is %s now: the forward takes another way than '
            "when the model was prepared. That tensor is not quantized here, but it is in the exported file",
            quantizer.layer, expected, name, function,
        )  # fmt: skip
    return False


def own_quantizer(module: nn.Module, name: str) -> OperationQuantizer | None:
    """The quantizer that a module has for an operation, an output or an input beside those of layers."""
    held = module._modules.get(QUANTIZERS)
    found = held._modules.get(name) if held is not None else None
    return found if isinstance(found, OperationQuantizer) else None


def operation_quantizers(model: nn.Module) -> list[OperationQuantizer]:
    """The quantizers of a model beside those of its layers; each knows its place by its name."""
    return [module for module in model.modules() if isinstance(module, OperationQuantizer)]


def share_quantizer(module: nn.Module, name: str, quantizer: ActivationQuantizer, function: str) -> None:
    """Quantize the result of an operation with the quantizer of a layer that reads it: others read it quantized too.

    The quantizer belongs to the layer: here it is only looked at. Rounding once more in the layer changes nothing.
    """
    vars(module).setdefault(_SHARED, {})[name] = quantizer, function


def _has_quantizers(module: nn.Module) -> bool:
    return QUANTIZERS in module._modules or _SHARED in vars(module)


def quantized_output(module: nn.Module, result: Any) -> Any:  # noqa: ANN401  whatever the module returns
    """The result of a module, with its (first) tensor quantized if there is a quantizer for it."""
    quantizer = quantizer_of(module, OUTPUT)
    if quantizer is None:
        return result
    with torch._C.DisableTorchFunction():
        return (quantizer(result[0]), *result[1:]) if isinstance(result, tuple) else quantizer(result)


def quantized_inputs(module: nn.Module, arguments: Any) -> Any:  # noqa: ANN401  the arguments of a forward
    """The arguments of the whole model, with those tensors quantized that have a quantizer."""
    leaves, structure = pytree.tree_flatten(arguments)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for number, place in enumerate(places):
        quantizer = quantizer_of(module, input_name(number))
        if quantizer is not None:
            leaves[place] = quantizer(leaves[place])
    return pytree.tree_unflatten(leaves, structure)


@dataclass(eq=False)
class _Frame:
    """A call of a module."""

    module: nn.Module
    calls: Mapping[tuple[int, Any], QuantizedCall | None]
    opened: OpenCall

    @contextmanager
    def forward(self) -> Iterator[None]:
        """While the module's own forward runs."""
        self.opened.in_forward = True
        try:
            yield
        finally:
            self.opened.in_forward = False


class _Operations:
    """Numbers the torch functions of each module call, quantizes results and functional calls."""

    def __init__(self) -> None:
        self._frames: list[_Frame] = []
        self.mode = FunctionMode(self)

    @property
    def innermost(self) -> _Frame:
        """The call that is being executed."""
        return self._frames[-1]

    @contextmanager
    def frame(self, module: nn.Module) -> Iterator[_Frame]:
        """The context of one call of a module."""
        before = self.mode.opens_attention
        self._frames.append(_Frame(module, _calls_of(module), OpenCall()))
        self.mode.opens_attention = before or bool(self._frames[-1].calls)
        try:
            yield self._frames[-1]
        finally:
            self._frames.pop()
            self.mode.opens_attention = before

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401  any result
        """Call a function with quantized operands, or quantize its results."""
        calls = functional_calls(func, args, kwargs, self._is_weight) if self.mode.opens_attention else ()
        for call in calls:
            is_layer, layer = self._layer_of(call)
            if layer is not None:
                return _quantized_call(layer, call, func, args, kwargs)
            if is_layer:
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        frame = self._frames[-1]
        return _quantized_results(frame.module, frame.opened.next_operation(), function_name(func), result)

    def _is_weight(self, operand: Tensor) -> bool:
        return any(id(base_of(operand)) == parameter for frame in self._frames for parameter, _ in frame.calls)

    def _layer_of(self, call: FunctionalCall) -> tuple[bool, QuantizedCall | None]:
        """Whether a call is one of the functional layers, and its quantizers."""
        parameter = base_of(call.weight)
        channels = channels_of(call, parameter)
        key = id(parameter), (channels, call.type, call.settings, call.bias is not None)
        for frame in self._frames:
            if key in frame.calls:
                return True, frame.calls[key]
        return False, None


def _calls_of(module: nn.Module) -> dict[tuple[int, Any], QuantizedCall | None]:
    """The functional calls that a module knows: by the identity of the parameter, and what else tells them apart."""
    found: dict[tuple[int, Any], QuantizedCall | None] = {}
    for path, (parameter, kind) in vars(module).get(_CALLS, {}).items():
        owner, _, attribute = parameter.rpartition(".")
        holder, _, child = path.rpartition(".")
        layer = module.get_submodule(holder)._modules.get(child)
        key = id(getattr(module.get_submodule(owner), attribute)), kind
        found[key] = layer if isinstance(layer, QuantizedCall) else None
    return found


def _quantized_call(
    layer: QuantizedCall, call: FunctionalCall, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:  # noqa: ANN401  the result of the function
    """Call a function with its activation and its weight quantized; the layer takes the place of other products."""
    if call.product is not None:

        def computed(x: Tensor) -> Tensor:
            operation = functional.conv1d if call.type == "Conv1d" else functional.linear
            made: Tensor = quantized_output(layer, operation(*layer(x, layer.weight), **dict(call.settings)))
            return made

        return call.run(computed)
    x, weight = layer(call.input, call.weight.t() if call.columns else call.weight)
    args, kwargs = with_operands(func, args, kwargs, input=x, weight=weight.t() if call.columns else weight)
    return quantized_output(layer, func(*args, **kwargs))


def _quantized_results(module: nn.Module, number: int, function: str, result: Any) -> Any:  # noqa: ANN401  any result
    if not _has_quantizers(module):
        return result
    leaves, structure = pytree.tree_flatten(result)
    changed = False
    for place, leaf in enumerate(leaves):
        name = operation_name(number, place)
        quantizer = quantizer_of(module, name, function) if isinstance(leaf, Tensor) else None
        if quantizer is not None:
            leaves[place], changed = quantizer(leaf), True
    return pytree.tree_unflatten(leaves, structure) if changed else result
