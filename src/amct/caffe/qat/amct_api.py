"""AMCT's functions for quantization-aware training of Caffe models, around the training itself.

create_quant_retrain_config → create_quant_retrain_model → the user's own solver → ``save_quant_retrain_model``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.arguments import input_file, input_files, output_file
from amct.caffe.prototxt import caffe_function
from amct.caffe.ptq.save import CAFFE_FORMATS, check_save_type, log_layers, prefix_of
from amct.caffe.qat.insertion import RetrainFiles, write_retrain_config, write_retrain_model
from amct.caffe.qat.save import Trained, save_trained

if TYPE_CHECKING:
    from amct.atomic import AnyPath


@caffe_function
def create_quant_retrain_config(
    config_file: AnyPath,
    model_file: AnyPath,
    weights_file: AnyPath,
    config_defination: AnyPath | None = None,
    custom_proto: AnyPath | None = None,
) -> None:
    """Write the JSON config of retraining: every layer that can be quantized, with its settings.

    Args:
        config_file: The file to write; an existing file is overwritten.
        model_file: The prototxt.
        weights_file: The caffemodel.
        config_defination: A simple config (``.cfg``) of retraining.
        custom_proto: A ``custom.proto`` with messages of your own layers (not in AMCT).

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        FileError: a file cannot be read or written.
        ParseError, ModelError, ConfigError: a file is malformed or invalid.
    """
    output_file(config_file, "config_file")
    input_files(model_file=model_file, weights_file=weights_file)
    if config_defination is not None:
        input_file(config_defination, "config_defination")
    write_retrain_config(config_file, model_file, weights_file, config_defination, custom_proto)


@caffe_function
def create_quant_retrain_model(
    model_file: AnyPath,
    weights_file: AnyPath,
    config_file: AnyPath,
    modified_model_file: AnyPath,
    modified_weights_file: AnyPath,
    scale_offset_record_file: AnyPath,
    custom_proto: AnyPath | None = None,
) -> None:
    """Write a model that trains with rounded data and weights, for both phases.

    Train it with a solver that has ``net``, ``test_interval`` and ``test_iter`` above 0 and
    ``test_initialization: false``: the record is written in the TEST phase.

    Args:
        model_file: The prototxt, with the layers of both phases.
        weights_file: The caffemodel of the trained float model.
        config_file: The JSON config that ``create_quant_retrain_config`` wrote, possibly edited.
        modified_model_file: Where the new prototxt is written.
        modified_weights_file: Where the new caffemodel is written.
        scale_offset_record_file: The record file; emptied if it exists.
        custom_proto: A ``custom.proto`` with messages of your own layers (not in AMCT).

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        FileError: a file cannot be read or written.
        ParseError, ModelError, ConfigError: a file is malformed, invalid, or does not belong to the model.
    """
    input_files(model_file=model_file, weights_file=weights_file, config_file=config_file)
    files = RetrainFiles(
        config=config_file,
        model=output_file(modified_model_file, "modified_model_file"),
        weights=output_file(modified_weights_file, "modified_weights_file"),
        record=output_file(scale_offset_record_file, "scale_offset_record_file"),
    )
    write_retrain_model(model_file, weights_file, files, custom_proto)


@caffe_function
def save_quant_retrain_model(
    retrained_model_file: AnyPath,
    retrained_weights_file: AnyPath,
    save_type: str,
    save_path: AnyPath,
    scale_offset_record_file: AnyPath | None = None,
    config_file: AnyPath | None = None,
    custom_proto: AnyPath | None = None,
) -> None:
    """Write the fake-quant and deploy models of a retrained model.

    With a deploy model come its form for ATC (``<prefix>_atc_model.prototxt``: Input layers, no losses) and a QDQ ONNX
    file.

    Args:
        retrained_model_file: The prototxt that ``create_quant_retrain_model`` wrote.
        retrained_weights_file: The caffemodel of a snapshot of its training.
        save_type: ``Fakequant``, ``Deploy`` or ``Both``.
        save_path: Folder and prefix of the files, such as ``results/model``.
        scale_offset_record_file: The record that the TEST phase wrote; None: the one that the prototxt names.
        config_file: The config; None: the one that the prototxt names.
        custom_proto: A ``custom.proto`` with messages of your own layers (not in AMCT).

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid.
        FileError: a file cannot be read or written.
        ParseError, ModelError, ConfigError: a file is malformed, invalid, or does not belong to the model.
        RecordError: the TEST phase has not written the record.
    """
    check_save_type("save_quant_retrain_model", save_type)
    where = prefix_of(save_path)
    input_files(retrained_model_file=retrained_model_file, retrained_weights_file=retrained_weights_file)
    trained = Trained.read(retrained_model_file, retrained_weights_file, custom_proto)
    record_file = trained.file_of("scale_offset_record_file", scale_offset_record_file)
    config = trained.file_of("config_file", config_file)
    formats = CAFFE_FORMATS[save_type]
    formats = (*formats, "qdq") if "deploy" in formats else formats
    made, _ = save_trained(trained, config, record_file, where, formats)
    log_layers(formats, made.results)
