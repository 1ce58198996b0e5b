"""Quantizes ResNet-50 with weights of 4 bits (SNQ): 16 values per channel.

Run it in the folder ``resnet50``::

    python3 src/snq_resnet50_sample.py --model_file pre_model/ResNet-50-deploy.prototxt \
        --weights_file pre_model/ResNet-50-model.caffemodel --cfg_define src/snq_files/snq_quant.cfg --cpu

The weights change so much that the batch norms are updated before the activations are calibrated. Results are in
``results/calibration_results``, intermediate files in ``tmp``.
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
    set_device,
    test_quantized,
)

import amct_caffe as amct
from amct_caffe import caffe

if TYPE_CHECKING:
    import argparse

RESULT = "results/calibration_results/ResNet50"


def forward_only(model: tuple[str, str], args: argparse.Namespace, count: int) -> None:
    """Run a model on ``count`` batches for what its own layers do with them."""
    net = caffe.Net(*model, caffe.TEST)
    name = net.inputs[0]
    for images, _ in Pictures(args).repeated(net.blobs[name].shape[-1], count):
        net.blobs[name].reshape(*images.shape)
        net.forward(**{name: images})


def quantize(args: argparse.Namespace) -> None:
    """The guide's flow with updated batch norms: two modified models, both run by the user."""
    config, record = str(TMP / "config.json"), str(TMP / "scale_offset_record.txt")
    first = str(TMP / "modified_model.prototxt"), str(TMP / "modified_model.caffemodel")
    second = str(TMP / "activation_modified_model.prototxt"), str(TMP / "activation_modified_model.caffemodel")
    amct.create_quant_config(config, args.model_file, args.weights_file, config_defination=args.cfg_define)
    graph = amct.init(config, args.model_file, args.weights_file, record)
    amct.weights_quantize_model(graph, *first)
    if graph.plan.update_bn is not None:
        forward_only(first, args, graph.plan.update_bn.bn_update_iterations)
    amct.activation_quantize_model(graph, *second)
    forward_only(second, args, graph.plan.batch_num)
    amct.save_model(graph, "Both", RESULT)


def main() -> int:
    """Run the float model, or quantize it and run the result."""
    parser = argument_parser(__doc__)
    add_test_arguments(parser)
    parser.add_argument("--cfg_define", default="src/snq_files/snq_quant.cfg", help="the simple config")
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
