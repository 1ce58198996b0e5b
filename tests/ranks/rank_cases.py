"""Runs under torchrun: calibrates in all processes together and in one, and compares the files byte for byte.

Usage: torchrun … rank_cases.py FOLDER CASE …
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset

from amct import extend
from amct.calibration.ranks import LOCAL

BATCHES = 7  # shares of 4 and 3, or 3, 2 and 2


@contextmanager
def alone():
    """Calibration by this process alone."""
    os.environ[LOCAL] = "1"
    try:
        yield
    finally:
        del os.environ[LOCAL]


class Net(nn.Module):
    """Convolution with batch norm, a layer called twice, a linear layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.twice = nn.Conv2d(8, 8, 1)
        self.last = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = self.twice(torch.relu(self.twice(x)))
        return self.last(x.mean((2, 3)))


def net():
    torch.manual_seed(0)
    return Net().eval()


def batches(size=16, count=BATCHES):
    """Batches of various sizes and spreads."""
    made = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        made.append(torch.randn(1 + seed % 3, 3, size, size, generator=generator) * (1 + seed / 2))
    return made


def share(items):
    """What this process runs, as the contract says: r, r + n, r + 2n, …"""
    if os.environ.get(LOCAL) == "1":
        return items
    return items[distributed.get_rank() :: distributed.get_world_size()]


def write_once(path, text):
    """A file that the first process writes before the others go on."""
    if is_first():
        path.write_text(text)
    meet()


def is_first():
    return distributed.get_rank() == 0


def files_of(folder):
    """The content of the files of a record; archives by their arrays, since they have the time of writing inside."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                found[path.name] = {name: arrays[name].tobytes() for name in arrays.files if name.startswith("input")}
        elif path.is_file() and path.suffix in (".txt", ".json", ".caffemodel", ".prototxt"):
            found[path.name] = path.read_bytes()
    return found


# -- AMCT's functions --------------------------------------------------------------------------------------------------


def torch_flow(folder, cfg, data, *, preprocess=False, save=False):
    import amct_pytorch as amct

    write_once(folder / "quant.cfg", f"batch_num: {len(data)}\n{cfg}\n")
    model, example = net(), data[0]
    config, record, onnx = (str(folder / name) for name in ("config.json", "record.txt", "modified.onnx"))
    amct.create_quant_config(config, model, example, config_defination=str(folder / "quant.cfg"))
    if preprocess:
        balancing = amct.quantize_preprocess(config, record, model, example)
        for x in share(data):
            balancing(x)
    calibrating = amct.quantize_model(config, onnx, record, model, example)
    for x in share(data):
        calibrating(x)
    if save:
        amct.save_model(onnx, record, str(folder / "out" / "net"))


def ifmr(folder):
    torch_flow(folder, "", batches(), save=True)


def counted(folder):
    """The values of all ranks together are too many to be stored, those of each rank are not."""
    torch_flow(folder, "", batches(size=224, count=5))


def pixels(folder):
    """Many values, but few distinct ones in the input."""
    levels = [torch.randint(0, 256, x.shape).float() for x in batches(size=224, count=5)]
    torch_flow(folder, "", levels)


def hfmg(folder):
    torch_flow(folder, "common_config { hfmg_quantize { num_of_bins: 1024 } }", batches())


def min_max(folder):
    """The range as it is, as the algorithm of every layer."""
    torch_flow(folder, "common_config { min_max_quantize { } }", batches())


@dataclass(frozen=True, kw_only=True)
class MinMaxSettings:
    """Settings of an algorithm that another package adds."""

    num_bits: int = 8
    asymmetric: bool = True


def min_max_observer(settings, **options):
    from amct.numerics.observer import MinMaxObserver

    return MinMaxObserver(bits=settings.num_bits, asymmetric=settings.asymmetric, **options)


def dmq(folder):
    torch_flow(folder, "common_config { dmq_balancer { migration_strength: 0.5 } }", batches(), preprocess=True)


def kv_cache(folder):
    import amct_pytorch as amct

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8)).eval()
    config, record = str(folder / "config.json"), str(folder / "record.txt")
    if is_first():
        amct.create_quant_cali_config(config, model, {"kv_cache_quant_layers": ["0", "1"]})
        written = json.loads(Path(config).read_text())
        written["batch_num"] = BATCHES
        Path(config).write_text(json.dumps(written))
    meet()
    calibrating = amct.create_quant_cali_model(config, record, model)
    data = [torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)) * (seed + 1) for seed in range(BATCHES)]
    for x in share(data):
        calibrating(x)
    settings = {"batch_num": BATCHES, "act_algo": "hfmg", "quant_granularity": "per_channel"}
    op = amct.QuantCalibrationOp(str(folder / "op.txt"), settings)
    for x in share(data):
        op("key", x)
        op("value", x * 2)


def caffe_flow(folder):
    import amct.caffe.pycaffe as caffe
    import amct_caffe as amct

    made = caffe_model(folder)
    config, record = str(folder / "config.json"), str(folder / "record.txt")
    amct.create_quant_config(config, *made, BATCHES)
    graph = amct.init(config, *made, record)
    modified = [str(folder / name) for name in ("modified.prototxt", "modified.caffemodel")]
    amct.weights_quantize_model(graph, *modified)
    amct.activation_quantize_model(graph, *modified)
    calibrating = caffe.Net(*modified, caffe.TEST)
    for x in share(batches(count=BATCHES)):
        calibrating.blobs["data"].reshape(*x.shape)
        calibrating.forward(data=x.numpy())
    amct.save_model(graph, "Both", str(folder / "out" / "net"))


def caffe_batch_norms(folder):
    import amct.caffe.pycaffe as caffe
    import amct_caffe as amct

    made = caffe_model(folder)
    write_once(
        folder / "quant.cfg",
        "batch_num: 4\nupdate_bn: true\nbn_update_config: { bn_update_iterations: 5 bn_moving_average_fraction: 0.75 "
        f"bn_dump_dir: '{folder / 'statistics'}' }}",
    )
    config, record = str(folder / "config.json"), str(folder / "record.txt")
    amct.create_quant_config(config, *made, config_defination=str(folder / "quant.cfg"))
    graph = amct.init(config, *made, record)
    modified = [str(folder / name) for name in ("modified.prototxt", "modified.caffemodel")]
    amct.weights_quantize_model(graph, *modified)
    refreshing = caffe.Net(*modified, caffe.TEST)
    for x in share(batches(count=5)):
        refreshing.blobs["data"].reshape(*x.shape)
        refreshing.forward(data=x.numpy())
    amct.activation_quantize_model(graph, *modified)


CAFFE_NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 16 dim: 16 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "a" convolution_param { num_output: 6 kernel_size: 3 } }
layer { name: "norm" type: "BatchNorm" bottom: "a" top: "a" }
layer { name: "scale" type: "Scale" bottom: "a" top: "a" scale_param { bias_term: true } }
layer { name: "relu" type: "ReLU" bottom: "a" top: "a" }
layer { name: "pool" type: "Pooling" bottom: "a" top: "b" pooling_param { pool: AVE global_pooling: true } }
layer { name: "fc" type: "InnerProduct" bottom: "b" top: "fc" inner_product_param { num_output: 5 } }
"""


def caffe_model(folder):
    """A prototxt and a caffemodel; those of the first process are used by all."""
    import amct.caffe.pycaffe as caffe

    files = folder / "net.prototxt", folder / "net.caffemodel"
    if is_first():
        files[0].write_text(CAFFE_NET)
        made = caffe.Net(str(files[0]), caffe.TEST)
        random = np.random.default_rng(0)
        for name, blobs in made.params.items():
            for blob in blobs:
                blob.data[...] = (
                    np.abs(random.standard_normal(blob.shape)) if name == "norm" else random.standard_normal(blob.shape)
                )
        made.params["norm"][2].data[...] = 1
        made.save(str(files[1]))
    meet()
    return [str(file) for file in files]


# -- one call ----------------------------------------------------------------------------------------------------------


def write_result(folder, quantized):
    """The record and the factors of tensors as this process has them, in a file of this process."""
    from amct.record import encode_record
    from amct.record.conversion import tensor_qparams_text

    who = folder / f"rank{distributed.get_rank()}"
    who.mkdir()
    (who / "record.txt").write_bytes(encode_record(quantized.record, "text"))
    (who / "tensors.json").write_text(tensor_qparams_text(quantized._tensors or {}))
    quantized.save(folder / "saved" / "net", formats=("record",))


def torch_call(folder):
    import amct.pytorch

    data = batches()
    write_result(folder, amct.pytorch.quantize(net(), (x for x in data)))


def torch_loader(folder):
    """A data loader, of which each process decodes only its own batches."""
    import amct.pytorch

    samples = ObservedValues()
    loader = DataLoader(samples, batch_size=2)
    write_result(folder, amct.pytorch.quantize(net(), loader))
    own = len(share(list(range(7)))) * 2
    assert len(samples.read) <= own + 2, samples.read  # and the first batch, on which the model is captured


class ObservedValues(Dataset):
    """Fourteen samples; notes which of them are read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 14

    def __getitem__(self, index):
        self.read.append(index)
        return torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index))


def torch_dmq_call(folder):
    import amct.pytorch

    write_once(folder / "quant.cfg", "common_config { dmq_balancer { migration_strength: 0.5 } }")
    write_result(folder, amct.pytorch.quantize(net(), batches(), folder / "quant.cfg"))


def torch_one_batch(folder):
    """Fewer batches than processes: some share is empty."""
    import amct.pytorch

    write_result(folder, amct.pytorch.quantize(net(), batches(count=1)))


def resumed(folder):
    """Every process is interrupted in its share, one sooner than the other, and goes on from its own file."""
    import amct.pytorch
    from amct.pipeline import flow

    data, state = batches(), folder / "net.calibration.npz"
    if os.environ.get(LOCAL) != "1":
        flow.SECONDS, flow.MOST_SHARE = 0.0, float("inf")
        rank, size = distributed.get_rank(), distributed.get_world_size()
        try:
            amct.pytorch.quantize(net(), Interrupted(data, 1 + rank), resume=state)
        except InterruptedError:
            kept = folder / f"net.calibration.rank{rank}of{size}.npz"
            with np.load(kept) as arrays:
                assert arrays["calibration/done"] == [1 + rank], arrays["calibration/done"]
        else:
            raise AssertionError("not interrupted")
        flow.SECONDS = 30.0
        meet()
    write_result(folder, amct.pytorch.quantize(net(), data, resume=state))
    meet()  # each process removes its own file
    assert not list(folder.glob("*.npz"))


class Interrupted:
    """Batches that end with an error; each process reads its share."""

    def __init__(self, data, after):
        self.data, self.after = data, after

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return iter(self.data)

    def part(self, first, step):
        yield from self.data[first::step][: self.after]
        raise InterruptedError


def adaround(folder):
    import amct.pytorch

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 70, 3), nn.ReLU(), nn.Conv2d(70, 70, 3, groups=70), nn.Conv2d(70, 40, 1)).eval()
    write_once(folder / "quant.cfg", "common_config { ada_quantize { num_iteration: 60 } }")
    data = [torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    quantized = amct.pytorch.quantize(model, data, folder / "quant.cfg", adaround="fast")
    write_result(folder, quantized)
    who = folder / f"rank{distributed.get_rank()}"
    for name, weights in quantized.prepared.weights.items():
        for part in weights.real().values():
            (who / f"{name}.json").write_text(json.dumps(part.reshape(-1).tolist()))


def onnx_call(folder):
    import amct.onnx_model

    file = folder / "net.onnx"
    if is_first():
        axes = {"x": {0: "n"}}
        torch.onnx.export(net(), (torch.zeros(1, 3, 16, 16),), file, dynamo=False, input_names=["x"], dynamic_axes=axes)
    meet()
    data = [x.numpy() for x in batches()]
    write_result(folder, amct.onnx_model.quantize(file, data))


def caffe_call(folder):
    import amct.caffe

    made = caffe_model(folder)
    write_result(folder, amct.caffe.quantize(*made, [x.numpy() for x in batches()]))


# -- all cases ---------------------------------------------------------------------------------------------------------


def meet():
    if os.environ.get(LOCAL) != "1":
        distributed.barrier()


def run(case, folder):
    """Run a case in all processes together, then in the first one alone; what each of them writes must be equal."""
    together, single = folder / case.__name__ / "together", folder / case.__name__ / "alone"
    if is_first():
        together.mkdir(parents=True)
        single.mkdir()
    meet()
    torch.manual_seed(1)
    case(together)
    meet()
    if is_first():
        torch.manual_seed(1)
        with alone():
            case(single)
        compare(case, together, single)
    meet()


def compare(case, together, single):
    """Byte for byte; each process has the result of the first one. Statistics of batch norms agree to 1e-6."""
    for other in sorted(together.glob("rank[1-9]")):
        assert files_of(other) == files_of(together / "rank0"), f"{case.__name__}: {other.name} has another result"
        shutil.rmtree(other)
    ours, theirs = files_of(together), files_of(single)
    assert ours.keys() == theirs.keys(), f"{case.__name__}: {sorted(ours)}, alone {sorted(theirs)}"
    assert ours, case.__name__
    names = sorted(ours)
    if case is caffe_batch_norms:
        statistics = [read_blobs(folder / "statistics" / "norm.caffemodel") for folder in (together, single)]
        for mine, wanted in zip(*statistics, strict=True):
            assert np.allclose(mine, wanted, rtol=1e-6, atol=1e-6), (mine, wanted)
        names = []
    for name in names:
        if name not in ("quant.cfg", "modified.prototxt", "net_quant.json"):  # they name their folder, or hold times
            assert ours[name] == theirs[name], f"{case.__name__}: {name} differs"
    print(f"equal: {case.__name__}", flush=True)


def read_blobs(path):
    from amct.caffe.engine.wire import read_weights

    (layer,) = read_weights(path.read_bytes(), str(path))
    return [np.array(blob.values) for blob in layer.blobs]


CASES = (
    ifmr,
    counted,
    pixels,
    hfmg,
    min_max,
    dmq,
    kv_cache,
    caffe_flow,
    caffe_batch_norms,
    torch_call,
    torch_loader,
    torch_dmq_call,
    torch_one_batch,
    resumed,
    adaround,
    onnx_call,
    caffe_call,
)


def main():
    torch.set_num_threads(1)
    extend.register_activation(name="min_max", settings=MinMaxSettings, observer=min_max_observer)
    distributed.init_process_group("gloo")
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for case in CASES:
        if not names or case.__name__ in names:
            run(case, folder)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
