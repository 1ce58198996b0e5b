"""Finds the layers of a model given on the command line: prototxt, ONNX file, Python reference or list of layers."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from amct.cli.model_pair import check_file
from amct.errors import ArgumentError, FileError, ParseError, Position, did_you_mean
from amct.memory import gibibytes, machine_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    import torch
    from torch import nn

    from amct.config.layers import LayerList

ONNX_ENDING = ".onnx"
_MOST_DIGITS = 18
LIST_FORM = 'two words a line, "name type"'


class Framework(str, Enum):
    """The framework whose config dialect is used."""

    pytorch = "pytorch"
    caffe = "caffe"


def model_layers(model: str, input_shape: str | None) -> tuple[Framework, LayerList]:
    """Return the config dialect and the layers of a model.

    Args:
        model: ``net.prototxt``, ``net.onnx`` (PyTorch dialect), ``package.module:factory``, or ``layers.txt`` with
            ``name type`` per line, whose dialect is detected from the types.
        input_shape: The shape of an example input, such as ``1,3,224,224``; required for a Python reference.

    Raises:
        ArgumentError: ``model`` is none of these, or the input shape of a Python reference is missing.
        FileError: The file does not exist.
    """
    path = Path(model)
    if is_prototxt(model):
        check_file(model)  # before torch is imported
        from amct.caffe.prototxt import layer_list

        return Framework.caffe, layer_list(path)
    if path.suffix == ".txt":
        return _listed(path)
    if path.suffix == ONNX_ENDING:
        from amct.onnx_model.layers import find_all_layers
        from amct.onnx_model.reading import read_model

        return Framework.pytorch, find_all_layers(read_model(path).model).config_layers()
    if ":" in model:
        return Framework.pytorch, _traced(model, input_shape)
    raise ArgumentError(
        'model: expected a .prototxt, an .onnx file, a Python reference "package.module:factory" or a list of layers '
        f'in a .txt file ({LIST_FORM}), got "{model}"'
    )


def is_prototxt(model: str) -> bool:
    """Whether a model is a prototxt, by its name."""
    return model.endswith((".prototxt", ".prototxt.txt"))


def _listed(path: Path) -> tuple[Framework, LayerList]:
    from amct.config.layers import CAFFE_TYPES, LayerInfo, LayerList

    layers = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) != 2:
            raise ParseError(f"expected {LIST_FORM}, got {len(words)} words", position=Position(str(path), number, 1))
        layers.append(LayerInfo(name=words[0], type=words[1]))
    is_caffe = any(layer.type in CAFFE_TYPES for layer in layers) and not any(
        layer.type in ("Conv1d", "Conv2d", "Conv3d", "Linear") for layer in layers
    )
    return (Framework.caffe if is_caffe else Framework.pytorch), LayerList(layers)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ParseError(f"{path}: expected text in UTF-8, got byte {error.object[error.start]:#x}") from error


def _traced(reference: str, input_shape: str | None) -> LayerList:
    from amct.pytorch.capture.cached_trace import cached_trace

    if input_shape is None:
        raise ArgumentError("--input-shape: a PyTorch model needs the shape of an example input, such as 1,3,224,224")
    example = example_input(input_shape)
    return cached_trace(load_reference(reference), example, all_layers=True, stored_weights=True).config_layers()


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse a shape such as ``1,3,224,224``.

    Raises:
        ArgumentError: The text is not a list of positive integers.
    """
    words = text.replace("x", ",").split(",")
    if not all(len(word) <= _MOST_DIGITS and word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ArgumentError(f'--input-shape: expected positive whole numbers such as 1,3,224,224, got "{text}"')
    return tuple(int(word) for word in words)


def example_input(shape: str) -> torch.Tensor:
    """Return zeros of a shape such as ``1,3,224,224``.

    Raises:
        ArgumentError: The text is not such a shape, or the input is larger than the memory.
    """
    import torch

    sizes = parse_shape(shape)
    needed = math.prod(sizes) * torch.float32.itemsize
    if needed > machine_bytes():
        raise ArgumentError(
            f"--input-shape: an input of {shape} has {gibibytes(needed)}, more than the {gibibytes(machine_bytes())} "
            "of memory of this machine"
        )
    return torch.zeros(sizes)


def check_reference(reference: str) -> None:
    """Check that the module of ``package.module:factory`` can be found, without importing it.

    Raises:
        ArgumentError: There is no such module.
    """
    name = reference.partition(":")[0]
    if _is_file_name(name):
        check_file(name)
        return
    top = name.partition(".")[0]
    with modules_of_the_working_directory():
        if not top or (top not in sys.modules and importlib.util.find_spec(top) is None):
            raise _no_module(top, reference)


def _is_file_name(module: str) -> bool:
    return module.endswith(".py")


@contextmanager
def modules_of_the_working_directory() -> Iterator[None]:
    """Find modules in the working directory too, behind installed ones: a file there must not replace a package."""
    folder = str(Path.cwd())
    sys.path.append(folder)
    try:
        yield
    finally:
        del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]


def _no_module(name: str | None, reference: str, argument: str = "model") -> ArgumentError:
    return ArgumentError(f'{argument}: the Python module "{name}" was not found (looked for "{reference}")')


def load_reference(reference: str) -> nn.Module:
    """Return the model of ``package.module:factory`` or ``file.py:factory``; the factory is called without arguments.

    Raises:
        ArgumentError: The module or its attribute does not exist, or is no factory or ``torch.nn.Module``.
        FileError: The file does not exist.
    """
    module_name, _, attribute = reference.partition(":")
    module = import_module(module_name, "model", reference)
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, [name for name in vars(module) if not name.startswith("_")])
        raise ArgumentError(f'model: "{module_name}" has no "{attribute}".{hint}')
    from torch import nn

    found = getattr(module, attribute)
    model = found if isinstance(found, nn.Module) or not callable(found) else _made(found, reference)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f'model: "{reference}" gives a {type(model).__name__}, expected a torch.nn.Module')
    return model


def import_module(name: str, argument: str, reference: str = "") -> ModuleType:
    """Import ``package.module`` or ``file.py``; modules of the working directory are found behind installed ones.

    Args:
        name: The module.
        argument: The argument that names it, for errors.
        reference: The whole argument, if it is more than the module.

    Raises:
        ArgumentError: It is not found.
        FileError: The file does not exist.
    """
    if _is_file_name(name):
        return _module_of_file(Path(name))
    if not name or name.startswith("."):
        raise _no_module(name, reference or name, argument)
    try:
        with modules_of_the_working_directory():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _no_module(error.name, reference or name, argument) from error


def _module_of_file(path: Path) -> ModuleType:
    """Run a file as a module of its stem, which is found again by that name unless another module has it."""
    check_file(str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        raise
    return module


def _made(factory: Callable[[], object], reference: str) -> object:
    """Call a factory; what is written in C, such as ``os.system``, makes no model and is not called."""
    if inspect.isbuiltin(factory):
        raise ArgumentError(f'model: "{reference}" is a function of Python itself, expected one that makes a model')
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError) as error:  # ValueError: a class without a signature
        raise ArgumentError(
            f'model: "{reference}" cannot be called without arguments ({error}): write a function without arguments '
            "that returns the model, and give its name"
        ) from error
    return factory()
