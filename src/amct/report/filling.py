"""The parts of a report that every front door fills alike: summary, files, config, versions."""

from __future__ import annotations

import platform
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import onnx
import onnxruntime
import torch

from amct import __version__
from amct.errors import FileError
from amct.report.content import Figure, FileSize, WeightRanges
from amct.report.measuring import OUTPUT

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from amct.report.measuring import Measured

LARGEST_OUTPUTS = 4


def file_sizes(files: Iterable[str | os.PathLike[str]]) -> tuple[FileSize, ...]:
    """The files with their sizes.

    Raises:
        FileError: one of them cannot be looked at.
    """
    return tuple(_file_size(Path(file)) for file in files)


def _file_size(path: Path) -> FileSize:
    try:
        return FileSize(name=path.name, size=path.stat().st_size)
    except OSError as error:
        raise FileError(f'files: cannot look at "{path}": {error.strerror}') from error


def measured_on(measured: Measured) -> str:
    """How much data the numbers come from."""
    return f"{measured.batches} batch{'es' if measured.batches > 1 else ''}"


def figures(measured: Measured, weight_bytes: tuple[float, float] = (0, 0)) -> Iterator[Figure]:
    """The summary: the metric, how alike the outputs are, the bytes of the weights before and after."""
    if measured.metric is not None:
        before, after = measured.metric
        yield Figure(label=measured.metric_name, before=f"{before:.4g}", after=f"{after:.4g}")
    for output in measured.outputs[:LARGEST_OUTPUTS]:
        alone = len(measured.outputs) == 1 or output.layer == OUTPUT
        cosine, sqnr = f"{output.cosine:.5f}", f"{output.sqnr:.1f} dB"
        yield Figure(label="cosine of both outputs" if alone else f"cosine of {output.layer}", after=cosine)
        yield Figure(label="SQNR of the output" if alone else f"SQNR of {output.layer}", after=sqnr)
    before, after = weight_bytes
    if before:
        yield Figure(label="weights of the quantized layers", before=_size(before), after=_size(after))


def _size(number: float) -> str:
    return f"{number / 1e6:.3g} MB" if number >= 1e6 else f"{number / 1e3:.3g} kB"


def weight_ranges(parts: Iterable[Tensor]) -> WeightRanges | None:
    """Of matrices whose rows are the output channels, one after the other; None when there is none."""
    minima: list[float] = []
    maxima: list[float] = []
    for rows in parts:
        minimum, maximum = torch.aminmax(rows.float(), dim=1)
        minima += minimum.tolist()
        maxima += maximum.tolist()
    return WeightRanges(minimum=tuple(minima), maximum=tuple(maxima)) if minima else None


def versions() -> tuple[tuple[str, str], ...]:
    """The programs that made the numbers."""
    return (
        ("amct", __version__),
        ("torch", torch.__version__),
        ("onnx", onnx.__version__),
        ("onnxruntime", onnxruntime.__version__),
        ("numpy", numpy.__version__),
        ("Python", platform.python_version()),
    )


def now() -> str:
    """When the report was made."""
    return datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
