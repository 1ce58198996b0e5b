"""What a front door implements, so that the one flow can quantize its kind of model.

::

    Door                reads a model: its layers for the config, its batches, and the preparation of a plan
      └ prepare → PreparedModel    the folded model with quantized weights
                    ├ start_calibration → Calibration      runs batches, its session observes them
                    ├ compared_models → ComparedModel × 2  the float and the simulated model, layer by layer
                    ├ report_layers                        what a report shows of each quantized layer
                    └ files                                what a save writes

Everything else (config to plan, batch counting, record, comparison, report, summary) is written once, in this room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from amct.calibration import ALONE

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from onnx import ModelProto

    from amct.calibration import CalibrationResult, CalibrationSession, Ranks
    from amct.config.plan import Plan
    from amct.config.python_config import AnyConfig
    from amct.export.check.losses import Reference
    from amct.export.formats import ExportedModel
    from amct.export.request import SaveRequest
    from amct.export.saving import ModelFiles
    from amct.model import Skip
    from amct.numerics.qparams import LayerQParams, Observed
    from amct.pipeline.batches import Batches, BatchInputs
    from amct.pipeline.flow import Passes
    from amct.pipeline.weights import QuantizedWeights
    from amct.record import AnyRecord
    from amct.report.content import LayerNote
    from amct.report.filling import ReportLayer
    from amct.report.network import Network

OnTensor = Callable[[str, Tensor], None]
"""Called with the name of a layer, or the key of one of its inputs, and the tensor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelOutput:
    """What one run of a model returned.

    Attributes:
        value: As a metric gets it.
        tensors: The floating-point outputs with their names; a model without output names repeats one name.
    """

    value: Any
    tensors: Sequence[tuple[str, Tensor]]


class ComparedModel(Protocol):
    """A model that runs on batches and shows what its layers compute."""

    @property
    def shapes_vary(self) -> bool:
        """Whether a tensor may have another shape in the other model, such as a varying number of boxes."""

    def watch(
        self, *, outputs: OnTensor | None = None, inputs: OnTensor | None = None
    ) -> AbstractContextManager[Callable[[Any], ModelOutput]]:
        """Within the context, the function runs the model on the arguments of one batch.

        Args:
            outputs: Called with the output of each quantized layer; several times for a layer that runs several times.
            inputs: Called with each input of the quantized layers, under the key that ``ReportLayer`` has for it.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """A model that is run on calibration data, and the session that observes it.

    Attributes:
        session: Counts batches and holds the observers.
        run: Runs the model on the arguments of each batch.
        observes_tensors: Whether intermediate tensors are observed, as the fast placement of the QDQ file needs.
    """

    session: CalibrationSession
    run: Callable[[Iterable[Any]], None]
    observes_tensors: bool = True


@dataclass(frozen=True, kw_only=True)
class LayerFreedom:
    """What a quantized layer could become instead.

    Attributes:
        values: The number of its weights.
        can_pack: Whether its weights can have 4 bits.
        clustered: Whether 4-bit weights are those of SNQ (Caffe).
        wide: Whether its inputs can have 16 bits.
    """

    values: int
    can_pack: bool
    clustered: bool = False
    wide: bool = False


class PreparedModel(Protocol):
    """A model with folded batch norms and quantized weights."""

    @property
    def name(self) -> str:
        """The model's name, for people."""

    @property
    def plan(self) -> Plan:
        """What is done to each layer."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The quantized layers, in execution order."""

    @property
    def folded_layers(self) -> Mapping[str, Sequence[str]]:
        """By layer: the layers of the original model that were folded into it."""

    @property
    def fused_notes(self) -> tuple[LayerNote, ...]:
        """A note for each folded layer, for the report."""

    @property
    def skips(self) -> tuple[Skip, ...]:
        """Every layer that stays float and every batch norm that was not folded, with the reason."""

    def start_calibration(self, ranks: Ranks = ALONE) -> Calibration:
        """A new calibration of the model, by one process or several together."""

    def quantized_layers(self, result: CalibrationResult) -> Mapping[str, LayerQParams]:
        """The parameters of the weights and the inputs of every layer."""

    def freedom(self) -> Mapping[str, LayerFreedom]:
        """By quantized layer: what it could become instead."""

    def variant(
        self, plan: Plan, layers: Mapping[str, LayerQParams], learned: Mapping[str, QuantizedWeights] = ...
    ) -> tuple[PreparedModel, Mapping[str, LayerQParams]]:
        """The same calibrated model with other layers, weights or bits, and the parameters of its layers.

        Args:
            plan: What is done to each layer; it can switch off layers of this model, and none on.
            layers: The parameters of this model, from its calibration.
            learned: Weights whose rounding is learned, for the layers that ask for it.

        Raises:
            CalibrationError: No layer is left, or weights cannot be quantized; the message names the layer.
        """

    def config_of(self, plan: Plan) -> dict[str, Any]:
        """A full config in the door's dialect that gives this plan."""

    def record_of(self, layers: Mapping[str, LayerQParams]) -> AnyRecord:
        """The parameters as a record in the door's own dialect."""

    deploy_file: str
    """The end of the name of the deploy file that ``compared_models(deploy=True)`` computes; empty if it cannot."""

    def simulation(self, layers: Mapping[str, LayerQParams], *, deploy: bool = False) -> Any:  # noqa: ANN401  the door's kind of model
        """The quantized model simulated in the door's own framework; with ``deploy`` in integers."""

    def runner(self, simulation: Any) -> Callable[[Any], Any]:  # noqa: ANN401  the door's kind of model
        """A function that runs a simulated model on the arguments of one batch and returns its outputs."""

    def compared_models(
        self, layers: Mapping[str, LayerQParams], *, deploy: bool = False
    ) -> tuple[ComparedModel, ComparedModel]:
        """The folded float model and the simulated one."""

    def models_to_check(self, layers: Mapping[str, LayerQParams]) -> tuple[ComparedModel | None, ComparedModel | None]:
        """The models of ``compared_models`` that run before a save, for the check of its files.

        None: the float ONNX model, or a file that is the simulation, gives the same outputs and runs anyway.
        """

    def output_tensors(self, layers: Mapping[str, LayerQParams]) -> Mapping[str, tuple[str, ...]]:
        """By layer: the tensors of the float ONNX model that ``compared_models`` show as its output, in their order."""

    def report_layers(self, layers: Mapping[str, LayerQParams]) -> Sequence[ReportLayer]:
        """What a report shows of each quantized layer."""

    def float_model(self, opset: int | None) -> ModelProto:
        """The folded float model as ONNX, its nodes named after their layers; None: the door's default opset."""

    def with_only(self, layers: Mapping[str, LayerQParams], names: Collection[str]) -> ExportedModel:
        """The folded float model as ONNX with just some layers quantized, by standard operators.

        Args:
            layers: The parameters of all layers.
            names: The layers to quantize.

        Raises:
            ExportError: The model or one of these layers has no such form.
        """

    def batches(self, data: object, inputs: BatchInputs | None = None) -> Batches:
        """Data as batches of the model."""

    def simulation_batches(self, data: object, inputs: BatchInputs | None = None) -> Batches:
        """Data as batches of the simulation, which may hold the model as a part."""

    def sample_count(self, batch: Any, arguments: Any) -> int:  # noqa: ANN401  the user's and the door's own kinds
        """The number of samples in one batch."""

    @property
    def any_batch_size(self) -> bool:
        """Whether the ONNX files take batches of any size."""

    def onnx_inputs(self, arguments: Any) -> dict[str, NDArray[Any]]:  # noqa: ANN401  the door's own kind
        """The arguments of one batch by the input names of the ONNX files."""

    def onnx_outputs(self, arrays: Mapping[str, NDArray[Any]]) -> ModelOutput:
        """The outputs of an ONNX file by name, in the form in which the door's own models return them."""

    def network(self, integer_tensors: Collection[str] = ()) -> Network | None:
        """The network as a graph for the report; None if it has no such form."""

    def files(
        self,
        request: SaveRequest,
        layers: Mapping[str, LayerQParams],
        tensors: Mapping[str, Observed] | None,
        reference: Reference | None,
    ) -> ModelFiles:
        """The model as files.

        Args:
            request: What is asked for.
            layers: The parameters of its layers.
            tensors: Those of the tensors between layers; None if nothing was observed.
            reference: What the written files are compared with; None: they are not.
        """


class Door(Protocol):
    """Reads one kind of model."""

    @property
    def weight_bytes(self) -> int:
        """The bytes of the model's weights: memory is spent differently on large ones."""

    def batches(self, data: object, inputs: BatchInputs | None = None) -> Batches:
        """Calibration data as batches of the model."""

    def plan(self, config: AnyConfig, example: Any, batches: int | None) -> tuple[Plan, bool]:  # noqa: ANN401  the door's arguments
        """What a config asks for, and whether it leaves the number of batches open.

        Args:
            config: A file, its content, a ``QuantConfig`` or None.
            example: The first batch.
            batches: How many there are, where that is known.
        """

    def fingerprint(self) -> str:
        """A fingerprint of the model and the options of the door; called after ``plan`` and before ``prepare``."""

    def reads_data_first(self, plan: Plan) -> bool:
        """Whether ``prepare`` needs a pass over the data of its own (DMQ, AdaRound, equalization)."""

    def prepare(self, plan: Plan, data: Passes, ranks: Ranks = ALONE) -> PreparedModel:
        """Fold, balance or equalize, and quantize the weights."""
