"""Merging layers, reusing and freeing memory: the results are those of running each layer by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from amct.caffe import pycaffe as caffe
from amct.caffe.engine import windows
from amct.caffe.engine.blob import Blob
from amct.caffe.engine.net import Net
from amct.caffe.prototxt import uninplace_model
from amct.errors import ArgumentError, ModelError

# BatchNorm and Scale folded in float64 then rounded once to float32: a few ulps of the largest value.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

HEAD = 'layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 8 dim: 40 dim: 40 } } }'
CONV = """
layer {{ name: "conv" type: "{type}" bottom: "data" top: "conv"
  convolution_param {{ num_output: 8 kernel_size: 3 {more} }} }}
"""
TAIL = """
layer {{ name: "bn" type: "BatchNorm" bottom: "conv" top: "{bn}" }}
layer {{ name: "scale" type: "Scale" bottom: "{bn}" top: "{scale}" scale_param {{ bias_term: true }} }}
layer {{ name: "bias" type: "Bias" bottom: "{scale}" top: "{bias}" }}
layer {{ name: "relu" type: "{activation}" bottom: "{bias}" top: "{relu}" {options} }}
"""
IN_PLACE = {"bn": "conv", "scale": "conv", "bias": "conv", "relu": "conv"}
APART = {"bn": "bn", "scale": "scale", "bias": "bias", "relu": "relu"}
ACTIVATIONS = {
    "ReLU": "",
    "leaky": "relu_param { negative_slope: 0.1 }",
    "Clip": "clip_param { min: -0.5 max: 1 }",
    "TanH": "",
}


def randomize(net, seed=0):
    random = np.random.RandomState(seed)
    for name, blobs in net.params.items():
        for index, blob in enumerate(blobs):
            values = random.randn(*blob.shape)
            blob.data[...] = np.abs(values) + 0.5 if name == "bn" and index > 0 else values * 0.3
    return net


def text(names, kind="Convolution", more="", activation="ReLU"):
    name = "ReLU" if activation == "leaky" else activation
    tail = TAIL.format(**names, activation=name, options=ACTIVATIONS[activation])
    return HEAD + CONV.format(type=kind, more=more) + tail


def literal(path, data):
    """The same net with a callback, which makes every layer run by itself."""
    net = randomize(caffe.Net(path, caffe.TEST))
    seen = []
    net.after_forward(seen.append)
    out = net.forward(data=data)
    assert len(seen) == len(net.layers)
    return {name: value.copy() for name, value in out.items()}, net


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("kind", "more"),
    [("Convolution", ""), ("Convolution", "bias_term: false group: 2 pad: 1"), ("Deconvolution", "group: 2 stride: 2")],
    ids=["conv", "grouped", "deconv"],
)
@pytest.mark.parametrize("names", [IN_PLACE, APART], ids=["in place", "apart"])
@pytest.mark.parametrize("keep_blobs", [True, False], ids=["all blobs", "lean"])
def test_merged_layers_give_the_same(write, names, kind, more, activation, keep_blobs):
    path = write(text(names, kind, more, activation))
    data = np.random.RandomState(1).randn(2, 8, 40, 40).astype(np.float32)
    want, reference = literal(path, data)
    net = randomize(caffe.Net(path, caffe.TEST, keep_blobs=keep_blobs, runtime="torch"))
    for _ in range(2):
        got = net.forward(data=data)
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, **TOLERANCE)
    if keep_blobs:
        for name, blob in reference.blobs.items():
            np.testing.assert_allclose(net.blobs[name].data, blob.data, **TOLERANCE)


def test_a_change_to_any_merged_parameter_is_noticed(write):
    path = write(text(IN_PLACE))
    data = np.random.RandomState(1).randn(2, 8, 40, 40)
    for layer, index in (("conv", 0), ("conv", 1), ("bn", 0), ("bn", 2), ("scale", 1), ("bias", 0)):
        net = randomize(caffe.Net(path, caffe.TEST))
        before = net.forward(data=data)["conv"].copy()
        net.params[layer][index].data[...] *= 1.5
        after = net.forward(data=data)["conv"].copy()
        assert not np.allclose(before, after)
        reference = randomize(caffe.Net(path, caffe.TEST))
        reference.params[layer][index].data[...] *= 1.5
        reference.after_forward(lambda _: None)
        np.testing.assert_allclose(after, reference.forward(data=data)["conv"], **TOLERANCE)


def test_weights_shared_from_another_net_are_noticed(write):
    path = write(text(IN_PLACE))
    data = np.random.RandomState(1).randn(2, 8, 40, 40)
    first, second = randomize(caffe.Net(path, caffe.TEST)), randomize(caffe.Net(path, caffe.TEST), seed=5)
    want = second.forward(data=data)["conv"]
    assert not np.allclose(first.forward(data=data)["conv"], want)
    first.share_with(second)
    np.testing.assert_allclose(first.forward(data=data)["conv"], want, **TOLERANCE)


def test_a_layer_can_be_called_with_other_parameters_than_its_own(write):
    """Retraining computes with quantized copies of the weights: nothing kept from the layer's own may slip in."""
    net = randomize(caffe.Net(write(text(IN_PLACE)), caffe.TEST))
    data = np.random.RandomState(1).randn(2, 8, 40, 40).astype(np.float32)
    net.forward(data=data)
    layer = net.layer_dict["conv"]
    with torch.no_grad():
        own = layer.forward([torch.from_numpy(data)], [blob.tensor for blob in layer.blobs])[0]
        other = layer.forward([torch.from_numpy(data)], [blob.tensor * 2 for blob in layer.blobs])[0]
    np.testing.assert_allclose(other, 2 * own, rtol=1e-4, atol=1e-4)


def test_stopping_inside_a_merged_chain_shows_the_value_there(write):
    path = write(text(IN_PLACE))
    data = np.random.RandomState(1).randn(2, 8, 40, 40)
    net = randomize(caffe.Net(path, caffe.TEST))
    net.blobs["data"].data[...] = data
    net.forward(end="conv")
    plain = net.blobs["conv"].data.copy()
    net.forward(start="bn", end="bn")
    mean, variance, weight = (blob.data for blob in net.params["bn"])
    want = (plain - (mean / weight)[:, None, None]) / np.sqrt((variance / weight)[:, None, None] + 1e-5)
    np.testing.assert_allclose(net.blobs["conv"].data, want, **TOLERANCE)


def test_batch_statistics_are_never_merged(write):
    net = randomize(caffe.Net(write(text(IN_PLACE)), caffe.TRAIN))
    net.forward(data=np.random.RandomState(1).randn(2, 8, 40, 40))
    assert net.params["bn"][2].data[0] != pytest.approx(0.0)
    factor = net.params["bn"][2].data[0]
    net.forward()
    assert net.params["bn"][2].data[0] == pytest.approx(factor * 0.999 + 1, rel=1e-6)


BRANCHES = (
    HEAD
    + """
layer { name: "a" type: "Convolution" bottom: "data" top: "a" convolution_param { num_output: 4 kernel_size: 1 } }
layer { name: "b" type: "ReLU" bottom: "a" top: "b" }
layer { name: "c" type: "Slice" bottom: "b" top: "c0" top: "c1" }
layer { name: "d" type: "Power" bottom: "c0" top: "d" power_param { scale: 2 } }
layer { name: "e" type: "ReLU" bottom: "c1" top: "c1" }
layer { name: "f" type: "Concat" bottom: "d" bottom: "c1" top: "f" }
layer { name: "g" type: "Eltwise" bottom: "f" bottom: "b" top: "g" }
layer { name: "h" type: "Flatten" bottom: "g" top: "h" }
layer { name: "i" type: "Sigmoid" bottom: "h" top: "h" }
"""
)


def test_lean_mode_frees_and_says_so(write):
    path = write(BRANCHES)
    data = np.random.RandomState(1).randn(2, 8, 40, 40)
    want, reference = literal(path, data)
    net = randomize(caffe.Net(path, caffe.TEST, keep_blobs=False, runtime="torch"))
    out = net.forward(data=data, blobs=["f"])
    np.testing.assert_allclose(out["h"], want["h"], **TOLERANCE)
    np.testing.assert_allclose(out["f"], reference.blobs["f"].data, **TOLERANCE)
    with pytest.raises(ArgumentError, match="freed after its last use"):
        _ = net.blobs["a"].data
    with pytest.raises(ModelError, match="created without gradients"):
        net.backward()
    named = randomize(caffe.Net(path, caffe.TEST, keep_blobs=["d"], runtime="torch"))
    named.forward(data=data)
    np.testing.assert_allclose(named.blobs["d"].data, reference.blobs["d"].data, **TOLERANCE)
    with pytest.raises(ArgumentError, match='no blob "nope"'):
        caffe.Net(path, caffe.TEST, keep_blobs=["nope"])


def test_lean_mode_keeps_the_loss_of_a_layer_without_top(write):
    """As in BVLC's finetune_pascal_detection."""
    loss = 'layer { name: "loss" type: "EuclideanLoss" bottom: "data" bottom: "twice" }'
    path = write(HEAD + 'layer { name: "p" type: "Power" bottom: "data" top: "twice" power_param { scale: 2 } }' + loss)
    losses = []
    for keep_blobs in (True, False):
        net = Net.from_file(path, keep_blobs=keep_blobs)
        net.blob("data").set_tensor(torch.ones(2, 8, 40, 40))
        losses.append(net.forward())
    assert losses == [8 * 40 * 40 / 2] * 2


def test_lean_mode_frees_old_results_before_it_makes_new_ones(write):
    net = randomize(caffe.Net(write(BRANCHES), caffe.TEST, keep_blobs=["d"], runtime="torch"))
    data, other = np.random.RandomState(1).randn(2, 2, 8, 40, 40)
    first = net.forward(data=data)["h"].copy()
    held = net.blobs["d"].data
    before = held.copy()
    alive = []
    net.before_forward(lambda _: alive.append([net.blobs[name].values.is_allocated for name in ("data", "d", "h")]))
    net.forward(data=other)
    assert alive[0] == [True, True, False]  # someone looks at d
    assert not np.array_equal(held, before)
    np.testing.assert_allclose(net.forward(data=data)["h"], first, **TOLERANCE)
    np.testing.assert_allclose(held, before, **TOLERANCE)


def test_default_mode_too_frees_old_results_unless_someone_holds_them(write, monkeypatch):
    net = Net.from_file(write(BRANCHES))
    random = torch.Generator().manual_seed(0)
    for blob in (blob for layer in net.layers for blob in layer.blobs):
        blob.set_tensor(torch.randn(blob.shape, generator=random))
    data = torch.randn(2, 8, 40, 40, generator=random)
    net.blob("data").set_tensor(data)
    net.forward()
    held = net.blob("d").data
    before = held.copy()
    (concat,) = [layer for layer in net.layers if layer.name == "f"]
    original, alive = concat.forward, []

    def spy(bottoms, parameters):
        alive.append([net.blob(name).values.is_allocated for name in ("b", "d", "g", "h")])
        return original(bottoms, parameters)

    monkeypatch.setattr(concat, "forward", spy)
    net.blob("data").set_tensor(2 * data)
    net.forward()
    assert alive == [[True, True, False, False]]  # b and d are made before, g and h behind
    assert not np.array_equal(held, before)
    assert net.blob("g").data.any()
    watched = []
    net.on("before_forward", lambda _: watched.append(net.blob("h").values.is_allocated))
    net.forward()
    assert all(watched)


@pytest.mark.parametrize("runtime", [None, "torch", "onnxruntime"])
def test_lean_mode_keeps_what_is_read_before_it_is_written(write, runtime):
    double = 'layer { name: "a" type: "Power" bottom: "data" top: "data" power_param { scale: 2 } }'
    path = write(HEAD + double + CONV.format(type="Convolution", more=""))
    net = caffe.Net(path, caffe.TEST, keep_blobs=False, runtime=runtime)
    data = np.random.RandomState(1).randn(2, 8, 40, 40).astype(np.float32)
    net.blobs["data"].data[...] = data
    for factor in (2, 4):  # in Caffe, too, the second forward goes on from what the first one left
        net.forward()
        np.testing.assert_array_equal(net.blobs["data"].data, factor * data)


def test_in_place_behind_flatten_changes_both_as_in_caffe(write):
    net = randomize(caffe.Net(write(BRANCHES), caffe.TEST))
    net.forward(data=np.random.RandomState(1).randn(2, 8, 40, 40))
    np.testing.assert_array_equal(net.blobs["g"].data.reshape(2, -1), net.blobs["h"].data)


SIGMOID, READER = (
    """
layer { name: "n" type: "Sigmoid" bottom: "a" top: "a" }""",
    """
layer { name: "p" type: "Power" bottom: "%s" top: "p" power_param { scale: 10 } }""",
)
SHARING = {
    "Reshape": 'layer { name: "s" type: "Reshape" bottom: "x" top: "a" reshape_param { shape { dim: 2 dim: 2 } } }',
    "Flatten": 'layer { name: "s" type: "Flatten" bottom: "x" top: "a" }',
    "Split": 'layer { name: "s" type: "Split" bottom: "x" top: "a" top: "b" }',
    "Concat": 'layer { name: "s" type: "Concat" bottom: "x" top: "a" }',
    "Slice": 'layer { name: "s" type: "Slice" bottom: "x" top: "a" }',
}
FOUR = 'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 1 dim: 4 } } }\n'


@pytest.mark.parametrize("kind", SHARING)
def test_reading_what_a_layer_in_place_changed_through_shared_memory_is_refused(kind, write, tmp_path, caplog):
    path = write(FOUR + SHARING[kind] + SIGMOID + READER % ("b" if kind == "Split" else "x"))
    with pytest.raises(
        ModelError, match=r'layer "p" reads .* after layer "n" has worked in place on "a".*uninplace_model'
    ):
        caffe.Net(path, caffe.TEST)
    uninplace_model(path, str(tmp_path / "own.prototxt"))
    assert f'layer "p" reads "{"b" if kind == "Split" else "x"}" as it was before layer "n" worked' in caplog.text
    values = caffe.Net(str(tmp_path / "own.prototxt"), caffe.TEST).forward(x=np.float32([[1, 2, 3, 4]]))
    np.testing.assert_array_equal(values["p"].reshape(-1), [10, 20, 30, 40])


@pytest.mark.parametrize("kind", SHARING)
def test_all_blobs_in_shared_memory_show_what_a_layer_in_place_wrote(kind, write):
    net = caffe.Net(write(FOUR + SHARING[kind] + SIGMOID + READER % "a"), caffe.TEST)
    net.forward(x=np.float32([[1, 2, 3, 4]]))
    for name in {"x", "a", "b"} & set(net.blobs):
        np.testing.assert_array_equal(net.blobs[name].data.reshape(-1), net.blobs["a"].data.reshape(-1))


@pytest.mark.parametrize(
    ("layers", "reader"),
    [
        (SHARING["Flatten"] + SIGMOID, "a"),
        (SHARING["Flatten"] + SIGMOID.replace("Sigmoid", "Dropout"), "x"),
        (SHARING["Flatten"] + SIGMOID.replace('top: "a"', 'top: "y"'), "x"),
        ('layer { name: "s" type: "Concat" bottom: "x" bottom: "x" top: "a" }' + SIGMOID, "x"),
    ],
)
def test_what_no_layer_changed_for_its_reader_is_not_warned_of(layers, reader, write, tmp_path, caplog):
    path = write(FOUR + layers + READER % reader)
    caffe.Net(path, caffe.TEST)
    uninplace_model(path, str(tmp_path / "own.prototxt"))
    assert "same memory" not in caplog.text


def test_dropout_in_place_on_shared_memory_does_nothing_in_tests(write):
    dropout = '\nlayer { name: "n" type: "Dropout" bottom: "a" top: "a" }'
    path = write(FOUR + SHARING["Flatten"] + dropout + READER % "x")
    values = caffe.Net(path, caffe.TEST).forward(x=np.float32([[1, 2, 3, 4]]))
    np.testing.assert_array_equal(values["p"].reshape(-1), [10, 20, 30, 40])
    with pytest.raises(ModelError, match="uninplace_model"):
        caffe.Net(path, caffe.TRAIN)


def test_without_the_packed_kernels_everything_still_agrees(write, monkeypatch):
    path = write(text(IN_PLACE, more="group: 2"))
    data = np.random.RandomState(1).randn(2, 8, 40, 40)
    fast = randomize(caffe.Net(path, caffe.TEST)).forward(data=data)["conv"]
    monkeypatch.setattr(windows, "can_pack", lambda: False)
    plain = randomize(caffe.Net(path, caffe.TEST)).forward(data=data)["conv"]
    np.testing.assert_allclose(plain, fast, **TOLERANCE)


def test_packed_kernels_are_not_used_where_they_do_not_compute(monkeypatch):
    windows.can_pack.cache_clear()

    def broken(*_):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(windows.torch.ops.mkldnn, "_convolution_pointwise", broken)
    assert windows.can_pack() is False
    windows.can_pack.cache_clear()


def test_a_net_can_change_its_input_size_between_merged_forwards(write):
    path = write(text(IN_PLACE))
    net = randomize(caffe.Net(path, caffe.TEST))
    for size in (40, 33, 50):
        data = np.random.RandomState(size).randn(1, 8, size, size)
        net.blobs["data"].reshape(*data.shape)
        reference = randomize(caffe.Net(path, caffe.TEST))
        reference.after_forward(lambda _: None)
        reference.blobs["data"].reshape(*data.shape)
        np.testing.assert_allclose(net.forward(data=data)["conv"], reference.forward(data=data)["conv"], **TOLERANCE)


def test_a_parameter_whose_array_is_held_may_change_at_any_time(write):
    net = randomize(caffe.Net(write(text(IN_PLACE)), caffe.TEST))
    data = np.random.RandomState(1).randn(2, 8, 40, 40)
    for _ in range(2):  # steps are bound to their parameters
        net.forward(data=data)
    held = net.params["bias"][0].data
    for value in (0.5, 2.0):
        held[...] = value
        held_out = net.forward(data=data)["conv"].copy()
        reference = randomize(caffe.Net(write(text(IN_PLACE)), caffe.TEST))
        reference.params["bias"][0].data[...] = value
        np.testing.assert_allclose(held_out, reference.forward(data=data)["conv"], **TOLERANCE)


def test_only_parameters_shapes_and_device_bind_a_step_again(write):
    net = randomize(caffe.Net(write(BRANCHES), caffe.TEST))
    data = np.random.RandomState(1).randn(2, 8, 40, 40)
    net.forward(data=data)
    (plan,) = net._plans.values()
    bound = [step.call for step in plan.steps]
    assert [step.node.layer.name for step in plan.steps if step.call is None] == ["in"]
    net.forward(data=2 * data)
    assert [step.call for step in plan.steps] == bound
    net.params["a"][0].data[...] *= 2
    net.forward()
    assert [step.call is old for step, old in zip(plan.steps, bound, strict=True)].count(False) == 1
    net.blobs["data"].reshape(1, 8, 40, 40)
    net.forward()
    assert not any(step.call is old for step, old in zip(plan.steps[1:], bound[1:], strict=True))


def lean_pair(write, **options):
    """The net that frees blobs, after a pass that bound it, and a function that computes the same literally."""
    path = write(BRANCHES)
    lean = randomize(caffe.Net(path, caffe.TEST, runtime="torch", **options))
    lean.forward(data=np.ones((2, 8, 40, 40)))
    reference = randomize(caffe.Net(path, caffe.TEST))
    reference.after_forward(lambda _: None)
    return lean, reference


def test_a_bound_pass_gives_the_same_as_its_steps(write):
    lean, reference = lean_pair(write, keep_blobs=False)
    for seed in (1, 2):
        data = np.random.RandomState(seed).randn(2, 8, 40, 40)
        (plan,) = lean._plans.values()
        bound = plan.repeat
        np.testing.assert_allclose(lean.forward(data=data)["h"], reference.forward(data=data)["h"], **TOLERANCE)
        assert plan.repeat is bound is not None
    with pytest.raises(ArgumentError, match="freed after its last use"):
        _ = lean.blobs["a"].data


@pytest.mark.parametrize("change", ["parameter", "shape", "held parameter", "another blob"])
def test_a_bound_pass_sees_every_change(write, change):
    lean, reference = lean_pair(write, keep_blobs=False)
    data = np.random.RandomState(1).randn(2, 8, 40, 40)
    held = []
    for net in (lean, reference):
        if change == "shape":
            net.blobs["data"].reshape(1, 8, 40, 40)
        elif change != "another blob":
            net.params["a"][0].data[...] *= 3
            held.append(net.params["a"][0].data if change == "held parameter" else None)
    given = data[:1] if change == "shape" else data
    for factor in (1, 2):
        if change == "held parameter":
            for array in held:
                array[...] *= factor
        wanted = ["f"] if change == "another blob" else []
        got, want = (net.forward(data=given, blobs=wanted) for net in (lean, reference))
        for name in ("h", *wanted):
            np.testing.assert_allclose(got[name], want[name], **TOLERANCE)


def test_a_bound_pass_writes_into_arrays_that_are_held(write):
    lean, reference = lean_pair(write, keep_blobs=["d"])
    held = lean.blobs["d"].data
    for seed in (1, 2, 3):
        data = np.random.RandomState(seed).randn(2, 8, 40, 40)
        lean.forward(data=data)
        reference.forward(data=data)
        np.testing.assert_allclose(held, reference.blobs["d"].data, **TOLERANCE)


def test_a_bound_pass_that_fails_names_the_layer(write, monkeypatch):
    lean, _ = lean_pair(write, keep_blobs=False)
    layer = lean.layer_dict["d"]

    def broken(*_):
        raise RuntimeError("no memory for this")

    monkeypatch.setattr(layer, "forward", broken)
    (plan,) = lean._plans.values()
    assert plan.repeat is not None
    with pytest.raises(ModelError, match=r'layer "d" \(Power\): cannot run on its bottoms .*no memory for this'):
        lean.forward()


def test_short_rows_of_a_softmax(write):
    shape = "dim: 2 dim: 100 dim: 3"
    path = write(
        f'layer {{ name: "in" type: "Input" top: "data" input_param {{ shape {{ {shape} }} }} }}\n'
        'layer { name: "s" type: "Softmax" bottom: "data" top: "s" softmax_param { axis: 2 } }'
    )
    data = np.random.RandomState(0).randn(2, 100, 3) * 5
    got = caffe.Net(path, caffe.TEST).forward(data=data)["s"]
    powers = np.exp(data)
    np.testing.assert_allclose(got, powers / powers.sum(2, keepdims=True), rtol=1e-5)


def test_a_subclass_that_overrides_forward_alone_is_run_by_it(write):
    net = caffe.Net(write(HEAD + CONV.format(type="Convolution", more="")), caffe.TEST)
    layer = net.layer_dict["conv"]
    assert layer.computes_forward("bind_folded")

    class Doubled(type(layer)):
        def forward(self, bottoms, parameters):
            return [2 * top for top in super().forward(bottoms, parameters)]

    data = np.random.RandomState(1).randn(2, 8, 40, 40)
    once = net.forward(data=data)["conv"].copy()
    layer.__class__ = Doubled
    net.params["conv"][0].data  # noqa: B018  an array that is taken binds the step again
    np.testing.assert_allclose(net.forward(data=data)["conv"], 2 * once, **TOLERANCE)


def test_arrays_of_an_input_leave_nothing_behind():
    blob = Blob(2, 3)
    for _ in range(5):
        blob.data[...] = 1
    assert len(blob.values._views) <= 1
