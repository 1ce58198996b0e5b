"""Readers of what a job gets besides models and data: checkpoints, labels, lists of pictures, and command lines."""

from __future__ import annotations

import contextlib
import io
import shutil
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torture import SPARSE_INT8

import amct_caffe.caffe
import amct_pytorch
from amct.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn
    from torture import Model

PRUNED = "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } }\n"
INT8 = "retrain_data_quant_config { ulq_quantize { } } retrain_weight_quant_config { arq_retrain { } }\n"
FACTORY = """\
from torch import nn
import numpy
def net(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
def needs(width): return net()
def nothing(): return None
def number(): return 3
def twice(width=2): return [net()] * width
whole = net()
"""


@dataclass(frozen=True)
class Reader:
    """A reader: the structure of its files, sound files, what is done with them, and how often it is tried."""

    structure: str
    files: tuple[bytes, ...]
    read: Callable[[bytes, Path], object]
    weight: int = 10


def put(content: bytes, folder: Path, name: str) -> str:
    """Write a damaged file."""
    (folder / name).write_bytes(content)
    return str(folder / name)


def _saved(state: object, *, legacy: bool = False) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _in_amct_form(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The entries of a trained model by the names that AMCT's own wrapping gives them."""
    names = {
        "input_quantizer.clip_max": "acts_clip_max",
        "input_quantizer.clip_min": "acts_clip_min",
        "input_quantizer.valid_max": "acts_clip_max_pre",
        "input_quantizer.valid_min": "acts_clip_min_pre",
        "input_quantizer.batches": "cur_batch",
    }
    found = {}
    for key, value in state.items():
        layer, _, rest = key.partition(".")
        if rest in ("weight", "bias"):
            found[f"{layer}.quant_module.replaced_module.{rest}"] = value
        elif rest in names:
            found[f"{layer}.quant_module.{names[rest]}"] = value
    return found


def _retraining(model: Model, folder: Path) -> tuple[nn.Module, Callable[[str], object]]:
    config, record = str(folder / "retrain.json"), str(folder / "retrain.txt")
    amct_pytorch.create_quant_retrain_config(config, model.torch_module(), model.torch_data())
    made = amct_pytorch.create_quant_retrain_model(config, model.torch_module(), record, model.torch_data())

    def restore(state: str) -> object:
        shutil.copy(record, "record.txt")
        args = (config, model.torch_module(), "record.txt", model.torch_data(), state)
        return amct_pytorch.restore_quant_retrain_model(*args)(model.torch_data())

    return made, restore


def _pruning(model: Model, folder: Path, text: str) -> tuple[nn.Module, Callable[[str], object]]:
    config, record = folder / "prune.cfg", str(folder / "prune.txt")
    config.write_text(text)
    given = (model.torch_data(), str(config), record)
    made = amct_pytorch.create_prune_retrain_model(model.torch_module(), *given)

    def restore(state: str) -> object:
        shutil.copy(record, "record.txt")
        args = (model.torch_module(), model.torch_data(), "record.txt", str(config), state)
        return amct_pytorch.restore_prune_retrain_model(*args)(model.torch_data())

    return made, restore


def _compression(model: Model, folder: Path, text: str) -> tuple[nn.Module, Callable[[str], object]]:
    config, record = folder / "compress.cfg", str(folder / "compress.txt")
    config.write_text(text)
    made = amct_pytorch.create_compressed_retrain_model(model.torch_module(), model.torch_data(), str(config), record)

    def restore(state: str) -> object:
        shutil.copy(record, "record.txt")
        args = (model.torch_module(), model.torch_data(), str(config), "record.txt", state)
        return amct_pytorch.restore_compressed_retrain_model(*args)(model.torch_data())

    return made, restore


def checkpoint_readers(model: Model, folder: Path) -> Iterator[tuple[str, Reader]]:
    """Checkpoints of training, pruning and both, in torch's two formats; one also by AMCT's names."""
    flows = {
        "retraining": _retraining(model, folder),
        "pruning": _pruning(model, folder, PRUNED),
        "sparsity": _compression(model, folder, SPARSE_INT8),
    }
    for name, (made, restore) in flows.items():
        made.train()(model.torch_data())
        state = dict(made.state_dict())

        def read(content: bytes, place: Path, restore: Callable[[str], object] = restore) -> object:
            return restore(put(content, place, "state.pth"))

        files = (_saved(state), _saved({key: value.half() for key, value in state.items()}))
        files += (_saved(_in_amct_form(state)),) if name == "retraining" else ()
        yield f"checkpoint {name}", Reader("zip", files, read, weight=4)
        yield f"old checkpoint {name}", Reader("bytes", (_saved(state, legacy=True),), read, weight=2)


# -- data --------------------------------------------------------------------------------------------------------------


def _npz(**arrays: object) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # type: ignore[arg-type]  # arrays, or what becomes one
    return stream.getvalue()


def label_files() -> tuple[bytes, ...]:
    """Files of samples with labels of which no class can be read, and some of which it can."""
    values = np.zeros((4, 3, 4, 4), np.float32)
    labels = (
        [0, 1, 2, 3], [0.5, np.nan, 1, np.inf], ["cat", "dog", "cat", "?"], np.zeros((4, 0)), np.zeros((4, 2, 2)), 3,
        [1, 2], np.zeros(4, complex), np.array([2**63, 1, 2, 3], np.uint64), np.array(["2020"] * 4, "datetime64[D]"),
    )  # fmt: skip
    return tuple(_npz(images=values, labels=np.array(each)) for each in labels)


def list_layer(content: bytes, place: Path) -> object:
    """An ImageData layer that reads a damaged list."""
    source = f'source: "{put(content, place, "list.txt")}" batch_size: 3'
    text = f'layer {{ name: "d" type: "ImageData" top: "x" top: "y" image_data_param {{ {source} }} }}'
    return _two_batches(text, place)


def database_layer(content: bytes, place: Path) -> object:
    """A Data layer that reads a damaged database, further than its first batch."""
    (place / "db").mkdir()
    put(content, place / "db", "data.mdb")
    source = f'source: "{place / "db"}" batch_size: 24 backend: LMDB'
    return _two_batches(f'layer {{ name: "d" type: "Data" top: "x" top: "y" data_param {{ {source} }} }}', place)


def _two_batches(text: str, place: Path) -> object:
    net = amct_caffe.caffe.Net(put(text.encode(), place, "net.prototxt"), amct_caffe.caffe.TEST)
    return net.forward(), net.forward()


# -- command lines -----------------------------------------------------------------------------------------------------

COMMANDS = """\
quantize net.onnx --data x.npy -o out/n
quantize net.onnx --data x.npy --batches 2 --batch-size 2 --report --formats qdq -o out/n
quantize net.prototxt net.caffemodel --data x.npz --batch-size 2 -o out/n
quantize nets.py:net --data x.npy -o out/n
quantize nets.py:whole --data list.txt --size 8 --mean 1,2,3 --scale 0.1 -o out/n
prune nets.py:net --input-shape 1,3,8,8 --ratio 0.5 --align 1 --data x.npy -o out/n
prune nets:net --input-shape 1,3,8,8 --sparse -o out/n
sensitivity net.onnx --data x.npy --batch-size 2
inspect nets.py:net --input-shape 2,3,8,8
inspect net.prototxt
compare net.onnx net.onnx --data x.npy --batch-size 2
report net.onnx net.onnx --data x.npy --batch-size 2 -o r.html
config check c.cfg --model net.prototxt
config explain c.cfg --model nets.py:net --input-shape 2,3,8,8
record show record.txt
caffe time --model net.prototxt --weights net.caffemodel
caffe to-onnx --model net.prototxt --weights net.caffemodel -o out/n.onnx
""".splitlines()


def command_line(content: bytes, place: Path, files: Path) -> int:
    """Run a command in a folder of sound files: one line of ours for bad input, whatever the user's own code raises."""
    shutil.copytree(files, place, dirs_exist_ok=True)
    words = [word for word in content.decode(errors="surrogateescape").split(" ") if word]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    found = [line for line in errors.getvalue().splitlines() if line.startswith("error: ")]
    if code not in (0, 1, 2) or (code == 2 and len(found) != 1):
        raise RuntimeError(f"exit code {code} with {errors.getvalue()!r}")
    return code


def command_files(model: Model, folder: Path) -> Path:
    """A folder with the files that the commands name."""
    folder.mkdir()
    shutil.copy(model.onnx, folder / "net.onnx")
    for path, name in zip(model.caffe, ("net.prototxt", "net.caffemodel"), strict=True):
        shutil.copy(path, folder / name)
    np.save(folder / "x.npy", model.data)
    np.savez(folder / "x.npz", data=model.data, labels=np.arange(2))
    (folder / "nets.py").write_text(FACTORY)
    (folder / "c.cfg").write_text("batch_num: 2\n")
    (folder / "list.txt").write_text("missing.png 1\n")
    (folder / "record.txt").write_text("")
    return folder


def command_readers(model: Model, folder: Path) -> Iterator[tuple[str, Reader]]:
    """The command line."""
    files = command_files(model, folder / "commands")
    yield "command line", Reader("words", tuple(line.encode() for line in COMMANDS), partial(command_line, files=files))
