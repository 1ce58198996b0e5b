"""Quantizes ResNet-50 with factors that you computed yourself, from a record file.

Run it in the folder ``resnet50``::

    python3 src/convert_model.py --model_file pre_model/ResNet-50-deploy.prototxt \
        --weights_file pre_model/ResNet-50-model.caffemodel --record_file pre_model/record.txt --cpu

Results are in ``results/convert_results``.
"""

from __future__ import annotations

import sys

from classification import add_test_arguments, argument_parser, check_files, pre_test, set_device, test_quantized

import amct_caffe as amct

RESULT = "results/convert_results/ResNet50"


def main() -> int:
    """Run the float model, or convert it and run the result."""
    parser = argument_parser(__doc__)
    add_test_arguments(parser)
    parser.add_argument("--record_file", required=True, help="the factors, such as pre_model/record.txt")
    args = parser.parse_args()
    check_files(args)
    set_device(args.gpu)
    if args.pre_test:
        pre_test(args)
        return 0
    amct.convert_model(args.model_file, args.weights_file, args.record_file, RESULT)
    test_quantized(RESULT, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
