"""The samples of the guide for Caffe: each runs in its own process on small data, with the guide's lines and files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from sample_nets import make_faster_rcnn, make_resnet50

ROOT = Path(__file__).parent.parent.parent
SAMPLES = ROOT / "examples" / "caffe"
WITHOUT_QUANTIZE = "[AMCT][INFO]Run ResNet-50 without quantize success!"
WITH_QUANTIZE = "[AMCT][INFO]Run ResNet-50 with quantize success!"
FILES = {
    "deploy_model.prototxt", "deploy_weights.caffemodel", "fake_quant_model.prototxt", "fake_quant_weights.caffemodel",
    "quant.json", "quant_param_record.bin", "quant_param_record.txt",
}  # fmt: skip


def run(folder, *command, fails=False):
    """Run a sample in its folder; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AMCT_", "PYTEST_"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    program = ["bash"] if str(command[0]).endswith(".sh") else [sys.executable]
    done = subprocess.run([*program, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    return done.stdout + done.stderr


def saved(folder, prefix):
    return {path.name.removeprefix(prefix) for path in folder.iterdir()}


def tops(output):
    return [float(value) for value in re.findall(r"final top[15]:([\d.]+)", output)]


@pytest.fixture(scope="module")
def resnet50(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples") / "resnet50"
    shutil.copytree(SAMPLES / "resnet50", folder)
    make_resnet50(folder)
    return folder


MODEL = (
    "--model_file", "pre_model/ResNet-50-deploy.prototxt", "--weights_file", "pre_model/ResNet-50-model.caffemodel",
    "--caffe_dir", "caffe-master",
)  # fmt: skip


MNIST = (
    "src/mnist_sample.py", "--model_file", "pre_model/mnist-deploy.prototxt", "--weights_file",
    "pre_model/mnist-model.caffemodel", "--cpu", "--caffe_dir", "caffe-master",
)  # fmt: skip


def test_mnist(tmp_path):
    folder = tmp_path / "mnist"
    shutil.copytree(SAMPLES / "mnist", folder)
    output = run(folder, *MNIST)
    before, after = map(float, re.search(r"top1 before quantize is (\S+), after quantize is (\S+)", output).groups())
    assert before >= 0.985
    assert after >= 0.985
    assert f"******final top1:{after}" in output
    assert "[AMCT][INFO]Run mnist sample with quantize success!" in output
    assert saved(folder / "results", "mnist_") == FILES
    assert {"config.json", "modified_model.prototxt", "modified_model.caffemodel", "record.txt", "mnist_test_lmdb"} <= {
        path.name for path in (folder / "tmp").iterdir()
    }
    assert (folder / "amct_log" / "amct_caffe.log").is_file()
    output = run(folder, SAMPLES / "amct_caffe_calibration_template.py")
    assert "[INFO]Run mnist with quantize success!" in output


def test_the_arguments_of_mnist_are_those_of_table_1(tmp_path):
    folder = tmp_path / "mnist"
    shutil.copytree(SAMPLES / "mnist", folder)
    solver = folder / "pre_model" / "mnist-solver.prototxt"
    solver.write_text(solver.read_text().replace("max_iter: 800", "max_iter: 10"))
    output = run(folder, *MNIST, "--pre_test", "--iterations", "2")
    assert "[AMCT][INFO]Run mnist sample without quantize success!" in output
    assert not (folder / "results").exists()
    output = run(folder, *MNIST, "--benchmark", "--dataset", "tmp/mnist_test_lmdb", "--pre_test")
    assert tops(output)[0] * 9 * 64 == pytest.approx(round(tops(output)[0] * 9 * 64))  # all of its 597 images
    assert "--benchmark needs --dataset" in run(folder, *MNIST, "--benchmark", fails=True)
    help_text = run(folder, "src/mnist_sample.py", "-h")
    for name in (
        "model_file",
        "weights_file",
        "gpu",
        "cpu",
        "iterations",
        "caffe_dir",
        "pre_test",
        "benchmark",
        "dataset",
    ):
        assert f"--{name}" in help_text


@pytest.mark.assets
def test_mnist_with_mnists_own_digits(tmp_path, assets):
    folder = tmp_path / "mnist"
    shutil.copytree(SAMPLES / "mnist", folder)
    (folder / "tmp").mkdir()
    (folder / "tmp" / "mnist_data").symlink_to(assets / "mnist")
    lenet = assets / "caffe_lenet_mnist"
    files = ("--model_file", lenet / "lenet.prototxt", "--weights_file", lenet / "lenet_iter_10000.caffemodel")
    output = run(folder, "src/mnist_sample.py", *files, "--iterations", "100")
    assert float(re.search(r"after quantize is (\S+)", output)[1]) >= 0.985


def test_resnet50(resnet50):
    output = run(resnet50, "src/ResNet50_sample.py", *MODEL, "--cpu", "--pre_test")
    assert WITHOUT_QUANTIZE in output
    before = tops(output)
    assert before[0] > 0.7
    output = run(resnet50, "scripts/run_resnet50_with_arq.sh", "-c", "caffe-master")
    assert WITH_QUANTIZE in output
    assert abs(tops(output)[0] - before[0]) < 0.05
    assert saved(resnet50 / "results" / "calibration_results", "ResNet50_") == FILES
    assert (resnet50 / "tmp" / "scale_offset_record.txt").is_file()
    output = run(resnet50, "src/dump_layer_ouputs.py", "--cpu", "--caffe_dir", "caffe-master")
    scores = [float(value) for value in re.findall(r"cosine ([\d.]+)  ", output)]
    assert len(scores) == 5
    assert scores == sorted(scores)
    pair = [np.load(resnet50 / "dump" / net / "fc1000.fc1000.npy").astype(np.float64) for net in ("float", "quantized")]
    cosine = (pair[0] * pair[1]).sum() / np.linalg.norm(pair[0]) / np.linalg.norm(pair[1])
    assert max(0.98, scores[0]) <= cosine < 1
    output = run(resnet50, "src/ResNet50_sample.py", *MODEL, "--benchmark", "--dataset", "val", "--iterations", "3")
    assert WITH_QUANTIZE in output
    assert tops(output)[0] > 0.7
    record = resnet50 / "results" / "calibration_results" / "ResNet50_quant_param_record.txt"
    shutil.copyfile(record, resnet50 / "pre_model" / "record.txt")
    output = run(resnet50, "src/convert_model.py", *MODEL, "--record_file", "pre_model/record.txt")
    assert WITH_QUANTIZE in output
    assert abs(tops(output)[0] - before[0]) < 0.05
    assert saved(resnet50 / "results" / "convert_results", "ResNet50_") == FILES


def test_resnet50_with_4_bit_weights(resnet50):
    output = run(resnet50, "src/snq_resnet50_sample.py", *MODEL, "--cfg_define", "src/snq_files/snq_quant.cfg")
    assert WITH_QUANTIZE in output
    assert tops(output)[0] > 0.5
    names = {path.name for path in (resnet50 / "tmp").iterdir()}
    assert {"activation_modified_model.prototxt", "scale_offset_record_update.txt", "bn_data"} <= names


def test_resnet50_retraining(resnet50):
    output = run(
        resnet50, "src/ResNet50_retrain.py", "--model_file", "pre_model/ResNet-50_retrain.prototxt", *MODEL[2:],
        "--train_data", "train", "--test_data", "val", "--train_iter", "6", "--test_iter", "4", "--test_batch", "50",
    )  # fmt: skip
    assert "Network initialization done." in output
    accuracy = [float(value) for value in re.findall(r"Top [15] accuracy = ([\d.]+)", output)]
    assert 0.7 < accuracy[0] <= accuracy[1] <= 1
    results = {path.name for path in (resnet50 / "results" / "retrain_results").iterdir()}
    assert {f"retrain_{name}" for name in FILES} | {"retrain_atc_model.prototxt"} <= results
    assert {"quant_param_record.txt", "quant_param_record.bin"} <= results
    assert (resnet50 / "tmp" / "solver_iter_6.solverstate").is_file()


def test_faster_rcnn(tmp_path):
    folder = tmp_path / "src"
    shutil.copytree(SAMPLES / "faster_rcnn" / "src", folder)
    shutil.copytree(SAMPLES / "faster_rcnn" / "scripts", tmp_path / "scripts")
    missing = run(tmp_path, "scripts/init_env.sh", "CPU", ".", sys.executable, "/usr/include/python3.7m", fails=True)
    assert "pre_model/VGG16_faster_rcnn_final.caffemodel" in missing
    shutil.rmtree(folder / "pre_model")
    shutil.rmtree(folder / "datasets")
    make_faster_rcnn(folder)
    files = ("pre_model/faster_rcnn_test.pt", "pre_model/VGG16_faster_rcnn_final.caffemodel")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r});"
        " import init_paths_for_amct, caffe, sample_nets;"
        f" net = caffe.Net({files[0]!r}, caffe.TEST, allow_python=True); sample_nets.set_detector(net);"
        f" net.save({files[1]!r})"
    )
    run(folder, "-c", code)
    arguments = ("--model_file", files[0], "--weights_file", files[1], "--cpu", "--short_side", "96")
    output = run(folder, "faster_rcnn_sample.py", *arguments, "--pre_test")
    assert "[AMCT][INFO]Run faster_rcnn without quantize success, and mAP is 1.0!" in output
    output = run(folder, "faster_rcnn_sample.py", *arguments)
    assert "[AMCT][INFO]Run faster_rcnn with quantize success, and mAP is 1.0!" in output
    assert saved(folder / "results", "faster_rcnn_") == FILES
    for results in ("pre_detect_results", "quant_detect_results"):
        drawn = np.asarray(Image.open(folder / results / "first.png"))
        assert (drawn[16:40, 8] == [255, 0, 0]).all()  # the left side of the red square's box
    assert (folder / "tmp" / "scale_offset_record" / "record.txt").is_file()
    environment = run(tmp_path, "scripts/init_env.sh", "CPU", "caffe-master", "with_benchmark")
    assert "The environment is ready" in environment
    output = run(folder, "dump_layer_outputs.py", "--caffe_dir", "caffe-master")
    assert re.search(r"\d+ blobs written to dump", output)
    assert np.load(folder / "dump" / "cls_prob.cls_prob.npy").shape[1] == 3


@pytest.fixture
def classification(monkeypatch):
    """The module that the ResNet-50 samples share."""
    monkeypatch.syspath_prepend(SAMPLES / "resnet50" / "src")
    import classification

    yield classification
    for name in ("classification", "datasets"):
        sys.modules.pop(name)


def test_missing_files_are_explained(classification, tmp_path):
    args = SimpleNamespace(model_file="no.prototxt", weights_file="no.caffemodel", benchmark=False, images=tmp_path)
    with pytest.raises(SystemExit, match=r"--model_file: no.prototxt does not exist. The README says which files"):
        classification.check_files(args)
    with pytest.raises(SystemExit, match=r"image_label.txt does not exist. Put pictures into"):
        classification.Pictures(args).batches(24, 1)
    args.benchmark, args.dataset = True, None
    with pytest.raises(SystemExit, match=r"--benchmark needs --dataset"):
        classification.Pictures(args).batches(24, 1)


def test_scripts_of_faster_rcnn(tmp_path):
    """Files are put in place, those of Python 2 are changed, and the shell forgets the folders again."""
    shutil.copytree(SAMPLES / "faster_rcnn" / "scripts", tmp_path / "scripts")
    downloads = tmp_path / "downloads"
    library = downloads / "py-faster-rcnn" / "lib" / "rpn"
    library.mkdir(parents=True)
    for name in ("faster_rcnn_test.pt", "VGG16_faster_rcnn_final.caffemodel", "a.JPG"):
        (downloads / name).write_bytes(b"its content")
    (library / "layer.py").write_text(OLD_PYTHON)
    done = run(tmp_path, "scripts/init_env.sh", "CPU", ".")
    assert "1 files changed" in done
    src = tmp_path / "src"
    for place in ("pre_model/faster_rcnn_test.pt", "pre_model/VGG16_faster_rcnn_final.caffemodel", "datasets/a.JPG"):
        assert (src / place).read_bytes() == b"its content"
    changed = src / "py-faster-rcnn" / "lib" / "rpn" / "layer.py"
    assert changed.with_name("layer.py.orig").read_text() == OLD_PYTHON
    names: dict = {}
    exec(compile(changed.read_text(), "layer.py", "exec"), names)
    assert names["total"]({"a": 1, "b": 2}) == 3
    assert "0 files changed" in run(tmp_path, "scripts/init_env.sh", "CPU", ".")
    assert "VOCdevkit/VOC2007" in run(tmp_path, "scripts/init_env.sh", "CPU", ".", "with_benchmark", fails=True)
    assert "usage" in run(tmp_path, "scripts/init_env.sh", "TPU", fails=True)
    shell = f"export PYTHONPATH=/a:{src}/lib:/b; source scripts/reset_env.sh; printf %s $PYTHONPATH"
    assert subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True).stdout == "/a:/b"


OLD_PYTHON = """
import cPickle
def total(counts):
    if not counts.has_key('a'):
        print 'no a'
    result = 0
    try:
        for name, value in counts.iteritems():
            for _ in xrange(value):
                result += 1
    except KeyError, error:
        print 'failed: {}'.format(error)
    return result
"""
