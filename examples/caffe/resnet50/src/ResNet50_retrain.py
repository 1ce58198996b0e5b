"""Trains ResNet-50 for quantization (QAT) on LMDBs such as those of ImageNet.

Run it in the folder ``resnet50``::

    python3 src/ResNet50_retrain.py --model_file pre_model/ResNet-50_retrain.prototxt \
        --weights_file pre_model/ResNet-50-model.caffemodel --cpu \
        --train_data ilsvrc12_train_lmdb --test_data ilsvrc12_val_lmdb

The prototxt has a Data layer for each phase; their sources and batch sizes are replaced. Results are in
``results/retrain_results``, intermediate files and snapshots in ``tmp``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from classification import TMP, argument_parser, check_files, set_device
from google.protobuf import text_format

import amct_caffe as amct
from amct_caffe import caffe

if TYPE_CHECKING:
    import argparse

RESULT = Path("results/retrain_results/retrain")
MODEL = TMP / "model.prototxt"
MODIFIED = str(TMP / "modified_model.prototxt"), str(TMP / "modified_model.caffemodel")
SOLVER = TMP / "solver.prototxt"


def parse_args() -> argparse.Namespace:
    """The arguments of the guide."""
    parser = argument_parser(__doc__)
    parser.add_argument("--train_data", required=True, help="LMDB of training pictures")
    parser.add_argument("--test_data", required=True, help="LMDB of test pictures")
    parser.add_argument("--train_batch", type=int, default=32, help="pictures per training batch")
    parser.add_argument("--train_iter", type=int, default=1000, help="training iterations")
    parser.add_argument("--test_batch", type=int, default=1, help="pictures per test batch")
    parser.add_argument("--test_iter", type=int, default=500, help="test batches")
    return parser.parse_args()


def read_net(path: object) -> caffe.proto.caffe_pb2.NetParameter:
    """Read a prototxt."""
    return text_format.Parse(Path(str(path)).read_text(), caffe.proto.caffe_pb2.NetParameter())


def write_model(args: argparse.Namespace) -> tuple[str, str]:
    """Write the prototxt with the data of the command line; returns the blobs of the scores and of the labels."""
    net = read_net(args.model_file)
    for layer in net.layer:
        if layer.type == "Data":
            is_test = any(rule.phase == caffe.TEST for rule in layer.include)
            layer.data_param.source = args.test_data if is_test else args.train_data
            layer.data_param.batch_size = args.test_batch if is_test else args.train_batch
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    MODEL.write_text(text_format.MessageToString(net))
    (loss,) = [layer for layer in net.layer if layer.type == "SoftmaxWithLoss"]
    return loss.bottom[0], loss.bottom[1]


def train(args: argparse.Namespace) -> str:
    """Train the modified model by a solver with a TEST phase at its end; returns the snapshot."""
    solver = caffe.proto.caffe_pb2.SolverParameter()
    solver.net = MODIFIED[0]
    solver.lr_policy = "step"
    solver.base_lr = 0.0001
    solver.stepsize = 10
    solver.gamma = 0.1
    solver.momentum = 0.9
    solver.weight_decay = 0.0001
    solver.test_initialization = False
    solver.max_iter = args.train_iter
    solver.test_interval = args.train_iter
    solver.test_iter[:] = [args.test_iter]
    solver.snapshot = args.train_iter
    SOLVER.write_text(text_format.MessageToString(solver))
    running = caffe.SGDSolver(str(SOLVER))
    running.net.copy_from(MODIFIED[1])
    running.solve()
    return str(SOLVER.with_name(f"solver_iter_{args.train_iter}.caffemodel"))


def test(args: argparse.Namespace, scores: str, labels: str) -> None:
    """Print the accuracy of the fake-quant model on the test pictures."""
    files = (f"{RESULT}_{name}" for name in ("fake_quant_model.prototxt", "fake_quant_weights.caffemodel"))
    net = caffe.Net(*files, caffe.TEST)
    ranks = []
    for _ in range(args.test_iter):
        net.forward()
        found = net.blobs[scores].data.reshape(args.test_batch, -1)
        truth = net.blobs[labels].data.reshape(-1).astype(int)
        own = found[np.arange(len(truth)), truth]
        ranks += list((found > own[:, None]).sum(1))
    for top in (1, 5):
        print(f"Top {top} accuracy = {np.mean(np.array(ranks) < top):.4g}")


def main() -> int:
    """Config, modified model, training, files, accuracy."""
    args = parse_args()
    check_files(args)
    set_device(args.gpu)
    scores, labels = write_model(args)
    config, record = str(TMP / "config.json"), str(TMP / "record.txt")
    amct.create_quant_retrain_config(config, str(MODEL), args.weights_file)
    amct.create_quant_retrain_model(str(MODEL), args.weights_file, config, *MODIFIED, record)
    snapshot = train(args)
    amct.save_quant_retrain_model(MODIFIED[0], snapshot, "Both", str(RESULT), record, config)
    for ending in ("txt", "bin"):  # the guide's name of the record has no prefix
        shutil.copyfile(f"{RESULT}_quant_param_record.{ending}", RESULT.with_name(f"quant_param_record.{ending}"))
    test(args, scores, labels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
