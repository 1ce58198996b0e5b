"""The layers of the patch against those of the engine, on nets that the engine wrote, in a small Caffe of the tests."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from patch_flow import Flow, assert_same_record, batch
from quant_library import PATCH

import amct_caffe as amct
from amct.caffe import pycaffe as caffe
from amct.caffe.engine.layers.batch_norm import dump_path
from amct.caffe.engine.wire import read_weights
from amct.caffe.model import INSERTED_TYPES

pytestmark = pytest.mark.usefixtures("quiet")


# -- Calibration -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"with_offset": False}, {"num_bits": 12}, {"search_step": 0.03}])
def test_the_record_is_that_of_the_engine(small_caffe, tmp_path, changes):
    flow = Flow(tmp_path).prepare(**changes)
    before = flow.path("record.txt").read_text()
    assert "factors_from" in flow.path("modified.prototxt").read_text()
    net = small_caffe.net(*flow.files("modified"))
    small_caffe.log()
    for seed in range(2):
        assert not flow.path("record.txt.progress.json").exists() or seed
        net.forward(data=batch(seed))
    found = flow.path("record.txt").read_text()
    flow.path("record.txt").write_text(before)
    other = flow.engine("modified")
    for seed in range(2):
        wanted = other.forward(data=batch(seed))
    assert_same_record(found, flow.path("record.txt").read_text())
    np.testing.assert_allclose(net.get("fc2"), wanted["fc2"].reshape(-1), rtol=1e-5, atol=1e-5)


def test_what_a_calibration_says(small_caffe, tmp_path):
    flow = Flow(tmp_path).prepare()
    net = small_caffe.net(*flow.files("modified"))
    small_caffe.log()
    net.forward(data=batch(0))
    assert small_caffe.log() == ["calibration: 1/2 batches"]
    progress = json.loads(flow.path("record.txt.progress.json").read_text())
    assert progress == {
        "version": 1,
        "layers": {name: [1, 2] for name in ("conv1", "conv2", "fc1", "fc2", "relu1", "relu2", "up")},
    }
    with pytest.raises(Exception, match=r"Cannot find scale_d of layer 'conv1' in record file.*1.*2"):
        amct.save_model(flow.graph, "Both", str(flow.path("net")))
    net.forward(data=batch(1))
    said = small_caffe.log()
    assert said[0] == "Do layer conv1 activation calibration success!"
    assert len(said) == 7
    assert not flow.path("record.txt.progress.json").exists()
    net.forward(data=batch(2))
    assert small_caffe.log() == []
    amct.save_model(flow.graph, "Both", str(flow.path("net")))
    assert flow.path("net_deploy_model.prototxt").exists()


def test_two_nets_with_one_record_do_not_share_a_calibration(small_caffe, tmp_path):
    flow = Flow(tmp_path).prepare()
    nets = [small_caffe.net(*flow.files("modified")) for _ in range(2)]
    nets[0].forward(data=batch(0))
    nets[1].forward(data=batch(1))
    assert "scale_d" not in flow.path("record.txt").read_text()
    nets[0].forward(data=batch(1))
    assert flow.path("record.txt").read_text().count("scale_d") == 7


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('object_layer: "conv1"', "", "needs object_layer"),
        ("record.txt", "missing.txt", r'the record ".*missing.txt" does not exist; a prototxt creates no files'),
        ("batch_num: 2", "batch_num: 0", "batch_num: expected above 0"),
        ("num_bits_d: 8", "num_bits_d: 1", r'layer "conv1_ifmr" \(IFMR\): num_bits_d: expected 2..16, got 1'),
        ("search_step: 0.01", "search_step: 0", "search_step: expected above 0"),
        ("num_bits_d: 8", 'settings: "{}"', "a patched Caffe computes IFMR only"),
        ("num_bits_d: 8", 'factors_from: "relu1"', r'factors_from: "relu1" is no IFMR layer that watches its bottom'),
    ],
)
def test_calibration_models_that_are_wrong(small_caffe, tmp_path, old, new, message):
    flow = Flow(tmp_path).prepare()
    text = flow.path("modified.prototxt").read_text()
    assert old in text
    flow.path("modified.prototxt").write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        small_caffe.net(*flow.files("modified")).forward(data=batch(0))


def test_data_that_cannot_be_calibrated(small_caffe, tmp_path):
    flow = Flow(tmp_path).prepare()
    net = small_caffe.net(*flow.files("modified"))
    wrong = batch(0)
    wrong[0, 0, 0, 0] = np.inf
    message = r'IfmrQuantWithOffset scale is illegal: layer "conv1", input 0: .* 0 NaN and 1 infinite values among 288'
    with pytest.raises(ValueError, match=message):
        net.forward(data=wrong)
    net = small_caffe.net(*flow.files("modified"))
    net.forward(data=batch(0) * 0)
    with pytest.raises(ValueError, match=r'IfmrQuantWithOffset scale is illegal: layer "conv1", input 0: .*too large'):
        net.forward(data=np.float32(1e30) * batch(1))


# -- Quantized models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", ["batch_num: 2", "batch_num: 2 common_config { snq_quantize { channel_wise: true } }"]
)
@pytest.mark.parametrize("double", [False, True])
def test_fake_quant_and_deploy_models(small_caffe, tmp_path, config, double):
    flow = Flow(tmp_path).prepare(config).save()
    for kind in ("fake_quant", "deploy"):
        name = f"net_{kind}_model"
        net = small_caffe.net(*flow.files(name), double=double)
        other = flow.engine(name)
        for seed in range(3, 5):
            wanted = other.forward(data=batch(seed))["fc2"].reshape(-1)
            found = net.forward(data=batch(seed)).get("fc2")
            np.testing.assert_array_equal(found.astype(np.float32), wanted)
            if kind == "deploy":
                for blob in ("conv1_quant", "conv1_int32", "up_quant", "conv2_int32"):
                    np.testing.assert_array_equal(net.get(blob), other.blobs[blob].data.reshape(-1))
        other_size = batch(6, (3, 4, 6, 6))
        other.blobs["data"].reshape(*other_size.shape)
        wanted = other.forward(data=other_size)["fc2"].reshape(-1)
        found = net.forward(data=other_size).get("fc2")
        np.testing.assert_array_equal(found.astype(np.float32), wanted)


def test_sums_beyond_float32_are_exact(small_caffe, tmp_path):
    flow = Flow(tmp_path).prepare(num_bits=16, with_offset=False).save()
    net, other = small_caffe.net(*flow.files("net_deploy_model")), flow.engine("net_deploy_model")
    wanted = other.forward(data=batch(3) * 100)["fc2"].reshape(-1)
    found = net.forward(data=batch(3) * 100).get("fc2")
    assert np.abs(other.blobs["conv1_int32"].data).max() > 2**24
    np.testing.assert_array_equal(found.astype(np.float32), wanted)


TWO = """name: "two"
layer { name: "in" type: "Input" top: "data" top: "other"
  input_param { shape { dim: 2 dim: 4 dim: 6 dim: 6 } shape { dim: 2 dim: 4 dim: 6 dim: 6 } } }
layer { name: "conv" type: "Convolution" bottom: "data" bottom: "other" top: "a" top: "b"
  convolution_param { num_output: 6 kernel_size: 3 pad: 1 } }
"""


def test_a_layer_with_two_bottoms(small_caffe, tmp_path):
    flow = Flow(tmp_path, TWO).prepare()
    net = flow.engine("modified")
    for seed in range(2):
        net.forward(data=batch(seed), other=batch(seed + 10) * 3 + 1)
    amct.save_model(flow.graph, "Both", str(flow.path("net")))
    given = {"data": batch(3), "other": batch(13) * 3 + 1}
    for name in ("net_fake_quant_model", "net_deploy_model"):
        wanted = flow.engine(name).forward(**given)
        net = small_caffe.net(*flow.files(name)).forward(**given)
        for top in ("a", "b"):
            np.testing.assert_array_equal(net.get(top).astype(np.float32), wanted[top].reshape(-1))


def test_a_quantized_net_is_saved_as_it_is_in_the_file(small_caffe, tmp_path):
    flow = Flow(tmp_path).prepare().save()
    saved = small_caffe.net(*flow.files("net_deploy_model")).saved()
    assert 'type: "Convolution"' in saved
    assert "on integers" not in saved
    assert "integer_param" not in saved
    assert saved.count("int8_data") == 5
    flow.path("saved.prototxt").write_text(saved)


def test_a_fake_quant_model_whose_weights_were_changed(small_caffe, tmp_path):
    flow = Flow(tmp_path).prepare().save()
    net, other = small_caffe.net(*flow.files("net_fake_quant_model")), flow.engine("net_fake_quant_model")
    net.forward(data=batch(3))
    for layer in ("conv1", "fc1"):
        moved = other.params[layer][0].data * np.float32(1.01) + np.float32(1e-4)
        net.put(layer, moved, 0)
        other.params[layer][0].data[...] = moved
    wanted = other.forward(data=batch(3))["fc2"].reshape(-1)
    found = net.forward(data=batch(3)).get("fc2")
    np.testing.assert_allclose(found, wanted, atol=0.02 * np.abs(wanted).max())  # a value may round the other way
    assert np.median(np.abs(found - wanted)) <= 1e-5 * np.abs(wanted).max()
    np.testing.assert_allclose(net.get("conv1"), other.blobs["conv1"].data.reshape(-1), atol=1e-5)


def test_the_gradient_of_a_fake_quant_model(small_caffe, tmp_path):
    flow = Flow(tmp_path).prepare().save()
    path = flow.path("net_fake_quant_model.prototxt")
    path.write_text("force_backward: true\n" + path.read_text())
    net, other = small_caffe.net(*flow.files("net_fake_quant_model")), flow.engine("net_fake_quant_model")
    upstream = batch(9, (2, 5))
    net.forward(data=batch(3) * 2)
    net.backward(fc2=upstream)
    other.forward(data=batch(3) * 2)
    other.blobs["fc2"].diff[...] = upstream
    wanted = other.backward(fc2=upstream)["data"].reshape(-1)
    np.testing.assert_allclose(net.get("data", gradient=True), wanted, atol=1e-5 * np.abs(wanted).max())


def test_quantized_models_that_are_wrong(small_caffe, tmp_path):
    flow = Flow(tmp_path).prepare().save()
    deploy = flow.path("net_deploy_model.prototxt")
    text = deploy.read_text()

    def load(changed):
        flow.path("changed.prototxt").write_text(changed)
        return small_caffe.net(flow.path("changed.prototxt"), flow.path("net_deploy_weights.caffemodel"))

    with pytest.raises(ValueError, match=r'layer "conv1_quant" \(Quant\): quant_param: scale is illegal'):
        load(re.sub(r"scale: \S+", "scale: 0", text, count=1))
    with pytest.raises(ValueError, match="offset is illegal"):
        load(re.sub(r"offset: -?\d+", "offset: 1000", text, count=1))
    with pytest.raises(ValueError, match="each bottom comes from a Quant layer"):
        load(text.replace('object_layer: "conv1"', 'object_layer: "nothing"', 1))
    with pytest.raises(ValueError, match="the weights of a deploy model are needed"):
        small_caffe.net(deploy).forward(data=batch(0))
    with pytest.raises(ValueError, match="the caffemodel has 108 values for a blob"):
        load(text.replace("kernel_size: 3", "kernel_size: 1", 1))
    wrong = batch(0)
    wrong[0, 0, 0, 0] = np.nan
    with pytest.raises(ValueError, match=r'layer "conv1_quant" \(Quant\): NaN cannot be quantized: 1 of 288'):
        load(text).forward(data=wrong)
    with pytest.raises(ValueError, match="a deploy model has no gradients"):
        load(text).backward(fc2=batch(9, (2, 5)))


def test_statistics_that_are_refreshed(small_caffe, tmp_path):
    path = tmp_path / "bn.prototxt"
    path.write_text(
        f"""layer {{ name: "in" type: "Input" top: "data" input_param {{ shape {{ dim: 2 dim: 4 dim: 6 dim: 6 }} }} }}
        layer {{ name: "a/b n" type: "BatchNorm" bottom: "data" top: "out" batch_norm_param {{ use_global_stats: false
        moving_average_fraction: 0.9 update_iterations: 2 dump_dir: "{tmp_path}/new/folder" }} }}"""
    )
    stored = [np.full(4, 0.5), np.full(4, 2.0), np.ones(1)]
    results = []
    for net in (small_caffe.net(path), caffe.Net(str(path), caffe.TEST)):
        dump = dump_path(tmp_path / "new/folder", "a/b n")
        dump.unlink(missing_ok=True)
        for index, values in enumerate(stored):
            if hasattr(net, "put"):
                net.put("a/b n", values, index)
            else:
                net.params["a/b n"][index].data[...] = values
        tops = []
        for seed in range(3):
            assert dump.exists() == (seed > 1)
            given = batch(seed) * 3 + 1
            found = net.forward(data=given)
            tops.append(found.get("out") if hasattr(net, "put") else found["out"].reshape(-1).copy())
        layers = read_weights(dump.read_bytes(), str(dump))
        results.append((tops, [np.array(blob.values) for blob in layers[0].blobs], layers[0].name))
    assert results[0][2] == results[1][2] == "a/b n"
    for mine, wanted in zip(*[(*tops, *blobs) for tops, blobs, _ in results], strict=True):
        np.testing.assert_allclose(mine.reshape(-1), wanted.reshape(-1), rtol=1e-4, atol=1e-5)
    assert [line for line in small_caffe.log() if "refreshed" in line][-1] == (
        "layer a/b n: statistics refreshed by 2/2 batches"
    )
    assert 'type: "BatchNorm"' in small_caffe.net(path).saved()


LSTM = """name: "recurrent"
layer { name: "in" type: "Input" top: "data" top: "cont"
  input_param { shape { dim: 3 dim: 2 dim: 5 } shape { dim: 3 dim: 2 } } }
layer { name: "lstm" type: "LSTM" bottom: "data" bottom: "cont" top: "h" recurrent_param { num_output: 4 } }
"""


def test_the_matrices_of_a_deployed_lstm_become_real_numbers(small_caffe, tmp_path):
    flow = Flow(tmp_path, LSTM).prepare()
    net = flow.engine("modified")
    for seed in range(2):
        net.forward(data=batch(seed, (3, 2, 5)), cont=np.ones((3, 2), np.float32))
    amct.save_model(flow.graph, "Both", str(flow.path("net")))
    wanted = flow.engine("net_fake_quant_model").params["lstm"]
    deploy = small_caffe.net(*flow.files("net_deploy_model"))
    for index, blob in enumerate(wanted):
        np.testing.assert_allclose(deploy.get("lstm", index), blob.data.reshape(-1), rtol=1e-6)
    given = batch(2, (3, 2, 5))
    deploy.forward(data=given, cont=np.ones((3, 2), np.float32))
    fake = small_caffe.net(*flow.files("net_fake_quant_model"))
    fake.forward(data=given, cont=np.ones((3, 2), np.float32))
    np.testing.assert_array_equal(deploy.get("lstm_quant_0"), fake.get("lstm_quant_0"))
    path = flow.path("net_deploy_model.prototxt")
    path.write_text(re.sub(r"scale_w: \S+", "", path.read_text(), count=1))
    with pytest.raises(ValueError, match=r'layer "lstm" \(LSTMQuant\): lstm_quant_param has too few scale_w'):
        small_caffe.net(*flow.files("net_deploy_model"))


def test_each_type_that_the_engine_inserts_is_there():
    sources = [*(PATCH / "src").glob("**/*.cpp"), *(PATCH / "patch").glob("*.patch")]
    known = {name for path in sources for name in re.findall(r"REGISTER_LAYER_CLASS\((\w+)\);", path.read_text())}
    assert set(INSERTED_TYPES) - known == {"GRUQuant"}  # Caffe has no GRU
