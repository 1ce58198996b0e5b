"""A template for the post-training quantization of your own net: change what stands between the marked lines.

As it is, it quantizes the net of the MNIST sample with random images. Run it in the folder of that sample, once
``mnist_sample.py`` has made its files: ``python3 ../amct_caffe_calibration_template.py``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

import amct_caffe as amct
from amct_caffe import caffe


@dataclass
class Args:
    """What the template needs to know."""

    model_name: str = ""  # the prefix of the files that are written
    model_file: str = ""  # the prototxt
    weights_file: str = ""  # the caffemodel
    cpu: bool = True  # False: run on the GPU gpu_id
    gpu_id: int = 0
    pre_test: bool = False  # True: only run the float model
    iterations: int = 5  # batches for the test of the result
    cfg_define: str | None = None  # a simple config; None: the defaults


args = Args()
# ---------------------------------------------------------------- your own part starts
args.model_name = "mnist"
args.model_file = "pre_model/mnist-deploy.prototxt"
args.weights_file = "pre_model/mnist-model.caffemodel"
# ---------------------------------------------------------------- your own part ends


def run_caffe_model(model_file: str, weights_file: str, iterations: int) -> None:
    """Run a model on some batches of data."""
    net = caffe.Net(model_file, weights_file, caffe.TEST)
    # ---------------------------------------------------------------- your own part starts
    # Give the net your own data, prepared as for training; check the outputs if you have labels.
    random = np.random.default_rng(0)
    for _ in range(iterations):
        data = random.random(net.blobs["data"].shape, np.float32)
        net.forward(data=data)
    # ---------------------------------------------------------------- your own part ends


def main() -> int:
    """The steps of post-training quantization."""
    if args.cpu:
        caffe.set_mode_cpu()
        amct.set_cpu_mode()
    else:
        caffe.set_mode_gpu()
        caffe.set_device(args.gpu_id)
        amct.set_gpu_mode()

    if args.pre_test:
        run_caffe_model(args.model_file, args.weights_file, args.iterations)
        print(f"[INFO]Run {args.model_name} without quantize success!")
        return 0

    # One entry per layer: what is quantized, and how.
    config_json_file, batch_num = "tmp/config.json", 2
    if args.cfg_define is not None:
        amct.create_quant_config(
            config_json_file, args.model_file, args.weights_file, config_defination=args.cfg_define
        )
    else:
        amct.create_quant_config(config_json_file, args.model_file, args.weights_file, batch_num)

    # Phase 0: read config and model.
    graph = amct.init(config_json_file, args.model_file, args.weights_file, "tmp/scale_offset_record.txt")

    # Phase 1: fold batch norms, quantize the weights, insert the layers that calibrate.
    modified_model_file = "tmp/modified_model.prototxt"
    modified_weights_file = "tmp/modified_model.caffemodel"
    amct.weights_quantize_model(graph, modified_model_file, modified_weights_file)
    amct.activation_quantize_model(graph, modified_model_file, modified_weights_file)

    # Phase 2: run the modified model on at least batch_num batches.
    run_caffe_model(modified_model_file, modified_weights_file, batch_num)

    # Phase 3: write the fake-quant model, for tests, and the deploy model, for the chip.
    result_path = f"results/{args.model_name}"
    amct.save_model(graph, "Both", result_path)

    # Phase 4: run the fake-quant model.
    run_caffe_model(
        f"{result_path}_fake_quant_model.prototxt", f"{result_path}_fake_quant_weights.caffemodel", args.iterations
    )
    print(f"[INFO]Run {args.model_name} with quantize success!")
    return 0


if __name__ == "__main__":
    sys.exit(main())
