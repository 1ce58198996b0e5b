"""The face detectors among the real models find the same boxes after quantization; SSD is with the other models."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from caffe_real_models import flow_of, photo, run
from face_boxes import Cascade, crop, found_again, overlaps, refined, ultralight_boxes
from PIL import Image

pytestmark = pytest.mark.assets
NEEDED = 0.95


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)


# ------------------------------------------------------------------ ultralight

HALF_ANCHOR = 5
"""The smallest anchor is 10 pixels wide."""


def face_photos(assets):
    return sorted((path.name for path in (assets / "face_images").glob("*.jpg")), key=lambda name: int(name[:-4]))


@pytest.mark.parametrize(("name", "equalized"), [("slim-320", True), ("RFB-320", True), ("RFB-320", False)])
def test_ultralight(name, equalized, assets, tmp_path):
    """Equalized: of all faces. As it is: of those at least half as wide as the smallest anchor.

    A third of what these nets find are the faces of crowds, three or four of 320 pixels wide: an IoU of 0.9 allows them
    a fifth of a pixel. Channels of very different size between the depthwise convolutions leave some of them few steps.
    """
    original = flow_of(assets, "ultralight_face", tmp_path, f"{name}.prototxt", f"{name}.caffemodel")
    pictures = [
        ((photo(assets, each, (320, 240)) - 127) / 128).transpose(2, 0, 1)[None] for each in face_photos(assets)
    ]
    pictures = [each.astype(np.float32) for each in pictures]
    calibration = pictures[::3] + pictures[1::3]
    flow = original.equalized(calibration) if equalized else original
    flow.calibrated(calibration)
    files = (original.model, original.weights), flow.result_files("deploy")
    nets = [flow.net(*each, keep_blobs=False) for each in files]
    total, found = np.zeros(2, int), np.zeros(2, int)
    for picture in pictures:
        (boxes, scores), (others, other_scores) = (
            ultralight_boxes(run(net, picture), least) for net, least in zip(nets, (0.5, 0.3), strict=True)
        )
        wide = boxes[:, 2] - boxes[:, 0] >= HALF_ANCHOR
        for place, chosen in enumerate((wide, wide | True)):
            counts = found_again(boxes[chosen], scores[chosen], others, other_scores)
            total[place] += counts[0]
            found[place] += counts[1]
    kind = "equalized" if equalized else "as it is"
    print(f"{name}, {kind}: {found[0]} of {total[0]} boxes found again, {found[1]} of {total[1]} with tiny ones")
    assert total[0] >= 400
    assert found[0] >= NEEDED * total[0]
    assert found[1] >= (NEEDED if equalized else 0.92) * total[1]


# ------------------------------------------------------------------ MTCNN


def asking(net):
    def ask(batch):
        blob = net.blobs["data"]
        if blob.shape != batch.shape:
            blob.reshape(*batch.shape)
        blob.data[...] = batch
        return {name: value.copy() for name, value in net.forward().items()}

    return ask


class Faces:
    """The three nets in float, what they were asked on real photos, and what they found there."""

    offsets: ClassVar = ("conv4-2", "conv5-2", "conv6-2")

    def __init__(self, assets, folder):
        self.flows = []
        for number in (1, 2, 3, 4):
            (folder / str(number)).mkdir()
            files = f"det{number}.prototxt", f"det{number}.caffemodel"
            self.flows.append(flow_of(assets, "caffe_mtcnn", folder / str(number), *files))
        self.pictures = []
        for name in face_photos(assets)[::2]:
            picture = Image.open(assets / "face_images" / name).convert("RGB")
            picture.thumbnail((240, 240))
            self.pictures.append(np.asarray(picture))
        self.cascade = Cascade(*(asking(flow.net(flow.model, flow.weights)) for flow in self.flows[:3]))
        self.found = [self.cascade(picture) for picture in self.pictures]

    def boxes(self, stage, outputs):
        """A box and a score for each place of P-Net's map, or for each crop."""
        scores, offsets = outputs["prob1"], outputs[self.offsets[stage]]
        side = 12 if stage == 0 else 24
        scores = np.moveaxis(scores.reshape(*scores.shape[:2], -1), 1, 2).reshape(-1, 2)[:, 1]
        offsets = np.moveaxis(offsets.reshape(*offsets.shape[:2], -1), 1, 2).reshape(-1, 4)
        return refined(np.tile([0.0, 0.0, side, side], (len(scores), 1)), offsets), scores

    def calibrated(self, stage):
        """Equalize and quantize one net with what it was asked; returns its deploy form and the share found again."""
        asked = self.cascade.seen[stage]
        calibration = asked[::2] if stage == 0 else asked
        flow = self.flows[stage].equalized(calibration)
        flow.calibrated(calibration)
        deploy = asking(flow.net(*flow.result_files("deploy"), keep_blobs=False))
        total = found = 0
        for batch in asked:
            boxes, scores = self.boxes(stage, self.cascade.nets[stage](batch))
            others, other_scores = self.boxes(stage, deploy(batch))
            chosen = scores > 0.5
            same = [
                overlaps(box, other[None])[0] >= 0.9 for box, other in zip(boxes[chosen], others[chosen], strict=True)
            ]
            total += int(chosen.sum())
            found += int((np.array(same, bool) & (np.abs(scores - other_scores)[chosen] <= 0.05)).sum())
        print(f"det{stage + 1}: {found} of {total} boxes found again")
        assert total >= 30
        return deploy, found / total


@pytest.fixture(scope="module")
def faces(assets, tmp_path_factory):
    return Faces(assets, tmp_path_factory.mktemp("mtcnn"))


def test_mtcnn(faces):
    """Each net by itself, on the same inputs; then the cascade of the three deploy nets.

    In the cascade a crop that is moved by one pixel moves the box that comes out of it: pictures with noise of one
    level do that to the float nets as well, and lose more than one box in twenty. So the cascade has to find the same
    faces, which is an IoU of 0.5.
    """
    nets = []
    for stage in range(3):
        deploy, share = faces.calibrated(stage)
        assert share >= NEEDED
        nets.append(deploy)
    quantized = Cascade(*nets)
    random = np.random.default_rng(0)
    total = same = again = noisy = 0
    for picture, (boxes, scores) in zip(faces.pictures, faces.found, strict=True):
        others, other_scores = quantized(picture)
        total += int((scores > 0.5).sum())
        again += found_again(boxes, scores, others, other_scores)[1]
        same += sum(bool((overlaps(box, others) >= 0.5).any()) for box in boxes[scores > 0.5])
        noise = np.clip(picture.astype(int) + random.integers(-1, 2, picture.shape), 0, 255).astype(np.uint8)
        noisy += found_again(boxes, scores, *faces.cascade(noise))[1]
    print(f"MTCNN: {same} of {total} faces, {again} with the same box; float nets on noisy pictures: {noisy}")
    assert total >= 20
    assert same >= NEEDED * total
    assert noisy < NEEDED * total  # what the cascade cannot promise even without quantization


def test_mtcnn_landmarks(faces):
    """det4 moves five points by what it sees around each: patches of a quarter of the face."""
    batches = []
    for picture, (boxes, _) in zip(faces.pictures, faces.found, strict=True):
        for box in boxes[:4]:
            centres = [box[:2] + (box[2:] - box[:2]) * place for place in POINTS]
            side = (box[2:] - box[:2]).max() / 8
            patches = [crop(picture, np.concatenate([centre - side, centre + side]), 24) for centre in centres]
            batches.append(np.concatenate(patches, axis=1))
    flow = faces.flows[3]
    flow.calibrated(batches)
    original, deploy = (asking(flow.net(*files)) for files in ((flow.model, flow.weights), flow.result_files("deploy")))
    off = [np.abs(value - deploy(batch)[name]).max() for batch in batches for name, value in original(batch).items()]
    print(f"det4: points off by {np.mean(off):.4f} of a patch on average, {np.max(off):.4f} at most")
    assert np.max(off) <= 0.1
    assert np.mean(off) <= 0.015  # a third of a pixel of the patch


POINTS = np.array([[0.3, 0.35], [0.7, 0.35], [0.5, 0.55], [0.35, 0.75], [0.65, 0.75]])
"""Eyes, nose and corners of the mouth of an upright face."""
