"""Quantizes an MNIST net and compares the accuracy before and after.

Run it in the folder ``mnist``::

    python3 src/mnist_sample.py --model_file pre_model/mnist-deploy.prototxt \
        --weights_file pre_model/mnist-model.caffemodel --cpu

Without a caffemodel the net is trained first. Results are in ``results``, intermediate files in ``tmp``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from convert_mnist_dataset import convert
from datasets import LMDBData

import amct_caffe as amct
from amct_caffe import caffe

BATCH_SIZE = 64
CALIBRATION_BATCHES = 2
MOST_BATCHES = 100
"""For the accuracy, unless --iterations or --benchmark is given."""
TMP = Path("tmp")


def parse_args() -> argparse.Namespace:
    """The arguments of the guide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_file", required=True, help="the prototxt")
    parser.add_argument("--weights_file", required=True, help="the caffemodel; trained and written if there is none")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", type=int, metavar="GPU_ID", help="run on this GPU")
    device.add_argument("--cpu", action="store_true", help="run on the CPU (the default)")
    parser.add_argument(
        "--iterations", type=int, help="batches of 64 images for the accuracy; all, at most 100, unless given"
    )
    parser.add_argument("--caffe_dir", help="accepted and not needed: no Caffe has to be installed")
    parser.add_argument("--pre_test", action="store_true", help="only run the float model")
    parser.add_argument("--benchmark", action="store_true", help="use all images of the LMDB of --dataset")
    parser.add_argument("--dataset", type=Path, help="an LMDB of your own with test digits")
    args = parser.parse_args()
    if args.benchmark and args.dataset is None:
        parser.error("--benchmark needs --dataset with the path of an LMDB")
    return args


def set_device(gpu: int | None) -> None:
    """Choose CPU or GPU, for the engine and for quantization."""
    if gpu is None:
        caffe.set_mode_cpu()
        amct.set_cpu_mode()
    else:
        caffe.set_mode_gpu()
        caffe.set_device(gpu)
        amct.set_gpu_mode()


def train(weights_file: Path) -> None:
    """Train the net of ``pre_model`` on the training LMDB and write its caffemodel."""
    print(f"[AMCT][INFO] {weights_file} does not exist: the net is trained")
    convert(TMP / "mnist_data", "train", TMP / "mnist_train_lmdb")
    solver = caffe.get_solver("pre_model/mnist-solver.prototxt")
    solver.solve()
    solver.net.save(str(weights_file))


def run_caffe_model(model_file: object, weights_file: object, data: LMDBData, iterations: int) -> float:
    """Run a model on some batches and return its top-1 accuracy."""
    net = caffe.Net(str(model_file), str(weights_file), caffe.TEST)
    hits = []
    for images, labels in data.batches(iterations):
        hits.append(net.forward(data=images)["prob"].argmax(1) == labels)
    return float(np.mean(hits))


def quantize(args: argparse.Namespace, data: LMDBData) -> None:
    """The guide's flow: config, init, weights, calibration by running the modified model, save."""
    config, record = str(TMP / "config.json"), str(TMP / "record.txt")
    modified = str(TMP / "modified_model.prototxt"), str(TMP / "modified_model.caffemodel")
    amct.create_quant_config(config, args.model_file, args.weights_file, batch_num=CALIBRATION_BATCHES)
    graph = amct.init(config, args.model_file, args.weights_file, record)
    amct.weights_quantize_model(graph, *modified)
    amct.activation_quantize_model(graph, *modified)
    run_caffe_model(*modified, data, CALIBRATION_BATCHES)
    amct.save_model(graph, "Both", "results/mnist")


def main() -> int:
    """Accuracy before, quantization, accuracy after."""
    args = parse_args()
    set_device(args.gpu)
    if not Path(args.weights_file).is_file():
        train(Path(args.weights_file))
    dataset = args.dataset
    if dataset is None:
        dataset = TMP / "mnist_test_lmdb"
        convert(TMP / "mnist_data", "test", dataset)
    data = LMDBData(dataset, BATCH_SIZE)
    batches = max(1, len(data) // BATCH_SIZE)
    iterations = args.iterations or (batches if args.benchmark else min(batches, MOST_BATCHES))
    before = run_caffe_model(args.model_file, args.weights_file, data, iterations)
    if args.pre_test:
        print(f"******final top1:{before}")
        print("[AMCT][INFO]Run mnist sample without quantize success!")
        return 0
    quantize(args, data)
    after = run_caffe_model(
        "results/mnist_fake_quant_model.prototxt", "results/mnist_fake_quant_weights.caffemodel", data, iterations
    )
    print(f"******final top1:{after}")
    print(f"[AMCT][INFO] mnist top1 before quantize is {before}, after quantize is {after}")
    print("[AMCT][INFO]Run mnist sample with quantize success!")
    return 0


if __name__ == "__main__":
    sys.exit(main())
