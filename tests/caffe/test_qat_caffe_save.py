"""save_quant_retrain_model: the guide's files, integers, folded batch norms, mistakes, and training after a kill."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from guide_messages import read_as_converter
from qat_caffe_flow import BODY, Retraining, write_digits

import amct_caffe as amct
from amct.atomic._disk import NOTICE, new_path
from amct.caffe import pycaffe as caffe
from amct.caffe.engine.messages import read_net_message
from amct.errors import ArgumentError, ArgumentTypeError, FileError, ModelError, RecordError
from amct.record import read_caffe_record
from amct.schema import format_text

FILES = [
    "net_atc_model.prototxt",
    "net_deploy_model.prototxt",
    "net_deploy_weights.caffemodel",
    "net_fake_quant_model.prototxt",
    "net_fake_quant_weights.caffemodel",
    "net_qdq_model.onnx",
    "net_quant.json",
    "net_quant_param_record.bin",
    "net_quant_param_record.txt",
]
SAVE = "import sys, amct_caffe; amct_caffe.save_quant_retrain_model(sys.argv[1], sys.argv[2], 'Both', sys.argv[3])"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A net after retraining and saving; the save runs in a process of its own."""
    folder = tmp_path_factory.mktemp("trained")
    write_digits(folder)
    run = Retraining(folder, folder)
    run.train_float(40)
    run.create()
    run.retrain()
    command = [sys.executable, "-c", SAVE, run.modified[0], run.snapshot(), str(run.prefix)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture
def copy(trained, tmp_path, monkeypatch):
    """The same files under other names, to be changed."""
    monkeypatch.chdir(tmp_path)
    run = Retraining(tmp_path, trained.data)
    for name in ("net.prototxt", "net.caffemodel", "config.json", "record.txt", "modified.caffemodel"):
        (tmp_path / name).write_bytes((trained.folder / name).read_bytes())
    Path(run.snapshot()).write_bytes(Path(trained.snapshot()).read_bytes())
    text = Path(trained.modified[0]).read_text()
    for name in ("config.json", "record.txt"):
        text = text.replace(str(trained.folder / name), str(tmp_path / name))
    Path(run.modified[0]).write_text(text)
    return run


def test_files(trained):
    assert sorted(path.name for path in trained.prefix.parent.iterdir()) == FILES


def accuracy(net, batches=5):
    return np.mean([float(net.forward()["accuracy"]) for _ in range(batches)])


def test_fake_quant_equals_deploy_bit_by_bit(trained):
    fake, deploy = trained.result("fake_quant"), trained.result("deploy")
    for _ in range(3):
        fake.forward()
        deploy.forward()
        np.testing.assert_array_equal(fake.blobs["fc"].data, deploy.blobs["fc"].data)
    assert deploy.params["conv1"][0].count == 8 * 9
    types = {layer.type for layer in read_net_message(f"{trained.prefix}_deploy_model.prototxt").layer}
    assert {"Quant", "DeQuant", "AntiQuant"} < types
    assert not {"BatchNorm", "Scale", "RetrainDataQuant", "RetrainWeightQuant"} & types


def test_saved_net_is_the_trained_one(trained):
    """Only ties that fall to the other side in a sum of another order differ: a step of the last layer or two."""
    test, fake = caffe.Net(trained.modified[0], trained.snapshot(), caffe.TEST), trained.result("fake_quant")
    assert accuracy(test) == accuracy(fake)
    test.forward()
    fake.forward()
    scores = test.blobs["fc"].data
    assert np.abs(scores - fake.blobs["fc"].data).max() < 0.01 * np.abs(scores).max()
    original = caffe.Net(str(trained.model), str(trained.weights), caffe.TEST)
    assert accuracy(fake) >= accuracy(original) - 0.02


def test_integers_are_those_of_training(trained):
    """Rounding the trained weights by their own range gives the integers of the file; a negative factor turns them."""
    test, deploy = caffe.Net(trained.modified[0], trained.snapshot(), caffe.TEST), trained.result("deploy")
    for name in ("conv1", "conv2"):
        weight = test.params[name][0].data
        scale = np.float32(np.abs(weight).reshape(len(weight), -1).max(1) / 127).reshape(-1, 1, 1, 1)
        expected = np.round(weight * (np.float32(1) / scale))
        found = deploy.params[name][0].data
        signs = np.sign(test.params["scale1"][0].data).reshape(-1, 1, 1, 1) if name == "conv1" else 1
        np.testing.assert_array_equal(found, expected * signs)


def test_record_has_the_folded_scales(trained):
    before = read_caffe_record(trained.record)
    text, binary = (read_caffe_record(f"{trained.prefix}_quant_param_record.{ending}") for ending in ("txt", "bin"))
    assert text == binary
    assert [data.scale for data in text["conv2"].record_d] == [data.scale for data in before["conv2"].record_d]
    assert text["conv2"].record_d[0].channels == 8
    test = caffe.Net(trained.modified[0], trained.snapshot(), caffe.TEST)
    _, variance, total = (blob.data.copy() for blob in test.params["bn1"])
    factor = np.abs(test.params["scale1"][0].data) / np.sqrt(variance / total[0] + 1e-5)
    np.testing.assert_allclose(text["conv1"].scale_w, np.array(before["conv1"].scale_w) * factor, rtol=1e-5)


def test_atc_model_runs_with_the_deploy_weights(trained):
    path = f"{trained.prefix}_atc_model.prototxt"
    layers = read_as_converter(path).layer
    read_as_converter(f"{trained.prefix}_deploy_model.prototxt")
    assert (layers[0].type, list(layers[0].input_param.shape[0].dim)) == ("Input", [1, 1, 8, 8])
    assert not {"Data", "Accuracy", "SoftmaxWithLoss"} & {layer.type for layer in layers}
    atc = caffe.Net(path, f"{trained.prefix}_deploy_weights.caffemodel", caffe.TEST)
    deploy = trained.result("deploy")
    deploy.forward()
    scores = atc.forward(data=deploy.blobs["data"].data[:1])["fc"]
    np.testing.assert_array_equal(scores, deploy.blobs["fc"].data[:1])


def test_qdq_file_runs_in_onnxruntime(trained):
    deploy = trained.result("deploy")
    deploy.forward()
    session = onnxruntime.InferenceSession(f"{trained.prefix}_qdq_model.onnx", providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"data": deploy.blobs["data"].data[:1].copy()})
    expected = deploy.blobs["fc"].data[:1]
    assert np.abs(scores - expected).max() < 0.05 * np.abs(expected).max()


def test_quant_json_tells_folds_and_reasons(trained):
    content = json.loads(Path(f"{trained.prefix}_quant.json").read_text())
    assert content["layers"]["conv1"]["original_layers"] == ["conv1", "bn1", "scale1"]
    reasons = {skip["layer"]: skip["reason"] for skip in content["skipped"]}
    assert reasons["relu1"].startswith(f"switched off: config file ({trained.config}:")
    assert reasons["loss"] == "SoftmaxWithLoss cannot be quantized"
    assert "fc\n  activations: CaffeUlqSettings(" in content["config"]


@pytest.mark.parametrize(("kind", "missing"), [("Fakequant", ("deploy", "atc", "qdq")), ("Deploy", ("fake_quant",))])
def test_save_types(copy, kind, missing):
    copy.save(kind)
    left = [name for name in FILES if not any(part in name for part in missing)]
    assert sorted(path.name for path in copy.prefix.parent.iterdir()) == left


def test_a_record_of_another_state_is_reported(copy, caplog):
    text = copy.record.read_text()
    line = next(line for line in text.splitlines() if "scale_d" in line)
    copy.record.write_text(text.replace(line, "      scale_d: 0.5", 1))
    with caplog.at_level(logging.WARNING):
        copy.save("Fakequant")
    assert "of another state of training" in caplog.text
    assert 0.5 not in [d.scale for d in read_caffe_record(f"{copy.prefix}_quant_param_record.txt")["conv1"].record_d]


def replace_in(path, before, after):
    path = Path(path)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_batch_statistics_are_an_error(copy):
    replace_in(copy.modified[0], "moving_average_fraction", "use_global_stats: false moving_average_fraction")
    with pytest.raises(ModelError, match=r'"bn1" \(BatchNorm\) has use_global_stats: false'):
        copy.save()
    assert not copy.prefix.parent.exists()


def test_an_empty_record(copy):
    copy.record.write_text("")
    with pytest.raises(RecordError, match=r"Cannot find scale_d of layer 'conv1' .*5 of 5.*The TEST phase"):
        copy.save()


def test_a_missing_record_or_config(copy):
    copy.record.unlink()
    with pytest.raises(FileError, match=r"scale_offset_record_file.*record.txt"):
        copy.save()
    copy.config.rename(copy.folder / "moved.json")
    with pytest.raises(FileError, match=r"config_file.*names"):
        copy.save(scale_offset_record_file=str(copy.model))


def test_a_layer_that_rounds_weights_may_come_first(copy):
    net = read_net_message(copy.modified[0])
    layers = sorted(net.layer, key=lambda layer: layer.type != "RetrainWeightQuant")
    Path(copy.modified[0]).write_text(format_text(type(net)(name=net.name, layer=layers)))
    copy.save()  # the record and the config are those that the layers in front of the data name
    assert copy.prefix.with_name("net_deploy_model.prototxt").is_file()


def test_paths_as_arguments(copy):
    record, config = copy.record.rename(copy.folder / "r.txt"), copy.config.rename(copy.folder / "c.json")
    copy.save("Fakequant", scale_offset_record_file=str(record), config_file=str(config))
    assert (copy.folder / "out" / "net_fake_quant_model.prototxt").is_file()


def test_the_wrong_files(copy):
    prefix = str(copy.prefix)
    with pytest.raises(ModelError, match=r"net.prototxt: there are no layers of retraining"):
        amct.save_quant_retrain_model(str(copy.model), copy.snapshot(), "Both", prefix)
    with pytest.raises(ModelError, match=r'"conv1_retraindataquant" \(RetrainDataQuant\) has no clips'):
        amct.save_quant_retrain_model(*copy.modified, "Both", prefix)
    with pytest.raises(ArgumentError, match="save_type must be Fakequant, Deploy, Both"):
        amct.save_quant_retrain_model(*copy.modified, "both", prefix)
    with pytest.raises(ArgumentTypeError, match="save_path"):
        amct.save_quant_retrain_model(*copy.modified, "Both", 3)
    with pytest.raises(FileError, match="retrained_weights_file"):
        amct.save_quant_retrain_model(copy.modified[0], "nowhere.caffemodel", "Both", prefix)
    with pytest.raises(ModelError, match="is quantized already"):
        amct.create_quant_retrain_model(*copy.modified, str(copy.config), "a", "b", "c")


def test_without_its_data_a_net_is_saved_unchecked(copy, caplog):
    """A fresh machine may lack the LMDBs: the pairs are written, the form for ATC cannot be."""
    replace_in(copy.modified[0], str(copy.data / "test"), "nowhere")
    with caplog.at_level(logging.WARNING):
        copy.save()
    assert "atc_model.prototxt" not in {path.name for path in copy.prefix.parent.iterdir()}
    assert "the shape of the input is unknown" in caplog.text
    assert (copy.folder / "out" / "net_deploy_model.prototxt").is_file()


def test_inner_product_keeps_its_batch_norm(tmp_path, trained, monkeypatch):
    monkeypatch.chdir(tmp_path)
    norm = 'layer { name: "bn2" type: "BatchNorm" bottom: "hidden" top: "hidden" }'
    hidden = """layer { name: "hidden" type: "InnerProduct" bottom: "sum" top: "hidden"
      inner_product_param { num_output: 6 weight_filler { type: "xavier" } } }"""
    body = BODY.replace('layer { name: "fc"', f'{hidden}\n{norm}\nlayer {{ name: "fc"').replace(
        'bottom: "sum" top: "fc"', 'bottom: "hidden" top: "fc"'
    )
    run = Retraining(tmp_path, trained.data, body)
    run.train_float(2)
    run.create()
    run.retrain(2)
    amct.save_quant_retrain_model(run.modified[0], run.snapshot(2), "Both", str(run.prefix))
    net = run.result("deploy")
    assert "bn2" in net.params
    content = json.loads(Path(f"{run.prefix}_quant.json").read_text())
    (reason,) = [skip["reason"] for skip in content["skipped"] if "not folded" in skip["reason"]]
    assert "one scale for all outputs" in reason
    fake = run.result("fake_quant")
    fake.forward()
    net.forward()
    np.testing.assert_array_equal(fake.blobs["fc"].data, net.blobs["fc"].data)


# ------------------------------------------------------------------ going on after a break

TRAIN = """
import sys
from amct.caffe import pycaffe as caffe
solver = caffe.SGDSolver(sys.argv[1])
if len(sys.argv) > 3:
    solver.restore(sys.argv[3])
else:
    solver.net.copy_from(sys.argv[2])
print("started", flush=True)
solver.step(100000)
"""


def parameters(net):
    return {f"{name} {place}": blob.data.copy() for name in net.params for place, blob in enumerate(net.params[name])}


def test_resumed_training_equals_uninterrupted_training(copy):
    """12 batches are all the images, so the data starts anew where the snapshot is."""
    copy.retrain(24, snapshot=12, prefix="whole")
    whole = caffe.Net(copy.modified[0], copy.snapshot(24, "whole"), caffe.TEST)
    solver = caffe.SGDSolver(copy.solver(copy.modified[0], 24, 0.01, prefix="second"))
    solver.restore(str(copy.folder / "whole_iter_12.solverstate"))
    solver.step(12)
    for name, values in parameters(whole).items():
        np.testing.assert_array_equal(parameters(solver.net)[name], values, err_msg=name)


def test_a_killed_training_goes_on_from_its_last_snapshot(copy):
    path = copy.solver(copy.modified[0], 100000, 0.01, snapshot=12, interval=100000, prefix="killed")
    child = subprocess.Popen(
        [sys.executable, "-c", TRAIN, path, copy.modified[1]], cwd=copy.folder, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "started\n"
        while not (copy.folder / "killed_iter_36.solverstate").exists():
            assert child.poll() is None
            time.sleep(0.02)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    copy.retrain(24, snapshot=12, prefix="whole")
    whole = caffe.Net(copy.modified[0], copy.snapshot(24, "whole"), caffe.TEST)
    killed = caffe.SGDSolver(copy.solver(copy.modified[0], 100, 0.01, prefix="on"))
    unfinished = "".join(notice.read_text() for notice in copy.folder.glob(f".amct-*.{NOTICE}"))
    for iteration in sorted(int(each.stem.split("_")[-1]) for each in copy.folder.glob("killed_iter_*.solverstate")):
        state = copy.folder / f"killed_iter_{iteration}.solverstate"
        if state.name in unfinished:  # only the last one can have its name without being complete
            assert iteration > 24
            with pytest.raises(FileError, match=r"cannot be used: the save .* was interrupted"):
                killed.restore(str(state))
            continue
        killed.restore(str(state))  # every other state is whole, and so is its caffemodel
        assert killed.iter == iteration
        if iteration == 24:
            for name, values in parameters(whole).items():
                np.testing.assert_array_equal(parameters(killed.net)[name], values, err_msg=name)
    killed.step(1)


def test_a_solver_state_of_an_interrupted_save_is_not_called_missing(copy):
    solver = caffe.SGDSolver(copy.solver(copy.modified[0], 24, 0.01, prefix="cut"))
    solver.snapshot()
    state = copy.folder / "cut_iter_0.solverstate"
    *process, _, token = new_path(copy.folder, NOTICE).name.split("-")
    notice = copy.folder / "-".join([*process, "1", token])  # of a process that no longer runs
    notice.write_text(json.dumps({"version": 2, "files": ["cut_iter_0.caffemodel", state.name]}))
    with pytest.raises(FileError, match=r'^"[^"]*cut_iter_0.solverstate" cannot be used: the save'):
        solver.restore(str(state))
    notice.unlink()
    solver.restore(str(state))
    state.unlink()
    with pytest.raises(FileError, match="File not found: "):
        solver.restore(str(state))


# ------------------------------------------------------------------ other layers and formats

MANY = """
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 4 kernel_size: 3 pad: 1 weight_filler { type: "xavier" } } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
layer { name: "dw" type: "DepthwiseConv" bottom: "conv1" top: "dw"
  convolution_param { kernel_size: 3 pad: 1 bias_term: false weight_filler { type: "xavier" } } }
layer { name: "bn" type: "BatchNorm" bottom: "dw" top: "dw" batch_norm_param { moving_average_fraction: 0.5 } }
layer { name: "down" type: "Pooling" bottom: "dw" top: "down" pooling_param { pool: AVE kernel_size: 2 stride: 2 } }
layer { name: "up" type: "Deconvolution" bottom: "down" top: "up" convolution_param { num_output: 4 group: 2
  kernel_size: 2 stride: 2 weight_filler { type: "xavier" } } }
layer { name: "scale" type: "Scale" bottom: "up" top: "up" scale_param { bias_term: true filler { value: -0.5 } } }
layer { name: "join" type: "Concat" bottom: "dw" bottom: "up" top: "join" }
layer { name: "squash" type: "Sigmoid" bottom: "join" top: "squash" }
layer { name: "flat" type: "Flatten" bottom: "squash" top: "flat" }
layer { name: "fc" type: "InnerProduct" bottom: "flat" top: "fc"
  inner_product_param { num_output: 10 transpose: true weight_filler { type: "xavier" } } }
"""


def test_every_type_with_weights(tmp_path, trained, monkeypatch):
    """Also: a snapshot in HDF5, a negative factor that turns integers, 12 bits."""
    monkeypatch.chdir(tmp_path)
    run = Retraining(tmp_path, trained.data, MANY)
    run.train_float(4)
    run.create(
        'override_layer_configs { layer_name: "up" retrain_data_quant_config { ulq_quantize { num_bits: 12 } } }'
    )
    path = run.solver(run.modified[0], 6, 0.01)
    with Path(path).open("a") as file:
        file.write("snapshot_format: HDF5")
    solver = caffe.SGDSolver(path)
    solver.net.copy_from(run.modified[1])
    solver.solve()
    amct.save_quant_retrain_model(run.modified[0], f"{run.snapshot(6)}.h5", "Both", str(run.prefix))
    record = read_caffe_record(f"{run.prefix}_quant_param_record.txt")
    assert list(record.layers) == ["conv1", "dw", "down", "up", "join", "squash", "flat", "fc"]
    assert record["up"].record_d[0].bits == 12
    assert record["join"].record_d[1].scale == record["squash"].record_d[0].scale  # only "up" is read by Concat alone
    fake, deploy = run.result("fake_quant"), run.result("deploy")
    test = caffe.Net(run.modified[0], f"{run.snapshot(6)}.h5", caffe.TEST)
    for net in (fake, deploy, test):
        net.forward()
    np.testing.assert_array_equal(fake.blobs["fc"].data, deploy.blobs["fc"].data)
    scores = test.blobs["fc"].data
    assert np.abs(scores - fake.blobs["fc"].data).max() < 0.02 * np.abs(scores).max()
    weight = test.params["up"][0].data  # (inputs, outputs / group, ...): the rows of an output are not neighbours
    rows = weight.reshape(2, 2, 2, 2, 2).transpose(0, 2, 1, 3, 4).reshape(4, -1)
    steps = np.round(rows / (np.abs(rows).max(1, keepdims=True) / 127)) * np.sign(test.params["scale"][0].data)[:, None]
    found = deploy.params["up"][0].data.reshape(2, 2, 2, 2, 2).transpose(0, 2, 1, 3, 4).reshape(4, -1)
    np.testing.assert_array_equal(found, steps)


def made(name, *shape, filler="gaussian", value="std: 1"):
    """A layer that makes data of a fixed shape."""
    sizes = " ".join(f"dim: {size}" for size in shape)
    options = f'shape {{ {sizes} }} data_filler {{ type: "{filler}" {value} }}'
    return f'layer {{ name: "{name}" type: "DummyData" top: "{name}" dummy_data_param {{ {options} }} }}\n'


def with_weights(name, kind, bottoms, options):
    """A layer with weights, whose top has its name."""
    option = {"Convolution": "convolution", "LSTM": "recurrent"}.get(kind, "inner_product")
    text = " ".join(f'bottom: "{blob}"' for blob in bottoms.split())
    fields = f'{option}_param {{ {options} weight_filler {{ type: "xavier" }} }}'
    return f'layer {{ name: "{name}" type: "{kind}" {text} top: "{name}" {fields} }}\n'


def reshaped(bottom, *shape, top="rows"):
    """A Reshape to fixed sizes."""
    fields = "reshape_param { shape { " + " ".join(f"dim: {size}" for size in shape) + " } }"
    return f'layer {{ name: "to_{top}" type: "Reshape" bottom: "{bottom}" top: "{top}" {fields} }}\n'


FIXED = {
    "Reshape": made("x", 16, 4, 1, 1)
    + with_weights("c", "Convolution", "x", "num_output: 4 kernel_size: 1")
    + reshaped("c", 16, 4)
    + with_weights("y", "InnerProduct", "rows", "num_output: 3"),
    "time before samples": made("x", 5, 2, 3, 4, 4)
    + reshaped("x", 10, 48)
    + with_weights("fc", "InnerProduct", "rows", "num_output: 4")
    + reshaped("fc", 5, 2, 4, top="y"),
    "LSTM": made("x", 12, 3, 6, 6)
    + made("marks", 4, 3, filler="constant", value="value: 1")
    + with_weights("c", "Convolution", "x", "num_output: 4 kernel_size: 3")
    + reshaped("c", 4, 3, 64)
    + with_weights("lstm", "LSTM", "rows marks", "num_output: 5")
    + with_weights("y", "InnerProduct", "lstm", "num_output: 3 axis: 2"),
    "Mvm": made("x", 4, 6)
    + made("v", 6)
    + with_weights("fc", "InnerProduct", "x", "num_output: 6")
    + 'layer { name: "mvm" type: "Mvm" bottom: "fc" bottom: "v" top: "y" }\n',
}
LOSS = 'layer { name: "loss" type: "Reduction" bottom: "y" top: "loss" loss_weight: 1 }'


@pytest.mark.parametrize("net", FIXED)
def test_a_net_whose_layers_fix_the_number_of_samples(net, tmp_path, monkeypatch, caplog):
    """Their data are random numbers, of which the float net and each file that is compared with it get the same."""
    monkeypatch.chdir(tmp_path)
    Path("net.prototxt").write_text(FIXED[net] + LOSS)
    caffe.Net("net.prototxt", caffe.TRAIN).save("net.caffemodel")
    amct.create_quant_retrain_config("c.json", "net.prototxt", "net.caffemodel")
    retrained = ("net.prototxt", "net.caffemodel", "c.json", "m.prototxt", "m.caffemodel", "r.txt")
    amct.create_quant_retrain_model(*retrained)
    settings = "max_iter: 2 test_interval: 2 test_iter: 1 test_initialization: false snapshot: 2 base_lr: 0.001"
    Path("s.prototxt").write_text(f'net: "m.prototxt" lr_policy: "fixed" snapshot_prefix: "s" {settings}')
    solver = caffe.SGDSolver("s.prototxt")
    solver.net.copy_from("m.caffemodel")
    solver.solve()
    for kind in ("Fakequant", "Deploy", "Both"):
        amct.save_quant_retrain_model("m.prototxt", "s_iter_2.caffemodel", kind, f"{kind}/net", "r.txt", "c.json")
    assert "worse than the simulation" not in caplog.text
    trained = caffe.Net("Both/net_fake_quant_model.prototxt", "Both/net_fake_quant_weights.caffemodel", caffe.TEST)
    shapes = {name: tuple(trained.blobs[name].shape) for name in ("x", "y")}
    deployed = read_net_message("Both/net_atc_model.prototxt")
    assert tuple(deployed.layer[0].input_param.shape[0].dim) == shapes["x"]
    session = onnxruntime.InferenceSession("Both/net_qdq_model.onnx")
    inputs = {each.name: np.ones(trained.blobs[each.name].shape, np.float32) for each in session.get_inputs()}
    assert session.run(["y"], inputs)[0].shape == shapes["y"]


def test_the_guides_config(tmp_path, monkeypatch):
    """The JSON of the guide's sample is what is written for a net with these layers."""
    monkeypatch.chdir(tmp_path)
    net = """layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 4 dim: 8 dim: 8 } } }
    layer { name: "conv1" type: "Convolution" bottom: "data" top: "a"
      convolution_param { num_output: 4 kernel_size: 3 } }
    layer { name: "conv2_1/expand" type: "Convolution" bottom: "a" top: "b"
      convolution_param { num_output: 4 kernel_size: 3 } }
    layer { name: "conv2_1/dwise" type: "DepthwiseConv" bottom: "b" top: "c" convolution_param { kernel_size: 3 } }"""
    Path("net.prototxt").write_text(net)
    caffe.Net("net.prototxt", caffe.TEST).save("net.caffemodel")
    amct.create_quant_retrain_config("config.json", "net.prototxt", "net.caffemodel")
    sample = (Path(__file__).parents[1] / "golden" / "config" / "caffe_retrain_create.json").read_text()
    last = sample.rindex(",")
    assert json.loads(Path("config.json").read_text()) == json.loads(sample[:last] + sample[last + 1 :])
