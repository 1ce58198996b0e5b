"""Loads the state of a trained model from a checkpoint file, ours or one that AMCT itself has written.

AMCT wraps a layer, ``<layer>.quant_module.replaced_module.weight`` (with 2:4 sparsity alone
``<layer>.replaced_module.weight``), moves the batch norm behind it to ``<layer>.bn_module``, and keeps clips, learned
scales and masks beside them. What follows from these (recorded scales, offsets, flags) is left out.
"""

from __future__ import annotations

import os
import pickletools
import re
import zipfile
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from amct.errors import AmctError, CheckpointError, MissingFileError, TrainingError, did_you_mean
from amct.memory import gibibytes
from amct.pytorch.qat.layers import quantized_layers
from amct.pytorch.qat.quantizers import BITS, ActivationQuantizer, is_observation

if TYPE_CHECKING:
    from torch import nn

_PREFIX = "module."
_SHOWN = 4
_MOST_GROWTH = 16
"""A checkpoint that is larger than its file by this factor is refused; one that someone compressed is not."""
_ZIP = b"PK\x03\x04"
"""What a checkpoint begins with that torch reads as a zip archive."""
_OLD_FORMAT_PICKLES = 4
"""A checkpoint that is no zip archive begins with so many: a magic number, a version, the machine and the content."""
_NUMBERS = frozenset({"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"})
"""The opcodes of a pickle that hold a whole number."""


def load_state(model: nn.Module, file: str | os.PathLike[str], name: str | None) -> None:
    """Load the ``state_dict`` in a checkpoint into a model; nothing changes unless every entry fits.

    A checkpoint of a model inside DistributedDataParallel, with ``module.`` before every name, fits too, and so does
    one that AMCT itself has written. Where the lower clip of the checkpoint is not 0, it is trained here as well.

    Args:
        model: The model with its quantizers.
        file: The checkpoint. Only tensors and plain containers are read from it, no code is run.
        name: The key of the ``state_dict``, where the checkpoint holds more.

    Raises:
        MissingFileError: There is no such file.
        CheckpointError: The checkpoint has no entry ``name``.
        TrainingError: It is no checkpoint, or belongs to another model or config.
    """
    state = _read(file, name)
    if state and all(key.startswith(_PREFIX) for key in state):
        state = {key.removeprefix(_PREFIX): value for key, value in state.items()}
    by_amct = is_amct_state(state)
    if by_amct:
        state = from_amct_state(model, state)
    own = model.state_dict()
    problems = _problems(own, state)
    if problems:
        whose = " (a checkpoint of AMCT)" if by_amct else ""
        raise TrainingError(
            f"{os.fspath(file)}{whose} does not fit {type(model).__name__}: {'; '.join(problems)}. Restore with the "
            "config and the model that the checkpoint was trained with"
        )
    for name, module in model.named_modules():
        if isinstance(module, ActivationQuantizer) and bool(state.get(f"{name}.clip_min", 0)):
            module.free_min()
    try:
        model.load_state_dict(state)
    except AmctError:
        raise
    except Exception as error:  # of a module's own state, which only its code can read
        raise TrainingError(f"{os.fspath(file)} does not fit {type(model).__name__}: {error}") from error


def _read(file: str | os.PathLike[str], name: str | None) -> dict[str, Any]:
    path = os.fspath(file)
    if not os.path.exists(path):  # noqa: PTH110  the path as the user gave it
        raise MissingFileError(f"{path} does not exist; expected a checkpoint")
    try:
        _refuse_bomb(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        what = next(iter(str(error).splitlines()), "no more is known")
        raise TrainingError(
            f"{path} is no checkpoint that can be read safely ({type(error).__name__}: {what}); "
            "save model.state_dict(), or a dict that holds it, with torch.save"
        ) from error
    if name is not None:
        if not isinstance(content, Mapping) or name not in content:
            keys = [str(key) for key in content] if isinstance(content, Mapping) else []
            raise CheckpointError(
                f'{path} has no entry "{name}"; it has {", ".join(keys[:_SHOWN]) or "none"}.{did_you_mean(name, keys)}'
            )
        content = content[name]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        keys = [str(key) for key in content][:_SHOWN] if isinstance(content, Mapping) else []
        hint = f"; it has {', '.join(keys)}: name the right one by state_dict_name" if keys else ""
        raise TrainingError(f"{path} holds no state_dict{hint}")
    wrong = [key for key, value in content.items() if not isinstance(key, str) or not _is_plain(value)]
    if wrong:
        raise TrainingError(f"{path} holds no state_dict: {wrong[0]!r} is no name of a tensor with values")
    return dict(content)


def _refuse_bomb(path: str) -> None:
    """Refuse a file that becomes many times larger in memory, before torch reads it: torch.save compresses nothing."""
    most = _MOST_GROWTH * os.path.getsize(path)  # noqa: PTH202  the path as the user gave it
    with open(path, "rb") as stream:  # noqa: PTH123  as above
        if stream.read(len(_ZIP)) != _ZIP:
            stream.seek(0)
            for _ in range(_OLD_FORMAT_PICKLES):
                _refuse_claims(stream, most)
            return
    with zipfile.ZipFile(path) as archive:
        _refuse_more(sum(entry.file_size for entry in archive.infolist()), most)
        for name in archive.namelist():
            if name.endswith(".pkl"):
                with archive.open(name) as stream:
                    _refuse_claims(stream, most)


def _refuse_claims(stream: IO[bytes], most: int) -> None:
    """Refuse a pickle that asks for more bytes than a file of its size can fill; nothing in it is run.

    A tensor refers to a storage by a tuple whose last number counts the elements: at least so many bytes. A bytearray
    is made of zeros by its length alone, which may have been written anywhere before; no ``state_dict`` holds one.
    """
    number = 0
    for opcode, value, _ in pickletools.genops(stream):
        if opcode.name in _NUMBERS:
            number = value or 0
        elif opcode.name == "BINPERSID":
            _refuse_more(number, most)
        elif opcode.name == "BYTEARRAY8" or (opcode.name == "GLOBAL" and str(value).endswith(" bytearray")):
            raise ValueError("it holds a bytearray, which may be of any size")


def _refuse_more(size: int, most: int) -> None:
    if size > most:
        raise ValueError(f"it would take {gibibytes(size)} of memory")


def _is_plain(value: object) -> bool:
    """Whether a value is an ordinary tensor, or none at all, as the state that a module gives by code of its own."""
    if not isinstance(value, Tensor):
        return True
    return value.layout is torch.strided and not (value.is_quantized or value.is_meta or value.is_nested)


def _problems(own: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    missing = [key for key in own if key not in given and not key.endswith(f".{BITS}")]
    unknown = [key for key in given if key not in own and not is_observation(key)]
    shared = [key for key in own if key in given and isinstance(own[key], Tensor)]
    shapes = [f'"{key}" is no tensor' for key in shared if not isinstance(given[key], Tensor)]
    shapes += [
        f'"{key}" has shape {list(given[key].shape)}, expected {list(own[key].shape)}'
        for key in shared
        if isinstance(given[key], Tensor) and given[key].shape != own[key].shape
    ]
    shapes += [
        f'"{key}" has the type {given[key].dtype}, expected {own[key].dtype}'
        for key in shared
        if isinstance(given[key], Tensor) and given[key].is_complex() and not own[key].is_complex()
    ]
    found = _other_bits(own, given)
    if missing and all("quantizer." in key for key in missing) and not unknown:
        found.append(f"it is the state_dict of the float model, not of the trainable one: it lacks {_listed(missing)}")
    else:
        found += [f"it lacks {_listed(missing)}"] if missing else []
        found += [f"the model has no {_listed(unknown)}"] if unknown else []
    return [*found, *shapes[:_SHOWN]]


def _other_bits(own: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """The quantizers that were trained with another number of bits than the config has."""
    found = []
    for key in own:
        value = given.get(key)
        if key.endswith(f".{BITS}") and isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            trained, wanted = value.item(), own[key].item()
            if trained != wanted:
                name = key.removesuffix(f".{BITS}")
                found.append(f'"{name}" was trained with {trained:g} bits, the config has {wanted:g}')
    return found[:_SHOWN]


def _listed(keys: list[str]) -> str:
    rest = len(keys) - _SHOWN
    return ", ".join(f'"{key}"' for key in keys[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


# -- checkpoints of AMCT -----------------------------------------------------------------------------------------------


_WRAPPED = re.compile(r"(?P<layer>.+?)\.(?:quant_module\.)?replaced_module\.(?P<name>\w+)")
_NORM = re.compile(r"(?P<layer>.+?)\.bn_module\.(?P<name>\w+)")
_BESIDE = re.compile(r"(?P<layer>.+?)\.(?:quant_module\.|record_module\.)?(?P<name>\w+)")
_OURS: Mapping[str, tuple[str, ...]] = {
    "acts_clip_max": ("input_quantizer.clip_max",),
    "acts_clip_min": ("input_quantizer.clip_min",),
    "acts_clip_max_pre": ("input_quantizer.valid_max",),
    "acts_clip_min_pre": ("input_quantizer.valid_min",),
    "cur_batch": ("input_quantizer.batches",),
    "wts_scales": ("weight_quantizer.scale", "weight_quantizer.valid_scale"),
    "wts_mask": ("weight_mask",),
    "prune_cur_batch": ("mask_steps",),
    **dict.fromkeys(
        ("acts_offset", "acts_scale", "offset_w", "quant_layer_num", "s_rec_flag", "scale_w", "wts_offsets"), ()
    ),
}
"""What an entry beside a wrapped layer is called here; nothing for what is not needed."""


def is_amct_state(state: Mapping[str, Any]) -> bool:
    """Whether a ``state_dict`` is that of a model of AMCT."""
    return any(_WRAPPED.fullmatch(key) for key in state)


def from_amct_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A ``state_dict`` of AMCT's model by the names of ours; an entry that has no counterpart keeps its name.

    Layers that share one input quantizer take the clips of the first. Where fewer than ``batch_num`` batches have
    determined the clips, they begin anew.
    """
    own = model.state_dict()
    norms = _folded_norms(model)
    wrapped = {found["layer"] for key in state if (found := _WRAPPED.fullmatch(key))}
    result: dict[str, Any] = {}
    for key, value in state.items():
        inner, norm, beside = (pattern.fullmatch(key) for pattern in (_WRAPPED, _NORM, _BESIDE))
        if inner:
            result[f"{inner['layer']}.{inner['name']}"] = value
        elif norm and norm["layer"] in norms:
            result[f"{norms[norm['layer']]}.{norm['name']}"] = value
        elif beside and beside["layer"] in wrapped and beside["name"] in _OURS:
            names = [f"{beside['layer']}.{name}" for name in _OURS[beside["name"]]]
            result.update({name: _like(own[name], value) for name in names if name in own})
        else:
            result[key] = value
    return _with_begun_clips(model, own, result)


def _like(own: Tensor, value: Tensor) -> Tensor:
    """A value in the type of our entry, and in its shape where both hold one number."""
    fits = isinstance(value, Tensor) and value.numel() == own.numel() and value.is_complex() == own.is_complex()
    return value.reshape(own.shape).to(own.dtype) if fits else value


def _folded_norms(model: nn.Module) -> dict[str, str]:
    """The name of the batch norm behind each quantized layer."""
    names = {id(module): name for name, module in model.named_modules()}
    return {
        name: names[id(norm)]
        for name, layer in quantized_layers(model).items()
        if (norm := layer.weight_quantizer.norm) is not None
    }


def _with_begun_clips(model: nn.Module, own: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """AMCT counts on after ``batch_num`` batches; before that its clips are those of a single batch."""
    for name, layer in quantized_layers(model).items():
        key = f"{name}.input_quantizer"
        batches = state.get(f"{key}.batches")
        if not isinstance(batches, Tensor) or batches.numel() != 1:  # missing, or refused later
            continue
        if int(batches) < layer.activation.batch_num:
            state.update({each: own[each] for each in own if each.startswith(f"{key}.")})
        else:
            state[f"{key}.batches"] = torch.full_like(own[f"{key}.batches"], layer.activation.batch_num)
    return state
