"""Layers whose forward is written in another way than torch's: with a computed weight, or as a product.

In a copy of the model a layer that computes its weight from parameters only (weight standardization) gets the computed
value as its own weight, and the torch function that its forward calls gets this weight instead of a newly computed one.
A linear layer that multiplies by its transposed weight calls ``linear``. So these layers are quantized like any other.
What their forward does besides (padding) stays as it is.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from amct.pytorch.capture.layer_types import quantizable_type
from amct.pytorch.functional.calls import Channels, base_of, channels_of, functional_call, with_operands

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from amct.pytorch.functional.calls import FunctionalCall


@dataclass(frozen=True, kw_only=True, eq=False)
class ComputedWeight:
    """The values with which a layer calls its torch function; None if the layer has them stored."""

    weight: Tensor | None = None
    bias: Tensor | None = None

    def equals(self, other: ComputedWeight) -> bool:
        """Whether two calls of a layer use the same values."""
        pairs = ((self.weight, other.weight), (self.bias, other.bias))
        return all(
            one is two if one is None or two is None else one.shape == two.shape and bool((one == two).all())
            for one, two in pairs
        )


def computed_weight(
    module: nn.Module, call: FunctionalCall, constant: Callable[[Tensor], bool]
) -> ComputedWeight | None:
    """What ``module`` computed for a call in its forward; None if that is no layer of its kind or not constant."""
    own = getattr(module, "weight", None)
    if quantizable_type(module) != call.type or not isinstance(own, nn.Parameter) or constant(call.input):
        return None
    if base_of(call.weight) is own:
        return ComputedWeight() if _is_product(module, call, own) else None
    alike = own.shape == call.weight.shape and own.dtype == call.weight.dtype
    if not alike or call.columns or not constant(call.weight):
        return None
    if call.bias is None or call.bias is getattr(module, "bias", None):
        return ComputedWeight(weight=call.weight.detach().clone())
    if not constant(call.bias) or call.bias.shape != own.shape[:1] or call.type.startswith("ConvTranspose"):
        return None
    return ComputedWeight(weight=call.weight.detach().clone(), bias=call.bias.detach().clone())


def _is_product(module: nn.Module, call: FunctionalCall, own: Tensor) -> bool:
    """Whether a linear layer without bias computes ``x @ weight.T``."""
    whole = Channels(transposed=False, start=0, stop=own.shape[0])
    return call.columns and call.bias is None and module.bias is None and channels_of(call, own) == whole


def store_weights(model: nn.Module, computed: Mapping[str, ComputedWeight]) -> None:
    """Give layers of a copied model, by path, the values that they compute; the model shares no such layer."""
    for path, values in computed.items():
        module: Any = model.get_submodule(path)
        if values.weight is not None:
            module.weight = nn.Parameter(values.weight, requires_grad=module.weight.requires_grad)
        if values.bias is not None:
            module.bias = nn.Parameter(values.bias, requires_grad=module.weight.requires_grad)
        forward = module.forward
        stored = functools.partial(_stored_forward, module, forward)  # unlike a closure it is copied and pickled
        module.forward = functools.update_wrapper(stored, forward)


def _stored_forward(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    with _StoredWeight(module):
        return forward(*args, **kwargs)


class _StoredWeight(TorchFunctionMode):
    """Passes a layer's own weight and bias to the torch function that it calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._type = quantizable_type(module)

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401  torch's protocol
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        call = functional_call(func, args, kwargs)
        own: Any = self._module.weight
        if call is None or call.type != self._type:
            return func(*args, **kwargs)
        if call.columns:
            return functional.linear(call.input, own) if base_of(call.weight) is own else func(*args, **kwargs)
        if call.weight.shape != own.shape:
            return func(*args, **kwargs)
        args, kwargs = with_operands(func, args, kwargs, weight=own, bias=self._module.bias)
        return func(*args, **kwargs)
