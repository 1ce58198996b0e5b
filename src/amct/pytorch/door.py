"""The PyTorch front door: quantization of a torch model in one call, and the comparison of two models."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from amct.calibration import ALONE
from amct.calibration.ranks import fingerprint
from amct.config.python_config import plan_of
from amct.errors import ArgumentError, ArgumentTypeError, ModelError
from amct.numerics.settings import AdaRoundSettings
from amct.pipeline import flow
from amct.pipeline.blocks.reconstruction import refinement
from amct.pipeline.compare import measure
from amct.pipeline.quantized_model import QuantizedModel
from amct.pytorch.calibrating import balance_of
from amct.pytorch.capture.functional_layers import find_functional_layers, layer_module
from amct.pytorch.folding import fuse
from amct.pytorch.inputs import IoOptions, argument_tensors, example_inputs, torch_batches
from amct.pytorch.layer_hooks import TorchRun
from amct.pytorch.onnx.float_onnx import float_onnx, trace_for_files
from amct.pytorch.part import Part, offered_parts
from amct.pytorch.preparation import TorchPreparation, prepare
from amct.pytorch.searching import learned_weights
from amct.pytorch.user_model import copy_model, refuse_operators, unwrap
from amct.search.doctor import diagnose as find_causes
from amct.search.request import SearchRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray
    from onnx import ModelProto
    from typing_extensions import Unpack

    from amct.calibration import Ranks
    from amct.config.plan import Plan
    from amct.config.python_config import AnyConfig
    from amct.numerics.similarity import LayerComparison
    from amct.pipeline.batches import Batches, BatchInputs
    from amct.pipeline.blocks.reconstruction import AdaRoundMode, Reconstruct
    from amct.pipeline.flow import AnyResume, Passes
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.layer_hooks import Arguments
    from amct.search.doctor import Diagnosis
    from amct.search.request import SearchOptions


logger = logging.getLogger(__name__)

_MOST_LOOKED_AT = 16
"""How many batches of a list are looked at before calibration for sizes that vary."""


def quantize(  # noqa: PLR0913  most of them are optional
    model: nn.Module,
    calibration_data: object,
    config: AnyConfig = None,
    *,
    inputs: BatchInputs | None = None,
    io: IoOptions | None = None,
    adaround: AdaRoundMode = "plain",
    resume: AnyResume = None,
    part: str | None = None,
    equalize: bool = False,
    reconstruct: Reconstruct | None = None,
    reconstruct_seconds: float | None = None,
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
        part: the name of a module, such as "backbone", for models that cannot be exported as a whole, such as
            detectors: only this part is quantized, on what it is given while the whole model runs on the data, and the
            files are those of the part. ``QuantizedModel.model`` is the whole model with the quantized part in it.
        equalize: first scale the channels between layers to more equal ranges, in an extra pass over the data: 8-bit
            quantization then loses less, most of all in networks with depthwise convolutions. The weights in all files
            are the scaled ones, to which the record belongs.
        reconstruct: "blocks": after calibration learn, without labels, how the weights of each block are rounded, where
            activations of fewer than 8 bits are clipped, and biases, so that the block computes what it does in the
            float model. For 4 bits. Takes the place of AdaRound. The same data give the same bytes.
        reconstruct_seconds: about how long that may take, by the clock; how far it gets then depends on the machine.

    Raises:
        AmctError: the subclass tells whether config, model, data or files are invalid.
    """
    refine = refinement(reconstruct, reconstruct_seconds)
    if adaround not in ("plain", "fast"):
        raise ArgumentError(f'adaround: expected "plain" or "fast", got {adaround!r}')
    door = _opened(model, part, io, adaround=adaround, equalize=equalize, learns_blocks=reconstruct is not None)
    return flow.quantize(door, calibration_data, config, inputs, resume, refine=refine)


def _opened(model: nn.Module, part: str | None, io: IoOptions | None, **options: Any) -> TorchDoor:  # noqa: ANN401  of TorchDoor
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    chosen = None if part is None else Part(model, part)
    return TorchDoor(model if chosen is None else chosen.module, chosen, io or IoOptions(), **options)


def quantize_to(  # noqa: PLR0913  most of them are optional
    model: nn.Module,
    calibration_data: object,
    labelled: object = None,
    *,
    config: AnyConfig = None,
    inputs: BatchInputs | None = None,
    io: IoOptions | None = None,
    part: str | None = None,
    equalize: bool = False,
    **options: Unpack[SearchOptions],
) -> QuantizedModel:
    """Quantize a model to a goal: find the smallest or fastest settings of its layers that lose no more than allowed.

    The model is calibrated once. The result meets the goal or is the best that was found; ``certificate`` says which,
    by samples that the search has not used, and ``history`` has everything that was tried.

    Args:
        model: any nn.Module; it is not changed.
        calibration_data: as for ``quantize``.
        labelled: batches of (inputs, labels), or one such pair; batches of inputs for ``min_agreement`` and
            ``min_sqnr``; nothing with ``evaluate``. Other samples than those of the calibration.
        config: as for ``quantize``, the settings to begin with; layers that it leaves float stay so.
        inputs: as for ``quantize``.
        io: as for ``quantize``.
        part: as for ``quantize``.
        equalize: as for ``quantize``.
        options: the goal and the limits of the search, see ``SearchOptions``: ``max_drop``, ``score``, ``evaluate``,
            ``choices``, ``minimize``, ``max_minutes``, ``max_evaluations``, ``seed``, ``certify`` and others.

    Raises:
        AmctError: the subclass tells whether config, model, data, goal or files are invalid.
    """
    request = SearchRequest.of(labelled, options)
    door = _opened(model, part, io, equalize=equalize)
    base = flow.quantize(door, calibration_data, config, inputs, others=request.ranges)
    learned = learned_weights(base, request.choices)
    return request.run(base, model, inputs, learned)


def diagnose(
    model: nn.Module,
    calibration_data: object,
    data: object,
    config: AnyConfig = None,
) -> Diagnosis:
    """Find out why a quantized model is worse than it should be, and what helps.

    The layers to blame are found without labels; remedies are tried on these layers only.

    Args:
        model: any nn.Module; it is not changed.
        calibration_data: as for ``quantize``.
        data: samples as the model will see them, in the same form; the first 16 or so are used.
        config: as for ``quantize``.

    Returns:
        Causes and remedies; its text is a table.

    Raises:
        AmctError: the subclass tells whether model, config or data are invalid.
    """
    return find_causes(partial(quantize, model), calibration_data, data, config)


@dataclass(eq=False)
class TorchDoor:
    """Reads a torch model, or a part of one, for quantization; arguments are those of ``quantize``."""

    model: nn.Module
    part: Part | None
    io: IoOptions
    adaround: AdaRoundMode = "plain"
    equalize: bool = False
    learns_blocks: bool = False
    _traced: Traced | None = None
    _ready: Iterable[Arguments] = ()
    _told_of_sizes: bool = False

    @property
    def weight_bytes(self) -> int:
        """The bytes of the parameters."""
        if not isinstance(self.model, nn.Module):  # refused later, with the reason
            return 0
        return sum(each.nbytes for each in self.model.parameters() if not is_lazy(each))

    def batches(self, data: object, inputs: BatchInputs | None = None) -> Batches:
        """Convert calibration data to arguments of the model."""
        model = unwrap(self.model)
        refuse_operators(model)
        found = (
            torch_batches(model, data, inputs, name="calibration_data")
            if self.part is None
            else self.part.batches(data, inputs, name="calibration_data")
        )
        self._ready = found.limited(_MOST_LOOKED_AT) if isinstance(data, (list, tuple)) else ()
        return found.then(self._with_sizes_looked_at)

    def plan(self, config: AnyConfig, example: Arguments, batches: int | None) -> tuple[Plan, bool]:
        """Capture the model on the first batch and return the plan of a config in the PyTorch dialect."""
        args, kwargs = example
        self._traced = trace_for_files(self.model, (*args, kwargs), io=self.io, stored_weights=True)
        if self._traced.program is None:
            _offer_parts(self._traced.model)
        else:
            for further in self._ready:
                self._with_sizes_looked_at(further)
        return plan_of(config, self._traced.config_layers(), batches)

    def _with_sizes_looked_at(self, arguments: Arguments) -> Arguments:
        """The arguments; if their sizes are not those of the files, the log says so once."""
        traced = self._traced
        given = argument_tensors(arguments)
        if traced is None or traced.program is None or self._told_of_sizes or len(given) != len(traced.names.inputs):
            return arguments
        fixed: dict[str, list[int]] = {}
        sizes = []
        for name, tensor, example in zip(traced.names.inputs, given, traced.inputs.tensors(), strict=True):
            for axis, (size, first) in enumerate(zip(tensor.shape, example.shape, strict=False)):
                if size != first and axis not in traced.names.axes.get(name, {}):
                    fixed.setdefault(name, []).append(axis)
                    sizes.append(f'axis {axis} of "{name}" is {first} in the first batch and {size} in another')
        if fixed:
            self._told_of_sizes = True
            is_batch = all(axes == [0] for axes in fixed.values())
            logger.log(
                logging.INFO if is_batch else logging.WARNING,
                "%s: the files will take the sizes of the first batch only; to let them vary, quantize with "
                "io=IoOptions(dynamic_axes=%r)",
                ", ".join(sizes),
                fixed,
            )
        return arguments

    def fingerprint(self) -> str:
        """Of the captured program, the tree of modules, and all parameters and buffers."""
        assert self._traced is not None, "plan comes first"
        model, program = self._traced.model, self._traced.program
        tensors = [*model.named_parameters(), *model.named_buffers()]
        code = "" if program is None else program.graph_module.code
        mode = f"{self.adaround}, equalized" if self.equalize else self.adaround
        mode = f"{mode}, blocks" if self.learns_blocks else mode
        return fingerprint([mode, repr(model), code, *(part for named in tensors for part in named)])

    def reads_data_first(self, plan: Plan) -> bool:
        """True with what needs the activations of all batches before the weights: DMQ, AdaRound, equalization."""
        return (
            self.equalize
            or bool(plan.balanced)
            or any(isinstance(layer.weight, AdaRoundSettings) for layer in plan.enabled)
        )

    def prepare(self, plan: Plan, data: Passes, ranks: Ranks = ALONE) -> TorchPreparation:
        """Fold, balance, and quantize the weights; AdaRound learns from all batches in every process."""
        assert self._traced is not None, "plan comes first"
        balance = balance_of(self._traced, plan, data, ranks)
        made = prepare(
            self._traced,
            plan,
            balance=balance,
            data=data.all,
            adaround="later" if self.learns_blocks else self.adaround,
            ranks=ranks,
            equalize=data.all if self.equalize else None,
        )
        return replace(made, part=self.part)


def _offer_parts(model: nn.Module) -> None:
    """Say before calibration that a model can only be simulated, and what can be exported instead."""
    parts = " or ".join(f'part="{name}"' for name in offered_parts(model))
    logger.warning(
        "the whole %s is calibrated, but no file can hold it, because its forward cannot be captured (as the "
        "post-processing of a detector); to get files, quantize a part of it by name%s: the part is exported, and the "
        "model runs with it",
        type(model).__name__,
        f", such as {parts}" if parts else "",
    )


# -- comparing two models ----------------------------------------------------------------------------------------------


def compare(
    float_model: nn.Module,
    quantized_model: QuantizedModel | nn.Module,
    data: object,
    *,
    inputs: BatchInputs | None = None,
) -> list[LayerComparison]:
    """Run both models on data and compare the outputs of their layers, in execution order.

    A layer with a folded batch norm is compared with the output of the batch norm in the float model.

    Args:
        float_model: the original; it is not changed, and is run in eval mode.
        quantized_model: the result of ``quantize``, whose quantized layers are compared; or a simulated model, in which
            all modules with weights that have the same name in both models are compared.
        data: a tensor, an iterable of batches or a DataLoader, as for ``quantize``.
        inputs: as for ``quantize``.

    Raises:
        ArgumentTypeError: an argument is not a model.
        ArgumentError: the outputs of a layer have different shapes.
        ModelError: the models have no layer in common.
        CalibrationError: there is no data.
    """
    if not isinstance(float_model, nn.Module):
        raise ArgumentTypeError(f"float_model: expected a torch.nn.Module, got {type(float_model).__name__}")
    if not isinstance(quantized_model, (QuantizedModel, nn.Module)):
        raise ArgumentTypeError(
            "quantized_model: expected what quantize() returned or a torch.nn.Module, "
            f"got {type(quantized_model).__name__}"
        )
    reference = copy_model(unwrap(float_model), share_tensors=True)
    batches = torch_batches(reference, data, inputs)
    example = batches.first()
    if isinstance(quantized_model, QuantizedModel):
        reference = find_functional_layers(reference, example_inputs(reference, (*example[0], example[1])))
        other, folded = quantized_model.model, quantized_model.prepared.folded_layers
        layers = {name: [name, *folded.get(name, ())][-1] for name in quantized_model.layers}
    else:
        other = copy_model(unwrap(quantized_model), share_tensors=True)
        layers = _common_layers(reference, other, example)
    missing = [place for place in layers.values() if not _has(reference, place)]
    if missing or not layers:
        lacking = f'; "{missing[0]}" is not in {type(reference).__name__}' if missing else ""
        raise ModelError(f"float_model and quantized_model must have the same layer names{lacking}")
    own = {name: name for name in layers}
    measured = measure(TorchRun(reference, layers), TorchRun(other, own), batches.with_originals())
    return list(measured.layers.values())


def reference_onnx(model: nn.Module, example: NDArray[np.float32]) -> ModelProto:
    """The folded float model as ONNX, for comparison with its quantized files, which have the same tensor names.

    Raises:
        ExportError: the model cannot be captured, or uses an operation that ONNX lacks.
    """
    traced = trace_for_files(model, torch.from_numpy(example), stored_weights=True)
    return float_onnx(traced, fuse(traced)).model


def _has(model: nn.Module, path: str) -> bool:
    try:
        layer_module(model, path)
    except AttributeError:
        return False
    return True


def _common_layers(reference: nn.Module, other: nn.Module, arguments: Arguments) -> dict[str, str]:
    """The modules with their own weights that exist in both models and compute the same output."""
    mine = dict(other.named_modules())
    leaves = {
        name: module
        for name, module in reference.named_modules()
        if name in mine and next(module.parameters(recurse=False), None) is not None
    }
    folded = {name for name in leaves if isinstance(mine[name], nn.Identity)}
    changed = _makers(reference, leaves, folded, arguments) if folded else set()
    return {name: name for name in leaves if name not in changed}


def _makers(model: nn.Module, leaves: dict[str, nn.Module], folded: set[str], arguments: Arguments) -> set[str]:
    """The layers that feed the folded modules: folding changed their weights, so their outputs differ."""
    made: list[tuple[str, object]] = []
    makers: set[str] = set()

    def remember(name: str) -> Any:  # noqa: ANN401  a hook
        return lambda _, __, output: made.append((name, output))

    def look_up(_: nn.Module, args: tuple[Any, ...]) -> None:
        makers.update(name for name, output in made if args and output is args[0])

    handles = [module.register_forward_hook(remember(name)) for name, module in leaves.items()]
    handles += [leaves[name].register_forward_pre_hook(look_up) for name in folded]
    try:
        with torch.no_grad():
            model(*arguments[0], **arguments[1])
    finally:
        for handle in handles:
            handle.remove()
    return makers
