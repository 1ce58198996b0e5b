"""What all single modules share: config, calibration in the first forwards, checkpoints, checks of the input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from amct.config.qat.single_op import WEIGHT_KEY, read_single_op_config
from amct.errors import AmctError, CalibrationError, ExportError, ModelArgumentError, ModelTypeError
from amct.pytorch.capture.layer_types import own_weight, setting_problem
from amct.pytorch.qat.quantizers import is_recomputing
from amct.pytorch.qat.single_op.onnx_operators import is_exporting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from amct.config.qat.single_op import SingleOpConfig
    from amct.pytorch.qat.single_op.state import InputQuantizer, WeightQuantizer


class SingleOp(nn.Module):
    """A module that quantizes its inputs and its weights, and trains the quantizers with them.

    Without ``clip_max`` in the config, IFMR observes the inputs of the first ``batch_num`` forwards, which compute with
    float inputs. In each later forward the inputs are quantized (ULQ: the clips are trained) and so are the weights
    (``arq_retrain``: scales measured in each forward, ``ulq_retrain``: trained scales). ``weight`` stays the float
    weight that the optimizer changes. Train and eval mode compute the same.
    """

    amct_operator = True
    float_class: ClassVar[type[nn.Module]]
    settings: ClassVar[tuple[str, ...]] = ()
    input_rank: ClassVar[int | None] = None
    cur_batch: Tensor

    def _add_quantizers(
        self,
        config: SingleOpConfig,
        inputs: Sequence[InputQuantizer],
        weights: Sequence[WeightQuantizer],
        device: torch.device | str | None,
    ) -> None:
        """Add the state of the quantizers; called at the end of a constructor."""
        if problem := setting_problem(self):
            raise ModelArgumentError(f"{type(self).__name__}: {problem}")
        self.config = config
        self._inputs, self._weights = tuple(inputs), tuple(weights)
        for each in self._inputs:
            each.add_state(self, device)
        for weight in self._weights:
            weight.add_state(self, device)
        self.register_buffer("cur_batch", torch.tensor(0, device=device))
        self.register_buffer("s_rec_flag", torch.tensor(False, device=device))
        self._batches_left = 0 if config.data.clip_max is not None else config.data.batch_num
        self._scales_known = False
        self._observed_last = False

    # -- forward -------------------------------------------------------------------------------------------------------

    def quantized(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The inputs, quantized or, in the first forwards, as they are, and then the quantized weights.

        Raises:
            ModelArgumentError: an input does not have the type or rank that the module expects.
            CalibrationError: an input of the first forwards holds NaN or infinity.
            ExportError: the module is being exported before it knows the range of its inputs.
        """
        for x in inputs:
            self._check_input(x)
        if not self.config.retrain_enable:
            return (*inputs, *(getattr(self, each.weight) for each in self._weights))
        if is_exporting():
            self._check_ready()
        else:
            observes = self._observed_last if is_recomputing() else not self._has_clips()
            if observes and not is_recomputing():
                self._observe(inputs)
            self._observed_last = observes
            self.refresh()
            if observes:
                return (*inputs, *(each.quantize(self) for each in self._weights))
        pairs = zip(self._inputs, inputs, strict=False)  # an input that is not quantized here has no tensor
        return (*(each.quantize(self, x) for each, x in pairs), *(each.quantize(self) for each in self._weights))

    def _has_clips(self) -> bool:
        """Whether the first forwards are over; those of the module whose averages this one was given count too."""
        wanted = self.config.data.batch_num
        if self._batches_left == wanted and int(self.cur_batch) >= wanted:
            self._batches_left = 0
        return self._batches_left == 0

    @torch._disable_dynamo  # type: ignore[attr-defined]  # torch.compiler.disable imports all of dynamo at once
    def _observe(self, inputs: Sequence[Tensor]) -> None:
        """Pass the inputs of one of the first forwards to the observers."""
        if self._batches_left == self.config.data.batch_num:
            self.cur_batch.zero_()
        last = self._batches_left == 1
        try:
            for quantizer, x in zip(self._inputs, inputs, strict=False):
                quantizer.observe(self, x, last=last)
        except AmctError as error:
            raise CalibrationError(f"{type(self).__name__}, batch {int(self.cur_batch) + 1}: {error}") from error
        self.cur_batch += 1
        self._batches_left -= 1

    @torch.no_grad()
    def refresh(self) -> None:
        """Make clips and scales legal, and what follows from them current; each forward does it."""
        for weights in self._weights:
            weights.refresh(self, start=not self._scales_known)
        self._scales_known = True
        if self._batches_left == 0:
            for inputs in self._inputs:
                inputs.refresh(self)

    def train(self, mode: bool = True) -> Self:
        """Switch between train and eval mode; in eval mode the state is that of the weights as they are."""
        super().train(mode)
        if not mode and self._scales_known:
            self.refresh()
        return self

    def _check_input(self, x: Tensor) -> None:
        name = type(self).__name__
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise ModelTypeError(f"{name}: the input must be a tensor of floating-point numbers, got {got}")
        if self.input_rank is not None and x.dim() != self.input_rank:
            axes = "time, batch, features" if isinstance(self, nn.RNNBase) else "batch, channels, then space"
            raise ModelArgumentError(
                f"{name}: the input must have {self.input_rank} dimensions ({axes}), got the shape {list(x.shape)}"
            )

    def _check_ready(self) -> None:
        if self._has_clips() and self._scales_known:
            return
        wanted = max(1, self._batches_left)
        raise ExportError(
            f"{type(self).__name__}: the range of its input is not known yet; run {wanted} more "
            f"batch{'' if wanted == 1 else 'es'} before the export, or give clip_max and clip_min and run one"
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:  # noqa: ANN401  torch's protocol
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if f"{prefix}cur_batch" not in state_dict:
            self._forget_scales()  # the state of a float module: scales of other weights are of no use
            return
        data = self.config.data
        # What earlier batches held is not in a checkpoint: an unfinished calibration begins anew.
        done = data.clip_max is not None or int(self.cur_batch) >= data.batch_num
        self._batches_left = 0 if done else data.batch_num
        for each in self._inputs:
            each.observer = None
        known = [not bool(torch.isnan(getattr(self, f"wts_scales{each.suffix}")).any()) for each in self._weights]
        self._scales_known = all(known) and done
        if self._scales_known:
            self.refresh()

    @torch.no_grad()
    def _forget_scales(self) -> None:
        for each in self._weights:
            getattr(self, f"wts_scales{each.suffix}").fill_(float("nan"))
        self._scales_known = False

    # -- from a float module -------------------------------------------------------------------------------------------

    @classmethod
    def from_float(cls, mod: nn.Module, config: Mapping[str, Any] | None = None) -> Self:
        """Make a module from a float one; it shares weight and bias with it.

        Args:
            mod: a module of the float class.
            config: as for the constructor.

        Raises:
            TypeError, RuntimeError: ``mod`` is of another class. The error is both.
            RuntimeError: a setting of ``mod`` cannot be quantized.
        """
        if not isinstance(mod, cls.float_class) or isinstance(mod, SingleOp):
            raise ModelTypeError(
                f"{cls.__name__}.from_float: mod must be a torch.nn.{cls.float_class.__name__}, got "
                f"{type(mod).__name__}"
            )
        if problem := setting_problem(mod):
            raise ModelArgumentError(f"{cls.__name__}.from_float: {problem}")
        made = cls._like(mod, config)
        quantized = {each.weight for each in made._weights}
        if missing := quantized - set(mod._parameters):
            raise ModelArgumentError(
                f"{cls.__name__}.from_float: {', '.join(sorted(missing))} is computed from other parameters "
                "(weight_norm and the like), so it cannot be shared; remove the parametrization first"
            )
        for name in mod._parameters:
            made._parameters[name] = mod._parameters[name]
        made.parameters_exchanged()
        return made.train(mod.training)

    @classmethod
    def _like(cls, mod: Any, config: Mapping[str, Any] | None) -> Self:  # noqa: ANN401  the attributes are those of its class
        """A module with the settings of a float one, and weights of its own."""
        settings = {name: getattr(mod, name) for name in cls.settings}
        weight = own_weight(mod)
        assert weight is not None
        has_bias = mod.bias if isinstance(mod.bias, bool) else mod.bias is not None
        return cls(**settings, bias=has_bias, device=weight.device, dtype=weight.dtype, config=config)

    def parameters_exchanged(self) -> None:
        """Called when the parameters are those of another module."""


def checked_config(config: Mapping[str, Any] | None, name: str, *, per_channel: bool = True) -> SingleOpConfig:
    """Check the config of a module.

    Args:
        config: the dict, or None.
        name: the class of the module.
        per_channel: whether its weights may have a scale for each output channel, which then is the default.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: any other mistake.
        RuntimeError: ``channel_wise`` is true where it cannot be.
    """
    if config is not None and not isinstance(config, dict):
        raise ModelTypeError(f"{name}: config must be a dict or None, got {type(config).__name__}")
    try:
        checked = read_single_op_config(config or {}, channel_wise=per_channel)
    except AmctError as error:
        raise type(error)(f"{name}: {error}", problems=error.problems) from None
    if checked.weights.channel_wise and not per_channel:
        raise ModelArgumentError(
            f"{name}: {WEIGHT_KEY}.channel_wise must be False: its weights have one scale. Leave it out"
        )
    return checked
