"""Every reader of files that may come from a stranger, with sound files to start from.

A reader gets the bytes of a damaged file and an empty folder, and does what a user would do with such a file.
"""

from __future__ import annotations

import gzip
import io
import itertools
import struct
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import onnx
from fuzz_jobs import (
    Reader,
    checkpoint_readers,
    command_readers,
    database_layer,
    label_files,
    list_layer,
    put,
)
from PIL import Image
from torture import Model, caffe_functions

import amct.caffe
import amct.onnx_model
import amct_caffe.caffe
import amct_pytorch
from amct.atomic import check_whole
from amct.caffe.proto_merge import load_custom_schema
from amct.calibration import read_progress
from amct.calibration.record_files import progress_path
from amct.cli.model_layers import model_layers
from amct.config.layers import LayerInfo
from amct.config.prune.dialect import COMPRESSION
from amct.config.prune.search import read_search_config
from amct.config.ptq.caffe import CAFFE
from amct.config.ptq.kv_cache import KV_CACHE
from amct.config.ptq.pytorch import PYTORCH
from amct.config.qat.dialect import CAFFE_QAT, PYTORCH_QAT
from amct.data.lmdb import write_lmdb
from amct.data.samples import Preparation, open_samples, read_mean
from amct.errors import AmctError
from amct.export.check.batch import batch_beside, batch_path, declared_inputs
from amct.model.quant_json import read_quant_json
from amct.record import Record, encode_record, format_record, parse_record, read_any_record
from amct.record.conversion import read_tensor_qparams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
LARGEST = 20_000
"""Larger files of the tests are left out: their damage would rarely hit the structure."""


def golden(pattern: str) -> tuple[bytes, ...]:
    """The small files of the tests that match a pattern."""
    found = [path.read_bytes() for path in sorted(GOLDEN.glob(pattern)) if path.stat().st_size <= LARGEST]
    if not found:
        raise FileNotFoundError(f"no file of the tests matches {pattern}")
    return tuple(found)


# -- configs and records -----------------------------------------------------------------------------------------------


def _layers(*described: str) -> list[LayerInfo]:
    return [LayerInfo(name=name, type=kind) for name, kind in (each.split(":") for each in described)]


TORCH_LAYERS = _layers(
    "Opname:Conv2d", "bn:BatchNorm2d", "conv2:Conv2d", "quant_skip_layers_name_0:Conv2d", "deconv:ConvTranspose2d",
    "pool:AvgPool2d", "fc:Linear", "k:Linear", "v:Linear", "rnn:LSTM",
)  # fmt: skip
CAFFE_LAYERS = _layers(
    "data:Input", "conv1:Convolution", "conv2:Convolution", "pool1:Pooling", "fc1:InnerProduct",
)  # fmt: skip
SEARCH = b"compress_ratio: 2 ascend_optimized: false max_prune_ratio: 0.8 test_iteration: 3\n"


def _config_readers() -> Iterator[tuple[str, Reader]]:
    torch_files = golden("config/pytorch*.cfg") + golden("schema/samples/*.cfg") + golden("amct/*/*.cfg")
    caffe_files = golden("config/caffe*.cfg") + golden("schema/samples/*.cfg")
    dialects: dict[str, tuple[Any, list[LayerInfo], tuple[bytes, ...]]] = {
        "pytorch": (PYTORCH, TORCH_LAYERS, torch_files),
        "pytorch retrain": (PYTORCH_QAT, TORCH_LAYERS, torch_files),
        "kv cache": (KV_CACHE, TORCH_LAYERS, golden("amct/kv_*/*.cfg")),
        "caffe": (CAFFE, CAFFE_LAYERS, caffe_files),
        "caffe retrain": (CAFFE_QAT, CAFFE_LAYERS, caffe_files),
    }
    for name, (dialect, layers, files) in dialects.items():
        yield from _dialect_readers(name, dialect, layers, tuple(each.replace(b"Optype", b"Conv2d") for each in files))
    prune = golden("config/pytorch_retrain*.cfg")
    yield "config compress", Reader("text", prune, lambda c, _: COMPRESSION.expand_config(c, "file", TORCH_LAYERS))
    read_search = partial(read_search_config, source="search.cfg", layers=TORCH_LAYERS, read_file=lambda _: prune[0])
    yield "config search", Reader("text", (SEARCH,), lambda content, _: read_search(content))


def _dialect_readers(
    name: str,
    dialect: Any,  # noqa: ANN401  a module
    layers: list[LayerInfo],
    files: tuple[bytes, ...],
) -> Iterator[tuple[str, Reader]]:
    """The readers of simple and full configs; full configs are made from the simple ones."""
    simple, full = [], []
    for content in (b"batch_num: 2\n", *files):
        try:
            full.append(dialect.expand_config(content, "file", layers).to_json().encode())
            simple.append(content)
        except AmctError:  # noqa: PERF203
            continue  # a sample of another dialect

    def plan(content: bytes, _: Path, read: Callable[..., Any]) -> object:
        config = read(content, "file", layers)
        return dialect.make_plan(config) if dialect is KV_CACHE else dialect.make_plan(config, layers)

    yield f"config {name} text", Reader("text", tuple(simple), partial(plan, read=dialect.expand_config))
    yield f"config {name} json", Reader("json", tuple(full), partial(plan, read=dialect.read_config))


def _record_readers(model: Model, folder: Path) -> Iterator[tuple[str, Reader]]:
    pytorch = golden("record/pytorch*.txt") + golden("schema/records/*.txt")
    binary = tuple(encode_record(parse_record(text), "binary") for text in golden("record/pytorch*.txt"))
    amct.caffe.quantize(*model.caffe, [model.data]).save(folder / "caffe", "record")
    caffe = ((folder / "caffe_quant_param_record.txt").read_bytes(), *golden("record/caffe*.txt"))
    caffe_binary = ((folder / "caffe_quant_param_record.bin").read_bytes(),)

    def read(content: bytes, folder: Path, ending: str) -> object:
        record = read_any_record(put(content, folder, f"record.{ending}"))
        chains = record.prune if isinstance(record, Record) else ()
        return format_record(record), [node.mask() for chain in chains for node in chain.nodes]

    yield "record text", Reader("text", pytorch + caffe, partial(read, ending="txt"))
    yield "record binary", Reader("protobuf", binary + caffe_binary, partial(read, ending="bin"))


# -- data --------------------------------------------------------------------------------------------------------------


def _first_samples(path: str, prepare: Preparation | None = None) -> list[Any]:
    return list(itertools.islice(open_samples(path, prepare), 8))


def _data_readers(folder: Path) -> Iterator[tuple[str, Reader]]:
    values = np.arange(96, dtype=np.float32).reshape(2, 3, 4, 4)

    def saved(write: Callable[[io.BytesIO], object]) -> bytes:
        stream = io.BytesIO()
        write(stream)
        return stream.getvalue()

    def samples(content: bytes, place: Path, name: str) -> object:
        return _first_samples(put(content, place, name))

    npy = tuple(saved(lambda s, t=t: np.save(s, values.astype(t))) for t in ("f4", "u1", ">f8", "i8", "?"))
    npz = (
        saved(lambda s: np.savez(s, images=values, labels=np.arange(2))),
        saved(lambda s: np.savez_compressed(s, x=values)),
    )
    yield "labels", Reader("zip", label_files(), partial(samples, name="x.npz"))
    yield "npy", Reader("bytes", npy, partial(samples, name="x.npy"))
    yield "npz", Reader("zip", npz, partial(samples, name="x.npz"))
    idx = struct.pack(">BBBBIII", 0, 0, 8, 3, 2, 3, 3) + bytes(range(18))
    yield "idx", Reader("bytes", (idx,), partial(samples, name="x-images-idx3-ubyte"))
    yield "idx gzip", Reader("gzip", (gzip.compress(idx),), partial(samples, name="x-images-idx3-ubyte.gz"))
    picture = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    pictures = tuple(saved(lambda s, f=f: picture.save(s, f)) for f in ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP"))
    yield "image", Reader("bytes", pictures, partial(samples, name="x.png"))
    (folder / "a.png").write_bytes(pictures[0])
    listed = f"{folder / 'a.png'} 1\n{folder / 'a.png'} 0\n".encode()
    yield "image list", Reader("text", (listed,), partial(samples, name="list.txt"))
    yield "list layer", Reader("text", (listed,), list_layer)
    write_lmdb(folder / "db", [(np.full((3, 4, 4), i, np.uint8), i) for i in range(40)])
    database = (folder / "db" / "data.mdb").read_bytes()
    yield "lmdb", Reader("bytes", (database,), partial(samples, name="x.mdb"))
    yield "database layer", Reader("bytes", (database,), database_layer)
    means = golden("caffe/io/*/*.binaryproto")
    yield "mean blob", Reader("protobuf", means, lambda c, at: read_mean(put(c, at, "mean.binaryproto")))
    yield (
        "mean array",
        Reader("bytes", (saved(lambda s: np.save(s, values[0])),), lambda c, at: read_mean(put(c, at, "mean.npy"))),
    )


# -- Caffe -------------------------------------------------------------------------------------------------------------


def _run_net(path: str, weights: str | None = None) -> object:
    net = amct_caffe.caffe.Net(path, amct_caffe.caffe.TEST, weights=weights)
    return net.forward()


def _caffe_readers(model: Model, folder: Path) -> Iterator[tuple[str, Reader]]:
    prototxt, caffemodel = model.caffe

    def load_weights(content: bytes, place: Path, name: str = "net.caffemodel") -> object:
        return _run_net(str(prototxt), put(content, place, name))

    def quantize(content: bytes, place: Path) -> object:
        data = [model.data]
        return amct.caffe.quantize(put(content, place, "net.prototxt"), caffemodel, data).save(place / "out")

    def inspect(content: bytes, place: Path) -> object:
        return model_layers(put(content, place, "net.prototxt"), None)

    nets = golden("caffe/layers/*.prototxt") + golden("caffe/nets/*.prototxt")
    yield "prototxt run", Reader("text", nets, lambda c, at: _run_net(put(c, at, "net.prototxt")))
    yield "prototxt inspect", Reader("text", nets, inspect)
    yield "prototxt quantize", Reader("text", (prototxt.read_bytes(),), quantize, weight=2)
    flow = folder / "flow"
    flow.mkdir()
    caffe_functions(model, flow)

    def calibrate(content: bytes, place: Path) -> object:
        put((flow / "record.txt").read_bytes(), place, "record.txt")
        own = content.replace(str(flow / "record.txt").encode(), str(place / "record.txt").encode())
        return _run_net(put(own, place, "modified.prototxt"), str(flow / "modified.caffemodel"))

    yield "prototxt modified", Reader("text", ((flow / "modified.prototxt").read_bytes(),), calibrate, weight=2)
    yield "caffemodel", Reader("protobuf", (caffemodel.read_bytes(),), load_weights)
    net = amct_caffe.caffe.Net(str(prototxt), str(caffemodel), amct_caffe.caffe.TEST)
    net.save_hdf5(str(folder / "net.h5"))
    yield "hdf5 weights", Reader("bytes", ((folder / "net.h5").read_bytes(),), partial(load_weights, name="net.h5"))
    yield from _solver_readers(folder)

    def data_layer(content: bytes, place: Path) -> object:
        put(content, place, "data.h5")
        (place / "list.txt").write_text(f"{place / 'data.h5'}\n")
        source = f'source: "{place / "list.txt"}" batch_size: 2'
        text = f'layer {{ name: "d" type: "HDF5Data" top: "x" top: "y" hdf5_data_param {{ {source} }} }}'
        return _run_net(put(text.encode(), place, "net.prototxt"))

    with h5py.File(folder / "data.h5", "w") as file:
        file["x"], file["y"] = np.zeros((4, 3), np.float32), np.zeros(4, np.float32)
    yield "hdf5 data", Reader("bytes", ((folder / "data.h5").read_bytes(),), data_layer)
    protos = golden("caffe_proto/*.proto")
    yield "custom proto", Reader("text", protos, lambda c, at: load_custom_schema(put(c, at, "custom.proto")))


def _solver_readers(folder: Path) -> Iterator[tuple[str, Reader]]:
    (folder / "train.prototxt").write_text(TRAINED)
    solver = SOLVER.format(folder / "train.prototxt", folder / "trained")
    (folder / "solver.prototxt").write_text(solver)
    states = {}
    for ending, form in (("solverstate", "BINARYPROTO"), ("solverstate.h5", "HDF5")):
        (folder / "form.prototxt").write_text(solver + f"snapshot_format: {form}\n")
        trained = amct_caffe.caffe.SGDSolver(str(folder / "form.prototxt"))
        trained.step(1)
        trained.snapshot()
        states[ending] = (folder / f"trained_iter_1.{ending}").read_bytes()

    def restore(content: bytes, place: Path, ending: str) -> object:
        return amct_caffe.caffe.SGDSolver(str(folder / "solver.prototxt")).restore(put(content, place, f"x.{ending}"))

    def make(content: bytes, place: Path) -> object:
        return amct_caffe.caffe.get_solver(put(content, place, "solver.prototxt"))

    trained_net = str(folder / "train.prototxt").encode()
    solvers = [text.replace(b"net.prototxt", trained_net) for text in golden("caffe/train/*/solver.prototxt")]
    yield "solver", Reader("text", (solver.encode(), *solvers), make)
    yield "solverstate", Reader("protobuf", (states["solverstate"],), partial(restore, ending="solverstate"))
    yield "solverstate hdf5", Reader("bytes", (states["solverstate.h5"],), partial(restore, ending="solverstate.h5"))


TRAINED = """\
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 2 dim: 4 } shape { dim: 2 } data_filler { type: "constant" value: 1 } data_filler { value: 0 } } }
layer { name: "fc" type: "InnerProduct" bottom: "data" top: "fc"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" top: "loss" }
"""
SOLVER = 'net: "{}" base_lr: 0.1 momentum: 0.9 lr_policy: "fixed" max_iter: 2 snapshot_prefix: "{}"\n'


# -- ONNX and what is written beside models ----------------------------------------------------------------------------


def _onnx_readers(model: Model, folder: Path) -> Iterator[tuple[str, Reader]]:
    sound = model.onnx.read_bytes()

    def quantize(content: bytes, place: Path) -> object:
        return amct.onnx_model.quantize(put(content, place, "net.onnx"), [model.data]).save(place / "out")

    def inspect(content: bytes, place: Path) -> object:
        return model_layers(put(content, place, "net.onnx"), None)

    yield "onnx inspect", Reader("protobuf", (sound,), inspect)
    yield "onnx quantize", Reader("protobuf", (sound,), quantize, weight=2)
    config, modified, record = (str(folder / name) for name in ("config.json", "modified.onnx", "record.txt"))
    module, data = model.torch_module(), model.torch_data()
    amct_pytorch.create_quant_config(config, module, data)
    amct_pytorch.quantize_model(config, modified, record, module, data)(data)

    def save(content: bytes, place: Path) -> object:
        return amct_pytorch.save_model(put(content, place, "modified.onnx"), record, str(place / "out"))

    yield "modified onnx", Reader("protobuf", (Path(modified).read_bytes(),), save, weight=2)
    yield from _files_beside(model, folder)


def _files_beside(model: Model, folder: Path) -> Iterator[tuple[str, Reader]]:
    files = amct.onnx_model.quantize(str(model.onnx), [model.data]).save(folder / "onnx")
    factors = folder / "onnx_record.txt.qdq.json"
    written = {path.name: path.read_bytes() for path in files}
    document = (folder / "onnx_quant.json").read_bytes()

    def report(content: bytes, place: Path) -> object:
        for name, each in written.items():
            put(each, place, name)
        read_quant_json(Path(put(content, place, "onnx_quant.json")))
        return amct.onnx_model.compare(str(model.onnx), place / "onnx_qdq_model.onnx", [model.data])

    record = folder / "record.txt"  # of the modified ONNX file

    def kept_batch(content: bytes, place: Path) -> object:
        put(record.read_bytes(), place, record.name)
        put(content, place, batch_path(record).name)
        return batch_beside(place / record.name, declared_inputs(onnx.load(str(model.onnx))))

    yield "kept batch", Reader("zip", (batch_path(record).read_bytes(),), kept_batch)

    def progress(content: bytes, place: Path) -> object:
        put(content, place, progress_path(place / "record.txt").name)
        return read_progress(place / "record.txt")

    def notice(content: bytes, place: Path) -> None:
        put(content, place, ".amct-00000000-1-1-000000000001.journal")
        put(b"", place, "file")
        check_whole(place / "file")

    yield "quant.json", Reader("json", (document,), report, weight=2)
    yield (
        "tensor factors",
        Reader("json", (factors.read_bytes(),), lambda c, at: read_tensor_qparams(put(c, at, "f.json"))),
    )
    sound_progress = b'{"version": 1, "layers": {"conv": [1, 2], "fc": [2, 2]}}'
    yield "progress", Reader("json", (sound_progress,), progress)
    yield "notice", Reader("json", (b'{"version": 2, "files": ["file", "other"]}',), notice, weight=2)


def all_readers(folder: Path) -> dict[str, Reader]:
    """All readers; sound files that the tests do not have are written to a folder first."""
    model = Model(folder, 1)
    parts: Iterable[Iterator[tuple[str, Reader]]] = (
        _config_readers(),
        _record_readers(model, folder),
        _data_readers(folder),
        _caffe_readers(model, folder),
        _onnx_readers(model, folder),
        checkpoint_readers(model, folder),
        command_readers(model, folder),
    )
    return dict(itertools.chain.from_iterable(parts))
