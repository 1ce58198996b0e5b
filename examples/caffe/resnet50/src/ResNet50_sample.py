"""Quantizes ResNet-50, or another classification net, with INT8 weights.

Run it in the folder ``resnet50``::

    python3 src/ResNet50_sample.py --model_file pre_model/ResNet-50-deploy.prototxt \
        --weights_file pre_model/ResNet-50-model.caffemodel --cpu

Results are in ``results/calibration_results``, intermediate files in ``tmp``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from classification import (
    TMP,
    Pictures,
    add_test_arguments,
    argument_parser,
    check_files,
    pre_test,
    run_caffe_model,
    set_device,
    test_quantized,
)

import amct_caffe as amct

if TYPE_CHECKING:
    import argparse

CALIBRATION_BATCHES = 2
RESULT = "results/calibration_results/ResNet50"


def quantize(args: argparse.Namespace) -> None:
    """The guide's flow: config, init, weights, calibration by running the modified model, save."""
    config, record = str(TMP / "config.json"), str(TMP / "scale_offset_record.txt")
    modified = str(TMP / "modified_model.prototxt"), str(TMP / "modified_model.caffemodel")
    if args.cfg_define is not None:
        amct.create_quant_config(config, args.model_file, args.weights_file, config_defination=args.cfg_define)
    else:
        amct.create_quant_config(config, args.model_file, args.weights_file, CALIBRATION_BATCHES)
    graph = amct.init(config, args.model_file, args.weights_file, record)
    amct.weights_quantize_model(graph, *modified)
    amct.activation_quantize_model(graph, *modified)
    run_caffe_model(*modified, Pictures(args), graph.plan.batch_num)
    amct.save_model(graph, "Both", RESULT)


def main() -> int:
    """Run the float model, or quantize it and run the result."""
    parser = argument_parser(__doc__)
    add_test_arguments(parser)
    parser.add_argument("--cfg_define", help="a simple config; by default INT8 for every layer")
    args = parser.parse_args()
    check_files(args)
    set_device(args.gpu)
    if args.pre_test:
        pre_test(args)
        return 0
    quantize(args)
    test_quantized(RESULT, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
