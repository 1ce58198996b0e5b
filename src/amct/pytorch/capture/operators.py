"""Detects models that are already compressed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

AMCT_OPERATORS = frozenset(
    {
        "AscendDeQuant",
        "AscendQuant",
        "Conv2dQAT",
        "ConvTranspose1dQAT",
        "DMQBalancer",
        "GRUQAT",
        "HFMG",
        "IFMR",
        "LSTMQAT",
        "LinearQAT",
        "MarkedQuantizableModule",
        "OFMRQuant",
        "QuantIdentity",
        "RNNRetrainQuant",
        "Recorder",
        "RetrainQuant",
        "SelectiveMaskGen",
    }
)
"""Class names of AMCT's own operators."""

MARK = "amct_operator"
"""A module or class with this attribute set to True must not be compressed again."""


def is_operator(module: nn.Module) -> bool:
    """Whether a compression step inserted the module into the model."""
    return type(module).__name__ in AMCT_OPERATORS or getattr(module, MARK, False) is True


def refuse_operators(model: nn.Module) -> None:
    """Reject a compiled model and a model that is already compressed.

    Raises:
        ModelError: It is a ScriptModule, or it contains compression operators; the message lists them with their types.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "the model is a ScriptModule (torch.jit.script or torch.jit.trace), whose layers cannot be changed; "
            "give the nn.Module that it was made from"
        )
    found = {name: type(module).__name__ for name, module in model.named_modules() if is_operator(module)}
    if found:
        listed = ", ".join(f'"{name}" ({kind})' for name, kind in found.items())
        raise ModelError(
            f"the model already contains {len(found)} AMCT operators: {listed}. Start from the original float model"
        )
