"""Post-training quantization by AMCT's functions, as scripts have them: ``python examples/pytorch/ptq.py``."""

from __future__ import annotations

from shared import OUTPUT, accuracy, calibration_batches, in_onnxruntime, trained_network

import amct_pytorch as amct

CONFIG, RECORD, MODIFIED = OUTPUT / "ptq.json", OUTPUT / "ptq_record.txt", OUTPUT / "ptq_modified.onnx"


def main() -> None:
    """Write the config, calibrate, save, and measure the file for onnxruntime."""
    model, batches = trained_network(), calibration_batches()

    # Every layer with its settings; edit the file, or give a .cfg as config_defination.
    amct.create_quant_config(CONFIG, model, batches[0], batch_num=len(batches))

    # A copy with quantized weights that observes its activations in the next batch_num forwards.
    names = {"input_names": ["image"], "output_names": ["scores"], "dynamic_axes": {"image": {0: "batch"}}}
    calibrating = amct.quantize_model(CONFIG, MODIFIED, RECORD, model, batches[0], **names)
    for batch in batches:
        calibrating(batch)

    # ptq_qdq_model.onnx for onnxruntime, ptq_deploy_model.onnx for the chip, ptq_fake_quant_model.onnx to simulate it.
    amct.save_model(MODIFIED, RECORD, OUTPUT / "ptq")

    print(f"float                {accuracy(model):6.2f} %")
    print(f"INT8, onnxruntime    {accuracy(in_onnxruntime(OUTPUT / 'ptq_qdq_model.onnx')):6.2f} %")


if __name__ == "__main__":
    main()
