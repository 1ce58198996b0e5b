"""Writes what every layer computes on one picture as ``.npy`` files: of the float net and of a quantized one.

Run it in the folder ``resnet50``, after ``ResNet50_sample.py``::

    python3 src/dump_layer_ouputs.py --cpu

Files are ``dump/float/<layer>.<blob>.npy`` and ``dump/quantized/<layer>.<blob>.npy``, with "/" written as "_". The
blobs that differ most are printed; ``amct compare`` does so for many pictures. (The guide spells this file so.)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from classification import Pictures, add_test_arguments, argument_parser, check_files, set_device

from amct_caffe import caffe

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Blobs = dict[str, NDArray[np.float32]]

FLOAT = ("pre_model/ResNet-50-deploy.prototxt", "pre_model/ResNet-50-model.caffemodel")
QUANTIZED = "results/calibration_results/ResNet50_fake_quant"
SHOWN = 5


def run(model_file: str, weights_file: str, pictures: Pictures, folder: Path) -> Blobs:
    """Run a net on the first picture, and write its blobs."""
    net = caffe.Net(model_file, weights_file, caffe.TEST)
    name = net.inputs[0]
    images, _ = next(pictures.batches(net.blobs[name].shape[-1], 1))
    net.blobs[name].reshape(1, *images.shape[1:])
    net.forward(**{name: images[:1]})
    blobs = {f"{layer}.{top}": net.blobs[top].data.copy() for layer, tops in net.top_names.items() for top in tops}
    folder.mkdir(parents=True, exist_ok=True)
    for key, values in blobs.items():
        np.save(folder / f"{key}.npy".replace("/", "_"), values)
    print(f"[AMCT][INFO]{len(blobs)} blobs written to {folder}")
    return blobs


def cosines(exact: Blobs, found: Blobs) -> list[tuple[float, str]]:
    """How alike the blobs are that both nets have, the most different one first."""
    rows = []
    for name in exact.keys() & found.keys():
        left, right = (each[name].astype(np.float64).ravel() for each in (exact, found))
        if left.size == right.size:
            length = np.linalg.norm(left) * np.linalg.norm(right)
            rows.append((float(left @ right / length) if length else 1.0, name))
    return sorted(rows)


def main() -> int:
    """Run both nets."""
    parser = argument_parser(__doc__, FLOAT)
    add_test_arguments(parser)
    parser.add_argument(
        "--quantized", default=QUANTIZED, help="the quantized files: what stands before _model.prototxt"
    )
    parser.add_argument("--output", type=Path, default=Path("dump"), help="the folder for the files")
    args = parser.parse_args()
    check_files(args)
    set_device(args.gpu)
    pictures = Pictures(args)
    exact = run(args.model_file, args.weights_file, pictures, args.output / "float")
    quantized = f"{args.quantized}_model.prototxt", f"{args.quantized}_weights.caffemodel"
    for cosine, name in cosines(exact, run(*quantized, pictures, args.output / "quantized"))[:SHOWN]:
        print(f"cosine {cosine:.6f}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
