"""Runs Faster R-CNN on pictures: prepares them, reads the two heads, draws the boxes, measures the mAP."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageDraw

import caffe
from amct.caffe.engine.layers.detection import overlaps, suppress
from amct.caffe.engine.layers.regions import apply_offsets
from amct.data.images import list_images

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

MEAN_BGR = np.array([102.9801, 115.9465, 122.7717], np.float32)
SHORT_SIDE, LONG_SIDE = 600, 1000
SURE, LARGEST_OVERLAP = 0.8, 0.3
"""A box is drawn with at least this score; boxes of one class overlap at most so much."""
MATCH = 0.5
"""The overlap with the annotation from which on a box is right."""
VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A box of a picture: class, score and corners."""

    name: str
    score: float
    box: NDArray[np.float32]


@dataclass(frozen=True)
class Picture:
    """A picture and the boxes of its annotation, if it has one."""

    path: Path
    truth: list[tuple[str, NDArray[np.float32]]] = field(default_factory=list)


def find_pictures(folder: Path) -> list[Picture]:
    """The test set of ``VOCdevkit/VOC2007`` in a folder, or else the pictures of the folder, without annotations."""
    voc = folder / "VOCdevkit" / "VOC2007"
    if not voc.is_dir():
        found = list_images(folder) if folder.is_dir() else []
        if not found:
            raise SystemExit(f"there are no pictures in {folder}: put some there, or VOCdevkit/VOC2007")
        return [Picture(path) for path in found]
    names = (voc / "ImageSets" / "Main" / "test.txt").read_text().split()
    images = {path.stem: path for path in list_images(voc / "JPEGImages")}
    return [Picture(images[name], _annotation(voc / "Annotations" / f"{name}.xml")) for name in names]


def _annotation(path: Path) -> list[tuple[str, NDArray[np.float32]]]:
    return [
        (
            str(each.findtext("name")),
            np.array([float(each.findtext(f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax")], np.float32),
        )
        for each in ElementTree.parse(path).getroot().iter("object")
    ]


def classes_of(net: caffe.Net) -> tuple[str, ...]:
    """The names of the classes of a net, without the background."""
    number = net.blobs["cls_prob"].shape[1] - 1
    return VOC_CLASSES if number == len(VOC_CLASSES) else tuple(f"class_{index}" for index in range(1, number + 1))


class Detector:
    """A Faster R-CNN net.

    Args:
        model_file: The prototxt.
        weights_file: The caffemodel.
        short_side: The length to which the shorter side of a picture is scaled.
    """

    def __init__(self, model_file: str, weights_file: str, short_side: int = SHORT_SIDE) -> None:
        self.net = caffe.Net(model_file, weights_file, caffe.TEST)
        self._short_side = short_side

    def detect(self, path: Path) -> list[Found]:
        """The boxes of one picture."""
        image = Image.open(path).convert("RGB")
        scale = min(self._short_side / min(image.size), LONG_SIDE / max(image.size))
        size = round(image.width * scale), round(image.height * scale)
        pixels = np.asarray(image.resize(size, Image.Resampling.BILINEAR), np.float32)[:, :, ::-1] - MEAN_BGR
        blobs = self.net.blobs
        blobs["data"].reshape(1, 3, size[1], size[0])
        blobs["im_info"].reshape(1, 3)
        info = np.array([[size[1], size[0], scale]], np.float32)
        heads = self.net.forward(data=pixels.transpose(2, 0, 1)[None], im_info=info)
        regions = torch.from_numpy(blobs["rois"].data[:, 1:5] / scale)
        last = np.array([image.width, image.height] * 2) - 1
        return list(self._best(heads["cls_prob"], heads["bbox_pred"], regions, last))

    def _best(
        self, scores: NDArray[np.float32], offsets: NDArray[np.float32], regions: torch.Tensor, last: NDArray[np.int64]
    ) -> Iterator[Found]:
        scores = scores.reshape(len(regions), -1)
        offsets = offsets.reshape(len(regions), -1)
        for index, name in enumerate(classes_of(self.net), 1):
            boxes = apply_offsets(regions, torch.from_numpy(offsets[:, 4 * index : 4 * index + 4].copy())).numpy()
            sure = np.flatnonzero(scores[:, index] >= SURE)
            order = sure[np.argsort(-scores[sure, index], kind="stable")]
            boxes = np.clip(boxes[order], 0, last)
            for place in suppress(torch.from_numpy(boxes), LARGEST_OVERLAP, pixel=1):
                yield Found(name, float(scores[order[place], index]), boxes[place].astype(np.float32))


def draw(path: Path, found: list[Found], target: Path) -> None:
    """Write a copy of a picture with the boxes in it."""
    image = Image.open(path).convert("RGB")
    canvas = ImageDraw.Draw(image)
    for each in found:
        canvas.rectangle([float(side) for side in each.box], outline=(255, 0, 0), width=2)
        canvas.text((float(each.box[0]) + 2, float(each.box[1]) + 1), f"{each.name} {each.score:.2f}", (255, 255, 0))
    target.parent.mkdir(parents=True, exist_ok=True)
    image.save(target)


def run(detector: Detector, pictures: list[Picture], folder: Path) -> float | None:
    """Detect in every picture and draw what was found; returns the mAP, or None without annotations."""
    found = []
    for picture in pictures:
        found.append(detector.detect(picture.path))
        draw(picture.path, found[-1], folder / f"{picture.path.stem}.png")
    if not any(picture.truth for picture in pictures):
        return None
    names = sorted({name for picture in pictures for name, _ in picture.truth})
    return float(np.mean([_average_precision(name, pictures, found) for name in names]))


def _average_precision(name: str, pictures: list[Picture], found: list[list[Found]]) -> float:
    """The average precision of one class by VOC2007's eleven points."""
    truth = [[box for each, box in picture.truth if each == name] for picture in pictures]
    total = sum(map(len, truth))
    ranked = sorted(
        ((each, place) for place, boxes in enumerate(found) for each in boxes if each.name == name),
        key=lambda pair: -pair[0].score,
    )
    hits = np.cumsum([_takes(truth[place], each.box) for each, place in ranked])
    recall, precision = hits / total, hits / np.arange(1, len(hits) + 1)
    return float(np.mean([max(precision[recall >= level / 10], default=0.0) for level in range(11)]))


def _takes(truth: list[NDArray[np.float32]], box: NDArray[np.float32]) -> bool:
    """Whether a box is right; the annotated box is then removed: a second box on it is wrong."""
    if not truth:
        return False
    shared = overlaps(torch.from_numpy(box), torch.from_numpy(np.stack(truth)), pixel=1)
    best = int(shared.argmax())
    if float(shared[best]) < MATCH:
        return False
    del truth[best]
    return True
