"""A real Caffe with the patch against this engine, on the same files: calibration, fake-quant, deploy, training."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from caffe_real_models import RealFlow, flow_of, photo
from ptq_caffe_flow import NETS, batch, golden_flow, prototxt, text_flow
from qat_caffe_flow import Retraining, write_digits
from real_caffe import built
from test_ptq_caffe_real_models import cifar_full, cifar_quick, lenet
from test_ptq_caffe_snq import CONFIG as SNQ_CONFIG
from test_ptq_caffe_snq import NET as SNQ_NET

import amct_caffe
from amct.caffe import pycaffe as caffe
from amct.caffe.pycaffe.proto import caffe_pb2
from amct.record import read_caffe_record

GOLDEN = Path(__file__).parents[1] / "golden"

pytestmark = [pytest.mark.real_caffe, pytest.mark.assets]

RECURRENT = """
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 6 dim: 3 dim: 10 } } }
layer { name: "cont" type: "Input" top: "cont" input_param { shape { dim: 6 dim: 3 } } }
layer { name: "rec" type: "KIND" bottom: "x" bottom: "cont" top: "h" recurrent_param { num_output: 16 } }
layer { name: "fc" type: "InnerProduct" bottom: "h" top: "fc" inner_product_param { num_output: 5 axis: 2 } }
"""


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    return built(Path(os.environ["AMCT_REAL_CAFFE"]), tmp_path_factory.mktemp("real_caffe"))


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)


# -- The nets: a flow, the passes that calibrate, the passes that are compared ---------------------------------------


def golden_net(name, text=None):
    """A small net of another generator of nets: groups, Deconvolution, several inputs, in-place layers, old formats."""

    def case(_, folder):
        made = golden_flow(name, GOLDEN, folder)
        flow = TextFlow(made.folder, made.model, made.weights, text)
        net = flow.original()
        passes = [list(batch(net, seed).values()) for seed in range(3)]
        return flow, passes[:2], passes[2:]

    return case


@dataclass
class TextFlow(RealFlow):
    """A flow with a simple config, if there is one."""

    text: str | None = None

    def configure(self, batch_num=2, **options):
        return super().configure(batch_num, self.text, **options)


def classifier(make):
    def case(assets, folder):
        flow, calibration, (pixels, _) = make(assets, folder)
        return flow, [[calibration[:16]], [calibration[16:]]], [[pixels[:100]]]

    return case


def pictures(assets, size, names):
    return [photo(assets, name, size)[None, :, :, ::-1].transpose(0, 3, 1, 2) for name in names]


def squeezenet(assets, folder):
    flow = flow_of(
        assets, "caffe_squeezenet_v1.0_dc", folder, "SqueezeNet_deploy.prototxt", "squeezenet_v1.0_dc.caffemodel"
    )
    shape = flow.original().blobs["data"].shape
    passes = [
        [np.concatenate(pictures(assets, tuple(shape[:1:-1]), [name] * shape[0])) - 115]
        for name in ("1.jpg", "2.jpg", "3.jpg")
    ]
    return flow, passes[:2], passes[2:]


def detector(assets, folder):
    flow = flow_of(assets, "caffe_mtcnn", folder, "det3.prototxt", "det3.caffemodel")
    faces = (np.concatenate(pictures(assets, (48, 48), [f"{n}.jpg" for n in (1, 2, 3, 5, 6, 8)])) - 127.5) / 128
    return flow, [[faces[:1]], [faces[1:2]]], [[each[None]] for each in faces[2:]]


def recurrent(kind):
    def case(_, folder):
        made = text_flow(RECURRENT.replace("KIND", kind), folder)
        random = np.random.default_rng(1)
        going = np.ones((6, 3), np.float32)
        going[0] = going[3, 1] = 0
        passes = [[random.standard_normal((6, 3, 10)).astype(np.float32), going] for _ in range(4)]
        return RealFlow(made.folder, made.model, made.weights), passes[:2], passes[2:]

    return case


CASES = {
    "lenet": classifier(lenet),
    "cifar10_quick": classifier(cifar_quick),
    "cifar10_full": classifier(cifar_full),
    "squeezenet": squeezenet,
    "mtcnn_det3": detector,
    "lstm": recurrent("LSTM"),
    "rnn": recurrent("RNN"),
    **{name: golden_net(name) for name in NETS},
    "mini_resnet_4_bits": golden_net(
        "mini_resnet", "batch_num: 2 common_config: { snq_quantize: { channel_wise: true } }"
    ),
    "mini_resnet_12_bits": golden_net("mini_resnet", "batch_num: 2 common_config: { ifmr_quantize { num_bits: 12 } }"),
    "mini_inception_16_bits": golden_net(
        "mini_inception", "batch_num: 2 common_config: { ifmr_quantize { num_bits: 16 } }"
    ),
}


class Calibrated:
    """A net that both have calibrated; the factors of this engine are those of the saved models."""

    def __init__(self, name, real, assets, folder):
        self.real, self.folder = real, folder
        self.flow, calibration, self.passes = CASES[name](assets, folder)
        self.flow.configure(batch_num=len(calibration))
        graph = self.flow.prepare()
        theirs = folder / "real_record.txt"
        shutil.copyfile(self.flow.record, theirs)
        model, weights = self.flow.modified
        moved = folder / "real_modified.prototxt"
        moved.write_text(model.read_text().replace(str(self.flow.record), str(theirs)))
        self.theirs, _, self.log = real.forward(moved, weights, calibration, folder=folder)
        net = self.flow.net(*self.flow.modified)
        self.ours = [run(net, arrays, net.outputs) for arrays in calibration]
        self.records = self.flow.record, theirs
        amct_caffe.save_model(graph, "Both", str(self.flow.prefix))

    def compared(self, kind, blobs=()):
        """What both compute of the saved model of this kind."""
        files = self.flow.result_files(kind)
        theirs, _, _ = self.real.forward(*files, self.passes, blobs, folder=self.folder)
        net = self.flow.net(*files)
        return [run(net, arrays, blobs or net.outputs) for arrays in self.passes], theirs


def run(net, arrays, blobs):
    for name, array in zip(net.inputs, arrays, strict=True):
        net.blobs[name].reshape(*array.shape)
        net.blobs[name].data[...] = array
    net.forward()
    return {name: net.blobs[name].data.astype(np.float32).ravel().copy() for name in blobs}


@pytest.fixture(scope="module", params=CASES)
def calibrated(request, real, assets, tmp_path_factory):
    return Calibrated(request.param, real, assets, tmp_path_factory.mktemp(request.param))


def farthest(ours, theirs):
    """The largest difference of any output, as a part of its largest value."""
    parts = []
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, values in mine.items():
            parts.append(np.abs(values - other[name]).max() / np.abs(values).max())
    return float(max(parts))


def test_the_calibrating_net_and_its_record(calibrated):
    ours, theirs = map(read_caffe_record, calibrated.records)
    assert list(ours) == list(theirs)
    scales = []
    for name, entry in ours.items():
        other = theirs[name]
        assert entry.scale_w == other.scale_w
        assert [each.index for each in entry.record_d] == [each.index for each in other.record_d]
        for mine, found in zip(entry.record_d, other.record_d, strict=True):
            assert mine.offset == found.offset, name
            scales.append(abs(mine.scale - found.scale) / mine.scale)
        assert f"Do layer {name} activation calibration success!" in calibrated.log
    part = farthest(calibrated.ours, calibrated.theirs)
    print(f"{calibrated.folder.name}: scales within {max(scales):.1e}, outputs of calibration within {part:.1e}")
    assert max(scales) <= 1e-6
    assert part <= 1e-4


def test_the_fake_quant_net_rounds_alike(calibrated):
    layers = prototxt(calibrated.flow.result_files("fake_quant")[0]).layer
    quants = {layer.top[0]: layer.quant_param for layer in layers if layer.type == "Quant"}
    ours, theirs = calibrated.compared("fake_quant", list(quants))
    equal, count, most = 0, 0, 0.0
    for mine, other in zip(ours, theirs, strict=True):
        for name, options in quants.items():
            steps = np.abs(np.rint(mine[name] / options.scale) - np.rint(other[name] / options.scale))
            equal, count, most = equal + int((steps == 0).sum()), count + steps.size, max(most, float(steps.max()))
    part = farthest(*calibrated.compared("fake_quant"))
    print(f"{calibrated.folder.name}: {100 * equal / count:.3f} % of the rounded values equal, all within {most:.0f}")
    print(f"{calibrated.folder.name}: outputs of the fake-quant model within {part:.1e}")
    assert equal >= 0.99 * count
    assert most <= 1


def test_the_deploy_net(calibrated):
    part = farthest(*calibrated.compared("deploy"))
    print(f"{calibrated.folder.name}: outputs of the deploy model within {part:.1e}")
    assert part <= 1e-4


def statistics(folder):
    """What BatchNorm layers wrote, by file, layer and blob."""
    found = {}
    for path in folder.iterdir():
        for layer in caffe_pb2.NetParameter.FromString(path.read_bytes()).layer:
            found |= {(path.name, layer.name, index): np.array(blob.data) for index, blob in enumerate(layer.blobs)}
    return found


def test_the_whole_flow_is_run_by_the_real_caffe(real, tmp_path):
    """BatchNorm statistics are refreshed there, and written as here; then it calibrates, and the models are saved."""
    flow = text_flow(SNQ_NET, tmp_path).configure(text=SNQ_CONFIG)
    passes = [list(batch(flow.original(), seed).values()) for seed in range(4)]
    graph = flow.init()
    amct_caffe.weights_quantize_model(graph, *map(str, flow.modified))
    net = flow.net(*flow.modified)
    for arrays in passes:
        run(net, arrays, [])
    dumps = tmp_path / "bn_data"
    ours = statistics(dumps)
    assert len(ours) == 9
    shutil.rmtree(dumps)
    real.forward(*flow.modified, passes, folder=tmp_path)
    theirs = statistics(dumps)
    assert theirs.keys() == ours.keys()
    for name, wanted in ours.items():
        np.testing.assert_allclose(theirs[name], wanted, atol=1e-5 * np.abs(wanted).max())
    amct_caffe.activation_quantize_model(graph, *map(str, flow.modified))
    real.forward(*flow.modified, passes[:2], folder=tmp_path)
    amct_caffe.save_model(graph, "Both", str(flow.prefix))
    found, _, _ = real.forward(*flow.result_files("deploy"), passes[3:], folder=tmp_path)
    wanted = run(flow.result("deploy"), passes[3], ["fc"])
    assert farthest([wanted], found) <= 1e-4


def test_data_that_cannot_be_quantized_stops_caffe(real, tmp_path):
    flow = text_flow(RECURRENT.replace("KIND", "LSTM"), tmp_path).configure()
    flow.prepare()
    before = flow.record.read_text()
    net = flow.original()
    arrays = list(batch(net, 0).values())
    arrays[0][0, 0, 0] = np.inf
    with pytest.raises(AssertionError, match="scale is illegal"):
        real.forward(*flow.modified, [arrays] * 2, folder=tmp_path)
    assert flow.record.read_text() == before


# -- Training ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def retraining(tmp_path):
    (tmp_path / "data").mkdir()
    write_digits(tmp_path / "data")
    made = Retraining(tmp_path, tmp_path / "data")
    made.train_float()
    made.create()
    return made


def parameters(solver):
    return [(name, blob.data.ravel().copy()) for name, blobs in solver.net.params.items() for blob in blobs]


def distance(ours, theirs):
    """The largest difference of a parameter, as a part of the largest value of its layer."""
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    largest = {name: max(np.abs(values).max() for each, values in ours if each == name) for name, _ in ours}
    parts = [np.abs(mine - other).max() / largest[name] for (name, mine), (_, other) in zip(ours, theirs, strict=True)]
    return float(max(parts))


def trained(made, prefix, steps, start):
    """This engine's parameters after the last step."""
    solver = caffe.SGDSolver(made.solver(made.modified[0], steps, 0.01, snapshot=5, prefix=prefix))
    if start.endswith(".solverstate"):
        solver.restore(start)
    else:
        solver.net.copy_from(start)
    solver.solve()
    return parameters(solver)


def test_ten_steps_of_training_and_snapshots_that_go_on_in_the_other(real, retraining, tmp_path):
    made, start = retraining, retraining.modified[1]
    shutil.copyfile(made.record, tmp_path / "before.txt")
    theirs, _ = real.solve(made.solver(made.modified[0], 10, 0.01, snapshot=5, prefix="real"), start, folder=tmp_path)
    their_record = read_caffe_record(made.record)
    shutil.copyfile(tmp_path / "before.txt", made.record)
    ours = trained(made, "own", 10, start)
    part = distance(ours, theirs)
    print(f"parameters after 10 steps within {part:.1e}")
    assert part <= 1e-3
    our_record = read_caffe_record(made.record)
    assert list(our_record) == list(their_record)
    for name, entry in our_record.items():
        for mine, other in zip(entry.record_d, their_record[name].record_d, strict=True):
            assert mine.scale == pytest.approx(other.scale, rel=1e-3)
    for prefix in ("own", "real"):
        state = str(tmp_path / f"{prefix}_iter_5.solverstate")
        solver = made.solver(made.modified[0], 10, 0.01, snapshot=10, prefix=f"{prefix}_on")
        there, _ = real.solve(solver, state, folder=tmp_path)
        here = trained(made, f"{prefix}_here", 10, state)
        part = distance(here, there)
        print(f"parameters after 5 more steps from the snapshot {prefix}_iter_5 within {part:.1e}")
        assert part <= 1e-3


# -- Speed -------------------------------------------------------------------------------------------------------------


def test_calibration_costs_little_beside_the_forward(real, assets, tmp_path):
    flow, _, (pixels, _) = cifar_full(assets, tmp_path)
    passes = [[pixels[start : start + 100]] for start in range(0, 1600, 100)]
    flow.configure(batch_num=len(passes))
    flow.prepare()
    _, plain, _ = real.forward(flow.model, flow.weights, passes, folder=tmp_path)
    _, calibrating, log = real.forward(*flow.modified, passes, folder=tmp_path)
    print(f"calibration takes {calibrating / plain:.2f} times the forward ({plain:.2f} s)")
    assert "activation calibration success!" in log
    assert calibrating <= 1.3 * plain
