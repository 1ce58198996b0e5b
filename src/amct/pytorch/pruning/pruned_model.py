"""The result of pruning: the smaller model, what was removed, and its way into files."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from markupsafe import Markup

from amct import atomic
from amct.errors import ArgumentError
from amct.export.request import FLOAT, SavePath, check_opset
from amct.printable import counted, escaped, printable, shortened
from amct.pytorch.inputs import torch_batches
from amct.pytorch.pruning.saving import FloatFiles, save_float
from amct.pytorch.pruning.sparse import mask_records, sparse_layers
from amct.pytorch.pruning.timing import Stopwatch
from amct.pytorch.user_model import copy_model
from amct.report.measuring import check_metric
from amct.report.page import write_page
from amct.report.pruning import PruningNumbers, count_text, pruning_content

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from torch import nn

    from amct.model import Skip
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.inputs import IoOptions
    from amct.pytorch.pruning.removal import Cost
    from amct.record import Record
    from amct.report.measuring import Metric

STATE_FILE = "state.pth"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PrunedModel:
    """A pruned model.

    Attributes:
        model: The smaller model, an ordinary module to be trained; with 2:4 sparsity, one with masks.
        record: The removed channels and the masks, in AMCT's form.
        skipped: Every layer that was not pruned, with the reason.
        channels: The numbers of output channels of every layer that makes some, before and after.
        before: Parameters and multiply-accumulate operations of the whole model.
        after: Those of the smaller model.
        original: The trace of the whole model.
        config: The settings, as text.
        io: Names and dynamic axes of exported files.
    """

    model: nn.Module
    record: Record
    skipped: tuple[Skip, ...]
    channels: Mapping[str, tuple[int, int]]
    before: Cost
    after: Cost
    original: Traced
    config: str
    io: IoOptions

    _counted: ClassVar[str] = "channels"

    def summary(self) -> str:
        """What was removed, what was not and why, as text."""
        pruned = {name: pair for name, pair in self.channels.items() if pair[0] != pair[1]}
        lines = [f"{type(self.model).__name__}: {self._what(len(pruned))}"]
        lines.append(f"  parameters  {count_text(self.before.parameters)} → {count_text(self.after.parameters)}")
        lines.append(f"  MACs        {count_text(self.before.macs)} → {count_text(self.after.macs)}")
        lines += self._more_lines()
        names = [escaped(shortened(name)) for name in pruned]
        width = max((len(name) for name in [*names, *(skip.layer for skip in self.skipped)]), default=0)
        lines += [
            f"  {name:<{width}}  {a} → {b} {self._counted}" for name, (a, b) in zip(names, pruned.values(), strict=True)
        ]
        if self.skipped:
            lines.append(f"{counted(len(self.skipped), 'layer')} left unchanged:")
            lines += [f"  {escaped(shortened(skip.layer)):<{width}}  {skip.reason}" for skip in self.skipped]
        return printable("\n".join(lines))

    def _what(self, changed: int) -> str:
        sparse = sparse_layers(self.model)
        return (
            f"{counted(len(sparse), 'layer')} sparse (2:4)"
            if sparse
            else f"{changed} of {counted(len(self.channels), 'layer')} pruned"
        )

    def _more_lines(self) -> list[str]:
        """What else the summary says of the whole model."""
        return []

    def __repr__(self) -> str:
        """The first line of the summary."""
        return f"<{self.summary().splitlines()[0]}>"

    def _repr_html_(self) -> str:
        """The summary in a notebook."""
        return str(Markup("<pre>{}</pre>").format(self.summary()))

    def save(self, path: str | os.PathLike[str], *, opset: int | None = None) -> list[Path]:
        """Write ``<path>_float_model.onnx``, ``<path>_record.txt``, ``<path>_state.pth`` and ``<path>_quant.json``.

        The ONNX file is float, with batch norms folded and removed weights zero; it is run and compared with the model.
        The state is that of ``model``, for ``restore_pruned``.

        Args:
            path: ``folder/prefix``.
            opset: 16 to 21; None: 18.

        Raises:
            ArgumentError: An impossible path or opset.
            ExportError: The model cannot be exported, or the file cannot be used; nothing was saved.
            FileError: A file cannot be written; nothing was.
        """
        if opset is not None:
            check_opset(opset)
        where = SavePath.parse(path)
        atomic.check_writable(where.folder)
        stream = io.BytesIO()
        torch.save(self.model.state_dict(), stream)
        return save_float(
            self.model,
            where,
            self._example,
            self.io,
            replace(
                self._files(),
                formats=(FLOAT,),
                others={**self._files().others, STATE_FILE: stream.getvalue()},
                opset=opset,
            ),
        )

    def _files(self) -> FloatFiles:
        """What a save writes beside the model and its state."""
        return FloatFiles(record=self._latest_record())

    def _latest_record(self) -> Record:
        """The record with the masks that the layers have now: training may have chosen others."""
        chains = [chain for chain in self.record.prune if chain.selective is None]
        return replace(self.record, prune=(*chains, *mask_records(self.model)))

    @property
    def _example(self) -> tuple[Any, ...]:
        inputs = self.original.inputs
        return (*inputs.args, inputs.kwargs)

    @cached_property
    def _stopwatch(self) -> Stopwatch:
        return Stopwatch(self.original, self.io)

    def latency(self) -> tuple[float, float]:
        """Seconds of one run of the whole and of the pruned model in onnxruntime, on the example input.

        Raises:
            ExportError: One of them cannot be exported.
        """
        return self._stopwatch.seconds(self.model)

    def report(
        self,
        path: str | os.PathLike[str],
        data: object = None,
        metric: Metric | None = None,
        *,
        files: Iterable[str | os.PathLike[str]] = (),
    ) -> Path:
        """Write what was removed, and parameters, operations and latency before and after, as one HTML file.

        Args:
            path: Of the HTML file.
            data: A tensor, an iterable of batches or a DataLoader, for the metric.
            metric: ``metric(output, batch) -> float``, the mean over one batch; batches count as much as they have
                samples.
            files: Files whose sizes are shown, such as those that ``save`` returned.

        Raises:
            ArgumentError: A metric without data.
            ExportError: A model cannot be exported.
            FileError: The file cannot be written, or one of ``files`` cannot be read.
        """
        check_metric(metric, data)
        where = Path(path)
        atomic.check_writable(where.parent)
        found = None if metric is None else self._measured(data, metric)
        content = pruning_content(
            type(self.model).__name__,
            self.channels,
            self.skipped,
            PruningNumbers(
                parameters=(self.before.parameters, self.after.parameters),
                macs=(self.before.macs, self.after.macs),
                seconds=self.latency(),
                metric=found,
            ),
            files=[Path(file) for file in files],
            config=self.config,
            counted=self._counted,
        )
        write_page(where, content)
        return where

    def _measured(self, data: object, metric: Metric) -> tuple[str, float, float]:
        """The metric of the whole and of the pruned model, averaged over samples."""
        models = [copy_model(self.original.model, share_tensors=True), copy_model(self.model)]
        sums, samples = [0.0, 0.0], 0
        for batch, (args, kwargs) in torch_batches(models[0], data).with_originals():
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            count = len(tensors[0]) if tensors and tensors[0].ndim else 1
            for place, model in enumerate(models):
                with torch.no_grad():
                    sums[place] += count * float(metric(model(*args, **kwargs), batch))
            samples += count
        if not samples:
            raise ArgumentError("data: there are no batches")
        return getattr(metric, "__name__", "metric"), sums[0] / samples, sums[1] / samples
