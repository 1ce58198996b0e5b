"""Quantization-aware training in one call: the trainable form of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from amct import log
from amct.config.python_config import retrain_plan_of
from amct.errors import ArgumentError, ArgumentTypeError
from amct.export.options import Target
from amct.pytorch.batches import torch_batches
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.capture.operators import refuse_operators
from amct.pytorch.door import IoOptions
from amct.pytorch.model_copy import copy_model, unwrap
from amct.pytorch.pruning.sparse_quantized import put_sparse, without_masks
from amct.pytorch.qat.building import build
from amct.pytorch.qat.model import first_samples, keep_statistics, with_state
from amct.pytorch.qat.placement import train_placement
from amct.pytorch.qat.start import start_activations, start_weights

if TYPE_CHECKING:
    from amct.config.python_config import AnyQatConfig
    from amct.pipeline.batches import BatchInputs
    from amct.pytorch.qat.model import QatModel


@log.screen_only()
def prepare_qat(  # noqa: PLR0913  each is a choice of the user's
    model: nn.Module,
    batches: object,
    config: AnyQatConfig = None,
    teacher: nn.Module | None = None,
    target: str = Target.EXACT8.value,
    *,
    freeze_norms: bool = False,
    inputs: BatchInputs | None = None,
    io: IoOptions | None = None,
) -> QatModel:
    """Return a copy of a model that is trained as any module, with quantizers whose clips and scales are trained too.

    Training starts from calibration: the clips of activations are those of an IFMR search on the batches, the scales of
    weights those with the least rounding error. Without a config: 8 bits for every layer that can be quantized.

    Args:
        model: Any nn.Module, also one that was pruned or has 2:4 masks; it is not changed.
        batches: Calibration data: a tensor, an iterable of batches or a DataLoader.
        config: A simple config (``.cfg``), a full config (``.json``, or its content as a dict), or a ``QatConfig``.
        teacher: A float model, for ``distillation_loss``; usually ``model`` itself.
        target: The QDQ file to train for. "exact8": layer inputs and weights as the record has them (placement
            ``exact``). "portable", the default file of ``save``: also the tensors between layers that placement
            ``fast`` quantizes, and 8-bit weights with 7 bits, which every CPU's file has as they are; "vnni": the
            same with 8 bits. Such a file computes what the trained model computes.
        freeze_norms: Let batch norms use and keep their running statistics in train mode too. At 8 bits, where the
            start is as good as the float model, the noise of batch statistics does harm; at 4 bits new statistics help.
        inputs: Turns a batch into the model's inputs, for batches in other forms.
        io: Names and dynamic axes of the exported models.

    Raises:
        AmctError: The subclass tells whether config, model or data are invalid.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if teacher is not None and not isinstance(teacher, nn.Module):
        raise ArgumentTypeError(f"teacher: expected a torch.nn.Module or None, got {type(teacher).__name__}")
    if target not in {each.value for each in Target}:
        listed = ", ".join(f'"{each.value}"' for each in Target)
        raise ArgumentError(f"target: expected one of {listed}, got {target!r}")
    plain, masks = without_masks(unwrap(model))
    refuse_operators(plain)
    data = torch_batches(plain, batches, inputs)
    example = data.first()
    options = io or IoOptions()
    traced = cached_trace(
        plain,
        (*example[0], example[1]),
        input_names=options.input_names,
        output_names=options.output_names,
        dynamic_axes=options.dynamic_axes,
        all_layers=True,
    )
    plan = retrain_plan_of(config, traced.config_layers())
    trainable = build(traced, plan, weight_bits={8: 7} if target == Target.PORTABLE.value else {})
    with_state(trainable, all_layers=True)
    put_sparse(trainable, masks)
    start_weights(trainable)
    start = start_activations(trainable, data)
    if target != Target.EXACT8.value:
        start |= train_placement(trainable, trainable.preparation(example, options), data)
    teachers = () if teacher is None else (copy_model(unwrap(teacher)).requires_grad_(requires_grad=False),)
    kept = first_samples(example) or example
    if freeze_norms:
        keep_statistics(trainable)
    return with_state(
        trainable,
        io=options,
        example=kept,
        start=start,
        teacher=teachers,
        target=target,
        freeze_norms=freeze_norms,
    )
