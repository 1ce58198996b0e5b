"""What the ResNet-50 samples share: arguments, device, running a model and its accuracy."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from datasets import ImageFolder, LMDBData, batches

import amct_caffe as amct
from amct_caffe import caffe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

BATCH_SIZE = 32
TMP = Path("tmp")
MODEL_HELP = "the prototxt, such as pre_model/ResNet-50-deploy.prototxt"
WEIGHTS_HELP = "the caffemodel, such as pre_model/ResNet-50-model.caffemodel"


def argument_parser(description: str | None, files: tuple[str, str] | None = None) -> argparse.ArgumentParser:
    """A parser with the arguments that every sample has; without ``files``, the model's must be given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    model, weights = files or (None, None)
    parser.add_argument("--model_file", required=files is None, default=model, help=MODEL_HELP)
    parser.add_argument("--weights_file", required=files is None, default=weights, help=WEIGHTS_HELP)
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", type=int, metavar="GPU_ID", help="run on this GPU")
    device.add_argument("--cpu", action="store_true", help="run on the CPU (the default)")
    parser.add_argument("--caffe_dir", help="accepted and not needed: no Caffe has to be installed")
    return parser


def add_test_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the samples that test a model on pictures."""
    parser.add_argument("--iterations", type=int, default=5, help="batches of 32 pictures for the accuracy")
    parser.add_argument("--pre_test", action="store_true", help="only run the float model")
    parser.add_argument("--benchmark", action="store_true", help="use the LMDB of --dataset, not the folder images")
    parser.add_argument("--dataset", type=Path, help="an LMDB of pictures, such as ilsvrc12_val_lmdb")
    parser.add_argument("--images", type=Path, default=Path("images"), help="folder of pictures with image_label.txt")


def check_files(args: argparse.Namespace) -> None:
    """Stop with an explanation where a model file is missing: nothing is downloaded."""
    for name in ("model_file", "weights_file"):
        if not Path(getattr(args, name)).is_file():
            raise SystemExit(
                f"--{name}: {getattr(args, name)} does not exist. The README says which files belong here."
            )


def set_device(gpu: int | None) -> None:
    """Choose CPU or GPU, for the engine and for quantization."""
    if gpu is None:
        caffe.set_mode_cpu()
        amct.set_cpu_mode()
    else:
        caffe.set_mode_gpu()
        caffe.set_device(gpu)
        amct.set_gpu_mode()


@dataclass(frozen=True)
class Pictures:
    """The pictures of the command line."""

    args: argparse.Namespace

    def batches(self, size: int, count: int) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        """Batches of pictures for a net with inputs of this size, and their labels."""
        args = self.args
        if args.benchmark and args.dataset is None:
            raise SystemExit("--benchmark needs --dataset with the path of an LMDB")
        data = LMDBData(args.dataset, size) if args.benchmark else ImageFolder(args.images, size)
        return batches(data, BATCH_SIZE, count)

    def repeated(self, size: int, count: int) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        """Exactly ``count`` batches: after the last picture come the first ones again."""
        while count:
            for batch in self.batches(size, count):
                yield batch
                count -= 1


def run_caffe_model(model_file: object, weights_file: object, pictures: Pictures, count: int) -> tuple[float, float]:
    """Run a model on at most ``count`` batches; returns the top-1 and top-5 accuracy."""
    net = caffe.Net(str(model_file), str(weights_file), caffe.TEST)
    name, ranks = net.inputs[0], []
    for images, labels in pictures.batches(net.blobs[name].shape[-1], count):
        net.blobs[name].reshape(*images.shape)
        (scores,) = net.forward(**{name: images}).values()
        scores = scores.reshape(len(labels), -1)
        own = scores[np.arange(len(labels)), labels]
        ranks += list((scores > own[:, None]).sum(1))
    return float(np.mean(np.array(ranks) < 1)), float(np.mean(np.array(ranks) < 5))


def print_accuracy(accuracy: tuple[float, float]) -> None:
    """The guide's two lines."""
    print(f"******final top1:{accuracy[0]}")
    print(f"******final top5:{accuracy[1]}")


def pre_test(args: argparse.Namespace) -> None:
    """Run the float model only."""
    print_accuracy(run_caffe_model(args.model_file, args.weights_file, Pictures(args), args.iterations))
    print("[AMCT][INFO]Run ResNet-50 without quantize success!")


def test_quantized(prefix: str, args: argparse.Namespace) -> None:
    """Run the fake-quant model."""
    files = f"{prefix}_fake_quant_model.prototxt", f"{prefix}_fake_quant_weights.caffemodel"
    print_accuracy(run_caffe_model(*files, Pictures(args), args.iterations))
    print("[AMCT][INFO]Run ResNet-50 with quantize success!")
