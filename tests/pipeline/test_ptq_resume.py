"""A calibration that was interrupted goes on from its file, and gives the record of one that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from three_doors import caffe_pair, onnx_file, torch_network

import amct.caffe
import amct.onnx_model
import amct.pytorch
from amct import extend
from amct.calibration import ALONE
from amct.config.python_config import QuantConfig
from amct.errors import ArgumentTypeError, CalibrationError
from amct.numerics.observer import MinMaxObserver
from amct.pipeline import flow
from amct.pipeline.flow import CalibrationFile
from amct.record import encode_record
from amct.record.conversion import tensor_qparams_text

BATCHES = 7


class KilledError(Exception):
    """Stands for the end of the process."""


class Data:
    """Batches; the n-th batch that is read ends the program."""

    def __init__(self, batches, fatal=None):
        self.batches, self.left, self.read = batches, fatal, []

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return self.part(0, 1)

    def part(self, first, step):
        for number in range(first, len(self.batches), step):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise KilledError
            self.read.append(number)
            yield self.batches[number]


def batches(size=8, count=BATCHES):
    generator = np.random.default_rng(3)
    return [(generator.standard_normal((4, 3, size, size)) * (1 + n)).astype(np.float32) for n in range(count)]


@pytest.fixture(autouse=True)
def written_after_every_batch(monkeypatch):
    monkeypatch.setattr(flow, "SECONDS", 0.0)
    monkeypatch.setattr(flow, "MOST_SHARE", float("inf"))


@pytest.fixture(scope="module")
def doors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nets")
    model = torch_network()
    pair, file = caffe_pair(model, folder), onnx_file(model, folder)
    return {
        "torch": lambda data, *more, **options: amct.pytorch.quantize(
            model, data, *more, inputs=torch.from_numpy, **options
        ),
        "onnx": lambda data, *more, **options: amct.onnx_model.quantize(file, data, *more, **options),
        "caffe": lambda data, *more, **options: amct.caffe.quantize(*pair, data, *more, **options),
    }


def result_of(quantized):
    kept = [np.asarray(each).tobytes() for batch in quantized._examples for each in leaves(batch)]
    return encode_record(quantized.record, "text"), tensor_qparams_text(quantized._tensors or {}), kept


def leaves(batch):
    from torch.utils import _pytree as pytree

    return [leaf for leaf in pytree.tree_leaves(batch) if hasattr(leaf, "shape")]


@dataclass(frozen=True, kw_only=True)
class MinMaxSettings:
    """Settings of an algorithm that takes the range as it is."""

    num_bits: int = 8
    asymmetric: bool = True


def min_max(settings, *, channel_axis, symmetric_scale):
    return MinMaxObserver(
        bits=settings.num_bits,
        asymmetric=settings.asymmetric,
        channel_axis=channel_axis,
        symmetric_scale=symmetric_scale,
    )


CONFIGS = {
    "ifmr": "",
    "hfmg": "common_config { hfmg_quantize { num_of_bins: 1024 } }",
    "dmq": "common_config { dmq_balancer { migration_strength: 0.5 } }",
    "min_max": "common_config { min_max_quantize { } }",
    "adaround": "common_config { ada_quantize { num_iteration: 20 } }",
}
KILLS = {"dmq": (4, 8), "adaround": (11, 14)}
"""How many batches a run reads before it is killed; the passes of DMQ and AdaRound come before that of calibration."""
CASES = [
    ("torch", "ifmr"),
    ("torch", "hfmg"),
    ("torch", "dmq"),
    ("torch", "min_max"),
    ("torch", "adaround"),
    ("onnx", "ifmr"),
    ("onnx", "hfmg"),
    ("onnx", "dmq"),
    ("caffe", "ifmr"),
    ("caffe", "min_max"),
]


@pytest.mark.parametrize(("door", "config"), CASES)
def test_the_record_is_that_of_an_uninterrupted_run(doors, door, config, tmp_path):
    """Killed in every pass, also several times in a row; what was observed is not read again."""
    path, file = tmp_path / "quant.cfg", tmp_path / "net.calibration.npz"
    path.write_text(f"batch_num: {BATCHES}\n{CONFIGS[config]}\n")
    data = batches()
    with extend.registered(name="min_max", settings=MinMaxSettings, observer=min_max):
        whole = Data(data)
        wanted = result_of(doors[door](whole, path))
        for fatal in KILLS.get(config, (4, 7)):
            with pytest.raises(KilledError):
                doors[door](Data(data, fatal), path, resume=file)
        last = Data(data)
        assert result_of(doors[door](last, path, resume=file)) == wanted
    assert not file.exists()
    assert last.read.count(5) < whole.read.count(5)


@pytest.mark.parametrize("door", ["torch", "onnx", "caffe"])
def test_values_that_are_counted(doors, door, tmp_path, monkeypatch):
    """The state is written while values are stored, and read when the others are counted."""
    from amct.numerics.counts import samples

    monkeypatch.setattr(samples, "EXACT_LIMIT", 3 * 4 * 3 * 8 * 8)
    file, data = tmp_path / "net.calibration.npz", batches()
    wanted = result_of(doors[door](data))
    for fatal in (3, 4, 6):
        with pytest.raises(KilledError):
            doors[door](Data(data, fatal), resume=file)
        assert result_of(doors[door](Data(data), resume=file)) == wanted


@pytest.mark.parametrize("door", ["torch", "onnx", "caffe"])
def test_data_that_can_be_read_once(doors, door, tmp_path):
    file, data = tmp_path / "net.calibration.npz", batches()
    wanted = result_of(doors[door](data))
    with pytest.raises(KilledError):
        doors[door]((x for x in Data(data, 5)), resume=file)
    assert file.exists()
    assert result_of(doors[door]((x for x in data), resume=file)) == wanted


def killed(doors, tmp_path, data=None, config=None, door="torch"):
    file = tmp_path / "net.calibration.npz"
    with pytest.raises(KilledError):
        doors[door](Data(data or batches(), 5), config, resume=file)
    return file


def refused(doors, file, data, *more, **options):
    before = file.read_bytes()
    with pytest.raises(CalibrationError, match=r"net\.calibration\.npz: the calibration in it cannot be") as caught:
        doors["torch"](data, *more, resume=file, **options)
    assert file.read_bytes() == before
    return str(caught.value)


def test_another_calibration_is_refused(doors, tmp_path, monkeypatch):
    file, data = killed(doors, tmp_path), batches()
    assert "the data differ" in refused(doors, file, data[:6])
    assert "the data differ" in refused(doors, file, [data[1], *data[1:]])
    assert "the config differs" in refused(doors, file, data, QuantConfig(batch_num=6))
    other = torch_network()
    with torch.no_grad():
        other.fc.bias[0] += 1e-6
    with pytest.raises(CalibrationError, match="the model differs"):
        amct.pytorch.quantize(other, data, inputs=torch.from_numpy, resume=file)
    with pytest.raises(CalibrationError, match="the model differs"):
        doors["onnx"](data, resume=file)
    monkeypatch.setattr(flow, "__version__", "9.9")
    assert "amct: " in refused(doors, file, data)
    monkeypatch.setattr(flow, "FORMAT", 2)
    assert "its form has version 1" in refused(doors, file, data)


def test_a_config_object_is_part_of_it(doors, tmp_path):
    file, data = killed(doors, tmp_path, config=QuantConfig(batch_num=BATCHES)), batches()
    assert "the config differs" in refused(doors, file, data, QuantConfig(batch_num=BATCHES, activation_offset=False))


def test_damaged_files_are_refused(doors, tmp_path):
    file, data = killed(doors, tmp_path), batches()
    whole = file.read_bytes()
    random = np.random.default_rng(0)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    damaged = [b"", b"no archive", whole[: len(whole) // 2], whole[:-30], bytes(flipped)]
    damaged += [random.integers(0, 256, 500, np.uint8).tobytes()]
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(CalibrationError, match=r"not the state of a calibration, or damaged .*Leave out resume"):
            doors["torch"](data, resume=file)
    file.unlink()
    file.mkdir()
    with pytest.raises(CalibrationError, match="not a file"):
        doors["torch"](data, resume=file)


def changed(file, change):
    """The arrays of a file, changed and written again."""
    with np.load(file) as found:
        arrays = {name: found[name] for name in found.files}
    change(arrays)
    np.savez(file, **arrays)


def huge(arrays):
    arrays["calibration/done"] = np.array([2**60], np.int64)


def negative(arrays):
    arrays["calibration/done"] = np.array([-1], np.int64)


def no_format(arrays):
    del arrays["format"]


def no_stream(arrays):
    del arrays["calibration/state/0/batches"]


def many_seen(arrays):
    arrays["calibration/state/0/batches"] = np.array([2**40, 2**40], np.int64)


def other_type(arrays):
    arrays["calibration/state/0/observer values"] = np.array(["text"])


def deep(arrays):
    arrays["bound"] = np.frombuffer(b"[" * 60_000, np.uint8)


def sizes(arrays):
    arrays["calibration/state/0/observer sizes"] = np.array([2**62, 2**62, 2**62, 2**62], np.int64)


HOSTILE = (huge, negative, no_format, no_stream, many_seen, other_type, deep, sizes)


@pytest.mark.parametrize("change", HOSTILE)
def test_files_with_arrays_that_do_not_fit(doors, tmp_path, change):
    file, data = killed(doors, tmp_path), batches()
    changed(file, change)
    with pytest.raises(CalibrationError, match="not the state of a calibration, or damaged"):
        doors["torch"](data, resume=file)


def test_python_objects_are_not_read(doors, tmp_path):
    file, data = killed(doors, tmp_path), batches()

    class Hostile:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").touch, ())

    objects = tmp_path / "object.npy"
    np.save(objects, np.array([Hostile()], object), allow_pickle=True)
    with zipfile.ZipFile(file, "a") as archive:
        archive.write(objects, "calibration/state/1/observer more.npy")
    with pytest.raises(CalibrationError, match=r"damaged .*Python objects"):
        doors["torch"](data, resume=file)
    assert not (tmp_path / "ran").exists()


def test_an_existing_file_is_not_read_unless_asked(doors, tmp_path):
    file, data = killed(doors, tmp_path), batches()
    file.write_bytes(b"anything")
    only_written = CalibrationFile(path=file, read=False, removed_by_caller=True)
    wanted = result_of(doors["torch"](data))
    assert result_of(doors["torch"](data, resume=only_written)) == wanted
    assert zipfile.is_zipfile(file)


def test_without_a_file_it_starts_from_the_beginning(doors, tmp_path, caplog):
    data = batches()
    assert result_of(doors["torch"](data, resume=tmp_path / "none.npz")) == result_of(doors["torch"](data))
    assert "no calibration to resume; it starts from the beginning" in caplog.text
    with pytest.raises(ArgumentTypeError, match="resume: expected the path of a file"):
        doors["torch"](data, resume=3)


def test_a_folder_that_cannot_be_written_does_not_end_the_calibration(doors, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    state = CalibrationFile(path=tmp_path / "file" / "net.npz", read=False)
    assert result_of(doors["torch"](batches(), resume=state)) == result_of(doors["torch"](batches()))
    assert caplog.text.count("could not be resumed") == 1


class Session:
    """A session without content."""

    is_observing, without_state = True, ""

    def state(self):
        return {"seen": np.zeros(3)}


def test_it_is_written_seldom(tmp_path, monkeypatch):
    """At most every 30 s, and so that it takes at most half a percent of the time."""
    monkeypatch.setattr(flow, "SECONDS", 30.0)
    monkeypatch.setattr(flow, "MOST_SHARE", 0.005)
    now, took, written = 1000.0, 0.01, []
    monkeypatch.setattr(flow.time, "monotonic", lambda: now)

    def save(_stream, **_arrays):
        nonlocal now
        written.append(now)
        now += took

    monkeypatch.setattr(flow.np, "savez", save)
    kept = flow.Interim(CalibrationFile(path=tmp_path / "net.npz", read=False), ALONE, dict)
    for _ in range(1000):
        kept.note("calibration", Session(), 1)
        now += 1.0
        took = 1.0 if now > 1500 else 0.01
    assert written[0] == 1030
    gaps = np.diff(written)
    assert gaps[0] >= 30
    assert gaps[0] < 32
    assert gaps[-1] >= 200


def test_an_algorithm_without_a_state_is_calibrated_without_a_file(doors, tmp_path, caplog):
    class Plain:
        """An observer as other packages write it: without ``state``."""

        def __init__(self, settings, *, channel_axis, symmetric_scale):
            self._inner = min_max(settings, channel_axis=channel_axis, symmetric_scale=symmetric_scale)
            self.observe, self.result = self._inner.observe, self._inner.result

        @property
        def batches(self):
            return self._inner.batches

    with extend.registered(name="plain", settings=MinMaxSettings, observer=Plain):
        (tmp_path / "quant.cfg").write_text("common_config { plain_quantize { } }\nbatch_num: 7")
        with pytest.raises(KilledError):
            doors["torch"](Data(batches(), 5), tmp_path / "quant.cfg", resume=tmp_path / "net.npz")
    assert not (tmp_path / "net.npz").exists()
    assert 'layer "conv1": its observer has no state' in caplog.text


@pytest.mark.skipif(os.name != "posix", reason="forks processes")
@pytest.mark.parametrize("door", ["torch", "onnx", "caffe"])
def test_a_command_that_is_killed_at_random_moments(door, tmp_path):
    """Real processes and SIGKILL; the files of the resumed command are compared byte for byte."""
    script = Path(__file__).with_name("resume_kills.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path, door, "3", "1"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["killed"] >= 1
    assert found["resumed after"]
