"""The PyTorch front door: quantization of a torch model in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parameter import is_lazy

from amct.calibration import ALONE
from amct.config.python_config import plan_of
from amct.errors import ArgumentError, ArgumentTypeError
from amct.numerics.settings import AdaRoundSettings
from amct.pipeline import flow
from amct.pipeline.passes import fingerprint
from amct.pytorch.calibrating import balance_of
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.inputs import IoOptions, torch_batches
from amct.pytorch.preparation import TorchPreparation, prepare
from amct.pytorch.user_model import refuse_operators, unwrap

if TYPE_CHECKING:
    from amct.calibration import Ranks
    from amct.config.plan import Plan
    from amct.config.python_config import AnyConfig
    from amct.pipeline.batches import Batches, BatchInputs
    from amct.pipeline.flow import AnyResume
    from amct.pipeline.passes import Passes
    from amct.pipeline.quantized_model import QuantizedModel
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.preparation import AdaRoundMode


def quantize(
    model: nn.Module,
    calibration_data: object,
    config: AnyConfig = None,
    *,
    inputs: BatchInputs | None = None,
    io: IoOptions | None = None,
    adaround: AdaRoundMode = "plain",
    resume: AnyResume = None,
) -> QuantizedModel:
    """Quantize a model with calibration data: fold batch norms, quantize weights, find the ranges of activations.

    Without a config: IFMR with offset for activations, ARQ per output channel for weights, 8 bits, every layer that can
    be quantized, all the data.

    Args:
        model: any nn.Module; it is not changed.
        calibration_data: a tensor, an iterable of batches or a DataLoader; see ``torch_batches``.
        config: a simple config (``.cfg``), a full config (``.json``, or its content as a dict), or a ``QuantConfig``.
        inputs: turns a batch into the model's inputs, for batches in other forms: ``lambda b: b["image"]``.
        io: names and dynamic axes of the exported models.
        adaround: "plain" learns by forwards as AMCT does, "fast" from the Gram matrix of each layer's input.
        resume: a file such as ``out/net.calibration.npz``: what was observed is kept there at most every 30 s, and a
            calibration that was killed goes on from it; it is removed at the end.

    Raises:
        AmctError: the subclass tells whether config, model, data or files are invalid.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if adaround not in ("plain", "fast"):
        raise ArgumentError(f'adaround: expected "plain" or "fast", got {adaround!r}')
    return flow.quantize(TorchDoor(model, io or IoOptions(), adaround), calibration_data, config, inputs, resume)


class TorchDoor:
    """Reads a torch model for quantization."""

    def __init__(self, model: nn.Module, io: IoOptions, adaround: AdaRoundMode) -> None:
        self._model = model
        self._io = io
        self._adaround = adaround
        self._traced: Traced | None = None

    @property
    def weight_bytes(self) -> int:
        """The bytes of the parameters."""
        if not isinstance(self._model, nn.Module):  # refused later, with the reason
            return 0
        return sum(each.nbytes for each in self._model.parameters() if not is_lazy(each))

    def batches(self, data: object, inputs: BatchInputs | None = None) -> Batches:
        """Convert calibration data to arguments of the model."""
        model = unwrap(self._model)
        refuse_operators(model)
        return torch_batches(model, data, inputs)

    def plan(self, config: AnyConfig, example: Arguments, batches: int | None) -> tuple[Plan, bool]:
        """Capture the model on the first batch and return the plan of a config in the PyTorch dialect."""
        args, kwargs = example
        self._traced = cached_trace(self._model, (*args, kwargs), io=self._io, all_layers=True, stored_weights=True)
        return plan_of(config, self._traced.config_layers(), batches)

    def fingerprint(self) -> str:
        """Of the captured program, the tree of modules, and all parameters and buffers."""
        assert self._traced is not None, "plan comes first"
        model, program = self._traced.model, self._traced.program
        tensors = [*model.named_parameters(), *model.named_buffers()]
        code = "" if program is None else program.graph_module.code
        return fingerprint([self._adaround, repr(model), code, *(part for named in tensors for part in named)])

    def reads_data_first(self, plan: Plan) -> bool:
        """True with DMQ or AdaRound, which need the activations of all batches before the weights are quantized."""
        return bool(plan.balanced) or any(isinstance(layer.weight, AdaRoundSettings) for layer in plan.enabled)

    def prepare(self, plan: Plan, data: Passes, ranks: Ranks = ALONE) -> TorchPreparation:
        """Fold, balance, and quantize the weights; AdaRound learns from all batches in every process."""
        assert self._traced is not None, "plan comes first"
        balance = balance_of(self._traced, plan, data, ranks)
        return prepare(self._traced, plan, balance=balance, data=data.all, adaround=self._adaround, ranks=ranks)
