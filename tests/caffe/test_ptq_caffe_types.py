"""Every layer type that can be quantized, in a net of its own, through the whole flow."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from ptq_caffe_flow import OFF_BY_DEFAULT, prototxt, text_flow
from test_ptq_caffe_recurrent import KINDS as RECURRENT

import amct_caffe as amct
from amct.caffe import quantize
from amct.caffe.prototxt import layer_list
from amct.config.layers import CAFFE_TYPES
from amct.errors import ConfigError, ModelError
from amct.record import read_caffe_record

IMAGE = (2, 4, 6, 6)
ROWS = (3, 5)
FOLDED = ("BatchNorm", "Scale", "Bias")
ROUNDING = 2.0**-24


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)


# ------------------------------------------------------------------ one net for each type


def plain(random, shape):
    return random.standard_normal(shape)


def positive(random, shape):
    return np.abs(random.standard_normal(shape)) + 0.5


def whole(random, shape):
    return random.integers(0, 3, shape)


def regions(random, shape):
    """Rows of picture 0, x1, y1, x2, y2."""
    corners = np.sort(random.uniform(0, 5, (shape[0], 2, 2)), axis=1).reshape(shape[0], 4)
    return np.concatenate([np.zeros((shape[0], 1)), corners], axis=1)


def places(random, shape):
    """For each window of a 4x4 picture where its value stood."""
    del random
    return np.broadcast_to([[0, 3], [9, 14]], shape)


@dataclass(frozen=True)
class Case:
    kind: str
    parameters: str = ""
    shapes: tuple[tuple[int, ...], ...] = (IMAGE,)
    tops: int = 1
    makers: tuple = field(default=())

    def __str__(self):
        return self.kind

    def text(self):
        lines = []
        for index, shape in enumerate(self.shapes):
            sizes = " ".join(f"dim: {size}" for size in shape)
            lines.append(
                f'layer {{ name: "i{index}" type: "Input" top: "b{index}" input_param {{ shape {{ {sizes} }} }} }}'
            )
        bottoms = " ".join(f'bottom: "b{index}"' for index in range(len(self.shapes)))
        tops = " ".join(f'top: "t{index}"' for index in range(self.tops))
        lines.append(f'layer {{ name: "it" type: "{self.kind}" {bottoms} {tops} {self.parameters} }}')
        return "\n".join(lines)

    def data(self, seed):
        random = np.random.default_rng(seed)
        makers = self.makers or (plain,) * len(self.shapes)
        return {
            f"b{index}": np.asarray(make(random, shape), np.float32)
            for index, (make, shape) in enumerate(zip(makers, self.shapes, strict=True))
        }


DATA_ONLY = [
    Case("PassThrough"),
    Case("Pooling", "pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 }"),
    Case(
        "PSROIPooling",
        "psroi_pooling_param { spatial_scale: 1 output_dim: 1 group_size: 2 }",
        (IMAGE, (3, 5)),
        makers=(plain, regions),
    ),
    Case("ROIPooling", "roi_pooling_param { pooled_h: 2 pooled_w: 2 }", (IMAGE, (3, 5)), makers=(plain, regions)),
    Case("SPP", "spp_param { pyramid_height: 2 pool: MAX }"),
    Case("Upsample", "upsample_param { scale: 2 }"),
    Case("Eltwise", "eltwise_param { operation: SUM coeff: 1 coeff: -2 coeff: 0.5 }", (IMAGE,) * 3),
    Case("Slice", "slice_param { slice_point: 1 }", tops=2),
    Case("Concat", shapes=(IMAGE, (2, 3, 6, 6))),
    Case("Softmax"),
    Case(
        "ROIAlign",
        "roi_align_param { pooled_h: 2 pooled_w: 2 sampling_ratio: 2 }",
        (IMAGE, (3, 5)),
        makers=(plain, regions),
    ),
    Case("AbsVal"),
    Case("BNLL"),
    Case("CReLU"),
    Case("ELU", "elu_param { alpha: 0.7 }"),
    Case("Exp", "exp_param { scale: 0.5 }"),
    Case("Interp", "interp_param { height: 9 width: 4 }"),
    Case("Log", "log_param { shift: 0.1 }", makers=(positive,)),
    Case("LRN", "lrn_param { local_size: 3 alpha: 0.1 }"),
    Case("Mvm", shapes=((2, 4, 3), (2, 3))),
    Case("Nms", "nms_param { iou_threshold: 0.5 }", ((1, 6, 4), (1, 2, 6)), makers=(positive, positive)),
    Case("Normalize", "norm_param { across_spatial: false scale_filler { type: 'constant' value: 2 } }"),
    Case("Power", "power_param { power: 2 scale: 0.5 shift: 1 }"),
    Case("PReLU"),
    Case("Reduction", "reduction_param { operation: SUMSQ axis: 1 }"),
    Case("ReLU"),
    Case("Sigmoid"),
    Case("Sort", shapes=(ROWS,), tops=2),
    Case("Threshold", "threshold_param { threshold: 0.3 }"),
    Case("Scale", "scale_param { bias_term: true }", (ROWS,)),
    Case("BatchNorm", "batch_norm_param { use_global_stats: true }", (ROWS,)),
    Case("Bias", shapes=(ROWS,)),
    Case("Reshape", "reshape_param { shape { dim: 0 dim: -1 } }"),
    Case("Reverse", "reverse_param { axis: 1 }"),
    Case("ShuffleChannel", "shuffle_channel_param { group: 2 }"),
    Case("Crop", "crop_param { axis: 2 offset: 1 }", (IMAGE, (2, 4, 3, 3))),
    Case("Axpy", shapes=((2, 4, 1, 1), IMAGE, IMAGE)),
    Case("Flatten"),
    Case("Permute", "permute_param { order: 0 order: 2 order: 3 order: 1 }"),
    Case("Tile", "tile_param { axis: 1 tiles: 2 }"),
    Case("Split", tops=2),
    Case("ArgMax", "argmax_param { axis: 1 out_max_val: true }"),
    Case("Clip", "clip_param { min: -0.5 max: 0.8 }"),
    Case("Hswish"),
    Case("MVN"),
    Case("Reorg", "reorg_param { stride: 2 }"),
    Case("TanH"),
    Case("MatMul", shapes=((2, 3, 4), (2, 4, 5))),
    Case("RReLU", "rrelu_param { lower: 0.1 upper: 0.3 }"),
    Case("ReLU6"),
    Case("Swish", "swish_param { beta: 1.5 }"),
    Case("GroupNorm", "group_norm_param { group_num: 2 }"),
    Case("ArgMin", "argmin_param { axis: 1 }"),
    Case("Sqrt", makers=(positive,)),
    Case("ReduceSum", "reduce_param { axes: 1 }"),
    Case("ReduceMean", "reduce_param { axes: 1 }"),
    Case("ReduceProd", "reduce_param { axes: 1 }"),
    Case("LayerNormalization", "layer_normalization_param { axis: 1 }", (IMAGE,)),
    Case("Gemm", "gemm_param { alpha: 0.5 trans_b: true }", (ROWS, (4, 5), (3, 4))),
    Case("Ceil"),
    Case("Pad", "pad_param { axes: 2 pads: [1, 2] value: 0.5 }"),
    Case("Equal", shapes=(ROWS, ROWS), makers=(whole, whole)),
    Case("Greater", shapes=(ROWS, ROWS)),
    Case("ReduceMax", "reduce_param { axes: 1 }"),
    Case("ReduceMin", "reduce_param { axes: 1 }"),
    Case("Sign"),
    Case("Cos"),
    Case("Sin"),
    Case("TopK", "topk_param { k: 2 axis: 1 }", (ROWS,), tops=2),
    Case(
        "Unpooling",
        "unpooling_param { kernel_size: 2 stride: 2 }",
        (((1, 2, 2, 2)), (1, 2, 2, 2)),
        makers=(plain, places),
    ),
    Case("Erf"),
]
CONVOLUTION = "convolution_param { num_output: 6 kernel_size: 3 pad: 1 group: 2 }"
WITH_WEIGHTS = [
    Case("Convolution", CONVOLUTION),
    Case("DepthwiseConv", "convolution_param { kernel_size: 3 stride: 2 }"),
    Case("Deconvolution", CONVOLUTION.replace("pad: 1", "stride: 2")),
    Case("InnerProduct", "inner_product_param { num_output: 7 }"),
]
SEVERAL = [
    Case("Convolution", CONVOLUTION, (IMAGE,) * 3, tops=3),
    Case("Convolution", CONVOLUTION.replace("pad: 1", "bias_term: false"), (IMAGE,) * 2, tops=2),
    Case("DepthwiseConv", "convolution_param { kernel_size: 3 stride: 2 }", (IMAGE,) * 2, tops=2),
    Case("Deconvolution", CONVOLUTION.replace("pad: 1", "stride: 2"), (IMAGE,) * 2, tops=2),
]


def test_every_type_of_the_table_is_here():
    kinds = [case.kind for case in DATA_ONLY]
    assert len(kinds) == len(set(kinds)) == 71
    assert {*kinds, *(case.kind for case in WITH_WEIGHTS), *RECURRENT} == set(CAFFE_TYPES)


# ------------------------------------------------------------------ the flow


def switched_on(case, folder):
    """Calibrated with two batches, the type switched on by hand where the generated config has it off."""

    def change(config):
        assert config["it"]["quant_enable"] is (case.kind not in OFF_BY_DEFAULT)
        config["it"]["quant_enable"] = True

    flow = text_flow(case.text(), folder).configure(change=change)
    graph = flow.prepare()
    net = flow.net(*flow.modified)
    for seed in range(2):
        net.forward(**case.data(seed))
    amct.save_model(graph, "Both", str(flow.prefix))
    return flow


def rounded(x, data):
    """A bottom on the grid of its factors, in NumPy: the integers, and the float32 numbers they stand for."""
    largest = 2 ** (data.bits - 1) - 1
    q = np.rint(x * (np.float32(1) / np.float32(data.scale))) + data.offset
    q = np.clip(q, -largest - 1, largest).astype(np.int64) - data.offset
    return q, q.astype(np.float32) * np.float32(data.scale)


def results_of(net, data):
    return {name: value.copy() for name, value in net.forward(**data).items()}


def checked_entry(case, flow):
    """The record's entry of the layer: factors of each bottom, by index."""
    record = read_caffe_record(flow.out("quant_param_record.txt"))
    assert set(record) == {"it"}
    assert [data.index for data in record["it"].record_d] == list(range(len(case.shapes)))
    for data, shape in zip(record["it"].record_d, case.shapes, strict=True):
        assert data.scale > 0
        assert -128 <= data.offset <= 127
        assert data.num_bits == 8
        sizes = shape[1:] if len(shape) == 4 else (None, None, None)
        assert (data.channels, data.height, data.width) == sizes
    return record["it"]


def reads_positions(case):
    return regions in case.makers or places in case.makers or case.kind == "Nms"


@pytest.mark.parametrize("case", [*filter(reads_positions, DATA_ONLY)], ids=str)
def test_layers_that_read_coordinates_or_indices_stay_float(case, tmp_path):
    with pytest.raises(ConfigError, match=r'its bottom "b[01]" holds coordinates or indices, which cannot be rounded'):
        switched_on(case, tmp_path)


def test_what_only_moves_coordinates_stays_float_and_the_rest_is_quantized(tmp_path):
    (tmp_path / "net.prototxt").write_text("""
layer { name: "in" type: "Input" top: "x" top: "rows"
  input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } shape { dim: 5 dim: 4 } } }
layer { name: "index" type: "Input" top: "index" input_param { shape { dim: 5 dim: 1 } } }
layer { name: "rois" type: "Concat" bottom: "index" bottom: "rows" top: "rois" concat_param { axis: 1 } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "y" convolution_param { num_output: 3 kernel_size: 1 } }
layer { name: "roi" type: "ROIPooling" bottom: "y" bottom: "rois" top: "z"
  roi_pooling_param { pooled_h: 2 pooled_w: 2 } }
layer { name: "prior" type: "PriorBox" bottom: "y" bottom: "x" top: "p" prior_box_param { min_size: 3 } }
layer { name: "priors" type: "Concat" bottom: "p" bottom: "p" top: "ps" concat_param { axis: 2 } }
layer { name: "flat" type: "Flatten" bottom: "z" top: "f" }
""")
    refusals = {name: info.refusal for info in layer_list(tmp_path / "net.prototxt") if (name := info.name)}
    why = 'its bottom "{}" holds coordinates or indices, which cannot be rounded'.format
    wanted = {"rois": why("index"), "roi": why("rois"), "priors": why("p")}
    assert {name: text for name, text in refusals.items() if text} == wanted


READS = """
layer { name: "in" type: "Input" top: "x" top: "y" input_param { shape { dim: 2 dim: 300 } shape { dim: 2 dim: 9 } } }
layer { name: "before" type: "Power" bottom: "y" top: "moved" power_param { scale: 0.5 } }
%s
layer { name: "after" type: "Flatten" bottom: "made" top: "flat" }
"""


@pytest.mark.parametrize(
    ("layer", "floats"),
    [
        ('type: "ArgMax" bottom: "x" top: "made"', ["after"]),
        ('type: "ArgMax" bottom: "x" top: "made" argmax_param { axis: 1 out_max_val: true }', []),
        ('type: "ArgMin" bottom: "x" top: "made"', ["after"]),
        ('type: "Sort" bottom: "x" top: "values" top: "made"', ["after"]),
        ('type: "TopK" bottom: "x" top: "values" top: "made"', ["after"]),
        ('type: "Embed" bottom: "moved" top: "made"', ["before"]),
        ('type: "BatchReindex" bottom: "x" bottom: "moved" top: "made"', ["before"]),
        ('type: "LSTM" bottom: "x" bottom: "moved" top: "made"', ["before"]),
        ('type: "Accuracy" bottom: "x" bottom: "moved" top: "made"', ["before"]),
        ('type: "SoftmaxWithLoss" bottom: "x" bottom: "moved" top: "made"', ["before"]),
        ('type: "Scale" bottom: "x" bottom: "moved" top: "made"', []),
    ],
)
def test_indices_labels_and_marks_are_not_rounded(layer, floats, tmp_path):
    """A class among 300, an index that picks rows, a label: steps of 8 bits would give another one."""
    (tmp_path / "net.prototxt").write_text(READS % f'layer {{ name: "it" {layer} }}')
    refused = {info.name for info in layer_list(tmp_path / "net.prototxt") if info.refusal}
    assert sorted(refused) == floats


@pytest.mark.parametrize("case", [case for case in DATA_ONLY if not reads_positions(case)], ids=str)
def test_data_only(case, tmp_path):
    """Fake-quant, deploy and the float layer fed with what NumPy rounds are equal to the last bit.

    All three compute in float32 on the same numbers; deploy layers that stay on integers only move or select them.
    """
    flow = switched_on(case, tmp_path)
    entry = checked_entry(case, flow)
    assert not entry.scale_w
    for kind, after in (("fake_quant", 0), ("deploy", case.tops)):
        types = [layer.type for layer in prototxt(flow.result_files(kind)[0]).layer]
        assert types.count("Quant") == len(case.shapes)
        assert types.count("AntiQuant") == after
    data = case.data(7)
    inputs = {name: rounded(value, entry.record_d[int(name[1:])])[1] for name, value in data.items()}
    # small whole numbers lie on a grid of their own
    assert case.kind == "Equal" or any(not np.array_equal(inputs[name], data[name]) for name in data)
    wanted = results_of(flow.original(), inputs)
    for kind in ("fake_quant", "deploy"):
        found = results_of(flow.result(kind), data)
        assert list(found) == list(wanted) == [f"t{index}" for index in range(case.tops)]
        for name in found:
            np.testing.assert_array_equal(found[name], wanted[name])
            assert np.isfinite(found[name]).all()


def check_weighted(case, flow, weights, bias, *, original):
    """Every top of a layer with quantized weights, from integers multiplied by the float layer.

    ``original``: the layer itself. The integers are small enough for float32 sums to be exact (below 2^24), so the
    float layer computes Σ(q_x - offset)·q_w exactly. Deploy scales that once; fake-quant adds K float32 products of
    rounded factors: off by (K + 5) roundings of Σ|x||w|. The bias of fake-quant is on the grid of the first bottom, for
    the other ones deploy has it on theirs: half a step of each.
    """
    entry = checked_entry(case, flow)
    assert entry.num_bits_w == 8
    scale_w = np.array(entry.scale_w, np.float32)
    data = case.data(7)
    exact, sizes = flow.net(flow.model, flow.weights), flow.net(flow.model, flow.weights)
    integers = weights.astype(np.float32)
    assert np.abs(integers).max() <= 127
    for net, values in ((exact, integers), (sizes, np.abs(integers))):
        net.params[original][0].data[...] = values
        if len(net.params[original]) > 1:
            net.params[original][1].data[...] = 0
    q = {name: rounded(value, entry.record_d[int(name[1:])])[0].astype(np.float32) for name, value in data.items()}
    sums, largest = results_of(exact, q), results_of(sizes, {name: np.abs(value) for name, value in q.items()})
    assert max(value.max() for value in largest.values()) < 2**24
    fake, deploy = results_of(flow.result("fake_quant"), data), results_of(flow.result("deploy"), data)
    terms = weights[0].size if case.kind != "Deconvolution" else weights.shape[0] * weights[0, 0].size
    for index in range(case.tops):
        name = f"t{index}"
        channels = (1, -1, *[1] * (sums[name].ndim - 2))
        step = (scale_w.astype(np.float64) * entry.record_d[index].scale).astype(np.float32).astype(np.float64)
        first = (scale_w.astype(np.float64) * entry.record_d[0].scale).astype(np.float32).astype(np.float64)
        steps = step.reshape(channels) if step.size > 1 else step
        added = np.rint(bias.astype(np.float64) / (scale_w.astype(np.float64) * entry.record_d[index].scale))
        wanted = (sums[name].astype(np.float64) + added.reshape(channels)) * steps
        np.testing.assert_array_equal(deploy[name], wanted.astype(np.float32))
        bound = (terms + 5) * ROUNDING * (largest[name] + np.abs(added).reshape(channels)) * steps
        if index:
            bound = bound + ((step + first) / 2).reshape(channels) * (np.abs(bias).reshape(channels) > 0)
        assert (np.abs(fake[name] - deploy[name]) <= bound).all()


def check_rounding(weight, integers, scale):
    """Each weight is a neighbour of its exact value on the grid, and the errors of an output cancel.

    Rows: one for each output. A sum of errors may be off by half a step; products with the reciprocal of the scale, as
    float32, by a rounding of each value besides.
    """
    exact = weight / np.asarray(scale, np.float64).reshape(-1, 1)
    assert np.abs(exact).max() <= 127 * (1 + 2 * ROUNDING)
    errors = integers - exact
    assert np.abs(errors).max() < 1
    assert np.abs(errors.sum(1)).max() <= 0.5 + ROUNDING * np.abs(exact).sum(1).max()
    nearest = np.rint(exact)
    # Of n values whose errors sum up to about sqrt(n / 12) as many are turned round, and once more for each kernel.
    assert (integers != nearest).mean() < 0.25


@pytest.mark.parametrize("case", [*WITH_WEIGHTS, *SEVERAL], ids=lambda case: f"{case.kind} {len(case.shapes)}")
def test_with_weights(case, tmp_path):
    flow = switched_on(case, tmp_path)
    entry = read_caffe_record(flow.out("quant_param_record.txt"))["it"]
    weight, *bias = (blob.data.copy() for blob in flow.original().params["it"])
    integers = flow.result("deploy").params["it"][0].data.copy().astype(np.float64)
    rows, integer_rows = (each.reshape(len(each), -1) for each in (weight, integers))
    if case.kind == "Deconvolution":  # (in, out / group, ...): channels of a group lie along the second axis
        rows, integer_rows = (
            np.moveaxis(each.reshape(2, len(each) // 2, *each.shape[1:]), 2, 1).reshape(2 * each.shape[1], -1)
            for each in (weight, integers)
        )
    check_rounding(rows, integer_rows, entry.scale_w)
    outputs = (bias or [np.zeros(6 if case.kind != "InnerProduct" else 7, np.float32)])[0]
    check_weighted(case, flow, integers, outputs, original="it")
    deploy = prototxt(flow.result_files("deploy")[0])
    assert [layer.type for layer in deploy.layer].count("DeQuant") == case.tops


@pytest.mark.parametrize("kind", FOLDED)
def test_folded_types_that_stand_alone_become_depthwise(kind, tmp_path):
    """What stands alone in pictures and is switched on is a DepthwiseConv on int8 weights."""
    (case,) = [replace(case, shapes=(IMAGE,)) for case in DATA_ONLY if case.kind == kind]
    flow = switched_on(case, tmp_path)
    entry = checked_entry(case, flow)
    assert len(entry.scale_w) == 4
    data, real = case.data(7), results_of(flow.original(), case.data(7))["t0"]
    fake, deploy = (results_of(flow.result(name), data)["t0"] for name in ("fake_quant", "deploy"))
    (layer,) = [layer for layer in prototxt(flow.result_files("deploy")[0]).layer if layer.name == "it"]
    assert layer.type == "DepthwiseConv"
    # one product and a bias in each channel: (1 + 5) roundings of the sum of their sizes, here below 8
    np.testing.assert_allclose(fake, deploy, rtol=0, atol=6 * ROUNDING * 8)
    # one weight in each channel is 127 steps, so it is exact; the data is off by half a step, times the weight
    weight = np.abs(flow.result("fake_quant").params["it"][0].data).reshape(1, -1, 1, 1)
    cut = np.abs(rounded(data["b0"], entry.record_d[0])[1] - data["b0"])
    step = entry.record_d[0].scale * np.array(entry.scale_w).reshape(1, -1, 1, 1)
    assert (np.abs(real - deploy) <= weight * cut * 1.001 + step).all()


# ------------------------------------------------------------------ several bottoms


@pytest.mark.parametrize("bits", [8, 16])
def test_several_bottoms_with_different_ranges(bits, tmp_path):
    """Each bottom keeps its own factors: one is a hundred times larger, and none is rounded away."""
    case = SEVERAL[1]
    flow = text_flow(case.text(), tmp_path)

    def change(config):
        for block in config["it"]["activation_quant_params"]:
            block["num_bits"] = bits

    graph = flow.configure(batch_num=1, change=change).prepare()
    data = case.data(3)
    data["b1"] *= 100
    flow.net(*flow.modified).forward(**data)
    amct.save_model(graph, "Both", str(flow.prefix))
    entry = read_caffe_record(flow.out("quant_param_record.txt"))["it"]
    assert 50 < entry.record_d[1].scale / entry.record_d[0].scale < 200
    real, deploy = results_of(flow.original(), data), results_of(flow.result("deploy"), data)
    for name, value in real.items():
        assert np.abs(deploy[name] - value).max() < 0.03 * np.abs(value).max()


def test_several_bottoms_clustered_and_in_one_call(tmp_path):
    case = SEVERAL[0]
    flow = text_flow(case.text(), tmp_path)
    (tmp_path / "q.cfg").write_text("batch_num: 2 common_config { snq_quantize { channel_wise: true } }")
    model = quantize(flow.model, flow.weights, [case.data(seed) for seed in range(2)], tmp_path / "q.cfg")
    data = case.data(5)
    for name, value in model(data, deploy=True).items():
        assert np.abs(model(data)[name] - value).max() < 1e-3 * np.abs(value).max()
    assert model.record["it"].num_bits_w == 4
    model.save(tmp_path / "out" / "net")
    deploy = flow.net(
        tmp_path / "out" / "net_deploy_model.prototxt", tmp_path / "out" / "net_deploy_weights.caffemodel"
    )
    for name, value in model(data, deploy=True).items():
        np.testing.assert_array_equal(deploy.forward(**data)[name], value)
    assert [blob.shape for blob in deploy.params["it"]][1:] == [(6,), (6,), (6,), (6, 16)]


def test_several_bottoms_are_converted(tmp_path):
    case = SEVERAL[0]
    flow = switched_on(case, tmp_path)
    record = flow.out("quant_param_record.txt")
    amct.convert_model(str(flow.model), str(flow.weights), str(record), str(tmp_path / "converted" / "net"))
    for name in ("deploy_model.prototxt", "deploy_weights.caffemodel", "fake_quant_weights.caffemodel"):
        assert (tmp_path / "converted" / f"net_{name}").read_bytes() == flow.out(name).read_bytes()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("InnerProduct", "inner_product_param { num_output: 7 }", (ROWS, ROWS), tops=2), "takes one bottom"),
        (Case("Convolution", CONVOLUTION, (IMAGE, IMAGE), tops=1), "one top for each bottom, got 2 bottoms and 1 tops"),
    ],
    ids=["InnerProduct", "Convolution"],
)
def test_bottoms_that_caffe_does_not_allow(case, message, tmp_path):
    alone = Case(case.kind, case.parameters, case.shapes[:1])
    flow = text_flow(alone.text(), tmp_path)
    flow.model.write_text(case.text())
    with pytest.raises(ModelError, match=message):
        flow.configure()


def test_integer_layers_check_their_inputs(tmp_path):
    flow = switched_on(SEVERAL[1], tmp_path)
    model, weights = flow.result_files("deploy")
    net = prototxt(model)
    (layer,) = [layer for layer in net.layer if layer.type == "Quant" and layer.quant_param.index == 1]
    layer.quant_param.object_layer = "another"
    model.write_text(str(net))
    with pytest.raises(ModelError, match=r'layer "it".*expected Quant layers of index \[0, 1\], there are \[0\]'):
        flow.net(model, weights)
