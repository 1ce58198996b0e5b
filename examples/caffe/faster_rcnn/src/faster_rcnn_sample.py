"""Quantizes Faster R-CNN and draws what it finds, before and after.

Run it in the folder ``faster_rcnn/src``::

    python3 faster_rcnn_sample.py --model_file pre_model/faster_rcnn_test.pt \
        --weights_file pre_model/VGG16_faster_rcnn_final.caffemodel --cpu [--pre_test]

Pictures are read from ``datasets``: any pictures, or ``datasets/VOCdevkit/VOC2007``, which gives the mAP too. They are
drawn in ``pre_detect_results`` and ``quant_detect_results``. The prototxt has a Python layer, which is code: it runs
because this script allows it.
"""

from __future__ import annotations

import argparse
import sys
from itertools import cycle, islice
from pathlib import Path

import init_paths_for_amct  # noqa: F401 - first of all: it provides caffe and rpn
from faster_rcnn_test import SHORT_SIDE, Detector, Picture, find_pictures, run

import amct_caffe as amct
import caffe

CALIBRATION_BATCHES = 2
TMP = Path("tmp")
RESULT = "results/faster_rcnn"


def parse_args() -> argparse.Namespace:
    """The arguments of the guide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_file", required=True, help="the prototxt, such as pre_model/faster_rcnn_test.pt")
    parser.add_argument("--weights_file", required=True, help="the caffemodel")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", type=int, metavar="GPU_ID", help="run on this GPU")
    device.add_argument("--cpu", action="store_true", help="run on the CPU (the default)")
    parser.add_argument("--iterations", type=int, help="how many pictures to test; all by default")
    parser.add_argument("--pre_test", action="store_true", help="only run the float model")
    parser.add_argument("--short_side", type=int, default=SHORT_SIDE, help="size of the pictures for the net")
    args = parser.parse_args()
    for name in ("model_file", "weights_file"):
        if not Path(getattr(args, name)).is_file():
            parser.error(f"--{name}: {getattr(args, name)} does not exist. The README says which files belong here.")
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


def quantize(args: argparse.Namespace, pictures: list[Picture]) -> None:
    """The guide's flow; running the modified model on pictures calibrates it."""
    config, record = "config.json", str(TMP / "scale_offset_record" / "record.txt")
    modified = str(TMP / "modified_model.prototxt"), str(TMP / "modified_model.caffemodel")
    amct.create_quant_config(config, args.model_file, args.weights_file, CALIBRATION_BATCHES)
    graph = amct.init(config, args.model_file, args.weights_file, record)
    amct.weights_quantize_model(graph, *modified)
    amct.activation_quantize_model(graph, *modified)
    calibrated = Detector(*modified, args.short_side)
    for picture in islice(cycle(pictures), CALIBRATION_BATCHES):
        calibrated.detect(picture.path)
    amct.save_model(graph, "Both", RESULT)


def main() -> int:
    """Run the float model, or quantize it and run the result."""
    args = parse_args()
    set_device(args.gpu)
    pictures = find_pictures(Path("datasets"))[: args.iterations]
    with caffe.allow_python_layers():
        if args.pre_test:
            detector = Detector(args.model_file, args.weights_file, args.short_side)
            precision = run(detector, pictures, Path("pre_detect_results"))
            message = "Run faster_rcnn without quantize success"
        else:
            quantize(args, pictures)
            files = f"{RESULT}_fake_quant_model.prototxt", f"{RESULT}_fake_quant_weights.caffemodel"
            precision = run(Detector(*files, args.short_side), pictures, Path("quant_detect_results"))
            message = "Run faster_rcnn with quantize success"
    print(f"[AMCT][INFO]{message}!" if precision is None else f"[AMCT][INFO]{message}, and mAP is {precision}!")
    return 0


if __name__ == "__main__":
    sys.exit(main())
