"""Prepares a model for calibration and export according to a plan: folded copy, quantized weights, float ONNX."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from amct.calibration import ALONE
from amct.errors import ArgumentError, ExportError, ModelError
from amct.export.onnx.kept_weights import KeptWeights
from amct.export.onnx.runtime import as_tensor
from amct.numerics.settings import AdaRoundSettings
from amct.pipeline.blocks.regions import Parts
from amct.pipeline.door import Calibration
from amct.pipeline.preparation import PreparedForOnnx, enabled_layers, inputs_of_nodes
from amct.pipeline.weights import corrected_bias, quantize_weights, suited_to_bias
from amct.printable import counted
from amct.pytorch.adaround import learn_rounding
from amct.pytorch.blocks.regions import RegionProgram
from amct.pytorch.calibrating import start_calibration
from amct.pytorch.capture.functional_layers import layer_module
from amct.pytorch.capture.layer_types import float_weights, put_weights
from amct.pytorch.equalization import equalized
from amct.pytorch.folding import Fused, fuse
from amct.pytorch.inputs import samples_in, tensors_in, torch_batches, with_tensors
from amct.pytorch.intermediate_tensors import find_tensors
from amct.pytorch.layer_hooks import Balance, TorchRun, fake_quant_copy, torch_output
from amct.pytorch.onnx.float_onnx import DEFAULT_OPSET, TracedOnnx, float_onnx
from amct.pytorch.user_model import MARK, copy_model, own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from numpy.typing import NDArray
    from onnx import ModelProto
    from torch import nn
    from typing_extensions import Self

    from amct.calibration import Ranks
    from amct.config.plan import Plan
    from amct.export.qdq.exporter import TensorPlan
    from amct.numerics.qparams import LayerQParams
    from amct.pipeline.batches import Batches, BatchInputs
    from amct.pipeline.blocks.reconstruction import AdaRoundMode
    from amct.pipeline.door import ComparedModel, ModelOutput
    from amct.pipeline.weights import QuantizedWeights
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.intermediate_tensors import TensorWatch
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.part import Part


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchPreparation(PreparedForOnnx):
    """A prepared torch model.

    Attributes:
        traced: The user's model and its trace.
        fused: A folded float copy of the model.
        kept: The weights of the ONNX models made of it, most of which are those of the copy.
        part: The part of a larger model that this is; None: it is a whole model.
    """

    traced: Traced
    fused: Fused
    kept: KeptWeights = field(default_factory=KeptWeights)
    part: Part | None = None

    @classmethod
    def of(
        cls,
        traced: Traced,
        fused: Fused,
        plan: Plan,
        weights: Mapping[str, QuantizedWeights],
        *,
        is_trained: bool = False,
    ) -> Self:
        """The preparation of a captured and folded model."""
        return cls(
            name=type(traced.model).__name__,
            plan=plan,
            weights=weights,
            quantizable=tuple(traced.layers),
            unquantizable=traced.skips,
            folded_layers={layer: (norm,) for layer, norm in fused.fusions.items()},
            unfolded=fused.skips,
            is_trained=is_trained,
            traced=traced,
            fused=fused,
        )

    def with_weights(self, plan: Plan, weights: Mapping[str, QuantizedWeights]) -> Self:
        """The same folded model with another plan and other quantized weights; its ONNX models are its own."""
        return replace(self, plan=plan, weights=weights, kept=KeptWeights())

    def bias(self, layer: str) -> Tensor | None:
        """The bias of a layer, folded; None: it has none, or one for each gate."""
        found = getattr(layer_module(self.fused.model, layer), "bias", None)
        return found if isinstance(found, torch.Tensor) else None  # a recurrent layer has a bool

    @property
    def calls(self) -> Mapping[str, int]:
        """How often each layer is called in one forward, if more than once."""
        return {name: facts.calls for name, facts in self.traced.layers.items() if facts.calls > 1}

    def layers_called_once(self, arguments: Arguments) -> Collection[str]:
        """The layers that a forward certainly calls once: those of the program, with arguments like those captured."""
        if self.traced.program is None or not self.is_like_example(arguments):
            return ()
        return {name for name, facts in self.traced.layers.items() if facts.calls == 1}

    def is_like_example(self, arguments: Arguments) -> bool:
        """Whether a forward cannot tell arguments from those captured before it computes with them."""
        example = self.traced.inputs.args, self.traced.inputs.kwargs
        given, expected = (pytree.tree_flatten(each) for each in (arguments, example))
        return given[1] == expected[1] and all(map(_is_like, given[0], expected[0]))

    def parts(self) -> Parts:
        """The folded model in parts.

        Raises:
            ModelError: It cannot be divided.
        """
        program = RegionProgram(self.traced, self.fused, self.weights)
        try:
            exact = rounded = program.constants(self.fused.model)
            if any(step.layer and not step.reads_weight and self.weights[step.layer].weights for step in program.steps):
                rounded = program.constants(self.quantized_copy(is_private=True))  # an LSTM reads another form
        except RuntimeError as error:  # of any operation
            raise ModelError(f"its captured program cannot be run in parts: {error}") from error
        return Parts(program, exact, rounded)

    def float_outputs(self, arguments: Arguments) -> list[Any]:
        """What the folded float model returns, number by number."""
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.clone, arguments)  # a forward may write to its inputs
        return pytree.tree_leaves(self.fused.model(*args, **kwargs))

    def with_learned(
        self, weights: Mapping[str, QuantizedWeights], layers: Mapping[str, LayerQParams]
    ) -> tuple[Self, Mapping[str, LayerQParams]]:
        """The model with learned weights and the parameters of its layers."""
        found = dict(layers)
        for name, qparams in layers.items():
            bias = self.bias(name)
            if bias is not None and qparams.lost is not None:
                found[name] = suited_to_bias(name, qparams, weights[name], corrected_bias(qparams, weights[name], bias))
        return self.with_weights(self.plan, weights), found

    def quantized_copy(self, *, is_private: bool = False) -> nn.Module:
        """A copy of the folded model with fake-quantized weights, whose layers with balanced weights balance inputs.

        Args:
            is_private: Whether no user gets it, who might change it: it shares all other parameters (embeddings, those
                that functional layers take their weights from) with the folded model.
        """
        replaced = [source.tensor for weights in self.weights.values() for source in weights.sources]
        model = copy_model(self.fused.model, without=self.fused.model.parameters() if is_private else replaced)
        for name, weights in self.weights.items():
            module = layer_module(model, name)
            setattr(module, MARK, True)
            for weight in weights.weights:
                real = weight.real() if weight.stored is None else weight.stored.clone()
                put_weights(module, {weight.source.name: real})
            if weights.balance is not None:
                module.register_forward_pre_hook(Balance(weights.balance, weights.channel_axis), with_kwargs=True)
        if not is_private:
            own_parameters(model, self.fused.model)
        return model

    def float_onnx(self, opset: int = DEFAULT_OPSET) -> TracedOnnx:
        """The folded model as ONNX: float weights, except where the integers do not follow from weight and scale.

        Raises:
            ArgumentError: the opset is outside 16..21.
            ExportError: the model cannot be exported.
        """
        rounded = [name for name, weights in self.weights.items() if weights.custom_rounding]
        return self._with_rounded_weights(rounded, self.kept, opset)

    def partly_rounded(self, names: Collection[str], kept: KeptWeights) -> ModelProto:
        """The folded model as ONNX with the rounded weights of some layers."""
        return self._with_rounded_weights(names, kept).model

    def _with_rounded_weights(
        self, names: Collection[str], kept: KeptWeights, opset: int = DEFAULT_OPSET
    ) -> TracedOnnx:
        fused = self.fused
        if names:
            fused = replace(fused, model=copy_model(fused.model, share_tensors=True))
            for name in names:
                put_weights(layer_module(fused.model, name), self.weights[name].unbalanced())
        return float_onnx(self.traced, fused, opset=opset, kept=kept)

    @cached_property
    def default_onnx(self) -> TracedOnnx | ExportError:
        """The float ONNX model in the default opset, or the error that prevents it."""
        try:
            return self.float_onnx()
        except ExportError as error:
            return error

    @cached_property
    def tensor_plan(self) -> TensorPlan | None:
        """What the fast placement of the QDQ file quantizes beside what layers read; None if it is impossible."""
        onnx = self.default_onnx
        if isinstance(onnx, ExportError):
            return None
        return self.plan_tensors(
            onnx.model,
            [binding for binding in onnx.bindings if binding.layer in self.weights],
            is_float32=all(self.traced.layers[name].dtype == "float32" for name in self.weights),
        )

    def tensor_watch(self) -> TensorWatch | None:
        """Where the tensors of the plan are computed, to observe them; None if there is no plan."""
        onnx, plan = self.default_onnx, self.tensor_plan
        if plan is None or isinstance(onnx, ExportError):
            return None
        watch = find_tensors(self.traced, self.fused.fusions, plan.observed, onnx.tensors)
        return replace(watch, given=self.layer_inputs(self.input_tensors()))

    def input_tensors(self) -> Mapping[str, str]:
        """By layer: the ONNX name of its input."""
        onnx = self.default_onnx
        return {} if isinstance(onnx, ExportError) else inputs_of_nodes(onnx.model)

    # -- interface of the quantization flow ----------------------------------------------------------------------------

    def start_calibration(self, ranks: Ranks = ALONE) -> Calibration:
        """Start a calibration of a copy of the model with fake-quantized weights."""
        intermediate = self.tensor_watch()
        calibrated = start_calibration(
            self, intermediate=intermediate, ranks=ranks, called_once=self.layers_called_once
        )

        def run(batches: Iterable[Arguments]) -> None:
            for args, kwargs in batches:
                calibrated.model(*args, **kwargs)
            del calibrated.model.forward  # it refers to the model: the copy would be freed late, with its weights

        return Calibration(session=calibrated.session, run=run, observes_tensors=intermediate is not None)

    def simulation(self, layers: Mapping[str, LayerQParams], *, deploy: bool = False) -> nn.Module:
        """A fake-quantized module in eval mode that matches the fake-quant file; of a part, in the whole model."""
        _refuse_deploy(deploy=deploy)
        simulated = fake_quant_copy(self, layers)
        return simulated if self.part is None else self.part.whole_with(simulated)

    def runner(self, simulation: nn.Module) -> Callable[[Arguments], Any]:
        """A function that calls the module without gradients."""

        def run(arguments: Arguments) -> Any:  # noqa: ANN401  whatever the user's forward returns
            with torch.no_grad():
                return simulation(*arguments[0], **arguments[1])

        return run

    def compared_models(
        self, layers: Mapping[str, LayerQParams], *, deploy: bool = False
    ) -> tuple[ComparedModel, ComparedModel]:
        """The folded float model and the simulated one."""
        _refuse_deploy(deploy=deploy)
        places = {name: name for name in self.weights}
        simulated = fake_quant_copy(self, layers, is_private=True)
        return TorchRun(self.fused.model, places, self.weights), TorchRun(simulated, places, shapes_vary=True)

    def models_to_check(self, layers: Mapping[str, LayerQParams]) -> tuple[ComparedModel, ComparedModel]:
        """Both: ONNX files compute what the module computes, but by other code."""
        return self.compared_models(layers)

    def batches(self, data: object, inputs: BatchInputs | None = None) -> Batches:
        """Convert data to arguments of the model; data is that of the whole model."""
        return torch_batches(self.fused.model, data, inputs) if self.part is None else self.part.batches(data, inputs)

    def simulation_batches(self, data: object, inputs: BatchInputs | None = None) -> Batches:
        """Convert data to arguments of the simulation."""
        return torch_batches(self.fused.model if self.part is None else self.part.whole, data, inputs)

    def sample_count(self, batch: object, arguments: object) -> int:
        """The size of the first dimension of the first tensor in the batch."""
        del arguments
        return samples_in(batch)

    @property
    def any_batch_size(self) -> bool:
        """Whether the first axis of every input is dynamic."""
        names = self.traced.names
        return all(0 in names.axes.get(name, {}) for name in names.inputs)

    def onnx_inputs(self, arguments: Arguments) -> dict[str, NDArray[Any]]:
        """The tensors among the arguments of the forward, by the input names of the ONNX files."""
        return self.traced.onnx_inputs(arguments)

    def onnx_outputs(self, arrays: Mapping[str, NDArray[Any]]) -> ModelOutput:
        """The outputs of an ONNX file in the structure that the module returns; numbers and the like are its own."""
        count = sum(1 for _ in tensors_in(self._example_output))
        if count != len(arrays):
            raise ModelError(
                f"the file has {counted(len(arrays), 'output')}, the model returns {counted(count, 'tensor')}"
            )
        return torch_output(with_tensors(self._example_output, map(as_tensor, arrays.values())))

    @cached_property
    def _example_output(self) -> object:
        """What the folded module returns for the example; only the structure is of interest."""
        with torch.no_grad():
            return self.fused.model(*self.traced.inputs.args, **self.traced.inputs.kwargs)

    def float_model(self, opset: int | None) -> ModelProto:
        """The folded model as ONNX."""
        onnx = self.default_onnx if opset in (None, DEFAULT_OPSET) else self.float_onnx(opset or DEFAULT_OPSET)
        if isinstance(onnx, ExportError):
            raise onnx
        return onnx.model


def _refuse_deploy(*, deploy: bool) -> None:
    if deploy:
        raise ArgumentError("deploy: the deploy model of a PyTorch model runs on the chip only; leave it out")


def _is_like(given: object, example: object) -> bool:
    """Whether a forward cannot tell two arguments apart before it computes with them."""
    if isinstance(given, Tensor) and isinstance(example, Tensor):
        return given.shape == example.shape and given.dtype == example.dtype
    return type(given) is type(example) and given == example


def prepare(
    traced: Traced,
    plan: Plan,
    *,
    balance: Mapping[str, Tensor] | None = None,
    data: Callable[[], Iterable[Arguments]] | None = None,
    adaround: AdaRoundMode | Literal["later"] = "plain",
    ranks: Ranks = ALONE,
    equalize: Callable[[], Iterable[Arguments]] | None = None,
) -> TorchPreparation:
    """Fold, and quantize the weights; the user's model is not changed.

    Args:
        traced: the model.
        plan: the quantization plan.
        balance: DMQ factors by layer, for the layers that are balanced.
        data: returns the inputs that AdaRound learns from; by default the example input.
        adaround: the AdaRound method; "later": all weights are rounded by ARQ, because blocks learn their rounding.
        ranks: the processes that quantize together; in its fast mode AdaRound divides the work among them.
        equalize: returns the data from which channels are equalized across layers; None: they are not.

    Raises:
        CalibrationError: no layer is to be quantized, or weights cannot be quantized; the message names the layer.
        ArgumentTypeError: the weights have a data type that cannot be quantized.
        ModelError: the model cannot be copied.
    """
    chosen = enabled_layers(plan, traced.layers)
    fused = fuse(traced, do_fusion=plan.do_fusion, skip=plan.skip_fusion_layers)
    if equalize is not None:
        fused = equalized(traced, fused, plan, equalize())
    weights: dict[str, QuantizedWeights] = {}
    for layer in chosen:
        module = layer_module(fused.model, layer.name)
        weights[layer.name] = quantize_weights(
            layer,
            float_weights(module),
            balance=(balance or {}).get(layer.name),
            can_pack=traced.layers[layer.name].can_pack,
        )
    preparation = TorchPreparation.of(traced, fused, plan, weights)
    if adaround != "later" and any(isinstance(layer.weight, AdaRoundSettings) for layer in chosen):
        inputs = (traced.inputs.args, traced.inputs.kwargs)
        learned = learn_rounding(preparation, data or (lambda: [inputs]), fast=adaround == "fast", ranks=ranks)
        preparation = replace(preparation, weights={**weights, **learned})
    return preparation
