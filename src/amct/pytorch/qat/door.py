"""Quantization-aware training in one call: a copy of the user's model whose layers have trained quantizers.

Training starts from calibration data: ranges of activations, and weight scales with the least rounding error.
"""

from __future__ import annotations

import functools
import logging
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amct import log
from amct.calibration import CalibrationSession
from amct.calibration.session import Stream
from amct.config.plan import OPEN_ENDED, say_fixed_min
from amct.config.python_config import retrain_plan_of
from amct.errors import ArgumentError, ArgumentTypeError, ModelError
from amct.export.check.batch import MOST_SAMPLES as CHECKED
from amct.export.check.batch import KeptBatches, first_samples
from amct.export.request import Target
from amct.numerics.adaround.scale import least_error_scale
from amct.numerics.ifmr import IfmrObserver
from amct.numerics.settings import FEW_BITS, WIDE_SEARCH, IfmrSettings, UlqRetrainSettings
from amct.pipeline.preparation import enabled_layers
from amct.pytorch.capture.cached_trace import for_copies
from amct.pytorch.capture.functional_layers import child_path, take_functional_layers
from amct.pytorch.capture.program_graph import call_name
from amct.pytorch.folding import fuse
from amct.pytorch.inputs import IoOptions, torch_batches
from amct.pytorch.layer_hooks import observe_inputs
from amct.pytorch.onnx.float_onnx import trace_for_files
from amct.pytorch.pruning.sparse import put_sparse, without_masks
from amct.pytorch.qat.deployment import is_made_by_relu, not_negative, train_placement
from amct.pytorch.qat.layers import QuantizedCall, as_quantized, quantized_layers, trained_parts
from amct.pytorch.qat.model import QatState, as_qat_model, keep_statistics, kept_batch, with_state
from amct.pytorch.qat.operations import add_calls, instrument
from amct.pytorch.qat.original import MetricBefore, Original
from amct.pytorch.qat.quantizers import ActivationQuantizer, WeightQuantizer
from amct.pytorch.user_model import copy_in_its_mode, copy_model, refuse_operators, unwrap
from amct.report.measuring import check_metric

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from amct.config.plan import RetrainLayerPlan, RetrainPlan
    from amct.config.python_config import AnyQatConfig
    from amct.pipeline.batches import BatchInputs
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.qat.model import QatModel
    from amct.report.measuring import Metric


@log.screen_only()
def prepare_qat(  # noqa: PLR0913  each is a choice of the user's
    model: nn.Module,
    batches: object,
    config: AnyQatConfig = None,
    teacher: nn.Module | None = None,
    target: str = Target.EXACT8.value,
    *,
    freeze_norms: bool | None = None,
    data: object = None,
    metric: Metric | None = None,
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
        freeze_norms: Let batch norms use and keep their running statistics in train mode too. Those of single batches
            differ from them by more than what quantization changes. None: they do from a call of ``recipe`` on.
        data: Test data for ``metric``.
        metric: ``metric(output, batch) -> float``, as for ``report``: measured here once of the float model and of the
            start, for summary and report, also where the float model will be gone by then.
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
    check_metric(metric, data)
    plain, masks = without_masks(unwrap(model))
    refuse_operators(plain)
    calibration = torch_batches(plain, batches, inputs, name="batches")
    example = calibration.first()
    options = io or IoOptions()
    traced = trace_for_files(plain, (*example[0], example[1]), io=options)
    plan = retrain_plan_of(config, traced.config_layers())
    trainable = build(traced, plan, weight_bits={8: 7} if target == Target.PORTABLE.value else {})
    any_batch = bool(traced.names.axes)
    with_state(trainable, all_layers=True, any_batch=any_batch)
    put_sparse(trainable, masks)
    start_weights(trainable)
    first = KeptBatches()

    def note(batch: Arguments) -> Arguments:
        first.notice(first_samples(batch, most=CHECKED) if any_batch else batch)
        return batch

    start, count = start_activations(trainable, map(note, calibration))
    used = calibration.used(count)
    logger.info("calibrated on %s%s", used, used.preparation and f": {used.preparation}")
    if target != Target.EXACT8.value:
        start |= train_placement(trainable, trainable.preparation(example, options), calibration)
    teachers = () if teacher is None else (copy_model(unwrap(teacher)).requires_grad_(requires_grad=False),)
    kept = kept_batch(example, trainable._qat) or example
    if freeze_norms:
        keep_statistics(trainable)
    known = None
    if metric is not None:
        known = MetricBefore.measured(model, trainable, torch_batches(plain, data, inputs), metric)
    return with_state(
        trainable,
        io=options,
        example=kept,
        start=start,
        calibration=used,
        teacher=teachers,
        target=target,
        freeze_norms=freeze_norms,
        original=Original.of(model, first.kept),
        metric_before=known,
        teaches_itself=teacher is model,
    )


# -- putting the quantizers in -----------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)


def build(
    traced: Traced,
    plan: RetrainPlan,
    *,
    weight_bits: Mapping[int, int] | None = None,
    only_behind_relu: bool = False,
) -> QatModel:
    """Copy the model and give the layers of the plan trained quantizers; the user's model is not changed.

    Every module of the copy is in the mode (train or eval) of its original. Batch norms stay modules of their own and
    are trained unfolded. A weight quantizer knows the batch norm that will be folded into its layer.

    Args:
        traced: The model.
        plan: How its layers are quantized.
        weight_bits: By number of bits in the plan: another number to train weights with.
        only_behind_relu: As AMCT, let lower clips stay 0 by default only where a ReLU makes the input itself.

    Raises:
        CalibrationError: No layer is to be quantized.
        ModelError: The model cannot be copied, or a weight is not float32 or not finite.
    """
    chosen = enabled_layers(plan, traced.layers, switch="retrain_enable")
    norms = fuse(traced)
    for skip in norms.skips:
        logger.info("not folded: %s", skip)
    model = copy_in_its_mode(traced.model)
    calls = _functional_calls(model, {layer.name for layer in chosen})
    leaders: dict[object, ActivationQuantizer] = {}
    positive = _positive_inputs(chosen, traced, only_behind_relu=only_behind_relu)
    for layer in chosen:
        module = calls.get(layer.name) or model.get_submodule(layer.name)
        _check(layer.name, module)
        norm = norms.fusions.get(layer.name)
        own = _weight_quantizers(layer, module, None if norm is None else model.get_submodule(norm), weight_bits or {})
        source = _source(traced, layer)
        leader = leaders.get(source) if source is not None else None
        if leader is None:
            is_fixed = layer.activation.fixed_min or layer.name in positive
            quantizer = activation_quantizer(layer, fixed_min=bool(is_fixed))
            own["input_quantizer"] = quantizer.to(_device(module))
            leaders[source if source is not None else layer.name] = quantizer
        as_quantized(module, own, leader)
    kept = replace(plan, not_quantized=dict(plan.not_quantized))  # a dict can be pickled
    return as_qat_model(model, QatState(plan=kept, origin=for_copies(traced), not_folded=norms.skips))


def _functional_calls(model: nn.Module, chosen: Collection[str]) -> dict[str, QuantizedCall]:
    """Give a copied model the modules that will quantize its functional calls; by layer."""
    made: dict[str, QuantizedCall] = {}
    known: dict[str, dict[str, tuple[Any, ...]]] = {}
    for name, source in take_functional_layers(model).sources.items():
        path = child_path(name)
        holder, _, child = path.rpartition(".")
        owner, _, parameter = source.parameter.rpartition(".")
        known.setdefault("", {})[path] = source.parameter, source.kind
        known.setdefault(owner, {})[child] = parameter, source.kind
        if name in chosen:
            module = model.get_submodule(holder)
            made[name] = QuantizedCall(module, source).train(module.training)
            module.add_module(child, made[name])
    for owner, calls in known.items():
        add_calls(model.get_submodule(owner), calls)
        if owner:
            instrument(model.get_submodule(owner))
    return made


def activation_quantizer(plan: RetrainLayerPlan, *, fixed_min: bool, trained: bool = True) -> ActivationQuantizer:
    """The quantizer of a layer's input as its plan says."""
    settings = plan.activation
    clips = None
    if settings.clip_min is not None and settings.clip_max is not None:
        clips = settings.clip_min, settings.clip_max
    return ActivationQuantizer(
        plan.name,
        settings.num_bits,
        clips=clips,
        fixed_min=fixed_min,
        batch_num=plan.batch_num,
        fp16_scale=plan.force_fp16,
        trained=trained,
    )


def _weight_quantizers(
    plan: RetrainLayerPlan, module: nn.Module, norm: nn.Module | None, bits: Mapping[int, int]
) -> dict[str, nn.Module]:
    settings = plan.weight
    made: dict[str, nn.Module] = {}
    for name, part in zip(("weight_quantizer", "state_weight_quantizer"), trained_parts(module), strict=False):
        quantizer = WeightQuantizer(
            part,
            bits.get(settings.num_bits, settings.num_bits),
            channel_wise=settings.channel_wise,
            learned=isinstance(settings, UlqRetrainSettings),
            norm=norm,
        )
        made[name] = quantizer
    if isinstance(module, nn.RNNBase):
        state = activation_quantizer(plan, fixed_min=False, trained=False)
        made["state_quantizer"] = state.to(_device(module))
    return made


def _check(name: str, module: nn.Module) -> None:
    for part in trained_parts(module):
        if part.tensor.dtype is not torch.float32:
            raise ModelError(
                f'layer "{name}": weights are trained in float32, got {str(part.tensor.dtype).removeprefix("torch.")}; '
                "convert the model with model.float() and train with torch.autocast instead"
            )
        if not bool(torch.isfinite(part.tensor).all()):
            bad = int((~torch.isfinite(part.tensor)).sum())
            raise ModelError(f'layer "{name}": {bad} of {part.tensor.numel()} weights are NaN or infinite')


def _device(module: nn.Module) -> torch.device:
    return trained_parts(module)[0].tensor.device


# -- facts of the graph ------------------------------------------------------------------------------------------------


def _source(traced: Traced, layer: RetrainLayerPlan) -> object:
    """What layers have in common that share one input quantizer: the tensor they read, and how it is quantized."""
    if traced.graph is None or layer.name not in traced.graph or traced.layers[layer.name].calls > 1:
        return None
    tensor = traced.graph[layer.name].inputs[0]
    return tensor, layer.activation, layer.force_fp16, layer.batch_num


def _positive_inputs(layers: Iterable[RetrainLayerPlan], traced: Traced, *, only_behind_relu: bool) -> set[str]:
    """The layers whose lower clip stays 0 although their plan gives neither clips nor ``fixed_min``.

    They read what a ReLU made. Pooling, reshaping and the like in between do not matter, unless ``only_behind_relu``. A
    layer that is called several times must read such a tensor each time.
    """
    graph, found = traced.graph, []
    for layer in layers:
        given = layer.activation
        calls = [call_name(layer.name, call) for call in range(traced.layers[layer.name].calls)]
        if graph is None or any(call not in graph for call in calls):
            continue
        is_open = given.fixed_min is None and given.clip_min is None and given.clip_max is None
        rectified = is_made_by_relu if only_behind_relu else not_negative
        if is_open and all(rectified(graph, graph[call].inputs[0]) for call in calls):
            found.append(layer.name)
    say_fixed_min(logger, found)
    return set(found)


# -- where training starts ---------------------------------------------------------------------------------------------


def start_weights(model: nn.Module) -> None:
    """Let the learned scale of every weight start where its squared rounding error is least."""
    for layer in quantized_layers(model).values():
        for quantizer, part in zip(layer.weight_quantizers, trained_parts(layer), strict=True):
            found = least_error_scale(
                part.tensor,
                kind=part.kind,
                bits=quantizer.bits,
                channel_wise=quantizer.channel_wise,
                groups=part.gates or part.groups,
            )
            quantizer.restart(part.tensor, found.scale)


def start_activations(model: nn.Module, batches: Iterable[Arguments]) -> tuple[dict[str, tuple[float, float]], int]:
    """Determine the clips that the config does not give from the inputs of each layer in eval mode.

    Returns:
        The clips of every layer, and the number of batches.

    Raises:
        CalibrationError: A layer is reached by no batch, or its input is not finite; the message names it.
    """
    layers = quantized_layers(model)
    streams = list(_streams(model))
    modes = {module: module.training for module in model.modules()}
    model.eval()
    session = CalibrationSession(streams)
    handles = [handle for name, layer in layers.items() for handle in observe_inputs(session, name, layer)]
    try:
        with closing(session), torch.no_grad():
            count = 0
            for count, (args, kwargs) in enumerate(batches, 1):  # noqa: B007  needed behind the loop
                with session.batch():
                    model(*args, **kwargs)
            session.finish()
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    for name, layer in layers.items():
        found = session.result.layers[name]
        for stream, quantizer in layer.activations.items():
            if not quantizer.is_ready:
                quantizer.set_clips(found[stream].clip_min, found[stream].clip_max)
    return {name: layer.activation.clips for name, layer in layers.items()}, count


def _streams(model: nn.Module) -> Iterator[Stream]:
    owners: dict[ActivationQuantizer, str] = {}
    for name, layer in quantized_layers(model).items():
        for what, quantizer in layer.activations.items():
            leader = owners.setdefault(quantizer, name)
            search = WIDE_SEARCH if quantizer.bits < FEW_BITS else IfmrSettings().search_range
            settings = IfmrSettings(num_bits=quantizer.bits, search_range=search)
            yield Stream(
                layer=name,
                name=what,
                settings=settings,
                batch_num=OPEN_ENDED,
                make_observer=functools.partial(IfmrObserver, settings),
                same_as=None if leader == name else (leader, what),
            )
