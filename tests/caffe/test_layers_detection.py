"""The layers of SSD, Faster R-CNN, R-FCN and Mask R-CNN against plain loops in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from layer_checks import check_gradients, net_of, run

from amct.errors import ModelError

random = np.random.RandomState(17)


@pytest.fixture(autouse=True)
def _same_values_in_every_order():
    """Each test draws from the beginning, whichever tests ran before it."""
    random.seed(17)


def rand(*shape):
    return random.uniform(-2, 2, shape).astype(np.float32)


# ------------------------------------------------------------------ SSD


def test_permute():
    x = rand(2, 3, 4, 5)
    np.testing.assert_array_equal(
        run("Permute", "permute_param { order: 0 order: 2 order: 3 order: 1 }", x), x.transpose(0, 2, 3, 1)
    )
    np.testing.assert_array_equal(run("Permute", "permute_param { order: 2 }", x), x.transpose(2, 0, 1, 3))
    check_gradients("Permute", "permute_param { order: 1 }", x[:, :, 0])


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_normalize(across, shared):
    x = rand(2, 3, 2, 2)
    scale = rand() if shared else rand(3)
    text = f"norm_param {{ across_spatial: {str(across).lower()} channel_shared: {str(shared).lower()} eps: 0.01 }}"
    exact = x.astype(np.float64)
    total = (exact**2).sum((1, 2, 3) if across else 1, keepdims=True)
    expected = exact / np.sqrt(total + 0.01) * scale.reshape(-1, 1, 1)
    np.testing.assert_allclose(run("Normalize", text, x, blobs=[scale]), expected, rtol=1e-5, atol=1e-6)
    check_gradients("Normalize", text, x, blobs=[scale])


def test_normalize_starts_as_its_filler_says():
    text = 'norm_param { channel_shared: false scale_filler { type: "constant" value: 20 } }'
    assert net_of("Normalize", text, [(1, 4, 2, 2)]).params["layer"][0].data.tolist() == [20.0] * 4
    assert net_of("Normalize", "", [(1, 4, 2, 2)]).params["layer"][0].data == 1


def prior_boxes(feature, picture, smallest, largest, ratios, step, offset):
    """In the words of the SSD paper: square, larger square, then the other shapes, at every place."""
    boxes = []
    for row in range(feature[0]):
        for column in range(feature[1]):
            x, y = (column + offset) * step[1], (row + offset) * step[0]
            for index, low in enumerate(smallest):
                shapes = [(low, low)]
                if largest:
                    shapes.append((math.sqrt(low * largest[index]),) * 2)
                shapes += [(low * math.sqrt(ratio), low / math.sqrt(ratio)) for ratio in ratios]
                for width, height in shapes:
                    boxes += [
                        (x - width / 2) / picture[1],
                        (y - height / 2) / picture[0],
                        (x + width / 2) / picture[1],
                        (y + height / 2) / picture[0],
                    ]
    return np.array(boxes)


@pytest.mark.parametrize(
    ("parameters", "arguments", "picture", "step", "variances"),
    [
        ("min_size: 10", ([10], [], []), (24, 32), (8, 8), [0.1] * 4),
        (
            "min_size: 10 max_size: 20 aspect_ratio: 2 aspect_ratio: 3 aspect_ratio: 2 variance: 0.1 variance: 0.1 "
            "variance: 0.2 variance: 0.2",
            ([10], [20], [2, 0.5, 3, 1 / 3]),
            (24, 32),
            (8, 8),
            [0.1, 0.1, 0.2, 0.2],
        ),
        (
            "min_size: 5 min_size: 8 max_size: 6 max_size: 9 aspect_ratio: 2 flip: false step: 7 img_size: 40 "
            "variance: 0.3",
            ([5, 8], [6, 9], [2]),
            (40, 40),
            (7, 7),
            [0.3] * 4,
        ),
        ("min_size: 4 step_h: 3 step_w: 5 img_h: 20 img_w: 30 offset: 0", ([4], [], []), (20, 30), (3, 5), [0.1] * 4),
    ],
)
def test_prior_box(parameters, arguments, picture, step, variances):
    y = run("PriorBox", f"prior_box_param {{ {parameters} }}", np.zeros((1, 2, 3, 4)), np.zeros((1, 3, 24, 32)))
    offset = 0 if "offset: 0" in parameters else 0.5
    expected = prior_boxes((3, 4), picture, *arguments, step, offset)
    assert y.shape == (1, 2, len(expected))
    np.testing.assert_allclose(y[0, 0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(y[0, 1], np.tile(variances, len(expected) // 4), rtol=1e-6)


def test_prior_box_clipped_and_for_another_size():
    net = net_of("PriorBox", "prior_box_param { min_size: 30 clip: true }", [(1, 2, 2, 2), (1, 3, 24, 24)])
    y = net.forward()["t0"].copy()
    assert y[0, 0].min() == 0
    assert y[0, 0].max() == 1
    net.blobs["b0"].reshape(1, 2, 3, 2)
    assert net.forward()["t0"].shape == (1, 2, 24)


def overlap(a, b, pixel=0):
    width = min(a[2], b[2]) - max(a[0], b[0]) + pixel
    height = min(a[3], b[3]) - max(a[1], b[1]) + pixel
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(box[2] - box[0] + pixel) * (box[3] - box[1] + pixel) for box in (a, b)]
    return width * height / (sum(areas) - width * height)


def greedy(boxes, threshold, eta=1.0, pixel=0):
    kept = []
    for index, box in enumerate(boxes):
        if all(overlap(box, boxes[other], pixel) <= threshold for other in kept):
            kept.append(index)
            if eta < 1 and threshold > 0.5:
                threshold *= eta
    return kept


def decode(prior, variance, move, code, scaled):
    move = np.array(move) if scaled else np.array(move) * variance
    width, height = prior[2] - prior[0], prior[3] - prior[1]
    if code == "CORNER":
        return prior + move
    if code == "CORNER_SIZE":
        return prior + move * [width, height, width, height]
    x = (prior[0] + prior[2]) / 2 + move[0] * width
    y = (prior[1] + prior[3]) / 2 + move[1] * height
    half = [width * math.exp(move[2]) / 2, height * math.exp(move[3]) / 2]
    return np.array([x - half[0], y - half[1], x + half[0], y + half[1]])


@pytest.mark.parametrize("code", ["CORNER", "CENTER_SIZE", "CORNER_SIZE"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("shared", "eta", "keep"), [(True, 1.0, 6), (False, 1.0, -1), (True, 0.7, 9)])
def test_detection_output(code, scaled, shared, eta, keep):
    pictures, priors, classes = 2, 9, 3
    corner = random.uniform(0, 0.5, (priors, 2))
    prior = np.concatenate([corner, corner + random.uniform(0.2, 0.5, (priors, 2))], 1).astype(np.float32)
    variance = np.tile([0.1, 0.1, 0.2, 0.2], (priors, 1)).astype(np.float32)
    sets = 1 if shared else classes
    moves = (rand(pictures, priors, sets, 4) / (10 if scaled else 1)).astype(np.float32)
    scores = random.permutation(pictures * priors * classes).reshape(pictures, priors, classes) / 60
    scores = scores.astype(np.float32)
    expected = []
    for picture in range(pictures):
        found = []
        for label in range(1, classes):
            place = 0 if shared else label
            boxes = np.array(
                [decode(prior[p], variance[p], moves[picture, p, place], code, scaled) for p in range(priors)]
            )
            order = [p for p in np.argsort(-scores[picture, :, label]) if scores[picture, p, label] > 0.1][:7]
            kept = greedy(boxes[order], 0.6, eta)
            found += [[picture, label, scores[picture, order[k], label], *boxes[order[k]]] for k in kept]
        if keep > -1:
            found = sorted(found, key=lambda row: -row[2])[:keep]
        expected += sorted(found, key=lambda row: (row[1], -row[2]))
    text = (
        f"detection_output_param {{ num_classes: 3 share_location: {str(shared).lower()} code_type: {code} "
        f"variance_encoded_in_target: {str(scaled).lower()} keep_top_k: {keep} confidence_threshold: 0.1 "
        f"nms_param {{ nms_threshold: 0.6 top_k: 7 eta: {eta} }} }}"
    )
    rows = run(
        "DetectionOutput",
        text,
        moves.reshape(pictures, -1),
        scores.reshape(pictures, -1),
        np.stack([prior.reshape(-1), variance.reshape(-1)])[None],
    )
    assert rows.shape == (1, 1, len(expected), 7)
    np.testing.assert_allclose(rows[0, 0], expected, rtol=1e-4, atol=1e-5)


def test_detection_output_without_detections():
    text = "detection_output_param { num_classes: 2 confidence_threshold: 0.5 }"
    rows = run("DetectionOutput", text, np.zeros((2, 4)), np.zeros((2, 2)), np.ones((1, 2, 4)))
    assert rows.tolist() == [[[[0] + [-1] * 6, [1] + [-1] * 6]]]


# ------------------------------------------------------------------ regions


def c_round(value):
    return math.floor(value + 0.5) if value >= 0 else math.ceil(value - 0.5)


REGIONS = np.array(
    [
        [0, 0, 0, 7, 7],
        [1, 2, 4, 13, 9],
        [0, 9.5, 9.5, 9.5, 9.5],
        [1, -6, -6, 5, 30],
        [0, 12, 3, 4, 1],
        [1, 3, 3, 30, 30],
    ],
    np.float32,
)


def features(channels):
    return (random.permutation(2 * channels * 6 * 7).reshape(2, channels, 6, 7) * 0.1).astype(np.float32)


def test_roi_pooling():
    x, scale, (rows, columns) = features(3), 0.5, (2, 3)
    expected = np.zeros((len(REGIONS), 3, rows, columns))
    for r, (picture, *region) in enumerate(REGIONS):
        x1, y1, x2, y2 = (c_round(value * scale) for value in region)
        width, height = max(x2 - x1 + 1, 1) / columns, max(y2 - y1 + 1, 1) / rows
        for i, j in np.ndindex(rows, columns):
            top, bottom = (min(max(v + y1, 0), 6) for v in (math.floor(i * height), math.ceil((i + 1) * height)))
            left, right = (min(max(v + x1, 0), 7) for v in (math.floor(j * width), math.ceil((j + 1) * width)))
            if bottom > top and right > left:
                expected[r, :, i, j] = x[int(picture), :, top:bottom, left:right].max((1, 2))
    text = "roi_pooling_param { pooled_h: 2 pooled_w: 3 spatial_scale: 0.5 }"
    np.testing.assert_allclose(run("ROIPooling", text, x, REGIONS), expected, rtol=1e-6)
    check_gradients("ROIPooling", text, x[:, :1], REGIONS, bottoms=[0])


def test_roi_pooling_gives_the_gradient_to_the_first_of_equal_values():
    net = net_of("ROIPooling", "roi_pooling_param { pooled_h: 1 pooled_w: 1 }", [(1, 1, 3, 3), (1, 5)])
    net.blobs["b0"].data[...] = [[[[0, 0, 1], [0, 1, 1], [1, 1, 1]]]]
    net.blobs["b1"].data[...] = [[0, 0, 0, 2, 2]]
    net.forward()
    net.blobs["t0"].diff[...] = 5
    net.backward()
    assert net.blobs["b0"].diff.tolist() == [[[[0, 0, 5], [0, 0, 0], [0, 0, 0]]]]


def test_psroi_pooling():
    size, outputs, scale = 2, 3, 0.5
    x = features(outputs * size * size)
    expected = np.zeros((len(REGIONS), outputs, size, size))
    for r, (picture, *region) in enumerate(REGIONS):
        x1, y1 = (c_round(value) * scale for value in region[:2])
        x2, y2 = ((c_round(value) + 1) * scale for value in region[2:])
        width, height = max(x2 - x1, 0.1) / size, max(y2 - y1, 0.1) / size
        for c, i, j in np.ndindex(outputs, size, size):
            top, bottom = (min(max(v, 0), 6) for v in (math.floor(i * height + y1), math.ceil((i + 1) * height + y1)))
            left, right = (min(max(v, 0), 7) for v in (math.floor(j * width + x1), math.ceil((j + 1) * width + x1)))
            if bottom > top and right > left:
                channel = (c * size + i) * size + j
                expected[r, c, i, j] = x[int(picture), channel, top:bottom, left:right].mean(dtype=np.float64)
    text = "psroi_pooling_param { spatial_scale: 0.5 output_dim: 3 group_size: 2 }"
    np.testing.assert_allclose(run("PSROIPooling", text, x, REGIONS), expected, rtol=1e-5, atol=1e-5)
    text = text.replace("output_dim: 3", "output_dim: 1")
    check_gradients("PSROIPooling", text, x[:, :4] / 10, REGIONS[[1, 5]], bottoms=[0])


def bilinear(plane, y, x):
    height, width = plane.shape
    if not (-1 <= y <= height and -1 <= x <= width):
        return 0.0
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    below, right = min(top + 1, height - 1), min(left + 1, width - 1)
    a, b = y - top, x - left
    upper = plane[top, left] * (1 - b) + plane[top, right] * b
    return upper * (1 - a) + (plane[below, left] * (1 - b) + plane[below, right] * b) * a


@pytest.mark.parametrize("ratio", [2, -1])
@pytest.mark.parametrize("end_mode", [0, 1])
def test_roi_align(ratio, end_mode):
    x, scale, rows, columns = features(2), 0.5, 2, 3
    expected = np.zeros((len(REGIONS), 2, rows, columns))
    for r, (picture, *region) in enumerate(REGIONS):
        x1, y1 = region[0] * scale, region[1] * scale
        width = max((region[2] + end_mode) * scale - x1, 1) / columns
        height = max((region[3] + end_mode) * scale - y1, 1) / rows
        down, across = (ratio, ratio) if ratio > 0 else (math.ceil(height), math.ceil(width))
        for c, i, j in np.ndindex(2, rows, columns):
            points = [
                bilinear(
                    x[int(picture), c], y1 + (i + (a + 0.5) / down) * height, x1 + (j + (b + 0.5) / across) * width
                )
                for a in range(down)
                for b in range(across)
            ]
            expected[r, c, i, j] = np.mean(points)
    text = (
        f"roi_align_param {{ pooled_h: 2 pooled_w: 3 spatial_scale: 0.5 sampling_ratio: {ratio} "
        f"roi_end_mode: {end_mode} }}"
    )
    np.testing.assert_allclose(run("ROIAlign", text, x, REGIONS), expected, rtol=1e-4, atol=1e-5)
    if end_mode:
        check_gradients("ROIAlign", text, x[:, :1] / 10, REGIONS[[1, 5]], bottoms=[0])


def test_no_regions():
    text = "roi_pooling_param { pooled_h: 2 pooled_w: 3 }"
    net = net_of("ROIPooling", text, [(1, 2, 4, 4), (1, 5)])
    net.blobs["b1"].reshape(0, 5)
    assert net.forward()["t0"].shape == (0, 2, 2, 3)


def test_region_of_a_picture_that_is_not_there():
    with pytest.raises(ModelError, match="a region is in image 2, the batch has 1"):
        run("ROIPooling", "roi_pooling_param { pooled_h: 1 pooled_w: 1 }", np.ones((1, 1, 2, 2)), [[2, 0, 0, 1, 1]])


# ------------------------------------------------------------------ Faster R-CNN


def test_anchors_are_those_of_faster_rcnn():
    """The nine anchors its authors print for a base of 16."""
    net = net_of("Proposal", "", [(1, 18, 2, 2), (1, 36, 2, 2), (1, 3)])
    assert net.layers[-1].anchors.tolist() == [
        [-84, -40, 99, 55],
        [-176, -88, 191, 103],
        [-360, -184, 375, 199],
        [-56, -56, 71, 71],
        [-120, -120, 135, 135],
        [-248, -248, 263, 263],
        [-36, -80, 51, 95],
        [-80, -168, 95, 183],
        [-168, -344, 183, 359],
    ]


def test_proposal():
    rows, columns = 3, 4
    text = (
        "proposal_param { feat_stride: 16 min_size: 4 ratio: 0.5 ratio: 1 scale: 1 scale: 2 pre_nms_topn: 30 "
        "post_nms_topn: 8 iou_threshold: 0.5 }"
    )
    scores = random.permutation(8 * rows * columns).reshape(1, 8, rows, columns).astype(np.float32) / 100
    offsets = (rand(1, 16, rows, columns) / 4).astype(np.float32)
    height, width, scale = 45, 60, 1.5
    base = [[-3.5, 2, 18.5, 13], [-15, -4, 30, 19], [0, 0, 15, 15], [-8, -8, 23, 23]]
    found = []
    for i, j, a in np.ndindex(rows, columns, 4):
        x1, y1, x2, y2 = np.add(base[a], [16 * j, 16 * i, 16 * j, 16 * i])
        dx, dy, dw, dh = offsets[0, 4 * a : 4 * a + 4, i, j].astype(np.float64)
        w, h = x2 - x1 + 1, y2 - y1 + 1
        x, y = x1 + 0.5 * w + dx * w, y1 + 0.5 * h + dy * h
        w, h = w * math.exp(dw), h * math.exp(dh)
        box = np.clip([x - w / 2, y - h / 2, x + w / 2, y + h / 2], 0, [width - 1, height - 1] * 2)
        if min(box[2] - box[0] + 1, box[3] - box[1] + 1) >= 4 * scale:
            found.append((scores[0, 4 + a, i, j], *box))
    found = sorted(found, reverse=True)[:30]
    kept = greedy([row[1:] for row in found], 0.5, pixel=1)[:8]
    expected = np.array([found[k] for k in kept])
    regions, values = run("Proposal", text, scores, offsets, [[height, width, scale]], tops=2)
    np.testing.assert_allclose(
        regions, np.concatenate([np.zeros((len(kept), 1)), expected[:, 1:]], 1), rtol=1e-4, atol=1e-3
    )
    np.testing.assert_allclose(values[:, 0], expected[:, 0])
    counted = text.replace("}", "output_actual_rois_num: true }")
    assert run("Proposal", counted, scores, offsets, [[height, width, scale]], tops=2)[1].tolist() == [len(kept)]


@pytest.mark.parametrize("weights", [0, 1, 2])
def test_smooth_l1_loss(weights):
    a, b, inside, outside = (rand(3, 4) for _ in range(4))
    inputs = [a, b, inside, outside][: 2 + weights]
    d = a.astype(np.float64) - b
    d = d * inside if weights else d
    values = np.where(np.abs(d) < 1 / 9, 0.5 * 9 * d * d, np.abs(d) - 0.5 / 9)
    expected = (values * (outside if weights > 1 else 1)).sum() / 3
    text = "smooth_l1_loss_param { sigma: 3 }"
    np.testing.assert_allclose(run("SmoothL1Loss", text, *inputs), expected, rtol=1e-5)
    check_gradients("SmoothL1Loss", text, *inputs, bottoms=[0, 1], step=1e-3)


def test_smooth_l1_loss_counts_as_a_loss():
    net = net_of("SmoothL1Loss", "", [(2, 3), (2, 3)])
    assert list(net.layers[-1].loss_weights) == [1.0]


# ------------------------------------------------------------------ mistakes

BOXES = [(1, 8), (1, 4), (1, 2, 8)]
OUTPUT = "detection_output_param { num_classes: 2 %s }"


@pytest.mark.parametrize(
    ("kind", "parameters", "shapes", "message"),
    [
        ("Permute", "permute_param { order: 4 }", [(1, 2)], "order should be less than the input dimension"),
        ("Permute", "permute_param { order: 1 order: 1 }", [(1, 2)], r"duplicate orders: \[1, 1\]"),
        ("Normalize", "", [(3,)], "at least two axes"),
        ("PriorBox", "", [(1, 2, 3, 3), (1, 3, 9, 9)], "must provide min_size"),
        ("PriorBox", "prior_box_param { min_size: -1 }", [(1, 2, 3, 3), (1, 3, 9, 9)], "min_size must be positive"),
        (
            "PriorBox",
            "prior_box_param { min_size: 1 max_size: 2 max_size: 3 }",
            [(1, 2, 3, 3), (1, 3, 9, 9)],
            "needs as many max_size as min_size: 2 and 1",
        ),
        (
            "PriorBox",
            "prior_box_param { min_size: 3 max_size: 2 }",
            [(1, 2, 3, 3), (1, 3, 9, 9)],
            "max_size must be greater than min_size",
        ),
        (
            "PriorBox",
            "prior_box_param { min_size: 3 aspect_ratio: 0 }",
            [(1, 2, 3, 3), (1, 3, 9, 9)],
            "aspect_ratio must be positive",
        ),
        (
            "PriorBox",
            "prior_box_param { min_size: 3 variance: 1 variance: 1 }",
            [(1, 2, 3, 3), (1, 3, 9, 9)],
            "variance must be one or four numbers",
        ),
        (
            "PriorBox",
            "prior_box_param { min_size: 3 step: 1 step_h: 1 }",
            [(1, 2, 3, 3), (1, 3, 9, 9)],
            "either step or step_h/step_w should be specified; not both",
        ),
        (
            "PriorBox",
            "prior_box_param { min_size: 3 img_h: 4 }",
            [(1, 2, 3, 3), (1, 3, 9, 9)],
            r"img: sizes must be larger than 0, got \[4, 0\]",
        ),
        ("PriorBox", "prior_box_param { min_size: 3 }", [(1, 2, 3), (1, 3, 9, 9)], "expected a blob of 4 axes"),
        ("DetectionOutput", "", BOXES, "must specify num_classes"),
        ("DetectionOutput", OUTPUT % "", [(1, 4), (1, 4), (1, 2, 8)], "match number of location predictions: 2 priors"),
        ("DetectionOutput", OUTPUT % "", [(1, 8), (1, 6), (1, 2, 8)], "match number of confidence predictions"),
        ("DetectionOutput", OUTPUT % "", [(2, 8), (1, 4), (1, 2, 8)], "offsets are for 2 images, scores for 1"),
        ("DetectionOutput", OUTPUT % "nms_param { nms_threshold: -1 }", BOXES, "nms_threshold must be non negative"),
        ("DetectionOutput", OUTPUT % "nms_param { eta: 0 }", BOXES, "eta must lie above 0"),
        ("ROIPooling", "", [(1, 2, 3, 3), (4, 5)], "pooled_h and pooled_w must be > 0, got 0 and 0"),
        ("ROIPooling", "roi_pooling_param { pooled_h: 1 pooled_w: 1 }", [(1, 2, 3, 3), (4, 4)], "regions must be rows"),
        ("PSROIPooling", "", [(1, 2, 3, 3), (4, 5)], "needs psroi_pooling_param"),
        (
            "PSROIPooling",
            "psroi_pooling_param { spatial_scale: 1 output_dim: 2 group_size: 2 }",
            [(1, 9, 3, 3), (4, 5)],
            r"does not match layer parameters: 9, expected output_dim 2 \* group_size\^2 4",
        ),
        (
            "ROIAlign",
            "roi_align_param { pooled_h: 1 pooled_w: 1 roi_end_mode: 2 }",
            [(1, 9, 3, 3), (4, 5)],
            "roi_end_mode must be 0, or 1",
        ),
        ("Proposal", "", [(2, 18, 2, 2), (2, 36, 2, 2), (1, 3)], "one picture at a time, got a batch of 2"),
        ("Proposal", "", [(1, 18, 2, 2), (1, 18, 2, 2), (1, 3)], "9 anchors.*need scores of 18 and offsets of 36"),
        ("Proposal", "", [(1, 18, 2, 2), (1, 36, 2, 2), (1, 2)], "height, width and scale"),
        (
            "Proposal",
            "proposal_param { post_nms_topn: 0 }",
            [(1, 18, 2, 2), (1, 36, 2, 2), (1, 3)],
            "post_nms_topn must be > 0",
        ),
        ("SmoothL1Loss", "", [(2, 3), (2, 4)], "they must be equal"),
    ],
)
def test_mistakes(kind, parameters, shapes, message):
    with pytest.raises(ModelError, match=message):
        net_of(kind, parameters, shapes)
