"""Hooks that observe or change the inputs of layers of a copied model, and the models and runs made with them.

Hooks keep the copy's class and module names, and ``.to()`` and ``state_dict`` work as in the original.
"""

from __future__ import annotations

import functools
import logging
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from amct.calibration.session import HIDDEN
from amct.errors import AmctError, ModelError
from amct.numerics.affine import dequantize, fake_quantize, quantize_bias
from amct.numerics.balancing import balance_activation
from amct.pipeline.door import ModelOutput
from amct.pipeline.weights import corrected_bias
from amct.pytorch.call_sites import all_values, on_all_values
from amct.pytorch.capture.functional_layers import layer_module
from amct.pytorch.capture.layer_types import put_weights
from amct.pytorch.capture.program import uncompiled
from amct.pytorch.inputs import tensors_in
from amct.report.filling import input_key
from amct.report.measuring import OUTPUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch.utils.hooks import RemovableHandle

    from amct.calibration import CalibrationSession
    from amct.numerics.qparams import LayerQParams, QParams
    from amct.pipeline.door import OnTensor
    from amct.pipeline.weights import QuantizedWeights
    from amct.pytorch.preparation import TorchPreparation

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def hidden_from_modes() -> AbstractContextManager[None]:
    """A context for the computations of hooks, in which no ``TorchFunctionMode`` intercepts them."""
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return guard


def given_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The input tensor of a layer's call; None if the input is not a tensor (a PackedSequence)."""
    value = args[0] if args else kwargs.get("input")
    return value if isinstance(value, Tensor) else None


def with_input(args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with the input replaced."""
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "input": x})


def given_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401  a tensor, a pair or None
    """The initial state of a recurrent layer's call."""
    return args[1] if len(args) > 1 else kwargs.get("hx")


@dataclass(eq=False)
class Balance:
    """Divides a layer's input by the DMQ factors that its weights are multiplied by."""

    factors: Tensor
    axis: int

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Divide the input; a forward pre-hook with keyword arguments."""
        x = given_input(args, kwargs)
        if x is None:
            return args, kwargs
        return with_input(args, kwargs, balance_activation(x, self.factors.to(x.device), self.axis))


def _rounded(x: Tensor, qparams: QParams) -> Tensor:
    return fake_quantize(x, qparams.scale, qparams.offset, qparams.bits)


@dataclass(eq=False)
class FakeQuantize:
    """Fake-quantizes a layer's input, and the initial state of a recurrent layer."""

    data: QParams
    state: QParams | None = None

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Fake-quantize the input; a forward pre-hook with keyword arguments."""
        x = given_input(args, kwargs)
        if x is not None:
            rounded = on_all_values(lambda values: _rounded(values, self.data), x)
            args, kwargs = with_input(args, kwargs, rounded)
        state = given_state(args, kwargs) if self.state is not None else None
        if state is None:
            return args, kwargs
        assert self.state is not None
        h = state[0] if isinstance(state, (tuple, list)) else state
        h = _rounded(h, self.state)
        state = (h, *state[1:]) if isinstance(state, (tuple, list)) else h
        return ((*args[:1], state), kwargs) if len(args) > 1 else (args, {**kwargs, "hx": state})


def on_input(module: nn.Module, seen: Callable[[Tensor], None]) -> RemovableHandle:
    """Call a function with the whole input tensor of each call of a layer; returns the hook."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = given_input(args, kwargs)
        if x is not None:
            with hidden_from_modes():
                seen(all_values(x))

    return module.register_forward_pre_hook(before, with_kwargs=True)


def observe_inputs(session: CalibrationSession, name: str, module: nn.Module) -> list[RemovableHandle]:
    """Add hooks through which a session observes a layer's input and, for a recurrent layer, its hidden states."""

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ANN401  (out, state)
        assert isinstance(module, nn.RNNBase)
        with hidden_from_modes():
            session.observe(name, _states(module, given_state(args, kwargs), output[0]), HIDDEN)

    handles = [on_input(module, functools.partial(session.observe, name))]
    if isinstance(module, nn.RNNBase):
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    return handles


def _states(module: nn.RNNBase, state: Any, output: Tensor) -> Tensor:  # noqa: ANN401  a tensor, a pair or None
    """The initial hidden state (zero when none is given) and the state after every step but the last."""
    h = state[0] if isinstance(state, (tuple, list)) else state
    later = output[:, :-1] if module.batch_first else output[:-1]
    if h is None:
        h = output.new_zeros(module.hidden_size)
    return torch.cat([h.reshape(-1), later.reshape(-1)])


def run_in_context(
    model: nn.Module, context: Callable[[Arguments], AbstractContextManager[object]], *, is_own: bool = False
) -> Callable[[], None]:
    """Run every forward of a model inside ``context(arguments)``.

    Args:
        model: A copy, which from now on runs without gradients, or the user's own model.
        context: Makes the context of a forward.
        is_own: Whether it is the user's own, which has gradients as the user wants them, and in the end its forward.

    Returns:
        A function that removes the context.
    """
    owns_forward = "forward" in vars(model)
    inserted_forward = _ForwardInContext(model.forward, context, gradients=is_own)
    model.forward = inserted_forward  # only on this instance
    # Weak references: what waits for the end of a calibration must not keep the model alive.
    model_reference, forward_reference = ref(model), ref(inserted_forward)

    def undo() -> None:
        target, inserted = model_reference(), forward_reference()
        if target is None or inserted is None:
            return
        inserted.context, own = None, inserted.forward
        if not is_own or vars(target).get("forward") is not inserted:
            return  # it goes on without gradients, or is wrapped by somebody else: what is left passes calls on
        if owns_forward:
            target.forward = own
        else:
            del target.forward

    return undo


class _ForwardInContext:
    """A forward inside a context; not a closure, because a deep copy of the model must call its own forward."""

    def __init__(
        self,
        forward: Callable[..., Any],
        context: Callable[[Arguments], AbstractContextManager[object]] | None,
        *,
        gradients: bool,
    ) -> None:
        functools.update_wrapper(self, forward)  # keeps the signature
        self.forward = forward
        self.context = context
        self.gradients = gradients

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  whatever the user's forward takes and gives
        with torch.set_grad_enabled(self.gradients and torch.is_grad_enabled()):
            if self.context is None:
                return self.forward(*args, **kwargs)
            with uncompiled(), self.context((args, kwargs)):
                return self.forward(*args, **kwargs)


# -- a model whose layers are compared ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TorchRun:
    """One of two compared torch models.

    Attributes:
        model: The model.
        layers: By layer: the module whose output is compared.
        weights: By layer: its weights, whose balance factors apply to observed inputs.
        shapes_vary: Whether a shape may depend on values, so that it can differ in the other model.
    """

    model: nn.Module
    layers: Mapping[str, str]
    weights: Mapping[str, QuantizedWeights] = field(default_factory=dict)
    shapes_vary: bool = False

    @contextmanager
    def watch(
        self, *, outputs: OnTensor | None = None, inputs: OnTensor | None = None
    ) -> Iterator[Callable[[Arguments], ModelOutput]]:
        """A context whose value is a function that runs the model on one batch, without gradients."""
        with ExitStack() as stack:
            if outputs is not None:
                for layer, place in self.layers.items():
                    hook = layer_module(self.model, place).register_forward_hook(_output_hook(layer, outputs))
                    stack.callback(hook.remove)
            if inputs is not None:
                for layer, weights in self.weights.items():
                    seen = functools.partial(_see_input, layer, weights, inputs)
                    stack.callback(on_input(layer_module(self.model, layer), seen).remove)
            yield self._run

    def _run(self, arguments: Arguments) -> ModelOutput:
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), arguments)
        try:
            with torch.no_grad():
                value = self.model(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, AmctError):
                raise
            shapes = [list(tensor.shape) for tensor in tensors_in((args, kwargs))]
            what = str(error).partition("\n")[0]
            name = type(self.model).__name__
            raise ModelError(f"data: {name} fails on a batch with tensors of shapes {shapes}: {what}") from error
        return torch_output(value)


def torch_output(value: object) -> ModelOutput:
    """What a module returned, with the floating-point tensors in it, numbered if there are several."""
    floats = [leaf for leaf in tensors_in(value) if leaf.is_floating_point()]
    names = [OUTPUT] if len(floats) == 1 else [f"{OUTPUT} {number}" for number in range(1, len(floats) + 1)]
    return ModelOutput(value=value, tensors=list(zip(names, floats, strict=True)))


def _output_hook(layer: str, outputs: OnTensor) -> Callable[..., None]:
    def hook(_: nn.Module, __: object, output: Any) -> None:  # noqa: ANN401  a tensor, or a tuple of a recurrent layer
        # A copy, because an in-place ReLU would change the tensor before it is compared.
        outputs(layer, all_values(output[0] if isinstance(output, tuple) else output).clone())

    return hook


def _see_input(layer: str, weights: QuantizedWeights, inputs: OnTensor, x: Tensor) -> None:
    inputs(input_key(layer), weights.balanced_input(x))


# -- the fake-quantized model ------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)


def fake_quant_copy(
    preparation: TorchPreparation, layers: Mapping[str, LayerQParams], *, is_private: bool = False
) -> nn.Module:
    """A fake-quantized copy of the folded model; ``is_private``: no user gets it."""
    model = preparation.quantized_copy(is_private=is_private)
    for name, weights in preparation.weights.items():
        module, qparams = layer_module(model, name), layers[name]
        module.register_forward_pre_hook(FakeQuantize(qparams.input, qparams.hidden), with_kwargs=True)
        try:
            _round_biases(module, weights, qparams)
        except AmctError as error:
            logger.warning('layer "%s": the bias stays float in the simulated model: %s', name, error)
    return model


def _round_biases(module: nn.Module, weights: QuantizedWeights, qparams: LayerQParams) -> None:
    """Round each bias to the scale of its accumulator."""
    if isinstance(module, nn.RNNBase):  # the gates of the record are in another order
        steps, data = [weight.qparams for weight in weights.weights], [qparams.input, qparams.hidden]
        names = ["bias_ih_l0", "bias_hh_l0"]
    else:
        steps, data, names = list(qparams.weights[: len(weights.weights)]), [qparams.input], ["bias"]
    for name, step, each in zip(names, steps, data, strict=False):
        bias = getattr(module, name, None)
        if isinstance(bias, torch.Tensor) and each is not None:
            corrected = corrected_bias(qparams, weights, bias.detach())
            put_weights(module, {name: _rounded_bias(corrected, step, each.step).to(bias.dtype)})


def _rounded_bias(bias: Tensor, qparams: QParams, scale: float) -> Tensor:
    step = qparams.per_row(bias.numel()).scale.to(bias.device)
    data = torch.tensor(scale, dtype=torch.float32, device=bias.device)
    integers = quantize_bias(bias.float(), step, data)
    product = step * data
    axis = 0 if product.numel() > 1 else None
    zero = torch.zeros_like(product, dtype=torch.int32)
    return dequantize(integers, product, zero, axis=axis).to(bias.dtype)
