"""A part of a model, quantized by name: it gets its inputs from the whole model, which runs with it afterwards.

So a detector, whose post-processing no program can hold, has its backbone quantized and exported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from amct.errors import ArgumentError, ModelError, did_you_mean
from amct.pytorch.inputs import torch_batches
from amct.pytorch.user_model import copy_model, unwrap

if TYPE_CHECKING:
    from amct.pipeline.batches import Batches, BatchInputs

_SMALLEST = 0.1
"""The share of the parameters from which on a child is offered as a part."""


class _Reached(BaseException):
    """The part is called, the rest of the forward is not needed. A forward that catches Exception lets it pass."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = (*args, kwargs)


@dataclass(frozen=True, eq=False)
class Part:
    """A module of a model by its name.

    Raises:
        ArgumentError: There is no such module, or it is the whole model.
    """

    whole: nn.Module
    name: str

    def __post_init__(self) -> None:
        """Check the name."""
        object.__setattr__(self, "whole", unwrap(self.whole))
        names = [name for name, _ in self.whole.named_modules() if name]
        if self.name not in names:
            hint = did_you_mean(str(self.name), names)
            raise ArgumentError(
                f'part: expected the name of a module of {type(self.whole).__name__}, got "{self.name}".{hint} '
                f"Its children are {', '.join(name for name, _ in self.whole.named_children()) or 'none'}"
            )

    @property
    def module(self) -> nn.Module:
        """The part itself."""
        return self.whole.get_submodule(self.name)

    def batches(self, data: object, inputs: BatchInputs | None = None, *, name: str = "data") -> Batches:
        """Data of the whole model as arguments of the part: those of its first call in each forward."""
        whole = copy_model(self.whole, share_tensors=True).eval()
        whole.get_submodule(self.name).register_forward_pre_hook(_stop, with_kwargs=True)

        def reached(batch: object) -> tuple[Any, ...]:
            args, kwargs = torch_batches(self.whole, [batch], inputs, name=name).first()
            try:
                with torch.no_grad():
                    whole(*args, **kwargs)
            except _Reached as found:
                return found.arguments
            except Exception as error:
                raise ModelError(f"{type(whole).__name__} fails before it calls {self.name}: {error}") from error
            raise ModelError(f'part: the forward of {type(whole).__name__} does not call "{self.name}" on this batch')

        return torch_batches(self.module, data, reached, name=name)

    def whole_with(self, module: nn.Module) -> nn.Module:
        """A copy of the whole model in eval mode, with another module in place of the part."""
        whole = copy_model(self.whole, without=self.module.parameters()).eval()
        owner, _, child = self.name.rpartition(".")
        whole.get_submodule(owner).add_module(child, module)
        return whole


def _stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise _Reached(args, kwargs)


def offered_parts(model: nn.Module) -> list[str]:
    """The children with most of the parameters, which may be quantized in place of the whole."""
    total = sum(each.numel() for each in model.parameters())
    sizes = {name: sum(each.numel() for each in child.parameters()) for name, child in model.named_children()}
    large = [name for name, size in sizes.items() if size > _SMALLEST * total]
    return sorted(large, key=lambda name: -sizes[name])
