"""Writes what every layer computes as ``.npy`` files.

Float and quantized models can then be compared layer by layer::

    python3 dump_layer_outputs.py --model_file results/faster_rcnn_fake_quant_model.prototxt \
        --weights_file results/faster_rcnn_fake_quant_weights.caffemodel --cpu

It runs any net, also that of ``resnet50``. Files are called ``<layer>.<blob>.npy``, with "/" written as "_". ``amct
compare`` prints the differences of two models in one command.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import init_paths_for_amct  # noqa: F401 - first of all: it provides caffe and rpn
import numpy as np

import caffe


def parse_args() -> argparse.Namespace:
    """The arguments of the guide, and where the files go."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_file", default="results/faster_rcnn_fake_quant_model.prototxt", help="the prototxt")
    parser.add_argument(
        "--weights_file", default="results/faster_rcnn_fake_quant_weights.caffemodel", help="the caffemodel"
    )
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", type=int, metavar="GPU_ID", help="run on this GPU")
    device.add_argument("--cpu", action="store_true", help="run on the CPU (the default)")
    parser.add_argument("--caffe_dir", help="accepted and not needed: no Caffe has to be installed")
    parser.add_argument("--input", type=Path, help="a .npy file for the first input; random numbers without it")
    parser.add_argument("--output", type=Path, default=Path("dump"), help="the folder for the files")
    return parser.parse_args()


def main() -> int:
    """Run the net once and write its blobs."""
    args = parse_args()
    if args.gpu is not None:
        caffe.set_mode_gpu()
        caffe.set_device(args.gpu)
    with caffe.allow_python_layers():
        net = caffe.Net(args.model_file, args.weights_file, caffe.TEST)
    name = net.inputs[0]
    given = np.load(args.input) if args.input else np.random.default_rng(0).normal(0, 50, net.blobs[name].shape)
    net.blobs[name].reshape(*given.shape)
    net.blobs[name].data[...] = given
    if "im_info" in net.blobs:
        net.blobs["im_info"].data[...] = [[*given.shape[2:], 1]]
    net.forward()
    args.output.mkdir(parents=True, exist_ok=True)
    count = 0
    for layer, tops in net.top_names.items():
        for top in tops:
            np.save(args.output / f"{layer}.{top}.npy".replace("/", "_"), net.blobs[top].data)
            count += 1
    print(f"[AMCT][INFO]{count} blobs written to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
