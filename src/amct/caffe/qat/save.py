"""save_quant_retrain_model: writes the files of a model after quantization-aware training.

Factors and weights come from the trained caffemodel, so they always belong together; the record file of the TEST phase
is compared with them. Batch norms are folded without touching the integers that were trained.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from amct.arguments import input_file
from amct.caffe.engine.layer import find_layer_class
from amct.caffe.engine.layers.losses import LossLayer
from amct.caffe.engine.layers.retrain import RETRAIN_TYPES, clip_factors
from amct.caffe.engine.messages import new_message
from amct.caffe.model import CaffeModel, blob_shapes, read_retrained_model, run_net
from amct.caffe.prototxt import remove_in_place
from amct.caffe.ptq.checking import reference_beside, reference_on
from amct.caffe.ptq.deploy import Results
from amct.caffe.ptq.folding import check_global_statistics
from amct.caffe.ptq.graph import caffe_record, record_layers
from amct.caffe.ptq.quantized_weights import fold_quantized, quantize_weights
from amct.caffe.ptq.save import CaffeFiles, Inference, SaveNotes
from amct.caffe.qat.insertion import retrain_plan
from amct.config.plan import config_text
from amct.errors import AmctError, ModelError, RecordError
from amct.export.request import ExportOptions, Placement, SaveRequest, Target
from amct.export.saving import Saved, save_files
from amct.model import Skip
from amct.numerics.qparams import LayerQParams, QParams
from amct.numerics.settings import ArqSettings
from amct.printable import counted
from amct.record import diff_records, read_caffe_record, validate_record
from amct.record.conversion import caffe_layer_qparams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from amct.atomic import AnyPath
    from amct.caffe.engine.messages import ProtoMessage
    from amct.config.plan import RetrainPlan
    from amct.export.check.losses import Reference
    from amct.export.request import SavePath
    from amct.pipeline.weights import QuantizedWeights
    from amct.record import CaffeRecord


logger = logging.getLogger(__name__)

TRAINED_AS_IT_IS = ExportOptions(placement=Placement.EXACT.value, target=Target.EXACT8.value)
"""Options of the QDQ file: it has the integers that were trained, and no others."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A model after retraining.

    Attributes:
        model: The TEST phase, without in-place layers and without the layers of retraining.
        retrained: The layers of retraining.
        clips: The blobs of the RetrainDataQuant layers, by name.
        source: The prototxt and the caffemodel.
    """

    model: CaffeModel
    retrained: list[ProtoMessage]
    clips: Mapping[str, list[torch.Tensor]]
    source: tuple[str, str]

    @classmethod
    def read(cls, model_file: AnyPath, weights_file: AnyPath, custom_proto: AnyPath | None = None) -> Trained:
        """Read the prototxt of retraining and a snapshot.

        Raises:
            FileError, ParseError, ModelError: A file cannot be read or is invalid.
        """
        model = read_retrained_model(model_file, weights_file, custom_proto)
        retrained = [layer for layer in model.layers if layer.type in RETRAIN_TYPES]
        if not any(layer.type == "RetrainDataQuant" for layer in retrained):
            raise ModelError(
                f"{model_file}: there are no layers of retraining in it; give the prototxt that "
                "create_quant_retrain_model wrote"
            )
        check_global_statistics(model.net)
        clips = {layer.name: model.weights.get(layer.name, []) for layer in retrained}
        before = {layer.top[0]: layer.bottom[0] for layer in retrained if layer.type == "RetrainDataQuant"}
        kept = [layer for layer in model.layers if layer.type not in RETRAIN_TYPES]
        for layer in kept:
            for index, blob in enumerate(layer.bottom):
                layer.bottom[index] = before.get(blob, blob)
        model.set_layers(kept)
        remove_in_place(model.net)
        return cls(model=model, retrained=retrained, clips=clips, source=(str(model_file), str(weights_file)))

    def file_of(self, argument: str, given: AnyPath | None) -> Path:
        """The record or the config: as given, or as the layers of retraining name it.

        Raises:
            FileError: The file cannot be read.
        """
        if given is not None:
            return Path(input_file(given, argument))
        field = {"scale_offset_record_file": "record_file_path", "config_file": "config_file_path"}[argument]
        options = (layer.retrain_data_quant_param for layer in self.retrained if layer.type == "RetrainDataQuant")
        named = getattr(next(options), field)  # ``read`` has found one
        return Path(input_file(named, f"{argument} (None; {self.source[0]} names {named!r})"))

    def inputs(self) -> dict[str, dict[int, QParams]]:
        """The parameters of the inputs of each layer.

        Raises:
            ModelError: The caffemodel has no clips, or they are not found yet.
        """
        found: dict[str, dict[int, QParams]] = {}
        for layer in self.retrained:
            if layer.type != "RetrainDataQuant":
                continue
            options, blobs = layer.retrain_data_quant_param, self.clips[layer.name]
            factors = clip_factors(blobs, options.num_bits_d) if len(blobs) == 3 else None
            if factors is None:
                raise ModelError(
                    f'{self.source[1]}: layer "{layer.name}" (RetrainDataQuant) has no clips; give the caffemodel of a '
                    "snapshot, after at least one training iteration of this prototxt"
                )
            data = QParams.of(factors[0], factors[1], options.num_bits_d)
            found.setdefault(options.object_layer, {})[options.index] = data
        return found

    def weights(self) -> dict[str, QuantizedWeights]:
        """The integer weights as training used them."""
        found = {}
        for each in self.retrained:
            if each.type != "RetrainWeightQuant":
                continue
            options = each.retrain_weight_quant_param
            layer = self.model.layer(options.object_layer)
            settings = ArqSettings(channel_wise=options.channel_wise)
            blobs = self.model.weights[layer.name]
            found[layer.name] = quantize_weights(layer, blobs, settings, rounding="nearest", scale="full_range")
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedResults:
    """A trained model, folded and in integers.

    Attributes:
        results: The model of the TEST phase with its own data and losses.
        notes: Further content of ``quant.json``.
        inference: Its form without data and losses, or why there is none.
        handed_in: The same form of the float model that was handed in, where it is known.
    """

    results: Results
    notes: SaveNotes
    inference: Inference | str
    handed_in: CaffeModel | None = None


def trained_results(
    trained: Trained, plan: RetrainPlan, record_file: Path, handed_in: CaffeModel | None = None
) -> TrainedResults:
    """Fold a trained model and compute its integers.

    Args:
        trained: The model.
        plan: Its plan.
        record_file: The record that the TEST phase wrote, to be compared.
        handed_in: The TEST phase of the float model that was handed in, by which the ONNX files are judged.

    Raises:
        RecordError: The record file lacks factors.
        FileError: It cannot be read.
    """
    weights, inputs = trained.weights(), trained.inputs()
    layers = {name: LayerQParams(inputs=data) for name, data in inputs.items()}
    written = _checked_record(record_file, layers, trained)  # the TEST phase saw the sizes of the inputs
    layers = {name: replace(each, sizes=caffe_layer_qparams(written[name]).sizes) for name, each in layers.items()}
    folded = trained.model.copy()
    fusion = fold_quantized(folded, weights)
    left = [layer.name for layer in folded.layers if layer.name not in layers]
    skips = [Skip(name, plan.not_quantized.get(name, "not retrained")) for name in left]
    config = config_text(plan.deployed())
    result = TrainedResults(
        results=Results(folded, weights, layers),
        notes=SaveNotes(original=trained.model, fusion=fusion, not_quantized=skips, config=config),
        inference=_inference(folded, weights, layers),
    )
    return result if handed_in is None else _judged(result, handed_in)


def _judged(trained: TrainedResults, handed_in: CaffeModel) -> TrainedResults:
    """The same with what the model that was handed in returns for the inputs of the reference."""
    inference = trained.inference
    if isinstance(inference, str) or inference.reference is None:
        return trained
    original = inference_model(handed_in)
    outputs = list(run_net(original.build(()), inference.reference.inputs).items())
    inference = replace(inference, reference=replace(inference.reference, handed_in=outputs))
    return replace(trained, inference=inference, handed_in=original)


def save_trained(
    trained: Trained,
    config_file: Path,
    record_file: Path,
    where: SavePath,
    formats: Sequence[str],
    handed_in: CaffeModel | None = None,
) -> tuple[TrainedResults, Saved]:
    """Write a trained model; returns its integers and what was written. ``handed_in`` as for ``trained_results``.

    Raises:
        FileError, ParseError, ConfigError, RecordError: A file cannot be read or written, or does not fit the model.
    """
    made = trained_results(trained, retrain_plan(config_file, trained.model), record_file, handed_in)
    request = SaveRequest(where=where, formats=tuple(formats), options=TRAINED_AS_IT_IS, record_file=record_file)
    reference = reference_beside(record_file, made.results)
    files = CaffeFiles(request, made.results, made.notes, reference=reference, inference=made.inference)
    return made, save_files(files)


def _checked_record(path: Path, trained: Mapping[str, LayerQParams], model: Trained) -> CaffeRecord:
    """The record of the TEST phase, which must have the factors of every layer."""
    record = read_caffe_record(path)
    missing = [name for name in trained if name not in record.layers or not record[name].record_d]
    if missing:
        raise RecordError(
            f"Cannot find scale_d of layer '{missing[0]}' in record file {path}: {len(missing)} of "
            f"{counted(len(trained), 'layer')} without it. The TEST phase of the solver writes them: set test_iter and "
            "test_interval above 0, and train to a test"
        )
    validate_record(record, record_layers(model.model, set(trained)))
    own = caffe_record({name: LayerQParams(inputs=each.inputs) for name, each in trained.items()})
    other = caffe_record({name: LayerQParams(inputs=caffe_layer_qparams(record[name]).inputs) for name in trained})
    differences = diff_records(other, own)
    if differences:
        logger.warning(
            "%s is of another state of training than %s (%d differences, the first: %s); the factors of the caffemodel "
            "are used",
            path,
            model.source[1],
            len(differences),
            differences[0],
        )
    return record


def _inference(
    model: CaffeModel, weights: Mapping[str, QuantizedWeights], layers: Mapping[str, LayerQParams]
) -> Inference | str:
    """The form of the model for ATC and ONNX, or why there is none."""
    try:
        deployed = inference_model(model)
    except AmctError as error:
        logger.warning("no atc_model.prototxt is written: the shape of the input is unknown: %s", error)
        return str(error)
    results = Results(deployed, weights, layers)
    return Inference(results=results, reference=_onnx_reference(model, results))


def _onnx_reference(model: CaffeModel, results: Results) -> Reference | None:
    """Float and simulated outputs for a sample of the net's own data, or for random inputs if it has Input layers."""
    if any(layer.type == "Input" for layer in model.layers):
        return reference_beside(Path(), results)
    net = model.build()
    wanted = [blob for layer in results.folded_model.layers if layer.type == "Input" for blob in layer.top]
    net.forward()
    counts = blob_shapes(results.folded_model.net)
    inputs = {blob: net.blob(blob).tensor[: counts[blob][0]].detach().cpu().numpy().copy() for blob in wanted}
    return reference_on(results, inputs, "a sample of the net's own data")


_MEASURES = ("Accuracy", "Silence", "HDF5Output")


def inference_model(model: CaffeModel) -> CaffeModel:
    """A copy of a model without losses, accuracies and what only they read, with Input layers in place of its data.

    They have one sample, or as many as the data where layers fix their number.

    Raises:
        AmctError: The shapes of the data are unknown: its source cannot be read.
    """
    result = model.copy()
    shapes = blob_shapes(model.net) if any(_is_source(layer) for layer in model.layers) else {}
    kept = [layer for layer in model.layers if not _is_measure(layer)]
    read = {blob for layer in kept for blob in layer.bottom}
    result.set_layers(_with_inputs(kept, {blob: (1, *shape[1:]) for blob, shape in shapes.items() if blob in read}))
    try:
        blob_shapes(result.net)
    except ModelError:
        result.set_layers(_with_inputs(kept, {blob: shape for blob, shape in shapes.items() if blob in read}))
    return result


def _with_inputs(layers: list[ProtoMessage], shapes: Mapping[str, tuple[int, ...]]) -> list[ProtoMessage]:
    """The layers, with Input layers in place of those that make data."""
    found: list[ProtoMessage] = []
    for layer in layers:
        is_source = _is_source(layer)
        found += [_input(blob, shapes[blob]) for blob in layer.top if blob in shapes] if is_source else [layer]
    return found


def _is_source(layer: ProtoMessage) -> bool:
    """Whether a layer makes data from nowhere."""
    return not layer.bottom and bool(layer.top) and layer.type not in ("Input", "Parameter")


def _is_measure(layer: ProtoMessage) -> bool:
    """Whether a layer computes a loss or an accuracy."""
    found = find_layer_class(layer.type)
    is_loss = found is not None and issubclass(found, LossLayer)
    return is_loss or layer.type in _MEASURES or any(layer.loss_weight)


def _input(blob: str, shape: tuple[int, ...]) -> ProtoMessage:
    made = new_message("LayerParameter", name=blob, type="Input", top=[blob])
    made.input_param.shape.add().dim.extend(shape)
    return made
