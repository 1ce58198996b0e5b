"""What a new user meets first: quick answers to wrong arguments, file names, one line where one is enough."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from amct.cli import main
from amct.cli.printing import aligned

FACTORIES = """\
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)).eval()


def broken():
    settings = {}
    return settings["weights"]


def mismatched():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(5, 2)).eval()
"""
PROTOTXT = """\
input: "data" input_shape { dim: 1 dim: 3 dim: 8 dim: 10 }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "fc" type: "InnerProduct" bottom: "conv" top: "fc"
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
"""
REFERENCE = "its_first_nets:build"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    (folder / "its_first_nets.py").write_text(FACTORIES)
    (folder / "its_wrong_nets.py").write_text("def build(:\n    pass\n")
    random = np.random.default_rng(0)
    np.save(folder / "data.npy", random.normal(size=(2, 3, 8, 8)).astype(np.float32))
    (folder / "pictures").mkdir()
    for number in range(2):
        values = random.integers(0, 255, (12, 14, 3)).astype(np.uint8)
        Image.fromarray(values).save(folder / "pictures" / f"{number}.png")
    (folder / "empty").mkdir()
    (folder / "no_picture.png").write_text("text")
    (folder / "net.prototxt").write_text(PROTOTXT)
    from amct_caffe import caffe

    caffe.Net(str(folder / "net.prototxt"), caffe.TEST).save(str(folder / "net.caffemodel"))
    return folder


@pytest.fixture
def folder(files, tmp_path, monkeypatch):
    for path in files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "its_first_nets", raising=False)
    return tmp_path


WRONG = [
    "quantize none.onnx --data data.npy -o out/net",
    "quantize none.prototxt net.caffemodel --data data.npy -o out/net",
    "quantize net.prototxt none.caffemodel --data data.npy -o out/net",
    "quantize none:build --data data.npy -o out/net",
    "quantize its_first_nets --data data.npy -o out/net",
    f"quantize {REFERENCE} --data none.npy -o out/net",
    f"quantize {REFERENCE} --data none -o out/net",
    f"quantize {REFERENCE} --data empty -o out/net",
    f"quantize {REFERENCE} --data no_picture.png -o out/net",
    f"quantize {REFERENCE} --data pictures --crop 99 -o out/net",
    f"quantize {REFERENCE} --data data.npy --size 1,2,3 -o out/net",
    f"quantize {REFERENCE} --data data.npy --mean a -o out/net",
    f"quantize {REFERENCE} --data data.npy --color hsv -o out/net",
    f"quantize {REFERENCE} --data data.npy --batches 0 -o out/net",
    f"quantize {REFERENCE} --data data.npy --formats qqdq -o out/net",
    f"quantize {REFERENCE} --data data.npy --placement faster -o out/net",
    f"quantize {REFERENCE} --data data.npy --config none.cfg -o out/net",
    f"quantize {REFERENCE} --data data.npy -o /proc/none/net",
    f"quantize {REFERENCE} --data data.npy -o ..",
    "compare none.onnx out/net --data data.npy",
    "report net.prototxt net.caffemodel none --data data.npy -o report.html",
    "inspect none.prototxt",
    "config check none.cfg --model net.prototxt",
]
MANY = """
import sys
from amct.cli import main
slow = {"torch", "numba", "scipy", "onnxruntime"}
for arguments in %r:
    code = main(arguments)
    print(code, sorted(slow & set(sys.modules)), arguments)
"""


def test_wrong_arguments_files_and_data_are_answered_before_anything_slow_is_imported(folder):
    words = [line.split() for line in WRONG]
    result = subprocess.run([sys.executable, "-c", MANY % words], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [f"2 [] {arguments}" for arguments in words]
    assert len(result.stderr.splitlines()) == len(WRONG)
    assert not (folder / "out").exists()


IMPORTS = """
import sys, torch
before = set(sys.modules)
import amct.pytorch, amct.caffe, amct.onnx_model, amct_pytorch, amct_caffe
print(sorted(set(sys.modules) - before))
from amct.pytorch import quantize
from amct_pytorch import save_model
print("numba" in sys.modules)
assert "quantize" in dir(amct.pytorch) and "save_model" in dir(amct_pytorch) and "init" in dir(amct_caffe)
try:
    amct.pytorch.quantise
except AttributeError as error:
    print(error)
"""


def test_importing_us_costs_little_beside_torch():
    result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    imported, numba, error = result.stdout.splitlines()
    ours = ["amct", "amct.caffe", "amct.lazy", "amct.onnx_model", "amct.pytorch", "amct_caffe", "amct_pytorch"]
    assert imported == str(ours)  # nothing else: the rest is loaded by the first use of a name
    assert numba == "False"
    assert "has no attribute 'quantise'" in error


@pytest.mark.parametrize(("output", "place"), [("out/", "out"), ("./", ".")])
def test_a_folder_gets_the_files_without_a_prefix(folder, output, place):
    arguments = ["quantize", REFERENCE, "--data", "data.npy", "--formats", "qdq,record", "--no-check", "--report"]
    assert main([*arguments, "-o", output]) == 0
    found = {path.name for path in (folder / place).iterdir()}
    assert {"qdq_model.onnx", "record.txt", "quant.json", "report.html"} <= found
    assert main(["compare", REFERENCE, output, "--data", "data.npy"]) == 0


def test_a_second_run_leaves_no_old_report_and_tells_of_replaced_files_in_one_line(folder, capsys):
    arguments = ["quantize", REFERENCE, "--data", "data.npy", "--no-check", "-o", "out/net"]
    assert main([*arguments, "--report"]) == 0
    capsys.readouterr()
    assert main(arguments) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if "replaced" in line]) == 1
    assert [line for line in lines if line.startswith("removed ")] == [
        "removed     out/net_report.html, which belonged to the files before; --report writes a new one"
    ]
    assert not (folder / "out/net_report.html").exists()


def test_a_page_of_someone_else_is_not_removed(folder):
    (folder / "net_report.html").write_text("<html>mine</html>")
    assert main(["quantize", REFERENCE, "--data", "data.npy", "--formats", "qdq", "--no-check", "-o", "net"]) == 0
    assert (folder / "net_report.html").read_text() == "<html>mine</html>"


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        (
            "its_first_nets:broken",
            ["error: KeyError: 'weights'", "  {}/its_first_nets.py:12, in broken", '    return settings["weights"]'],
        ),
        (
            "its_wrong_nets:build",
            [
                "error: SyntaxError: invalid syntax (its_wrong_nets.py, line 1)",
                "  {}/its_wrong_nets.py:1",
                "    def build(:",
            ],
        ),
    ],
)
def test_an_exception_in_the_users_code_shows_the_users_line(folder, capsys, model, shown):
    assert main(["quantize", model, "--data", "data.npy", "-o", "out/net"]) == 1
    assert capsys.readouterr().err.splitlines() == [line.format(folder) for line in shown]


@pytest.mark.usefixtures("folder")
def test_no_log_lines_of_torch_stand_beside_our_message():
    code = f"import sys; from amct.cli import main; sys.exit(main({['quantize', 'its_first_nets:mismatched']}"
    result = subprocess.run(
        [sys.executable, "-c", code + "+ ['--data', 'data.npy', '-o', 'out/net']))"], capture_output=True, text=True
    )
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert [line for line in lines if not line.startswith(("error: ", "[AMCT]"))] == []


def test_no_log_lines_of_onnxruntime_stand_beside_our_message(folder):
    """A product that the checker accepts, as a size is open, and that onnxruntime refuses while it runs."""
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="fc"),
        helper.make_node("Reshape", ["y", "shape"], ["z"], name="reshape"),
    ]
    constants = [
        numpy_helper.from_array(np.ones((8, 4), np.float32), "w"),
        numpy_helper.from_array(np.array([5, 7]), "shape"),
    ]
    ends = value("x", TensorProto.FLOAT, ["n", 8]), value("z", TensorProto.FLOAT, [5, 7])
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, folder / "net.onnx")
    np.save(folder / "rows.npy", np.ones((2, 8), np.float32))
    code = (
        "import sys; from amct.cli import main; sys.exit(main('quantize net.onnx --data rows.npy -o out/net'.split()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode in (1, 2)
    lines = result.stderr.splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert [line for line in lines if ":onnxruntime:" in line] == []


@pytest.mark.usefixtures("folder")
def test_without_a_size_pictures_get_that_of_the_model_or_keep_theirs_and_a_line_says_so(capsys):
    assert (
        main(["quantize", "net.prototxt", "net.caffemodel", "--data", "pictures", "--no-check", "-o", "out/caffe"]) == 0
    )
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("pictures")]
    assert line == (
        "pictures    BGR, resized to 8 x 10; no --color given: BGR is the order of Caffe; no --size given: the size of "
        "the model's input"
    )
    assert main(f"quantize {REFERENCE} --data pictures --no-check -o out/torch".split()) == 0
    said = capsys.readouterr().err
    assert "pictures    RGB; no --color given: RGB is usual for PyTorch and ONNX models; no --size given: " in said
    assert "as large as they are, the first 12 x 14, for a PyTorch model does not tell its size" in said
    assert main(f"quantize {REFERENCE} --data pictures --size 9 --color rgb --no-check -o out/torch".split()) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pictures")]
    assert line == "pictures    RGB, resized to 9 x 9"


def test_a_model_of_one_channel_gets_gray_pictures_and_a_line_says_so(folder, capsys):
    from amct_caffe import caffe

    (folder / "gray.prototxt").write_text(PROTOTXT.replace("dim: 3", "dim: 1"))
    caffe.Net("gray.prototxt", caffe.TEST).save("gray.caffemodel")
    command = ["quantize", "gray.prototxt", "gray.caffemodel", "--data", "pictures", "--no-check", "-o", "out/gray"]
    assert main(command) == 0
    line = "gray, resized to 8 x 10; no --color given: the model's input has one channel"
    assert line in capsys.readouterr().err
    assert main([*command, "--color", "gray"]) == 0
    assert line not in capsys.readouterr().err
    assert main([*command, "--color", "bgr"]) == 2  # the user's choice counts, right or wrong
    assert 'would be [3, 8, 10], but the model\'s input "data" is [1, 8, 10]' in capsys.readouterr().err


def test_long_names_are_shortened_in_the_middle():
    name = "encoder." * 20 + "weight"
    (line,) = aligned([[name, "Linear", "a reason of any length " * 4]])
    assert line.startswith("encoder.")
    assert "characters)…" in line
    assert "weight  Linear  a reason of any length a reason" in line
    assert len(line.partition("  ")[0]) <= 60
